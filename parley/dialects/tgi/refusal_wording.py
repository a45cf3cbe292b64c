"""Refusals of members, in the words of TGI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parley.dialects import error_wording
from parley.dialects.json_answer import encode_json
from parley.errors import BadRequest, InvalidValue, MissingField, WrongType, excerpt

RUST_TYPES = {
    "max_new_tokens": "u32",
    "max_tokens": "u32",
    "max_completion_tokens": "u32",
    "top_logprobs": "u32",
    "n": "u32",
    "top_n_tokens": "u32",
    "best_of": "usize",
    "truncate": "usize",
    "dimensions": "usize",
    "seed": "u64",
    "top_k": "i32",
    "a number": "f32",
    "an array": "a sequence",
    "a string or an array of strings": "a sequence",
    "an object": "a map",
}


class TgiErrorWording(error_wording.ErrorWording):
    """Refusals worded like the original's JSON reader (serde), but without its line and column."""

    def __init__(self, *, whole_floats: bool = True):
        self.whole_floats = whole_floats

    def missing_error(self, path: str) -> BadRequest:
        """Return the error for a missing member."""
        where, _, name = path.rpartition(".")
        return MissingField(f"{where + ': ' if where else ''}missing field `{name}`", field=path)

    def type_error(self, path: str, expected: str, value: Any) -> BadRequest:
        """Return the error for a value of a wrong type."""
        name = path.rpartition(".")[2]
        expected_type = (
            RUST_TYPES.get(name, "an integer") if expected == "an integer" else RUST_TYPES.get(expected, expected)
        )
        return WrongType(f"{path}: invalid type: {_describe_json_value(value)}, expected {expected_type}", field=path)

    def range_error(
        self, path: str, expected: str, value: float, low: float | None, high: float | None, *, low_excluded: bool
    ) -> BadRequest:
        """Return the error for a number out of range."""
        expected_type = RUST_TYPES.get(path.rpartition(".")[2], "f32")
        return WrongType(f"{path}: invalid value: {_describe_json_value(value)}, expected {expected_type}", field=path)

    def unlisted_error(self, path: str, value: Any, allowed: Sequence[str]) -> BadRequest:
        """Return the error for a value that is not one of those allowed."""
        allowed_names = ", ".join(f"`{name}`" for name in allowed)
        return WrongType(f"{path}: unknown variant `{str(value)[:60]}`, expected one of {allowed_names}", field=path)

    def empty_error(self, path: str, container: str) -> BadRequest:
        """Return the error for an empty string or array."""
        name = "inputs" if path == "messages" else path  # the prompt that no messages make
        return InvalidValue(f"`{name}` cannot be empty", field=path)

    def too_long_error(self, path: str, container: str, size: int, cap: int) -> BadRequest:
        """Return the error for a string, array or object that is too long."""
        return InvalidValue(f"`{path}` is too long: {size}, where at most {cap} are allowed", field=path)

    def invalid_error(self, path: str, reason: str) -> BadRequest:
        """Return the error for any other fault."""
        return InvalidValue(f"`{path}` {reason}", field=path)

    def not_object_error(self, value: Any) -> BadRequest:
        """Return the error for a body that is not a JSON object."""
        return WrongType(f"invalid type: {_describe_json_value(value)}, expected a map")


TGI_WORDING = TgiErrorWording()
STRICT_TGI_WORDING = TgiErrorWording(whole_floats=False)


def _describe_json_value(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{excerpt(value)}`"
        case float():
            return f"floating point `{value!r}`"
        case str():
            return f"string {encode_json(value[:60]).decode()}"
        case list():
            return "sequence"
        case _:
            return "map"
