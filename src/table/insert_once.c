/*-------------------------------------------------------------------------
 *
 * insert_once.c
 *		A row inserted once, judged by the caller's own unique index.
 *
 * Vocabulary.  The "members" are the keys of the JSON object new_row: the
 * columns that the caller gives; every other column takes its default.  The
 * "conflict columns" are those of the unique index that decides.  A "shape"
 * is one relation with one set of members and one choice of conflict columns:
 * whatever can be worked out once, and the two plans, hang on it.
 *
 * The steps are: look for the row; if there is none, INSERT ... ON CONFLICT
 * DO NOTHING, which waits for a rival transaction; if that met a conflict,
 * look again.  A row that is deleted in between starts the loop over.
 *
 * Everything runs as the caller: privileges, row security and triggers are
 * PostgreSQL's own.  All SQL is fully qualified, since a plan is parsed again
 * under whatever search_path is in force by then.
 *
 * Memory: each shape has a context of its own under CacheMemoryContext.  A
 * shape is found by a hash table, in use by calls (use_count, for a trigger
 * of the table may call insert_once itself), and freed when it is neither.
 * The find plan tells whether a shape is out of date: PostgreSQL invalidates
 * it at any change of the table, its indexes or its name (ri_triggers.c
 * relies on the same).
 *
 *-------------------------------------------------------------------------
 */
#include "table/table.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_opclass.h"
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "executor/executor.h"
#include "executor/instrument.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/plancache.h"
#include "utils/rel.h"
#include "utils/rls.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

/* So many shapes are kept; the next one empties the table. */
#define MAX_SHAPES		200

/*
 * So many conflicts in a row with a row that is then not there: rivals that
 * delete it each time are not that quick, so a trigger changes the key.
 */
#define MAX_ROUNDS		100

typedef struct ShapeKey
{
	Oid			relid;
	uint32		hash;			/* of the names */
} ShapeKey;

typedef struct Shape
{
	MemoryContext context;		/* holds all of this */
	Oid			relid;
	char	   *names;			/* conflict and members, see collect_names */
	int			names_len;
	TupleDesc	members;		/* the columns given, in new_row's order */
	Oid		   *types;			/* theirs, as the plans' parameters */
	TupleDesc	result;			/* (created, stored) */
	char	   *index_name;		/* the unique index that decides */
	bool		nulls_conflict; /* is it NULLS NOT DISTINCT? */
	int			nkeys;
	int		   *keys;			/* its columns, as positions in members */
	char	   *find_text;		/* SELECT by the conflict columns */
	SPIPlanPtr	find;			/* the same */
	char	   *insert_text;	/* INSERT ... ON CONFLICT DO NOTHING */
	SPIPlanPtr	insert;			/* the same; NULL until it is needed */
	int			use_count;		/* calls that are using it now */
	bool		listed;			/* is it in the hash table? */
} Shape;

typedef struct ShapeEntry
{
	ShapeKey	key;
	Shape	   *shape;
} ShapeEntry;

typedef enum InsertOutcome
{
	INSERT_CREATED,
	INSERT_CONFLICT,			/* the index held such a row */
	INSERT_SWALLOWED			/* a trigger returned NULL */
} InsertOutcome;

/* Takes what the INSERT returns: the row, and whether it kept its key. */
typedef struct ReturnedRow
{
	DestReceiver pub;
	MemoryContext context;		/* for the copy */
	bool		seen;
	bool		key_kept;
	Datum		row;
} ReturnedRow;

static HTAB *shapes = NULL;

static Relation open_target(Oid type);
static void collect_names(StringInfo names, ArrayType *conflict, Jsonb *new_row);
static Shape *get_shape(Relation rel, StringInfo names);
static void drop_all_shapes(void);
static void unlist_shape(ShapeEntry *entry);
static void free_unused_shape(Shape *shape);
static Shape *build_shape(Relation rel, StringInfo names);
static AttrNumber column_number(Relation rel, const char *name);
static Relation choose_index(Relation rel, Bitmapset *members, Bitmapset *conflict);
static bool index_can_judge(Relation index);
static Bitmapset *index_columns(Relation index);
static void append_index(StringInfo buf, Relation rel, Relation index);
static void write_queries(Shape *shape, Relation rel, Relation index);
static void append_key_condition(StringInfo buf, const char *column, Oid type,
								 Relation index, int pos, int param,
								 bool nulls_conflict);
static char *collation_name(Oid collation);
static char *opclass_name(Oid opclass);
static void check_key_not_null(Shape *shape, bool *isnull);
static bool insert_or_find(Shape *shape, Relation rel, Datum *values, bool *isnull,
						   MemoryContext context, Datum *stored, bool *found);
static bool find_row(Shape *shape, Relation rel, Datum *values, bool *isnull,
					 bool must_exist, MemoryContext context, Datum *stored);
static bool owner_sees_row(Shape *shape, Relation rel, Datum *values, char *nulls);
static InsertOutcome insert_row(Shape *shape, Relation rel, Datum *values, bool *isnull,
								MemoryContext context, Datum *stored);
static bool receive_row(TupleTableSlot *slot, DestReceiver *self);
static void receiver_startup(DestReceiver *self, int operation, TupleDesc desc);
static void receiver_nothing(DestReceiver *self);

PG_FUNCTION_INFO_V1(idempotency_insert_once);

/*
 * insert_once(target anyelement, new_row jsonb, conflict text[] DEFAULT NULL)
 *		RETURNS TABLE (created boolean, stored anyelement)
 *
 * Inserts new_row into the table whose row type target has, or returns the
 * row that was there, as it is now.  Only target's type counts, so it must be
 * NULL.  conflict names the columns of the unique index that decides; NULL
 * means the only one whose columns all stand in new_row.
 *
 * One row, always: a set-returning function may return it as a plain value.
 * stored is NULL if a trigger swallowed the insert.
 *
 * Errors: 42809 target is not a table's row type; 42P01 it was dropped; 22023
 * target is a value, new_row is no object; 22004 a NULL argument, element of
 * conflict, or conflict column; 42703 unknown column; 42P10 no or several
 * unique indexes; 42501 the row is hidden by row security; 27000 a trigger
 * changed the conflict columns; and whatever INSERT raises.
 */
Datum
idempotency_insert_once(PG_FUNCTION_ARGS)
{
	Relation	rel = open_target(get_fn_expr_argtype(fcinfo->flinfo, 0));
	MemoryContext context = CurrentMemoryContext;
	Jsonb	   *new_row;
	StringInfoData names;
	Shape	   *volatile shape;
	Datum		result;

	if (!PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("target must be NULL"),
				 errhint("Write NULL::%s; the values of the row belong into new_row.",
						 RelationGetRelationName(rel))));
	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("new_row must not be NULL"),
				 errhint("Give the columns of the row as a JSON object.")));
	new_row = PG_GETARG_JSONB_P(1);
	if (!JB_ROOT_IS_OBJECT(new_row))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("new_row must be a JSON object"),
				 errhint("Give the columns of the row as a JSON object.")));

	if (SPI_connect() != SPI_OK_CONNECT)
		elog(ERROR, "SPI_connect failed");

	initStringInfo(&names);
	collect_names(&names, PG_ARGISNULL(2) ? NULL : PG_GETARG_ARRAYTYPE_P(2),
				  new_row);
	shape = get_shape(rel, &names);
	shape->use_count++;
	PG_TRY();
	{
		Datum	   *values = palloc(shape->members->natts * sizeof(Datum));
		bool	   *isnull = palloc(shape->members->natts * sizeof(bool));
		Datum		columns[2] = {0};
		bool		nulls[2] = {false};
		bool		created;
		bool		found;

		ik_from_json(new_row, shape->members, values, isnull);
		check_key_not_null(shape, isnull);
		created = insert_or_find(shape, rel, values, isnull, context,
								 &columns[1], &found);
		columns[0] = BoolGetDatum(created);
		nulls[1] = !created && !found;

		MemoryContextSwitchTo(context);
		result = HeapTupleGetDatum(heap_form_tuple(shape->result, columns, nulls));
	}
	PG_FINALLY();
	{
		shape->use_count--;
		free_unused_shape(shape);
	}
	PG_END_TRY();

	SPI_finish();
	table_close(rel, NoLock);
	PG_RETURN_DATUM(result);
}

/*
 * Open the table whose row type this is.  The lock is the reader's, as far as
 * a replay needs one (it must work on a standby); it is kept, and makes sure
 * that what we know of the table is up to date.
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
	return ik_open_users_table(relid, AccessShareLock);
}

/*
 * What tells one shape of a relation from another, as bytes: how many names
 * conflict has (-1: it is NULL), these, and the member names, each with its
 * terminator.  jsonb sorts its keys, so equal sets give equal bytes.
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

	if (conflict != NULL)
	{
		deconstruct_array(conflict, TEXTOID, -1, false, TYPALIGN_INT,
						  &elems, &elem_nulls, &nconflict);
		if (nconflict == 0)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("conflict must not be empty"),
					 errhint("Name the columns of a unique index, or pass NULL.")));
	}
	appendBinaryStringInfo(names, (char *) &nconflict, sizeof(int));
	for (int i = 0; i < nconflict; i++)
	{
		if (elem_nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("conflict must not contain NULL"),
					 errhint("Name the columns of a unique index, or pass NULL.")));
		appendStringInfoString(names, TextDatumGetCString(elems[i]));
		appendStringInfoChar(names, '\0');
	}

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

/*
 * The shape for these names, from the table if it is there and up to date.
 */
static Shape *
get_shape(Relation rel, StringInfo names)
{
	ShapeKey	key = {
		.relid = RelationGetRelid(rel),
		.hash = hash_bytes((unsigned char *) names->data, names->len)
	};
	ShapeEntry *entry;
	Shape	   *shape;

	if (shapes == NULL)
	{
		HASHCTL		ctl = {
			.keysize = sizeof(ShapeKey),
			.entrysize = sizeof(ShapeEntry)
		};

		shapes = hash_create("idempotency insert_once shapes", 32, &ctl,
							 HASH_ELEM | HASH_BLOBS);
	}

	entry = hash_search(shapes, &key, HASH_FIND, NULL);
	if (entry != NULL)
	{
		shape = entry->shape;
		if (shape->names_len == names->len &&
			memcmp(shape->names, names->data, names->len) == 0 &&
			SPI_plan_is_valid(shape->find))
			return shape;
		unlist_shape(entry);
	}

	shape = build_shape(rel, names);

	if (hash_get_num_entries(shapes) >= MAX_SHAPES)
		drop_all_shapes();
	entry = hash_search(shapes, &key, HASH_ENTER, NULL);
	entry->shape = shape;
	shape->listed = true;
	return shape;
}

/* Empty the table of shapes: tables come and go, names are the caller's. */
static void
drop_all_shapes(void)
{
	HASH_SEQ_STATUS scan;
	ShapeEntry *entry;

	hash_seq_init(&scan, shapes);
	while ((entry = hash_seq_search(&scan)) != NULL)
		unlist_shape(entry);
}

/* Take a shape out of the table; it is freed now, or by its last user. */
static void
unlist_shape(ShapeEntry *entry)
{
	Shape	   *shape = entry->shape;

	hash_search(shapes, &entry->key, HASH_REMOVE, NULL);
	shape->listed = false;
	free_unused_shape(shape);
}

/* Free a shape that nobody will find any more and nobody is using. */
static void
free_unused_shape(Shape *shape)
{
	if (shape->listed || shape->use_count > 0)
		return;
	SPI_freeplan(shape->find);
	if (shape->insert != NULL)
		SPI_freeplan(shape->insert);
	MemoryContextDelete(shape->context);
}

/*
 * Work out a shape: which columns, which index, what queries.  All errors
 * about names and indexes come from here, before anything is written.
 */
static Shape *
build_shape(Relation rel, StringInfo names)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext,
												  "idempotency insert_once",
												  ALLOCSET_SMALL_SIZES);
	MemoryContext oldcontext = MemoryContextSwitchTo(context);
	Shape	   *shape = palloc0(sizeof(Shape));
	const char *name;
	const char *end;
	int			nconflict;
	Bitmapset  *conflict = NULL;
	Bitmapset  *given = NULL;
	List	   *members = NIL;
	ListCell   *lc;
	Relation	index;

	shape->context = context;
	shape->relid = RelationGetRelid(rel);
	MemoryContextSetIdentifier(context, pstrdup(RelationGetRelationName(rel)));
	shape->names = memcpy(palloc(names->len), names->data, names->len);
	shape->names_len = names->len;

	/* conflict columns, then members, as collect_names wrote them */
	memcpy(&nconflict, names->data, sizeof(int));
	name = names->data + sizeof(int);
	end = names->data + names->len;
	for (int i = 0; i < nconflict; i++, name += strlen(name) + 1)
		conflict = bms_add_member(conflict, column_number(rel, name));
	for (; name < end; name += strlen(name) + 1)
	{
		AttrNumber	attnum = column_number(rel, name);

		given = bms_add_member(given, attnum);
		members = lappend_int(members, attnum);
	}

	index = choose_index(rel, given, conflict);
	shape->index_name = pstrdup(RelationGetRelationName(index));
	shape->nulls_conflict = index->rd_index->indnullsnotdistinct;

	shape->members = CreateTemplateTupleDesc(list_length(members));
	shape->types = palloc(list_length(members) * sizeof(Oid));
	foreach(lc, members)
	{
		int			pos = foreach_current_index(lc);
		Form_pg_attribute att = TupleDescAttr(RelationGetDescr(rel),
											  lfirst_int(lc) - 1);

		TupleDescInitEntry(shape->members, pos + 1, NameStr(att->attname),
						   att->atttypid, att->atttypmod, att->attndims);
		TupleDescInitEntryCollation(shape->members, pos + 1, att->attcollation);
		shape->types[pos] = att->atttypid;
	}
	TupleDescFinalize(shape->members);

	shape->nkeys = index->rd_index->indnkeyatts;
	shape->keys = palloc(shape->nkeys * sizeof(int));
	for (int i = 0; i < shape->nkeys; i++)
		for (int pos = 0; pos < list_length(members); pos++)
			if (list_nth_int(members, pos) == index->rd_index->indkey.values[i])
				shape->keys[i] = pos;

	shape->result = CreateTemplateTupleDesc(2);
	TupleDescInitEntry(shape->result, 1, "created", BOOLOID, -1, 0);
	TupleDescInitEntry(shape->result, 2, "stored", rel->rd_rel->reltype, -1, 0);
	TupleDescFinalize(shape->result);
	BlessTupleDesc(shape->result);

	write_queries(shape, rel, index);
	index_close(index, NoLock);

	MemoryContextSwitchTo(oldcontext);
	shape->find = SPI_prepare(shape->find_text, shape->members->natts, shape->types);
	if (shape->find == NULL)
		elog(ERROR, "SPI_prepare failed: %s", SPI_result_code_string(SPI_result));
	SPI_keepplan(shape->find);
	MemoryContextSetParent(context, CacheMemoryContext);
	return shape;
}

/* The number of a live user column; error 42703 if there is none. */
static AttrNumber
column_number(Relation rel, const char *name)
{
	TupleDesc	desc = RelationGetDescr(rel);

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
 * Of several on the same conflict columns the first will do: the INSERT names
 * collations and operator classes too, so that only an index with the same
 * notion of equality can be inferred beside it.
 */
static Relation
choose_index(Relation rel, Bitmapset *members, Bitmapset *conflict)
{
	List	   *oids = RelationGetIndexList(rel);
	ListCell   *lc;
	Relation	chosen = NULL;
	int			nfit = 0;
	StringInfoData usable;
	StringInfoData fit;

	initStringInfo(&usable);
	initStringInfo(&fit);
	foreach(lc, oids)
	{
		Relation	index = index_open(lfirst_oid(lc), AccessShareLock);
		Bitmapset  *columns;

		if (!index_can_judge(index))
		{
			index_close(index, NoLock);
			continue;
		}
		columns = index_columns(index);
		append_index(&usable, rel, index);
		if (conflict != NULL ? bms_equal(columns, conflict) : bms_is_subset(columns, members))
		{
			append_index(&fit, rel, index);
			nfit++;
			if (chosen == NULL)
			{
				chosen = index;
				continue;
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
	if (conflict == NULL && nfit > 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_COLUMN_REFERENCE),
				 errmsg("several unique indexes of table \"%s\" have all their columns in new_row",
						RelationGetRelationName(rel)),
				 errdetail("Unique indexes that can decide: %s.", fit.data),
				 errhint("Name the columns of one of them in conflict.")));
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

/* Append "name (columns)" of an index to a list for a message. */
static void
append_index(StringInfo buf, Relation rel, Relation index)
{
	appendStringInfo(buf, "%s%s (", buf->len > 0 ? ", " : "",
					 quote_identifier(RelationGetRelationName(index)));
	for (int i = 0; i < index->rd_index->indnkeyatts; i++)
	{
		int			attnum = index->rd_index->indkey.values[i];
		Form_pg_attribute att = TupleDescAttr(RelationGetDescr(rel), attnum - 1);

		appendStringInfo(buf, "%s%s", i > 0 ? ", " : "",
						 quote_identifier(NameStr(att->attname)));
	}
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
	char	   *table = quote_qualified_identifier(get_namespace_name(RelationGetNamespace(rel)),
												   RelationGetRelationName(rel));
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

	initStringInfo(&columns);
	initStringInfo(&params);
	for (int i = 0; i < shape->members->natts; i++)
	{
		const char *sep = i > 0 ? ", " : "";

		appendStringInfo(&columns, "%s%s", sep,
						 quote_identifier(NameStr(TupleDescAttr(shape->members, i)->attname)));
		appendStringInfo(&params, "%s$%d", sep, i + 1);
	}

	initStringInfo(&target);
	initStringInfo(&condition);
	for (int i = 0; i < shape->nkeys; i++)
	{
		Form_pg_attribute att = TupleDescAttr(shape->members, shape->keys[i]);
		const char *column = quote_identifier(NameStr(att->attname));

		appendStringInfo(&target, "%s%s", i > 0 ? ", " : "", column);
		if (OidIsValid(index->rd_indcollation[i]))
			appendStringInfo(&target, " COLLATE %s",
							 collation_name(index->rd_indcollation[i]));
		appendStringInfo(&target, " %s", opclass_name(opclasses->values[i]));

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
	char		left[NAMEDATALEN * 2 + 8];
	char		right[16];

	if (!OidIsValid(op))
		elog(ERROR, "missing equality operator for type %u in index \"%s\"",
			 opcintype, RelationGetRelationName(index));

	snprintf(left, sizeof(left), "t.%s", column);
	snprintf(right, sizeof(right), "$%d", param);

	appendStringInfoChar(buf, '(');
	ik_append_equality(buf, left, op, right, type);
	if (OidIsValid(collation))
		appendStringInfo(buf, " COLLATE %s", collation_name(collation));
	if (nulls_conflict)
		appendStringInfo(buf, " OR (%s IS NULL AND %s IS NULL)", left, right);
	appendStringInfoChar(buf, ')');
}

/* A collation's qualified name. */
static char *
collation_name(Oid collation)
{
	HeapTuple	tuple = SearchSysCache1(COLLOID, ObjectIdGetDatum(collation));
	Form_pg_collation form;
	char	   *name;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for collation %u", collation);
	form = (Form_pg_collation) GETSTRUCT(tuple);
	name = quote_qualified_identifier(get_namespace_name(form->collnamespace),
									  NameStr(form->collname));
	ReleaseSysCache(tuple);
	return name;
}

/* An operator class's qualified name. */
static char *
opclass_name(Oid opclass)
{
	HeapTuple	tuple = SearchSysCache1(CLAOID, ObjectIdGetDatum(opclass));
	Form_pg_opclass form;
	char	   *name;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for operator class %u", opclass);
	form = (Form_pg_opclass) GETSTRUCT(tuple);
	name = quote_qualified_identifier(get_namespace_name(form->opcnamespace),
									  NameStr(form->opcname));
	ReleaseSysCache(tuple);
	return name;
}

/*
 * A NULL in a conflict column never meets a conflict, so that the second call
 * would insert a second row: refuse it, unless the index treats NULLs alike.
 */
static void
check_key_not_null(Shape *shape, bool *isnull)
{
	if (shape->nulls_conflict)
		return;
	for (int i = 0; i < shape->nkeys; i++)
	{
		if (isnull[shape->keys[i]])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("conflict column \"%s\" must not be NULL",
							NameStr(TupleDescAttr(shape->members, shape->keys[i])->attname)),
					 errdetail("Unique index \"%s\" lets any number of NULLs in.",
							   shape->index_name),
					 errhint("Give a value, or declare the index NULLS NOT DISTINCT.")));
	}
}

/*
 * Insert the row and return true, or find the one that is there and return
 * false.  *stored is the row, in the given context; *found is false if there
 * is none because a trigger swallowed the insert.
 *
 * The look comes first, so that a replay writes nothing, fires no trigger,
 * takes no sequence value and works in a read-only transaction.  Not under
 * SERIALIZABLE, where a look that finds nothing would make two inserts of
 * different rows fail with 40001.
 */
static bool
insert_or_find(Shape *shape, Relation rel, Datum *values, bool *isnull,
			   MemoryContext context, Datum *stored, bool *found)
{
	*found = true;
	for (int round = 0; round < MAX_ROUNDS; round++)
	{
		CHECK_FOR_INTERRUPTS();
		if (round > 0 || !IsolationIsSerializable() || XactReadOnly)
		{
			if (find_row(shape, rel, values, isnull, round > 0, context, stored))
				return false;
		}
		switch (insert_row(shape, rel, values, isnull, context, stored))
		{
			case INSERT_CREATED:
				return true;
			case INSERT_SWALLOWED:
				/* unless it was there, or the trigger put it there */
				*found = find_row(shape, rel, values, isnull, false,
								  context, stored);
				return false;
			case INSERT_CONFLICT:
				break;
		}
	}
	ereport(ERROR,
			(errcode(ERRCODE_TRIGGERED_DATA_CHANGE_VIOLATION),
			 errmsg("could not find the row that conflicts with the new row of table \"%s\"",
					RelationGetRelationName(rel)),
			 errdetail("Unique index \"%s\" reported a conflict, but no row has the values given.",
					   shape->index_name),
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
find_row(Shape *shape, Relation rel, Datum *values, bool *isnull,
		 bool must_exist, MemoryContext context, Datum *stored)
{
	int			natts = shape->members->natts;
	char	   *nulls = palloc(natts);
	bool		found;
	int			rc;

	for (int i = 0; i < natts; i++)
		nulls[i] = isnull[i] ? 'n' : ' ';

	/* what this statement has done so far counts */
	CommandCounterIncrement();
	PushActiveSnapshot(GetTransactionSnapshot());
	rc = SPI_execute_plan(shape->find, values, nulls, true, 1);
	if (rc != SPI_OK_SELECT)
		elog(ERROR, "SPI_execute_plan failed: %s", SPI_result_code_string(rc));
	found = SPI_processed > 0;
	if (found)
	{
		bool		null;
		Datum		row = SPI_getbinval(SPI_tuptable->vals[0],
										SPI_tuptable->tupdesc, 1, &null);
		MemoryContext oldcontext = MemoryContextSwitchTo(context);

		Assert(!null);
		*stored = datumCopy(row, false, -1);
		MemoryContextSwitchTo(oldcontext);
	}
	SPI_freetuptable(SPI_tuptable);

	if (!found && must_exist &&
		check_enable_rls(shape->relid, InvalidOid, true) == RLS_ENABLED &&
		owner_sees_row(shape, rel, values, nulls))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("row-level security hides the row that conflicts with the new row of table \"%s\"",
						RelationGetRelationName(rel)),
				 errdetail("Unique index \"%s\" reported the conflict.",
						   shape->index_name),
				 errhint("Use another key, or a role that may see the row.")));
	PopActiveSnapshot();
	return found;
}

/*
 * Is the row there for the table's owner, whatever the policies say?  Under
 * the active snapshot.  ri_triggers.c looks so.  Nothing of the caller's runs
 * here: the values are converted, and the operators are those of an index.
 *
 * Not by the kept plan: where the caller is the owner and row security is
 * forced on him, that one holds the policies.
 */
static bool
owner_sees_row(Shape *shape, Relation rel, Datum *values, char *nulls)
{
	SavedUser	caller;
	int			rc;

	ik_become_owner(rel, SECURITY_NOFORCE_RLS, &caller);
	rc = SPI_execute_with_args(shape->find_text, shape->members->natts,
							   shape->types, values, nulls, true, 1);
	ik_become_caller(&caller);
	if (rc != SPI_OK_SELECT)
		elog(ERROR, "SPI_execute_with_args failed: %s", SPI_result_code_string(rc));
	return SPI_processed > 0;
}

/*
 * Run the INSERT as the caller.  If it created the row, *stored is what
 * RETURNING gave, in the given context.
 *
 * The executor is driven here instead of through SPI for one reason: no row
 * returned may mean a conflict or a trigger that returned NULL, and only the
 * executor's own count, which EXPLAIN ANALYZE shows as "Conflicting Tuples",
 * tells them apart.
 */
static InsertOutcome
insert_row(Shape *shape, Relation rel, Datum *values, bool *isnull,
		   MemoryContext context, Datum *stored)
{
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
		.context = context
	};
	CachedPlan *cplan;
	QueryDesc  *query;
	bool		conflict;

	/* the plan takes a writer's lock, which recovery has none of */
	PreventCommandDuringRecovery("INSERT");

	if (shape->insert == NULL)
	{
		SPIPlanPtr	plan = SPI_prepare(shape->insert_text, natts, shape->types);

		if (plan == NULL)
			elog(ERROR, "SPI_prepare failed: %s", SPI_result_code_string(SPI_result));
		SPI_keepplan(plan);
		shape->insert = plan;
	}

	for (int i = 0; i < natts; i++)
	{
		params->params[i].value = values[i];
		params->params[i].isnull = isnull[i];
		params->params[i].pflags = PARAM_FLAG_CONST;
		params->params[i].ptype = shape->types[i];
	}

	CommandCounterIncrement();
	PushActiveSnapshot(GetTransactionSnapshot());
	cplan = SPI_plan_get_cached_plan(shape->insert);
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

	if (!returned.seen)
		return conflict ? INSERT_CONFLICT : INSERT_SWALLOWED;

	if (!returned.key_kept)
		ereport(ERROR,
				(errcode(ERRCODE_TRIGGERED_DATA_CHANGE_VIOLATION),
				 errmsg("a trigger of table \"%s\" changed the columns by which the row is found again",
						RelationGetRelationName(rel)),
				 errdetail("They are those of unique index \"%s\".",
						   shape->index_name),
				 errhint("Give them as they are stored.")));
	CommandCounterIncrement();
	*stored = returned.row;
	return INSERT_CREATED;
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
