# Machines over dump and restore, restart, standby and logical replication, and
# through drivers that send parameters without a type.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use Ask;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('machine');
$node->init(allows_streaming => 1);
$node->start;
ask_at(node => $node);
my $dir = PostgreSQL::Test::Utils::tempdir;

$node->safe_psql(
	'postgres', q{
	CREATE ROLE owner LOGIN;
	CREATE ROLE app LOGIN;
	CREATE ROLE auditor LOGIN;
	CREATE DATABASE source OWNER owner;
	CREATE DATABASE by_owner OWNER owner;
	CREATE DATABASE by_superuser OWNER owner;
});

# A dropped column before the state, a renamed column, a partitioned table.
query('owner', 'source', q{
	CREATE EXTENSION idempotency;
	SELECT idempotency.grant_usage('app');
	SELECT idempotency.define_machine('order', '{"initial": "NEW", "transitions": {"NEW": {"pay": "PAID"}, "PAID": {"ship": "SENT"}}}');
	SELECT idempotency.define_machine('old', '{"initial": "A", "transitions": {"A": ["B"]}}');
	CREATE TABLE ord (gone int, id int PRIMARY KEY, status text, version bigint NOT NULL DEFAULT 1);
	ALTER TABLE ord DROP gone;
	SELECT idempotency.attach_machine('ord', 'status', 'order', true);
	SELECT idempotency.attach_version('ord', 'version');
	ALTER TABLE ord RENAME status TO "the State";
	CREATE TABLE parted (id int PRIMARY KEY, status text) PARTITION BY RANGE (id);
	CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (1) TO (100);
	SELECT idempotency.attach_machine('parted', 'status', 'order');
	GRANT SELECT, INSERT, UPDATE ON ord, parted TO app;
	INSERT INTO ord SELECT i, 'NEW' FROM generate_series(1, 9) i;
	INSERT INTO parted SELECT i, 'NEW' FROM generate_series(1, 9) i;
	SELECT idempotency.fire('ord', 1, 'pay');
	SELECT idempotency.fire('parted', 1, 'pay');});
query('owner', 'source', "SELECT idempotency.grant_admin('auditor')");
is(query('auditor', 'source', 'SELECT row_id, event, to_state FROM idempotency.transition_log'), '1|pay|PAID',
	'an administrator reads the history');
is(sqlstate('auditor', 'source', 'DELETE FROM idempotency.transition_log'), '42501', 'and does not change it');
is(sqlstate('app', 'source', 'TABLE idempotency.transition_log'), '42501', 'an application does not read it');

my $stored = q{
	SELECT string_agg(m::text, E'\n' ORDER BY name) FROM idempotency.machines m
	UNION ALL SELECT string_agg(l::text, E'\n' ORDER BY id) FROM idempotency.transition_log l
	UNION ALL SELECT last_value::text FROM idempotency.transition_log_id_seq
	UNION ALL SELECT string_agg(pg_get_triggerdef(oid), E'\n' ORDER BY tgrelid::regclass::text, tgname) FROM pg_trigger WHERE NOT tgisinternal};
my $before = query('owner', 'source', $stored);

$node->command_ok([ 'pg_dump', '-U', 'owner', '-d', $node->connstr('source'), '-f', "$dir/owner.sql" ],
	'the owner dumps');
my $su = $node->safe_psql('postgres', 'SELECT current_user');
for my $case ([ 'owner', 'by_owner' ], [ $su, 'by_superuser' ])
{
	my ($role, $db) = @$case;
	$node->command_ok([ 'psql', '-X', '-q', '-U', $role, '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr($db), '-f', "$dir/owner.sql" ],
		"restore into $db");
	is(query($su, $db, $stored), $before, "$db: machines, history and guards are back");
	is(sqlstate('app', $db, q{UPDATE ord SET "the State" = 'NEW' WHERE id = 1}), 'IK003', "$db: the guard guards");
	is(sqlstate('app', $db, q{INSERT INTO parted VALUES (50, 'PAID')}), 'IK003', "$db: also the partitions");
	is(sqlstate('app', $db, q{UPDATE ord SET version = 7 WHERE id = 1}), 'IK004', "$db: the version counts");
	is(query('app', $db, q{SELECT (idempotency.fire('ord', 1, 'ship')).outcome}), 'applied', "$db: and moves go on");
	is(query($su, $db, 'SELECT count(*), max(id) FROM idempotency.transition_log'), '2|2', "$db: in the history, too");
}

# A change made as a replica, or by TRUNCATE, is seen by a session that has the
# machine cached.
is( query($su, 'source', q{
		UPDATE ord SET "the State" = 'PAID' WHERE id = 2;
		SET session_replication_role = replica;
		UPDATE idempotency.machines SET definition = '{"initial": "NEW", "transitions": {"NEW": {"pay": "PAID"}, "PAID": {"lose": "LOST"}}}' WHERE name = 'order';
		RESET session_replication_role;
		UPDATE ord SET "the State" = 'LOST' WHERE id = 2 RETURNING "the State"}),
	'LOST', 'a change made as a replica is seen');
is( sqlstate($su, 'source', q{
		UPDATE ord SET "the State" = 'PAID' WHERE id = 3;
		BEGIN;
		TRUNCATE idempotency.machines;
		UPDATE ord SET "the State" = 'LOST' WHERE id = 3}),
	'IK007', 'and so is TRUNCATE');

# Drivers that send parameters without a type: pgbench does.
sub untyped
{
	my ($name, $call, %variables) = @_;
	append_to_file("$dir/$name.sql", "SELECT 1 / applied::int FROM idempotency.$call;\n");
	$node->command_ok(
		[ qw(pgbench -n -t 1 -U app -M), 'extended', (map { ('-D', "$_=$variables{$_}") } sort keys %variables),
			'-f', "$dir/$name.sql", 'source' ],
		"$name with parameters of unknown type");
}
untyped('transition', q{transition('ord', :id, :from, :to)}, id => 5, from => 'NEW', to => 'PAID');
untyped('fire', q{fire('ord', :id, :event, :changes)}, id => 6, event => 'pay', changes => '{}');
untyped('update_if', q{update_if('ord', :id, :version, :changes)}, id => 7, version => 1, changes => '{}');
is(query('app', 'source', 'SELECT string_agg("the State" || version, \',\' ORDER BY id) FROM ord WHERE id IN (5, 6, 7)'),
	'PAID2,PAID2,NEW2', 'and they did what they say');

# A standby knows the machines and moves nothing.
$node->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->start;
$node->wait_for_catchup($standby, 'replay', $node->lsn('insert'));
like($standby->safe_psql('source', q{SELECT idempotency.machine_diagram('order')}), qr/PAID --> LOST: lose/,
	'the standby draws the diagram');
my (undef, undef, $stderr) = $standby->psql('source', q{
	\set VERBOSITY verbose
	SELECT idempotency.fire('ord', 8, 'pay')});
like($stderr, qr/ERROR:  25006: .*HINT:/s, 'and refuses to move a row');
for my $call ("attach_machine('parted', 'status', 'order')", "detach_machine('ord', 'the State')", "attach_version('ord', 'version')",
	"define_machine('new', '{\"initial\": \"A\", \"transitions\": {\"A\": [\"B\"]}}')", "drop_machine('old')")
{
	(undef, undef, $stderr) = $standby->psql('source', "\\set VERBOSITY sqlstate\nSELECT idempotency.$call");
	like($stderr, qr/25006/, "$call is refused there");
}
$node->safe_psql('source', q{SELECT idempotency.define_machine('order', '{"initial": "NEW", "transitions": {"NEW": {"pay": "PAID"}}}')});
$node->wait_for_catchup($standby, 'replay', $node->lsn('insert'));
unlike($standby->safe_psql('source', q{SELECT idempotency.machine_diagram('order')}), qr/LOST/, 'a change arrives there');

# A crash loses neither machines nor history.
$node->stop('immediate');
$node->start;
is(query('app', 'source', q{SELECT (idempotency.fire('ord', 8, 'pay')).outcome}), 'applied', 'moves go on after a crash');
is(query($su, 'source', q{SELECT event FROM idempotency.transition_log ORDER BY id DESC LIMIT 1}), 'pay', 'and so does the history');

$node->stop;
$standby->stop;
done_testing();
