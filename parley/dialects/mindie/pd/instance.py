"""MindIE's instance routes: its answers to coordinators and controllers, and its refusals."""

from __future__ import annotations

from parley.dialects.instance_plane import InstancePlane
from parley.dialects.mindie.error_answers import mindie_json_error_answer
from parley.dialects.mindie.management_ports import stopped_answer
from parley.dialects.mindie.pd import recompute
from parley.dialects.reply import Answer
from parley.dialects.route import Route
from parley.errors import CommandRefused

ERROR_TYPES = {401: "Unauthorized", 422: "Input Validation Error", 503: "Service Unavailable"}


def instance_refusal(error: CommandRefused) -> Answer:
    """Return the answer to a command that an instance refuses."""
    return mindie_json_error_answer(
        error.status, error.message, error.kind or ERROR_TYPES.get(error.status, "Bad Request")
    )


INSTANCE_ROUTES = InstancePlane(
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
    render_command_refusal=instance_refusal,
    stopping_answer=stopped_answer(),
    read_resumed=recompute.read_recompute_body,
    write_resumed=recompute.write_recompute_body,
)
