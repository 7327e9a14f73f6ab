# What an operator sees of the calls: the counters, rolled back or not, on a
# standby too; which key an open transaction holds, and which one somebody waits
# for; keys found, freed and forgotten; what pg_monitor may see.  A backend that
# crashes while it counts harms nobody.  On a server without memory for it the
# views say so, and the calls are what they are elsewhere.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('primary');
$node->init(allows_streaming => 1);
$node->append_conf(
	'postgresql.conf', q{
shared_preload_libraries = 'idempotency'
max_prepared_transactions = 10
restart_after_crash = on
log_lock_waits = on
deadlock_timeout = '200 ms'
});
$node->start;

sub sql
{
	my ($sql, @as) = @_;
	return $node->safe_psql('postgres', $sql, @as ? (extra_params => [ '-U', @as ]) : ());
}

# the counters that are not 0, as function/outcome=calls
sub counted
{
	my ($in, $database) = @_;
	return ($in // $node)->safe_psql(
		$database // 'postgres',
		q{SELECT string_agg(function || '/' || outcome || '=' || calls, ' ' ORDER BY function, outcome)
		  FROM idempotency.activity WHERE calls > 0});
}

sql(q{
	CREATE EXTENSION idempotency;
	CREATE ROLE app LOGIN;
	CREATE ROLE watch LOGIN IN ROLE pg_monitor;
	CREATE ROLE ops LOGIN;
	SELECT idempotency.grant_usage('app');
	SELECT idempotency.grant_admin('ops');
	CREATE FUNCTION public.f(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'called' $$;
	CREATE FUNCTION public.broken(jsonb) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE division_by_zero; END $$;
	SELECT idempotency.define_machine('m', '{"initial": "A", "transitions": {"A": {"go": "B", "stay": "A"}, "B": ["C"]}}');
	CREATE TABLE ord (id int PRIMARY KEY, state text NOT NULL, version bigint NOT NULL DEFAULT 1, fence bigint);
	SELECT idempotency.attach_machine('ord', 'state', 'm');
	SELECT idempotency.attach_version('ord', 'version');
	SELECT idempotency.attach_fence('ord', 'fence');
	INSERT INTO ord VALUES (1, 'A'), (2, 'A');
});
is(counted(), '', 'nothing was called yet');

# every function and outcome once, and an error of each kind
my $calls = q{
	SELECT idempotency.run('s', 'run', 'f');
	SELECT idempotency.run('s', 'run', 'f');
	SELECT idempotency.run('s', 'broken', 'broken', record_errors => true);
	SELECT idempotency.once('s', 'once');
	SELECT idempotency.once('s', 'once');
	BEGIN;
	SELECT idempotency.claim('s', 'claim', '1');
	SELECT idempotency.claim('s', 'claim', '1');
	SELECT idempotency.complete('s', 'claim', 'x');
	SELECT idempotency.claim('s', 'claim', '2');
	SELECT idempotency.claim('s', 'claim', '1');
	SELECT idempotency.claim('s', 'fail');
	SELECT idempotency.fail('s', 'fail');
	SELECT idempotency.claim('s', 'release');
	SELECT idempotency.release('s', 'release');
	SELECT idempotency.release('s', 'release');
	COMMIT;
	SELECT idempotency.lookup('s', 'claim'), idempotency.lookup('s', 'nothing');
	SELECT idempotency.forget('s', 'fail');
	SELECT fence FROM idempotency.lease('s', 'lease', '1 h') \gset
	SELECT idempotency.lease('s', 'lease', '1 h');
	SELECT idempotency.extend('s', 'lease', :fence, '1 h');
	SELECT idempotency.checkpoint('s', 'lease', :fence, 'step');
	SELECT idempotency.release('s', 'lease', :fence);
	SELECT idempotency.acquire_lock('l', '1 h') AS fence \gset
	SELECT idempotency.acquire_lock('l', '1 h');
	SELECT idempotency.renew_lock('l', :fence, '1 h');
	SELECT idempotency.release_lock('l', :fence);
	SELECT created FROM idempotency.insert_once(NULL::ord, '{"id": 3, "state": "A"}');
	SELECT created FROM idempotency.insert_once(NULL::ord, '{"id": 3, "state": "A"}');
	BEGIN;
	SELECT idempotency.transition('ord', 1, 'A', 'B', jsonb_build_object('fence', 1));
	SELECT idempotency.fire('ord', 1, 'go', jsonb_build_object('fence', 1));
	SELECT idempotency.fire('ord', 9, 'go', jsonb_build_object('fence', 1));
	SELECT idempotency.update_if('ord', 1, 1, jsonb_build_object('fence', 1));
	ROLLBACK;
	SELECT idempotency.issue_token('me', 'pay') AS token \gset
	SELECT idempotency.check_token(:'token', 'me', 'pay');
	SELECT idempotency.consume_token(:'token', 'me', 'pay');
	SELECT idempotency.consume_token(:'token', 'me', 'pay');
	SELECT idempotency.consume_token('guess', 'me', 'pay');
	SELECT idempotency.revoke_token(:'token', 'me', 'pay');
	SELECT idempotency.revoke_tokens('me', 'pay');
	SELECT count(idempotency.emit('t', '1')) FROM generate_series(1, 3);
	SELECT id, attempt FROM idempotency.take('t', 1) \gset
	SELECT idempotency.ack(:id, :attempt), idempotency.ack(:id, :attempt);
	SELECT id, attempt FROM idempotency.take('t', 1) \gset
	SELECT idempotency.nack(:id, :attempt, '0');
	SELECT array_agg(id) AS ids, array_agg(attempt) AS attempts FROM idempotency.take('t') \gset
	SELECT idempotency.ack_batch(:'ids', :'attempts');
	SELECT count(*) FROM idempotency.take('t');
	SELECT idempotency.extend_event(1, 1, '1 s'), idempotency.retry_event(1), idempotency.discard_event(1);
	SELECT idempotency.once('s', 'short', '1 us');
	INSERT INTO idempotency.outbox_leases VALUES (0, 1, now() - interval '1 day', 1, 't');
	INSERT INTO idempotency.outbox_keys VALUES (1, 0, 't', 'k');
	SELECT idempotency.purge();
};
sql($calls);
my @expected = sort qw(
  run/completed=1 run/replayed=1 run/failed=1 once/claimed=2 once/completed=1
  claim/claimed=3 claim/held=1 claim/mismatch=1 claim/completed=1
  complete/completed=1 fail/failed=1 release/released=2 release/not_held=1
  lookup/found=1 lookup/absent=1 forget/forgotten=1 lease/claimed=1
  lease/in_progress=1 extend/extended=1 checkpoint/stored=1
  acquire_lock/claimed=1 acquire_lock/in_progress=1 renew_lock/extended=1
  release_lock/released=1 insert_once/created=1 insert_once/existing=1
  transition/applied=1 fire/already=1 fire/not_found=1 update_if/conflict=1
  issue_token/issued=1 check_token/valid=1 consume_token/consumed=1
  consume_token/used=1 consume_token/invalid=1 revoke_token/not_valid=1
  revoke_tokens/revoked=1 emit/emitted=3 take/taken=4 take/empty=1
  ack/acknowledged=3 ack/superseded=1 nack/given_back=1
  extend_event/late=1 retry_event/not_parked=1 discard_event/not_parked=1 purge/keys=1 purge/outbox=2);
is(join(' ', sort split / /, counted()), "@expected", 'each outcome is counted, of what was rolled back too');

sql(q{SELECT idempotency.reset_activity()}, 'ops');
is(counted(), '', 'reset');
for my $bad (
	[ 1, q{BEGIN; SELECT idempotency.claim('s', 'open'); COMMIT} ],
	[ 2, q{UPDATE ord SET fence = 1 WHERE id = 1; UPDATE ord SET fence = 0 WHERE id = 1} ],
	[ 3, q{UPDATE ord SET fence = 1, state = 'C' WHERE id = 1} ],
	[ 4, q{UPDATE ord SET fence = 1, version = 9 WHERE id = 1} ],
	[ 5, q{CREATE FUNCTION other() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.state := 'A'; RETURN NEW; END $$;
		   CREATE TRIGGER other BEFORE UPDATE ON ord FOR EACH ROW EXECUTE FUNCTION other();
		   SELECT idempotency.transition('ord', 2, 'A', 'B', jsonb_build_object('fence', 1))} ],
	[ 6, q{SELECT idempotency.complete('s', 'no claim')} ],
	[ 7, q{SELECT idempotency.transition('pg_class', '1', 'A', 'B')} ])
{
	my ($number, $sql) = @$bad;
	$node->psql('postgres', $sql);
	like(counted(), qr{error/IK00$number=1}, "IK00$number is counted, in a session that does nothing else");
}
sql('DROP TRIGGER other ON ord');

# which key: held, waited for, stored, in a savepoint, leased, prepared
my $in_flight = q{SELECT mode || ' ' || coalesce(scope, '-') || ' ' || coalesce(key, '-') || ' ' || coalesce(array_length(waiting_pids, 1), 0)
	FROM idempotency.in_flight WHERE scope IS NULL OR scope <> 'idempotency.lock' ORDER BY 1};
my $holder = $node->background_psql('postgres', extra_params => [ '-U', 'app' ]);
my $rival = $node->background_psql('postgres', on_error_stop => 0, extra_params => [ '-U', 'app' ]);
$holder->query_safe(q{BEGIN; SELECT idempotency.claim('which', 'open'); SELECT idempotency.claim('which', 'stored')});
$holder->query_safe(q{SELECT idempotency.complete('which', 'stored'); SELECT idempotency.once('which', 'once')});
$holder->query_safe(q{SAVEPOINT a; SELECT idempotency.once('which', 'undone'); ROLLBACK TO a});
$holder->query_safe(q{SAVEPOINT b; SELECT idempotency.claim('which', 'inner'); SELECT idempotency.complete('which', 'inner'); RELEASE b});
$holder->query_safe(q{SELECT idempotency.claim('which', 'released'); SELECT idempotency.release('which', 'released')});
is(sql($in_flight, 'watch'), "transaction which inner 0\ntransaction which once 0\ntransaction which open 0\ntransaction which stored 0",
	'an open transaction shows its keys, the answer stored or not');

sub wait_and_see
{
	my ($key, $what) = @_;
	$rival->query_until(qr/waiting/, "\\echo waiting\nSELECT idempotency.claim('which', '$key');\n");
	ok($node->poll_query_until('postgres', "SELECT count(*) = 1 FROM idempotency.in_flight WHERE key = '$key' AND waiting_pids IS NOT NULL"),
		"$what shows who waits for it");
	is(sql("SELECT count(*) FROM idempotency.in_flight WHERE key = '$key'"), 1, 'once');
	sql('SELECT pg_cancel_backend(waiting_pids[1]) FROM idempotency.in_flight WHERE waiting_pids IS NOT NULL');
	$rival->query('SELECT 1');
	is(sql("SELECT count(*) FROM idempotency.in_flight WHERE waiting_pids IS NOT NULL"), 0, 'a wait that ended is not shown');
	return;
}
sql('SELECT idempotency.reset_activity()');
wait_and_see('open', 'a claim');
wait_and_see('stored', 'a stored answer');
like(counted(), qr{error/wait=2}, 'both waits were cancelled');
$holder->query_safe('ROLLBACK');
is(sql($in_flight), '', 'nothing is shown after the end');

# as long as it can come back, and once, however often it was taken
$holder->query_safe(q{BEGIN; SELECT idempotency.claim('which', 'again'); SELECT idempotency.claim('which', 'other')});
$holder->query_safe(q{SAVEPOINT a; SELECT idempotency.release('which', key) FROM unnest('{other, again}'::text[]) key});
$holder->query_safe(q{SELECT idempotency.claim('which', 'again'); SELECT idempotency.release('which', 'again'); ROLLBACK TO a});
is(sql($in_flight), "transaction which again 0\ntransaction which other 0", 'what was released in a savepoint that is undone');
$holder->query_safe(q{SELECT idempotency.release('which', 'again'); RELEASE a});
is(sql($in_flight), 'transaction which other 0', 'what was released, and is not the last');
$holder->query_safe(q{SELECT idempotency.claim('which', 'again'); SELECT fence FROM idempotency.lease('which', 'lease', '1 h') \gset
	SELECT idempotency.release('which', 'lease', :fence); SELECT idempotency.lease('which', 'lease', '1 h')});
is(sql($in_flight), "transaction which again 0\ntransaction which lease 0\ntransaction which other 0", 'what was taken twice');
$holder->query_safe('ROLLBACK');

# what a prepared transaction has written is known from a wait
sql(q{BEGIN; SELECT idempotency.once('which', 'prepared'); PREPARE TRANSACTION 'gid'});
is(sql($in_flight), 'transaction - - 0', 'a prepared transaction');
$rival->query_until(qr/waiting/, "\\echo waiting\nSELECT idempotency.claim('which', 'prepared');\n");
ok($node->poll_query_until('postgres', q{SELECT scope || key = 'whichprepared' AND prepared_gid = 'gid' AND array_length(waiting_pids, 1) = 1 FROM idempotency.in_flight}),
	'and its key once somebody waits for it');
# 19 has a line of its own before ours
$node->wait_for_log(qr/LOG: .*still waiting for ShareLock on transaction.*(?:\n.*){0,4}CONTEXT: .*(?:\n\t.*)?waiting for key "prepared" in scope "which"/);
pass('log_lock_waits names the key');
sql(q{COMMIT PREPARED 'gid'});
like($rival->query('SELECT 1'), qr/completed/, 'who then has the answer');
is(sql(q{SELECT calls || ' ' || (wait_time BETWEEN '0.2 s' AND '1 min') FROM idempotency.activity WHERE function = 'claim' AND outcome = 'waited'}),
	'1 true', 'the wait that led to an answer is counted, with its time');

# more keys than there is room for, and the longest
$holder->query_safe(q{BEGIN; SELECT count(idempotency.once(repeat('s', 256), repeat('k', 500) || i)) FROM generate_series(1, 200) i});
is(sql('SELECT count(*) BETWEEN 2 AND 10, count(DISTINCT length(key)) FROM idempotency.in_flight'), 't|1', 'of 200 long keys the first are shown');
$rival->query_until(qr/waiting/, "\\echo waiting\nSELECT idempotency.claim(repeat('s', 256), repeat('k', 500) || 200);\n");
ok($node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM idempotency.in_flight WHERE key LIKE '%k200' AND array_length(waiting_pids, 1) = 1}),
	'and the last one when somebody waits for it');
$holder->query_safe('ROLLBACK');
$rival->query('ROLLBACK');

# a lease until its transaction commits, then as a lease, that lapses
$holder->query_safe(q{BEGIN; SELECT idempotency.lease('which', 'lease', '1 s')});
is(sql($in_flight), 'transaction which lease 0', 'a lease that is not granted yet');
$holder->query_safe('COMMIT');
ok($node->poll_query_until('postgres', q{SELECT bool_and(lapsed) FROM idempotency.in_flight}), 'a lapsed lease says so');
is(sql(q{SELECT lapsed FROM idempotency.holder('which', 'lease')}), 't', 'to holder() too');

# freed by its fence, discarded; a lock likewise
my $fence = sql(q{SELECT fence FROM idempotency.lease('which', 'stuck', '1 d')});
my ($ret, $out, $err) = $node->psql('postgres', "SELECT idempotency.free_lease('which', 'stuck', $fence - 1)");
like($err, qr/superseded/, 'not by another fence');
is(sql(qq{SELECT idempotency.free_lease('which', 'stuck', $fence)}, 'ops'), 't', 'a lease is freed by its fence');
is(sql(qq{SELECT idempotency.free_lease('which', 'stuck', $fence)}, 'ops'), 'f', 'once');
is(sql(q{SELECT attempt FROM idempotency.lease('which', 'stuck', '1 d')}), 2, 'and the next attempt is the second');
is(sql(q{SELECT idempotency.free_lease(scope, key, fence, discard => true) FROM idempotency.in_flight WHERE key = 'stuck'}, 'ops'), 't', 'discarded');
is(sql(q{SELECT attempt FROM idempotency.lease('which', 'stuck', '1 d')}), 1, 'it begins anew');
sql(q{SELECT idempotency.acquire_lock('nightly', '1 d')});
is(sql(q{SELECT idempotency.free_lease(scope, key, fence) FROM idempotency.in_flight WHERE scope = 'idempotency.lock' AND key = 'nightly'}, 'ops'), 't', 'so is a lock');

# found by what is known of them, page after page
sql(q{
	SELECT count(idempotency.run('find:' || i % 3, i::text, 'broken', record_errors => true)) FROM generate_series(1, 3000) i;
	SELECT idempotency.run('find:0', 'good', 'f');
});
is(sql(q{SELECT string_agg(key, ' ') FROM idempotency.find_keys('find:0', 'completed')}, 'ops'), 'good', 'found by scope and status');
is(sql(q{SELECT count(*) FROM idempotency.find_keys(sqlstate => '22012', max => 5000)}), 3001, 'by the failure');
is(sql(q{SELECT count(*) FROM idempotency.find_keys(sqlstate => '22013')}), 0, 'by another');
is(sql(q{SELECT count(*) FROM idempotency.find_keys('find:0', older_than => '1 h')}), 0, 'by age');
is(sql(q{SELECT count(*) FROM idempotency.find_keys(status => 'in_progress') WHERE key = 'stuck' AND NOT lapsed}), 1, 'a lease');
# a call ends with a page: of no more rows than this
my $page_rows = sql('SHOW block_size') / 80;
my ($found, $page) = (0, 0);
for (my $calls = 0; defined $page && $calls < 1000; $calls++)
{
	($ret, $out, $err) = $node->psql('postgres', "SELECT key FROM idempotency.find_keys('find:1', max => 10, from_page => $page)");
	my @keys = split /\n/, $out;
	cmp_ok(scalar @keys, '<=', 10 + $page_rows, 'a bounded number') if $calls < 2;
	$found += @keys;
	($page) = $err =~ /from_page => (\d+)/;
}
is($found, 1000, 'all of them, call after call');

# a tenant's keys forgotten in bounded steps, but what is in work
my $lease = sql(q{SELECT fence FROM idempotency.lease('find:1', 'leased', '1 d')});
my ($forgotten, $kept, $steps, $most) = (0, 0, 0, 0);
for ($page = 0; $page ne '' && $steps < 1000; $steps++)
{
	(my $f, my $k, $page) = split /\|/, sql("SELECT * FROM idempotency.forget_scope('find:1', 100, $page)", 'ops'), -1;
	$forgotten += $f;
	$kept += $k;
	$most = $f if $f > $most;
}
is("$forgotten $kept", '1000 1', 'all but what is leased is forgotten');
cmp_ok($most, '<=', 100 + $page_rows, "in $steps steps");
is(sql(q{SELECT count(*) FROM idempotency.keys WHERE scope LIKE 'find:%'}), 2002, 'and nothing else');

# a call of purge() is bounded in pages where it finds nothing, or little
sql(q{
	INSERT INTO idempotency.keys (created_at, expires_at, status, key, scope, response)
	SELECT now(), now() + '1 day'::interval, 'c', i::text, 'large', repeat('x', current_setting('block_size')::int / 4 - 148) FROM generate_series(1, 24000) i;
	VACUUM idempotency.keys});
cmp_ok(sql(q{SELECT pg_relation_size('idempotency.keys') / current_setting('block_size')::int}), '>', 5000, 'a table of some pages');
my $plan = sql('EXPLAIN (ANALYZE, BUFFERS, FORMAT TEXT, COSTS OFF, TIMING OFF, SUMMARY OFF) SELECT idempotency.purge(1)');
my ($hit, $read) = map { $plan =~ /Buffers: shared.* $_=(\d+)/ ? $1 : 0 } qw(hit read);
cmp_ok($hit + $read, '<', 4096 + 400, 'a call of purge() looks at so many of them') or diag $plan;
cmp_ok($hit + $read, '>', 4000, 'and at no fewer');
sql(q{DELETE FROM idempotency.keys WHERE scope = 'large'});
# once no other session's snapshot, say an ANALYZE, keeps what was deleted
for (1 .. 600)
{
	sql('VACUUM FULL idempotency.keys');
	last if sql(q{SELECT pg_relation_size('idempotency.keys') / current_setting('block_size')::int}) < 300;
	select undef, undef, undef, 0.1;
}

# what has a row per tenant, in short
is(sql(q{SELECT string_agg(concat_ws(' ', scope, status, keys), ', ' ORDER BY scope, status) FROM idempotency.key_stats('scope', 1) WHERE scope LIKE 'find%'}), 'find:0 completed 1, find:0 failed 1000', 'the largest scope');
is(sql(q{SELECT string_agg(concat_ws(' ', status, keys), ', ' ORDER BY status) FROM idempotency.key_stats('prefix') WHERE scope = 'find'}), 'completed 1, failed 2000, in_progress 1', 'by prefix');
is(sql(q{SELECT count(*) = count(DISTINCT status) FROM idempotency.key_stats('total')}), 't', 'in total');

# pg_monitor sees and does not touch; PUBLIC sees nothing
for my $view (qw(activity stats topics in_flight parked_events purge_rounds machines attachments key_stats()))
{
	like(sql("SELECT count(*) FROM idempotency.$view", 'watch'), qr/^\d+$/, "pg_monitor reads $view");
	my ($ret, $out, $err) = $node->psql('postgres', "SELECT count(*) FROM idempotency.$view", extra_params => [ '-U', 'app' ]);
	like($err, qr/permission denied/, "an application does not read $view");
}
for my $call ('reset_activity()', 'purge()', q{forget('s', 'once')}, q{forget_scope('s')}, 'find_keys()', q{free_lease('s', 's', 1)}, q{claim('s', 'x')})
{
	for my $role ('watch', $call =~ /claim/ ? () : 'app')
	{
		my ($ret, $out, $err) = $node->psql('postgres', "SELECT idempotency.$call", extra_params => [ '-U', $role ]);
		like($err, qr/permission denied/, "$role cannot call $call");
	}
}
is(sql(q{SELECT string_agg(concat_ws(' ', rel, column_name, kind, machine, history, enabled), ', ' ORDER BY kind) FROM idempotency.attachments}, 'watch'),
	'ord fence fence t, ord state machine m f t, ord version version t', 'what is attached where');

# what may happen to a row next, as far as the caller sees the row
is(sql(q{SELECT string_agg(concat_ws(' ', event, to_state), ', ') FROM idempotency.next_events('ord', 1)}), 'go B, stay A', 'the events that may fire');
is(sql(q{SELECT count(*) FROM idempotency.next_events('ord', 77)}), 0, 'none for no row');

# a backend that is killed takes the counters with it, and nothing else
$holder->query_safe(q{BEGIN; SELECT idempotency.claim('which', 'crash')});
$rival->query_until(qr/waiting/, "\\echo waiting\nSELECT idempotency.claim('which', 'crash');\n");
ok($node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM idempotency.in_flight WHERE key = 'crash' AND waiting_pids IS NOT NULL}), 'a wait');
my $pid = sql(q{SELECT waiting_pids[1] FROM idempotency.in_flight WHERE key = 'crash'});
kill 'KILL', $pid;
# one that is not let in yet may be gone before it is asked
for (1 .. 100) { last if eval { $node->poll_query_until('postgres', 'SELECT 1', '1') } }
ok($node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM idempotency.in_flight WHERE key = 'crash'}), 'the server is back');
eval { $holder->quit; };
eval { $rival->quit; };
sql(q{SELECT idempotency.once('after', 'crash')});
is(counted(), 'once/claimed=1', 'and counts from 0');

# a standby counts what it is asked, by itself
$node->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'backup', has_streaming => 1);
$standby->start;
$standby->safe_psql('postgres', q{SELECT idempotency.claim('after', 'crash'); SELECT idempotency.lookup('after', 'crash')});
is(counted($standby), 'claim/completed=1 lookup/found=1', 'a standby counts');
is($standby->safe_psql('postgres', 'SELECT count(*) FROM idempotency.in_flight'), 3, 'and shows the leases');
$standby->stop;

# databases have their own; one that was dropped makes room for another
sql('CREATE DATABASE other');
$node->safe_psql('other', q{CREATE EXTENSION idempotency; SELECT idempotency.once('s', 'k')});
is(counted($node, 'other'), 'once/claimed=1', 'another database has counters of its own');
sql('DROP DATABASE other');
for my $i (1 .. 64)
{
	sql("CREATE DATABASE d TEMPLATE template0");
	$node->safe_psql('d', "CREATE EXTENSION idempotency; SELECT idempotency.once('s', 'k')");
	my $counted = counted($node, 'd');
	sql('DROP DATABASE d');
	next if $counted eq 'once/claimed=1' && $i < 64;
	is($counted, 'once/claimed=1', "database $i, after so many that were dropped");
	last;
}

# not preloaded: from 17 on it is all the same, before the view says why not
$node->adjust_conf('postgresql.conf', 'shared_preload_libraries', undef);
$node->restart;
my $major = int($node->safe_psql('postgres', 'SHOW server_version_num') / 10000);
$holder = $node->background_psql('postgres');
$holder->query_safe(q{BEGIN; SELECT idempotency.once('plain', 'k'); SELECT idempotency.claim('plain', 'open')});
if ($major >= 17)
{
	is(counted(), 'claim/claimed=1 once/claimed=1', 'counted without a preload');
	is(sql($in_flight), "lease find:1 leased 0\nlease which lease 0\nlease which stuck 0\ntransaction plain k 0\ntransaction plain open 0", 'and the keys are shown');
}
else
{
	is(sql(q{SELECT function, outcome, calls IS NULL FROM idempotency.activity}),
		'off|the library is not in shared_preload_libraries, or has been only since the server\'s last start|t',
		'the view says why nothing is counted');
	is(sql(q{SELECT mode, scope, pid IS NOT NULL FROM idempotency.in_flight WHERE mode = 'transaction'}), 'transaction||t', 'a transaction is shown by its lock');
	is(sql('SELECT idempotency.reset_activity()'), 'f', 'there is nothing to reset');
	is(sql('SELECT count(*) FROM idempotency.purge_rounds'), 0, 'nor any round');
}
$holder->query_safe(q{SELECT idempotency.complete('plain', 'open'); COMMIT});
$holder->quit;

# another version of the library has made the segment: calls are what they are,
# and the view says why nothing is counted
SKIP:
{
	skip 'a library of that kind is for 17 and later', 5 if $major < 17;
	my $other = $node->basedir . '/other';
	append_to_file("$other.c", q{
#include "postgres.h"
#include "fmgr.h"
#include "base/compat.h"
#include "storage/dsm_registry.h"
PG_MODULE_MAGIC;
PG_FUNCTION_INFO_V1(other_version);
static void clear(COMPAT_SEGMENT_INIT_PARAMETERS) { memset(ptr, 0, 4096); }
Datum other_version(PG_FUNCTION_ARGS)
{
	bool found;
	compat_named_segment("idempotency", 4096, clear, &found);
	PG_RETURN_BOOL(found);
}
});
	chomp(my $include = `pg_config --includedir-server`);
	my @build = (($ENV{CC} // 'cc'), '-shared', '-fPIC', "-I$include", '-Isrc', '-o', "$other.so", "$other.c");
	skip "no compiler to make one: @build", 5 if system(@build) != 0;
	$node->restart;
	sql("CREATE FUNCTION other_version() RETURNS boolean LANGUAGE c AS '$other.so'");
	is(sql('SELECT other_version()'), 'f', 'another version has made the segment');
	is(sql(q{
		BEGIN;
		SAVEPOINT a;
		SELECT status FROM idempotency.claim('other', 'k');
		SELECT idempotency.complete('other', 'k', 'done') IS NULL;
		RELEASE a;
		COMMIT;
		SELECT status, response FROM idempotency.lookup('other', 'k')}) =~ s/\n[tf]\n/ /r, 'claimed completed|done', 'calls are what they are');
	like(sql('SELECT function, outcome FROM idempotency.activity'), qr/^off\|.*another version of the library.*: requested DSM segment size/, 'the view says why nothing is counted');
	# which writes over what the transaction had in memory that found out
	my $deep = join ' ', 'BEGIN;', ('SAVEPOINT s;') x 200, 'COMMIT;';
	like(sql("SELECT FROM idempotency.once('other', 'k1');\n$deep\nSELECT outcome FROM idempotency.activity"),
		qr/^no shared memory could be had, or another version of the library.*: requested DSM segment size/, 'also in a session that found out some transactions ago');
	is(sql(q{SELECT count(*) FROM idempotency.in_flight WHERE scope = 'other'}), 0, 'and the others answer');
}
done_testing();
