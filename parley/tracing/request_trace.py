"""The spans of one request in one process. A span is made when it has ended, from times that are known by then.

So a request costs nothing more while it runs. Times are from ``time.perf_counter``, in seconds.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from random import Random
from time import perf_counter, time_ns
from typing import Literal, NamedTuple, Protocol

from parley.tracing.trace_context import TRACESTATE, TraceContext, read_trace_context

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = dict[str, AttributeValue]
SpanKind = Literal["server", "client", "internal"]

_random = Random()  # seeded by the operating system, so that no two processes draw the same ids


class Span(NamedTuple):
    """A span that has ended. Times in nanoseconds since 1970; ``error``: why its work failed, "" if it did not."""

    name: str
    kind: SpanKind
    context: TraceContext
    parent: TraceContext | None
    start_time: int
    end_time: int
    attributes: Attributes
    error: str = ""


class SpanExporter(Protocol):
    """Sends spans elsewhere. No method blocks or raises, but for ``close``, which takes a bounded time."""

    def samples_trace(self, trace_id: int, parent: TraceContext | None) -> bool:
        """Whether the spans of a trace are recorded. ``parent``: the client's span, if it has one."""

    def export_span(self, span: Span) -> None:
        """Send a span, later and in another thread."""

    def close(self) -> None:
        """Send the last spans."""


class RequestTrace:
    """The spans of a request here, below one of its client if ``headers`` name that.

    ``context``: the span of the whole request in this process. ``headers`` name it from now on, instead of the
    client's, so that other servers continue the trace from here.
    """

    def __init__(self, exporter: SpanExporter, headers: MutableMapping[bytes, bytes]):
        self._exporter = exporter
        self._parent = parent = read_trace_context(headers)
        trace_id = _random.getrandbits(128) or 1 if parent is None else parent.trace_id
        sampled = exporter.samples_trace(trace_id, parent)
        self.context = TraceContext(
            trace_id, _random.getrandbits(64) or 1, sampled, b"" if parent is None else parent.state
        )
        self.started_at = perf_counter()
        self._clock_offset = time_ns() - round(self.started_at * 1e9)  # one for all spans, so that they fit together
        headers.pop(TRACESTATE, None)
        headers.update(self.context.headers())

    def new_context(self) -> TraceContext:
        """Return the context of a span that is added later."""
        return self.context._replace(span_id=_random.getrandbits(64) or 1)

    def add_span(
        self,
        name: str,
        started_at: float,
        ended_at: float,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = "internal",
        context: TraceContext | None = None,
        parent: TraceContext | None = None,
        error: str = "",
    ) -> None:
        """Add a span that has ended, below ``parent`` or the span of the request. ``context``: its own, if it is known.

        Nothing happens if the trace is not recorded.
        """
        if self.context.sampled:
            span = Span(
                name,
                kind,
                context or self.new_context(),
                parent or self.context,
                self._wall_time(started_at),
                self._wall_time(max(started_at, ended_at)),
                attributes or {},
                error,
            )
            self._exporter.export_span(span)

    def finish(self, name: str, attributes: Attributes, error: str = "") -> None:
        """Add the span of the whole request, which ends now."""
        if self.context.sampled:
            start_time, end_time = self._wall_time(self.started_at), self._wall_time(perf_counter())
            self._exporter.export_span(
                Span(name, "server", self.context, self._parent, start_time, end_time, attributes, error)
            )

    def _wall_time(self, seconds: float) -> int:
        return self._clock_offset + round(seconds * 1e9)
