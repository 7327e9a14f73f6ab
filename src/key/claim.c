/*-------------------------------------------------------------------------
 *
 * claim.c
 *		claim, complete, fail, release, once, lookup, forget.
 *
 *-------------------------------------------------------------------------
 */
#include "key/key.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/timestamp.h"

PG_FUNCTION_INFO_V1(idempotency_claim);
PG_FUNCTION_INFO_V1(idempotency_complete);
PG_FUNCTION_INFO_V1(idempotency_fail);
PG_FUNCTION_INFO_V1(idempotency_release);
PG_FUNCTION_INFO_V1(idempotency_once);
PG_FUNCTION_INFO_V1(idempotency_lookup);
PG_FUNCTION_INFO_V1(idempotency_forget);

static Datum settle(FunctionCallInfo fcinfo, KeyStatus outcome);

/*
 * claim(scope, key, request, ttl, wait, fingerprint): may this transaction do
 * the work?
 */
Datum
idempotency_claim(PG_FUNCTION_ARGS)
{
	static const Oid types[3] = {TEXTOID, TEXTOID, JSONBOID};
	KeyRequest	request = {.function = "idempotency.claim()"};
	KeyAnswer	answer;
	KeyStatus	status;
	Datum		values[3];
	bool		nulls[3] = {false};

	ik_get_identity(fcinfo, &request.scope, &request.key);
	ik_get_request(fcinfo, 2, 5, &request);

	status = ik_claim_key(&request, &answer);
	ik_count(COUNT_CLAIM, status);

	values[0] = ik_status_datum(status);
	ik_put_answer(values + 1, nulls + 1, &answer);
	return ik_result(fcinfo, lengthof(types), types, values, nulls);
}

/*
 * complete(scope, key, response, meta, fence, ttl): store the answer of the
 * claim, with a response of any type.
 */
Datum
idempotency_complete(PG_FUNCTION_ARGS)
{
	return settle(fcinfo, KEY_COMPLETED);
}

/* fail(): the same arguments; store the failure as the answer. */
Datum
idempotency_fail(PG_FUNCTION_ARGS)
{
	return settle(fcinfo, KEY_FAILED);
}

/*
 * release(scope, key, fence): give the claim back, so that the next caller
 * runs; false if there was nothing to give back.
 */
Datum
idempotency_release(PG_FUNCTION_ARGS)
{
	text	   *scope;
	text	   *key;
	const int64 *fence = ik_fence_argument(fcinfo, 2);
	Claim	   *claim;
	Datum		result;
	bool		released = true;

	ik_get_identity(fcinfo, &scope, &key);
	claim = ik_find_claim(scope, key);
	if (claim != NULL && fence == NULL)
	{
		if (claim->away)
			(void) ik_send_home(fcinfo, scope, &result);
		ik_settle_claim(claim, true);
	}
	else if (ik_send_home(fcinfo, scope, &result))
		return result;
	else
		released = ik_release_lease(scope, key, fence,
									"idempotency.release()");
	ik_count(COUNT_RELEASE, released ? COUNT_DONE : COUNT_NOT_DONE);
	PG_RETURN_BOOL(released);
}

/*
 * once(scope, key, ttl): claim and complete in one; true the first time only.
 * While the key is in progress elsewhere that is an error, since false would
 * read as "done".
 */
Datum
idempotency_once(PG_FUNCTION_ARGS)
{
	KeyRequest	request = {.function = "idempotency.once()"};
	KeyAnswer	answer = {NULL};
	KeyStatus	status;
	TimestampTz give_up;
	RowAccess	row;
	Datum		result;

	ik_get_identity(fcinfo, &request.scope, &request.key);
	if (ik_send_home(fcinfo, request.scope, &result))
		return result;
	request.ttl = ik_ttl_argument(fcinfo, 2);
	give_up = ik_give_up_at(NULL);

	ik_open_key(&row, request.scope, request.key, RowExclusiveLock);
	status = ik_seize_key(&row, &request, give_up, &answer);
	if (status == KEY_CLAIMED)
	{
		Claim		claim = {
			.scope = request.scope,
			.key = request.key,
			.created_at = answer.claimed_at
		};

		ik_write_answer(&row, &claim, KEY_COMPLETED, &answer, request.ttl);
		ik_unlock_row(&row);
	}
	ik_close_row(&row);
	ik_count(COUNT_ONCE, status);

	if (status == KEY_IN_PROGRESS)
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("key is being processed by another session"),
				 errhint("Whether it will be done is not known yet: try again later.")));
	PG_RETURN_BOOL(status == KEY_CLAIMED);
}

/*
 * lookup(scope, key): the record, without claiming.  All NULL if there is
 * none; status held for an open claim of this transaction, with nothing else
 * but what it took over from a lease: how many an attempt it is, and the last
 * checkpoint.
 */
Datum
idempotency_lookup(PG_FUNCTION_ARGS)
{
	static const Oid types[10] = {
		TEXTOID, TEXTOID, JSONBOID, INT8OID, TIMESTAMPTZOID, INT4OID, TEXTOID,
		JSONBOID, TIMESTAMPTZOID, TIMESTAMPTZOID
	};
	static const int columns[10] = {
		KEYS_STATUS, KEYS_RESPONSE, KEYS_META, KEYS_FENCE, KEYS_DEADLINE,
		KEYS_ATTEMPT, KEYS_CHECKPOINT, KEYS_CHECKPOINT_DATA, KEYS_CREATED_AT,
		KEYS_EXPIRES_AT
	};
	text	   *scope;
	text	   *key;
	RowAccess	row;
	Claim	   *claim;
	KeyRow		stored;
	Datum		values[10] = {0};
	bool		nulls[10];
	Datum		result;

	memset(nulls, true, sizeof(nulls));
	ik_get_identity(fcinfo, &scope, &key);
	if (ik_send_home(fcinfo, scope, &result))
		return result;
	ik_open_key(&row, scope, key, AccessShareLock);
	claim = ik_find_claim(scope, key);
	if (claim != NULL)
	{
		/* ours, and open: there is no row of it yet */
		values[0] = ik_status_datum(KEY_HELD);
		nulls[0] = false;
		if (claim->replaces && ik_look_at_row(&row) == ROW_FOUND)
		{
			/* but one that it will overwrite, of a lease perhaps */
			KeyRow		next = {0};

			ik_read_key(row.slot, &stored);
			ik_take_over(&next, &stored, GetCurrentTimestamp());
			values[5] = Int32GetDatum(next.attempt);
			values[6] = PointerGetDatum(next.checkpoint);
			values[7] = PointerGetDatum(next.checkpoint_data);
			nulls[5] = next.attempt == 0;
			nulls[6] = next.checkpoint == NULL;
			nulls[7] = next.checkpoint_data == NULL;
		}
	}
	else if (ik_read_row(&row))
	{
		/* stored: as it stands, unless it counts as absent */
		ik_read_key(row.slot, &stored);
		if (ik_key_is_present(&stored, GetCurrentTimestamp()))
		{
			for (int i = 0; i < lengthof(columns); i++)
			{
				values[i] = row.slot->tts_values[columns[i]];
				nulls[i] = row.slot->tts_isnull[columns[i]];
			}
			values[0] = ik_status_datum(ik_stored_status(&stored));
		}
	}
	result = ik_result(fcinfo, lengthof(types), types, values, nulls);
	ik_close_row(&row);
	ik_count(COUNT_LOOKUP, nulls[0] ? COUNT_NOT_DONE : COUNT_DONE);
	return result;
}

/*
 * forget(scope, key): remove a finished record; false if there is none.  It
 * waits for a rival who is at work on the key.
 */
Datum
idempotency_forget(PG_FUNCTION_ARGS)
{
	text	   *scope;
	text	   *key;
	RowAccess	row;
	bool		finished = false;
	Datum		result;

	ik_get_identity(fcinfo, &scope, &key);
	if (ik_send_home(fcinfo, scope, &result))
		return result;
	ik_refuse_to_write("idempotency.forget()");
	ik_open_key(&row, scope, key, RowExclusiveLock);
	ik_lock_key(&row);
	if (row.state == ROW_FOUND)
	{
		KeyRow		stored;

		ik_read_key(row.slot, &stored);
		finished = ik_key_is_present(&stored, GetCurrentTimestamp()) &&
			stored.status != STATUS_LEASED;
		if (finished)
			ik_delete_row(&row);
	}
	ik_unlock_row(&row);
	ik_close_row(&row);
	ik_count(COUNT_FORGET, finished ? COUNT_DONE : COUNT_NOT_DONE);
	PG_RETURN_BOOL(finished);
}

static Datum
settle(FunctionCallInfo fcinfo, KeyStatus outcome)
{
	text	   *scope;
	text	   *key;
	KeyAnswer	answer = {NULL};
	const int64 *fence = ik_fence_argument(fcinfo, 4);
	int64		ttl;
	Claim	   *claim;
	TimestampTz expires_at;
	Datum		result;

	ik_get_identity(fcinfo, &scope, &key);
	ik_refuse_to_write(outcome == KEY_COMPLETED ?
					   "idempotency.complete()" :
					   "idempotency.fail()");
	ttl = ik_ttl_argument(fcinfo, 5);
	if (!PG_ARGISNULL(2))
		answer.response = ik_response_text(ik_argument_type(fcinfo, 2),
										   PG_GETARG_DATUM(2));
	if (!PG_ARGISNULL(3))
		answer.meta = PG_GETARG_JSONB_P(3);

	claim = ik_find_claim(scope, key);
	if (claim != NULL && fence == NULL)
		expires_at = ik_complete_claim(claim, outcome, &answer, ttl);
	else if (ik_send_home(fcinfo, scope, &result))
		return result;
	else
		expires_at = ik_settle_lease(scope, key, outcome, &answer, fence, ttl);
	ik_count(outcome == KEY_COMPLETED ? COUNT_COMPLETE : COUNT_FAIL, COUNT_DONE);
	PG_RETURN_TIMESTAMPTZ(expires_at);
}
