-- Expired means absent, whether or not the row is still there, and the
-- server's clock decides, not now(), which stands still in a transaction.
CREATE ROLE regress_app;
CREATE SCHEMA AUTHORIZATION regress_app;
SELECT idempotency.grant_usage('regress_app');
SET SESSION AUTHORIZATION regress_app;

-- in one transaction, where now() would say that no time has passed
BEGIN;
SELECT idempotency.once('expiry', 'clock', '1 us');
SELECT idempotency.once('expiry', 'clock', '1 us');
SELECT status FROM idempotency.claim('expiry', 'clock');
SELECT idempotency.complete('expiry', 'clock', 'third') IS NOT NULL AS complete;
SELECT status, response FROM idempotency.claim('expiry', 'clock');
COMMIT;

-- an expired record is absent for every function
SELECT idempotency.once('expiry', 'absent', '1 us');
SELECT l IS NULL AS unknown FROM idempotency.lookup('expiry', 'absent') AS l;
BEGIN;
SELECT * FROM idempotency.claim('expiry', 'absent');
SELECT idempotency.release('expiry', 'absent');
COMMIT;
BEGIN;
SELECT * FROM idempotency.claim('expiry', 'absent') AS still;
ROLLBACK;
CREATE FUNCTION answer(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'run anew' $$;
SELECT * FROM idempotency.run('expiry', 'absent', 'answer');
SELECT * FROM idempotency.run('expiry', 'absent', 'answer');

-- nothing of the old record remains, and there is one row
BEGIN;
SELECT status FROM idempotency.claim('expiry', 'replaced', '{"old": true}', '1 us');
SELECT idempotency.fail('expiry', 'replaced', 'old answer', '{"old": true}') IS NOT NULL AS fail;
COMMIT;
BEGIN;
SELECT clock_timestamp() AS before_claim \gset
SELECT * FROM idempotency.claim('expiry', 'replaced', '{"old": false}');
SELECT idempotency.complete('expiry', 'replaced') IS NOT NULL AS complete;
COMMIT;
SELECT status, response, meta, created_at >= :'before_claim' AS created_anew FROM idempotency.lookup('expiry', 'replaced');
SELECT status FROM idempotency.claim('expiry', 'replaced', '{"old": true}');
SELECT status FROM idempotency.claim('expiry', 'replaced', '{"old": false}');

-- the ttl counts from completion; a claim in flight never expires
BEGIN;
SELECT status FROM idempotency.claim('expiry', 'from completion', ttl => '1 us');
SELECT pg_sleep(0.001);
SELECT status FROM idempotency.claim('expiry', 'from completion');
SELECT idempotency.release('expiry', 'from completion');
SELECT status FROM idempotency.claim('expiry', 'from completion', ttl => '1 hour');
SELECT clock_timestamp() AS before_completion \gset
SELECT idempotency.complete('expiry', 'from completion') IS NOT NULL AS complete;
SELECT expires_at >= :'before_completion'::timestamptz + '1 hour' AS ttl_from_completion,
       expires_at < clock_timestamp() + '1 hour' AS not_more,
       created_at <= :'before_completion' AS created_at_claim
FROM idempotency.lookup('expiry', 'from completion');
COMMIT;
-- the ttl of the claim that was first, not of a replay
SELECT status FROM idempotency.claim('expiry', 'from completion', ttl => '1 us');
SELECT idempotency.once('expiry', 'from completion', '1 us');
SELECT status FROM idempotency.claim('expiry', 'from completion');
-- months are calendar months
SELECT idempotency.once('expiry', 'months', '1 month 1 day');
SELECT expires_at - created_at BETWEEN '29 days' AND '33 days' AS right FROM idempotency.lookup('expiry', 'months');

-- complete and fail say until when, and may have a ttl of their own
BEGIN;
SELECT k, status FROM unnest('{own,short,long}'::text[]) k, LATERAL idempotency.claim('expiry', k, ttl => '1 h');
SELECT idempotency.complete('expiry', 'own', 'x') AS own, idempotency.fail('expiry', 'short', 'x', ttl => '1 min') AS short,
       idempotency.complete('expiry', 'long', 'x', ttl => '2 h') AS long \gset
COMMIT;
SELECT key, expires_at = until AS stored, round(extract(epoch FROM expires_at - created_at)) AS seconds
FROM (VALUES ('own', :'own'::timestamptz), ('short', :'short'), ('long', :'long')) v (key, until), LATERAL idempotency.lookup('expiry', key);

-- which goes with what ROLLBACK TO takes back
BEGIN;
SELECT status FROM idempotency.claim('expiry', 'again', ttl => '1 h');
SAVEPOINT s;
SELECT idempotency.complete('expiry', 'again', ttl => '1 min') < clock_timestamp() + '2 min' AS a_minute;
ROLLBACK TO s;
SELECT idempotency.complete('expiry', 'again') > clock_timestamp() + '59 min' AS an_hour;
COMMIT;

-- the expired row goes away between the claim and its answer
SELECT idempotency.once('expiry', 'vanishing', '1 us');
RESET SESSION AUTHORIZATION;
BEGIN;
SELECT status FROM idempotency.claim('expiry', 'vanishing');
DELETE FROM idempotency.keys WHERE scope = 'expiry' AND key = 'vanishing';
SELECT idempotency.complete('expiry', 'vanishing', 'stored') IS NOT NULL AS complete;
COMMIT;
SELECT status, response FROM idempotency.claim('expiry', 'vanishing');
SELECT idempotency.forget('expiry', 'vanishing'), idempotency.forget('expiry', 'vanishing') AS again;
SELECT idempotency.once('expiry', 'vanishing', '1 us') AS anew;
SELECT idempotency.forget('expiry', 'vanishing') AS expired;

-- what a statement stored it can look up, expire, overwrite and remove
SELECT idempotency.once('expiry', 'statement'), (idempotency.lookup('expiry', 'statement')).status;
SELECT idempotency.forget('expiry', 'statement'), (idempotency.lookup('expiry', 'statement')).status;
SELECT idempotency.once('expiry', 'statement', '1 us') AS stored, length(pg_sleep(0.001)::text) AS wait,
       idempotency.once('expiry', 'statement', '1 us') AS overwritten, length(pg_sleep(0.001)::text) AS wait,
       idempotency.once('expiry', 'statement') AS again, (idempotency.lookup('expiry', 'statement')).status,
       idempotency.forget('expiry', 'statement'), idempotency.once('expiry', 'statement') AS anew;

-- one row a key
SELECT key, count(*) FROM idempotency.keys WHERE scope = 'expiry' GROUP BY key ORDER BY key;
SET client_min_messages = warning;
TRUNCATE idempotency.keys;
SELECT idempotency.revoke_usage('regress_app');
DROP SCHEMA regress_app CASCADE;
DROP ROLE regress_app;
