-- The function of run() with a plain INSERT of the key's row in it: the limit of
-- what stores an answer.
-- over: run_alone
\set k random(1000000000000000000, 9000000000000000000)
SELECT pay_and_insert((:k)::text, jsonb_build_object('request_id', :k::text));
