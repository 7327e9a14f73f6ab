/*-------------------------------------------------------------------------
 *
 * user_table.c
 *		Tables of callers: opened, named and refused.
 *
 *-------------------------------------------------------------------------
 */
#include "table/table.h"

#include "access/relation.h"
#include "access/table.h"
#include "catalog/partition.h"
#include "catalog/pg_class.h"
#include "catalog/pg_inherits.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"

pg_noreturn static void no_such_table(Oid relid);

/*
 * Open a table that a caller named.  Errors: 42P01 if there is none, or not any
 * more; 42809 for an index or a composite type.
 */
Relation
ik_open_users_table(Oid relid, LOCKMODE lockmode)
{
	Relation	rel = try_table_open(relid, lockmode);

	if (rel == NULL)
		no_such_table(relid);
	return rel;
}

static void
no_such_table(Oid relid)
{
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_TABLE),
			 errmsg("relation with OID %u does not exist", relid),
			 errhint("The statement was planned before the table was dropped: prepare it anew.")));
}

/*
 * The table in the first argument, which the caller must own, and the number
 * of the column in the second.  Locked, with its partitions, as CREATE TRIGGER
 * or DROP TRIGGER does, and at once: who raised the lock later would come to a
 * deadlock with a transaction that has read the table and goes on to write.  No
 * writer is under way, and none begins before we commit.
 */
Relation
ik_open_owned(FunctionCallInfo fcinfo, LOCKMODE lockmode, AttrNumber *column)
{
	Oid			relid;
	Relation	rel;

	if (PG_ARGISNULL(0) || PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("table and column must not be null")));
	/* in recovery, not even the table's lock can be had */
	ik_refuse_to_write(psprintf("idempotency.%s()",
								get_func_name(fcinfo->flinfo->fn_oid)));
	relid = PG_GETARG_OID(0);
	if (get_rel_relkind(relid) == '\0')
		no_such_table(relid);
	if (!object_ownercheck(RelationRelationId, relid, GetUserId()))
		aclcheck_error(ACLCHECK_NOT_OWNER,
					   get_relkind_objtype(get_rel_relkind(relid)),
					   get_rel_name(relid));

	rel = try_relation_open(relid, lockmode);
	if (rel == NULL)
		no_such_table(relid);
	if (rel->rd_rel->relkind != RELKIND_RELATION &&
		rel->rd_rel->relkind != RELKIND_PARTITIONED_TABLE)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("\"%s\" is not a table", RelationGetRelationName(rel)),
				 errhint("Attach to the table that the rows are stored in.")));
	(void) find_all_inheritors(relid, lockmode, NULL);

	*column = ik_column_number(rel, NameStr(*PG_GETARG_NAME(1)),
							   "Name a column of the table, in its case, or add it first.");
	return rel;
}

/* The number of a column that is not PostgreSQL's own; 42703 with the hint. */
AttrNumber
ik_column_number(Relation rel, const char *name, const char *hint)
{
	AttrNumber	column = get_attnum(RelationGetRelid(rel), name);

	if (column <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_COLUMN),
				 errmsg("column \"%s\" of table \"%s\" does not exist",
						name, RelationGetRelationName(rel)),
				 errhint("%s", hint)));
	return column;
}

/*
 * 0A000 for a table with inheritance children: an UPDATE reaches their rows, of
 * which neither its triggers nor its primary key know.  They may come after the
 * attach.
 */
void
ik_refuse_children(Relation rel)
{
	/* relhassubclass is true until VACUUM once there was a child */
	if (rel->rd_rel->relkind == RELKIND_RELATION &&
		rel->rd_rel->relhassubclass &&
		find_inheritance_children(RelationGetRelid(rel), NoLock) != NIL)
		ik_refuse_table(psprintf("table \"%s\" has inheritance children",
								 RelationGetRelationName(rel)),
						"Use a partitioned table.");
}

/*
 * The table that the caller knows: of a partition, the topmost one.  A partition
 * has no ancestors any more, and is its own root, as soon as DETACH ...
 * CONCURRENTLY has begun: it waits, or was cancelled and waits for FINALIZE.
 */
Oid
ik_root_of(Relation rel)
{
	List	   *ancestors = NIL;

	if (rel->rd_rel->relispartition)
		ancestors = get_partition_ancestors(RelationGetRelid(rel));
	return ancestors == NIL ? RelationGetRelid(rel) : llast_oid(ancestors);
}

/* 0A000 for a partition whose rows are elsewhere. */
void
ik_refuse_foreign(Relation rel)
{
	ik_refuse_table(psprintf("partition \"%s\" is a foreign table",
							 RelationGetRelationName(rel)),
					"Detach the partition: its server would not fire the triggers.");
}

/* The name for use in a command, under any search_path. */
char *
ik_quoted_name(Relation rel)
{
	return quote_qualified_identifier(get_namespace_name(RelationGetNamespace(rel)),
									  RelationGetRelationName(rel));
}

/*
 * The same for a table that is not locked; NULL: it has been dropped, also
 * after the caller has read its OID in a catalog.
 */
char *
ik_name_if_there(Oid relid)
{
	char	   *name = get_rel_name(relid);
	char	   *schema = name == NULL ? NULL : get_namespace_name(get_rel_namespace(relid));

	return schema == NULL ? NULL : quote_qualified_identifier(schema, name);
}

char *
ik_quoted_column(Relation rel, AttrNumber column)
{
	return pstrdup(quote_identifier(NameStr(TupleDescAttr(RelationGetDescr(rel),
														  column - 1)->attname)));
}

/* hint may be NULL */
void
ik_refuse_table(const char *message, const char *hint)
{
	ereport(ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("%s", message),
			 hint ? errhint("%s", hint) : 0));
}
