/*-------------------------------------------------------------------------
 *
 * lease.c
 *		Leases of events, and notes of ordering keys that are out.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox/outbox.h"

#include "access/htup_details.h"
#include "access/tableam.h"
#include "access/transam.h"
#include "access/xact.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

/* how long purge leaves a lease that is over to the takers of its topic */
#define LEFT_TO_TAKERS	(3600 * USECS_PER_SEC)

static bool lease_is_over(TupleTableSlot *slot, TimestampTz now, uint64 *hash);
static bool lease_is_empty(TupleTableSlot *slot);
static bool any_note(TupleTableSlot *slot, TimestampTz now, uint64 *hash);
static bool note_is_empty(TupleTableSlot *slot);

const Purgeable ik_purge_leases = {
	&ik_outbox_leases, lease_is_over, lease_is_empty
};
const Purgeable ik_purge_outbox_keys = {
	&ik_outbox_keys, any_note, note_is_empty
};

static bool newest_note(Outbox *box, Datum topic, Datum key,
						TransactionId *rival);

#define note_id(slot) DatumGetInt64((slot)->tts_values[OUTBOX_KEYS_ID])

/* The lock under which a block's events are handed out. */
uint64
ik_block_lock(int64 block)
{
	static text *scope = NULL;
	union
	{
		text		value;
		char		bytes[VARHDRSZ + sizeof(int64)];
	}			name;

	SET_VARSIZE(&name, sizeof(name));
	memcpy(name.bytes + VARHDRSZ, &block, sizeof(int64));
	return ik_lock_hash(DatumGetTextPP(ik_constant_text(&scope, "idempotency.outbox")),
						&name.value);
}

/*
 * The lock of an ordering key, in a scope that no application's key can have.
 */
uint64
ik_ordering_lock(Datum topic, Datum key)
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

/*
 * Read the leases of a block, those of rivals that are not committed included:
 * a call that finds none under the block's lock may give one.
 */
void
ik_read_leases(Outbox *box, BlockLeases *leases, int64 block)
{
	ScanKeyData key;
	SnapshotData dirty;
	IndexScanDesc scan;

	leases->block = block;
	leases->n = 0;
	InitDirtySnapshot(dirty);
	ScanKeyInit(&key, 1, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(block));
	scan = ik_scan_rows(&box->leases, PRIMARY_KEY, &dirty, &key, 1);
	while (index_getnext_slot(scan, BackwardScanDirection, box->lease))
	{
		Datum	   *values = box->lease->tts_values;
		Lease	   *lease;

		if (leases->n == leases->size)
		{
			leases->size = Max(8, 2 * leases->size);
			leases->leases = leases->leases == NULL ?
				palloc(leases->size * sizeof(Lease)) :
				repalloc(leases->leases, leases->size * sizeof(Lease));
		}
		slot_getsomeattrs(box->lease, LEASES_EVENTS + 1);
		lease = &leases->leases[leases->n++];
		lease->taken = DatumGetInt64(values[LEASES_TAKEN]);
		lease->deadline = DatumGetTimestampTz(values[LEASES_DEADLINE]);
		lease->events = (uint64) DatumGetInt64(values[LEASES_EVENTS]);
		lease->acked = 0;
		lease->rival = TransactionIdIsValid(dirty.xmin) ? dirty.xmin : dirty.xmax;
		lease->tid = box->lease->tts_tid;
	}
	index_endscan(scan);
}

/* The lease that counts for an event of the block, or NULL. */
Lease *
ik_lease_of(BlockLeases *leases, TupleTableSlot *event)
{
	uint64		bit = UINT64CONST(1) << bit_of(event_id(event));

	for (int i = 0; i < leases->n; i++)
		if (leases->leases[i].events & bit)
			return leases->leases[i].taken > event_place(event) ?
				&leases->leases[i] : NULL;
	return NULL;
}

/* Lease events of the block, none of which has a place above that one. */
void
ik_add_lease(Outbox *box, int64 block, int64 above, TimestampTz deadline,
			 uint64 events, Datum topic)
{
	Datum	   *values = ik_next_version(&box->leases, NULL)->tts_values;

	values[LEASES_BLOCK] = Int64GetDatum(block);
	values[LEASES_TAKEN] = Int64GetDatum(ik_next_number(box, above));
	values[LEASES_DEADLINE] = TimestampTzGetDatum(deadline);
	values[LEASES_EVENTS] = Int64GetDatum((int64) events);
	values[LEASES_TOPIC] = topic;
	if (!ik_add_row(&box->leases))
		ik_refuse_sequence();
}

/*
 * Remove the leases of the block all of whose events this call has acknowledged.
 * Others are left for the first take after their deadline, and for purge.
 */
void
ik_drop_acked_leases(Outbox *box, BlockLeases *leases)
{
	for (int i = 0; i < leases->n; i++)
	{
		Lease	   *lease = &leases->leases[i];

		if (lease->acked == lease->events)
			(void) ik_delete_found_row(&box->leases, &lease->tid, false);
	}
	leases->block = -1;
	leases->n = 0;
}

/* Note that this event of the ordering key is out.  Under the key's lock. */
void
ik_note_key(Outbox *box, Datum topic, Datum key, int64 id)
{
	Datum	   *values = ik_next_version(&box->keys, NULL)->tts_values;

	values[OUTBOX_KEYS_TAKEN] = Int64GetDatum(ik_next_number(box, id));
	values[OUTBOX_KEYS_ID] = Int64GetDatum(id);
	values[OUTBOX_KEYS_TOPIC] = topic;
	values[OUTBOX_KEYS_KEY] = key;
	if (!ik_add_row(&box->keys))
		ik_refuse_sequence();
}

/* Is there a note of the key, be it worth something or not? */
bool
ik_key_is_noted(Outbox *box, Datum topic, Datum key)
{
	TransactionId rival;

	return newest_note(box, topic, key, &rival);
}

/*
 * Is an event of the key out, as far as a note tells?  And is that not settled
 * yet, since a rival is taking or acknowledging it?  The note is only a pointer:
 * what counts is the event's lease, or the bit for it in the lease of block and
 * events that the caller is about to write.
 */
bool
ik_key_is_out(Outbox *box, Datum topic, Datum key, int64 block, uint64 events,
			  bool *settled)
{
	TransactionId rival;
	TransactionId changing;
	int64		id;

	*settled = true;
	if (!newest_note(box, topic, key, &rival))
		return false;
	id = note_id(box->note);
	if (block_of(id) == block && (events >> bit_of(id)) & 1)
		return true;
	*settled = !TransactionIdIsValid(rival);
	if (!*settled)
		return true;
	if (!ik_fetch_event(box, id, box->head, &changing))
		return false;
	if (!ik_is_leased(box, box->head, &rival))
	{
		uint64		lock = ik_block_lock(block_of(id));
		bool		leased;

		/* a taker who did not see the note may be about to write the lease */
		if (!ik_try_lock(lock))
		{
			*settled = false;
			return true;
		}
		leased = ik_is_leased(box, box->head, &rival);
		ik_unlock(lock);
		if (!leased)
			return false;
	}
	*settled = !TransactionIdIsValid(rival) && !TransactionIdIsValid(changing);
	return true;
}

/* Is the event in the slot out, and who is writing or removing that lease? */
bool
ik_is_leased(Outbox *box, TupleTableSlot *event, TransactionId *rival)
{
	BlockLeases leases = {0};
	Lease	   *lease;

	ik_read_leases(box, &leases, block_of(event_id(event)));
	lease = ik_lease_of(&leases, event);
	*rival = lease == NULL ? InvalidTransactionId : lease->rival;
	if (leases.leases != NULL)
		pfree(leases.leases);
	return lease != NULL;
}

/*
 * The turn of the event is over: its key's note goes, if it has one.  One that
 * somebody else is writing stays, for purge.
 */
void
ik_drop_note(Outbox *box, TupleTableSlot *event)
{
	TransactionId rival;

	if (newest_note(box, event_value(event, TOPIC), event_value(event, KEY), &rival) &&
		note_id(box->note) == event_id(event) && !TransactionIdIsValid(rival))
		(void) ik_delete_found_row(&box->keys, &box->note->tts_tid, true);
}

/*
 * The youngest note of a key, unless it was removed: older ones do not count.
 * So one look at the high end does, however many are dead below.
 */
static bool
newest_note(Outbox *box, Datum topic, Datum key, TransactionId *rival)
{
	ScanKeyData keys[2];
	SnapshotData dirty;
	IndexScanDesc scan;
	bool		found = false;

	InitDirtySnapshot(dirty);
	*rival = InvalidTransactionId;
	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_TEXTEQ, key);
	ScanKeyInit(&keys[1], 2, BTEqualStrategyNumber, F_TEXTEQ, topic);
	scan = ik_scan_rows(&box->keys, PRIMARY_KEY, SnapshotAny, keys, 2);
	while (!found &&
		   index_getnext_slot(scan, BackwardScanDirection, box->note))
	{
		TransactionId writer;

		found = table_tuple_satisfies_snapshot(box->keys.rel, box->note, &dirty);
		if (found)
		{
			*rival = TransactionIdIsValid(dirty.xmin) ? dirty.xmin : dirty.xmax;
			slot_getallattrs(box->note);
			break;
		}
		writer = HeapTupleHeaderGetXmin(ExecFetchSlotHeapTuple(box->note, false, NULL)->t_data);
		if (TransactionIdIsCurrentTransactionId(writer) ||
			TransactionIdDidCommit(writer))
			break;				/* removed; otherwise it never was */
	}
	index_endscan(scan);
	return found;
}

/*
 * For purge: leases that were acknowledged one event at a time, in a topic that
 * nobody takes from any more.
 */
static bool
lease_is_over(TupleTableSlot *slot, TimestampTz now, uint64 *hash)
{
	slot_getallattrs(slot);
	*hash = ik_block_lock(DatumGetInt64(slot->tts_values[LEASES_BLOCK]));
	return DatumGetTimestampTz(slot->tts_values[LEASES_DEADLINE]) + LEFT_TO_TAKERS < now;
}

static bool
lease_is_empty(TupleTableSlot *slot)
{
	int64		block = DatumGetInt64(slot->tts_values[LEASES_BLOCK]);
	uint64		events = (uint64) DatumGetInt64(slot->tts_values[LEASES_EVENTS]);
	Outbox		box;
	TransactionId rival;
	bool		empty = true;

	ik_open_outbox(&box, "idempotency.purge()", true);
	for (int bit = 0; empty && bit < BLOCK_SIZE; bit++)
		if ((events >> bit) & 1)
			empty = !ik_fetch_event(&box, block * BLOCK_SIZE + bit, box.event, &rival);
	ik_close_outbox(&box);
	return empty;
}

/* The same for the notes of ordering keys. */
static bool
any_note(TupleTableSlot *slot, TimestampTz now, uint64 *hash)
{
	slot_getallattrs(slot);
	*hash = ik_ordering_lock(slot->tts_values[OUTBOX_KEYS_TOPIC],
							 slot->tts_values[OUTBOX_KEYS_KEY]);
	return true;
}

static bool
note_is_empty(TupleTableSlot *slot)
{
	Outbox		box;
	TransactionId rival;
	bool		empty;

	ik_open_outbox(&box, "idempotency.purge()", true);
	empty = !ik_fetch_event(&box, note_id(slot), box.event, &rival);
	ik_close_outbox(&box);
	return empty;
}
