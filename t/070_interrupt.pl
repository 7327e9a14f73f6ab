# Every wait of the extension, ended from outside: by a cancel, statement_timeout,
# lock_timeout and the end of the session.  Each ends at once with PostgreSQL's
# SQLSTATE, leaves no lock and no row behind, also if the error is caught by a
# savepoint, and the next call works.  Then the holder that is cut off while it
# is idle, a lock table that is full, and a purge worker that waits.
use strict;
use warnings;

use IPC::Open2;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep);

my $node = PostgreSQL::Test::Cluster->new('interrupt');
$node->init;
# the smallest lock table that the rest can live with
$node->append_conf('postgresql.conf', q{
max_connections = 10
max_locks_per_transaction = 12
max_prepared_transactions = 0
max_worker_processes = 4
autovacuum = off
deadlock_timeout = 1h
log_min_messages = warning
log_min_error_statement = panic
shared_preload_libraries = 'idempotency'
idempotency.purge_interval = '1 s'
});
# the claims of a full lock table must differ, also where hashes are short (test/collisions)
$node->append_conf('postgresql.conf', 'idempotency.debug_hash_bits = 64') if $ENV{COLLISIONS};
$node->start;
$node->safe_psql('postgres', q{
CREATE EXTENSION idempotency;
SELECT idempotency.define_machine('m', '{"initial": "A", "transitions": {"A": {"go": "B"}}}');
CREATE TABLE ord (id text PRIMARY KEY, state text DEFAULT 'A', version bigint NOT NULL DEFAULT 1, note text);
SELECT idempotency.attach_machine('ord', 'state', 'm'), idempotency.attach_version('ord', 'version');
CREATE TABLE bare (id text PRIMARY KEY, version bigint NOT NULL DEFAULT 1, fence bigint, state text DEFAULT 'A');
CREATE TABLE uniq (id text PRIMARY KEY);
CREATE TABLE token (id text, token text);
CREATE FUNCTION work(r jsonb) RETURNS text LANGUAGE sql AS
  $$ UPDATE ord SET note = 'worked' WHERE id = r ->> 'id' RETURNING note $$;
CREATE FUNCTION fence(s text, k text) RETURNS bigint LANGUAGE sql AS
  'SELECT fence FROM idempotency.keys WHERE (scope, key) = (s, k)';
CREATE FUNCTION event(t text) RETURNS bigint LANGUAGE sql AS 'SELECT id FROM idempotency.outbox WHERE topic = t';
CREATE ROLE regress_other;
});

# What is there before; what the holder does, and keeps open; what has to wait
# for it.  %s is the name of the case.
my $lapsed = q{SELECT idempotency.lease('i', '%s', '0')};
my $lock = q{SELECT idempotency.acquire_lock('%s', '1 h')};
my $out = q{SELECT idempotency.emit('%s', NULL, 'k'); SELECT idempotency.take('%s')};
my $token = q{INSERT INTO token VALUES ('%s', idempotency.issue_token('%s', 'p'))};
my $row = q{INSERT INTO ord VALUES ('%s')};
my $claim = q{SELECT idempotency.claim('i', '%s')};
my $answer = q{SELECT idempotency.once('i', '%s')};
my $update = q{UPDATE ord SET note = 'held' WHERE id = '%s'};
my $its = q{(SELECT token FROM token WHERE id = '%s')};
my @waits = (
	[ 'claim for a claim', '', $claim, $claim ],
	[ 'claim for an answer', '', $answer, $claim ],
	[ 'claim with a bound for a claim', '', $claim, q{SELECT idempotency.claim('i', '%s', wait => '1 h')} ],
	[ 'claim with a bound for an answer', '', $answer, q{SELECT idempotency.claim('i', '%s', wait => '1 h')} ],
	[ 'once', '', $claim, $answer ],
	[ 'run', '', $answer, q{SELECT idempotency.run('i', '%s', 'work', wait => '1 h')} ],
	[ 'the function that run calls', $row, $update, q{SELECT idempotency.run('i', '%s', 'work', '{"id": "%s"}', record_errors => true)} ],
	[ 'forget', $answer, q{SELECT idempotency.forget('i', '%s')}, q{SELECT idempotency.forget('i', '%s')} ],
	[ 'lease for a claim', '', $claim, q{SELECT idempotency.lease('i', '%s', '1 h')} ],
	[ 'lease for a lease', '', $lapsed, q{SELECT idempotency.lease('i', '%s', '1 h', wait => '1 h')} ],
	[ 'complete', $lapsed, $claim, q{SELECT idempotency.complete('i', '%s', 'x', fence => fence('i', '%s'))} ],
	[ 'fail', $lapsed, $claim, q{SELECT idempotency.fail('i', '%s', 'x', fence => fence('i', '%s'))} ],
	[ 'release', $lapsed, $claim, q{SELECT idempotency.release('i', '%s', fence('i', '%s'))} ],
	[ 'extend', $lapsed, $claim, q{SELECT idempotency.extend('i', '%s', fence('i', '%s'), '1 h')} ],
	[ 'checkpoint', $lapsed, $claim, q{SELECT idempotency.checkpoint('i', '%s', fence('i', '%s'), 'c')} ],
	[ 'acquire_lock', '', $lock, q{SELECT idempotency.acquire_lock('%s', '1 h', NULL)} ],
	[ 'renew_lock', $lock, q{SELECT idempotency.renew_lock('%s', fence('idempotency.lock', '%s'), '1 h')},
		q{SELECT idempotency.renew_lock('%s', fence('idempotency.lock', '%s'), '1 h')} ],
	[ 'release_lock', $lock, q{SELECT idempotency.renew_lock('%s', fence('idempotency.lock', '%s'), '1 h')},
		q{SELECT idempotency.release_lock('%s', fence('idempotency.lock', '%s'))} ],
	[ 'insert_once', '', q{INSERT INTO uniq VALUES ('%s')}, q{SELECT idempotency.insert_once(NULL::uniq, '{"id": "%s"}')} ],
	[ 'transition', $row, $update, q{SELECT idempotency.transition('ord', '%s', 'A', 'B')} ],
	[ 'fire', $row, $update, q{SELECT idempotency.fire('ord', '%s', 'go')} ],
	[ 'update_if', $row, $update, q{SELECT idempotency.update_if('ord', '%s', 1, '{"note": "n"}')} ],
	[ 'attach_version', '', q{INSERT INTO bare VALUES ('%s')}, q{SELECT idempotency.attach_version('bare', 'version')} ],
	[ 'attach_fence', '', q{INSERT INTO bare VALUES ('%s')}, q{SELECT idempotency.attach_fence('bare', 'fence')} ],
	[ 'attach_machine', '', q{INSERT INTO bare VALUES ('%s')}, q{SELECT idempotency.attach_machine('bare', 'state', 'm')} ],
	[ 'detach_machine', '', q{INSERT INTO ord VALUES ('%s')}, q{SELECT idempotency.detach_machine('ord', 'state')} ],
	[ 'define_machine', '', q{SELECT idempotency.define_machine('%s', '{"initial": "A", "transitions": {"A": ["B"]}}')},
		q{SELECT idempotency.define_machine('%s', '{"initial": "A", "transitions": {"A": ["B"]}}')} ],
	[ 'drop_machine', q{SELECT idempotency.define_machine('%s', '{"initial": "A", "transitions": {"A": ["B"]}}')},
		q{SELECT idempotency.define_machine('%s', '{"initial": "B", "transitions": {"B": ["A"]}}')}, q{SELECT idempotency.drop_machine('%s')} ],
	[ 'consume_token', $token, qq{SELECT idempotency.consume_token($its, '%s', 'p')}, qq{SELECT idempotency.consume_token($its, '%s', 'p')} ],
	[ 'consume_token with a bound', $token, qq{SELECT idempotency.consume_token($its, '%s', 'p')}, qq{SELECT idempotency.consume_token($its, '%s', 'p', '1 h')} ],
	[ 'revoke_token', $token, qq{SELECT idempotency.consume_token($its, '%s', 'p')}, qq{SELECT idempotency.revoke_token($its, '%s', 'p')} ],
	[ 'revoke_tokens', '', q{SELECT idempotency.revoke_tokens('%s', 'p')}, q{SELECT idempotency.revoke_tokens('%s', 'p')} ],
	[ 'rotate_token_key', '', 'SELECT idempotency.rotate_token_key()', 'SELECT idempotency.rotate_token_key()' ],
	[ 'ack', $out, q{SELECT idempotency.ack(event('%s'), 1)}, q{SELECT idempotency.ack(event('%s'), 1)} ],
	[ 'ack of many', $out, q{SELECT idempotency.ack(event('%s'), 1)}, q{SELECT idempotency.ack_batch(ARRAY[event('%s')], ARRAY[1])} ],
	[ 'nack', $out, q{SELECT idempotency.ack(event('%s'), 1)}, q{SELECT idempotency.nack(event('%s'), 1)} ],
	[ 'grant_usage', '', q{SELECT idempotency.grant_usage('regress_other')}, q{SELECT idempotency.grant_usage('regress_other')} ],
	# a table of ours that an operator has locked, for VACUUM FULL say
	(map { [ "$_->[1] for its table", '', "LOCK TABLE idempotency.$_->[0]", "SELECT idempotency.$_->[1]($_->[2])" ] }
		[ 'keys', 'claim', q{'i', '%s'} ], [ 'keys', 'lookup', q{'i', '%s'} ], [ 'keys', 'lease', q{'i', '%s', '1 h'} ], [ 'keys', 'purge', '' ],
		[ 'outbox', 'emit', q{'%s', '1'} ], [ 'outbox', 'take', q{'%s'} ], [ 'outbox', 'retry_parked', q{'%s'} ],
		[ 'used_tokens', 'check_token', q{idempotency.issue_token('s', 'p'), 's', 'p'} ], [ 'token_generations', 'issue_token', q{'s', 'p'} ]));

# ------------------------------------------------------------------ the matrix
my %state = (cancel => '57014', statement_timeout => '57014', lock_timeout => '55P03', terminate => '57P01');
my ($holder, $waiter, $boss) = map { connect_psql() } 1 .. 3;
my $tables = join ', ', map { "(SELECT coalesce(md5(string_agg(t::text, ',' ORDER BY t::text)), '') FROM idempotency.$_ t)" } qw(keys outbox used_tokens token_generations machines token_keys);
my $number = 0;
for my $wait (@waits)
{
	my ($name, $before, $held, $call) = @$wait;
	my @wrong;
	for my $end (sort keys %state)
	{
		my $case = 'case' . ++$number;
		my $check = sub { my ($what, $got, $expected) = @_; push @wrong, "$end: $what: $got" if $got ne $expected; };
		s/%s/$case/g for my ($b, $h, $c) = ($before, $held, $call);
		one($boss, $_) for split /; /, $b;
		one($holder, 'BEGIN');
		one($holder, $h);
		my $was = $h =~ /^LOCK/ ? '' : one($boss, "SELECT $tables");

		one($waiter, 'BEGIN');
		one($waiter, 'SAVEPOINT s');
		one($waiter, "SET LOCAL $end = '30 ms'") if $end =~ /timeout/;
		send_to($waiter, $c);
		if ($end !~ /timeout/)
		{
			my $waits = 0;
			for (1 .. 2000)
			{
				last if $waits = one($boss, "SELECT count(*) FROM pg_stat_activity WHERE pid = $waiter->{pid} AND wait_event_type = 'Lock'");
				sleep 0.002;
			}
			$check->('waits', $waits, '1');
			one($boss, "SELECT pg_${end}_backend($waiter->{pid})");
		}
		my $got = (receive($waiter))[1];
		if ($end eq 'terminate')
		{
			$check->('SQLSTATE', $got, 'gone');
			$check->('is gone', one($boss, "SELECT count(*) FROM pg_stat_activity WHERE pid = $waiter->{pid}"), '0') if poll("SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = $waiter->{pid}");
			$check->('locks', one($boss, "SELECT count(*) FROM pg_locks WHERE pid = $waiter->{pid}"), '0');
			$waiter = connect_psql();
			one($waiter, 'BEGIN');
			one($waiter, 'SAVEPOINT s');
		}
		else
		{
			$check->('SQLSTATE', $got, $state{$end});
			one($waiter, 'ROLLBACK TO s');
			$check->('locks', one($boss, "SELECT count(*) FROM pg_locks WHERE pid = $waiter->{pid} AND locktype <> 'virtualxid' AND NOT (locktype = 'transactionid' AND granted)"), '0');
		}
		$check->('timeouts', one($waiter, q{SELECT concat_ws(' ', current_setting('lock_timeout'), current_setting('statement_timeout'))}), '0 0');
		$check->('the tables', one($boss, "SELECT $tables"), $was) if $was;

		# undone by its holder, a write or a claim: now the call comes through
		one($holder, 'ROLLBACK');
		$check->('the next call', (talk($waiter, $c))[1], '00000');
		talk($waiter, 'ROLLBACK');
		$check->('locks at the end', one($boss, "SELECT count(*) FROM pg_locks WHERE pid = $waiter->{pid}"), '0');
	}
	is(join("\n", @wrong), '', $name);
}

# -------------------------------------------------- a holder that is cut off
one($holder, 'SET idle_in_transaction_session_timeout = 50');
one($holder, 'BEGIN');
one($holder, q{SELECT idempotency.claim('i', 'idle')});
is(one($waiter, q{SELECT status FROM idempotency.claim('i', 'idle') WHERE idempotency.complete('i', 'idle', 'taken') IS NOT NULL}), 'claimed',
	'idle_in_transaction_session_timeout frees the key for who waits');
is((talk($holder, 'COMMIT'))[1], 'gone', 'and its holder has lost it');
$holder = connect_psql();
is(one($holder, q{SELECT response FROM idempotency.claim('i', 'idle')}), 'taken', 'its retry replays');

# ------------------------------------------------------ the lock table is full
my $claims = q{SELECT count(*) FROM generate_series(1, 20000) i, idempotency.claim('full', i::text) c WHERE c.status = 'claimed'};
one($holder, 'BEGIN');
one($holder, q{SELECT idempotency.claim('i', 'mine')});
one($waiter, 'BEGIN');
one($waiter, 'SAVEPOINT s');
is((talk($waiter, $claims))[1], '53200', 'more open claims than the lock table holds');
one($waiter, 'ROLLBACK TO s');
is(one($waiter, q{SELECT status FROM idempotency.claim('full', '1')}), 'claimed', 'the transaction goes on after ROLLBACK TO');
one($waiter, q{SELECT idempotency.complete('full', '1', 'done')});
one($waiter, 'COMMIT');
is((talk($waiter, $claims))[1], '53200', 'again, and without a savepoint');
one($holder, q{SELECT idempotency.complete('i', 'mine', 'kept')});
one($holder, 'COMMIT');
is(one($waiter, q{SELECT response FROM idempotency.claim('i', 'mine')}), 'kept', 'the session that held a claim meanwhile has kept it');
is(one($waiter, q{SELECT string_agg(key, ',') FROM idempotency.keys WHERE scope = 'full'}), '1', 'nothing else is left');
is(one($waiter, q{SELECT count(*) FROM generate_series(1, 20000) i WHERE idempotency.once('full', 'o' || i)}), '20000', 'once() needs no lock that stays');
one($waiter, q{SELECT idempotency.emit('full', NULL, i::text) FROM generate_series(1, 3000) i});
is(one($waiter, q{SELECT count(idempotency.ack(id, attempt)) FROM idempotency.take('full', 3000)}), 3000, 'nor does take(), or ack()');
is(one($boss, q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'}), '0', 'no lock is left');

# ---------------------------------------------------- a purge worker that waits
one($boss, q{UPDATE idempotency.keys SET expires_at = created_at});
one($holder, 'BEGIN');
one($holder, 'LOCK TABLE idempotency.keys');
$node->append_conf('postgresql.conf', q{idempotency.purge_databases = 'postgres'});
$node->reload;
my $worker = q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency purge worker' AND wait_event_type = 'Lock'};
for my $how ('cancel', 'terminate')
{
	poll("SELECT EXISTS ($worker)") or die 'no purge worker waits';
	my $pid = one($boss, $worker);
	one($boss, "SELECT pg_${how}_backend($pid)");
	ok(poll("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)"), "$how ends the purge worker that waits");
}
one($holder, 'ROLLBACK');
ok(poll(q{SELECT NOT EXISTS (SELECT FROM idempotency.keys)}), 'and the next one purges');

close $_->{to} for $holder, $waiter, $boss;
$node->stop('fast');
unlike(slurp_file($node->logfile), qr/TRAP|PANIC|leak|don.t own|not closed|terminated by signal/, 'nothing of ours in the log');
done_testing();

# ------------------------------------------------------------- psql on a leash
sub connect_psql
{
	my %psql;
	$psql{handle} = open2($psql{from}, $psql{to}, "exec psql -XAtq -d \"" . $node->connstr('postgres') . '" 2>/dev/null');
	$psql{to}->autoflush(1);
	$psql{pid} = one(\%psql, 'SELECT pg_backend_pid()');
	return \%psql;
}

sub send_to
{
	my ($psql, $sql) = @_;
	local $SIG{PIPE} = 'IGNORE';
	print { $psql->{to} } "$sql;\n\\echo \@\@ :SQLSTATE\n";
	return;
}

# The output and the SQLSTATE, which is "gone" if the connection is.
sub receive
{
	my ($psql) = @_;
	my $out = '';
	while (defined(my $line = readline $psql->{from}))
	{
		if ($line =~ /^\@\@ ?(\S*)$/)
		{
			chomp $out;
			return ($out, $1 eq '' || $1 =~ /^57P0/ ? 'gone' : $1);
		}
		$out .= $line;
	}
	return ($out, 'gone');
}

sub talk { my ($psql, $sql) = @_; send_to($psql, $sql); return receive($psql); }

sub one
{
	my ($psql, $sql) = @_;
	my ($out, $state) = talk($psql, $sql);
	die "$sql: $state\n" if $state ne '00000';
	return $out;
}

sub poll
{
	my ($sql) = @_;
	for (1 .. 18000)
	{
		return 1 if one($boss, $sql) eq 't';
		sleep 0.01;
	}
	return 0;
}
