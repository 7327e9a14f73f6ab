\set id random(1, :rows)
SELECT status, ctid, tableoid FROM guarded_order WHERE id = :id;
