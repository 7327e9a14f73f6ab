\set id random(1, :rows)
UPDATE plain_order SET amount = amount + 1 WHERE id = :id;
