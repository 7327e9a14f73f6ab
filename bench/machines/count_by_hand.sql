\set id random(1, :rows)
UPDATE counted_order SET amount = amount + 1, version = version + 1 WHERE id = :id;
