/*-------------------------------------------------------------------------
 *
 * base.h
 *		The ground floor: settings, arguments and results of calls, time.
 *
 * What is here knows nothing of keys, tokens, machines or events.  Symbols of
 * our own begin with ik_; those that SQL calls begin with idempotency_.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IK_BASE_H
#define IK_BASE_H

#include "postgres.h"

#include "access/tupdesc.h"
#include "datatype/timestamp.h"
#include "fmgr.h"
#include "utils/relcache.h"

#include "base/activity.h"
#include "base/compat.h"
#include "base/errors.h"

/* settings.c */
#ifdef IK_COLLISIONS
extern int	ik_debug_hash_bits;
#endif
extern int	ik_default_ttl;		/* seconds */
extern int	ik_default_wait;	/* milliseconds; -1: endless */
extern bool ik_log_purge;
extern int	ik_max_lease;		/* seconds */
extern int	ik_max_ttl;			/* seconds */
extern int	ik_outbox_max_attempts;
extern char *ik_purge_databases;
extern int	ik_purge_interval;	/* seconds */
extern int	ik_token_max_ttl;	/* seconds */
extern int	ik_token_retention; /* seconds */

extern void ik_define_settings(void);
extern void ik_set_for_now(const char *name, const char *value);

/* call.c: arguments and results */
extern Datum ik_result(FunctionCallInfo fcinfo, int natts, const Oid *types,
					   Datum *values, bool *nulls);
extern void ik_check_columns(TupleDesc desc, int natts, const Oid *types);
extern void ik_check_rows(TupleDesc desc, Relation rel);
extern Oid	ik_argument_type(FunctionCallInfo fcinfo, int argument);
extern Datum ik_constant_text(text **made, const char *constant);
pg_noreturn extern void ik_refuse_text(const text *value, Size limit,
									   const char *name, const char *hint);
extern int32 ik_max_argument(FunctionCallInfo fcinfo, int argument);
extern void ik_not_null(FunctionCallInfo fcinfo, int argument,
						const char *name);
extern int	ik_array_argument(FunctionCallInfo fcinfo, int argument,
							  const char *name, Oid type, bool nulls_allowed,
							  Datum **elements, bool **nulls);
extern void ik_refuse_to_write(const char *function);
extern text *ik_response_text(Oid type, Datum value);
extern char *ik_to_string(Oid type, Datum value);

/*
 * A text that names something: 22004 if NULL, 22023 if empty or longer than
 * limit bytes.  The hint says what it is for.
 */
static inline void
ik_check_text(const text *value, Size limit, const char *name,
			  const char *hint)
{
	if (unlikely(value == NULL || VARSIZE_ANY_EXHDR(value) == 0 ||
				 VARSIZE_ANY_EXHDR(value) > limit))
		ik_refuse_text(value, limit, name, hint);
}

/* shared.c: shared memory; NULL where the server has none for us */
#define IK_BACKEND_BYTES 5120	/* of one backend */

extern void ik_request_shared_memory(void);
extern void *ik_shared_area(const char *name, Size size,
							void (*init) (void *area));
extern void *ik_shared_backend(int number);
extern const char *ik_shared_problem(void);

/* subxact.c: something that may fail */
extern ErrorData *ik_try(void (*something) (void *arg), void *arg);
extern bool ik_wait(TimestampTz give_up, void (*wait) (void *arg), void *arg);

/* siphash.c: a hash under a secret key */
extern void ik_siphash(const uint8 *key, const void *data, Size len,
					   uint8 *hash, Size size);

/* time.c: the one judgement of every interval */
extern TimestampTz ik_after(TimestampTz from, const Interval *interval,
							bool zero_allowed, const char *name,
							const char *hint);
extern int64 ik_duration(const Interval *interval, bool zero_allowed,
						 const char *name, const char *hint);
extern TimestampTz ik_finite_after(TimestampTz from, const Interval *interval,
								   const char *name);
extern TimestampTz ik_give_up_at(const Interval *wait);

#endif							/* IK_BASE_H */
