"""Stored responses: the record of each with its input, and how later requests find them and their items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from parley.dialects.json_answer import encode_json
from parley.dialects.openai.responses.items import TRIGGER, unknown_item_error
from parley.dialects.openai.responses.members import StorageMembers
from parley.dialects.records import SILENT_SECONDS, RecordTooLarge, TenantRecords
from parley.dialects.request_context import RequestContext
from parley.errors import InvalidValue, UnknownRecord, excerpt

Item = dict[str, Any]
RUNNING = ("queued", "in_progress")
# Of a request from a WebSocket: its input begins with the items of the response that it continues, which is not stored.
# A client that sends the header itself deceives only itself.
HISTORY_HEADER = b"x-parley-history"
ITEM_PREFIXES = {
    "message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs", "shell_call": "sh",
    "local_shell_call": "lsh", "apply_patch_call": "apc", "computer_call": "cu",
    "tool_search_call": "tsc", "tool_search_output": "tso",
}  # fmt: skip
STATUS_KINDS = frozenset(  # items that are listed with a status
    ("message", "function_call", "function_call_output", "shell_call", "shell_call_output", "local_shell_call",
     "apply_patch_call", "apply_patch_call_output", "computer_call", "computer_call_output",
     "tool_search_call", "tool_search_output")
)  # fmt: skip
SLASH = "/"
LOST = {"code": "server_error", "message": "The server that ran this response has ended."}
TOO_LARGE = {"code": "server_error", "message": "The response is larger than the server's store of responses."}


def part_names(items: Sequence[Item]) -> list[str]:
    """Return the names of the parts of a record with these items: their ids. Clients choose some ids; those with a
    slash find nothing, because parts with a slash are objects of other kinds (``ObjectKind``)."""
    return [item["id"] for item in items if SLASH not in item["id"]]


class StoredResponse(msgspec.Struct):
    """A record: the response as clients get it, and all items before its output, those of earlier responses too."""

    response: dict[str, Any]
    input: list[Item]

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.response["status"] in RUNNING

    def keep(self, records: TenantRecords, new_items: Sequence[Item]) -> bool:
        """Keep the record; its own items, ``new_items`` and the output, are found by their ids. Return False if it is
        too large to be kept."""
        parts = part_names([*new_items, *self.response["output"]])
        return records.save_record(self.response["id"], encode_json(self), parts)


class StoredConversation(msgspec.Struct):
    """A record: a conversation as clients get it, and its items."""

    conversation: dict[str, Any]
    items: list[Item]

    def keep(self, records: TenantRecords) -> bool:
        """Keep the record. Return False if it is too large to be kept."""
        return records.save_record(self.conversation["id"], encode_json(self), part_names(self.items))


def find_response(context: RequestContext, response_id: str) -> StoredResponse | None:
    """Return a stored response, None if there is none. One whose server has ended while it ran has failed."""
    data = context.records.find_record(response_id) if response_id.startswith("resp_") else None
    if data is None:
        return None
    stored = msgspec.json.decode(data, type=StoredResponse)
    if stored.is_running and context.records.record_age(response_id) > SILENT_SECONDS:
        stored.response |= {"status": "failed", "error": LOST}
        stored.keep(context.records, ())
    return stored


def load_response(context: RequestContext, response_id: str) -> StoredResponse:
    """Return a stored response. Raises UnknownRecord."""
    stored = find_response(context, response_id)
    if stored is None:
        raise UnknownRecord(f"Response with id {excerpt(response_id)} not found.")
    return stored


def earlier_items(context: RequestContext, storage: StorageMembers) -> list[Item]:
    """Return the items that precede the input; none if the input has them already. Raises BadRequest, UnknownRecord.

    They have no triggers: each asked for the output of its own response only, which may have ended without a summary.
    """
    if context.records.are_inlined or HISTORY_HEADER in context.headers:
        return []
    items: list[Item] = []
    if storage.previous is not None:
        items = load_previous(context, storage.previous)
    elif storage.conversation is not None:
        items = load_conversation(context, storage.conversation).items
    return [item for item in items if item.get("type") != TRIGGER]


def keep_response(
    context: RequestContext, record: StoredResponse, new_items: Sequence[Item], conversation: str | None
) -> bool:
    """Keep a response, and add one that has ended to its conversation. Return whether the response is kept, and in its
    conversation; what is too large is not. Raises NotReady."""
    is_kept = record.keep(context.records, new_items)
    if not is_kept and record.response.get("background") and not record.is_running:
        _keep_failed(context, record)
    if conversation is not None and not record.is_running:
        is_added = add_to_conversation(context, conversation, [*new_items, *record.response["output"]])
        is_kept = is_kept and is_added
    return is_kept


def _keep_failed(context: RequestContext, record: StoredResponse) -> None:
    """Keep that a background response is too large to be kept, as its record says that it runs. If there is no room for
    that either, the response is unknown from now, like those that a full store drops."""
    failed: dict[str, Any] = {"status": "failed", "output": [], "error": record.response.get("error") or TOO_LARGE}
    failed |= {"incomplete_details": None, "completed_at": None}
    if not StoredResponse(record.response | failed, record.input).keep(context.records, ()):
        context.records.delete_record(record.response["id"])


def load_previous(context: RequestContext, response_id: str) -> list[Item]:
    """Return all items up to the end of a response. Raises BadRequest."""
    stored = find_response(context, response_id)
    if stored is None:
        reason = "" if context.records.are_kept else " This server stores no responses."
        message = f"Previous response with id {excerpt(response_id)} not found.{reason}"
        raise InvalidValue(message, field="previous_response_id", code="previous_response_not_found")
    if stored.is_running:
        message = f"Previous response with id {excerpt(response_id)} has not ended."
        raise InvalidValue(message, field="previous_response_id")
    return [*stored.input, *stored.response["output"]]


def load_conversation(context: RequestContext, conversation_id: str) -> StoredConversation:
    """Return a stored conversation. Raises UnknownRecord."""
    data = context.records.find_record(conversation_id) if conversation_id.startswith("conv_") else None
    if data is None:
        raise _unknown_conversation(conversation_id)
    return msgspec.json.decode(data, type=StoredConversation)


def change_conversation(
    context: RequestContext,
    conversation_id: str,
    change: Callable[[StoredConversation], None],
    field: str | None = None,
) -> StoredConversation:
    """Change a stored conversation; several clients may do so at a time. Raises UnknownRecord, the errors of
    ``change``, and InvalidValue if it would be too large because of ``field``."""
    record = load_conversation(context, conversation_id)

    def change_record(data: bytes) -> tuple[bytes, list[str]]:
        nonlocal record
        record = msgspec.json.decode(data, type=StoredConversation)
        change(record)
        return encode_json(record), part_names(record.items)

    try:
        is_known = context.records.update_record(conversation_id, change_record)
    except RecordTooLarge:
        raise conversation_size_error(field) from None
    if not is_known:
        raise _unknown_conversation(conversation_id)
    return record


def add_to_conversation(context: RequestContext, conversation_id: str, items: Sequence[Item]) -> bool:
    """Add items to a conversation, unless it was deleted meanwhile. Return False if it would be too large."""
    try:
        change_conversation(context, conversation_id, lambda record: record.items.extend(items))
    except InvalidValue:
        return False
    except UnknownRecord:
        pass
    return True


def conversation_size_error(field: str | None) -> InvalidValue:
    """Return the refusal of a conversation that is too large to be kept. ``field``: that makes it so."""
    return InvalidValue("The conversation would be larger than the server's store.", field=field)


def _unknown_conversation(conversation_id: str) -> UnknownRecord:
    return UnknownRecord(f"Conversation with id {excerpt(conversation_id)} not found.")


def find_item(context: RequestContext, item_id: str) -> Item:
    """Return a stored item of a response or a conversation. Raises UnknownRecord."""
    data = context.records.find_part(item_id) if SLASH not in item_id else None
    record: dict[str, Any] = {"items": []} if data is None else msgspec.json.decode(data)
    items: list[Item] = record["items"] if "items" in record else record["input"] + record["response"]["output"]
    item = next((item for item in reversed(items) if item["id"] == item_id), None)
    if item is None:
        raise unknown_item_error(item_id)
    return item


def with_ids(items: Sequence[Any], unique_id: str) -> list[Item]:
    """Return items as they are listed: with ids, messages and calls with a status, and messages with parts."""
    return [_with_id(item, unique_id, number) for number, item in enumerate(items) if isinstance(item, dict)]


def _with_id(item: Item, unique_id: str, number: int) -> Item:
    kind = item.get("type") or "message"
    item_id = item.get("id")
    if not isinstance(item_id, str) or not item_id:
        item_id = f"{ITEM_PREFIXES.get(kind, 'item')}_{unique_id}i{number:04x}"
    listed = {"id": item_id, "type": kind}
    if kind in STATUS_KINDS:
        listed["status"] = item.get("status") or "completed"
    if kind == "message":
        listed["content"] = item.get("content")
    listed |= {name: value for name, value in item.items() if name not in listed}
    if kind == "message" and isinstance(listed["content"], str):
        part_type = "output_text" if item.get("role") == "assistant" else "input_text"
        listed["content"] = [{"type": part_type, "text": listed["content"]}]
    if kind == "message" and isinstance(listed["content"], list):
        listed["content"] = list(map(_with_part_members, listed["content"]))
    return listed


def _with_part_members(part: Any) -> Any:
    """Return a part of a message with the members that typed clients require of the assistant's text."""
    if not isinstance(part, dict) or part.get("type") != "output_text":
        return part
    return {"type": "output_text", "annotations": [], "logprobs": []} | part
