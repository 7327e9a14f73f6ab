# Many open claims in one transaction: the last costs what the first did, also
# where each is made, or completed, in a savepoint of its own.
use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('many');
$node->init;
$node->append_conf('postgresql.conf', "max_locks_per_transaction = 2000\n");
# what claims cost is told by hashes that differ, also where they are short (test/collisions)
$node->append_conf('postgresql.conf', 'idempotency.debug_hash_bits = 64') if $ENV{COLLISIONS};
$node->start;
$node->safe_psql('postgres', q{
CREATE EXTENSION idempotency;
CREATE FUNCTION claim_in_block(n integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM idempotency.claim('many', n::text);
EXCEPTION WHEN division_by_zero THEN
END $$;
CREATE FUNCTION complete_in_block(n integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM idempotency.complete('many', n::text);
EXCEPTION WHEN division_by_zero THEN
END $$;
});

# Microseconds of the server's own time for each of so many calls, at best.
sub cost
{
	my ($many, $call, $before) = @_;
	my $each = sub { "SELECT count($_[0]) FROM generate_series(1, $many) n;" };
	$before = $before ? $each->($before) : '';
	my @took = map {
		my (undef, undef, $told) = $node->psql('postgres', qq{
			SET client_min_messages = log;
			BEGIN;
			$before
			SET log_statement_stats = on;
			@{[ $each->($call) ]}}, on_error_die => 1);
		my ($user, $system) = $told =~ /([\d.]+) s user, ([\d.]+) s system/ or die $told;
		($user + $system) * 1e6 / $many;
	} 1 .. 3;
	return (sort { $a <=> $b } @took)[0];
}

my $claim = q{idempotency.claim('many', n::text)};
for my $case (
	[ 'claims', $claim ],
	[ 'claims in a savepoint each', 'claim_in_block(n)' ],
	[ 'held', $claim, $claim ],
	[ 'completions', q{idempotency.complete('many', n::text)}, $claim ],
	[ 'completions in a savepoint each', 'complete_in_block(n)', $claim ])
{
	my ($name, @calls) = @$case;
	my ($few, $many) = map { cost($_, @calls) } 2000, 40000;
	cmp_ok($many, '<', 4 * $few, sprintf '%s: %.1f us each of 2,000, %.1f us of 40,000', $name, $few, $many);
}

done_testing();
