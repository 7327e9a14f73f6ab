# What a request says is nowhere in the data directory: not in the table, its
# TOAST, the WAL or the state of a prepared transaction, after each thing that
# can be done with it.  (The server's log is the operator's: with log_statement or
# a failing statement it has what was sent.)
use strict;
use warnings;

use File::Find;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('not_kept');
$node->init(allows_streaming => 1);
$node->append_conf('postgresql.conf', q{
max_prepared_transactions = 10
wal_level = logical
wal_compression = off
idempotency.max_ttl = '1d'
});
$node->start;
$node->safe_psql('postgres', q{
CREATE EXTENSION idempotency;
CREATE FUNCTION pay(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  IF request ->> 'fail' IS NOT NULL THEN
    RAISE 'refused';
  END IF;
  RETURN 'paid';
END $$;
});

# two card numbers: one is sent in requests and texts, the other, to see that the
# search finds what is there, is an answer
my $card = '4929' . '1234' . '5678' . '9018';
my $stored = '5105' . '1051' . '0510' . '5100';
my $request = qq{('{"amount": 25, "card": "$card", "cvv": "737", "note": "' || repeat('x', 3000) || '"}')::jsonb};

$node->safe_psql('postgres', $_) for
	qq{SELECT status, idempotency.complete('kept', 'claim', '$stored') FROM idempotency.claim('kept', 'claim', $request)},
	qq{SELECT idempotency.claim('kept', 'claim', $request)},
	qq{SELECT idempotency.claim('kept', 'claim', '{"card": "$card"}')},
	qq{SELECT idempotency.claim('kept', 'claim', fingerprint => '$card')},
	qq{SELECT status, idempotency.fail('kept', 'failed', 'no') FROM idempotency.claim('kept', 'failed', fingerprint => '$card')},
	qq{SELECT idempotency.run('kept', 'run', 'pay', $request)},
	qq{SELECT idempotency.run('kept', 'run failed', 'pay', '{"card": "$card", "fail": 1}', record_errors => true)},
	qq{SELECT idempotency.lease('kept', 'lease', '0', $request)},
	qq{SELECT status, idempotency.complete('kept', 'lease', 'x') FROM idempotency.claim('kept', 'lease', $request)},
	qq{SELECT fence, idempotency.checkpoint('kept', 'live', fence, 'c') FROM idempotency.lease('kept', 'live', '1 h', $request)},
	qq{BEGIN; SELECT idempotency.claim('kept', 'prepared', $request); SELECT idempotency.complete('kept', 'prepared', 'x'); PREPARE TRANSACTION 'p'},
	qq{BEGIN; SELECT idempotency.claim('kept', 'gone', $request); SELECT idempotency.complete('kept', 'gone', 'x'); ROLLBACK},
	qq{SELECT count(*) FROM idempotency.keys},
	'VACUUM idempotency.keys',
	'CHECKPOINT';
is($node->safe_psql('postgres', q{SELECT count(*), count(fingerprint), max(octet_length(fingerprint)) FROM idempotency.keys}), '6|6|21', 'digests are stored');
$node->stop('immediate');

sub files_with
{
	my ($what) = @_;
	my @found;
	find({ no_chdir => 1, wanted => sub {
		return if !-f $_ || !-s _;
		open my $file, '<:raw', $_ or die "$_: $!";
		local $/;
		push @found, substr($_, 1 + length $node->data_dir) if index(readline($file), $what) >= 0;
	} }, $node->data_dir);
	return @found;
}

my @answers = files_with($stored);
ok((grep { /^base/ } @answers) && (grep { /^pg_wal/ } @answers), "an answer is found: @answers");
is(join(' ', files_with($card)), '', 'a request is not');
is(join(' ', files_with('"737"')), '', 'nor is another part of it');

$node->start;
is($node->safe_psql('postgres', qq{SELECT (idempotency.claim('kept', 'claim', $request)).status, (idempotency.claim('kept', 'claim', '{"card": "$card"}')).status}),
	'completed|mismatch', 'and still it is compared');

done_testing();
