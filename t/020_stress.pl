# Stress and recount: several sessions do work under random keys while they
# are rolled back, cancelled, killed, and the whole server with them.
# Afterwards the books must balance:
#
#   effects = keys		no effect without its key, no key without its effect,
#						none twice
#   answer = effect		the stored answer is the one of the effect that stayed
#   every replay		that any session ever saw is the first answer
#
# and no session met an error that its transaction cannot explain: under READ
# COMMITTED a claim never fails with 40001, so a lock or a look that does not
# work shows here, although the unique index would still save the books.
#
# Environment:
#   IDEMPOTENCY_STRESS_SECONDS   how long (10); longer, where the machine is so
#                                busy that not everything has happened by then
#   IDEMPOTENCY_STRESS_SESSIONS  how many sessions (8)
#   IDEMPOTENCY_STRESS_KILLS     how often the server is killed (3), in at least
#                                1.5 s each; by turns its postmaster alone, all
#                                of its processes, and by an immediate stop
#   IDEMPOTENCY_STRESS_SEED      repeat a run's choices (not its timing)
use strict;
use warnings;

use IPC::Open2;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time sleep);

my $kills = $ENV{IDEMPOTENCY_STRESS_KILLS} || 3;
my $seconds = $ENV{IDEMPOTENCY_STRESS_SECONDS} || 10;
$seconds = 1.5 * $kills if $seconds < 1.5 * $kills;
my $sessions = $ENV{IDEMPOTENCY_STRESS_SESSIONS} || 8;
my $seed = $ENV{IDEMPOTENCY_STRESS_SEED} || int(rand(2**31));
note "seed $seed, $sessions sessions, $seconds s, $kills kills";

my $node = PostgreSQL::Test::Cluster->new('stress');
$node->init;
$node->append_conf('postgresql.conf', q{
restart_after_crash = on
max_prepared_transactions = 50
deadlock_timeout = 100ms
autovacuum_naptime = 1s
log_min_messages = fatal
log_min_error_statement = panic
log_statement = none
log_connections = off
log_disconnections = off
});
$node->start;
$node->safe_psql('postgres', q{
CREATE EXTENSION idempotency;
-- no constraint: a second effect must be possible, to be seen
CREATE TABLE effect (key text, status text, answer text);
CREATE FUNCTION work(request jsonb) RETURNS text LANGUAGE sql VOLATILE AS $$
  INSERT INTO effect VALUES (request ->> 'key', 'completed', gen_random_uuid()::text) RETURNING answer
$$;
CREATE TABLE item (key text PRIMARY KEY, answer text);
});
my $connstr = $node->connstr('postgres');
my $dir = $node->basedir;
my $begin = time;
my $end = $begin + $seconds;
my $patience = 300;
my @must_happen = qw(claimed replayed rolled_back savepoint_undone unfinished_refused);

# ------------------------------------------------------------------ sessions
my @workers;
for my $n (1 .. $sessions)
{
	my $pid = fork;
	die "fork: $!" unless defined $pid;
	if ($pid == 0)
	{
		eval { worker($n) };
		print STDERR "session $n: $@" if $@;
		POSIX::_exit($@ ? 1 : 0);
	}
	push @workers, $pid;
}

# --------------------------------------------------------------------- chaos
srand($seed);
my @server_ends = qw(kill_postmaster kill_server stop_immediate);
splice @server_ends, $kills if $kills < @server_ends;
my %done = map { $_ => 0 } qw(cancel terminate kill_backend), @server_ends;
my $server_kills = 0;
# the last one is below
my @kill_at = sort { $a <=> $b } map { $begin + $seconds * (0.15 + rand(0.8)) } 2 .. $kills;
while (time < $end || (!all_happened() && time < $end + $patience))
{
	sleep(rand(0.1));
	resolve_prepared() if rand() < 0.2;
	if (@kill_at && time > $kill_at[0])
	{
		shift @kill_at;
		kill_server();
		next;
	}
	my $what = rand();
	$what = $what < 0.75 ? 'cancel' : $what < 0.97 ? 'terminate' : 'kill_backend';
	# each at least once
	my ($missing) = grep { !$done{$_} } qw(cancel terminate kill_backend);
	$what = $missing if $missing;
	my $call = {
		cancel => 'pg_cancel_backend(pid)',
		terminate => 'pg_terminate_backend(pid)',
		kill_backend => 'true'
	}->{$what};
	# rather one that is at work, or waits
	my $pid = ask(qq{SELECT pid FROM (SELECT pid FROM pg_stat_activity
		WHERE application_name LIKE 'worker%'
		ORDER BY state <> 'active', random() LIMIT 1) AS victim WHERE $call});
	next unless defined $pid && $pid =~ /^\d+$/;
	kill 9, $pid if $what eq 'kill_backend';
	$done{$what}++;
}

# the sessions end their last transaction, which may wait for a prepared one
append_to_file("$dir/stop", '');
$end = time;
my %running = map { $_ => 1 } @workers;
my $worker_failed = 0;
while (%running)
{
	resolve_prepared();
	if (time > $end + $patience)
	{
		diag('stuck: ' . ask(q{SELECT string_agg(concat_ws(' ', application_name, a.pid, state,
			wait_event, query, l.locktype, l.transactionid, l.objid, l.granted), E'\n')
			FROM pg_stat_activity a LEFT JOIN pg_locks l ON l.pid = a.pid
			AND l.locktype IN ('advisory', 'transactionid')
			WHERE application_name LIKE 'worker%'}) // 'the server is away');
		kill 9, keys %running;
	}
	for my $pid (keys %running)
	{
		if (waitpid($pid, 1) == $pid)	# WNOHANG
		{
			$worker_failed++ if $?;
			delete $running{$pid};
		}
	}
	sleep 0.05;
}
resolve_prepared() while (ask('SELECT count(*) FROM pg_prepared_xacts') // 1) ne '0';

# a last crash: what is told below has been recovered
kill_server() while $server_kills < $kills;

# ------------------------------------------------------------------- recount
my (%seen, %errors, %count);
for (facts())
{
	my ($what, @rest) = split /\t/;
	if ($what eq 'saw') { $seen{ $rest[0] }{"$rest[1] " . ($rest[2] // '')}++; }
	elsif ($what eq 'error') { $errors{"$rest[0] under $rest[1] at $rest[2]"}++; }
	else { $count{$what}++; }
}
my $total = sub { $node->safe_psql('postgres', shift) };

note "server: " . join(', ', map { "$_ $done{$_}" } sort keys %done);
note "sessions: " . join(', ', map { "$_ $count{$_}" } sort keys %count);
my $effects = $total->('SELECT count(*) FROM effect');
note "effects $effects, items " . $total->('SELECT count(*) FROM item');

is($worker_failed, 0, 'every session ran to its end');
is(join("\n", map { "$_: $errors{$_}" } sort keys %errors), '', 'no error that cannot be explained');

is($total->(q{SELECT key, count(*) FROM effect GROUP BY key HAVING count(*) > 1}),
	'', 'no effect twice');
is($total->(q{SELECT e.key FROM effect e LEFT JOIN idempotency.keys k
	ON k.scope = 'stress' AND k.key = e.key WHERE k.key IS NULL}),
	'', 'no effect without its key');
is($total->(q{SELECT k.key FROM idempotency.keys k LEFT JOIN effect e
	ON k.key = e.key WHERE k.scope = 'stress' AND e.key IS NULL}),
	'', 'no key without its effect');
is($total->(q{SELECT count(*) FROM idempotency.keys WHERE scope = 'stress'}),
	$effects, 'effects = keys');
is($total->(q{SELECT e.key, e.answer, l.response FROM effect e,
	LATERAL idempotency.lookup('stress', e.key) l
	WHERE (l.status, l.response) IS DISTINCT FROM (e.status, e.answer)}),
	'', 'the stored answer is that of the effect');
is($total->(q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'}),
	'0', 'no lock is left');

my %stored;
for (split /\n/, $total->(q{SELECT 'key ' || key, status || ' ' || coalesce(answer, '') FROM effect
	UNION ALL SELECT 'item ' || key, 'row ' || answer FROM item}))
{
	my ($key, $answer) = split /\|/;
	$stored{$key} = $answer;
}
my @wrong;
my $replays = 0;
for my $key (sort keys %seen)
{
	for my $answer (keys %{ $seen{$key} })
	{
		$replays += $seen{$key}{$answer};
		push @wrong, "$key: saw $answer, stored " . ($stored{$key} // 'nothing')
		  if ($stored{$key} // '') ne $answer;
	}
}
is(join("\n", @wrong), '', "all $replays answers seen are the first answer");

# and the test did what it says
cmp_ok($effects, '>', 0, 'there were effects');
cmp_ok($count{$_} // 0, '>', 0, "there was: $_") for @must_happen;
cmp_ok($done{$_}, '>', 0, "the chaos did: $_") for sort keys %done;

$node->stop;
done_testing();

# ---------------------------------------------------------------- the chaos

# What the sessions have noted so far.
sub facts
{
	return map { split /\n/, slurp_file($_) } grep { -e } map { "$dir/worker$_" } 1 .. $sessions;
}

# Has there been everything that is asked for at the end?
sub all_happened
{
	my %noted = map { $_ => 1 } facts();
	return !grep { !$_ } @done{qw(cancel terminate kill_backend)}, @noted{@must_happen};
}

# One value, or undef while the server is away.
sub ask
{
	my ($sql) = @_;
	my ($out, $err);
	# it dies of a broken pipe where psql finds no server before it reads
	my $rc = eval {
		$node->psql('postgres', $sql, stdout => \$out, stderr => \$err, timeout => 60);
	};
	return defined $rc && $rc == 0 ? $out : undef;
}

# What a session prepared before it lost its connection.
sub resolve_prepared
{
	my $gids = ask(q{SELECT gid FROM pg_prepared_xacts
		WHERE prepared < clock_timestamp() - interval '200 ms'});
	for my $gid (split /\n/, $gids // '')
	{
		my $verb = $gid =~ /[02468]$/ ? 'COMMIT' : 'ROLLBACK';
		ask("$verb PREPARED '$gid'");
	}
}

# The plug: SIGKILL for the postmaster, whose children then end by themselves,
# or for all of them, or an immediate stop; then start again.
sub kill_server
{
	my $how = $server_ends[ $server_kills++ % @server_ends ];
	my $pid = (split /\n/, slurp_file($node->data_dir . '/postmaster.pid'))[0];
	my @children = grep { /^\d+$/ } split /\s+/, `ps -o pid= --ppid $pid`;
	$done{$how}++;
	if ($how eq 'stop_immediate') { $node->stop('immediate'); }
	else
	{
		kill 9, $pid, $how eq 'kill_server' ? @children : ();
		for (1 .. 300)
		{
			# the port file and the shared memory are in use until all are gone
			last unless grep { kill 0, $_ } $pid, @children;
			sleep 0.1;
		}
		$node->{_pid} = undef;
	}
	$node->start;
}

# --------------------------------------------------------------- a session

my ($n, $to, $from, $psql, $log, $level, $step, $serial, $again);

sub worker
{
	($n) = @_;
	srand($seed + $n);
	$serial = 0;
	open($log, '>', "$dir/worker$n") or die "log: $!";
	$log->autoflush(1);
	connect_psql();
	while (!-e "$dir/stop")
	{
		# a small window of keys that moves on
		my $key = int((time - $begin) * 300) + int(rand(12));
		$level = rand() < 0.8 ? 'READ COMMITTED'
		  : rand() < 0.5 ? 'REPEATABLE READ' : 'SERIALIZABLE';
		my $answer = "$n/" . ++$serial;
		my $kind = rand();
		# a request whose answer did not arrive is sent again, as a client does
		if (defined $again) { ($key, $again, $kind) = ($again, undef, 0); }
		eval {
			  $kind < 0.50 ? by_steps($key, $answer)
			: $kind < 0.65 ? by_run($key)
			: $kind < 0.75 ? by_once($key)
			: $kind < 0.85 ? two_keys($key, $answer)
			: $kind < 0.92 ? unfinished($key, $answer)
			: by_insert($key, $answer);
		};
		next unless $@;
		$again = $key if $@ eq "gone\n";
		recover($@);
	}
	close($to);
	return;
}

# claim, work, complete or fail, in as many shapes as a transaction has
sub by_steps
{
	my ($key, $answer) = @_;
	begin();
	my $inner = rand() < 0.4;
	say_("SAVEPOINT a") if $inner;
	my $status = claim($key) or return;
	if ($status eq 'claimed')
	{
		if ($inner && rand() < 0.3)
		{
			# undone as far as the claim itself: anybody may have it now
			effect($key, 'completed', "$answer undone");
			settle($key, 'completed', "$answer undone") if rand() < 0.5;
			say_("ROLLBACK TO a");
			fact('savepoint_undone');
			$status = claim($key) or return;
			return if $status ne 'claimed' && finish(undef);
		}
		say_("RELEASE a") if $inner && rand() < 0.5;
		if (rand() < 0.3)
		{
			# the completion is undone, the claim is open again
			say_("SAVEPOINT b");
			effect($key, 'completed', "$answer undone");
			settle($key, 'completed', "$answer undone");
			say_("ROLLBACK TO b");
			fact('savepoint_undone');
			die "wrong: not held\n" if one("SELECT status FROM idempotency.claim('stress', '$key')") ne 'held';
		}
		if (rand() < 0.1)
		{
			one("SELECT idempotency.release('stress', '$key')");
			finish(undef);
			return;
		}
		my $outcome = rand() < 0.8 ? 'completed' : 'failed';
		say_("SAVEPOINT c") if rand() < 0.3;
		effect($key, $outcome, $answer);
		settle($key, $outcome, $answer);
		finish("key $key\t$outcome\t$answer");
		return;
	}
	finish(undef);
}

sub by_run
{
	my ($key) = @_;
	begin() if my $block = rand() < 0.5;
	$level = 'READ COMMITTED' unless $block;
	$step = 'run';
	my ($status, $replayed, $response) = split /\|/,
	  one("SELECT status, replayed, response FROM idempotency.run('stress', '$key', 'work', "
		  . "jsonb_build_object('key', '$key'))");
	if ($status eq 'completed' && $replayed eq 'f')
	{
		fact('claimed');
		$block ? finish("key $key\tcompleted\t$response") : fact("saw\tkey $key\tcompleted\t$response");
		return;
	}
	fact("saw\tkey $key\t$status\t" . ($response // '')) if $replayed eq 't';
	fact($replayed eq 't' ? 'replayed' : $status);
	finish(undef) if $block;
}

# once() and its effect in one transaction; false only when it is done
sub by_once
{
	my ($key) = @_;
	begin();
	$step = 'once';
	my $first = one("SELECT idempotency.once('stress', '$key')");
	if ($first eq 't')
	{
		fact('claimed');
		say_("INSERT INTO effect VALUES ('$key', 'completed', NULL)");
		finish("key $key\tcompleted\t");
		return;
	}
	fact('replayed');
	finish(undef);
}

# two keys, in any order: 40P01 may be one's answer
sub two_keys
{
	my ($key, $answer) = @_;
	my $other = $key + 1 - int(rand(3));
	$other = $key + 1 if $other == $key;
	begin();
	my @facts;
	for my $k ($key, $other)
	{
		my $status = claim($k) or return;
		next if $status ne 'claimed';
		effect($k, 'completed', $answer);
		settle($k, 'completed', $answer);
		push @facts, "key $k\tcompleted\t$answer";
	}
	finish(@facts);
}

# the effect without the answer: COMMIT must refuse it
sub unfinished
{
	my ($key, $answer) = @_;
	begin();
	my $status = claim($key) or return;
	if ($status ne 'claimed')
	{
		finish(undef);
		return;
	}
	effect($key, 'completed', $answer);
	if (rand() < 0.5)
	{
		say_("SAVEPOINT d");
		settle($key, 'completed', $answer);
		say_("ROLLBACK TO d");
	}
	$step = 'commit of an open claim';
	my ($out, $state) = talk(rand() < 0.7 ? 'COMMIT' : "PREPARE TRANSACTION '$n-$serial'");
	die "wrong: an open claim was committed\n" if $state eq '00000';
	die "state $state\n" if $state ne 'IK001';
	fact('unfinished_refused');
	talk('ROLLBACK');
}

# the caller's own unique index
sub by_insert
{
	my ($key, $answer) = @_;
	begin();
	$step = 'insert_once';
	my ($created, $stored) = split /\|/,
	  one("SELECT created, (stored).answer FROM idempotency.insert_once(NULL::item, "
		  . "jsonb_build_object('key', '$key', 'answer', '$answer'))");
	if ($created eq 't') { finish("item $key\trow\t$answer"); return; }
	fact("saw\titem $key\trow\t$stored");
	finish(undef);
}

sub begin { say_("BEGIN ISOLATION LEVEL $level"); }

# The status; on a replay, what was seen is noted.  Undef: ended already.
sub claim
{
	my ($key) = @_;
	$step = 'claim';
	my $wait = rand() < 0.7 ? 'NULL' : rand() < 0.5 ? "'0'" : "'20 ms'";
	my ($status, $response) = split /\|/,
	  one("SELECT status, response FROM idempotency.claim('stress', '$key', wait => $wait)");
	if ($status eq 'completed' || $status eq 'failed')
	{
		fact("saw\tkey $key\t$status\t" . ($response // '')) unless $response && $response =~ m{^$n/$serial\b};
		fact('replayed');
	}
	else { fact($status); }
	return $status;
}

sub effect
{
	my ($key, $status, $answer) = @_;
	$step = 'effect';
	say_("INSERT INTO effect VALUES ('$key', '$status', '$answer')");
}

sub settle
{
	my ($key, $outcome, $answer) = @_;
	$step = 'complete';
	one("SELECT idempotency." . ($outcome eq 'failed' ? 'fail' : 'complete') . "('stress', '$key', '$answer')");
}

# End the transaction one way or another; the facts hold if it committed.
sub finish
{
	my @facts = grep { defined } @_;
	my $how = rand();
	$step = 'commit';
	if (@facts && $how < 0.2)
	{
		say_('ROLLBACK');
		fact('rolled_back');
	}
	elsif (@facts && $how < 0.3 && $level ne 'SERIALIZABLE')
	{
		# with its number's last digit the chaos decides the same, if we cannot
		my $gid = "$n-$serial";
		my $verb = $gid =~ /[02468]$/ ? 'COMMIT' : 'ROLLBACK';
		say_("PREPARE TRANSACTION '$gid'");
		my ($out, $state) = talk("$verb PREPARED '$gid'");
		# the chaos was quicker (42704, 55000), or a cancel: then it does it
		return if $state ne '00000';
		fact($verb eq 'COMMIT' ? map { "saw\t$_" } @facts : 'rolled_back');
	}
	else
	{
		say_('COMMIT');
		fact(map { "saw\t$_" } @facts);
	}
	return 1;
}

# After an error: is it one that such a transaction may meet?
sub recover
{
	my ($error) = @_;
	if ($error eq "gone\n")
	{
		fact('connection_lost');
		connect_psql();
		return;
	}
	if ($error =~ /^state (\S+)/)
	{
		my $state = $1;
		my $expected = $state eq '57014'	# cancelled
		  || $state eq '40P01'				# two keys
		  || ($state eq '40001' && $level ne 'READ COMMITTED');
		fact($expected ? "error_$state" : "error\t$state\t$level\t$step");
	}
	else
	{
		chomp $error;
		fact("error\t$error\t$level\t$step");
	}
	eval { talk('ROLLBACK') };
	connect_psql() if $@;
}

sub fact { print $log "$_\n" for @_; return; }

# A statement that must not fail: its output.
sub one
{
	my ($out, $state) = talk($_[0]);
	die "state $state\n" if $state ne '00000';
	return $out;
}

sub say_ { one($_[0]); return; }

# Send one statement to psql; its output and SQLSTATE.  Dies if psql is gone.
sub talk
{
	my ($sql) = @_;
	local $SIG{PIPE} = 'IGNORE';
	print $to "$sql;\n\\echo \@\@ :SQLSTATE\n" or die "gone\n";
	my $out = '';
	while (my $line = <$from>)
	{
		if ($line =~ /^\@\@ ?(\S*)$/)
		{
			# an error without SQLSTATE is libpq's own: the server went away
			die "gone\n" if $1 eq '';
			chomp $out;
			return ($out, $1);
		}
		$out .= $line;
	}
	die "gone\n";
}

sub connect_psql
{
	local $SIG{PIPE} = 'IGNORE';
	for (1 .. 600)
	{
		close($to) if $to;
		close($from) if $from;
		waitpid($psql, 0) if $psql;
		local $ENV{PGAPPNAME} = "worker$n";
		local $ENV{PGCONNECT_TIMEOUT} = 10;
		$psql = open2($from, $to, "exec psql -XAtq -d \"$connstr\" 2>/dev/null");
		$to->autoflush(1);
		return if eval { (talk('SELECT 1'))[1] eq '00000' };
		sleep 0.1;
	}
	die "the server does not come back\n";
}
