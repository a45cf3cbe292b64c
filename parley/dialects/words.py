"""How refusals of a body's members are worded: as OpenAI's API does it here, and by subclasses as others do.

Knows what can be wrong with a value, and neither how members are read nor which there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.errors import BadRequest, Invalid, Malformed, Missing, WrongType, excerpt


class Words:
    """How refusals are worded: sentences and codes as the OpenAI API's users know them. Other dialects override."""

    def missing(self, path: str) -> BadRequest:
        return Missing(f"Missing required parameter: '{path}'.", field=path)

    def mistyped(self, path: str, expected: str, value: Any) -> BadRequest:
        return WrongType(f"Invalid type for '{path}': expected {expected}, but got {kind(value)} instead.", field=path)

    def outside(self, path: str, value: float, low: float | None, high: float | None, *, open: bool) -> BadRequest:
        """A number out of its range; ``open``: the lower bound itself is excluded."""
        above = high is not None and value > high
        code = f"{'integer' if isinstance(value, int) else 'decimal'}_{'above_max' if above else 'below_min'}_value"
        allowed = " and ".join(
            part
            for part in (
                f"greater than {low}" if low is not None and open else f"at least {low}" if low is not None else "",
                f"at most {high}" if high is not None else "",
            )
            if part
        )
        return Invalid(f"Invalid '{path}': must be {allowed}, but got {excerpt(value)}.", field=path, code=code)

    def unlisted(self, path: str, value: Any, allowed: Sequence[str]) -> BadRequest:
        listed = ", ".join(f"'{name}'" for name in allowed)
        return Invalid(f"Invalid value for '{path}': {excerpt(value)}. Supported values are: {listed}.", field=path)

    def empty(self, path: str, what: str) -> BadRequest:
        """``what`` is "string" or "array"."""
        return Invalid(f"Invalid '{path}': the {what} must not be empty.", field=path, code=f"empty_{what}")

    def long(self, path: str, what: str, size: int, cap: int) -> BadRequest:
        """``what`` is "string", "array" or "object"; sizes are characters or members."""
        unit = "characters" if what == "string" else "members"
        return Invalid(
            f"Invalid '{path}': {what} too long. At most {cap} {unit} are allowed, but it has {size}.",
            field=path,
            code=f"{what}_above_max_length",
        )

    def invalid(self, path: str, reason: str) -> BadRequest:
        return Invalid(f"Invalid '{path}': {reason}", field=path)

    def convert(self, path: str, expected: str, value: Any) -> Any:
        """A value of another type as a boolean, an integer or a number, for APIs that are lax. Raises BadRequest."""
        raise self.mistyped(path, expected, value)

    def about(self, body: dict[str, Any]) -> Words:
        """The words for this body, for APIs whose refusals tell what is in it."""
        return self

    def unreadable(self, body: bytes, reason: str) -> BadRequest:
        """The body is no JSON."""
        return Malformed(reason)

    def shapeless(self, value: Any) -> BadRequest:
        """The body is JSON, but no object."""
        return Malformed(f"The body must be a JSON object, but it is {kind(value)}.")


WORDS = Words()


def kind(value: Any) -> str:
    """The JSON type of a decoded value, with its article."""
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
