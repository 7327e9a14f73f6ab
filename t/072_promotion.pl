# The primary dies in the middle of a payment run, and its synchronous standby is
# promoted.  The clients retry until they have an answer, from either server:
# every payment is made once, and every answer that a client has ever got is the
# one that is stored.  (What an asynchronous standby may lose, it loses together
# with its work: t/013_lost_reply.pl.)
use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time sleep);

my $clients = 6;

my $primary = PostgreSQL::Test::Cluster->new('primary');
$primary->init(allows_streaming => 1);
$primary->append_conf('postgresql.conf', q{
log_min_messages = fatal
log_min_error_statement = panic
log_statement = none
log_connections = off
log_disconnections = off
});
$primary->start;
$primary->safe_psql('postgres', q{
CREATE EXTENSION idempotency;
-- no constraint: a second payment must be possible, to be seen
CREATE TABLE payment (key text, answer text);
CREATE FUNCTION pay(request jsonb) RETURNS text LANGUAGE sql AS $$
  INSERT INTO payment VALUES (request ->> 'key', gen_random_uuid()::text) RETURNING answer
$$;
});
$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;
$primary->append_conf('postgresql.conf', q{synchronous_standby_names = '*'});
$primary->reload;
$primary->poll_query_until('postgres', q{SELECT sync_state = 'sync' FROM pg_stat_replication}) or die 'the standby is not synchronous';

# where the clients find the server
my $dir = $primary->basedir;
sub serve
{
	my ($node) = @_;
	open(my $file, '>', "$dir/server.new") or die $!;
	print $file $node->connstr('postgres');
	close $file;
	rename "$dir/server.new", "$dir/server" or die $!;
	return;
}
serve($primary);

my @pids;
for my $n (1 .. $clients)
{
	my $pid = fork;
	die "fork: $!" unless defined $pid;
	if ($pid == 0)
	{
		client($n);
		POSIX::_exit(0);
	}
	push @pids, $pid;
}

# half of the run on each server
my $answers = sub {
	my $lines = 0;
	for my $n (1 .. $clients) { $lines += () = slurp_file("$dir/client$n") =~ /\n/g if -e "$dir/client$n"; }
	return $lines;
};
my $half = 200;
sleep 0.05 while $answers->() < $half;
my $pid = (split /\n/, slurp_file($primary->data_dir . '/postmaster.pid'))[0];
# all at once, as when the plug is pulled: who saw the postmaster die would no
# longer wait for the standby, and show others what only he has
kill 'STOP', $pid;
my @children = grep { /^\d+$/ } split /\s+/, `ps -o pid= --ppid $pid`;
kill 'STOP', @children;
kill 9, @children, $pid;
$primary->{_pid} = undef;
my $before = $answers->();
$standby->promote;
serve($standby);
sleep 0.05 while $answers->() < $before + $half;
append_to_file("$dir/stop", '');
my $failed = 0;
for (@pids) { waitpid $_, 0; $failed++ if $?; }
is($failed, 0, 'every client got all its answers');

my (%seen, @wrong, $retried);
for my $n (1 .. $clients)
{
	for (split /\n/, slurp_file("$dir/client$n"))
	{
		my ($key, $answer, $tries) = split /\t/;
		$seen{$key}{$answer} = 1;
		$retried++ if $tries > 1;
	}
}
my %stored = map { split /\|/ } split /\n/, $standby->safe_psql('postgres', 'SELECT key, answer FROM payment');
for my $key (keys %seen)
{
	push @wrong, map { "$key: got $_, stored " . ($stored{$key} // 'nothing') } grep { $_ ne ($stored{$key} // '') } keys %{ $seen{$key} };
}
is(join("\n", @wrong), '', 'every answer is the first one');
my $payments = $standby->safe_psql('postgres', 'SELECT count(*) FROM payment');
is($standby->safe_psql('postgres', 'SELECT count(DISTINCT key) FROM payment'), $payments, "$payments payments, none twice");
is($standby->safe_psql('postgres', q{SELECT count(*) FROM idempotency.keys k JOIN payment p USING (key) WHERE k.scope = 'pay' AND k.response = p.answer}),
	$payments, 'each with its key and answer');
is($standby->safe_psql('postgres', q{SELECT count(*) FROM idempotency.keys}), $payments, 'and no key without one');
is(scalar(keys %seen), $payments, 'none that nobody has asked for');
cmp_ok($retried, '>', 0, 'requests were retried over the promotion');

$standby->stop;
done_testing();

# Asks for payments that others ask for too, each until there is an answer.
sub client
{
	my ($n) = @_;
	srand($n);
	open(my $log, '>', "$dir/client$n") or die $!;
	$log->autoflush(1);
	for (my $i = 0; !-e "$dir/stop"; $i++)
	{
		my $key = int($i / 2) . '-' . int(rand(3));
		for (my $tries = 1;; $tries++)
		{
			my $server = slurp_file("$dir/server");
			my $got = `PGCONNECT_TIMEOUT=5 psql -XAtq -d "$server" -c "SELECT response FROM idempotency.run('pay', '$key', 'pay', '{\\"key\\": \\"$key\\"}')" 2>/dev/null`;
			if ($? == 0 && $got =~ /^(\S+)$/)
			{
				print $log "$key\t$1\t$tries\n";
				last;
			}
			sleep 0.05;
		}
	}
	return;
}
