-- The guard: every writer, in every way, stays on the graph; and the history.
\set VERBOSITY terse
\set SHOW_CONTEXT never
\pset null '(null)'
CREATE ROLE regress_guarded;
CREATE ROLE regress_writer;
SELECT idempotency.grant_usage('regress_guarded');
CREATE SCHEMA mg AUTHORIZATION regress_guarded;
GRANT USAGE ON SCHEMA mg TO regress_writer;
SET search_path = mg;
SELECT idempotency.define_machine('mg', '{"initial": ["NEW", "DRAFT"], "transitions": {
  "DRAFT": ["NEW"], "NEW": {"pay": "PAID", "touch": "NEW"}, "PAID": {"ship": "SHIPPED"}}}');
SET ROLE regress_guarded;
CREATE FUNCTION code(command text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE command;
  RETURN 'none';
EXCEPTION WHEN OTHERS THEN
  RETURN SQLSTATE || ' ' || SQLERRM;
END $$;
GRANT EXECUTE ON FUNCTION code TO regress_writer;
CREATE TABLE ord (id int PRIMARY KEY, status text, n int DEFAULT 0);
CREATE TABLE logged (id int PRIMARY KEY, status text, n int DEFAULT 0);
SELECT idempotency.attach_machine('ord', 'status', 'mg');
SELECT idempotency.attach_machine('logged', 'status', 'mg', history => true);
GRANT ALL ON ord, logged TO regress_writer;

-- a writer with no grant of ours: the same with and without history
SET ROLE regress_writer;
SELECT format(c, t) AS command, code(format(c, t)) FROM unnest(ARRAY['ord', 'logged']) t, unnest(ARRAY[
  $$INSERT INTO %s VALUES (1, 'NEW'), (2, 'DRAFT'), (3, 'NEW')$$,
  $$INSERT INTO %s VALUES (4, 'PAID')$$,
  $$INSERT INTO %s VALUES (4, 'LOST')$$,
  $$INSERT INTO %s VALUES (4, NULL)$$,
  $$INSERT INTO %s (id) VALUES (4)$$,
  $$UPDATE %s SET status = 'SHIPPED' WHERE id = 1$$,
  $$UPDATE %s SET status = 'LOST' WHERE id = 1$$,
  $$UPDATE %s SET status = NULL WHERE id = 1$$,
  $$UPDATE %s SET status = 'PAID' WHERE id = 1$$,
  $$UPDATE %s SET status = status$$,
  $$UPDATE %s SET n = n + 1$$,
  $$UPDATE %s SET status = 'NEW' WHERE id IN (1, 2)$$,
  $$UPDATE %s SET status = 'NEW' WHERE id = 2$$,
  -- ON CONFLICT: the row that is proposed need not be initial, the update must be on the graph
  $$INSERT INTO %s VALUES (2, 'PAID') ON CONFLICT (id) DO UPDATE SET status = EXCLUDED.status$$,
  $$INSERT INTO %s VALUES (3, 'SHIPPED') ON CONFLICT (id) DO UPDATE SET status = EXCLUDED.status$$,
  $$INSERT INTO %s VALUES (3, 'SHIPPED') ON CONFLICT (id) DO NOTHING$$,
  $$INSERT INTO %s VALUES (5, 'SHIPPED') ON CONFLICT (id) DO UPDATE SET status = EXCLUDED.status$$,
  $$MERGE INTO %s t USING (VALUES (3, 'PAID'), (6, 'NEW')) s (id, status) ON t.id = s.id
    WHEN MATCHED THEN UPDATE SET status = s.status WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.status)$$,
  $$MERGE INTO %s t USING (VALUES (6, 'SHIPPED')) s (id, status) ON t.id = s.id WHEN MATCHED THEN UPDATE SET status = s.status$$,
  $$MERGE INTO %s t USING (VALUES (7, 'PAID')) s (id, status) ON t.id = s.id WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.status)$$,
  $$WITH u AS (UPDATE %1$s SET status = 'SHIPPED' WHERE id = 2 RETURNING 1) INSERT INTO %1$s SELECT 8, 'NEW' FROM u$$,
  $$WITH u AS (UPDATE %1$s SET n = 5 WHERE id = 2 RETURNING 1) INSERT INTO %1$s SELECT 9, 'PAID' FROM u$$]) WITH ORDINALITY c (c, nr)
ORDER BY t DESC, nr;
SELECT * FROM ord ORDER BY id;
SELECT * FROM (TABLE ord EXCEPT TABLE logged) x;
COPY ord (id, status) FROM stdin;
10	NEW
11	PAID
\.
COPY ord (id, status) FROM stdin;
10	NEW
11	DRAFT
\.
SELECT idempotency.transition('ord', 10, 'NEW', 'PAID');

-- the history so far: one row for each move, none for what kept the state
RESET ROLE;
SELECT table_name, row_id, machine, event, from_state, to_state, changed_by FROM idempotency.transition_log ORDER BY id;
DELETE FROM idempotency.transition_log;

-- BEFORE triggers that set the state, in UPDATEs that do not name it
SET ROLE regress_guarded;
CREATE FUNCTION force() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.n = 100 THEN NEW.status := 'SHIPPED'; END IF;
  IF NEW.n = 101 THEN NEW.status := 'PAID'; END IF;
  IF NEW.n = 102 THEN NEW.status := NULL; END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER a BEFORE INSERT OR UPDATE ON ord FOR EACH ROW EXECUTE FUNCTION force();
CREATE TRIGGER z BEFORE INSERT OR UPDATE ON logged FOR EACH ROW EXECUTE FUNCTION force();
SET ROLE regress_writer;
SELECT format(c, t) AS command, code(format(c, t)) FROM unnest(ARRAY['ord', 'logged']) t, unnest(ARRAY[
  $$INSERT INTO %s VALUES (20, 'NEW')$$,
  $$INSERT INTO %s VALUES (21, 'NEW', 101)$$,
  $$UPDATE %s SET n = 100 WHERE id = 20$$,
  $$UPDATE %s SET n = 102 WHERE id = 20$$,
  $$UPDATE %s SET n = 100, status = 'PAID' WHERE id = 20$$,
  $$UPDATE %s SET n = 101 WHERE id = 20$$]) WITH ORDINALITY c (c, nr)
ORDER BY t DESC, nr;
SELECT status FROM ord WHERE id = 20;
RESET ROLE;
SELECT table_name, row_id, event, from_state, to_state FROM idempotency.transition_log ORDER BY id;
DELETE FROM idempotency.transition_log;

-- the column is renamed, and so is the trigger's; a column before it goes
SET ROLE regress_guarded;
DROP TRIGGER a ON ord;
DROP TRIGGER z ON logged;
ALTER TABLE ord RENAME status TO "State of it";
ALTER TABLE ord ADD status text;
ALTER TABLE ord DROP n;
SELECT code($$UPDATE ord SET "State of it" = 'NEW' WHERE id = 20$$);
SELECT code($$UPDATE ord SET "State of it" = 'SHIPPED', status = 'free' WHERE id = 20$$);
SELECT code($$UPDATE ord SET "State of it" = 'SHIPPED' WHERE id = 1$$);
SELECT code($$INSERT INTO ord (id, "State of it") VALUES (30, 'PAID')$$);
SELECT code($$ALTER TABLE ord DROP "State of it"$$);
SELECT idempotency.attach_machine('ord', 'status', 'mg');
UPDATE ord SET status = 'NEW';
SELECT idempotency.attach_machine('ord', 'status', 'mg', history => true);
SELECT code($$UPDATE ord SET "State of it" = 'NEW' WHERE id = 20$$);
SELECT code($$UPDATE ord SET status = 'SHIPPED' WHERE id = 20$$);
SELECT code($$INSERT INTO ord (id, "State of it", status) VALUES (30, 'NEW', 'PAID')$$);
SELECT code($$INSERT INTO ord (id, "State of it", status) VALUES (30, 'PAID', 'NEW')$$);
SELECT tgname FROM pg_trigger WHERE tgrelid = 'ord'::regclass ORDER BY tgname COLLATE "C";
SELECT idempotency.detach_machine('ord', 'State of it');
SELECT tgname FROM pg_trigger WHERE tgrelid = 'ord'::regclass ORDER BY tgname COLLATE "C";
SELECT code($$UPDATE ord SET "State of it" = 'free' WHERE id = 20$$);
SELECT code($$UPDATE ord SET status = 'SHIPPED' WHERE id = 20$$);
SELECT idempotency.detach_machine('ord', 'status');
DROP TABLE ord;

-- rows off the graph keep their state, and are found
RESET ROLE;
SET session_replication_role = replica;
UPDATE logged SET status = 'LOST' WHERE id = 1;
UPDATE logged SET status = NULL WHERE id = 2;
RESET session_replication_role;
SET ROLE regress_writer;
UPDATE logged SET n = 7 WHERE id IN (1, 2);
SELECT code($$UPDATE logged SET status = 'NEW' WHERE id = 1$$);
SELECT code($$UPDATE logged SET status = 'NEW' WHERE id = 2$$);
RESET ROLE;
SELECT * FROM idempotency.off_graph('logged') ORDER BY 1;
SELECT * FROM idempotency.off_graph('pg_class');
SELECT * FROM idempotency.off_graph(0);
SELECT * FROM idempotency.off_graph(NULL);

-- the history: the event that fire asked for, and no other statement's
SET ROLE regress_guarded;
CREATE TABLE chain (a int, b text, "St'ate" text, n int, PRIMARY KEY (a, b));
SELECT idempotency.attach_machine('chain', 'St''ate', 'mg', history => true);
INSERT INTO chain SELECT i, 'x', 'NEW', 0 FROM generate_series(1, 9) i;
CREATE FUNCTION chain_before() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  -- a plain UPDATE, a nested fire, and one that is undone
  IF NEW.n = 1 THEN
    UPDATE chain SET "St'ate" = 'PAID' WHERE a = 2;
    PERFORM idempotency.fire('chain', '{"a": 3, "b": "x"}', 'pay');
    PERFORM idempotency.fire('chain', '{"a": 4, "b": "x"}', 'touch');
    BEGIN
      PERFORM idempotency.fire('chain', '{"a": 5, "b": "x"}', 'pay');
      RAISE EXCEPTION 'undo';
    EXCEPTION WHEN raise_exception THEN NULL;
    END;
  END IF;
  RETURN NEW;
END $$;
CREATE FUNCTION chain_after() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.n = 1 THEN
    UPDATE chain SET "St'ate" = 'SHIPPED', n = 2 WHERE a = NEW.a;
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER b BEFORE UPDATE ON chain FOR EACH ROW EXECUTE FUNCTION chain_before();
CREATE TRIGGER c AFTER UPDATE ON chain FOR EACH ROW EXECUTE FUNCTION chain_after();
SELECT * FROM idempotency.fire('chain', '{"b": "x", "a": 1}', 'pay', '{"n": 1}');
SELECT * FROM idempotency.transition('chain', '{"b": "x", "a": 6}', 'NEW', 'PAID');
UPDATE chain SET "St'ate" = 'PAID' WHERE a = 7;
SELECT outcome FROM idempotency.fire('chain', '{"a": 6, "b": "x"}', 'pay');
BEGIN;
SELECT outcome FROM idempotency.fire('chain', '{"a": 8, "b": "x"}', 'pay');
ROLLBACK;
RESET ROLE;
SELECT table_name, row_id, machine, event, from_state, to_state, changed_by,
       changed_at BETWEEN now() - interval '1 min' AND clock_timestamp() AS recent
FROM idempotency.transition_log ORDER BY id;
DELETE FROM idempotency.transition_log;

-- who ran it: the role in force, also in a definer's function; the clock, not
-- the transaction's start
SET ROLE regress_guarded;
CREATE FUNCTION pay(id int) RETURNS text LANGUAGE sql SECURITY DEFINER AS
  $$SELECT outcome FROM idempotency.fire('mg.logged', $1, 'pay')$$;
INSERT INTO logged VALUES (40, 'NEW'), (41, 'NEW'), (42, 'NEW');
SET ROLE regress_writer;
SELECT mg.pay(40);
UPDATE mg.logged SET status = 'PAID' WHERE id = 41;
RESET ROLE;
SELECT row_id, event, changed_by FROM idempotency.transition_log ORDER BY id;
DELETE FROM idempotency.transition_log;
BEGIN;
UPDATE mg.logged SET status = 'PAID' WHERE id = 42;
SELECT changed_at > now() AS by_the_clock FROM idempotency.transition_log;
COMMIT;

-- a type of the owner's own: its output and casts run as the writer
SET ROLE regress_guarded;
CREATE TYPE mg.kind AS ENUM ('a', 'b');
CREATE FUNCTION mg.kind_json(mg.kind) RETURNS json LANGUAGE sql AS
  $$SELECT json_build_object('as', current_user, 'code', $1::text)$$;
CREATE CAST (mg.kind AS json) WITH FUNCTION mg.kind_json(mg.kind);
CREATE TABLE own (id mg.kind PRIMARY KEY, status text);
SELECT idempotency.attach_machine('own', 'status', 'mg', history => true);
INSERT INTO own VALUES ('a', 'NEW'), ('b', 'NEW');
SELECT outcome FROM idempotency.fire('own', 'a', 'pay');
SELECT outcome FROM idempotency.fire('own', 'a'::mg.kind, 'ship');
GRANT ALL ON own TO regress_writer;
SET ROLE regress_writer;
UPDATE mg.own SET status = 'PAID' WHERE id = 'b';
RESET ROLE;
SELECT row_id, event, to_state FROM idempotency.transition_log WHERE table_name = 'mg.own' ORDER BY id;
DELETE FROM idempotency.transition_log;

-- a table and a row have one name each in the log, under all settings of a session
SET ROLE regress_guarded;
CREATE TABLE "order" (t timestamptz, r tstzrange, i interval, b bytea, f float8, status text, PRIMARY KEY (t, r, i, b, f));
SELECT idempotency.attach_machine('"order"', 'status', 'mg', history => true);
INSERT INTO "order" VALUES ('2026-03-01 12:00+01', '[2026-03-01 12:00+01,2026-03-02 12:00+01)', '1 day 2 hours', 'a', 0.1::float8 + 0.2, 'NEW');
UPDATE "order" SET status = 'PAID';
SET quote_all_identifiers = on;
SET TimeZone = 'Asia/Tokyo';
SET DateStyle = 'German';
SET IntervalStyle = 'iso_8601';
SET bytea_output = 'escape';
SET extra_float_digits = -3;
UPDATE "order" SET status = 'SHIPPED';
SELECT current_setting(s) FROM unnest(ARRAY['quote_all_identifiers', 'TimeZone', 'DateStyle', 'IntervalStyle', 'bytea_output', 'extra_float_digits']) s;
RESET quote_all_identifiers;
RESET TimeZone;
RESET DateStyle;
RESET IntervalStyle;
RESET bytea_output;
RESET extra_float_digits;
RESET ROLE;
SELECT table_name, row_id, count(*), max(to_state) FROM idempotency.transition_log GROUP BY 1, 2;
DELETE FROM idempotency.transition_log;

-- a trigger made by hand: refused when it fires, not obeyed
SET ROLE regress_guarded;
CREATE TABLE byhand (id int PRIMARY KEY, status text);
INSERT INTO byhand VALUES (1, 'NEW');
CREATE TRIGGER t AFTER UPDATE OF status ON byhand FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('mg');
SELECT code($$UPDATE byhand SET status = 'PAID'$$);
DROP TRIGGER t ON byhand;
CREATE TRIGGER t AFTER UPDATE OF status ON byhand FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('nosuch', 'history');
SELECT code($$UPDATE byhand SET status = 'PAID'$$);
DROP TRIGGER t ON byhand;
CREATE TRIGGER t AFTER UPDATE ON byhand EXECUTE FUNCTION idempotency.guard_state();
SELECT code($$UPDATE byhand SET status = 'PAID'$$);
DROP TRIGGER t ON byhand;
CREATE TRIGGER t AFTER UPDATE OF id ON byhand FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('mg', '');
SELECT code($$UPDATE byhand SET id = 2$$);

RESET ROLE;
SET client_min_messages = warning;
DROP SCHEMA mg CASCADE;
SELECT idempotency.drop_machine('mg');
SELECT idempotency.revoke_usage('regress_guarded');
DROP ROLE regress_guarded, regress_writer;
