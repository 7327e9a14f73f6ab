-- The key table with :rows answers of 180 bytes, once for all that ask for them.
INSERT INTO idempotency.keys (created_at, expires_at, status, key, scope, response)
SELECT now(), now() + '1 day', 'c', (1000000000000000000 + i * 2654435761 % 8000000000 * 1000000000)::text, 'bench', repeat('x', 180)
FROM generate_series(1::bigint, :rows) i
ON CONFLICT DO NOTHING;
