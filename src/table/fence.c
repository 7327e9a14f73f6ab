/*-------------------------------------------------------------------------
 *
 * fence.c
 *		A fence on the resource: no UPDATE by a holder who was superseded.
 *
 * Two triggers, both BEFORE UPDATE:
 *
 *		UPDATE OF fence ... guard_fence()
 *				its column list tells the fence column; refuses NULL, and a
 *				fence lower than the row's
 *		UPDATE ... guard_fence()
 *				refuses an UPDATE that does not assign the column, unless a
 *				foreign key runs it
 *
 * The column list follows a renamed column through dump and restore, which an
 * argument with its name would not.
 *
 *-------------------------------------------------------------------------
 */
#include "table/table.h"

#include "access/sysattr.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "utils/rel.h"

PG_FUNCTION_INFO_V1(idempotency_attach_fence);
PG_FUNCTION_INFO_V1(idempotency_detach_fence);
PG_FUNCTION_INFO_V1(idempotency_guard_fence);

static void check_fence(TriggerData *trigdata, AttrNumber column);
static void check_assigned(TriggerData *trigdata, const TableInfo *table);
static bool is_foreign_keys_own(TriggerData *trigdata);

/* attach_fence(rel, fence_column): have every UPDATE assign this column. */
Datum
idempotency_attach_fence(PG_FUNCTION_ARGS)
{
	AttrNumber	column;
	Relation	rel = ik_open_owned(fcinfo, ShareRowExclusiveLock, &column);

	ik_check_attachable(rel, column, GUARD_FENCE);
	ik_check_bigint(rel, column);
	return ik_attach(rel, column, GUARD_FENCE, GUARD_BEFORE_UPDATE, "");
}

Datum
idempotency_detach_fence(PG_FUNCTION_ARGS)
{
	return ik_detach(fcinfo, GUARD_FENCE);
}

/* The trigger function; see the head of this file. */
Datum
idempotency_guard_fence(PG_FUNCTION_ARGS)
{
	const TableInfo *table = ik_fired_on(fcinfo, GUARD_FENCE);
	TriggerData *trigdata = (TriggerData *) fcinfo->context;
	const Trigger *trigger = trigdata->tg_trigger;

	if (trigger->tgnattr == 0)
		check_assigned(trigdata, table);
	else if (bms_is_member(trigger->tgattr[0] - FirstLowInvalidHeapAttributeNumber,
						   table->fences))
		check_fence(trigdata, trigger->tgattr[0]);
	else
		ik_refuse_trigger(GUARD_FENCE, trigdata->tg_relation,
						  trigger->tgname);
	return PointerGetDatum(trigdata->tg_newtuple);
}

/* IK002 for a fence that is NULL or lower than the row's. */
static void
check_fence(TriggerData *trigdata, AttrNumber column)
{
	bool		new_null;
	bool		old_null;
	Datum		new = slot_getattr(trigdata->tg_newslot, column, &new_null);
	Datum		old = slot_getattr(trigdata->tg_trigslot, column, &old_null);

	if (new_null)
		ereport(ERROR,
				(errcode(ERRCODE_STALE_FENCE),
				 errmsg("fence must not be null"),
				 errhint("Set the fence column to the fence that lease() or acquire_lock() returned."),
				 errtablecol(trigdata->tg_relation, column)));
	if (!old_null && DatumGetInt64(new) < DatumGetInt64(old))
		ereport(ERROR,
				(errcode(ERRCODE_STALE_FENCE),
				 errmsg("fence has been superseded"),
				 errdetail("The row was written with a higher fence since."),
				 errhint("Roll back: somebody else holds the lease or the lock."),
				 errtablecol(trigdata->tg_relation, column)));
}

/* IK002 for an UPDATE that does not assign every fence of the table. */
static void
check_assigned(TriggerData *trigdata, const TableInfo *table)
{
	Bitmapset  *unassigned;

	if (bms_is_subset(table->fences, trigdata->tg_updatedcols) ||
		is_foreign_keys_own(trigdata))
		return;
	unassigned = bms_difference(table->fences, trigdata->tg_updatedcols);
	ereport(ERROR,
			(errcode(ERRCODE_STALE_FENCE),
			 errmsg("update does not assign the fence"),
			 errhint("Set the fence column to the fence that lease() or acquire_lock() returned."),
			 errtablecol(trigdata->tg_relation,
						 bms_next_member(unassigned, -1) + FirstLowInvalidHeapAttributeNumber)));
}

/*
 * Is it a foreign key's own UPDATE, as of ON DELETE SET NULL?  That is no work
 * on the resource: a session that deletes the row which is referred to needs no
 * fence.  Only PostgreSQL's foreign keys set this flag.  The table's triggers
 * run under it too, so the UPDATE must set no more than a foreign key's columns.
 */
static bool
is_foreign_keys_own(TriggerData *trigdata)
{
	Relation	rel = trigdata->tg_relation;
	ListCell   *lc;

	if (!InNoForceRLSOperation())
		return false;
	foreach(lc, RelationGetFKeyList(rel))
	{
		ForeignKeyCacheInfo *constraint = lfirst(lc);
		Bitmapset  *others = bms_copy(trigdata->tg_updatedcols);
		int			i;

		for (i = 0; i < constraint->nkeys; i++)
			others = bms_del_member(others,
									constraint->conkey[i] - FirstLowInvalidHeapAttributeNumber);
		/* what is generated from them is updated, too */
		for (i = 0; i < RelationGetNumberOfAttributes(rel); i++)
			if (TupleDescAttr(RelationGetDescr(rel), i)->attgenerated)
				others = bms_del_member(others,
										i + 1 - FirstLowInvalidHeapAttributeNumber);
		if (bms_is_empty(others))
			return true;
	}
	return false;
}
