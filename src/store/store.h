/*-------------------------------------------------------------------------
 *
 * store.h
 *		Our own tables: what is in them, and how rows are read and written.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IK_STORE_H
#define IK_STORE_H

#include "base/base.h"

#include "access/genam.h"
#include "access/tableam.h"
#include "executor/tuptable.h"
#include "nodes/nodes.h"
#include "nodes/pg_list.h"
#include "storage/block.h"
#include "storage/lockdefs.h"
#include "utils/rel.h"
#include "utils/snapshot.h"
#include "utils/uuid.h"

/*
 * The columns of our tables, from 0; tables.c has their names and types.
 */

/* idempotency.keys */
enum
{
	KEYS_CREATED_AT,
	KEYS_EXPIRES_AT,
	KEYS_STATUS,
	KEYS_KEY,
	KEYS_SCOPE,
	KEYS_RESPONSE,
	KEYS_META,
	KEYS_FINGERPRINT,
	KEYS_FENCE,
	KEYS_DEADLINE,
	KEYS_ATTEMPT,
	KEYS_CHECKPOINT,
	KEYS_CHECKPOINT_DATA,
	KEYS_NATTS
};

/* idempotency.keys.status */
#define STATUS_COMPLETED	'c'
#define STATUS_FAILED		'f'
#define STATUS_LEASED		'l'
#define STATUS_RELEASED		'r' /* absent, but for its fence and checkpoint */

/* idempotency.token_keys */
enum
{
	TOKEN_KEYS_ID,
	TOKEN_KEYS_CREATED_AT,
	TOKEN_KEYS_ROTATED_AT,
	TOKEN_KEYS_SECRET,
	TOKEN_KEYS_SYSTEM,
	TOKEN_KEYS_DATABASE,
	TOKEN_KEYS_KEPT_IN,
	TOKEN_KEYS_NATTS
};

/* idempotency.used_tokens */
enum
{
	USED_TOKENS_EXPIRES_AT,
	USED_TOKENS_MARKED_AT,
	USED_TOKENS_ID,
	USED_TOKENS_REVOKED,
	USED_TOKENS_NATTS
};

/* idempotency.token_generations */
enum
{
	GENERATIONS_GENERATION,
	GENERATIONS_RAISED_AT,
	GENERATIONS_SUBJECT,
	GENERATIONS_PURPOSE,
	GENERATIONS_NATTS
};

/* idempotency.outbox */
enum
{
	OUTBOX_ID,
	OUTBOX_PLACE,
	OUTBOX_DUE,
	OUTBOX_EMITTED_AT,
	OUTBOX_PARKED_AT,
	OUTBOX_ATTEMPT,
	OUTBOX_TRIES,
	OUTBOX_STATE,
	OUTBOX_TOPIC,
	OUTBOX_KEY,
	OUTBOX_PAYLOAD,
	OUTBOX_ERROR,
	OUTBOX_NATTS
};

/* idempotency.outbox.state */
#define EVENT_READY		'r'		/* to be handed out, or out under a lease */
#define EVENT_LAPSED	'l'		/* ready again, since its lease ran out */
#define EVENT_PARKED	'p'		/* failed too often */
#define EVENT_BLOCKING	'b'		/* the same, and its ordering key waits */

/* idempotency.outbox_leases */
enum
{
	LEASES_BLOCK,
	LEASES_TAKEN,
	LEASES_DEADLINE,
	LEASES_EVENTS,
	LEASES_TOPIC,
	LEASES_NATTS
};

/* idempotency.outbox_keys */
enum
{
	OUTBOX_KEYS_TAKEN,
	OUTBOX_KEYS_ID,
	OUTBOX_KEYS_TOPIC,
	OUTBOX_KEYS_KEY,
	OUTBOX_KEYS_NATTS
};

/* idempotency.outbox_topics, which SQL writes */
enum
{
	TOPICS_TOPIC,
	TOPICS_MAX_ATTEMPTS,
	TOPICS_PARKED_BLOCKS,
	TOPICS_NATTS
};

/* idempotency.secrets */
enum
{
	SECRETS_ID,
	SECRETS_CREATED_AT,
	SECRETS_SECRET,
	SECRETS_NATTS
};

/* idempotency.machines, which SQL writes */
enum
{
	MACHINES_NAME,
	MACHINES_DEFINITION
};

/* one column that the code relies on */
typedef struct OwnColumn
{
	const char *name;
	Oid			type;
} OwnColumn;

/* the indexes that we read; every table has the first */
enum
{
	PRIMARY_KEY,
	KEYS_LEASED = 1,			/* (deadline), of the leases */
	OUTBOX_BY_DUE = 1,			/* (topic, due, place) */
	OUTBOX_BY_KEY = 2,			/* (key, topic, id), of events with a key
								 * that are not parked, or block it */
	LEASES_BY_DEADLINE = 1,		/* (topic, deadline) */
	MAX_OWN_INDEXES = 3
};

/* one index that the code reads: a plain btree, ascending */
typedef struct OwnIndex
{
	bool		unique;
	int			nkeys;			/* of a primary key at most 2 */
	int			key[4];			/* columns, from 0 */
	bool		(*predicate) (Node *clause);	/* NULL: of all rows */
	int			nclauses;		/* of the predicate, all of which it knows */
	/* of a partial one, for OwnRows: is the row in it? */
	bool		(*covers) (const Datum *values, const bool *nulls);
} OwnIndex;

/* where its rows are if Citus spreads the database over nodes */
typedef enum OwnPlace
{
	PLACE_ONE_SERVER,			/* it is refused there */
	PLACE_EACH_NODE,			/* each node has its own */
	PLACE_OF_KEYS,				/* these and below: spread as citus.c says */
	PLACE_OF_MARKS,
	PLACE_OF_GENERATIONS,
	PLACE_OF_SIGNING_KEYS
} OwnPlace;

/* one of our tables */
typedef struct OwnTable
{
	const char *name;
	const OwnColumn *columns;
	int			natts;
	const OwnIndex *indexes;	/* the primary key's first */
	int			nindexes;
	RegProcedure equal[2];		/* equality of the primary key's columns */
	bool		(*in_partial) (const Datum *values);	/* is the row in others? */
	bool		named;			/* may operators see which key is waited for? */
	OwnPlace	place;			/* on a cluster of Citus */
	int			home_key;		/* of a row's key, the column whose value says
								 * on which node the row is */
	bool		watched;		/* each change sends a relcache invalidation,
								 * by a trigger of ours if SQL makes it */

	/* found at first use, until a relcache invalidation */
	bool		valid;
	Oid			relid;
	Oid			found[MAX_OWN_INDEXES]; /* as indexes */
	bool		other_indexes;	/* has somebody added one? */
	uint64		changes;		/* such invalidations */
	bool		unheard;		/* watched, but not announced */

	/* how far purge has come, from call to call: only a hint */
	struct
	{
		bool		started;
		BlockNumber next;
		BlockNumber left;		/* blocks still to be seen */
	}			sweep;

	int64		shard;			/* of Citus; 0: the table itself */
	struct OwnTable *next;		/* shard that this backend knows of */
} OwnTable;

/* tables.c: whether our tables are as the install script made them */
extern OwnTable ik_keys;
extern OwnTable ik_outbox;
extern OwnTable ik_outbox_leases;
extern OwnTable ik_outbox_keys;
extern OwnTable ik_outbox_topics;
extern OwnTable ik_token_keys;
extern OwnTable ik_used_tokens;
extern OwnTable ik_token_generations;
extern OwnTable ik_secrets;

extern OwnTable *ik_keys_of(const text *scope);
extern OwnTable *ik_part_of(OwnTable *table, Datum home);
extern List *ik_tables_here(OwnTable *table);
extern Relation ik_open_table(OwnTable *table, LOCKMODE lockmode);
extern Oid	ik_own_index(OwnTable *table, int which);
extern uint64 ik_table_changes(OwnTable *table);
extern bool ik_is_announced(Relation rel);

/* own.c: which objects are ours, and in whose name their tables are written */
extern Oid	ik_own_relation(const char *name);
extern Oid	ik_trigger_function(const char *name);
extern bool ik_is_ours(Oid class, Oid object);

/* who called, while we are the owner of a table */
typedef struct SavedUser
{
	Oid			user;
	int			context;
	int			nest;			/* of the settings */
} SavedUser;

extern void ik_become_owner(Relation rel, int context, SavedUser *saved);
extern void ik_become_caller(const SavedUser *saved);
extern uint64 ik_execute_as_owner(Relation rel, const char *command, int nargs,
								  Oid *types, Datum *values, Datum *returned);

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
	LOCKMODE	lockmode;		/* on the table and the index */
	RowState	state;			/* what the last look found */
	TransactionId rival;		/* who is in the way, after ROW_RIVAL */
	uint64		lock_hash;
	bool		locked;			/* do we hold the lock? */
} RowAccess;

/* citus.c: where rows live on a cluster, and how calls get there */
extern void ik_watch_cluster(void (*changed) (void));
extern void ik_check_place(const OwnTable *table);
extern bool ik_is_alone(void);
extern bool ik_is_distributed(void);
extern bool ik_is_colocated(void);
extern bool ik_is_away(const text *scope);
extern int64 ik_shard_of(const OwnTable *table, Datum home);
extern int64 *ik_shards_here(const OwnTable *table, int *n);
extern bool ik_is_spread(const OwnTable *table);
extern void ik_reach_new_nodes(void);
extern Oid	ik_whole_of(Oid relid);
extern bool ik_hold_home(RowAccess *row, TimestampTz give_up);
extern bool ik_send_home(FunctionCallInfo fcinfo, const text *scope,
						 Datum *result);
extern bool ik_send_token_home(FunctionCallInfo fcinfo, const pg_uuid_t *id,
							   Datum *result);
extern text **ik_send(const text *scope, const char *call, text **arguments,
					  int narguments, int nresults);
extern int	ik_plain_modes(void);
extern Datum ik_from_text(Oid type, const text *value);

/* row.c: one row, read and written without SQL */
extern void ik_open_row(RowAccess *row, OwnTable *table,
						Datum key1, Datum key2, uint64 lock_hash,
						LOCKMODE lockmode);
extern void ik_close_row(RowAccess *row);
extern RowState ik_try_row(RowAccess *row);
extern RowState ik_look_at_row(RowAccess *row);
extern bool ik_wait_for_row(RowAccess *row, TimestampTz give_up);
extern void ik_lock_row(RowAccess *row);
extern void ik_unlock_row(RowAccess *row);
extern bool ik_read_row(RowAccess *row);
extern TransactionId ik_row_writer(RowAccess *row);
extern bool ik_read_newest_row(RowAccess *row);
extern bool ik_row_is_ours(RowAccess *row);
extern void ik_check_row_visible(RowAccess *row);
extern void ik_insert_row(RowAccess *row, Datum *values, bool *nulls);
extern void ik_update_row(RowAccess *row, Datum *values, bool *nulls);
extern void ik_delete_row(RowAccess *row);
extern bool ik_index_by_executor(Relation rel, TupleTableSlot *slot,
								 bool update, TU_UpdateIndexes update_indexes);
extern void *ik_copy_value(const void *value);
extern bool ik_delete_tuple(Relation rel, TupleTableSlot *slot, bool wait);

/* many rows of a table of ours, found by any index that we read */
typedef struct OwnRows
{
	OwnTable   *table;
	Relation	rel;
	Relation	indexes[MAX_OWN_INDEXES];	/* as the table's */
	LOCKMODE	lockmode;		/* on all of them */
	TupleTableSlot *next;		/* the row to be written */
	TupleTableSlot *locked;		/* what ik_lock_found_row() read */
	struct IndexInfo *index_info;
} OwnRows;

/* rows.c */
extern void ik_open_rows(OwnRows *rows, OwnTable *table, LOCKMODE lockmode);
extern void ik_close_rows(OwnRows *rows);
extern IndexScanDesc ik_scan_rows(OwnRows *rows, int which, Snapshot snapshot,
								  ScanKey keys, int nkeys);
extern TupleTableSlot *ik_next_version(OwnRows *rows, TupleTableSlot *found);
extern bool ik_add_row(OwnRows *rows);
extern bool ik_lock_found_row(OwnRows *rows, TupleTableSlot *found, bool wait);
extern bool ik_update_found_row(OwnRows *rows, TupleTableSlot *found);
extern bool ik_delete_found_row(OwnRows *rows, ItemPointer tid, bool wait);

/* lock.c: the lock of a key, and waiting for rivals */
extern uint64 ik_lock_hash(const text *scope, const text *key);
extern bool ik_try_lock(uint64 hash);
extern void ik_unlock(uint64 hash);
extern bool ik_wait_for_lock(uint64 hash, TimestampTz give_up);
extern bool ik_wait_for_xact(TransactionId xid, TimestampTz give_up);

/* secret.c: what we hash under */
typedef struct Secret
{
	int32		id;
	TimestampTz created_at;
	uint8		for_locks[16];
	uint8		for_requests[16];
} Secret;

extern const Secret *ik_newest_secret(void);
extern const Secret *ik_find_secret(int32 id);

/* sample.c: a table as a whole */
extern Snapshot ik_latest_snapshot(void);
extern void ik_each_row(Relation rel,
						void (*see) (TupleTableSlot *slot, void *arg),
						void *arg);
extern double ik_sample(Relation rel,
						void (*see) (TupleTableSlot *slot, void *arg),
						void *arg);

/* one kind of row that expires: what a service tells purge */
typedef struct Purgeable
{
	OwnTable   *table;
	/* has the row in the slot expired? then also the hash of its lock */
	bool		(*expired) (TupleTableSlot *slot, TimestampTz now, uint64 *hash);

	/* under that lock, may it really go?  NULL: it may */
	bool		(*may_go) (TupleTableSlot *slot);
} Purgeable;

#endif							/* IK_STORE_H */
