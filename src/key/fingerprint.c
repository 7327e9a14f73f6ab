/*-------------------------------------------------------------------------
 *
 * fingerprint.c
 *		What is kept of a request: a digest.
 *
 * A retry with another request under the same key is a mistake, and to see it
 * the first request has to be known.  The request itself is not kept: it may
 * hold what must not be stored, such as a card number, and be large.  A
 * fingerprint takes 22 bytes of the row, and tells nothing to a reader who
 * does not have the secret of the database: without that one could try all
 * card numbers.
 *
 * Two requests are the same if the operator = of jsonb says so: the order of
 * members and 1 against 1.0 make no difference.  Where the caller gives a text
 * of his own to compare, it is compared byte by byte.
 *
 * What cannot be compared is not: where one side gave nothing, where one gave
 * a request and the other a text, and where the secret has been lost.
 *
 *-------------------------------------------------------------------------
 */
#include "key/key.h"

#include "port/pg_bswap.h"
#include "utils/numeric.h"

/* what is in the bytea */
typedef struct Fingerprint
{
	char		kind;			/* of what is compared */
	uint8		secret[4];		/* the id of the secret */
	uint8		digest[16];
} Fingerprint;

#define OF_REQUEST	'r'
#define OF_TEXT		't'

static void take_print(const KeyRequest *request, const Secret *secret,
					   Fingerprint *print);
static void add_request(Sip *sip, const Jsonb *request);
static void add_scalar(Sip *sip, const JsonbValue *scalar);
static void add_item(Sip *sip, char type, uint32 n, const void *bytes);

/* The fingerprint to be stored, or NULL: the caller gave nothing to compare. */
bytea *
ik_fingerprint(const KeyRequest *request)
{
	const Secret *secret = ik_newest_secret();
	bytea	   *stored;

	if ((request->request == NULL && request->fingerprint == NULL) ||
		secret == NULL)
		return NULL;
	stored = palloc(VARHDRSZ + sizeof(Fingerprint));
	SET_VARSIZE(stored, VARHDRSZ + sizeof(Fingerprint));
	take_print(request, secret, (Fingerprint *) VARDATA(stored));
	return stored;
}

/* Do the two requests differ, as far as can be told? */
bool
ik_mismatch(const bytea *stored, const KeyRequest *request)
{
	Fingerprint old;
	Fingerprint new;
	int32		id;
	const Secret *secret;

	if (stored == NULL || VARSIZE_ANY_EXHDR(stored) != sizeof(old) ||
		(request->request == NULL && request->fingerprint == NULL))
		return false;

	/* it may be packed into a row, aligned to nothing */
	memcpy(&old, VARDATA_ANY(stored), sizeof(old));
	memcpy(&id, old.secret, sizeof(id));
	secret = ik_find_secret((int32) pg_ntoh32(id));
	if (secret == NULL)
		return false;
	take_print(request, secret, &new);
	return new.kind == old.kind &&
		memcmp(new.digest, old.digest, sizeof(new.digest)) != 0;
}

static void
take_print(const KeyRequest *request, const Secret *secret,
		   Fingerprint *print)
{
	uint32		id = pg_hton32((uint32) secret->id);
	Sip			sip;

	ik_sip_start(&sip, secret->for_requests);
	if (request->fingerprint != NULL)
	{
		print->kind = OF_TEXT;
		ik_sip_add(&sip, VARDATA_ANY(request->fingerprint),
				   VARSIZE_ANY_EXHDR(request->fingerprint));
	}
	else
	{
		print->kind = OF_REQUEST;
		add_request(&sip, request->request);
	}
	memcpy(print->secret, &id, sizeof(print->secret));
	ik_sip_finish(&sip, print->digest);
}

/*
 * Add a request so that two are the same bytes if and only if jsonb's = holds.
 * The members of an object come in their stored order, which is that of their
 * names; each value says its type and length, so nothing runs into another.
 */
static void
add_request(Sip *sip, const Jsonb *request)
{
	JsonbIterator *it = JsonbIteratorInit(unconstify(JsonbContainer *,
													 &request->root));
	JsonbValue	value;
	JsonbIteratorToken token;

	while ((token = JsonbIteratorNext(&it, &value, false)) != WJB_DONE)
	{
		switch (token)
		{
			case WJB_BEGIN_ARRAY:
				/* a scalar at the top is stored as an array of one */
				add_item(sip, value.val.array.rawScalar ? '*' : '[',
						 value.val.array.nElems, NULL);
				break;
			case WJB_BEGIN_OBJECT:
				add_item(sip, '{', value.val.object.nPairs, NULL);
				break;
			case WJB_KEY:
			case WJB_VALUE:
			case WJB_ELEM:
				add_scalar(sip, &value);
				break;
			default:
				break;			/* the ends: their beginnings gave the number */
		}
	}
}

static void
add_scalar(Sip *sip, const JsonbValue *scalar)
{
	char	   *number;

	switch (scalar->type)
	{
		case jbvNull:
			add_item(sip, 'n', 0, NULL);
			break;
		case jbvBool:
			add_item(sip, scalar->val.boolean ? 't' : 'f', 0, NULL);
			break;
		case jbvString:
			add_item(sip, '"', scalar->val.string.len, scalar->val.string.val);
			break;
		case jbvNumeric:
			/* without zeros at the end: equal numbers, equal text */
			number = numeric_normalize(scalar->val.numeric);
			add_item(sip, '1', strlen(number), number);
			pfree(number);
			break;
		default:
			elog(ERROR, "unrecognized jsonb value type: %d", scalar->type);
	}
}

/* One item: its type, a number, and as many bytes unless there are none. */
static void
add_item(Sip *sip, char type, uint32 n, const void *bytes)
{
	char		head[8] = {type};
	uint32		number = pg_hton32(n);

	memcpy(head + 4, &number, sizeof(number));
	ik_sip_add(sip, head, sizeof(head));
	if (bytes != NULL)
		ik_sip_add(sip, bytes, n);
}
