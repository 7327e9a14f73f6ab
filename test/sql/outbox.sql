-- The outbox: emit, take, ack, nack, parking.
CREATE ROLE regress_outbox_app;
CREATE ROLE regress_outbox_nobody;
SELECT idempotency.grant_usage('regress_outbox_app');
-- what is out, for the tests
CREATE VIEW events_out AS
  SELECT e.id, e.attempt + 1 AS attempt, e.topic, e.key
  FROM idempotency.outbox e
  JOIN idempotency.outbox_leases l ON l.block = e.id / 64 AND l.events >> (e.id % 64)::int & 1 = 1 AND l.taken > e.place;

-- nothing for PUBLIC; the application calls functions and touches no table
SET ROLE regress_outbox_nobody;
SELECT idempotency.emit('mail', '{}');
RESET ROLE;
SET ROLE regress_outbox_app;
SELECT * FROM idempotency.outbox;
SELECT * FROM idempotency.parked_events;
SELECT idempotency.retry_parked('mail');

--
-- emit belongs to its transaction
--
BEGIN;
SELECT idempotency.emit('mail', '{"order": 1}') AS id;
ROLLBACK;
BEGIN;
SELECT idempotency.emit('mail', '{"order": 2}') AS id;
SAVEPOINT s;
SELECT idempotency.emit('mail', '{"order": 3}') AS id;
ROLLBACK TO s;
SELECT idempotency.emit('mail', NULL, 'k') AS id;
COMMIT;
SELECT id, attempt, key, payload, emitted_at <= clock_timestamp() AS emitted FROM idempotency.take('mail');
-- out: nothing more to take, in this topic or another
SELECT count(*) FROM idempotency.take('mail');
SELECT count(*) FROM idempotency.take('mai');
-- only the newest attempt counts
SELECT idempotency.ack(2, 0), idempotency.ack(2, 2), idempotency.ack(2, -1), idempotency.ack(99, 1);
SELECT idempotency.ack(2, 1);
-- gone at once
SELECT idempotency.ack(2, 1);
BEGIN;
SELECT idempotency.ack(4, 1);
ROLLBACK;
-- whole, when the same statement removes it; a payload stored out of line too
SELECT idempotency.emit('big', jsonb_build_object('a', (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 1000) i))) > 0;
SELECT count(*), sum(length(payload ->> 'a')), bool_and(idempotency.ack(id, attempt)) FROM idempotency.take('big');
SELECT idempotency.ack(4, 1);

--
-- ack for many: a number that was acked, in any order
--
SELECT count(idempotency.emit('many', to_jsonb(i), CASE WHEN i % 2 = 0 THEN i::text END)) FROM generate_series(1, 10) i;
SELECT array_agg(id ORDER BY id DESC) AS ids, array_agg(attempt ORDER BY id DESC) AS attempts FROM idempotency.take('many', 7) \gset
SELECT idempotency.ack_batch(:'ids'::bigint[], array_fill(2::bigint, ARRAY[7]));
SELECT idempotency.ack_batch(:'ids'::bigint[] || :'ids'::bigint[], :'attempts'::bigint[] || :'attempts'::bigint[]);
SELECT idempotency.ack_batch('{}'::bigint[], '{}'::bigint[]);
SELECT payload FROM idempotency.take('many');
SELECT idempotency.ack_batch(ARRAY(SELECT i FROM generate_series(1, 100) i), array_fill(1::bigint, ARRAY[100]));
SELECT count(*) FROM idempotency.take('many');

--
-- a lease that is over: the event comes again, the late attempt is refused
--
SELECT idempotency.emit('lease', '1') AS id \gset
SELECT attempt FROM idempotency.take('lease', lease => '0');
SELECT attempt FROM idempotency.take('lease', lease => '0');
SELECT idempotency.ack(:id, 1), idempotency.nack(:id, 1);
-- the newest is good after its lease, as long as nobody took over
SELECT idempotency.ack(:id, 2);

--
-- a key: in the order of the ids, one at a time; events without are independent
--
SELECT idempotency.emit('order', to_jsonb(n), k) FROM (VALUES (1, 'a'), (2, 'a'), (3, 'b'), (4, NULL), (5, NULL), (6, 'a')) v (n, k);
SELECT key, payload FROM idempotency.take('order');
SELECT key, payload FROM idempotency.take('order');
-- two topics have nothing to do with each other
SELECT idempotency.emit('other', '1', 'a') > 0;
SELECT key, payload, idempotency.ack(id, attempt) FROM idempotency.take('other');
-- ack lets the next one go, nack keeps the place
RESET ROLE;
SELECT id AS a1 FROM idempotency.outbox WHERE topic = 'order' AND payload = '1' \gset
SET ROLE regress_outbox_app;
SELECT idempotency.nack(:a1, 1, '0', 'not now');
SELECT key, payload, attempt FROM idempotency.take('order');
SELECT idempotency.nack(:a1, 2, '1 hour');
SELECT idempotency.nack(:a1, 2, '0');
SELECT count(*) FROM idempotency.take('order');
SELECT idempotency.ack(:a1, 2);
SELECT key, payload, attempt FROM idempotency.take('order');
SELECT idempotency.ack(:a1 + 1, 1);
SELECT key, payload, attempt FROM idempotency.take('order', lease => '0');
SELECT key, payload, attempt FROM idempotency.take('order', lease => '1 h');

--
-- poison: after its last attempt it is parked, and its key goes on
--
RESET ROLE;
SELECT idempotency.set_topic('poison', 2);
SET ROLE regress_outbox_app;
SET idempotency.outbox_max_attempts = 3;
SELECT idempotency.emit('poison', '1', 'k') AS p1, idempotency.emit('poison', '2', 'k') AS p2, idempotency.emit('poison', '3') AS p3 \gset
SELECT payload, attempt, idempotency.nack(id, attempt, '0', 'first') FROM idempotency.take('poison');
SELECT payload, attempt, idempotency.nack(id, attempt, '0', 'second') FROM idempotency.take('poison');
SELECT payload, attempt FROM idempotency.take('poison');
RESET ROLE;
SELECT topic, key, payload, attempt, error, parked_at >= emitted_at AS parked FROM idempotency.parked_events ORDER BY id;
SET ROLE regress_outbox_app;
-- a worker that never answers: parked when the lease of its last attempt is over
SELECT idempotency.ack(:p2, 1);
SELECT idempotency.emit('poison', '4', 'k'), idempotency.emit('poison', '5', 'k') \gset silent_
SELECT payload, attempt FROM idempotency.take('poison', lease => '0');
SELECT payload, attempt FROM idempotency.take('poison', lease => '0');
SELECT payload, attempt FROM idempotency.take('poison', lease => '0');
RESET ROLE;
SELECT payload, attempt, error FROM idempotency.parked_events ORDER BY id;
-- its answer may still come: the work was done, and nobody has it again
SELECT idempotency.ack(id, attempt) FROM idempotency.parked_events WHERE payload = '4';
SELECT idempotency.nack(id, attempt, '0') FROM idempotency.parked_events WHERE payload = '3';

-- again: with attempts before it as a new one; the number goes on
SELECT idempotency.retry_parked('poison'), idempotency.retry_parked('lease');
SELECT idempotency.retry_parked('poison');
SELECT count(*) FROM idempotency.parked_events;
SET ROLE regress_outbox_app;
SELECT idempotency.ack(:p3, 1);
SELECT payload, attempt FROM idempotency.take('poison');
RESET ROLE;
SELECT idempotency.ack_batch(array_agg(id), array_agg(attempt)) FROM events_out WHERE topic = 'poison';
SELECT payload, attempt FROM idempotency.take('poison');
SELECT count(idempotency.ack(id, attempt)) FROM events_out;
SELECT count(*) FROM idempotency.outbox;
SELECT idempotency.set_topic('poison');

-- with fewer attempts allowed than an event has had, the next take parks it
SELECT idempotency.emit('lower', '1', 'k'), idempotency.emit('lower', '2', 'k') \gset silent_
SELECT idempotency.nack(id, attempt, '0') FROM idempotency.take('lower');
SELECT idempotency.set_topic('lower', 1);
SELECT payload, attempt FROM idempotency.take('lower');
SELECT payload, attempt FROM idempotency.parked_events;
SELECT idempotency.set_topic('lower');
SELECT idempotency.ack(id, attempt) FROM events_out;
SELECT count(*), bool_and(idempotency.ack(id, attempt)) FROM idempotency.outbox;

--
-- a long queue behind one key: passed over without a write, in order, and nobody is lost
--
SET ROLE regress_outbox_app;
SELECT count(idempotency.emit('long', to_jsonb(i), 'hot')) FROM generate_series(1, 500) i;
SELECT count(idempotency.emit('long', to_jsonb(i), 'cold' || i)) FROM generate_series(501, 600) i;
SELECT count(*), min(payload::int), sum((key = 'hot')::int) AS hot FROM idempotency.take('long', 1000);
RESET ROLE;
SELECT count(*) FROM idempotency.outbox WHERE place <> id;
SELECT count(idempotency.ack(id, attempt)) FROM events_out WHERE topic = 'long' AND key <> 'hot';
SELECT id AS hot, attempt AS hot_attempt FROM events_out WHERE key = 'hot' \gset
SET ROLE regress_outbox_app;
BEGIN;
SELECT idempotency.ack(:hot, :hot_attempt);
ROLLBACK;
SELECT count(*) FROM idempotency.take('long');
SELECT idempotency.ack(:hot, :hot_attempt);
DO $$
DECLARE
  e record;
  previous int := 1;
BEGIN
  LOOP
    SELECT * INTO e FROM idempotency.take('long', 10);
    EXIT WHEN NOT FOUND;
    IF e.payload::int <> previous + 1 THEN
      RAISE 'event % after event %', e.payload, previous;
    END IF;
    previous := e.payload::int;
    PERFORM idempotency.ack(e.id, e.attempt);
  END LOOP;
  RAISE NOTICE 'the last was %', previous;
END
$$;
RESET ROLE;
SELECT count(*) FROM idempotency.outbox;

-- all of it parked, one after the other
SELECT count(idempotency.emit('bad', to_jsonb(i), 'hot')) FROM generate_series(1, 150) i;
SELECT count(*) FROM idempotency.take('bad', 1000, '0');
SELECT idempotency.set_topic('bad', 1);
DO $$
BEGIN
  FOR i IN 1 .. 150 LOOP
    PERFORM idempotency.nack(id, attempt, '0') FROM idempotency.take('bad');
  END LOOP;
END
$$;
SELECT idempotency.set_topic('bad');
SELECT count(*) FROM idempotency.parked_events;
TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys;

-- a lease that is over at once: still only once per call
SELECT count(idempotency.emit('once', to_jsonb(i))) FROM generate_series(1, 2000) i;
SELECT count(*), count(DISTINCT id) FROM idempotency.take('once', 5000, '0');
TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys;

-- as many keys as one call asks for, and no lock is kept for them
SELECT count(idempotency.emit('wide', to_jsonb(i), 'key' || i)) FROM generate_series(1, 2500) i;
BEGIN;
SELECT count(*) FROM idempotency.take('wide', 10000);
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
COMMIT;
SELECT count(*) FROM idempotency.take('wide', 10000);
SELECT idempotency.ack_batch(array_agg(id), array_agg(attempt)) FROM events_out WHERE topic = 'wide';
SELECT state, count(*) FROM idempotency.outbox GROUP BY state;
SELECT count(*) FROM idempotency.take('wide');
SELECT count(*) FROM idempotency.take('wide');
SELECT count(*) FROM idempotency.outbox;

-- nor for all the calls of one transaction together
SELECT count(idempotency.emit('calls', to_jsonb(i), 'key' || i)) FROM generate_series(1, 20000) i;
SELECT count(*) FROM idempotency.take('calls', 20000, '0');
SELECT idempotency.set_topic('calls', 1);
BEGIN;
SELECT count(*), bool_and(idempotency.nack(id, attempt)) FROM events_out WHERE id % 2 = 0;
SELECT count(*), bool_and(idempotency.ack(id, attempt)) FROM events_out WHERE id % 2 = 1;
SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
COMMIT;
SELECT idempotency.set_topic('calls');
SELECT state, count(*) FROM idempotency.outbox GROUP BY state;
SELECT count(*) FROM idempotency.take('calls', 20000);
TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys;

--
-- one statement, one transaction
--
SELECT idempotency.emit('one', '1', 'k') AS id, (SELECT count(*) FROM idempotency.take('one')) AS taken \gset
\echo :taken
SELECT count(*) FROM idempotency.take('one');
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT idempotency.emit('one', '2', 'j') > 0;
SELECT payload, idempotency.ack(id, attempt) FROM idempotency.take('one');
SELECT payload, idempotency.ack(id, attempt) FROM idempotency.take('one');
SELECT count(*) FROM idempotency.take('one');
COMMIT;

-- after a rollback, the oldest first again, also past what was met before
SELECT count(idempotency.emit('again', to_jsonb(i))) FROM generate_series(1, 3) i;
SELECT payload, idempotency.nack(id, attempt, '0') FROM idempotency.take('again', 1);
BEGIN;
SELECT payload FROM idempotency.take('again', 1);
SELECT payload FROM idempotency.take('again', 1);
ROLLBACK;
SELECT payload FROM idempotency.take('again', 1);
TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys;

--
-- misuse is refused before anything is written
--
SET ROLE regress_outbox_app;
\set VERBOSITY sqlstate
SELECT idempotency.emit(NULL, '1');
SELECT idempotency.emit('', '1');
SELECT idempotency.emit(repeat('x', 257), '1');
SELECT idempotency.emit('t', '1', '');
SELECT idempotency.emit('t', '1', repeat('x', 513));
SELECT idempotency.take(NULL);
SELECT idempotency.take('');
SELECT idempotency.take(repeat('x', 257));
SELECT idempotency.take('t', NULL);
SELECT idempotency.take('t', 0);
SELECT idempotency.take('t', -1);
SELECT idempotency.take('t', 1, NULL);
SELECT idempotency.take('t', 1, '-1 s');
SELECT idempotency.take('t', 1, '300000 years');
SELECT idempotency.ack(NULL, 1);
SELECT idempotency.ack(1, NULL);
SELECT idempotency.ack_batch(NULL, ARRAY[1]);
SELECT idempotency.ack_batch(ARRAY[1]::bigint[], NULL);
SELECT idempotency.ack_batch(ARRAY[1, 2]::bigint[], ARRAY[1]);
SELECT idempotency.ack_batch(ARRAY[1, NULL]::bigint[], ARRAY[1, 1]);
SELECT idempotency.ack_batch(ARRAY[1, 2]::bigint[], ARRAY[1, NULL]);
SELECT idempotency.ack_batch(ARRAY[[1, 2]]::bigint[], ARRAY[1, 1]);
SELECT idempotency.nack(NULL, 1);
SELECT idempotency.nack(1, NULL);
SELECT idempotency.nack(1, 1, '-1 s');
SELECT idempotency.nack(1, 1, '300000 years');
RESET ROLE;
SELECT idempotency.retry_parked(NULL);
SELECT idempotency.retry_parked('');
BEGIN READ ONLY;
SELECT idempotency.emit('t', '1');
ROLLBACK;
BEGIN READ ONLY;
SELECT idempotency.take('t');
ROLLBACK;
BEGIN READ ONLY;
SELECT idempotency.ack(1, 1);
ROLLBACK;
ALTER SYSTEM SET idempotency.outbox_max_attempts = 0;
\set VERBOSITY default
SELECT count(*) FROM idempotency.outbox;
-- up to the limits, and byte for byte
SELECT idempotency.emit(repeat('x', 256), '1', repeat('y', 512)) > 0;
SELECT length(key), idempotency.ack(id, attempt) FROM idempotency.take(repeat('x', 256));

-- what was added to the table would be passed by: refused
BEGIN;
ALTER TABLE idempotency.outbox ADD CHECK (id > 0);
SELECT idempotency.emit('t', '1');
ROLLBACK;
BEGIN;
DROP INDEX idempotency.outbox_due_idx;
\set VERBOSITY sqlstate
SELECT idempotency.take('t');
\set VERBOSITY default
ROLLBACK;

DROP VIEW events_out;
SELECT idempotency.revoke_usage('regress_outbox_app');
DROP ROLE regress_outbox_app;
DROP ROLE regress_outbox_nobody;

-- many leases that are over and whose events are all parked hide no other
SELECT count(*) AS topics FROM idempotency.set_topic('apart', 1) s;
SELECT cardinality(idempotency.emit_batch('apart', array_fill('1'::jsonb, ARRAY[2200]))) AS emitted;
SELECT count(*) AS parked FROM idempotency.take('apart', 5000, '1 h');
SELECT cardinality(idempotency.emit_batch('apart', '{2}')) AS emitted;
SELECT count(*) AS comes FROM idempotency.take('apart', 5000, '1 h');
UPDATE idempotency.outbox SET tries = -5 WHERE topic = 'apart' AND payload = '2';
UPDATE idempotency.outbox_leases SET deadline = now() - CASE WHEN taken = (SELECT max(taken) FROM idempotency.outbox_leases WHERE topic = 'apart') THEN interval '1 h' ELSE interval '2 h' END
WHERE topic = 'apart';
\c -
SELECT payload FROM idempotency.take('apart', 5000, '1 h');
SELECT count(*) AS parked FROM idempotency.outbox WHERE topic = 'apart' AND state = 'p';
DELETE FROM idempotency.outbox WHERE topic = 'apart';
DELETE FROM idempotency.outbox_leases WHERE topic = 'apart';
DELETE FROM idempotency.outbox_topics WHERE topic = 'apart';

-- one key cannot let the events of another overtake each other, though anybody
-- can find two that PostgreSQL's own hash takes for one, as these on most machines
SELECT idempotency.emit('collide', '"waits"', 'customer-0000000000000-1') > 0 AS emitted;
SELECT payload, idempotency.nack(id, attempt, '1 day') FROM idempotency.take('collide');
SELECT idempotency.emit('collide', '"another key"', 'q6ye77o6mmh6.GD=.X?px}>|') > 0 AS emitted;
SELECT payload FROM idempotency.take('collide');
SELECT idempotency.emit('collide', '"behind the first"', 'customer-0000000000000-1') > 0 AS emitted;
SELECT payload FROM idempotency.take('collide');
DELETE FROM idempotency.outbox WHERE topic = 'collide';
DELETE FROM idempotency.outbox_leases WHERE topic = 'collide';
DELETE FROM idempotency.outbox_keys WHERE topic = 'collide';
