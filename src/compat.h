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

#if PG_VERSION_NUM >= 180000
#define compat_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, NULL, nkeys, 0)
#else
#define compat_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, nkeys, 0)
#endif

#if PG_VERSION_NUM < 160000
#define object_aclcheck(classid, objectid, roleid, mode) \
	((classid) == ProcedureRelationId ? \
	 pg_proc_aclcheck(objectid, roleid, mode) : \
	 (elog(ERROR, "unexpected class %u", classid), ACLCHECK_NO_PRIV))

/* Which indexes an update left to be maintained: before 16, all or none. */
typedef bool TU_UpdateIndexes;
#define TU_None				false
#define TU_Summarizing		(-1)	/* never */
#endif

#endif							/* IDEMPOTENCY_COMPAT_H */
