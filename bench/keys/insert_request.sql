-- Floor A with a request (the fingerprint) in the row.
\set k random(1000000000000000000, 9000000000000000000)
INSERT INTO floor_key (created_at, expires_at, status, key, scope, response, request) VALUES (clock_timestamp(), clock_timestamp() + '1 day', 'c', :k, 'bench', repeat('x', 180), jsonb_build_object('request_id', :k::text));
