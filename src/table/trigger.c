/*-------------------------------------------------------------------------
 *
 * trigger.c
 *		Guards: attached to a column of a caller's table, and taken off.
 *
 * What is attached stands nowhere but in the table's triggers: so a table that
 * is dropped, renamed, dumped or restored takes everything with it.  A guard is
 * a trigger whose column list tells the column,
 *
 *		UPDATE OF column ... guard_...()
 *
 * the one part of a trigger that follows a rename, a dump and a new partition,
 * and costs an UPDATE nothing.  Its companions have no list and serve all
 * guards of the kind that the table has: they see what an UPDATE does without
 * naming the column.
 *
 * BEFORE triggers have the last word, since they fire in the order of their
 * names and nobody's sort after zz.
 *
 *-------------------------------------------------------------------------
 */
#include "table/table.h"

#include "access/sysattr.h"
#include "access/table.h"
#include "catalog/partition.h"
#include "catalog/pg_class.h"
#include "catalog/pg_inherits.h"
#include "commands/trigger.h"
#include "rewrite/prs2lock.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"

/* in place of a column: any that a trigger has in its list */
#define ANY_COLUMN	(-1)

typedef struct Companion
{
	GuardKind	kind;
	const char *name;
	const char *events;
	int16		type;			/* pg_trigger.tgtype */
} Companion;

static const Companion companions[] = {
	{GUARD_STATE, "IK_guard_insert", "AFTER INSERT", GUARD_AFTER_INSERT},
	{GUARD_STATE, "IK_guard_insert", "AFTER INSERT OR DELETE", GUARD_AFTER_INSERT_OR_DELETE},
	{GUARD_STATE, "zz_IK_guard_update", "BEFORE UPDATE", GUARD_BEFORE_UPDATE},
	{GUARD_STATE, "IK_guard_update", "AFTER UPDATE", GUARD_AFTER_UPDATE},
	{GUARD_VERSION, "zz_IK_version_next", "BEFORE UPDATE", GUARD_BEFORE_UPDATE},
	{GUARD_FENCE, "zz_IK_fence_assigned", "BEFORE UPDATE", GUARD_BEFORE_UPDATE}
};

static void keep_companions(Relation rel, GuardKind kind);
static bool is_wanted(Relation rel, const Companion *companion);
static char *find_trigger(Relation rel, GuardKind kind, AttrNumber column,
						  int16 type);
static char *create_trigger(Relation rel, GuardKind kind, const char *name,
							const char *events, AttrNumber column,
							const char *arguments);
static void drop_trigger(Relation rel, const char *name);
static void run_utility(const char *command);
static char *free_trigger_name(Relation rel, const char *name);

/*
 * Refuse what a guarded update, or the trigger behind it, could not keep its
 * promise on, 0A000, and a table with a trigger of that kind which was made by
 * hand, 39P01.
 */
void
ik_check_attachable(Relation rel, AttrNumber column, GuardKind kind)
{
	Oid			relid = RelationGetRelid(rel);
	Form_pg_attribute attr = TupleDescAttr(RelationGetDescr(rel), column - 1);
	List	   *children;
	ListCell   *lc;

	ik_check_guards(rel, ik_table_info(rel), kind);

	/* a table that we write: not as the install script made it, it would be refused */
	if (ik_is_ours(RelationRelationId, relid))
		ik_refuse_table(psprintf("table \"%s\" is the extension's own",
								 RelationGetRelationName(rel)),
						"Attach to a table of your application.");

	/* the table: rows that the triggers do not see, or UPDATEs that are none */
	if (rel->rd_rel->relispartition)
		ik_refuse_table(psprintf("\"%s\" is a partition", RelationGetRelationName(rel)),
						ik_root_of(rel) == relid ?
						"It is being detached: ALTER TABLE ... DETACH PARTITION ... FINALIZE makes it a table of its own." :
						psprintf("Attach to the partitioned table \"%s\": its partitions follow.",
								 get_rel_name(ik_root_of(rel))));
	ik_refuse_children(rel);
	if (has_superclass(relid))
		ik_refuse_table(psprintf("table \"%s\" inherits from another",
								 RelationGetRelationName(rel)),
						"Use a partitioned table.");
	for (int i = 0; rel->rd_rules != NULL && i < rel->rd_rules->numLocks; i++)
		if (rel->rd_rules->rules[i]->event == CMD_UPDATE)
			ik_refuse_table(psprintf("table \"%s\" has a rule on UPDATE",
									 RelationGetRelationName(rel)),
							"Drop the rule, or use a trigger in its place.");

	/* the column */
	if (attr->attgenerated || attr->attidentity)
		ik_refuse_table(psprintf("column \"%s\" is generated", NameStr(attr->attname)),
						"Use a column that an UPDATE can set.");

	/* each partition, with its own numbers of columns */
	children = find_all_inheritors(relid, NoLock, NULL);
	foreach(lc, children)
	{
		Relation	part = table_open(lfirst_oid(lc), NoLock);
		AttrNumber	here = get_attnum(RelationGetRelid(part),
									  NameStr(attr->attname));
		Bitmapset  *columns = bms_make_singleton(here - FirstLowInvalidHeapAttributeNumber);

		if (part->rd_rel->relkind == RELKIND_FOREIGN_TABLE)
			ik_refuse_foreign(part);
		if (part->rd_rel->relkind == RELKIND_PARTITIONED_TABLE &&
			has_partition_attrs(part, columns, NULL))
			ik_refuse_table(psprintf("column \"%s\" is in the partition key of table \"%s\"",
									 NameStr(attr->attname),
									 RelationGetRelationName(part)),
							"Partition by a column that keeps its value.");
		table_close(part, NoLock);
	}
}

/* A version or a fence is a bigint; 42804. */
void
ik_check_bigint(Relation rel, AttrNumber column)
{
	Form_pg_attribute attr = TupleDescAttr(RelationGetDescr(rel), column - 1);

	if (!ik_is_bigint(rel, column))
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("column \"%s\" is of type %s", NameStr(attr->attname),
						format_type_be(attr->atttypid)),
				 errhint("Versions and fences are of type bigint.")));
}

/*
 * Attach a guard to a column that can have one, and return the name of its
 * trigger.  42710 if it has one already.  type is GUARD_BEFORE_UPDATE or
 * GUARD_AFTER_UPDATE.
 */
Datum
ik_attach(Relation rel, AttrNumber column, GuardKind kind, int16 type,
		  const char *arguments)
{
	const GuardNames *names = &ik_guard_names[kind];
	bool		before = type == GUARD_BEFORE_UPDATE;
	char	   *name;

	ik_refuse_attached(rel, column, kind);
	name = create_trigger(rel, kind,
						  psprintf("%s%s", before ? "zz_" : "", names->trigger),
						  before ? "BEFORE UPDATE" : "AFTER UPDATE",
						  column, arguments);
	keep_companions(rel, kind);
	table_close(rel, NoLock);
	return DirectFunctionCall1(namein, CStringGetDatum(name));
}

/* 42710 if a column has a guard of that kind. */
void
ik_refuse_attached(Relation rel, AttrNumber column, GuardKind kind)
{
	if (find_trigger(rel, kind, column, 0) != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_DUPLICATE_OBJECT),
				 errmsg("a %s is already attached to column \"%s\" of table \"%s\"",
						ik_guard_names[kind].noun,
						get_attname(RelationGetRelid(rel), column, false),
						RelationGetRelationName(rel)),
				 errhint("Call idempotency.detach_%s() first.",
						 ik_guard_names[kind].noun)));
}

/*
 * detach_...(rel, column): take a guard off, and return the name that its
 * trigger had.  IK007 if there is none.
 */
Datum
ik_detach(FunctionCallInfo fcinfo, GuardKind kind)
{
	AttrNumber	column;
	Relation	rel = ik_open_owned(fcinfo, AccessExclusiveLock, &column);
	char	   *name = find_trigger(rel, kind, column, 0);

	if (name == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNKNOWN_MACHINE),
				 errmsg("no %s is attached to column \"%s\" of table \"%s\"",
						ik_guard_names[kind].noun,
						get_attname(RelationGetRelid(rel), column, false),
						RelationGetRelationName(rel)),
				 errhint("What is attached shows in \\d as triggers that call idempotency.%s().",
						 ik_guard_names[kind].function)));
	drop_trigger(rel, name);
	keep_companions(rel, kind);
	table_close(rel, NoLock);
	return DirectFunctionCall1(namein, CStringGetDatum(name));
}

/*
 * Have the companions that the guards need, and no others.  DROP COLUMN ...
 * CASCADE may have left some.
 */
static void
keep_companions(Relation rel, GuardKind kind)
{
	for (int i = 0; i < lengthof(companions); i++)
	{
		const Companion *companion = &companions[i];
		char	   *name;
		bool		wanted;

		if (companion->kind != kind)
			continue;
		name = find_trigger(rel, kind, InvalidAttrNumber, companion->type);
		wanted = is_wanted(rel, companion);
		if (wanted && name == NULL)
			create_trigger(rel, kind, companion->name, companion->events,
						   InvalidAttrNumber, "");
		else if (!wanted && name != NULL)
			drop_trigger(rel, name);
	}
}

static bool
is_wanted(Relation rel, const Companion *companion)
{
	bool		partitioned = rel->rd_rel->relkind == RELKIND_PARTITIONED_TABLE;

	switch (companion->type)
	{
			/* DELETE: a row that moves leaves one partition for another */
		case GUARD_AFTER_INSERT:
		case GUARD_AFTER_INSERT_OR_DELETE:
			return partitioned == (companion->type == GUARD_AFTER_INSERT_OR_DELETE) &&
				find_trigger(rel, companion->kind, ANY_COLUMN, 0) != NULL;

			/* judged when the guards with a list are */
		default:
			return find_trigger(rel, companion->kind, ANY_COLUMN,
								companion->type) != NULL;
	}
}

/*
 * The name of a trigger that calls the kind's function, or NULL: with that
 * column as its list, or without a list if column is 0; of that tgtype, or of
 * any if type is 0.  A copy: the relation's triggers are read again, and what
 * they were is freed, whenever an invalidation of it comes in.
 */
static char *
find_trigger(Relation rel, GuardKind kind, AttrNumber column, int16 type)
{
	Oid			function = ik_guard_function(kind);

	for (int i = 0; rel->trigdesc != NULL && i < rel->trigdesc->numtriggers; i++)
	{
		const Trigger *trigger = &rel->trigdesc->triggers[i];

		if (trigger->tgfoid == function &&
			(type == 0 || trigger->tgtype == type) &&
			(column == InvalidAttrNumber ? trigger->tgnattr == 0 :
			 trigger->tgnattr == 1 &&
			 (column == ANY_COLUMN || trigger->tgattr[0] == column)))
			return pstrdup(trigger->tgname);
	}
	return NULL;
}

/*
 * Create a trigger as the caller, and return its name; column 0: without a
 * column list.
 */
static char *
create_trigger(Relation rel, GuardKind kind, const char *name,
			   const char *events, AttrNumber column, const char *arguments)
{
	char	   *free_name = free_trigger_name(rel, name);

	run_utility(psprintf("CREATE TRIGGER %s %s%s%s ON %s FOR EACH ROW"
						 " EXECUTE FUNCTION idempotency.%s(%s)",
						 quote_identifier(free_name), events,
						 column == InvalidAttrNumber ? "" : " OF ",
						 column == InvalidAttrNumber ? "" : ik_quoted_column(rel, column),
						 ik_quoted_name(rel), ik_guard_names[kind].function,
						 arguments));
	return free_name;
}

/* Drop a trigger as the caller. */
static void
drop_trigger(Relation rel, const char *name)
{
	run_utility(psprintf("DROP TRIGGER %s ON %s",
						 quote_identifier(name),
						 ik_quoted_name(rel)));
}

static void
run_utility(const char *command)
{
	SPI_connect();
	if (SPI_execute(command, false, 0) != SPI_OK_UTILITY)
		elog(ERROR, "could not execute: %s", command);
	SPI_finish();
}

/* The name, or one with a number after it if the table has that already. */
static char *
free_trigger_name(Relation rel, const char *name)
{
	char	   *candidate = pstrdup(name);

	for (int n = 2;; n++)
	{
		bool		taken = false;

		for (int i = 0; rel->trigdesc != NULL && i < rel->trigdesc->numtriggers; i++)
			if (strcmp(rel->trigdesc->triggers[i].tgname, candidate) == 0)
				taken = true;
		if (!taken)
			return candidate;
		candidate = psprintf("%s_%d", name, n);
	}
}
