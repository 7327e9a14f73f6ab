-- A new key, claimed and completed in one statement.
-- net: self - empty_claim_complete + select_param
-- over: insert_key
-- goal: 1.30 1.15
\set k random(1000000000000000000, 9000000000000000000)
SELECT status, idempotency.complete('bench', :k, repeat('x', 180)) FROM idempotency.claim('bench', :k);
