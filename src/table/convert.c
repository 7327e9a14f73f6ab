/*-------------------------------------------------------------------------
 *
 * convert.c
 *		Values and operators of the columns of a caller's table.
 *
 *-------------------------------------------------------------------------
 */
#include "table/table.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/typcache.h"

static void check_members(JsonbContainer *container, Oid type,
						  const char *column);

/*
 * Append "left = right" in SQL, both of the given type or of a domain over it,
 * with an index's equality operator.  The operands are cast to its input type,
 * but for a polymorphic one to their own: the parser takes a domain over an
 * enum for no enum, and arrays of varchar for other arrays than those of text.
 * An enum itself needs no cast, nor then USAGE on the schema of its type.
 */
void
ik_append_equality(StringInfo buf, const char *left, Oid equality,
				   const char *right, Oid type)
{
	Oid			lefttype;
	Oid			righttype;

	op_input_types(equality, &lefttype, &righttype);
	if (!IsPolymorphicType(lefttype))
		generate_operator_clause(buf, left, type, equality, right, type);
	else if (type_is_enum(type))
		generate_operator_clause(buf, left, lefttype, equality, right, righttype);
	else
	{
		const char *base = format_type_extended(getBaseType(type), -1,
												FORMAT_TYPE_TYPEMOD_GIVEN |
												FORMAT_TYPE_FORCE_QUALIFY);

		generate_operator_clause(buf, psprintf("%s::%s", left, base), lefttype,
								 equality, psprintf("%s::%s", right, base),
								 righttype);
	}
}

/*
 * Convert the members of an object to the types of the columns that bear their
 * names, exactly as jsonb_populate_record does, by its sibling that takes the
 * columns from the caller: so a column that was not given is not touched,
 * even if its domain forbids NULL.  Only that no member is left out.
 */
void
ik_from_json(Jsonb *object, TupleDesc columns, Datum *values,
			 bool *isnull)
{
	LOCAL_FCINFO(fcinfo, 1);
	FmgrInfo	flinfo;
	ReturnSetInfo rsinfo = {
		.type = T_ReturnSetInfo,
		.expectedDesc = columns
	};
	HeapTupleHeader header;
	HeapTupleData tuple;

	fmgr_info(F_JSONB_TO_RECORD, &flinfo);
	InitFunctionCallInfoData(*fcinfo, &flinfo, 1, InvalidOid, NULL,
							 (Node *) &rsinfo);
	fcinfo->args[0].value = JsonbPGetDatum(object);
	fcinfo->args[0].isnull = false;

	for (int i = 0; i < columns->natts; i++)
	{
		const char *name = NameStr(TupleDescAttr(columns, i)->attname);
		JsonbValue *member = getKeyJsonValueFromContainer(&object->root, name,
														  strlen(name), NULL);

		if (member != NULL && member->type == jbvBinary)
			check_members(member->val.binary.data,
						  TupleDescAttr(columns, i)->atttypid, name);
	}

	header = DatumGetHeapTupleHeader(FunctionCallInvoke(fcinfo));
	tuple.t_len = HeapTupleHeaderGetDatumLength(header);
	ItemPointerSetInvalid(&tuple.t_self);
	tuple.t_tableOid = InvalidOid;
	tuple.t_data = header;
	heap_deform_tuple(&tuple, columns, values, isnull);
}

/*
 * 22023 for a member of an object that its row type has no place for: it would
 * be left out, and what was meant be null.
 */
static void
check_members(JsonbContainer *container, Oid type, const char *column)
{
	Oid			base = getBaseType(type);
	Oid			element = get_element_type(base);
	TupleDesc	desc = NULL;
	JsonbIterator *it;
	JsonbIteratorToken token;
	JsonbValue	value;
	Oid			of_value = InvalidOid;

	check_stack_depth();
	if (OidIsValid(element) && JsonContainerIsArray(container))
		of_value = element;
	else if (base != RECORDOID && type_is_rowtype(base) &&
			 JsonContainerIsObject(container))
		desc = lookup_rowtype_tupdesc_copy(base, -1);
	else
		return;

	it = JsonbIteratorInit(container);
	while ((token = JsonbIteratorNext(&it, &value, true)) != WJB_DONE)
	{
		if (token == WJB_KEY)
		{
			int			i;

			Assert(desc != NULL);	/* only objects have keys */
			for (i = 0; i < desc->natts; i++)
			{
				Form_pg_attribute attr = TupleDescAttr(desc, i);

				if (!attr->attisdropped &&
					strlen(NameStr(attr->attname)) == value.val.string.len &&
					memcmp(NameStr(attr->attname), value.val.string.val,
						   value.val.string.len) == 0)
					break;
			}
			if (i == desc->natts)
				ereport(ERROR,
						(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						 errmsg("type %s of column \"%s\" has no attribute \"%.*s\"",
								format_type_be(base), column,
								value.val.string.len, value.val.string.val),
						 errhint("The members of the object are named for the attributes of the type, in their case.")));
			of_value = TupleDescAttr(desc, i)->atttypid;
		}
		else if ((token == WJB_VALUE || token == WJB_ELEM) &&
				 value.type == jbvBinary)
			/* an array of more dimensions nests, and has the same type */
			check_members(value.val.binary.data,
						  desc == NULL && JsonContainerIsArray(value.val.binary.data) ?
						  base : of_value,
						  column);
	}
}

/* How values of a type hold a state; *base is the type below any domain. */
StateKind
ik_state_kind(Oid type, Oid *base)
{
	*base = getBaseType(type);
	if (*base == TEXTOID || *base == VARCHAROID)
		return STATE_TEXT;
	if (*base == BPCHAROID)
		return STATE_BPCHAR;
	if (type_is_enum(*base))
		return STATE_ENUM;
	return STATE_UNSUPPORTED;
}

/* A stored state as a name; it may point into the value. */
NameRef
ik_state_name(StateKind kind, Datum state)
{
	NameRef		name;

	if (kind == STATE_ENUM)
	{
		name.data = DatumGetCString(DirectFunctionCall1(enum_out, state));
		name.len = strlen(name.data);
	}
	else
	{
		struct varlena *value = PG_DETOAST_DATUM_PACKED(state);

		name.data = VARDATA_ANY(value);
		name.len = VARSIZE_ANY_EXHDR(value);
		if (kind == STATE_BPCHAR)
			name.len = bpchartruelen(VARDATA_ANY(value), name.len);
	}
	return name;
}

/* The state column's name, which is the same in every partition. */
const char *
ik_state_column(Relation rel, const Guard *guard)
{
	return NameStr(TupleDescAttr(RelationGetDescr(rel), guard->column - 1)->attname);
}

/* The state of a row; data is NULL for a null state. */
NameRef
ik_slot_state(const Guard *guard, TupleTableSlot *slot)
{
	bool		isnull;
	Datum		state = slot_getattr(slot, guard->column, &isnull);
	NameRef		none = {NULL, 0};

	if (isnull)
		return none;
	return ik_state_name(guard->kind, state);
}

/* Are two names the same?  So are two that are null. */
bool
ik_same_name(NameRef a, NameRef b)
{
	if (a.data == NULL || b.data == NULL)
		return a.data == b.data;
	return a.len == b.len && memcmp(a.data, b.data, a.len) == 0;
}

/* A name as a value of the column's type; 22P02 if an enum has no such label. */
Datum
ik_state_datum(const Guard *guard, NameRef name)
{
	if (guard->kind == STATE_ENUM)
		return DirectFunctionCall2(enum_in,
								   CStringGetDatum(pnstrdup(name.data, name.len)),
								   ObjectIdGetDatum(guard->type));
	return PointerGetDatum(cstring_to_text_with_len(name.data, name.len));
}
