"""The events of the Realtime API: their form, the event of an error, and errors in answers of other routes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from parley.dialects.json_answer import encode_json
from parley.dialects.openai.error_answers import openai_error_object
from parley.errors import ParleyError

ERROR_MEMBERS = ("type", "code", "message", "param")
EARLY_END = {"message": "The answer ended early.", "type": "server_error", "param": None, "code": None}


def new_id(prefix: str) -> str:
    """Return a random id with this prefix, in the form that the API's ids have."""
    return f"{prefix}_{secrets.token_hex(12)}"


def write_event(event_type: str, **members: Any) -> bytes:
    """Return an event as a message."""
    return encode_json({"type": event_type, "event_id": new_id("event")} | members)


def write_realtime_error(error: ParleyError, event_id: str | None) -> bytes:
    """Return the event of an error. ``event_id``: of the client's event that caused it, if it has one."""
    return write_fault(openai_error_object(error)["error"], event_id)


def write_fault(error: Mapping[str, Any], event_id: str | None) -> bytes:
    """Return the event of an error, given the error object of a refusal."""
    return write_event("error", error=fault_members(error) | {"event_id": event_id})


def fault_members(error: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of an error object that the API's own has."""
    return {name: error.get(name) for name in ERROR_MEMBERS}


def read_fault(body: bytes) -> dict[str, Any]:
    """Return the error object in a refusal, by this server or another."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        answer = None
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error
    message = error if isinstance(error, str) else body.decode("utf-8", "replace")
    return EARLY_END | {"message": message or EARLY_END["message"]}
