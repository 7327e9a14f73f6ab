/*-------------------------------------------------------------------------
 *
 * machine.h
 *		State machines and versions: what their files share.
 *
 * Vocabulary: a MACHINE is a graph of STATES; an EDGE leads from one state to
 * another and may carry the name of an EVENT.  A machine is ATTACHED to a
 * state column of a table by a GUARD, a trigger that is the only record of it.
 * A GUARDED UPDATE is a compare-and-set: one UPDATE with the expected state, or
 * version, in its WHERE.
 *
 * How memory lives: machines and tables are cached for the backend's life.
 * What an invalidation makes stale is replaced at the next look-up, and the old
 * copy is kept to the end of the transaction, so that a pointer got from
 * idempotency_find_machine() or idempotency_table_info() is good until then.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_MACHINE_H
#define IDEMPOTENCY_MACHINE_H

#include "catalog/pg_trigger.h"
#include "fmgr.h"
#include "nodes/bitmapset.h"
#include "utils/relcache.h"

/* the longest name of a machine, a state or an event, in bytes */
#define MAX_NAME 256

/* a string that need not end in a zero byte */
typedef struct NameRef
{
	const char *data;			/* NULL: the SQL NULL */
	int			len;
} NameRef;

typedef struct MachineState
{
	NameRef		name;
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
	NameRef		name;
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

/* machine.c: definitions */
extern const Machine *idempotency_find_machine(const char *name);
extern int	idempotency_find_state(const Machine *machine, NameRef name);
extern int	idempotency_find_event(const Machine *machine, NameRef name);
extern bool idempotency_has_edge(const Machine *machine, int from, int to);
extern char *idempotency_hint_edges(const Machine *machine, int state);
extern char *idempotency_hint_states(const Machine *machine, bool initial);
extern char *idempotency_hint_events(const Machine *machine);

/* how a state is stored */
typedef enum StateKind
{
	STATE_TEXT,					/* text, varchar */
	STATE_BPCHAR,				/* char(n): trailing blanks do not count */
	STATE_ENUM,
	STATE_UNSUPPORTED
} StateKind;

/* the kinds of guards, each with its trigger function and attach_...() */
typedef enum GuardKind
{
	GUARD_STATE,
	GUARD_VERSION,
	GUARD_FENCE,
	GUARD_KINDS
} GuardKind;

/* pg_trigger.tgtype of the triggers that they consist of */
#define GUARD_BEFORE_UPDATE	(TRIGGER_TYPE_ROW | TRIGGER_TYPE_BEFORE | TRIGGER_TYPE_UPDATE)
#define GUARD_AFTER_UPDATE	(TRIGGER_TYPE_ROW | TRIGGER_TYPE_UPDATE)
#define GUARD_AFTER_INSERT	(TRIGGER_TYPE_ROW | TRIGGER_TYPE_INSERT)
#define GUARD_AFTER_INSERT_OR_DELETE	(GUARD_AFTER_INSERT | TRIGGER_TYPE_DELETE)

/* one attached machine */
typedef struct Guard
{
	AttrNumber	column;
	StateKind	kind;
	Oid			type;			/* the column's, below any domain */
	char	   *machine;
	bool		history;
} Guard;

/* one column of a primary key */
typedef struct KeyColumn
{
	AttrNumber	column;
	Oid			type;			/* below any domain */
	Oid			equality;		/* operator of the key's index */
	Oid			ioparam;
	FmgrInfo	input;
} KeyColumn;

/* what we need to know about a table */
typedef struct TableInfo
{
	int			nkeys;			/* 0: no primary key that we can use */
	KeyColumn  *keys;
	FmgrInfo	row_id;			/* makes the key's jsonb */
	bool		row_id_varies;	/* with what the session has set? */
	int			nguards;
	Guard	   *guards;
	AttrNumber	version;		/* the version column; 0: none */
	Bitmapset  *fences;			/* the fence columns, numbered as in
								 * TriggerData.tg_updatedcols */
	/* a trigger of each kind that is not as we make them; NULL: all are */
	const char *misfits[GUARD_KINDS];
} TableInfo;

/* table_info.c: tables, and the types of their keys and states */
extern const TableInfo *idempotency_table_info(Relation rel);
extern const Guard *idempotency_guard_of(const TableInfo *table,
										 AttrNumber column);
extern void idempotency_check_guards(Relation rel, const TableInfo *table,
									 GuardKind kind);
extern const TableInfo *idempotency_fired_on(FunctionCallInfo fcinfo,
											 GuardKind kind);
pg_noreturn extern void idempotency_refuse_trigger(GuardKind kind,
												   Relation rel,
												   const char *trigger);
extern bool idempotency_is_bigint(Relation rel, AttrNumber column);
extern StateKind idempotency_state_kind(Oid type, Oid *base);
extern NameRef idempotency_state_name(StateKind kind, Datum state);
extern Datum idempotency_state_datum(const Guard *guard, NameRef name);

/* the move that transition() or fire() is carrying out */
typedef struct AskedMove
{
	CommandId	command;		/* what the UPDATE writes bears this number */
	const char *column;
	NameRef		target;
	const char *event;			/* NULL: not by fire() */
} AskedMove;

/* guard.c: the trigger that keeps a table on its machine's graph */
extern const AskedMove *idempotency_asked_move;

/* transition.c: the guarded update */
typedef enum UpdateOutcome
{
	UPDATE_APPLIED,
	UPDATE_ALREADY,
	UPDATE_CONFLICT,
	UPDATE_NOT_FOUND,
	UPDATE_NOT_PERMITTED,
	UPDATE_SUPPRESSED
} UpdateOutcome;

typedef struct GuardedUpdate
{
	Relation	rel;
	const TableInfo *table;
	AttrNumber	column;			/* of the state or the version */
	Oid			type;			/* the column's, below any domain */
	Datum	   *key;			/* the primary key's values */
	int			nchanged;
	AttrNumber *changed;		/* the columns that the call sets further */
	Datum	   *changes;		/* and their values */
	bool	   *changes_null;

	/* of a state: what is asked for; not given where data is NULL */
	const Guard *guard;			/* NULL: it is a version */
	const Machine *machine;
	NameRef		from;
	NameRef		to;
	int			event;			/* -1: not given */

	/* the next attempt, and what the last look or attempt found */
	bool		decided;		/* are expected and target set? */
	Datum		expected;
	Datum		target;
	bool		isnull;
	Datum		current;
	ItemPointerData tid;
	Oid			partition;
	MemoryContext context;		/* where current goes */
} GuardedUpdate;

extern void idempotency_open_update(GuardedUpdate *update,
									FunctionCallInfo fcinfo, GuardKind kind);
extern void idempotency_read_changes(GuardedUpdate *update,
									 FunctionCallInfo fcinfo, int arg);
extern UpdateOutcome idempotency_guarded_update(GuardedUpdate *update);
extern Datum idempotency_outcome_datum(UpdateOutcome outcome);

/* attach.c: putting triggers on a table and taking them off */
extern Relation idempotency_open_owned(FunctionCallInfo fcinfo,
									   AttrNumber *column);
extern void idempotency_check_attachable(Relation rel, AttrNumber column,
										 GuardKind kind);
extern void idempotency_check_bigint(Relation rel, AttrNumber column);
extern const struct Trigger *idempotency_find_trigger(Relation rel,
													  const char *function,
													  AttrNumber column,
													  int16 type);
extern void idempotency_create_trigger(Relation rel, const char *name,
									   const char *events, AttrNumber column,
									   const char *call);
extern void idempotency_drop_trigger(Relation rel,
									 const struct Trigger *trigger);
extern char *idempotency_quoted_name(Relation rel);

#endif							/* IDEMPOTENCY_MACHINE_H */
