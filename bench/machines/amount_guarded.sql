-- The guard, when the state is not assigned.
-- over: amount_plain
-- goal: 1.08 1.00
\set id random(1, :rows)
UPDATE guarded_order SET amount = amount + 1 WHERE id = :id;
