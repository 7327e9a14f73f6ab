# What the TAP tests share: statements sent by psql, in a session of their own or
# in one that stays open.
#
#	ask_at(node => $node, role => 'app', database => 'shop');	# unless told otherwise
#	query([$node,] [$role, [$database,]] $sql)		what it gives; dies of an error
#	sqlstate([$node,] [$role, [$database,]] $sql)	the error that it ends with, or "none: ..."
#
#	my $session = session($connstr, $role);	# stays open
#	ask($session, $sql)			what it gives, an error as its SQLSTATE
#	send_to($session, $sql)		does not wait for the answer, which
#	answer_of($session)			waits for
#	close_session($session)
package Ask;

use strict;
use warnings;
use Exporter 'import';
use IPC::Run;
use PostgreSQL::Test::Utils;

our @EXPORT = qw(ask_at query sqlstate session ask send_to answer_of close_session);

my %default = (database => 'postgres');

sub ask_at
{
	%default = (%default, @_);
	return;
}

sub query
{
	my ($node, @call) = call(@_);
	return $node->safe_psql(@call);
}

sub sqlstate
{
	my $sql = pop;
	my ($node, @call) = call(@_, "\\set VERBOSITY sqlstate\n$sql");
	my ($ret, $stdout, $stderr) = $node->psql(@call, on_error_stop => 1);
	return $stderr =~ /ERROR:\s+(\w{5})/ ? $1 : "none: $stderr";
}

# The node, and the arguments of its psql().
sub call
{
	my $sql = pop;
	my $node = ref $_[0] ? shift : $default{node};
	my ($role, $database) = @_;
	$role //= $default{role};
	return ($node, $database // $default{database}, $sql, defined $role ? (extra_params => [ '-U', $role ]) : ());
}

sub session
{
	my ($connstr, $role) = @_;
	my $session = { in => '', out => '' };
	$session->{harness} = IPC::Run::start(
		[ 'psql', '-XAtq', '-v', 'VERBOSITY=sqlstate', '-U', $role, '-d', $connstr, '-f', '-' ],
		'<', \$session->{in}, '>', \$session->{out}, '2>&1',
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
	return $session;
}

sub ask
{
	my ($session, $sql) = @_;
	send_to($session, $sql);
	return answer_of($session);
}

sub send_to
{
	my ($session, $sql) = @_;
	$session->{out} = '';
	$session->{in} .= "$sql;\n\\echo [done]\n";
	$session->{harness}->pump_nb;
	return;
}

sub answer_of
{
	my ($session) = @_;
	$session->{harness}->pump until $session->{out} =~ /\[done\]\n/;
	my $out = $session->{out} =~ s/\[done\]\n//r;
	$out =~ s/^.*ERROR:\s+(\w{5})/$1/mg;
	chomp $out;
	return $out;
}

sub close_session
{
	my ($session) = @_;
	$session->{in} .= "\\q\n";
	$session->{harness}->finish;
	return;
}

1;
