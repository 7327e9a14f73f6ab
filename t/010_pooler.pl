# Transaction-mode pooling with PgBouncer: a client's transactions run in
# changing backends, and a backend serves many clients.  So nothing of a key
# may stay behind in a backend, and nothing may be needed that was there.
use strict;
use warnings;

use IPC::Run;
use FindBin;
use lib "$FindBin::RealBin/lib";
use Ask;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($pgbouncer) = grep { -x } map { "$_/pgbouncer" } split(/:/, $ENV{PATH}), '/usr/sbin';
plan skip_all => 'pgbouncer is not installed' unless $pgbouncer;

my $node = PostgreSQL::Test::Cluster->new('pooled');
$node->init;
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idempotency;
	CREATE ROLE app LOGIN;
	SELECT idempotency.grant_usage('app');
	CREATE TABLE payment (request_id text UNIQUE, amount integer);
	GRANT ALL ON payment TO app;
	CREATE FUNCTION pay(request jsonb) RETURNS text LANGUAGE sql
	RETURN 'paid ' || (request ->> 'amount');
});

# --------------------------------------------------------------- the pooler
my $dir = PostgreSQL::Test::Utils::tempdir_short();
my $port = PostgreSQL::Test::Cluster::get_free_port();
append_to_file("$dir/users.txt", qq{"app" ""\n});
append_to_file("$dir/pgbouncer.ini", sprintf(<<'INI', $node->host, $node->port, $dir, $port, $dir, $dir));
[databases]
postgres = host=%s port=%d dbname=postgres

[pgbouncer]
listen_addr =
unix_socket_dir = %s
listen_port = %d
auth_type = trust
auth_file = %s/users.txt
logfile = %s/pgbouncer.log
pool_mode = transaction
default_pool_size = 4
INI
my $pooler = IPC::Run::start([ $pgbouncer, '-q', "$dir/pgbouncer.ini" ], '<', \undef);
for (1 .. 600)
{
	last if -S "$dir/.s.PGSQL.$port";
	select(undef, undef, undef, 0.1);
}

my @sessions;
my ($a, $b, $c) = map { client() } 1 .. 3;
is(ask($a, q{SELECT count(*) FROM pg_stat_activity WHERE usename = 'app'}), '1', 'three clients, one backend');

# ------------------------------------------------- the main job, then a retry
my $claim = q{SELECT status, response FROM idempotency.claim('pooled', '%s', '{"amount": 10}')};
ask($a, 'BEGIN');
is(ask($a, sprintf($claim, 'k1')), 'claimed|', 'claimed');
ask($a, q{INSERT INTO payment VALUES ('k1', 10)});
ask($a, q{SELECT idempotency.complete('pooled', 'k1', 'paid', '{"http": 201}')});
my $first = pid($a);
ask($a, 'COMMIT');

is(occupy($b), $first, 'another client takes that backend');
my $second = pid($a);
isnt($second, $first, 'the next transaction runs in another one');
is(ask($a, sprintf($claim, 'k1')), 'completed|paid', 'which replays');
is(ask($a, q{SELECT status FROM idempotency.claim('pooled', 'k1', '{"amount": 11}')}), 'mismatch', 'and compares');
is(ask($a, q{SELECT idempotency.once('pooled', 'k1')}), 'f', 'once() knows it, too');
is(ask($b, sprintf($claim, 'k1')), 'completed|paid', 'as does the first backend');
ask($b, 'COMMIT');
is(ask($a, q{SELECT status, replayed, response FROM idempotency.run('pooled', 'k2', 'pay', '{"amount": 7}')}), 'completed|f|paid 7', 'run() in one round trip');
occupy($b);
is(ask($a, q{SELECT status, replayed, response FROM idempotency.run('pooled', 'k2', 'pay', '{"amount": 7}')}), 'completed|t|paid 7', 'and its replay in another backend');
ask($b, 'COMMIT');

# ----------------------------------- a claim does not outlive its transaction
ask($a, 'BEGIN');
ask($a, sprintf($claim, 'open'));
is(ask($a, 'COMMIT'), 'IK001', 'a claim left open is refused');
is(ask($a, q{SELECT idempotency.complete('pooled', 'open', 'late')}), 'IK006', 'and cannot be completed in the next transaction');
ask($b, 'BEGIN');
is(ask($b, sprintf($claim, 'open')), 'claimed|', 'so another client has it at once');
ask($b, 'ROLLBACK');
is(ask($c, sprintf($claim, 'open') . q{\; SELECT idempotency.release('pooled', 'open')}), "claimed|\nt", 'and again, in one message');

# --------------------------------- a rival waits, in either backend
ask($a, 'BEGIN');
ask($a, sprintf($claim, 'k3'));
send_to($b, sprintf($claim, 'k3'));
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_activity
	WHERE usename = 'app' AND wait_event_type = 'Lock'}) or die 'nobody waits';
ask($a, q{SELECT idempotency.complete('pooled', 'k3', 'first')});
ask($a, 'COMMIT');
is(answer_of($b), 'completed|first', 'the rival waits and replays');

# ------------------------------------------- the client dies within its claim
my $dying = client();
ask($dying, 'BEGIN');
is(ask($dying, sprintf($claim, 'died')), 'claimed|', 'claimed by a client');
send_to($b, 'BEGIN; ' . sprintf($claim, 'died'));
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_activity
	WHERE usename = 'app' AND wait_event_type = 'Lock'}) or die 'nobody waits';
$dying->{harness}->kill_kill;
@sessions = grep { $_ != $dying } @sessions;
is(answer_of($b), 'claimed|', 'that dies: the rival has the key');
ask($b, 'ROLLBACK');

# ------------------------------------- a lease, each step in another backend
my ($status, $fence) = split /\|/, ask($a, q{SELECT status, fence FROM idempotency.lease('pooled', 'job', '10 min')});
is($status, 'claimed', 'leased');
occupy($b);
like(ask($a, "SELECT idempotency.checkpoint('pooled', 'job', $fence, 'charged')"), qr/^20/, 'a checkpoint in another backend');
occupy($c);
is(ask($a, "SELECT idempotency.extend('pooled', 'job', $fence, '20 min') IS NOT NULL"), 't', 'extended in a third');
isnt(pid($a), pid($b), 'backends differ');
ask($b, 'COMMIT');
is(ask($b, q{SELECT status FROM idempotency.lease('pooled', 'job', '1 min')}), 'in_progress', 'another client sees it in progress');
like(ask($a, "SELECT idempotency.complete('pooled', 'job', 'done', NULL, $fence)"), qr/^20/, 'completed');
ask($c, 'COMMIT');
is(ask($c, q{SELECT status, response FROM idempotency.claim('pooled', 'job')}), 'completed|done', 'and replayed');

# ----------------------------------------- the caller's own index, and DDL
my $insert = q{SELECT created, (stored).amount FROM idempotency.insert_once(NULL::payment, '{"request_id": "i1", "amount": 5}')};
is(ask($a, $insert), 't|5', 'insert_once in one backend');
occupy($b);
is(ask($a, $insert), 'f|5', 'and in another');
ask($b, 'COMMIT');
$node->safe_psql('postgres', q{ALTER TABLE payment ADD COLUMN note text DEFAULT 'new'});
is(ask($a, q{SELECT created, (stored).note FROM idempotency.insert_once(NULL::payment, '{"request_id": "i1"}')}), 'f|new', 'whose plans follow the table');

# ----------------------------------------------- nothing was left behind
is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
	WHERE usename = 'app' AND locktype <> 'virtualxid'}), '0', 'no lock is left in any backend');
is($node->safe_psql('postgres', q{SELECT string_agg(request_id, ',' ORDER BY request_id) FROM payment}), 'i1,k1', 'the work was done once');
cmp_ok($node->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE usename = 'app'}), '>', 1, 'by several backends');

$_->{harness}->kill_kill for @sessions;
$pooler->kill_kill;
$node->stop;
done_testing();

sub client
{
	push @sessions, session("host=$dir port=$port dbname=postgres", 'app');
	return $sessions[-1];
}

sub pid { return ask($_[0], 'SELECT pg_backend_pid()'); }

# Begin a transaction and stay in it: no other client gets this backend.
sub occupy
{
	my ($session) = @_;
	ask($session, 'BEGIN');
	return pid($session);
}
