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

/* so many replays in a row make the next one likely */
#define LOOK_FIRST_AFTER 8

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

static bool is_present(const KeyRow *stored, TimestampTz now);
static KeyStatus stored_status(const KeyRow *stored);
static KeyStatus judge(RowAccess *row, const Jsonb *request,
					   KeyAnswer *answer);
static void write_answer(RowAccess *row, const Claim *claim,
						 KeyStatus outcome, const KeyAnswer *answer);
static bool snapshot_shows_answer(RowAccess *row);
static Datum settle(FunctionCallInfo fcinfo, KeyStatus outcome);
static void *varlena_or_null(TupleTableSlot *slot, int col);

/*
 * claim(scope, key, request, ttl, wait): may this transaction do the work?
 * request, ttl and wait may be NULL: not compared, and the settings' values.
 */
Datum
idempotency_claim(PG_FUNCTION_ARGS)
{
	static const Oid types[3] = {TEXTOID, TEXTOID, JSONBOID};
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
	return idempotency_result(fcinfo, lengthof(types), types, values, nulls);
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
 * runs; false if there was nothing to give back.  Errors: IK002 for a fence
 * that was superseded, or none on a leased claim.
 */
Datum
idempotency_release(PG_FUNCTION_ARGS)
{
	text	   *scope;
	text	   *key;
	int64		fence = PG_ARGISNULL(2) ? 0 : PG_GETARG_INT64(2);
	Claim	   *claim;

	idempotency_get_identity(fcinfo, &scope, &key);
	claim = idempotency_find_claim(idempotency_lock_hash(scope, key),
								   scope, key);
	if (claim != NULL && PG_ARGISNULL(2))
	{
		idempotency_settle_claim(claim);
		PG_RETURN_BOOL(true);
	}
	PG_RETURN_BOOL(idempotency_release_lease(scope, key,
											 PG_ARGISNULL(2) ? NULL : &fence,
											 "idempotency.release()"));
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
	idempotency_check_request(&request);
	give_up = idempotency_give_up_at(NULL);

	idempotency_open_key(&row, request.scope, request.key, RowExclusiveLock);
	if (idempotency_find_claim(row.lock_hash, request.scope, request.key))
		status = KEY_HELD;
	else
		status = idempotency_seize_key(&row, &request, give_up, &answer);
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
		COL_STATUS, COL_RESPONSE, COL_META, COL_FENCE, COL_DEADLINE,
		COL_ATTEMPT, COL_CHECKPOINT, COL_CHECKPOINT_DATA, COL_CREATED_AT,
		COL_EXPIRES_AT
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
	idempotency_get_identity(fcinfo, &scope, &key);
	idempotency_open_key(&row, scope, key, AccessShareLock);
	claim = idempotency_find_claim(row.lock_hash, scope, key);
	if (claim != NULL)
	{
		values[0] = idempotency_status_datum(KEY_HELD);
		nulls[0] = false;
		if (claim->replaces && idempotency_look_at_row(&row) == ROW_FOUND)
		{
			KeyRow		next = {0};

			idempotency_read_key(row.slot, &stored);
			idempotency_take_over(&next, &stored, GetCurrentTimestamp());
			values[5] = Int32GetDatum(next.attempt);
			values[6] = PointerGetDatum(next.checkpoint);
			values[7] = PointerGetDatum(next.checkpoint_data);
			nulls[5] = next.attempt == 0;
			nulls[6] = next.checkpoint == NULL;
			nulls[7] = next.checkpoint_data == NULL;
		}
	}
	else if (idempotency_read_row(&row))
	{
		idempotency_read_key(row.slot, &stored);
		if (is_present(&stored, GetCurrentTimestamp()))
		{
			for (int i = 0; i < lengthof(columns); i++)
			{
				values[i] = row.slot->tts_values[columns[i]];
				nulls[i] = row.slot->tts_isnull[columns[i]];
			}
			values[0] = idempotency_status_datum(stored_status(&stored));
		}
	}
	result = idempotency_result(fcinfo, lengthof(types), types, values, nulls);
	idempotency_close_row(&row);
	return result;
}

/*
 * forget(scope, key): remove a finished record; false if there is none.  It
 * waits for whoever is at work on the key.
 */
Datum
idempotency_forget(PG_FUNCTION_ARGS)
{
	text	   *scope;
	text	   *key;
	RowAccess	row;
	bool		finished = false;

	idempotency_get_identity(fcinfo, &scope, &key);
	idempotency_refuse_to_write("idempotency.forget()");
	idempotency_open_key(&row, scope, key, RowExclusiveLock);
	idempotency_lock_key(&row);
	if (row.state == ROW_FOUND)
	{
		KeyRow		stored;

		idempotency_read_key(row.slot, &stored);
		finished = is_present(&stored, GetCurrentTimestamp()) &&
			stored.status != STATUS_LEASED;
		if (finished)
			idempotency_delete_row(&row);
	}
	idempotency_unlock_row(&row);
	idempotency_close_row(&row);
	PG_RETURN_BOOL(finished);
}

/*
 * The first two arguments, checked: 22004 for NULL, 22023 for what is empty,
 * too long or ours.
 */
void
idempotency_get_identity(FunctionCallInfo fcinfo, text **scope, text **key)
{
	idempotency_get_any_identity(fcinfo, scope, key);
	if (VARSIZE_ANY_EXHDR(*scope) >= strlen(OWN_SCOPE) &&
		memcmp(VARDATA_ANY(*scope), OWN_SCOPE, strlen(OWN_SCOPE)) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("scopes that begin with \"%s\" are reserved",
						OWN_SCOPE),
				 errhint("Choose another name; for locks there is idempotency.acquire_lock().")));
}

/* The first two arguments, in a scope of ours too. */
void
idempotency_get_any_identity(FunctionCallInfo fcinfo, text **scope, text **key)
{
	*scope = PG_ARGISNULL(0) ? NULL : PG_GETARG_TEXT_PP(0);
	*key = PG_ARGISNULL(1) ? NULL : PG_GETARG_TEXT_PP(1);
	idempotency_check_text(*scope, MAX_SCOPE, "scope",
						   "It names the operation and the tenant, such as 'orders:create:tenant-7'.");
	idempotency_check_key(*key, "key");
	Assert(*scope != NULL && *key != NULL);
}

/* The same for a key alone; name is what the caller calls it. */
void
idempotency_check_key(const text *key, const char *name)
{
	idempotency_check_text(key, MAX_KEY, name,
						   "Whoever means the same thing gives the same one, each time.");
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

	idempotency_check_request(request);
	give_up = idempotency_give_up_at(request->wait);
	answer->response = NULL;
	answer->meta = NULL;

	idempotency_open_key(&row, request->scope, request->key, AccessShareLock);
	*claim = idempotency_find_claim(row.lock_hash, request->scope,
									request->key);
	if (*claim != NULL)
		status = idempotency_mismatch((*claim)->request, request->request) ?
			KEY_MISMATCH : KEY_HELD;
	else
	{
		status = idempotency_seize_key(&row, request, give_up, answer);
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

	idempotency_open_key(&row, claim->scope, claim->key, RowExclusiveLock);
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

	idempotency_open_key(&row, scope, key, AccessShareLock);
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
void
idempotency_check_request(const KeyRequest *request)
{
	TimestampTz now;

	if (request->ttl == NULL)
		return;
	now = GetCurrentTimestamp();
	if (idempotency_expiry(now, request->ttl) <= now)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ttl must be positive"),
				 errhint("Give an interval such as '1 day', or NULL for idempotency.default_ttl.")));
}

/* Error 25006 or 25000 where nothing can be written. */
void
idempotency_refuse_to_write(const char *function)
{
	PreventCommandIfReadOnly(function);
	if (IsInParallelMode())
		PreventCommandIfParallelMode(function);
	PreventCommandDuringRecovery(function);
}

void
idempotency_open_key(RowAccess *row, text *scope, text *key,
					 LOCKMODE lockmode)
{
	idempotency_open_row(row, &idempotency_keys, PointerGetDatum(key),
						 PointerGetDatum(scope),
						 idempotency_lock_hash(scope, key), lockmode);
}

/*
 * The loop at the top of this file.  KEY_CLAIMED leaves the lock held, and
 * what the last look found in the row; every other status gives the lock back.
 */
KeyStatus
idempotency_seize_key(RowAccess *row, const KeyRequest *request,
					  TimestampTz give_up, KeyAnswer *answer)
{
	static int	replays = 0;	/* in a row */
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

	/* a backend that has only replayed lately looks before it locks */
	if (replays >= LOOK_FIRST_AFTER && idempotency_look_at_row(row) == ROW_FOUND)
	{
		status = judge(row, request->request, answer);
		if (status != KEY_CLAIMED)
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
			if (snapshot_shows_answer(row))
			{
				status = judge(row, request->request, answer);
				if (status != KEY_CLAIMED)
					break;
			}
			PreventCommandIfReadOnly(request->function);
			replays = 0;
			return KEY_CLAIMED;
		}
		if (!idempotency_wait_for_row(row, give_up))
		{
			status = KEY_IN_PROGRESS;
			break;
		}
	}
	idempotency_unlock_row(row);
	replays = row->state == ROW_FOUND ? Min(replays + 1, LOOK_FIRST_AFTER) : 0;
	return status;
}

/*
 * Is there an answer, forgotten by now, that the transaction's snapshot still
 * shows?  Under REPEATABLE READ and above it is replayed, as lookup() reads it:
 * the transaction also sees the work that was done then.  It goes into the
 * slot; row->state stays what the last look found.
 */
static bool
snapshot_shows_answer(RowAccess *row)
{
	KeyRow		stored;

	if (row->state != ROW_ABSENT || !IsolationUsesXactSnapshot() ||
		!idempotency_read_row(row))
		return false;
	idempotency_read_key(row->slot, &stored);
	return stored.status == STATUS_COMPLETED || stored.status == STATUS_FAILED;
}

/*
 * Do two requests differ?  Only if both are known; as the operator = of jsonb
 * compares, so the order of members and 1 against 1.0 make no difference.
 */
bool
idempotency_mismatch(const Jsonb *a, const Jsonb *b)
{
	return a != NULL && b != NULL &&
		compareJsonbContainers(unconstify(JsonbContainer *, &a->root),
							   unconstify(JsonbContainer *, &b->root)) != 0;
}

/*
 * Take the key's lock and look, waiting for every rival: for those who change
 * a row that is there.
 */
void
idempotency_lock_key(RowAccess *row)
{
	while (idempotency_try_row(row) == ROW_RIVAL || !row->locked)
		(void) idempotency_wait_for_row(row, DT_NOEND);
}

/*
 * For purge: does the row in the slot count as absent?  Then also the hash of
 * its lock.  A sweep asks this of every row, so the time is looked at first.
 */
bool
idempotency_key_expired(TupleTableSlot *slot, TimestampTz now, uint64 *hash)
{
	bool		isnull;

	if (DatumGetTimestampTz(slot_getattr(slot, COL_EXPIRES_AT + 1, &isnull)) > now)
		return false;
	slot_getsomeattrs(slot, KEYS_NATTS);
	/* in a wide row they may be compressed */
	*hash = idempotency_lock_hash(DatumGetTextPP(slot->tts_values[COL_SCOPE]),
								  DatumGetTextPP(slot->tts_values[COL_KEY]));
	return true;
}

/* The row in a slot; what it points to lives as long as the slot does. */
void
idempotency_read_key(TupleTableSlot *slot, KeyRow *key)
{
	Datum	   *values;

	slot_getsomeattrs(slot, KEYS_NATTS);
	values = slot->tts_values;
	key->created_at = DatumGetTimestampTz(values[COL_CREATED_AT]);
	key->expires_at = DatumGetTimestampTz(values[COL_EXPIRES_AT]);
	key->status = DatumGetChar(values[COL_STATUS]);
	key->key = varlena_or_null(slot, COL_KEY);
	key->scope = varlena_or_null(slot, COL_SCOPE);
	key->response = varlena_or_null(slot, COL_RESPONSE);
	key->meta = varlena_or_null(slot, COL_META);
	key->request = varlena_or_null(slot, COL_REQUEST);
	key->fence = slot->tts_isnull[COL_FENCE] ? 0 :
		DatumGetInt64(values[COL_FENCE]);
	key->deadline = slot->tts_isnull[COL_DEADLINE] ? 0 :
		DatumGetTimestampTz(values[COL_DEADLINE]);
	key->attempt = slot->tts_isnull[COL_ATTEMPT] ? 0 :
		DatumGetInt32(values[COL_ATTEMPT]);
	key->checkpoint = varlena_or_null(slot, COL_CHECKPOINT);
	key->checkpoint_data = varlena_or_null(slot, COL_CHECKPOINT_DATA);
}

/* Write the row: over the old one if the last look found it. */
void
idempotency_write_key(RowAccess *row, const KeyRow *key)
{
	Datum		values[KEYS_NATTS] = {
		[COL_CREATED_AT] = TimestampTzGetDatum(key->created_at),
		[COL_EXPIRES_AT] = TimestampTzGetDatum(key->expires_at),
		[COL_STATUS] = CharGetDatum(key->status),
		[COL_KEY] = row->key[0],
		[COL_SCOPE] = row->key[1],
		[COL_RESPONSE] = PointerGetDatum(key->response),
		[COL_META] = PointerGetDatum(key->meta),
		[COL_REQUEST] = PointerGetDatum(key->request),
		[COL_FENCE] = Int64GetDatum(key->fence),
		[COL_DEADLINE] = TimestampTzGetDatum(key->deadline),
		[COL_ATTEMPT] = Int32GetDatum(key->attempt),
		[COL_CHECKPOINT] = PointerGetDatum(key->checkpoint),
		[COL_CHECKPOINT_DATA] = PointerGetDatum(key->checkpoint_data)
	};
	bool		nulls[KEYS_NATTS] = {
		[COL_RESPONSE] = key->response == NULL,
		[COL_META] = key->meta == NULL,
		[COL_REQUEST] = key->request == NULL,
		[COL_FENCE] = key->fence == 0,
		[COL_DEADLINE] = key->deadline == 0,
		[COL_ATTEMPT] = key->attempt == 0,
		[COL_CHECKPOINT] = key->checkpoint == NULL,
		[COL_CHECKPOINT_DATA] = key->checkpoint_data == NULL
	};

	if (row->state == ROW_FOUND)
		idempotency_update_row(row, values, nulls);
	else
		idempotency_insert_row(row, values, nulls);
}

/*
 * What a new claim takes over from the row that it replaces.  The fence goes
 * on growing whatever happened.  From a lease that lapsed or was given back,
 * and is not forgotten yet, also the count of attempts and the checkpoint, so
 * that the taker can verify before it repeats.
 */
void
idempotency_take_over(KeyRow *next, const KeyRow *old, TimestampTz now)
{
	if (old->fence != 0)
		next->fence = Max(now, old->fence + 1);
	if (old->attempt != 0 && old->expires_at > now)
	{
		next->created_at = old->created_at;
		next->attempt = old->attempt + 1;
		next->checkpoint = old->checkpoint;
		next->checkpoint_data = old->checkpoint_data;
		if (next->request == NULL && old->status == STATUS_LEASED)
			next->request = old->request;
	}
}

/*
 * The moment an interval after another; NULL is idempotency.default_ttl.
 * Error: 22008.
 */
TimestampTz
idempotency_expiry(TimestampTz from, const Interval *ttl)
{
	if (ttl == NULL)
		return from + idempotency_default_ttl * USECS_PER_SEC;
	return DatumGetTimestampTz(DirectFunctionCall2(timestamptz_pl_interval,
												   TimestampTzGetDatum(from),
												   IntervalPGetDatum(ttl)));
}

/* A varlena out of a slot, to outlive it and its table's lock, or NULL. */
void *
idempotency_copy_value(void *value)
{
	if (value == NULL)
		return NULL;
	if (VARATT_IS_EXTERNAL(value))
		return detoast_external_attr(value);
	return memcpy(palloc(VARSIZE_ANY(value)), value, VARSIZE_ANY(value));
}

/* Does the row count?  A released one does not, nor does an expired one. */
static bool
is_present(const KeyRow *stored, TimestampTz now)
{
	return stored->status != STATUS_RELEASED && stored->expires_at > now;
}

static KeyStatus
stored_status(const KeyRow *stored)
{
	switch (stored->status)
	{
		case STATUS_COMPLETED:
			return KEY_COMPLETED;
		case STATUS_FAILED:
			return KEY_FAILED;
		default:
			return KEY_IN_PROGRESS;
	}
}

/*
 * What does the row that was found say?  KEY_CLAIMED: nothing that stands in
 * the way of a new claim.  Error: 40001 if a claim would rely on a row that the
 * snapshot does not show, also on the lease of an earlier attempt: nor would it
 * show what that attempt has done, to whoever verifies before he repeats it.
 */
static KeyStatus
judge(RowAccess *row, const Jsonb *request, KeyAnswer *answer)
{
	TimestampTz now = GetCurrentTimestamp();
	KeyRow		stored;

	idempotency_read_key(row->slot, &stored);
	if (stored.expires_at <= now)
		return KEY_CLAIMED;
	if (stored.status != STATUS_LEASED || stored.deadline <= now)
		idempotency_check_row_visible(row);
	if (stored.status == STATUS_RELEASED)
		return KEY_CLAIMED;
	if (request != NULL && stored.request != NULL &&
		idempotency_mismatch(DatumGetJsonbP(PointerGetDatum(stored.request)),
							 request))
		return KEY_MISMATCH;
	if (stored.status == STATUS_LEASED)
	{
		if (stored.deadline <= now)
			return KEY_CLAIMED;
		return idempotency_row_is_ours(row) ? KEY_HELD : KEY_IN_PROGRESS;
	}
	answer->response = idempotency_copy_value(stored.response);
	answer->meta = idempotency_copy_value(stored.meta);
	return stored_status(&stored);
}

/* Write the final row of a claim in transaction mode. */
static void
write_answer(RowAccess *row, const Claim *claim, KeyStatus outcome,
			 const KeyAnswer *answer)
{
	TimestampTz now = GetCurrentTimestamp();
	KeyRow		next = {
		.created_at = claim->created_at,
		.expires_at = idempotency_expiry(now, claim->ttl),
		.status = outcome == KEY_COMPLETED ? STATUS_COMPLETED : STATUS_FAILED,
		.response = answer->response,
		.meta = answer->meta,
		.request = claim->request
	};

	if (row->state == ROW_FOUND)
	{
		KeyRow		old;

		idempotency_read_key(row->slot, &old);
		idempotency_take_over(&next, &old, now);
	}
	idempotency_write_key(row, &next);
}

static Datum
settle(FunctionCallInfo fcinfo, KeyStatus outcome)
{
	text	   *scope;
	text	   *key;
	KeyAnswer	answer = {NULL, NULL};
	int64		fence = PG_ARGISNULL(4) ? 0 : PG_GETARG_INT64(4);
	Claim	   *claim;

	idempotency_get_identity(fcinfo, &scope, &key);
	idempotency_refuse_to_write(outcome == KEY_COMPLETED ?
								"idempotency.complete()" :
								"idempotency.fail()");
	if (!PG_ARGISNULL(2))
		answer.response = idempotency_response_text(idempotency_argument_type(fcinfo, 2),
													PG_GETARG_DATUM(2));
	if (!PG_ARGISNULL(3))
		answer.meta = PG_GETARG_JSONB_P(3);

	claim = idempotency_find_claim(idempotency_lock_hash(scope, key),
								   scope, key);
	if (claim != NULL && PG_ARGISNULL(4))
		idempotency_complete_claim(claim, outcome, &answer);
	else
		idempotency_settle_lease(scope, key, outcome, &answer,
								 PG_ARGISNULL(4) ? NULL : &fence);
	PG_RETURN_VOID();
}

static void *
varlena_or_null(TupleTableSlot *slot, int col)
{
	return slot->tts_isnull[col] ? NULL :
		DatumGetPointer(slot->tts_values[col]);
}
