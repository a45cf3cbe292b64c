"""The messages of both services by name, and conversions of parameters and answers to Python values and back."""

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

Message = Any  # an instance of a message class; the classes exist only at run time


def plain(value: Message) -> Any:
    """Return the value of a parameter message, whichever type it has; None if unset."""
    kind = value.WhichOneof("parameter_choice")
    return None if kind is None else getattr(value, kind)


def values(parameters: Mapping[str, Message]) -> dict[str, Any]:
    """Return parameters as Python values, by name."""
    return {name: plain(value) for name, value in parameters.items()}


def told(answer: Answer) -> Any:
    """Decode an answer of the HTTP dialect; None if its body is empty. An error answer is raised as ParleyError."""
    value: Any = msgspec.json.decode(answer.body) if answer.body else None
    if answer.status != 200:
        error = ParleyError(value["error"])
        error.status = answer.status
        raise error
    return value


def filled(name: str, members: dict[str, Any]) -> Message:
    """Return the named message with these members."""
    return ParseDict(members, INFERENCE(name)())
