/*-------------------------------------------------------------------------
 *
 * turn.c
 *		The turn of an event ends, and that of the next of its key begins.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox/outbox.h"

#include "miscadmin.h"
#include "utils/timestamp.h"

static bool pass_on(Outbox *box, Datum topic, Datum key, int64 but,
					TransactionId *rival);
static bool pass_on_locked(Outbox *box, Datum topic, Datum key, int64 but,
						   TransactionId *rival);
static bool give_new_place(Outbox *box, TransactionId rival);
static bool needs_place(TupleTableSlot *head, int64 but);
static void wait_for_change(Outbox *box, TransactionId rival);
static bool take_event_apart(Outbox *box, BlockLeases *leases, int64 id,
							 int64 taken, TopicSettings *settings);

/*
 * The turn of an event is over, by an ack, a nack, the end of its lease or its
 * parking: if it has a key, and the key's head may go now, that one gets a new
 * place, above every floor.  But not the event itself, if it has just got one.
 * A parked event has no turn, unless its key waits for it.
 *
 * If the event was out, nobody takes another one of its key before we commit:
 * they see that it is being changed, and that it is the head, or noted.
 * Otherwise it is the lock of the head's block that keeps takers off it: a new
 * place would make their lease void.  So the caller has no block's lock.
 */
void
ik_end_turn(Outbox *box, TupleTableSlot *event, bool was_out, int64 but)
{
	Datum		topic = event_value(event, TOPIC);
	Datum		key = event_value(event, KEY);
	TransactionId rival;

	if (event_isnull(event, KEY) || event_state(event) == EVENT_PARKED)
		return;
	if (was_out)
	{
		ik_drop_note(box, event);
		while (!pass_on(box, topic, key, but, &rival))
			wait_for_change(box, rival);
	}
	else
	{
		uint64		lock = ik_ordering_lock(topic, key);
		bool		done;
		bool		settled;

		do
		{
			(void) ik_wait_for_lock(lock, DT_NOEND);

			/* if another one is out, the end of its turn will do it */
			rival = InvalidTransactionId;
			done = ik_key_is_out(box, topic, key, -1, 0, &settled) ||
				pass_on_locked(box, topic, key, but, &rival);
			ik_unlock(lock);
			if (!done)
				wait_for_change(box, rival);
		} while (!done);
	}
}

/*
 * A parked event of a key is about to come back, in front of what may be out by
 * now without a note: note that.  Until we commit, the note that is being written
 * keeps takers off the key.  From then on they see it, and note what they take.
 *
 * A taker who saw no note has looked for the head before, and a second look finds
 * what it found.  If nothing is there, the event itself is noted, for takers of
 * what may be emitted meanwhile.
 */
void
ik_keep_turn(Outbox *box, TupleTableSlot *event)
{
	Datum		topic = event_value(event, TOPIC);
	Datum		key = event_value(event, KEY);
	uint64		lock = ik_ordering_lock(topic, key);
	int64		noted = 0;
	int64		id;

	(void) ik_wait_for_lock(lock, DT_NOEND);
	for (;;)
	{
		TransactionId rival;
		bool		settled;

		if (ik_key_is_out(box, topic, key, -1, 0, &settled))
			id = DatumGetInt64(box->note->tts_values[OUTBOX_KEYS_ID]);
		else if (ik_find_head(box, topic, key, PG_INT64_MAX, &rival))
			id = event_id(box->head);
		else
			id = event_id(event);
		if (id == noted)
			break;
		ik_note_key(box, topic, key, id);
		noted = id;
	}
	ik_unlock(lock);
}

/*
 * A lease is over: what is left of its events goes back to the queue, each with
 * the attempt that has failed.  False if somebody is at work on one of them.
 */
bool
ik_take_lease_apart(Outbox *box, TupleTableSlot *lease, TopicSettings *settings)
{
	BlockLeases leases = {0};
	ItemPointerData tid = lease->tts_tid;
	int64		block;
	int64		taken;
	TimestampTz deadline;
	uint64		events;
	bool		whole = true;

	slot_getallattrs(lease);
	block = DatumGetInt64(lease->tts_values[LEASES_BLOCK]);
	taken = DatumGetInt64(lease->tts_values[LEASES_TAKEN]);
	deadline = DatumGetTimestampTz(lease->tts_values[LEASES_DEADLINE]);
	events = (uint64) DatumGetInt64(lease->tts_values[LEASES_EVENTS]);

	ik_read_leases(box, &leases, block);
	for (int bit = 0; bit < BLOCK_SIZE; bit++)
		if ((events >> bit) & 1)
			whole &= take_event_apart(box, &leases, block * BLOCK_SIZE + bit,
									  taken, settings);
	if (leases.leases != NULL)
		pfree(leases.leases);

	/* or a roll-back of ours would bring back what others find no more */
	ik_touch(PG_INT64_MAX, deadline);
	return whole && ik_delete_found_row(&box->leases, &tid, false);
}

/* Give the head of a key a new place, if it needs one; false: look again. */
static bool
pass_on(Outbox *box, Datum topic, Datum key, int64 but, TransactionId *rival)
{
	if (!ik_find_head(box, topic, key, PG_INT64_MAX, rival) ||
		!needs_place(box->head, but))
		return true;
	return give_new_place(box, *rival);
}

/* The same, unless the head is out. */
static bool
pass_on_locked(Outbox *box, Datum topic, Datum key, int64 but,
			   TransactionId *rival)
{
	TransactionId leasing;
	uint64		lock;
	bool		done;

	if (!ik_find_head(box, topic, key, PG_INT64_MAX, rival) ||
		!needs_place(box->head, but))
		return true;
	lock = ik_block_lock(block_of(event_id(box->head)));
	(void) ik_wait_for_lock(lock, DT_NOEND);
	done = ik_is_leased(box, box->head, &leasing) ||
		give_new_place(box, *rival);
	ik_unlock(lock);
	return done;
}

/* Not the event whose turn has ended; nor what is found by its time. */
static bool
needs_place(TupleTableSlot *head, int64 but)
{
	return event_id(head) != but && event_state(head) != EVENT_BLOCKING &&
		event_due(head) <= GetCurrentTimestamp();
}

static bool
give_new_place(Outbox *box, TransactionId rival)
{
	TupleTableSlot *head = box->head;

	if (TransactionIdIsValid(rival) ||
		!ik_lock_found_row(&box->events, head, false))
		return false;
	(void) ik_put_back(box, head, event_state(head), DT_NOBEGIN);
	return ik_write_event(box, head);
}

/*
 * Somebody is changing a row: wait for that.  If nobody is, the head was locked,
 * perhaps by who waits for us: so we wait in PostgreSQL's queue, which sees that.
 */
static void
wait_for_change(Outbox *box, TransactionId rival)
{
	CHECK_FOR_INTERRUPTS();
	if (TransactionIdIsValid(rival))
		(void) ik_wait_for_xact(rival, DT_NOEND);
	else
		(void) ik_lock_found_row(&box->events, box->head, true);
}

static bool
take_event_apart(Outbox *box, BlockLeases *leases, int64 id, int64 taken,
				 TopicSettings *settings)
{
	TupleTableSlot *event = box->event;
	TupleTableSlot *next;
	TransactionId rival;
	Lease	   *lease;
	bool		parked;

	if (!ik_fetch_event(box, id, event, &rival))
		return true;			/* it was acknowledged */
	if (TransactionIdIsValid(rival))
		return false;
	lease = ik_lease_of(leases, event);
	if (lease != NULL && TransactionIdIsValid(lease->rival))
		return false;			/* perhaps extended */
	if (lease == NULL || lease->taken != taken)
		return true;			/* given back, or extended */
	if (!ik_lock_found_row(&box->events, event, false))
		return false;

	ik_read_topic(settings, event_value(event, TOPIC));
	next = ik_put_back(box, event, EVENT_LAPSED, DT_NOBEGIN);
	ik_end_attempt(next, settings);
	parked = event_is_parked(next);
	if (!ik_write_event(box, event))
		return false;
	ik_end_turn(box, event, true, parked ? 0 : id);
	return true;
}
