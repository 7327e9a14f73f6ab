/*-------------------------------------------------------------------------
 *
 * time.c
 *		Intervals that callers give: a ttl, a lease, a wait, a delay.
 *
 * Each is judged by the moment that it leads to, so that '1 mon -31 days' is
 * the same to all of them.  Days have 24 hours here: neither the session's
 * time zone nor a change to summer time makes a limit longer or shorter.
 *
 *-------------------------------------------------------------------------
 */
#include "base/base.h"

#include "utils/fmgrprotos.h"
#include "utils/timestamp.h"

/*
 * The moment an interval after another; infinite if the interval is.  Errors:
 * 22023 if it is earlier, or the same unless that is allowed; 22008 if there is
 * no such moment.  name is the argument's, in messages.
 */
TimestampTz
ik_after(TimestampTz from, const Interval *interval, bool zero_allowed,
		 const char *name, const char *hint)
{
	TimestampTz end;

	end = DatumGetTimestamp(DirectFunctionCall2(timestamp_pl_interval,
												TimestampGetDatum(from),
												IntervalPGetDatum(interval)));
	if (end < from || (end == from && !zero_allowed))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 zero_allowed ? errmsg("%s must not be negative", name) :
				 errmsg("%s must be positive", name),
				 errhint("%s", hint)));
	return end;
}

/* The same, zero allowed, where there is no "for ever": 22008. */
TimestampTz
ik_finite_after(TimestampTz from, const Interval *interval, const char *name)
{
	TimestampTz end = ik_after(from, interval, true, name,
							   "Give a length of time such as '30 s', or '0'.");

	if (TIMESTAMP_NOT_FINITE(end))
		ereport(ERROR,
				(errcode(ERRCODE_DATETIME_VALUE_OUT_OF_RANGE),
				 errmsg("%s must be finite", name),
				 errhint("Give a length of time such as '30 s', or '0'.")));
	return end;
}

/*
 * The same from now on, in microseconds; PG_INT64_MAX for an infinite one.  What
 * begins later lasts as long, so it need not be judged again.
 */
int64
ik_duration(const Interval *interval, bool zero_allowed, const char *name,
			const char *hint)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz end = ik_after(now, interval, zero_allowed, name, hint);

	return TIMESTAMP_NOT_FINITE(end) ? PG_INT64_MAX : end - now;
}

/*
 * When does a call that starts now stop waiting?  NULL stands for
 * idempotency.default_wait.  DT_NOEND: never; DT_NOBEGIN: it does not wait.
 */
TimestampTz
ik_give_up_at(const Interval *wait)
{
	TimestampTz now;
	TimestampTz give_up;

	if (wait == NULL && ik_default_wait < 0)
		return DT_NOEND;
	if (wait == NULL && ik_default_wait == 0)
		return DT_NOBEGIN;

	now = GetCurrentTimestamp();
	if (wait == NULL)
		return TimestampTzPlusMilliseconds(now, (int64) ik_default_wait);
	give_up = ik_after(now, wait, true, "wait",
					   "'0' does not wait, NULL stands for idempotency.default_wait.");
	return give_up == now ? DT_NOBEGIN : give_up;
}
