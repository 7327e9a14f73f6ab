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

sub sqlstate
{
	my ($sql) = @_;
	my (undef, $out, $err) = $node->psql('postgres', "\\set VERBOSITY verbose\nSELECT $sql", extra_params => [ '-U', 'app' ]);
	return $err =~ /ERROR:  (\w+: .*)\n(?:DETAIL:  (.*)\n)?/ ? "$1. $2" : "none: $out";
}

$session->query_safe(q{SELECT idempotency.once('limits', 'loads the library')});
is($session->query_safe(q{SELECT idempotency.once('limits', 'a year', '366 days')}), 't', 'a year by default');
like(sqlstate(q{idempotency.once('limits', 'longer', '10000 years')}),
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
	like(sqlstate($call), qr/^22023: ttl is longer than idempotency.max_ttl. idempotency.max_ttl is 2d/, "$call is refused");
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

done_testing();
