/*-------------------------------------------------------------------------
 *
 * definition.c
 *		From a definition to a graph: parsed, checked, looked up.
 *
 *-------------------------------------------------------------------------
 */
#include "machine/machine.h"

#include "common/hashfn.h"

/* how many names a hint lists: it is read as a line, not as a page */
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

/* a walk over the graph, depth first */
typedef struct GraphWalk
{
	const Machine *machine;
	int		   *next_edge;		/* of each state: the first not yet taken */
	char	   *progress;		/* of each state */
	int		   *path;			/* from the initial state to the current one */
	int			returned_to;	/* a state that is on a cycle; -1: none yet */
} GraphWalk;

/* its progress with a state */
enum
{
	STATE_UNSEEN,
	STATE_ON_PATH,
	STATE_DONE
};

static void parse_initial(Machine *machine, JsonbContainer *definition);
static void parse_transitions(Machine *machine, JsonbContainer *transitions);
static void add_edge(Machine *machine, int source, const JsonbValue *event,
					 const JsonbValue *target);
static int	intern_state(Machine *machine, const JsonbValue *name);
static int	intern_event(Machine *machine, const JsonbValue *name);
static int	intern(names_hash *index, NameRef name, int *n, void **array,
				   Size size);
static NameRef checked_name(const char *kind, const JsonbValue *value);
static bool is_object(const JsonbValue *value);
static bool is_array(const JsonbValue *value);
static void walk_from(GraphWalk *walk, int start);
static void append_name(StringInfo list, int n, NameRef name);
pg_noreturn static void invalid_definition(const char *detail);

/* A state's number, or -1 if the machine does not know it. */
int
ik_find_state(const Machine *machine, NameRef name)
{
	NameEntry  *entry = names_lookup(machine->state_index, name);

	return entry ? entry->index : -1;
}

/* An event's number, or -1 if the machine does not know it. */
int
ik_find_event(const Machine *machine, NameRef name)
{
	NameEntry  *entry = names_lookup(machine->event_index, name);

	return entry ? entry->index : -1;
}

/* Is there an edge?  Either number may be -1: then there is none. */
bool
ik_has_edge(const Machine *machine, int from, int to)
{
	return from >= 0 && to >= 0 &&
		bms_is_member(to, machine->states[from].targets);
}

/* For a hint: the moves from a state; -1 is one that the machine lacks. */
char *
ik_hint_edges(const Machine *machine, int state)
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
ik_hint_states(const Machine *machine, bool initial)
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
ik_hint_events(const Machine *machine)
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

/* IK003: no edge leads from one state to the other; either may be null. */
void
ik_refuse_edge(Relation rel, const Guard *guard, const Machine *machine,
			   NameRef from, NameRef to)
{
	int			state = from.data == NULL ? -1 : ik_find_state(machine, from);

	ereport(ERROR,
			(errcode(ERRCODE_ILLEGAL_TRANSITION),
			 from.data == NULL || to.data == NULL ?
			 errmsg("a row cannot enter or leave a null state under machine \"%s\"",
					guard->machine) :
			 errmsg("machine \"%s\" has no edge from state \"%.*s\" to state \"%.*s\"",
					guard->machine, from.len, from.data, to.len, to.data),
			 errhint("%s", ik_hint_edges(machine, state)),
			 errtablecol(rel, guard->column)));
}

/* IK005: the row that was to be in the target state was stored in another. */
void
ik_refuse_rewritten(Relation rel, const Guard *guard, NameRef target,
					NameRef stored)
{
	ereport(ERROR,
			(errcode(ERRCODE_STATE_REWRITTEN),
			 errmsg("a trigger stored another state than \"%.*s\"",
					target.len, target.data),
			 stored.data == NULL ? errdetail("It stored null.") :
			 errdetail("It stored \"%.*s\".", stored.len, stored.data),
			 errhint("Fix the trigger, or ask for the state that it stores."),
			 errtablecol(rel, guard->column)));
}

/*
 * A definition as a Machine, in the current memory context; names point into
 * the definition.  22023 if it is not of the form
 *
 *		{"initial": "A", "transitions": {"A": {"event": "B"}, "B": ["C"]}}
 */
Machine *
ik_parse_machine(JsonbContainer *definition)
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
			JsonbValue	event = {0};	/* a value comes after its key */

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
	return intern(machine->state_index, checked_name("state", value),
				  &machine->nstates, (void **) &machine->states,
				  sizeof(MachineState));
}

/* The same for an event. */
static int
intern_event(Machine *machine, const JsonbValue *value)
{
	return intern(machine->event_index, checked_name("event", value),
				  &machine->nevents, (void **) &machine->events,
				  sizeof(MachineEvent));
}

/*
 * A name's place in an array of what begins with a name.  A new one gets the
 * next place, zeroed but for the name.
 */
static int
intern(names_hash *index, NameRef name, int *n, void **array, Size size)
{
	bool		found;
	NameEntry  *entry = names_insert(index, name, &found);
	void	   *element;

	if (found)
		return entry->index;
	entry->index = (*n)++;
	/* doubled whenever it is full, at a power of two */
	if (*array == NULL)
		*array = palloc(size);
	else if ((entry->index & (entry->index - 1)) == 0)
		*array = repalloc(*array, 2 * entry->index * size);
	element = (char *) *array + entry->index * size;
	memset(element, 0, size);
	*(NameRef *) element = name;
	return entry->index;
}

static NameRef
checked_name(const char *kind, const JsonbValue *value)
{
	NameRef		name = {0};		/* its padding, too: it is kept in arrays */

	if (value->type != jbvString)
		invalid_definition(psprintf("The name of each %s must be a string.",
									kind));
	if (value->val.string.len == 0 || value->val.string.len > MAX_NAME)
		invalid_definition(psprintf("The name of each %s must have 1 to %d bytes.",
									kind, MAX_NAME));
	name.data = value->val.string.val;
	name.len = value->val.string.len;
	return name;
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
 *
 * Goes depth first from the initial states, once over every edge.
 */
void
ik_check_graph(const Machine *machine, bool cyclic)
{
	GraphWalk	walk = {
		.machine = machine,
		.next_edge = palloc0(machine->nstates * sizeof(int)),
		.progress = palloc0(machine->nstates * sizeof(char)),
		.path = palloc(machine->nstates * sizeof(int)),
		.returned_to = -1
	};

	for (int i = 0; i < machine->nstates; i++)
	{
		const MachineState *state = &machine->states[i];

		if (!state->initial)
			continue;
		if (bms_is_empty(state->targets) && bms_is_empty(state->sources))
			invalid_definition(psprintf("No edge begins or ends at the initial state \"%.*s\".",
										state->name.len, state->name.data));
		walk_from(&walk, i);
	}

	for (int i = 0; i < machine->nstates; i++)
		if (walk.progress[i] == STATE_UNSEEN)
			invalid_definition(psprintf("State \"%.*s\" cannot be reached from an initial state.",
										machine->states[i].name.len,
										machine->states[i].name.data));

	if (walk.returned_to >= 0 && !cyclic)
	{
		NameRef		name = machine->states[walk.returned_to].name;

		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid definition of a machine"),
				 errdetail("A row can leave state \"%.*s\" and come back to it.",
						   name.len, name.data),
				 errhint("If that is meant, pass cyclic => true.")));
	}
}

/* See all that can be reached from a state, and the first cycle on the way. */
static void
walk_from(GraphWalk *walk, int start)
{
	int			depth = 0;

	if (walk->progress[start] != STATE_UNSEEN)
		return;
	walk->progress[start] = STATE_ON_PATH;
	walk->path[depth++] = start;
	while (depth > 0)
	{
		int			here = walk->path[depth - 1];
		const MachineState *state = &walk->machine->states[here];
		int			target;

		if (walk->next_edge[here] == state->nedges)
		{
			walk->progress[here] = STATE_DONE;
			depth--;
			continue;
		}
		target = state->edges[walk->next_edge[here]++].target;
		if (walk->progress[target] == STATE_UNSEEN)
		{
			walk->progress[target] = STATE_ON_PATH;
			walk->path[depth++] = target;
		}
		/* back to where the path has been: a cycle, unless it is a self-loop */
		else if (walk->progress[target] == STATE_ON_PATH && target != here &&
				 walk->returned_to < 0)
			walk->returned_to = target;
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
