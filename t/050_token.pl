# One-time tokens over the ends that isolation tests cannot stage: many sessions
# at once, prepared transactions, a crash, a standby, dump and restore, logical
# replication; and what is in the server's log.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use Ask;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('primary');
$node->init(allows_streaming => 'logical');
$node->append_conf('postgresql.conf', q{
max_connections = 40
max_prepared_transactions = 10
log_statement = none
log_min_error_statement = panic
log_min_messages = debug1
});
$node->start;
$node->safe_psql('postgres', q{
	CREATE ROLE app LOGIN;
	CREATE ROLE owner LOGIN;
	CREATE EXTENSION idempotency;
	SELECT idempotency.grant_usage('app');
	GRANT CREATE ON SCHEMA public TO app;
});
my $su = $node->safe_psql('postgres', 'SELECT current_user');
ask_at(node => $node, role => 'app');
my ($subject, $purpose) = ('subject-in-no-log', 'purpose-in-no-log');

# Where a statement goes: to the original's database "postgres" unless told.
sub at
{
	my (%opt) = @_;
	return ($opt{node} // $node, 'app', $opt{db} // 'postgres');
}

sub issue { return query(at(@_), "SELECT idempotency.issue_token('$subject', '$purpose', '1 day')"); }

sub status
{
	my ($function, $token, %opt) = @_;
	my $wait = defined $opt{wait} ? ", '$opt{wait}'" : '';
	return query(at(%opt), "SELECT status FROM idempotency.${function}_token('$token', '$subject', '$purpose'$wait)");
}

my @tokens;

#
# Many sessions, 100 tokens, half of the transactions rolled back: every token
# has one winner, and its work is done as often as it was consumed.
#
query(qq{
	CREATE TABLE tok AS SELECT n, idempotency.issue_token('$subject', '$purpose', '1 day') AS t FROM generate_series(1, 100) n;
	CREATE TABLE work (n int, status text);
});
my $script = $node->basedir . '/consume.sql';
append_to_file($script, qq{
\\set n random(1, 100)
\\set commit random(0, 1)
\\set wait random(0, 1)
BEGIN;
INSERT INTO work SELECT n, status FROM tok, idempotency.consume_token(t, '$subject', '$purpose', CASE :wait WHEN 0 THEN interval '0' END) WHERE n = :n;
\\if :commit
COMMIT;
\\else
ROLLBACK;
\\endif
});
$node->command_ok([ 'pgbench', '-n', '-U', 'app', '-c', 8, '-j', 2, '-t', 250, '-f', $script, 'postgres' ], 'eight sessions consume');
is(query(q{SELECT count(*) FROM (SELECT n FROM work WHERE status = 'consumed' GROUP BY n HAVING count(*) > 1) s}), '0', 'no token was consumed twice');
is(query(q{SELECT DISTINCT status FROM work WHERE status NOT IN ('consumed', 'used', 'busy')}), '', 'and nobody was told anything else');
is( query(q{SELECT count(DISTINCT n) FROM work WHERE status = 'consumed'}),
	query($su, 'SELECT count(*) FROM idempotency.used_tokens'),
	'as many marks as works');
is( query(qq{SELECT status, count(*) FROM tok, idempotency.consume_token(t, '$subject', '$purpose')
		WHERE n NOT IN (SELECT n FROM work WHERE status = 'consumed') GROUP BY 1 HAVING status <> 'consumed'}),
	'', 'what nobody consumed was still good');

#
# Prepared transactions, a restart and a crash
#
my ($committed, $rolled_back, $crashed, $lost, $fresh) = map { issue() } 1 .. 5;
push @tokens, $committed, $rolled_back, $crashed, $lost, $fresh;
for my $t ([ $committed, 'a' ], [ $rolled_back, 'b' ])
{
	query(qq{
		BEGIN;
		SELECT idempotency.consume_token('$t->[0]', '$subject', '$purpose');
		PREPARE TRANSACTION '$t->[1]';
	});
}
is(status('consume', $committed, wait => '0'), 'busy', 'a prepared transaction holds the token');
is(status('check', $committed), 'valid', 'which is not used yet');
is(status('consume', $crashed), 'consumed', 'consumed before a crash');
my $session = $node->background_psql('postgres', extra_params => [ '-U', 'app' ]);
is($session->query(qq{BEGIN; SELECT status FROM idempotency.consume_token('$lost', '$subject', '$purpose')}),
	'consumed', 'one more, in a transaction that the crash ends');
$node->stop('immediate');
eval { $session->quit };
$node->start;
is(status('consume', $crashed), 'used', 'a mark outlives the crash');
is(status('consume', $lost), 'consumed', 'what was not committed is given back');
is(status('check', $fresh), 'valid', 'and so do token keys');
is(status('consume', $committed, wait => '0'), 'busy', 'prepared over the crash');
query("COMMIT PREPARED 'a'");
query("ROLLBACK PREPARED 'b'");
is(status('consume', $committed), 'used', 'committed');
is(status('consume', $rolled_back), 'consumed', 'rolled back');

#
# A hot standby issues and checks; keys and generations reach its sessions
#
$node->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->start;

my $on_standby = issue(node => $standby);
push @tokens, $on_standby;
is(status('check', $on_standby, node => $standby), 'valid', 'a token issued by a standby');
is(status('check', $crashed, node => $standby), 'used', 'a standby tells what is used');
is(status('consume', $crashed, node => $standby), 'used', 'also when it is asked to consume');
is(status('consume', 'nonsense', node => $standby), 'invalid', 'and what is invalid');
for my $call ("consume_token('$fresh', '$subject', '$purpose')", "revoke_token('$fresh', '$subject', '$purpose')",
	"revoke_tokens('$subject', '$purpose')")
{
	is(sqlstate($standby, "SELECT idempotency.$call"), '25006', "refused on a standby: " . (split /\(/, $call)[0]);
}
is(sqlstate($standby, $su, 'SELECT idempotency.rotate_token_key()'), '25006', 'and rotation');
is(status('consume', $on_standby), 'consumed', 'the primary consumes what the standby issued');

# an open transaction on the primary: not waited for
query(qq{BEGIN; SELECT idempotency.consume_token('$fresh', '$subject', '$purpose'); PREPARE TRANSACTION 'c'});
$node->wait_for_catchup($standby);
is(status('check', $fresh, node => $standby), 'valid', 'a standby waits for nobody');
query("ROLLBACK PREPARED 'c'");

my $cached = $standby->background_psql('postgres', extra_params => [ '-U', 'app' ]);
my $look = "SELECT status FROM idempotency.check_token('$fresh', '$subject', '$purpose')";
is($cached->query($look), 'valid', 'a session of the standby has the keys cached');
query($su, 'SELECT idempotency.rotate_token_key()');
my $rotated = issue();
$node->wait_for_catchup($standby);
is($cached->query($look), 'valid', 'rotated: the old key still verifies there');
is($cached->query("SELECT status FROM idempotency.check_token('$rotated', '$subject', '$purpose')"), 'valid', 'and the new one does');
query("SELECT idempotency.revoke_tokens('$subject', 'other')");
my $doomed = query("SELECT idempotency.issue_token('$subject', 'other')");
query("SELECT idempotency.revoke_tokens('$subject', 'other')");
$node->wait_for_catchup($standby);
is($cached->query("SELECT status FROM idempotency.check_token('$doomed', '$subject', 'other')"), 'revoked', 'revoked there too');

#
# Dump and restore: outstanding tokens stay what they are
#
my ($valid, $used, $revoked) = map { issue() } 1 .. 3;
push @tokens, $valid, $used, $revoked, $rotated, $doomed;
status('consume', $used);
query("SELECT idempotency.revoke_token('$revoked', '$subject', '$purpose')");
my $dump = $node->basedir . '/dump.sql';
$node->command_ok([ 'pg_dump', '-U', $su, '-f', $dump, 'postgres' ], 'dump');
$node->safe_psql('postgres', 'CREATE DATABASE restored');
$node->command_ok([ 'psql', '-X', '-q', '-U', $su, '-v', 'ON_ERROR_STOP=1', '-d', 'restored', '-o', $node->basedir . '/restore.log', '-f', $dump ], 'restore');
is(join(' ', map { status('check', $_, db => 'restored') } $valid, $used, $revoked, $rotated, $fresh),
	'valid used revoked valid valid', 'tokens are what they were, signed by either key');
is(query('app', 'restored', "SELECT status FROM idempotency.check_token('$doomed', '$subject', 'other')"), 'revoked', 'generations as well');
is(status('consume', $valid, db => 'restored'), 'consumed', 'consumed in the restored database');
my $after = issue(db => 'restored');
push @tokens, $after;
is(status('check', $after, db => 'restored'), 'valid', 'it issues its own');
is(status('check', $after), 'invalid', 'by a key that the source does not have');
query($su, 'restored', 'SELECT idempotency.rotate_token_key(retire => true)');
is(status('check', $rotated, db => 'restored') . ' ' . status('check', $rotated), 'invalid valid', 'retired there, and only there');

# by a plain role that owns the extension
$node->safe_psql('postgres', 'CREATE DATABASE plain OWNER owner; CREATE DATABASE plain_restored OWNER owner');
query('owner', 'plain', q{CREATE EXTENSION idempotency; SELECT idempotency.grant_usage('app')});
my $plain = issue(db => 'plain');
push @tokens, $plain;
$node->command_ok([ 'pg_dump', '-U', 'owner', '-f', "$dump.plain", 'plain' ], 'dump by a plain owner');
$node->command_ok([ 'psql', '-X', '-q', '-U', 'owner', '-v', 'ON_ERROR_STOP=1', '-d', 'plain_restored', '-o', $node->basedir . '/restore.log', '-f', "$dump.plain" ], 'restore');
is(status('consume', $plain, db => 'plain_restored'), 'consumed', 'a token from before the dump');

#
# Logical replication: a subscriber's sessions hear of keys that are applied
#
$node->safe_psql('postgres', 'CREATE DATABASE subscriber');
$node->safe_psql('subscriber', q{CREATE EXTENSION idempotency; SELECT idempotency.grant_usage('app')});
my $subscribed = $node->background_psql('subscriber', extra_params => [ '-U', 'app' ]);
my $here = issue(db => 'subscriber');
push @tokens, $here;
my $check = sub { return scalar $subscribed->query("SELECT status FROM idempotency.check_token('$_[0]', '$subject', '$purpose')"); };
is($check->($here) . ' ' . $check->($rotated), 'valid invalid', 'a subscriber has keys of its own, and has them cached');
$node->safe_psql('postgres', q{
	CREATE PUBLICATION pub FOR TABLE idempotency.token_keys, idempotency.used_tokens, idempotency.token_generations;
	SELECT pg_create_logical_replication_slot('sub', 'pgoutput');
});
my $connect = $node->connstr . ' dbname=postgres';
$node->safe_psql('subscriber', qq{CREATE SUBSCRIPTION sub CONNECTION '$connect' PUBLICATION pub WITH (create_slot = false, slot_name = 'sub')});
$node->wait_for_subscription_sync($node, 'sub', 'subscriber');
is(join(' ', map { $check->($_) } $here, $rotated, $used, $revoked), 'valid valid used revoked', 'then also those of the publisher');
query($su, 'SELECT idempotency.rotate_token_key()');
my $published = issue();
push @tokens, $published;
$node->wait_for_catchup('sub');
is($check->($published) . ' ' . $check->($rotated), 'valid valid', 'a rotation is applied');
query($su, 'SELECT idempotency.rotate_token_key(retire => true)');
$node->wait_for_catchup('sub');
is($check->($published) . ' ' . $check->($rotated) . ' ' . $check->($here), 'invalid invalid valid', 'and a retirement');
$node->safe_psql('subscriber', 'DROP SUBSCRIPTION sub');
$node->wait_for_catchup($standby);
is($cached->query($look), 'invalid', 'which reached the standby too');

#
# Nothing secret is in the logs, of what was refused either
#
my $busy = issue();
push @tokens, $busy;
query(qq{BEGIN; SELECT idempotency.consume_token('$busy', '$subject', '$purpose'); PREPARE TRANSACTION 'd'});
is(sqlstate("SET idempotency.default_wait = 0; SELECT idempotency.revoke_token('$busy', '$subject', '$purpose')"), '55P03', 'busy');
is(sqlstate("SET lock_timeout = 1; SELECT idempotency.consume_token('$busy', '$subject', '$purpose')"), '55P03', 'lock_timeout');
is(sqlstate("SET statement_timeout = 50; SELECT idempotency.consume_token('$busy', '$subject', '$purpose')"), '57014', 'statement_timeout');
is(sqlstate("BEGIN READ ONLY; SELECT idempotency.revoke_token('$after', '$subject', '$purpose')"), 'none: ', 'nothing to revoke, nothing to refuse');
is(sqlstate("BEGIN READ ONLY; SELECT idempotency.revoke_tokens('$subject', '$purpose')"), '25006', 'read only');
is(sqlstate("SELECT idempotency.issue_token('$subject', '$purpose', '8 days', to_jsonb('$busy'::text))"), '22023', 'too long');
query("ROLLBACK PREPARED 'd'");
$cached->quit;
$subscribed->quit;
$standby->stop;
$node->stop;
my $log = slurp_file($node->logfile) . slurp_file($standby->logfile);
like($log, qr/token is being consumed elsewhere/, 'the log has our messages');
is(scalar(grep { index($log, $_) >= 0 } @tokens, $subject, $purpose), 0, 'and none of the tokens, subjects and purposes');

done_testing();
