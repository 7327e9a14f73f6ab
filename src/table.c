/*-------------------------------------------------------------------------
 *
 * table.c
 *		Our own tables, read and written without SQL.
 *
 * A row is looked up by its primary key in a scan with a dirty snapshot, and
 * written with table_tuple_insert and its index entries.  The dirty snapshot
 * shows what no MVCC snapshot can: the row of a rival that has not committed,
 * so that we can wait for it, and the row that was committed after our
 * statement began.  It also takes no predicate lock, so two different keys
 * never conflict under SERIALIZABLE.
 *
 * Writing past the executor is right only for a plain table: no triggers, row
 * security, checks.  So a table that is not as the install script made it is
 * refused (55000).  The verdict is kept until a relcache invalidation.
 *
 *-------------------------------------------------------------------------
 */
#include "idempotency.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/transam.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "nodes/execnodes.h"
#include "nodes/nodeFuncs.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"

/* one column that the code relies on */
typedef struct OwnColumn
{
	const char *name;
	Oid			type;
} OwnColumn;

/* one index that the code reads: a plain btree, ascending */
typedef struct OwnIndex
{
	bool		unique;
	int			nkeys;			/* of a primary key at most 2 */
	AttrNumber	key[4];
	bool		(*predicate) (Node *clause);	/* NULL: of all rows */
} OwnIndex;

struct OwnTable
{
	const char *name;
	const OwnColumn *columns;
	int			natts;
	const OwnIndex *indexes;	/* the primary key's first */
	int			nindexes;
	RegProcedure equal[2];		/* equality of the primary key's columns */
	bool		(*in_partial) (const Datum *values);	/* is the row in others? */
	bool		watched;		/* each change sends a relcache invalidation,
								 * by a trigger of ours if SQL makes it */

	/* found at first use, until a relcache invalidation */
	bool		valid;
	Oid			relid;
	Oid			found[MAX_OWN_INDEXES]; /* as indexes */
	bool		other_indexes;	/* has somebody added one? */
	uint64		changes;		/* such invalidations */
};

static const OwnColumn keys_columns[] = {
	{"created_at", TIMESTAMPTZOID},
	{"expires_at", TIMESTAMPTZOID},
	{"status", CHAROID},
	{"key", TEXTOID},
	{"scope", TEXTOID},
	{"response", TEXTOID},
	{"meta", JSONBOID},
	{"request", JSONBOID},
	{"fence", INT8OID},
	{"deadline", TIMESTAMPTZOID},
	{"attempt", INT4OID},
	{"checkpoint", TEXTOID},
	{"checkpoint_data", JSONBOID}
};

static bool is_leased(const Datum *values);
static bool says_leased(Node *clause);
static bool says_keyed(Node *clause);

static const OwnIndex keys_indexes[] = {
	{.unique = true,.nkeys = 2,.key = {4, 5}},
	[KEYS_LEASED] = {.nkeys = 1,.key = {10},.predicate = says_leased}
};

OwnTable	idempotency_keys = {
	.name = "keys",
	.columns = keys_columns,
	.natts = lengthof(keys_columns),
	.indexes = keys_indexes,
	.nindexes = lengthof(keys_indexes),
	.equal = {F_TEXTEQ, F_TEXTEQ},
	.in_partial = is_leased
};

static const OwnColumn token_keys_columns[] = {
	{"id", INT8OID},
	{"created_at", TIMESTAMPTZOID},
	{"rotated_at", TIMESTAMPTZOID},
	{"secret", BYTEAOID}
};

static const OwnIndex token_keys_indexes[] = {
	{.unique = true,.nkeys = 1,.key = {1}}
};

OwnTable	idempotency_token_keys = {
	.name = "token_keys",
	.columns = token_keys_columns,
	.natts = lengthof(token_keys_columns),
	.indexes = token_keys_indexes,
	.nindexes = lengthof(token_keys_indexes),
	.equal = {F_INT8EQ},
	.watched = true
};

static const OwnColumn used_tokens_columns[] = {
	{"expires_at", TIMESTAMPTZOID},
	{"marked_at", TIMESTAMPTZOID},
	{"id", UUIDOID},
	{"revoked", BOOLOID}
};

static const OwnIndex used_tokens_indexes[] = {
	{.unique = true,.nkeys = 1,.key = {3}}
};

OwnTable	idempotency_used_tokens = {
	.name = "used_tokens",
	.columns = used_tokens_columns,
	.natts = lengthof(used_tokens_columns),
	.indexes = used_tokens_indexes,
	.nindexes = lengthof(used_tokens_indexes),
	.equal = {F_UUID_EQ}
};

static const OwnColumn token_generations_columns[] = {
	{"generation", INT8OID},
	{"raised_at", TIMESTAMPTZOID},
	{"subject", TEXTOID},
	{"purpose", TEXTOID}
};

static const OwnIndex token_generations_indexes[] = {
	{.unique = true,.nkeys = 2,.key = {3, 4}}
};

OwnTable	idempotency_token_generations = {
	.name = "token_generations",
	.columns = token_generations_columns,
	.natts = lengthof(token_generations_columns),
	.indexes = token_generations_indexes,
	.nindexes = lengthof(token_generations_indexes),
	.equal = {F_TEXTEQ, F_TEXTEQ}
};

static const OwnColumn outbox_columns[] = {
	{"id", INT8OID},
	{"due", TIMESTAMPTZOID},
	{"emitted_at", TIMESTAMPTZOID},
	{"parked_at", TIMESTAMPTZOID},
	{"attempt", INT4OID},
	{"tries", INT4OID},
	{"state", CHAROID},
	{"topic", TEXTOID},
	{"key", TEXTOID},
	{"payload", JSONBOID},
	{"error", TEXTOID}
};

static const OwnIndex outbox_indexes[] = {
	{.unique = true,.nkeys = 1,.key = {1}},
	[OUTBOX_BY_DUE] = {.nkeys = 2,.key = {8, 2}},
	[OUTBOX_BY_KEY] = {.nkeys = 4,.key = {8, 9, 7, 1},.predicate = says_keyed}
};

OwnTable	idempotency_outbox = {
	.name = "outbox",
	.columns = outbox_columns,
	.natts = lengthof(outbox_columns),
	.indexes = outbox_indexes,
	.nindexes = lengthof(outbox_indexes),
	.equal = {F_INT8EQ}
};

static OwnTable *const own_tables[] = {
	&idempotency_keys,
	&idempotency_outbox,
	&idempotency_token_keys,
	&idempotency_used_tokens,
	&idempotency_token_generations
};

static void examine(OwnTable *table, Relation rel);
static bool is_plain(OwnTable *table, Relation rel);
static bool has_our_triggers(OwnTable *table, Relation rel);
static void examine_indexes(OwnTable *table, Relation rel);
static bool is_index(Relation index, const OwnIndex *what);
static bool is_built_in(Relation index, Relation rel);
static bool has_others_code(Node *node, void *context);
static bool is_others_function(Oid function, void *context);
static void forget_verdict(Datum arg, Oid relid);
pg_noreturn static void not_as_made(OwnTable *table);
static bool wrote_row(RowAccess *row);
static bool read_row(RowAccess *row, Snapshot snapshot);
static IndexScanDesc begin_scan(RowAccess *row, Snapshot snapshot);
static void look(RowAccess *row);
static HeapTupleHeader header(RowAccess *row);
static void write_index_entries(RowAccess *row, TupleTableSlot *slot,
								bool update, TU_UpdateIndexes update_indexes);
pg_noreturn static void lost_race(void);

/* Open one of our tables, as the install script made it; 55000 if it is not. */
Relation
idempotency_open_table(OwnTable *table, LOCKMODE lockmode)
{
	static bool callback_registered = false;

	if (!callback_registered)
	{
		CacheRegisterRelcacheCallback(forget_verdict, (Datum) 0);
		callback_registered = true;
	}

	/* getting the lock also takes in what happened to the table */
	if (table->valid)
	{
		LockRelationOid(table->relid, lockmode);
		if (table->valid)
			return relation_open(table->relid, NoLock);
		UnlockRelationOid(table->relid, lockmode);
	}

	for (;;)
	{
		Relation	rel = try_relation_open(idempotency_own_relation(table->name),
											lockmode);

		if (rel != NULL)		/* else it has just been dropped */
		{
			examine(table, rel);
			return rel;
		}
	}
}

/* An index of an open table that we read; 55000 if it is gone. */
Oid
idempotency_own_index(OwnTable *table, int which)
{
	if (!OidIsValid(table->found[which]))
		not_as_made(table);
	return table->found[which];
}

/*
 * How often was the table altered, or a watched one changed, as far as this
 * backend has heard?  While the count stays, what was read under it is right.
 */
uint64
idempotency_table_changes(const OwnTable *table)
{
	return table->changes;
}

/*
 * The work of a trigger function on a table of ours that is watched: have
 * every session read it anew.  Only on that table: on another one, a trigger
 * made by hand could do no more than be in the way (39P01).
 */
Datum
idempotency_announce_change(FunctionCallInfo fcinfo, const char *table)
{
	TriggerData *trigdata = (TriggerData *) fcinfo->context;

	if (!CALLED_AS_TRIGGER(fcinfo) ||
		!TRIGGER_FIRED_AFTER(trigdata->tg_event) ||
		RelationGetNamespace(trigdata->tg_relation) !=
		get_func_namespace(fcinfo->flinfo->fn_oid) ||
		strcmp(RelationGetRelationName(trigdata->tg_relation), table) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" must be fired by the triggers of table idempotency.%s",
						get_func_name(fcinfo->flinfo->fn_oid), table),
				 errhint("Drop the trigger: it is internal to the extension.")));
	CacheInvalidateRelcache(trigdata->tg_relation);
	return PointerGetDatum(NULL);
}

/*
 * Prepare to look at, wait for and write one row, by the columns of the
 * table's primary key in its order.  lock_hash names the lock that everybody
 * who changes this row holds.  Error: 55000 if the table was altered.
 */
void
idempotency_open_row(RowAccess *row, OwnTable *table, Datum key1, Datum key2,
					 uint64 lock_hash, LOCKMODE lockmode)
{
	row->table = table;
	row->rel = idempotency_open_table(table, lockmode);
	row->index = index_open(table->found[PRIMARY_KEY], lockmode);
	row->slot = table_slot_create(row->rel, NULL);
	row->key[0] = key1;
	row->key[1] = key2;
	row->state = ROW_ABSENT;
	row->rival = InvalidTransactionId;
	row->lock_hash = lock_hash;
	row->locked = false;
}

/* The slot goes; the lock stays, if it is held. */
void
idempotency_close_row(RowAccess *row)
{
	ExecDropSingleTupleTableSlot(row->slot);
	index_close(row->index, NoLock);
	table_close(row->rel, NoLock);
}

/*
 * Try the lock, and look whether or not it was got: a row that is there is
 * answered without waiting for anybody.  Only a caller who holds the lock
 * (row->locked) may act on ROW_ABSENT or change what was found.
 */
RowState
idempotency_try_row(RowAccess *row)
{
	if (!row->locked)
		row->locked = idempotency_try_lock(row->lock_hash);
	look(row);
	return row->state;
}

/* Look without the lock: good for an answer that is there, and no more. */
RowState
idempotency_look_at_row(RowAccess *row)
{
	look(row);
	return row->state;
}

/*
 * Wait for what stood in the way: the rival who is writing the row, or else
 * the holder of the lock.  The caller then tries again.  False: give_up came
 * first.
 */
bool
idempotency_wait_for_row(RowAccess *row, TimestampTz give_up)
{
	if (TransactionIdIsValid(row->rival))
	{
		/* never with the lock in hand: the rival may ask for it next */
		idempotency_unlock_row(row);
		return idempotency_wait_for_xact(row->rival, give_up);
	}
	row->locked = idempotency_wait_for_lock(row->lock_hash, give_up);
	return row->locked;
}

/* Give the lock back, if it is held. */
void
idempotency_unlock_row(RowAccess *row)
{
	if (row->locked)
		idempotency_unlock(row->lock_hash);
	row->locked = false;
}

/*
 * Look without lock or wait at what the transaction may see: the rows of its
 * snapshot and its own.  For lookups, and for a standby, where an uncommitted
 * row is absent.
 *
 * A writer judges what is newest, so under REPEATABLE READ it may have written
 * over a version that its snapshot does not show.  That snapshot still shows
 * the version before; what we wrote is what counts.
 */
bool
idempotency_read_row(RowAccess *row)
{
	return read_row(row, IsolationUsesXactSnapshot() && wrote_row(row) ?
					SnapshotSelf : GetTransactionSnapshot());
}

/* The same of what is committed by now, whatever the isolation level. */
bool
idempotency_read_newest_row(RowAccess *row)
{
	return read_row(row, GetLatestSnapshot());
}

/* The open transaction that is writing the row, ours included, or none. */
TransactionId
idempotency_row_writer(RowAccess *row)
{
	look(row);
	if (row->state == ROW_RIVAL)
		return row->rival;
	if (row->state == ROW_FOUND && idempotency_row_is_ours(row))
		return HeapTupleHeaderGetXmin(header(row));
	return InvalidTransactionId;
}

/* Was the row that was found written by this transaction? */
bool
idempotency_row_is_ours(RowAccess *row)
{
	return TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(header(row)));
}

/*
 * Under REPEATABLE READ and above, a row that was committed after the
 * transaction's snapshot is a lost race (40001), as for ON CONFLICT.
 */
void
idempotency_check_row_visible(RowAccess *row)
{
	if (IsolationUsesXactSnapshot() &&
		!idempotency_row_is_ours(row) &&
		!table_tuple_satisfies_snapshot(row->rel, row->slot,
										GetTransactionSnapshot()))
		lost_race();
}

/* Insert the row.  Error: 40001 if a rival whom no lock showed was first. */
void
idempotency_insert_row(RowAccess *row, Datum *values, bool *nulls)
{
	TupleTableSlot *slot = row->slot;

	ExecClearTuple(slot);
	memcpy(slot->tts_values, values, row->table->natts * sizeof(Datum));
	memcpy(slot->tts_isnull, nulls, row->table->natts * sizeof(bool));
	for (int i = row->table->natts; i < slot->tts_tupleDescriptor->natts; i++)
		slot->tts_isnull[i] = true;
	ExecStoreVirtualTuple(slot);

	table_tuple_insert(row->rel, slot, GetCurrentCommandId(true), 0, NULL);
	write_index_entries(row, slot, false, TU_None);

	/* or a second call in the same statement could not change it */
	CommandCounterIncrement();
}

/*
 * Write a new version of the row that was found; columns of other makers stay.
 * Error: 40001 if a rival whom no lock showed was first.
 */
void
idempotency_update_row(RowAccess *row, Datum *values, bool *nulls)
{
	TupleTableSlot *slot = MakeSingleTupleTableSlot(RelationGetDescr(row->rel),
													&TTSOpsVirtual);
	TM_FailureData failure;
	LockTupleMode lockmode;
	TU_UpdateIndexes update_indexes;

	CheckCmdReplicaIdentity(row->rel, CMD_UPDATE);

	slot_getallattrs(row->slot);
	memcpy(slot->tts_values, row->slot->tts_values,
		   slot->tts_tupleDescriptor->natts * sizeof(Datum));
	memcpy(slot->tts_isnull, row->slot->tts_isnull,
		   slot->tts_tupleDescriptor->natts * sizeof(bool));
	memcpy(slot->tts_values, values, row->table->natts * sizeof(Datum));
	memcpy(slot->tts_isnull, nulls, row->table->natts * sizeof(bool));
	ExecStoreVirtualTuple(slot);

	if (compat_tuple_update(row->rel, &row->slot->tts_tid, slot,
							GetCurrentCommandId(true), true, &failure, &lockmode,
							&update_indexes) != TM_Ok)
		lost_race();
	if (update_indexes != TU_None)
		write_index_entries(row, slot, true, update_indexes);
	ExecDropSingleTupleTableSlot(slot);

	CommandCounterIncrement();
}

/* Delete the row that was found.  Error: 40001 as above. */
void
idempotency_delete_row(RowAccess *row)
{
	TM_FailureData failure;

	CheckCmdReplicaIdentity(row->rel, CMD_DELETE);
	if (compat_tuple_delete(row->rel, &row->slot->tts_tid,
							GetCurrentCommandId(true), true,
							&failure) != TM_Ok)
		lost_race();
	CommandCounterIncrement();
}

/*
 * Is the table as the install script made it?  55000 if not.  The caller's lock
 * makes the answer good for this call.  It is kept only if no invalidation came
 * in while we opened the indexes: one of them may be of an index that we have
 * not seen.
 */
static void
examine(OwnTable *table, Relation rel)
{
	uint64		changes;

	table->relid = RelationGetRelid(rel);
	changes = table->changes;
	if (!is_plain(table, rel))
		not_as_made(table);
	examine_indexes(table, rel);
	if (!OidIsValid(table->found[PRIMARY_KEY]))
		not_as_made(table);
	table->valid = table->changes == changes;
}

static bool
has_our_triggers(OwnTable *table, Relation rel)
{
	TriggerDesc *triggers = rel->trigdesc;

	if (!table->watched)
		return triggers == NULL;
	return triggers != NULL && triggers->numtriggers == 1 &&
		idempotency_is_ours(ProcedureRelationId, triggers->triggers[0].tgfoid);
}

static bool
is_plain(OwnTable *table, Relation rel)
{
	TupleDesc	desc = RelationGetDescr(rel);

	if (rel->rd_rel->relkind != RELKIND_RELATION ||
		rel->rd_rel->relam != HEAP_TABLE_AM_OID ||
		rel->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT ||
		!has_our_triggers(table, rel) ||
		rel->rd_rules != NULL ||
		rel->rd_rel->relrowsecurity ||
		rel->rd_rel->relispartition ||
		rel->rd_rel->relchecks > 0 ||
		desc->natts < table->natts)
		return false;

	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);

		if (i < table->natts)
		{
			if (att->attisdropped ||
				att->atttypid != table->columns[i].type ||
				strcmp(NameStr(att->attname), table->columns[i].name) != 0)
				return false;
		}
		else if (!att->attisdropped &&
				 (att->attnotnull || att->atthasdef ||
				  get_typtype(att->atttypid) == TYPTYPE_DOMAIN))
			return false;		/* we would write NULL */
	}
	return true;
}

/*
 * Find the indexes that we read, by what they are, and whether there are more.
 * Every index must be free of others' code.
 */
static void
examine_indexes(OwnTable *table, Relation rel)
{
	List	   *indexes = RelationGetIndexList(rel);
	ListCell   *lc;

	memset(table->found, 0, sizeof(table->found));
	table->other_indexes = false;
	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), AccessShareLock);
		int			i = 0;

		if (!is_built_in(index, rel))
			not_as_made(table);
		while (i < table->nindexes &&
			   (OidIsValid(table->found[i]) ||
				!is_index(index, &table->indexes[i])))
			i++;
		if (i < table->nindexes)
			table->found[i] = RelationGetRelid(index);

		/* columns that it only includes are not in a RowAccess's key */
		if (i == table->nindexes || index->rd_index->indnatts > table->indexes[i].nkeys)
			table->other_indexes = true;
		index_close(index, AccessShareLock);
	}
	list_free(indexes);
}

static bool
is_index(Relation index, const OwnIndex *what)
{
	Form_pg_index form = index->rd_index;
	List	   *predicate = RelationGetIndexPredicate(index);

	if (!form->indisvalid || !form->indisready || !form->indimmediate ||
		(what->unique && !form->indisunique) ||
		form->indnkeyatts != what->nkeys ||
		index->rd_rel->relam != BTREE_AM_OID)
		return false;
	for (int i = 0; i < what->nkeys; i++)
		if (form->indkey.values[i] != what->key[i] ||
			index->rd_indoption[i] != 0 ||
			(OidIsValid(index->rd_indcollation[i]) &&
			 index->rd_indcollation[i] != C_COLLATION_OID))
			return false;
	return what->predicate == NULL ? predicate == NIL :
		list_length(predicate) == 1 && what->predicate(linitial(predicate));
}

/*
 * Whose code can run when a row is indexed?  What an index calls runs as our
 * caller: as whoever claims a key, or as the superuser whose worker purges.
 * So it is PostgreSQL's alone: operator classes, types, and every function in
 * an expression or a predicate.
 */
static bool
is_built_in(Relation index, Relation rel)
{
	for (int i = 0; i < index->rd_index->indnatts; i++)
	{
		AttrNumber	column = index->rd_index->indkey.values[i];

		if (i < index->rd_index->indnkeyatts &&
			index->rd_opfamily[i] >= FirstNormalObjectId)
			return false;
		if (column != InvalidAttrNumber &&
			TupleDescAttr(RelationGetDescr(rel), column - 1)->atttypid >= FirstNormalObjectId)
			return false;
	}
	return index->rd_rel->relam < FirstNormalObjectId &&
		!has_others_code((Node *) RelationGetIndexExpressions(index), NULL) &&
		!has_others_code((Node *) RelationGetIndexPredicate(index), NULL);
}

static bool
has_others_code(Node *node, void *context)
{
	if (node == NULL)
		return false;
	if (!IsA(node, List) &&
		(exprType(node) >= FirstNormalObjectId ||
		 check_functions_in_node(node, is_others_function, NULL)))
		return true;
	return expression_tree_walker(node, has_others_code, context);
}

static bool
is_others_function(Oid function, void *context)
{
	return function >= FirstNormalObjectId;
}

/* status = 'l' */
static bool
says_leased(Node *clause)
{
	OpExpr	   *op = (OpExpr *) clause;
	Var		   *var;
	Const	   *value;

	if (!IsA(op, OpExpr) || op->opfuncid != F_CHAREQ)
		return false;
	var = linitial(op->args);
	value = lsecond(op->args);
	return IsA(var, Var) && var->varattno == 3 &&
		IsA(value, Const) && !value->constisnull &&
		DatumGetChar(value->constvalue) == STATUS_LEASED;
}

/* key IS NOT NULL */
static bool
says_keyed(Node *clause)
{
	NullTest   *test = (NullTest *) clause;

	return IsA(test, NullTest) && test->nulltesttype == IS_NOT_NULL &&
		IsA(test->arg, Var) && ((Var *) test->arg)->varattno == 9;
}

static bool
is_leased(const Datum *values)
{
	return DatumGetChar(values[2]) == STATUS_LEASED;
}

/* Relcache callback: marks, and neither frees nor looks anything up. */
static void
forget_verdict(Datum arg, Oid relid)
{
	for (int i = 0; i < lengthof(own_tables); i++)
	{
		OwnTable   *table = own_tables[i];
		bool		concerned = !OidIsValid(relid) || table->relid == relid;

		for (int n = 0; n < table->nindexes && !concerned; n++)
			concerned = table->found[n] == relid;
		if (concerned)
		{
			table->valid = false;
			table->changes++;
		}
	}
}

static void
not_as_made(OwnTable *table)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("table idempotency.%s is not as the extension made it",
					table->name),
			 errhint("Remove what was added to the table (triggers, rules, row security, checks, partitions, columns that are NOT NULL, have a default or are of a domain, indexes with functions, operator classes or types that are not built in) and restore its own indexes, or create the extension again.")));
}

/* Did this transaction write or delete a version of the row? */
static bool
wrote_row(RowAccess *row)
{
	IndexScanDesc scan;
	bool		ours = false;

	if (!TransactionIdIsValid(GetTopTransactionIdIfAny()))
		return false;

	scan = begin_scan(row, SnapshotAny);
	while (!ours && index_getnext_slot(scan, ForwardScanDirection, row->slot))
	{
		HeapTupleHeader tuple = header(row);

		ours = idempotency_row_is_ours(row) ||
			(!(tuple->t_infomask & HEAP_XMAX_INVALID) &&
			 !HEAP_XMAX_IS_LOCKED_ONLY(tuple->t_infomask) &&
			 TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetUpdateXid(tuple)));
	}
	index_endscan(scan);
	return ours;
}

static bool
read_row(RowAccess *row, Snapshot snapshot)
{
	IndexScanDesc scan;
	bool		found = false;

	if (IsMVCCSnapshot(snapshot))
		snapshot = RegisterSnapshot(snapshot);
	scan = begin_scan(row, SnapshotAny);

	/* SnapshotAny and a check of our own, since that takes no predicate lock */
	while (!found && index_getnext_slot(scan, ForwardScanDirection, row->slot))
		found = table_tuple_satisfies_snapshot(row->rel, row->slot, snapshot);

	index_endscan(scan);
	if (IsMVCCSnapshot(snapshot))
		UnregisterSnapshot(snapshot);
	return found;
}

static IndexScanDesc
begin_scan(RowAccess *row, Snapshot snapshot)
{
	OwnTable   *table = row->table;
	int			nkeys = table->indexes[PRIMARY_KEY].nkeys;
	ScanKeyData keys[2];
	IndexScanDesc scan;

	for (int i = 0; i < nkeys; i++)
		ScanKeyEntryInitialize(&keys[i], 0, i + 1, BTEqualStrategyNumber,
							   InvalidOid, row->index->rd_indcollation[i],
							   table->equal[i], row->key[i]);
	scan = compat_index_beginscan(row->rel, row->index, snapshot, nkeys);
	index_rescan(scan, keys, nkeys, NULL, 0);
	return scan;
}

/* What is there under this key now, committed or not? */
static void
look(RowAccess *row)
{
	SnapshotData dirty;
	IndexScanDesc scan;

	InitDirtySnapshot(dirty);
	row->state = ROW_ABSENT;
	row->rival = InvalidTransactionId;

	/* the first version that is not dead tells, HOT chains included */
	scan = begin_scan(row, &dirty);
	if (index_getnext_slot(scan, ForwardScanDirection, row->slot))
	{
		row->rival = TransactionIdIsValid(dirty.xmin) ? dirty.xmin : dirty.xmax;
		row->state = TransactionIdIsValid(row->rival) ? ROW_RIVAL : ROW_FOUND;
	}
	index_endscan(scan);
}

static HeapTupleHeader
header(RowAccess *row)
{
	return ExecFetchSlotHeapTuple(row->slot, false, NULL)->t_data;
}

/*
 * Maintain every index of the table, whoever made it; most rows go into that
 * of the primary key alone.  The unique check is the last word, and it should
 * have nothing to say: whoever writes a row has looked under the lock.
 */
static void
write_index_entries(RowAccess *row, TupleTableSlot *slot, bool update,
					TU_UpdateIndexes update_indexes)
{
	OwnTable   *table = row->table;
	bool		conflict = false;

	if (table->other_indexes ||
		(table->in_partial && table->in_partial(slot->tts_values)))
	{
		EState	   *estate = CreateExecutorState();
		ResultRelInfo *result_rel = makeNode(ResultRelInfo);

		InitResultRelInfo(result_rel, row->rel, 0, NULL, 0);
		ExecOpenIndices(result_rel, false);
		compat_insert_index_tuples(result_rel, slot, estate, update, &conflict,
								   update_indexes);
		ExecCloseIndices(result_rel);
		FreeExecutorState(estate);
	}
	else
	{
		bool		nulls[lengthof(row->key)] = {0};

		conflict = !index_insert(row->index, row->key, nulls, &slot->tts_tid,
								 row->rel, UNIQUE_CHECK_PARTIAL, update,
								 makeNode(IndexInfo));
	}
	if (conflict)
		lost_race();
}

/* Without DETAIL, which would show the key. */
static void
lost_race(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			 errmsg("could not serialize access due to a concurrent change of the same key"),
			 errhint("The transaction might succeed if retried.")));
}
