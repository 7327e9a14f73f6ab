-- Orders with :rows rows, in a table as it is and in guarded ones.  The rows go
-- back and forth, so that a script can run for ever; bench/run runs it with
-- -r 2000 -n 1000,4000: then each page is pruned at a steady rate.
SELECT idempotency.define_machine('bench',
  '{"initial": "CREATED", "transitions": {"CREATED": {"pay": "PAID"}, "PAID": {"undo": "CREATED"}}}', cyclic => true);
-- many machines and edges, which must not matter
SELECT idempotency.define_machine('bench large', jsonb_build_object('initial', 's1', 'transitions',
  (SELECT jsonb_object_agg('s' || i, (SELECT jsonb_object_agg('e' || j, 's' || (i + j + 189) % 200 + 1) FROM generate_series(0, 19) AS j))
   FROM generate_series(1, 200) AS i)), cyclic => true);
SELECT idempotency.define_machine('bench ' || i, '{"initial": "A", "transitions": {"A": ["B"]}}') FROM generate_series(1, 500) AS i;

CREATE TABLE plain_order (id bigint PRIMARY KEY, status text NOT NULL, amount numeric NOT NULL) WITH (fillfactor = 50);
INSERT INTO plain_order SELECT i, 'CREATED', 10 FROM generate_series(1, :rows) AS i;
CREATE TABLE guarded_order (LIKE plain_order INCLUDING ALL) WITH (fillfactor = 50);
INSERT INTO guarded_order TABLE plain_order;
SELECT idempotency.attach_machine('guarded_order', 'status', 'bench');
CREATE TABLE logged_order (LIKE plain_order INCLUDING ALL) WITH (fillfactor = 50);
INSERT INTO logged_order TABLE plain_order;
SELECT idempotency.attach_machine('logged_order', 'status', 'bench', history => true);
CREATE TABLE large_order (LIKE plain_order INCLUDING ALL) WITH (fillfactor = 50);
INSERT INTO large_order SELECT id, 's1', amount FROM plain_order;
SELECT idempotency.attach_machine('large_order', 'status', 'bench large');
CREATE TABLE versioned_order (LIKE plain_order INCLUDING ALL) WITH (fillfactor = 50);
ALTER TABLE versioned_order ADD version bigint NOT NULL DEFAULT 1;
INSERT INTO versioned_order TABLE plain_order;
SELECT idempotency.attach_version('versioned_order', 'version');
ANALYZE;

CREATE FUNCTION empty_transition(rel regclass, id anyelement, from_state text, to_state text, changes jsonb DEFAULT NULL, state_column name DEFAULT NULL)
RETURNS idempotency.transition_result LANGUAGE c AS :'empty', 'empty';

-- for the floors
CREATE TABLE counted_order (LIKE versioned_order INCLUDING ALL) WITH (fillfactor = 50);
INSERT INTO counted_order TABLE versioned_order;
CREATE TABLE log_by_hand (LIKE idempotency.transition_log INCLUDING ALL);
CREATE SEQUENCE log_by_hand_id;
ALTER TABLE log_by_hand ALTER id SET DEFAULT nextval('log_by_hand_id');
