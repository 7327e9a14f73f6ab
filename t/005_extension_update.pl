# ALTER EXTENSION UPDATE within a major version, shown with a made-up next
# version (test/extension_update): version 1.0, made by its own script and served by the
# library of today, keeps working; updated with its data in place it is, object
# by object, what a fresh install of the next version is; and what was stored is
# all there, also after dump and restore.  A later version yet, with one more
# attribute in each result type, is an error to the library that does not know
# it, and no crash, also in a session that was there before the update.
#
# Writes into the installation, so it runs only where it may (test/run has a
# copy of its own).
use strict;
use warnings;
use FindBin;
use lib "$FindBin::RealBin/lib";
use Ask;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('update');
my $extension = `pg_config --sharedir`;
chomp $extension;
$extension .= '/extension';
plan skip_all => "may not write to $extension; test/run has a copy" if !-w $extension;

# The next version's fresh script: 1.0's as somebody would have edited it.
my $script = slurp_file("$extension/idempotency--1.0.sql");
my $control = slurp_file("$extension/idempotency.control");
my $added = slurp_file('test/extension_update/fresh.sql') =~ s/\A(--.*\n)+//r;
my $fresh = $script;
for my $edit (
	[ qr/(checkpoint_data jsonb,\n)(  PRIMARY KEY \(key, scope\)\n\);)/,
		sub { qq($1  note            text,\n$2\nCOMMENT ON COLUMN idempotency.keys.note IS 'a note';) } ],
	[ qr/(COMMENT ON FUNCTION idempotency\.purge\(integer\) IS) '.*'/,
		sub { "$1 'removes what has expired'" } ],
	[ qr/('lock_hash'), /, sub { "$1, 'lock_name', " } ],
	[ qr/-+\n-- Privileges: /, sub { "$added$&" } ])
{
	my ($what, $by) = @$edit;
	is($fresh =~ s/$what/$by->()/ge, 1, "edit: $what");
}

# The delta repeats what is only replaced: the list of privileges, and the views
# and functions that name the columns of what they read.
my $delta = slurp_file('test/extension_update/delta.sql');
is($delta =~ s/^-- Here stands what fresh\.sql has\.\n/$added/m, 1, 'repeat: what is new');
for my $replaced (qr/FUNCTION idempotency\.privileges_of.*?\$\$;\n/s,
	qr/VIEW idempotency\.in_flight.*?;\n/s,
	qr/FUNCTION idempotency\.key_stats.*?^END;\n/sm, qr/VIEW idempotency\.stats.*?;\n/s,
	qr/FUNCTION idempotency\.holder.*?^END;\n/sm)
{
	like($fresh, qr/CREATE $replaced/, "repeat: $replaced");
	$fresh =~ /CREATE ($replaced)/;
	$delta .= "CREATE OR REPLACE $1";
}

# Replaced, a function costs what it does by default.
like($fresh, my $costs = qr/^DO \$\$\n(?:(?!^\$\$;).)*COST 5000.*?^\$\$;\n/ms, 'repeat: costs');
$delta .= $& if $fresh =~ $costs;

END { restore() if $fresh }

sub restore
{
	local $?;
	unlink map { "$extension/idempotency--$_.sql" } 'next', '1.0--next', 'next--later';
	overwrite('idempotency.control', $control);
}

sub overwrite
{
	my ($file, $text) = @_;
	unlink "$extension/$file";
	open my $out, '>', "$extension/$file" or die "$file: $!";
	print $out $text;
	close $out or die "$file: $!";
}

overwrite('idempotency--next.sql', $fresh);
overwrite('idempotency--1.0--next.sql', $delta);
overwrite('idempotency--next--later.sql', join '', map { "ALTER TYPE idempotency.${_} ADD ATTRIBUTE note text;\n" } $script =~ /^CREATE TYPE idempotency\.(\w+)/mg);
overwrite('idempotency.control', $control =~ s/^default_version = \K.*$/'next'/mr);

$node->init;
$node->append_conf('postgresql.conf', "max_prepared_transactions = 5\n");
$node->start;
ask_at(node => $node);
$node->safe_psql(
	'postgres', q{
	CREATE ROLE regress_owner LOGIN;
	CREATE ROLE regress_app LOGIN;
	CREATE DATABASE fresh OWNER regress_owner;
	CREATE DATABASE updated OWNER regress_owner;
	CREATE DATABASE restored OWNER regress_owner;
});

# What makes up the extension in a database, a line for each fact.  Row and
# array types are members before 17, and go with their tables.
sub facts
{
	my ($database) = @_;
	my %facts = map { $_ => 1 } split /\n/, $node->safe_psql($database, q{
WITH members AS (
  SELECT d.classid, d.objid, pg_describe_object(d.classid, d.objid, 0) AS object
  FROM pg_depend d
  LEFT JOIN pg_type t ON d.classid = 'pg_type'::regclass AND t.oid = d.objid
  LEFT JOIN pg_class c ON c.oid = t.typrelid
  WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
    AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idempotency')
    AND coalesce(t.typelem, 0) = 0 AND coalesce(c.relkind, 'c') = 'c'
), classes AS (
  SELECT m.object, c.* FROM members m JOIN pg_class c ON c.oid = m.objid WHERE m.classid = 'pg_class'::regclass
), functions AS (
  SELECT m.object, p.* FROM members m JOIN pg_proc p ON p.oid = m.objid WHERE m.classid = 'pg_proc'::regclass
), facts(object, aspect, value) AS (
  SELECT object, 'is there', '' FROM members
  UNION ALL
  SELECT object, 'comment', obj_description(objid, classid::regclass::name) FROM members
  UNION ALL
  SELECT object, 'definition', pg_get_functiondef(oid) FROM functions
  UNION ALL
  SELECT object, 'owner', proowner::regrole::text FROM functions
  UNION ALL
  SELECT object, 'owner and kind', concat_ws(' ', relowner::regrole, relkind, relpersistence, relrowsecurity, relreplident, relam) FROM classes
  UNION ALL
  SELECT object, 'options', array_to_string(reloptions, ' ') FROM classes
  UNION ALL
  SELECT object, 'options of its TOAST table', array_to_string(t.reloptions, ' ') FROM classes c JOIN pg_class t ON t.oid = c.reltoastrelid
  UNION ALL
  SELECT object, 'definition', pg_get_viewdef(oid) FROM classes WHERE relkind = 'v'
  UNION ALL
  SELECT object, 'column ' || row_number() OVER (PARTITION BY a.attrelid ORDER BY a.attnum),
    concat_ws(' ', a.attname, format_type(a.atttypid, a.atttypmod), a.attcollation::regcollation, a.attnotnull, a.attstorage, a.attidentity, pg_get_expr(d.adbin, d.adrelid),
      col_description(a.attrelid, a.attnum))
  FROM classes c
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
  UNION ALL
  SELECT object, 'attribute ' || a.attnum, concat_ws(' ', a.attname, format_type(a.atttypid, a.atttypmod))
  FROM members m JOIN pg_type t ON m.classid = 'pg_type'::regclass AND t.oid = m.objid JOIN pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0
  UNION ALL
  SELECT object, 'constraint ' || k.conname, pg_get_constraintdef(k.oid) FROM classes c JOIN pg_constraint k ON k.conrelid = c.oid
  UNION ALL
  SELECT object, 'index ' || i.indexrelid::regclass, pg_get_indexdef(i.indexrelid) FROM classes c JOIN pg_index i ON i.indrelid = c.oid
  UNION ALL
  SELECT object, 'trigger ' || t.tgname, concat_ws(' ', pg_get_triggerdef(t.oid), t.tgenabled) FROM classes c JOIN pg_trigger t ON t.tgrelid = c.oid
  UNION ALL
  SELECT object, 'sequence', concat_ws(' ', s.seqtypid::regtype, s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcache, s.seqcycle) FROM classes c JOIN pg_sequence s ON s.seqrelid = c.oid
  UNION ALL
  SELECT object, 'is dumped', x.condition
  FROM pg_extension e, unnest(e.extconfig, e.extcondition) AS x(rel, condition), classes c WHERE e.extname = 'idempotency' AND c.oid = x.rel
  UNION ALL
  SELECT object, 'privilege', concat_ws(' ', a.privilege_type, 'of', CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END, 'by', a.grantor::regrole, a.is_grantable)
  FROM (SELECT object, coalesce(proacl, acldefault('f', proowner)) FROM functions
        UNION ALL SELECT object, coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", relowner)) FROM classes
        UNION ALL SELECT m.object, coalesce(n.nspacl, acldefault('n', n.nspowner)) FROM members m JOIN pg_namespace n ON m.classid = 'pg_namespace'::regclass AND n.oid = m.objid
        UNION ALL SELECT m.object, coalesce(t.typacl, acldefault('T', t.typowner)) FROM members m JOIN pg_type t ON m.classid = 'pg_type'::regclass AND t.oid = m.objid) AS l(object, acl),
    aclexplode(l.acl) a
)
SELECT replace(concat_ws(': ', object, aspect, value), E'\n', '\n') FROM facts
});
	return \%facts;
}

# Names each fact that only one side has.
sub same_facts
{
	my ($left, $right, $what, $ignored) = @_;
	my ($a, $b) = map { my $f = facts($_); +{ map { $ignored ? s/$ignored//r : $_ => 1 } keys %$f } } $left, $right;
	my @differ = sort((map { "only in $left: $_" } grep { !$b->{$_} } keys %$a),
		(map { "only in $right: $_" } grep { !$a->{$_} } keys %$b));
	ok(!@differ && keys %$a > 500, $what . ', ' . keys(%$a) . ' facts')
	  or diag join "\n", @differ;
}

# All rows of all tables, but for what a restored extension makes anew and for
# columns that have no value.
sub rows
{
	my ($database) = @_;
	my @tables = split /\n/, $node->safe_psql($database, q{
		SELECT c.oid::regclass FROM pg_class c
		WHERE relnamespace = 'idempotency'::regnamespace AND relkind = 'r' AND relname NOT IN ('token_keys', 'secrets', 'notes')
		ORDER BY relname});
	return join("\n", map {
		"$_: " . $node->safe_psql($database, qq{
			SELECT jsonb_agg(r ORDER BY r::text COLLATE "C") FROM (SELECT jsonb_strip_nulls(to_jsonb(t)) AS r FROM $_ t) x})
	} @tables)
	  . $node->safe_psql($database, q{
		SELECT sequencename, last_value FROM pg_sequences
		WHERE schemaname = 'idempotency' AND sequencename <> 'note_id_seq' ORDER BY 1});
}

# Version 1.0 in use, by its own script, with today's library: if that lacks a
# function that the script names, this fails and says which.
query('regress_owner', 'updated', q{
	CREATE EXTENSION idempotency VERSION '1.0';
	SELECT idempotency.grant_usage('regress_app');
	SELECT idempotency.define_machine('order', '{"initial": "NEW", "transitions": {"NEW": {"pay": "PAID"}}}');
	CREATE TABLE ord (id integer PRIMARY KEY, status text NOT NULL, version bigint NOT NULL DEFAULT 1, fence bigint);
	SELECT idempotency.attach_machine('ord', 'status', 'order', history => true);
	SELECT idempotency.attach_version('ord', 'version');
	INSERT INTO ord VALUES (1, 'NEW'), (2, 'NEW');
	SELECT idempotency.fire('ord', 1, 'pay');
	SELECT idempotency.update_if('ord', 2, 1, '{"fence": 1}');
	GRANT ALL ON ord TO regress_app;
});
query('regress_app', 'updated', q{
	SELECT (idempotency.claim('pay', 'k', '{"amount": 10}')).status, idempotency.complete('pay', 'k', 'answer', '{"code": 201}');
	SELECT idempotency.once('pay', 'expired', '1 us');
	SELECT fence FROM idempotency.lease('ship', 'k', '1 day') \gset
	SELECT idempotency.checkpoint('ship', 'k', :fence, 'printed', '{"label": 7}');
	SELECT idempotency.consume_token(idempotency.issue_token('s', 'p'), 's', 'p');
	SELECT idempotency.revoke_tokens('s', 'q');
	SELECT idempotency.emit('mail', to_jsonb(i), 'k') FROM generate_series(1, 3) i;
	SELECT idempotency.take('mail', 1, '1 day');
});
my $token = query('regress_app', 'updated', q{SELECT idempotency.issue_token('s', 'p', '1 day')});

# The old objects work with a library that is newer than they are.
sub works
{
	my ($database, $what) = @_;
	is(query('regress_app', $database, qq{
		BEGIN;
		SELECT * FROM idempotency.claim('pay', 'k', '{"amount": 10}');
		SELECT status FROM idempotency.claim('pay', 'k', '{"amount": 11}');
		SELECT idempotency.once('pay', 'new'), idempotency.once('pay', 'expired');
		SELECT status, checkpoint FROM idempotency.lookup('ship', 'k');
		SELECT status FROM idempotency.consume_token('$token', 's', 'p');
		SELECT payload FROM idempotency.take('mail');
		SELECT outcome FROM idempotency.fire('ord', 2, 'pay');
		ROLLBACK;
		}),
		join("\n", 'completed|answer|{"code": 201}', 'mismatch|', 't|t', 'in_progress|printed', 'consumed', 'applied')
		  =~ s/mismatch\|/mismatch/r,
		"$what: in use");
	is(query('regress_owner', $database, q{BEGIN; SELECT idempotency.purge(); SELECT count(*) FROM idempotency.in_flight; ROLLBACK;}),
		"1\n1", "$what: upkeep");
}
works('updated', 'version 1.0 with the library of today');
my $before = rows('updated');

query('regress_owner', 'updated', q{
	ALTER EXTENSION idempotency UPDATE TO 'next';
	SELECT idempotency.grant_usage('regress_app');	-- also what is new
});
query('regress_owner', 'fresh', q{
	CREATE EXTENSION idempotency VERSION 'next';
	SELECT idempotency.grant_usage('regress_app');
});
is($node->safe_psql($_, q{SELECT extversion FROM pg_extension WHERE extname = 'idempotency'}), 'next', "$_: version")
  for 'fresh', 'updated';
same_facts('fresh', 'updated', 'updated as installed');
is(rows('updated'), $before, 'updated: every row');
works('updated', 'updated');

query('regress_owner', 'updated', q{
	INSERT INTO idempotency.notes VALUES (nextval('idempotency.note_id_seq'), 'a note');
});
$before = rows('updated');
my $dump = $node->basedir . '/dump.sql';
$node->command_ok([ 'pg_dump', '-U', 'regress_owner', '-f', $dump, 'updated' ], 'pg_dump by the owner');
$node->command_ok([ 'psql', qw(-X -q -v ON_ERROR_STOP=1 -U regress_owner -o), '/dev/null', '-f', $dump, 'restored' ], 'restore by the owner');
# grants come from the role that restored them
same_facts('fresh', 'restored', 'restored as installed', qr/ by \w+(?= [tf]$)/);
is(rows('restored'), $before, 'restored: every row');
is(query('regress_owner', 'restored', 'SELECT * FROM idempotency.notes'), '1|a note', 'restored: of the new table too');
is(query('regress_owner', 'restored', q{SELECT nextval('idempotency.note_id_seq')}), '2', 'restored: the new sequence');
works('restored', 'restored');

# The library of one version, the objects of another.
my $session = $node->background_psql('updated', on_error_stop => 0);
my $lookup = q{SELECT status, response FROM idempotency.lookup('pay', 'k');};
is($session->query($lookup), 'completed|answer', 'a session before the update');
$node->safe_psql('updated', q{ALTER EXTENSION idempotency UPDATE TO 'later'});
$session->query($lookup);
like($session->{stderr}, qr/ERROR: .*row type/, 'after it, the session is told');
$session->{stderr} = '';
is($session->query(q{SELECT idempotency.once('pay', 'still')}), 't', 'and goes on');
$session->quit;
my %call = (
	claim => q{'a', 'b'}, run => q{'a', 'b', 'jsonb_pretty', '{}'}, lookup => q{'pay', 'k'}, lease => q{'a', 'b', '1 day'},
	fire => q{'ord', 2, 'pay'}, update_if => q{'ord', 2, 2, '{}'}, check_token => qq{'$token', 's', 'p'});
for my $function (sort keys %call)
{
	my ($ret, $out, $err) = $node->psql('updated', "\\set VERBOSITY sqlstate\nSELECT * FROM idempotency.$function($call{$function})");
	like($err, qr/ERROR:  55000/, "$function says so");
}
unlike(slurp_file($node->logfile), qr/terminated by signal|TRAP/, 'no crash');

$node->stop;
done_testing();
