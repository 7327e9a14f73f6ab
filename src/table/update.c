/*-------------------------------------------------------------------------
 *
 * update.c
 *		The guarded update: compare-and-set on a row of a caller's table.
 *
 * A guarded update is one UPDATE with the primary key and the expected state,
 * or version, in its WHERE.  It runs through SPI as the caller, under the
 * caller's privileges, row security and triggers, from a plan that is kept per
 * table, column and set of changed columns, as ri_triggers.c keeps its plans.
 * What the column holds is the business of the hooks.
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
 * round came to the last step: a role with privileges on the key and the state
 * alone, and not on the table, gets every other answer without it.
 *
 * Each statement has its own snapshot under READ COMMITTED.  Above it a lost
 * race ends in 40001 at the first UPDATE or lock.
 *
 *-------------------------------------------------------------------------
 */
#include "table/table.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/fmgrprotos.h"
#include "utils/inval.h"
#include "utils/json.h"
#include "utils/lsyscache.h"
#include "utils/typcache.h"

typedef enum PlanKind
{
	PLAN_UPDATE,
	PLAN_LOOK,
	PLAN_IDENTIFY,				/* a look that also tells the row's version */
	PLAN_LOCK
} PlanKind;

const GuardedUpdate *ik_running_update = NULL;

pg_noreturn static void read_only(void);
static void read_key(GuardedUpdate *update, Oid type, Datum id);
static char *example_of_id(const GuardedUpdate *update);
static Datum key_from_value(const KeyColumn *key, Oid type, Datum value);
static Datum key_from_json(const KeyColumn *key, const JsonbValue *value);
static Datum key_from_string(const KeyColumn *key, char *string);
static Datum from_string(Oid type, char *string);
pg_noreturn static void not_exact(const KeyColumn *key);
static bool attempt(GuardedUpdate *update);
static bool look(GuardedUpdate *update, PlanKind kind);
static void execute(GuardedUpdate *update, PlanKind kind);
static int	run_plan(KeptPlan *kept, Datum *values, const char *nulls,
					 const GuardedUpdate *running);
static KeptPlan *get_plan(GuardedUpdate *update, PlanKind kind);
static KeptPlan *build_plan(GuardedUpdate *update, PlanKind kind,
							const PlanKey *key);
static void append_where(StringInfo buf, const GuardedUpdate *update);
static Form_pg_attribute column_attr(const GuardedUpdate *update,
									 AttrNumber column);
static const char *column_name(const GuardedUpdate *update, AttrNumber column);
static bool is_expected(const GuardedUpdate *update);

const char *const ik_update_outcomes[COUNTED_OUTCOMES] = {
	[UPDATE_APPLIED] = "applied",
	[UPDATE_ALREADY] = "already",
	[UPDATE_CONFLICT] = "conflict",
	[UPDATE_NOT_FOUND] = "not_found",
	[UPDATE_NOT_PERMITTED] = "not_permitted",
	[UPDATE_SUPPRESSED] = "suppressed"
};

/*
 * Begin a guarded update with the table and the id in the first two arguments:
 * lock the table as an UPDATE does, or as a SELECT if the hooks only look, and
 * convert the id to its primary key.  39P01 if a trigger of the kind that it
 * relies on was made by hand.
 */
void
ik_open_update(GuardedUpdate *update, const UpdateHooks *hooks,
			   FunctionCallInfo fcinfo)
{
	ik_start_counting();
	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("table and id must not be null")));
	/* in recovery, not even the table's lock can be had */
	if (RecoveryInProgress() && !hooks->looks)
		read_only();

	memset(update, 0, sizeof(*update));
	update->hooks = hooks;
	update->context = CurrentMemoryContext;
	update->rel = ik_open_users_table(PG_GETARG_OID(0), hooks->looks ?
									  AccessShareLock : RowExclusiveLock);
	if (XactReadOnly && !hooks->looks &&
		!RelationUsesLocalBuffers(update->rel))
		read_only();
	ik_refuse_children(update->rel);
	/* The lock reads invalidations only if it is this transaction's first. */
	AcceptInvalidationMessages();
	update->table = ik_table_info(update->rel);
	ik_check_guards(update->rel, update->table, hooks->kind);
	if (update->table->nkeys > 0)
		read_key(update, ik_argument_type(fcinfo, 1),
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
ik_read_changes(GuardedUpdate *update, FunctionCallInfo fcinfo,
				int arg)
{
	Jsonb	   *changes;
	int			n;
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
	/* if there are more members than columns, one of them is unknown */
	n = Min(JB_ROOT_COUNT(changes), RelationGetNumberOfAttributes(update->rel));
	update->changed = palloc(n * sizeof(AttrNumber));
	columns = CreateTemplateTupleDesc(n);

	/* the columns first, which tell how to read the values */
	it = JsonbIteratorInit(&changes->root);
	while ((token = JsonbIteratorNext(&it, &value, true)) != WJB_DONE)
	{
		char	   *name;
		AttrNumber	column;
		Form_pg_attribute attr;

		/* a nested value comes as one token: its keys are no columns */
		if (token != WJB_KEY)
			continue;
		name = pnstrdup(value.val.string.val, value.val.string.len);
		column = ik_column_number(update->rel, name,
								  "The members of changes are named for columns.");
		/* it would be set past the graph, or to another version */
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
	ik_from_json(changes, columns, update->changes,
				 update->changes_null);
}

/* Carry it out; see the head of this file.  update->current is the row's. */
UpdateOutcome
ik_guarded_update(GuardedUpdate *update)
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

		/* no row was updated, or it is not known yet what to try */
		if (!look(update, kind))
		{
			outcome = UPDATE_NOT_FOUND;
			break;
		}
		if (!update->decided || !is_expected(update))
		{
			/* another state: that is the answer, or what to try from */
			outcome = update->hooks->decide(update);
			if (outcome != UPDATE_APPLIED)
				break;
			continue;
		}

		/* the expected state: does the row stay so under a lock? */
		tid = update->tid;
		partition = update->partition;
		if (look(update, PLAN_LOCK))
		{
			if (!is_expected(update))
				continue;
			/* nobody is faster now: only a trigger can leave it as it is */
			if (!attempt(update))
				outcome = UPDATE_SUPPRESSED;
			break;
		}

		/* not to be locked: is it still the same version of the row? */
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
		/* then row security forbids it; else somebody was faster */
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
ik_outcome_datum(UpdateOutcome outcome)
{
	return CStringGetTextDatum(ik_update_outcomes[outcome]);
}

/* The name of the column that holds the state or the version. */
const char *
ik_updated_column(const GuardedUpdate *update)
{
	return column_name(update, update->column);
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
	/* one column: the value itself */
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

	/* several: an object, as jsonb or in the text of another type */
	if (type != JSONBOID)
		id = DirectFunctionCall1(jsonb_in,
								 CStringGetDatum(ik_to_string(type, id)));
	object = DatumGetJsonbP(id);

	/* for one column either form will do */
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
	string = type == TEXTOID ? TextDatumGetCString(value) :
		ik_to_string(type, value);
	if ((key->type == TIMEOID || key->type == TIMETZOID) &&
		(type == DATEOID || type == TIMESTAMPOID || type == TIMESTAMPTZOID))
		not_exact(key);
	return key_from_string(key, string);
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
	return key_from_string(key, string);
}

/*
 * A string as a value of the key's type.  Some types drop what they have no
 * place for: the id of one row would become that of another.  So the string and
 * the value are compared as a type that has the place.
 */
static Datum
key_from_string(const KeyColumn *key, char *string)
{
	Datum		value = InputFunctionCall(unconstify(FmgrInfo *, &key->input),
										  string, key->ioparam, -1);
	Oid			wider;
	TypeCacheEntry *entry;

	switch (key->type)
	{
		case DATEOID:			/* drops the time and the zone */
		case TIMESTAMPOID:		/* drops the zone */
			wider = TIMESTAMPTZOID;
			break;
		case FLOAT4OID:			/* round */
		case FLOAT8OID:
			wider = NUMERICOID;
			break;
		case NAMEOID:			/* truncate */
		case CHAROID:
			wider = TEXTOID;
			break;
		default:
			return value;
	}
	entry = lookup_type_cache(wider, TYPECACHE_EQ_OPR_FINFO);
	if (!DatumGetBool(FunctionCall2Coll(&entry->eq_opr_finfo, C_COLLATION_OID,
										from_string(wider, string),
										from_string(wider, ik_to_string(key->type, value)))))
		not_exact(key);
	return value;
}

static Datum
from_string(Oid type, char *string)
{
	Oid			input;
	Oid			ioparam;

	getTypeInputInfo(type, &input, &ioparam);
	return OidInputFunctionCall(input, string, ioparam, -1);
}

static void
not_exact(const KeyColumn *key)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("id is more than a value of type %s can hold",
					format_type_be(key->type)),
			 errhint("Give the id in the type of the primary key's column.")));
}

/* One UPDATE.  True: it updated the row, and the row is as it should be. */
static bool
attempt(GuardedUpdate *update)
{
	/* what SPI does anyway, early enough for us to know the number */
	CommandCounterIncrement();
	update->command = GetCurrentCommandId(false);
	execute(update, PLAN_UPDATE);
	if (SPI_processed > 1)
		ereport(ERROR,
				(errcode(ERRCODE_CARDINALITY_VIOLATION),
				 errmsg("more than one row of table \"%s\" has this id",
						RelationGetRelationName(update->rel)),
				 errhint("Its primary key is deferred: two rows may share a key until the transaction ends.")));
	if (SPI_processed == 0)
		return false;
	if (update->hooks->check_stored)
		update->hooks->check_stored(update);
	return true;
}

/* One SELECT, locking or not.  False: no row, or row security hides it. */
static bool
look(GuardedUpdate *update, PlanKind kind)
{
	bool		isnull;

	execute(update, kind);
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

/* Run a kept plan; the first column of its row becomes update->current. */
static void
execute(GuardedUpdate *update, PlanKind kind)
{
	int			nkeys = update->table->nkeys;
	int			nargs = nkeys + 2 + update->nchanged;
	Datum	   *values = palloc(nargs * sizeof(Datum));
	char	   *nulls = palloc(nargs);
	int			result;

	Assert(update->key != NULL);
	/* what is not given is null, used or not: extensions log the parameters */
	memset(nulls, ' ', nargs);
	/* a first look: what to expect and to set comes from what it finds */
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

	result = run_plan(get_plan(update, kind), values, nulls,
					  kind == PLAN_UPDATE ? update : NULL);
	if (result < 0)
		elog(ERROR, "SPI_execute_plan failed: %s",
			 SPI_result_code_string(result));

	/* what the row holds now; no row, and what was seen last stays */
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

/* The innermost update is known while its statement runs, triggers and all. */
static int
run_plan(KeptPlan *kept, Datum *values, const char *nulls,
		 const GuardedUpdate *running)
{
	const GuardedUpdate *outer = ik_running_update;
	volatile int result = 0;

	ik_hold_plan(kept);
	ik_running_update = running;
	PG_TRY();
	{
		result = SPI_execute_plan(kept->plan, values, nulls, false, 0);
	}
	PG_FINALLY();
	{
		ik_running_update = outer;
		ik_release_plan(kept);
	}
	PG_END_TRY();
	return result;
}

/* The kept plan for this update; only those of UPDATE have changed columns. */
static KeptPlan *
get_plan(GuardedUpdate *update, PlanKind kind)
{
	int			nchanged = kind == PLAN_UPDATE ? update->nchanged : 0;
	int			len = (2 + nchanged) * sizeof(AttrNumber);
	AttrNumber *statement = palloc(len);
	PlanKey		key = {RelationGetRelid(update->rel), len, statement};
	KeptPlan   *kept;

	statement[0] = kind;
	statement[1] = update->column;
	if (nchanged > 0)
		memcpy(&statement[2], update->changed, nchanged * sizeof(AttrNumber));
	kept = ik_find_plan(&key);
	if (kept == NULL)
		kept = build_plan(update, kind, &key);
	pfree(statement);
	return kept;
}

/*
 * The statements.  Their parameters: the key's columns, then the expected
 * state, the target and the changes.
 */
static KeptPlan *
build_plan(GuardedUpdate *update, PlanKind kind, const PlanKey *key)
{
	const TableInfo *table = update->table;
	int			n = table->nkeys;
	int			nchanged = kind == PLAN_UPDATE ? update->nchanged : 0;
	const char *column = quote_identifier(ik_updated_column(update));
	Oid		   *types = palloc((n + 2 + nchanged) * sizeof(Oid));
	const char *comparison = NULL;
	StringInfoData buf;
	KeptPlan   *kept;

	for (int i = 0; i < n; i++)
		types[i] = table->keys[i].type;
	types[n] = types[n + 1] = update->type;

	/* UPDATE t SET state = $, changes = $ WHERE key = $ AND state = $ */
	initStringInfo(&buf);
	if (kind == PLAN_UPDATE)
	{
		appendStringInfo(&buf, "UPDATE %s AS t SET %s = $%d",
						 ik_quoted_name(update->rel), column, n + 2);
		for (int i = 0; i < nchanged; i++)
		{
			types[n + 2 + i] = column_attr(update, update->changed[i])->atttypid;
			appendStringInfo(&buf, ", %s = $%d",
							 quote_identifier(column_name(update, update->changed[i])),
							 n + 3 + i);
		}
		append_where(&buf, update);

		if (update->hooks->comparison)
			comparison = update->hooks->comparison(update, column, n + 1);
		if (comparison == NULL)
			comparison = psprintf("t.%s OPERATOR(pg_catalog.=) $%d", column, n + 1);
		appendStringInfo(&buf, " AND %s", comparison);
		appendStringInfo(&buf, " RETURNING t.%s", column);
	}
	/* SELECT state, perhaps which version of the row, perhaps locking it */
	else
	{
		appendStringInfo(&buf, "SELECT t.%s%s FROM %s AS t", column,
						 kind == PLAN_IDENTIFY ? ", t.ctid, t.tableoid" : "",
						 ik_quoted_name(update->rel));
		append_where(&buf, update);
		if (kind == PLAN_LOCK)
			appendStringInfoString(&buf, " FOR NO KEY UPDATE OF t");
	}

	kept = ik_keep_plan(key, NULL, buf.data, n + 2 + nchanged, types);
	pfree(buf.data);
	pfree(types);
	return kept;
}

static void
append_where(StringInfo buf, const GuardedUpdate *update)
{
	for (int i = 0; i < update->table->nkeys; i++)
	{
		const KeyColumn *key = &update->table->keys[i];
		char	   *column = psprintf("t.%s", quote_identifier(column_name(update, key->column)));

		appendStringInfoString(buf, i == 0 ? " WHERE " : " AND ");
		ik_append_equality(buf, column, key->equality,
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

/* Is the row, as last seen, as the attempt expects it? */
static bool
is_expected(const GuardedUpdate *update)
{
	return !update->isnull && update->hooks->is_expected(update);
}
