"""Refusals of members, in the words of Cohere's API.

The sentences are those of Cohere's page of errors, with the value and its range after them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from parley.dialects import error_wording
from parley.dialects.cohere.api_rules import CohereRules
from parley.dialects.fields import Fields
from parley.errors import BadRequest, InvalidValue, MalformedBody, MissingField, Unsupported, WrongType, excerpt

UNREADABLE_STATUS = 422  # of a body with a member of a wrong type, or one that the API does not have
REFERENCE = "For proper usage, please refer to https://docs.cohere.com/v2/reference/chat"
MISSING_MODEL = "a model parameter is required for this endpoint."
TYPE_NAMES = {
    "a string": "string",
    "an integer": "int32",
    "a number": "float32",
    "a decimal": "number",
    "a boolean": "bool",
    "an array": "array",
    "an object": "object",
}


class CohereWording(error_wording.ErrorWording):
    """The original's sentences."""

    def missing_error(self, path: str) -> BadRequest:
        """Return the error for a missing member."""
        if path == "model":
            return MissingField(MISSING_MODEL, field=path)
        return MissingField(f"invalid request: required '{path}' param is missing or empty.", field=path)

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type."""
        actual = error_wording.json_type(value)
        actual_name = "number" if actual == "an integer" else TYPE_NAMES.get(actual, actual)
        error = WrongType(
            f"invalid type: parameter '{path}' is of type {actual_name} but should be of type "
            f"{TYPE_NAMES.get(expected, expected)}. {REFERENCE}",
            field=path,
        )
        error.status = UNREADABLE_STATUS
        return error

    def range_error(
        self, path: str, expected: str, value: float, low: float | None, high: float | None, *, low_excluded: bool
    ) -> BadRequest:
        """Return the error for a number out of range."""
        if low is None or high is None:
            bounds = f"at least {low}" if high is None else f"at most {high}"
        else:
            bounds = f"between {low} (exclusive) and {high}" if low_excluded else f"between {low} and {high} inclusive"
        return InvalidValue(f"invalid request: {path} must be {bounds}, but got {excerpt(value)}.", field=path)

    def unlisted_error(self, path: str, value: Any, allowed: Sequence[str]) -> BadRequest:
        """Return the error for a value that is not one of those allowed."""
        names = " or ".join(f"'{name}'" for name in allowed)
        return InvalidValue(f"invalid request: {path} must be one of {names}, but got {excerpt(value)}.", field=path)

    def empty_error(self, path: str, container: str) -> BadRequest:
        """Return the error for an empty value."""
        return InvalidValue(f"invalid request: {path} must not be empty.", field=path)

    def too_long_error(self, path: str, container: str, size: int, cap: int) -> BadRequest:
        """Return the error for a value that is too long."""
        unit = "characters" if container == "string" else "elements"
        return InvalidValue(f"invalid request: {path} must have at most {cap} {unit} - received {size}.", field=path)

    def invalid_error(self, path: str, reason: str) -> BadRequest:
        """Return the error for any other fault."""
        return InvalidValue(f"invalid request: '{path}': {reason}", field=path)

    def unreadable_error(self, body: bytes, reason: str) -> BadRequest:
        """Return the error for a body that is not JSON."""
        return MalformedBody(f"invalid json syntax: {reason}")

    def not_object_error(self, value: Any) -> BadRequest:
        """Return the error for a body that is JSON, but not an object."""
        return MalformedBody(
            f"invalid json syntax: the body must be an object, but it is {error_wording.json_type(value)}."
        )


COHERE_WORDING = CohereWording()


def check_cohere_members(fields: Fields, allowed: Collection[str], rules: CohereRules) -> None:
    """Refuse a member that the original does not have, if the rules are strict. Raises InvalidValue."""
    if not rules.strict:
        return
    for name in fields.member_names:
        if name not in allowed:
            raise unknown_member_error(fields.member_path(name[:60]))


def unknown_member_error(path: str) -> InvalidValue:
    """Return the error for a member that the original does not have."""
    error = InvalidValue(f"unknown field: parameter '{path}' is not a valid field. {REFERENCE}", field=path)
    error.status = UNREADABLE_STATUS
    return error


def cohere_value_error(fields: Fields, name: str, sentence: str) -> Unsupported:
    """Return the error for a value that the original has and this server has not. ``sentence``: the reason."""
    path = fields.member_path(name)
    return Unsupported(f"invalid request: {path} {excerpt(fields.raw_value(name))} {sentence}", field=path)
