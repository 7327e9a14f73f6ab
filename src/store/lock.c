/*-------------------------------------------------------------------------
 *
 * lock.c
 *		The lock of a key, and waiting for rivals.
 *
 * Every key has a transaction-level heavyweight lock on a 64-bit hash of
 * (scope, key).  A call that claims a key or changes its row holds it meanwhile,
 * so a rival is answered at once or waits in PostgreSQL's own queue, with
 * deadlock detection, lock_timeout and cancellation as everywhere.  The locks
 * make the answer fast and polite; the judge is the unique index.
 *
 * Locks are taken and given back under CurTransactionResourceOwner, that is,
 * on the subtransaction's account: on the portal's, a later statement could
 * not give back what an earlier one took.  The end of a subtransaction hands
 * them on or drops them together with the claims it owned (held.c).
 *
 *-------------------------------------------------------------------------
 */
#include "store/store.h"

#include <limits.h>

#include "access/subtrans.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"

/*
 * The advisory locks of users carry 1 or 2 in this field (lockfuncs.c); with
 * another number we never meet theirs.  It shows as objsubid in pg_locks.
 */
#define LOCK_SPACE 0x6964

/* what acquire_wanted() is to take */
typedef struct Wanted
{
	const LOCKTAG *tag;
	LOCKMODE	mode;
} Wanted;

static bool acquire(const LOCKTAG *tag, LOCKMODE mode, bool dont_wait);
static bool acquire_until(const LOCKTAG *tag, LOCKMODE mode,
						  TimestampTz give_up);
static void acquire_wanted(void *arg);
static void release(const LOCKTAG *tag, LOCKMODE mode);
static LOCKTAG tag_of(uint64 hash);

/*
 * The lock's name: a hash of (scope, key) under the secret of this database, so
 * that nobody can choose a key whose lock is another's as well (secret.c).  A
 * byte that no text has stands between them: ('ab', 'c') is not ('a', 'bc').
 */
uint64
ik_lock_hash(const text *scope, const text *key)
{
	static const uint8 no_secret[16] = {0};
	const Secret *secret = ik_newest_secret();
	Size		scope_len = VARSIZE_ANY_EXHDR(scope);
	Size		key_len = VARSIZE_ANY_EXHDR(key);
	Size		len = scope_len + 1 + key_len;
	char		few[1024];		/* a key of the longest kind fits in */
	char	   *name = len <= sizeof(few) ? few : palloc(len);
	uint64		hash;

	memcpy(name, VARDATA_ANY(scope), scope_len);
	name[scope_len] = '\0';
	memcpy(name + scope_len + 1, VARDATA_ANY(key), key_len);
	ik_siphash(secret ? secret->for_locks : no_secret, name, len,
			   (uint8 *) &hash, sizeof(hash));
	if (name != few)
		pfree(name);
#ifdef IK_COLLISIONS
	if (ik_debug_hash_bits < 64)
		hash &= (UINT64CONST(1) << ik_debug_hash_bits) - 1;
#endif
	return hash;
}

/*
 * Take the lock if it is free or ours; each success needs an unlock of its
 * own, or the end of the subtransaction.
 */
bool
ik_try_lock(uint64 hash)
{
	LOCKTAG		tag = tag_of(hash);

	return acquire(&tag, ExclusiveLock, true);
}

/* Give back one lock that this subtransaction took. */
void
ik_unlock(uint64 hash)
{
	LOCKTAG		tag = tag_of(hash);

	release(&tag, ExclusiveLock);
}

/*
 * Wait for the lock, until give_up at the longest; false: the time ran out.
 */
bool
ik_wait_for_lock(uint64 hash, TimestampTz give_up)
{
	LOCKTAG		tag = tag_of(hash);

	return acquire_until(&tag, ExclusiveLock, give_up);
}

/*
 * Wait for the end of a (sub)transaction, until give_up at the longest; false:
 * the time ran out.  Not to be called with a key's lock in hand: the other one
 * may need that lock next, which would be a deadlock of our own making.
 *
 * As XactLockTableWait(), whose bound would be for each of its waits: after a
 * savepoint that is released it begins a second one, for the top transaction.
 */
bool
ik_wait_for_xact(TransactionId xid, TimestampTz give_up)
{
	while (TransactionIdIsInProgress(xid))
	{
		LOCKTAG		tag;
		TransactionId top;

		SET_LOCKTAG_TRANSACTION(tag, xid);
		if (!acquire_until(&tag, ShareLock, give_up))
			return false;
		release(&tag, ShareLock);

		if (!TransactionIdIsInProgress(xid))
			break;
		top = SubTransGetTopmostTransaction(xid);
		if (top == xid)
		{
			/* it has not taken its own lock yet, or is being prepared */
			CHECK_FOR_INTERRUPTS();
			pg_usleep(1000);
		}
		xid = top;
	}
	return true;
}

static bool
acquire(const LOCKTAG *tag, LOCKMODE mode, bool dont_wait)
{
	LockAcquireResult result;
	ResourceOwner owner = CurrentResourceOwner;

	CurrentResourceOwner = CurTransactionResourceOwner;
	result = LockAcquire(tag, mode, false, dont_wait);
	CurrentResourceOwner = owner;
	return result != LOCKACQUIRE_NOT_AVAIL;
}

/*
 * The same with an end.  It is the server's own lock_timeout, lowered for the
 * wait; it ends in an error, so the wait stands in a subtransaction that takes
 * the error back.  A lock_timeout of the user's that ends sooner stays what it
 * is everywhere: an error.
 */
static bool
acquire_until(const LOCKTAG *tag, LOCKMODE mode, TimestampTz give_up)
{
	Wanted		wanted = {tag, mode};

	return ik_wait(give_up, acquire_wanted, &wanted);
}

static void
acquire_wanted(void *arg)
{
	Wanted	   *wanted = arg;

	(void) acquire(wanted->tag, wanted->mode, false);

	/* the timer may have gone off when the lock was granted already */
	CHECK_FOR_INTERRUPTS();
}

static void
release(const LOCKTAG *tag, LOCKMODE mode)
{
	ResourceOwner owner = CurrentResourceOwner;

	CurrentResourceOwner = CurTransactionResourceOwner;
	LockRelease(tag, mode, false);
	CurrentResourceOwner = owner;
}

static LOCKTAG
tag_of(uint64 hash)
{
	LOCKTAG		tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId,
						 (uint32) (hash >> 32), (uint32) hash, LOCK_SPACE);
	return tag;
}
