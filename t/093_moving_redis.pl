
# Moving here from Redis while requests go on, as doc/moving.md teaches it: old code,
# which is told to end; beside it the bridge, whose processes die at any point; the
# import by examples/from_redis; the new code.  Every key is paid once, and all its
# retries get the same answer.
#
# MOVING_KEYS from the environment: the keys that are there before, 20000 unless set.
#
# Needs redis-server, and psycopg 3 and redis-py for /usr/bin/python3.

use strict;
use warnings;

use File::Basename qw(dirname);
use IPC::Run qw(run start);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

my $here = dirname(__FILE__);
plan skip_all => 'no redis-server' if !grep { -x "$_/redis-server" } split /:/, $ENV{PATH};
plan skip_all => 'no psycopg 3 or redis-py'
  if system('/usr/bin/python3 -c "import redis, psycopg" 2>/dev/null') != 0;

my $keys = $ENV{MOVING_KEYS} // 20_000;
my $seconds = $keys > 100_000 ? 20 : 2;    # of each step
my $deaths = 0;
my $socket = PostgreSQL::Test::Utils::tempdir_short() . '/redis';
my $redis = start [ 'redis-server', '--port', 0, '--unixsocket', $socket, '--save', '', '--loglevel', 'warning' ], '>&', \my $redis_log;
for (1 .. 200) { last if -S $socket; sleep 0.05; }

my $node = PostgreSQL::Test::Cluster->new('moving');
$node->init;
$node->append_conf('postgresql.conf', "fsync = on\nshared_buffers = '1GB'\nmax_wal_size = '4GB'") if $keys > 100_000;
$node->start;
$ENV{PGHOST} = $node->host;
$ENV{PGPORT} = $node->port;
$ENV{PGDATABASE} = 'postgres';
$node->safe_psql('postgres', qq{
	CREATE EXTENSION idempotency;
	CREATE TABLE payment (id bigint GENERATED ALWAYS AS IDENTITY, order_no text, amount numeric);
	CREATE TABLE answer (k integer, way text, response text);
	INSERT INTO payment (order_no, amount) SELECT 'k' || i, 1 FROM generate_series(1, $keys) i;
	INSERT INTO answer SELECT substr(order_no, 2)::integer, 'old', format('{"payment": %s}', id) FROM payment;
});
my $answers = join '', map { my ($k, $answer) = split /\|/, $_, 2; "SET idem:k$k '$answer' EX 86400\n" }
  split /\n/, value('SELECT k, response FROM answer');
redis("$answers\nSET idem:theirs lock EX 600\nSET idem:endless '{}'\nSET other:1 '{}' EX 600\n");

my @old = map { client('old') } 1 .. 2;
sleep $seconds;
my @bridge = map { client('bridge') } 1 .. 3;
pass_time($seconds);
stop($_) for splice @old;
pass_time($seconds);
my $begun = time;
my $report = import_keys();
my $took = time - $begun;
like($report, qr/^\d+ imported, \d+ here already, \d+ locks, 1 without an end, 0 gone meanwhile$/, 'the import reports');
my ($imported) = $report =~ /(\d+)/;
cmp_ok($imported, '>', 0, 'keys were imported');
is(value("SELECT status FROM idempotency.lookup('pay', 'theirs')"), '', 'a lock is none of them');
my @new = map { client('new') } 1 .. 2;
pass_time($seconds);
stop($_) for splice @bridge;
like(import_keys(), qr/^0 imported, /, 'and finds nothing more later');
redis("FLUSHALL\n");
sleep $seconds;
stop($_) for splice @new;

is(value(q{SELECT count(*) FROM (SELECT FROM payment GROUP BY order_no HAVING count(*) > 1) p}), '0', 'no key was paid twice');
is(value(q{SELECT count(*) FROM (SELECT FROM answer GROUP BY k HAVING count(DISTINCT response) > 1) a}), '0', 'no key had two answers');
is(value('SELECT count(DISTINCT way) FROM answer'), '3', 'by three ways');
cmp_ok(value('SELECT count(*) FROM (SELECT FROM answer GROUP BY k HAVING count(DISTINCT way) > 1) a'), '>', 0, 'some keys by more than one');
cmp_ok($deaths, '>', 0, 'the bridge has died meanwhile');
note sprintf('%d keys imported in %.0f s, while the bridge was asked; %d deaths of it; %d answers in all',
	$imported, $took, $deaths, value('SELECT count(*) FROM answer'));

$node->stop;
$redis->signal('KILL');
$redis->finish;
done_testing();

sub value { return $node->safe_psql('postgres', $_[0]); }

sub redis
{
	my ($commands) = @_;
	my $printed;

	run [ 'redis-cli', '-s', $socket ], '<', \$commands, '>&', \$printed or die "redis-cli: $printed";
	unlike($printed, qr/^\(?(ERR|error)/m, 'Redis takes it');
}

sub import_keys
{
	local $ENV{REDIS_URL} = "unix://$socket";
	my $printed;

	run [ "$here/../examples/from_redis", 'idem:*', 'pay' ], '>&', \$printed or die $printed;
	chomp $printed;
	return $printed;
}

sub client
{
	my ($way) = @_;
	my $log = '';

	return { way => $way, log => \$log,
		harness => start([ '/usr/bin/python3', "$here/093_moving_redis.py", $way, 2 * $keys, $socket ], '>&', \$log) };
}

# pass_time(seconds): and replace the bridges that have died.
sub pass_time
{
	my $until = time + $_[0];

	while (time < $until)
	{
		sleep 0.1;
		for my $client (@bridge)
		{
			$client->{harness}->pump_nb;
			next if $client->{harness}->pumpable;
			$client->{harness}->finish;
			is(${ $client->{log} }, '', 'a bridge died without a word') if ${ $client->{log} } ne '';
			$client = client('bridge');
			$deaths++;
		}
	}
}

sub stop
{
	my ($client) = @_;

	$client->{harness}->signal('TERM');
	$client->{harness}->finish;
	is(${ $client->{log} }, '', "no error in $client->{way}");
}
