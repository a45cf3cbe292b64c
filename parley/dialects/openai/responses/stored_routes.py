"""The routes of stored responses and conversations: read, list, cancel and delete."""

from __future__ import annotations

from collections.abc import Callable

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import json_answer
from parley.dialects.openai import object_lists
from parley.dialects.openai.metadata import read_metadata
from parley.dialects.openai.responses import stored
from parley.dialects.openai.responses.items import TRIGGER, read_item_type
from parley.dialects.openai.responses.response_rules import LENIENT
from parley.dialects.openai.responses.stored import Item, StoredConversation
from parley.dialects.records import StreamReplay
from parley.dialects.reply import Answer
from parley.dialects.request_context import RequestContext
from parley.errors import BadRequest, InvalidValue, UnknownRecord, Unsupported, excerpt

MAX_ADDED_ITEMS = 20


def read_response(body: bytes, context: RequestContext) -> Answer | StreamReplay:
    """Return a stored response, or a StreamReplay to stream it again. Raises UnknownRecord, BadRequest."""
    query = object_lists.read_query(context)
    record = stored.load_response(context, context.path_parts["id"])
    if query.string("stream", "false", allowed=("true", "false")) == "false":
        return json_answer(record.response)
    after = query.string("starting_after", "-1", cap=16)
    if not after.removeprefix("-").isdecimal():
        raise query.mistyped_member("starting_after", "an integer")
    reason = "background=true" if not record.response["background"] else "stream=true, or too long ago"
    if reason == "background=true":
        raise BadRequest(f"This response cannot be streamed because it was not created with {reason}.")
    return StreamReplay(
        record.response["id"],
        max(0, int(after) + 1),
        BadRequest(f"This response cannot be streamed because it was not created with {reason}."),
    )


def delete_response(body: bytes, context: RequestContext) -> Answer:
    """Delete a stored response; one that runs in the background is stopped. Raises UnknownRecord."""
    response_id = stored.load_response(context, context.path_parts["id"]).response["id"]
    context.records.stop_run(response_id)
    context.records.delete_record(response_id)
    return json_answer({"id": response_id, "object": "response", "deleted": True})


def cancel_response(body: bytes, context: RequestContext) -> Answer:
    """Stop a response that runs in the background. Raises UnknownRecord, BadRequest."""
    record = stored.load_response(context, context.path_parts["id"])
    response = record.response
    if not response["background"]:
        raise BadRequest("Cannot cancel a synchronous response.")
    if response["status"] == "cancelled":
        return json_answer(response)
    if not record.is_running:
        raise BadRequest(f"Cannot cancel a {response['status']} response.")
    if not context.records.stop_run(response["id"]):
        raise BadRequest("Cannot cancel a response that runs on another server.")
    response["status"] = "cancelled"
    record.keep(context.records, ())
    return json_answer(response)


def list_input_items(body: bytes, context: RequestContext) -> Answer:
    """List the items before the output of a response. Raises UnknownRecord, BadRequest."""
    return _list_items(stored.load_response(context, context.path_parts["id"]).input, context)


# -- conversations


def create_conversation(body: bytes, context: RequestContext) -> Answer:
    """Create a conversation. Raises BadRequest."""
    fields = decode_fields(body or b"{}")
    if not context.records.are_kept:
        raise Unsupported("This server stores no conversations.")
    conversation = {
        "id": f"conv_{context.unique_id}",
        "object": "conversation",
        "created_at": context.created,
        "metadata": read_metadata(fields),
    }
    record = StoredConversation(conversation, _read_added_items(fields, context))
    if not record.keep(context.records):
        raise stored.conversation_size_error("items")
    return json_answer(conversation)


def answer_stored_conversation(body: bytes, context: RequestContext) -> Answer:
    """Return a conversation. Raises UnknownRecord."""
    return json_answer(_load_conversation(context).conversation)


def update_conversation(body: bytes, context: RequestContext) -> Answer:
    """Replace the metadata of a conversation. Raises UnknownRecord, BadRequest."""
    _load_conversation(context)
    fields = decode_fields(body)
    if not fields.has_value("metadata"):
        raise fields.missing_member("metadata")
    metadata = read_metadata(fields)
    return json_answer(
        _change_conversation(
            context, lambda record: record.conversation.update(metadata=metadata), "metadata"
        ).conversation
    )


def delete_conversation(body: bytes, context: RequestContext) -> Answer:
    """Delete a conversation. Raises UnknownRecord."""
    conversation_id = _load_conversation(context).conversation["id"]
    context.records.delete_record(conversation_id)
    return json_answer({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


def add_items(body: bytes, context: RequestContext) -> Answer:
    """Add items to a conversation, and list them. Raises UnknownRecord, BadRequest."""
    _load_conversation(context)
    fields = decode_fields(body)
    if not fields.has_value("items"):
        raise fields.missing_member("items")
    added = _read_added_items(fields, context)
    _change_conversation(context, lambda record: record.items.extend(added), "items")
    return json_answer(object_lists.list_object(added, has_more=False))


def list_items(body: bytes, context: RequestContext) -> Answer:
    """List the items of a conversation. Raises UnknownRecord, BadRequest."""
    return _list_items(_load_conversation(context).items, context)


def answer_conversation_item(body: bytes, context: RequestContext) -> Answer:
    """Return an item of a conversation. Raises UnknownRecord."""
    return json_answer(_find_item(_load_conversation(context), context))


def delete_item(body: bytes, context: RequestContext) -> Answer:
    """Remove an item from a conversation, and return the conversation. Raises UnknownRecord."""
    return json_answer(
        _change_conversation(context, lambda record: record.items.remove(_find_item(record, context))).conversation
    )


def _load_conversation(context: RequestContext) -> StoredConversation:
    return stored.load_conversation(context, context.path_parts["id"])


def _change_conversation(
    context: RequestContext, change: Callable[[StoredConversation], None], field: str | None = None
) -> StoredConversation:
    return stored.change_conversation(context, context.path_parts["id"], change, field)


def _find_item(record: StoredConversation, context: RequestContext) -> Item:
    item_id = context.path_parts["item"]
    item = next((item for item in record.items if item["id"] == item_id), None)
    if item is None:
        raise UnknownRecord(f"Item with id {excerpt(item_id)} not found in this conversation.")
    return item


def _read_added_items(fields: Fields, context: RequestContext) -> list[Item]:
    """Return the items of ``items`` as they are stored. Raises BadRequest."""
    for item in fields.objects("items", cap=MAX_ADDED_ITEMS):
        if read_item_type(item, LENIENT) == TRIGGER:
            reason = "It asks a response for a summary, so only the input of a response may have it."
            path = item.member_path("type")
            raise InvalidValue(f"Invalid value for '{path}': '{TRIGGER}'. {reason}", field=path)
    return stored.with_ids(fields.array("items", cap=MAX_ADDED_ITEMS), context.unique_id)


def _list_items(items: list[Item], context: RequestContext) -> Answer:
    """List items as the query asks: ``limit``, ``order``, ``after``."""
    return json_answer(object_lists.slice_items(items, object_lists.read_list_query(object_lists.read_query(context))))
