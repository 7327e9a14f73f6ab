-- Floor A: the same final row by a plain prepared INSERT, autocommit.
\set k random(1000000000000000000, 9000000000000000000)
INSERT INTO floor_key (created_at, expires_at, status, key, scope, response) VALUES (clock_timestamp(), clock_timestamp() + '1 day', 'c', :k, 'bench', repeat('x', 180));
