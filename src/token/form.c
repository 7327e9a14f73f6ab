/*-------------------------------------------------------------------------
 *
 * form.c
 *		Tokens as they are sent: bytes, signature, base64url.
 *
 * A token carries all that there is to know about it, so that issuing one
 * writes nothing.  It is base64url, without padding, of
 *
 *		version		1 byte
 *		key			8 bytes: id of the signing key
 *		generation	8 bytes: of (subject, purpose) when it was issued
 *		issued		8 bytes: microseconds since 2000-01-01
 *		expires		8 bytes: the same
 *		id			16 bytes, random
 *		payload		the text of a JSON value, or nothing
 *		signature	32 bytes
 *
 * with numbers in network byte order.  The signature is HMAC-SHA-256 over the
 * database that the key signs for (8 bytes of the system's identifier and 4 of
 * its own), the subject and the purpose, each preceded by its length, and all
 * that precedes the signature.  Subject and purpose are signed but not carried:
 * a caller who consumes the token has to know them.
 *
 *-------------------------------------------------------------------------
 */
#include "token/token.h"

#include "common/base64.h"
#include "common/hmac.h"
#include "mb/pg_wchar.h"
#include "port/pg_bswap.h"
#include "utils/memutils.h"
#include "utils/resowner.h"

/* the layout at the top of this file */
#define TOKEN_VERSION 1
#define NUMBERS_SIZE (4 * sizeof(uint64))
#define HEADER_SIZE (1 + NUMBERS_SIZE + UUID_LEN)
#define SIGNATURE_SIZE PG_SHA256_DIGEST_LENGTH

/* base64url of so many bytes, without padding */
#define ENCODED_SIZE(bytes) (((bytes) * 4 + 2) / 3)

static void sign(const SigningKey *key, const Token *token, uint8 *signature);
static bool same_bytes(const uint8 *a, const uint8 *b, int len);
static int	from_base64url(const text *encoded, void *bytes);
static void replace_byte(char *chars, int len, char from, char to);

/*
 * Subject and purpose, each preceded by its length: so that another split of
 * the same bytes is another binding.
 */
text *
ik_frame(const text *subject, const text *purpose)
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

/* The token, signed. */
text *
ik_write_token(Token *token, const SigningKey *key)
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
	return ik_base64url(token->bytes, token->len + SIGNATURE_SIZE);
}

/* The other way round; false: this is no token.  Not yet verified. */
bool
ik_read_token(Token *token, const text *encoded)
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
	token->signing_key = pg_ntoh64(numbers[0]);
	token->generation = pg_ntoh64(numbers[1]);
	token->issued_at = pg_ntoh64(numbers[2]);
	token->expires_at = pg_ntoh64(numbers[3]);
	memcpy(&token->id, token->bytes + 1 + NUMBERS_SIZE, UUID_LEN);
	token->payload = (char *) token->bytes + HEADER_SIZE;
	token->payload_len = token->len - HEADER_SIZE;
	return true;
}

/*
 * Was it signed with this key, for this subject and purpose?  The payload's
 * encoding is checked too: the database may have been restored into another
 * one.
 */
bool
ik_is_signed(const Token *token, const SigningKey *key)
{
	uint8		signature[SIGNATURE_SIZE];

	sign(key, token, signature);
	return same_bytes(signature, token->bytes + token->len, SIGNATURE_SIZE) &&
		pg_verifymbstr(token->payload, token->payload_len, true);
}

/*
 * The signature of token->bytes for its binding.  The context is made once and
 * set up anew each time, as scram-common.c does: making one costs a fifth of
 * the whole.
 */
static void
sign(const SigningKey *key, const Token *token, uint8 *signature)
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
		pg_hmac_update(hmac, key->database, sizeof(key->database)) < 0 ||
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

/* base64 with - and _ for + and /, and without padding (RFC 4648, section 5) */
text *
ik_base64url(const void *bytes, int len)
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
 * The bytes, and as the result how many; -1 for what ik_base64url() cannot
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
