"""The load of a model for load balancers: an ORCA report in a response header. Knows no metric's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from parley.dialects.dialect import Head, Headers

NAME = b"endpoint-load-metrics"  # the response header; the request header has the suffix "-format"


def report(head: Head, metrics: Mapping[str, float], *, number: str, encode: Callable[[Any], bytes]) -> Headers:
    """Return the report in the format that the request asks for, or no header. ``number`` is the text format's
    conversion of a value, such as "%s"; ``encode`` is used for JSON."""
    match head.headers.get(NAME + b"-format", b"").lower():
        case b"text":
            told = ", ".join(f"named_metrics.{name}={number % value}" for name, value in metrics.items())
            return [(NAME, b"TEXT " + told.encode())]
        case b"json":
            return [(NAME, b"JSON " + encode({"named_metrics": metrics}))]
    return ()
