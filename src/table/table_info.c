/*-------------------------------------------------------------------------
 *
 * table_info.c
 *		What machines and versions need to know about a table.
 *
 * Read from the relation's triggers, columns and primary key, and cached by
 * relation.
 *
 * Anybody can put a trigger that calls our functions on a table of his own, by
 * hand, on a column of any type.  So nothing is taken from a trigger that is
 * not as we make them, and all triggers of its kind refuse to work beside it.
 *
 *-------------------------------------------------------------------------
 */
#include "table/table.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/nbtree.h"
#include "access/sysattr.h"
#include "catalog/pg_am.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "funcapi.h"
#include "nodes/makefuncs.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

/* the cache: from a relation to what was read */
typedef struct CachedTable
{
	Oid			relid;
	bool		valid;
	MemoryContext context;		/* holds info */
	TableInfo  *info;			/* NULL: none, or reading it failed */
} CachedTable;

const GuardNames ik_guard_names[] = {
	[GUARD_STATE] = {"guard_state", "machine", "IK_guard"},
	[GUARD_VERSION] = {"guard_version", "version", "IK_version"},
	[GUARD_FENCE] = {"guard_fence", "fence", "IK_fence"}
};

static HTAB *tables = NULL;
static long sweep_at = 64;		/* when there are so many, see make_room() */

static void make_room(void);
static void let_go(CachedTable *entry);
static TableInfo *read_table(Relation rel);
static void read_triggers(Relation rel, TableInfo *info);
static bool read_trigger(Relation rel, const Trigger *trigger,
						 GuardKind kind, TableInfo *info);
static bool read_state_guard(Relation rel, const Trigger *trigger,
							 TableInfo *info);
static bool is_guard_type(int16 type, GuardKind kind);
static void read_primary_key(Relation rel, TableInfo *info);
static void prepare_row_id(TableInfo *info);
static bool output_varies(Oid type);
static void forget_table(Datum arg, Oid relid);

/*
 * What we know about an open, locked relation.  Good until the end of the
 * transaction.
 */
const TableInfo *
ik_table_info(Relation rel)
{
	Oid			relid = RelationGetRelid(rel);
	CachedTable *entry;
	MemoryContext context;
	MemoryContext old;
	TableInfo  *info;
	bool		found;

	if (tables == NULL)
	{
		HASHCTL		ctl = {.keysize = sizeof(Oid),.entrysize = sizeof(CachedTable)};

		tables = hash_create("idempotency tables", 16, &ctl,
							 HASH_ELEM | HASH_BLOBS);
		CacheRegisterRelcacheCallback(forget_table, (Datum) 0);
	}

	/* nothing was invalidated since, and the reading had come to its end */
	entry = hash_search(tables, &relid, HASH_FIND, NULL);
	if (entry != NULL && entry->valid && entry->info != NULL)
		return entry->info;

	/* only what is new makes the table larger */
	if (entry == NULL)
		make_room();
	entry = hash_search(tables, &relid, HASH_ENTER, &found);
	if (!found)
		entry->context = NULL;
	let_go(entry);

	/* the caller's memory, so that an error frees it; the cache's at the end */
	context = AllocSetContextCreate(CurrentMemoryContext, "idempotency table",
									ALLOCSET_SMALL_SIZES);
	/* An invalidation that comes while we read must not be lost. */
	entry->valid = true;
	old = MemoryContextSwitchTo(context);
	info = read_table(rel);
	MemoryContextSwitchTo(old);

	MemoryContextSetParent(context, CacheMemoryContext);
	entry->context = context;
	entry->info = info;
	return info;
}

/*
 * Tables come and go.  When there are many, forget those that an invalidation
 * has hit since: among them all that were dropped.
 */
static void
make_room(void)
{
	HASH_SEQ_STATUS scan;
	CachedTable *entry;

	if (hash_get_num_entries(tables) < sweep_at)
		return;
	hash_seq_init(&scan, tables);
	while ((entry = hash_seq_search(&scan)) != NULL)
		if (!entry->valid)
		{
			let_go(entry);
			hash_search(tables, &entry->relid, HASH_REMOVE, NULL);
		}
	sweep_at = Max(64, 2 * hash_get_num_entries(tables));
}

/* Callers up the stack may still hold what was read. */
static void
let_go(CachedTable *entry)
{
	if (entry->context != NULL)
		MemoryContextSetParent(entry->context, TopTransactionContext);
	entry->context = NULL;
	entry->info = NULL;
}

/* The machine attached to a column, or NULL. */
const Guard *
ik_guard_of(const TableInfo *table, AttrNumber column)
{
	for (int i = 0; i < table->nguards; i++)
		if (table->guards[i].column == column)
			return &table->guards[i];
	return NULL;
}

/* The trigger function of a kind. */
Oid
ik_guard_function(GuardKind kind)
{
	return ik_trigger_function(ik_guard_names[kind].function);
}

/* 39P01 for a trigger that was made by hand; rel NULL: there is none. */
void
ik_refuse_trigger(GuardKind kind, Relation rel, const char *trigger)
{
	ereport(ERROR,
			(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
			 errmsg("function \"%s\" must be fired by a trigger that attach_%s() made",
					ik_guard_names[kind].function, ik_guard_names[kind].noun),
			 rel == NULL ? 0 :
			 errdetail("Trigger \"%s\" of \"%s\" is not as it makes them.",
					   trigger, RelationGetRelationName(rel)),
			 errhint("Drop the trigger, and call idempotency.attach_%s() in its place.",
					 ik_guard_names[kind].noun)));
}

/*
 * 39P01 if the table has a trigger of that kind which is not as we make them,
 * 0A000 for a partition that is a foreign table.
 */
void
ik_check_guards(Relation rel, const TableInfo *table, GuardKind kind)
{
	if (table->misfits[kind] == NULL)
		return;
	/* a partition that came after the attach has its triggers nevertheless */
	if (rel->rd_rel->relkind == RELKIND_FOREIGN_TABLE &&
		rel->rd_rel->relispartition)
		ik_refuse_foreign(rel);
	ik_refuse_trigger(kind, rel, table->misfits[kind]);
}

/*
 * For a trigger function: what we know about the table, after the same check.
 *
 * The trigger that fired need not be one of those: a statement keeps the
 * triggers that it began with while CREATE OR REPLACE TRIGGER gives the table
 * others.  So its event is looked at once more, and the caller takes no column
 * from it that is not one of the table's guarded ones.
 */
const TableInfo *
ik_fired_on(FunctionCallInfo fcinfo, GuardKind kind)
{
	TriggerData *trigdata = (TriggerData *) fcinfo->context;
	const TableInfo *table;

	if (!CALLED_AS_TRIGGER(fcinfo))
		ik_refuse_trigger(kind, NULL, NULL);
	ik_start_counting();
	table = ik_table_info(trigdata->tg_relation);
	ik_check_guards(trigdata->tg_relation, table, kind);
	if (!is_guard_type(trigdata->tg_trigger->tgtype, kind))
		ik_refuse_trigger(kind, trigdata->tg_relation,
						  trigdata->tg_trigger->tgname);
	return table;
}

/* 42P10 for a table without a primary key. */
void
ik_check_primary_key(Relation rel, const TableInfo *table)
{
	if (table->nkeys == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_COLUMN_REFERENCE),
				 errmsg("table \"%s\" has no primary key",
						RelationGetRelationName(rel)),
				 errhint("Add a primary key: rows are told apart by it.")));
}

/* Is a column what a version or a fence must be?  A domain is not. */
bool
ik_is_bigint(Relation rel, AttrNumber column)
{
	return TupleDescAttr(RelationGetDescr(rel), column - 1)->atttypid == INT8OID;
}

static TableInfo *
read_table(Relation rel)
{
	TableInfo  *info = palloc0(sizeof(TableInfo));

	if (rel->trigdesc != NULL)
		read_triggers(rel, info);
	read_primary_key(rel, info);
	if (info->nkeys > 0)
		prepare_row_id(info);
	return info;
}

/* The attached machines, the version column and the fences. */
static void
read_triggers(Relation rel, TableInfo *info)
{
	/* a look at a type may have the relation's own replaced */
	TriggerDesc *triggers = CopyTriggerDesc(rel->trigdesc);

	info->guards = palloc(triggers->numtriggers * sizeof(Guard));
	for (GuardKind kind = 0; kind < GUARD_KINDS; kind++)
	{
		Oid			function = ik_guard_function(kind);

		for (int i = 0; i < triggers->numtriggers; i++)
		{
			const Trigger *trigger = &triggers->triggers[i];

			if (trigger->tgfoid == function &&
				!read_trigger(rel, trigger, kind, info))
				info->misfits[kind] = pstrdup(trigger->tgname);
		}
	}
	FreeTriggerDesc(triggers);
}

/* Take in a trigger; false: it is not as we make them. */
static bool
read_trigger(Relation rel, const Trigger *trigger, GuardKind kind,
			 TableInfo *info)
{
	AttrNumber	column;
	Form_pg_attribute attr;

	if ((rel->rd_rel->relkind != RELKIND_RELATION &&
		 rel->rd_rel->relkind != RELKIND_PARTITIONED_TABLE) ||
		!is_guard_type(trigger->tgtype, kind) ||
		OidIsValid(trigger->tgconstraint) ||
		trigger->tgqual != NULL ||
		trigger->tgoldtable != NULL || trigger->tgnewtable != NULL ||
		trigger->tgnattr > 1)
		return false;
	if (trigger->tgnattr == 0)
		return trigger->tgnargs == 0;

	column = trigger->tgattr[0];
	if (column <= 0 || column > RelationGetNumberOfAttributes(rel))
		return false;
	attr = TupleDescAttr(RelationGetDescr(rel), column - 1);
	if (attr->attisdropped || attr->attgenerated)
		return false;
	if (kind == GUARD_STATE)
		return read_state_guard(rel, trigger, info);

	if (trigger->tgnargs != 0 || !ik_is_bigint(rel, column))
		return false;
	if (kind == GUARD_FENCE)
	{
		info->fences = bms_add_member(info->fences,
									  column - FirstLowInvalidHeapAttributeNumber);
		return true;
	}
	if (info->version != InvalidAttrNumber && info->version != column)
		return false;
	info->version = column;
	return true;
}

/* A state column's trigger: its arguments are the machine, and the history. */
static bool
read_state_guard(Relation rel, const Trigger *trigger, TableInfo *info)
{
	AttrNumber	column = trigger->tgattr[0];
	Form_pg_attribute attr = TupleDescAttr(RelationGetDescr(rel), column - 1);
	Guard	   *guard = &info->guards[info->nguards];

	if (trigger->tgnargs != 2)
		return false;
	guard->column = column;
	guard->kind = ik_state_kind(attr->atttypid, &guard->type);
	guard->history = trigger->tgtype == GUARD_AFTER_UPDATE;
	if (guard->kind == STATE_UNSUPPORTED ||
		ik_guard_of(info, column) != NULL ||
		strcmp(trigger->tgargs[1],
			   guard->history ? "history" : "no history") != 0 ||
		(OidIsValid(attr->attcollation) &&
		 !get_collation_isdeterministic(attr->attcollation)))
		return false;
	guard->machine = pstrdup(trigger->tgargs[0]);
	info->nguards++;
	return true;
}

/* A pg_trigger.tgtype: does attach_...() make such triggers? */
static bool
is_guard_type(int16 type, GuardKind kind)
{
	switch (type)
	{
		case GUARD_BEFORE_UPDATE:
			return true;
		case GUARD_AFTER_UPDATE:
		case GUARD_AFTER_INSERT:
		case GUARD_AFTER_INSERT_OR_DELETE:
			return kind == GUARD_STATE;
		default:
			return false;
	}
}

/* The primary key's columns, and the operator by which its index compares. */
static void
read_primary_key(Relation rel, TableInfo *info)
{
	List	   *indexes = RelationGetIndexList(rel);
	ListCell   *lc;

	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), AccessShareLock);

		if (index->rd_index->indisprimary &&
			index->rd_rel->relam == BTREE_AM_OID)
		{
			info->nkeys = index->rd_index->indnkeyatts;
			info->keys = palloc0(info->nkeys * sizeof(KeyColumn));
			for (int i = 0; i < info->nkeys; i++)
			{
				KeyColumn  *key = &info->keys[i];
				Oid			input;

				key->column = index->rd_index->indkey.values[i];
				key->type = getBaseType(TupleDescAttr(RelationGetDescr(rel),
													  key->column - 1)->atttypid);
				key->equality = get_opfamily_member(index->rd_opfamily[i],
													index->rd_opcintype[i],
													index->rd_opcintype[i],
													BTEqualStrategyNumber);
				if (!OidIsValid(key->equality))
					elog(ERROR, "missing operator %d(%u,%u) in opfamily %u",
						 BTEqualStrategyNumber, index->rd_opcintype[i],
						 index->rd_opcintype[i], index->rd_opfamily[i]);
				getTypeInputInfo(key->type, &input, &key->ioparam);
				fmgr_info_cxt(input, &key->input, CurrentMemoryContext);
			}
		}
		index_close(index, AccessShareLock);
	}
	list_free(indexes);
}

/*
 * A row's key as jsonb: the value itself, or for several columns an object.
 * The functions learn the types of their arguments from an expression.
 */
static void
prepare_row_id(TableInfo *info)
{
	Oid			function = info->nkeys == 1 ? F_TO_JSONB : F_JSONB_BUILD_OBJECT_ANY;
	List	   *args = NIL;

	for (int i = 0; i < info->nkeys; i++)
	{
		if (info->nkeys > 1)
			args = lappend(args, makeNullConst(TEXTOID, -1, InvalidOid));
		args = lappend(args, makeNullConst(info->keys[i].type, -1, InvalidOid));
		info->row_id_varies |= output_varies(info->keys[i].type);
	}
	fmgr_info_cxt(function, &info->row_id, CurrentMemoryContext);
	info->row_id.fn_expr = (Node *) makeFuncExpr(function, JSONBOID, args,
												 InvalidOid, InvalidOid,
												 COERCE_EXPLICIT_CALL);
}

/* May settings change how a value of the type reads?  No for the usual keys. */
static bool
output_varies(Oid type)
{
	switch (type)
	{
		case BOOLOID:
		case INT2OID:
		case INT4OID:
		case INT8OID:
		case NUMERICOID:
		case TEXTOID:
		case VARCHAROID:
		case BPCHAROID:
		case NAMEOID:
		case UUIDOID:
			return false;
		default:
			return !type_is_enum(type);
	}
}

/* Relcache callback: marks, and neither frees nor looks anything up. */
static void
forget_table(Datum arg, Oid relid)
{
	HASH_SEQ_STATUS status;
	CachedTable *entry;

	if (OidIsValid(relid))
	{
		entry = hash_search(tables, &relid, HASH_FIND, NULL);
		if (entry != NULL)
			entry->valid = false;
		return;
	}
	hash_seq_init(&status, tables);
	while ((entry = hash_seq_search(&status)) != NULL)
		entry->valid = false;
}
