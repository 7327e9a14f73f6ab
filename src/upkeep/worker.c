/*-------------------------------------------------------------------------
 *
 * worker.c
 *		Purging by itself: a launcher, and a worker per database and round.
 *
 * Where the library is preloaded, the postmaster keeps one launcher.  It is
 * connected to no database, so it is in nobody's way.  Every
 * idempotency.purge_interval it starts a worker for each database in
 * idempotency.purge_databases, one after the other; the worker sweeps once and
 * ends.  While idempotency.purge_databases is empty, the launcher sleeps.
 *
 * On the coordinator of a Citus cluster a worker also sees to nodes that were
 * added (citus.c).
 *
 * A worker commits after every batch, leaves at once if somebody wants to drop
 * or copy its database, and gives up before a table that stays locked.
 *
 *-------------------------------------------------------------------------
 */
#include "upkeep/upkeep.h"

#include "access/xact.h"
#include "catalog/pg_database.h"
#include "commands/extension.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/varlena.h"
#include "utils/wait_event.h"

/*
 * A transaction of a worker removes, and looks at, so much at the most.  That
 * are milliseconds of deletes, or 64 MB to read: neither its locks nor its
 * snapshots grow old.
 */
#define BATCH_ROWS 500
#define BATCH_BLOCKS 8192

PGDLLEXPORT void idempotency_launcher_main(Datum arg);
PGDLLEXPORT void idempotency_worker_main(Datum arg);

static void sweep_database(void);
static void start_round(void);
static void run_worker(const char *database);
static void nap(int events, long timeout, uint32 wait_event);
static bool database_is_wanted(void);
static void name_database(void *arg);
static void begin_report(void);
static void keep_message(const char *message);
static void report_round(int code, Datum arg);

/* what a worker tells of its round */
static WorkerRounds current;
static bool begun = false;

/* Called while the postmaster preloads the library. */
void
ik_register_launcher(void)
{
	BackgroundWorker worker = {
		.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION,
		.bgw_start_time = BgWorkerStart_RecoveryFinished,
		.bgw_restart_time = 5
	};

	strlcpy(worker.bgw_name, "idempotency purge launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "idempotency purge launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_library_name, "idempotency", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "idempotency_launcher_main", BGW_MAXLEN);
	RegisterBackgroundWorker(&worker);
}

/*
 * Start a round of workers every interval, until shutdown.  Ends with status 1,
 * or the postmaster would never start the launcher again after somebody else
 * has terminated it.
 */
void
idempotency_launcher_main(Datum arg)
{
	TimestampTz next_round = GetCurrentTimestamp();
	uint32		wait_event = compat_wait_event("IdempotencyPurgeInterval");

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, SignalHandlerForShutdownRequest);
	BackgroundWorkerUnblockSignals();

	/* to no database: only to be seen in pg_stat_activity */
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);

	while (!ShutdownRequestPending)
	{
		long		timeout = -1;
		int			events = WL_LATCH_SET | WL_EXIT_ON_PM_DEATH;

		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}
		if (ik_purge_databases[0] != '\0')
		{
			TimestampTz now = GetCurrentTimestamp();

			/* a shorter interval counts at once */
			next_round = Min(next_round,
							 TimestampTzPlusMilliseconds(now, ik_purge_interval * INT64CONST(1000)));
			if (now >= next_round)
			{
				next_round = TimestampTzPlusMilliseconds(now, ik_purge_interval * INT64CONST(1000));
				start_round();
				continue;
			}
			timeout = TimestampDifferenceMilliseconds(now, next_round);
			events |= WL_TIMEOUT;
		}
		nap(events, timeout, wait_event);
	}
	proc_exit(1);
}

/* Sweep one database, whose name is in bgw_extra, and end. */
void
idempotency_worker_main(Datum arg)
{
	ErrorContextCallback context = {
		.previous = error_context_stack,
		.callback = name_database
	};

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnection(MyBgworkerEntry->bgw_extra, NULL, 0);
	error_context_stack = &context;

	/* in place of the database's default */
	XactIsoLevel = XACT_READ_COMMITTED;
	SetConfigOption("default_transaction_isolation", "read committed",
					PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("default_transaction_read_only", "off",
					PGC_SUSET, PGC_S_OVERRIDE);

	/* the other databases wait for this one */
	SetConfigOption("lock_timeout", "5s", PGC_SUSET, PGC_S_OVERRIDE);

	/* what a crash brings back goes in the next round */
	SetConfigOption("synchronous_commit", "off", PGC_SUSET, PGC_S_OVERRIDE);

	PG_TRY();
	{
		sweep_database();
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(TopMemoryContext);
		error = CopyErrorData();
		strlcpy(current.outcome, "failed", sizeof(current.outcome));
		if (error->message != NULL)
			keep_message(error->message);
		PG_RE_THROW();
	}
	PG_END_TRY();
	proc_exit(0);
}

/*
 * Once round every table, in small transactions.  What it tells of the round
 * is kept where the extension is installed.
 */
static void
sweep_database(void)
{
	bool		ended = false;
	bool		wanted = false;

	while (!ended && !(wanted = database_is_wanted()))
	{
		bool		installed;

		CHECK_FOR_INTERRUPTS();
		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		PushActiveSnapshot(GetTransactionSnapshot());
		pgstat_report_activity(STATE_RUNNING, "purging expired keys");
		installed = OidIsValid(get_extension_oid("idempotency", true));
		if (installed && !begun)
		{
			begin_report();
			ik_begin_sweep();
		}
		if (installed)
		{
			current.rows += ik_sweep(BATCH_ROWS, BATCH_BLOCKS);
			ended = ik_sweep_ended();
		}
		PopActiveSnapshot();
		CommitTransactionCommand();
		pgstat_report_stat(true);
		pgstat_report_activity(STATE_IDLE, NULL);
		if (!installed)
			return;
	}
	if (!wanted)
	{
		StartTransactionCommand();
		PushActiveSnapshot(GetTransactionSnapshot());
		ik_reach_new_nodes();
		PopActiveSnapshot();
		CommitTransactionCommand();
	}
	strlcpy(current.outcome, wanted ? "gave way" : "finished",
			sizeof(current.outcome));
}

/* From now on the view shows a round under way; its end comes with ours. */
static void
begin_report(void)
{
	(void) ik_read_rounds(&current);
	current.rounds++;
	current.started = GetCurrentTimestamp();
	current.ended = 0;
	current.rows = 0;
	current.error[0] = '\0';
	/* unless something else is found to be true */
	strlcpy(current.outcome, "terminated", sizeof(current.outcome));
	ik_write_rounds(&current);
	begun = true;
	before_shmem_exit(report_round, 0);
}

/* As much of the error as there is room for, in whole characters. */
static void
keep_message(const char *message)
{
	int			len = pg_mbcliplen(message, strlen(message),
								   sizeof(current.error) - 1);

	memcpy(current.error, message, len);
	current.error[len] = '\0';
}

/* The worker ends, well or by an error. */
static void
report_round(int code, Datum arg)
{
	current.ended = GetCurrentTimestamp();
	ik_write_rounds(&current);
	if (ik_log_purge)
		ereport(LOG,
				(errmsg("purge of database \"%s\" %s: %lld rows removed in %lld ms",
						MyBgworkerEntry->bgw_extra, current.outcome,
						(long long) current.rows,
						(long long) (current.ended - current.started) / 1000)));
}

static void
start_round(void)
{
	char	   *names = pstrdup(ik_purge_databases);
	List	   *databases;
	ListCell   *lc;

	/* the check hook has let only a list pass */
	(void) SplitGUCList(names, ',', &databases);
	foreach(lc, databases)
	{
		if (ShutdownRequestPending || ConfigReloadPending)
			break;
		run_worker(lfirst(lc));
	}
	list_free(databases);
	pfree(names);
}

/* Start the worker of a database, and wait for its end. */
static void
run_worker(const char *database)
{
	BackgroundWorker worker = {
		.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION,
		.bgw_start_time = BgWorkerStart_RecoveryFinished,
		.bgw_restart_time = BGW_NEVER_RESTART,
		.bgw_notify_pid = MyProcPid
	};
	BackgroundWorkerHandle *handle;

	snprintf(worker.bgw_name, BGW_MAXLEN, "idempotency purge worker");
	strlcpy(worker.bgw_type, "idempotency purge worker", BGW_MAXLEN);
	strlcpy(worker.bgw_library_name, "idempotency", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "idempotency_worker_main", BGW_MAXLEN);
	strlcpy(worker.bgw_extra, database, BGW_EXTRALEN);
	if (!RegisterDynamicBackgroundWorker(&worker, &handle))
	{
		ereport(LOG,
				(errmsg("could not start the purge worker for database \"%s\"",
						database),
				 errhint("Consider increasing the configuration parameter \"max_worker_processes\".")));
		return;
	}

	while (!ShutdownRequestPending)
	{
		pid_t		pid;

		if (GetBackgroundWorkerPid(handle, &pid) == BGWH_STOPPED)
			break;
		nap(WL_LATCH_SET | WL_EXIT_ON_PM_DEATH, -1,
			compat_wait_event("IdempotencyPurgeWorker"));
	}
	if (ShutdownRequestPending)
		TerminateBackgroundWorker(handle);
	pfree(handle);
}

/* Wait, and serve interrupts: DROP DATABASE waits for everybody to do so. */
static void
nap(int events, long timeout, uint32 wait_event)
{
	(void) WaitLatch(MyLatch, events, timeout, wait_event);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
}

/*
 * Is somebody waiting to drop or copy this database?  Both lock the database
 * first and then give its sessions five seconds to leave (dbcommands.c).
 */
static bool
database_is_wanted(void)
{
	LOCKTAG		tag;
	bool		wanted;

	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, MyDatabaseId, 0);
	StartTransactionCommand();
	wanted = LockAcquire(&tag, RowExclusiveLock, false, true) == LOCKACQUIRE_NOT_AVAIL;
	CommitTransactionCommand();
	return wanted;
}

/* Tell in every message of a worker where it is at work. */
static void
name_database(void *arg)
{
	errcontext("purging database \"%s\"", MyBgworkerEntry->bgw_extra);
}
