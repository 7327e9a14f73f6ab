# Logical replication of keys and events: what is written past the executor
# (inserts, updates, deletes) is decoded as any other change, and the keys
# arrive with their work in one transaction.  Once the subscriber takes over,
# it replays what the publisher answered, and delivers its events, as soon as it
# has been given the sequence, which is not replicated.
use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $setup = q{
	CREATE EXTENSION idempotency;
	CREATE TABLE payment (request_id text PRIMARY KEY, amount integer);
};
my $publisher = PostgreSQL::Test::Cluster->new('publisher');
$publisher->init(allows_streaming => 'logical');
$publisher->start;
$publisher->safe_psql('postgres', $setup);
my $subscriber = PostgreSQL::Test::Cluster->new('subscriber');
$subscriber->init(allows_streaming => 'logical');
$subscriber->start;
$subscriber->safe_psql('postgres', $setup);

# there before the subscription: comes with the copy
run_on($publisher, q{SELECT idempotency.once('logical', 'copied')});
$publisher->safe_psql('postgres', 'CREATE PUBLICATION keys FOR TABLE idempotency.keys, idempotency.secrets, payment,
	idempotency.outbox, idempotency.outbox_leases, idempotency.outbox_keys, idempotency.outbox_topics');
$subscriber->safe_psql('postgres', sprintf(
	q{CREATE SUBSCRIPTION keys CONNECTION '%s' PUBLICATION keys}, $publisher->connstr('postgres') =~ s/'/''/gr));
$subscriber->wait_for_subscription_sync($publisher, 'keys');
is(key('copied'), 'completed|', 'a key from before the subscription is copied');

# inserted
run_on($publisher, q{BEGIN;
	SELECT idempotency.claim('logical', 'k1', '{"amount": 10}');
	INSERT INTO payment VALUES ('k1', 10);
	SELECT idempotency.complete('logical', 'k1', E'paid\n{"b":1, "a":1.0}', '{"http": 201}');
	COMMIT});
run_on($publisher, q{BEGIN;
	SELECT idempotency.claim('logical', 'k2');
	INSERT INTO payment VALUES ('k2', 20);
	SELECT idempotency.fail('logical', 'k2', 'no funds');
	COMMIT});
run_on($publisher, q{BEGIN;
	SELECT idempotency.once('logical', 'undone');
	INSERT INTO payment VALUES ('undone', 30);
	ROLLBACK});
run_on($publisher, q{BEGIN; SAVEPOINT a;
	SELECT idempotency.once('logical', 'inner');
	ROLLBACK TO a;
	SELECT idempotency.once('logical', 'outer');
	COMMIT});
$publisher->wait_for_catchup('keys');
is(key('k1'), qq{completed|paid\n{"b":1, "a":1.0}}, 'a completed key arrives byte for byte');
is(key('k2'), 'failed|no funds', 'a failed one, too');
is($subscriber->safe_psql('postgres', q{SELECT string_agg(request_id, ',' ORDER BY request_id) FROM payment}), 'k1,k2', 'with its work');
is(key('undone') . key('inner') . key('outer'), '||completed|', 'what was rolled back does not');

# updated: an expired record that is overwritten, a lease and its end
run_on($publisher, q{SELECT idempotency.once('logical', 'expired', '1 us')});
run_on($publisher, q{SELECT idempotency.once('logical', 'expired', '2 days')});
run_on($publisher, q{SELECT fence AS f FROM idempotency.lease('logical', 'job', '1 hour') \gset
	SELECT idempotency.checkpoint('logical', 'job', :f, 'charged', '{"charge": 7}')});
$publisher->wait_for_catchup('keys');
is($subscriber->safe_psql('postgres', q{SELECT expires_at > now() + interval '1 day' FROM idempotency.keys WHERE key = 'expired'}), 't', 'an overwritten record arrives');
is($subscriber->safe_psql('postgres', q{SELECT status, attempt, checkpoint, checkpoint_data FROM idempotency.lookup('logical', 'job')}),
	'in_progress|1|charged|{"charge": 7}', 'a lease and its checkpoint');
my $fence = $publisher->safe_psql('postgres', q{SELECT fence FROM idempotency.lookup('logical', 'job')});
run_on($publisher, "SELECT idempotency.complete('logical', 'job', 'done', NULL, $fence)");

# deleted
run_on($publisher, q{SELECT idempotency.forget('logical', 'k2')});
run_on($publisher, q{SELECT idempotency.once('logical', 'purged', '1 us')});
run_on($publisher, q{SELECT idempotency.purge()});
$publisher->wait_for_catchup('keys');
is(key('job'), 'completed|done', 'its answer');
is(key('k2'), '|', 'a forgotten key goes');
is($subscriber->safe_psql('postgres', q{SELECT count(*) FROM idempotency.keys WHERE key = 'purged'}), '0', 'so does a purged one');
my $rows = q{SELECT md5(string_agg(k::text, E'\n' ORDER BY scope, key)), count(*) FROM idempotency.keys k};
is($subscriber->safe_psql('postgres', $rows), $publisher->safe_psql('postgres', $rows), 'the tables are the same');
is($subscriber->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_subscription_stats s WHERE to_jsonb(s)::text ~ 'error_count": [1-9]'}), '0', 'no error on the way');

# a subscriber's own claim in the way: the publisher's row waits, nothing is lost
my $log = -s $subscriber->logfile;
run_on($subscriber, q{SELECT idempotency.once('logical', 'both')});
run_on($publisher, q{SELECT idempotency.once('logical', 'both')});
$subscriber->wait_for_log(qr/duplicate key value violates unique constraint "keys_pkey"|conflict detected on relation "idempotency.keys"/, $log);
run_on($subscriber, q{SELECT idempotency.forget('logical', 'both')});
$publisher->wait_for_catchup('keys');
is(key('both'), 'completed|', 'a key claimed on both sides stops replication until one of them goes');

# events: acknowledged, given back, lapsed, out, and one that waits behind
# another of its key
run_on($publisher, q{
	SELECT count(idempotency.emit('done', to_jsonb(i))) FROM generate_series(1, 300) i;
	SELECT idempotency.ack_batch(array_agg(id), array_agg(attempt)) FROM idempotency.take('done', 300);
	SELECT idempotency.emit('mail', '"given back"');
	SELECT idempotency.nack(id, attempt, '0') FROM idempotency.take('mail');
	SELECT idempotency.emit('mail', '"lapsed"', 'k'), idempotency.emit('mail', '"next"', 'k');
	SELECT count(*) FROM idempotency.take('mail', 2, '0');
	SELECT idempotency.emit('mail', '"out"');
	SELECT count(*) FROM idempotency.take('mail', 1, '1 h')});
$publisher->wait_for_catchup('keys');
my $last_value = run_on($publisher, 'SELECT last_value FROM idempotency.outbox_id_seq');

# the publisher is lost
$publisher->stop('immediate');
$subscriber->safe_psql('postgres', q{
	ALTER SUBSCRIPTION keys DISABLE;
	ALTER SUBSCRIPTION keys SET (slot_name = NONE);
	DROP SUBSCRIPTION keys});
is(run_on($subscriber, q{SELECT status, response, meta FROM idempotency.claim('logical', 'k1', '{"amount": 10.0}')}),
	qq{completed|paid\n{"b":1, "a":1.0}|{"http": 201}}, 'the subscriber takes over and replays');
is(run_on($subscriber, q{SELECT status FROM idempotency.claim('logical', 'k1', '{"amount": 11}')}), 'mismatch', 'with the fingerprint');
is(run_on($subscriber, q{SELECT idempotency.once('logical', 'new'), idempotency.once('logical', 'new')}), 't|f', 'and claims');

my $take = q{SELECT string_agg(attempt || ' ' || (payload #>> '{}'), ', ' ORDER BY id) FROM idempotency.take('mail', 10, '1 h')};
my ($ret, $out, $error) = $subscriber->psql('postgres', "\\set VERBOSITY sqlstate\n$take");
like($error, qr/ERROR:  55000/, 'its sequence is behind: no event is handed out, which nobody could acknowledge');
run_on($subscriber, "SELECT setval('idempotency.outbox_id_seq', $last_value)");
is(run_on($subscriber, $take), '3 given back, 2 lapsed', 'with the sequence, events come with their attempts, and what is out or has to wait does not');
is(run_on($subscriber, $take), '', 'no event comes twice');
is(run_on($subscriber, q{SELECT idempotency.ack(id, 2) FROM idempotency.outbox WHERE payload = '"lapsed"'}) . run_on($subscriber, $take), 't1 next', 'after an ack the next of its key');

$subscriber->stop;
done_testing();

sub run_on
{
	my ($node, $sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# What the subscriber has under a key.
sub key
{
	my ($key) = @_;
	return run_on($subscriber, "SELECT status, response FROM idempotency.lookup('logical', '$key')");
}
