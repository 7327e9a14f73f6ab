\set id random(1, :rows)
UPDATE guarded_order SET status = 'CREATED' WHERE id = :id AND status = 'PAID' RETURNING status;
