# The model: what a history must look like, by the contract alone.  It knows
# nothing of tables, locks or snapshots, only when an operation was sent, when
# its answer was there, and when its transaction committed.  What may have
# happened in either order counts for the server.
package Model::Check;

use strict;
use warnings;

use List::Util qw(max min);
use Model::Hostile;

my ($h, @wrong);
my (%on_key);		# key => its operations, in the order in which they were sent
my (%effects);		# key => those that stored an answer
my ($by_n);			# n => operation

# Everything that is wrong with a history, as text.
sub check
{
	($h) = @_;
	@wrong = @{ $h->{wrong} };
	%on_key = %effects = ();
	$by_n = { map { $_->{n} => $_ } @{ $h->{ops} } };
	for my $op (@{ $h->{ops} })
	{
		next unless $op->{tx};
		push @{ $on_key{ $op->{key} } }, $op if defined $op->{key} && defined $op->{ttl};
		push @{ $effects{ $op->{key} } }, $op if $op->{effect};
	}
	for my $op (grep { $_->{tx} } @{ $h->{ops} })
	{
		if ($op->{do} eq 'attack') { check_attack($op); }
		elsif ($op->{error}) { check_error($op); }
		check_commit($op) if $op->{do} =~ /^(commit|prepare)$/;
	}
	check_effects();
	check_key($_) for sort keys %on_key;
	check_rows();
	check_tokens();
	check_outbox();
	check_items();
	say_(undef, "$h->{found}{locks} advisory locks are left") if $h->{found}{locks};
	return @wrong;
}

sub say_
{
	my ($op, @text) = @_;
	push @wrong, ($op ? "operation $op->{n}: " : '') . join '', @text;
	return;
}

# -------------------------------------------------- when did what count, surely?

# Committed before that moment, and not undone.
sub counted_before
{
	my ($op, $at) = @_;
	return $op->{tx}{outcome} eq 'committed' && !$op->{undone} && !$op->{error} && $op->{tx}{c_ret} < $at;
}

# Committed, or maybe so, begun before that moment.
sub may_count
{
	my ($op, $at) = @_;
	return !$op->{undone} && !$op->{error} && $op->{tx}{outcome} ne 'aborted' && $op->{inv} <= $at;
}

# Was at work between the two moments, also if it failed.
sub at_work { return $_[0]{inv} <= $_[2] && min($_[0]{freed} // 9e18, $_[0]{tx}{end}) >= $_[1]; }

sub committed { return !$_[0]{undone} && !$_[0]{error} && $_[0]{tx}{outcome} eq 'committed'; }

# From when on a snapshot of the operation may be.
sub seen_from { return $_[0]{tx}{level} eq 'READ COMMITTED' ? $_[0]{inv} : $_[0]{tx}{begun}; }

# And until when: what was committed later is not in it.
sub seen_by
{
	my ($op) = @_;
	return $op->{ret} if $op->{tx}{level} eq 'READ COMMITTED';
	my ($first) = grep { !$_->{error} && $_->{do} !~ /^(begin|savepoint|rollback_to|release_savepoint|attack)$/ } @{ $op->{tx}{ops} };
	return $first ? $first->{ret} : $op->{ret};
}

# ------------------------------------------------------------- errors, commits

# SQLSTATEs that each kind of operation may meet, beside those that any may.
my %states = (
	once => '55P03', settle => 'IK002 IK006', fenced_settle => 'IK002 IK006', fenced_release => 'IK002', extend => 'IK002 IK006',
	checkpoint => 'IK002 IK006', guarded => 'IK002', move => 'IK003', set_state => 'IK003', insert_state => 'IK003',
	commit => 'IK001', prepare => 'IK001', release => '');

sub check_error
{
	my ($op) = @_;
	my $state = $op->{error};
	return if may_fail($op);
	return if $op->{do} eq 'run' && $state eq $op->{raise} && (!$op->{record} || $state eq '40001');
	return if index($states{ $op->{do} } // '', $state) >= 0;
	# it would have been the claim of a transaction without a complete()
	return if $op->{do} eq 'claim' && $op->{tx}{alone} && $state eq 'IK001' && !present($op, $op->{inv}) && !leased($op);
	say_($op, "error $state under $op->{tx}{level}: $op->{message}");
	return;
}

# Errors that any statement may meet.
sub may_fail
{
	my ($op) = @_;
	my $state = $op->{error};
	return $state eq '57014' && $op->{cancelled} || $state eq '40P01' && $op->{do} ne 'begin'
	  || $state eq '40001' && $op->{tx}{level} ne 'READ COMMITTED'
	  # it may have used what cannot be prepared
	  || $state eq '0A000' && $op->{do} eq 'prepare' && $op->{tx}{attacked};
}

# An attack was answered as the contract says.
sub check_attack
{
	my ($op) = @_;
	return if $op->{lost} || $op->{error} && may_fail($op);
	my $wrong = Model::Hostile::judge($op, $h) // return;
	say_($op, "attack $op->{what} $wrong, by $op->{sql}");
	return;
}

# An open claim, and nothing else, refuses COMMIT and PREPARE.
sub check_commit
{
	my ($op) = @_;
	return if $op->{lost} || $op->{was_failed};
	my @open = grep { $op->{own}{$_}{open} } sort keys %{ $op->{own} };
	my $state = $op->{error} // '';
	say_($op, "committed with an open claim on @open") if @open && !$state;
	# an attack may have left one
	say_($op, 'IK001 without an open claim') if !@open && $state eq 'IK001' && !$op->{tx}{attacked};
	return;
}

# ------------------------------------------------------------------------- keys

# What is in the table effect is what was committed, once each.
sub check_effects
{
	my %left = %{ $h->{found}{effect} };
	for my $op (grep { $_->{tx} } @{ $h->{ops} })
	{
		my $there = delete $left{ $op->{n} } // 0;
		next if $op->{lost} && $op->{tx}{outcome} ne 'aborted' || $op->{tx}{outcome} eq 'unknown';
		my $expected = committed($op) && ($op->{do} eq 'run' ? $op->{got} && !$op->{recorded} : $op->{do} =~ /^(once|consume)$/ ? $op->{got}
			: $op->{sql} =~ /^INSERT INTO effect VALUES/);
		say_($op, "its effect is there $there times, ", $expected ? 'not once' : "though it was $op->{tx}{outcome}") if $there != !!$expected;
	}
	say_(undef, "effect $_ came from nowhere") for keys %left;
	return;
}

# Is an answer on the key, surely, throughout the operation?  That answer.
sub present
{
	my ($op, $from) = @_;
	for my $e (@{ $effects{ $op->{key} } // [] })
	{
		next unless counted_before($e, $from) && $e->{inv} + $e->{ttl} > $op->{ret};
		return $e unless forgotten($op->{key}, $e->{inv}, $op->{ret});
	}
	return;
}

# May an answer of the operation's key, given by that effect, still be there?
sub may_answer
{
	my ($e, $op) = @_;
	return !$e->{undone} && $e->{tx}{outcome} ne 'aborted' && $e->{tx}{c_inv} <= $op->{ret} && $e->{ret} + $e->{ttl} >= $op->{inv};
}

# Was the key's record forgotten between those moments, as far as one can know?
sub forgotten
{
	my ($key, $since, $until) = @_;
	return scalar grep { $_->{do} eq 'forget' && $_->{inv} <= $until && $_->{tx}{end} >= $since
		  && ($_->{lost} || $_->{error} || $_->{rows}[0][0] eq 't') } @{ $on_key{$key} };
}

# The fence's lease holds, surely, throughout the operation: that lease.
sub leased
{
	my ($op) = @_;
	my @ops = @{ $on_key{ $op->{key} } };
	for my $g (grep { $_->{do} eq 'lease' && $_->{got} } @ops)
	{
		next unless counted_before($g, $op->{inv});
		my @extends = grep { $_->{do} eq 'extend' && ($_->{lost} || !$_->{error}) && $_->{fence} eq $g->{fence} } @ops;
		next if grep { $_->{lost} } @extends;
		next if min($g->{deadline}, map { $_->{deadline} // () } @extends) <= $op->{ret};
		next if grep { $_ != $op && $_ != $g && changes($_) && $_->{inv} <= $op->{ret} && $_->{tx}{end} >= $g->{inv} } @ops;
		return $g;
	}
	return;
}

# May the operation end or replace what is on its key?
sub changes
{
	my ($op) = @_;
	return 0 if $op->{error} && $op->{error} ne '57014';
	return 1 if $op->{lost} && $op->{do} !~ /^(claim|lookup|extend|checkpoint)$/;
	return $op->{got} || $op->{effect} || $op->{do} =~ /release|forget/ && ($op->{rows}[0][0] // '') eq 't';
}

# Somebody may be at the key during the operation.
sub busy
{
	my ($op) = @_;
	for my $other (@{ $on_key{ $op->{key} } })
	{
		next if $other->{tx} == $op->{tx} || $other->{do} eq 'lookup';
		return 1 if at_work($other, $op->{inv}, $op->{ret});
	}
	return 1 if maybe_leased($op);
	return scalar grep { $_->{do} eq 'purge' && $_->{inv} <= $op->{ret} && $_->{ret} >= $op->{inv} } @{ $h->{ops} };
}

# A lease may be live on the key during the operation.
sub maybe_leased
{
	my ($op) = @_;
	for my $g (grep { $_->{do} eq 'lease' && ($_->{got} || $_->{lost}) && $_->{inv} <= $op->{ret} } @{ $on_key{ $op->{key} } })
	{
		next if $g->{tx}{outcome} eq 'aborted' && $g->{tx}{end} < $op->{inv};
		# lookup shows also what has lapsed, with its deadline
		return 1 if $g->{lost} || $op->{do} eq 'lookup' || $g->{ret} + 1000 * $g->{lease} >= $op->{inv};
		return 1 if grep { $_->{do} eq 'extend' && $_->{fence} eq $g->{fence} && $_->{ret} + 1000 * $_->{lease} >= $op->{inv} } @{ $on_key{ $op->{key} } };
	}
	return 0;
}

# Is it the answer that the effect stored?
sub is_answer
{
	my ($e, $status, $response, $message) = @_;
	my $answer = $e->{do} eq 'once' ? undef : "a$e->{n}";
	my $failed = $e->{recorded} || $e->{fail};
	return 1 if $e->{lost} && $e->{do} eq 'run' && ($response // $message // '') eq $answer;
	return 0 if $status ne ($failed ? 'failed' : 'completed');
	my $got = $e->{recorded} ? $message : $response;
	return defined $answer ? defined $got && $got eq $answer : !defined $got;
}

sub check_key
{
	my ($key) = @_;
	my @ops = @{ $on_key{$key} };
	for my $op (@ops)
	{
		next if $op->{lost} || $op->{do} eq 'attack';
		if ($op->{error})
		{
			check_refusal($op);
			next;
		}
		check_answer($op) if $op->{do} =~ /^(claim|once|run|lookup|lease)$/;
		check_fenced($op) if defined $op->{grant};
		say_($op, 'completed a key that it did not hold') if $op->{do} eq 'settle' && !$op->{held};
		say_($op, 'had nothing to give back') if $op->{do} eq 'release' && $op->{rows}[0][0] ne 't';
	}
	check_fences($key);

	# one effect, or the next one after the first has run out or was forgotten
	my @done = grep { committed($_) } @{ $effects{$key} // [] };
	for my $i (1 .. $#done)
	{
		for my $j (0 .. $i - 1)
		{
			my ($one, $other) = @done[ $j, $i ];
			say_($other, "a second effect on $key, beside that of operation $one->{n}") unless made_way($one, $other) || made_way($other, $one);
		}
	}

	# the answer that is there in the end
	my $finally = $h->{found}{keys}{$key} or return;
	my ($status, @answer) = @$finally;
	if (($status // '') =~ /^(completed|failed)$/)
	{
		say_(undef, "$key holds an answer that nobody gave: ", join ' ', $status, map { $_ // 'NULL' } @answer)
		  unless grep { $_->{tx}{outcome} ne 'aborted' && !$_->{undone} && is_answer($_, $status, @answer) } @{ $effects{$key} // [] };
	}
	elsif (@done)
	{
		my ($e) = sort { $b->{inv} + $b->{ttl} <=> $a->{inv} + $a->{ttl} } @done;
		say_($e, "its answer is gone from $key") if $e->{inv} + $e->{ttl} > $h->{found}{tally_inv} && !grep { $_->{do} eq 'forget' } @ops;
	}
	return;
}

# May the first effect have run out, or been forgotten, when the next was claimed?
sub made_way
{
	my ($first, $next) = @_;
	return $next->{claim}{ret} >= $first->{inv} + $first->{ttl}
	  || forgotten($first->{key}, $first->{inv}, $next->{claim}{ret});
}

# What a claim in any form, or a lookup, was told.
sub check_answer
{
	my ($op) = @_;
	my ($status, $response, $message, $more) = @{ $op->{rows}[0] // [] };
	my $do = $op->{do};
	if ($do eq 'once') { $status = defined $status ? 'claimed' : 'once_false'; }
	if ($do eq 'run' && $op->{got}) { $status = 'claimed'; }
	$status //= 'absent';
	my $own = $op->{own}{ $op->{key} };
	my $brief = $op->{ttl} < 1e6;

	# within the transaction that has it
	if ($own && $own->{open})
	{
		my $want = defined $op->{request} && defined $own->{open}{request} && $op->{request} != $own->{open}{request} && $do ne 'lookup'
		  ? 'mismatch' : $do eq 'once' ? 'once_false' : 'held';
		say_($op, "$status, though this transaction's open claim is $want") if $status ne $want;
		return;
	}
	if ($own && $own->{answer})
	{
		my $e = $own->{answer};
		return if $status eq 'once_false' || $status eq 'mismatch' && mismatch($op);
		# once it has run out, somebody else may be at the key
		return if $op->{ret} >= $e->{inv} + $e->{ttl}
		  && ($status =~ /^(claimed|absent)$/ || $status eq 'in_progress' && (!$h->{exact} || busy($op)));
		say_($op, "$status, not this transaction's own answer of operation $e->{n}") unless is_answer($e, $status, $response, $message);
		return;
	}
	if ($own && $own->{leased} && $status =~ /^(held|once_false)$/) { return; }
	return say_($op, 'held, and it is not') if $status eq 'held';

	if ($status =~ /^(completed|failed)$/)
	{
		my @given = grep { is_answer($_, $status, $response, $message) && may_answer($_, $op) } @{ $effects{ $op->{key} } // [] };
		if (!@given) { say_($op, "an answer that nobody gave: ", join ' ', $status, $response // 'NULL', $message // ''); }
		elsif (defined $op->{request} && !grep { my $r = $_->{claim}{request}; !defined $r || $r == $op->{request} } @given)
		{
			say_($op, 'a replay for another request');
		}
		my $by = seen_by($op);
		say_($op, 'an answer that its snapshot cannot show') if @given && !grep { $_->{tx}{c_inv} <= $by } @given;
		my $e = present($op, seen_from($op));
		say_($op, "not the answer of operation $e->{n}") if $e && !grep { $_ == $e } @given;
		return;
	}
	if ($status eq 'mismatch') { say_($op, 'a mismatch with nothing') unless mismatch($op); return; }

	# every other status denies that there is an answer
	my $e = present($op, $do eq 'lookup' ? seen_from($op) : $op->{inv});
	if ($status eq 'once_false' and my @given = grep { may_answer($_, $op) } @{ $effects{ $op->{key} } // [] })
	{
		my $by = seen_by($op);
		say_($op, 'false by what its snapshot cannot show') if !grep { $_->{tx}{c_inv} <= $by } @given;
		return;
	}
	say_($op, "$status, though operation $e->{n} had stored an answer") if $e;
	if ($status eq 'claimed')
	{
		my $g = leased($op);
		say_($op, "claimed under the lease of operation $g->{n}") if $g;
	}
	elsif ($status eq 'in_progress' && $h->{exact})
	{
		return if $own && $own->{leased};
		say_($op, 'in progress, and nobody is at it') unless $do eq 'lookup' ? maybe_leased($op) : busy($op);
		say_($op, 'in progress, though it could wait for as long as it liked')
		  if $do =~ /^(claim|run)$/ && !defined $op->{wait} && !maybe_leased($op);
	}
	elsif ($status eq 'once_false') { say_($op, 'false, and nobody has done it'); }
	elsif ($status !~ /^(claimed|in_progress|absent)$/) { say_($op, "an unknown status, $status"); }
	return;
}

# Was there another request on the key?
sub mismatch
{
	my ($op) = @_;
	return 0 unless defined $op->{request};
	return scalar grep { $_->{inv} <= $op->{ret} && ($_->{got} || $_->{lost})
		  && defined $_->{request} && $_->{request} != $op->{request} } @{ $on_key{ $op->{key} } };
}

# A fence that was accepted is the newest.
sub check_fenced
{
	my ($op) = @_;
	my $g = $op->{grant}{op};
	my $answer = $op->{rows}[0][0];
	return if $op->{do} =~ /release/ && $answer ne 't' && !leased($op);
	for my $later (grep { $_->{do} eq 'lease' && $_->{got} && $_->{fence} > $op->{fence} } @{ $on_key{ $op->{key} } })
	{
		say_($op, "the fence was accepted after operation $later->{n} had taken over") if counted_before($later, $op->{inv});
	}
	return say_($op, 'a lease that is held was not given back') if $op->{do} =~ /release/ && $answer ne 't' && leased($op)->{fence} eq $op->{fence};
	return unless $op->{do} eq 'extend';
	if (defined $answer)
	{
		say_($op, 'a deadline that was not asked for') if $answer < $op->{inv} + 1000 * $op->{lease} || $answer > $op->{ret} + 1000 * $op->{lease};
		my @extends = grep { $_->{do} eq 'extend' && $_ != $op && $_->{fence} eq $op->{fence} && !$_->{error}
			  && $_->{inv} <= $op->{ret} } @{ $on_key{ $op->{key} } };
		say_($op, 'extended after the deadline')
		  if max(map { $_->{latest} // $_->{deadline} // 9e18 } $g, @extends) < $op->{inv};
	}
	else
	{
		my $held = leased($op);
		say_($op, "too late, and the lease of operation $held->{n} holds") if $held;
	}
	return;
}

# A refusal has its reason.
sub check_refusal
{
	my ($op) = @_;
	my $state = $op->{error};
	if ($state eq '55P03')
	{
		say_($op, '55P03, and the key is not leased') if $h->{exact} && !maybe_leased($op);
		say_($op, '55P03, though there is an answer') if present($op, $op->{inv});
	}
	return unless $state =~ /^IK00[26]$/;
	if ($op->{do} eq 'settle')
	{
		say_($op, 'a claim that this transaction holds was refused') if $op->{held};
		return;
	}
	my $g = $op->{grant}{op};
	return if !counted_before($g, $op->{inv}) && !($g->{tx} == $op->{tx} && !$g->{undone});
	return if $op->{ttl} < 1e6;
	return if grep { $_ != $g && $_ != $op && changes($_) && $_->{inv} <= $op->{ret} && $_->{tx}{end} >= $g->{inv} } @{ $on_key{ $op->{key} } };
	say_($op, "$state, and nobody else has touched the key");
	return;
}

# Fences grow from one grant to the next, over all that happens between them.
sub check_fences
{
	my ($key) = @_;
	my @grants = grep { $_->{do} eq 'lease' && $_->{got} } @{ $on_key{$key} };
	my ($highest, @waiting) = (0);
	for my $g (@grants)
	{
		my @still;
		for my $w (@waiting)
		{
			if ($w->{ret} >= $g->{inv}) { push @still, $w; }
			elsif ($w->{fence} > $highest) { $highest = $w->{fence}; }
		}
		@waiting = (@still, $g);
		say_($g, "fence $g->{fence} after $highest") if $g->{fence} <= $highest;
	}

	# the count of attempts and the checkpoint go on
	return if grep { $_->{lost} || $_->{tx}{outcome} eq 'unknown' || $_->{ttl} < 1e6 } @{ $on_key{$key} };
	my $last;
	for my $g (sort { $a->{fence} <=> $b->{fence} } grep { committed($_) && !$_->{lock} } @grants)
	{
		if ($last && !grep { committed($_) && ($_->{effect} || $_->{do} eq 'forget') } @{ $on_key{$key} })
		{
			say_($g, "attempt $g->{attempt} after attempt $last->{attempt}") if $g->{attempt} != $last->{attempt} + 1;
		}
		$last = $g;
		my @points = grep { $_->{do} eq 'checkpoint' && counted_before($_, $g->{inv}) } @{ $on_key{$key} };
		my ($newest) = sort { $b->{inv} <=> $a->{inv} } @points;
		next if !$newest || grep { $_->{do} eq 'forget' } @{ $on_key{$key} };
		my $shown = $g->{checkpoint} ? $by_n->{ substr($g->{checkpoint}, 1) } : undef;
		say_($g, "not the checkpoint of operation $newest->{n}") if !$shown || $shown->{ret} < $newest->{inv} || !may_count($shown, $g->{ret});
	}
	return;
}

# ------------------------------------------------------------------------- rows

my %edges = (
	NEW => { pay => 'PAID' }, PAID => { refund => 'REFUNDED', ship => 'SHIPPED', touch => 'PAID' },
	SHIPPED => { refund => 'REFUNDED' }, REFUNDED => { reopen => 'NEW' });

# The event in the history: what fire() asked for, or the edge's only one.
sub logged_event
{
	my ($op, $old, $new) = @_;
	return $op->{event} if defined $op->{event};
	my @events = grep { $edges{$old}{$_} eq $new } keys %{ $edges{$old} };
	return ($op->{do} // '') eq 'move' && @events == 1 ? $events[0] : '';
}

sub has_edge { my ($from, $to) = @_; return grep { $_ eq $to } values %{ $edges{$from} }; }

# The audit of a row is a chain from its first value to its last, and each link
# is an operation that was told so.
sub check_rows
{
	my (%chain, %link);
	for my $row (@{ $h->{found}{audit} })
	{
		my ($kind, $id, $n, $old, $new) = @$row;
		my $op = $by_n->{$n} // { n => $n };
		say_($op, "moved $kind $id twice") if $link{$n}++;
		my $chain = $chain{$kind}{$id} //= [];
		my $before = @$chain ? $chain->[-1]{new} : $kind eq 'doc' ? 'NEW' : $kind eq 'ware' ? 1 : 0;
		say_($op, "found $kind $id as $old, but it was $before") if $old ne $before;
		say_($op, "moved $kind $id from $old to $new")
		  if $kind eq 'doc' ? $old ne $new && !has_edge($old, $new) : $kind eq 'ware' ? $new != $old + 1 : $new < $old;
		push @$chain, { op => $op, old => $old, new => $new };
	}
	for my $row (@{ $h->{found}{rows} })
	{
		my ($kind, $id, $value) = @$row;
		my $chain = $chain{$kind}{$id} // [];
		my $last = @$chain ? $chain->[-1]{new} : $kind eq 'doc' ? 'NEW' : $kind eq 'ware' ? 1 : 0;
		say_(undef, "$kind $id is $value in the end, not $last") if $value ne $last;
	}
	for my $op (grep { $_->{tx} && $_->{do} =~ /^(move|fire|set_state|edit|set_row|guarded|insert_state)$/ } @{ $h->{ops} })
	{
		next if $op->{lost};
		my $answer = $op->{rows}[0];
		my $moved = !$op->{error} && ($answer ? $answer->[1] eq 't' : 1);
		if ($op->{do} eq 'insert_state')
		{
			say_($op, 'a new row in that state') if $op->{to} ne 'NEW' && !$op->{error};
			say_($op, 'refused as a new row') if $op->{to} eq 'NEW' && ($op->{error} // '') eq 'IK003';
			next;
		}
		if ($op->{tx}{outcome} ne 'unknown')
		{
			my $expected = $moved && committed($op);
			say_($op, $expected ? 'was told that it moved the row, but did not' : 'moved the row without a word') if !!$link{ $op->{n} } != !!$expected;
		}
		check_outcome($op, $chain{ table_of($op) }{ $op->{row} } // []);
	}

	# the history of the machine: each move, in its order, with its event
	my (%moves, %logged);
	for my $id (keys %{ $chain{doc} })
	{
		# a plain UPDATE that leaves the state alone is no move
		$moves{$id} = [ map { join ' ', @$_{qw(old new)}, logged_event($_->{op}, @$_{qw(old new)}) }
			  grep { $_->{old} ne $_->{new} || ($_->{op}{do} // '') ne 'set_state' } @{ $chain{doc}{$id} } ];
	}
	push @{ $logged{ $_->[0] } }, join ' ', map { $_ // '' } @$_[ 1 .. 3 ] for @{ $h->{found}{log} };
	for my $id (sort keys %{ { %moves, %logged } })
	{
		my ($told, $log) = map { join ', ', @{ $_ // [] } } $moves{$id}, $logged{$id};
		say_(undef, "the log of doc $id is <$log>, not <$told>") if $told ne $log;
	}
	say_(undef, "$h->{found}{off_graph} rows are off the graph") if $h->{found}{off_graph};
	return;
}

# What a compare-and-set, or a plain update, was told about a row.
sub check_outcome
{
	my ($op, $chain) = @_;
	my $do = $op->{do};
	my $state = $op->{error} // '';
	my ($outcome, $applied, $third, $fourth) = @{ $op->{rows}[0] // [] };

	if ($do eq 'guarded')
	{
		say_($op, 'IK002, and the row never had a higher fence')
		  if $state eq 'IK002' && !grep { $_->{new} > $op->{fence} && maybe_moved($_, $op) } @$chain, own_moves($op);
		return;
	}
	if ($do eq 'set_state')
	{
		return if $state ne 'IK003';
		say_($op, 'refused, though no state that the row had forbids it')
		  unless grep { $_ ne $op->{to} && !has_edge($_, $op->{to}) } values_at_work($op, $chain, 'NEW');
		return;
	}
	if ($do eq 'move')
	{
		my $legal = defined $op->{from} ? has_edge($op->{from}, $op->{to}) : 1;
		say_($op, 'an edge that is not on the graph') if !$legal && !$state;
		say_($op, 'refused, and the edge is on the graph') if $legal && $state eq 'IK003';
		return if $state || !$legal;
		return $outcome eq 'not_found' ? undef : say_($op, "$outcome for no row") if $op->{missing};
	}
	return if $state || $do eq 'set_row';
	if ($outcome !~ /^(applied|already|conflict)$/) { return say_($op, "outcome $outcome"); }
	return say_($op, "outcome $outcome, applied $applied") if ($outcome eq 'applied') ne ($applied eq 't');

	if ($do eq 'edit')
	{
		return $outcome eq 'applied' && $third != $op->{version} + 1 ? say_($op, "version $third") : undef if $outcome eq 'applied';
		say_($op, "conflict with $third, which is what it had") if $third == $op->{version};
		say_($op, "conflict with version $third, which the row did not have then") unless grep { $_ == $third } values_at_work($op, $chain, 1);
		return;
	}
	my ($from, $now) = ($third, $fourth);
	if ($outcome eq 'applied')
	{
		my $to = $do eq 'move' ? $op->{to} : $edges{$from}{ $op->{event} } // '';
		say_($op, "applied from $from to $now") if $now ne $to || !has_edge($from, $now) || defined $op->{from} && $from ne $op->{from};
		return;
	}
	my @to = $do eq 'move' ? $op->{to} : map { $_->{ $op->{event} } // () } values %edges;
	# from any state: a retry does not move again along a loop
	my $movable = $do eq 'fire' ? defined $edges{$now}{ $op->{event} }
	  : defined $op->{from} ? $now eq $op->{from} : $now ne $op->{to} && has_edge($now, $op->{to});
	my $there = grep { $_ eq $now } @to;
	say_($op, "$outcome in state $now") if $movable || ($outcome eq 'already') != !!$there;
	say_($op, "$outcome in state $now, which the row did not have then") unless grep { $_ eq $now } values_at_work($op, $chain, 'NEW');
	return;
}

# The values that a row may have had during an operation.
sub values_at_work
{
	my ($op, $chain, $first) = @_;
	my $from = seen_from($op);
	my @values = ($first);
	for my $link (@$chain)
	{
		next unless $link->{op}{tx};
		# it has replaced what was before for certain
		@values = () if counted_before($link->{op}, $from) || $link->{op}{tx} == $op->{tx} && $link->{op}{inv} < $op->{inv};
		push @values, $link->{new} if ($link->{op}{tx}{c_inv} // 9e18) <= $op->{ret} || $link->{op}{tx} == $op->{tx};
	}
	return @values, map { $_->{new} } own_moves($op);
}

# The table whose row it is about.
sub table_of { return $_[0]{do} =~ /^(edit|set_row)$/ ? 'ware' : $_[0]{do} eq 'guarded' ? 'resource' : 'doc'; }

# What the operation's own transaction did to the row, committed or not.
sub own_moves
{
	my ($op) = @_;
	my @moves;
	for my $before (@{ $op->{tx}{ops} })
	{
		my $answer = $before->{rows}[0];
		next if $before->{inv} >= $op->{inv} || $before->{error} || ($before->{undone} // 9e18) < $op->{inv};
		next if ($before->{row} // 0) != $op->{row} || table_of($before) ne table_of($op) || $answer && $answer->[1] ne 't';
		my $new = { edit => $answer->[2], set_row => $answer->[2], move => $answer->[3], fire => $answer->[3],
			set_state => $before->{to}, guarded => $before->{fence} }->{ $before->{do} };
		push @moves, { op => $before, new => $new } if defined $new;
	}
	return @moves;
}

# May the row have moved there before the operation was over?
sub maybe_moved
{
	my ($link, $op) = @_;
	my $tx = $link->{op}{tx} or return 1;
	return ($tx->{c_inv} // $link->{op}{inv}) <= $op->{ret} || $tx == $op->{tx};
}

# ----------------------------------------------------------------------- tokens

sub check_tokens
{
	my %on;
	push @{ $on{ $_->{token}{text} } }, $_ for grep { $_->{token} } @{ $h->{ops} };
	my @revoke_all = grep { $_->{do} eq 'revoke_all' && !$_->{error} } @{ $h->{ops} };
	my @retire = grep { $_->{do} eq 'retire' } @{ $h->{ops} };

	for my $token (@{ $h->{tokens} })
	{
		my @ops = grep { !$_->{wrong} } @{ $on{ $token->{text} } // [] };
		my @consumed = grep { $_->{do} eq 'consume' && ($_->{got} || $_->{lost}) } @ops;
		my @revoked = grep { $_->{do} eq 'revoke' && ($_->{lost} || ($_->{rows}[0][0] // '') eq 't') } @ops;
		my @bulk = grep { $_->{subject} eq $token->{subject} && $_->{tx}{end} >= $token->{op}{inv} } @revoke_all;

		my @sure = grep { committed($_) && !$_->{lost} || $_->{lost} && $_->{effect} } @consumed;
		push @sure, grep { committed($_) && !$_->{lost} } @revoked;
		say_($sure[1], "the token of operation $token->{op}{n} had been used up by operation $sure[0]{n}") if @sure > 1;

		for my $op (grep { $_->{wrong} && !$_->{error} && !$_->{lost} } @{ $on{ $token->{text} } // [] })
		{
			my $want = $op->{do} eq 'revoke' ? 'f' : 'invalid';
			say_($op, "$op->{rows}[0][0] for another purpose") if $op->{rows}[0][0] ne $want;
		}
		# its key is gone: surely, or maybe
		my $retired = sub { my ($at) = @_; return grep { $_->{inv} > $token->{op}{ret} && $_->{ret} < $at } @retire; };
		my $maybe_retired = sub { my ($at) = @_; return grep { $_->{ret} > $token->{op}{inv} && $_->{inv} < $at } @retire; };
		for my $op (grep { !$_->{error} && !$_->{lost} } @ops)
		{
			my $status = $op->{rows}[0][0];
			if (my ($gone) = $retired->(seen_from($op)))
			{
				say_($op, "$status, after operation $gone->{n} had retired its key") unless $status =~ /^(invalid|f)$/;
			}
			my $own = sub { return grep { $_->{tx} == $op->{tx} && $_->{inv} < $op->{inv} && ($_->{undone} // 9e18) > $op->{inv} && !$_->{error} } @_; };
			my $from = $op->{do} eq 'check' ? seen_from($op) : $op->{inv};
			my $used = sub { return grep { counted_before($_, $from) && !$_->{lost} || $own->($_) } @_; };
			my $may = sub { return grep { !$_->{undone} && $_->{tx}{outcome} ne 'aborted' && ($_->{tx}{c_inv} // 9e18) <= $op->{ret} || $own->($_) } @_; };
			if ($status =~ /^(consumed|valid|t)$/)
			{
				my ($before) = ($used->(@consumed), $used->(@revoked));
				say_($op, "$status, after operation $before->{n}") if $before && $before != $op;
				say_($op, "$status, after it had expired") if $token->{expires} <= $op->{inv};
				# issued before the revocation began
				my ($all) = grep { $token->{op}{ret} < $_->{inv} && (counted_before($_, $from) || $own->($_)) } @bulk;
				say_($op, "$status, after operation $all->{n} had revoked it") if $all;
			}
			elsif ($status eq 'used') { say_($op, 'used, and it is not') unless grep { $_ != $op } $may->(@consumed); }
			elsif ($status eq 'revoked') { say_($op, 'revoked, and it is not') unless grep { $_ != $op } $may->(@revoked), $may->(@bulk); }
			elsif ($status eq 'expired')
			{
				say_($op, 'expired, and it has not') if $op->{ret} < $token->{expires};
				my ($before) = $used->(@consumed);
				say_($op, "expired, though operation $before->{n} had used it") if $before;
			}
			elsif ($status eq 'busy')
			{
				say_($op, 'busy, and nobody is at it')
				  unless !$h->{exact} || grep { $_->{tx} != $op->{tx} && $_->{do} ne 'check' && at_work($_, $op->{inv}, $op->{ret}) } @ops;
				say_($op, 'busy, though it could wait') unless defined $op->{wait};
			}
			elsif ($status eq 'invalid') { say_($op, 'invalid, and it is not') unless $maybe_retired->($op->{ret}); }
			elsif ($status ne 'f') { say_($op, "status $status"); }
		}

		# given back on rollback, and not otherwise
		my $finally = $token->{finally};
		if ($maybe_retired->(9e18))
		{
			say_($token->{op}, "its token is $finally in the end, and its key was retired") if $retired->(9e18) && $finally ne 'invalid';
			next;
		}
		my ($one) = grep { $_->{do} eq 'consume' } @sure;
		my $maybe = grep { !$_->{undone} && $_->{tx}{outcome} ne 'aborted' } @consumed, @revoked, @bulk;
		say_($one, "its token is $finally in the end") if $one && $finally ne 'used' && !($finally eq 'revoked' && @bulk);
		say_($token->{op}, "its token is $finally in the end, and nobody took it")
		  if !$maybe && !($finally eq 'valid' ? $token->{expires} >= $token->{looked}[0]
			: $finally eq 'expired' && $token->{expires} <= $token->{looked}[1]);
	}
	return;
}

# ----------------------------------------------------------------------- outbox

sub check_outbox
{
	my %event;		# id => the operation that emitted it
	my @takes = grep { $_->{do} eq 'take' && !$_->{error} } @{ $h->{ops} };
	my @lost = grep { $_->{lost} } @takes;
	my %at;			# id => acks and nacks
	my %out;		# id => [take, attempt]
	$event{ $_->{event} } = $_ for grep { $_->{do} eq 'emit' && defined $_->{event} } @{ $h->{ops} };
	my @acks = map { $_->{do} eq 'ack_all' ? each_ack($_) : $_->{do} =~ /^n?ack$/ ? $_ : () } @{ $h->{ops} };
	push @{ $at{ $_->{event} } }, $_ for @acks;
	my @retries = grep { $_->{do} eq 'retry_parked' } @{ $h->{ops} };
	my $parkable = sub { my ($id, $ret) = @_; return grep { $_->[1] % 3 == 0 && $_->[0]{inv} <= $ret } @{ $out{$id} // [] }; };
	my $done = sub { my ($op) = @_; return !$op->{error} && ($op->{lost} || ($op->{rows}[0][0] // '') eq 't'); };
	for my $take (@takes)
	{
		for my $row (@{ $take->{rows} }) { push @{ $out{ $row->[0] } }, [ $take, $row->[1] ]; }
	}

	for my $take (@takes)
	{
		my %key;
		for my $row (@{ $take->{rows} })
		{
			my ($id, $attempt, $key, $n) = @$row;
			my $emit = $event{$id};
			if (!$emit || $emit->{n} != $n)
			{
				# its emitter may have died before it learned the id
				my $lost = $by_n->{$n};
				say_($take, "event $id came from nowhere") unless $lost && $lost->{do} eq 'emit' && $lost->{lost} && $lost->{tx}{outcome} ne 'aborted';
				next;
			}
			say_($take, "event $id, which operation $emit->{n} took back")
			  if $emit->{tx}{outcome} eq 'aborted' && $emit->{tx} != $take->{tx} || $emit->{undone} && $emit->{undone} < $take->{inv};
			say_($take, "event $id before its delay was over") if $take->{ret} < $emit->{inv} + 1000 * ($emit->{delay} // 0);
			say_($take, "event $id before its commit") if $emit->{tx} != $take->{tx} && ($emit->{tx}{c_inv} // 9e18) > $take->{ret};
			say_($take, "two events of key $key at once") if defined $key && $key{$key}++;

			# acknowledged for good
			for my $ack (grep { $_->{do} eq 'ack' && $done->($_) && !$_->{lost} } @{ $at{$id} // [] })
			{
				say_($take, "event $id again, after operation $ack->{n} had acknowledged it") if counted_before($ack, $take->{inv});
			}
			# handed out: another attempt only after the lease, or a nack
			for my $other (@{ $out{$id} })
			{
				my ($before, $number) = @$other;
				next if $before == $take || !counted_before($before, $take->{inv});
				say_($take, "attempt $attempt of event $id after attempt $number") if $attempt <= $number;
				say_($take, "event $id is out since operation $before->{n}") if is_out($before, $id, $number, $take, \%at, \@retries);
			}
			next unless defined $key;

			# events of one key: none while another is out, none before an earlier one
			for my $other (grep { $_ != $id && ($event{$_}{key} // '') eq substr($key, 1) } keys %event)
			{
				for (@{ $out{$other} // [] })
				{
					my ($before, $number) = @$_;
					say_($take, "event $id while event $other of key $key is out since operation $before->{n}")
					  if counted_before($before, $take->{inv}) && is_out($before, $other, $number, $take, \%at, \@retries);
				}
				next unless $other < $id && counted_before($event{$other}, seen_from($take));
				next if grep { $_->{do} eq 'ack' && $done->($_) && $_->{inv} <= $take->{ret} && !($_->{undone} && $_->{undone} < $take->{inv})
					  && !($_->{tx}{outcome} eq 'aborted' && $_->{tx}{end} < $take->{inv}) } @{ $at{$other} // [] };
				next if $parkable->($other, $take->{ret}) || @lost;
				say_($take, "event $id before event $other of key $key");
			}
		}
	}

	# of one key never two at once, in either order of their commits
	for my $id (sort keys %out)
	{
		for my $other (grep { $_ > $id && defined $event{$id}{key} && ($event{$_}{key} // '') eq $event{$id}{key} } keys %out)
		{
			for my $a (grep { committed($_->[0]) } @{ $out{$id} })
			{
				for my $b (grep { committed($_->[0]) } @{ $out{$other} })
				{
					my $both = max(map { $_->[0]{tx}{c_ret} } $a, $b);
					my $then = { inv => $both, ret => $both };
					next unless is_out($a->[0], $id, $a->[1], $then, \%at, \@retries) && is_out($b->[0], $other, $b->[1], $then, \%at, \@retries);
					say_($b->[0], "event $other while event $id is out since operation $a->[0]{n}");
				}
			}
		}
	}

	for my $op (grep { !$_->{error} && !$_->{lost} } @acks)
	{
		my ($take) = map { $_->[0] } grep { $_->[1] == $op->{attempt} } @{ $out{ $op->{event} } // [] };
		if ($op->{rows}[0][0] eq 't')
		{
			for my $later (grep { $_->[1] > $op->{attempt} } @{ $out{ $op->{event} } // [] })
			{
				say_($op, "accepted after operation $later->[0]{n} had taken the event") if counted_before($later->[0], $op->{inv});
			}
			for my $ack (grep { $_ != $op && $_->{do} eq 'ack' && $done->($_) && !$_->{lost} && counted_before($_, $op->{inv}) } @{ $at{ $op->{event} } })
			{
				say_($op, "accepted after operation $ack->{n} had acknowledged the event");
			}
		}
		else
		{
			next if @lost || !counted_before($take, $op->{inv}) || $op->{attempt} % 3 == 0;
			next if grep { $_->[0] != $take && $_->[1] > $op->{attempt} && $_->[0]{inv} <= $op->{ret} } @{ $out{ $op->{event} } };
			next if grep { $_ != $op && $_->{inv} <= $op->{ret} && $done->($_) && $_->{tx}{end} >= $take->{inv} } @{ $at{ $op->{event} } };
			say_($op, 'refused, though its attempt is the newest');
		}
	}

	# nothing is lost, nothing comes back
	my (%delivered, %last);
	for my $row (@{ $h->{found}{delivered} // [] })
	{
		my ($id, undef, $key, $n) = @$row;
		say_(undef, "event $id is delivered twice in the end") if $delivered{$id}++;
		my $emit = $by_n->{$n};
		say_($emit, "its event $id was delivered, though it was $emit->{tx}{outcome}") if $emit->{tx}{outcome} eq 'aborted' || $emit->{undone};
		my ($ack) = grep { $_->{do} eq 'ack' && committed($_) && !$_->{lost} && $done->($_) } @{ $at{$id} // [] };
		say_($ack, "its event $id was delivered afterwards") if $ack;
		# what was parked comes when it comes
		next if !defined $key || $parkable->($id, 9e18) || @lost;
		say_(undef, "event $id of key $key after event $last{$key} in the end") if ($last{$key} // 0) > $id;
		$last{$key} = $id;
	}
	for my $id (sort { $a <=> $b } keys %event)
	{
		next unless committed($event{$id}) && !$delivered{$id};
		next if grep { $_->{do} eq 'ack' && $done->($_) && !$_->{undone} && $_->{tx}{outcome} ne 'aborted' } @{ $at{$id} // [] };
		say_($event{$id}, "its event $id was lost");
	}
	return;
}

# An ack of several events as one of each.  It told how many were accepted: if
# only some, any of them may have been.
sub each_ack
{
	my ($op) = @_;
	my $count = $op->{rows}[0][0] // 0;
	my $some = $count != 0 && $count != @{ $op->{acks} };
	say_($op, "$count events of " . @{ $op->{acks} }) if $count > @{ $op->{acks} };
	return map { { %$op, %$_, do => 'ack', lost => $op->{lost} || $some, rows => [ [ $count ? 't' : 'f' ] ] } } @{ $op->{acks} };
}

# Is the event out, surely, throughout the later take?
sub is_out
{
	my ($take, $id, $attempt, $later, $at, $retries) = @_;
	my @extended = grep { $_->{do} eq 'extend_event' && $_->{extended} && $_->{event} == $id && $_->{attempt} == $attempt
		  && $_->{inv} <= $later->{ret} } @{ $h->{ops} };
	my @until = map { $_->{inv} + 1000 * $_->{lease} } @extended;
	# the last one counts, if all are sure
	@until = $until[-1] if @until && !grep { !counted_before($_, $later->{inv}) } @extended;
	push @until, $take->{inv} + 1000 * $take->{lease} if !@until || grep { !counted_before($_, $later->{inv}) } @extended;
	return 0 if $take == $later || $take->{undone} || grep { $_ <= $later->{ret} } @until;
	return 0 if grep { !$_->{error} && $_->{inv} <= $later->{ret} && ($_->{lost} || ($_->{rows}[0][0] // '') eq 't') } @{ $at->{$id} // [] };
	return 1;
}

# ------------------------------------------------------- the caller's own index

sub check_items
{
	my %on;
	push @{ $on{ $_->{key} } }, $_ for grep { $_->{do} =~ /item/ } @{ $h->{ops} };
	for my $key (sort keys %on)
	{
		my @ops = @{ $on{$key} };
		my $unsure = grep { $_->{lost} || $_->{tx}{outcome} eq 'unknown' } @ops;
		my @made = grep { $_->{do} eq 'item' && $_->{got} && committed($_) } @ops;
		my @gone = grep { $_->{do} eq 'delete_item' && committed($_) && @{ $_->{rows} } } @ops;
		my $there = $h->{found}{items}{$key};
		say_(undef, "$key was made " . @made . ' times and deleted ' . @gone . ' times, and is ' . ($there ? 'there' : 'not there'))
		  if !$unsure && @made - @gone != defined $there;
		say_(undef, "$key is that of operation $there, who did not make it")
		  if defined $there && !grep { $_->{n} == $there && ($_->{got} || $_->{lost}) && $_->{tx}{outcome} ne 'aborted' } @ops;
		my %taken;
		for my $op (@gone) { say_($op, "deleted what was deleted, $op->{rows}[0][0]") if $taken{ $op->{rows}[0][0] }++; }

		for my $op (grep { $_->{do} eq 'item' && !$_->{error} && !$_->{lost} } @ops)
		{
			my ($created, $n) = @{ $op->{rows}[0] };
			if ($created eq 't')
			{
				say_($op, "made a row with $n") if $n != $op->{n};
				next;
			}
			my $maker = $by_n->{$n};
			my $own = $maker && $maker->{tx} == $op->{tx} && ($maker->{undone} // 9e18) > $op->{inv};
			say_($op, "returned the row of operation $n, which is not there") unless $own || $maker && ($maker->{got} || $maker->{lost})
			  && $maker->{key} eq $key && !$maker->{undone} && $maker->{tx}{outcome} ne 'aborted' && $maker->{tx}{c_inv} <= $op->{ret};
			my ($gone) = grep { $_->{rows}[0] && $_->{rows}[0][0] == $n && counted_before($_, seen_from($op)) } @gone;
			say_($op, "returned the row of operation $n, after operation $gone->{n} had deleted it") if $gone;
		}
	}
	return;
}

1;
