-- The work and its answer stand or fall together: if anything goes wrong between
-- the claim and the end of COMMIT, nothing is stored and the retry runs.
\set VERBOSITY terse
\set SHOW_CONTEXT never
CREATE ROLE regress_effect;
SELECT idempotency.grant_usage('regress_effect');
CREATE SCHEMA effect AUTHORIZATION regress_effect;
SET ROLE regress_effect;
SET search_path = effect;
CREATE TABLE account (id int PRIMARY KEY, balance int CHECK (balance >= 0));
CREATE TABLE payment (request_id text, account int REFERENCES account DEFERRABLE INITIALLY DEFERRED, amount int);
CREATE VIEW state AS
  SELECT (SELECT status FROM idempotency.lookup('effect', 'k')), (SELECT count(*) FROM payment) AS payments;
INSERT INTO account VALUES (1, 100);

-- a statement after the answer fails
BEGIN;
SELECT status FROM idempotency.claim('effect', 'k');
INSERT INTO payment VALUES ('k', 1, 10);
SELECT idempotency.complete('effect', 'k', 'paid') IS NOT NULL AS complete;
UPDATE account SET balance = balance - 1000;
COMMIT;
TABLE state;

-- COMMIT itself fails: a deferred constraint, checked after the answer is stored
BEGIN;
SELECT status FROM idempotency.claim('effect', 'k');
INSERT INTO payment VALUES ('k', 2, 10);
SELECT idempotency.complete('effect', 'k', 'paid') IS NOT NULL AS complete;
SELECT * FROM idempotency.claim('effect', 'k');
COMMIT;
TABLE state;

-- the same under once() and run()
BEGIN;
SELECT idempotency.once('effect', 'k');
INSERT INTO payment VALUES ('k', 2, 10);
COMMIT;
TABLE state;
CREATE FUNCTION pay(request jsonb) RETURNS text LANGUAGE sql
AS $$ INSERT INTO effect.payment VALUES ('k', (request ->> 'account')::int, 10) RETURNING 'paid' $$;
SELECT status FROM idempotency.run('effect', 'k', 'pay', '{"account": 2}');
TABLE state;
SELECT status FROM idempotency.run('effect', 'k', 'pay', '{"account": 2}', record_errors => true);
TABLE state;

-- the constraint made immediate within the function is its error, and can be recorded
CREATE FUNCTION pay_now(request jsonb) RETURNS text LANGUAGE plpgsql
AS $$
BEGIN
  PERFORM effect.pay(request);
  SET CONSTRAINTS ALL IMMEDIATE;
  RETURN 'paid';
END
$$;
BEGIN;
SELECT status, meta ->> 'sqlstate' AS sqlstate FROM idempotency.run('effect', 'k', 'pay_now', '{"account": 2}', record_errors => true);
TABLE state;
ROLLBACK;

-- errors of the moment leave nothing, and the retry runs
CREATE FUNCTION momentary(request jsonb) RETURNS text LANGUAGE plpgsql
AS $$
BEGIN
  INSERT INTO effect.payment VALUES ('k', 1, 10);
  RAISE EXCEPTION 'not now' USING ERRCODE = request ->> 'sqlstate';
END
$$;
SELECT status FROM idempotency.run('effect', 'k', 'momentary', '{"sqlstate": "40001"}', record_errors => true);
SELECT status FROM idempotency.run('effect', 'k', 'momentary', '{"sqlstate": "57014"}', record_errors => true);
SELECT status FROM idempotency.run('effect', 'k', 'momentary', '{"sqlstate": "53300"}', record_errors => true);
TABLE state;

-- at last, and again
SELECT status, replayed, response FROM idempotency.run('effect', 'k', 'pay', '{"account": 1}');
SELECT status, replayed, response FROM idempotency.run('effect', 'k', 'pay', '{"account": 1}');
TABLE state;

-- nothing is marked as done for a row that another condition drops
RESET ROLE;
CREATE FUNCTION effect.slow(kind text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RETURN kind = 'Payment'; END $$;
CREATE TABLE effect.event AS SELECT i AS id, CASE WHEN i % 10 = 0 THEN 'Payment' ELSE 'refund' END AS kind FROM generate_series(1, 100) i;
SELECT count(*) AS due FROM effect.event WHERE idempotency.once('effect', 'a' || id) AND lower(kind) = 'payment';
SELECT count(*) AS due FROM effect.event WHERE idempotency.once('effect', 'b' || id) AND effect.slow(kind) AND kind LIKE 'P%';
SELECT left(key, 1) AS mark, count(*) AS marked FROM idempotency.keys WHERE scope = 'effect' AND key ~ '^[ab]\d' GROUP BY 1 ORDER BY 1;
-- so every function that does something costs more than what stands beside it
SELECT oid::regprocedure AS cheap FROM pg_proc
WHERE pronamespace = 'idempotency'::regnamespace AND provolatile = 'v' AND prokind = 'f' AND prorettype <> 'trigger'::regtype AND probin IS NOT NULL AND procost < 5000;

SET client_min_messages = warning;
DROP SCHEMA effect CASCADE;
DROP OWNED BY regress_effect;
DROP ROLE regress_effect;
DELETE FROM idempotency.keys WHERE scope = 'effect';
