/*-------------------------------------------------------------------------
 *
 * wake.c
 *		Those who wait for events of a topic, and waking them at the commit.
 *
 * wait.c tells how it works.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox/outbox.h"

#include "access/xact.h"
#include "common/hashfn.h"
#include "port/atomics.h"
#include "storage/condition_variable.h"
#include "storage/ipc.h"
#include "storage/spin.h"

/* topics of a database that can be waited for at a time, about 3 kB */
#define SLOTS			64

/*
 * Where a topic's slot can be, from its hash on.  Few, since each writer looks
 * through them after its commit.
 */
#define PROBES			8

typedef struct WaitSlot
{
	pg_atomic_uint64 topic;		/* a hash, for as long as anybody waits */
	pg_atomic_uint32 waiters;
	ConditionVariable wake;
} WaitSlot;

typedef struct WaitSlots
{
	slock_t		mutex;			/* held to take or leave a slot */
	WaitSlot	slots[SLOTS];
} WaitSlots;

/* topics that our transaction has written events of */
typedef struct NotedTopic
{
	uint64		topic;
	int			events;
} NotedTopic;

static struct
{
	int			n;
	bool		more;			/* than there is room for */
	NotedTopic	topics[8];
}			noted;

static WaitSlot *my_slot = NULL;

static WaitSlots *wait_slots(void);
static void init_slots(void *area);
static void leave_at_exit(int code, Datum arg);
static uint64 hash_topic(const text *topic);
static void at_xact(XactEvent event, void *arg);
static void wake(const NotedTopic *topic);

/* Our transaction writes an event of the topic, for takers to find. */
void
ik_note_topic(const text *topic)
{
	static bool registered = false;
	uint64		hash = hash_topic(topic);

	if (!registered)
	{
		RegisterXactCallback(at_xact, NULL);
		registered = true;
	}
	for (int i = 0; i < noted.n; i++)
		if (noted.topics[i].topic == hash)
		{
			noted.topics[i].events++;
			return;
		}
	if (noted.n < lengthof(noted.topics))
		noted.topics[noted.n++] = (NotedTopic) {hash, 1};
	else
		noted.more = true;
}

/*
 * Wait in the slot of the topic, if there is one or one is free, until
 * ik_leave_waiters(); NULL: there is none.
 */
ConditionVariable *
ik_join_waiters(const text *topic)
{
	static bool registered = false;
	uint64		hash = hash_topic(topic);
	WaitSlots  *slots = wait_slots();
	WaitSlot   *free = NULL;

	if (slots == NULL)
		return NULL;
	if (!registered)
	{
		before_shmem_exit(leave_at_exit, (Datum) 0);
		registered = true;
	}
	SpinLockAcquire(&slots->mutex);
	for (int i = 0; i < PROBES && my_slot == NULL; i++)
	{
		WaitSlot   *slot = &slots->slots[(hash + i) % SLOTS];

		if (pg_atomic_read_u32(&slot->waiters) == 0)
			free = free ? free : slot;
		else if (pg_atomic_read_u64(&slot->topic) == hash)
			my_slot = slot;
	}
	if (my_slot == NULL && free != NULL)
	{
		my_slot = free;
		pg_atomic_write_u64(&free->topic, hash);
	}
	if (my_slot != NULL)
		(void) pg_atomic_fetch_add_u32(&my_slot->waiters, 1);
	SpinLockRelease(&slots->mutex);
	return my_slot == NULL ? NULL : &my_slot->wake;
}

void
ik_leave_waiters(void)
{
	WaitSlots  *slots = wait_slots();

	if (my_slot == NULL)
		return;
	ConditionVariableCancelSleep();
	SpinLockAcquire(&slots->mutex);
	(void) pg_atomic_fetch_sub_u32(&my_slot->waiters, 1);
	SpinLockRelease(&slots->mutex);
	my_slot = NULL;
}

/* The slots of this database; NULL where there is no shared memory. */
static WaitSlots *
wait_slots(void)
{
	static WaitSlots *slots = NULL;
	static bool asked = false;

	if (!asked)
	{
		slots = ik_shared_area("outbox", sizeof(WaitSlots), init_slots);
		asked = true;
	}
	return slots;
}

static void
init_slots(void *area)
{
	WaitSlots  *slots = area;

	SpinLockInit(&slots->mutex);
	for (int i = 0; i < SLOTS; i++)
	{
		pg_atomic_init_u64(&slots->slots[i].topic, 0);
		pg_atomic_init_u32(&slots->slots[i].waiters, 0);
		ConditionVariableInit(&slots->slots[i].wake);
	}
}

/* A session that is terminated does not come by PG_FINALLY. */
static void
leave_at_exit(int code, Datum arg)
{
	ik_leave_waiters();
}

static uint64
hash_topic(const text *topic)
{
	return hash_bytes_extended((const unsigned char *) VARDATA_ANY(topic),
							   VARSIZE_ANY_EXHDR(topic), 0) | 1;
}

/* After the commit, wake who waits; not for what is rolled back or prepared. */
static void
at_xact(XactEvent event, void *arg)
{
	if (event == XACT_EVENT_PRE_COMMIT && (noted.n > 0 || noted.more))
		(void) wait_slots();	/* may raise an error; not after the commit */
	if (event == XACT_EVENT_COMMIT && wait_slots() != NULL)
	{
		if (noted.more)
			wake(NULL);
		for (int i = 0; i < noted.n && !noted.more; i++)
			wake(&noted.topics[i]);
	}
	if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT ||
		event == XACT_EVENT_PREPARE)
	{
		noted.n = 0;
		noted.more = false;
	}
}

/* Wake one for each event of the topic; or, if it is NULL, everybody. */
static void
wake(const NotedTopic *topic)
{
	WaitSlots  *slots = wait_slots();
	int			first = topic ? (int) (topic->topic % SLOTS) : 0;

	pg_memory_barrier();
	for (int i = 0; i < (topic ? PROBES : SLOTS); i++)
	{
		WaitSlot   *slot = &slots->slots[(first + i) % SLOTS];
		uint32		waiters = pg_atomic_read_u32(&slot->waiters);

		if (waiters == 0 ||
			(topic && pg_atomic_read_u64(&slot->topic) != topic->topic))
			continue;
		if (topic == NULL || (uint32) topic->events >= waiters)
			ConditionVariableBroadcast(&slot->wake);
		else
			for (int n = 0; n < topic->events; n++)
				ConditionVariableSignal(&slot->wake);
	}
}
