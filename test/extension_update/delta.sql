-- The same as a delta: what fresh.sql has, what it changes elsewhere, and the
-- privileges, which the install script gives at its end to everything.  Here by
-- name and on what is new: a GRANT of a script makes all that was ever granted
-- on the object part of the extension, and no dump has it any more.
-- complain if script is sourced in psql, rather than via ALTER EXTENSION
\echo Use "ALTER EXTENSION idempotency UPDATE" to load this file. \quit

ALTER TABLE idempotency.keys ADD COLUMN note text;
COMMENT ON COLUMN idempotency.keys.note IS 'a note';
COMMENT ON FUNCTION idempotency.purge(integer) IS 'removes what has expired';

CREATE TABLE idempotency.notes (
  id   bigint PRIMARY KEY,
  note text COLLATE "C" NOT NULL
);
CREATE INDEX notes_note ON idempotency.notes (note);
ALTER TABLE idempotency.notes SET (fillfactor = 90);
COMMENT ON TABLE idempotency.notes IS 'internal: notes';
COMMENT ON COLUMN idempotency.notes.note IS 'the note';
SELECT pg_catalog.pg_extension_config_dump('idempotency.notes', 'WHERE id > 0');

CREATE SEQUENCE idempotency.note_id_seq;
COMMENT ON SEQUENCE idempotency.note_id_seq IS 'internal: for notes';
SELECT pg_catalog.pg_extension_config_dump('idempotency.note_id_seq', '');

CREATE TYPE idempotency.note_result AS (id bigint, note text);
COMMENT ON TYPE idempotency.note_result IS 'a note';

CREATE FUNCTION idempotency.lock_name(scope text, key text DEFAULT 'k') RETURNS bigint
LANGUAGE c STABLE AS 'MODULE_PATHNAME', 'idempotency_lock_hash_of';
COMMENT ON FUNCTION idempotency.lock_name(text, text) IS 'the name of a lock';
REVOKE ALL ON FUNCTION idempotency.lock_name(text, text) FROM PUBLIC;

CREATE VIEW idempotency.all_notes AS SELECT id, note FROM idempotency.notes;
COMMENT ON VIEW idempotency.all_notes IS 'admin: the notes';

DO $$
DECLARE
  privilege text;
BEGIN
  FOR privilege IN
    SELECT p FROM pg_catalog.unnest(ARRAY['usage', 'admin', 'owner']) a, idempotency.privileges_of(a) p
    WHERE p OPERATOR(pg_catalog.~) ' idempotency\.(notes|note_id_seq|lock_name|all_notes)\M'
  LOOP
    EXECUTE pg_catalog.format('GRANT %s TO %s WITH GRANT OPTION', privilege, $role$@extowner@$role$);
  END LOOP;
END
$$;
