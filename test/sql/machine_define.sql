-- State machines: what define_machine accepts and refuses, the diagram, and
-- what attach_machine refuses.
\set VERBOSITY terse
\set SHOW_CONTEXT never
CREATE ROLE regress_machine_admin;
CREATE ROLE regress_machine_user;
SELECT idempotency.grant_admin('regress_machine_admin');
SELECT idempotency.grant_usage('regress_machine_user');
CREATE SCHEMA md AUTHORIZATION regress_machine_user;
SET search_path = md;

-- an application may not define, drop or audit
SET ROLE regress_machine_user;
SELECT idempotency.define_machine('m', '{"initial": "A", "transitions": {"A": ["B"]}}');
SELECT idempotency.drop_machine('m');
SELECT * FROM idempotency.off_graph('pg_class');
TABLE idempotency.machines;
TABLE idempotency.transition_log;

SET ROLE regress_machine_admin;
SELECT idempotency.define_machine('md order', '{"initial": "CREATED", "transitions": {"CREATED": {"pay": "PAID", "close": "CLOSED"}, "PAID": ["REFUNDED"]}}');
SELECT idempotency.machine_diagram('md order');
-- words that mean something else to Mermaid, quotes, a self-loop, two beginnings
SELECT idempotency.define_machine('md odd', '{"initial": ["end", "in transit"], "transitions": {"end": {"a: \"b\"": "in transit"}, "in transit": {"touch": "in transit"}, "s1": [], "in  transit": []}}');
SELECT idempotency.define_machine('md odd', '{"initial": ["end", "in transit"], "transitions": {"end": {"a: \"b\"": "in transit"}, "in transit": {"touch": "in transit", "lose": "s1"}, "s1": ["x#y"]}}');
SELECT idempotency.machine_diagram('md odd');

-- malformed: refused before any write
\set VERBOSITY default
SELECT idempotency.define_machine('md bad', '[]');
SELECT idempotency.define_machine('md bad', '{"initial": "A"}');
SELECT idempotency.define_machine('md bad', '{"transitions": {"A": ["B"]}}');
SELECT idempotency.define_machine('md bad', '{"initial": [], "transitions": {"A": ["B"]}}');
SELECT idempotency.define_machine('md bad', '{"initial": null, "transitions": {"A": ["B"]}}');
SELECT idempotency.define_machine('md bad', '{"initial": "A", "transitions": {"A": "B"}}');
SELECT idempotency.define_machine('md bad', '{"initial": "A", "transitions": {"A": [null]}}');
SELECT idempotency.define_machine('md bad', '{"initial": "A", "transitions": {"A": {"go": ["B", "C"]}}}');
SELECT idempotency.define_machine('md bad', '{"initial": "A", "transitions": {"A": [""]}}');
SELECT idempotency.define_machine('md bad', '{"initial": "A", "transitions": {"A": {"": "B"}}}');
SELECT idempotency.define_machine('md bad', '{"initial": "A", "transitions": {"A": ["B"]}, "final": "B"}');
SELECT idempotency.define_machine('md bad', jsonb_build_object('initial', 'A', 'transitions', jsonb_build_object('A', ARRAY[repeat('x', 257)])));
-- an initial state that is a typing error, unreachable states, cycles
SELECT idempotency.define_machine('md bad', '{"initial": ["A", "a"], "transitions": {"A": ["B"]}}');
SELECT idempotency.define_machine('md bad', '{"initial": "A", "transitions": {"A": ["B"], "C": ["B"]}}');
SELECT idempotency.define_machine('md bad', '{"initial": "A", "transitions": {"A": ["B"], "C": []}}');
SELECT idempotency.define_machine('md bad', '{"initial": "A", "transitions": {"A": ["B"], "B": ["C"], "C": ["B", "D"]}}');
SELECT idempotency.define_machine('md cyclic', '{"initial": "A", "transitions": {"A": ["B"], "B": ["C"], "C": ["B", "D"]}}', cyclic => true);
SELECT idempotency.define_machine('md loop', '{"initial": "A", "transitions": {"A": ["A"]}}');
-- the same again is nothing new
SELECT idempotency.define_machine('md loop', '{"transitions": {"A": ["A"]}, "initial": "A"}');
SELECT idempotency.define_machine('md loop', '{"initial": "A", "transitions": {"A": ["A"]}}', true);
-- a long one takes no time
SET statement_timeout = '5s';
SELECT idempotency.define_machine('md long', jsonb_build_object('initial', 's1', 'transitions',
  (SELECT jsonb_object_agg('s' || i, jsonb_build_array('s' || i + 1)) FROM generate_series(1, 8000) i)));
SELECT idempotency.define_machine('md bad', jsonb_build_object('initial', 's1', 'transitions',
  (SELECT jsonb_object_agg('s' || i, jsonb_build_array('s' || i % 8000 + 1)) FROM generate_series(1, 8000) i)));
RESET statement_timeout;
SELECT length(idempotency.drop_machine('md long')::text) > 100000 AS long;
-- names
SELECT idempotency.define_machine(NULL, '{}');
SELECT idempotency.define_machine('', '{}');
SELECT idempotency.define_machine(repeat('x', 257), '{}');
SELECT idempotency.define_machine('md bad', NULL);
SELECT idempotency.define_machine('md bad', '{"initial": "A", "transitions": {"A": ["B"]}}', NULL);
SELECT idempotency.machine_diagram('md bad');
SELECT idempotency.machine_diagram(NULL);
SELECT idempotency.drop_machine('md bad');
SELECT idempotency.drop_machine('md loop');
SELECT idempotency.machine_diagram('md loop');
-- a rollback takes a definition, and its cached copy, back
BEGIN;
SELECT idempotency.define_machine('md cyclic', '{"initial": "X", "transitions": {"X": ["Y"]}}');
SAVEPOINT s;
SELECT idempotency.define_machine('md cyclic', '{"initial": "Z", "transitions": {"Z": ["Y"]}}');
SELECT idempotency.machine_diagram('md cyclic') ~ 'Z' AS z;
ROLLBACK TO s;
SELECT idempotency.machine_diagram('md cyclic') ~ 'X' AS x;
ROLLBACK;
SELECT idempotency.machine_diagram('md cyclic') ~ 'D' AS d;

-- gone by TRUNCATE, in this session and by another role
RESET ROLE;
BEGIN;
TRUNCATE idempotency.machines;
SELECT idempotency.machine_diagram('md cyclic');
ROLLBACK;
SELECT idempotency.machine_diagram('md cyclic') ~ 'D' AS d;
SET ROLE regress_machine_admin;

-- trigger functions called by hand
SELECT idempotency.guard_state();
RESET ROLE;
SELECT idempotency.table_changed();
SELECT idempotency.guard_version();

-- attach: what cannot be guarded
SET ROLE regress_machine_user;
CREATE TABLE ok (id int PRIMARY KEY, status text, n int);
CREATE TABLE nokey (id int, status text);
CREATE TABLE gen (id int PRIMARY KEY, base text, status text GENERATED ALWAYS AS (base) STORED);
CREATE TABLE num (id int PRIMARY KEY, status int);
CREATE TABLE parent (id int PRIMARY KEY, status text);
CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent);
CREATE TABLE ruled (id int PRIMARY KEY, status text);
CREATE RULE r AS ON UPDATE TO ruled DO ALSO NOTHING;
CREATE TABLE parted (id int, status text, PRIMARY KEY (id, status)) PARTITION BY LIST (status);
CREATE TABLE sub (id int, status text, PRIMARY KEY (id, status)) PARTITION BY RANGE (id);
CREATE TABLE sub_1 PARTITION OF sub FOR VALUES FROM (1) TO (10) PARTITION BY LIST (status);
CREATE TABLE parts (id int PRIMARY KEY, status text) PARTITION BY RANGE (id);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (1) TO (10);
CREATE VIEW v AS SELECT * FROM ok;
CREATE INDEX ok_n ON ok (n);
RESET ROLE;
CREATE TABLE md.foreign_owner (id int PRIMARY KEY, status text);
GRANT ALL ON md.foreign_owner TO regress_machine_user;
SET ROLE regress_machine_user;
SELECT idempotency.attach_machine('nokey', 'status', 'md order');
SELECT idempotency.attach_machine('gen', 'status', 'md order');
SELECT idempotency.attach_machine('num', 'status', 'md order');
SELECT idempotency.attach_machine('parent', 'status', 'md order');
SELECT idempotency.attach_machine('child', 'status', 'md order');
-- a child that is gone does not count, whether or not VACUUM has been there
DROP TABLE child;
SELECT idempotency.attach_machine('parent', 'status', 'md order');
SELECT idempotency.detach_machine('parent', 'status');
SELECT idempotency.attach_machine('ruled', 'status', 'md order');
SELECT idempotency.attach_machine('parted', 'status', 'md order');
SELECT idempotency.attach_machine('sub', 'status', 'md order');
SELECT idempotency.attach_machine('parts_1', 'status', 'md order');
SELECT idempotency.attach_machine('v', 'status', 'md order');
SELECT idempotency.attach_machine('ok_n', 'n', 'md order');
SELECT idempotency.attach_machine('foreign_owner', 'status', 'md order');
SELECT idempotency.detach_machine('foreign_owner', 'status');
SELECT idempotency.attach_machine('ok', 'nosuch', 'md order');
SELECT idempotency.attach_machine('ok', 'ctid', 'md order');
SELECT idempotency.attach_machine('ok', 'status', 'md nosuch');
SELECT idempotency.attach_machine(0, 'status', 'md order');
SELECT idempotency.attach_machine(NULL, 'status', 'md order');
SELECT idempotency.attach_machine('ok', NULL, 'md order');
SELECT idempotency.attach_machine('ok', 'status', NULL);
SELECT idempotency.attach_machine('ok', 'status', 'md order', NULL);
SELECT idempotency.detach_machine('ok', 'status');
-- rows off the graph, counted, also those that row security hides
INSERT INTO ok VALUES (1, 'LOST'), (2, 'PAID'), (3, NULL), (4, 'paid');
SELECT idempotency.attach_machine('ok', 'status', 'md order');
DELETE FROM ok WHERE status <> 'PAID';
SELECT idempotency.attach_machine('ok', 'status', 'md order');
DELETE FROM ok WHERE status IS NULL;
ALTER TABLE ok ENABLE ROW LEVEL SECURITY;
ALTER TABLE ok FORCE ROW LEVEL SECURITY;
SELECT idempotency.attach_machine('ok', 'status', 'md order');
ALTER TABLE ok NO FORCE ROW LEVEL SECURITY;
SHOW row_security;
SELECT idempotency.attach_machine('ok', 'status', 'md order');
SHOW row_security;
SELECT idempotency.attach_machine('ok', 'status', 'md order');
SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = 'ok'::regclass ORDER BY 1;
-- a unique index over the state makes foreign key checks hold moves up
ALTER TABLE nokey ADD PRIMARY KEY (id), ADD UNIQUE (id, status);
SELECT idempotency.attach_machine('nokey', 'status', 'md order');

-- attached: not to be dropped; detached: nothing is left
SET ROLE regress_machine_admin;
SELECT idempotency.drop_machine('md order');
SET ROLE regress_machine_user;
SELECT idempotency.detach_machine('nokey', 'status');
SELECT idempotency.detach_machine('ok', 'status');
SELECT idempotency.detach_machine('ok', 'status');
SELECT count(*) FROM pg_trigger WHERE tgrelid IN ('ok'::regclass, 'nokey'::regclass);
SELECT * FROM idempotency.transition('ok', 2, 'PAID', 'REFUNDED');
SET ROLE regress_machine_admin;
SELECT idempotency.drop_machine('md order');
SELECT idempotency.drop_machine('md odd');
SELECT idempotency.drop_machine('md cyclic');

RESET ROLE;
\set VERBOSITY terse
SET client_min_messages = warning;
DROP SCHEMA md CASCADE;
SELECT idempotency.revoke_usage('regress_machine_admin');
SELECT idempotency.revoke_usage('regress_machine_user');
DROP ROLE regress_machine_admin, regress_machine_user;
