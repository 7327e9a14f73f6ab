/*-------------------------------------------------------------------------
 *
 * call.c
 *		What functions are called with and what they return.
 *
 *-------------------------------------------------------------------------
 */
#include "base/base.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/syscache.h"
#include "utils/typcache.h"

/*
 * What a function returns, found out once.  An entry of the type cache stays
 * where it is; its descriptor goes when the type is altered, and one that comes
 * in its place has another number.
 */
typedef struct ResultType
{
	Oid			function;		/* invalid: nothing is known */
	TypeCacheEntry *type;
	uint64		checked;		/* the number of the descriptor that has the
								 * columns which the code knows */
} ResultType;

/* by the function's OID; more of them than functions that return a row */
static ResultType result_types[64];

static void learn_result_type(ResultType *result, Oid function, int natts,
							  const Oid *types);
static void forget_result_types(Datum arg, int cacheid, uint32 hashvalue);
static void unknown_row_type(void);

/*
 * The result of a function that is declared to return a composite type of
 * ours, with attributes of these types.  The type's descriptor comes from the
 * type cache: the usual get_call_result_type() copies it at each call.
 */
Datum
ik_result(FunctionCallInfo fcinfo, int natts, const Oid *types,
		  Datum *values, bool *nulls)
{
	Oid			function = fcinfo->flinfo->fn_oid;
	ResultType *result = &result_types[function % lengthof(result_types)];

	if (unlikely(result->function != function ||
				 result->type->tupDesc == NULL ||
				 result->type->tupDesc_identifier != result->checked))
		learn_result_type(result, function, natts, types);
	return HeapTupleGetDatum(heap_form_tuple(result->type->tupDesc,
											 values, nulls));
}

static void
learn_result_type(ResultType *result, Oid function, int natts,
				  const Oid *types)
{
	static bool callback_registered = false;
	TypeCacheEntry *type = lookup_type_cache(get_func_rettype(function),
											 TYPECACHE_TUPDESC);

	ik_check_columns(type->tupDesc, natts, types);
	if (!callback_registered)
	{
		CacheRegisterSyscacheCallback(PROCOID, forget_result_types, (Datum) 0);
		callback_registered = true;
	}
	result->function = function;
	result->type = type;
	result->checked = type->tupDesc_identifier;
}

/* A function's OID may come to stand for another function. */
static void
forget_result_types(Datum arg, int cacheid, uint32 hashvalue)
{
	memset(result_types, 0, sizeof(result_types));
}

/* What names a constant, as text that is made once in a backend. */
Datum
ik_constant_text(text **made, const char *constant)
{
	if (unlikely(*made == NULL))
	{
		MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);

		*made = cstring_to_text(constant);
		MemoryContextSwitchTo(old);
	}
	return PointerGetDatum(*made);
}

/*
 * Before a row is formed: does it have the columns that the code knows?  Not
 * after ALTER TYPE, and not while a session runs the library of one version
 * with the objects of another.  Error: 55000.
 */
void
ik_check_columns(TupleDesc desc, int natts, const Oid *types)
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
ik_check_rows(TupleDesc desc, Relation rel)
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
ik_argument_type(FunctionCallInfo fcinfo, int argument)
{
	Oid			type = get_fn_expr_argtype(fcinfo->flinfo, argument);

	return OidIsValid(type) ? type : TEXTOID;
}

/* The error that ik_check_text() has found. */
void
ik_refuse_text(const text *value, Size limit, const char *name,
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
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("%s is longer than %zu bytes", name, limit),
			 errhint("Use a digest of it instead.")));
}

/* How many rows at the most: 22004 if NULL, 22023 if not positive. */
int32
ik_max_argument(FunctionCallInfo fcinfo, int argument)
{
	int32		max;

	if (PG_ARGISNULL(argument))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("max must not be null")));
	max = PG_GETARG_INT32(argument);
	if (max <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max must be positive")));
	return max;
}

/* An argument that must be there: 22004. */
void
ik_not_null(FunctionCallInfo fcinfo, int argument, const char *name)
{
	if (PG_ARGISNULL(argument))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null", name)));
}

/*
 * The elements of an array, and how many there are.  Errors: 22004 for NULL, also
 * as an element unless that is allowed; 22023 for more than one dimension.
 */
int
ik_array_argument(FunctionCallInfo fcinfo, int argument, const char *name,
				  Oid type, bool nulls_allowed, Datum **elements, bool **nulls)
{
	ArrayType  *array;
	int16		typlen;
	bool		typbyval;
	char		typalign;
	int			n;

	ik_not_null(fcinfo, argument, name);
	array = PG_GETARG_ARRAYTYPE_P(argument);
	if (ARR_NDIM(array) > 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must have one dimension", name)));
	if (!nulls_allowed && array_contains_nulls(array))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not contain nulls", name)));
	get_typlenbyvalalign(type, &typlen, &typbyval, &typalign);
	deconstruct_array(array, type, typlen, typbyval, typalign, elements, nulls, &n);
	return n;
}

/* Error 25006 or 25000 where nothing can be written. */
void
ik_refuse_to_write(const char *function)
{
	PreventCommandIfReadOnly(function);
	if (IsInParallelMode())
		PreventCommandIfParallelMode(function);
	PreventCommandDuringRecovery(function);
}

/*
 * A value as the text to be stored: json and jsonb as their text, a row as
 * JSON, anything else by its output function.
 */
text *
ik_response_text(Oid type, Datum value)
{
	Oid			base = getBaseType(type);

	if (base == TEXTOID || base == VARCHAROID)
		return DatumGetTextPP(value);
	if (type_is_rowtype(base))
		return DatumGetTextPP(DirectFunctionCall1(row_to_json, value));
	return cstring_to_text(ik_to_string(type, value));
}

/* A value by its type's output function. */
char *
ik_to_string(Oid type, Datum value)
{
	Oid			output;
	bool		is_varlena;

	getTypeOutputInfo(type, &output, &is_varlena);
	return OidOutputFunctionCall(output, value);
}
