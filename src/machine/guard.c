/*-------------------------------------------------------------------------
 *
 * guard.c
 *		The trigger that keeps a table on its machine's graph.
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
 * triggers, which also write it (history.c).  On a partitioned table AFTER
 * INSERT is for DELETE too: a row that moves to another partition fires DELETE
 * there and INSERT here, one after the other, and is judged as an UPDATE
 * (moving.c).
 *
 *-------------------------------------------------------------------------
 */
#include "machine/machine.h"

#include "access/sysattr.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "utils/datum.h"
#include "utils/snapmgr.h"

PG_FUNCTION_INFO_V1(idempotency_guard_state);

static void guard_insert(TriggerData *trigdata, const TableInfo *table,
						 const Guard *guard);
static void guard_update(TriggerData *trigdata, const TableInfo *table,
						 const Guard *guard);
static void judge_move(TriggerData *trigdata, const TableInfo *table,
					   const Guard *guard, TupleTableSlot *slot,
					   NameRef from, NameRef to);
static const Move *asked_move(TriggerData *trigdata, const Guard *guard);

/* The trigger function; see the head of this file. */
Datum
idempotency_guard_state(PG_FUNCTION_ARGS)
{
	const TableInfo *table = ik_fired_on(fcinfo, GUARD_STATE);
	TriggerData *trigdata = (TriggerData *) fcinfo->context;
	const Trigger *trigger = trigdata->tg_trigger;
	const Guard *guard;

	/* PostgreSQL does not ask between the AFTER triggers of a million rows */
	CHECK_FOR_INTERRUPTS();
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
					ik_remember_moving_row(trigdata, table, guard);
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
	NameRef		state = ik_slot_state(guard, slot);
	const Machine *machine;
	NameRef		from;
	int			index;

	if (ik_take_moving_row(trigdata, table, guard, &from))
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
			   ik_slot_state(guard, trigdata->tg_trigslot),
			   ik_slot_state(guard, slot));
}

/*
 * May a row go from one state to another?  slot holds it as it is now.  A name
 * whose data is NULL is a null state, with which nothing begins or ends.
 */
static void
judge_move(TriggerData *trigdata, const TableInfo *table, const Guard *guard,
		   TupleTableSlot *slot, NameRef from, NameRef to)
{
	const Move *asked = asked_move(trigdata, guard);
	const Machine *machine;
	static const NameRef no_event = {NULL, 0};

	/* To keep the state is a move only if it was asked for as one. */
	if (asked == NULL && ik_same_name(from, to))
		return;

	machine = ik_find_machine(guard->machine);
	if (from.data == NULL || to.data == NULL ||
		!ik_has_edge(machine,
					 ik_find_state(machine, from),
					 ik_find_state(machine, to)))
	{
		/* off the graph, and not where the caller wanted to go: who did that? */
		if (asked != NULL && !ik_same_name(asked->target, to))
			ik_refuse_rewritten(trigdata->tg_relation, guard, asked->target, to);
		ik_refuse_edge(trigdata->tg_relation, guard, machine, from, to);
	}

	if (guard->history && TRIGGER_FIRED_AFTER(trigdata->tg_event))
		ik_log_move(trigdata->tg_relation, table, guard, slot, from, to,
					asked != NULL && asked->logged_event >= 0 ?
					asked->machine->events[asked->logged_event].name : no_event);
}

/*
 * The move that transition() or fire() asked for, if its UPDATE is what wrote,
 * or is about to write, the row; else NULL.  The snapshot tells: that of each
 * statement that a trigger runs meanwhile has another command number.  (The
 * current number does not: it grows when a trigger has written something.)
 */
static const Move *
asked_move(TriggerData *trigdata, const Guard *guard)
{
	const GuardedUpdate *running = ik_running_update;

	if (running == NULL || running->hooks != &ik_move_hooks ||
		GetActiveSnapshot()->curcid != running->command ||
		strcmp(ik_updated_column(running), ik_state_column(trigdata->tg_relation, guard)) != 0)
		return NULL;
	return (const Move *) running;
}
