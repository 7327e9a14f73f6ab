-- once() on a new key.
-- over: insert_bare
-- goal: 1.20 1.05
\set k random(1000000000000000000, 9000000000000000000)
SELECT idempotency.once('bench', :k);
