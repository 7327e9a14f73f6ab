-- The key table with :rows finished keys, and the same by hand.
INSERT INTO idempotency.keys (created_at, expires_at, status, key, scope, response)
SELECT now(), now() + '1 day', 'c', (1000000000000000000 + i * 2654435761 % 8000000000 * 1000000000)::text, 'bench', repeat('x', 180)
FROM generate_series(1::bigint, :rows) i
ON CONFLICT DO NOTHING;		-- bench/keys loads the same

CREATE TABLE hand_lease (LIKE idempotency.keys, PRIMARY KEY (key, scope));
INSERT INTO hand_lease TABLE idempotency.keys;

CREATE FUNCTION empty_lease(scope text, key text, lease interval) RETURNS idempotency.lease_result LANGUAGE c AS :'empty', 'empty';
CREATE FUNCTION empty_complete(scope text, key text, response text, fence bigint) RETURNS timestamptz LANGUAGE c AS :'empty', 'empty';
