-- Partitioned tables: through the root and through a partition, rows that move
-- between partitions, partitions that come and go.
\set VERBOSITY terse
\set SHOW_CONTEXT never
\pset null '(null)'
CREATE ROLE regress_parted;
SELECT idempotency.grant_usage('regress_parted');
CREATE SCHEMA mp AUTHORIZATION regress_parted;
SELECT idempotency.define_machine('mp', '{"initial": "NEW", "transitions": {"NEW": {"pay": "PAID"}, "PAID": {"ship": "SENT"}}}');
SET ROLE regress_parted;
SET search_path = mp;
CREATE FUNCTION code(command text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE command;
  RETURN 'none';
EXCEPTION WHEN OTHERS THEN
  RETURN SQLSTATE || ' ' || SQLERRM;
END $$;
-- the same table twice, without and with history; a partition whose columns
-- stand in another order, and one that is partitioned itself
CREATE TABLE plain (id int, month int, status text, n int DEFAULT 0, PRIMARY KEY (id, month)) PARTITION BY LIST (month);
CREATE TABLE plain_1 PARTITION OF plain FOR VALUES IN (1);
CREATE TABLE plain_2 (n int, gone int, status text, month int NOT NULL, id int NOT NULL);
ALTER TABLE plain_2 DROP gone;
ALTER TABLE plain ATTACH PARTITION plain_2 FOR VALUES IN (2);
CREATE TABLE plain_3 PARTITION OF plain FOR VALUES IN (3) PARTITION BY LIST (id);
CREATE TABLE plain_3_x PARTITION OF plain_3 DEFAULT;
SELECT idempotency.attach_machine('plain', 'status', 'mp');
CREATE TABLE logged (id int, month int, status text, n int DEFAULT 0, PRIMARY KEY (id, month)) PARTITION BY LIST (month);
CREATE TABLE logged_1 PARTITION OF logged FOR VALUES IN (1);
CREATE TABLE logged_2 (n int, gone int, status text, month int NOT NULL, id int NOT NULL);
ALTER TABLE logged_2 DROP gone;
ALTER TABLE logged ATTACH PARTITION logged_2 FOR VALUES IN (2);
CREATE TABLE logged_3 PARTITION OF logged FOR VALUES IN (3) PARTITION BY LIST (id);
CREATE TABLE logged_3_x PARTITION OF logged_3 DEFAULT;
SELECT idempotency.attach_machine('logged', 'status', 'mp', true);

SELECT format(c, t) AS command, code(format(c, t)) FROM unnest(ARRAY['plain', 'logged']) t, unnest(ARRAY[
  $$INSERT INTO %s SELECT i, m, 'NEW' FROM generate_series(1, 9) i, generate_series(1, 3) m$$,
  $$INSERT INTO %s VALUES (10, 2, 'PAID')$$,
  $$INSERT INTO %s_2 (id, month, status) VALUES (10, 2, 'PAID')$$,
  $$INSERT INTO %s_3_x VALUES (10, 3, NULL)$$,
  $$UPDATE %s SET status = 'SENT' WHERE id = 1$$,
  $$UPDATE %s_2 SET status = 'SENT' WHERE id = 1$$,
  $$UPDATE %s_2 SET status = 'PAID' WHERE id = 1$$,
  $$UPDATE %s SET status = 'PAID' WHERE id = 2$$,
  -- a row that moves is no new row: PAID to another month, and back
  $$UPDATE %s SET month = 1 WHERE (id, month) = (2, 2) AND false$$,
  $$DELETE FROM %s WHERE id = 3 AND month > 1$$,
  $$UPDATE %s SET status = 'PAID' WHERE id = 3$$,
  $$UPDATE %s SET month = 2 WHERE id = 3$$,
  $$UPDATE %s SET month = 3, n = 1 WHERE id = 3$$,
  -- and is judged if its state changes on the way
  $$UPDATE %s SET month = 1, status = 'NEW' WHERE id = 3$$,
  $$UPDATE %s SET month = 1, status = 'SENT' WHERE id = 3$$,
  $$WITH m AS (UPDATE %1$s SET month = 2 WHERE id = 3 RETURNING 1) INSERT INTO %1$s SELECT 30, 1, 'SENT' FROM m$$,
  $$WITH m AS (UPDATE %1$s SET month = 2 WHERE id = 3 RETURNING 1) INSERT INTO %1$s SELECT 30, 1, 'NEW' FROM m$$,
  $$MERGE INTO %s t USING (VALUES (30)) s (id) ON t.id = s.id WHEN MATCHED THEN UPDATE SET month = 3, status = 'PAID'$$,
  $$INSERT INTO %s VALUES (30, 3, 'SENT') ON CONFLICT (id, month) DO UPDATE SET n = 4$$]) WITH ORDINALITY c (c, nr)
ORDER BY t DESC, nr;
SELECT tableoid::regclass, id, month, status, n FROM plain WHERE id IN (3, 30) ORDER BY id;
SELECT idempotency.transition('plain', '{"id": 4, "month": 2}', 'NEW', 'PAID');
SELECT idempotency.transition('logged', '{"id": 4, "month": 2}', 'NEW', 'PAID');
SELECT idempotency.fire('logged_2', '{"id": 4, "month": 2}', 'ship');
SELECT idempotency.fire('logged', '{"id": 5, "month": 3}', 'pay', '{"month": 1, "id": 500}');
SELECT idempotency.fire('logged_3', '{"id": 6, "month": 3}', 'pay');
-- a moved row whose INSERT is swallowed leaves nothing behind for the next
CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.n = 9 THEN RETURN NULL; END IF; RETURN NEW; END $$;
CREATE TRIGGER s BEFORE INSERT ON plain FOR EACH ROW EXECUTE FUNCTION swallow();
BEGIN;
UPDATE plain SET month = 3, n = 9 WHERE id = 4 AND month = 2;
SELECT code($$INSERT INTO plain VALUES (40, 3, 'SENT')$$);
ROLLBACK;
-- nor for one that the same statement inserts; those that arrive are known
CREATE TRIGGER s BEFORE INSERT ON logged FOR EACH ROW EXECUTE FUNCTION swallow();
INSERT INTO plain SELECT i, 1, 'NEW' FROM generate_series(50, 55) i;
INSERT INTO logged SELECT i, 1, 'NEW' FROM generate_series(50, 55) i;
SELECT format(c, t) AS command, code(format(c, t)) FROM unnest(ARRAY['plain', 'logged']) t, unnest(ARRAY[
  $$WITH u AS (UPDATE %1$s SET month = 3, n = 9 WHERE id = 50 RETURNING 1) INSERT INTO %1$s SELECT 60, 3, 'PAID' FROM (SELECT count(*) FROM u) c$$,
  $$WITH u AS (UPDATE %1$s SET month = 3, n = 9 WHERE id = 50 RETURNING 1) INSERT INTO %1$s SELECT 61, 3, 'NEW' FROM (SELECT count(*) FROM u) c$$,
  $$WITH u AS (UPDATE %1$s SET month = 3 WHERE id = 51 RETURNING 1) INSERT INTO %1$s SELECT 62, 3, 'PAID' FROM (SELECT count(*) FROM u) c$$,
  $$WITH u AS (UPDATE %1$s SET month = 3, status = 'PAID' WHERE id = 51 RETURNING 1) INSERT INTO %1$s SELECT 63, 3, 'NEW' FROM (SELECT count(*) FROM u) c$$,
  $$MERGE INTO %1$s t USING (SELECT * FROM (VALUES (55), (66)) v (id) ORDER BY id) s ON t.id = s.id AND t.month = 1
    WHEN MATCHED THEN UPDATE SET month = 3, n = 9 WHEN NOT MATCHED THEN INSERT VALUES (s.id, 3, 'PAID')$$,
  $$UPDATE %1$s SET month = month + 1, status = 'PAID', n = n + 1 WHERE id IN (52, 53)$$,
  -- where a trigger may swallow it, a row that changes its key altogether is a new one
  $$UPDATE %1$s SET id = 64, month = 2, status = 'PAID' WHERE id = 54$$,
  $$UPDATE %1$s SET id = 64, month = 2 WHERE id = 54$$]) WITH ORDINALITY c (c, nr)
ORDER BY t DESC, nr;
SELECT tableoid::regclass, id, month, status, n FROM plain WHERE id BETWEEN 50 AND 69 ORDER BY id;
SELECT tableoid::regclass, id, month, status, n FROM logged WHERE id BETWEEN 50 AND 69 ORDER BY id;
DROP TRIGGER s ON logged;
RESET ROLE;
SELECT table_name, row_id, event, from_state, to_state FROM idempotency.transition_log ORDER BY id;
DELETE FROM idempotency.transition_log;
-- what is known of a row on its way is forgotten when it has arrived
BEGIN;
INSERT INTO plain SELECT i, 1, 'NEW' FROM generate_series(1001, 11000) i;
UPDATE plain SET month = 2 WHERE id > 1000;
SELECT total_bytes < 1000000 AS small FROM pg_backend_memory_contexts WHERE name = 'TopTransactionContext';
ROLLBACK;

-- partitions that come are guarded, those that go are not
SET ROLE regress_parted;
CREATE TABLE plain_4 PARTITION OF plain FOR VALUES IN (4);
CREATE TABLE plain_5 (LIKE plain);
ALTER TABLE plain_5 ADD PRIMARY KEY (id, month);
INSERT INTO plain_5 VALUES (1, 5, 'LOST');
ALTER TABLE plain ATTACH PARTITION plain_5 FOR VALUES IN (5);
SELECT code($$INSERT INTO plain_4 VALUES (1, 4, 'PAID')$$);
SELECT code($$INSERT INTO plain VALUES (2, 5, 'PAID')$$);
SELECT idempotency.detach_machine('plain_5', 'status');
ALTER TABLE plain DETACH PARTITION plain_2;
SELECT code($$INSERT INTO plain_2 (id, month, status) VALUES (99, 2, 'free')$$);
RESET ROLE;
SELECT * FROM idempotency.off_graph('plain');
SET ROLE regress_parted;
SELECT idempotency.detach_machine('plain', 'status');
SELECT idempotency.detach_machine('logged', 'status');
SELECT tgrelid::regclass, tgname FROM pg_trigger WHERE tgfoid = 'idempotency.guard_state'::regproc;

-- versions in partitions
ALTER TABLE logged ADD version bigint NOT NULL DEFAULT 1;
SELECT idempotency.attach_version('logged', 'version');
UPDATE logged SET month = 2 WHERE (id, month) = (500, 1);
SELECT tableoid::regclass, version FROM logged WHERE id = 500;
SELECT * FROM idempotency.update_if('logged', '{"id": 500, "month": 2}', 2, '{"month": 3}');
SELECT * FROM idempotency.update_if('logged', '{"id": 500, "month": 3}', 2, '{"month": 1}');
SELECT code($$UPDATE logged_3_x SET version = 9 WHERE id = 500$$);

RESET ROLE;
SET client_min_messages = warning;
DROP SCHEMA mp CASCADE;
SELECT idempotency.drop_machine('mp');
SELECT idempotency.revoke_usage('regress_parted');
DROP ROLE regress_parted;
