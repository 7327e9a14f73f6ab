/*-------------------------------------------------------------------------
 *
 * token.c
 *		One-time tokens.
 *
 * A token carries all that there is to know about it, so that issuing one
 * writes nothing.  It is base64url, without padding, of
 *
 *		version		1 byte
 *		key			8 bytes: id of the token key that signed it
 *		generation	8 bytes: of (subject, purpose) when it was issued
 *		issued		8 bytes: microseconds since 2000-01-01
 *		expires		8 bytes: the same
 *		id			16 bytes, random
 *		payload		the text of a JSON value, or nothing
 *		signature	32 bytes
 *
 * with numbers in network byte order.  The signature is HMAC-SHA-256 over the
 * subject and the purpose, each preceded by its length, and all that precedes
 * the signature.  Subject and purpose are signed but not carried: whoever
 * consumes the token has to know them.
 *
 * Consuming inserts a MARK into idempotency.used_tokens, whose primary key
 * decides between rivals; revoking a single token inserts one too.  Revoking
 * all tokens of (subject, purpose) raises their GENERATION; a token of a lower
 * one is revoked.  Marks are kept idempotency.token_retention past the token's
 * end.  After that the token is stale whether or not its mark is still there,
 * and what purge removes never changes an answer.
 *
 * Token keys are cached in each backend, as long as no invalidation of their
 * table comes in; a trigger on the table sends one at each change.
 *
 *-------------------------------------------------------------------------
 */
#include "token/token.h"

#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "common/base64.h"
#include "common/hmac.h"
#include "common/sha2.h"
#include "executor/spi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "port/pg_bswap.h"
#include "storage/bufmgr.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/guc.h"
#include "utils/jsonb.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

/* limits, in bytes: of what must fit an index entry, and of a token's size */
#define MAX_SUBJECT 512
#define MAX_PURPOSE 256
#define MAX_PAYLOAD 8192

/* the locks' scopes; callers cannot use them */
#define TOKEN_SCOPE "idempotency.token"
#define GENERATION_SCOPE "idempotency.token_generation"

/* the layout at the top of this file */
#define TOKEN_VERSION 1
#define NUMBERS_SIZE (4 * sizeof(uint64))
#define HEADER_SIZE (1 + NUMBERS_SIZE + UUID_LEN)
#define SIGNATURE_SIZE PG_SHA256_DIGEST_LENGTH
#define SECRET_SIZE PG_SHA256_DIGEST_LENGTH

/* base64url of so many bytes, without padding */
#define ENCODED_SIZE(bytes) (((bytes) * 4 + 2) / 3)

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

static const char *const status_names[] = {
	[TOKEN_VALID] = "valid",
	[TOKEN_CONSUMED] = "consumed",
	[TOKEN_USED] = "used",
	[TOKEN_EXPIRED] = "expired",
	[TOKEN_REVOKED] = "revoked",
	[TOKEN_INVALID] = "invalid",
	[TOKEN_STALE] = "stale",
	[TOKEN_BUSY] = "busy"
};

typedef struct Token
{
	/* what the caller says it is for */
	text	   *subject;
	text	   *purpose;
	text	   *binding;		/* both, framed by their lengths */

	/* what it carries */
	int64		key;
	int64		generation;
	TimestampTz issued_at;
	TimestampTz expires_at;
	pg_uuid_t	id;
	const char *payload;		/* not terminated */
	int			payload_len;	/* 0: none */

	/* all of that but the binding, as bytes, and the signature */
	uint8	   *bytes;
	int			len;			/* without the signature */

	TimestampTz marked_at;		/* when it was consumed; 0: it was not */
} Token;

typedef struct TokenKey
{
	int64		id;
	TimestampTz created_at;
	TimestampTz rotated_at;		/* DT_NOEND: it was not */
	uint8		secret[SECRET_SIZE];
} TokenKey;

/* every token key, as of a count of changes to their table */
static TokenKey *keys = NULL;
static int	nkeys = 0;
static bool keys_loaded = false;
static uint64 keys_changes;
static MemoryContext keys_context = NULL;

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
PG_FUNCTION_INFO_V1(idempotency_rotate_token_key);

static void rotate_keys(Relation rel, TimestampTz now, bool retire);
static void get_binding(FunctionCallInfo fcinfo, int first, Token *token);
static bool get_token(FunctionCallInfo fcinfo, Token *token);
static TimestampTz expiry(TimestampTz issued_at, const Interval *ttl);
static void write_token(Token *token, const TokenKey *key);
static bool read_token(Token *token, const text *encoded);
static bool is_genuine(const Token *token);
static bool is_stale(const Token *token, TimestampTz now);
static TokenStatus look_at_token(Token *token);
static TokenStatus mark_token(Token *token, bool revoke, TimestampTz give_up,
							  const char *function);
static TokenStatus judge_marked(Token *token, RowAccess *row);
static TokenStatus judge_unmarked(const Token *token, TimestampTz *now);
static TimestampTz end_of(const Token *token);
static Datum token_result(FunctionCallInfo fcinfo, const Token *token,
						  TokenStatus status);
static text *frame(const text *subject, const text *purpose);
static int64 token_lifetime(void);
static void open_mark(RowAccess *row, Token *token, LOCKMODE lockmode);
static void open_generation(RowAccess *row, const Token *token,
							LOCKMODE lockmode);
static uint64 mark_hash(const pg_uuid_t *id);
static uint64 generation_hash(const text *binding);
static int64 current_generation(const Token *token);
static const TokenKey *signing_key(void);
static const TokenKey *find_key(int64 id);
static void load_keys(void);
static void sign(const TokenKey *key, const Token *token, uint8 *signature);
static bool same_bytes(const uint8 *a, const uint8 *b, int len);
static void make_id(pg_uuid_t *id);
static void random_bytes(void *buffer, int len);
static text *base64url(const void *bytes, int len);
static int	from_base64url(const text *encoded, void *bytes);
static void replace_byte(char *chars, int len, char from, char to);

/*
 * issue_token(subject, purpose, ttl, payload): a new token; writes nothing.
 * payload may be NULL.  Errors: 22004, 22008, 22023; 55000 if all token keys
 * were removed.
 */
Datum
idempotency_issue_token(PG_FUNCTION_ARGS)
{
	Token		token = {0};
	const TokenKey *key;

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
	key = signing_key();

	/* not before: the tables may have been waited for */
	token.issued_at = GetCurrentTimestamp();
	token.expires_at = expiry(token.issued_at, PG_GETARG_INTERVAL_P(2));
	make_id(&token.id);
	write_token(&token, key);
	PG_RETURN_TEXT_P(base64url(token.bytes, token.len + SIGNATURE_SIZE));
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

	if (readable)
		status = mark_token(&token, false, give_up,
							"idempotency.consume_token()");
	return token_result(fcinfo, &token,
						status == TOKEN_VALID ? TOKEN_CONSUMED : status);
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

	if (get_token(fcinfo, &token))
		status = look_at_token(&token);
	return token_result(fcinfo, &token, status);
}

/*
 * revoke_token(token, subject, purpose): make the token worthless; true if it
 * was valid until now.  Error: 55P03 while a rival is consuming it.
 */
Datum
idempotency_revoke_token(PG_FUNCTION_ARGS)
{
	Token		token = {0};
	TokenStatus status = TOKEN_INVALID;

	if (get_token(fcinfo, &token))
		status = mark_token(&token, true, ik_give_up_at(NULL),
							"idempotency.revoke_token()");
	if (status == TOKEN_BUSY)
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("token is being consumed elsewhere"),
				 errhint("Whether it will be used is not known yet: try again later.")));
	PG_RETURN_BOOL(status == TOKEN_VALID);
}

/*
 * revoke_tokens(subject, purpose): raise their generation, so that all tokens
 * of a lower one are revoked.  It waits for whoever is raising the same one.
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
	PG_RETURN_VOID();
}

/*
 * rotate_token_key(retire): from now on sign with a new key.  The old ones
 * still verify until every token that they signed is stale; with retire they
 * are removed.  The install script makes the first key so.
 */
Datum
idempotency_rotate_token_key(PG_FUNCTION_ARGS)
{
	RowAccess	row;
	TimestampTz now;
	int64		id;
	bytea	   *secret = palloc(VARHDRSZ + SECRET_SIZE);
	Datum		values[TOKEN_KEYS_NATTS];
	bool		nulls[TOKEN_KEYS_NATTS] = {[TOKEN_KEYS_ROTATED_AT] = true};

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("retire must not be null")));
	ik_refuse_to_write("idempotency.rotate_token_key()");
	random_bytes(&id, sizeof(id));
	random_bytes(VARDATA(secret), SECRET_SIZE);
	SET_VARSIZE(secret, VARHDRSZ + SECRET_SIZE);

	/* one rotation at a time; whoever only reads the keys is not held up */
	ik_open_row(&row, &ik_token_keys, Int64GetDatum(id),
				(Datum) 0, 0, ShareRowExclusiveLock);
	now = GetCurrentTimestamp();
	rotate_keys(row.rel, now, PG_GETARG_BOOL(0));

	/* past SQL, whose parameters other extensions may log */
	values[TOKEN_KEYS_ID] = Int64GetDatum(id);
	values[TOKEN_KEYS_CREATED_AT] = TimestampTzGetDatum(now);
	values[TOKEN_KEYS_SECRET] = PointerGetDatum(secret);
	ik_insert_row(&row, values, nulls);
	CacheInvalidateRelcache(row.rel);
	ik_close_row(&row);
	PG_RETURN_VOID();
}

/*
 * Can purge remove this mark?  If so, *hash is that of the lock under which it
 * is removed.
 */
static bool
mark_expired(TupleTableSlot *slot, TimestampTz now, uint64 *hash)
{
	slot_getsomeattrs(slot, USED_TOKENS_NATTS);
	if (DatumGetTimestampTz(slot->tts_values[USED_TOKENS_EXPIRES_AT]) +
		ik_token_retention * USECS_PER_SEC > now)
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
	if (DatumGetTimestampTz(slot->tts_values[GENERATIONS_RAISED_AT]) +
		token_lifetime() > now)
		return false;
	*hash = generation_hash(frame(DatumGetTextPP(slot->tts_values[GENERATIONS_SUBJECT]),
								  DatumGetTextPP(slot->tts_values[GENERATIONS_PURPOSE])));
	return true;
}

/*
 * What becomes of the keys that are there: with retire they go, else they are
 * rotated, and go if they have nothing to verify any more.  Done as the owner
 * of the table.
 */
static void
rotate_keys(Relation rel, TimestampTz now, bool retire)
{
	SavedUser	caller;
	Oid			types[] = {BOOLOID, TIMESTAMPTZOID, TIMESTAMPTZOID};
	Datum		values[] = {
		BoolGetDatum(retire),
		TimestampTzGetDatum(now),
		TimestampTzGetDatum(now - token_lifetime())
	};
	static const char *const commands[] = {
		"DELETE FROM idempotency.token_keys"
		" WHERE $1 OR rotated_at OPERATOR(pg_catalog.<=) $3",
		"UPDATE idempotency.token_keys SET rotated_at = $2"
		" WHERE rotated_at IS NULL"
	};

	ik_become_owner(rel, 0, &caller);
	SPI_connect();
	for (int i = 0; i < lengthof(commands); i++)
	{
		int			result = SPI_execute_with_args(commands[i], lengthof(types),
												   types, values, NULL,
												   false, 0);

		if (result < 0)
			elog(ERROR, "could not rotate token keys: %s",
				 SPI_result_code_string(result));
	}
	SPI_finish();
	ik_become_caller(&caller);
}

/* The arguments subject and purpose, checked: 22004, 22023. */
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
	token->binding = frame(token->subject, token->purpose);
}

/*
 * The arguments token, subject and purpose.  False: it does not even look like
 * a token.
 */
static bool
get_token(FunctionCallInfo fcinfo, Token *token)
{
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("token must not be null")));
	get_binding(fcinfo, 1, token);
	return read_token(token, PG_GETARG_TEXT_PP(0));
}

/*
 * Errors: 22023 for a ttl that is not positive or too long, 22008 for one that
 * overflows.  As in UTC, where a day has 24 hours: a ttl of 7 days is never
 * longer than a limit of 7 days.
 */
static TimestampTz
expiry(TimestampTz issued_at, const Interval *ttl)
{
	TimestampTz expires_at;

	expires_at = DatumGetTimestamp(DirectFunctionCall2(timestamp_pl_interval,
													   TimestampGetDatum(issued_at),
													   IntervalPGetDatum(ttl)));
	if (expires_at <= issued_at)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ttl must be positive"),
				 errhint("Give an interval such as '5 minutes'.")));
	if (expires_at > issued_at + ik_token_max_ttl * USECS_PER_SEC)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("ttl is longer than idempotency.token_max_ttl"),
				 errdetail("The setting is %s.",
						   GetConfigOptionByName("idempotency.token_max_ttl", NULL, false)),
				 errhint("Give a shorter ttl, or have a superuser raise the setting.")));
	return expires_at;
}

/* The token as bytes, signed. */
static void
write_token(Token *token, const TokenKey *key)
{
	uint64		numbers[4] = {
		pg_hton64(key->id),
		pg_hton64(token->generation),
		pg_hton64(token->issued_at),
		pg_hton64(token->expires_at)
	};

	token->len = HEADER_SIZE + token->payload_len;
	token->bytes = palloc(token->len + SIGNATURE_SIZE);
	token->bytes[0] = TOKEN_VERSION;
	memcpy(token->bytes + 1, numbers, NUMBERS_SIZE);
	memcpy(token->bytes + 1 + NUMBERS_SIZE, &token->id, UUID_LEN);
	if (token->payload_len > 0)
		memcpy(token->bytes + HEADER_SIZE, token->payload, token->payload_len);
	sign(key, token, token->bytes + token->len);
}

/* The other way round; false: this is no token.  Not yet verified. */
static bool
read_token(Token *token, const text *encoded)
{
	Size		len = VARSIZE_ANY_EXHDR(encoded);
	uint64		numbers[4];

	if (len < ENCODED_SIZE(HEADER_SIZE + SIGNATURE_SIZE) ||
		len > ENCODED_SIZE(HEADER_SIZE + MAX_PAYLOAD + SIGNATURE_SIZE))
		return false;
	token->bytes = palloc(len);
	token->len = from_base64url(encoded, token->bytes) - SIGNATURE_SIZE;
	if (token->len < (int) HEADER_SIZE || token->bytes[0] != TOKEN_VERSION)
		return false;

	memcpy(numbers, token->bytes + 1, NUMBERS_SIZE);
	token->key = pg_ntoh64(numbers[0]);
	token->generation = pg_ntoh64(numbers[1]);
	token->issued_at = pg_ntoh64(numbers[2]);
	token->expires_at = pg_ntoh64(numbers[3]);
	memcpy(&token->id, token->bytes + 1 + NUMBERS_SIZE, UUID_LEN);
	token->payload = (char *) token->bytes + HEADER_SIZE;
	token->payload_len = token->len - HEADER_SIZE;
	return true;
}

/*
 * Did we sign this, for this subject and purpose, with a key that still
 * verifies?  The payload's encoding is checked too: the database may have been
 * restored into another one.
 */
static bool
is_genuine(const Token *token)
{
	const TokenKey *key = find_key(token->key);
	uint8		signature[SIGNATURE_SIZE];

	if (key == NULL)
		return false;
	sign(key, token, signature);
	return same_bytes(signature, token->bytes + token->len, SIGNATURE_SIZE) &&
		pg_verifymbstr(token->payload, token->payload_len, true);
}

/* Is its mark, if it had one, past retention? */
static bool
is_stale(const Token *token, TimestampTz now)
{
	return token->expires_at + ik_token_retention * USECS_PER_SEC <=
		now;
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
		status = TOKEN_STALE;
	else if (ik_read_newest_row(&row))
		status = judge_marked(token, &row);
	else
		status = judge_unmarked(token, &now);
	ik_close_row(&row);
	return status;
}

/*
 * Mark the token as used or revoked, in this transaction.  TOKEN_VALID: it was
 * valid until now.  Everything is judged again after a wait, and the mark by
 * what is committed, whatever the isolation level: that the token was used is
 * an answer, not a conflict.
 */
static TokenStatus
mark_token(Token *token, bool revoke, TimestampTz give_up,
		   const char *function)
{
	RowAccess	row;
	TokenStatus status;
	TimestampTz now = 0;

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
	for (;;)
	{
		if (!is_genuine(token))
		{
			status = TOKEN_INVALID;
			break;
		}
		if (is_stale(token, GetCurrentTimestamp()))
		{
			status = TOKEN_STALE;
			break;
		}
		if (ik_try_row(&row) == ROW_FOUND)
		{
			status = judge_marked(token, &row);
			break;
		}
		if (row.state == ROW_ABSENT && row.locked)
		{
			status = judge_unmarked(token, &now);
			break;
		}
		if (!ik_wait_for_row(&row, give_up))
		{
			status = TOKEN_BUSY;
			break;
		}
	}
	if (status == TOKEN_VALID)
	{
		Datum		values[USED_TOKENS_NATTS];
		bool		nulls[USED_TOKENS_NATTS] = {0};

		PreventCommandIfReadOnly(function);
		token->marked_at = now;
		values[USED_TOKENS_EXPIRES_AT] = TimestampTzGetDatum(token->expires_at);
		values[USED_TOKENS_MARKED_AT] = TimestampTzGetDatum(token->marked_at);
		values[USED_TOKENS_ID] = UUIDPGetDatum(&token->id);
		values[USED_TOKENS_REVOKED] = BoolGetDatum(revoke);
		ik_insert_row(&row, values, nulls);
	}
	ik_unlock_row(&row);
	ik_close_row(&row);
	return status;
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

	if (find_key(token->key) == NULL)
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
	Datum		values[6] = {0};
	bool		nulls[6];

	memset(nulls, true, sizeof(nulls));
	values[0] = CStringGetTextDatum(status_names[status]);
	nulls[0] = false;
	if (status != TOKEN_INVALID)
	{
		values[1] = PointerGetDatum(base64url(&token->id, UUID_LEN));
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

/*
 * Subject and purpose, each preceded by its length: so that another split of
 * the same bytes is another binding.
 */
static text *
frame(const text *subject, const text *purpose)
{
	const text *parts[] = {subject, purpose};
	int			size = VARHDRSZ;
	text	   *framed;
	char	   *end;

	for (int i = 0; i < lengthof(parts); i++)
		size += sizeof(uint32) + VARSIZE_ANY_EXHDR(parts[i]);
	framed = palloc(size);
	SET_VARSIZE(framed, size);
	end = VARDATA(framed);
	for (int i = 0; i < lengthof(parts); i++)
	{
		int			len = VARSIZE_ANY_EXHDR(parts[i]);
		uint32		prefix = pg_hton32(len);

		memcpy(end, &prefix, sizeof(prefix));
		memcpy(end + sizeof(prefix), VARDATA_ANY(parts[i]), len);
		end += sizeof(prefix) + len;
	}
	return framed;
}

/*
 * How long after its issue can a token still tell whether it was used, in
 * microseconds?  So long after a rotation the old key has nothing to verify
 * that is not stale, and so long after a revocation the generation has
 * nothing to revoke.
 */
static int64
token_lifetime(void)
{
	return (ik_token_max_ttl + (int64) ik_token_retention) *
		USECS_PER_SEC;
}

static void
open_mark(RowAccess *row, Token *token, LOCKMODE lockmode)
{
	ik_open_row(row, &ik_used_tokens,
				UUIDPGetDatum(&token->id), (Datum) 0,
				mark_hash(&token->id), lockmode);
}

static void
open_generation(RowAccess *row, const Token *token, LOCKMODE lockmode)
{
	ik_open_row(row, &ik_token_generations,
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
	Relation	rel = ik_open_table(&ik_token_generations,
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
 * The newest key that was not rotated: after a restore there are two, that of
 * the dump and that of the new install.
 */
static const TokenKey *
signing_key(void)
{
	const TokenKey *newest = NULL;

	load_keys();
	for (int i = 0; i < nkeys; i++)
	{
		if (TIMESTAMP_IS_NOEND(keys[i].rotated_at) &&
			(newest == NULL || keys[i].created_at > newest->created_at))
			newest = &keys[i];
	}
	if (newest == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("there is no token key to sign with"),
				 errhint("Call idempotency.rotate_token_key().")));
	return newest;
}

/* The key of this id, if it still verifies, or NULL. */
static const TokenKey *
find_key(int64 id)
{
	load_keys();
	for (int i = 0; i < nkeys; i++)
	{
		if (keys[i].id == id)
		{
			if (!TIMESTAMP_IS_NOEND(keys[i].rotated_at) &&
				keys[i].rotated_at + token_lifetime() <= GetCurrentTimestamp())
				return NULL;
			return &keys[i];
		}
	}
	return NULL;
}

/*
 * Read the token keys, unless they are cached.  A change is in effect as soon
 * as it is committed, also for a transaction that began before; so the
 * snapshot is the latest, and invalidations are taken in even if our locks
 * would not make us.
 */
static void
load_keys(void)
{
	Relation	rel;
	Snapshot	snapshot;
	TableScanDesc scan;
	TupleTableSlot *slot;
	int			size = 0;

	AcceptInvalidationMessages();
	if (keys_loaded &&
		keys_changes == ik_table_changes(&ik_token_keys))
		return;

	keys_loaded = false;
	nkeys = 0;
	if (keys_context == NULL)
		keys_context = AllocSetContextCreate(TopMemoryContext,
											 "idempotency token keys",
											 ALLOCSET_SMALL_SIZES);
	MemoryContextReset(keys_context);

	/* SnapshotAny and a check of our own, since that takes no predicate lock */
	rel = ik_open_table(&ik_token_keys, AccessShareLock);
	keys_changes = ik_table_changes(&ik_token_keys);
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	slot = table_slot_create(rel, NULL);
	scan = table_beginscan_strat(rel, SnapshotAny, 0, NULL, true, false);
	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		TokenKey   *key;
		bytea	   *secret;

		if (!table_tuple_satisfies_snapshot(rel, slot, snapshot))
			continue;
		if (nkeys == size)
		{
			size = size * 2 + 4;
			keys = size == 4 ?
				MemoryContextAlloc(keys_context, size * sizeof(TokenKey)) :
				repalloc(keys, size * sizeof(TokenKey));
		}
		key = &keys[nkeys];
		slot_getsomeattrs(slot, TOKEN_KEYS_NATTS);
		key->id = DatumGetInt64(slot->tts_values[TOKEN_KEYS_ID]);
		key->created_at = DatumGetTimestampTz(slot->tts_values[TOKEN_KEYS_CREATED_AT]);
		key->rotated_at = slot->tts_isnull[TOKEN_KEYS_ROTATED_AT] ? DT_NOEND :
			DatumGetTimestampTz(slot->tts_values[TOKEN_KEYS_ROTATED_AT]);
		secret = DatumGetByteaPP(slot->tts_values[TOKEN_KEYS_SECRET]);
		if (VARSIZE_ANY_EXHDR(secret) != sizeof(key->secret))
			continue;
		memcpy(key->secret, VARDATA_ANY(secret), sizeof(key->secret));
		nkeys++;
	}
	table_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	UnregisterSnapshot(snapshot);
	table_close(rel, NoLock);
	keys_loaded = true;
}

/*
 * The signature of token->bytes for its binding.  The context is made once and
 * set up anew each time, as scram-common.c does: making one costs a fifth of
 * the whole.
 */
static void
sign(const TokenKey *key, const Token *token, uint8 *signature)
{
	static pg_hmac_ctx *hmac = NULL;

	if (hmac == NULL)
	{
		ResourceOwner owner = CurrentResourceOwner;
		MemoryContext old = MemoryContextSwitchTo(TopMemoryContext);

		/*
		 * Else it would go at the end of the transaction, or, where
		 * PostgreSQL was built without OpenSSL, with the memory of this call.
		 */
		CurrentResourceOwner = ResourceOwnerCreate(NULL, "idempotency tokens");
		hmac = pg_hmac_create(PG_SHA256);
		CurrentResourceOwner = owner;
		MemoryContextSwitchTo(old);
	}
	if (hmac == NULL ||
		pg_hmac_init(hmac, key->secret, sizeof(key->secret)) < 0 ||
		pg_hmac_update(hmac, (uint8 *) VARDATA(token->binding),
					   VARSIZE(token->binding) - VARHDRSZ) < 0 ||
		pg_hmac_update(hmac, token->bytes, token->len) < 0 ||
		pg_hmac_final(hmac, signature, SIGNATURE_SIZE) < 0)
		elog(ERROR, "could not compute HMAC: %s", pg_hmac_error(hmac));
}

/*
 * In a time that does not depend on where they differ.  (timingsafe_bcmp() is
 * there only from certain minor releases on.)
 */
static bool
same_bytes(const uint8 *a, const uint8 *b, int len)
{
	volatile uint8 difference = 0;

	for (int i = 0; i < len; i++)
		difference |= a[i] ^ b[i];
	return difference == 0;
}

/*
 * A token's id has to be unique, not secret.  So it comes from a supply, since
 * asking for 16 random bytes costs nearly as much as for many.
 */
static void
make_id(pg_uuid_t *id)
{
	static pg_uuid_t supply[32];
	static int	left = 0;

	if (left == 0)
	{
		random_bytes(supply, sizeof(supply));
		left = lengthof(supply);
	}
	*id = supply[--left];
}

static void
random_bytes(void *buffer, int len)
{
	if (!pg_strong_random(buffer, len))
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not generate random values")));
}

/* base64 with - and _ for + and /, and without padding (RFC 4648, section 5) */
static text *
base64url(const void *bytes, int len)
{
	int			size = pg_b64_enc_len(len);
	text	   *encoded = palloc(VARHDRSZ + size);
	char	   *chars = VARDATA(encoded);

	if (pg_b64_encode(bytes, len, chars, size) < 0)
		elog(ERROR, "could not encode token");
	size = ENCODED_SIZE(len);
	replace_byte(chars, size, '+', '-');
	replace_byte(chars, size, '/', '_');
	SET_VARSIZE(encoded, VARHDRSZ + size);
	return encoded;
}

/*
 * The bytes, and as the result how many; -1 for whatever base64url() could not
 * have made: the other alphabet, padding, spaces, stray bits at the end.
 */
static int
from_base64url(const text *encoded, void *bytes)
{
	const char *chars = VARDATA_ANY(encoded);
	int			len = VARSIZE_ANY_EXHDR(encoded);
	char	   *plain = palloc(len + 3);
	int			padded = len;

	/* pg_b64_decode() knows what else there is */
	if (memchr(chars, '+', len) || memchr(chars, '/', len) ||
		memchr(chars, '=', len))
		return -1;
	memcpy(plain, chars, len);
	replace_byte(plain, len, '-', '+');
	replace_byte(plain, len, '_', '/');

	/* 2 or 3 characters at the end leave 4 or 2 bits unused: they are 0 */
	if (len % 4 == 1 ||
		(len % 4 == 2 && strchr("AQgw", chars[len - 1]) == NULL) ||
		(len % 4 == 3 && strchr("AEIMQUYcgkosw048", chars[len - 1]) == NULL))
		return -1;
	while (padded % 4 != 0)
		plain[padded++] = '=';
	if (pg_b64_decode(plain, padded, bytes, len) < 0)
		return -1;
	return len * 3 / 4;
}

static void
replace_byte(char *chars, int len, char from, char to)
{
	char	   *end = chars + len;

	for (char *c = chars; (c = memchr(c, from, end - c)) != NULL; c++)
		*c = to;
}
