/*-------------------------------------------------------------------------
 *
 * share.c
 *		Floors that one session has found out, for others.
 *
 * Behind a head that is out, or waits for a time, there may be a million events
 * that cannot go, and a call looks past so many only at a time.  Its floor says
 * where the next call goes on; but the next one may be another session's, if
 * each poll has a connection of its own.  So a session that looks past many
 * events says in shared memory how far it has come, where there is some, at
 * once, so that a time-out takes nothing back; and a session without a floor of
 * a topic begins there.
 *
 * Such a floor must hold for everybody.  It is not above what a transaction may
 * yet commit that was open when its maker looked around, nor above what the
 * maker's own transaction has changed and may take back.  What else is below is
 * out, or behind another event of its key, as is committed; and an event that
 * may go after that gets a new place, above (outbox.h).
 *
 * A new session knows nothing of transactions that were open before its first
 * look around (floor.c).  So looks are shared as well, the newer ones closer to
 * each other, as far back as a look is worth anything.
 *
 * A shared floor is believed for KEPT.  So what no code here can know of, such as
 * a clock or a sequence that is set back, or rows that are changed by hand, hides
 * an event from new sessions for so long at most.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox/outbox.h"

#include "access/transam.h"
#include "storage/spin.h"
#include "utils/timestamp.h"

/* of these the one at i is about 2^i seconds old, if there was one then */
#define SHARED_LOOKS	10

/* topics of a database, about 2 kB; two with the same place drive each other out */
#define SHARED_FLOORS	32

#define KEPT			(600 * USECS_PER_SEC)

typedef struct SharedFloor
{
	Floor		floor;			/* its read_at is when it was first shared */
	int64		number;			/* the newest of the sequence by then */
	Oid			file;			/* of the table: TRUNCATE gives a new one */
} SharedFloor;

typedef struct SharedFloors
{
	slock_t		mutex;
	Look		looks[SHARED_LOOKS];	/* the newest first */
	SharedFloor floors[SHARED_FLOORS];
} SharedFloors;

static SharedFloors *shared_floors(void);
static void init_floors(void *area);
static SharedFloor *lock_floor(const Floor *floor);
static bool is_good(const SharedFloor *shared, const Floor *floor,
					Relation events, const Look *now);

/* Let a floor that starts from the bottom start from what others found out. */
void
ik_adopt_floor(Floor *floor, Relation events, const Look *now)
{
	SharedFloor *shared = lock_floor(floor);

	if (shared == NULL)
		return;
	if (is_good(shared, floor, events, now))
	{
		floor->place = shared->floor.place;
		floor->due = shared->floor.due;
		floor->cost = shared->floor.cost;
	}
	SpinLockRelease(&shared_floors()->mutex);
}

/* Share a floor that holds for everybody. */
void
ik_share_floor(const Floor *floor, Relation events, const Look *now)
{
	SharedFloor *shared = lock_floor(floor);

	if (shared == NULL)
		return;
	if (is_good(shared, floor, events, now))
	{
		shared->floor.place = Max(shared->floor.place, floor->place);
		shared->floor.due = Max(shared->floor.due, floor->due);
		shared->floor.cost = Max(shared->floor.cost, floor->cost);
	}
	else
	{
		shared->floor = *floor;
		shared->floor.read_at = now->time;
		shared->file = events->rd_rel->relfilenode;
	}
	shared->number = now->number;
	SpinLockRelease(&shared_floors()->mutex);
}

/* Share a look around. */
void
ik_share_look(const Look *look)
{
	SharedFloors *all = shared_floors();

	if (all == NULL)
		return;
	SpinLockAcquire(&all->mutex);
	for (int i = SHARED_LOOKS - 1; i >= 0; i--)
	{
		TimestampTz time = all->looks[i].time;

		if (time > look->time || look->time - time > USECS_PER_SEC << i)
			all->looks[i] = i > 0 ? all->looks[i - 1] : *look;
	}
	SpinLockRelease(&all->mutex);
}

/*
 * The newest look of all sessions before the transaction got its id; false:
 * none is known.
 */
bool
ik_look_before(TransactionId xid, const Look *now, Look *before)
{
	SharedFloors *all = shared_floors();
	bool		found = false;

	if (all == NULL)
		return false;
	SpinLockAcquire(&all->mutex);
	for (int i = 0; i < SHARED_LOOKS && !found; i++)
	{
		*before = all->looks[i];
		found = before->time <= now->time &&
			now->time - before->time < FORGET_AFTER &&
			before->number <= now->number &&
			TransactionIdFollowsOrEquals(xid, before->next_xid);
	}
	SpinLockRelease(&all->mutex);
	return found;
}

static SharedFloors *
shared_floors(void)
{
	static SharedFloors *all = NULL;
	static bool asked = false;

	if (!asked)
	{
		all = ik_shared_area("outbox floors", sizeof(SharedFloors), init_floors);
		asked = true;
	}
	return all;
}

static void
init_floors(void *area)
{
	SpinLockInit(&((SharedFloors *) area)->mutex);
}

/* The place of the topic's floor, under the mutex; NULL: there is no memory. */
static SharedFloor *
lock_floor(const Floor *floor)
{
	SharedFloors *all = shared_floors();

	if (all == NULL)
		return NULL;
	SpinLockAcquire(&all->mutex);
	return &all->floors[floor->topic % SHARED_FLOORS];
}

static bool
is_good(const SharedFloor *shared, const Floor *floor, Relation events,
		const Look *now)
{
	return shared->floor.topic == floor->topic &&
		shared->file == events->rd_rel->relfilenode &&
		shared->number <= now->number &&
		shared->floor.read_at <= now->time &&
		now->time - shared->floor.read_at < KEPT;
}
