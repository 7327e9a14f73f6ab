EXTENSION = idempotency
MODULE_big = idempotency
OBJS = \
	src/idempotency.o \
	src/own.o \
	src/lock.o \
	src/table.o \
	src/claim.o \
	src/key.o \
	src/run.o \
	src/lease.o \
	src/fence.o \
	src/insight.o \
	src/purge.o \
	src/worker.o \
	src/insert_once.o \
	src/outbox.o \
	src/token.o \
	src/machine.o \
	src/table_info.o \
	src/guard.o \
	src/attach.o \
	src/transition.o \
	src/version.o
DATA = sql/idempotency--1.0.sql
PGFILEDESC = "idempotency - a retried request runs once"

# Named one by one: a wildcard installs nothing in a VPATH build.
REGRESS = \
	altered \
	altered_type \
	collision \
	fence \
	hand_made \
	hint \
	insert_once \
	insight \
	key_claim \
	key_effect \
	key_expiry \
	key_input \
	key_savepoint \
	lease \
	machine_define \
	machine_guard \
	machine_partition \
	machine_transition \
	machine_types \
	outbox \
	own \
	privilege \
	purge \
	rare \
	readonly \
	run \
	settings \
	token \
	token_form \
	token_fuzz \
	version
ISOLATION = \
	altered_race \
	insert_once_race \
	key_bounded \
	key_collision \
	key_deadlock \
	key_expired \
	key_isolation \
	key_mismatch \
	key_own_write \
	key_replays \
	key_wait \
	lease_takeover \
	machine_ddl \
	machine_race \
	outbox_ack \
	outbox_busy \
	outbox_late \
	outbox_order \
	outbox_purge \
	outbox_serializable \
	privilege_race \
	purge_race \
	run_snapshot \
	token_consume \
	token_revoke \
	token_table \
	version_race
REGRESS_OPTS = --inputdir=$(srcdir)/test --encoding=UTF8 --load-extension=idempotency
ISOLATION_OPTS = --load-extension=idempotency
TAP_TESTS = 1

# The library tells its version on 18 and later.
DISTVERSION = $(shell sed -n 's/^  "version": "\(.*\)",$$/\1/p' $(srcdir)/META.json)
override PG_CPPFLAGS += -DIDEMPOTENCY_VERSION='"$(DISTVERSION)"'

EXTRA_CLEAN = output_iso results tmp_check

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

# In a VPATH build the objects' directory is not there.
$(shell mkdir -p src)

$(OBJS): src/idempotency.h src/errors.h src/compat.h src/machine.h

# The archive for PGXN: what is committed, under the version of META.json.
.PHONY: dist
dist:
	git -C $(srcdir) archive --format=zip --prefix=idempotency-$(DISTVERSION)/ --output=$(CURDIR)/idempotency-$(DISTVERSION).zip HEAD
