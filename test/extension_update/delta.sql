-- The same as a delta: what fresh.sql has, what it changes elsewhere, and the
-- privileges, which the install script gives at its end to everything.  Here by
-- name and on what is new: a GRANT of a script makes all that was ever granted
-- on the object part of the extension, and no dump has it any more.
-- complain if script is sourced in psql, rather than via ALTER EXTENSION
\echo Use "ALTER EXTENSION idempotency UPDATE" to load this file. \quit

ALTER TABLE idempotency.keys ADD COLUMN note text;
COMMENT ON COLUMN idempotency.keys.note IS 'a note';
COMMENT ON FUNCTION idempotency.purge(integer) IS 'removes what has expired';

-- Here stands what fresh.sql has.

REVOKE ALL ON FUNCTION idempotency.lock_name(text, text) FROM PUBLIC;

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
