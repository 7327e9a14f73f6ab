
# Moving here from a table of keys while requests go on, as doc/moving.md teaches
# it: old code, then old code beside the bridge, the bridge alone while the keys are
# imported (by a session that is killed on the way, and another), the bridge beside
# the new code, and the new code alone.  Throughout, every key is paid once, and all
# its retries get the same answer, from either code.
#
# MOVING_KEYS from the environment: the keys that are there before, 20000 unless set.
# With a million it is what the page's figures are from; these are printed.

use strict;
use warnings;

use File::Basename qw(dirname);
use IPC::Run qw(run start);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

my $keys = $ENV{MOVING_KEYS} // 20_000;
my $seconds = $keys > 100_000 ? 20 : 2;    # of each step
my $node = PostgreSQL::Test::Cluster->new('moving');
$node->init;
$node->append_conf('postgresql.conf', "fsync = on\nshared_buffers = '1GB'\nmax_wal_size = '4GB'") if $keys > 100_000;
$node->start;
for my $page ('README.md', 'doc/moving.md')
{
	my $sql = join "\n", slurp_file(dirname(__FILE__) . "/../$page") =~ /^```sql\n(.*?)^```/gms;

	run [ 'psql', '-XAtq', '-d', $node->connstr('postgres') ], '<', \$sql, '>&', \my $printed;
}

my %script;
my $request = q{jsonb_build_object('order', 'k' || :k, 'amount', 1)};
my %call = (
	old => "(SELECT pay_old('k' || :k, $request) AS response) c",
	bridge => "pay_bridge('k' || :k, $request) c WHERE status = 'completed'",
	new => "idempotency.run('pay', 'k' || :k, 'pay', $request, wait => '5 s') c WHERE status = 'completed'");
for my $way (keys %call)
{
	$script{$way} = $node->basedir . "/$way.sql";
	append_to_file($script{$way}, "\\set k random(1, :keys)\nINSERT INTO answer SELECT :k, '$way', response FROM $call{$way}");
}

my %doubled = (
	keys => q{SELECT count(*) FROM (SELECT FROM payment WHERE order_no LIKE 'k%' GROUP BY order_no HAVING count(*) > 1) p},
	answers => q{SELECT count(*) FROM (SELECT FROM answer GROUP BY k HAVING count(DISTINCT response) > 1) a});

# ------------------------------- it would be noticed if old and new code had no bridge
prepare(0);
my @wrong = map { requests($_, 50) } qw(old new);
sleep 2;
stop($_) for @wrong;
cmp_ok(value($doubled{$_}), '>', 0, "without a bridge there are doubled $_") for sort keys %doubled;

# ------------------------------------------------------------------------ moving
prepare($keys);
my $old = requests('old');
sleep $seconds;
my $bridge = requests('bridge');
sleep $seconds;
stop($old);
sleep $seconds;

my $before = value('SELECT count(*) FROM answer');
my $alone = time;
sleep $seconds;
my $rate = (value('SELECT count(*) FROM answer') - $before) / (time - $alone);

cmp_ok($rate, '>', 0, 'requests go on');
my $killed = start [ 'psql', '-XAtq', '-d', $node->connstr('postgres') . ' application_name=import', '-c', 'CALL import_keys(1)' ], '>&', \my $output;
$node->poll_query_until('postgres', "SELECT count(*) > 500 FROM idempotency.keys WHERE scope = 'pay'");
value("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'import'");
ok(!$killed->finish, 'an import is killed');

my ($begun, $answered) = (time, value('SELECT count(*) FROM answer'));
$node->safe_psql('postgres', 'CALL import_keys()');
my $took = time - $begun;
my $meanwhile = (value('SELECT count(*) FROM answer') - $answered) / $took;
is(value(q{SELECT count(*) FROM idempotency_key WHERE expires_at > clock_timestamp() + interval '1 s' AND idempotency.lookup('pay', key) IS NULL}),
	'0', 'another imports what is left');
is(value(q{SELECT count(*) FROM idempotency_key k, idempotency.lookup('pay', k.key) l WHERE l.response <> k.response::text}),
	'0', 'with its answers');

my $new = requests('new');
sleep $seconds;
stop($bridge);
$node->safe_psql('postgres', 'DROP TABLE idempotency_key');
sleep $seconds;
stop($new);

is(value($doubled{keys}), '0', 'no key was paid twice');
is(value($doubled{answers}), '0', 'no key had two answers');
is(value('SELECT count(DISTINCT way) FROM answer'), '3', 'by three ways');
cmp_ok(value('SELECT count(*) FROM (SELECT FROM answer GROUP BY k HAVING count(DISTINCT way) > 1) a'), '>', 0, 'some keys by more than one');
note sprintf('%d keys imported in %.0f s (%.0f a second), 4 clients meanwhile at %.0f requests a second, before at %.0f; %d requests in all',
	$keys, $took, $keys / $took, $meanwhile, $rate, value('SELECT count(*) FROM answer'));

$node->stop;
done_testing();

sub value { return $node->safe_psql('postgres', $_[0]); }

# prepare(keys): that many, paid and answered in the old table, and no others.
sub prepare
{
	my ($keys) = @_;

	$node->safe_psql('postgres', qq{
		DROP TABLE IF EXISTS answer;
		CREATE TABLE answer (k integer, way text, response text);
		TRUNCATE idempotency_key, payment;
		SELECT idempotency.forget('pay', key) FROM idempotency.keys WHERE scope = 'pay';
		INSERT INTO payment (order_no, amount) SELECT 'k' || i, 1 FROM generate_series(1, $keys) i;
		INSERT INTO idempotency_key
		SELECT order_no, jsonb_build_object('order', order_no, 'amount', 1), jsonb_build_object('payment', id, 'amount', amount), now() + interval '1 day'
		FROM payment;
		INSERT INTO answer SELECT substr(key, 2)::integer, 'old', response FROM idempotency_key;
		ANALYZE payment, idempotency_key, answer;
	});
}

# requests(way, keys): four clients that ask without end, for old keys and new ones.
sub requests
{
	my ($way, $range) = @_;
	my $log = '';

	return { log => \$log,
		harness => start([ 'pgbench', '-n', '-c', 4, '-j', 2, '-T', 3600, '-D', 'keys=' . ($range // 2 * $keys), '-f', $script{$way}, $node->connstr('postgres') ], '>&', \$log) };
}

sub stop
{
	my ($requests) = @_;

	$requests->{harness}->signal('TERM');
	$requests->{harness}->finish;
	unlike(${ $requests->{log} }, qr/ERROR|FATAL|aborted/, 'no request has failed');
}
