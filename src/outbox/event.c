/*-------------------------------------------------------------------------
 *
 * event.c
 *		One event: found, written, removed; and the next one of its key.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox/outbox.h"

#include "access/htup_details.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_sequence.h"
#include "commands/sequence.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

/* the sequence, once it was found to be as the install script made it */
static Oid	checked_sequence = InvalidOid;

static Oid	find_sequence(void);
static void forget_sequence(Datum arg, int cacheid, uint32 hashvalue);
static bool find_first(Outbox *box, int index, ScanKey keys, int nkeys,
					   TupleTableSlot *event, TransactionId *rival);

/* Open what a call works on.  Errors: 25006, 55000. */
void
ik_open_outbox(Outbox *box, const char *function, bool with_leases)
{
	ik_refuse_to_write(function);
	memset(box, 0, sizeof(Outbox));
	ik_open_rows(&box->events, &ik_outbox, RowExclusiveLock);
	box->sequence = find_sequence();
	box->with_leases = with_leases;
	if (!with_leases)
		return;
	ik_open_rows(&box->leases, &ik_outbox_leases, RowExclusiveLock);
	ik_open_rows(&box->keys, &ik_outbox_keys, RowExclusiveLock);
	box->event = table_slot_create(box->events.rel, NULL);
	box->head = table_slot_create(box->events.rel, NULL);
	box->lease = table_slot_create(box->leases.rel, NULL);
	box->note = table_slot_create(box->keys.rel, NULL);
	box->now = GetCurrentTimestamp();
	ik_look_around(box->sequence, box->now);
}

void
ik_close_outbox(Outbox *box)
{
	if (box->with_leases)
	{
		ExecDropSingleTupleTableSlot(box->note);
		ExecDropSingleTupleTableSlot(box->lease);
		ExecDropSingleTupleTableSlot(box->head);
		ExecDropSingleTupleTableSlot(box->event);
		ik_close_rows(&box->keys);
		ik_close_rows(&box->leases);
	}
	ik_close_rows(&box->events);

	/* or a second call in the same statement could not change what we wrote */
	CommandCounterIncrement();
}

/*
 * Its numbers only grow, for all sessions together, and a crash brings none back:
 * the order of a key's events is theirs, and an id may be a key somewhere else.
 * That it was made so is looked at once, until something about it may have changed.
 */
static Oid
find_sequence(void)
{
	static bool registered = false;
	Oid			sequence = ik_own_relation("outbox_id_seq");
	HeapTuple	tuple;
	bool		as_made = false;

	if (sequence == checked_sequence)
		return sequence;
	if (!registered)
	{
		CacheRegisterSyscacheCallback(SEQRELID, forget_sequence, (Datum) 0);
		CacheRegisterSyscacheCallback(RELOID, forget_sequence, (Datum) 0);
		registered = true;
	}

	/* an invalidation that comes while we look must not be lost */
	checked_sequence = sequence;
	tuple = SearchSysCache1(SEQRELID, ObjectIdGetDatum(sequence));
	if (HeapTupleIsValid(tuple))
	{
		Form_pg_sequence form = (Form_pg_sequence) GETSTRUCT(tuple);

		as_made = form->seqincrement > 0 && form->seqcache == 1 &&
			!form->seqcycle &&
			get_rel_persistence(sequence) == RELPERSISTENCE_PERMANENT;
		ReleaseSysCache(tuple);
	}
	if (!as_made)
	{
		checked_sequence = InvalidOid;
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("sequence \"idempotency.outbox_id_seq\" has been altered"),
				 errhint("Alter it back: INCREMENT 1 CACHE 1 NO CYCLE, and SET LOGGED.")));
	}
	return sequence;
}

/* Syscache callback. */
static void
forget_sequence(Datum arg, int cacheid, uint32 hashvalue)
{
	checked_sequence = InvalidOid;
}

/* The first argument, topic: 22004, 22023. */
text *
ik_topic_argument(FunctionCallInfo fcinfo)
{
	text	   *topic = PG_ARGISNULL(0) ? NULL : PG_GETARG_TEXT_PP(0);

	ik_check_text(topic, MAX_TOPIC_LENGTH, "topic",
				  "It tells the takers which events are theirs, such as 'mail'.");
	return topic;
}

/* What holds for a topic: its row, if there is one, or the settings. */
void
ik_read_topic(TopicSettings *settings, Datum topic)
{
	RowAccess	row;

	if (settings->read)
		return;
	settings->read = true;
	settings->max_attempts = ik_outbox_max_attempts;
	settings->parked_blocks = false;
	ik_open_row(&row, &ik_outbox_topics, topic, (Datum) 0, 0, AccessShareLock);
	if (ik_read_newest_row(&row))
	{
		bool		isnull;
		Datum		value = slot_getattr(row.slot, TOPICS_MAX_ATTEMPTS + 1, &isnull);

		if (!isnull)
			settings->max_attempts = DatumGetInt32(value);
		value = slot_getattr(row.slot, TOPICS_PARKED_BLOCKS + 1, &isnull);
		settings->parked_blocks = !isnull && DatumGetBool(value);
	}
	ik_close_row(&row);
}

/*
 * The next number of the sequence.  Our transaction has its id by then: floors
 * rely on that (floor.c).  What it is to be above came of the same sequence, or
 * from elsewhere: error 55000 if the sequence was left behind.
 */
int64
ik_next_number(Outbox *box, int64 above)
{
	int64		number;

	(void) GetTopTransactionId();
	number = nextval_internal(box->sequence, false);
	if (number <= above)
		ik_refuse_sequence();
	return number;
}

/*
 * The rows have come without their sequence, by logical replication say.  A
 * lease with such a number would not count: its events would be handed out again
 * at once, and nobody could acknowledge them.
 */
void
ik_refuse_sequence(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("sequence \"idempotency.outbox_id_seq\" is behind the outbox"),
			 errhint("Set it beyond every id and place in idempotency.outbox, and every number that is taken in idempotency.outbox_leases and idempotency.outbox_keys.")));
}

/*
 * The event with this id as it is committed or our own, and who is changing it.
 * What a rival has written and not committed is not there yet.
 */
bool
ik_fetch_event(Outbox *box, int64 id, TupleTableSlot *event,
			   TransactionId *rival)
{
	ScanKeyData key;

	ScanKeyInit(&key, 1, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(id));
	return find_first(box, PRIMARY_KEY, &key, 1, event, rival);
}

/*
 * The first event by an index that is committed or our own, and who is changing
 * it.  A dirty snapshot alone could miss one whose next version is written and
 * committed between our look at the index and our look at the row: so what is
 * there is told by a snapshot from before the scan.  It is no scan with that
 * snapshot where a predicate lock would be taken.
 */
static bool
find_first(Outbox *box, int index, ScanKey keys, int nkeys,
		   TupleTableSlot *event, TransactionId *rival)
{
	Relation	rel = box->events.rel;
	bool		found;
	bool		current;

	do
	{
		Snapshot	latest = RegisterSnapshot(GetLatestSnapshot());
		IndexScanDesc scan = ik_scan_rows(&box->events, index,
										  IsolationIsSerializable() ? SnapshotAny : latest,
										  keys, nkeys);
		SnapshotData dirty;

		CHECK_FOR_INTERRUPTS();
		latest->curcid = InvalidCommandId;	/* with what this command wrote */
		InitDirtySnapshot(dirty);
		dirty.xmax = InvalidTransactionId;
		current = true;
		do
			found = index_getnext_slot(scan, ForwardScanDirection, event);
		while (found && !table_tuple_satisfies_snapshot(rel, event, latest));
		if (found)
		{
			/* it may have been changed since that snapshot: then look again */
			current = table_tuple_satisfies_snapshot(rel, event, &dirty);
			slot_getallattrs(event);
		}
		*rival = dirty.xmax;
		index_endscan(scan);
		UnregisterSnapshot(latest);
	} while (!current);
	return found;
}

/*
 * The head of an ordering key, into box->head: the event with the lowest id of
 * those that are not parked, or block it.  There is none below the key's floor,
 * but for the one that the caller has seen: not_above is its id.
 */
bool
ik_find_head(Outbox *box, Datum topic, Datum key, int64 not_above,
			 TransactionId *rival)
{
	int64	   *floor = ik_key_floor(topic, key);
	ScanKeyData keys[3];
	bool		found;

	*floor = Min(*floor, not_above);
	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ, key);
	ScanKeyInit(&keys[1], 2, BTEqualStrategyNumber, F_TEXTEQ, topic);
	ScanKeyInit(&keys[2], 3, BTGreaterEqualStrategyNumber, F_INT8GE,
				Int64GetDatum(*floor));
	found = find_first(box, OUTBOX_BY_KEY, keys, 3, box->head, rival);
	if (found)
		*floor = event_id(box->head);
	return found;
}

/* The version of an event that stands at the end of the queue. */
TupleTableSlot *
ik_put_back(Outbox *box, TupleTableSlot *event, char state, TimestampTz due)
{
	TupleTableSlot *next = ik_next_version(&box->events, event);

	event_value(next, PLACE) = Int64GetDatum(ik_next_number(box, event_place(event)));
	event_value(next, STATE) = CharGetDatum(state);
	event_value(next, DUE) = TimestampTzGetDatum(due);
	ik_note_topic(DatumGetTextPP(event_value(next, TOPIC)));
	return next;
}

/*
 * In that version an attempt has failed: if it was the last one, the event is
 * parked.
 */
void
ik_end_attempt(TupleTableSlot *next, const TopicSettings *settings)
{
	event_value(next, ATTEMPT) = Int32GetDatum(event_attempt(next) + 1);
	event_value(next, TRIES) = Int32GetDatum(event_tries(next) + 1);
	if (event_tries(next) >= settings->max_attempts)
		ik_park(next, settings);
}

void
ik_park(TupleTableSlot *next, const TopicSettings *settings)
{
	event_value(next, STATE) = CharGetDatum(settings->parked_blocks ?
											EVENT_BLOCKING : EVENT_PARKED);
	event_value(next, DUE) = TimestampTzGetDatum(DT_NOEND);
	event_value(next, PARKED_AT) = TimestampTzGetDatum(GetCurrentTimestamp());
	event_isnull(next, PARKED_AT) = false;
}

/* Write the next version of an event; false if it changed meanwhile. */
bool
ik_write_event(Outbox *box, TupleTableSlot *event)
{
	ik_touch(event_id(event), event_due(event));
	return ik_update_found_row(&box->events, event);
}

/* Remove an event; false if it changed meanwhile, or changes and we don't wait. */
bool
ik_remove_event(Outbox *box, TupleTableSlot *event, bool wait)
{
	ik_touch(event_id(event), event_due(event));
	return ik_delete_found_row(&box->events, &event->tts_tid, wait);
}

