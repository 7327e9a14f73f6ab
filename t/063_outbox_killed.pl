# Eight workers, who wait when they find nothing, and four emitters are killed at
# random and started again; then everything is counted.  A row of "delivered" is
# written in the transaction of its ack, so
#	a primary key error would be a double acknowledgement,
#	an event that is missing at the end would be lost,
#	and the events of a key stand in the order of their ids.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time sleep);

my $seconds = $ENV{IDEMPOTENCY_KILL_SECONDS} || 8;
my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', "shared_preload_libraries = 'idempotency'\nidempotency.outbox_max_attempts = 10000\n");
$node->start;
$node->safe_psql('postgres', q{
CREATE EXTENSION idempotency;
CREATE TABLE emitted (id bigint PRIMARY KEY, key text);
CREATE TABLE delivered (n bigserial, id bigint PRIMARY KEY, key text);
CREATE TABLE entity (key text PRIMARY KEY);
INSERT INTO entity SELECT 'key' || i FROM generate_series(0, 4) i;
CREATE PROCEDURE emitter() LANGUAGE plpgsql AS $$
DECLARE
  k text;
BEGIN
  LOOP
    -- the order of a key is that of its writers
    k := CASE WHEN random() < 0.7 THEN 'key' || floor(random() * 5) END;
    PERFORM FROM entity WHERE key = k FOR UPDATE;
    INSERT INTO emitted
    SELECT id, k FROM unnest(idempotency.emit_batch('t', ARRAY['1', '2']::jsonb[], ARRAY[k, k],
                                                    CASE WHEN random() < 0.1 THEN interval '20 ms' END)) id;
    IF random() < 0.2 THEN
      ROLLBACK;
    ELSE
      COMMIT;
    END IF;
    PERFORM pg_sleep(random() * 0.02);
    COMMIT;
  END LOOP;
END $$;
CREATE PROCEDURE worker() LANGUAGE plpgsql AS $$
DECLARE
  event record;
  taken boolean;
BEGIN
  LOOP
    taken := false;
    FOR event IN SELECT * FROM idempotency.take('t', 20, '300 ms') LOOP
      COMMIT;
      taken := true;
      IF random() < 0.05 THEN
        PERFORM idempotency.nack(event.id, event.attempt, '10 ms');
      ELSIF random() < 0.1 THEN
        PERFORM idempotency.extend_event(event.id, event.attempt, '400 ms');
        COMMIT;
        INSERT INTO delivered (id, key) SELECT event.id, event.key WHERE idempotency.ack(event.id, event.attempt);
      ELSE
        INSERT INTO delivered (id, key) SELECT event.id, event.key WHERE idempotency.ack(event.id, event.attempt);
      END IF;
      COMMIT;
    END LOOP;
    COMMIT;
    IF NOT taken THEN
      CALL idempotency.wait_for_events('t', '5 s');
    END IF;
  END LOOP;
END $$});

my %running;
sub launch
{
	my ($procedure) = @_;
	my $run = { procedure => $procedure, out => '' };
	$run->{handle} = IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('postgres'), '-c', "CALL $procedure()" ],
		'>', \$run->{out}, '2>', \$run->{out});
	$running{ $run->{handle} } = $run;
	return;
}

# pump_nb() dies of a process that has ended
sub alive
{
	my ($run) = @_;
	return eval { $run->{handle}->pump_nb; $run->{handle}->pumpable };
}

my $kills = 0;
my %errors;
sub restart_dead
{
	my ($until_gone) = @_;
	for my $run (values %running)
	{
		next if alive($run) && !$until_gone;
		eval { $run->{handle}->finish };
		delete $running{ $run->{handle} };
		$errors{$1}++ while $run->{out} =~ /ERROR:  (.*)/g;
		launch($run->{procedure}) unless $until_gone;
	}
	return;
}

launch('worker') for 1 .. 8;
launch('emitter') for 1 .. 4;
# on a slow machine longer
my $end = time + $seconds;
while (time < $end || $kills <= 20 && time < $end + 120)
{
	sleep 0.1;
	$kills += $node->safe_psql('postgres', q{
		SELECT count(pg_terminate_backend(pid)) FROM (
		  SELECT pid FROM pg_stat_activity WHERE query ~ 'CALL (worker|emitter)' AND pid <> pg_backend_pid()
		  ORDER BY random() LIMIT 2) a});
	restart_dead();
}
$node->safe_psql('postgres', q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'CALL emitter%'});
my $left = 'SELECT count(*) FROM idempotency.outbox';
for (1 .. 300)
{
	for my $run (values %running)
	{
		launch('worker') if !alive($run) && $run->{procedure} eq 'worker' && !$run->{again}++;
	}
	last if $node->safe_psql('postgres', $left) eq '0';
	sleep 0.1;
}
$node->safe_psql('postgres', q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'CALL %'});
restart_dead(1);

is($node->safe_psql('postgres', $left), '0', 'nothing is left');
cmp_ok($kills, '>', 20, "$kills times one was killed");
is(join("\n", sort keys %errors), '', 'no error');
is($node->safe_psql('postgres', 'SELECT count(*) > 300 FROM emitted'), 't', 'there was something to do');
is($node->safe_psql('postgres', 'SELECT count(*) FROM emitted FULL JOIN delivered USING (id) WHERE emitted.id IS NULL OR delivered.id IS NULL'), '0', 'every event once');
is($node->safe_psql('postgres', 'SELECT count(*) FROM (SELECT id < lag(id) OVER (PARTITION BY key ORDER BY n) AS wrong FROM delivered WHERE key IS NOT NULL) o WHERE wrong'), '0', 'the events of a key in order');
is($node->safe_psql('postgres', "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"), '0', 'no lock is left');
is($node->safe_psql('postgres', 'SELECT count(*) FROM idempotency.outbox_keys'), '0', 'and no key that is out');

$node->stop;
done_testing();
