/*-------------------------------------------------------------------------
 *
 * machine.h
 *		State machines: graphs of states, and the tables that keep to them.
 *
 * Vocabulary: a MACHINE is a graph of STATES; an EDGE leads from one state to
 * another and may carry the name of an EVENT.
 *
 * How memory lives: machines and tables are cached for the backend's life.
 * What an invalidation makes stale is replaced at the next look-up, and the old
 * copy is kept to the end of the transaction, so that a pointer got from
 * ik_find_machine() or ik_table_info() is good until then.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IK_MACHINE_H
#define IK_MACHINE_H

#include "table/table.h"

#include "nodes/bitmapset.h"

struct TriggerData;

/*
 * The longest name of a machine, a state or an event, in bytes: a word or two,
 * with room to spare, and the log's rows and the cache's entries stay small.
 */
#define MAX_NAME 256

typedef struct MachineState
{
	NameRef		name;			/* first, see intern() */
	bool		initial;		/* may a row begin here? */
	Bitmapset  *targets;		/* the states to which an edge leads */
	Bitmapset  *sources;		/* the states from which an edge comes */
	int			nedges;
	struct MachineEdge *edges;	/* in the definition's order */
} MachineState;

typedef struct MachineEdge
{
	int			event;			/* -1: the edge has no event */
	int			target;
} MachineEdge;

typedef struct MachineEvent
{
	NameRef		name;			/* first, too */
	int			source;			/* the only state that has it; -1: several */
	Bitmapset  *targets;		/* the states to which it leads */
} MachineEvent;

typedef struct Machine
{
	int			nstates;
	MachineState *states;
	int			nevents;
	MachineEvent *events;
	struct names_hash *state_index;
	struct names_hash *event_index;
} Machine;

/* definition.c: from a definition to a graph */
extern Machine *ik_parse_machine(JsonbContainer *definition);
extern void ik_check_graph(const Machine *machine, bool cyclic);
extern int	ik_find_state(const Machine *machine, NameRef name);
extern int	ik_find_event(const Machine *machine, NameRef name);
extern bool ik_has_edge(const Machine *machine, int from, int to);
extern char *ik_hint_edges(const Machine *machine, int state);
extern char *ik_hint_states(const Machine *machine, bool initial);
extern char *ik_hint_events(const Machine *machine);
pg_noreturn extern void ik_refuse_edge(Relation rel, const Guard *guard,
									   const Machine *machine,
									   NameRef from, NameRef to);
pg_noreturn extern void ik_refuse_rewritten(Relation rel, const Guard *guard,
											NameRef target, NameRef stored);

/* machine.c: machines by name */
extern const Machine *ik_find_machine(const char *name);
extern char *ik_machine_argument(FunctionCallInfo fcinfo);

/* the move that transition() or fire() is carrying out */
typedef struct Move
{
	GuardedUpdate update;		/* first: hooks get its address */
	const Guard *guard;
	const Machine *machine;
	NameRef		from;			/* not given where data is NULL */
	NameRef		to;
	int			event;			/* -1: not given */
	int			logged_event;	/* of the attempt; -1: the history has none */
	NameRef		target;			/* of the attempt that is under way */
} Move;

/* transition.c: the moves that functions make */
extern const UpdateHooks ik_move_hooks;
pg_noreturn extern void ik_refuse_unattached(Relation rel, AttrNumber column);

/* history.c: the moves that are written down */
extern void ik_log_move(Relation rel, const TableInfo *table,
						const Guard *guard, TupleTableSlot *slot,
						NameRef from, NameRef to, NameRef event);

/* moving.c: rows on their way from one partition to another */
extern void ik_remember_moving_row(struct TriggerData *trigdata,
								   const TableInfo *table, const Guard *guard);
extern bool ik_take_moving_row(struct TriggerData *trigdata,
							   const TableInfo *table, const Guard *guard,
							   NameRef *from);

#endif							/* IK_MACHINE_H */
