# Dump and restore, of a database whose owner is a plain role that created the
# extension: by that role and by a superuser.  Keys and grants come back.  And
# DROP EXTENSION leaves nothing.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use Ask;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('dump');
$node->init(extra => [ '--encoding=UTF8' ]);
$node->start;
ask_at(node => $node);
my $dir = PostgreSQL::Test::Utils::tempdir;

$node->safe_psql(
	'postgres', q{
	CREATE ROLE owner LOGIN;
	CREATE ROLE app LOGIN;
	CREATE ROLE "odd ""ops" LOGIN;
	CREATE DATABASE source OWNER owner;
	CREATE DATABASE by_owner OWNER owner;
	CREATE DATABASE by_superuser OWNER owner;
	CREATE DATABASE by_restore OWNER owner;
	CREATE DATABASE by_role OWNER owner;
});

# All that we store, and who may do what
my $keys = q{SELECT string_agg(k::text, E'\n' ORDER BY k.scope, k.key) FROM idempotency.keys AS k};
my $grants = q{
	SELECT string_agg(format('%s: %s', rolname, object), E'\n' ORDER BY rolname, object)
	FROM (SELECT rolname, p.oid::regprocedure::text AS object FROM pg_proc AS p, pg_roles AS r
	      WHERE pronamespace = 'idempotency'::regnamespace AND has_function_privilege(r.oid, p.oid, 'EXECUTE')
	      UNION ALL
	      SELECT rolname, c.oid::regclass::text FROM pg_class AS c, pg_roles AS r
	      WHERE relnamespace = 'idempotency'::regnamespace AND relkind IN ('r', 'v', 'S') AND has_table_privilege(r.oid, c.oid, 'SELECT')
	      UNION ALL
	      SELECT rolname, nspname FROM pg_namespace AS n, pg_roles AS r
	      WHERE nspname = 'idempotency' AND has_schema_privilege(r.oid, n.oid, 'USAGE')) AS g
	WHERE rolname IN ('app', 'odd "ops')};
my $public = q{
	SELECT count(*) FROM pg_proc AS p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
	WHERE p.pronamespace = 'idempotency'::regnamespace AND a.grantee = 0};
my $su = $node->safe_psql('postgres', 'SELECT current_user');

query('owner', 'source', q{
	CREATE EXTENSION idempotency;
	SELECT idempotency.grant_usage('app');
	SELECT idempotency.grant_admin('odd "ops');});
is( query('owner', 'source', q{
		SELECT idempotency.once('dump', 'owner'), idempotency.forget('dump', 'owner')}),
	't|t', 'a plain role that creates the extension may use and administer it');
is(query('owner', 'source', q{
		SELECT count(*) FROM pg_class WHERE relnamespace = 'idempotency'::regnamespace AND relkind = 'v'
		  AND NOT has_table_privilege(oid, 'SELECT WITH GRANT OPTION')}), '0', 'and read the views');
is(sqlstate('owner', 'source', 'DELETE FROM idempotency.keys'), '42501', 'but not touch its tables');
query('app', 'source', q{
	BEGIN;
	SELECT idempotency.claim('dump', 'completed', '{"a": 1.0}', '30 days');
	SELECT idempotency.complete('dump', 'completed', E'byte\tfor\nbyte \\\\ {"b":1, "a":1}', '{"code": 201}');
	SELECT idempotency.claim('dump', E'failed \u00e9 ''"\\\\');
	SELECT idempotency.fail('dump', E'failed \u00e9 ''"\\\\', '');
	SELECT idempotency.once('dump', 'expired', '1 us');
	SELECT count(idempotency.once('many', i::text)) FROM generate_series(1, 1000) AS i;
	COMMIT;});
is(query($su, 'source', $public), '0', 'nothing is for PUBLIC');

$node->command_ok([ 'pg_dump', '-U', 'owner', '-f', "$dir/owner.sql", '-d', $node->connstr('source') ],
	'the owner dumps it');
$node->command_ok([ 'pg_dump', '-U', 'owner', '-Fc', '-f', "$dir/owner.dump", '-d', $node->connstr('source') ],
	'in the custom format, too');
$node->command_ok([ 'psql', '-Xq', '-v', 'ON_ERROR_STOP=1', '-U', 'owner', '-d', $node->connstr('by_owner'), '-f', "$dir/owner.sql" ],
	'and restores it');
$node->command_ok([ 'psql', '-Xq', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('by_superuser'), '-f', "$dir/owner.sql" ],
	'so does a superuser');
$node->command_ok([ 'pg_restore', '-e', '-U', 'owner', '-d', $node->connstr('by_restore'), "$dir/owner.dump" ],
	'and pg_restore');
$node->command_ok([ 'pg_restore', '-e', '--role', 'owner', '-d', $node->connstr('by_role'), "$dir/owner.dump" ],
	'also for a superuser in the role of the owner');
is(query($su, 'by_superuser', q{SELECT idempotency.grant_owner('owner')}), 't', 'after which the owner is let in again');

for my $db (qw(by_owner by_superuser by_restore by_role))
{
	is(query($su, $db, $keys), query($su, 'source', $keys), "$db: keys");
	is(query($su, $db, $grants), query($su, 'source', $grants), "$db: grants");
	is(query($su, $db, $public), '0', "$db: nothing for PUBLIC");
	is( query('app', $db, q{SELECT status, response = E'byte\tfor\nbyte \\\\ {"b":1, "a":1}', meta FROM idempotency.claim('dump', 'completed', '{"a": 1}')}),
		'completed|t|{"code": 201}', "$db: a retry gets the first answer");
	is(query('app', $db, q{SELECT status FROM idempotency.claim('dump', 'completed', '{"a": 2}')}),
		'mismatch', "$db: its request is compared");
	is(query('app', $db, q{SELECT status, response FROM idempotency.claim('dump', E'failed \u00e9 ''"\\\\')}),
		'failed|', "$db: an odd key, an empty answer");
	is(query('app', $db, q{SELECT idempotency.once('dump', 'expired'), idempotency.once('many', '1000'), idempotency.once('many', '1001')}),
		't|f|t', "$db: new keys are new, old ones old, expired ones absent");
	is(sqlstate('app', $db, q{SELECT idempotency.forget('dump', 'completed')}), '42501', "$db: app is no administrator");
	is(query('odd "ops', $db, q{SELECT idempotency.forget('dump', 'completed')}), 't', "$db: ops is");
	is(query('owner', $db, q{SELECT idempotency.once('dump', 'owner'), idempotency.forget('dump', 'owner')}), 't|t', "$db: so is the owner");
}
# a second generation
for my $db (qw(by_owner by_superuser by_restore by_role))
{
	$node->command_ok([ 'pg_dump', '-U', 'owner', '-f', "$dir/again.sql", '-d', $node->connstr($db) ],
		"$db: the owner can dump it again");
}

# a restore by the owner makes the grants the owner's; they can be taken back all the same
for my $by ([ 'by_owner', 'owner' ], [ 'by_superuser', $su ], [ 'by_restore', $su ], [ 'by_role', 'owner' ])
{
	my ($db, $role) = @$by;
	query($role, $db, q{SELECT idempotency.revoke_admin('odd "ops')});
	is(sqlstate('odd "ops', $db, q{SELECT idempotency.forget('dump', 'completed')}), '42501', "$db: ops is no administrator any more");
	is(query('odd "ops', $db, q{SELECT idempotency.once('dump', 'ops')}), 't', "$db: but a user");
	is(query('app', $db, q{SELECT idempotency.once('dump', 'app')}), 't', "$db: as app is");
	query($role, $db, q{SELECT idempotency.revoke_usage(r) FROM unnest('{app,odd \"ops}'::name[]) AS r});
	is(query($su, $db, $grants), '', "$db: revoked");
	is(query($su, $db, q{
		SELECT count(*) FROM pg_shdepend WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
		  AND refobjid IN (SELECT oid FROM pg_roles WHERE rolname IN ('app', 'odd "ops'))}), '0', "$db: nothing keeps the roles from being dropped");
	is(query('owner', $db, q{SELECT idempotency.once('dump', 'the owner'), idempotency.forget('dump', 'the owner')}), 't|t', "$db: the owner keeps everything");
}
is(query('owner', 'by_owner', q{SELECT idempotency.grant_usage('app'); GRANT SELECT ON idempotency.stats TO app}), 't', 'and may pass it on');

# DROP EXTENSION
query('owner', 'by_owner', 'DROP EXTENSION idempotency');
is( query($su, 'by_owner', q{
	SELECT (SELECT count(*) FROM pg_namespace WHERE nspname = 'idempotency')
	     + (SELECT count(*) FROM pg_proc WHERE probin LIKE '%idempotency%' OR oid > 16383)
	     + (SELECT count(*) FROM pg_class WHERE oid > 16383)
	     + (SELECT count(*) FROM pg_type WHERE oid > 16383)
	     + (SELECT count(*) FROM pg_event_trigger)
	     + (SELECT count(*) FROM pg_init_privs WHERE objoid > 16383)
	     + (SELECT count(*) FROM pg_shdepend WHERE dbid = (SELECT oid FROM pg_database WHERE datname = 'by_owner') AND refclassid = 'pg_authid'::regclass)}),
	'0', 'DROP EXTENSION leaves nothing');
query('owner', 'by_owner', 'CREATE EXTENSION idempotency');
is(query('owner', 'by_owner', q{SELECT idempotency.once('dump', 'completed')}), 't', 'and it can be created again');
# also in the session that has used it
is( query('owner', 'by_owner', q{
	DROP EXTENSION idempotency;
	CREATE EXTENSION idempotency;
	SELECT idempotency.once('dump', 'same session');
	DROP EXTENSION idempotency;
	CREATE EXTENSION idempotency;
	SELECT idempotency.once('dump', 'same session');}),
	"t\nt", 'in one session as well');

# with other defaults for what is created there
query($su, 'by_owner', q{
	CREATE ROLE reporting;
	CREATE ACCESS METHOD other TYPE TABLE HANDLER heap_tableam_handler;
	ALTER DATABASE by_owner SET default_table_access_method = other;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON SCHEMAS TO PUBLIC, reporting;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC, reporting;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO PUBLIC, reporting;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO PUBLIC, reporting;});
query('owner', 'by_owner', 'DROP EXTENSION idempotency');
query('owner', 'by_owner', 'CREATE EXTENSION idempotency');
is(query('owner', 'by_owner', q{SELECT idempotency.once('dump', 'defaults')}), 't', 'another access method is the default');
is(query($su, 'by_owner', q{
	SELECT string_agg(name, ' ')
	FROM (SELECT nspname, nspacl FROM pg_namespace WHERE nspname = 'idempotency'
	      UNION ALL SELECT relname, relacl FROM pg_class WHERE relnamespace = 'idempotency'::regnamespace AND relkind IN ('r', 'v', 'S')
	      UNION ALL SELECT proname, coalesce(proacl, acldefault('f', proowner)) FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace) AS o (name, acl),
	     aclexplode(acl) WHERE grantee IN (0, 'reporting'::regrole)}), '', 'nothing is for PUBLIC or another role, with default privileges that say otherwise');

# the schema is ours: nobody can have prepared it
query('owner', 'by_owner', 'DROP EXTENSION idempotency; CREATE SCHEMA idempotency');
is(sqlstate('owner', 'by_owner', 'CREATE EXTENSION idempotency'), '42P06', 'a schema that is there already is not taken over');

$node->stop;
done_testing();
