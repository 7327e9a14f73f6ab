-- Floor A with a request (the fingerprint) in the row.
\set k random(1000000000000000000, 9000000000000000000)
INSERT INTO floor_key (created_at, expires_at, status, key, scope, response, fingerprint) VALUES (clock_timestamp(), clock_timestamp() + '1 day', 'c', :k, 'bench', repeat('x', 180), decode('72f0e1d2c3a1b2c3d4e5f60718293a4b5c6d7e8f90', 'hex'));
