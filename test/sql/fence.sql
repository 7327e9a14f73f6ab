-- A fence on the resource: no UPDATE by a holder who was superseded.
\set VERBOSITY sqlstate
\pset null '(null)'
CREATE ROLE regress_fence;
CREATE ROLE regress_fence_writer;
SELECT idempotency.grant_usage('regress_fence');
CREATE SCHEMA regress_fence AUTHORIZATION regress_fence;
SET search_path = regress_fence;
SET ROLE regress_fence;

CREATE TABLE report (id int PRIMARY KEY, body text, "Fence" bigint, other bigint);
INSERT INTO report VALUES (1, 'old', NULL, 1), (2, 'old', 7, 1);
SELECT idempotency.attach_fence('report', 'Fence');

-- it must be assigned (an UPDATE that leaves it alone could be anybody's), not
-- NULL and not lowered; the same fence again is fine
UPDATE report SET body = 'x' WHERE id = 1;
UPDATE report SET body = 'x', "Fence" = NULL WHERE id = 1;
UPDATE report SET body = 'a', "Fence" = 5 WHERE id = 1;
UPDATE report SET body = 'b', "Fence" = 5 WHERE id = 1;
UPDATE report SET body = 'zombie', "Fence" = 4 WHERE id = 1;
UPDATE report SET body = 'c', "Fence" = 8;
UPDATE report SET body = 'd', "Fence" = "Fence" WHERE id = 1;
INSERT INTO report VALUES (1, 'x', 1) ON CONFLICT (id) DO UPDATE SET body = excluded.body;
INSERT INTO report VALUES (1, 'x', 1) ON CONFLICT (id) DO UPDATE SET body = excluded.body, "Fence" = excluded."Fence";
INSERT INTO report VALUES (1, 'e', 9) ON CONFLICT (id) DO UPDATE SET body = excluded.body, "Fence" = excluded."Fence";
SELECT * FROM report ORDER BY id;

-- INSERT and DELETE are not guarded
INSERT INTO report VALUES (3, 'new', NULL, NULL);
DELETE FROM report WHERE id = 3;

-- a writer needs no grant of ours
RESET ROLE;
GRANT USAGE ON SCHEMA regress_fence TO regress_fence_writer;
GRANT SELECT, UPDATE ON report TO regress_fence_writer;
SET ROLE regress_fence_writer;
UPDATE report SET body = 'writer', "Fence" = 1 WHERE id = 2;
UPDATE report SET body = 'writer', "Fence" = 9 WHERE id = 2;
SET ROLE regress_fence;

-- renamed columns, two fences, a table that is created anew
ALTER TABLE report RENAME "Fence" TO fence2;
UPDATE report SET fence2 = 1;
SELECT idempotency.attach_fence('report', 'other');
UPDATE report SET fence2 = 10;
UPDATE report SET fence2 = 10, other = 0;
UPDATE report SET fence2 = 10, other = 2;
SELECT idempotency.detach_fence('report', 'fence2');
UPDATE report SET fence2 = 1;
UPDATE report SET fence2 = 1, other = 2;
ALTER TABLE report DROP COLUMN other;
ALTER TABLE report DROP COLUMN other CASCADE;
SELECT tgname FROM pg_trigger WHERE tgrelid = 'report'::regclass ORDER BY tgname;
UPDATE report SET fence2 = 0;
DROP TABLE report;

-- with a lock: the work of the holder who was superseded goes with its writes
CREATE TABLE job (id int PRIMARY KEY, result text, fence bigint NOT NULL DEFAULT 0);
INSERT INTO job VALUES (1);
SELECT idempotency.attach_fence('job', 'fence');
SELECT idempotency.acquire_lock('job 1', '0') AS old \gset
SELECT idempotency.acquire_lock('job 1', '1 min') AS new \gset
UPDATE job SET result = 'new', fence = :new WHERE id = 1;
UPDATE job SET result = 'old', fence = :old WHERE id = 1;
SELECT result FROM job;
SELECT idempotency.detach_fence('job', 'fence');
SELECT count(*) FROM pg_trigger WHERE tgrelid = 'job'::regclass;
UPDATE job SET result = 'free';

-- partitions follow
CREATE TABLE parted (id int, body text, fence bigint, PRIMARY KEY (id)) PARTITION BY RANGE (id);
CREATE TABLE part1 (fence bigint, id int NOT NULL, body text);
ALTER TABLE parted ATTACH PARTITION part1 FOR VALUES FROM (0) TO (10);
SELECT idempotency.attach_fence('parted', 'fence');
CREATE TABLE part2 PARTITION OF parted FOR VALUES FROM (10) TO (20);
INSERT INTO parted VALUES (1, 'x', 5), (11, 'x', 5);
UPDATE parted SET body = 'y';
UPDATE parted SET body = 'y', fence = 4;
UPDATE part1 SET body = 'y', fence = 4;
UPDATE parted SET body = 'y', fence = 6;
SELECT * FROM parted ORDER BY id;

-- a foreign key's own updates are no work on the resource
CREATE TABLE author (id int PRIMARY KEY);
CREATE TABLE book (id int PRIMARY KEY, author int REFERENCES author ON DELETE SET NULL ON UPDATE CASCADE, title text, fence bigint,
  shelf int GENERATED ALWAYS AS (author % 10) STORED);
CREATE TABLE leaflet (id int, author int REFERENCES author ON DELETE SET NULL, fence bigint) PARTITION BY RANGE (id);
CREATE TABLE leaflet_1 (fence bigint, author int, id int);
ALTER TABLE leaflet ATTACH PARTITION leaflet_1 FOR VALUES FROM (0) TO (10);
INSERT INTO author VALUES (1), (2), (3);
INSERT INTO book VALUES (1, 1, 'a', 5), (2, 2, 'b', 5), (3, 3, 'c', 5);
INSERT INTO leaflet VALUES (1, 1, 5);
SELECT idempotency.attach_fence('book', 'fence'), idempotency.attach_fence('leaflet', 'fence');
DELETE FROM author WHERE id = 1;
UPDATE author SET id = 12 WHERE id = 2;
SELECT * FROM book ORDER BY id;
SELECT * FROM leaflet;
-- the same by hand is refused, and so is what a trigger does meanwhile
UPDATE book SET author = NULL WHERE id = 2;
CREATE FUNCTION touch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN UPDATE book SET title = 'zombie' WHERE id = 3; RETURN NULL; END $$;
CREATE TRIGGER touch AFTER UPDATE OF author ON book FOR EACH ROW EXECUTE FUNCTION touch();
DELETE FROM author WHERE id = 12;
SELECT id, author, title FROM book ORDER BY id;

-- bad input
SELECT idempotency.attach_fence(NULL, 'fence');
SELECT idempotency.attach_fence('job', NULL);
SELECT idempotency.attach_fence('job', 'nosuch');
SELECT idempotency.attach_fence('job', 'result');
SELECT idempotency.attach_fence('job', 'fence'), idempotency.attach_fence('job', 'fence');
SELECT idempotency.detach_fence('job', 'fence');
SELECT idempotency.attach_fence('part1', 'fence');
CREATE VIEW v AS SELECT * FROM job;
SELECT idempotency.attach_fence('v', 'fence');
SELECT idempotency.guard_fence();
RESET ROLE;
SELECT idempotency.grant_usage('regress_fence_writer');
SET ROLE regress_fence_writer;
SELECT idempotency.attach_fence('regress_fence.job', 'fence');

RESET ROLE;
DROP SCHEMA regress_fence CASCADE;
DELETE FROM idempotency.keys;
SELECT idempotency.revoke_usage(r) FROM unnest(ARRAY['regress_fence', 'regress_fence_writer']) r;
DROP ROLE regress_fence, regress_fence_writer;
