/*-------------------------------------------------------------------------
 *
 * transition.c
 *		The guarded update, and the moves made with it: transition and fire.
 *
 * A guarded update is one UPDATE with the primary key and the expected state,
 * or version, in its WHERE.  It runs through SPI as the caller, under the
 * caller's privileges, row security and triggers, from a plan that is kept per
 * table, column and set of changed columns, as ri_triggers.c keeps its plans.
 *
 * One row updated: applied.  None: the reason is found out, never guessed.
 *
 *		SELECT						no row: not found
 *									another state: decide anew by it
 *									the expected one: go on
 *		SELECT FOR NO KEY UPDATE	a row: repeat the UPDATE under its lock,
 *									and if that updates none, a trigger
 *									suppressed it
 *									no row: go on
 *		SELECT						the same version of the row: row security
 *									forbids to update it
 *									else: somebody was faster, start over
 *
 * Which version of the row it is (ctid, tableoid) is read only once a first
 * round came to the last step: whoever has privileges on the key and the state
 * alone, and not on the table, gets every other answer without it.
 *
 * Each statement has its own snapshot under READ COMMITTED.  Above it a lost
 * race ends in 40001 at the first UPDATE or lock.
 *
 *-------------------------------------------------------------------------
 */
#include "idempotency.h"

#include "access/sysattr.h"
#include "access/table.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "machine.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/fmgrprotos.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/json.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

/* sets of changed columns whose plans are kept per table and column */
#define MAX_PLANS 64

typedef enum PlanKind
{
	PLAN_UPDATE,
	PLAN_LOOK,
	PLAN_IDENTIFY,				/* a look that also tells the row's version */
	PLAN_LOCK
} PlanKind;

typedef struct PlanKey
{
	Oid			relid;
	int16		column;
	int16		kind;
} PlanKey;

/* one kept plan; only those of UPDATE have changed columns */
typedef struct KeptPlan
{
	struct KeptPlan *next;
	SPIPlanPtr	plan;
	int			running;		/* how often, up the stack: do not free it */
	int			nchanged;
	AttrNumber	changed[FLEXIBLE_ARRAY_MEMBER];
} KeptPlan;

typedef struct CachedPlans
{
	PlanKey		key;
	KeptPlan   *plans;
} CachedPlans;

static HTAB *plan_cache = NULL;

PG_FUNCTION_INFO_V1(idempotency_transition);
PG_FUNCTION_INFO_V1(idempotency_fire);

pg_noreturn static void read_only(void);
static void read_key(GuardedUpdate *update, Oid type, Datum id);
static char *example_of_id(const GuardedUpdate *update);
static Datum key_from_value(const KeyColumn *key, Oid type, Datum value);
static Datum key_from_json(const KeyColumn *key, const JsonbValue *value);
static void open_move(GuardedUpdate *update, FunctionCallInfo fcinfo, int arg);
static NameRef name_argument(const Guard *guard, FunctionCallInfo fcinfo,
							 int arg);
static void check_edge_asked(const GuardedUpdate *update);
static void aim(GuardedUpdate *update, Datum expected, int target);
static Datum move(GuardedUpdate *update, FunctionCallInfo fcinfo);
static UpdateOutcome decide(GuardedUpdate *update);
static UpdateOutcome decide_move(GuardedUpdate *update);
static const MachineEdge *edge_of_event(const GuardedUpdate *update, int state);
static bool is_expected(const GuardedUpdate *update);
static bool attempt(GuardedUpdate *update);
static bool look(GuardedUpdate *update, PlanKind kind);
static void check_stored(const GuardedUpdate *update);
static void execute(GuardedUpdate *update, PlanKind kind,
					const AskedMove *asked);
static int	run_plan(KeptPlan *kept, Datum *values, const char *nulls,
					 const AskedMove *asked);
static KeptPlan *get_plan(GuardedUpdate *update, PlanKind kind);
static SPIPlanPtr build_plan(GuardedUpdate *update, PlanKind kind);
static void append_where(StringInfo buf, const GuardedUpdate *update);
static Form_pg_attribute column_attr(const GuardedUpdate *update,
									 AttrNumber column);
static const char *column_name(const GuardedUpdate *update, AttrNumber column);
static NameRef datum_name(const GuardedUpdate *update, Datum state);
static bool same_name(NameRef a, NameRef b);
static text *name_as_text(NameRef name);

static const char *const outcome_names[] = {
	[UPDATE_APPLIED] = "applied",
	[UPDATE_ALREADY] = "already",
	[UPDATE_CONFLICT] = "conflict",
	[UPDATE_NOT_FOUND] = "not_found",
	[UPDATE_NOT_PERMITTED] = "not_permitted",
	[UPDATE_SUPPRESSED] = "suppressed"
};

/*
 * transition(rel, id, from_state, to_state, changes, state_column): move a row
 * along an edge.  from_state NULL: from any state with an edge to the target.
 * changes and state_column may be NULL: none, and the only state column.
 * Errors: IK003, IK005, IK007, 21000, 22004, 22023, 25006, 40001, 42702.
 */
Datum
idempotency_transition(PG_FUNCTION_ARGS)
{
	GuardedUpdate update;

	open_move(&update, fcinfo, 5);
	update.from = name_argument(update.guard, fcinfo, 2);
	update.to = name_argument(update.guard, fcinfo, 3);
	if (update.to.data == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("state to move to must not be null")));
	idempotency_read_changes(&update, fcinfo, 4);

	check_edge_asked(&update);
	if (update.from.data != NULL)
		aim(&update, idempotency_state_datum(update.guard, update.from),
			idempotency_find_state(update.machine, update.to));
	return move(&update, fcinfo);
}

/*
 * fire(rel, id, event, changes, state_column): move a row along the edge that
 * the event names in the row's state.  The rest as transition().
 */
Datum
idempotency_fire(PG_FUNCTION_ARGS)
{
	GuardedUpdate update;
	NameRef		event;
	int			source;

	open_move(&update, fcinfo, 4);
	if (PG_ARGISNULL(2))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("event must not be null")));
	event.data = VARDATA_ANY(PG_GETARG_TEXT_PP(2));
	event.len = VARSIZE_ANY_EXHDR(PG_GETARG_TEXT_PP(2));
	update.event = idempotency_find_event(update.machine, event);
	if (update.event < 0)
		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 errmsg("machine \"%s\" has no event \"%.*s\"",
						update.guard->machine, event.len, event.data),
				 errhint("%s", idempotency_hint_events(update.machine))));
	idempotency_read_changes(&update, fcinfo, 3);

	/* If only one state has this event, no look is needed to know it. */
	source = update.machine->events[update.event].source;
	if (source >= 0)
		aim(&update,
			idempotency_state_datum(update.guard,
									update.machine->states[source].name),
			edge_of_event(&update, source)->target);
	return move(&update, fcinfo);
}

/*
 * Begin a guarded update with the table and the id in the first two arguments:
 * lock the table as an UPDATE does, and convert the id to its primary key.
 * 39P01 if a trigger of the kind that it relies on was made by hand.
 */
void
idempotency_open_update(GuardedUpdate *update, FunctionCallInfo fcinfo,
						GuardKind kind)
{
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("table and id must not be null")));
	/* in recovery, not even the table's lock can be had */
	if (RecoveryInProgress())
		read_only();

	memset(update, 0, sizeof(*update));
	update->event = -1;
	update->context = CurrentMemoryContext;
	update->rel = idempotency_open_users_table(PG_GETARG_OID(0),
											   RowExclusiveLock);
	if (XactReadOnly && !RelationUsesLocalBuffers(update->rel))
		read_only();
	/* The lock reads invalidations only if it is this transaction's first. */
	AcceptInvalidationMessages();
	update->table = idempotency_table_info(update->rel);
	idempotency_check_guards(update->rel, update->table, kind);
	if (update->table->nkeys > 0)
		read_key(update, idempotency_argument_type(fcinfo, 1),
				 PG_GETARG_DATUM(1));
}

/*
 * The columns that an argument of type jsonb sets further, and their values as
 * the columns' types take them from JSON; NULL and {} set none.  22023 if it
 * is no object or sets the guarded column, 42703 if a column does not exist,
 * and what the types say about a value.
 *
 * The values become parameters of the UPDATE, so that it names no type: the
 * caller may lack USAGE on a type's schema, as for an UPDATE by hand, and the
 * type may be renamed.
 */
void
idempotency_read_changes(GuardedUpdate *update, FunctionCallInfo fcinfo,
						 int arg)
{
	Jsonb	   *changes;
	JsonbIterator *it;
	JsonbIteratorToken token;
	JsonbValue	value;
	TupleDesc	columns;

	if (PG_ARGISNULL(arg))
		return;
	changes = PG_GETARG_JSONB_P(arg);
	if (!JB_ROOT_IS_OBJECT(changes))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("changes must be an object from columns to values"),
				 errhint("Build it with jsonb_build_object('column', value, ...).")));
	if (JB_ROOT_COUNT(changes) == 0)
		return;
	update->changed = palloc(JB_ROOT_COUNT(changes) * sizeof(AttrNumber));
	columns = CreateTemplateTupleDesc(JB_ROOT_COUNT(changes));

	it = JsonbIteratorInit(&changes->root);
	while ((token = JsonbIteratorNext(&it, &value, true)) != WJB_DONE)
	{
		char	   *name;
		AttrNumber	column;
		Form_pg_attribute attr;

		if (token != WJB_KEY)
			continue;
		name = pnstrdup(value.val.string.val, value.val.string.len);
		column = get_attnum(RelationGetRelid(update->rel), name);
		if (column <= 0)
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_COLUMN),
					 errmsg("column \"%s\" of table \"%s\" does not exist",
							name, RelationGetRelationName(update->rel)),
					 errhint("The members of changes are named for columns.")));
		if (column == update->column)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("changes cannot set column \"%s\"", name),
					 errhint("This column is what the call itself sets.")));
		update->changed[update->nchanged++] = column;
		attr = column_attr(update, column);
		TupleDescInitEntry(columns, update->nchanged, name, attr->atttypid,
						   attr->atttypmod, attr->attndims);
	}
	TupleDescFinalize(columns);

	update->changes = palloc(update->nchanged * sizeof(Datum));
	update->changes_null = palloc(update->nchanged * sizeof(bool));
	idempotency_from_json(changes, columns, update->changes,
						  update->changes_null);
}

/* Carry it out; see the head of this file.  update->current is the row's. */
UpdateOutcome
idempotency_guarded_update(GuardedUpdate *update)
{
	UpdateOutcome outcome = UPDATE_APPLIED;
	PlanKind	kind = PLAN_LOOK;

	SPI_connect();
	for (;;)
	{
		ItemPointerData tid;
		Oid			partition;

		CHECK_FOR_INTERRUPTS();
		if (update->decided && attempt(update))
			break;

		if (!look(update, kind))
		{
			outcome = UPDATE_NOT_FOUND;
			break;
		}
		if (!update->decided || !is_expected(update))
		{
			outcome = decide(update);
			if (outcome != UPDATE_APPLIED)
				break;
			continue;
		}

		tid = update->tid;
		partition = update->partition;
		if (look(update, PLAN_LOCK))
		{
			if (!is_expected(update))
				continue;
			if (!attempt(update))
				outcome = UPDATE_SUPPRESSED;
			break;
		}
		if (kind == PLAN_LOOK)
		{
			kind = PLAN_IDENTIFY;
			continue;
		}
		if (!look(update, PLAN_IDENTIFY))
		{
			outcome = UPDATE_NOT_FOUND;
			break;
		}
		if (partition == update->partition &&
			ItemPointerEquals(&tid, &update->tid))
		{
			outcome = UPDATE_NOT_PERMITTED;
			break;
		}
	}
	SPI_finish();
	return outcome;
}

Datum
idempotency_outcome_datum(UpdateOutcome outcome)
{
	return CStringGetTextDatum(outcome_names[outcome]);
}

static void
read_only(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION),
			 errmsg("cannot update a row in a read-only transaction"),
			 errhint("Call it in a read-write transaction on the primary.")));
}

/* The caller's id as values of the primary key's columns. */
static void
read_key(GuardedUpdate *update, Oid type, Datum id)
{
	const TableInfo *table = update->table;
	Jsonb	   *object;

	update->key = palloc(table->nkeys * sizeof(Datum));
	if (table->nkeys == 1 && type != JSONBOID)
	{
		update->key[0] = key_from_value(&table->keys[0], type, id);
		return;
	}
	if (table->nkeys == 1 && table->keys[0].type == JSONBOID)
	{
		update->key[0] = id;
		return;
	}

	if (type == JSONBOID)
		object = DatumGetJsonbP(id);
	else
	{
		Oid			output;
		bool		isvarlena;

		getTypeOutputInfo(type, &output, &isvarlena);
		object = DatumGetJsonbP(DirectFunctionCall1(jsonb_in,
													CStringGetDatum(OidOutputFunctionCall(output, id))));
	}

	if (table->nkeys == 1 && JB_ROOT_IS_SCALAR(object))
	{
		update->key[0] = key_from_json(&table->keys[0],
									   getIthJsonbValueFromContainer(&object->root, 0));
		return;
	}
	if (!JB_ROOT_IS_OBJECT(object) || JB_ROOT_COUNT(object) != table->nkeys)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("id must be an object with the columns of the primary key of table \"%s\"",
						RelationGetRelationName(update->rel)),
				 errhint("It is like %s.", example_of_id(update))));
	for (int i = 0; i < table->nkeys; i++)
	{
		const char *name = column_name(update, table->keys[i].column);
		JsonbValue *value = getKeyJsonValueFromContainer(&object->root, name,
														 strlen(name), NULL);

		if (value == NULL)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("id has no member \"%s\"", name),
					 errhint("The members of id are the columns of the primary key.")));
		update->key[i] = key_from_json(&table->keys[i], value);
	}
}

/* For a hint: the members that an id must have, as in {"a": ..., "b": ...}. */
static char *
example_of_id(const GuardedUpdate *update)
{
	StringInfoData buf;

	initStringInfo(&buf);
	for (int i = 0; i < update->table->nkeys; i++)
	{
		appendStringInfoString(&buf, i == 0 ? "{" : ", ");
		escape_json(&buf, column_name(update, update->table->keys[i].column));
		appendStringInfoString(&buf, ": ...");
	}
	appendStringInfoChar(&buf, '}');
	return buf.data;
}

/* A value of any type as one of the key's type, through text if need be. */
static Datum
key_from_value(const KeyColumn *key, Oid type, Datum value)
{
	char	   *string;

	if (type == key->type || getBaseType(type) == key->type)
		return value;
	if (type == INT4OID && key->type == INT8OID)
		return Int64GetDatum(DatumGetInt32(value));
	if (type == TEXTOID)
		string = TextDatumGetCString(value);
	else
	{
		Oid			output;
		bool		isvarlena;

		getTypeOutputInfo(type, &output, &isvarlena);
		string = OidOutputFunctionCall(output, value);
	}
	return InputFunctionCall(unconstify(FmgrInfo *, &key->input), string,
							 key->ioparam, -1);
}

/* A JSON scalar as a value of the key's type. */
static Datum
key_from_json(const KeyColumn *key, const JsonbValue *value)
{
	char	   *string;

	switch (value->type)
	{
		case jbvString:
			string = pnstrdup(value->val.string.val, value->val.string.len);
			break;
		case jbvNumeric:
			string = DatumGetCString(DirectFunctionCall1(numeric_out,
														 NumericGetDatum(value->val.numeric)));
			break;
		case jbvBool:
			string = value->val.boolean ? "true" : "false";
			break;
		case jbvNull:
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("id must not contain null")));
			break;
		default:
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("id must not contain an array or an object")));
	}
	return InputFunctionCall(unconstify(FmgrInfo *, &key->input), string,
							 key->ioparam, -1);
}

/*
 * Begin a move: the table, the id, and the machine of the state column named
 * in argument arg, which may be NULL if the table has only one machine.
 */
static void
open_move(GuardedUpdate *update, FunctionCallInfo fcinfo, int arg)
{
	const TableInfo *table;

	idempotency_open_update(update, fcinfo, GUARD_STATE);
	table = update->table;
	if (!PG_ARGISNULL(arg))
	{
		char	   *name = NameStr(*PG_GETARG_NAME(arg));
		AttrNumber	column = get_attnum(RelationGetRelid(update->rel), name);

		if (column <= 0)
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_COLUMN),
					 errmsg("column \"%s\" of table \"%s\" does not exist",
							name, RelationGetRelationName(update->rel)),
					 errhint("state_column names the column that a machine is attached to.")));
		update->guard = idempotency_guard_of(table, column);
	}
	else if (table->nguards > 1)
		ereport(ERROR,
				(errcode(ERRCODE_AMBIGUOUS_COLUMN),
				 errmsg("several machines are attached to table \"%s\"",
						RelationGetRelationName(update->rel)),
				 errhint("Name the column in state_column.")));
	else if (table->nguards == 1)
		update->guard = &table->guards[0];
	if (update->guard == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNKNOWN_MACHINE),
				 errmsg("no machine is attached to %s \"%s\"",
						PG_ARGISNULL(arg) ? "table" : "that column of table",
						RelationGetRelationName(update->rel)),
				 errhint("Attach one with idempotency.attach_machine().")));
	if (table->nkeys == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_COLUMN_REFERENCE),
				 errmsg("table \"%s\" has no primary key",
						RelationGetRelationName(update->rel)),
				 errhint("Add a primary key: rows are told apart by it.")));
	update->column = update->guard->column;
	update->type = update->guard->type;
	update->machine = idempotency_find_machine(update->guard->machine);
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
	return idempotency_state_name(guard->kind == STATE_ENUM ? STATE_TEXT : guard->kind,
								  PG_GETARG_DATUM(arg));
}

/* Refuse, before any write, a move that is not on the graph. */
static void
check_edge_asked(const GuardedUpdate *update)
{
	const Machine *machine = update->machine;
	int			to = idempotency_find_state(machine, update->to);
	int			from = -1;
	NameRef		unknown = {NULL, 0};

	if (update->from.data != NULL)
	{
		from = idempotency_find_state(machine, update->from);
		if (from < 0)
			unknown = update->from;
	}
	if (to < 0)
		unknown = update->to;
	if (unknown.data != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 errmsg("machine \"%s\" has no state \"%.*s\"",
						update->guard->machine, unknown.len, unknown.data),
				 errhint("%s", idempotency_hint_states(machine, false))));
	if (update->from.data != NULL && !idempotency_has_edge(machine, from, to))
		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 errmsg("machine \"%s\" has no edge from state \"%.*s\" to state \"%.*s\"",
						update->guard->machine,
						update->from.len, update->from.data,
						update->to.len, update->to.data),
				 errhint("%s", idempotency_hint_edges(machine, from))));
	if (update->from.data == NULL && bms_is_empty(machine->states[to].sources))
		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 errmsg("machine \"%s\" has no edge to state \"%.*s\"",
						update->guard->machine,
						update->to.len, update->to.data),
				 errhint("The state is initial: a row can only begin in it.")));
}

/* Decide what to try: from an expected state to a target. */
static void
aim(GuardedUpdate *update, Datum expected, int target)
{
	update->expected = expected;
	update->target = idempotency_state_datum(update->guard,
											 update->machine->states[target].name);
	update->decided = true;
}

/* Move the row and report: (outcome, applied, from_state, state). */
static Datum
move(GuardedUpdate *update, FunctionCallInfo fcinfo)
{
	static const Oid types[4] = {TEXTOID, BOOLOID, TEXTOID, TEXTOID};
	UpdateOutcome outcome = idempotency_guarded_update(update);
	Datum		values[4];
	bool		nulls[4] = {false, false, true, true};

	values[0] = idempotency_outcome_datum(outcome);
	values[1] = BoolGetDatum(outcome == UPDATE_APPLIED);
	if (outcome == UPDATE_APPLIED)
	{
		values[2] = PointerGetDatum(name_as_text(datum_name(update, update->expected)));
		nulls[2] = false;
	}
	if (outcome != UPDATE_NOT_FOUND)
	{
		values[3] = PointerGetDatum(name_as_text(datum_name(update, update->current)));
		nulls[3] = false;
	}
	table_close(update->rel, NoLock);
	return idempotency_result(fcinfo, lengthof(types), types, values, nulls);
}

/*
 * The row was seen, and it is not as the last attempt expected it.  Applied
 * means: try again, expected and target are set.
 */
static UpdateOutcome
decide(GuardedUpdate *update)
{
	return update->guard == NULL ? UPDATE_CONFLICT : decide_move(update);
}

static UpdateOutcome
decide_move(GuardedUpdate *update)
{
	const Machine *machine = update->machine;
	NameRef		name = {NULL, 0};
	int			state;

	if (update->isnull)
		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 errmsg("the row has a null state in column \"%s\"",
						column_name(update, update->column)),
				 errhint("%s", idempotency_hint_edges(machine, -1))));
	name = datum_name(update, update->current);
	if (update->from.data != NULL)
		return same_name(name, update->to) ? UPDATE_ALREADY : UPDATE_CONFLICT;

	state = idempotency_find_state(machine, name);
	if (state < 0)
		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 errmsg("the row is in state \"%.*s\", which machine \"%s\" does not know",
						name.len, name.data, update->guard->machine),
				 errhint("%s", idempotency_hint_edges(machine, -1))));
	if (update->event >= 0)
	{
		const MachineEdge *edge = edge_of_event(update, state);

		if (edge == NULL)
			return bms_is_member(state, machine->events[update->event].targets) ?
				UPDATE_ALREADY : UPDATE_CONFLICT;
		aim(update, update->current, edge->target);
		return UPDATE_APPLIED;
	}

	/* From any state: a retry must not move again along a self-loop. */
	if (same_name(name, update->to))
		return UPDATE_ALREADY;
	if (!idempotency_has_edge(machine, state,
							  idempotency_find_state(machine, update->to)))
		return UPDATE_CONFLICT;
	aim(update, update->current, idempotency_find_state(machine, update->to));
	return UPDATE_APPLIED;
}

/* The edge that the event names in that state, or NULL. */
static const MachineEdge *
edge_of_event(const GuardedUpdate *update, int state)
{
	const MachineState *from = &update->machine->states[state];

	for (int i = 0; i < from->nedges; i++)
		if (from->edges[i].event == update->event)
			return &from->edges[i];
	return NULL;
}

/* Is the row, as last seen, as the attempt expects it? */
static bool
is_expected(const GuardedUpdate *update)
{
	if (update->isnull)
		return false;
	if (update->guard == NULL)
		return DatumGetInt64(update->current) == DatumGetInt64(update->expected);
	return same_name(datum_name(update, update->current),
					 datum_name(update, update->expected));
}

/* One UPDATE.  True: it updated the row, and the row is as it should be. */
static bool
attempt(GuardedUpdate *update)
{
	AskedMove	asked;

	if (update->guard == NULL)
		execute(update, PLAN_UPDATE, NULL);
	else
	{
		/* what SPI does anyway, early enough for us to know the number */
		CommandCounterIncrement();
		asked.command = GetCurrentCommandId(false);
		asked.column = column_name(update, update->column);
		asked.target = datum_name(update, update->target);
		asked.event = update->event < 0 ? NULL :
			pnstrdup(update->machine->events[update->event].name.data,
					 update->machine->events[update->event].name.len);
		execute(update, PLAN_UPDATE, &asked);
	}
	if (SPI_processed > 1)
		ereport(ERROR,
				(errcode(ERRCODE_CARDINALITY_VIOLATION),
				 errmsg("more than one row of table \"%s\" has this id",
						RelationGetRelationName(update->rel)),
				 errhint("A primary key does not reach over tables that inherit from this one.")));
	if (SPI_processed == 0)
		return false;
	if (update->guard != NULL)
		check_stored(update);
	return true;
}

/* One SELECT, locking or not.  False: no row, or row security hides it. */
static bool
look(GuardedUpdate *update, PlanKind kind)
{
	bool		isnull;

	execute(update, kind, NULL);
	if (SPI_processed == 0)
		return false;
	if (kind == PLAN_IDENTIFY)
	{
		update->tid = *(ItemPointer) DatumGetPointer(SPI_getbinval(SPI_tuptable->vals[0],
																   SPI_tuptable->tupdesc,
																   2, &isnull));
		update->partition = DatumGetObjectId(SPI_getbinval(SPI_tuptable->vals[0],
														   SPI_tuptable->tupdesc, 3,
														   &isnull));
	}
	SPI_freetuptable(SPI_tuptable);
	return true;
}

/* One row was updated: that is success only if it shows the target. */
static void
check_stored(const GuardedUpdate *update)
{
	NameRef		target = datum_name(update, update->target);
	NameRef		stored = {NULL, 0};

	if (!update->isnull)
		stored = datum_name(update, update->current);
	if (!same_name(stored, target))
		ereport(ERROR,
				(errcode(ERRCODE_STATE_REWRITTEN),
				 errmsg("a trigger stored another state than \"%.*s\"",
						target.len, target.data),
				 stored.data == NULL ? errdetail("It stored null.") :
				 errdetail("It stored \"%.*s\".", stored.len, stored.data),
				 errhint("Mend the trigger, or ask for the state that it stores.")));
}

/* Run a kept plan; the first column of its row becomes update->current. */
static void
execute(GuardedUpdate *update, PlanKind kind, const AskedMove *asked)
{
	int			nkeys = update->table->nkeys;
	int			nargs = nkeys + 2 + update->nchanged;
	Datum	   *values = palloc(nargs * sizeof(Datum));
	char	   *nulls = palloc(nargs);
	int			result;

	Assert(update->key != NULL);
	/* what is not given is null, used or not: extensions log the parameters */
	memset(nulls, ' ', nargs);
	if (!update->decided)
		nulls[nkeys] = nulls[nkeys + 1] = 'n';
	memcpy(values, update->key, nkeys * sizeof(Datum));
	values[nkeys] = update->expected;
	values[nkeys + 1] = update->target;
	for (int i = 0; i < update->nchanged; i++)
	{
		values[nkeys + 2 + i] = update->changes[i];
		if (update->changes_null[i])
			nulls[nkeys + 2 + i] = 'n';
	}

	result = run_plan(get_plan(update, kind), values, nulls, asked);
	if (result < 0)
		elog(ERROR, "SPI_execute_plan failed: %s",
			 SPI_result_code_string(result));

	if (SPI_processed > 0)
	{
		Form_pg_attribute attr = TupleDescAttr(SPI_tuptable->tupdesc, 0);
		MemoryContext old = MemoryContextSwitchTo(update->context);

		update->current = SPI_getbinval(SPI_tuptable->vals[0],
										SPI_tuptable->tupdesc, 1,
										&update->isnull);
		if (!update->isnull)
			update->current = datumCopy(update->current, attr->attbyval,
										attr->attlen);
		MemoryContextSwitchTo(old);
	}
}

/* The innermost asked move is known while the statement runs, triggers and all. */
static int
run_plan(KeptPlan *kept, Datum *values, const char *nulls,
		 const AskedMove *asked)
{
	const AskedMove *outer = idempotency_asked_move;
	int			result = 0;

	kept->running++;
	idempotency_asked_move = asked;
	PG_TRY();
	{
		result = SPI_execute_plan(kept->plan, values, nulls, false, 0);
	}
	PG_FINALLY();
	{
		idempotency_asked_move = outer;
		kept->running--;
	}
	PG_END_TRY();
	return result;
}

/*
 * The kept plan for this update.  One that an invalidation has hit is built
 * again from its text, which has names in it, by which other columns may go
 * by now.  Even so if it is running up the stack: a table that is in use cannot
 * be altered, but renamed it can be, and so can its columns.  That one is freed
 * when it is met again after it has run.
 */
static KeptPlan *
get_plan(GuardedUpdate *update, PlanKind kind)
{
	PlanKey		key = {RelationGetRelid(update->rel), update->column, kind};
	int			nchanged = kind == PLAN_UPDATE ? update->nchanged : 0;
	CachedPlans *entry;
	KeptPlan  **link;
	KeptPlan   *kept;
	SPIPlanPtr	plan;
	int			count = 0;
	bool		found;

	if (plan_cache == NULL)
	{
		HASHCTL		ctl = {.keysize = sizeof(PlanKey),.entrysize = sizeof(CachedPlans)};

		plan_cache = hash_create("idempotency plans", 16, &ctl,
								 HASH_ELEM | HASH_BLOBS);
	}
	entry = hash_search(plan_cache, &key, HASH_ENTER, &found);
	if (!found)
		entry->plans = NULL;

	for (link = &entry->plans; (kept = *link) != NULL;)
	{
		bool		same = kept->nchanged == nchanged &&
		(nchanged == 0 ||
		 memcmp(kept->changed, update->changed, nchanged * sizeof(AttrNumber)) == 0);

		if (same && SPI_plan_is_valid(kept->plan))
			return kept;
		if (kept->running == 0 && (same || ++count >= MAX_PLANS))
		{
			*link = kept->next;
			SPI_freeplan(kept->plan);
			pfree(kept);
		}
		else
			link = &kept->next;
	}

	/* what may fail comes first */
	plan = build_plan(update, kind);
	kept = MemoryContextAlloc(TopMemoryContext,
							  offsetof(KeptPlan, changed) + nchanged * sizeof(AttrNumber));
	SPI_keepplan(plan);
	kept->plan = plan;
	kept->running = 0;
	kept->nchanged = nchanged;
	if (nchanged > 0)
		memcpy(kept->changed, update->changed, nchanged * sizeof(AttrNumber));
	kept->next = entry->plans;
	entry->plans = kept;
	return kept;
}

/*
 * The statements.  Their parameters: the key's columns, then the expected
 * state, the target and the changes.
 */
static SPIPlanPtr
build_plan(GuardedUpdate *update, PlanKind kind)
{
	const TableInfo *table = update->table;
	int			n = table->nkeys;
	int			nchanged = kind == PLAN_UPDATE ? update->nchanged : 0;
	const char *column = quote_identifier(column_name(update, update->column));
	Oid		   *types = palloc((n + 2 + nchanged) * sizeof(Oid));
	StringInfoData buf;
	SPIPlanPtr	plan;

	for (int i = 0; i < n; i++)
		types[i] = table->keys[i].type;
	types[n] = types[n + 1] = update->type;

	initStringInfo(&buf);
	if (kind == PLAN_UPDATE)
	{
		appendStringInfo(&buf, "UPDATE %s AS t SET %s = $%d",
						 idempotency_quoted_name(update->rel), column, n + 2);
		for (int i = 0; i < nchanged; i++)
		{
			types[n + 2 + i] = column_attr(update, update->changed[i])->atttypid;
			appendStringInfo(&buf, ", %s = $%d",
							 quote_identifier(column_name(update, update->changed[i])),
							 n + 3 + i);
		}
		append_where(&buf, update);

		/*
		 * A domain over an enum finds no operator of the enum's.  Not a cast to
		 * text: an enum's owner may have made one of its own.
		 */
		appendStringInfo(&buf,
						 update->guard != NULL &&
						 update->guard->kind == STATE_ENUM &&
						 column_attr(update, update->column)->atttypid != update->type ?
						 " AND pg_catalog.format('%%s', t.%s) OPERATOR(pg_catalog.=) pg_catalog.format('%%s', $%d)" :
						 " AND t.%s OPERATOR(pg_catalog.=) $%d",
						 column, n + 1);
		appendStringInfo(&buf, " RETURNING t.%s", column);
	}
	else
	{
		appendStringInfo(&buf, "SELECT t.%s%s FROM %s AS t", column,
						 kind == PLAN_IDENTIFY ? ", t.ctid, t.tableoid" : "",
						 idempotency_quoted_name(update->rel));
		append_where(&buf, update);
		if (kind == PLAN_LOCK)
			appendStringInfoString(&buf, " FOR NO KEY UPDATE OF t");
	}

	plan = SPI_prepare(buf.data, n + 2 + nchanged, types);
	if (plan == NULL)
		elog(ERROR, "SPI_prepare failed: %s: %s",
			 SPI_result_code_string(SPI_result), buf.data);
	pfree(buf.data);
	pfree(types);
	return plan;
}

static void
append_where(StringInfo buf, const GuardedUpdate *update)
{
	for (int i = 0; i < update->table->nkeys; i++)
	{
		const KeyColumn *key = &update->table->keys[i];
		char	   *column = psprintf("t.%s", quote_identifier(column_name(update, key->column)));

		appendStringInfoString(buf, i == 0 ? " WHERE " : " AND ");
		idempotency_append_equality(buf, column, key->equality,
									psprintf("$%d", i + 1),
									column_attr(update, key->column)->atttypid);
	}
}

static Form_pg_attribute
column_attr(const GuardedUpdate *update, AttrNumber column)
{
	return TupleDescAttr(RelationGetDescr(update->rel), column - 1);
}

static const char *
column_name(const GuardedUpdate *update, AttrNumber column)
{
	return NameStr(column_attr(update, column)->attname);
}

/* A state of this column as a name. */
static NameRef
datum_name(const GuardedUpdate *update, Datum state)
{
	return idempotency_state_name(update->guard->kind, state);
}

static bool
same_name(NameRef a, NameRef b)
{
	return a.data != NULL && b.data != NULL && a.len == b.len &&
		memcmp(a.data, b.data, a.len) == 0;
}

static text *
name_as_text(NameRef name)
{
	return cstring_to_text_with_len(name.data, name.len);
}
