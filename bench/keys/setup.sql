\ir ../answers.sql

-- The same as a plain table for the floors, which has no index but the primary key.
CREATE TABLE floor_key (LIKE idempotency.keys, PRIMARY KEY (key, scope));
INSERT INTO floor_key TABLE idempotency.keys;
-- Another for what updates its rows, so that the floors' table only grows.
CREATE TABLE hand_key (LIKE idempotency.keys, PRIMARY KEY (key, scope));
INSERT INTO hand_key SELECT * FROM idempotency.keys LIMIT 100000;

CREATE FUNCTION empty_claim(scope text, key text) RETURNS idempotency.claim_result LANGUAGE c AS :'empty', 'empty';
CREATE FUNCTION empty_claim_request(scope text, key text, request jsonb) RETURNS idempotency.claim_result LANGUAGE c AS :'empty', 'empty';
CREATE FUNCTION empty_run(scope text, key text, function text, request jsonb) RETURNS idempotency.run_result LANGUAGE c AS :'empty', 'empty';
CREATE FUNCTION empty_lookup(scope text, key text) RETURNS idempotency.key_record LANGUAGE c AS :'empty', 'empty';
CREATE FUNCTION empty_complete(scope text, key text, response text) RETURNS timestamptz LANGUAGE c AS :'empty', 'empty';
CREATE FUNCTION empty_once(scope text, key text) RETURNS boolean LANGUAGE c AS :'empty', 'empty';

\ir ../payment.sql
-- The same with the key's final row, than which run() can hardly be cheaper.
CREATE FUNCTION pay_and_insert(this_key text, request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO payment (request_id, amount) VALUES (request ->> 'request_id', 10);
  INSERT INTO floor_key (created_at, expires_at, status, key, scope, response, fingerprint)
  VALUES (clock_timestamp(), clock_timestamp() + '1 day', 'c', this_key, 'bench', repeat('x', 180), decode('72f0e1d2c3a1b2c3d4e5f60718293a4b5c6d7e8f90', 'hex'));
  RETURN repeat('x', 180);
END
$$;
