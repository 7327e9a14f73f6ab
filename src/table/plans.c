/*-------------------------------------------------------------------------
 *
 * plans.c
 *		Statements on callers' tables, prepared once per session.
 *
 * As in PostgreSQL's ri_triggers.c a plan is found by what it is for, and
 * prepared anew, from its text, if an invalidation has hit it: the text has
 * names in it, by which other columns may go by now.
 *
 * Memory: each plan has a context of its own, which also holds what its maker
 * knows about the statement.  It is listed in a hash table, in use by calls
 * (users, for a trigger of the table may run the same statement again), and
 * freed when it is neither.
 *
 *-------------------------------------------------------------------------
 */
#include "table/table.h"

#include "common/hashfn.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

/*
 * So many plans are kept, of 10 to 20 kB each: enough for the statements of an
 * application, while the tables and columns that callers name come and go.
 */
#define MAX_PLANS	300

typedef struct ListedPlan
{
	PlanKey		key;
	KeptPlan   *plan;
} ListedPlan;

static HTAB *plans = NULL;

static uint32 hash_of_key(const void *key, Size size);
static int	compare_keys(const void *a, const void *b, Size size);
static void make_room(void);
static void unlist(KeptPlan *kept);
static void free_unused(KeptPlan *kept);

/* The plan for this key, or NULL if there is none or it is out of date. */
KeptPlan *
ik_find_plan(const PlanKey *key)
{
	ListedPlan *listed;

	if (plans == NULL)
	{
		HASHCTL		ctl = {
			.keysize = sizeof(PlanKey),
			.entrysize = sizeof(ListedPlan),
			.hash = hash_of_key,
			.match = compare_keys
		};

		plans = hash_create("idempotency plans", 32, &ctl,
							HASH_ELEM | HASH_FUNCTION | HASH_COMPARE);
	}
	listed = hash_search(plans, key, HASH_FIND, NULL);
	if (listed == NULL)
		return NULL;
	if (SPI_plan_is_valid(listed->plan->plan))
		return listed->plan;
	unlist(listed->plan);
	return NULL;
}

/*
 * Prepare a statement and keep it under a key that was not found.  context may
 * be one that holds what belongs to it, or NULL.
 */
KeptPlan *
ik_keep_plan(const PlanKey *key, MemoryContext context, const char *query,
			 int nargs, Oid *types)
{
	/* what may fail comes first */
	SPIPlanPtr	plan = ik_prepare(query, nargs, types);
	KeptPlan   *kept;
	char	   *data;

	if (context == NULL)
		context = AllocSetContextCreate(CurrentMemoryContext,
										"idempotency plan",
										ALLOCSET_SMALL_SIZES);
	kept = MemoryContextAllocZero(context, sizeof(KeptPlan));
	data = MemoryContextAlloc(context, key->len);
	kept->context = context;
	kept->plan = plan;
	kept->key = *key;
	kept->key.data = memcpy(data, key->data, key->len);

	make_room();
	((ListedPlan *) hash_search(plans, &kept->key, HASH_ENTER, NULL))->plan = kept;
	kept->listed = true;
	SPI_keepplan(plan);
	MemoryContextSetParent(context, CacheMemoryContext);
	return kept;
}

/* From here to ik_release_plan() the plan stays, invalid or not. */
void
ik_hold_plan(KeptPlan *kept)
{
	kept->users++;
}

void
ik_release_plan(KeptPlan *kept)
{
	kept->users--;
	free_unused(kept);
}

/* SPI_prepare(), which reports what the parser finds as errors. */
SPIPlanPtr
ik_prepare(const char *query, int nargs, Oid *types)
{
	SPIPlanPtr	plan = SPI_prepare(query, nargs, types);

	if (plan == NULL)
		elog(ERROR, "SPI_prepare failed: %s: %s",
			 SPI_result_code_string(SPI_result), query);
	return plan;
}

static uint32
hash_of_key(const void *key, Size size)
{
	const PlanKey *plan = key;

	return hash_combine(hash_bytes(plan->data, plan->len), plan->relid);
}

static int
compare_keys(const void *a, const void *b, Size size)
{
	const PlanKey *x = a;
	const PlanKey *y = b;

	return x->relid != y->relid || x->len != y->len ||
		memcmp(x->data, y->data, x->len) != 0;
}

/* If the table is full: away with what is out of date, or else with all. */
static void
make_room(void)
{
	for (int all = 0; all <= 1; all++)
	{
		HASH_SEQ_STATUS scan;
		ListedPlan *listed;

		/* a quarter at least, lest the next plan ask for room again */
		if (hash_get_num_entries(plans) < (all ? MAX_PLANS * 3 / 4 : MAX_PLANS))
			return;
		hash_seq_init(&scan, plans);
		while ((listed = hash_seq_search(&scan)) != NULL)
			if (all || !SPI_plan_is_valid(listed->plan->plan))
				unlist(listed->plan);
	}
}

/* Take a plan out of the table; it is freed now, or by its last user. */
static void
unlist(KeptPlan *kept)
{
	hash_search(plans, &kept->key, HASH_REMOVE, NULL);
	kept->listed = false;
	free_unused(kept);
}

static void
free_unused(KeptPlan *kept)
{
	if (kept->listed || kept->users > 0)
		return;
	SPI_freeplan(kept->plan);
	if (kept->second != NULL)
		SPI_freeplan(kept->second);
	MemoryContextDelete(kept->context);
}
