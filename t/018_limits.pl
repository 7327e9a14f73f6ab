# What the server's configuration says about how long things are kept: at its
# next statement every session keeps to it.
use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('limits');
$node->init;
$node->start;
$node->safe_psql('postgres', q{
CREATE EXTENSION idempotency;
CREATE ROLE app LOGIN;
SELECT idempotency.grant_usage('app');
CREATE VIEW kept AS SELECT key, scope, expires_at - created_at AS how_long FROM idempotency.keys;
});
my $session = $node->background_psql('postgres', on_error_stop => 0, extra_params => [ '-U', 'app' ]);

# New values, in effect in the open session as well.
sub configure
{
	my (%value) = @_;
	$node->append_conf('postgresql.conf', join '', map { "idempotency.$_ = '$value{$_}'\n" } keys %value);
	$node->reload;
	for my $name (keys %value)
	{
		my $got = '';
		for (1 .. 600)
		{
			$got = $session->query_safe("SHOW idempotency.$name");
			last if $got eq $value{$name};
			select undef, undef, undef, 0.1;
		}
		is($got, $value{$name}, "$name is $value{$name}");
	}
}

sub failure
{
	my ($sql) = @_;
	my (undef, $out, $err) = $node->psql('postgres', "\\set VERBOSITY verbose\nSELECT $sql", extra_params => [ '-U', 'app' ]);
	return $err =~ /ERROR:  (\w+: .*)\n(?:DETAIL:  (.*)\n)?/ ? "$1. $2" : "none: $out";
}

$session->query_safe(q{SELECT idempotency.once('limits', 'loads the library')});
is($session->query_safe(q{SELECT idempotency.once('limits', 'a year', '366 days')}), 't', 'a year by default');
like(failure(q{idempotency.once('limits', 'longer', '10000 years')}),
	qr/^22023: ttl is longer than idempotency.max_ttl. idempotency.max_ttl is 366d/, 'no longer');

configure(default_ttl => '1min', max_lease => '1h', max_ttl => '2d');
$session->query_safe(q{SELECT idempotency.once('limits', 'default'), idempotency.once('limits', 'longest', '2 days')});
is($node->safe_psql('postgres', q{SELECT key, extract(epoch FROM how_long)::integer FROM kept WHERE key IN ('default', 'longest') ORDER BY 1}),
	"default|60\nlongest|172800", 'a ttl by default, and the longest');
for my $call (
	q{idempotency.once('limits', 'x', '2 days 1 us')},
	q{idempotency.once('limits', 'x', '1 mon')},
	q{idempotency.claim('limits', 'default', ttl => '3 days')},
	q{idempotency.run('limits', 'default', 'f', ttl => '3 days')},
	q{idempotency.lease('limits', 'x', '1 s', ttl => '3 days')})
{
	like(failure($call), qr/^22023: ttl is longer than idempotency.max_ttl. idempotency.max_ttl is 2d/, "$call is refused");
}

# a lease that is longer is cut, and never extended beyond
my ($fence, $bounded) = split /\|/, $session->query_safe(q{SELECT fence, deadline <= clock_timestamp() + '1 h' FROM idempotency.lease('limits', 'lease', '10 h')});
is($bounded, 't', 'a lease is cut');
is($session->query_safe(qq{SELECT idempotency.extend('limits', 'lease', $fence, '5 h') = timestamptz '2000-01-01 00:00Z' + $fence * interval '1 us' + interval '1 h'}),
	't', 'and extended up to max_lease after the grant');

# the default is no way past the limit
configure(default_ttl => '7d');
$session->query_safe(q{SELECT idempotency.once('limits', 'cut')});
is($node->safe_psql('postgres', q{SELECT extract(epoch FROM how_long)::integer FROM kept WHERE key = 'cut'}), '172800', 'a default that is longer is cut');

# what was stored before stays as it was stored
configure(max_ttl => '1h');
is($session->query_safe(q{SELECT status FROM idempotency.claim('limits', 'longest')}), 'completed', 'lowered, it changes no answer');

#
# Tokens: no role, database or session has another limit, so that what one purges
# another does not miss
#
my ($ret, $out, $err) = $node->psql('postgres', q{
	SELECT FROM idempotency.issue_token('s', 'p');
	ALTER ROLE app SET idempotency.token_retention = 0;
	ALTER DATABASE postgres SET idempotency.token_max_ttl = '1s';
	SET idempotency.token_retention = 0;
}, on_error_stop => 0);
is(scalar(() = $err =~ /ERROR:  parameter "idempotency.token_\w+" cannot be changed now/g), 3, 'not for a role, a database or a session');

# One session has a token, or a lock on one of the tables, while another asks for
# the token; its time is over when the first lets go.
my $waiter = $node->background_psql('postgres', extra_params => [ '-U', 'app' ]);
sub after_wait
{
	my ($hold, $ask, $done, $name, $expected) = @_;
	my $holder = $node->background_psql('postgres');
	$holder->query_safe("BEGIN; $hold");
	$waiter->query_until(qr/asked/, "\\echo asked\n$ask;\n");
	$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE usename = 'app' AND wait_event_type = 'Lock'})
	  or die 'nobody waits';
	$holder->query_safe("SELECT pg_sleep(3.1); $done");
	$holder->quit;
	my ($answer) = $waiter->query_safe(q{SELECT 'end'}) =~ /(\w+)\nend/;
	is($answer, $expected, $name);
}
sub issue { return $node->safe_psql('postgres', q{SELECT idempotency.issue_token('s', 'p', '3 s')}); }
sub ask { return "SELECT status FROM idempotency.$_[0]_token('$_[1]', 's', 'p')"; }

for my $end ([ 'ROLLBACK', 'expired' ], [ 'COMMIT', 'used' ])
{
	my $token = issue();
	after_wait(ask(consume => $token), ask(consume => $token), $end->[0], "its time is over after a rival's $end->[0]", $end->[1]);
}

# past retention too; and what purge removed meanwhile is not taken for unused
configure(token_retention => '0');
for my $function (qw(consume check))
{
	after_wait('LOCK TABLE idempotency.token_generations', ask($function => issue()), 'COMMIT', "$function: past retention after the wait", 'stale');
}
my $token = issue();
is($waiter->query_safe(ask(consume => $token)), 'consumed', 'one is used');
after_wait('LOCK TABLE idempotency.used_tokens', ask(check => $token), 'SELECT idempotency.purge(); COMMIT', 'its mark is purged while we wait', 'stale');
$waiter->quit;

done_testing();
