"""Reading the members of a JSON body: type, default, range, null and size limits in one place, for every dialect.

A dialect reads one member after another and gets a checked Python value, or one of the errors in ``parley.errors`` is
raised. The rules that all APIs share are here: an explicit null means the default, a boolean is not a number, unread
members are ignored. The ``ErrorWording`` that is passed in decides how an API words its refusals, and whether a whole
float (5.0) is an integer. Nothing here knows the name of any member.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import msgspec

from parley.dialects.error_wording import DEFAULT_WORDING, ErrorWording
from parley.dialects.json_body import LazyMembers, OverfullJson, decode_json, decode_members, first_bad_byte
from parley.errors import BadRequest, excerpt

D = TypeVar("D")

MAX_DEPTH = 64  # nesting of a free-form value, so that later recursive readers do not overflow the stack
MAX_FLOAT = sys.float_info.max
NOTHING_MOVED: Mapping[str, str] = {}
INT64 = (-(2**63), 2**63 - 1)
MAX_U32, MAX_U64, MAX_I32 = 2**32 - 1, 2**64 - 1, 2**31 - 1
MAX_F32 = 3.4028234663852886e38


def decode_fields(body: bytes, wording: ErrorWording = DEFAULT_WORDING) -> Fields:
    """Return the members of a body. Raises MalformedBody (or the wording's error) if it is not one JSON object in
    UTF-8.

    A body with too many values is refused before any of them is built.
    """
    if not body:
        raise wording.unreadable_error(body, "The request has no body. Send a JSON object.")
    value = decode_members(body, lambda error: wording.unreadable_error(body, _explain_fault(error, body)))
    if not isinstance(value, dict | LazyMembers):
        raise wording.not_object_error(value)
    return Fields(value, "", wording.for_body(value))


def _explain_fault(error: Exception, body: bytes) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"The body is not UTF-8 (at byte {first_bad_byte(body)})."
    if isinstance(error, RecursionError):
        return "The body is nested too deeply."
    if isinstance(error, OverfullJson):
        return f"The body is too large to be read: {error}."
    return f"The body could not be parsed as JSON: {error}."


class Fields:
    """The members of one JSON object. ``member_path`` is the position of the object in the body, for messages.

    ``places``: the names in the body of members that a reader has moved.
    """

    __slots__ = ("_data", "_path", "_places", "_wording")

    def __init__(
        self,
        data: Mapping[str, Any],
        path: str = "",
        wording: ErrorWording = DEFAULT_WORDING,
        places: Mapping[str, str] = NOTHING_MOVED,
    ):
        self._data = data
        self._path = path
        self._wording = wording
        self._places = places

    def member_path(self, name: str) -> str:
        """Return the position of member ``name`` in the body, such as ``messages[0].content``."""
        if self._places:
            name = self._places.get(name, name)
        return f"{self._path}.{name}" if self._path else name

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Return these members, with the defaults in place of absent or null ones."""
        return self._with_changes({name: value for name, value in defaults.items() if self._data.get(name) is None})

    def with_members(self, members: Mapping[str, Any]) -> Fields:
        """Return these members, with others of the same names replaced."""
        return self._with_changes(members)

    def with_moved_member(self, name: str, value: Any, place: str) -> Fields:
        """Return these members, with ``name`` replaced by a value that errors locate at ``place``."""
        moved = self._with_changes({name: value})
        moved._places = {**self._places, name: place}
        return moved

    @property
    def member_names(self) -> list[str]:
        """The names of all members."""
        return list(self._data)

    def has_value(self, name: str) -> bool:
        """True if the member is present and not null."""
        return self._data.get(name) is not None

    def present_names(self, names: Collection[str]) -> list[str]:
        """Return those of the names whose members are present and not null."""
        if self._data.keys().isdisjoint(names):
            return []
        return [name for name in self._data if name in names and self._data[name] is not None]

    def is_null(self, name: str) -> bool:
        """True if the member is present and null."""
        return name in self._data and self._data[name] is None

    def with_parsed_text(self, name: str, *, cap: int) -> Fields:
        """Parse the JSON text in ``name`` and return the members with the result in its place.

        Raises BadRequest if the text is longer than ``cap`` or nested deeper than MAX_DEPTH.
        """
        try:
            value = decode_json(self.string(name, "", cap=cap).encode())
        except (msgspec.DecodeError, RecursionError) as error:
            raise self.member_error(name, f"the text is not JSON: {error}.") from None
        if isinstance(value, dict | list) and not is_shallow(value, MAX_DEPTH):
            raise self.member_error(name, f"nested deeper than {MAX_DEPTH} levels.")
        return self._with_changes({name: value})

    def without_members(self, names: Set[str]) -> Fields:
        """Return the members other than these, for older versions of an API that do not know them."""
        return self._with_changes({}, names)

    def _with_changes(self, changes: Mapping[str, Any], removed: Set[str] = frozenset()) -> Fields:
        data = self._data
        if isinstance(data, LazyMembers):
            return Fields(data.with_changes(changes, removed), self._path, self._wording, self._places)
        members = {name: value for name, value in data.items() if name not in removed} if removed else data
        return Fields({**members, **changes}, self._path, self._wording, self._places)

    def raw_value(self, name: str) -> Any:
        """Return the decoded value, or None if it is absent or null."""
        return self._data.get(name)

    def member_error(self, name: str, reason: str) -> BadRequest:
        """Return an error about a member, for rules that only its dialect knows."""
        return self._wording.invalid_error(self.member_path(name), reason)

    def missing_member(self, name: str) -> BadRequest:
        """Return the error for a missing member."""
        return self._wording.missing_error(self.member_path(name))

    def empty_member(self, name: str, container: str) -> BadRequest:
        """Return the error for an empty member. ``container`` is "string" or "array"."""
        return self._wording.empty_error(self.member_path(name), container)

    def mistyped_member(self, name: str, expected: str) -> BadRequest:
        """Return the error for a member of a wrong type. ``expected`` is a type with its article."""
        return self._wording.type_error(self.member_path(name), expected, self._data.get(name))

    def boolean(self, name: str, default: D) -> bool | D:
        """Return a boolean."""
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            value = self._wording.convert_value(self.member_path(name), "a boolean", value)
        return value

    def integer(self, name: str, default: D, low: int | None = INT64[0], high: int | None = INT64[1]) -> int | D:
        """Return an integer within ``low`` .. ``high``."""
        value = self._data.get(name)
        if value is None:
            return default
        return self._checked_integer(self.member_path(name), value, low, high)

    def number(
        self, name: str, default: D, low: float | None = None, high: float | None = None, *, low_excluded: bool = False
    ) -> float | D:
        """Return a number within ``low`` .. ``high``. With ``low_excluded`` it must be greater than ``low``."""
        value = self._data.get(name)
        if value is None:
            return default
        return self._checked_number(self.member_path(name), value, low, high, low_excluded)

    def string(self, name: str, default: D, *, cap: int | None = None, allowed: Sequence[str] = ()) -> str | D:
        """Return a text of at most ``cap`` characters. If ``allowed`` is not empty, it lists the valid values."""
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.mistyped_member(name, "a string")
        if allowed and value not in allowed:
            raise self._wording.unlisted_error(self.member_path(name), value, allowed)
        if cap is not None and len(value) > cap:
            raise self._wording.too_long_error(self.member_path(name), "string", len(value), cap)
        return value

    def strings(self, name: str, *, cap: int, total: int) -> list[str]:
        """Return the strings of a string or an array.

        At most ``cap`` strings, none empty, with at most ``total`` characters together; none if the member is absent.
        """
        value = self._data.get(name)
        if value is None:
            return []
        if isinstance(value, str):
            value = [value]
        elif not isinstance(value, list):
            raise self.mistyped_member(name, "a string or an array of strings")
        if len(value) > cap:
            raise self._wording.too_long_error(self.member_path(name), "array", len(value), cap)
        for i, text in enumerate(value):
            item_path = f"{self.member_path(name)}[{i}]"
            if not isinstance(text, str):
                raise self._wording.type_error(item_path, "a string", text)
            if not text:
                raise self._wording.empty_error(item_path, "string")
        size = sum(map(len, value))
        if size > total and len(value) == 1:
            raise self._wording.too_long_error(self.member_path(name), "string", size, total)
        if size > total:
            raise self.member_error(
                name, f"at most {total} characters are allowed in all strings together, but there are {size}."
            )
        return value

    def integers(self, name: str, *, cap: int, low: int | None, high: int | None) -> list[int]:
        """Return an array of at most ``cap`` integers within ``low`` .. ``high``; empty if absent."""
        value = self.array(name, cap=cap)
        if not value:
            return value
        if set(map(type, value)) == {int} and _in_range(min(value), low, high) and _in_range(max(value), low, high):
            return value  # fast path: building a path string for each id of a long prompt is expensive
        array_path = self.member_path(name)
        return [self._checked_integer(f"{array_path}[{i}]", item, low, high) for i, item in enumerate(value)]

    def array(self, name: str, *, cap: int) -> list[Any]:
        """Return an array of at most ``cap`` values of any type; empty if absent."""
        value = self._data.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.mistyped_member(name, "an array")
        if len(value) > cap:
            raise self._wording.too_long_error(self.member_path(name), "array", len(value), cap)
        return value

    def objects(self, name: str, *, cap: int) -> Iterator[Fields]:
        """Yield the objects of an array one after another."""
        array_path = self.member_path(name)
        for i, item in enumerate(self.array(name, cap=cap)):
            if not isinstance(item, dict):
                raise self._wording.type_error(f"{array_path}[{i}]", "an object", item)
            yield Fields(item, f"{array_path}[{i}]", self._wording)

    def object(self, name: str) -> Fields | None:
        """Return an object, or None if it is absent."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.mistyped_member(name, "an object")
        return Fields(value, self.member_path(name), self._wording)

    def free_object(self, name: str) -> dict[str, Any]:
        """Return an object with arbitrary members (a schema, template options), nested at most MAX_DEPTH deep."""
        value = self._data.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.mistyped_member(name, "an object")
        if not is_shallow(value, MAX_DEPTH):
            raise self.member_error(name, f"nested deeper than {MAX_DEPTH} levels.")
        return value

    def token_weights(self, name: str, *, cap: int, low: float, high: float) -> dict[int, float]:
        """Return an object that maps token ids (as text) to numbers within ``low`` .. ``high``."""
        value = self._data.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.mistyped_member(name, "an object")
        if len(value) > cap:
            raise self._wording.too_long_error(self.member_path(name), "object", len(value), cap)
        weights = {}
        for key, weight in zip(map(str, value), value.values(), strict=True):  # ``parley.LLM`` has ids as integers
            if not (key.isascii() and key.isdigit() and len(key) < 12):
                raise self.member_error(name, f"keys must be token ids, but one is {excerpt(key)}.")
            weights[int(key)] = self._checked_number(
                f"{self.member_path(name)}.{key}", weight, low, high, False, expected="an integer"
            )
        return weights

    def _checked_integer(self, path: str, value: Any, low: int | None, high: int | None) -> int:
        if isinstance(value, float) and value.is_integer() and self._wording.whole_floats:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            value = self._wording.convert_value(path, "an integer", value)
        if not _in_range(value, low, high):
            raise self._wording.range_error(path, "an integer", value, low, high, low_excluded=False)
        result: int = value
        return result

    def _checked_number(
        self,
        path: str,
        value: Any,
        low: float | None,
        high: float | None,
        low_excluded: bool,
        expected: str = "a number",
    ) -> float:
        """Return a number as a float. ``expected``: the type that the API documents, for errors of range."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            value = self._wording.convert_value(path, "a number", value)
        # compare before the conversion to float: an integer beyond 10^308 would overflow; NaN fails every comparison
        if isinstance(value, int) and abs(value) > MAX_FLOAT:
            low, high = (-MAX_FLOAT if low is None else low), (MAX_FLOAT if high is None else high)
        if not _in_range(value, low, high) or (low_excluded and value == low):
            raise self._wording.range_error(path, expected, value, low, high, low_excluded=low_excluded)
        return float(value)


def _in_range(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def is_shallow(value: Any, depth: int) -> bool:
    """True if the value is nested at most ``depth`` deep. Iterates level by level, so that it cannot overflow the
    stack itself."""
    level = [value]
    for _ in range(depth):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return True
    return False
