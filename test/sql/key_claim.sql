-- The statuses of a key, and answers that come back byte for byte.
CREATE ROLE regress_app;
CREATE SCHEMA AUTHORIZATION regress_app;
SELECT idempotency.grant_usage('regress_app');
SET SESSION AUTHORIZATION regress_app;

-- claimed, then held, then completed: also within the transaction
BEGIN;
SELECT * FROM idempotency.claim('claim', 'first');
SELECT * FROM idempotency.claim('claim', 'first');
SELECT idempotency.complete('claim', 'first', 'answer', '{"code": 201}') IS NOT NULL AS complete;
SELECT * FROM idempotency.claim('claim', 'first');
COMMIT;
SELECT * FROM idempotency.claim('claim', 'first');
SELECT * FROM idempotency.claim('claim', 'first', wait => '0');

-- failed
BEGIN;
SELECT status FROM idempotency.claim('claim', 'failing');
SELECT idempotency.fail('claim', 'failing', 'no money', '{"code": 402}') IS NOT NULL AS fail;
COMMIT;
SELECT * FROM idempotency.claim('claim', 'failing');

-- given back: the next caller runs
BEGIN;
SELECT status FROM idempotency.claim('claim', 'released');
SELECT idempotency.release('claim', 'released');
SELECT idempotency.release('claim', 'released') AS again;
SELECT status FROM idempotency.claim('claim', 'released');
SELECT idempotency.release('claim', 'released');
COMMIT;
SELECT status IS NULL AS unknown FROM idempotency.lookup('claim', 'released');
-- a finished record is nothing to give back
SELECT idempotency.release('claim', 'first');
SELECT status, response FROM idempotency.claim('claim', 'first');

-- a rollback takes back the claim with the work
BEGIN;
SELECT status FROM idempotency.claim('claim', 'undone');
SELECT idempotency.complete('claim', 'undone') IS NOT NULL AS complete;
ROLLBACK;
SELECT status IS NULL AS unknown FROM idempotency.lookup('claim', 'undone');
SELECT idempotency.once('claim', 'undone');

-- once: true the first time only, also if a claim was first
SELECT idempotency.once('claim', 'undone');
SELECT idempotency.once('claim', 'first');
SELECT idempotency.once('claim', 'failing');
SELECT * FROM idempotency.claim('claim', 'undone');
BEGIN;
SELECT status FROM idempotency.claim('claim', 'mine');
SELECT idempotency.once('claim', 'mine') AS while_claimed;
SELECT idempotency.release('claim', 'mine');
SELECT idempotency.once('claim', 'mine') AS now_true;
COMMIT;

-- an unfinished claim does not commit
SELECT status FROM idempotency.claim('claim', 'open');
BEGIN;
SELECT status FROM idempotency.claim('claim', 'open');
COMMIT;
\echo :LAST_ERROR_SQLSTATE
SELECT status IS NULL AS unknown FROM idempotency.lookup('claim', 'open');
-- nor in a procedure that commits, nor by a cursor that is run at COMMIT
\set VERBOSITY terse
\set SHOW_CONTEXT never
DO $$ BEGIN PERFORM idempotency.claim('claim', 'open'); COMMIT; END $$;
BEGIN;
DECLARE c CURSOR WITH HOLD FOR SELECT status FROM idempotency.claim('claim', 'open');
COMMIT;
\set VERBOSITY default

-- a deferred trigger runs before that check
CREATE TABLE late (key text);
CREATE FUNCTION settle() RETURNS trigger LANGUAGE plpgsql
AS $$ BEGIN PERFORM idempotency.complete('claim', NEW.key, 'at commit'); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER late AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION settle();
BEGIN;
SELECT status FROM idempotency.claim('claim', 'late');
INSERT INTO late VALUES ('late');
COMMIT;
SELECT * FROM idempotency.claim('claim', 'late');

-- complete, fail: only what this transaction holds
SELECT idempotency.complete('claim', 'never claimed') IS NOT NULL AS complete;
\echo :LAST_ERROR_SQLSTATE
SELECT idempotency.fail('claim', 'first') IS NOT NULL AS fail;
\echo :LAST_ERROR_SQLSTATE
BEGIN;
SELECT status FROM idempotency.claim('claim', 'fenced');
SELECT idempotency.complete('claim', 'fenced', 'x', NULL, 1) IS NOT NULL AS complete;
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;

-- fingerprint: compared first, only when both sides gave one, as jsonb compares
BEGIN;
SELECT status FROM idempotency.claim('claim', 'print', '{"a": 1, "b": [2]}');
SELECT status FROM idempotency.claim('claim', 'print', '{"a": 2}') AS while_held;
SELECT status FROM idempotency.claim('claim', 'print') AS while_held;
SELECT status FROM idempotency.claim('claim', 'print', '{"b": [2.0], "a": 1.0}') AS while_held;
SELECT idempotency.complete('claim', 'print', 'done') IS NOT NULL AS complete;
SELECT status FROM idempotency.claim('claim', 'print', '{"a": 2}') AS after;
COMMIT;
SELECT request, (c).*
FROM unnest('{"{\"b\": [2.00], \"a\": 1e0}", "{\"a\": 1}", "{}", "null", NULL}'::jsonb[]) AS request,
     LATERAL (SELECT idempotency.claim('claim', 'print', request) AS c OFFSET 0) AS called;
SELECT idempotency.once('claim', 'no print');
SELECT status FROM idempotency.claim('claim', 'no print', '{"a": 2}');
BEGIN;
SELECT status FROM idempotency.claim('claim', 'no print, held');
SELECT status FROM idempotency.claim('claim', 'no print, held', '1');
ROLLBACK;

-- answers: each comes back as it was stored
CREATE TABLE answer (id integer PRIMARY KEY, response text, meta jsonb);
INSERT INTO answer (id, response, meta) VALUES
  (1, NULL, NULL), (2, '', '{}'), (3, '0', '0'), (4, 'false', 'false'), (5, '{}', 'null'),
  (6, 'null', '[]'), (7, '{"b":1,"a":1.0, "a":2}', '{"b": 1, "a": 1.0}'), (8, '"\u0000"', NULL),
  (9, E' \t\r\n', NULL), (10, E'na\u00efve \u65e5\u672c', '{"\u65e5": "\u672c"}'), (11, '\N', NULL),
  (12, repeat('x', 1000), NULL), (13, repeat('0123456789', 100000), jsonb_build_object('a', repeat('y', 300000))),
  (14, (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 32768) AS i), NULL);
BEGIN;
SELECT count(*) FILTER (WHERE status = 'claimed') AS claimed
FROM answer, LATERAL idempotency.claim('answer', id::text);
SELECT count(idempotency.complete('answer', id::text, response, meta)) FROM answer WHERE id % 2 = 0;
SELECT count(idempotency.fail('answer', id::text, response, meta)) FROM answer WHERE id % 2 = 1;
COMMIT;
SELECT a.id, c.status, length(c.response) AS length,
       (c.response, c.meta) IS NOT DISTINCT FROM (a.response, a.meta) AS claim_same,
       (l.status, l.response, l.meta) IS NOT DISTINCT FROM (c.status, a.response, a.meta) AS lookup_same
FROM answer AS a, LATERAL idempotency.claim('answer', a.id::text) AS c, LATERAL idempotency.lookup('answer', a.id::text) AS l
ORDER BY a.id;

-- the anyelement form: json and jsonb as their text, a row as JSON, the rest by its output function
CREATE TYPE mood AS ENUM ('sad', 'fine');
CREATE TYPE pair AS (a integer, b text);
CREATE DOMAIN pair_domain AS pair;
CREATE DOMAIN json_domain AS json;
CREATE DOMAIN text_domain AS text;
SET extra_float_digits = 1;
SET datestyle = 'ISO';
SET intervalstyle = 'postgres';
SET timezone = 'UTC';
SET bytea_output = 'hex';
BEGIN;
SELECT count(*) FILTER (WHERE status = 'claimed') FROM generate_series(1, 34) AS i, LATERAL idempotency.claim('any', i::text);
\pset tuples_only on
\pset format unaligned
SELECT idempotency.complete('any', '1', 42) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '2', 42::bigint) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '3', 1.50) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '4', 0.1::float8) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '5', 'NaN'::float4) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '6', true) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '7', 'n'::name) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '8', 'v'::varchar(3)) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '9', 'c'::char(3)) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '10', 'd'::text_domain) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '11', '\x00ff'::bytea) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '12', '2020-02-29'::date) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '13', '2020-02-29 12:00+00'::timestamptz) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '14', '1 day'::interval) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '15', '00000000-0000-0000-0000-000000000001'::uuid) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '16', '{"b":1,  "a":1.0}'::json) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '17', '{"b":1,  "a":1.0}'::jsonb) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '18', '{"b":1,  "a":1}'::json_domain) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '19', 'null'::jsonb) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '20', ARRAY[1, NULL, 3]) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '21', ARRAY['a b', 'c"d']) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '22', 'fine'::mood) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '23', '10.0.0.1'::inet) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '24', int4range(1, 5)) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '25', 'pg_class'::regclass) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '26', ROW(1, 'x')::pair) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '27', ROW(NULL, NULL)::pair) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '28', ROW(2, 'y')::pair_domain) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '29', ROW(1, 'a', NULL, ARRAY[ROW(1, 'x')::pair])) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '30', (SELECT a FROM answer AS a WHERE id = 5)) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '31', ARRAY[ROW(1, 'x')::pair]) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '32', NULL::integer) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '33', NULL::jsonb) IS NOT NULL AS complete;
SELECT idempotency.complete('any', '34', NULL::pair) IS NOT NULL AS complete;
\pset format aligned
\pset tuples_only off
COMMIT;
\pset null '(null)'
SELECT i, response FROM generate_series(1, 34) AS i, LATERAL idempotency.claim('any', i::text) ORDER BY i;
\pset null ''
-- the same for fail, and meta by its name
BEGIN;
SELECT status FROM idempotency.claim('any', 'fail');
SELECT idempotency.fail('any', 'fail', ROW(7, 'seven')::pair, meta => '{"code": 409}') IS NOT NULL AS fail;
COMMIT;
SELECT * FROM idempotency.claim('any', 'fail');
-- a literal and no answer at all are not ambiguous
BEGIN;
SELECT l.status, n.status FROM idempotency.claim('any', 'literal') AS l, idempotency.claim('any', 'none') AS n;
SELECT idempotency.complete('any', 'literal', 'text') IS NOT NULL AS complete, idempotency.complete('any', 'none') IS NOT NULL AS complete;
COMMIT;
SELECT * FROM idempotency.claim('any', 'literal');
SELECT * FROM idempotency.claim('any', 'none');

-- bytes, not collations: near misses are other keys
SELECT count(*) FILTER (WHERE idempotency.once(scope, key)) AS first_times
FROM (VALUES ('ab', 'c'), ('a', 'bc'), ('a', 'BC'), ('A', 'bc'), ('a', 'bc '), (' a', 'bc'),
             ('a', E'e\u0301'), ('a', E'\u00e9'), ('abc', 'abc'), ('bc', 'a')) AS v(scope, key);

-- many keys in one statement; a key twice in it is held the second time
BEGIN;
SELECT i, status FROM unnest(ARRAY[1, 2, 1, 3, 2]) WITH ORDINALITY AS u(i, n), LATERAL idempotency.claim('many', i::text) ORDER BY n;
SELECT idempotency.complete('many', i::text, i) IS NOT NULL AS complete FROM generate_series(1, 3) AS i;
COMMIT;
SELECT key, idempotency.once('many', key) FROM unnest('{3,4,4}'::text[]) WITH ORDINALITY AS u(key, n) ORDER BY n;
-- an answer stored earlier in the same statement is seen later in it
WITH a AS MATERIALIZED (SELECT idempotency.once('many', 'cte') AS first),
     b AS MATERIALIZED (SELECT first, idempotency.once('many', 'cte') AS second FROM a)
SELECT first, second, status FROM b, LATERAL idempotency.claim('many', CASE WHEN second THEN 'x' ELSE 'cte' END);

-- claim, work and answer in one statement
CREATE TABLE work (id integer);
WITH c AS MATERIALIZED (SELECT status FROM idempotency.claim('many', 'one statement')),
     w AS (INSERT INTO work SELECT 1 FROM c WHERE status = 'claimed' RETURNING id)
SELECT idempotency.complete('many', 'one statement', id) IS NOT NULL AS complete FROM w;
SELECT status, response, (SELECT count(*) FROM work) FROM idempotency.claim('many', 'one statement');

-- lookup reads, never claims
SELECT status, response, meta, fence, deadline, attempt, checkpoint, checkpoint_data,
       created_at <= clock_timestamp() AS created,
       expires_at - clock_timestamp() BETWEEN '23 h' AND '24 h' AS expires
FROM idempotency.lookup('claim', 'first');
SELECT l IS NULL AS all_null FROM idempotency.lookup('claim', 'unknown') AS l;
BEGIN;
SELECT status FROM idempotency.claim('claim', 'looked up');
SELECT * FROM idempotency.lookup('claim', 'looked up');
SELECT idempotency.complete('claim', 'looked up', 'seen') IS NOT NULL AS complete;
SELECT status, response FROM idempotency.lookup('claim', 'looked up');
ROLLBACK;
SELECT l IS NULL AS all_null FROM idempotency.lookup('claim', 'looked up') AS l;

-- a replay writes nothing: no transaction id
BEGIN;
SELECT status FROM idempotency.claim('claim', 'first');
SELECT idempotency.once('claim', 'first');
SELECT status, replayed FROM idempotency.run('claim', 'first', 'never_called');
SELECT status FROM idempotency.lookup('claim', 'first');
-- nor does a claim, until it is settled
SELECT status FROM idempotency.claim('claim', 'no xid');
SELECT idempotency.release('claim', 'no xid');
SELECT pg_current_xact_id_if_assigned() IS NULL AS wrote_nothing;
COMMIT;

-- its locks are given back as soon as possible, its row is written once
BEGIN;
SELECT idempotency.once('claim', 'locks');
SELECT status FROM idempotency.claim('claim', 'locks 2');
SELECT count(*) AS while_claimed FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
SELECT idempotency.complete('claim', 'locks 2') IS NOT NULL AS complete;
SELECT count(*) AS after FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
SELECT status FROM idempotency.claim('claim', 'locks');
SELECT status FROM idempotency.claim('claim', 'locks 3');
SELECT idempotency.release('claim', 'locks 3');
SELECT count(*) AS after FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
COMMIT;

-- nothing in an aborted transaction
BEGIN;
SELECT status FROM idempotency.claim('claim', 'aborted');
SELECT 1 / 0;
SELECT idempotency.complete('claim', 'aborted') IS NOT NULL AS complete;
\echo :LAST_ERROR_SQLSTATE
COMMIT;
SELECT status IS NULL AS unknown FROM idempotency.lookup('claim', 'aborted');

RESET SESSION AUTHORIZATION;
SET client_min_messages = warning;
TRUNCATE idempotency.keys;
SELECT idempotency.revoke_usage('regress_app');
DROP SCHEMA regress_app CASCADE;
DROP ROLE regress_app;
