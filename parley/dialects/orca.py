"""The load of a model for load balancers: an ORCA report in a response header. Defines no metric names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from parley.dialects.reply import HeaderList
from parley.dialects.request_context import RequestContext

ORCA_HEADER = b"endpoint-load-metrics"  # the response header; the request header has the suffix "-format"


def orca_header(
    context: RequestContext, metrics: Mapping[str, float], *, number_format: str, encode: Callable[[Any], bytes]
) -> HeaderList:
    """Return the report in the format that the request asks for, or no header. ``number_format`` is the text format's
    conversion of a value, such as "%s"; ``encode`` is used for JSON."""
    match context.headers.get(ORCA_HEADER + b"-format", b"").lower():
        case b"text":
            named_metrics = ", ".join(
                f"named_metrics.{name}={number_format % value}" for name, value in metrics.items()
            )
            return [(ORCA_HEADER, b"TEXT " + named_metrics.encode())]
        case b"json":
            return [(ORCA_HEADER, b"JSON " + encode({"named_metrics": metrics}))]
    return ()
