# A hot standby replays and looks up, refuses a new claim (25006), and never
# waits: what is not committed is absent.  After promotion it goes on where the
# primary stopped, prepared claims included.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use Ask;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $primary = PostgreSQL::Test::Cluster->new('primary');
$primary->init(allows_streaming => 1);
$primary->append_conf('postgresql.conf', 'max_prepared_transactions = 10');
$primary->start;
ask_at(role => 'app');
$primary->safe_psql(
	'postgres', q{
	CREATE EXTENSION idempotency;
	CREATE ROLE app LOGIN;
	ALTER ROLE app SET statement_timeout = '30 s';	-- a wait on the standby would be endless
	SELECT idempotency.grant_usage('app');
	CREATE FUNCTION public.f(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'called' $$;
	CREATE TABLE ord (id int PRIMARY KEY, state text, version bigint NOT NULL, fence bigint);
});
$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;

query(
	$primary, q{
	BEGIN;
	SELECT idempotency.claim('standby', 'done', '1');
	SELECT idempotency.complete('standby', 'done', 'answer', '{"code": 200}');
	COMMIT;
	BEGIN;
	SELECT idempotency.claim('standby', 'failed');
	SELECT idempotency.fail('standby', 'failed', 'reason');
	COMMIT;
	SELECT idempotency.once('standby', 'expired', '1 us');
	SELECT idempotency.once('standby', 'rewritten', '1 us');
	SELECT idempotency.once('standby', 'rewritten');
	BEGIN;
	SELECT idempotency.claim('standby', 'prepared');
	SELECT idempotency.complete('standby', 'prepared', 'by the primary');
	SELECT idempotency.once('standby', 'expired');
	PREPARE TRANSACTION 'prepared';});
# deleted by a transaction that is still open
$primary->safe_psql('postgres', q{BEGIN; SELECT idempotency.once('standby', 'forgotten'); COMMIT;
	BEGIN; SELECT idempotency.forget('standby', 'forgotten'); PREPARE TRANSACTION 'forgotten';});
$primary->wait_for_catchup($standby);

is(query($standby, q{SELECT * FROM idempotency.claim('standby', 'done', '1')}),
	'completed|answer|{"code": 200}', 'claim() replays');
is(query($standby, q{SELECT status FROM idempotency.claim('standby', 'done', '2')}), 'mismatch', 'and compares');
is(query($standby, q{SELECT status, response FROM idempotency.claim('standby', 'failed')}), 'failed|reason', 'a failure, too');
is(query($standby, q{SELECT idempotency.once('standby', 'done'), idempotency.once('standby', 'rewritten')}), 'f|f', 'once() knows');
is(query($standby, q{SELECT status, replayed, response FROM idempotency.run('standby', 'done', 'f')}), 'completed|t|answer', 'run() replays');
is(query($standby, q{SELECT status, response, meta FROM idempotency.lookup('standby', 'done')}),
	'completed|answer|{"code": 200}', 'lookup() reads');
is($standby->safe_psql('postgres', q{SELECT count(*) FROM idempotency.holder('standby', 'done')}), '0', 'nobody holds a key here');
is( query($standby, q{BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT status FROM idempotency.claim('standby', 'done'); COMMIT;}),
	'completed', 'under REPEATABLE READ as well');
for my $key (qw(new prepared expired))
{
	is(query($standby, qq{SELECT l IS NULL FROM idempotency.lookup('standby', '$key') AS l}), 't', "$key: absent");
	is(sqlstate($standby, "SELECT $_"), '25006', "$key: $_ is refused, and nothing waits")
	  for "idempotency.claim('standby', '$key')", "idempotency.claim('standby', '$key', wait => '0')",
	  "idempotency.once('standby', '$key')", "idempotency.run('standby', '$key', 'f', record_errors => true)",
	  "idempotency.complete('standby', '$key')", "idempotency.fail('standby', '$key', 1)", "idempotency.release('standby', '$key')";
}
is(query($standby, q{SELECT status FROM idempotency.claim('standby', 'forgotten')}), 'completed', 'a row that is being deleted is there');
# what else writes, as a superuser
my $superuser = $standby->safe_psql('postgres', 'SELECT session_user');
is(sqlstate($standby, $superuser, "SELECT $_"), '25006', "$_ is refused")
  for "idempotency.forget('standby', 'done')", "idempotency.release_lock('standby', 1)",
  q{idempotency.define_machine('m', '{"initial": "A", "transitions": {"A": ["B"]}}')}, "idempotency.drop_machine('m')",
  "idempotency.attach_machine('ord', 'state', 'm')", "idempotency.detach_machine('ord', 'state')",
  "idempotency.attach_version('ord', 'version')", "idempotency.detach_version('ord', 'version')",
  "idempotency.attach_fence('ord', 'fence')", "idempotency.detach_fence('ord', 'fence')",
  "idempotency.emit('t', NULL)", "idempotency.take('t')", "idempotency.ack(1, 1)", "idempotency.nack(1, 1)",
  "idempotency.retry_parked('t')", "idempotency.purge()";

$primary->safe_psql('postgres', q{COMMIT PREPARED 'forgotten'});
$primary->wait_for_catchup($standby);
is(query($standby, q{SELECT l IS NULL FROM idempotency.lookup('standby', 'forgotten') AS l}), 't', 'and gone when that commits');

# the primary is lost
$primary->stop('immediate');
$standby->promote;
is(query($standby, q{SELECT status, response FROM idempotency.claim('standby', 'done')}), 'completed|answer', 'promoted: replays');
is(query($standby, q{SELECT idempotency.once('standby', 'new'), idempotency.once('standby', 'new')}), 't|f', 'promoted: claims');
is(query($standby, q{SELECT status FROM idempotency.claim('standby', 'prepared', wait => '0')}), 'in_progress', 'a prepared claim is held');
is(query($standby, q{SELECT status FROM idempotency.claim('standby', 'expired', wait => '0')}), 'in_progress', 'whether new or overwritten');
$standby->safe_psql('postgres', q{COMMIT PREPARED 'prepared'});
is(query($standby, q{SELECT status, response FROM idempotency.claim('standby', 'prepared')}), 'completed|by the primary', 'until it is resolved');
is(query($standby, q{SELECT idempotency.once('standby', 'expired')}), 'f', 'all of it');

$standby->stop;
done_testing();
