/*-------------------------------------------------------------------------
 *
 * transition.c
 *		Moving a row along an edge: transition() and fire().
 *
 * The guarded update (update.c) does the work; here is decided which edge it
 * is.  If the state to leave is known from the call, the first statement is the
 * UPDATE; else the row is looked at first.
 *
 *-------------------------------------------------------------------------
 */
#include "machine/machine.h"

#include "access/table.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/tuplestore.h"

PG_FUNCTION_INFO_V1(idempotency_transition);
PG_FUNCTION_INFO_V1(idempotency_fire);
PG_FUNCTION_INFO_V1(idempotency_next_events);

static void open_move(Move *move, const UpdateHooks *hooks,
					  FunctionCallInfo fcinfo, int arg);
static NameRef name_argument(const Guard *guard, FunctionCallInfo fcinfo,
							 int arg);
static void check_edge_asked(const Move *move);
static void aim(Move *move, Datum expected, int source, int target);
static Datum carry_out(Move *move, FunctionCallInfo fcinfo);
static bool is_expected(const GuardedUpdate *update);
static UpdateOutcome decide_move(GuardedUpdate *update);
static UpdateOutcome decide_nothing(GuardedUpdate *update);
static const MachineEdge *edge_of_event(const Move *move, int state);
static void check_stored(const GuardedUpdate *update);
static const char *comparison(const GuardedUpdate *update, const char *column,
							  int parameter);
static NameRef datum_name(const Move *move, Datum state);
static text *name_as_text(NameRef name);

const UpdateHooks ik_move_hooks = {
	.kind = GUARD_STATE,
	.is_expected = is_expected,
	.decide = decide_move,
	.check_stored = check_stored,
	.comparison = comparison
};

static const UpdateHooks look_hooks = {
	.kind = GUARD_STATE,
	.looks = true,
	.is_expected = is_expected,
	.decide = decide_nothing
};

/*
 * transition(rel, id, from_state, to_state, changes, state_column): move a row
 * along an edge.  from_state NULL: from any state with an edge to the target.
 */
Datum
idempotency_transition(PG_FUNCTION_ARGS)
{
	Move		move;

	open_move(&move, &ik_move_hooks, fcinfo, 5);
	move.from = name_argument(move.guard, fcinfo, 2);
	move.to = name_argument(move.guard, fcinfo, 3);
	if (move.to.data == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("to_state must not be null")));
	ik_read_changes(&move.update, fcinfo, 4);

	check_edge_asked(&move);
	if (move.from.data != NULL)
		aim(&move, ik_state_datum(move.guard, move.from),
			ik_find_state(move.machine, move.from),
			ik_find_state(move.machine, move.to));
	return carry_out(&move, fcinfo);
}

/*
 * fire(rel, id, event, changes, state_column): move a row along the edge that
 * the event names in the row's state.  The rest as transition().
 */
Datum
idempotency_fire(PG_FUNCTION_ARGS)
{
	Move		move;
	NameRef		event;
	int			source;

	open_move(&move, &ik_move_hooks, fcinfo, 4);
	if (PG_ARGISNULL(2))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("event must not be null")));
	event.data = VARDATA_ANY(PG_GETARG_TEXT_PP(2));
	event.len = VARSIZE_ANY_EXHDR(PG_GETARG_TEXT_PP(2));
	move.event = ik_find_event(move.machine, event);
	if (move.event < 0)
		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 errmsg("machine \"%s\" has no event \"%.*s\"",
						move.guard->machine, event.len, event.data),
				 errhint("%s", ik_hint_events(move.machine))));
	ik_read_changes(&move.update, fcinfo, 3);

	/* If only one state has this event, no look is needed to know it. */
	source = move.machine->events[move.event].source;
	if (source >= 0)
		aim(&move,
			ik_state_datum(move.guard, move.machine->states[source].name),
			source, edge_of_event(&move, source)->target);
	return carry_out(&move, fcinfo);
}

/*
 * next_events(rel, id, state_column): the edges that lead from the row's state,
 * read with the caller's rights; none if there is no such row.
 */
Datum
idempotency_next_events(PG_FUNCTION_ARGS)
{
	static const Oid types[2] = {TEXTOID, TEXTOID};
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	Move		move;
	int			state = -1;

	InitMaterializedSRF(fcinfo, 0);
	ik_check_columns(rsinfo->setDesc, lengthof(types), types);
	open_move(&move, &look_hooks, fcinfo, 2);
	if (ik_guarded_update(&move.update) != UPDATE_NOT_FOUND &&
		!move.update.isnull)
		state = ik_find_state(move.machine,
							  datum_name(&move, move.update.current));
	for (int i = 0; state >= 0 && i < move.machine->states[state].nedges; i++)
	{
		const MachineEdge *edge = &move.machine->states[state].edges[i];
		Datum		values[2] = {0};
		bool		nulls[2] = {edge->event < 0, false};

		if (edge->event >= 0)
			values[0] = PointerGetDatum(name_as_text(move.machine->events[edge->event].name));
		values[1] = PointerGetDatum(name_as_text(move.machine->states[edge->target].name));
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	table_close(move.update.rel, NoLock);
	return (Datum) 0;
}

/*
 * Begin a move: the table, the id, and the machine of the state column named
 * in argument arg, which may be NULL if the table has only one machine.
 */
static void
open_move(Move *move, const UpdateHooks *hooks, FunctionCallInfo fcinfo,
		  int arg)
{
	const TableInfo *table;
	AttrNumber	column = InvalidAttrNumber;

	memset(move, 0, sizeof(*move));
	move->event = -1;
	ik_open_update(&move->update, hooks, fcinfo);
	table = move->update.table;
	if (!PG_ARGISNULL(arg))
	{
		column = ik_column_number(move->update.rel,
								  NameStr(*PG_GETARG_NAME(arg)),
								  "state_column names the column that a machine is attached to.");
		move->guard = ik_guard_of(table, column);
	}
	else if (table->nguards > 1)
		ereport(ERROR,
				(errcode(ERRCODE_AMBIGUOUS_COLUMN),
				 errmsg("several machines are attached to table \"%s\"",
						RelationGetRelationName(move->update.rel)),
				 errhint("Name the column in state_column.")));
	else if (table->nguards == 1)
		move->guard = &table->guards[0];
	if (move->guard == NULL)
		ik_refuse_unattached(move->update.rel, column);
	ik_check_primary_key(move->update.rel, table);
	move->update.column = move->guard->column;
	move->update.type = move->guard->type;
	move->machine = ik_find_machine(move->guard->machine);
}

/* IK007 for a table, or one column of it, that has no machine. */
void
ik_refuse_unattached(Relation rel, AttrNumber column)
{
	ereport(ERROR,
			(errcode(ERRCODE_UNKNOWN_MACHINE),
			 column == InvalidAttrNumber ?
			 errmsg("no machine is attached to table \"%s\"",
					RelationGetRelationName(rel)) :
			 errmsg("no machine is attached to column \"%s\" of table \"%s\"",
					get_attname(RelationGetRelid(rel), column, false),
					RelationGetRelationName(rel)),
			 errhint("Attach one with idempotency.attach_machine().")));
}

/* An argument as the name of a state; NULL gives NULL. */
static NameRef
name_argument(const Guard *guard, FunctionCallInfo fcinfo, int arg)
{
	if (PG_ARGISNULL(arg))
		return (NameRef)
	{
		NULL, 0
	};
	return ik_state_name(guard->kind == STATE_ENUM ? STATE_TEXT : guard->kind,
						 PG_GETARG_DATUM(arg));
}

/* Refuse, before any write, a move that is not on the graph. */
static void
check_edge_asked(const Move *move)
{
	const Machine *machine = move->machine;
	int			to = ik_find_state(machine, move->to);
	int			from = -1;
	NameRef		unknown = {NULL, 0};

	if (move->from.data != NULL)
	{
		from = ik_find_state(machine, move->from);
		if (from < 0)
			unknown = move->from;
	}
	if (to < 0)
		unknown = move->to;
	if (unknown.data != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 errmsg("machine \"%s\" has no state \"%.*s\"",
						move->guard->machine, unknown.len, unknown.data),
				 errhint("%s", ik_hint_states(machine, false))));
	if (move->from.data != NULL && !ik_has_edge(machine, from, to))
		ik_refuse_edge(move->update.rel, move->guard, machine,
					   move->from, move->to);
	if (move->from.data == NULL && bms_is_empty(machine->states[to].sources))
		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 errmsg("machine \"%s\" has no edge to state \"%.*s\"",
						move->guard->machine,
						move->to.len, move->to.data),
				 errhint("The state is initial: a row can only begin in it.")));
}

/* Decide what to try: from an expected state to a target. */
static void
aim(Move *move, Datum expected, int source, int target)
{
	const MachineState *from = &move->machine->states[source];
	int			nedges = 0;

	move->update.expected = expected;
	move->update.target = ik_state_datum(move->guard,
										 move->machine->states[target].name);
	move->target = datum_name(move, move->update.target);
	move->update.decided = true;

	/* what the history calls it: the event, if the edge has exactly one */
	move->logged_event = move->event;
	for (int i = 0; i < from->nedges && move->event < 0; i++)
		if (from->edges[i].target == target)
			move->logged_event = ++nedges == 1 ? from->edges[i].event : -1;
}

/* Move the row and report: (outcome, applied, from_state, state). */
static Datum
carry_out(Move *move, FunctionCallInfo fcinfo)
{
	static const Oid types[4] = {TEXTOID, BOOLOID, TEXTOID, TEXTOID};
	UpdateOutcome outcome = ik_guarded_update(&move->update);
	Datum		values[4];
	bool		nulls[4] = {false, false, true, true};

	ik_count(move->event >= 0 ? COUNT_FIRE : COUNT_TRANSITION, outcome);
	values[0] = ik_outcome_datum(outcome);
	values[1] = BoolGetDatum(outcome == UPDATE_APPLIED);
	if (outcome == UPDATE_APPLIED)
	{
		values[2] = PointerGetDatum(name_as_text(datum_name(move, move->update.expected)));
		nulls[2] = false;
	}
	if (outcome != UPDATE_NOT_FOUND)
	{
		values[3] = PointerGetDatum(name_as_text(datum_name(move, move->update.current)));
		nulls[3] = false;
	}
	table_close(move->update.rel, NoLock);
	return ik_result(fcinfo, lengthof(types), types, values, nulls);
}

/* Is the row in the state that the attempt expects? */
static bool
is_expected(const GuardedUpdate *update)
{
	const Move *move = (const Move *) update;

	return ik_same_name(datum_name(move, update->current),
						datum_name(move, update->expected));
}

/*
 * The row was seen, and it is not as the last attempt expected it.  Applied
 * means: try again, expected and target are set.
 */
static UpdateOutcome
decide_move(GuardedUpdate *update)
{
	Move	   *move = (Move *) update;
	const Machine *machine = move->machine;
	NameRef		name = {NULL, 0};
	int			state;

	if (move->update.isnull)
		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 errmsg("the row has a null state in column \"%s\"",
						ik_updated_column(&move->update)),
				 errhint("%s", ik_hint_edges(machine, -1))));
	name = datum_name(move, move->update.current);

	/* transition() from a state that it is not in */
	if (move->from.data != NULL)
		return ik_same_name(name, move->to) ? UPDATE_ALREADY : UPDATE_CONFLICT;

	state = ik_find_state(machine, name);
	if (state < 0)
		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 errmsg("the row is in state \"%.*s\", which machine \"%s\" does not know",
						name.len, name.data, move->guard->machine),
				 errhint("%s", ik_hint_edges(machine, -1))));

	/* fire(): there if the event leads here, unless it leads on from here */
	if (move->event >= 0)
	{
		const MachineEdge *edge = edge_of_event(move, state);

		if (edge == NULL)
			return bms_is_member(state, machine->events[move->event].targets) ?
				UPDATE_ALREADY : UPDATE_CONFLICT;
		aim(move, move->update.current, state, edge->target);
		return UPDATE_APPLIED;
	}

	/* From any state: a retry must not move again along a self-loop. */
	if (ik_same_name(name, move->to))
		return UPDATE_ALREADY;
	if (!ik_has_edge(machine, state, ik_find_state(machine, move->to)))
		return UPDATE_CONFLICT;
	aim(move, move->update.current, state, ik_find_state(machine, move->to));
	return UPDATE_APPLIED;
}

/* The look was all that was wanted. */
static UpdateOutcome
decide_nothing(GuardedUpdate *update)
{
	return UPDATE_ALREADY;
}

/* The edge that the event names in that state, or NULL. */
static const MachineEdge *
edge_of_event(const Move *move, int state)
{
	const MachineState *from = &move->machine->states[state];

	for (int i = 0; i < from->nedges; i++)
		if (from->edges[i].event == move->event)
			return &from->edges[i];
	return NULL;
}

/* One row was updated: that is success only if it shows the target. */
static void
check_stored(const GuardedUpdate *update)
{
	const Move *move = (const Move *) update;
	NameRef		stored = {NULL, 0};

	if (!move->update.isnull)
		stored = datum_name(move, move->update.current);
	if (!ik_same_name(stored, move->target))
		ik_refuse_rewritten(update->rel, move->guard, move->target, stored);
}

/*
 * A domain over an enum finds no operator of the enum's.  Not a cast to text:
 * an enum's owner may have made one of its own.
 */
static const char *
comparison(const GuardedUpdate *update, const char *column, int parameter)
{
	const Move *move = (const Move *) update;
	Form_pg_attribute attr = TupleDescAttr(RelationGetDescr(update->rel),
										   update->column - 1);

	if (move->guard->kind != STATE_ENUM || attr->atttypid == update->type)
		return NULL;
	return psprintf("pg_catalog.format('%%s', t.%s) OPERATOR(pg_catalog.=) pg_catalog.format('%%s', $%d)",
					column, parameter);
}

/* A state of this column as a name. */
static NameRef
datum_name(const Move *move, Datum state)
{
	return ik_state_name(move->guard->kind, state);
}

static text *
name_as_text(NameRef name)
{
	return cstring_to_text_with_len(name.data, name.len);
}
