# What test/run and the other checks in this directory share: a private copy of
# a PostgreSQL installation to install into, the build, the suites, the count.
#
# Settings, from the environment:
#   PG_MAJOR     the major version to test; 15 unless set
#   PG_CONFIG    its pg_config; Debian's place for that major unless set
#   CHROOT_CACHE where the Debians of test/major, the servers of test/asserts and
#                what npm has loaded are kept
#
# A private copy, because `make install` into the system's directories needs
# root, changes what other servers on the machine load, and lets two runs
# collide.  PostgreSQL finds its files relative to its programs, so a copy of
# its directories is an installation of its own.

set -u
export LC_ALL=C.UTF-8 LANG=C.UTF-8	# the test programs unset the first

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PG_MAJOR=${PG_MAJOR:-15}
PG_CONFIG=${PG_CONFIG:-/usr/lib/postgresql/$PG_MAJOR/bin/pg_config}
cache=${CHROOT_CACHE:-${XDG_CACHE_HOME:-/var/cache}/idempotency}

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

# The same for a package that not every system has: it is only installed where
# apt knows it.
wanted=()
want() {
	local package=$1
	shift
	"$@" >/dev/null 2>&1 && return
	# unless its lists are still to come
	[ -z "$(known "$package")" ] && [ "$(apt-get indextargets 2>/dev/null)" ] || wanted+=("$package")
}

# known PACKAGE...: those that apt knows
known() {
	apt-cache show "$@" 2>/dev/null | sed -n 's/^Package: //p' | sort -u
}

# Installs what need() and want() noted, by apt and only as root; else says what
# to do.  One at a time, as checks run side by side.
install_missing() {
	((${#missing[@]} || ${#wanted[@]})) || return 0
	say "missing: ${missing[*]} ${wanted[*]}"
	if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
		give_up "install it first, as root on Debian: apt-get install ${missing[*]} (elsewhere set PG_CONFIG to the pg_config of the server to test)"
	fi
	export DEBIAN_FRONTEND=noninteractive
	flock /run/lock/idempotency-apt.lock apt-get -qq update &&
		flock /run/lock/idempotency-apt.lock apt-get -qq install --no-install-recommends \
			"${missing[@]}" $(known "${wanted[@]}") </dev/null >/dev/null ||
		give_up "could not install ${missing[*]} ${wanted[*]}"
	missing=()
	wanted=()
}

# What it takes to build the extension and to start a server.
need_postgres() {
	need "postgresql-$PG_MAJOR" test -x "$(dirname "$PG_CONFIG")/postgres"
	# its makefiles come with the client already
	need "postgresql-server-dev-$PG_MAJOR" sh -c "test -f \"\$('$PG_CONFIG' --includedir-server)/postgres.h\""
	need make command -v make
	need gcc command -v gcc
}

# What the suites take beside that.
need_suites() {
	local package
	need libipc-run-perl perl -MIPC::Run -e1
	if grep -qs pgbouncer "$root"/t/*.pl; then
		need pgbouncer test -x "$(PATH=$PATH:/usr/sbin command -v pgbouncer)"
	fi
	# what these are for is left out without them
	((EUID != 0)) || for package in redis-server python3-redis python3-psycopg \
		python3-asyncpg python3-sqlalchemy python3-psycopg2 libpostgresql-jdbc-java ruby-pg ruby-activerecord libdbd-pg-perl; do
		want "$package" dpkg -s "$package"
	done
	# 200 MB, once is enough
	if ((EUID == 0 && PG_MAJOR == 15)); then
		want golang-go command -v go
		want golang-github-jackc-pgx-v4-dev dpkg -s golang-github-jackc-pgx-v4-dev
	fi
	# for most of Debian's own PostgreSQL; elsewhere its test is left out
	if ((EUID == 0)) && [[ $PG_CONFIG == /usr/lib/postgresql/* ]]; then
		want "postgresql-$PG_MAJOR-cron" test -e "$("$PG_CONFIG" --pkglibdir)/pg_cron.so"
	fi
}

# Makes $work/src, a copy of the tree, and the private copy of PostgreSQL.
prepare() {
	need_postgres
	need_suites
	install_missing
	make_work
	copy_tree

	# for pg_regress and for the clusters of the TAP tests alike
	export TEMP_CONFIG=$work/postgresql.conf
	echo 'max_prepared_transactions = 20' >"$TEMP_CONFIG"

	copy_postgres
}

# Copies the installation of PG_CONFIG into $work, under the names that it has,
# and makes the copy's pg_config PG_CONFIG.
copy_postgres() {
	local d config=$PG_CONFIG

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
	((EUID != 0)) || chown -R postgres: "$work"
}

# Copies the tree to $work/src.
copy_tree() {
	mkdir "$work/src"
	tar -C "$root" -c --exclude=./.git --exclude=node_modules . | tar -C "$work/src" -x --no-same-owner
	((EUID != 0)) || chown -R postgres: "$work"
}

# Makes $work, which is gone when the run ends, however it ends.
make_work() {
	work=$(mktemp -d /tmp/idempotency.XXXXXX) || give_up 'could not make a directory in /tmp'
	trap clean_up EXIT
	trap 'exit 130' INT TERM HUP
	chmod 755 "$work"
	# its own place goes with $work
	if ((EUID == 0)) && id postgres >/dev/null 2>&1; then
		export npm_config_cache=$cache/npm
		install -d -o postgres "$npm_config_cache"
	fi
}

# Stops what a broken run may have left, then removes $work.
clean_up() {
	local pid
	for pid in $(jobs -p); do
		kill -- "-$pid" && wait "$pid"
	done 2>/dev/null
	for pid in $(find "$work" -name postmaster.pid -exec head -n 1 {} \; 2>/dev/null); do
		kill -QUIT "$pid" 2>/dev/null
	done
	rm -rf "$work"
}

# build [MAKE-ARGUMENT...]: builds anew and installs into the private copy.
build() {
	say "build for $("$PG_CONFIG" --version)"
	as_user make -s -C "$work/src" PG_CONFIG="$PG_CONFIG" clean >/dev/null
	as_user make -s -C "$work/src" PG_CONFIG="$PG_CONFIG" with_llvm=no "$@" all install ||
		give_up 'the build failed'
}

# The value of a variable of our Makefile.
make_variable() {
	make -s -C "$work/src" PG_CONFIG="$PG_CONFIG" --eval="print-it:;@echo \$($1)" print-it
}

# suite NAME LISTED MAKE-ARGUMENT...: runs one suite, its output to the screen
# and to $work/NAME.log.
suite_seconds=1800
suite() {
	local name=$1 listed=$2 status
	shift 2
	say "$name: $listed listed"
	as_user timeout --kill-after=10 $suite_seconds make -s -C "$work/src" PG_CONFIG="$PG_CONFIG" installcheck "$@" \
		</dev/null 2>&1 | tee "$work/$name.log"
	status=${PIPESTATUS[0]}
	# as timeout says it, and if it had to kill
	((status != 124 && status != 137)) || say "$name: not done within $suite_seconds seconds, and stopped"
	return $status
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
# pg_isolation_regress, with what runs a test started by $launcher.  What is
# listed and was not reported as passed failed, so a run that breaks off, or does
# not start, shows.
launcher=
regress_suite() {
	local name=$1 diffs=$work/src/$3 listed ok status
	listed=$(make_variable "$2" | wc -w)
	shift 3
	((listed)) || return 0
	suite "$name" "$listed" "$@" EXTRA_REGRESS_OPTS="--temp-instance=$work/$name --temp-config=$TEMP_CONFIG${launcher:+ --launcher=$launcher}"
	status=$?
	# "test key ... ok 12 ms" up to 15, "ok 1 - key 12 ms" from 16 on
	ok=$(grep -cE '^test .* \.\.\. ok |^ok +[0-9]+ +[-+] ' "$work/$name.log")
	count "$ok" $((listed - ok)) $status && return
	cat "$diffs" 2>/dev/null
	[ -e "$diffs" ] || tail -n 40 "$work/$name/log/"*.log 2>/dev/null
}

# tap_suite FILE...: TAP tests.  Each assertion counts, and so does each file
# that died or did not keep its plan although no assertion failed.
tap_suite() {
	local listed=$# log=$work/tap.log status ok bad name
	((listed)) || return 0
	suite tap "$listed" REGRESS= ISOLATION= PROVE_FLAGS=--verbose PROVE_TESTS="$*"
	status=$?
	ok=$(grep -E '^ok [0-9]+' "$log" | grep -vcE '# skip' -i)
	bad=$(grep -E '^not ok [0-9]+' "$log" | grep -vcE '# todo' -i)
	bad=$((bad + $(grep -cE '^.*\.pl +\(Wstat: .* Failed: 0\)' "$log")))
	((ok + bad > 0)) || bad=$listed
	sed -nE 's/^ok [0-9]+ .*# skip/not run:/Ip; s/^(.*\.pl) \.+ skipped:/not run: \1:/p' "$log"
	count "$ok" "$bad" $status && return
	for name in $(sed -nE 's/^.*\/(.*)\.pl +\(Wstat: .*/\1/p' "$log"); do
		say "end of the log of $name"
		tail -n 60 "$work/src/tmp_check/log/regress_log_$name" 2>/dev/null
	done
}

# What no test may leave in a server's log, whether or not one noticed: a failed
# assertion, a sanitizer's report, a crash (9 is the tests' own kill), a leak.
server_logs() {
	local found
	found=$(grep -rnE 'TRAP: |runtime error: |terminated by signal ([1-8]|1[0-9])\b|WARNING: .*(leak|not closed|you don.t own a lock)' \
		"$work"/src/log "$work"/src/output_iso/log "$work"/src/tmp_check/log --include='*.log' 2>/dev/null)
	[ "$found" ] || return 0
	say 'in the logs of the servers'
	echo "$found" | head -n 40
	failed=$((failed + 1))
}

run_sql_suites() {
	regress_suite regress REGRESS regression.diffs ISOLATION= TAP_TESTS=
	regress_suite isolation ISOLATION output_iso/regression.diffs REGRESS= TAP_TESTS=
}

# Every suite, each run even if one before it failed.
run_suites() {
	run_sql_suites
	tap_suite $(cd "$work/src" && ls t/*.pl 2>/dev/null)
	server_logs
}

# part NAME COMMAND...: starts a check of its own, which ends with a line
# "N passed, N failed"; two at a time, since most of a suite is waiting.
parts=()
part() {
	local log
	[ "$work" ] || make_work
	while (($(jobs -rp | wc -l) >= 2)); do
		wait -n
	done
	parts+=("$1")
	log=$work/part${#parts[@]}
	shift
	set -m					# each in a process group, so that it can be stopped whole
	(
		SECONDS=0
		"$@" </dev/null >"$log" 2>&1
		echo "$? $SECONDS" >"$log.status"
	) &
	set +m
}

# Waits for the parts and shows them in their order, in full if one failed.
finish_parts() {
	local i status seconds ok bad log broken=()
	wait
	for i in "${!parts[@]}"; do
		log=$work/part$((i + 1))
		read -r status seconds <"$log.status"
		read -r ok bad < <(tail -n 1 "$log" | sed -nE 's/^([0-9]+) passed, ([0-9]+) failed$/\1 \2/p')
		if count "${ok:-0}" "${bad:-1}" "$status"; then
			say "${parts[i]}: all $ok passed, $seconds s"
			grep '^not run: ' "$log"
		else
			say "${parts[i]}: FAILED, $seconds s"
			sed '$ s/^\([0-9]* passed\), \([0-9]* failed\)$/(\1 and \2)/' "$log"
			broken+=("$i")
		fi
	done
	# what failed once more, at the end, where a reader looks first
	for i in "${broken[@]}"; do
		say "failed in ${parts[i]}"
		grep -aE '^not ok|^# +(Failed|at |got:|expected:)|FAILED|^failed:|^[-+]([^-+]|$)|warning:|rror:' "$work/part$((i + 1))" | head -n 60
	done
	finish
}
