
# The recipes of README.md and doc/tasks.md lose nothing and do nothing twice.
#
# A recipe is a list of steps.  Its client dies after none of them, after one,
# after two and so on: the server crashes at each of these places, with a session
# of every recipe there.  Then each is tried anew from the beginning, as its
# caller, its queue or its next worker would do.  From every place, in the end
# its effect is there once, and its answer is the first one.
#
# Then what comes out of order: too early, or too late.
#
# The tables and functions are those of the pages, whose SQL is run first.

use strict;
use warnings;

use File::Basename qw(dirname);
use IPC::Run qw(pump run start);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('recipes');
$node->init;
$node->start;
for my $page ('README.md', 'doc/tasks.md')
{
	answers(join "\n", slurp_file(dirname(__FILE__) . "/../$page") =~ /^```sql\n(.*?)^```/gms);
}

# What is outside: it commits at once, and knows the key that it was given.
$node->safe_psql('postgres', q{
	CREATE TABLE bank (key text PRIMARY KEY, calls integer NOT NULL DEFAULT 1);
	CREATE TABLE mailer (key text PRIMARY KEY, calls integer NOT NULL DEFAULT 1);
	CREATE TABLE acknowledged (id text);
});

# Each is given a key of its own in :key, and what "setup" returns in :id.  A step
# under "if" is for the one whose last \gset has made :mine true.
sub if_mine { return "\\if :mine\n$_[0]\n\\endif"; }

my %recipe = (
	'create an order' => {
		steps => [
			'BEGIN;',
			q{SELECT status = 'claimed' AS mine FROM idempotency.claim('create', :'key', '{"item": "x"}', wait => '5 s') \gset},
			if_mine(q{INSERT INTO orders (item) VALUES (:'key');}),
			if_mine(q{SELECT idempotency.complete('create', :'key', 'created');}),
			'COMMIT;'
		],
		check => q{SELECT count(*), (idempotency.lookup('create', :'key')).response FROM orders WHERE item = :'key'},
		is => '1|created'
	},
	'a failure is remembered' => {
		steps => [
			'BEGIN;',
			q{SELECT status = 'claimed' AS mine FROM idempotency.claim('create', :'key') \gset},
			if_mine(q{SAVEPOINT work; INSERT INTO orders (item) VALUES (:'key');}),
			if_mine('ROLLBACK TO work;'),
			if_mine(q{SELECT idempotency.fail('create', :'key', 'out of stock');}),
			'COMMIT;'
		],
		check => q{SELECT count(*), (idempotency.lookup('create', :'key')).status FROM orders WHERE item = :'key'},
		is => '0|failed'
	},
	'pay it once' => {
		setup => q{INSERT INTO orders (item) VALUES ('lamp') RETURNING id},
		steps => [
			'BEGIN;',
			q{SELECT FROM idempotency.run('pay', :'key', 'pay_order', jsonb_build_object('order', :'id', 'amount', 9), wait => '5 s');},
			'COMMIT;'
		],
		check => q{SELECT count(*), (idempotency.lookup('pay', :'key')).response FROM payment WHERE order_no = :'id'},
		is => '1|{"outcome": "applied"}'
	},
	'a payment callback' => {
		setup => q{INSERT INTO orders (item) VALUES ('vase') RETURNING id \gset
			SELECT FROM idempotency.fire('orders', :id, 'pay');
			SELECT :id},
		steps => [
			'BEGIN;',
			q{SELECT FROM idempotency.run('provider', :'key', 'on_refund', jsonb_build_object('order', :'id'), wait => '5 s');},
			'COMMIT;'
		],
		check => q{SELECT count(*), (idempotency.lookup('provider', :'key')).response FROM idempotency.transition_log WHERE row_id = :'id' AND to_state = 'REFUNDED'},
		is => '1|applied'
	},
	'consume a queue' => {
		setup => q{INSERT INTO stock VALUES (:'key', 10) RETURNING item},
		steps => [
			'BEGIN;',
			q{SELECT on_message(:'key', jsonb_build_object('item', :'id', 'sold', 3));},
			'COMMIT;',
			q{INSERT INTO acknowledged VALUES (:'key');}
		],
		check => q{SELECT quantity, EXISTS (SELECT FROM acknowledged WHERE id = :'key') FROM stock WHERE item = :'id'},
		is => '7|t'
	},
	'call an outside service' => {
		steps => [
			q{SELECT status = 'claimed' AS mine, checkpoint IS NULL AS call, fence FROM idempotency.lease('bank', :'key', '1 s') \gset},
			if_mine(q{SELECT idempotency.checkpoint('bank', :'key', :fence, 'charging');}),
			if_mine(q{\if :call
				\else
				SELECT NOT EXISTS (SELECT FROM bank WHERE key = :'key') AS call \gset
				\endif
				\if :call
				INSERT INTO bank (key) VALUES (:'key') ON CONFLICT (key) DO UPDATE SET calls = bank.calls + 1;
				\endif}),
			'BEGIN;',
			if_mine(q{INSERT INTO payment (order_no, amount) VALUES (:'key', 25);}),
			if_mine(q{SELECT idempotency.complete('bank', :'key', 'paid', NULL, :fence);}),
			'COMMIT;'
		],
		check => q{SELECT (SELECT calls FROM bank WHERE key = :'key'), count(*), (idempotency.lookup('bank', :'key')).response FROM payment WHERE order_no = :'key'},
		is => '1|1|paid'
	},
	'a distributed lock' => {
		setup => q{INSERT INTO report_file SELECT max(id) + 1, 'empty', 0 FROM report_file RETURNING id},
		steps => [
			q{SELECT idempotency.acquire_lock(:'key', '1 s') AS fence \gset},
			q{UPDATE report_file SET body = 'new', fence = :fence WHERE id = :id;},
			q{SELECT idempotency.release_lock(:'key', :fence);}
		],
		check => q{SELECT body, (SELECT count(*) FROM idempotency.in_flight WHERE key = :'key') FROM report_file WHERE id = :id},
		is => 'new|0'
	},
	'a form without a key' => {
		setup => q{SELECT idempotency.issue_token(:'key', 'report form')},
		steps => [
			'BEGIN;',
			q{SELECT status = 'consumed' AS mine FROM idempotency.consume_token(:'id', :'key', 'report form', wait => '5 s') \gset},
			if_mine(q{INSERT INTO report (user_id) VALUES (:'key');}),
			'COMMIT;'
		],
		check => q{SELECT count(*), (idempotency.check_token(:'id', :'key', 'report form')).status FROM report WHERE user_id = :'key'},
		is => '1|used'
	},
	q{a form's first answer} => {
		setup => q{SELECT idempotency.issue_token(:'key', 'report form')},
		steps => [
			'BEGIN;',
			q{SELECT FROM submit_report(:'id', :'key', '2026-10');},
			'COMMIT;'
		],
		check => q{SELECT count(*), (submit_report(:'id', :'key', '2026-10')).response = 'report ' || min(id) FROM report WHERE user_id = :'key'},
		is => '1|t'
	},
	'one mail' => {
		setup => q{SELECT idempotency.emit(:'key', '{}', key => 'order')},
		steps => [
			q{SELECT count(*) = 1 AS mine, max(id) AS event, max(attempt) AS attempt FROM idempotency.take(:'key', lease => '1 s') \gset},
			if_mine(q{INSERT INTO mailer (key) VALUES ('shop-mail-' || :event) ON CONFLICT (key) DO UPDATE SET calls = mailer.calls + 1;}),
			if_mine(q{SELECT idempotency.ack(:event, :attempt);})
		],
		check => q{SELECT count(*), (SELECT count(*) FROM idempotency.outbox WHERE id = :id) FROM mailer WHERE key = 'shop-mail-' || :id},
		is => '1|0'
	},
	'an edit, under a key' => {
		setup => q{INSERT INTO item SELECT max(id) + 1, 10 FROM item RETURNING id},
		steps => [
			'BEGIN;',
			q{SELECT status = 'claimed' AS mine FROM idempotency.claim('edit', :'key', wait => '5 s') \gset},
			if_mine(q{SELECT outcome FROM idempotency.update_if('item', :id, 1, '{"stock": 9}') \gset}),
			if_mine(q{SELECT idempotency.complete('edit', :'key', :'outcome'::text);}),
			'COMMIT;'
		],
		check => q{SELECT stock, version, (idempotency.lookup('edit', :'key')).response FROM item WHERE id = :id},
		is => '9|2|applied'
	},
	'look first' => {
		setup => q{INSERT INTO orders (item) VALUES ('desk') RETURNING id \gset
			SELECT FROM idempotency.fire('orders', :id, 'pay');
			SELECT :id},
		steps => [
			'BEGIN;',
			'SELECT status FROM orders WHERE id = :id FOR UPDATE;',
			q{SELECT outcome FROM idempotency.transition('orders', :id, 'PAID', 'REFUNDED');},
			'COMMIT;'
		],
		check => q{SELECT count(*) FROM idempotency.transition_log WHERE row_id = :'id' AND to_state = 'REFUNDED'},
		is => '1'
	},
	'insert once' => {
		steps => [
			'BEGIN;',
			q{SELECT created FROM idempotency.insert_once(NULL::invoice, jsonb_build_object('request_id', :'key'));},
			'COMMIT;'
		],
		check => q{SELECT count(*) FROM invoice WHERE request_id = :'key'},
		is => '1'
	});

# ------------------------------------------------------- dead at each step
my @recipes = sort keys %recipe;
my ($most) = sort { $b <=> $a } map { scalar @{ $_->{steps} } } values %recipe;
my %failed;
for my $done (0 .. $most)
{
	my @here = grep { $done <= @{ $recipe{$_}{steps} } } @recipes;
	my (%variables, @sessions);

	for my $name (@here)
	{
		my ($recipe, $key) = ($recipe{$name}, "$name $done");

		$variables{$name} = [ "key=$key", 'id=' . (defined $recipe->{setup} ? answers("$recipe->{setup};", "key=$key") : '') ];
		push @sessions, session_after($done, $name, @{ $variables{$name} });
	}
	$node->stop('immediate');
	$_->{psql}->finish for @sessions;
	$node->start;
	select undef, undef, undef, 1.1;	# the leases end
	for my $name (@here)
	{
		my ($recipe, @variables) = ($recipe{$name}, @{ $variables{$name} });

		answers(join("\n", @{ $recipe->{steps} }), @variables);
		my $got = answers("$recipe->{check};", @variables);
		push @{ $failed{$name} }, "after $done steps: $got" if $got ne $recipe->{is};
	}
}
is_deeply($failed{$_} // [], [], "$_: the client dies after each of its steps") for @recipes;

# --------------------------------------------- too early, too late, at once
my $sql = '';
for my $event ('refund', 'create', 'refund', 'pay', 'refund', 'refund')
{
	$sql .=
	    $event eq 'create' ? q{INSERT INTO orders (id, item) OVERRIDING SYSTEM VALUE VALUES (1000, 'early');}
	  : $event eq 'pay' ? q{SELECT FROM idempotency.fire('orders', 1000, 'pay');}
	  : q{SELECT status, replayed, response FROM idempotency.run('provider', 'early', 'on_refund', '{"order": 1000}');};
	$sql .= "\n";
}
is( answers($sql) =~ s/^CONTEXT.*\n//gmr, join("\n",
		('ERROR:  order 1000 cannot be refunded yet') x 2, 'completed|f|applied', 'completed|t|applied'),
	'a callback before its order and before its payment is not stored, and goes through in the end');
is( answers(q{
		INSERT INTO orders (id, item) OVERRIDING SYSTEM VALUE VALUES (1001, 'closed');
		SELECT FROM idempotency.fire('orders', 1001, 'close');
		SELECT status, response FROM idempotency.run('provider', 'never', 'on_refund', '{"order": 1001}');}),
	'completed|refused', 'one that can never be right is stored');
is( answers(q{
		SELECT on_message('early', '{"item": "early", "sold": 3}');
		INSERT INTO stock VALUES ('early', 10);
		SELECT on_message('early', '{"item": "early", "sold": 3}');
		SELECT quantity FROM stock WHERE item = 'early';}) =~ s/^CONTEXT.*\n//gmr,
	qq{ERROR:  no item "early" yet\ndone\n7}, 'a message before its item is done when it comes again');
is( answers(q{
		SELECT fence AS slow FROM idempotency.lease('bank', 'late', '1 s') \gset
		SELECT FROM idempotency.checkpoint('bank', 'late', :slow, 'charging');
		SELECT FROM pg_sleep(1.1);
		SELECT fence FROM idempotency.lease('bank', 'late', '30 s') \gset
		SELECT count(*) FROM bank WHERE key = 'late';	-- it asks, and the first call comes
		INSERT INTO bank (key) VALUES ('late');
		INSERT INTO bank (key) VALUES ('late') ON CONFLICT (key) DO UPDATE SET calls = bank.calls + 1;
		SELECT FROM idempotency.complete('bank', 'late', 'paid', NULL, :fence);
		SELECT FROM idempotency.complete('bank', 'late', 'paid', NULL, :slow);
		SELECT count(*), sum(calls) FROM bank WHERE key = 'late';}) =~ s/^(DETAIL|HINT).*\n//gmr,
	"0\nERROR:  fence has been superseded\n1|2", 'the bank is paid once when a first call comes after the question');
is( answers(q{
		SELECT idempotency.acquire_lock('late', '1 s') AS slow \gset
		SELECT FROM pg_sleep(1.1);
		SELECT idempotency.acquire_lock('late', '30 s') AS fence \gset
		INSERT INTO report_file VALUES (1000, 'empty', 0);
		UPDATE report_file SET body = 'new', fence = :fence WHERE id = 1000;
		UPDATE report_file SET body = 'late', fence = :slow WHERE id = 1000;
		SELECT body FROM report_file WHERE id = 1000;}) =~ s/^(DETAIL|HINT).*\n//gmr,
	"ERROR:  fence has been superseded\nnew", 'who has lost the lock writes nothing');
is( answers(q{
		SELECT FROM idempotency.emit('late', '{}');
		SELECT id, attempt AS slow FROM idempotency.take('late', lease => '1 s') \gset
		SELECT FROM pg_sleep(1.1);
		SELECT attempt FROM idempotency.take('late') \gset
		SELECT idempotency.ack(:id, :slow), idempotency.ack(:id, :attempt);}),
	'f|t', 'a slow mail worker acknowledges nothing');
is( answers(q{
		SELECT idempotency.issue_token('late', 'report form') AS token \gset
		SELECT FROM submit_report(:'token', 'late', '2026-10');
		SELECT status FROM submit_report(:'token', 'late', '2026-11');
		SELECT month FROM report WHERE user_id = 'late';}),
	"mismatch\n2026-10", 'a form that was edited is not taken for its first sending');

$node->stop;
done_testing();

# answers(sql, variables...): what psql prints, errors too.
sub answers
{
	my ($sql, @variables) = @_;

	run [ 'psql', '-XAtq', '-d', $node->connstr('postgres'), map { ('-v', $_) } @variables ],
	  '<', \$sql, '>&', \my $printed;
	chomp $printed;
	return $printed;
}

# session_after(steps, recipe, variables...): a session that has come so far.
sub session_after
{
	my ($done, $name, @variables) = @_;
	my $session = { in => join("\n", @{ $recipe{$name}{steps} }[ 0 .. $done - 1 ], '\echo so far', ''), out => '' };
	my $timeout = IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default);

	$session->{psql} = start [ 'psql', '-XAtq', '-d', $node->connstr('postgres'), map { ('-v', $_) } @variables ],
	  '<', \$session->{in}, '>&', \$session->{out}, $timeout;
	pump $session->{psql} until $session->{out} =~ /^so far$/m;
	unlike($session->{out}, qr/ERROR/, "$name: $done steps");
	return $session;
}
