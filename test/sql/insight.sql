-- The views on large tables: what they count is right, and they read little of
-- the tables, with any rows in them; by the blocks and calls that EXPLAIN counts.
CREATE FUNCTION explained(query text) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
  plan jsonb;
BEGIN
  EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) ' || query INTO plan;
  RETURN plan;
END
$$;
CREATE FUNCTION blocks(query text) RETURNS bigint LANGUAGE sql AS $$
  SELECT (p #>> '{0,Plan,Shared Hit Blocks}')::bigint + (p #>> '{0,Plan,Shared Read Blocks}')::bigint
  FROM (SELECT explained(query)) AS e(p)
$$;
-- beside what the catalogs take: a sample of 300 blocks, and what leases take
SELECT blocks('SELECT * FROM idempotency.stats') AS overhead \gset

INSERT INTO idempotency.keys (created_at, expires_at, status, key, scope, response)
SELECT now(), now() + CASE WHEN i % 4 = 0 THEN '-1 s'::interval ELSE '1 day' END, CASE WHEN i % 2 = 0 THEN 'c' ELSE 'f' END, i::text, 'insight', repeat('x', 1900)
FROM generate_series(1, 16000) i;
SELECT count(idempotency.lease('insight', 'lease' || i, '1 h')) FROM generate_series(1, 50) i;
SELECT count(idempotency.lease('insight', 'lapsed' || i, '0')) FROM generate_series(1, 5) i;
TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys;
INSERT INTO idempotency.outbox (id, place, due, emitted_at, parked_at, attempt, tries, state, topic, key, payload)
SELECT i, i, CASE WHEN i % 1000 = 0 THEN 'infinity'::timestamptz ELSE '-infinity' END, now() - '1 h'::interval + i * '1 ms'::interval, CASE WHEN i % 1000 = 0 THEN now() END, 1, 1,
       CASE WHEN i % 1000 = 0 THEN 'p' ELSE 'r' END, 'insight' || i % 3, CASE WHEN i % 2 = 0 THEN i::text END, to_jsonb(repeat('x', 1900))
FROM generate_series(1, 8000) i;
SELECT pg_relation_size('idempotency.keys') / 8192 >= 4000 AS large, pg_relation_size('idempotency.outbox') / 8192 >= 2000 AS large_too;

SELECT name, scope, status, CASE WHEN estimate AND value BETWEEN 0.9 * exact AND 1.1 * exact THEN exact ELSE value END AS value, estimate
FROM idempotency.stats
LEFT JOIN (VALUES ('keys', 8000), ('expired_keys', 4000), ('outbox_depth', 7992)) AS e(name, exact) USING (name)
WHERE name NOT LIKE 'bytes%' AND name <> 'outbox_oldest_seconds'
ORDER BY name, scope, status;
SELECT value BETWEEN 3590 AND 3700 AS an_hour, estimate FROM idempotency.stats WHERE name = 'outbox_oldest_seconds';

SELECT blocks('SELECT * FROM idempotency.stats') - :overhead < 1000 AS few;
SELECT blocks('SELECT * FROM idempotency.in_flight') < 1000 AS few;
SELECT blocks($$SELECT * FROM idempotency.holder('insight', '1')$$) < 1000 AS few;
SELECT blocks('SELECT * FROM idempotency.parked_events') < 1000 AS few;

-- the table of locks is read so often, however many leases there are
SELECT max(loops::int) FROM jsonb_path_query(explained('SELECT * FROM idempotency.in_flight'), '$.** ? (@."Function Name" == "pg_lock_status")."Actual Loops"') loops;

-- what could not be told from a bounded look is an estimate, and says so
UPDATE idempotency.outbox SET state = 'p', due = 'infinity' WHERE id <= 4000 OR id > 7000;
INSERT INTO idempotency.outbox (id, place, due, emitted_at, attempt, tries, state, topic)
SELECT -i, -i, 'infinity', now(), 1, 1, 'p', 'insight' FROM generate_series(1, 20000) i;
SELECT sum(ready) BETWEEN 2600 AND 3400 AS about, now() - min(oldest) BETWEEN '0' AND '1 day' AS within, sum(parked) BETWEEN 22000 AND 28000 AS about, bool_and(estimate) AS estimate
FROM idempotency.topics;
SELECT blocks('SELECT * FROM idempotency.topics') < 25000 AS bounded;

-- leases that are done with are passed by once, not again by every look
-- (once no other session's snapshot, say an ANALYZE, holds that up)
UPDATE idempotency.keys SET status = 'l', deadline = now() WHERE status <> 'l' AND key LIKE '%1';
-- (of so many, holder() looks at one)
SELECT blocks($$SELECT * FROM idempotency.holder('insight', '1')$$) < 100 AS few, blocks('SELECT * FROM idempotency.leased_keys()') > 300 * 8192 / current_setting('block_size')::integer AS many;
DELETE FROM idempotency.keys WHERE status = 'l' AND key ~ '^[0-9]';
SELECT count(*) FROM idempotency.leased_keys();
DO $$
BEGIN
  FOR i IN 1 .. 300 LOOP
    EXIT WHEN blocks('SELECT * FROM idempotency.leased_keys()') < 300;
    PERFORM pg_sleep(0.1);
    COMMIT;
  END LOOP;
END
$$;
SELECT blocks('SELECT * FROM idempotency.leased_keys()') < 300 AS few;

-- who watches the server does not see what holders noted for the next attempt
CREATE ROLE regress_insight_watch IN ROLE pg_monitor;
SELECT idempotency.checkpoint('insight', 'noted', fence, 'step', '{"account": 7}') IS NOT NULL AS noted
FROM idempotency.lease('insight', 'noted', '1 h', '{"amount": 1}');
SET ROLE regress_insight_watch;
SELECT scope, key, status, attempt, fence > 0 AS fence, deadline > now() AS live, checkpoint, checkpoint_data, fingerprint
FROM idempotency.leased_keys() WHERE key = 'noted';
RESET ROLE;
DROP ROLE regress_insight_watch;

DELETE FROM idempotency.keys WHERE scope = 'insight';
TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys;
DROP FUNCTION blocks, explained;
