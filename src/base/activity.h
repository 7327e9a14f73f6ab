/*-------------------------------------------------------------------------
 *
 * activity.h
 *		What calls came to, counted, and which keys a backend has in hand.
 *
 * Each backend counts in a share of its own (shared.c), so no two backends
 * ever meet: a count is one addition to memory that nobody else writes, it
 * shows at once, and it stays when the transaction rolls back.  Readers add
 * the backends up; a backend that ends adds what it counted to its database's.
 * Without shared memory it goes nowhere, at the same price.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IK_ACTIVITY_H
#define IK_ACTIVITY_H

#include "datatype/timestamp.h"
#include "port/atomics.h"

/* the functions whose outcomes are counted; insight.c has the names */
typedef enum CountedFunction
{
	COUNT_CLAIM,
	COUNT_RUN,
	COUNT_ONCE,
	COUNT_COMPLETE,
	COUNT_FAIL,
	COUNT_RELEASE,
	COUNT_LOOKUP,
	COUNT_FORGET,
	COUNT_LEASE,
	COUNT_EXTEND,
	COUNT_CHECKPOINT,
	COUNT_ACQUIRE_LOCK,
	COUNT_RENEW_LOCK,
	COUNT_RELEASE_LOCK,
	COUNT_INSERT_ONCE,
	COUNT_TRANSITION,
	COUNT_FIRE,
	COUNT_UPDATE_IF,
	COUNT_ISSUE_TOKEN,
	COUNT_CONSUME_TOKEN,
	COUNT_CHECK_TOKEN,
	COUNT_REVOKE_TOKEN,
	COUNT_REVOKE_TOKENS,
	COUNT_EMIT,
	COUNT_TAKE,
	COUNT_ACK,
	COUNT_NACK,
	COUNT_EXTEND_EVENT,
	COUNT_RETRY_EVENT,
	COUNT_DISCARD_EVENT,
	COUNT_RETRY_PARKED,
	COUNT_PURGE,
	COUNT_ERROR,				/* IK001 to IK007, and waits that failed */
	COUNTED_FUNCTIONS
} CountedFunction;

/* outcomes of one function, at the most */
#define COUNTED_OUTCOMES 8

/* where a function has two: it did what it is for, or it did not */
#define COUNT_DONE		0
#define COUNT_NOT_DONE	1

typedef struct Counts
{
	pg_atomic_uint64 outcomes[COUNTED_FUNCTIONS][COUNTED_OUTCOMES];
	pg_atomic_uint64 waits[COUNTED_FUNCTIONS];	/* calls that waited */
	pg_atomic_uint64 waited[COUNTED_FUNCTIONS]; /* for how long, in us */
} Counts;

/* this backend's; before the first call, and without memory, nobody's */
extern Counts *ik_counts;
extern bool ik_counting;
extern TimestampTz ik_waited;

extern void ik_begin_counting(void);
extern void ik_count_wait(CountedFunction function);
extern int	ik_counted_error(int number);

/* Have what comes counted where others see it, if there is memory. */
static inline void
ik_start_counting(void)
{
	if (unlikely(!ik_counting))
		ik_begin_counting();
}

/*
 * To be called where a call is sure to succeed, or to count an outcome n
 * times.  Only this backend writes the counter, so it takes no atomic addition.
 */
static inline void
ik_count_many(CountedFunction function, int outcome, uint64 n)
{
	pg_atomic_uint64 *counter;

	ik_start_counting();
	counter = &ik_counts->outcomes[function][outcome];
	pg_atomic_write_u64(counter, pg_atomic_read_u64(counter) + n);
	if (unlikely(ik_waited >= 0))
		ik_count_wait(function);
}

static inline void
ik_count(CountedFunction function, int outcome)
{
	ik_count_many(function, outcome, 1);
}

/* the keys that this backend has in hand */
extern void ik_show_key(uint64 lock_hash, const text *scope,
						const text *key, TimestampTz since);
extern void ik_hide_key(uint64 lock_hash);
extern void ik_begin_wait(uint64 lock_hash, const text *scope,
						  const text *key);
extern void ik_end_wait(void);

/* a key in hand, as a reader sees it */
typedef struct ShownKey
{
	int			pid;
	uint64		lock_hash;
	TimestampTz since;
	bool		waiting;		/* for its holder; else it is the holder */
	int			scope_len;
	int			key_len;
	const char *scope;
	const char *key;
} ShownKey;

extern void ik_each_shown_key(void (*see) (const ShownKey *key, void *arg),
							  void *arg);

/* the workers that purge this database */
typedef struct WorkerRounds
{
	int64		rounds;
	TimestampTz started;		/* the last one; 0: none */
	TimestampTz ended;			/* 0: it is under way */
	int64		rows;			/* that it removed */
	char		outcome[16];
	char		error[256];
} WorkerRounds;

extern bool ik_read_rounds(WorkerRounds *rounds);
extern void ik_write_rounds(const WorkerRounds *rounds);

/* readers' */
extern bool ik_read_counts(Counts *counts, TimestampTz *since);
extern bool ik_reset_counts(void);

#endif							/* IK_ACTIVITY_H */
