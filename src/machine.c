/*-------------------------------------------------------------------------
 *
 * machine.c
 *		State machines: their definitions, checked, stored, cached and drawn.
 *
 * A definition is stored as the caller gave it, and parsed into a Machine once
 * per backend.  A trigger on the table of definitions sends a relcache
 * invalidation of that table with every change; the callback marks the cache
 * stale, in this session and all others, also after a rollback or a restore.
 *
 *-------------------------------------------------------------------------
 */
#include "idempotency.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_trigger.h"
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "executor/spi.h"
#include "machine.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

/* columns of idempotency.machines */
#define ANUM_MACHINES_NAME			1
#define ANUM_MACHINES_DEFINITION	2

/* how many names a hint lists */
#define HINTED_NAMES				10

/* from a name to its place in an array */
typedef struct NameEntry
{
	NameRef		name;
	int			index;
	uint32		hash;
	char		status;
} NameEntry;

#define SH_PREFIX names
#define SH_ELEMENT_TYPE NameEntry
#define SH_KEY_TYPE NameRef
#define SH_KEY name
#define SH_HASH_KEY(tb, key) \
	hash_bytes((const unsigned char *) (key).data, (key).len)
#define SH_EQUAL(tb, a, b) \
	((a).len == (b).len && memcmp((a).data, (b).data, (a).len) == 0)
#define SH_STORE_HASH
#define SH_GET_HASH(tb, a) (a)->hash
#define SH_SCOPE static inline
#define SH_DECLARE
#define SH_DEFINE
#include "lib/simplehash.h"

/* the cache: from a machine's name to what was parsed */
typedef struct CachedMachine
{
	char		name[MAX_NAME + 1];
	Machine    *machine;
} CachedMachine;

static MemoryContext machines_context = NULL;
static HTAB *machines = NULL;
static bool machines_valid = false;
static Oid	machines_relid = InvalidOid;

PG_FUNCTION_INFO_V1(idempotency_define_machine);
PG_FUNCTION_INFO_V1(idempotency_drop_machine);
PG_FUNCTION_INFO_V1(idempotency_machine_diagram);
PG_FUNCTION_INFO_V1(idempotency_machines_changed);

static char *name_argument(FunctionCallInfo fcinfo);
static void write_as_owner(Relation rel, const char *command, int nargs,
						   Oid *types, Datum *values);
static void refuse_if_attached(const char *name);
static Machine *load_machine(const char *name);
static void forget_machines(Datum arg, Oid relid);
static Machine *parse_machine(JsonbContainer *definition);
static void parse_initial(Machine *machine, JsonbContainer *definition);
static void parse_transitions(Machine *machine, JsonbContainer *transitions);
static void add_edge(Machine *machine, int source, const JsonbValue *event,
					 const JsonbValue *target);
static int	intern_state(Machine *machine, const JsonbValue *name);
static int	intern_event(Machine *machine, const JsonbValue *name);
static NameRef checked_name(const char *kind, const JsonbValue *value);
static bool is_object(const JsonbValue *value);
static bool is_array(const JsonbValue *value);
static void check_graph(const Machine *machine, bool cyclic);
static Bitmapset *reachable(const Machine *machine, Bitmapset *from);
static void append_state_id(StringInfo buf, const Machine *machine, int state);
static bool plain_in_mermaid(const Machine *machine, int state);
static void append_escaped(StringInfo buf, NameRef name);
static void append_name(StringInfo list, int n, NameRef name);
pg_noreturn static void invalid_definition(const char *detail);

/*
 * define_machine(name, definition, cyclic): store a machine, or replace it.
 * Nothing may be NULL.  Refused with 22023: a malformed definition, an initial
 * state that no edge touches, states that no row can reach, and a way back to a
 * state that was left unless cyclic.
 */
Datum
idempotency_define_machine(PG_FUNCTION_ARGS)
{
	char	   *name = name_argument(fcinfo);
	Datum		values[3];
	Oid			types[3] = {TEXTOID, JSONBOID, BOOLOID};
	Relation	rel;

	if (PG_ARGISNULL(1) || PG_ARGISNULL(2))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("definition and cyclic must not be null")));
	check_graph(parse_machine(&PG_GETARG_JSONB_P(1)->root),
				PG_GETARG_BOOL(2));
	idempotency_refuse_to_write("idempotency.define_machine()");

	values[0] = CStringGetTextDatum(name);
	values[1] = PG_GETARG_DATUM(1);
	values[2] = PG_GETARG_DATUM(2);
	rel = table_open(idempotency_own_relation("machines"), RowExclusiveLock);
	write_as_owner(rel,
				   "INSERT INTO idempotency.machines AS m (name, definition, cyclic)"
				   " VALUES ($1, $2, $3)"
				   " ON CONFLICT (name) DO UPDATE"
				   " SET definition = EXCLUDED.definition, cyclic = EXCLUDED.cyclic",
				   3, types, values);
	table_close(rel, NoLock);
	PG_RETURN_VOID();
}

/*
 * drop_machine(name): remove it; refused with 2BP01 while it is attached.
 *
 * The lock keeps attach_machine() out until we commit, and waits for one that
 * is under way: it holds ROW SHARE until its own commit.
 */
Datum
idempotency_drop_machine(PG_FUNCTION_ARGS)
{
	char	   *name = name_argument(fcinfo);
	Datum		values[1] = {CStringGetTextDatum(name)};
	Oid			types[1] = {TEXTOID};
	Relation	rel;

	idempotency_refuse_to_write("idempotency.drop_machine()");
	rel = table_open(idempotency_own_relation("machines"), ExclusiveLock);
	idempotency_find_machine(name);
	refuse_if_attached(name);
	write_as_owner(rel,
				   "DELETE FROM idempotency.machines m"
				   " WHERE m.name OPERATOR(pg_catalog.=) $1",
				   1, types, values);
	table_close(rel, NoLock);
	PG_RETURN_VOID();
}

/*
 * machine_diagram(name): the graph as a Mermaid state diagram, from the
 * initial states outwards.  Error: IK007, no such machine.
 */
Datum
idempotency_machine_diagram(PG_FUNCTION_ARGS)
{
	const Machine *machine = idempotency_find_machine(name_argument(fcinfo));
	int		   *order = palloc(machine->nstates * sizeof(int));
	Bitmapset  *seen = NULL;
	int			n = 0;
	StringInfoData buf;

	for (int i = 0; i < machine->nstates; i++)
		if (machine->states[i].initial)
		{
			seen = bms_add_member(seen, i);
			order[n++] = i;
		}
	for (int i = 0; i < n; i++)
	{
		const MachineState *state = &machine->states[order[i]];

		for (int e = 0; e < state->nedges; e++)
			if (!bms_is_member(state->edges[e].target, seen))
			{
				seen = bms_add_member(seen, state->edges[e].target);
				order[n++] = state->edges[e].target;
			}
	}

	initStringInfo(&buf);
	appendStringInfoString(&buf, "stateDiagram-v2\n");
	for (int i = 0; i < n; i++)
	{
		if (plain_in_mermaid(machine, order[i]))
			continue;
		appendStringInfoString(&buf, "    state \"");
		append_escaped(&buf, machine->states[order[i]].name);
		appendStringInfoString(&buf, "\" as ");
		append_state_id(&buf, machine, order[i]);
		appendStringInfoChar(&buf, '\n');
	}
	for (int i = 0; i < n; i++)
		if (machine->states[order[i]].initial)
		{
			appendStringInfoString(&buf, "    [*] --> ");
			append_state_id(&buf, machine, order[i]);
			appendStringInfoChar(&buf, '\n');
		}
	for (int i = 0; i < n; i++)
	{
		const MachineState *state = &machine->states[order[i]];

		for (int e = 0; e < state->nedges; e++)
		{
			appendStringInfoString(&buf, "    ");
			append_state_id(&buf, machine, order[i]);
			appendStringInfoString(&buf, " --> ");
			append_state_id(&buf, machine, state->edges[e].target);
			if (state->edges[e].event >= 0)
			{
				appendStringInfoString(&buf, ": ");
				append_escaped(&buf,
							   machine->events[state->edges[e].event].name);
			}
			appendStringInfoChar(&buf, '\n');
		}
		if (state->nedges == 0)
		{
			appendStringInfoString(&buf, "    ");
			append_state_id(&buf, machine, order[i]);
			appendStringInfoString(&buf, " --> [*]\n");
		}
	}
	PG_RETURN_TEXT_P(cstring_to_text_with_len(buf.data, buf.len));
}

/*
 * Tell every session that the definitions have changed.
 *
 *		CREATE TRIGGER ... AFTER INSERT OR UPDATE OR DELETE
 *		ON idempotency.machines FOR EACH ROW
 *		EXECUTE FUNCTION idempotency.machines_changed()
 *
 * and the same for TRUNCATE, for each statement.  ENABLE ALWAYS, since a
 * restore or a subscription may run as a replica.
 */
Datum
idempotency_machines_changed(PG_FUNCTION_ARGS)
{
	return idempotency_announce_change(fcinfo, "machines");
}

/*
 * The machine of that name, from the cache or the table; IK007 if there is
 * none.  Good until the end of the transaction.  The newest committed
 * definition counts, whatever the caller's snapshot, also for a transaction
 * that began before.
 */
const Machine *
idempotency_find_machine(const char *name)
{
	CachedMachine *cached;
	bool		found;

	AcceptInvalidationMessages();
	if (!machines_valid)
	{
		HASHCTL		ctl = {.keysize = MAX_NAME + 1,.entrysize = sizeof(CachedMachine)};

		static bool registered = false;

		if (!registered)
			CacheRegisterRelcacheCallback(forget_machines, (Datum) 0);
		registered = true;
		if (machines_context != NULL)
			MemoryContextSetParent(machines_context, TopTransactionContext);
		machines_context = NULL;

		machines_relid = idempotency_own_relation("machines");
		machines_context = AllocSetContextCreate(CacheMemoryContext,
												 "idempotency machines",
												 ALLOCSET_SMALL_SIZES);
		ctl.hcxt = machines_context;
		machines = hash_create("idempotency machines", 16, &ctl,
							   HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);

		/* An invalidation that comes while we read must not be lost. */
		machines_valid = true;
	}

	if (strlen(name) > MAX_NAME)
		cached = NULL;
	else
		cached = hash_search(machines, name, HASH_FIND, NULL);
	if (cached == NULL)
	{
		Machine    *machine = load_machine(name);

		cached = hash_search(machines, name, HASH_ENTER, &found);
		cached->machine = machine;
	}
	return cached->machine;
}

/* A state's number, or -1 if the machine does not know it. */
int
idempotency_find_state(const Machine *machine, NameRef name)
{
	NameEntry  *entry = names_lookup(machine->state_index, name);

	return entry ? entry->index : -1;
}

/* An event's number, or -1 if the machine does not know it. */
int
idempotency_find_event(const Machine *machine, NameRef name)
{
	NameEntry  *entry = names_lookup(machine->event_index, name);

	return entry ? entry->index : -1;
}

/* Is there an edge?  Either number may be -1: then there is none. */
bool
idempotency_has_edge(const Machine *machine, int from, int to)
{
	return from >= 0 && to >= 0 &&
		bms_is_member(to, machine->states[from].targets);
}

/* The first argument as a machine's name; 22004 and 22023 as for any name. */
static char *
name_argument(FunctionCallInfo fcinfo)
{
	text	   *name;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("name of the machine must not be null")));
	name = PG_GETARG_TEXT_PP(0);
	if (VARSIZE_ANY_EXHDR(name) == 0 || VARSIZE_ANY_EXHDR(name) > MAX_NAME)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("name of the machine must have 1 to %d bytes",
						MAX_NAME)));
	return text_to_cstring(name);
}

/*
 * Run a command on our table as its owner: EXECUTE on the calling function is
 * the gate, nobody else has rights on the table.  The arguments are of built-in
 * types, so that no code of the caller's runs meanwhile.
 */
static void
write_as_owner(Relation rel, const char *command, int nargs, Oid *types,
			   Datum *values)
{
	SavedUser	caller;

	SPI_connect();
	idempotency_become_owner(rel, 0, &caller);
	if (SPI_execute_with_args(command, nargs, types, values, NULL, false, 0) < 0)
		elog(ERROR, "could not write to table \"%s\"",
			 RelationGetRelationName(rel));
	idempotency_become_caller(&caller);
	SPI_finish();
}

/* Refuse to drop a machine that a guard names, whoever's the table is. */
static void
refuse_if_attached(const char *name)
{
	Oid			function = idempotency_trigger_function("guard_state");
	Relation	rel = table_open(TriggerRelationId, AccessShareLock);
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, NULL, 0, NULL);
	HeapTuple	tuple;

	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_trigger trigger = (Form_pg_trigger) GETSTRUCT(tuple);
		bool		isnull;
		Datum		args;

		if (trigger->tgfoid != function || trigger->tgnargs < 1)
			continue;
		args = fastgetattr(tuple, Anum_pg_trigger_tgargs,
						   RelationGetDescr(rel), &isnull);
		/* the arguments follow each other, each with its zero byte */
		if (!isnull && strcmp(VARDATA_ANY(DatumGetByteaPP(args)), name) == 0)
			ereport(ERROR,
					(errcode(ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST),
					 errmsg("cannot drop machine \"%s\" because it is attached",
							name),
					 errdetail("It is attached to table %s.",
							   quote_qualified_identifier(get_namespace_name(get_rel_namespace(trigger->tgrelid)),
														  get_rel_name(trigger->tgrelid))),
					 errhint("Call idempotency.detach_machine() for each table first.")));
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
}

/*
 * Read and parse one definition, into the cache's memory.  A few rows, once
 * per backend: no index.
 */
static Machine *
load_machine(const char *name)
{
	Relation	rel = table_open(machines_relid, AccessShareLock);
	TupleDesc	desc = RelationGetDescr(rel);
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	MemoryContext context;
	Machine    *machine = NULL;
	SysScanDesc scan;
	ScanKeyData key;
	HeapTuple	tuple;

	if (desc->natts < ANUM_MACHINES_DEFINITION ||
		TupleDescAttr(desc, ANUM_MACHINES_NAME - 1)->atttypid != TEXTOID ||
		TupleDescAttr(desc, ANUM_MACHINES_DEFINITION - 1)->atttypid != JSONBOID)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table idempotency.machines is not as the extension made it"),
				 errhint("Take back what was altered, or create the extension again.")));

	context = AllocSetContextCreate(CurrentMemoryContext, "idempotency machine",
									ALLOCSET_SMALL_SIZES);
	ScanKeyEntryInitialize(&key, 0, ANUM_MACHINES_NAME, BTEqualStrategyNumber,
						   TEXTOID, C_COLLATION_OID, F_TEXTEQ,
						   CStringGetTextDatum(name));
	scan = systable_beginscan(rel, InvalidOid, false, snapshot, 1, &key);
	tuple = systable_getnext(scan);
	if (HeapTupleIsValid(tuple))
	{
		bool		isnull;
		Datum		definition = heap_getattr(tuple, ANUM_MACHINES_DEFINITION,
											  desc, &isnull);
		MemoryContext old = MemoryContextSwitchTo(context);

		machine = parse_machine(&DatumGetJsonbPCopy(definition)->root);
		MemoryContextSwitchTo(old);
	}
	systable_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);

	if (machine == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNKNOWN_MACHINE),
				 errmsg("machine \"%s\" does not exist", name),
				 errhint("Define it with idempotency.define_machine().")));
	MemoryContextSetParent(context, machines_context);
	return machine;
}

/* For a hint: the moves from a state; -1 is one that the machine lacks. */
char *
idempotency_hint_edges(const Machine *machine, int state)
{
	const MachineState *from;
	StringInfoData buf;

	if (state < 0)
		return "Find such rows with idempotency.off_graph(). Then add their states to the machine, or detach it to correct them.";
	from = &machine->states[state];
	if (from->nedges == 0)
		return psprintf("State \"%.*s\" is final: no edge leaves it.",
						from->name.len, from->name.data);
	initStringInfo(&buf);
	appendStringInfo(&buf, "From state \"%.*s\" a row can move to ",
					 from->name.len, from->name.data);
	for (int i = 0; i < from->nedges; i++)
	{
		const MachineEdge *edge = &from->edges[i];

		append_name(&buf, i, machine->states[edge->target].name);
		if (edge->event >= 0 && i < HINTED_NAMES)
			appendStringInfo(&buf, " (event \"%.*s\")",
							 machine->events[edge->event].name.len,
							 machine->events[edge->event].name.data);
	}
	appendStringInfoChar(&buf, '.');
	return buf.data;
}

/* For a hint: the machine's states, or those in which a row can begin. */
char *
idempotency_hint_states(const Machine *machine, bool initial)
{
	StringInfoData buf;
	int			n = 0;

	initStringInfo(&buf);
	for (int i = 0; i < machine->nstates; i++)
		if (machine->states[i].initial || !initial)
			append_name(&buf, n++, machine->states[i].name);
	return psprintf(initial ?
					"Insert it in an initial state (%s) and move it along the machine's edges." :
					"Its states are %s. To add one, define it again with idempotency.define_machine().",
					buf.data);
}

/* For a hint: the machine's events. */
char *
idempotency_hint_events(const Machine *machine)
{
	StringInfoData buf;

	if (machine->nevents == 0)
		return "Its edges have no events: use idempotency.transition(), or name them with idempotency.define_machine().";
	initStringInfo(&buf);
	for (int i = 0; i < machine->nevents; i++)
		append_name(&buf, i, machine->events[i].name);
	return psprintf("Its events are %s. To add one, define it again with idempotency.define_machine().",
					buf.data);
}

/* Relcache callback: marks, and neither frees nor looks anything up. */
static void
forget_machines(Datum arg, Oid relid)
{
	if (!OidIsValid(relid) || relid == machines_relid)
		machines_valid = false;
}

/*
 * A definition as a Machine, in the current memory context; names point into
 * the definition.  22023 if it is not of the form
 *
 *		{"initial": "A", "transitions": {"A": {"event": "B"}, "B": ["C"]}}
 */
static Machine *
parse_machine(JsonbContainer *definition)
{
	Machine    *machine = palloc0(sizeof(Machine));
	JsonbIterator *it;
	JsonbIteratorToken token;
	JsonbValue	value;
	JsonbValue *transitions;

	machine->state_index = names_create(CurrentMemoryContext, 16, NULL);
	machine->event_index = names_create(CurrentMemoryContext, 16, NULL);

	if (!JsonContainerIsObject(definition))
		invalid_definition("It must be an object.");
	it = JsonbIteratorInit(definition);
	while ((token = JsonbIteratorNext(&it, &value, true)) != WJB_DONE)
	{
		if (token == WJB_KEY &&
			!(value.val.string.len == 7 &&
			  memcmp(value.val.string.val, "initial", 7) == 0) &&
			!(value.val.string.len == 11 &&
			  memcmp(value.val.string.val, "transitions", 11) == 0))
			invalid_definition(psprintf("Member \"%.*s\" is unknown: there are \"initial\" and \"transitions\".",
										value.val.string.len,
										value.val.string.val));
	}

	parse_initial(machine, definition);
	transitions = getKeyJsonValueFromContainer(definition, "transitions", 11,
											   NULL);
	if (transitions == NULL || !is_object(transitions))
		invalid_definition("\"transitions\" must be an object from states to their edges.");
	parse_transitions(machine, transitions->val.binary.data);
	return machine;
}

/* The member "initial": one name or a list of them. */
static void
parse_initial(Machine *machine, JsonbContainer *definition)
{
	JsonbValue *initial = getKeyJsonValueFromContainer(definition, "initial", 7,
													   NULL);
	JsonbIterator *it;
	JsonbIteratorToken token;
	JsonbValue	value;
	int			state;

	if (initial != NULL && initial->type == jbvString)
	{
		state = intern_state(machine, initial);
		machine->states[state].initial = true;
	}
	else if (initial != NULL && is_array(initial))
	{
		it = JsonbIteratorInit(initial->val.binary.data);
		while ((token = JsonbIteratorNext(&it, &value, true)) != WJB_DONE)
			if (token == WJB_ELEM)
			{
				state = intern_state(machine, &value);
				machine->states[state].initial = true;
			}
	}
	if (machine->nstates == 0)
		invalid_definition("\"initial\" must be the name of a state or a list of names.");
}

/* The member "transitions": each state's edges, with event names or without. */
static void
parse_transitions(Machine *machine, JsonbContainer *transitions)
{
	JsonbIterator *states = JsonbIteratorInit(transitions);
	JsonbIteratorToken token;
	JsonbValue	value;
	int			source = -1;

	while ((token = JsonbIteratorNext(&states, &value, true)) != WJB_DONE)
	{
		if (token == WJB_KEY)
			source = intern_state(machine, &value);
		else if (token == WJB_VALUE)
		{
			JsonbIterator *edges;
			JsonbIteratorToken part;
			JsonbValue	name;
			JsonbValue	event;

			if (!is_object(&value) && !is_array(&value))
				invalid_definition(psprintf("The edges of state \"%.*s\" must be an object from events to states, or a list of states.",
											machine->states[source].name.len,
											machine->states[source].name.data));
			edges = JsonbIteratorInit(value.val.binary.data);
			while ((part = JsonbIteratorNext(&edges, &name, true)) != WJB_DONE)
			{
				if (part == WJB_KEY)
					event = name;
				else if (part == WJB_VALUE)
					add_edge(machine, source, &event, &name);
				else if (part == WJB_ELEM)
					add_edge(machine, source, NULL, &name);
			}
		}
	}
}

/* event is NULL for an edge without a name. */
static void
add_edge(Machine *machine, int source, const JsonbValue *event,
		 const JsonbValue *target)
{
	MachineEdge edge = {.event = -1};
	MachineState *state;

	edge.target = intern_state(machine, target);
	if (event != NULL)
	{
		MachineEvent *named;

		edge.event = intern_event(machine, event);
		named = &machine->events[edge.event];
		named->source = named->targets == NULL ? source : -1;
		named->targets = bms_add_member(named->targets, edge.target);
	}

	state = &machine->states[source];
	if (state->edges == NULL)
		state->edges = palloc(sizeof(MachineEdge));
	else
		state->edges = repalloc(state->edges,
								(state->nedges + 1) * sizeof(MachineEdge));
	state->edges[state->nedges++] = edge;
	state->targets = bms_add_member(state->targets, edge.target);
	state = &machine->states[edge.target];
	state->sources = bms_add_member(state->sources, source);
}

/* The number of a state, a new one if it is met for the first time. */
static int
intern_state(Machine *machine, const JsonbValue *value)
{
	NameRef		name = checked_name("state", value);
	bool		found;
	NameEntry  *entry = names_insert(machine->state_index, name, &found);

	if (!found)
	{
		entry->index = machine->nstates++;
		if (machine->states == NULL)
			machine->states = palloc(sizeof(MachineState));
		else
			machine->states = repalloc(machine->states,
									   machine->nstates * sizeof(MachineState));
		machine->states[entry->index] = (MachineState)
		{
			.name = name
		};
	}
	return entry->index;
}

/* The same for an event. */
static int
intern_event(Machine *machine, const JsonbValue *value)
{
	NameRef		name = checked_name("event", value);
	bool		found;
	NameEntry  *entry = names_insert(machine->event_index, name, &found);

	if (!found)
	{
		entry->index = machine->nevents++;
		if (machine->events == NULL)
			machine->events = palloc(sizeof(MachineEvent));
		else
			machine->events = repalloc(machine->events,
									   machine->nevents * sizeof(MachineEvent));
		machine->events[entry->index] = (MachineEvent)
		{
			.name = name,.source = -1
		};
	}
	return entry->index;
}

static NameRef
checked_name(const char *kind, const JsonbValue *value)
{
	if (value->type != jbvString)
		invalid_definition(psprintf("The name of each %s must be a string.",
									kind));
	if (value->val.string.len == 0 || value->val.string.len > MAX_NAME)
		invalid_definition(psprintf("The name of each %s must have 1 to %d bytes.",
									kind, MAX_NAME));
	return (NameRef)
	{
		value->val.string.val, value->val.string.len
	};
}

static bool
is_object(const JsonbValue *value)
{
	return value->type == jbvBinary &&
		JsonContainerIsObject(value->val.binary.data);
}

static bool
is_array(const JsonbValue *value)
{
	return value->type == jbvBinary &&
		JsonContainerIsArray(value->val.binary.data);
}

/*
 * Refuse a graph on which some state is a mistake: an initial one without any
 * edge (a typing error, most likely), one that no row can reach, and, unless
 * cyclic, one to which a row can come back.  An edge from a state to itself is
 * no cycle.
 */
static void
check_graph(const Machine *machine, bool cyclic)
{
	Bitmapset  *initial = NULL;
	Bitmapset  *reached;

	for (int i = 0; i < machine->nstates; i++)
	{
		const MachineState *state = &machine->states[i];

		if (!state->initial)
			continue;
		if (bms_is_empty(state->targets) && bms_is_empty(state->sources))
			invalid_definition(psprintf("No edge begins or ends at the initial state \"%.*s\".",
										state->name.len, state->name.data));
		initial = bms_add_member(initial, i);
	}

	reached = reachable(machine, bms_copy(initial));
	for (int i = 0; i < machine->nstates; i++)
		if (!bms_is_member(i, reached))
			invalid_definition(psprintf("State \"%.*s\" cannot be reached from an initial state.",
										machine->states[i].name.len,
										machine->states[i].name.data));

	for (int i = 0; i < machine->nstates && !cyclic; i++)
	{
		const MachineState *state = &machine->states[i];
		Bitmapset  *others = bms_del_member(bms_copy(state->targets), i);

		CHECK_FOR_INTERRUPTS();
		if (bms_is_member(i, reachable(machine, others)))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("invalid definition of a machine"),
					 errdetail("A row can leave state \"%.*s\" and come back to it.",
							   state->name.len, state->name.data),
					 errhint("If that is meant, pass cyclic => true.")));
	}
}

/* Where rows can get from the given states, these included; scribbles on it. */
static Bitmapset *
reachable(const Machine *machine, Bitmapset *from)
{
	Bitmapset  *todo = bms_copy(from);
	int			state;

	while ((state = bms_next_member(todo, -1)) >= 0)
	{
		Bitmapset  *new = bms_difference(machine->states[state].targets, from);

		todo = bms_del_member(todo, state);
		todo = bms_add_members(todo, new);
		from = bms_add_members(from, new);
		bms_free(new);
	}
	return from;
}

/* A state's name as Mermaid takes it, or a made-up one such as s3. */
static void
append_state_id(StringInfo buf, const Machine *machine, int state)
{
	if (plain_in_mermaid(machine, state))
		appendBinaryStringInfo(buf, machine->states[state].name.data,
							   machine->states[state].name.len);
	else
		appendStringInfo(buf, "s%d", state + 1);
}

/* A word that means nothing else in a diagram, and is not like one of ours. */
static bool
plain_in_mermaid(const Machine *machine, int state)
{
	static const char *const words[] = {
		"as", "class", "classDef", "click", "default", "direction", "end",
		"hide", "href", "note", "scale", "state", "style"
	};
	NameRef		name = machine->states[state].name;
	bool		like_ours = name.len > 1 && name.data[0] == 's';

	for (int i = 0; i < name.len; i++)
	{
		char		c = name.data[i];
		bool		digit = c >= '0' && c <= '9';
		bool		letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
		c == '_';

		if (!letter && !(digit && i > 0))
			return false;
		if (i > 0 && !digit)
			like_ours = false;
	}
	for (int i = 0; i < lengthof(words); i++)
		if (strlen(words[i]) == name.len &&
			pg_strncasecmp(words[i], name.data, name.len) == 0)
			return false;
	return !like_ours;
}

/* Text in a diagram: what Mermaid reads as syntax becomes a character code. */
static void
append_escaped(StringInfo buf, NameRef name)
{
	for (int i = 0; i < name.len; i++)
	{
		unsigned char c = name.data[i];

		if (c < ' ' || strchr("\"#;:<>{}[]", c) != NULL)
			appendStringInfo(buf, "#%d;", c);
		else
			appendStringInfoChar(buf, c);
	}
}

/* One more name for a list in a hint, which ends somewhere if there are many. */
static void
append_name(StringInfo list, int n, NameRef name)
{
	if (n < HINTED_NAMES)
		appendStringInfo(list, "%s\"%.*s\"", n == 0 ? "" : ", ",
						 name.len, name.data);
	else if (n == HINTED_NAMES)
		appendStringInfoString(list, " and others");
}

static void
invalid_definition(const char *detail)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("invalid definition of a machine"),
			 errdetail("%s", detail),
			 errhint("A definition is like {\"initial\": \"CREATED\", \"transitions\": {\"CREATED\": {\"pay\": \"PAID\"}, \"PAID\": [\"REFUNDED\"]}}.")));
}
