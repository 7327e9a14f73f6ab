-- transition() in a machine with 200 states and 4000 edges, over the same UPDATE.
-- net: self - empty_transition + select_param + select_param
-- over: update_by_hand
-- goal: 1.35 1.15
\set id random(1, :rows)
SELECT outcome FROM idempotency.transition('large_order', :id::bigint, 's1', 's2');
SELECT outcome FROM idempotency.transition('large_order', :id::bigint, 's2', 's1');
