/*-------------------------------------------------------------------------
 *
 * insight.c
 *		What the views and holder() are made of.
 *
 * They read our tables past the executor: so that a view which is read under
 * SERIALIZABLE takes no predicate lock and makes no claim fail, and so that
 * they answer in milliseconds on tables of any size.
 *
 *-------------------------------------------------------------------------
 */
#include "upkeep/upkeep.h"

#include <math.h>

#include "access/genam.h"
#include "access/heapam.h"
#include "access/subtrans.h"
#include "access/table.h"
#include "access/tableam.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

/* what key_counts() tells keys apart by, beside their status */
typedef enum CountBy
{
	BY_TOTAL,
	BY_PREFIX,					/* of the scope, before the first colon */
	BY_SCOPE
} CountBy;

/* a line of key_counts() */
typedef struct KeyCount
{
	char		scope[256 + 1]; /* hash key, with status */
	char		status;
	int64		rows;
	int64		expired;
} KeyCount;

typedef struct KeyCounts
{
	CountBy		by;
	HTAB	   *counts;
	TimestampTz now;
} KeyCounts;

PG_FUNCTION_INFO_V1(idempotency_lock_hash_of);
PG_FUNCTION_INFO_V1(idempotency_key_writers);
PG_FUNCTION_INFO_V1(idempotency_leased_keys);
PG_FUNCTION_INFO_V1(idempotency_leased_key);
PG_FUNCTION_INFO_V1(idempotency_key_counts);
PG_FUNCTION_INFO_V1(idempotency_key_tables);

static CountBy count_by(const text *by);
static void show_leases(OwnTable *table, ReturnSetInfo *rsinfo);
static void show_counts(OwnTable *table, CountBy by, ReturnSetInfo *rsinfo);
static void count_key(TupleTableSlot *slot, void *arg);

/* lock_hash(scope, key): the name of the key's lock. */
Datum
idempotency_lock_hash_of(PG_FUNCTION_ARGS)
{
	text	   *scope;
	text	   *key;

	ik_get_any_identity(fcinfo, &scope, &key);
	PG_RETURN_INT64((int64) ik_lock_hash(scope, key));
}

/*
 * key_writers(scope, key): the open transaction that has written the key's row,
 * and its subtransaction that did, or NULL.  Only the former is in pg_locks
 * when the savepoint has been released, or the transaction been prepared; a
 * rival that came before waits for the latter.
 */
Datum
idempotency_key_writers(PG_FUNCTION_ARGS)
{
	text	   *scope;
	text	   *key;
	RowAccess	row;
	TransactionId writer;
	Datum		writers[2];

	ik_get_any_identity(fcinfo, &scope, &key);
	if (RecoveryInProgress())
		PG_RETURN_NULL();
	ik_open_key(&row, scope, key, AccessShareLock);
	writer = ik_row_writer(&row);
	ik_close_row(&row);
	if (!TransactionIdIsValid(writer))
		PG_RETURN_NULL();
	writers[0] = TransactionIdGetDatum(SubTransGetTopmostTransaction(writer));
	writers[1] = TransactionIdGetDatum(writer);
	PG_RETURN_ARRAYTYPE_P(construct_array(writers, lengthof(writers), XIDOID,
										  sizeof(TransactionId), true,
										  TYPALIGN_INT));
}

/*
 * leased_keys(): the rows of idempotency.keys that are leased, by the index on
 * them, as they stand now: the snapshot of a transaction that wrote over what
 * it cannot see would show two versions of a row.  The scan's own snapshot
 * takes no predicate lock either, and marks what is dead to everybody, so that
 * the next one does not come by there again.
 */
Datum
idempotency_leased_keys(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	ListCell   *lc;

	InitMaterializedSRF(fcinfo, 0);
	foreach(lc, ik_tables_here(&ik_keys))
		show_leases(lfirst(lc), rsinfo);
	return (Datum) 0;
}

static void
show_leases(OwnTable *table, ReturnSetInfo *rsinfo)
{
	/* pg_monitor sees who holds a key, not what he works on */
	static const int hidden[] = {
		KEYS_META, KEYS_FINGERPRINT, KEYS_CHECKPOINT, KEYS_CHECKPOINT_DATA
	};
	Relation	rel = ik_open_table(table, AccessShareLock);
	Relation	index;
	TupleTableSlot *slot;
	Snapshot	snapshot;
	SnapshotData not_dead;
	IndexScanDesc scan;

	ik_check_rows(rsinfo->setDesc, rel);
	index = index_open(ik_own_index(table, KEYS_LEASED), AccessShareLock);
	slot = table_slot_create(rel, NULL);
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	InitNonVacuumableSnapshot(not_dead, GlobalVisTestFor(rel));
	scan = compat_index_beginscan(rel, index, &not_dead, 0);
	index_rescan(scan, NULL, 0, NULL, 0);
	while (index_getnext_slot(scan, ForwardScanDirection, slot))
	{
		CHECK_FOR_INTERRUPTS();
		if (!table_tuple_satisfies_snapshot(rel, slot, snapshot))
			continue;
		slot_getallattrs(slot);
		for (int i = 0; i < lengthof(hidden); i++)
			slot->tts_isnull[hidden[i]] = true;
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
							 slot->tts_values, slot->tts_isnull);
	}
	index_endscan(scan);
	UnregisterSnapshot(snapshot);
	ExecDropSingleTupleTableSlot(slot);
	index_close(index, AccessShareLock);
	table_close(rel, AccessShareLock);
}

/* leased_key(scope, key): the row among them that is the key's, or none. */
Datum
idempotency_leased_key(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	text	   *scope;
	text	   *key;
	RowAccess	row;

	ik_get_any_identity(fcinfo, &scope, &key);
	InitMaterializedSRF(fcinfo, 0);
	ik_open_key(&row, scope, key, AccessShareLock);
	ik_check_rows(rsinfo->setDesc, row.rel);
	if (ik_read_newest_row(&row))
	{
		KeyRow		stored;

		ik_read_key(row.slot, &stored);
		if (stored.status == STATUS_LEASED)
			tuplestore_puttupleslot(rsinfo->setResult, row.slot);
	}
	ik_close_row(&row);
	return (Datum) 0;
}

/*
 * key_counts(by): rows by status and by scope, by prefix or in total, and how
 * many of them have expired, of each table of keys on this node.
 * A large table is sampled, block by block, and the counts are extrapolated:
 * then estimate is true.
 */
Datum
idempotency_key_counts(PG_FUNCTION_ARGS)
{
	static const Oid types[5] = {TEXTOID, CHAROID, INT8OID, INT8OID, BOOLOID};
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	CountBy		by = count_by(PG_ARGISNULL(0) ? NULL : PG_GETARG_TEXT_PP(0));
	ListCell   *lc;

	InitMaterializedSRF(fcinfo, 0);
	ik_check_columns(rsinfo->setDesc, lengthof(types), types);
	foreach(lc, ik_tables_here(&ik_keys))
		show_counts(lfirst(lc), by, rsinfo);
	return (Datum) 0;
}

static void
show_counts(OwnTable *table, CountBy by, ReturnSetInfo *rsinfo)
{
	HASHCTL		ctl = {
		.keysize = offsetof(KeyCount, rows),
		.entrysize = sizeof(KeyCount),
		.hcxt = CurrentMemoryContext
	};
	KeyCounts	keys = {
		.by = by,
		.counts = hash_create("idempotency key counts", 64, &ctl,
							  HASH_ELEM | HASH_BLOBS | HASH_CONTEXT),
		.now = GetCurrentTimestamp()
	};
	Relation	rel = ik_open_table(table, AccessShareLock);
	double		factor = ik_sample(rel, count_key, &keys);
	HASH_SEQ_STATUS seq;
	KeyCount   *count;

	table_close(rel, AccessShareLock);
	hash_seq_init(&seq, keys.counts);
	while ((count = hash_seq_search(&seq)) != NULL)
	{
		Datum		values[5] = {
			CStringGetTextDatum(count->scope),
			CharGetDatum(count->status),
			Int64GetDatum(rint(count->rows * factor)),
			Int64GetDatum(rint(count->expired * factor)),
			BoolGetDatum(factor > 1)
		};
		bool		nulls[5] = {by == BY_TOTAL};

		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	hash_destroy(keys.counts);
}

/* key_tables(): idempotency.keys, or what there is of it on this node. */
Datum
idempotency_key_tables(PG_FUNCTION_ARGS)
{
	List	   *tables = ik_tables_here(&ik_keys);
	Datum	   *relids = palloc(list_length(tables) * sizeof(Datum) + 1);
	int			n = 0;
	ListCell   *lc;

	foreach(lc, tables)
	{
		Relation	rel = ik_open_table(lfirst(lc), AccessShareLock);

		relids[n++] = ObjectIdGetDatum(RelationGetRelid(rel));
		table_close(rel, AccessShareLock);
	}
	PG_RETURN_ARRAYTYPE_P(construct_array(relids, n, OIDOID, sizeof(Oid),
										  true, TYPALIGN_INT));
}

static CountBy
count_by(const text *by)
{
	static const char *const names[] = {
		[BY_TOTAL] = "total",
		[BY_PREFIX] = "prefix",
		[BY_SCOPE] = "scope"
	};

	if (by == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("by must not be null"),
				 errhint("Count keys by total, prefix or scope.")));
	for (int i = 0; i < lengthof(names); i++)
		if (strcmp(text_to_cstring(by), names[i]) == 0)
			return i;
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("keys cannot be counted by \"%s\"", text_to_cstring(by)),
			 errhint("Count keys by total, prefix or scope.")));
}

static void
count_key(TupleTableSlot *slot, void *arg)
{
	KeyCounts  *keys = arg;
	KeyRow		key;
	KeyCount	sought = {0};
	KeyCount   *count;
	bool		found;

	ik_read_key(slot, &key);
	if (keys->by != BY_TOTAL)
		text_to_cstring_buffer(key.scope, sought.scope, sizeof(sought.scope));
	if (keys->by == BY_PREFIX)
	{
		/* what is behind it goes, to the last byte: all of them are compared */
		Size		prefix = strcspn(sought.scope, ":");

		memset(sought.scope + prefix, 0, sizeof(sought.scope) - prefix);
	}
	sought.status = key.status;
	count = hash_search(keys->counts, &sought, HASH_ENTER, &found);
	if (!found)
		count->rows = count->expired = 0;
	count->rows++;
	if (key.expires_at <= keys->now)
		count->expired++;
}
