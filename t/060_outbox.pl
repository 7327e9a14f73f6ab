# The outbox over the ends that isolation tests cannot stage: prepared
# transactions, killed workers, a crash, dump and restore; and a stress run.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', "max_prepared_transactions = 10\nwal_writer_delay = 10s\n");
$node->start;
$node->safe_psql('postgres', 'CREATE EXTENSION idempotency');

sub sql { return $node->safe_psql('postgres', join ';', @_); }

# events go by their payloads here; leases are long, for servers that are slow
sql(q{CREATE FUNCTION event(p text) RETURNS bigint LANGUAGE sql AS $$SELECT id FROM idempotency.outbox WHERE payload #>> '{}' = p$$});
my $take = "SELECT attempt || ':' || (payload #>> '{}') FROM idempotency.take('t', lease => '1 h')";

#
# Prepared transactions
#
sql("BEGIN", "SELECT idempotency.emit('t', '\"prepared\"', 'k')", "PREPARE TRANSACTION 'emit'");
sql("SELECT idempotency.emit('t', '\"next\"', 'k')", "SELECT idempotency.emit('t', '\"other\"', 'j')");
is(sql($take), "1:next\n1:other", 'an event in a prepared transaction delays nobody');
sql("COMMIT PREPARED 'emit'");
is(sql($take), '', 'it waits for the event of its key that is out');
is(sql(q{SELECT idempotency.ack(event('next'), 1)}, $take), "t\n1:prepared", 'and then comes, late');

sql("BEGIN", "SELECT idempotency.ack(event('prepared'), 1)", "PREPARE TRANSACTION 'ack'");
sql("SELECT idempotency.emit('t', '\"after\"', 'k')");
is(sql($take), '', 'a prepared ack keeps its key');
sql("COMMIT PREPARED 'ack'");
is(sql($take), '1:after', 'until it is committed');
sql('SELECT idempotency.ack_batch(array_agg(id), array_agg(attempt + 1)) FROM idempotency.outbox');

sql("SELECT idempotency.emit('t', '\"taken\"', 'k')");
sql('BEGIN', $take, "PREPARE TRANSACTION 'take'");
is(sql($take), '', 'a prepared take keeps the event');
$node->restart;
is(sql($take), '', 'over a restart');
sql("ROLLBACK PREPARED 'take'");
is(sql($take), '1:taken', 'and gives it back when it is rolled back');
sql(q{SELECT idempotency.ack(event('taken'), 1)});

#
# Memory: a purge of many events takes no more of it than one of few
#
SKIP:
{
	skip 'no /proc', 1 unless -e '/proc/self/status';
	my $peak = "SELECT substring(pg_read_file('/proc/self/status') from 'VmHWM:\\s+(\\d+)') AS %s \\gset\n";
	sql(q{INSERT INTO idempotency.outbox_keys (taken, id, topic, key)
		SELECT i, -i, 'm', i::text FROM generate_series(1, 40000) i});
	is(sql("SELECT count(*) FROM idempotency.outbox", "SELECT idempotency.purge(10)",
			sprintf($peak, 'a') . "SELECT idempotency.purge(1000000)",
			sprintf($peak, 'b') . "SELECT :b - :a < 30000"),
		"0\n10\n39990\nt", 'the memory of a purge does not grow with what it removes');
}

#
# Killed workers
#
sql("SELECT idempotency.emit('t', '\"killed\"', 'k')");
my $worker = $node->background_psql('postgres');
is($worker->query("BEGIN; $take"), '1:killed', 'a worker has it');
is(sql($take), '', 'nobody else');
my $pid = $worker->query('SELECT pg_backend_pid()');
sql("SELECT pg_terminate_backend($pid)");
$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)");
is(sql($take), '1:killed', 'killed before its commit: at once again');
eval { $worker->quit };

sql(q{SELECT idempotency.nack(event('killed'), 1, '0')});
$worker = $node->background_psql('postgres');
is($worker->query("SELECT attempt FROM idempotency.take('t', lease => '500 ms')"), '2', 'a worker has it, committed');
$pid = $worker->query('SELECT pg_backend_pid()');
sql("SELECT pg_terminate_backend($pid)");
eval { $worker->quit };
ok($node->poll_query_until('postgres', "SELECT count(*) = 1 FROM idempotency.take('t')"), 'killed after its commit: again when the lease is over');
is(sql('SELECT attempt + 1 FROM idempotency.outbox'), '3', 'as a further attempt');
is(sql(q{SELECT idempotency.ack(event('killed'), 2), idempotency.nack(event('killed'), 2)}), 'f|f', 'the late answer is refused');
is(sql(q{SELECT idempotency.ack(event('killed'), 3)}), 't', 'the newest is not');

#
# A crash: what was committed stays, a lease also when the session does not
# wait for its commits.  The attempt must not come twice.
#
sql("SELECT idempotency.emit('t', '\"crash\"', 'k')");
my $before = sql('SELECT pg_current_wal_insert_lsn()');
is(sql('SET synchronous_commit = off', "SELECT attempt FROM idempotency.take('t', lease => '0')", "SELECT pg_current_wal_flush_lsn() > '$before'"), "1\nt", 'with synchronous_commit off, a take is on disk when it is committed');
$node->stop('immediate');
$node->start;
is(sql($take), '2:crash', 'after the crash, the next attempt');
is(sql(q{SELECT idempotency.ack(event('crash'), 1), idempotency.ack(event('crash'), 2)}), 'f|t', 'the one before is refused');

#
# Dump and restore: events, parked ones, leases, notes of keys (which are written
# while somebody might emit an earlier event), and the sequence behind them
#
my $open = $node->background_psql('postgres');
$open->query('BEGIN; SELECT pg_current_xact_id()');
sql(
	"SELECT idempotency.emit('d', '1', 'k'), idempotency.emit('d', '2', 'k'), idempotency.emit('d', '3')",
	"SELECT idempotency.set_topic('d', 5)", "SELECT idempotency.set_topic('parks', 1)", "SELECT idempotency.emit('parks', '4')",
	"SELECT idempotency.nack(id, attempt, NULL, 'broken') FROM idempotency.take('parks')", "SELECT count(*) FROM idempotency.take('d')");
$open->quit;
$node->command_ok([ 'pg_dump', '-f', "$PostgreSQL::Test::Utils::tmp_check/dump.sql", $node->connstr('postgres') ], 'dump');
sql('CREATE DATABASE restored');
$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', "$PostgreSQL::Test::Utils::tmp_check/dump.sql", $node->connstr('restored') ], 'restore');
my $all = "SELECT * FROM idempotency.%s ORDER BY 1, 2";
for my $table (qw(outbox outbox_leases outbox_keys outbox_topics))
{
	my $rows = sql(sprintf($all, $table));
	isnt($rows, '', "there is something in $table");
	is($node->safe_psql('restored', sprintf($all, $table)), $rows, 'and it is the same');
}
is($node->safe_psql('restored', "SELECT idempotency.emit('d', '5') > max(id) FROM idempotency.outbox"), 't', 'ids go on');
is($node->safe_psql('restored', "SELECT payload::text || ':' || error FROM idempotency.parked_events"), '4:broken', 'parked');
is($node->safe_psql('restored', "SELECT count(*) FROM idempotency.outbox WHERE idempotency.ack(id, attempt + 1); SELECT string_agg(payload::text, ',' ORDER BY id) FROM idempotency.take('d')"), "2\n2,5", 'and delivery goes on');

#
# Stress: a long queue behind one key; emitters, half of whose transactions roll back, and workers who
# acknowledge, give back, fall asleep over a lease of a millisecond, or roll
# back; at READ COMMITTED and at REPEATABLE READ.  A row in "delivered" is
# written in the transaction of a successful ack, so
#	a primary key error would be a double acknowledgement,
#	an event that is missing at the end would be lost,
#	and the events of a key stand in the order of their ids.
#
$node->append_conf('postgresql.conf', "idempotency.outbox_max_attempts = 1000\n");
$node->reload;
sql(
	'TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys, idempotency.outbox_topics',
	'CREATE TABLE emitted (id bigint PRIMARY KEY, key text)',
	'CREATE TABLE delivered (n bigserial, id bigint PRIMARY KEY, key text)',
	'CREATE TABLE entity (key text PRIMARY KEY)',
	"INSERT INTO entity SELECT 'key' || i FROM generate_series(0, 3) i",
	"INSERT INTO emitted SELECT idempotency.emit('s', '{}', 'key0'), 'key0' FROM generate_series(1, 600)");
my $dir = PostgreSQL::Test::Utils::tempdir;
append_to_file("$dir/emit.sql", q{
\set k random(0, 6)
\set undo random(0, 1)
BEGIN;
SELECT key FROM entity WHERE key = 'key' || :k FOR UPDATE;
INSERT INTO emitted SELECT idempotency.emit('s', '{}', e.key), e.key
	FROM (SELECT 1) one LEFT JOIN entity e ON e.key = 'key' || :k;
SAVEPOINT s;
SELECT idempotency.emit('s', '{"undone": true}', 'key1');
ROLLBACK TO s;
\if :undo
ROLLBACK;
\else
COMMIT;
\endif
});
append_to_file("$dir/work.sql", q{
\set what random(0, 9)
\set max random(1, 20)
\if :what <= 6
SELECT coalesce(array_agg(id), '{}') AS ids, coalesce(array_agg(attempt), '{}') AS attempts FROM idempotency.take('s', :max) \gset
BEGIN;
INSERT INTO delivered (id, key)
	SELECT e.id, e.key FROM emitted e, unnest(:ids::bigint[], :attempts::bigint[]) u (id, attempt)
	WHERE e.id = u.id AND idempotency.ack(u.id, u.attempt);
COMMIT;
\elif :what = 7
SELECT count(idempotency.nack(id, attempt, '0')) FROM idempotency.take('s', :max);
\elif :what = 8
SELECT coalesce(array_agg(id), '{}') AS ids, coalesce(array_agg(attempt), '{}') AS attempts FROM idempotency.take('s', :max, '1 ms') \gset
\sleep 3 ms
BEGIN;
INSERT INTO delivered (id, key)
	SELECT e.id, e.key FROM emitted e, unnest(:ids::bigint[], :attempts::bigint[]) u (id, attempt)
	WHERE e.id = u.id AND idempotency.ack(u.id, u.attempt);
COMMIT;
\else
BEGIN;
SELECT count(idempotency.ack(id, attempt)) FROM idempotency.take('s', :max);
ROLLBACK;
\endif
});

sub workers
{
	my ($transactions, @options) = @_;
	return [ 'pgbench', '-n', '-M', 'prepared', '-t', $transactions, @options, $node->connstr('postgres') ];
}

# an ack that lost a race at REPEATABLE READ in "delivered" would be retried
my @runs;
push @runs, IPC::Run::start(workers(400, '-c', 4, '-f', "$dir/emit.sql"), '>&', \my $emit_out);
push @runs, IPC::Run::start(workers(500, '-c', 4, '-f', "$dir/work.sql"), '>&', \my $work_out);
{
	local $ENV{PGOPTIONS} = '-c default_transaction_isolation=repeatable\ read';
	push @runs, IPC::Run::start(workers(500, '-c', 4, '-f', "$dir/work.sql"), '>&', \my $work_rr_out);
}
ok($_->finish, 'no error under stress') || diag(join "\n", grep { defined } $emit_out, $work_out) for @runs;

# what is left, in peace
sql(q{
DO $$
BEGIN
  FOR i IN 1 .. 10000 LOOP
    INSERT INTO delivered (id, key)
      SELECT id, key FROM idempotency.take('s', 1000) WHERE idempotency.ack(id, attempt);
    EXIT WHEN NOT FOUND AND NOT EXISTS (SELECT FROM idempotency.outbox_leases);
    COMMIT;
  END LOOP;
END
$$});

# leases of workers that ended before their ack
$node->poll_query_until('postgres', q{
WITH d AS (INSERT INTO delivered (id, key)
  SELECT id, key FROM idempotency.take('s', 1000) WHERE idempotency.ack(id, attempt) RETURNING 1)
SELECT NOT EXISTS (SELECT FROM idempotency.outbox)});
is(sql('SELECT count(*) > 1000 FROM emitted'), 't', 'there was something to do');
is(sql('SELECT count(*) FROM emitted FULL JOIN delivered USING (id) WHERE emitted.id IS NULL OR delivered.id IS NULL'), '0', 'every event once');
is(sql('SELECT count(*) FROM (SELECT id < lag(id) OVER (PARTITION BY key ORDER BY n) AS wrong FROM delivered WHERE key IS NOT NULL) o WHERE wrong'), '0', 'the events of a key in order');
is(sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), '0', 'no lock is left');

$node->stop;
done_testing();
