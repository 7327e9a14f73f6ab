/* idempotency 1.0: install script */

-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION idempotency" to load this file. \quit

-- The schema is made here, not by the control file: so it belongs to the
-- extension, and nobody who made it before could plant functions beside ours.
CREATE SCHEMA idempotency;
COMMENT ON SCHEMA idempotency IS 'idempotency: keys, state machines, versions, one-time tokens, leases and the outbox';

----------------------------------------------------------------------------
-- Keys
----------------------------------------------------------------------------

----------------------------------------------------------------------------
-- State machines
----------------------------------------------------------------------------

----------------------------------------------------------------------------
-- Versions
----------------------------------------------------------------------------

----------------------------------------------------------------------------
-- One-time tokens
----------------------------------------------------------------------------

----------------------------------------------------------------------------
-- Outbox
----------------------------------------------------------------------------

----------------------------------------------------------------------------
-- Upkeep and insight
----------------------------------------------------------------------------

----------------------------------------------------------------------------
-- Privileges: nothing for PUBLIC, everything by grant_usage and grant_admin
----------------------------------------------------------------------------

-- Who may call what; whatever is in neither list is internal.
CREATE FUNCTION idempotency.functions_for(audience text) RETURNS SETOF regprocedure
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
  SELECT p.oid::regprocedure
  FROM pg_proc p
  WHERE p.pronamespace = 'idempotency'::regnamespace
    AND p.proname = ANY (CASE audience
      WHEN 'usage' THEN ARRAY[
        'claim', 'complete', 'fail', 'release', 'once', 'run', 'lookup'
      ]::name[]
      WHEN 'admin' THEN ARRAY[
        'forget'
      ]::name[]
    END)
$$;
COMMENT ON FUNCTION idempotency.functions_for(text) IS 'internal: the functions that grant_usage (''usage'') and grant_admin (''admin'') are about';

-- Definers, so that the grants come from the objects' owner and a dump holds
-- plain GRANT statements that any later owner of the extension can repeat.
CREATE FUNCTION idempotency.grant_usage(role name) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  f regprocedure;
BEGIN
  EXECUTE format('GRANT USAGE ON SCHEMA idempotency TO %I', role);
  FOR f IN SELECT * FROM idempotency.functions_for('usage') LOOP
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', f, role);
  END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency.grant_usage(name) IS 'lets a role call what an application calls; error: 42704 unknown role';

CREATE FUNCTION idempotency.revoke_usage(role name) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  f regprocedure;
BEGIN
  FOR f IN SELECT * FROM idempotency.functions_for('usage') LOOP
    EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM %I', f, role);
  END LOOP;
  EXECUTE format('REVOKE USAGE ON SCHEMA idempotency FROM %I', role);
END
$$;
COMMENT ON FUNCTION idempotency.revoke_usage(name) IS 'takes back what grant_usage gave; error: 42704 unknown role';
