-- The secret of the database, under which locks are named.
\set SHOW_CONTEXT never
-- whole names, also where test/collisions shortens them
LOAD 'idempotency';
DO $$ BEGIN PERFORM set_config(name, '64', false) FROM pg_settings WHERE name = 'idempotency.debug_hash_bits'; END $$;
CREATE ROLE regress_app;
CREATE ROLE regress_admin;
SELECT idempotency.grant_usage('regress_app'), idempotency.grant_admin('regress_admin');
CREATE TEMP TABLE saved AS TABLE idempotency.secrets;

-- the install script made one, of 32 bytes
SELECT count(*), min(octet_length(secret)) AS bytes, count(DISTINCT secret) AS different FROM idempotency.secrets;

-- nobody is told
SET SESSION AUTHORIZATION regress_app;
TABLE idempotency.secrets;
SELECT idempotency.lock_hash('secret', 'k');
SET SESSION AUTHORIZATION regress_admin;
TABLE idempotency.secrets;
INSERT INTO idempotency.secrets DEFAULT VALUES;
SELECT idempotency.table_changed();
RESET SESSION AUTHORIZATION;
SELECT idempotency.table_changed();

-- another secret, other names
SELECT idempotency.lock_hash('secret', 'k') AS old \gset
INSERT INTO idempotency.secrets DEFAULT VALUES;
SELECT idempotency.lock_hash('secret', 'k') <> :old AS other;
DELETE FROM idempotency.secrets WHERE id NOT IN (SELECT id FROM saved);
SELECT idempotency.lock_hash('secret', 'k') = :old AS same;
-- not in the middle of a transaction, whose locks have their names
BEGIN;
SELECT status FROM idempotency.claim('secret', 'k');
INSERT INTO idempotency.secrets DEFAULT VALUES;
SELECT status FROM idempotency.claim('secret', 'k');
SELECT FROM idempotency.complete('secret', 'k', 'answer');
SELECT count(*) AS locks FROM pg_locks WHERE objsubid = 26980 AND pid = pg_backend_pid();
COMMIT;
SELECT idempotency.lock_hash('secret', 'k') <> :old AS other;
SELECT status, response FROM idempotency.claim('secret', 'k');

-- the newest is used, by its age and then its id
CREATE FUNCTION names() RETURNS TABLE (name bigint) LANGUAGE sql AS $$
SELECT idempotency.lock_hash(scope, key)
FROM (VALUES (1, 's', 'k'), (2, 'orders:create:tenant-7', '0a1b2c3d-0001'), (3, 'ab', 'c'), (4, 'a', 'bc')) v (n, scope, key) ORDER BY n $$;
TRUNCATE idempotency.secrets;
INSERT INTO idempotency.secrets VALUES (1, '2020-01-02', '\x000102030405060708090a0b0c0d0e0f'::bytea || '\x00112233445566778899aabbccddeeff');
INSERT INTO idempotency.secrets VALUES (2, '2020-01-01', sha256('older')), (0, '2020-01-02', sha256('lower'));
SELECT * FROM names();
-- what is no secret is passed over
INSERT INTO idempotency.secrets VALUES (3, '2020-01-03', 'too short');
SELECT * FROM names();
-- without one everything works, with names that can be foreseen
TRUNCATE idempotency.secrets;
SELECT * FROM names();
SELECT idempotency.once('secret', 'without'), idempotency.acquire_lock('secret', '0') > 0 AS lock, idempotency.emit('secret', '1', 'k') > 0 AS event;

INSERT INTO idempotency.secrets TABLE saved;
SELECT idempotency.lock_hash('secret', 'k') = :old AS same;
DELETE FROM idempotency.keys WHERE scope = 'secret' OR key = 'secret';
DELETE FROM idempotency.outbox WHERE topic = 'secret';
DROP FUNCTION names;
SELECT idempotency.revoke_usage('regress_app'), idempotency.revoke_usage('regress_admin');
DROP ROLE regress_app, regress_admin;
