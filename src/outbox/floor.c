/*-------------------------------------------------------------------------
 *
 * floor.c
 *		Below which place of the queue there is nothing left to be found.
 *
 * Events that are done with leave dead entries at the low end of the indexes
 * until VACUUM removes them, which it cannot do while an old snapshot is about,
 * and to read them again and again is what makes queues in tables slow.  So a
 * backend remembers FLOORS: for a topic, and for an ordering key that it met
 * lately.  What was below is settled: gone, or out under a lease, or behind
 * another event of its key.
 *
 * A transaction that was open meanwhile may have written below a floor, and
 * commit later.  So each look at the queue notes which transactions are open,
 * and, for each, the newest number of the sequence at the look before: since
 * the transaction got its id after that look, and every writer has one before it
 * draws a number, all that it wrote has higher numbers.  As soon as it is no
 * longer open, the floors come down to there.  The same goes for times, which
 * are never set to what is past.
 *
 * Our own transaction may take back what it did: so the events that it changed
 * are noted too, and the floors come down to them if it, or a part of it, rolls
 * back or is prepared.
 *
 * Floors are memory of this backend, right or absent, also when the call that
 * raised them fails: what a long call found out survives a time-out.  Other
 * sessions begin with some of it (share.c).  They are told apart by a hash under
 * the database's secret: nobody can choose an ordering key whose floor is
 * another's, and so let events of that one overtake each other.  A clock that is
 * set back could still hide an event that waits for a time.  So now and then a
 * topic is read from its beginning, at the earliest after a hundred times as long
 * as that took the last time, and after a second.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox/outbox.h"

#include "access/htup_details.h"
#include "access/relation.h"
#include "access/transam.h"
#include "access/xact.h"
#include "commands/sequence.h"
#include "storage/bufmgr.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

/* with so many subtransactions, reading everything again is less work */
#define MAX_UNLISTED	10000

/* a transaction that was open at the last look */
typedef struct OpenXact
{
	TransactionId xid;
	int64		number;			/* what it wrote has higher numbers */
	TimestampTz time;			/* and no times before this one */
} OpenXact;

/* what the last look around saw */
static struct
{
	bool		valid;
	TimestampTz time;
	int64		number;
	int64		settled;		/* see ik_settled_number() */
	TimestampTz settled_time;
	TransactionId next_xid;
	uint64		changes;		/* of the table, as ik_table_changes() says */
	int			n;
	int			size;
	OpenXact   *open;			/* by xid, in no order that means something */
	OpenXact   *spare;
}			seen;

/* the floors, by a hash; two with the same place drive each other out */
static Floor floors[64];
static struct
{
	uint64		key;
	int64		id;
}			key_floors[256];

/* the lowest of what our transaction has changed */
static struct
{
	bool		any;
	int64		number;
	TimestampTz time;
	int64		emitted;		/* see ik_touch_new() */
	TimestampTz emitted_due;
}			touched;

static int64 newest_number(Oid sequence);
static void forget_everything(void);
static void lower_floors(int64 number, TimestampTz time);
static int	compare_open(const void *a, const void *b);
static void at_xact(XactEvent event, void *arg);
static void at_subxact(SubXactEvent event, SubTransactionId mine,
					   SubTransactionId parent, void *arg);
static void take_back(void);
static void hash_text(const uint8 *secret, Datum value, uint64 *digest);
static uint64 hash_of(Datum topic, const Datum *key);

/*
 * Look around before the queue is read: whose transactions are open, and whose
 * no longer are?  Call it before floors are asked for.
 *
 * A snapshot lists the open transactions that are older than the last one that
 * has ended.  Of those between that and the next id to be given, all are open;
 * subtransactions among them count as ended at the next look, which does no
 * harm.
 */
void
ik_look_around(Oid sequence, TimestampTz now)
{
	/* in this order: who has no id yet will draw a higher number */
	int64		number = newest_number(sequence);
	TransactionId next_xid = ReadNextTransactionId();
	Snapshot	snapshot = GetLatestSnapshot();
	uint64		changes = ik_table_changes(&ik_outbox);
	Look		look = {now, number, next_xid};
	Look		before;
	int			unlisted = 0;
	int			n = 0;
	OpenXact   *open;
	int			i = 0;

	if (TransactionIdPrecedes(snapshot->xmax, next_xid))
		unlisted = next_xid - snapshot->xmax;
	if (unlisted > MAX_UNLISTED)
	{
		/* what this call finds out is forgotten by the next one */
		forget_everything();
		seen.time = DT_NOEND;
		return;
	}

	/* a clock that went back, or a table that was truncated or restored */
	if (now < seen.time || now - seen.time > FORGET_AFTER ||
		number < seen.number || changes != seen.changes)
		forget_everything();

	if (snapshot->xcnt + unlisted > seen.size)
	{
		MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);
		int			size = Max(64, 2 * (snapshot->xcnt + unlisted));

		seen.spare = seen.spare == NULL ?
			palloc(size * sizeof(OpenXact)) :
			repalloc(seen.spare, size * sizeof(OpenXact));
		seen.open = seen.open == NULL ?
			palloc(size * sizeof(OpenXact)) :
			repalloc(seen.open, size * sizeof(OpenXact));
		seen.size = size;
		MemoryContextSwitchTo(old);
	}

	open = seen.spare;
	for (uint32 j = 0; j < snapshot->xcnt; j++)
		open[n++].xid = snapshot->xip[j];
	for (TransactionId xid = snapshot->xmax; unlisted > 0 && xid != next_xid; xid++)
		if (TransactionIdIsNormal(xid) && !TransactionIdIsCurrentTransactionId(xid))
			open[n++].xid = xid;
	if (n > 1)
		qsort(open, n, sizeof(OpenXact), compare_open);
	for (int j = 0; j < n; j++)
	{
		/* those that are before it in the old list are no longer open */
		while (i < seen.n && seen.open[i].xid < open[j].xid)
		{
			lower_floors(seen.open[i].number + 1, seen.open[i].time);
			i++;
		}
		if (i < seen.n && seen.open[i].xid == open[j].xid)
			open[j] = seen.open[i++];
		else if (seen.valid &&
				 TransactionIdFollowsOrEquals(open[j].xid, seen.next_xid))
		{
			open[j].number = seen.number;
			open[j].time = seen.time;
		}
		else if (ik_look_before(open[j].xid, &look, &before))
		{
			open[j].number = before.number;
			open[j].time = before.time;
		}
		else
		{
			open[j].number = 0;
			open[j].time = DT_NOBEGIN;
		}
	}
	for (; i < seen.n; i++)
		lower_floors(seen.open[i].number + 1, seen.open[i].time);

	seen.spare = seen.open;
	seen.open = open;
	seen.n = n;
	seen.number = number;
	seen.settled = number;
	seen.settled_time = now;
	for (int j = 0; j < n; j++)
	{
		seen.settled = Min(seen.settled, open[j].number);
		seen.settled_time = Min(seen.settled_time, open[j].time);
	}
	seen.time = now;
	seen.next_xid = next_xid;
	seen.changes = changes;
	seen.valid = true;
	ik_share_look(&look);
}

/* What that was at the last look around. */
int64
ik_newest_number_seen(void)
{
	return seen.number;
}

/*
 * Up to this number every event was to be seen at the last look around, or its
 * emitter has rolled back: no open transaction can have emitted one.
 */
int64
ik_settled_number(void)
{
	return seen.valid ? seen.settled : 0;
}

/*
 * Much was looked past: share the floor, lowered to what holds for every session,
 * however the transactions end that are open, ours included.
 */
void
ik_floor_found(const Floor *floor, Relation events)
{
	Look		look = {seen.time, seen.number, seen.next_xid};
	Floor		safe = *floor;

	if (!seen.valid)
		return;
	safe.place = Min(safe.place, seen.settled + 1);
	safe.due = Min(safe.due, seen.settled_time);
	if (touched.any)
	{
		safe.place = Min(safe.place, touched.number);
		safe.due = Min(safe.due, touched.time);
	}
	ik_share_floor(&safe, events, &look);
}

/* The newest number that the sequence has given. */
static int64
newest_number(Oid sequence)
{
	Relation	rel = relation_open(sequence, AccessShareLock);
	Buffer		buffer = ReadBuffer(rel, 0);
	Page		page = BufferGetPage(buffer);
	HeapTupleHeader tuple;
	Form_pg_sequence_data data;
	int64		number;

	LockBuffer(buffer, BUFFER_LOCK_SHARE);
	tuple = (HeapTupleHeader) PageGetItem(page, PageGetItemId(page, FirstOffsetNumber));
	data = (Form_pg_sequence_data) ((char *) tuple + tuple->t_hoff);
	number = data->last_value - (data->is_called ? 0 : 1);
	UnlockReleaseBuffer(buffer);
	relation_close(rel, NoLock);
	return number;
}

/*
 * The floor of a topic.  It starts from the bottom if this is the first time,
 * or if it is time to read everything again: then read_at is now.
 */
Floor *
ik_topic_floor(const text *topic, Relation events, TimestampTz now)
{
	uint64		hash = hash_of(PointerGetDatum(topic), NULL);
	Floor	   *floor = &floors[hash % lengthof(floors)];

	bool		fresh = floor->topic != hash;

	/* not while that is under way: calls that time out would never be through */
	if (fresh || floor->read_at > now ||
		(!floor->reading &&
		 now - floor->read_at > Max(USECS_PER_SEC, 100 * floor->cost)))
	{
		floor->topic = hash;
		floor->place = 0;
		floor->due = DT_NOBEGIN;
		floor->deadline = DT_NOBEGIN;
		floor->read_at = now;
		floor->cost = 0;
		floor->reading = true;
		if (fresh && seen.valid)
		{
			Look		look = {seen.time, seen.number, seen.next_xid};

			ik_adopt_floor(floor, events, &look);
		}
	}
	return floor;
}

/* The floor of an ordering key: the lowest id that there may be. */
int64 *
ik_key_floor(Datum topic, Datum key)
{
	uint64		hash = hash_of(topic, &key);
	int			i = hash % lengthof(key_floors);

	if (key_floors[i].key != hash)
	{
		key_floors[i].key = hash;
		key_floors[i].id = 0;
	}
	return &key_floors[i].id;
}

/*
 * Our transaction is about to change, hand out or remove an event that has this
 * number and is found by this time; it may take that back.  What is found by its
 * place alone has the time -infinity.
 */
void
ik_touch(int64 number, TimestampTz time)
{
	static bool registered = false;

	if (!registered)
	{
		RegisterXactCallback(at_xact, NULL);
		RegisterSubXactCallback(at_subxact, NULL);
		registered = true;
	}
	if (!touched.any)
	{
		touched.any = true;
		touched.number = PG_INT64_MAX;
		touched.time = DT_NOEND;
		touched.emitted = PG_INT64_MAX;
		touched.emitted_due = DT_NOEND;
	}
	touched.number = Min(touched.number, number);
	if (!TIMESTAMP_IS_NOBEGIN(time))
		touched.time = Min(touched.time, time);
}

/*
 * Our transaction has emitted an event with a key.  Later ones of its key that
 * are passed by wait for it, in vain if it is taken back.  And if we pass it by
 * ourselves, who ends the turn before cannot see it yet: so it is looked at
 * again when we have committed.
 */
void
ik_touch_new(int64 number, TimestampTz due)
{
	ik_touch(number, due);
	touched.emitted = Min(touched.emitted, number);
	if (!TIMESTAMP_IS_NOBEGIN(due))
		touched.emitted_due = Min(touched.emitted_due, due);
}

static void
forget_everything(void)
{
	seen.valid = false;
	seen.n = 0;
	memset(floors, 0, sizeof(floors));
	memset(key_floors, 0, sizeof(key_floors));
}

static void
lower_floors(int64 number, TimestampTz time)
{
	for (int i = 0; i < lengthof(floors); i++)
	{
		floors[i].place = Min(floors[i].place, number);
		floors[i].due = Min(floors[i].due, time);
		floors[i].deadline = Min(floors[i].deadline, time);
	}
	for (int i = 0; i < lengthof(key_floors); i++)
		key_floors[i].id = Min(key_floors[i].id, number);
}

static int
compare_open(const void *a, const void *b)
{
	TransactionId left = ((const OpenXact *) a)->xid;
	TransactionId right = ((const OpenXact *) b)->xid;

	return (left > right) - (left < right);
}

static void
at_xact(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_ABORT || event == XACT_EVENT_PREPARE)
		take_back();
	if (event == XACT_EVENT_COMMIT && touched.any && seen.valid &&
		touched.emitted != PG_INT64_MAX)
		lower_floors(touched.emitted, touched.emitted_due);
	touched.any = touched.any &&
		(event == XACT_EVENT_PRE_COMMIT || event == XACT_EVENT_PRE_PREPARE);
}

static void
at_subxact(SubXactEvent event, SubTransactionId mine, SubTransactionId parent,
		   void *arg)
{
	if (event == SUBXACT_EVENT_ABORT_SUB)
		take_back();
}

static void
take_back(void)
{
	if (touched.any)
		lower_floors(touched.number, touched.time);
}

static void
hash_text(const uint8 *secret, Datum value, uint64 *digest)
{
	text	   *bytes = DatumGetTextPP(value);

	ik_siphash(secret, VARDATA_ANY(bytes), VARSIZE_ANY_EXHDR(bytes),
			   (uint8 *) digest, 2 * sizeof(uint64));
}

/* Of a topic, or of an ordering key under its topic; else key is NULL. */
static uint64
hash_of(Datum topic, const Datum *key)
{
	static const uint8 no_secret[16] = {0};
	const Secret *secret = ik_newest_secret();
	uint64		digest[2];

	hash_text(secret ? secret->for_locks : no_secret, topic, digest);
	if (key != NULL)
		hash_text((uint8 *) digest, *key, digest);
	return digest[0];
}
