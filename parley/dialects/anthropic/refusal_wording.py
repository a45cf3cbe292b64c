"""Refusals of members, in the words of Anthropic's API.

The original checks bodies with pydantic, so a refusal is the dotted path of a member, a colon and a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from parley.dialects import error_wording
from parley.dialects.anthropic.api_rules import AnthropicRules
from parley.dialects.fields import Fields
from parley.errors import BadRequest, InvalidValue, MalformedBody, MissingField, Unsupported, WrongType, excerpt

TAGGED_PATHS = {"thinking.budget_tokens": "thinking.enabled.budget_tokens"}  # with the form that has the member
INDEX = re.compile(r"\[(\d+)\]")
TYPE_SENTENCES = {
    "a string": "Input should be a valid string",
    "an integer": "Input should be a valid integer",
    "a number": "Input should be a valid number",
    "a boolean": "Input should be a valid boolean",
    "an array": "Input should be a valid list",
    "an object": "Input should be a valid dictionary",
}


class AnthropicWording(error_wording.ErrorWording):
    """The original's wording, with the value at fault."""

    def missing_error(self, path: str) -> BadRequest:
        """Return the error for a missing member."""
        return MissingField(f"{dotted_path(path)}: Field required", field=path)

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type."""
        sentence = TYPE_SENTENCES.get(expected, f"Input should be {expected}")
        return WrongType(f"{dotted_path(path)}: {sentence}, but got {error_wording.json_type(value)}", field=path)

    def range_error(
        self, path: str, expected: str, value: float, low: float | None, high: float | None, *, low_excluded: bool
    ) -> BadRequest:
        """Return the error for a number out of range."""
        bounds = []
        if low is not None:
            bounds.append(f"greater than {'' if low_excluded else 'or equal to '}{low}")
        if high is not None:
            bounds.append(f"less than or equal to {high}")
        return self.invalid_error(path, f"Input should be {' and '.join(bounds)}, but got {excerpt(value)}")

    def unlisted_error(self, path: str, value: Any, allowed: Sequence[str]) -> BadRequest:
        """Return the error for a value that is not one of those allowed."""
        names = " or ".join(f"'{name}'" for name in allowed)
        return self.invalid_error(path, f"Input should be {names}, but got {excerpt(value)}")

    def empty_error(self, path: str, container: str) -> BadRequest:
        """Return the error for an empty value."""
        least = (
            "String should have at least 1 character" if container == "string" else "List should have at least 1 item"
        )
        return self.invalid_error(path, least)

    def too_long_error(self, path: str, container: str, size: int, cap: int) -> BadRequest:
        """Return the error for a value that is too long."""
        subject, unit = ("String", "characters") if container == "string" else ("List", "items")
        return self.invalid_error(path, f"{subject} should have at most {cap} {unit}, but has {size}")

    def invalid_error(self, path: str, reason: str) -> BadRequest:
        """Return the error for any other fault."""
        return InvalidValue(f"{dotted_path(path)}: {reason}", field=path)

    def not_object_error(self, value: Any) -> BadRequest:
        """Return the error for a body that is JSON, but not an object."""
        return MalformedBody(f"The body: Input should be a valid dictionary, but got {error_wording.json_type(value)}")


ANTHROPIC_WORDING = AnthropicWording()


def dotted_path(path: str) -> str:
    """Return the position of a member as the original writes it: ``messages.0.content``."""
    return INDEX.sub(r".\1", TAGGED_PATHS.get(path, path))


def check_anthropic_members(fields: Fields, allowed: Collection[str], rules: AnthropicRules, tag: str = "") -> None:
    """Refuse a member that the original does not have, if the rules are strict. ``tag``: the block's type.

    Raises InvalidValue.
    """
    if not rules.strict:
        return
    for name in fields.member_names:
        if name not in allowed:
            path = fields.member_path(f"{tag}.{name[:60]}" if tag else name[:60])
            raise ANTHROPIC_WORDING.invalid_error(path, "Extra inputs are not permitted")


def anthropic_value_error(fields: Fields, name: str, value: str) -> Unsupported:
    """Return the error for a value that the original has and this server has not."""
    path = fields.member_path(name)
    return Unsupported(f"{dotted_path(path)}: {excerpt(value)} is not supported by this server", field=path)
