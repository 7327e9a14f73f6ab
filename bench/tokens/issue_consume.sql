-- consume_token(), over the usual way: DELETE .. RETURNING.
-- net: self - issue_to_client
-- over: usual_both - usual_issue
\set k random(1000000000000000000, 9000000000000000000)
SELECT idempotency.issue_token(:k, 'form') AS token \gset
SELECT status FROM idempotency.consume_token(:token, :k, 'form');
