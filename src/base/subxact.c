/*-------------------------------------------------------------------------
 *
 * subxact.c
 *		Something that may fail, in a subtransaction of its own.
 *
 *-------------------------------------------------------------------------
 */
#include "base/base.h"

#include <limits.h>

#include "access/xact.h"
#include "storage/proc.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"

/*
 * Do it.  NULL: it is done, and the locks that it took are the caller's.  Else
 * the error, in the caller's memory; what was done has been rolled back.  So
 * the caller may raise it again: who catches it then counts on his own
 * subtransaction.
 */
ErrorData *
ik_try(void (*something) (void *arg), void *arg)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	ErrorData  *volatile error = NULL;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		something(arg);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;
	return error;
}

/*
 * Do what waits for a lock, until give_up at the longest; false: the time ran
 * out.  The end is the server's own lock_timeout, lowered for the wait.  A
 * lock_timeout of the user's that ends sooner stays what it is everywhere: an
 * error.
 */
bool
ik_wait(TimestampTz give_up, void (*wait) (void *arg), void *arg)
{
	int			user_timeout = LockTimeout;
	long		remaining;
	bool		ours;
	ErrorData  *error;

	if (TIMESTAMP_IS_NOEND(give_up))
	{
		wait(arg);
		return true;
	}
	if (TIMESTAMP_IS_NOBEGIN(give_up))
		return false;
	remaining = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), give_up);
	if (remaining <= 0)
		return false;
	ours = user_timeout == 0 || remaining < user_timeout;

	if (ours)
		LockTimeout = (int) Min(remaining, INT_MAX);
	error = ik_try(wait, arg);
	LockTimeout = user_timeout;

	if (error != NULL &&
		(!ours || error->sqlerrcode != ERRCODE_LOCK_NOT_AVAILABLE))
		ReThrowError(error);
	return error == NULL;
}
