# What a major upgrade has to keep, by pg_upgrade and by dump and restore: every
# answer, fence and grant, and how all of it behaves afterwards.  Run by
# test/upgrade, which puts the installation to upgrade from in $oldinstall.
use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

die 'run by test/upgrade' unless $ENV{oldinstall};

# The database belongs to a plain role, which creates the extension and grants;
# another plain role is the application.
my %as = (
	owner => [ '-U', 'regress_owner' ],
	app => [ '-U', 'regress_app' ]);

sub query
{
	my ($node, $database, $who, $sql) = @_;
	return $node->safe_psql($database, $sql, extra_params => $as{$who});
}

my $old = PostgreSQL::Test::Cluster->new('old',
	install_path => $ENV{oldinstall});
my $new = PostgreSQL::Test::Cluster->new('new');
$old->init;
$new->init(extra => $new->pg_version >= 18 ? ['--no-data-checksums'] : []);
isnt($old->pg_version->major, $new->pg_version->major,
	'upgrade from ' . $old->pg_version . ' to ' . $new->pg_version);

$old->start;
$old->safe_psql('postgres', q{
	CREATE ROLE regress_owner LOGIN;
	CREATE ROLE regress_app LOGIN;
	CREATE DATABASE shop OWNER regress_owner;
});
query($old, 'shop', 'owner', q{
	CREATE EXTENSION idempotency;
	SELECT idempotency.grant_usage('regress_app');
});

query($old, 'shop', 'app', q{
	BEGIN;
	SELECT idempotency.claim('pay', 'completed', '{"amount": 10}', '30 days');
	SELECT idempotency.complete('pay', 'completed', '{"b":1,  "a":1.0}', '{"code": 201}');
	SELECT idempotency.claim('pay', 'failed', NULL, '30 days');
	SELECT idempotency.fail('pay', 'failed', ''::text, '{"code": 402}');
	SELECT idempotency.claim('pay', 'null', NULL, '30 days');
	SELECT idempotency.complete('pay', 'null');
	SELECT idempotency.once('mail', 'once', '30 days');
	SELECT idempotency.claim('pay', 'expired', NULL, '1 microsecond');
	SELECT idempotency.complete('pay', 'expired', 'gone');
	COMMIT;
});

# What has to read the same afterwards.
my %same = (
	'stored answers' => q{
		SELECT scope, key, r.*
		FROM (VALUES ('pay', 'completed'), ('pay', 'failed'), ('pay', 'null'),
			('pay', 'expired'), ('mail', 'once'), ('pay', 'unknown')) k(scope, key),
			idempotency.lookup(scope, key) r},
	'members of the extension' => q{
		SELECT pg_describe_object(classid, objid, objsubid)
		FROM pg_depend
		WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
			AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idempotency')
		ORDER BY 1},
	'privileges' => q{
		SELECT p.oid::regprocedure, has_function_privilege('regress_app', p.oid, 'EXECUTE'),
			has_function_privilege('regress_owner', p.oid, 'EXECUTE WITH GRANT OPTION'),
			has_function_privilege('public', p.oid, 'EXECUTE')
		FROM pg_proc p WHERE pronamespace = 'idempotency'::regnamespace ORDER BY p.oid::regprocedure::text COLLATE "C"});

my %before = map { $_ => query($old, 'shop', 'owner', $same{$_}) } keys %same;

# The same, and alive: each step of these would fail on an empty or stale table.
sub check
{
	my ($how, $database) = @_;

	is(query($new, $database, 'owner', $same{$_}), $before{$_}, "$how: $_")
	  for sort keys %same;

	is(query($new, $database, 'app', q{
		SELECT * FROM idempotency.claim('pay', 'completed', '{"amount": 10}');
		SELECT * FROM idempotency.claim('pay', 'completed', '{"amount": 11}');
		SELECT * FROM idempotency.claim('pay', 'failed');
		SELECT status, response IS NULL FROM idempotency.claim('pay', 'null');
		SELECT idempotency.once('mail', 'once');
		}),
		join("\n",
			'completed|{"b":1,  "a":1.0}|{"code": 201}',
			'mismatch||',
			'failed||{"code": 402}',
			'completed|t',
			'f'),
		"$how: answers are replayed");
	is(query($new, $database, 'app', q{
		SELECT idempotency.once('pay', 'expired', '30 days');
		SELECT idempotency.once('pay', 'expired');
		SELECT idempotency.once('mail', 'new');
		}),
		"t\nf\nt",
		"$how: an expired key and a new one run");
	return;
}

$old->stop;
chdir $new->basedir or die;
command_ok(
	[
		'pg_upgrade', '--no-sync',
		'--old-datadir', $old->data_dir,
		'--new-datadir', $new->data_dir,
		'--old-bindir', $old->config_data('--bindir'),
		'--new-bindir', $new->config_data('--bindir'),
		'--socketdir', $new->host,
		'--old-port', $old->port,
		'--new-port', $new->port
	],
	'pg_upgrade');
$new->start;

my $dump = $new->basedir . '/shop.sql';
$new->command_ok([ 'pg_dump', '-f', $dump, '-U', 'regress_owner', 'shop' ],
	'pg_dump by the owner');
check('pg_upgrade', 'shop');

# restored by a superuser, who then has to grant to the owner
$new->safe_psql('postgres', 'CREATE DATABASE restored OWNER regress_owner');
$new->command_ok(
	[ 'psql', '-X', '-v', 'ON_ERROR_STOP=1', '-d', 'restored', '-f', $dump ],
	'restore by a superuser');
$new->safe_psql('restored', q{SELECT idempotency.grant_admin('regress_owner')});
check('dump and restore', 'restored');

$new->stop;
done_testing();
