"""MindIE's instance routes: its answers to coordinators and controllers, and its refusals."""

from __future__ import annotations

from parley.dialects.dialect import Answer, Route
from parley.dialects.instance_plane import InstancePlane
from parley.dialects.mindie import recompute
from parley.dialects.mindie.shared import answer
from parley.errors import OrderRefused

KINDS = {401: "Unauthorized", 422: "Input Validation Error", 503: "Service Unavailable"}


def refusal(error: OrderRefused) -> Answer:
    """Return the answer to a command that an instance refuses."""
    return answer(error.status, error.message, error.kind or KINDS.get(error.status, "Bad Request"))


PLANE = InstancePlane(
    routes=(
        Route("GET", "/dresult", "results"),
        Route("POST", "/v1/dresult/flow", "results_flow"),
        Route("POST", "/v1/role/prefill", "role"),
        Route("POST", "/v1/role/decode", "role"),
        Route("POST", "/v1/role/flex", "role"),
        Route("POST", "/v2/role/prefill", "role"),
        Route("POST", "/v2/role/decode", "role"),
        Route("GET", "/v1/status", "instance_status"),
        Route("GET", "/v2/status", "instance_status"),
    ),
    refusal=refusal,
    read_resumed=recompute.read,
    write_resumed=recompute.write,
)
