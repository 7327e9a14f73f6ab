-- A row type of ours that was altered, by hand or by the objects of another
-- version: what forms a row of it fails with 55000 before it does.
CREATE FUNCTION regress_try(sql text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE 'SELECT ' || sql;
  RETURN 'ok';
EXCEPTION WHEN OTHERS THEN
  RETURN SQLSTATE;
END $$;
CREATE TABLE regress_thing (id integer PRIMARY KEY, status text NOT NULL, version bigint NOT NULL DEFAULT 1);
INSERT INTO regress_thing VALUES (1, 'NEW'), (2, 'NEW');
SELECT idempotency.define_machine('m', '{"initial": "NEW", "transitions": {"NEW": {"go": "OLD"}}}');
SELECT idempotency.attach_machine('regress_thing', 'status', 'm');
SELECT idempotency.attach_version('regress_thing', 'version');
CREATE FUNCTION regress_work(jsonb) RETURNS text LANGUAGE sql RETURN 'done';

-- every function that returns such a row, by its type
CREATE TABLE regress_call (n serial, type text, attribute text, call text);
INSERT INTO regress_call (type, attribute, call) VALUES
  ('claim_result', 'response', $$idempotency.claim('t', 'claim')$$),
  ('run_result', 'response', $$idempotency.run('t', 'run', 'regress_work')$$),
  ('key_record', 'checkpoint', $$idempotency.lookup('t', 'k')$$),
  ('lease_result', 'checkpoint', $$idempotency.lease('t', 'lease', '1 day')$$),
  ('transition_result', 'state', $$idempotency.transition('regress_thing', 1, 'NEW', 'OLD')$$),
  ('transition_result', 'state', $$idempotency.fire('regress_thing', 1, 'go')$$),
  ('update_result', 'outcome', $$idempotency.update_if('regress_thing', 2, 1, '{}')$$),
  ('token_result', 'id', $$idempotency.check_token('no token', 's', 'p')$$),
  ('token_result', 'id', $$idempotency.consume_token(idempotency.issue_token('s', 'p'), 's', 'p')$$);
CREATE FUNCTION regress_alter(wish text) RETURNS TABLE (call text, altered text, repaired text) LANGUAGE plpgsql AS $$
DECLARE
  c regress_call;
BEGIN
  FOR c IN SELECT * FROM regress_call ORDER BY n LOOP
    call := substring(c.call from '\.(\w+)');
    BEGIN
      EXECUTE format('ALTER TYPE idempotency.%I ' || wish, c.type, c.attribute);
      altered := regress_try(c.call);
      RAISE 'undo' USING ERRCODE = 'ZZ000';
    EXCEPTION WHEN SQLSTATE 'ZZ000' THEN
    END;
    BEGIN
      repaired := regress_try(c.call);
      RAISE 'undo' USING ERRCODE = 'ZZ000';
    EXCEPTION WHEN SQLSTATE 'ZZ000' THEN
    END;
    RETURN NEXT;
  END LOOP;
END $$;
SELECT * FROM regress_alter('ADD ATTRIBUTE note text');
SELECT call, altered FROM regress_alter('ALTER ATTRIBUTE %I TYPE integer') WHERE altered <> '55000';
SELECT call, altered FROM regress_alter('DROP ATTRIBUTE %I') WHERE altered <> '55000';

-- one refusal in full
BEGIN;
ALTER TYPE idempotency.key_record ADD ATTRIBUTE note text;
SELECT * FROM idempotency.lookup('t', 'k');
ROLLBACK;
SELECT * FROM idempotency.lookup('t', 'k');

-- functions that return a table, as another version could declare them
SELECT idempotency.emit('t', '1') > 0 AS emitted;
BEGIN;
CREATE SCHEMA regress_next;
CREATE FUNCTION regress_next.take(topic text, max bigint DEFAULT 1, lease interval DEFAULT '1 s')
RETURNS TABLE (id bigint, attempt integer, key text, payload jsonb, emitted_at timestamptz, note text)
LANGUAGE c AS '$libdir/idempotency', 'idempotency_take';
CREATE FUNCTION regress_next.topic_counts(OUT topic text, OUT a bigint, OUT b bigint, OUT c bigint, OUT d bigint, OUT e timestamptz, OUT f text) RETURNS SETOF record
LANGUAGE c AS '$libdir/idempotency', 'idempotency_topic_counts';
CREATE FUNCTION regress_next.key_counts(by text) RETURNS TABLE (scope text, status "char", rows bigint, expired text, estimate boolean)
LANGUAGE c AS '$libdir/idempotency', 'idempotency_key_counts';
CREATE FUNCTION regress_next.off_graph(rel regclass) RETURNS TABLE (id jsonb, state text, reason text, note text)
LANGUAGE c AS '$libdir/idempotency', 'idempotency_off_graph';
SELECT call, regress_try(call)
FROM unnest(ARRAY[$$regress_next.take('t')$$, 'regress_next.topic_counts()', $$regress_next.key_counts('scope')$$, $$regress_next.off_graph('regress_thing')$$]) WITH ORDINALITY AS u(call, n) ORDER BY n;
ROLLBACK;
SELECT payload FROM idempotency.take('t', lease => '0');

-- the definitions of the machines
BEGIN;
ALTER TABLE idempotency.machines ALTER definition TYPE text;
SELECT idempotency.machine_diagram('m');
ROLLBACK;

SELECT idempotency.detach_machine('regress_thing', 'status');
DROP TABLE regress_thing, regress_call;
DROP FUNCTION regress_try, regress_alter, regress_work;
SELECT idempotency.drop_machine('m');
TRUNCATE idempotency.keys, idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys;
ALTER SEQUENCE idempotency.outbox_id_seq RESTART;
