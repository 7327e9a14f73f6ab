-- A hit by lookup(), which has ten columns.
-- over: select_key
\set k 1000000000000000000 + random(1, :rows) * 2654435761 % 8000000000 * 1000000000
SELECT status, response FROM idempotency.lookup('bench', :k);
