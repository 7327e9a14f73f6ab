/*-------------------------------------------------------------------------
 *
 * token.h
 *		One-time tokens.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IK_TOKEN_H
#define IK_TOKEN_H

#include "../store/store.h"

/* what purge removes (token.c) */
extern const Purgeable ik_purge_used_tokens;
extern const Purgeable ik_purge_generations;

#endif							/* IK_TOKEN_H */
