"""How busy a model is, as balancers ask for it: an ORCA report in a header. Knows no metric's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from parley.dialects.dialect import Head, Headers

NAME = b"endpoint-load-metrics"  # of the header; with -format behind it, of the request's


def report(head: Head, metrics: Mapping[str, float], *, number: str, encode: Callable[[Any], bytes]) -> Headers:
    """The header in the form that is asked for; none where none is. ``number`` formats one in text."""
    match head.headers.get(NAME + b"-format", b"").lower():
        case b"text":
            told = ", ".join(f"named_metrics.{name}={number % value}" for name, value in metrics.items())
            return [(NAME, b"TEXT " + told.encode())]
        case b"json":
            return [(NAME, b"JSON " + encode({"named_metrics": metrics}))]
    return ()
