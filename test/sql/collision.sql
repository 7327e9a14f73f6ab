-- Keys whose locks have the same name, within one session: the lock is then
-- taken several times, and each claim has a share of its own in it.
-- (In a build for test/collisions idempotency.debug_hash_bits shortens the name;
-- between sessions a rival of another key is waited for, which
-- specs/key_collision.spec shows.)
CREATE ROLE regress_app;
CREATE SCHEMA AUTHORIZATION regress_app;
SELECT idempotency.grant_usage('regress_app');
CREATE VIEW regress_app.locks AS SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
GRANT SELECT ON regress_app.locks TO regress_app;
SET idempotency.debug_hash_bits = 0;
SET SESSION AUTHORIZATION regress_app;

BEGIN;
SELECT status FROM idempotency.claim('collision', 'a');
SELECT status FROM idempotency.claim('collision', 'b', '1');
SELECT status FROM idempotency.claim('collision', 'a');
SELECT status FROM idempotency.claim('collision', 'b', '2');
SELECT idempotency.once('collision', 'c');
TABLE locks;
SELECT idempotency.complete('collision', 'a', 'A') IS NOT NULL AS complete;
TABLE locks;
SELECT status, response FROM idempotency.claim('collision', 'a');
SELECT idempotency.complete('collision', 'a') IS NOT NULL AS complete;
ROLLBACK;
BEGIN;
SELECT status FROM idempotency.claim('collision', 'a');
SELECT status FROM idempotency.claim('collision', 'b');
SELECT idempotency.release('collision', 'a');
SELECT status FROM idempotency.claim('collision', 'b');
TABLE locks;
SELECT idempotency.complete('collision', 'b', 'B') IS NOT NULL AS complete;
TABLE locks;
COMMIT;
SELECT status, response FROM idempotency.claim('collision', 'b');

-- the same key in two scopes
BEGIN;
SELECT status FROM idempotency.claim('collision', 'k');
SELECT status FROM idempotency.claim('collision 2', 'k');
SELECT idempotency.complete('collision 2', 'k', 'second') IS NOT NULL AS complete;
SELECT status FROM idempotency.claim('collision', 'k');
SELECT idempotency.complete('collision', 'k', 'first') IS NOT NULL AS complete;
COMMIT;
SELECT scope, response FROM unnest('{collision,"collision 2"}'::text[]) AS scope, LATERAL idempotency.claim(scope, 'k') ORDER BY scope;

-- one of two left open
BEGIN;
SELECT status FROM idempotency.claim('collision', 'd');
SELECT status FROM idempotency.claim('collision', 'e');
SELECT idempotency.complete('collision', 'd') IS NOT NULL AS complete;
COMMIT;
SELECT status IS NULL AS unknown FROM idempotency.lookup('collision', 'd');

-- settled at different levels
BEGIN;
SELECT status FROM idempotency.claim('collision', 'f');
SAVEPOINT s;
SELECT status FROM idempotency.claim('collision', 'g');
SELECT idempotency.complete('collision', 'f', 'lost') IS NOT NULL AS complete, idempotency.complete('collision', 'g', 'lost') IS NOT NULL AS complete;
TABLE locks;
ROLLBACK TO s;
TABLE locks;
SELECT status FROM idempotency.claim('collision', 'f');
SELECT status FROM idempotency.claim('collision', 'g');
RELEASE s;
SELECT idempotency.complete('collision', 'f', 'F') IS NOT NULL AS complete, idempotency.complete('collision', 'g', 'G') IS NOT NULL AS complete;
TABLE locks;
COMMIT;
SELECT status, response FROM idempotency.claim('collision', 'f');
SELECT status, response FROM idempotency.claim('collision', 'g');

-- many
BEGIN;
SELECT count(*) FILTER (WHERE status = 'claimed') FROM generate_series(1, 1000) AS i, LATERAL idempotency.claim('collisions', i::text);
SELECT count(idempotency.complete('collisions', i::text, i)) FROM generate_series(1, 999) AS i;
TABLE locks;
SELECT idempotency.complete('collisions', '1000', 1000) IS NOT NULL AS complete;
TABLE locks;
COMMIT;
SELECT count(*) FILTER (WHERE response = i::text) FROM generate_series(1, 1000) AS i, LATERAL idempotency.claim('collisions', i::text);

RESET SESSION AUTHORIZATION;
RESET idempotency.debug_hash_bits;
SET client_min_messages = warning;
TRUNCATE idempotency.keys;
SELECT idempotency.revoke_usage('regress_app');
DROP SCHEMA regress_app CASCADE;
DROP ROLE regress_app;
