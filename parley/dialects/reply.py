"""The answer to a request: a complete ``Answer``, or a ``Reply`` that makes one of the events of a generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import msgspec

from parley.errors import ParleyError
from parley.types import Event, Request, Usage


class RequestTimings(msgspec.Struct, frozen=True):
    """The seconds of each phase of an answered request: validation, the engine's queue, inference, in total.

    ``prefill``: the part of inference up to the first token. ``decode``: from the first token to the last. Both are
    None if there are no tokens, and ``prefill`` is None if another instance computed it.
    """

    total: float
    validation: float
    queue: float
    inference: float
    prefill: float | None = None
    decode: float | None = None


class Answer(NamedTuple):
    """A complete answer: HTTP status, body, content type (no header is sent if it is empty)."""

    status: int = 200
    body: bytes = b""
    content_type: bytes = b"application/json"


class Acknowledgement(Answer):
    """The answer to a generating request that asks for nothing to be generated, and is no refusal."""


HeaderList = Sequence[tuple[bytes, bytes]]


class Reply(ABC):
    """One request of one API and everything that is answered to it, as a stream or in one piece.

    The server reads ``request``, passes events as they arrive, and takes bytes. For a stream it calls ``render_chunk``
    for each batch of events (an empty result means that there is nothing to send yet), then ``finish_stream`` or
    ``fail_stream`` once. For an answer in one piece it calls ``add_events`` for each batch, then ``render_body``, then
    reads ``content_type``, ``content_coding`` (gzip or deflate; the server compresses) and ``answer_headers``.
    ``field_names`` maps the neutral fields that the server's errors mention ("prompt") to this API's own names.
    ``ping_bytes`` are sent into a silent stream, every ``ping_interval`` seconds if this API has a customary interval
    and the server has no other setting; if empty, nothing is sent. ``endpoint_name``: the endpoint that the request is
    for; ``served_model``: its model that the server chose, under the endpoint's name for it. ``timings`` are set before
    ``finish_stream`` and ``render_body``.

    ``background_name``: if not empty, the request runs in the background, as a stream, and keeps a record of this name
    itself; the client gets ``render_accepted``, or follows the stream if it asked for one.
    """

    content_type: bytes = b"application/json"
    content_coding: bytes = b""
    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    field_names: ClassVar[Mapping[str, str]] = {}
    ping_bytes: ClassVar[bytes] = b": ping\n\n"
    ping_interval: ClassVar[float | None] = None
    request: Request
    endpoint_name: str = ""
    served_model: str = ""
    background_name: str = ""
    timings: RequestTimings | None = None

    @abstractmethod
    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Return the part of the stream that these events produce."""

    @abstractmethod
    def finish_stream(self, usage: Usage) -> bytes:
        """Return the last bytes of a stream after every choice has ended."""

    @abstractmethod
    def fail_stream(self, error: ParleyError) -> bytes:
        """Return the last bytes of a stream that ends with an error. If it raises the error, the connection is cut."""

    def render_accepted(self) -> bytes:
        """Return the answer to a request that runs in the background."""
        raise AssertionError("it does not run in the background")

    def render_ping(self) -> bytes:
        """Return the bytes to send into a silent stream now."""
        return self.ping_bytes

    def render_refusal(self, error: ParleyError) -> Answer | None:
        """Return the answer to an error before anything is sent, or None for the dialect's usual error answer."""
        return None

    @abstractmethod
    def add_events(self, events: Sequence[Event]) -> None:
        """Add these events to the answer in one piece."""

    @abstractmethod
    def render_body(self, usage: Usage) -> bytes:
        """Return the complete answer in one piece."""

    def answer_headers(self, timings: RequestTimings | None) -> HeaderList:
        """Return the headers of this answer. ``timings`` is None for a stream, whose headers are sent first."""
        return ()


class UnstreamedReply(Reply):
    """A reply that is never a stream. Its request must not ask for one."""

    def render_chunk(self, events: Sequence[Event]) -> bytes:
        """Raise AssertionError: there is no stream."""
        raise AssertionError("no stream was asked for")

    def finish_stream(self, usage: Usage) -> bytes:
        """Raise AssertionError: there is no stream."""
        raise AssertionError("no stream was asked for")

    def fail_stream(self, error: ParleyError) -> bytes:
        """Raise AssertionError: there is no stream."""
        raise AssertionError("no stream was asked for")
