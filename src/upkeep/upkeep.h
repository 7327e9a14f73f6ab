/*-------------------------------------------------------------------------
 *
 * upkeep.h
 *		What nobody calls for: removing what has expired, and insight.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IK_UPKEEP_H
#define IK_UPKEEP_H

#include "key/key.h"
#include "outbox/outbox.h"
#include "token/token.h"

/* purge.c: removing what has expired */
/*
 * A call of an operator's looks at this many pages of a table, or at max if
 * that is more: 32 MB in which there is nothing take below a second.
 */
#define CALL_BLOCKS 4096

extern bool ik_remove_row(const Purgeable *what, Relation rel,
						  TupleTableSlot *slot, uint64 hash);
extern void ik_begin_sweep(void);
extern int64 ik_sweep(int64 max, BlockNumber max_blocks);
extern bool ik_sweep_ended(void);

/* worker.c: purging by itself */
extern void ik_register_launcher(void);

#endif							/* IK_UPKEEP_H */
