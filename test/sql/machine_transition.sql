-- transition and fire: every outcome by its own case, with the caller's
-- privileges, row security and triggers.
\set VERBOSITY terse
\set SHOW_CONTEXT never
\pset null '(null)'
CREATE ROLE regress_mover;
CREATE ROLE regress_mover_other;
SELECT idempotency.grant_usage('regress_mover');
SELECT idempotency.grant_usage('regress_mover_other');
CREATE SCHEMA mt AUTHORIZATION regress_mover;
SELECT idempotency.define_machine('mt', '{"initial": "CREATED", "transitions": {
  "CREATED": {"pay": "PAID", "close": "CLOSED", "touch": "CREATED"},
  "PAID": {"refund": "REFUNDED", "close": "CLOSED"}}}');
SET ROLE regress_mover;
SET search_path = mt;
CREATE TABLE ord (id bigint PRIMARY KEY, status text NOT NULL, amount numeric(10,2), note varchar(5), paid_at timestamptz, tags text[]);
SELECT idempotency.attach_machine('ord', 'status', 'mt');
INSERT INTO ord SELECT i, 'CREATED' FROM generate_series(1, 30) i;

-- applied, already, conflict, not_found
SELECT * FROM idempotency.transition('ord', 1, 'CREATED', 'PAID');
SELECT * FROM idempotency.transition('ord', 1, 'CREATED', 'PAID');
SELECT * FROM idempotency.transition('ord', 1, 'CREATED', 'CLOSED');
SELECT * FROM idempotency.transition('ord', 999, 'CREATED', 'CLOSED');
-- from any state with an edge to the target
SELECT * FROM idempotency.transition('ord', 1, NULL, 'CLOSED');
SELECT * FROM idempotency.transition('ord', 1, NULL, 'CLOSED');
SELECT * FROM idempotency.transition('ord', 2, NULL, 'CLOSED');
SELECT * FROM idempotency.transition('ord', 2, NULL, 'REFUNDED');
SELECT * FROM idempotency.transition('ord', 999, NULL, 'REFUNDED');
-- a self-loop: applied each time it is asked for, never by a retry of another
SELECT * FROM idempotency.transition('ord', 3, 'CREATED', 'CREATED');
SELECT * FROM idempotency.transition('ord', 3, 'CREATED', 'CREATED');
SELECT * FROM idempotency.transition('ord', 3, NULL, 'CREATED');
SELECT * FROM idempotency.transition('ord', 2, 'CREATED', 'CREATED');
SELECT * FROM idempotency.fire('ord', 3, 'touch');
SELECT * FROM idempotency.transition('ord', 1, 'PAID', 'PAID');
-- fire: one source state, several, none from here
SELECT * FROM idempotency.fire('ord', 4, 'pay');
SELECT * FROM idempotency.fire('ord', 4, 'pay');
SELECT * FROM idempotency.fire('ord', 4, 'close');
SELECT * FROM idempotency.fire('ord', 4, 'close');
SELECT * FROM idempotency.fire('ord', 4, 'pay');
SELECT * FROM idempotency.fire('ord', 5, 'refund');
SELECT * FROM idempotency.fire('ord', 5, 'close');
SELECT * FROM idempotency.fire('ord', 999, 'pay');
SELECT * FROM idempotency.fire('ord', 999, 'close');

-- off the graph: an error, and nothing is written
SELECT idempotency.transition('ord', 6, 'CREATED', 'REFUNDED');
SELECT idempotency.transition('ord', 6, 'CREATED', 'created');
SELECT idempotency.transition('ord', 6, 'LOST', 'PAID');
SELECT idempotency.transition('ord', 6, NULL, 'LOST');
SELECT idempotency.fire('ord', 6, 'ship');
SELECT idempotency.fire('ord', 6, '');
SELECT idempotency.transition('ord', 6, 'CREATED', NULL);
SELECT idempotency.transition(NULL, 6, 'CREATED', 'PAID');
SELECT idempotency.transition('ord', NULL, 'CREATED', 'PAID');
SELECT idempotency.transition('ord', NULL::bigint, 'CREATED', 'PAID');
SELECT idempotency.fire('ord', 6, NULL);
SELECT idempotency.transition(0, 6, 'CREATED', 'PAID');
BEGIN READ ONLY;
SELECT idempotency.transition(0, 6, 'CREATED', 'PAID');
ROLLBACK;
SELECT idempotency.transition('ord', 6, 'CREATED', 'PAID', NULL, 'nosuch');
SELECT idempotency.transition('ord', 6, 'CREATED', 'PAID', NULL, 'note');
SELECT idempotency.transition('ord', 'six', 'CREATED', 'PAID');
SELECT idempotency.transition('pg_catalog.pg_class', 6, 'CREATED', 'PAID');
SELECT status FROM ord WHERE id = 6;

-- changes go into the same UPDATE
SELECT * FROM idempotency.transition('ord', 7, 'CREATED', 'PAID',
  jsonb_build_object('amount', 12.345, 'note', 'gift', 'tags', ARRAY['a', 'b,c'], 'paid_at', '2026-01-01 00:00Z'::timestamptz));
SELECT id, status, amount, note, paid_at AT TIME ZONE 'UTC' AS paid_at, tags FROM ord WHERE id = 7;
SELECT * FROM idempotency.transition('ord', 7, 'CREATED', 'PAID', '{"amount": 99}');
SELECT * FROM idempotency.fire('ord', 7, 'refund', '{"amount": null, "note": null}');
SELECT id, status, amount, note FROM ord WHERE id = 7;
SELECT * FROM idempotency.transition('ord', 8, 'CREATED', 'PAID', '{}');
SELECT idempotency.transition('ord', 9, 'CREATED', 'PAID', '{"nosuch": 1}');
SELECT idempotency.transition('ord', 9, 'CREATED', 'PAID', '{"ctid": "(0,1)"}');
SELECT idempotency.transition('ord', 9, 'CREATED', 'PAID', '{"status": "CLOSED"}');
SELECT idempotency.transition('ord', 9, 'CREATED', 'PAID', '[1]');
SELECT idempotency.transition('ord', 9, 'CREATED', 'PAID', '{"amount": "much"}');
SELECT idempotency.transition('ord', 9, 'CREATED', 'PAID', '{"note": "too long"}');
SELECT status FROM ord WHERE id = 9;

-- savepoints: what is undone can be done again
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idempotency.transition('ord', 9, 'CREATED', 'PAID');
ROLLBACK TO s;
SELECT outcome FROM idempotency.transition('ord', 9, 'CREATED', 'CLOSED');
COMMIT;
SELECT status FROM ord WHERE id = 9;
-- read-only, and in a failed transaction
BEGIN READ ONLY;
SELECT idempotency.transition('ord', 10, 'CREATED', 'PAID');
SELECT idempotency.transition('ord', 10, 'CREATED', 'PAID');
ROLLBACK;
-- many rows in one statement, and one row twice
SELECT outcome, count(*) FROM generate_series(10, 12) i, idempotency.transition('ord', i, 'CREATED', 'PAID') GROUP BY 1;
SELECT t.* FROM (VALUES (13, 'PAID'), (13, 'REFUNDED')) v (id, target), idempotency.transition('ord', v.id, NULL, v.target) t;

-- privileges are the caller's
SET ROLE regress_mover_other;
SELECT idempotency.transition('mt.ord', 14, 'CREATED', 'PAID');
SET ROLE regress_mover;
GRANT USAGE ON SCHEMA mt TO regress_mover_other;
SET ROLE regress_mover_other;
SELECT idempotency.transition('mt.ord', 14, 'CREATED', 'PAID');
SET ROLE regress_mover;
GRANT SELECT, UPDATE (status) ON ord TO regress_mover_other;
SET ROLE regress_mover_other;
SELECT * FROM idempotency.transition('mt.ord', 14, 'CREATED', 'PAID');
SELECT * FROM idempotency.transition('mt.ord', 14, 'CREATED', 'PAID');
SELECT idempotency.transition('mt.ord', 15, 'CREATED', 'PAID', '{"amount": 1}');
-- on the key and the state alone: every answer but one, which has to know the
-- row's version
SET ROLE regress_mover;
CREATE TABLE narrow (id int PRIMARY KEY, status text NOT NULL, secret text);
SELECT idempotency.attach_machine('narrow', 'status', 'mt');
INSERT INTO narrow SELECT i, 'CREATED' FROM generate_series(1, 4) i;
GRANT SELECT (id, status), UPDATE (status) ON narrow TO regress_mover_other;
CREATE FUNCTION swallow_3() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER swallow BEFORE UPDATE ON narrow FOR EACH ROW WHEN (NEW.id = 3) EXECUTE FUNCTION swallow_3();
SET ROLE regress_mover_other;
SELECT * FROM idempotency.transition('mt.narrow', 1, 'CREATED', 'PAID');
SELECT * FROM idempotency.transition('mt.narrow', 1, 'CREATED', 'PAID');
SELECT * FROM idempotency.transition('mt.narrow', 1, 'CREATED', 'CLOSED');
SELECT * FROM idempotency.transition('mt.narrow', 2, NULL, 'PAID');
SELECT * FROM idempotency.fire('mt.narrow', 2, 'close');
SELECT * FROM idempotency.transition('mt.narrow', 3, 'CREATED', 'PAID');
SELECT * FROM idempotency.transition('mt.narrow', 9, 'CREATED', 'PAID');
SET ROLE regress_mover;
ALTER TABLE narrow ENABLE ROW LEVEL SECURITY;
CREATE POLICY see ON narrow FOR SELECT USING (true);
SET ROLE regress_mover_other;
SELECT idempotency.transition('mt.narrow', 4, 'CREATED', 'PAID');
SET ROLE regress_mover;
GRANT SELECT (ctid, tableoid) ON narrow TO regress_mover_other;
SET ROLE regress_mover_other;
SELECT * FROM idempotency.transition('mt.narrow', 4, 'CREATED', 'PAID');

-- row security: hidden, visible but not to be updated, new row forbidden
SET ROLE regress_mover;
ALTER TABLE ord ENABLE ROW LEVEL SECURITY;
CREATE POLICY see ON ord FOR SELECT USING (id < 28);
CREATE POLICY upd ON ord FOR UPDATE USING (id < 25) WITH CHECK (status <> 'CLOSED');
SET ROLE regress_mover_other;
SELECT * FROM idempotency.transition('mt.ord', 20, 'CREATED', 'PAID');
SELECT * FROM idempotency.transition('mt.ord', 26, 'CREATED', 'PAID');
SELECT * FROM idempotency.transition('mt.ord', 26, NULL, 'PAID');
SELECT * FROM idempotency.fire('mt.ord', 26, 'close');
SELECT * FROM idempotency.transition('mt.ord', 29, 'CREATED', 'PAID');
SELECT idempotency.transition('mt.ord', 21, 'CREATED', 'CLOSED');
SET ROLE regress_mover;
-- the owner is not subject to it: the kept plans know who is calling
SELECT * FROM idempotency.transition('mt.ord', 26, 'CREATED', 'PAID');
ALTER TABLE ord DISABLE ROW LEVEL SECURITY;

-- triggers: one that swallows, one that rewrites, one that suppresses no-ops
CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.note = 'eat' THEN RETURN NULL; END IF;
  IF NEW.note = 'twist' THEN NEW.status := 'CLOSED'; END IF;
  IF NEW.note = 'lose' THEN NEW.status := 'LOST'; END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER swallow BEFORE UPDATE ON ord FOR EACH ROW EXECUTE FUNCTION swallow();
SELECT * FROM idempotency.transition('ord', 16, 'CREATED', 'PAID', '{"note": "eat"}');
SELECT * FROM idempotency.transition('ord', 16, NULL, 'PAID', '{"note": "eat"}');
SELECT * FROM idempotency.fire('ord', 16, 'pay', '{"note": "eat"}');
SELECT idempotency.transition('ord', 16, 'CREATED', 'PAID', '{"note": "twist"}');
SELECT idempotency.transition('ord', 16, 'CREATED', 'PAID', '{"note": "lose"}');
SELECT status, note FROM ord WHERE id = 16;
-- the same where the trigger has written a row before, and one of the very table
CREATE TABLE audit (id bigint, note text);
CREATE FUNCTION note_it() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.note IN ('twist', 'lose') THEN
    INSERT INTO audit VALUES (NEW.id, NEW.note);
    UPDATE ord SET amount = 1 WHERE id = 30;
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER note_it BEFORE UPDATE ON ord FOR EACH ROW EXECUTE FUNCTION note_it();
SELECT idempotency.transition('ord', 16, 'CREATED', 'PAID', '{"note": "twist"}');
SELECT idempotency.transition('ord', 16, 'CREATED', 'PAID', '{"note": "lose"}');
SELECT idempotency.fire('ord', 16, 'pay', '{"note": "lose"}');
DROP TRIGGER note_it ON ord;
CREATE TRIGGER z_min BEFORE UPDATE ON ord FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger();
SELECT * FROM idempotency.transition('ord', 16, 'CREATED', 'CREATED');
SELECT * FROM idempotency.transition('ord', 16, 'CREATED', 'CREATED', '{"amount": 1}');
-- the SQLSTATEs of all that
CREATE FUNCTION code(command text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE command;
  RETURN 'none';
EXCEPTION WHEN OTHERS THEN
  RETURN SQLSTATE;
END $$;
SELECT code('SELECT idempotency.' || c), c FROM unnest(ARRAY[
  $$transition('ord', 16, 'CREATED', 'REFUNDED')$$,
  $$transition('ord', 16, 'CREATED', 'LOST')$$,
  $$transition('ord', 16, NULL, 'LOST')$$,
  $$fire('ord', 16, 'ship')$$,
  $$transition('ord', 16, 'CREATED', 'PAID', '{"note": "twist"}')$$,
  $$transition('ord', 16, 'CREATED', 'PAID', '{"note": "lose"}')$$,
  $$fire('ord', 16, 'pay', '{"note": "lose"}')$$,
  $$transition('ord', 16, 'CREATED', NULL)$$,
  $$transition(NULL, 16, 'CREATED', 'PAID')$$,
  $$transition('pg_class', 16, 'CREATED', 'PAID')$$,
  $$transition('ord', 16, 'CREATED', 'PAID', NULL, 'note')$$,
  $$transition('ord', 16, 'CREATED', 'PAID', NULL, 'nosuch')$$,
  $$transition('ord', 16, 'CREATED', 'PAID', '{"nosuch": 1}')$$,
  $$transition('ord', 16, 'CREATED', 'PAID', '{"status": 1}')$$,
  $$transition('ord', 16, 'CREATED', 'PAID', '1')$$,
  $$transition('ord', 'x', 'CREATED', 'PAID')$$,
  $$transition(0, 16, 'CREATED', 'PAID')$$,
  $$transition('ord_pkey', 16, 'CREATED', 'PAID')$$,
  $$machine_diagram('nosuch')$$,
  $$attach_machine('ord', 'status', 'mt')$$,
  $$attach_machine('ord', 'amount', 'mt')$$,
  $$attach_machine('ord', 'note', 'mt')$$,
  $$detach_machine('ord', 'note')$$]) c;
DROP TRIGGER swallow ON ord;
DROP TRIGGER z_min ON ord;

-- where a row can go from here
SELECT * FROM idempotency.next_events('ord', 16) ORDER BY event;
SELECT * FROM idempotency.next_events('ord', '16'::text) ORDER BY event;
SELECT * FROM idempotency.next_events('ord', 7);
SELECT * FROM idempotency.next_events('ord', 999);
SELECT * FROM idempotency.next_events('ord', NULL);
SELECT * FROM idempotency.next_events('ord', 16, 'note');
SELECT * FROM idempotency.next_events('pg_class', 16);
BEGIN READ ONLY;
SELECT count(*) FROM idempotency.next_events('ord', 16);
COMMIT;
SET ROLE regress_mover_other;
SELECT count(*) FROM idempotency.next_events('mt.narrow', 9);
SELECT event FROM idempotency.next_events('mt.narrow', 3) ORDER BY event;
SET ROLE regress_mover;

-- several machines in one table: the column must be named
ALTER TABLE ord ADD "Delivery State" text NOT NULL DEFAULT 'CREATED';
SELECT idempotency.attach_machine('ord', 'Delivery State', 'mt');
SELECT idempotency.transition('ord', 17, 'CREATED', 'PAID');
SELECT * FROM idempotency.transition('ord', 17, 'CREATED', 'PAID', state_column => 'Delivery State');
SELECT * FROM idempotency.fire('ord', 17, 'close', state_column => 'status');
SELECT * FROM idempotency.fire('ord', 18, 'pay', '{"Delivery State": "PAID"}', 'status');
SELECT status, "Delivery State" FROM ord WHERE id IN (17, 18) ORDER BY id;
SELECT idempotency.detach_machine('ord', 'Delivery State');
SELECT * FROM idempotency.transition('ord', 19, 'CREATED', 'PAID');

-- an id that its type cannot hold is not that of another row
CREATE TABLE by_day (id date PRIMARY KEY, status text);
CREATE TABLE by_moment (id timestamp PRIMARY KEY, status text);
CREATE TABLE by_hour (id time PRIMARY KEY, status text);
CREATE TABLE by_weight (id float8 PRIMARY KEY, status text);
CREATE TABLE by_gram (id float4, part name, status text, PRIMARY KEY (id, part));
CREATE TABLE by_price (id numeric(10,2) PRIMARY KEY, status text);
CREATE TABLE by_code (id varchar(3) PRIMARY KEY, status text);
SELECT idempotency.attach_machine(t, 'status', 'mt') FROM unnest('{by_day,by_moment,by_hour,by_weight,by_gram,by_price,by_code}'::regclass[]) t;
INSERT INTO by_day VALUES ('2024-01-01', 'CREATED');
INSERT INTO by_moment VALUES ('2024-01-01 13:00', 'CREATED');
INSERT INTO by_hour VALUES ('13:00', 'CREATED');
INSERT INTO by_weight VALUES (9007199254740992, 'CREATED'), (0.1, 'CREATED');
INSERT INTO by_gram VALUES (16777216, repeat('x', 63), 'CREATED');
INSERT INTO by_price VALUES (1.23, 'CREATED');
INSERT INTO by_code VALUES ('abc', 'CREATED');
SELECT idempotency.transition('by_day', '2024-01-01 13:00'::timestamp, 'CREATED', 'PAID');
SELECT idempotency.transition('by_day', '2024-01-01 13:00', 'CREATED', 'PAID');
SELECT idempotency.transition('by_day', '"2024-01-01 13:00"'::jsonb, 'CREATED', 'PAID');
SELECT idempotency.fire('by_day', '2024-01-01 13:00'::timestamp, 'pay');
SELECT idempotency.next_events('by_day', '2024-01-01 13:00'::timestamp);
SELECT idempotency.transition('by_moment', '2024-01-01 13:00+11', 'CREATED', 'PAID');
SELECT idempotency.transition('by_hour', '2024-01-01 13:00'::timestamp, 'CREATED', 'PAID');
SELECT idempotency.transition('by_weight', 9007199254740993, 'CREATED', 'PAID');
SELECT idempotency.transition('by_weight', '0.1000000000000000055', 'CREATED', 'PAID');
SELECT idempotency.transition('by_gram', jsonb_build_object('id', 16777217, 'part', repeat('x', 63)), 'CREATED', 'PAID');
SELECT idempotency.transition('by_gram', jsonb_build_object('id', 16777216, 'part', repeat('x', 64)), 'CREATED', 'PAID');
SELECT idempotency.transition('by_price', 1.234, 'CREATED', 'PAID');
SELECT idempotency.transition('by_code', 'abcd', 'CREATED', 'PAID');
-- and what fits is
SELECT idempotency.transition('by_day', '2024-01-01 00:00'::timestamp, 'CREATED', 'PAID');
SELECT idempotency.transition('by_day', 'Jan 1 2024', 'CREATED', 'PAID');
SELECT idempotency.transition('by_moment', '2024-01-01'::date, 'CREATED', 'PAID');
SELECT idempotency.transition('by_moment', '2024-01-01 13:00:00.0', 'CREATED', 'PAID');
SELECT idempotency.transition('by_hour', '01:00 PM', 'CREATED', 'PAID');
SELECT idempotency.transition('by_weight', 9007199254740992, 'CREATED', 'PAID');
SELECT idempotency.transition('by_weight', 0.1, 'CREATED', 'PAID');
SELECT idempotency.transition('by_gram', jsonb_build_object('id', 16777216, 'part', repeat('x', 63)), 'CREATED', 'PAID');

-- an attribute that a composite type has no place for is not left out
CREATE TYPE place AS (street text, no int);
ALTER TABLE ord ADD place place, ADD places place[];
SELECT idempotency.transition('ord', 21, 'CREATED', 'PAID', '{"place": {"street": "x", "number": 1}}');
SELECT idempotency.transition('ord', 21, 'CREATED', 'PAID', '{"places": [{"street": "x"}, {"No": 1}]}');
SELECT idempotency.transition('ord', 21, 'CREATED', 'PAID', '{"place": {"street": "x"}, "places": [[{"no": 1}], [null]]}');
SELECT place, places FROM ord WHERE id = 21;

-- rows that inherit the table, from after the attach on, are out of its reach
CREATE TABLE heir () INHERITS (narrow);
INSERT INTO heir VALUES (77, 'CREATED');
SELECT idempotency.transition('narrow', 77, 'CREATED', 'PAID');
SELECT idempotency.next_events('narrow', 77);
DROP TABLE heir;
SELECT idempotency.transition('narrow', 77, 'CREATED', 'PAID');

-- two rows under one id: nothing is moved
CREATE TABLE twice (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, status text);
SELECT idempotency.attach_machine('twice', 'status', 'mt');
BEGIN;
INSERT INTO twice VALUES (1, 'CREATED'), (1, 'CREATED');
SELECT idempotency.transition('twice', 1, 'CREATED', 'PAID');
ROLLBACK;

-- renames, type changes, dropped and made again: seen by kept plans
SELECT * FROM idempotency.transition('ord', 22, 'CREATED', 'PAID');
ALTER TABLE ord RENAME status TO "the State";
ALTER TABLE ord RENAME id TO "Order Id";
ALTER TABLE ord RENAME TO "My Orders";
SELECT * FROM idempotency.transition('"My Orders"', 23, 'CREATED', 'PAID');
SELECT * FROM idempotency.fire('"My Orders"', 23, 'refund');
DROP POLICY see ON "My Orders";
DROP POLICY upd ON "My Orders";
ALTER TABLE "My Orders" ALTER "Order Id" TYPE text;
SELECT * FROM idempotency.transition('"My Orders"', 24, 'CREATED', 'PAID', '{"amount": 3}');
SELECT * FROM idempotency.transition('"My Orders"', '24', 'CREATED', 'PAID');
DROP TABLE "My Orders";
CREATE TABLE ord (status text, id uuid PRIMARY KEY);
SELECT idempotency.transition('ord', '00000000-0000-0000-0000-000000000001', 'CREATED', 'PAID');
SELECT idempotency.attach_machine('ord', 'status', 'mt');
INSERT INTO ord VALUES ('CREATED', '00000000-0000-0000-0000-000000000001');
SELECT * FROM idempotency.transition('ord', '00000000-0000-0000-0000-000000000001', 'CREATED', 'PAID');

-- a table of the same name first in the search_path is not meant
RESET ROLE;
CREATE SCHEMA mt_evil;
GRANT USAGE ON SCHEMA mt_evil TO regress_mover;
CREATE TABLE mt_evil.ord (status text, id uuid PRIMARY KEY);
CREATE FUNCTION mt_evil.eq(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
CREATE OPERATOR mt_evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = mt_evil.eq);
SET ROLE regress_mover;
SET search_path = mt_evil, pg_catalog;
SELECT * FROM idempotency.fire('mt.ord', '00000000-0000-0000-0000-000000000001', 'refund');
SELECT * FROM idempotency.transition('mt.ord', '00000000-0000-0000-0000-000000000001', 'CREATED', 'PAID');
SET search_path = mt;

-- replaced: the sessions that have it cached see it
RESET ROLE;
SELECT idempotency.define_machine('mt', '{"initial": "CREATED", "transitions": {"CREATED": {"pay": "PAID"}, "PAID": {"void": "VOID"}}}');
SET ROLE regress_mover;
SELECT * FROM idempotency.fire('ord', '00000000-0000-0000-0000-000000000001', 'void');
INSERT INTO ord VALUES ('CREATED', '00000000-0000-0000-0000-000000000002');
SELECT * FROM idempotency.fire('ord', '00000000-0000-0000-0000-000000000002', 'pay');
SELECT * FROM idempotency.fire('ord', '00000000-0000-0000-0000-000000000002', 'void');
SELECT idempotency.transition('ord', '00000000-0000-0000-0000-000000000002', 'PAID', 'REFUNDED');

-- a statement that cannot be planned leaves nothing in the session's memory
RESET ROLE;
ALTER TABLE mt.ord ADD COLUMN computed int GENERATED ALWAYS AS (1) STORED;
CREATE FUNCTION mt.fail_often(n int) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
  FOR i IN 1 .. n LOOP
    BEGIN
      PERFORM idempotency.fire('mt.ord', '00000000-0000-0000-0000-000000000002', 'pay', '{"computed": 2}');
    EXCEPTION WHEN generated_always THEN
    END;
  END LOOP;
  RETURN (SELECT used_bytes FROM pg_backend_memory_contexts WHERE name = 'TopMemoryContext');
END $$;
SELECT mt.fail_often(10) AS used \gset
SELECT mt.fail_often(2000) - :used < 50000 AS bounded;
ALTER TABLE mt.ord DROP COLUMN computed;

-- nor do tables that come and go
SET ROLE regress_mover;
DO $$
BEGIN
  FOR i IN 1 .. 150 LOOP
    CREATE TEMP TABLE passing (id int PRIMARY KEY, status text);
    PERFORM idempotency.attach_machine('passing', 'status', 'mt');
    INSERT INTO passing VALUES (1, 'CREATED');
    PERFORM idempotency.fire('passing', 1, 'pay');
    DROP TABLE passing;
  END LOOP;
END $$;
RESET ROLE;
SELECT count(*) < 100 AS bounded FROM pg_backend_memory_contexts WHERE name = 'idempotency table';

-- rows that slipped in: said loudly
RESET ROLE;
SET session_replication_role = replica;
INSERT INTO mt.ord VALUES ('LOST', '00000000-0000-0000-0000-000000000003'), (NULL, '00000000-0000-0000-0000-000000000004');
RESET session_replication_role;
SET ROLE regress_mover;
SELECT idempotency.transition('ord', '00000000-0000-0000-0000-000000000003', NULL, 'PAID');
SELECT * FROM idempotency.transition('ord', '00000000-0000-0000-0000-000000000003', 'CREATED', 'PAID');
SELECT idempotency.fire('ord', '00000000-0000-0000-0000-000000000004', 'pay');
SELECT idempotency.transition('ord', '00000000-0000-0000-0000-000000000004', 'CREATED', 'PAID');
RESET ROLE;
SELECT * FROM idempotency.off_graph('ord') ORDER BY id;

SET client_min_messages = warning;
DROP SCHEMA mt CASCADE;
DROP SCHEMA mt_evil CASCADE;
SELECT idempotency.drop_machine('mt');
SELECT idempotency.revoke_usage('regress_mover');
SELECT idempotency.revoke_usage('regress_mover_other');
DROP ROLE regress_mover, regress_mover_other;
