"""The wording of refusals of a body's members: OpenAI's here, other APIs' in subclasses.

Knows the possible faults of a value, but neither how members are read nor their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parley.errors import BadRequest, InvalidValue, MalformedBody, MissingField, WrongType, excerpt


class ErrorWording:
    """Builds the errors for wrong members, with the sentences and codes of the OpenAI API. Other dialects override.

    ``whole_floats``: 5.0 is an integer, as most readers of JSON have it. Some APIs refuse it.
    """

    whole_floats = True

    def missing_error(self, path: str) -> BadRequest:
        """Return the error for a missing member."""
        return MissingField(f"Missing required parameter: '{path}'.", field=path)

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type. ``expected`` is a type with its article."""
        return WrongType(
            f"Invalid type for '{path}': expected {expected}, but got {json_type(value)} instead.", field=path
        )

    def range_error(
        self, path: str, expected: str, value: float, low: float | None, high: float | None, *, low_excluded: bool
    ) -> BadRequest:
        """Return the error for a number out of range. ``expected``: the member's type, with its article.

        ``low_excluded``: the number must be greater than ``low``.
        """
        above = high is not None and value > high
        # OpenAI names the type of the member, not that of the value: 999 is a decimal above the maximum temperature.
        kind = "integer" if expected == "an integer" else "decimal"
        code = f"{kind}_{'above_max' if above else 'below_min'}_value"
        allowed = " and ".join(
            part
            for part in (
                f"greater than {low}"
                if low is not None and low_excluded
                else f"at least {low}"
                if low is not None
                else "",
                f"at most {high}" if high is not None else "",
            )
            if part
        )
        return InvalidValue(f"Invalid '{path}': must be {allowed}, but got {excerpt(value)}.", field=path, code=code)

    def unlisted_error(self, path: str, value: Any, allowed: Sequence[str]) -> BadRequest:
        """Return the error for a value that is not one of those allowed."""
        allowed_names = ", ".join(f"'{name}'" for name in allowed)
        return InvalidValue(
            f"Invalid value for '{path}': {excerpt(value)}. Supported values are: {allowed_names}.", field=path
        )

    def empty_error(self, path: str, container: str) -> BadRequest:
        """Return the error for an empty value. ``container`` is "string" or "array"."""
        return InvalidValue(
            f"Invalid '{path}': the {container} must not be empty.", field=path, code=f"empty_{container}"
        )

    def too_long_error(self, path: str, container: str, size: int, cap: int) -> BadRequest:
        """Return the error for a value that is too long, in characters or members.

        ``container`` is "string", "array" or "object".
        """
        unit = "characters" if container == "string" else "members"
        return InvalidValue(
            f"Invalid '{path}': {container} too long. At most {cap} {unit} are allowed, but it has {size}.",
            field=path,
            code=f"{container}_above_max_length",
        )

    def invalid_error(self, path: str, reason: str) -> BadRequest:
        """Return the error for any other fault; ``reason`` is the rest of a sentence about the member."""
        return InvalidValue(f"Invalid '{path}': {reason}", field=path)

    def convert_value(self, path: str, expected: str, value: Any) -> Any:
        """Convert a value of another type to a boolean, an integer or a number, for lenient APIs. Raises BadRequest."""
        raise self.type_error(path, expected, value)

    def for_body(self, body: Mapping[str, Any]) -> ErrorWording:
        """Return the wording for this body, for APIs whose refusals quote the body."""
        return self

    def unreadable_error(self, body: bytes, reason: str) -> BadRequest:
        """Return the error for a body that is not JSON."""
        return MalformedBody(reason)

    def not_object_error(self, value: Any) -> BadRequest:
        """Return the error for a body that is JSON, but not an object."""
        return MalformedBody(f"The body must be a JSON object, but it is {json_type(value)}.")


DEFAULT_WORDING = ErrorWording()


def json_type(value: Any) -> str:
    """Return the JSON type of a decoded value, with its article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
