/*-------------------------------------------------------------------------
 *
 * trigger.c
 *		Triggers put on a caller's table and taken off.
 *
 * What is attached stands nowhere but in the table's triggers: so a table that
 * is dropped, renamed, dumped or restored takes everything with it.
 *
 *-------------------------------------------------------------------------
 */
#include "table/table.h"

#include "commands/trigger.h"
#include "utils/builtins.h"

static char *free_trigger_name(Relation rel, const char *name);

/*
 * A trigger that calls our function, or NULL: with that column as its list, or
 * without a list if column is 0; of that tgtype, or of any if type is 0.
 */
const Trigger *
ik_find_trigger(Relation rel, const char *function, AttrNumber column,
				int16 type)
{
	Oid			oid = ik_trigger_function(function);

	for (int i = 0; rel->trigdesc != NULL && i < rel->trigdesc->numtriggers; i++)
	{
		const Trigger *trigger = &rel->trigdesc->triggers[i];

		if (trigger->tgfoid == oid &&
			(type == 0 || trigger->tgtype == type) &&
			(column == InvalidAttrNumber ? trigger->tgnattr == 0 :
			 trigger->tgnattr == 1 && trigger->tgattr[0] == column))
			return trigger;
	}
	return NULL;
}

/* Create a trigger as the caller; column 0: without a column list. */
void
ik_create_trigger(Relation rel, const char *name, const char *events,
				  AttrNumber column, const char *call)
{
	StringInfoData command;

	initStringInfo(&command);
	appendStringInfo(&command, "CREATE TRIGGER %s %s ",
					 quote_identifier(free_trigger_name(rel, name)), events);
	if (column != InvalidAttrNumber)
		appendStringInfo(&command, "OF %s ", ik_quoted_column(rel, column));
	appendStringInfo(&command, "ON %s FOR EACH ROW EXECUTE FUNCTION %s",
					 ik_quoted_name(rel), call);

	SPI_connect();
	if (SPI_execute(command.data, false, 0) != SPI_OK_UTILITY)
		elog(ERROR, "could not create trigger: %s", command.data);
	SPI_finish();
}

/* Drop a trigger as the caller. */
void
ik_drop_trigger(Relation rel, const Trigger *trigger)
{
	char	   *command = psprintf("DROP TRIGGER %s ON %s",
								   quote_identifier(trigger->tgname),
								   ik_quoted_name(rel));

	SPI_connect();
	if (SPI_execute(command, false, 0) != SPI_OK_UTILITY)
		elog(ERROR, "could not drop trigger: %s", command);
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
