-- The settings of keys: units, bounds, and who may set what.
CREATE ROLE regress_app;
SELECT idempotency.grant_usage('regress_app');
SELECT idempotency.once('settings', 'loads the library');
SELECT name, setting, unit, context, min_val, max_val FROM pg_settings
WHERE name ~ '^idempotency.(default|max)_' ORDER BY name COLLATE "C";
-- every one of ours has a description
SELECT name FROM pg_settings WHERE name LIKE 'idempotency.%' AND short_desc !~ '\.$';

-- what decides how long something is kept is one value for the whole server
\set VERBOSITY sqlstate
SET idempotency.default_ttl = '36 h';
SET idempotency.max_ttl = '1 min';
SET LOCAL idempotency.max_lease = '1 min';
ALTER ROLE regress_app SET idempotency.default_ttl = '1 min';
ALTER ROLE regress_app IN DATABASE :DBNAME SET idempotency.max_ttl = '1 min';
ALTER FUNCTION idempotency.purge(integer) SET idempotency.max_lease = '1 min';
ALTER SYSTEM SET idempotency.default_ttl = 0;
ALTER SYSTEM SET idempotency.max_ttl = '-1 s';
ALTER SYSTEM SET idempotency.max_lease = '100 years';
\set VERBOSITY default
SET idempotency.default_wait = '1500 ms';
SHOW idempotency.default_wait;
\set VERBOSITY sqlstate
SET idempotency.default_wait = -2;
\set VERBOSITY default
SET idempotency.default_wait = 0;
SHOW idempotency.default_wait;
SET idempotency.default_wait = -1;
SHOW idempotency.default_wait;

-- a prefix of ours: a name that does not exist is a mistake
SET idempotency.no_such = 1;
\echo :LAST_ERROR_SQLSTATE

-- default_wait is anyone's, what bounds what is kept is not
SET SESSION AUTHORIZATION regress_app;
SET idempotency.default_wait = '10 s';
SET idempotency.default_ttl = '10 s';
\echo :LAST_ERROR_SQLSTATE
-- also where a function sets it
BEGIN;
SET LOCAL idempotency.default_wait = 0;
SHOW idempotency.default_wait;
COMMIT;
SHOW idempotency.default_wait;

RESET SESSION AUTHORIZATION;
TRUNCATE idempotency.keys;
SELECT idempotency.revoke_usage('regress_app');
DROP ROLE regress_app;
