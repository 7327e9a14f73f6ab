-- transition() with history, over the same UPDATE and a plain INSERT of the
-- history's row each time.
-- net: self - empty_transition + select_param + select_param
-- over: update_by_hand + log_by_hand + log_by_hand
\set id random(1, :rows)
SELECT outcome FROM idempotency.transition('logged_order', :id::bigint, 'CREATED', 'PAID');
SELECT outcome FROM idempotency.transition('logged_order', :id::bigint, 'PAID', 'CREATED');
