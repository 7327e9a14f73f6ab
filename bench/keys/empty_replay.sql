\set k random(1000000000000000000, 9000000000000000000)
SELECT status, response FROM empty_claim('bench', :k);
