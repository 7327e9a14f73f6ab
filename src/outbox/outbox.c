/*-------------------------------------------------------------------------
 *
 * outbox.c
 *		The SQL functions of the outbox but take(): emit, ack, nack, retry.
 *
 * outbox.h tells how it works.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox/outbox.h"

#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

/*
 * After its first failed attempt an event waits a second, unless nack says
 * otherwise, then two, four, and so on, up to an hour.
 */
#define MAX_BACKOFF		(3600 * USECS_PER_SEC)

/* an event as a worker knows it */
typedef struct Handed
{
	int64		id;
	int64		attempt;
} Handed;

/*
 * changes an event that was handed out or parked, and says whether it still waits
 * for a turn; false if it changed meanwhile
 */
typedef bool (*ChangeEvent) (Outbox *box, TupleTableSlot *event, Lease *lease,
							 void *arg, bool *waits);

/* what nack was given */
typedef struct Nack
{
	const Interval *retry_in;
	text	   *error;
} Nack;

PG_FUNCTION_INFO_V1(idempotency_emit);
PG_FUNCTION_INFO_V1(idempotency_emit_batch);
PG_FUNCTION_INFO_V1(idempotency_ack);
PG_FUNCTION_INFO_V1(idempotency_ack_batch);
PG_FUNCTION_INFO_V1(idempotency_nack);
PG_FUNCTION_INFO_V1(idempotency_extend_event);
PG_FUNCTION_INFO_V1(idempotency_retry_event);
PG_FUNCTION_INFO_V1(idempotency_discard_event);
PG_FUNCTION_INFO_V1(idempotency_retry_parked);

static void check_ordering_key(const text *key);
static TimestampTz due_argument(FunctionCallInfo fcinfo, int argument,
								TimestampTz now);
static int64 add_event(Outbox *box, text *topic, text *key, Datum payload,
					   bool no_payload, TimestampTz due, TimestampTz now);
static void handed_arguments(FunctionCallInfo fcinfo, Handed *handed);
static int	compare_handed(const void *a, const void *b);
static bool with_attempt(Outbox *box, BlockLeases *leases, const Handed *handed,
						 bool given_back_too, ChangeEvent change, void *arg);
static bool change_without_lease(Outbox *box, BlockLeases *leases,
								 ChangeEvent change, void *arg, bool *waits);
static bool discard(Outbox *box, TupleTableSlot *event, Lease *lease,
					void *arg, bool *waits);
static void count_acknowledged(BlockLeases *leases, int64 id);
static bool give_back(Outbox *box, TupleTableSlot *event, Lease *lease,
					  void *arg, bool *waits);
static TimestampTz backoff(TimestampTz now, int tries);
static Datum change_parked(FunctionCallInfo fcinfo, const char *function,
						   ChangeEvent change, CountedFunction counted);
static bool retry(Outbox *box, TupleTableSlot *event, Lease *lease,
				  void *arg, bool *waits);

/*
 * emit(topic text, payload jsonb, key text DEFAULT NULL, delay interval DEFAULT
 * NULL) RETURNS bigint
 *
 * Write an event in the caller's transaction and return its id.  Takes no lock
 * on the key: callers who want an order serialise before they emit.
 */
Datum
idempotency_emit(PG_FUNCTION_ARGS)
{
	text	   *topic = ik_topic_argument(fcinfo);
	text	   *key = PG_ARGISNULL(2) ? NULL : PG_GETARG_TEXT_PP(2);
	Outbox		box;
	TimestampTz now;
	int64		id;

	if (key != NULL)
		check_ordering_key(key);
	(void) due_argument(fcinfo, 3, GetCurrentTimestamp());

	ik_open_outbox(&box, "idempotency.emit()", false);
	(void) GetTopTransactionId();	/* before the clock is read (floor.c) */
	now = GetCurrentTimestamp();
	id = add_event(&box, topic, key, PG_GETARG_DATUM(1), PG_ARGISNULL(1),
				   due_argument(fcinfo, 3, now), now);
	ik_close_outbox(&box);
	ik_count(COUNT_EMIT, COUNT_DONE);
	PG_RETURN_INT64(id);
}

/*
 * emit_batch(topic text, payloads jsonb[], keys text[] DEFAULT NULL, delay
 * interval DEFAULT NULL) RETURNS bigint[]
 *
 * The same for many; the ids in the order of the payloads.
 */
Datum
idempotency_emit_batch(PG_FUNCTION_ARGS)
{
	text	   *topic = ik_topic_argument(fcinfo);
	Datum	   *payloads;
	bool	   *no_payload;
	Datum	   *keys = NULL;
	bool	   *no_key = NULL;
	int			n;
	Datum	   *ids;
	Outbox		box;
	TimestampTz now;
	TimestampTz due;

	n = ik_array_argument(fcinfo, 1, "payloads", JSONBOID, true, &payloads, &no_payload);
	if (!PG_ARGISNULL(2) &&
		ik_array_argument(fcinfo, 2, "keys", TEXTOID, true, &keys, &no_key) != n)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("payloads and keys must have the same number of elements"),
				 errhint("NULL as an element stands for no key, NULL as keys for none at all.")));
	/* all is judged before anything is written */
	for (int i = 0; keys != NULL && i < n; i++)
		if (!no_key[i])
			check_ordering_key(DatumGetTextPP(keys[i]));
	(void) due_argument(fcinfo, 3, GetCurrentTimestamp());

	ik_open_outbox(&box, "idempotency.emit_batch()", false);
	(void) GetTopTransactionId();
	/* read after the lock, which may have been waited for */
	now = GetCurrentTimestamp();
	due = due_argument(fcinfo, 3, now);
	ids = palloc(Max(n, 1) * sizeof(Datum));
	for (int i = 0; i < n; i++)
	{
		text	   *key = keys == NULL || no_key[i] ? NULL : DatumGetTextPP(keys[i]);

		CHECK_FOR_INTERRUPTS();
		ids[i] = Int64GetDatum(add_event(&box, topic, key, payloads[i],
										 no_payload[i], due, now));
	}
	ik_close_outbox(&box);
	ik_count_many(COUNT_EMIT, COUNT_DONE, n);
	PG_RETURN_ARRAYTYPE_P(construct_array(ids, n, INT8OID, sizeof(int64),
										  FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
}

/*
 * ack(id bigint, attempt bigint) RETURNS boolean
 *
 * The effect has happened: remove the event.  False, and nothing changed, if
 * there is no such event or a later attempt superseded this one.
 */
Datum
idempotency_ack(PG_FUNCTION_ARGS)
{
	Handed		handed;
	Outbox		box;
	BlockLeases leases = {.block = -1};
	bool		done;

	handed_arguments(fcinfo, &handed);
	ik_open_outbox(&box, "idempotency.ack()", true);
	done = with_attempt(&box, &leases, &handed, true, discard, NULL);
	if (done)
		count_acknowledged(&leases, handed.id);
	ik_drop_acked_leases(&box, &leases);
	ik_close_outbox(&box);
	ik_count(COUNT_ACK, done ? COUNT_DONE : COUNT_NOT_DONE);
	PG_RETURN_BOOL(done);
}

/*
 * ack_batch(ids bigint[], attempts bigint[]) RETURNS bigint
 *
 * The same for many: how many were acknowledged.  Two calls at once may wait
 * for each other on the same events, so they go by the order of the ids.
 */
Datum
idempotency_ack_batch(PG_FUNCTION_ARGS)
{
	Datum	   *ids;
	Datum	   *attempts;
	int			n = ik_array_argument(fcinfo, 0, "ids", INT8OID, false, &ids, NULL);
	Handed	   *handed;
	Outbox		box;
	BlockLeases leases = {.block = -1};
	int64		done = 0;

	if (ik_array_argument(fcinfo, 1, "attempts", INT8OID, false, &attempts, NULL) != n)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ids and attempts must have the same number of elements"),
				 errhint("Pass both as take() returned them, in the same order.")));
	handed = palloc(Max(n, 1) * sizeof(Handed));
	for (int i = 0; i < n; i++)
	{
		handed[i].id = DatumGetInt64(ids[i]);
		handed[i].attempt = DatumGetInt64(attempts[i]);
	}
	/* one order for all, in which the events of a block come together */
	if (n > 1)
		qsort(handed, n, sizeof(Handed), compare_handed);

	ik_open_outbox(&box, "idempotency.ack_batch()", true);
	for (int i = 0; i < n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		/* done with a block: what leases it had are gone through once */
		if (leases.block != block_of(handed[i].id))
			ik_drop_acked_leases(&box, &leases);
		/* one that was superseded keeps none of the others back */
		if (with_attempt(&box, &leases, &handed[i], true, discard, NULL))
		{
			count_acknowledged(&leases, handed[i].id);
			done++;
		}
	}
	ik_drop_acked_leases(&box, &leases);
	ik_close_outbox(&box);
	ik_count_many(COUNT_ACK, COUNT_DONE, done);
	ik_count_many(COUNT_ACK, COUNT_NOT_DONE, n - done);
	PG_RETURN_INT64(done);
}

/*
 * nack(id bigint, attempt bigint, retry_in interval DEFAULT NULL, error text
 * DEFAULT NULL) RETURNS boolean
 *
 * The effect did not happen: give the event back, to be taken again after
 * retry_in (NULL: the backoff), or park it after its last attempt.  False as
 * for ack.
 */
Datum
idempotency_nack(PG_FUNCTION_ARGS)
{
	Handed		handed;
	Nack		nack = {0};
	Outbox		box;
	BlockLeases leases = {.block = -1};
	bool		done;

	handed_arguments(fcinfo, &handed);
	if (!PG_ARGISNULL(2))
	{
		nack.retry_in = PG_GETARG_INTERVAL_P(2);
		(void) ik_finite_after(GetCurrentTimestamp(), nack.retry_in, "retry_in");
	}
	if (!PG_ARGISNULL(3))
		nack.error = PG_GETARG_TEXT_PP(3);

	ik_open_outbox(&box, "idempotency.nack()", true);
	done = with_attempt(&box, &leases, &handed, false, give_back, &nack);
	ik_close_outbox(&box);
	ik_count(COUNT_NACK, done ? COUNT_DONE : COUNT_NOT_DONE);
	PG_RETURN_BOOL(done);
}

/*
 * extend_event(id bigint, attempt bigint, lease interval) RETURNS timestamptz
 *
 * More time for an event in hand: its lease ends so long after now.  NULL if it
 * is too late: the attempt was superseded, or given up when its lease was over.
 */
Datum
idempotency_extend_event(PG_FUNCTION_ARGS)
{
	Handed		handed;
	Outbox		box;
	const Interval *lease;
	TimestampTz deadline = 0;

	handed_arguments(fcinfo, &handed);
	ik_not_null(fcinfo, 2, "lease");
	lease = PG_GETARG_INTERVAL_P(2);
	(void) ik_finite_after(GetCurrentTimestamp(), lease, "lease");

	ik_open_outbox(&box, "idempotency.extend_event()", true);
	for (;;)
	{
		BlockLeases leases = {0};
		TransactionId rival;
		Lease	   *held;

		if (!ik_fetch_event(&box, handed.id, box.event, &rival))
			break;

		/* who takes the lease apart locks the event as well */
		if (!ik_lock_found_row(&box.events, box.event, true))
			continue;
		ik_read_leases(&box, &leases, block_of(handed.id));
		held = ik_lease_of(&leases, box.event);
		if (held != NULL && TransactionIdIsValid(held->rival))
		{
			(void) ik_wait_for_xact(held->rival, DT_NOEND);
			continue;
		}
		if (held == NULL || event_attempt(box.event) + 1 != handed.attempt)
			break;
		deadline = ik_finite_after(GetCurrentTimestamp(), lease, "lease");
		ik_add_lease(&box, leases.block, event_place(box.event), deadline,
					 UINT64CONST(1) << bit_of(handed.id),
					 event_value(box.event, TOPIC));
		break;
	}
	ik_close_outbox(&box);
	ik_count(COUNT_EXTEND_EVENT, deadline == 0 ? COUNT_NOT_DONE : COUNT_DONE);
	if (deadline == 0)
		PG_RETURN_NULL();

	/* or a crash could end the lease earlier than was promised */
	ForceSyncCommit();
	PG_RETURN_TIMESTAMPTZ(deadline);
}

/*
 * retry_event(id bigint) RETURNS boolean
 *
 * Give a parked event back, with as many attempts before it as a new one.  The
 * number of the attempt goes on where it was.  False: there is no such event,
 * or it is not parked.
 */
Datum
idempotency_retry_event(PG_FUNCTION_ARGS)
{
	return change_parked(fcinfo, "idempotency.retry_event()", retry,
						 COUNT_RETRY_EVENT);
}

/* discard_event(id bigint) RETURNS boolean: remove a parked event. */
Datum
idempotency_discard_event(PG_FUNCTION_ARGS)
{
	return change_parked(fcinfo, "idempotency.discard_event()", discard,
						 COUNT_DISCARD_EVENT);
}

/* retry_parked(topic text) RETURNS bigint: the same for a topic; how many. */
Datum
idempotency_retry_parked(PG_FUNCTION_ARGS)
{
	text	   *topic = ik_topic_argument(fcinfo);
	Outbox		box;
	ScanKeyData keys[2];
	IndexScanDesc scan;
	int64		done = 0;
	bool		waits;

	ik_open_outbox(&box, "idempotency.retry_parked()", true);
	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(topic));
	ScanKeyInit(&keys[1], 2, BTEqualStrategyNumber, F_TIMESTAMPTZ_EQ,
				TimestampTzGetDatum(DT_NOEND));
	scan = ik_scan_rows(&box.events, OUTBOX_BY_DUE, SnapshotSelf, keys, 2);
	while (index_getnext_slot(scan, ForwardScanDirection, box.event))
	{
		CHECK_FOR_INTERRUPTS();
		slot_getallattrs(box.event);
		if (ik_lock_found_row(&box.events, box.event, false) &&
			retry(&box, box.event, NULL, NULL, &waits))
			done++;
	}
	index_endscan(scan);
	ik_close_outbox(&box);
	ik_count_many(COUNT_RETRY_PARKED, COUNT_DONE, done);
	PG_RETURN_INT64(done);
}

static void
check_ordering_key(const text *key)
{
	ik_check_text(key, MAX_KEY_LENGTH, "key",
				  "Events of one key come in their order; leave it out if none is needed.");
}

/* An event without a delay is due at once, also if the clock is set back. */
static TimestampTz
due_argument(FunctionCallInfo fcinfo, int argument, TimestampTz now)
{
	TimestampTz due = PG_ARGISNULL(argument) ? now :
		ik_finite_after(now, PG_GETARG_INTERVAL_P(argument), "delay");

	return due == now ? DT_NOBEGIN : due;
}

static int64
add_event(Outbox *box, text *topic, text *key, Datum payload,
		  bool no_payload, TimestampTz due, TimestampTz now)
{
	TupleTableSlot *event = ik_next_version(&box->events, NULL);
	int64		id = ik_next_number(box, 0);

	event_value(event, ID) = Int64GetDatum(id);
	event_value(event, PLACE) = Int64GetDatum(id);
	event_value(event, DUE) = TimestampTzGetDatum(due);
	event_value(event, EMITTED_AT) = TimestampTzGetDatum(now);
	event_isnull(event, PARKED_AT) = true;
	event_value(event, ATTEMPT) = Int32GetDatum(0);
	event_value(event, TRIES) = Int32GetDatum(0);
	event_value(event, STATE) = CharGetDatum(EVENT_READY);
	event_value(event, TOPIC) = PointerGetDatum(topic);
	event_value(event, KEY) = PointerGetDatum(key);
	event_isnull(event, KEY) = key == NULL;
	event_value(event, PAYLOAD) = payload;
	event_isnull(event, PAYLOAD) = no_payload;
	event_isnull(event, ERROR) = true;
	if (!ik_add_row(&box->events))
		ik_refuse_sequence();
	ik_note_topic(topic);
	if (key != NULL)
		ik_touch_new(id, due);
	return id;
}

/* The arguments id and attempt: 22004. */
static void
handed_arguments(FunctionCallInfo fcinfo, Handed *handed)
{
	ik_not_null(fcinfo, 0, "id");
	ik_not_null(fcinfo, 1, "attempt");
	handed->id = PG_GETARG_INT64(0);
	handed->attempt = PG_GETARG_INT64(1);
}

static int
compare_handed(const void *a, const void *b)
{
	int64		left = ((const Handed *) a)->id;
	int64		right = ((const Handed *) b)->id;

	return (left > right) - (left < right);
}

/*
 * Change an event whose attempt is the newest, waiting for a rival who is
 * changing it.  The newest attempt is good also after its lease, as long as
 * nobody took over; once it was given back, only if the caller says so.
 */
static bool
with_attempt(Outbox *box, BlockLeases *leases, const Handed *handed,
			 bool given_back_too, ChangeEvent change, void *arg)
{
	TupleTableSlot *event = box->event;

	for (;;)
	{
		TransactionId rival;
		Lease	   *lease = NULL;
		bool		was_out;
		bool		waits = false;

		if (handed->attempt <= 0 ||
			!ik_fetch_event(box, handed->id, event, &rival))
			return false;
		if (!TransactionIdIsValid(rival))
		{
			if (leases->block != block_of(handed->id))
				ik_read_leases(box, leases, block_of(handed->id));
			lease = ik_lease_of(leases, event);
			if (lease != NULL)
				rival = lease->rival;
		}
		/* the event or its lease is being changed: what comes of it decides */
		if (TransactionIdIsValid(rival))
		{
			(void) ik_wait_for_xact(rival, DT_NOEND);
			leases->block = -1;
			continue;
		}

		/* an attempt that is out is one more than the event has had */
		if (event_attempt(event) + (lease != NULL) != handed->attempt ||
			(lease == NULL && event_state(event) != EVENT_LAPSED && !given_back_too))
			return false;
		was_out = lease != NULL;
		if (was_out ? change(box, event, lease, arg, &waits) :
			change_without_lease(box, leases, change, arg, &waits))
		{
			ik_end_turn(box, event, was_out, waits ? handed->id : 0);
			return true;
		}
		leases->block = -1;		/* somebody changed it: look again */
	}
}

/*
 * The lease of this attempt was taken apart, or given back.  A taker can hand
 * the event out without writing it, so it is changed under its block's lock.
 */
static bool
change_without_lease(Outbox *box, BlockLeases *leases, ChangeEvent change,
					 void *arg, bool *waits)
{
	TupleTableSlot *event = box->event;
	uint64		lock = ik_block_lock(block_of(event_id(event)));
	bool		done = false;

	/* wait for the row first: nobody waits with a block's lock in hand */
	if (!ik_lock_found_row(&box->events, event, true))
		return false;
	(void) ik_wait_for_lock(lock, DT_NOEND);
	ik_read_leases(box, leases, block_of(event_id(event)));
	if (ik_lease_of(leases, event) == NULL)
		done = change(box, event, NULL, arg, waits);
	ik_unlock(lock);
	return done;
}

/* Remove an event that was acknowledged, or is given up. */
static bool
discard(Outbox *box, TupleTableSlot *event, Lease *lease, void *arg,
		bool *waits)
{
	return ik_remove_event(box, event, true);
}

/* Note in the leases that have it that an event was acknowledged. */
static void
count_acknowledged(BlockLeases *leases, int64 id)
{
	uint64		bit = UINT64CONST(1) << bit_of(id);

	for (int i = 0; leases->block == block_of(id) && i < leases->n; i++)
		leases->leases[i].acked |= leases->leases[i].events & bit;
}

static bool
give_back(Outbox *box, TupleTableSlot *event, Lease *lease, void *arg,
		  bool *waits)
{
	Nack	   *nack = arg;
	TopicSettings settings = {0};
	TimestampTz now;
	TimestampTz due;
	TupleTableSlot *next;

	(void) GetTopTransactionId();	/* before the clock is read (floor.c) */
	now = GetCurrentTimestamp();
	due = nack->retry_in == NULL ?
		backoff(now, event_tries(event) + (lease != NULL)) :
		ik_finite_after(now, nack->retry_in, "retry_in");
	ik_read_topic(&settings, event_value(event, TOPIC));
	next = ik_put_back(box, event, EVENT_READY, due == now ? DT_NOBEGIN : due);
	event_value(next, ERROR) = PointerGetDatum(nack->error);
	event_isnull(next, ERROR) = nack->error == NULL;
	if (lease != NULL)
		ik_end_attempt(next, &settings);
	*waits = !event_is_parked(next);
	return ik_write_event(box, event);
}

static TimestampTz
backoff(TimestampTz now, int tries)
{
	return now + Min(MAX_BACKOFF, USECS_PER_SEC << Min(Max(tries, 1) - 1, 12));
}

/*
 * Change the parked event in the first argument, waiting for a rival who is
 * changing it.  Was there one?
 */
static Datum
change_parked(FunctionCallInfo fcinfo, const char *function,
			  ChangeEvent change, CountedFunction counted)
{
	Outbox		box;
	TransactionId rival;
	bool		done = false;
	bool		waits = false;

	ik_not_null(fcinfo, 0, "id");
	ik_open_outbox(&box, function, true);
	while (!done && ik_fetch_event(&box, PG_GETARG_INT64(0), box.event, &rival))
	{
		if (TransactionIdIsValid(rival))
			(void) ik_wait_for_xact(rival, DT_NOEND);
		else if (event_is_parked(box.event))
			done = change(&box, box.event, NULL, NULL, &waits);
		else
			break;
	}
	if (done && !waits)
		ik_end_turn(&box, box.event, false, 0);
	ik_close_outbox(&box);
	ik_count(counted, done ? COUNT_DONE : COUNT_NOT_DONE);
	PG_RETURN_BOOL(done);
}

/* Give a parked event back. */
static bool
retry(Outbox *box, TupleTableSlot *event, Lease *lease, void *arg,
	  bool *waits)
{
	TupleTableSlot *next;

	if (!event_isnull(event, KEY) && event_state(event) == EVENT_PARKED)
		ik_keep_turn(box, event);
	next = ik_put_back(box, event, EVENT_READY, DT_NOBEGIN);
	event_value(next, TRIES) = Int32GetDatum(0);
	event_isnull(next, PARKED_AT) = true;
	*waits = true;

	/*
	 * It comes back with a low id, below the floors of its key: have every
	 * backend forget them.
	 */
	if (!event_isnull(event, KEY) && event_state(event) == EVENT_PARKED)
		CacheInvalidateRelcache(box->events.rel);
	return ik_write_event(box, event);
}
