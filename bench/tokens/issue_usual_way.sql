-- issue_token(), over the usual way: INSERT of the token.
-- over: usual_issue
\set k random(1000000000000000000, 9000000000000000000)
SELECT idempotency.issue_token(:k, 'form');
