-- Twice :rows events of each kind, for takers of 100 at a time, and as many in
-- the lease queue by hand of bench/outbox.
SELECT count(idempotency.emit('unkeyed', payload)), count(idempotency.emit('keyed', payload, 'order-' || i))
FROM generate_series(1, 2 * :rows) i, LATERAL (SELECT jsonb_build_object('order_id', i, 'mail', 'customer' || i || '@example.com', 'amount', 100) AS payload) p;
CREATE TABLE hand_events (
  id bigserial PRIMARY KEY, topic text NOT NULL, payload jsonb,
  emitted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  lease_until timestamptz NOT NULL DEFAULT clock_timestamp(), attempt int NOT NULL DEFAULT 0);
CREATE INDEX ON hand_events (topic, lease_until);
INSERT INTO hand_events (topic, payload)
SELECT 'bench', jsonb_build_object('order_id', i, 'mail', 'customer' || i || '@example.com', 'amount', 100) FROM generate_series(1, 2 * :rows) i;
