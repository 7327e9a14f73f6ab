-- Floor A without an answer.
\set k random(1000000000000000000, 9000000000000000000)
INSERT INTO floor_key (created_at, expires_at, status, key, scope) VALUES (clock_timestamp(), clock_timestamp() + '1 day', 'c', :k, 'bench');
