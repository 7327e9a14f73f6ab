# Upkeep by the owner of the extension, who is no superuser: grants, dumps,
# purges and trims the history, updates and rebuilds indexes; and the same for a
# role that takes the owner's place.  Where the objects are a superuser's, since
# a plain role created the extension (it is trusted), REASSIGN OWNED hands on the
# extension, and grant_owner() the rest; where they are the owner's, it hands on
# all.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('owner');
$node->init;
$node->start;
my $su = $node->safe_psql('postgres', 'SELECT current_user');
$node->safe_psql('postgres', q{
	CREATE ROLE app LOGIN;
	CREATE ROLE plain LOGIN;
	CREATE ROLE heir LOGIN;
	CREATE ROLE installer LOGIN SUPERUSER;
	CREATE ROLE plain_heir LOGIN;
	CREATE DATABASE trusted OWNER plain;
	CREATE DATABASE installed;
	GRANT CREATE ON DATABASE installed TO plain_heir;
});

sub attempt
{
	my ($role, $database, $sql) = @_;
	my ($ret, $stdout, $stderr) = $node->psql($database, "\\set VERBOSITY sqlstate\n$sql",
		on_error_stop => 1, extra_params => [ '-U', $role ]);
	return $stderr =~ /ERROR:\s+(\w{5})/ ? $1 : $stdout;
}

my $log = q{INSERT INTO idempotency.transition_log (table_name, row_id, machine, from_state, to_state, changed_at, changed_by)
	VALUES ('t', '1', 'm', 'A', 'B', now() - interval '1 year', 'x'), ('t', '2', 'm', 'A', 'B', now(), 'x')};

# All that an owner does; each gives what it should.
my $keys = 0;
sub upkeep
{
	my ($role, $database, $indexes) = @_;
	$node->safe_psql($database, "SELECT idempotency.revoke_usage('app'); TRUNCATE idempotency.transition_log; $log");
	is(attempt($role, $database, q{SELECT idempotency.grant_usage('app')}), 't', "$database, $role: grants");
	is(attempt('app', $database, "SELECT idempotency.once('owner', '" . ++$keys . "')"), 't', "$database, $role: which help");
	is(attempt($role, $database, q{SELECT idempotency.purge() >= 0, idempotency.purge_history('90 days')}), 't|1', "$database, $role: purges");
	is(attempt($role, $database, 'DELETE FROM idempotency.transition_log RETURNING row_id'), '2', "$database, $role: deletes history");
	is(attempt($role, $database, 'ALTER EXTENSION idempotency UPDATE'), '', "$database, $role: updates");
	$node->command_ok([ 'pg_dump', '-U', $role, '-f', $node->basedir . '/dump.sql', '-d', $node->connstr($database) ], "$database, $role: dumps");
	is(attempt($role, $database, $indexes), '', "$database, $role: rebuilds indexes");
}

# Of a table that is a superuser's: from 17 on by a privilege, before as the
# owner of the database.
my $major = $node->safe_psql('postgres', 'SHOW server_version_num') / 10000;
my $table = 'REINDEX TABLE CONCURRENTLY idempotency.keys';
my $trusted = $major >= 17 ? $table : 'REINDEX DATABASE CONCURRENTLY trusted';
my $reindexed = q{SELECT pg_relation_filenode('idempotency.keys_pkey')};

is(attempt('plain', 'trusted', 'CREATE EXTENSION idempotency'), '', 'a plain role creates the extension');
my $before = $node->safe_psql('trusted', $reindexed);
upkeep('plain', 'trusted', $trusted);
isnt($node->safe_psql('trusted', $reindexed), $before, 'they are new');

# The grants run as a superuser there.  Neither a role's name, nor what the owner
# has in his search path, makes them run anything else.
my $hostile = 'app" TO PUBLIC; ALTER ROLE plain SUPERUSER; --';
$node->safe_psql('postgres', sprintf 'CREATE ROLE "%s"', $hostile =~ s/"/""/gr);
my $traps = q{
	CREATE SCHEMA trap;
	CREATE FUNCTION trap.spring() RETURNS integer LANGUAGE plpgsql AS $$
	BEGIN ALTER ROLE plain SUPERUSER; RETURN 1; EXCEPTION WHEN insufficient_privilege THEN RETURN 0; END $$;
	CREATE FUNCTION trap.format(text, VARIADIC text[]) RETURNS text LANGUAGE sql AS 'SELECT trap.spring(); SELECT $1';
	CREATE FUNCTION trap.format(text, text, name) RETURNS text LANGUAGE sql AS 'SELECT trap.spring(); SELECT $1';
	CREATE FUNCTION trap.unnest(text[]) RETURNS SETOF text LANGUAGE sql AS 'SELECT trap.spring(); SELECT $1[1]';
	CREATE FUNCTION trap.eq(name, name) RETURNS boolean LANGUAGE sql AS 'SELECT trap.spring(); SELECT true';
	CREATE OPERATOR trap.= (LEFTARG = name, RIGHTARG = name, FUNCTION = trap.eq);
	CREATE FUNCTION trap.fits(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT trap.spring(); SELECT true';
	CREATE OPERATOR trap.~~ (LEFTARG = text, RIGHTARG = text, FUNCTION = trap.fits);
};
is(attempt('plain', 'trusted', $traps), '', 'traps are set');
for my $role ('app', $hostile)
{
	for my $function (qw(grant_usage grant_admin grant_owner revoke_admin revoke_usage))
	{
		like(attempt('plain', 'trusted', qq{
				SET search_path = trap, pg_temp, pg_catalog;
				CREATE TEMP VIEW pg_proc AS SELECT trap.spring();
				CREATE TEMP VIEW pg_roles AS SELECT trap.spring();
				CREATE TEMP VIEW pg_class AS SELECT trap.spring();
				SELECT idempotency.$function(\$role\$$role\$role\$)}),
			qr/^[tf]$/, "$function, with traps set");
	}
}
is($node->safe_psql('trusted', q{SELECT count(*) FROM pg_roles WHERE rolname IN ('plain', 'app') AND rolsuper}), '0', 'nobody became a superuser');
is($node->safe_psql('trusted', q{SELECT has_schema_privilege('public', 'idempotency', 'USAGE')}), 'f', 'nor did everybody get in');
$node->safe_psql('trusted', 'DROP SCHEMA trap CASCADE');

$node->safe_psql('trusted', 'REASSIGN OWNED BY plain TO heir');
$node->safe_psql('postgres', 'ALTER DATABASE trusted OWNER TO heir');
is(attempt('heir', 'trusted', q{SELECT idempotency.grant_usage('app')}), '42501', 'the heir may not grant yet');
is(attempt('plain', 'trusted', q{SELECT idempotency.grant_owner('heir')}), 't', 'let in by the one before');
upkeep('heir', 'trusted', $trusted);
$node->safe_psql('trusted', 'DROP OWNED BY plain');
is(attempt('plain', 'trusted', q{SELECT idempotency.once('trusted', 'x')}), '42501', 'who has nothing any more');
$node->safe_psql('postgres', 'DROP ROLE plain');
upkeep('heir', 'trusted', $trusted);

is(attempt('installer', 'installed', 'CREATE EXTENSION idempotency'), '', 'a superuser creates the extension');
upkeep('installer', 'installed', $table);
$node->safe_psql('installed', 'REASSIGN OWNED BY installer TO plain_heir; DROP OWNED BY installer');
$node->safe_psql('postgres', 'DROP ROLE installer');
upkeep('plain_heir', 'installed', $table);

# with any name of the owner
my $odd = q{o'$role$"x};
$node->safe_psql('postgres', sprintf 'CREATE ROLE "%1$s" LOGIN; CREATE DATABASE odd OWNER "%1$s"', $odd =~ s/"/""/gr);
is(attempt($odd, 'odd', 'CREATE EXTENSION idempotency'), '', 'a role with an odd name creates the extension');
is(attempt($odd, 'odd', q{SELECT idempotency.grant_usage('app')}), 't', 'and grants');

# An owner of the tables, who is no superuser, runs nothing as one: not even what
# an index calls with constants, which PostgreSQL calls to know the index.
is(attempt('plain_heir', 'installed', q{
	CREATE SCHEMA trap;
	CREATE FUNCTION trap.spring() RETURNS integer IMMUTABLE LANGUAGE plpgsql AS $$
	BEGIN
		IF current_setting('is_superuser')::boolean OR current_user <> 'plain_heir' THEN RAISE LOG 'sprung by %', current_user; END IF;
		RETURN 1;
	END $$;
	CREATE INDEX sprung ON idempotency.keys ((trap.spring()));}), '', 'an index with code of its own');
is(attempt($su, 'installed', q{SELECT idempotency.purge()}), '55000', 'is refused, here to a superuser who purges');
is(attempt('app', 'installed', q{SELECT idempotency.once('owner', 'index')}), '55000', 'and to who claims');
unlike(slurp_file($node->logfile), qr/LOG:\s+sprung by/, 'and nothing of it was run');

$node->stop;
done_testing();
