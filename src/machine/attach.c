/*-------------------------------------------------------------------------
 *
 * attach.c
 *		attach_machine, detach_machine, off_graph.
 *
 *-------------------------------------------------------------------------
 */
#include "machine/machine.h"

#include "access/genam.h"
#include "access/relation.h"
#include "access/sysattr.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/partition.h"
#include "catalog/pg_am.h"
#include "catalog/pg_class.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_trigger.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "rewrite/prs2lock.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/tuplestore.h"

PG_FUNCTION_INFO_V1(idempotency_attach_machine);
PG_FUNCTION_INFO_V1(idempotency_detach_machine);
PG_FUNCTION_INFO_V1(idempotency_off_graph);

static void check_state_column(Relation rel, AttrNumber column);
static void check_rows(Relation rel, AttrNumber column, const char *machine);
static void warn_if_referenced(Relation rel, AttrNumber column);
static void keep_table_triggers(Relation rel);
static void keep_trigger(Relation rel, bool wanted, const char *name,
						 const char *events, int16 type);
static Datum state_names(const Machine *machine);
static SPIPlanPtr prepare(const char *query, int nargs, Oid *types);
static char *state_as_text(Relation rel, AttrNumber column);
static char *key_for_json(Relation rel, AttrNumber column);

/*
 * attach_machine(rel, state_column, machine, history): guard a table that the
 * caller owns.  Nothing may be NULL.  Errors: 0A000 and 42P10 for a table or a
 * column that cannot be guarded, 39P01 a trigger made by hand, 42710 attached
 * already, IK003 rows that are off the graph, IK007 no such machine.
 */
Datum
idempotency_attach_machine(PG_FUNCTION_ARGS)
{
	AttrNumber	column;
	Relation	rel = ik_open_owned(fcinfo, &column);
	Relation	machines;
	char	   *machine;
	bool		history;
	char	   *call;

	if (PG_ARGISNULL(2) || PG_ARGISNULL(3))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("machine and history must not be null")));
	machine = text_to_cstring(PG_GETARG_TEXT_PP(2));

	/* Until we commit: keeps drop_machine() out, or waits for it. */
	machines = table_open(ik_own_relation("machines"), RowShareLock);
	ik_find_machine(machine);
	table_close(machines, NoLock);

	ik_check_attachable(rel, column, GUARD_STATE);
	check_state_column(rel, column);
	if (ik_find_trigger(rel, "guard_state", column, 0) != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_DUPLICATE_OBJECT),
				 errmsg("a machine is already attached to column \"%s\" of table \"%s\"",
						get_attname(RelationGetRelid(rel), column, false),
						RelationGetRelationName(rel)),
				 errhint("Call idempotency.detach_machine() first.")));
	check_rows(rel, column, machine);
	warn_if_referenced(rel, column);

	history = PG_GETARG_BOOL(3);
	call = psprintf("idempotency.guard_state(%s, %s)",
					quote_literal_cstr(machine),
					history ? "'history'" : "'no history'");
	ik_create_trigger(rel, history ? "IK_guard" : "zz_IK_guard",
					  history ? "AFTER UPDATE" : "BEFORE UPDATE",
					  column, call);
	keep_table_triggers(rel);
	table_close(rel, NoLock);
	PG_RETURN_VOID();
}

/*
 * detach_machine(rel, state_column): take the guard off.  IK007 if there is
 * none.
 */
Datum
idempotency_detach_machine(PG_FUNCTION_ARGS)
{
	AttrNumber	column;
	Relation	rel = ik_open_owned(fcinfo, &column);

	const Trigger *trigger = ik_find_trigger(rel, "guard_state",
											 column, 0);

	if (trigger == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNKNOWN_MACHINE),
				 errmsg("no machine is attached to column \"%s\" of table \"%s\"",
						get_attname(RelationGetRelid(rel), column, false),
						RelationGetRelationName(rel)),
				 errhint("What is attached shows in \\d as triggers that call idempotency.guard_state().")));
	ik_drop_trigger(rel, trigger);
	keep_table_triggers(rel);
	table_close(rel, NoLock);
	PG_RETURN_VOID();
}

/*
 * off_graph(rel): the rows whose state no attached machine knows, read as the
 * caller.  rel must not be NULL; IK007 if no machine is attached.
 */
Datum
idempotency_off_graph(PG_FUNCTION_ARGS)
{
	static const Oid types[3] = {JSONBOID, TEXTOID, TEXTOID};
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	Relation	rel;
	const TableInfo *table;
	StringInfoData id;
	int			nest;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("table must not be null")));
	InitMaterializedSRF(fcinfo, 0);
	ik_check_columns(result->setDesc, lengthof(types), types);
	rel = ik_open_users_table(PG_GETARG_OID(0), AccessShareLock);
	AcceptInvalidationMessages();
	table = ik_table_info(rel);
	ik_check_guards(rel, table, GUARD_STATE);
	if (table->nguards == 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNKNOWN_MACHINE),
				 errmsg("no machine is attached to table \"%s\"",
						RelationGetRelationName(rel)),
				 errhint("Attach one with idempotency.attach_machine().")));
	if (table->nkeys == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_COLUMN_REFERENCE),
				 errmsg("table \"%s\" has no primary key",
						RelationGetRelationName(rel)),
				 errhint("Add a primary key: rows are told apart by it.")));

	initStringInfo(&id);
	for (int i = 0; i < table->nkeys; i++)
	{
		AttrNumber	column = table->keys[i].column;

		if (table->nkeys > 1)
			appendStringInfo(&id, "%s%s, ", i > 0 ? ", " : "",
							 quote_literal_cstr(get_attname(RelationGetRelid(rel), column, false)));
		appendStringInfoString(&id, key_for_json(rel, column));
	}

	/* An audit that leaves rows out unasked would be none: fail instead. */
	nest = NewGUCNestLevel();
	(void) set_config_option("row_security", "off", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	SPI_connect();
	for (int i = 0; i < table->nguards; i++)
	{
		const Guard *guard = &table->guards[i];
		char	   *column = ik_quoted_column(rel, guard->column);
		char	   *state = state_as_text(rel, guard->column);
		Oid			types[2] = {TEXTARRAYOID, TEXTOID};
		Datum		values[2];
		SPIPlanPtr	plan;
		Portal		portal;

		values[0] = state_names(ik_find_machine(guard->machine));
		values[1] = CStringGetTextDatum(psprintf("not a state of machine \"%s\"",
												 guard->machine));
		plan = prepare(psprintf("SELECT pg_catalog.%s(%s), %s,"
								" CASE WHEN t.%s IS NULL THEN 'null state' ELSE $2 END"
								" FROM %s AS t"
								" WHERE t.%s IS NULL OR %s OPERATOR(pg_catalog.<>) ALL ($1)",
								table->nkeys > 1 ? "jsonb_build_object" : "to_jsonb",
								id.data, state, column,
								ik_quoted_name(rel), column, state),
					   2, types);
		portal = SPI_cursor_open(NULL, plan, values, NULL, true);
		for (;;)
		{
			SPI_cursor_fetch(portal, true, 1000);
			if (SPI_processed == 0)
				break;
			for (uint64 row = 0; row < SPI_processed; row++)
			{
				Datum		columns[3];
				bool		nulls[3];

				for (int c = 0; c < 3; c++)
					columns[c] = SPI_getbinval(SPI_tuptable->vals[row],
											   SPI_tuptable->tupdesc, c + 1,
											   &nulls[c]);
				tuplestore_putvalues(result->setResult, result->setDesc,
									 columns, nulls);
			}
			SPI_freetuptable(SPI_tuptable);
		}
		SPI_cursor_close(portal);
	}
	SPI_finish();
	AtEOXact_GUC(true, nest);
	table_close(rel, NoLock);
	return (Datum) 0;
}

/* A type that holds states, comparing bytes; and a primary key on the table. */
static void
check_state_column(Relation rel, AttrNumber column)
{
	Form_pg_attribute attr = TupleDescAttr(RelationGetDescr(rel), column - 1);
	List	   *indexes = RelationGetIndexList(rel);
	bool		has_key = false;
	ListCell   *lc;
	Oid			base;

	if (ik_state_kind(attr->atttypid, &base) == STATE_UNSUPPORTED)
		ik_refuse_table(psprintf("column \"%s\" is of type %s", NameStr(attr->attname),
								 format_type_be(attr->atttypid)),
						"A state column is of type text, varchar or char(n), an enum, or a domain over these.");
	if (OidIsValid(attr->attcollation) &&
		!get_collation_isdeterministic(attr->attcollation))
		ik_refuse_table(psprintf("column \"%s\" has a nondeterministic collation",
								 NameStr(attr->attname)),
						"States that differ must not compare equal.");

	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), AccessShareLock);

		has_key = has_key || (index->rd_index->indisprimary &&
							  index->rd_rel->relam == BTREE_AM_OID);
		index_close(index, AccessShareLock);
	}
	if (!has_key)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_COLUMN_REFERENCE),
				 errmsg("table \"%s\" has no primary key",
						RelationGetRelationName(rel)),
				 errhint("Add a primary key: rows are told apart by it.")));
}

/*
 * Refuse rows in a state that the machine does not know.  All committed rows
 * count, whatever the caller's snapshot, and whatever row security hides.
 */
static void
check_rows(Relation rel, AttrNumber column, const char *machine)
{
	char	   *state = state_as_text(rel, column);
	Oid			types[1] = {TEXTARRAYOID};
	Datum		values[1] = {state_names(ik_find_machine(machine))};
	int			nest = NewGUCNestLevel();
	SPIPlanPtr	plan;
	bool		isnull;
	int64		count;

	(void) set_config_option("row_security", "off", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	SPI_connect();
	plan = prepare(psprintf("SELECT pg_catalog.count(*), pg_catalog.min(%s)"
							" FROM %s AS t"
							" WHERE t.%s IS NULL OR %s OPERATOR(pg_catalog.<>) ALL ($1)",
							state, ik_quoted_name(rel),
							ik_quoted_column(rel, column), state),
				   1, types);
	if (SPI_execute_snapshot(plan, values, NULL, GetLatestSnapshot(),
							 InvalidSnapshot, true, false, 0) != SPI_OK_SELECT ||
		SPI_processed != 1)
		elog(ERROR, "could not count the rows of table \"%s\"",
			 RelationGetRelationName(rel));
	count = DatumGetInt64(SPI_getbinval(SPI_tuptable->vals[0],
										SPI_tuptable->tupdesc, 1, &isnull));
	if (count > 0)
	{
		char	   *example = SPI_getvalue(SPI_tuptable->vals[0],
										   SPI_tuptable->tupdesc, 2);

		ereport(ERROR,
				(errcode(ERRCODE_ILLEGAL_TRANSITION),
				 errmsg_plural("%lld row of table \"%s\" is off the graph of machine \"%s\"",
							   "%lld rows of table \"%s\" are off the graph of machine \"%s\"",
							   (unsigned long) count, (long long) count,
							   RelationGetRelationName(rel), machine),
				 example != NULL ?
				 errdetail("One of them is in state \"%s\".", example) :
				 errdetail("The state is null."),
				 errhint("Correct the rows, or add their states to the machine.")));
	}
	SPI_finish();
	AtEOXact_GUC(true, nest);
}

/* A foreign key check locks what it refers to, and so holds up each move. */
static void
warn_if_referenced(Relation rel, AttrNumber column)
{
	Bitmapset  *keys = RelationGetIndexAttrBitmap(rel, INDEX_ATTR_BITMAP_KEY);

	if (bms_is_member(column - FirstLowInvalidHeapAttributeNumber, keys))
		ereport(WARNING,
				(errmsg("column \"%s\" of table \"%s\" is in a unique index",
						get_attname(RelationGetRelid(rel), column, false),
						RelationGetRelationName(rel)),
				 errdetail("Each move waits for transactions that insert rows with a foreign key to this table.")));
	bms_free(keys);
}

/* Have the triggers that serve all machines of a table, as long as needed. */
static void
keep_table_triggers(Relation rel)
{
	const TableInfo *table = ik_table_info(rel);
	bool		partitioned = rel->rd_rel->relkind == RELKIND_PARTITIONED_TABLE;
	bool		before = false;
	bool		after = false;

	for (int i = 0; i < table->nguards; i++)
	{
		before = before || !table->guards[i].history;
		after = after || table->guards[i].history;
	}
	keep_trigger(rel, table->nguards > 0, "IK_guard_insert",
				 partitioned ? "AFTER INSERT OR DELETE" : "AFTER INSERT",
				 partitioned ? GUARD_AFTER_INSERT_OR_DELETE : GUARD_AFTER_INSERT);
	keep_trigger(rel, before, "zz_IK_guard_update", "BEFORE UPDATE",
				 GUARD_BEFORE_UPDATE);
	keep_trigger(rel, after, "IK_guard_update", "AFTER UPDATE",
				 GUARD_AFTER_UPDATE);
}

/* Create it or drop it, unless it is as wanted already. */
static void
keep_trigger(Relation rel, bool wanted, const char *name, const char *events,
			 int16 type)
{
	const Trigger *trigger = ik_find_trigger(rel, "guard_state",
											 InvalidAttrNumber, type);

	if (wanted && trigger == NULL)
		ik_create_trigger(rel, name, events, InvalidAttrNumber,
						  "idempotency.guard_state()");
	else if (!wanted && trigger != NULL)
		ik_drop_trigger(rel, trigger);
}

/* The machine's states as an array of text. */
static Datum
state_names(const Machine *machine)
{
	Datum	   *names = palloc(machine->nstates * sizeof(Datum));

	for (int i = 0; i < machine->nstates; i++)
		names[i] = PointerGetDatum(cstring_to_text_with_len(machine->states[i].name.data,
															machine->states[i].name.len));
	return PointerGetDatum(construct_array(names, machine->nstates, TEXTOID,
										   -1, false, TYPALIGN_INT));
}

static SPIPlanPtr
prepare(const char *query, int nargs, Oid *types)
{
	SPIPlanPtr	plan = SPI_prepare(query, nargs, types);

	if (plan == NULL)
		elog(ERROR, "SPI_prepare failed: %s: %s",
			 SPI_result_code_string(SPI_result), query);
	return plan;
}

/*
 * SQL for the state as text, as the guard reads it.  An enum's owner may have
 * made a cast of its own, and whoever looks at his table would run it.
 */
static char *
state_as_text(Relation rel, AttrNumber column)
{
	Oid			type = getBaseType(TupleDescAttr(RelationGetDescr(rel),
												 column - 1)->atttypid);

	if (!type_is_enum(type))
		return psprintf("t.%s::pg_catalog.text", ik_quoted_column(rel, column));
	return psprintf("pg_catalog.textin(pg_catalog.enum_out(t.%s::%s))",
					ik_quoted_column(rel, column),
					format_type_extended(type, -1, FORMAT_TYPE_FORCE_QUALIFY));
}

/*
 * SQL for a column of the primary key, on its way to jsonb.  For the same
 * reason as text where the type is not a base type: those only superusers make.
 */
static char *
key_for_json(Relation rel, AttrNumber column)
{
	Oid			type = getBaseType(TupleDescAttr(RelationGetDescr(rel),
												 column - 1)->atttypid);
	Oid			element = get_base_element_type(type);

	if (get_typtype(getBaseType(OidIsValid(element) ? element : type)) == TYPTYPE_BASE)
		return psprintf("t.%s", ik_quoted_column(rel, column));
	return psprintf("pg_catalog.format('%%s', t.%s)", ik_quoted_column(rel, column));
}
