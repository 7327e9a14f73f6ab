-- Our objects are found by name and are ours only if they belong to the
-- extension; and whose code runs when we write to them.
CREATE ROLE regress_owner;
CREATE ROLE regress_app;
CREATE SCHEMA regress_own;
GRANT USAGE ON SCHEMA regress_own TO PUBLIC;
SELECT idempotency.grant_usage('regress_app');
SELECT idempotency.define_machine('own', '{"initial": "NEW", "transitions": {"NEW": {"go": "OLD"}}}');
CREATE TABLE regress_own.thing (id integer PRIMARY KEY, status text NOT NULL);
INSERT INTO regress_own.thing SELECT n, 'NEW' FROM generate_series(1, 9) n;
SELECT idempotency.attach_machine('regress_own.thing', 'status', 'own', history => true);
GRANT SELECT, UPDATE ON regress_own.thing TO regress_app;
CREATE FUNCTION regress_own.try(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  result text;
BEGIN
  EXECUTE sql INTO result;
  RETURN coalesce(result, 'ok');
EXCEPTION WHEN OTHERS THEN
  RETURN SQLSTATE;
END $$;

-- The history belongs to a plain role, who puts code on it: it runs as him, and
-- nothing of it is left to run as the role that moves a row, here a superuser.
ALTER TABLE idempotency.transition_log OWNER TO regress_owner;
GRANT USAGE ON SCHEMA idempotency TO regress_owner;
CREATE TABLE regress_own.seen (what text, who text);
GRANT INSERT ON regress_own.seen TO PUBLIC;
CREATE FUNCTION regress_own.spy() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO regress_own.seen VALUES (TG_NAME, current_user);
  IF TG_NAME = 'sets' THEN
    PERFORM set_config('search_path', 'regress_owner', false);
  ELSIF TG_NAME = 'makes' THEN
    CREATE TEMP TABLE made (x integer);
  ELSIF TG_NAME = 'becomes' THEN
    RESET ROLE;
  END IF;
  RETURN NULL;
END $$;
CREATE FUNCTION regress_own.fire(id integer) RETURNS text LANGUAGE sql AS $$
  SELECT regress_own.try(format('SELECT outcome FROM idempotency.fire(''regress_own.thing'', %L, ''go'')', id));
$$;
CREATE TRIGGER plain AFTER INSERT ON idempotency.transition_log FOR EACH ROW EXECUTE FUNCTION regress_own.spy();
SELECT regress_own.fire(1);
DROP TRIGGER plain ON idempotency.transition_log;
CREATE TRIGGER sets AFTER INSERT ON idempotency.transition_log FOR EACH ROW EXECUTE FUNCTION regress_own.spy();
SELECT regress_own.fire(2);
SHOW search_path;
DROP TRIGGER sets ON idempotency.transition_log;
CREATE TRIGGER makes AFTER INSERT ON idempotency.transition_log FOR EACH ROW EXECUTE FUNCTION regress_own.spy();
SELECT regress_own.fire(3);
DROP TRIGGER makes ON idempotency.transition_log;
CREATE TRIGGER becomes AFTER INSERT ON idempotency.transition_log FOR EACH ROW EXECUTE FUNCTION regress_own.spy();
SELECT regress_own.fire(4);
DROP TRIGGER becomes ON idempotency.transition_log;
CREATE CONSTRAINT TRIGGER deferred AFTER INSERT ON idempotency.transition_log DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION regress_own.spy();
SELECT regress_own.fire(5);
DROP TRIGGER deferred ON idempotency.transition_log;
-- and nothing of who moves a row is found by it
CREATE SCHEMA AUTHORIZATION regress_app;
CREATE FUNCTION regress_own.calls() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM note(); RETURN NULL; END $$;
CREATE FUNCTION regress_app.note() RETURNS void LANGUAGE plpgsql AS $$ BEGIN INSERT INTO regress_own.seen VALUES ('called', current_user); END $$;
GRANT USAGE ON SCHEMA regress_app TO PUBLIC;
CREATE TRIGGER calls AFTER INSERT ON idempotency.transition_log FOR EACH ROW EXECUTE FUNCTION regress_own.calls();
SET SESSION AUTHORIZATION regress_app;
SET search_path = regress_app, public;
SELECT regress_own.fire(6);
SHOW search_path;
RESET search_path;
RESET SESSION AUTHORIZATION;
DROP TRIGGER calls ON idempotency.transition_log;
DROP SCHEMA regress_app CASCADE;
SELECT what, who = 'regress_owner' AS as_owner FROM regress_own.seen ORDER BY what;
SELECT id, status FROM regress_own.thing WHERE status = 'OLD' ORDER BY id;
REVOKE USAGE ON SCHEMA idempotency FROM regress_owner;
ALTER TABLE idempotency.transition_log OWNER TO CURRENT_USER;

-- The schema was renamed, and another role has made one of that name, with all
-- that we look for.  A session that knows our tables keeps to them; nothing is
-- ever written to another's.
SELECT idempotency.once('own', 'before');
ALTER SCHEMA idempotency RENAME TO regress_away;
CREATE SCHEMA idempotency AUTHORIZATION regress_owner;
DO $$
DECLARE
  name text;
BEGIN
  FOR name IN SELECT relname FROM pg_class WHERE relnamespace = 'regress_away'::regnamespace AND relkind = 'r' LOOP
    EXECUTE format('CREATE TABLE idempotency.%I (LIKE regress_away.%I INCLUDING ALL)', name, name);
    EXECUTE format('ALTER TABLE idempotency.%I OWNER TO regress_owner', name);
  END LOOP;
  FOR name IN SELECT relname FROM pg_class WHERE relnamespace = 'regress_away'::regnamespace AND relkind = 'S' LOOP
    EXECUTE format('CREATE SEQUENCE idempotency.%I', name);
  END LOOP;
END $$;
CREATE FUNCTION idempotency.guard_state() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE FUNCTION idempotency.guard_version() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE FUNCTION idempotency.privileges_of(audience text) RETURNS SETOF text LANGUAGE plpgsql AS $$ BEGIN RAISE WARNING 'other code'; END $$;
CREATE FUNCTION idempotency.lock_hash(scope text, key text) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RAISE WARNING 'other code'; END $$;
CREATE FUNCTION idempotency.revoke_admin(role name) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE WARNING 'other code'; END $$;
CREATE FUNCTION idempotency.grant_usage(role name) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE WARNING 'other code'; END $$;
INSERT INTO idempotency.machines VALUES ('own', '{"initial": "OLD", "transitions": {"OLD": {"go": "NEW"}}}', false);
CREATE VIEW regress_own.written AS
  SELECT (SELECT count(*) FROM idempotency.keys) AS keys, (SELECT count(*) FROM idempotency.outbox) AS outbox,
         (SELECT count(*) FROM idempotency.used_tokens) AS used_tokens, (SELECT count(*) FROM idempotency.token_generations) AS generations,
         (SELECT count(*) FROM idempotency.token_keys) AS token_keys, (SELECT count(*) FROM idempotency.transition_log) AS log,
         (SELECT count(*) FROM idempotency.machines) AS machines;
SELECT regress_away.once('own', 'before'), regress_away.once('own', 'after');
SELECT regress_own.try($$SELECT regress_away.emit('own', '1')$$) AS emit, regress_own.try($$UPDATE regress_own.thing SET status = 'OLD' WHERE id = 9$$) AS history;
SELECT * FROM regress_own.written;
\c
SELECT call, regress_own.try(call)
FROM unnest(ARRAY[$$SELECT regress_away.once('own', 'before')$$, $$SELECT regress_away.claim('own', 'k')$$, $$SELECT regress_away.lookup('own', 'before')$$,
  $$SELECT regress_away.lease('own', 'k', '1 day')$$, $$SELECT regress_away.purge()$$, $$SELECT regress_away.emit('own', '1')$$, $$SELECT regress_away.take('own')$$,
  $$SELECT regress_away.issue_token('s', 'p')$$, $$SELECT regress_away.revoke_tokens('s', 'p')$$, $$SELECT regress_away.rotate_token_key()$$,
  $$SELECT regress_away.define_machine('m', '{"initial": "A", "transitions": {"A": ["B"]}}')$$, $$SELECT regress_away.drop_machine('own')$$, $$SELECT regress_away.machine_diagram('own')$$,
  $$SELECT regress_away.fire('regress_own.thing', 8, 'go')$$, $$UPDATE regress_own.thing SET status = 'OLD' WHERE id = 8$$, $$SELECT regress_away.detach_machine('regress_own.thing', 'status')$$,
  $$SELECT regress_away.grant_usage('regress_app')$$, $$SELECT regress_away.grant_admin('regress_app')$$, $$SELECT regress_away.revoke_usage('regress_app')$$, $$SELECT regress_away.revoke_admin('regress_app')$$,
  $$SELECT * FROM regress_away.stats$$, $$SELECT * FROM regress_away.in_flight$$, $$SELECT * FROM regress_away.holder('own', 'k')$$]) WITH ORDINALITY AS u(call, n) ORDER BY n;
SELECT * FROM regress_own.written;
\set VERBOSITY default
SELECT regress_away.once('own', 'before');
SET client_min_messages = warning;
DROP SCHEMA idempotency CASCADE;
SELECT regress_away.once('own', 'before');
ALTER SCHEMA regress_away RENAME TO idempotency;
SELECT idempotency.once('own', 'before'), idempotency.once('own', 'after'), idempotency.once('own', 'again');

-- A table taken out of the extension is not ours either.
BEGIN;
ALTER EXTENSION idempotency DROP SEQUENCE idempotency.outbox_id_seq;
SELECT regress_own.try($$SELECT idempotency.emit('own', '1')$$);
ROLLBACK;
SELECT outcome FROM idempotency.fire('regress_own.thing', '8', 'go');

DROP SCHEMA regress_own CASCADE;
SELECT idempotency.drop_machine('own');
SELECT idempotency.revoke_usage('regress_app');
TRUNCATE idempotency.keys, idempotency.transition_log;
DROP ROLE regress_owner, regress_app;
