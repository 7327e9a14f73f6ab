/*-------------------------------------------------------------------------
 *
 * init.c
 *		A retried request runs once: library start.
 *
 *-------------------------------------------------------------------------
 */
#include "upkeep/upkeep.h"

#include "miscadmin.h"

PG_MODULE_MAGIC_EXT(.name = "idempotency",.version = IDEMPOTENCY_VERSION);

void		_PG_init(void);

void
_PG_init(void)
{
	ik_define_settings();

	if (process_shared_preload_libraries_in_progress)
		ik_request_shared_memory();

	/* pg_upgrade's servers are not to write by themselves */
	if (process_shared_preload_libraries_in_progress && !IsBinaryUpgrade)
		ik_register_launcher();
}
