-- Orders with :rows rows, twice: one table as it is, one with a machine
-- attached.  The rows go back and forth, so that a script can run for ever.
SELECT idempotency.define_machine('bench',
  '{"initial": "CREATED", "transitions": {"CREATED": {"pay": "PAID"}, "PAID": {"undo": "CREATED"}}}', cyclic => true);
-- Cost must not depend on how many machines and edges there are.
SELECT idempotency.define_machine('bench large', jsonb_build_object('initial', 's1', 'transitions',
  (SELECT jsonb_object_agg('s' || i, (SELECT jsonb_object_agg('e' || j, 's' || (i + j) % 200 + 1) FROM generate_series(0, 19) j))
   FROM generate_series(1, 200) i)), cyclic => true);
SELECT idempotency.define_machine('bench ' || i, '{"initial": "A", "transitions": {"A": ["B"]}}') FROM generate_series(1, 500) i;

CREATE TABLE plain_order (id bigint PRIMARY KEY, status text NOT NULL, amount numeric NOT NULL) WITH (fillfactor = 50);
INSERT INTO plain_order SELECT i, 'CREATED', 10 FROM generate_series(1, :rows) i;
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
