"""The conversation of a request: messages, results of tools, images, and documents that the model may quote.

Documents go to the model's chat template where that has a place for them; otherwise the last turn of the user begins
with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from parley.dialects.cohere.api_rules import CohereRules
from parley.dialects.cohere.refusal_wording import check_cohere_members
from parley.dialects.fields import Fields
from parley.dialects.json_answer import encode_json
from parley.dialects.media import check_media_counts, interleave_parts
from parley.dialects.openai.media_parts import MediaReader
from parley.dialects.request_context import RequestContext
from parley.errors import InvalidValue
from parley.types import Media, Message, ToolCall

MAX_MESSAGES = 10_000
MAX_PARTS = 1024
MAX_CALLS = 128
MAX_DOCUMENTS = 4096
MAX_ID_CHARACTERS = 512  # of calls and documents; the id of a call contains the name of its tool
MAX_NAME_CHARACTERS = 256
ROLES = ("user", "assistant", "system", "tool")
JOINT = "\n"  # between two texts of one message
USER_MEMBERS = {"role", "content"}
MESSAGE_MEMBERS = {
    "user": USER_MEMBERS,
    "system": USER_MEMBERS,
    "assistant": USER_MEMBERS | {"tool_calls", "tool_plan", "citations"},
    "tool": USER_MEMBERS | {"tool_call_id"},
}
TEXT_MEMBERS = {"type", "text"}
THINKING_MEMBERS = {"type", "thinking"}
IMAGE_MEMBERS = {"type", "image_url"}
DOCUMENT_PART_MEMBERS = {"type", "document"}
DOCUMENT_MEMBERS = {"data", "id"}
CALL_MEMBERS = {"id", "type", "function"}
FUNCTION_MEMBERS = {"name", "arguments"}
PART_TYPES = {  # that a message may have, by its role
    "user": ("text", "image_url"),
    "system": ("text",),
    "assistant": ("text", "thinking"),
    "tool": ("text", "document"),
}
NO_CALL_ID = "tool call id must be provided with tool message"
UNKNOWN_CALL_ID = "tool call id not found in previous tool calls"
REPEATED_CALL_ID = "cannot have duplicate tool ids"


class Document(NamedTuple):
    """A document that the model may quote. ``id``: as the client named it, None if it did not. ``data``: the members
    that the model reads, which may have an ``id`` of their own."""

    id: str | None
    data: dict[str, Any]

    def template_object(self) -> dict[str, Any]:
        """Return the document as chat templates read it."""
        return self.data if self.id is None else {"id": self.id} | self.data


class _ImagePartReader(MediaReader):
    part_types = ("image_url",)


class CohereMessageReader:
    """Reads the messages of one request."""

    def __init__(self, rules: CohereRules, context: RequestContext):
        self._rules = rules
        self._limits = context.media_limits
        self._images = _ImagePartReader(context.media_limits, plain_urls=not rules.strict)
        self._call_ids: set[str] = set()

    def read_messages(self, body: Fields) -> list[Message]:
        """Return the messages, at least one. Raises BadRequest."""
        if body.raw_value("messages") == []:
            raise body.empty_member("messages", "array")
        messages = [self._read_message(item) for item in body.objects("messages", cap=MAX_MESSAGES)]
        if not messages:
            raise body.missing_member("messages")
        check_media_counts((placed.media for message in messages for placed in message.media), self._limits)
        return messages

    def _read_message(self, item: Fields) -> Message:
        role = item.string("role", None, allowed=ROLES)
        if role is None:
            raise item.missing_member("role")
        check_cohere_members(item, MESSAGE_MEMBERS[role], self._rules)
        if role == "assistant":
            return self._read_assistant_message(item)
        if not item.has_value("content"):
            raise item.missing_member("content")
        content = interleave_parts(self._read_parts(item, role), JOINT)
        if role == "tool":
            return Message("tool", content.text, tool_call_id=self._read_answered_call(item))
        return Message(role, content.text, media=content.media)

    def _read_answered_call(self, item: Fields) -> str:
        """Return the id of the call that a message of a tool answers. Raises BadRequest."""
        call_id = item.string("tool_call_id", None, cap=MAX_ID_CHARACTERS)
        path = item.member_path("tool_call_id")
        if not call_id:
            raise InvalidValue(f"{NO_CALL_ID}: '{path}'", field=path)
        if self._rules.strict and call_id not in self._call_ids:
            raise InvalidValue(f"{UNKNOWN_CALL_ID}: '{path}' is {call_id[:60]!r}", field=path)
        return call_id

    def _read_assistant_message(self, item: Fields) -> Message:
        item.array("citations", cap=MAX_DOCUMENTS)  # of an earlier answer; they are no part of its text
        texts: list[str] = []
        thoughts = [item.string("tool_plan", "")]
        for part in self._part_objects(item):
            if isinstance(part, str):
                texts.append(part)
            elif self._read_part_type(part, "assistant") == "thinking":
                thoughts.append(self._read_text(part, "thinking", THINKING_MEMBERS))
            else:
                texts.append(self._read_text(part, "text", TEXT_MEMBERS))
        calls = [self._read_call(call) for call in item.objects("tool_calls", cap=MAX_CALLS)]
        texts, thoughts = list(filter(None, texts)), list(filter(None, thoughts))
        if not (texts or thoughts or calls or item.has_value("content")):
            raise item.missing_member("content")
        content = JOINT.join(texts) if texts or not calls else None
        return Message("assistant", content, None, JOINT.join(thoughts) or None, calls)

    def _read_call(self, call: Fields) -> ToolCall:
        check_cohere_members(call, CALL_MEMBERS, self._rules)
        call.string("type", "function", allowed=("function",))
        call_id = call.string("id", None, cap=MAX_ID_CHARACTERS)
        if not call_id:
            raise call.missing_member("id")
        if self._rules.strict and call_id in self._call_ids:
            path = call.member_path("id")
            raise InvalidValue(f"{REPEATED_CALL_ID}: '{path}' is {call_id[:60]!r}", field=path)
        self._call_ids.add(call_id)
        function = call.object("function")
        if function is None:
            raise call.missing_member("function")
        check_cohere_members(function, FUNCTION_MEMBERS, self._rules)
        name = function.string("name", None, cap=MAX_NAME_CHARACTERS)
        if not name:
            raise function.missing_member("name")
        return ToolCall(call_id, name, function.string("arguments", "{}") or "{}")

    # -- parts of a content

    def _part_objects(self, item: Fields) -> Iterator[str | Fields]:
        """Yield the content: a text as such, else its parts. The original takes a single part in place of a list."""
        content = item.raw_value("content")
        if isinstance(content, str):
            yield item.string("content", "")
        elif isinstance(content, dict) and not self._rules.strict:
            yield from item.with_members({"content": [content]}).objects("content", cap=MAX_PARTS)
        else:
            yield from item.objects("content", cap=MAX_PARTS)

    def _read_parts(self, item: Fields, role: str) -> Iterator[str | Media]:
        for part in self._part_objects(item):
            if isinstance(part, str):
                yield part
                continue
            match self._read_part_type(part, role):
                case "image_url":
                    check_cohere_members(part, IMAGE_MEMBERS, self._rules)
                    yield self._images.read_item(part, "image_url", plain_urls=not self._rules.strict)
                case "document":
                    check_cohere_members(part, DOCUMENT_PART_MEMBERS, self._rules)
                    document = part.object("document")
                    if document is None:
                        raise part.missing_member("document")
                    yield result_text(read_document(document, self._rules))
                case _:
                    yield self._read_text(part, "text", TEXT_MEMBERS)

    def _read_part_type(self, part: Fields, role: str) -> str:
        part_type = part.string("type", None, allowed=PART_TYPES[role])
        if part_type is None:
            raise part.missing_member("type")
        return part_type

    def _read_text(self, part: Fields, member: str, allowed: set[str]) -> str:
        check_cohere_members(part, allowed, self._rules)
        text = part.string(member, None)
        if text is None:
            raise part.missing_member(member)
        return text


# -- documents


def read_documents(body: Fields, rules: CohereRules) -> list[Document]:
    """Return the documents, whose ids differ and whose data are not empty. Raises BadRequest."""
    values = body.array("documents", cap=MAX_DOCUMENTS)
    as_objects = [{"data": value} if isinstance(value, str) else value for value in values]
    documents: list[Document] = []
    indexes_by_id: dict[str, int] = {}
    for index, item in enumerate(body.with_members({"documents": as_objects}).objects("documents", cap=MAX_DOCUMENTS)):
        document = read_document(item, rules)
        if all(value in ("", None) for value in document.data.values()):
            path = item.member_path("data")
            raise InvalidValue(f"invalid request: document at index {index} cannot be empty: '{path}'", field=path)
        if document.id is not None and indexes_by_id.setdefault(document.id, index) != index:
            path, where = item.member_path("id"), f"at index {index} and {indexes_by_id[document.id]}"
            raise InvalidValue(
                f"invalid request: duplicate document ID {document.id[:60]} {where}: '{path}'", field=path
            )
        documents.append(document)
    return documents


def read_document(item: Fields, rules: CohereRules) -> Document:
    """Return a document, whose data may be one text. Raises BadRequest."""
    check_cohere_members(item, DOCUMENT_MEMBERS, rules)
    document_id = item.string("id", None, cap=MAX_ID_CHARACTERS)
    if not item.has_value("data"):
        raise item.missing_member("data")
    is_text = isinstance(item.raw_value("data"), str)
    return Document(document_id, {"text": item.string("data", "")} if is_text else item.free_object("data"))


def result_text(document: Document) -> str:
    """Return a document in a tool's result as the model reads it: its text alone, or an object."""
    text = document.data.get("text")
    return text if isinstance(text, str) and len(document.data) == 1 else encode_json(document.data).decode()


def place_documents(
    messages: list[Message], documents: Sequence[Document], context: RequestContext
) -> tuple[list[Message], dict[str, Any]]:
    """Return the messages and the variables of the chat template, with the documents in one of the two: as a variable
    if the template reads it."""
    if documents and "documents" in context.abilities:
        return messages, {"documents": [document.template_object() for document in documents]}
    return _with_documents(messages, documents) if documents else messages, {}


def _with_documents(messages: Sequence[Message], documents: Sequence[Document]) -> list[Message]:
    """Return the messages with the documents at the start of the user's last turn, or after all if there is none."""
    text = "\n\n".join(_document_text(number, document) for number, document in enumerate(documents))
    place = max((place for place, message in enumerate(messages) if message.role == "user"), default=None)
    if place is None:
        return [*messages, Message("user", text)]
    turn, start = messages[place], f"{text}\n\n"
    media = [msgspec.structs.replace(placed, position=placed.position + len(start)) for placed in turn.media]
    changed_turn = msgspec.structs.replace(turn, content=start + (turn.content or ""), media=media)
    return [*messages[:place], changed_turn, *messages[place + 1 :]]


def _document_text(number: int, document: Document) -> str:
    """Return a document as text: its id or number, and a line for each member."""
    lines = [f"Document {number if document.id is None else document.id}:"]
    for name, value in document.data.items():
        lines.append(f"{name}: {value if isinstance(value, str) else encode_json(value).decode()}")
    return "\n".join(lines)
