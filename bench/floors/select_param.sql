-- Any statement's cost with one parameter, no table: what is put back when the
-- call overhead, measured by an empty function, is taken off.
\set k random(1000000000000000000, 9000000000000000000)
SELECT :k;
