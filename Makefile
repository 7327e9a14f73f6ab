EXTENSION = idempotency
MODULE_big = idempotency
OBJS = \
	src/init.o \
	src/base/activity.o \
	src/base/call.o \
	src/base/settings.o \
	src/base/shared.o \
	src/base/siphash.o \
	src/base/subxact.o \
	src/base/time.o \
	src/store/citus.o \
	src/store/lock.o \
	src/store/own.o \
	src/store/row.o \
	src/store/rows.o \
	src/store/sample.o \
	src/store/secret.o \
	src/store/tables.o \
	src/table/convert.o \
	src/table/fence.o \
	src/table/insert_once.o \
	src/table/plans.o \
	src/table/table_info.o \
	src/table/trigger.o \
	src/table/update.o \
	src/table/user_table.o \
	src/table/version.o \
	src/key/claim.o \
	src/key/fingerprint.o \
	src/key/held.o \
	src/key/key.o \
	src/key/lease.o \
	src/key/run.o \
	src/token/form.o \
	src/token/signing_key.o \
	src/token/token.o \
	src/outbox/counts.o \
	src/outbox/event.o \
	src/outbox/floor.o \
	src/outbox/lease.o \
	src/outbox/outbox.o \
	src/outbox/share.o \
	src/outbox/take.o \
	src/outbox/turn.o \
	src/outbox/wait.o \
	src/outbox/wake.o \
	src/machine/attach.o \
	src/machine/definition.o \
	src/machine/diagram.o \
	src/machine/guard.o \
	src/machine/history.o \
	src/machine/machine.o \
	src/machine/moving.o \
	src/machine/transition.o \
	src/upkeep/counts.o \
	src/upkeep/find.o \
	src/upkeep/insight.o \
	src/upkeep/purge.o \
	src/upkeep/worker.o
DATA = sql/idempotency--1.0.sql
PGFILEDESC = "idempotency - a retried request runs once"

# Named one by one: a wildcard installs nothing in a VPATH build.
REGRESS = \
	altered \
	altered_type \
	fence \
	fingerprint \
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
	secret \
	settings \
	token \
	token_form \
	token_fuzz \
	version
ISOLATION = \
	altered_race \
	insert_once_race \
	key_bounded \
	key_deadlock \
	key_expired \
	key_holder \
	key_isolation \
	key_mismatch \
	key_own_write \
	key_reindex \
	key_replays \
	key_secret \
	key_wait \
	lease_takeover \
	machine_ddl \
	machine_detach \
	machine_dropped_table \
	machine_race \
	machine_snapshot \
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
override PG_CPPFLAGS += -I$(srcdir)/src -DIDEMPOTENCY_VERSION='"$(DISTVERSION)"'

# A build for test/collisions, with a setting that makes hashes collide.
ifdef COLLISIONS
override PG_CPPFLAGS += -DIK_COLLISIONS
REGRESS += collision
ISOLATION += key_collision
endif

EXTRA_CLEAN = output_iso results tmp_check

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

# In a VPATH build the directories of the objects are not there.
$(shell mkdir -p $(sort $(dir $(OBJS))))

$(OBJS): $(wildcard $(srcdir)/src/*/*.h)

# The archive for PGXN: what is committed, under the version of META.json.  A zip
# holds local times: with one zone, a commit has one archive.
.PHONY: dist
dist:
	TZ=UTC git -C $(srcdir) archive --format=zip --prefix=idempotency-$(DISTVERSION)/ --output=$(CURDIR)/idempotency-$(DISTVERSION).zip HEAD
