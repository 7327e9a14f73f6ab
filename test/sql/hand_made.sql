-- Triggers that call our functions, put by hand on any column: refused
-- before a value is looked at.  All by a role with nothing but usage and TEMP.
\set VERBOSITY terse
\set SHOW_CONTEXT never
CREATE ROLE regress_hand;
SELECT idempotency.grant_usage('regress_hand');
SELECT idempotency.define_machine('hand', '{"initial": "A", "transitions": {"A": ["B"], "B": ["C"]}}');
CREATE SCHEMA hm AUTHORIZATION regress_hand;
SET search_path = hm, pg_temp;
SET SESSION AUTHORIZATION regress_hand;
CREATE FUNCTION code(command text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE command;
  RETURN 'none';
EXCEPTION WHEN OTHERS THEN
  RETURN SQLSTATE || ' ' || SQLERRM;
END $$;
CREATE FUNCTION sqlstate_of(command text) RETURNS text LANGUAGE sql AS $$SELECT left(code(command), 5)$$;

-- a version that is a bytea, with a forged header inside
CREATE TEMP TABLE x (b bytea, n int);
CREATE TRIGGER v1 BEFORE UPDATE OF b ON x FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version();
CREATE TRIGGER v2 BEFORE UPDATE ON x FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version();
INSERT INTO x VALUES ('\x007d000041414141', 0);
UPDATE x SET n = 1;
SELECT length(b) FROM x;
TRUNCATE x;
INSERT INTO x VALUES ('\x01034141414141414141', 0);
\set VERBOSITY default
UPDATE x SET n = 1;
UPDATE x SET b = b;
\set VERBOSITY terse
SELECT length(b) FROM x;
DROP TABLE x;
-- a text would have shown addresses, in a message and as the version
CREATE TEMP TABLE x (id int PRIMARY KEY, t text, m numeric);
INSERT INTO x VALUES (1, 'a', 1);
CREATE TRIGGER v1 BEFORE UPDATE OF t ON x FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version();
UPDATE x SET t = 'b';
DROP TRIGGER v1 ON x;
CREATE TRIGGER v1 BEFORE UPDATE OF m ON x FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version();
SELECT * FROM idempotency.update_if('x', 1, 1, '{"t": "b"}');
SELECT * FROM idempotency.update_if('x', 1, 1, NULL);
DROP TABLE x;

-- every type there is, arrays, domains, composites and ranges too: on which does it work?
CREATE DOMAIN d_bigint AS bigint;
CREATE DOMAIN d_text AS text;
CREATE DOMAIN d_bytea AS bytea;
CREATE TYPE e AS ENUM ('A', 'B');
CREATE DOMAIN d_e AS e;
CREATE TYPE c AS (a bigint, b text);
CREATE DOMAIN d_c AS c;
CREATE FUNCTION types() RETURNS SETOF text LANGUAGE sql AS $$
SELECT t.oid::regtype::text FROM pg_catalog.pg_type t
WHERE t.typtype <> 'p' AND t.typisdefined AND (t.typtype <> 'c' OR t.typrelid = 'hm.c'::regclass)
  AND (t.typnamespace IN ('pg_catalog'::regnamespace, 'hm'::regnamespace))
  AND (t.typelem = 0 OR t.typcategory <> 'A' OR (SELECT el.typtype NOT IN ('c', 'p') OR el.oid = 'hm.c'::regtype FROM pg_catalog.pg_type el WHERE el.oid = t.typelem)) $$;
-- a value of the type, as wild as it takes
CREATE FUNCTION put(type text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  value text;
BEGIN
  FOREACH value IN ARRAY ARRAY['\x01034141414141414141', '{"\x007d000041414141"}', '(4096,\x0112)', '[4096,5000)', '281474976710656', 'A', '1970-01-01', 'on', '(1,2)', '1'] LOOP
    BEGIN
      EXECUTE format('INSERT INTO x VALUES (1, $1::%s, 0)', type) USING value;
      RETURN;
    EXCEPTION WHEN OTHERS THEN NULL;
    END;
  END LOOP;
  EXECUTE 'INSERT INTO x (id, n) VALUES (1, 0)';
END $$;
CREATE FUNCTION outcome(type text, OUT state text, OUT version text, OUT fence text) LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE format('CREATE TEMP TABLE x (id int PRIMARY KEY, v %s, n int)', type);
  PERFORM put(type);
  CREATE TRIGGER a BEFORE UPDATE OF v ON x FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('hand', 'no history');
  CREATE TRIGGER b BEFORE UPDATE ON x FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state();
  state := concat_ws(' ', sqlstate_of('UPDATE x SET v = v'), sqlstate_of('UPDATE x SET n = 1'), sqlstate_of($c$SELECT idempotency.transition('x', 1, NULL, 'B')$c$));
  DROP TRIGGER a ON x;
  DROP TRIGGER b ON x;
  CREATE TRIGGER a BEFORE UPDATE OF v ON x FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version();
  CREATE TRIGGER b BEFORE UPDATE ON x FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version();
  version := concat_ws(' ', sqlstate_of('UPDATE x SET v = v'), sqlstate_of('UPDATE x SET n = 1'), sqlstate_of($c$SELECT idempotency.update_if('x', 1, 1, NULL)$c$));
  DROP TRIGGER a ON x;
  DROP TRIGGER b ON x;
  CREATE TRIGGER a BEFORE UPDATE OF v ON x FOR EACH ROW EXECUTE FUNCTION idempotency.guard_fence();
  CREATE TRIGGER b BEFORE UPDATE ON x FOR EACH ROW EXECUTE FUNCTION idempotency.guard_fence();
  fence := concat_ws(' ', sqlstate_of('UPDATE x SET v = v'), sqlstate_of('UPDATE x SET n = 1'));
  DROP TABLE x;
END $$;
SELECT count(*) > 150 AS many, bool_or(t LIKE '%[]') AS arrays FROM types() t;
SELECT t AS type, o.* FROM types() t, LATERAL outcome(t) o
WHERE concat_ws(' ', state, version, fence) <> trim(repeat('39P01 ', 8)) ORDER BY t COLLATE "C";

-- every other form that a trigger can have, on columns of the right types
CREATE TABLE form (id int PRIMARY KEY, state text DEFAULT 'A', version bigint NOT NULL DEFAULT 1, fence bigint DEFAULT 1, n int,
  ci text COLLATE "C", gs text GENERATED ALWAYS AS ('A') STORED, gv bigint GENERATED ALWAYS AS (1) STORED);
INSERT INTO form VALUES (1);
CREATE FUNCTION forms(create_trigger text, statement text DEFAULT 'UPDATE form SET id = id, state = state, version = version, fence = fence, n = 1')
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  result text;
BEGIN
  EXECUTE create_trigger;
  result := code(statement);
  SET CONSTRAINTS ALL IMMEDIATE;
  DROP TRIGGER t ON form;
  RETURN result;
END $$;
SELECT forms('CREATE TRIGGER t ' || c) = ANY (ARRAY[
    '39P01 function "guard_state" must be fired by a trigger that attach_machine() made',
    '39P01 function "guard_version" must be fired by a trigger that attach_version() made',
    '39P01 function "guard_fence" must be fired by a trigger that attach_fence() made']) AS refused, c FROM unnest(ARRAY[
  $$BEFORE UPDATE OF state ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('hand', 'no history')$$,
  $$BEFORE UPDATE OF version ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version()$$,
  $$BEFORE UPDATE OF fence ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_fence()$$,
  $$BEFORE UPDATE OF state, n ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('hand', 'no history')$$,
  $$BEFORE UPDATE OF state ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('hand', 'history')$$,
  $$AFTER UPDATE OF state ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('hand', 'no history')$$,
  $$BEFORE UPDATE OF state ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('hand', 'no history', 'more')$$,
  $$BEFORE UPDATE OF state ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state()$$,
  $$BEFORE UPDATE ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('hand', 'no history')$$,
  $$BEFORE UPDATE OF state ON form FOR EACH ROW WHEN (NEW.n > 0) EXECUTE FUNCTION idempotency.guard_state('hand', 'no history')$$,
  $$BEFORE UPDATE OF state ON form FOR EACH STATEMENT EXECUTE FUNCTION idempotency.guard_state('hand', 'no history')$$,
  $$AFTER UPDATE ON form FOR EACH STATEMENT EXECUTE FUNCTION idempotency.guard_state()$$,
  $$AFTER UPDATE ON form REFERENCING OLD TABLE AS o FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state()$$,
  $$BEFORE INSERT OR UPDATE ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state()$$,
  $$BEFORE UPDATE OF gs ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('hand', 'no history')$$,
  $$BEFORE UPDATE OF n ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version()$$,
  $$BEFORE UPDATE OF version, n ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version()$$,
  $$BEFORE UPDATE OF version ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version('x')$$,
  $$BEFORE UPDATE ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version('x')$$,
  $$AFTER UPDATE OF version ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version()$$,
  $$BEFORE UPDATE ON form FOR EACH STATEMENT EXECUTE FUNCTION idempotency.guard_version()$$,
  $$BEFORE INSERT OR UPDATE OF version ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version()$$,
  $$BEFORE UPDATE OF version ON form FOR EACH ROW WHEN (NEW.n > 0) EXECUTE FUNCTION idempotency.guard_version()$$,
  $$BEFORE UPDATE OF gv ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version()$$,
  $$BEFORE UPDATE OF n ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_fence()$$,
  $$BEFORE UPDATE OF fence, n ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_fence()$$,
  $$AFTER UPDATE OF fence ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_fence()$$,
  $$BEFORE UPDATE ON form FOR EACH STATEMENT EXECUTE FUNCTION idempotency.guard_fence()$$,
  $$BEFORE UPDATE OR DELETE ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_fence()$$,
  $$BEFORE UPDATE OF fence ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_fence('x')$$]) c;
SELECT forms('CREATE CONSTRAINT TRIGGER t ' || c) FROM unnest(ARRAY[
  $$AFTER UPDATE OF state ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('hand', 'history')$$,
  $$AFTER UPDATE ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version()$$,
  $$AFTER UPDATE OF fence ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_fence()$$]) c;
BEGIN;
CREATE CONSTRAINT TRIGGER t AFTER UPDATE OF state ON form DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('hand', 'history');
UPDATE form SET state = 'C';
COMMIT;
SELECT forms('CREATE TRIGGER t ' || c, s) FROM (VALUES
  ('BEFORE INSERT ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state()', 'INSERT INTO form VALUES (2)'),
  ('BEFORE DELETE ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state()', 'DELETE FROM form'),
  ('BEFORE DELETE ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version()', 'DELETE FROM form'),
  ('BEFORE INSERT ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_fence()', 'INSERT INTO form VALUES (2)'),
  ('BEFORE TRUNCATE ON form EXECUTE FUNCTION idempotency.guard_state()', 'TRUNCATE form')) v(c, s);
SELECT id, n FROM form;
CREATE VIEW seen AS SELECT * FROM form;
CREATE FUNCTION view_trigger(event text, function text, statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  result text;
BEGIN
  EXECUTE format('CREATE TRIGGER t INSTEAD OF %s ON seen FOR EACH ROW EXECUTE FUNCTION idempotency.%s()', event, function);
  result := code(statement);
  DROP TRIGGER t ON seen;
  RETURN result;
END $$;
SELECT view_trigger(e, f, s) FROM unnest('{guard_state,guard_version,guard_fence}'::text[]) f,
  (VALUES ('INSERT', 'INSERT INTO seen (id) VALUES (2)'), ('UPDATE', 'UPDATE seen SET version = 7'), ('DELETE', 'DELETE FROM seen'), ('UPDATE', $$SELECT idempotency.transition('seen', 1, 'A', 'B')$$)) v(e, s);
DROP VIEW seen;

-- one of them is enough: nothing is attached beside it, and what is refuses to work
SELECT idempotency.attach_version('form', 'version'), idempotency.attach_fence('form', 'fence'), idempotency.attach_machine('form', 'state', 'hand');
CREATE TRIGGER t BEFORE UPDATE OF n ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version();
SELECT code($$UPDATE form SET fence = 2$$), code($$SELECT idempotency.update_if('form', 1, 1, NULL)$$), code($$SELECT idempotency.attach_version('form', 'fence')$$);
DROP TRIGGER t ON form;
-- a second version column, by hand
CREATE TRIGGER zzz BEFORE UPDATE OF fence ON form FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version();
SELECT code($$UPDATE form SET fence = 2$$);
SELECT idempotency.detach_version('form', 'fence');
SELECT tgname FROM pg_trigger WHERE tgrelid = 'form'::regclass AND tgfoid = 'idempotency.guard_version'::regproc ORDER BY 1;
DROP TABLE form;

-- made by hand as attach_...() makes them, they work; the column may go
CREATE TABLE alike (id int PRIMARY KEY, gone int, v bigint NOT NULL DEFAULT 1, n int);
ALTER TABLE alike DROP COLUMN gone;
INSERT INTO alike VALUES (1);
CREATE TRIGGER z1 BEFORE UPDATE OF v ON alike FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version();
CREATE TRIGGER z2 BEFORE UPDATE ON alike FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version();
SELECT * FROM idempotency.update_if('alike', 1, 1, '{"n": 1}');
SELECT code('UPDATE alike SET v = 9'), code('ALTER TABLE alike ALTER v TYPE text');
ALTER TABLE alike DROP COLUMN v CASCADE;
UPDATE alike SET n = 2 RETURNING *;
ALTER TABLE alike ADD v bytea;
UPDATE alike SET v = '\x01034141414141414141' RETURNING *;
SELECT code($$SELECT idempotency.update_if('alike', 1, 1, '{"n": 1}')$$);
DROP TABLE alike;

-- partitions whose columns have other numbers; and a trigger of one of them alone
CREATE TABLE parted (id int, v bigint NOT NULL DEFAULT 1, f bigint, s text DEFAULT 'A', PRIMARY KEY (id)) PARTITION BY RANGE (id);
CREATE TABLE parted_1 (s text DEFAULT 'A', junk bytea, f bigint, v bigint NOT NULL DEFAULT 1, id int NOT NULL);
ALTER TABLE parted_1 DROP COLUMN junk;
ALTER TABLE parted ATTACH PARTITION parted_1 FOR VALUES FROM (0) TO (10);
SELECT idempotency.attach_version('parted', 'v'), idempotency.attach_fence('parted', 'f'), idempotency.attach_machine('parted', 's', 'hand', true);
CREATE TABLE parted_2 (f bigint, junk bytea, id int NOT NULL, s text DEFAULT 'A', v bigint NOT NULL DEFAULT 1);
ALTER TABLE parted_2 DROP COLUMN junk;
ALTER TABLE parted ATTACH PARTITION parted_2 FOR VALUES FROM (10) TO (20);
INSERT INTO parted (id, f) VALUES (1, 5), (11, 5);
SELECT id, code(format(c, id)) FROM unnest('{1,11}'::int[]) id, unnest(ARRAY['UPDATE parted SET f = 4 WHERE id = %s', 'UPDATE parted SET v = 9 WHERE id = %s', $$UPDATE parted SET f = 6, s = 'B' WHERE id = %s$$, 'UPDATE parted SET s = s WHERE id = %s']) WITH ORDINALITY u (c, n) ORDER BY id, n;
SELECT id, v, f, s FROM parted ORDER BY id;
ALTER TABLE parted_2 ADD CHECK (id > 9);
CREATE TRIGGER own BEFORE UPDATE OF s ON parted_2 FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version();
SELECT code($$UPDATE parted SET f = 7 WHERE id = 1$$), code($$UPDATE parted SET f = 7 WHERE id = 11$$);
DROP TABLE parted;

-- a statement keeps the triggers that it began with: one that was replaced
-- meanwhile is judged as it was
CREATE TABLE old (id int PRIMARY KEY, b bytea, v bigint NOT NULL DEFAULT 1, f bigint, n int, s text DEFAULT 'A');
INSERT INTO old VALUES (1, '\x01034141414141414141', 1, 1, 0);
CREATE FUNCTION replace() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  CREATE OR REPLACE TRIGGER z_version BEFORE UPDATE OF v ON old FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version();
  CREATE OR REPLACE TRIGGER z_fence BEFORE UPDATE OF f ON old FOR EACH ROW EXECUTE FUNCTION idempotency.guard_fence();
  CREATE OR REPLACE TRIGGER z_state BEFORE UPDATE OF s ON old FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('hand', 'no history');
  RETURN coalesce(NEW, OLD);
END $$;
CREATE TRIGGER a BEFORE UPDATE OR DELETE ON old FOR EACH ROW EXECUTE FUNCTION replace();
SET client_min_messages = warning;
CREATE FUNCTION stale(create_trigger text, statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  result text;
BEGIN
  DROP TRIGGER IF EXISTS z_version ON old;
  DROP TRIGGER IF EXISTS z_fence ON old;
  DROP TRIGGER IF EXISTS z_state ON old;
  EXECUTE create_trigger;
  RETURN code(statement);
END $$;
SELECT stale('CREATE TRIGGER ' || c, s) FROM (VALUES
  ('z_version BEFORE UPDATE OF b ON old FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version()', 'UPDATE old SET b = b'),
  ('z_version BEFORE DELETE ON old FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version()', 'DELETE FROM old'),
  ('z_fence BEFORE UPDATE OF b ON old FOR EACH ROW EXECUTE FUNCTION idempotency.guard_fence()', 'UPDATE old SET b = b'),
  ('z_fence AFTER UPDATE ON old EXECUTE FUNCTION idempotency.guard_fence()', 'UPDATE old SET b = b'),
  ('z_state BEFORE UPDATE OF n ON old FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state(''hand'', ''no history'')', 'UPDATE old SET n = n'),
  ('z_state AFTER UPDATE ON old EXECUTE FUNCTION idempotency.guard_state()', 'UPDATE old SET n = n')) v(c, s);
DROP TABLE old;
RESET client_min_messages;

-- columns that change their names while a guarded update looks at one of them
CREATE TABLE renamed (id int PRIMARY KEY, state text NOT NULL, evil bigint);
SELECT idempotency.attach_machine('renamed', 'state', 'hand');
INSERT INTO renamed VALUES (1, 'A', 4096), (2, 'A', 4096);
CREATE FUNCTION visible(id int) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  IF id = 1 AND EXISTS (SELECT FROM pg_attribute WHERE attrelid = 'hm.renamed'::regclass AND attname = 'evil') THEN
    ALTER TABLE renamed RENAME state TO was_state;
    ALTER TABLE renamed RENAME evil TO state;
    RAISE NOTICE 'nested: %', idempotency.transition('renamed', 2, 'B', 'C');
  END IF;
  RETURN true;
END $$;
ALTER TABLE renamed ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY p ON renamed USING (visible(id));
SELECT idempotency.transition('renamed', 2, 'B', 'C');
SELECT idempotency.transition('renamed', 1, 'B', 'C');
SELECT idempotency.transition('renamed', 2, 'A', 'B');
DROP TABLE renamed;

-- the functions that watch our own tables
RESET SESSION AUTHORIZATION;
CREATE TABLE form (id int PRIMARY KEY, n int);
INSERT INTO form VALUES (1, 1);
SELECT forms('CREATE TRIGGER t ' || c, s) FROM (VALUES
  ('BEFORE UPDATE ON form FOR EACH ROW EXECUTE FUNCTION idempotency.table_changed()', 'UPDATE form SET n = 1'),
  ('AFTER UPDATE ON form FOR EACH ROW EXECUTE FUNCTION idempotency.table_changed()', 'UPDATE form SET n = 1'),
  ('BEFORE DELETE ON form FOR EACH ROW EXECUTE FUNCTION idempotency.table_changed()', 'DELETE FROM form'),
  ('AFTER UPDATE ON form EXECUTE FUNCTION idempotency.table_changed()', 'UPDATE form SET n = 1')) v(c, s);
-- what the owner of our own tables can do to them
SET search_path = public;
BEGIN;
ALTER TABLE idempotency.machines ALTER definition TYPE bigint USING 4096;
SELECT idempotency.machine_diagram('hand');
ROLLBACK;
BEGIN;
ALTER TABLE idempotency.machines DROP COLUMN definition;
SELECT idempotency.machine_diagram('hand');
ROLLBACK;
BEGIN;
ALTER TABLE idempotency.keys DROP CONSTRAINT keys_pkey, ADD CONSTRAINT keys_pkey PRIMARY KEY (key, scope) INCLUDE (response, expires_at);
SELECT r.status, r.replayed FROM idempotency.run('hand', 'made', 'jsonb_pretty(jsonb)', '[1]') r;
SELECT r.status, r.replayed, r.response FROM idempotency.run('hand', 'made', 'jsonb_pretty(jsonb)', '[1]') r;
ROLLBACK;
-- a guard on one of them would have every call refuse the table
SELECT hm.code($$SELECT idempotency.attach_fence('idempotency.keys', 'fence')$$),
  hm.code($$SELECT idempotency.attach_version('idempotency.outbox', 'id')$$),
  hm.code($$SELECT idempotency.attach_machine('idempotency.machines', 'name', 'hand')$$);

SET client_min_messages = warning;
DROP SCHEMA hm CASCADE;
DELETE FROM idempotency.transition_log;
SELECT idempotency.drop_machine('hand');
SELECT idempotency.revoke_usage('regress_hand');
DROP ROLE regress_hand;
