/*-------------------------------------------------------------------------
 *
 * key.h
 *		Keys: who may do the work, and what the answer was.
 *
 * Vocabulary: a KEY is a (scope, key) pair that names one operation.  A CLAIM
 * is the right to carry it out; a claim is SETTLED when it is completed,
 * failed or released.  A claim in TRANSACTION MODE lives in memory and under a
 * lock until it is settled, and its row is written once, final.  A LEASE is a
 * claim that outlives its transaction: a row with a deadline and a FENCE, the
 * number by which a superseded holder is told from the newest.  A RIVAL is
 * another transaction that is at work on the same key.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IK_KEY_H
#define IK_KEY_H

#include "store/store.h"

#include "lib/ilist.h"
#include "utils/jsonb.h"

/* held.c: the claims that this transaction holds */
typedef struct Claim
{
	dlist_node	node;			/* among all, the deepest level first */
	dlist_node	settled_node;	/* among the settled ones, likewise */
	struct Claim *next;			/* in its chain of the hash table */
	uint64		lock_hash;
	text	   *scope;
	text	   *key;
	bytea	   *fingerprint;	/* NULL: nothing to compare was given */
	int64		ttl;			/* microseconds; 0: the setting's */
	TimestampTz created_at;
	bool		replaces;		/* an old row is there, to be overwritten */
	bool		away;			/* another node has it, and the lock */
	int			level;			/* nest level of the owning subtransaction */
	int			settled;		/* nest level at which it was; 0: open */
	bool		released;		/* then it was given back */
} Claim;

extern void ik_add_claim(uint64 lock_hash, const text *scope,
						 const text *key, const bytea *fingerprint,
						 int64 ttl, bool replaces, TimestampTz claimed_at);
extern Claim *ik_find_claim(const text *scope, const text *key);
extern void ik_settle_claim(Claim *claim, bool released);

/* key.c: keys */
typedef struct KeyRequest
{
	const char *function;		/* for messages */
	text	   *scope;
	text	   *key;
	Jsonb	   *request;		/* NULL: do not compare */
	text	   *fingerprint;	/* compared in its place; NULL: none */
	int64		ttl;			/* microseconds; 0: idempotency.default_ttl */
	Interval   *wait;			/* NULL: idempotency.default_wait */
} KeyRequest;

typedef enum KeyStatus
{
	KEY_CLAIMED,
	KEY_COMPLETED,
	KEY_FAILED,
	KEY_IN_PROGRESS,
	KEY_HELD,
	KEY_MISMATCH,
	KEY_RELEASED				/* of run(): the function gave the key back */
} KeyStatus;

/* how a run() that called nothing is counted: by what none ends with */
#define RUN_REPLAYED KEY_CLAIMED

/*
 * An answer, as stored or to be stored; NULL where there is none.  From a live
 * lease of somebody else: until when, and which attempt it is.  With
 * KEY_CLAIMED: since when.
 */
typedef struct KeyAnswer
{
	text	   *response;
	Jsonb	   *meta;
	TimestampTz deadline;		/* 0: none */
	int32		attempt;		/* 0: none */
	TimestampTz claimed_at;
} KeyAnswer;

/* a row of idempotency.keys; NULL or 0 where the column is NULL */
typedef struct KeyRow
{
	TimestampTz created_at;
	TimestampTz expires_at;
	char		status;
	text	   *key;
	text	   *scope;
	text	   *response;
	Jsonb	   *meta;
	bytea	   *fingerprint;
	int64		fence;
	TimestampTz deadline;
	int32		attempt;
	text	   *checkpoint;
	Jsonb	   *checkpoint_data;
} KeyRow;

extern void ik_get_identity(FunctionCallInfo fcinfo,
							text **scope, text **key);
extern void ik_get_any_identity(FunctionCallInfo fcinfo,
								text **scope, text **key);
extern void ik_check_scope(const text *scope);
extern void ik_check_key(const text *key, const char *name);
extern const char *const ik_key_statuses[];
extern Datum ik_status_datum(KeyStatus status);
extern KeyStatus ik_claim_key(const KeyRequest *request, KeyAnswer *answer);
extern TimestampTz ik_complete_claim(Claim *claim, KeyStatus outcome,
									 const KeyAnswer *answer, int64 ttl);
extern bool ik_read_answer(text *scope, text *key,
						   KeyStatus *status, KeyAnswer *answer);

extern void ik_get_request(FunctionCallInfo fcinfo, int request,
						   int fingerprint, KeyRequest *result);
extern int64 ik_ttl_argument(FunctionCallInfo fcinfo, int argument);
extern const int64 *ik_fence_argument(FunctionCallInfo fcinfo, int argument);
extern void ik_put_answer(Datum *values, bool *nulls,
						  const KeyAnswer *answer);
extern void ik_open_key(RowAccess *row, text *scope, text *key,
						LOCKMODE lockmode);
extern void ik_lock_key(RowAccess *row);
extern KeyStatus ik_seize_key(RowAccess *row,
							  const KeyRequest *request,
							  TimestampTz give_up,
							  KeyAnswer *answer);
extern void ik_read_key(TupleTableSlot *slot, KeyRow *key);
extern void ik_write_key(RowAccess *row, const KeyRow *key);
extern void ik_take_over(KeyRow *next, const KeyRow *old,
						 TimestampTz now);
extern TimestampTz ik_expiry(TimestampTz from, int64 ttl);
extern TimestampTz ik_write_answer(RowAccess *row, const Claim *claim,
								   KeyStatus outcome, const KeyAnswer *answer,
								   int64 ttl);
extern bool ik_key_is_present(const KeyRow *stored, TimestampTz now);
extern KeyStatus ik_stored_status(const KeyRow *stored);

/* fingerprint.c: what is kept of a request */
extern bytea *ik_fingerprint(const KeyRequest *request);
extern bool ik_mismatch(const bytea *stored, const KeyRequest *request);

/* lease.c: leases */
extern TimestampTz ik_settle_lease(text *scope, text *key,
								   KeyStatus outcome,
								   const KeyAnswer *answer,
								   const int64 *fence, int64 ttl);
extern bool ik_release_lease(text *scope, text *key,
							 const int64 *fence,
							 const char *function);

/* what purge removes (key.c) */
extern const Purgeable ik_purge_keys;

#endif							/* IK_KEY_H */
