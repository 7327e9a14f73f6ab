/*-------------------------------------------------------------------------
 *
 * own.c
 *		Which objects are ours, and in whose name their tables are written.
 *
 * They are found by name, and a name can come to mean something else: once the
 * schema or a table of ours was renamed, a role that may create another of that
 * name could have us write into it, and run what is on it.  So an object is
 * ours only if it belongs to the extension.
 *
 * One that does not bear its name any more is not followed: the functions in
 * SQL and the views could not.  Error: 55000.
 *
 * Whose code can run inside our functions, and as whom?
 *
 *		keys, leases, tokens, events, and the rows that purge removes: PostgreSQL's
 *		alone.  row.c goes past the executor and refuses a table with
 *		triggers, rules, row security, checks or domains, and every index with
 *		a function, an operator class or a type that is not built in.
 *
 *		machines, the history, the rotation of token keys, and on a cluster of
 *		Citus the revocation of all tokens, which are written in SQL: also what
 *		the table's owner has put on it.  It runs as him, in a
 *		security-restricted operation, so that nothing of it is left to run
 *		later as our caller: no deferred trigger, no temporary object, no
 *		setting.  And nothing of our caller's is found by it: his search path
 *		does not count meanwhile.
 *
 *		the callers' tables, with their triggers, policies, domains and casts:
 *		as in the caller's own statement, as him.  Values become text, jsonb
 *		or a column's type as him, too, before the user is switched.
 *
 *-------------------------------------------------------------------------
 */
#include "store/store.h"

#include "catalog/dependency.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "catalog/pg_proc.h"
#include "commands/extension.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"

#define OUR_NAME "idempotency"	/* of the extension and of its schema */

pg_noreturn static void not_ours(const char *kind, const char *name);

/* The OID of a relation of ours; 55000 if there is none of that name. */
Oid
ik_own_relation(const char *name)
{
	Oid			relid = get_relname_relid(name,
										  get_namespace_oid(OUR_NAME, true));

	if (!ik_is_ours(RelationRelationId, relid))
		not_ours("relation", name);
	return relid;
}

/*
 * The OID of one of our trigger functions; 55000.  Not by name resolution:
 * a role that writes to a guarded table needs no right on our schema.
 */
Oid
ik_trigger_function(const char *name)
{
	oidvector  *no_arguments = buildoidvector(NULL, 0);
	Oid			function = GetSysCacheOid3(PROCNAMEARGSNSP, Anum_pg_proc_oid,
										   CStringGetDatum(name),
										   PointerGetDatum(no_arguments),
										   ObjectIdGetDatum(get_namespace_oid(OUR_NAME, true)));

	if (!ik_is_ours(ProcedureRelationId, function))
		not_ours("function", name);
	return function;
}

/*
 * Does the object belong to our extension?  That takes a scan of pg_depend, so
 * what was found to be ours is remembered: an object stays so for as long as
 * it is there.
 */
bool
ik_is_ours(Oid class, Oid object)
{
	static ObjectAddress ours[16];
	static int	nours = 0;
	Oid			extension;

	for (int i = 0; i < nours; i++)
		if (ours[i].objectId == object && ours[i].classId == class)
			return true;

	extension = get_extension_oid(OUR_NAME, true);
	if (!OidIsValid(object) || !OidIsValid(extension) ||
		getExtensionOfObject(class, object) != extension)
		return false;

	/* the extension can be created any number of times */
	if (nours == lengthof(ours))
		nours = 0;
	ObjectAddressSet(ours[nours], class, object);
	nours++;
	return true;
}

/*
 * Be the owner of the table from here on, in a security-restricted operation,
 * as autovacuum and REINDEX are; context may add to that.  An error ends it
 * too.  Everything that we run then is qualified.  A trigger on the table may
 * not be: it was written to run as its caller, and runs as the owner; with the
 * caller's search path it would run what the caller put there.
 */
void
ik_become_owner(Relation rel, int context, SavedUser *saved)
{
	GetUserIdAndSecContext(&saved->user, &saved->context);
	saved->nest = NewGUCNestLevel();
	SetUserIdAndSecContext(rel->rd_rel->relowner,
						   saved->context | context |
						   SECURITY_RESTRICTED_OPERATION);
	ik_set_for_now("search_path", "pg_catalog, pg_temp");
}

/* Be who called us again, with his settings. */
void
ik_become_caller(const SavedUser *saved)
{
	AtEOXact_GUC(false, saved->nest);
	SetUserIdAndSecContext(saved->user, saved->context);
}

/*
 * Run a command on a table of ours as its owner: EXECUTE on the calling function
 * is the gate, nobody else has rights on the table.  The arguments are of
 * built-in types, so that no code of the caller's runs meanwhile.  Returns the
 * number of rows, and in *returned, if that is given, the value that the only
 * one RETURNING has.
 */
uint64
ik_execute_as_owner(Relation rel, const char *command, int nargs, Oid *types,
					Datum *values, Datum *returned)
{
	SavedUser	caller;
	uint64		rows;
	int			result;

	SPI_connect();
	ik_become_owner(rel, 0, &caller);
	result = SPI_execute_with_args(command, nargs, types, values, NULL, false, 0);
	if (result < 0)
		elog(ERROR, "%s on table \"%s\"", SPI_result_code_string(result),
			 RelationGetRelationName(rel));
	ik_become_caller(&caller);
	rows = SPI_processed;
	if (returned != NULL && rows == 1)
	{
		Form_pg_attribute attr = TupleDescAttr(SPI_tuptable->tupdesc, 0);
		bool		isnull;

		*returned = SPI_datumTransfer(SPI_getbinval(SPI_tuptable->vals[0],
													SPI_tuptable->tupdesc, 1,
													&isnull),
									  attr->attbyval, attr->attlen);
	}
	SPI_finish();
	return rows;
}

static void
not_ours(const char *kind, const char *name)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("there is no %s " OUR_NAME ".%s that belongs to the extension",
					kind, name),
			 errhint("Give the schema and its objects back the names and the place that the extension gave them, or create the extension again.")));
}
