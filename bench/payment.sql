-- The work whose answer is stored: one row.  The answer has 180 bytes.
CREATE TABLE payment (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  request_id text NOT NULL,
  amount numeric NOT NULL);
CREATE FUNCTION pay(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO payment (request_id, amount) VALUES (request ->> 'request_id', 10);
  RETURN repeat('x', 180);
END
$$;
