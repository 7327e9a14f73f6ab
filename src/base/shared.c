/*-------------------------------------------------------------------------
 *
 * shared.c
 *		Shared memory: the one place that asks the server for it.
 *
 * Where the library is in shared_preload_libraries, the server sets memory
 * aside for it at its start.  Elsewhere every session attaches to a segment of
 * the DSM registry at first use, which PostgreSQL has from 17 on.  Before,
 * there is none: then what needs it is off, ik_shared_problem() says why, and
 * nothing else changes.
 *
 * Each database that uses it has a SHARE, in which a room takes AREAS by name,
 * once and for all; each backend has a share too, for what only that backend
 * writes.  AddinShmemInitLock guards the making of both; what is in them is
 * their users' matter.
 *
 * Another version of the library may have made the segment, or an area: the
 * size or the layout's number tells, and then this version does without.
 *
 *-------------------------------------------------------------------------
 */
#include "base/base.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#ifdef compat_named_segment
#include "storage/dsm_registry.h"
#endif

/* tells layouts of the same size apart: to be raised with any change below */
#define LAYOUT 1

/*
 * Databases that can have a share: 64 of them take 1 MB.  The counters and the
 * outbox's slots take half of one, and an area each.
 */
#define DATABASES 64
#define DATABASE_BYTES 15872
#define AREAS 4

typedef struct Area
{
	char		name[16];
	uint32		offset;
	uint32		size;
} Area;

typedef struct DatabaseShare
{
	Oid			database;		/* invalid: free */
	uint32		used;			/* bytes */
	Area		areas[AREAS];	/* size 0: none */
	int64		bytes[DATABASE_BYTES / sizeof(int64)];
} DatabaseShare;

typedef struct BackendShare
{
	int64		bytes[IK_BACKEND_BYTES / sizeof(int64)];
} BackendShare;

typedef struct SharedMemory
{
	uint32		layout;
	DatabaseShare databases[DATABASES];
	BackendShare backends[FLEXIBLE_ARRAY_MEMBER];
} SharedMemory;

static SharedMemory *memory = NULL;
static DatabaseShare *share = NULL; /* this database's */
static const char *problem = NULL;

static bool attach(void);
static Size memory_size(void);
static bool find_share(void);
static DatabaseShare *share_of(Oid database);
static DatabaseShare *free_a_share(void);
static void *find_area(const char *name, Size size, void (*init) (void *area));

static shmem_request_hook_type next_request_hook = NULL;
static shmem_startup_hook_type next_startup_hook = NULL;

static void request_memory(void);
static void start_memory(void);
static void clear_memory(void *ptr);
#ifdef compat_named_segment
static bool attach_segment(void);
static void get_segment(void *arg);
static void clear_segment(COMPAT_SEGMENT_INIT_PARAMETERS);
#endif

/* Called while the postmaster preloads the library. */
void
ik_request_shared_memory(void)
{
	next_request_hook = shmem_request_hook;
	shmem_request_hook = request_memory;
	next_startup_hook = shmem_startup_hook;
	shmem_startup_hook = start_memory;
}

/*
 * The area of this name in this database's share; NULL: there is no shared
 * memory.  The first who asks has it made: zeroed, and then passed to init,
 * which must not raise an error.  It stays where it is.  Not for the hot path:
 * keep the pointer.
 */
void *
ik_shared_area(const char *name, Size size, void (*init) (void *area))
{
	void	   *area = NULL;

	if (problem == NULL && attach() && find_share())
	{
		LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
		area = find_area(name, size, init);
		LWLockRelease(AddinShmemInitLock);
		if (area == NULL)
			problem = "another version of the library has made the shared memory: restart the server";
	}
	return area;
}

/*
 * The IK_BACKEND_BYTES of the backend with this number, from 0 to MaxBackends
 * - 1; NULL: there is no shared memory.
 */
void *
ik_shared_backend(int number)
{
	if (!attach())
		return NULL;
	Assert(number >= 0 && number < MaxBackends);
	return &memory->backends[number];
}

/* Why is there no shared memory?  NULL: there is, or nobody has asked yet. */
const char *
ik_shared_problem(void)
{
	return problem;
}

/* Is there shared memory?  Asks the server for it once. */
static bool
attach(void)
{
	if (memory != NULL)
		return true;
	if (problem != NULL)
		return false;

	/* a server in single-user mode has no registry */
	if (!IsUnderPostmaster)
		problem = "a server in single-user mode has no shared memory";
#ifdef compat_named_segment
	else if (!attach_segment())
		Assert(problem != NULL);
#else
	else
		problem = "the library is not in shared_preload_libraries, or has been only since the server's last start";
#endif
	return memory != NULL;
}

static Size
memory_size(void)
{
	return offsetof(SharedMemory, backends) +
		mul_size(MaxBackends, sizeof(BackendShare));
}

#ifdef compat_named_segment
/*
 * Attach to the segment, or make it.  What fails, fails in a subtransaction:
 * memory that is full must not become the failure of a call that would have
 * been answered without it.  A cancel waits until this is over.
 */
static bool
attach_segment(void)
{
	SharedMemory *segment = NULL;
	ErrorData  *error;

	/* a cancel must not be caught as if it were the segment's failure */
	HOLD_INTERRUPTS();
	error = ik_try(get_segment, &segment);

	/* the session asks only once, and shows the reason ever after */
	if (error != NULL)
	{
		problem = MemoryContextStrdup(TopMemoryContext,
									  psprintf("no shared memory could be had, or another version of the library has made it, which goes with a restart: %s",
											   error->message ? error->message : ""));
		return false;			/* an error has given up all holds */
	}
	RESUME_INTERRUPTS();

	/* the registry knows a segment's size alone */
	if (segment->layout != LAYOUT)
	{
		problem = "another version of the library has made the shared memory: restart the server";
		return false;
	}
	memory = segment;
	return true;
}

static void
get_segment(void *arg)
{
	bool		found;

	*(SharedMemory **) arg = compat_named_segment("idempotency", memory_size(),
												  clear_segment, &found);
}

static void
clear_segment(COMPAT_SEGMENT_INIT_PARAMETERS)
{
	clear_memory(ptr);
}
#endif

static void
request_memory(void)
{
	if (next_request_hook != NULL)
		next_request_hook();
	RequestAddinShmemSpace(memory_size());
}

static void
start_memory(void)
{
	bool		found;

	if (next_startup_hook != NULL)
		next_startup_hook();
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	memory = ShmemInitStruct("idempotency", memory_size(), &found);
	if (!found)
		clear_memory(memory);
	LWLockRelease(AddinShmemInitLock);
}

static void
clear_memory(void *ptr)
{
	memset(ptr, 0, memory_size());
	((SharedMemory *) ptr)->layout = LAYOUT;
}

/* Find this database's share, or take one for it; false: none is left. */
static bool
find_share(void)
{
	if (share != NULL)
		return true;
	Assert(OidIsValid(MyDatabaseId));
	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	share = share_of(MyDatabaseId);
	if (share == NULL && (share = share_of(InvalidOid)) != NULL)
		share->database = MyDatabaseId;
	LWLockRelease(AddinShmemInitLock);
	if (share == NULL)
		share = free_a_share();
	if (share == NULL)
		problem = "there is shared memory for 64 databases, and all of it is taken";
	return share != NULL;
}

static DatabaseShare *
share_of(Oid database)
{
	for (int i = 0; i < DATABASES; i++)
		if (memory->databases[i].database == database)
			return &memory->databases[i];
	return NULL;
}

/*
 * Take the share of a database that has been dropped; NULL: there is none.
 * The catalog is asked without the lock, as that may take long.
 */
static DatabaseShare *
free_a_share(void)
{
	for (int i = 0; i < DATABASES; i++)
	{
		DatabaseShare *candidate = &memory->databases[i];
		Oid			dropped = candidate->database;
		bool		taken;

		/* it may have been created just now, and have taken a free share */
		AcceptInvalidationMessages();
		InvalidateCatalogSnapshot();
		if (SearchSysCacheExists1(DATABASEOID, ObjectIdGetDatum(dropped)))
			continue;
		LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
		taken = candidate->database == dropped &&
			share_of(MyDatabaseId) == NULL;
		if (taken)
		{
			memset(candidate, 0, sizeof(DatabaseShare));
			candidate->database = MyDatabaseId;
		}
		else
			candidate = share_of(MyDatabaseId);
		LWLockRelease(AddinShmemInitLock);
		if (candidate != NULL)
			return candidate;
	}
	return NULL;
}

/*
 * The area in this database's share, under the lock.  NULL: one of that name
 * and another size is there, or no room for it, so a library of another
 * version must have been at work.
 */
static void *
find_area(const char *name, Size size, void (*init) (void *area))
{
	Assert(strlen(name) < sizeof(share->areas[0].name));
	for (int i = 0; i < AREAS; i++)
	{
		Area	   *area = &share->areas[i];

		if (area->size == 0)
		{
			if (size > DATABASE_BYTES - share->used)
				return NULL;
			strlcpy(area->name, name, sizeof(area->name));
			area->offset = share->used;
			if (init != NULL)
				init((char *) share->bytes + area->offset);
			area->size = size;
			share->used += CACHELINEALIGN(size);
		}
		if (strcmp(area->name, name) == 0)
			return area->size == size ?
				(char *) share->bytes + area->offset : NULL;
	}
	return NULL;
}
