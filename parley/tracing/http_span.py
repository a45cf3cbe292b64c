"""The attributes of a request's span by OpenTelemetry's conventions for HTTP servers.

Names: https://opentelemetry.io/docs/specs/semconv/http/http-spans/
"""

from __future__ import annotations

from parley.tracing.request_trace import Attributes, RequestTrace


def finish_http_span(
    trace: RequestTrace,
    method: str,
    route: str,
    path: str,
    status: int,
    *,
    client: str,
    api: str,
    request_id: str,
    key: str = "",
    error: str = "",
) -> None:
    """End the trace of an HTTP request. ``route``: the template of its path, "" for an unknown URL; ``status``: 0 if
    the client left before the answer; ``key``: the name of its API key; ``error``: the message that the client got."""
    attributes: Attributes = {
        "http.request.method": method,
        "url.path": path,
        "client.address": client,
        "parley.api": api,
        "parley.request.id": request_id,
    }
    if route:
        attributes["http.route"] = route
    if key:
        attributes["parley.key"] = key
    if status:
        attributes["http.response.status_code"] = status
    if status >= 400:
        attributes["error.type"] = str(status)
    elif not status:
        attributes["error.type"] = "client_disconnected"
    # The status of a server's span is an error only if the server is at fault.
    trace.finish(f"{method} {route}".rstrip(), attributes, (error or str(status)) if status >= 500 else "")
