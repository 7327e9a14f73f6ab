/*-------------------------------------------------------------------------
 *
 * history.c
 *		The history of moves, in transition_log.
 *
 *-------------------------------------------------------------------------
 */
#include "machine/machine.h"

#include "access/table.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"

static SPIPlanPtr log_plan = NULL;

PG_FUNCTION_INFO_V1(idempotency_purge_history);

static void settings_of_log(const TableInfo *table);
static int64 delete_oldest(Relation log, TimestampTz before, int32 max);
static Datum row_id(const TableInfo *table, Relation rel,
					TupleTableSlot *slot);

/*
 * Write a row of history.  The key and the states become jsonb and text as the
 * role that ran the UPDATE, whose types they may be; then the INSERT runs as
 * our table's owner, so that a writer needs no grant of ours.
 */
void
ik_log_move(Relation rel, const TableInfo *table, const Guard *guard,
			TupleTableSlot *slot, NameRef from, NameRef to, NameRef event)
{
	Oid			types[8] = {TEXTOID, JSONBOID, TEXTOID, TEXTOID, TEXTOID,
	TEXTOID, TIMESTAMPTZOID, TEXTOID};
	Datum		values[8];
	char		nulls[9] = "        ";
	char	   *name;
	int			nest;
	Relation	log;
	SavedUser	caller;

	/* as the writer */
	nest = NewGUCNestLevel();
	settings_of_log(table);
	/* a root that goes meanwhile leaves the partition with another one */
	while ((name = ik_name_if_there(ik_whole_of(ik_root_of(rel)))) == NULL)
		CHECK_FOR_INTERRUPTS();
	values[0] = CStringGetTextDatum(name);
	values[1] = row_id(table, rel, slot);
	AtEOXact_GUC(true, nest);
	values[2] = CStringGetTextDatum(guard->machine);
	values[3] = event.data == NULL ? (Datum) 0 :
		PointerGetDatum(cstring_to_text_with_len(event.data, event.len));
	nulls[3] = event.data == NULL ? 'n' : ' ';
	values[4] = PointerGetDatum(cstring_to_text_with_len(from.data, from.len));
	values[5] = PointerGetDatum(cstring_to_text_with_len(to.data, to.len));
	values[6] = TimestampTzGetDatum(GetCurrentTimestamp());
	values[7] = CStringGetTextDatum(GetUserNameFromId(GetUserId(), false));

	/* as the owner */
	SPI_connect();
	log = table_open(ik_own_relation("transition_log"), RowExclusiveLock);
	ik_become_owner(log, 0, &caller);
	if (log_plan == NULL)
	{
		SPIPlanPtr	plan = ik_prepare("INSERT INTO idempotency.transition_log"
									  " (table_name, row_id, machine, event, from_state, to_state, changed_at, changed_by)"
									  " VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
									  8, types);

		SPI_keepplan(plan);
		log_plan = plan;
	}
	if (SPI_execute_plan(log_plan, values, nulls, false, 0) != SPI_OK_INSERT)
		elog(ERROR, "could not write to table \"%s\"",
			 RelationGetRelationName(log));
	ik_become_caller(&caller);
	table_close(log, NoLock);
	SPI_finish();
}

/*
 * purge_history(older_than, max): of the max oldest rows of history, remove
 * those that are older, and say how many.  Bounded: where nothing is old
 * enough, it does not look further than that.
 */
Datum
idempotency_purge_history(PG_FUNCTION_ARGS)
{
	TimestampTz now = GetCurrentTimestamp();
	int64		age;
	int32		max;
	int64		removed;
	Relation	log;

	ik_not_null(fcinfo, 0, "older_than");
	age = ik_duration(PG_GETARG_INTERVAL_P(0), true, "older_than",
					  "Say how long moves are kept, such as '90 days'.");
	max = ik_max_argument(fcinfo, 1);
	ik_refuse_to_write("idempotency.purge_history()");

	/* nothing is older than PostgreSQL's own beginning of time */
	if (age > now - MIN_TIMESTAMP)
		PG_RETURN_INT64(0);
	log = table_open(ik_own_relation("transition_log"), RowExclusiveLock);
	removed = delete_oldest(log, now - age, max);
	table_close(log, NoLock);
	PG_RETURN_INT64(removed);
}

/*
 * In the order of their ids, which is that of the clock but for writers at the
 * same moment.  As the table's owner, as they were written.
 */
static int64
delete_oldest(Relation log, TimestampTz before, int32 max)
{
	Oid			types[] = {TIMESTAMPTZOID, INT4OID};
	Datum		values[] = {TimestampTzGetDatum(before), Int32GetDatum(max)};

	return ik_execute_as_owner(log,
							   "WITH oldest AS MATERIALIZED ("
							   "SELECT id, changed_at FROM idempotency.transition_log"
							   " ORDER BY id LIMIT $2)"
							   " DELETE FROM idempotency.transition_log l USING oldest o"
							   " WHERE l.id OPERATOR(pg_catalog.=) o.id"
							   " AND o.changed_at OPERATOR(pg_catalog.<) $1",
							   lengthof(types), types, values, NULL);
}

/*
 * The log has one name for a table and one for a row, in spite of what the
 * session that moves it has set: from here to AtEOXact_GUC() values are written
 * as on a server in UTC where nothing is set.  The keys of most tables read the
 * same everywhere.
 */
static void
settings_of_log(const TableInfo *table)
{
	static const char *const settings[][2] = {
		{"bytea_output", "hex"},
		{"DateStyle", "ISO, MDY"},
		{"extra_float_digits", "1"},
		{"IntervalStyle", "postgres"},
		{"lc_monetary", "C"},
		{"TimeZone", "UTC"}
	};

	if (quote_all_identifiers)
		ik_set_for_now("quote_all_identifiers", "off");
	for (int i = 0; table->row_id_varies && i < lengthof(settings); i++)
		ik_set_for_now(settings[i][0], settings[i][1]);
}

/* The primary key as jsonb: its value, or for several columns an object. */
static Datum
row_id(const TableInfo *table, Relation rel, TupleTableSlot *slot)
{
	LOCAL_FCINFO(fcinfo, 2 * INDEX_MAX_KEYS);
	int			nargs = 0;

	ik_check_primary_key(rel, table);
	for (int i = 0; i < table->nkeys; i++)
	{
		AttrNumber	column = table->keys[i].column;

		if (table->nkeys > 1)
		{
			fcinfo->args[nargs].value =
				CStringGetTextDatum(NameStr(TupleDescAttr(RelationGetDescr(rel),
														  column - 1)->attname));
			fcinfo->args[nargs++].isnull = false;
		}
		fcinfo->args[nargs].value = slot_getattr(slot, column,
												 &fcinfo->args[nargs].isnull);
		nargs++;
	}
	InitFunctionCallInfoData(*fcinfo, unconstify(FmgrInfo *, &table->row_id),
							 nargs, InvalidOid, NULL, NULL);
	return FunctionCallInvoke(fcinfo);
}
