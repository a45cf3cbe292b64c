"""The routes of stored chat completions: read, list, change and delete."""

from __future__ import annotations

from typing import Any

import msgspec

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json, json_answer
from parley.dialects.openai import object_lists
from parley.dialects.openai.metadata import MAX_KEY, MAX_VALUE, read_metadata
from parley.dialects.openai.stored_chats import COMPLETIONS, StoredCompletion
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.dialects.route import QuerySchemas, Route
from parley.errors import InvalidValue, UnknownRecord, excerpt


def read_completion(body: bytes, context: RequestContext) -> Answer:
    """Return a stored completion. Raises UnknownRecord."""
    return json_answer(_load_completion(context).completion)


def update_completion(body: bytes, context: RequestContext) -> Answer:
    """Replace the metadata of a stored completion. Raises UnknownRecord, BadRequest."""
    record = _load_completion(context)
    fields = decode_fields(body)
    if not fields.has_value("metadata"):
        raise fields.missing_member("metadata")
    metadata = read_metadata(fields)

    def change(data: bytes) -> bytes:
        nonlocal record
        record = msgspec.json.decode(data, type=StoredCompletion)
        record.completion["metadata"] = metadata
        return encode_json(record)

    completion = record.completion
    if not COMPLETIONS.update(context.records, completion["id"], completion["created"], change):
        raise _unknown_completion(context)
    return json_answer(record.completion)


def delete_completion(body: bytes, context: RequestContext) -> Answer:
    """Delete a stored completion. Raises UnknownRecord."""
    completion = _load_completion(context).completion
    context.records.delete_record(COMPLETIONS.record_name(completion["id"], completion["created"]))
    return json_answer({"object": "chat.completion.deleted", "id": completion["id"], "deleted": True})


def list_messages(body: bytes, context: RequestContext) -> Answer:
    """List the messages of the request for a stored completion. Raises UnknownRecord, BadRequest."""
    record = _load_completion(context)
    completion_id = record.completion["id"]
    messages = [_listed_message(message, f"{completion_id}-{number}") for number, message in enumerate(record.messages)]
    list_query = object_lists.read_list_query(object_lists.read_query(context), default_order="asc")
    return json_answer(object_lists.slice_items(messages, list_query))


def list_completions(body: bytes, context: RequestContext) -> Answer:
    """List stored completions, of one model or with some metadata if the query says so. Raises BadRequest."""
    query = object_lists.read_query(context)
    model, wanted_metadata = query.string("model", None, cap=object_lists.MAX_ID), _wanted_metadata(query)
    list_query = object_lists.read_list_query(query, default_order="asc")

    def read_listed(data: bytes) -> dict[str, Any] | None:
        completion = msgspec.json.decode(data, type=StoredCompletion).completion
        is_wanted = model in (None, completion["model"]) and wanted_metadata.items() <= completion["metadata"].items()
        return completion if is_wanted else None

    after = None
    if list_query.after is not None:
        before = _find_completion(context, list_query.after)
        if before is None:
            message = f"Invalid 'after': there is no stored completion {excerpt(list_query.after)}."
            raise InvalidValue(message, field="after")
        after = COMPLETIONS.record_name(before.completion["id"], before.completion["created"])
    page, has_more = COMPLETIONS.list_page(
        context.records, read_listed, limit=list_query.limit, after=after, newest_first=list_query.newest_first
    )
    return json_answer(object_lists.list_object(page, has_more=has_more))


def _wanted_metadata(query: Fields) -> dict[str, str]:
    """Return the pairs that the query names as ``metadata[key]``. Raises InvalidValue."""
    wanted_metadata = {}
    for name in query.member_names:
        key = name.removeprefix("metadata[").removesuffix("]")
        if f"metadata[{key}]" == name:
            if len(key) > MAX_KEY:
                raise query.member_error(name, f"keys have at most {MAX_KEY} characters, but this has {len(key)}.")
            wanted_metadata[key] = query.string(name, "", cap=MAX_VALUE)
    return wanted_metadata


def _listed_message(message: dict[str, Any], message_id: str) -> dict[str, Any]:
    """Return a message as it is listed: a content of several parts has a member of its own."""
    content = message.get("content")
    if isinstance(content, list):
        return {"id": message_id} | message | {"content": None, "content_parts": content}
    return {"id": message_id} | message | {"content": content, "content_parts": None}


def _find_completion(context: RequestContext, completion_id: str) -> StoredCompletion | None:
    data = COMPLETIONS.find(context.records, completion_id)
    return None if data is None else msgspec.json.decode(data, type=StoredCompletion)


def _load_completion(context: RequestContext) -> StoredCompletion:
    record = _find_completion(context, context.path_parts["id"])
    if record is None:
        raise _unknown_completion(context)
    return record


def _unknown_completion(context: RequestContext) -> UnknownRecord:
    return UnknownRecord(f"Chat completion with id {excerpt(context.path_parts['id'])} not found.")


LIST_QUERY: QuerySchemas = {
    "limit": {"type": "integer", "minimum": 1, "maximum": object_lists.MAX_LISTED},
    "order": {"type": "string", "enum": ["asc", "desc"]},
    "after": {"type": "string", "minLength": 1, "maxLength": object_lists.MAX_ID},
}
COMPLETIONS_PATH = "/v1/chat/completions"
ROUTES = (
    Route(
        "GET",
        COMPLETIONS_PATH,
        "stored",
        reader=list_completions,
        reads_many=True,
        query={**LIST_QUERY, "model": {"type": "string", "minLength": 1, "maxLength": object_lists.MAX_ID}},
    ),
    Route("GET", COMPLETIONS_PATH + "/{id}", "stored", reader=read_completion),
    Route("POST", COMPLETIONS_PATH + "/{id}", "stored", reader=update_completion),
    Route("DELETE", COMPLETIONS_PATH + "/{id}", "stored", reader=delete_completion),
    Route("GET", COMPLETIONS_PATH + "/{id}/messages", "stored", reader=list_messages, query=LIST_QUERY),
)
