-- What hardly ever happens: tables that were altered behind our back, triggers
-- made by hand, and odd types.
\set VERBOSITY terse
CREATE SCHEMA rare;
SET search_path = rare;
SELECT idempotency.define_machine('rare', '{"initial": "A", "transitions": {"A": {"go": "B"}, "B": ["C"]}}');

-- the primary key is dropped after everything was attached
CREATE TABLE t (id int CONSTRAINT t_key PRIMARY KEY, state text NOT NULL DEFAULT 'A', version bigint NOT NULL DEFAULT 1);
SELECT idempotency.attach_machine('t', 'state', 'rare', history => true), idempotency.attach_version('t', 'version');
INSERT INTO t VALUES (1);
ALTER TABLE t DROP CONSTRAINT t_key;
SELECT idempotency.transition('t', 1, 'A', 'B');
SELECT idempotency.update_if('t', 1, 1, NULL);
SELECT * FROM idempotency.off_graph('t');
UPDATE t SET state = 'B';
UPDATE t SET version = version + 1;
ALTER TABLE t ADD PRIMARY KEY (id);
SELECT outcome FROM idempotency.transition('t', 1, 'A', 'B');

-- no edge leads to the target
SELECT idempotency.transition('t', 1, NULL, 'A');

-- a key that is neither a number nor text
CREATE TABLE flag (id boolean PRIMARY KEY, state text NOT NULL DEFAULT 'A');
SELECT idempotency.attach_machine('flag', 'state', 'rare');
INSERT INTO flag VALUES (true), (false);
SELECT idempotency.transition('flag', 'true'::jsonb, 'A', 'B'), idempotency.transition('flag', true, 'A', 'B'), idempotency.transition('flag', '{"id": false}'::jsonb, 'A', 'B');

-- triggers made by hand
CREATE TRIGGER by_hand BEFORE INSERT ON flag FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state();
INSERT INTO flag VALUES (NULL);
DROP TRIGGER by_hand ON flag;
CREATE TRIGGER by_hand BEFORE UPDATE ON flag FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version();
UPDATE flag SET id = id;
DROP TRIGGER by_hand ON flag;

-- a partition that is a foreign table
CREATE FOREIGN DATA WRAPPER regress_rare;
CREATE SERVER regress_rare FOREIGN DATA WRAPPER regress_rare;
CREATE TABLE parts (id int, state text) PARTITION BY LIST (id);
CREATE FOREIGN TABLE far PARTITION OF parts DEFAULT SERVER regress_rare;
SELECT idempotency.attach_machine('parts', 'state', 'rare');
-- one that becomes it after the attach, and gets the triggers
CREATE TABLE counted (id int, v bigint NOT NULL DEFAULT 1) PARTITION BY LIST (id);
SELECT idempotency.attach_version('counted', 'v');
CREATE FOREIGN TABLE far_counted PARTITION OF counted DEFAULT SERVER regress_rare;
SELECT idempotency.update_if('far_counted', 1, 1, NULL);

-- a lock that has lapsed; a key that this transaction itself has answered; one
-- that has expired
SELECT idempotency.acquire_lock('rare', '0') AS fence \gset
SELECT idempotency.renew_lock('rare', :fence, '1 s') IS NULL AS too_late;
BEGIN;
SELECT idempotency.once('rare', 'k');
SELECT mode, scope, key, pid = pg_backend_pid() AS me FROM idempotency.holder('rare', 'k');
COMMIT;
UPDATE idempotency.keys SET expires_at = created_at WHERE scope = 'rare';
SELECT rows, expired FROM idempotency.key_counts('scope') WHERE scope = 'rare';

-- a table that is too large to be counted is sampled
INSERT INTO idempotency.keys (created_at, expires_at, status, key, scope, response)
SELECT now(), now() + interval '1 day', 'c', i, 'sampled', repeat('x', 1800) FROM generate_series(1, 5000) i;
SELECT rows BETWEEN 4000 AND 6000 AS about, expired, estimate = (pg_relation_size('idempotency.keys') > 300 * current_setting('block_size')::bigint) AS told FROM idempotency.key_counts('scope') WHERE scope = 'sampled';

-- the outbox's sequence is set back
SELECT idempotency.emit('rare', NULL) AS id \gset
SELECT setval('idempotency.outbox_id_seq', :id, false) IS NOT NULL AS set_back;
SELECT idempotency.emit('rare', NULL);
SELECT idempotency.emit('rare', NULL) > :id AS goes_on;

-- or never was where the events are, which came by replication: nothing is
-- handed out that nobody could acknowledge, none is given back, no lease extended
SELECT id AS out, attempt FROM idempotency.take('rare', 1) \gset
INSERT INTO idempotency.outbox SELECT id + 100000, id + 100000, due, emitted_at, NULL, 0, 0, 'r', 'ahead', NULL, NULL, NULL
FROM idempotency.outbox WHERE id = :out;
UPDATE idempotency.outbox SET place = place + 100000 WHERE id = :out;
INSERT INTO idempotency.outbox_leases SELECT block, taken + 100000, deadline, events, topic FROM idempotency.outbox_leases;
SELECT attempt FROM idempotency.take('ahead');
SELECT idempotency.nack(:out, 1);
SELECT idempotency.extend_event(:out, 1, '1 h');
SELECT setval('idempotency.outbox_id_seq', max(taken)) > 0 AS set FROM idempotency.outbox_leases;
SELECT attempt FROM idempotency.take('ahead');
SELECT attempt FROM idempotency.take('ahead');
SELECT idempotency.ack_batch(array_agg(id), array_agg(1)) FROM idempotency.outbox WHERE topic = 'ahead' OR id = :out;

-- indexes of ours are dropped
BEGIN;
DROP INDEX idempotency.keys_leased;
SELECT * FROM idempotency.in_flight;
ROLLBACK;
BEGIN;
DROP INDEX idempotency.outbox_due_idx;
SELECT idempotency.emit('rare', NULL);
ROLLBACK;

-- one server: nothing to distribute, and nobody sends calls
SELECT idempotency.distribute();
SELECT idempotency.at_home('rare', 'idempotency.lookup(text,text)', ARRAY['rare', 'unknown'], -1, 0, false);
SELECT idempotency.at_home('rare', 'idempotency.once(text,text,interval)', ARRAY['rare', 'at home', '1 day'], -1, 0, false);
SELECT idempotency.at_home('rare', 'idempotency.once(text,text,interval)', ARRAY['rare', 'at home 2', NULL], -1, 0, true);
SELECT idempotency.at_home('rare', 'idempotency.spread_lock_scope(text)', ARRAY[NULL]::text[], -1, 0, false);
SELECT idempotency.at_home('rare', 'pg_catalog.pg_backend_pid()', '{}', -1, 0, false);
SELECT idempotency.at_home('rare', '-', '{}', -1, 0, false);
SELECT idempotency.at_home('rare', NULL, '{}', -1, 0, false);
SELECT idempotency.at_home('00000000-0000-0000-0000-000000000000'::uuid, 'idempotency.check_token(text,text,text)', '{no token, s, p}', -1, 0, false);

SET client_min_messages = warning;
DELETE FROM idempotency.keys;
TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys;
ALTER SEQUENCE idempotency.outbox_id_seq RESTART;
DELETE FROM idempotency.transition_log;
DROP SCHEMA rare CASCADE;
SELECT idempotency.drop_machine('rare');
DROP SERVER regress_rare;
DROP FOREIGN DATA WRAPPER regress_rare;
