/*-------------------------------------------------------------------------
 *
 * client.c
 *		One client for every contestant of bench/run.
 *
 *		client CONTESTANT CASE CLIENTS SECONDS [KEYS [COUNT]]
 *
 * Each client is a thread with its own connection(s).  A request is: claim the
 * key, do the work (one INSERT into payment), store the answer; or, where the
 * key is known, fetch the answer.  Every contestant is asked through prepared
 * statements and answers the same 180 bytes.
 *
 * CONTESTANT
 *		hand	INSERT .. ON CONFLICT DO NOTHING, SELECT or work, UPDATE, in
 *				separate statements of one transaction
 *		plpgsql	the same in one function call
 *		redis	SET NX as the lock, the work in PostgreSQL, the answer stored
 *				with an expiry
 *		ours	claim, work, complete in separate statements of one transaction
 *		run		idempotency.run(), one statement
 *		bare	the function that run() calls, by itself: no key at all
 *		limit	that function with a plain INSERT of the key's final row in it:
 *				what nobody can be faster than who stores an answer
 *		claim, select		a replay in one statement: claim(), a plain SELECT
 *		insert	the final row of a new key by a plain INSERT, no work
 *		check	no requests: counts the payments whose key has no answer in
 *				Redis
 * CASE
 *		load	the keys 0 to COUNT - 1; SECONDS does not count
 *		first	a new key for each request; with 0 SECONDS, COUNT of them
 *		replay	one of the COUNT loaded keys, at random
 *		hot		the first loaded key
 *		twice	each new key is sent by two clients at once
 *
 * KEYS is "random" (UUIDv4, the default) or "time" (UUIDv7).
 *
 * Prints: requests per second, requests that did the work, requests that got
 * the stored answer, times that a request had to ask again.
 *
 *-------------------------------------------------------------------------
 */
#include <hiredis/hiredis.h>
#include <libpq-fe.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define KEY_SIZE	37
#define MAX_PARAMS	3
#define WARM_UP		20			/* requests of each client before the clock runs */
#define REDIS_LOCK_MS	30000
#define REDIS_TTL_S		86400
#define REDIS_POLL_US	500

typedef struct Worker
{
	pthread_t	thread;
	int			number;
	uint64_t	state;			/* of the random numbers */
	PGconn	   *pg;
	redisContext *redis;
	uint64_t	ran;
	uint64_t	replayed;
	uint64_t	again;
} Worker;

/* A prepared statement. */
typedef struct Statement
{
	const char *name;
	const char *sql;
	int			nparams;
} Statement;

/* A way to handle one request. */
typedef struct Contestant
{
	const char *name;
	void		(*request) (Worker *w, const char *key);
	const Statement *statements;
} Contestant;

static void hand(Worker *w, const char *key);
static void one_call(Worker *w, const char *key);
static void redis(Worker *w, const char *key);
static void ours(Worker *w, const char *key);
static void run(Worker *w, const char *key);
static void one_insert(Worker *w, const char *key);
static void count_unanswered(void);
static void *work(void *arg);
static void connect_worker(Worker *w);
static bool next_key(Worker *w, char *key);
static void make_key(char *key, uint64_t high, uint64_t low);
static uint64_t mix(uint64_t x);
static uint64_t unix_ms(void);
static double now(void);
static void command(Worker *w, const char *sql);
static PGresult *execute(Worker *w, const char *name, int nparams, ...);
static redisReply *ask_redis(Worker *w, const char *format, ...);
static void die(const char *what, const char *why);

#define PAYMENT \
	{"pay", "INSERT INTO payment (request_id, amount) VALUES ($1, 10)", 1}

static const Contestant contestants[] = {
	{"hand", hand, (const Statement[]) {
			{"insert", "INSERT INTO hand_key (scope, key, status) VALUES ('bench', $1, 'p') ON CONFLICT DO NOTHING", 1},
			{"select", "SELECT status, response FROM hand_key WHERE key = $1 AND scope = 'bench'", 1},
			PAYMENT,
			{"update", "UPDATE hand_key SET status = 'c', response = $2 WHERE key = $1 AND scope = 'bench'", 2},
			{NULL}
	}},
	{"plpgsql", one_call, (const Statement[]) {
			{"call", "SELECT replayed, response FROM hand_pay($1, $2)", 2},
			{NULL}
	}},
	{"redis", redis, (const Statement[]) {
			PAYMENT,
			{NULL}
	}},
	{"ours", ours, (const Statement[]) {
			{"claim", "SELECT status, response FROM idempotency.claim('bench', $1)", 1},
			PAYMENT,
			{"complete", "SELECT idempotency.complete('bench', $1, $2::text)", 2},
			{NULL}
	}},
	{"run", run, (const Statement[]) {
			{"call", "SELECT replayed, response FROM idempotency.run('bench', $1, 'pay', $2)", 2},
			{NULL}
	}},
	{"bare", run, (const Statement[]) {
			{"call", "SELECT $1::text IS NULL, pay($2)", 2},
			{NULL}
	}},
	{"limit", run, (const Statement[]) {
			{"call", "SELECT $1::text IS NULL, pay_and_insert($1, $2)", 2},
			{NULL}
	}},
	{"claim", one_call, (const Statement[]) {
			{"call", "SELECT status, response FROM idempotency.claim('bench', $1)", 1},
			{NULL}
	}},
	{"select", one_call, (const Statement[]) {
			{"call", "SELECT status, response FROM hand_key WHERE key = $1 AND scope = 'bench'", 1},
			{NULL}
	}},
	{"insert", one_insert, (const Statement[]) {
			{"call", "INSERT INTO hand_key (scope, key, status, response) VALUES ('bench', $1, 'c', $2)", 2},
			{NULL}
	}},
	{"check", NULL, NULL},
	{NULL}
};

static const Contestant *contestant;
static const char *which;		/* CASE */
static double seconds;
static bool time_ordered;
static uint64_t count = UINT64_MAX;
static uint64_t session;		/* tells this run's new keys from others' */
static char answer[181];
static atomic_uint_fast64_t shared;
static pthread_barrier_t barrier;
static double deadline = 1e18;	/* far off while clients warm up */

int
main(int argc, char **argv)
{
	int			clients;
	uint64_t	ran = 0,
				replayed = 0,
				again = 0;
	double		start;

	if (argc < 5)
		die("usage", "client CONTESTANT CASE CLIENTS SECONDS [KEYS [COUNT]]");
	for (contestant = contestants; contestant->name; contestant++)
		if (strcmp(contestant->name, argv[1]) == 0)
			break;
	if (contestant->name == NULL)
		die("unknown contestant", argv[1]);
	which = argv[2];
	clients = atoi(argv[3]);
	seconds = atof(argv[4]);
	time_ordered = argc > 5 && strcmp(argv[5], "time") == 0;
	if (argc > 6)
		count = strtoull(argv[6], NULL, 10);
	memset(answer, 'x', sizeof(answer) - 1);
	session = mix(unix_ms() ^ (uint64_t) getpid() << 42);

	if (contestant->request == NULL)
	{
		count_unanswered();
		return 0;
	}

	Worker		workers[clients];

	memset(workers, 0, sizeof(workers));
	pthread_barrier_init(&barrier, NULL, clients + 1);
	for (int i = 0; i < clients; i++)
	{
		workers[i].number = i;
		workers[i].state = mix(session + i);
		if (pthread_create(&workers[i].thread, NULL, work, &workers[i]) != 0)
			die("pthread_create", "failed");
	}
	pthread_barrier_wait(&barrier);
	start = now();
	deadline = start + seconds;
	pthread_barrier_wait(&barrier);
	for (int i = 0; i < clients; i++)
	{
		pthread_join(workers[i].thread, NULL);
		ran += workers[i].ran;
		replayed += workers[i].replayed;
		again += workers[i].again;
	}
	printf("%.1f %llu %llu %llu\n", (ran + replayed) / (now() - start),
		   (unsigned long long) ran, (unsigned long long) replayed,
		   (unsigned long long) again);
	return 0;
}

/* Separate statements, as most applications write it. */
static void
hand(Worker *w, const char *key)
{
	PGresult   *res;
	bool		first;

	command(w, "BEGIN");
	res = execute(w, "insert", 1, key);
	first = strcmp(PQcmdTuples(res), "1") == 0;
	PQclear(res);
	if (first)
	{
		PQclear(execute(w, "pay", 1, key));
		PQclear(execute(w, "update", 2, key, answer));
		w->ran++;
	}
	else
	{
		res = execute(w, "select", 1, key);
		if (PQntuples(res) != 1 || strlen(PQgetvalue(res, 0, 1)) != 180)
			die("no answer for", key);
		PQclear(res);
		w->replayed++;
	}
	command(w, "COMMIT");
}

/* One statement that answers "replayed?" or a status, and the response. */
static void
one_call(Worker *w, const char *key)
{
	PGresult   *res = execute(w, "call", contestant->statements[0].nparams, key, answer);

	if (PQntuples(res) != 1 || strlen(PQgetvalue(res, 0, 1)) != 180)
		die("no answer for", key);
	if (strcmp(PQgetvalue(res, 0, 0), "f") == 0)
		w->ran++;
	else
		w->replayed++;
	PQclear(res);
}

/* The usual pattern: lock by SET NX, poll while another one holds it. */
static void
redis(Worker *w, const char *key)
{
	for (;;)
	{
		redisReply *reply = ask_redis(w, "SET %s lock NX PX %d", key, REDIS_LOCK_MS);
		bool		locked = reply->type == REDIS_REPLY_STATUS;

		freeReplyObject(reply);
		if (locked)
		{
			PQclear(execute(w, "pay", 1, key));
			freeReplyObject(ask_redis(w, "SET %s %s EX %d", key, answer, REDIS_TTL_S));
			w->ran++;
			return;
		}
		reply = ask_redis(w, "GET %s", key);
		if (reply->type == REDIS_REPLY_STRING && reply->len == 180)
		{
			freeReplyObject(reply);
			w->replayed++;
			return;
		}
		freeReplyObject(reply);
		w->again++;
		usleep(REDIS_POLL_US);
	}
}

static void
ours(Worker *w, const char *key)
{
	PGresult   *res;
	bool		first;

	command(w, "BEGIN");
	res = execute(w, "claim", 1, key);
	first = strcmp(PQgetvalue(res, 0, 0), "claimed") == 0;
	if (!first && strlen(PQgetvalue(res, 0, 1)) != 180)
		die("no answer for", key);
	PQclear(res);
	if (first)
	{
		PQclear(execute(w, "pay", 1, key));
		PQclear(execute(w, "complete", 2, key, answer));
		w->ran++;
	}
	else
		w->replayed++;
	command(w, "COMMIT");
}

static void
run(Worker *w, const char *key)
{
	char		request[KEY_SIZE + 20];
	PGresult   *res;

	snprintf(request, sizeof(request), "{\"request_id\": \"%s\"}", key);
	res = execute(w, "call", 2, key, request);
	if (strlen(PQgetvalue(res, 0, 1)) != 180)
		die("no answer for", key);
	if (strcmp(PQgetvalue(res, 0, 0), "f") == 0)
		w->ran++;
	else
		w->replayed++;
	PQclear(res);
}

static void
one_insert(Worker *w, const char *key)
{
	PQclear(execute(w, "call", 2, key, answer));
	w->ran++;
}

/* Payments whose key has no answer in Redis: the effect is there, and a retry
 * would repeat it once the lock has run out. */
static void
count_unanswered(void)
{
	Worker		w = {0};
	PGresult   *res;
	int			missing = 0;

	connect_worker(&w);
	res = PQexec(w.pg, "SELECT request_id FROM payment");
	if (PQresultStatus(res) != PGRES_TUPLES_OK)
		die("payment", PQerrorMessage(w.pg));
	for (int i = 0; i < PQntuples(res); i++)
	{
		redisReply *reply = ask_redis(&w, "GET %s", PQgetvalue(res, i, 0));

		if (reply->type != REDIS_REPLY_STRING || reply->len != 180)
			missing++;
		freeReplyObject(reply);
	}
	printf("%d %d\n", PQntuples(res), missing);
	PQclear(res);
}

static void *
work(void *arg)
{
	Worker	   *w = arg;
	char		key[KEY_SIZE];

	connect_worker(w);
	if (strcmp(which, "load") != 0 && seconds > 0)
	{
		for (int i = 0; i < WARM_UP && next_key(w, key); i++)
			contestant->request(w, key);
		w->ran = w->replayed = w->again = 0;
	}
	pthread_barrier_wait(&barrier);
	pthread_barrier_wait(&barrier);
	while (next_key(w, key))
		contestant->request(w, key);
	PQfinish(w->pg);
	if (w->redis)
		redisFree(w->redis);
	return NULL;
}

static void
connect_worker(Worker *w)
{
	const char *socket = getenv("REDIS_SOCKET");

	w->pg = PQconnectdb("user=app");
	if (PQstatus(w->pg) != CONNECTION_OK)
		die("could not connect", PQerrorMessage(w->pg));
	for (const Statement *s = contestant->statements; s && s->name; s++)
	{
		PGresult   *res = PQprepare(w->pg, s->name, s->sql, 0, NULL);

		if (PQresultStatus(res) != PGRES_COMMAND_OK)
			die(s->sql, PQerrorMessage(w->pg));
		PQclear(res);
	}
	if (contestant->request == redis || contestant->request == NULL)
	{
		w->redis = redisConnectUnix(socket ? socket : "");
		if (w->redis == NULL || w->redis->err)
			die("could not connect to Redis", w->redis ? w->redis->errstr : "");
	}
}

/* The key of a worker's next request; false when it is time to stop. */
static bool
next_key(Worker *w, char *key)
{
	uint64_t	n;

	if (strcmp(which, "load") == 0)
	{
		n = atomic_fetch_add(&shared, 1);
		make_key(key, mix(n), mix(~n));
		return n < count;
	}
	if (seconds > 0 ? now() >= deadline : atomic_fetch_add(&shared, 1) >= count)
		return false;
	if (strcmp(which, "first") == 0)
	{
		w->state++;
		make_key(key, mix(w->state), mix(w->state ^ session));
	}
	else if (strcmp(which, "replay") == 0)
	{
		n = mix(++w->state) % count;
		make_key(key, mix(n), mix(~n));
	}
	else if (strcmp(which, "hot") == 0)
		make_key(key, mix(0), mix(~(uint64_t) 0));
	else if (strcmp(which, "twice") == 0)
	{
		n = atomic_fetch_add(&shared, 1) / 2;
		make_key(key, mix(n + session), mix(n ^ session));
	}
	else
		die("unknown case", which);
	return true;
}

/* A UUID: version 7 if keys are to be in the order of time, else version 4. */
static void
make_key(char *key, uint64_t high, uint64_t low)
{
	if (time_ordered)
		high = unix_ms() << 16 | 0x7000 | (high & 0xfff);
	else
		high = (high & ~(uint64_t) 0xf000) | 0x4000;
	low = (low & ~((uint64_t) 3 << 62)) | (uint64_t) 2 << 62;
	snprintf(key, KEY_SIZE, "%08x-%04x-%04x-%04x-%012llx",
			 (unsigned) (high >> 32), (unsigned) (high >> 16) & 0xffff,
			 (unsigned) high & 0xffff, (unsigned) (low >> 48),
			 (unsigned long long) (low & 0xffffffffffff));
}

/* splitmix64: a well mixed number for each x. */
static uint64_t
mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
	return x ^ (x >> 31);
}

static uint64_t
unix_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_REALTIME, &t);
	return (uint64_t) t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static double
now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void
command(Worker *w, const char *sql)
{
	PGresult   *res = PQexec(w->pg, sql);

	if (PQresultStatus(res) != PGRES_COMMAND_OK)
		die(sql, PQerrorMessage(w->pg));
	PQclear(res);
}

static PGresult *
execute(Worker *w, const char *name, int nparams,...)
{
	const char *params[MAX_PARAMS];
	va_list		args;
	PGresult   *res;
	ExecStatusType status;

	va_start(args, nparams);
	for (int i = 0; i < nparams; i++)
		params[i] = va_arg(args, const char *);
	va_end(args);
	res = PQexecPrepared(w->pg, name, nparams, params, NULL, NULL, 0);
	status = PQresultStatus(res);
	if (status != PGRES_TUPLES_OK && status != PGRES_COMMAND_OK)
		die(name, PQerrorMessage(w->pg));
	return res;
}

static redisReply *
ask_redis(Worker *w, const char *format,...)
{
	va_list		args;
	redisReply *reply;

	va_start(args, format);
	reply = redisvCommand(w->redis, format, args);
	va_end(args);
	if (reply == NULL || reply->type == REDIS_REPLY_ERROR)
		die(format, reply ? reply->str : w->redis->errstr);
	return reply;
}

static void
die(const char *what, const char *why)
{
	fprintf(stderr, "client: %s: %s\n", what, why);
	exit(1);
}
