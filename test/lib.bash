# What test/run and the other checks in this directory share: a private copy of
# a PostgreSQL installation to install into, the build, the suites, the count.
#
# Settings, from the environment:
#   PG_MAJOR     the major version to test; 15 unless set
#   PG_CONFIG    its pg_config; Debian's place for that major unless set
#
# A private copy, because `make install` into the system's directories needs
# root, changes what other servers on the machine load, and lets two runs
# collide.  PostgreSQL finds its files relative to its programs, so a copy of
# its directories is an installation of its own.

set -u
export LC_ALL=C.UTF-8

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PG_MAJOR=${PG_MAJOR:-15}
PG_CONFIG=${PG_CONFIG:-/usr/lib/postgresql/$PG_MAJOR/bin/pg_config}

strict='-std=gnu11 -Wall -Wextra -Werror -Wno-unused-parameter -Wno-sign-compare -DUSE_ASSERT_CHECKING'

passed=0
failed=0
work=

say() {
	printf '\n=== %s\n' "$*"
}

# The last line of a run, and its exit code.  Nothing run is a failure.
finish() {
	printf '\n%d passed, %d failed\n' "$passed" "$failed"
	((failed == 0 && passed > 0))
	exit
}

# give_up MESSAGE: for what makes every further step pointless.
give_up() {
	say "$*"
	failed=$((failed + 1))
	finish
}

# Everything but the installing of packages runs as an ordinary user: a server
# refuses to run as root.
as_user() {
	if ((EUID == 0)); then
		(cd "$work" && HOME=$work exec runuser -u postgres -- "$@")
	else
		"$@"
	fi
}

# need PACKAGE COMMAND...: COMMAND succeeds if PACKAGE is there.  Notes what is
# missing, for install_missing.
missing=()
need() {
	local package=$1
	shift
	"$@" >/dev/null 2>&1 || missing+=("$package")
}

# Installs what need() noted, by apt and only as root; else says what to do.
install_missing() {
	((${#missing[@]})) || return 0
	say "missing: ${missing[*]}"
	if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
		give_up "install it first, as root on Debian: apt-get install ${missing[*]} (elsewhere set PG_CONFIG to the pg_config of the server to test)"
	fi
	export DEBIAN_FRONTEND=noninteractive
	apt-get -qq update </dev/null && apt-get -qq install --no-install-recommends "${missing[@]}" </dev/null >/dev/null ||
		give_up "could not install ${missing[*]}"
	missing=()
}

need_postgres() {
	need "postgresql-$PG_MAJOR" test -x "$(dirname "$PG_CONFIG")/postgres"
	need "postgresql-server-dev-$PG_MAJOR" sh -c "test -f \"\$('$PG_CONFIG' --pgxs)\""
	need make command -v make
	need gcc command -v gcc
	need libipc-run-perl perl -MIPC::Run -e1
	if grep -qs pgbouncer "$root"/t/*.pl; then
		need pgbouncer test -x "$(PATH=$PATH:/usr/sbin command -v pgbouncer)"
	fi
}

# Makes $work: $work/src, a copy of the tree, and beside it the private copy of
# the installation, whose pg_config is then PG_CONFIG.  Gone when the run ends.
prepare() {
	local d config=$PG_CONFIG

	need_postgres
	install_missing
	work=$(mktemp -d /tmp/idempotency.XXXXXX) || give_up 'could not make a directory in /tmp'
	trap clean_up EXIT
	trap 'exit 130' INT TERM HUP
	chmod 755 "$work"
	mkdir "$work/src"
	tar -C "$root" -c --exclude=./.git . | tar -C "$work/src" -x --no-same-owner

	for d in $("$config" --bindir) $("$config" --pkglibdir) $("$config" --sharedir); do
		mkdir -p "$work$d"
		cp -a "$d/." "$work$d"
	done
	rm -rf "$work$("$config" --pkglibdir)"/{bitcode,idempotency.so} "$work$("$config" --sharedir)"/extension/idempotency*
	for d in $("$config" --includedir) $("$config" --includedir-server) $("$config" --libdir); do
		[ -e "$work$d" ] || { mkdir -p "$(dirname "$work$d")" && ln -s "$d" "$work$d"; }
	done
	PG_CONFIG=$work$("$config" --bindir)/pg_config
	export PATH=$work$("$config" --bindir):$PATH

	# for pg_regress and for the clusters of the TAP tests alike
	export TEMP_CONFIG=$work/postgresql.conf
	echo 'max_prepared_transactions = 20' >"$TEMP_CONFIG"

	((EUID != 0)) || chown -R postgres: "$work"
	as_user make -s -C "$work/src" PG_CONFIG="$PG_CONFIG" clean >/dev/null
}

# Stops what a broken run may have left, then removes $work.
clean_up() {
	local pid_file
	for pid_file in $(find "$work" -name postmaster.pid 2>/dev/null); do
		kill -QUIT "$(head -n 1 "$pid_file")" 2>/dev/null
	done
	rm -rf "$work"
}

# build [MAKE-ARGUMENT...]: builds and installs into the private copy.
build() {
	say "build for $("$PG_CONFIG" --version)"
	as_user make -s -C "$work/src" PG_CONFIG="$PG_CONFIG" with_llvm=no "$@" all install ||
		give_up 'the build failed'
}

# The value of a variable of our Makefile.
make_variable() {
	make -s -C "$work/src" PG_CONFIG="$PG_CONFIG" --eval="print-it:;@echo \$($1)" print-it
}

# suite NAME LISTED MAKE-ARGUMENT...: runs one suite, its output to the screen
# and to $work/NAME.log.  A suite has 10 minutes.
suite() {
	local name=$1 listed=$2
	shift 2
	say "$name: $listed listed"
	as_user timeout --kill-after=10 600 make -s -C "$work/src" PG_CONFIG="$PG_CONFIG" installcheck "$@" \
		</dev/null 2>&1 | tee "$work/$name.log"
	return "${PIPESTATUS[0]}"
}

# count PASSED FAILED STATUS: a suite that says it failed has a failure.
count() {
	local ok=$1 bad=$2 status=$3
	((status == 0 || bad > 0)) || bad=1
	passed=$((passed + ok))
	failed=$((failed + bad))
	((bad == 0))
}

# regress_suite NAME VARIABLE DIFFS MAKE-ARGUMENT...: pg_regress or
# pg_isolation_regress.  What is listed and was not reported as passed failed,
# so a run that breaks off, or does not start, shows.
regress_suite() {
	local name=$1 diffs=$work/src/$3 listed ok status
	listed=$(make_variable "$2" | wc -w)
	shift 3
	((listed)) || return 0
	suite "$name" "$listed" "$@" EXTRA_REGRESS_OPTS="--temp-instance=$work/$name --temp-config=$TEMP_CONFIG"
	status=$?
	# "test key ... ok 12 ms" up to 15, "ok 1 - key 12 ms" from 16 on
	ok=$(grep -cE '^test .* \.\.\. ok |^ok +[0-9]+ +[-+] ' "$work/$name.log")
	count "$ok" $((listed - ok)) $status && return
	cat "$diffs" 2>/dev/null
	[ -e "$diffs" ] || tail -n 40 "$work/$name/log/"*.log 2>/dev/null
}

# The TAP tests: each assertion counts, and so does each file that died or did
# not keep its plan although no assertion failed.
tap_suite() {
	local listed log=$work/tap.log status ok bad name
	listed=$(ls "$work"/src/t/*.pl 2>/dev/null | wc -l)
	((listed)) || return 0
	suite tap "$listed" REGRESS= ISOLATION= PROVE_FLAGS=--verbose
	status=$?
	ok=$(grep -E '^ok [0-9]+' "$log" | grep -vcE '# skip' -i)
	bad=$(grep -E '^not ok [0-9]+' "$log" | grep -vcE '# todo' -i)
	bad=$((bad + $(grep -cE '^t/.*\(Wstat: .* Failed: 0\)' "$log")))
	((ok + bad > 0)) || bad=$listed
	if grep -iE '^ok.*# skip|\.\. skipped:|^1\.\.0 # skip' "$log"; then
		say 'the lines above were skipped'
	fi
	count "$ok" "$bad" $status && return
	for name in $(sed -nE 's/^t\/(.*)\.pl +\(Wstat: .*/\1/p' "$log"); do
		say "end of the log of $name"
		tail -n 60 "$work/src/tmp_check/log/regress_log_$name" 2>/dev/null
	done
}

# Every suite, each run even if one before it failed.
run_suites() {
	regress_suite regress REGRESS regression.diffs ISOLATION= TAP_TESTS=
	regress_suite isolation ISOLATION output_iso/regression.diffs REGRESS= TAP_TESTS=
	tap_suite
}
