# Random histories against a model: eight sessions call every function in random
# transactions, at all isolation levels, with savepoints, PREPARE, cancels and
# kills, and purge at work beside them.  What each was told, and when, is checked
# afterwards against the contract (Model/Check.pm):
#
#   keys		one effect each, every replay the first answer, another request a
#				mismatch, nothing in progress that nobody is at, no open claim
#				committed
#   leases		none taken over before its deadline, fences only growing, no
#				superseded one accepted
#   machines	no move off the graph, one winner per move, versions without gaps
#   tokens		none consumed twice, or late, or lost by a rollback
#   outbox		no event lost, repeated after its ack, or out of its key's order
#
# A history comes from a seed of its own, and a run prints its first one.  A
# history that fails is shrunk: parts of it are left out, as long as it still
# fails, and what is left is printed.  Timing is the server's, so that a race may
# take some attempts.
#
# Environment:
#   IDEMPOTENCY_MODEL_SECONDS     how long (10)
#   IDEMPOTENCY_MODEL_OPERATIONS  instead: until so many operations were done
#   IDEMPOTENCY_MODEL_SEED        the first history's seed, to see it again: with
#                                 IDEMPOTENCY_MODEL_OPERATIONS=1 only that one
#   IDEMPOTENCY_MODEL_LENGTH      the steps of a history (300)
#   IDEMPOTENCY_MODEL_SHRINK      how many seconds a failure is shrunk (120)
use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";

use Model::Check;
use Model::Plan;
use Model::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $operations = $ENV{IDEMPOTENCY_MODEL_OPERATIONS};
my $seconds = $ENV{IDEMPOTENCY_MODEL_SECONDS} || 10;
my $length = $ENV{IDEMPOTENCY_MODEL_LENGTH} || 300;
my $seed = $ENV{IDEMPOTENCY_MODEL_SEED} || int rand 2**31;
note "seed $seed";

my $node = PostgreSQL::Test::Cluster->new('model');
$node->init;
$node->append_conf('postgresql.conf', q{
max_connections = 40
max_prepared_transactions = 100
deadlock_timeout = 10ms
idempotency.outbox_max_attempts = 3
log_min_error_statement = panic
log_statement = none
log_connections = off
log_disconnections = off
});
$node->start;
$node->safe_psql('postgres', Model::Run::setup_sql());
my $superuser = $node->safe_psql('postgres', 'SELECT current_user');
Model::Run::connect(host => $node->host, port => $node->port, superuser => $superuser);

my ($begin, $took, $histories, $done, %did, @wrong) = (time, 0, 0, 0);
# at least, so that it does what it says also where it is slow
my @kinds = (qw(claim settle once run lookup lease extend checkpoint fenced_settle fenced_release guarded move fire edit
	consume check revoke emit take ack ack_all nack extend_event wait item commit rollback rollback_to prepare resolve cancel terminate purge),
	'error IK001', 'error IK002', 'error IK003');
until (@wrong || ($operations ? $done >= $operations
	: time >= $begin + $seconds && !(grep { !$did{$_} } @kinds) || time > $begin + 10 * $seconds + 60))
{
	my $plan = Model::Plan::make($seed + $histories, $length);
	my $history = Model::Run::play($plan);
	@wrong = Model::Check::check($history);
	$histories++;
	for my $op (@{ $history->{ops} })
	{
		$done++;
		$did{ $op->{do} }++;
		$did{ 'error ' . $op->{error} }++ if $op->{error};
	}
	$took = time - $begin;
	shrink($seed + $histories - 1, $plan, $history) if @wrong;
}

note sprintf '%d operations in %d histories, %.0f per second', $done, $histories, $done / $took;
note join ', ', map { "$_ $did{$_}" } sort keys %did;
is(join("\n", @wrong), '', "$done operations went by the model");
if (!$operations && !@wrong)
{
	cmp_ok($did{$_} // 0, '>', 0, "there was: $_") for @kinds;
}
Model::Run::disconnect();
$node->stop;
# a session may be gone before it is ended
is(join('', grep { /WARNING: (?!.*is not a PostgreSQL)/ } split /^/, slurp_file($node->logfile)), '', 'no warning in the server\'s log');
done_testing();

# Leaves out what is not needed for a failure, and shows the rest.
sub shrink
{
	my ($failing_seed, $plan, $history) = @_;
	diag "the history of seed $failing_seed failed: $wrong[0]";
	my $whole = $plan;
	my $until = time + ($ENV{IDEMPOTENCY_MODEL_SHRINK} // 120);
	my $attempts = 10;
	# the same complaint, with other numbers in it
	my $kind = sub { return $_[0] =~ s/-?\d+|\b(NEW|PAID|SHIPPED|REFUNDED)\b//gr; };
	my $complaint = $kind->($wrong[0]);
	my $fails = sub {
		my ($part) = @_;
		for (1 .. $attempts)
		{
			return 0 if time > $until;
			my $new = Model::Run::play($part);
			my @new = sort { ($kind->($b) eq $complaint) <=> ($kind->($a) eq $complaint) } Model::Check::check($new);
			next unless @new && $kind->($new[0]) eq $complaint;
			($plan, $history, @wrong) = ($part, $new, @new);
			return 1;
		}
		return 0;
	};

	if ($fails->([@$plan]))
	{
		for my $s (0 .. Model::Plan::SESSIONS - 1)
		{
			$fails->([ grep { ($_->{s} // -1) != $s } @$plan ]);
		}
		for (my $size = int(@$plan / 2); $size; $size = int($size / 2))
		{
			for (my $at = 0; $at < @$plan;)
			{
				my @part = @$plan;
				splice @part, $at, $size;
				$at += $size unless $fails->(\@part);
			}
		}
	}
	my @shown = @{ $history->{ops} };
	if ($plan == $whole)
	{
		diag 'it did not fail again; this is what it did to the same thing';
		my ($named) = grep { $wrong[0] =~ /operation $_->{n}\b/ } @shown;
		@shown = grep { related($_, $named) } @shown if $named;
	}
	diag "$_" for 'what it takes:', map { line($_, $history) } @shown;
	diag "wrong: $_" for @wrong;
	return;
}

# Is it about the same key, row, token or event, or of the same transaction?
sub related
{
	my ($op, $named) = @_;
	for my $thing (qw(key row token event subject tx))
	{
		return 1 if defined $op->{$thing} && defined $named->{$thing} && $op->{$thing} eq $named->{$thing};
	}
	return 0;
}

# An operation: when, who, what, and the answer.
sub line
{
	my ($op, $history) = @_;
	my $start = $history->{ops}[0]{inv};
	my $answer = $op->{lost} ? 'lost'
	  : $op->{error} ? "ERROR $op->{error}: $op->{message}"
	  : join ' | ', map { join ', ', map { $_ // 'NULL' } @$_ } @{ $op->{rows} };
	return sprintf '%8.3f-%.3f ms  %s  %s: %s  => %s%s', ($op->{inv} - $start) / 1000, ($op->{ret} > 8e18 ? 0 : $op->{ret} - $start) / 1000,
	  defined $op->{s} ? "session $op->{s}" : 'outside  ', $op->{n}, $op->{sql}, $answer, $op->{undone} ? ' (undone)' : '';
}
