-- A shop: what is sold, the orders, their payments, and each operation as one
-- function from request to answer, to be called through idempotency.run().
CREATE EXTENSION idempotency;

CREATE TABLE product (
  name  text PRIMARY KEY,
  price numeric(10,2) NOT NULL,
  stock integer NOT NULL CHECK (stock >= 0)
);
INSERT INTO product VALUES ('espresso', 2.50, 1000), ('last cake', 4.20, 0);

CREATE TABLE orders (
  id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  customer text NOT NULL,
  item     text NOT NULL REFERENCES product,
  quantity integer NOT NULL CHECK (quantity > 0),
  amount   numeric(10,2) NOT NULL,
  status   text NOT NULL DEFAULT 'CREATED'
);
SELECT idempotency.define_machine('order', '{"initial": "CREATED", "transitions": {"CREATED": {"pay": "PAID"}}}');
SELECT idempotency.attach_machine('orders', 'status', 'order');

CREATE TABLE payment (
  id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  order_id bigint NOT NULL REFERENCES orders,
  amount   numeric(10,2) NOT NULL,
  paid_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Refusals are errors of class SH, a class of the shop's own, so that run(...,
-- record_errors => true) stores them as the answer; the rest of the SQLSTATE is
-- the HTTP status.

CREATE FUNCTION create_order(request jsonb) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
  sold    product;
  created orders;
BEGIN
  UPDATE product SET stock = stock - (request->>'quantity')::integer
  WHERE name = request->>'item' AND stock >= (request->>'quantity')::integer
  RETURNING * INTO sold;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'sold out' USING ERRCODE = 'SH409';
  END IF;

  INSERT INTO orders (customer, item, quantity, amount)
  VALUES (request->>'customer', sold.name, (request->>'quantity')::integer,
          sold.price * (request->>'quantity')::integer)
  RETURNING * INTO created;
  RETURN json_build_object('order', created.id, 'item', created.item, 'quantity', created.quantity,
                           'amount', created.amount, 'status', created.status);
END
$$;

-- The key makes a retry harmless; the state machine refuses a second payment under
-- another key.
CREATE FUNCTION pay_order(request jsonb) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
  ordered orders;
  paid    payment;
BEGIN
  SELECT * INTO ordered FROM orders
  WHERE id = (request->>'order')::bigint AND customer = request->>'customer';
  IF NOT FOUND THEN
    RAISE EXCEPTION 'no such order' USING ERRCODE = 'SH404';
  END IF;
  IF NOT (idempotency.transition('orders', ordered.id, 'CREATED', 'PAID')).applied THEN
    RAISE EXCEPTION 'already paid' USING ERRCODE = 'SH409';
  END IF;

  INSERT INTO payment (order_id, amount) VALUES (ordered.id, ordered.amount) RETURNING * INTO paid;
  RETURN json_build_object('payment', paid.id, 'order', paid.order_id, 'amount', paid.amount,
                           'paid_at', paid.paid_at);
END
$$;

-- The order form sends a one-time token instead of a key.  The answer is stored
-- under the token's id, so that a form that is sent again gets it back; the claim
-- comes first, so that two of the same form wait for each other there.
CREATE FUNCTION submit_order_form(token text, customer text, request jsonb)
RETURNS idempotency.claim_result LANGUAGE plpgsql AS $$
DECLARE
  scope  CONSTANT text := 'shop:order-form:' || customer;
  looked CONSTANT idempotency.token_result := idempotency.check_token(token, customer, 'order-form');
  answer idempotency.claim_result;
BEGIN
  IF looked.status = 'invalid' THEN
    answer.status := 'invalid';
    RETURN answer;
  END IF;

  answer := idempotency.claim(scope, looked.id, request, wait => '5 s');
  IF answer.status <> 'claimed' THEN
    RETURN answer;
  END IF;

  answer.status := (idempotency.consume_token(token, customer, 'order-form')).status;
  IF answer.status <> 'consumed' THEN
    PERFORM idempotency.release(scope, looked.id);
    RETURN answer;
  END IF;

  -- a refusal rolls all of this back: the token can be used again
  answer.response := create_order(request);
  PERFORM idempotency.complete(scope, looked.id, answer.response);
  answer.status := 'completed';
  RETURN answer;
END
$$;
