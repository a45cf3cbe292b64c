"""Stored chat completions: the parts of a request and its answer that ``store`` keeps, on a server or in a
coordinator."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import msgspec

from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.chunks import StreamedCompletion
from parley.dialects.openai.metadata import read_metadata
from parley.dialects.openai.uploaded_files import with_uploaded_file
from parley.dialects.records import InlinedRequest
from parley.dialects.request_context import RequestContext
from parley.dialects.stored_objects import ObjectKind
from parley.errors import NotReady

COMPLETIONS = ObjectKind("chat", "chatcmpl-")
# In every body that asks for it, or that names a file.
RECORD_PATTERN = re.compile(rb'"store"\s*:\s*true|"file_id"')
# Members of a request that its stored completion shows.
SHOWN_MEMBERS = (
    "frequency_penalty", "presence_penalty", "response_format", "seed", "temperature", "tool_choice", "tools", "top_p",
)  # fmt: skip


class StoredCompletion(msgspec.Struct):
    """A record: a completion as clients get it, and the messages of its request."""

    completion: dict[str, Any]
    messages: list[dict[str, Any]]


class CompletionKeeper:
    """Keeps the completion that answers a request."""

    def __init__(self, body: Fields, context: RequestContext):
        self._records = context.records
        self._messages: list[dict[str, Any]] = body.array("messages", cap=1 << 31)
        self._shown = {name: body.raw_value(name) for name in SHOWN_MEMBERS}
        self._shown |= {"input_user": body.raw_value("user"), "metadata": read_metadata(body)}
        self._streamed = StreamedCompletion()

    def keep(self, completion: dict[str, Any]) -> None:
        """Keep a completion. If the store fails, which has logged it, the client gets its answer nevertheless."""
        record = StoredCompletion(self._shown | completion, self._messages)
        with contextlib.suppress(NotReady):
            COMPLETIONS.save(self._records, completion["id"], completion["created"], encode_json(record))

    def watch_stream(self, data: bytes, usage: dict[str, Any] | None = None) -> None:
        """Read a part of a stream, and keep its completion at the end. ``usage``: where the stream may lack it."""
        if self._streamed.add_bytes(data):
            completion = self._streamed.join_chunks()
            self.keep(completion if usage is None else completion | {"usage": usage})


def is_stored(body: Fields, context: RequestContext) -> bool:
    """Return whether the completion is stored, here or by a coordinator. Raises BadRequest."""
    return body.boolean("store", False) and context.records.are_kept


def read_keeper(body: Fields, context: RequestContext) -> CompletionKeeper | None:
    """Return the keeper of the completion; None if the request or the server stores none. Raises BadRequest."""
    if not body.boolean("store", False):
        return None
    keeper = CompletionKeeper(body, context)
    return keeper if context.records.are_kept and not context.records.are_inlined else None


def inline_chat(body: bytes, context: RequestContext) -> InlinedRequest:
    """Return a request for a completion that a coordinator stores, with the files that its messages name by id.

    Raises BadRequest, and UnknownRecord if there is no such file.
    """
    fields = decode_fields(body)
    keeper = read_keeper(fields, context)
    messages: list[Any] = fields.array("messages", cap=1 << 31)
    inlined = [
        _with_uploads(message, f"messages[{number}]", context) if context.records.are_kept else message
        for number, message in enumerate(messages)
    ]
    if inlined != messages:
        body = encode_json({name: fields.raw_value(name) for name in fields.member_names} | {"messages": inlined})
    return InlinedRequest(body) if keeper is None else InlinedChat(body, keeper)


def _with_uploads(message: Any, place: str, context: RequestContext) -> Any:
    """Return a message with uploaded files in place of their ids; the message itself if it names none."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    inlined = [_with_upload(part, f"{place}.content[{number}].file", context) for number, part in enumerate(parts)]
    return message | {"content": inlined} if inlined != parts else message


def _with_upload(part: Any, place: str, context: RequestContext) -> Any:
    file_object = part.get("file") if isinstance(part, dict) else None
    if not isinstance(file_object, dict) or file_object.get("file_id") is None:
        return part
    fields = with_uploaded_file(Fields(file_object, place), "file_data", context)
    others = {name: value for name, value in file_object.items() if name != "file_id"}
    return part | {"file": others | {"file_data": fields.raw_value("file_data")}}


class InlinedChat(InlinedRequest):
    """A request whose completion is kept as it passes."""

    def __init__(self, body: bytes, keeper: CompletionKeeper):
        super().__init__(body)
        self._keeper = keeper

    def watch_body(self, data: bytes) -> bytes:
        """Keep the completion, and return it."""
        self._keeper.keep(msgspec.json.decode(data, type=dict[str, Any]))
        return data

    def watch_stream(self, data: bytes) -> bytes:
        """Read a part of the stream, and keep its completion at the end. Return the part."""
        self._keeper.watch_stream(data)
        return data
