"""The headers of W3C's trace context are read as that says, and written back."""

from __future__ import annotations

import pytest

from parley.tracing.trace_context import TraceContext, read_trace_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("flags", ["00", "01"])
@pytest.mark.parametrize("state", [b"", b"a=1,b=2"])
def test_written_headers_are_read_back(flags: str, state: bytes) -> None:
    header = f"00-{TRACE}-{SPAN}-{flags}".encode()
    context = read_trace_context({b"traceparent": header, b"tracestate": state})
    assert context == TraceContext(int(TRACE, 16), int(SPAN, 16), flags == "01", state)
    assert context.headers() == [(b"traceparent", header), *([(b"tracestate", state)] if state else [])]


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_invalid_parents_begin_a_new_trace(header: str) -> None:
    assert read_trace_context({b"traceparent": header.encode()}) is None


def test_later_versions_may_have_more_parts_and_bad_states_are_dropped() -> None:
    headers = {b"traceparent": f"01-{TRACE}-{SPAN}-03-more".encode(), b"tracestate": b"x" * 513}
    assert read_trace_context(headers) == TraceContext(int(TRACE, 16), int(SPAN, 16), True, b"")
