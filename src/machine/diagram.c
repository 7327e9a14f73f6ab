/*-------------------------------------------------------------------------
 *
 * diagram.c
 *		machine_diagram(): a machine drawn by mermaid.
 *
 *-------------------------------------------------------------------------
 */
#include "machine/machine.h"

#include "utils/builtins.h"

PG_FUNCTION_INFO_V1(idempotency_machine_diagram);

/* in place of a state: where a row begins, or ends */
#define OUTSIDE	(-1)

static int *states_outwards(const Machine *machine, int *n);
static void append_arrow(StringInfo buf, const Machine *machine, int from,
						 int to, int event);
static void append_state_id(StringInfo buf, const Machine *machine, int state);
static bool plain_in_mermaid(const Machine *machine, int state);
static void append_escaped(StringInfo buf, NameRef name);

/* machine_diagram(name): the graph as a Mermaid state diagram. */
Datum
idempotency_machine_diagram(PG_FUNCTION_ARGS)
{
	const Machine *machine = ik_find_machine(ik_machine_argument(fcinfo));
	int			n;
	int		   *order = states_outwards(machine, &n);
	StringInfoData buf;

	initStringInfo(&buf);
	appendStringInfoString(&buf, "stateDiagram-v2\n");

	/* names for the states that cannot stand as they are */
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
			append_arrow(&buf, machine, OUTSIDE, order[i], -1);
	for (int i = 0; i < n; i++)
	{
		const MachineState *state = &machine->states[order[i]];

		for (int e = 0; e < state->nedges; e++)
			append_arrow(&buf, machine, order[i], state->edges[e].target,
						 state->edges[e].event);
		if (state->nedges == 0)
			append_arrow(&buf, machine, order[i], OUTSIDE, -1);
	}
	PG_RETURN_TEXT_P(cstring_to_text_with_len(buf.data, buf.len));
}

/*
 * The states from the initial ones outwards, *n of them: all, unless the owner
 * wrote a definition by hand.
 */
static int *
states_outwards(const Machine *machine, int *n)
{
	int		   *order = palloc(machine->nstates * sizeof(int));
	Bitmapset  *seen = NULL;

	*n = 0;
	for (int i = 0; i < machine->nstates; i++)
		if (machine->states[i].initial)
		{
			seen = bms_add_member(seen, i);
			order[(*n)++] = i;
		}
	for (int i = 0; i < *n; i++)
	{
		const MachineState *state = &machine->states[order[i]];

		for (int e = 0; e < state->nedges; e++)
			if (!bms_is_member(state->edges[e].target, seen))
			{
				seen = bms_add_member(seen, state->edges[e].target);
				order[(*n)++] = state->edges[e].target;
			}
	}
	return order;
}

/* One line of the graph; event -1: the edge has none. */
static void
append_arrow(StringInfo buf, const Machine *machine, int from, int to,
			 int event)
{
	appendStringInfoString(buf, "    ");
	append_state_id(buf, machine, from);
	appendStringInfoString(buf, " --> ");
	append_state_id(buf, machine, to);
	if (event >= 0)
	{
		appendStringInfoString(buf, ": ");
		append_escaped(buf, machine->events[event].name);
	}
	appendStringInfoChar(buf, '\n');
}

/* A state's name as Mermaid takes it, or a made-up one such as s3. */
static void
append_state_id(StringInfo buf, const Machine *machine, int state)
{
	if (state == OUTSIDE)
		appendStringInfoString(buf, "[*]");
	else if (plain_in_mermaid(machine, state))
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
