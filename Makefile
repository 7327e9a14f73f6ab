EXTENSION = idempotency
MODULE_big = idempotency
OBJS = src/idempotency.o src/lock.o src/table.o src/claim.o src/key.o src/run.o src/lease.o src/outbox.o
DATA = sql/idempotency--1.0.sql
PGFILEDESC = "idempotency - a retried request runs once"

# Named one by one: a wildcard installs nothing in a VPATH build.
REGRESS = outbox
ISOLATION = outbox_order outbox_late outbox_ack outbox_serializable
REGRESS_OPTS = --inputdir=$(srcdir)/test --load-extension=idempotency
ISOLATION_OPTS = --load-extension=idempotency
TAP_TESTS = 1

EXTRA_CLEAN = output_iso results tmp_check

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

$(OBJS): src/idempotency.h src/errors.h src/compat.h
