
# The pages' SQL does what the pages say: README.md and doc/*.md.
#
# Each block that begins with ```sql is fed to psql, block after block, in one
# session, as a reader would paste them.  README.md has a fresh database, every
# page of doc/ a copy of what README.md leaves.  If the next block follows with
# nothing but blank lines between and begins with ``` or ```text, it is what psql
# prints for it (with -q: rows, notices and errors, no command tags).  Without one
# the block has to run without an error.
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
# What begins with ```ini is postgresql.conf's: the server is started with it.  A
# row of a table that begins with a setting has its default next.
#
# README.zh-CN.md and doc/zh-CN/*.md are the same in Chinese: the same headings,
# list items and rows of tables, and every block of code byte for byte.  Links
# lead somewhere on all pages, and every page is linked from its README.

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
my @pages = ('README.md', map { 'doc/' . basename($_) } glob "$root/doc/*.md");
my %text = map { $_ => text_of($_) } map { ($_, translation_of($_)) } @pages;

my $node = PostgreSQL::Test::Cluster->new('readme');
$node->init;
$node->append_conf('postgresql.conf',
	"max_prepared_transactions = 10\nTimeZone = 'UTC'\nlc_messages = 'C'\n");
$node->append_conf('postgresql.conf', $_)
  for map { $text{$_} =~ /^```ini\n(.*?)^```/gms } @pages;
$node->start;
unlike(slurp_file($node->logfile), qr/for parameter "/,
	'the server takes the settings as they are printed');

for my $page (@pages)
{
	my $database = basename($page, '.md');

	$node->safe_psql('postgres', qq{CREATE DATABASE "$database" TEMPLATE }
		  . ($page eq 'README.md' ? 'template0' : '"README"'));
	run_page($page, $database);
	is_translated($page, translation_of($page));
	is_deeply([ dead_links($_) ], [], "$_ has no dead link")
	  for $page, translation_of($page);
	for my $readme ('README.md', 'README.zh-CN.md')
	{
		my $there = $readme eq 'README.md' ? $page : translation_of($page);

		ok($readme eq $there || $text{$readme} =~ /\]\(\Q$there\E[)#]/,
			"$readme links to $there");
	}
}
is_deeply([ map { "doc/zh-CN/" . basename($_) } glob "$root/doc/zh-CN/*.md" ],
	[ map { translation_of($_) } grep { /^doc/ } @pages ],
	'no translation is left over');

# the defaults, as the server prints them
my %default = map { $text{$_} =~ /^\| `(idempotency\.\w+)` \| `?([^`|]*?)`? \|/gm } @pages;
my $settings = $node->safe_psql('README',
	"SELECT name, current_setting(name) FROM pg_settings WHERE name LIKE 'idempotency.%' AND name NOT LIKE '%.purge_%' ORDER BY name");
delete @default{qw(idempotency.purge_databases idempotency.purge_interval)};
is(join("\n", map { "$_|$default{$_}" } sort keys %default),
	$settings, 'the settings are all listed, with their defaults');

# what the catalog has for others, with its arguments or columns
my $reference = join "\n", $text{'doc/reference.md'} =~ /^\|.*/gm;
my @missing;
for my $object (split /\n/, $node->safe_psql('README', q{
	SELECT p.proname || '(' || coalesce((SELECT string_agg(n, ',' ORDER BY i)
		FROM unnest(p.proargnames, p.proargmodes) WITH ORDINALITY a (n, m, i) WHERE coalesce(m, 'i') = 'i'), '') || ')'
	FROM pg_proc p WHERE p.pronamespace = 'idempotency'::regnamespace AND obj_description(p.oid, 'pg_proc') !~ '^internal'
	UNION ALL
	SELECT c.relname || '(' || (SELECT string_agg(attname, ',' ORDER BY attnum) FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0) || ')'
	FROM pg_class c WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('r', 'v') AND obj_description(c.oid, 'pg_class') !~ '^internal'}))
{
	my ($name, $parts) = $object =~ /(.*)\((.*)\)/;
	my @rows = grep { /`(?:CALL )?\Q$name\E[(`]/ } split /\n/, $reference;
	my $short = grep { /`\Q$name\E`/ && !/^\| `\Q$name\E`/ } @rows;    # with a sibling that has the same

	push @missing, $object
	  unless $short || grep { my $row = $_; @rows && !grep { $row !~ /\b\Q$_\E\b/ } split /,/, $parts } @rows;
}
is_deeply(\@missing, [], 'doc/reference.md has every function and view, with all arguments and columns');

$node->stop;
done_testing();

# translation_of(page): the file that has it in Chinese.
sub translation_of
{
	my ($page) = @_;

	return $page eq 'README.md' ? 'README.zh-CN.md' : 'doc/zh-CN/' . basename($page);
}

sub text_of
{
	my ($file) = @_;
	my $text = slurp_file("$root/$file");

	utf8::decode($text);
	return $text;
}

# line_of(text, offset): its number.
sub line_of
{
	my ($text, $offset) = @_;

	return 1 + (substr($text, 0, $offset) =~ tr/\n//);
}

# run_page(page, database): one session for all its blocks, the end of each marked
# in what it prints.
sub run_page
{
	my ($page, $database) = @_;
	my @blocks = blocks_of($page) or return;
	my $mark = '=== end of block';
	my $sql = join '', map { "$_->{sql}\n\\r\n\\echo '$mark'\n" } @blocks;
	my $printed;

	utf8::encode($sql);
	run [ 'psql', '-X', '-q', '-d', $node->connstr($database) ],
	  '<', \$sql, '>&', \$printed;
	utf8::decode($printed);
	my @printed = split /^\Q$mark\E\n/m, $printed, -1;

	for my $n (0 .. $#blocks)
	{
		my $block = $blocks[$n];
		my $name = "$page, line $block->{line}";
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
}

# blocks_of(page): the SQL blocks, each { sql, output or undef, line }.
sub blocks_of
{
	my ($page) = @_;
	my $text = $text{$page};
	my @blocks;

	while ($text =~ /^```sql\n(.*?)^```\n(?:\s*?^```(?:text)?\n(.*?)^```\n)?/gms)
	{
		push @blocks,
		  { sql => $1, output => $2, line => line_of($text, $-[0]) };
	}
	# none is left out because it is indented, say
	is(scalar @blocks, scalar(() = $text =~ /^\s*```+\s*sql\b/gmi),
		"every SQL block of $page is read");
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

# is_translated(page, translation): has it the same outline?
sub is_translated
{
	my ($page, $translation) = @_;
	my @original = outline_of($page);
	my @translated = outline_of($translation);

	cmp_ok(scalar @original, '>', 0, "$page has an outline");
	is(scalar @translated, scalar @original, "$translation has the same");
	for my $n (0 .. $#original)
	{
		my ($here, $there) = ($translated[$n], $original[$n]);

		next if $here && $here->{what} eq $there->{what};
		is($here && $here->{what}, $there->{what},
			($here ? "$translation, line $here->{line}" : $translation)
			  . ", is $page, line $there->{line}");
		last;    # what follows is shifted
	}
}

# outline_of(file): what a translation keeps, each { what, line }: the level of a
# heading, a list item, what the first cell of a table's row has in backquotes, and
# blocks of code.
sub outline_of
{
	my ($file) = @_;
	my $text = $text{$file};
	my @outline;

	while ($text =~ /^(```.*?^```$|#+ |- |\|[^|\n]*\|)/gms)
	{
		my $what = $1;
		my $line = line_of($text, $-[0]);

		$what = join ' ', 'row', $what =~ /`[^`]*`/g if $what =~ /^\|/;
		push @outline, { what => $what, line => $line };
	}
	return @outline;
}

# dead_links(file): the links to headings and files that are not there.
sub dead_links
{
	my ($file) = @_;
	my $text = $text{$file} =~ s/^```.*?^```$//gmsr;
	my $directory = dirname($file);

	return grep {
		my ($path, $anchor) = /^([^#]*)(#.*)?$/;
		my $there = $path eq '' ? $file : clean("$directory/$path");

		!/^https?:/
		  && (!-e "$root/$there"
			|| defined $anchor
			&& !grep { $_ eq $anchor } anchors_of($text{$there} // ''));
	} $text =~ /\]\(([^)]*)\)/g;
}

# clean(path): without . and ..
sub clean
{
	my ($path) = @_;

	$path =~ s{(^|/)\./}{$1}g;
	1 while $path =~ s{(^|/)(?!\.\./)[^/]+/\.\./}{$1};
	return $path;
}

# anchors_of(text): of its headings, as GitHub makes them.
sub anchors_of
{
	my ($text) = @_;

	$text =~ s/^```.*?^```$//gms;
	return map { '#' . (lc($_) =~ s/[^\w -]//gr =~ s/ /-/gr) }
	  $text =~ /^#+ (.*)$/gm;
}
