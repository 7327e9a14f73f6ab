-- transition() over the same UPDATE by hand, in the same guarded table.
-- net: self - empty_transition + select_param + select_param
-- over: update_by_hand
-- goal: 1.35 1.15
\set id random(1, :rows)
SELECT outcome FROM idempotency.transition('guarded_order', :id::bigint, 'CREATED', 'PAID');
SELECT outcome FROM idempotency.transition('guarded_order', :id::bigint, 'PAID', 'CREATED');
