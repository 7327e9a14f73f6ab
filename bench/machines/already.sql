-- A retry that finds the row in the target state, over the UPDATE that finds
-- nothing and a SELECT of the state.
-- net: self - empty_once + select_param
-- over: update_none + select_state - select_param
\set id random(1, :rows)
SELECT outcome FROM idempotency.transition('guarded_order', :id::bigint, 'PAID', 'CREATED');
