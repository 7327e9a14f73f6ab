
# The programs of doc/drivers.md do what the page says: each is taken out of it and
# run twice with one key, on the server itself and through PgBouncer in transaction
# mode, by a role that has grant_usage and the rights on its tables.
#
# A program whose driver is not installed is left out, with a word.  Those for node come
# by npm, node pg in the version that examples/http names.  pgx is version 4, as Debian
# has it: the page says what differs.

use strict;
use warnings;

use Cwd qw(abs_path);
use File::Basename qw(dirname);
use IPC::Run qw(run start);
use FindBin;
use lib "$FindBin::RealBin/lib";
use Ask;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $root = abs_path(dirname(__FILE__) . '/..');
my $page = slurp_file("$root/doc/drivers.md");
my $dir = PostgreSQL::Test::Utils::tempdir();
my ($jdbc) = glob '/usr/share/java/postgresql.jar';
my $python = '/usr/bin/python3';

my $npm = "cd $dir && timeout 300 npm --omit=dev --ignore-scripts --no-audit --no-fund --prefer-offline";
my $gopath = '/usr/share/gocode';

# Where Debian puts the sources of Go's packages, and no modules.
@ENV{qw(GOPATH GO111MODULE)} = ($gopath, 'off');

# Making Prisma's client takes no engine, but looks for one and would load it.
$ENV{PRISMA_SCHEMA_ENGINE_BINARY} = '/bin/true';
append_to_file("$dir/schema.prisma", (blocks('Prisma'))[1]);

# each with its file, how it is run, how to tell that it is there, how its statements
# show in the server's log, and how it is built first
my @drivers = (
	[ 'node pg', 'orders.mjs', ['node'], "cp $root/examples/http/package*.json $dir && $npm ci" ],
	[ 'Postgres.js', 'orders_postgres.mjs', ['node'], "$npm install postgres\@3.4.9" ],
	[ 'psycopg 3', 'orders_psycopg.py', [$python], "$python -c 'import psycopg'" ],
	[ 'psycopg 2', 'orders_psycopg2.py', [$python], "$python -c 'import psycopg2'", 'statement' ],
	[ 'asyncpg', 'orders_asyncpg.py', [$python], "$python -c 'import asyncpg'" ],
	[ 'SQLAlchemy', 'orders_alchemy.py', [$python], "$python -c 'import sqlalchemy, psycopg2'", 'statement' ],
	[ 'pgjdbc', 'Orders.java', [ 'java', '-cp', $jdbc ], $jdbc && 'javac -version' ],
	[ 'ActiveRecord', 'orders.rb', ['ruby'], q{ruby -e 'require "active_record"; require "pg"'} ],
	[ 'ruby-pg', 'orders_pg.rb', ['ruby'], q{ruby -e 'require "pg"'} ],
	[ 'DBD::Pg', 'orders.pl', [$^X], "$^X -MDBD::Pg -e1" ],
	[ 'pgx', 'orders.go', ["$dir/orders"], "test -d $gopath/src/github.com/jackc/pgx/v4 && go version", 'execute', "cd $dir && go build orders.go" ],
	[ 'Prisma', 'orders_prisma.mjs', ['node'], "$npm install prisma\@7.10.0 \@prisma/client\@7.10.0 \@prisma/adapter-pg\@7.10.0 && npx prisma generate --schema schema.prisma" ],
);
$_->[3] = $_->[3] && system("($_->[3]) >/dev/null 2>&1") == 0 for @drivers;
plan skip_all => 'no driver is installed' if !grep { $_->[3] } @drivers;

my $node = PostgreSQL::Test::Cluster->new('drivers');
$node->init;
# pgjdbc has no Unix sockets
$node->append_conf('postgresql.conf', "listen_addresses = '127.0.0.1'\nlog_statement = 'all'");
$node->start;
ask_at(node => $node);
$node->safe_psql('postgres', readme_sql('CREATE EXTENSION') . q{
	CREATE ROLE app LOGIN;
	SELECT idempotency.grant_usage('app');
} . readme_sql('CREATE TABLE orders') =~ s/BEGIN;.*//sr . sql_of($page));

my %way = ('on the server' => $node->port);
my ($pgbouncer) = grep { -x } map { "$_/pgbouncer" } split(/:/, $ENV{PATH}), '/usr/sbin';
my $pooler;
$way{'through PgBouncer'} = start_pooler() if $pgbouncer;

for my $driver (@drivers)
{
	my ($name, $file, $command, $there, $protocol, $build) = @$driver;

  SKIP:
	{
		skip "$name is not installed" if !$there;
		append_to_file("$dir/$file", $name eq 'pgx' ? pgx_4((blocks($name))[0]) : (blocks($name))[0]);
		is(system($build), 0, "$name: is built") if $build;
		try($name, $_, $protocol // 'execute', @$command, $build ? () : "$dir/$file") for sort keys %way;
	}
}

$node->stop;
done_testing();

# also when a test dies
END { local $?; $pooler->kill_kill if $pooler; }

# try(name, way, protocol, command...)
sub try
{
	my ($name, $way, $protocol, @command) = @_;
	my $key = "$name $way";
	my $item = "book for $key";
	my $logged = -s $node->logfile;

	my ($first, $error) = printed($way, @command, $key, $item);
	my $order = query("SELECT string_agg(id::text, ',') FROM orders WHERE item = '$item'");
	my $stored = query("SELECT 'completed ' || (l).response FROM idempotency.lookup('pay', '$key') l
		UNION ALL SELECT 'completed ' || (l).response FROM idempotency.lookup('orders', '$key') l");

	is($first, "$stored\nmail $order\nindex $order\n", "$key: run, claim, take") or diag($error);
	is(query("SELECT count(*) FROM payment WHERE order_no = '$item'"), '1', "$key: paid");
	is(query('SELECT count(*) FROM idempotency.outbox'), '0', "$key: every event is acknowledged");
	($first, $error) = printed($way, @command, $key, $item);
	is($first, "$stored\n", "$key: the retry gets the first answers") or diag($error);
	is(query("SELECT (SELECT count(*) FROM payment WHERE order_no = '$item') + (SELECT count(*) FROM orders WHERE item = '$item')"), '2', "$key: and does nothing");
	($first, $error) = printed($way, @command, $key, 'another');
	like($first, qr/^mismatch .*\nmismatch /, "$key: another request is told") or diag($error);
	like(slurp_file($node->logfile, $logged), qr/LOG:  $protocol\b[^\n]*:\s+SELECT [\w*, ]+ FROM idempotency.run/, "$key: by the protocol that is meant");
	return;
}

# printed(way, command...): what it prints, and its errors
sub printed
{
	my ($way, @command) = @_;
	my ($out, $err);

	local @ENV{qw(PGHOST PGPORT PGUSER PGDATABASE)} = ('127.0.0.1', $way{$way}, 'app', 'postgres');
	run \@command, '<', \undef, '>', \$out, '2>', \$err, IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default);
	return ($out, $err);
}

# blocks(driver): those of its section, the program first.
sub blocks
{
	my ($name) = @_;
	my ($section) = $page =~ /^## \Q$name\E\n(.*?)(?=^## |\z)/ms or die "no section for $name";

	return $section =~ /^```\w+\n(.*?)^```$/gms;
}

# What the page says of version 4.
sub pgx_4
{
	my ($program) = @_;

	return $program =~ s{/pgx/v5"}{/pgx/v4"}r =~ s{"default_query_exec_mode=cache_describe"}{"statement_cache_mode=describe"}r;
}

sub sql_of { return join '', $_[0] =~ /^```sql\n(.*?)^```$/gms; }

# readme_sql(beginning): the block of the README that begins so.
sub readme_sql
{
	my ($begins) = @_;

	return slurp_file("$root/README.md") =~ /^```sql\n(\Q$begins\E.*?)^```$/ms ? $1 : die "no $begins";
}

# Its port.
sub start_pooler
{
	my $port = PostgreSQL::Test::Cluster::get_free_port();

	append_to_file("$dir/users.txt", qq{"app" ""\n});
	append_to_file("$dir/pgbouncer.ini", sprintf <<'INI', $node->host, $node->port, $port, $dir, $dir);
[databases]
postgres = host=%s port=%d dbname=postgres

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = trust
auth_file = %s/users.txt
logfile = %s/pgbouncer.log
ignore_startup_parameters = extra_float_digits
pool_mode = transaction
default_pool_size = 4
INI
	$pooler = start [ $pgbouncer, '-q', "$dir/pgbouncer.ini" ], '<', \undef;
	for (1 .. 600)
	{
		last if system("psql -X -h 127.0.0.1 -p $port -U app -d postgres -c '' >/dev/null 2>&1") == 0;
		select undef, undef, undef, 0.1;
	}
	return $port;
}
