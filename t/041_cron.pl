# The recipe of doc/operations.md for pg_cron, with the real pg_cron: as an administrator of
# ours who is no superuser, scheduled as it stands there, run by pg_cron's own
# scheduler, and beside keys that are live or at work.
#
# The recipe runs every ten minutes, and a minute is the least for a pg_cron
# before 1.5; so the test then has the same job run at the server's start.  It may
# run once more before that, and be cut off by the restart.
use strict;
use warnings;
use File::Basename qw(dirname);
use FindBin;
use lib "$FindBin::RealBin/lib";
use Ask;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $lib = `pg_config --pkglibdir`;
chomp $lib;
plan skip_all => 'pg_cron is not installed' unless -e "$lib/pg_cron.so";

my ($recipe) = slurp_file(dirname(__FILE__) . '/../doc/operations.md') =~ /^(SELECT cron\.schedule\(.*\);)$/m;
ok($recipe, "the recipe: " . ($recipe // 'none'));

my $node = PostgreSQL::Test::Cluster->new('cron');
$node->init;
$node->append_conf(
	'postgresql.conf', q{
shared_preload_libraries = 'pg_cron'
cron.database_name = 'shop'
cron.use_background_workers = on
});
$node->start;
ask_at(node => $node, role => 'regress_cron', database => 'shop');
$node->safe_psql('postgres', 'CREATE DATABASE shop');
$node->safe_psql(
	'shop', q{
	CREATE EXTENSION pg_cron;
	CREATE EXTENSION idempotency;
	CREATE ROLE regress_cron LOGIN;
	SELECT idempotency.grant_admin('regress_cron');
	GRANT USAGE ON SCHEMA cron TO regress_cron;
});

query(q{
	SELECT count(idempotency.once('cron', i::text, '1 us')) FROM generate_series(1, 2000) i;
	SELECT idempotency.once('cron', 'live');
});
is($node->safe_psql('shop', 'SELECT count(*) FROM idempotency.keys'), 2001, 'expired keys are there');

my $job = query($recipe);
is($node->safe_psql('shop', 'SELECT schedule, username FROM cron.job'), '*/10 * * * *|regress_cron', 'scheduled as it stands');
$node->safe_psql('shop', qq{SELECT cron.alter_job($job, schedule => '\@reboot')});

$node->restart;
ok( $node->poll_query_until('shop', 'SELECT count(*) = 1 FROM idempotency.keys'),
	'they go');
is(query(q{SELECT idempotency.once('cron', 'live'), idempotency.once('cron', '1')}), 'f|t', 'the live one stays');
ok( $node->poll_query_until('shop', "SELECT bool_or(status = 'succeeded') FROM cron.job_run_details"),
	'and pg_cron says so');

$node->stop;
unlike(slurp_file($node->logfile), qr/idempotency.*preload|TRAP|ERROR/, 'nothing untoward in the log');
done_testing();
