-- What the contestants of client.c need; :rows other keys are there before.

\ir payment.sql

-- The least that one who stores an answer does: the work, and the final row.
CREATE TABLE limit_key (LIKE idempotency.keys INCLUDING INDEXES);
CREATE FUNCTION pay_and_insert(this_key text, request jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  answer text := repeat('x', 180);
BEGIN
  INSERT INTO payment (request_id, amount) VALUES (request ->> 'request_id', 10);
  INSERT INTO limit_key (created_at, expires_at, status, key, scope, response)
  VALUES (now(), now() + '1 day'::interval, 'c', this_key, 'bench', answer);
  RETURN answer;
END
$$;

-- By hand.
CREATE TABLE hand_key (
  scope text COLLATE "C" NOT NULL,
  key text COLLATE "C" NOT NULL,
  status "char" NOT NULL,
  response text,
  created_at timestamptz NOT NULL DEFAULT now(),
  expires_at timestamptz NOT NULL DEFAULT now() + '1 day',
  PRIMARY KEY (key, scope));
CREATE FUNCTION hand_pay(this_key text, answer text, OUT replayed boolean, OUT response text) LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO hand_key (scope, key, status) VALUES ('bench', this_key, 'p') ON CONFLICT DO NOTHING;
  replayed := NOT FOUND;
  IF replayed THEN
    SELECT k.response INTO response FROM hand_key k WHERE k.key = this_key AND k.scope = 'bench';
  ELSE
    INSERT INTO payment (request_id, amount) VALUES (this_key, 10);
    response := answer;
    UPDATE hand_key k SET status = 'c', response = answer WHERE k.key = this_key AND k.scope = 'bench';
  END IF;
END
$$;

INSERT INTO hand_key (scope, key, status, response)
SELECT 'bench', gen_random_uuid(), 'c', repeat('x', 180)
FROM generate_series(1, :rows);
INSERT INTO idempotency.keys (created_at, expires_at, status, key, scope, response)
SELECT created_at, expires_at, status, key, scope, response FROM hand_key;
INSERT INTO limit_key SELECT * FROM idempotency.keys;
VACUUM ANALYZE;
