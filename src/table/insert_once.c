/*-------------------------------------------------------------------------
 *
 * insert_once.c
 *		A row inserted once, judged by the caller's own unique index.
 *
 * Vocabulary.  The "members" are the names in the JSON object new_row: the
 * columns that the caller gives; every other column takes its default.  The
 * "conflict columns" are those of the unique index that decides.  A "shape"
 * is one relation with one set of members and one choice of conflict columns:
 * all that can be worked out once, and the two plans, hang on it.
 *
 * The steps are: look for the row; if there is none, INSERT ... ON CONFLICT
 * DO NOTHING, which waits for a rival transaction; if that met a conflict,
 * look again.  A row that is deleted in between starts the loop over.
 *
 * No row inserted: was it a conflict, or a trigger that returned NULL?  Only
 * the executor's own count tells (EXPLAIN ANALYZE shows it as "Conflicting
 * Tuples"), and so insert_row() drives the executor, as SPI does otherwise.
 * What was weighed against it: to insert again would fire the trigger twice,
 * which may have put the row elsewhere; a plain INSERT that is caught takes a
 * subtransaction for every row, and under SERIALIZABLE each replay would write.
 *
 * Everything runs as the caller: privileges, row security and triggers are
 * PostgreSQL's own.  All SQL is fully qualified, since a plan is parsed again
 * under the search_path that is in force by then.
 *
 *-------------------------------------------------------------------------
 */
#include "table/table.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/namespace.h"
#include "catalog/objectaddress.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_opclass.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "executor/instrument.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/plancache.h"
#include "utils/rls.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

/*
 * So many conflicts in a row with a row that is then not there: rivals that
 * delete it each time are not that quick, so a trigger changes the key.
 */
#define MAX_ROUNDS		100

/* what a kept plan's extra is here; its second plan is the INSERT */
typedef struct Shape
{
	TupleDesc	members;		/* the columns given, in new_row's order */
	Oid		   *types;			/* theirs, as the plans' parameters */
	TupleDesc	result;			/* (created, stored) */
	Oid			index;			/* the unique index that decides */
	char	   *index_name;
	bool		nulls_conflict; /* is it NULLS NOT DISTINCT? */
	bool		has_twin;		/* does another index decide alike? */
	int			nkeys;
	int		   *keys;			/* its columns, as positions in members */
	char	   *find_text;		/* SELECT by the conflict columns */
	char	   *insert_text;	/* INSERT ... ON CONFLICT DO NOTHING */
} Shape;

typedef enum InsertOutcome
{
	INSERT_CREATED,
	INSERT_CONFLICT,			/* the index held such a row */
	INSERT_SWALLOWED			/* a trigger returned NULL */
} InsertOutcome;

/* one call */
typedef struct InsertCall
{
	Relation	rel;
	KeptPlan   *kept;
	Shape	   *shape;			/* kept->extra */
	Datum	   *values;			/* of the members */
	bool	   *isnull;
	char	   *nulls;			/* the same as SPI has it */
	MemoryContext context;		/* holds what is returned */
	InsertOutcome outcome;		/* of the last INSERT */
	Datum		stored;			/* the row, when it was created or found */
} InsertCall;

/* Takes what the INSERT returns: the row, and whether it kept its key. */
typedef struct ReturnedRow
{
	DestReceiver pub;
	MemoryContext context;		/* for the copy */
	bool		seen;
	bool		key_kept;
	Datum		row;
} ReturnedRow;

static Relation open_target(Oid type);
static void collect_names(StringInfo names, ArrayType *conflict, Jsonb *new_row);
static KeptPlan *get_shape(Relation rel, StringInfo names);
static KeptPlan *build_shape(Relation rel, const PlanKey *key);
static AttrNumber column_number(Relation rel, const char *name);
static Relation choose_index(Relation rel, Bitmapset *members, Bitmapset *conflict);
static bool index_can_judge(Relation index);
static Bitmapset *index_columns(Relation index);
static bool has_twin(Relation rel, Oid chosen);
static bool decide_alike(Oid index, Oid other);
static void append_index(StringInfo buf, Relation rel, Relation index);
static void write_queries(Shape *shape, Relation rel, Relation index);
static void append_key_condition(StringInfo buf, const char *column, Oid type,
								 Relation index, int pos, int param,
								 bool nulls_conflict);
static char *qualified_name(Oid class, Oid object);
static void check_key_not_null(const InsertCall *call);
static bool insert_or_find(InsertCall *call, bool *found);
static bool find_row(InsertCall *call, bool must_exist);
static bool owner_sees_row(const InsertCall *call);
static InsertOutcome insert_beside_twin(InsertCall *call);
static bool twin_refused(const InsertCall *call, const ErrorData *error);
static void insert_row(void *arg);
static bool receive_row(TupleTableSlot *slot, DestReceiver *self);
static void receiver_startup(DestReceiver *self, int operation, TupleDesc desc);
static void receiver_nothing(DestReceiver *self);

PG_FUNCTION_INFO_V1(idempotency_insert_once);

/*
 * insert_once(target anyelement, new_row jsonb, conflict text[])
 *		RETURNS TABLE (created boolean, stored anyelement)
 *
 * Only target's type counts, so it must be NULL.  One row, always: a
 * set-returning function may return it as a plain value.
 */
Datum
idempotency_insert_once(PG_FUNCTION_ARGS)
{
	InsertCall	call = {
		.rel = open_target(get_fn_expr_argtype(fcinfo->flinfo, 0)),
		.context = CurrentMemoryContext
	};
	Jsonb	   *new_row = NULL;
	StringInfoData names;
	Datum		result;

	/* a row there was meant to be inserted, and would not be */
	if (!PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("target must be NULL"),
				 errhint("Write NULL::%s; the values of the row belong into new_row.",
						 RelationGetRelationName(call.rel))));
	if (!PG_ARGISNULL(1))
		new_row = PG_GETARG_JSONB_P(1);
	if (new_row == NULL || !JB_ROOT_IS_OBJECT(new_row))
		ereport(ERROR,
				(errcode(new_row == NULL ? ERRCODE_NULL_VALUE_NOT_ALLOWED :
						 ERRCODE_INVALID_PARAMETER_VALUE),
				 new_row == NULL ? errmsg("new_row must not be null") :
				 errmsg("new_row must be a JSON object"),
				 errhint("Give the columns of the row as a JSON object.")));

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");

	initStringInfo(&names);
	collect_names(&names, PG_ARGISNULL(2) ? NULL : PG_GETARG_ARRAYTYPE_P(2),
				  new_row);
	/* the plan is held: code of the caller's may drop it while it runs */
	call.kept = get_shape(call.rel, &names);
	call.shape = call.kept->extra;
	ik_hold_plan(call.kept);
	PG_TRY();
	{
		int			natts = call.shape->members->natts;
		Datum		columns[2] = {0};
		bool		nulls[2] = {false};
		bool		created;
		bool		found;

		call.values = palloc(natts * sizeof(Datum));
		call.isnull = palloc(natts * sizeof(bool));
		call.nulls = palloc(natts);
		ik_from_json(new_row, call.shape->members, call.values, call.isnull);
		for (int i = 0; i < natts; i++)
			call.nulls[i] = call.isnull[i] ? 'n' : ' ';
		check_key_not_null(&call);
		created = insert_or_find(&call, &found);
		columns[0] = BoolGetDatum(created);
		columns[1] = call.stored;
		/* swallowed by a trigger: neither inserted nor there */
		nulls[1] = !created && !found;
		ik_count(COUNT_INSERT_ONCE, created ? COUNT_DONE : COUNT_NOT_DONE);

		/* in the caller's memory: SPI's goes with SPI_finish() */
		MemoryContextSwitchTo(call.context);
		result = HeapTupleGetDatum(heap_form_tuple(call.shape->result, columns, nulls));
	}
	PG_FINALLY();
	{
		ik_release_plan(call.kept);
	}
	PG_END_TRY();

	SPI_finish();
	table_close(call.rel, NoLock);
	PG_RETURN_DATUM(result);
}

/*
 * Open the table whose row type this is.  The lock is that of the INSERT to come,
 * though a replay needs less: raised later, it would come to a deadlock with a
 * REINDEX that waits for the index which the look has used.  Where nothing is
 * written, as on a standby, it is the reader's.  It is kept, and makes sure that
 * what we know of the table is up to date.
 */
static Relation
open_target(Oid type)
{
	Oid			relid = OidIsValid(type) ? get_typ_typrelid(type) : InvalidOid;
	char		relkind = OidIsValid(relid) ? get_rel_relkind(relid) : '\0';

	/* PostgreSQL does not plan anew because a type in the plan is gone */
	if (OidIsValid(type) && !get_typisdefined(type))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("the table of target does not exist any more"),
				 errhint("The statement was planned before the table was dropped: prepare it anew, or use EXECUTE in PL/pgSQL.")));
	if (relkind != RELKIND_RELATION && relkind != RELKIND_PARTITIONED_TABLE)
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("type %s is not the row type of a table",
						OidIsValid(type) ? format_type_be(type) : "unknown"),
				 errhint("Write NULL::schema_name.table_name as the first argument.")));
	return ik_open_users_table(relid, XactReadOnly || RecoveryInProgress() ?
							   AccessShareLock : RowExclusiveLock);
}

/*
 * What tells one shape of a relation from another, as bytes: how many names
 * conflict has (-1: it is NULL), these, and the member names, each with its
 * terminator.  jsonb sorts its keys, so equal sets give equal bytes.  Those of
 * a guarded update (update.c) begin otherwise.
 */
static void
collect_names(StringInfo names, ArrayType *conflict, Jsonb *new_row)
{
	int			nconflict = -1;
	Datum	   *elems = NULL;
	bool	   *elem_nulls = NULL;
	JsonbIterator *it;
	JsonbIteratorToken token;
	JsonbValue	value;

	/* the names in conflict */
	if (conflict != NULL)
	{
		deconstruct_array(conflict, TEXTOID, -1, false, TYPALIGN_INT,
						  &elems, &elem_nulls, &nconflict);
		if (nconflict == 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("conflict must not be empty"),
					 errhint("Name the columns of a unique index, or pass NULL.")));
		/* each is looked for among the columns, and the plan keeps them all */
		if (nconflict > INDEX_MAX_KEYS)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("conflict has more than %d names", INDEX_MAX_KEYS),
					 errhint("A unique index has no more columns: name each of them once.")));
	}
	appendBinaryStringInfo(names, (char *) &nconflict, sizeof(int));
	for (int i = 0; i < nconflict; i++)
	{
		if (elem_nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("conflict must not contain null"),
					 errhint("Name the columns of a unique index, or pass NULL.")));
		appendStringInfoString(names, TextDatumGetCString(elems[i]));
		appendStringInfoChar(names, '\0');
	}

	/* the names in new_row */
	it = JsonbIteratorInit(&new_row->root);
	while ((token = JsonbIteratorNext(&it, &value, true)) != WJB_DONE)
	{
		if (token == WJB_KEY)
		{
			appendBinaryStringInfo(names, value.val.string.val,
								   value.val.string.len);
			appendStringInfoChar(names, '\0');
		}
	}
}

static KeptPlan *
get_shape(Relation rel, StringInfo names)
{
	PlanKey		key = {RelationGetRelid(rel), names->len, names->data};
	KeptPlan   *kept = ik_find_plan(&key);

	return kept != NULL ? kept : build_shape(rel, &key);
}

/*
 * Work out a shape: which columns, which index, what queries.  All errors
 * about names and indexes come from here, before anything is written.
 */
static KeptPlan *
build_shape(Relation rel, const PlanKey *key)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext,
												  "idempotency plan",
												  ALLOCSET_SMALL_SIZES);
	MemoryContext oldcontext = MemoryContextSwitchTo(context);
	Shape	   *shape = palloc0(sizeof(Shape));
	const char *name = key->data;
	const char *end = name + key->len;
	int			nconflict;
	Bitmapset  *conflict = NULL;
	Bitmapset  *given = NULL;
	List	   *members = NIL;
	ListCell   *lc;
	Relation	index;
	KeptPlan   *kept;

	/* conflict columns, then members, as collect_names wrote them */
	memcpy(&nconflict, name, sizeof(int));
	name += sizeof(int);
	for (int i = 0; i < nconflict; i++, name += strlen(name) + 1)
		conflict = bms_add_member(conflict, column_number(rel, name));
	for (; name < end; name += strlen(name) + 1)
		members = lappend_int(members, column_number(rel, name));

	/* the members, as the plans' parameters */
	shape->members = CreateTemplateTupleDesc(list_length(members));
	shape->types = palloc(list_length(members) * sizeof(Oid));
	foreach(lc, members)
	{
		int			pos = foreach_current_index(lc);
		Form_pg_attribute att = TupleDescAttr(RelationGetDescr(rel),
											  lfirst_int(lc) - 1);

		given = bms_add_member(given, att->attnum);
		TupleDescInitEntry(shape->members, pos + 1, NameStr(att->attname),
						   att->atttypid, att->atttypmod, att->attndims);
		TupleDescInitEntryCollation(shape->members, pos + 1, att->attcollation);
		shape->types[pos] = att->atttypid;
	}
	TupleDescFinalize(shape->members);

	/* the index, whose columns are all among them */
	index = choose_index(rel, given, conflict);
	shape->index = RelationGetRelid(index);
	shape->index_name = pstrdup(RelationGetRelationName(index));
	shape->nulls_conflict = index->rd_index->indnullsnotdistinct;
	shape->has_twin = has_twin(rel, shape->index);
	shape->nkeys = index->rd_index->indnkeyatts;
	shape->keys = palloc(shape->nkeys * sizeof(int));
	for (int i = 0; i < shape->nkeys; i++)
		for (int pos = 0; pos < list_length(members); pos++)
			if (list_nth_int(members, pos) == index->rd_index->indkey.values[i])
				shape->keys[i] = pos;

	/* what insert_once() returns */
	shape->result = CreateTemplateTupleDesc(2);
	TupleDescInitEntry(shape->result, 1, "created", BOOLOID, -1, 0);
	TupleDescInitEntry(shape->result, 2, "stored", rel->rd_rel->reltype, -1, 0);
	TupleDescFinalize(shape->result);
	BlessTupleDesc(shape->result);

	write_queries(shape, rel, index);
	index_close(index, NoLock);

	MemoryContextSwitchTo(oldcontext);
	kept = ik_keep_plan(key, context, shape->find_text, shape->members->natts,
						shape->types);
	kept->extra = shape;
	return kept;
}

/* The number of a live user column; error 42703 if there is none. */
static AttrNumber
column_number(Relation rel, const char *name)
{
	TupleDesc	desc = RelationGetDescr(rel);

	/* not get_attnum(), for which 63 bytes of a long name are enough */
	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);

		if (!att->attisdropped && strcmp(NameStr(att->attname), name) == 0)
			return att->attnum;
	}
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_COLUMN),
			 errmsg("column \"%s\" of relation \"%s\" does not exist",
					name, RelationGetRelationName(rel)),
			 errhint("The names in new_row and conflict are those of the table's columns, in their case.")));
	return InvalidAttrNumber;	/* keep the compiler quiet */
}

/*
 * The unique index that decides, open: the one on exactly the conflict
 * columns, or, if conflict is NULL, the only one whose columns are all given.
 * Error 42P10 if there is none, or without conflict several.
 *
 * Of several on the same columns, as there are while one index takes another's
 * place, the first will do: the INSERT names collations and operator classes
 * too, so that only an index with the same notion of equality is inferred
 * beside it.
 */
static Relation
choose_index(Relation rel, Bitmapset *members, Bitmapset *conflict)
{
	List	   *oids = RelationGetIndexList(rel);
	ListCell   *lc;
	Relation	chosen = NULL;
	bool		ambiguous = false;
	StringInfoData usable;
	StringInfoData fit;

	/* of those that can judge, the ones that fit, and names for the messages */
	initStringInfo(&usable);
	initStringInfo(&fit);
	foreach(lc, oids)
	{
		Relation	index = index_open(lfirst_oid(lc), AccessShareLock);
		Bitmapset  *columns = index_columns(index);

		if (index_can_judge(index))
		{
			append_index(&usable, rel, index);
			/* named: exactly these; not named: all that it needs is given */
			if (conflict != NULL ? bms_equal(columns, conflict) : bms_is_subset(columns, members))
			{
				append_index(&fit, rel, index);
				if (chosen == NULL)
				{
					chosen = index;
					continue;
				}
				/* a twin decides alike; one on other columns may not */
				if (!bms_equal(columns, index_columns(chosen)))
					ambiguous = true;
			}
		}
		index_close(index, NoLock);
	}

	if (chosen == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_COLUMN_REFERENCE),
				 conflict != NULL ?
				 errmsg("no unique index of table \"%s\" is on exactly the columns in conflict",
						RelationGetRelationName(rel)) :
				 errmsg("no unique index of table \"%s\" has all its columns in new_row",
						RelationGetRelationName(rel)),
				 usable.len > 0 ?
				 errdetail("Unique indexes that can decide: %s.", usable.data) :
				 errdetail("The table has no unique index that is valid, not partial, not on expressions and not deferrable."),
				 errhint("Give all columns of such an index, or create one.")));
	if (ambiguous)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_COLUMN_REFERENCE),
				 errmsg("several unique indexes of table \"%s\" have all their columns in new_row",
						RelationGetRelationName(rel)),
				 errdetail("Unique indexes that can decide: %s.", fit.data),
				 errhint("Name the columns of one of them in conflict.")));
	/* named, but a value is missing: a row cannot be looked for by a default */
	if (!bms_is_subset(index_columns(chosen), members))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_COLUMN_REFERENCE),
				 errmsg("a column in conflict is not in new_row"),
				 errdetail("The unique index is %s.", fit.data),
				 errhint("Give the value of each conflict column; a default cannot be compared.")));
	return chosen;
}

/* Can ON CONFLICT infer this index from column names alone? */
static bool
index_can_judge(Relation index)
{
	Form_pg_index form = index->rd_index;

	return form->indisunique &&
		form->indisvalid &&
		form->indimmediate &&
		!form->indisexclusion &&	/* WITHOUT OVERLAPS */
		index->rd_rel->relam == BTREE_AM_OID &&
		RelationGetIndexExpressions(index) == NIL &&
		RelationGetIndexPredicate(index) == NIL;
}

/* The numbers of an index's key columns; INCLUDE columns are none. */
static Bitmapset *
index_columns(Relation index)
{
	Bitmapset  *columns = NULL;

	for (int i = 0; i < index->rd_index->indnkeyatts; i++)
		columns = bms_add_member(columns, index->rd_index->indkey.values[i]);
	return columns;
}

/*
 * Does another index of the table decide as the chosen one does?  Also one that
 * is not valid yet: REINDEX CONCURRENTLY builds such.
 */
static bool
has_twin(Relation rel, Oid chosen)
{
	List	   *oids = RelationGetIndexList(rel);
	ListCell   *lc;

	foreach(lc, oids)
		if (lfirst_oid(lc) != chosen && decide_alike(lfirst_oid(lc), chosen))
			return true;
	return false;
}

/* Are both unique over the same columns, by the same equality? */
static bool
decide_alike(Oid one, Oid other)
{
	Relation	a = index_open(one, AccessShareLock);
	Relation	b = index_open(other, AccessShareLock);
	bool		alike = a->rd_index->indisunique &&
		a->rd_index->indimmediate &&
		a->rd_rel->relam == b->rd_rel->relam &&
		RelationGetIndexPredicate(a) == NIL &&
		bms_equal(index_columns(a), index_columns(b));

	for (int i = 0; i < a->rd_index->indnkeyatts && alike; i++)
		for (int j = 0; j < b->rd_index->indnkeyatts; j++)
			if (a->rd_index->indkey.values[i] == b->rd_index->indkey.values[j])
				alike = a->rd_opfamily[i] == b->rd_opfamily[j] &&
					a->rd_indcollation[i] == b->rd_indcollation[j];
	index_close(a, NoLock);
	index_close(b, NoLock);
	return alike;
}

/* Append "name (columns)" of an index to a list for a message. */
static void
append_index(StringInfo buf, Relation rel, Relation index)
{
	appendStringInfo(buf, "%s%s (", buf->len > 0 ? ", " : "",
					 quote_identifier(RelationGetRelationName(index)));
	for (int i = 0; i < index->rd_index->indnkeyatts; i++)
		appendStringInfo(buf, "%s%s", i > 0 ? ", " : "",
						 ik_quoted_column(rel, index->rd_index->indkey.values[i]));
	appendStringInfoChar(buf, ')');
}

/*
 * Write both queries.  Parameter $n is the n-th member.
 *
 *	SELECT (t.*)::s.r FROM [ONLY] s.r AS t WHERE t.k = $1 ...
 *	INSERT INTO s.r AS t (k, ...) VALUES ($1, ...)
 *		ON CONFLICT (k COLLATE c opclass, ...) DO NOTHING
 *		RETURNING (t.*)::s.r, t.k = $1 ...
 *
 * The cast makes t.* one value also where a column is named t.  ONLY, because
 * a unique index knows nothing of inheritance children.
 */
static void
write_queries(Shape *shape, Relation rel, Relation index)
{
	char	   *table = ik_quoted_name(rel);
	oidvector  *opclasses;
	Datum		datum;
	bool		isnull;
	StringInfoData columns;
	StringInfoData params;
	StringInfoData target;
	StringInfoData condition;

	datum = SysCacheGetAttr(INDEXRELID, index->rd_indextuple,
							Anum_pg_index_indclass, &isnull);
	Assert(!isnull);
	opclasses = (oidvector *) DatumGetPointer(datum);

	/* what is inserted */
	initStringInfo(&columns);
	initStringInfo(&params);
	for (int i = 0; i < shape->members->natts; i++)
	{
		const char *sep = i > 0 ? ", " : "";

		appendStringInfo(&columns, "%s%s", sep,
						 quote_identifier(NameStr(TupleDescAttr(shape->members, i)->attname)));
		appendStringInfo(&params, "%s$%d", sep, i + 1);
	}

	/* what decides, and how the row is found by it */
	initStringInfo(&target);
	initStringInfo(&condition);
	for (int i = 0; i < shape->nkeys; i++)
	{
		Form_pg_attribute att = TupleDescAttr(shape->members, shape->keys[i]);
		const char *column = quote_identifier(NameStr(att->attname));

		appendStringInfo(&target, "%s%s", i > 0 ? ", " : "", column);
		if (OidIsValid(index->rd_indcollation[i]))
			appendStringInfo(&target, " COLLATE %s",
							 qualified_name(CollationRelationId, index->rd_indcollation[i]));
		appendStringInfo(&target, " %s",
						 qualified_name(OperatorClassRelationId, opclasses->values[i]));

		if (i > 0)
			appendStringInfoString(&condition, " AND ");
		append_key_condition(&condition, column, att->atttypid, index, i,
							 shape->keys[i] + 1, shape->nulls_conflict);
	}

	shape->find_text =
		psprintf("SELECT (t.*)::%s FROM %s%s AS t WHERE %s",
				 table,
				 rel->rd_rel->relkind == RELKIND_RELATION ? "ONLY " : "",
				 table, condition.data);
	shape->insert_text =
		psprintf("INSERT INTO %s AS t (%s) VALUES (%s) "
				 "ON CONFLICT (%s) DO NOTHING RETURNING (t.*)::%s, %s",
				 table, columns.data, params.data,
				 target.data, table, condition.data);
}

/*
 * Append "t.column = $param" as the index means it: with the equality of its
 * operator class and its collation, and NULL equal to NULL if it says so.
 */
static void
append_key_condition(StringInfo buf, const char *column, Oid type,
					 Relation index, int pos, int param, bool nulls_conflict)
{
	Oid			opcintype = index->rd_opcintype[pos];
	Oid			collation = index->rd_indcollation[pos];
	Oid			op = get_opfamily_member(index->rd_opfamily[pos], opcintype,
										 opcintype, BTEqualStrategyNumber);
	char	   *left = psprintf("t.%s", column);
	char	   *right = psprintf("$%d", param);

	if (!OidIsValid(op))
		elog(ERROR, "missing equality operator for type %u in index \"%s\"",
			 opcintype, RelationGetRelationName(index));

	appendStringInfoChar(buf, '(');
	ik_append_equality(buf, left, op, right, type);
	if (OidIsValid(collation))
		appendStringInfo(buf, " COLLATE %s",
						 qualified_name(CollationRelationId, collation));
	if (nulls_conflict)
		appendStringInfo(buf, " OR (%s IS NULL AND %s IS NULL)", left, right);
	appendStringInfoChar(buf, ')');
}

/* The qualified name of a collation, or of an operator class of btree. */
static char *
qualified_name(Oid class, Oid object)
{
	static const char method[] = " USING btree";
	ObjectAddress address;
	char	   *name;

	ObjectAddressSet(address, class, object);
	name = getObjectIdentity(&address, false);
	if (class == OperatorClassRelationId)
		name[strlen(name) - strlen(method)] = '\0';
	return name;
}

/*
 * A NULL in a conflict column never meets a conflict, so that the second call
 * would insert a second row: refuse it, unless the index treats NULLs alike.
 */
static void
check_key_not_null(const InsertCall *call)
{
	const Shape *shape = call->shape;

	for (int i = 0; i < shape->nkeys && !shape->nulls_conflict; i++)
	{
		if (call->isnull[shape->keys[i]])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("conflict column \"%s\" must not be null",
							NameStr(TupleDescAttr(shape->members, shape->keys[i])->attname)),
					 errdetail("Unique index \"%s\" lets any number of nulls in.",
							   shape->index_name),
					 errhint("Give a value, or declare the index NULLS NOT DISTINCT.")));
	}
}

/*
 * Insert the row and return true, or find the one that is there and return
 * false; *found is false if there is none because a trigger swallowed it.
 *
 * The look comes first, so that a replay writes nothing, fires no trigger,
 * takes no sequence value and works in a read-only transaction.  Not under
 * SERIALIZABLE, where a look that finds nothing would make two inserts of
 * different rows fail with 40001.
 */
static bool
insert_or_find(InsertCall *call, bool *found)
{
	*found = true;
	for (int round = 0; round < MAX_ROUNDS; round++)
	{
		InsertOutcome outcome;

		CHECK_FOR_INTERRUPTS();
		if ((round > 0 || !IsolationIsSerializable() || XactReadOnly) &&
			find_row(call, round > 0))
			return false;

		/* the plan takes a writer's lock, which recovery has none of */
		PreventCommandDuringRecovery("INSERT");
		LockRelationOid(RelationGetRelid(call->rel), RowExclusiveLock);
		if (!SPI_plan_is_valid(call->kept->plan))
			call->shape->has_twin = has_twin(call->rel, call->shape->index);

		if (call->shape->has_twin)
			outcome = insert_beside_twin(call);
		else
		{
			insert_row(call);
			outcome = call->outcome;
		}
		if (outcome == INSERT_CREATED)
			return true;
		if (outcome == INSERT_SWALLOWED)
		{
			/* unless it was there, or the trigger put it there */
			*found = find_row(call, false);
			return false;
		}
	}
	ereport(ERROR,
			(errcode(ERRCODE_TRIGGERED_DATA_CHANGE_VIOLATION),
			 errmsg("could not find the row that conflicts with the new row of table \"%s\"",
					RelationGetRelationName(call->rel)),
			 errdetail("Unique index \"%s\" reported a conflict, but no row has the values given.",
					   call->shape->index_name),
			 errhint("A trigger must not change the conflict columns; give them as they are stored.")));
	return false;				/* keep the compiler quiet */
}

/*
 * Look for the row under a fresh snapshot (under REPEATABLE READ, the
 * transaction's) as the caller.  must_exist says that the index reported a
 * conflict: then a row that only the owner sees in the same snapshot is hidden
 * by row security, and that is an error.
 */
static bool
find_row(InsertCall *call, bool must_exist)
{
	bool		found;
	int			rc;

	/* what this statement has done so far counts */
	CommandCounterIncrement();
	PushActiveSnapshot(GetTransactionSnapshot());
	rc = SPI_execute_plan(call->kept->plan, call->values, call->nulls, true, 1);
	if (rc != SPI_OK_SELECT)
		elog(ERROR, "SPI_execute_plan failed: %s", SPI_result_code_string(rc));
	found = SPI_processed > 0;
	if (found)
	{
		bool		null;
		Datum		row = SPI_getbinval(SPI_tuptable->vals[0],
										SPI_tuptable->tupdesc, 1, &null);
		MemoryContext oldcontext = MemoryContextSwitchTo(call->context);

		Assert(!null);
		call->stored = datumCopy(row, false, -1);
		MemoryContextSwitchTo(oldcontext);
	}
	SPI_freetuptable(SPI_tuptable);

	if (!found && must_exist &&
		check_enable_rls(RelationGetRelid(call->rel), InvalidOid, true) == RLS_ENABLED &&
		owner_sees_row(call))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("row-level security hides the row that conflicts with the new row of table \"%s\"",
						RelationGetRelationName(call->rel)),
				 errdetail("Unique index \"%s\" reported the conflict.",
						   call->shape->index_name),
				 errhint("Use another key, or a role that may see the row.")));
	PopActiveSnapshot();
	return found;
}

/*
 * Is the row there for the table's owner, past the policies?  Under the active
 * snapshot.  ri_triggers.c looks so.  Nothing of the caller's runs
 * here: the values are converted, and the operators are those of an index.
 *
 * Not by the kept plan: where the caller is the owner and row security is
 * forced on him, that one holds the policies.
 */
static bool
owner_sees_row(const InsertCall *call)
{
	const Shape *shape = call->shape;
	SavedUser	caller;
	int			rc;

	ik_become_owner(call->rel, SECURITY_NOFORCE_RLS, &caller);
	rc = SPI_execute_with_args(shape->find_text, shape->members->natts,
							   shape->types, call->values, call->nulls, true, 1);
	ik_become_caller(&caller);
	if (rc != SPI_OK_SELECT)
		elog(ERROR, "SPI_execute_with_args failed: %s", SPI_result_code_string(rc));
	return SPI_processed > 0;
}

/*
 * ON CONFLICT asks the valid indexes beforehand, and takes what an index that is
 * still being built says for an error.  While there is such a one (or two valid
 * ones) that error is caught, at the price of a subtransaction.
 *
 * A twin that comes meanwhile does no harm: none is written to before those
 * transactions have ended that hold a writer's lock on the table, as we do, and
 * do not know of it.
 */
static InsertOutcome
insert_beside_twin(InsertCall *call)
{
	ErrorData  *error = ik_try(insert_row, call);

	if (error == NULL)
		return call->outcome;
	if (!twin_refused(call, error))
		ReThrowError(error);
	FreeErrorData(error);
	return INSERT_CONFLICT;
}

static bool
twin_refused(const InsertCall *call, const ErrorData *error)
{
	Oid			index;

	if (error->sqlerrcode != ERRCODE_UNIQUE_VIOLATION ||
		error->schema_name == NULL || error->constraint_name == NULL)
		return false;
	index = get_relname_relid(error->constraint_name,
							  get_namespace_oid(error->schema_name, true));
	return list_member_oid(RelationGetIndexList(call->rel), index) &&
		decide_alike(index, call->shape->index);
}

/*
 * Run the INSERT as the caller.  call->outcome tells what became of it; if it
 * created the row, call->stored is what RETURNING gave.
 */
static void
insert_row(void *arg)
{
	InsertCall *call = arg;
	Shape	   *shape = call->shape;
	int			natts = shape->members->natts;
	ParamListInfo params = makeParamList(natts);
	ReturnedRow returned = {
		.pub = {
			.receiveSlot = receive_row,
			.rStartup = receiver_startup,
			.rShutdown = receiver_nothing,
			.rDestroy = receiver_nothing,
			.mydest = DestNone
		},
		.context = call->context
	};
	CachedPlan *cplan;
	QueryDesc  *query;
	bool		conflict;

	/* not all that find a row also insert one: prepared when it is needed */
	if (call->kept->second == NULL)
	{
		SPIPlanPtr	plan = ik_prepare(shape->insert_text, natts, shape->types);

		SPI_keepplan(plan);
		call->kept->second = plan;
	}

	for (int i = 0; i < natts; i++)
	{
		params->params[i].value = call->values[i];
		params->params[i].isnull = call->isnull[i];
		params->params[i].pflags = PARAM_FLAG_CONST;
		params->params[i].ptype = shape->types[i];
	}

	/* as SPI does it */
	CommandCounterIncrement();
	PushActiveSnapshot(GetTransactionSnapshot());
	cplan = SPI_plan_get_cached_plan(call->kept->second);
	query = CreateQueryDesc(linitial_node(PlannedStmt, cplan->stmt_list),
							shape->insert_text, GetActiveSnapshot(),
							InvalidSnapshot, &returned.pub, params, NULL,
							INSTRUMENT_ROWS);
	ExecutorStart(query, 0);
	compat_ExecutorRun(query, ForwardScanDirection, 0);
	ExecutorFinish(query);
	Assert(IsA(query->planstate, ModifyTableState));
	conflict = query->planstate->instrument->ntuples2 > 0;
	ExecutorEnd(query);
	FreeQueryDesc(query);
	ReleaseCachedPlan(cplan, CurrentResourceOwner);
	PopActiveSnapshot();

	call->outcome = returned.seen ? INSERT_CREATED :
		conflict ? INSERT_CONFLICT : INSERT_SWALLOWED;
	if (!returned.seen)
		return;

	if (!returned.key_kept)
		ereport(ERROR,
				(errcode(ERRCODE_TRIGGERED_DATA_CHANGE_VIOLATION),
				 errmsg("a trigger of table \"%s\" changed the columns by which the row is found again",
						RelationGetRelationName(call->rel)),
				 errdetail("They are those of unique index \"%s\".",
						   shape->index_name),
				 errhint("Give them as they are stored.")));
	CommandCounterIncrement();
	call->stored = returned.row;
}

/* Keep the one row that RETURNING gives. */
static bool
receive_row(TupleTableSlot *slot, DestReceiver *self)
{
	ReturnedRow *returned = (ReturnedRow *) self;
	MemoryContext oldcontext;

	slot_getallattrs(slot);
	Assert(!slot->tts_isnull[0]);
	oldcontext = MemoryContextSwitchTo(returned->context);
	returned->row = datumCopy(slot->tts_values[0], false, -1);
	MemoryContextSwitchTo(oldcontext);
	returned->key_kept = !slot->tts_isnull[1] && DatumGetBool(slot->tts_values[1]);
	returned->seen = true;
	return true;
}

static void
receiver_startup(DestReceiver *self, int operation, TupleDesc desc)
{
}

static void
receiver_nothing(DestReceiver *self)
{
}
