/*-------------------------------------------------------------------------
 *
 * siphash.c
 *		SipHash-2-4 with 128 bits of output: a hash under a secret key.
 *
 * Without the key nobody can tell what a value hashes to, or find two that
 * hash to the same, however many hashes he has seen.  The server's own hash
 * functions are fast and not made for that; its HMAC is, at many times the
 * cost for the short values that are hashed here.
 *
 * After "SipHash: a fast short-input PRF" by Aumasson and Bernstein, 2012.
 *
 *-------------------------------------------------------------------------
 */
#include "base/base.h"

#include "port/pg_bswap.h"

typedef struct Sip
{
	uint64		v0;
	uint64		v1;
	uint64		v2;
	uint64		v3;
} Sip;

static inline void add_word(Sip *sip, uint64 word);
static inline void mix(Sip *sip);
static inline uint64 get_word(const uint8 *bytes, int len);
static inline void put_word(uint8 *bytes, uint64 word);

/*
 * The first 8 or all 16 bytes of the hash, as size says; the key has 16.  The
 * constants are the paper's; 0xee asks for 128 bits.
 */
void
ik_siphash(const uint8 *key, const void *data, Size len, uint8 *hash,
		   Size size)
{
	const uint8 *bytes = data;
	uint64		last = (uint64) len << 56;
	uint64		k0 = get_word(key, 8);
	uint64		k1 = get_word(key + 8, 8);
	Sip			sip = {
		.v0 = k0 ^ UINT64CONST(0x736f6d6570736575),
		.v1 = k1 ^ UINT64CONST(0x646f72616e646f6d) ^ 0xee,
		.v2 = k0 ^ UINT64CONST(0x6c7967656e657261),
		.v3 = k1 ^ UINT64CONST(0x7465646279746573)
	};

	for (; len >= 8; bytes += 8, len -= 8)
		add_word(&sip, get_word(bytes, 8));
	if (len > 0)
		last |= get_word(bytes, len);
	add_word(&sip, last);

	sip.v2 ^= 0xee;
	for (int round = 0; round < 4; round++)
		mix(&sip);
	put_word(hash, sip.v0 ^ sip.v1 ^ sip.v2 ^ sip.v3);
	if (size == 8)
		return;
	Assert(size == 16);
	sip.v1 ^= 0xdd;
	for (int round = 0; round < 4; round++)
		mix(&sip);
	put_word(hash + 8, sip.v0 ^ sip.v1 ^ sip.v2 ^ sip.v3);
}

static inline void
add_word(Sip *sip, uint64 word)
{
	sip->v3 ^= word;
	mix(sip);
	mix(sip);
	sip->v0 ^= word;
}

#define ROTATE(x, n) ((x) << (n) | (x) >> (64 - (n)))

static inline void
mix(Sip *sip)
{
	sip->v0 += sip->v1;
	sip->v1 = ROTATE(sip->v1, 13) ^ sip->v0;
	sip->v0 = ROTATE(sip->v0, 32);
	sip->v2 += sip->v3;
	sip->v3 = ROTATE(sip->v3, 16) ^ sip->v2;
	sip->v0 += sip->v3;
	sip->v3 = ROTATE(sip->v3, 21) ^ sip->v0;
	sip->v2 += sip->v1;
	sip->v1 = ROTATE(sip->v1, 17) ^ sip->v2;
	sip->v2 = ROTATE(sip->v2, 32);
}

/* Little-endian, so that a digest is the same on every machine. */
static inline uint64
get_word(const uint8 *bytes, int len)
{
	uint64		word = 0;

	memcpy(&word, bytes, len);
#ifdef WORDS_BIGENDIAN
	word = pg_bswap64(word);
#endif
	return word;
}

static inline void
put_word(uint8 *bytes, uint64 word)
{
#ifdef WORDS_BIGENDIAN
	word = pg_bswap64(word);
#endif
	memcpy(bytes, &word, sizeof(word));
}
