/*-------------------------------------------------------------------------
 *
 * token.h
 *		One-time tokens.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IK_TOKEN_H
#define IK_TOKEN_H

#include "store/store.h"

#include "common/sha2.h"
#include "utils/uuid.h"

/*
 * The longest payload, in bytes: a token is carried in forms and links, and
 * what is larger belongs in a table.
 */
#define MAX_PAYLOAD 8192

#define SIGNING_SECRET_SIZE PG_SHA256_DIGEST_LENGTH

/* a system's identifier and a database's OID, as bytes */
#define DATABASE_NAME_SIZE (sizeof(uint64) + sizeof(uint32))

typedef struct Token
{
	/* what the caller says it is for */
	text	   *subject;
	text	   *purpose;
	text	   *binding;		/* both, framed by their lengths */

	/* what it carries */
	int64		signing_key;
	int64		generation;
	TimestampTz issued_at;
	TimestampTz expires_at;
	pg_uuid_t	id;
	const char *payload;		/* not terminated */
	int			payload_len;	/* 0: none */

	/* all of that but the binding, as bytes, and then the signature */
	uint8	   *bytes;
	int			len;			/* without the signature */

	TimestampTz marked_at;		/* when it was consumed; 0: it was not */
} Token;

typedef struct SigningKey
{
	int64		id;
	TimestampTz created_at;
	TimestampTz rotated_at;		/* DT_NOEND: it was not */
	uint8		secret[SIGNING_SECRET_SIZE];

	/* the database that its tokens are for (signing_key.c) */
	uint8		database[DATABASE_NAME_SIZE];
	bool		ours;			/* is it this one? */

	/* on a cluster of Citus */
	bool		committed;		/* or still being written here */
	TransactionId rival;		/* that is removing it, or none */
} SigningKey;

/* the statuses of token_result, as they are counted (token.c) */
extern const char *const ik_token_statuses[];

/* token.c: what purge removes */
extern const Purgeable ik_purge_used_tokens;
extern const Purgeable ik_purge_generations;

/* form.c: tokens as they are sent */
extern text *ik_frame(const text *subject, const text *purpose);
extern text *ik_write_token(Token *token, const SigningKey *key);
extern bool ik_read_token(Token *token, const text *encoded);
extern bool ik_is_signed(const Token *token, const SigningKey *key);
extern text *ik_base64url(const void *bytes, int len);

/* signing_key.c: what they are signed with, and for how long that matters */
extern const SigningKey *ik_newest_signing_key(void);
extern const SigningKey *ik_find_signing_key(int64 id);
extern int64 ik_token_lifetime(void);
extern TransactionId ik_rival_of_signing_key(int64 id);
extern void ik_random_bytes(void *buffer, int len);

#endif							/* IK_TOKEN_H */
