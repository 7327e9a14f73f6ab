/*-------------------------------------------------------------------------
 *
 * lease.c
 *		Leases: claims that span transactions, and locks, which are leases.
 *
 * A lease is a row from the start, committed by the transaction that takes it
 * so that the work can go on in others.  Its deadline frees the key when the
 * holder is gone; its fence tells a holder who was too slow that somebody else
 * has taken over.  The fence is the server's clock in microseconds, or the
 * row's last fence + 1 if that is higher: so it grows over release, rollback,
 * purge, crash and restore, unless the clock is set back.
 *
 * A change of a lease is made under the key's lock and judges the newest
 * committed row, at every isolation level: a holder who was superseded must
 * learn it from any snapshot.
 *
 *-------------------------------------------------------------------------
 */
#include "key/key.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

/* the scope of acquire_lock() */
#define LOCK_SCOPE "idempotency.lock"

PG_FUNCTION_INFO_V1(idempotency_lease);
PG_FUNCTION_INFO_V1(idempotency_extend);
PG_FUNCTION_INFO_V1(idempotency_checkpoint);
PG_FUNCTION_INFO_V1(idempotency_acquire_lock);
PG_FUNCTION_INFO_V1(idempotency_renew_lock);
PG_FUNCTION_INFO_V1(idempotency_release_lock);
PG_FUNCTION_INFO_V1(idempotency_spread_lock_scope);

static text *lock_scope(const text *name);
static text *spread_lock_scope(const text *name);
static KeyStatus take_lease(const KeyRequest *request, int64 lease,
							KeyRow *granted, KeyAnswer *answer);
static void grant_lease(RowAccess *row, const KeyRequest *request,
						int64 lease, KeyRow *granted);
static Datum extend_lease(FunctionCallInfo fcinfo, text *scope, text *key,
						  int argument, CountedFunction counted,
						  const char *function);
static TimestampTz deadline_at(TimestampTz now, int64 lease, int64 fence);
static void shift_deadline(KeyRow *lease, TimestampTz deadline);
static int64 lease_argument(FunctionCallInfo fcinfo, int argument);
static bool find_lease(RowAccess *row, text *scope, text *key,
					   const int64 *fence, KeyRow *lease);
pg_noreturn static void stale_fence(const char *detail);
pg_noreturn static void no_such_claim(void);

/*
 * lease(scope, key, lease, request, ttl, wait, fingerprint): claim the key for
 * the work of several transactions, until the deadline.  The grant is flushed
 * at commit, also if synchronous_commit is off: a fence that was handed out
 * must not come back.
 */
Datum
idempotency_lease(PG_FUNCTION_ARGS)
{
	static const Oid types[8] = {
		TEXTOID, TEXTOID, JSONBOID, INT8OID, TIMESTAMPTZOID, INT4OID, TEXTOID,
		JSONBOID
	};
	KeyRequest	request = {.function = "idempotency.lease()"};
	KeyAnswer	answer;
	KeyRow		granted;
	KeyStatus	status;
	Datum		values[8];
	bool		nulls[8] = {false};
	Datum		result;

	ik_get_identity(fcinfo, &request.scope, &request.key);
	if (ik_send_home(fcinfo, request.scope, &result))
		return result;
	ik_get_request(fcinfo, 3, 6, &request);

	status = take_lease(&request, lease_argument(fcinfo, 2),
						&granted, &answer);
	ik_count(COUNT_LEASE, status);

	values[0] = ik_status_datum(status);
	ik_put_answer(values + 1, nulls + 1, &answer);
	values[3] = Int64GetDatum(granted.fence);
	values[4] = TimestampTzGetDatum(granted.deadline);
	values[5] = Int32GetDatum(granted.attempt);
	values[6] = PointerGetDatum(granted.checkpoint);
	values[7] = PointerGetDatum(granted.checkpoint_data);
	nulls[3] = granted.fence == 0;
	nulls[4] = granted.deadline == 0;
	nulls[5] = granted.attempt == 0;
	nulls[6] = granted.checkpoint == NULL;
	nulls[7] = granted.checkpoint_data == NULL;
	return ik_result(fcinfo, lengthof(types), types, values, nulls);
}

/*
 * extend(scope, key, fence, lease): a new deadline, counted from now, and
 * never beyond the grant + idempotency.max_lease.  NULL, and nothing changed,
 * after the deadline, and after the caller has settled it.
 */
Datum
idempotency_extend(PG_FUNCTION_ARGS)
{
	text	   *scope;
	text	   *key;
	Datum		result;

	ik_get_identity(fcinfo, &scope, &key);
	if (ik_send_home(fcinfo, scope, &result))
		return result;
	return extend_lease(fcinfo, scope, key, 2, COUNT_EXTEND,
						"idempotency.extend()");
}

/*
 * checkpoint(scope, key, fence, name, data): note how far the work has come,
 * for the next attempt; flushed at commit, as the grant.  Returns the deadline.
 */
Datum
idempotency_checkpoint(PG_FUNCTION_ARGS)
{
	text	   *scope;
	text	   *key;
	RowAccess	row;
	KeyRow		lease;
	Datum		result;

	ik_get_identity(fcinfo, &scope, &key);
	if (ik_send_home(fcinfo, scope, &result))
		return result;
	if (PG_ARGISNULL(3))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("checkpoint name must not be null"),
				 errhint("Name the step that the work has come to.")));
	ik_refuse_to_write("idempotency.checkpoint()");

	if (!find_lease(&row, scope, key, ik_fence_argument(fcinfo, 2), &lease))
		no_such_claim();
	lease.checkpoint = PG_GETARG_TEXT_PP(3);
	lease.checkpoint_data = PG_ARGISNULL(4) ? NULL : PG_GETARG_JSONB_P(4);
	ik_write_key(&row, &lease);
	ForceSyncCommit();
	ik_unlock_row(&row);
	ik_close_row(&row);
	ik_count(COUNT_CHECKPOINT, COUNT_DONE);
	PG_RETURN_TIMESTAMPTZ(lease.deadline);
}

/*
 * acquire_lock(name, lease, wait): the fence, or NULL if somebody holds the
 * lock.  A lock is a lease on the key (lock_scope(name), name).
 */
Datum
idempotency_acquire_lock(PG_FUNCTION_ARGS)
{
	KeyRequest	request = {.function = "idempotency.acquire_lock()"};
	KeyAnswer	answer;
	KeyRow		granted;
	KeyStatus	status;
	Datum		result;

	request.key = PG_ARGISNULL(0) ? NULL : PG_GETARG_TEXT_PP(0);
	request.wait = PG_ARGISNULL(2) ? NULL : PG_GETARG_INTERVAL_P(2);
	ik_check_key(request.key, "name");
	request.scope = lock_scope(request.key);
	if (ik_send_home(fcinfo, request.scope, &result))
		return result;
	status = take_lease(&request, lease_argument(fcinfo, 1),
						&granted, &answer);
	ik_count(COUNT_ACQUIRE_LOCK, status);
	if (status != KEY_CLAIMED)
		PG_RETURN_NULL();
	PG_RETURN_INT64(granted.fence);
}

/* renew_lock(name, fence, lease): as extend(). */
Datum
idempotency_renew_lock(PG_FUNCTION_ARGS)
{
	text	   *name = PG_ARGISNULL(0) ? NULL : PG_GETARG_TEXT_PP(0);
	text	   *scope;
	Datum		result;

	ik_check_key(name, "name");
	scope = lock_scope(name);
	if (ik_send_home(fcinfo, scope, &result))
		return result;
	return extend_lease(fcinfo, scope, name, 1, COUNT_RENEW_LOCK,
						"idempotency.renew_lock()");
}

/* release_lock(name, fence): as release(). */
Datum
idempotency_release_lock(PG_FUNCTION_ARGS)
{
	text	   *name = PG_ARGISNULL(0) ? NULL : PG_GETARG_TEXT_PP(0);
	text	   *scope;
	bool		released;
	Datum		result;

	ik_check_key(name, "name");
	scope = lock_scope(name);
	if (ik_send_home(fcinfo, scope, &result))
		return result;
	released = ik_release_lease(scope, name,
								ik_fence_argument(fcinfo, 1),
								"idempotency.release_lock()");
	ik_count(COUNT_RELEASE_LOCK, released ? COUNT_DONE : COUNT_NOT_DONE);
	PG_RETURN_BOOL(released);
}

/* spread_lock_scope(name): for distribute(), which has the locks move. */
Datum
idempotency_spread_lock_scope(PG_FUNCTION_ARGS)
{
	PG_RETURN_TEXT_P(spread_lock_scope(PG_GETARG_TEXT_PP(0)));
}

/*
 * The scope of a lock: one for all; where keys are distributed by scope, one of
 * many, so that locks live on all nodes.
 */
static text *
lock_scope(const text *name)
{
	return ik_is_distributed() ? spread_lock_scope(name) :
		cstring_to_text(LOCK_SCOPE);
}

static text *
spread_lock_scope(const text *name)
{
	uint32		hash = hash_bytes((const unsigned char *) VARDATA_ANY(name),
								  VARSIZE_ANY_EXHDR(name));

	return cstring_to_text(psprintf("%s.%02x", LOCK_SCOPE, hash & 0xff));
}

/*
 * complete() or fail() of a claim that this transaction does not hold: of a
 * lease, by its fence.  ttl 0 stands for the lease's.  Once more with the fence
 * and the outcome that settled it is no error: the reply may have been lost.
 * Returns until when the answer is replayed.
 */
TimestampTz
ik_settle_lease(text *scope, text *key, KeyStatus outcome,
				const KeyAnswer *answer, const int64 *fence, int64 ttl)
{
	char		status = outcome == KEY_COMPLETED ? STATUS_COMPLETED : STATUS_FAILED;
	RowAccess	row;
	KeyRow		lease;

	if (find_lease(&row, scope, key, fence, &lease))
	{
		TimestampTz now = GetCurrentTimestamp();

		shift_deadline(&lease, now);
		if (ttl != 0)
			lease.expires_at = ik_expiry(now, ttl);
		lease.status = status;
		lease.response = answer->response;
		lease.meta = answer->meta;
		lease.deadline = 0;
		ik_write_key(&row, &lease);
	}
	else if (row.state != ROW_FOUND || fence == NULL ||
			 lease.fence != *fence || lease.status != status)
		no_such_claim();
	ik_unlock_row(&row);
	ik_close_row(&row);
	return lease.expires_at;
}

/*
 * release() of a claim that this transaction does not hold: of a lease, by its
 * fence.  The row stays, so that its fence goes on growing.  False: there is
 * no lease to give back.
 */
bool
ik_release_lease(text *scope, text *key, const int64 *fence,
				 const char *function)
{
	RowAccess	row;
	KeyRow		lease;
	bool		found;

	ik_refuse_to_write(function);
	found = find_lease(&row, scope, key, fence, &lease);
	if (found)
	{
		lease.status = STATUS_RELEASED;
		lease.deadline = 0;
		ik_write_key(&row, &lease);
	}
	ik_unlock_row(&row);
	ik_close_row(&row);
	return found;
}

/*
 * Take a lease, or say why not, as ik_claim_key() does.  *granted is the row
 * that was written, or, of a live lease, its deadline and attempt alone: the
 * fence is its holder's.
 */
static KeyStatus
take_lease(const KeyRequest *request, int64 lease, KeyRow *granted,
		   KeyAnswer *answer)
{
	TimestampTz give_up;
	RowAccess	row;
	KeyStatus	status;

	give_up = ik_give_up_at(request->wait);
	memset(granted, 0, sizeof(KeyRow));
	memset(answer, 0, sizeof(KeyAnswer));

	ik_open_key(&row, request->scope, request->key, RowExclusiveLock);
	status = ik_seize_key(&row, request, give_up, answer);
	if (status == KEY_CLAIMED)
		grant_lease(&row, request, lease, granted);
	else
	{
		granted->deadline = answer->deadline;
		granted->attempt = answer->attempt;
	}
	ik_close_row(&row);
	return status;
}

/* Write the row of a lease that begins now, and give the key's lock back. */
static void
grant_lease(RowAccess *row, const KeyRequest *request, int64 lease,
			KeyRow *granted)
{
	TimestampTz now = GetCurrentTimestamp();

	granted->created_at = now;
	granted->status = STATUS_LEASED;
	granted->fingerprint = ik_fingerprint(request);
	granted->fence = now;
	granted->attempt = 1;
	if (row->state == ROW_FOUND)
	{
		KeyRow		old;

		ik_read_key(row->slot, &old);
		ik_take_over(granted, &old, now);
	}
	granted->deadline = deadline_at(now, lease, granted->fence);
	granted->expires_at = ik_expiry(granted->deadline, request->ttl);
	ik_write_key(row, granted);
	ForceSyncCommit();
	ik_unlock_row(row);

	/* they pointed into the row that was overwritten */
	granted->checkpoint = ik_copy_value(granted->checkpoint);
	granted->checkpoint_data = ik_copy_value(granted->checkpoint_data);
}

/*
 * The new deadline, or NULL if it is too late; the fence is that argument, the
 * lease the next.
 */
static Datum
extend_lease(FunctionCallInfo fcinfo, text *scope, text *key, int argument,
			 CountedFunction counted, const char *function)
{
	const int64 *fence = ik_fence_argument(fcinfo, argument);
	int64		duration = lease_argument(fcinfo, argument + 1);
	RowAccess	row;
	KeyRow		lease;
	bool		leased;
	TimestampTz now;
	TimestampTz deadline = 0;

	ik_refuse_to_write(function);
	leased = find_lease(&row, scope, key, fence, &lease);
	if (!leased && (row.state != ROW_FOUND || fence == NULL))
		no_such_claim();
	now = GetCurrentTimestamp();
	if (leased && now < lease.deadline)
	{
		deadline = deadline_at(now, duration, lease.fence);
		shift_deadline(&lease, deadline);
		ik_write_key(&row, &lease);
		ForceSyncCommit();
	}
	ik_unlock_row(&row);
	ik_close_row(&row);
	ik_count(counted, deadline == 0 ? COUNT_NOT_DONE : COUNT_DONE);
	if (deadline == 0)
		PG_RETURN_NULL();
	PG_RETURN_TIMESTAMPTZ(deadline);
}

/*
 * The deadline of a lease that begins now, at most idempotency.max_lease after
 * the grant, which is when the fence was made; after now, if the fence is ahead
 * of a clock that was set back.
 */
static TimestampTz
deadline_at(TimestampTz now, int64 lease, int64 fence)
{
	return Min(now + lease, Min(now, fence) + ik_max_lease * USECS_PER_SEC);
}

/* Move the deadline, and with it the end of the ttl that counts from it. */
static void
shift_deadline(KeyRow *lease, TimestampTz deadline)
{
	lease->expires_at += deadline - lease->deadline;
	lease->deadline = deadline;
}

/*
 * A lease in microseconds, at most idempotency.max_lease: longer ones are cut,
 * as the caller sees from the deadline.
 */
static int64
lease_argument(FunctionCallInfo fcinfo, int argument)
{
	int64		lease;

	if (PG_ARGISNULL(argument))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("lease must not be null"),
				 errhint("Give an interval such as '30 s': longer than the work takes.")));
	lease = ik_duration(PG_GETARG_INTERVAL_P(argument), true, "lease",
						"Give an interval such as '30 s'; '0' ends at once.");
	return Min(lease, ik_max_lease * USECS_PER_SEC);
}

/*
 * Find the lease that the fence belongs to, with the key's lock held, waiting
 * for every rival.  False: the key is not leased; *lease is its row if there
 * is one, and then the fence, if there is one, is that which was the last.
 */
static bool
find_lease(RowAccess *row, text *scope, text *key, const int64 *fence,
		   KeyRow *lease)
{
	bool		leased;

	ik_open_key(row, scope, key, RowExclusiveLock);
	if (ik_find_claim(scope, key) != NULL)
		stale_fence("This transaction has claimed the key itself since, in transaction mode.");
	ik_lock_key(row);
	if (row->state == ROW_FOUND)
	{
		ik_read_key(row->slot, lease);
		if (lease->expires_at <= GetCurrentTimestamp())
			row->state = ROW_ABSENT;
	}
	if (row->state != ROW_FOUND)
		return false;

	leased = lease->status == STATUS_LEASED;
	if (fence == NULL && leased)
		ereport(ERROR,
				(errcode(ERRCODE_STALE_FENCE),
				 errmsg("key is leased, and its fence is missing"),
				 errhint("Pass the fence that lease() returned.")));
	if (fence != NULL && (lease->fence == 0 || *fence != lease->fence))
		stale_fence("Somebody else has taken the key over since.");
	return leased;
}

static void
stale_fence(const char *detail)
{
	ereport(ERROR,
			(errcode(ERRCODE_STALE_FENCE),
			 errmsg("fence has been superseded"),
			 errdetail("%s", detail),
			 errhint("Roll back, and look the key up before you repeat anything.")));
}

static void
no_such_claim(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_NO_SUCH_CLAIM),
			 errmsg("key is not held"),
			 errhint("Claim it in this transaction or take a lease first, and go on only if the status is \"claimed\".")));
}
