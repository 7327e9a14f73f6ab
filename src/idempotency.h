/*-------------------------------------------------------------------------
 *
 * idempotency.h
 *		What the files of this extension share.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_H
#define IDEMPOTENCY_H

#include "postgres.h"

#include "fmgr.h"

#include "compat.h"
#include "errors.h"

/* settings (idempotency.c) */
extern int	idempotency_default_ttl;	/* seconds */
extern int	idempotency_default_wait;	/* milliseconds; -1: endless */

#endif							/* IDEMPOTENCY_H */
