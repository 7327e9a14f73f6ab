# Tokens and copies of a database.  A token is for the database that issued it:
# a copy made by CREATE DATABASE, from template1 too, neither accepts nor makes
# those of the original, with the same keys in both.  A restored dump accepts
# what the original issued, and issues tokens of its own, also with a clock
# that is wrong.  A renamed database and a promoted standby are the same database;
# any other copy of the files is one, until rotate_token_key(retire => true).
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use Ask;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('original');
$node->init(allows_streaming => 1);
$node->start;
$node->safe_psql('postgres', 'CREATE ROLE app LOGIN');
$node->safe_psql('template1', q{CREATE EXTENSION idempotency; SELECT idempotency.grant_usage('app')});
$node->safe_psql('postgres', 'CREATE DATABASE shop; CREATE DATABASE other');

# In a database, on the original unless another node is given.
sub issue { return query($_[1] // $node, 'app', $_[0], q{SELECT idempotency.issue_token('s', 'p', '1 day')}); }
sub check { return query($_[2] // $node, 'app', $_[0], "SELECT status FROM idempotency.check_token('$_[1]', 's', 'p')"); }
sub consume { return query($_[2] // $node, 'app', $_[0], "SELECT status FROM idempotency.consume_token('$_[1]', 's', 'p')"); }

# What each of two databases makes of its own token and of the other's.
sub mutual
{
	my ($a, $b) = @_;
	my ($of_a, $of_b) = (issue($a), issue($b));
	return join ' ', check($a, $of_a), check($a, $of_b), check($b, $of_a), check($b, $of_b);
}
my $keys = q{SELECT string_agg(md5(secret), ',' ORDER BY id) FROM idempotency.token_keys};

#
# Copied by CREATE DATABASE
#
is($node->safe_psql('shop', $keys), $node->safe_psql('other', $keys), 'from template1, two databases have the same key');
is(mutual('shop', 'other'), 'valid invalid invalid valid', 'and each its own tokens');

$node->safe_psql('shop', 'SELECT idempotency.rotate_token_key()');
my ($before, $used) = (issue('shop'), issue('shop'));
is(consume('shop', $used), 'consumed', 'one was used');
$node->safe_psql('postgres', 'CREATE DATABASE copy TEMPLATE shop');
is($node->safe_psql('copy', $keys), $node->safe_psql('shop', $keys), 'a copy has the same keys');
is(mutual('shop', 'copy'), 'valid invalid invalid valid', 'and tokens of its own');
is(check('copy', $before) . ' ' . check('copy', $used), 'invalid invalid', 'none from before the copy');
is(check('shop', $before) . ' ' . check('shop', $used), 'valid used', 'which the original still knows');

# a copy of the copy, and keys that were rotated in one
my $mine = issue('copy');
$node->safe_psql('copy', 'SELECT idempotency.rotate_token_key()');
is(check('copy', $mine) . ' ' . check('copy', $before), 'valid invalid', 'a rotation in the copy changes nothing');
$node->safe_psql('postgres', 'CREATE DATABASE copy2 TEMPLATE copy');
is(mutual('copy', 'copy2'), 'valid invalid invalid valid', 'nor is a copy of the copy the copy');
is(mutual('shop', 'copy2'), 'valid invalid invalid valid', 'or the original');

#
# Renamed
#
my $renamed = issue('copy');
$node->safe_psql('postgres', 'ALTER DATABASE copy RENAME TO moved');
is(consume('moved', $renamed), 'consumed', 'a renamed database is the same');

#
# Dumped and restored, here and on another server whose database has the same OID
#
my $dump = $node->basedir . '/dump.sql';
$node->command_ok([ 'pg_dump', '-d', $node->connstr('shop'), '-f', $dump ], 'dump');
$node->command_ok([ 'pg_dump', '-d', $node->connstr('shop'), '--inserts', '-f', "$dump.inserts" ], 'as INSERT commands');
my $elsewhere = PostgreSQL::Test::Cluster->new('elsewhere');
$elsewhere->init;
$elsewhere->start;
$elsewhere->safe_psql('postgres', 'CREATE ROLE app LOGIN');
my $oid = $node->safe_psql('postgres', q{SELECT oid FROM pg_database WHERE datname = 'shop'});
$elsewhere->safe_psql('postgres', "CREATE DATABASE shop OID $oid");
$node->safe_psql('postgres', 'CREATE DATABASE restored TEMPLATE template0');
for my $to ([ $node, 'restored', $dump ], [ $elsewhere, 'shop', "$dump.inserts" ])
{
	my ($on, $database, $file) = @$to;
	my $where = $on->name;
	$on->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $on->connstr($database), '-f', $file ], "restore: $where");
	is(check($database, $before, $on) . ' ' . check($database, $used, $on), 'valid used', "$where: tokens are what they were");
	# as if the original's key were the newer one
	$on->safe_psql($database, q{UPDATE idempotency.token_keys SET created_at = created_at - interval '1 year'
		WHERE (system, database) = (SELECT system_identifier, d.oid FROM pg_control_system(), pg_database d WHERE datname = current_database())});
	my $issued = issue($database, $on);
	is(check($database, $issued, $on) . ' ' . check('shop', $issued), 'valid invalid', "$where: and new ones its own");
	is(consume($database, $before, $on), 'consumed', "$where: used here");
	is(check('shop', $before), 'valid', "$where: which the original does not hear of");
	$on->safe_psql($database, 'SELECT idempotency.rotate_token_key(retire => true)');
	is(check($database, issue('shop'), $on), 'invalid', "$where: retired, it knows no more of the original's");
}
$elsewhere->stop;

#
# A standby that is promoted, and a copy of the files
#
$node->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->start;
my $staging = PostgreSQL::Test::Cluster->new('staging');
$staging->init_from_backup($node, 'backup');
$staging->start;
my $of_standby = issue('shop', $standby);
is(check('shop', $of_standby), 'valid', 'a standby issues tokens of its primary');
is(check('shop', issue('shop', $staging)), 'valid', 'and so does a copy of the files, which cannot be told from it');
$staging->safe_psql('shop', 'SELECT idempotency.rotate_token_key(retire => true)');
my $of_staging = issue('shop', $staging);
is(check('shop', $of_staging) . ' ' . check('shop', $of_standby, $staging), 'invalid invalid', 'unless its keys were retired');
$staging->stop;
my $outstanding = issue('shop');
$node->wait_for_catchup($standby);
$node->stop;
$standby->promote;
is(join(' ', map { consume('shop', $_, $standby) } $outstanding, $of_standby, $used), 'consumed consumed used', 'promoted, it goes on with the same tokens');
$standby->stop;

done_testing();
