"""Refusals of members, in the words of Ollama's API."""

from __future__ import annotations

from typing import Any

from parley.dialects.error_wording import ErrorWording
from parley.dialects.ollama.api_rules import OllamaRules
from parley.dialects.ollama.go_json import go_kind, syntax_sentence, type_sentence
from parley.errors import BadRequest, InvalidValue, MalformedBody, UnsuitableModel, WrongType


class OllamaWording(ErrorWording):
    """The usual sentences, and Go's where a body cannot be read or a member has a wrong type.

    ``struct`` is the original's name for the body's type.
    """

    def __init__(self, struct: str):
        self._struct = struct

    def unreadable_error(self, body: bytes, reason: str) -> BadRequest:
        """Return the error for a body that is not JSON."""
        return MalformedBody((syntax_sentence(body, reason) or reason) if body else "missing request body")

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type."""
        return WrongType(type_sentence(self._struct, path, expected, value), field=path)

    def not_object_error(self, value: Any) -> BadRequest:
        """Return the error for a body that is JSON, but not an object."""
        return MalformedBody(f"json: cannot unmarshal {go_kind(value)} into Go value of type api.{self._struct}")


class OptionWording(ErrorWording):
    """The sentences about the members of ``options``, whose types the original names as Go does."""

    GO_TYPES = {  # noqa: RUF012  # never changed
        "an integer": "of type integer",
        "a number": "of type float32",
        "a boolean": "of type boolean",
        "a string": "of an array of strings",  # the only texts are those of a list
        "a string or an array of strings": "of type array",
    }

    def __init__(self, rules: OllamaRules):
        self._rules = rules

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for an option of a wrong type."""
        name = path.removeprefix("options.").partition("[")[0]
        expected = self.GO_TYPES.get(expected, expected)
        error = WrongType(f'option "{name}" must be {expected}', field=path)
        if self._rules.strict:
            error.status = 500
        return error


def incapable_model_error(name: str, ability: str) -> UnsuitableModel:
    """Return the error for a model that lacks an ability that a request needs."""
    return UnsuitableModel(f'"{name}" does not support {ability}', field="model")


def invalid_member_error(field: str, message: str) -> InvalidValue:
    """Return an error with the original's sentence about a member."""
    return InvalidValue(message, field=field)
