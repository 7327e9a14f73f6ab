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
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/lsyscache.h"

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
 * whatever its domain says about NULL.
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

	header = DatumGetHeapTupleHeader(FunctionCallInvoke(fcinfo));
	tuple.t_len = HeapTupleHeaderGetDatumLength(header);
	ItemPointerSetInvalid(&tuple.t_self);
	tuple.t_tableOid = InvalidOid;
	tuple.t_data = header;
	heap_deform_tuple(&tuple, columns, values, isnull);
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
