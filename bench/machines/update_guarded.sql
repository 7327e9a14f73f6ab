-- The guard, when the state is assigned and changes.
-- over: update_plain
-- goal: 1.15 1.00
\set id random(1, :rows)
UPDATE guarded_order SET status = 'PAID' WHERE id = :id;
UPDATE guarded_order SET status = 'CREATED' WHERE id = :id;
