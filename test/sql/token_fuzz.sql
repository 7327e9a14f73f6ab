-- 110,000 tokens that must not be consumed: half of them mutated at random,
-- half correctly signed and presented in the wrong context.  The seed is fixed,
-- the tokens are new each time; a failure prints what was accepted.
SET client_min_messages = warning;
SELECT setseed(0.5);
CREATE ROLE regress_fuzz;
SELECT idempotency.grant_usage('regress_fuzz');

CREATE TEMP TABLE base AS
SELECT n, idempotency.issue_token('user-1', 'form', '1 hour',
         CASE n % 5 WHEN 0 THEN NULL WHEN 1 THEN '1' WHEN 2 THEN '12' WHEN 3 THEN '{"report": 7}' ELSE to_jsonb(repeat('x', n)) END) AS token
FROM generate_series(1, 500) n;

-- one token, mutated in one of a dozen ways, from another one if need be
CREATE FUNCTION pg_temp.mutate(t text, other text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  i int := 1 + floor(random() * length(t)); j int := 1 + floor(random() * length(t));
  c text := substr('ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_', 1 + floor(random() * 64)::int, 1);
BEGIN
  CASE floor(random() * 12)
    WHEN 0, 1, 2, 3 THEN RETURN overlay(t PLACING c FROM i FOR 1);                       -- a character
    WHEN 4 THEN RETURN left(t, i - 1) || substr(t, i + 1);                               -- one less
    WHEN 5 THEN RETURN left(t, i - 1) || c || substr(t, i);                              -- one more
    WHEN 6 THEN RETURN left(t, i);                                                       -- truncated
    WHEN 7 THEN RETURN t || repeat(c, j);                                                -- longer
    WHEN 8 THEN RETURN left(t, i) || substr(other, i + 1);                               -- the rest of another one
    WHEN 9 THEN RETURN left(t, -43) || right(other, 43);                                 -- the signature of another one
    WHEN 10 THEN RETURN overlay(t PLACING substr(t, j, 4) FROM i FOR 4);                 -- four characters of itself
    WHEN 11 THEN RETURN overlay(t PLACING chr(1 + floor(random() * 2000)::int) FROM i FOR 1); -- any character
  END CASE;
END
$$;

CREATE TEMP TABLE fuzz (kind text, expected text, token text, subject text DEFAULT 'user-1', purpose text DEFAULT 'form');
INSERT INTO fuzz
SELECT 'mutated', 'invalid', pg_temp.mutate(a.token, b.token)
FROM base a, generate_series(1, 140) g, LATERAL (SELECT token FROM base WHERE n = 1 + (a.n + g) % 500) b;
DELETE FROM fuzz USING base WHERE fuzz.token = base.token;
DELETE FROM fuzz WHERE ctid NOT IN (SELECT ctid FROM fuzz LIMIT 55000);

-- correctly signed, but for whom, for what, in which split of the two
INSERT INTO fuzz SELECT 'other subject', 'invalid', idempotency.issue_token('user-' || n, 'form') FROM generate_series(2, 7501) n;
INSERT INTO fuzz SELECT 'other purpose', 'invalid', idempotency.issue_token('user-1', 'form' || n) FROM generate_series(1, 7500) n;
INSERT INTO fuzz SELECT 'other split', 'invalid', idempotency.issue_token(left(both_, i), substr(both_, i + 1)), left(both_, j), substr(both_, j + 1)
FROM generate_series(1, 500) n, LATERAL (SELECT 'user-1form' || n) s (both_), generate_series(2, 5) i, generate_series(2, 5) j
WHERE i <> j;
INSERT INTO fuzz SELECT 'swapped', 'invalid', idempotency.issue_token('form', 'user-1') FROM generate_series(1, 1500) n;
INSERT INTO fuzz SELECT 'end', 'expired', idempotency.issue_token('user-1', 'form', '1 microsecond') FROM generate_series(1, 7500) n;
INSERT INTO fuzz SELECT 'used', 'used', idempotency.issue_token('user-1', 'form') FROM generate_series(1, 7500) n;
SELECT count(*), bool_and((idempotency.consume_token(token, subject, purpose)).status = 'consumed') FROM fuzz WHERE kind = 'used';
-- a generation that was left behind
INSERT INTO fuzz SELECT 'generation', 'revoked', idempotency.issue_token('user-1', 'generation'), 'user-1', 'generation' FROM generate_series(1, 7500) n;
SELECT idempotency.revoke_tokens('user-1', 'generation') IS NOT NULL AS revoked;
-- a key that was retired: with one of the same id in its place, then without
BEGIN;
INSERT INTO idempotency.token_keys SELECT 7, 'infinity', NULL, sha256('a'), system, database FROM idempotency.token_keys LIMIT 1;
INSERT INTO fuzz SELECT 'key', 'invalid', idempotency.issue_token('user-1', 'form') FROM generate_series(1, 5000) n;
DELETE FROM idempotency.token_keys WHERE id = 7;
INSERT INTO idempotency.token_keys SELECT 8, 'infinity', NULL, sha256('b'), system, database FROM idempotency.token_keys LIMIT 1;
INSERT INTO fuzz SELECT 'key', 'invalid', idempotency.issue_token('user-1', 'form') FROM generate_series(1, 5000) n;
DELETE FROM idempotency.token_keys WHERE id = 8;
INSERT INTO idempotency.token_keys SELECT 7, now(), now(), sha256('b'), system, database FROM idempotency.token_keys LIMIT 1;
COMMIT;

SELECT count(*) >= 100000 AS enough, count(*) FILTER (WHERE kind = 'mutated') AS mutated, count(*) FILTER (WHERE kind <> 'mutated') AS signed FROM fuzz;
SELECT count(*) AS marks FROM idempotency.used_tokens \gset
GRANT SELECT ON fuzz, base TO regress_fuzz;
SET ROLE regress_fuzz;
CREATE TEMP TABLE outcome AS
SELECT fuzz.*, (idempotency.consume_token(token, subject, purpose)).status FROM fuzz;
SELECT kind, expected, status, count(*) FROM outcome GROUP BY 1, 2, 3 ORDER BY 1, 2, 3;
SELECT * FROM outcome WHERE status <> expected LIMIT 10;
-- every original is still good, once
SELECT (idempotency.consume_token(token, 'user-1', 'form')).status, count(*) FROM base GROUP BY 1;
SELECT (idempotency.consume_token(token, 'user-1', 'form')).status, count(*) FROM base GROUP BY 1;
RESET ROLE;
SELECT count(*) - :marks AS marks FROM idempotency.used_tokens;

DELETE FROM idempotency.token_keys WHERE id = 7;
DROP TABLE outcome;
DROP TABLE fuzz, base;
SELECT idempotency.revoke_usage('regress_fuzz');
DROP ROLE regress_fuzz;
DELETE FROM idempotency.used_tokens;
DELETE FROM idempotency.token_generations;
