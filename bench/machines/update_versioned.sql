-- The version trigger over a plain UPDATE that counts by itself.
-- over: count_by_hand
\set id random(1, :rows)
UPDATE versioned_order SET amount = amount + 1 WHERE id = :id;
