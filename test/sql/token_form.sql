-- A form without a key: the page carries a token, and who submits it again
-- because the reply was lost gets the first answer.  doc/tasks.md shows this.
SET client_min_messages = warning;
\pset null '(null)'
CREATE ROLE regress_form;
SELECT idempotency.grant_usage('regress_form');
CREATE SCHEMA form AUTHORIZATION regress_form;
SET ROLE regress_form;
SET search_path = form, pg_temp;

CREATE TABLE report (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, user_id text, month text);

CREATE FUNCTION submit_report(token text, user_id text, month text, OUT status text, OUT response text)
LANGUAGE plpgsql AS $$
DECLARE
  form idempotency.token_result := idempotency.check_token(token, user_id, 'report form');
BEGIN
  IF form.status = 'invalid' THEN
    status := 'invalid';
    RETURN;
  END IF;
  SELECT c.status, c.response INTO status, response
  FROM idempotency.claim('report form', form.id, jsonb_build_object('month', month), wait => '5 s') c;
  IF status <> 'claimed' THEN
    RETURN;                               -- completed: the first answer; mismatch: the form was edited
  END IF;
  form := idempotency.consume_token(token, user_id, 'report form');
  IF form.status <> 'consumed' THEN       -- expired, revoked, stale
    PERFORM idempotency.release('report form', form.id);
    status := form.status;
    RETURN;
  END IF;
  INSERT INTO report (user_id, month) VALUES (submit_report.user_id, submit_report.month)
  RETURNING 'report ' || id INTO response;
  PERFORM idempotency.complete('report form', form.id, response);
  status := 'completed';
END
$$;

-- the page
SELECT idempotency.issue_token('user-7', 'report form', '30 minutes') AS token \gset
-- submitted, the reply lost, submitted again, and once more after an edit
SELECT * FROM submit_report(:'token', 'user-7', '2026-10');
SELECT * FROM submit_report(:'token', 'user-7', '2026-10');
SELECT * FROM submit_report(:'token', 'user-7', '2026-11');
-- by somebody else, or with a token that was made up
SELECT * FROM submit_report(:'token', 'user-8', '2026-10');
SELECT * FROM submit_report('made up', 'user-7', '2026-10');
TABLE report;

-- the work fails: neither the token nor the key is used up
SELECT idempotency.issue_token('user-7', 'report form', '30 minutes') AS token \gset
ALTER TABLE report ADD CHECK (month <> '1999-12');
\set VERBOSITY terse
SELECT * FROM submit_report(:'token', 'user-7', '1999-12');
SELECT * FROM submit_report(:'token', 'user-7', '1999-11');
-- the page was open too long, or the tokens were revoked
SELECT * FROM submit_report(idempotency.issue_token('user-7', 'report form', '1 microsecond'), 'user-7', '2026-12');
SELECT idempotency.issue_token('user-7', 'report form', '30 minutes') AS late \gset
SELECT idempotency.revoke_tokens('user-7', 'report form') IS NOT NULL AS revoked;
SELECT * FROM submit_report(:'late', 'user-7', '2026-12');
-- which takes no answer back
SELECT * FROM submit_report(:'token', 'user-7', '1999-11');
SELECT user_id, month FROM report ORDER BY id;

DROP SCHEMA form CASCADE;
RESET ROLE;
RESET search_path;
SELECT idempotency.revoke_usage('regress_form');
DROP ROLE regress_form;
DELETE FROM idempotency.used_tokens;
DELETE FROM idempotency.token_generations;
