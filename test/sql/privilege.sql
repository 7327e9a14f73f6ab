-- Privileges: nothing for PUBLIC; grant_usage and grant_admin, and back.
\set SHOW_CONTEXT never
CREATE ROLE regress_app;
CREATE ROLE regress_admin;
CREATE ROLE "regress odd "".name" NOINHERIT;
CREATE ROLE "Regress_App";
CREATE SCHEMA regress;
GRANT USAGE ON SCHEMA regress TO PUBLIC;

CREATE FUNCTION regress.functions_for(audience text) RETURNS SETOF regprocedure LANGUAGE sql AS $$
SELECT regexp_replace(p, '^EXECUTE ON (FUNCTION|PROCEDURE) ', '')::regprocedure FROM idempotency.privileges_of(audience) AS p WHERE p LIKE 'EXECUTE ON %' $$;
-- may_call: which of our functions a role may call, against the lists
CREATE VIEW regress.may_call AS
SELECT r.rolname AS role,
       has_schema_privilege(r.oid, 'idempotency', 'USAGE') AS schema,
       count(*) FILTER (WHERE p.oid IN (SELECT regress.functions_for('usage')::oid)) = (SELECT count(*) FROM regress.functions_for('usage')) AS all_usage,
       count(*) FILTER (WHERE p.oid IN (SELECT regress.functions_for('admin')::oid)) = (SELECT count(*) FROM regress.functions_for('admin')) AS all_admin,
       count(*) FILTER (WHERE p.oid IN (SELECT regress.functions_for('usage')::oid)) AS any_usage,
       count(*) FILTER (WHERE p.oid IN (SELECT regress.functions_for('admin')::oid)) AS any_admin,
       count(*) FILTER (WHERE p.oid NOT IN (SELECT regress.functions_for('usage')::oid UNION SELECT regress.functions_for('admin')::oid)) AS internal
FROM pg_roles AS r LEFT JOIN pg_proc AS p ON p.pronamespace = 'idempotency'::regnamespace AND has_function_privilege(r.oid, p.oid, 'EXECUTE')
WHERE r.rolname ~* '^regress'
GROUP BY r.oid, r.rolname;
CREATE VIEW regress.rights AS
SELECT role, schema, all_usage OR any_usage > 0 AND NULL AS usage, all_admin OR any_admin > 0 AND NULL AS admin, internal FROM regress.may_call;
-- NULL is also what grant and revoke return
\pset null '(partly)'

-- nobody has anything, and the lists name what is there
SELECT * FROM regress.rights ORDER BY role COLLATE "C";
SELECT name FROM unnest('{claim,complete,fail,release,once,run,lookup}'::text[]) AS name
EXCEPT SELECT proname FROM regress.functions_for('usage') AS f JOIN pg_proc ON pg_proc.oid = f;
SELECT f FROM regress.functions_for('admin') AS f WHERE f::text LIKE 'idempotency.forget(%';
SELECT count(*) AS in_both FROM (SELECT regress.functions_for('usage') INTERSECT SELECT regress.functions_for('admin')) AS b;
SELECT count(*) AS unknown FROM regress.functions_for('neither');

-- grant and revoke
SELECT idempotency.grant_usage('regress_app'), idempotency.grant_admin('regress_admin');
SELECT * FROM regress.rights ORDER BY role COLLATE "C";
SELECT idempotency.grant_usage('regress_app') AS again;
SELECT idempotency.revoke_admin('regress_admin');
SELECT * FROM regress.rights ORDER BY role COLLATE "C";
SELECT idempotency.grant_admin('regress_admin'), idempotency.revoke_usage('regress_app');
SELECT idempotency.revoke_usage('regress_app') AS again;
SELECT * FROM regress.rights ORDER BY role COLLATE "C";
-- revoke_usage takes back what grant_admin gave, too
SELECT idempotency.revoke_usage('regress_admin');
SELECT * FROM regress.rights ORDER BY role COLLATE "C";

-- also what was granted by another role, and passed on by one more
GRANT USAGE ON SCHEMA idempotency TO "Regress_App" WITH GRANT OPTION;
GRANT EXECUTE ON FUNCTION idempotency.once(text, text, interval), idempotency.purge(integer) TO "Regress_App" WITH GRANT OPTION;
SET ROLE "Regress_App";
GRANT USAGE ON SCHEMA idempotency TO regress_admin WITH GRANT OPTION;
GRANT EXECUTE ON FUNCTION idempotency.once(text, text, interval), idempotency.purge(integer) TO regress_admin WITH GRANT OPTION;
SET ROLE regress_admin;
GRANT USAGE ON SCHEMA idempotency TO regress_app;
GRANT EXECUTE ON FUNCTION idempotency.once(text, text, interval), idempotency.purge(integer) TO regress_app;
RESET ROLE;
SELECT * FROM regress.rights ORDER BY role COLLATE "C";
SELECT idempotency.revoke_admin('regress_app');
SELECT * FROM regress.rights ORDER BY role COLLATE "C";
SELECT idempotency.revoke_usage('regress_app');
SELECT * FROM regress.rights ORDER BY role COLLATE "C";
SET ROLE regress_admin;
SELECT idempotency.once('privilege', 'granted');
GRANT EXECUTE ON FUNCTION idempotency.once(text, text, interval) TO regress_app;
RESET ROLE;
SELECT idempotency.revoke_usage('Regress_App'), idempotency.revoke_usage('regress_admin');
SELECT role, any_usage FROM regress.may_call WHERE any_usage > 0 ORDER BY role COLLATE "C";
SELECT idempotency.revoke_usage('regress_app');
SELECT * FROM regress.rights ORDER BY role COLLATE "C";

-- odd names are names
SELECT idempotency.grant_usage('regress odd ".name'), idempotency.grant_admin('Regress_App');
SELECT * FROM regress.rights ORDER BY role COLLATE "C";
SET ROLE "regress odd "".name";
SELECT idempotency.once('privilege', 'odd');
RESET ROLE;
SELECT idempotency.revoke_usage('regress odd ".name'), idempotency.revoke_usage('Regress_App');
-- and what is not a role is refused
SELECT idempotency.grant_usage('regress_nobody');
\echo :LAST_ERROR_SQLSTATE
SELECT idempotency.grant_admin('regress_app, regress_admin');
\echo :LAST_ERROR_SQLSTATE
SELECT idempotency.revoke_usage('REGRESS_APP');
\echo :LAST_ERROR_SQLSTATE
SELECT idempotency.grant_usage('current_user');
\echo :LAST_ERROR_SQLSTATE
SELECT idempotency.grant_usage('');
\echo :LAST_ERROR_SQLSTATE
SELECT idempotency.grant_usage(NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT idempotency.grant_admin(NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT idempotency.revoke_usage(NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT idempotency.revoke_admin(NULL);
\echo :LAST_ERROR_SQLSTATE
SELECT * FROM regress.rights ORDER BY role COLLATE "C";

-- to all roles: it says what that means
SELECT idempotency.grant_usage('public');
SELECT idempotency.grant_usage('public') AS again;
SELECT role FROM regress.may_call WHERE any_usage > 0 ORDER BY role COLLATE "C";
SELECT idempotency.revoke_usage('public');
SELECT role FROM regress.may_call WHERE any_usage > 0 ORDER BY role COLLATE "C";
SELECT idempotency.grant_owner('public');
\echo :LAST_ERROR_SQLSTATE

-- what the extension's owner has: all of it, to be passed on
SELECT idempotency.grant_owner('regress_admin');
SET SESSION AUTHORIZATION regress_admin;
SELECT idempotency.grant_usage('regress_app');
GRANT EXECUTE ON FUNCTION idempotency.once(text, text, interval) TO "Regress_App";
SELECT count(*) >= 0 AS dumped FROM idempotency.token_keys;
DELETE FROM idempotency.transition_log WHERE id < 0;
DELETE FROM idempotency.keys;
RESET SESSION AUTHORIZATION;
SELECT name, count(*) FROM (
  SELECT unnest(ARRAY(SELECT CASE WHEN has_table_privilege('regress_admin', c.oid, p || ' WITH GRANT OPTION') THEN p END
                      FROM unnest('{SELECT,INSERT,UPDATE,DELETE,TRUNCATE,REFERENCES,TRIGGER}'::text[]) p)) AS name
  FROM pg_class c WHERE relnamespace = 'idempotency'::regnamespace AND relkind = 'r') t
WHERE name IS NOT NULL GROUP BY name ORDER BY name;
SELECT idempotency.revoke_usage('Regress_App'), idempotency.revoke_usage('regress_app');
DROP OWNED BY regress_admin;
SELECT * FROM regress.rights ORDER BY role COLLATE "C";

-- usage through a role that one is a member of
SELECT idempotency.grant_usage('regress_app');
CREATE ROLE regress_member IN ROLE regress_app;
SET SESSION AUTHORIZATION regress_member;
SELECT idempotency.once('privilege', 'member');
RESET SESSION AUTHORIZATION;

-- what a user of ours cannot do
SET SESSION AUTHORIZATION regress_app;
SELECT idempotency.forget('privilege', 'member');
SELECT idempotency.grant_usage('regress_app');
SELECT idempotency.grant_admin('regress_app');
SELECT idempotency.revoke_usage('regress_app');
SELECT idempotency.revoke_admin('regress_app');
SELECT idempotency.privileges_of('usage');
TABLE idempotency.keys;
INSERT INTO idempotency.keys (created_at, expires_at, status, key, scope) VALUES (now(), now(), 'c', 'k', 's');
UPDATE idempotency.keys SET response = 'forged';
TRUNCATE idempotency.keys;
TRUNCATE idempotency.keys;
BEGIN;
LOCK idempotency.keys;
ROLLBACK;
CREATE FUNCTION idempotency.claim(scope text, key text) RETURNS text LANGUAGE sql AS $$ SELECT 'planted' $$;
CREATE TABLE idempotency.t (a integer);
GRANT EXECUTE ON FUNCTION idempotency.once(text, text, interval) TO regress_admin;
RESET SESSION AUTHORIZATION;
SELECT * FROM regress.rights WHERE role = 'regress_admin';
-- no table, sequence or column of ours for anybody
SELECT c.relname, r.rolname
FROM pg_class AS c, pg_roles AS r
WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('r', 'p', 'S') AND r.rolname ~* '^regress'
  AND CASE WHEN c.relkind = 'S' THEN has_sequence_privilege(r.oid, c.oid, 'USAGE, SELECT, UPDATE')
           ELSE has_table_privilege(r.oid, c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
             OR has_any_column_privilege(r.oid, c.oid, 'SELECT, INSERT, UPDATE, REFERENCES') END;

-- without usage, nothing: not even a look
SET SESSION AUTHORIZATION regress_admin;
SELECT idempotency.once('privilege', 'k');
SELECT idempotency.lookup('privilege', 'member');
RESET SESSION AUTHORIZATION;
-- EXECUTE without USAGE on the schema is no help, and the reverse
GRANT USAGE ON SCHEMA idempotency TO regress_admin;
SET SESSION AUTHORIZATION regress_admin;
SELECT idempotency.once('privilege', 'k');
\echo :LAST_ERROR_SQLSTATE
RESET SESSION AUTHORIZATION;
REVOKE USAGE ON SCHEMA idempotency FROM regress_admin;

-- an administrator
SELECT idempotency.grant_admin('regress_admin');
SET SESSION AUTHORIZATION regress_admin;
SELECT idempotency.forget('privilege', 'member');
SELECT idempotency.grant_usage('regress_admin');
RESET SESSION AUTHORIZATION;

-- the tenant's wall that doc/guarantees.md names: a definer function that fixes the scope
CREATE FUNCTION regress.once(key text) RETURNS boolean SECURITY DEFINER SET search_path = pg_catalog, pg_temp LANGUAGE sql
  AS $$ SELECT idempotency.once('privilege:' || session_user, key) $$;
SET SESSION AUTHORIZATION "Regress_App";
SELECT regress.once('k'), regress.once('k');
SELECT idempotency.once('privilege:Regress_App', 'k');
RESET SESSION AUTHORIZATION;

-- every function that runs as its owner has a fixed search_path; none but the grants is one
SELECT proname, proconfig FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace AND prosecdef AND proname ~ '^(grant|revoke)_' ORDER BY proname;
SELECT count(*) AS without_search_path FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace AND prosecdef
  AND NOT coalesce(proconfig @> '{"search_path=pg_catalog, pg_temp"}', false);
-- every object says what it is
SELECT pg_describe_object(classid, objid, objsubid) AS without_comment
FROM pg_depend
WHERE refclassid = 'pg_extension'::regclass AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idempotency') AND deptype = 'e'
  AND obj_description(objid, classid::regclass::name) IS NULL
  AND NOT (classid = 'pg_type'::regclass AND (SELECT typtype = 'c' AND typrelid IN (SELECT oid FROM pg_class WHERE relkind <> 'c') OR typelem <> 0 FROM pg_type WHERE oid = objid))
ORDER BY 1;

SET client_min_messages = warning;
TRUNCATE idempotency.keys;
SELECT count(*) FROM unnest('{regress_app,regress_admin}'::name[]) AS role, LATERAL idempotency.revoke_usage(role);
DROP SCHEMA regress CASCADE;
DROP ROLE regress_member, regress_app, regress_admin, "Regress_App", "regress odd "".name";
