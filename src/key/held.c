/*-------------------------------------------------------------------------
 *
 * held.c
 *		The claims that this transaction holds.
 *
 * A claim in transaction mode is an entry here plus the key's lock, and
 * nothing else: no row until it is settled.  Its owner is the subtransaction
 * that made it.  RELEASE SAVEPOINT passes it to the parent, ROLLBACK TO
 * forgets it, and a claim that was settled inside is open again.  For that,
 * one that is settled deeper than its owner keeps its entry and its lock: were
 * the lock given back, ROLLBACK TO would let two sessions hold one claim.
 *
 * What is left open fails COMMIT and PREPARE, so that no work commits without
 * its answer.
 *
 * Memory: entries live in a context of their own, emptied when the
 * transaction ends.
 *
 *-------------------------------------------------------------------------
 */
#include "key/key.h"

#include "access/xact.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/timestamp.h"

static dlist_head claims = DLIST_STATIC_INIT(claims);
static MemoryContext claims_context = NULL;

static bool same_text(const text *a, const text *b);
static text *copy_varlena(const void *value);
static void remove_claim(Claim *claim);
static void at_xact_end(XactEvent event, void *arg);
static void at_subxact_end(SubXactEvent event, SubTransactionId mine,
						   SubTransactionId parent, void *arg);
static void refuse_open_claims(void);

/*
 * Enter a claim whose lock the current subtransaction has just taken; the
 * arguments are copied, NULL where the caller gave none.
 *
 * The callbacks are registered at the backend's first claim rather than when
 * the library is loaded: they run last-registered-first, and our check must
 * come before that of an extension that commits elsewhere in its own.
 */
Claim *
ik_add_claim(uint64 lock_hash, const text *scope, const text *key,
			 const Jsonb *request, const Interval *ttl)
{
	Claim	   *claim;
	MemoryContext old;

	if (claims_context == NULL)
	{
		claims_context = AllocSetContextCreate(TopMemoryContext,
											   "idempotency claims",
											   ALLOCSET_DEFAULT_SIZES);
		RegisterXactCallback(at_xact_end, NULL);
		RegisterSubXactCallback(at_subxact_end, NULL);
	}

	old = MemoryContextSwitchTo(claims_context);
	claim = palloc0(sizeof(Claim));
	claim->lock_hash = lock_hash;
	claim->scope = copy_varlena(scope);
	claim->key = copy_varlena(key);
	if (request != NULL)
		claim->request = (Jsonb *) copy_varlena(request);
	if (ttl != NULL)
	{
		claim->ttl = palloc(sizeof(Interval));
		*claim->ttl = *ttl;
	}
	claim->created_at = GetCurrentTimestamp();
	claim->level = GetCurrentTransactionNestLevel();
	MemoryContextSwitchTo(old);

	dlist_push_head(&claims, &claim->node);
	return claim;
}

/* The open claim on this key, or NULL. */
Claim *
ik_find_claim(uint64 lock_hash, const text *scope, const text *key)
{
	dlist_iter	iter;

	dlist_foreach(iter, &claims)
	{
		Claim	   *claim = dlist_container(Claim, node, iter.cur);

		if (claim->lock_hash == lock_hash && claim->settled == 0 &&
			same_text(claim->key, key) && same_text(claim->scope, scope))
			return claim;
	}
	return NULL;
}

/*
 * The claim is completed, failed or released.  At the level of its owner that
 * is the end of it, and its lock is given back; deeper, it may come back.
 */
void
ik_settle_claim(Claim *claim)
{
	int			level = GetCurrentTransactionNestLevel();

	if (claim->level < level)
		claim->settled = level;
	else
	{
		ik_unlock(claim->lock_hash);
		remove_claim(claim);
	}
}

static bool
same_text(const text *a, const text *b)
{
	Size		len = VARSIZE_ANY_EXHDR(a);

	return len == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), len) == 0;
}

static text *
copy_varlena(const void *value)
{
	Size		size = VARSIZE_ANY(value);

	return memcpy(palloc(size), value, size);
}

static void
remove_claim(Claim *claim)
{
	dlist_delete(&claim->node);
	pfree(claim->scope);
	pfree(claim->key);
	if (claim->request != NULL)
		pfree(claim->request);
	if (claim->ttl != NULL)
		pfree(claim->ttl);
	pfree(claim);
}

static void
at_xact_end(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PRE_PREPARE:
			refuse_open_claims();
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PREPARE:
			if (!dlist_is_empty(&claims))
			{
				dlist_init(&claims);
				MemoryContextReset(claims_context);
			}
			break;
		default:
			break;
	}
}

static void
at_subxact_end(SubXactEvent event, SubTransactionId mine,
			   SubTransactionId parent, void *arg)
{
	int			level = GetCurrentTransactionNestLevel();
	dlist_mutable_iter iter;

	if (event != SUBXACT_EVENT_COMMIT_SUB && event != SUBXACT_EVENT_ABORT_SUB)
		return;

	dlist_foreach_modify(iter, &claims)
	{
		Claim	   *claim = dlist_container(Claim, node, iter.cur);

		if (event == SUBXACT_EVENT_ABORT_SUB)
		{
			if (claim->level >= level)
				remove_claim(claim);
			else if (claim->settled >= level)
				claim->settled = 0;
		}
		else
		{
			if (claim->level == level)
				claim->level = level - 1;
			if (claim->settled != level)
				continue;
			claim->settled = level - 1;
			/* back at its owner, the end of it; the lock is the parent's */
			if (claim->settled == claim->level)
			{
				ResourceOwner owner = CurTransactionResourceOwner;

				CurTransactionResourceOwner = ResourceOwnerGetParent(owner);
				ik_unlock(claim->lock_hash);
				CurTransactionResourceOwner = owner;
				remove_claim(claim);
			}
		}
	}
}

/* COMMIT and PREPARE fail while a claim is open (IK001). */
static void
refuse_open_claims(void)
{
	dlist_iter	iter;

	dlist_foreach(iter, &claims)
	{
		Claim	   *claim = dlist_container(Claim, node, iter.cur);

		if (claim->settled == 0)
			ereport(ERROR,
					(errcode(ERRCODE_UNFINISHED_CLAIM),
					 errmsg("claim was neither completed, failed nor released"),
					 errdetail("Key \"%s\" in scope \"%s\" was claimed by this transaction.",
							   text_to_cstring(claim->key),
							   text_to_cstring(claim->scope)),
					 errhint("Complete it in the transaction that claims it, use run() or once(), or take a lease for work that spans transactions.")));
	}
}
