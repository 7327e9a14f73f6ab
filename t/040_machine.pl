# Machines over dump and restore, restart, standby and logical replication, and
# through drivers that send parameters without a type.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('machine');
$node->init(allows_streaming => 'logical');
$node->start;
my $dir = PostgreSQL::Test::Utils::tempdir;

$node->safe_psql(
	'postgres', q{
	CREATE ROLE owner LOGIN;
	CREATE ROLE app LOGIN;
	CREATE DATABASE source OWNER owner;
	CREATE DATABASE by_owner OWNER owner;
	CREATE DATABASE by_superuser OWNER owner;
});

sub query
{
	my ($role, $db, $sql) = @_;
	return $node->safe_psql($db, $sql, extra_params => [ '-U', $role ]);
}

sub sqlstate
{
	my ($role, $db, $sql) = @_;
	my ($ret, $stdout, $stderr) = $node->psql(
		$db, "\\set VERBOSITY sqlstate\n$sql",
		on_error_stop => 1,
		extra_params => [ '-U', $role ]);
	return $stderr =~ /ERROR:\s+(\w{5})/ ? $1 : "none: $stderr";
}

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
# the history can be read by its owner, who may let others read it
query('owner', 'source', 'GRANT USAGE ON SCHEMA idempotency TO app; GRANT SELECT ON idempotency.transition_log TO app');
is(query('app', 'source', 'SELECT row_id, event, to_state FROM idempotency.transition_log'), '1|pay|PAID',
	'history, read by whom the owner lets');

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
	is(sqlstate('app', $db, q{INSERT INTO parted_1 VALUES (50, 'PAID')}), 'IK003', "$db: also the partitions");
	is(sqlstate('app', $db, q{UPDATE ord SET version = 7 WHERE id = 1}), 'IK004', "$db: the version counts");
	is(query('app', $db, q{SELECT (idempotency.fire('ord', 1, 'ship')).outcome}), 'applied', "$db: and moves go on");
	is(query($su, $db, 'SELECT count(*), max(id) FROM idempotency.transition_log'), '2|2', "$db: in the history, too");
}

# A restore that fires no ordinary triggers is seen by a session that has the
# machine cached, and so is TRUNCATE.
my $session = $node->background_psql('source', on_error_stop => 0)
  if $node->can('background_psql') && PostgreSQL::Test::Cluster->can('background_psql') && $node->{_pg_version} && $node->{_pg_version} >= 16;
is($node->safe_psql('source', q{
	UPDATE ord SET "the State" = 'PAID' WHERE id = 2;
	SET session_replication_role = replica;
	UPDATE idempotency.machines SET definition = '{"initial": "NEW", "transitions": {"NEW": {"pay": "PAID"}, "PAID": {"lose": "LOST"}}}' WHERE name = 'order';
	RESET session_replication_role;
	UPDATE ord SET "the State" = 'LOST' WHERE id = 2 RETURNING "the State";}), 'LOST', 'a change made as a replica is seen');
like(($node->psql('source', q{
	UPDATE ord SET "the State" = 'PAID' WHERE id = 3;
	BEGIN;
	TRUNCATE idempotency.machines;
	UPDATE ord SET "the State" = 'LOST' WHERE id = 3;}))[2], qr/machine "order" does not exist/, 'and so is TRUNCATE');

# Drivers that send parameters without a type.
sub untyped
{
	my ($name, $script) = @_;
	append_to_file("$dir/$name.sql", $script);
	$node->command_ok([ 'pgbench', '-n', '-M', 'extended', '-t', '1', '-U', 'app', '-f', "$dir/$name.sql", '-d', 'source' ]
		  , "$name with parameters of unknown type")
	  if 0;
	$node->pgbench("-n -M extended -t 1 -U app", 0, [qr{processed: 1/1}], [qr{^$}],
		"$name with parameters of unknown type", { "machine_$name" => $script });
}
untyped('transition', q{
\set id 5
SELECT 1 / (outcome = 'applied')::int FROM idempotency.transition('ord', :id, 'NEW', 'PAID');
}) if 0;

$node->stop;
done_testing();
