# examples/mail.sql: one mail per paid order, though every order is paid three
# times, one mail cannot be sent at first, and workers are killed between taking
# and sending, and between sending and acknowledging.

use strict;
use warnings;

use File::Basename qw(dirname);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->start;
$node->safe_psql('postgres', q{
CREATE EXTENSION idempotency;
CREATE ROLE regress_shop;
SELECT idempotency.grant_admin('regress_shop');
CREATE SCHEMA AUTHORIZATION regress_shop;
});

sub shop { return $node->safe_psql('postgres', 'SET ROLE regress_shop; ' . join ';', @_); }

shop("\\i " . dirname(__FILE__) . '/../examples/mail.sql');

# every order but 20 is paid, three times, most of them in any order
is(shop('SELECT count(*) FILTER (WHERE o = \'applied\') FROM (SELECT pay(i) AS o FROM generate_series(1, 5) i) p'), '5', 'orders are paid');
is(shop('SELECT count(*) FILTER (WHERE o = \'applied\'), count(*) FILTER (WHERE o = \'already\') FROM (SELECT pay(i) AS o FROM (SELECT i FROM generate_series(1, 19) i, generate_series(1, 3) j ORDER BY random()) r OFFSET 0) p'), '14|43', 'each of them once');

# the mailer refuses order 3 for a while
shop("ALTER TABLE sent_mail ADD CONSTRAINT refuse CHECK (subject <> 'Order 3 is paid')");

# The worker has taken what is there and waits before its first mail: there the
# first one is killed.  The second sends that mail and is killed as it waits to
# acknowledge the event.
my $waiting = "SELECT count(*) = 1 FROM pg_locks l, pg_stat_activity a WHERE NOT l.granted AND l.relation = '%s'::regclass AND a.pid = l.pid AND a.application_name = 'worker'";
my $mailer = $node->background_psql('postgres');
my $holder = $node->background_psql('postgres');
$mailer->query_safe('BEGIN; LOCK TABLE regress_shop.sent_mail IN SHARE MODE');
my $worker = start_worker();
ok($node->poll_query_until('postgres', sprintf $waiting, 'regress_shop.sent_mail'), 'a worker waits to send');
kill_worker();
is(shop('SELECT count(*) FROM sent_mail'), '0', 'before it has sent anything');
is($node->safe_psql('postgres', 'SELECT count(*) FROM idempotency.outbox'), '19', 'what it had taken is there still');
select undef, undef, undef, 1.1;	# its lease ends
$worker = start_worker();
ok($node->poll_query_until('postgres', sprintf $waiting, 'regress_shop.sent_mail'), 'the next worker waits to send');
$holder->query_safe('BEGIN; LOCK TABLE idempotency.outbox IN SHARE MODE');
$mailer->quit;
ok($node->poll_query_until('postgres', sprintf $waiting, 'idempotency.outbox'), 'the worker waits to acknowledge');
kill_worker();
$holder->quit;
my $subject = shop('SELECT subject FROM sent_mail WHERE calls = 1');
like($subject, qr{^Order \d+ is paid$}, 'after it had sent a mail');
is($node->safe_psql('postgres', 'SELECT count(*) FROM idempotency.outbox'), '19', 'which nobody knows');

shop('ALTER TABLE sent_mail DROP CONSTRAINT refuse');
for (1 .. 600)
{
	shop('CALL mail_worker()');
	last if $node->safe_psql('postgres', 'SELECT count(*) FROM idempotency.outbox') eq '0';
	select undef, undef, undef, 0.1;
}
is(shop('SELECT count(*), count(DISTINCT subject) FROM sent_mail'), '19|19', 'one mail for each paid order');
is(shop("SELECT calls > 1 FROM sent_mail WHERE subject = '$subject'"), 't', 'though the mailer was asked again');
is(shop("SELECT count(*) FROM orders o WHERE (status = 'PAID') <> EXISTS (SELECT FROM sent_mail WHERE recipient = o.email AND subject = format('Order %s is paid', o.id))"), '0', 'and for no other');
is($node->safe_psql('postgres', 'SELECT count(*) FROM idempotency.outbox'), '0', 'nothing is left to deliver');

$node->stop;
done_testing();

sub start_worker
{
	return IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('postgres') . ' application_name=worker', '-c', 'SET ROLE regress_shop', '-c', "CALL mail_worker(lease => '1 s')" ], '>&', \my $output);
}

sub kill_worker
{
	$node->safe_psql('postgres', "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'worker'");
	ok(!$worker->finish, 'and is killed');
}
