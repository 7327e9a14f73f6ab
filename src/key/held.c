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
 * One claim costs the same among few and many: a hash table finds it, and
 * the end of a subtransaction looks at those that it concerns.  These stand
 * together, as levels only begin and end at the deepest: claims are listed by
 * the level of their owner, settled ones by the level that settled them, the
 * deepest first.
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

/* most transactions hold few claims: so many need no memory for the table */
#define FEW_CLAIMS 16

static dlist_head claims = DLIST_STATIC_INIT(claims);
static dlist_head settled_claims = DLIST_STATIC_INIT(settled_claims);
static MemoryContext claims_context = NULL;

/* the table: chains of claims, by their lock's hash */
static Claim *few_chains[FEW_CLAIMS];
static Claim **chains = few_chains;
static uint32 nchains = FEW_CLAIMS;
static uint32 nclaims = 0;

static bool is_open_claim(const Claim *claim, const text *scope,
						  const text *key);
static void link_claim(Claim *claim);
static void grow_table(void);
static void remove_claim(Claim *claim);
static void at_xact_end(XactEvent event, void *arg);
static void forget_claims(void);
static void at_subxact_end(SubXactEvent event, SubTransactionId mine,
						   SubTransactionId parent, void *arg);
static void forget_level(int level);
static void pass_to_parent(int level);
static void unlock_for_parent(uint64 lock_hash);
static void refuse_open_claims(void);
static bool same_text(const text *a, const text *b);

/*
 * Enter a claim whose lock the current subtransaction has just taken; the
 * arguments are copied, NULL where the caller gave none.
 *
 * The callbacks are registered at the backend's first claim rather than when
 * the library is loaded: they run last-registered-first, and our check must
 * come before that of an extension that commits elsewhere in its own.
 */
void
ik_add_claim(uint64 lock_hash, const text *scope, const text *key,
			 const bytea *fingerprint, int64 ttl, bool replaces,
			 TimestampTz claimed_at)
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
	if (nclaims == nchains)
		grow_table();
	claim = palloc0(sizeof(Claim));
	claim->lock_hash = lock_hash;
	claim->scope = ik_copy_value(scope);
	claim->key = ik_copy_value(key);
	claim->fingerprint = ik_copy_value(fingerprint);
	claim->ttl = ttl;
	claim->replaces = replaces;
	claim->created_at = claimed_at;
	claim->level = GetCurrentTransactionNestLevel();
	MemoryContextSwitchTo(old);

	dlist_push_head(&claims, &claim->node);
	link_claim(claim);
	nclaims++;
}

/* The open claim on this key, or NULL. */
Claim *
ik_find_claim(const text *scope, const text *key)
{
	uint64		lock_hash;

	if (nclaims == 0)
		return NULL;

	/* the usual one is compared sooner than hashed */
	if (nclaims == 1)
	{
		Claim	   *claim = dlist_head_element(Claim, node, &claims);

		return is_open_claim(claim, scope, key) ? claim : NULL;
	}
	lock_hash = ik_lock_hash(scope, key);
	for (Claim *claim = chains[lock_hash % nchains]; claim; claim = claim->next)
	{
		if (claim->lock_hash == lock_hash && is_open_claim(claim, scope, key))
			return claim;
	}
	return NULL;
}

static bool
is_open_claim(const Claim *claim, const text *scope, const text *key)
{
	return claim->settled == 0 &&
		same_text(claim->key, key) && same_text(claim->scope, scope);
}

/*
 * The claim is completed, failed or released.  At the level of its owner that
 * is the end of it, and its lock is given back; deeper, it may come back.
 */
void
ik_settle_claim(Claim *claim, bool released)
{
	int			level = GetCurrentTransactionNestLevel();

	claim->released = released;
	if (claim->level < level)
	{
		claim->settled = level;
		dlist_push_head(&settled_claims, &claim->settled_node);
	}
	else
	{
		if (!claim->away)
			ik_unlock(claim->lock_hash);
		remove_claim(claim);
	}
}

static void
link_claim(Claim *claim)
{
	Claim	  **chain = &chains[claim->lock_hash % nchains];

	claim->next = *chain;
	*chain = claim;
}

/* Double the table; the old one stays in the context. */
static void
grow_table(void)
{
	dlist_iter	iter;

	chains = palloc0(2 * nchains * sizeof(Claim *));
	nchains *= 2;
	dlist_foreach(iter, &claims)
		link_claim(dlist_container(Claim, node, iter.cur));
}

static void
remove_claim(Claim *claim)
{
	Claim	  **link = &chains[claim->lock_hash % nchains];

	while (*link != claim)
		link = &(*link)->next;
	*link = claim->next;
	nclaims--;

	dlist_delete(&claim->node);
	if (claim->settled != 0)
		dlist_delete(&claim->settled_node);
	if (claim->released)
		ik_hide_key(claim->lock_hash);
	pfree(claim->scope);
	pfree(claim->key);
	if (claim->fingerprint != NULL)
		pfree(claim->fingerprint);
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
			if (nclaims > 0 || chains != few_chains)
				forget_claims();
			break;
		default:
			break;
	}
}

static void
forget_claims(void)
{
	dlist_init(&claims);
	dlist_init(&settled_claims);
	memset(few_chains, 0, sizeof(few_chains));
	chains = few_chains;
	nchains = FEW_CLAIMS;
	nclaims = 0;
	MemoryContextReset(claims_context);
}

static void
at_subxact_end(SubXactEvent event, SubTransactionId mine,
			   SubTransactionId parent, void *arg)
{
	if (event == SUBXACT_EVENT_COMMIT_SUB)
		pass_to_parent(GetCurrentTransactionNestLevel());
	else if (event == SUBXACT_EVENT_ABORT_SUB)
		forget_level(GetCurrentTransactionNestLevel());
}

/* ROLLBACK TO: what was claimed is forgotten, what was settled is open again. */
static void
forget_level(int level)
{
	dlist_mutable_iter iter;

	dlist_foreach_modify(iter, &claims)
	{
		Claim	   *claim = dlist_container(Claim, node, iter.cur);

		if (claim->level < level)
			break;
		remove_claim(claim);
	}
	dlist_foreach_modify(iter, &settled_claims)
	{
		Claim	   *claim = dlist_container(Claim, settled_node, iter.cur);

		if (claim->settled < level)
			break;
		claim->settled = 0;
		claim->released = false;
		dlist_delete(&claim->settled_node);
	}
}

/*
 * RELEASE SAVEPOINT: the parent has claimed and settled it.  A settled claim
 * that comes back to its owner has come to its end.
 */
static void
pass_to_parent(int level)
{
	dlist_iter	iter;
	dlist_mutable_iter settled_iter;

	dlist_foreach(iter, &claims)
	{
		Claim	   *claim = dlist_container(Claim, node, iter.cur);

		if (claim->level < level)
			break;
		claim->level = level - 1;
	}
	dlist_foreach_modify(settled_iter, &settled_claims)
	{
		Claim	   *claim = dlist_container(Claim, settled_node, settled_iter.cur);

		if (claim->settled < level)
			break;
		claim->settled = level - 1;
		if (claim->settled == claim->level)
		{
			if (!claim->away)
				unlock_for_parent(claim->lock_hash);
			remove_claim(claim);
		}
	}
}

/* The subtransaction ends, and its locks are the parent's by now. */
static void
unlock_for_parent(uint64 lock_hash)
{
	ResourceOwner owner = CurTransactionResourceOwner;

	CurTransactionResourceOwner = ResourceOwnerGetParent(owner);
	ik_unlock(lock_hash);
	CurTransactionResourceOwner = owner;
}

/* COMMIT and PREPARE fail while a claim is open. */
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

static bool
same_text(const text *a, const text *b)
{
	Size		len = VARSIZE_ANY_EXHDR(a);

	return len == VARSIZE_ANY_EXHDR(b) &&
		memcmp(VARDATA_ANY(a), VARDATA_ANY(b), len) == 0;
}
