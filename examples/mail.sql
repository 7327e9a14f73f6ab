-- One mail per paid order.
--
-- The payment and the event commit together; a worker delivers the event after
-- the commit, and again if it dies half-way; the mailer does each event once.
-- Run as a role that has grant_usage:
--
--   psql -f examples/mail.sql
--   psql -c "SELECT pay(1)" -c "CALL mail_worker()" -c "TABLE sent_mail"

CREATE TABLE orders (
  id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  email  text NOT NULL,
  status text NOT NULL DEFAULT 'CREATED'
);
INSERT INTO orders (email) SELECT 'customer' || i || '@example.com' FROM generate_series(1, 20) i;

-- Stands for whatever sends the mail.
CREATE TABLE sent_mail (
  event_id  bigint NOT NULL,
  recipient text NOT NULL,
  subject   text NOT NULL,
  sent_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The shop.  Only the one who moved the order emits; false: it was not for us.
CREATE FUNCTION pay(order_id bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
  recipient text;
BEGIN
  UPDATE orders SET status = 'PAID' WHERE id = order_id AND status = 'CREATED' RETURNING email INTO recipient;
  IF NOT FOUND THEN
    RETURN false;
  END IF;
  PERFORM idempotency.emit('mail',
    jsonb_build_object('to', recipient, 'subject', format('Order %s is paid', order_id)),
    key => 'order:' || order_id);
  RETURN true;
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
