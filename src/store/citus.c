/*-------------------------------------------------------------------------
 *
 * citus.c
 *		Where a row of ours lives, if Citus spreads the database over nodes.
 *
 * Our tables are read and written past the executor, in this server's heap.
 * With Citus each node has such a heap of its own, and one key would be
 * granted once per node.  So where there are more nodes, a table of ours is
 * refused, unless idempotency.distribute() has spread it: the keys by scope,
 * the marks of tokens by the token's id, and what every token call reads,
 * generations and signing keys, as a whole copy on each node.
 *
 * Then a key or a mark has a HOME: the shard of its scope or id, an ordinary
 * heap on one node.  There everything is done as on a single server, in that
 * heap.  On another node the call is AWAY, and is sent home: as a call of
 * at_home(), which Citus carries to the node of its first argument, inside the
 * transaction.
 *
 * The copies are read where one is, as heaps too, and written in SQL, which
 * Citus repeats on every node and commits in two phases.
 *
 * Until the end of the transaction, a call that claims or writes HOLDS its
 * shard: moves and splits wait for it, as they wait for a statement of a user.
 *
 * Citus does not know what we write.  If it is to commit at another node too,
 * it has to commit in two phases, or that node would commit first, and what is
 * written here could still be lost.  So before the COMMIT we have it do, in
 * SQL, an update of the keys that changes nothing.
 *
 * All else that is asked of Citus is read from its catalogs, which are local
 * tables in pg_catalog, by their names; the library needs nothing of Citus to
 * load.  What ends the knowledge: Citus invalidates the relcache entries of
 * its tables when nodes and shards change; and where it is not there, the first
 * change to the entry of pg_class that would name its table of nodes.
 *
 *-------------------------------------------------------------------------
 */
#include "store/store.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "common/hashfn.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/primnodes.h"
#include "parser/parse_func.h"
#include "storage/proc.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/regproc.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/typcache.h"

/* Citus' catalogs */
#define NODES "pg_dist_node"
#define LOCAL_GROUP "pg_dist_local_group"
#define TABLES "pg_dist_partition"
#define SHARDS "pg_dist_shard"
#define PLACEMENTS "pg_dist_placement"

/* how Citus' own sessions are called */
#define INTERNAL "citus_internal gpid="

/* how a table is stored */
typedef enum Shape
{
	SHAPE_LOCAL,				/* as the install script made it */
	SHAPE_SPREAD,				/* as its OwnPlace says */
	SHAPE_OTHER					/* in another way */
} Shape;

/* the home of the values whose hashes lie in a range */
typedef struct Home
{
	int32		first;
	int32		last;
	int64		shard;
	int32		group;			/* of nodes: one, and its replicas */
} Home;

/* a table of ours that can be spread */
typedef struct Spread
{
	const char *name;
	const char *column;			/* that it is distributed by; NULL: every row
								 * is on every node */
	AttrNumber	number;			/* of this column */
	Oid			type;
	const char *other;			/* a column that can be said to change */

	Oid			relid;
	Shape		shape;
	int			nhomes;
	Home	   *homes;			/* in the order of their ranges; of a table on
								 * every node: its copy here, if there is one */
} Spread;

/* what this backend knows of the cluster, until an invalidation */
static struct
{
	bool		known;
	bool		stale;			/* has something changed since we began to
								 * read it? */
	bool		other_nodes;	/* are there any? */
	bool		colocated;		/* are there tables like the keys? */
	int32		here;			/* our group */
	Spread		spreads[4];
	Oid			relids[2];		/* whose invalidation ends this, too */
	MemoryContext context;		/* of homes */
	void		(*changed) (void);	/* to be told when it ends */
} cluster = {
	.spreads = {
		{"keys", "scope", KEYS_SCOPE + 1, TEXTOID, "fence"},
		{"used_tokens", "id", USED_TOKENS_ID + 1, UUIDOID, "revoked"},
		{"token_generations",.other = "generation"},
		{"token_keys",.other = "rotated_at"}
	}
};

/* as OwnPlace has them */
#define SPREAD(place) (&cluster.spreads[(place) - PLACE_OF_KEYS])
#define KEYS SPREAD(PLACE_OF_KEYS)
#define MARKS SPREAD(PLACE_OF_MARKS)
#define GENERATIONS SPREAD(PLACE_OF_GENERATIONS)

/* is a call of this backend on its way to another node? */
static bool sending = false;

/* is a call being made that another node has sent here? */
static bool serving = false;

/* what this transaction has done, for its end */
static struct
{
	bool		watched;		/* shall we be told of it? */
	bool		sent;			/* a call to another node */
	int32		sent_to;
	const Spread *held;			/* of which it holds a shard here; NULL: none */
	char		home[257];		/* of it, as text */
	bool		told;			/* does Citus know that we write? */
} current;

PG_FUNCTION_INFO_V1(idempotency_at_home);
PG_FUNCTION_INFO_V1(idempotency_at_home_of_token);

static Datum serve(FunctionCallInfo fcinfo, const Spread *spread);
static Oid	function_to_serve(const text *call);
static Datum call_as_sender(FunctionCallInfo call, int32 default_wait,
							int32 lock_timeout, bool read_only);
static Spread *spread_of(const OwnTable *table);
static void learn(void);
static void learn_nodes(void);
static void learn_shapes(void);
static Shape shape_of(const Spread *spread, Relation rel, HeapTuple tuple);
static void learn_homes(Spread *spread);
static bool placement(Oid placements, Home *home, bool copies);
static int	compare_homes(const void *a, const void *b);
static Home *home_of(const Spread *spread, Datum value);
static bool is_away(const Spread *spread, Datum value);
static bool send_call(FunctionCallInfo fcinfo, const Spread *spread, Datum value,
					  Datum *result);
static text **send(const Spread *spread, Datum value, const char *call,
				   text **arguments, int narguments, int nresults);
static SPIPlanPtr plan_of_sending(const Spread *spread);
pg_noreturn static void lost_home(void);
static void hold(void *arg);
static void refuse_setting(const char *name);
static void watch_transaction(void);
static void at_xact_end(XactEvent event, void *arg);
static bool coordinates(void);
static void commit_in_two_phases(void);
static const Spread *find_other_part(char *home, int size);
static char *home_text(const Spread *spread, Datum value);
static void touch(const Spread *spread, const char *home);
static char *signature(FmgrInfo *flinfo, Oid **types);
static TupleDesc row_of(Oid type);
static Datum result_from_texts(FunctionCallInfo fcinfo, Oid type,
							   TupleDesc desc, text **values);
static ArrayType *result_to_texts(Oid type, Datum result);
static ArrayType *to_array(text **values, int n);
static text **from_array(ArrayType *array, int *n);
static Oid	catalog(const char *name);
static Datum column_of(Relation rel, HeapTuple tuple, const char *name);
static void forget_relation(Datum arg, Oid relid);
static void forget_name(Datum arg, int cacheid, uint32 hash);
static void forget(void);

/*
 * Have a function called whenever something may have changed for our tables.
 * It is called while invalidations are taken in: it marks, and does no more.
 */
void
ik_watch_cluster(void (*changed) (void))
{
	cluster.changed = changed;
}

/*
 * From the coordinator, give nodes that were added what distribute() gives: the
 * privileges of roles, secrets, and copies.  Elsewhere this does nothing.
 */
void
ik_reach_new_nodes(void)
{
	Relation	rel;

	if (!ik_is_distributed() || cluster.here != 0)
		return;
	rel = table_open(ik_own_relation("keys"), AccessShareLock);
	(void) ik_execute_as_owner(rel, "SELECT idempotency.reach_new_nodes()",
							   0, NULL, NULL, NULL);
	table_close(rel, AccessShareLock);
}

/*
 * May the rows of this table be used here?  Error: 55000 or 0A000 where other
 * nodes have rows of their own.  While the extension is being made they may:
 * the script writes some, and every node runs it.
 */
void
ik_check_place(const OwnTable *table)
{
	Spread	   *spread;

	if (creating_extension || table->place == PLACE_EACH_NODE)
		return;
	learn();
	/* never distributed: right as long as there is one node */
	if (table->place == PLACE_ONE_SERVER)
	{
		if (cluster.other_nodes)
			ereport(ERROR,
					(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					 errmsg("the outbox is not supported in a database with more nodes"),
					 errdetail("Each node of the Citus cluster would have its own."),
					 errhint("Keep it in a database on one server.")));
		return;
	}
	spread = spread_of(table);
	switch (spread->shape)
	{
		case SHAPE_LOCAL:
			if (cluster.other_nodes)
				ereport(ERROR,
						(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
						 errmsg("%s are not distributed, and the database has more nodes",
								spread == KEYS ? "keys" : "tokens"),
						 errdetail("Each node of the Citus cluster would grant the same once more."),
						 errhint("Call SELECT idempotency.distribute() on the coordinator.")));
			/* opened as a shard of what has been one table again since */
			if (table->shard != 0)
				lost_home();
			return;
		case SHAPE_OTHER:
			/* a copy on each node, or shards by the key: a scope has no home */
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("table idempotency.%s is not distributed as the extension distributes it",
							spread->name),
					 errhint("Create the extension again, and call SELECT idempotency.distribute() on the coordinator.")));
			break;
		case SHAPE_SPREAD:
			/* only a shard, and only where it is by now */
			for (int i = 0; i < spread->nhomes; i++)
			{
				if (spread->homes[i].shard == table->shard &&
					spread->homes[i].group == cluster.here)
					return;
			}
			/* a shard that has moved, or a table just distributed */
			lost_home();
	}
}

/* Are the keys distributed? */
bool
ik_is_distributed(void)
{
	learn();
	return KEYS->shape == SHAPE_SPREAD;
}

/* Is this table of ours spread over the nodes, as its OwnPlace says? */
bool
ik_is_spread(const OwnTable *table)
{
	Spread	   *spread = spread_of(table);

	if (!cluster.known)
		learn();
	return spread != NULL && spread->shape == SHAPE_SPREAD;
}

/* Are there tables like the keys, which a function called by run() may use? */
bool
ik_is_colocated(void)
{
	return ik_is_distributed() && cluster.colocated;
}

/* Are there nodes that have no part in this table of ours? */
bool
ik_is_alone(void)
{
	learn();
	return !cluster.other_nodes;
}

/*
 * The shard that the rows of this value are in; 0: the table is not spread.
 * Errors: 40001 if the shard is on another node, 55000 if this node should have
 * a copy and has none.
 */
int64
ik_shard_of(const OwnTable *table, Datum value)
{
	Spread	   *spread = spread_of(table);
	Home	   *home = spread == NULL ? NULL : home_of(spread, value);

	if (home == NULL)
		return 0;
	if (home->group != cluster.here)
		lost_home();
	return home->shard;
}

/* The shards of a table on this node; *n of them. */
int64 *
ik_shards_here(const OwnTable *table, int *n)
{
	Spread	   *spread = spread_of(table);
	int64	   *shards;

	learn();
	shards = palloc(spread->nhomes * sizeof(int64) + 1);
	*n = 0;
	for (int i = 0; i < spread->nhomes; i++)
	{
		if (spread->homes[i].group == cluster.here)
			shards[(*n)++] = spread->homes[i].shard;
	}
	return shards;
}

/* Is the home of this scope on another node? */
bool
ik_is_away(const text *scope)
{
	return is_away(KEYS, PointerGetDatum(scope));
}

static bool
is_away(const Spread *spread, Datum value)
{
	Home	   *home = home_of(spread, value);

	return home != NULL && home->group != cluster.here;
}

/*
 * Hold the home of an open row until the end of the (sub)transaction, waiting
 * for a move until give_up, or shortly; false: the time ran out.  Errors: 40001
 * if the home has moved away, 0A000 if Citus would write elsewhere than here.
 */
bool
ik_hold_home(RowAccess *row, TimestampTz give_up)
{
	static LocalTransactionId transaction = InvalidLocalTransactionId;
	static SubTransactionId subtransaction;
	static int64 shard;

	if (row->table->shard == 0)
		return true;
	if (shard == row->table->shard && transaction == compat_my_lxid &&
		subtransaction == GetCurrentSubTransactionId())
		return true;

	if (TIMESTAMP_IS_NOBEGIN(give_up))
		give_up = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), 1);
	watch_transaction();
	if (!ik_wait(give_up, hold, row))
		return false;

	current.held = spread_of(row->table);
	strlcpy(current.home, home_text(current.held, row->key[row->table->home_key]),
			sizeof(current.home));
	transaction = compat_my_lxid;
	subtransaction = GetCurrentSubTransactionId();
	shard = row->table->shard;
	return true;
}

/*
 * If the home of the scope is on another node, make the call there; false: it
 * is here.
 */
bool
ik_send_home(FunctionCallInfo fcinfo, const text *scope, Datum *result)
{
	return send_call(fcinfo, KEYS, PointerGetDatum(scope), result);
}

/* The same for the mark of a token. */
bool
ik_send_token_home(FunctionCallInfo fcinfo, const pg_uuid_t *id, Datum *result)
{
	return send_call(fcinfo, MARKS, UUIDPGetDatum(id), result);
}

static bool
send_call(FunctionCallInfo fcinfo, const Spread *spread, Datum value,
		  Datum *result)
{
	text	   *arguments[FUNC_MAX_ARGS];
	Oid		   *types;
	char	   *call;
	int			level;
	Oid			type;
	TupleDesc	desc;

	if (!is_away(spread, value))
		return false;

	/* a value of any type is text as this session writes it */
	call = signature(fcinfo->flinfo, &types);
	for (int i = 0; i < PG_NARGS(); i++)
	{
		arguments[i] = NULL;
		if (types[i] == ANYELEMENTOID && !PG_ARGISNULL(i))
			arguments[i] = ik_response_text(ik_argument_type(fcinfo, i),
											PG_GETARG_DATUM(i));
	}
	level = ik_plain_modes();
	for (int i = 0; i < PG_NARGS(); i++)
	{
		if (types[i] != ANYELEMENTOID && !PG_ARGISNULL(i))
			arguments[i] = ik_response_text(types[i], PG_GETARG_DATUM(i));
	}
	AtEOXact_GUC(true, level);
	type = get_func_rettype(fcinfo->flinfo->fn_oid);
	desc = row_of(type);
	*result = result_from_texts(fcinfo, type, desc,
								send(spread, value, call, arguments, PG_NARGS(),
									 desc == NULL ? 1 : desc->natts));
	return true;
}

/*
 * at_home(scope, call, arguments, default_wait, lock_timeout, read_only): the
 * call that another node sends to this one, with its settings.  The caller may
 * call what he may call without this.  The result's columns as text.
 */
Datum
idempotency_at_home(PG_FUNCTION_ARGS)
{
	return serve(fcinfo, KEYS);
}

/* The same, to the node of a token's mark: at_home(id, ...). */
Datum
idempotency_at_home_of_token(PG_FUNCTION_ARGS)
{
	return serve(fcinfo, MARKS);
}

static Datum
serve(FunctionCallInfo fcinfo, const Spread *spread)
{
	LOCAL_FCINFO(call, FUNC_MAX_ARGS);
	FmgrInfo	flinfo;
	Oid			function;
	Oid		   *types;
	text	  **arguments;
	int			narguments;
	int			level;
	Datum		result;
	ArrayType  *array;

	for (int i = 0; i < PG_NARGS(); i++)
	{
		if (PG_ARGISNULL(i))
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("arguments must not be null")));
	}
	if (is_away(spread, PG_GETARG_DATUM(0)))
	{
		/* carried to an old home; or we sent it, and Citus did not carry it */
		if (!sending)
			lost_home();
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("key or token belongs to another node, and the call cannot be sent there from here"),
				 errdetail("It is made on a worker, inside a statement or function that another node has sent there."),
				 errhint("Make the call in a statement of its own, or with the scope of the rows that the statement is about.")));
	}
	function = function_to_serve(PG_GETARG_TEXT_PP(1));
	arguments = from_array(PG_GETARG_ARRAYTYPE_P(2), &narguments);

	/* it may name at_home() again */
	check_stack_depth();
	fmgr_info(function, &flinfo);
	(void) signature(&flinfo, &types);
	/* a node with another version of the extension, or a call made by hand */
	if (flinfo.fn_nargs != narguments)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("call with %d arguments for %d", narguments,
						flinfo.fn_nargs)));
	InitFunctionCallInfoData(*call, &flinfo, narguments, InvalidOid, NULL, NULL);
	level = ik_plain_modes();
	for (int i = 0; i < narguments; i++)
	{
		call->args[i].isnull = arguments[i] == NULL;
		call->args[i].value = arguments[i] == NULL ? (Datum) 0 :
			ik_from_text(types[i], arguments[i]);
		if (call->args[i].isnull && flinfo.fn_strict)
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("arguments must not be null")));
	}
	AtEOXact_GUC(true, level);

	result = call_as_sender(call, PG_GETARG_INT32(3), PG_GETARG_INT32(4),
							PG_GETARG_BOOL(5));

	level = ik_plain_modes();
	/* a NULL is one column that is NULL: the array itself always is there */
	if (call->isnull)
	{
		text	   *null = NULL;

		array = to_array(&null, 1);
	}
	else
		array = result_to_texts(get_func_rettype(function), result);
	AtEOXact_GUC(true, level);
	PG_RETURN_ARRAYTYPE_P(array);
}

/*
 * The function that another node wants to be called.  Anybody with USAGE gets
 * here: one of ours, that he could call as well.
 */
static Oid
function_to_serve(const text *call)
{
	char	   *name = text_to_cstring(call);
	Oid			function = DatumGetObjectId(DirectFunctionCall1(regprocedurein,
																CStringGetDatum(name)));

	if (!OidIsValid(function) ||
		get_func_namespace(function) != get_rel_namespace(ik_own_relation("keys")) ||
		get_func_prokind(function) != PROKIND_FUNCTION ||
		get_func_retset(function))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("not a call that is sent home: %s", name)));
	if (object_aclcheck(ProcedureRelationId, function, GetUserId(),
						ACL_EXECUTE) != ACLCHECK_OK)
		aclcheck_error(ACLCHECK_NO_PRIV, OBJECT_FUNCTION,
					   get_func_name(function));
	return function;
}

/* Make the call with the settings of the session that sent it. */
static Datum
call_as_sender(FunctionCallInfo call, int32 default_wait, int32 lock_timeout,
			   bool read_only)
{
	bool		was_read_only = XactReadOnly;
	bool		was_serving = serving;
	int			level = NewGUCNestLevel();
	char		number[16];
	Datum		result;

	snprintf(number, sizeof(number), "%d", default_wait);
	ik_set_for_now("idempotency.default_wait", number);
	snprintf(number, sizeof(number), "%d", lock_timeout);
	ik_set_for_now("lock_timeout", number);
	/* after an error, the end of the (sub)transaction sets it back */
	XactReadOnly |= read_only;
	PG_TRY();
	{
		serving = true;
		result = FunctionCallInvoke(call);
	}
	PG_FINALLY();
	{
		serving = was_serving;
	}
	PG_END_TRY();
	XactReadOnly = was_read_only;
	AtEOXact_GUC(true, level);
	return result;
}

/*
 * The distributed table that this one is a shard of, by the number at the end
 * of its name; else itself.
 */
Oid
ik_whole_of(Oid relid)
{
	char	   *name;
	char	   *end;
	int64		shard;
	Relation	rel;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;
	Oid			whole = relid;

	learn();
	if (!OidIsValid(cluster.relids[0]))
		return relid;			/* Citus is not there */
	name = get_rel_name(relid);
	end = name == NULL ? NULL : strrchr(name, '_');
	if (end == NULL || strspn(end + 1, "0123456789") != strlen(end + 1))
		return relid;
	shard = strtoi64(end + 1, NULL, 10);

	rel = table_open(catalog(SHARDS), AccessShareLock);
	ScanKeyInit(&key, get_attnum(RelationGetRelid(rel), "shardid"),
				BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(shard));
	scan = systable_beginscan(rel, catalog(SHARDS "_shardid_index"),
							  OidIsValid(catalog(SHARDS "_shardid_index")),
							  NULL, 1, &key);
	if (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Oid			found = DatumGetObjectId(column_of(rel, tuple, "logicalrelid"));

		/* the name alone may be anybody's */
		if (found != relid && get_rel_namespace(found) == get_rel_namespace(relid) &&
			strcmp(psprintf("%s%s", get_rel_name(found), end), name) == 0)
			whole = found;
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return whole;
}

static void
learn(void)
{
	if (cluster.context == NULL)
	{
		cluster.context = AllocSetContextCreate(TopMemoryContext,
												"idempotency homes",
												ALLOCSET_SMALL_SIZES);
		CacheRegisterRelcacheCallback(forget_relation, (Datum) 0);
		CacheRegisterSyscacheCallback(RELNAMENSP, forget_name,
									  UInt32GetDatum(GetSysCacheHashValue2(RELNAMENSP, CStringGetDatum(NODES),
																		   ObjectIdGetDatum(PG_CATALOG_NAMESPACE))));
	}
	while (!cluster.known)
	{
		/* what comes in meanwhile sets this again */
		cluster.stale = false;
		cluster.other_nodes = false;
		cluster.colocated = false;
		for (int i = 0; i < lengthof(cluster.spreads); i++)
		{
			cluster.spreads[i].relid = InvalidOid;
			cluster.spreads[i].shape = SHAPE_LOCAL;
			cluster.spreads[i].nhomes = 0;
		}
		learn_nodes();
		if (OidIsValid(cluster.relids[0]))
			learn_shapes();
		cluster.known = !cluster.stale;
		/* a look at any catalog sets it then: what was read is for this call */
		if (debug_discard_caches > 0)
			break;
	}
}

/*
 * Which node is this, and are there others?  A worker knows its number even if
 * it has no copy of the list of nodes.
 */
static void
learn_nodes(void)
{
	Relation	rel;
	SysScanDesc scan;
	HeapTuple	tuple;

	cluster.relids[0] = catalog(NODES);
	cluster.relids[1] = catalog(LOCAL_GROUP);
	if (!OidIsValid(cluster.relids[0]))
		return;

	cluster.here = 0;
	rel = table_open(cluster.relids[1], AccessShareLock);
	scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	if (HeapTupleIsValid(tuple = systable_getnext(scan)))
		cluster.here = DatumGetInt32(column_of(rel, tuple, "groupid"));
	systable_endscan(scan);
	table_close(rel, AccessShareLock);

	cluster.other_nodes = cluster.here != 0;
	rel = table_open(cluster.relids[0], AccessShareLock);
	scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	while (!cluster.other_nodes &&
		   HeapTupleIsValid(tuple = systable_getnext(scan)))
		cluster.other_nodes = DatumGetInt32(column_of(rel, tuple, "groupid")) != cluster.here;
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
}

/* How are our tables stored, and are there tables like the keys? */
static void
learn_shapes(void)
{
	Relation	rel = table_open(catalog(TABLES), AccessShareLock);
	int32		colocation = 0;
	SysScanDesc scan;
	HeapTuple	tuple;

	for (int i = 0; i < lengthof(cluster.spreads); i++)
		cluster.spreads[i].relid = ik_own_relation(cluster.spreads[i].name);

	/* one that is not among Citus' tables at all: SHAPE_LOCAL, as learn() began */
	scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Oid			relid = DatumGetObjectId(column_of(rel, tuple, "logicalrelid"));

		for (int i = 0; i < lengthof(cluster.spreads); i++)
		{
			if (cluster.spreads[i].relid == relid)
				cluster.spreads[i].shape = shape_of(&cluster.spreads[i], rel, tuple);
		}
		if (relid == KEYS->relid)
			colocation = DatumGetInt32(column_of(rel, tuple, "colocationid"));
	}
	systable_endscan(scan);

	/* 0: no table can be like the keys */
	scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	while (colocation != 0 && HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		if (DatumGetInt32(column_of(rel, tuple, "colocationid")) == colocation &&
			DatumGetObjectId(column_of(rel, tuple, "logicalrelid")) != KEYS->relid)
			cluster.colocated = true;
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);

	MemoryContextReset(cluster.context);
	for (int i = 0; i < lengthof(cluster.spreads); i++)
	{
		if (cluster.spreads[i].shape == SHAPE_SPREAD)
			learn_homes(&cluster.spreads[i]);
	}
}

/* What Citus has noted of a table: spread as it should be, or in another way. */
static Shape
shape_of(const Spread *spread, Relation rel, HeapTuple tuple)
{
	char		method = DatumGetChar(column_of(rel, tuple, "partmethod"));
	char		replication = DatumGetChar(column_of(rel, tuple, "repmodel"));
	Var		   *column;

	/* neither by hash nor by range, and written in two phases */
	if (spread->column == NULL)
		return method == 'n' && replication == 't' ? SHAPE_SPREAD : SHAPE_OTHER;
	if (method != 'h')
		return SHAPE_OTHER;
	column = stringToNode(TextDatumGetCString(column_of(rel, tuple, "partkey")));
	return IsA(column, Var) && column->varattno == spread->number ?
		SHAPE_SPREAD : SHAPE_OTHER;
}

/* Which shards does a table have, and where? */
static void
learn_homes(Spread *spread)
{
	Oid			placements = catalog(PLACEMENTS);
	Relation	rel = table_open(catalog(SHARDS), AccessShareLock);
	bool		copies = spread->column == NULL;
	int			size = 32;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	spread->homes = MemoryContextAlloc(cluster.context, size * sizeof(Home));
	ScanKeyInit(&key, get_attnum(RelationGetRelid(rel), "logicalrelid"),
				BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(spread->relid));
	scan = systable_beginscan(rel, catalog(SHARDS "_logical_relid_index"),
							  OidIsValid(catalog(SHARDS "_logical_relid_index")),
							  NULL, 1, &key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Home	   *home;

		if (spread->nhomes == size)
		{
			size *= 2;
			spread->homes = repalloc(spread->homes, size * sizeof(Home));
		}
		home = &spread->homes[spread->nhomes];
		memset(home, 0, sizeof(Home));
		home->shard = DatumGetInt64(column_of(rel, tuple, "shardid"));
		if (!copies)
		{
			home->first = pg_strtoint32(TextDatumGetCString(column_of(rel, tuple, "shardminvalue")));
			home->last = pg_strtoint32(TextDatumGetCString(column_of(rel, tuple, "shardmaxvalue")));
		}
		if (placement(placements, home, copies))
			spread->nhomes++;
		else if (!copies)
			spread->shape = SHAPE_OTHER;	/* replicated by statements */
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	qsort(spread->homes, spread->nhomes, sizeof(Home), compare_homes);
}

/*
 * The node of a shard; false: there is not exactly one.  Of copies, the one
 * here.
 */
static bool
placement(Oid placements, Home *home, bool copies)
{
	Oid			index = catalog(PLACEMENTS "_shardid_index");
	Relation	rel = table_open(placements, AccessShareLock);
	int			n = 0;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tuple;

	ScanKeyInit(&key, get_attnum(placements, "shardid"),
				BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(home->shard));
	scan = systable_beginscan(rel, index, OidIsValid(index), NULL, 1, &key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		int32		group = DatumGetInt32(column_of(rel, tuple, "groupid"));

		/* 4: to be dropped */
		if (DatumGetInt32(column_of(rel, tuple, "shardstate")) == 4 ||
			(copies && group != cluster.here))
			continue;
		home->group = group;
		n++;
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return n == 1;
}

static int
compare_homes(const void *a, const void *b)
{
	int32		first = ((const Home *) a)->first;
	int32		other = ((const Home *) b)->first;

	return first < other ? -1 : first > other;
}

/* What is known of a table, or of that which it is a shard of; NULL: nothing. */
static Spread *
spread_of(const OwnTable *table)
{
	return table->place >= PLACE_OF_KEYS ? SPREAD(table->place) : NULL;
}

/*
 * The home of the rows of a value; NULL where the table is not spread.  Error:
 * 55000 if this node has no copy.
 */
static Home *
home_of(const Spread *spread, Datum value)
{
	int32		hash;
	int			low = 0;
	int			high;

	/* most databases are on one server, and each call asks */
	if (!cluster.known)
		learn();
	if (likely(spread->shape != SHAPE_SPREAD))
		return NULL;
	if (spread->column == NULL)
	{
		if (spread->nhomes == 0)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("this node has no copy of table idempotency.%s", spread->name),
					 errhint("Call SELECT idempotency.distribute() on the coordinator, which has to be a node by citus_set_coordinator_host(), or as a superuser replicate_reference_tables().")));
		return spread->homes;
	}

	/* Citus hashes with the function of the type's operator class */
	hash = spread->type == TEXTOID ?
		DatumGetInt32(DirectFunctionCall1Coll(hashtext, C_COLLATION_OID, value)) :
		DatumGetInt32(DirectFunctionCall1(uuid_hash, value));
	high = spread->nhomes - 1;
	while (low < high)
	{
		int			middle = (low + high + 1) / 2;

		if (spread->homes[middle].first <= hash)
			low = middle;
		else
			high = middle - 1;
	}
	if (low > high || hash < spread->homes[low].first ||
		hash > spread->homes[low].last)
		elog(ERROR, "no shard of idempotency.%s for hash %d", spread->name, hash);
	return &spread->homes[low];
}

static void
lost_home(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			 errmsg("could not serialize access due to a concurrent move of the key to another node"),
			 errhint("The transaction might succeed if retried.")));
}

/*
 * The lock that a move of the shard waits for.  While we waited for it the
 * shard may have moved.
 */
static void
hold(void *arg)
{
	RowAccess  *row = arg;
	Oid			types[2] = {INT4OID, INT8ARRAYOID};
	Oid			function = LookupFuncName(list_make2(makeString("pg_catalog"),
													 makeString("lock_shard_metadata")),
										  2, types, false);
	Datum		shard = Int64GetDatum(row->table->shard);
	SavedUser	caller;

	refuse_setting("citus.enable_local_execution");
	ik_become_owner(row->rel, SECURITY_LOCAL_USERID_CHANGE, &caller);
	OidFunctionCall2(function, Int32GetDatum(ShareLock),
					 PointerGetDatum(construct_array(&shard, 1, INT8OID, sizeof(int64),
													 FLOAT8PASSBYVAL, TYPALIGN_DOUBLE)));
	AcceptInvalidationMessages();
	ik_check_place(row->table);

	/* a part of a query on shards commits by itself: Citus refuses this there */
	if (!serving && strncmp(application_name, INTERNAL, strlen(INTERNAL)) == 0)
	{
		Spread	   *spread = spread_of(row->table);

		SPI_connect();
		touch(spread, home_text(spread, row->key[row->table->home_key]));
		SPI_finish();
		current.told = true;
	}
	ik_become_caller(&caller);
}

/*
 * Send a call to the home of its scope, on another node, and return the columns
 * of its result; nresults is how many the caller relies on.
 */
text	  **
ik_send(const text *scope, const char *call, text **arguments, int narguments,
		int nresults)
{
	return send(KEYS, PointerGetDatum(scope), call, arguments, narguments,
				nresults);
}

static text **
send(const Spread *spread, Datum value, const char *call, text **arguments,
	 int narguments, int nresults)
{
	bool		was_sending = sending;
	MemoryContext context = CurrentMemoryContext;
	MemoryContext old;
	Datum		values[6] = {
		value,
		CStringGetTextDatum(call),
		PointerGetDatum(to_array(arguments, narguments)),
		Int32GetDatum(ik_default_wait),
		Int32GetDatum(LockTimeout),
		BoolGetDatum(XactReadOnly)
	};
	bool		isnull;
	Datum		result;
	text	  **texts;
	int			n;

	/* what bears the name of our schema is ours, or an error */
	(void) ik_own_relation("keys");

	/* nothing that is sent away can be known to be a mere look */
	PreventCommandDuringRecovery(call);
	if (IsInParallelMode())
		PreventCommandIfParallelMode(call);
	refuse_setting("citus.function_opens_transaction_block");
	watch_transaction();
	current.sent = true;
	current.sent_to = home_of(spread, value)->group;

	SPI_connect();
	PG_TRY();
	{
		sending = true;
		if (SPI_execute_plan(plan_of_sending(spread), values, NULL, false, 0) != SPI_OK_SELECT ||
			SPI_processed != 1)
			elog(ERROR, "could not send the call %s", call);
	}
	PG_FINALLY();
	{
		sending = was_sending;
	}
	PG_END_TRY();
	result = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1,
						   &isnull);
	if (isnull)
		elog(ERROR, "no result of the call %s", call);
	old = MemoryContextSwitchTo(context);
	texts = from_array(DatumGetArrayTypePCopy(result), &n);
	MemoryContextSwitchTo(old);
	SPI_finish();
	if (n < nresults)
		elog(ERROR, "%d columns in the result of the call %s", n, call);
	return texts;
}

static SPIPlanPtr
plan_of_sending(const Spread *spread)
{
	static SPIPlanPtr plans[lengthof(cluster.spreads)] = {NULL};
	SPIPlanPtr *plan = &plans[spread - cluster.spreads];

	if (*plan == NULL)
	{
		Oid			types[6] = {spread->type, TEXTOID, TEXTARRAYOID, INT4OID, INT4OID, BOOLOID};
		SPIPlanPtr	new_plan = SPI_prepare("SELECT result FROM idempotency.at_home($1, $2, $3, $4, $5, $6) AS result",
										   lengthof(types), types);

		if (new_plan == NULL)
			elog(ERROR, "SPI_prepare failed: %s",
				 SPI_result_code_string(SPI_result));
		SPI_keepplan(new_plan);
		*plan = new_plan;
	}
	return *plan;
}

/*
 * With these settings off, Citus would have a call commit where it is made
 * before this transaction does, or write to this node over a connection.
 */
static void
refuse_setting(const char *name)
{
	const char *value = GetConfigOption(name, true, false);

	if (value != NULL && strcmp(value, "off") == 0)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("keys cannot be used while %s is off", name),
				 errhint("Set it to on: keys and work commit together or not at all.")));
}

/*
 * Our callback is called before that of Citus, which was registered before it,
 * and which may commit at another node before this one commits.
 */
static void
watch_transaction(void)
{
	if (!current.watched)
		RegisterXactCallback(at_xact_end, NULL);
	current.watched = true;
}

static void
at_xact_end(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
			if ((current.sent || current.held != NULL) && !current.told &&
				TransactionIdIsValid(GetTopTransactionIdIfAny()) &&
				coordinates())
				commit_in_two_phases();
			break;
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PREPARE:
			current.sent = false;
			current.held = NULL;
			current.told = false;
			break;
		default:
			break;
	}
}

/*
 * Does Citus commit this transaction at other nodes?  At the bidding of another
 * node it does not: that one sees to it.
 */
static bool
coordinates(void)
{
	Oid			function = LookupFuncName(list_make2(makeString("pg_catalog"),
													 makeString("get_current_transaction_id")),
										  0, NULL, false);
	HeapTupleHeader id = DatumGetHeapTupleHeader(OidFunctionCall0(function));
	bool		isnull;
	Datum		number = GetAttributeByName(id, "transaction_number", &isnull);
	Datum		initiator = GetAttributeByName(id, "initiator_node_identifier", &isnull);

	learn();
	return DatumGetInt64(number) != 0 && DatumGetInt32(initiator) == cluster.here;
}

/*
 * Have Citus know that this node has written, or if it has no keys, that
 * another one than that of the call has.
 */
static void
commit_in_two_phases(void)
{
	Relation	rel;
	SavedUser	caller;
	const Spread *spread = current.held;

	if (spread == NULL)
		spread = find_other_part(current.home, sizeof(current.home));

	PushActiveSnapshot(GetTransactionSnapshot());
	SPI_connect();
	rel = table_open(ik_own_relation(spread->name), AccessShareLock);
	ik_become_owner(rel, SECURITY_LOCAL_USERID_CHANGE, &caller);
	touch(spread, current.home);
	ik_become_caller(&caller);
	table_close(rel, NoLock);
	SPI_finish();
	PopActiveSnapshot();
}

/*
 * Something that this transaction could write on this node, or else on another
 * one than that which a call was sent to.  *home is a scope whose keys are
 * there; where there is none, what is on all nodes has a copy here.  Citus lets
 * only one transaction at a time write that, so it is the last resort.
 */
static const Spread *
find_other_part(char *home, int size)
{
	int32		group = current.sent_to;
	int			n = 0;

	for (int i = 0; i < KEYS->nhomes && group != cluster.here; i++)
	{
		if (KEYS->homes[i].group != current.sent_to)
			group = KEYS->homes[i].group;
	}
	if (group == current.sent_to)
	{
		(void) home_of(GENERATIONS, (Datum) 0); /* or an error */
		strlcpy(home, "", size);
		return GENERATIONS;
	}
	do
		snprintf(home, size, "idempotency.%d", n++);
	while (home_of(KEYS, CStringGetTextDatum(home))->group != group);
	return KEYS;
}

/* A value of the column that a table is distributed by. */
static char *
home_text(const Spread *spread, Datum value)
{
	return spread->type == TEXTOID ? TextDatumGetCString(value) :
		DatumGetCString(DirectFunctionCall1(uuid_out, value));
}

/*
 * The update that changes nothing, on the shard of a value, or on every node.
 * It does not scan, so it takes no predicate lock.
 */
static void
touch(const Spread *spread, const char *home)
{
	StringInfoData command;

	initStringInfo(&command);
	appendStringInfo(&command, "UPDATE idempotency.%s SET %s = %s WHERE ",
					 spread->name, spread->other, spread->other);
	if (spread->column != NULL)
		appendStringInfo(&command, "%s OPERATOR(pg_catalog.=) %s AND ",
						 spread->column, quote_literal_cstr(home));
	appendStringInfoString(&command, "false");

	/* what bears the name is ours, or an error */
	(void) ik_own_relation(spread->name);
	if (SPI_execute(command.data, false, 0) != SPI_OK_UPDATE)
		elog(ERROR, "could not touch idempotency.%s", spread->name);
}

/*
 * A function as it is called from another node, and the declared types of its
 * arguments: what takes any type has a twin that takes text.
 */
static char *
signature(FmgrInfo *flinfo, Oid **types)
{
	int			nargs;
	StringInfoData buf;

	(void) get_func_signature(flinfo->fn_oid, types, &nargs);
	initStringInfo(&buf);
	appendStringInfo(&buf, "idempotency.%s(",
					 quote_identifier(get_func_name(flinfo->fn_oid)));
	for (int i = 0; i < nargs; i++)
		appendStringInfo(&buf, "%s%s", i > 0 ? "," : "",
						 (*types)[i] == ANYELEMENTOID ? "pg_catalog.text" :
						 format_type_be_qualified((*types)[i]));
	appendStringInfoChar(&buf, ')');
	return buf.data;
}

/*
 * Until AtEOXact_GUC(true, result), times are written and read as all nodes
 * understand them.
 */
int
ik_plain_modes(void)
{
	int			level = NewGUCNestLevel();

	if (DateStyle != USE_ISO_DATES)
		ik_set_for_now("datestyle", "ISO");
	if (IntervalStyle != INTSTYLE_POSTGRES)
		ik_set_for_now("intervalstyle", "postgres");
	return level;
}

/* A value of a type, from its text. */
Datum
ik_from_text(Oid type, const text *value)
{
	Oid			input;
	Oid			parameter;

	if (type == TEXTOID)
		return PointerGetDatum(value);
	getTypeInputInfo(type, &input, &parameter);
	return OidInputFunctionCall(input, text_to_cstring(value), parameter, -1);
}

/*
 * The columns of a row type, or NULL for another one.  A copy: that of the type
 * cache goes when an invalidation comes in, which conversions may take in.
 */
static TupleDesc
row_of(Oid type)
{
	return get_typtype(type) == TYPTYPE_COMPOSITE ?
		lookup_rowtype_tupdesc_copy(type, -1) : NULL;
}

/* The result of the function that is being called, from that of its twin. */
static Datum
result_from_texts(FunctionCallInfo fcinfo, Oid type, TupleDesc desc,
				  text **values)
{
	int			level = ik_plain_modes();
	Datum		result = (Datum) 0;

	if (desc != NULL)
	{
		Datum	   *columns = palloc0(desc->natts * sizeof(Datum));
		bool	   *nulls = palloc0(desc->natts * sizeof(bool));

		for (int i = 0; i < desc->natts; i++)
		{
			nulls[i] = values[i] == NULL;
			if (!nulls[i])
				columns[i] = ik_from_text(TupleDescAttr(desc, i)->atttypid, values[i]);
		}
		result = HeapTupleGetDatum(heap_form_tuple(desc, columns, nulls));
	}
	else if (values[0] == NULL)
		fcinfo->isnull = true;
	else if (type != VOIDOID)
		result = ik_from_text(type, values[0]);
	AtEOXact_GUC(true, level);
	return result;
}

static ArrayType *
result_to_texts(Oid type, Datum result)
{
	text	   *values[MaxTupleAttributeNumber];
	TupleDesc	desc = row_of(type);
	int			n = 1;

	values[0] = NULL;
	if (desc != NULL)
	{
		HeapTupleHeader header = DatumGetHeapTupleHeader(result);
		HeapTupleData tuple = {
			.t_len = HeapTupleHeaderGetDatumLength(header),
			.t_data = header
		};

		n = desc->natts;
		for (int i = 0; i < n; i++)
		{
			bool		isnull;
			Datum		value = heap_getattr(&tuple, i + 1, desc, &isnull);

			values[i] = isnull ? NULL :
				ik_response_text(TupleDescAttr(desc, i)->atttypid, value);
		}
	}
	else if (type != VOIDOID)
		values[0] = ik_response_text(type, result);
	return to_array(values, n);
}

static ArrayType *
to_array(text **values, int n)
{
	Datum	   *datums = palloc(n * sizeof(Datum));
	bool	   *nulls = palloc(n * sizeof(bool));
	int			lower = 1;

	for (int i = 0; i < n; i++)
	{
		datums[i] = PointerGetDatum(values[i]);
		nulls[i] = values[i] == NULL;
	}
	return construct_md_array(datums, nulls, 1, &n, &lower, TEXTOID, -1,
							  false, TYPALIGN_INT);
}

static text **
from_array(ArrayType *array, int *n)
{
	Datum	   *datums;
	bool	   *nulls;
	text	  **values;

	deconstruct_array(array, TEXTOID, -1, false, TYPALIGN_INT,
					  &datums, &nulls, n);
	values = palloc(*n * sizeof(text *));
	for (int i = 0; i < *n; i++)
		values[i] = nulls[i] ? NULL : DatumGetTextPP(datums[i]);
	return values;
}

static Oid
catalog(const char *name)
{
	return get_relname_relid(name, PG_CATALOG_NAMESPACE);
}

/* A column of one of Citus' catalogs. */
static Datum
column_of(Relation rel, HeapTuple tuple, const char *name)
{
	AttrNumber	column = get_attnum(RelationGetRelid(rel), name);
	bool		isnull = true;
	Datum		value = (Datum) 0;

	if (column != InvalidAttrNumber)
		value = heap_getattr(tuple, column, RelationGetDescr(rel), &isnull);
	if (isnull)
		elog(ERROR, "Citus' catalog \"%s\" has no \"%s\"",
			 RelationGetRelationName(rel), name);
	return value;
}

/* The callbacks mark, and neither free nor look anything up. */
static void
forget_relation(Datum arg, Oid relid)
{
	bool		concerned = !OidIsValid(relid) || relid == cluster.relids[0] ||
		relid == cluster.relids[1];

	for (int i = 0; i < lengthof(cluster.spreads) && !concerned; i++)
		concerned = relid == cluster.spreads[i].relid;
	if (concerned)
		forget();
}

static void
forget_name(Datum arg, int cacheid, uint32 hash)
{
	if (hash == 0 || hash == DatumGetUInt32(arg))
		forget();
}

static void
forget(void)
{
	cluster.known = false;
	cluster.stale = true;
	if (cluster.changed != NULL)
		cluster.changed();
}
