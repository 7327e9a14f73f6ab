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
 * a request and the other a text, where the secret has been lost, and where a
 * dump came from a machine that has its bytes in another order, or from a
 * database in another encoding.
 *
 *-------------------------------------------------------------------------
 */
#include "key/key.h"

#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "port/pg_bswap.h"
#include "utils/fmgrprotos.h"
#include "utils/numeric.h"

/* what is in the bytea */
typedef struct Fingerprint
{
	uint8		kind;			/* of what is compared, and its encoding */
	uint8		secret[4];		/* the id of the secret */
	uint8		digest[16];
} Fingerprint;

/* a kind, to which the number of the encoding is added */
#define OF_TEXT		0
#ifdef WORDS_BIGENDIAN
#define OF_REQUEST	128
#else
#define OF_REQUEST	64
#endif

StaticAssertDecl(_PG_LAST_ENCODING_ <= 64, "an encoding's number takes too much");

/* in the first half-word of a number, as numeric.c stores it */
#define NUMERIC_IS_SHORT	0x8000
#define NUMERIC_SHORT_SCALE 0x1F80

static void take_print(const KeyRequest *request, const Secret *secret,
					   Fingerprint *print);
static const Jsonb *without_scales(const Jsonb *request);
static bool clear_scales(JsonbContainer *container);
static Jsonb *with_short_numbers(const Jsonb *request);

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
	if (secret == NULL && ik_is_distributed())
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("request cannot be compared: this node does not have the secret that the key's was stored under"),
				 errhint("Call SELECT idempotency.distribute() on the coordinator.")));
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
	const text *bytes = request->fingerprint;

	print->kind = OF_TEXT + GetDatabaseEncoding();
	if (bytes == NULL)
	{
		print->kind = OF_REQUEST + GetDatabaseEncoding();
		bytes = (const text *) without_scales(request->request);
	}
	memcpy(print->secret, &id, sizeof(print->secret));
	ik_siphash(secret->for_requests, VARDATA_ANY(bytes),
			   VARSIZE_ANY_EXHDR(bytes), print->digest, sizeof(print->digest));
}

/*
 * The bytes of a request, the same for two if and only if jsonb's = holds.  That
 * is so as they are stored, where members are sorted by their names and each is
 * there once, but for the display scale of numbers: 1.0 is 1.
 */
static const Jsonb *
without_scales(const Jsonb *request)
{
	Jsonb	   *copy = palloc(VARSIZE(request));

	memcpy(copy, request, VARSIZE(request));
	if (clear_scales(&copy->root))
		return copy;
	copy = with_short_numbers(request);
	(void) clear_scales(&copy->root);
	return copy;
}

/*
 * Clear the scales in their place, as far as they are in the short form.
 * False: one is not, for more zeros at the end than that can count perhaps.
 */
static bool
clear_scales(JsonbContainer *container)
{
	int			n = JsonContainerSize(container) *
		(JsonContainerIsObject(container) ? 2 : 1);
	char	   *data = (char *) &container->children[n];
	uint32		offset = 0;
	bool		all_short = true;

	check_stack_depth();
	for (int i = 0; i < n; i++)
	{
		JEntry		entry = container->children[i];
		char	   *value = data + INTALIGN(offset);

		JBE_ADVANCE_OFFSET(offset, entry);
		if (JBE_ISCONTAINER(entry))
			all_short &= clear_scales((JsonbContainer *) value);
		else if (JBE_ISNUMERIC(entry))
		{
			uint16	   *head = (uint16 *) VARDATA(value);

			if ((*head & NUMERIC_IS_SHORT) == 0)
				all_short = false;
			else
				*head &= ~NUMERIC_SHORT_SCALE;
		}
	}
	return all_short;
}

/*
 * The request made anew with numbers that have no zeros at the end: each is in
 * the short form if its value fits.  Not by way of text, which of 1e131071 has
 * more than 100 kB: a small request could have many such numbers.
 */
static Jsonb *
with_short_numbers(const Jsonb *request)
{
	JsonbIterator *it = JsonbIteratorInit(unconstify(JsonbContainer *,
													 &request->root));
	compat_JsonbState state = {0};
	JsonbIteratorToken token;
	JsonbValue	value;

	while ((token = JsonbIteratorNext(&it, &value, false)) != WJB_DONE)
	{
		bool		is_value = token == WJB_ELEM || token == WJB_VALUE;

		if (is_value && value.type == jbvNumeric)
			value.val.numeric = DatumGetNumeric(DirectFunctionCall1(numeric_trim_scale,
																	NumericGetDatum(value.val.numeric)));
		compat_push_jsonb(&state, token,
						  is_value || token == WJB_KEY ||
						  (token == WJB_BEGIN_ARRAY && value.val.array.rawScalar) ?
						  &value : NULL);
	}
	return JsonbValueToJsonb(state.result);
}
