/*-------------------------------------------------------------------------
 *
 * version.c
 *		Versions: optimistic locking on a column of the caller's own table.
 *
 * Two triggers, both BEFORE UPDATE, since the second changes the row:
 *
 *		UPDATE OF version ... guard_version()
 *				its column list tells the version column; refuses a version
 *				that is neither the old one nor the next
 *		UPDATE ... guard_version()
 *				sets the next one, also where the UPDATE named it
 *
 * Their names make them fire last, so that no other trigger has the last word.
 *
 *-------------------------------------------------------------------------
 */
#include "table/table.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "common/int.h"
#include "utils/lsyscache.h"

PG_FUNCTION_INFO_V1(idempotency_attach_version);
PG_FUNCTION_INFO_V1(idempotency_detach_version);
PG_FUNCTION_INFO_V1(idempotency_guard_version);
PG_FUNCTION_INFO_V1(idempotency_update_if);

static int64 old_version(TriggerData *trigdata, AttrNumber column);
static int64 next_version(int64 version);
static bool is_expected(const GuardedUpdate *update);
static UpdateOutcome conflict(GuardedUpdate *update);

static const UpdateHooks version_hooks = {
	.kind = GUARD_VERSION,
	.is_expected = is_expected,
	.decide = conflict
};

/* attach_version(rel, version_column): count the updates of each row. */
Datum
idempotency_attach_version(PG_FUNCTION_ARGS)
{
	AttrNumber	column;
	Relation	rel = ik_open_owned(fcinfo, ShareRowExclusiveLock, &column);
	Form_pg_attribute attr = TupleDescAttr(RelationGetDescr(rel), column - 1);
	AttrNumber	attached;

	ik_check_attachable(rel, column, GUARD_VERSION);
	ik_check_bigint(rel, column);
	if (!attr->attnotnull)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_TABLE_DEFINITION),
				 errmsg("column \"%s\" may be null", NameStr(attr->attname)),
				 errhint("Make the version column NOT NULL DEFAULT 1.")));
	attached = ik_table_info(rel)->version;
	if (attached != InvalidAttrNumber)
		ik_refuse_attached(rel, attached, GUARD_VERSION);
	return ik_attach(rel, column, GUARD_VERSION, GUARD_BEFORE_UPDATE, "");
}

Datum
idempotency_detach_version(PG_FUNCTION_ARGS)
{
	return ik_detach(fcinfo, GUARD_VERSION);
}

/* The trigger function; see the head of this file. */
Datum
idempotency_guard_version(PG_FUNCTION_ARGS)
{
	AttrNumber	column = ik_fired_on(fcinfo, GUARD_VERSION)->version;
	TriggerData *trigdata = (TriggerData *) fcinfo->context;
	const Trigger *trigger = trigdata->tg_trigger;
	int64		old;
	Datum		new;
	bool		isnull;

	if (trigger->tgnattr > 0 && trigger->tgattr[0] != column)
		ik_refuse_trigger(GUARD_VERSION, trigdata->tg_relation,
						  trigger->tgname);
	if (column == InvalidAttrNumber)
		return PointerGetDatum(trigdata->tg_newtuple);
	old = old_version(trigdata, column);

	if (trigger->tgnattr == 0)
	{
		int			replaced = column;

		new = Int64GetDatum(next_version(old));
		isnull = false;
		return PointerGetDatum(heap_modify_tuple_by_cols(trigdata->tg_newtuple,
														 RelationGetDescr(trigdata->tg_relation),
														 1, &replaced, &new, &isnull));
	}

	new = slot_getattr(trigdata->tg_newslot, column, &isnull);
	if (isnull ||
		(DatumGetInt64(new) != old && DatumGetInt64(new) != next_version(old)))
		ereport(ERROR,
				(errcode(ERRCODE_VERSION_SET),
				 isnull ? errmsg("version of the row cannot be set to null") :
				 errmsg("version of the row is %lld and cannot be set to %lld",
						(long long) old, (long long) DatumGetInt64(new)),
				 errhint("Leave the version to its trigger."),
				 errtablecol(trigdata->tg_relation, column)));
	return PointerGetDatum(trigdata->tg_newtuple);
}

/*
 * update_if(rel, id, version, changes): update a row that still has this
 * version.  changes NULL or {}: only the version changes.
 */
Datum
idempotency_update_if(PG_FUNCTION_ARGS)
{
	static const Oid types[3] = {TEXTOID, BOOLOID, INT8OID};
	GuardedUpdate update;
	UpdateOutcome outcome;
	Datum		values[3];
	bool		nulls[3] = {false, false, false};

	ik_open_update(&update, &version_hooks, fcinfo);
	if (update.table->version == InvalidAttrNumber)
		ereport(ERROR,
				(errcode(ERRCODE_UNKNOWN_MACHINE),
				 errmsg("table \"%s\" has no version column",
						RelationGetRelationName(update.rel)),
				 errhint("Attach one with idempotency.attach_version().")));
	ik_check_primary_key(update.rel, update.table);
	if (PG_ARGISNULL(2))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("version must not be null"),
				 errhint("Give the version that was read with the row.")));
	update.column = update.table->version;
	update.type = INT8OID;
	update.expected = PG_GETARG_DATUM(2);
	update.target = Int64GetDatum(next_version(PG_GETARG_INT64(2)));
	update.decided = true;
	ik_read_changes(&update, fcinfo, 3);

	outcome = ik_guarded_update(&update);
	ik_count(COUNT_UPDATE_IF, outcome);
	values[0] = ik_outcome_datum(outcome);
	values[1] = BoolGetDatum(outcome == UPDATE_APPLIED);
	values[2] = update.current;
	/* NOT NULL may have been dropped from the column */
	nulls[2] = outcome == UPDATE_NOT_FOUND || update.isnull;
	table_close(update.rel, NoLock);
	return ik_result(fcinfo, lengthof(types), types, values, nulls);
}

static int64
old_version(TriggerData *trigdata, AttrNumber column)
{
	bool		isnull;
	Datum		old = slot_getattr(trigdata->tg_trigslot, column, &isnull);

	return isnull ? 0 : DatumGetInt64(old);
}

/* 22003 after the last bigint. */
static int64
next_version(int64 version)
{
	int64		next;

	if (pg_add_s64_overflow(version, 1, &next))
		ereport(ERROR,
				(errcode(ERRCODE_NUMERIC_VALUE_OUT_OF_RANGE),
				 errmsg("version out of range")));
	return next;
}

/* Does the row still have the version that was read? */
static bool
is_expected(const GuardedUpdate *update)
{
	return DatumGetInt64(update->current) == DatumGetInt64(update->expected);
}

/* It has another one. */
static UpdateOutcome
conflict(GuardedUpdate *update)
{
	return UPDATE_CONFLICT;
}
