/*-------------------------------------------------------------------------
 *
 * outbox.c
 *		The outbox: side effects that happen after the commit.
 *
 * An EVENT is a row, written in the transaction that wants the effect.  TAKE
 * hands it to a worker under a lease; each hand-out is an ATTEMPT, and its
 * number tells a superseded worker from the newest.  ACK removes the event,
 * NACK gives it back, and one that has failed too often is PARKED.  Events
 * with the same (topic, key) come in the order of their ids, one at a time.
 *
 * DUE says when take may look at an event next: when it was emitted, when its
 * lease ends, when it is to be tried again.  Take reads the due events of a
 * topic in that order, whoever committed late included: there is no cursor
 * that could pass one by.
 *
 * The order within a key rests on the key's lock (lock.c).  Take only tries
 * it.  Who holds it looks at the key with SnapshotSelf, that is, at what is
 * committed now and at our own, whatever the transaction's snapshot is; so a
 * lease that a rival committed a moment ago counts also under REPEATABLE
 * READ, and no predicate lock is ever taken.  What take finds due only points
 * to its key; handed out is the head, the event with the lowest id, and
 * nothing while another event of the key is out.
 *
 * A long queue behind one key must not be read again by every take, so events
 * in excess are SET ASIDE (due = infinity) until it is their turn.  The rule
 * that no key is ever forgotten: while events of a key are set aside, another
 * row of that key has a finite due.  Whoever removes that row does so under
 * the key's lock and calls the next one up; or, without the lock, leaves the
 * row behind as acknowledged, due at once, for the next take or purge (purge.c)
 * to clear away.
 *
 * All of this goes past the executor, with no privilege on the table: EXECUTE
 * on the functions is the gate.  Nobody waits for anybody but ack and nack for
 * a rival who is changing the very same event.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox/outbox.h"

#include <math.h>

#include "access/genam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "commands/sequence.h"
#include "common/hashfn.h"
#include "executor/executor.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

/* limits in bytes, as for scope and key */
#define MAX_TOPIC_LENGTH	256
#define MAX_KEY_LENGTH		512

/*
 * What one call does at most, so that it neither fills the lock table nor
 * keeps its caller waiting: events that it looks past before it sets further
 * ones aside; events set aside once there is something to hand out; locks.
 * And how many locks all calls of a transaction keep: those of take, and those
 * of ack, nack and purge, which can do without.
 */
#define MAX_PASSED	100
#define MAX_ASIDE	10000
#define MAX_LOCKS	1000
#define MAX_LOCKS_OF_TAKES	5000
#define MAX_LOCKS_OF_OTHERS 1000

/* what outbox_counts looks at beside its sample */
#define MAX_LOOKED	10000

/* how long take relies on a place it remembers, in microseconds */
#define HINT_LIFETIME	USECS_PER_SEC

/* the table, opened for reading and writing */
typedef struct Outbox
{
	Relation	rel;
	EState	   *estate;
	ResultRelInfo *indexes;
	Relation	by_id;			/* (id) */
	Relation	by_due;			/* (topic, due) */
	Relation	by_key;			/* (topic, key, state, id) */
	TupleTableSlot *next;		/* the version to be written */
	TupleTableSlot *locked;		/* what lock_event() read, unless NULL */
} Outbox;

/* the locks that the transaction keeps; it has written, or is about to */
static struct
{
	FullTransactionId xact;
	int			of_takes;
	int			of_others;
}			kept_locks;

/* one call of take */
typedef struct Take
{
	Outbox		box;
	TimestampTz now;
	TimestampTz deadline;
	bool		first_write;	/* has the transaction written nothing yet? */
	int			max;
	ReturnSetInfo *result;
	TupleTableSlot *candidate;	/* what was found due */
	TupleTableSlot *ready;		/* the key's first event not out */
	TupleTableSlot *leased;		/* the key's event that is out */
	int			nhanded;
	int			npassed;
	int			naside;
	int			nlocks;			/* locks of keys that this call keeps */
	uint64		last_lock;		/* the last one of them */
} Take;

/* an event as a worker knows it */
typedef struct Handed
{
	int64		id;
	int32		attempt;
} Handed;

/* a search for parked events */
typedef struct Parked
{
	Relation	rel;
	Snapshot	snapshot;		/* that has to show them */
	int64		max;			/* to be looked at */
	ReturnSetInfo *result;		/* where they go, or NULL */
	int64		found;
} Parked;

/* what count_event() has seen */
typedef struct EventCounts
{
	int64		pending;
	TimestampTz oldest;
	int64		parked;
} EventCounts;

typedef enum HandOut
{
	HANDED_OUT,
	PARKED,
	BUSY						/* somebody is changing the row */
} HandOut;

static bool event_acknowledged(TupleTableSlot *slot, TimestampTz now,
							   uint64 *hash);
static bool call_up_after(TupleTableSlot *slot, bool *keep_lock);

const Purgeable ik_purge_events = {&ik_outbox, event_acknowledged, call_up_after};

PG_FUNCTION_INFO_V1(idempotency_emit);
PG_FUNCTION_INFO_V1(idempotency_take);
PG_FUNCTION_INFO_V1(idempotency_ack);
PG_FUNCTION_INFO_V1(idempotency_ack_many);
PG_FUNCTION_INFO_V1(idempotency_nack);
PG_FUNCTION_INFO_V1(idempotency_retry_parked);
PG_FUNCTION_INFO_V1(idempotency_parked);
PG_FUNCTION_INFO_V1(idempotency_outbox_counts);

static void count_event(TupleTableSlot *slot, void *arg);
static bool find_parked(Parked *parked);
static bool find_oldest(Relation rel, TimestampTz *oldest);
static void take_by_hint(Take *take, text *topic);
static TimestampTz take_range(Take *take, text *topic, TimestampTz from,
							  TimestampTz to);
static bool enough(Take *take);
static void take_key(Take *take);
static TupleTableSlot *find_head(Take *take, Datum topic, Datum key,
								 bool *blocked);
static HandOut hand_out(Take *take, TupleTableSlot *event);
static bool ack_event(Outbox *box, TupleTableSlot *event, int64 id,
					  int32 attempt);
static void call_up_next(Outbox *box, Datum topic, Datum key);
static bool next_is_aside(Outbox *box, Datum topic, Datum key,
						  TupleTableSlot *event);
static bool call_up(Outbox *box, TupleTableSlot *event, bool wait);
static int	compare_handed(const void *a, const void *b);
static void set_parked(TupleTableSlot *next);
static bool try_to_keep_lock(uint64 lock);
static void count_lock(int *count);
static uint64 key_lock(Datum topic, Datum key);
static void *not_null(FunctionCallInfo fcinfo, int arg, const char *what);
static text *topic_argument(FunctionCallInfo fcinfo);
static TimestampTz after(TimestampTz start, const Interval *interval,
						 const char *what);
static int	array_argument(FunctionCallInfo fcinfo, int arg, const char *what,
						   Oid type, Datum **elements);
static void open_outbox(Outbox *box, const char *function);
static Relation opened_index(Outbox *box, int which);
static void close_outbox(Outbox *box);
static bool find_event(Outbox *box, int64 id, TupleTableSlot *event);
static bool first_of_key(Outbox *box, Datum topic, Datum key, char state,
						 TupleTableSlot *event);
static IndexScanDesc begin_due_scan(Relation rel, Relation by_due,
									Snapshot snapshot, const text *topic,
									TimestampTz from, TimestampTz to);
static IndexScanDesc begin_scan(Relation rel, Relation index,
								Snapshot snapshot, ScanKey keys, int nkeys);
static TupleTableSlot *next_version(Outbox *box, TupleTableSlot *event);
static bool update_event(Outbox *box, TupleTableSlot *event, bool wait);
static bool lock_event(Outbox *box, TupleTableSlot *event);
static bool delete_event(Outbox *box, TupleTableSlot *event, bool wait);
static void write_index_entries(Outbox *box, bool update,
								TU_UpdateIndexes update_indexes);

/* The columns of an event in a slot whose attributes have been fetched. */
#define event_value(slot, column) \
	((slot)->tts_values[OUTBOX_##column])
#define event_isnull(slot, column) \
	((slot)->tts_isnull[OUTBOX_##column])
#define event_id(slot)		DatumGetInt64(event_value(slot, ID))
#define event_due(slot)		DatumGetTimestampTz(event_value(slot, DUE))
#define event_attempt(slot) DatumGetInt32(event_value(slot, ATTEMPT))
#define event_tries(slot)	DatumGetInt32(event_value(slot, TRIES))
#define event_state(slot)	DatumGetChar(event_value(slot, STATE))

/*
 * emit(topic text, payload jsonb, key text DEFAULT NULL) RETURNS bigint
 *
 * Write an event in the caller's transaction and return its id.  Takes no
 * lock on the key: who wants an order serialises before emitting.  A NULL
 * payload is an event that says nothing but its topic and key.
 * Errors: 22004 NULL topic; 22023 empty or too long topic or key; 25006.
 */
Datum
idempotency_emit(PG_FUNCTION_ARGS)
{
	text	   *topic = topic_argument(fcinfo);
	text	   *key = NULL;
	Outbox		box;
	TupleTableSlot *event;
	int64		id;
	TimestampTz now;

	if (!PG_ARGISNULL(2))
	{
		key = PG_GETARG_TEXT_PP(2);
		ik_check_text(key, MAX_KEY_LENGTH, "key",
					  "Events of one key come in their order; leave it out if none is needed.");
	}

	open_outbox(&box, "idempotency.emit()");
	id = nextval_internal(ik_own_relation("outbox_id_seq"), false);
	now = GetCurrentTimestamp();

	event = next_version(&box, NULL);
	event_value(event, ID) = Int64GetDatum(id);
	event_value(event, DUE) = TimestampTzGetDatum(now);
	event_value(event, EMITTED_AT) = TimestampTzGetDatum(now);
	event_isnull(event, PARKED_AT) = true;
	event_value(event, ATTEMPT) = Int32GetDatum(0);
	event_value(event, TRIES) = Int32GetDatum(0);
	event_value(event, STATE) = CharGetDatum(EVENT_READY);
	event_value(event, TOPIC) = PointerGetDatum(topic);
	event_value(event, KEY) = PointerGetDatum(key);
	event_isnull(event, KEY) = key == NULL;
	event_value(event, PAYLOAD) = PG_GETARG_DATUM(1);
	event_isnull(event, PAYLOAD) = PG_ARGISNULL(1);
	event_isnull(event, ERROR) = true;

	table_tuple_insert(box.rel, event, GetCurrentCommandId(true), 0, NULL);
	write_index_entries(&box, false, TU_None);
	CommandCounterIncrement();	/* or a take in this statement would fail */
	close_outbox(&box);

	ik_count(COUNT_EMIT, COUNT_DONE);
	PG_RETURN_INT64(id);
}

/*
 * take(topic text, max integer DEFAULT 100, lease interval DEFAULT '30 s')
 * RETURNS TABLE (id bigint, attempt integer, key text, payload jsonb,
 * emitted_at timestamptz)
 *
 * Hand out up to max due events of the topic, the longest due first, until
 * now + lease.  What a rival is taking is passed over.  It may return fewer
 * than there are when it has looked at a lot for them; the next call goes on.
 * Errors: 22004 NULL argument; 22023 bad topic, max < 1, negative lease;
 * 22008 lease out of range; 25006.
 */
Datum
idempotency_take(PG_FUNCTION_ARGS)
{
	static const Oid types[5] = {
		INT8OID, INT4OID, TEXTOID, JSONBOID, TIMESTAMPTZOID
	};
	text	   *topic = topic_argument(fcinfo);
	Take		take = {0};

	not_null(fcinfo, 1, "max");
	take.max = PG_GETARG_INT32(1);
	if (take.max < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max must be at least 1")));
	take.now = GetCurrentTimestamp();
	take.deadline = after(take.now, not_null(fcinfo, 2, "lease"), "lease");
	take.first_write = !TransactionIdIsValid(GetTopTransactionIdIfAny());

	InitMaterializedSRF(fcinfo, 0);
	take.result = (ReturnSetInfo *) fcinfo->resultinfo;
	ik_check_columns(take.result->setDesc, lengthof(types), types);
	open_outbox(&take.box, "idempotency.take()");
	take.ready = table_slot_create(take.box.rel, NULL);
	take.leased = table_slot_create(take.box.rel, NULL);
	take.candidate = table_slot_create(take.box.rel, NULL);

	take_by_hint(&take, topic);

	ExecDropSingleTupleTableSlot(take.candidate);
	ExecDropSingleTupleTableSlot(take.leased);
	ExecDropSingleTupleTableSlot(take.ready);
	close_outbox(&take.box);

	/* or a crash could make a later attempt bear the number of this one */
	if (take.nhanded > 0)
		ForceSyncCommit();

	ik_count_many(COUNT_TAKE, take.nhanded > 0 ? COUNT_DONE : COUNT_NOT_DONE,
				  Max(take.nhanded, 1));
	return (Datum) 0;
}

/*
 * ack(id bigint, attempt integer) RETURNS boolean
 *
 * The effect has happened: remove the event.  False, and nothing changed, if
 * there is no such event or a later attempt superseded this one.
 * Errors: 22004 NULL argument; 25006.
 */
Datum
idempotency_ack(PG_FUNCTION_ARGS)
{
	Outbox		box;
	TupleTableSlot *event;
	bool		done;

	not_null(fcinfo, 0, "id");
	not_null(fcinfo, 1, "attempt");

	open_outbox(&box, "idempotency.ack()");
	event = table_slot_create(box.rel, NULL);
	done = ack_event(&box, event, PG_GETARG_INT64(0), PG_GETARG_INT32(1));
	ExecDropSingleTupleTableSlot(event);
	close_outbox(&box);

	ik_count(COUNT_ACK, done ? COUNT_DONE : COUNT_NOT_DONE);
	PG_RETURN_BOOL(done);
}

/*
 * ack(ids bigint[], attempts integer[]) RETURNS bigint
 *
 * The same for many: how many were acknowledged.  Two calls at once may wait
 * for each other on the same events, so they go by the order of the ids.
 * Errors: 22004 NULL argument or element; 22023 lengths or dimensions; 25006.
 */
Datum
idempotency_ack_many(PG_FUNCTION_ARGS)
{
	Datum	   *ids;
	Datum	   *attempts;
	Handed	   *handed;
	int			n = array_argument(fcinfo, 0, "ids", INT8OID, &ids);
	Outbox		box;
	TupleTableSlot *event;
	int64		done = 0;

	if (array_argument(fcinfo, 1, "attempts", INT4OID, &attempts) != n)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ids and attempts must have the same number of elements"),
				 errhint("Pass both as take() returned them, in the same order.")));

	handed = palloc(n * sizeof(Handed));
	for (int i = 0; i < n; i++)
	{
		handed[i].id = DatumGetInt64(ids[i]);
		handed[i].attempt = DatumGetInt32(attempts[i]);
	}
	qsort(handed, n, sizeof(Handed), compare_handed);

	open_outbox(&box, "idempotency.ack()");
	event = table_slot_create(box.rel, NULL);
	for (int i = 0; i < n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		if (ack_event(&box, event, handed[i].id, handed[i].attempt))
			done++;
	}
	ExecDropSingleTupleTableSlot(event);
	close_outbox(&box);

	ik_count_many(COUNT_ACK, COUNT_DONE, done);
	ik_count_many(COUNT_ACK, COUNT_NOT_DONE, n - done);
	PG_RETURN_INT64(done);
}

/*
 * nack(id bigint, attempt integer, retry_in interval DEFAULT NULL,
 * error text DEFAULT NULL) RETURNS boolean
 *
 * The attempt has failed: give the event back, due after retry_in (NULL: at
 * once), or park it if that was its last attempt.  False, and nothing
 * changed, if the event is not out with this attempt any more.
 * Errors: 22004 NULL id or attempt; 22023 negative retry_in; 22008 retry_in
 * out of range; 25006.
 */
Datum
idempotency_nack(PG_FUNCTION_ARGS)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz due = now;
	Outbox		box;
	TupleTableSlot *event;
	bool		done = false;

	not_null(fcinfo, 0, "id");
	not_null(fcinfo, 1, "attempt");
	if (!PG_ARGISNULL(2))
		due = after(now, PG_GETARG_INTERVAL_P(2), "retry_in");

	open_outbox(&box, "idempotency.nack()");
	event = table_slot_create(box.rel, NULL);
	while (!done &&
		   find_event(&box, PG_GETARG_INT64(0), event) &&
		   event_attempt(event) == PG_GETARG_INT32(1) &&
		   event_state(event) == EVENT_LEASED)
	{
		bool		keyed = !event_isnull(event, KEY);
		bool		spent = event_tries(event) >= ik_outbox_max_attempts;
		bool		park = spent;
		TupleTableSlot *next;

		/* without the key's lock, the next take parks it */
		if (park && keyed)
			park = try_to_keep_lock(key_lock(event_value(event, TOPIC),
											 event_value(event, KEY)));

		next = next_version(&box, event);
		event_value(next, STATE) = CharGetDatum(EVENT_READY);
		event_value(next, DUE) = TimestampTzGetDatum(spent ? now : due);
		if (park)
			set_parked(next);
		event_value(next, ERROR) = PG_GETARG_DATUM(3);
		event_isnull(next, ERROR) = PG_ARGISNULL(3);
		done = update_event(&box, event, true);
		if (done && park && keyed)
			call_up_next(&box, event_value(event, TOPIC),
						 event_value(event, KEY));
	}
	ExecDropSingleTupleTableSlot(event);
	close_outbox(&box);

	ik_count(COUNT_NACK, done ? COUNT_DONE : COUNT_NOT_DONE);
	PG_RETURN_BOOL(done);
}

/*
 * retry_parked(topic text) RETURNS bigint
 *
 * Give the parked events of a topic back, with as many attempts before them as
 * a new one; how many.  The number of the attempt goes on where it was.
 * Errors: 22004 NULL topic; 22023 bad topic; 25006.
 */
Datum
idempotency_retry_parked(PG_FUNCTION_ARGS)
{
	text	   *topic = topic_argument(fcinfo);
	TimestampTz now = GetCurrentTimestamp();
	Outbox		box;
	TupleTableSlot *event;
	IndexScanDesc scan;
	int64		done = 0;

	open_outbox(&box, "idempotency.retry_parked()");
	event = table_slot_create(box.rel, NULL);
	scan = begin_due_scan(box.rel, box.by_due, SnapshotSelf, topic,
						  DT_NOEND, DT_NOEND);
	while (index_getnext_slot(scan, ForwardScanDirection, event))
	{
		TupleTableSlot *next;

		CHECK_FOR_INTERRUPTS();
		slot_getallattrs(event);
		if (event_state(event) != EVENT_PARKED)
			continue;
		next = next_version(&box, event);
		event_value(next, STATE) = CharGetDatum(EVENT_READY);
		event_value(next, DUE) = TimestampTzGetDatum(now);
		event_value(next, TRIES) = Int32GetDatum(0);
		event_isnull(next, PARKED_AT) = true;
		if (update_event(&box, event, false))
			done++;
	}
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(event);
	close_outbox(&box);

	ik_count_many(COUNT_RETRY_PARKED, COUNT_DONE, done);
	PG_RETURN_INT64(done);
}

/*
 * parked() RETURNS SETOF idempotency.outbox
 *
 * What the view parked_events shows: the parked events, as they stand now (the
 * snapshot of a transaction that wrote over what it cannot see would show two
 * versions of one), and without predicate locks.
 */
Datum
idempotency_parked(PG_FUNCTION_ARGS)
{
	Parked		parked = {
		.result = (ReturnSetInfo *) fcinfo->resultinfo,
		.snapshot = RegisterSnapshot(GetLatestSnapshot()),
		.max = PG_INT64_MAX
	};

	InitMaterializedSRF(fcinfo, 0);
	parked.rel = ik_open_table(&ik_outbox, AccessShareLock);
	ik_check_rows(parked.result->setDesc, parked.rel);
	(void) find_parked(&parked);
	table_close(parked.rel, AccessShareLock);
	UnregisterSnapshot(parked.snapshot);
	return (Datum) 0;
}

/*
 * outbox_counts(OUT depth, OUT depth_estimate, OUT oldest, OUT oldest_estimate,
 * OUT parked, OUT parked_estimate)
 *
 * How many events are to be delivered, when the first of them was emitted (NULL
 * without any) and how many are parked, as it stands now.  Of a large table the
 * depth comes from a sample; so do the others where they cannot be told from
 * MAX_LOOKED events.
 */
Datum
idempotency_outbox_counts(PG_FUNCTION_ARGS)
{
	static const Oid types[6] = {
		INT8OID, BOOLOID, TIMESTAMPTZOID, BOOLOID, INT8OID, BOOLOID
	};
	EventCounts sample = {.oldest = DT_NOEND};
	Parked		parked = {
		.snapshot = SnapshotSelf,
		.max = MAX_LOOKED
	};
	TimestampTz oldest = DT_NOEND;
	TupleDesc	desc;
	Relation	rel;
	double		factor;
	bool		all_parked = true;
	bool		all_older = true;
	Datum		values[6];
	bool		nulls[6] = {0};

	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	ik_check_columns(desc, lengthof(types), types);
	rel = ik_open_table(&ik_outbox, AccessShareLock);
	factor = ik_sample(rel, count_event, &sample);
	if (factor > 1)
	{
		parked.rel = rel;
		all_parked = find_parked(&parked);
		all_older = find_oldest(rel, &oldest);
	}
	else
	{
		parked.found = sample.parked;
		oldest = sample.oldest;
	}
	table_close(rel, AccessShareLock);

	if (!all_parked)
		parked.found = rint(sample.parked * factor);
	if (!all_older)
		oldest = sample.oldest;
	values[0] = Int64GetDatum(rint(sample.pending * factor));
	values[1] = BoolGetDatum(factor > 1);
	values[2] = TimestampTzGetDatum(oldest);
	nulls[2] = TIMESTAMP_IS_NOEND(oldest);
	values[3] = BoolGetDatum(!all_older);
	values[4] = Int64GetDatum(parked.found);
	values[5] = BoolGetDatum(!all_parked);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc),
													  values, nulls)));
}

static void
count_event(TupleTableSlot *slot, void *arg)
{
	EventCounts *counts = arg;

	slot_getsomeattrs(slot, OUTBOX_STATE + 1);
	if (event_state(slot) == EVENT_PARKED)
		counts->parked++;
	else if (event_state(slot) != EVENT_ACKNOWLEDGED)
	{
		counts->pending++;
		counts->oldest = Min(counts->oldest,
							 DatumGetTimestampTz(event_value(slot, EMITTED_AT)));
	}
}

/*
 * Find parked events: goes from topic to topic in the index by due, to the end
 * of each, past what waits to be delivered.  False if that was too much.  The
 * scan's snapshot marks what is dead to everybody, as in insight.c.
 */
static bool
find_parked(Parked *parked)
{
	Relation	by_due = index_open(ik_own_index(&ik_outbox, OUTBOX_BY_DUE),
									AccessShareLock);
	TupleTableSlot *event = table_slot_create(parked->rel, NULL);
	SnapshotData not_dead;
	text	   *topic = NULL;
	int64		looked = 0;
	bool		found;

	InitNonVacuumableSnapshot(not_dead, GlobalVisTestFor(parked->rel));
	do
	{
		ScanKeyData beyond;
		IndexScanDesc scan;

		ScanKeyInit(&beyond, 1, BTGreaterStrategyNumber, F_TEXT_GT,
					PointerGetDatum(topic));
		scan = begin_scan(parked->rel, by_due, &not_dead, &beyond, topic ? 1 : 0);
		found = index_getnext_slot(scan, ForwardScanDirection, event);
		if (found)
		{
			slot_getallattrs(event);
			topic = DatumGetTextPCopy(event_value(event, TOPIC));
		}
		index_endscan(scan);
		if (!found)
			break;

		scan = begin_due_scan(parked->rel, by_due, &not_dead, topic,
							  DT_NOEND, DT_NOEND);
		while (++looked <= parked->max &&
			   index_getnext_slot(scan, ForwardScanDirection, event))
		{
			CHECK_FOR_INTERRUPTS();
			slot_getallattrs(event);
			if (event_state(event) != EVENT_PARKED ||
				!table_tuple_satisfies_snapshot(parked->rel, event, parked->snapshot))
				continue;
			parked->found++;
			if (parked->result != NULL)
				tuplestore_puttupleslot(parked->result->setResult, event);
		}
		index_endscan(scan);
	} while (looked <= parked->max);

	ExecDropSingleTupleTableSlot(event);
	index_close(by_due, AccessShareLock);
	return !found;
}

/*
 * When was the event emitted that has waited longest, by its id?  DT_NOEND if
 * nothing waits; false if that was too much to look at.
 */
static bool
find_oldest(Relation rel, TimestampTz *oldest)
{
	Relation	by_id = index_open(ik_own_index(&ik_outbox, PRIMARY_KEY),
								   AccessShareLock);
	TupleTableSlot *event = table_slot_create(rel, NULL);
	IndexScanDesc scan = begin_scan(rel, by_id, SnapshotSelf, NULL, 0);
	EventCounts counts = {.oldest = DT_NOEND};
	bool		found = true;

	for (int i = 0; found && counts.pending == 0 && i < MAX_LOOKED; i++)
	{
		CHECK_FOR_INTERRUPTS();
		found = index_getnext_slot(scan, ForwardScanDirection, event);
		if (found)
			count_event(event, &counts);
	}
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(event);
	index_close(by_id, AccessShareLock);
	*oldest = counts.oldest;
	return !found || counts.pending > 0;
}

/*
 * Look through the due events of a topic.
 *
 * Events that were taken leave dead entries at the low end of the index until
 * VACUUM removes them, which it cannot do while an old snapshot is about, and
 * to read them again and again is what makes queues in tables slow.  So the
 * backend remembers where it met the first event that was there, and starts
 * from there.  That is a hint only: an event that was committed late may have
 * come in below.  So that part is read as well whenever the rest gave less
 * than was asked for, and at any rate every HINT_LIFETIME.
 */
static void
take_by_hint(Take *take, text *topic)
{
	static struct
	{
		uint64		topic;		/* a hash; 0: none yet */
		TimestampTz first;		/* below, there was nothing */
		TimestampTz read_at;	/* when that was read */
	}			hints[16];
	uint64		hash;
	int			i;
	TimestampTz from;
	TimestampTz first;

	hash = hash_bytes_extended((unsigned char *) VARDATA_ANY(topic),
							   VARSIZE_ANY_EXHDR(topic), 0);
	i = hash % lengthof(hints);
	if (hints[i].topic == hash && hints[i].read_at <= take->now &&
		take->now - hints[i].read_at < HINT_LIFETIME)
		from = hints[i].first;
	else
		from = DT_NOBEGIN;

	first = take_range(take, topic, from, take->now);
	if (!TIMESTAMP_IS_NOBEGIN(from))
	{
		if (enough(take))
		{
			if (take->first_write)
				hints[i].first = first;
			return;
		}
		first = Min(first, take_range(take, topic, DT_NOBEGIN, from));
	}
	if (!take->first_write)
		return;
	hints[i].topic = hash;
	hints[i].first = first;
	hints[i].read_at = take->now;
}

/*
 * Look through the due events of a topic, from <= due < to, until there is
 * enough; returns when the first one of them was due, or to.
 */
static TimestampTz
take_range(Take *take, text *topic, TimestampTz from, TimestampTz to)
{
	IndexScanDesc scan = begin_due_scan(take->box.rel, take->box.by_due,
										SnapshotSelf, topic, from, to);
	TimestampTz first = to;

	while (!enough(take) &&
		   index_getnext_slot(scan, ForwardScanDirection, take->candidate))
	{
		CHECK_FOR_INTERRUPTS();
		slot_getallattrs(take->candidate);
		first = Min(first, event_due(take->candidate));
		if (event_isnull(take->candidate, KEY))
			(void) hand_out(take, take->candidate);
		else
			take_key(take);
	}
	index_endscan(scan);
	return first;
}

/* Has this call done what it was asked for, or as much as it may? */
static bool
enough(Take *take)
{
	return take->nhanded >= take->max ||
		take->nlocks >= MAX_LOCKS ||
		kept_locks.of_takes >= MAX_LOCKS_OF_TAKES ||
		(take->naside >= MAX_ASIDE && take->nhanded > 0);
}

/*
 * A due event has pointed to its key: hand out the key's head, if it may go.
 */
static void
take_key(Take *take)
{
	TupleTableSlot *candidate = take->candidate;
	Datum		topic = event_value(candidate, TOPIC);
	Datum		key = event_value(candidate, KEY);
	uint64		lock = key_lock(topic, key);
	TupleTableSlot *head;
	HandOut		outcome = HANDED_OUT;
	int			naside = take->naside;
	bool		blocked = false;
	bool		wrote = false;

	if (!ik_try_lock(lock))
	{
		take->npassed++;
		return;
	}

	/* a head that has failed too often is parked, and the key goes on */
	do
	{
		head = find_head(take, topic, key, &blocked);
		if (head != NULL)
		{
			outcome = hand_out(take, head);
			wrote |= outcome != BUSY;
		}
	} while (head != NULL && outcome == PARKED);

	if (blocked)
		take->npassed++;

	if (event_state(candidate) == EVENT_ACKNOWLEDGED)
	{
		if (outcome != BUSY)
			wrote |= delete_event(&take->box, candidate, false);
	}
	else if (blocked && take->npassed > MAX_PASSED &&
			 event_state(candidate) == EVENT_READY)
	{
		TupleTableSlot *next = next_version(&take->box, candidate);

		event_value(next, DUE) = TimestampTzGetDatum(DT_NOEND);
		if (update_event(&take->box, candidate, false))
		{
			wrote = true;
			take->naside++;
		}
	}

	/*
	 * What was decided under the lock stands until the others can see it, so
	 * the lock is kept; once for a run of events that are set aside.
	 */
	if (!wrote ||
		(take->naside > naside && take->nlocks > 0 &&
		 lock == take->last_lock))
		ik_unlock(lock);
	else
	{
		count_lock(&kept_locks.of_takes);
		take->nlocks++;
		take->last_lock = lock;
	}
}

/*
 * Which event of the key may go now?  The one with the lowest id, and none
 * while another is out (*blocked) or while that one is to be tried later
 * (*blocked).  The caller holds the key's lock.
 *
 * The one that is out is the first leased one: it was the head when it was
 * handed out, and a lower id that was committed later goes out only when its
 * lease is over.  It is looked for before the others, since a nack may commit
 * in between, and would be missed the other way round.
 */
static TupleTableSlot *
find_head(Take *take, Datum topic, Datum key, bool *blocked)
{
	bool		lapsed;

	lapsed = first_of_key(&take->box, topic, key, EVENT_LEASED, take->leased);
	if (lapsed && event_due(take->leased) >= take->now)
	{
		*blocked = true;
		return NULL;
	}

	if (!first_of_key(&take->box, topic, key, EVENT_READY, take->ready) ||
		(lapsed && event_id(take->leased) < event_id(take->ready)))
		return lapsed ? take->leased : NULL;

	if (event_due(take->ready) >= take->now &&
		!TIMESTAMP_IS_NOEND(event_due(take->ready)))
	{
		*blocked = true;
		return NULL;
	}
	return take->ready;
}

/* Lease one event to the caller of take, or park it. */
static HandOut
hand_out(Take *take, TupleTableSlot *event)
{
	TupleTableSlot *next = next_version(&take->box, event);
	int32		attempt = event_attempt(event) + 1;
	Datum		values[5];
	bool		nulls[5] = {0};

	if (event_tries(event) >= ik_outbox_max_attempts)
	{
		set_parked(next);
		return update_event(&take->box, event, false) ? PARKED : BUSY;
	}

	event_value(next, STATE) = CharGetDatum(EVENT_LEASED);
	event_value(next, DUE) = TimestampTzGetDatum(take->deadline);
	event_value(next, ATTEMPT) = Int32GetDatum(attempt);
	event_value(next, TRIES) = Int32GetDatum(event_tries(event) + 1);
	if (!update_event(&take->box, event, false))
		return BUSY;

	values[0] = event_value(event, ID);
	values[1] = Int32GetDatum(attempt);
	values[2] = event_value(event, KEY);
	nulls[2] = event_isnull(event, KEY);
	values[3] = event_value(event, PAYLOAD);
	nulls[3] = event_isnull(event, PAYLOAD);
	values[4] = event_value(event, EMITTED_AT);
	tuplestore_putvalues(take->result->setResult, take->result->setDesc,
						 values, nulls);
	take->nhanded++;
	return HANDED_OUT;
}

/*
 * Acknowledge one event, waiting for whoever is changing it.  The newest
 * attempt is good also after its lease, as long as nobody took over.
 */
static bool
ack_event(Outbox *box, TupleTableSlot *event, int64 id, int32 attempt)
{
	while (attempt > 0 && find_event(box, id, event) &&
		   event_attempt(event) == attempt &&
		   event_state(event) != EVENT_ACKNOWLEDGED)
	{
		Datum		topic = event_value(event, TOPIC);
		Datum		key = event_value(event, KEY);

		/* nothing waits for an event without a key, or for a parked one */
		if (event_isnull(event, KEY) || event_state(event) == EVENT_PARKED)
		{
			if (delete_event(box, event, true))
				return true;
		}
		else if (try_to_keep_lock(key_lock(topic, key)))
		{
			if (delete_event(box, event, true))
			{
				call_up_next(box, topic, key);
				return true;
			}
		}
		else
		{
			TupleTableSlot *next = next_version(box, event);

			event_value(next, STATE) = CharGetDatum(EVENT_ACKNOWLEDGED);
			event_value(next, DUE) = TimestampTzGetDatum(GetCurrentTimestamp());
			event_isnull(next, PAYLOAD) = true;
			event_isnull(next, ERROR) = true;
			if (update_event(box, event, true))
				return true;
		}
		/* somebody changed it: look again */
	}
	return false;
}

/*
 * An event that was out is gone: if the next one of its key was set aside, it
 * becomes due.  The caller holds the key's lock.
 */
static void
call_up_next(Outbox *box, Datum topic, Datum key)
{
	TupleTableSlot *event = table_slot_create(box->rel, NULL);

	while (next_is_aside(box, topic, key, event) && !call_up(box, event, true))
		;
	ExecDropSingleTupleTableSlot(event);
}

/*
 * For purge: was the event in the slot acknowledged, and left behind?  Then
 * also the hash of its key's lock.
 */
static bool
event_acknowledged(TupleTableSlot *slot, TimestampTz now,
				   uint64 *hash)
{
	bool		isnull;

	if (DatumGetChar(slot_getattr(slot, OUTBOX_STATE + 1, &isnull)) != EVENT_ACKNOWLEDGED)
		return false;
	slot_getallattrs(slot);
	if (event_isnull(slot, KEY))	/* no ack leaves such a row */
		return false;
	*hash = key_lock(event_value(slot, TOPIC), event_value(slot, KEY));
	return true;
}

/*
 * For purge, which holds the key's lock and is about to remove the
 * acknowledged event in the slot: call up the next one of its key.  False if
 * somebody is changing that one.  If there was one to call up, the lock is to
 * be kept, or an ack of the key would wait for this transaction; false, too, if
 * the transaction keeps enough of them.
 */
static bool
call_up_after(TupleTableSlot *slot, bool *keep_lock)
{
	Outbox		box;
	TupleTableSlot *event;
	bool		aside;

	open_outbox(&box, "idempotency.purge()");
	event = table_slot_create(box.rel, NULL);
	aside = next_is_aside(&box, event_value(slot, TOPIC),
						  event_value(slot, KEY), event);
	*keep_lock = aside && kept_locks.of_others < MAX_LOCKS_OF_OTHERS &&
		call_up(&box, event, false);
	if (*keep_lock)
		count_lock(&kept_locks.of_others);
	ExecDropSingleTupleTableSlot(event);
	close_outbox(&box);
	return !aside || *keep_lock;
}

/* Is the next event of the key that may go set aside? */
static bool
next_is_aside(Outbox *box, Datum topic, Datum key, TupleTableSlot *event)
{
	return first_of_key(box, topic, key, EVENT_READY, event) &&
		TIMESTAMP_IS_NOEND(event_due(event));
}

/* Make an event that was set aside due; false as of update_event(). */
static bool
call_up(Outbox *box, TupleTableSlot *event, bool wait)
{
	TupleTableSlot *next = next_version(box, event);

	event_value(next, DUE) = TimestampTzGetDatum(GetCurrentTimestamp());
	return update_event(box, event, wait);
}

static int
compare_handed(const void *a, const void *b)
{
	int64		left = ((const Handed *) a)->id;
	int64		right = ((const Handed *) b)->id;

	return (left > right) - (left < right);
}

static void
set_parked(TupleTableSlot *next)
{
	event_value(next, STATE) = CharGetDatum(EVENT_PARKED);
	event_value(next, DUE) = TimestampTzGetDatum(DT_NOEND);
	event_value(next, PARKED_AT) = TimestampTzGetDatum(GetCurrentTimestamp());
	event_isnull(next, PARKED_AT) = false;
}

/* For ack and nack: take the key's lock and keep it, if it is to be had. */
static bool
try_to_keep_lock(uint64 lock)
{
	if (kept_locks.of_others >= MAX_LOCKS_OF_OTHERS ||
		!ik_try_lock(lock))
		return false;
	count_lock(&kept_locks.of_others);
	return true;
}

/*
 * Count a lock that is kept until the end of the transaction, also if a
 * rollback to a savepoint gives it back before.
 */
static void
count_lock(int *count)
{
	kept_locks.xact = GetTopFullTransactionId();
	(*count)++;
}

/* The lock of (topic, key), in a scope that no application's key can have. */
static uint64
key_lock(Datum topic, Datum key)
{
	text	   *name = DatumGetTextPP(topic);
	char		scope[sizeof("idempotency.outbox.") + MAX_TOPIC_LENGTH];
	uint64		hash;
	text	   *scope_text;

	snprintf(scope, sizeof(scope), "idempotency.outbox.%.*s",
			 (int) VARSIZE_ANY_EXHDR(name), VARDATA_ANY(name));
	scope_text = cstring_to_text(scope);
	hash = ik_lock_hash(scope_text, DatumGetTextPP(key));
	pfree(scope_text);
	return hash;
}

/* An argument that must be there; error: 22004.  For a by-reference type. */
static void *
not_null(FunctionCallInfo fcinfo, int arg, const char *what)
{
	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null", what)));
	return DatumGetPointer(PG_GETARG_DATUM(arg));
}

/* The first argument, topic: 22004, 22023. */
static text *
topic_argument(FunctionCallInfo fcinfo)
{
	text	   *topic = PG_ARGISNULL(0) ? NULL : PG_GETARG_TEXT_PP(0);

	ik_check_text(topic, MAX_TOPIC_LENGTH, "topic",
				  "It tells the takers which events are theirs, such as 'mail'.");
	return topic;
}

/*
 * The instant so long after start.  Errors: 22023 if the interval is
 * negative, 22008 if there is no such instant.
 */
static TimestampTz
after(TimestampTz start, const Interval *interval, const char *what)
{
	static const Interval zero = {0};
	TimestampTz end;

	if (DatumGetInt32(DirectFunctionCall2(interval_cmp,
										  IntervalPGetDatum(interval),
										  IntervalPGetDatum(&zero))) < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be negative", what)));
	end = DatumGetTimestampTz(DirectFunctionCall2(timestamptz_pl_interval,
												  TimestampTzGetDatum(start),
												  IntervalPGetDatum(interval)));
	if (TIMESTAMP_NOT_FINITE(end))
		ereport(ERROR,
				(errcode(ERRCODE_DATETIME_VALUE_OUT_OF_RANGE),
				 errmsg("%s must be finite", what)));
	return end;
}

/* The elements of an array; their number.  Errors: 22004 and 22023. */
static int
array_argument(FunctionCallInfo fcinfo, int arg, const char *what, Oid type,
			   Datum **elements)
{
	ArrayType  *array;
	int16		typlen;
	bool		typbyval;
	char		typalign;
	int			n;

	not_null(fcinfo, arg, what);
	array = PG_GETARG_ARRAYTYPE_P(arg);
	if (ARR_NDIM(array) > 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must have one dimension", what)));
	if (array_contains_nulls(array))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not contain nulls", what)));
	get_typlenbyvalalign(type, &typlen, &typbyval, &typalign);
	deconstruct_array(array, type, typlen, typbyval, typalign,
					  elements, NULL, &n);
	return n;
}

/*
 * Open the table and its indexes for reading and writing.  Errors: 25006 in a
 * read-only transaction and on a standby; 55000 if the table is not as the
 * install script made it, since what was added would be passed by.
 */
static void
open_outbox(Outbox *box, const char *function)
{
	ik_refuse_to_write(function);

	memset(box, 0, sizeof(Outbox));
	if (!FullTransactionIdEquals(kept_locks.xact, GetTopFullTransactionIdIfAny()))
		kept_locks.of_takes = kept_locks.of_others = 0;
	box->rel = ik_open_table(&ik_outbox, RowExclusiveLock);
	box->estate = CreateExecutorState();
	box->indexes = makeNode(ResultRelInfo);
	InitResultRelInfo(box->indexes, box->rel, 0, NULL, 0);
	ExecOpenIndices(box->indexes, false);
	box->by_id = opened_index(box, PRIMARY_KEY);
	box->by_due = opened_index(box, OUTBOX_BY_DUE);
	box->by_key = opened_index(box, OUTBOX_BY_KEY);
	box->next = MakeSingleTupleTableSlot(RelationGetDescr(box->rel),
										 &TTSOpsVirtual);
}

static Relation
opened_index(Outbox *box, int which)
{
	Oid			relid = ik_own_index(&ik_outbox, which);

	for (int i = 0; i < box->indexes->ri_NumIndices; i++)
		if (RelationGetRelid(box->indexes->ri_IndexRelationDescs[i]) == relid)
			return box->indexes->ri_IndexRelationDescs[i];
	elog(ERROR, "index %u of table \"%s\" was not opened", relid,
		 RelationGetRelationName(box->rel));
}

static void
close_outbox(Outbox *box)
{
	if (box->locked != NULL)
		ExecDropSingleTupleTableSlot(box->locked);
	ExecDropSingleTupleTableSlot(box->next);
	ExecCloseIndices(box->indexes);
	FreeExecutorState(box->estate);
	table_close(box->rel, NoLock);
}

/* The event with this id, as it is now. */
static bool
find_event(Outbox *box, int64 id, TupleTableSlot *event)
{
	ScanKeyData key;
	IndexScanDesc scan;
	bool		found;

	ScanKeyInit(&key, 1, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(id));
	scan = begin_scan(box->rel, box->by_id, SnapshotSelf, &key, 1);
	found = index_getnext_slot(scan, ForwardScanDirection, event);
	if (found)
		slot_getallattrs(event);
	index_endscan(scan);
	return found;
}

/* The event of a key that has the lowest id of those in this state now. */
static bool
first_of_key(Outbox *box, Datum topic, Datum key, char state,
			 TupleTableSlot *event)
{
	ScanKeyData keys[3];
	IndexScanDesc scan;
	bool		found;

	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ, topic);
	ScanKeyInit(&keys[1], 2, BTEqualStrategyNumber, F_TEXTEQ, key);
	ScanKeyInit(&keys[2], 3, BTEqualStrategyNumber, F_CHAREQ,
				CharGetDatum(state));
	scan = begin_scan(box->rel, box->by_key, SnapshotSelf, keys, 3);
	found = index_getnext_slot(scan, ForwardScanDirection, event);
	if (found)
		slot_getallattrs(event);
	index_endscan(scan);
	return found;
}

/* The events of a topic by due, from <= due < to, or to the end. */
static IndexScanDesc
begin_due_scan(Relation rel, Relation by_due, Snapshot snapshot,
			   const text *topic, TimestampTz from, TimestampTz to)
{
	ScanKeyData keys[3];

	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(topic));
	ScanKeyInit(&keys[1], 2, BTGreaterEqualStrategyNumber, F_TIMESTAMPTZ_GE,
				TimestampTzGetDatum(from));
	ScanKeyInit(&keys[2], 2, BTLessStrategyNumber, F_TIMESTAMPTZ_LT,
				TimestampTzGetDatum(to));
	return begin_scan(rel, by_due, snapshot, keys,
					  TIMESTAMP_IS_NOEND(to) ? 2 : 3);
}

static IndexScanDesc
begin_scan(Relation rel, Relation index, Snapshot snapshot, ScanKey keys,
		   int nkeys)
{
	IndexScanDesc scan = compat_index_beginscan(rel, index, snapshot, nkeys);

	index_rescan(scan, keys, nkeys, NULL, 0);
	return scan;
}

/*
 * The version of an event to be written next: a copy, for the caller to
 * change and then to write; or, without an event, all to be filled in.
 */
static TupleTableSlot *
next_version(Outbox *box, TupleTableSlot *event)
{
	TupleTableSlot *next = box->next;
	int			natts = next->tts_tupleDescriptor->natts;

	ExecClearTuple(next);
	if (event != NULL)
	{
		memcpy(next->tts_values, event->tts_values, natts * sizeof(Datum));
		memcpy(next->tts_isnull, event->tts_isnull, natts * sizeof(bool));
	}
	else
	{
		/* columns that somebody else has added stay NULL */
		memset(next->tts_isnull, true, natts * sizeof(bool));
		memset(next->tts_isnull, false, OUTBOX_NATTS * sizeof(bool));
	}
	return ExecStoreVirtualTuple(next);
}

/*
 * Write the next version.  False if the event is no longer as it was read, or
 * if somebody is at work on it and we do not wait.
 */
static bool
update_event(Outbox *box, TupleTableSlot *event, bool wait)
{
	TM_FailureData failure;
	LockTupleMode lockmode;
	TU_UpdateIndexes update_indexes;

	CheckCmdReplicaIdentity(box->rel, CMD_UPDATE);
	if (!wait && !lock_event(box, event))
		return false;
	if (compat_tuple_update(box->rel, &event->tts_tid, box->next,
							GetCurrentCommandId(true), true, &failure,
							&lockmode, &update_indexes) != TM_Ok)
		return false;
	if (update_indexes != TU_None)
		write_index_entries(box, true, update_indexes);
	CommandCounterIncrement();
	return true;
}

/*
 * Lock the event that was read, so that an update need not wait; false as
 * above.  heap_update() is not made for callers who do not wait (it asserts
 * that they do; heap_delete() does not).  No lock is compatible with this one.
 */
static bool
lock_event(Outbox *box, TupleTableSlot *event)
{
	TM_FailureData failure;
	TM_Result	result;

	if (box->locked == NULL)
		box->locked = table_slot_create(box->rel, NULL);
	result = table_tuple_lock(box->rel, &event->tts_tid, SnapshotSelf,
							  box->locked, GetCurrentCommandId(true),
							  LockTupleExclusive, LockWaitSkip, 0, &failure);
	ExecClearTuple(box->locked);
	return result == TM_Ok;
}

/* Delete the event that was read; false as above. */
static bool
delete_event(Outbox *box, TupleTableSlot *event, bool wait)
{
	TM_FailureData failure;

	CheckCmdReplicaIdentity(box->rel, CMD_DELETE);
	if (compat_tuple_delete(box->rel, &event->tts_tid,
							GetCurrentCommandId(true), wait,
							&failure) != TM_Ok)
		return false;
	CommandCounterIncrement();
	return true;
}

/* Index the version that was written. */
static void
write_index_entries(Outbox *box, bool update, TU_UpdateIndexes update_indexes)
{
	bool		conflict = false;

	compat_insert_index_tuples(box->indexes, box->next, box->estate, update,
							   &conflict, update_indexes);
	ResetPerTupleExprContext(box->estate);
	if (conflict)
		ereport(ERROR,
				(errcode(ERRCODE_UNIQUE_VIOLATION),
				 errmsg("the id of the event exists already"),
				 errhint("Set the sequence idempotency.outbox_id_seq beyond the highest id in idempotency.outbox.")));
}
