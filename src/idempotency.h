/*-------------------------------------------------------------------------
 *
 * idempotency.h
 *		What the files of this extension share.
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
#ifndef IDEMPOTENCY_H
#define IDEMPOTENCY_H

#include "postgres.h"

#include "access/relscan.h"
#include "datatype/timestamp.h"
#include "executor/tuptable.h"
#include "fmgr.h"
#include "lib/ilist.h"
#include "lib/stringinfo.h"
#include "utils/jsonb.h"
#include "storage/block.h"
#include "utils/rel.h"

#include "compat.h"
#include "errors.h"

/* settings (idempotency.c) */
extern int	idempotency_debug_hash_bits;
extern int	idempotency_default_ttl;	/* seconds */
extern int	idempotency_default_wait;	/* milliseconds; -1: endless */
extern int	idempotency_max_lease;	/* seconds */
extern int	idempotency_outbox_max_attempts;
extern char *idempotency_purge_databases;
extern int	idempotency_purge_interval; /* seconds */
extern int	idempotency_token_max_ttl;	/* seconds */
extern int	idempotency_token_retention;	/* seconds */

extern Datum idempotency_result(FunctionCallInfo fcinfo, int natts,
								const Oid *types, Datum *values, bool *nulls);
extern void idempotency_check_columns(TupleDesc desc, int natts,
									  const Oid *types);
extern void idempotency_check_rows(TupleDesc desc, Relation rel);
extern Oid	idempotency_argument_type(FunctionCallInfo fcinfo, int argument);
extern void idempotency_check_text(const text *value, Size limit,
								   const char *name, const char *hint);

/* own.c: which objects are ours, and in whose name their tables are written */
extern Oid	idempotency_own_relation(const char *name);
extern Oid	idempotency_trigger_function(const char *name);
extern bool idempotency_is_ours(Oid class, Oid object);

/* who called, while we are the owner of a table */
typedef struct SavedUser
{
	Oid			user;
	int			context;
	int			nest;			/* of the settings */
} SavedUser;

extern void idempotency_become_owner(Relation rel, int context,
									 SavedUser *saved);
extern void idempotency_become_caller(const SavedUser *saved);

/* lock.c: the lock of a key, and waiting for rivals */
extern uint64 idempotency_lock_hash(const text *scope, const text *key);
extern bool idempotency_try_lock(uint64 hash);
extern void idempotency_unlock(uint64 hash);
extern TimestampTz idempotency_give_up_at(const Interval *wait);
extern bool idempotency_wait_for_lock(uint64 hash, TimestampTz give_up);
extern bool idempotency_wait_for_xact(TransactionId xid, TimestampTz give_up);

/* table.c: our own tables, read and written without SQL */
typedef struct OwnTable OwnTable;

/* what a look at one row found */
typedef enum RowState
{
	ROW_ABSENT,					/* no such row */
	ROW_FOUND,					/* committed, or our own: it is in the slot */
	ROW_RIVAL					/* a rival is writing or removing it */
} RowState;

/* one row of ours, by its primary key, and the lock that goes with it */
typedef struct RowAccess
{
	OwnTable   *table;
	Relation	rel;
	Relation	index;			/* the primary key's */
	TupleTableSlot *slot;		/* the row, after ROW_FOUND */
	Datum		key[2];			/* the primary key's columns, in its order */
	RowState	state;			/* what the last look found */
	TransactionId rival;		/* who is in the way, after ROW_RIVAL */
	uint64		lock_hash;
	bool		locked;			/* do we hold the lock? */
} RowAccess;

/* the indexes that we read; every table has the first */
enum
{
	PRIMARY_KEY,
	KEYS_LEASED = 1,			/* (deadline), of the leases */
	OUTBOX_BY_DUE = 1,			/* (topic, due) */
	OUTBOX_BY_KEY = 2,			/* (topic, key, state, id), of events with a key */
	MAX_OWN_INDEXES
};

extern OwnTable idempotency_keys;
extern OwnTable idempotency_outbox;
extern OwnTable idempotency_token_keys;
extern OwnTable idempotency_used_tokens;
extern OwnTable idempotency_token_generations;

extern Relation idempotency_open_table(OwnTable *table, LOCKMODE lockmode);
extern Oid	idempotency_own_index(OwnTable *table, int which);
extern uint64 idempotency_table_changes(const OwnTable *table);
extern Datum idempotency_announce_change(FunctionCallInfo fcinfo,
										 const char *table);
extern void idempotency_open_row(RowAccess *row, OwnTable *table,
								 Datum key1, Datum key2, uint64 lock_hash,
								 LOCKMODE lockmode);
extern void idempotency_close_row(RowAccess *row);
extern RowState idempotency_try_row(RowAccess *row);
extern RowState idempotency_look_at_row(RowAccess *row);
extern bool idempotency_wait_for_row(RowAccess *row, TimestampTz give_up);
extern void idempotency_unlock_row(RowAccess *row);
extern bool idempotency_read_row(RowAccess *row);
extern TransactionId idempotency_row_writer(RowAccess *row);
extern bool idempotency_read_newest_row(RowAccess *row);
extern bool idempotency_row_is_ours(RowAccess *row);
extern void idempotency_check_row_visible(RowAccess *row);
extern void idempotency_insert_row(RowAccess *row, Datum *values, bool *nulls);
extern void idempotency_update_row(RowAccess *row, Datum *values, bool *nulls);
extern void idempotency_delete_row(RowAccess *row);

/* claim.c: the claims that this transaction holds */
typedef struct Claim
{
	dlist_node	node;
	uint64		lock_hash;
	text	   *scope;
	text	   *key;
	Jsonb	   *request;		/* NULL: none was given */
	Interval   *ttl;			/* NULL: the setting's */
	TimestampTz created_at;
	bool		replaces;		/* an old row is there, to be overwritten */
	int			level;			/* nest level of the owning subtransaction */
	int			settled;		/* nest level at which it was; 0: open */
} Claim;

extern Claim *idempotency_add_claim(uint64 lock_hash, const text *scope,
									const text *key, const Jsonb *request,
									const Interval *ttl);
extern Claim *idempotency_find_claim(uint64 lock_hash, const text *scope,
									 const text *key);
extern void idempotency_settle_claim(Claim *claim);

/* key.c: keys */
typedef struct KeyRequest
{
	const char *function;		/* for messages */
	text	   *scope;
	text	   *key;
	Jsonb	   *request;		/* NULL: do not compare */
	Interval   *ttl;			/* NULL: idempotency.default_ttl */
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

/* an answer, as stored or to be stored; NULL where there is none */
typedef struct KeyAnswer
{
	text	   *response;
	Jsonb	   *meta;
} KeyAnswer;

/* idempotency.keys.status */
#define STATUS_COMPLETED	'c'
#define STATUS_FAILED		'f'
#define STATUS_LEASED		'l'
#define STATUS_RELEASED		'r' /* absent, but for its fence and checkpoint */

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
	Jsonb	   *request;
	int64		fence;
	TimestampTz deadline;
	int32		attempt;
	text	   *checkpoint;
	Jsonb	   *checkpoint_data;
} KeyRow;

extern void idempotency_get_identity(FunctionCallInfo fcinfo,
									 text **scope, text **key);
extern void idempotency_get_any_identity(FunctionCallInfo fcinfo,
										 text **scope, text **key);
extern void idempotency_check_key(const text *key, const char *name);
extern Datum idempotency_status_datum(KeyStatus status);
extern KeyStatus idempotency_claim_key(const KeyRequest *request,
									   KeyAnswer *answer, Claim **claim);
extern void idempotency_complete_claim(Claim *claim, KeyStatus outcome,
									   const KeyAnswer *answer);
extern bool idempotency_read_answer(text *scope, text *key,
									KeyStatus *status, KeyAnswer *answer);
extern text *idempotency_response_text(Oid type, Datum value);

extern void idempotency_check_request(const KeyRequest *request);
extern void idempotency_refuse_to_write(const char *function);
extern void idempotency_open_key(RowAccess *row, text *scope, text *key,
								 LOCKMODE lockmode);
extern KeyStatus idempotency_seize_key(RowAccess *row,
									   const KeyRequest *request,
									   TimestampTz give_up,
									   KeyAnswer *answer);
extern bool idempotency_mismatch(const Jsonb *a, const Jsonb *b);
extern void idempotency_lock_key(RowAccess *row);
extern bool idempotency_key_expired(TupleTableSlot *slot, TimestampTz now,
									uint64 *hash);
extern void idempotency_read_key(TupleTableSlot *slot, KeyRow *key);
extern void idempotency_write_key(RowAccess *row, const KeyRow *key);
extern void idempotency_take_over(KeyRow *next, const KeyRow *old,
								  TimestampTz now);
extern TimestampTz idempotency_expiry(TimestampTz from, const Interval *ttl);
extern void *idempotency_copy_value(void *value);

/* lease.c: leases */
extern void idempotency_settle_lease(text *scope, text *key,
									 KeyStatus outcome,
									 const KeyAnswer *answer,
									 const int64 *fence);
extern bool idempotency_release_lease(text *scope, text *key,
									  const int64 *fence,
									  const char *function);

/* table_info.c: callers' tables; what machines know of them is in machine.h */
extern Relation idempotency_open_users_table(Oid relid, LOCKMODE lockmode);
extern void idempotency_append_equality(StringInfo buf, const char *left,
										Oid equality, const char *right,
										Oid type);
pg_noreturn extern void idempotency_no_such_table(Oid relid);
extern void idempotency_from_json(Jsonb *object, TupleDesc columns,
								  Datum *values, bool *isnull);

/* purge.c: removing what has expired */
#define PURGEABLES 4			/* kinds of rows that expire */

typedef struct SweepPosition
{
	bool		started;
	BlockNumber next;
	BlockNumber left;			/* blocks still to be seen */
} SweepPosition;

typedef struct Sweep
{
	SweepPosition positions[PURGEABLES];
} Sweep;

extern void idempotency_begin_sweep(Sweep *sweep);
extern int64 idempotency_sweep(Sweep *sweep, int64 max,
							   BlockNumber max_blocks);
extern bool idempotency_sweep_ended(const Sweep *sweep);

/* worker.c: purging by itself */
extern void idempotency_register_launcher(void);

/* insight.c: what the views are made of */
extern double idempotency_sample(Relation rel,
								 void (*see) (TupleTableSlot *slot, void *arg),
								 void *arg);

/* outbox.c: events */
extern bool idempotency_event_acknowledged(TupleTableSlot *slot,
										   TimestampTz now, uint64 *hash);
extern bool idempotency_call_up_after(TupleTableSlot *slot, bool *keep_lock);

/* token.c: one-time tokens */
extern bool idempotency_mark_expired(TupleTableSlot *slot, TimestampTz now,
									 uint64 *hash);
extern bool idempotency_generation_expired(TupleTableSlot *slot,
										   TimestampTz now, uint64 *hash);

#endif							/* IDEMPOTENCY_H */
