# The client does not learn what became of its COMMIT, and retries; and many
# clients retry at once.
use strict;
use warnings;

use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('primary');
$node->init(allows_streaming => 1);
$node->append_conf('postgresql.conf', 'max_connections = 60');
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idempotency;
	CREATE TABLE payment (request_id text);
});
my $job = q{
	SELECT status FROM idempotency.claim('reply', '%1$s');
	INSERT INTO payment VALUES ('%1$s');
	SELECT idempotency.complete('reply', '%1$s', 'paid') > now();
};

# -------------------------------------------- the reply to COMMIT is lost
# A COMMIT that waits for a standby that does not exist is durable here, and
# its backend is killed before it can say so.
$node->append_conf('postgresql.conf', q{synchronous_standby_names = 'nobody'});
$node->reload;
for my $how ('terminated', 'crashed')
{
	my $pid;
	my $client = IPC::Run::start(
		[ 'psql', '-XAtq', '-d', $node->connstr('postgres'), '-c', 'BEGIN;' . sprintf($job, $how) . 'COMMIT' ],
		'<', \undef, '>', \my $out, '2>', \my $err);
	$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'})
	  or die 'COMMIT does not wait';
	is(one(q{SELECT status FROM idempotency.claim('reply', '%s', wait => '0')}, $how), 'in_progress',
		"$how: COMMIT has not come back, a retry without wait is in progress");
	if ($how eq 'terminated')
	{
		one(q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'});
	}
	else
	{
		$node->stop('immediate');
		$node->append_conf('postgresql.conf', q{synchronous_standby_names = ''});
		$node->start;
	}
	$client->finish;
	isnt($client->full_result(0), 0, 'the client has seen its connection go');
	is(one(q{SELECT status, response FROM idempotency.claim('reply', '%s')}, $how), 'completed|paid', 'its retry replays');
	is(one(q{SELECT count(*) FROM payment WHERE request_id = '%s'}, $how), '1', 'the work was done once');
}

# ----------------------- the key did not reach the standby that takes over
$node->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->start;
one('BEGIN;' . sprintf($job, 'arrived') . 'COMMIT');
$node->wait_for_catchup('standby');
$standby->safe_psql('postgres', 'SELECT pg_wal_replay_pause()');
$standby->stop;		# it receives nothing more
one('BEGIN;' . sprintf($job, 'lost') . 'COMMIT');
$node->stop('immediate');
$standby->append_conf('postgresql.conf', q{primary_conninfo = ''});
$standby->start;
$standby->promote;
is($standby->safe_psql('postgres', q{SELECT status, response FROM idempotency.claim('reply', 'arrived')}), 'completed|paid', 'failover: what arrived is replayed');
is($standby->safe_psql('postgres', q{SELECT count(*) FROM payment WHERE request_id = 'lost'}), '0', 'what was lost was lost with its work');
is($standby->safe_psql('postgres', 'BEGIN;' . sprintf($job, 'lost') . 'COMMIT'), "claimed\nt", 'so the retry runs');
$node = $standby;

# --------------------------------------------------------------- a hot key
# Completed: all that ask get the answer, also those who do not wait.
sub pgbench_ok
{
	my ($name, $script) = @_;
	my $file = $node->basedir . '/script.sql';
	unlink $file;
	append_to_file($file, $script);
	$node->command_ok([ 'pgbench', '-n', '-M', 'prepared', '-c', 16, '-t', 200, '-f', $file, 'postgres' ], $name);
	return;
}
# \set divides by zero, so that pgbench fails, if the answer is another one
my $is = q{SELECT (status = '%s')::int AS good FROM idempotency.claim('reply', '%s', wait => '0') \gset
\set good 1 / :good
};
pgbench_ok('a completed key is never in progress', sprintf $is, 'completed', 'arrived');
pgbench_ok('16 clients on new keys, each key once', q{BEGIN;
SELECT (status = 'claimed')::int AS good FROM idempotency.claim('reply', 'c' || :client_id || ' ' || txid_current()) \gset
\set good 1 / :good
SELECT idempotency.complete('reply', 'c' || :client_id || ' ' || txid_current());
COMMIT;
});

# Held: those who do not wait are told so, those who wait do so without
# harming others, and all of them get the first answer.
my $holder = IPC::Run::start(
	[ 'psql', '-XAtq', '-d', $node->connstr('postgres') ],
	'<', \my $in, '>', \my $said, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
$in .= 'BEGIN;' . sprintf($job, 'hot');
$holder->pump until $said =~ /claimed\nt\n/;
pgbench_ok('a held key is in progress, at once', sprintf $is, 'in_progress', 'hot');
my @waiters = map {
	my $waiter = { out => '' };
	$waiter->{harness} = IPC::Run::start(
		[ 'psql', '-XAtq', '-d', $node->connstr('postgres'), '-c', q{SELECT status, response FROM idempotency.claim('reply', 'hot')} ],
		'<', \undef, '>', \$waiter->{out}, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	$waiter;
} 1 .. 30;
$node->poll_query_until('postgres', q{SELECT count(*) = 30 FROM pg_stat_activity WHERE wait_event_type = 'Lock'}) or die 'they do not wait';
is(one(q{SELECT idempotency.once('reply', 'another')}), 't', 'another key is free meanwhile');
$in .= "COMMIT;\n\\q\n";
$holder->finish;
$_->{harness}->finish for @waiters;
is(join(',', grep { $_ ne "completed|paid\n" } map { $_->{out} } @waiters), '', '30 waiters get the first answer');
is(one(q{SELECT count(*) FROM payment WHERE request_id = 'hot'}), '1', 'and the work was done once');

$node->stop;
done_testing();

# What a statement says; synchronous commit is no part of the questions.
sub one
{
	my ($sql, @args) = @_;
	return $node->safe_psql('postgres', 'SET synchronous_commit = local; ' . (@args ? sprintf($sql, @args) : $sql));
}
