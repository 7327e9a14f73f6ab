/*-------------------------------------------------------------------------
 *
 * token.c
 *		One-time tokens.
 *
 * A token says itself who it is for and how long it is good (form.c); what we
 * keep is what was done with it.  Consuming inserts a MARK into
 * idempotency.used_tokens, whose primary key decides between rivals; revoking a
 * single token inserts one too.  Revoking all tokens of (subject, purpose)
 * raises their GENERATION; a token of a lower one is revoked.  Marks are kept
 * idempotency.token_retention past the token's end.  After that the token is
 * stale whether or not its mark is still there, and what purge removes never
 * changes an answer.
 *
 * On a cluster of Citus a mark is on the node that the token's id leads to, and
 * what decides about the token is done there.  Each node has the generations
 * and the signing keys, so issuing is local.  A change of these is committed at
 * one node after the other: who is about to mark a token waits for one that is
 * on its way.
 *
 *-------------------------------------------------------------------------
 */
#include "token/token.h"

#include "access/table.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/guc.h"
#include "utils/jsonb.h"
#include "utils/timestamp.h"

/*
 * In bytes: together they must fit into an entry of token_generations' index,
 * that is, into a third of a page.
 */
#define MAX_SUBJECT 512
#define MAX_PURPOSE 256

/* the locks' scopes; callers cannot use them */
#define TOKEN_SCOPE "idempotency.token"
#define GENERATION_SCOPE "idempotency.token_generation"

typedef enum TokenStatus
{
	TOKEN_VALID,
	TOKEN_CONSUMED,
	TOKEN_USED,
	TOKEN_EXPIRED,
	TOKEN_REVOKED,
	TOKEN_INVALID,
	TOKEN_STALE,
	TOKEN_BUSY
} TokenStatus;

const char *const ik_token_statuses[COUNTED_OUTCOMES] = {
	[TOKEN_VALID] = "valid",
	[TOKEN_CONSUMED] = "consumed",
	[TOKEN_USED] = "used",
	[TOKEN_EXPIRED] = "expired",
	[TOKEN_REVOKED] = "revoked",
	[TOKEN_INVALID] = "invalid",
	[TOKEN_STALE] = "stale",
	[TOKEN_BUSY] = "busy"
};

static bool mark_expired(TupleTableSlot *slot, TimestampTz now, uint64 *hash);
static bool generation_expired(TupleTableSlot *slot, TimestampTz now,
							   uint64 *hash);

const Purgeable ik_purge_used_tokens = {&ik_used_tokens, mark_expired, NULL};
const Purgeable ik_purge_generations = {&ik_token_generations, generation_expired, NULL};

PG_FUNCTION_INFO_V1(idempotency_issue_token);
PG_FUNCTION_INFO_V1(idempotency_consume_token);
PG_FUNCTION_INFO_V1(idempotency_check_token);
PG_FUNCTION_INFO_V1(idempotency_revoke_token);
PG_FUNCTION_INFO_V1(idempotency_revoke_tokens);

static TimestampTz raise_everywhere(const Token *token);
static void get_binding(FunctionCallInfo fcinfo, int first, Token *token);
static bool get_token(FunctionCallInfo fcinfo, Token *token);
static TimestampTz expiry(TimestampTz issued_at, const Interval *ttl);
static bool send_home(FunctionCallInfo fcinfo, Token *token, bool *readable,
					  Datum *result);
static bool is_genuine(const Token *token);
static bool is_stale(const Token *token, TimestampTz now);
static TokenStatus look_at_token(Token *token);
static TokenStatus mark_token(Token *token, bool revoke, TimestampTz give_up,
							  const char *function);
static TokenStatus judge(Token *token, RowAccess *row, TimestampTz give_up,
						 TimestampTz *now);
static TransactionId rival_of_token(const Token *token);
static TokenStatus judge_marked(Token *token, RowAccess *row);
static TokenStatus judge_unmarked(const Token *token, TimestampTz *now);
static void write_mark(RowAccess *row, const Token *token, bool revoke);
static TimestampTz end_of(const Token *token);
static Datum token_result(FunctionCallInfo fcinfo, const Token *token,
						  TokenStatus status);
static void open_mark(RowAccess *row, Token *token, LOCKMODE lockmode);
static void open_generation(RowAccess *row, const Token *token,
							LOCKMODE lockmode);
static uint64 mark_hash(const pg_uuid_t *id);
static uint64 generation_hash(const text *binding);
static int64 current_generation(const Token *token);
static void make_id(pg_uuid_t *id);

/*
 * issue_token(subject, purpose, ttl, payload): a new token; writes nothing.
 * payload may be NULL.
 */
Datum
idempotency_issue_token(PG_FUNCTION_ARGS)
{
	Token		token = {0};
	const SigningKey *key;

	get_binding(fcinfo, 0, &token);
	if (PG_ARGISNULL(2))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("ttl must not be null"),
				 errhint("Leave it out for 5 minutes.")));
	if (!PG_ARGISNULL(3))
	{
		Jsonb	   *payload = PG_GETARG_JSONB_P(3);

		token.payload = JsonbToCString(NULL, &payload->root, VARSIZE(payload));
		token.payload_len = strlen(token.payload);
		if (token.payload_len > MAX_PAYLOAD)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("payload is longer than %d bytes", MAX_PAYLOAD),
					 errhint("Store it in a table, and put its key into the payload.")));
	}
	token.generation = current_generation(&token);
	key = ik_newest_signing_key();

	/* not before: the tables may have been waited for */
	token.issued_at = GetCurrentTimestamp();
	token.expires_at = expiry(token.issued_at, PG_GETARG_INTERVAL_P(2));
	make_id(&token.id);
	ik_count(COUNT_ISSUE_TOKEN, COUNT_DONE);
	PG_RETURN_TEXT_P(ik_write_token(&token, key));
}

/*
 * consume_token(token, subject, purpose, wait): use the token up, in this
 * transaction, or say why not.  wait as in claim().
 */
Datum
idempotency_consume_token(PG_FUNCTION_ARGS)
{
	Token		token = {0};
	TokenStatus status = TOKEN_INVALID;
	bool		readable = get_token(fcinfo, &token);
	TimestampTz give_up = ik_give_up_at(PG_ARGISNULL(3) ? NULL :
										PG_GETARG_INTERVAL_P(3));
	Datum		result;

	if (send_home(fcinfo, &token, &readable, &result))
		return result;
	if (readable)
		status = mark_token(&token, false, give_up,
							"idempotency.consume_token()");
	if (status == TOKEN_VALID)
		status = TOKEN_CONSUMED;
	ik_count(COUNT_CONSUME_TOKEN, status);
	return token_result(fcinfo, &token, status);
}

/*
 * check_token(token, subject, purpose): what would consume_token() say?  Does
 * not consume, write or wait; what a rival has not committed does not count.
 */
Datum
idempotency_check_token(PG_FUNCTION_ARGS)
{
	Token		token = {0};
	TokenStatus status = TOKEN_INVALID;
	bool		readable = get_token(fcinfo, &token);
	Datum		result;

	if (send_home(fcinfo, &token, &readable, &result))
		return result;
	if (readable)
		status = look_at_token(&token);
	ik_count(COUNT_CHECK_TOKEN, status);
	return token_result(fcinfo, &token, status);
}

/*
 * revoke_token(token, subject, purpose): make the token worthless; true if it
 * was valid until now.  While a rival is consuming it nobody can tell (55P03).
 */
Datum
idempotency_revoke_token(PG_FUNCTION_ARGS)
{
	Token		token = {0};
	TokenStatus status = TOKEN_INVALID;
	bool		readable = get_token(fcinfo, &token);
	Datum		result;

	if (send_home(fcinfo, &token, &readable, &result))
		return result;
	if (readable)
		status = mark_token(&token, true, ik_give_up_at(NULL),
							"idempotency.revoke_token()");
	ik_count(COUNT_REVOKE_TOKEN,
			 status == TOKEN_VALID ? COUNT_DONE : COUNT_NOT_DONE);
	if (status == TOKEN_BUSY)
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("token is being consumed elsewhere"),
				 errhint("Whether it will be used is not known yet: try again later.")));
	PG_RETURN_BOOL(status == TOKEN_VALID);
}

/*
 * revoke_tokens(subject, purpose): raise their generation, so that all tokens
 * of a lower one are revoked.  It waits for a session that is raising the same
 * one.  Says when that was.
 */
Datum
idempotency_revoke_tokens(PG_FUNCTION_ARGS)
{
	Token		token = {0};
	RowAccess	row;
	TimestampTz now;
	Datum		values[GENERATIONS_NATTS];
	bool		nulls[GENERATIONS_NATTS] = {0};

	get_binding(fcinfo, 0, &token);
	ik_refuse_to_write("idempotency.revoke_tokens()");
	if (ik_is_spread(&ik_token_generations))
	{
		now = raise_everywhere(&token);
		ik_count(COUNT_REVOKE_TOKENS, COUNT_DONE);
		PG_RETURN_TIMESTAMPTZ(now);
	}

	open_generation(&row, &token, RowExclusiveLock);
	ik_lock_row(&row);
	now = GetCurrentTimestamp();
	values[GENERATIONS_GENERATION] = Int64GetDatum(now);
	values[GENERATIONS_RAISED_AT] = TimestampTzGetDatum(now);
	values[GENERATIONS_SUBJECT] = PointerGetDatum(token.subject);
	values[GENERATIONS_PURPOSE] = PointerGetDatum(token.purpose);
	if (row.state == ROW_FOUND)
	{
		int64		old;

		slot_getsomeattrs(row.slot, GENERATIONS_NATTS);
		old = DatumGetInt64(row.slot->tts_values[GENERATIONS_GENERATION]);
		/* the clock may have been set back */
		values[GENERATIONS_GENERATION] = Int64GetDatum(Max(now, old + 1));
		ik_update_row(&row, values, nulls);
	}
	else
		ik_insert_row(&row, values, nulls);
	ik_unlock_row(&row);
	ik_close_row(&row);
	ik_count(COUNT_REVOKE_TOKENS, COUNT_DONE);
	PG_RETURN_TIMESTAMPTZ(now);
}

/*
 * Raise a generation on every node of a cluster of Citus, in SQL.  Says when
 * that was.
 */
static TimestampTz
raise_everywhere(const Token *token)
{
	Oid			types[] = {INT8OID, TIMESTAMPTZOID, TEXTOID, TEXTOID};
	Relation	rel = table_open(ik_own_relation("token_generations"), AccessShareLock);
	TimestampTz now = GetCurrentTimestamp();
	Datum		values[] = {
		Int64GetDatum(now),
		TimestampTzGetDatum(now),
		PointerGetDatum(token->subject),
		PointerGetDatum(token->purpose)
	};

	(void) ik_execute_as_owner(rel,
							   "INSERT INTO idempotency.token_generations AS g"
							   " (generation, raised_at, subject, purpose)"
							   " VALUES ($1, $2, $3, $4)"
							   " ON CONFLICT (subject, purpose) DO UPDATE"
							   " SET generation = greatest(excluded.generation, g.generation OPERATOR(pg_catalog.+) 1),"
							   " raised_at = excluded.raised_at",
							   lengthof(types), types, values, NULL);
	table_close(rel, NoLock);
	return now;
}

/*
 * Can purge remove this mark?  If so, *hash is that of the lock under which it
 * is removed.
 */
static bool
mark_expired(TupleTableSlot *slot, TimestampTz now, uint64 *hash)
{
	slot_getsomeattrs(slot, USED_TOKENS_NATTS);
	if (DatumGetTimestampTz(slot->tts_values[USED_TOKENS_EXPIRES_AT]) >
		now - ik_token_retention * USECS_PER_SEC)
		return false;
	*hash = mark_hash(DatumGetUUIDP(slot->tts_values[USED_TOKENS_ID]));
	return true;
}

/* Has this generation nothing left to revoke?  *hash as above. */
static bool
generation_expired(TupleTableSlot *slot, TimestampTz now,
				   uint64 *hash)
{
	slot_getsomeattrs(slot, GENERATIONS_NATTS);
	if (DatumGetTimestampTz(slot->tts_values[GENERATIONS_RAISED_AT]) >
		now - ik_token_lifetime())
		return false;
	*hash = generation_hash(ik_frame(DatumGetTextPP(slot->tts_values[GENERATIONS_SUBJECT]),
									 DatumGetTextPP(slot->tts_values[GENERATIONS_PURPOSE])));
	return true;
}

/* The arguments subject and purpose, checked. */
static void
get_binding(FunctionCallInfo fcinfo, int first, Token *token)
{
	token->subject = PG_ARGISNULL(first) ? NULL : PG_GETARG_TEXT_PP(first);
	token->purpose = PG_ARGISNULL(first + 1) ? NULL : PG_GETARG_TEXT_PP(first + 1);
	ik_check_text(token->subject, MAX_SUBJECT, "subject",
				  "It tells who may use the token, such as a user's id.");
	ik_check_text(token->purpose, MAX_PURPOSE, "purpose",
				  "It tells what the token is good for, such as 'transfer'.");
	Assert(token->subject != NULL && token->purpose != NULL);
	token->binding = ik_frame(token->subject, token->purpose);
}

/*
 * The arguments token, subject and purpose.  False: it does not even look like
 * a token.
 */
static bool
get_token(FunctionCallInfo fcinfo, Token *token)
{
	ik_not_null(fcinfo, 0, "token");
	get_binding(fcinfo, 1, token);
	return ik_read_token(token, PG_GETARG_TEXT_PP(0));
}

/*
 * When does a token end that is issued now?  A day of the ttl has 24 hours
 * (time.c): a ttl of 7 days is never longer than a limit of 7 days.
 */
static TimestampTz
expiry(TimestampTz issued_at, const Interval *ttl)
{
	TimestampTz expires_at = ik_after(issued_at, ttl, false, "ttl",
									  "Give an interval such as '5 minutes'.");

	if (expires_at > issued_at + ik_token_max_ttl * USECS_PER_SEC)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ttl is longer than idempotency.token_max_ttl"),
				 errdetail("idempotency.token_max_ttl is %s.",
						   GetConfigOptionByName("idempotency.token_max_ttl", NULL, false)),
				 errhint("Give a shorter one, or have the setting raised.")));
	return expires_at;
}

/*
 * On a cluster of Citus, make the call on the node of the token's mark; false:
 * it is to be made here.  What was not signed by us needs no message: it is
 * not readable.
 */
static bool
send_home(FunctionCallInfo fcinfo, Token *token, bool *readable, Datum *result)
{
	if (!*readable || !ik_is_spread(&ik_used_tokens))
		return false;
	*readable = is_genuine(token);
	return *readable && ik_send_token_home(fcinfo, &token->id, result);
}

/* Did we sign this, with a key that still verifies? */
static bool
is_genuine(const Token *token)
{
	const SigningKey *key = ik_find_signing_key(token->signing_key);

	return key != NULL && ik_is_signed(token, key);
}

/* Is its mark, if it had one, past retention? */
static bool
is_stale(const Token *token, TimestampTz now)
{
	return token->expires_at <= now - ik_token_retention * USECS_PER_SEC;
}

/* What is the token's status, as far as it is committed or our own doing? */
static TokenStatus
look_at_token(Token *token)
{
	RowAccess	row;
	TokenStatus status;
	TimestampTz now;

	open_mark(&row, token, AccessShareLock);
	if (!is_genuine(token))
		status = TOKEN_INVALID;
	else if (is_stale(token, GetCurrentTimestamp()))
		status = TOKEN_STALE;	/* if it had a mark, that may be purged */
	else if (ik_read_newest_row(&row))
		status = judge_marked(token, &row);
	else
		status = judge_unmarked(token, &now);
	ik_close_row(&row);
	return status;
}

/*
 * Mark the token as used or revoked, in this transaction.  TOKEN_VALID: it was
 * valid until now.
 */
static TokenStatus
mark_token(Token *token, bool revoke, TimestampTz give_up,
		   const char *function)
{
	RowAccess	row;
	TokenStatus status;
	TimestampTz now;

	if (IsInParallelMode())
		PreventCommandIfParallelMode(function);
	if (RecoveryInProgress())
	{
		/* all but valid can be told here, without waiting for anybody */
		status = look_at_token(token);
		if (status == TOKEN_VALID)
			PreventCommandDuringRecovery(function);
		return status;
	}

	open_mark(&row, token, RowExclusiveLock);
	status = TOKEN_VALID;
	if (row.table->shard != 0 && ik_look_at_row(&row) == ROW_FOUND)
		status = look_at_token(token);	/* no need to hold the shard */
	if (status == TOKEN_VALID)
		status = ik_hold_home(&row, give_up) ?
			judge(token, &row, give_up, &now) : TOKEN_BUSY;
	if (status == TOKEN_VALID)
	{
		PreventCommandIfReadOnly(function);
		token->marked_at = now;
		write_mark(&row, token, revoke);
	}
	ik_unlock_row(&row);
	ik_close_row(&row);
	return status;
}

/*
 * The status of a token that is about to be marked, and the moment that it is
 * about.  Everything is judged again after a wait, and the mark by what is
 * committed, at every isolation level: that the token was used is an
 * answer, not a conflict.
 */
static TokenStatus
judge(Token *token, RowAccess *row, TimestampTz give_up, TimestampTz *now)
{
	for (;;)
	{
		/* not ours, or its key was retired while we waited */
		if (!is_genuine(token))
			return TOKEN_INVALID;
		/* whether it has a mark tells no more */
		if (is_stale(token, GetCurrentTimestamp()))
			return TOKEN_STALE;
		/* marked: that is the answer, whether or not the lock was got */
		if (ik_try_row(row) == ROW_FOUND)
			return judge_marked(token, row);
		/* no mark, and under the lock nobody else can make one */
		if (row->state == ROW_ABSENT && row->locked)
		{
			TransactionId rival = row->table->shard == 0 ?
				InvalidTransactionId : rival_of_token(token);

			if (!TransactionIdIsValid(rival))
				return judge_unmarked(token, now);
			ik_unlock_row(row);
			if (TIMESTAMP_IS_NOBEGIN(give_up) ||
				!ik_wait_for_xact(rival, give_up))
				return TOKEN_BUSY;
			continue;
		}
		/* a rival is making one, or is about to */
		if (!ik_wait_for_row(row, give_up))
			return TOKEN_BUSY;
	}
}

/*
 * On a cluster of Citus: whose open transaction is revoking the token, with
 * others or with its signing key?  It may be committed on other nodes.
 */
static TransactionId
rival_of_token(const Token *token)
{
	TransactionId rival = ik_rival_of_signing_key(token->signing_key);
	RowAccess	row;

	if (TransactionIdIsValid(rival))
		return rival;
	open_generation(&row, token, AccessShareLock);
	rival = ik_look_at_row(&row) == ROW_RIVAL ? row.rival : InvalidTransactionId;
	ik_close_row(&row);
	return rival;
}

/* The status of a token whose mark was found. */
static TokenStatus
judge_marked(Token *token, RowAccess *row)
{
	slot_getsomeattrs(row->slot, USED_TOKENS_NATTS);
	if (DatumGetBool(row->slot->tts_values[USED_TOKENS_REVOKED]))
		return TOKEN_REVOKED;
	token->marked_at =
		DatumGetTimestampTz(row->slot->tts_values[USED_TOKENS_MARKED_AT]);
	return TOKEN_USED;
}

/*
 * The status of a token that has no mark, and the moment that it is about.
 * The generations' table may have been waited for; meanwhile the key may have
 * been retired, and a token without a mark may be one whose mark was purged.
 */
static TokenStatus
judge_unmarked(const Token *token, TimestampTz *now)
{
	bool		revoked = token->generation < current_generation(token);

	if (ik_find_signing_key(token->signing_key) == NULL)
		return TOKEN_INVALID;
	*now = GetCurrentTimestamp();
	if (is_stale(token, *now))
		return TOKEN_STALE;
	if (revoked)
		return TOKEN_REVOKED;
	if (*now >= end_of(token))
		return TOKEN_EXPIRED;
	return TOKEN_VALID;
}

static void
write_mark(RowAccess *row, const Token *token, bool revoke)
{
	Datum		values[USED_TOKENS_NATTS];
	bool		nulls[USED_TOKENS_NATTS] = {0};

	values[USED_TOKENS_EXPIRES_AT] = TimestampTzGetDatum(token->expires_at);
	values[USED_TOKENS_MARKED_AT] = TimestampTzGetDatum(token->marked_at);
	values[USED_TOKENS_ID] = UUIDPGetDatum(&token->id);
	values[USED_TOKENS_REVOKED] = BoolGetDatum(revoke);
	ik_insert_row(row, values, nulls);
}

/*
 * When does it expire?  Not later than idempotency.token_max_ttl allows by
 * now: what is kept about tokens is removed on that assumption.
 */
static TimestampTz
end_of(const Token *token)
{
	return Min(token->expires_at,
			   token->issued_at + ik_token_max_ttl * USECS_PER_SEC);
}

/* An idempotency.token_result; an invalid token has nothing but its status. */
static Datum
token_result(FunctionCallInfo fcinfo, const Token *token, TokenStatus status)
{
	static const Oid types[6] = {
		TEXTOID, TEXTOID, JSONBOID, TIMESTAMPTZOID, TIMESTAMPTZOID,
		TIMESTAMPTZOID
	};
	static text *made[COUNTED_OUTCOMES];
	Datum		values[6] = {0};
	bool		nulls[6];

	memset(nulls, true, sizeof(nulls));
	values[0] = ik_constant_text(&made[status], ik_token_statuses[status]);
	nulls[0] = false;
	if (status != TOKEN_INVALID)
	{
		values[1] = PointerGetDatum(ik_base64url(&token->id, UUID_LEN));
		values[3] = TimestampTzGetDatum(token->issued_at);
		values[4] = TimestampTzGetDatum(end_of(token));
		values[5] = TimestampTzGetDatum(token->marked_at);
		nulls[1] = nulls[3] = nulls[4] = false;
		nulls[5] = token->marked_at == 0;
		if (token->payload_len > 0)
		{
			char	   *payload = pnstrdup(token->payload, token->payload_len);

			values[2] = DirectFunctionCall1(jsonb_in,
											CStringGetDatum(payload));
			nulls[2] = false;
		}
	}
	return ik_result(fcinfo, lengthof(types), types, values, nulls);
}

static void
open_mark(RowAccess *row, Token *token, LOCKMODE lockmode)
{
	ik_open_row(row, ik_part_of(&ik_used_tokens, UUIDPGetDatum(&token->id)),
				UUIDPGetDatum(&token->id), (Datum) 0,
				mark_hash(&token->id), lockmode);
}

static void
open_generation(RowAccess *row, const Token *token, LOCKMODE lockmode)
{
	ik_open_row(row, ik_part_of(&ik_token_generations, (Datum) 0),
				PointerGetDatum(token->subject),
				PointerGetDatum(token->purpose),
				generation_hash(token->binding), lockmode);
}

static uint64
mark_hash(const pg_uuid_t *id)
{
	return ik_lock_hash(cstring_to_text(TOKEN_SCOPE),
						cstring_to_text_with_len((const char *) id,
												 UUID_LEN));
}

static uint64
generation_hash(const text *binding)
{
	return ik_lock_hash(cstring_to_text(GENERATION_SCOPE), binding);
}

/* 0 as long as nothing was revoked; where that is so of all, it is cheap. */
static int64
current_generation(const Token *token)
{
	Relation	rel = ik_open_table(ik_part_of(&ik_token_generations, (Datum) 0),
									AccessShareLock);
	bool		any = RelationGetNumberOfBlocks(rel) > 0;
	int64		generation = 0;

	table_close(rel, NoLock);
	if (any)
	{
		RowAccess	row;

		open_generation(&row, token, AccessShareLock);
		if (ik_read_newest_row(&row))
		{
			slot_getsomeattrs(row.slot, GENERATIONS_NATTS);
			generation = DatumGetInt64(row.slot->tts_values[GENERATIONS_GENERATION]);
		}
		ik_close_row(&row);
	}
	return generation;
}

/*
 * A token's id has to be unique, not secret.  So it comes from a supply, since
 * asking for 16 random bytes costs nearly as much as for many.
 */
static void
make_id(pg_uuid_t *id)
{
	static pg_uuid_t supply[32];	/* half a kilobyte of each backend */
	static int	left = 0;

	if (left == 0)
	{
		ik_random_bytes(supply, sizeof(supply));
		left = lengthof(supply);
	}
	*id = supply[--left];
}
