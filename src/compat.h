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

#if PG_VERSION_NUM >= 190000
#define compat_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, NULL, nkeys, 0, SO_NONE)
#define compat_tuple_update(rel, tid, slot, cid, failure, mode, which) \
	table_tuple_update(rel, tid, slot, cid, 0, InvalidSnapshot, \
					   InvalidSnapshot, true, failure, mode, which)
#define compat_tuple_delete(rel, tid, cid, failure) \
	table_tuple_delete(rel, tid, cid, 0, InvalidSnapshot, InvalidSnapshot, \
					   true, failure)
#define compat_insert_index_tuples(rel, slot, estate, update, conflict, which) \
	ExecInsertIndexTuples(rel, estate, \
						  EIIT_NO_DUPE_ERROR | \
						  ((update) ? EIIT_IS_UPDATE : 0) | \
						  ((which) == TU_Summarizing ? EIIT_ONLY_SUMMARIZING : 0), \
						  slot, NIL, conflict)
#else
#define compat_tuple_update(rel, tid, slot, cid, failure, mode, which) \
	table_tuple_update(rel, tid, slot, cid, InvalidSnapshot, \
					   InvalidSnapshot, true, failure, mode, which)
#define compat_tuple_delete(rel, tid, cid, failure) \
	table_tuple_delete(rel, tid, cid, InvalidSnapshot, InvalidSnapshot, \
					   true, failure, false)
#endif

#if PG_VERSION_NUM >= 180000 && PG_VERSION_NUM < 190000
#define compat_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, NULL, nkeys, 0)
#endif

#if PG_VERSION_NUM < 180000
#define compat_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, nkeys, 0)

#define pg_noreturn pg_attribute_noreturn()
#endif

#if PG_VERSION_NUM >= 160000 && PG_VERSION_NUM < 190000
#define compat_insert_index_tuples(rel, slot, estate, update, conflict, which) \
	ExecInsertIndexTuples(rel, slot, estate, update, true, conflict, NIL, \
						  (which) == TU_Summarizing)
#endif

#if PG_VERSION_NUM < 160000
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
