-- consume_token() of a token that was just issued, the call overhead taken off,
-- over a plain INSERT of the same mark.
-- net: self - issue_to_client - empty_consume + select_param
-- over: insert_mark
-- goal: 1.35 1.35
\set k random(1000000000000000000, 9000000000000000000)
SELECT idempotency.issue_token(:k, 'form') AS token \gset
SELECT status FROM idempotency.consume_token(:token, :k, 'form');
