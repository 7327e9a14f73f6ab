-- Keys and states of every type that machines take.
\set VERBOSITY terse
\set SHOW_CONTEXT never
\pset null '(null)'
CREATE ROLE regress_typist;
SELECT idempotency.grant_usage('regress_typist');
CREATE SCHEMA "My ""Schema""" AUTHORIZATION regress_typist;
SELECT idempotency.define_machine('ty', '{"initial": "new", "transitions": {"new": {"pay": "paid"}, "paid": {"ship": "sent off"}}}');
SET ROLE regress_typist;
SET search_path = "My ""Schema""";
CREATE TYPE state AS ENUM ('new', 'paid', 'sent off');
CREATE DOMAIN dstate AS state;
CREATE DOMAIN dtext AS text CHECK (VALUE <> 'never');
CREATE DOMAIN dint AS int CHECK (VALUE > 0);
CREATE TABLE t_varchar (id int PRIMARY KEY, s varchar(8));
CREATE TABLE t_char (id smallint PRIMARY KEY, s char(10));
CREATE TABLE t_enum (id bigint PRIMARY KEY, s state);
CREATE TABLE t_dstate (id uuid PRIMARY KEY, s dstate);
CREATE TABLE t_dtext (id dint PRIMARY KEY, s dtext);
CREATE TABLE t_coll (id varchar(9) COLLATE "C" PRIMARY KEY, s text COLLATE "C");
CREATE TABLE t_keyenum (id state PRIMARY KEY, s text);
CREATE TABLE t_keydomain (id dstate, a varchar(8)[], s text, PRIMARY KEY (id, a));
CREATE TABLE t_date (id date PRIMARY KEY, s text);
CREATE TABLE t_num (id numeric PRIMARY KEY, s text);
CREATE TABLE t_json (id jsonb PRIMARY KEY, s text);
CREATE TABLE "T ""Q""" ("I d" int, "J'd" timestamptz, "S t" text, PRIMARY KEY ("J'd", "I d"));
INSERT INTO t_varchar VALUES (1, 'new');
INSERT INTO t_char VALUES (1, 'new');
INSERT INTO t_enum VALUES (1, 'new'), (2, 'new');
INSERT INTO t_dstate VALUES ('123e4567-e89b-12d3-a456-426614174000', 'new');
INSERT INTO t_dtext VALUES (1, 'new');
INSERT INTO t_coll VALUES ('a', 'new'), ('A', 'new');
INSERT INTO t_keyenum VALUES ('paid', 'new');
INSERT INTO t_keydomain VALUES ('paid', '{x}', 'new');
INSERT INTO t_date VALUES ('2026-01-31', 'new');
INSERT INTO t_num VALUES (1.50, 'new');
INSERT INTO t_json VALUES ('{"a": 1}', 'new');
INSERT INTO "T ""Q""" VALUES (1, '2026-01-01 00:00Z', 'new');
SELECT idempotency.attach_machine(c.oid, 's', 'ty', true) FROM pg_class c
WHERE relnamespace = '"My ""Schema"""'::regnamespace AND relkind = 'r' AND relname LIKE 't\_%';
SELECT idempotency.attach_machine('"T ""Q"""', 'S t', 'ty', true);

SELECT * FROM idempotency.transition('t_varchar', 1, 'new', 'paid');
SELECT * FROM idempotency.transition('t_varchar', '1', 'paid', 'sent off', '{"s": "new"}');
SELECT * FROM idempotency.transition('t_varchar', '1'::varchar, 'paid', 'sent off');
SELECT * FROM idempotency.transition('t_varchar', 1::smallint, 'paid', 'sent off');
-- char(n): trailing blanks do not count, on either side
SELECT * FROM idempotency.transition('t_char', 1, 'new   ', 'paid ');
SELECT * FROM idempotency.transition('t_char', 1, 'new', 'paid');
SELECT * FROM idempotency.fire('t_char', 1::bigint, 'ship');
UPDATE t_char SET s = 'sent off   ';
UPDATE t_char SET s = 'new';
-- enum
SELECT * FROM idempotency.transition('t_enum', 1, 'new', 'paid');
SELECT * FROM idempotency.transition('t_enum', 1::numeric, NULL, 'sent off');
SELECT * FROM idempotency.transition('t_enum', 1, 'new', 'gone');
UPDATE t_enum SET s = 'sent off' WHERE id = 2;
SELECT * FROM idempotency.transition('t_dstate', '123e4567-e89b-12d3-a456-426614174000', 'new', 'paid');
SELECT * FROM idempotency.fire('t_dstate', '123e4567-e89b-12d3-a456-426614174000'::uuid, 'ship');
SELECT * FROM idempotency.transition('t_dtext', 1, 'new', 'paid');
SELECT * FROM idempotency.transition('t_dtext', 1::dint, 'paid', 'sent off');
SELECT * FROM idempotency.transition('t_coll', 'A', 'new', 'paid');
SELECT * FROM idempotency.transition('t_coll', 'A'::text, 'new', 'paid');
SELECT * FROM t_coll ORDER BY id;
SELECT * FROM idempotency.transition('t_keyenum', 'paid', 'new', 'paid');
SELECT * FROM idempotency.transition('t_keyenum', 'paid'::state, 'new', 'paid');
-- neither an enum nor an array of text to the parser, but to the index
SELECT * FROM idempotency.transition('t_keydomain', '{"id": "paid", "a": "{x}"}', 'new', 'paid');
SELECT * FROM idempotency.transition('t_date', '2026-01-31'::date, 'new', 'paid');
SELECT * FROM idempotency.transition('t_num', 1.5, 'new', 'paid');
SELECT * FROM idempotency.transition('t_json', '{"a": 1.0}'::jsonb, 'new', 'paid');
-- several columns: an object, as jsonb or as text; and what the history shows
SELECT * FROM idempotency.transition('"T ""Q"""', '{"I d": 1, "J''d": "2026-01-01T01:00:00+01:00"}', 'new', 'paid');
SELECT * FROM idempotency.fire('"T ""Q"""', jsonb_build_object('I d', 1, 'J''d', '2026-01-01 00:00Z'::timestamptz), 'ship');
SELECT idempotency.fire('"T ""Q"""', 1, 'ship');
SELECT idempotency.fire('"T ""Q"""', '{"I d": 1}', 'ship');
SELECT idempotency.fire('"T ""Q"""', '{"I d": 1, "j": 2}', 'ship');
SELECT idempotency.fire('"T ""Q"""', '{"I d": 1, "J''d": null}', 'ship');
SELECT idempotency.fire('"T ""Q"""', '{"I d": [1], "J''d": "now"}', 'ship');
SELECT idempotency.fire('"T ""Q"""', 'not json', 'ship');
-- a single column as jsonb: what off_graph and the history give
SELECT * FROM idempotency.transition('t_enum', '2'::jsonb, 'new', 'paid');
SELECT * FROM idempotency.transition('t_enum', '{"id": 2}'::jsonb, 'new', 'paid');
SELECT * FROM idempotency.transition('t_coll', '"a"'::jsonb, 'new', 'paid');

-- labels renamed and added: the machine does not know them, and says so
ALTER TYPE state RENAME VALUE 'paid' TO 'settled';
SELECT idempotency.transition('t_enum', 2, 'new', 'paid');
SELECT idempotency.transition('t_enum', 2, 'new', 'settled');
SELECT idempotency.fire('t_enum', 2, 'ship');
BEGIN;
ALTER TYPE state ADD VALUE 'paid';
SELECT idempotency.fire('t_dstate', '123e4567-e89b-12d3-a456-426614174000', 'ship');
ROLLBACK;
INSERT INTO t_enum VALUES (3, 'new');
BEGIN;
ALTER TYPE state ADD VALUE 'paid';
SELECT idempotency.fire('t_enum', 3, 'pay');
ROLLBACK;
ALTER TYPE state ADD VALUE 'paid';
SELECT * FROM idempotency.fire('t_enum', 3, 'pay');

-- a type may be renamed, and stand in a schema that the caller may not use: an
-- UPDATE names it no more than one by hand
RESET ROLE;
CREATE ROLE regress_typist_other;
SELECT idempotency.grant_usage('regress_typist_other');
CREATE SCHEMA regress_types AUTHORIZATION regress_typist;
GRANT USAGE ON SCHEMA "My ""Schema""" TO regress_typist_other;
SET ROLE regress_typist;
CREATE TYPE regress_types.state AS ENUM ('new', 'paid', 'sent off');
CREATE DOMAIN regress_types.dstate AS regress_types.state;
CREATE DOMAIN regress_types.short AS varchar(4) NOT NULL;
CREATE TABLE far (id regress_types.state PRIMARY KEY, s regress_types.state, other regress_types.state, note regress_types.short DEFAULT '');
CREATE TABLE dfar (id regress_types.state PRIMARY KEY, s regress_types.dstate);
SELECT idempotency.attach_machine(t, 's', 'ty') FROM unnest('{far, dfar}'::regclass[]) t;
INSERT INTO far VALUES ('new', 'new'), ('paid', 'new');
INSERT INTO dfar VALUES ('new', 'new'), ('paid', 'new');
GRANT SELECT, UPDATE ON far, dfar TO regress_typist_other;
CREATE FUNCTION regress_types.alike(regress_types.state) RETURNS text LANGUAGE sql AS $$ SELECT 'alike' $$;
CREATE CAST (regress_types.state AS text) WITH FUNCTION regress_types.alike;
SET ROLE regress_typist_other;
SELECT * FROM idempotency.transition('far', 'new', 'new', 'paid', '{"other": "paid", "note": "abcd"}');
SELECT * FROM idempotency.transition('dfar', 'new', 'new', 'paid');
SELECT * FROM idempotency.transition('dfar', 'paid', 'paid', 'sent off');
SELECT * FROM idempotency.transition('far', 'new', 'paid', 'sent off', '{"note": null}');
SELECT * FROM idempotency.transition('far', 'new', 'paid', 'sent off', '{"note": "abcde"}');
SELECT * FROM idempotency.transition('far', 'new', 'paid', 'sent off', '{"other": "no"}');
SELECT * FROM far ORDER BY id;
RESET ROLE;
ALTER TYPE regress_types.state RENAME TO status;
ALTER DOMAIN regress_types.dstate RENAME TO dstatus;
ALTER DOMAIN regress_types.short RENAME TO text;
SET ROLE regress_typist_other;
SET search_path = "My ""Schema""", pg_temp;
SELECT * FROM idempotency.transition('far', 'paid', 'new', 'paid', '{"other": "new", "note": "abc"}');
SELECT * FROM idempotency.transition('dfar', 'paid', 'new', 'paid');

RESET ROLE;
SET timezone = 'UTC';
SELECT table_name, row_id, event, from_state, to_state FROM idempotency.transition_log ORDER BY id;
DELETE FROM idempotency.transition_log;
SELECT * FROM idempotency.off_graph('t_enum');

-- a cast that the table's owner made runs for nobody who looks at the table
SET ROLE regress_typist;
CREATE FUNCTION as_text(state) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'run by %', current_user; END $$;
CREATE FUNCTION as_json(state) RETURNS json LANGUAGE plpgsql AS $$ BEGIN RAISE 'run by %', current_user; END $$;
CREATE CAST (state AS text) WITH FUNCTION as_text(state);
CREATE CAST (state AS json) WITH FUNCTION as_json(state);
CREATE TYPE pair AS (a state, b int);
CREATE TABLE k_enum (id dstate PRIMARY KEY, s dstate);
CREATE TABLE k_array (id state[] PRIMARY KEY, s state);
CREATE TABLE k_pair (id pair, n int, s text, PRIMARY KEY (n, id));
INSERT INTO k_enum VALUES ('new', 'settled'), ('paid', 'new'), ('sent off', NULL);
INSERT INTO k_array VALUES ('{sent off,new}', 'new');
INSERT INTO k_pair VALUES ('(sent off,1)', 2, 'new');
SELECT idempotency.attach_machine(t, 's', 'ty') FROM unnest('{k_array,k_pair}'::regclass[]) t;
RESET ROLE;
SELECT idempotency.attach_machine('k_enum', 's', 'ty');
DELETE FROM k_enum WHERE s IS NULL;
SELECT idempotency.attach_machine('k_enum', 's', 'ty');
UPDATE k_enum SET s = 'new';
SELECT idempotency.attach_machine('k_enum', 's', 'ty');
SET session_replication_role = replica;
UPDATE k_enum SET s = 'settled' WHERE id::state = 'new';
UPDATE k_array SET s = 'settled';
UPDATE k_pair SET s = NULL;
RESET session_replication_role;
SELECT t, g.* FROM unnest('{k_enum,k_array,k_pair}'::regclass[]) t, idempotency.off_graph(t) g;

SET client_min_messages = warning;
DROP SCHEMA "My ""Schema""", regress_types CASCADE;
SELECT idempotency.drop_machine('ty');
SELECT idempotency.revoke_usage('regress_typist');
SELECT idempotency.revoke_usage('regress_typist_other');
DROP ROLE regress_typist, regress_typist_other;
