"""The attributes of a request's span by OpenTelemetry's conventions for HTTP servers.

Names: https://opentelemetry.io/docs/specs/semconv/http/http-spans/
"""

from __future__ import annotations

from typing import NamedTuple

from parley.tracing.encode_spans import Attributes
from parley.tracing.request_trace import RequestTrace


class HttpRequestEnd(NamedTuple):
    """The values that the span of an HTTP request reports.

    * ``ended_at``: by ``time.perf_counter``.
    * ``route``: the template of its path, "" for an unknown URL.
    * ``status``: 0 if the client left before the answer.
    * ``key``: the name of its API key.
    * ``error``: the message that the client got.
    """

    ended_at: float
    method: str
    route: str
    path: str
    status: int
    client: str
    api: str
    request_id: str
    key: str
    error: str


def encode_http_span(trace: RequestTrace, end: HttpRequestEnd) -> bytes:
    """Encode the span of an HTTP request."""
    status = end.status
    attributes: Attributes = {
        "http.request.method": end.method,
        "url.path": end.path,
        "client.address": end.client,
        "parley.api": end.api,
        "parley.request.id": end.request_id,
    }
    if end.route:
        attributes["http.route"] = end.route
    if end.key:
        attributes["parley.key"] = end.key
    if status:
        attributes["http.response.status_code"] = status
    if status >= 400:
        attributes["error.type"] = str(status)
    elif not status:
        attributes["error.type"] = "client_disconnected"
    # The status of a server's span is an error only if the server is at fault.
    error = (end.error or str(status)) if status >= 500 else ""
    return trace.encode_request_span(f"{end.method} {end.route}".rstrip(), end.ended_at, attributes, error)
