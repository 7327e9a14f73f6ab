-- Bad input: each a clear error with its SQLSTATE, and nothing written.
CREATE ROLE regress_app;
CREATE SCHEMA AUTHORIZATION regress_app;
SELECT idempotency.grant_usage('regress_app');
SET SESSION AUTHORIZATION regress_app;

-- try(sql): SQLSTATE and message
CREATE FUNCTION try(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  result text;
BEGIN
  EXECUTE 'SELECT (' || sql || ')::text' INTO result;
  RETURN 'no error: ' || coalesce(result, 'NULL');
EXCEPTION WHEN OTHERS THEN
  RETURN SQLSTATE || ': ' || SQLERRM;
END $$;
CREATE FUNCTION f(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'called' $$;

-- scope and key: every function, every way
CREATE TABLE bad (n integer, identity text);
INSERT INTO bad VALUES
  (1, $$NULL, 'k'$$), (2, $$'s', NULL$$), (3, $$NULL, NULL$$), (4, $$'', 'k'$$), (5, $$'s', ''$$),
  (6, $$repeat('s', 257), 'k'$$), (7, $$'s', repeat('k', 513)$$),
  (8, $$repeat(U&'\20AC', 86), 'k'$$), (9, $$'s', repeat(U&'\00E9', 257)$$),
  (10, $$'idempotency.', 'k'$$), (11, $$'idempotency.lock', 'k'$$);
SELECT n, identity, try('idempotency.claim(' || identity || ')') FROM bad ORDER BY n;
CREATE TABLE call (n integer, function text);
INSERT INTO call VALUES
  (1, $$idempotency.complete(%s, 'x'::text)$$), (2, $$idempotency.complete(%s, 1)$$),
  (3, $$idempotency.fail(%s, 'x'::text)$$), (4, $$idempotency.fail(%s, 1)$$),
  (5, $$idempotency.release(%s)$$), (6, $$idempotency.once(%s)$$),
  (7, $$idempotency.run(%s, 'f')$$), (8, $$idempotency.lookup(%s)$$);
SELECT function, count(*) AS refused
FROM call, bad
WHERE try(format(function, identity)) = try('idempotency.claim(' || identity || ')')
GROUP BY call.n, function ORDER BY call.n;
SELECT idempotency.forget('s', 'k');
RESET SESSION AUTHORIZATION;
SELECT count(*) AS refused FROM regress_app.bad
WHERE regress_app.try('idempotency.forget(' || identity || ')') = regress_app.try('idempotency.claim(' || identity || ')');
SET SESSION AUTHORIZATION regress_app;

-- the longest that are good, in bytes; and what only looks like ours
SELECT idempotency.once(repeat('s', 256), repeat('k', 512)),
       idempotency.once(repeat(U&'\20AC', 85) || 'x', repeat(U&'\00E9', 256)),
       idempotency.once('idempotency', 'k'), idempotency.once('Idempotency.x', 'k'),
       idempotency.once(' idempotency.x', 'k');
-- the longest and incompressible
SELECT idempotency.once(string_agg(left(md5(i::text), 16), ''), string_agg(md5(i::text), '')) FROM generate_series(1, 16) AS i;

-- intervals
SELECT arguments, try('idempotency.claim(''s'', ''k'', ' || arguments || ')')
FROM unnest(ARRAY[
  $$ttl => '0'$$, $$ttl => '-1 s'$$, $$ttl => '-1 us'$$, $$ttl => '1 day -24 hours'$$, $$ttl => '200000000 years'$$, $$ttl => '178000000 years'$$,
  $$ttl => '-178000000 years'$$, $$wait => '-1 us'$$, $$wait => '-1 day'$$, $$wait => '178000000 years'$$,
  $$ttl => 'x'$$, $$wait => '-1 s', ttl => '-1 s'$$
]) WITH ORDINALITY AS a(arguments, n) ORDER BY n;
SELECT try($$idempotency.once('s', 'k', '0')$$), try($$idempotency.once('s', 'k', '178000000 years')$$);
SELECT try($$idempotency.run('s', 'k', 'f', ttl => '-1 s')$$), try($$idempotency.run('s', 'k', 'f', wait => '-1 s')$$);
-- also when the key is held, and when there is an answer
SELECT idempotency.once('input', 'done');
SELECT try($$idempotency.claim('input', 'done', ttl => '0')$$), try($$idempotency.claim('input', 'done', wait => '-1 s')$$),
       try($$idempotency.once('input', 'done', '-1 s')$$);
BEGIN;
SELECT status FROM idempotency.claim('input', 'held');
SELECT try($$idempotency.claim('input', 'held', ttl => '0')$$), try($$idempotency.claim('input', 'held', wait => '-1 s')$$);
ROLLBACK;
-- infinity, where the version has it: longer than max_ttl, and as long as it takes
SELECT try($$idempotency.claim('input', 'x', ttl => '-1 day'::interval * 'infinity'::float8)$$) ~ '^220(08|23)' AS refused;
SELECT CASE WHEN current_setting('server_version_num')::integer < 170000 THEN true
            ELSE try($$idempotency.claim('input', 'x', ttl => '-infinity')$$) = '22023: ttl must be positive'
             AND try($$idempotency.claim('input', 'x', wait => '-infinity')$$) = '22023: wait must not be negative'
             AND try($$idempotency.once('input', 'for ever', 'infinity')$$) = '22023: ttl is longer than idempotency.max_ttl'
             AND try($$(idempotency.lease('input', 'for ever', 'infinity')).status$$) = 'no error: claimed'
             AND try($$(idempotency.run('input', 'wait', 'f', wait => 'infinity')).status$$) = 'no error: completed' END AS right;

-- request and meta
SELECT try($$idempotency.claim('s', 'k', '{')$$);
SELECT try($$idempotency.complete('s', 'k', 'x', '{')$$);
SELECT try($$idempotency.claim('s', 'k', '"\u0000"')$$);

-- run: the function
SELECT try($$idempotency.run('s', 'k', NULL)$$);
SELECT name, try(format('idempotency.run(''s'', ''f ' || i || ''', %L)', name))
FROM unnest(ARRAY['', ' ', 'no_such_function', 'public.no_f', 'f(', 'f)', 'f()', 'f(no_type)', 'f(integer)', 'f(jsonb, jsonb)', '1', '-', '"F"', 'a.b.c.d', 'f(jsonb); SELECT 1', ' F '])
  WITH ORDINALITY AS n(name, i) ORDER BY i;

-- no such overload
SELECT try($$idempotency.claim('s')$$);
SELECT try($$idempotency.claim(1, 2)$$);

-- nothing was written, nothing is held
RESET SESSION AUTHORIZATION;
SELECT scope, count(*) FROM idempotency.keys WHERE scope IN ('s', '') AND key <> 'f 16' OR scope LIKE 'idempotency.%' GROUP BY scope;
SELECT count(*) AS locks FROM pg_locks WHERE locktype = 'advisory';
SET client_min_messages = warning;
TRUNCATE idempotency.keys;
SELECT idempotency.revoke_usage('regress_app');
DROP SCHEMA regress_app CASCADE;
DROP ROLE regress_app;
