-- The same two writes by hand.
\set k random(1000000000000000000, 9000000000000000000)
INSERT INTO hand_lease (created_at, expires_at, status, key, scope, fence, deadline, attempt) VALUES (clock_timestamp(), clock_timestamp() + '1 day', 'l', :k, 'bench', extract(epoch FROM clock_timestamp()) * 1000000, clock_timestamp() + '1 min', 1) ON CONFLICT DO NOTHING RETURNING status, fence \gset
UPDATE hand_lease SET status = 'c', response = repeat('x', 180), deadline = NULL, expires_at = clock_timestamp() + '1 day' WHERE key = :k AND scope = 'bench' AND status = 'l' AND fence = :fence;
