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

-- the call for 1 .. many, in tenths: how long each took
CREATE FUNCTION tenths(call text, many integer) RETURNS float8[] LANGUAGE plpgsql AS $$
DECLARE
  took float8[];
  began timestamptz;
BEGIN
  FOR tenth IN 0 .. 9 LOOP
    began := clock_timestamp();
    EXECUTE format('SELECT count(%s) FROM generate_series(%s, %s) n', call, 1 + tenth * many / 10, (tenth + 1) * many / 10);
    took := took || extract(epoch FROM clock_timestamp() - began)::float8;
  END LOOP;
  RETURN took;
END $$;
});

my $claim = q{idempotency.claim('many', n::text)};
for my $case (
	[ 'claims', $claim ],
	[ 'claims in a savepoint each', 'claim_in_block(n)' ],
	[ 'held', $claim, $claim ],
	[ 'completions', q{idempotency.complete('many', n::text)}, $claim ],
	[ 'completions in a savepoint each', 'complete_in_block(n)', $claim ])
{
	my ($name, $call, $before) = @$case;
	$before = $before ? "SELECT count($before) FROM generate_series(1, 40000) n;" : '';
	my $took = $node->safe_psql('postgres', "BEGIN; $before SELECT tenths(\$\$$call\$\$, 40000); ROLLBACK");
	my ($list) = $took =~ /\{(.*)\}/;
	my @took = split /,/, $list;

	# a list would make the last tenth ten times as dear as the first
	my ($early, $late) = map { (sort { $a <=> $b } @$_)[1] } [ @took[ 0 .. 2 ] ], [ @took[ 7 .. 9 ] ];
	cmp_ok($late, '<', 4 * $early, "40,000 $name: " . join(' ', map { sprintf '%.0f', 1000 * $_ } @took) . ' ms');
}

done_testing();
