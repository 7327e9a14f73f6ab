/*-------------------------------------------------------------------------
 *
 * outbox.h
 *		The outbox: side effects that happen after the commit.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IK_OUTBOX_H
#define IK_OUTBOX_H

#include "store/store.h"

/* what purge removes (outbox.c) */
extern const Purgeable ik_purge_events;

#endif							/* IK_OUTBOX_H */
