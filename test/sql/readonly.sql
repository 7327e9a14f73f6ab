-- Read-only transactions and parallel queries: what is known is answered,
-- what would have to be claimed is refused.
CREATE ROLE regress_app;
CREATE SCHEMA AUTHORIZATION regress_app;
SELECT idempotency.grant_usage('regress_app');
SET SESSION AUTHORIZATION regress_app;
\set SHOW_CONTEXT never
CREATE FUNCTION f(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'f' $$;
CREATE FUNCTION try(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  result text;
BEGIN
  EXECUTE 'SELECT (' || sql || ')::text' INTO result;
  RETURN result;
EXCEPTION WHEN OTHERS THEN
  RETURN SQLSTATE || ': ' || SQLERRM;
END $$;
BEGIN;
SELECT status FROM idempotency.claim('readonly', 'done', '1');
SELECT idempotency.complete('readonly', 'done', 'answer') IS NOT NULL AS complete;
COMMIT;
SELECT idempotency.once('readonly', 'expired', '1 us');

BEGIN READ ONLY;
SELECT * FROM idempotency.claim('readonly', 'done', '1');
SELECT * FROM idempotency.claim('readonly', 'done', '2');
SELECT idempotency.once('readonly', 'done');
SELECT * FROM idempotency.run('readonly', 'done', 'f');
SELECT status, response FROM idempotency.lookup('readonly', 'done');
SELECT l IS NULL AS unknown FROM idempotency.lookup('readonly', 'new') AS l;
SELECT call, try(call) FROM unnest(ARRAY[
  $$idempotency.claim('readonly', 'new')$$, $$idempotency.claim('readonly', 'new', wait => '0')$$, $$idempotency.claim('readonly', 'expired')$$,
  $$idempotency.once('readonly', 'new')$$, $$idempotency.run('readonly', 'new', 'f')$$, $$idempotency.run('readonly', 'new', 'no_such', record_errors => true)$$,
  $$idempotency.complete('readonly', 'new', 1)$$, $$idempotency.fail('readonly', 'new', 1)$$]) WITH ORDINALITY AS u(call, n) ORDER BY n;
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
COMMIT;
-- one refusal in full
BEGIN READ ONLY;
SELECT idempotency.claim('readonly', 'new');
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;

-- claimed before the transaction turned read-only: held, and it can only be given back
BEGIN;
SELECT status FROM idempotency.claim('readonly', 'turned');
SET TRANSACTION READ ONLY;
SELECT status FROM idempotency.claim('readonly', 'turned');
SELECT try($$idempotency.complete('readonly', 'turned', 1)$$);
SELECT idempotency.release('readonly', 'turned');
COMMIT;
-- a read-only subtransaction inside a read-write one
BEGIN;
SAVEPOINT a;
SET TRANSACTION READ ONLY;
SELECT try($$idempotency.once('readonly', 'sub')$$);
ROLLBACK TO a;
SELECT try($$idempotency.once('readonly', 'sub')$$);
COMMIT;
SELECT idempotency.once('readonly', 'sub');
RESET SESSION AUTHORIZATION;
BEGIN READ ONLY;
SELECT idempotency.forget('readonly', 'done');
ROLLBACK;
SET SESSION AUTHORIZATION regress_app;

-- ours are not parallel safe, so no plan takes them into a worker
SELECT p.oid::regprocedure AS parallel_safe FROM pg_proc AS p
WHERE pronamespace = 'idempotency'::regnamespace AND proparallel = 's'
  AND proname IN ('claim', 'complete', 'fail', 'release', 'once', 'run', 'lookup', 'forget');
-- but a caller's function may be labelled wrongly
CREATE TABLE rows AS SELECT i FROM generate_series(1, 1000) AS i;
ANALYZE rows;
CREATE FUNCTION lying_claim(integer) RETURNS text PARALLEL SAFE LANGUAGE plpgsql AS $$ BEGIN RETURN (idempotency.claim('parallel', $1::text)).status; END $$;
CREATE FUNCTION lying_once(integer) RETURNS boolean PARALLEL SAFE LANGUAGE plpgsql AS $$ BEGIN RETURN idempotency.once('parallel', $1::text); END $$;
CREATE FUNCTION lying_run(integer) RETURNS text PARALLEL SAFE LANGUAGE plpgsql AS $$ BEGIN RETURN (idempotency.run('parallel', $1::text, 'f')).status; END $$;
CREATE FUNCTION lying_complete(integer) RETURNS void PARALLEL SAFE LANGUAGE plpgsql AS $$ BEGIN PERFORM idempotency.complete('parallel', 'mine', $1); END $$;
CREATE TABLE issued AS SELECT idempotency.issue_token('s', 'p') AS token;
CREATE FUNCTION lying_consume(integer) RETURNS text PARALLEL SAFE LANGUAGE plpgsql AS $$ BEGIN RETURN (idempotency.consume_token(token, 's', 'p')).status FROM issued; END $$;
CREATE FUNCTION lying_lookup(integer) RETURNS text PARALLEL SAFE LANGUAGE plpgsql AS $$ BEGIN RETURN (idempotency.lookup('readonly', 'done')).response; END $$;
SET parallel_setup_cost = 0;
SET parallel_tuple_cost = 0;
SET min_parallel_table_scan_size = 0;
SET max_parallel_workers_per_gather = 2;
SELECT count(*) FROM rows WHERE lying_claim(i) = 'claimed';
\echo :LAST_ERROR_SQLSTATE
SELECT count(*) FROM rows WHERE lying_once(i);
\echo :LAST_ERROR_SQLSTATE
SELECT count(*) FROM rows WHERE lying_run(i) = 'completed';
\echo :LAST_ERROR_SQLSTATE
SELECT count(lying_complete(i)) FROM rows;
\echo :LAST_ERROR_SQLSTATE
SELECT count(*) FROM rows WHERE lying_consume(i) = 'consumed';
\echo :LAST_ERROR_SQLSTATE
SELECT count(*) FROM rows WHERE lying_lookup(i) = 'answer';
RESET SESSION AUTHORIZATION;
SELECT count(*) AS written FROM idempotency.keys WHERE scope = 'parallel' OR (scope, key) = ('readonly', 'new');

-- the first call of a session, by the leader of a parallel query
\c
SET parallel_setup_cost = 0;
SET parallel_tuple_cost = 0;
SET min_parallel_table_scan_size = 0;
SELECT i, (idempotency.lookup('readonly', 'done')).response FROM regress_app.rows WHERE i < 3 ORDER BY i;

SET client_min_messages = warning;
TRUNCATE idempotency.keys;
SELECT idempotency.revoke_usage('regress_app');
DROP SCHEMA regress_app CASCADE;
DROP ROLE regress_app;
