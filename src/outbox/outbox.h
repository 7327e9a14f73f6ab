/*-------------------------------------------------------------------------
 *
 * outbox.h
 *		The outbox: side effects that happen after the commit.
 *
 * An EVENT is a row of idempotency.outbox, written in the transaction that
 * wants the effect.  TAKE hands it to a worker under a LEASE; each hand-out is
 * an ATTEMPT, and its number tells a superseded worker from the newest.  ACK
 * removes the event, NACK gives it back, and one that has failed too often is
 * PARKED.  Events of one topic with the same ORDERING KEY come in the order of
 * their ids, one at a time.
 *
 * The queue.  An event's PLACE is a number of the sequence that also gives the
 * ids: the event's id at first, and a new one whenever the event is given back,
 * so that it goes to the end of the queue.  DUE is -infinity, unless the event
 * has to wait for a time; then it is found by that.  Neither order is one that
 * a late committer could be passed by in (floor.c).
 *
 * The lease is not in the event's row, which nobody writes while all goes well.
 * Ids come in BLOCKS of 64, and a row of idempotency.outbox_leases stands for
 * the events of one block that one call took: a bit for each, the deadline, and
 * TAKEN, a number of the same sequence.  A lease counts for an event as long as
 * it is younger than the event's place and no younger one has the event.  Its
 * attempt is then the event's own plus one.  When an attempt ends without an
 * ack, the event is written with that number and with a new place, which makes
 * the lease void.
 *
 * The event of an ordering key that is out is the HEAD of the key, the one with
 * the lowest id, as long as no event with a lower one can turn up: no open
 * transaction may have emitted one (floor.c).  Where that is not certain, the key
 * is NOTED in idempotency.outbox_keys as having this event out, by a number of
 * the same sequence; the youngest note is the one that counts.  A parked event
 * that comes back is lower than what may be out by then: so who brings it back
 * notes the head first (ik_keep_turn).
 *
 * What a taker finds out it decides under a lock of the block (and, if it may
 * have to note the key, one of the key), which is tried, and held only until the
 * lease is written: from then on rivals see the lease, committed or not, in scans
 * with a dirty snapshot.  Who holds a block's lock waits for nobody.  No
 * predicate lock is ever taken, and the transaction's snapshot hides nothing.
 *
 * Nothing behind an ordering key is ever forgotten: take passes by an event
 * only if it has seen that another one of its key is out or goes before it.
 * The call that ends its turn (ack, nack, a lease that is over, the parking)
 * does so first, and then gives the key's next event a new place, where takers
 * find it (ik_end_turn).  So of the two one sees the other.
 *
 * All of this goes past the executor, with no privilege on the tables: EXECUTE
 * on the functions is the gate.  Nobody waits for anybody but those who end an
 * attempt for a rival who is changing the very same event.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IK_OUTBOX_H
#define IK_OUTBOX_H

#include "store/store.h"

#include "storage/condition_variable.h"


/* what purge removes (lease.c) */
extern const Purgeable ik_purge_leases;
extern const Purgeable ik_purge_outbox_keys;

/* limits in bytes, as for scope and key */
#define MAX_TOPIC_LENGTH	256
#define MAX_KEY_LENGTH		512

/* the tables of the outbox, opened for one call, and rows of theirs */
typedef struct Outbox
{
	OwnRows		events;
	OwnRows		leases;
	OwnRows		keys;
	Oid			sequence;
	bool		with_leases;	/* are the latter two open, and so on? */
	TimestampTz now;
	TupleTableSlot *event;
	TupleTableSlot *head;		/* of an ordering key */
	TupleTableSlot *lease;		/* a row of idempotency.outbox_leases */
	TupleTableSlot *note;		/* a row of idempotency.outbox_keys */
} Outbox;

/* The columns of an event in a slot whose attributes have been fetched. */
#define event_value(slot, column) \
	((slot)->tts_values[OUTBOX_##column])
#define event_isnull(slot, column) \
	((slot)->tts_isnull[OUTBOX_##column])
#define event_id(slot)		DatumGetInt64(event_value(slot, ID))
#define event_place(slot)	DatumGetInt64(event_value(slot, PLACE))
#define event_due(slot)		DatumGetTimestampTz(event_value(slot, DUE))
#define event_attempt(slot) DatumGetInt32(event_value(slot, ATTEMPT))
#define event_tries(slot)	DatumGetInt32(event_value(slot, TRIES))
#define event_state(slot)	DatumGetChar(event_value(slot, STATE))
#define event_is_parked(slot) \
	(event_state(slot) == EVENT_PARKED || event_state(slot) == EVENT_BLOCKING)

/* what a topic has of its own, or the settings say */
typedef struct TopicSettings
{
	bool		read;			/* have they been? */
	int			max_attempts;
	bool		parked_blocks;
} TopicSettings;

/* event.c: one event: find, lock, write */
extern void ik_open_outbox(Outbox *box, const char *function, bool with_leases);
extern void ik_close_outbox(Outbox *box);
extern text *ik_topic_argument(FunctionCallInfo fcinfo);
extern void ik_read_topic(TopicSettings *settings, Datum topic);
extern int64 ik_next_number(Outbox *box, int64 above);
pg_noreturn extern void ik_refuse_sequence(void);
extern bool ik_fetch_event(Outbox *box, int64 id, TupleTableSlot *event,
						   TransactionId *rival);
extern bool ik_find_head(Outbox *box, Datum topic, Datum key, int64 not_above,
						 TransactionId *rival);
extern TupleTableSlot *ik_put_back(Outbox *box, TupleTableSlot *event,
								   char state, TimestampTz due);
extern void ik_end_attempt(TupleTableSlot *next,
						   const TopicSettings *settings);
extern void ik_park(TupleTableSlot *next, const TopicSettings *settings);
extern bool ik_write_event(Outbox *box, TupleTableSlot *event);
extern bool ik_remove_event(Outbox *box, TupleTableSlot *event, bool wait);

/* lease.c: who has which events, until when; a lease is a mask of 64 bits */
#define BLOCK_SIZE		64
#define block_of(id)	((id) / BLOCK_SIZE)
#define bit_of(id)		((int) ((id) % BLOCK_SIZE))

/* one row of idempotency.outbox_leases */
typedef struct Lease
{
	int64		taken;
	TimestampTz deadline;
	uint64		events;			/* a bit for each */
	uint64		acked;			/* of them, by this call */
	TransactionId rival;		/* who is writing or removing it, or none */
	ItemPointerData tid;
} Lease;

/* the leases of a block */
typedef struct BlockLeases
{
	int64		block;			/* -1: none read */
	int			n;
	int			size;
	Lease	   *leases;			/* the youngest first */
} BlockLeases;

extern uint64 ik_block_lock(int64 block);
extern uint64 ik_ordering_lock(Datum topic, Datum key);
extern void ik_read_leases(Outbox *box, BlockLeases *leases, int64 block);
extern Lease *ik_lease_of(BlockLeases *leases, TupleTableSlot *event);
extern void ik_add_lease(Outbox *box, int64 block, int64 above,
						 TimestampTz deadline, uint64 events, Datum topic);
extern void ik_drop_acked_leases(Outbox *box, BlockLeases *leases);
extern void ik_note_key(Outbox *box, Datum topic, Datum key, int64 id);
extern bool ik_is_leased(Outbox *box, TupleTableSlot *event,
						 TransactionId *rival);
extern bool ik_key_is_noted(Outbox *box, Datum topic, Datum key);
extern bool ik_key_is_out(Outbox *box, Datum topic, Datum key,
						  int64 block, uint64 events, bool *settled);
extern void ik_drop_note(Outbox *box, TupleTableSlot *event);

/* turn.c: the end of an event's turn */
extern void ik_end_turn(Outbox *box, TupleTableSlot *event, bool was_out,
						int64 but);
extern void ik_keep_turn(Outbox *box, TupleTableSlot *event);
extern bool ik_take_lease_apart(Outbox *box, TupleTableSlot *lease,
								TopicSettings *settings);

/* floor.c: below which everything is known to be settled */
typedef struct Floor
{
	uint64		topic;			/* a hash */
	int64		place;			/* of the events that are due at once */
	TimestampTz due;			/* of those that wait for a time */
	TimestampTz deadline;		/* of leases */
	TimestampTz read_at;		/* when everything was read last */
	bool		reading;		/* has the end not been reached since? */
	int64		cost;			/* microseconds that this took */
} Floor;

/* what a session has seen when it looked around */
typedef struct Look
{
	TimestampTz time;
	int64		number;			/* the newest of the sequence */
	TransactionId next_xid;		/* to be given, read after that */
} Look;

/* after so long without a look, xids may have come round: forget everything */
#define FORGET_AFTER	(600 * USECS_PER_SEC)

extern void ik_look_around(Oid sequence, TimestampTz now);
extern int64 ik_newest_number_seen(void);
extern int64 ik_settled_number(void);
extern void ik_floor_found(const Floor *floor, Relation events);
extern Floor *ik_topic_floor(const text *topic, Relation events,
							 TimestampTz now);
extern int64 *ik_key_floor(Datum topic, Datum key);
extern void ik_touch(int64 number, TimestampTz time);
extern void ik_touch_new(int64 number, TimestampTz due);

/* share.c: what one session found out, for others */
extern void ik_share_look(const Look *look);
extern bool ik_look_before(TransactionId xid, const Look *now, Look *before);
extern void ik_adopt_floor(Floor *floor, Relation events, const Look *now);
extern void ik_share_floor(const Floor *floor, Relation events,
						   const Look *now);

/* take.c: would take() have anything, and if not, when at the earliest? */
extern bool ik_is_any_due(text *topic, TimestampTz *next);

/* wake.c: those who wait, and waking them */
extern void ik_note_topic(const text *topic);
extern ConditionVariable *ik_join_waiters(const text *topic);
extern void ik_leave_waiters(void);

#endif							/* IK_OUTBOX_H */
