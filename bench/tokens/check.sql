-- check_token() of a token that was just issued, over one prepared SELECT of a
-- row and the HMAC.
-- net: self - issue_to_client
-- over: select_row + hmac - empty_hmac
\set k random(1000000000000000000, 9000000000000000000)
SELECT idempotency.issue_token(:k, 'form') AS token \gset
SELECT status FROM idempotency.check_token(:token, :k, 'form');
