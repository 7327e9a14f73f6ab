/*-------------------------------------------------------------------------
 *
 * table.h
 *		Callers' tables: what is attached to them, and the guarded update.
 *
 * Vocabulary: a machine, a version or a fence is ATTACHED to a column of a
 * table by a GUARD, a trigger that is the only record of it.  A GUARDED UPDATE
 * is a compare-and-set: one UPDATE with the expected state, or version, in its
 * WHERE.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IK_TABLE_H
#define IK_TABLE_H

#include "store/store.h"

#include "catalog/pg_trigger.h"
#include "executor/spi.h"
#include "nodes/bitmapset.h"
#include "utils/jsonb.h"
#include "utils/relcache.h"

struct Trigger;

/* a string that need not end in a zero byte */
typedef struct NameRef
{
	const char *data;			/* NULL: the SQL NULL */
	int			len;
} NameRef;

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

/* the names of a kind: guard_x(), attach_y(), detach_y(), "no y is attached" */
typedef struct GuardNames
{
	const char *function;
	const char *noun;
	const char *trigger;
} GuardNames;

extern const GuardNames ik_guard_names[];

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

/* user_table.c: opening a table that a caller names, and judging it */
extern Relation ik_open_users_table(Oid relid, LOCKMODE lockmode);
extern Relation ik_open_owned(FunctionCallInfo fcinfo, LOCKMODE lockmode,
							  AttrNumber *column);
extern AttrNumber ik_column_number(Relation rel, const char *name,
								   const char *hint);
extern void ik_refuse_children(Relation rel);
extern Oid	ik_root_of(Relation rel);
pg_noreturn extern void ik_refuse_foreign(Relation rel);
pg_noreturn extern void ik_refuse_table(const char *message, const char *hint);
extern char *ik_quoted_name(Relation rel);
extern char *ik_name_if_there(Oid relid);
extern char *ik_quoted_column(Relation rel, AttrNumber column);

/* convert.c: values and operators of its columns */
extern void ik_append_equality(StringInfo buf, const char *left, Oid equality,
							   const char *right, Oid type);
extern void ik_from_json(Jsonb *object, TupleDesc columns, Datum *values,
						 bool *isnull);
extern StateKind ik_state_kind(Oid type, Oid *base);
extern NameRef ik_state_name(StateKind kind, Datum state);
extern const char *ik_state_column(Relation rel, const Guard *guard);
extern NameRef ik_slot_state(const Guard *guard, TupleTableSlot *slot);
extern bool ik_same_name(NameRef a, NameRef b);
extern Datum ik_state_datum(const Guard *guard, NameRef name);

/* table_info.c: what is attached, and the primary key */
extern const TableInfo *ik_table_info(Relation rel);
extern Oid	ik_guard_function(GuardKind kind);
pg_noreturn extern void ik_refuse_trigger(GuardKind kind, Relation rel,
										  const char *trigger);
extern bool ik_is_bigint(Relation rel, AttrNumber column);
extern const Guard *ik_guard_of(const TableInfo *table, AttrNumber column);
extern void ik_check_guards(Relation rel, const TableInfo *table,
							GuardKind kind);
extern const TableInfo *ik_fired_on(FunctionCallInfo fcinfo, GuardKind kind);
extern void ik_check_primary_key(Relation rel, const TableInfo *table);

/* trigger.c: guards, attached and detached */
extern void ik_check_attachable(Relation rel, AttrNumber column,
								GuardKind kind);
extern void ik_check_bigint(Relation rel, AttrNumber column);
extern Datum ik_attach(Relation rel, AttrNumber column, GuardKind kind,
					   int16 type, const char *arguments);
extern void ik_refuse_attached(Relation rel, AttrNumber column, GuardKind kind);
extern Datum ik_detach(FunctionCallInfo fcinfo, GuardKind kind);

/* what a kept plan is for: a table, and bytes that tell the statement */
typedef struct PlanKey
{
	Oid			relid;
	int			len;
	const void *data;
} PlanKey;

/* a statement that was prepared once */
typedef struct KeptPlan
{
	SPIPlanPtr	plan;
	SPIPlanPtr	second;			/* one that goes with it, or NULL */
	void	   *extra;			/* the maker's, in context */

	/* plans.c's own */
	MemoryContext context;
	PlanKey		key;
	int			users;			/* calls that hold it */
	bool		listed;
} KeptPlan;

/* plans.c: statements prepared once per session */
extern KeptPlan *ik_find_plan(const PlanKey *key);
extern KeptPlan *ik_keep_plan(const PlanKey *key, MemoryContext context,
							  const char *query, int nargs, Oid *types);
extern void ik_hold_plan(KeptPlan *kept);
extern void ik_release_plan(KeptPlan *kept);
extern SPIPlanPtr ik_prepare(const char *query, int nargs, Oid *types);

/* update.c: the guarded update */
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
	const struct UpdateHooks *hooks;
	Relation	rel;
	const TableInfo *table;
	AttrNumber	column;			/* of the state or the version */
	Oid			type;			/* the column's, below any domain */
	Datum	   *key;			/* the primary key's values */
	int			nchanged;
	AttrNumber *changed;		/* the columns that the call sets further */
	Datum	   *changes;		/* and their values */
	bool	   *changes_null;

	/* the next attempt, and what the last look or attempt found */
	bool		decided;		/* are expected and target set? */
	Datum		expected;
	Datum		target;
	bool		isnull;
	Datum		current;
	ItemPointerData tid;
	Oid			partition;
	MemoryContext context;		/* where current goes */

	/* while its UPDATE runs: what that writes bears this number */
	CommandId	command;
} GuardedUpdate;

/* what the guarded column holds, to those who know */
typedef struct UpdateHooks
{
	GuardKind	kind;
	bool		looks;			/* it never decides to update: a reader's */

	/* is the row, as last seen, as the attempt expects it? not null */
	bool		(*is_expected) (const GuardedUpdate *update);

	/*
	 * The row was seen, and is not as expected, or nothing was decided yet.
	 * Applied means: try, expected and target are set.
	 */
	UpdateOutcome (*decide) (GuardedUpdate *update);

	/* may be NULL: one row was updated; error if it is not as it should be */
	void		(*check_stored) (const GuardedUpdate *update);

	/* may be NULL: SQL that compares the column with a parameter, not by = */
	const char *(*comparison) (const GuardedUpdate *update, const char *column,
							   int parameter);
} UpdateHooks;

/* innermost; set while its UPDATE runs, triggers and all */
extern const GuardedUpdate *ik_running_update;

extern void ik_open_update(GuardedUpdate *update, const UpdateHooks *hooks,
						   FunctionCallInfo fcinfo);
extern void ik_read_changes(GuardedUpdate *update, FunctionCallInfo fcinfo,
							int arg);
extern UpdateOutcome ik_guarded_update(GuardedUpdate *update);
extern const char *ik_updated_column(const GuardedUpdate *update);
extern const char *const ik_update_outcomes[];
extern Datum ik_outcome_datum(UpdateOutcome outcome);

#endif							/* IK_TABLE_H */
