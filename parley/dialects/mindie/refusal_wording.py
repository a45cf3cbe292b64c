"""Refusals of members, in the words of MindIE's interfaces."""

from __future__ import annotations

import json
from typing import Any

from parley.dialects import error_wording
from parley.dialects.json_answer import encode_json
from parley.errors import BadRequest, InvalidValue, MalformedBody, MissingField, WrongType

NO_PROMPT_MESSAGE = json.dumps(  # a text in JSON, with the blanks that the original prints
    {
        "Error": "`inputs` or `prompt` must be necessary and data type must be string. "
        "Additionally, the request body must be valid json",
        "error_type": "validation",
    }
)
TYPE_NAMES = {
    "a boolean": "boolean",
    "an integer": "integer",
    "a number": "float",
    "a string": "string",
    "an array": "array",
    "an object": "object",
}
UNSIGNED = ("seed", "n", "best_of", "priority", "timeout", "top_logprobs", "logprobs")
# Messages for numbers out of range, independent of the interface's range. {1} is its upper limit.
RANGE_MESSAGES = {
    "temperature": "Parameter temperature must be in (0.0,{1:g}], got {0}.",
    "top_k": "Parameter top_k must be in -1 || (0,2147483647], got {0}",
    "top_p": "Parameter top_p must be in (0.0,1.0], got {0}.",
    "typical_p": "Parameter typical_p must be in (0.0,1.0], got {0}.",
    "seed": "Parameter seed must be in [0, 9223372036854775807], got {0}.",
    "repetition_penalty": "Parameter 'repetition_penalty' must be in (0.0, {1:g}], got {0}.",
    "presence_penalty": "Parameter presence_penalty not in [-2.0, 2.0], but got {0}.",
    "frequency_penalty": "Parameter frequency_penalty should be in [-2.0, 2.0], got {0}.",
    "max_new_tokens": "Parameter max_new_tokens must be in (0,2147483647], got {0}.",
    "max_tokens": "Parameter max_tokens must be (0,2147483647], got {0}",
    "truncate": "truncate must be in (0,2147483647], got {0}.",
    "batch_size": "Parameter batch_size must be in (0,2147483647], got {0}.",
    "priority": "Parameter priority must be in [1,5], got {0}.",
    "timeout": "Parameter timeout must be strictly positive and small than 65535 seconds, got {0}.",
    "n": "Parameter [n] should be in [1, 8192], got {0}. ",
    "best_of": "Parameter [best_of] should be in [1, 128], got {0}.",
    "top_logprobs": "Parameter top logprobs must be in [0, 20], got {0}.",
    "logprobs": "logprobs should be in range [0, 5], got {0}.",
    "thinking_budget": "Parameter thinking_budget must be in [1,2147483647], got {0}",
}
TYPE_MESSAGES = {"max_tokens": "Parameter max_tokens not number_integer"}  # messages for a wrong type


class MindieErrorWording(error_wording.ErrorWording):
    """MindIE's wording. ``unreadable_body``: the message for a body that is no JSON object; each route has its own."""

    whole_floats = False

    def __init__(self, unread: str = ""):
        self.unreadable_body = unread

    def missing_error(self, path: str) -> BadRequest:
        """Return the error for a missing member."""
        return MissingField(f"Request should contain '{path}' and the type should be string.", field=path)

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type."""
        name = path.rpartition(".")[2]
        expected_type = (
            "unsigned" if name in UNSIGNED and expected == "an integer" else TYPE_NAMES.get(expected, expected)
        )
        return WrongType(TYPE_MESSAGES.get(name, f"{name} must be {expected_type} type."), field=path)

    def range_error(
        self, path: str, expected: str, value: float, low: float | None, high: float | None, *, low_excluded: bool
    ) -> BadRequest:
        """Return the error for a number out of range."""
        name = path.rpartition(".")[2]
        if name in UNSIGNED and value < 0:
            return self.type_error(path, "an integer", value)
        return parameter_value_error(path, value, high)

    def invalid_error(self, path: str, reason: str) -> BadRequest:
        """Return the error for any other fault."""
        return InvalidValue(reason, field=path)

    def unreadable_error(self, body: bytes, reason: str) -> BadRequest:
        """Return the error for a body that is not JSON."""
        return MalformedBody(self.unreadable_body)

    def not_object_error(self, value: Any) -> BadRequest:
        """Return the error for a body that is not a JSON object."""
        return MalformedBody(self.unreadable_body)


MINDIE_WORDING = MindieErrorWording("Failed to parse request context to json")


def parameter_value_error(path: str, value: Any, high: float | None = None) -> BadRequest:
    """Return the error for a parameter's value that its interface does not accept."""
    return InvalidValue(
        RANGE_MESSAGES[path.rpartition(".")[2]].format(encode_json(value).decode(), high or 0), field=path
    )
