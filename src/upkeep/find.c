/*-------------------------------------------------------------------------
 *
 * find.c
 *		An operator's look for keys, and what to do about them.
 *
 * There is no index by scope, status or age, which every claim would pay for.
 * So the table is read from a page on, and a call reads so many pages at the
 * most; it says where the next one has to go on.
 *
 *-------------------------------------------------------------------------
 */
#include "upkeep/upkeep.h"

#include "access/heapam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

PG_FUNCTION_INFO_V1(idempotency_find_keys);
PG_FUNCTION_INFO_V1(idempotency_forget_scope);
PG_FUNCTION_INFO_V1(idempotency_free_lease);

/* what find_keys() looks for; NULL: any */
typedef struct Search
{
	text	   *scope;
	text	   *status;			/* as in key_record */
	TimestampTz created_before;
	text	   *sqlstate;		/* in the answer's meta */
} Search;

/* some pages of idempotency.keys, row by row */
typedef struct PageScan
{
	Relation	rel;
	TableScanDesc scan;			/* NULL: there are no such pages */
	TupleTableSlot *slot;
	BlockNumber first;
	BlockNumber end;			/* it reads none from here on */
	BlockNumber blocks;			/* of the table */
	MemoryContext caller;
	MemoryContext row;			/* current, for what one row takes */
} PageScan;

static void begin_pages(PageScan *pages, FunctionCallInfo fcinfo, int arg,
						Snapshot snapshot, LOCKMODE lockmode);
static bool next_row(PageScan *pages);
static void stop_after_page(PageScan *pages);
static void end_pages(PageScan *pages);
static bool matches(const Search *search, const KeyRow *key);
static bool same_text(const text *sought, text *value);
static void put_found(ReturnSetInfo *rsinfo, const PageScan *pages,
					  const KeyRow *key, TimestampTz now);

/*
 * find_keys(scope, status, older_than, sqlstate, max, from_page): up to max
 * keys that have an answer or are leased, and what else is in the last one's
 * page.  Each of the first four may be NULL, for any.  A notice tells where to
 * go on if there is more to look at.
 */
Datum
idempotency_find_keys(PG_FUNCTION_ARGS)
{
	static const Oid types[11] = {
		INT8OID, TEXTOID, TEXTOID, TEXTOID, TIMESTAMPTZOID, TIMESTAMPTZOID,
		INT8OID, TIMESTAMPTZOID, BOOLOID, INT4OID, JSONBOID
	};
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	TimestampTz now = GetCurrentTimestamp();
	int32		max = ik_max_argument(fcinfo, 4);
	Search		search = {
		.scope = PG_ARGISNULL(0) ? NULL : PG_GETARG_TEXT_PP(0),
		.status = PG_ARGISNULL(1) ? NULL : PG_GETARG_TEXT_PP(1),
		.created_before = DT_NOEND,
		.sqlstate = PG_ARGISNULL(3) ? NULL : PG_GETARG_TEXT_PP(3)
	};
	Snapshot	snapshot;
	PageScan	pages;
	int32		found = 0;

	if (!PG_ARGISNULL(2))
		search.created_before = DatumGetTimestampTz(DirectFunctionCall2(timestamptz_mi_interval,
																		TimestampTzGetDatum(now),
																		PG_GETARG_DATUM(2)));
	InitMaterializedSRF(fcinfo, 0);
	ik_check_columns(rsinfo->setDesc, lengthof(types), types);

	/* an operator asks what there is now, whenever his transaction began */
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	begin_pages(&pages, fcinfo, 5, snapshot, AccessShareLock);
	while (next_row(&pages))
	{
		KeyRow		key;

		ik_read_key(pages.slot, &key);
		/* what has expired is gone for every caller, purged or not */
		if (ik_key_is_present(&key, now) && matches(&search, &key))
		{
			put_found(rsinfo, &pages, &key, now);
			/* the next call begins with a page, so this one is finished */
			if (++found == max)
				stop_after_page(&pages);
		}
	}
	end_pages(&pages);
	UnregisterSnapshot(snapshot);
	/* bounded: say where the next call goes on */
	if (pages.end < pages.blocks)
		ereport(NOTICE,
				(errmsg("looked at pages %u to %u of %u",
						pages.first, pages.end - 1, pages.blocks),
				 errhint("Go on with from_page => %u.", pages.end)));
	return (Datum) 0;
}

/*
 * forget_scope(scope, max, from_page): remove up to max records of a scope, and
 * those in the last one's page.
 * What is leased, and what somebody is at work on, is kept.  next_page is NULL
 * after the last page.
 */
Datum
idempotency_forget_scope(PG_FUNCTION_ARGS)
{
	static const Oid types[3] = {INT8OID, INT8OID, INT8OID};
	int32		max = ik_max_argument(fcinfo, 1);
	text	   *scope = PG_ARGISNULL(0) ? NULL : PG_GETARG_TEXT_PP(0);
	int64		forgotten = 0;
	int64		kept = 0;
	SnapshotData dirty;
	PageScan	pages;
	TupleDesc	desc;
	Datum		values[3];
	bool		nulls[3] = {false};

	ik_check_scope(scope);
	if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	ik_check_columns(desc, lengthof(types), types);
	ik_refuse_to_write("idempotency.forget_scope()");

	/* also what is not committed yet: it is counted as kept, for a next call */
	InitDirtySnapshot(dirty);
	begin_pages(&pages, fcinfo, 2, &dirty, RowExclusiveLock);
	while (next_row(&pages))
	{
		bool		rival = TransactionIdIsValid(dirty.xmin) || TransactionIdIsValid(dirty.xmax);
		KeyRow		key;

		ik_read_key(pages.slot, &key);
		if (!same_text(scope, key.scope))
			continue;
		/* what is at work stays, and what a rival is about to change */
		if (rival || key.status == STATUS_LEASED ||
			!ik_remove_row(&ik_purge_keys, pages.rel, pages.slot,
						   ik_lock_hash(scope, DatumGetTextPP(PointerGetDatum(key.key)))))
			kept++;
		else if (++forgotten == max)
			stop_after_page(&pages);
	}
	end_pages(&pages);
	/* a later call of this very statement finds the keys free */
	CommandCounterIncrement();

	values[0] = Int64GetDatum(forgotten);
	values[1] = Int64GetDatum(kept);
	values[2] = Int64GetDatum(pages.end);
	nulls[2] = pages.end >= pages.blocks;	/* that was the last page */
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(desc),
													  values, nulls)));
}

/*
 * free_lease(scope, key, fence, discard): end the lease with this fence, also a
 * lock's, so that the next caller takes over; with discard it begins anew,
 * without the count of attempts and the checkpoint.  False: it is not leased.
 */
Datum
idempotency_free_lease(PG_FUNCTION_ARGS)
{
	text	   *scope;
	text	   *key;
	int64		fence;
	bool		freed;
	Datum		result;

	ik_get_any_identity(fcinfo, &scope, &key);
	if (ik_send_home(fcinfo, scope, &result))
		return result;
	if (PG_ARGISNULL(2) || PG_ARGISNULL(3))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null", PG_ARGISNULL(2) ? "fence" : "discard"),
				 errhint("in_flight and holder() show the fence of a lease.")));
	fence = PG_GETARG_INT64(2);
	freed = ik_release_lease(scope, key, &fence, "idempotency.free_lease()");
	if (freed && PG_GETARG_BOOL(3))
	{
		RowAccess	row;

		ik_open_key(&row, scope, key, RowExclusiveLock);
		ik_lock_key(&row);
		if (row.state == ROW_FOUND)
			ik_delete_row(&row);
		ik_unlock_row(&row);
		ik_close_row(&row);
	}
	PG_RETURN_BOOL(freed);
}

/* Begin with the page that argument arg names. */
static void
begin_pages(PageScan *pages, FunctionCallInfo fcinfo, int arg,
			Snapshot snapshot, LOCKMODE lockmode)
{
	int64		first;

	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("from_page must not be null"),
				 errhint("Begin with 0.")));
	first = PG_GETARG_INT64(arg);
	if (first < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("from_page must not be negative"),
				 errhint("Begin with 0.")));

	if (ik_is_distributed())
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("keys that are distributed cannot be searched page by page"),
				 errhint("As the extension's owner, ask idempotency.keys in SQL; free keys one by one.")));
	pages->rel = ik_open_table(&ik_keys, lockmode);
	pages->blocks = RelationGetNumberOfBlocks(pages->rel);
	pages->first = Min(first, pages->blocks);
	pages->end = pages->first + Min(CALL_BLOCKS, pages->blocks - pages->first);
	pages->slot = table_slot_create(pages->rel, NULL);
	pages->scan = NULL;
	if (pages->end > pages->first)
	{
		pages->scan = table_beginscan_strat(pages->rel, snapshot, 0, NULL,
											true, false);
		heap_setscanlimits(pages->scan, pages->first,
						   pages->end - pages->first);
	}
	pages->row = AllocSetContextCreate(CurrentMemoryContext,
									   "idempotency search",
									   ALLOCSET_DEFAULT_SIZES);
	pages->caller = MemoryContextSwitchTo(pages->row);
}

/* The next row is in the slot; what it takes to judge it is freed with it. */
static bool
next_row(PageScan *pages)
{
	CHECK_FOR_INTERRUPTS();
	MemoryContextReset(pages->row);
	return pages->scan != NULL &&
		table_scan_getnextslot(pages->scan, ForwardScanDirection, pages->slot) &&
		ItemPointerGetBlockNumber(&pages->slot->tts_tid) < pages->end;
}

/* Enough was found: the next call begins with the next page. */
static void
stop_after_page(PageScan *pages)
{
	pages->end = ItemPointerGetBlockNumber(&pages->slot->tts_tid) + 1;
}

static void
end_pages(PageScan *pages)
{
	MemoryContextSwitchTo(pages->caller);
	MemoryContextDelete(pages->row);
	if (pages->scan != NULL)
		table_endscan(pages->scan);
	ExecDropSingleTupleTableSlot(pages->slot);
	table_close(pages->rel, NoLock);
}

static bool
matches(const Search *search, const KeyRow *key)
{
	Jsonb	   *meta;
	JsonbValue	value;

	if (key->created_at >= search->created_before ||
		!same_text(search->scope, key->scope))
		return false;
	if (search->status != NULL &&
		!same_text(search->status,
				   DatumGetTextPP(ik_status_datum(ik_stored_status(key)))))
		return false;
	if (search->sqlstate == NULL)
		return true;
	if (key->meta == NULL)
		return false;
	meta = DatumGetJsonbP(PointerGetDatum(key->meta));
	return JB_ROOT_IS_OBJECT(meta) &&
		getKeyJsonValueFromContainer(&meta->root, "sqlstate", strlen("sqlstate"),
									 &value) != NULL &&
		value.type == jbvString &&
		value.val.string.len == VARSIZE_ANY_EXHDR(search->sqlstate) &&
		memcmp(value.val.string.val, VARDATA_ANY(search->sqlstate),
			   value.val.string.len) == 0;
}

/* Is a text, of a row, what is sought?  NULL seeks any. */
static bool
same_text(const text *sought, text *value)
{
	Size		len;

	if (sought == NULL)
		return true;
	/* in a wide row it may be compressed */
	value = DatumGetTextPP(PointerGetDatum(value));
	len = VARSIZE_ANY_EXHDR(sought);
	return len == VARSIZE_ANY_EXHDR(value) &&
		memcmp(VARDATA_ANY(sought), VARDATA_ANY(value), len) == 0;
}

static void
put_found(ReturnSetInfo *rsinfo, const PageScan *pages, const KeyRow *key,
		  TimestampTz now)
{
	bool		leased = key->status == STATUS_LEASED;
	Datum		values[11] = {
		Int64GetDatum(ItemPointerGetBlockNumber(&pages->slot->tts_tid)),
		PointerGetDatum(key->scope),
		PointerGetDatum(key->key),
		ik_status_datum(ik_stored_status(key)),
		TimestampTzGetDatum(key->created_at),
		TimestampTzGetDatum(key->expires_at),
		Int64GetDatum(key->fence),
		TimestampTzGetDatum(key->deadline),
		BoolGetDatum(key->deadline <= now),
		Int32GetDatum(key->attempt),
		PointerGetDatum(key->meta)
	};
	bool		nulls[11] = {
		[6] = key->fence == 0,
		[7] = !leased,
		[8] = !leased,
		[9] = key->attempt == 0,
		[10] = key->meta == NULL
	};

	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}
