-- :rows keys at random and :rows in the order of time, in both tables.
\ir contest.sql
INSERT INTO hand_key (scope, key, status, response)
SELECT 'bench',
  overlay(overlay(lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint - :rows + i), 12, '0') || substr(md5(i::text), 1, 20) PLACING '7' FROM 13 FOR 1) PLACING '8' FROM 17 FOR 1)::uuid,
  'c', repeat('x', 180)
FROM generate_series(1, :rows) i;
INSERT INTO idempotency.keys (created_at, expires_at, status, key, scope, response)
SELECT created_at, expires_at, status, key, scope, response FROM hand_key WHERE substr(key, 15, 1) = '7';
VACUUM ANALYZE;
