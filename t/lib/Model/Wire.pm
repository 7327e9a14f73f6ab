# A connection that never waits: PostgreSQL's simple query protocol over a Unix
# socket.  One process can keep many statements under way with it, and learns
# of each when it was answered, with what SQLSTATE, and whether a transaction is
# open.
package Model::Wire;

use strict;
use warnings;

use IO::Socket::UNIX;

# connect(host => DIRECTORY, port =>, user =>, dbname =>): waits until the server
# is ready for a query; undef if it is not to be reached.
sub connect
{
	my ($class, %at) = @_;
	my $socket = IO::Socket::UNIX->new(Peer => "$at{host}/.s.PGSQL.$at{port}") or return;
	my $self = bless { socket => $socket, in => '', pid => 0, status => '' }, $class;
	my $startup = pack('N', 196608) . join("\0", user => $at{user}, database => $at{dbname},
		application_name => 'model', client_min_messages => 'error') . "\0\0";
	syswrite($socket, pack('N', length($startup) + 4) . $startup);
	my $answer;
	while (!($answer = $self->poll)) { }
	return $answer->{lost} ? undef : $self;
}

sub fd { return fileno($_[0]->{socket}); }
sub pid { return $_[0]->{pid}; }

# Sends a statement, or several; the answer comes by poll().
sub send
{
	my ($self, $sql) = @_;
	local $SIG{PIPE} = 'IGNORE';
	# a lost connection shows when the answer is read
	syswrite($self->{socket}, 'Q' . pack('N', length($sql) + 5) . "$sql\0");
	return;
}

# Reads what has come, and waits if nothing has.  The answer, once it is whole:
# {rows => [[...]] of the last statement that had some, error => SQLSTATE,
# message, status => I, T or E as at ReadyForQuery}, or {lost => 1}; else undef.
sub poll
{
	my ($self) = @_;
	my $got = sysread($self->{socket}, $self->{in}, 65536, length $self->{in});
	return { lost => 1, %{ $self->{answer} // {} } } unless $got;

	while (length $self->{in} >= 5)
	{
		my ($type, $length) = unpack('a N', $self->{in});
		last if length $self->{in} < $length + 1;
		my $body = substr($self->{in}, 5, $length - 4);
		substr($self->{in}, 0, $length + 1) = '';
		my $answer = $self->{answer} //= { rows => [] };

		if ($type eq 'D')
		{
			my ($at, @row) = (2);
			for (1 .. unpack('n', $body))
			{
				my $size = unpack('N', substr($body, $at, 4));
				$at += 4;
				push(@row, undef), next if $size == 0xffffffff;
				push @row, substr($body, $at, $size);
				$at += $size;
			}
			push @{ $answer->{rows} }, \@row;
		}
		elsif ($type eq 'T') { $answer->{rows} = []; }
		elsif ($type eq 'E')
		{
			my %field = map { unpack('a a*', $_) } grep { length } split /\0/, $body;
			@$answer{qw(error message)} = @field{qw(C M)};
		}
		elsif ($type eq 'K') { $self->{pid} = unpack('N', $body); }
		elsif ($type eq 'R' && unpack('N', $body) != 0)
		{
			die "the server asks for a password\n";
		}
		elsif ($type eq 'Z')
		{
			$answer->{status} = $body;
			delete $self->{answer};
			return $answer;
		}
	}
	return;
}

# Sends and waits.  Dies on an error.
sub ask
{
	my ($self, $sql) = @_;
	my $answer = $self->try($sql);
	die "$answer->{message}\n  in: $sql\n" if $answer->{error};
	die "the server has gone\n  in: $sql\n" if $answer->{lost};
	return $answer->{rows};
}

# Sends and waits, for the answer as poll() gives it.
sub try
{
	my ($self, $sql) = @_;
	$self->send($sql);
	my $answer;
	while (!($answer = $self->poll)) { }
	return $answer;
}

1;
