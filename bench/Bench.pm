# Bench.pm - what bench/run and bench/instructions share: a throw-away
# cluster, and instructions per operation counted by callgrind in real
# backends.
#
# Works as root (the server then runs as postgres) and as a normal user.
# PG_CONFIG chooses the installation; TMPDIR the place of the cluster.
package Bench;

use strict;
use warnings;
use File::Basename;
use File::Path qw(remove_tree);
use File::Temp qw(tempdir);

our $bindir = `${\($ENV{PG_CONFIG} // 'pg_config')} --bindir`;
chomp $bindir;

# What every cluster has: nothing in the background that could disturb.
my %settings = (
	autovacuum => 'off',
	checkpoint_timeout => '1d',
	listen_addresses => "''",
	log_min_messages => 'warning',
	max_connections => 100,
	max_wal_size => '64GB',
	shared_buffers => '1GB');

# A new cluster, not started; removed when the object goes.
sub new
{
	my ($class, %more) = @_;
	my $dir = tempdir('idempotency-bench-XXXXXX', TMPDIR => 1);
	my $self = bless { dir => $dir, owner => $$, seed => 0 }, $class;

	if ($> == 0)
	{
		my (undef, undef, $uid, $gid) = getpwnam('postgres');
		$self->{as} = [qw(runuser -u postgres --)];
		chown $uid, $gid, $dir;
	}
	chmod 0755, $dir;
	$ENV{PGHOST} = $dir;
	$ENV{PGPORT} = 5432;
	$ENV{PGDATABASE} = 'bench';
	delete @ENV{qw(PGUSER PGOPTIONS PGSERVICE)};

	$self->server("$bindir/initdb", '-D', "$dir/data", qw(-U postgres -A trust),
		qw(-N -E UTF8 --locale=C.UTF-8));
	my %all = (%settings, unix_socket_directories => "'$dir'", %more);
	open my $conf, '>>', "$dir/data/postgresql.conf" or die "$dir: $!\n";
	print $conf map { "$_ = $all{$_}\n" } sort keys %all;
	close $conf;
	return $self;
}

sub DESTROY
{
	my $self = shift;
	return if $self->{owner} != $$;
	local ($?, $@);
	$self->stop;
	remove_tree($self->{dir}, { safe => 0 });
}

# Run a command as the server's user; its output is shown only if it fails.
sub server
{
	my ($self, @cmd) = @_;
	my $log = "$self->{dir}.log";
	my $cmd = join ' ', map { quote($_) } @{ $self->{as} // [] }, @cmd;
	system("cd / && $cmd >$log 2>&1 </dev/null") == 0
	  or die "failed: @cmd\n" . slurp($log);
	unlink $log;
}

# Start the server, under callgrind if asked.
sub start
{
	my ($self, $callgrind) = @_;
	my $dir = $self->{dir};
	my @cmd = ("$bindir/postgres", '-D', "$dir/data");

	# Only what a client's backend does is counted; forked children are
	# traced as they are and write a file each.
	unshift @cmd, qw(valgrind --quiet --tool=callgrind --trace-children=yes
	  --toggle-collect=PostgresMain), "--callgrind-out-file=$dir/callgrind.%p"
	  if $callgrind;
	defined(my $pid = fork) or die "fork: $!\n";
	if ($pid == 0)
	{
		chdir '/';
		open STDIN, '<', '/dev/null';
		open STDOUT, '>>', "$dir.server.log";
		open STDERR, '>&', \*STDOUT;
		exec @{ $self->{as} // [] }, @cmd;
		die "$cmd[0]: $!\n";
	}
	$self->{pid} = $pid;
	for (1 .. 600)
	{
		last if system("$bindir/pg_isready -q -t 1 -d postgres") == 0;
		die "the server did not start:\n" . slurp("$dir.server.log")
		  if waitpid($pid, 1) != 0;
		select undef, undef, undef, 0.2;
	}
	($self->{postmaster}) = split /\n/, slurp("$dir/data/postmaster.pid");
}

sub stop
{
	my ($self, $signal) = @_;
	if ($self->{pid})
	{
		kill $signal // 'INT', $self->{postmaster} // $self->{pid};
		waitpid $self->{pid}, 0;
		delete @$self{qw(pid postmaster)};
	}
	unlink "$self->{dir}.server.log";
}

# Make the database and the roles: the extension and its setup belong to a
# superuser, all measured statements are sent by the unprivileged role app.
sub create_database
{
	my ($self) = @_;
	$self->sql('CREATE ROLE app LOGIN; CREATE DATABASE bench', 'postgres');
	$self->sql('GRANT CREATE ON SCHEMA public TO app');
	my $has = $self->value("SELECT count(*) FROM pg_available_extensions WHERE name = 'idempotency'");
	$self->sql("CREATE EXTENSION idempotency; SELECT idempotency.grant_usage('app')") if $has;
	return $has;
}

# A setup script, run by the superuser, psql variable "rows" set.
sub setup
{
	my ($self, $file, $rows) = @_;
	run_quietly("$bindir/psql", qw(-X -q -U postgres -v ON_ERROR_STOP=1 -o /dev/null -v), "rows=$rows", '-f', $file);
	$self->sql('GRANT ALL ON ALL TABLES IN SCHEMA public TO app;'
		  . 'GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO app');
}

sub sql
{
	my ($self, $sql, $db) = @_;
	run_quietly("$bindir/psql", qw(-X -q -U postgres -v ON_ERROR_STOP=1 -o /dev/null),
		'-d', $db // 'bench', map { ('-c', $_) } split /; ?/, $sql);
}

# The one value that a query gives.
sub value
{
	my ($self, $sql) = @_;
	open my $out, '-|', "$bindir/psql", qw(-X -q -A -t -U postgres -v ON_ERROR_STOP=1 -c), $sql
	  or die "psql: $!\n";
	my $value = <$out>;
	close $out or die "failed: $sql\n";
	chomp $value;
	return $value;
}

# Instructions that client backends spend on so many transactions of a pgbench
# script, connection and planning included.  Leaves the callgrind files' names
# in $self->{files}.
sub count
{
	my ($self, $script, $transactions, $rows, $mode) = @_;
	my $dir = $self->{dir};
	my %old = map { $_ => 1 } glob "$dir/callgrind.*";
	my %idle = map { $_ => 1 } $self->children;
	$self->{seed}++;
	my $out = run_quietly("$bindir/pgbench", qw(-n -c 1 -j 1 -U app -M), $mode, '-t', $transactions,
		'-D', "rows=$rows", "--random-seed=$self->{seed}", '-f', $script);
	die "$script: failed\n$out" if $out !~ /failed transactions: 0 /;

	# A backend writes its file when it ends.
	select undef, undef, undef, 0.05 while grep { !$idle{$_} } $self->children;
	$self->{files} = [ grep { !$old{$_} } glob "$dir/callgrind.*" ];
	my $sum = 0;
	for my $file (@{ $self->{files} })
	{
		$sum += $1 if slurp($file) =~ /^totals: (\d+)/m;
	}
	return $sum;
}

# Instructions per operation: two run lengths, so that connecting, planning
# and the first touch of every cache cancel out.
sub instructions
{
	my ($self, $script, %opt) = @_;
	my ($short, $long) = @{ $opt{lengths} // [ 200, 1200 ] };
	my @count;
	for my $n ($short, $long)
	{
		push @count, $self->count($script, $n, $opt{rows} // 100000, $opt{mode} // 'prepared');
		push @{ $self->{profiles} }, $self->{files} if $opt{profile};
	}
	return ($count[1] - $count[0]) / ($long - $short);
}

# Where the instructions of the last two counts went: function => per operation.
sub profile
{
	my ($self, $short, $long, $inclusive) = @_;
	my @cost = map {
		my %cost;
		for my $file (@$_)
		{
			for (`callgrind_annotate --threshold=100 --auto=no --inclusive=$inclusive $file 2>&1`)
			{
				next if !/^\s*([\d,]+) \([^)]*\)\s+\S*?:(.*)$/;
				my ($n, $function) = ($1, $2);
				$function =~ s{ \[\S*/postgres\]| \[\S*/([^/]+)\]}{defined $1 ? " [$1]" : ""}e;
				$cost{$function} += $n =~ tr/,//dr;
			}
		}
		\%cost;
	} @{ $self->{profiles} };
	delete $self->{profiles};
	return { map { $_ => ($cost[1]{$_} - ($cost[0]{$_} // 0)) / ($long - $short) } keys %{ $cost[1] } };
}

sub children
{
	my ($self) = @_;
	my $pid = $self->{postmaster};
	return split ' ', slurp("/proc/$pid/task/$pid/children");
}

# Run a command, return its output, die with it if it fails.
sub run_quietly
{
	my @cmd = @_;
	my $out = `${\join ' ', map { quote($_) } @cmd} 2>&1 </dev/null`;
	die "failed: @cmd\n$out" if $? != 0;
	return $out;
}

sub quote
{
	my ($word) = @_;
	$word =~ s/'/'\\''/g;
	return "'$word'";
}

sub slurp
{
	my ($file) = @_;
	local $/;
	open my $in, '<', $file or die "$file: $!\n";
	return scalar <$in> // '';
}

1;
