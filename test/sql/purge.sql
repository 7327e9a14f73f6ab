-- purge: what has expired goes, all of it and nothing else.
\set VERBOSITY sqlstate
\pset null '(null)'
CREATE ROLE regress_purge;
SELECT idempotency.grant_admin('regress_purge');
DELETE FROM idempotency.keys;
SET ROLE regress_purge;
SET default_transaction_isolation = serializable;

-- answers, failures, a forgotten lease, a released one: by their expiry
SELECT count(idempotency.once('short', i::text, '1 us')) FROM generate_series(1, 1000) i;
SELECT count(idempotency.once('long', i::text)) FROM generate_series(1, 10) i;
BEGIN;
SELECT status FROM idempotency.claim('short', 'failed', ttl => '1 us');
SELECT idempotency.fail('short', 'failed', 'reason') IS NOT NULL AS fail;
COMMIT;
SELECT status FROM idempotency.lease('short', 'forgotten', '0', ttl => '1 us');
SELECT status FROM idempotency.lease('long', 'lapsed', '0');
SELECT status FROM idempotency.lease('long', 'live', '1 h', ttl => '1 us');
SELECT fence FROM idempotency.lease('long', 'released', '1 h') \gset
SELECT idempotency.release('long', 'released', :fence);

SELECT idempotency.purge(300) AS bounded;
SELECT idempotency.purge(1) AS one;
SELECT idempotency.purge() AS rest;
SELECT idempotency.purge() AS nothing;
RESET ROLE;
SELECT scope, status, count(*) FROM idempotency.keys GROUP BY scope, status ORDER BY scope, status;
SET ROLE regress_purge;

-- what this transaction is about to overwrite stays
SELECT idempotency.once('again', 'k', '1 us');
BEGIN;
SELECT status FROM idempotency.claim('again', 'k');
SELECT idempotency.purge();
SELECT idempotency.complete('again', 'k', 'anew') IS NOT NULL AS complete;
SELECT idempotency.purge();
COMMIT;
SELECT response FROM idempotency.lookup('again', 'k');

-- rolled back, nothing has gone
SELECT idempotency.once('undone', 'k', '1 us');
BEGIN;
SELECT idempotency.purge();
SELECT status FROM idempotency.claim('undone', 'k');
ROLLBACK;
SELECT idempotency.purge();
-- purged and used again in one transaction
SELECT idempotency.once('reused', 'k', '1 us');
BEGIN;
SELECT idempotency.purge();
SELECT idempotency.once('reused', 'k');
COMMIT;
SELECT idempotency.once('reused', 'k');

-- all kinds together
SELECT idempotency.once('short', 'k', '1 us');
RESET ROLE;
INSERT INTO idempotency.used_tokens SELECT now() - '2 d'::interval, now() - '2 d'::interval, gen_random_uuid(), false FROM generate_series(1, 3);
INSERT INTO idempotency.used_tokens SELECT now() - '23 h'::interval, now() - '23 h'::interval, gen_random_uuid(), false FROM generate_series(1, 2);
INSERT INTO idempotency.token_generations VALUES (1, now() - '9 d'::interval, 'old', 'p'), (2, now(), 'new', 'p');
SET ROLE regress_purge;
SELECT idempotency.purge(2), idempotency.purge(2), idempotency.purge(2);
RESET ROLE;
SELECT count(*) FROM idempotency.used_tokens;
SELECT subject FROM idempotency.token_generations;
SET ROLE regress_purge;

-- what is left of leases long over, and of keys that were out
RESET ROLE;
TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys;
SELECT idempotency.emit('purge', '1', 'k') AS kept \gset
SELECT count(*) FROM idempotency.take('purge');
INSERT INTO idempotency.outbox_leases (block, taken, deadline, events, topic)
SELECT 1000000 + i, 1, now() - '2 hours'::interval, -1, 'purge' FROM generate_series(1, 2000) i;
INSERT INTO idempotency.outbox_keys (taken, id, topic, key)
SELECT 1, 64000000 + i, 'purge', i::text FROM generate_series(1, 2000) i UNION ALL SELECT 1, :kept, 'purge', 'k';
SET ROLE regress_purge;
SELECT idempotency.purge(100), idempotency.purge(10000), idempotency.purge(10000);
RESET ROLE;
SELECT (SELECT count(*) FROM idempotency.outbox_leases) AS leases, (SELECT count(*) FROM idempotency.outbox_keys) AS keys, idempotency.ack(:kept, 1);
TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys;
SET ROLE regress_purge;

-- no lock and no predicate lock is left behind, and views take none either
BEGIN;
SELECT idempotency.purge();
SELECT count(*) > 0 AS counted FROM idempotency.stats;
SELECT count(*) FROM idempotency.in_flight;
SELECT count(*) FROM idempotency.parked_events;
SELECT status FROM idempotency.lookup('again', 'k');
SELECT mode, count(*) FROM pg_locks WHERE mode LIKE 'SIRead%' OR locktype = 'advisory' GROUP BY mode;
COMMIT;

-- bad input
SELECT idempotency.purge(NULL);
SELECT idempotency.purge(0);
SELECT idempotency.purge(-1);
BEGIN READ ONLY;
SELECT idempotency.purge();
ROLLBACK;

-- what a publication could not tell its subscribers is refused, as SQL's DELETE is
RESET ROLE;
SELECT idempotency.once('published', 'k', '1 us');
SET client_min_messages = error;
CREATE PUBLICATION regress_purge FOR TABLE idempotency.keys;
RESET client_min_messages;
ALTER TABLE idempotency.keys REPLICA IDENTITY NOTHING;
DELETE FROM idempotency.keys WHERE scope = 'published';
SELECT idempotency.purge();
ALTER TABLE idempotency.keys REPLICA IDENTITY DEFAULT;
SELECT idempotency.purge();
DROP PUBLICATION regress_purge;
SET ROLE regress_purge;

-- history: the oldest rows that are older than asked for, as many as asked for
RESET ROLE;
INSERT INTO idempotency.transition_log (table_name, row_id, machine, from_state, to_state, changed_at, changed_by)
SELECT 'purge', to_jsonb(i), 'm', 'A', 'B', now() - make_interval(days => 101 - i), 'purge' FROM generate_series(1, 100) i;
SET ROLE regress_purge;
SELECT idempotency.purge_history('90 days', 3), idempotency.purge_history('90 days', 3), idempotency.purge_history('90 days', 20);
SELECT idempotency.purge_history('90 days');
SELECT min(row_id::integer), count(*) FROM idempotency.transition_log WHERE table_name = 'purge';
-- a day has 24 hours, a month that of the calendar from now on; no year is too long
SELECT idempotency.purge_history('2160 h'), idempotency.purge_history('290000 years');
DELETE FROM idempotency.transition_log;
SELECT idempotency.purge_history(NULL);
SELECT idempotency.purge_history('-1 s');
SELECT idempotency.purge_history('300000 years');
SELECT idempotency.purge_history('1 s', NULL);
SELECT idempotency.purge_history('1 s', 0);
BEGIN READ ONLY;
SELECT idempotency.purge_history('1 s');
ROLLBACK;
-- what the table's owner has put on it runs as the owner, and leaves nothing behind
RESET ROLE;
CREATE ROLE regress_log;
CREATE TABLE acted (by text, path text);
CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.acted VALUES (current_user, current_setting('search_path')); SET search_path = pg_catalog; RETURN OLD; END $$;
BEGIN;
ALTER TABLE idempotency.transition_log OWNER TO regress_log;
GRANT USAGE ON SCHEMA idempotency TO regress_log;
GRANT INSERT ON acted TO regress_log;
CREATE TRIGGER act BEFORE DELETE ON idempotency.transition_log FOR EACH ROW EXECUTE FUNCTION act();
SET search_path = public;
SELECT idempotency.purge_history('99 days');
SELECT idempotency.purge_history('80 days', 1);
SHOW search_path;
SELECT * FROM acted;
ROLLBACK;
DROP TABLE acted;
DROP FUNCTION act;
DROP ROLE regress_log;
SELECT idempotency.purge_history('0', 100);
SELECT count(*) FROM idempotency.transition_log WHERE table_name = 'purge';
SET ROLE regress_purge;

-- stats: exact on a small table
SELECT name, scope, status, value, estimate FROM idempotency.stats
WHERE name NOT LIKE 'bytes%' ORDER BY name, scope, status;

RESET ROLE;
SET ROLE pg_monitor;
SELECT idempotency.purge();
RESET ROLE;
DELETE FROM idempotency.keys;
DELETE FROM idempotency.used_tokens;
DELETE FROM idempotency.token_generations;
SELECT idempotency.revoke_usage('regress_purge');
DROP ROLE regress_purge;
