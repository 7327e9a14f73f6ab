/*-------------------------------------------------------------------------
 *
 * moving.c
 *		Rows on their way from one partition to another.
 *
 * An UPDATE that moves a row to another partition fires DELETE there and INSERT
 * here.  The INSERT must be known for what it is, or the row would have to
 * begin anew, in an initial state.  PostgreSQL does not say so: a trigger sees
 * an INSERT like any other, in the same command.
 *
 * The DELETE can be told, by a mark on the row; the INSERT is the next one of
 * the command, unless a BEFORE INSERT trigger swallowed the row: then it is
 * that of another row, if the same statement also inserts (by a WITH).  So
 * where a partition has such a trigger, a row that arrives must have kept its
 * primary key, apart from the columns by which it was led elsewhere; one that
 * has not, or has no others, is judged as a new one.
 *
 *-------------------------------------------------------------------------
 */
#include "machine/machine.h"

#include "access/htup_details.h"
#include "access/sysattr.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/partition.h"
#include "catalog/pg_inherits.h"
#include "commands/trigger.h"
#include "utils/datum.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

/* a row on its way, between the two triggers; in a context of its own */
typedef struct MovingRow
{
	MemoryContext context;
	Oid			root;			/* of the partitioned table */
	Oid			partition;		/* that it left */
	char	   *column;			/* whose state it is */
	SubTransactionId subxact;
	CommandId	command;
	NameRef		state;			/* that it left with */
	int			nkeys;			/* its primary key */
	Datum	   *keys;
	struct MovingRow *next;
} MovingRow;

static void forget_moving_rows(void *arg);

/* below TopTransactionContext; forgotten when that is reset */
static MovingRow *moving_rows = NULL;
static MemoryContextCallback moving_rows_reset =
{
	.func = forget_moving_rows
};
static bool moving_rows_known = false;	/* is the callback registered? */

static List *ancestors_of(Oid partition);
static bool kept_key(const MovingRow *row, Relation rel,
					 const TableInfo *table, TupleTableSlot *slot);
static bool is_fixed(Relation rel, AttrNumber column, List *ancestors);
static bool may_swallow(Oid root);
static HeapTupleHeader header_of(TupleTableSlot *slot);

/* DELETE in a partition: if the row moves, keep its state for the INSERT. */
void
ik_remember_moving_row(TriggerData *trigdata, const TableInfo *table,
					   const Guard *guard)
{
	Relation	rel = trigdata->tg_relation;
	TupleTableSlot *slot = trigdata->tg_trigslot;
	HeapTupleHeader header = header_of(slot);
	MemoryContext context;
	MemoryContext old;
	NameRef		state;
	MovingRow  *row;

	/* not a move to another partition */
	if (!HeapTupleHeaderIndicatesMovedPartitions(header))
		return;

	if (!moving_rows_known)
		MemoryContextRegisterResetCallback(TopTransactionContext,
										   &moving_rows_reset);
	moving_rows_known = true;

	context = AllocSetContextCreate(CurrentMemoryContext,
									"idempotency moving row",
									ALLOCSET_SMALL_SIZES);
	old = MemoryContextSwitchTo(context);
	row = palloc(sizeof(MovingRow));
	row->context = context;
	row->root = llast_oid(ancestors_of(RelationGetRelid(rel)));
	row->partition = RelationGetRelid(rel);
	row->column = pstrdup(ik_state_column(rel, guard));
	row->subxact = GetCurrentSubTransactionId();
	row->command = HeapTupleHeaderGetCmax(header);
	state = ik_slot_state(guard, slot);
	row->state.len = state.len;
	row->state.data = state.data ? pnstrdup(state.data, state.len) : NULL;
	row->nkeys = table->nkeys;
	row->keys = palloc(table->nkeys * sizeof(Datum));
	for (int i = 0; i < table->nkeys; i++)
	{
		AttrNumber	column = table->keys[i].column;
		Form_pg_attribute attr = TupleDescAttr(RelationGetDescr(rel), column - 1);
		bool		isnull;
		Datum		value = slot_getattr(slot, column, &isnull);

		Assert(!isnull);
		row->keys[i] = datumCopy(value, attr->attbyval, attr->attlen);
	}
	MemoryContextSwitchTo(old);

	/* complete: from here on it lasts as long as the transaction */
	MemoryContextSetParent(context, TopTransactionContext);
	row->next = moving_rows;
	moving_rows = row;
}

/* INSERT in a partition: did the row come from another one?  With what state? */
bool
ik_take_moving_row(TriggerData *trigdata, const TableInfo *table,
				   const Guard *guard, NameRef *from)
{
	Relation	rel = trigdata->tg_relation;
	TupleTableSlot *slot = trigdata->tg_trigslot;
	MovingRow **found = NULL;
	MovingRow  *row;
	bool		certain = false;
	CommandId	command;
	Oid			root;

	if (moving_rows == NULL || !rel->rd_rel->relispartition)
		return false;
	command = HeapTupleHeaderGetCmin(header_of(slot));
	root = llast_oid(ancestors_of(RelationGetRelid(rel)));
	for (MovingRow **link = &moving_rows; *link != NULL && !certain; link = &(*link)->next)
	{
		row = *link;
		if (row->root != root || row->command != command ||
			row->partition == RelationGetRelid(rel) ||
			row->subxact != GetCurrentSubTransactionId() ||
			strcmp(row->column, ik_state_column(rel, guard)) != 0)
			continue;
		certain = kept_key(row, rel, table, slot);
		if (certain || found == NULL)
			found = link;
	}
	if (found == NULL || (!certain && may_swallow(root)))
		return false;

	row = *found;
	*found = row->next;
	*from = row->state;
	if (from->data != NULL)
		from->data = pnstrdup(from->data, from->len);
	MemoryContextDelete(row->context);
	return true;
}

/*
 * The tables above a partition, the topmost one last.  They have it also while
 * DETACH ... CONCURRENTLY waits (see ik_root_of()): a snapshot from before leads
 * rows there, and away from it.
 */
static List *
ancestors_of(Oid partition)
{
	List	   *ancestors = NIL;

	for (Oid relid = partition; get_rel_relispartition(relid);
		 ancestors = lappend_oid(ancestors, relid))
		relid = get_partition_parent(relid, true);
	return ancestors;
}

/* Does the row have the key of the one that left, as far as that is fixed? */
static bool
kept_key(const MovingRow *row, Relation rel, const TableInfo *table,
		 TupleTableSlot *slot)
{
	List	   *left = ancestors_of(row->partition);
	List	   *here = ancestors_of(RelationGetRelid(rel));
	List	   *common = list_difference_oid(here, list_difference_oid(here, left));
	bool		any = false;

	if (row->nkeys != table->nkeys)
		return false;
	for (int i = 0; i < table->nkeys; i++)
	{
		AttrNumber	column = table->keys[i].column;
		Form_pg_attribute attr = TupleDescAttr(RelationGetDescr(rel), column - 1);
		bool		isnull;
		Datum		value;

		if (!is_fixed(rel, column, common))
			continue;
		value = slot_getattr(slot, column, &isnull);
		if (isnull || !datum_image_eq(value, row->keys[i],
									  attr->attbyval, attr->attlen))
			return false;
		any = true;
	}
	return any;
}

/* Is none of these tables partitioned by the column? */
static bool
is_fixed(Relation rel, AttrNumber column, List *ancestors)
{
	char	   *name = get_attname(RelationGetRelid(rel), column, false);
	bool		fixed = true;
	ListCell   *lc;

	foreach(lc, ancestors)
	{
		Relation	ancestor = table_open(lfirst_oid(lc), AccessShareLock);
		AttrNumber	there = get_attnum(RelationGetRelid(ancestor), name);
		Bitmapset  *columns = bms_make_singleton(there - FirstLowInvalidHeapAttributeNumber);

		if (has_partition_attrs(ancestor, columns, NULL))
			fixed = false;
		table_close(ancestor, NoLock);
	}
	return fixed;
}

/* Has any partition a BEFORE INSERT trigger? */
static bool
may_swallow(Oid root)
{
	List	   *partitions = find_all_inheritors(root, AccessShareLock, NULL);
	bool		may = false;
	ListCell   *lc;

	foreach(lc, partitions)
	{
		Relation	rel = table_open(lfirst_oid(lc), NoLock);

		if (rel->trigdesc != NULL && rel->trigdesc->trig_insert_before_row)
			may = true;
		table_close(rel, NoLock);
	}
	return may;
}

static void
forget_moving_rows(void *arg)
{
	moving_rows = NULL;
	moving_rows_known = false;
}

static HeapTupleHeader
header_of(TupleTableSlot *slot)
{
	bool		should_free;

	return ExecFetchSlotHeapTuple(slot, false, &should_free)->t_data;
}
