/*-------------------------------------------------------------------------
 *
 * guard.c
 *		The trigger that keeps a table on its machine's graph, and the history.
 *
 * For each machine one trigger, whose column list tells the state column:
 *
 *		UPDATE OF status ... guard_state('machine', 'no history')
 *
 * and for each table up to three more, without a column list and arguments,
 * which serve all its machines:
 *
 *		AFTER INSERT ... guard_state()
 *				not BEFORE, which would also judge rows that ON CONFLICT turns
 *				into an UPDATE
 *		BEFORE UPDATE, AFTER UPDATE ... guard_state()
 *				an UPDATE that does not name the state column may change it
 *				nevertheless, by a BEFORE trigger
 *
 * Without history, an UPDATE is judged by BEFORE triggers, which are the
 * cheaper ones, and whose names make them fire last; with history by AFTER
 * triggers, which also write it.  On a partitioned table AFTER INSERT is for
 * DELETE too: a row that moves to another partition fires DELETE there and
 * INSERT here, one after the other, and is judged as an UPDATE.
 *
 *-------------------------------------------------------------------------
 */
#include "machine/machine.h"

#include "access/htup_details.h"
#include "access/sysattr.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/partition.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

/* a row on its way to another partition, between the two triggers */
typedef struct MovingRow
{
	Oid			root;			/* of the partitioned table */
	char	   *column;			/* whose state it is */
	SubTransactionId subxact;
	CommandId	command;
	bool		isnull;
	NameRef		state;			/* that it left with */
	struct MovingRow *next;
} MovingRow;

static void forget_moving_rows(void *arg);

/* in TopTransactionContext; forgotten when that is reset */
static MovingRow *moving_rows = NULL;
static MemoryContextCallback moving_rows_reset =
{
	.func = forget_moving_rows
};
static bool moving_rows_known = false;	/* is the callback registered? */

static SPIPlanPtr log_plan = NULL;

PG_FUNCTION_INFO_V1(idempotency_guard_state);

static void guard_insert(TriggerData *trigdata, const TableInfo *table,
						 const Guard *guard);
static void guard_update(TriggerData *trigdata, const TableInfo *table,
						 const Guard *guard);
static void judge_move(TriggerData *trigdata, const TableInfo *table,
					   const Guard *guard, TupleTableSlot *slot,
					   NameRef from, NameRef to);
static const Move *asked_move(TriggerData *trigdata, const Guard *guard,
							  TupleTableSlot *slot);
static const char *state_column(TriggerData *trigdata, const Guard *guard);
static NameRef slot_state(const Guard *guard, TupleTableSlot *slot);
static bool same_name(NameRef a, NameRef b);
static void remember_moving_row(TriggerData *trigdata, const Guard *guard);
static bool take_moving_row(TriggerData *trigdata, const Guard *guard,
							NameRef *from);
static Oid	root_of(Relation rel);
static HeapTupleHeader header_of(TupleTableSlot *slot);
static void log_move(TriggerData *trigdata, const TableInfo *table,
					 const Guard *guard, TupleTableSlot *slot,
					 NameRef from, NameRef to, NameRef event);
static void settings_of_log(const TableInfo *table);
static void set_for_log(const char *name, const char *value);
static Datum row_id(const TableInfo *table, Relation rel,
					TupleTableSlot *slot);

/* The trigger function; see the head of this file. */
Datum
idempotency_guard_state(PG_FUNCTION_ARGS)
{
	const TableInfo *table = ik_fired_on(fcinfo, GUARD_STATE);
	TriggerData *trigdata = (TriggerData *) fcinfo->context;
	const Trigger *trigger = trigdata->tg_trigger;
	const Guard *guard;

	if (trigger->tgnattr > 0)
	{
		guard = ik_guard_of(table, trigger->tgattr[0]);
		if (guard == NULL || !TRIGGER_FIRED_BY_UPDATE(trigdata->tg_event))
			ik_refuse_trigger(GUARD_STATE, trigdata->tg_relation,
							  trigger->tgname);
		guard_update(trigdata, table, guard);
	}
	else
		for (int i = 0; i < table->nguards; i++)
		{
			guard = &table->guards[i];
			if (!TRIGGER_FIRED_BY_UPDATE(trigdata->tg_event))
			{
				if (TRIGGER_FIRED_BY_INSERT(trigdata->tg_event))
					guard_insert(trigdata, table, guard);
				else
					remember_moving_row(trigdata, guard);
			}
			else if (guard->history == (TRIGGER_FIRED_AFTER(trigdata->tg_event) != 0) &&
					 !bms_is_member(guard->column - FirstLowInvalidHeapAttributeNumber,
									trigdata->tg_updatedcols))
				guard_update(trigdata, table, guard);
		}

	/* what BEFORE UPDATE must return; AFTER triggers return nothing */
	return PointerGetDatum(trigdata->tg_newtuple);
}

/* A new row must begin in an initial state, unless it comes from next door. */
static void
guard_insert(TriggerData *trigdata, const TableInfo *table, const Guard *guard)
{
	TupleTableSlot *slot = trigdata->tg_trigslot;
	NameRef		state = slot_state(guard, slot);
	const Machine *machine;
	NameRef		from;
	int			index;

	if (moving_rows != NULL && take_moving_row(trigdata, guard, &from))
	{
		judge_move(trigdata, table, guard, slot, from, state);
		return;
	}

	machine = ik_find_machine(guard->machine);
	index = state.data == NULL ? -1 : ik_find_state(machine, state);
	if (index < 0 || !machine->states[index].initial)
		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 state.data == NULL ?
				 errmsg("a new row cannot have a null state under machine \"%s\"",
						guard->machine) :
				 errmsg("a new row cannot begin in state \"%.*s\" of machine \"%s\"",
						state.len, state.data, guard->machine),
				 errhint("%s", ik_hint_states(machine, true)),
				 errtablecol(trigdata->tg_relation, guard->column)));
}

/* A row that keeps its state may do so, also one that is not on the graph. */
static void
guard_update(TriggerData *trigdata, const TableInfo *table, const Guard *guard)
{
	TupleTableSlot *slot = trigdata->tg_newslot;
	Form_pg_attribute attr = TupleDescAttr(slot->tts_tupleDescriptor,
										   guard->column - 1);
	bool		oldnull;
	bool		newnull;
	Datum		old = slot_getattr(trigdata->tg_trigslot, guard->column, &oldnull);
	Datum		new = slot_getattr(slot, guard->column, &newnull);

	if (ik_running_update == NULL && oldnull == newnull &&
		(oldnull || datumIsEqual(old, new, attr->attbyval, attr->attlen)))
		return;
	judge_move(trigdata, table, guard, slot,
			   slot_state(guard, trigdata->tg_trigslot),
			   slot_state(guard, slot));
}

/*
 * May a row go from one state to another?  slot holds it as it is now.  A name
 * whose data is NULL is a null state, with which nothing begins or ends.
 */
static void
judge_move(TriggerData *trigdata, const TableInfo *table, const Guard *guard,
		   TupleTableSlot *slot, NameRef from, NameRef to)
{
	const Move *asked = asked_move(trigdata, guard, slot);
	const Machine *machine;
	static const NameRef no_event = {NULL, 0};

	/* To keep the state is a move only if it was asked for as one. */
	if (asked == NULL && same_name(from, to))
		return;

	machine = ik_find_machine(guard->machine);
	if (from.data == NULL || to.data == NULL ||
		!ik_has_edge(machine,
					 ik_find_state(machine, from),
					 ik_find_state(machine, to)))
	{
		if (asked != NULL && !same_name(asked->target, to))
			ereport(ERROR,
					(errcode(ERRCODE_STATE_REWRITTEN),
					 errmsg("a trigger stored another state than \"%.*s\"",
							asked->target.len, asked->target.data),
					 to.data == NULL ? 0 :
					 errdetail("It stored \"%.*s\", to which there is no edge.",
							   to.len, to.data),
					 errhint("Mend the trigger, or ask for the state that it stores."),
					 errtablecol(trigdata->tg_relation, guard->column)));
		if (from.data == NULL || to.data == NULL)
			ereport(ERROR,
					(errcode(ERRCODE_ILLEGAL_TRANSITION),
					 errmsg("a row cannot enter or leave a null state under machine \"%s\"",
							guard->machine),
					 errhint("%s", from.data == NULL ?
							 ik_hint_edges(machine, -1) :
							 ik_hint_edges(machine, ik_find_state(machine, from))),
					 errtablecol(trigdata->tg_relation, guard->column)));
		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 errmsg("machine \"%s\" has no edge from state \"%.*s\" to state \"%.*s\"",
						guard->machine, from.len, from.data, to.len, to.data),
				 errhint("%s", ik_hint_edges(machine, ik_find_state(machine, from))),
				 errtablecol(trigdata->tg_relation, guard->column)));
	}

	if (guard->history && TRIGGER_FIRED_AFTER(trigdata->tg_event))
		log_move(trigdata, table, guard, slot, from, to,
				 asked != NULL && asked->event >= 0 ?
				 asked->machine->events[asked->event].name : no_event);
}

/*
 * The move that transition() or fire() asked for, if this is what wrote, or is
 * about to write, the row; else NULL.  The command number tells: every statement
 * that a trigger runs meanwhile has another one.
 */
static const Move *
asked_move(TriggerData *trigdata, const Guard *guard, TupleTableSlot *slot)
{
	const GuardedUpdate *running = ik_running_update;
	Form_pg_attribute attr = TupleDescAttr(RelationGetDescr(trigdata->tg_relation),
										   guard->column - 1);
	CommandId	command;

	if (running == NULL || running->hooks != &ik_move_hooks ||
		strcmp(ik_updated_column(running), NameStr(attr->attname)) != 0)
		return NULL;
	if (TRIGGER_FIRED_BEFORE(trigdata->tg_event))
		command = GetCurrentCommandId(false);
	else
		command = HeapTupleHeaderGetCmin(header_of(slot));
	return command == running->command ? (const Move *) running : NULL;
}

/* The state column's name, which is the same in every partition. */
static const char *
state_column(TriggerData *trigdata, const Guard *guard)
{
	return NameStr(TupleDescAttr(RelationGetDescr(trigdata->tg_relation),
								 guard->column - 1)->attname);
}

static NameRef
slot_state(const Guard *guard, TupleTableSlot *slot)
{
	bool		isnull;
	Datum		state = slot_getattr(slot, guard->column, &isnull);
	NameRef		none = {NULL, 0};

	if (isnull)
		return none;
	return ik_state_name(guard->kind, state);
}

static bool
same_name(NameRef a, NameRef b)
{
	if (a.data == NULL || b.data == NULL)
		return a.data == b.data;
	return a.len == b.len && memcmp(a.data, b.data, a.len) == 0;
}

/*
 * DELETE in a partition: if the row moves to another one, keep its state for
 * the INSERT there, the very next event of this machine.
 */
static void
remember_moving_row(TriggerData *trigdata, const Guard *guard)
{
	HeapTupleHeader header = header_of(trigdata->tg_trigslot);
	Oid			root;
	NameRef		state;
	MovingRow  *row;
	MemoryContext old;

	if (!HeapTupleHeaderIndicatesMovedPartitions(header))
		return;

	if (!moving_rows_known)
		MemoryContextRegisterResetCallback(TopTransactionContext,
										   &moving_rows_reset);
	moving_rows_known = true;

	root = root_of(trigdata->tg_relation);
	state = slot_state(guard, trigdata->tg_trigslot);
	old = MemoryContextSwitchTo(TopTransactionContext);
	row = palloc(sizeof(MovingRow));
	row->state.len = state.len;
	row->state.data = state.data ? pnstrdup(state.data, state.len) : NULL;
	row->column = pstrdup(state_column(trigdata, guard));
	row->root = root;
	row->subxact = GetCurrentSubTransactionId();
	row->command = HeapTupleHeaderGetCmax(header);
	row->next = moving_rows;
	moving_rows = row;
	MemoryContextSwitchTo(old);
}

/* INSERT in a partition: did the row come from another one?  With what state? */
static bool
take_moving_row(TriggerData *trigdata, const Guard *guard, NameRef *from)
{
	CommandId	command = HeapTupleHeaderGetCmin(header_of(trigdata->tg_trigslot));
	Oid			root = root_of(trigdata->tg_relation);

	for (MovingRow **link = &moving_rows; *link != NULL; link = &(*link)->next)
	{
		MovingRow  *row = *link;

		if (row->root == root && row->command == command &&
			row->subxact == GetCurrentSubTransactionId() &&
			strcmp(row->column, state_column(trigdata, guard)) == 0)
		{
			*link = row->next;
			*from = row->state;
			if (from->data != NULL)
			{
				from->data = pnstrdup(row->state.data, row->state.len);
				pfree(unconstify(char *, row->state.data));
			}
			pfree(row->column);
			pfree(row);
			return true;
		}
	}
	return false;
}

static void
forget_moving_rows(void *arg)
{
	moving_rows = NULL;
	moving_rows_known = false;
}

/* The table that the caller knows: of a partition, the topmost one. */
static Oid
root_of(Relation rel)
{
	List	   *ancestors;

	if (!rel->rd_rel->relispartition)
		return RelationGetRelid(rel);
	ancestors = get_partition_ancestors(RelationGetRelid(rel));
	return llast_oid(ancestors);
}

static HeapTupleHeader
header_of(TupleTableSlot *slot)
{
	bool		should_free;

	return ExecFetchSlotHeapTuple(slot, false, &should_free)->t_data;
}

/*
 * Write a row of history.  The key and the states become jsonb and text as the
 * role that ran the UPDATE, whose types they may be; then the INSERT runs as
 * our table's owner, so that a writer needs no grant of ours.
 */
static void
log_move(TriggerData *trigdata, const TableInfo *table, const Guard *guard,
		 TupleTableSlot *slot, NameRef from, NameRef to, NameRef event)
{
	Oid			types[8] = {TEXTOID, JSONBOID, TEXTOID, TEXTOID, TEXTOID,
	TEXTOID, TIMESTAMPTZOID, TEXTOID};
	Datum		values[8];
	char		nulls[9] = "        ";
	Oid			root = root_of(trigdata->tg_relation);
	int			nest;
	Relation	log;
	SavedUser	caller;

	nest = NewGUCNestLevel();
	settings_of_log(table);
	values[0] = CStringGetTextDatum(quote_qualified_identifier(get_namespace_name(get_rel_namespace(root)),
															   get_rel_name(root)));
	values[1] = row_id(table, trigdata->tg_relation, slot);
	AtEOXact_GUC(true, nest);
	values[2] = CStringGetTextDatum(guard->machine);
	values[3] = event.data == NULL ? (Datum) 0 :
		PointerGetDatum(cstring_to_text_with_len(event.data, event.len));
	nulls[3] = event.data == NULL ? 'n' : ' ';
	values[4] = PointerGetDatum(cstring_to_text_with_len(from.data, from.len));
	values[5] = PointerGetDatum(cstring_to_text_with_len(to.data, to.len));
	values[6] = TimestampTzGetDatum(GetCurrentTimestamp());
	values[7] = CStringGetTextDatum(GetUserNameFromId(GetUserId(), false));

	SPI_connect();
	log = table_open(ik_own_relation("transition_log"),
					 RowExclusiveLock);
	ik_become_owner(log, 0, &caller);
	if (log_plan == NULL)
	{
		SPIPlanPtr	plan = SPI_prepare("INSERT INTO idempotency.transition_log"
									   " (table_name, row_id, machine, event, from_state, to_state, changed_at, changed_by)"
									   " VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
									   8, types);

		if (plan == NULL)
			elog(ERROR, "SPI_prepare failed: %s",
				 SPI_result_code_string(SPI_result));
		SPI_keepplan(plan);
		log_plan = plan;
	}
	if (SPI_execute_plan(log_plan, values, nulls, false, 0) != SPI_OK_INSERT)
		elog(ERROR, "could not write to table \"%s\"",
			 RelationGetRelationName(log));
	ik_become_caller(&caller);
	table_close(log, NoLock);
	SPI_finish();
}

/*
 * The log has one name for a table and one for a row, whatever the session that
 * moves it has set: from here to AtEOXact_GUC() values are written as on a
 * server in UTC where nothing is set.  The keys of most tables read the same
 * everywhere.
 */
static void
settings_of_log(const TableInfo *table)
{
	static const char *const settings[][2] = {
		{"bytea_output", "hex"},
		{"DateStyle", "ISO, MDY"},
		{"extra_float_digits", "1"},
		{"IntervalStyle", "postgres"},
		{"lc_monetary", "C"},
		{"TimeZone", "UTC"}
	};

	if (quote_all_identifiers)
		set_for_log("quote_all_identifiers", "off");
	for (int i = 0; table->row_id_varies && i < lengthof(settings); i++)
		set_for_log(settings[i][0], settings[i][1]);
}

static void
set_for_log(const char *name, const char *value)
{
	(void) set_config_option(name, value, PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
}

/* The primary key as jsonb: its value, or for several columns an object. */
static Datum
row_id(const TableInfo *table, Relation rel, TupleTableSlot *slot)
{
	LOCAL_FCINFO(fcinfo, 2 * INDEX_MAX_KEYS);
	int			nargs = 0;

	if (table->nkeys == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_COLUMN_REFERENCE),
				 errmsg("table \"%s\" has no primary key",
						RelationGetRelationName(rel)),
				 errhint("Add a primary key: the history tells rows apart by it.")));

	for (int i = 0; i < table->nkeys; i++)
	{
		AttrNumber	column = table->keys[i].column;

		if (table->nkeys > 1)
		{
			fcinfo->args[nargs].value =
				CStringGetTextDatum(NameStr(TupleDescAttr(RelationGetDescr(rel),
														  column - 1)->attname));
			fcinfo->args[nargs++].isnull = false;
		}
		fcinfo->args[nargs].value = slot_getattr(slot, column,
												 &fcinfo->args[nargs].isnull);
		nargs++;
	}
	InitFunctionCallInfoData(*fcinfo, unconstify(FmgrInfo *, &table->row_id),
							 nargs, InvalidOid, NULL, NULL);
	return FunctionCallInvoke(fcinfo);
}
