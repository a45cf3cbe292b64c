"""The spans of one request in one process. They are created when it has ended, from times that were recorded anyway.

So tracing costs nothing while a request runs. The exporter encodes the spans of several requests together, which is
faster because code and data stay in the processor's caches. Times are from ``time.perf_counter``, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from time import perf_counter, time_ns
from typing import Protocol

from parley.tracing.encode_spans import NO_ATTRIBUTES, Attributes, SpanKind, encode_span
from parley.tracing.trace_context import TraceContext, read_trace_context

EncodeSpans = Callable[[], bytes]  # encodes spans that have ended

_random = Random()  # seeded by the operating system, so that no two processes draw the same ids


class SpanExporter(Protocol):
    """Sends spans elsewhere. No method blocks or raises, but for ``close``, which takes a bounded time."""

    def samples_trace(self, trace_id: int, parent: TraceContext | None) -> bool:
        """Whether the spans of a trace are recorded. ``parent``: the client's span, if it has one."""

    def export_spans(self, ended: list[EncodeSpans]) -> None:
        """Encode and send the spans of a request later, perhaps in another thread."""

    def close(self) -> None:
        """Send the last spans."""


class RequestTrace:
    """The spans of a request here, below one of its client if ``headers`` name that.

    ``context``: the span of the whole request in this process.
    """

    def __init__(self, exporter: SpanExporter, headers: Mapping[bytes, bytes]):
        self._exporter = exporter
        self._parent = parent = read_trace_context(headers)
        trace_id = _random.getrandbits(128) or 1 if parent is None else parent.trace_id
        sampled = exporter.samples_trace(trace_id, parent)
        self.context = TraceContext(
            trace_id, _random.getrandbits(64) or 1, sampled, b"" if parent is None else parent.state
        )
        self.started_at = perf_counter()
        self._clock_offset = time_ns() - round(self.started_at * 1e9)  # one for all spans, so that they fit together
        self._ended: list[EncodeSpans] = []
        self._is_finished = False

    def new_context(self) -> TraceContext:
        """Return the context of another span of this trace."""
        context = self.context
        return TraceContext(context.trace_id, _random.getrandbits(64) or 1, context.sampled, context.state)

    def add_span(
        self,
        name: str,
        started_at: float,
        ended_at: float,
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        kind: SpanKind = "internal",
        context: TraceContext | None = None,
        error: str = "",
    ) -> None:
        """Add a span that has ended, below that of the request. ``context``: its own, if it is known.

        Nothing happens if the trace is not recorded.
        """
        self.add_later(
            partial(self.encode_span, name, started_at, ended_at, attributes, kind=kind, context=context, error=error)
        )

    def add_later(self, encode: EncodeSpans) -> None:
        """Add spans that ``encode`` encodes later. Nothing happens if the trace is not recorded."""
        if self.context.sampled:
            self._ended.append(encode)
            if self._is_finished:  # work of the request continues in the background
                self._export_ended()

    def finish(self, encode: EncodeSpans) -> None:
        """Add the span of the whole request, which ``encode`` encodes later, and export all."""
        self._is_finished = True
        self.add_later(encode)

    def encode_span(
        self,
        name: str,
        started_at: float,
        ended_at: float,
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        kind: SpanKind = "internal",
        context: TraceContext | None = None,
        parent: TraceContext | None = None,
        error: str = "",
        encoded_attributes: bytes = b"",
    ) -> bytes:
        """Encode a span that has ended, below ``parent`` or the span of the request. ``context``: its own, if it is
        known; ``encoded_attributes``: further ones, from ``encode_attributes``."""
        offset = self._clock_offset
        return encode_span(
            name,
            kind,
            context or self.new_context(),
            parent or self.context,
            offset + int(started_at * 1e9),
            offset + int(max(started_at, ended_at) * 1e9),
            attributes,
            error,
            encoded_attributes,
        )

    def encode_request_span(self, name: str, ended_at: float, attributes: Attributes, error: str = "") -> bytes:
        """Encode the span of the whole request."""
        start_time, end_time = self._wall_time(self.started_at), self._wall_time(ended_at)
        return encode_span(name, "server", self.context, self._parent, start_time, end_time, attributes, error)

    def _export_ended(self) -> None:
        ended, self._ended = self._ended, []
        self._exporter.export_spans(ended)

    def _wall_time(self, seconds: float) -> int:
        return self._clock_offset + int(seconds * 1e9)
