# Ends that are not a COMMIT or ROLLBACK: PREPARE TRANSACTION, a killed backend,
# a crash.  What was committed or prepared is there after it, and what was not
# is free at once.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use Ask;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('restart');
$node->init;
$node->append_conf('postgresql.conf', 'max_prepared_transactions = 10');
# several keys are in work at once, also where hashes are short (test/collisions)
$node->append_conf('postgresql.conf', 'idempotency.debug_hash_bits = 64') if $ENV{COLLISIONS};
$node->start;
ask_at(node => $node, role => 'app');
$node->safe_psql(
	'postgres', q{
	CREATE EXTENSION idempotency;
	CREATE ROLE app LOGIN;
	SELECT idempotency.grant_usage('app');
	CREATE TABLE payment (request_id text, amount integer);
	GRANT ALL ON payment TO app;
});

# Wait until that many sessions wait for a lock.
sub wait_for_waiters
{
	my ($n) = @_;
	$node->poll_query_until('postgres',
		"SELECT count(*) = $n FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND usename = 'app'"
	) or die 'nobody waits';
	return;
}

my $claim = q{SELECT status, response FROM idempotency.claim('restart', '%s'};
my $nowait = $claim . q{, wait => '0')};

# PREPARE TRANSACTION

is(sqlstate(q{BEGIN; SELECT idempotency.claim('restart', 'open'); PREPARE TRANSACTION 'open';}),
	'IK001', 'an open claim cannot be prepared');
is( $node->safe_psql('postgres', 'SELECT count(*) FROM pg_prepared_xacts'), '0', 'nor is it');

for my $p (qw(commit rollback crash_commit crash_rollback))
{
	query(qq{
		BEGIN;
		SELECT idempotency.claim('restart', '$p');
		INSERT INTO payment VALUES ('$p', 10);
		SAVEPOINT a;
		SELECT idempotency.complete('restart', '$p', 'paid $p');
		SELECT idempotency.once('restart', '$p once');
		SELECT idempotency.claim('restart', '$p released');
		SELECT idempotency.release('restart', '$p released');
		PREPARE TRANSACTION '$p';});
}
$node->safe_psql('postgres', q{BEGIN; INSERT INTO payment VALUES ('no key', 1); SELECT idempotency.lookup('restart', 'commit'); PREPARE TRANSACTION 'no key';});
is( $node->safe_psql('postgres', q{SELECT string_agg(prepared_gid, ' ' ORDER BY prepared_gid), bool_and(mode = 'transaction' AND pid IS NULL AND since <= now()) FROM idempotency.in_flight}),
	'commit crash_commit crash_rollback rollback|t', 'in_flight tells which prepared transactions hold keys');
is($node->safe_psql('postgres', q{SELECT prepared_gid FROM idempotency.holder('restart', 'commit once')}), 'commit', 'so does holder(), behind a savepoint');
$node->safe_psql('postgres', q{ROLLBACK PREPARED 'no key'});
is(query(sprintf $nowait, 'commit'), 'in_progress|', 'a prepared claim is in progress');
is(sqlstate(q{SET idempotency.default_wait = 0; SELECT idempotency.once('restart', 'commit once');}),
	'55P03', 'so is a prepared once()');
is( query(q{SELECT status FROM idempotency.claim('restart', 'commit', wait => '10 ms')}),
	'in_progress', 'also after a wait');
is(query(q{SELECT status IS NULL FROM idempotency.lookup('restart', 'commit')}),
	't', 'and not to be seen');
is(query(q{SELECT idempotency.once('restart', 'commit released')}),
	't', 'what was released before PREPARE is free');

my $rival = session($node->connstr('postgres'), 'app');
send_to($rival, sprintf("$claim);", 'commit'));
wait_for_waiters(1);
is( $node->safe_psql('postgres', q{SELECT cardinality(waiting_pids) FROM idempotency.in_flight WHERE prepared_gid = 'commit'}),
	'1', 'and whom they keep waiting');
$node->safe_psql('postgres', q{COMMIT PREPARED 'commit'});
is(answer_of($rival), 'completed|paid commit', 'a rival waits for COMMIT PREPARED, and replays');

ask($rival, 'BEGIN;');
send_to($rival, sprintf("$claim);", 'rollback'));
wait_for_waiters(1);
$node->safe_psql('postgres', q{ROLLBACK PREPARED 'rollback'});
is(answer_of($rival), 'claimed|', 'a rival waits for ROLLBACK PREPARED, and has the key');
like(ask($rival, q{SELECT idempotency.complete('restart', 'rollback', 'by the rival'); COMMIT;}),
	qr/^20/, 'and answers it');
is(query(q{SELECT idempotency.once('restart', 'rollback once')}), 't',
	'what once() marked in it is free again');

my $other = session($node->connstr('postgres'), 'app');
is(ask($rival, q{BEGIN; SELECT idempotency.once('restart', 'stored');}), 't', 'a session stores an answer, and does not commit');
send_to($other, sprintf("$claim);", 'stored'));
wait_for_waiters(1);
is( $node->safe_psql('postgres', q{SELECT mode, a.usename, since <= now(), cardinality(waiting_pids)
	FROM idempotency.in_flight f JOIN pg_stat_activity a USING (pid)}),
	'transaction|app|t|1', 'in_flight tells who keeps a rival waiting');
ask($rival, 'COMMIT;');
is(answer_of($other), 'completed|', 'who gets the answer');
close_session($other);

# A killed backend

my $holder = session($node->connstr('postgres'), 'app');
is(ask($holder, 'BEGIN; ' . sprintf("$claim);", 'killed')), 'claimed|', 'a session claims a key');
send_to($rival, 'BEGIN; ' . sprintf("$claim);", 'killed'));
wait_for_waiters(1);
$node->safe_psql('postgres', q{SELECT pg_terminate_backend(pid, 10000) FROM pg_locks
	WHERE locktype = 'advisory' AND granted});
is(answer_of($rival), 'claimed|', 'and is killed: the rival has it');
like(ask($rival, q{SELECT idempotency.complete('restart', 'killed', 'by the rival'); COMMIT;}), qr/^20/, 'and answers it');
close_session($holder);

# A crash: with a claim open, one answered but not committed, and two prepared

$holder = session($node->connstr('postgres'), 'app');
is(ask($holder, 'BEGIN; ' . sprintf("$claim);", 'lost')), 'claimed|', 'a claim is open at the crash');
my $answered = session($node->connstr('postgres'), 'app');
is( ask($answered, q{BEGIN; INSERT INTO payment VALUES ('lost', 10); SELECT idempotency.once('restart', 'lost once');}),
	't', 'another is answered');
query(q{SELECT idempotency.once('restart', 'durable')});
$node->stop('immediate');
$node->start;
close_session($_) for $holder, $answered, $rival;

is(query(q{SELECT idempotency.once('restart', 'durable')}), 'f', 'what was committed is there');
is(query(sprintf $nowait, 'rollback'), 'completed|by the rival', 'with its answer');
is(query(sprintf($nowait, 'lost') . q{, LATERAL idempotency.release('restart', 'lost')}),
	'claimed|', 'an open claim is free after the crash');
is(query(q{SELECT idempotency.once('restart', 'lost once')}), 't', 'as is an answer that was not committed');

is(query(sprintf $nowait, 'crash_commit'), 'in_progress|', 'a prepared claim survives it');
is(sqlstate(q{SET idempotency.default_wait = 0; SELECT idempotency.once('restart', 'crash_rollback once');}),
	'55P03', 'so does a prepared once()');
$rival = session($node->connstr('postgres'), 'app');
send_to($rival, sprintf("$claim);", 'crash_commit'));
wait_for_waiters(1);
$node->safe_psql('postgres', q{COMMIT PREPARED 'crash_commit'});
is(answer_of($rival), 'completed|paid crash_commit', 'and is waited for as before');
ask($rival, 'BEGIN;');
send_to($rival, sprintf("$claim);", 'crash_rollback'));
wait_for_waiters(1);
$node->safe_psql('postgres', q{ROLLBACK PREPARED 'crash_rollback'});
is(answer_of($rival), 'claimed|', 'either way');
ask($rival, 'ROLLBACK;');
close_session($rival);

is(query('SELECT string_agg(request_id, $$ $$ ORDER BY request_id) FROM payment'),
	'commit crash_commit', 'the work was done where the answer was given');

$node->stop;
done_testing();
