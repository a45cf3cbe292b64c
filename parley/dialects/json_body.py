"""Decodes JSON bodies within limits on the number of their values, which are counted before anything is built.

Decoded values take up to a hundred times the memory of their text, and the decoder keeps the interpreter's lock until
it is done: eleven million empty arrays stop all threads for seconds. Text is cheap, so only values are limited. The
count needs no parser, and other threads run between its slices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import msgspec

from parley.errors import BadRequest

MAX_ARRAYS = 1 << 17  # arrays and objects of a body together
MAX_MEMBERS = 1 << 17  # members of all objects of a body together
MAX_VALUES = 1 << 21  # values of a body: a prompt may be an array of token ids
SLICE_SIZE = 1 << 16  # bytes that are counted in one go
LAZY_SIZE = 1 << 16  # bytes of a body above which unread members are not decoded

_MARKS = b'"\\[{:,'
_OTHER_BYTES = bytes(set(range(256)) - set(_MARKS))
_RAW_MEMBERS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ESCAPE_SIZE = 6  # bytes of an escape such as \\ud83d
_HALF_PAIR_IN_STRING = re.compile(rb'\\u[dD][89abAB][0-9a-fA-F]{2}[^"]*"')


class OverfullJson(msgspec.DecodeError):
    """A JSON text has more values than may be decoded. The message is the end of a sentence about the text."""


def decode_json(text: bytes) -> Any:
    """Decode a JSON text. Raises msgspec.DecodeError (maybe OverfullJson), UnicodeDecodeError, RecursionError."""
    check_json_size(text)
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise _correct_fault(error, text) from None


def check_json_size(text: bytes) -> None:
    """Raise OverfullJson if a JSON text has too many values. Other faults are not noticed."""
    if len(text) <= MAX_ARRAYS:
        return
    if _find_excess([text]):  # marks inside strings were counted as well
        excess = _find_excess(marks_outside_strings(text))
        if excess:
            raise OverfullJson(excess)


def _find_excess(pieces: Iterator[bytes] | list[bytes]) -> str:
    """Return the limit that the pieces of a text exceed, as the end of a sentence; "" if there is none."""
    arrays = members = values = 0
    for piece in pieces:
        arrays += piece.count(b"[") + piece.count(b"{")
        members += piece.count(b":")
        values += piece.count(b",")
        if arrays > MAX_ARRAYS:
            return f"it has more than {MAX_ARRAYS} arrays and objects"
        if members > MAX_MEMBERS:
            return f"its objects have more than {MAX_MEMBERS} members"
        if values > MAX_VALUES:
            return f"it has more than {MAX_VALUES} values"
    return ""


def marks_outside_strings(text: bytes) -> Iterator[bytes]:
    """Yield the punctuation outside of strings, for each slice of the text."""
    in_string, open_escape = False, b""
    for start in range(0, len(text), SLICE_SIZE):
        piece = open_escape + text[start : start + SLICE_SIZE]
        open_escape = b"\\" * (_trailing_backslashes(piece) % 2)  # begins an escape that the next slice completes
        piece = piece[: len(piece) - len(open_escape)]
        marks = piece.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHER_BYTES)
        parts = marks.split(b'"')
        yield b"".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0


def _trailing_backslashes(piece: bytes) -> int:
    return len(piece) - len(piece.rstrip(b"\\"))


def _correct_fault(error: msgspec.DecodeError, text: bytes) -> msgspec.DecodeError:
    """Return the error of a JSON text that could not be decoded, with the true reason.

    The decoder requires a complete escape after the first half of a surrogate pair. If the text ends before that, it
    calls the text truncated, even if the text is complete.
    """
    tail_start = max(0, len(text) - 2 * _ESCAPE_SIZE)
    half = _HALF_PAIR_IN_STRING.search(text, tail_start) if "truncated" in str(error) else None
    if half is None or _trailing_backslashes(text[: half.start() + 1]) % 2 == 0:
        return error
    return msgspec.DecodeError(f"JSON is malformed: half of a surrogate pair (byte {half.start()})")


def first_bad_byte(text: bytes) -> int:
    """Return the position of the first byte that is not UTF-8, 0 if there is none. The decoder's own error counts from
    the beginning of the string that holds it."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return 0


class LazyMembers(Mapping[str, Any]):
    """The members of a large JSON object. Each is decoded when it is first read, so that ignored members cost nothing.

    ``members``: values, or the JSON text of values as ``msgspec.Raw``. ``refuse`` turns an error in such a text into
    the error of the whole body.
    """

    def __init__(self, members: dict[str, Any], refuse: Callable[[Exception], BadRequest]):
        self._members, self._refuse = members, refuse

    def __getitem__(self, name: str) -> Any:
        value = self._members[name]
        if isinstance(value, msgspec.Raw):
            try:
                value = self._members[name] = msgspec.json.decode(value)
            except msgspec.DecodeError as error:
                raise self._refuse(_correct_fault(error, bytes(value))) from None
            except (UnicodeDecodeError, RecursionError) as error:
                raise self._refuse(error) from None
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return repr(dict(self))

    def with_changes(self, changes: Mapping[str, Any], removed: Set[str] = frozenset()) -> LazyMembers:
        """Return these members with some changed or added, and some removed."""
        members = {name: value for name, value in self._members.items() if name not in removed}
        return LazyMembers({**members, **changes}, self._refuse)


def decode_members(text: bytes, refuse: Callable[[Exception], BadRequest]) -> Any:
    """Decode a JSON text; a large object becomes LazyMembers. Raises the error that ``refuse`` returns for a fault."""
    try:
        check_json_size(text)
        if len(text) <= LAZY_SIZE or not text.lstrip().startswith(b"{"):
            return msgspec.json.decode(text)
        return LazyMembers(_RAW_MEMBERS_DECODER.decode(text), refuse)
    except msgspec.DecodeError as error:
        raise refuse(_correct_fault(error, text)) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise refuse(error) from None
