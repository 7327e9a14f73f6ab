-- Our table altered by hand: written past the executor, it must be as the
-- install script made it, or every call fails with 55000 and writes nothing;
-- once repaired, it works again.  Columns and indexes that were added without
-- a wish of their own are looked after.
CREATE ROLE regress_app;
CREATE SCHEMA AUTHORIZATION regress_app;
SELECT idempotency.grant_usage('regress_app');
SELECT idempotency.once('altered', 'before');
SET client_min_messages = warning;

-- one refusal in full
ALTER TABLE idempotency.keys ADD CONSTRAINT no CHECK (status <> 'x');
SET SESSION AUTHORIZATION regress_app;
SELECT idempotency.once('altered', 'k');
\echo :LAST_ERROR_SQLSTATE
RESET SESSION AUTHORIZATION;
ALTER TABLE idempotency.keys DROP CONSTRAINT no;
SELECT idempotency.once('altered', 'first');

-- every function
CREATE FUNCTION regress_app.try(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  result text;
BEGIN
  EXECUTE 'SELECT ' || sql INTO result;
  RETURN result;
EXCEPTION WHEN OTHERS THEN
  RETURN SQLSTATE;
END $$;
BEGIN;
SELECT status FROM idempotency.claim('altered', 'held');
ALTER TABLE idempotency.keys ENABLE ROW LEVEL SECURITY;
SELECT call, regress_app.try(call)
FROM unnest(ARRAY[$$idempotency.claim('altered', 'k')$$, $$idempotency.claim('altered', 'before')$$, $$idempotency.claim('altered', 'held')$$,
  $$idempotency.complete('altered', 'held')$$, $$idempotency.fail('altered', 'held')$$, $$idempotency.once('altered', 'before')$$,
  $$idempotency.run('altered', 'k', 'no_such')$$, $$idempotency.lookup('altered', 'before')$$, $$idempotency.forget('altered', 'before')$$,
  $$idempotency.release('altered', 'not held')$$, $$idempotency.release('altered', 'held')$$]) WITH ORDINALITY AS u(call, n) ORDER BY n;
ROLLBACK;

-- every way: alter, try, repair, try
CREATE SCHEMA regress_alter;
CREATE FUNCTION regress_alter.trigger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE ACCESS METHOD regress_heap TYPE TABLE HANDLER heap_tableam_handler;
CREATE DOMAIN regress_alter.domain AS text CHECK (VALUE <> '');
CREATE TABLE regress_alter.way (n serial, alter_sql text, repair_sql text);
INSERT INTO regress_alter.way (alter_sql, repair_sql) VALUES
  ('CREATE TRIGGER t BEFORE INSERT ON idempotency.keys FOR EACH ROW EXECUTE FUNCTION regress_alter.trigger()', 'DROP TRIGGER t ON idempotency.keys'),
  ('CREATE TRIGGER t AFTER DELETE ON idempotency.keys EXECUTE FUNCTION regress_alter.trigger()', 'DROP TRIGGER t ON idempotency.keys'),
  ('CREATE RULE r AS ON INSERT TO idempotency.keys DO INSTEAD NOTHING', 'DROP RULE r ON idempotency.keys'),
  ('ALTER TABLE idempotency.keys ENABLE ROW LEVEL SECURITY', 'ALTER TABLE idempotency.keys DISABLE ROW LEVEL SECURITY'),
  ('ALTER TABLE idempotency.keys ADD CONSTRAINT no CHECK (false) NOT VALID', 'ALTER TABLE idempotency.keys DROP CONSTRAINT no'),
  ('ALTER TABLE idempotency.keys ADD COLUMN c text NOT NULL DEFAULT ''x''', 'ALTER TABLE idempotency.keys DROP COLUMN c'),
  ('ALTER TABLE idempotency.keys ADD COLUMN c text DEFAULT ''x''', 'ALTER TABLE idempotency.keys DROP COLUMN c'),
  ('ALTER TABLE idempotency.keys ADD COLUMN c bigint GENERATED ALWAYS AS IDENTITY', 'ALTER TABLE idempotency.keys DROP COLUMN c'),
  ('ALTER TABLE idempotency.keys ADD COLUMN c text GENERATED ALWAYS AS (key) STORED', 'ALTER TABLE idempotency.keys DROP COLUMN c'),
  ('ALTER TABLE idempotency.keys RENAME COLUMN response TO answer', 'ALTER TABLE idempotency.keys RENAME COLUMN answer TO response'),
  ('ALTER TABLE idempotency.keys ALTER COLUMN response TYPE varchar', 'ALTER TABLE idempotency.keys ALTER COLUMN response TYPE text'),
  ('ALTER TABLE idempotency.keys ALTER COLUMN meta TYPE json', 'ALTER TABLE idempotency.keys ALTER COLUMN meta TYPE jsonb'),
  ('ALTER TABLE idempotency.keys DROP CONSTRAINT keys_pkey', 'ALTER TABLE idempotency.keys ADD PRIMARY KEY (key, scope)'),
  ('ALTER TABLE idempotency.keys DROP CONSTRAINT keys_pkey, ADD PRIMARY KEY (scope, key)', 'ALTER TABLE idempotency.keys DROP CONSTRAINT keys_pkey, ADD PRIMARY KEY (key, scope)'),
  ('ALTER TABLE idempotency.keys DROP CONSTRAINT keys_pkey, ADD PRIMARY KEY (key, scope, created_at)', 'ALTER TABLE idempotency.keys DROP CONSTRAINT keys_pkey, ADD PRIMARY KEY (key, scope)'),
  ('ALTER TABLE idempotency.keys DROP CONSTRAINT keys_pkey, ADD PRIMARY KEY (key, scope) DEFERRABLE', 'ALTER TABLE idempotency.keys DROP CONSTRAINT keys_pkey, ADD PRIMARY KEY (key, scope)'),
  ('ALTER TABLE idempotency.keys DROP CONSTRAINT keys_pkey; CREATE INDEX i ON idempotency.keys (key, scope)', 'DROP INDEX idempotency.i; ALTER TABLE idempotency.keys ADD PRIMARY KEY (key, scope)'),
  ('ALTER TABLE idempotency.keys DROP CONSTRAINT keys_pkey; CREATE UNIQUE INDEX i ON idempotency.keys (key, scope) WHERE status = ''c''', 'DROP INDEX idempotency.i; ALTER TABLE idempotency.keys ADD PRIMARY KEY (key, scope)'),
  ('ALTER TABLE idempotency.keys DROP CONSTRAINT keys_pkey; CREATE UNIQUE INDEX i ON idempotency.keys (lower(key), scope)', 'DROP INDEX idempotency.i; ALTER TABLE idempotency.keys ADD PRIMARY KEY (key, scope)'),
  ('ALTER TABLE idempotency.keys DROP CONSTRAINT keys_pkey; CREATE UNIQUE INDEX i ON idempotency.keys (key COLLATE "default", scope)', 'DROP INDEX idempotency.i; ALTER TABLE idempotency.keys ADD PRIMARY KEY (key, scope)'),
  ('UPDATE pg_index SET indisvalid = false WHERE indexrelid = ''idempotency.keys_pkey''::regclass', 'UPDATE pg_index SET indisvalid = true WHERE indexrelid = ''idempotency.keys_pkey''::regclass'),
  ('ALTER TABLE idempotency.keys SET UNLOGGED', 'ALTER TABLE idempotency.keys SET LOGGED'),
  ('ALTER TABLE idempotency.keys SET ACCESS METHOD regress_heap', 'ALTER TABLE idempotency.keys SET ACCESS METHOD heap'),
  ('CREATE TABLE regress_alter.parent (LIKE idempotency.keys) PARTITION BY LIST (status); ALTER TABLE regress_alter.parent ATTACH PARTITION idempotency.keys DEFAULT', 'ALTER TABLE regress_alter.parent DETACH PARTITION idempotency.keys'),
  ('CREATE TABLE regress_alter.child (key text COLLATE "C", scope text COLLATE "C", FOREIGN KEY (key, scope) REFERENCES idempotency.keys)', 'DROP TABLE regress_alter.child'),
  ('ALTER TABLE idempotency.keys ADD COLUMN c regress_alter.domain', 'ALTER TABLE idempotency.keys DROP COLUMN c'),
  ('ALTER TABLE idempotency.keys RENAME TO keys_away', 'ALTER TABLE idempotency.keys_away RENAME TO keys'),
  ('ALTER TABLE idempotency.keys RENAME TO keys_away; CREATE VIEW idempotency.keys AS TABLE idempotency.keys_away', 'DROP VIEW idempotency.keys; ALTER TABLE idempotency.keys_away RENAME TO keys'),
  ('ALTER TABLE idempotency.keys RENAME TO keys_away; CREATE TABLE idempotency.keys (LIKE idempotency.keys_away INCLUDING ALL) PARTITION BY LIST (scope)', 'DROP TABLE idempotency.keys; ALTER TABLE idempotency.keys_away RENAME TO keys'),
  ('ALTER TABLE idempotency.keys RENAME TO keys_away; CREATE TEMP TABLE keys (LIKE idempotency.keys_away INCLUDING ALL)', 'DROP TABLE pg_temp.keys; ALTER TABLE idempotency.keys_away RENAME TO keys'),
  ('ALTER TABLE idempotency.keys SET SCHEMA regress_alter', 'ALTER TABLE regress_alter.keys SET SCHEMA idempotency');
SET allow_system_table_mods = on;
CREATE PROCEDURE regress_alter.go(INOUT ways integer) LANGUAGE plpgsql AS $$
DECLARE
  w regress_alter.way;
  altered text;
  repaired text;
BEGIN
  FOR w IN SELECT * FROM regress_alter.way ORDER BY n LOOP
    EXECUTE w.alter_sql;
    COMMIT;
    altered := regress_app.try(format('idempotency.once(''altered'', ''way %s'')', w.n));
    COMMIT;
    EXECUTE w.repair_sql;
    COMMIT;
    repaired := regress_app.try(format('idempotency.once(''altered'', ''way %s'')', w.n));
    COMMIT;
    IF altered IS DISTINCT FROM '55000' OR repaired IS DISTINCT FROM 'true' THEN
      RAISE WARNING 'altered: %, repaired: %: %', altered, repaired, w.alter_sql;
    END IF;
    ways := ways + 1;
  END LOOP;
END $$;
CALL regress_alter.go(0);
RESET allow_system_table_mods;
-- the verdict is also right in the transaction that alters, and after its rollback
BEGIN;
ALTER TABLE idempotency.keys DROP COLUMN checkpoint;
SELECT regress_app.try($$idempotency.once('altered', 'dropped column')$$);
ROLLBACK;
BEGIN;
ALTER TABLE idempotency.keys ADD CONSTRAINT no CHECK (false) NOT VALID;
SAVEPOINT a;
ALTER TABLE idempotency.keys DROP CONSTRAINT no;
SELECT idempotency.once('altered', 'inside');
ROLLBACK TO a;
SELECT regress_app.try($$idempotency.once('altered', 'inside')$$);
ROLLBACK;
SELECT idempotency.once('altered', 'after');

-- what was stored before is still there
SELECT idempotency.once('altered', 'before'), idempotency.once('altered', 'first');

-- harmless: our own index rebuilt, another unique index in its place, an inheritance child
REINDEX TABLE idempotency.keys;
SELECT idempotency.once('altered', 'reindex'), idempotency.once('altered', 'first');
CREATE UNIQUE INDEX another ON idempotency.keys (key, scope) INCLUDE (expires_at);
ALTER TABLE idempotency.keys DROP CONSTRAINT keys_pkey;
SELECT idempotency.once('altered', 'another'), idempotency.once('altered', 'another'), idempotency.once('altered', 'first');
ALTER TABLE idempotency.keys ADD PRIMARY KEY (key, scope);
SELECT idempotency.once('altered', 'both'), idempotency.once('altered', 'both'), idempotency.once('altered', 'another');
DROP INDEX idempotency.another;
SELECT idempotency.once('altered', 'back'), idempotency.once('altered', 'both');
VACUUM FULL idempotency.keys;
CLUSTER idempotency.keys USING keys_pkey;
SELECT idempotency.once('altered', 'rewritten'), idempotency.once('altered', 'first');

-- columns and indexes of other makers
ALTER TABLE idempotency.keys ADD COLUMN dropped text;
ALTER TABLE idempotency.keys ADD COLUMN note text;
ALTER TABLE idempotency.keys DROP COLUMN dropped;
CREATE INDEX by_expiry ON idempotency.keys (expires_at);
CREATE INDEX by_expression ON idempotency.keys (lower(response));
CREATE INDEX by_part ON idempotency.keys (created_at) WHERE status = 'f';
CREATE INDEX by_note ON idempotency.keys USING hash (note);
SET SESSION AUTHORIZATION regress_app;
BEGIN;
SELECT count(*) FILTER (WHERE status = 'claimed') FROM unnest('{new,replaced,failed}'::text[]) AS k, LATERAL idempotency.claim('maintained', k, ttl => '1 us');
SELECT idempotency.complete('maintained', 'new', 'NEW') IS NOT NULL AS complete, idempotency.complete('maintained', 'replaced', 'OLD') IS NOT NULL AS complete, idempotency.fail('maintained', 'failed', 'FAILED') IS NOT NULL AS fail;
COMMIT;
RESET SESSION AUTHORIZATION;
UPDATE idempotency.keys SET note = 'kept' WHERE scope = 'maintained' AND key = 'replaced';
SET SESSION AUTHORIZATION regress_app;
BEGIN;
SELECT status FROM idempotency.claim('maintained', 'replaced');
SELECT idempotency.complete('maintained', 'replaced', 'Replaced') IS NOT NULL AS complete;
COMMIT;
RESET SESSION AUTHORIZATION;
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SET enable_sort = on;
CREATE FUNCTION regress_app.uses(index text, query text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  line text;
BEGIN
  FOR line IN EXECUTE 'EXPLAIN ' || query LOOP
    IF line ~ ('Index (Only )?Scan .*using ' || index || ' ') THEN RETURN true; END IF;
  END LOOP;
  RETURN false;
END $$;
SELECT regress_app.uses('by_expression', $$SELECT FROM idempotency.keys WHERE lower(response) = 'replaced'$$),
       regress_app.uses('by_part', $$SELECT FROM idempotency.keys WHERE status = 'f' AND created_at > '2000-01-01'$$),
       regress_app.uses('by_expiry', $$SELECT FROM idempotency.keys WHERE expires_at > '2000-01-01'$$),
       regress_app.uses('by_note', $$SELECT FROM idempotency.keys WHERE note = 'kept'$$);
SELECT key, response, note FROM idempotency.keys WHERE lower(response) = 'new';
SELECT key, response, note FROM idempotency.keys WHERE lower(response) = 'replaced';
SELECT key, response, note FROM idempotency.keys WHERE lower(response) = 'old';
SELECT key, response, note FROM idempotency.keys WHERE note = 'kept';
SELECT key, response FROM idempotency.keys WHERE status = 'f' AND created_at > '2000-01-01' AND scope = 'maintained';
SELECT count(*) AS by_expiry FROM idempotency.keys WHERE expires_at > '2000-01-01';
RESET enable_seqscan;
SET enable_indexscan = off;
SET enable_indexonlyscan = off;
SELECT count(*) AS by_heap FROM idempotency.keys;
RESET enable_indexscan;
RESET enable_indexonlyscan;
RESET enable_bitmapscan;
-- a unique index of another maker: its violation is a lost race, and tells no key
CREATE UNIQUE INDEX by_response ON idempotency.keys (response) WHERE scope = 'maintained';
BEGIN;
SELECT status FROM idempotency.claim('maintained', 'duplicate');
SELECT idempotency.complete('maintained', 'duplicate', 'NEW') IS NOT NULL AS complete;
\echo :LAST_ERROR_SQLSTATE
ROLLBACK;
DROP INDEX idempotency.by_response, idempotency.by_expiry, idempotency.by_expression, idempotency.by_part, idempotency.by_note;
ALTER TABLE idempotency.keys DROP COLUMN note;
-- an index that is not PostgreSQL's alone could run anything as the role that claims
CREATE FUNCTION regress_alter.meddle(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'meddled';
END $$;
CREATE FUNCTION regress_alter.fold(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
BEGIN
  IF current_user = 'regress_app' THEN RAISE WARNING 'meddled'; END IF;
  RETURN $1;
END $$;
CREATE TYPE regress_alter.kind AS ENUM ('a');
CREATE OPERATOR CLASS regress_alter.text_ops FOR TYPE text USING btree AS OPERATOR 3 =, FUNCTION 1 bttextcmp(text, text);
TRUNCATE idempotency.keys;
ALTER TABLE idempotency.keys ADD COLUMN kind regress_alter.kind;
CREATE FUNCTION regress_alter.index(definition text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  result text;
BEGIN
  EXECUTE 'CREATE INDEX one ON idempotency.keys ' || definition;
  PERFORM set_config('role', 'regress_app', true);
  result := regress_app.try($_$idempotency.once('altered', clock_timestamp()::text)$_$);
  PERFORM set_config('role', 'none', true);
  DROP INDEX idempotency.one;
  RETURN result;
END $$;
SELECT definition, regress_alter.index(definition) AS once
FROM unnest(ARRAY['(regress_alter.meddle(checkpoint))', '(fence) WHERE regress_alter.meddle(checkpoint) IS NULL', '((coalesce(fence, length(regress_alter.meddle(checkpoint)))))',
  '(checkpoint regress_alter.text_ops)', '(kind)', '(fence) INCLUDE (kind)', $$(fence) WHERE kind = 'a'$$, '(greatest(kind, NULL))',
  $$(regress_alter.fold('x'))$$, $$(fence) WHERE regress_alter.fold('x') = 'x'$$, $$((key || regress_alter.fold('x')))$$,
  '(fence) WHERE meta IS NULL', '((meta ->> ''a'')) INCLUDE (fence)', 'USING gin (meta jsonb_path_ops)']) WITH ORDINALITY AS u(definition, n) ORDER BY n;
SELECT idempotency.once('altered', 'a type of others');
ALTER TABLE idempotency.keys DROP COLUMN kind;
SELECT idempotency.once('altered', 'the end'), idempotency.once('altered', 'the end');

-- pg_restore --data-only --disable-triggers leaves triggers that do not fire for a
-- replica, such as a subscription: what it changes is seen nevertheless
SELECT idempotency.define_machine('altered', '{"initial": "A", "transitions": {"A": ["B"]}}');
ALTER TABLE idempotency.token_keys DISABLE TRIGGER ALL, ENABLE TRIGGER ALL;
ALTER TABLE idempotency.secrets DISABLE TRIGGER ALL, ENABLE TRIGGER ALL;
ALTER TABLE idempotency.machines DISABLE TRIGGER ALL, ENABLE TRIGGER ALL;
SELECT idempotency.issue_token('s', 'p') AS token, idempotency.lock_hash('altered', 'k') AS hash \gset
SELECT idempotency.machine_diagram('altered') LIKE '%B%' AS known;
BEGIN;
SET LOCAL session_replication_role = replica;
CREATE TEMP TABLE token_key AS SELECT * FROM idempotency.token_keys;
DELETE FROM idempotency.token_keys;
INSERT INTO idempotency.secrets DEFAULT VALUES;
UPDATE idempotency.machines SET definition = '{"initial": "A", "transitions": {"A": ["C"]}}';
COMMIT;
SELECT status FROM idempotency.check_token(:'token', 's', 'p');
SELECT idempotency.lock_hash('altered', 'k') <> :hash AS changed, idempotency.machine_diagram('altered') LIKE '%C%' AS replaced;
INSERT INTO idempotency.token_keys SELECT id, created_at, rotated_at, secret, system, database FROM token_key;
SELECT status FROM idempotency.check_token(:'token', 's', 'p');
ALTER TABLE idempotency.token_keys ENABLE ALWAYS TRIGGER changed;
ALTER TABLE idempotency.secrets ENABLE ALWAYS TRIGGER changed;
ALTER TABLE idempotency.machines ENABLE ALWAYS TRIGGER changed;
SELECT status FROM idempotency.check_token(:'token', 's', 'p');
DELETE FROM idempotency.secrets WHERE created_at = (SELECT max(created_at) FROM idempotency.secrets);
SELECT idempotency.drop_machine('altered');

-- the outbox's sequence: its numbers only grow, for all sessions together, and
-- a crash brings none back
CREATE FUNCTION regress_alter.sequence(alteration text, repair text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  result text;
BEGIN
  EXECUTE 'ALTER SEQUENCE idempotency.outbox_id_seq ' || alteration;
  result := regress_app.try($_$idempotency.emit('altered', '1')$_$) || ' ' || regress_app.try($_$count(*) FROM idempotency.take('altered')$_$);
  EXECUTE 'ALTER SEQUENCE idempotency.outbox_id_seq ' || repair;
  RETURN result;
END $$;
SELECT alteration, regress_alter.sequence(alteration, repair)
FROM (VALUES ('CACHE 10', 'CACHE 1'), ('INCREMENT -1', 'INCREMENT 1'), ('CYCLE', 'NO CYCLE'), ('SET UNLOGGED', 'SET LOGGED')) v(alteration, repair);
ALTER SEQUENCE idempotency.outbox_id_seq CACHE 10;
SELECT idempotency.emit('altered', '1');
ALTER SEQUENCE idempotency.outbox_id_seq CACHE 1;
SELECT idempotency.emit('altered', '1') > 0 AS emitted;
SELECT idempotency.ack(id, attempt) FROM idempotency.take('altered');
ALTER SEQUENCE idempotency.outbox_id_seq RESTART;

DROP SCHEMA regress_alter CASCADE;
DROP ACCESS METHOD regress_heap;
TRUNCATE idempotency.keys;
SELECT idempotency.revoke_usage('regress_app');
DROP SCHEMA regress_app CASCADE;
DROP ROLE regress_app;
