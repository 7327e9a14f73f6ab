# What the outbox promises to those who wait: bounded work, nobody starved, a
# clock that is set back, old snapshots, waking; and the calls for operators.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time sleep);

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', "max_prepared_transactions = 10\nshared_preload_libraries = 'idempotency'\nautovacuum = off\n");
$node->start;
$node->safe_psql('postgres', 'CREATE EXTENSION idempotency');

sub sql { return $node->safe_psql('postgres', join ';', @_); }

# WAL records and seconds that a statement takes in a session of its own
sub cost
{
	my ($sql) = @_;
	sql('CHECKPOINT');
	my $lsn = sql('SELECT pg_current_wal_insert_lsn()');
	my $start = time;
	my $out = sql($sql);
	my $seconds = time - $start;
	return ($out, sql("SELECT pg_current_wal_insert_lsn() - '$lsn'"), $seconds);
}

#
# Never starved, and bounded
#
sql("SELECT count(idempotency.emit('long', to_jsonb(i), 'hot')) FROM generate_series(1, 100000) i",
	"SELECT count(*) FROM idempotency.take('long', lease => '1 h')",
	"SELECT idempotency.emit('long', '\"other\"', 'cold')");
my ($out, $wal, $seconds) = cost("SET statement_timeout = '1 s'; SELECT payload FROM idempotency.take('long')");
is($out, '"other"', 'an event comes from behind a hundred thousand of another key, the head of which is out');
cmp_ok($wal, '<', 20000, 'and next to nothing was written for it');
is(sql("SELECT count(*) FROM idempotency.outbox WHERE place <> id"), '0', 'none of the others was touched');
is(sql("SELECT idempotency.ack(id, 1) FROM idempotency.outbox WHERE payload = '1'",
		"SELECT payload FROM idempotency.take('long')"), "t\n2", 'and their turn comes');

sql("SELECT count(idempotency.emit('wide', to_jsonb(i), i::text)) FROM generate_series(1, 20000) i",
	"SELECT count(idempotency.nack(id, attempt, '1 h')) FROM idempotency.take('wide', 20000)",
	"SELECT count(idempotency.emit('wide', to_jsonb(i), i::text)) FROM generate_series(1, 20000) i",
	"SELECT idempotency.emit('wide', '\"free\"')");
is(sql("SELECT payload FROM idempotency.take('wide')"), '"free"', 'nor do twenty thousand keys hold up the first poll whose heads are to be tried later');
is(sql("SELECT count(idempotency.emit('many', to_jsonb(i), i::text)) FROM generate_series(1, 6000) i",
		"SELECT count(*) FROM idempotency.take('many', max => 6000)"), "6000\n6000", 'take(max => 6000) gives 6000');

# those that wait for a time do not keep off the others, nor the other way round
sql("SELECT count(idempotency.emit('fair', '\"now\"')) FROM generate_series(1, 10)",
	"SELECT count(idempotency.emit('fair', '\"later\"', delay => '10 ms')) FROM generate_series(1, 10)",
	"SELECT pg_sleep(0.1)");
is(sql("SELECT count(*), count(DISTINCT payload) FROM idempotency.take('fair', 10)"), '10|2', 'both kinds are in one batch');
is(sql("SELECT string_agg(payload #>> '{}', ',') FROM (SELECT payload FROM idempotency.take('fair', 1) UNION ALL SELECT payload FROM idempotency.take('fair', 1)) t") =~ /now,later|later,now/ ? 'both' : 'one',
	'both', 'and in two batches of one');

#
# What a call found out survives: for other sessions, and a time-out
#
sub block
{
	my ($topic, $n) = @_;
	sql("SELECT cardinality(idempotency.emit_batch('$topic', array_agg(to_jsonb(i)), array_agg('k'::text))) FROM generate_series(1, $n) i",
		"SELECT count(*) FROM idempotency.take('$topic', lease => '1 h')", "SELECT idempotency.emit('$topic', '\"free\"')");
}
sub read_blocks
{
	my $plan = sql("EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, SUMMARY OFF) SELECT * FROM idempotency.take('$_[0]')");
	return $plan =~ /rows=(\d+).*?Buffers: shared hit=(\d+)/s ? ($1, $2) : die $plan;
}
block('far', 300000);
is(sql("SELECT payload FROM idempotency.take('far')"), '"free"', 'a new session finds what is behind 300,000 that cannot go');
sql("SELECT idempotency.emit('far', '\"free\"')");
my ($rows, $blocks) = read_blocks('far');
ok($rows == 1 && $blocks < 5000, "and the next new session need not look at them ($rows row, $blocks blocks)");
is(sql("SELECT idempotency.ack(id, 1) FROM idempotency.outbox WHERE payload = '1' AND topic = 'far'", "SELECT payload FROM idempotency.take('far')"), "t\n2", 'their turn comes all the same');
sql('TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys');
block('far', 300000);
my $calls = 0;
while ($calls++ < 1000)
{
	$node->psql('postgres', "SET statement_timeout = '100 ms'; SELECT payload FROM idempotency.take('far')", stdout => \$out);
	last if $out eq '"free"';
}
is($out, '"free"', "new sessions whose calls time out come to it together ($calls calls)");

# nor is what becomes of the events of workers that have died lost by time-outs
sql("SELECT idempotency.set_topic('dead', 1)", "SELECT count(idempotency.emit('dead', to_jsonb(i))) FROM generate_series(1, 20000) i",
	"SELECT count(*) FROM idempotency.take('dead', 20000, lease => '0')");
$calls = 0;
$out = 1;
while ($out && $calls++ < 1000)
{
	$node->psql('postgres', "SET statement_timeout = '200 ms'; SELECT FROM idempotency.take('dead'); RESET statement_timeout; SELECT count(*) FROM idempotency.outbox WHERE topic = 'dead' AND state <> 'p'",
		stdout => \$out, on_error_stop => 0);
}
is($out, '0', "many leases that are over are taken apart by calls that would time out ($calls calls)");
sql("SELECT idempotency.set_topic('dead')");

# nothing that may be taken back, or come late, is below what is shared
sql('TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys');
my ($one, $two) = map { $node->background_psql('postgres') } 1 .. 2;
sql("SELECT count(idempotency.emit('shared', to_jsonb(i), 'k')) FROM generate_series(1, 2000) i");
is($one->query("BEGIN; SELECT payload FROM idempotency.take('shared')"), '1', 'taken, in front of many of its key');
$one->query("SELECT count(*) FROM idempotency.take('shared'); ROLLBACK");
is(sql("SELECT payload FROM idempotency.take('shared')"), '1', 'rolled back, it comes to a new session');
$one->query("BEGIN; SELECT payload FROM idempotency.take('shared2'); SELECT idempotency.emit('shared2', '\"late\"')");
sql("SELECT count(idempotency.emit('shared2', to_jsonb(i), 'k')) FROM generate_series(1, 2000) i");
is(sql("SELECT payload FROM idempotency.take('shared2', lease => '1 h')", "SELECT payload FROM idempotency.take('shared2')"), '1', 'passed over by a new session');
$one->query('COMMIT');
is(sql("SELECT payload FROM idempotency.take('shared2')"), '"late"', 'an event that is committed then comes to the next');
$one->query("BEGIN; SELECT idempotency.emit('own', '1', 'k', delay => '1 h')");
sql("SELECT idempotency.emit('own', '2', 'k')");
is($one->query("SELECT count(*) FROM idempotency.take('own'); ROLLBACK; SELECT payload FROM idempotency.take('own')"), "0\n2", 'what waited for an event of ours goes when that is rolled back');
sql("SELECT idempotency.emit('own2', '1', 'k')", "SELECT payload FROM idempotency.take('own2', lease => '1 h')");
$one->query("BEGIN; SELECT idempotency.emit('own2', '2', 'k'); SELECT count(*) FROM idempotency.take('own2')");
sql("SELECT idempotency.ack(id, 1) FROM idempotency.outbox WHERE topic = 'own2'");
is($one->query("COMMIT; SELECT payload FROM idempotency.take('own2')"), '2', 'and one of ours that was passed by before we committed it');

#
# A key is noted only where something could come before what is out
#
sql("SELECT idempotency.set_topic('note', 1)", "SELECT idempotency.emit('note', '1', 'k')",
	"SELECT idempotency.nack(id, attempt) FROM idempotency.take('note')",
	"SELECT idempotency.emit('note', '2', 'k')");
my $parked = sql("SELECT id FROM idempotency.parked_events WHERE topic = 'note'");
is(sql("SELECT payload FROM idempotency.take('note', lease => '1 h')", "SELECT count(*) FROM idempotency.outbox_keys WHERE topic = 'note'"), "2\n0", 'out, without a note');
is(sql("SELECT idempotency.retry_event($parked)", "SELECT count(*) FROM idempotency.take('note')"), "t\n0", 'an earlier one that comes back waits for it');
is(sql("SELECT idempotency.ack(id, 1) FROM idempotency.outbox WHERE topic = 'note' AND payload = '2'", "SELECT payload FROM idempotency.take('note', lease => '1 h')"), "t\n1", 'and goes then');
is(sql("SELECT idempotency.nack($parked, 2)", "SELECT idempotency.emit('note', '3', 'k')"), sql("SELECT 't'") . "\n" . sql('SELECT last_value FROM idempotency.outbox_id_seq'), 'parked again');
is($one->query("BEGIN; SELECT payload FROM idempotency.take('note')"), '3', 'out, and not committed');
is(sql("SELECT idempotency.retry_event($parked)", "SELECT count(*) FROM idempotency.take('note')"), "t\n0", 'the earlier one waits for that');
$one->query('ROLLBACK');
is(sql("SELECT payload FROM idempotency.take('note')"), '1', 'and goes first when it is rolled back');
sql("SELECT idempotency.nack($parked, 3)");
is($one->query("BEGIN; SELECT idempotency.retry_event($parked)"), 't', 'comes back, and is not committed');
is(sql("SELECT count(*) FROM idempotency.take('note')"), '0', 'nobody takes the next one meanwhile');
$one->query('COMMIT');
is(sql("SELECT payload FROM idempotency.take('note')", "SELECT idempotency.ack($parked, 4)", "SELECT payload FROM idempotency.take('note')"), "1\nt\n3", 'in their order');
$one->query("SELECT count(*) FROM idempotency.take('open')");
$two->query("BEGIN; SELECT idempotency.emit('open', '1', 'k')");
sql("SELECT idempotency.emit('open', '2', 'k')");
is($one->query("SELECT payload FROM idempotency.take('open')"), '2', 'an earlier one is not committed');
$two->query('COMMIT');
is($one->query("SELECT count(*) FROM idempotency.take('open'); SELECT idempotency.ack(id, 1) FROM idempotency.outbox WHERE topic = 'open' AND payload = '2'; SELECT payload FROM idempotency.take('open')"), "0\nt\n1", 'so the one that is out was noted');
sql("SELECT idempotency.set_topic('note')");
$_->quit for $one, $two;

#
# Old snapshots: a poll costs the same after any number of deliveries
#
my $old = $node->background_psql('postgres');
$old->query('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
my $worker = $node->background_psql('postgres');
$worker->query(q{CREATE PROCEDURE work(n integer, topic text) LANGUAGE plpgsql AS $$
DECLARE got bigint;
BEGIN
  FOR i IN 1 .. n LOOP
    SELECT count(*) FILTER (WHERE idempotency.ack(t.id, t.attempt)) INTO got FROM idempotency.take(work.topic, 1000) t;
    COMMIT;
  END LOOP;
END $$});
sub buffers
{
	my ($sql) = @_;
	my $plan = $worker->query("EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, SUMMARY OFF) $sql");
	return $plan =~ /Buffers: shared hit=(\d+)/ ? $1 : die $plan;
}
my $poll = "SELECT * FROM idempotency.take('old')";
sql("SELECT count(idempotency.emit('old', to_jsonb(i))) FROM generate_series(1, 50000) i");
$worker->query("CALL work(51, 'old')");
$worker->query($poll);
# once in a while everything is read again
my ($least) = sort { $a <=> $b } map { buffers($poll) } 1 .. 5;
cmp_ok($least, '<', 100, 'a poll after 50,000 deliveries reads a few blocks');
sql("SELECT idempotency.emit('old', '1')");
is($worker->query("SELECT payload FROM idempotency.take('old')"), '1', 'and finds what is new');

sql("SELECT count(idempotency.emit('hot', to_jsonb(i), 'hot')) FROM generate_series(1, 3000) i");
my @took;
for (1 .. 3)
{
	my $start = time;
	$worker->query("CALL work(1000, 'hot')");
	push @took, time - $start;
}
cmp_ok($took[2], '<', 2.5 * $took[0] + 0.1, "a hot key's third thousand costs what the first did (@took s)");
is(sql("SELECT count(*) FROM idempotency.outbox WHERE topic = 'hot'"), '0', 'all of them came');

# who commits late is found below the floor, also in a subtransaction
my $late = $node->background_psql('postgres');
$late->query("BEGIN; SAVEPOINT s; SELECT idempotency.emit('old', '\"late\"'); RELEASE s");
sql("SELECT count(idempotency.emit('old', to_jsonb(i))) FROM generate_series(1, 100) i");
$worker->query("CALL work(2, 'old')") for 1 .. 3;
is($worker->query("SELECT count(*) FROM idempotency.take('old')"), '0', 'nothing more');
$late->query('COMMIT');
is($worker->query("SELECT payload FROM idempotency.take('old')"), '"late"', 'a late committer is found at once');
$worker->query("BEGIN; SELECT idempotency.emit('old', '\"mine\"'); SELECT count(*) FROM idempotency.take('old'); ROLLBACK");
sql("SELECT idempotency.emit('old', '\"back\"')");
$worker->query("BEGIN; SELECT idempotency.ack(id, attempt) FROM idempotency.take('old'); SELECT count(*) FROM idempotency.take('old'); ROLLBACK");
is($worker->query("SELECT payload FROM idempotency.take('old')"), '"back"', 'and what a rollback of its own brings back');
$worker->query("BEGIN; SELECT idempotency.ack(id, 1) FROM idempotency.outbox WHERE payload = '\"back\"'; PREPARE TRANSACTION 'p'");
$worker->query("SELECT count(*) FROM idempotency.take('old')");
$worker->query("ROLLBACK PREPARED 'p'");
is($worker->query("SELECT idempotency.nack(id, 1, '0') FROM idempotency.outbox WHERE payload = '\"back\"'; SELECT payload FROM idempotency.take('old')"), "t\n\"back\"", 'or a prepared transaction');
$old->query('COMMIT');
$_->quit for $old, $late;

#
# The clock is set back by two hours: what was committed before is due
#
sql('TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys',
	"SELECT count(idempotency.emit('clock', to_jsonb(i), 'k')) FROM generate_series(1, 2) i", "SELECT idempotency.emit('clock', '3')",
	"UPDATE idempotency.outbox SET emitted_at = emitted_at + interval '2 hours'",
	"SELECT idempotency.emit('clock', '4', 'k')");
is(sql("SELECT payload FROM idempotency.take('clock')"), "1\n3", 'what was emitted before the clock was set back is due');
is(sql("SELECT idempotency.ack(id, 1) FROM idempotency.outbox WHERE payload = '1'", "SELECT payload FROM idempotency.take('clock')"), "t\n2", 'a later one of its key does not wait for the clock');
SKIP:
{
	my ($lib) = grep { -e } map { glob "$_/faketime/libfaketime.so.1" } '/usr/lib/*', '/usr/lib', '/usr/local/lib';
	skip 'libfaketime is not installed', 3 unless $lib;
	my $offset = PostgreSQL::Test::Utils::tempdir . '/clock';
	append_to_file($offset, "+0\n");
	$node->stop;
	{
		local %ENV = (%ENV, LD_PRELOAD => $lib, FAKETIME_TIMESTAMP_FILE => $offset, FAKETIME_CACHE_DURATION => 1, FAKETIME_DONT_FAKE_MONOTONIC => 1);
		$node->start;
	}
	my $session = $node->background_psql('postgres');
	$session->query("SELECT count(*) FROM idempotency.take('set_back')");
	sql("SELECT idempotency.emit('set_back', '1', 'k')");
	my $waiting = $node->background_psql('postgres');
	$waiting->query_until(qr/waits/, "\\echo waits\nCALL idempotency.wait_for_events('nobody', '10 s');\n");
	my $waits = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CALL%' AND state = 'active'";
	$node->poll_query_until('postgres', $waits, '1');
	unlink $offset;
	append_to_file($offset, "-2h\n");
	sleep 2.5;
	sql("SELECT idempotency.emit('set_back', '2', 'k')", "SELECT idempotency.emit('set_back', '3')");
	is($session->query("SELECT payload FROM idempotency.take('set_back')"), "1\n3", 'the same to a session that has seen the clock before');
	is($session->query("SELECT idempotency.ack(id, 1) FROM idempotency.outbox WHERE payload = '1' AND topic = 'set_back'; SELECT payload FROM idempotency.take('set_back')"), "t\n2", 'and for the next one of the key');
	ok($node->poll_query_until('postgres', $waits, '0'), 'and who waits does not wait for two hours longer');
	$_->quit for $session, $waiting;
	$node->stop;
	$node->start;
}

#
# Waiting: a commit, a delay, a nack, a lease, and the timeout
#
sql('TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys');
my $waiter = $node->background_psql('postgres');
my $topics = 0;
sub waited
{
	my ($timeout, $after, $meanwhile, $topic) = @_;
	$topic //= 'w';
	my $start = time;
	my $other;
	$other = IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('postgres'), map({ ('-c', $_) } "SELECT pg_sleep($after)", split /; /, $meanwhile) ], '>', \my $ignored) if $meanwhile;
	$waiter->query("CALL idempotency.wait_for_events('$topic', '$timeout')");
	$start = time - $start;
	$other->finish if $other;
	return $start;
}

# Does the waiter wake before it looks by itself, which it does after a second?  On
# a busy machine it may not be able to, so it may try again, with a new topic.
sub woken
{
	my ($prepare, $meanwhile) = @_;
	for my $try (1 .. 20)
	{
		my $topic = 'w' . $topics++;
		sql(map { s/TOPIC/$topic/gr } @$prepare) if @$prepare;
		return 1 if waited('20 s', 0.3, $meanwhile =~ s/TOPIC/$topic/gr, $topic) < 0.95;
	}
	return 0;
}
$seconds = waited('700 ms');
ok($seconds > 0.65 && $seconds < 5, "the timeout ($seconds s)");
ok(woken([], "SELECT idempotency.emit('TOPIC', '1', 'k')"), 'woken by a commit, before it looks by itself');
ok(woken([ "SELECT count(idempotency.emit('TOPIC', '1', 'k')) FROM generate_series(1, 2)", "SELECT count(*) FROM idempotency.take('TOPIC', lease => '1 h')" ],
		"SELECT idempotency.ack(min(id), 1) FROM idempotency.outbox WHERE topic = 'TOPIC'"), 'and when an ack lets the next one of its key go');
sql("SELECT idempotency.emit('w', '1', 'k')");
is($waiter->query("SELECT attempt FROM idempotency.take('w', lease => '1 h')"), '1', 'there it is');
$seconds = waited('20 s', 0.3, "SELECT idempotency.nack(id, 1, '200 ms') FROM idempotency.outbox WHERE topic = 'w'");
ok($seconds > 0.45 && $seconds < 3, "when a nack's time has come ($seconds s)");
is($waiter->query("SELECT attempt FROM idempotency.take('w', lease => '700 ms')"), '2', 'there it is again');
$seconds = waited('20 s');
ok($seconds > 0.3 && $seconds < 3, "when a lease is over ($seconds s)");
is($waiter->query("SELECT attempt FROM idempotency.take('w', lease => '1 h')"), '3', 'and again');
$seconds = waited('20 s', 0, "SELECT idempotency.emit('w', '3', delay => '600 ms')");
ok($seconds > 0.5 && $seconds < 3, "when a delay is over ($seconds s)");
$waiter->query("SELECT count(*) FROM idempotency.take('w', lease => '1 h')");
$seconds = waited('20 s', 0.2, "BEGIN; SELECT idempotency.emit('w', '4'); PREPARE TRANSACTION 'w'; COMMIT PREPARED 'w'");
cmp_ok($seconds, '<', 5, "a COMMIT PREPARED wakes nobody, and is found all the same ($seconds s)");
$waiter->query("SELECT count(*) FROM idempotency.take('w', lease => '1 h')");

# it keeps nothing open meanwhile
my $asleep = IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('postgres'), '-c', "CALL idempotency.wait_for_events('w', '20 s')" ], '2>', \my $stderr);
$node->poll_query_until('postgres', "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE query LIKE 'CALL%'");
is(sql("SELECT backend_xmin IS NULL AND backend_xid IS NULL FROM pg_stat_activity WHERE query LIKE 'CALL%'",
		"SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE a.query LIKE 'CALL%' AND locktype = 'relation'"),
	"t\n0", 'no snapshot, no transaction id, no lock on a table');
sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'CALL%' AND pid <> pg_backend_pid()");
$asleep->finish;
ok(woken([], "SELECT idempotency.emit('TOPIC', '5')"), 'a waiter that was terminated leaves its slot');
my ($code) = $node->psql('postgres', "BEGIN; CALL idempotency.wait_for_events('w', '1 s')", stderr => \$stderr);
like($stderr, qr/cannot run inside a transaction block/, 'not inside of a transaction');
$waiter->quit;

#
# Calls for workers and operators
#
sql('TRUNCATE idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys');
is(sql("SELECT cardinality(idempotency.emit_batch('b', ARRAY['1', '2', NULL]::jsonb[], ARRAY['x', NULL, 'x']))",
		"SELECT cardinality(idempotency.emit_batch('b', '{}'))",
		"SELECT key, payload FROM idempotency.take('b')"), "3\n0\nx|1\n|2", 'emit of many in one call');
is(sql("SELECT idempotency.extend_event(id, 1, '1 h') - clock_timestamp() > '59 min', idempotency.extend_event(id, 2, '1 h') IS NULL, idempotency.extend_event(-1, 1, '1 h') IS NULL FROM idempotency.outbox WHERE payload = '1'"),
	't|t|t', 'more time for an event in hand, and only for the newest attempt');
sql("UPDATE idempotency.outbox_leases SET deadline = now() - interval '1 s' WHERE deadline < now() + interval '30 min'");
is(sql("SELECT payload, attempt FROM idempotency.take('b')"), '2|2', 'the others of the batch come again, that one does not');
is(sql("SELECT idempotency.ack(id, 1) FROM idempotency.outbox WHERE payload = '1'", 'SELECT count(*) FROM idempotency.outbox_keys'), "t\n0", 'it is acknowledged by its attempt');
is(sql("SELECT payload, attempt FROM idempotency.take('b')"), '|1', 'the next one of its key');

# a nack's delay by default: 1 s, 2 s, 4 s
my @rounds = (
	"SELECT idempotency.nack(id, attempt) FROM idempotency.take('backoff')",
	"SELECT round(extract(epoch FROM due - clock_timestamp())) FROM idempotency.outbox WHERE topic = 'backoff'",
	"UPDATE idempotency.outbox SET due = now() WHERE topic = 'backoff'") x 3;
is(sql("SELECT idempotency.emit('backoff', '1') > 0", @rounds), "t\nt\n1\nt\n2\nt\n4", 'the backoff doubles');

is(sql("SELECT idempotency.set_topic('strict', 1, true), idempotency.set_topic('strict', 1, true)",
		"SELECT cardinality(idempotency.emit_batch('strict', ARRAY['1', '2', '3']::jsonb[], ARRAY['k', 'k', 'k']))",
		"SELECT idempotency.nack(id, attempt) FROM idempotency.take('strict')",
		"SELECT count(*) FROM idempotency.take('strict')",
		"SELECT payload FROM idempotency.parked_events WHERE topic = 'strict'"),
	"f|t\n3\nt\n0\n1", 'attempts of a topic, and a parked event that its key waits for');
is(sql("SELECT idempotency.retry_event(id), idempotency.retry_event(id) FROM idempotency.parked_events WHERE topic = 'strict'",
		"SELECT payload, attempt, idempotency.nack(id, attempt) FROM idempotency.take('strict')",
		"SELECT idempotency.discard_event(id), idempotency.discard_event(id) FROM idempotency.parked_events WHERE topic = 'strict'",
		"SELECT payload, attempt FROM idempotency.take('strict')"),
	"t|f\n1|2|t\nt|f\n2|1", 'one parked event retried, then discarded, and the key goes on');
is(sql("SELECT idempotency.set_topic('strict')", 'SELECT count(*) FROM idempotency.outbox_topics'), "t\n0", 'taken back');
sql("SELECT idempotency.emit('strict', '4', delay => '1 h')");
is(sql("SELECT ready, delayed, leased, parked, oldest < now(), estimate FROM idempotency.topics WHERE topic = 'strict'"), '1|1|1|0|t|f', 'a topic at a glance');

# nothing is late before it is due
is(sql("SELECT idempotency.emit('later', '1', delay => '2 h') > 0",
		"UPDATE idempotency.outbox SET emitted_at = emitted_at - interval '1 h' WHERE topic = 'later'",
		"SELECT ready, delayed, oldest FROM idempotency.topics WHERE topic = 'later'",
		"UPDATE idempotency.outbox SET due = now() - interval '1 min' WHERE topic = 'later'",
		"SELECT ready, delayed, now() - oldest BETWEEN '1 min' AND '30 min' FROM idempotency.topics WHERE topic = 'later'"),
	"t\n0|1|\n1|0|t", 'an event waits since it is due');

# a delayed event keeps its place before the later ones of its key
is(sql("SELECT idempotency.emit('delay', '1', 'k', '300 ms') < idempotency.emit('delay', '2', 'k')", "SELECT count(*) FROM idempotency.take('delay')",
		'SELECT pg_sleep(0.4)', "SELECT payload FROM idempotency.take('delay')"), "t\n0\n\n1", 'the order of a key stands over a delay');

$node->stop;
done_testing();
