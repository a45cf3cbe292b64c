"""Reads calls whose arguments are JSON, inside an object together with the name or after the name.

The arguments are passed on as written, or decoded if a model writes the object as a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from functools import cache

from parley.text.parsing.calls.scanner import Garbled, Scan, Wait

NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
BESIDE = ("id", "type")  # other members that models write before these
ARGUMENT = '{["n'  # first characters of arguments ("n" for null)
LONGEST = 256  # maximum characters of a name
_NAME = re.compile(r"[^\s\[\]{}<>()\"'`|,;=｜]*")
_SCALAR = re.compile(r'[^\s,{}\[\]"<]*')
_STRING = re.compile(r'["\\\x00-\x1f]')
_ENDS = re.compile(r'["\\]')
_PACKED = re.compile(r'"\{[\\}\s]')  # a string that holds an object


def whole(scan: Scan) -> Wait:
    """Read ``{"name": …, "arguments": {…}}``; ignore other members. If the name is last, all comes at once."""
    held: list[str] | None = None  # arguments that came before the name
    passed = False
    yield from scan.expect("{")
    while (yield from scan.peek()) != "}":
        key = yield from string(scan)
        if scan.form.bare and not scan.inside and key not in (*NAMES, *ARGUMENTS, *BESIDE):
            raise Garbled  # the answer is JSON, not a call: do not hold it back to its end
        yield from scan.expect(":")
        yield from scan.peek()
        if key in NAMES and not scan.inside:
            scan.announce((yield from string(scan)))
            scan.say("".join(held or ()))
        elif key in ARGUMENTS and held is None and not passed:
            passed = True
            if scan.inside:
                yield from passing(scan)
            else:
                held = []
                yield from _meant(scan, held.append)
        else:
            yield from value(scan, _drop)
        if (yield from scan.peek()) == ",":
            scan.at += 1
        elif scan.text[scan.at] != "}":
            raise Garbled
    scan.at += 1
    if not scan.inside:
        raise Garbled


def keyed(scan: Scan) -> Wait:
    """Read ``{"name": {…}}``."""
    yield from scan.expect("{")
    name = yield from string(scan)
    yield from scan.expect(":")
    scan.announce(name)
    yield from scan.peek()
    yield from passing(scan)
    yield from scan.expect("}")


def named(scan: Scan) -> Wait:
    """Read a name, the ``after_name`` marks and JSON. Models may leave out marks before the JSON."""
    name, id = yield from heading(scan)
    for mark in scan.form.head:
        if (yield from scan.peek()) == "{":
            break
        yield from scan.expect(mark.strip())
    if (yield from scan.peek()) not in ARGUMENT or (not scan.form.head and scan.text[scan.at] != "{"):
        raise Garbled
    scan.announce(name, id)
    yield from passing(scan)


def heading(scan: Scan) -> Generator[None, None, tuple[str, str | None]]:
    """Read a call's name, and its id if there is one. Raises MalformedCall."""
    written = yield from word(scan)
    if scan.form.first:
        yield from scan.expect(scan.form.first)
        return (yield from word(scan)), written
    if scan.form.numbered:
        called = written.removeprefix("functions.")
        name, colon, number = called.rpartition(":")
        if colon:
            return name, written if number else None
        alone = called.isdecimal() and len(scan.tools) == 1  # a number is enough if there is only one tool
        return (next(iter(scan.tools)), written) if alone else (called, None)
    if scan.form.id and (yield from scan.peek()) == scan.form.id[0] and (yield from scan.stands(scan.form.id)):
        scan.at += len(scan.form.id)
        return written, (yield from word(scan))
    return written, None


def word(scan: Scan) -> Generator[None, None, str]:
    """Read the characters of a name."""
    yield from scan.peek()
    parts: list[str] = []
    while True:
        end = _NAME.match(scan.text, scan.at).end()  # type: ignore[union-attr]  # it also matches nothing
        scan.take(end, parts.append)
        if sum(map(len, parts)) > LONGEST:
            raise Garbled
        if end < len(scan.text):
            break
        yield
    return "".join(parts)


def passing(scan: Scan) -> Wait:
    """Read a JSON value as the arguments of the open call."""
    scan.tail = str
    yield from _meant(scan, scan.say)
    scan.tail = None


def _meant(scan: Scan, into: Callable[[str], object]) -> Wait:
    """Read a JSON value; if it is a string that holds an object, pass on the object."""
    while len(scan.text) - scan.at < 3 and '"{'.startswith(scan.text[scan.at : scan.at + 2]):
        yield
    if _PACKED.match(scan.text, scan.at) is None:
        yield from value(scan, into)
        return
    scan.at += 1
    while True:
        found = _ENDS.search(scan.text, scan.at)
        scan.take(found.start() if found else len(scan.text), into)
        if found is not None and found[0] == '"':
            scan.at += 1
            return
        size = 6 if scan.text.startswith("\\u", scan.at) else 2
        if found is None or len(scan.text) - scan.at < size:
            yield
            continue
        into(_unescaped(scan.text[scan.at : scan.at + size]))
        scan.at += size


def _unescaped(text: str) -> str:
    """Return the character of an escape sequence. An invalid one, or half a surrogate pair, is returned unchanged."""
    try:
        char = json.loads(f'"{text}"')
    except ValueError:
        return text
    return text if "\ud800" <= char <= "\udfff" else char


def value(scan: Scan, into: Callable[[str], object]) -> Wait:
    """Read any JSON value and pass it on in pieces. Only brackets and strings are recognized.

    If the form has a mark that ends a call, the mark also ends a broken value. Raises MalformedCall then.
    """
    guard = scan.form.guard
    outside, within = _breaks(guard[:1])
    depth = 0
    quoted = torn = False  # torn: the string has a raw line break, so its closing quote is probably missing
    if (yield from scan.peek()) not in '"{[':
        yield from _scalar(scan, into)
        return
    while True:
        found = (within if quoted else outside).search(scan.text, scan.at)
        scan.take(found.start() if found else len(scan.text), into)
        if found is None:
            yield
            continue
        char = found[0]
        if char == guard[:1]:
            if (torn or not quoted) and (yield from scan.stands(guard)):
                raise Garbled
        elif char == "\\":
            if scan.at + 1 == len(scan.text):
                yield
                continue
            scan.take(scan.at + 1, into)
        elif char == '"':
            quoted, torn = not quoted, False
        elif quoted:
            torn = True
        else:
            depth += 1 if char in "{[" else -1
        scan.take(scan.at + 1, into)
        if depth <= 0 and not quoted:
            return


def string(scan: Scan) -> Generator[None, None, str]:
    """Read and decode a JSON string. Raises MalformedCall."""
    yield from scan.expect('"')
    parts = ['"']
    while True:
        found = _STRING.search(scan.text, scan.at)
        scan.take(found.start() if found else len(scan.text), parts.append)
        if found is None or (found[0] == "\\" and scan.at + 1 == len(scan.text)):
            yield
            continue
        if found[0] < " ":
            raise Garbled
        scan.take(scan.at + (2 if found[0] == "\\" else 1), parts.append)
        if found[0] == '"':
            break
    try:
        return json.loads("".join(parts))
    except ValueError:
        raise Garbled from None


def _scalar(scan: Scan, into: Callable[[str], object]) -> Wait:
    """Read a number, true, false or null. Raises MalformedCall if there is none."""
    empty = True
    while True:
        end = _SCALAR.match(scan.text, scan.at).end()  # type: ignore[union-attr]  # it also matches nothing
        empty = empty and end == scan.at
        scan.take(end, into)
        if end < len(scan.text):
            break
        yield
    if empty:
        raise Garbled


def _drop(_: str) -> None:
    pass


@cache
def _breaks(guard: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns for the significant characters of a value outside its strings, and inside them."""
    guard = re.escape(guard)
    return re.compile(r'["{}\[\]' + guard + "]"), re.compile(r'["\\' + guard + r"\x00-\x1f]")
