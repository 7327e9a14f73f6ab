-- insert_once: the caller's own unique index as the judge.
-- What a rival session does to it is in specs/insert_once_race.spec.

SET client_min_messages = warning;
CREATE ROLE regress_insert_app;
CREATE ROLE regress_insert_other;
SELECT idempotency.grant_usage('regress_insert_app');
CREATE SCHEMA io AUTHORIZATION regress_insert_app;
CREATE SCHEMA io_shadow AUTHORIZATION regress_insert_app;
SET ROLE regress_insert_app;
SET search_path = io, pg_temp;

-- run a statement, tell what became of it
CREATE FUNCTION io.try(statement text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  answer text; sqlstate_ text; message text; detail text;
BEGIN
  EXECUTE statement INTO answer;
  RETURN coalesce(answer, 'NULL');
EXCEPTION WHEN OTHERS THEN
  GET STACKED DIAGNOSTICS sqlstate_ = RETURNED_SQLSTATE, message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL;
  RETURN concat_ws(' / ', sqlstate_ || ' ' || message, nullif(detail, ''));
END
$$;

----------------------------------------------------------------------------
-- The example; defaults
----------------------------------------------------------------------------
CREATE TABLE pay_order (
  id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  request_id text NOT NULL UNIQUE,
  amount     numeric(10,2),
  note       text DEFAULT 'none',
  doubled    numeric GENERATED ALWAYS AS (amount * 2) STORED,
  serial_no  serial
);
SELECT created, (stored).id FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "r1", "amount": 10}');
SELECT created, (stored).id FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "r1", "amount": 10}');
-- absent: the default; NULL: NULL; another amount: still the row that is there
SELECT * FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "r2", "note": null}');
SELECT * FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "r2", "note": "x", "amount": 3}');
-- in a select list, for many rows, a key twice
SELECT k, (i).created, (i).stored
FROM (VALUES (1, 'r3'), (2, 'r4'), (3, 'r3')) AS v (k, r),
     LATERAL (SELECT idempotency.insert_once(NULL::pay_order, jsonb_build_object('request_id', r, 'amount', k)) AS i OFFSET 0) AS s
ORDER BY k;
SELECT (idempotency.insert_once(NULL::pay_order, '{"request_id": "r3"}')).created;
-- as it is now
UPDATE pay_order SET note = 'changed' WHERE request_id = 'r1';
SELECT created, (stored).note FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "r1"}');
-- deleted: inserted anew
DELETE FROM pay_order WHERE request_id = 'r1';
SELECT created, (stored).note FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "r1"}');
-- no sequence value was spent on a replay
SELECT array_agg(id ORDER BY id) AS ids, array_agg(serial_no ORDER BY id) AS serials FROM pay_order;

----------------------------------------------------------------------------
-- A replay writes nothing, also where nothing can be written
----------------------------------------------------------------------------
BEGIN;
SELECT created FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "r1"}');
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_xid;
COMMIT;
BEGIN READ ONLY;
SELECT created, (stored).request_id FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "r1"}');
SELECT io.try($$SELECT idempotency.insert_once(NULL::pay_order, '{"request_id": "new"}')$$);
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY;
SELECT created, (stored).request_id FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "r1"}');
COMMIT;
-- each level: created, replayed
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT created FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "rr"}');
SELECT created FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "rr"}');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT created FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "ser"}');
SELECT created, (stored).request_id FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "rr"}');
SELECT created FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "ser"}');
COMMIT;
-- undone with its savepoint
BEGIN;
SAVEPOINT s;
SELECT created FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "sp"}');
ROLLBACK TO s;
SELECT created FROM idempotency.insert_once(NULL::pay_order, '{"request_id": "sp"}');
COMMIT;

----------------------------------------------------------------------------
-- Bad input
----------------------------------------------------------------------------
CREATE VIEW order_view AS SELECT * FROM pay_order;
CREATE MATERIALIZED VIEW order_mat AS SELECT * FROM pay_order;
CREATE TYPE loose AS (request_id text);
CREATE DOMAIN order_domain AS pay_order;
SELECT io.try(format('SELECT idempotency.insert_once(%s, %s)', target, new_row))
FROM (VALUES
  ('NULL::order_view',    $$'{"request_id": "r9"}'$$),
  ('NULL::order_mat',     $$'{"request_id": "r9"}'$$),
  ('NULL::loose',         $$'{"request_id": "r9"}'$$),
  ('NULL::order_domain',  $$'{"request_id": "r9"}'$$),
  ('NULL::pay_order[]',   $$'{"request_id": "r9"}'$$),
  ('1',                   $$'{"request_id": "r9"}'$$),
  ('ROW(1, 2)',           $$'{"request_id": "r9"}'$$),
  ('jsonb_populate_record(NULL::pay_order, ''{"note": "lost"}'')', $$'{"request_id": "r9"}'$$),
  ('NULL::pay_order',     'NULL'),
  ('NULL::pay_order',     $$'null'$$),
  ('NULL::pay_order',     $$'[{"request_id": "r9"}]'$$),
  ('NULL::pay_order',     $$'"r9"'$$),
  ('NULL::pay_order',     $$'{}'$$),
  ('NULL::pay_order',     $$'{"request_id": "r9", "Amount": 1}'$$),
  ('NULL::pay_order',     $$'{"request_id": "r9", "": 1}'$$),
  ('NULL::pay_order',     $$'{"request_id": "r9", "ctid": "(0,1)"}'$$),
  ('NULL::pay_order',     $$'{"request_id": "r9", "amount": "ten"}'$$),
  ('NULL::pay_order',     $$'{"request_id": "r9", "amount": 123456789.1}'$$),
  ('NULL::pay_order',     $$'{"request_id": "r9", "doubled": 1}'$$),
  ('NULL::pay_order',     $$'{"request_id": "r9", "id": 1}', ARRAY['request_id']$$),
  ('NULL::pay_order',     $$'{"request_id": null}'$$),
  ('NULL::pay_order',     $$'{"request_id": "r9"}', '{}'$$),
  ('NULL::pay_order',     $$'{"request_id": "r9"}', array_fill('request_id'::text, ARRAY[33])$$),
  ('NULL::pay_order',     $$'{"request_id": "r9"}', ARRAY[NULL]$$),
  ('NULL::pay_order',     $$'{"request_id": "r9"}', ARRAY['requestid']$$),
  ('NULL::pay_order',     $$'{"request_id": "r9"}', ARRAY['amount']$$),
  ('NULL::pay_order',     $$'{"request_id": "r9", "amount": 1}', ARRAY['request_id', 'amount']$$),
  ('NULL::pay_order',     $$'{"request_id": "r9"}', ARRAY['id']$$)
) AS v (target, new_row);
-- a long name is no column's, not its first 63 bytes
SELECT left(io.try(format('SELECT idempotency.insert_once(NULL::pay_order, %L)', jsonb_build_object('request_id', 'r9', repeat('x', 70), 1))), 30);
SELECT count(*) FROM pay_order WHERE request_id IS NULL OR request_id = 'r9';

----------------------------------------------------------------------------
-- Which index decides
----------------------------------------------------------------------------
CREATE TABLE many (
  a int, b int, c int, d int, e int, f int, g int,
  CONSTRAINT many_d_deferrable UNIQUE (d) DEFERRABLE,
  EXCLUDE USING btree (f WITH =)
);
SELECT io.try($$SELECT idempotency.insert_once(NULL::many, '{"a": 1, "d": 1}')$$);
CREATE UNIQUE INDEX many_partial ON many (a) WHERE b > 0;
CREATE UNIQUE INDEX many_expression ON many ((a + 1));
CREATE INDEX many_plain ON many (a);
SELECT io.try($$SELECT idempotency.insert_once(NULL::many, '{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1}')$$);
SELECT io.try(format($$SELECT idempotency.insert_once(NULL::many, '{"a": 1, "d": 1, "f": 1}', ARRAY[%L])$$, c)) FROM unnest('{a,d,f}'::text[]) AS c;
-- the first usable one appears, and is found without a reconnect
CREATE UNIQUE INDEX many_bc ON many (b, c) INCLUDE (d);
SELECT io.try($$SELECT idempotency.insert_once(NULL::many, '{"a": 1, "b": 1}')$$);
SELECT idempotency.insert_once(NULL::many, '{"a": 1, "b": 1, "c": 1, "d": 1, "f": 1}');
SELECT idempotency.insert_once(NULL::many, '{"a": 2, "b": 1, "c": 1, "d": 2, "f": 2}');
SELECT idempotency.insert_once(NULL::many, '{"a": 2, "b": 1, "c": 2, "d": 2, "f": 2}', ARRAY['c', 'b']);
-- another index says no: that is an error, as with any INSERT
SELECT io.try($$SELECT idempotency.insert_once(NULL::many, '{"a": 2, "b": 1, "c": 3, "d": 3, "f": 2}')$$);
CREATE UNIQUE INDEX many_e ON many (e);
SELECT io.try($$SELECT idempotency.insert_once(NULL::many, '{"b": 1, "c": 1, "e": 1}')$$);
SELECT idempotency.insert_once(NULL::many, '{"b": 1, "c": 1, "e": 1}', ARRAY['b', 'c']);
SELECT idempotency.insert_once(NULL::many, '{"b": 5, "c": 1, "e": 1}', ARRAY['e']);
SELECT idempotency.insert_once(NULL::many, '{"b": 5, "c": 1, "e": 1}', ARRAY['e']);
SELECT io.try($$SELECT idempotency.insert_once(NULL::many, '{"b": 5, "c": 1}', ARRAY['e'])$$);
DROP INDEX many_e;
SELECT idempotency.insert_once(NULL::many, '{"b": 5, "c": 1, "e": 1}');
-- a second index on the same columns decides with the first
CREATE UNIQUE INDEX many_cb ON many (c, b);
SELECT io.try($$SELECT idempotency.insert_once(NULL::many, '{"b": 1, "c": 1}')$$);
SELECT idempotency.insert_once(NULL::many, '{"b": 1, "c": 1}', ARRAY['b', 'c']);
-- an index whose building failed decides nothing
CREATE TABLE broken (a int, b int UNIQUE);
INSERT INTO broken VALUES (1, 1), (1, 2);
CREATE UNIQUE INDEX CONCURRENTLY broken_a ON broken (a);
SELECT io.try($$SELECT idempotency.insert_once(NULL::broken, '{"a": 2}')$$);
SELECT idempotency.insert_once(NULL::broken, '{"a": 2, "b": 3}');
-- rules and ON CONFLICT exclude each other
CREATE TABLE ruled (a int UNIQUE);
CREATE RULE r AS ON INSERT TO ruled DO ALSO NOTIFY x;
SELECT io.try($$SELECT idempotency.insert_once(NULL::ruled, '{"a": 2}')$$);

----------------------------------------------------------------------------
-- NULL in the key never conflicts, so it is refused, unless NULLs are alike
----------------------------------------------------------------------------
CREATE TABLE nullable (tenant int, request_id text, v int, UNIQUE (tenant, request_id));
SELECT io.try($$SELECT idempotency.insert_once(NULL::nullable, '{"tenant": null, "request_id": "a"}')$$);
SELECT io.try($$SELECT idempotency.insert_once(NULL::nullable, '{"tenant": 1, "request_id": null}')$$);
CREATE TABLE alike (tenant int, request_id text, v int, UNIQUE NULLS NOT DISTINCT (tenant, request_id));
SELECT idempotency.insert_once(NULL::alike, '{"tenant": null, "request_id": "a", "v": 1}');
SELECT idempotency.insert_once(NULL::alike, '{"tenant": null, "request_id": "a", "v": 2}');
SELECT idempotency.insert_once(NULL::alike, '{"tenant": null, "request_id": null, "v": 3}');
SELECT idempotency.insert_once(NULL::alike, '{"tenant": null, "request_id": null, "v": 4}');
SELECT idempotency.insert_once(NULL::alike, '{"tenant": 1, "request_id": "a", "v": 5}');
SELECT idempotency.insert_once(NULL::alike, '{"tenant": 1, "request_id": "a", "v": 6}');

----------------------------------------------------------------------------
-- Types: converted as jsonb_populate_record does
----------------------------------------------------------------------------
CREATE TYPE colour AS ENUM ('red', 'green');
CREATE TYPE point3 AS (x int, y numeric(5,1), z text);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN must_have AS text NOT NULL DEFAULT 'from the domain';
CREATE DOMAIN label AS varchar(5) COLLATE "C";
CREATE TABLE typed (
  e colour, p positive, l label, ch char(4), n numeric(6,2), ts timestamptz, d date, u uuid, b bytea,
  arr int[], r int4range, pt point3, j json, jb jsonb, f float8, t text, bo boolean, i interval,
  h must_have DEFAULT 'from the table', m must_have,
  UNIQUE (e, p, l, ch, n, ts, d, u, arr, r, pt, f, bo, i)
);
CREATE VIEW example AS SELECT '{"e": "green", "p": 7, "l": "abc", "ch": "x", "n": 12.345, "ts": "2026-02-03T04:05:06Z",
  "d": "2026-02-03", "u": "0b7a1e2e-0000-4000-8000-00000000000a", "b": "\\xdeadbeef", "arr": [1, null, 3], "r": "[1,5)",
  "pt": {"x": 1, "y": 2.25, "z": "\"q\""}, "j": {"b": 1, "a": [1.0]}, "jb": {"b": 1, "a": null}, "f": 1e300, "t": "\u00e9",
  "bo": true, "i": "1 day 02:00", "m": "given"}'::jsonb AS row;
SELECT created,
       to_jsonb(stored) - 'h' = to_jsonb(jsonb_populate_record(NULL::typed, row || '{"h": "x"}')) - 'h' AS as_populate_record,
       stored
FROM example, idempotency.insert_once(NULL::typed, row);
SELECT created FROM example, idempotency.insert_once(NULL::typed, row);
SELECT created FROM example, idempotency.insert_once(NULL::typed, row || '{"ch": "x   ", "n": 12.35, "pt": {"x": 1, "y": 2.3, "z": "\"q\""}}');
SELECT created FROM example, idempotency.insert_once(NULL::typed, row || '{"e": "red"}');
SELECT io.try(format('SELECT created FROM example, idempotency.insert_once(NULL::typed, row || %L)', bad))
FROM unnest(ARRAY['{"e": "blue"}', '{"p": 0}', '{"l": "too long"}', '{"u": "no"}', '{"m": null}', '{"arr": 1}', '{"ts": null}']::jsonb[]) AS bad;
-- equality is that of the index's operator class
CREATE TABLE image (r point3);
CREATE UNIQUE INDEX image_r ON image (r record_image_ops);
SELECT idempotency.insert_once(NULL::image, '{"r": {"x": 1, "y": 2, "z": "a"}}');
SELECT idempotency.insert_once(NULL::image, '{"r": {"x": 1, "y": 2, "z": "a"}}');
CREATE TABLE pattern (k text);
CREATE UNIQUE INDEX pattern_k ON pattern (k text_pattern_ops DESC);
SELECT idempotency.insert_once(NULL::pattern, '{"k": "a"}');
SELECT idempotency.insert_once(NULL::pattern, '{"k": "a"}');
-- an attribute that the type has no place for is not left out
SELECT io.try($$SELECT idempotency.insert_once(NULL::image, '{"r": {"x": 1, "y": 2, "w": "a"}}')$$);
-- polymorphic equality, of what is not quite the type that it is for
CREATE DOMAIN shade AS colour;
CREATE DOMAIN labels AS varchar(5)[];
CREATE TABLE poly (e shade, a varchar(5)[], d labels, t text[] COLLATE "C", r int4range, UNIQUE (e, a, d, t, r));
SELECT * FROM idempotency.insert_once(NULL::poly, '{"e": "red", "a": ["x"], "d": ["y"], "t": ["z"], "r": "[1,2]"}');
SELECT * FROM idempotency.insert_once(NULL::poly, '{"e": "red", "a": ["x"], "d": ["y"], "t": ["z"], "r": "[1,3)"}');
-- large values come back whole, and survive the row
CREATE TABLE large (k text PRIMARY KEY, v text);
SELECT created, length((stored).v) FROM idempotency.insert_once(NULL::large, jsonb_build_object('k', 'a', 'v', (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 1000) AS i)));
CREATE TABLE large_copy AS SELECT stored AS s FROM idempotency.insert_once(NULL::large, '{"k": "a"}');
DROP TABLE large_copy;
CREATE TABLE large_copy AS SELECT (stored).* FROM idempotency.insert_once(NULL::large, '{"k": "a"}');
TRUNCATE large;
SELECT length(v) FROM large_copy;

----------------------------------------------------------------------------
-- Names, and a search_path full of traps
----------------------------------------------------------------------------
CREATE TABLE "t" ("t" int, "created" text, "stored" text, "$1" int, "a""b'c\d" int, "select" int, "Ünï" int,
                  "a23456789b123456789c123456789d123456789e123456789f123456789g123" int,
                  UNIQUE ("t", "$1", "a""b'c\d", "select", "Ünï", "a23456789b123456789c123456789d123456789e123456789f123456789g123"));
CREATE TABLE "ta.b""le" (LIKE "t" INCLUDING ALL);
SELECT * FROM idempotency.insert_once(NULL::"t", '{"t": 1, "created": "c", "stored": "s", "$1": 2, "a\"b''c\\d": 3, "select": 4, "Ünï": 5, "a23456789b123456789c123456789d123456789e123456789f123456789g123": 6}');
SELECT * FROM idempotency.insert_once(NULL::"t", '{"t": 1, "$1": 2, "a\"b''c\\d": 3, "select": 4, "Ünï": 5, "a23456789b123456789c123456789d123456789e123456789f123456789g123": 6}');
SELECT * FROM idempotency.insert_once(NULL::"ta.b""le", '{"t": 1, "$1": 2, "a\"b''c\\d": 3, "select": 4, "Ünï": 5, "a23456789b123456789c123456789d123456789e123456789f123456789g123": 6}');
SELECT created FROM idempotency.insert_once(NULL::"ta.b""le", '{"t": 1, "$1": 2, "a\"b''c\\d": 3, "select": 4, "Ünï": 5, "a23456789b123456789c123456789d123456789e123456789f123456789g123": 6}');
-- a table, a type and an operator of the same names in front
CREATE TABLE io_shadow.pay_order (id int, request_id text UNIQUE);
CREATE FUNCTION io_shadow.never(text, text) RETURNS boolean LANGUAGE sql IMMUTABLE AS 'SELECT false';
CREATE OPERATOR io_shadow.= (LEFTARG = text, RIGHTARG = text, FUNCTION = io_shadow.never);
CREATE DOMAIN io_shadow.text AS pg_catalog.text CHECK (false);
CREATE DOMAIN io_shadow.numeric AS pg_catalog.numeric CHECK (false);
SET search_path = io_shadow, pg_catalog, io;
SELECT created, (stored).request_id FROM idempotency.insert_once(NULL::io.pay_order, '{"request_id": "r1", "amount": 2}');
SELECT created, (stored).request_id FROM idempotency.insert_once(NULL::io.pay_order, '{"request_id": "shadow", "amount": 1}');
SELECT created, (stored).request_id FROM idempotency.insert_once(NULL::io.pay_order, '{"request_id": "shadow", "amount": 1}');
SELECT created FROM idempotency.insert_once(NULL::io_shadow.pay_order, '{"request_id": "shadow"}');
SELECT (SELECT count(*) FROM io_shadow.pay_order) AS shadow, (SELECT count(*) FROM io.pay_order WHERE request_id OPERATOR(pg_catalog.=) 'shadow') AS real;
SET search_path = io, pg_temp;

----------------------------------------------------------------------------
-- The table changes between the calls
----------------------------------------------------------------------------
CREATE TABLE moving (gone int, k text UNIQUE, gone2 text, v int DEFAULT 1);
PREPARE moving_insert(jsonb) AS SELECT * FROM idempotency.insert_once(NULL::moving, $1);
SET plan_cache_mode = force_generic_plan;
EXECUTE moving_insert('{"k": "a"}');
EXECUTE moving_insert('{"k": "a"}');
SELECT created, to_jsonb(stored) FROM idempotency.insert_once(NULL::moving, '{"k": "a"}');
ALTER TABLE moving DROP COLUMN gone;
SELECT io.try($$SELECT idempotency.insert_once(NULL::moving, '{"k": "a", "gone": 1}')$$);
SELECT created, to_jsonb(stored) FROM idempotency.insert_once(NULL::moving, '{"k": "a"}');
SELECT created, to_jsonb(stored) FROM idempotency.insert_once(NULL::moving, '{"k": "b"}');
ALTER TABLE moving DROP COLUMN gone2, ADD COLUMN w text DEFAULT 'w';
SELECT created, to_jsonb(stored) FROM idempotency.insert_once(NULL::moving, '{"k": "a"}');
SELECT created, to_jsonb(stored) FROM idempotency.insert_once(NULL::moving, '{"k": "c"}');
ALTER TABLE moving RENAME COLUMN k TO key;
SELECT io.try($$SELECT idempotency.insert_once(NULL::moving, '{"k": "a"}')$$);
SELECT created, to_jsonb(stored) FROM idempotency.insert_once(NULL::moving, '{"key": "a"}');
ALTER TABLE moving ALTER COLUMN key TYPE varchar(2), ALTER COLUMN v SET DEFAULT 2;
SELECT created, to_jsonb(stored) FROM idempotency.insert_once(NULL::moving, '{"key": "a"}');
SELECT created, to_jsonb(stored) FROM idempotency.insert_once(NULL::moving, '{"key": "d"}');
SELECT io.try($$SELECT idempotency.insert_once(NULL::moving, '{"key": "abc"}')$$);
ALTER TABLE moving RENAME TO moved;
SELECT created, to_jsonb(stored) FROM idempotency.insert_once(NULL::moved, '{"key": "a"}');
CREATE TABLE moving (key text UNIQUE, v int DEFAULT 7);
SELECT created, to_jsonb(stored) FROM idempotency.insert_once(NULL::moving, '{"key": "a"}');
SELECT created, to_jsonb(stored) FROM idempotency.insert_once(NULL::moved, '{"key": "a"}');
DROP TABLE moving;
CREATE TABLE moving (v int, key text PRIMARY KEY);
SELECT created, to_jsonb(stored) FROM idempotency.insert_once(NULL::moving, '{"key": "a"}');
SELECT created, to_jsonb(stored) FROM idempotency.insert_once(NULL::moving, '{"key": "a"}');
EXECUTE moving_insert('{"key": "a"}');
RESET plan_cache_mode;
-- the schema is renamed, and another takes its name
CREATE TABLE io_shadow.renamed (k int UNIQUE, v text DEFAULT 'first');
SELECT created, stored FROM idempotency.insert_once(NULL::io_shadow.renamed, '{"k": 1}');
RESET ROLE;
ALTER SCHEMA io_shadow RENAME TO io_first;
CREATE SCHEMA io_shadow AUTHORIZATION regress_insert_app;
SET ROLE regress_insert_app;
CREATE TABLE io_shadow.renamed (k int UNIQUE, v text DEFAULT 'second');
SELECT created, stored FROM idempotency.insert_once(NULL::io_first.renamed, '{"k": 1}');
SELECT created, stored FROM idempotency.insert_once(NULL::io_first.renamed, '{"k": 2}');
SELECT created, stored FROM idempotency.insert_once(NULL::io_shadow.renamed, '{"k": 1}');
-- temporary tables come and go; more shapes than are kept
DO $$
DECLARE
  created boolean;
BEGIN
  FOR i IN 1 .. 400 LOOP
    CREATE TEMP TABLE passing (k int UNIQUE, v int);
    EXECUTE $q$SELECT created FROM idempotency.insert_once(NULL::passing, '{"k": 1, "v": 1}')$q$ INTO STRICT created;
    ASSERT created;
    EXECUTE $q$SELECT created FROM idempotency.insert_once(NULL::passing, '{"k": 1}')$q$ INTO STRICT created;
    ASSERT NOT created;
    DROP TABLE passing;
  END LOOP;
END
$$;
RESET ROLE;
SELECT count(*) BETWEEN 1 AND 300 AS bounded FROM pg_backend_memory_contexts WHERE name = 'idempotency plan';
SET ROLE regress_insert_app;
-- also while a call is using one: a trigger needs more shapes than are kept
CREATE TABLE wide (a int UNIQUE, b int, c int, d int, e int, f int, g int, h int, i int);
CREATE TABLE busy (k int UNIQUE, v int);
CREATE FUNCTION busy() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
  row jsonb;
BEGIN
  FOR n IN 0 .. 255 LOOP
    SELECT jsonb_object_agg(chr(98 + bit), bit) INTO row FROM generate_series(0, 7) AS bit WHERE n & (1 << bit) <> 0;
    PERFORM idempotency.insert_once(NULL::io.wide, coalesce(row, '{}') || jsonb_build_object('a', n));
  END LOOP;
  RETURN NULL;
END
$$;
CREATE TRIGGER busy AFTER INSERT ON busy FOR EACH STATEMENT EXECUTE FUNCTION busy();
SELECT * FROM idempotency.insert_once(NULL::busy, '{"k": 1}');
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT * FROM idempotency.insert_once(NULL::busy, '{"k": 1}');
COMMIT;
SELECT count(*), count(b), count(i) FROM wide;
-- a temporary table may be written where others may not
CREATE TEMP TABLE scratch (k int UNIQUE);
BEGIN READ ONLY;
SELECT * FROM idempotency.insert_once(NULL::scratch, '{"k": 1}');
COMMIT;

----------------------------------------------------------------------------
-- Triggers
----------------------------------------------------------------------------
CREATE TABLE fired (k text UNIQUE, v int, note text);
CREATE TABLE fired_log (what text);
CREATE FUNCTION fired() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO io.fired_log VALUES (TG_WHEN || ' ' || NEW.k);
  IF TG_WHEN = 'AFTER' THEN
    UPDATE io.fired SET v = v + 1 WHERE k = NEW.k;
    RETURN NULL;
  END IF;
  CASE NEW.note
    WHEN 'swallow' THEN RETURN NULL;
    WHEN 'lower' THEN NEW.k := lower(NEW.k);
    WHEN 'null' THEN NEW.k := NULL;
    WHEN 'nested' THEN
      NEW.v := (SELECT (stored).v FROM idempotency.insert_once(NULL::io.fired, jsonb_build_object('k', NEW.k || '+', 'v', 5, 'note', 'inner')));
    WHEN 'same' THEN
      PERFORM idempotency.insert_once(NULL::io.fired, jsonb_build_object('k', NEW.k, 'v', 5, 'note', 'inner'));
    ELSE NEW.note := upper(NEW.note);
  END CASE;
  RETURN NEW;
END
$$;
CREATE TRIGGER b BEFORE INSERT ON fired FOR EACH ROW EXECUTE FUNCTION fired();
CREATE TRIGGER a AFTER INSERT ON fired FOR EACH ROW EXECUTE FUNCTION fired();
-- the trigger's value is stored; an AFTER trigger's update shows from the next call on, as with RETURNING
SELECT * FROM idempotency.insert_once(NULL::fired, '{"k": "a", "v": 1, "note": "n"}');
SELECT * FROM idempotency.insert_once(NULL::fired, '{"k": "a", "v": 1, "note": "n"}');
-- swallowed: neither created nor there, again and again; with the row there it is a replay
SELECT * FROM idempotency.insert_once(NULL::fired, '{"k": "s", "v": 1, "note": "swallow"}');
SELECT created, stored IS NULL AS none FROM idempotency.insert_once(NULL::fired, '{"k": "s", "v": 1, "note": "swallow"}');
SELECT * FROM idempotency.insert_once(NULL::fired, '{"k": "a", "v": 1, "note": "swallow"}');
-- a trigger that changes the key would hide the row from the next call
SELECT io.try($$SELECT idempotency.insert_once(NULL::fired, '{"k": "A", "v": 1, "note": "lower"}')$$);
SELECT io.try($$SELECT idempotency.insert_once(NULL::fired, '{"k": "B", "v": 1, "note": "lower"}')$$);
SELECT io.try($$SELECT idempotency.insert_once(NULL::fired, '{"k": "B", "v": 1, "note": "null"}')$$);
SELECT * FROM idempotency.insert_once(NULL::fired, '{"k": "low", "v": 1, "note": "lower"}');
-- insert_once inside a trigger of the same table, also for the very key
SELECT * FROM idempotency.insert_once(NULL::fired, '{"k": "n", "v": 1, "note": "nested"}');
SELECT * FROM idempotency.insert_once(NULL::fired, '{"k": "x", "v": 1, "note": "same"}');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT * FROM idempotency.insert_once(NULL::fired, '{"k": "y", "v": 1, "note": "same"}');
COMMIT;
-- SERIALIZABLE tries the insert first: swallowed or not, the row that is there comes back
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT * FROM idempotency.insert_once(NULL::fired, '{"k": "a", "v": 1, "note": "n"}');
SELECT * FROM idempotency.insert_once(NULL::fired, '{"k": "a", "v": 1, "note": "swallow"}');
SELECT * FROM idempotency.insert_once(NULL::fired, '{"k": "s", "v": 1, "note": "swallow"}');
COMMIT;
SELECT what, count(*) FROM fired_log GROUP BY what ORDER BY what COLLATE "C";

----------------------------------------------------------------------------
-- Partitions and inheritance
----------------------------------------------------------------------------
CREATE TABLE part (region text, k int, v text DEFAULT 'root', PRIMARY KEY (region, k)) PARTITION BY LIST (region);
CREATE TABLE part_eu PARTITION OF part FOR VALUES IN ('eu');
CREATE TABLE part_us (gone int, v text, k int NOT NULL, region text NOT NULL);
ALTER TABLE part_us DROP COLUMN gone;
ALTER TABLE part ATTACH PARTITION part_us FOR VALUES IN ('us');
SELECT * FROM idempotency.insert_once(NULL::part, '{"region": "eu", "k": 1}');
SELECT * FROM idempotency.insert_once(NULL::part, '{"region": "eu", "k": 1, "v": "x"}');
SELECT * FROM idempotency.insert_once(NULL::part, '{"region": "us", "k": 1, "v": "u"}');
SELECT * FROM idempotency.insert_once(NULL::part, '{"region": "us", "k": 1, "v": "x"}');
SELECT * FROM idempotency.insert_once(NULL::part_us, '{"region": "us", "k": 1}');
SELECT io.try($$SELECT idempotency.insert_once(NULL::part_us, '{"region": "eu", "k": 1}')$$);
SELECT io.try($$SELECT idempotency.insert_once(NULL::part, '{"region": "asia", "k": 1}')$$);
CREATE TABLE part_asia PARTITION OF part FOR VALUES IN ('asia');
CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER s BEFORE INSERT ON part_asia FOR EACH ROW EXECUTE FUNCTION swallow();
SELECT * FROM idempotency.insert_once(NULL::part, '{"region": "asia", "k": 1}');
SELECT tableoid::regclass, * FROM part ORDER BY region;
CREATE TABLE parent (k int UNIQUE, v text);
CREATE TABLE child () INHERITS (parent);
INSERT INTO child VALUES (1, 'child');
SELECT * FROM idempotency.insert_once(NULL::parent, '{"k": 1, "v": "parent"}');
SELECT * FROM idempotency.insert_once(NULL::parent, '{"k": 1, "v": "parent"}');
SELECT io.try($$SELECT idempotency.insert_once(NULL::child, '{"k": 1}')$$);

----------------------------------------------------------------------------
-- The caller's privileges and row security
----------------------------------------------------------------------------
RESET ROLE;
SELECT idempotency.grant_usage('regress_insert_other');
GRANT USAGE ON SCHEMA io TO regress_insert_other;
SET ROLE regress_insert_app;
CREATE TABLE owned (tenant text DEFAULT current_user, k int UNIQUE, v int);
SELECT * FROM idempotency.insert_once(NULL::owned, '{"k": 1, "v": 1}');
SET ROLE regress_insert_other;
SELECT io.try($$SELECT idempotency.insert_once(NULL::io.owned, '{"k": 2, "v": 1}')$$);
RESET ROLE;
GRANT INSERT ON io.owned TO regress_insert_other;
SET ROLE regress_insert_other;
SELECT io.try($$SELECT idempotency.insert_once(NULL::io.owned, '{"k": 2, "v": 1}')$$);
RESET ROLE;
GRANT SELECT ON io.owned TO regress_insert_other;
REVOKE INSERT ON io.owned FROM regress_insert_other;
GRANT INSERT (k, tenant) ON io.owned TO regress_insert_other;
SET ROLE regress_insert_other;
SELECT io.try($$SELECT idempotency.insert_once(NULL::io.owned, '{"k": 2, "v": 1}')$$);
SELECT * FROM idempotency.insert_once(NULL::io.owned, '{"k": 2}');
SELECT * FROM idempotency.insert_once(NULL::io.owned, '{"k": 1}');
RESET ROLE;
GRANT INSERT ON io.owned TO regress_insert_other;
ALTER TABLE io.owned ENABLE ROW LEVEL SECURITY;
CREATE POLICY mine ON io.owned USING (tenant = current_user);
SET ROLE regress_insert_other;
SELECT * FROM idempotency.insert_once(NULL::io.owned, '{"k": 2}');
SELECT * FROM idempotency.insert_once(NULL::io.owned, '{"k": 3, "v": 3}');
SELECT io.try($$SELECT idempotency.insert_once(NULL::io.owned, '{"k": 1}')$$);
SELECT io.try($$SELECT idempotency.insert_once(NULL::io.owned, '{"k": 4, "tenant": "regress_insert_app"}')$$);
SET row_security = off;
SELECT io.try($$SELECT idempotency.insert_once(NULL::io.owned, '{"k": 2}')$$);
RESET row_security;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT io.try($$SELECT idempotency.insert_once(NULL::io.owned, '{"k": 1}')$$);
SELECT created FROM idempotency.insert_once(NULL::io.owned, '{"k": 2}');
COMMIT;
-- the same session, another role: the owner is not bound, until it is forced
SET ROLE regress_insert_app;
SELECT * FROM idempotency.insert_once(NULL::owned, '{"k": 3}');
ALTER TABLE owned FORCE ROW LEVEL SECURITY;
SELECT * FROM idempotency.insert_once(NULL::owned, '{"k": 1}');
SELECT io.try($$SELECT idempotency.insert_once(NULL::io.owned, '{"k": 3}')$$);
SET ROLE regress_insert_other;
SELECT * FROM idempotency.insert_once(NULL::io.owned, '{"k": 3}');
SELECT io.try($$SELECT idempotency.insert_once(NULL::io.owned, '{"k": 1}')$$);
RESET ROLE;
SELECT * FROM idempotency.insert_once(NULL::io.owned, '{"k": 1}');
-- without a grant of ours, nothing
SELECT idempotency.revoke_usage('regress_insert_other');
SET ROLE regress_insert_other;
SELECT io.try($$SELECT idempotency.insert_once(NULL::io.owned, '{"k": 2}')$$);

RESET ROLE;
DROP SCHEMA io, io_first, io_shadow CASCADE;
DROP OWNED BY regress_insert_app, regress_insert_other;
DROP ROLE regress_insert_app, regress_insert_other;
