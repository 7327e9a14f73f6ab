/*-------------------------------------------------------------------------
 *
 * compat.h
 *		Every difference between the server's major versions, newest first.
 *
 * The code is written to the newest interface; this file supplies it where
 * an older server lacks it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_COMPAT_H
#define IDEMPOTENCY_COMPAT_H

#if PG_VERSION_NUM < 190000
#define TupleDescFinalize(desc) ((void) 0)
#endif

#if PG_VERSION_NUM >= 180000
#define compat_ExecutorRun(query, direction, count) \
	ExecutorRun(query, direction, count)
#else
#define compat_ExecutorRun(query, direction, count) \
	ExecutorRun(query, direction, count, true)
#endif

#if PG_VERSION_NUM >= 180000
#define compat_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, NULL, nkeys, 0)
#else
#define compat_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, nkeys, 0)
#endif

#if PG_VERSION_NUM >= 160000
#define compat_insert_index_tuples(rel, slot, estate, update, conflict, which) \
	ExecInsertIndexTuples(rel, slot, estate, update, true, conflict, NIL, \
						  (which) == TU_Summarizing)
#else
/* which indexes an update left to be maintained: before 16, all or none */
typedef bool TU_UpdateIndexes;
#define TU_None		false
#define compat_insert_index_tuples(rel, slot, estate, update, conflict, which) \
	ExecInsertIndexTuples(rel, slot, estate, update, true, conflict, NIL)

/* we ask about functions only */
#define object_aclcheck(classid, objectid, roleid, mode) \
	pg_proc_aclcheck(objectid, roleid, mode)
#endif

#endif							/* IDEMPOTENCY_COMPAT_H */
