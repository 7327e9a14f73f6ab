/*-------------------------------------------------------------------------
 *
 * signing_key.c
 *		What tokens are signed with.
 *
 * Each backend has the signing keys cached, as long as no invalidation of
 * their table comes in; a trigger on the table sends one at each change.
 *
 * A token is for one database, although its key may come to be in several: a
 * role of a copy could otherwise make tokens that the original accepts, and a
 * token be used once in each.  So a key has the name of the database that it
 * was made in, which goes into the signature: the system's identifier and the
 * database's OID.  It also has the OID of the database whose SQL wrote its row
 * (kept_in, a generated column: a dump leaves it out, a restore fills it in).
 * What that means for
 *
 *		CREATE DATABASE ... TEMPLATE, also from template1: the rows were copied
 *		as files, and say that they are kept elsewhere.  From then on their
 *		keys sign and verify for the copy: neither knows the other's tokens.
 *
 *		a restored dump, and a subscriber to the table: the rows were written
 *		here, and their keys verify what the original issued.  They do not
 *		sign as long as there is a key of this database, and CREATE EXTENSION
 *		makes one; so tokens that are issued here are unknown there.
 *
 *		pg_upgrade, which keeps the OID and changes the system's identifier:
 *		the rows say that they are kept here, so all goes on as before.
 *
 *		a standby, promoted or not, ALTER DATABASE ... RENAME: the same
 *		database.
 *
 *		any other copy of the files: cannot be told from a standby.  There
 *		rotate_token_key(retire => true) makes it another one.
 *
 *		a cluster of Citus, where each node has a copy of the rows: they were
 *		written there, too, so their keys are for the database that they were
 *		made in, on every node, and the newest signs.
 *
 * On such a cluster a rotation is committed at one node after the other, and
 * the last may come late, if it was down.  So a key verifies as soon as it is
 * here, committed or not: a token of it shows that it is committed elsewhere.
 * And who consumes a token waits for a transaction that is removing its key.
 *
 *-------------------------------------------------------------------------
 */
#include "token/token.h"

#include "access/table.h"
#include "access/tableam.h"
#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "port/pg_bswap.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

/* all of them, as of a count of changes to their table */
static SigningKey *keys = NULL;
static int	nkeys = 0;
static bool loaded = false;
static uint64 loaded_changes;
static MemoryContext keys_context = NULL;

PG_FUNCTION_INFO_V1(idempotency_rotate_token_key);
PG_FUNCTION_INFO_V1(idempotency_this_database);

static TimestampTz rotate_everywhere(Datum *values, bool retire);
static void rotate_keys(Relation rel, TimestampTz now, bool retire);
static const SigningKey *find_key(int64 id);
static bool is_better(const SigningKey *a, const SigningKey *b);
static void load_keys(void);
static bool read_key(TupleTableSlot *slot, SigningKey *key);

/*
 * rotate_token_key(retire): from now on sign with a new key.  The old ones
 * still verify until every token that they signed is stale; with retire they
 * are removed.  The install script makes the first key so.  Says until when
 * tokens of the old keys can be valid.
 */
Datum
idempotency_rotate_token_key(PG_FUNCTION_ARGS)
{
	RowAccess	row;
	TimestampTz now;
	int64		id;
	bytea	   *secret = palloc(VARHDRSZ + SIGNING_SECRET_SIZE);
	Datum		values[TOKEN_KEYS_NATTS] = {0};
	bool		nulls[TOKEN_KEYS_NATTS] = {[TOKEN_KEYS_ROTATED_AT] = true};

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("retire must not be null"),
				 errhint("Give true if a token key was disclosed, else leave it out.")));
	ik_refuse_to_write("idempotency.rotate_token_key()");
	ik_random_bytes(&id, sizeof(id));
	ik_random_bytes(VARDATA(secret), SIGNING_SECRET_SIZE);
	SET_VARSIZE(secret, VARHDRSZ + SIGNING_SECRET_SIZE);
	values[TOKEN_KEYS_ID] = Int64GetDatum(id);
	values[TOKEN_KEYS_SECRET] = PointerGetDatum(secret);
	values[TOKEN_KEYS_SYSTEM] = Int64GetDatum((int64) GetSystemIdentifier());
	values[TOKEN_KEYS_DATABASE] = ObjectIdGetDatum(MyDatabaseId);
	values[TOKEN_KEYS_KEPT_IN] = ObjectIdGetDatum(MyDatabaseId);
	if (ik_is_spread(&ik_token_keys))
		now = rotate_everywhere(values, PG_GETARG_BOOL(0));
	else
	{
		/* one rotation at a time; a session that reads them is not held up */
		ik_open_row(&row, &ik_token_keys, Int64GetDatum(id),
					(Datum) 0, 0, ShareRowExclusiveLock);
		now = GetCurrentTimestamp();
		rotate_keys(row.rel, now, PG_GETARG_BOOL(0));

		/* past SQL, whose parameters other extensions may log */
		values[TOKEN_KEYS_CREATED_AT] = TimestampTzGetDatum(now);
		ik_insert_row(&row, values, nulls);
		CacheInvalidateRelcache(row.rel);
		ik_close_row(&row);
	}
	PG_RETURN_TIMESTAMPTZ(PG_GETARG_BOOL(0) ? now : now + ik_token_max_ttl * USECS_PER_SEC);
}

/*
 * The same on every node of a cluster of Citus, in SQL.  Says when it was.
 */
static TimestampTz
rotate_everywhere(Datum *values, bool retire)
{
	/* the row's columns; nothing is said of rotated_at */
	Oid			types[] = {INT8OID, TIMESTAMPTZOID, TIMESTAMPTZOID, BYTEAOID, INT8OID, OIDOID};
	Relation	rel = table_open(ik_own_relation("token_keys"), AccessShareLock);
	TimestampTz now;

	/* one rotation at a time, on all nodes together */
	(void) ik_execute_as_owner(rel,
							   "LOCK TABLE idempotency.token_keys IN SHARE ROW EXCLUSIVE MODE",
							   0, NULL, NULL, NULL);
	now = GetCurrentTimestamp();
	rotate_keys(rel, now, retire);
	values[TOKEN_KEYS_CREATED_AT] = TimestampTzGetDatum(now);
	(void) ik_execute_as_owner(rel,
							   "INSERT INTO idempotency.token_keys"
							   " (id, created_at, secret, system, database)"
							   " VALUES ($1, $2, $4, $5, $6)",
							   lengthof(types), types, values, NULL);
	table_close(rel, NoLock);
	return now;
}

/*
 * How long after its issue can a token still tell whether it was used, in
 * microseconds?  So long after a rotation the old key has nothing to verify
 * that is not stale, and so long after a revocation the generation has
 * nothing to revoke.
 */
int64
ik_token_lifetime(void)
{
	return (ik_token_max_ttl + (int64) ik_token_retention) * USECS_PER_SEC;
}

/* The OID of this database: what fills token_keys.kept_in. */
Datum
idempotency_this_database(PG_FUNCTION_ARGS)
{
	PG_RETURN_OID(MyDatabaseId);
}

/* The key to sign with: the best that was not rotated. */
const SigningKey *
ik_newest_signing_key(void)
{
	const SigningKey *best = NULL;

	load_keys();
	for (int i = 0; i < nkeys; i++)
	{
		if (keys[i].committed && TIMESTAMP_IS_NOEND(keys[i].rotated_at) &&
			(best == NULL || is_better(&keys[i], best)))
			best = &keys[i];
	}
	if (best == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("there is no token key to sign with"),
				 errhint("Call idempotency.rotate_token_key().")));
	return best;
}

/*
 * Of two keys that could sign: one of this database, even if the clocks were off
 * when they were made, else the newer one.
 */
static bool
is_better(const SigningKey *a, const SigningKey *b)
{
	if (a->ours != b->ours)
		return a->ours;
	return a->created_at > b->created_at;
}

/* The key of this id, if it still verifies, or NULL. */
const SigningKey *
ik_find_signing_key(int64 id)
{
	const SigningKey *key;

	load_keys();
	key = find_key(id);
	if (key != NULL && !TIMESTAMP_IS_NOEND(key->rotated_at) &&
		key->rotated_at <= GetCurrentTimestamp() - ik_token_lifetime())
		return NULL;
	return key;
}

/* Whose open transaction is removing the key that was just found? */
TransactionId
ik_rival_of_signing_key(int64 id)
{
	const SigningKey *key = find_key(id);

	return key == NULL ? InvalidTransactionId : key->rival;
}

/* Of two versions of a key, the one that is being written. */
static const SigningKey *
find_key(int64 id)
{
	const SigningKey *found = NULL;

	for (int i = 0; i < nkeys; i++)
	{
		if (keys[i].id == id && (found == NULL || !keys[i].committed))
			found = &keys[i];
	}
	return found;
}

/*
 * Read the keys, unless they are cached.  A change is in effect as soon
 * as it is committed, also for a transaction that began before; so the
 * snapshot is the latest, and invalidations are taken in even if our locks
 * would not make us.  A copy on a cluster has no trigger that sends one, and so
 * is read each time, with what is being written and removed.
 */
static void
load_keys(void)
{
	OwnTable   *table;
	Relation	rel;
	Snapshot	snapshot;
	SnapshotData dirty;
	TableScanDesc scan;
	TupleTableSlot *slot;
	int			size = 0;

	AcceptInvalidationMessages();
	if (loaded &&
		loaded_changes == ik_table_changes(&ik_token_keys))
		return;
	table = ik_part_of(&ik_token_keys, (Datum) 0);

	/* an error on the way leaves none, and the next call reads again */
	loaded = false;
	nkeys = 0;
	if (keys_context == NULL)
		keys_context = AllocSetContextCreate(TopMemoryContext,
											 "idempotency signing keys",
											 ALLOCSET_SMALL_SIZES);
	MemoryContextReset(keys_context);

	/* SnapshotAny and a check of our own, since that takes no predicate lock */
	rel = ik_open_table(table, AccessShareLock);
	/* counted before the rows are read: a change that comes meanwhile shows */
	loaded_changes = ik_table_changes(&ik_token_keys);
	InitDirtySnapshot(dirty);
	snapshot = table->shard != 0 ? &dirty : RegisterSnapshot(ik_latest_snapshot());
	slot = table_slot_create(rel, NULL);
	scan = table_beginscan_strat(rel, SnapshotAny, 0, NULL, true, false);
	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
	{
		if (!table_tuple_satisfies_snapshot(rel, slot, snapshot))
			continue;
		if (nkeys == size)
		{
			size = size * 2 + 4;
			keys = size == 4 ?
				MemoryContextAlloc(keys_context, size * sizeof(SigningKey)) :
				repalloc(keys, size * sizeof(SigningKey));
		}
		/* a row that holds no key of our size neither signs nor verifies */
		if (!read_key(slot, &keys[nkeys]))
			continue;
		keys[nkeys].committed = true;
		keys[nkeys].rival = InvalidTransactionId;
		if (table->shard != 0)
		{
			keys[nkeys].ours = true;
			keys[nkeys].committed = !TransactionIdIsValid(dirty.xmin);
			keys[nkeys].rival = dirty.xmax;
		}
		nkeys++;
	}
	table_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	if (table->shard == 0)
		UnregisterSnapshot(snapshot);
	table_close(rel, NoLock);
	loaded = table->shard == 0;
}

/* A row as a key; false: it is none. */
static bool
read_key(TupleTableSlot *slot, SigningKey *key)
{
	bytea	   *secret;
	uint64		system = GetSystemIdentifier();
	uint32		database = MyDatabaseId;

	slot_getsomeattrs(slot, TOKEN_KEYS_NATTS);
	secret = DatumGetByteaPP(slot->tts_values[TOKEN_KEYS_SECRET]);
	if (VARSIZE_ANY_EXHDR(secret) != sizeof(key->secret))
		return false;
	memcpy(key->secret, VARDATA_ANY(secret), sizeof(key->secret));
	key->id = DatumGetInt64(slot->tts_values[TOKEN_KEYS_ID]);
	key->created_at = DatumGetTimestampTz(slot->tts_values[TOKEN_KEYS_CREATED_AT]);
	key->rotated_at = slot->tts_isnull[TOKEN_KEYS_ROTATED_AT] ? DT_NOEND :
		DatumGetTimestampTz(slot->tts_values[TOKEN_KEYS_ROTATED_AT]);

	/* whose is it?  The cases at the top of this file. */
	if (DatumGetObjectId(slot->tts_values[TOKEN_KEYS_KEPT_IN]) == MyDatabaseId)
	{
		system = DatumGetInt64(slot->tts_values[TOKEN_KEYS_SYSTEM]);
		database = DatumGetObjectId(slot->tts_values[TOKEN_KEYS_DATABASE]);
	}
	key->ours = system == GetSystemIdentifier() && database == MyDatabaseId;
	system = pg_hton64(system);
	database = pg_hton32(database);
	memcpy(key->database, &system, sizeof(system));
	memcpy(key->database + sizeof(system), &database, sizeof(database));
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
	Oid			types[] = {BOOLOID, TIMESTAMPTZOID, TIMESTAMPTZOID};
	Datum		values[] = {
		BoolGetDatum(retire),
		TimestampTzGetDatum(now),
		TimestampTzGetDatum(now - ik_token_lifetime())
	};
	static const char *const commands[] = {
		"DELETE FROM idempotency.token_keys"
		" WHERE $1 OR rotated_at OPERATOR(pg_catalog.<=) $3",
		"UPDATE idempotency.token_keys SET rotated_at = $2"
		" WHERE rotated_at IS NULL"
	};

	for (int i = 0; i < lengthof(commands); i++)
		(void) ik_execute_as_owner(rel, commands[i], lengthof(types), types,
								   values, NULL);
}

void
ik_random_bytes(void *buffer, int len)
{
	if (!pg_strong_random(buffer, len))
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not generate random values")));
}
