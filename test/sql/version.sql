-- Versions: each UPDATE counts, and one that comes too late changes nothing.
\set VERBOSITY terse
\set SHOW_CONTEXT never
\pset null '(null)'
CREATE ROLE regress_versioned;
CREATE ROLE regress_version_writer;
SELECT idempotency.grant_usage('regress_versioned');
CREATE SCHEMA ve AUTHORIZATION regress_versioned;
GRANT USAGE ON SCHEMA ve TO regress_version_writer;
SET ROLE regress_versioned;
SET search_path = ve;
CREATE FUNCTION code(command text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE command;
  RETURN 'none';
EXCEPTION WHEN OTHERS THEN
  RETURN SQLSTATE || ' ' || SQLERRM;
END $$;
CREATE TABLE item (id int PRIMARY KEY, stock int NOT NULL, name text, "Row Version" bigint NOT NULL DEFAULT 1, nullable bigint, small int NOT NULL DEFAULT 1, note text);
INSERT INTO item VALUES (1, 10, 'one'), (2, 10, 'two'), (3, 10, 'three');
UPDATE item SET "Row Version" = 7 WHERE id = 3;
SELECT c, code('SELECT idempotency.' || c) FROM unnest(ARRAY[
  $$attach_version('item', 'nullable')$$,
  $$attach_version('item', 'small')$$,
  $$attach_version('item', 'nosuch')$$,
  $$attach_version('item', NULL)$$,
  $$attach_version('item_pkey', 'id')$$,
  $$detach_version('item', 'Row Version')$$,
  $$update_if('item', 1, 1, '{"stock": 9}')$$]) c;
SELECT idempotency.attach_version('item', 'Row Version');
SELECT code($$SELECT idempotency.attach_version('item', 'Row Version')$$);
GRANT ALL ON item TO regress_version_writer;

-- every writer: the version goes up by one
SET ROLE regress_version_writer;
UPDATE ve.item SET stock = stock - 1 WHERE id = 1 AND "Row Version" = 1 RETURNING stock, "Row Version";
UPDATE ve.item SET stock = stock - 1 WHERE id = 1 AND "Row Version" = 1 RETURNING stock, "Row Version";
UPDATE ve.item SET "Row Version" = "Row Version" + 1, stock = 8 WHERE id = 1 RETURNING "Row Version";
UPDATE ve.item SET "Row Version" = "Row Version", stock = 8 WHERE id = 1 RETURNING "Row Version";
UPDATE ve.item SET stock = stock RETURNING id, "Row Version";
INSERT INTO ve.item VALUES (1, 5, 'x') ON CONFLICT (id) DO UPDATE SET stock = EXCLUDED.stock RETURNING "Row Version";
MERGE INTO ve.item t USING (VALUES (1)) s (id) ON t.id = s.id WHEN MATCHED THEN UPDATE SET stock = 6;
SELECT "Row Version" FROM ve.item WHERE id = 1;
RESET ROLE;
SET ROLE regress_versioned;
SELECT c, code(c) FROM unnest(ARRAY[
  $$UPDATE item SET "Row Version" = 1 WHERE id = 1$$,
  $$UPDATE item SET "Row Version" = "Row Version" + 2$$,
  $$UPDATE item SET "Row Version" = NULL$$]) c;

-- update_if: applied, conflict with the current version, not found
SELECT * FROM idempotency.update_if('item', 2, 2, '{"stock": 3, "name": "deux"}');
SELECT * FROM idempotency.update_if('item', 2, 2, '{"stock": 4}');
SELECT * FROM idempotency.update_if('item', 2, 4, '{"stock": 4}');
SELECT * FROM idempotency.update_if('item', '2', 3, NULL);
SELECT * FROM idempotency.update_if('item', 2::bigint, 4, '{}');
SELECT * FROM idempotency.update_if('item', 9, 1, '{"stock": 4}');
SELECT id, stock, name, "Row Version" FROM item ORDER BY id;
-- gone is gone: nothing is inserted
DELETE FROM item WHERE id = 3;
SELECT * FROM idempotency.update_if('item', 3, 8, '{"stock": 4}');
SELECT c, code('SELECT idempotency.' || c) FROM unnest(ARRAY[
  $$update_if('item', 2, NULL, '{"stock": 4}')$$,
  $$update_if('item', NULL::int, 1, '{"stock": 4}')$$,
  $$update_if(NULL, 2, 1, '{"stock": 4}')$$,
  $$update_if('item', 2, 5, '{"Row Version": 4}')$$,
  $$update_if('item', 2, 5, '{"nosuch": 4}')$$,
  $$update_if('item', 2, 5, '[]')$$,
  $$update_if('item', 2, 9223372036854775807, '{}')$$,
  $$update_if('pg_class', 2, 5, '{}')$$]) c;
-- at the end of the numbers
ALTER TABLE item DISABLE TRIGGER USER;
UPDATE item SET "Row Version" = 9223372036854775807 WHERE id = 1;
ALTER TABLE item ENABLE TRIGGER USER;
SELECT code($$UPDATE item SET stock = 1 WHERE id = 1$$);
-- two updates of a row in one transaction are two versions; a rollback is none
BEGIN;
SELECT * FROM idempotency.update_if('item', 2, 5, '{"stock": 7}');
SAVEPOINT s;
SELECT * FROM idempotency.update_if('item', 2, 6, '{"stock": 8}');
ROLLBACK TO s;
SELECT * FROM idempotency.update_if('item', 2, 6, '{"stock": 9}');
COMMIT;

-- row security and triggers
ALTER TABLE item ENABLE ROW LEVEL SECURITY;
CREATE POLICY see ON item FOR SELECT USING (id < 3);
CREATE POLICY upd ON item FOR UPDATE USING (id < 2);
RESET ROLE;
SELECT idempotency.grant_usage('regress_version_writer');
SET ROLE regress_version_writer;
SELECT * FROM idempotency.update_if('ve.item', 2, 7, '{"stock": 4}');
SET ROLE regress_versioned;
ALTER TABLE item DISABLE ROW LEVEL SECURITY;
CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.note = 'eat' THEN RETURN NULL; END IF;
  IF NEW.note = 'set' THEN NEW."Row Version" := 99; END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER meddle BEFORE UPDATE ON item FOR EACH ROW EXECUTE FUNCTION meddle();
SELECT * FROM idempotency.update_if('item', 2, 7, '{"note": "eat"}');
SELECT code($$SELECT idempotency.update_if('item', 2, 7, '{"note": "set"}')$$);
UPDATE item SET note = 'set' WHERE id = 2 RETURNING "Row Version";

-- renamed, and next to a machine on the same table
DROP TRIGGER meddle ON item;
ALTER TABLE item RENAME "Row Version" TO v;
SELECT * FROM idempotency.update_if('item', 2, 8, '{"note": "x"}');
SELECT code($$UPDATE item SET v = 5 WHERE id = 2$$);
SELECT code($$ALTER TABLE item DROP v$$);
RESET ROLE;
SELECT idempotency.define_machine('ve', '{"initial": "x", "transitions": {"x": {"go": "y"}}}');
SET ROLE regress_versioned;
UPDATE item SET note = 'x';
DELETE FROM item WHERE id = 1;
UPDATE item SET note = 'x';
SELECT idempotency.attach_machine('item', 'note', 've', true);
SELECT * FROM idempotency.update_if('item', 2, 10, '{"note": "y"}');
SELECT code($$SELECT idempotency.update_if('item', 2, 11, '{"note": "x"}')$$);
INSERT INTO item VALUES (5, 1, 'five', 1, NULL, 1, 'x');
SELECT * FROM idempotency.fire('item', 5, 'go');
SELECT v, note FROM item WHERE id = 5;
SELECT idempotency.detach_version('item', 'v');
SELECT code($$UPDATE item SET v = 5 WHERE id = 2$$);
SELECT tgname FROM pg_trigger WHERE tgrelid = 'item'::regclass AND tgfoid = 'idempotency.guard_version'::regproc;
-- the column goes with its trigger: another one can take its place
SELECT idempotency.attach_version('item', 'v');
SET client_min_messages = warning;
ALTER TABLE item DROP v CASCADE;
RESET client_min_messages;
UPDATE item SET stock = 1 WHERE id = 2;
ALTER TABLE item ADD w bigint NOT NULL DEFAULT 1;
SELECT idempotency.attach_version('item', 'w');
SELECT * FROM idempotency.update_if('item', 2, 1, '{"stock": 2}');
SELECT code($$UPDATE item SET w = 7 WHERE id = 2$$);
SELECT idempotency.detach_version('item', 'w');
SELECT count(*) FROM pg_trigger WHERE tgrelid = 'item'::regclass AND tgfoid = 'idempotency.guard_version'::regproc;
-- privileges on the key, the version and what is changed alone
SELECT idempotency.attach_version('item', 'w');
REVOKE ALL ON item FROM regress_version_writer;
GRANT SELECT (id, w), UPDATE (stock, w) ON item TO regress_version_writer;
SET ROLE regress_version_writer;
SELECT * FROM idempotency.update_if('ve.item', 2, 2, '{"stock": 3}');
SELECT * FROM idempotency.update_if('ve.item', 2, 2, '{"stock": 3}');
SELECT * FROM idempotency.update_if('ve.item', 99, 2, '{"stock": 3}');
-- a version that became null is none that a caller could give, until an UPDATE
SET ROLE regress_versioned;
ALTER TABLE item ALTER w DROP NOT NULL;
INSERT INTO item (id, stock, note, w) VALUES (7, 1, 'x', NULL);
SELECT * FROM idempotency.update_if('item', 7, 0, '{"stock": 3}');
UPDATE item SET stock = 2 WHERE id = 7;
SELECT * FROM idempotency.update_if('item', 7, 1, '{"stock": 3}');

RESET ROLE;
SET client_min_messages = warning;
DELETE FROM idempotency.transition_log;
DROP SCHEMA ve CASCADE;
SELECT idempotency.drop_machine('ve');
SELECT idempotency.revoke_usage('regress_versioned');
SELECT idempotency.revoke_usage('regress_version_writer');
DROP ROLE regress_versioned, regress_version_writer;
