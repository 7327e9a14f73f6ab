/*-------------------------------------------------------------------------
 *
 * counts.c
 *		The views of what calls came to and of the keys in hand.
 *
 *-------------------------------------------------------------------------
 */
#include "upkeep/upkeep.h"

#include "table/table.h"

#include "catalog/pg_type.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

PG_FUNCTION_INFO_V1(idempotency_activity_counts);
PG_FUNCTION_INFO_V1(idempotency_reset_activity);
PG_FUNCTION_INFO_V1(idempotency_keys_in_hand);
PG_FUNCTION_INFO_V1(idempotency_purge_round);

/* the outcomes of those that have no list of their own, as a whole */
#define NAMES(...) (const char *const[COUNTED_OUTCOMES]) {__VA_ARGS__}

/* how the counted functions and their outcomes are called in the view */
static const struct
{
	const char *name;
	const char *const *outcomes;	/* NULL: there is none of that number */
	bool		waits;			/* for rivals, by code of ours */
}			counted[COUNTED_FUNCTIONS] =

{
	[COUNT_CLAIM] = {"claim", ik_key_statuses, true},
	[COUNT_RUN] = {"run", NAMES("replayed", "completed", "failed",
								"in_progress", "held", "mismatch", "released"), true},
	[COUNT_ONCE] = {"once", ik_key_statuses, true},
	[COUNT_COMPLETE] = {"complete", NAMES("completed"), true},
	[COUNT_FAIL] = {"fail", NAMES("failed"), true},
	[COUNT_RELEASE] = {"release", NAMES("released", "not_held"), true},
	[COUNT_LOOKUP] = {"lookup", NAMES("found", "absent"), false},
	[COUNT_FORGET] = {"forget", NAMES("forgotten", "absent"), true},
	[COUNT_LEASE] = {"lease", ik_key_statuses, true},
	[COUNT_EXTEND] = {"extend", NAMES("extended", "late"), true},
	[COUNT_CHECKPOINT] = {"checkpoint", NAMES("stored"), true},
	[COUNT_ACQUIRE_LOCK] = {"acquire_lock", ik_key_statuses, true},
	[COUNT_RENEW_LOCK] = {"renew_lock", NAMES("extended", "late"), true},
	[COUNT_RELEASE_LOCK] = {"release_lock", NAMES("released", "not_held"), true},
	[COUNT_INSERT_ONCE] = {"insert_once", NAMES("created", "existing"), false},
	[COUNT_TRANSITION] = {"transition", ik_update_outcomes, false},
	[COUNT_FIRE] = {"fire", ik_update_outcomes, false},
	[COUNT_UPDATE_IF] = {"update_if", ik_update_outcomes, false},
	[COUNT_ISSUE_TOKEN] = {"issue_token", NAMES("issued"), false},
	[COUNT_CONSUME_TOKEN] = {"consume_token", ik_token_statuses, true},
	[COUNT_CHECK_TOKEN] = {"check_token", ik_token_statuses, false},
	[COUNT_REVOKE_TOKEN] = {"revoke_token", NAMES("revoked", "not_valid"), true},
	[COUNT_REVOKE_TOKENS] = {"revoke_tokens", NAMES("revoked"), true},
	[COUNT_EMIT] = {"emit", NAMES("emitted"), false},
	[COUNT_TAKE] = {"take", NAMES("taken", "empty"), false},
	[COUNT_ACK] = {"ack", NAMES("acknowledged", "superseded"), false},
	[COUNT_NACK] = {"nack", NAMES("given_back", "superseded"), false},
	[COUNT_EXTEND_EVENT] = {"extend_event", NAMES("extended", "late"), false},
	[COUNT_RETRY_EVENT] = {"retry_event", NAMES("given_back", "not_parked"), false},
	[COUNT_DISCARD_EVENT] = {"discard_event", NAMES("discarded", "not_parked"), false},
	[COUNT_RETRY_PARKED] = {"retry_parked", NAMES("given_back"), false},
	[COUNT_PURGE] = {"purge", NAMES("keys", "used_tokens",
									"token_generations", "outbox"), false},
	[COUNT_ERROR] = {"error", NAMES("wait", "IK001", "IK002", "IK003",
									"IK004", "IK005", "IK006", "IK007"), false}
};

static void put_counter(ReturnSetInfo *rsinfo, const char *function,
						const char *outcome, const int64 *calls,
						const int64 *waited, TimestampTz since);
static void put_key(const ShownKey *key, void *arg);

/*
 * activity_counts(): every counter, those that are 0 as well, or in one row
 * why there is none.
 */
Datum
idempotency_activity_counts(PG_FUNCTION_ARGS)
{
	static const Oid types[5] = {
		TEXTOID, TEXTOID, INT8OID, INTERVALOID, TIMESTAMPTZOID
	};
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	Counts		counts;
	TimestampTz since;

	InitMaterializedSRF(fcinfo, 0);
	ik_check_columns(rsinfo->setDesc, lengthof(types), types);
	if (!ik_read_counts(&counts, &since))
	{
		put_counter(rsinfo, "off", ik_shared_problem(), NULL, NULL, 0);
		return (Datum) 0;
	}
	for (int i = 0; i < COUNTED_FUNCTIONS; i++)
	{
		int64		waits = pg_atomic_read_u64(&counts.waits[i]);
		int64		waited = pg_atomic_read_u64(&counts.waited[i]);

		for (int j = 0; j < COUNTED_OUTCOMES; j++)
		{
			int64		calls = pg_atomic_read_u64(&counts.outcomes[i][j]);
			bool		wait = i == COUNT_ERROR && j == 0;

			if (counted[i].outcomes[j] != NULL)
				put_counter(rsinfo, counted[i].name, counted[i].outcomes[j],
							&calls, wait ? &waited : NULL, since);
		}
		if (counted[i].waits)
			put_counter(rsinfo, counted[i].name, "waited", &waits, &waited,
						since);
	}
	return (Datum) 0;
}

/* reset_activity(): count from 0 again.  False: nothing is counted. */
Datum
idempotency_reset_activity(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(ik_reset_counts());
}

/*
 * keys_in_hand(): the keys that transactions of this database have claimed, or
 * wait for.
 */
Datum
idempotency_keys_in_hand(PG_FUNCTION_ARGS)
{
	static const Oid types[6] = {
		INT4OID, TEXTOID, TEXTOID, INT8OID, TIMESTAMPTZOID, BOOLOID
	};
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	ik_check_columns(rsinfo->setDesc, lengthof(types), types);
	ik_each_shown_key(put_key, rsinfo);
	return (Datum) 0;
}

static void
put_key(const ShownKey *key, void *arg)
{
	ReturnSetInfo *rsinfo = arg;
	bool		nulls[6] = {0};
	Datum		values[6] = {
		Int32GetDatum(key->pid),
		PointerGetDatum(cstring_to_text_with_len(key->scope, key->scope_len)),
		PointerGetDatum(cstring_to_text_with_len(key->key, key->key_len)),
		Int64GetDatum((int64) key->lock_hash),
		TimestampTzGetDatum(key->since),
		BoolGetDatum(key->waiting)
	};

	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/*
 * purge_round(): the rounds of this database's workers, and the last one; no
 * row: nothing is kept.
 */
Datum
idempotency_purge_round(PG_FUNCTION_ARGS)
{
	static const Oid types[6] = {
		INT8OID, TIMESTAMPTZOID, TIMESTAMPTZOID, TEXTOID, INT8OID, TEXTOID
	};
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	WorkerRounds last;

	InitMaterializedSRF(fcinfo, 0);
	ik_check_columns(rsinfo->setDesc, lengthof(types), types);
	if (ik_read_rounds(&last))
	{
		bool		nulls[6] = {
			false, last.started == 0, last.ended == 0, last.ended == 0,
			last.started == 0, last.error[0] == '\0'
		};
		Datum		values[6] = {
			Int64GetDatum(last.rounds),
			TimestampTzGetDatum(last.started),
			TimestampTzGetDatum(last.ended),
			CStringGetTextDatum(last.outcome),
			Int64GetDatum(last.rows),
			CStringGetTextDatum(last.error)
		};

		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	return (Datum) 0;
}

/* A row of the view; calls and waited may be NULL. */
static void
put_counter(ReturnSetInfo *rsinfo, const char *function, const char *outcome,
			const int64 *calls, const int64 *waited, TimestampTz since)
{
	Interval	wait_time = {.time = waited ? *waited : 0};
	bool		nulls[5] = {false, false, calls == NULL, waited == NULL, since == 0};
	Datum		values[5] = {
		CStringGetTextDatum(function),
		CStringGetTextDatum(outcome),
		Int64GetDatum(calls ? *calls : 0),
		IntervalPGetDatum(&wait_time),
		TimestampTzGetDatum(since)
	};

	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}
