-- Savepoints, plpgsql exception blocks, and a claim that is settled deeper
-- than it was made: ROLLBACK TO undoes exactly what it undoes elsewhere.
CREATE ROLE regress_app;
CREATE SCHEMA AUTHORIZATION regress_app;
SELECT idempotency.grant_usage('regress_app');
SET SESSION AUTHORIZATION regress_app;
-- the locks of keys that this session holds
CREATE VIEW locks AS SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();

-- a claim made inside is forgotten
BEGIN;
SAVEPOINT a;
SELECT status FROM idempotency.claim('sp', 'inside');
SELECT status FROM idempotency.claim('sp', 'inside');
ROLLBACK TO a;
TABLE locks;
SELECT status FROM idempotency.claim('sp', 'inside') AS again;
ROLLBACK TO a;
COMMIT;

-- completed inside the same savepoint: forgotten with its answer
BEGIN;
SAVEPOINT a;
SELECT status FROM idempotency.claim('sp', 'done inside');
SELECT idempotency.complete('sp', 'done inside', 'first') IS NOT NULL AS complete;
TABLE locks;
SELECT status FROM idempotency.claim('sp', 'done inside');
ROLLBACK TO a;
SELECT status FROM idempotency.claim('sp', 'done inside');
SELECT idempotency.complete('sp', 'done inside', 'second') IS NOT NULL AS complete;
COMMIT;
SELECT status, response FROM idempotency.claim('sp', 'done inside');

-- an outer claim completed inside: open again, and its lock was kept
BEGIN;
SELECT status FROM idempotency.claim('sp', 'outer');
SAVEPOINT a;
SELECT idempotency.complete('sp', 'outer', 'inner answer') IS NOT NULL AS complete;
SELECT status, response FROM idempotency.claim('sp', 'outer');
TABLE locks;
ROLLBACK TO a;
TABLE locks;
SELECT * FROM idempotency.claim('sp', 'outer') AS open_again;
SELECT idempotency.complete('sp', 'outer', 'outer answer') IS NOT NULL AS complete;
TABLE locks;
COMMIT;
SELECT status, response FROM idempotency.claim('sp', 'outer');

-- kept: its lock is given back as soon as nothing can undo the answer
BEGIN;
SELECT status FROM idempotency.claim('sp', 'kept');
SAVEPOINT a;
SAVEPOINT b;
SELECT idempotency.complete('sp', 'kept') IS NOT NULL AS complete;
RELEASE b;
TABLE locks;
RELEASE a;
TABLE locks;
ROLLBACK;

-- left open after the rollback: refused at commit, never a replay of nothing
BEGIN;
SELECT status FROM idempotency.claim('sp', 'open again');
SAVEPOINT a;
SELECT idempotency.fail('sp', 'open again') IS NOT NULL AS fail;
ROLLBACK TO a;
COMMIT;
\echo :LAST_ERROR_SQLSTATE
BEGIN;
SELECT status FROM idempotency.claim('sp', 'open again');
SAVEPOINT a;
SELECT idempotency.complete('sp', 'open again') IS NOT NULL AS complete;
RELEASE a;
COMMIT;
SELECT status FROM idempotency.claim('sp', 'open again');

-- RELEASE passes a claim to the parent
BEGIN;
SAVEPOINT a;
SAVEPOINT b;
SELECT status FROM idempotency.claim('sp', 'passed on');
RELEASE b;
SELECT status FROM idempotency.claim('sp', 'passed on');
SAVEPOINT c;
SELECT idempotency.complete('sp', 'passed on', 'lost') IS NOT NULL AS complete;
ROLLBACK TO c;
SELECT status FROM idempotency.claim('sp', 'passed on');
RELEASE a;
TABLE locks;
SELECT idempotency.complete('sp', 'passed on', 'kept') IS NOT NULL AS complete;
TABLE locks;
COMMIT;
SELECT status, response FROM idempotency.claim('sp', 'passed on');

-- and ROLLBACK TO the parent forgets it after all
BEGIN;
SAVEPOINT a;
SAVEPOINT b;
SELECT status FROM idempotency.claim('sp', 'passed on, forgotten');
RELEASE b;
ROLLBACK TO a;
TABLE locks;
SELECT status IS NULL AS not_held FROM idempotency.lookup('sp', 'passed on, forgotten');
COMMIT;

-- settled two levels deeper: RELEASE of the inner, ROLLBACK TO the outer
BEGIN;
SELECT status FROM idempotency.claim('sp', 'two');
SAVEPOINT a;
SAVEPOINT b;
SELECT idempotency.complete('sp', 'two', 'b') IS NOT NULL AS complete;
RELEASE b;
SELECT status, response FROM idempotency.claim('sp', 'two');
ROLLBACK TO a;
SELECT status FROM idempotency.claim('sp', 'two') AS open_again;
SELECT idempotency.complete('sp', 'two', 'top') IS NOT NULL AS complete;
COMMIT;
SELECT status, response FROM idempotency.claim('sp', 'two');

-- claimed in a, settled in b: open again after ROLLBACK TO b, gone after ROLLBACK TO a
BEGIN;
SAVEPOINT a;
SELECT status FROM idempotency.claim('sp', 'a, b');
SAVEPOINT b;
SELECT idempotency.complete('sp', 'a, b') IS NOT NULL AS complete;
ROLLBACK TO b;
SELECT status FROM idempotency.claim('sp', 'a, b');
SELECT idempotency.complete('sp', 'a, b') IS NOT NULL AS complete;
ROLLBACK TO a;
SELECT status FROM idempotency.claim('sp', 'a, b');
TABLE locks;
ROLLBACK;

-- release inside: given back only when that cannot be undone any more
BEGIN;
SELECT status FROM idempotency.claim('sp', 'release');
SAVEPOINT a;
SELECT idempotency.release('sp', 'release');
SELECT idempotency.release('sp', 'release') AS again;
TABLE locks;
SELECT idempotency.complete('sp', 'release') IS NOT NULL AS complete;
ROLLBACK TO a;
SELECT status FROM idempotency.claim('sp', 'release') AS open_again;
SELECT idempotency.release('sp', 'release');
TABLE locks;
COMMIT;

-- release inside and claim anew inside, with another fingerprint
BEGIN;
SELECT status FROM idempotency.claim('sp', 'anew', '1');
SAVEPOINT a;
SELECT idempotency.release('sp', 'anew');
SELECT status FROM idempotency.claim('sp', 'anew', '2');
SELECT status FROM idempotency.claim('sp', 'anew', '1');
SELECT idempotency.complete('sp', 'anew', 'inner') IS NOT NULL AS complete;
SELECT status FROM idempotency.claim('sp', 'anew', '2');
ROLLBACK TO a;
SELECT status FROM idempotency.claim('sp', 'anew', '2');
SELECT status FROM idempotency.claim('sp', 'anew', '1');
SELECT idempotency.complete('sp', 'anew', 'outer') IS NOT NULL AS complete;
TABLE locks;
COMMIT;
SELECT status, response FROM idempotency.claim('sp', 'anew', '1');
-- the same, kept
BEGIN;
SELECT status FROM idempotency.claim('sp', 'anew, kept', '1');
SAVEPOINT a;
SELECT idempotency.release('sp', 'anew, kept');
SELECT status FROM idempotency.claim('sp', 'anew, kept', '2');
RELEASE a;
SELECT status FROM idempotency.claim('sp', 'anew, kept', '2');
SELECT idempotency.complete('sp', 'anew, kept', 'inner') IS NOT NULL AS complete;
COMMIT;
SELECT status, response FROM idempotency.claim('sp', 'anew, kept', '2');
-- and once() in the place of the second claim
BEGIN;
SELECT status FROM idempotency.claim('sp', 'anew, once');
SAVEPOINT a;
SELECT idempotency.release('sp', 'anew, once');
SELECT idempotency.once('sp', 'anew, once');
SELECT idempotency.once('sp', 'anew, once');
ROLLBACK TO a;
SELECT idempotency.once('sp', 'anew, once') AS held;
SELECT idempotency.complete('sp', 'anew, once', 'outer') IS NOT NULL AS complete;
COMMIT;
SELECT status, response FROM idempotency.claim('sp', 'anew, once');

-- once in a savepoint
BEGIN;
SAVEPOINT a;
SELECT idempotency.once('sp', 'once');
TABLE locks;
ROLLBACK TO a;
SELECT idempotency.once('sp', 'once');
SAVEPOINT b;
SELECT idempotency.once('sp', 'once');
COMMIT;
SELECT idempotency.once('sp', 'once');

-- an expired record is overwritten, and comes back with ROLLBACK TO
SELECT idempotency.once('sp', 'expired', '1 us');
BEGIN;
SAVEPOINT a;
SELECT idempotency.once('sp', 'expired');
SELECT status FROM idempotency.lookup('sp', 'expired');
ROLLBACK TO a;
SELECT status IS NULL AS expired FROM idempotency.lookup('sp', 'expired');
SELECT status FROM idempotency.claim('sp', 'expired');
SAVEPOINT b;
SELECT idempotency.complete('sp', 'expired', 'inner') IS NOT NULL AS complete;
ROLLBACK TO b;
SELECT idempotency.complete('sp', 'expired', 'outer') IS NOT NULL AS complete;
COMMIT;
SELECT status, response FROM idempotency.claim('sp', 'expired');

-- plpgsql: an exception block is a savepoint
CREATE FUNCTION attempt(key text, divisor integer) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  BEGIN
    IF (idempotency.claim('sp', key)).status <> 'claimed' THEN
      RETURN 'not claimed';
    END IF;
    PERFORM idempotency.complete('sp', key, 10 / divisor);
    RETURN 'done';
  EXCEPTION WHEN division_by_zero THEN
    RETURN 'nothing happened: ' || coalesce((idempotency.lookup('sp', key)).status, 'unknown');
  END;
END $$;
SELECT attempt('block', 0), attempt('block', 5), attempt('block', 1);
-- claim outside, work inside, record the failure outside
CREATE FUNCTION record_failure(key text, divisor integer) RETURNS SETOF idempotency.claim_result LANGUAGE plpgsql AS $$
DECLARE
  c idempotency.claim_result := idempotency.claim('sp', key);
BEGIN
  IF c.status = 'claimed' THEN
    BEGIN
      PERFORM idempotency.complete('sp', key, 'to be lost');
      PERFORM idempotency.complete('sp', key || ' other', 10 / divisor);
    EXCEPTION WHEN division_by_zero THEN
      PERFORM idempotency.fail('sp', key, SQLERRM);
    END;
  END IF;
  RETURN NEXT c;
END $$;
SELECT * FROM record_failure('caught', 0);
SELECT * FROM record_failure('caught', 1);

-- an error that run() does not record, caught further out: its own
-- subtransaction has gone, and the block undoes what the block did
CREATE FUNCTION bad(jsonb) RETURNS text LANGUAGE plpgsql AS $$ BEGIN EXECUTE 'SELECT 1 FROM no_such_table'; RETURN ''; END $$;
BEGIN;
SELECT status FROM idempotency.claim('sp', 'caller');
DO $$
BEGIN
  BEGIN
    PERFORM idempotency.complete('sp', 'caller', 'to be undone');
    PERFORM idempotency.run('sp', 'callee', 'bad', record_errors => true);
  EXCEPTION WHEN undefined_table THEN
    RAISE NOTICE 'caught: caller %, callee %', (idempotency.claim('sp', 'caller')).status, coalesce((idempotency.lookup('sp', 'callee')).status, 'unknown');
  END;
  PERFORM idempotency.complete('sp', 'caller', 'after');
END $$;
COMMIT;
SELECT status, response FROM idempotency.claim('sp', 'caller');

-- X1 in one session: settled inside, rolled back, settled inside again, many times
BEGIN;
SELECT status FROM idempotency.claim('sp', 'x1');
DO $$
BEGIN
  FOR i IN 1..1000 LOOP
    BEGIN
      PERFORM idempotency.complete('sp', 'x1', i);
      RAISE division_by_zero;
    EXCEPTION WHEN division_by_zero THEN
      NULL;
    END;
  END LOOP;
END $$;
TABLE locks;
SELECT status FROM idempotency.claim('sp', 'x1');
SELECT idempotency.complete('sp', 'x1', 'at last') IS NOT NULL AS complete;
TABLE locks;
COMMIT;
SELECT status, response FROM idempotency.claim('sp', 'x1');

-- 100,000 in one transaction, with the default size of the lock table
BEGIN;
SELECT count(*) FILTER (WHERE idempotency.once('100000', i::text)) AS first_times FROM generate_series(1, 100000) AS i;
SELECT count(*) FILTER (WHERE idempotency.once('100000', i::text)) AS first_times FROM generate_series(1, 100000) AS i;
TABLE locks;
ROLLBACK;
-- claim and complete, likewise
BEGIN;
SELECT count(idempotency.complete('100000', i::text, i))
FROM generate_series(1, 30000) AS i WHERE (idempotency.claim('100000', i::text)).status = 'claimed';
TABLE locks;
ROLLBACK;

-- and with the answer given in a block of its own
BEGIN;
DO $$
DECLARE
  status text;
BEGIN
  FOR i IN 1..30000 LOOP
    status := (idempotency.claim('blocks', i::text)).status;
    BEGIN
      PERFORM idempotency.complete('blocks', i::text, status);
    EXCEPTION WHEN division_by_zero THEN
      PERFORM idempotency.fail('blocks', i::text);
    END;
  END LOOP;
END $$;
TABLE locks;
ROLLBACK;

RESET SESSION AUTHORIZATION;
SET client_min_messages = warning;
TRUNCATE idempotency.keys;
SELECT idempotency.revoke_usage('regress_app');
DROP SCHEMA regress_app CASCADE;
DROP ROLE regress_app;
