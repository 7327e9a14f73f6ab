-- :rows marks, and the same as a plain table for the floor; nothing was ever
-- revoked.  For the usual way a table of :rows tokens that are not used yet.
INSERT INTO idempotency.used_tokens (expires_at, marked_at, id, revoked)
SELECT now(), now(), gen_random_uuid(), false FROM generate_series(1, :rows) i;

CREATE TABLE floor_mark (LIKE idempotency.used_tokens INCLUDING ALL);
INSERT INTO floor_mark TABLE idempotency.used_tokens;
CREATE TABLE floor_generation (LIKE idempotency.token_generations INCLUDING ALL);
INSERT INTO floor_generation (generation, raised_at, subject, purpose)
SELECT i, now(), (1000000000000000000 + i * 2654435761 % 8000000000 * 1000000000)::text, 'form' FROM generate_series(1::bigint, :rows) i;

CREATE TABLE usual_token (token text PRIMARY KEY, subject text NOT NULL, purpose text NOT NULL, expires_at timestamptz NOT NULL);
INSERT INTO usual_token
SELECT md5(i::text) || md5('x' || i), (1000000000000000000 + i * 2654435761 % 8000000000 * 1000000000)::text, 'form', now() + '1 day'
FROM generate_series(1::bigint, :rows) i;

CREATE FUNCTION empty_issue(subject text, purpose text) RETURNS text LANGUAGE c AS :'empty', 'empty';
CREATE FUNCTION empty_consume(token text, subject text, purpose text) RETURNS idempotency.token_result LANGUAGE c AS :'empty', 'empty';
CREATE FUNCTION bare_hmac(message text) RETURNS text LANGUAGE c AS :'empty', 'bare_hmac';
CREATE FUNCTION empty_hmac(message text) RETURNS text LANGUAGE c AS :'empty', 'empty';
