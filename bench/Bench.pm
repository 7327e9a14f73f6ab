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
		last if system("$bindir/pg_isready -q -t 60 -d postgres") == 0;
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

# A setup script, run by the superuser; psql's variables "rows" and "empty" (the
# library of empty.c) are set.
sub setup
{
	my ($self, $file, $rows) = @_;
	my $empty = "$self->{dir}/empty.so";
	if (!-e $empty)
	{
		my $include = `${\($ENV{PG_CONFIG} // 'pg_config')} --includedir-server`;
		chomp $include;
		run_quietly('cc', qw(-O2 -fPIC -shared -I), $include, '-o', $empty, dirname(__FILE__) . '/empty.c');
	}
	run_quietly("$bindir/psql", qw(-X -q -U postgres -v ON_ERROR_STOP=1 -o /dev/null),
		'-v', "rows=$rows", '-v', "empty=$empty", '-f', $file);
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

# Measure scripts, and those they are compared with, in instructions per
# operation, in a cluster of their own.  The head of bench/instructions says
# what "net", "over" and "goal" in a script mean.  Options: setup (file), rows,
# lengths, mode (of pgbench), goals_only (skip a script that states none),
# cluster (one that is loaded), profile ("yes": inclusive, "no": exclusive).
# Returns a list of { name, title, goal, counted, net, floor }, and with a
# profile one of { name, cost => { function => instructions } }.
sub compare
{
	my ($what, %opt) = @_;
	$opt{rows} //= 100000;
	$opt{lengths} //= [ 200, 1200 ];
	$opt{mode} //= 'prepared';
	my @scripts = map { -d $_ ? grep { !m{(^|/)setup\.sql$} } sort glob "$_/*.sql" : $_ } @$what;
	my (%dirs, %net, %over, %goal, %title, %seen);
	my @setups = $opt{setup} // grep { -e } map { "$_/setup.sql" }
	  grep { !$dirs{$_}++ } map { dirname($_) } @scripts;

	my @todo;
	for my $script (@scripts)
	{
		my $text = slurp($script);
		next if $opt{goals_only} && $text !~ /^-- goal: /m;
		$net{$script} = $text =~ /^-- net: +(.*)$/m ? terms($script, $1) : [ [ 1, $script ] ];
		$over{$script} = terms($script, $1) if $text =~ /^-- over: +(.*)$/m;
		$goal{$script} = [ $1, $2 ] if $text =~ /^-- goal: +(\S+) (\S+)$/m;
		$title{$script} = join ' ', map { /^-- (?!\w+: )(.*)/ ? $1 : () } split /\n/, $text;
		push @todo, $script, map { $_->[1] } @{ $net{$script} }, @{ $over{$script} // [] };
	}
	@todo = grep { !$seen{$_}++ } @todo;

	my $cluster = $opt{cluster} // loaded(\@setups, $opt{rows}, fsync => 'off', full_page_writes => 'off');
	$cluster->stop;
	$cluster->start('callgrind');

	# The first connection to a database writes caches to disk.
	$cluster->count($todo[0], 10, %opt);

	my (%cost, @profiles);
	for my $script (@todo)
	{
		progress(scalar(keys %cost) + 1, scalar @todo, basename($script));
		my @files;
		my @count = map { my $n = $cluster->count($script, $_, %opt); push @files, $cluster->{files}; $n }
		  @{ $opt{lengths} };
		my $operations = $opt{lengths}[1] - $opt{lengths}[0];

		# Two run lengths, so that connecting, planning and the first touch
		# of every cache cancel out.
		$cost{$script} = ($count[1] - $count[0]) / $operations;
		next if !$opt{profile} || !grep { $_ eq $script } @scripts;
		my ($short, $long) = map { by_function($_, $opt{profile}) } @files;
		push @profiles, { name => basename($script, '.sql'),
			cost => { map { $_ => ($long->{$_} - ($short->{$_} // 0)) / $operations } keys %$long } };
	}
	progress();

	my @measured = map {
		my $script = $_;
		my %m = (
			name => basename($script, '.sql'),
			title => ($title{$script} // '') =~ s/\.$//r,
			goal => $goal{$script},
			counted => $cost{$script});
		$m{net} += $_->[0] * $cost{ $_->[1] } for @{ $net{$script} // [] };
		$m{floor} += $_->[0] * $cost{ $_->[1] } for @{ $over{$script} // [] };
		\%m;
	} @todo;
	return (\@measured, \@profiles);
}

# A new cluster, started, with setup scripts run.
sub loaded
{
	my ($setups, $rows, %settings) = @_;
	my $cluster = Bench->new(%settings);
	$cluster->start;
	$cluster->create_database;
	$cluster->setup($_, $rows) for @$setups;
	$cluster->sql('VACUUM ANALYZE');
	return $cluster;
}

# Wait until the backends of app have ended, and reported what they did.
sub settle
{
	my ($self) = @_;
	select undef, undef, undef, 0.01 while $self->value("SELECT count(*) FROM pg_stat_activity WHERE usename = 'app'");
}

# Instructions that client backends spend on so many transactions of a pgbench
# script, connection and planning included.  Leaves the names of the callgrind
# files in $self->{files}.
sub count
{
	my ($self, $script, $transactions, %opt) = @_;
	my $dir = $self->{dir};
	my %old = map { $_ => 1 } glob "$dir/callgrind.*";
	my %idle = map { $_ => 1 } $self->children;
	$self->pgbench($script, %opt, options => [ '-t', $transactions ]);

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

# Run a pgbench script as app, one client unless the options say otherwise;
# returns transactions per second.
sub pgbench
{
	my ($self, $script, %opt) = @_;
	$self->{seed}++;
	my $out = run_quietly("$bindir/pgbench", qw(-n -c 1 -j 1 -U app -M), $opt{mode} // 'prepared',
		'-D', 'rows=' . ($opt{rows} // 0), "--random-seed=$self->{seed}", @{ $opt{options} }, '-f', $script);
	die "$script: failed\n$out" if $out !~ /failed transactions: 0 / || $out !~ /^tps = ([\d.]+)/m;
	return $1;
}

# function => instructions, of callgrind files
sub by_function
{
	my ($files, $inclusive) = @_;
	my %cost;
	for my $file (@$files)
	{
		for (`callgrind_annotate --threshold=100 --auto=no --inclusive=$inclusive $file 2>&1`)
		{
			my ($n, $function) = /^\s*([\d,]+) \([^)]*\)\s+\S*?:(.*)$/ or next;
			$function =~ s{ \[\S*/postgres\]| \[\S*/([^/]+)\]}{defined $1 ? " [$1]" : ""}e;
			$cost{$function} += $n =~ tr/,//dr;
		}
	}
	return \%cost;
}

# "self - a + b" as a list of [sign, file]
sub terms
{
	my ($script, $sum) = @_;
	my @terms;
	while ($sum =~ /([-+])?\s*(\w+)\s*/g)
	{
		my ($sign, $name) = ($1 // '+', $2);
		my ($file) = $name eq 'self' ? $script
		  : grep { -e } map { "$_/$name.sql" } dirname($script), dirname(__FILE__) . '/floors';
		die "$script: no script \"$name\"\n" if !$file;
		push @terms, [ "${sign}1", $file ];
	}
	return \@terms;
}

# The process ids of the server's children.
sub children
{
	my ($self) = @_;
	my $pid = $self->{postmaster};
	return split ' ', slurp("/proc/$pid/task/$pid/children");
}

# Where we are, on a terminal's last line.
sub progress
{
	my ($done, $all, $what) = @_;
	return if !-t STDERR;
	print STDERR "\r\e[K", defined $done ? "$done/$all $what" : '';
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
