-- One mail per paid order.
--
-- The payment and the event commit together.  A worker delivers the event after
-- the commit, and again if it dies half-way: it comes at least once.  Its id goes
-- to the mailer as the idempotency key, so that one mail goes out.
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

-- Stands for a mail service, somewhere else: what it has accepted stays accepted,
-- also when the caller's transaction rolls back.  As those of most services, its
-- API takes an idempotency key: the same key again sends nothing.
CREATE TABLE sent_mail (
  idempotency_key text PRIMARY KEY,
  recipient text NOT NULL,
  subject   text NOT NULL,
  calls     integer NOT NULL DEFAULT 1,
  sent_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE FUNCTION send_mail(key text, mail jsonb) RETURNS void
LANGUAGE sql AS $$
  INSERT INTO sent_mail (idempotency_key, recipient, subject) VALUES (key, mail ->> 'to', mail ->> 'subject')
  ON CONFLICT (idempotency_key) DO UPDATE SET calls = sent_mail.calls + 1
$$;

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

-- The worker, to be called again and again, by as many as you like.  It may die
-- anywhere.  Before the mail is out, and after, the event is still there: when the
-- lease ends, somebody takes it again.  No once() before send_mail(): the mark
-- would be kept, the mail perhaps not be sent, and nobody try again.
CREATE PROCEDURE mail_worker(lease interval DEFAULT '30 s')
LANGUAGE plpgsql AS $$
DECLARE
  event record;
BEGIN
  FOR event IN SELECT * FROM idempotency.take('mail', 10, lease) LOOP
    COMMIT;                      -- ours from here on, until the lease ends
    BEGIN
      PERFORM send_mail('shop-mail-' || event.id, event.payload);
    EXCEPTION WHEN OTHERS THEN   -- later, and after many times: parked_events
      PERFORM idempotency.nack(event.id, event.attempt, error => SQLERRM);
      CONTINUE;
    END;
    COMMIT;                      -- the mail is out
    PERFORM idempotency.ack(event.id, event.attempt);
  END LOOP;
  COMMIT;
END
$$;
