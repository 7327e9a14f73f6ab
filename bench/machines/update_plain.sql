\set id random(1, :rows)
UPDATE plain_order SET status = 'PAID' WHERE id = :id;
UPDATE plain_order SET status = 'CREATED' WHERE id = :id;
