# Keys and tokens on a Citus cluster: a coordinator and two workers, one added
# later, on 127.0.0.1.  Before distribute() every node refuses; after it, one key is
# granted once and one token consumed once, by any nodes and in any form of a
# call, while shards move and split, backends die, and transactions fail.
#
# Skipped unless Citus is installed in the server under test.
#
# Environment:
#   IDEMPOTENCY_CITUS_SECONDS    how long each of two stresses lasts (10)
use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use POSIX ();
use Time::HiRes qw(time sleep);

my $share = `pg_config --sharedir`;
chomp $share;
plan skip_all => 'Citus is not installed in this server'
  unless -e "$share/extension/citus.control";

my $seconds = $ENV{IDEMPOTENCY_CITUS_SECONDS} || 10;
my @nodes = map { make_node($_) } 0 .. 3;
my ($coordinator, $one, $two, $three) = @nodes;

sub make_node
{
	my $node = PostgreSQL::Test::Cluster->new("node$_[0]");

	$node->init(allows_streaming => 'logical');
	$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'citus'
listen_addresses = '127.0.0.1'
max_prepared_transactions = 50
max_connections = 200
deadlock_timeout = 200ms
citus.distributed_deadlock_detection_factor = 2
citus.shard_count = 8
citus.node_conninfo = 'sslmode=disable'
citus.recover_2pc_interval = 2s
citus.defer_shard_delete_interval = 1s
log_statement = none
});
	$node->start;
	$node->safe_psql('postgres', 'CREATE EXTENSION citus');
	return $node;
}

# SQLSTATE of a failing statement, or what it returned
sub sqlstate
{
	my ($node, $sql, %more) = @_;
	my ($ret, $stdout, $stderr) = $node->psql('postgres', "\\set VERBOSITY sqlstate\n$sql",
		extra_params => [ '-U', $more{role} || getpwuid($<) ], on_error_stop => 1);
	return $stderr =~ /ERROR:\s+(\w{5})/ ? $1 : $stdout;
}

sub query { return $_[0]->safe_psql('postgres', $_[1]); }

sub role_query
{
	my ($node, $role, $sql) = @_;
	my ($ret, $stdout, $stderr) = $node->psql('postgres', $sql, extra_params => [ '-U', $role ]);
	return $ret == 0 && $stderr !~ /ERROR/ ? $stdout : $stderr;
}

# ask until it is so
sub wait_until
{
	my ($node, $sql, $what) = @_;
	for (1 .. 300)
	{
		return 1 if query($node, $sql) eq 't';
		sleep 0.1;
	}
	return fail($what);
}

my $sessions = 0;

sub session
{
	my ($node) = @_;
	my $s = $node->background_psql('postgres', on_error_stop => 0);
	$s->query('\set VERBOSITY sqlstate');
	return $s;
}

# start a statement, and fetch its result later
sub start
{
	my ($s, $sql) = @_;
	$s->query_until(qr/started/, "\\echo started\n$sql\n");
}

sub finish
{
	my ($s) = @_;
	$s->{stderr} = '';
	my $out = $s->query('\echo');
	my $err = $s->{stderr};
	$s->{stderr} = '';
	return ($out, $err);
}

sub add_worker
{
	my ($node) = @_;
	query($coordinator, sprintf "SELECT citus_add_node('127.0.0.1', %d)", $node->port);
}

# a scope whose shard is on this node, and different for each number
sub scope_on
{
	my ($node, $n) = @_;
	return query($coordinator, sprintf q{
SELECT s FROM (SELECT 'scope' || i AS s FROM generate_series(1, 200) i) x
JOIN pg_dist_placement p ON p.shardid = get_shard_id_for_distribution_column('idempotency.keys', s)
JOIN pg_dist_node n USING (groupid)
WHERE nodeport = %d ORDER BY s OFFSET %d LIMIT 1}, $node->port, $n || 0);
}

sub shard_of
{
	return query($coordinator, "SELECT get_shard_id_for_distribution_column('idempotency.keys', '$_[0]')");
}

# (citus_shards does not show the tables of extensions)
my $placements = '(SELECT * FROM pg_dist_shard JOIN pg_dist_placement USING (shardid) JOIN pg_dist_node USING (groupid)) s';

sub port_of
{
	return query($coordinator, "SELECT nodeport FROM $placements WHERE shardid = $_[0]");
}

sub move
{
	my ($scope, $from, $to, $mode) = @_;
	return sprintf "SELECT citus_move_shard_placement(%d, '127.0.0.1', %d, '127.0.0.1', %d, '%s')",
	  shard_of($scope), $from->port, $to->port, $mode;
}

# ---------------------------------------------------------------------------
# before distribute(): refusal
# ---------------------------------------------------------------------------

query($coordinator, 'CREATE EXTENSION idempotency');
my @early = split /\n/, query($coordinator, "SELECT idempotency.issue_token('early', 'p', '1 day') FROM generate_series(1, 3)");
query($coordinator, "SELECT idempotency.consume_token('$early[0]', 'early', 'p')");
is(query($coordinator, "SELECT idempotency.once('early', 'k'), idempotency.acquire_lock('early', '1 h') IS NOT NULL"),
	't|t', 'a coordinator without workers is a server like others');
query($coordinator, qq{SELECT FROM (SELECT i, idempotency.claim('early' || i, 'r', '{"a": 1}') FROM generate_series(1, 8) i) c,
	LATERAL idempotency.complete('early' || i, 'r', 'x')});

my $early = session($coordinator);
is($early->query("SELECT idempotency.once('early', 'k')"), 'f', 'a session that knows one node');
query($coordinator, sprintf "SELECT citus_set_coordinator_host('127.0.0.1', %d)", $coordinator->port);
add_worker($one);
add_worker($two);

my %refused = (
	"claim('s', 'k')" => '55000', "complete('s', 'k', 'x')" => '55000', "fail('s', 'k')" => '55000',
	"release('s', 'k')" => '55000', "once('s', 'k')" => '55000', "run('s', 'k', 'now')" => '55000',
	"lookup('s', 'k')" => '55000', "forget('s', 'k')" => '55000', "lease('s', 'k', '1 s')" => '55000',
	"extend('s', 'k', 1, '1 s')" => '55000', "checkpoint('s', 'k', 1, 'c')" => '55000',
	"acquire_lock('n', '1 s')" => '55000', "renew_lock('n', 1, '1 s')" => '55000',
	"release_lock('n', 1)" => '55000', "purge()" => '55000', "holder('s', 'k')" => '55000',
	"issue_token('a', 'b')" => '55000', "revoke_tokens('a', 'b')" => '55000',
	"rotate_token_key()" => '55000', "emit('t', '{}')" => '0A000', "take('t')" => '0A000',
	"ack(1, 1)" => '0A000', "nack(1, 1)" => '0A000', "retry_parked('t')" => '0A000');

sub refusals
{
	my ($when, $which) = @_;
	for my $i (0 .. 2)
	{
		my @wrong = grep { sqlstate($nodes[$i], "SELECT idempotency.$_") ne $refused{$_} } grep { $refused{$_} =~ $which } sort keys %refused;
		is("@wrong", '', "node $i refuses $when");
	}
}
refusals('what each node would answer for itself', qr/./);
$early->{stderr} = '';
$early->query("SELECT idempotency.once('early', 'new')");
like($early->{stderr}, qr/55000/, 'so does a session that was there before');
$early->{stderr} = '';
like(query_error($coordinator, "SELECT idempotency.once('s', 'k')"),
	qr/HINT:  Call SELECT idempotency.distribute\(\)/, 'and says what to do');

sub query_error
{
	my ($node, $sql) = @_;
	my ($ret, $stdout, $stderr) = $node->psql('postgres', $sql);
	return $stderr;
}

for my $shape ("create_reference_table('idempotency.keys')",
	"create_distributed_table('idempotency.keys', 'key')",
	"create_distributed_table('idempotency.keys', NULL)")
{
	my @states = map {
		my $node = $_;
		sqlstate($coordinator, "BEGIN; SELECT $shape; SELECT idempotency.once('s', 'k')") =~ /(\w{5})$/ ? $1 : 'none'
	} 1;
	is("@states", '55000', "refused after $shape");
}

# ---------------------------------------------------------------------------
# distribute()
# ---------------------------------------------------------------------------

query($coordinator, q{
CREATE ROLE app LOGIN;
SELECT idempotency.grant_usage('app');
CREATE TABLE biz (tenant text, k text, note text);
SELECT create_distributed_table('biz', 'tenant', colocate_with => 'none');
GRANT ALL ON biz TO app;
});
is(sqlstate($one, "SELECT idempotency.distribute()") =~ /^\w{5}$/ ? 'refused' : 'done', 'refused',
	'a worker cannot distribute');
query($coordinator, 'SELECT idempotency.distribute()');
is($early->query("SELECT idempotency.once('early', 'k')"), 'f', 'an earlier session sees it, and the key of before');
is($early->query("SELECT idempotency.acquire_lock('early', '1 h')"), '', 'and the lock of before is held');
$early->quit;
is(sqlstate($coordinator, "SELECT idempotency.distribute('biz')"), '55000', 'distributed once');
query($coordinator, 'SELECT idempotency.distribute()');
refusals('the outbox', qr/0A000/);
is(query($_, qq{SELECT string_agg(DISTINCT (idempotency.claim('early' || i, 'r', '{"a": 2}')).status, ' ') FROM generate_series(1, 8) i}),
	'mismatch', 'requests of before are compared') for @nodes[ 0 .. 2 ];
is(query($coordinator, q{SELECT bool_and(success AND result = 't') FROM run_command_on_all_nodes(
  $$SELECT has_schema_privilege('app', 'idempotency', 'USAGE')
    AND has_function_privilege('app', 'idempotency.at_home(text,text,text[],integer,integer,boolean)', 'EXECUTE')
    AND has_function_privilege('app', 'idempotency.once(text,text,interval)', 'EXECUTE')
    AND NOT has_function_privilege('app', 'idempotency.forget(text,text)', 'EXECUTE')$$)}), 't', 'what a role may, it may on every node');

# the scope's shard is found as Citus finds it
is(query($coordinator, q{
SELECT count(*) FROM generate_series(1, 200) i, LATERAL idempotency.once('routed' || i, 'k') o WHERE NOT o}), '0', '200 scopes');
is(query($coordinator, q{SELECT count(*) FROM idempotency.keys WHERE scope LIKE 'routed%'}), '200', 'all are found through Citus');
is(sqlstate($coordinator, q{DO $$ BEGIN FOR i IN 1 .. 200 LOOP
  PERFORM FROM idempotency.keys WHERE scope = 'routed' || i;
  IF NOT FOUND THEN RAISE 'scope %', i; END IF;
END LOOP; END $$}), '', 'each in the shard of its scope');

my $scope1 = scope_on($one);
my $scope2 = scope_on($two);

# ---------------------------------------------------------------------------
# one key through three nodes, as a role that has no right on the table
# ---------------------------------------------------------------------------

for my $scope ($scope1, $scope2)
{
	my @once = map { role_query($nodes[$_], 'app', "SELECT idempotency.once('$scope', 'once')") } 0 .. 2;
	is("@once", 't f f', 'once');
	my @claims = map { role_query($nodes[$_], 'app', q{
BEGIN;
SELECT status = 'claimed' AS mine FROM idempotency.claim('S', 'steps', '{"a": 1}', '1 mon 2 days 03:04:05.6', '1 s') \gset
\if :mine
INSERT INTO biz VALUES ('t', 'steps S');
SELECT FROM idempotency.complete('S', 'steps', '{"b":  2}', '{"m": "x"}');
\endif
COMMIT;
SELECT status, response, meta, expires_at > now() + '30 days' FROM idempotency.lookup('S', 'steps')} =~ s/\bS\b/$scope/gr) } 0 .. 2;
	is(join("\n", @claims), join("\n", ('completed|{"b":  2}|{"m": "x"}|t') x 3), 'five steps');
	is(query($coordinator, "SELECT count(*) FROM biz WHERE k = 'steps $scope'"), '1', 'done once');
	is(role_query($two, 'app', "SELECT status FROM idempotency.claim('$scope', 'steps', '{\"a\": 2}')"), 'mismatch', 'mismatch');

	my @leases = map { role_query($nodes[$_], 'app', "SELECT status, fence > 0, deadline > now() + '50 min' FROM idempotency.lease('$scope', 'lease', '1 h')") } 0 .. 2;
	is("@leases", 'claimed|t|t in_progress||t in_progress||t', 'lease');
	my $fence = query($one, "SELECT fence FROM idempotency.lookup('$scope', 'lease')");
	is(role_query($two, 'app', "SELECT idempotency.checkpoint('$scope', 'lease', $fence, 'half', '{\"n\": 1}') > now()"), 't', 'checkpoint');
	is(role_query($one, 'app', "SELECT idempotency.extend('$scope', 'lease', $fence, '2 h') > now() + '110 min'"), 't', 'extend');
	is(role_query($coordinator, 'app', "SELECT checkpoint, checkpoint_data, attempt FROM idempotency.lookup('$scope', 'lease')"), 'half|{"n": 1}|1', 'lookup');
	is(sqlstate($_, "SELECT idempotency.complete('$scope', 'lease', 'x', NULL, 1)"), 'IK002', 'stale fence') for @nodes[ 0 .. 2 ];
	is(role_query($two, 'app', "SELECT idempotency.release('$scope', 'lease', $fence)"), 't', 'release');
	is(role_query($coordinator, 'app', "SELECT idempotency.release('$scope', 'lease', $fence)"), 'f', 'released');
	is(query($one, "SELECT idempotency.forget('$scope', 'once'), idempotency.forget('$scope', 'once')"), 't|f', 'forget');
	is(sqlstate($_, "SELECT idempotency.forget('$scope', 'steps')", role => 'app'), '42501', 'a role may no more than elsewhere') for @nodes[ 0 .. 2 ];
	is(sqlstate($_, "SELECT idempotency.at_home('$scope', 'idempotency.forget(text,text)', ARRAY['$scope', 'steps'], -1, 0, false)", role => 'app'), '42501', 'nor around it') for @nodes[ 0 .. 2 ];
	is(sqlstate($_, "SELECT idempotency.at_home('$scope', 'pg_catalog.pg_reload_conf()', '{}', -1, 0, false)", role => 'app'), '22023', 'nor to another') for @nodes[ 0 .. 2 ];
}
my @locks = map { my $n = $_; join '', map { query($nodes[ $_ % 3 ], "SELECT idempotency.acquire_lock('lock$n', '1 h') IS NOT NULL") } $n .. $n + 2 } 1 .. 10;
is("@locks", join(' ', ('tff') x 10), 'locks by name');
is(query($coordinator, q{SELECT count(*) FROM run_command_on_workers(
  $$SELECT count(*) > 0 FROM idempotency.in_flight WHERE scope LIKE 'idempotency.lock.%'$$) WHERE result = 't'}), '2', 'live on both workers');
{
	my $fence = query($one, "SELECT idempotency.acquire_lock('mine', '1 h')");
	is(query($two, "SELECT idempotency.renew_lock('mine', $fence, '2 h') > now() + '110 min'"), 't', 'renewed elsewhere');
	is(query($coordinator, "SELECT idempotency.release_lock('mine', $fence)"), 't', 'given back elsewhere');
}

# ---------------------------------------------------------------------------
# tokens: one signing key, one mark, one generation
# ---------------------------------------------------------------------------

sub issue
{
	my ($node, $subject) = @_;
	return role_query($node, 'app', "SELECT idempotency.issue_token('$subject', 'p', '1 h', '{\"n\": 1}')");
}
sub check { return role_query($_[0], 'app', "SELECT status FROM idempotency.check_token('$_[1]', '$_[2]', 'p')"); }
sub consume { return role_query($_[0], 'app', "SELECT status FROM idempotency.consume_token('$_[1]', '$_[2]', 'p', '0')"); }

# what every node says of each token; once, if they agree
sub everywhere
{
	my ($subject, @tokens) = @_;
	my @at = @nodes[ 0 .. 2 ];
	my %answers = map { my $node = $_; join(' ', map { check($node, $_, $subject) } @tokens) => 1 } @at;
	return join ' | ', sort keys %answers;
}

# what the copies on the nodes have in them; once, if it is the same
sub copies
{
	my ($table, $columns) = @_;
	return query($coordinator, qq{SELECT count(DISTINCT result), count(*) FROM run_command_on_placements('idempotency.$table',
		\$\$SELECT coalesce(string_agg(concat_ws(',', $columns), ' ' ORDER BY $columns), '') FROM %s\$\$)});
}
is(everywhere('early', @early[ 0, 1 ]), 'used valid', 'tokens of before are known everywhere');
for my $n (0 .. 2)
{
	my $token = issue($nodes[$n], 'one');
	is(everywhere('one', $token), 'valid', "issued on node $n, valid on all");
	is(everywhere('other', $token), 'invalid', 'for its subject');
	is(everywhere('one', $token =~ s/...$/AAA/r), 'invalid', 'forged');
	is(join(' ', map { consume($nodes[ ($n + $_) % 3 ], $token, 'one') } 1 .. 3), 'consumed used used', 'consumed once');
	is(role_query($nodes[$n], 'app', "SELECT payload, consumed_at > issued_at, length(id) FROM idempotency.check_token('$token', 'one', 'p')"), '{"n": 1}|t|22', 'with all that it has');

	$token = issue($nodes[$n], 'one');
	is(join(' ', map { role_query($nodes[ ($n + $_) % 3 ], 'app', "SELECT idempotency.revoke_token('$token', 'one', 'p')") } 1 .. 3), 't f f', 'revoked by itself');
	is(everywhere('one', $token), 'revoked', 'everywhere');

	my ($old, $kept) = (issue($nodes[ ($n + 1) % 3 ], "all$n"), issue($nodes[$n], 'one'));
	for my $m (0 .. 2)
	{
		like(role_query($nodes[$m], 'app', "SELECT idempotency.revoke_tokens('all$n', 'p')"), qr/^\d{4}-/, 'all revoked');
		is(everywhere("all$n", $old, my $new = issue($nodes[ ($m + 1) % 3 ], "all$n")), 'revoked valid', "on node $m, those of before");
		$old = $new;
	}
	is(everywhere('one', $kept), 'valid', 'of that subject');
}
is(copies('token_generations', 'subject, purpose, generation, raised_at'), '1|3', 'the same generations on all nodes');

# a rotation, by any node
is(sqlstate($one, 'SELECT idempotency.rotate_token_key()', role => 'app'), '42501', 'an application rotates nothing');
for my $n (0 .. 2)
{
	my $old = issue($nodes[ ($n + 1) % 3 ], 'one');
	like(query($nodes[$n], 'SELECT idempotency.rotate_token_key()'), qr/^\d{4}-/, "rotated on node $n");
	is(everywhere('one', $old, map { issue($_, 'one') } @nodes[ 0 .. 2 ]), 'valid valid valid valid', 'tokens of both keys are good');
	is(copies('token_keys', 'id, created_at, rotated_at, secret, system, database'), '1|3', 'the same keys on all nodes');
}
{
	my @old = map { issue($_, 'one') } @nodes[ 0 .. 2 ];
	my ($rotator, $consumer) = (session($two), session($one));

	$rotator->query("BEGIN; SELECT idempotency.rotate_token_key(retire => true)");
	my $unborn = $rotator->query("SELECT idempotency.issue_token('one', 'p', '1 h')");
	is(everywhere('one', $old[0]), 'valid', 'retired in an open transaction');
	is(consume($_, $old[0], 'one'), 'busy', 'nobody knows yet') for @nodes[ 0 .. 2 ];
	$rotator->query('ROLLBACK');
	is(everywhere('one', @old, $unborn), 'valid valid valid invalid', 'not retired');
	$rotator->query("BEGIN; SELECT idempotency.rotate_token_key(retire => true)");
	start($consumer, "SELECT status FROM idempotency.consume_token('$old[0]', 'one', 'p');");
	sleep 0.3;
	$rotator->query('COMMIT');
	like((finish($consumer))[0], qr/^invalid/m, 'who waited for the end of it');
	is(everywhere('one', @old, map { issue($_, 'one') } @nodes[ 0 .. 2 ]), 'invalid invalid invalid valid valid valid', 'retired everywhere');
	is(copies('token_keys', 'id, created_at, rotated_at, secret, system, database'), '1|3', 'the same key on all nodes');
	$_->quit for $rotator, $consumer;
}

# two rotations at once
{
	my ($a, $b) = (session($one), session($two));
	$a->query('BEGIN; SELECT idempotency.rotate_token_key()');
	start($b, 'SELECT idempotency.rotate_token_key();');
	sleep 0.3;
	$a->query('COMMIT');
	finish($b);
	is(query($coordinator, 'SELECT count(*) FILTER (WHERE rotated_at IS NULL), count(*) FROM idempotency.token_keys'), '1|3', 'one after the other');
	is(copies('token_keys', 'id, created_at, rotated_at, secret, system, database'), '1|3', 'the same on all nodes');
	$_->quit for $a, $b;
}

# a two-phase commit that is cut off before the last node
sub cut_off
{
	my ($table, $values) = @_;
	my $shard = query($coordinator, "SELECT shardid FROM pg_dist_shard WHERE logicalrelid = 'idempotency.$table'::regclass");
	query($_, "INSERT INTO idempotency.${table}_$shard $values") for $coordinator, $one;
	query($two, "BEGIN; INSERT INTO idempotency.${table}_$shard $values; PREPARE TRANSACTION 'cut off'");
}
{
	my $now = query($coordinator, 'SELECT clock_timestamp()');
	cut_off('token_keys', "(id, created_at, secret, system, database) VALUES (42, '$now', sha256('secret'), 1, 2)");
	is(everywhere('one', map { issue($_, 'one') } @nodes[ 0 .. 2 ]), 'valid valid valid', 'tokens of a key that is not committed on all nodes');
	query($two, "COMMIT PREPARED 'cut off'");
	is(everywhere('one', map { issue($_, 'one') } @nodes[ 0 .. 2 ]), 'valid valid valid', 'and of one that is');

	my @tokens = map { my $node = $_; map { issue($node, 'cut') } 1 .. 8 } @nodes[ 0 .. 2 ];
	$now = query($coordinator, 'SELECT clock_timestamp()');
	cut_off('token_generations', "VALUES (extract(epoch FROM timestamptz '$now' - '2000-01-01 00:00:00+00') * 1000000, '$now', 'cut', 'p')");
	my %answers = map { consume($nodes[ rand 3 ], $_, 'cut') => 1 } @tokens;
	is(join(' ', sort keys %answers), 'busy revoked', 'of what is revoked on some nodes, nothing is consumed on any');
	query($two, "COMMIT PREPARED 'cut off'");
	%answers = map { consume($nodes[ rand 3 ], $_, 'cut') => 1 } @tokens;
	is(join(' ', sort keys %answers), 'revoked', 'revoked');
	query($two, 'SELECT idempotency.rotate_token_key(retire => true)');
}

# rivals
for my $pair ([ 0, 1 ], [ 1, 2 ], [ 2, 0 ])
{
	my ($a, $b) = map { session($nodes[$_]) } @$pair;
	my $token = issue($nodes[ $pair->[0] ], 'one');
	my $sql = "SELECT status FROM idempotency.consume_token('$token', 'one', 'p'";

	is($a->query("BEGIN; $sql)"), 'consumed', "nodes @$pair: consumed");
	is($b->query("$sql, '0')"), 'busy', 'a rival is told');
	is($b->query("$sql, '200 ms')"), 'busy', 'or waits');
	is($b->query("SELECT status FROM idempotency.check_token('$token', 'one', 'p')"), 'valid', 'not committed');
	$a->query('ROLLBACK');
	is($a->query("BEGIN; SAVEPOINT s; $sql)"), 'consumed', 'given back by a rollback');
	is($a->query("ROLLBACK TO s; SELECT status FROM idempotency.check_token('$token', 'one', 'p')"), 'valid', 'also to a savepoint');
	is($a->query("$sql)"), 'consumed', 'consumed');
	$a->query("INSERT INTO biz VALUES ('t', '$token')");
	start($b, "$sql);");
	sleep 0.3;
	$a->query('COMMIT');
	like((finish($b))[0], qr/^used/m, 'used, after a wait');
	is(query($coordinator, "SELECT count(*) FROM biz WHERE k = '$token'"), '1', 'with its row');

	# revoking all, while one is consumed
	$token = issue($nodes[ $pair->[0] ], 'rival');
	$sql = "SELECT status FROM idempotency.consume_token('$token', 'rival', 'p'";
	$a->query("BEGIN; SELECT idempotency.revoke_tokens('rival', 'p')");
	is($b->query("$sql, '0')"), 'busy', 'who consumes waits for a revocation');
	is($b->query("SELECT status FROM idempotency.check_token('$token', 'rival', 'p')"), 'valid', 'who looks does not');
	start($b, "$sql);");
	sleep 0.3;
	$a->query('COMMIT');
	like((finish($b))[0], qr/^revoked/m, 'revoked');
	$_->quit for $a, $b;
}

# the session on the mark's node dies before the commit
for my $n (0 .. 2)
{
	# so many that some are on another node
	my @tokens = map { issue($nodes[$n], 'dead') } 1 .. 16;
	my $s = session($nodes[$n]);
	$s->query('BEGIN');
	$s->query("SELECT idempotency.consume_token('$_', 'dead', 'p')") for @tokens;
	query($_, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE 'citus_internal%' AND state = 'idle in transaction'") for @nodes[ 0 .. 2 ];
	$s->query("INSERT INTO biz VALUES ('t', 'dead')");
	$s->query('COMMIT');
	$s->quit;
	is(query($coordinator, "SELECT count(*) FROM biz WHERE k = 'dead'"), '0', "node $n: no row");
	is(everywhere('dead', @tokens), join(' ', ('valid') x @tokens), 'and no mark');
}

# ---------------------------------------------------------------------------
# every form of the call
# ---------------------------------------------------------------------------

my @forms = (
	"SELECT idempotency.once('S', 'K')",
	"SELECT o FROM idempotency.once('S', 'K') o",
	"SELECT NOT NOT idempotency.once('S', 'K')",
	"SELECT idempotency.once(s, 'K') FROM (VALUES ('S')) v (s)",
	"WITH c AS (SELECT idempotency.once('S', 'K')) SELECT * FROM c",
	"SELECT (SELECT idempotency.once('S', 'K'))",
	"SELECT CASE WHEN true THEN idempotency.once('S', 'K') END",
	"PREPARE p (text) AS SELECT idempotency.once(\$1, 'K'); EXECUTE p ('S')",
	"SELECT in_expression('S', 'K')",
	"SELECT in_execute('S', 'K')",
	"SELECT status = 'claimed' FROM (SELECT (idempotency.lease('S', 'K', '1 h')).status) x");
query($coordinator, q{
CREATE FUNCTION in_expression(s text, k text) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RETURN idempotency.once(s, k); END';
CREATE FUNCTION in_execute(s text, k text) RETURNS boolean LANGUAGE plpgsql AS $$DECLARE r boolean; BEGIN EXECUTE 'SELECT idempotency.once($1, $2)' INTO r USING s, k; RETURN r; END$$;
});
for my $block ('', 'BEGIN;')
{
	for my $i (0 .. $#forms)
	{
		my $key = "form$i$block";
		my @got = map {
			my $n = $_;
			my $sql = $forms[$i] =~ s/\bS\b/$scope1/gr =~ s/\bK\b/$key/gr;
			query($nodes[$n], "$block $sql" . ($block ? '; COMMIT' : ''))
		} (2, 0, 1);
		is("@got", 't f f', ($block || 'alone') . " $forms[$i]");
	}
}
is(query($two, "DO \$\$ BEGIN PERFORM idempotency.once('$scope1', 'do'); END \$\$; SELECT idempotency.once('$scope1', 'do')"), 'f', 'PERFORM in DO');
is(query($two, "SELECT sum(idempotency.once('$scope1', 'row' || i)::int) FROM generate_series(1, 20) i"), '20', 'for rows');
query($coordinator, "INSERT INTO biz SELECT '$_', 'pushed', 'pushed' FROM generate_series(1, 2)") for $scope1, $scope2, 'elsewhere';
for my $node (@nodes[ 0 .. 2 ])
{
	like(sqlstate($node, "SELECT idempotency.once('$scope1', note) FROM biz WHERE tenant = '$scope2'"), qr/^(0A000|XX000)$/, 'pushed down into another node: refused');
	like(sqlstate($node, "SELECT idempotency.once(tenant, note) FROM biz WHERE k = 'pushed'"), qr/^(0A000|XX000)$/, 'pushed down to all: refused');
}
is(query($coordinator, "SELECT count(*) FROM idempotency.keys WHERE key = 'pushed'"), '0', 'and nothing is marked');

# settings and transaction modes go with the call
is(sqlstate($two, "BEGIN READ ONLY; SELECT idempotency.once('$scope1', 'ro')"), '25006', 'read only');
is(sqlstate($two, "SET default_transaction_read_only = on; SELECT idempotency.once('$scope1', 'ro')"), '25006', 'read only by default');
is(query($two, "SET intervalstyle = 'sql_standard'; SET datestyle = 'German'; SET timezone = 'Asia/Kolkata';
SELECT FROM idempotency.lease('$scope1', 'styles', '-1 day +30 hours', NULL, '1 day');
SELECT deadline BETWEEN now() + '5 h' AND now() + '7 h', expires_at - deadline = '1 day' FROM idempotency.lookup('$scope1', 'styles')"), 't|t', 'under other styles of date and interval');

# ---------------------------------------------------------------------------
# rivals
# ---------------------------------------------------------------------------

for my $pair ([ $coordinator, $one ], [ $one, $two ], [ $two, $coordinator ])
{
	my ($a, $b) = map { session($_) } @$pair;
	my $name = $pair->[0]->name . ' and ' . $pair->[1]->name;
	my $key = "rival $name";

	$a->query('BEGIN');
	is($a->query("SELECT status FROM idempotency.claim('$scope1', '$key')"), 'claimed', "$name: claimed");
	is($a->query("SELECT status FROM idempotency.claim('$scope1', '$key')"), 'held', "$name: held");
	my $start = time;
	is($b->query("SELECT status FROM idempotency.claim('$scope1', '$key', wait => '0')"), 'in_progress', "$name: not waited for");
	cmp_ok(time - $start, '<', 3, 'at once');
	is($b->query("SELECT status FROM idempotency.claim('$scope1', '$key', wait => '300 ms')"), 'in_progress', "$name: waited for shortly");
	$b->query("SET lock_timeout = '200 ms'");
	$b->{stderr} = '';
	$b->query("SELECT status FROM idempotency.claim('$scope1', '$key')");
	like($b->{stderr}, qr/55P03/, "$name: lock_timeout");
	$b->query("SET lock_timeout = 0; SET statement_timeout = '300 ms'");
	$b->{stderr} = '';
	$b->query("SELECT status FROM idempotency.claim('$scope1', '$key')");
	like($b->{stderr}, qr/57014/, "$name: statement_timeout");
	$b->query("SET statement_timeout = 0");
	$b->{stderr} = '';
	start($b, "SELECT status, response FROM idempotency.claim('$scope1', '$key');");
	sleep 0.3;
	$a->query("SELECT idempotency.complete('$scope1', '$key', 'done')");
	$a->query('COMMIT');
	my ($out, $err) = finish($b);
	like($out, qr/completed\|done/, "$name: waited to the end");

	# savepoints
	$a->query("BEGIN; SAVEPOINT s");
	is($a->query("SELECT status FROM idempotency.claim('$scope1', 'sp $key')"), 'claimed', "$name: in a savepoint");
	$a->query('ROLLBACK TO s');
	is($b->query("BEGIN; SELECT status FROM idempotency.claim('$scope1', 'sp $key', wait => '0'); ROLLBACK"), 'claimed', "$name: given back with it");
	is($a->query("SELECT status FROM idempotency.claim('$scope1', 'sp2 $key')"), 'claimed', "$name: claimed");
	$a->query('SAVEPOINT t');
	$a->query("SELECT idempotency.complete('$scope1', 'sp2 $key', 'x')");
	$a->query('ROLLBACK TO t');
	$a->{stderr} = '';
	$a->query('COMMIT');
	like($a->{stderr}, qr/IK001/, "$name: completed in what was rolled back: open");

	# a deadlock over two nodes
	$_->{stderr} = '' for $a, $b;
	$a->query("BEGIN; SELECT status FROM idempotency.claim('$scope1', 'd1 $key')");
	$b->query("BEGIN; SELECT status FROM idempotency.claim('$scope2', 'd2 $key')");
	start($a, "SELECT status FROM idempotency.claim('$scope2', 'd2 $key');");
	sleep 0.2;
	start($b, "SELECT status FROM idempotency.claim('$scope1', 'd1 $key');");
	my $errors = '';
	# the victim's rollback lets the other one go on
	for my $s ($a, $b)
	{
		my ($o, $e) = finish($s);
		$errors .= $e;
		$s->query('ROLLBACK');
		$errors .= $s->{stderr};
	}
	like($errors, qr/40P01/, "$name: deadlock");
	$_->quit for $a, $b;
}

# ---------------------------------------------------------------------------
# an unfinished claim leaves no row behind; the write skew
# ---------------------------------------------------------------------------

my ($tenant1, $tenant2) = map {
	my $port = $_->port;
	query($coordinator, "SELECT t FROM (SELECT 'tenant' || i AS t FROM generate_series(1, 100) i) x
JOIN pg_dist_placement p ON p.shardid = get_shard_id_for_distribution_column('biz', t) JOIN pg_dist_node n USING (groupid)
WHERE nodeport = $port ORDER BY t LIMIT 1")
} $one, $two;
for my $preload ('citus', 'citus, idempotency')
{
	for my $node (@nodes[ 0 .. 2 ])
	{
		$node->append_conf('postgresql.conf', "shared_preload_libraries = '$preload'");
		$node->restart;
	}
	for my $n (0 .. 2)
	{
		for my $tenants ([$tenant1], [$tenant2], [ $tenant1, $tenant2 ])
		{
			my $key = "open $preload $n @$tenants";
			my $state = sqlstate($nodes[$n], "BEGIN; SELECT FROM idempotency.claim('$scope1', '$key');"
				. join('', map { "INSERT INTO biz VALUES ('$_', '$key');" } @$tenants) . 'COMMIT');
			is($state, 'IK001', "$key: refused");
			is(query($coordinator, "SELECT count(*) FROM biz WHERE k = '$key'"), '0', "$key: no row");
		}
	}
}

# what more than one node has written is committed in two phases
query($coordinator, 'CREATE TABLE plain (k text)');
for ([ $coordinator, '', 0 ], [ $coordinator, "INSERT INTO plain VALUES ('x');", 1 ], [ $coordinator, "INSERT INTO biz VALUES ('$tenant2', '2PC');", 1 ],
	[ $one, "INSERT INTO biz VALUES ('$tenant2', '2PC');", 1 ], [ $two, "INSERT INTO biz VALUES ('$tenant2', '2PC');", 1 ])
{
	my ($node, $write, $two_phases) = @$_;
	my $log = query_error($node, "SET citus.log_remote_commands = on; BEGIN; SELECT idempotency.once('$scope1', gen_random_uuid()::text); $write COMMIT");
	($two_phases ? \&like : \&unlike)->($log, qr/PREPARE TRANSACTION/, $node->name . ": key and '$write'");
	unlike($log, qr/ERROR/, 'committed');
}
is(sqlstate($coordinator, "SET citus.function_opens_transaction_block = off; SELECT idempotency.once('$scope1', 'early')"), '0A000', 'a call does not commit before its transaction');
is(sqlstate($one, "SET citus.enable_local_execution = off; SELECT idempotency.once('$scope1', 'by connection')"), '0A000', 'nor beside it');

# x reads what y writes and the other way round, each claims a key and writes a row
for my $n (0 .. 2)
{
	my ($x, $y) = (session($nodes[$n]), session($nodes[ ($n + 1) % 3 ]));
	my %done;

	query($coordinator, "INSERT INTO biz VALUES ('$tenant1', 'skew $n', '0'), ('$tenant2', 'skew $n', '0')");
	$_->query('BEGIN ISOLATION LEVEL SERIALIZABLE') for $x, $y;
	my @sides = ([ $x, "x$n", $tenant1 ], [ $y, "y$n", $tenant2 ]);
	$_->[0]->query("SELECT FROM idempotency.claim('$scope1', 'skew $_->[1]')") for @sides;
	$_->[0]->query("SELECT sum(note::int) FROM biz WHERE k = 'skew $n'") for @sides;
	$_->[0]->query("UPDATE biz SET note = '1' WHERE tenant = '$_->[2]' AND k = 'skew $n'; INSERT INTO biz VALUES ('$_->[2]', 'row $_->[1]')") for @sides;
	$_->[0]->query("SELECT idempotency.complete('$scope1', 'skew $_->[1]', 'x')") for @sides;
	$_->[0]->query('COMMIT') for @sides;
	for (@sides)
	{
		is(query($coordinator, "SELECT count(*) FROM biz WHERE k = 'row $_->[1]'"),
			query($coordinator, "SELECT count(*) FROM idempotency.keys WHERE key = 'skew $_->[1]'"), "write skew $_->[1]: a row if and only if a key");
		$_->[0]->quit;
	}
}

# REPEATABLE READ: what was committed since is a lost race
{
	my $s = session($two);
	$s->query("BEGIN ISOLATION LEVEL REPEATABLE READ");
	$s->query("SELECT status FROM idempotency.lookup('$scope1', 'rr')");
	query($coordinator, "SELECT idempotency.once('$scope1', 'rr')");
	$s->{stderr} = '';
	$s->query("SELECT status FROM idempotency.claim('$scope1', 'rr')");
	like($s->{stderr}, qr/40001/, 'REPEATABLE READ');
	$s->quit;
}

# the session on the key's node dies after the claim: nothing can be committed
for my $n (0, 2)
{
	for my $how ("claim('$scope1', 'dead', NULL, NULL, NULL)", "once('$scope1', 'dead')")
	{
		my $s = session($nodes[$n]);
		$s->query("BEGIN; SELECT FROM idempotency.$how");
		query($one, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE 'citus_internal%' AND state = 'idle in transaction'");
		$s->query("INSERT INTO biz VALUES ('$tenant2', 'dead')");
		$s->query('COMMIT');
		$s->quit;
		is(query($coordinator, "SELECT count(*) FROM biz WHERE k = 'dead'"), '0', "node $n, $how: no row without its key");
		is(query($coordinator, "SELECT count(*) FROM idempotency.keys WHERE key = 'dead'"), '0', 'and no key');
	}
}

# ---------------------------------------------------------------------------
# moves, splits, nodes
# ---------------------------------------------------------------------------

for my $n (0 .. 2)
{
	my ($from, $to) = $n % 2 ? ($two, $one) : ($one, $two);
	my $mode = (qw(block_writes force_logical auto))[$n];
	my $claimer = session($nodes[$n]);
	my $mover = session($coordinator);

	$claimer->query("BEGIN; SELECT status FROM idempotency.claim('$scope1', 'moved $n'); INSERT INTO biz VALUES ('$tenant2', 'moved $n')");
	start($mover, move($scope1, $from, $to, $mode) . ';');
	sleep 1.5;
	is(port_of(shard_of($scope1)), $from->port, "$mode: a move waits for an open claim");
	$claimer->query("SELECT idempotency.complete('$scope1', 'moved $n', 'done'); COMMIT");
	finish($mover);
	wait_until($coordinator, sprintf("SELECT nodeport = %d FROM $placements WHERE shardid = %d", $to->port, shard_of($scope1)), 'moved');
	is(query($from, qq{SELECT status FROM idempotency.claim('$scope1', 'steps', '{"a": 2}')}), 'mismatch', "$mode: requests are compared there");
	my @got = map { query($_, "SELECT status, response FROM idempotency.claim('$scope1', 'moved $n')") } @nodes[ 0 .. 2 ];
	is("@got", 'completed|done completed|done completed|done', "$mode: replayed from there");
	is(query($coordinator, "SELECT count(*) FROM biz WHERE k = 'moved $n'"), '1', 'done once');
	is(query($from, "SELECT idempotency.once('$scope1', 'after $n')"), 't', 'and it goes on');
	$_->quit for $claimer, $mover;
}

# it is on $two now; wait => '0' does not wait for a move
{
	my ($claimer, $mover) = (session($one), session($coordinator));

	$claimer->query("BEGIN; SELECT status FROM idempotency.claim('$scope1', 'held up')");
	start($mover, move($scope1, $two, $one, 'block_writes') . ';');
	sleep 1.5;
	for my $node (@nodes[ 0 .. 2 ])
	{
		my $start = time;
		is(sqlstate($node, "SELECT status FROM idempotency.claim('$scope1', 'meanwhile', wait => '0')"), 'in_progress', "wait => '0' while the shard moves");
		cmp_ok(time - $start, '<', 2, 'at once');
		is(query($node, "SELECT status FROM idempotency.claim('$scope1', 'moved 0', wait => '0')"), 'completed', 'replays go on');
		is(sqlstate($node, "SET idempotency.default_wait = '100 ms'; SELECT idempotency.once('$scope1', 'meanwhile')"), '55P03', 'once');
	}
	my $waiter = session($coordinator);
	start($waiter, "SELECT idempotency.once('$scope1', 'waited for the move');");
	sleep 0.3;
	$claimer->query('ROLLBACK');
	finish($mover);
	my ($out, $err) = finish($waiter);
	like("$out $err", qr/^\s*t|40001/m, 'who waited for the move goes on, or is told to retry');
	$_->quit for $claimer, $mover, $waiter;
}

# a tenant gets a shard of its own while its key is claimed
{
	my ($claimer, $mover) = (session($two), session($coordinator));

	$claimer->query("BEGIN; SELECT status FROM idempotency.claim('$scope1', 'split')");
	start($mover, "SELECT isolate_tenant_to_new_shard('idempotency.keys', '$scope1', shard_transfer_mode => 'block_writes');");
	sleep 1.5;
	$claimer->query("SELECT idempotency.complete('$scope1', 'split', 'done'); COMMIT");
	finish($mover);
	my @got = map { query($_, "SELECT status, response FROM idempotency.claim('$scope1', 'split')") } @nodes[ 0 .. 2 ];
	is("@got", 'completed|done completed|done completed|done', 'replayed from the new shard');
	cmp_ok(query($coordinator, "SELECT count(*) FROM pg_dist_shard WHERE logicalrelid = 'idempotency.keys'::regclass"), '>', 8, 'which is one more');
	$_->quit for $claimer, $mover;
}

# a mark's shard moves only when who is consuming has ended
{
	my ($consumer, $mover) = (session($coordinator), session($coordinator));
	my ($used, $token) = map { issue($coordinator, 'moved') } 1 .. 2;
	my $bytes = $token . '=' x (-length($token) % 4);
	my $shardid = query($coordinator, "SELECT get_shard_id_for_distribution_column('idempotency.used_tokens',
		encode(substr(decode(translate('$bytes', '-_', '+/'), 'base64'), 34, 16), 'hex')::uuid)");
	my $from = port_of($shardid) == $one->port ? $one : $two;
	my $to = $from == $one ? $two : $one;

	consume($one, $used, 'moved');
	$consumer->query("BEGIN; SELECT idempotency.consume_token('$token', 'moved', 'p')");
	start($mover, sprintf("SELECT citus_move_shard_placement($shardid, '127.0.0.1', %d, '127.0.0.1', %d, 'block_writes');", $from->port, $to->port));
	sleep 1.5;
	is(port_of($shardid), $from->port, 'a move waits for an open mark');
	is(everywhere('moved', $used), 'used', 'what was used is known meanwhile');
	is(consume($_, $token, 'moved'), 'busy', "wait => '0' while the shard moves") for @nodes[ 0 .. 2 ];
	$consumer->query('COMMIT');
	finish($mover);
	wait_until($coordinator, sprintf("SELECT nodeport = %d FROM $placements WHERE shardid = $shardid", $to->port), 'moved');
	is(everywhere('moved', $token), 'used', 'used, on its new node');
	$_->quit for $consumer, $mover;
}

# one more node
add_worker($three);
is(sqlstate($three, "SELECT idempotency.once('$scope1', 'added')", role => 'app'), '42501', 'a node that was added knows no roles yet');
is(sqlstate($three, "SELECT idempotency.issue_token('one', 'p')"), '55000', 'and no signing keys');

# the purge worker of the coordinator has seen to it
query($coordinator, $_) for "ALTER SYSTEM SET idempotency.purge_databases = 'postgres'", "ALTER SYSTEM SET idempotency.purge_interval = '1 s'", 'SELECT pg_reload_conf()';
for (1 .. 300)
{
	last if sqlstate($three, "SELECT idempotency.once('$scope1', 'added')", role => 'app') =~ /^[tf]$/;
	sleep 0.2;
}
query($coordinator, $_) for 'ALTER SYSTEM RESET idempotency.purge_databases', 'SELECT pg_reload_conf()';
is(role_query($three, 'app', "SELECT idempotency.once('$scope1', 'added')"), 'f', 'until the coordinator has seen it');
query($coordinator, 'SELECT idempotency.distribute()');
{
	my $token = issue($three, 'added');
	is(everywhere('added', $token), 'valid', 'issued on a node that was added');
	is(join(' ', map { consume($_, $token, 'added') } @nodes), 'consumed used used used', 'consumed once');
	is(consume($three, issue($one, 'added'), 'added'), 'consumed', 'consumed there');
	query($three, "SELECT idempotency.revoke_tokens('added', 'p')");
	query($three, "SELECT idempotency.rotate_token_key()");
	is(copies('token_generations', 'subject, purpose, generation, raised_at') . ' ' . copies('token_keys', 'id, created_at, rotated_at, secret, system, database'), '1|4 1|4', 'copies on all nodes');
}
is(role_query($three, 'app', "SELECT status, response FROM idempotency.claim('$scope1', 'split')"), 'completed|done', 'a node that was added knows the keys');
query($coordinator, move($scope2, $two, $three, 'block_writes'));
is(join(' ', map { role_query($_, 'app', "SELECT idempotency.once('$scope2', 'on three')") } @nodes), 't f f f', 'and holds some');

# what an operator sees is that of the node
{
	my $scope = scope_on($three);
	query($coordinator, "SELECT FROM idempotency.lease('$scope', 'seen', '1 h')");
	is(query($three, "SELECT scope, key FROM idempotency.in_flight WHERE key = 'seen'"), "$scope|seen", 'in_flight on its node');
	is(query($one, "SELECT count(*) FROM idempotency.in_flight WHERE key = 'seen'"), '0', 'and on no other');
	is(query($three, "SELECT mode, key FROM idempotency.holder('$scope', 'seen')"), 'lease|seen', 'holder on its node');
	is(sqlstate($one, "SELECT * FROM idempotency.holder('$scope', 'seen')"), '40001', 'refused on another');
	is(query($coordinator, q{SELECT sum(result::numeric) FROM run_command_on_all_nodes($$SELECT coalesce(sum(value), 0) FROM idempotency.stats WHERE name = 'keys'$$)}),
		query($coordinator, q{SELECT count(*) FROM idempotency.keys}), 'stats of all nodes');
	query($coordinator, "SELECT count(idempotency.once('purge' || i, 'k', '1 ms')) FROM generate_series(1, 50) i");
	sleep 0.1;
	is(query($coordinator, q{SELECT sum(result::int) FROM run_command_on_all_nodes('SELECT idempotency.purge()')}), '50', 'purge of all nodes');
	is(query($coordinator, "SELECT count(*) FROM idempotency.keys WHERE scope LIKE 'purge%'"), '0', 'removed');

	# marks by the node that has them, generations in the copy of each
	my @old = map { issue($coordinator, 'swept') } 1 .. 20;
	is(join(' ', map { consume($nodes[ $_ % 4 ], $old[$_], 'swept') } 0 .. 19), join(' ', ('consumed') x 20), 'tokens used on all nodes');
	query($coordinator, "UPDATE idempotency.used_tokens SET expires_at = now() - interval '1 year'");
	my $kept = issue($coordinator, 'swept');
	consume($three, $kept, 'swept');
	query($coordinator, "SELECT idempotency.revoke_tokens('swept', 'p')");
	query($coordinator, "UPDATE idempotency.token_generations SET raised_at = now() - interval '1 year' WHERE subject = 'swept'");
	query($coordinator, q{SELECT FROM run_command_on_all_nodes('SELECT idempotency.purge()')});
	is(query($coordinator, 'SELECT count(*) FROM idempotency.used_tokens'), '1', 'marks that are old are removed on all nodes');
	is(copies('token_generations', 'subject'), '1|4', 'generations in all copies');
	is(query($coordinator, "SELECT count(*) FROM idempotency.token_generations WHERE subject = 'swept'"), '0', 'removed');
	is(everywhere('swept', $kept), 'used', 'a mark that is young is kept');
}

# ---------------------------------------------------------------------------
# machines, versions and fences, where Citus lets triggers be
# ---------------------------------------------------------------------------

query($coordinator, q{
CREATE TABLE item (tenant text, id int, state text NOT NULL, version bigint NOT NULL DEFAULT 0, fence bigint, PRIMARY KEY (tenant, id));
SELECT create_distributed_table('item', 'tenant');
SELECT idempotency.define_machine('item', '{"initial": "new", "transitions": {"new": {"pay": "paid"}}}');
SELECT idempotency.distribute();
});
is(sqlstate($coordinator, "SELECT idempotency.$_"), 'XX000', "Citus refuses $_")
  for "attach_machine('item', 'state', 'item')", "attach_version('item', 'version')", "attach_fence('item', 'fence')";
query($coordinator, q{
SET citus.enable_unsafe_triggers = on;
SELECT idempotency.attach_machine('item', 'state', 'item', history => true), idempotency.attach_version('item', 'version'), idempotency.attach_fence('item', 'fence');
});
for my $n (0 .. 3)
{
	my $row = qq{{"tenant": "item$n", "id": 1}};
	like(sqlstate($nodes[$n], qq{SELECT created FROM idempotency.insert_once(NULL::item, '{"tenant": "item$n", "id": 1, "state": "new", "version": 0}')}), qr/^(42846|XX000)$/, 'insert_once is refused');
	query($nodes[$n], "INSERT INTO item VALUES ('item$n', 1, 'new')");
	is(sqlstate($nodes[$n], "UPDATE item SET state = 'lost', fence = 1 WHERE tenant = 'item$n'"), 'IK003', 'off the graph');
	is(query($nodes[ ($n + 2) % 4 ], "SELECT outcome, state FROM idempotency.fire('item', '$row', 'pay', '{\"fence\": 2}')"), 'applied|paid', 'fire');
	is(query($nodes[$n], "SELECT outcome, state FROM idempotency.transition('item', '$row', 'new', 'paid', '{\"fence\": 2}')"), 'already|paid', 'transition');
	is(sqlstate($nodes[$n], "UPDATE item SET fence = 1 WHERE tenant = 'item$n'"), 'IK002', 'fence');
	is(query($nodes[$n], "SELECT outcome, version FROM idempotency.update_if('item', '$row', 1, '{\"fence\": 3}')"), 'applied|2', 'version');
}
is(query($coordinator, q{SELECT sum(result::int) FROM run_command_on_all_nodes($$SELECT count(*) FROM idempotency.transition_log WHERE table_name = 'public.item'$$)}), '4', 'history of all nodes');
query($coordinator, 'DROP TABLE item');

# ---------------------------------------------------------------------------
# stress and recount
# ---------------------------------------------------------------------------

sub stress
{
	my ($table, $tenant) = @_;
	my $dir = PostgreSQL::Test::Utils::tempdir;
	my @pids;
	my $end = time + $seconds;
	my ($killed, $moved) = (0, 0);

	append_to_file("$dir/job.sql", qq{
\\set id random(1, 20000)
\\set s random(1, 16)
BEGIN;
SELECT status = 'claimed' AS mine FROM idempotency.claim('st' || :id % 16, :id::text, NULL, NULL, '5 s') \\gset
\\if :mine
INSERT INTO $table VALUES ($tenant, :id::text, concat_ws(' ', inet_server_port(), pg_backend_pid(), clock_timestamp()));
SELECT idempotency.complete('st' || :id % 16, :id::text, :id::text);
\\endif
COMMIT;
});
	# tokens, each consumed with a row of its own
	query($coordinator, q{
CREATE TABLE IF NOT EXISTS issued (id int, token text);
TRUNCATE issued;
DROP TABLE IF EXISTS consumed;
CREATE TABLE consumed (id int, note text);
SELECT create_reference_table('issued') WHERE NOT EXISTS (SELECT FROM pg_dist_partition WHERE logicalrelid = 'issued'::regclass);
SELECT create_distributed_table('consumed', 'id', colocate_with => 'none');
INSERT INTO issued SELECT i, idempotency.issue_token('stress', 'p', '1 h') FROM generate_series(1, 3000) i});
	my $marked = query($coordinator, 'SELECT count(*) FROM idempotency.used_tokens');
	append_to_file("$dir/token.sql", q{
\set id random(1, 3000)
SELECT quote_literal(token) AS token FROM issued WHERE id = :id \gset
BEGIN;
SELECT status = 'consumed' AS mine FROM idempotency.consume_token(:token, 'stress', 'p', '5 s') \gset
\if :mine
INSERT INTO consumed VALUES (:id, concat_ws(' ', inet_server_port(), pg_backend_pid(), clock_timestamp()));
\endif
COMMIT;
});
	for my $client (0 .. 4)
	{
		my $node = $nodes[ $client % 3 ];
		my $pid = fork;
		die unless defined $pid;
		push @pids, $pid and next if $pid;
		open STDERR, '>>', "$dir/errors";
		open STDOUT, '>>', "$dir/out";
		until (-e "$dir/enough")
		{
			system 'pgbench', '-n', '-c', 1, '-T', 2, '-f', "$dir/job.sql\@2", '-f', "$dir/token.sql\@1", '-h', $node->host, '-p', $node->port, 'postgres';
		}
		POSIX::_exit(0);
	}
	# longer, where the machine is so busy that nothing was met so far
	while (time < $end || (!$killed || !$moved) && time < $end + 120)
	{
		sleep 0.5;
		$killed += query($nodes[ rand 4 ], "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity
			WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
			AND (application_name = 'pgbench' OR application_name LIKE 'citus_internal%' AND state LIKE 'idle in%' OR application_name LIKE 'citus_internal%' AND query LIKE '%at_home%')
			ORDER BY random() LIMIT 1) x");
		next if rand > 0.3;
		my $to = $nodes[ 1 + rand 3 ];
		my ($ret) = $coordinator->psql('postgres', sprintf qq{SELECT citus_move_shard_placement(shardid, '127.0.0.1', nodeport, '127.0.0.1', %d, '%s')
			FROM (SELECT * FROM $placements WHERE logicalrelid IN ('idempotency.keys'::regclass, 'idempotency.used_tokens'::regclass) AND nodeport <> %d ORDER BY random() LIMIT 1) s}, $to->port, rand > 0.5 ? 'block_writes' : 'force_logical', $to->port);
		$moved++ if defined $ret && $ret == 0;
	}
	append_to_file("$dir/enough", '');
	waitpid $_, 0 for @pids;
	sleep 4;	# Citus completes what was prepared
	my $rows = query($coordinator, "SELECT count(*) FROM $table");
	note "$rows rows, $killed backends terminated, $moved moves";
	cmp_ok($rows, '>', 50, "$table: there was work");
	cmp_ok($killed, '>', 0, 'and trouble');
	cmp_ok($moved, '>', 0, 'and moves');
	is(query($coordinator, "SELECT count(DISTINCT k) FROM $table"), $rows, "$table: no effect twice");
	is(query($coordinator, "SELECT count(*) FROM idempotency.keys WHERE scope LIKE 'st%'"), $rows, 'a key for each');
	is(query($coordinator, "SELECT count(*) FROM (SELECT k FROM $table EXCEPT SELECT key FROM idempotency.keys WHERE scope LIKE 'st%') x"), '0', 'the same');
	my $consumed = query($coordinator, 'SELECT count(*) FROM consumed');
	note "$consumed tokens consumed";
	cmp_ok($consumed, '>', 10, 'tokens were consumed');
	is(query($coordinator, 'SELECT count(DISTINCT id) FROM consumed'), $consumed, 'none twice');
	is(query($coordinator, 'SELECT count(*) FROM idempotency.used_tokens') - $marked, $consumed, 'a mark for each');
	my $wrong = query($coordinator, "SELECT k, note FROM $table WHERE k IN (SELECT k FROM $table GROUP BY k HAVING count(*) > 1)
		OR k NOT IN (SELECT key FROM idempotency.keys WHERE scope LIKE 'st%') ORDER BY k");
	diag($wrong) if $wrong ne '';
}

query($coordinator, q{CREATE TABLE effect (tenant text, k text, note text); SELECT create_distributed_table('effect', 'tenant', colocate_with => 'none')});
stress('effect', "'t' || :s");

# ---------------------------------------------------------------------------
# colocated
# ---------------------------------------------------------------------------

is(sqlstate($coordinator, 'DROP EXTENSION idempotency'), '2BP01', 'the copies on the coordinator go by CASCADE alone');
query($coordinator, q{
DROP EXTENSION idempotency CASCADE;
CREATE EXTENSION idempotency;
CREATE TABLE orders (tenant text COLLATE "C", k text, note text);
SELECT create_distributed_table('orders', 'tenant', colocate_with => 'none');
SELECT idempotency.grant_usage('app'), idempotency.distribute('orders');
CREATE FUNCTION place(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO orders VALUES (request ->> 'tenant', request ->> 'k');
  RETURN current_setting('port');
END $$;
SELECT create_distributed_function('place(jsonb)');
GRANT ALL ON orders TO app;
});
for my $scope (map { scope_on($_) } @nodes[ 1 .. 3 ])
{
	my $home = port_of(shard_of($scope));
	my @got = map { role_query($_, 'app', qq{SELECT status, replayed, response FROM idempotency.run('$scope', 'run', 'place', '{"tenant": "$scope", "k": "run"}')}) } @nodes;
	is("@got", join(' ', "completed|f|$home", ("completed|t|$home") x 3), 'run goes to the shard of its scope');
	is(query($coordinator, "SELECT count(*) FROM orders WHERE tenant = '$scope'"), '1', 'done once');
}
# a function of the application, sent to the shard as a whole
query($coordinator, q{
CREATE FUNCTION place_once(tenant text, k text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  IF NOT idempotency.once(tenant, k) THEN RETURN false; END IF;
  INSERT INTO orders VALUES (tenant, k);
  RETURN true;
END $$;
SELECT create_distributed_function('place_once(text, text)', 'tenant', colocate_with => 'orders')});
for my $block ('', 'BEGIN;')
{
	my $end = $block ? '; COMMIT' : '';
	my @got = map { query($_, "$block SELECT place_once('pl1', 'whole$block')$end") } @nodes;
	is("@got", 't f f f', "a distributed function, $block");
	is(query($coordinator, "SELECT count(*) FROM orders WHERE k = 'whole$block'"), '1', 'done once');
}
query($coordinator, 'DELETE FROM orders');
stress('orders', "'st' || :id % 16");

sub left_behind
{
	return query($coordinator, q{SELECT count(*) FROM run_command_on_all_nodes($$SELECT count(*) FROM pg_class WHERE relname ~ '^(keys|used_tokens|token_)'$$) WHERE result <> '0'});
}
query($coordinator, 'DROP EXTENSION idempotency CASCADE');
is(left_behind(), '0', 'DROP EXTENSION leaves nothing behind');

# ---------------------------------------------------------------------------
# one node with keys, and local writes on the coordinator
# ---------------------------------------------------------------------------

query($coordinator, q{
CREATE EXTENSION idempotency;
SET citus.shard_count = 1;
SELECT idempotency.distribute();
TRUNCATE plain;
});
{
	my $log = query_error($coordinator, "SET citus.log_remote_commands = on; BEGIN; SELECT idempotency.once('s', 'both'); INSERT INTO plain VALUES ('both'); COMMIT");
	like($log, qr/PREPARE TRANSACTION/, 'a key and a local write are committed in two phases');
	unlike($log, qr/ERROR/, 'committed');
	$log = query_error($coordinator, "SET citus.log_remote_commands = on; SELECT idempotency.once('s', 'alone')");
	unlike($log, qr/PREPARE TRANSACTION|ERROR/, 'a key alone in one');
	query($coordinator, "BEGIN; SELECT idempotency.once('s', 'neither'); INSERT INTO plain VALUES ('neither'); ROLLBACK");
	is(query($coordinator, 'SELECT (SELECT count(*) FROM plain), (SELECT count(*) FROM idempotency.keys)'), '1|2', 'together or not at all');
}
query($coordinator, 'DROP EXTENSION idempotency CASCADE');
is(left_behind(), '0', 'nothing is left');

done_testing();
