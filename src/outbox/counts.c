/*-------------------------------------------------------------------------
 *
 * counts.c
 *		What an operator sees and sets: topics, and parked events.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox/outbox.h"

#include <math.h>

#include "access/tableam.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

/*
 * So many entries of the index are looked at, for all topics together, to tell
 * exactly what a sample of a large table can only guess: a tenth of a second's
 * work at the most.
 */
#define MAX_LOOKED	10000

/* what is known of a topic */
typedef struct TopicCount
{
	char		topic[MAX_TOPIC_LENGTH + 1];	/* hash key */
	int64		ready;
	int64		delayed;
	int64		leased;
	int64		parked;
	TimestampTz oldest;			/* since when one could go; DT_NOEND: none */
} TopicCount;

/* what count_event() works with */
typedef struct TopicCounts
{
	HTAB	   *topics;
	Outbox		box;
	BlockLeases leases;
} TopicCounts;

PG_FUNCTION_INFO_V1(idempotency_topic_counts);
PG_FUNCTION_INFO_V1(idempotency_parked);
PG_FUNCTION_INFO_V1(idempotency_set_topic);

static void count_event(TupleTableSlot *slot, void *arg);
static TopicCount *topic_count(HTAB *topics, Datum topic);
static bool next_topic(OwnRows *events, TupleTableSlot *event, text **topic);
static void count_exactly(TopicCounts *counts, text *topic, int *looked);
static IndexScanDesc scan_due(OwnRows *events, text *topic, Snapshot snapshot,
							  TimestampTz due);

/*
 * topic_counts() RETURNS TABLE (topic, ready, delayed, leased, parked, oldest,
 * estimate)
 *
 * The events of each topic as it stands now: to be handed out (those behind
 * another one of their key included), waiting for a time, out, and parked; and
 * since when the oldest waits that need not wait for its time: a delay is no
 * delivery that is late.  Of a large table, the counts come from a sample; then
 * estimate is true.
 */
Datum
idempotency_topic_counts(PG_FUNCTION_ARGS)
{
	static const Oid types[7] = {
		TEXTOID, INT8OID, INT8OID, INT8OID, INT8OID, TIMESTAMPTZOID, BOOLOID
	};
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	HASHCTL		ctl = {
		.keysize = MAX_TOPIC_LENGTH + 1,
		.entrysize = sizeof(TopicCount),
		.hcxt = CurrentMemoryContext
	};
	TopicCounts counts = {
		.topics = hash_create("idempotency topics", 64, &ctl,
							  HASH_ELEM | HASH_STRINGS | HASH_CONTEXT),
		.leases = {.block = -1}
	};
	Outbox	   *box = &counts.box;
	HASH_SEQ_STATUS seq;
	TopicCount *count;
	double		factor;

	InitMaterializedSRF(fcinfo, 0);
	ik_check_columns(result->setDesc, lengthof(types), types);
	ik_open_rows(&box->events, &ik_outbox, AccessShareLock);
	ik_open_rows(&box->leases, &ik_outbox_leases, AccessShareLock);
	box->event = table_slot_create(box->events.rel, NULL);
	box->lease = table_slot_create(box->leases.rel, NULL);
	box->now = GetCurrentTimestamp();

	factor = ik_sample(box->events.rel, count_event, &counts);
	/* too many to read all: an estimate, and rare topics by themselves */
	if (factor > 1)
	{
		text	   *topic = NULL;
		int			looked = 0;

		hash_seq_init(&seq, counts.topics);
		while ((count = hash_seq_search(&seq)) != NULL)
		{
			count->ready = rint(count->ready * factor);
			count->delayed = rint(count->delayed * factor);
			count->leased = rint(count->leased * factor);
			count->parked = rint(count->parked * factor);
		}
		/* a sample misses topics of few events; the index has them all */
		while (looked < MAX_LOOKED && next_topic(&box->events, box->event, &topic))
			count_exactly(&counts, topic, &looked);
	}

	hash_seq_init(&seq, counts.topics);
	while ((count = hash_seq_search(&seq)) != NULL)
	{
		Datum		values[7] = {
			CStringGetTextDatum(count->topic),
			Int64GetDatum(count->ready),
			Int64GetDatum(count->delayed),
			Int64GetDatum(count->leased),
			Int64GetDatum(count->parked),
			TimestampTzGetDatum(count->oldest),
			BoolGetDatum(factor > 1)
		};
		bool		nulls[7] = {0};

		nulls[5] = TIMESTAMP_IS_NOEND(count->oldest);
		tuplestore_putvalues(result->setResult, result->setDesc, values, nulls);
	}

	ExecDropSingleTupleTableSlot(box->lease);
	ExecDropSingleTupleTableSlot(box->event);
	ik_close_rows(&box->leases);
	ik_close_rows(&box->events);
	hash_destroy(counts.topics);
	return (Datum) 0;
}

/*
 * parked() RETURNS SETOF idempotency.outbox
 *
 * What the view parked_events shows: the parked events, as they stand now (the
 * snapshot of a transaction that wrote over what it cannot see would show two
 * versions of one), and without predicate locks.  The scan's snapshot marks what
 * is dead to everybody, as in insight.c.
 */
Datum
idempotency_parked(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	Snapshot	snapshot;
	SnapshotData not_dead;
	OwnRows		events;
	TupleTableSlot *event;
	text	   *topic = NULL;

	InitMaterializedSRF(fcinfo, 0);
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	ik_open_rows(&events, &ik_outbox, AccessShareLock);
	ik_check_rows(result->setDesc, events.rel);
	event = table_slot_create(events.rel, NULL);
	InitNonVacuumableSnapshot(not_dead, GlobalVisTestFor(events.rel));
	while (next_topic(&events, event, &topic))
	{
		IndexScanDesc scan = scan_due(&events, topic, &not_dead, DT_NOEND);

		while (index_getnext_slot(scan, ForwardScanDirection, event))
		{
			CHECK_FOR_INTERRUPTS();
			if (table_tuple_satisfies_snapshot(events.rel, event, snapshot))
				tuplestore_puttupleslot(result->setResult, event);
		}
		index_endscan(scan);
	}
	ExecDropSingleTupleTableSlot(event);
	ik_close_rows(&events);
	UnregisterSnapshot(snapshot);
	return (Datum) 0;
}

/*
 * set_topic(topic text, max_attempts integer DEFAULT NULL, parked_blocks boolean
 * DEFAULT false) RETURNS boolean
 *
 * What holds for a topic instead of the settings; with neither, nothing of its
 * own.  Was there something of its own before?
 */
Datum
idempotency_set_topic(PG_FUNCTION_ARGS)
{
	text	   *topic = ik_topic_argument(fcinfo);
	bool		anything;
	bool		existed;
	Datum		values[TOPICS_NATTS];
	bool		nulls[TOPICS_NATTS] = {0};
	RowAccess	row;

	if (!PG_ARGISNULL(1) && PG_GETARG_INT32(1) <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_attempts must be positive"),
				 errhint("NULL stands for idempotency.outbox_max_attempts.")));
	ik_not_null(fcinfo, 2, "parked_blocks");
	ik_refuse_to_write("idempotency.set_topic()");

	values[TOPICS_TOPIC] = PointerGetDatum(topic);
	values[TOPICS_MAX_ATTEMPTS] = PG_GETARG_DATUM(1);
	nulls[TOPICS_MAX_ATTEMPTS] = PG_ARGISNULL(1);
	values[TOPICS_PARKED_BLOCKS] = PG_GETARG_DATUM(2);
	anything = !PG_ARGISNULL(1) || PG_GETARG_BOOL(2);

	ik_open_row(&row, &ik_outbox_topics, PointerGetDatum(topic), (Datum) 0,
				ik_lock_hash(cstring_to_text("idempotency.outbox_topics"), topic),
				RowExclusiveLock);
	ik_lock_row(&row);
	existed = row.state == ROW_FOUND;
	if (existed && anything)
		ik_update_row(&row, values, nulls);
	else if (existed)
		ik_delete_row(&row);
	else if (anything)
		ik_insert_row(&row, values, nulls);
	ik_close_row(&row);			/* the lock stays until it is committed */
	PG_RETURN_BOOL(existed);
}

static void
count_event(TupleTableSlot *slot, void *arg)
{
	TopicCounts *counts = arg;
	Outbox	   *box = &counts->box;
	TopicCount *count;
	Lease	   *lease;

	slot_getsomeattrs(slot, OUTBOX_KEY + 1);
	count = topic_count(counts->topics, event_value(slot, TOPIC));
	if (event_is_parked(slot))
	{
		count->parked++;
		return;
	}
	if (counts->leases.block != block_of(event_id(slot)))
		ik_read_leases(box, &counts->leases, block_of(event_id(slot)));
	lease = ik_lease_of(&counts->leases, slot);
	if (lease != NULL && lease->deadline > box->now)
		count->leased++;
	else if (lease == NULL && event_due(slot) > box->now)
	{
		count->delayed++;
		return;
	}
	else
		count->ready++;
	count->oldest = Min(count->oldest,
						Max(DatumGetTimestampTz(event_value(slot, EMITTED_AT)),
							event_due(slot)));
}

static TopicCount *
topic_count(HTAB *topics, Datum topic)
{
	char		name[MAX_TOPIC_LENGTH + 1];
	TopicCount *count;
	bool		found;

	text_to_cstring_buffer(DatumGetTextPP(topic), name, sizeof(name));
	count = hash_search(topics, name, HASH_ENTER, &found);
	if (!found)
	{
		count->ready = count->delayed = count->leased = count->parked = 0;
		count->oldest = DT_NOEND;
	}
	return count;
}

/* The topic after this one in the index by due, or the first after NULL. */
static bool
next_topic(OwnRows *events, TupleTableSlot *event, text **topic)
{
	ScanKeyData beyond;
	IndexScanDesc scan;
	bool		found;

	ScanKeyInit(&beyond, 1, BTGreaterStrategyNumber, F_TEXT_GT,
				PointerGetDatum(*topic));
	scan = ik_scan_rows(events, OUTBOX_BY_DUE, SnapshotSelf, &beyond,
						*topic != NULL ? 1 : 0);
	found = index_getnext_slot(scan, ForwardScanDirection, event);
	if (found)
	{
		slot_getallattrs(event);
		*topic = DatumGetTextPCopy(event_value(event, TOPIC));
	}
	index_endscan(scan);
	return found;
}

/*
 * What a sample may miss, since it is rare: how many events of a topic are
 * parked, and since when the first in the queue has waited.
 */
static void
count_exactly(TopicCounts *counts, text *topic, int *looked)
{
	Outbox	   *box = &counts->box;
	TopicCount *count = topic_count(counts->topics, PointerGetDatum(topic));
	int64		parked = 0;
	bool		all = false;
	IndexScanDesc scan;

	scan = scan_due(&box->events, topic, SnapshotSelf, DT_NOEND);
	while (++*looked < MAX_LOOKED && !all)
	{
		all = !index_getnext_slot(scan, ForwardScanDirection, box->event);
		parked += !all;
	}
	index_endscan(scan);
	if (all)
		count->parked = parked;

	scan = scan_due(&box->events, topic, SnapshotSelf, DT_NOBEGIN);
	if (index_getnext_slot(scan, ForwardScanDirection, box->event))
	{
		slot_getallattrs(box->event);
		count->oldest = Min(count->oldest,
							DatumGetTimestampTz(event_value(box->event, EMITTED_AT)));
	}
	index_endscan(scan);
}

static IndexScanDesc
scan_due(OwnRows *events, text *topic, Snapshot snapshot, TimestampTz due)
{
	ScanKeyData keys[2];

	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(topic));
	ScanKeyInit(&keys[1], 2, BTEqualStrategyNumber, F_TIMESTAMPTZ_EQ,
				TimestampTzGetDatum(due));
	return ik_scan_rows(events, OUTBOX_BY_DUE, snapshot, keys, 2);
}
