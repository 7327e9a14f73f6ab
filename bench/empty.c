/*-------------------------------------------------------------------------
 *
 * empty.c
 *		A function that does nothing, of any result type: what a call costs
 *		before it does anything.
 *
 *		CREATE FUNCTION empty_claim(...) RETURNS idempotency.claim_result
 *		LANGUAGE c AS :'empty', 'empty';
 *
 * A text (also the first column of a row) is 'claimed'; bool and numbers are
 * zero; all else is NULL.  What can be prepared once per plan is.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "funcapi.h"
#include "utils/builtins.h"

PG_MODULE_MAGIC;

PG_FUNCTION_INFO_V1(empty);

typedef struct EmptyResult
{
	Oid			type;
	TupleDesc	desc;			/* NULL: not a row */
} EmptyResult;

Datum
empty(PG_FUNCTION_ARGS)
{
	EmptyResult *result = fcinfo->flinfo->fn_extra;

	if (result == NULL)
	{
		MemoryContext old = MemoryContextSwitchTo(fcinfo->flinfo->fn_mcxt);

		result = palloc0(sizeof(EmptyResult));
		if (get_call_result_type(fcinfo, &result->type, &result->desc) == TYPEFUNC_COMPOSITE)
			result->desc = BlessTupleDesc(CreateTupleDescCopy(result->desc));
		else
			result->desc = NULL;
		fcinfo->flinfo->fn_extra = result;
		MemoryContextSwitchTo(old);
	}

	if (result->desc != NULL)
	{
		Datum		values[32];
		bool		nulls[32];

		memset(nulls, true, result->desc->natts);
		if (TupleDescAttr(result->desc, 0)->atttypid == TEXTOID)
		{
			values[0] = CStringGetTextDatum("claimed");
			nulls[0] = false;
		}
		PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(result->desc, values, nulls)));
	}

	switch (result->type)
	{
		case TEXTOID:
			PG_RETURN_TEXT_P(cstring_to_text("claimed"));
		case BOOLOID:
		case INT4OID:
		case INT8OID:
			PG_RETURN_INT64(0);
		case VOIDOID:
			PG_RETURN_VOID();
		default:
			PG_RETURN_NULL();
	}
}
