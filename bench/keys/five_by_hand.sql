\set k random(1000000000000000000, 9000000000000000000)
BEGIN;
INSERT INTO hand_key (created_at, expires_at, status, key, scope) VALUES (clock_timestamp(), clock_timestamp() + '1 day', 'p', :k, 'bench') ON CONFLICT DO NOTHING;
INSERT INTO payment (request_id, amount) VALUES (:k, 10);
UPDATE hand_key SET status = 'c', response = repeat('x', 180) WHERE key = :k AND scope = 'bench';
COMMIT;
