/*-------------------------------------------------------------------------
 *
 * machine.c
 *		Machines by name: stored, replaced, dropped, cached.
 *
 * A definition is stored as the caller gave it, and parsed into a Machine once
 * per backend.  A trigger on the table of definitions sends a relcache
 * invalidation of that table with every change; the callback marks the cache
 * stale, in this session and all others, also after a rollback or a restore.
 *
 *-------------------------------------------------------------------------
 */
#include "machine/machine.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_trigger.h"
#include "catalog/pg_type.h"
#include "storage/proc.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

/* the cache: from a machine's name to what was parsed */
typedef struct CachedMachine
{
	char		name[MAX_NAME + 1];
	Machine    *machine;
} CachedMachine;

static MemoryContext machines_context = NULL;
static HTAB *machines = NULL;
static bool machines_valid = false;
static bool machines_announced = true;	/* is every change? */
static LocalTransactionId machines_read_in = InvalidLocalTransactionId;
static Oid	machines_relid = InvalidOid;

PG_FUNCTION_INFO_V1(idempotency_define_machine);
PG_FUNCTION_INFO_V1(idempotency_drop_machine);

static void refuse_if_attached(const char *name);
static Machine *load_machine(const char *name);
static void forget_machines(Datum arg, Oid relid);

/*
 * define_machine(name, definition, cyclic): store a machine, or replace it.
 * False: it was defined so already.
 */
Datum
idempotency_define_machine(PG_FUNCTION_ARGS)
{
	char	   *name = ik_machine_argument(fcinfo);
	Datum		values[3];
	Oid			types[3] = {TEXTOID, JSONBOID, BOOLOID};
	Relation	rel;
	uint64		written;

	if (PG_ARGISNULL(1) || PG_ARGISNULL(2))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("definition and cyclic must not be null")));
	ik_check_graph(ik_parse_machine(&PG_GETARG_JSONB_P(1)->root),
				   PG_GETARG_BOOL(2));
	ik_refuse_to_write("idempotency.define_machine()");

	values[0] = CStringGetTextDatum(name);
	values[1] = PG_GETARG_DATUM(1);
	values[2] = PG_GETARG_DATUM(2);
	rel = table_open(ik_own_relation("machines"), RowExclusiveLock);
	written = ik_execute_as_owner(rel,
								  "INSERT INTO idempotency.machines AS m (name, definition, cyclic)"
								  " VALUES ($1, $2, $3)"
								  " ON CONFLICT (name) DO UPDATE"
								  " SET definition = EXCLUDED.definition, cyclic = EXCLUDED.cyclic"
								  " WHERE NOT (m.definition OPERATOR(pg_catalog.=) EXCLUDED.definition"
								  " AND m.cyclic OPERATOR(pg_catalog.=) EXCLUDED.cyclic)",
								  3, types, values, NULL);
	table_close(rel, NoLock);
	PG_RETURN_BOOL(written > 0);
}

/*
 * drop_machine(name): remove it, and return its definition.
 *
 * The lock keeps attach_machine() out until we commit, and waits for one that
 * is under way: it holds ROW SHARE until its own commit.
 */
Datum
idempotency_drop_machine(PG_FUNCTION_ARGS)
{
	char	   *name = ik_machine_argument(fcinfo);
	Datum		values[1] = {CStringGetTextDatum(name)};
	Oid			types[1] = {TEXTOID};
	Datum		definition;
	Relation	rel;

	ik_refuse_to_write("idempotency.drop_machine()");
	rel = table_open(ik_own_relation("machines"), ExclusiveLock);
	ik_find_machine(name);
	refuse_if_attached(name);
	if (ik_execute_as_owner(rel,
							"DELETE FROM idempotency.machines m"
							" WHERE m.name OPERATOR(pg_catalog.=) $1"
							" RETURNING m.definition",
							1, types, values, &definition) != 1)
		/* defined after this transaction's snapshot was taken */
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("could not serialize access due to a concurrent change of machine \"%s\"",
						name)));
	table_close(rel, NoLock);
	PG_RETURN_DATUM(definition);
}

/*
 * The machine of that name, from the cache or the table; IK007 if there is
 * none.  Good until the end of the transaction.  The newest committed
 * definition counts, not that of the caller's snapshot, also for a transaction
 * that began before.
 */
const Machine *
ik_find_machine(const char *name)
{
	CachedMachine *cached;
	bool		found;

	/* the caller's locks may be old: no new one has taken these in */
	AcceptInvalidationMessages();
	/* else each transaction reads them anew */
	if (!machines_announced && machines_read_in != compat_my_lxid)
		machines_valid = false;
	if (!machines_valid)
	{
		HASHCTL		ctl = {.keysize = MAX_NAME + 1,.entrysize = sizeof(CachedMachine)};

		static bool registered = false;

		if (!registered)
			CacheRegisterRelcacheCallback(forget_machines, (Datum) 0);
		registered = true;

		/* callers up the stack may still hold a machine that is out of date */
		if (machines_context != NULL)
			MemoryContextSetParent(machines_context, TopTransactionContext);
		machines_context = NULL;

		machines_relid = ik_own_relation("machines");
		machines_context = AllocSetContextCreate(CacheMemoryContext,
												 "idempotency machines",
												 ALLOCSET_SMALL_SIZES);
		ctl.hcxt = machines_context;
		machines = hash_create("idempotency machines", 16, &ctl,
							   HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);

		/* An invalidation that comes while we read must not be lost. */
		machines_valid = true;
		machines_read_in = compat_my_lxid;
	}

	/* a trigger made by hand may name one so long: to be refused, not cut */
	if (strlen(name) > MAX_NAME)
		cached = NULL;
	else
		cached = hash_search(machines, name, HASH_FIND, NULL);
	if (cached == NULL)
	{
		Machine    *machine = load_machine(name);

		/* entered once it is there: an error leaves no entry without one */
		cached = hash_search(machines, name, HASH_ENTER, &found);
		cached->machine = machine;
	}
	return cached->machine;
}

/* The first argument as a machine's name; 22004 and 22023 as for any name. */
char *
ik_machine_argument(FunctionCallInfo fcinfo)
{
	text	   *name;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("name of the machine must not be null")));
	name = PG_GETARG_TEXT_PP(0);
	if (VARSIZE_ANY_EXHDR(name) == 0 || VARSIZE_ANY_EXHDR(name) > MAX_NAME)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("name of the machine must have 1 to %d bytes",
						MAX_NAME)));
	return text_to_cstring(name);
}

/*
 * Refuse to drop a machine that a guard names, on anybody's table.  The
 * message has the table to which it was attached first.
 */
static void
refuse_if_attached(const char *name)
{
	Oid			function = ik_guard_function(GUARD_STATE);
	Relation	rel = table_open(TriggerRelationId, AccessShareLock);
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	HeapTuple	tuple;
	Oid			first = InvalidOid;
	char	   *table = NULL;

	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_trigger trigger = (Form_pg_trigger) GETSTRUCT(tuple);
		bool		isnull;
		Datum		args;

		if (trigger->tgfoid != function || trigger->tgnargs < 1)
			continue;
		args = fastgetattr(tuple, Anum_pg_trigger_tgargs,
						   RelationGetDescr(rel), &isnull);
		/* the arguments follow each other, each with its zero byte */
		if (!isnull && strcmp(VARDATA_ANY(DatumGetByteaPP(args)), name) == 0 &&
			(!OidIsValid(first) || trigger->oid < first))
		{
			/* the list may be older than a DROP TABLE: then nothing is attached */
			char	   *there = ik_name_if_there(trigger->tgrelid);

			if (there == NULL)
				continue;
			first = trigger->oid;
			table = there;
		}
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	if (OidIsValid(first))
		ereport(ERROR,
				(errcode(ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST),
				 errmsg("cannot drop machine \"%s\" because it is attached",
						name),
				 errdetail("It is attached to table %s.",
						   table),
				 errhint("Call idempotency.detach_machine() for each table first.")));
}

/*
 * Read and parse one definition, into the cache's memory.  A few rows, once
 * per backend: no index.
 */
static Machine *
load_machine(const char *name)
{
	Relation	rel = table_open(machines_relid, AccessShareLock);
	TupleDesc	desc = RelationGetDescr(rel);
	Snapshot	snapshot = RegisterSnapshot(ik_latest_snapshot());
	MemoryContext context;
	Machine    *machine = NULL;
	SysScanDesc scan;
	ScanKeyData key;
	HeapTuple	tuple;

	/* the columns are taken by their numbers: are they still ours? */
	if (desc->natts < MACHINES_DEFINITION + 1 ||
		TupleDescAttr(desc, MACHINES_NAME + 1 - 1)->atttypid != TEXTOID ||
		TupleDescAttr(desc, MACHINES_DEFINITION + 1 - 1)->atttypid != JSONBOID)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"idempotency.machines\" has been altered"),
				 errhint("Take back what was altered, or create the extension again.")));

	machines_announced = ik_is_announced(rel);

	/* a context that an error frees, and the cache's when all went well */
	context = AllocSetContextCreate(CurrentMemoryContext, "idempotency machine",
									ALLOCSET_SMALL_SIZES);
	ScanKeyEntryInitialize(&key, 0, MACHINES_NAME + 1, BTEqualStrategyNumber,
						   TEXTOID, C_COLLATION_OID, F_TEXTEQ,
						   CStringGetTextDatum(name));
	scan = systable_beginscan(rel, InvalidOid, false, snapshot, 1, &key);
	tuple = systable_getnext(scan);
	/* one at the most: the name is the primary key */
	if (HeapTupleIsValid(tuple))
	{
		bool		isnull;
		Datum		definition = heap_getattr(tuple, MACHINES_DEFINITION + 1,
											  desc, &isnull);
		MemoryContext old = MemoryContextSwitchTo(context);

		machine = ik_parse_machine(&DatumGetJsonbPCopy(definition)->root);
		MemoryContextSwitchTo(old);
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);

	/* not cached: it may be defined any moment */
	if (machine == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNKNOWN_MACHINE),
				 errmsg("machine \"%s\" does not exist", name),
				 errhint("Define it with idempotency.define_machine().")));
	MemoryContextSetParent(context, machines_context);
	return machine;
}

/* Relcache callback: marks, and neither frees nor looks anything up. */
static void
forget_machines(Datum arg, Oid relid)
{
	if (!OidIsValid(relid) || relid == machines_relid)
		machines_valid = false;
}
