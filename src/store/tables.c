/*-------------------------------------------------------------------------
 *
 * tables.c
 *		Our own tables: what the code relies on, and whether they keep to it.
 *
 * Writing past the executor is right only for a plain table: no triggers, row
 * security, checks.  So a table that is not as the install script made it is
 * refused (55000).  The verdict is kept until a relcache invalidation.
 *
 *-------------------------------------------------------------------------
 */
#include "store/store.h"

#include "access/genam.h"
#include "access/relation.h"
#include "access/transam.h"
#include "catalog/pg_am.h"
#include "catalog/pg_class.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_index.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "commands/trigger.h"
#include "nodes/nodeFuncs.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/syscache.h"

PG_FUNCTION_INFO_V1(idempotency_table_changed);

static void examine(OwnTable *table, Relation rel);
static bool has_our_triggers(OwnTable *table, Relation rel);
static bool is_plain(OwnTable *table, Relation rel);
static void examine_indexes(OwnTable *table, Relation rel);
static bool is_index(Relation index, const OwnIndex *what);
static bool is_built_in(Relation index, Relation rel);
static Node *as_defined(Relation index, AttrNumber what);
static bool has_others_code(Node *node, void *context);
static bool is_others_function(Oid function, void *context);
static bool says_leased(Node *clause);
static bool says_holds_its_key(Node *clause);
static bool is_char_comparison(Node *clause, Oid function, int column, char value);
static bool is_leased(const Datum *values);
static bool holds_its_key(const Datum *values, const bool *nulls);
static OwnTable *shard_of(const OwnTable *table, int64 shard);
static Oid	find(const OwnTable *table);
static void forget_verdict(Datum arg, Oid relid);
static void forget_if_concerned(OwnTable *table, Oid relid);
static void forget_verdicts(void);
pg_noreturn static void not_as_made(OwnTable *table);

static const OwnColumn keys_columns[] = {
	[KEYS_CREATED_AT] = {"created_at", TIMESTAMPTZOID},
	[KEYS_EXPIRES_AT] = {"expires_at", TIMESTAMPTZOID},
	[KEYS_STATUS] = {"status", CHAROID},
	[KEYS_KEY] = {"key", TEXTOID},
	[KEYS_SCOPE] = {"scope", TEXTOID},
	[KEYS_RESPONSE] = {"response", TEXTOID},
	[KEYS_META] = {"meta", JSONBOID},
	[KEYS_FINGERPRINT] = {"fingerprint", BYTEAOID},
	[KEYS_FENCE] = {"fence", INT8OID},
	[KEYS_DEADLINE] = {"deadline", TIMESTAMPTZOID},
	[KEYS_ATTEMPT] = {"attempt", INT4OID},
	[KEYS_CHECKPOINT] = {"checkpoint", TEXTOID},
	[KEYS_CHECKPOINT_DATA] = {"checkpoint_data", JSONBOID}
};

static const OwnIndex keys_indexes[] = {
	{.unique = true,.nkeys = 2,.key = {KEYS_KEY, KEYS_SCOPE}},
	[KEYS_LEASED] = {.nkeys = 1,.key = {KEYS_DEADLINE},.predicate = says_leased,.nclauses = 1}
};

OwnTable	ik_keys = {
	.name = "keys",
	.columns = keys_columns,
	.natts = lengthof(keys_columns),
	.indexes = keys_indexes,
	.nindexes = lengthof(keys_indexes),
	.equal = {F_TEXTEQ, F_TEXTEQ},
	.in_partial = is_leased,
	.named = true,
	.place = PLACE_OF_KEYS,
	.home_key = 1
};

static const OwnColumn token_keys_columns[] = {
	[TOKEN_KEYS_ID] = {"id", INT8OID},
	[TOKEN_KEYS_CREATED_AT] = {"created_at", TIMESTAMPTZOID},
	[TOKEN_KEYS_ROTATED_AT] = {"rotated_at", TIMESTAMPTZOID},
	[TOKEN_KEYS_SECRET] = {"secret", BYTEAOID},
	[TOKEN_KEYS_SYSTEM] = {"system", INT8OID},
	[TOKEN_KEYS_DATABASE] = {"database", OIDOID},
	[TOKEN_KEYS_KEPT_IN] = {"kept_in", OIDOID}
};

static const OwnIndex token_keys_indexes[] = {
	{.unique = true,.nkeys = 1,.key = {TOKEN_KEYS_ID}}
};

OwnTable	ik_token_keys = {
	.name = "token_keys",
	.columns = token_keys_columns,
	.natts = lengthof(token_keys_columns),
	.indexes = token_keys_indexes,
	.nindexes = lengthof(token_keys_indexes),
	.equal = {F_INT8EQ},
	.watched = true,
	.place = PLACE_OF_SIGNING_KEYS
};

static const OwnColumn used_tokens_columns[] = {
	[USED_TOKENS_EXPIRES_AT] = {"expires_at", TIMESTAMPTZOID},
	[USED_TOKENS_MARKED_AT] = {"marked_at", TIMESTAMPTZOID},
	[USED_TOKENS_ID] = {"id", UUIDOID},
	[USED_TOKENS_REVOKED] = {"revoked", BOOLOID}
};

static const OwnIndex used_tokens_indexes[] = {
	{.unique = true,.nkeys = 1,.key = {USED_TOKENS_ID}}
};

OwnTable	ik_used_tokens = {
	.name = "used_tokens",
	.columns = used_tokens_columns,
	.natts = lengthof(used_tokens_columns),
	.indexes = used_tokens_indexes,
	.nindexes = lengthof(used_tokens_indexes),
	.equal = {F_UUID_EQ},
	.place = PLACE_OF_MARKS
};

static const OwnColumn token_generations_columns[] = {
	[GENERATIONS_GENERATION] = {"generation", INT8OID},
	[GENERATIONS_RAISED_AT] = {"raised_at", TIMESTAMPTZOID},
	[GENERATIONS_SUBJECT] = {"subject", TEXTOID},
	[GENERATIONS_PURPOSE] = {"purpose", TEXTOID}
};

static const OwnIndex token_generations_indexes[] = {
	{.unique = true,.nkeys = 2,.key = {GENERATIONS_SUBJECT, GENERATIONS_PURPOSE}}
};

OwnTable	ik_token_generations = {
	.name = "token_generations",
	.columns = token_generations_columns,
	.natts = lengthof(token_generations_columns),
	.indexes = token_generations_indexes,
	.nindexes = lengthof(token_generations_indexes),
	.equal = {F_TEXTEQ, F_TEXTEQ},
	.place = PLACE_OF_GENERATIONS
};

static const OwnColumn outbox_columns[] = {
	[OUTBOX_ID] = {"id", INT8OID},
	[OUTBOX_PLACE] = {"place", INT8OID},
	[OUTBOX_DUE] = {"due", TIMESTAMPTZOID},
	[OUTBOX_EMITTED_AT] = {"emitted_at", TIMESTAMPTZOID},
	[OUTBOX_PARKED_AT] = {"parked_at", TIMESTAMPTZOID},
	[OUTBOX_ATTEMPT] = {"attempt", INT4OID},
	[OUTBOX_TRIES] = {"tries", INT4OID},
	[OUTBOX_STATE] = {"state", CHAROID},
	[OUTBOX_TOPIC] = {"topic", TEXTOID},
	[OUTBOX_KEY] = {"key", TEXTOID},
	[OUTBOX_PAYLOAD] = {"payload", JSONBOID},
	[OUTBOX_ERROR] = {"error", TEXTOID}
};

static const OwnIndex outbox_indexes[] = {
	{.unique = true,.nkeys = 1,.key = {OUTBOX_ID}},
	[OUTBOX_BY_DUE] = {.nkeys = 3,.key = {OUTBOX_TOPIC, OUTBOX_DUE, OUTBOX_PLACE}},
	[OUTBOX_BY_KEY] = {.nkeys = 3,.key = {OUTBOX_KEY, OUTBOX_TOPIC, OUTBOX_ID},.predicate = says_holds_its_key,.nclauses = 2,.covers = holds_its_key}
};

OwnTable	ik_outbox = {
	.name = "outbox",
	.columns = outbox_columns,
	.natts = lengthof(outbox_columns),
	.indexes = outbox_indexes,
	.nindexes = lengthof(outbox_indexes),
	.equal = {F_INT8EQ}
};

static const OwnColumn leases_columns[] = {
	[LEASES_BLOCK] = {"block", INT8OID},
	[LEASES_TAKEN] = {"taken", INT8OID},
	[LEASES_DEADLINE] = {"deadline", TIMESTAMPTZOID},
	[LEASES_EVENTS] = {"events", INT8OID},
	[LEASES_TOPIC] = {"topic", TEXTOID}
};

static const OwnIndex leases_indexes[] = {
	{.unique = true,.nkeys = 2,.key = {LEASES_BLOCK, LEASES_TAKEN}},
	[LEASES_BY_DEADLINE] = {.nkeys = 2,.key = {LEASES_TOPIC, LEASES_DEADLINE}}
};

OwnTable	ik_outbox_leases = {
	.name = "outbox_leases",
	.columns = leases_columns,
	.natts = lengthof(leases_columns),
	.indexes = leases_indexes,
	.nindexes = lengthof(leases_indexes),
	.equal = {F_INT8EQ, F_INT8EQ}
};

static const OwnColumn outbox_keys_columns[] = {
	[OUTBOX_KEYS_TAKEN] = {"taken", INT8OID},
	[OUTBOX_KEYS_ID] = {"id", INT8OID},
	[OUTBOX_KEYS_TOPIC] = {"topic", TEXTOID},
	[OUTBOX_KEYS_KEY] = {"key", TEXTOID}
};

static const OwnIndex outbox_keys_indexes[] = {
	{.unique = true,.nkeys = 3,.key = {OUTBOX_KEYS_KEY, OUTBOX_KEYS_TOPIC, OUTBOX_KEYS_TAKEN}}
};

OwnTable	ik_outbox_keys = {
	.name = "outbox_keys",
	.columns = outbox_keys_columns,
	.natts = lengthof(outbox_keys_columns),
	.indexes = outbox_keys_indexes,
	.nindexes = lengthof(outbox_keys_indexes)
};

static const OwnColumn topics_columns[] = {
	[TOPICS_TOPIC] = {"topic", TEXTOID},
	[TOPICS_MAX_ATTEMPTS] = {"max_attempts", INT4OID},
	[TOPICS_PARKED_BLOCKS] = {"parked_blocks", BOOLOID}
};

static const OwnIndex topics_indexes[] = {
	{.unique = true,.nkeys = 1,.key = {TOPICS_TOPIC}}
};

OwnTable	ik_outbox_topics = {
	.name = "outbox_topics",
	.columns = topics_columns,
	.natts = lengthof(topics_columns),
	.indexes = topics_indexes,
	.nindexes = lengthof(topics_indexes),
	.equal = {F_TEXTEQ}
};

static const OwnColumn secrets_columns[] = {
	[SECRETS_ID] = {"id", INT4OID},
	[SECRETS_CREATED_AT] = {"created_at", TIMESTAMPTZOID},
	[SECRETS_SECRET] = {"secret", BYTEAOID}
};

static const OwnIndex secrets_indexes[] = {
	{.unique = true,.nkeys = 1,.key = {SECRETS_ID}}
};

OwnTable	ik_secrets = {
	.name = "secrets",
	.columns = secrets_columns,
	.natts = lengthof(secrets_columns),
	.indexes = secrets_indexes,
	.nindexes = lengthof(secrets_indexes),
	.equal = {F_INT4EQ},
	.watched = true,
	.place = PLACE_EACH_NODE
};

static OwnTable *const own_tables[] = {
	&ik_keys,
	&ik_outbox,
	&ik_outbox_leases,
	&ik_outbox_keys,
	&ik_outbox_topics,
	&ik_token_keys,
	&ik_used_tokens,
	&ik_token_generations,
	&ik_secrets
};

/* those shards of theirs that this backend has met */
static OwnTable *shards = NULL;

/* The table that the keys of a scope are in; 40001 if it is not here. */
OwnTable *
ik_keys_of(const text *scope)
{
	return ik_part_of(&ik_keys, PointerGetDatum(scope));
}

/*
 * What the rows with this value are in, on this node: the table itself, or a
 * shard of it.  The value is that of the column that it is distributed by; 0
 * for one that is on all nodes.  Error: 40001 or 55000 if it is not here.
 */
OwnTable *
ik_part_of(OwnTable *table, Datum home)
{
	int64		shard = ik_shard_of(table, home);

	return shard == 0 ? table : shard_of(table, shard);
}

/*
 * What there is of a table of ours on this node: itself, or its shards, or
 * nothing if it is not in use here.
 */
List *
ik_tables_here(OwnTable *table)
{
	List	   *tables = NIL;

	if (ik_is_spread(table))
	{
		int			n;
		int64	   *here = ik_shards_here(table, &n);

		for (int i = 0; i < n; i++)
			tables = lappend(tables, shard_of(table, here[i]));
	}
	else if (table == &ik_keys || ik_is_alone())
		tables = list_make1(table);
	return tables;
}

/* A shard, as Citus names it; it is looked at when it is opened. */
static OwnTable *
shard_of(const OwnTable *table, int64 shard)
{
	OwnTable   *own;
	MemoryContext old;

	for (own = shards; own != NULL; own = own->next)
	{
		if (own->shard == shard)
			return own;
	}
	old = MemoryContextSwitchTo(TopMemoryContext);
	own = palloc(sizeof(OwnTable));
	*own = *table;
	own->name = psprintf("%s_" INT64_FORMAT, table->name, shard);
	own->valid = false;
	own->relid = InvalidOid;
	own->sweep.started = false;
	own->shard = shard;
	own->watched = false;		/* Citus makes no triggers there */
	own->next = shards;
	shards = own;
	MemoryContextSwitchTo(old);
	return own;
}

/* Open one of our tables, as the install script made it; 55000 if it is not. */
Relation
ik_open_table(OwnTable *table, LOCKMODE lockmode)
{
	static bool callback_registered = false;

	if (!callback_registered)
	{
		CacheRegisterRelcacheCallback(forget_verdict, (Datum) 0);
		ik_watch_cluster(forget_verdicts);
		callback_registered = true;
	}

	/* getting the lock also takes in what happened to the table */
	if (table->valid)
	{
		LockRelationOid(table->relid, lockmode);
		if (table->valid)
			return relation_open(table->relid, NoLock);
		UnlockRelationOid(table->relid, lockmode);
	}

	for (;;)
	{
		Relation	rel = try_relation_open(find(table), lockmode);

		if (rel != NULL)		/* else it has just been dropped */
		{
			examine(table, rel);
			return rel;
		}
	}
}

/*
 * Citus makes the shards of our tables, as their owner; so they are not the
 * extension's, but nobody else could have made them.
 */
static Oid
find(const OwnTable *table)
{
	Oid			relid;

	if (table->shard == 0)
		return ik_own_relation(table->name);
	relid = get_relname_relid(table->name,
							  get_rel_namespace(ik_own_relation("keys")));
	if (!OidIsValid(relid))
		ik_check_place(table);
	return relid;
}

/* An index of an open table that we read; 55000 if it is gone. */
Oid
ik_own_index(OwnTable *table, int which)
{
	if (!OidIsValid(table->found[which]))
		not_as_made(table);
	return table->found[which];
}

/*
 * How often was the table altered, or a watched one changed, as far as this
 * backend has heard?  While the count stays, what was read under it is right.
 */
uint64
ik_table_changes(OwnTable *table)
{
	/* one may have come unheard: what was read under it is right just now */
	if (table->unheard)
		table->changes++;
	return table->changes;
}

/*
 * Are all changes of a watched table announced?  pg_restore --disable-triggers,
 * which is ENABLE TRIGGER ALL at its end, leaves the trigger as one that does not
 * fire for a replica.
 */
bool
ik_is_announced(Relation rel)
{
	bool		announced = false;

	/* a look at a catalog may replace the list */
	for (int i = 0; rel->trigdesc != NULL && i < rel->trigdesc->numtriggers; i++)
	{
		Trigger    *trigger = &rel->trigdesc->triggers[i];

		if (trigger->tgenabled == TRIGGER_FIRES_ALWAYS &&
			ik_is_ours(ProcedureRelationId, trigger->tgfoid))
			announced = true;
	}
	return announced;
}

/*
 * The trigger of a watched table, and of the definitions of machines: have every
 * session read it anew.
 *
 *		CREATE TRIGGER changed
 *		AFTER INSERT OR UPDATE OR DELETE ON ...
 *		FOR EACH ROW EXECUTE FUNCTION idempotency.table_changed()
 *
 * For each row, since logical replication fires no statement triggers, and
 * ENABLE ALWAYS, since it and a restore run as a replica.  (TRUNCATE
 * invalidates by itself.)  Only on a table of ours: on another one, a trigger
 * made by hand could do no more than be in the way (39P01).
 */
Datum
idempotency_table_changed(PG_FUNCTION_ARGS)
{
	TriggerData *trigdata = (TriggerData *) fcinfo->context;

	if (!CALLED_AS_TRIGGER(fcinfo) ||
		!TRIGGER_FIRED_AFTER(trigdata->tg_event) ||
		!ik_is_ours(RelationRelationId, RelationGetRelid(trigdata->tg_relation)))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" must be fired by a trigger of the extension's own tables",
						get_func_name(fcinfo->flinfo->fn_oid)),
				 errhint("Drop the trigger: the function is internal to the extension.")));
	CacheInvalidateRelcache(trigdata->tg_relation);
	return PointerGetDatum(NULL);
}

/*
 * Is the table as the install script made it?  55000 if not.  The caller's lock
 * makes the answer good for this call.  It is kept only if no invalidation came
 * in while we opened the indexes: one of them may be of an index that we have
 * not seen.
 */
static void
examine(OwnTable *table, Relation rel)
{
	uint64		changes;

	table->relid = RelationGetRelid(rel);
	changes = table->changes;
	ik_check_place(table);
	if (!is_plain(table, rel))
		not_as_made(table);
	examine_indexes(table, rel);
	if (!OidIsValid(table->found[PRIMARY_KEY]))
		not_as_made(table);
	table->valid = table->changes == changes && !creating_extension;
}

static bool
has_our_triggers(OwnTable *table, Relation rel)
{
	if (!table->watched)
		return rel->trigdesc == NULL;
	table->unheard = !ik_is_announced(rel);
	return rel->trigdesc != NULL && rel->trigdesc->numtriggers == 1 &&
		ik_is_ours(ProcedureRelationId, rel->trigdesc->triggers[0].tgfoid);
}

static bool
is_plain(OwnTable *table, Relation rel)
{
	TupleDesc	desc = RelationGetDescr(rel);

	if (rel->rd_rel->relkind != RELKIND_RELATION ||
		rel->rd_rel->relam != HEAP_TABLE_AM_OID ||
		rel->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT ||
		!has_our_triggers(table, rel) ||
		rel->rd_rules != NULL ||
		rel->rd_rel->relrowsecurity ||
		rel->rd_rel->relispartition ||
		rel->rd_rel->relchecks > 0 ||
		desc->natts < table->natts)
		return false;

	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);

		if (i < table->natts)
		{
			if (att->attisdropped ||
				att->atttypid != table->columns[i].type ||
				strcmp(NameStr(att->attname), table->columns[i].name) != 0)
				return false;
		}
		else if (!att->attisdropped &&
				 (att->attnotnull || att->atthasdef ||
				  get_typtype(att->atttypid) == TYPTYPE_DOMAIN))
			return false;		/* we would write NULL */
	}
	return true;
}

/*
 * Find the indexes that we read, by what they are, and whether there are more.
 * Every index must be free of others' code.
 */
static void
examine_indexes(OwnTable *table, Relation rel)
{
	List	   *indexes = RelationGetIndexList(rel);
	ListCell   *lc;

	memset(table->found, 0, sizeof(table->found));
	table->other_indexes = false;
	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), AccessShareLock);
		int			i = 0;

		if (!is_built_in(index, rel))
			not_as_made(table);
		while (i < table->nindexes &&
			   (OidIsValid(table->found[i]) ||
				!is_index(index, &table->indexes[i])))
			i++;
		if (i < table->nindexes)
			table->found[i] = RelationGetRelid(index);

		/* columns that it only includes are not in a RowAccess's key */
		if (i == table->nindexes || index->rd_index->indnatts > table->indexes[i].nkeys)
			table->other_indexes = true;
		index_close(index, AccessShareLock);
	}
	list_free(indexes);
}

static bool
is_index(Relation index, const OwnIndex *what)
{
	Form_pg_index form = index->rd_index;
	List	   *predicate = RelationGetIndexPredicate(index);
	ListCell   *lc;

	if (!form->indisvalid || !form->indisready || !form->indimmediate ||
		(what->unique && !form->indisunique) ||
		form->indnkeyatts != what->nkeys ||
		index->rd_rel->relam != BTREE_AM_OID)
		return false;
	for (int i = 0; i < what->nkeys; i++)
		if (form->indkey.values[i] != what->key[i] + 1 ||
			index->rd_indoption[i] != 0 ||
			(OidIsValid(index->rd_indcollation[i]) &&
			 index->rd_indcollation[i] != C_COLLATION_OID))
			return false;
	if (list_length(predicate) != what->nclauses)
		return false;
	foreach(lc, predicate)
		if (!what->predicate(lfirst(lc)))
			return false;
	return true;
}

/*
 * Whose code can run when a row is indexed?  What an index calls runs as our
 * caller: as the role that claims a key, or as the superuser whose worker purges.
 * So it is PostgreSQL's alone: operator classes, types, and every function in
 * an expression or a predicate.
 *
 * The expressions are read as they were defined.  The relcache has them with
 * constants folded: to ask it is to call the functions, as our caller, and then
 * not to see them.
 */
static bool
is_built_in(Relation index, Relation rel)
{
	for (int i = 0; i < index->rd_index->indnatts; i++)
	{
		AttrNumber	column = index->rd_index->indkey.values[i];

		if (i < index->rd_index->indnkeyatts &&
			index->rd_opfamily[i] >= FirstNormalObjectId)
			return false;
		if (column != InvalidAttrNumber &&
			TupleDescAttr(RelationGetDescr(rel), column - 1)->atttypid >= FirstNormalObjectId)
			return false;
	}
	return index->rd_rel->relam < FirstNormalObjectId &&
		!has_others_code(as_defined(index, Anum_pg_index_indexprs), NULL) &&
		!has_others_code(as_defined(index, Anum_pg_index_indpred), NULL);
}

/* A column of pg_index that holds expressions; NULL: it has none. */
static Node *
as_defined(Relation index, AttrNumber what)
{
	bool		isnull;
	Datum		value = SysCacheGetAttr(INDEXRELID, index->rd_indextuple, what,
										&isnull);
	Node	   *expressions;

	if (isnull)
		return NULL;
	expressions = stringToNode(TextDatumGetCString(value));
	fix_opfuncids(expressions);
	return expressions;
}

static bool
has_others_code(Node *node, void *context)
{
	if (node == NULL)
		return false;
	if (!IsA(node, List) &&
		(exprType(node) >= FirstNormalObjectId ||
		 check_functions_in_node(node, is_others_function, NULL)))
		return true;
	return expression_tree_walker(node, has_others_code, context);
}

static bool
is_others_function(Oid function, void *context)
{
	return function >= FirstNormalObjectId;
}

/* status = 'l' */
static bool
says_leased(Node *clause)
{
	return is_char_comparison(clause, F_CHAREQ, KEYS_STATUS, STATUS_LEASED);
}

/* key IS NOT NULL AND state <> 'p', each clause by itself */
static bool
says_holds_its_key(Node *clause)
{
	NullTest   *test = (NullTest *) clause;

	if (is_char_comparison(clause, F_CHARNE, OUTBOX_STATE, EVENT_PARKED))
		return true;
	return IsA(test, NullTest) && test->nulltesttype == IS_NOT_NULL &&
		IsA(test->arg, Var) && ((Var *) test->arg)->varattno == OUTBOX_KEY + 1;
}

static bool
is_char_comparison(Node *clause, Oid function, int column, char value)
{
	OpExpr	   *op = (OpExpr *) clause;
	Var		   *var;
	Const	   *constant;

	if (!IsA(op, OpExpr) || op->opfuncid != function)
		return false;
	var = linitial(op->args);
	constant = lsecond(op->args);
	return IsA(var, Var) && var->varattno == column + 1 &&
		IsA(constant, Const) && !constant->constisnull &&
		DatumGetChar(constant->constvalue) == value;
}

static bool
is_leased(const Datum *values)
{
	return DatumGetChar(values[KEYS_STATUS]) == STATUS_LEASED;
}

/* An event with an ordering key that waits for its turn, or has it. */
static bool
holds_its_key(const Datum *values, const bool *nulls)
{
	return !nulls[OUTBOX_KEY] &&
		DatumGetChar(values[OUTBOX_STATE]) != EVENT_PARKED;
}

/* Relcache callback: marks, and neither frees nor looks anything up. */
static void
forget_verdict(Datum arg, Oid relid)
{
	for (int i = 0; i < lengthof(own_tables); i++)
		forget_if_concerned(own_tables[i], relid);
	for (OwnTable *shard = shards; shard != NULL; shard = shard->next)
		forget_if_concerned(shard, relid);
}

static void
forget_if_concerned(OwnTable *table, Oid relid)
{
	bool		concerned = !OidIsValid(relid) || table->relid == relid;

	for (int n = 0; n < table->nindexes && !concerned; n++)
		concerned = table->found[n] == relid;
	if (concerned)
	{
		table->valid = false;
		table->changes++;
	}
}

static void
forget_verdicts(void)
{
	forget_verdict((Datum) 0, InvalidOid);
}

static void
not_as_made(OwnTable *table)
{
	ereport(ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("table \"idempotency.%s\" has been altered",
					table->name),
			 errhint("Remove what was added to the table (triggers, rules, row security, checks, partitions, columns that are NOT NULL, have a default or are of a domain, indexes with functions, operator classes or types that are not built in) and restore its own indexes, or create the extension again.")));
}
