# monitoring/: postgres_exporter with our queries, as a role in pg_monitor, scraped
# twice; Prometheus on it, with our rules; the dashboard, whose every series the
# exporter has.  test/monitoring brings the programs of Debian's packages and runs
# this.  Where IDEMPOTENCY_MONITORING_TSV names a file, load runs for
# IDEMPOTENCY_MONITORING_SECONDS (120), and monitoring/draw has what it draws.
use strict;
use warnings;
use HTTP::Tiny;
use IPC::Run;
use JSON::PP;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(sleep time);

my $bin = $ENV{IDEMPOTENCY_MONITORING_BIN} // '/usr/bin';
my ($exporter, $prometheus, $promtool) = map { "$bin/$_" } qw(prometheus-postgres-exporter prometheus promtool);
-x $_ or plan skip_all => "no $_: test/monitoring has it" for $exporter, $prometheus, $promtool;

my $node = PostgreSQL::Test::Cluster->new('primary');
$node->init;
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'idempotency'
idempotency.purge_databases = 'postgres'
idempotency.purge_interval = '1 s'
});
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idempotency;
	CREATE ROLE watch LOGIN IN ROLE pg_monitor;
	SELECT idempotency.once('orders:create:tenant-1', 'k'), idempotency.once('orders:create:tenant-2', 'k');
	SELECT idempotency.emit('mail', '{}');
});

# the exporter, on the socket
my ($port, $web) = map { PostgreSQL::Test::Cluster::get_free_port() } 1, 2;
my $http = HTTP::Tiny->new(timeout => 20);
my (%log, @running);

sub start
{
	my ($what, @command) = @_;
	$log{$what} = '';
	push @running, IPC::Run::start(\@command, '<', \undef, '>&', \$log{$what});
	return;
}
END { local $?; $_->kill_kill for reverse @running }

$ENV{DATA_SOURCE_NAME} = 'user=watch dbname=postgres sslmode=disable host=' . $node->host . ' port=' . $node->port;
start('exporter', $exporter, "--web.listen-address=127.0.0.1:$port", '--extend.query-path=monitoring/queries.yaml',
	'--disable-default-metrics', '--disable-settings-metrics');

# name{labels} => value of what is ours
sub scrape
{
	my $reply;
	for (1 .. 100)
	{
		$reply = $http->get("http://127.0.0.1:$port/metrics");
		last if $reply->{success};
		$_->pump_nb for @running;
		sleep 0.1;
	}
	my %series = $reply->{content} =~ /^(idempotency_[^ ]*) (\S+)$/mg;
	return \%series;
}
my $first = scrape();
ok(keys %$first > 100, 'the exporter has our series: ' . keys %$first) or diag $log{exporter};
$node->safe_psql('postgres', q{
	SELECT idempotency.once('orders:create:tenant-1', 'k') FROM generate_series(1, 5);
	SELECT idempotency.once('orders:create:tenant-1', 'new')});
$node->psql('postgres', q{BEGIN; SELECT idempotency.claim('s', 'open'); COMMIT});
my $second = scrape();

sub grown { my ($series) = @_; return ($second->{$series} // 'none') - ($first->{$series} // 0) }
is(grown('idempotency_calls{datname="postgres",function="once",outcome="completed"' . server_label() . '}'), 5, 'counters grew: replays');
is(grown('idempotency_calls{datname="postgres",function="error",outcome="IK001"' . server_label() . '}'), 1, 'an error');
is(grown('idempotency_calls{datname="postgres",function="claim",outcome="mismatch"' . server_label() . '}'), 0, 'and those of what did not happen are there, for rate()');
is($second->{'idempotency_keys_stored{datname="postgres",scope="orders",' . 'server="' . server() . '",status="completed"}'}, 3, 'keys by the part of their scope before the colon');
is($second->{'idempotency_now_outbox_depth{datname="postgres"' . server_label() . '}'}, 1, 'the outbox');
is($second->{'idempotency_activity_counts{datname="postgres"' . server_label() . '}'}, 1, 'counting is on');
is(scalar(grep { /NaN/ } values %$second), 0, 'each has a number');
my $error = $http->get("http://127.0.0.1:$port/metrics")->{content};
like($error, qr/^pg_exporter_user_queries_load_error\{.*\} 0$/m, 'no query failed to load');
like($error, qr/^pg_exporter_last_scrape_error 0$/m, 'none failed to run') or diag $log{exporter};

# the exporter adds which server it is
sub server { my ($s) = map { /server="([^"]*)"/ } keys %$first; return $s }
sub server_label { return ',server="' . server() . '"' }

# a key that is stuck, and who waits
my $holder = $node->background_psql('postgres');
my $rival = $node->background_psql('postgres', on_error_stop => 0);
$holder->query_safe(q{BEGIN; SELECT idempotency.once('orders:create:tenant-1', 'stuck')});
$rival->query_until(qr/waiting/, "\\echo waiting\nSELECT idempotency.once('orders:create:tenant-1', 'stuck');\n");
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM idempotency.in_flight WHERE waiting_pids IS NOT NULL});
sleep 1;
my $stuck = scrape();
is($stuck->{'idempotency_in_flight_waiting{datname="postgres",mode="transaction"' . server_label() . '}'}, 1, 'a session waits');
cmp_ok($stuck->{'idempotency_in_flight_awaited_seconds{datname="postgres",mode="transaction"' . server_label() . '}'}, '>=', 1, 'for a key that is held so long');
$holder->query_safe('COMMIT');
$holder->quit;
$rival->query('SELECT 1');
$rival->quit;
ok($node->poll_query_until('postgres', q{SELECT rounds > 0 FROM idempotency.purge_rounds}), 'a round of the worker');
my $names = scrape();
my %known = map { /^(\w+)/ ? ($1 => 1) : () } keys %$names;

# the rules, and the dashboard: every series that they read is exported
command_ok([ $promtool, 'check', 'rules', 'monitoring/alerts.yaml' ], 'the rules are rules');
command_ok([ $promtool, 'test', 'rules', 'monitoring/alerts_test.yaml' ], 'each fires beyond its threshold, and not below');
my $rules = slurp_file('monitoring/alerts.yaml');
is(join(' ', grep { !$known{$_} } $rules =~ /\b(idempotency_\w+)[{)\[ ]/g), '', 'the rules read nothing else');
my $dashboard = decode_json(slurp_file('monitoring/dashboard.json'));
my ($ids, @expressions, @taken) = ({});
for my $panel (@{ $dashboard->{panels} })
{
	my ($x, $y, $w, $h) = @{ $panel->{gridPos} }{qw(x y w h)};
	fail("panel $panel->{id} is there twice") if $ids->{ $panel->{id} }++;
	fail("panel $panel->{id} is off the grid") if $x + $w > 24 || $w < 1 || $h < 1;
	for my $i ($x .. $x + $w - 1) { for my $j ($y .. $y + $h - 1) { fail("panel $panel->{id} overlaps") if $taken[$i][$j]++ } }
	fail("panel $panel->{id} has no title, type, data source or series")
	  if grep { !$panel->{$_} } qw(title type datasource targets);
	push @expressions, map { $_->{expr} } @{ $panel->{targets} };
}
my %variables = map { $_->{name} => 1 } @{ $dashboard->{templating}{list} };
is(join(' ', grep { !$variables{$_} && $_ ne '__rate_interval' } map { /\$\{?(\w+)/g } @expressions, map { $_->{datasource}{uid} } @{ $dashboard->{panels} }),
	'', 'the dashboard names no variable that it does not have');
is(join(' ', grep { !$known{$_} } map { /\b(idempotency_\w+)/g } @expressions), '', 'nor a series');
s/\$__rate_interval/1m/g, s/\$(datname|instance)/.*/g for @expressions;
my $checked = $node->basedir . '/dashboard.yaml';
append_to_file($checked, "groups:\n  - name: dashboard\n    rules:\n" . join '', map { "      - record: panel:$_\n        expr: " . encode_json([ $expressions[$_] ]) =~ s/^\[|\]$//gr . "\n" } 0 .. $#expressions);
command_ok([ $promtool, 'check', 'rules', $checked ], 'each of its expressions is one');

# Prometheus itself scrapes, and a rule of ours fires
my $config = $node->basedir . '/prometheus.yaml';
append_to_file($config, <<"YAML");
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: ['$ENV{PWD}/monitoring/alerts.yaml']
scrape_configs:
  - job_name: postgres
    static_configs: [{targets: ['127.0.0.1:$port']}]
YAML
start('prometheus', $prometheus, "--config.file=$config", '--storage.tsdb.path=' . $node->basedir . '/tsdb', "--web.listen-address=127.0.0.1:$web");

sub ask
{
	my ($path) = @_;
	my $reply = $http->get("http://127.0.0.1:$web/api/v1/$path");
	return $reply->{success} ? decode_json($reply->{content})->{data} : undef;
}
my $fired = '';
for (1 .. 60)
{
	$node->psql('postgres', q{BEGIN; SELECT idempotency.claim('s', 'open'); COMMIT});
	my $alerts = ask('alerts');
	$fired = join ' ', sort map { $_->{labels}{alertname} } grep { $_->{state} eq 'firing' } @{ $alerts->{alerts} // [] };
	last if $fired =~ /UnfinishedClaims/;
	sleep 1;
}
like($fired, qr/IdempotencyUnfinishedClaims/, 'Prometheus has the alert') or diag $log{prometheus};

load_and_record($ENV{IDEMPOTENCY_MONITORING_TSV}) if $ENV{IDEMPOTENCY_MONITORING_TSV};
done_testing();

# A load with phases, and what the dashboard's panels would show of it.
sub load_and_record
{
	my ($tsv) = @_;
	my $seconds = $ENV{IDEMPOTENCY_MONITORING_SECONDS} // 120;
	my $dir = $node->basedir;
	append_to_file("$dir/new.sql", "\\set k random(1, 1000000000)\nSELECT idempotency.once('orders:create', (:k)::text);\n");
	append_to_file("$dir/again.sql", "\\set k random(1, 100)\nSELECT status FROM idempotency.run('orders:pay', (:k)::text, 'called', '1');\n");
	append_to_file("$dir/other.sql", "\\set k random(1, 100)\nSELECT status FROM idempotency.run('orders:pay', (:k)::text, 'called', '2');\n");
	append_to_file("$dir/slow.sql", q{
\set k random(1, 3)
BEGIN;
SELECT status = 'claimed' AS mine FROM idempotency.claim('orders:slow', (:k)::text, ttl => '1 ms') \gset
\if :mine
SELECT pg_sleep(0.1);
SELECT idempotency.complete('orders:slow', (:k)::text);
\endif
COMMIT;
});
	$node->safe_psql('postgres', q{CREATE FUNCTION called(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'called' $$});
	my $third = int($seconds / 3);
	my $begin = time;
	my @bench = ('pgbench', '-n', '-h', $node->host, '-p', $node->port, 'postgres');
	# new keys all the time; replays from a third on; a release that sends another
	# request under used keys in the last third; slow work that others wait for
	my @load = (
		[ 0, [ @bench, '-R', 200, '-c', 2, '-T', 3 * $third, '-f', "$dir/new.sql" ] ],
		[ 0, [ @bench, '-c', 4, '-T', 3 * $third, '-f', "$dir/slow.sql" ] ],
		[ $third, [ @bench, '-R', 400, '-c', 2, '-T', 2 * $third, '-f', "$dir/again.sql" ] ],
		[ 2 * $third, [ @bench, '-R', 40, '-c', 1, '-T', $third, '-f', "$dir/other.sql" ] ]);
	my @clients;
	for my $l (@load)
	{
		sleep 0.1 while time < $begin + $l->[0];
		push @clients, IPC::Run::start($l->[1], '<', \undef, '>', \my $out, '2>', \my $err);
	}
	is(scalar(grep { !$_->finish } @clients), 0, 'all clients did their work');
	my $end = time;
	my %series = (
		claimed => 'sum(rate(idempotency_calls{function="once",outcome="claimed"}[10s]))',
		replayed => 'sum(rate(idempotency_calls{outcome="replayed"}[10s]))',
		mismatch => 'sum(rate(idempotency_calls{outcome="mismatch"}[10s]))',
		waited => '1000 * sum(rate(idempotency_wait_seconds[10s])) / sum(rate(idempotency_calls{outcome="waited"}[10s]))');
	my %at;
	for my $name (sort keys %series)
	{
		my $data = ask("query_range?start=$begin&end=$end&step=1&query=" . $series{$name} =~ s/([^\w])/sprintf '%%%02X', ord $1/ger);
		$at{ int($_->[0] - $begin) }{$name} = $_->[1] for @{ $data->{result}[0]{values} // [] };
	}
	open my $out, '>', $tsv or die "$tsv: $!";
	for my $second (sort { $a <=> $b } keys %at)
	{
		print $out join("\t", $second, map { sprintf '%.3f', ($at{$second}{$_} // 0) =~ s/NaN/0/r } qw(claimed replayed mismatch waited)), "\n";
	}
	close $out or die "$tsv: $!";
	cmp_ok(scalar keys %at, '>', $seconds / 2, 'a run was recorded');
	return;
}
