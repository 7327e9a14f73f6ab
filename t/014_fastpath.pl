# Calls by the protocol's own message for a function call (PQfn of libpq, the
# fastpath of drivers): they carry no expression that tells an argument's type.
use strict;
use warnings;

use IO::Socket::UNIX;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

plan skip_all => 'the server listens on no Unix-domain socket' unless $use_unix_sockets;

my $node = PostgreSQL::Test::Cluster->new('primary');
$node->init;
$node->start;
$node->safe_psql('postgres', q{
	CREATE EXTENSION idempotency;
	CREATE TABLE pay_order (id bigint PRIMARY KEY, state text NOT NULL, version bigint NOT NULL);
	SELECT idempotency.define_machine('pay_order', '{"initial": "CREATED", "transitions": {"CREATED": {"pay": "PAID"}, "PAID": {"close": "CLOSED"}}}');
	SELECT idempotency.attach_machine('pay_order', 'state', 'pay_order');
	SELECT idempotency.attach_version('pay_order', 'version');
	INSERT INTO pay_order VALUES (1, 'CREATED', 1);
});
my $user = $node->safe_psql('postgres', 'SELECT current_user');
my $rel = $node->safe_psql('postgres', q{SELECT 'pay_order'::regclass::oid});
my $client = IO::Socket::UNIX->new(Peer => $node->host . '/.s.PGSQL.' . $node->port)
  or die "could not connect: $!";
$client->print(message('', pack('N', 3 << 16) . "user\0$user\0database\0postgres\0\0"));
replies();

query('BEGIN');
is(call('claim(text,text,jsonb,interval,interval,text)', 'fast', 'c', undef, undef, undef, undef), '(claimed,,)', 'claim');
like(call('complete(text,text,text,jsonb,bigint,interval)', 'fast', 'c', 'answer', '{"a": 1}', undef, undef), qr/^20/, 'complete');
is(call('claim(text,text,jsonb,interval,interval,text)', 'fast', 'f', undef, undef, undef, undef), '(claimed,,)', 'claim another');
like(call('fail(text,text,text,jsonb,bigint,interval)', 'fast', 'f', 'refused', undef, undef, '1 day'), qr/^20/, 'fail');
query('COMMIT');
is(call('claim(text,text,jsonb,interval,interval,text)', 'fast', 'c', undef, undef, undef, undef),
	'(completed,answer,"{""a"": 1}")', 'what complete stored');
is(call('run(text,text,text,jsonb,interval,interval,boolean,text)', 'fast', 'f', 'jsonb_typeof', '[]', undef, undef, 'f', undef),
	'(failed,t,refused,)', 'what fail stored');
is(call('run(text,text,text,jsonb,interval,interval,boolean,text)', 'fast', 'r', 'jsonb_typeof', '[]', undef, undef, 'f', undef),
	'(completed,f,array,)', 'run');
is(call('transition(regclass,text,text,text,jsonb,name)', $rel, '1', 'CREATED', 'PAID', undef, undef),
	'(applied,t,CREATED,PAID)', 'transition');
is(call('fire(regclass,text,text,jsonb,name)', $rel, '1', 'close', undef, undef), '(applied,t,PAID,CLOSED)', 'fire');
is(call('update_if(regclass,text,bigint,jsonb)', $rel, '1', '1', undef), '(conflict,f,3)', 'update_if');
like(call('complete(text,text,anyelement,jsonb,bigint,interval)', 'fast', 'c', '1', undef, undef, undef), qr/^0A000 /,
	'the form for any type is out of reach: PostgreSQL refuses it');

$client->close;
$node->stop;
done_testing();

# call(signature, arguments): the result as text, or SQLSTATE and message
sub call
{
	my ($signature, @arguments) = @_;
	my $oid = $node->safe_psql('postgres', "SELECT 'idempotency.$signature'::regprocedure::oid");
	my $values = join '', map { defined $_ ? pack('N/a*', $_) : pack('N', 0xFFFFFFFF) } @arguments;

	# all arguments and the result in text format
	$client->print(message('F', pack('N n n n', $oid, 1, 0, scalar @arguments) . $values . pack('n', 0)));
	return replies();
}

sub query
{
	my ($sql) = @_;
	my $reply;

	$client->print(message('Q', "$sql\0"));
	$reply = replies();
	die "$sql: $reply" if $reply ne '';
}

sub message
{
	my ($type, $body) = @_;
	return $type . pack('N', 4 + length $body) . $body;
}

# read until the server is ready again: a call's result, an error, or ''
sub replies
{
	my $reply = '';

	while (1)
	{
		my ($type, $length) = unpack('a N', receive(5));
		my $body = receive($length - 4);

		return $reply if $type eq 'Z';
		if ($type eq 'V')
		{
			my $size = unpack('N', $body);
			$reply = $size == 0xFFFFFFFF ? 'NULL' : substr($body, 4);
		}
		elsif ($type eq 'E')
		{
			my %field = map { substr($_, 0, 1) => substr($_, 1) } grep { $_ ne '' } split /\0/, $body;
			$reply = "$field{C} $field{M}";
		}
	}
}

sub receive
{
	my ($size) = @_;
	my $data = '';

	while (length $data < $size)
	{
		$client->read($data, $size - length $data, length $data)
		  or die 'the server has gone';
	}
	return $data;
}
