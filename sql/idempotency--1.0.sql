/* idempotency 1.0: install script */

-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION idempotency" to load this file. \quit

-- The schema is made here, not by the control file: so it belongs to the
-- extension, and nobody who made it before could plant functions beside ours.
CREATE SCHEMA idempotency;
-- What the C code writes past the executor is a heap.
SET LOCAL default_table_access_method = heap;
COMMENT ON SCHEMA idempotency IS 'idempotency: keys, state machines, versions, one-time tokens, leases and the outbox';

----------------------------------------------------------------------------
-- Secrets
----------------------------------------------------------------------------

CREATE FUNCTION idempotency.table_changed() RETURNS trigger
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_table_changed';
COMMENT ON FUNCTION idempotency.table_changed() IS 'internal: has every session read the table again; error: 39P01';

-- What the names of locks and the digests of requests are made with: 244 random
-- bits.  The newest is used; the others are there for what was stored under
-- them.  The id is random too, so a restored dump can bring its own.
CREATE TABLE idempotency.secrets (
  id         integer     PRIMARY KEY DEFAULT pg_catalog.uuid_hash(pg_catalog.gen_random_uuid()),
  created_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
  secret     bytea       NOT NULL DEFAULT pg_catalog.sha256(
    pg_catalog.uuid_send(pg_catalog.gen_random_uuid()) || pg_catalog.uuid_send(pg_catalog.gen_random_uuid()))
);
COMMENT ON TABLE idempotency.secrets IS 'internal: what the names of locks and the digests of requests are made with, secret; INSERT ... DEFAULT VALUES makes a new one, to be used while no session is at work';
SELECT pg_catalog.pg_extension_config_dump('idempotency.secrets', '');

CREATE TRIGGER changed
AFTER INSERT OR UPDATE OR DELETE ON idempotency.secrets
FOR EACH ROW EXECUTE FUNCTION idempotency.table_changed();
ALTER TABLE idempotency.secrets ENABLE ALWAYS TRIGGER changed;
COMMENT ON TRIGGER changed ON idempotency.secrets IS 'internal: has every session read the secrets again';

INSERT INTO idempotency.secrets DEFAULT VALUES;

----------------------------------------------------------------------------
-- Keys
----------------------------------------------------------------------------

-- One row per finished operation, and per lease.  Written by the C code, past
-- the executor; never touched directly.
CREATE TABLE idempotency.keys (
  created_at      timestamptz NOT NULL,
  expires_at      timestamptz NOT NULL,
  status          "char" NOT NULL,
  key             text COLLATE "C" NOT NULL,
  scope           text COLLATE "C" NOT NULL,
  response        text,
  meta            jsonb,
  fingerprint     bytea,
  fence           bigint,
  deadline        timestamptz,
  attempt         integer,
  checkpoint      text,
  checkpoint_data jsonb,
  PRIMARY KEY (key, scope)
);
-- For in_flight: the C code skips it for every row that is not leased.
CREATE INDEX keys_leased ON idempotency.keys (deadline) WHERE status = 'l';
COMMENT ON TABLE idempotency.keys IS 'internal: one row per finished or leased key';
COMMENT ON COLUMN idempotency.keys.expires_at IS 'from here on the row counts as absent';
COMMENT ON COLUMN idempotency.keys.status IS 'c completed, f failed, l leased, r released';
COMMENT ON COLUMN idempotency.keys.fingerprint IS 'digest of the request, under one of idempotency.secrets; NULL: none was given';
SELECT pg_catalog.pg_extension_config_dump('idempotency.keys', '');

CREATE TYPE idempotency.claim_result AS (
  status   text,
  response text,
  meta     jsonb
);
COMMENT ON TYPE idempotency.claim_result IS 'status: claimed, completed, failed, in_progress, held or mismatch; response and meta as stored, with completed and failed';

CREATE TYPE idempotency.run_result AS (
  status   text,
  replayed boolean,
  response text,
  meta     jsonb
);
COMMENT ON TYPE idempotency.run_result IS 'status: completed, failed, in_progress, held, mismatch or released; replayed: the answer was stored before';

CREATE TYPE idempotency.answer AS (
  response text,
  meta     jsonb
);
COMMENT ON TYPE idempotency.answer IS 'what a function that run() calls may return, so that meta is stored beside the response';

CREATE TYPE idempotency.key_record AS (
  status          text,
  response        text,
  meta            jsonb,
  fence           bigint,
  deadline        timestamptz,
  attempt         integer,
  checkpoint      text,
  checkpoint_data jsonb,
  created_at      timestamptz,
  expires_at      timestamptz
);
COMMENT ON TYPE idempotency.key_record IS 'what is stored under a key; all NULL: nothing';

CREATE TYPE idempotency.lease_result AS (
  status          text,
  response        text,
  meta            jsonb,
  fence           bigint,
  deadline        timestamptz,
  attempt         integer,
  checkpoint      text,
  checkpoint_data jsonb
);
COMMENT ON TYPE idempotency.lease_result IS 'status, response and meta as in claim_result; with claimed the fence, the deadline, which attempt this is and the last checkpoint of the one before; with in_progress the deadline and the attempt of the lease that is live, if it is one';

CREATE FUNCTION idempotency.claim(
  scope       text,
  key         text,
  request     jsonb    DEFAULT NULL,
  ttl         interval DEFAULT NULL,
  wait        interval DEFAULT NULL,
  fingerprint text     DEFAULT NULL
) RETURNS idempotency.claim_result
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_claim';
COMMENT ON FUNCTION idempotency.claim(text, text, jsonb, interval, interval, text) IS 'may this transaction do the work? request, or fingerprint in its place: compared with the first one; ttl: how long to replay; wait: for a rival, ''0'': not at all; NULL: no comparison, the settings; errors: 0A000, 22004, 22008, 22023, 25006, 40001, 40P01, 55000, 55P03';

CREATE FUNCTION idempotency.complete(
  scope    text,
  key      text,
  response text     DEFAULT NULL,
  meta     jsonb    DEFAULT NULL,
  fence    bigint   DEFAULT NULL,
  ttl      interval DEFAULT NULL
) RETURNS timestamptz
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_complete';
COMMENT ON FUNCTION idempotency.complete(text, text, text, jsonb, bigint, interval) IS 'stores the answer of this transaction''s claim, to be replayed byte for byte, and returns until when; NULL is an answer too; fence: of a lease; ttl: how long it is replayed, NULL is the claim''s; errors: IK002, IK006, as claim()';

CREATE FUNCTION idempotency.complete(
  scope    text,
  key      text,
  response anyelement,
  meta     jsonb    DEFAULT NULL,
  fence    bigint   DEFAULT NULL,
  ttl      interval DEFAULT NULL
) RETURNS timestamptz
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_complete';
COMMENT ON FUNCTION idempotency.complete(text, text, anyelement, jsonb, bigint, interval) IS 'the same for a response of any type: json and jsonb as their text, a row as JSON, anything else by its output function';

CREATE FUNCTION idempotency.fail(
  scope    text,
  key      text,
  response text     DEFAULT NULL,
  meta     jsonb    DEFAULT NULL,
  fence    bigint   DEFAULT NULL,
  ttl      interval DEFAULT NULL
) RETURNS timestamptz
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_fail';
COMMENT ON FUNCTION idempotency.fail(text, text, text, jsonb, bigint, interval) IS 'as complete(), and the replay''s status is failed; what the transaction wrote stays: ROLLBACK TO a savepoint first if it should not';

CREATE FUNCTION idempotency.fail(
  scope    text,
  key      text,
  response anyelement,
  meta     jsonb    DEFAULT NULL,
  fence    bigint   DEFAULT NULL,
  ttl      interval DEFAULT NULL
) RETURNS timestamptz
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_fail';
COMMENT ON FUNCTION idempotency.fail(text, text, anyelement, jsonb, bigint, interval) IS 'the same for a response of any type, as complete()';

CREATE FUNCTION idempotency.release(
  scope text,
  key   text,
  fence bigint DEFAULT NULL
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_release';
COMMENT ON FUNCTION idempotency.release(text, text, bigint) IS 'gives the claim back, the next caller runs; false: there was nothing to give back; errors: IK002, as claim()';

CREATE FUNCTION idempotency.once(
  scope text,
  key   text,
  ttl   interval DEFAULT NULL
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_once';
COMMENT ON FUNCTION idempotency.once(text, text, interval) IS 'claims and completes in one: true the first time only, later and within this transaction''s own claim false; errors: as claim(), and 55P03 while it is in progress elsewhere';

CREATE FUNCTION idempotency.run(
  scope         text,
  key           text,
  function      text,
  request       jsonb    DEFAULT NULL,
  ttl           interval DEFAULT NULL,
  wait          interval DEFAULT NULL,
  record_errors boolean  DEFAULT false,
  fingerprint   text     DEFAULT NULL
) RETURNS idempotency.run_result
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_run';
COMMENT ON FUNCTION idempotency.run(text, text, text, jsonb, interval, interval, boolean, text) IS 'claims, calls function(request jsonb) as the caller, stores its response or idempotency.answer; record_errors: an error of the request (P0001, 22, 23, your own) too, as failed; the rest: as claim(), 0A000, 42501, 42601, 42602, 42883, the function''s errors';

CREATE FUNCTION idempotency.lookup(
  scope text,
  key   text
) RETURNS idempotency.key_record
LANGUAGE c PARALLEL RESTRICTED AS 'MODULE_PATHNAME', 'idempotency_lookup';
COMMENT ON FUNCTION idempotency.lookup(text, text) IS 'reads what is stored under the key, never claims; unknown or expired: all NULL; held: this transaction''s own open claim, with attempt and checkpoint of a lease that it took over; errors: 22004, 22023, 55000, on a cluster 0A000, 25006, 40001';

CREATE FUNCTION idempotency.forget(
  scope text,
  key   text
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_forget';
COMMENT ON FUNCTION idempotency.forget(text, text) IS 'admin: removes a finished record, so that the key can be used anew; waits for a rival; false: there was none; errors: as claim()';

-- Leases

CREATE FUNCTION idempotency.lease(
  scope       text,
  key         text,
  lease       interval,
  request     jsonb    DEFAULT NULL,
  ttl         interval DEFAULT NULL,
  wait        interval DEFAULT NULL,
  fingerprint text     DEFAULT NULL
) RETURNS idempotency.lease_result
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_lease';
COMMENT ON FUNCTION idempotency.lease(text, text, interval, jsonb, interval, interval, text) IS 'claims the key over transactions, until now + lease (at most idempotency.max_lease); request, ttl, wait, fingerprint: as claim(); errors: as claim()';

CREATE FUNCTION idempotency.extend(
  scope text,
  key   text,
  fence bigint,
  lease interval
) RETURNS timestamptz
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_extend';
COMMENT ON FUNCTION idempotency.extend(text, text, bigint, interval) IS 'the new deadline: now + lease, at most idempotency.max_lease after the grant; NULL: too late, the lease is over; errors: IK002, IK006, as claim()';

CREATE FUNCTION idempotency.checkpoint(
  scope text,
  key   text,
  fence bigint,
  name  text,
  data  jsonb DEFAULT NULL
) RETURNS timestamptz
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_checkpoint';
COMMENT ON FUNCTION idempotency.checkpoint(text, text, bigint, text, jsonb) IS 'notes how far the leased work has come, for the next attempt, and returns the deadline; errors: IK002, IK006, as claim()';

CREATE FUNCTION idempotency.acquire_lock(
  name  text,
  lease interval,
  wait  interval DEFAULT '0'
) RETURNS bigint
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_acquire_lock';
COMMENT ON FUNCTION idempotency.acquire_lock(text, interval, interval) IS 'a lock that outlives the transaction, until now + lease: its fence, or NULL if somebody holds it; wait: for a rival transaction, NULL is idempotency.default_wait; errors: as lease()';

CREATE FUNCTION idempotency.renew_lock(
  name  text,
  fence bigint,
  lease interval
) RETURNS timestamptz
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_renew_lock';
COMMENT ON FUNCTION idempotency.renew_lock(text, bigint, interval) IS 'the new deadline of the lock, as extend(); NULL: too late; errors: as extend()';

CREATE FUNCTION idempotency.release_lock(
  name  text,
  fence bigint
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_release_lock';
COMMENT ON FUNCTION idempotency.release_lock(text, bigint) IS 'gives the lock back; false: there was nothing to give back; errors: IK002, as claim()';

-- The caller's own unique index as the judge.
CREATE FUNCTION idempotency.insert_once(
  target   anyelement,
  new_row  jsonb,
  conflict text[] DEFAULT NULL
) RETURNS TABLE (created boolean, stored anyelement)
LANGUAGE c ROWS 1 AS 'MODULE_PATHNAME', 'idempotency_insert_once';
COMMENT ON FUNCTION idempotency.insert_once(anyelement, jsonb, text[]) IS 'inserts new_row as the caller, or returns the row that was there, as it is now; target: NULL::the_table; conflict: the unique index''s columns, NULL: the only one in new_row; errors: 22004, 22023, 27000, 42501, 42703, 42809, 42P01, 42P10, INSERT''s';

CREATE FUNCTION idempotency.guard_fence() RETURNS trigger
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_guard_fence';
COMMENT ON FUNCTION idempotency.guard_fence() IS 'internal: trigger of attach_fence(): refuses an UPDATE that does not assign the fence column, or lowers it; errors: IK002, 39P01';

CREATE FUNCTION idempotency.attach_fence(
  rel          regclass,
  fence_column name
) RETURNS name
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_attach_fence';
COMMENT ON FUNCTION idempotency.attach_fence(regclass, name) IS 'from now on every UPDATE of a table that you own must assign this bigint column, not NULL and not lower than it was, but for what a foreign key does by itself; returns the name of its trigger; errors: 0A000, 22004, 39P01, 42501, 42703, 42710, 42804, 42P01';

CREATE FUNCTION idempotency.detach_fence(
  rel          regclass,
  fence_column name
) RETURNS name
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_detach_fence';
COMMENT ON FUNCTION idempotency.detach_fence(regclass, name) IS 'takes the fence off the column again; returns the name that its trigger had; errors: IK007 it is none, 0A000, 22004, 42501, 42703, 42P01';

----------------------------------------------------------------------------
-- State machines
----------------------------------------------------------------------------

-- Definitions as they were given.
CREATE TABLE idempotency.machines (
  name       text COLLATE "C" PRIMARY KEY CHECK (octet_length(name) BETWEEN 1 AND 256),
  definition jsonb NOT NULL,
  cyclic     boolean NOT NULL
);
COMMENT ON TABLE idempotency.machines IS 'admin: one row per state machine, as defined';
SELECT pg_catalog.pg_extension_config_dump('idempotency.machines', '');

-- ALWAYS: a restore or a subscription may run as a replica.
CREATE TRIGGER changed
AFTER INSERT OR UPDATE OR DELETE ON idempotency.machines
FOR EACH ROW EXECUTE FUNCTION idempotency.table_changed();
ALTER TABLE idempotency.machines ENABLE ALWAYS TRIGGER changed;
COMMENT ON TRIGGER changed ON idempotency.machines IS 'internal: has every session read the machines again';

CREATE SEQUENCE idempotency.transition_log_id_seq;
CREATE TABLE idempotency.transition_log (
  id         bigint PRIMARY KEY DEFAULT pg_catalog.nextval('idempotency.transition_log_id_seq'),
  table_name text NOT NULL,
  row_id     jsonb NOT NULL,
  machine    text COLLATE "C" NOT NULL,
  event      text,
  from_state text NOT NULL,
  to_state   text NOT NULL,
  changed_at timestamptz NOT NULL,
  changed_by text NOT NULL
);
ALTER SEQUENCE idempotency.transition_log_id_seq OWNED BY idempotency.transition_log.id;
COMMENT ON SEQUENCE idempotency.transition_log_id_seq IS 'internal: numbers the history';
COMMENT ON TABLE idempotency.transition_log IS 'admin: the moves in tables whose machine is attached with history';
COMMENT ON COLUMN idempotency.transition_log.table_name IS 'qualified, and quoted where it must be, as it was when the row moved';
COMMENT ON COLUMN idempotency.transition_log.row_id IS 'primary key: its value, or for several columns an object; times in UTC';
COMMENT ON COLUMN idempotency.transition_log.event IS 'that fire() asked for, or the only one of the edge that transition() took; NULL: an edge with several events or none, or a plain UPDATE';
COMMENT ON COLUMN idempotency.transition_log.changed_at IS 'by the clock, not the start of the transaction';
COMMENT ON COLUMN idempotency.transition_log.changed_by IS 'the role that ran the UPDATE';
SELECT pg_catalog.pg_extension_config_dump('idempotency.transition_log', '');
SELECT pg_catalog.pg_extension_config_dump('idempotency.transition_log_id_seq', '');

CREATE TYPE idempotency.transition_result AS (
  outcome    text,
  applied    boolean,
  from_state text,
  state      text
);
COMMENT ON TYPE idempotency.transition_result IS 'outcome: applied, already, conflict, not_found, not_permitted or suppressed; applied: this call moved the row; from_state: the state it left, if applied; state: the row''s state now, NULL if not_found';

CREATE FUNCTION idempotency.define_machine(
  name       text,
  definition jsonb,
  cyclic     boolean DEFAULT false
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_define_machine';
COMMENT ON FUNCTION idempotency.define_machine(text, jsonb, boolean) IS 'admin: defines a state machine or replaces it, for every session at once; definition: {"initial": "A", "transitions": {"A": {"event": "B"}, "B": ["C"]}}; cyclic: rows may come back to a state; false: it was defined so already; errors: 22004, 22023, 25006, 40001';

CREATE FUNCTION idempotency.drop_machine(name text) RETURNS jsonb
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_drop_machine';
COMMENT ON FUNCTION idempotency.drop_machine(text) IS 'admin: forgets a state machine, and returns its definition; errors: IK007 unknown, 2BP01 still attached, 22004, 22023, 25006, 40001';

CREATE FUNCTION idempotency.guard_state() RETURNS trigger
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_guard_state';
COMMENT ON FUNCTION idempotency.guard_state() IS 'internal: trigger of attach_machine(): refuses moves off the graph, and writes the history; errors: IK003, IK005, IK007, 39P01';

CREATE FUNCTION idempotency.attach_machine(
  rel          regclass,
  state_column name,
  machine      text,
  history      boolean DEFAULT false
) RETURNS name
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_attach_machine';
COMMENT ON FUNCTION idempotency.attach_machine(regclass, name, text, boolean) IS 'keeps the state column of your table on the machine''s graph, for every writer; history: also in transition_log; returns the name of its trigger; errors: IK003 rows off the graph, IK007, 0A000, 22004, 39P01, 42501, 42703, 42710, 42P01, 42P10';

CREATE FUNCTION idempotency.detach_machine(
  rel          regclass,
  state_column name
) RETURNS name
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_detach_machine';
COMMENT ON FUNCTION idempotency.detach_machine(regclass, name) IS 'takes the machine off the column again; returns the name that its trigger had; errors: IK007 none is attached, 0A000, 22004, 2BP01, 42501, 42703, 42P01';

CREATE FUNCTION idempotency.transition(
  rel          regclass,
  id           text,
  from_state   text,
  to_state     text,
  changes      jsonb DEFAULT NULL,
  state_column name  DEFAULT NULL
) RETURNS idempotency.transition_result
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_transition';
COMMENT ON FUNCTION idempotency.transition(regclass, text, text, text, jsonb, name) IS 'moves a row from from_state (NULL: any) along an edge; id: primary key, of several columns an object; changes: more columns; errors: IK003, IK005, IK007, 0A000, 21000, 22004, 22023, 25006, 39P01, 40001, 42702, 42703, 42809, 42P01, 42P10, UPDATE''s';

CREATE FUNCTION idempotency.transition(
  rel          regclass,
  id           anyelement,
  from_state   text,
  to_state     text,
  changes      jsonb DEFAULT NULL,
  state_column name  DEFAULT NULL
) RETURNS idempotency.transition_result
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_transition';
COMMENT ON FUNCTION idempotency.transition(regclass, anyelement, text, text, jsonb, name) IS 'the same for an id of any type';

CREATE FUNCTION idempotency.fire(
  rel          regclass,
  id           text,
  event        text,
  changes      jsonb DEFAULT NULL,
  state_column name  DEFAULT NULL
) RETURNS idempotency.transition_result
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_fire';
COMMENT ON FUNCTION idempotency.fire(regclass, text, text, jsonb, name) IS 'moves a row along the edge that the event names in its state; the rest as transition()';

CREATE FUNCTION idempotency.fire(
  rel          regclass,
  id           anyelement,
  event        text,
  changes      jsonb DEFAULT NULL,
  state_column name  DEFAULT NULL
) RETURNS idempotency.transition_result
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_fire';
COMMENT ON FUNCTION idempotency.fire(regclass, anyelement, text, jsonb, name) IS 'the same for an id of any type';

CREATE FUNCTION idempotency.next_events(
  rel          regclass,
  id           text,
  state_column name DEFAULT NULL
) RETURNS TABLE (event text, to_state text)
LANGUAGE c STABLE ROWS 10 AS 'MODULE_PATHNAME', 'idempotency_next_events';
COMMENT ON FUNCTION idempotency.next_events(regclass, text, name) IS 'the edges that lead from the row''s state, event NULL: that of a transition() only; no row: the caller sees none with this id, or its state is final; errors: IK007, 0A000, 22004, 22023, 39P01, 42702, 42703, 42809, 42P01, 42P10, SELECT''s';

CREATE FUNCTION idempotency.next_events(
  rel          regclass,
  id           anyelement,
  state_column name DEFAULT NULL
) RETURNS TABLE (event text, to_state text)
LANGUAGE c STABLE ROWS 10 AS 'MODULE_PATHNAME', 'idempotency_next_events';
COMMENT ON FUNCTION idempotency.next_events(regclass, anyelement, name) IS 'the same for an id of any type';

CREATE FUNCTION idempotency.purge_history(
  older_than interval,
  max        integer DEFAULT 10000
) RETURNS bigint
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_purge_history';
COMMENT ON FUNCTION idempotency.purge_history(interval, integer) IS 'admin: looks at the max oldest rows of transition_log, removes those that are older, and says how many; fewer than max: that was all; errors: 22004, 22008, 22023, 25006, 55000';

CREATE FUNCTION idempotency.machine_diagram(name text) RETURNS text
LANGUAGE c STABLE AS 'MODULE_PATHNAME', 'idempotency_machine_diagram';
COMMENT ON FUNCTION idempotency.machine_diagram(text) IS 'the machine as a Mermaid state diagram; errors: IK007 unknown, 22004, 22023';

CREATE FUNCTION idempotency.off_graph(rel regclass)
RETURNS TABLE (id jsonb, state text, reason text)
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_off_graph';
COMMENT ON FUNCTION idempotency.off_graph(regclass) IS 'admin: the rows whose state no machine attached to the table knows, read with the caller''s rights; errors: IK007 none is attached, 22004, 39P01, 42501, 42809, 42P01, 42P10';

----------------------------------------------------------------------------
-- Versions
----------------------------------------------------------------------------

CREATE TYPE idempotency.update_result AS (
  outcome text,
  applied boolean,
  version bigint
);
COMMENT ON TYPE idempotency.update_result IS 'outcome: applied, conflict, not_found, not_permitted or suppressed; applied: this call updated the row; version: the row''s version now, NULL if not_found';

CREATE FUNCTION idempotency.guard_version() RETURNS trigger
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_guard_version';
COMMENT ON FUNCTION idempotency.guard_version() IS 'internal: trigger of attach_version(): counts the updates of each row; errors: IK004, 22003, 39P01';

CREATE FUNCTION idempotency.attach_version(
  rel            regclass,
  version_column name
) RETURNS name
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_attach_version';
COMMENT ON FUNCTION idempotency.attach_version(regclass, name) IS 'counts the updates of each row, by any client, in a bigint NOT NULL column of a table that you own; returns the name of its trigger; errors: 0A000, 22004, 39P01, 42501, 42703, 42710, 42804, 42P01, 42P16';

CREATE FUNCTION idempotency.detach_version(
  rel            regclass,
  version_column name
) RETURNS name
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_detach_version';
COMMENT ON FUNCTION idempotency.detach_version(regclass, name) IS 'stops counting; returns the name that the trigger had; errors: IK007 it is no version column, 0A000, 22004, 42501, 42703, 42P01';

CREATE FUNCTION idempotency.update_if(
  rel     regclass,
  id      text,
  version bigint,
  changes jsonb
) RETURNS idempotency.update_result
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_update_if';
COMMENT ON FUNCTION idempotency.update_if(regclass, text, bigint, jsonb) IS 'updates a row that still has this version; id: primary key, for several columns an object; changes: columns to set, NULL or {}: none; errors: IK007, 0A000, 21000, 22003, 22004, 22023, 25006, 39P01, 40001, 42703, 42809, 42P01, 42P10, UPDATE''s';

CREATE FUNCTION idempotency.update_if(
  rel     regclass,
  id      anyelement,
  version bigint,
  changes jsonb
) RETURNS idempotency.update_result
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_update_if';
COMMENT ON FUNCTION idempotency.update_if(regclass, anyelement, bigint, jsonb) IS 'the same for an id of any type';

----------------------------------------------------------------------------
-- One-time tokens
----------------------------------------------------------------------------

-- Immutable for those who keep its value: a row's, which no dump takes along.
CREATE FUNCTION idempotency.this_database() RETURNS oid
LANGUAGE c IMMUTABLE AS 'MODULE_PATHNAME', 'idempotency_this_database';
COMMENT ON FUNCTION idempotency.this_database() IS 'internal: the OID of the database that a token key is written in';

-- What tokens are signed with.  Written by SQL: the trigger tells every session
-- that has the keys cached.
CREATE TABLE idempotency.token_keys (
  id         bigint PRIMARY KEY,
  created_at timestamptz NOT NULL,
  rotated_at timestamptz,
  secret     bytea NOT NULL,
  system     bigint NOT NULL,
  database   oid NOT NULL,
  kept_in    oid NOT NULL GENERATED ALWAYS AS (idempotency.this_database()) STORED
);
COMMENT ON TABLE idempotency.token_keys IS 'internal: the keys that tokens are signed with, secret; the newest that was not rotated signs';
COMMENT ON COLUMN idempotency.token_keys.rotated_at IS 'NULL: not rotated; else it verifies for idempotency.token_max_ttl + idempotency.token_retention longer';
COMMENT ON COLUMN idempotency.token_keys.system IS 'the system identifier of the server that it was made in';
COMMENT ON COLUMN idempotency.token_keys.database IS 'the OID of the database that it was made in: its tokens are for that one';
COMMENT ON COLUMN idempotency.token_keys.kept_in IS 'the OID of the database that the row was written in; in another one, a copy of this database, its tokens are for that copy';
SELECT pg_catalog.pg_extension_config_dump('idempotency.token_keys', '');

-- One mark per token that was consumed, or revoked by itself.  Written by the C
-- code, past the executor.
CREATE TABLE idempotency.used_tokens (
  expires_at timestamptz NOT NULL,
  marked_at  timestamptz NOT NULL,
  id         uuid PRIMARY KEY,
  revoked    boolean NOT NULL
);
COMMENT ON TABLE idempotency.used_tokens IS 'internal: one row per token that was consumed or revoked, until idempotency.token_retention past its end';
COMMENT ON COLUMN idempotency.used_tokens.expires_at IS 'the token''s own end';
COMMENT ON COLUMN idempotency.used_tokens.marked_at IS 'when it was consumed or revoked';
COMMENT ON COLUMN idempotency.used_tokens.revoked IS 'false: it was consumed';
SELECT pg_catalog.pg_extension_config_dump('idempotency.used_tokens', '');

-- Written by the C code, past the executor.
CREATE TABLE idempotency.token_generations (
  generation bigint NOT NULL,
  raised_at  timestamptz NOT NULL,
  subject    text COLLATE "C" NOT NULL,
  purpose    text COLLATE "C" NOT NULL,
  PRIMARY KEY (subject, purpose)
);
COMMENT ON TABLE idempotency.token_generations IS 'internal: the generation of (subject, purpose), 0 without a row; tokens of a lower one are revoked';
COMMENT ON COLUMN idempotency.token_generations.raised_at IS 'after idempotency.token_max_ttl + idempotency.token_retention there is nothing left that it revokes';
SELECT pg_catalog.pg_extension_config_dump('idempotency.token_generations', '');

CREATE TYPE idempotency.token_result AS (
  status      text,
  id          text,
  payload     jsonb,
  issued_at   timestamptz,
  expires_at  timestamptz,
  consumed_at timestamptz
);
COMMENT ON TYPE idempotency.token_result IS 'status: consumed (of check_token: valid), used, expired, revoked, invalid, stale or busy; id: 22 characters, the same at every look; with invalid all else is NULL';

CREATE FUNCTION idempotency.issue_token(
  subject text,
  purpose text,
  ttl     interval DEFAULT '5 minutes',
  payload jsonb    DEFAULT NULL
) RETURNS text
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_issue_token';
COMMENT ON FUNCTION idempotency.issue_token(text, text, interval, jsonb) IS 'a signed token, to be consumed once with the same subject and purpose within ttl (at most idempotency.token_max_ttl); payload: readable, at most 8192 bytes; writes nothing; errors: 22004, 22008, 22023, 55000';

CREATE FUNCTION idempotency.consume_token(
  token   text,
  subject text,
  purpose text,
  wait    interval DEFAULT NULL
) RETURNS idempotency.token_result
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_consume_token';
COMMENT ON FUNCTION idempotency.consume_token(text, text, text, interval) IS 'uses the token up in this transaction, or says why not; a rollback gives it back; wait: for a rival, and errors: as claim()';

CREATE FUNCTION idempotency.check_token(
  token   text,
  subject text,
  purpose text
) RETURNS idempotency.token_result
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_check_token';
COMMENT ON FUNCTION idempotency.check_token(text, text, text) IS 'looks at the token without consuming it, waiting or writing: what is committed counts; errors: as lookup()';

CREATE FUNCTION idempotency.revoke_token(
  token   text,
  subject text,
  purpose text
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_revoke_token';
COMMENT ON FUNCTION idempotency.revoke_token(text, text, text) IS 'makes one token worthless; true: it was valid until now; errors: as consume_token(), and 55P03 while a rival is consuming it';

CREATE FUNCTION idempotency.revoke_tokens(
  subject text,
  purpose text
) RETURNS timestamptz
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_revoke_tokens';
COMMENT ON FUNCTION idempotency.revoke_tokens(text, text) IS 'revokes all tokens of (subject, purpose) that were issued before; returns when; errors: 22004, 22023, 25006, 40001 (on a cluster), 40P01, 55000, 55P03';

CREATE FUNCTION idempotency.rotate_token_key(
  retire boolean DEFAULT false
) RETURNS timestamptz
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_rotate_token_key';
COMMENT ON FUNCTION idempotency.rotate_token_key(boolean) IS 'admin: signs new tokens with a new key; those of the old keys stay valid, or with retire, after a leak, become invalid; returns until when there can be valid ones of them; errors: 22004, 25006, 40001, 55000';

CREATE TRIGGER changed
AFTER INSERT OR UPDATE OR DELETE ON idempotency.token_keys
FOR EACH ROW EXECUTE FUNCTION idempotency.table_changed();
ALTER TABLE idempotency.token_keys ENABLE ALWAYS TRIGGER changed;
COMMENT ON TRIGGER changed ON idempotency.token_keys IS 'internal: has every session read the token keys again';

-- The first key: its id is random, so a restored dump can bring its own.
SELECT idempotency.rotate_token_key();

----------------------------------------------------------------------------
-- Outbox
----------------------------------------------------------------------------

-- CACHE 1, or the ids of two sessions would not follow the order in which a
-- key's events were emitted.
CREATE SEQUENCE idempotency.outbox_id_seq CACHE 1;
COMMENT ON SEQUENCE idempotency.outbox_id_seq IS 'internal: the ids of events, their places in the queue, and the numbers of leases';
SELECT pg_catalog.pg_extension_config_dump('idempotency.outbox_id_seq', '');

CREATE TABLE idempotency.outbox (
  id         bigint      PRIMARY KEY,
  place      bigint      NOT NULL,
  due        timestamptz NOT NULL,
  emitted_at timestamptz NOT NULL,
  parked_at  timestamptz,
  attempt    integer     NOT NULL,
  tries      integer     NOT NULL,
  state      "char"      NOT NULL,
  topic      text        NOT NULL COLLATE "C",
  key        text        COLLATE "C",
  payload    jsonb,
  error      text
);
COMMENT ON TABLE idempotency.outbox IS 'internal: events that are to be delivered, and parked ones';
COMMENT ON COLUMN idempotency.outbox.place IS 'the order in which events are taken: the id, or a later number if the event was given back';
COMMENT ON COLUMN idempotency.outbox.due IS 'when take may look at it; -infinity: at once, infinity: parked';
COMMENT ON COLUMN idempotency.outbox.attempt IS 'how many attempts have failed; an attempt that is under way is known from outbox_leases';
COMMENT ON COLUMN idempotency.outbox.tries IS 'how many of them since it was emitted or retried';
COMMENT ON COLUMN idempotency.outbox.state IS 'r: ready or out, l: ready since its lease ran out, p: parked, b: parked, and its key waits';
CREATE INDEX outbox_due_idx ON idempotency.outbox (topic, due, place);
CREATE INDEX outbox_key_idx ON idempotency.outbox (key, topic, id) WHERE key IS NOT NULL AND state <> 'p';
SELECT pg_catalog.pg_extension_config_dump('idempotency.outbox', '');

-- Events are leased block by block: that is one small row for what a worker took
-- of 64 events, and no write to the events themselves.
CREATE TABLE idempotency.outbox_leases (
  block    bigint      NOT NULL,
  taken    bigint      NOT NULL,
  deadline timestamptz NOT NULL,
  events   bigint      NOT NULL,
  topic    text        NOT NULL COLLATE "C",
  PRIMARY KEY (block, taken)
);
COMMENT ON TABLE idempotency.outbox_leases IS 'internal: which events are out, and until when';
COMMENT ON COLUMN idempotency.outbox_leases.block IS 'id / 64 of its events';
COMMENT ON COLUMN idempotency.outbox_leases.taken IS 'a number; the lease counts for events with a lower place';
COMMENT ON COLUMN idempotency.outbox_leases.events IS 'a bit for each event of the block';
CREATE INDEX outbox_leases_deadline_idx ON idempotency.outbox_leases (topic, deadline);
SELECT pg_catalog.pg_extension_config_dump('idempotency.outbox_leases', '');

CREATE TABLE idempotency.outbox_keys (
  taken bigint NOT NULL,
  id    bigint NOT NULL,
  topic text   NOT NULL COLLATE "C",
  key   text   NOT NULL COLLATE "C",
  PRIMARY KEY (key, topic, taken)
);
COMMENT ON TABLE idempotency.outbox_keys IS 'internal: which event of an ordering key is out; the one with the highest number counts';
SELECT pg_catalog.pg_extension_config_dump('idempotency.outbox_keys', '');

CREATE TABLE idempotency.outbox_topics (
  topic         text    PRIMARY KEY COLLATE "C",
  max_attempts  integer,
  parked_blocks boolean NOT NULL
);
COMMENT ON TABLE idempotency.outbox_topics IS 'internal: what set_topic says';
SELECT pg_catalog.pg_extension_config_dump('idempotency.outbox_topics', '');

CREATE FUNCTION idempotency.emit(topic text, payload jsonb, key text DEFAULT NULL, delay interval DEFAULT NULL) RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_emit';
COMMENT ON FUNCTION idempotency.emit(text, jsonb, text, interval) IS 'writes an event in this transaction and returns its id; events of one key come in the order of their ids, NULL: in any; payload may be NULL; delay: not before then, nor the later ones of its key; errors: 0A000, 22004, 22008, 22023, 25006, 55000';

CREATE FUNCTION idempotency.emit_batch(topic text, payloads jsonb[], keys text[] DEFAULT NULL, delay interval DEFAULT NULL) RETURNS bigint[]
LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_emit_batch';
COMMENT ON FUNCTION idempotency.emit_batch(text, jsonb[], text[], interval) IS 'writes an event for each payload, in one call; keys: one for each, or NULL; returns the ids in their order; the rest as emit()';

CREATE FUNCTION idempotency.take(topic text, max bigint DEFAULT 100, lease interval DEFAULT '30 s')
RETURNS TABLE (id bigint, attempt bigint, key text, payload jsonb, emitted_at timestamptz)
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 100 AS 'MODULE_PATHNAME', 'idempotency_take';
COMMENT ON FUNCTION idempotency.take(text, bigint, interval) IS 'hands out up to max due events of a topic until the lease ends; commit before you act on them; errors: 0A000, 22004, 22008, 22023, 25006, 40P01, 55000';

CREATE FUNCTION idempotency.ack(id bigint, attempt bigint) RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_ack';
COMMENT ON FUNCTION idempotency.ack(bigint, bigint) IS 'removes an event whose effect has happened; false: this attempt was superseded, or there is no such event; errors: 0A000, 22004, 25006, 40P01, 55000';

CREATE FUNCTION idempotency.ack_batch(ids bigint[], attempts bigint[]) RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_ack_batch';
COMMENT ON FUNCTION idempotency.ack_batch(bigint[], bigint[]) IS 'ack() for many events; returns how many were removed; errors: 0A000, 22004, 22023, 25006, 40P01, 55000';

CREATE FUNCTION idempotency.nack(id bigint, attempt bigint, retry_in interval DEFAULT NULL, error text DEFAULT NULL) RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_nack';
COMMENT ON FUNCTION idempotency.nack(bigint, bigint, interval, text) IS 'gives an event back, due after retry_in (NULL: 1 s, doubled with each attempt, at most 1 h), or parks it after its last attempt; error: a note, may be NULL; false: this attempt was superseded; errors: 0A000, 22004, 22008, 22023, 25006, 40P01, 55000';

CREATE PROCEDURE idempotency.wait_for_events(topic text, timeout interval DEFAULT '1 min')
LANGUAGE C AS 'MODULE_PATHNAME', 'idempotency_wait_for_events';
COMMENT ON PROCEDURE idempotency.wait_for_events(text, interval) IS 'returns as soon as take() may have an event of the topic, or after the timeout; commits, so not inside of a transaction block; errors: 0A000, 22004, 22008, 22023, 25001, 25006, 55000';

CREATE FUNCTION idempotency.extend_event(id bigint, attempt bigint, lease interval) RETURNS timestamptz
LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_extend_event';
COMMENT ON FUNCTION idempotency.extend_event(bigint, bigint, interval) IS 'lets the lease of an event in hand end so long after now and returns when that is; NULL: too late, the attempt was superseded or given up; errors: 0A000, 22004, 22008, 22023, 25006, 40P01, 55000';

CREATE FUNCTION idempotency.retry_event(id bigint) RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_retry_event';
COMMENT ON FUNCTION idempotency.retry_event(bigint) IS 'admin: gives a parked event back, with as many attempts before it as a new one; false: there is no such event, or it is not parked; errors: 0A000, 22004, 25006, 40P01, 55000';

CREATE FUNCTION idempotency.discard_event(id bigint) RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_discard_event';
COMMENT ON FUNCTION idempotency.discard_event(bigint) IS 'admin: removes a parked event; false: there is no such event, or it is not parked; errors: 0A000, 22004, 25006, 40P01, 55000';

CREATE FUNCTION idempotency.retry_parked(topic text) RETURNS bigint
LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_retry_parked';
COMMENT ON FUNCTION idempotency.retry_parked(text) IS 'admin: gives the parked events of a topic back; returns how many; errors: 0A000, 22004, 22023, 25006, 55000';

CREATE FUNCTION idempotency.set_topic(topic text, max_attempts integer DEFAULT NULL, parked_blocks boolean DEFAULT false) RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_set_topic';
COMMENT ON FUNCTION idempotency.set_topic(text, integer, boolean) IS 'admin: max_attempts of a topic (NULL: the setting''s), and whether the key of an event that is parked from now on waits for it; set_topic(topic) takes both back; returns whether something was set before; errors: 0A000, 22004, 22023, 25006, 55000';

CREATE FUNCTION idempotency.topic_counts()
RETURNS TABLE (topic text, ready bigint, delayed bigint, leased bigint, parked bigint, oldest timestamptz, estimate boolean)
LANGUAGE C VOLATILE PARALLEL UNSAFE ROWS 10 AS 'MODULE_PATHNAME', 'idempotency_topic_counts';
COMMENT ON FUNCTION idempotency.topic_counts() IS 'internal: what the view topics shows';

CREATE VIEW idempotency.topics AS
  SELECT topic, ready, delayed, leased, parked, oldest, estimate
  FROM idempotency.topic_counts();
COMMENT ON VIEW idempotency.topics IS 'admin: the events of each topic now: ready (those behind another one of their key included), delayed, leased, parked; oldest: since when the oldest of the ready and leased waits, a delay not counted; estimate: the counts come from a sample of a large table';

CREATE FUNCTION idempotency.parked() RETURNS SETOF idempotency.outbox
LANGUAGE C STABLE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_parked';
COMMENT ON FUNCTION idempotency.parked() IS 'internal: the parked events, read without predicate locks';

CREATE VIEW idempotency.parked_events AS
  SELECT id, topic, key, payload, attempt, emitted_at, parked_at, error
  FROM idempotency.parked();
COMMENT ON VIEW idempotency.parked_events IS 'admin: events that failed as often as their topic allows, with the last error that nack was given';

----------------------------------------------------------------------------
-- Upkeep and insight
----------------------------------------------------------------------------

-- Rows that have gone make room early, so that a table under steady load keeps
-- its size; and it keeps that, since giving the room back to the disk needs a
-- lock that stops every caller, also on a standby.
ALTER TABLE idempotency.keys SET (
  autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02,
  vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE idempotency.outbox SET (
  autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02,
  vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE idempotency.outbox_leases SET (
  autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = off);
ALTER TABLE idempotency.outbox_keys SET (
  autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = off);
ALTER TABLE idempotency.token_generations SET (
  autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = off);
ALTER TABLE idempotency.used_tokens SET (
  autovacuum_vacuum_scale_factor = 0.02, vacuum_truncate = off);

CREATE FUNCTION idempotency.purge(
  max integer DEFAULT 10000
) RETURNS bigint
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_purge';
COMMENT ON FUNCTION idempotency.purge(integer) IS 'admin: removes up to max expired rows of all kinds together, skipping what somebody is at work on, and says how many; a call looks at max pages of each table, and at 4096 at least, and the session''s next goes on there; errors: 22004, 22023, 25006, 55000';

CREATE FUNCTION idempotency.lock_hash(
  scope text,
  key   text
) RETURNS bigint
LANGUAGE c STABLE AS 'MODULE_PATHNAME', 'idempotency_lock_hash_of';
COMMENT ON FUNCTION idempotency.lock_hash(text, text) IS 'internal: the name of the key''s lock, as in key_locks; errors: 22004, 22023';

CREATE FUNCTION idempotency.key_writers(
  scope text,
  key   text
) RETURNS xid[]
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_key_writers';
COMMENT ON FUNCTION idempotency.key_writers(text, text) IS 'internal: the open transaction that has written the key''s row, and its subtransaction that did, or NULL; errors: 22004, 22023, 40001, 55000';

CREATE FUNCTION idempotency.leased_keys() RETURNS SETOF idempotency.keys
LANGUAGE c STABLE AS 'MODULE_PATHNAME', 'idempotency_leased_keys';
COMMENT ON FUNCTION idempotency.leased_keys() IS 'internal: the leases, without what was asked and noted, read without predicate locks';

CREATE FUNCTION idempotency.leased_key(
  scope text,
  key   text
) RETURNS SETOF idempotency.keys
LANGUAGE c STABLE ROWS 1 AS 'MODULE_PATHNAME', 'idempotency_leased_key';
COMMENT ON FUNCTION idempotency.leased_key(text, text) IS 'internal: that of them which is on one key, as it stands; errors: 22004, 22023, 40001, 55000';

CREATE FUNCTION idempotency.key_counts(
  by           text,
  OUT scope    text,
  OUT status   "char",
  OUT rows     bigint,
  OUT expired  bigint,
  OUT estimate boolean
) RETURNS SETOF record
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_key_counts';
COMMENT ON FUNCTION idempotency.key_counts(text) IS 'internal: keys by status and by scope, prefix or in total (scope NULL), sampled where the table is large; errors: 22004, 22023, 55000';

-- What calls came to

CREATE FUNCTION idempotency.activity_counts(
  OUT function  text,
  OUT outcome   text,
  OUT calls     bigint,
  OUT wait_time interval,
  OUT since     timestamptz
) RETURNS SETOF record
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_activity_counts';
COMMENT ON FUNCTION idempotency.activity_counts() IS 'internal: the counters of this database, or why there are none';

CREATE VIEW idempotency.activity AS SELECT * FROM idempotency.activity_counts();
COMMENT ON VIEW idempotency.activity IS 'admin: what calls came to since the last reset or start of the server, rolled back or not; outcome waited: calls that waited, and for how long; function error: IK001 to IK007, and waits that ended in an error; off: why nothing is counted';
COMMENT ON COLUMN idempotency.activity.calls IS 'calls; of take, ack, retry_parked and purge: events and rows';
COMMENT ON COLUMN idempotency.activity.wait_time IS 'in all, of the calls that waited';

CREATE FUNCTION idempotency.reset_activity() RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_reset_activity';
COMMENT ON FUNCTION idempotency.reset_activity() IS 'admin: has activity count from 0 again; false: nothing is counted';

CREATE FUNCTION idempotency.keys_in_hand(
  OUT pid       integer,
  OUT scope     text,
  OUT key       text,
  OUT lock_hash bigint,
  OUT since     timestamptz,
  OUT waiting   boolean
) RETURNS SETOF record
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_keys_in_hand';
COMMENT ON FUNCTION idempotency.keys_in_hand() IS 'internal: the keys that open transactions have claimed, and those that they wait for';

CREATE FUNCTION idempotency.purge_round(
  OUT rounds  bigint,
  OUT started timestamptz,
  OUT ended   timestamptz,
  OUT outcome text,
  OUT rows    bigint,
  OUT error   text
) RETURNS SETOF record
LANGUAGE c ROWS 1 AS 'MODULE_PATHNAME', 'idempotency_purge_round';
COMMENT ON FUNCTION idempotency.purge_round() IS 'internal: what purge_rounds shows';

CREATE VIEW idempotency.purge_rounds AS SELECT * FROM idempotency.purge_round();
COMMENT ON VIEW idempotency.purge_rounds IS 'admin: the worker that purges this database: its rounds since the start of the server, and the last one; ended NULL: it is under way; outcome: finished, gave way, failed or terminated';

-- Finding keys, and freeing them

CREATE FUNCTION idempotency.find_keys(
  scope      text     DEFAULT NULL,
  status     text     DEFAULT NULL,
  older_than interval DEFAULT NULL,
  sqlstate   text     DEFAULT NULL,
  max        integer  DEFAULT 100,
  from_page  bigint   DEFAULT 0
) RETURNS TABLE (page bigint, scope text, key text, status text, created_at timestamptz, expires_at timestamptz,
                 fence bigint, deadline timestamptz, lapsed boolean, attempt integer, meta jsonb)
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_find_keys';
COMMENT ON FUNCTION idempotency.find_keys(text, text, interval, text, integer, bigint) IS 'admin: up to max keys, and the rest of the last one''s page, by scope, status (completed, failed, in_progress), age and sqlstate of a failure, NULL: any; looks at 4096 pages from from_page on; a notice tells where to go on; errors: 0A000, 22004, 22008, 22023, 55000';

CREATE FUNCTION idempotency.forget_scope(
  scope     text,
  max       integer DEFAULT 10000,
  from_page bigint  DEFAULT 0,
  OUT forgotten bigint,
  OUT kept      bigint,
  OUT next_page bigint
)
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_forget_scope';
COMMENT ON FUNCTION idempotency.forget_scope(text, integer, bigint) IS 'admin: removes up to max records of a scope; keeps what is leased or in work; looks at 4096 pages: call it again with from_page => next_page until that is NULL; errors: 0A000, 22004, 22023, 25006, 55000';

CREATE FUNCTION idempotency.free_lease(
  scope   text,
  key     text,
  fence   bigint,
  discard boolean DEFAULT false
) RETURNS boolean
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_free_lease';
COMMENT ON FUNCTION idempotency.free_lease(text, text, bigint, boolean) IS 'admin: ends a lease, also a lock (scope idempotency.lock), whose holder is then superseded; discard: the next begins anew, without attempts and checkpoint; false: it is not leased; errors: IK002, as claim()';

CREATE FUNCTION idempotency.key_tables() RETURNS oid[]
LANGUAGE c STABLE AS 'MODULE_PATHNAME', 'idempotency_key_tables';
COMMENT ON FUNCTION idempotency.key_tables() IS 'internal: idempotency.keys, or on a Citus cluster its shards on this node';

-- The locks of a prepared transaction have no pid; they share the virtual
-- transaction with the lock on its transaction id.
CREATE VIEW idempotency.prepared_holders AS
  SELECT l.virtualtransaction, p.gid, p.prepared
  FROM pg_catalog.pg_locks l
  JOIN pg_catalog.pg_prepared_xacts p ON p.transaction = l.transactionid
  WHERE l.locktype = 'transactionid' AND l.granted AND l.pid IS NULL;
COMMENT ON VIEW idempotency.prepared_holders IS 'internal: prepared transactions, by what their locks have in common';

-- The transaction-level locks of our lock space, with who holds them.
CREATE VIEW idempotency.key_locks AS
  SELECT (l.classid::bigint << 32) | l.objid::bigint AS lock_hash,
         l.granted,
         l.pid,
         p.gid AS prepared_gid,
         coalesce(p.prepared, a.xact_start) AS since
  FROM pg_catalog.pg_locks l
  LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
  LEFT JOIN idempotency.prepared_holders p
         ON l.pid IS NULL AND p.virtualtransaction = l.virtualtransaction
  WHERE l.locktype = 'advisory' AND l.objsubid = 26980
    AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database());
COMMENT ON VIEW idempotency.key_locks IS 'internal: the locks of keys in this database, held and awaited';

-- With its answers stored, a transaction has given the keys' locks back, but
-- rivals wait for its end.  Its keys are shown as long as it has them in hand;
-- where that is not known, it is shown if it is prepared and has a writer's lock
-- on the table, or if somebody waits, with the key of the wait.
CREATE VIEW idempotency.in_flight AS
  WITH locks AS MATERIALIZED (SELECT * FROM idempotency.key_locks),
       server_locks AS MATERIALIZED (SELECT * FROM pg_catalog.pg_locks),
       -- once, though it may have been taken and given back several times
       in_hand AS MATERIALIZED (
         SELECT DISTINCT ON (pid, lock_hash, waiting) * FROM idempotency.keys_in_hand()
         ORDER BY pid, lock_hash, waiting, since DESC),
       leases AS MATERIALIZED (
         SELECT k.scope, k.key, k.fence, k.deadline, k.attempt, idempotency.lock_hash(k.scope, k.key) AS lock_hash
         FROM idempotency.leased_keys() k
         WHERE k.expires_at > pg_catalog.clock_timestamp()),
       waiting AS MATERIALIZED (
         SELECT l.lock_hash, array_agg(l.pid) AS pids, min(h.scope) AS scope, min(h.key) AS key
         FROM locks l
         LEFT JOIN in_hand h ON h.waiting AND h.pid = l.pid AND h.lock_hash = l.lock_hash
         WHERE NOT l.granted GROUP BY l.lock_hash),
       -- a transaction has a lock on its id, and on those of its subtransactions
       xids AS MATERIALIZED (
         SELECT virtualtransaction, pid, transactionid FROM server_locks
         WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted),
       waiting_for_end AS MATERIALIZED (
         SELECT x.virtualtransaction, x.pid, h.scope, h.key, h.lock_hash, array_agg(l.pid) AS pids
         FROM xids x
         JOIN server_locks l ON l.transactionid = x.transactionid AND NOT l.granted
         LEFT JOIN in_hand h ON h.waiting AND h.pid = l.pid
         GROUP BY 1, 2, 3, 4, 5)
  SELECT 'lease' AS mode, k.scope, k.key, k.fence, k.deadline,
         k.deadline <= pg_catalog.clock_timestamp() AS lapsed, k.attempt,
         NULL::integer AS pid, NULL::text AS prepared_gid,
         '2000-01-01 00:00:00+00'::timestamptz + k.fence * interval '1 microsecond' AS since,
         w.pids AS waiting_pids,
         k.lock_hash
  FROM leases k
  LEFT JOIN waiting w USING (lock_hash)
  UNION ALL
  -- at work: it has the lock
  SELECT 'transaction', coalesce(h.scope, w.scope), coalesce(h.key, w.key), NULL, NULL, NULL, NULL,
         l.pid, l.prepared_gid, coalesce(h.since, l.since),
         w.pids,
         l.lock_hash
  FROM locks l
  LEFT JOIN in_hand h ON NOT h.waiting AND h.pid = l.pid AND h.lock_hash = l.lock_hash
  LEFT JOIN waiting w ON w.lock_hash = l.lock_hash
  WHERE l.granted
  UNION ALL
  -- its answer is stored, or its lease granted, and it has not ended; its own
  -- lease it sees above
  SELECT 'transaction', h.scope, h.key, NULL, NULL, NULL, NULL,
         h.pid, NULL, h.since,
         w.pids,
         h.lock_hash
  FROM in_hand h
  LEFT JOIN waiting_for_end w ON w.pid = h.pid AND w.lock_hash = h.lock_hash
  WHERE NOT h.waiting
    AND NOT EXISTS (
      SELECT FROM locks l WHERE l.granted AND l.pid = h.pid AND l.lock_hash = h.lock_hash)
    AND NOT (h.pid = pg_catalog.pg_backend_pid() AND h.lock_hash IN (SELECT lock_hash FROM leases))
  UNION ALL
  -- the same where nothing tells but locks
  SELECT 'transaction', w.scope, w.key, NULL, NULL, NULL, NULL,
         t.pid, p.gid, coalesce(p.prepared, a.xact_start),
         w.pids,
         w.lock_hash
  FROM server_locks t
  LEFT JOIN waiting_for_end w USING (virtualtransaction)
  LEFT JOIN idempotency.prepared_holders p
         ON t.pid IS NULL AND p.virtualtransaction = t.virtualtransaction
  LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = t.pid
  WHERE t.relation = ANY ((SELECT idempotency.key_tables())::oid[]) AND t.mode = 'RowExclusiveLock' AND t.granted
    AND t.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
    AND t.virtualtransaction IN (SELECT virtualtransaction FROM xids)
    AND (t.pid IS NULL OR w.pids IS NOT NULL)
    AND NOT EXISTS (
      SELECT FROM locks l
      WHERE l.granted AND coalesce(l.pid::text, l.prepared_gid) = coalesce(t.pid::text, p.gid)
        AND l.lock_hash = coalesce(w.lock_hash, l.lock_hash))
    AND NOT EXISTS (
      SELECT FROM in_hand h
      WHERE h.pid = t.pid AND NOT h.waiting AND h.lock_hash = coalesce(w.lock_hash, h.lock_hash));
COMMENT ON VIEW idempotency.in_flight IS 'admin: who is at work: leases, and transactions until they end; scope and key of a transaction''s are NULL where nothing is shared (see activity) and nobody waits; since: the grant, the claim, or the transaction''s start (NULL: hidden from the caller)';

-- The triggers are the only record of what is attached; one of each names the
-- column.
CREATE VIEW idempotency.attachments AS
  SELECT t.tgrelid::pg_catalog.regclass AS rel, a.attname AS column_name,
         CASE p.proname WHEN 'guard_state' THEN 'machine' WHEN 'guard_version' THEN 'version' ELSE 'fence' END AS kind,
         CASE WHEN t.tgnargs = 2 THEN
           convert_from(substring(t.tgargs FROM 1 FOR position('\x00'::bytea IN t.tgargs) - 1), pg_catalog.getdatabaseencoding()) END AS machine,
         CASE WHEN t.tgnargs = 2 THEN
           substring(t.tgargs FROM position('\x00'::bytea IN t.tgargs) + 1 FOR 7) = 'history'::bytea END AS history,
         t.tgenabled <> 'D' AS enabled
  FROM pg_catalog.pg_trigger t
  JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.tgrelid AND a.attnum = t.tgattr[0]
  WHERE p.pronamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'idempotency')
    AND p.proname IN ('guard_state', 'guard_version', 'guard_fence')
    AND NOT t.tgisinternal AND t.tgparentid = 0;
COMMENT ON VIEW idempotency.attachments IS 'admin: what attach_machine, attach_version and attach_fence have attached where; enabled false: the trigger is disabled, and nothing guards the column';

-- Bound to what it calls, as a view is, for stats.
CREATE FUNCTION idempotency.key_stats(
  by  text    DEFAULT 'prefix',
  max integer DEFAULT 100
) RETURNS TABLE (scope text, status text, keys bigint, expired bigint, estimate boolean)
LANGUAGE sql
BEGIN ATOMIC
  WITH counted AS MATERIALIZED (
         SELECT c.scope, c.status, c.rows, c.expired, c.estimate
         FROM idempotency.key_counts(key_stats.by) c WHERE c.status <> 'l'
         UNION ALL
         SELECT CASE key_stats.by WHEN 'scope' THEN k.scope WHEN 'prefix' THEN split_part(k.scope, ':', 1) END,
                'l', count(*), count(*) FILTER (WHERE k.expires_at <= clock_timestamp()), false
         FROM idempotency.leased_keys() k GROUP BY 1),
       shown AS MATERIALIZED (
         SELECT c.scope FROM counted c WHERE c.scope IS NOT NULL
         GROUP BY c.scope ORDER BY sum(c.rows) DESC, c.scope COLLATE "C" LIMIT key_stats.max)
  SELECT s.scope,
         CASE c.status WHEN 'c' THEN 'completed' WHEN 'f' THEN 'failed' WHEN 'l' THEN 'in_progress' ELSE 'released' END,
         sum(c.rows)::bigint, sum(c.expired)::bigint, bool_or(c.estimate)
  FROM counted c
  LEFT JOIN shown s ON s.scope = c.scope
  GROUP BY 1, 2;
END;
COMMENT ON FUNCTION idempotency.key_stats(text, integer) IS 'admin: keys by status and by scope, by prefix (up to the first colon) or in total; the max (NULL: all) with most rows, the others together; expired: not purged yet; estimate: from a sample; errors: 22004, 22023, 2201W, 55000';

CREATE VIEW idempotency.stats AS
  WITH keys AS MATERIALIZED (SELECT * FROM idempotency.key_stats('prefix', 100)),
       events AS MATERIALIZED (
         SELECT coalesce(sum(ready + delayed + leased), 0) AS depth, min(oldest) AS oldest,
                coalesce(sum(parked), 0) AS parked, coalesce(bool_or(estimate), false) AS estimate
         FROM idempotency.topic_counts())
  SELECT 'keys' AS name, scope, status, NULL::text AS relation, keys::numeric AS value, estimate FROM keys
  UNION ALL
  SELECT 'expired_keys', NULL, NULL, NULL, coalesce(sum(expired), 0), coalesce(bool_or(estimate), false) FROM keys
  UNION ALL
  SELECT 'lapsed_leases', NULL, NULL, NULL, count(*) FILTER (WHERE deadline <= pg_catalog.clock_timestamp()), false
  FROM idempotency.leased_keys()
  UNION ALL
  SELECT 'bytes', NULL, NULL, c.relname::text, pg_catalog.pg_total_relation_size(c.oid), false
  FROM pg_catalog.pg_class c
  WHERE c.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'idempotency')
    AND c.relkind = 'r'
  UNION ALL
  SELECT 'outbox_depth', NULL, NULL, NULL, depth, estimate FROM events
  UNION ALL
  SELECT 'outbox_oldest_seconds', NULL, NULL, NULL, extract(epoch FROM pg_catalog.clock_timestamp() - oldest), estimate FROM events
  UNION ALL
  SELECT 'outbox_parked', NULL, NULL, NULL, parked, estimate FROM events;
COMMENT ON VIEW idempotency.stats IS 'admin: keys by status and by the part of the scope before the first colon (the 100 with most, the others together), lapsed leases, expired keys that purge has not removed yet, bytes by relation with its indexes, and the outbox; estimate: extrapolated from a sample of a large table';

-- Its body is bound to what it calls, as those of grant_usage and its like.
CREATE FUNCTION idempotency.holder(
  scope text,
  key   text
) RETURNS SETOF idempotency.in_flight
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
  WITH asked AS MATERIALIZED (
         SELECT idempotency.lock_hash($1, $2) AS hash, idempotency.key_writers($1, $2) AS writers),
       locks AS MATERIALIZED (
         SELECT l.* FROM asked JOIN idempotency.key_locks l ON l.lock_hash = asked.hash),
       waiting AS (SELECT array_agg(pid) AS pids FROM locks WHERE NOT granted)
  -- a claim that is still at work holds the lock, a lease has its row
  SELECT 'lease', k.scope, k.key, k.fence, k.deadline, k.deadline <= clock_timestamp(), k.attempt,
         NULL::integer, NULL::text,
         '2000-01-01 00:00:00+00'::timestamptz + k.fence * interval '1 microsecond',
         w.pids,
         a.hash
  FROM asked a
  CROSS JOIN waiting w
  CROSS JOIN idempotency.leased_key($1, $2) k
  WHERE k.expires_at > clock_timestamp()
  UNION ALL
  SELECT 'transaction', $1, $2, NULL, NULL, NULL, NULL,
         l.pid, l.prepared_gid, l.since,
         w.pids,
         l.lock_hash
  FROM locks l
  CROSS JOIN waiting w
  WHERE l.granted
  UNION ALL
  -- one that has stored its answer, and not committed, holds the row
  SELECT 'transaction', $1, $2, NULL, NULL, NULL, NULL,
         l.pid, p.gid, coalesce(p.prepared, s.xact_start),
         (SELECT array_agg(w.pid) FROM pg_locks w
          WHERE NOT w.granted AND w.transactionid = ANY (a.writers)),
         a.hash
  FROM asked a
  JOIN pg_locks l ON l.transactionid = a.writers[1]
  LEFT JOIN pg_stat_activity s ON s.pid = l.pid
  LEFT JOIN idempotency.prepared_holders p ON l.pid IS NULL AND p.virtualtransaction = l.virtualtransaction
  WHERE l.locktype = 'transactionid' AND l.granted;
END;
COMMENT ON FUNCTION idempotency.holder(text, text) IS 'admin: who holds the key, in the columns of in_flight; no row: nobody; errors: 22004, 22023, 40001 (a key of another node), 55000';

----------------------------------------------------------------------------
-- Privileges: nothing for PUBLIC, everything by grant_usage and grant_admin
----------------------------------------------------------------------------

-- Who may do what, as GRANT and REVOKE name it.  A function that is on neither
-- list is internal, or the owner's, who also has what it takes to dump and
-- restore, to delete history by hand, and, from 17 on, to reindex.
CREATE FUNCTION idempotency.privileges_of(audience text) RETURNS SETOF text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
  SELECT 'USAGE ON SCHEMA idempotency' WHERE audience IN ('usage', 'monitor')
  UNION ALL
  SELECT CASE prokind WHEN 'p' THEN 'EXECUTE ON PROCEDURE ' ELSE 'EXECUTE ON FUNCTION ' END || p.oid::regprocedure
  FROM pg_proc p
  WHERE p.pronamespace = 'idempotency'::regnamespace
    AND (audience = 'owner' OR p.proname = ANY (CASE audience
      WHEN 'usage' THEN ARRAY[
        'claim', 'complete', 'fail', 'release', 'once', 'run', 'lookup',
        'insert_once',
        'lease', 'extend', 'checkpoint',
        'acquire_lock', 'renew_lock', 'release_lock',
        'attach_fence', 'detach_fence', 'guard_fence',
        'emit', 'emit_batch', 'take', 'ack', 'ack_batch', 'nack', 'extend_event', 'wait_for_events',
        'issue_token', 'consume_token', 'check_token', 'revoke_token',
        'revoke_tokens',
        'attach_machine', 'detach_machine', 'guard_state', 'transition',
        'fire', 'next_events', 'machine_diagram',
        'attach_version', 'detach_version', 'guard_version', 'update_if',
        'at_home'
      ]::name[]
      WHEN 'admin' THEN ARRAY[
        'forget', 'forget_scope', 'find_keys', 'free_lease', 'purge',
        'purge_history', 'retry_parked',
        'retry_event', 'discard_event', 'set_topic', 'holder', 'lock_hash', 'key_writers',
        'leased_keys', 'leased_key', 'keys_in_hand', 'topic_counts', 'parked', 'key_counts',
        'key_tables',
        'key_stats', 'activity_counts', 'reset_activity', 'purge_round',
        'rotate_token_key', 'define_machine', 'drop_machine', 'off_graph'
      ]::name[]
      WHEN 'monitor' THEN ARRAY[
        'leased_keys', 'keys_in_hand', 'topic_counts', 'parked', 'key_counts', 'key_tables',
        'key_stats', 'activity_counts', 'purge_round', 'lock_hash'
      ]::name[]
    END))
  UNION ALL
  SELECT p.privilege || ' ON ' || c.oid::regclass
  FROM pg_class c
  JOIN (VALUES
    ('admin', 'v', '.', 'SELECT'),
    ('admin', 'r', '^(machines|transition_log)$', 'SELECT'),
    ('monitor', 'v', '^(activity|attachments|in_flight|parked_events|purge_rounds|stats|topics)$', 'SELECT'),
    ('monitor', 'r', '^machines$', 'SELECT'),
    ('owner', 'r', '.', 'SELECT, INSERT'),
    ('owner', 'S', '.', 'SELECT, UPDATE'),
    ('owner', 'r', '^transition_log$', 'DELETE'),
    ('owner', 'r', '.', CASE WHEN current_setting('server_version_num')::integer >= 170000 THEN 'MAINTAIN' END)
  ) p (audience, kind, names, privilege) ON p.kind = c.relkind AND c.relname ~ p.names
  WHERE c.relnamespace = 'idempotency'::regnamespace AND p.audience = privileges_of.audience
    AND p.privilege IS NOT NULL
$$;
COMMENT ON FUNCTION idempotency.privileges_of(text) IS 'internal: what grant_usage (''usage''), grant_admin (''admin''), grant_owner (''owner'') and pg_monitor''s grants (''monitor'') are about';

-- What another role granted, the objects' owner cannot revoke; and after a
-- restore by a plain owner of the extension all grants are that role's.  So the
-- objects' owner grants the same, and has theirs go.
CREATE FUNCTION idempotency.take_over_grants() RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  command text;
BEGIN
  FOR command IN
    WITH objects (name, owner, acl) AS (
      SELECT 'SCHEMA ' || oid::regnamespace, nspowner, nspacl FROM pg_namespace
      WHERE oid = 'idempotency'::regnamespace
      UNION ALL
      SELECT 'ROUTINE ' || oid::regprocedure, proowner, proacl FROM pg_proc
      WHERE pronamespace = 'idempotency'::regnamespace
      UNION ALL
      SELECT CASE relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END || oid::regclass, relowner, relacl FROM pg_class
      WHERE relnamespace = 'idempotency'::regnamespace AND relkind IN ('r', 'v', 'S')
    ), grants AS (
      SELECT format('%s ON %s', a.privilege_type, o.name) AS privilege, a.grantor::regrole,
             CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS grantee,
             CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' END AS option
      FROM objects o, aclexplode(o.acl) a
      WHERE a.grantor <> o.owner
    )
    SELECT c.command
    FROM grants g, LATERAL (VALUES
      (1, format('GRANT %s TO %s%s', privilege, grantee, option)),
      (2, format('REVOKE GRANT OPTION FOR %s FROM %s CASCADE', privilege, grantor)),
      (3, format('GRANT %s TO %s WITH GRANT OPTION', privilege, grantor))
    ) c (step, command)
    GROUP BY c.step, c.command
    ORDER BY c.step
  LOOP
    EXECUTE command;
  END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency.take_over_grants() IS 'internal: makes every grant on our objects one of their owner';

-- One role's privileges at a time: two GRANTs on one object at once fail.
CREATE FUNCTION idempotency.lock_privileges() RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  -- once our schema was renamed, one of its name is another role's
  IF NOT EXISTS (
    SELECT FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
    WHERE d.classid = 'pg_namespace'::regclass AND d.objid = to_regnamespace('idempotency')
      AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'idempotency'
  ) THEN
    RAISE 'there is no schema idempotency that belongs to the extension'
      USING ERRCODE = '55000', HINT = 'Give the schema back the name that the extension gave it.';
  END IF;
  LOCK TABLE idempotency.machines IN SHARE UPDATE EXCLUSIVE MODE;
END
$$;
COMMENT ON FUNCTION idempotency.lock_privileges() IS 'internal: keeps others from changing privileges until the end of the transaction; error: 55000';

-- On every node of a Citus cluster, if this is its coordinator.
CREATE FUNCTION idempotency.run_everywhere(commands text[]) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  command text;
  failure text;
BEGIN
  FOREACH command IN ARRAY commands LOOP
    EXECUTE command;
  END LOOP;
  -- every node runs the install script by itself
  IF to_regclass('pg_catalog.pg_dist_local_group') IS NULL
     OR EXISTS (SELECT FROM pg_extension WHERE extname = 'idempotency' AND xmin = pg_current_xact_id_if_assigned()::xid) THEN
    RETURN;
  END IF;
  IF (SELECT groupid <> 0 FROM pg_dist_local_group) THEN
    RETURN;
  END IF;
  -- in transactions of their own, so without what Citus itself sends in ours
  SELECT r.result INTO failure
  FROM run_command_on_workers(format('DO %L', format(
    'BEGIN SET LOCAL citus.enable_ddl_propagation TO off; %s END',
    (SELECT string_agg(c || '; ', '') FROM unnest(commands) c
     WHERE c NOT LIKE '% idempotency.at_home(%' OR NOT EXISTS (
       SELECT FROM pg_dist_object
       WHERE classid = 'pg_proc'::regclass
         AND objid = 'idempotency.at_home(text,text,text[],integer,integer,boolean)'::regprocedure))))) r
  WHERE NOT r.success
  LIMIT 1;
  IF failure IS NOT NULL THEN
    RAISE 'privileges could not be changed on every node'
      USING ERRCODE = '55000', DETAIL = failure, HINT = 'A role must exist on every node. Call this again when all nodes answer.';
  END IF;
END
$$;
COMMENT ON FUNCTION idempotency.run_everywhere(text[]) IS 'internal: GRANT and REVOKE; errors: 22004, 42601, 42704, 55000';

-- Says whether the role has gained or lost anything.
CREATE FUNCTION idempotency.run_for(role name, commands text[]) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  counting CONSTANT text := $count$
    SELECT count(*) + count(*) FILTER (WHERE is_grantable)
    FROM (SELECT nspacl FROM pg_namespace WHERE nspname = 'idempotency'
          UNION ALL
          SELECT proacl FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace
          UNION ALL
          SELECT relacl FROM pg_class WHERE relnamespace = 'idempotency'::regnamespace) o (acl),
         aclexplode(acl)
    WHERE grantee = coalesce((SELECT oid FROM pg_roles WHERE rolname = $1), 0)$count$;
  before integer;
  after integer;
BEGIN
  EXECUTE counting INTO before USING role;
  PERFORM idempotency.run_everywhere(commands);
  EXECUTE counting INTO after USING role;
  IF role = 'public' AND after > before THEN
    RAISE WARNING 'every role of the database may call functions of the extension'
      USING HINT = 'Take that back by SELECT idempotency.revoke_usage(''public''), and grant to the roles that need it.';
  END IF;
  RETURN after <> before;
END
$$;
COMMENT ON FUNCTION idempotency.run_for(name, text[]) IS 'internal: GRANT and REVOKE; errors: 22004, 42601, 42704';

-- Its body and those of its callers are bound to what they call: found by name,
-- it could be another role's, run as the definer.
CREATE FUNCTION idempotency.change_privileges(command text, role name, audiences text[]) RETURNS boolean
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
  SELECT idempotency.lock_privileges();
  SELECT idempotency.take_over_grants() WHERE command LIKE 'REVOKE %';
  SELECT idempotency.run_for(role, ARRAY(
    SELECT format(command, privilege, role)
    FROM unnest(audiences) audience, idempotency.privileges_of(audience) privilege));
END;
COMMENT ON FUNCTION idempotency.change_privileges(text, name, text[]) IS 'internal: runs GRANT or REVOKE, a format of privilege and role, for all that privileges_of() names; errors: 22004, 42601, 42704, 55000';

-- Definers, so that the grants come from the objects' owner, and a dump holds
-- plain GRANT statements that any later owner of the extension can repeat.
CREATE FUNCTION idempotency.grant_usage(role name) RETURNS boolean
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
  SELECT idempotency.change_privileges('GRANT %s TO %I', role, '{usage}');
END;
COMMENT ON FUNCTION idempotency.grant_usage(name) IS 'lets a role call what an application calls; false: it could before; warns of public; errors: 22004 NULL, 42601 empty, 42704 unknown role, 55000';

CREATE FUNCTION idempotency.grant_admin(role name) RETURNS boolean
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
  SELECT idempotency.change_privileges('GRANT %s TO %I', role, '{usage, admin}');
END;
COMMENT ON FUNCTION idempotency.grant_admin(name) IS 'grant_usage, and what an operator calls: the administrative functions and the views; errors: as grant_usage()';

CREATE FUNCTION idempotency.grant_owner(role name) RETURNS boolean
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
  SELECT idempotency.change_privileges('GRANT %s TO %I WITH GRANT OPTION', role, '{usage, admin, owner}');
END;
COMMENT ON FUNCTION idempotency.grant_owner(name) IS 'what the role has that creates the extension, for one that takes its place: grant_admin, the grants themselves, and what it takes to dump and restore; errors: as grant_usage(), 0LP01 public';

CREATE FUNCTION idempotency.revoke_admin(role name) RETURNS boolean
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
  SELECT idempotency.change_privileges('REVOKE %s FROM %I', role, '{admin}');
END;
COMMENT ON FUNCTION idempotency.revoke_admin(name) IS 'takes back what grant_admin adds to grant_usage; false: it had nothing of that; errors: as grant_usage()';

CREATE FUNCTION idempotency.revoke_usage(role name) RETURNS boolean
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
  SELECT idempotency.change_privileges('REVOKE %s FROM %I', role, '{usage, admin}');
END;
COMMENT ON FUNCTION idempotency.revoke_usage(name) IS 'takes back what grant_usage and grant_admin gave; false: it had nothing of that; errors: as grant_usage()';

----------------------------------------------------------------------------
-- Citus
----------------------------------------------------------------------------

CREATE FUNCTION idempotency.at_home(
  scope        text,
  call         text,
  arguments    text[],
  default_wait integer,
  lock_timeout integer,
  read_only    boolean
) RETURNS text[]
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_at_home';
COMMENT ON FUNCTION idempotency.at_home(text, text, text[], integer, integer, boolean) IS 'internal: makes a call that another node of a Citus cluster sends to the node of its scope; errors: 0A000, 22004, 22023, 22P02, 40001, 42501, 42601, 42602, 42883, 55000, the function''s';

CREATE FUNCTION idempotency.at_home(
  token        uuid,
  call         text,
  arguments    text[],
  default_wait integer,
  lock_timeout integer,
  read_only    boolean
) RETURNS text[]
LANGUAGE c AS 'MODULE_PATHNAME', 'idempotency_at_home_of_token';
COMMENT ON FUNCTION idempotency.at_home(uuid, text, text[], integer, integer, boolean) IS 'internal: the same to the node of a token''s mark, by the token''s id; errors: 0A000, 22004, 22023, 22P02, 40001, 42501, 42601, 42602, 42883, 55000, the function''s';

CREATE FUNCTION idempotency.spread_lock_scope(name text) RETURNS text
LANGUAGE c STRICT IMMUTABLE AS 'MODULE_PATHNAME', 'idempotency_spread_lock_scope';
COMMENT ON FUNCTION idempotency.spread_lock_scope(text) IS 'internal: the scope of a lock where the keys are distributed';

CREATE FUNCTION idempotency.distribute_keys(colocate_with regclass) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
  IF to_regclass('pg_catalog.pg_dist_partition') IS NULL THEN
    RAISE feature_not_supported USING MESSAGE = 'Citus is not in this database',
      HINT = 'On one server there is nothing to distribute.';
  END IF;
  IF NOT EXISTS (SELECT FROM pg_dist_partition WHERE logicalrelid = 'idempotency.keys'::regclass) THEN
    -- who is at work on a key has the table locked, in a lesser mode
    LOCK TABLE idempotency.keys IN ACCESS EXCLUSIVE MODE;
    UPDATE idempotency.keys SET scope = idempotency.spread_lock_scope(key) WHERE scope = 'idempotency.lock';
    PERFORM create_distributed_table('idempotency.keys', 'scope', colocate_with => coalesce(colocate_with::text, 'none'));
    PERFORM truncate_local_data_after_distributing_table('idempotency.keys');
    PERFORM create_distributed_function(
      'idempotency.at_home(text, text, text[], integer, integer, boolean)', 'scope',
      colocate_with => 'idempotency.keys', force_delegation => true);
    DROP TRIGGER changed ON idempotency.token_keys;
    PERFORM create_distributed_table('idempotency.used_tokens', 'id', colocate_with => 'none');
    PERFORM create_distributed_function(
      'idempotency.at_home(uuid, text, text[], integer, integer, boolean)', 'token',
      colocate_with => 'idempotency.used_tokens', force_delegation => true);
    PERFORM create_reference_table('idempotency.token_keys'), create_reference_table('idempotency.token_generations');
    PERFORM truncate_local_data_after_distributing_table(t::regclass)
    FROM unnest('{idempotency.used_tokens, idempotency.token_keys, idempotency.token_generations}'::text[]) t;
  ELSIF colocate_with IS NOT NULL THEN
    RAISE object_not_in_prerequisite_state USING MESSAGE = 'keys are distributed already',
      HINT = 'Call distribute() without an argument for what it gives to every node.';
  END IF;
  IF (SELECT groupid = 0 FROM pg_dist_local_group) THEN
    PERFORM idempotency.share_secrets();
    -- the copies; a superuser's, as of Citus
    IF has_function_privilege('replicate_reference_tables(citus.shard_transfer_mode)', 'EXECUTE') THEN
      PERFORM replicate_reference_tables('block_writes');
    END IF;
  END IF;
END
$$;
COMMENT ON FUNCTION idempotency.distribute_keys(regclass) IS 'internal: what distribute() does but for the grants; errors: 0A000, 55000';

-- A key's request is compared under the secret that it was stored with, also on
-- the node that its shard has moved to.  No node has used its own so far.
CREATE FUNCTION idempotency.share_secrets() RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET datestyle = 'ISO' SET bytea_output = 'hex'
AS $$
DECLARE
  failure text;
BEGIN
  SELECT r.result INTO failure
  FROM run_command_on_workers((
    SELECT format('DO %L', format(
      'BEGIN INSERT INTO idempotency.secrets VALUES %s ON CONFLICT DO NOTHING; DELETE FROM idempotency.secrets WHERE id NOT IN (%s); END',
      string_agg(format('(%s, %L, %L)', id, created_at, secret), ', '), string_agg(id::text, ', ')))
    FROM idempotency.secrets)) r
  WHERE NOT r.success
  LIMIT 1;
  IF failure IS NOT NULL THEN
    RAISE 'secrets could not be given to every node' USING ERRCODE = '55000', HINT = 'Call this again when all nodes answer.';
  END IF;
END
$$;
COMMENT ON FUNCTION idempotency.share_secrets() IS 'internal: has the workers of a Citus cluster use the secrets of the coordinator; errors: 42883, 55000';

-- What guards the rows of a distributed table looks its machine up on their node.
CREATE FUNCTION idempotency.share_machines() RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  failure text;
BEGIN
  IF NOT EXISTS (SELECT FROM idempotency.machines) OR (SELECT groupid <> 0 FROM pg_dist_local_group) THEN
    RETURN;
  END IF;
  SELECT r.result INTO failure
  FROM run_command_on_workers((
    SELECT format('DO %L', format('BEGIN %s END',
      string_agg(format('PERFORM idempotency.define_machine(%L, %L, %L);', name, definition, cyclic), ' ' ORDER BY name)))
    FROM idempotency.machines)) r
  WHERE NOT r.success
  LIMIT 1;
  IF failure IS NOT NULL THEN
    RAISE 'machines could not be defined on every node'
      USING ERRCODE = '55000', DETAIL = failure, HINT = 'Call this again when all nodes answer.';
  END IF;
END
$$;
COMMENT ON FUNCTION idempotency.share_machines() IS 'internal: has the workers of a Citus cluster define the machines of the coordinator; errors: 42883, 42P01, 55000';

CREATE FUNCTION idempotency.grants() RETURNS SETOF text
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
  WITH objects (name, owner, acl) AS (
    SELECT 'SCHEMA ' || oid::regnamespace, nspowner, nspacl FROM pg_namespace
    WHERE oid = 'idempotency'::regnamespace
    UNION ALL
    SELECT 'ROUTINE ' || oid::regprocedure, proowner, proacl FROM pg_proc
    WHERE pronamespace = 'idempotency'::regnamespace
    UNION ALL
    SELECT 'TABLE ' || oid::regclass, relowner, relacl FROM pg_class
    WHERE relnamespace = 'idempotency'::regnamespace AND (relkind = 'v' OR relname IN ('transition_log', 'machines')))
  SELECT format('GRANT %s ON %s TO %s%s', a.privilege_type, o.name,
                CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END,
                CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' END)
  FROM objects o, aclexplode(o.acl) a
  WHERE a.grantee <> o.owner
$$;
COMMENT ON FUNCTION idempotency.grants() IS 'internal: the privileges that there are on our objects, but for those of tables with secrets';

-- A definer: the keys belong to the objects' owner.
CREATE FUNCTION idempotency.distribute(
  colocate_with regclass DEFAULT NULL
) RETURNS void
LANGUAGE sql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
  SELECT idempotency.lock_privileges();
  SELECT idempotency.distribute_keys(colocate_with);
  SELECT idempotency.run_everywhere(ARRAY(SELECT idempotency.grants()));
  SELECT idempotency.share_machines();
END;
COMMENT ON FUNCTION idempotency.distribute(regclass) IS 'on the coordinator of a Citus cluster: distributes the keys by scope, with or without a table to be colocated with, and the tokens, and gives every node, also those added since, the grants and the machines; errors: 0A000, 55000, Citus'' own';

-- A node that was added has secrets of its own until it is given ours.
CREATE FUNCTION idempotency.reach_new_nodes() RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  ids CONSTANT text := 'SELECT string_agg(id::text, '' '' ORDER BY id) FROM idempotency.secrets';
  ours text;
BEGIN
  EXECUTE ids INTO ours;
  IF EXISTS (SELECT FROM run_command_on_workers(ids) WHERE success AND result IS DISTINCT FROM ours) THEN
    PERFORM idempotency.distribute();
  END IF;
END
$$;
COMMENT ON FUNCTION idempotency.reach_new_nodes() IS 'internal: what the purge worker calls on the coordinator of a Citus cluster: distribute(), if a node has not had it; errors: 0A000, 42883, 55000';

-- A function that does something costs more than any condition that stands
-- beside it: so the planner asks the others first, and nothing is done for rows
-- that they drop.
DO $$
DECLARE
  function regprocedure;
BEGIN
  FOR function IN
    SELECT oid FROM pg_catalog.pg_proc
    WHERE pronamespace = 'idempotency'::pg_catalog.regnamespace AND provolatile = 'v' AND prokind = 'f'
      AND prorettype <> 'trigger'::pg_catalog.regtype
  LOOP
    EXECUTE pg_catalog.format('ALTER FUNCTION %s COST 5000', function);
  END LOOP;
END
$$;

-- Nothing for PUBLIC, nor for any other role, even where default privileges
-- would give it: those that let a role read every table mean no secrets.
DO $$
DECLARE
  role text;
BEGIN
  FOR role IN
    SELECT 'PUBLIC'
    UNION
    SELECT a.grantee::pg_catalog.regrole::text
    FROM (SELECT nspowner, nspacl FROM pg_catalog.pg_namespace WHERE oid = 'idempotency'::pg_catalog.regnamespace
          UNION ALL
          SELECT relowner, relacl FROM pg_catalog.pg_class WHERE relnamespace = 'idempotency'::pg_catalog.regnamespace
          UNION ALL
          SELECT proowner, proacl FROM pg_catalog.pg_proc WHERE pronamespace = 'idempotency'::pg_catalog.regnamespace) o (owner, acl),
         pg_catalog.aclexplode(o.acl) a
    WHERE a.grantee <> o.owner AND a.grantee <> 0
  LOOP
    EXECUTE pg_catalog.format('REVOKE ALL ON SCHEMA idempotency FROM %s', role);
    EXECUTE pg_catalog.format('REVOKE ALL ON ALL TABLES IN SCHEMA idempotency FROM %s', role);
    EXECUTE pg_catalog.format('REVOKE ALL ON ALL SEQUENCES IN SCHEMA idempotency FROM %s', role);
    EXECUTE pg_catalog.format('REVOKE ALL ON ALL ROUTINES IN SCHEMA idempotency FROM %s', role);
  END LOOP;
END
$$;

-- The owner, superuser or not, has everything and may pass it on.  Not by
-- PostgreSQL's substitution of the name, which refuses one with a $ in it.
SELECT idempotency.grant_owner(r.rolname)
FROM pg_catalog.pg_extension e JOIN pg_catalog.pg_roles r ON r.oid = e.extowner
WHERE e.extname = 'idempotency';

-- A role that watches the server sees this too, and changes nothing.
SELECT idempotency.change_privileges('GRANT %s TO %I', 'pg_monitor', '{monitor}');
