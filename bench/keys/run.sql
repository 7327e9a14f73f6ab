-- run() of a plpgsql function, over that function's call alone and a plain
-- INSERT of the key's row.
-- over: run_alone + insert_request
-- goal: 1.15 1.00
\set k random(1000000000000000000, 9000000000000000000)
SELECT status, response FROM idempotency.run('bench', :k, 'pay', jsonb_build_object('request_id', :k::text));
