-- A lease, committed, and complete() in a second transaction.
-- net: self - empty_lease_complete + select_param + select_param
-- over: by_hand
-- goal: 1.30 1.10
\set k random(1000000000000000000, 9000000000000000000)
SELECT status, fence FROM idempotency.lease('bench', :k, '1 min') \gset
SELECT idempotency.complete('bench', :k, repeat('x', 180), fence => :fence);
