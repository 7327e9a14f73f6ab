-- issue_token(), the call overhead taken off, over one prepared SELECT of a
-- row and the HMAC of 80 bytes.
-- net: self - empty_issue + select_param
-- over: select_row + hmac - empty_hmac
-- goal: 1.00 1.00
\set k 1000000000000000000 + random(1, :rows) * 2654435761 % 8000000000 * 1000000000
SELECT idempotency.issue_token(:k, 'form');
