-- Errors name the next step: what the graph allows, which function, which id.
\set SHOW_CONTEXT never
-- \df+ tells whom a function is for, and in a few lines
SELECT p.oid::regprocedure, obj_description(p.oid)
FROM pg_proc p,
     LATERAL (SELECT CASE prokind WHEN 'p' THEN 'EXECUTE ON PROCEDURE ' ELSE 'EXECUTE ON FUNCTION ' END || p.oid::regprocedure AS privilege) x,
     LATERAL (SELECT privilege IN (SELECT idempotency.privileges_of('usage')) AS app,
                     privilege IN (SELECT idempotency.privileges_of('admin')) AS admin) y
WHERE p.pronamespace = 'idempotency'::regnamespace
  AND (obj_description(p.oid) IS NULL OR length(obj_description(p.oid)) > 270
       OR obj_description(p.oid) !~ CASE
            WHEN p.prorettype = 'trigger'::regtype OR p.proname = 'at_home' THEN '^internal: '
            WHEN app THEN '^(?!internal|admin)'
            WHEN admin THEN '^(admin|internal): '
            WHEN p.proname ~ '^((grant|revoke)_(usage|admin|owner)|distribute)$' THEN '^(?!internal|admin)'
            ELSE '^internal: '
          END);
CREATE ROLE regress_hint;
SELECT idempotency.grant_usage('regress_hint');
SELECT idempotency.define_machine('hinted', '{"initial": ["A", "B"], "transitions": {"A": {"go": "C", "drop": "D"}, "B": ["C"], "C": {"go": "D"}}}');
SELECT idempotency.define_machine('nameless', '{"initial": "A", "transitions": {"A": ["B"]}}');
SELECT idempotency.define_machine('wide', (
  SELECT jsonb_build_object('initial', 's0', 'transitions', jsonb_build_object('s0', jsonb_agg('s' || i)))
  FROM generate_series(1, 11) i));
CREATE SCHEMA hint AUTHORIZATION regress_hint;
SET search_path = hint;
SET ROLE regress_hint;
CREATE TABLE t (a int, b int, state text, PRIMARY KEY (a, b));
INSERT INTO t VALUES (1, 1, 'A'), (1, 2, 'D'), (1, 3, 'B');
SELECT idempotency.attach_machine('t', 'state', 'hinted');

-- the moves, states and events that there are
SELECT idempotency.transition('t', '{"a": 1, "b": 1}', 'A', 'B');
SELECT idempotency.transition('t', '{"a": 1, "b": 1}', 'B', 'D');
SELECT idempotency.transition('t', '{"a": 1, "b": 2}', 'D', 'A');
SELECT idempotency.transition('t', '{"a": 1, "b": 1}', 'A', 'c');
SELECT idempotency.transition('t', '{"a": 1, "b": 1}', NULL, 'A');
SELECT idempotency.fire('t', '{"a": 1, "b": 1}', 'Go');
UPDATE t SET state = 'B' WHERE b = 1;
UPDATE t SET state = 'A' WHERE b = 2;
UPDATE t SET state = NULL WHERE b = 1;
INSERT INTO t VALUES (1, 4, 'C');

-- a list of edges or states ends somewhere
CREATE TABLE w (id int PRIMARY KEY, state text);
INSERT INTO w VALUES (1, 's0');
SELECT idempotency.attach_machine('w', 'state', 'wide');
SELECT idempotency.transition('w', 1, 's0', 's0');
SELECT idempotency.transition('w', 1, 's0', 's12');
SELECT idempotency.detach_machine('w', 'state');

-- a machine without events
INSERT INTO w VALUES (2, 'A');
DELETE FROM w WHERE id = 1;
SELECT idempotency.attach_machine('w', 'state', 'nameless');
SELECT idempotency.fire('w', 2, 'go');

-- rows off the graph, and null states
ALTER TABLE w DISABLE TRIGGER USER;
INSERT INTO w VALUES (3, 's9'), (4, NULL);
ALTER TABLE w ENABLE TRIGGER USER;
UPDATE w SET state = 'A' WHERE id = 3;
UPDATE w SET state = 'A' WHERE id = 4;
SELECT idempotency.transition('w', 3, NULL, 'B');
SELECT idempotency.transition('w', 4, 'A', 'B');

-- a trigger that stores another state
CREATE FUNCTION rewrite() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.state := 'D'; RETURN NEW; END $$;
CREATE TRIGGER rewrite BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION rewrite();
SELECT idempotency.transition('t', '{"a": 1, "b": 1}', 'A', 'C');
SELECT idempotency.transition('t', '{"a": 1, "b": 3}', 'B', 'C');

-- an id, changes, columns
SELECT idempotency.transition('t', '{"a": 1}', 'A', 'C');
SELECT idempotency.transition('t', '{"a": 1, "b": 1}', 'A', 'C', '[]');
SELECT idempotency.transition('t', '{"a": 1, "b": 1}', 'A', 'C', NULL, 'State');
CREATE TABLE bare (state text, version bigint NOT NULL, fence bigint);
SELECT idempotency.attach_machine('bare', 'state', 'nameless');
SELECT idempotency.attach_machine('bare', 'status', 'nameless');
SELECT idempotency.attach_version('bare', 'version');
SELECT idempotency.update_if('bare', 1, 1, NULL);
SELECT idempotency.attach_fence('bare', 'fence');
SELECT idempotency.attach_fence('bare', 'fence');
INSERT INTO bare VALUES ('A', 1, 1);
UPDATE bare SET fence = NULL;
SELECT idempotency.detach_fence('bare', 'version');
SELECT idempotency.detach_version('bare', 'fence');
SELECT idempotency.detach_machine('bare', 'state');

-- run() names the signature, for each way of naming the function
CREATE FUNCTION f(request json) RETURNS text LANGUAGE sql AS 'SELECT 1';
SELECT idempotency.run('hint', 'k', 'f');
SELECT idempotency.run('hint', 'k', 'f(jsonb)');
SELECT idempotency.run('hint', 'k', 'hint.g');
SELECT idempotency.run('hint', 'k', 'f(json)');

-- arguments
SELECT idempotency.claim(NULL, 'k');
SELECT idempotency.claim('hint', '');
SELECT idempotency.claim('idempotency.lock', 'k');
SELECT idempotency.claim('hint', 'k', ttl => '-1 s');
SELECT idempotency.claim('hint', 'k', wait => '-1 s');
SELECT idempotency.lease('hint', 'k', NULL);
SELECT idempotency.lease('hint', 'k', '-1 s');
SELECT idempotency.checkpoint('hint', 'k', 1, NULL);
SELECT idempotency.emit('hint', '{}', repeat('k', 513));
SELECT idempotency.ack_batch('{1,2}'::bigint[], '{1}'::bigint[]);

RESET ROLE;
SELECT idempotency.off_graph('bare');
DROP SCHEMA hint CASCADE;
SELECT idempotency.drop_machine(m) FROM unnest('{hinted,nameless,wide}'::text[]) m;
DROP OWNED BY regress_hint;
DROP ROLE regress_hint;
