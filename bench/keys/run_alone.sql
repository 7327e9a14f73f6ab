\set k random(1000000000000000000, 9000000000000000000)
SELECT pay(jsonb_build_object('request_id', :k::text));
