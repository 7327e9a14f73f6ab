# Random histories against a model: eight sessions call every function in random
# transactions, at all isolation levels, with savepoints, PREPARE, cancels and
# kills, and purge at work beside them, and so are three sessions of a hostile role,
# which has nothing but usage (Model/Hostile.pm).  What each was told, and when, is checked
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
#   IDEMPOTENCY_MODEL_JOBS        how many histories are made at once, each in a
#                                 database of its own (1)
#   IDEMPOTENCY_MODEL_LENGTH      the steps of a history (300)
#   IDEMPOTENCY_MODEL_SHRINK      how many seconds a failure is shrunk (120)
use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";

use IO::Select;
use Model::Check;
use Model::Hostile;
use Model::Plan;
use Model::Run;
use POSIX ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $operations = $ENV{IDEMPOTENCY_MODEL_OPERATIONS};
my $seconds = $ENV{IDEMPOTENCY_MODEL_SECONDS} || 10;
my $jobs = $ENV{IDEMPOTENCY_MODEL_JOBS} || 1;
my $length = $ENV{IDEMPOTENCY_MODEL_LENGTH} || 300;
my $seed = $ENV{IDEMPOTENCY_MODEL_SEED} || int rand 2**31;
note "seed $seed";

my $node = PostgreSQL::Test::Cluster->new('model');
my $connections = 20 * $jobs + 20;
$node->init;
$node->append_conf('postgresql.conf', qq{
max_connections = $connections
max_prepared_transactions = $connections
deadlock_timeout = 10ms
idempotency.outbox_max_attempts = 3
log_min_error_statement = panic
log_line_prefix = '%m [%p] %e '
log_statement = none
log_connections = off
log_disconnections = off
});
$node->start;
my $superuser = $node->safe_psql('postgres', 'SELECT current_user');
$node->safe_psql('postgres', Model::Run::role_sql());

# what there has to be in a run that goes by the clock, however slow it is
my @kinds = (qw(claim settle once run lookup lease extend checkpoint fenced_settle fenced_release guarded move fire edit
	consume check revoke emit take ack ack_all nack extend_event wait item commit rollback rollback_to prepare resolve cancel terminate purge),
	'error IK001', 'error IK002', 'error IK003', map { "attack $_" } Model::Hostile::names());
my ($begin, $took, $histories, $done, %did, @wrong) = (time, 0, 0, 0);
my $shown = $begin;
my $enough = $node->basedir . '/enough';
my %told;		# what a job has written, by its file descriptor
my %running = map { fileno($_) => $_ } map { start($_) } 0 .. $jobs - 1;
while (%running)
{
	for my $from (IO::Select->new(values %running)->can_read(1))
	{
		my $fd = fileno $from;
		if (sysread $from, $told{$fd}, 65536, length($told{$fd} // ''))
		{
			hear($1) while $told{$fd} =~ s/^(.*)\n//;
			next;
		}
		delete $running{$fd};
		close $from or push @wrong, 'a process of the test ended with an error';
	}
	$took = time - $begin;
	my $over = @wrong || ($operations ? $done >= $operations
		: time >= $begin + $seconds && !(grep { !$did{$_} } @kinds) || time > $begin + 10 * $seconds + 60);
	append_to_file($enough, '') if $over;
	next if time < $shown + 60;
	$shown = time;
	note sprintf '%s: %d operations in %d histories, %d of them attacks', scalar localtime, $done, $histories, attacks();
}

note sprintf '%d operations in %d histories, %.0f per second, %d of them attacks', $done, $histories, $done / $took, attacks();
note join ', ', map { "$_ $did{$_}" } sort keys %did;
is(join("\n", @wrong), '', "$done operations went by the model");
if (!$operations && !@wrong)
{
	cmp_ok($did{$_} // 0, '>', 0, "there was: $_") for @kinds;
}
$node->stop;
# a session may be gone before it is ended
is(join('', grep { /TRAP|PANIC|terminated by signal| (?:P0666|XX\w{3}) |WARNING: (?!.*is not a PostgreSQL)/ } split /^/, slurp_file($node->logfile)),
	'', 'no warning in the server\'s log');
done_testing();

# What a job tells in a line.
sub hear
{
	my ($what, @counts) = split /\t/, $_[0];
	if ($what eq 'wrong') { push @wrong, @counts; return; }
	$histories++;
	for (@counts)
	{
		my ($kind, $n) = /(.*)=(\d+)/;
		$did{$kind} += $n;
		$done += $n if $kind !~ /^error /;
	}
	return;
}

sub attacks
{
	my $n = 0;
	$n += $did{$_} for grep { /^attack/ } keys %did;
	return $n;
}

# A process that makes histories until there are enough.  It tells of each what
# was done in it, and at last what was wrong.
sub start
{
	my ($job) = @_;
	$node->safe_psql('postgres', "CREATE DATABASE model$job");
	$node->safe_psql("model$job", Model::Run::setup_sql());
	my $pid = open(my $from, '-|') // die "fork: $!";
	return $from if $pid;

	my $failed = !eval { make_histories($job); 1 };
	diag "job $job: $@" if $failed;
	close STDOUT;
	# the server is not this process's to stop
	POSIX::_exit($failed);
}

sub make_histories
{
	my ($job) = @_;
	STDOUT->autoflush(1);
	Model::Run::connect(host => $node->host, port => $node->port, superuser => $superuser, dbname => "model$job");
	for (my $number = $job; !-e $enough; $number += $jobs)
	{
		my $plan = Model::Plan::make($seed + $number, $length);
		my $history = Model::Run::play($plan);
		my @wrong = Model::Check::check($history);
		my %count;
		for my $op (@{ $history->{ops} })
		{
			$count{ $op->{do} eq 'attack' ? "attack $op->{what}" : $op->{do} }++;
			$count{"error $op->{error}"}++ if $op->{error};
		}
		print join("\t", 'history', map { "$_=$count{$_}" } sort keys %count), "\n";
		next unless @wrong;
		@wrong = shrink($seed + $number, $plan, $history, @wrong);
		print join("\t", 'wrong', map { s/\s+/ /gr } @wrong), "\n";
		last;
	}
	Model::Run::disconnect();
	return;
}

# Leaves out what is not needed for a failure, shows the rest, and returns
# what is wrong with it.
sub shrink
{
	my ($failing_seed, $plan, $history, @wrong) = @_;
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
		for my $s (0 .. Model::Plan::SESSIONS + Model::Plan::HOSTILE - 1)
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
	return @wrong;
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
