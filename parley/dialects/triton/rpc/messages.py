"""The messages of both services by name, and parameters and answers as Python's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from google.protobuf.json_format import ParseDict

from parley.dialects.dialect import Answer
from parley.dialects.triton.rpc.schema import Schema
from parley.errors import ParleyError

INFERENCE = Schema("inference.proto")
HEALTH = Schema("health.proto")

Message = Any  # an instance of one of their classes, which exist at run time only


def plain(value: Message) -> Any:
    """What a message holds that is one of several kinds of value; None if it holds none."""
    kind = value.WhichOneof("parameter_choice")
    return None if kind is None else getattr(value, kind)


def values(parameters: Mapping[str, Message]) -> dict[str, Any]:
    return {name: plain(value) for name, value in parameters.items()}


def told(answer: Answer) -> Any:
    """What an answer of the HTTP dialect says; None if nothing. One that is no success is raised as ParleyError."""
    value: Any = msgspec.json.decode(answer.body) if answer.body else None
    if answer.status != 200:
        error = ParleyError(value["error"])
        error.status = answer.status
        raise error
    return value


def filled(name: str, members: dict[str, Any]) -> Message:
    """The message of that name with these members."""
    return ParseDict(members, INFERENCE(name)())
