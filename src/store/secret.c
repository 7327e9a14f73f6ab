/*-------------------------------------------------------------------------
 *
 * secret.c
 *		The secrets of this database, under which we hash.
 *
 * The install script makes the first, and no function tells it.  Under it the
 * names of locks cannot be foreseen: otherwise a role could choose a key whose
 * lock has the name of a stranger's, and stand in his way (pg_locks shows the
 * names that are in use to everybody).  And under it a request is stored as a
 * digest, from which nothing can be guessed without it (fingerprint.c).
 *
 * A restored dump brings the secrets that its rows were made with beside the
 * one that CREATE EXTENSION has made.  The newest is used; the older ones stay
 * for the digests that were made under them.
 *
 * They are cached in each backend.  Within a transaction they stay the same,
 * so that a lock is given back under the name under which it was taken.
 *
 *-------------------------------------------------------------------------
 */
#include "store/store.h"

#include "access/table.h"
#include "storage/proc.h"
#include "utils/memutils.h"

static Secret *secrets = NULL;	/* the newest first */
static int	nsecrets = 0;
static bool loaded = false;
static uint64 loaded_changes;	/* of the table, when they were read */
static LocalTransactionId checked_in = InvalidLocalTransactionId;

static void check_secrets(void);
static void read_secret(TupleTableSlot *slot, void *arg);
static int	newest_first(const void *a, const void *b);

/* The secret that is used, or NULL: the table has been emptied. */
const Secret *
ik_newest_secret(void)
{
	if (checked_in != compat_my_lxid)
		check_secrets();
	return nsecrets > 0 ? secrets : NULL;
}

/* The secret of this id, or NULL. */
const Secret *
ik_find_secret(int32 id)
{
	if (checked_in != compat_my_lxid)
		check_secrets();
	for (int i = 0; i < nsecrets; i++)
	{
		if (secrets[i].id == id)
			return &secrets[i];
	}
	return NULL;
}

/*
 * At a transaction's first use: read them, unless nothing has changed since.
 * Its start has taken in the invalidations.
 */
static void
check_secrets(void)
{
	Relation	rel;

	if (!loaded || loaded_changes != ik_table_changes(&ik_secrets))
	{
		loaded = false;
		nsecrets = 0;
		rel = ik_open_table(&ik_secrets, AccessShareLock);
		loaded_changes = ik_table_changes(&ik_secrets);
		ik_each_row(rel, read_secret, NULL);
		table_close(rel, AccessShareLock);
		qsort(secrets, nsecrets, sizeof(Secret), newest_first);
		loaded = true;
	}
	checked_in = compat_my_lxid;
}

static void
read_secret(TupleTableSlot *slot, void *arg)
{
	Secret	   *secret;
	bytea	   *value;

	slot_getsomeattrs(slot, SECRETS_NATTS);
	value = DatumGetByteaPP(slot->tts_values[SECRETS_SECRET]);
	if (VARSIZE_ANY_EXHDR(value) !=
		sizeof(secret->for_locks) + sizeof(secret->for_requests))
		return;

	secrets = secrets == NULL ?
		MemoryContextAlloc(TopMemoryContext, sizeof(Secret)) :
		repalloc(secrets, (nsecrets + 1) * sizeof(Secret));
	secret = &secrets[nsecrets++];
	secret->id = DatumGetInt32(slot->tts_values[SECRETS_ID]);
	secret->created_at = DatumGetTimestampTz(slot->tts_values[SECRETS_CREATED_AT]);
	memcpy(secret->for_locks, VARDATA_ANY(value), sizeof(secret->for_locks));
	memcpy(secret->for_requests,
		   VARDATA_ANY(value) + sizeof(secret->for_locks),
		   sizeof(secret->for_requests));
}

/* By age, and by id if that is the same: all sessions must agree. */
static int
newest_first(const void *a, const void *b)
{
	const Secret *x = a;
	const Secret *y = b;

	if (x->created_at != y->created_at)
		return x->created_at > y->created_at ? -1 : 1;
	return x->id > y->id ? -1 : x->id < y->id;
}
