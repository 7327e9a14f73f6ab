# Plays a plan on a server with one session for each of its sessions, the hostile
# ones included, from a single process that waits for none of them, and records a history.
#
# A history has OPERATIONS {n, s, do, sql, inv, ret, rows | error, tx, ...}, where
# inv and ret are the microseconds at which the statement was sent and its answer
# was there, by the clock that the server reads too; and TRANSACTIONS {level,
# outcome, c_inv, c_ret, end}: committed, aborted or unknown (the session died at
# it), between c_inv and c_ret, and all that it held was free at end.
#
# Each operation has a number n of its own, which is its answer ("a17"), its row
# in the table effect, its mark on the rows that it wrote.
package Model::Run;

use strict;
use warnings;

use IO::Select;
use List::Util qw(max);
use Model::Hostile;
use Model::Plan;
use Model::Wire;
use Time::HiRes;

use constant {
	LONG => 3600_000_000,		# ttl in microseconds, of all keys but
	SHORT => 20_000,			# those with number 2
	FOREVER => 9e18,
	PATIENCE => 60				# seconds until a history counts as stuck
};

our $serial = 0;	# the last n
our $round = 0;		# the last history
my $h;				# the history that is being made
my @connection;		# how to reach the server, for Model::Wire->connect
my $control;
my @sessions;
my $fingerprint;	# what no attack may change

# What an administrator does meanwhile, and nobody should notice.
my $define = q{SELECT idempotency.define_machine('model', '{"initial": "NEW", "transitions": {
	"NEW": {"pay": "PAID"}, "PAID": {"refund": "REFUNDED", "ship": "SHIPPED", "touch": "PAID"},
	"SHIPPED": {"refund": "REFUNDED"}, "REFUNDED": {"reopen": "NEW"}}}', cyclic => true)};
my %upkeep = (
	purge => 'SELECT idempotency.purge()',
	rotate => 'SELECT idempotency.rotate_token_key()',
	retire => 'SELECT idempotency.rotate_token_key(retire => true)',
	redefine => $define,
	spare => q{SELECT idempotency.define_machine('spare', '{"initial": "A", "transitions": {"A": ["B"]}}');
		SELECT idempotency.drop_machine('spare')},
	regrant => q{BEGIN; SELECT idempotency.revoke_usage('regress_model'); SELECT idempotency.revoke_admin('regress_model');
		SELECT idempotency.grant_usage('regress_model'); SELECT idempotency.grant_admin('regress_model'); COMMIT},
	insight => q{SELECT (SELECT count(*) FROM idempotency.in_flight), (SELECT count(*) FROM idempotency.stats),
		(SELECT count(*) FROM idempotency.parked_events), (SELECT count(*) FROM idempotency.holder('model', 'any')),
		(SELECT count(*) FROM idempotency.off_graph('doc')), (SELECT count(*) FROM idempotency.attachments),
		(SELECT count(*) FROM idempotency.off_graph('regress_hostile.trap')), length(idempotency.machine_diagram('model'))});

# The tables are in use, so this may come to nothing.
my %guards = (machine => q{'doc', 'state'}, version => q{'ware', 'version'}, fence => q{'resource', 'fence'});
for my $kind (keys %guards)
{
	my $more = $kind eq 'machine' ? q{, 'model', history => true} : '';
	$upkeep{"reattach_$kind"} = "BEGIN; SET LOCAL lock_timeout = '5 ms'; SELECT idempotency.detach_$kind($guards{$kind}); "
	  . "SELECT idempotency.attach_$kind($guards{$kind}$more); COMMIT";
}

# The roles, for a superuser to make once.
sub role_sql
{
	return 'CREATE ROLE regress_model LOGIN;' . Model::Hostile::role_sql();
}

# The objects that every history uses, in each database of its own.
sub setup_sql
{
	return qq{
CREATE EXTENSION idempotency;
$define;
} . q{
SELECT idempotency.grant_usage('regress_model');
SELECT idempotency.grant_admin('regress_model');
GRANT CREATE ON SCHEMA public TO regress_model;
SET ROLE regress_model;
-- no constraint: a second effect must be possible, to be seen
CREATE TABLE effect (n bigint);
CREATE TABLE doc (id bigint PRIMARY KEY, state text NOT NULL DEFAULT 'NEW', n bigint);
CREATE TABLE ware (id bigint PRIMARY KEY, version bigint NOT NULL DEFAULT 1, n bigint);
CREATE TABLE resource (id bigint PRIMARY KEY, fence bigint NOT NULL DEFAULT 0, n bigint);
CREATE TABLE item (key text UNIQUE, n bigint);
CREATE TABLE audit (seq bigint GENERATED ALWAYS AS IDENTITY, kind text, id bigint, n bigint, old text, new text);
CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO audit (kind, id, n, old, new)
	VALUES (TG_TABLE_NAME, NEW.id, NEW.n, to_jsonb(OLD) ->> TG_ARGV[0], to_jsonb(NEW) ->> TG_ARGV[0]);
	RETURN NULL;
END $$;
CREATE TRIGGER audit AFTER UPDATE ON doc FOR EACH ROW EXECUTE FUNCTION audit('state');
CREATE TRIGGER audit AFTER UPDATE ON ware FOR EACH ROW EXECUTE FUNCTION audit('version');
CREATE TRIGGER audit AFTER UPDATE ON resource FOR EACH ROW EXECUTE FUNCTION audit('fence');
SELECT idempotency.attach_machine('doc', 'state', 'model', history => true);
SELECT idempotency.attach_version('ware', 'version');
SELECT idempotency.attach_fence('resource', 'fence');
CREATE FUNCTION work(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	n text := current_setting('model.n');
BEGIN
	INSERT INTO effect VALUES (n::bigint);
	IF current_setting('model.raise') <> '' THEN
		RAISE EXCEPTION USING ERRCODE = current_setting('model.raise'), MESSAGE = 'a' || n;
	END IF;
	RETURN 'a' || n;
END $$;
RESET ROLE;
} . Model::Hostile::setup_sql();
}

# connect(host =>, port =>, superuser =>, dbname =>)
sub connect
{
	my (%at) = @_;
	@connection = (host => $at{host}, port => $at{port}, dbname => $at{dbname});
	$control = Model::Wire->connect(@connection, user => $at{superuser}) or die "no connection\n";
	Model::Hostile::know(sub { $control->ask($_[0]) });
	return;
}

sub disconnect
{
	undef $control;
	@sessions = ();
	return;
}

# The history of a plan.  What went wrong while it was made is in {wrong}.
sub play
{
	my ($plan) = @_;
	my $id = ++$round * 8;
	$h = { round => $round, ops => [], txs => [], wrong => [], grants => {}, tokens => [], taken => [], version => {},
		prepared => [], exact => exact_hashes() };
	for my $table (qw(doc ware resource))
	{
		$control->ask("INSERT INTO $table (id) VALUES " . join(', ', map { '(' . ($id + $_) . ')' } 0 .. Model::Plan::ROWS - 1));
	}
	for my $s (0 .. Model::Plan::SESSIONS + Model::Plan::HOSTILE - 1)
	{
		$sessions[$s] = { n => $s, wire => $sessions[$s]{wire} // session($s), queue => [] };
	}

	for my $step (@$plan)
	{
		if (!defined $step->{s}) { command($step); next; }
		my $session = $sessions[ $step->{s} ];
		push @{ $session->{queue} }, $step;
		feed($session);
		if ($step->{calm})
		{
			# it may have to wait for another session, so not for long
			my $until = Time::HiRes::time() + 0.0015;
			pump($until - Time::HiRes::time()) while $session->{op} && Time::HiRes::time() < $until;
		}
		else
		{
			pump(0);
			while (backlog() > 2 * @sessions) { last unless pump(0.002); }
		}
	}
	finish();
	tally();
	return $h;
}

sub session
{
	my ($n) = @_;
	my $hostile = $n >= Model::Plan::SESSIONS;
	my $wire = Model::Wire->connect(@connection, user => $hostile ? 'regress_hostile' : 'regress_model') // die "no connection\n";
	# so that the library's settings are there to be set
	$wire->ask("SELECT idempotency.lookup('hostile', 'x')") if $hostile;
	return $wire;
}

sub now { return int(Time::HiRes::time() * 1e6); }
sub wrong { push @{ $h->{wrong} }, join '', @_; return; }

# With hashes of few bits a key that nobody holds may seem to be in progress.
sub exact_hashes
{
	return $control->ask("SELECT coalesce(current_setting('idempotency.debug_hash_bits', true), '64')::integer >= 64")->[0][0] eq 't';
}

sub backlog
{
	my $n = 0;
	$n += @{ $_->{queue} } for @sessions;
	return $n;
}

# Waits for an answer, at most so many seconds, and takes all that have come;
# false if there was none.
sub pump
{
	my ($timeout) = @_;
	my %by_fd = map { $_->{wire}->fd => $_ } @sessions;
	my $in = '';
	vec($in, $_, 1) = 1 for keys %by_fd;
	my $found = select(my $out = $in, undef, undef, $timeout > 0 ? $timeout : 0);
	return 0 unless $found > 0;
	for my $fd (sort { $a <=> $b } keys %by_fd)
	{
		next unless vec($out, $fd, 1);
		my $session = $by_fd{$fd};
		my $answer = $session->{wire}->poll or next;
		answered($session, $answer);
		feed($session);
	}
	return 1;
}

# Sends the next step of the session that makes sense, if it is free.
sub feed
{
	my ($session) = @_;
	while (!$session->{op} && @{ $session->{queue} })
	{
		my $step = shift @{ $session->{queue} };
		my $tx = $session->{tx};
		my $op = { %$step, n => $serial + 1, ret => FOREVER, rows => [] };
		$op->{sql} = statement($session, $op) // next;
		$serial++;
		unless ($tx)
		{
			$tx = { level => 'READ COMMITTED', outcome => 'open', ops => [], own => {}, saves => [], end => FOREVER };
			push @{ $h->{txs} }, $tx;
			$session->{tx} = $tx if $op->{do} eq 'begin';
			$tx->{alone} = $op->{do} ne 'begin';
		}
		$op->{tx} = $tx;
		$op->{own} = { %{ $tx->{own} } };
		push @{ $tx->{ops} }, $op;
		push @{ $h->{ops} }, $op;
		$tx->{attacked} = 1 if $op->{do} eq 'attack';
		$session->{op} = $op;
		$op->{inv} = now() - 1;
		if ($op->{do} eq 'begin') { @$tx{qw(level begun)} = ($op->{level}, $op->{inv}); }
		$tx->{begun} //= $op->{inv};
		$tx->{c_inv} = $op->{inv} if $tx->{alone} || $op->{do} eq 'commit';
		$session->{wire}->send($op->{sql});
	}
	return;
}

# The answer to the operation under way, or the news that the session is dead.
sub answered
{
	my ($session, $answer) = @_;
	my $op = delete $session->{op};
	my $at = now() + 1;
	if ($answer->{lost})
	{
		my $tx = $op ? $op->{tx} : $session->{tx};
		wrong("session $session->{n} was lost, and nobody had ended it: " . ($answer->{message} // '')) unless $session->{wire}{ended};
		if ($op) { @$op{qw(ret lost)} = ($at, 1); }
		if ($op && $op->{do} eq 'prepare') { $tx->{end} = FOREVER; }	# finish() finds out
		elsif ($op && ($tx->{alone} || $op->{do} eq 'commit')) { outcome($tx, 'unknown', $at); }
		elsif ($tx) { outcome($tx, 'aborted', $at); }
		delete $session->{tx};
		$session->{wire} = session($session->{n});
		return;
	}
	my $tx = $op->{tx};
	@$op{qw(ret rows error message)} = ($at, @$answer{qw(rows error message)});
	$op->{cancelled} = $session->{wire}{cancelled};
	$session->{failed} = $answer->{status} eq 'E';
	# a cancel may come before COMMIT or ROLLBACK has begun
	wrong("operation $op->{n} left transaction status $answer->{status}")
	  if ($answer->{status} eq 'I') != !!($tx->{alone} || $op->{do} =~ /^(commit|rollback|prepare)$/)
	  && !($op->{error} && $op->{do} =~ /^(begin|commit|rollback|prepare)$/);

	if ($tx->{alone} || $answer->{status} eq 'I')
	{
		my $done = !$op->{error} && ($tx->{alone} || $op->{do} eq 'commit' && !$op->{was_failed});
		if ($op->{do} eq 'prepare' && !$op->{error} && !$op->{was_failed}) { $tx->{prepared} = 1; }
		else { outcome($tx, $done ? 'committed' : 'aborted', $at); }
		delete $session->{tx};
	}
	learn($session, $op) unless $op->{error};
	return;
}

sub outcome
{
	my ($tx, $outcome, $at) = @_;
	@$tx{qw(outcome end)} = ($outcome, $at);
	$tx->{c_ret} = $outcome eq 'committed' ? $at : FOREVER;
	return;
}

# ------------------------------------------------------------- the statements

sub key_name { return "r$h->{round}k$_[0]"; }
sub row_id { return $h->{round} * 8 + $_[0]; }
sub sql_text { return defined $_[0] ? "'$_[0]'" : 'NULL'; }
sub ttl_of { return $_[0] == 2 ? SHORT : LONG; }

# The grant of a lease that the step means: this session's newest on the key,
# or anybody's.
sub grant
{
	my ($session, $op, @keys) = @_;
	my @grants = grep { !$op->{mine} || $_->{s} == $session->{n} } map { @{ $h->{grants}{$_} // [] } } @keys;
	return unless @grants;
	return $op->{mine} ? $grants[-1] : $grants[ $op->{which} % @grants ];
}

# The SQL of an operation, or undef if it makes no sense here.
sub statement
{
	my ($session, $op) = @_;
	my $tx = $session->{tx};
	my $do = $op->{do};
	my $n = $op->{n};

	# transactions
	if ($do eq 'begin') { return $tx ? undef : "BEGIN ISOLATION LEVEL $op->{level}"; }
	if ($do =~ /^(savepoint|rollback_to|release_savepoint|commit|rollback|prepare)$/)
	{
		return unless $tx;
		$op->{was_failed} = $session->{failed};
		return uc $do if $do =~ /^(commit|rollback)$/;
		if ($do eq 'prepare')
		{
			$op->{gid} = "$connection[-1] $n";
			$tx->{gid} = $op->{gid};
			push @{ $h->{prepared} }, $tx;
			return "PREPARE TRANSACTION '$op->{gid}'";
		}
		my $depth = @{ $tx->{saves} };
		return $session->{failed} ? undef : 'SAVEPOINT s' . ($op->{depth} = $depth) if $do eq 'savepoint';
		return unless $depth;
		$op->{depth} %= $depth;
		return $session->{failed} ? undef : "RELEASE s$op->{depth}" if $do eq 'release_savepoint';
		return "ROLLBACK TO s$op->{depth}";
	}
	return if $tx && $session->{failed};
	return Model::Hostile::statement($op, $h, $tx) if $do eq 'attack';

	my $effect = "INSERT INTO effect VALUES ($n); ";
	my $wait = sql_text($op->{wait});
	my $ms = defined $op->{lease} ? "'$op->{lease} ms'" : '';

	# keys; a lock is a key too
	if (defined $op->{key} && $do !~ /item|emit/)
	{
		my $is_lock = $op->{key} >= Model::Plan::KEYS;
		my $key = key_name($op->{key});
		$op->{key} = $key;
		$op->{ttl} = ttl_of($key =~ /k2$/ ? 2 : 0);
		my $ttl = "'" . $op->{ttl} / 1000 . " ms'";
		my $request = defined $op->{request} ? qq('{"r": $op->{request}}') : 'NULL';
		my $own = $tx && $tx->{own}{$key};
		my $verb = $op->{fail} ? 'fail' : 'complete';
		my $answer = qq('a$n', '{"n": $n}');

		if ($do eq 'claim')
		{
			return if $is_lock;
			return "SELECT status, response, meta ->> 'message' FROM idempotency.claim('model', '$key', $request, $ttl, $wait)";
		}
		if ($do eq 'settle')
		{
			return if $is_lock || !!$op->{held} != !!($own && $own->{open});
			return "${effect}SELECT idempotency.$verb('model', '$key', $answer)";
		}
		if ($do eq 'release')
		{
			return unless $own && $own->{open};
			return "SELECT idempotency.release('model', '$key')";
		}
		return "INSERT INTO effect SELECT $n WHERE idempotency.once('model', '$key', $ttl) RETURNING n" if $do eq 'once';
		if ($do eq 'run')
		{
			my $record = $op->{record} ? 'true' : 'false';
			return "SET model.n = '$n'; SET model.raise = '$op->{raise}'; SELECT status, response, meta ->> 'message', replayed "
			  . "FROM idempotency.run('model', '$key', 'work', $request, $ttl, $wait, $record)";
		}
		my $scope = $is_lock ? 'idempotency.lock' : 'model';
		if ($do eq 'lookup')
		{
			return if $is_lock;
			return "SELECT status, response, meta ->> 'message' FROM idempotency.lookup('model', '$key')";
		}
		return "${effect}SELECT idempotency.forget('model', '$key')" if $do eq 'forget';
		if ($do eq 'lease')
		{
			$op->{lock} = $is_lock;
			return "${effect}SELECT CASE WHEN f IS NULL THEN 'in_progress' ELSE 'claimed' END, NULL, NULL, f FROM idempotency.acquire_lock('$key', $ms, "
			  . ($wait eq 'NULL' ? "'1 hour'" : $wait) . ') f' if $is_lock;
			return "${effect}SELECT status, response, meta ->> 'message', fence, (extract(epoch FROM deadline) * 1000000)::bigint, attempt, checkpoint "
			  . "FROM idempotency.lease('model', '$key', $ms, $request, $ttl, $wait)";
		}

		# what takes a fence
		my $grant = grant($session, $op, $key) or return;
		my $fence = $grant->{fence};
		@$op{qw(fence grant)} = ($fence, $grant);
		my $deadline = '(extract(epoch FROM d) * 1000000)::bigint';
		if ($do eq 'extend')
		{
			return $is_lock ? "${effect}SELECT $deadline FROM idempotency.renew_lock('$key', $fence, $ms) d"
			  : "${effect}SELECT $deadline FROM idempotency.extend('model', '$key', $fence, $ms) d";
		}
		if ($do eq 'fenced_release')
		{
			return $is_lock ? "${effect}SELECT idempotency.release_lock('$key', $fence)"
			  : "${effect}SELECT idempotency.release('model', '$key', $fence)";
		}
		return if $is_lock;
		return "${effect}SELECT idempotency.checkpoint('model', '$key', $fence, 'c$n')" if $do eq 'checkpoint';

		# the holder works and completes once; a session that knows of it may say it again
		my $before = $grant->{settled};
		my $again = $before && $before->{tx}{outcome} eq 'committed' && !$before->{undone};
		return if $before && !$again && $before->{tx}{outcome} ne 'aborted' && !$before->{undone} && !$before->{error};
		return if !$again && $grant->{s} != $session->{n};
		$op->{again} = $again;
		if ($again) { $verb = $before->{fail} ? 'fail' : 'complete'; }
		else { $grant->{settled} = $op; }
		return ($again ? '' : $effect) . "SELECT idempotency.$verb('model', '$key', $answer, $fence)";
	}
	if ($do eq 'guarded')
	{
		my $grant = grant($session, $op, map { key_name(Model::Plan::KEYS + $_) } 0 .. Model::Plan::LOCKS - 1) or return;
		$op->{fence} = $grant->{fence};
		return "UPDATE resource SET fence = $op->{fence}, n = $n WHERE id = " . ($op->{row} = row_id($op->{row}));
	}

	# rows
	if (defined $op->{row}) { $op->{row} = row_id($op->{row}); }
	my $marked = "jsonb_build_object('n', $n)";
	if ($do eq 'move')
	{
		$op->{row} = -$n if $op->{missing};
		return 'SELECT outcome, applied, from_state, state FROM idempotency.transition(' . "'doc', $op->{row}, "
		  . sql_text($op->{from}) . ", '$op->{to}', $marked)";
	}
	return "SELECT outcome, applied, from_state, state FROM idempotency.fire('doc', $op->{row}, '$op->{event}', $marked)" if $do eq 'fire';
	return "UPDATE doc SET state = '$op->{to}', n = $n WHERE id = $op->{row}" if $do eq 'set_state';
	return "INSERT INTO doc VALUES (-$n, '$op->{to}', $n)" if $do eq 'insert_state';
	if ($do eq 'edit')
	{
		$op->{version} = ($h->{version}{ $op->{row} } // 1) + $op->{off};
		return "SELECT outcome, applied, version FROM idempotency.update_if('ware', $op->{row}, $op->{version}, $marked)";
	}
	return "UPDATE ware SET n = $n WHERE id = $op->{row} RETURNING 'applied', true, version" if $do eq 'set_row';

	# tokens
	if ($do eq 'issue' || $do eq 'revoke_all')
	{
		$op->{subject} = "r$h->{round}s$op->{subject}";
		return "SELECT t, (extract(epoch FROM expires_at) * 1000000)::bigint FROM idempotency.issue_token('$op->{subject}', 'model', '$op->{ttl}') t, "
		  . "idempotency.check_token(t, '$op->{subject}', 'model')" if $do eq 'issue';
		return "${effect}SELECT idempotency.revoke_tokens('$op->{subject}', 'model')";
	}
	if ($do =~ /^(consume|check|revoke)$/)
	{
		my $tokens = $h->{tokens};
		return unless @$tokens;
		# rather a late one
		my $token = $tokens->[ -1 - $op->{which} % @$tokens ];
		$op->{token} = $token;
		my $arguments = "'$token->{text}', '$token->{subject}', 'model'";
		$arguments =~ s/model'$/other'/ if $op->{wrong};
		return "SELECT status FROM idempotency.check_token($arguments)" if $do eq 'check';
		return "${effect}SELECT idempotency.revoke_token($arguments)" if $do eq 'revoke';
		return "WITH c AS MATERIALIZED (SELECT status FROM idempotency.consume_token($arguments, $wait)), "
		  . "e AS (INSERT INTO effect SELECT $n FROM c WHERE status = 'consumed') SELECT status FROM c";
	}

	# outbox
	my $topic = "'r$h->{round}'";
	if ($do eq 'emit')
	{
		return "${effect}SELECT idempotency.emit($topic, $marked, " . (defined $op->{key} ? "'k$op->{key}'" : 'NULL') . ($op->{delay} ? ", '$op->{delay} ms'" : '') . ')';
	}
	return "${effect}SELECT id, attempt, key, payload ->> 'n' FROM idempotency.take($topic, $op->{max}, $ms)" if $do eq 'take';
	return "${effect}SELECT idempotency.retry_parked($topic)" if $do eq 'retry_parked';
	return "CALL idempotency.wait_for_events($topic, '$op->{timeout} ms')" if $do eq 'wait';
	if ($do =~ /ack|extend_event/)
	{
		my @taken = grep { !$op->{mine} || $_->{s} == $session->{n} } @{ $h->{taken} };
		return unless @taken;
		if ($do eq 'ack_all')
		{
			my $last = $#taken - $op->{which} % @taken;
			$op->{acks} = [ @taken[ max(0, $last - 2) .. $last ] ];
			my ($ids, $attempts) = map { my $what = $_; join ', ', map { $_->{$what} } @{ $op->{acks} } } qw(event attempt);
			return "${effect}SELECT idempotency.ack_batch(ARRAY[$ids], ARRAY[$attempts])";
		}
		my $taken = $taken[ -1 - $op->{which} % @taken ];
		@$op{qw(event attempt)} = @$taken{qw(event attempt)};
		return "${effect}SELECT idempotency.ack($op->{event}, $op->{attempt})" if $do eq 'ack';
		return "${effect}SELECT idempotency.extend_event($op->{event}, $op->{attempt}, $ms)" if $do eq 'extend_event';
		return "${effect}SELECT idempotency.nack($op->{event}, $op->{attempt}, '0', 'model')";
	}

	# the caller's own unique index
	$op->{key} = "r$h->{round}i$op->{key}";
	return "SELECT created, (stored).n FROM idempotency.insert_once(NULL::item, jsonb_build_object('key', '$op->{key}', 'n', $n))" if $do eq 'item';
	return "${effect}DELETE FROM item WHERE key = '$op->{key}' RETURNING n" if $do eq 'delete_item';
	die "what is $do?\n";
}

# ---------------------------------------------- what a session knows afterwards

# What an operation that succeeded changes in what the driver knows: own, by
# key, is what this transaction has done with it: {open}, {answer}, {leased}.
sub learn
{
	my ($session, $op) = @_;
	my $tx = $op->{tx};
	my $do = $op->{do};
	my ($first, @more) = @{ $op->{rows}[0] // [] };
	my $own = $tx->{own};

	if ($do eq 'savepoint') { push @{ $tx->{saves} }, { own => {%$own}, ops => scalar @{ $tx->{ops} } }; }
	elsif ($do eq 'release_savepoint') { splice @{ $tx->{saves} }, $op->{depth}; }
	elsif ($do eq 'rollback_to')
	{
		splice @{ $tx->{saves} }, $op->{depth} + 1;
		my $save = $tx->{saves}[ $op->{depth} ];
		$tx->{own} = { %{ $save->{own} } };
		@$_{qw(undone freed)} = @$op{qw(inv ret)} for grep { $_ != $op && !$_->{undone} } @{ $tx->{ops} }[ $save->{ops} .. $#{ $tx->{ops} } ];
	}
	elsif ($do eq 'claim')
	{
		$op->{got} = $first eq 'claimed';
		$own->{ $op->{key} } = { open => $op } if $op->{got};
	}
	elsif ($do eq 'settle')
	{
		$op->{effect} = 1;
		$op->{claim} = $own->{ $op->{key} }{open};
		$own->{ $op->{key} } = { answer => $op };
	}
	elsif ($do eq 'fenced_settle')
	{
		$op->{effect} = !$op->{again};
		$op->{claim} = $op->{grant}{op};
		$own->{ $op->{key} } = { answer => $op } unless $op->{again};
	}
	elsif ($do eq 'once')
	{
		$op->{got} = $op->{effect} = defined $first;
		$op->{claim} = $op;
		$own->{ $op->{key} } = { answer => $op } if $op->{got};
	}
	elsif ($do eq 'run')
	{
		$op->{got} = $op->{effect} = $first =~ /^(completed|failed)$/ && $more[2] eq 'f';
		$op->{claim} = $op;
		$op->{recorded} = $first eq 'failed';
		$own->{ $op->{key} } = { answer => $op } if $op->{got};
	}
	elsif ($do eq 'release' || $do eq 'fenced_release' || $do eq 'forget')
	{
		delete $own->{ $op->{key} } if $first eq 't';
	}
	elsif ($do eq 'lease' && $first eq 'claimed')
	{
		@$op{qw(got fence deadline attempt checkpoint)} = (1, @more[ 2 .. 5 ]);
		# that of a lock is not told: between these
		$op->{latest} = $op->{deadline} // $op->{ret} + 1000 * $op->{lease};
		$op->{deadline} //= $op->{inv} + 1000 * $op->{lease};
		push @{ $h->{grants}{ $op->{key} } }, { s => $op->{s}, fence => $op->{fence}, op => $op };
		$own->{ $op->{key} } = { leased => $op };
	}
	elsif ($do eq 'extend' || $do eq 'checkpoint')
	{
		# who shows the fence holds the key in this transaction too, unless it has ended the lease
		$op->{deadline} = $first if $do eq 'extend';
		$own->{ $op->{key} } = { leased => $op->{grant}{op} } unless !defined $first && $own->{ $op->{key} }{answer};
	}
	elsif ($do eq 'issue') { push @{ $h->{tokens} }, { text => $first, expires => $more[0], subject => $op->{subject}, op => $op }; }
	elsif ($do eq 'consume') { $op->{got} = $first eq 'consumed'; }
	elsif ($do eq 'edit') { $h->{version}{ $op->{row} } = $more[1] if defined $more[1]; }
	elsif ($do eq 'emit') { $op->{event} = $first; }
	elsif ($do eq 'extend_event') { $op->{extended} = defined $first; }
	elsif ($do eq 'take') { push @{ $h->{taken} }, map { { s => $op->{s}, event => $_->[0], attempt => $_->[1] } } @{ $op->{rows} }; }
	elsif ($do eq 'item') { $op->{got} = $first eq 't'; }
	# it has undone what it did
	elsif ($do eq 'attack') { $op->{freed} = $op->{ret}; }
	return;
}

# ------------------------------------------------------ from outside, and the end

sub command
{
	my ($step) = @_;
	if ($upkeep{ $step->{do} })
	{
		my $op = { do => $step->{do}, n => ++$serial, inv => now() - 1, rows => [], sql => $upkeep{ $step->{do} } };
		my $answer = $control->try($op->{sql});
		@$op{qw(ret error message rows)} = (now() + 1, @$answer{qw(error message rows)});
		if ($op->{error})
		{
			$control->try('ROLLBACK');
			wrong("$op->{do}: $op->{error} $op->{message}") unless $op->{do} =~ /^reattach/ && $op->{error} =~ /^(55P03|40P01)$/;
		}
		push @{ $h->{ops} }, $op;
	}
	elsif ($step->{do} eq 'resolve')
	{
		my @open = grep { $_->{prepared} && $_->{outcome} eq 'open' } @{ $h->{prepared} };
		resolve($open[ $step->{which} % @open ], $step->{commit}) if @open;
	}
	else
	{
		my $session = $sessions[ $step->{victim} ];
		$session->{wire}{ $step->{do} eq 'cancel' ? 'cancelled' : 'ended' } = 1;
		my $op = { do => $step->{do}, n => ++$serial, inv => now(), rows => [], sql => "SELECT pg_$step->{do}_backend(session $session->{n})" };
		push @{ $h->{ops} }, $op;
		$control->ask("SELECT pg_$step->{do}_backend(" . $session->{wire}->pid . ')');
		$op->{ret} = now();
	}
	return;
}

# COMMIT or ROLLBACK PREPARED; true if it was there.
sub resolve
{
	my ($tx, $commit) = @_;
	my $verb = $commit ? 'COMMIT' : 'ROLLBACK';
	my $op = { do => 'resolve', n => ++$serial, inv => now() - 1, rows => [], sql => "$verb PREPARED '$tx->{gid}'" };
	my $answer = $control->try($op->{sql});
	@$op{qw(ret error message)} = (now() + 1, @$answer{qw(error message)});
	push @{ $h->{ops} }, $op;
	if (!$answer->{error})
	{
		$tx->{c_inv} = $op->{inv};
		outcome($tx, $commit ? 'committed' : 'aborted', $op->{ret});
	}
	elsif ($tx->{prepared}) { wrong("a prepared transaction was not to be found: $answer->{message}"); }
	return !$answer->{error};
}

# Lets every session come to its end: what is open is rolled back.
sub finish
{
	my $until = Time::HiRes::time() + PATIENCE;
	while (1)
	{
		for my $session (@sessions)
		{
			feed($session);
			next if $session->{op} || !$session->{tx};
			unshift @{ $session->{queue} }, { s => $session->{n}, do => 'rollback' };
			feed($session);
		}
		for my $tx (@{ $h->{prepared} })
		{
			next if $tx->{outcome} ne 'open';
			# lost at PREPARE: it may or may not be there
			my ($lost) = grep { $_->{do} eq 'prepare' && $_->{lost} } @{ $tx->{ops} };
			if ($tx->{prepared}) { resolve($tx, $tx->{ops}[0]{n} % 2); }
			elsif ($lost && !resolve($tx, 1)) { outcome($tx, 'aborted', now()); }
		}
		last unless grep { $_->{op} || $_->{tx} || @{ $_->{queue} } } @sessions;
		next if pump(0.05) || Time::HiRes::time() < $until;
		wrong('stuck: ' . join '; ', map { "session $_->{n} at operation $_->{op}{n}" } grep { $_->{op} } @sessions);
		for my $session (@sessions)
		{
			$session->{wire}{ended} = 1;
			$control->ask('SELECT pg_terminate_backend(' . $session->{wire}->pid . ')');
		}
		$until += PATIENCE;
	}
	return;
}

# Reads what is in the tables, and empties them.
sub tally
{
	my $at = { map { $_->[0] => $_->[1] } @{ $control->ask('SELECT n, count(*) FROM effect GROUP BY n') } };
	my $found = { effect => $at };
	$found->{audit} = $control->ask('SELECT kind, id, n, old, new FROM audit ORDER BY seq');
	$found->{rows} = $control->ask(q{SELECT 'doc', id, state FROM doc WHERE id > 0 UNION ALL SELECT 'ware', id, version::text FROM ware
		UNION ALL SELECT 'resource', id, fence::text FROM resource});
	$found->{items} = { map { $_->[0] => $_->[1] } @{ $control->ask('SELECT key, n FROM item') } };
	$found->{log} = $control->ask(q{SELECT row_id #>> '{}', from_state, to_state, event FROM idempotency.transition_log
		WHERE table_name = 'public.doc' AND (row_id #>> '{}')::bigint > 0 ORDER BY id});
	$found->{inserted} = { map { $_->[0] => 1 } @{ $control->ask('SELECT n FROM doc WHERE id < 0') } };
	$found->{off_graph} = $control->ask("SELECT count(*) FROM idempotency.off_graph('doc')")->[0][0];
	my $keys = Model::Plan::KEYS - 1;
	$found->{keys} = { map { $_->[0] => [ @$_[ 1 .. 4 ] ] } @{ $control->ask(
		"SELECT key, l.status, l.response, l.meta ->> 'message', l.fence FROM unnest(ARRAY[" . join(', ', map { "'" . key_name($_) . "'" } 0 .. $keys)
		  . "]) key, idempotency.lookup('model', key) l") } };
	for my $token (@{ $h->{tokens} })
	{
		$token->{looked}[0] = now() - 1;
		$token->{finally} = $control->ask("SELECT status FROM idempotency.check_token('$token->{text}', '$token->{subject}', 'model')")->[0][0];
		$token->{looked}[1] = now() + 1;
	}
	drain($found);
	$found->{locks} = $control->ask(q{SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
		WHERE locktype = 'advisory' AND datname = current_database()})->[0][0];
	my $print = join ' ', @{ $control->ask(Model::Hostile::fingerprint_sql())->[0] };
	$fingerprint //= $print;
	wrong('an attack has left something: ', $print) if $print ne $fingerprint;
	$found->{tally_inv} = now();
	my @tables = qw(effect audit doc ware resource item idempotency.transition_log);
	# cheap, but they must not grow for ever
	$control->ask($h->{round} % 25 ? join '; ', map { "DELETE FROM $_" } @tables : 'TRUNCATE ' . join ', ', @tables);
	$h->{found} = $found;

	# what became of transactions whose session died at COMMIT
	for my $tx (@{ $h->{txs} })
	{
		next if $tx->{outcome} ne 'unknown';
		my @sure = grep { !$_->{undone} && !$_->{error} && ($_->{sql} =~ /^INSERT INTO effect VALUES/ || $_->{effect}) } @{ $tx->{ops} };
		my @there = grep { $at->{ $_->{n} } } @{ $tx->{ops} };
		if (@there)
		{
			outcome($tx, 'committed', $tx->{end});
			# the answer did not arrive: this is it
			for my $op (grep { $_->{lost} && $_->{do} =~ /^(settle|fenced_settle|once|run|consume)$/ } @there)
			{
				$op->{got} = $op->{effect} = 1;
				$op->{claim} = $op->{do} eq 'settle' ? $op->{own}{ $op->{key} }{open} : $op->{do} eq 'fenced_settle' ? $op->{grant}{op} : $op;
			}
		}
		elsif (@sure) { outcome($tx, 'aborted', $tx->{end}); }
	}
	return;
}

# Delivers what is left in the outbox, key by key in its order.
sub drain
{
	my ($found) = @_;
	$found->{delivered} = [];
	my $topic = "'r$h->{round}'";
	my $until = Time::HiRes::time() + PATIENCE;
	my $left = "SELECT count(*) FROM idempotency.outbox WHERE topic = $topic";
	return unless grep { $_->{do} eq 'emit' } @{ $h->{ops} };
	while ($control->ask($left)->[0][0] > 0)
	{
		$control->ask("SELECT idempotency.retry_parked($topic)");
		my $rows = $control->ask("SELECT id, attempt, key, payload ->> 'n' FROM idempotency.take($topic, 1000)");
		for my $row (@$rows)
		{
			push @{ $found->{delivered} }, $row;
			wrong("event $row->[0] could not be acknowledged in the end")
			  if $control->ask("SELECT idempotency.ack($row->[0], $row->[1])")->[0][0] ne 't';
		}
		next if @$rows;
		if (Time::HiRes::time() > $until)
		{
			wrong('events are left that are never due');
			last;
		}
		Time::HiRes::sleep(0.002);
	}
	return;
}

1;
