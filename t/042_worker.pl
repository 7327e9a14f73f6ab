# The launcher and its workers: they purge what they are told to, a few hundred
# rows to a transaction and beside clients that claim, follow the configuration,
# sleep while there is nothing to do, can be seen, are never in the way of DROP
# DATABASE or of a copy, outlive a dropped extension, an unknown database, a
# locked one, a crash and being terminated, run no code of the role that owns the
# extension, begin on a standby when it is promoted, end at once, and leave a
# server alone that pg_upgrade has started.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $node = PostgreSQL::Test::Cluster->new('primary');
$node->init(allows_streaming => 1);
$node->append_conf(
	'postgresql.conf', q{
shared_preload_libraries = 'idempotency'
idempotency.purge_interval = '1 s'
idempotency.log_purge = on
autovacuum = off	# the test counts transaction ids
default_transaction_isolation = 'serializable'
default_transaction_read_only = on
});
# work goes on beside a key that is held: here too where hashes are short (test/collisions)
$node->append_conf('postgresql.conf', 'idempotency.debug_hash_bits = 64') if $ENV{COLLISIONS};
$node->start;

# read-only and SERIALIZABLE by default, as some databases are
sub sql
{
	my ($database, $sql) = @_;
	return $node->safe_psql($database,
		"SET default_transaction_read_only = off; $sql");
}

sub configure
{
	my ($name, $value) = @_;
	$node->safe_psql('postgres', "ALTER SYSTEM SET $name = $value");
	$node->reload;
}

my $launcher =
  "SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'idempotency purge launcher' AND datname IS NULL";
ok($node->poll_query_until('postgres', $launcher),
	'the launcher is there, in no database');

# what it has used of the processor, in clock ticks, where that can be told
sub ticks
{
	my $pid = sql('postgres', "SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency purge launcher'");
	return -r "/proc/$pid/stat" ? eval { my @stat = split / /, slurp_file("/proc/$pid/stat") =~ s/.*\) //sr; $stat[11] + $stat[12] } : 0;
}

my $fill =
  "SELECT count(idempotency.once('w', i::text, '1 us')) FROM generate_series(1, 3000) i";
my $empty = 'SELECT count(*) = 0 FROM idempotency.keys';
my $odd = 'T w,"o';
for my $database ('one', $odd, 'Three')
{
	sql('postgres', sprintf('CREATE DATABASE "%s"', $database =~ s/"/""/gr));
	sql($database, 'CREATE EXTENSION idempotency');
	sql($database, $fill);
}

# nothing is purged as long as nothing is named; then what is, and no more
ok( $node->poll_query_until('postgres',
		"SELECT wait_event_type = 'Extension' AND wait_event = CASE WHEN current_setting('server_version_num')::int >= 170000 THEN 'IdempotencyPurgeInterval' ELSE 'Extension' END FROM pg_stat_activity WHERE backend_type = 'idempotency purge launcher'"),
	'the launcher waits');
cmp_ok(ticks(), '<', 20, 'and sleeps meanwhile');
my $xids = "SELECT pg_snapshot_xmax(pg_current_snapshot())";
my $before = sql('postgres', $xids);
configure('idempotency.purge_databases', q{'one, "T w,""o", nosuch, ""'});
ok($node->poll_query_until('one', $empty), 'purged');
ok($node->poll_query_until($odd, $empty), 'purged, by a quoted name');
my $round = 'SELECT outcome FROM idempotency.purge_rounds';
ok($node->poll_query_until($odd, "$round WHERE ended >= started AND error IS NULL", 'finished'), 'the view tells how the round ended');
like(slurp_file($node->logfile), qr/LOG: +purge of database "one" finished: 3000 rows removed in \d+ ms/, 'and the log, when asked');
is(sql('one', q{SELECT calls FROM idempotency.activity WHERE function = 'purge' AND outcome = 'keys'}), 3000, 'the rows are counted');
cmp_ok(sql('postgres', $xids) - $before, '>=', 2 * 3000 / 500,
	'500 rows to a transaction at the most');
is(sql('Three', 'SELECT count(*) FROM idempotency.keys'),
	3000, 'not named, not purged');
configure('idempotency.purge_databases', q{'one, "T w,""o", Three , nosuch'});
ok($node->poll_query_until('Three', $empty), 'a new name counts at once');
my ($ret, $out, $err) = $node->psql('postgres',
	q{ALTER SYSTEM SET idempotency.purge_databases = 'a b'});
like($err, qr/invalid value for parameter/, 'what is no list is refused');

# one row at a time under a lock: what somebody is at work on stays
# (unless a worker is there before the claim: then once more)
my $holder = $node->background_psql('one');
$holder->query_safe('SET default_transaction_read_only = off');
for (;;)
{
	sql('one', "SELECT idempotency.once('w', 'k', '1 us')");
	$holder->query_safe("BEGIN; SELECT status FROM idempotency.claim('w', 'k')");
	last if sql('one', 'SELECT count(*) FROM idempotency.keys') == 1;
	$holder->query_safe('ROLLBACK');
}
sql('one', $fill);
ok( $node->poll_query_until('one',
		'SELECT count(*) = 1 FROM idempotency.keys'),
	'all but the row that a claim is about to overwrite');
$holder->query_safe("SELECT idempotency.complete('w', 'k', 'done'); COMMIT");
$holder->quit;
is(sql('one', "SELECT response FROM idempotency.lookup('w', 'k')"),
	'done', 'which it then does');

# beside eight clients, and another that purges as well: a key that is live runs
# once, one that has expired runs again
sql('one', q{
	CREATE TABLE effect (key integer);
	SELECT idempotency.once('short', i::text, '1 us') FROM generate_series(1, 50) i;
});
my $script = $node->basedir . '/claims.sql';
append_to_file($script, q{
\set live random(1, 500)
\set short random(1, 50)
INSERT INTO effect SELECT :live WHERE idempotency.once('live', (:live)::text);
SELECT idempotency.once('short', (:short)::text, '1 us');
});
my $purge = $node->basedir . '/purge.sql';
append_to_file($purge, 'SELECT idempotency.purge(20);');
{
	local $ENV{PGOPTIONS} =
	  '-c default_transaction_read_only=off -c default_transaction_isolation=read\ committed';
	$node->command_checks_all(
		[ 'pgbench', '-n', '-c', 9, '-t', 300, '-f', "$script\@8", '-f', $purge, 'one' ],
		0, [qr/processed: 2700\/2700/], [qr/^(?!.*ERROR)/s],
		'claims and purging at once');
}
is( sql('one', q{
	SELECT count(*) = count(DISTINCT e.key) AND count(*) = count(k.key)
	FROM effect e LEFT JOIN idempotency.keys k ON k.key = e.key::text AND k.scope = 'live'}),
	't', 'each live key ran once, and is there');
sql('one', q{
	BEGIN ISOLATION LEVEL READ COMMITTED;
	DELETE FROM idempotency.keys WHERE scope = 'live';
	DROP TABLE effect;
	COMMIT;
});

# seen while it is held up by a lock on the table; the other databases have
# their turn meanwhile; terminated, another comes
my $blocker = $node->background_psql('one');
$blocker->query_safe('SET default_transaction_read_only = off');
$blocker->query_safe('BEGIN; LOCK TABLE idempotency.keys IN ACCESS EXCLUSIVE MODE');
my $worker = "FROM pg_stat_activity WHERE backend_type = 'idempotency purge worker' AND datname = 'one' AND query = 'purging expired keys' AND wait_event_type = 'Lock'";
ok($node->poll_query_until('postgres', "SELECT count(*) = 1 $worker"), 'a worker is seen, with its name, database and what it does');
my $first = sql('postgres', "SELECT pid $worker");
is(sql('postgres', "SELECT pg_terminate_backend($first)"), 't', 'it is terminated');
ok($node->poll_query_until('postgres', "SELECT count(*) = 1 $worker AND pid <> $first"), 'the next round has another');
sql('Three', $fill);
ok($node->poll_query_until('Three', $empty), 'the databases after the locked one are purged');
like(slurp_file($node->logfile), qr/ERROR: .*lock timeout\n.*CONTEXT: (?:.*\n\t)*.*"one"/, 'and the log tells which one it was');
ok($node->poll_query_until('one', "$round WHERE error ~ 'lock timeout' AND rows = 0", 'failed'), 'so does the view');

# the launcher is terminated: its worker goes with it, and another launcher comes;
# on a slow server, the worker's lock timeout may be first, and is tried again
my ($launched, $second, $outcome, $back);
my $begun = "$worker AND clock_timestamp() - xact_start < interval '2 s'";
for (my $try = 0; $try < 20 && ($outcome // '') ne 'terminated'; $try++)
{
	$node->poll_query_until('postgres', "SELECT count(*) = 1 $begun") or last;
	$second = sql('postgres', "SELECT pid $worker");
	$launched = sql('postgres', "SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency purge launcher'");
	sql('postgres', "SELECT pg_terminate_backend($launched)");
	$node->poll_query_until('one', "SELECT count(*) = 1 FROM ($round WHERE ended >= started) r") or last;
	$outcome = sql('one', $round);
	$back = $node->poll_query_until('postgres',
		"SELECT count(*) FILTER (WHERE pid IN ($launched, 0$second)) = 0 AND count(*) FILTER (WHERE backend_type = 'idempotency purge launcher') = 1 FROM pg_stat_activity") or last;
}
is($outcome, 'terminated', 'a launcher that is terminated takes its worker along');
ok($back, 'and comes back');
like(slurp_file($node->logfile), qr/\[$second\] FATAL: +terminating background worker/, 'as the log tells');
$blocker->query_safe('COMMIT');
$blocker->quit;

# in nobody's way, while workers come and go
for my $i (1 .. 2)
{
	sql('one', $fill);
	sql('postgres', 'CREATE DATABASE copy TEMPLATE one');
	sql('postgres', 'DROP DATABASE copy');
}
pass('databases are copied and dropped meanwhile');

# a worker that has much to do leaves in the middle of it
my $some = 0;
for (my $try = 0; $try < 20 && !$some; $try++)
{
	sql('one', q{
		INSERT INTO idempotency.keys (created_at, expires_at, status, scope, key)
		SELECT now(), '-infinity', 'c', 'many', i::text FROM generate_series(1, 200000) i ON CONFLICT DO NOTHING});
	$node->poll_query_until('postgres',
		"SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'idempotency purge worker' AND datname = 'one'");
	sql('postgres', 'CREATE DATABASE copy TEMPLATE one');
	$some = sql('copy', "SELECT count(*) BETWEEN 1 AND 199999 FROM idempotency.keys WHERE scope = 'many'") eq 't';
	sql('postgres', 'DROP DATABASE copy');
}
ok($some, 'a copy was made before all was purged');
ok($node->poll_query_until('one', $empty =~ s/= 0/= 1/r), 'and the rest goes afterwards');
sql('Three', $fill);
sql('postgres', 'DROP DATABASE "Three"');
pass('a database that is being purged can be dropped');
sql($odd, 'DROP EXTENSION idempotency');
sql('one', $fill);
ok($node->poll_query_until('one', $empty =~ s/= 0/= 1/r),
	'the others go on without the database and the extension');

cmp_ok(ticks(), '<', 100, 'the launcher sleeps between its rounds');

# The extension was given to a plain role, who puts code of his own on our table.
# A worker is a superuser: it does not run it.
sql('postgres', 'CREATE ROLE installer SUPERUSER');
sql('postgres', 'CREATE ROLE plain');
sql('postgres', 'CREATE DATABASE given');
sql('given', q{
	SET ROLE installer;
	CREATE EXTENSION idempotency;
	RESET ROLE;
	REASSIGN OWNED BY installer TO plain;
	DROP ROLE installer;
	CREATE SCHEMA plain AUTHORIZATION plain;
	INSERT INTO idempotency.keys (created_at, expires_at, status, key, scope) VALUES (now(), now() - interval '1 day', 'c', 'k', 'given');
	SET ROLE plain;
	CREATE FUNCTION plain.act() RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
		ALTER ROLE plain SUPERUSER;
		RETURN 'superuser';
	EXCEPTION WHEN insufficient_privilege THEN
		RETURN 'plain';
	END $$;
	CREATE FUNCTION plain.code(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS 'BEGIN RETURN plain.act(); END';
	CREATE INDEX plain ON idempotency.keys (plain.code(scope));
});
configure('idempotency.purge_databases', q{'one, given'});
my $refusal = qr/ERROR: .*idempotency.keys" has been altered/;
my $super = q{SELECT rolsuper FROM pg_roles WHERE rolname = 'plain'};
for (my $i = 0; $i < 1800; $i++)
{
	last if slurp_file($node->logfile) =~ $refusal || sql('given', $super) eq 't';
	usleep(100_000);
}
like(slurp_file($node->logfile), $refusal, 'a worker refuses the table');
is(sql('given', $super), 'f', 'and did not make its owner superuser');
sql('given', 'DROP INDEX idempotency.plain');
ok($node->poll_query_until('given', 'SELECT count(*) = 0 FROM idempotency.keys'),
	'without that index, it purges as the owner');
configure('idempotency.purge_databases', q{'one'});
sql('postgres', 'DROP DATABASE given');
sql('postgres', 'DROP ROLE plain');

# a crash
my $pid = $node->safe_psql('postgres',
	"SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency purge launcher'"
);
is($node->safe_psql('postgres', 'SHOW restart_after_crash'), 'off', 'as the test suite sets it');
configure('restart_after_crash', 'on');
kill 'KILL', $pid;
ok( $node->poll_query_until('postgres',
		"SELECT pid <> $pid FROM pg_stat_activity WHERE backend_type = 'idempotency purge launcher'"
	),
	'the launcher comes back after a crash');
sql('one', $fill);
ok($node->poll_query_until('one', $empty =~ s/= 0/= 1/r), 'and purges');

# a standby
$node->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
# no session of a hot standby can be SERIALIZABLE
$standby->append_conf('postgresql.conf',
	"default_transaction_isolation = 'repeatable read'\nidempotency.purge_interval = '1 h'");
$standby->start;
is($standby->safe_psql('postgres', $launcher), 'f', 'none on a standby');
configure('idempotency.purge_databases', q{''});
sql('one', $fill);
$node->wait_for_catchup($standby);
$node->stop;
$standby->promote;
ok( $standby->poll_query_until('one', $empty =~ s/= 0/= 1/r),
	'it begins with the promotion');
$standby->safe_psql('one', "SET default_transaction_read_only = off; $fill");
$standby->safe_psql('postgres', q{ALTER SYSTEM SET idempotency.purge_interval = '1 s'});
is($standby->safe_psql('one', 'SELECT count(*) FROM idempotency.keys'), 3001, 'the next round is an hour off');
$standby->reload;
ok( $standby->poll_query_until('one', $empty =~ s/= 0/= 1/r), 'a shorter interval counts at once');

# a shutdown waits for nothing, not even for a worker that waits for a lock
$blocker = $standby->background_psql('one');
$blocker->query_safe('SET default_transaction_read_only = off');
$blocker->query_safe('BEGIN; LOCK TABLE idempotency.keys IN ACCESS EXCLUSIVE MODE');
ok($standby->poll_query_until('postgres', "SELECT count(*) = 1 $worker"), 'a worker waits');
ok($standby->stop('fast', fail_ok => 1), 'shut down meanwhile');
$blocker->{run}->finish;

# pg_upgrade's servers
my $log = -s $standby->logfile;
$standby->command_ok([ 'pg_ctl', '-w', '-D', $standby->data_dir, '-l', $standby->logfile, '-o', '-b -c log_min_messages=debug1', 'start' ], 'started as pg_upgrade does it');
is($standby->safe_psql('one', "SELECT status FROM idempotency.lookup('w', 'k')"), 'completed', 'the library is there');
$standby->command_ok([ 'pg_ctl', '-w', '-D', $standby->data_dir, 'stop' ], 'and stopped');
unlike(slurp_file($standby->logfile, $log), qr/purge launcher/, 'without a launcher');
unlike(slurp_file($node->logfile) . slurp_file($standby->logfile),
	qr/TRAP|cannot happen|could not serialize/, 'nothing untoward in the logs');

done_testing();
