-- The main job in five statements, over the same by hand.
-- over: five_by_hand
\set k random(1000000000000000000, 9000000000000000000)
BEGIN;
SELECT status, response FROM idempotency.claim('bench', :k);
INSERT INTO payment (request_id, amount) VALUES (:k, 10);
SELECT idempotency.complete('bench', :k, repeat('x', 180));
COMMIT;
