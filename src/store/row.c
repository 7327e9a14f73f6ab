/*-------------------------------------------------------------------------
 *
 * row.c
 *		One row of a table of ours, read and written without SQL.
 *
 * A row is looked up by its primary key in a scan with a dirty snapshot, and
 * written with table_tuple_insert and its index entries.  The dirty snapshot
 * shows what no MVCC snapshot can: the row of a rival that has not committed,
 * so that we can wait for it, and the row that was committed after our
 * statement began.  It also takes no predicate lock, so two different keys
 * never conflict under SERIALIZABLE.
 *
 *-------------------------------------------------------------------------
 */
#include "store/store.h"

#include "access/detoast.h"
#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/transam.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "commands/trigger.h"
#include "executor/executor.h"
#include "nodes/execnodes.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/snapmgr.h"

static void name_wait(void *arg);
static bool wrote_row(RowAccess *row);
static bool read_row(RowAccess *row, Snapshot snapshot);
static IndexScanDesc begin_scan(RowAccess *row, Snapshot snapshot);
static void look(RowAccess *row);
static HeapTupleHeader header(RowAccess *row);
static void write_index_entries(RowAccess *row, TupleTableSlot *slot,
								bool update, TU_UpdateIndexes update_indexes);
pg_noreturn static void lost_race(void);

/*
 * Prepare to look at, wait for and write one row, by the columns of the
 * table's primary key in its order.  lock_hash names the lock that everybody
 * who changes this row holds.  Error: 55000 if the table was altered.
 */
void
ik_open_row(RowAccess *row, OwnTable *table, Datum key1, Datum key2,
			uint64 lock_hash, LOCKMODE lockmode)
{
	row->table = table;
	row->lockmode = lockmode;
	row->rel = ik_open_table(table, lockmode);
	row->index = index_open(table->found[PRIMARY_KEY], lockmode);
	row->slot = table_slot_create(row->rel, NULL);
	row->key[0] = key1;
	row->key[1] = key2;
	row->state = ROW_ABSENT;
	row->rival = InvalidTransactionId;
	row->lock_hash = lock_hash;
	row->locked = false;
}

/*
 * The slot goes; the row's lock stays, if it is held.  A writer's locks on the
 * table stay, too.  A reader's go: a transaction that keeps one, and asks for
 * the writer's later, would come to a deadlock with a REINDEX in between.
 */
void
ik_close_row(RowAccess *row)
{
	LOCKMODE	release = row->lockmode == AccessShareLock ?
		AccessShareLock : NoLock;

	ExecDropSingleTupleTableSlot(row->slot);
	index_close(row->index, release);
	table_close(row->rel, release);
}

/*
 * Try the lock, and look whether or not it was got: a row that is there is
 * answered without waiting for anybody.  Only a caller who holds the lock
 * (row->locked) may act on ROW_ABSENT or change what was found.
 */
RowState
ik_try_row(RowAccess *row)
{
	if (!row->locked)
		row->locked = ik_try_lock(row->lock_hash);
	look(row);
	return row->state;
}

/* Look without the lock: good for an answer that is there, and no more. */
RowState
ik_look_at_row(RowAccess *row)
{
	look(row);
	return row->state;
}

/*
 * Wait for what stood in the way: the rival who is writing the row, or else
 * the holder of the lock.  The caller then tries again.  False: give_up came
 * first.
 */
bool
ik_wait_for_row(RowAccess *row, TimestampTz give_up)
{
	bool		named = row->table->named;
	bool		done;
	ErrorContextCallback context = {
		.previous = error_context_stack,
		.callback = name_wait,
		.arg = row
	};

	if (TIMESTAMP_IS_NOBEGIN(give_up))
	{
		ik_unlock_row(row);
		return false;
	}
	/* a key may be shown: to operators, and in what log_lock_waits writes */
	if (named)
		error_context_stack = &context;
	ik_begin_wait(row->lock_hash,
				  named ? DatumGetTextPP(row->key[1]) : NULL,
				  named ? DatumGetTextPP(row->key[0]) : NULL);
	if (TransactionIdIsValid(row->rival))
	{
		/* never with the lock in hand: the rival may ask for it next */
		ik_unlock_row(row);
		done = ik_wait_for_xact(row->rival, give_up);
	}
	else
		done = row->locked = ik_wait_for_lock(row->lock_hash, give_up);
	ik_end_wait();
	error_context_stack = context.previous;
	return done;
}

/* What a message of the server's about a lock is about. */
static void
name_wait(void *arg)
{
	RowAccess  *row = arg;

	errcontext("waiting for key \"%s\" in scope \"%s\"",
			   TextDatumGetCString(row->key[0]),
			   TextDatumGetCString(row->key[1]));
}

/*
 * Take the row's lock and look, waiting for every rival: for those who change
 * a row that is there.
 */
void
ik_lock_row(RowAccess *row)
{
	(void) ik_hold_home(row, DT_NOEND);
	while (ik_try_row(row) == ROW_RIVAL || !row->locked)
		(void) ik_wait_for_row(row, DT_NOEND);
}

/* Give the lock back, if it is held. */
void
ik_unlock_row(RowAccess *row)
{
	if (row->locked)
		ik_unlock(row->lock_hash);
	row->locked = false;
}

/*
 * Look without lock or wait at what the transaction may see: the rows of its
 * snapshot and its own.  For lookups, and for a standby, where an uncommitted
 * row is absent.
 *
 * A writer judges what is newest, so under REPEATABLE READ it may have written
 * over a version that its snapshot does not show.  That snapshot still shows
 * the version before; what we wrote is what counts.
 */
bool
ik_read_row(RowAccess *row)
{
	return read_row(row, IsolationUsesXactSnapshot() && wrote_row(row) ?
					SnapshotSelf : GetTransactionSnapshot());
}

/* The same of what is committed by now, at every isolation level. */
bool
ik_read_newest_row(RowAccess *row)
{
	return read_row(row, ik_latest_snapshot());
}

/* The open transaction that is writing the row, ours included, or none. */
TransactionId
ik_row_writer(RowAccess *row)
{
	look(row);
	if (row->state == ROW_RIVAL)
		return row->rival;
	if (row->state == ROW_FOUND && ik_row_is_ours(row))
		return HeapTupleHeaderGetXmin(header(row));
	return InvalidTransactionId;
}

/* Was the row that was found written by this transaction? */
bool
ik_row_is_ours(RowAccess *row)
{
	return TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(header(row)));
}

/*
 * Under REPEATABLE READ and above, a row that was committed after the
 * transaction's snapshot is a lost race (40001), as for ON CONFLICT.
 */
void
ik_check_row_visible(RowAccess *row)
{
	if (IsolationUsesXactSnapshot() &&
		!ik_row_is_ours(row) &&
		!table_tuple_satisfies_snapshot(row->rel, row->slot,
										GetTransactionSnapshot()))
		lost_race();
}

/* Insert the row.  Error: 40001 if a rival whom no lock showed was first. */
void
ik_insert_row(RowAccess *row, Datum *values, bool *nulls)
{
	TupleTableSlot *slot = row->slot;

	ExecClearTuple(slot);
	memcpy(slot->tts_values, values, row->table->natts * sizeof(Datum));
	memcpy(slot->tts_isnull, nulls, row->table->natts * sizeof(bool));
	for (int i = row->table->natts; i < slot->tts_tupleDescriptor->natts; i++)
		slot->tts_isnull[i] = true;
	ExecStoreVirtualTuple(slot);

	table_tuple_insert(row->rel, slot, GetCurrentCommandId(true), 0, NULL);
	write_index_entries(row, slot, false, TU_None);

	/* or a second call in the same statement could not change it */
	CommandCounterIncrement();
}

/*
 * Write a new version of the row that was found; columns of other makers stay.
 * Error: 40001 if a rival whom no lock showed was first.
 */
void
ik_update_row(RowAccess *row, Datum *values, bool *nulls)
{
	TupleTableSlot *slot = MakeSingleTupleTableSlot(RelationGetDescr(row->rel),
													&TTSOpsVirtual);
	TM_FailureData failure;
	LockTupleMode lockmode;
	TU_UpdateIndexes update_indexes;

	CheckCmdReplicaIdentity(row->rel, CMD_UPDATE);

	slot_getallattrs(row->slot);
	memcpy(slot->tts_values, row->slot->tts_values,
		   slot->tts_tupleDescriptor->natts * sizeof(Datum));
	memcpy(slot->tts_isnull, row->slot->tts_isnull,
		   slot->tts_tupleDescriptor->natts * sizeof(bool));
	memcpy(slot->tts_values, values, row->table->natts * sizeof(Datum));
	memcpy(slot->tts_isnull, nulls, row->table->natts * sizeof(bool));
	ExecStoreVirtualTuple(slot);

	if (compat_tuple_update(row->rel, &row->slot->tts_tid, slot,
							GetCurrentCommandId(true), true, &failure, &lockmode,
							&update_indexes) != TM_Ok)
		lost_race();
	if (update_indexes != TU_None)
		write_index_entries(row, slot, true, update_indexes);
	ExecDropSingleTupleTableSlot(slot);

	CommandCounterIncrement();
}

/* Delete the row that was found.  Error: 40001 as above. */
void
ik_delete_row(RowAccess *row)
{
	if (!ik_delete_tuple(row->rel, row->slot, true))
		lost_race();
	CommandCounterIncrement();
}

/*
 * Delete the row in the slot, as an SQL DELETE would: refused (55000) where the
 * table's publication could not tell subscribers which row it was.  False: a
 * rival has changed it, or is changing it and we do not wait.
 */
bool
ik_delete_tuple(Relation rel, TupleTableSlot *slot, bool wait)
{
	TM_FailureData failure;

	CheckCmdReplicaIdentity(rel, CMD_DELETE);
	return compat_tuple_delete(rel, &slot->tts_tid, GetCurrentCommandId(true),
							   wait, &failure) == TM_Ok;
}

/* A copy of a varlena, or NULL; one out of a slot outlives its table's lock. */
void *
ik_copy_value(const void *value)
{
	if (value == NULL)
		return NULL;
	if (VARATT_IS_EXTERNAL(value))
		return detoast_external_attr(unconstify(void *, value));
	return memcpy(palloc(VARSIZE_ANY(value)), value, VARSIZE_ANY(value));
}

/* Did this transaction write or delete a version of the row? */
static bool
wrote_row(RowAccess *row)
{
	IndexScanDesc scan;
	bool		ours = false;

	if (!TransactionIdIsValid(GetTopTransactionIdIfAny()))
		return false;

	scan = begin_scan(row, SnapshotAny);
	while (!ours && index_getnext_slot(scan, ForwardScanDirection, row->slot))
	{
		HeapTupleHeader tuple = header(row);

		ours = ik_row_is_ours(row) ||
			(!(tuple->t_infomask & HEAP_XMAX_INVALID) &&
			 !HEAP_XMAX_IS_LOCKED_ONLY(tuple->t_infomask) &&
			 TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetUpdateXid(tuple)));
	}
	index_endscan(scan);
	return ours;
}

static bool
read_row(RowAccess *row, Snapshot snapshot)
{
	IndexScanDesc scan;
	bool		found = false;

	if (IsMVCCSnapshot(snapshot))
		snapshot = RegisterSnapshot(snapshot);
	scan = begin_scan(row, SnapshotAny);

	/* SnapshotAny and a check of our own, since that takes no predicate lock */
	while (!found && index_getnext_slot(scan, ForwardScanDirection, row->slot))
		found = table_tuple_satisfies_snapshot(row->rel, row->slot, snapshot);

	index_endscan(scan);
	if (IsMVCCSnapshot(snapshot))
		UnregisterSnapshot(snapshot);
	return found;
}

static IndexScanDesc
begin_scan(RowAccess *row, Snapshot snapshot)
{
	OwnTable   *table = row->table;
	int			nkeys = table->indexes[PRIMARY_KEY].nkeys;
	ScanKeyData keys[2];
	IndexScanDesc scan;

	for (int i = 0; i < nkeys; i++)
		ScanKeyEntryInitialize(&keys[i], 0, i + 1, BTEqualStrategyNumber,
							   InvalidOid, row->index->rd_indcollation[i],
							   table->equal[i], row->key[i]);
	scan = compat_index_beginscan(row->rel, row->index, snapshot, nkeys);
	index_rescan(scan, keys, nkeys, NULL, 0);
	return scan;
}

/* What is there under this key now, committed or not? */
static void
look(RowAccess *row)
{
	SnapshotData dirty;
	IndexScanDesc scan;

	InitDirtySnapshot(dirty);
	row->state = ROW_ABSENT;
	row->rival = InvalidTransactionId;

	/* the first version that is not dead tells, HOT chains included */
	scan = begin_scan(row, &dirty);
	if (index_getnext_slot(scan, ForwardScanDirection, row->slot))
	{
		row->rival = TransactionIdIsValid(dirty.xmin) ? dirty.xmin : dirty.xmax;
		row->state = TransactionIdIsValid(row->rival) ? ROW_RIVAL : ROW_FOUND;
	}
	index_endscan(scan);
}

static HeapTupleHeader
header(RowAccess *row)
{
	return ExecFetchSlotHeapTuple(row->slot, false, NULL)->t_data;
}

/*
 * Maintain every index of the table, also those of others; most rows go into that
 * of the primary key alone.  The unique check is the last word, and it should
 * have nothing to say: every writer has looked under the lock.
 */
static void
write_index_entries(RowAccess *row, TupleTableSlot *slot, bool update,
					TU_UpdateIndexes update_indexes)
{
	OwnTable   *table = row->table;
	bool		unique;

	if (table->other_indexes ||
		(table->in_partial && table->in_partial(slot->tts_values)))
		unique = ik_index_by_executor(row->rel, slot, update, update_indexes);
	else
	{
		bool		nulls[lengthof(row->key)] = {0};

		unique = index_insert(row->index, row->key, nulls, &slot->tts_tid,
							  row->rel, UNIQUE_CHECK_PARTIAL, update,
							  makeNode(IndexInfo));
	}
	if (!unique)
		lost_race();
}

/* The executor's way to index a row that was written; false: it is not unique. */
bool
ik_index_by_executor(Relation rel, TupleTableSlot *slot, bool update,
					 TU_UpdateIndexes update_indexes)
{
	EState	   *estate = CreateExecutorState();
	ResultRelInfo *result_rel = makeNode(ResultRelInfo);
	bool		conflict = false;

	InitResultRelInfo(result_rel, rel, 0, NULL, 0);
	ExecOpenIndices(result_rel, false);
	compat_insert_index_tuples(result_rel, slot, estate, update, &conflict,
							   update_indexes);
	ExecCloseIndices(result_rel);
	FreeExecutorState(estate);
	return !conflict;
}

/* Without DETAIL, which would show the key. */
static void
lost_race(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			 errmsg("could not serialize access due to a concurrent change of the same key"),
			 errhint("The transaction might succeed if retried.")));
}
