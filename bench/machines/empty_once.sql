\set id random(1, :rows)
SELECT outcome FROM empty_transition('guarded_order', :id::bigint, 'PAID', 'CREATED');
