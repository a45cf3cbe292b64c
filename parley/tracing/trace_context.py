"""The trace that a request belongs to, as the headers ``traceparent`` and ``tracestate`` carry it.

Format: https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
TRACE_HEADERS = frozenset((TRACEPARENT, TRACESTATE))
TRACEPARENT_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]*)?")
TRACESTATE_FORM = re.compile(rb"[ -~\t]{1,512}")
SAMPLED_FLAG = 0x01


class TraceContext(NamedTuple):
    """A span, as other servers refer to it. ``sampled``: its trace is recorded; ``state``: other vendors' data."""

    trace_id: int  # 128 bits, not 0
    span_id: int  # 64 bits, not 0
    sampled: bool = True
    state: bytes = b""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that make this span the parent of the spans of another server."""
        flags = SAMPLED_FLAG if self.sampled else 0
        parent = (TRACEPARENT, b"00-%032x-%016x-%02x" % (self.trace_id, self.span_id, flags))
        return [parent, (TRACESTATE, self.state)] if self.state else [parent]


def read_trace_context(headers: Mapping[bytes, bytes]) -> TraceContext | None:
    """Return the span that a client's request belongs to; None without a valid header."""
    match = TRACEPARENT_FORM.fullmatch(headers.get(TRACEPARENT, b""))
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5] is not None):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    state = headers.get(TRACESTATE, b"")
    return TraceContext(
        trace_id, span_id, bool(int(match[4], 16) & SAMPLED_FLAG), state if TRACESTATE_FORM.fullmatch(state) else b""
    )
