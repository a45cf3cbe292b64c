"""Refusals of members, in the words of Databricks' API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from parley.dialects import error_wording
from parley.dialects.error_wording import json_type
from parley.dialects.json_answer import encode_json
from parley.errors import BadRequest, InvalidValue, MalformedBody, MissingField, WrongType, excerpt

INDEX_PATTERN = re.compile(r"\[\d+\]")
JSON_TYPE_NAMES = {
    "a boolean": "boolean",
    "an integer": "integer",
    "a number": "number",
    "a string": "string",
    "an array": "array",
    "an object": "object",
    "a decimal": "number",
}
MemberTree = Mapping[str, Any]  # names of members, each with the tree of its own members; an empty tree is not checked


def refuse_unknown_members(value: Any, tree: MemberTree) -> None:
    """Raise MalformedBody for the first member that the tree does not have."""
    for item in value if isinstance(value, list) else (value,):
        if not isinstance(item, dict):
            continue
        for name, inner in item.items():
            if name not in tree:
                raise MalformedBody(f"json: unknown field {encode_json(name[:100]).decode()}\n")
            if tree[name]:
                refuse_unknown_members(inner, tree[name])


class DatabricksErrorWording(error_wording.ErrorWording):
    """Databricks' wording. ``task``: the request's name in sentences about missing members."""

    def __init__(self, task: str = "Chat", code: str | None = None):
        self.task, self.code = task, code

    def missing_error(self, path: str) -> BadRequest:
        """Return the error for a missing member."""
        owner, _, name = path.rpartition(".")
        if not owner:
            return MissingField(f"Missing required {self.task} parameter: '{path}'", field=path, code=self.code)
        top, *inner = INDEX_PATTERN.sub("", owner).split(".")
        object_text = f'"{inner[-1]}" object' if inner else "an object"
        return InvalidValue(
            f'"{name}" is a required property for {object_text} in parameter "{top}"', field=path, code=self.code
        )

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type."""
        expected_type = JSON_TYPE_NAMES.get(expected, expected)
        actual_type = json_type(value)
        return WrongType(
            f"Unable to parse json body for request, field '{INDEX_PATTERN.sub('', path)}' expects input with "
            "json type "
            f"'{expected_type}' but got '{JSON_TYPE_NAMES.get(actual_type, actual_type)}'",
            field=path,
            code=self.code,
        )

    def range_error(
        self, path: str, expected: str, value: float, low: float | None, high: float | None, *, low_excluded: bool
    ) -> BadRequest:
        """Return the error for a number out of range."""
        least = f"{'greater than' if low_excluded else 'at least'} {low}"
        allowed = f"at most {high}" if low is None else least if _is_unlimited(high) else f"{least} and at most {high}"
        return self.invalid_error(path, f"must be {allowed}, but got {excerpt(value)}")

    def unlisted_error(self, path: str, value: Any, allowed: Sequence[str]) -> BadRequest:
        """Return the error for a value that is not one of those allowed."""
        allowed_names = ", ".join(f'"{name}"' for name in allowed)
        return self.invalid_error(path, f"must be one of {allowed_names}, but got {excerpt(value)}")

    def empty_error(self, path: str, container: str) -> BadRequest:
        """Return the error for an empty string or array."""
        return self.invalid_error(path, "must not be empty")

    def too_long_error(self, path: str, container: str, size: int, cap: int) -> BadRequest:
        """Return the error for a string, array or object that is too long."""
        unit = "characters" if container == "string" else "members"
        return self.invalid_error(path, f"must have at most {cap} {unit}, but has {size}")

    def invalid_error(self, path: str, reason: str) -> BadRequest:
        """Return the error for any other fault."""
        return InvalidValue(f'parameter "{path}" {reason}', field=path, code=self.code)


def _is_unlimited(high: float | None) -> bool:
    return high is None or high >= 2**31 - 1
