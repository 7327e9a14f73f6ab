# In company: pg_stat_statements and auto_explain, which look at every plan and
# every call, nested ones too.  The answers are the same as without them, and
# neither of them shows an error, or counts a query that nobody sent.
use strict;
use warnings;

use File::Basename qw(dirname);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('company');
plan skip_all => 'pg_stat_statements or auto_explain is not installed'
  if grep { !-e $node->config_data('--pkglibdir') . "/$_.so" } qw(pg_stat_statements auto_explain);
$node->init;
$node->append_conf('postgresql.conf', q{
shared_preload_libraries = 'pg_stat_statements, auto_explain, idempotency'
pg_stat_statements.track = all
pg_stat_statements.track_utility = on
pg_stat_statements.track_planning = on
auto_explain.log_min_duration = 0
auto_explain.log_analyze = on
auto_explain.log_buffers = on
auto_explain.log_wal = on
auto_explain.log_triggers = on
auto_explain.log_verbose = on
auto_explain.log_nested_statements = on
auto_explain.log_format = json
compute_query_id = on
track_functions = all
});
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION pg_stat_statements;
	CREATE EXTENSION idempotency;
	CREATE TABLE payment (id bigserial PRIMARY KEY, request_id text UNIQUE, amount integer);
	CREATE TABLE audit (what text);
	CREATE FUNCTION pay(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
	  INSERT INTO audit VALUES (request ->> 'what');
	  RETURN 'paid ' || (request ->> 'what');
	END $$;
	CREATE FUNCTION fail(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
	  INSERT INTO audit VALUES ('undone');
	  RAISE EXCEPTION 'no funds';
	END $$;
	CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
	  IF NEW.amount < 0 THEN RETURN NULL; END IF;
	  RETURN NEW;
	END $$;
	CREATE TRIGGER swallow BEFORE INSERT ON payment FOR EACH ROW EXECUTE FUNCTION swallow();
	CREATE TABLE ord (id text PRIMARY KEY, state text DEFAULT 'A', version bigint NOT NULL DEFAULT 1, note text);
	SELECT idempotency.define_machine('ord', '{"initial": "A", "transitions": {"A": {"go": "B"}, "B": {"go": "C"}, "C": ["D"]}}');
	SELECT idempotency.attach_machine('ord', 'state', 'ord', history => true), idempotency.attach_version('ord', 'version');
	INSERT INTO ord VALUES ('o1');
	SELECT pg_stat_statements_reset();
});
my $log = -s $node->logfile;

my $script = q{
	SELECT status, response FROM idempotency.claim('company', 'k1');
	SELECT idempotency.complete('company', 'k1', 'first') > now();
};
is(psql("BEGIN; $script COMMIT"), "claimed|\nt", 'claim and complete');
is(psql(q{SELECT status, response FROM idempotency.claim('company', 'k1')}), 'completed|first', 'replay');
for my $replayed ('f', 't')
{
	is(psql(q{SELECT status, replayed, response FROM idempotency.run('company', 'k2', 'pay', '{"what": "it"}')}),
		"completed|$replayed|paid it", "run(), replayed: $replayed");
	is(psql(q{SELECT status, replayed, meta ->> 'message' FROM idempotency.run('company', 'k3', 'fail', record_errors => true)}),
		"failed|$replayed|no funds", "run() of what fails, replayed: $replayed");
}
is(psql(q{SELECT idempotency.once('company', 'k4'), idempotency.once('company', 'k4')}), 't|f', 'once()');

# insert_once drives the executor itself, and reads its counters
my $insert = q{SELECT created, (stored).amount FROM idempotency.insert_once(NULL::payment, '{"request_id": "%s", "amount": %d}')};
is(psql(sprintf $insert, 'i1', 1), 't|1', 'insert_once creates');
is(psql(sprintf $insert, 'i1', 2), 'f|1', 'and finds');
is(psql(sprintf $insert, 'i2', -1), 'f|', 'a trigger that swallows is told');
is(psql('BEGIN ISOLATION LEVEL SERIALIZABLE; ' . sprintf($insert, 'i1', 3) . '; COMMIT'), 'f|1', 'from a conflict');

# the parameters of a guarded update, used or not, can be logged (auto_explain
# does from 16 on, pgaudit always)
is(psql(q{SELECT outcome FROM idempotency.transition('ord', 'o1', 'A', 'B')}), 'applied', 'transition()');
is(psql(q{SELECT outcome FROM idempotency.fire('ord', 'o1', 'go', '{"note": "gone"}')}), 'applied', 'fire()');
is(psql(q{SELECT outcome FROM idempotency.transition('ord', 'o1', NULL, 'D')}), 'applied', 'transition() from any state');
is(psql(q{SELECT outcome FROM idempotency.transition('ord', 'o2', NULL, 'D')}), 'not_found', 'and of no row');
is(psql(q{SELECT outcome, version FROM idempotency.update_if('ord', 'o1', 4, NULL)}), 'applied|5', 'update_if()');

is(psql('SELECT what, count(*) FROM audit GROUP BY what'), 'it|1', 'the work was done once');

# what they saw
my $seen = slurp_file($node->logfile, $log);
unlike($seen, qr/\b(?:ERROR|WARNING|FATAL|PANIC):/, 'nothing in the log but plans');
like($seen, qr/"Query Text": "INSERT INTO public\.payment AS t.*?"Conflicting Tuples": 1/s, 'auto_explain shows the conflict of insert_once');
is(psql(q{SELECT sum(calls) FROM pg_stat_statements WHERE query LIKE 'INSERT INTO public.payment AS t%'}), '3', 'pg_stat_statements counts its INSERTs: two, and the one under SERIALIZABLE');
is(psql(q{SELECT sum(rows) FROM pg_stat_statements WHERE query LIKE 'INSERT INTO public.payment AS t%'}), '1', 'and the row they made');
is(psql(q{SELECT count(*) FROM pg_stat_statements WHERE query ~ 'idempotency\.keys' AND query !~ 'pg_stat_statements'}), '0', 'keys need no query of their own');
is(psql(q{SELECT calls FROM pg_stat_user_functions WHERE funcname = 'pay'}), '1', 'track_functions counts what run() calls');

# who asks which libraries are loaded, learns ours by name and version
SKIP:
{
	skip 'PostgreSQL before 18 knows no names of libraries', 1 if $node->pg_version < 18;
	my ($version) = slurp_file(dirname(__FILE__) . '/../META.json') =~ /^  "version": "(.*)"/m;
	is(psql(q{SELECT module_name, version FROM pg_get_loaded_modules() WHERE file_name LIKE 'idempotency%'}), "idempotency|$version", 'the library tells its version');
}

$node->stop;
done_testing();

sub psql { return $node->safe_psql('postgres', $_[0]); }
