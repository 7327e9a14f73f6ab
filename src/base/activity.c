/*-------------------------------------------------------------------------
 *
 * activity.c
 *		What calls came to, counted, and which keys a backend has in hand.
 *
 * The keys in hand are a stack in the backend's share: those that its
 * transaction has claimed, and on top the one that it waits for.  An entry
 * stays until the transaction ends, as the key's row stays out of reach until
 * then, or until the subtransaction is rolled back that it belongs to, or the
 * claim is released and cannot come back.  What does not fit is not shown: a
 * transaction may claim 100,000 keys.
 *
 * Readers take no lock against the owner, who makes a number odd while he
 * writes, as backend_status.c does.  AddinShmemInitLock stands between readers
 * and those who begin and end: nothing is counted twice or left out.
 *
 *-------------------------------------------------------------------------
 */
#include "base/base.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "utils/timestamp.h"

#define MAX_NAMES (256 + 512)	/* scope and key, in bytes */
#define KEY_BYTES 1600			/* two of the longest keys */

/* a key in hand, or waited for */
typedef struct KeyEntry
{
	uint64		lock_hash;
	TimestampTz since;
	int			level;			/* nest level of the owning subtransaction */
	uint16		before;			/* where the entry below it begins */
	uint16		scope_len;
	uint16		key_len;
	bool		hidden;			/* no longer in hand */
	char		names[FLEXIBLE_ARRAY_MEMBER];	/* scope, key */
} KeyEntry;

#define ENTRY_SIZE(scope_len, key_len) \
	MAXALIGN(offsetof(KeyEntry, names) + (scope_len) + (key_len))

/* the keys in hand, and the one that is waited for */
typedef struct KeysInHand
{
	pg_atomic_uint32 changes;	/* odd while they are being changed */
	uint16		used;			/* bytes of keys */
	uint16		last;			/* where the last of them begins */
	bool		waiting;
	int64		keys[KEY_BYTES / sizeof(int64)];
	int64		wait[(sizeof(KeyEntry) + MAX_NAMES) / sizeof(int64)];
} KeysInHand;

/* what one backend writes */
typedef struct BackendActivity
{
	Oid			database;		/* invalid: nobody's */
	int			pid;
	Counts		counts;
	KeysInHand	hand;
} BackendActivity;

StaticAssertDecl(sizeof(BackendActivity) <= IK_BACKEND_BYTES,
				 "a backend's share is too small");

/* what one database has: the counts of backends that have ended */
typedef struct DatabaseActivity
{
	TimestampTz since;
	Counts		ended;
	Counts		reset;			/* the sum at the last reset */
	WorkerRounds worker;
} DatabaseActivity;

static BackendActivity nowhere;
static BackendActivity *mine = &nowhere;
static DatabaseActivity *database = NULL;

Counts	   *ik_counts = &nowhere.counts;
bool		ik_counting = false;

/* what the last wait took, until the call that waited counts it; -1: none */
TimestampTz ik_waited = -1;

static void begin_database(void *area);
static void stop_counting(int code, Datum arg);
static void add_counts(Counts *sum, Counts *counts, int sign);
static void sum_counts(Counts *sum);
static void fill_entry(KeyEntry *entry, uint64 lock_hash,
					   const text *scope, const text *key,
					   TimestampTz since);
static KeyEntry *last_key(void);
static KeyEntry *entry_below(KeyEntry *entry);
static void drop_last_key(void);
static void begin_change(void);
static void end_change(void);
static bool copy_hand(BackendActivity *backend, KeysInHand *hand, int *pid);
static void see_entry(int pid, const KeyEntry *entry, bool waiting,
					  void (*see) (const ShownKey *key, void *arg), void *arg);
static void end_level(int level);
static void at_xact_end(XactEvent event, void *arg);
static void at_subxact_end(SubXactEvent event, SubTransactionId mySubid,
						   SubTransactionId parentSubid, void *arg);

/*
 * Begin to count where others see it, with what was counted before, if there
 * is memory; called once in a backend.
 */
void
ik_begin_counting(void)
{
	BackendActivity *share;

	ik_counting = true;
	RegisterXactCallback(at_xact_end, NULL);
	RegisterSubXactCallback(at_subxact_end, NULL);

	database = ik_shared_area("activity", sizeof(DatabaseActivity),
							  begin_database);
	share = database == NULL ? NULL : ik_shared_backend(MyProcNumber);
	if (share == NULL)
		return;
	before_shmem_exit(stop_counting, 0);
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	memcpy(&share->counts, &nowhere.counts, sizeof(Counts));
	memset(&share->hand, 0, sizeof(KeysInHand));
	share->pid = MyProcPid;
	share->database = MyDatabaseId;
	LWLockRelease(AddinShmemInitLock);
	mine = share;
	ik_counts = &share->counts;
}

/* The call that counts now is the one that waited. */
void
ik_count_wait(CountedFunction function)
{
	pg_atomic_uint64 *waits = &ik_counts->waits[function];
	pg_atomic_uint64 *waited = &ik_counts->waited[function];

	pg_atomic_write_u64(waits, pg_atomic_read_u64(waits) + 1);
	pg_atomic_write_u64(waited, pg_atomic_read_u64(waited) + ik_waited);
	ik_waited = -1;
}

/*
 * The SQLSTATE of an error that is being raised, IK001 and so on, counted; so
 * errors.h has it counted at each place that raises one.  In the midst of an
 * error nothing can be asked of the server: where counting has not begun, what
 * is counted shows when it does.
 */
int
ik_counted_error(int number)
{
	pg_atomic_uint64 *counter = &ik_counts->outcomes[COUNT_ERROR][number];

	pg_atomic_write_u64(counter, pg_atomic_read_u64(counter) + 1);
	return MAKE_SQLSTATE('I', 'K', '0', '0', '0' + number);
}

/*
 * The counts of this database since the last reset, and when that was; false:
 * nothing is counted.
 */
bool
ik_read_counts(Counts *counts, TimestampTz *since)
{
	ik_start_counting();
	if (database == NULL)
		return false;
	LWLockAcquire(AddinShmemInitLock, LW_SHARED);
	sum_counts(counts);
	add_counts(counts, &database->reset, -1);
	*since = database->since;
	LWLockRelease(AddinShmemInitLock);
	return true;
}

/* Count from 0 again: what was counted until now is taken off from now on. */
bool
ik_reset_counts(void)
{
	ik_start_counting();
	if (database == NULL)
		return false;
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	sum_counts(&database->reset);
	database->since = GetCurrentTimestamp();
	LWLockRelease(AddinShmemInitLock);
	return true;
}

/* What this database's workers tell of their rounds; false: it is not kept. */
bool
ik_read_rounds(WorkerRounds *rounds)
{
	ik_start_counting();
	if (database == NULL)
		return false;
	LWLockAcquire(AddinShmemInitLock, LW_SHARED);
	*rounds = database->worker;
	LWLockRelease(AddinShmemInitLock);
	return true;
}

/* Only one worker at a time is in a database. */
void
ik_write_rounds(const WorkerRounds *rounds)
{
	if (database == NULL)
		return;
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	database->worker = *rounds;
	LWLockRelease(AddinShmemInitLock);
}

/*
 * Show a key that this transaction has claimed, or whose row it has written.
 */
void
ik_show_key(uint64 lock_hash, const text *scope,
			const text *key, TimestampTz since)
{
	KeysInHand *hand;
	Size		size = ENTRY_SIZE(VARSIZE_ANY_EXHDR(scope),
								  VARSIZE_ANY_EXHDR(key));
	KeyEntry   *entry;

	ik_start_counting();
	hand = &mine->hand;
	if (size > sizeof(hand->keys) - hand->used)
		return;
	entry = (KeyEntry *) ((char *) hand->keys + hand->used);
	begin_change();
	fill_entry(entry, lock_hash, scope, key, since);
	entry->before = hand->last;
	hand->last = hand->used;
	hand->used += size;
	end_change();
}

/* The claim was released, for good: it is the last of those on this key. */
void
ik_hide_key(uint64 lock_hash)
{
	KeyEntry   *entry = last_key();

	while (entry != NULL && (entry->hidden || entry->lock_hash != lock_hash))
		entry = entry_below(entry);
	if (entry == NULL)
		return;
	begin_change();
	entry->hidden = true;
	end_change();
	while ((entry = last_key()) != NULL && entry->hidden)
		drop_last_key();
}

/* A wait begins; scope and key are NULL if what for has no such name. */
void
ik_begin_wait(uint64 lock_hash, const text *scope,
			  const text *key)
{
	ik_start_counting();
	begin_change();
	fill_entry((KeyEntry *) mine->hand.wait, lock_hash, scope, key,
			   GetCurrentTimestamp());
	mine->hand.waiting = true;
	end_change();
}

/* It has ended, and not by an error. */
void
ik_end_wait(void)
{
	const KeyEntry *wait = (KeyEntry *) mine->hand.wait;
	int64		took = GetCurrentTimestamp() - wait->since;

	/* the clock may have been set back */
	ik_waited = Max(ik_waited, 0) + Max(took, 0);
	begin_change();
	mine->hand.waiting = false;
	end_change();
}

/* Have every key seen that a backend in this database has in hand. */
void
ik_each_shown_key(void (*see) (const ShownKey *key, void *arg), void *arg)
{
	ik_start_counting();
	if (database == NULL)
		return;
	for (int i = 0; i < MaxBackends; i++)
	{
		KeysInHand	hand;
		int			pid;

		CHECK_FOR_INTERRUPTS();
		if (!copy_hand(ik_shared_backend(i), &hand, &pid))
			continue;
		for (int at = 0; at < hand.used;)
		{
			const KeyEntry *entry = (KeyEntry *) ((char *) hand.keys + at);

			see_entry(pid, entry, false, see, arg);
			at += ENTRY_SIZE(entry->scope_len, entry->key_len);
		}
		if (hand.waiting)
			see_entry(pid, (KeyEntry *) hand.wait, true, see, arg);
	}
}

static void
begin_database(void *area)
{
	((DatabaseActivity *) area)->since = GetCurrentTimestamp();
}

/* Leave to the database what this backend has counted. */
static void
stop_counting(int code, Datum arg)
{
	BackendActivity *share = mine;

	mine = &nowhere;
	ik_counts = &nowhere.counts;
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	add_counts(&database->ended, &share->counts, 1);
	share->database = InvalidOid;
	LWLockRelease(AddinShmemInitLock);
}

/* Add counts to a sum, or take them off. */
static void
add_counts(Counts *sum, Counts *counts, int sign)
{
	pg_atomic_uint64 *to = (pg_atomic_uint64 *) sum;
	pg_atomic_uint64 *from = (pg_atomic_uint64 *) counts;

	for (int i = 0; i < sizeof(Counts) / sizeof(pg_atomic_uint64); i++)
		pg_atomic_write_u64(&to[i], pg_atomic_read_u64(&to[i]) +
							sign * pg_atomic_read_u64(&from[i]));
}

/* All that was ever counted in this database; under the lock. */
static void
sum_counts(Counts *sum)
{
	memcpy(sum, &database->ended, sizeof(Counts));
	for (int i = 0; i < MaxBackends; i++)
	{
		BackendActivity *backend = ik_shared_backend(i);

		if (backend->database == MyDatabaseId)
			add_counts(sum, &backend->counts, 1);
	}
}

static void
fill_entry(KeyEntry *entry, uint64 lock_hash, const text *scope,
		   const text *key, TimestampTz since)
{
	entry->lock_hash = lock_hash;
	entry->since = since;
	entry->level = GetCurrentTransactionNestLevel();
	entry->scope_len = entry->key_len = 0;
	entry->hidden = false;
	if (scope == NULL)
		return;
	entry->scope_len = VARSIZE_ANY_EXHDR(scope);
	entry->key_len = VARSIZE_ANY_EXHDR(key);
	Assert(entry->scope_len + entry->key_len <= MAX_NAMES);
	memcpy(entry->names, VARDATA_ANY(scope), entry->scope_len);
	memcpy(entry->names + entry->scope_len, VARDATA_ANY(key), entry->key_len);
}

static KeyEntry *
last_key(void)
{
	KeysInHand *hand = &mine->hand;

	return hand->used == 0 ? NULL :
		(KeyEntry *) ((char *) hand->keys + hand->last);
}

static KeyEntry *
entry_below(KeyEntry *entry)
{
	KeysInHand *hand = &mine->hand;

	return entry == (KeyEntry *) hand->keys ? NULL :
		(KeyEntry *) ((char *) hand->keys + entry->before);
}

static void
drop_last_key(void)
{
	KeysInHand *hand = &mine->hand;

	begin_change();
	hand->used = hand->last;
	if (hand->used > 0)
		hand->last = ((KeyEntry *) ((char *) hand->keys + hand->last))->before;
	end_change();
}

static void
begin_change(void)
{
	pg_atomic_uint32 *changes = &mine->hand.changes;

	pg_atomic_write_u32(changes, pg_atomic_read_u32(changes) + 1);
	pg_write_barrier();
}

static void
end_change(void)
{
	pg_atomic_uint32 *changes = &mine->hand.changes;

	pg_write_barrier();
	pg_atomic_write_u32(changes, pg_atomic_read_u32(changes) + 1);
}

/* What a backend has in hand, in one piece; false: it is not at work here. */
static bool
copy_hand(BackendActivity *backend, KeysInHand *hand, int *pid)
{
	for (;;)
	{
		uint32		changes = pg_atomic_read_u32(&backend->hand.changes);
		bool		here;

		pg_read_barrier();
		here = backend->database == MyDatabaseId;
		*pid = backend->pid;
		memcpy(hand, &backend->hand, sizeof(KeysInHand));
		pg_read_barrier();
		if (changes % 2 == 0 &&
			changes == pg_atomic_read_u32(&backend->hand.changes))
			return here;
		CHECK_FOR_INTERRUPTS();
	}
}

static void
see_entry(int pid, const KeyEntry *entry, bool waiting,
		  void (*see) (const ShownKey *key, void *arg), void *arg)
{
	ShownKey	key = {
		.pid = pid,
		.lock_hash = entry->lock_hash,
		.since = entry->since,
		.waiting = waiting,
		.scope_len = entry->scope_len,
		.key_len = entry->key_len,
		.scope = entry->names,
		.key = entry->names + entry->scope_len
	};

	/* not a wait for something else */
	if (key.scope_len > 0 && !entry->hidden)
		see(&key, arg);
}

static void
at_xact_end(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PARALLEL_COMMIT:
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PARALLEL_ABORT:
		case XACT_EVENT_PREPARE:
			end_level(1);
			break;
		default:
			break;
	}
}

static void
at_subxact_end(SubXactEvent event, SubTransactionId mySubid,
			   SubTransactionId parentSubid, void *arg)
{
	int			level = GetCurrentTransactionNestLevel();

	if (event == SUBXACT_EVENT_ABORT_SUB)
		end_level(level);
	else if (event == SUBXACT_EVENT_COMMIT_SUB)
	{
		KeyEntry   *entry = last_key();

		/* levels only grow upwards */
		while (entry != NULL && entry->level == level)
		{
			entry->level--;
			entry = entry_below(entry);
		}
	}
}

/* Forget the keys of this level and deeper, and a wait that an error ended. */
static void
end_level(int level)
{
	KeyEntry   *entry;

	while ((entry = last_key()) != NULL && entry->level >= level)
		drop_last_key();
	if (unlikely(mine->hand.waiting) &&
		((KeyEntry *) mine->hand.wait)->level >= level)
	{
		ik_end_wait();
		ik_count_many(COUNT_ERROR, 0, 1);
	}
	if (level == 1)
		ik_waited = -1;
}
