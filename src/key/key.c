/*-------------------------------------------------------------------------
 *
 * key.c
 *		Keys: the row, the verdict on it, and how a key is seized.
 *
 * claim() decides in one loop: try the key's lock, look at the row, and wait
 * only if neither settles it.
 *
 *		row is there and settled		its answer, with the lock or without
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
#include "key/key.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"

/*
 * Limits of a key's parts, in bytes.  Both go into one index entry, for which a
 * page of the smallest kind, of 4 kB, has room for three; and a scope of 256
 * with a key of 512 is more than anybody has asked for.
 */
#define MAX_SCOPE 256
#define MAX_KEY 512

/*
 * So many replays in a row make the next one likely.  Few enough that a backend
 * learns it within one batch, and enough that a key which is retried twice or
 * three times does not make it guess wrong at the next new one.
 */
#define LOOK_FIRST_AFTER 8

/* scopes that begin so are ours */
#define OWN_SCOPE "idempotency."

static bool key_expired(TupleTableSlot *slot, TimestampTz now,
						uint64 *hash);

const Purgeable ik_purge_keys = {&ik_keys, key_expired, NULL};

const char *const ik_key_statuses[COUNTED_OUTCOMES] = {
	[KEY_CLAIMED] = "claimed",
	[KEY_COMPLETED] = "completed",
	[KEY_FAILED] = "failed",
	[KEY_IN_PROGRESS] = "in_progress",
	[KEY_HELD] = "held",
	[KEY_MISMATCH] = "mismatch",
	[KEY_RELEASED] = "released"
};

static KeyStatus judge(RowAccess *row, const KeyRequest *request,
					   KeyAnswer *answer);
static void name_lock(RowAccess *row);
static bool snapshot_shows_answer(RowAccess *row);
static KeyStatus claim_away(const KeyRequest *request, KeyAnswer *answer);
static TimestampTz complete_away(const Claim *claim, KeyStatus outcome,
								 const KeyAnswer *answer, int64 ttl);
static bool read_away(text *scope, text *key, KeyStatus *status,
					  KeyAnswer *answer);
static void read_texts(text **values, KeyAnswer *answer);
static text *ttl_text(int64 ttl);
static KeyStatus status_of(const text *name);
static void *varlena_or_null(TupleTableSlot *slot, int col);

/* The first two arguments, checked: not NULL, empty, too long or ours. */
void
ik_get_identity(FunctionCallInfo fcinfo, text **scope, text **key)
{
	ik_get_any_identity(fcinfo, scope, key);
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
ik_get_any_identity(FunctionCallInfo fcinfo, text **scope, text **key)
{
	*scope = PG_ARGISNULL(0) ? NULL : PG_GETARG_TEXT_PP(0);
	*key = PG_ARGISNULL(1) ? NULL : PG_GETARG_TEXT_PP(1);
	ik_start_counting();
	ik_check_scope(*scope);
	ik_check_key(*key, "key");
	Assert(*scope != NULL && *key != NULL);
}

/* The same for a scope alone. */
void
ik_check_scope(const text *scope)
{
	ik_check_text(scope, MAX_SCOPE, "scope",
				  "It names the operation and the tenant, such as 'orders:create:tenant-7'.");
}

/* And for a key; name is what the caller calls it. */
void
ik_check_key(const text *key, const char *name)
{
	ik_check_text(key, MAX_KEY, name,
				  "Use the same key every time you retry the same operation.");
}

/* A status by its name in SQL, as text. */
Datum
ik_status_datum(KeyStatus status)
{
	static text *made[COUNTED_OUTCOMES];

	return ik_constant_text(&made[status], ik_key_statuses[status]);
}

/*
 * Claim a key for this transaction, or say why not: then *answer is what is
 * stored, if anything is.
 */
KeyStatus
ik_claim_key(const KeyRequest *request, KeyAnswer *answer)
{
	TimestampTz give_up;
	RowAccess	row;
	KeyStatus	status;

	give_up = ik_give_up_at(request->wait);
	memset(answer, 0, sizeof(KeyAnswer));
	if (ik_is_away(request->scope))
		return claim_away(request, answer);

	/* the lock of the write to come, though a replay needs less */
	ik_open_key(&row, request->scope, request->key, RowExclusiveLock);
	status = ik_seize_key(&row, request, give_up, answer);
	if (status == KEY_CLAIMED)
		ik_add_claim(row.lock_hash, request->scope, request->key,
					 ik_fingerprint(request), request->ttl,
					 row.state == ROW_FOUND, answer->claimed_at);
	ik_close_row(&row);
	return status;
}

/*
 * Store the answer of an open claim, and give its lock back.  ttl 0 stands for
 * the claim's.  Returns until when the answer is replayed.
 */
TimestampTz
ik_complete_claim(Claim *claim, KeyStatus outcome, const KeyAnswer *answer,
				  int64 ttl)
{
	RowAccess	row;
	TimestampTz expires_at;

	if (claim->away)
	{
		expires_at = complete_away(claim, outcome, answer, ttl);
		ik_settle_claim(claim, false);
		return expires_at;
	}
	ik_open_key(&row, claim->scope, claim->key, RowExclusiveLock);
	row.lock_hash = claim->lock_hash;
	row.locked = true;
	if (claim->replaces)
	{
		KeyAnswer	ignored;

		/* the row that was there at the claim, unless it has gone since */
		if (ik_try_row(&row) == ROW_FOUND &&
			judge(&row, NULL, &ignored) != KEY_CLAIMED)
			row.state = ROW_ABSENT; /* the unique index will say no */
	}
	expires_at = ik_write_answer(&row, claim, outcome, answer,
								 ttl != 0 ? ttl : claim->ttl);
	ik_close_row(&row);
	ik_settle_claim(claim, false);
	return expires_at;
}

/* What is stored under the key and visible to us; false: nothing is. */
bool
ik_read_answer(text *scope, text *key, KeyStatus *status,
			   KeyAnswer *answer)
{
	RowAccess	row;
	bool		found;

	if (ik_is_away(scope))
		return read_away(scope, key, status, answer);
	ik_open_key(&row, scope, key, AccessShareLock);
	found = ik_read_row(&row);
	if (found)
		*status = judge(&row, NULL, answer);
	ik_close_row(&row);
	return found && *status != KEY_CLAIMED;
}

/* ik_claim_key(), where the home of the key is another node. */
static KeyStatus
claim_away(const KeyRequest *request, KeyAnswer *answer)
{
	text	   *arguments[6] = {request->scope, request->key};
	text	  **values;
	KeyStatus	status;
	int			level = ik_plain_modes();

	if (request->request != NULL)
		arguments[2] = ik_response_text(JSONBOID, JsonbPGetDatum(request->request));
	arguments[3] = ttl_text(request->ttl);
	if (request->wait != NULL)
		arguments[4] = ik_response_text(INTERVALOID, IntervalPGetDatum(request->wait));
	arguments[5] = request->fingerprint;
	AtEOXact_GUC(true, level);

	values = ik_send(request->scope,
					 "idempotency.claim(pg_catalog.text,pg_catalog.text,pg_catalog.jsonb,"
					 "interval,interval,pg_catalog.text)",
					 arguments, lengthof(arguments), 3);
	status = status_of(values[0]);
	read_texts(values, answer);
	if (status == KEY_CLAIMED)
	{
		/* so that COMMIT fails here, if it is not completed */
		ik_add_claim(ik_lock_hash(request->scope, request->key),
					 request->scope, request->key, NULL, 0, false,
					 GetCurrentTimestamp());
		ik_find_claim(request->scope, request->key)->away = true;
	}
	return status;
}

static TimestampTz
complete_away(const Claim *claim, KeyStatus outcome, const KeyAnswer *answer,
			  int64 ttl)
{
	text	   *arguments[6] = {claim->scope, claim->key, answer->response};
	text	  **values;
	TimestampTz expires_at;
	int			level;

	if (answer->meta != NULL)
		arguments[3] = ik_response_text(JSONBOID, JsonbPGetDatum(answer->meta));
	arguments[5] = ttl_text(ttl);
	values = ik_send(claim->scope,
					 outcome == KEY_COMPLETED ?
					 "idempotency.complete(pg_catalog.text,pg_catalog.text,pg_catalog.text,"
					 "pg_catalog.jsonb,bigint,interval)" :
					 "idempotency.fail(pg_catalog.text,pg_catalog.text,pg_catalog.text,"
					 "pg_catalog.jsonb,bigint,interval)",
					 arguments, lengthof(arguments), 1);
	level = ik_plain_modes();
	expires_at = DatumGetTimestampTz(ik_from_text(TIMESTAMPTZOID, values[0]));
	AtEOXact_GUC(true, level);
	return expires_at;
}

static bool
read_away(text *scope, text *key, KeyStatus *status, KeyAnswer *answer)
{
	text	   *arguments[2] = {scope, key};
	text	  **values = ik_send(scope, "idempotency.lookup(pg_catalog.text,pg_catalog.text)",
								 arguments, lengthof(arguments), 3);

	if (values[0] == NULL)
		return false;
	*status = status_of(values[0]);
	read_texts(values, answer);
	return *status == KEY_COMPLETED || *status == KEY_FAILED;
}

/* the second and third column of a result */
static void
read_texts(text **values, KeyAnswer *answer)
{
	answer->response = values[1];
	answer->meta = values[2] == NULL ? NULL :
		DatumGetJsonbP(ik_from_text(JSONBOID, values[2]));
}

static text *
ttl_text(int64 ttl)
{
	return ttl == 0 ? NULL :
		cstring_to_text(psprintf(INT64_FORMAT " microseconds", ttl));
}

static KeyStatus
status_of(const text *name)
{
	char	   *sought = text_to_cstring(name);

	for (int status = KEY_CLAIMED; status <= KEY_RELEASED; status++)
	{
		if (strcmp(sought, ik_key_statuses[status]) == 0)
			return status;
	}
	elog(ERROR, "unknown status \"%s\"", sought);
}

/*
 * The arguments that say what is asked for: request, ttl and wait, of which
 * that of request is given, and fingerprint.
 */
void
ik_get_request(FunctionCallInfo fcinfo, int request, int fingerprint,
			   KeyRequest *result)
{
	if (!PG_ARGISNULL(request))
		result->request = PG_GETARG_JSONB_P(request);
	result->ttl = ik_ttl_argument(fcinfo, request + 1);
	if (!PG_ARGISNULL(request + 2))
		result->wait = PG_GETARG_INTERVAL_P(request + 2);
	if (!PG_ARGISNULL(fingerprint))
		result->fingerprint = PG_GETARG_TEXT_PP(fingerprint);
}

/* A fence, or NULL. */
const int64 *
ik_fence_argument(FunctionCallInfo fcinfo, int argument)
{
	int64	   *fence;

	if (PG_ARGISNULL(argument))
		return NULL;
	fence = palloc(sizeof(int64));
	*fence = PG_GETARG_INT64(argument);
	return fence;
}

/* Put response and meta into a result, beginning there. */
void
ik_put_answer(Datum *values, bool *nulls, const KeyAnswer *answer)
{
	values[0] = PointerGetDatum(answer->response);
	values[1] = PointerGetDatum(answer->meta);
	nulls[0] = answer->response == NULL;
	nulls[1] = answer->meta == NULL;
}

/*
 * A ttl in microseconds, 0 for NULL.  One that is too long is refused rather
 * than cut: the caller counts on a replay until then.
 */
int64
ik_ttl_argument(FunctionCallInfo fcinfo, int argument)
{
	int64		ttl;

	if (PG_ARGISNULL(argument))
		return 0;
	ttl = ik_duration(PG_GETARG_INTERVAL_P(argument), false, "ttl",
					  "Give an interval such as '1 day', or NULL for idempotency.default_ttl.");
	if (ttl > ik_max_ttl * USECS_PER_SEC)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ttl is longer than idempotency.max_ttl"),
				 errdetail("idempotency.max_ttl is %s.",
						   GetConfigOptionByName("idempotency.max_ttl", NULL, false)),
				 errhint("Give a shorter one, or have the setting raised.")));
	return ttl;
}

/*
 * Prepare to look at a key, with the table's lock.  The key's lock is named
 * when it is to be taken: a replay mostly needs none.
 */
void
ik_open_key(RowAccess *row, text *scope, text *key, LOCKMODE lockmode)
{
	ik_open_row(row, ik_keys_of(scope), PointerGetDatum(key),
				PointerGetDatum(scope), 0, lockmode);
}

/* Take the key's lock and look, waiting for every rival. */
void
ik_lock_key(RowAccess *row)
{
	name_lock(row);
	ik_lock_row(row);
}

static void
name_lock(RowAccess *row)
{
	row->lock_hash = ik_lock_hash(DatumGetTextPP(row->key[1]),
								  DatumGetTextPP(row->key[0]));
}

/*
 * The loop at the top of this file; not for a key that this transaction has
 * claimed and not settled.  KEY_CLAIMED leaves the lock held, and
 * what the last look found in the row; every other status gives the lock back.
 */
KeyStatus
ik_seize_key(RowAccess *row, const KeyRequest *request,
			 TimestampTz give_up, KeyAnswer *answer)
{
	static int	replays = 0;	/* in a row */
	Claim	   *claim = ik_find_claim(request->scope, request->key);
	KeyStatus	status;

	if (claim != NULL)
		return ik_mismatch(claim->fingerprint, request) ?
			KEY_MISMATCH : KEY_HELD;

	/* a parallel worker could not hold a claim */
	if (IsInParallelMode())
		PreventCommandIfParallelMode(request->function);

	if (RecoveryInProgress())
	{
		/* nothing can be claimed here, and nothing is worth a wait */
		status = ik_read_row(row) ? judge(row, request, answer) : KEY_CLAIMED;
		if (status == KEY_CLAIMED)
			PreventCommandDuringRecovery(request->function);
		return status;
	}

	/*
	 * A backend that has only replayed lately looks before it locks; so does
	 * one that would have to hold a shard.
	 */
	if ((replays >= LOOK_FIRST_AFTER || row->table->shard != 0) &&
		ik_look_at_row(row) == ROW_FOUND)
	{
		status = judge(row, request, answer);
		if (status != KEY_CLAIMED)
			return status;
	}
	if (!ik_hold_home(row, give_up))
		return KEY_IN_PROGRESS;

	name_lock(row);
	for (;;)
	{
		ik_try_row(row);

		/* the row is there and settled: its answer, with the lock or without */
		if (row->state == ROW_FOUND)
		{
			status = judge(row, request, answer);
			if (status != KEY_CLAIMED)
				break;
		}

		/* no row that counts, and we have the lock: ours */
		if (row->state != ROW_RIVAL && row->locked)
		{
			if (snapshot_shows_answer(row))
			{
				status = judge(row, request, answer);
				if (status != KEY_CLAIMED)
					break;
			}
			PreventCommandIfReadOnly(request->function);
			replays = 0;
			answer->claimed_at = GetCurrentTimestamp();
			ik_show_key(row->lock_hash, request->scope, request->key,
						answer->claimed_at);
			return KEY_CLAIMED;
		}

		/* a rival has the lock or is writing the row: look again after that */
		if (!ik_wait_for_row(row, give_up))
		{
			status = KEY_IN_PROGRESS;
			break;
		}
	}
	ik_unlock_row(row);
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
		!ik_read_row(row))
		return false;
	ik_read_key(row->slot, &stored);
	return stored.status == STATUS_COMPLETED || stored.status == STATUS_FAILED;
}

/*
 * For purge: does the row in the slot count as absent?  Then also the hash of
 * its lock.  A sweep asks this of every row, so the time is looked at first.
 */
static bool
key_expired(TupleTableSlot *slot, TimestampTz now, uint64 *hash)
{
	bool		isnull;

	if (DatumGetTimestampTz(slot_getattr(slot, KEYS_EXPIRES_AT + 1, &isnull)) > now)
		return false;
	slot_getsomeattrs(slot, KEYS_NATTS);
	/* in a wide row they may be compressed */
	*hash = ik_lock_hash(DatumGetTextPP(slot->tts_values[KEYS_SCOPE]),
						 DatumGetTextPP(slot->tts_values[KEYS_KEY]));
	return true;
}

/* The row in a slot; what it points to lives as long as the slot does. */
void
ik_read_key(TupleTableSlot *slot, KeyRow *key)
{
	Datum	   *values;

	slot_getsomeattrs(slot, KEYS_NATTS);
	values = slot->tts_values;
	key->created_at = DatumGetTimestampTz(values[KEYS_CREATED_AT]);
	key->expires_at = DatumGetTimestampTz(values[KEYS_EXPIRES_AT]);
	key->status = DatumGetChar(values[KEYS_STATUS]);
	key->key = varlena_or_null(slot, KEYS_KEY);
	key->scope = varlena_or_null(slot, KEYS_SCOPE);
	key->response = varlena_or_null(slot, KEYS_RESPONSE);
	key->meta = varlena_or_null(slot, KEYS_META);
	key->fingerprint = varlena_or_null(slot, KEYS_FINGERPRINT);
	key->fence = slot->tts_isnull[KEYS_FENCE] ? 0 :
		DatumGetInt64(values[KEYS_FENCE]);
	key->deadline = slot->tts_isnull[KEYS_DEADLINE] ? 0 :
		DatumGetTimestampTz(values[KEYS_DEADLINE]);
	key->attempt = slot->tts_isnull[KEYS_ATTEMPT] ? 0 :
		DatumGetInt32(values[KEYS_ATTEMPT]);
	key->checkpoint = varlena_or_null(slot, KEYS_CHECKPOINT);
	key->checkpoint_data = varlena_or_null(slot, KEYS_CHECKPOINT_DATA);
}

/* Write the row: over the old one if the last look found it. */
void
ik_write_key(RowAccess *row, const KeyRow *key)
{
	Datum		values[KEYS_NATTS] = {
		[KEYS_CREATED_AT] = TimestampTzGetDatum(key->created_at),
		[KEYS_EXPIRES_AT] = TimestampTzGetDatum(key->expires_at),
		[KEYS_STATUS] = CharGetDatum(key->status),
		[KEYS_KEY] = row->key[0],
		[KEYS_SCOPE] = row->key[1],
		[KEYS_RESPONSE] = PointerGetDatum(key->response),
		[KEYS_META] = PointerGetDatum(key->meta),
		[KEYS_FINGERPRINT] = PointerGetDatum(key->fingerprint),
		[KEYS_FENCE] = Int64GetDatum(key->fence),
		[KEYS_DEADLINE] = TimestampTzGetDatum(key->deadline),
		[KEYS_ATTEMPT] = Int32GetDatum(key->attempt),
		[KEYS_CHECKPOINT] = PointerGetDatum(key->checkpoint),
		[KEYS_CHECKPOINT_DATA] = PointerGetDatum(key->checkpoint_data)
	};
	bool		nulls[KEYS_NATTS] = {
		[KEYS_RESPONSE] = key->response == NULL,
		[KEYS_META] = key->meta == NULL,
		[KEYS_FINGERPRINT] = key->fingerprint == NULL,
		[KEYS_FENCE] = key->fence == 0,
		[KEYS_DEADLINE] = key->deadline == 0,
		[KEYS_ATTEMPT] = key->attempt == 0,
		[KEYS_CHECKPOINT] = key->checkpoint == NULL,
		[KEYS_CHECKPOINT_DATA] = key->checkpoint_data == NULL
	};

	if (row->state == ROW_FOUND)
		ik_update_row(row, values, nulls);
	else
		ik_insert_row(row, values, nulls);
}

/*
 * What a new claim takes over from the row that it replaces.  The fence goes
 * on growing in every case.  From a lease that lapsed or was given back,
 * and is not forgotten yet, also the count of attempts and the checkpoint, so
 * that the taker can verify before it repeats.
 */
void
ik_take_over(KeyRow *next, const KeyRow *old, TimestampTz now)
{
	if (old->fence != 0)
		next->fence = Max(now, old->fence + 1);
	if (old->attempt != 0 && old->expires_at > now)
	{
		next->created_at = old->created_at;
		next->attempt = old->attempt + 1;
		next->checkpoint = old->checkpoint;
		next->checkpoint_data = old->checkpoint_data;
		if (next->fingerprint == NULL && old->status == STATUS_LEASED)
			next->fingerprint = old->fingerprint;
	}
}

/* The end of a ttl; 0 is idempotency.default_ttl. */
TimestampTz
ik_expiry(TimestampTz from, int64 ttl)
{
	if (ttl == 0)
		ttl = Min(ik_default_ttl, ik_max_ttl) * USECS_PER_SEC;
	return from + ttl;
}

/* Does the row count?  A released one does not, nor does an expired one. */
bool
ik_key_is_present(const KeyRow *stored, TimestampTz now)
{
	return stored->status != STATUS_RELEASED && stored->expires_at > now;
}

KeyStatus
ik_stored_status(const KeyRow *stored)
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
 * the way of a new claim.  It fails if a claim would rely on a row that the
 * snapshot does not show, also on the lease of an earlier attempt: nor would it
 * show what that attempt has done, which is to be verified before a repeat.
 */
static KeyStatus
judge(RowAccess *row, const KeyRequest *request, KeyAnswer *answer)
{
	TimestampTz now = GetCurrentTimestamp();
	KeyRow		stored;

	ik_read_key(row->slot, &stored);
	if (stored.expires_at <= now)
		return KEY_CLAIMED;
	if (stored.status != STATUS_LEASED || stored.deadline <= now)
		ik_check_row_visible(row);
	if (stored.status == STATUS_RELEASED)
		return KEY_CLAIMED;
	if (request != NULL && ik_mismatch(stored.fingerprint, request))
		return KEY_MISMATCH;
	if (stored.status == STATUS_LEASED)
	{
		if (stored.deadline <= now)
			return KEY_CLAIMED;
		answer->deadline = stored.deadline;
		answer->attempt = stored.attempt;
		return ik_row_is_ours(row) ? KEY_HELD : KEY_IN_PROGRESS;
	}
	answer->response = ik_copy_value(stored.response);
	answer->meta = ik_copy_value(stored.meta);
	return ik_stored_status(&stored);
}

/*
 * Write the final row of a claim in transaction mode.  Returns until when it is
 * replayed.
 */
TimestampTz
ik_write_answer(RowAccess *row, const Claim *claim, KeyStatus outcome,
				const KeyAnswer *answer, int64 ttl)
{
	TimestampTz now = GetCurrentTimestamp();
	KeyRow		next = {
		.created_at = claim->created_at,
		.expires_at = ik_expiry(now, ttl),
		.status = outcome == KEY_COMPLETED ? STATUS_COMPLETED : STATUS_FAILED,
		.response = answer->response,
		.meta = answer->meta,
		.fingerprint = claim->fingerprint
	};

	if (row->state == ROW_FOUND)
	{
		KeyRow		old;

		ik_read_key(row->slot, &old);
		ik_take_over(&next, &old, now);
	}
	ik_write_key(row, &next);
	return next.expires_at;
}

static void *
varlena_or_null(TupleTableSlot *slot, int col)
{
	return slot->tts_isnull[col] ? NULL :
		DatumGetPointer(slot->tts_values[col]);
}
