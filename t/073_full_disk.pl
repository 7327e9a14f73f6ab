# The disk is full: first that of the tables, then that of the WAL, which takes
# the server down.  A payment that finds no room is not made and leaves nothing
# behind, one whose answer is stored is replayed meanwhile, and once there is
# room again every retry gets its answer.
#
# The disks are small ones in memory, in a mount namespace of the server's own;
# where that cannot be made, the test is skipped.
use strict;
use warnings;

use IPC::Open2;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# a shell in that namespace: all that it starts sees the disks
my ($said, $to_shell);
my $shell = open2($said, $to_shell, $> == 0 ? 'exec unshare --mount sh 2>&1' : 'exec unshare --user --map-current-user --keep-caps --mount sh 2>&1');
$to_shell->autoflush(1);
$SIG{PIPE} = 'IGNORE';

my $node = PostgreSQL::Test::Cluster->new('full');
$node->init(extra => ['--wal-segsize=1']);
my ($data, $base) = ($node->data_dir, $node->basedir);
mkdir "$base/$_" or die $! for 'tables', 'wal';
my ($mounted, $why) = in_namespace("mount -t tmpfs -o size=6m,mode=700 tmpfs $base/tables && mount -t tmpfs -o size=24m,mode=700 tmpfs $base/wal");
if (!$mounted)
{
	chomp $why;
	plan skip_all => 'cannot mount a disk that is small enough to fill: ' . ($why || 'no mount namespace');
}
$node->append_conf('postgresql.conf', q{
restart_after_crash = off
autovacuum = off
min_wal_size = 2MB
max_wal_size = 4MB
log_min_messages = fatal
log_min_error_statement = panic
log_statement = none
});
must("cp -a $data/pg_wal/. $base/wal && rm -r $data/pg_wal && ln -s $base/wal $data/pg_wal");
# to be given back later
must("dd if=/dev/zero of=$base/tables/filler bs=1M count=2");
start();
must("mkdir $base/tables/space");
$node->safe_psql('postgres', "CREATE TABLESPACE small LOCATION '$base/tables/space'");
$node->safe_psql('postgres', q{
CREATE EXTENSION idempotency;
ALTER TABLE idempotency.keys SET TABLESPACE small;
ALTER INDEX idempotency.keys_pkey SET TABLESPACE small;
CREATE TABLE payment (key text, answer text) TABLESPACE small;
ALTER TABLE payment ALTER answer SET STORAGE EXTERNAL;
-- 48 kB that cannot be compressed much
CREATE FUNCTION pay(request jsonb) RETURNS text LANGUAGE sql AS $$
  INSERT INTO payment SELECT request ->> 'key', string_agg(sha512(random()::text::bytea)::text, '') FROM generate_series(1, 400) RETURNING answer
$$;
-- little for the tables, much for the WAL
CREATE FUNCTION pay_little(request jsonb) RETURNS text LANGUAGE sql AS $$
  SELECT pg_logical_emit_message(true, 'fill', repeat('x', 300000));
  INSERT INTO payment VALUES (request ->> 'key', random()::text) RETURNING answer
$$;
});

# ------------------------------------------------------------ the tables' disk
my (%answer, $key, $state);
for ($key = 1; $key < 1000; $key++)
{
	$state = pay($key);
	last if $state ne '00000';
}
is($state, '53100', "payment $key finds no room");
recount('with the disk full');
is(pay($key), '53100', 'nor does its retry');
is(pay(1), '00000', 'what is stored is replayed');
recount('still');
must("rm $base/tables/filler");
is(pay($key), '00000', 'with room, the retry pays');
is(pay($key), '00000', 'and is replayed');
recount('with room');

# -------------------------------------------------------------- the WAL's disk
in_namespace("dd if=/dev/zero of=$base/wal/filler bs=64k");
for ($key++; $key < 1000; $key++)
{
	$state = pay($key, 'pay_little');
	last if $state ne '00000';
}
is($state, 'gone', "payment $key takes the server down");
must("rm $base/wal/filler");
must("pg_ctl -D $data -w stop || true");
start();
recount('after the crash', $key);
is(pay($key, 'pay_little'), '00000', 'the retry gets its answer');
is(pay(1), '00000', 'the first payment is still replayed');
recount('at the end');
is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'}), '0', 'no lock is left');

must("pg_ctl -D $data -w -m fast stop");
$node->{_pid} = undef;
like(slurp_file($node->logfile), qr/PANIC:.*No space left on device/, 'it was the WAL that had no room');
close $to_shell;
done_testing();

# One payment in a session of its own: its SQLSTATE.  An answer that was got
# before must be the same again.
sub pay
{
	my ($key, $function) = (@_, 'pay');
	my ($out, $err);
	$node->psql('postgres', qq{SELECT md5(response) FROM idempotency.run('pay', '$key', '$function', '{"key": "$key"}')},
		stdout => \$out, stderr => \$err, extra_params => [ '-v', 'VERBOSITY=sqlstate' ]);
	return $1 if $err =~ /ERROR: +(\w{5})/;
	return 'gone' if $out !~ /^\w{32}$/;
	is($out, $answer{$key}, "payment $key is replayed") if $answer{$key};
	$answer{$key} = $out;
	return '00000';
}

# The payments are those that were answered, and if its answer was lost $maybe.
sub recount
{
	my ($when, $maybe) = @_;
	my %stored = map { split /\|/ } split /\n/, $node->safe_psql('postgres',
		q{SELECT p.key, md5(k.response) FROM payment p JOIN idempotency.keys k ON k.key = p.key AND k.response = p.answer});
	$answer{$maybe} //= $stored{$maybe} if defined $maybe && $stored{$maybe};
	is_deeply(\%stored, \%answer, scalar(keys %answer) . " payments, keys and answers $when");
	is($node->safe_psql('postgres', 'SELECT (SELECT count(*) FROM payment), (SELECT count(*) FROM idempotency.keys)'),
		scalar(keys %answer) . '|' . scalar(keys %answer), "and no more $when");
	return;
}

sub start
{
	must("pg_ctl -D $data -l " . $node->logfile . ' -w start');
	$node->_update_pid(1);
	return;
}

# Run a command in the namespace: did it succeed, and what did it say?
sub in_namespace
{
	my ($command) = @_;
	my $out = '';
	print $to_shell "( $command ) </dev/null >$base/out 2>&1; echo \"\@\@ \$?\"\n";
	while (defined(my $line = readline $said))
	{
		return ($1 == 0, slurp_file("$base/out")) if $line =~ /^\@\@ (\d+)$/;
		$out .= $line;
	}
	return (0, $out);
}

sub must
{
	my ($command) = @_;
	my ($done, $out) = in_namespace($command);
	die "$command: $out" unless $done;
	return;
}
