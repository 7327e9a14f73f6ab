/*-------------------------------------------------------------------------
 *
 * idempotency.c
 *		A retried request runs once: library start and settings.
 *
 *-------------------------------------------------------------------------
 */
#include "idempotency.h"

#include <limits.h>

#include "utils/guc.h"

PG_MODULE_MAGIC;

int			idempotency_default_ttl = 24 * 60 * 60;
int			idempotency_default_wait = -1;

void		_PG_init(void);

/*
 * Library start: the settings, sorted by name.  Those that bound what is kept
 * are the superuser's, so that no caller can shorten what others rely on.
 */
void
_PG_init(void)
{
	DefineCustomIntVariable("idempotency.default_ttl",
							"How long an answer is replayed, from its completion, when the caller gives no ttl.",
							NULL,
							&idempotency_default_ttl,
							24 * 60 * 60, 1, INT_MAX,
							PGC_SUSET, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.default_wait",
							"How long a call waits for a rival transaction when the caller gives no wait.",
							"-1 waits without limit, 0 does not wait.",
							&idempotency_default_wait,
							-1, -1, INT_MAX,
							PGC_USERSET, GUC_UNIT_MS,
							NULL, NULL, NULL);

	MarkGUCPrefixReserved("idempotency");
}
