/*-------------------------------------------------------------------------
 *
 * empty.c
 *		A function that does nothing, of any result type: what a call costs
 *		before it does anything.
 *
 *		CREATE FUNCTION empty_claim(...) RETURNS idempotency.claim_result
 *		LANGUAGE c AS :'empty', 'empty';
 *
 * And one that computes an HMAC as a token needs it, part of a floor.
 *
 * A text (also the first column of a row) is 'claimed'; bool, numbers and times are
 * zero; all else is NULL.  What can be prepared once per plan is.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "common/hmac.h"
#include "fmgr.h"
#include "funcapi.h"
#include "utils/builtins.h"

PG_MODULE_MAGIC;

PG_FUNCTION_INFO_V1(empty);
PG_FUNCTION_INFO_V1(bare_hmac);

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
		case TIMESTAMPTZOID:
			PG_RETURN_INT64(0);
		case VOIDOID:
			PG_RETURN_VOID();
		default:
			PG_RETURN_NULL();
	}
}

/* HMAC-SHA-256 of a text, repeated to 80 bytes, under a fixed key. */
Datum
bare_hmac(PG_FUNCTION_ARGS)
{
	static const uint8 key[32];
	text	   *message = PG_GETARG_TEXT_PP(0);
	uint8		bytes[80];
	uint8		digest[32];
	pg_hmac_ctx *hmac = pg_hmac_create(PG_SHA256);

	for (int i = 0; i < lengthof(bytes); i++)
		bytes[i] = VARDATA_ANY(message)[i % VARSIZE_ANY_EXHDR(message)];
	if (pg_hmac_init(hmac, key, sizeof(key)) < 0 ||
		pg_hmac_update(hmac, bytes, sizeof(bytes)) < 0 ||
		pg_hmac_final(hmac, digest, sizeof(digest)) < 0)
		elog(ERROR, "could not compute HMAC");
	pg_hmac_free(hmac);
	PG_RETURN_TEXT_P(cstring_to_text(digest[0] == 0 ? "claimed" : "Claimed"));
}
