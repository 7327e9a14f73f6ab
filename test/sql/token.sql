-- One-time tokens: every status, what a token is bound to, and what is refused.
-- Rivals are in specs/token_*.spec, mutated tokens in token_fuzz.sql, standby,
-- crash, dump and restore in t/.
SET client_min_messages = warning;
\pset null '(null)'
CREATE ROLE regress_token;
SELECT idempotency.grant_usage('regress_token');
GRANT CREATE ON SCHEMA public TO regress_token;
SET ROLE regress_token;

-- run a statement, tell what became of it
CREATE FUNCTION try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  answer text; state text; message text; detail text; hint text;
BEGIN
  EXECUTE statement INTO answer;
  RETURN answer;
EXCEPTION WHEN OTHERS THEN
  GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, message = MESSAGE_TEXT,
    detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
  RETURN concat_ws(' / ', state || ' ' || message, nullif(detail, ''), nullif(hint, ''));
END
$$;
CREATE FUNCTION check_(token text, subject text DEFAULT 'user-1', purpose text DEFAULT 'form') RETURNS text
LANGUAGE sql AS 'SELECT status FROM idempotency.check_token(token, subject, purpose)';
CREATE FUNCTION consume_(token text, subject text DEFAULT 'user-1', purpose text DEFAULT 'form') RETURNS text
LANGUAGE sql AS 'SELECT status FROM idempotency.consume_token(token, subject, purpose)';

----------------------------------------------------------------------------
-- A token's life
----------------------------------------------------------------------------
SELECT idempotency.issue_token('user-1', 'form', payload => '{"report": 7}') AS t \gset
SELECT status, id ~ '^[A-Za-z0-9_-]{22}$' AS id_ok, payload, expires_at - issued_at AS ttl,
       issued_at BETWEEN clock_timestamp() - interval '1 min' AND clock_timestamp() AS issued_ok, consumed_at
FROM idempotency.check_token(:'t', 'user-1', 'form');
SELECT id FROM idempotency.check_token(:'t', 'user-1', 'form') \gset
SELECT check_(:'t');
SELECT status, id = :'id' AS id, payload, expires_at - issued_at AS ttl,
       consumed_at BETWEEN issued_at AND clock_timestamp() AS consumed_ok
FROM idempotency.consume_token(:'t', 'user-1', 'form');
SELECT consumed_at AS at FROM idempotency.check_token(:'t', 'user-1', 'form') \gset
SELECT status, id = :'id' AS id, payload, expires_at - issued_at AS ttl, consumed_at = :'at' AS consumed_ok
FROM idempotency.consume_token(:'t', 'user-1', 'form');
SELECT status, id = :'id' AS id, payload, consumed_at = :'at' AS consumed_ok
FROM idempotency.check_token(:'t', 'user-1', 'form');
-- who has the wrong subject is told nothing, about a used token either
SELECT * FROM idempotency.check_token(:'t', 'user-2', 'form');
SELECT * FROM idempotency.consume_token(:'t', 'user-1', 'login');
-- it is used under every isolation level
BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT consume_(:'t'); COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT consume_(:'t'); COMMIT;

-- issuing and checking write nothing, and no two tokens are the same
BEGIN READ ONLY;
SELECT idempotency.issue_token('user-1', 'form') AS t \gset
SELECT check_(:'t'), pg_current_xact_id_if_assigned();
SELECT try(format('SELECT idempotency.consume_token(%L, %L, %L)', :'t', 'user-1', 'form'));
SELECT try(format('SELECT idempotency.revoke_token(%L, %L, %L)', :'t', 'user-1', 'form'));
SELECT try('SELECT idempotency.revoke_tokens(''user-1'', ''form'')');
-- what writes nothing is answered here too
SELECT consume_(:'t', 'user-2'), consume_('');
ROLLBACK;
SELECT consume_(:'t');
BEGIN READ ONLY; SELECT consume_(:'t'); COMMIT;
SELECT count(DISTINCT idempotency.issue_token('user-1', 'form', payload => '1')) FROM generate_series(1, 1000);

-- a rollback gives it back, also one to a savepoint
SELECT idempotency.issue_token('user-1', 'form') AS t \gset
BEGIN; SELECT consume_(:'t'), consume_(:'t'), check_(:'t'); ROLLBACK;
SELECT check_(:'t');
BEGIN;
SAVEPOINT a;
SELECT consume_(:'t');
SAVEPOINT b;
SELECT consume_(:'t');
ROLLBACK TO b;
SELECT consume_(:'t');
RELEASE a;
ROLLBACK;
BEGIN;
SAVEPOINT a;
SELECT consume_(:'t');
ROLLBACK TO a;
SELECT check_(:'t');
SELECT consume_(:'t');
RELEASE a;
COMMIT;
SELECT consume_(:'t');
-- the work fails after it: neither is done
SELECT idempotency.issue_token('user-1', 'form') AS t \gset
SELECT try(format('SELECT consume_(%L), 1 / 0', :'t'));
SELECT consume_(:'t');

-- many in one statement, one of them twice
CREATE TABLE batch AS SELECT n, idempotency.issue_token('user-1', 'form') AS t FROM generate_series(1, 3) n;
SELECT n, consume_(t) FROM (TABLE batch UNION ALL SELECT 4, t FROM batch WHERE n = 2) s ORDER BY n;
DROP TABLE batch;

----------------------------------------------------------------------------
-- What it is bound to
----------------------------------------------------------------------------
SELECT idempotency.issue_token('ab', 'c') AS t \gset
SELECT subject, purpose, check_(:'t', subject, purpose)
FROM (VALUES (1, 'ab', 'c'), (2, 'a', 'bc'), (3, 'c', 'ab'), (4, 'AB', 'c'), (5, 'ab', 'C'), (6, 'ab ', 'c'), (7, 'ab', 'c ')) v (n, subject, purpose)
ORDER BY n;
-- bytes, not characters: the same letter composed and decomposed
SELECT idempotency.issue_token(U&'\00E9', 'form') AS t \gset
SELECT check_(:'t', U&'\00E9'), check_(:'t', U&'e\0301');
-- the longest subject and purpose
SELECT idempotency.issue_token(repeat('s', 512), repeat('p', 256)) AS t \gset
SELECT consume_(:'t', repeat('s', 512), repeat('p', 256));
SELECT idempotency.revoke_tokens(repeat('s', 512), repeat('p', 256)) IS NOT NULL AS revoked;

----------------------------------------------------------------------------
-- What is no token
----------------------------------------------------------------------------
SELECT idempotency.issue_token('user-1', 'form') AS t, idempotency.issue_token('user-1', 'form', payload => '1') AS t1,
       idempotency.issue_token('user-1', 'form', payload => '12') AS t2 \gset
SELECT length(:'t') % 4 AS rest, length(:'t1') % 4 AS rest1, length(:'t2') % 4 AS rest2, check_(:'t'), check_(:'t1'), check_(:'t2');
-- any other character of the alphabet anywhere, with anything left over at the end
SELECT name, count(*), array_agg(DISTINCT check_(overlay(t PLACING c FROM i))) AS status
FROM (VALUES ('t', :'t'), ('t1', :'t1'), ('t2', :'t2')) v (name, t), generate_series(1, length(t)) i,
     regexp_split_to_table('ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_', '') c
WHERE substr(t, i, 1) <> c GROUP BY 1 ORDER BY 1;
-- every length but its own
SELECT array_agg(DISTINCT check_(left(:'t2', n))) FROM generate_series(0, length(:'t2') - 1) n;
SELECT array_agg(DISTINCT check_(:'t2' || repeat('A', n))) FROM generate_series(1, 9) n;
SELECT what, check_(token) FROM (VALUES
  (1, 'empty', ''),
  (2, 'padding', :'t1' || '='),
  (3, 'padding', :'t1' || '=='),
  (4, 'space', ' ' || :'t'),
  (5, 'newline', :'t' || E'\n'),
  (6, 'not ASCII', overlay(:'t' PLACING U&'\00E9' FROM 5)),
  (7, 'not ASCII', repeat(U&'\4E00', 200)),
  (8, 'garbage', :'t' || '.x'),
  (9, 'two tokens', :'t' || :'t'),
  (10, 'long', repeat('A', 20000)),
  (11, 'longer', repeat('A', 10000000)),
  (12, 'signature first', right(:'t', 43) || left(:'t', -43))
) v (n, what, token) ORDER BY n;
-- the other alphabet of base64
DO $$
DECLARE
  t text;
BEGIN
  LOOP
    t := idempotency.issue_token('user-1', 'form');
    EXIT WHEN t ~ '-' AND t ~ '_';
  END LOOP;
  RAISE WARNING '%, %, %', check_(replace(t, '-', '+')), check_(replace(t, '_', '/')), check_(t);
END
$$;

----------------------------------------------------------------------------
-- Expired, revoked, stale
----------------------------------------------------------------------------
-- Tokens of any time, signed by a key that the test knows: its secret is all
-- zero, so HMAC's two pads are plain 36 and 5c.  The layout is form.c's.
RESET ROLE;
INSERT INTO idempotency.token_keys SELECT 1, now(), now(), decode(repeat('00', 32), 'hex'), system, database FROM idempotency.token_keys;
CREATE FUNCTION forge(id text, issued interval, expires interval, generation bigint DEFAULT 0, key bigint DEFAULT 1, version text DEFAULT '01', payload bytea DEFAULT '') RETURNS text
LANGUAGE sql AS $$
  SELECT rtrim(translate(encode(body || sha256(decode(repeat('5c', 64), 'hex') ||
           sha256(decode(repeat('36', 64), 'hex') || int8send(system) || oidsend(database) || int4send(6) || 'user-1' || int4send(4) || 'form' || body)), 'base64'), E'+/\n', '-_'), '=')
  FROM (SELECT decode(version, 'hex') || int8send(key) || int8send(generation)
          || timestamptz_send(clock_timestamp() + issued) || timestamptz_send(clock_timestamp() + expires)
          || uuid_send(md5(id)::uuid) || payload) AS s (body),
       (SELECT system, database FROM idempotency.token_keys WHERE id = 1) AS k
$$;
-- Of each kind one that is never used, one that is consumed while it is valid,
-- and one that is revoked then.  The mark goes by the id, which stays the same.
SELECT consume_(forge('used', '-5 min', '1 min')), idempotency.revoke_token(forge('revoked', '-5 min', '1 min'), 'user-1', 'form');
SELECT "when", check_(forge('never', '-2 days', expires)) AS never, consume_(forge('used', '-2 days', expires)) AS used, consume_(forge('revoked', '-2 days', expires)) AS revoked
FROM (VALUES (1, 'a minute to go', interval '1 min'), (2, 'now', '0'), (3, 'within retention', '-23:59'), (4, 'past retention', '-24:00'), (5, 'long ago', '-20 years')) v (n, "when", expires) ORDER BY n;
SELECT consume_(forge('never', '-2 days', '-1 min')), consume_(forge('never', '-2 days', '-1 day')), consume_(forge('never', '-2 days', '1 min'));
SELECT idempotency.revoke_token(forge('never', '-2 days', '1 min'), 'user-1', 'form') AS used, idempotency.revoke_token(forge('revoked', '-5 min', '1 min'), 'user-1', 'form') AS revoked,
       idempotency.revoke_token(forge('x', '-2 days', '-1 min'), 'user-1', 'form') AS expired, idempotency.revoke_token(forge('x', '-2 days', '-1 day'), 'user-1', 'form') AS stale,
       idempotency.revoke_token('forged', 'user-1', 'form') AS invalid, idempotency.revoke_token(forge('x', '0', '1 min'), 'user-2', 'form') AS other_subject,
       idempotency.revoke_token(forge('x', '0', '1 min'), 'user-1', 'form') AS valid;
-- the wrong subject learns nothing about any of them
SELECT DISTINCT check_(forge(id, '-2 days', expires), 'user-2')
FROM unnest(ARRAY['never', 'used', 'revoked']) id, unnest(ARRAY['1 min', '-1 min', '-1 day']::interval[]) expires;
-- past retention nothing changes when the marks are purged; not before are they
UPDATE idempotency.used_tokens SET expires_at = clock_timestamp() - CASE WHEN id = md5('never')::uuid THEN interval '23:59' ELSE '24:00' END
WHERE id IN (md5('used')::uuid, md5('revoked')::uuid, md5('never')::uuid);
SELECT idempotency.purge() >= 2 AS purged;
SELECT id = md5('never')::uuid AS never, count(*) FROM idempotency.used_tokens WHERE id IN (md5('used')::uuid, md5('revoked')::uuid, md5('never')::uuid) GROUP BY 1;
SELECT consume_(forge('used', '-2 days', '-24:00')), consume_(forge('revoked', '-2 days', '-24:00'));
-- what has no end is not past it
BEGIN;
INSERT INTO idempotency.used_tokens VALUES ('infinity', now(), md5('endless')::uuid, false), ('294276-12-31', now(), md5('late')::uuid, false);
INSERT INTO idempotency.token_generations VALUES (1, 'infinity', 'endless', 'form'), (1, '294276-12-31', 'late', 'form');
SELECT idempotency.purge() >= 0 AS purged;
SELECT (SELECT count(*) FROM idempotency.used_tokens WHERE expires_at > now() + interval '8 days') AS marks, count(*) AS generations
FROM idempotency.token_generations WHERE subject IN ('endless', 'late');
ROLLBACK;
ALTER SYSTEM SET idempotency.token_retention = 0;
SELECT pg_reload_conf();
\c -
SELECT consume_(forge('x', '-5 min', '-1 ms')), check_(forge('x', '-5 min', '1 min'));
ALTER SYSTEM RESET idempotency.token_retention;
SELECT pg_reload_conf();
\c -
-- signed, but of another version, key or encoding than ours;
-- issued in the future is valid: the clock may have been set back
SELECT check_(forge('y', '0', '1 min')), check_(forge('y', '0', '1 min', version => '00')), check_(forge('y', '0', '1 min', version => '02')),
       check_(forge('y', '0', '1 min', key => 2)), check_(forge('y', '0', '1 min', payload => '\xff')), check_(forge('y', '1 h', '2 h'));
SELECT payload FROM idempotency.check_token(forge('y', '0', '1 min', payload => '{"a":1}'), 'user-1', 'form');
-- never longer than token_max_ttl from its issue
SELECT check_(forge('y', '-6 days 23:59', '1 min')), check_(forge('y', '-7 days', '1 min'));
-- a lower generation is revoked, the same or a higher one is not
BEGIN;
INSERT INTO idempotency.token_generations VALUES (100, now(), 'user-1', 'form'), (1000, now(), 'user-1', 'login'), (1000, now(), 'user-2', 'form');
SELECT generation, check_(forge('y', '0', '1 min', generation)), check_(forge('y', '-1 h', '-1 min', generation)) AS ended, check_(forge('y', '-2 days', '-1 day', generation)) AS long_ago
FROM unnest(ARRAY[-1, 0, 99, 100, 101, 9223372036854775807]) generation;
ROLLBACK;
DROP FUNCTION forge;
DELETE FROM idempotency.token_keys WHERE id = 1;
SET ROLE regress_token;

-- one rule at the end: valid while t < expires_at
DO $$
DECLARE
  t text; r idempotency.token_result; before timestamptz; seen text[] := '{}';
BEGIN
  FOR i IN 1..500 LOOP
    t := idempotency.issue_token('user-1', 'form', interval '50 microseconds');
    LOOP
      before := clock_timestamp();
      r := idempotency.check_token(t, 'user-1', 'form');
      seen := CASE WHEN r.status = ANY (seen) THEN seen ELSE seen || r.status END;
      IF r.status = 'valid' AND before >= r.expires_at OR r.status = 'expired' AND clock_timestamp() < r.expires_at THEN
        RAISE EXCEPTION 'wrong: %', r;
      END IF;
      EXIT WHEN r.status <> 'valid';
    END LOOP;
  END LOOP;
  RAISE WARNING 'expired was seen: %', 'expired' = ANY (seen);
END
$$;
-- it is consumed before its end, never at it
SELECT count(*) AS late FROM generate_series(1, 10000) i,
  LATERAL idempotency.consume_token(idempotency.issue_token('user-1', 'form', make_interval(secs => (1 + i % 200) / 1e6)), 'user-1', 'form') r
WHERE r.consumed_at >= r.expires_at;
-- in a transaction whose now() is frozen before it
BEGIN;
SELECT idempotency.issue_token('user-1', 'form', interval '1 ms') AS t \gset
SELECT pg_sleep(0.002);
SELECT status, now() < expires_at AS by_frozen_clock FROM idempotency.consume_token(:'t', 'user-1', 'form');
COMMIT;

-- all that were issued before, of this subject and purpose
SELECT idempotency.issue_token('user-1', 'form') AS t, idempotency.issue_token('user-1', 'form') AS used,
       idempotency.issue_token('user-1', 'form', '1 microsecond') AS expired,
       idempotency.issue_token('user-1', 'login') AS other_purpose, idempotency.issue_token('user-2', 'form') AS other_subject \gset
SELECT consume_(:'used');
BEGIN;
SELECT idempotency.revoke_tokens('user-1', 'form') IS NOT NULL AS revoked;
SELECT check_(:'t');
SELECT check_(idempotency.issue_token('user-1', 'form'));
ROLLBACK;
SELECT check_(:'t');
SELECT idempotency.revoke_tokens('user-1', 'form') IS NOT NULL AS revoked;
SELECT check_(:'t'), consume_(:'t'), consume_(:'used'), consume_(:'expired'),
       consume_(:'other_purpose', purpose => 'login'), consume_(:'other_subject', 'user-2');
SELECT idempotency.revoke_token(:'t', 'user-1', 'form');
-- those issued since are not
SELECT idempotency.issue_token('user-1', 'form') AS t \gset
SELECT check_(:'t');
SELECT idempotency.revoke_tokens('user-1', 'form') IS NOT NULL AS revoked;
SELECT check_(:'t');
-- it grows even if the clock is set back, and one that was raised in the same transaction too
RESET ROLE;
UPDATE idempotency.token_generations SET generation = 9000000000000000000 WHERE subject = 'user-1';
SET ROLE regress_token;
SELECT idempotency.issue_token('user-1', 'form') AS t \gset
SELECT check_(:'t');
BEGIN;
SELECT idempotency.revoke_tokens('user-1', 'form') IS NOT NULL AS revoked;
SELECT idempotency.revoke_tokens('user-1', 'form') > now() AS revoked, idempotency.revoke_tokens('user-1', 'form') > now() AS again;
COMMIT;
SELECT check_(:'t'), check_(idempotency.issue_token('user-1', 'form'));
RESET ROLE;
SELECT generation - 9000000000000000000 AS raised, raised_at <= clock_timestamp() AS at
FROM idempotency.token_generations WHERE subject = 'user-1';
-- once every token that it revoked is stale, the row goes
UPDATE idempotency.token_generations SET raised_at = clock_timestamp() - interval '7 days 23:59' WHERE subject = 'user-1';
SELECT idempotency.purge() >= 0 AS purged;
SELECT count(*) FROM idempotency.token_generations WHERE subject = 'user-1';
UPDATE idempotency.token_generations SET raised_at = clock_timestamp() - interval '8 days' WHERE subject = 'user-1';
SELECT idempotency.purge() >= 1 AS purged;
SELECT count(*) FROM idempotency.token_generations WHERE subject = 'user-1';
SET ROLE regress_token;
SELECT idempotency.issue_token('user-1', 'form') AS t \gset
SELECT check_(:'t');
SELECT idempotency.revoke_tokens('user-1', 'form') IS NOT NULL AS revoked;
SELECT check_(:'t');

----------------------------------------------------------------------------
-- Token keys
----------------------------------------------------------------------------
SELECT try('SELECT idempotency.rotate_token_key()');
SELECT idempotency.issue_token('user-1', 'form') AS t1 \gset
RESET ROLE;
SELECT round(extract(epoch FROM idempotency.rotate_token_key() - clock_timestamp())) AS seconds_left;
SET ROLE regress_token;
SELECT idempotency.issue_token('user-1', 'form') AS t2 \gset
SELECT check_(:'t1'), check_(:'t2'), substr(:'t1', 3, 10) <> substr(:'t2', 3, 10) AS another_key;
RESET ROLE;
SELECT count(*), count(rotated_at) FROM idempotency.token_keys;
-- what is rolled back did not happen
BEGIN;
SAVEPOINT a;
SELECT idempotency.rotate_token_key(retire => true) IS NOT NULL AS rotated;
SELECT check_(:'t1'), check_(:'t2'), check_(idempotency.issue_token('user-1', 'form'));
ROLLBACK TO a;
SELECT check_(:'t1'), check_(:'t2'), check_(idempotency.issue_token('user-1', 'form'));
SELECT idempotency.rotate_token_key(retire => true) - now() < '1 min' AS over;
ROLLBACK;
SELECT check_(:'t1'), check_(:'t2'), check_(idempotency.issue_token('user-1', 'form'));
-- a rotated key verifies for token_max_ttl + token_retention, and is then removed by the next rotation
UPDATE idempotency.token_keys SET rotated_at = clock_timestamp() - interval '7 days 23:59' WHERE rotated_at IS NOT NULL;
SELECT check_(:'t1'), check_(:'t2');
UPDATE idempotency.token_keys SET rotated_at = clock_timestamp() - interval '8 days' WHERE rotated_at IS NOT NULL;
SELECT check_(:'t1'), check_(:'t2');
SELECT idempotency.rotate_token_key() IS NOT NULL AS rotated;
SELECT count(*), count(rotated_at) FROM idempotency.token_keys;
SELECT check_(:'t2');
SELECT idempotency.issue_token('user-1', 'form') AS t3 \gset
SELECT idempotency.rotate_token_key(retire => true) IS NOT NULL AS rotated;
SELECT check_(:'t2'), check_(:'t3'), check_(idempotency.issue_token('user-1', 'form'));
SELECT count(*), count(rotated_at) FROM idempotency.token_keys;
-- two unrotated ones, as after a restore: the newest signs, both verify, both are rotated
SELECT idempotency.issue_token('user-1', 'form') AS t \gset
INSERT INTO idempotency.token_keys (id, created_at, secret, system, database)
SELECT 0, '2020-01-01', '\x00', system, database FROM idempotency.token_keys LIMIT 1;
SELECT check_(:'t'), check_(idempotency.issue_token('user-1', 'form'));
UPDATE idempotency.token_keys SET secret = decode(repeat('00', 32), 'hex'), created_at = clock_timestamp() WHERE id = 0;
SELECT check_(:'t'), check_(idempotency.issue_token('user-1', 'form'));
SELECT substr(idempotency.issue_token('user-1', 'form'), 1, 11) = rpad('AQ', 11, 'A') AS signed_by_newest;
SELECT idempotency.rotate_token_key() IS NOT NULL AS rotated;
SELECT count(*), count(rotated_at) FROM idempotency.token_keys;
SELECT check_(:'t');
-- many keys
SELECT count(idempotency.rotate_token_key()) FROM generate_series(1, 20);
SELECT check_(:'t'), check_(idempotency.issue_token('user-1', 'form'));
-- none: said so
BEGIN;
DELETE FROM idempotency.token_keys;
SELECT check_(:'t');
SELECT try('SELECT idempotency.issue_token(''user-1'', ''form'')');
ROLLBACK;
BEGIN;
TRUNCATE idempotency.token_keys;
SELECT check_(:'t');
ROLLBACK;
SELECT check_(:'t');

----------------------------------------------------------------------------
-- Settings
----------------------------------------------------------------------------
SELECT name, setting, unit, context FROM pg_settings WHERE name LIKE 'idempotency.token%' ORDER BY name;
SET ROLE regress_token;
-- one value for all sessions: none can have another
SELECT try('SET idempotency.token_max_ttl = 1'), try('SET idempotency.token_retention = 1');
-- seven days are seven days, also where one of them has 25 hours
SET timezone = 'Europe/Berlin';
SELECT check_(idempotency.issue_token('user-1', 'form', '7 days')), check_(idempotency.issue_token('user-1', 'form', '168 hours'));
SELECT try('SELECT idempotency.issue_token(''user-1'', ''form'', ''7 days 1 microsecond'')');
RESET timezone;
-- lowered, the limit holds for what was issued before
SELECT idempotency.issue_token('user-1', 'form', '7 days') AS t \gset
RESET ROLE;
ALTER SYSTEM SET idempotency.token_max_ttl = '1 h';
SELECT pg_reload_conf();
\c -
SELECT status, expires_at - issued_at AS ttl FROM idempotency.check_token(:'t', 'user-1', 'form');
SELECT try('SELECT idempotency.issue_token(''user-1'', ''form'', ''61 min'')');
ALTER SYSTEM SET idempotency.token_max_ttl = '1 s';
SELECT pg_reload_conf();
\c -
SELECT pg_sleep(1);
SELECT consume_(:'t');
ALTER SYSTEM RESET idempotency.token_max_ttl;
SELECT pg_reload_conf();
\c -
SELECT consume_(:'t');
-- its mark is kept until its own end, although the limit was lower
SELECT expires_at - marked_at > interval '6 days 23:00' AS own_end FROM idempotency.used_tokens ORDER BY marked_at DESC LIMIT 1;
SET ROLE regress_token;

----------------------------------------------------------------------------
-- Payloads
----------------------------------------------------------------------------
CREATE TABLE payload (n int GENERATED ALWAYS AS IDENTITY, p jsonb);
INSERT INTO payload (p) VALUES
  (NULL), ('null'), ('true'), ('""'), ('0'), ('-0.0'), ('1.000'), ('1e300'), ('123456789012345678901234567890.123456789'),
  ('[]'), ('{}'), ('"\"\\/\b\f\n\r\t\u0001"'), (to_jsonb(U&'\00E9\4E00\+01F600'::text)), ('{"a": {"b": [1, null, {"c": "d"}]}}'),
  (('[' || repeat('[', 500) || repeat(']', 500) || ']')::jsonb), (to_jsonb(repeat('x', 8190)));
SELECT n, left(p::text, 40) AS payload, payload IS NOT DISTINCT FROM p AS same, payload::text IS NOT DISTINCT FROM p::text AS same_text
FROM payload, idempotency.check_token(idempotency.issue_token('user-1', 'form', payload => p), 'user-1', 'form')
ORDER BY n;
SELECT try('SELECT idempotency.issue_token(''user-1'', ''form'', payload => to_jsonb(repeat(''x'', 8191)))');

----------------------------------------------------------------------------
-- Arguments
----------------------------------------------------------------------------
SELECT call, try('SELECT idempotency.' || call) FROM (VALUES
  (1, 'issue_token(NULL, ''p'')'),
  (2, 'issue_token(''s'', NULL)'),
  (3, 'issue_token('''', ''p'')'),
  (4, 'issue_token(''s'', '''')'),
  (5, 'issue_token(repeat(''s'', 513), ''p'')'),
  (6, 'issue_token(''s'', repeat(''p'', 257))'),
  (7, 'issue_token(''s'', ''p'', NULL)'),
  (8, 'issue_token(''s'', ''p'', ''0'')'),
  (9, 'issue_token(''s'', ''p'', ''-1 s'')'),
  (10, 'issue_token(''s'', ''p'', ''1 day -25 h'')'),
  (11, 'issue_token(''s'', ''p'', ''1 month'')'),
  (12, 'issue_token(''s'', ''p'', ''300000 years'')'),
  (13, 'issue_token(''s'', ''p'', ''-300000 years'')'),
  (14, 'consume_token(NULL, ''s'', ''p'')'),
  (15, 'consume_token(''t'', NULL, ''p'')'),
  (16, 'consume_token(''t'', ''s'', NULL)'),
  (17, 'consume_token(''t'', '''', ''p'')'),
  (18, 'consume_token(''t'', ''s'', '''')'),
  (19, 'consume_token(''t'', ''s'', ''p'', ''-1 s'')'),
  (20, 'consume_token(''t'', ''s'', ''p'', ''300000 years'')'),
  (21, 'check_token(NULL, ''s'', ''p'')'),
  (22, 'check_token(''t'', repeat(''s'', 513), ''p'')'),
  (23, 'check_token(''t'', ''s'', repeat(''p'', 257))'),
  (24, 'revoke_token(NULL, ''s'', ''p'')'),
  (25, 'revoke_token(''t'', ''s'', NULL)'),
  (26, 'revoke_tokens(NULL, ''p'')'),
  (27, 'revoke_tokens(''s'', NULL)'),
  (28, 'revoke_tokens('''', ''p'')'),
  (29, 'revoke_tokens(''s'', '''')')
) v (n, call) ORDER BY n;
RESET ROLE;
SELECT try('SELECT idempotency.rotate_token_key(NULL)');
SELECT try('SELECT idempotency.table_changed()');

----------------------------------------------------------------------------
-- Privileges
----------------------------------------------------------------------------
CREATE ROLE regress_token_none;
SET ROLE regress_token_none;
SELECT try('SELECT idempotency.issue_token(''user-1'', ''form'')');
RESET ROLE;
SET ROLE regress_token;
SELECT try('TABLE idempotency.token_keys'), try('TABLE idempotency.used_tokens'), try('TABLE idempotency.token_generations');
RESET ROLE;
SELECT p.oid::regprocedure AS function, has_function_privilege('regress_token_none', p.oid, 'EXECUTE') AS "none",
       has_function_privilege('regress_token', p.oid, 'EXECUTE') AS usage
FROM pg_proc p WHERE pronamespace = 'idempotency'::regnamespace AND proname LIKE '%token%' ORDER BY p.oid::regprocedure::text COLLATE "C";
SELECT idempotency.grant_admin('regress_token');
SET ROLE regress_token;
SELECT try('SELECT idempotency.rotate_token_key(retire => true) IS NOT NULL');
SELECT check_(:'t');
RESET ROLE;

----------------------------------------------------------------------------
-- Our tables altered
----------------------------------------------------------------------------
SELECT idempotency.issue_token('user-1', 'form') AS t \gset
BEGIN;
ALTER TABLE idempotency.token_keys DISABLE TRIGGER changed;
DROP TRIGGER changed ON idempotency.token_keys;
SELECT split_part(try('SELECT idempotency.issue_token(''user-1'', ''form'')'), ' / ', 1) AS try;
ROLLBACK;
BEGIN;
ALTER TABLE idempotency.used_tokens ADD CHECK (revoked IS NOT NULL);
SELECT split_part(try(format('SELECT consume_(%L)', :'t')), ' / ', 1) AS try;
ROLLBACK;
BEGIN;
ALTER TABLE idempotency.token_generations DROP CONSTRAINT token_generations_pkey;
SELECT split_part(try(format('SELECT consume_(%L)', :'t')), ' / ', 1) AS try;
ROLLBACK;
SELECT consume_(:'t');

----------------------------------------------------------------------------
-- What is not in our messages
----------------------------------------------------------------------------
CREATE FUNCTION tells(statement text, VARIADIC secrets text[]) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  state text; said text; detail text; hint text; secret text;
BEGIN
  EXECUTE statement USING secrets[1], secrets[2], secrets[3];
  RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
  GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, said = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
  FOREACH secret IN ARRAY secrets LOOP
    IF strpos(concat(said, detail, hint), secret) > 0 THEN
      RETURN state || ' tells';
    END IF;
  END LOOP;
  RETURN state || ' tells nothing';
END
$$;
SELECT idempotency.issue_token('subject-7', 'purpose-7') AS t \gset
BEGIN READ ONLY;
SELECT tells('SELECT idempotency.consume_token($1, $2, $3)', :'t', 'subject-7', 'purpose-7');
SELECT tells('SELECT idempotency.revoke_token($1, $2, $3)', :'t', 'subject-7', 'purpose-7');
SELECT tells('SELECT idempotency.revoke_tokens($2, $3)', :'t', 'subject-7', 'purpose-7');
ROLLBACK;
SELECT tells('SELECT idempotency.consume_token($1, $2, $3, ''-1 s'')', :'t', 'subject-7', 'purpose-7');
SELECT tells('SELECT idempotency.issue_token($2, $3, ''-1 s'', to_jsonb($1))', :'t', 'subject-7', 'purpose-7');
SELECT tells('SELECT idempotency.issue_token($2, $3, payload => to_jsonb(repeat($1, 1000)))', :'t', 'subject-7', 'purpose-7');
SELECT tells('SELECT idempotency.issue_token(repeat($2, 1000), $3)', :'t', 'subject-7', 'purpose-7');

DROP FUNCTION tells;
SET ROLE regress_token;
DROP TABLE payload;
DROP FUNCTION try, check_, consume_;
RESET ROLE;
SELECT idempotency.revoke_usage('regress_token');
REVOKE CREATE ON SCHEMA public FROM regress_token;
DROP ROLE regress_token, regress_token_none;
DELETE FROM idempotency.used_tokens;
DELETE FROM idempotency.token_generations;
