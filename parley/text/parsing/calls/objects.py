"""Reads calls whose arguments are JSON, inside an object together with the name or after the name.

The arguments are passed on as written, or decoded if a model writes the object as a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from functools import cache

from parley.text.parsing.calls.scanner import CallScanner, MalformedCall, ReadSteps

NAME_MEMBERS = ("name", "tool_name")
ARGUMENT_MEMBERS = ("arguments", "parameters")
OTHER_MEMBERS = ("id", "type")  # other members that models write before these
ARGUMENT_STARTS = '{["n'  # first characters of arguments ("n" for null)
MAX_NAME_CHARACTERS = 256  # maximum characters of a name
_NAME_CHARACTERS = re.compile(r"[^\s\[\]{}<>()\"'`|,;=｜]*")
_SCALAR_CHARACTERS = re.compile(r'[^\s,{}\[\]"<]*')
_STRING_STOPS = re.compile(r'["\\\x00-\x1f]')
_PACKED_STOPS = re.compile(r'["\\]')
_PACKED_OBJECT = re.compile(r'"\{[\\}\s]')  # a string that holds an object


def read_object_call(scan: CallScanner) -> ReadSteps:
    """Read ``{"name": …, "arguments": {…}}``; ignore other members. If the name is last, all comes at once."""
    held_arguments: list[str] | None = None  # arguments that came before the name
    arguments_read = False
    yield from scan.expect_mark("{")
    while (yield from scan.peek_character()) != "}":
        key = yield from read_json_string(scan)
        if scan.form.unmarked and not scan.in_call and key not in (*NAME_MEMBERS, *ARGUMENT_MEMBERS, *OTHER_MEMBERS):
            raise MalformedCall  # the answer is JSON, not a call: do not hold it back to its end
        yield from scan.expect_mark(":")
        yield from scan.peek_character()
        if key in NAME_MEMBERS and not scan.in_call:
            scan.announce_call((yield from read_json_string(scan)))
            scan.add_arguments("".join(held_arguments or ()))
        elif key in ARGUMENT_MEMBERS and held_arguments is None and not arguments_read:
            arguments_read = True
            if scan.in_call:
                yield from read_call_arguments(scan)
            else:
                held_arguments = []
                yield from _read_unpacked(scan, held_arguments.append)
        else:
            yield from read_json_value(scan, _discard_text)
        if (yield from scan.peek_character()) == ",":
            scan.position += 1
        elif scan.text[scan.position] != "}":
            raise MalformedCall
    scan.position += 1
    if not scan.in_call:
        raise MalformedCall


def read_keyed_call(scan: CallScanner) -> ReadSteps:
    """Read ``{"name": {…}}``."""
    yield from scan.expect_mark("{")
    name = yield from read_json_string(scan)
    yield from scan.expect_mark(":")
    scan.announce_call(name)
    yield from scan.peek_character()
    yield from read_call_arguments(scan)
    yield from scan.expect_mark("}")


def read_named_call(scan: CallScanner) -> ReadSteps:
    """Read a name, the ``after_name`` marks and JSON. Models may leave out marks before the JSON."""
    name, call_id = yield from read_call_name(scan)
    for mark in scan.form.after_name:
        if (yield from scan.peek_character()) == "{":
            break
        yield from scan.expect_mark(mark.strip())
    if (yield from scan.peek_character()) not in ARGUMENT_STARTS or (
        not scan.form.after_name and scan.text[scan.position] != "{"
    ):
        raise MalformedCall
    scan.announce_call(name, call_id)
    yield from read_call_arguments(scan)


def read_call_name(scan: CallScanner) -> Generator[None, None, tuple[str, str | None]]:
    """Read a call's name, and its id if there is one. Raises MalformedCall."""
    word = yield from read_name_word(scan)
    if scan.form.name_mark:
        yield from scan.expect_mark(scan.form.name_mark)
        return (yield from read_name_word(scan)), word
    if scan.form.numbered_names:
        unprefixed = word.removeprefix("functions.")
        name, colon, number = unprefixed.rpartition(":")
        if colon:
            return name, word if number else None
        only_tool = unprefixed.isdecimal() and len(scan.tools) == 1  # a number is enough if there is only one tool
        return (next(iter(scan.tools)), word) if only_tool else (unprefixed, None)
    if (
        scan.form.id_mark
        and (yield from scan.peek_character()) == scan.form.id_mark[0]
        and (yield from scan.mark_follows(scan.form.id_mark))
    ):
        scan.position += len(scan.form.id_mark)
        return word, (yield from read_name_word(scan))
    return word, None


def read_name_word(scan: CallScanner) -> Generator[None, None, str]:
    """Read the characters of a name."""
    yield from scan.peek_character()
    parts: list[str] = []
    while True:
        end = _NAME_CHARACTERS.match(scan.text, scan.position).end()  # type: ignore[union-attr]  # it also matches nothing
        scan.step_to(end, parts.append)
        if sum(map(len, parts)) > MAX_NAME_CHARACTERS:
            raise MalformedCall
        if end < len(scan.text):
            break
        yield
    return "".join(parts)


def read_call_arguments(scan: CallScanner) -> ReadSteps:
    """Read a JSON value as the arguments of the open call."""
    scan.convert_tail = str
    yield from _read_unpacked(scan, scan.add_arguments)
    scan.convert_tail = None


def _read_unpacked(scan: CallScanner, write_text: Callable[[str], object]) -> ReadSteps:
    """Read a JSON value; if it is a string that holds an object, pass on the object."""
    while len(scan.text) - scan.position < 3 and '"{'.startswith(scan.text[scan.position : scan.position + 2]):
        yield
    if _PACKED_OBJECT.match(scan.text, scan.position) is None:
        yield from read_json_value(scan, write_text)
        return
    scan.position += 1
    while True:
        stop = _PACKED_STOPS.search(scan.text, scan.position)
        scan.step_to(stop.start() if stop else len(scan.text), write_text)
        if stop is not None and stop[0] == '"':
            scan.position += 1
            return
        size = 6 if scan.text.startswith("\\u", scan.position) else 2
        if stop is None or len(scan.text) - scan.position < size:
            yield
            continue
        write_text(_unescape_character(scan.text[scan.position : scan.position + size]))
        scan.position += size


def _unescape_character(text: str) -> str:
    """Return the character of an escape sequence. An invalid one, or half a surrogate pair, is returned unchanged."""
    try:
        char = json.loads(f'"{text}"')
    except ValueError:
        return text
    return text if "\ud800" <= char <= "\udfff" else char


def read_json_value(scan: CallScanner, write_text: Callable[[str], object]) -> ReadSteps:
    """Read any JSON value and pass it on in pieces. Only brackets and strings are recognized.

    If the form has a mark that ends a call, the mark also ends a broken value. Raises MalformedCall then.
    """
    guard = scan.form.end_guard
    outside, within = _value_stops(guard[:1])
    depth = 0
    in_string = False
    has_line_break = False  # the string has a raw line break, so its closing quote is probably missing
    if (yield from scan.peek_character()) not in '"{[':
        yield from _read_json_scalar(scan, write_text)
        return
    while True:
        stop = (within if in_string else outside).search(scan.text, scan.position)
        scan.step_to(stop.start() if stop else len(scan.text), write_text)
        if stop is None:
            yield
            continue
        char = stop[0]
        if char == guard[:1]:
            if (has_line_break or not in_string) and (yield from scan.mark_follows(guard)):
                raise MalformedCall
        elif char == "\\":
            if scan.position + 1 == len(scan.text):
                yield
                continue
            scan.step_to(scan.position + 1, write_text)
        elif char == '"':
            in_string, has_line_break = not in_string, False
        elif in_string:
            has_line_break = True
        else:
            depth += 1 if char in "{[" else -1
        scan.step_to(scan.position + 1, write_text)
        if depth <= 0 and not in_string:
            return


def read_json_string(scan: CallScanner) -> Generator[None, None, str]:
    """Read and decode a JSON string. Raises MalformedCall."""
    yield from scan.expect_mark('"')
    parts = ['"']
    while True:
        stop = _STRING_STOPS.search(scan.text, scan.position)
        scan.step_to(stop.start() if stop else len(scan.text), parts.append)
        if stop is None or (stop[0] == "\\" and scan.position + 1 == len(scan.text)):
            yield
            continue
        if stop[0] < " ":
            raise MalformedCall
        scan.step_to(scan.position + (2 if stop[0] == "\\" else 1), parts.append)
        if stop[0] == '"':
            break
    try:
        result: str = json.loads("".join(parts))
        return result
    except ValueError:
        raise MalformedCall from None


def _read_json_scalar(scan: CallScanner, write_text: Callable[[str], object]) -> ReadSteps:
    """Read a number, true, false or null. Raises MalformedCall if there is none."""
    empty = True
    while True:
        end = _SCALAR_CHARACTERS.match(scan.text, scan.position).end()  # type: ignore[union-attr]  # it also matches nothing
        empty = empty and end == scan.position
        scan.step_to(end, write_text)
        if end < len(scan.text):
            break
        yield
    if empty:
        raise MalformedCall


def _discard_text(_: str) -> None:
    pass


@cache
def _value_stops(guard: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns for the significant characters of a value outside its strings, and inside them."""
    guard = re.escape(guard)
    return re.compile(r'["{}\[\]' + guard + "]"), re.compile(r'["\\' + guard + r"\x00-\x1f]")
