-- What the made-up next version has beside version 1.0: its part of the
-- install script, which stands before the section on privileges.

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

CREATE VIEW idempotency.all_notes AS SELECT id, note FROM idempotency.notes;
COMMENT ON VIEW idempotency.all_notes IS 'admin: the notes';
