# Fuzz: every function of the extension, as the catalog lists them, with random
# and hostile arguments, by several sessions at once on the same few keys,
# tables and events, with and without rights, at all isolation levels, in
# read-only transactions, savepoints, exception blocks, cursors and prepared
# transactions.  In every case:
#
#   - nothing crashes, hangs or leaks, and nothing "cannot happen";
#   - a call fails only with the SQLSTATEs that its COMMENT lists, or with one
#     that PostgreSQL itself raises for such a call (allowed() below);
#   - triggers that call our functions, put by hand on columns of every type, do
#     not touch a value that is none of theirs (hand_made() below);
#   - afterwards the tables hold no state that the code could not have written,
#     every event can still be taken, every key claimed.
#
# Environment:
#   IDEMPOTENCY_FUZZ_CALLS      how many calls (5000)
#   IDEMPOTENCY_FUZZ_SESSIONS   by how many sessions (4)
#   IDEMPOTENCY_FUZZ_SEED       repeat a run's statements (not their timing)
use strict;
use warnings;

use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $calls = $ENV{IDEMPOTENCY_FUZZ_CALLS} || 5000;
my $sessions = $ENV{IDEMPOTENCY_FUZZ_SESSIONS} || 4;
my $seed = $ENV{IDEMPOTENCY_FUZZ_SEED} || int(rand(2**31));
note "seed $seed, $sessions sessions, $calls calls";

my $node = PostgreSQL::Test::Cluster->new('fuzz');
$node->init;
$node->append_conf('postgresql.conf', q{
max_connections = 30
max_prepared_transactions = 20
deadlock_timeout = 10ms
# also where it is slow, and calls wait for one another in a row
statement_timeout = 5min
autovacuum_naptime = 1s
restart_after_crash = off
log_min_messages = warning
log_min_error_statement = panic
log_line_prefix = '%a %e '
});
$node->start;
my $major = int($node->safe_psql('postgres', 'SHOW server_version_num') / 10000);

# -------------------------------------------------- what the calls are about
$node->safe_psql('postgres', <<'SQL');
CREATE EXTENSION idempotency;
CREATE ROLE regress_app;
CREATE ROLE regress_admin;
CREATE ROLE regress_nobody;
CREATE ROLE regress_other;
SELECT idempotency.grant_usage('regress_app'), idempotency.grant_admin('regress_admin');
GRANT CREATE, TEMP ON DATABASE postgres TO regress_app;
GRANT ALL ON SCHEMA public TO regress_app, regress_admin;
CREATE FOREIGN DATA WRAPPER nothing;
CREATE SERVER nowhere FOREIGN DATA WRAPPER nothing;
GRANT USAGE ON FOREIGN SERVER nowhere TO regress_app;
CREATE TABLE token (n serial, subject text, purpose text, token text);
GRANT ALL ON token, token_n_seq TO PUBLIC;

SET ROLE regress_app;
CREATE TYPE state AS ENUM ('A', 'B', 'C', 'off');
CREATE DOMAIN label AS varchar(5) CHECK (VALUE <> 'D');
CREATE TYPE pair AS (a int, "b%s" text);
CREATE DOMAIN pair_domain AS pair;
CREATE DOMAIN number_domain AS bigint;
CREATE DOMAIN bytes_domain AS bytea;
CREATE TYPE span AS RANGE (subtype = bigint);

CREATE TABLE plain (id int PRIMARY KEY, state text NOT NULL DEFAULT 'A', version bigint NOT NULL DEFAULT 1, fence bigint,
  note text, amount numeric(6,2) CHECK (amount < 1000), tags text[], body jsonb, sum int GENERATED ALWAYS AS (id * 2) STORED, "x""y%s" text);
CREATE TABLE enumerated (id bigint PRIMARY KEY, state state NOT NULL DEFAULT 'A', note text);
CREATE TABLE both_of (a text, b uuid, state label DEFAULT 'A', "State Two" char(4) DEFAULT 'A', PRIMARY KEY (a, b));
CREATE TABLE parts (id int, month int, state text DEFAULT 'A', PRIMARY KEY (id, month)) PARTITION BY LIST (month);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES IN (1);
CREATE TABLE parts_2 PARTITION OF parts DEFAULT;
CREATE TABLE counted (id text PRIMARY KEY, version bigint NOT NULL DEFAULT 1, note text);
CREATE TABLE fenced (id int PRIMARY KEY, fence bigint, state text DEFAULT 'A');
CREATE TABLE once (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, request_id text UNIQUE, n int, amount numeric, UNIQUE (n, amount));
CREATE TABLE twins (request_id text UNIQUE, n int, amount numeric);
CREATE UNIQUE INDEX twins_too ON twins (request_id);
CREATE TABLE walled (id int PRIMARY KEY, state text DEFAULT 'A', version bigint NOT NULL DEFAULT 1);
ALTER TABLE walled ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY half ON walled USING (id % 2 = 0) WITH CHECK (state <> 'C');
CREATE TABLE triggered (id int PRIMARY KEY, state text DEFAULT 'A', version bigint NOT NULL DEFAULT 1, note text);
CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  CASE OLD.id
    WHEN 1 THEN RETURN NULL;
    WHEN 2 THEN NEW.state := 'B';
    WHEN 3 THEN RAISE 'no' USING ERRCODE = 'P0001';
    WHEN 4 THEN NEW.version := 99;
    ELSE NULL;
  END CASE;
  RETURN NEW;
END $$;
CREATE TRIGGER meddle BEFORE UPDATE ON triggered FOR EACH ROW EXECUTE FUNCTION meddle();
CREATE TABLE keyless (id int, state text DEFAULT 'A', version bigint NOT NULL DEFAULT 1);
CREATE TABLE late_key (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, state text DEFAULT 'A', version bigint NOT NULL DEFAULT 1);
CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY, state text DEFAULT 'A', version bigint NOT NULL DEFAULT 1);
CREATE TABLE parent (id int PRIMARY KEY, state text DEFAULT 'A', version bigint NOT NULL DEFAULT 1, fence bigint);
CREATE TABLE child () INHERITS (parent);
CREATE VIEW seen AS SELECT id, state, version, fence FROM plain;
CREATE MATERIALIZED VIEW kept AS SELECT id, state, version FROM plain;
CREATE FOREIGN TABLE far (id int, state text, version bigint) SERVER nowhere;
CREATE SEQUENCE counter;

CREATE FUNCTION echo(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION answers(jsonb) RETURNS idempotency.answer LANGUAGE sql AS $$SELECT $1::text, jsonb_build_object('code', 200)$$;
CREATE FUNCTION strictly(jsonb) RETURNS text STRICT LANGUAGE sql AS 'SELECT $1::text';
CREATE FUNCTION silent() RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION raises(r jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'no: %', left(r::text, 9) USING ERRCODE = (ARRAY['P0001', '22012', '23505', 'ZZ999', '40001', '57014'])[1 + coalesce(length(r::text), 0) % 6];
END $$;
CREATE FUNCTION nests(r jsonb) RETURNS idempotency.run_result LANGUAGE sql AS
  $$SELECT idempotency.run('s1', 'k' || length(coalesce(r::text, '')) % 5, 'echo', r, wait => '0')$$;
CREATE FUNCTION settles(r jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  PERFORM idempotency.complete('s1', 'k1', 'inside');
  PERFORM idempotency.release('s1', 'k2');
  RETURN 'done';
EXCEPTION WHEN OTHERS THEN RETURN SQLSTATE;
END $$;
CREATE FUNCTION many(jsonb) RETURNS SETOF int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION wants_int(int) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE PROCEDURE does(jsonb) LANGUAGE sql AS '';
CREATE AGGREGATE gathers(jsonb) (SFUNC = jsonb_concat, STYPE = jsonb);
CREATE FUNCTION fence_of(s text, k text) RETURNS bigint LANGUAGE sql AS 'SELECT fence FROM idempotency.keys WHERE (scope, key) = (s, k)';
-- a call inside an exception block: the error comes back as a notice
CREATE FUNCTION attempt(call text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE call;
EXCEPTION WHEN OTHERS THEN RAISE NOTICE USING ERRCODE = SQLSTATE, MESSAGE = 'caught';
END $$;
RESET ROLE;
-- for every caller, so that fences can be guessed right
ALTER FUNCTION fence_of SECURITY DEFINER;
ALTER FUNCTION fence_of OWNER TO CURRENT_USER;
GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO regress_admin;
SQL

# What calls take away from the others, put back from time to time; the
# second one finds it there.
my $fixtures = <<'SQL';
SELECT attempt($$SELECT idempotency.define_machine('m', '{"initial": ["A", "B"], "transitions": {"A": {"go": "B", "stay": "A"}, "B": {"go": "C", "back": "A"}, "C": ["off"]}}', true)$$);
SELECT attempt($$SELECT idempotency.define_machine('spare', '{"initial": "A", "transitions": {"A": ["B"]}}')$$);
SELECT attempt($$SELECT idempotency.define_machine('m%s', '{"initial": "A", "transitions": {"A": ["B"], "B": ["C"]}}')$$);
SELECT attempt(format('SELECT idempotency.attach_machine(%L, %L, %L, %L)', t, c, m, h)) FROM (VALUES ('plain', 'state', 'm', true), ('enumerated', 'state', 'm', false), ('both_of', 'state', 'm', false), ('both_of', 'State Two', 'm%s', true), ('parts', 'state', 'm%s', true), ('walled', 'state', 'm', false), ('triggered', 'state', 'm', true)) AS v(t, c, m, h);
SELECT attempt(format('SELECT idempotency.attach_version(%L, %L)', t, 'version')) FROM unnest('{counted,walled,triggered,unlogged}'::text[]) AS t;
SELECT attempt($$SELECT idempotency.attach_fence('fenced', 'fence')$$);
SELECT attempt(format('INSERT INTO %I (id) SELECT n FROM generate_series(1, 8) n ON CONFLICT DO NOTHING', t)) FROM unnest('{plain,enumerated,counted,fenced,walled,triggered,keyless,unlogged,parent,late_key}'::text[]) AS t;
SELECT attempt($$INSERT INTO both_of SELECT 'k' || n, '00000000-0000-0000-0000-00000000000' || n FROM generate_series(1, 8) n ON CONFLICT DO NOTHING$$);
SELECT attempt($$INSERT INTO parts SELECT n, n % 3 FROM generate_series(1, 8) n ON CONFLICT DO NOTHING$$);
SELECT attempt($$INSERT INTO token (subject, purpose, token) SELECT 'k' || n, 's' || n % 3, idempotency.issue_token('k' || n, 's' || n % 3, '1 day', '{"n": 1}') FROM generate_series(1, 5) n$$);
SELECT attempt($$SELECT idempotency.emit('s' || n % 3, to_jsonb(n), 'k' || n % 4) FROM generate_series(1, 12) n$$);
SQL
$node->safe_psql('postgres', "SET ROLE regress_admin; SET client_min_messages = error;\n$fixtures");
$node->safe_psql('postgres', "SET client_min_messages = error;\n$fixtures");
is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_trigger WHERE tgfoid::regproc::text LIKE 'idempotency.guard_%' AND tgparentid = 0}) > 10 ? 'attached' : 'not attached',
	'attached', 'the tables of the test have their guards');

# ------------------------------------------------------ the functions to call
# name, argument types and names, how many have no default, what its COMMENT
# says about errors
my (@functions, %documented, %comment, %is_trigger);
for (split /\n/, $node->safe_psql('postgres', q{
	SELECT p.proname, p.prokind, p.prorettype::regtype, p.pronargs - p.pronargdefaults,
	       (SELECT string_agg(t::regtype::text, ',' ORDER BY n) FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY AS a(t, n)),
	       array_to_string(p.proargnames, ','),
	       concat_ws(',', CASE WHEN has_function_privilege('regress_app', p.oid, 'EXECUTE') THEN 'regress_app' END, CASE WHEN has_function_privilege('regress_admin', p.oid, 'EXECUTE') THEN 'regress_admin' END,
	         CASE WHEN prolang = (SELECT oid FROM pg_language WHERE lanname = 'sql') THEN 'sql' END),
	       obj_description(p.oid, 'pg_proc')
	FROM pg_proc p WHERE p.pronamespace = 'idempotency'::regnamespace ORDER BY p.oid::regprocedure::text}))
{
	my ($name, $kind, $result, $needed, $types, $names, $may, $comment) = split /\|/, $_, 8;
	my @types = split /,/, $types;
	isnt($comment, '', "$name has a COMMENT");
	next if $kind eq 'p';		# not to be called in a SELECT, nor in a transaction
	push @functions, { name => $name, result => $result, needed => $needed, types => \@types, names => [ split /,/, $names ] };
	$comment{$name} .= ' ' . ($comment =~ /(?:errors?: |the same |as \w+\(\)|the rest as )/ ? $comment : '');
	$is_trigger{$name} = 1 if $result eq 'trigger';
	$functions[-1]{may} = { map { $_ => 1 } split /,/, $may };
}
cmp_ok(scalar(@functions), '>', 50, 'the catalog lists the functions');

# what a column can be of: [ type, its category ]
my @column_types = map { [ split /\|/ ] } split /\n/, $node->safe_psql('postgres', q{
	SELECT format_type(t.oid, NULL), CASE WHEN t.typtype IN ('c', 'd') THEN b.typname ELSE t.typcategory::text END
	FROM pg_type t LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typcategory = 'A' LEFT JOIN pg_type b ON b.oid = coalesce(nullif(t.typbasetype, 0), t.oid)
	WHERE t.typnamespace IN ('pg_catalog'::regnamespace, 'public'::regnamespace) AND t.typisdefined AND t.typtype <> 'p'
	  AND (t.typtype <> 'c' OR t.oid = 'pair'::regtype) AND (e.oid IS NULL OR e.typtype NOT IN ('c', 'p') OR e.oid = 'pair'::regtype)
	ORDER BY 1});
cmp_ok(scalar(@column_types), '>', 150, 'the catalog lists the types');

# the COMMENTs of a function, those that they refer to included
sub documented
{
	my ($name, %seen) = @_;
	my $text = $comment{$name} // '';
	return '' if $seen{$name}++;
	return join ' ', $text, map { documented($_, %seen) } $text =~ /as (\w+)\(\)/g;
}
for my $name (keys %comment)
{
	$comment{$name} = documented($name);
	$documented{$name} = { map { $_ => 1 } $comment{$name} =~ /\b(IK\d{3}|[0-9][0-9A-Z]{4})\b/g };
}

# --------------------------------------------------------------- the sessions
srand($seed);
my (@runs, $made);
my $per_session = int($calls / $sessions);
for my $n (1 .. $sessions)
{
	my $file = $node->basedir . "/session$n.sql";
	my $session = session($n, $per_session);
	open(my $fh, '>', $file) or die "$file: $!";
	print $fh map { "$_->{sql}\n" } @$session;
	close $fh;
	$made += $_->{calls} // 0 for @$session;
	push @runs, { n => $n, file => $file, lines => $session, err => '' };
}
my $start = time;
my $born = $node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()');
for my $run (@runs)
{
	local $ENV{PGAPPNAME} = "fuzz$run->{n}";
	$run->{handle} = IPC::Run::start(
		[ 'psql', '-XAtq', '-v', 'VERBOSITY=sqlstate', '-d', $node->connstr('postgres'), '-f', $run->{file} ],
		'<', \undef, '>', '/dev/null', '2>', "$run->{file}.err");
}
$_->{handle}->finish for @runs;
note sprintf('%d calls in %.1f s', $made, time - $start);

# ---------------------------------------------------------------- what was said
my (%count, %reached, %answered, @wrong);
for my $run (@runs)
{
	# to a file: nobody could read four pipes in time
	$run->{err} = slurp_file("$run->{file}.err");
	for (split /\n/, $run->{err})
	{
		if (/^psql:.*?:(\d+): (ERROR|NOTICE|WARNING|FATAL|PANIC): +(\w{5})$/)
		{
			my ($line, $code) = ($run->{lines}[ $1 - 1 ], $3);
			next if $code =~ /^(00000|01000|25P01)$/;	# notices and warnings
			$count{$code}++;
			$line->{failed} = 1 if $line->{calls};
			next if allowed($line, $code);
			push @wrong, "$code: $line->{role}, $line->{level}: " . substr($line->{call} // $line->{sql}, 0, 400);
		}
		else { push @wrong, "session $run->{n}: $_"; }
	}
	# what a cursor calls is not known here, nor is a call in a failed block
	is($run->{handle}->full_result(0), 0, "session $run->{n} ran to its end") or diag(substr($run->{err}, -500));
	for my $line (@{ $run->{lines} })
	{
		next unless $line->{calls} && $line->{sql} !~ /^(DECLARE|FETCH|CLOSE)/;
		$reached{$_}++, $answered{$_} += !$line->{failed} for @{ $line->{functions} };
	}
}
note join ', ', map { "$_: $count{$_}" } sort keys %count;
my %once;
is(join("\n", grep { !$once{ substr($_, 0, 60) }++ } @wrong), '', 'only documented errors') or diag(said(map { /^(\w{5}): / } @wrong));
is(join(' ', grep { !$reached{$_} } map { $_->{name} } @functions), '', 'every function was called');
# but those that only a Citus cluster answers
is(join(' ', grep { !$answered{$_} && !$is_trigger{$_} && !/^(at_home|distribute|distribute_keys|share_secrets|share_machines|reach_new_nodes)$/ } sort keys %reached), '', 'and answered') if $calls >= 50000;
note join ', ', map { "$_ $answered{$_}/$reached{$_}" } sort keys %reached;
cmp_ok($made, '>=', 0.9 * $calls, 'as many calls as asked for');

# ----------------------------------------------------------- what is left behind
is($node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()'), $born, 'the server was not restarted');
my $log = slurp_file($node->logfile);
is(join("\n", grep { /TRAP|PANIC|FATAL|terminated by signal|leak|not closed|don.t own|XX\d\d\d|cannot happen|snapshot .* still active/i } split /\n/, $log),
	'', 'nothing of ours in the log');
is($node->safe_psql('postgres', "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), '0', 'no lock is left');
is($node->safe_psql('postgres', 'SELECT count(*) FROM pg_prepared_xacts'), '0', 'no prepared transaction is left');

is($node->safe_psql('postgres', q{
	SELECT key, scope, status, fence, deadline, attempt FROM idempotency.keys
	WHERE NOT coalesce(CASE status
	    WHEN 'l' THEN fence > 0 AND deadline >= created_at AND attempt > 0 AND deadline <= expires_at AND response IS NULL
	    WHEN 'r' THEN fence > 0 AND deadline IS NULL AND attempt > 0
	    WHEN 'c' THEN deadline IS NULL
	    WHEN 'f' THEN deadline IS NULL END, false)
	   OR expires_at < created_at
	   OR octet_length(key) NOT BETWEEN 1 AND 512 OR octet_length(scope) NOT BETWEEN 1 AND 256
	   OR (scope LIKE 'idempotency.%' AND scope <> 'idempotency.lock')}),
	'', 'every key is in a state that a call can write');
is($node->safe_psql('postgres', q{
	SELECT * FROM idempotency.outbox o
	WHERE NOT coalesce(CASE state
	    WHEN 'r' THEN due < 'infinity'
	    WHEN 'l' THEN attempt > 0 AND due = '-infinity'
	    WHEN 'p' THEN parked_at IS NOT NULL AND due = 'infinity'
	    WHEN 'b' THEN parked_at IS NOT NULL AND due = 'infinity' END, false)
	   OR tries > attempt OR tries < 0 OR place < id}),
	'', 'so is every event');
is($node->safe_psql('postgres', q{
	SELECT e.topic, e.key, count(*) FROM idempotency.outbox e
	JOIN idempotency.outbox_leases l ON l.block = e.id / 64 AND l.events >> (e.id % 64)::integer & 1 = 1 AND l.taken > e.place
	WHERE e.key IS NOT NULL GROUP BY 1, 2 HAVING count(DISTINCT e.id) > 1}),
	'', 'of no key two events are out');
like($node->safe_psql('postgres', 'SELECT count(*) > 0 FROM idempotency.stats, idempotency.in_flight, idempotency.parked_events'),
	qr/^[tf]$/, 'the views can be read');

SKIP:
{
	skip 'amcheck is not installed', 2
	  if $node->safe_psql('postgres', q{SELECT count(*) FROM pg_available_extensions WHERE name = 'amcheck'}) eq '0';
	$node->safe_psql('postgres', 'CREATE EXTENSION amcheck');
	is($node->safe_psql('postgres', q{
		SELECT c.relname, v.* FROM pg_class c, LATERAL verify_heapam(c.oid) v
		WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind = 'r'}),
		'', 'the tables are not corrupted');
	is($node->safe_psql('postgres', q{
		SELECT count(bt_index_check(c.oid, true)::text) FROM pg_class c
		WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind = 'i'}) > 8 ? 'sound' : 'missing',
		'sound', 'the indexes show every row');
}

# every event that was not parked comes, those of a key in the order of their ids;
# what is changed by hand gets a new place, above what sessions have seen
$node->safe_psql('postgres', q{
CREATE TABLE delivered (n serial, topic text, key text, id bigint, acked boolean);
CREATE PROCEDURE drain() LANGUAGE plpgsql AS $$
DECLARE t text;
BEGIN
  FOR t IN SELECT DISTINCT topic FROM idempotency.outbox LOOP
    LOOP
      INSERT INTO delivered (topic, key, id, acked)
      SELECT t, e.key, e.id, idempotency.ack(e.id, e.attempt) FROM idempotency.take(t, 1000) e;
      EXIT WHEN NOT FOUND;
      COMMIT;
    END LOOP;
  END LOOP;
END $$;
UPDATE idempotency.outbox_topics SET parked_blocks = false;
UPDATE idempotency.outbox_leases SET deadline = '-infinity';
UPDATE idempotency.outbox o SET due = '-infinity', place = nextval('idempotency.outbox_id_seq')
WHERE due < 'infinity' AND (due > '-infinity'
  OR EXISTS (SELECT FROM idempotency.outbox b WHERE (b.topic, b.key) = (o.topic, o.key) AND b.state = 'b'));
UPDATE idempotency.outbox SET state = 'p' WHERE state = 'b';	-- that block their keys
});
my $waiting = $node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.outbox WHERE state IN ('r', 'l')});
$node->safe_psql('postgres', 'CALL drain()');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.outbox WHERE state <> 'p'}), '0', "all $waiting events that are left come");
is($node->safe_psql('postgres', q{
	SELECT topic, key, id FROM (SELECT *, lag(id) OVER (PARTITION BY topic, key ORDER BY n) AS before FROM delivered WHERE key IS NOT NULL) d
	WHERE id <= before OR NOT acked}), '', 'in the order of their ids, and once');

# every key that is not in use can be claimed, and replays
is($node->safe_psql('postgres', q{
	BEGIN;
	UPDATE idempotency.keys SET expires_at = created_at WHERE status <> 'l';
	COMMIT;
	SELECT count(*) FROM idempotency.keys k, LATERAL idempotency.run(k.scope, k.key, 'echo', '{"a": 1}') r
	WHERE k.status <> 'l' AND k.scope NOT LIKE 'idempotency.%' AND (r.status, r.replayed) IS DISTINCT FROM ('completed', false);
	SELECT count(*) FROM idempotency.keys k, LATERAL idempotency.run(k.scope, k.key, 'echo', '{"a": 1}') r
	WHERE k.status <> 'l' AND k.scope NOT LIKE 'idempotency.%' AND (r.status, r.replayed, r.response) IS DISTINCT FROM ('completed', true, '{"a": 1}')}),
	"0\n0", 'every key that was left runs anew once it has expired, and replays');
is($node->safe_psql('postgres', q{
	UPDATE idempotency.keys SET expires_at = created_at, deadline = CASE WHEN status = 'l' THEN created_at END;
	UPDATE idempotency.used_tokens SET expires_at = now() - interval '1 year';
	UPDATE idempotency.token_generations SET raised_at = now() - interval '1 year';
	SELECT idempotency.purge(2147483647) >= 0;
	SELECT count(*) FROM idempotency.keys;
	SELECT count(*) FROM idempotency.used_tokens}),
	"t\n0\n0", 'purge removes every key and mark');
$node->stop;
done_testing();

# ------------------------------------------------------------- may it say that?
# What the server wrote of errors with these SQLSTATEs, each message once.
sub said
{
	my %code = map { $_ => 1 } @_;
	my %message;
	/^\S* (\w{5}) (?:ERROR|FATAL): +(.*)/ && $code{$1} && $message{ $2 =~ s/"[^"]*"|\d+/_/gr }++ for split /\n/, slurp_file($node->logfile);
	return join "\n", map { "$_ ($message{$_})" } sort keys %message;
}

sub allowed
{
	my ($line, $code) = @_;
	# DDL on a table of its own, and what fires on it: anything but "cannot happen"
	return $code !~ /^(XX|5[378]|22012)/ if $line->{wild};
	# the transaction's state and the caller's rights, before or in any function
	return 1 if $code eq '25P02' && $line->{block};
	return 1 if $code eq '25006' && $line->{read_only};
	return 1 if $code eq '42501' && $line->{role} ne 'superuser';
	return $line->{level} ne 'READ COMMITTED' || ($line->{call} // $line->{sql}) =~ /raises/ || $line->{ends} && $line->{codes}{any}
	  if $code eq '40001';
	return 1 if $code eq '40P01';
	return 1 if $code eq 'IK001' && $line->{ends};
	return 1 if $line->{codes} && $line->{codes}{$code};
	for my $name (@{ $line->{functions} // [] })
	{
		return 1 if $documented{$name}{$code};
		# what PostgreSQL says to a caller of a trigger function
		return 1 if $is_trigger{$name} && $code =~ /^(39P01|42804|0A000)$/;
		# what the statement that it runs for the caller raises
		return 1 if $comment{$name} =~ /\b(INSERT|UPDATE|SELECT|the function)'s\b/ && $code =~ /^(22...|23...|428C9|42804|55000|P0001|ZZ999|40001|57014|21000|0A000|IK00[1-7])$/;
	}
	return 0;
}

# ---------------------------------------------------------- a session's script
# The choices of a call that make it likely to succeed
my ($role, $odd, $scope, $key, $last, $target, @targets, %may);

sub pick { return $_[ int(rand(@_)) ]; }

# Lines, each one statement: what it calls and in what state it is sent.
sub session
{
	my ($n, $wanted) = @_;
	# table, id, state column, machine, what else to set
	@targets = (
		[ 'plain', '%d', 'state', 'm', '{"note": "n"}' ], [ 'enumerated', '%d', 'state', 'm', '{"note": "n"}' ],
		[ 'both_of', '{"a": "k%d", "b": "00000000-0000-0000-0000-00000000000%d"}', 'state', 'm', '{}' ],
		[ 'both_of', '{"a": "k%d", "b": "00000000-0000-0000-0000-00000000000%d"}', 'State Two', 'm%s', '{}' ],
		[ 'parts', '{"id": %1$d, "month": 1}', 'state', 'm%s', '{"month": 2}' ], [ 'walled', '%d', 'state', 'm', '{}' ],
		[ 'triggered', '%d', 'state', 'm', '{"note": "n"}' ], [ 'counted', '%d', 'version', 'm', '{"note": "n"}' ],
		[ 'unlogged', '%d', 'version', 'm', '{"state": "x"}' ], [ 'fenced', '%d', 'fence', 'm', '{"fence": 9}' ]);
	# internal functions and the owner's are for the superuser
	%may = (superuser => \@functions, regress_nobody => \@functions,
		map { my $r = $_; $r => [ grep { $_->{may}{$r} } @functions ] } 'regress_app', 'regress_admin');
	# PostgreSQL leaks what such a set-returning function has open, if it is held
	my $in_sql = join '|', map { "$_->{name}\\(" } grep { $_->{may}{sql} } @functions;
	my @lines = ({ sql => "\\set ON_ERROR_ROLLBACK " . ($n % 4 ? 'on' : 'off'), role => 'superuser', level => 'READ COMMITTED' },
		{ sql => "CREATE TEMP TABLE temporary (id int PRIMARY KEY, state text DEFAULT 'A', version bigint NOT NULL DEFAULT 1, fence bigint); INSERT INTO temporary SELECT generate_series(1, 5); GRANT ALL ON temporary TO PUBLIC;",
			role => 'superuser', level => 'READ COMMITTED' });
	my ($done, $serial) = (0, 0);
	($role, $scope, $key, $last) = ('superuser', 's0', 'k1', '');
	while ($done < $wanted)
	{
		if (rand() < 0.05)
		{
			$role = pick('superuser', ('regress_app', 'regress_admin') x 4, 'regress_nobody');
			push @lines, { sql => $role eq 'superuser' ? 'RESET ROLE;' : "SET ROLE $role;", role => $role, level => 'READ COMMITTED' };
		}
		if (rand() < 0.004)
		{
			push @lines, map { { sql => $_, role => $role, level => 'READ COMMITTED', fixture => 1, codes => any_code() } }
			  'RESET ROLE;', split(/\n/, $fixtures), $role eq 'superuser' ? () : "SET ROLE $role;";
		}
		if (rand() < 0.04)
		{
			push @lines, map { { sql => $_, role => $role, level => 'READ COMMITTED', wild => 1 } } hand_made();
			next;
		}
		my $level = pick('READ COMMITTED', 'READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE');
		my $read_only = rand() < 0.12;
		my %state = (role => $role, level => 'READ COMMITTED', ends => 1);
		if (rand() < 0.5)
		{
			push @lines, { statement(), %state };
			$done += $lines[-1]{calls};
			next;
		}
		%state = (%state, level => $level, read_only => $read_only, block => 1, ends => 0);
		push @lines, { sql => "BEGIN ISOLATION LEVEL $level" . ($read_only ? ' READ ONLY' : '') . ';', %state };
		my $depth = 0;
		for (0 .. rand(6))
		{
			my $what = rand();
			if ($what < 0.2)
			{
				push @lines, { sql => 'SAVEPOINT s' . ++$depth . ';', %state };
			}
			elsif ($what < 0.35 && $depth)
			{
				push @lines, { sql => pick('ROLLBACK TO', 'RELEASE', 'ROLLBACK TO') . ' s' . int(1 + rand($depth)) . ';', %state, codes => { '3B001' => 1 } };
			}
			elsif ($what < 0.42)
			{
				# calls that go on in later statements
				my %call = statement();
				push @lines, { %call, call => $call{sql}, sql => "DECLARE c$done " . pick('', 'SCROLL ', 'NO SCROLL ') . 'CURSOR ' . ($call{sql} !~ /$in_sql/ ? pick('', '', 'WITH HOLD ') : '') . "FOR $call{sql}", %state, codes => { %{ $call{codes} // {} }, '0A000' => 1, '42601' => 1 } }
				  if $call{sql} =~ /^SELECT/;
				push @lines, { %call, call => $call{sql}, sql => "FETCH " . pick(1, 2, 'ALL') . " c$done;", %state, codes => { %{ $call{codes} // {} }, '34000' => 1 } };
				push @lines, { %call, call => $call{sql}, sql => "CLOSE c$done;", %state, codes => { '34000' => 1 } } if rand() < 0.3;
				$done += $call{calls};
				next;
			}
			push @lines, { statement(), %state };
			$done += $lines[-1]{calls};
		}
		# what a WITH HOLD cursor calls, it calls at COMMIT
		my %all = (%state, ends => 1, block => 0, codes => any_code());
		my $end = rand();
		if ($end < 0.6) { push @lines, { sql => 'COMMIT;', %all }; }
		elsif ($end < 0.8) { push @lines, { sql => 'ROLLBACK;', %all }; }
		else
		{
			push @lines, { sql => "PREPARE TRANSACTION 'fuzz $n " . ++$serial . "';", %all, codes => { '55000' => 1, '0A000' => 1 } };
			push @lines, { sql => pick('COMMIT', 'ROLLBACK') . " PREPARED 'fuzz $n $serial';", %all, codes => { '42704' => 1, '42501' => 1 } };
		}
		push @lines, { sql => "CLOSE ALL;", role => $role, level => 'READ COMMITTED' } if rand() < 0.2;
	}
	return \@lines;
}

# A table of the session's own, with triggers that call our functions, put on it
# by hand: each statement of it.
sub hand_made
{
	my ($type, $category) = @{ pick(@column_types) };
	($type, $category) = @{ pick([ 'bigint', 'N' ], [ 'text', 'S' ], [ 'bytea', 'U' ]) } if rand() < 0.2;
	my $kind = pick('table', 'table', 'table', 'parts', 'view');
	my $columns = "id int NOT NULL, v $type, n int DEFAULT 0, b bigint NOT NULL DEFAULT 1, f bigint, s text DEFAULT 'A', was text";
	my @lines = map { "DROP $_ CASCADE;" } 'VIEW IF EXISTS pg_temp.hand', 'TABLE IF EXISTS pg_temp.hand', 'TABLE IF EXISTS pg_temp.hand_stored';
	if ($kind eq 'parts')
	{
		push @lines, "CREATE TEMP TABLE hand ($columns, PRIMARY KEY (id)) PARTITION BY RANGE (id);",
		  "CREATE TEMP TABLE hand_1 (was text, junk bytea, s text DEFAULT 'A', f bigint, b bigint NOT NULL DEFAULT 1, n int DEFAULT 0, v $type, id int NOT NULL);",
		  'ALTER TABLE hand_1 DROP COLUMN junk;', 'ALTER TABLE hand ATTACH PARTITION hand_1 FOR VALUES FROM (0) TO (2);',
		  'CREATE TEMP TABLE hand_2 PARTITION OF hand DEFAULT;';
	}
	else
	{
		my $stored = $kind eq 'view' ? 'hand_stored' : 'hand';
		push @lines, "CREATE TEMP TABLE $stored (gone bytea, $columns, PRIMARY KEY (id));";
		push @lines, "ALTER TABLE $stored DROP COLUMN gone;" if rand() < 0.7;
		push @lines, 'CREATE TEMP VIEW hand AS SELECT * FROM hand_stored;' if $kind eq 'view';
	}
	push @lines, 'INSERT INTO hand (id, v) VALUES (' . int(1 + rand(3)) . ", ${\ wild_value($category)}::$type);" for 1 .. 3;
	push @lines, 'INSERT INTO hand (id) SELECT g FROM generate_series(1, 3) g WHERE NOT EXISTS (SELECT FROM hand h WHERE h.id = g);', 'UPDATE hand SET was = v::text;';
	# as attach_...() makes them, but for the column
	if (rand() < 0.6 && $kind ne 'view')
	{
		my ($call, $timing) = @{ pick([ 'guard_version()', 'BEFORE' ], [ 'guard_version()', 'BEFORE' ], [ 'guard_fence()', 'BEFORE' ], [ q{guard_state('m', 'no history')}, 'BEFORE' ], [ q{guard_state('m', 'history')}, 'AFTER' ]) };
		push @lines, "CREATE TRIGGER u1 $timing UPDATE OF v ON hand FOR EACH ROW EXECUTE FUNCTION idempotency.$call;",
		  "CREATE TRIGGER u2 $timing UPDATE ON hand FOR EACH ROW EXECUTE FUNCTION idempotency." . $call =~ s/\(.*/();/r;
	}
	for my $n (1 .. rand(5) - 1)
	{
		my $function = pick('guard_state', 'guard_version', 'guard_fence');
		my $arguments = pick('', '', '', $function eq 'guard_state' ? (q{'m', 'no history'}, q{'m', 'no history'}, q{'m', 'history'}, q{'m'}, q{'no', 'history'}) : q{'v'});
		my $timing = $kind eq 'view' && rand() < 0.7 ? 'INSTEAD OF' : pick('BEFORE', 'BEFORE', 'BEFORE', 'AFTER');
		my $events = pick('UPDATE', 'UPDATE', 'UPDATE OF v', 'UPDATE OF v', 'UPDATE OF v', 'UPDATE OF b', 'UPDATE OF f', 'UPDATE OF s', 'UPDATE OF n, v', 'INSERT', 'DELETE', 'INSERT OR DELETE', 'INSERT OR UPDATE OF v', 'TRUNCATE');
		my $end = "EXECUTE FUNCTION idempotency.$function($arguments)";
		push @lines, rand() < 0.1
		  ? "CREATE CONSTRAINT TRIGGER t$n AFTER $events ON hand " . pick('', 'DEFERRABLE INITIALLY DEFERRED') . " FOR EACH ROW $end;"
		  : "CREATE TRIGGER t$n $timing $events ON " . ($kind eq 'parts' && rand() < 0.3 ? 'hand_1' : 'hand') . pick('', '', '', '', ' REFERENCING NEW TABLE AS new_ones')
		  . pick(' FOR EACH ROW', ' FOR EACH ROW', ' FOR EACH ROW', ' FOR EACH STATEMENT') . pick('', '', '', '', ' WHEN (NEW.n > 0)') . " $end;";
	}
	push @lines, "SELECT idempotency." . pick("attach_version('hand', 'b')", "attach_fence('hand', 'f')", "attach_machine('hand', 's', 'm', true)", "attach_version('hand', 'v')", "attach_machine('hand', 'v', 'm')") . ';' if rand() < 0.3;
	# a column that is no version must come out of all this as it was, unless a
	# machine whose guard happened to be well formed moves it
	my $unchanged = $type eq 'bigint' ? '' : 'SELECT 1 / (v::text IS NOT DISTINCT FROM was)::int FROM hand;';
	for (1 .. 4 + rand(6))
	{
		push @lines, pick(
			'UPDATE hand SET n = n + 1;', 'UPDATE hand SET n = n + 1;', 'UPDATE hand SET v = v;', 'UPDATE hand SET v = v, f = 7, n = 1 WHERE id = 1;', 'UPDATE hand SET b = b, f = 8;', 'UPDATE hand SET id = 4 - id, f = 9;',
			q{UPDATE hand SET s = 'B', f = 10;}, 'INSERT INTO hand (id) VALUES (7);', 'DELETE FROM hand WHERE id = 7;', 'TRUNCATE hand;', q{INSERT INTO hand (id) VALUES (1) ON CONFLICT (id) DO UPDATE SET v = hand.v, n = 5, f = 11;},
			q{SELECT * FROM idempotency.update_if('hand', 1, 1, '{"n": 3}');}, q{SELECT * FROM idempotency.update_if('hand', '2', 1, NULL);}, q{SELECT * FROM idempotency.transition('hand', 1, NULL, 'B');}, q{SELECT * FROM idempotency.fire('hand', 2, 'go', '{"n": 4}');},
			q{SELECT idempotency.detach_version('hand', 'v');}, q{SELECT idempotency.detach_machine('hand', 's');}, 'ALTER TABLE hand RENAME v TO "renamed%s"; ALTER TABLE hand RENAME "renamed%s" TO v;', 'ALTER TABLE hand DISABLE TRIGGER t1;', 'ALTER TABLE hand DROP COLUMN b CASCADE;');
		$unchanged = '' if $lines[-1] =~ /transition|fire/;
		push @lines, $unchanged if $unchanged;
	}
	@lines = map { s/\bhand(?=\b|_)/hand_$role/gr } @lines;
	return rand() < 0.3 ? ('BEGIN;', @lines, 'COMMIT;') : @lines;
}

# A value of such a category that, taken for another type, is a wild pointer or a
# forged header.
sub wild_value
{
	my ($category) = @_;
	my @bytes = ('\\x007d000041414141', '\\x01034141414141414141', '\\x0112ffffffffffffffff0000000001000000', '\\xffffffffffffffff', '\\x', '\\x010341');
	my %values = (
		N => [ '4096', '281474976710656', '-1', '8', '9223372036854775807', '0' ], S => [ 'A', 'B', '', 'x' x 300, @bytes ], A => [ '{}', '{NULL}', '{1}', '{A,B}', '{"\\\\x007d000041414141"}', '{"(4096,A)"}' ],
		R => [ 'empty', '[1,5)', '(,)', '[2020-01-01,2021-01-01)', '{}' ], B => [ 'true' ], D => [ '1970-01-01', 'infinity', '2020-01-01 00:00', '01:00' ], T => ['1 day'], E => [ 'A', 'B' ],
		G => [ '(1,2)', '((1,2),(3,4))', '{1,2,3}' ], I => [ '127.0.0.1', '::1/64' ], V => ['0101'], pair => [ '(4096,)', '(,A)' ], int8 => [ '4096', '1' ], varchar => ['A'], bytea => \@bytes);
	my @values = @{ $values{$category} // [ @bytes, '1', '{}', '(0,1)', '<a/>', '08:00:2b:01:02:03', '00000000-0000-0000-0000-000000000001', '16/B374D848', '1:1:', 'A', '$.a' ] };
	return "'" . pick(@values) . "'";
}

# What a COMMIT may bring from a cursor WITH HOLD, and the fixtures from others.
sub any_code { return { any => 1, map { $_ => 1 } map { keys %$_ } values %documented }; }

# One statement that calls one function or several, once or over a set.
sub statement
{
	my @call = call();
	my ($name, $call) = @{ $call[0] };
	my $shape = rand();
	my $sql;
	my $calls = 1;
	if ($shape < 0.45) { $sql = "SELECT $call"; }
	elsif ($shape < 0.6) { $sql = "SELECT * FROM $call"; }
	elsif ($shape < 0.7) { $calls = 3; $sql = "SELECT $call FROM generate_series(1, 3)"; }
	elsif ($shape < 0.8)
	{
		push @call, call(), call();
		$calls = 3;
		# each is called for every row of those that return a set
		$sql = 'SELECT ' . join(', ', map { $_->[1] } @call) . ' LIMIT 20';
	}
	elsif ($shape < 0.85)
	{
		push @call, call();
		$calls = 2;
		$sql = "SELECT * FROM $call[0][1] AS a, $call[1][1] AS b LIMIT 100";
	}
	elsif ($shape < 0.88) { $sql = "SELECT * FROM generate_series(1, 2) g, LATERAL (SELECT $call OFFSET g) AS x LIMIT 1"; }
	elsif ($shape < 0.9) { $sql = "SELECT ($call)::text" }
	else { $sql = "SELECT attempt(\$fuzz\$SELECT $call\$fuzz\$)"; }
	my %codes = map { %{ $_->[2] } } @call;
	return (sql => "$sql;", calls => $calls, functions => [ map { $_->[0] } @call ], codes => \%codes);
}

# One call: [ function, its text, SQLSTATEs that its arguments bring ]
sub call
{
	# mostly what the role may call; how many of the arguments are to be odd?
	my $f = pick(rand() < 0.85 ? @{ $may{$role} } : @functions);
	$f = pick(grep { $_->{name} =~ /^(complete|fail|release|extend|checkpoint|lease|claim)$/ } @functions) if $last =~ /^(claim|lease|checkpoint)$/ && rand() < 0.5;
	$odd = pick(0, 0, 0, 0, 0.15, 0.15, 0.4, 0.9);
	($scope, $key) = (pick(qw(s0 s1 s2)), pick(qw(k1 k2 k3 k4))) if $last !~ /^(claim|lease|checkpoint)$/ || rand() < 0.1;
	$last = $f->{name};
	$target = pick(@targets);
	my $n = $f->{needed} + int(rand(@{ $f->{types} } - $f->{needed} + 1));
	# the defaults are seldom what is wanted
	$n = @{ $f->{types} } if rand() < 0.5;
	my @args = map { value($f->{types}[$_], $f->{names}[$_] // '', $f->{name}) } 0 .. $n - 1;
	my %codes;
	return [ $f->{name}, "idempotency.$f->{name}(" . join(', ', @args) . ')', \%codes ];
}

# --------------------------------------------------------------------- the values
sub literal { my ($s) = @_; $s =~ s/'/''/g; return $s =~ /\\/ ? "E'" . $s =~ s/\\/\\\\/gr . "'" : "'$s'"; }

sub value
{
	my ($type, $name, $function) = @_;
	if (rand() >= $odd)
	{
		my $usual = usual_value($type, $name, $function);
		return $usual if defined $usual;
	}
	return "NULL::" . ($type eq 'anyelement' ? pick('plain', 'once', 'text', 'int', 'pair') : $type) if rand() < 0.06;
	return text_value($name, $function) . '::text' if $type eq 'text';
	return name_value($function) . '::name' if $type eq 'name';
	return json_value($name, $function) . '::jsonb' if $type eq 'jsonb';
	return interval_value() . '::interval' if $type eq 'interval';
	return bigint_value($name) if $type eq 'bigint';
	return pick(0, 1, 1, 1, 2, 2, 3, 10, 100, -1, 10001, 2147483647, '(-2147483648)') . '::int' if $type eq 'integer';
	return pick('true', 'false') if $type eq 'boolean';
	return relation_value() . '::regclass' if $type eq 'regclass';
	return pick("'00000000-0000-0000-0000-000000000000'", "'ffffffff-ffff-ffff-ffff-ffffffffffff'", 'gen_random_uuid()::text') . '::uuid' if $type eq 'uuid';
	return any_value($function) if $type eq 'anyelement';
	return array_value($type) if $type =~ /\[\]$/;
	die "value for type $type";
}

# What goes together in a call that means well; undef: anything.
sub usual_value
{
	my ($type, $name, $function) = @_;
	if ($function =~ /^(transition|fire|update_if|off_graph|[ad]e?ttach_\w+|detach_\w+)$/)
	{
		my ($rel, $id, $column, $machine, $changes) = @$target;
		return literal($rel) . '::regclass' if $name eq 'rel';
		return literal(sprintf($id, (1 + rand(8)) x 3)) . '::text' if $name eq 'id';
		return pick('NULL', "'A'", "'B'") . '::text' if $name eq 'from_state';
		return pick("'A'", "'B'", "'B'", "'C'") . '::text' if $name eq 'to_state';
		return pick("'go'", "'back'", "'stay'") . '::text' if $name eq 'event';
		return pick('NULL', "'{}'", literal($changes)) . '::jsonb' if $name eq 'changes';
		return ($rel eq 'both_of' || $function =~ /tach/ ? literal($column) : 'NULL') . '::name' if $name eq 'state_column';
		return "'$1'::name" if $name =~ /^(version|fence)_column$/;
		return pick(1, 1, 2) . '::bigint' if $name eq 'version';
		return literal($machine) . '::text' if $name eq 'machine';
	}
	return "'$scope'::text" if $name eq 'scope' || $name eq 'topic';
	return $function =~ /token/ ? undef : "'$key'::text" if $name eq 'key' || $name eq 'name' && $function =~ /lock|checkpoint/;
	return "fence_of('idempotency.lock', '$key')" if $name eq 'fence' && $function =~ /lock/;
	return rand() < ($function =~ /extend|checkpoint/ ? 1 : 0.4) ? "fence_of('$scope', '$key')" : 'NULL::bigint' if $name eq 'fence';
	return pick("'m'", "'spare'", "'spare'") . '::text' if $function =~ /^(define|drop)_machine$/ && $name eq 'name';
	return literal(machine_definition()) . '::jsonb' if $name eq 'definition';
	return "'regress_other'::name" if $name eq 'role';
	return pick("'30 s'", "'1 s'", "'0'", "'20 ms'") . '::interval' if $type eq 'interval';
	return pick('NULL', q{'{"a": 1}'}) . '::jsonb' if $name =~ /^(request|meta|data|payload)$/;
	return "'" . pick('echo', 'echo', 'silent', 'nests', 'settles', 'raises') . "'::text" if $name eq 'function';
	return 'NULL::once' if $function eq 'insert_once' && $type eq 'anyelement';
	return literal(pick('{"request_id": "r1", "amount": 1}', '{"request_id": "r2"}', '{"n": 1, "amount": 2}')) . '::jsonb' if $name eq 'new_row';
	return 'NULL::text[]' if $name eq 'conflict';
	return pick(1, 2, 5, 100) . '::int' if $name eq 'max';
	return undef;
}

# Text that is hard to format, quote, measure or compare.
sub hostile_text
{
	return pick(
		q{''}, q{' '}, q{E'\\x01\\x1f\\x7f'}, q{E'a\\nb\\tc\\r\\x08'}, literal(q{'"\\\\'';--}), literal('%s%n%d%%%1$s%p'),
		literal('{"a": 1}'), q{'null'}, q{'NULL'}, q{'idempotency.lock'}, q{'idempotency.x'}, q{'idempotency'}, q{'ünïcödé 漢字 🐘'},
		q{chr(1114111)}, q{chr(65279) || 'bom'}, q{repeat('é', 128)}, q{repeat('é', 129)}, q{repeat('x', 256)}, q{repeat('x', 257)},
		q{repeat('x', 512)}, q{repeat('x', 513)}, q{repeat('%s', 8192)}, q{repeat(E'\\\\"', 20000)}, q{repeat('漢', 100000)},
		(rand() < 0.1 ? q{repeat('x', 3000000)} : q{repeat('x', 70000)}),
		q{'-1'}, q{'0'}, q{'9223372036854775808'}, q{'1e400'}, q{'NaN'}, q{'[1,2'}, q{'(,)'}, q{'$1'}, q{'public.plain'}, q{'"'}, q{'a.b.c.d'});
}

sub text_value
{
	my ($name, $function) = @_;
	return hostile_text() if rand() < 0.25;
	if ($name eq 'token')
	{
		my $token = '(SELECT token FROM public.token WHERE n = ' . int(1 + rand(12)) . ')';
		return $token if rand() < 0.7;
		return pick("overlay($token placing 'Z' from " . int(1 + rand(100)) . ')', "left($token, " . int(rand(90)) . ')', "$token || 'A'", "upper($token)", q{repeat('A', 10000)}, q{'====' });
	}
	return pick(qw('s0' 's1' 's2')) if $name =~ /^(scope|topic|purpose)$/;
	return "'" . pick('m', 'm', 'm', 'm', 'm%s', 'no') . "'" if $name eq 'machine' || $function =~ /machine/;
	return "'" . pick('A', 'B', 'C', 'off', 'D', 'A   ') . "'" if $name =~ /state$/;
	return "'" . pick('go', 'back', 'stay', 'A') . "'" if $name eq 'event';
	return "'" . pick(1 .. 8, 99, '1.0', ' 1', 'x', 'k1', '{"id": 1, "month": 1}', '{"a": "k1", "b": "00000000-0000-0000-0000-000000000001"}', '{"id": 1}', '{"id": 1, "id": 2}', '[1]') . "'" if $name eq 'id';
	return "'" . pick('echo', 'echo(jsonb)', 'answers', 'strictly', 'silent', 'raises', 'nests', 'settles', 'many', 'wants_int', 'does', 'gathers', 'no_such', 'pg_sleep', 'public.echo(jsonb)',
		'meddle', 'idempotency.guard_state', 'idempotency.claim', 'echo(', 'echo(int)', 'jsonb_typeof', 'pg_catalog.jsonb_strip_nulls', '"Echo"', 'row_number', 'echo(jsonb, jsonb)') . "'" if $name eq 'function';
	return pick(qw('usage' 'admin' 'x')) if $name eq 'audience';
	return pick(qw('scope' 'prefix' 'total' 'x')) if $name eq 'by';
	return pick(qw('k1' 'k1' 'k2' 'k3' 'k4')) if rand() < 0.95;
	return 'md5(random()::text)';
}

sub name_value
{
	my ($function) = @_;
	return pick(qw('regress_other' 'regress_other' 'no_role' 'public' 'pg_monitor'), q{''}, q{repeat('r', 63)}, literal('a"b%s;'))
	  if $function =~ /usage|admin/;
	return pick(qw('state' 'state' 'state' 'version' 'version' 'fence' 'fence' 'id' 'note' 'month' 'sum' 'ctid' 'xmin' 'tableoid' 'no'),
		q{'State Two'}, q{''}, q{repeat('n', 63)}, q{'x"y%s'}, q{'ünï'}, q{'a'});
}

sub json_value
{
	my ($name, $function) = @_;
	my $what = rand();
	if ($what < 0.5)
	{
		return literal(machine_definition()) if $name eq 'definition';
		return literal(pick('{}', '{"note": "n"}', '{"amount": 5}', '{"amount": 99999}', '{"amount": "x"}', '{"tags": ["a", null]}', '{"tags": "{a,b}"}', '{"body": {"a": [1]}}',
			'{"note": null}', '{"id": 3}', '{"id": null}', '{"id": 2}', '{"state": "B"}', '{"version": 7}', '{"fence": 9}', '{"sum": 1}', '{"no": 1}', '{"ctid": "(0,1)"}', '{"x\"y%s": "1"}', '{"month": 2}', '{"": 1}',
			'{"note": {"deep": {"er": []}}}', '{"State Two": "B"}', '{"fence": ' . int(rand(2**40)) . ', "note": 1}'))
		  if $name eq 'changes';
		return literal(pick('{"request_id": "r1", "amount": 1}', '{"request_id": "r2"}', '{"request_id": null}', '{"n": 1, "amount": 2.0}', '{"n": "x", "amount": 1}', '{"id": 1}', '{"id": 5, "state": "A"}', '{"id": 6, "state": "C"}',
			'{"id": 1, "month": 1, "state": "A"}', '{"a": "k9", "b": "00000000-0000-0000-0000-000000000009"}', '{"request_id": "r1", "n": 1, "amount": 1}', '{"n": 99999999999, "amount": 1}',
			'{"id": 7, "amount": 5000}', '{"id": 7, "tags": ["x"], "body": null}', '{"no": 1}', '{}'))
		  if $name eq 'new_row';
		return literal(pick('{"a": 1}', '{"a": 1.0}', '{"a": 2}', '{"b": [1, 2, {"c": null}]}'));
	}
	return pick(
		q{'null'}, q{'true'}, q{'0'}, q{'-1'}, q{'1e1000'}, q{'-1.5e-300'}, q{'""'}, q{'"x"'}, q{'[]'}, q{'{}'}, q{'[null]'}, q{'[[], {}, [[]]]'}, q{'{"": {"": {"": null}}}'},
		q{'{"a": 1, "a": 2}'}, q{'"\\u00e9\\t\\n\\u0001"'}, literal('{"%s": "%n", "\'\"": "\\\\"}') =~ s/\\"/"/gr =~ s/""/"/r =~ /^/ ? q{'{"%s": "%n", "''": "\\\\"}'} : '',
		q{('"' || repeat('é', 5000) || '"')}, q{('"' || repeat('x', 8190) || '"')}, q{('"' || repeat('x', 8191) || '"')},
		q{(repeat('[', 500) || repeat(']', 500))}, q{(repeat('{"a":', 300) || '1' || repeat('}', 300))}, (rand() < 0.2 ? q{(repeat('[', 3000) || repeat(']', 3000))} : q{'[1]'}),
		(rand() < 0.1 ? q{('"' || repeat('x', 2000000) || '"')} : q{'"y"'}),
		q{(SELECT jsonb_object_agg('k' || g, g) FROM generate_series(1, 500) g)}, q{(SELECT jsonb_agg(g) FROM generate_series(1, 2000) g)});
}

sub machine_definition
{
	my @states = (qw(A B C off), '%s', '', 'é', 'A  ');
	return pick(
		'{"initial": "A", "transitions": {"A": {"go": "B", "stay": "A"}, "B": {"go": "C", "back": "A"}, "C": ["off"]}}',
		'{"initial": ["A", "B", "C", "off"], "transitions": {"A": {"go": "B"}, "B": ["C"]}}',
		'{"initial": "A"}', '{"transitions": {}}', '{"initial": [], "transitions": {}}', '{"initial": "A", "transitions": []}', '{"initial": "A", "transitions": {"A": "B"}}',
		'{"initial": 1, "transitions": {"A": ["B"]}}', '{"initial": "A", "transitions": {"A": [1]}}', '{"initial": "A", "transitions": {"A": {"e": null}}}', '{"initial": "A", "transitions": {"A": ["B", "B"]}}',
		'{"initial": ["A", "A"], "transitions": {"A": {"x": "B", "y": "B"}}}', '{"initial": "Z", "transitions": {"A": ["B"]}}', '{"initial": "A", "transitions": {"A": ["B"]}, "more": 1}', '{"initial": "A", "transitions": {"A": [["B"]]}}')
	  if rand() < 0.6;
	my %edges;
	for (0 .. rand(6))
	{
		my $from = pick(@states);
		$edges{$from} = rand() < 0.5 ? '[' . join(', ', map { '"' . pick(@states) . '"' } 0 .. rand(3)) . ']'
		  : '{' . join(', ', map { '"' . pick(qw(go back e%s)) . '": "' . pick(@states) . '"' } 0 .. rand(3)) . '}';
	}
	return '{"initial": "' . pick(@states) . '", "transitions": {' . join(', ', map { qq{"$_": $edges{$_}} } sort keys %edges) . '}}';
}

sub interval_value
{
	return "'" . pick('0', '0', '0', '1 us', '1 ms', '20 ms', '1 s', '30 s', '1 day', '1 mon', '-1 us', '-1 s', '-1 mon', '1 mon -30 days', '1 mon -31 days', '-1 day 24:00:01', '1000000 years', '-1000000 years',
		'178000000 years', '-178000000 years', '290000 years', '292272 years', '2147483647 days', '-2147483648 days', '2147483647 mons', '9223372036854 s', '2147483647 days -1 s', '0.0000001 s',
		$major >= 17 ? ('infinity', '-infinity') : ()) . "'";
}

sub bigint_value
{
	my ($name) = @_;
	return pick(0, 1, -1, 2, 5, 99, 2**31, '9223372036854775807', '(-9223372036854775808)') . '::bigint' if rand() < 0.3;
	return "fence_of('" . pick(qw(s0 s1 s2 idempotency.lock)) . "', 'k" . int(1 + rand(4)) . "')" . pick('', '', ' - 1', ' + 1') if $name eq 'fence';
	return int(1 + rand(200)) . '::bigint' if $name eq 'id';
	return pick(1, 1, 2, 3, 4) . '::bigint';
}

sub relation_value
{
	return pick(qw(99999999::oid 0::oid 4294967295::oid), q{'pg_class'}, q{'pg_authid'}, q{'pg_toast.pg_toast_1255'}, q{'information_schema.tables'}, q{'idempotency.keys'}, q{'idempotency.outbox'}, q{'idempotency.machines'},
		q{'idempotency.transition_log'}, q{'idempotency.keys_pkey'}, q{'idempotency.claim_result'}, q{'pair'}, q{'temporary'}, q{'temporary'}, q{'counter'}, q{'plain_pkey'}, q{'seen'}, q{'kept'}, q{'far'}) if rand() < 0.2;
	return literal(pick(qw(plain plain enumerated both_of parts parts_1 counted fenced once walled triggered keyless late_key unlogged parent child)));
}

sub any_value
{
	my ($function) = @_;
	return 'NULL::' . pick(qw(once once once twins plain enumerated both_of parts parts_1 walled triggered keyless late_key counted seen kept far pair pair_domain int idempotency.keys), 'int[]', 'pg_class') if $function eq 'insert_once' && rand() < 0.9;
	return pick(1, 1, 2, 3, 4, 5) . '::' . pick('int', 'bigint', 'smallint', 'numeric', 'text', 'oid', 'float8') if $function =~ /^(transition|fire|update_if)$/ && rand() < 0.5;
	return q{'00000000-0000-0000-0000-000000000001'::uuid} if rand() < 0.05;
	return pick(
		'1', '1.5', q{'x'::varchar}, q{'x'::char(9)}, q{'x'::name}, q{'{"b":1,"a":1.0, "a":2}'::json}, q{'{"id": 1, "month": 1}'::jsonb}, q{'"\\u0000"'::json}, 'now()', q{'infinity'::timestamptz}, q{'-infinity'::date}, q{'0044-03-15 BC'::timestamp},
		'true', q{'\\x00ff'::bytea}, q{ROW(1, 'a%s')}, q{ROW(1, 'x')::pair}, q{ROW(1, 'x')::pair::pair_domain}, 'ROW()', 'ARRAY[1, NULL]', 'ARRAY[[1,2],[3,4]]', q{'{}'::text[]}, q{'NaN'::numeric}, q{'Infinity'::float8}, '(1e-130)::numeric', '(9223372036854775807)::bigint',
		q{'A'::state}, q{'abc'::label}, 'pg_sleep(0)', q{'1 day'::interval}, q{'(1,2)'::point}, q{'[1,5)'::int4range}, q{'127.0.0.1'::inet}, q{B'101'}, 'NULL::pair', q{repeat('x', 100000)::varchar}, q{'plain'::regclass}, q{'$.a'::jsonpath}, q{'a b'::tsvector});
}

sub array_value
{
	my ($type) = @_;
	my $element = $type =~ s/\[\]$//r;
	my @values = $element eq 'text' ? (q{'request_id'}, q{'n'}, q{'amount'}, q{'id'}, q{'no'}, q{''}, q{'%s'}, 'NULL') : $element eq 'jsonb' ? (q{'1'}, q{'{"a": 1}'}, q{'null'}, 'NULL') : (1 .. 9, 1, 1, 99, -1, 'NULL');
	my $what = rand();
	return "'{}'::$type" if $what < 0.1;
	return "ARRAY[[" . pick(@values) . "],[" . pick(@values) . "]]::$type" if $what < 0.15;
	return "'[5:6]={" . ($element eq 'text' ? 'n,amount' : '1,2') . "}'::$type" if $what < 0.2;
	return "array_fill(" . pick(@values) . "::$element, ARRAY[5000])" if $what < 0.23;
	return 'ARRAY[' . join(', ', map { pick(@values) } 0 .. rand(3)) . "]::$type";
}
