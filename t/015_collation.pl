# Collations that take different strings for equal, which only a server with ICU
# has: what they mean for insert_once, and why no state may have one.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('collation');
$node->init(extra => [qw(--encoding=UTF8 --no-locale)]);
$node->start;
plan skip_all => 'the server was built without ICU'
  if $node->safe_psql('postgres', q{SELECT count(*) FROM pg_collation WHERE collprovider = 'i'}) == 0;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idempotency;
	CREATE COLLATION insensitive (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
	CREATE TABLE mail (address text COLLATE insensitive, tag text COLLATE "C", v int, UNIQUE (address, tag));
	CREATE TABLE twice (address text);
	CREATE UNIQUE INDEX twice_c ON twice (address);
	CREATE UNIQUE INDEX twice_i ON twice (address COLLATE insensitive);
	CREATE TABLE ord (id int PRIMARY KEY, status text COLLATE insensitive);
	SELECT idempotency.define_machine('ord', '{"initial": "NEW", "transitions": {"NEW": ["PAID"]}}');
});

# equality is the index's
is(insert('mail', '{"address": "A@b", "tag": "x", "v": 1}'), '(t,"(A@b,x,1)")', 'the first');
is(insert('mail', '{"address": "a@B", "tag": "x", "v": 2}'), '(f,"(A@b,x,1)")', 'equal by one collation');
is(insert('mail', '{"address": "a@B", "tag": "X", "v": 3}'), '(t,"(a@B,X,3)")', 'not by another');

# and that of the index that was chosen
is(insert('twice', '{"address": "A"}', q{ARRAY['address']}), '(t,"(A)")', 'the first');
is(insert('twice', '{"address": "A"}', q{ARRAY['address']}), '(f,"(A)")', 'equal by both');
like(insert('twice', '{"address": "a"}', q{ARRAY['address']}),
	qr/ERROR:  23505: .*"twice_i".*Key \(address\)=\(a\) already exists/s, 'unlike by the index that was chosen');
$node->safe_psql('postgres', 'DROP INDEX twice_c');
is(insert('twice', '{"address": "a"}'), '(f,"(A)")', 'equal by the only one');

like(tried(q{SELECT idempotency.attach_machine('ord', 'status', 'ord')}),
	qr/ERROR:  0A000: column "status" has a nondeterministic collation/, 'states are told apart by their bytes');

$node->stop;
done_testing();

sub insert
{
	my ($table, $row, @columns) = @_;
	return tried('SELECT idempotency.insert_once(' . join(', ', "NULL::$table", "'$row'", @columns) . ')');
}

# What it returns, or its error.
sub tried
{
	my ($sql) = @_;
	my ($ret, $out, $err) = $node->psql('postgres', "\\set VERBOSITY verbose\n$sql");
	return $err || $out;
}
