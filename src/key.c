/*-------------------------------------------------------------------------
 *
 * key.c
 *		Keys: claim, complete, fail, release, once, lookup, forget.
 *
 * claim() decides in one loop: try the key's lock, look at the row, and wait
 * only if neither settles it.
 *
 *		row is there and settled		its answer, whoever holds the lock
 *		no row, and we have the lock	ours
 *		no row, a rival has the lock	wait for the lock, look again
 *		a rival is writing the row		give the lock back, wait for the
 *										rival's end, look again
 *
 * A row past its expires_at counts as no row, and is overwritten in place.  A
 * claim writes nothing; complete() and fail() write the final row, once.
 *
 *-------------------------------------------------------------------------
 */
#include "idempotency.h"

#include "access/detoast.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"

/* limits of a key's parts, in bytes: they must fit an index entry */
#define MAX_SCOPE 256
#define MAX_KEY 512

/* scopes that begin so are ours */
#define OWN_SCOPE "idempotency."

/* columns of idempotency.keys, from 0 */
enum
{
	COL_CREATED_AT,
	COL_EXPIRES_AT,
	COL_STATUS,
	COL_KEY,
	COL_SCOPE,
	COL_RESPONSE,
	COL_META,
	COL_REQUEST,
	COL_FENCE,
	COL_DEADLINE,
	COL_ATTEMPT,
	COL_CHECKPOINT,
	COL_CHECKPOINT_DATA,
	KEYS_NATTS
};

/* idempotency.keys.status */
#define STATUS_COMPLETED	'c'
#define STATUS_FAILED		'f'

static const char *const status_names[] = {
	[KEY_CLAIMED] = "claimed",
	[KEY_COMPLETED] = "completed",
	[KEY_FAILED] = "failed",
	[KEY_IN_PROGRESS] = "in_progress",
	[KEY_HELD] = "held",
	[KEY_MISMATCH] = "mismatch",
	[KEY_RELEASED] = "released"
};

PG_FUNCTION_INFO_V1(idempotency_claim);
PG_FUNCTION_INFO_V1(idempotency_complete);
PG_FUNCTION_INFO_V1(idempotency_fail);
PG_FUNCTION_INFO_V1(idempotency_release);
PG_FUNCTION_INFO_V1(idempotency_once);
PG_FUNCTION_INFO_V1(idempotency_lookup);
PG_FUNCTION_INFO_V1(idempotency_forget);

static void check_request(const KeyRequest *request);
static void open_key(RowAccess *row, text *scope, text *key,
					 LOCKMODE lockmode);
static KeyStatus seize(RowAccess *row, const KeyRequest *request,
					   TimestampTz give_up, KeyAnswer *answer);
static KeyStatus judge(RowAccess *row, const Jsonb *request,
					   KeyAnswer *answer);
static bool mismatch(const Jsonb *a, const Jsonb *b);
static void write_answer(RowAccess *row, const Claim *claim,
						 KeyStatus outcome, const KeyAnswer *answer);
static TimestampTz expiry(TimestampTz completed_at, const Interval *ttl);
static Datum settle(FunctionCallInfo fcinfo, KeyStatus outcome);
static struct varlena *column(RowAccess *row, int col);
static void refuse_to_write(const char *function);

/*
 * claim(scope, key, request, ttl, wait): may this transaction do the work?
 * request, ttl and wait may be NULL: not compared, and the settings' values.
 */
Datum
idempotency_claim(PG_FUNCTION_ARGS)
{
	KeyRequest	request = {.function = "idempotency.claim()"};
	KeyAnswer	answer;
	Claim	   *claim;
	KeyStatus	status;
	Datum		values[3];
	bool		nulls[3];

	idempotency_get_identity(fcinfo, &request.scope, &request.key);
	request.request = PG_ARGISNULL(2) ? NULL : PG_GETARG_JSONB_P(2);
	request.ttl = PG_ARGISNULL(3) ? NULL : PG_GETARG_INTERVAL_P(3);
	request.wait = PG_ARGISNULL(4) ? NULL : PG_GETARG_INTERVAL_P(4);

	status = idempotency_claim_key(&request, &answer, &claim);

	values[0] = idempotency_status_datum(status);
	values[1] = PointerGetDatum(answer.response);
	values[2] = PointerGetDatum(answer.meta);
	nulls[0] = false;
	nulls[1] = answer.response == NULL;
	nulls[2] = answer.meta == NULL;
	return idempotency_result(fcinfo, values, nulls);
}

/*
 * complete(scope, key, response, meta, fence): store the answer of the claim.
 * response of any type, meta and fence may be NULL.
 */
Datum
idempotency_complete(PG_FUNCTION_ARGS)
{
	return settle(fcinfo, KEY_COMPLETED);
}

/* fail(scope, key, response, meta, fence): store the failure as the answer. */
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
	Claim	   *claim;

	idempotency_get_identity(fcinfo, &scope, &key);
	claim = idempotency_find_claim(idempotency_lock_hash(scope, key),
								   scope, key);
	if (claim == NULL)
		PG_RETURN_BOOL(false);
	idempotency_settle_claim(claim);
	PG_RETURN_BOOL(true);
}

/*
 * once(scope, key, ttl): claim and complete in one; true the first time only.
 * Error: 55P03 while the key is in progress elsewhere, since false would read
 * as "done".
 */
Datum
idempotency_once(PG_FUNCTION_ARGS)
{
	KeyRequest	request = {.function = "idempotency.once()"};
	KeyAnswer	answer = {NULL, NULL};
	KeyStatus	status;
	TimestampTz give_up;
	RowAccess	row;

	idempotency_get_identity(fcinfo, &request.scope, &request.key);
	request.ttl = PG_ARGISNULL(2) ? NULL : PG_GETARG_INTERVAL_P(2);
	check_request(&request);
	give_up = idempotency_give_up_at(NULL);

	open_key(&row, request.scope, request.key, RowExclusiveLock);
	if (idempotency_find_claim(row.lock_hash, request.scope, request.key))
		status = KEY_HELD;
	else
		status = seize(&row, &request, give_up, &answer);
	if (status == KEY_CLAIMED)
	{
		Claim		claim = {
			.scope = request.scope,
			.key = request.key,
			.ttl = request.ttl,
			.created_at = GetCurrentTimestamp()
		};

		write_answer(&row, &claim, KEY_COMPLETED, &answer);
		idempotency_unlock_row(&row);
	}
	idempotency_close_row(&row);

	if (status == KEY_IN_PROGRESS)
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("key is in progress elsewhere"),
				 errhint("Whether it will be done is not known yet: try again later.")));
	PG_RETURN_BOOL(status == KEY_CLAIMED);
}

/*
 * lookup(scope, key): the record, without claiming.  All NULL if there is
 * none; status held, and nothing else, for an open claim of this transaction.
 */
Datum
idempotency_lookup(PG_FUNCTION_ARGS)
{
	text	   *scope;
	text	   *key;
	RowAccess	row;
	Datum		values[10] = {0};
	bool		nulls[10];
	static const int columns[10] = {
		COL_STATUS, COL_RESPONSE, COL_META, COL_FENCE, COL_DEADLINE,
		COL_ATTEMPT, COL_CHECKPOINT, COL_CHECKPOINT_DATA, COL_CREATED_AT,
		COL_EXPIRES_AT
	};
	Datum		result;

	memset(nulls, true, sizeof(nulls));
	idempotency_get_identity(fcinfo, &scope, &key);
	open_key(&row, scope, key, AccessShareLock);
	if (idempotency_find_claim(row.lock_hash, scope, key))
	{
		values[0] = idempotency_status_datum(KEY_HELD);
		nulls[0] = false;
	}
	else if (idempotency_read_row(&row))
	{
		slot_getsomeattrs(row.slot, KEYS_NATTS);
		if (DatumGetTimestampTz(row.slot->tts_values[COL_EXPIRES_AT]) > GetCurrentTimestamp())
		{
			for (int i = 0; i < lengthof(columns); i++)
			{
				values[i] = row.slot->tts_values[columns[i]];
				nulls[i] = row.slot->tts_isnull[columns[i]];
			}
			values[0] = idempotency_status_datum(DatumGetChar(values[0]) == STATUS_COMPLETED ?
												 KEY_COMPLETED : KEY_FAILED);
		}
	}
	result = idempotency_result(fcinfo, values, nulls);
	idempotency_close_row(&row);
	return result;
}

/*
 * forget(scope, key): remove a finished record; false if there was none.  It
 * waits for whoever is at work on the key.
 */
Datum
idempotency_forget(PG_FUNCTION_ARGS)
{
	text	   *scope;
	text	   *key;
	RowAccess	row;
	bool		removed = false;

	idempotency_get_identity(fcinfo, &scope, &key);
	refuse_to_write("idempotency.forget()");
	open_key(&row, scope, key, RowExclusiveLock);
	while (idempotency_try_row(&row) == ROW_RIVAL || !row.locked)
		(void) idempotency_wait_for_row(&row, DT_NOEND);
	if (row.state == ROW_FOUND)
	{
		idempotency_delete_row(&row);
		removed = true;
	}
	idempotency_unlock_row(&row);
	idempotency_close_row(&row);
	PG_RETURN_BOOL(removed);
}

/*
 * The first two arguments, checked: 22004 for NULL, 22023 for what is empty,
 * too long or ours.
 */
void
idempotency_get_identity(FunctionCallInfo fcinfo, text **scope, text **key)
{
	Size		scope_len;
	Size		key_len;

	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null",
						PG_ARGISNULL(0) ? "scope" : "key")));

	*scope = PG_GETARG_TEXT_PP(0);
	*key = PG_GETARG_TEXT_PP(1);
	scope_len = VARSIZE_ANY_EXHDR(*scope);
	key_len = VARSIZE_ANY_EXHDR(*key);
	if (scope_len == 0 || key_len == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be empty",
						scope_len == 0 ? "scope" : "key")));
	if (scope_len > MAX_SCOPE)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("scope is longer than %d bytes", MAX_SCOPE)));
	if (key_len > MAX_KEY)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("key is longer than %d bytes", MAX_KEY),
				 errhint("Use a digest of a long key as the key.")));
	if (scope_len >= strlen(OWN_SCOPE) &&
		memcmp(VARDATA_ANY(*scope), OWN_SCOPE, strlen(OWN_SCOPE)) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("scopes that begin with \"%s\" are reserved",
						OWN_SCOPE)));
}

/* A status by its name in SQL, as text. */
Datum
idempotency_status_datum(KeyStatus status)
{
	return CStringGetTextDatum(status_names[status]);
}

/*
 * Claim a key for this transaction, or say why not: then *answer is what is
 * stored, if anything is.  *claim is set if the claim is new.
 */
KeyStatus
idempotency_claim_key(const KeyRequest *request, KeyAnswer *answer,
					  Claim **claim)
{
	TimestampTz give_up;
	RowAccess	row;
	KeyStatus	status;

	check_request(request);
	give_up = idempotency_give_up_at(request->wait);
	answer->response = NULL;
	answer->meta = NULL;

	open_key(&row, request->scope, request->key, AccessShareLock);
	*claim = idempotency_find_claim(row.lock_hash, request->scope,
									request->key);
	if (*claim != NULL)
		status = mismatch((*claim)->request, request->request) ?
			KEY_MISMATCH : KEY_HELD;
	else
	{
		status = seize(&row, request, give_up, answer);
		if (status == KEY_CLAIMED)
		{
			*claim = idempotency_add_claim(row.lock_hash, request->scope,
										   request->key, request->request,
										   request->ttl);
			(*claim)->replaces = row.state == ROW_FOUND;
		}
	}
	idempotency_close_row(&row);
	return status;
}

/* Store the answer of an open claim, and give its lock back. */
void
idempotency_complete_claim(Claim *claim, KeyStatus outcome,
						   const KeyAnswer *answer)
{
	RowAccess	row;

	open_key(&row, claim->scope, claim->key, RowExclusiveLock);
	row.locked = true;
	if (claim->replaces)
	{
		KeyAnswer	ignored;

		/* the row that was there at the claim, unless it has gone since */
		if (idempotency_try_row(&row) == ROW_FOUND &&
			judge(&row, NULL, &ignored) != KEY_CLAIMED)
			row.state = ROW_ABSENT; /* the unique index will say no */
	}
	write_answer(&row, claim, outcome, answer);
	idempotency_close_row(&row);
	idempotency_settle_claim(claim);
}

/* What is stored under the key and visible to us; false: nothing is. */
bool
idempotency_read_answer(text *scope, text *key, KeyStatus *status,
						KeyAnswer *answer)
{
	RowAccess	row;
	bool		found;

	open_key(&row, scope, key, AccessShareLock);
	found = idempotency_read_row(&row);
	if (found)
		*status = judge(&row, NULL, answer);
	idempotency_close_row(&row);
	return found && *status != KEY_CLAIMED;
}

/*
 * A value as the text to be stored: json and jsonb as their text, a row as
 * JSON, anything else by its output function.
 */
text *
idempotency_response_text(Oid type, Datum value)
{
	Oid			base = getBaseType(type);
	Oid			output;
	bool		is_varlena;

	if (base == TEXTOID || base == VARCHAROID)
		return DatumGetTextPP(value);
	if (type_is_rowtype(base))
		return DatumGetTextPP(DirectFunctionCall1(row_to_json, value));
	getTypeOutputInfo(type, &output, &is_varlena);
	return cstring_to_text(OidOutputFunctionCall(output, value));
}

/* A ttl must be positive (22023), and so must the moment it leads to (22008). */
static void
check_request(const KeyRequest *request)
{
	TimestampTz now;

	if (request->ttl == NULL)
		return;
	now = GetCurrentTimestamp();
	if (expiry(now, request->ttl) <= now)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ttl must be positive")));
}

static void
open_key(RowAccess *row, text *scope, text *key, LOCKMODE lockmode)
{
	idempotency_open_row(row, &idempotency_keys, PointerGetDatum(key),
						 PointerGetDatum(scope),
						 idempotency_lock_hash(scope, key), lockmode);
}

/*
 * The loop at the top of this file.  KEY_CLAIMED leaves the lock held; every
 * other status gives it back.
 */
static KeyStatus
seize(RowAccess *row, const KeyRequest *request, TimestampTz give_up,
	  KeyAnswer *answer)
{
	KeyStatus	status;

	/* a parallel worker could not hold a claim */
	if (IsInParallelMode())
		PreventCommandIfParallelMode(request->function);

	if (RecoveryInProgress())
	{
		/* nothing can be claimed here, and nothing is worth a wait */
		status = idempotency_read_row(row) ?
			judge(row, request->request, answer) : KEY_CLAIMED;
		if (status == KEY_CLAIMED)
			PreventCommandDuringRecovery(request->function);
		return status;
	}

	for (;;)
	{
		idempotency_try_row(row);
		if (row->state == ROW_FOUND)
		{
			status = judge(row, request->request, answer);
			if (status != KEY_CLAIMED)
				break;
		}
		if (row->state != ROW_RIVAL && row->locked)
		{
			PreventCommandIfReadOnly(request->function);
			return KEY_CLAIMED;
		}
		if (!idempotency_wait_for_row(row, give_up))
		{
			status = KEY_IN_PROGRESS;
			break;
		}
	}
	idempotency_unlock_row(row);
	return status;
}

/*
 * What does the row that was found say?  KEY_CLAIMED: nothing, it counts as
 * absent.
 */
static KeyStatus
judge(RowAccess *row, const Jsonb *request, KeyAnswer *answer)
{
	Datum	   *values;

	slot_getsomeattrs(row->slot, KEYS_NATTS);
	values = row->slot->tts_values;
	if (DatumGetTimestampTz(values[COL_EXPIRES_AT]) <= GetCurrentTimestamp())
		return KEY_CLAIMED;

	idempotency_check_row_visible(row);
	if (request != NULL && !row->slot->tts_isnull[COL_REQUEST] &&
		mismatch(DatumGetJsonbP(values[COL_REQUEST]), request))
		return KEY_MISMATCH;
	answer->response = (text *) column(row, COL_RESPONSE);
	answer->meta = (Jsonb *) column(row, COL_META);
	return DatumGetChar(values[COL_STATUS]) == STATUS_COMPLETED ?
		KEY_COMPLETED : KEY_FAILED;
}

/* Do two requests differ?  Only if both are known; as jsonb's = compares. */
static bool
mismatch(const Jsonb *a, const Jsonb *b)
{
	return a != NULL && b != NULL &&
		compareJsonbContainers(unconstify(JsonbContainer *, &a->root),
							   unconstify(JsonbContainer *, &b->root)) != 0;
}

/* Write the final row: over the old one if the last look found it. */
static void
write_answer(RowAccess *row, const Claim *claim, KeyStatus outcome,
			 const KeyAnswer *answer)
{
	Datum		values[KEYS_NATTS] = {0};
	bool		nulls[KEYS_NATTS];

	memset(nulls, true, sizeof(nulls));
	values[COL_CREATED_AT] = TimestampTzGetDatum(claim->created_at);
	values[COL_EXPIRES_AT] = TimestampTzGetDatum(expiry(GetCurrentTimestamp(),
														claim->ttl));
	values[COL_STATUS] = CharGetDatum(outcome == KEY_COMPLETED ?
									  STATUS_COMPLETED : STATUS_FAILED);
	values[COL_KEY] = PointerGetDatum(claim->key);
	values[COL_SCOPE] = PointerGetDatum(claim->scope);
	values[COL_RESPONSE] = PointerGetDatum(answer->response);
	values[COL_META] = PointerGetDatum(answer->meta);
	values[COL_REQUEST] = PointerGetDatum(claim->request);
	for (int i = 0; i <= COL_SCOPE; i++)
		nulls[i] = false;
	nulls[COL_RESPONSE] = answer->response == NULL;
	nulls[COL_META] = answer->meta == NULL;
	nulls[COL_REQUEST] = claim->request == NULL;

	if (row->state == ROW_FOUND)
		idempotency_update_row(row, values, nulls);
	else
		idempotency_insert_row(row, values, nulls);
}

/* Until when an answer of this moment is replayed.  Error: 22008. */
static TimestampTz
expiry(TimestampTz completed_at, const Interval *ttl)
{
	if (ttl == NULL)
		return completed_at + idempotency_default_ttl * USECS_PER_SEC;
	return DatumGetTimestampTz(DirectFunctionCall2(timestamptz_pl_interval,
												   TimestampTzGetDatum(completed_at),
												   IntervalPGetDatum(ttl)));
}

static Datum
settle(FunctionCallInfo fcinfo, KeyStatus outcome)
{
	text	   *scope;
	text	   *key;
	KeyAnswer	answer = {NULL, NULL};
	Claim	   *claim;

	idempotency_get_identity(fcinfo, &scope, &key);
	refuse_to_write(outcome == KEY_COMPLETED ?
					"idempotency.complete()" : "idempotency.fail()");
	if (!PG_ARGISNULL(2))
		answer.response = idempotency_response_text(get_fn_expr_argtype(fcinfo->flinfo, 2),
													PG_GETARG_DATUM(2));
	if (!PG_ARGISNULL(3))
		answer.meta = PG_GETARG_JSONB_P(3);

	claim = idempotency_find_claim(idempotency_lock_hash(scope, key),
								   scope, key);
	if (claim == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_NO_SUCH_CLAIM),
				 errmsg("this transaction holds no claim on the key"),
				 errhint("Claim it in the same transaction, and go on only if the status is \"claimed\".")));
	if (!PG_ARGISNULL(4))
		ereport(ERROR,
				(errcode(ERRCODE_STALE_FENCE),
				 errmsg("fence is not that of the claim"),
				 errdetail("The key was claimed in transaction mode, which has no fence.")));
	idempotency_complete_claim(claim, outcome, &answer);
	PG_RETURN_VOID();
}

/* A varlena column of the row that was found, copied, or NULL. */
static struct varlena *
column(RowAccess *row, int col)
{
	struct varlena *value;

	if (row->slot->tts_isnull[col])
		return NULL;
	value = (struct varlena *) DatumGetPointer(row->slot->tts_values[col]);
	if (VARATT_IS_EXTERNAL(value))
		return detoast_external_attr(value);
	return memcpy(palloc(VARSIZE_ANY(value)), value, VARSIZE_ANY(value));
}

/* Error 25006 or 25000 where nothing can be written. */
static void
refuse_to_write(const char *function)
{
	PreventCommandIfReadOnly(function);
	if (IsInParallelMode())
		PreventCommandIfParallelMode(function);
	PreventCommandDuringRecovery(function);
}
