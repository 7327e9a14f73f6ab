-- 100 events with a key each, taken and acknowledged, over a lease queue by hand
-- over: hand_events
-- goal: 1.00
SELECT coalesce(array_agg(id), '{}') AS ids, coalesce(array_agg(attempt), '{}') AS attempts, count(payload) AS n
FROM idempotency.take('keyed', 100) \gset
SELECT idempotency.ack_batch(:ids, :attempts);
