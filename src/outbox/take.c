/*-------------------------------------------------------------------------
 *
 * take.c
 *		take(): hand out events of a topic under a lease.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox/outbox.h"

#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

/*
 * What one call does at most, so that it does not keep its caller waiting:
 * leases that are over, of up to 64 events each, that it takes apart (each event
 * is written, some 20 microseconds); and events that it looks past without
 * handing out one (half a microsecond; a few with an ordering key).  The next
 * call goes on from there.
 */
#define MAX_APART	32
#define MAX_PASSED	200000

/* and so often it does either if it found nothing to hand out; some seconds */
#define MAX_ROUNDS	100
#define MAX_WALKS	10

/*
 * What is taken apart counts only when the call is committed.  So it stops, with
 * at least one lease done, after this or half of what statement_timeout leaves.
 */
#define MAX_APART_TIME	(2 * USECS_PER_SEC)

/* how often floors are raised on the way, in events: so much a time-out loses */
#define RAISE_EVERY	256

/* so often, a millisecond apart, take tries again what rivals had locked */
#define MAX_TRIES	10

/* ordering keys that this call has found out, by a hash; 16 kB, and the keys */
#define MAX_NOTED	1024

/* an ordering key whose events have to wait */
typedef struct NotedKey
{
	text	   *key;
	int64		head;			/* for this one; 0: for one that is out */
} NotedKey;

/* one call of take */
typedef struct Take
{
	Outbox		box;
	text	   *topic;
	const Interval *lease;
	TimestampTz stop_apart;		/* no further lease is taken apart */
	TimestampTz deadline;		/* once there is something to hand out */
	int64		max;
	bool		only_look;		/* and write nothing */
	ReturnSetInfo *result;
	TopicSettings settings;
	Floor	   *floor;
	TupleTableSlot *candidate;
	SnapshotData dirty;			/* tells who is changing it */
	int64		nhanded;
	int64		npassed;
	bool		busy;			/* was something locked by a rival taker? */
	bool		more_leases;	/* are there more that are over? */
	bool		passed_on;		/* may the next one of a key go now, perhaps
								 * at a place that was read already? */

	/* the block at hand */
	BlockLeases leases;
	bool		locked;			/* do we have its lock? */
	bool		fresh;			/* was its lock got after the candidate was
								 * read? */
	uint64		handed;			/* of its events, a bit for each */
	int64		highest;		/* of their places */

	NotedKey	noted[MAX_NOTED];
} Take;

PG_FUNCTION_INFO_V1(idempotency_take);

static void open_take(Take *take, const char *function);
static void count_cost(Take *take, TimestampTz start);
static TimestampTz first_after(OwnRows *rows, int which, text *topic,
							   TimestampTz now);
static void take_leases_apart(Take *take);
static void take_events(Take *take);
static bool take_range(Take *take, bool waited, int64 limit);
static IndexScanDesc begin_range(Take *take, bool waited);
static void raise_floor(Take *take, bool waited, int64 place, TimestampTz due);
static bool take_candidate(Take *take);
static bool block_is_ours(Take *take, int64 block);
static void finish_block(Take *take);
static bool take_key(Take *take);
static bool take_noted(Take *take);
static bool take_head(Take *take, bool *going);
static bool hand_out(Take *take, bool with_note);
static bool park(Take *take);
static bool is_noted(Take *take, text *key);
static void note_key(Take *take, text *key, int64 head);
static NotedKey *noted_place(Take *take, text *key);

/*
 * take(topic text, max bigint DEFAULT 100, lease interval DEFAULT '30 s')
 * RETURNS TABLE (id bigint, attempt bigint, key text, payload jsonb,
 * emitted_at timestamptz)
 *
 * Hand out up to max due events of the topic, in the order of their places,
 * until the lease ends.  What a rival is taking is passed over.
 */
Datum
idempotency_take(PG_FUNCTION_ARGS)
{
	static const Oid types[5] = {
		INT8OID, INT8OID, TEXTOID, JSONBOID, TIMESTAMPTZOID
	};
	Take	   *take = palloc0(sizeof(Take));
	Outbox	   *box = &take->box;

	take->topic = ik_topic_argument(fcinfo);
	ik_not_null(fcinfo, 1, "max");
	take->max = PG_GETARG_INT64(1);
	if (take->max <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max must be positive")));
	ik_not_null(fcinfo, 2, "lease");
	take->lease = PG_GETARG_INTERVAL_P(2);
	(void) ik_finite_after(GetCurrentTimestamp(), take->lease, "lease");

	InitMaterializedSRF(fcinfo, 0);
	take->result = (ReturnSetInfo *) fcinfo->resultinfo;
	ik_check_columns(take->result->setDesc, lengthof(types), types);

	open_take(take, "idempotency.take()");
	for (int i = 0, rounds = 0, walks = 0;
		 i < MAX_TRIES && rounds < MAX_ROUNDS && walks < MAX_WALKS; rounds++)
	{
		TimestampTz start = GetCurrentTimestamp();

		take->busy = false;
		take->more_leases = false;
		take->npassed = 0;
		take->floor = ik_topic_floor(take->topic, box->events.rel, box->now);
		take_leases_apart(take);
		take_events(take);
		count_cost(take, start);
		if (take->nhanded > 0)
			break;

		/* none of those that it looked past can go: perhaps one behind them */
		if (take->npassed >= MAX_PASSED)
		{
			walks++;
			continue;
		}
		if (!(take->busy || take->more_leases))
			break;
		if (take->more_leases && GetCurrentTimestamp() > take->stop_apart)
			break;

		/* what was out may all have been parked: so go on with what else was */
		if (take->more_leases)
			continue;

		/* a rival is about to say which ones it takes */
		i++;
		pg_usleep(1000);
		CHECK_FOR_INTERRUPTS();
		box->now = GetCurrentTimestamp();
		ik_look_around(box->sequence, box->now);
	}
	ExecDropSingleTupleTableSlot(take->candidate);
	ik_close_outbox(box);

	/* or a crash could make a later attempt bear the number of this one */
	if (take->nhanded > 0)
		ForceSyncCommit();

	ik_count_many(COUNT_TAKE, take->nhanded > 0 ? COUNT_DONE : COUNT_NOT_DONE,
				  Max(take->nhanded, 1));
	return (Datum) 0;
}

static void
open_take(Take *take, const char *function)
{
	ik_open_outbox(&take->box, function, true);
	take->candidate = table_slot_create(take->box.events.rel, NULL);
	take->leases.block = -1;
	InitDirtySnapshot(take->dirty);
	take->stop_apart = take->box.now + MAX_APART_TIME;
	if (get_timeout_active(STATEMENT_TIMEOUT))
		take->stop_apart = Min(take->stop_apart,
							   take->box.now + (get_timeout_finish_time(STATEMENT_TIMEOUT) - take->box.now) / 2);
}

/*
 * For those who wait: would take() have an event of the topic now?  If not, when
 * is the next one due, or the next lease over, as far as can be told today?
 */
bool
ik_is_any_due(text *topic, TimestampTz *next)
{
	Take	   *take = palloc0(sizeof(Take));
	Outbox	   *box = &take->box;

	take->topic = topic;
	take->max = 1;
	take->only_look = true;
	open_take(take, "idempotency.wait_for_events()");
	take->floor = ik_topic_floor(topic, box->events.rel, box->now);
	take_leases_apart(take);
	if (take->nhanded == 0)
		take_events(take);
	count_cost(take, box->now);
	*next = Min(first_after(&box->events, OUTBOX_BY_DUE, topic, box->now),
				first_after(&box->leases, LEASES_BY_DEADLINE, topic, box->now));
	ExecDropSingleTupleTableSlot(take->candidate);
	ik_close_outbox(box);
	return take->nhanded > 0 || take->npassed >= MAX_PASSED;
}

/* What it costs to read everything, over as many calls as that takes. */
static void
count_cost(Take *take, TimestampTz start)
{
	Floor	   *floor = take->floor;

	if (floor->reading)
		floor->cost += GetCurrentTimestamp() - start;
	floor->reading = floor->reading && take->npassed >= MAX_PASSED;
}

/* The first time after now in an index by topic and time. */
static TimestampTz
first_after(OwnRows *rows, int which, text *topic, TimestampTz now)
{
	TupleTableSlot *slot = table_slot_create(rows->rel, NULL);
	TimestampTz first = DT_NOEND;
	ScanKeyData keys[2];
	IndexScanDesc scan;

	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(topic));
	ScanKeyInit(&keys[1], 2, BTGreaterStrategyNumber, F_TIMESTAMPTZ_GT,
				TimestampTzGetDatum(now));
	scan = ik_scan_rows(rows, which, SnapshotSelf, keys, 2);
	if (index_getnext_slot(scan, ForwardScanDirection, slot))
	{
		slot_getallattrs(slot);
		first = DatumGetTimestampTz(slot->tts_values[rows->table->indexes[which].key[1]]);
	}
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	return first;
}

/* What became of events that were out, when their lease is over? */
static void
take_leases_apart(Take *take)
{
	Outbox	   *box = &take->box;
	TupleTableSlot *lease = table_slot_create(box->leases.rel, NULL);
	TimestampTz first = box->now;
	int			n = 0;
	ScanKeyData keys[3];
	IndexScanDesc scan;
	SnapshotData dirty;

	InitDirtySnapshot(dirty);
	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(take->topic));
	ScanKeyInit(&keys[1], 2, BTGreaterEqualStrategyNumber, F_TIMESTAMPTZ_GE,
				TimestampTzGetDatum(take->floor->deadline));
	ScanKeyInit(&keys[2], 2, BTLessStrategyNumber, F_TIMESTAMPTZ_LT,
				TimestampTzGetDatum(box->now));
	scan = ik_scan_rows(&box->leases, LEASES_BY_DEADLINE, &dirty, keys, 3);
	while (index_getnext_slot(scan, ForwardScanDirection, lease))
	{
		TimestampTz deadline;
		bool		gone = false;

		CHECK_FOR_INTERRUPTS();
		if (TransactionIdIsValid(dirty.xmin))
			continue;			/* not committed: floors know of its writer */
		slot_getallattrs(lease);
		deadline = DatumGetTimestampTz(lease->tts_values[LEASES_DEADLINE]);
		/* the rest is for the next round, or call: the floor stays below it */
		if (n == MAX_APART || (n > 0 && GetCurrentTimestamp() > take->stop_apart))
		{
			first = Min(first, deadline);
			take->more_leases = true;
			break;
		}
		n++;
		/* who waits is told to take: what comes of it is seen then */
		if (take->only_look)
		{
			take->nhanded++;
			first = Min(first, deadline);
			break;
		}
		/* a rival at work on it may roll back, so it has to be met again */
		if (!TransactionIdIsValid(dirty.xmax))
			gone = ik_take_lease_apart(box, lease, &take->settings);
		if (!gone)
			first = Min(first, deadline);
	}
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(lease);
	take->floor->deadline = first;
}

/*
 * Two queues: events that are due at once, in the order of their places, and
 * those that had to wait for a time, in the order of the times.  Neither may
 * starve the other, so the latter has the first half, and the rest of what the
 * former leaves; of one event, now this one and now that one.
 */
static void
take_events(Take *take)
{
	static bool turn;
	int64		half = take->max / 2 + (turn && take->max % 2 == 1);
	bool		all;

	turn = !turn;
	do
	{
		take->passed_on = false;
		all = take_range(take, true, half);
		(void) take_range(take, false, take->max);
		if (!all)
			(void) take_range(take, true, take->max);
	} while (take->passed_on && take->nhanded < take->max &&
			 take->npassed < MAX_PASSED);
}

/*
 * Look through the events that are due at once, or those that have waited for
 * a time, from the floor on, until so many have been handed out.  Was it all?
 */
static bool
take_range(Take *take, bool waited, int64 limit)
{
	TupleTableSlot *candidate = take->candidate;
	IndexScanDesc scan;
	bool		all = false;
	int64		place = PG_INT64_MAX;	/* of the first that is not settled */
	TimestampTz due = DT_NOEND;

	if (take->nhanded >= limit)
		return false;
	scan = begin_range(take, waited);
	while (take->nhanded < limit && take->npassed < MAX_PASSED)
	{
		int64		handed = take->nhanded;

		CHECK_FOR_INTERRUPTS();
		if (!index_getnext_slot(scan, ForwardScanDirection, candidate))
		{
			all = true;
			break;
		}

		/* floors know of the writer of what is not committed */
		if (TransactionIdIsValid(take->dirty.xmin))
			continue;
		slot_getsomeattrs(candidate, OUTBOX_KEY + 1);
		take->fresh = false;
		if (!take_candidate(take))
		{
			place = Min(place, event_place(candidate));
			due = Min(due, event_due(candidate));
		}
		if (take->nhanded == handed && ++take->npassed % RAISE_EVERY == 0)
		{
			raise_floor(take, waited, Min(place, event_place(candidate)),
						Min(due, event_due(candidate)));
			ik_floor_found(take->floor, take->box.events.rel);
		}
	}
	finish_block(take);
	if (!all && !TTS_EMPTY(candidate))
	{
		place = Min(place, event_place(candidate));
		due = Min(due, event_due(candidate));
	}
	raise_floor(take, waited, Min(place, ik_newest_number_seen() + 1),
				Min(due, take->box.now));
	index_endscan(scan);
	ExecClearTuple(candidate);
	return all;
}

static IndexScanDesc
begin_range(Take *take, bool waited)
{
	ScanKeyData keys[3];

	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(take->topic));
	if (waited)
	{
		/* after -infinity, which stands for those that are due at once */
		ScanKeyInit(&keys[1], 2, BTGreaterEqualStrategyNumber, F_TIMESTAMPTZ_GE,
					TimestampTzGetDatum(Max(take->floor->due, MIN_TIMESTAMP)));
		ScanKeyInit(&keys[2], 2, BTLessEqualStrategyNumber, F_TIMESTAMPTZ_LE,
					TimestampTzGetDatum(take->box.now));
	}
	else
	{
		ScanKeyInit(&keys[1], 2, BTEqualStrategyNumber, F_TIMESTAMPTZ_EQ,
					TimestampTzGetDatum(DT_NOBEGIN));
		ScanKeyInit(&keys[2], 3, BTGreaterEqualStrategyNumber, F_INT8GE,
					Int64GetDatum(take->floor->place));
	}
	return ik_scan_rows(&take->box.events, OUTBOX_BY_DUE, &take->dirty, keys, 3);
}

static void
raise_floor(Take *take, bool waited, int64 place, TimestampTz due)
{
	if (waited)
		take->floor->due = Max(take->floor->due, due);
	else
		take->floor->place = Max(take->floor->place, place);
}

/*
 * Hand out the candidate, if it may go.  False if that is not settled, and
 * somebody has to look at it again.
 */
static bool
take_candidate(Take *take)
{
	Outbox	   *box = &take->box;
	TupleTableSlot *candidate = take->candidate;
	Lease	   *lease;

	if (!block_is_ours(take, block_of(event_id(candidate))))
	{
		take->busy = true;
		return false;
	}

	/* it may have been taken and acknowledged before we got the lock */
	if (take->fresh)
	{
		if (!table_tuple_satisfies_snapshot(box->events.rel, candidate, &take->dirty))
			return true;
	}
	if (TransactionIdIsValid(take->dirty.xmax))
		return false;			/* it is being changed */

	/* out, or with a lease that is over and will be taken apart */
	if ((take->handed >> bit_of(event_id(candidate))) & 1)
		return true;
	lease = ik_lease_of(&take->leases, candidate);
	if (lease != NULL)
		return !TransactionIdIsValid(lease->rival);

	if (event_isnull(candidate, KEY))
		return hand_out(take, false);
	return take_key(take);
}

/*
 * Have the lock of the candidate's block, and its leases read under it; false
 * if a rival is taking from it.
 */
static bool
block_is_ours(Take *take, int64 block)
{
	if (take->leases.block == block)
		return take->locked;
	finish_block(take);
	take->leases.block = block;
	take->locked = ik_try_lock(ik_block_lock(block));
	if (take->locked)
		ik_read_leases(&take->box, &take->leases, block);
	take->fresh = true;
	return take->locked;
}

/* Write the lease of what was handed out of the block, and let rivals in. */
static void
finish_block(Take *take)
{
	if (take->handed != 0)
		ik_add_lease(&take->box, take->leases.block, take->highest,
					 take->deadline, take->handed,
					 PointerGetDatum(take->topic));
	if (take->locked)
		ik_unlock(ik_block_lock(take->leases.block));
	take->handed = 0;
	take->highest = 0;
	take->locked = false;
	take->leases.block = -1;
}

/*
 * The candidate has an ordering key: it goes if it is the head, and no other
 * event of the key is out.  Otherwise it is passed over: the end of the other
 * one's turn will give it a new place.
 *
 * No lock and no note are needed if no other one can come before it as long as
 * it is out, and none that is out did: in this order, as ik_keep_turn() relies on
 * it.
 */
static bool
take_key(Take *take)
{
	TupleTableSlot *candidate = take->candidate;
	Datum		topic = PointerGetDatum(take->topic);
	Datum		key = event_value(candidate, KEY);
	bool		going = false;
	uint64		lock;
	bool		settled;

	if (is_noted(take, DatumGetTextPP(key)))
		return true;
	if (event_id(candidate) <= ik_settled_number())
	{
		settled = take_head(take, &going);
		if (!going)
			return settled;
		if (!ik_key_is_noted(&take->box, topic, key))
			return hand_out(take, false);
	}
	lock = ik_ordering_lock(topic, key);
	if (!ik_try_lock(lock))
	{
		take->busy = true;
		return false;
	}
	settled = take_noted(take);
	ik_unlock(lock);
	return settled;
}

/* The same under the key's lock, with a note. */
static bool
take_noted(Take *take)
{
	Outbox	   *box = &take->box;
	Datum		topic = PointerGetDatum(take->topic);
	Datum		key = event_value(take->candidate, KEY);
	bool		settled;
	bool		going;

	/*
	 * In this order: an ack or a nack that ends in between changes the note
	 * or what it points to before it looks for the head.
	 */
	if (ik_key_is_out(box, topic, key, take->leases.block, take->handed, &settled))
	{
		if (settled)
			note_key(take, DatumGetTextPP(key), 0);
		return settled;
	}
	settled = take_head(take, &going);
	return going ? hand_out(take, true) : settled;
}

/* Is the candidate the head of its key?  Going: it is, and nobody changes it. */
static bool
take_head(Take *take, bool *going)
{
	Outbox	   *box = &take->box;
	TupleTableSlot *candidate = take->candidate;
	Datum		key = event_value(candidate, KEY);
	TransactionId rival;

	*going = false;
	if (!ik_find_head(box, PointerGetDatum(take->topic), key,
					  event_id(candidate), &rival) ||
		TransactionIdIsValid(rival))
		return false;
	*going = event_id(box->head) == event_id(candidate);
	if (!*going)
		note_key(take, DatumGetTextPP(key), event_id(box->head));
	return true;
}

/* Lease the candidate to the caller, and note its key; or park it. */
static bool
hand_out(Take *take, bool with_note)
{
	Outbox	   *box = &take->box;
	TupleTableSlot *event = take->candidate;
	Datum		values[5];
	bool		nulls[5] = {0};

	/* there is one, and nothing is written: so it is not settled */
	if (take->only_look)
	{
		take->nhanded++;
		return false;
	}
	/* nearly all are handed out for the first time: no need of the topic */
	if (event_tries(event) > 0)
	{
		ik_read_topic(&take->settings, PointerGetDatum(take->topic));
		if (event_tries(event) >= take->settings.max_attempts)
			return park(take);
	}

	/* the clock is read when we have a transaction id: floors rely on that */
	if (take->deadline == 0)
	{
		(void) GetTopTransactionId();
		take->deadline = ik_finite_after(GetCurrentTimestamp(), take->lease, "lease");
	}
	ik_touch(event_id(event), event_due(event));
	if (with_note)
		ik_note_key(box, PointerGetDatum(take->topic),
					event_value(event, KEY), event_id(event));
	/* finish_block() writes one lease for all of them */
	take->handed |= UINT64CONST(1) << bit_of(event_id(event));
	take->highest = Max(take->highest, event_place(event));

	slot_getallattrs(event);
	values[0] = event_value(event, ID);
	values[1] = Int64GetDatum(event_attempt(event) + 1);
	values[2] = event_value(event, KEY);
	nulls[2] = event_isnull(event, KEY);
	values[3] = event_value(event, PAYLOAD);
	nulls[3] = event_isnull(event, PAYLOAD);
	values[4] = event_value(event, EMITTED_AT);
	tuplestore_putvalues(take->result->setResult, take->result->setDesc,
						 values, nulls);
	take->nhanded++;
	return true;
}

/* The attempts that the candidate may have were lowered meanwhile. */
static bool
park(Take *take)
{
	Outbox	   *box = &take->box;
	TupleTableSlot *event = take->candidate;
	TupleTableSlot *next;

	if (!ik_lock_found_row(&box->events, event, false))
		return false;
	next = ik_put_back(box, event, EVENT_PARKED, DT_NOEND);
	ik_park(next, &take->settings);
	if (!ik_write_event(box, event))
		return false;
	if (!event_isnull(event, KEY))
	{
		finish_block(take);		/* ik_end_turn() may wait */
		ik_end_turn(box, event, false, 0);
		noted_place(take, DatumGetTextPP(event_value(event, KEY)))->key = NULL;
		take->passed_on = true;
	}
	return true;
}

/*
 * Does this call know that the candidate's ordering key has to wait?  Of two
 * keys with the same place the later one is kept.
 */
static bool
is_noted(Take *take, text *key)
{
	NotedKey   *noted = noted_place(take, key);

	return noted->key != NULL &&
		VARSIZE_ANY_EXHDR(noted->key) == VARSIZE_ANY_EXHDR(key) &&
		memcmp(VARDATA_ANY(noted->key), VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key)) == 0 &&
		event_id(take->candidate) > noted->head;
}

static void
note_key(Take *take, text *key, int64 head)
{
	NotedKey   *noted = noted_place(take, key);

	if (noted->key != NULL)
		pfree(noted->key);
	noted->key = DatumGetTextPCopy(PointerGetDatum(key));
	noted->head = head;
}

static NotedKey *
noted_place(Take *take, text *key)
{
	return &take->noted[hash_bytes((unsigned char *) VARDATA_ANY(key),
								   VARSIZE_ANY_EXHDR(key)) % MAX_NOTED];
}
