-- One mail per paid order.
--
-- The payment and the event commit together; a worker delivers the event after
-- the commit, and again if it dies half-way; the mailer does each event once.
-- Run as a role that has grant_admin, for the machine; the shop and the worker
-- need grant_usage:
--
--   psql -f examples/mail.sql
--   psql -c "SELECT pay(1)" -c "CALL mail_worker()" -c "TABLE sent_mail"

CREATE TABLE orders (
  id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  email  text NOT NULL,
  status text NOT NULL DEFAULT 'CREATED'
);
SELECT idempotency.define_machine('mail_order', '{"initial": "CREATED", "transitions": {"CREATED": {"pay": "PAID"}}}');
SELECT idempotency.attach_machine('orders', 'status', 'mail_order');
INSERT INTO orders (email) SELECT 'customer' || i || '@example.com' FROM generate_series(1, 20) i;

-- Stands for whatever sends the mail.
CREATE TABLE sent_mail (
  event_id  bigint NOT NULL,
  recipient text NOT NULL,
  subject   text NOT NULL,
  sent_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The shop.  Side effects only where the order moved: of many who pay it, one
-- is told "applied", the others "already".
CREATE FUNCTION pay(order_id bigint) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
  moved idempotency.transition_result;
BEGIN
  moved := idempotency.transition('orders', order_id, 'CREATED', 'PAID');
  IF moved.applied THEN
    PERFORM idempotency.emit('mail',
      jsonb_build_object('to', email, 'subject', format('Order %s is paid', id)),
      key => 'order:' || id)
    FROM orders WHERE id = order_id;
  END IF;
  RETURN moved.outcome;
END
$$;

-- The mailer.  An event may come more than once; once() is true the first time.
CREATE FUNCTION deliver(event_id bigint, mail jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
  IF idempotency.once('mailer', event_id::text, ttl => '7 days') THEN
    INSERT INTO sent_mail (event_id, recipient, subject) VALUES (event_id, mail ->> 'to', mail ->> 'subject');
  END IF;
END
$$;

-- The worker, to be called again and again, by as many as you like.
CREATE PROCEDURE mail_worker(lease interval DEFAULT '30 s')
LANGUAGE plpgsql AS $$
DECLARE
  event record;
BEGIN
  FOR event IN SELECT * FROM idempotency.take('mail', 10, lease) LOOP
    COMMIT;                      -- ours from here on, until the lease ends
    BEGIN
      PERFORM deliver(event.id, event.payload);
    EXCEPTION WHEN OTHERS THEN   -- later, and after many times: parked_events
      PERFORM idempotency.nack(event.id, event.attempt, retry_in => make_interval(secs => 2 ^ least(event.attempt, 10)), error => SQLERRM);
      CONTINUE;
    END;
    COMMIT;                      -- the mail is out
    PERFORM idempotency.ack(event.id, event.attempt);
  END LOOP;
  COMMIT;
END
$$;
