# A plan: what several sessions do, and in what order it is sent, as symbols
# ("the token issued third", "the newest fence of this session on key 2").  It
# depends on the seed alone.  Any part of a plan is a plan too, since a step that
# makes no sense where it is met is passed over; so a failing plan can be shrunk.
package Model::Plan;

use strict;
use warnings;

use Model::Hostile;

use constant {
	SESSIONS => 8,
	HOSTILE => 3,		# sessions that come after those (Hostile.pm)
	KEYS => 4,			# 2 is short-lived, 3 is sometimes forgotten
	LOCKS => 1,			# the names of locks follow those of the keys
	ROWS => 2
};

my %areas = (
	keys => \&keys_,
	leases => \&leases,
	machine => \&machine,
	versions => \&versions,
	tokens => \&tokens,
	outbox => \&outbox,
	items => \&items);

my ($calm, $keys, @areas);

# A plan of so many steps.  A step is {s => session, do => what, ...}; without
# s it is for the control session.  calm: wait a moment for its answer.
sub make
{
	my ($seed, $length) = @_;
	srand($seed);
	# few areas and few keys, so that the sessions meet; half of the plans are
	# played step by step, the others as fast as the sessions go
	@areas = sort keys %areas;
	my $some = pick(1, 1, 1, 2, 2, 3, 7);
	splice @areas, rand @areas, 1 while @areas > $some;
	$calm = rand() < 0.5;
	$keys = pick(1, 1, 2, 2, 3, KEYS);
	my $troubled = rand() < 0.6;

	my (@plan, @todo);
	while (@plan < $length)
	{
		if ($troubled && rand() < 0.02)
		{
			push @plan, { do => pick(qw(cancel cancel cancel cancel terminate)), victim => int rand SESSIONS + HOSTILE };
		}
		elsif (rand() < 0.02) { push @plan, { do => 'resolve', which => int rand 8, commit => rand() < 0.6 }; }
		elsif (rand() < 0.01) { push @plan, { do => 'purge' }; }
		elsif (rand() < 0.005) { push @plan, { do => pick(qw(insight insight redefine spare regrant reattach_machine reattach_version reattach_fence rotate retire)) }; }

		my $s = rand() < 0.22 ? SESSIONS + int rand HOSTILE : int rand SESSIONS;
		$todo[$s] = [ $s < SESSIONS ? transaction() : hostile_transaction() ] unless $todo[$s] && @{ $todo[$s] };
		push @plan, { s => $s, calm => $calm && rand() < 0.8, %{ shift @{ $todo[$s] } } };
	}
	return \@plan;
}

sub pick { return $_[ rand @_ ]; }

sub transaction
{
	return action(1) if rand() < 0.35;
	my @steps = ({ do => 'begin', level => pick('READ COMMITTED', 'READ COMMITTED', 'READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE') });
	for (0 .. rand 4)
	{
		push @steps, { do => 'savepoint' } if rand() < 0.15;
		push @steps, action(0);
		push @steps, { do => pick(qw(rollback_to rollback_to release_savepoint)), depth => int rand 3 } if rand() < 0.2;
	}
	push @steps, { do => pick(('commit') x 7, 'rollback', 'rollback', 'prepare') };
	return @steps;
}

# What a hostile session does: it stays longer in its transactions, and does as
# the others do, or worse.
sub hostile_transaction
{
	return hostile_action(1) if rand() < 0.4;
	my @steps = ({ do => 'begin', level => pick('READ COMMITTED', 'READ COMMITTED', 'READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE') });
	for (0 .. rand 6)
	{
		my $apart = rand() < 0.7;
		push @steps, { do => 'savepoint' } if $apart;
		push @steps, hostile_action(0);
		push @steps, { do => pick(qw(rollback_to rollback_to release_savepoint)), depth => -1 } if $apart;
	}
	push @steps, { do => pick(qw(commit commit commit rollback prepare)) };
	return @steps;
}

sub hostile_action
{
	my ($alone) = @_;
	# what is an administrator's is among the attacks
	my @open = grep { /^(keys|leases|tokens|outbox)$/ } @areas;
	my @steps = @open && rand() < 0.4 ? grep { $_->{do} !~ /^(forget|retry_parked|guarded)$/ } $areas{ pick(@open) }->($alone) : ();
	return @steps if @steps;
	return { do => 'attack', what => pick(Model::Hostile::names()), r => [ map { int rand 2**31 } 1 .. 8 ] };
}

# One thing that a session does; alone: outside a transaction block.
sub action { return $areas{ pick(@areas) }->($_[0]); }

sub request { return pick(undef, undef, 0, 0, 1); }
sub wait_ { return pick(undef, undef, undef, '0', '5 ms'); }

sub keys_
{
	my ($alone) = @_;
	my %key = (key => int rand $keys);
	my $run = { do => 'run', %key, request => request(), wait => wait_(),
		raise => pick('', '', '', 'P0001', '22012', '40001'), record => rand() < 0.5 };
	my $kind = rand();
	return $run if $kind < 0.2;
	return { do => 'once', %key } if $kind < 0.3;
	return { do => 'lookup', %key } if $kind < 0.4;
	return { do => 'forget', key => $keys - 1 } if $kind < 0.45 && $keys == KEYS;
	return { do => 'settle', %key, held => 0 } if $kind < 0.48;
	return { do => 'claim', %key, request => request(), wait => wait_() } if $alone;
	my @steps = ({ do => 'claim', %key, request => request(), wait => wait_() });
	push @steps, { do => 'savepoint' } if rand() < 0.2;
	push @steps, { do => 'claim', %key, request => request(), wait => wait_() } if rand() < 0.15;
	push @steps, rand() < 0.15 ? { do => 'release', %key }
	  : { do => 'settle', %key, held => 1, fail => rand() < 0.2 }
	  if rand() < 0.9;
	push @steps, { do => 'rollback_to', depth => 0 } if rand() < 0.1;
	push @steps, { do => 'lookup', %key } if rand() < 0.15;
	push @steps, { do => 'claim', %key, request => request(), wait => wait_() } if rand() < 0.15;
	return @steps;
}

sub leases
{
	my ($alone) = @_;
	my %key = (key => rand() < 0.75 ? int rand $keys : KEYS + int rand LOCKS);
	my %whose = (mine => rand() < 0.75, which => int rand 8);
	my $kind = rand();
	return keys_($alone) if $kind < 0.15;	# on the same keys
	return { do => 'lease', %key, lease => pick(0, 2, 5, 20, 1000), request => request(), wait => wait_() } if $kind < 0.47;
	return { do => 'extend', %key, %whose, lease => pick(0, 5, 20, 1000) } if $kind < 0.56;
	return { do => 'checkpoint', %key, %whose } if $kind < 0.64;
	return { do => 'fenced_release', %key, %whose } if $kind < 0.73;
	return { do => 'guarded', row => int rand ROWS, mine => rand() < 0.4, which => int rand 8 } if $kind < 0.82;
	return { do => 'lookup', %key } if $kind < 0.85;
	return { do => 'fenced_settle', %key, fail => rand() < 0.2, %whose };
}

sub machine
{
	my %row = (row => int rand ROWS);
	my $kind = rand();
	my @state = qw(NEW PAID SHIPPED REFUNDED);
	return { do => 'fire', %row, event => pick(qw(pay pay ship refund refund reopen touch)) } if $kind < 0.4;
	return { do => 'move', %row, from => pick(@state, undef), to => pick(@state), missing => rand() < 0.03 } if $kind < 0.85;
	return { do => 'set_state', %row, to => pick(@state) } if $kind < 0.97;
	return { do => 'insert_state', to => pick(@state) };
}

sub versions
{
	my %row = (row => int rand ROWS);
	return rand() < 0.8 ? { do => 'edit', %row, off => pick(0, 0, 0, 0, 1) } : { do => 'set_row', %row };
}

sub tokens
{
	my %token = (which => int rand 3, wrong => rand() < 0.05);
	my $kind = rand();
	return { do => 'issue', subject => int rand 2, ttl => pick('10 ms', '1 hour', '1 hour', '1 hour') } if $kind < 0.25;
	return { do => 'consume', %token, wait => wait_() } if $kind < 0.75;
	return { do => 'check', %token } if $kind < 0.9;
	return { do => 'revoke', %token } if $kind < 0.97;
	return { do => 'revoke_all', subject => int rand 2 };
}

sub outbox
{
	my ($alone) = @_;
	my $kind = rand();
	return { do => 'emit', key => pick(undef, 0, 0, 1), delay => pick(0, 0, 0, 5, 30) } if $kind < 0.3;
	return { do => 'take', max => pick(1, 2, 10), lease => pick(0, 3, 10, 40) } if $kind < 0.55;
	return { do => 'extend_event', mine => rand() < 0.9, which => int rand 8, lease => pick(0, 10, 40) } if $kind < 0.6;
	return { do => 'ack', mine => rand() < 0.9, which => int rand 8 } if $kind < 0.8;
	return { do => 'ack_all', mine => rand() < 0.9, which => int rand 8 } if $kind < 0.87;
	return { do => 'nack', mine => rand() < 0.9, which => int rand 8 } if $kind < 0.97;
	return { do => 'wait', timeout => pick(0, 5, 20) } if $alone && $kind < 0.99;
	return { do => 'retry_parked' };
}

sub items
{
	my %key = (key => int rand 2);
	return { do => 'item', %key } if rand() < 0.8;
	return { do => 'delete_item', %key };
}

1;
