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
#include "executor/spi.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "storage/condition_variable.h"
#include "storage/latch.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

/*
 * What it takes at the most to find what no wake-up told of, and what workers
 * poll at who have nothing better: some looks per second cost a server little.
 */
#define LOOK_AGAIN		USECS_PER_SEC
#define LOOK_UNWOKEN	(100 * INT64CONST(1000))

PG_FUNCTION_INFO_V1(idempotency_wait_for_events);

static void look_and_sleep(text *topic, ConditionVariable *woken,
						   TimestampTz give_up);

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
	ConditionVariable *woken;

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
	if (SPI_connect_ext(SPI_OPT_NONATOMIC) != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect_ext failed");
	woken = ik_join_waiters(topic);
	PG_TRY();
	{
		look_and_sleep(topic, woken, give_up);
	}
	PG_FINALLY();
	{
		ik_leave_waiters();
	}
	PG_END_TRY();
	SPI_finish();
	PG_RETURN_VOID();
}

static void
look_and_sleep(text *topic, ConditionVariable *woken, TimestampTz give_up)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext,
												  "idempotency wait",
												  ALLOCSET_DEFAULT_SIZES);
	TimestampTz before = DT_NOBEGIN;

	for (;;)
	{
		MemoryContext old;
		TimestampTz now;
		TimestampTz next;
		bool		due;
		int64		sleep;

		/* from here on a wake-up ends the sleep below */
		if (woken != NULL)
			ConditionVariablePrepareToSleep(woken);

		/* each look has a transaction, and memory, that end before the sleep */
		PushActiveSnapshot(GetTransactionSnapshot());
		old = MemoryContextSwitchTo(context);
		due = ik_is_any_due(topic, &next);
		MemoryContextSwitchTo(old);
		MemoryContextReset(context);
		PopActiveSnapshot();
		SPI_commit();

		/* a clock that is set back makes no wait longer */
		now = GetCurrentTimestamp();
		if (now < before && !TIMESTAMP_IS_NOEND(give_up))
			give_up -= before - now;
		before = now;
		if (due || now >= give_up)
			break;

		/* what is due by its time wakes nobody: sleep until then, if sooner */
		next = Min(next, give_up);
		sleep = woken != NULL ? LOOK_AGAIN : LOOK_UNWOKEN;
		if (next - now < sleep)
			sleep = Max(next - now, 1000);
		if (woken != NULL)
			(void) ConditionVariableTimedSleep(woken,
											   (long) (sleep / 1000) + 1,
											   compat_wait_event("IdempotencyOutbox"));
		else
		{
			/* no slot: nobody can wake us but those who cancel */
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
