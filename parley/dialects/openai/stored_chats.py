"""Stored chat completions: what ``store`` keeps of a request and its answer, also where that passes a coordinator."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import msgspec

from parley.dialects.dialect import RequestContext
from parley.dialects.fields import Fields, decode_fields
from parley.dialects.json_answer import encode_json
from parley.dialects.openai.chunks import StreamedCompletion
from parley.dialects.openai.metadata import read_metadata
from parley.dialects.records import InlinedRequest
from parley.dialects.stored_objects import ObjectKind
from parley.errors import NotReady

COMPLETIONS = ObjectKind("chat", "chatcmpl-")
STORE_PATTERN = re.compile(rb'"store"\s*:\s*true')  # in every body that asks for it
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
    """Return a request for a completion that a coordinator stores. Raises BadRequest."""
    keeper = read_keeper(decode_fields(body), context)
    return InlinedRequest(body) if keeper is None else InlinedChat(body, keeper)


class InlinedChat(InlinedRequest):
    """A request whose completion is kept as it passes."""

    def __init__(self, body: bytes, keeper: CompletionKeeper):
        super().__init__(body)
        self._keeper = keeper

    def watch_body(self, data: bytes) -> None:
        """Keep the completion."""
        self._keeper.keep(msgspec.json.decode(data, type=dict[str, Any]))

    def watch_stream(self, data: bytes) -> None:
        """Read a part of the stream, and keep its completion at the end."""
        self._keeper.watch_stream(data)
