# The hostile sessions of a history.  Their role has usage, TEMP and a schema of
# its own, and nothing else but the table in which the test counts effects.
#
# What such a role may do is part of the contract: usage is one domain of trust,
# so it may claim any key, take any event, show any fence and token that it has
# got hold of.  Those of its steps are the plan's like any other, and the model
# accounts for them as for anybody's.  In between it attacks: each attack is a
# statement, or several, of which is known how the contract answers it,
#
#	refused		the SQLSTATEs of which it must be given one
#	gives		its rows, as text
#	may			either of any rows, or an error with one of these SQLSTATEs
#
# and it makes its objects so that they tell when they are run in another name.
package Model::Hostile;

use strict;
use warnings;

# The role, of all databases.
sub role_sql
{
	return q{
CREATE ROLE regress_hostile LOGIN;
ALTER ROLE regress_hostile SET search_path = pg_temp, regress_hostile, public, pg_catalog;
};
}

# In its schema are a look-alike for what our functions could find by name, and
# casts, domains, operators, policies, index expressions and triggers that call
# grab(), which fails (P0666) as soon as it is called as anybody else.
sub setup_sql
{
	return q{
SELECT idempotency.grant_usage('regress_hostile');
CREATE SCHEMA regress_hostile AUTHORIZATION regress_hostile;
GRANT INSERT, SELECT (n) ON effect TO regress_hostile;
SET SESSION AUTHORIZATION regress_hostile;
SET search_path = pg_catalog, pg_temp;
CREATE FUNCTION regress_hostile.grab() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	IF current_user <> 'regress_hostile' THEN
		RAISE EXCEPTION 'hostile code ran as %', current_user USING ERRCODE = 'P0666';
	END IF;
	RETURN true;
END $$;
CREATE TABLE regress_hostile.keys (scope text, key text, status "char", response text);
CREATE TABLE regress_hostile.outbox (id bigint, topic text, payload jsonb);
CREATE TABLE regress_hostile.machines (name text, definition jsonb);
CREATE TABLE regress_hostile.transition_log (row_id jsonb, machine text);
CREATE TABLE regress_hostile.used_tokens (id uuid);
CREATE TABLE regress_hostile.token_keys (secret bytea);
CREATE FUNCTION regress_hostile.now() RETURNS timestamptz LANGUAGE sql STABLE AS $$SELECT timestamptz '1970-01-01' WHERE regress_hostile.grab()$$;
CREATE FUNCTION regress_hostile.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$SELECT timestamptz '1970-01-01' WHERE regress_hostile.grab()$$;
CREATE FUNCTION regress_hostile.quote_ident(text) RETURNS text LANGUAGE sql IMMUTABLE AS $$SELECT 'regress_hostile.keys' WHERE regress_hostile.grab()$$;
CREATE FUNCTION regress_hostile.jsonb_typeof(jsonb) RETURNS text LANGUAGE sql IMMUTABLE AS $$SELECT 'hostile' WHERE regress_hostile.grab()$$;
CREATE FUNCTION regress_hostile.same(a text, b text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$BEGIN RETURN regress_hostile.grab() AND a OPERATOR(pg_catalog.=) b; END$$;
CREATE FUNCTION regress_hostile.same(a bigint, b bigint) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$BEGIN RETURN regress_hostile.grab() AND a OPERATOR(pg_catalog.=) b; END$$;
CREATE FUNCTION regress_hostile.same(a name, b name) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$BEGIN RETURN regress_hostile.grab() AND a OPERATOR(pg_catalog.=) b; END$$;
CREATE FUNCTION regress_hostile.same(a jsonb, b jsonb) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$BEGIN RETURN regress_hostile.grab() AND a OPERATOR(pg_catalog.=) b; END$$;
CREATE OPERATOR regress_hostile.= (FUNCTION = regress_hostile.same, LEFTARG = text, RIGHTARG = text);
CREATE OPERATOR regress_hostile.= (FUNCTION = regress_hostile.same, LEFTARG = bigint, RIGHTARG = bigint);
CREATE OPERATOR regress_hostile.= (FUNCTION = regress_hostile.same, LEFTARG = name, RIGHTARG = name);
CREATE OPERATOR regress_hostile.= (FUNCTION = regress_hostile.same, LEFTARG = jsonb, RIGHTARG = jsonb);
CREATE DOMAIN regress_hostile.label AS text CHECK (regress_hostile.grab());
CREATE DOMAIN regress_hostile.number AS bigint CHECK (regress_hostile.grab());
CREATE TYPE regress_hostile.thing AS (a bigint, b text);
CREATE FUNCTION regress_hostile.as_text(regress_hostile.thing) RETURNS text LANGUAGE sql AS $$SELECT ($1).b WHERE regress_hostile.grab()$$;
CREATE FUNCTION regress_hostile.as_json(regress_hostile.thing) RETURNS jsonb LANGUAGE sql AS $$SELECT '{"cast": true}'::jsonb WHERE regress_hostile.grab()$$;
CREATE CAST (regress_hostile.thing AS text) WITH FUNCTION regress_hostile.as_text(regress_hostile.thing) AS ASSIGNMENT;
CREATE CAST (regress_hostile.thing AS jsonb) WITH FUNCTION regress_hostile.as_json(regress_hostile.thing) AS ASSIGNMENT;

-- guarded tables of its own, with everything that a table can bring along
CREATE FUNCTION regress_hostile.expression(text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$BEGIN PERFORM regress_hostile.grab(); RETURN $1; END$$;
CREATE FUNCTION regress_hostile.meddle() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM regress_hostile.grab();
	IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
	RETURN NEW;
END $$;
-- also after the statement that it is of, when somebody else may be the user
CREATE FUNCTION regress_hostile.later() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM regress_hostile.grab(), idempotency.claim('hostile later', NEW.id::text, wait => '0');
	RETURN NULL;
END $$;
CREATE TABLE regress_hostile.trap (id bigint PRIMARY KEY, state text NOT NULL DEFAULT 'NEW', version bigint NOT NULL DEFAULT 1, fence bigint, n bigint,
	note regress_hostile.label DEFAULT 'x', CHECK (regress_hostile.grab()));
CREATE INDEX ON regress_hostile.trap (regress_hostile.expression(note)) WHERE regress_hostile.expression(note) IS NOT NULL;
CREATE TRIGGER meddle BEFORE INSERT OR UPDATE OR DELETE ON regress_hostile.trap FOR EACH ROW EXECUTE FUNCTION regress_hostile.meddle();
CREATE TABLE regress_hostile.bomb (id bigint);
CREATE CONSTRAINT TRIGGER later AFTER INSERT ON regress_hostile.bomb DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION regress_hostile.later();
SELECT idempotency.attach_machine('regress_hostile.trap', 'state', 'model', history => true),
	idempotency.attach_version('regress_hostile.trap', 'version'), idempotency.attach_fence('regress_hostile.trap', 'fence');
ALTER TABLE regress_hostile.trap ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY grab ON regress_hostile.trap USING (regress_hostile.grab()) WITH CHECK (regress_hostile.grab());
INSERT INTO regress_hostile.trap (id) SELECT generate_series(1, 4);
-- a guard put by hand, there to be met by who looks at what is attached
CREATE TABLE regress_hostile.wrong (id bigint PRIMARY KEY, b bytea);
CREATE TRIGGER zz_by_hand BEFORE UPDATE OF b ON regress_hostile.wrong FOR EACH ROW EXECUTE FUNCTION idempotency.guard_version('odd');
CREATE TRIGGER zz_by_hand_state AFTER UPDATE OF b ON regress_hostile.wrong FOR EACH ROW EXECUTE FUNCTION idempotency.guard_state('model', 'history', 'and more');

-- what it has run() call
CREATE FUNCTION regress_hostile.wild(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	key text := request ->> 'key';
BEGIN
	PERFORM regress_hostile.grab();
	CASE (request ->> 'what')::integer
		WHEN 0 THEN PERFORM idempotency.claim('hostile', key, wait => '0'), idempotency.complete('hostile', key, 'mine');
		WHEN 1 THEN PERFORM idempotency.release('hostile', key);
		WHEN 2 THEN PERFORM set_config('search_path', 'regress_hostile, public, pg_temp', true), set_config('row_security', 'off', true), set_config('statement_timeout', '1h', true);
		WHEN 3 THEN PERFORM set_config('session_replication_role', 'replica', true);
		WHEN 4 THEN PERFORM set_config('idempotency.max_ttl', '1', false);
		WHEN 5 THEN PERFORM set_config('role', 'regress_model', true);
		WHEN 6 THEN
			BEGIN
				PERFORM idempotency.lease('hostile', key || 'in', '1 s');
				RAISE EXCEPTION 'back';
			EXCEPTION WHEN OTHERS THEN
				BEGIN PERFORM idempotency.fail('hostile', key, 'inside'); RAISE EXCEPTION 'again'; EXCEPTION WHEN OTHERS THEN NULL; END;
			END;
		WHEN 7 THEN PERFORM * FROM idempotency.run('hostile', key, 'regress_hostile.wild', request, wait => '0');
		WHEN 8 THEN RAISE EXCEPTION 'no' USING ERRCODE = 'IK001';
		WHEN 9 THEN EXECUTE 'DELETE FROM idempotency.keys';
		WHEN 10 THEN EXECUTE 'CREATE TEMP TABLE keys (LIKE regress_hostile.keys) ON COMMIT DROP';
		WHEN 11 THEN INSERT INTO regress_hostile.bomb VALUES (1);
			SET CONSTRAINTS ALL IMMEDIATE;
		WHEN 12 THEN PERFORM idempotency.forget('hostile', key);
		WHEN 13 THEN COMMIT;
		ELSE RAISE EXCEPTION 'no' USING ERRCODE = '40001';
	END CASE;
	RETURN key;
END $$;
RESET search_path;
RESET SESSION AUTHORIZATION;
};
}

# What only others may.  The extension's tables and functions, those of the
# honest role, and settings that decide for all.
my @tables = qw(keys machines transition_log token_keys used_tokens token_generations secrets outbox outbox_leases outbox_keys outbox_topics);
my @others = qw(doc ware resource item audit);
my (@forbidden, @types, %state);
my %views = map { ("idempotency.$_" => 1) } qw(in_flight stats parked_events topics attachments activity);
for my $table ((map { "idempotency.$_" } @tables), sort(keys %views), map { "public.$_" } @others)
{
	push @forbidden, "SELECT * FROM $table", "SELECT count(*) FROM $table", "EXPLAIN ANALYZE SELECT * FROM $table", "COPY (SELECT * FROM $table) TO STDOUT",
	  "DECLARE stolen CURSOR WITH HOLD FOR SELECT * FROM $table", "CREATE TEMP VIEW stolen AS SELECT * FROM $table; SELECT * FROM stolen";
	next if $views{$table};
	push @forbidden, "SELECT ctid FROM $table FOR UPDATE", "DELETE FROM $table", "COPY $table TO STDOUT", "COPY $table FROM PROGRAM 'true'",
	  "SELECT 1; LOCK TABLE $table IN ACCESS EXCLUSIVE MODE NOWAIT", "EXPLAIN ANALYZE DELETE FROM $table", "WITH d AS (DELETE FROM $table RETURNING 1) SELECT count(*) FROM d",
	  "DO \$\$ BEGIN DELETE FROM $table; EXCEPTION WHEN division_by_zero THEN NULL; END \$\$", "TRUNCATE $table", "DROP TABLE $table CASCADE", "ALTER TABLE $table DISABLE TRIGGER ALL", "ALTER TABLE $table OWNER TO regress_hostile", "ALTER TABLE $table RENAME TO mine",
	  "ALTER TABLE $table ADD COLUMN evil int", "ALTER TABLE $table SET SCHEMA regress_hostile", "ALTER TABLE $table ENABLE ROW LEVEL SECURITY", "CREATE INDEX ON $table ((regress_hostile.expression('x')))",
	  "CREATE POLICY evil ON $table", "REINDEX TABLE $table", "CREATE TABLE regress_hostile.child () INHERITS ($table)", "CREATE TABLE regress_hostile.copy (LIKE $table)",
	  "CREATE STATISTICS regress_hostile.s ON ctid, xmin FROM $table", "ALTER TABLE $table REPLICA IDENTITY NOTHING", "CLUSTER $table", "CREATE PUBLICATION evil FOR TABLE $table",
	  "SET LOCAL lock_timeout = '1 ms'; CREATE TRIGGER evil BEFORE INSERT ON $table FOR EACH ROW EXECUTE FUNCTION regress_hostile.meddle()";
	$state{ $forbidden[-1] } = '42501 55P03';
	$state{"CREATE STATISTICS regress_hostile.s ON ctid, xmin FROM $table"} = '42501 0A000';
}
push @forbidden, map { ($_, "DO \$\$ BEGIN $_; END \$\$") } (
	'ALTER SCHEMA idempotency RENAME TO mine', 'ALTER SCHEMA idempotency OWNER TO regress_hostile', 'DROP SCHEMA idempotency CASCADE', 'DROP EXTENSION idempotency CASCADE',
	q{ALTER EXTENSION idempotency UPDATE TO '1.0'}, 'ALTER EXTENSION idempotency DROP TABLE idempotency.keys', 'ALTER EXTENSION idempotency ADD TABLE regress_hostile.keys',
	'CREATE TABLE idempotency.mine (a int)', q{CREATE FUNCTION idempotency.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'}, 'CREATE TYPE idempotency.mine AS ENUM ()',
	q{CREATE OR REPLACE FUNCTION idempotency.lookup(scope text, key text) RETURNS idempotency.key_record LANGUAGE sql AS 'SELECT NULL::idempotency.key_record'},
	q{CREATE OR REPLACE FUNCTION idempotency.guard_state() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'},
	'ALTER FUNCTION idempotency.purge SECURITY DEFINER', 'ALTER FUNCTION idempotency.guard_version() RENAME TO mine', 'ALTER FUNCTION idempotency.guard_fence() SET SCHEMA regress_hostile',
	'DROP FUNCTION idempotency.guard_state() CASCADE', 'ALTER FUNCTION idempotency.grant_admin(name) OWNER TO regress_hostile', 'ALTER FUNCTION idempotency.purge SET search_path = regress_hostile',
	'ALTER TYPE idempotency.key_record ADD ATTRIBUTE evil text', 'ALTER TYPE idempotency.claim_result DROP ATTRIBUTE meta', 'DROP TYPE idempotency.run_result CASCADE',
	'CREATE CAST (idempotency.answer AS text) WITHOUT FUNCTION', q{COMMENT ON FUNCTION idempotency.guard_state() IS 'mine'}, q{COMMENT ON SCHEMA idempotency IS 'mine'},
	q{SELECT nextval('idempotency.outbox_id_seq')} =~ s/^SELECT/PERFORM/r, q{PERFORM setval('idempotency.outbox_id_seq', 1)}, q{PERFORM setval('idempotency.transition_log_id_seq', 1)},
	'GRANT EXECUTE ON FUNCTION idempotency.grant_admin(name) TO regress_hostile', 'GRANT SELECT ON idempotency.token_keys TO regress_hostile', 'REVOKE ALL ON idempotency.machines FROM regress_model',
	'SET SESSION AUTHORIZATION regress_model', 'SET session_replication_role = replica', 'SET LOCAL session_replication_role = local', 'SET ignore_system_indexes = on', 'SET zero_damaged_pages = on',
	'SET log_min_messages = panic', q{SET allow_system_table_mods = on}, 'SET deadlock_timeout = 1', q{PERFORM set_config('session_replication_role', 'replica', true)},
	'SET ROLE regress_model', q{PERFORM set_config('role', 'regress_model', false)}, 'GRANT regress_model TO regress_hostile', 'ALTER ROLE regress_hostile SUPERUSER', 'ALTER ROLE regress_model NOLOGIN',
	'ALTER DATABASE postgres SET search_path = regress_hostile', 'CREATE ROLE regress_hostile_too', q{ALTER ROLE regress_model SET search_path = regress_hostile}, 'DROP OWNED BY regress_model', 'REASSIGN OWNED BY regress_model TO regress_hostile',
	q{CREATE FUNCTION regress_hostile.c() RETURNS trigger LANGUAGE c AS '$libdir/idempotency', 'idempotency_guard_state'}, 'CREATE EVENT TRIGGER evil ON ddl_command_end EXECUTE FUNCTION regress_hostile.meddle()',
	'CREATE FUNCTION public.work(text) RETURNS text LANGUAGE sql RETURN 1', 'ALTER FUNCTION public.work(jsonb) SECURITY DEFINER', 'CREATE PUBLICATION evil FOR ALL TABLES',
	'PERFORM pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename::text OPERATOR(pg_catalog.=) \'regress_model\'', 'PERFORM pg_cancel_backend(pid) FROM pg_stat_activity WHERE usename::text OPERATOR(pg_catalog.=) \'regress_model\'',
	q{PERFORM pg_reload_conf()}, q{PERFORM pg_read_file('pg_hba.conf')}, q{COPY regress_hostile.keys FROM PROGRAM 'true'}, q{LOAD '/tmp/evil.so'});
@forbidden = grep { !/^PERFORM/ } map { s/^DO \$\$ BEGIN (SET SESSION AUTHORIZATION)/DO \$\$ BEGIN $1/r } @forbidden;
$state{$_} = '42501 58P01' for grep { /LOAD '/ } @forbidden;
$state{$_} = '55P02' for grep { /ignore_system_indexes/ } @forbidden;
# a member that is not there, or such a cast, is refused before the right is looked at
$state{$_} = '42501 42P17 42P13 22023' for grep { /CREATE CAST|LANGUAGE sql|RETURNS int|ENUM|ADD TABLE|OR REPLACE/ } @forbidden;
$state{$_} = '42501 42710' for grep { /RENAME TO mine|UPDATE TO/ } @forbidden;

# settings of ours that decide for all, in several ways
for my $setting (qw(default_ttl max_lease max_ttl outbox_max_attempts token_max_ttl token_retention purge_interval log_purge purge_databases))
{
	my $value = $setting =~ /databases/ ? 'postgres' : 1;
	for ("SET idempotency.$setting = '$value'", "SET LOCAL idempotency.$setting = '$value'", "SELECT set_config('idempotency.$setting', '$value', false)", "ALTER ROLE regress_hostile SET idempotency.$setting = '$value'",
		"DO \$\$ BEGIN SET LOCAL idempotency.$setting = '$value'; END \$\$", "CREATE FUNCTION regress_hostile.s() RETURNS int LANGUAGE sql SET idempotency.$setting = '$value' AS 'SELECT 1'; SELECT regress_hostile.s()")
	{
		push @forbidden, $_;
		$state{$_} = '55P02';
	}
}
push @forbidden, 'SET idempotency.evil = 1', q{SELECT set_config('idempotency.evil', '1', true)};
$state{$_} = '42602' for @forbidden[ -2, -1 ];

# internal functions and those of administrators, as the catalog lists them:
# told by know()
my @denied;

# know(the function that asks): what this server has, and what is to stay.
sub know
{
	my ($ask) = @_;
	@denied = map { $_->[0] } @{ $ask->(q{
		SELECT format('SELECT idempotency.%I(%s)', proname, (SELECT string_agg('NULL::' || format_type(t, NULL), ', ' ORDER BY n) FROM unnest(proargtypes::oid[]) WITH ORDINALITY a(t, n)))
		FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace AND 'EXECUTE ON FUNCTION ' || oid::regprocedure NOT IN (SELECT idempotency.privileges_of('usage'))
		  AND prokind = 'f' AND prorettype <> 'trigger'::regtype
		  -- with NULL for its argument that would be NULL, before any right is asked for
		  AND NOT (proisstrict AND pronargs > 0) ORDER BY 1}) };
	die "what may the hostile role not call?\n" if @denied < 20;
	@types = map { $_->[0] } @{ $ask->(q{
		SELECT format_type(oid, NULL) FROM pg_type t WHERE typnamespace = 'pg_catalog'::regnamespace AND typisdefined AND typtype IN ('b', 'r', 'm') AND typcategory <> 'A' AND typname <> 'int8'
		  AND oid <> 'pg_node_tree'::regtype AND typname !~ '^pg_(ndistinct|dependencies|mcv_list|brin|ddl)' ORDER BY typname}) };
	return;
}

# One look at what an attack could have changed for good; the same at all times.
sub fingerprint_sql
{
	return q{SELECT md5(concat_ws(' ',
	  (SELECT string_agg(concat_ws(':', oid, proowner, prosecdef, proconfig, md5(prosrc), has_function_privilege('regress_hostile', oid, 'EXECUTE')), ' ' ORDER BY oid) FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace),
	  (SELECT string_agg(concat_ws(':', oid, relname, relowner, relnatts, relrowsecurity, relhastriggers, relhassubclass), ' ' ORDER BY oid) FROM pg_class WHERE relnamespace = 'idempotency'::regnamespace),
	  (SELECT concat_ws(':', rolsuper, rolcreaterole, rolcreatedb, rolreplication, rolbypassrls, (SELECT count(*) FROM pg_auth_members WHERE member = r.oid)) FROM pg_roles r WHERE rolname = 'regress_hostile'),
	  (SELECT string_agg(setconfig::text, ' ') FROM pg_db_role_setting),
	  (SELECT count(*) FROM pg_depend WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'))),
	  (SELECT count(*) FROM regress_hostile.keys) + (SELECT count(*) FROM regress_hostile.outbox) + (SELECT count(*) FROM regress_hostile.machines)
	  + (SELECT count(*) FROM regress_hostile.transition_log) + (SELECT count(*) FROM regress_hostile.used_tokens) + (SELECT count(*) FROM regress_hostile.token_keys)};
}

my %attacks = (
	forbidden => \&forbidden, denied => \&denied, fence => \&fence, event => \&event, token => \&token,
	neighbour => \&neighbour, by_hand => \&by_hand, own => \&own, wild => \&wild, form => \&form,
	touch => \&touch);

# Their names, for a plan to choose from.
sub names { return sort keys %attacks; }

# The SQL of an attack, or undef if it makes no sense here; how it is to be
# answered is noted in the operation.
#	op: {what, r => several random numbers}; h: the history; tx: the open one
sub statement
{
	my ($op, $h, $tx) = @_;
	my @r = @{ $op->{r} };
	$op->{pick} = sub { return $_[ shift(@r) % @_ ]; };
	my $sql = $attacks{ $op->{what} }->($op, $h, $tx);
	delete $op->{pick};
	# which would be a warning outside a transaction block
	$sql = "SELECT 1; $sql" if defined $sql && !$tx && $sql =~ /^SET (LOCAL|CONSTRAINTS)/ && $sql !~ /;/;
	return $sql;
}

sub forbidden
{
	my ($op) = @_;
	my $sql = $op->{pick}->(@forbidden);
	$op->{refused} = $state{$sql} // '42501';
	return $sql;
}

sub denied
{
	my ($op) = @_;
	my $call = $op->{pick}->(@denied);
	$op->{refused} = '42501';
	return $op->{pick}->($call, $call, "DO \$\$ BEGIN " . ($call =~ s/^SELECT/PERFORM/r) . "; EXCEPTION WHEN raise_exception THEN NULL; END \$\$", "EXPLAIN ANALYZE $call");
}

# A fence near one that was granted, or any.
sub fence
{
	my ($op, $h) = @_;
	my @keys = sort keys %{ $h->{grants} };
	return unless @keys;
	my $key = $op->{pick}->(@keys);
	my $is_lock = $key =~ /k4$/;
	my $granted = $op->{pick}->(@{ $h->{grants}{$key} })->{fence};
	my $fence = $op->{pick}->($granted - 1, $granted + 1, $granted + 1_000_000, 0, -1, 1, '9223372036854775807', "(-9223372036854775808)", -$granted);
	@$op{qw(at guess)} = ($key, $fence);
	# a fence that was never granted opens nothing; a snapshot may be too old to say so
	$op->{gives} = 'f|NULL';
	$op->{may} = 'IK002 IK006 22023';
	if ($is_lock)
	{
		return $op->{pick}->("SELECT idempotency.renew_lock('$key', $fence, '1 hour')", "SELECT idempotency.release_lock('$key', $fence)");
	}
	return $op->{pick}->("SELECT idempotency.complete('model', '$key', 'stolen', NULL, $fence)", "SELECT idempotency.fail('model', '$key', 'stolen', NULL, $fence)", "SELECT idempotency.release('model', '$key', $fence)",
		"SELECT idempotency.extend('model', '$key', $fence, '1 hour')", "SELECT idempotency.checkpoint('model', '$key', $fence, 'stolen')", "SELECT idempotency.complete('model', '$key', ROW(1, 'stolen')::regress_hostile.thing, NULL, $fence)");
}

# An attempt that was never handed out.
sub event
{
	my ($op, $h) = @_;
	my $taken = @{ $h->{taken} } ? $op->{pick}->(@{ $h->{taken} })->{event} : 1;
	my $id = $op->{pick}->($taken, $taken, $taken, -$taken, 0, '9223372036854775807', $taken + 1_000_000_000);
	my $attempt = $op->{pick}->(0, -1, 1_000_000, '9223372036854775807');
	$op->{gives} = 'f|NULL|0';
	# it waits for who is at the event
	$op->{may} = '22023 22003';
	return $op->{pick}->("SELECT idempotency.ack($id, $attempt)", "SELECT idempotency.nack($id, $attempt, '0', 'stolen')", "SELECT idempotency.extend_event($id, $attempt, '1 hour')",
		"SELECT idempotency.ack_batch(ARRAY[$id, $id], ARRAY[$attempt, $attempt])");
}

# A token that is altered, or shown for somebody else.
sub token
{
	my ($op, $h) = @_;
	return unless @{ $h->{tokens} };
	my $token = $op->{pick}->(@{ $h->{tokens} });
	my ($text, $subject, $purpose) = ($token->{text}, $token->{subject}, 'model');
	my $how = $op->{pick}->(0 .. 8);
	my $at = $op->{pick}->(0 .. length($text) - 1);
	if ($how < 4)
	{
		my $was = substr($text, $at, 1);
		my $is = $op->{pick}->(grep { $_ ne $was } 'A' .. 'Z', 'a' .. 'z', 0 .. 9, '-', '_');
		substr($text, $at, 1) = $is;
	}
	elsif ($how == 4) { $text = substr($text, 0, $at); }
	elsif ($how == 5) { $text .= $op->{pick}->('A', '=', '.', ' ', '-'); }
	elsif ($how == 6) { $subject = $op->{pick}->("$subject ", uc $subject, substr($subject, 0, -1), "${subject}m", ''); $op->{may} = '22023'; }
	elsif ($how == 7) { $purpose = $op->{pick}->('Model', 'model ', 'mode', 'regress_hostile'); }
	else { $text = reverse $text; }
	my $arguments = "'$text', '$subject', '$purpose'";
	$op->{gives} = 'f|invalid';
	return $op->{pick}->("SELECT status FROM idempotency.consume_token($arguments, '0')", "SELECT status FROM idempotency.check_token($arguments)", "SELECT idempotency.revoke_token($arguments)");
}

# A key that looks like another's is another key.
sub neighbour
{
	my ($op, $h) = @_;
	my $key = 'r' . $h->{round} . 'k' . $op->{pick}->(0 .. 3);
	my $n = $op->{n};
	my ($scope, $name) = @{ $op->{pick}->([ 'model ', $key ], [ 'Model', $key ], [ "model$key", 'x' ], [ 'mod', "el$key" ], [ 'model', "$key " ], [ 'model', uc $key ], [ 'model', "$key\t" ], [ $key, 'model' ], [ 'model', "\x{c3}\x{a9}$key" ], [ 'model', "e\x{cc}\x{81}$key" ]) };
	# its own, each time
	$name = "$name$n";
	$op->{gives} = 'claimed';
	# with hashes of few bits it may look as if somebody were at it
	$op->{may} = 'IK006' unless $h->{exact};
	return "SELECT c.status, idempotency.complete('$scope', '$name', 'neighbour') FROM idempotency.claim('$scope', '$name', wait => '0') c";
}

# Guards put by hand on a column of another type: refused before a value is
# touched.  A state may be of any type that has a text.
sub by_hand
{
	my ($op) = @_;
	my $type = $op->{pick}->(@types, (qw(text bytea name numeric regress_hostile.label regress_hostile.number regress_hostile.thing)) x 8, 'bigint[]', 'text[]');
	my $function = $op->{pick}->('guard_version', 'guard_version', 'guard_fence', 'guard_state');
	my $arguments = $function eq 'guard_state' ? $op->{pick}->(q{'model', 'no history'}, q{'model', 'history'}, '') : '';
	my $timing = $arguments =~ /'history'/ ? 'AFTER' : $op->{pick}->('BEFORE', 'BEFORE', 'BEFORE', 'AFTER');
	my $value = $op->{pick}->('\\x007d000041414141', '\\x01034141414141414141', '\\x0112ffffffffffffffff0000000001000000', '\\xffffffffffffffff');
	$value = $type eq 'numeric' ? '4096' : $type =~ /thing/ ? '(4096,A)' : $type =~ /^(text|bytea|name|.*label)$/ ? $value : undef;
	$value = defined $value ? "'$value'" : 'NULL';
	my $temp = $op->{pick}->('', 'TEMP ');
	my $table = ($temp ? '' : 'regress_hostile.') . "hand$op->{n}";
	if ($function eq 'guard_state') { $op->{may} = '39P01 IK003 IK005 IK007'; }
	else { $op->{refused} = '39P01'; }
	my @updates = ("UPDATE $table SET n = 1", "UPDATE $table SET n = 1, v = v", "UPDATE $table SET v = v");
	push @updates, qq{SELECT * FROM idempotency.update_if('$table', 1, 1, '{"n": 2}')} if $function eq 'guard_version';
	return "CREATE ${temp}TABLE $table (id int PRIMARY KEY, v $type, n int DEFAULT 0)" . ($temp ? ' ON COMMIT DROP' : '') . '; '
	  . "INSERT INTO $table VALUES (1, $value); "
	  . "CREATE TRIGGER v1 $timing UPDATE OF v ON $table FOR EACH ROW EXECUTE FUNCTION idempotency.$function($arguments); "
	  . "CREATE TRIGGER v2 $timing UPDATE ON $table FOR EACH ROW EXECUTE FUNCTION idempotency.$function(); "
	  . $op->{pick}->(@updates) . "; SELECT v FROM $table; " . ($temp ? '' : "DROP TABLE $table; ") . "SELECT 'kept'";
}

# Tables of its own, with what they bring along.
sub own
{
	my ($op) = @_;
	my $id = $op->{pick}->(1 .. 4);
	my $n = $op->{n};
	my $state = $op->{pick}->(qw(NEW PAID SHIPPED REFUNDED));
	my $own = 'regress_hostile.trap';
	# 42501: a function under run() has turned row security off in this transaction
	$op->{may} = 'IK001 IK002 IK003 IK004 IK005 39P01 22P02 22023 42804 23505 42883 0A000 40001 42501';
	return $op->{pick}->(
		"SELECT outcome FROM idempotency.transition('$own', $id, NULL, '$state', '{\"n\": $n, \"fence\": $n}')", "SELECT outcome FROM idempotency.transition('$own', '$id'::regress_hostile.label, 'NEW', 'PAID', '{\"note\": \"y\", \"fence\": $n}')",
		"SELECT outcome FROM idempotency.transition('$own', ${id}::regress_hostile.number, 'PAID', 'REFUNDED', '{\"fence\": $n}')", "SELECT outcome FROM idempotency.fire('$own', ROW($id, '$id')::regress_hostile.thing, 'pay', '{\"fence\": $n}')",
		"SELECT outcome FROM idempotency.update_if('$own', $id, 1, '{\"n\": $n, \"fence\": $n, \"note\": {\"a\": 1}}')", "UPDATE $own SET state = '$state', fence = $n WHERE id = ${id}::bigint", "UPDATE $own SET version = 99, fence = $n", "UPDATE $own SET n = $n",
		"SELECT created FROM idempotency.insert_once(NULL::$own, '{\"id\": $id, \"state\": \"$state\"}')", "SELECT * FROM idempotency.next_events('$own', $id)", "INSERT INTO $own (id, state) VALUES (-$n, '$state')", "DELETE FROM $own WHERE id < 0",
		"UPDATE regress_hostile.wrong SET b = b", "INSERT INTO regress_hostile.wrong VALUES ($n, '\\x007d000041414141'); UPDATE regress_hostile.wrong SET b = '\\x01'",
		"INSERT INTO regress_hostile.bomb VALUES ($n)", "INSERT INTO regress_hostile.bomb VALUES ($n); SET CONSTRAINTS ALL IMMEDIATE");
}

# Functions of its own under run(), arguments whose types have casts of its own.
sub wild
{
	my ($op) = @_;
	my $n = $op->{n};
	my $what = $op->{pick}->(0 .. 15);
	$op->{temp} = 1 if $what == 10;
	$op->{may} = 'P0001 IK001 IK002 IK006 55P02 42501 40001 2D000 0A000 25001 42P07 22023 22P02 42883 23503 54001';
	return $op->{pick}->(
		"SELECT status FROM idempotency.run('hostile', 'w$n', 'wild', '{\"key\": \"w$n\", \"what\": $what}', record_errors => " . $op->{pick}->('true', 'false') . ')',
		"SELECT status FROM idempotency.run('hostile', 'w$n', 'regress_hostile.wild', '{\"key\": \"w" . ($n - 1) . "\", \"what\": $what}', record_errors => " . $op->{pick}->('true', 'false') . ')',
		"SELECT c.*, idempotency.complete('hostile', 'c$n', ROW($n, 'x')::regress_hostile.thing) FROM idempotency.claim('hostile', 'c$n') c", "SELECT idempotency.complete('hostile', 'none$n', 'x'::regress_hostile.label)",
		"SELECT idempotency.emit('hostile', ROW($n, 'x')::regress_hostile.thing)", "SELECT count(*) FROM idempotency.take('hostile', 3, '1 ms')", "SELECT idempotency.emit_batch('hostile', ARRAY['1', NULL]::jsonb[], ARRAY['h', NULL])",
		"SELECT l.*, idempotency.claim('hostile', 'l$n', wait => '0') FROM idempotency.lease('hostile', 'l$n', '1 ms') l",
		"SELECT idempotency.issue_token('regress_hostile', 'x', '1 s', ROW($n, 'x')::regress_hostile.thing)");
}

# The same claim in other forms: what is in it is undone at once.
sub form
{
	my ($op) = @_;
	my $n = $op->{n};
	my $claim = "idempotency.claim('hostile', 'f$n')";
	my $again = "SELECT c.*, idempotency.release('hostile', 'f$n') FROM $claim c";
	$op->{may} = 'IK001 P0001 57014 25P01 0A000 25001 2D000';
	return $op->{pick}->(
		"EXPLAIN (ANALYZE, COSTS off) $again", "COPY ($again) TO STDOUT", "DECLARE f$n CURSOR WITH HOLD FOR SELECT * FROM $claim", "SELECT 1; DECLARE g$n SCROLL CURSOR FOR $again; FETCH ALL g$n; MOVE FIRST g$n; CLOSE g$n",
		"DO \$\$ BEGIN PERFORM $claim; COMMIT; END \$\$", "DO \$\$ BEGIN FOR i IN 1 .. 3 LOOP BEGIN PERFORM idempotency.claim('hostile', 'f$n ' || i); RAISE 'x'; EXCEPTION WHEN OTHERS THEN ROLLBACK; END; END LOOP; END \$\$",
		"SELECT pg_advisory_unlock_all()", "SELECT count(pg_try_advisory_xact_lock((classid::bigint << 32) | objid::bigint)), count(pg_try_advisory_xact_lock_shared((classid::bigint << 32) | objid::bigint)) FROM pg_locks WHERE locktype::text OPERATOR(pg_catalog.=) 'advisory'",
		'DISCARD PLANS', 'DISCARD TEMP', 'DISCARD SEQUENCES', 'DEALLOCATE ALL', 'CLOSE ALL', 'SET CONSTRAINTS ALL IMMEDIATE', 'UNLISTEN *', 'NOTIFY idempotency', "PREPARE p$n AS SELECT 1; EXECUTE p$n; DEALLOCATE p$n");
}

# The keys and events of others, under settings of its own, and all undone within
# the statement.  Somebody may have to wait for it meanwhile, so the key is noted.
sub touch
{
	my ($op, $h, $tx) = @_;
	my $key = "r$h->{round}k" . $op->{pick}->(0 .. 3);
	@$op{qw(key ttl)} = ($key, 20_000);
	$op->{may} = 'IK001 IK002 IK006 22012 57014 55P03 0A000';
	my $claim = $op->{pick}->("idempotency.claim('model', '$key', wait => '0')", "idempotency.claim('model', '$key', '{\"r\": 0}', '20 ms', '5 ms')", "idempotency.lease('model', '$key', '1 hour', wait => '0')",
		"idempotency.once('model', '$key')", "idempotency.acquire_lock('r$h->{round}k4', '1 hour')", "idempotency.take('r$h->{round}', 10, '1 hour')", "idempotency.emit('r$h->{round}', '{\"n\": -1}', 'k0')");
	# what was written under it is gone with it
	my $undo = 'ROLLBACK TO hostile; RELEASE hostile';
	return $op->{pick}->(
		"DO \$\$ BEGIN PERFORM $claim; RAISE division_by_zero; EXCEPTION WHEN OTHERS THEN NULL; END \$\$",
		"DO \$\$ BEGIN BEGIN PERFORM $claim; EXCEPTION WHEN no_data_found THEN NULL; END; RAISE division_by_zero; EXCEPTION WHEN division_by_zero THEN NULL; END \$\$",
		"DO \$\$ BEGIN FOR i IN 1 .. 3 LOOP BEGIN PERFORM $claim; PERFORM 1 / 0; EXCEPTION WHEN division_by_zero THEN NULL; END; END LOOP; END \$\$") unless $tx;
	return 'SAVEPOINT hostile; ' . $op->{pick}->(
		"EXPLAIN (ANALYZE, COSTS off) SELECT * FROM $claim", "SET LOCAL statement_timeout = '2 ms'; SELECT $claim, pg_sleep(0.001)", "SET LOCAL lock_timeout = '1 ms'; SELECT $claim",
		"DECLARE hostile CURSOR FOR SELECT $claim FROM generate_series(1, 3); FETCH 1 FROM hostile", "DECLARE hostile CURSOR WITH HOLD FOR SELECT $claim",
		"SET LOCAL row_security = off; SET LOCAL search_path = ''; SET LOCAL bytea_output = 'escape'; SET LOCAL standard_conforming_strings = off; SET LOCAL IntervalStyle = 'sql_standard'; SET LOCAL TimeZone = 'Asia/Kathmandu'; SELECT $claim",
		"SET LOCAL enable_indexscan = off; SET LOCAL enable_seqscan = off; SET LOCAL idempotency.default_wait = 0; SET LOCAL work_mem = '64 kB'; SELECT $claim",
		"COPY (SELECT $claim) TO STDOUT", "SAVEPOINT hostile_too; SELECT $claim; RELEASE hostile_too", "PREPARE touch$op->{n} AS SELECT $claim; EXECUTE touch$op->{n}; DEALLOCATE touch$op->{n}") . "; $undo";
}

# What is wrong with how an attack was answered, or undef.
sub judge
{
	my ($op, $h) = @_;
	my $state = $op->{error};
	if ($state)
	{
		return if index(join(' ', $op->{refused} // '', $op->{may} // ''), $state) >= 0;
		# outside a block the claim of one statement is open at its end
		return if $state eq 'IK001' && $op->{tx}{alone} && $op->{sql} =~ /claim/;
		return "error $state: $op->{message}";
	}
	return 'was not refused' if $op->{refused};
	return unless defined $op->{gives};
	my $rows = join ',', map { $_->[0] // 'NULL' } @{ $op->{rows} };
	return if grep { $_ eq $rows } split /\|/, $op->{gives};
	# who guesses what is granted at that moment was lucky
	return if defined $op->{guess} && grep { $_->{do} eq 'lease' && ($_->{key} // '') eq $op->{at} && ($_->{lost} || ($_->{fence} // '') eq $op->{guess}) } @{ $h->{ops} };
	return "was given $rows";
}

1;
