# What a major upgrade has to keep, by pg_upgrade and by dump and restore: every
# answer, fence and grant, and how all of it behaves afterwards.  Run by
# test/pg_upgrade, which puts the installation to upgrade from in $oldinstall.
use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

die 'run by test/pg_upgrade' unless $ENV{oldinstall};

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

# The first lease has lapsed by now, the second is held over the upgrade; one
# lock is held, one was released.
query($old, 'shop', 'app', q{
	SELECT fence FROM idempotency.lease('ship', 'lapsed', '0', NULL, '30 days') \gset
	SELECT idempotency.checkpoint('ship', 'lapsed', :fence, 'label printed', '{"label": 7}');
	SELECT fence FROM idempotency.lease('ship', 'held', '1 day', '{"order": 1}', '30 days') \gset
	SELECT idempotency.acquire_lock('held', '1 day');
});
my $fence = query($old, 'shop', 'app',
	q{SELECT idempotency.acquire_lock('released', '1 day')});
query($old, 'shop', 'app',
	qq{SELECT idempotency.release_lock('released', $fence)});

# Tokens: not used yet, used, revoked.  Events: acknowledged, out with a taker,
# waiting behind it, of another key.
my %token = map {
	$_ => query($old, 'shop', 'app',
		qq{SELECT idempotency.issue_token('$_', 'reset', '7 days', '{"n": 1}')})
} qw(unused used revoked);
query($old, 'shop', 'app', qq{
	SELECT idempotency.consume_token('$token{used}', 'used', 'reset');
	SELECT idempotency.revoke_tokens('revoked', 'reset');
	SELECT idempotency.emit('mail', '{"to": 1}', 'done');
	SELECT idempotency.ack(id, attempt) FROM idempotency.take('mail');
	SELECT idempotency.emit('mail', '{"to": 2}', 'a');
	SELECT idempotency.take('mail', 1, '1 day');
	SELECT idempotency.emit('mail', '{"to": 3}', 'a');
	SELECT idempotency.emit('mail', '{"to": 4}', 'b');
});

# A guarded, versioned table, and one that a fence guards.
query($old, 'shop', 'owner', q{
	SELECT idempotency.define_machine('order',
		'{"initial": "NEW", "transitions": {"NEW": {"pay": "PAID"}, "PAID": {"refund": "REFUNDED"}}}');
	CREATE TABLE ord (id integer PRIMARY KEY, status text NOT NULL, version bigint NOT NULL DEFAULT 1);
	SELECT idempotency.attach_machine('ord', 'status', 'order', history => true);
	SELECT idempotency.attach_version('ord', 'version');
	INSERT INTO ord VALUES (1, 'NEW'), (2, 'NEW');
	SELECT idempotency.fire('ord', 1, 'pay');
	CREATE TABLE stock (id integer PRIMARY KEY, amount integer, fence bigint);
	SELECT idempotency.attach_fence('stock', 'fence');
	INSERT INTO stock VALUES (1, 10, 41);
	GRANT ALL ON ord, stock TO regress_app;
});

# What has to read the same afterwards.
my %same = (
	# but those of which a restored extension has one more: its own first
	'rows of every table' => q{
		SELECT relname, query_to_xml(
			format('SELECT t::text COLLATE "C" AS r FROM %s t ORDER BY r', oid::regclass),
			false, true, '')
		FROM pg_class
		WHERE relnamespace = 'idempotency'::regnamespace AND relkind = 'r'
			AND relname NOT IN ('token_keys', 'secrets')
		ORDER BY relname},
	'sequences' => q{
		SELECT sequencename, last_value FROM pg_sequences
		WHERE schemaname = 'idempotency' ORDER BY sequencename},
	# without array and row types, which are no members of their own from 17 on
	'members of the extension' => q{
		SELECT pg_describe_object(classid, objid, objsubid) COLLATE "C" AS member
		FROM pg_depend
		LEFT JOIN pg_type t ON classid = 'pg_type'::regclass AND objid = t.oid
		LEFT JOIN pg_class c ON typrelid = c.oid
		WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
			AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idempotency')
			AND coalesce(typelem, 0) = 0 AND coalesce(relkind, 'c') = 'c'
		ORDER BY member},
	'privileges' => q{
		SELECT f, has_function_privilege('regress_app', f, 'EXECUTE'),
			has_function_privilege('regress_owner', f, 'EXECUTE')
		FROM (SELECT substr(p, 21)::regprocedure
			FROM unnest(ARRAY['usage', 'admin']) a, idempotency.privileges_of(a) p
			WHERE p LIKE 'EXECUTE ON FUNCTION %') u(f)
		ORDER BY f::text COLLATE "C"},
	'nothing for everybody' => q{
		SELECT oid::regprocedure FROM pg_proc
		WHERE pronamespace = 'idempotency'::regnamespace
			AND has_function_privilege('public', oid, 'EXECUTE')});

my %before = map { $_ => $old->safe_psql('shop', $same{$_}) } keys %same;

is($before{'nothing for everybody'}, '', 'nothing is granted to PUBLIC');
isnt($before{$_}, '', "$_: not empty")
  for 'members of the extension', 'privileges', 'rows of every table';

# The same, and alive: each step of these would fail on an empty or stale table.
sub check
{
	my ($how, $database) = @_;

	is($new->safe_psql($database, $same{$_}), $before{$_}, "$how: $_")
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

	is(query($new, $database, 'app', q{
		SELECT fence FROM idempotency.lookup('ship', 'lapsed') \gset
		SELECT status, attempt, checkpoint, checkpoint_data, fence > :fence
		FROM idempotency.lease('ship', 'lapsed', '1 day');
		SELECT status, fence FROM idempotency.lease('ship', 'held', '1 day');
		SELECT fence FROM idempotency.lookup('ship', 'held') \gset
		SELECT idempotency.complete('ship', 'held', 'sent'::text, NULL, :fence) > now();
		SELECT status, response FROM idempotency.lease('ship', 'held', '1 day', '{"order": 1}');
		}),
		join("\n",
			'claimed|2|label printed|{"label": 7}|t',
			'in_progress|',
			't',
			'completed|sent'),
		"$how: leases go on");
	is(query($new, $database, 'app', qq{
		SELECT idempotency.acquire_lock('held', '1 day');
		SELECT idempotency.acquire_lock('released', '1 day') > $fence;
		}),
		"\nt",
		"$how: locks go on");

	is(query($new, $database, 'app', qq{
		SELECT status, payload FROM idempotency.consume_token('$token{unused}', 'unused', 'reset');
		SELECT status FROM idempotency.consume_token('$token{unused}', 'unused', 'reset');
		SELECT status FROM idempotency.check_token('$token{used}', 'used', 'reset');
		SELECT status FROM idempotency.check_token('$token{revoked}', 'revoked', 'reset');
		SELECT status FROM idempotency.check_token(
			idempotency.issue_token('revoked', 'reset'), 'revoked', 'reset');
		}),
		join("\n", 'consumed|{"n": 1}', 'used', 'used', 'revoked', 'valid'),
		"$how: tokens are judged as before");
	is(query($new, $database, 'app', q{
		SELECT payload FROM idempotency.take('mail');
		SELECT idempotency.emit('mail', '{"to": 5}', 'c');
		SELECT payload FROM idempotency.take('mail');
		}),
		join("\n", '{"to": 4}', '5', '{"to": 5}'),
		"$how: events keep their order");

	is(query($new, $database, 'app', q{
		SELECT outcome, state FROM idempotency.fire('ord', 1, 'refund');
		SELECT outcome, state FROM idempotency.fire('ord', 2, 'refund');
		SELECT outcome, version FROM idempotency.update_if('ord', 1, 1, '{}');
		SELECT version FROM ord WHERE id = 1;
		}),
		join("\n", 'applied|REFUNDED', 'conflict|NEW', 'conflict|3', '3'),
		"$how: machine and version guard the table");
	for my $refused ([ 'IK003', q{UPDATE ord SET status = 'REFUNDED' WHERE id = 2} ],
		[ 'IK003', q{INSERT INTO ord VALUES (3, 'PAID')} ],
		[ 'IK004', q{UPDATE ord SET version = 7 WHERE id = 2} ],
		[ 'IK002', q{UPDATE stock SET amount = 9 WHERE id = 1} ],
		[ 'IK002', q{UPDATE stock SET amount = 9, fence = 40 WHERE id = 1} ])
	{
		my ($state, $sql) = @$refused;
		is(query($new, $database, 'app', qq{
			DO \$\$ BEGIN $sql; RAISE 'let through';
			EXCEPTION WHEN others THEN
				PERFORM set_config('test.state', SQLSTATE, false); END \$\$;
			SELECT current_setting('test.state')}),
			$state, "$how: refused: $sql");
	}
	is(query($new, $database, 'app', q{UPDATE stock SET amount = 9, fence = 42 RETURNING amount}),
		'9', "$how: a higher fence is let through");
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
