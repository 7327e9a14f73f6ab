/*-------------------------------------------------------------------------
 *
 * sample.c
 *		A table of ours as a whole, counted or sampled.
 *
 *-------------------------------------------------------------------------
 */
#include "store/store.h"

#include "access/heapam.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/snapmgr.h"

/*
 * Up to so many blocks a table is counted, beyond it is sampled.  They are read
 * in milliseconds, and of rows of 100 bytes they hold 20,000: enough to tell
 * shares of a hundredth.
 */
#define SAMPLE_BLOCKS 300

static void show_blocks(Relation rel, BlockNumber first, BlockNumber n,
						void (*see) (TupleTableSlot *slot, void *arg),
						void *arg);

/*
 * Show each row of a table as it stands now, or, of a large table, the rows of
 * a sample of its blocks.  Returns by how much a count is to be multiplied; 1
 * if all rows were shown.
 */
double
ik_sample(Relation rel, void (*see) (TupleTableSlot *slot, void *arg),
		  void *arg)
{
	BlockNumber blocks = RelationGetNumberOfBlocks(rel);
	double		factor = (double) blocks / SAMPLE_BLOCKS;

	if (blocks <= SAMPLE_BLOCKS)
	{
		if (blocks > 0)
			show_blocks(rel, 0, blocks, see, arg);
		return 1;
	}
	for (int i = 0; i < SAMPLE_BLOCKS; i++)
		show_blocks(rel, pg_prng_uint64_range(&pg_global_prng_state,
											  i * factor,
											  (i + 1) * factor - 1),
					1, see, arg);
	return factor;
}

/*
 * Show each row of a small table, as it is committed by now, not as the
 * caller's snapshot has it.  SnapshotAny and a check of our own take no
 * predicate lock.
 */
void
ik_each_row(Relation rel, void (*see) (TupleTableSlot *slot, void *arg),
			void *arg)
{
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	Snapshot	snapshot = RegisterSnapshot(ik_latest_snapshot());
	TableScanDesc scan = table_beginscan_strat(rel, SnapshotAny, 0, NULL,
											   true, false);

	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		if (table_tuple_satisfies_snapshot(rel, slot, snapshot))
			see(slot, arg);
	}
	table_endscan(scan);
	UnregisterSnapshot(snapshot);
	ExecDropSingleTupleTableSlot(slot);
}

static void
show_blocks(Relation rel, BlockNumber first, BlockNumber n,
			void (*see) (TupleTableSlot *slot, void *arg), void *arg)
{
	TupleTableSlot *slot = table_slot_create(rel, NULL);
	TableScanDesc scan = table_beginscan_strat(rel, SnapshotSelf, 0, NULL,
											   true, false);

	heap_setscanlimits(scan, first, n);
	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		CHECK_FOR_INTERRUPTS();
		see(slot, arg);
	}
	table_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
}

/*
 * What is committed by now, at every isolation level; but PostgreSQL takes
 * no such snapshot for a query that has parallel workers, whose leader calls
 * lookup: there it is the statement's.
 */
Snapshot
ik_latest_snapshot(void)
{
	return IsInParallelMode() ? GetTransactionSnapshot() : GetLatestSnapshot();
}
