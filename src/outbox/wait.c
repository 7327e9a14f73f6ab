/*-------------------------------------------------------------------------
 *
 * wait.c
 *		wait_for_events(): sleep until an event of a topic is due.
 *
 * A worker that finds nothing waits in a SLOT of shared memory, which belongs to
 * its topic while anybody waits.  Who writes events that are due, or will be,
 * notes their topics, and after the commit wakes as many of those who wait as
 * there are events: no NOTIFY, and no lock that commits queue for.  To look for
 * waiters takes a few reads of memory that seldom changes.
 *
 * Nothing can be missed in between: the worker is in the slot before it looks
 * at the queue for the last time, and the events are to be seen before their
 * writer looks at the slots.
 *
 * Waking is speed, never correctness.  A worker also looks by itself: when the
 * next event is due that waits for a time, when the next lease is over, and at
 * the latest after LOOK_AGAIN, since a COMMIT PREPARED wakes nobody, nor does
 * the end of a worker that was woken and has taken nothing.  Where there is no
 * shared memory, or no slot is free, it looks every LOOK_UNWOKEN.
 *
 * The procedure commits before it sleeps.  So it keeps no snapshot, no lock and
 * no transaction open meanwhile.
 *
 *-------------------------------------------------------------------------
 */
#include "outbox/outbox.h"

#include "access/xact.h"
#include "common/hashfn.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "port/atomics.h"
#include "storage/condition_variable.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/spin.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#define LOOK_AGAIN		USECS_PER_SEC
#define LOOK_UNWOKEN	(100 * INT64CONST(1000))

/* topics of a database that can be waited for at a time, about 3 kB */
#define SLOTS			64

/* where a topic's slot can be, from its hash on */
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

PG_FUNCTION_INFO_V1(idempotency_wait_for_events);

static void look_and_sleep(text *topic, uint64 hash, TimestampTz give_up);
static WaitSlots *wait_slots(void);
static void init_slots(void *area);
static void take_slot(uint64 hash);
static void leave_slot(void);
static void leave_at_exit(int code, Datum arg);
static uint64 hash_topic(const text *topic);
static void at_xact(XactEvent event, void *arg);
static void wake(const NotedTopic *topic);

/*
 * PROCEDURE wait_for_events(topic text, timeout interval DEFAULT '1 min')
 *
 * Returns when take() may have an event of the topic, or after so long.
 */
Datum
idempotency_wait_for_events(PG_FUNCTION_ARGS)
{
	text	   *topic = ik_topic_argument(fcinfo);
	TimestampTz give_up;
	uint64		hash;

	ik_not_null(fcinfo, 1, "timeout");
	give_up = ik_after(GetCurrentTimestamp(), PG_GETARG_INTERVAL_P(1), true,
					   "timeout", "Give a length of time such as '30 s', or '0'.");
	ik_refuse_to_write("idempotency.wait_for_events()");
	if (fcinfo->context == NULL || !IsA(fcinfo->context, CallContext) ||
		castNode(CallContext, fcinfo->context)->atomic)
		ereport(ERROR,
				(errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
				 errmsg("idempotency.wait_for_events() cannot run inside a transaction block"),
				 errhint("Commit first: events that are emitted meanwhile cannot be seen before, and the wait would keep the transaction open.")));

	topic = DatumGetTextPCopy(PointerGetDatum(topic));
	hash = hash_topic(topic);
	if (SPI_connect_ext(SPI_OPT_NONATOMIC) != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect_ext failed");
	take_slot(hash);
	PG_TRY();
	{
		look_and_sleep(topic, hash, give_up);
	}
	PG_FINALLY();
	{
		leave_slot();
	}
	PG_END_TRY();
	SPI_finish();
	PG_RETURN_VOID();
}

static void
look_and_sleep(text *topic, uint64 hash, TimestampTz give_up)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext,
												  "idempotency wait",
												  ALLOCSET_DEFAULT_SIZES);

	for (;;)
	{
		MemoryContext old;
		TimestampTz now;
		TimestampTz next;
		bool		due;
		int64		sleep;

		/* from here on a wake-up ends the sleep below */
		if (my_slot != NULL)
			ConditionVariablePrepareToSleep(&my_slot->wake);

		PushActiveSnapshot(GetTransactionSnapshot());
		old = MemoryContextSwitchTo(context);
		due = ik_is_any_due(topic, &next);
		MemoryContextSwitchTo(old);
		MemoryContextReset(context);
		PopActiveSnapshot();
		SPI_commit();

		now = GetCurrentTimestamp();
		if (due || now >= give_up)
			break;
		next = Min(next, give_up);
		sleep = my_slot != NULL ? LOOK_AGAIN : LOOK_UNWOKEN;
		if (next - now < sleep)
			sleep = Max(next - now, 1000);
		if (my_slot != NULL)
			(void) ConditionVariableTimedSleep(&my_slot->wake,
											   (long) (sleep / 1000) + 1,
											   compat_wait_event("IdempotencyOutbox"));
		else
		{
			(void) WaitLatch(MyLatch,
							 WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
							 (long) (sleep / 1000) + 1, compat_wait_event("IdempotencyOutbox"));
			ResetLatch(MyLatch);
			CHECK_FOR_INTERRUPTS();
		}
	}
	ConditionVariableCancelSleep();
	MemoryContextDelete(context);
}

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

/* Wait in the slot of the topic, if there is one or one is free. */
static void
take_slot(uint64 hash)
{
	static bool registered = false;
	WaitSlots  *slots = wait_slots();
	WaitSlot   *free = NULL;

	if (slots == NULL)
		return;
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
}

static void
leave_slot(void)
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

/* A session that is terminated does not come by PG_FINALLY. */
static void
leave_at_exit(int code, Datum arg)
{
	leave_slot();
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
