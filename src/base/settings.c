/*-------------------------------------------------------------------------
 *
 * settings.c
 *		The settings, sorted by name.
 *
 * Those that decide about rows of others (how long they are kept, how often they
 * are tried) have one value per server, that of its configuration: no caller can
 * shorten what others rely on, and no two sessions disagree about it.
 *
 *-------------------------------------------------------------------------
 */
#include "base/base.h"

#include <limits.h>

#include "utils/guc.h"
#include "utils/varlena.h"

#ifdef IK_COLLISIONS
int			ik_debug_hash_bits = 64;
#endif
int			ik_default_ttl = 24 * 60 * 60;
int			ik_default_wait = 30 * 1000;
bool		ik_log_purge = false;
int			ik_max_lease = 24 * 60 * 60;
int			ik_max_ttl = 366 * 24 * 60 * 60;
int			ik_outbox_max_attempts = 10;
char	   *ik_purge_databases = NULL;
int			ik_purge_interval = 10 * 60;
int			ik_token_max_ttl = 7 * 24 * 60 * 60;
int			ik_token_retention = 24 * 60 * 60;

static bool check_databases(char **newval, void **extra, GucSource source);

/* Called once, when the library is loaded. */
void
ik_define_settings(void)
{
#ifdef IK_COLLISIONS
	/* in a build for test/collisions: all sessions must agree on it */
	DefineCustomIntVariable("idempotency.debug_hash_bits",
							"Shortens the hash behind the keys' locks.",
							NULL,
							&ik_debug_hash_bits,
							64, 0, 64,
							PGC_SUSET, GUC_NOT_IN_SAMPLE,
							NULL, NULL, NULL);
#endif

	DefineCustomIntVariable("idempotency.default_ttl",
							"How long an answer is replayed, from its completion, when the caller gives no ttl.",
							NULL,
							&ik_default_ttl,
							24 * 60 * 60, 1, INT_MAX,
							PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);

	/*
	 * With an end: who waits holds a connection, and a few retries of one key
	 * that is held for long would take all that a pool has.  By then the
	 * client that the answer is for has mostly given up.
	 */
	DefineCustomIntVariable("idempotency.default_wait",
							"How long a call waits for a rival transaction when the caller gives no wait.",
							"-1 waits without limit, 0 does not wait.",
							&ik_default_wait,
							30 * 1000, -1, INT_MAX,
							PGC_USERSET, GUC_UNIT_MS,
							NULL, NULL, NULL);

	DefineCustomBoolVariable("idempotency.log_purge",
							 "Logs what each round of the purge worker has removed.",
							 NULL,
							 &ik_log_purge,
							 false,
							 PGC_SIGHUP, 0,
							 NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.max_lease",
							"How long a lease can last in all, from its grant, however often it is extended.",
							NULL,
							&ik_max_lease,
							24 * 60 * 60, 1, INT_MAX,
							PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.max_ttl",
							"How long an answer can be replayed, even if the caller gives a longer ttl.",
							NULL,
							&ik_max_ttl,
							366 * 24 * 60 * 60, 1, INT_MAX,
							PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.outbox_max_attempts",
							"After how many failed attempts an event of the outbox is parked.",
							NULL,
							&ik_outbox_max_attempts,
							10, 1, INT_MAX,
							PGC_SIGHUP, 0,
							NULL, NULL, NULL);

	DefineCustomStringVariable("idempotency.purge_databases",
							   "The databases that are purged by themselves.",
							   "A list of names; effective where the library is in shared_preload_libraries.",
							   &ik_purge_databases,
							   "",
							   PGC_SIGHUP, GUC_LIST_INPUT,
							   check_databases, NULL, NULL);

	DefineCustomIntVariable("idempotency.purge_interval",
							"How often the databases in idempotency.purge_databases are purged.",
							NULL,
							&ik_purge_interval,
							10 * 60, 1, INT_MAX / 1000,
							PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.token_max_ttl",
							"How long a one-time token can be valid.",
							"Lowered, it also shortens the tokens that were issued before.",
							&ik_token_max_ttl,
							7 * 24 * 60 * 60, 1, INT_MAX,
							PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.token_retention",
							"How long after a one-time token's expiry it is known whether it was used.",
							NULL,
							&ik_token_retention,
							24 * 60 * 60, 0, INT_MAX,
							PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);

	MarkGUCPrefixReserved("idempotency");
}

/*
 * Set a setting that anybody may set, until AtEOXact_GUC() ends the nest level.
 */
void
ik_set_for_now(const char *name, const char *value)
{
	(void) set_config_option(name, value, PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
}

/* Accept a list of names. */
static bool
check_databases(char **newval, void **extra, GucSource source)
{
	char	   *names = pstrdup(*newval);
	List	   *list;
	bool		ok = SplitGUCList(names, ',', &list);

	if (!ok)
		GUC_check_errdetail("List syntax is invalid.");
	list_free(list);
	pfree(names);
	return ok;
}
