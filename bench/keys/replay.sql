-- A hit: the stored answer, by claim().
-- over: select_key
-- goal: 1.30 1.10
\set k 1000000000000000000 + random(1, :rows) * 2654435761 % 8000000000 * 1000000000
SELECT status, response FROM idempotency.claim('bench', :k);
