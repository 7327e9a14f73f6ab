/*-------------------------------------------------------------------------
 *
 * purge.c
 *		purge(): remove what has expired, and leases that are done with.
 *
 * An expired row counts as absent whether or not it has been removed, so there
 * is no hurry, and no index on the expiry, which every claim would pay for.
 * Instead a table is swept from end to end.  A sweep that ran every hour over
 * answers that are kept for a day would leave 1/24 of the rows too many.
 *
 * A row is removed only under its key's lock, which is tried and never waited
 * for: so nothing is taken from under a claim that is about to overwrite it.
 * The scan has a dirty snapshot: it shows which rows are being changed, and
 * takes no predicate lock.
 *
 * A sweep is the table owner's, in a security-restricted operation (own.c), as
 * autovacuum's is: the worker that sweeps is a superuser.
 *
 *-------------------------------------------------------------------------
 */
#include "upkeep/upkeep.h"

#include "access/heapam.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(idempotency_purge);

static const Purgeable *const purgeables[] = {
	&ik_purge_keys,
	&ik_purge_used_tokens,
	&ik_purge_generations,
	&ik_purge_leases,
	&ik_purge_outbox_keys
};

static int64 sweep_table(const Purgeable *what, OwnTable *table, int64 max,
						 BlockNumber max_blocks);
static int64 sweep_blocks(const Purgeable *what, Relation rel,
						  BlockNumber blocks, BlockNumber start,
						  BlockNumber *count, int64 max);

/*
 * purge(max): remove up to max expired rows, of all kinds together, and say
 * how many; fewer than max: there was no more in the pages that it looked at.
 */
Datum
idempotency_purge(PG_FUNCTION_ARGS)
{
	int32		max = ik_max_argument(fcinfo, 0);

	ik_refuse_to_write("idempotency.purge()");

	ik_begin_sweep();
	PG_RETURN_INT64(ik_sweep(max, Max(max, CALL_BLOCKS)));
}

/*
 * Begin to go once round every table: from where the last sweep stopped, or
 * from anywhere, so that calls that are cut short cover all of it in time.
 */
void
ik_begin_sweep(void)
{
	for (int i = 0; i < lengthof(purgeables); i++)
	{
		ListCell   *lc;

		foreach(lc, ik_tables_here(purgeables[i]->table))
			((OwnTable *) lfirst(lc))->sweep.left = InvalidBlockNumber;
	}
}

/*
 * Go on with a sweep, for max rows or max_blocks of each table at the most.
 * Says how many rows were removed.
 */
int64
ik_sweep(int64 max, BlockNumber max_blocks)
{
	int64		removed = 0;

	for (int i = 0; i < lengthof(purgeables); i++)
	{
		ListCell   *lc;

		foreach(lc, ik_tables_here(purgeables[i]->table))
		{
			int64		rows;

			if (removed >= max)
				return removed;
			rows = sweep_table(purgeables[i], lfirst(lc), max - removed,
							   max_blocks);
			/* the last two are counted as one, the outbox (counts.c) */
			ik_count_many(COUNT_PURGE, Min(i, 3), rows);
			removed += rows;
		}
	}
	return removed;
}

/* Has a sweep gone all the way round? */
bool
ik_sweep_ended(void)
{
	for (int i = 0; i < lengthof(purgeables); i++)
	{
		ListCell   *lc;

		foreach(lc, ik_tables_here(purgeables[i]->table))
		{
			if (((OwnTable *) lfirst(lc))->sweep.left > 0)
				return false;
		}
	}
	return true;
}

/* Go on in one table, as its owner; says how many rows were removed. */
static int64
sweep_table(const Purgeable *what, OwnTable *table, int64 max,
			BlockNumber max_blocks)
{
	Relation	rel = ik_open_table(table, RowExclusiveLock);
	BlockNumber blocks = RelationGetNumberOfBlocks(rel);
	BlockNumber count;
	int64		removed = 0;
	SavedUser	caller;

	ik_become_owner(rel, 0, &caller);
	table->sweep.left = Min(table->sweep.left, blocks);
	/* the first time, and where the table has shrunk, begin anywhere */
	if (!table->sweep.started || table->sweep.next >= blocks)
	{
		table->sweep.started = true;
		table->sweep.next = blocks == 0 ? 0 :
			pg_prng_uint64_range(&pg_global_prng_state, 0, blocks - 1);
	}
	count = Min(table->sweep.left, max_blocks);
	if (count > 0)
	{
		removed = sweep_blocks(what, rel, blocks, table->sweep.next, &count, max);
		table->sweep.next = (table->sweep.next + count) % blocks;
		table->sweep.left -= count;
		CommandCounterIncrement();
	}
	ik_become_caller(&caller);
	table_close(rel, NoLock);
	return removed;
}

/*
 * Remove what has expired, max rows at the most, from *count blocks of a table
 * that has so many: those from start on, round its end.  *count is then how
 * many of them are done.
 */
static int64
sweep_blocks(const Purgeable *what, Relation rel, BlockNumber blocks,
			 BlockNumber start, BlockNumber *count, int64 max)
{
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	TimestampTz now = GetCurrentTimestamp();
	MemoryContext row_context = AllocSetContextCreate(CurrentMemoryContext,
													  "idempotency purge",
													  ALLOCSET_DEFAULT_SIZES);
	int64		removed = 0;
	SnapshotData dirty;
	TableScanDesc scan;

	InitDirtySnapshot(dirty);
	scan = table_beginscan_strat(rel, &dirty, 0, NULL, true, false);
	heap_setscanlimits(scan, start, *count);
	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		MemoryContext old;
		uint64		hash;
		bool		gone;

		CHECK_FOR_INTERRUPTS();

		/* somebody is writing or removing it */
		if (TransactionIdIsValid(dirty.xmin) ||
			TransactionIdIsValid(dirty.xmax))
			continue;

		/* max may be any number: memory must not grow with it */
		old = MemoryContextSwitchTo(row_context);
		gone = what->expired(slot, now, &hash) &&
			ik_remove_row(what, rel, slot, hash);
		MemoryContextSwitchTo(old);
		MemoryContextReset(row_context);
		if (gone && ++removed == max)
		{
			/* the block that we stop in is not done yet */
			*count = (ItemPointerGetBlockNumber(&slot->tts_tid) - start + blocks) % blocks;
			break;
		}
	}
	table_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	MemoryContextDelete(row_context);
	return removed;
}

/* Remove the row, unless somebody is at work on its key. */
bool
ik_remove_row(const Purgeable *what, Relation rel, TupleTableSlot *slot,
			  uint64 hash)
{
	bool		removed = false;

	if (!ik_try_lock(hash))
		return false;
	if (what->may_go == NULL || what->may_go(slot))
		removed = ik_delete_tuple(rel, slot, false);
	ik_unlock(hash);
	return removed;
}
