-- Floor A: the same final row by a plain prepared INSERT, autocommit.
\set k random(1000000000000000000, 9000000000000000000)
INSERT INTO floor_key (scope, key, status, response) VALUES ('bench', :k, 'c', 'x');
