-- run(): claim a key, call a function as the caller, store what it returns.
CREATE ROLE regress_app;
CREATE ROLE regress_other;
CREATE SCHEMA AUTHORIZATION regress_app;
SELECT idempotency.grant_usage('regress_app');
CREATE SCHEMA run_a;
CREATE SCHEMA run_b;
CREATE SCHEMA run_closed;
CREATE FUNCTION run_a.f(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'a' $$;
CREATE FUNCTION run_b.f(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'b' $$;
CREATE FUNCTION run_closed.f(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'closed' $$;
GRANT USAGE ON SCHEMA run_a, run_b TO regress_app;
SET SESSION AUTHORIZATION regress_app;
\set SHOW_CONTEXT never

-- the first answer, and the same at every retry; the function is called once
CREATE TABLE called (request jsonb);
CREATE FUNCTION pay(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO called VALUES (request);
  RETURN jsonb_build_object('paid', request->'amount', 'n', (SELECT count(*) FROM called));
END $$;
SELECT * FROM idempotency.run('run', 'r1', 'pay', '{"amount": 10}');
SELECT * FROM idempotency.run('run', 'r1', 'pay', '{"amount": 10.0}');
SELECT * FROM idempotency.run('run', 'r1', 'pay', '{"amount": 11}');
SELECT * FROM idempotency.run('run', 'r1', 'pay');
SELECT status, response, meta FROM idempotency.lookup('run', 'r1');
SELECT * FROM called;
-- on a replay the function is not even looked for
SELECT * FROM idempotency.run('run', 'r1', 'no_such_function');
-- a failure of the transaction takes everything back
BEGIN;
SELECT status FROM idempotency.run('run', 'rolled back', 'pay', '{}');
ROLLBACK;
SELECT status IS NULL AS unknown, (SELECT count(*) FROM called) AS called FROM idempotency.lookup('run', 'rolled back');
-- its own claim is not the function's to answer, and nothing stays held
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();

-- what a function may return
CREATE TYPE pair AS (a integer, b text);
CREATE DOMAIN posint AS integer CHECK (VALUE > 0);
CREATE DOMAIN pair_domain AS pair;
CREATE TYPE mood AS ENUM ('sad', 'fine');
CREATE FUNCTION r_void(jsonb) RETURNS void LANGUAGE sql AS $$ INSERT INTO called VALUES ($1) $$;
CREATE FUNCTION r_null(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT NULL $$;
CREATE FUNCTION r_empty(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT '' $$;
CREATE FUNCTION r_false(jsonb) RETURNS boolean LANGUAGE sql AS $$ SELECT false $$;
CREATE FUNCTION r_zero(jsonb) RETURNS integer LANGUAGE plpgsql AS $$ BEGIN RETURN 0; END $$;
CREATE FUNCTION r_json(jsonb) RETURNS json LANGUAGE sql AS $$ SELECT '{"b":1,  "b":2}'::json $$;
CREATE FUNCTION r_jsonb(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT $1 $$;
CREATE FUNCTION r_row(jsonb) RETURNS pair LANGUAGE sql AS $$ SELECT 1, 'x' $$;
CREATE FUNCTION r_row_plpgsql(jsonb) RETURNS pair LANGUAGE plpgsql AS $$ DECLARE p pair; BEGIN p.a := 2; p.b := 'y'; RETURN p; END $$;
CREATE FUNCTION r_row_null(jsonb) RETURNS pair LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE FUNCTION r_row_domain(jsonb) RETURNS pair_domain LANGUAGE sql AS $$ SELECT ROW(3, 'z')::pair_domain $$;
CREATE FUNCTION r_table_row(jsonb) RETURNS called LANGUAGE sql AS $$ SELECT * FROM called LIMIT 1 $$;
CREATE FUNCTION r_out(jsonb, OUT n integer, OUT t text) LANGUAGE plpgsql AS $$ BEGIN n := 4; t := 'out'; END $$;
CREATE FUNCTION r_out_sql(jsonb, OUT n integer, OUT t text) LANGUAGE sql AS $$ SELECT 5, 'out' $$;
CREATE FUNCTION r_inout(INOUT j jsonb) LANGUAGE sql AS $$ SELECT $1 $$;
CREATE FUNCTION r_record(jsonb) RETURNS record LANGUAGE plpgsql AS $$ DECLARE r record; BEGIN SELECT 6 AS six, 'r' AS r INTO r; RETURN r; END $$;
CREATE FUNCTION r_record_sql(jsonb) RETURNS record LANGUAGE sql AS $$ SELECT 7 AS seven, 's' AS s $$;
CREATE FUNCTION r_domain(jsonb) RETURNS posint LANGUAGE sql AS $$ SELECT 8::posint $$;
CREATE FUNCTION r_array(jsonb) RETURNS integer[] LANGUAGE plpgsql AS $$ BEGIN RETURN ARRAY[9, NULL]; END $$;
CREATE FUNCTION r_rows(jsonb) RETURNS pair[] LANGUAGE sql AS $$ SELECT ARRAY[ROW(10, 'ten')::pair] $$;
CREATE FUNCTION r_enum(jsonb) RETURNS mood LANGUAGE sql AS $$ SELECT 'fine'::mood $$;
CREATE FUNCTION r_varchar(jsonb) RETURNS varchar LANGUAGE sql AS $$ SELECT 'v'::varchar $$;
CREATE FUNCTION r_big(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT repeat('big', 333333) $$;
CREATE FUNCTION r_default(jsonb DEFAULT '{}') RETURNS text LANGUAGE sql AS $$ SELECT coalesce($1::text, 'null') $$;
CREATE FUNCTION r_strict(jsonb) RETURNS text STRICT LANGUAGE plpgsql AS $$ BEGIN INSERT INTO called VALUES ('"strict"'); RETURN 'called'; END $$;
\pset null '(null)'
SELECT proname, status, replayed, left(response, 60) AS response, length(response) AS length, meta
FROM (SELECT proname::text FROM pg_proc WHERE proname LIKE 'r\_%' AND pronamespace = 'regress_app'::regnamespace ORDER BY proname COLLATE "C" OFFSET 0) AS p,
     LATERAL idempotency.run('results', proname, proname, CASE WHEN proname = 'r_strict' THEN 'null'::jsonb END);
SELECT count(*) AS strict_was_called FROM called WHERE request = '"strict"';
-- replayed, each the same
SELECT count(*) AS same
FROM pg_proc, LATERAL idempotency.run('results', proname::text, proname::text) AS again, LATERAL idempotency.lookup('results', proname::text) AS l
WHERE proname LIKE 'r\_%' AND pronamespace = 'regress_app'::regnamespace
  AND again.replayed AND again.response IS NOT DISTINCT FROM l.response;
-- without a request a STRICT function would not be called, and nothing but a NULL be stored
SELECT * FROM idempotency.run('results', 'strict', 'r_strict');
SELECT status FROM idempotency.lookup('results', 'strict');
SELECT * FROM idempotency.run('results', 'strict', 'r_strict', 'null');

-- idempotency.answer: meta is stored beside the response
CREATE FUNCTION a_sql(jsonb) RETURNS idempotency.answer LANGUAGE sql AS $$ SELECT 'made', '{"code": 201}'::jsonb $$;
CREATE FUNCTION a_plpgsql(jsonb) RETURNS idempotency.answer LANGUAGE plpgsql AS $$
DECLARE
  a idempotency.answer;
BEGIN
  a.response := repeat('long ', 100000);
  a.meta := jsonb_build_object('code', 200, 'header', repeat('x', 100000));
  RETURN a;
END $$;
CREATE FUNCTION a_out(request jsonb, OUT response text, OUT meta jsonb) LANGUAGE sql AS $$ SELECT 'no answer', '{}'::jsonb $$;
CREATE FUNCTION a_null(jsonb) RETURNS idempotency.answer LANGUAGE sql AS $$ SELECT NULL::idempotency.answer $$;
CREATE FUNCTION a_nulls(jsonb) RETURNS idempotency.answer LANGUAGE sql AS $$ SELECT NULL::text, NULL::jsonb $$;
CREATE FUNCTION a_meta(jsonb) RETURNS idempotency.answer LANGUAGE sql AS $$ SELECT NULL::text, '{"code": 204}'::jsonb $$;
CREATE DOMAIN a_domain AS idempotency.answer;
CREATE FUNCTION a_domain(jsonb) RETURNS a_domain LANGUAGE sql AS $$ SELECT ROW('made', '{"code": 202}')::idempotency.answer::a_domain $$;
CREATE FUNCTION a_array(jsonb) RETURNS idempotency.answer[] LANGUAGE sql AS $$ SELECT ARRAY[('r', '1')::idempotency.answer] $$;
CREATE TYPE answer AS (response text, meta jsonb);
CREATE FUNCTION a_look_alike(jsonb) RETURNS answer LANGUAGE sql AS $$ SELECT 'mine', '{"code": 1}'::jsonb $$;
SELECT again, proname, status, replayed, left(response, 40) AS response, length(response) AS length, left(meta::text, 40) AS meta
FROM generate_series(1, 2) AS again,
     (SELECT proname::text FROM pg_proc WHERE proname LIKE 'a\_%' AND pronamespace = 'regress_app'::regnamespace ORDER BY proname COLLATE "C" OFFSET 0) AS p,
     LATERAL idempotency.run('answers', proname, proname) AS r ORDER BY again, proname COLLATE "C";
-- complete() stores a row as JSON, of any type
BEGIN;
SELECT status, idempotency.complete('answers', 'row', ROW('r', '{}')::idempotency.answer) > now() AS complete FROM idempotency.claim('answers', 'row');
COMMIT;
SELECT response, meta FROM idempotency.lookup('answers', 'row');

-- what a recorded error says
CREATE TABLE limited (id integer PRIMARY KEY, amount integer CONSTRAINT positive CHECK (amount > 0));
CREATE FUNCTION e_check(jsonb) RETURNS text LANGUAGE sql AS $$ INSERT INTO limited VALUES (1, -1) RETURNING '' $$;
CREATE FUNCTION e_unique(jsonb) RETURNS text LANGUAGE sql AS $$ INSERT INTO limited VALUES (1, 1), (1, 1) RETURNING '' $$;
CREATE FUNCTION e_raise(jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  RAISE 'no "money"' USING DETAIL = 'Balance is 3.', HINT = E'Pay \\ in.', CONSTRAINT = 'balance';
END $$;
CREATE FUNCTION e_bare(jsonb) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE ''; END $$;
SELECT status, jsonb_pretty(meta) FROM unnest('{e_check,e_unique,e_raise,e_bare}'::text[]) AS f, LATERAL idempotency.run('errors', f, f, record_errors => true);
SELECT * FROM idempotency.run('results', 'jsonb', 'r_jsonb', '{"a": [1, null]}');
SELECT * FROM idempotency.run('results', 'internal language', 'jsonb_typeof', '[]');
\pset null ''

-- the function is found by the caller's search_path
SET search_path = run_a, run_b;
SELECT response FROM idempotency.run('path', '1', 'f');
SET search_path = run_b, run_a;
SELECT response FROM idempotency.run('path', '2', 'f');
SELECT response FROM idempotency.run('path', '3', 'run_a.f');
SELECT response FROM idempotency.run('path', '4', 'run_a.f(jsonb)');
SELECT response FROM idempotency.run('path', '5', 'run_a.f ( pg_catalog.jsonb )');
SELECT response FROM idempotency.run('path', '5b', E' run_a.f(jsonb) \n');
RESET search_path;
CREATE FUNCTION "Odd name.f"(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'odd' $$;
SELECT response FROM idempotency.run('path', '6', '"Odd name.f"');
SELECT response FROM idempotency.run('path', '7', 'regress_app."Odd name.f"(jsonb)');
-- a name of ours to catch: resolution is safe from what stands in a type's place
CREATE DOMAIN jsonb AS text;
SELECT response FROM idempotency.run('path', '8', 'run_a.f');
DROP DOMAIN regress_app.jsonb;

-- what cannot be called: before the claim is made to stay, so the key is free after
CREATE FUNCTION try(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  result text;
BEGIN
  EXECUTE 'SELECT (' || sql || ')::text' INTO result;
  RETURN 'no error: ' || coalesce(result, 'NULL');
EXCEPTION WHEN query_canceled OR assert_failure OR OTHERS THEN
  RETURN SQLSTATE || ': ' || SQLERRM;
END $$;
CREATE PROCEDURE p(jsonb) LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION f_none() RETURNS text LANGUAGE sql AS $$ SELECT 'x' $$;
CREATE FUNCTION f_text(text) RETURNS text LANGUAGE sql AS $$ SELECT $1 $$;
CREATE FUNCTION f_json(json) RETURNS text LANGUAGE sql AS $$ SELECT 'x' $$;
CREATE FUNCTION f_two(jsonb, integer DEFAULT 1) RETURNS text LANGUAGE sql AS $$ SELECT 'x' $$;
CREATE FUNCTION f_any(anyelement) RETURNS text LANGUAGE sql AS $$ SELECT 'x' $$;
CREATE FUNCTION f_variadic(VARIADIC jsonb[]) RETURNS text LANGUAGE sql AS $$ SELECT 'x' $$;
CREATE DOMAIN jsonb_domain AS jsonb;
CREATE FUNCTION f_domain(jsonb_domain) RETURNS text LANGUAGE sql AS $$ SELECT 'x' $$;
CREATE FUNCTION f_set(jsonb) RETURNS SETOF text LANGUAGE sql AS $$ SELECT 'x' $$;
CREATE FUNCTION f_table(jsonb) RETURNS TABLE (a text) LANGUAGE sql AS $$ SELECT 'x' $$;
CREATE FUNCTION f_trigger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE AGGREGATE agg(jsonb) (SFUNC = jsonb_concat, STYPE = jsonb);
SELECT name, try(format('idempotency.run(''wrong'', ''k'', %L, ''{}'', record_errors => true)', name))
FROM unnest(ARRAY['p', 'p(jsonb)', 'agg', 'agg(jsonb)', 'jsonb_agg(anyelement)', 'first_value(anyelement)', 'f_set', 'f_table', 'jsonb_array_elements',
                  'f_none', 'f_none()', 'f_text', 'f_text(text)', 'f_json', 'f_json(json)', 'f_two', 'f_two(jsonb, integer)', 'f_any', 'f_any(anyelement)',
                  'f_variadic', 'f_variadic(jsonb[])', 'f_domain', 'f_domain(jsonb_domain)', 'f_trigger', 'f_trigger()', 'jsonb_out', 'no_such', 'run_a.no_such'])
  WITH ORDINALITY AS n(name, i) ORDER BY i;
SELECT status IS NULL AS unknown FROM idempotency.lookup('wrong', 'k');

-- EXECUTE is checked, as the caller; and USAGE on the schema
SELECT try($$idempotency.run('wrong', 'k', 'run_closed.f', record_errors => true)$$);
RESET SESSION AUTHORIZATION;
REVOKE EXECUTE ON FUNCTION run_a.f(jsonb) FROM PUBLIC;
SET SESSION AUTHORIZATION regress_app;
SELECT try($$idempotency.run('wrong', 'k', 'run_a.f', record_errors => true)$$);
RESET SESSION AUTHORIZATION;
GRANT EXECUTE ON FUNCTION run_a.f(jsonb) TO regress_app;
SET SESSION AUTHORIZATION regress_app;
SELECT try($$idempotency.run('allowed', 'k', 'run_a.f')$$);

-- as the caller, or as a definer
CREATE FUNCTION whoami(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT current_user::text $$;
RESET SESSION AUTHORIZATION;
CREATE FUNCTION run_a.definer(jsonb) RETURNS text SECURITY DEFINER SET work_mem = '123kB' LANGUAGE sql
  AS $$ SELECT current_user || ' ' || current_setting('work_mem') $$;
ALTER FUNCTION run_a.definer(jsonb) OWNER TO regress_other;
SET SESSION AUTHORIZATION regress_app;
SELECT response FROM idempotency.run('as', 'invoker', 'whoami');
SELECT response, current_user FROM idempotency.run('as', 'definer', 'run_a.definer');
-- and a definer that runs on behalf of others uses its own rights
RESET SESSION AUTHORIZATION;
CREATE FUNCTION run_b.for_all(k text) RETURNS text SECURITY DEFINER SET search_path = regress_app LANGUAGE sql
  AS $$ SELECT response FROM idempotency.run('as', k, 'whoami') $$;
ALTER FUNCTION run_b.for_all(text) OWNER TO regress_app;
GRANT USAGE ON SCHEMA run_b TO regress_other;
SET SESSION AUTHORIZATION regress_other;
SELECT run_b.for_all('for all');
SET SESSION AUTHORIZATION regress_app;

-- what the function itself does with its key stands
CREATE FUNCTION own(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  k text := request->>'k';
BEGIN
  RAISE NOTICE 'key %: %', k, (idempotency.claim('own', k)).status;
  CASE request->>'do'
    WHEN 'complete' THEN PERFORM idempotency.complete('own', k, 'by the function', '{"by": "function"}');
    WHEN 'fail' THEN PERFORM idempotency.fail('own', k, 'refused by the function');
    WHEN 'release' THEN PERFORM idempotency.release('own', k);
    WHEN 'release and claim' THEN
      PERFORM idempotency.release('own', k);
      RAISE NOTICE 'again: %', (idempotency.claim('own', k)).status;
    WHEN 'once' THEN RAISE NOTICE 'once: %', idempotency.once('own', k);
    WHEN 'run' THEN RAISE NOTICE 'run: %', idempotency.run('own', k, 'own', request);
    WHEN 'complete in a block' THEN
      BEGIN
        PERFORM idempotency.complete('own', k, 'in a block');
        RAISE division_by_zero;
      EXCEPTION WHEN division_by_zero THEN NULL;
      END;
    WHEN 'other' THEN RAISE NOTICE 'other: %', idempotency.run('own', k || ' other', 'whoami');
    WHEN 'leave other' THEN RAISE NOTICE 'other: %', (idempotency.claim('own', k || ' left')).status;
  END CASE;
  RETURN 'returned';
END $$;
SELECT what, r.* FROM unnest('{complete,fail,release,release and claim,once,run,complete in a block,other}'::text[]) WITH ORDINALITY AS w(what, n),
  LATERAL idempotency.run('own', what, 'own', jsonb_build_object('k', what, 'do', what)) AS r ORDER BY n;
SELECT what, status, replayed, response, meta FROM unnest('{complete,fail,once,run,complete in a block,other}'::text[]) WITH ORDINALITY AS w(what, n),
  LATERAL idempotency.run('own', what, 'none') AS r ORDER BY n;
SELECT status IS NULL AS released FROM idempotency.lookup('own', 'release');
-- inside record_errors' subtransaction likewise
SELECT what, r.* FROM unnest('{complete,fail,release,release and claim}'::text[]) WITH ORDINALITY AS w(what, n),
  LATERAL idempotency.run('own', 'r ' || what, 'own', jsonb_build_object('k', 'r ' || what, 'do', what), record_errors => true) AS r ORDER BY n;
SELECT status IS NULL AS released FROM idempotency.lookup('own', 'r release');
-- a claim of another key that it leaves open
SELECT status FROM idempotency.run('own', 'leave other', 'own', '{"k": "leave other", "do": "leave other"}');
SELECT status IS NULL AS unknown FROM idempotency.lookup('own', 'leave other');
-- held: an outer caller is at work
BEGIN;
SELECT status FROM idempotency.claim('own', 'outer');
SELECT * FROM idempotency.run('own', 'outer', 'whoami');
SELECT idempotency.complete('own', 'outer', 'by the caller') IS NOT NULL AS complete;
SELECT * FROM idempotency.run('own', 'outer', 'whoami');
COMMIT;

-- errors: propagated and nothing stored, unless they are to be recorded
CREATE FUNCTION raise(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO called VALUES ('"raise"');
  RAISE EXCEPTION USING ERRCODE = request->>0, MESSAGE = request->>1;
END $$;
SELECT try($$idempotency.run('error', 'k', 'raise', '["P0001", "no money"]')$$);
SELECT try($$idempotency.run('error', 'k', 'raise', '["P0001", "no money"]', record_errors => NULL)$$);
SELECT status IS NULL AS unknown FROM idempotency.lookup('error', 'k');
SELECT * FROM idempotency.run('error', 'k', 'raise', '["P0001", "no money"]', record_errors => true);
SELECT * FROM idempotency.run('error', 'k', 'raise', '["P0001", "no money"]', record_errors => true);
SELECT * FROM idempotency.run('error', 'k', 'raise', '["P0001", "no money"]');
SELECT count(*) AS its_writes FROM called WHERE request = '"raise"';
-- which are recorded
SELECT sqlstate, try(format('idempotency.run(''class'', %L, ''raise'', %L, record_errors => true)', sqlstate, jsonb_build_array(sqlstate, 'm')))
FROM unnest('{P0001,22012,22P02,23505,23514,23P01,IK003,ZZ001,A0001,70000,12345,X1Y2Z,
  P0000,P0002,P0003,P0004,40001,40P01,57014,57P01,53100,53300,54001,55P03,55000,58030,42P01,42501,42883,25006,25P02,21000,
  08006,0A000,28000,2BP01,2F003,38000,39000,3D000,3F000,72000,F0001,HV000,XX000,XX001,44000,10608}'::text[])
  WITH ORDINALITY AS c(sqlstate, n) ORDER BY n;
SELECT string_agg(c, ' ' ORDER BY c COLLATE "C") AS stored
FROM unnest('{P0001,22012,22P02,23505,23514,23P01,IK003,ZZ001,A0001,70000,12345,X1Y2Z,P0002,40001,42P01,57014,XX000}'::text[]) AS c,
     LATERAL idempotency.lookup('class', c) AS l WHERE l.status = 'failed';
-- an error of the server's own; what it says comes back whole
CREATE FUNCTION insert_bad(request jsonb) RETURNS text LANGUAGE sql AS $$
  INSERT INTO called VALUES ('"insert_bad"');
  SELECT (request->>0)::posint::text $$;
SELECT * FROM idempotency.run('error', 'check', 'insert_bad', '[-1]', record_errors => true);
SELECT * FROM idempotency.run('error', 'cast', 'insert_bad', '["x"]', record_errors => true);
SELECT * FROM idempotency.run('error', 'quoting', 'raise', '["P0001", "a \"quoted\" \\ line\nand another"]', record_errors => true);
SELECT meta->>'message' AS message FROM idempotency.lookup('error', 'quoting');
SELECT * FROM idempotency.run('error', 'fine', 'insert_bad', '[1]', record_errors => true);
SELECT request, count(*) FROM called WHERE request IN ('"raise"', '"insert_bad"') GROUP BY request;
-- an answer that the function gave first is undone with the rest
CREATE FUNCTION complete_and_raise(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  PERFORM idempotency.complete('error', request->>0, 'done');
  PERFORM idempotency.once('error', 'other of ' || (request->>0));
  RAISE EXCEPTION 'after all not';
END $$;
SELECT * FROM idempotency.run('error', 'undone', 'complete_and_raise', '["undone"]', record_errors => true);
SELECT status, meta FROM idempotency.lookup('error', 'undone');
SELECT status IS NULL AS unknown FROM idempotency.lookup('error', 'other of undone');
-- also when an outer run() records
CREATE FUNCTION nested(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  RETURN idempotency.run('error', request->>0, 'raise', jsonb_build_array(request->>1, 'inner'), record_errors => true)::text;
END $$;
SELECT * FROM idempotency.run('error', 'nested 1', 'nested', '["inner 1", "P0001"]', record_errors => true);
SELECT try($$idempotency.run('error', 'nested 2', 'nested', '["inner 2", "40001"]', record_errors => true)$$);
SELECT status, meta FROM idempotency.lookup('error', 'inner 1');
SELECT count(l.status) AS stored FROM unnest('{nested 2,inner 2}'::text[]) AS k, LATERAL idempotency.lookup('error', k) AS l;

RESET SESSION AUTHORIZATION;
SET client_min_messages = warning;
TRUNCATE idempotency.keys;
SELECT idempotency.revoke_usage('regress_app');
DROP SCHEMA regress_app, run_a, run_b, run_closed CASCADE;
DROP ROLE regress_app, regress_other;
