/*-------------------------------------------------------------------------
 *
 * run.c
 *		run(): claim a key, call a function, store what it returns.
 *
 * The function is called as the caller: found by the caller's search_path,
 * with the caller's EXECUTE privilege, which a call through fmgr would not
 * check by itself.
 *
 *-------------------------------------------------------------------------
 */
#include "key/key.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "parser/parse_func.h"
#include "parser/scansup.h"
#include "pgstat.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/json.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/typcache.h"

PG_FUNCTION_INFO_V1(idempotency_run);

/* a function that is to be called, and what comes of it */
typedef struct FunctionCall
{
	Oid			function;
	Oid			result_type;
	const Jsonb *request;
	KeyAnswer  *answer;
} FunctionCall;

static void resolve_function(const text *name, FunctionCall *call);
static Oid	find_function(const text *name);
static void hint_at_signature(void *arg);
static void call_function(void *arg);
static void read_result(Oid type, Datum value, KeyAnswer *answer);
static bool is_answer_type(Oid type);
static bool call_recording_errors(FunctionCall *call);
static bool is_recordable(int sqlstate);
static Jsonb *describe_error(const ErrorData *error);
static void add_member(StringInfo json, const char *name, const char *value);

/*
 * run(scope, key, function, request, ttl, wait, record_errors, fingerprint): the
 * answer, from the record or from calling function(request).
 */
Datum
idempotency_run(PG_FUNCTION_ARGS)
{
	static const Oid types[4] = {TEXTOID, BOOLOID, TEXTOID, JSONBOID};
	KeyRequest	request = {.function = "idempotency.run()"};
	KeyAnswer	answer;
	Claim	   *claim;
	KeyStatus	status;
	bool		replayed;
	Datum		values[4];
	bool		nulls[4] = {false};
	Datum		result;

	ik_get_identity(fcinfo, &request.scope, &request.key);
	if (PG_ARGISNULL(2))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("function must not be null"),
				 errhint("Name a function with one argument of type jsonb.")));
	ik_get_request(fcinfo, 3, 7, &request);

	/* the function goes where its tables are, if they are at the key's home */
	if (ik_is_colocated() && ik_send_home(fcinfo, request.scope, &result))
		return result;

	status = ik_claim_key(&request, &answer);
	replayed = status == KEY_COMPLETED || status == KEY_FAILED;

	if (status == KEY_CLAIMED)
	{
		FunctionCall call = {.request = request.request,.answer = &answer};

		resolve_function(PG_GETARG_TEXT_PP(2), &call);
		status = KEY_COMPLETED;
		if (PG_ARGISNULL(6) || !PG_GETARG_BOOL(6))
			call_function(&call);
		else if (!call_recording_errors(&call))
			status = KEY_FAILED;

		/* what the function itself did with its key stands */
		claim = ik_find_claim(request.scope, request.key);
		if (claim != NULL)
			ik_complete_claim(claim, status, &answer, 0);
		else if (!ik_read_answer(request.scope, request.key, &status, &answer))
			status = KEY_RELEASED;
	}

	ik_count(COUNT_RUN, replayed ? RUN_REPLAYED : status);
	values[0] = ik_status_datum(status);
	values[1] = BoolGetDatum(replayed);
	ik_put_answer(values + 2, nulls + 2, &answer);
	return ik_result(fcinfo, lengthof(types), types, values, nulls);
}

/* The function that a text names, if run() and the caller may call it. */
static void
resolve_function(const text *name, FunctionCall *call)
{
	Oid			function = find_function(name);
	HeapTuple	tuple;
	Form_pg_proc proc;
	AclResult	acl;

	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	if (!HeapTupleIsValid(tuple))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function \"%s\" does not exist",
						text_to_cstring(name))));
	proc = (Form_pg_proc) GETSTRUCT(tuple);
	if (proc->prokind != PROKIND_FUNCTION || proc->proretset ||
		proc->pronargs != 1 || proc->proargtypes.values[0] != JSONBOID ||
		(get_typtype(proc->prorettype) == TYPTYPE_PSEUDO &&
		 proc->prorettype != VOIDOID && proc->prorettype != RECORDOID))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("run() cannot call %s",
						format_procedure(function)),
				 errhint("The function must take one argument of type jsonb, return one value, and be neither a procedure nor an aggregate nor a window function.")));
	call->function = function;
	call->result_type = proc->prorettype;
	ReleaseSysCache(tuple);

	acl = object_aclcheck(ProcedureRelationId, function, GetUserId(),
						  ACL_EXECUTE);
	if (acl != ACLCHECK_OK)
		aclcheck_error(acl, OBJECT_FUNCTION, get_func_name(function));
	InvokeFunctionExecuteHook(function);
}

/*
 * "f" or "f(jsonb)", qualified or not, by the caller's search_path; the one
 * with an argument of type jsonb.
 */
static Oid
find_function(const text *name)
{
	char	   *signature = text_to_cstring(name);
	Size		len = strlen(signature);
	const Oid	jsonb = JSONBOID;
	ErrorContextCallback context = {.callback = hint_at_signature};
	Oid			function = InvalidOid;

	/* blanks at the end are none of the name, as for regprocedure itself */
	while (len > 0 && scanner_isspace(signature[len - 1]))
		signature[--len] = '\0';
	context.previous = error_context_stack;
	error_context_stack = &context;
	/* in most cases the name will do, and SQL's parser is not needed for a type */
	if (len > 0 && strchr(signature, '(') == NULL)
		function = LookupFuncName(compat_name_list(signature), 1, &jsonb, true);
	if (len == 0 || signature[len - 1] != ')')
		signature = psprintf("%s(pg_catalog.jsonb)", signature);
	if (!OidIsValid(function))
		function = DatumGetObjectId(DirectFunctionCall1(regprocedurein,
														CStringGetDatum(signature)));
	error_context_stack = context.previous;
	return function;
}

/* regprocedurein() says what it looked for, and cannot know what we want. */
static void
hint_at_signature(void *arg)
{
	if (geterrcode() == ERRCODE_UNDEFINED_FUNCTION)
		errhint("run() calls a function with one argument of type jsonb. Create it, or name its schema if the search_path does not.");
}

/*
 * Call the function with a fresh snapshot (READ COMMITTED): the claim may have
 * waited for a rival whose work it must see.
 */
static void
call_function(void *arg)
{
	FunctionCall *call = arg;
	LOCAL_FCINFO(fcinfo, 1);
	FmgrInfo	flinfo;
	PgStat_FunctionCallUsage usage;
	Datum		result;

	fmgr_info(call->function, &flinfo);
	InitFunctionCallInfoData(*fcinfo, &flinfo, 1, InvalidOid, NULL, NULL);
	fcinfo->args[0].value = PointerGetDatum(call->request);
	fcinfo->args[0].isnull = call->request == NULL;
	/* it would not be called, and an answer stored as if it had been */
	if (flinfo.fn_strict && call->request == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("request must not be null for %s, which is STRICT",
						format_procedure(call->function)),
				 errhint("Give a request, or declare the function CALLED ON NULL INPUT.")));

	PushActiveSnapshot(GetTransactionSnapshot());
	pgstat_init_function_usage(fcinfo, &usage);
	result = FunctionCallInvoke(fcinfo);
	pgstat_end_function_usage(&usage, true);
	if (!fcinfo->isnull && call->result_type != VOIDOID)
		read_result(call->result_type, result, call->answer);
	PopActiveSnapshot();
}

/* What a function returned: an idempotency.answer, or a response of any type. */
static void
read_result(Oid type, Datum value, KeyAnswer *answer)
{
	static const Oid types[2] = {TEXTOID, JSONBOID};
	HeapTupleHeader row;
	HeapTupleData tuple;
	TupleDesc	desc;
	Datum		values[2];
	bool		nulls[2];

	if (!is_answer_type(getBaseType(type)))
	{
		answer->response = ik_response_text(type, value);
		return;
	}
	row = DatumGetHeapTupleHeader(value);
	desc = lookup_rowtype_tupdesc(HeapTupleHeaderGetTypeId(row),
								  HeapTupleHeaderGetTypMod(row));
	ik_check_columns(desc, lengthof(types), types);
	tuple.t_data = row;
	tuple.t_len = HeapTupleHeaderGetDatumLength(row);
	heap_deform_tuple(&tuple, desc, values, nulls);
	ReleaseTupleDesc(desc);
	answer->response = nulls[0] ? NULL : DatumGetTextPP(values[0]);
	answer->meta = nulls[1] ? NULL : DatumGetJsonbP(values[1]);
}

static bool
is_answer_type(Oid type)
{
	return type_is_rowtype(type) &&
		type == GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid,
								CStringGetDatum("answer"),
								ObjectIdGetDatum(get_namespace_oid("idempotency", true))) &&
		ik_is_ours(TypeRelationId, type);
}

/*
 * The same in a subtransaction: an error that is to be recorded takes back
 * what the function wrote, and becomes the answer.  False: it failed.
 */
static bool
call_recording_errors(FunctionCall *call)
{
	ErrorData  *error = ik_try(call_function, call);

	if (error == NULL)
		return true;
	if (!is_recordable(error->sqlerrcode))
		ReThrowError(error);
	call->answer->response = NULL;
	call->answer->meta = describe_error(error);
	return false;
}

/*
 * Is an error the outcome of the request rather than of the moment?  RAISE
 * EXCEPTION, bad data, a violated constraint, and what the application defined
 * itself, that is, a class that PostgreSQL does not use (errcodes.txt).
 */
static bool
is_recordable(int sqlstate)
{
	static const char postgres_classes[] =
	"00 01 02 03 08 09 0A 0B 0F 0L 0P 0Z 10 20 21 24 25 26 27 28 2B 2D 2F "
	"34 38 39 3B 3D 3F 40 42 44 53 54 55 57 58 72 F0 HV P0 XX";
	char		class[3];

	if (sqlstate == ERRCODE_RAISE_EXCEPTION)
		return true;
	strlcpy(class, unpack_sql_state(sqlstate), sizeof(class));
	return strstr(postgres_classes, class) == NULL;
}

static Jsonb *
describe_error(const ErrorData *error)
{
	StringInfoData json;

	initStringInfo(&json);
	appendStringInfoChar(&json, '{');
	add_member(&json, "sqlstate", unpack_sql_state(error->sqlerrcode));
	add_member(&json, "message", error->message ? error->message : "");
	add_member(&json, "detail", error->detail);
	add_member(&json, "hint", error->hint);
	add_member(&json, "constraint", error->constraint_name);
	appendStringInfoChar(&json, '}');
	return DatumGetJsonbP(DirectFunctionCall1(jsonb_in,
											  CStringGetDatum(json.data)));
}

/* A member of the object, unless it has no value. */
static void
add_member(StringInfo json, const char *name, const char *value)
{
	if (value == NULL)
		return;
	if (json->len > 1)
		appendStringInfoString(json, ", ");
	appendStringInfo(json, "\"%s\": ", name);
	escape_json(json, value);
}
