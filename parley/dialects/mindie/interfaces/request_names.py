"""The names by which MindIE's clients cancel requests."""

from __future__ import annotations

from parley.dialects.request_context import RequestContext


def header_request_id(context: RequestContext) -> str:
    """Return the request's id from its header; no two open requests may share it."""
    return context.headers.get(b"req-id", b"").decode("utf-8", "replace")


def request_name(context: RequestContext) -> str:
    """Return the request's name: its header's id, or a numbered one like the original's."""
    return header_request_id(context) or f"endpoint_common_{int(context.unique_id[-8:], 16)}"
