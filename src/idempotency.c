/*-------------------------------------------------------------------------
 *
 * idempotency.c
 *		A retried request runs once: library start and settings.
 *
 *-------------------------------------------------------------------------
 */
#include "idempotency.h"

#include <limits.h>

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/typcache.h"
#include "utils/varlena.h"

PG_MODULE_MAGIC_EXT(.name = "idempotency", .version = IDEMPOTENCY_VERSION);

int			idempotency_debug_hash_bits = 64;
int			idempotency_default_ttl = 24 * 60 * 60;
int			idempotency_default_wait = -1;
int			idempotency_max_lease = 24 * 60 * 60;
int			idempotency_outbox_max_attempts = 10;
char	   *idempotency_purge_databases = NULL;
int			idempotency_purge_interval = 10 * 60;
int			idempotency_token_max_ttl = 7 * 24 * 60 * 60;
int			idempotency_token_retention = 24 * 60 * 60;

void		_PG_init(void);

static bool check_databases(char **newval, void **extra, GucSource source);
pg_noreturn static void unknown_row_type(void);

/*
 * Library start: the settings, sorted by name.  Those that bound what is kept
 * are the superuser's, so that no caller can shorten what others rely on.
 */
void
_PG_init(void)
{
	/* a developer's setting: all sessions must agree on it */
	DefineCustomIntVariable("idempotency.debug_hash_bits",
							"Shortens the hash behind the keys' locks, to test collisions.",
							NULL,
							&idempotency_debug_hash_bits,
							64, 0, 64,
							PGC_SUSET, GUC_NOT_IN_SAMPLE | GUC_NO_SHOW_ALL,
							NULL, NULL, NULL);

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

	DefineCustomIntVariable("idempotency.max_lease",
							"How long a lease can last in all, from its grant, however often it is extended.",
							NULL,
							&idempotency_max_lease,
							24 * 60 * 60, 1, INT_MAX,
							PGC_SUSET, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.outbox_max_attempts",
							"After how many failed attempts an event of the outbox is parked.",
							NULL,
							&idempotency_outbox_max_attempts,
							10, 1, INT_MAX,
							PGC_SUSET, 0,
							NULL, NULL, NULL);

	DefineCustomStringVariable("idempotency.purge_databases",
							   "The databases that are purged by themselves.",
							   "A list of names; effective where the library is in shared_preload_libraries.",
							   &idempotency_purge_databases,
							   "",
							   PGC_SIGHUP, GUC_LIST_INPUT,
							   check_databases, NULL, NULL);

	DefineCustomIntVariable("idempotency.purge_interval",
							"How often the databases in idempotency.purge_databases are purged.",
							NULL,
							&idempotency_purge_interval,
							10 * 60, 1, INT_MAX / 1000,
							PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.token_max_ttl",
							"How long a one-time token can be valid.",
							"Lowered, it also shortens the tokens that were issued before.",
							&idempotency_token_max_ttl,
							7 * 24 * 60 * 60, 1, INT_MAX,
							PGC_SUSET, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomIntVariable("idempotency.token_retention",
							"How long after a one-time token's expiry it is known whether it was used.",
							NULL,
							&idempotency_token_retention,
							24 * 60 * 60, 0, INT_MAX,
							PGC_SUSET, GUC_UNIT_S,
							NULL, NULL, NULL);

	MarkGUCPrefixReserved("idempotency");

	/* pg_upgrade's servers are not to write by themselves */
	if (process_shared_preload_libraries_in_progress && !IsBinaryUpgrade)
		idempotency_register_launcher();
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

/*
 * The result of a function that is declared to return a composite type of
 * ours, with attributes of these types.  The type's descriptor comes from the
 * type cache: the usual get_call_result_type() copies it at each call.
 */
Datum
idempotency_result(FunctionCallInfo fcinfo, int natts, const Oid *types,
				   Datum *values, bool *nulls)
{
	Oid			type = get_func_rettype(fcinfo->flinfo->fn_oid);
	TypeCacheEntry *entry = lookup_type_cache(type, TYPECACHE_TUPDESC);

	idempotency_check_columns(entry->tupDesc, natts, types);
	return HeapTupleGetDatum(heap_form_tuple(entry->tupDesc, values, nulls));
}

/*
 * Before a row is formed: does it have the columns that the code knows?  Not
 * after ALTER TYPE, and not while a session runs the library of one version
 * with the objects of another.  Error: 55000.
 */
void
idempotency_check_columns(TupleDesc desc, int natts, const Oid *types)
{
	bool		known = desc != NULL && desc->natts == natts;

	for (int i = 0; known && i < natts; i++)
		known = TupleDescAttr(desc, i)->atttypid == types[i];
	if (!known)
		unknown_row_type();
}

/*
 * The same for rows that are passed on as they stand in a table, which may have
 * been altered while we waited for its lock.
 */
void
idempotency_check_rows(TupleDesc desc, Relation rel)
{
	TupleDesc	rows = RelationGetDescr(rel);
	bool		known = desc->natts == rows->natts;

	for (int i = 0; known && i < rows->natts; i++)
		known = TupleDescAttr(desc, i)->atttypid == TupleDescAttr(rows, i)->atttypid;
	if (!known)
		unknown_row_type();
}

static void
unknown_row_type(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("a row type is not as the extension's library knows it"),
			 errhint("Try again if it was altered just now; connect anew if the extension has been updated, update it if its library is newer, and take back what was altered by hand.")));
}

/*
 * The type of an argument, from 0, of a function that is declared once with
 * text and once with anyelement.  A call by the protocol's own message for it
 * (PQfn) has no expression to tell, and is possible for the former only.
 */
Oid
idempotency_argument_type(FunctionCallInfo fcinfo, int argument)
{
	Oid			type = get_fn_expr_argtype(fcinfo->flinfo, argument);

	return OidIsValid(type) ? type : TEXTOID;
}

/*
 * A text that names something: 22004 if NULL, 22023 if empty or longer than
 * limit bytes.  The hint says what it is for.
 */
void
idempotency_check_text(const text *value, Size limit, const char *name,
					   const char *hint)
{
	if (value == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null", name),
				 errhint("%s", hint)));
	if (VARSIZE_ANY_EXHDR(value) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be empty", name),
				 errhint("%s", hint)));
	if (VARSIZE_ANY_EXHDR(value) > limit)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s is longer than %zu bytes", name, limit),
				 errhint("Use a digest of it instead.")));
}
