# A dump goes into a database of another encoding, where the same request has
# other bytes: no retry of it is a mismatch.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('encoding');
$node->init(extra => [qw(--encoding=UTF8 --no-locale)]);
$node->start;
$node->safe_psql('postgres', qq{CREATE DATABASE $_->[0] TEMPLATE template0 ENCODING '$_->[1]' LOCALE 'C'})
  for ['latin', 'LATIN1'], ['utf', 'UTF8'], ['latin_again', 'LATIN1'];
$node->safe_psql('latin', q{
	CREATE EXTENSION idempotency;
	SELECT idempotency.run('shop', 'request', 'jsonb_typeof', jsonb_build_object('name', 'caf' || chr(233)));
	SELECT idempotency.run('shop', 'text', 'jsonb_typeof', 'null', fingerprint => 'caf' || chr(233));
});

my $dump = $node->basedir . '/latin.sql';
$node->command_ok(['pg_dump', '-d', $node->connstr('latin'), '-f', $dump], 'dumped');
$node->command_ok(['psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr($_), '-f', $dump], "restored to $_")
  for qw(utf latin_again);

my @same = ("jsonb_build_object('name', 'caf' || chr(233))", "'caf' || chr(233)");
my @other = (q{'{"name": "tea"}'}, "'tea'");
is(statuses('utf', @same), 'completed|completed', 'in another encoding the same request is none that differs');
is(statuses('utf', @other), 'completed|completed', 'what cannot be compared is not');
is(statuses('latin_again', @same), 'completed|completed', 'in the same encoding: the same request');
is(statuses('latin_again', @other), 'mismatch|mismatch', 'and another one');

$node->stop;
done_testing();

sub statuses
{
	my ($database, $request, $text) = @_;
	return $node->safe_psql($database, qq{
		SELECT (idempotency.claim('shop', 'request', $request)).status, (idempotency.claim('shop', 'text', fingerprint => $text)).status});
}
