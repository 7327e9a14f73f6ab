/*-------------------------------------------------------------------------
 *
 * rows.c
 *		Many rows of a table of ours, found by any index and written.
 *
 * The counterpart of row.c for a service whose rows are not found by their
 * primary key alone.  A scan shows what its snapshot shows; a dirty one tells
 * of rivals at work, as in row.c.  Writing leaves out the executor and keeps up
 * the indexes that tables.c knows; it makes way for the executor only if
 * somebody has added one.
 *
 *-------------------------------------------------------------------------
 */
#include "store/store.h"

#include "access/genam.h"
#include "access/table.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "nodes/execnodes.h"
#include "utils/snapmgr.h"

static bool write_index_entries(OwnRows *rows, bool update,
								TU_UpdateIndexes update_indexes);
static bool write_index_entry(OwnRows *rows, int which, bool update);

/*
 * Open the table and all the indexes that we read.  Error: 55000 if the table
 * was altered or an index is missing.
 */
void
ik_open_rows(OwnRows *rows, OwnTable *table, LOCKMODE lockmode)
{
	rows->table = table;
	rows->lockmode = lockmode;
	rows->rel = ik_open_table(table, lockmode);
	for (int i = 0; i < table->nindexes; i++)
		rows->indexes[i] = index_open(ik_own_index(table, i), lockmode);
	rows->next = MakeSingleTupleTableSlot(RelationGetDescr(rows->rel),
										  &TTSOpsVirtual);
	rows->locked = NULL;
	rows->index_info = makeNode(IndexInfo);
}

/*
 * A reader's locks on the indexes go, as in row.c; that on the table keeps what
 * the rows that were read point to.
 */
void
ik_close_rows(OwnRows *rows)
{
	LOCKMODE	release = rows->lockmode == AccessShareLock ?
		AccessShareLock : NoLock;

	pfree(rows->index_info);
	if (rows->locked != NULL)
		ExecDropSingleTupleTableSlot(rows->locked);
	ExecDropSingleTupleTableSlot(rows->next);
	for (int i = 0; i < rows->table->nindexes; i++)
		index_close(rows->indexes[i], release);
	table_close(rows->rel, NoLock);
}

/* Begin a scan of one of the indexes. */
IndexScanDesc
ik_scan_rows(OwnRows *rows, int which, Snapshot snapshot, ScanKey keys,
			 int nkeys)
{
	IndexScanDesc scan = compat_index_beginscan(rows->rel,
												rows->indexes[which],
												snapshot, nkeys);

	index_rescan(scan, keys, nkeys, NULL, 0);
	return scan;
}

/*
 * The row to be written next, in rows->next: a copy of the one that was found,
 * for the caller to change; or, if it is NULL, a new one to be filled in.
 */
TupleTableSlot *
ik_next_version(OwnRows *rows, TupleTableSlot *found)
{
	TupleTableSlot *next = rows->next;
	int			natts = next->tts_tupleDescriptor->natts;

	ExecClearTuple(next);
	if (found != NULL)
	{
		slot_getallattrs(found);
		memcpy(next->tts_values, found->tts_values, natts * sizeof(Datum));
		memcpy(next->tts_isnull, found->tts_isnull, natts * sizeof(bool));
	}
	else
	{
		/* columns that somebody else has added stay NULL */
		memset(next->tts_isnull, true, natts * sizeof(bool));
		memset(next->tts_isnull, false, rows->table->natts * sizeof(bool));
	}
	return ExecStoreVirtualTuple(next);
}

/* Insert the next row; false if there is one with its primary key. */
bool
ik_add_row(OwnRows *rows)
{
	table_tuple_insert(rows->rel, rows->next, GetCurrentCommandId(true), 0, NULL);
	return write_index_entries(rows, false, TU_None);
}

/*
 * Lock the row that was found, so that an update need not wait.  False if it is
 * no longer as it was read, or if somebody is at work on it and we do not wait.
 * heap_update() is not made for callers who do not wait (it asserts that they
 * do; heap_delete() does not).  No lock is compatible with this one.
 */
bool
ik_lock_found_row(OwnRows *rows, TupleTableSlot *found, bool wait)
{
	TM_FailureData failure;
	TM_Result	result;

	if (rows->locked == NULL)
		rows->locked = table_slot_create(rows->rel, NULL);
	result = table_tuple_lock(rows->rel, &found->tts_tid, SnapshotSelf,
							  rows->locked, GetCurrentCommandId(true),
							  LockTupleExclusive,
							  wait ? LockWaitBlock : LockWaitSkip, 0, &failure);
	ExecClearTuple(rows->locked);
	return result == TM_Ok;
}

/* Write rows->next over the row that was found; false as above, after a wait. */
bool
ik_update_found_row(OwnRows *rows, TupleTableSlot *found)
{
	TM_FailureData failure;
	LockTupleMode lockmode;
	TU_UpdateIndexes update_indexes;

	CheckCmdReplicaIdentity(rows->rel, CMD_UPDATE);
	if (compat_tuple_update(rows->rel, &found->tts_tid, rows->next,
							GetCurrentCommandId(true), true, &failure,
							&lockmode, &update_indexes) != TM_Ok)
		return false;
	if (update_indexes != TU_None)
		(void) write_index_entries(rows, true, update_indexes);
	CommandCounterIncrement();
	return true;
}

/* Delete the row that was found; false as above. */
bool
ik_delete_found_row(OwnRows *rows, ItemPointer tid, bool wait)
{
	TM_FailureData failure;

	CheckCmdReplicaIdentity(rows->rel, CMD_DELETE);
	return compat_tuple_delete(rows->rel, tid,
							   GetCurrentCommandId(true), wait,
							   &failure) == TM_Ok;
}

/* Index the row that was written; false if its primary key exists. */
static bool
write_index_entries(OwnRows *rows, bool update, TU_UpdateIndexes update_indexes)
{
	OwnTable   *table = rows->table;
	TupleTableSlot *slot = rows->next;

	if (table->other_indexes)
		return ik_index_by_executor(rows->rel, slot, update, update_indexes);
	for (int i = 0; i < table->nindexes; i++)
	{
		const OwnIndex *own = &table->indexes[i];

		if (own->covers != NULL &&
			!own->covers(slot->tts_values, slot->tts_isnull))
			continue;
		if (!write_index_entry(rows, i, update))
			return false;
	}
	return true;
}

static bool
write_index_entry(OwnRows *rows, int which, bool update)
{
	const OwnIndex *own = &rows->table->indexes[which];
	TupleTableSlot *slot = rows->next;
	Datum		values[lengthof(own->key)];
	bool		nulls[lengthof(own->key)];

	for (int i = 0; i < own->nkeys; i++)
	{
		values[i] = slot->tts_values[own->key[i]];
		nulls[i] = slot->tts_isnull[own->key[i]];
	}
	return index_insert(rows->indexes[which], values, nulls, &slot->tts_tid,
						rows->rel,
						own->unique ? UNIQUE_CHECK_PARTIAL : UNIQUE_CHECK_NO,
						update, rows->index_info) || !own->unique;
}
