/*-------------------------------------------------------------------------
 *
 * attach.c
 *		attach_machine, detach_machine, and rows that are off the graph.
 *
 *-------------------------------------------------------------------------
 */
#include "machine/machine.h"

#include "access/sysattr.h"
#include "access/table.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "executor/tstoreReceiver.h"
#include "funcapi.h"
#include "tcop/dest.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"

PG_FUNCTION_INFO_V1(idempotency_attach_machine);
PG_FUNCTION_INFO_V1(idempotency_detach_machine);
PG_FUNCTION_INFO_V1(idempotency_off_graph);

static void check_state_column(Relation rel, AttrNumber column);
static void check_rows(Relation rel, AttrNumber column, const char *machine);
static void warn_if_referenced(Relation rel, AttrNumber column);
static int	without_row_security(void);
static void append_off_graph(StringInfo query, Relation rel, AttrNumber column,
							 const char *machine, const char *id);
static char *state_as_text(Relation rel, AttrNumber column);
static char *key_for_json(Relation rel, AttrNumber column);

/*
 * attach_machine(rel, state_column, machine, history): keep the column on the
 * machine's graph.
 */
Datum
idempotency_attach_machine(PG_FUNCTION_ARGS)
{
	AttrNumber	column;
	Relation	rel = ik_open_owned(fcinfo, ShareRowExclusiveLock, &column);
	Relation	machines;
	char	   *machine;
	bool		history;

	if (PG_ARGISNULL(2) || PG_ARGISNULL(3))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("machine and history must not be null")));
	machine = text_to_cstring(PG_GETARG_TEXT_PP(2));
	history = PG_GETARG_BOOL(3);

	/* Until we commit: keeps drop_machine() out, or waits for it. */
	machines = table_open(ik_own_relation("machines"), RowShareLock);
	ik_find_machine(machine);
	table_close(machines, NoLock);

	ik_check_attachable(rel, column, GUARD_STATE);
	check_state_column(rel, column);
	ik_check_primary_key(rel, ik_table_info(rel));
	ik_refuse_attached(rel, column, GUARD_STATE);
	check_rows(rel, column, machine);
	warn_if_referenced(rel, column);

	return ik_attach(rel, column, GUARD_STATE,
					 history ? GUARD_AFTER_UPDATE : GUARD_BEFORE_UPDATE,
					 psprintf("%s, '%s'", quote_literal_cstr(machine),
							  history ? "history" : "no history"));
}

Datum
idempotency_detach_machine(PG_FUNCTION_ARGS)
{
	return ik_detach(fcinfo, GUARD_STATE);
}

/*
 * off_graph(rel): the rows whose state no attached machine knows, read as the
 * caller.
 */
Datum
idempotency_off_graph(PG_FUNCTION_ARGS)
{
	static const Oid types[3] = {JSONBOID, TEXTOID, TEXTOID};
	ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	Relation	rel;
	const TableInfo *table;
	StringInfoData id;
	StringInfoData query;
	SPIExecuteOptions options = {.read_only = true};
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
		ik_refuse_unattached(rel, InvalidAttrNumber);
	ik_check_primary_key(rel, table);

	/* the primary key as in the history: its value, or an object */
	initStringInfo(&id);
	appendStringInfo(&id, "pg_catalog.%s(",
					 table->nkeys > 1 ? "jsonb_build_object" : "to_jsonb");
	for (int i = 0; i < table->nkeys; i++)
	{
		AttrNumber	column = table->keys[i].column;

		if (table->nkeys > 1)
			appendStringInfo(&id, "%s%s, ", i > 0 ? ", " : "",
							 quote_literal_cstr(get_attname(RelationGetRelid(rel), column, false)));
		appendStringInfoString(&id, key_for_json(rel, column));
	}
	appendStringInfoChar(&id, ')');

	/* a row comes once for each machine that does not know its state */
	initStringInfo(&query);
	for (int i = 0; i < table->nguards; i++)
	{
		if (i > 0)
			appendStringInfoString(&query, " UNION ALL ");
		append_off_graph(&query, rel, table->guards[i].column,
						 table->guards[i].machine, id.data);
	}

	nest = without_row_security();
	SPI_connect();
	options.dest = CreateDestReceiver(DestTuplestore);
	SetTuplestoreDestReceiverParams(options.dest, result->setResult,
									result->econtext->ecxt_per_query_memory,
									false, NULL, NULL);
	if (SPI_execute_extended(query.data, &options) != SPI_OK_SELECT)
		elog(ERROR, "could not execute: %s", query.data);
	SPI_finish();
	AtEOXact_GUC(true, nest);
	table_close(rel, NoLock);
	return (Datum) 0;
}

/* A type that holds states, comparing bytes. */
static void
check_state_column(Relation rel, AttrNumber column)
{
	Form_pg_attribute attr = TupleDescAttr(RelationGetDescr(rel), column - 1);
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
}

/*
 * Refuse rows in a state that the machine does not know.  All committed rows
 * count, also those that the caller's snapshot or row security hides.
 */
static void
check_rows(Relation rel, AttrNumber column, const char *machine)
{
	int			nest = without_row_security();
	StringInfoData query;
	bool		isnull;
	int64		count;

	initStringInfo(&query);
	appendStringInfoString(&query, "SELECT pg_catalog.count(*), pg_catalog.min(r.state) FROM (");
	append_off_graph(&query, rel, column, machine, "NULL");
	appendStringInfoString(&query, ") AS r");

	SPI_connect();
	if (SPI_execute_snapshot(ik_prepare(query.data, 0, NULL), NULL, NULL,
							 GetLatestSnapshot(), InvalidSnapshot,
							 true, false, 0) != SPI_OK_SELECT ||
		SPI_processed != 1)
		elog(ERROR, "could not execute: %s", query.data);
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

/*
 * A look at the rows that leaves some out unasked would be none: where row
 * security would do so it fails instead, until AtEOXact_GUC().
 */
static int
without_row_security(void)
{
	int			nest = NewGUCNestLevel();

	ik_set_for_now("row_security", "off");
	return nest;
}

/*
 * Append the query for the rows whose state the machine does not know: (id,
 * state, reason).
 */
static void
append_off_graph(StringInfo query, Relation rel, AttrNumber column,
				 const char *machine, const char *id)
{
	const Machine *graph = ik_find_machine(machine);
	char	   *quoted = ik_quoted_column(rel, column);
	char	   *state = state_as_text(rel, column);

	appendStringInfo(query,
					 "SELECT %s, %s AS state,"
					 " CASE WHEN t.%s IS NULL THEN 'null state' ELSE %s END"
					 " FROM %s AS t"
					 " WHERE t.%s IS NULL OR %s OPERATOR(pg_catalog.<>) ALL (ARRAY[",
					 id, state, quoted,
					 quote_literal_cstr(psprintf("not a state of machine \"%s\"", machine)),
					 ik_quoted_name(rel), quoted, state);
	for (int i = 0; i < graph->nstates; i++)
	{
		NameRef		name = graph->states[i].name;

		appendStringInfo(query, "%s%s", i > 0 ? ", " : "",
						 quote_literal_cstr(pnstrdup(name.data, name.len)));
	}
	appendStringInfoString(query, "]::pg_catalog.text[])");
}

/*
 * SQL for the state as text, as the guard reads it.  An enum's owner may have
 * made a cast of its own, which every reader of his table would run.
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
