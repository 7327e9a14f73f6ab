/*-------------------------------------------------------------------------
 *
 * subxact.c
 *		Something that may fail, in a subtransaction of its own.
 *
 *-------------------------------------------------------------------------
 */
#include "base/base.h"

#include "access/xact.h"
#include "utils/memutils.h"
#include "utils/resowner.h"

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
