"""The messages of both services by name, and conversions of parameters and answers to Python values and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from google.protobuf.json_format import ParseDict

from parley.dialects.reply import Answer
from parley.dialects.triton.rpc.schema import ProtoSchema
from parley.errors import ParleyError

INFERENCE_SCHEMA = ProtoSchema("inference.proto")
HEALTH_SCHEMA = ProtoSchema("health.proto")

ProtoMessage = Any  # an instance of a message class; the classes exist only at run time


def parameter_value(value: ProtoMessage) -> Any:
    """Return the value of a parameter message, whichever type it has; None if unset."""
    kind = value.WhichOneof("parameter_choice")
    return None if kind is None else getattr(value, kind)


def parameter_values(parameters: Mapping[str, ProtoMessage]) -> dict[str, Any]:
    """Return parameters as Python values, by name."""
    return {name: parameter_value(value) for name, value in parameters.items()}


def decode_http_answer(answer: Answer) -> Any:
    """Decode an answer of the HTTP dialect; None if its body is empty. An error answer is raised as ParleyError."""
    value: Any = msgspec.json.decode(answer.body) if answer.body else None
    if answer.status != 200:
        error = ParleyError(value["error"])
        error.status = answer.status
        raise error
    return value


def fill_message(name: str, members: dict[str, Any]) -> ProtoMessage:
    """Return the named message with these members."""
    return ParseDict(members, INFERENCE_SCHEMA(name)())
