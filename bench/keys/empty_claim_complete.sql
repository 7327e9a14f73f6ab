\set k random(1000000000000000000, 9000000000000000000)
SELECT status, empty_complete('bench', :k, repeat('x', 180)) FROM empty_claim('bench', :k);
