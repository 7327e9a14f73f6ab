\ir ../answers.sql

-- The same for leases by hand.
CREATE TABLE hand_lease (LIKE idempotency.keys, PRIMARY KEY (key, scope));
INSERT INTO hand_lease TABLE idempotency.keys;

CREATE FUNCTION empty_lease(scope text, key text, lease interval) RETURNS idempotency.lease_result LANGUAGE c AS :'empty', 'empty';
CREATE FUNCTION empty_complete(scope text, key text, response text, fence bigint) RETURNS timestamptz LANGUAGE c AS :'empty', 'empty';
