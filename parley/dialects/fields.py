"""Reading the members of a JSON body: type, default, range, null and size limits in one place, for every dialect.

A dialect reads one member after another and gets a checked Python value, or one of the errors in ``parley.errors`` is
raised. The rules that all APIs share are here: an explicit null means the default, a boolean is not a number, a whole
float (5.0) is an integer, unread members are ignored. The ``ErrorWording`` that is passed in decides how an API words
its refusals. Nothing here knows the name of any member.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import msgspec

from parley.dialects.words import WORDS, Words
from parley.errors import BadRequest, excerpt

D = TypeVar("D")

MAX_DEPTH = 64  # nesting of a free-form value, so that later recursive readers do not overflow the stack
INT64 = (-(2**63), 2**63 - 1)


def decode(body: bytes, words: Words = WORDS) -> Fields:
    """Return the members of a body. Raises Malformed (or the wording's error) if it is not one JSON object in UTF-8."""
    if not body:
        raise words.unreadable(body, "The request has no body. Send a JSON object.")
    try:
        value = msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise words.unreadable(body, f"The body is not UTF-8 (at byte {error.start}).") from None
    except RecursionError:
        raise words.unreadable(body, "The body is nested too deeply.") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise words.unreadable(body, f"The body could not be parsed as JSON: {error}.") from None
    if not isinstance(value, dict):
        raise words.shapeless(value)
    return Fields(value, "", words.about(value))


class Fields:
    """The members of one JSON object. ``path`` is the position of the object in the body, for messages."""

    __slots__ = ("_data", "_path", "_words")

    def __init__(self, data: Mapping[str, Any], path: str = "", words: Words = WORDS):
        self._data = data
        self._path = path
        self._words = words

    def path(self, name: str) -> str:
        """Return the position of member ``name`` in the body, such as ``messages[0].content``."""
        return f"{self._path}.{name}" if self._path else name

    def over(self, defaults: Mapping[str, Any]) -> Fields:
        """Return these members, with the defaults in place of absent or null ones."""
        given = {name: value for name, value in self._data.items() if value is not None or name not in defaults}
        return Fields({**defaults, **given}, self._path, self._words)

    @property
    def names(self) -> list[str]:
        """The names of all members."""
        return list(self._data)

    def has(self, name: str) -> bool:
        """True if the member is present and not null."""
        return self._data.get(name) is not None

    def among(self, names: Collection[str]) -> list[str]:
        """Return those of the names whose members are present and not null."""
        if self._data.keys().isdisjoint(names):
            return []
        return [name for name, value in self._data.items() if name in names and value is not None]

    def null(self, name: str) -> bool:
        """True if the member is present and null."""
        return name in self._data and self._data[name] is None

    def spelled(self, name: str, *, cap: int) -> Fields:
        """Parse the JSON text in ``name`` and return the members with the result in its place.

        Raises BadRequest if the text is longer than ``cap`` or nested deeper than MAX_DEPTH.
        """
        try:
            value = msgspec.json.decode(self.string(name, "", cap=cap))
        except (msgspec.DecodeError, RecursionError) as error:
            raise self.fail(name, f"the text is not JSON: {error}.") from None
        if isinstance(value, dict | list) and not shallow(value, MAX_DEPTH):
            raise self.fail(name, f"nested deeper than {MAX_DEPTH} levels.")
        return Fields({**self._data, name: value}, self._path, self._words)

    def without(self, names: Set[str]) -> Fields:
        """Return the members other than these, for older versions of an API that do not know them."""
        return Fields({name: value for name, value in self._data.items() if name not in names}, self._path, self._words)

    def raw(self, name: str) -> Any:
        """Return the decoded value, or None if it is absent or null."""
        return self._data.get(name)

    def fail(self, name: str, reason: str) -> BadRequest:
        """Return an error about a member, for rules that only its dialect knows."""
        return self._words.invalid(self.path(name), reason)

    def missing(self, name: str) -> BadRequest:
        """Return the error for a missing member."""
        return self._words.missing(self.path(name))

    def empty(self, name: str, what: str) -> BadRequest:
        """Return the error for an empty member. ``container`` is "string" or "array"."""
        return self._words.empty(self.path(name), what)

    def mistyped(self, name: str, expected: str) -> BadRequest:
        """Return the error for a member of a wrong type. ``expected`` is a type with its article."""
        return self._words.mistyped(self.path(name), expected, self._data.get(name))

    def boolean(self, name: str, default: D) -> bool | D:
        """Return a boolean."""
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            value = self._words.convert(self.path(name), "a boolean", value)
        return value

    def integer(self, name: str, default: D, low: int | None = INT64[0], high: int | None = INT64[1]) -> int | D:
        """Return an integer within ``low`` .. ``high``."""
        value = self._data.get(name)
        if value is None:
            return default
        return self._integer(self.path(name), value, low, high)

    def number(
        self, name: str, default: D, low: float | None = None, high: float | None = None, *, open: bool = False
    ) -> float | D:
        """Return a number within ``low`` .. ``high``. With ``low_excluded`` it must be greater than ``low``."""
        value = self._data.get(name)
        if value is None:
            return default
        return self._number(self.path(name), value, low, high, open)

    def string(self, name: str, default: D, *, cap: int | None = None, allowed: Sequence[str] = ()) -> str | D:
        """Return a text of at most ``cap`` characters. If ``allowed`` is not empty, it lists the valid values."""
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.mistyped(name, "a string")
        if allowed and value not in allowed:
            raise self._words.unlisted(self.path(name), value, allowed)
        if cap is not None and len(value) > cap:
            raise self._words.long(self.path(name), "string", len(value), cap)
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
            raise self.mistyped(name, "a string or an array of strings")
        if len(value) > cap:
            raise self._words.long(self.path(name), "array", len(value), cap)
        for i, text in enumerate(value):
            where = f"{self.path(name)}[{i}]"
            if not isinstance(text, str):
                raise self._words.mistyped(where, "a string", text)
            if not text:
                raise self._words.empty(where, "string")
        size = sum(map(len, value))
        if size > total and len(value) == 1:
            raise self._words.long(self.path(name), "string", size, total)
        if size > total:
            raise self.fail(
                name, f"at most {total} characters are allowed in all strings together, but there are {size}."
            )
        return value

    def integers(self, name: str, *, cap: int, low: int | None, high: int | None) -> list[int]:
        """Return an array of at most ``cap`` integers within ``low`` .. ``high``; empty if absent."""
        value = self.array(name, cap=cap)
        if set(map(type, value)) == {int} and _within(min(value), low, high) and _within(max(value), low, high):
            return value  # fast path: building a path string for each id of a long prompt is expensive
        where = self.path(name)
        return [self._integer(f"{where}[{i}]", item, low, high) for i, item in enumerate(value)]

    def array(self, name: str, *, cap: int) -> list[Any]:
        """Return an array of at most ``cap`` values of any type; empty if absent."""
        value = self._data.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.mistyped(name, "an array")
        if len(value) > cap:
            raise self._words.long(self.path(name), "array", len(value), cap)
        return value

    def objects(self, name: str, *, cap: int) -> Iterator[Fields]:
        """Yield the objects of an array one after another."""
        where = self.path(name)
        for i, item in enumerate(self.array(name, cap=cap)):
            if not isinstance(item, dict):
                raise self._words.mistyped(f"{where}[{i}]", "an object", item)
            yield Fields(item, f"{where}[{i}]", self._words)

    def object(self, name: str) -> Fields | None:
        """Return an object, or None if it is absent."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.mistyped(name, "an object")
        return Fields(value, self.path(name), self._words)

    def free(self, name: str) -> dict[str, Any]:
        """Return an object with arbitrary members (a schema, template options), nested at most MAX_DEPTH deep."""
        value = self._data.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.mistyped(name, "an object")
        if not shallow(value, MAX_DEPTH):
            raise self.fail(name, f"nested deeper than {MAX_DEPTH} levels.")
        return value

    def weights(self, name: str, *, cap: int, low: float, high: float) -> dict[int, float]:
        """Return an object that maps token ids (as text) to numbers within ``low`` .. ``high``."""
        value = self._data.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.mistyped(name, "an object")
        if len(value) > cap:
            raise self._words.long(self.path(name), "object", len(value), cap)
        weights = {}
        for key, weight in value.items():
            if not (key.isascii() and key.isdigit() and len(key) < 12):
                raise self.fail(name, f"keys must be token ids, but one is {excerpt(key)}.")
            weights[int(key)] = self._number(f"{self.path(name)}.{key}", weight, low, high, False)
        return weights

    def _integer(self, path: str, value: Any, low: int | None, high: int | None) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            value = self._words.convert(path, "an integer", value)
        if not _within(value, low, high):
            raise self._words.outside(path, value, low, high, open=False)
        return value

    def _number(self, path: str, value: Any, low: float | None, high: float | None, open: bool) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            value = self._words.convert(path, "a number", value)
        # compare before the conversion to float: an integer beyond 10^308 would overflow; NaN fails every comparison
        if not _within(value, low, high) or (open and value == low):
            raise self._words.outside(path, value, low, high, open=open)
        return float(value)


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def shallow(value: Any, depth: int) -> bool:
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
