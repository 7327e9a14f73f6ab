# Leases over transactions, backends and servers: one transaction per
# connection, as a pooler would hand them out; a server that is killed with
# synchronous_commit off; a holder that dies; many takers at once; purge; dump
# and restore; promotion of a standby.  A fence only ever grows.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use Ask;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('primary');
$node->init(allows_streaming => 1);
$node->append_conf(
	'postgresql.conf', q{
synchronous_commit = off
wal_writer_delay = 10s
max_prepared_transactions = 10
});
$node->start;
$node->safe_psql('postgres', 'CREATE EXTENSION idempotency');
ask_at(node => $node);

# status|attempt|checkpoint, and the fence
sub take
{
	my ($key, $lease) = @_;
	my ($status, $attempt, $checkpoint, $fence) = split /\|/, query(
		"SELECT status, attempt, checkpoint, fence FROM idempotency.lease('s', '$key', '$lease')"
	);
	return ("$status|$attempt|$checkpoint", $fence);
}

# the steps of one job, each in another backend
my ($status, $fence) = take('pooled', '1 min');
is($status, 'claimed|1|', 'leased');
query("SELECT idempotency.checkpoint('s', 'pooled', $fence, 'half')");
query("SELECT idempotency.extend('s', 'pooled', $fence, '2 min')");
query("SELECT idempotency.complete('s', 'pooled', 'done', NULL, $fence)");
is(query("SELECT status, response FROM idempotency.claim('s', 'pooled')"),
	'completed|done', 'completed by the fence, in any backend');

# a lease and its checkpoint are on disk when they are committed
my @fences;
($status, $fences[0]) = take('crash', '0');
is($status, 'claimed|1|', 'leased before the crash');
query("SELECT idempotency.checkpoint('s', 'crash', $fences[0], 'charged')");
$node->stop('immediate');
$node->start;
($status, $fences[1]) = take('crash', '0');
is($status, 'claimed|2|charged', 'the taker knows that it is not the first');
cmp_ok($fences[1], '>', $fences[0], 'and has a higher fence');
is( sqlstate("SELECT idempotency.complete('s', 'crash', 'x', NULL, $fences[0])"),
	'IK002', 'the holder from before the crash is refused');

# a takeover that is rolled back hands out a fence all the same
my $lost = query(
	"BEGIN; SELECT fence FROM idempotency.lease('s', 'crash', '0'); ROLLBACK;");
($status, $fences[2]) = take('crash', '0');
is($status, 'claimed|3|charged', 'a takeover that was rolled back left no trace');
cmp_ok($fences[2], '>', $lost, 'but its fence is not used again');

# released, and purged
query("SELECT idempotency.release('s', 'crash', $fences[2])");
query("SELECT status FROM idempotency.lease('s', 'forgotten', '0', ttl => '1 us')");
my $forgotten =
  query("SELECT fence FROM idempotency.keys WHERE key = 'forgotten'");
cmp_ok(query('SELECT idempotency.purge()'), '>=', 1, 'purged');
is(query("SELECT count(*) FROM idempotency.keys WHERE key = 'forgotten'"),
	0, 'an unfinished lease goes ttl after its deadline');
($status, $fence) = take('forgotten', '0');
is($status, 'claimed|1|', 'and begins anew');
cmp_ok($fence, '>', $forgotten, 'with a higher fence');
is(query("SELECT count(*) FROM idempotency.keys WHERE key = 'crash'"),
	1, 'a released row stays');
($status, $fences[3]) = take('crash', '1 h');
cmp_ok($fences[3], '>', $fences[2], 'so that its fence grows on');

# the holder's backend dies: a committed lease stays, an open one is gone
my $holder = $node->background_psql('postgres');
$holder->query_safe(
	"BEGIN; SELECT status FROM idempotency.lease('s', 'killed', '1 h')");
my $pid = $holder->query_safe('SELECT pg_backend_pid()');
query("SELECT pg_terminate_backend($pid, 10000)");
eval { $holder->quit };
($status, $fence) = take('killed', '1 h');
is($status, 'claimed|1|', 'a lease that was not committed went with its backend');
is((take('killed', '1 h'))[0], 'in_progress|1|', 'a committed one has not');

# a leased claim can be committed and prepared unfinished
query(
	"BEGIN; SELECT status FROM idempotency.lease('s', 'prepared', '1 h'); PREPARE TRANSACTION 'lease'"
);
is( query("SELECT status FROM idempotency.lease('s', 'prepared', '1 h', wait => '0')"),
	'in_progress',
	'prepared: held');
is( query("SELECT mode, prepared_gid FROM idempotency.holder('s', 'prepared')"),
	'transaction|lease',
	'by whom is told');
query("COMMIT PREPARED 'lease'");
is(query("SELECT mode FROM idempotency.holder('s', 'prepared')"),
	'lease', 'committed: leased');

# many takers at once, again and again: one of them wins
query("SELECT status FROM idempotency.lease('s', 'many', '0')");
$node->safe_psql('postgres',
	'CREATE TABLE won (round int, fence bigint)');
my $script = $node->basedir . '/takers.sql';
append_to_file($script, q{
SELECT fence IS NOT NULL AS won, fence FROM idempotency.lease('s', 'many', '200 us') \gset
\if :won
INSERT INTO won VALUES (1, :fence);
\endif
});
$node->command_ok(
	[ 'pgbench', '-n', '-c', 8, '-j', 2, '-t', 200, '-f', $script, 'postgres' ],
	'8 takers');
is( query('SELECT count(*) = count(DISTINCT fence) AND count(*) > 1 FROM won'),
	't', 'no fence was handed out twice');
is( query("SELECT attempt = 1 + (SELECT count(*) FROM won) FROM idempotency.lookup('s', 'many')"),
	't', 'and every takeover counted');

# dump and restore
my $dump = $node->basedir . '/dump.sql';
$node->command_ok([ 'pg_dump', '-f', $dump, 'postgres' ], 'dump');
$node->safe_psql('postgres', 'CREATE DATABASE restored');
$node->command_ok([ 'psql', '-qX', '-v', 'ON_ERROR_STOP=1', '-f', $dump, 'restored' ],
	'restore');
is( $node->safe_psql('restored',
		"SELECT status FROM idempotency.lease('s', 'crash', '0')"),
	'in_progress',
	'restored: still leased');
is( $node->safe_psql('restored',
		"SELECT idempotency.release('s', 'crash', $fences[3])"),
	't',
	'and its fence is the newest');
cmp_ok(
	$node->safe_psql('restored',
		"SELECT fence FROM idempotency.lease('s', 'crash', '0')"),
	'>',
	$fences[3],
	'and grows on');

# promotion
$node->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->start;
query("SELECT idempotency.extend('s', 'crash', $fences[3], '0')");
$node->wait_for_catchup($standby);
ask_at(node => $standby);
is( query("SELECT status, response FROM idempotency.lease('s', 'pooled', '1 min')"),
	'completed|done',
	'a standby replays to a lease');
is(sqlstate("SELECT idempotency.lease('s', 'crash', '1 min')"),
	'25006', 'and grants none');
is(query("SELECT count(*) > 0 FROM idempotency.in_flight"),
	't', 'it shows who is at work');
$node->stop('immediate');
$standby->promote;
($status, $fences[4]) = take('crash', '1 min');
is($status, 'claimed|5|charged', 'the promoted standby lets the next taker in');
cmp_ok($fences[4], '>', $fences[3], 'with a higher fence');
is( sqlstate("SELECT idempotency.complete('s', 'crash', 'x', NULL, $fences[3])"),
	'IK002', 'and refuses the holder from before');

$standby->stop;
done_testing();
