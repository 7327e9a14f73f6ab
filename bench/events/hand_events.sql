-- 100 events of a lease queue by hand, leased and deleted.
WITH t AS (
  UPDATE hand_events SET lease_until = statement_timestamp() + '30 s', attempt = attempt + 1
  WHERE id = ANY (ARRAY(SELECT id FROM hand_events WHERE topic = 'bench' AND lease_until < statement_timestamp()
    ORDER BY lease_until LIMIT 100 FOR UPDATE SKIP LOCKED))
  RETURNING id, attempt, payload, emitted_at)
SELECT coalesce(array_agg(id), '{}') AS ids, coalesce(array_agg(attempt), '{}') AS attempts, count(payload) AS n FROM t \gset
DELETE FROM hand_events q USING unnest(:ids::bigint[], :attempts::integer[]) AS u (id, attempt)
WHERE q.id = u.id AND q.attempt = u.attempt;
