
# The README's SQL does what the README says.
#
# Each block that begins with ```sql is fed to psql, block after block, in one
# session in a fresh database, as a reader would paste them.  If the next block
# follows with nothing but blank lines between and begins with ``` or ```text,
# it is what psql prints for it (with -q: rows, notices and errors, no command
# tags).  Without one the block has to run without an error.
#
# Compared line by line: blanks at the ends and around | and + do not count, nor do
# row counts and the length of a row of dashes: a table may be as wide as it likes.
# A value that differs from run to run is shown in part, with … for the rest:
#
#     ```sql
#     SELECT token, issued_at FROM ...;
#     ```
#
#     ```text
#      token |  issued_at
#     -------+-------------
#      AQE…  | 2026-…
#     ```
#
# SQL to be shown and not run (it needs another extension, say) is ```postgresql.
# README.zh-CN.md is the same in Chinese: the same headings, list items and rows
# of tables, and every block of code byte for byte.  Links lead somewhere in both.

use strict;
use warnings;
use utf8;
use open qw(:std :encoding(UTF-8));

use File::Basename qw(basename dirname);
use IPC::Run qw(run);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $root = dirname(__FILE__) . '/..';
my @blocks = blocks_of("$root/README.md");
cmp_ok(scalar @blocks, '>', 0, 'README.md has SQL');

my $node = PostgreSQL::Test::Cluster->new('readme');
$node->init;
$node->append_conf('postgresql.conf',
	"max_prepared_transactions = 10\nTimeZone = 'UTC'\nlc_messages = 'C'\n");
$node->start;

# One session for all, the end of each block marked in what it prints.
my $mark = '=== end of block';
my $sql = join '', map { "$_->{sql}\n\\r\n\\echo '$mark'\n" } @blocks;
my $printed;
utf8::encode($sql);
run [ 'psql', '-X', '-q', '-d', $node->connstr('postgres') ],
  '<', \$sql, '>&', \$printed;
utf8::decode($printed);
my @printed = split /^\Q$mark\E\n/m, $printed, -1;

for my $n (0 .. $#blocks)
{
	my $block = $blocks[$n];
	my $name = "README.md, line $block->{line}";
	my $got = $printed[$n] // 'psql ended before this block';

	if ($block->{sql} !~ /(;|\\g\w*[^\n]*|^\\[^\n]*)\s*(--[^\n]*)?\s*\z/m)
	{
		fail("$name ends its last statement");
	}
	elsif (defined $block->{output})
	{
		ok(same($got, $block->{output}), $name)
		  or diag("printed:\n$got\nshown:\n$block->{output}");
	}
	else
	{
		unlike($got, qr/^(ERROR|FATAL|PANIC|invalid|\\|psql)/m, "$name runs");
	}
}

my @original = outline_of("$root/README.md");
my @translated = outline_of("$root/README.zh-CN.md");
my $last = @original > @translated ? $#original : $#translated;

for my $n (0 .. $last)
{
	my ($here, $there) = ($translated[$n], $original[$n]);

	next
	  if defined $here && defined $there && $here->{what} eq $there->{what};
	is($here && $here->{what}, $there && $there->{what},
		'README.zh-CN.md'
		  . ($here ? ", line $here->{line}" : '')
		  . ', is README.md'
		  . ($there ? ", line $there->{line}" : ''));
	last;    # what follows is shifted
}
cmp_ok(scalar @original, '>', 0, 'README.md has an outline');
is(scalar @translated, scalar @original, 'README.zh-CN.md has the same');

for my $file ('README.md', 'README.zh-CN.md')
{
	is_deeply([ dead_links("$root/$file") ], [], "$file has no dead link");
}

$node->stop;
done_testing();

# blocks_of(file): the SQL blocks, each { sql, output or undef, line }.
sub blocks_of
{
	my ($file) = @_;
	my @blocks;
	my $text = slurp_file($file);

	utf8::decode($text);
	while ($text =~ /^```sql\n(.*?)^```\n(?:\s*?^```(?:text)?\n(.*?)^```\n)?/gms)
	{
		push @blocks,
		  {
			sql => $1,
			output => $2,
			line => 1 + (substr($text, 0, $-[0]) =~ tr/\n//)
		  };
	}
	# none is left out because it is indented, say
	is(scalar @blocks, scalar(() = $text =~ /^\s*```+\s*sql\b/gmi),
		'every SQL block of ' . basename($file) . ' is read');
	return @blocks;
}

# same(printed, shown): equal but for widths, and for what … stands for?
sub same
{
	my ($printed, $shown) = map { plain($_) } @_;
	my $pattern = join '.*', map { quotemeta } split /…/, $shown, -1;

	return $printed =~ /\A$pattern\z/;
}

# plain(text): without what only the width of a column decides.
sub plain
{
	my ($text) = @_;

	$text =~ s/^\(\d+ rows?\)$//gm;
	$text =~ s/-{2,}/--/g;
	$text =~ s/[ \t]*([|+])[ \t]*/$1/g;
	$text =~ s/[ \t]+/ /g;
	$text =~ s/^ | $//gm;
	$text =~ s/\n+/\n/g;
	$text =~ s/\A\n|\n\z//g;
	return $text;
}

# outline_of(file): what a translation keeps, each { what, line }: the level of a
# heading, a list item, what the first cell of a table's row has in backquotes, and
# blocks of code.
sub outline_of
{
	my ($file) = @_;
	my @outline;
	my $text = slurp_file($file);

	utf8::decode($text);
	while ($text =~ /^(```.*?^```$|#+ |- |\|[^|\n]*\|)/gms)
	{
		my $what = $1;
		my $line = 1 + (substr($text, 0, $-[0]) =~ tr/\n//);

		$what = join ' ', 'row', $what =~ /`[^`]*`/g if $what =~ /^\|/;
		push @outline, { what => $what, line => $line };
	}
	return @outline;
}

# dead_links(file): the links to headings and files that are not there.
sub dead_links
{
	my ($file) = @_;
	my $text = slurp_file($file);
	my %anchors;

	utf8::decode($text);
	$text =~ s/^```.*?^```$//gms;
	while ($text =~ /^#+ (.*)$/gm)
	{
		my $anchor = lc $1;

		$anchor =~ s/[^\w -]//g;
		$anchor =~ s/ /-/g;
		$anchors{"#$anchor"} = 1;
	}
	return grep { !/^https?:/ && !$anchors{$_} && !-e "$root/$_" }
	  $text =~ /\]\(([^)]*)\)/g;
}
