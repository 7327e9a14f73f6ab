\set k random(1000000000000000000, 9000000000000000000)
SELECT status FROM empty_consume(:k, :k, 'form');
