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

/* 19 has what is derived from the columns of a descriptor worked out once */
#if PG_VERSION_NUM < 190000
#define TupleDescFinalize(desc) ((void) 0)
#endif

/* 16 moved the macros of varlena out of postgres.h, 19 out of most headers */
#if PG_VERSION_NUM >= 160000
#include "varatt.h"
#endif

/* 18 lets a library tell its name and version */
#if PG_VERSION_NUM < 180000
#define PG_MODULE_MAGIC_EXT(...) PG_MODULE_MAGIC
#endif

/* named segments of shared memory: 19 passes its callback an argument */
#if PG_VERSION_NUM >= 190000
#define COMPAT_SEGMENT_INIT_PARAMETERS void *ptr, void *arg
#define compat_named_segment(name, size, init, found) \
	GetNamedDSMSegment(name, size, init, found, NULL)
#elif PG_VERSION_NUM >= 170000
#define COMPAT_SEGMENT_INIT_PARAMETERS void *ptr
#define compat_named_segment(name, size, init, found) \
	GetNamedDSMSegment(name, size, init, found)
#endif

#if PG_VERSION_NUM >= 180000
#define compat_ExecutorRun(query, direction, count) \
	ExecutorRun(query, direction, count)
#else
#define compat_ExecutorRun(query, direction, count) \
	ExecutorRun(query, direction, count, true)
#endif

/* 18 adds instrumentation, 19 flags */
#if PG_VERSION_NUM >= 190000
#define compat_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, NULL, nkeys, 0, SO_NONE)
#elif PG_VERSION_NUM >= 180000
#define compat_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, NULL, nkeys, 0)
#else
#define compat_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, nkeys, 0)
#endif

/* 19 adds options, and takes the changing of a partition as one of them */
#if PG_VERSION_NUM >= 190000
#define compat_tuple_update(rel, tid, slot, cid, wait, failure, mode, which) \
	table_tuple_update(rel, tid, slot, cid, 0, InvalidSnapshot, \
					   InvalidSnapshot, wait, failure, mode, which)
#define compat_tuple_delete(rel, tid, cid, wait, failure) \
	table_tuple_delete(rel, tid, cid, 0, InvalidSnapshot, InvalidSnapshot, \
					   wait, failure)
#else
#define compat_tuple_update(rel, tid, slot, cid, wait, failure, mode, which) \
	table_tuple_update(rel, tid, slot, cid, InvalidSnapshot, \
					   InvalidSnapshot, wait, failure, mode, which)
#define compat_tuple_delete(rel, tid, cid, wait, failure) \
	table_tuple_delete(rel, tid, cid, InvalidSnapshot, InvalidSnapshot, \
					   wait, failure, false)
#endif

/* 16 can give an error back instead of raising it */
#if PG_VERSION_NUM >= 160000
#define compat_name_list(name) stringToQualifiedNameList(name, NULL)
#else
#define compat_name_list(name) stringToQualifiedNameList(name)
#endif

/* 17 lets an extension name what it waits for */
#if PG_VERSION_NUM >= 170000
#define compat_wait_event(name) WaitEventExtensionNew(name)
#else
#define compat_wait_event(name) PG_WAIT_EXTENSION
#endif

/* the number of a backend's PGPROC */
#if PG_VERSION_NUM < 170000
#define MyProcNumber (MyProc->pgprocno)
#endif

/* 16 tells the indexes apart that an update left alone, 19 has flags for all */
#if PG_VERSION_NUM >= 190000
#define compat_insert_index_tuples(rel, slot, estate, update, conflict, which) \
	ExecInsertIndexTuples(rel, estate, \
						  EIIT_NO_DUPE_ERROR | \
						  ((update) ? EIIT_IS_UPDATE : 0) | \
						  ((which) == TU_Summarizing ? EIIT_ONLY_SUMMARIZING : 0), \
						  slot, NIL, conflict)
#elif PG_VERSION_NUM >= 160000
#define compat_insert_index_tuples(rel, slot, estate, update, conflict, which) \
	ExecInsertIndexTuples(rel, slot, estate, update, true, conflict, NIL, \
						  (which) == TU_Summarizing)
#else
typedef bool TU_UpdateIndexes;
#define TU_None		false
#define compat_insert_index_tuples(rel, slot, estate, update, conflict, which) \
	ExecInsertIndexTuples(rel, slot, estate, update, true, conflict, NIL)
#endif

/* 17 moved it */
#if PG_VERSION_NUM >= 170000
#define compat_my_lxid (MyProc->vxid.lxid)
#else
#define compat_my_lxid (MyProc->lxid)
#endif

/* before 18 it stands behind the declaration as well */
#if PG_VERSION_NUM < 180000
#define pg_noreturn pg_attribute_noreturn()
#endif

/* 19 keeps the result beside the state */
#if PG_VERSION_NUM >= 190000
#define compat_JsonbState JsonbInState
#define compat_push_jsonb(state, token, value) \
	pushJsonbValue(state, token, value)
#else
typedef struct compat_JsonbState
{
	struct JsonbParseState *parse;
	struct JsonbValue *result;
} compat_JsonbState;
#define compat_push_jsonb(state, token, value) \
	((state)->result = pushJsonbValue(&(state)->parse, token, value))
#endif

/* 16 has one function for every kind of object; we ask about functions only */
#if PG_VERSION_NUM < 160000
#define object_aclcheck(classid, objectid, roleid, mode) \
	pg_proc_aclcheck(objectid, roleid, mode)

/* and about the ownership of relations only */
#define object_ownercheck(classid, objectid, roleid) \
	pg_class_ownercheck(objectid, roleid)
#endif

#endif							/* IDEMPOTENCY_COMPAT_H */
