/*-------------------------------------------------------------------------
 *
 * errors.h
 *		The SQLSTATEs of our own, class IK.
 *
 * An expected outcome is a value, never an error: these are for misuse, and
 * for a caller who has been superseded.  doc/reference.md lists what to do on
 * each.
 * To name one here is to count it (activity.c), so only errcode() does.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_ERRORS_H
#define IDEMPOTENCY_ERRORS_H

/* a claim neither completed, failed nor released when its transaction ends */
#define ERRCODE_UNFINISHED_CLAIM		ik_counted_error(1)
/* a fence that was superseded, or none where one is needed */
#define ERRCODE_STALE_FENCE				ik_counted_error(2)
/* an edge that is not on the graph, or a first state that is not initial */
#define ERRCODE_ILLEGAL_TRANSITION		ik_counted_error(3)
/* a version column set by hand */
#define ERRCODE_VERSION_SET				ik_counted_error(4)
/* a trigger stored another state than was asked for */
#define ERRCODE_STATE_REWRITTEN			ik_counted_error(5)
/* complete, fail, extend or checkpoint of a key that is not held */
#define ERRCODE_NO_SUCH_CLAIM			ik_counted_error(6)
/* an unknown machine, or none attached */
#define ERRCODE_UNKNOWN_MACHINE			ik_counted_error(7)

#endif							/* IDEMPOTENCY_ERRORS_H */
