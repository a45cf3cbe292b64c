"""Reads calls with each argument between marks, as in ``<parameter=city>Oslo</parameter>``, and converts them to JSON.

The type that the tool's schema gives a parameter decides how its value is read. A string is passed on while it arrives,
any other value once it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Generator

from parley.text.parsing.calls.literals import LONGEST, converted, escaped, marked
from parley.text.parsing.calls.objects import ARGUMENTS, heading
from parley.text.parsing.calls.scanner import Garbled, Scan, Wait
from parley.text.parsing.calls.tools import kind
from parley.text.parsing.marks import marks

LINE = "\n"
WRAPPERS = (*ARGUMENTS, "input", "properties")  # names that models give the object of all arguments if they write it


def call(scan: Scan) -> Wait:
    """Read a name, the ``after_name`` marks, and the arguments, each with ``key_marks`` and ``value_marks``."""
    form = scan.form
    name, id = yield from heading(scan)
    for mark in form.head:
        yield from scan.expect(mark.strip())
    scan.announce(name, id)
    if form.count:
        yield from until(scan, form.count)
    opening, closing = (mark.strip() for mark in form.key)
    lined = form.value[0].endswith(LINE)
    count = 0
    while True:
        yield from scan.peek()
        if not (yield from scan.stands(opening)):
            break
        scan.at += len(opening)
        key = yield from until(scan, closing)
        kinds = yield from _kinds(scan, name, key)
        ends = yield from _ends(scan, lined)
        held = ""
        if not count and key in WRAPPERS and scan.tools.lacks(name, key):
            text = yield from whole(scan, ends)
            if members := _members(text):
                scan.say(text.strip().removesuffix("}"))
                count = members
                continue
            held = value(text, kinds, lined)
        scan.say(("{" if not count else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        count += 1
        if held:
            scan.say(held)
        elif kinds == {"string"}:
            yield from marked(scan, ends, lined)
        else:
            scan.say(value((yield from whole(scan, ends)), kinds, lined))
    scan.say("}" if count else "{}")


def _kinds(scan: Scan, name: str, key: str) -> Generator[None, None, frozenset[str]]:
    """Return the types an argument may have: the schema's, narrowed to the type the model states; empty for any."""
    form, kinds = scan.form, scan.tools.kinds(name, key)
    said = ""
    if form.typed and '"true"' in (yield from until(scan, ">")):
        said = "string"
    if form.kind[0]:
        yield from scan.peek()
        if (yield from scan.stands(form.kind[0].strip())):
            scan.at += len(form.kind[0].strip())
            said = yield from until(scan, form.kind[1])
    return frozenset({said}) if said and (not kinds or said in kinds) else kinds


def _ends(scan: Scan, lined: bool) -> Generator[None, None, tuple[str, ...]]:
    """Step over the marks before a value. Return the marks that may end it, the expected one first."""
    form = scan.form
    before, after = (mark.strip() for mark in form.value)
    if before:
        yield from scan.expect(before)
    if form.verbatim[0] and (yield from scan.stands(form.verbatim[0])):
        scan.at += len(form.verbatim[0])
        return (form.verbatim[1] + after,)
    unclosed = (form.key[0].strip(), form.after[0]) if form.unclosed else ()
    return after, *((LINE if lined else "") + mark for mark in unclosed)


def until(scan: Scan, mark: str) -> Generator[None, None, str]:
    """Read a short text up to the mark, and step over the mark. Raises MalformedCall if the text is too long."""
    parts: list[str] = []
    watched = marks(mark)
    size = 0
    while True:
        end, found = watched.find(scan.text, scan.at)
        size += end - scan.at
        scan.take(end, parts.append)
        if size > LONGEST:
            scan.say("".join(parts))
            raise Garbled
        if found:
            scan.at += len(mark)
            return "".join(parts).strip()
        yield


def whole(scan: Scan, ends: tuple[str, ...]) -> Generator[None, None, str]:
    """Read all text up to the first of the marks. Step over the mark if it is the expected one, listed first."""
    parts: list[str] = []
    watched = marks(*ends)
    scan.tail = lambda rest: "".join(parts) + rest
    while True:
        end, found = watched.find(scan.text, scan.at)
        scan.take(end, parts.append)
        if found:
            break
        yield
    scan.at += len(ends[0]) if found == ends[0] else 0
    scan.tail = None
    return "".join(parts)


def _members(text: str) -> int:
    """Return the number of members if the text is a JSON object, else 0."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return 0
    return len(value) if isinstance(value, dict) else 0


def value(text: str, kinds: frozenset[str], lined: bool = True) -> str:
    """Return the JSON of a text: a value of one of the kinds if it can be read as one, else the text as a string.

    ``lined``: a line break at its start and one at its end are not part of the string.
    """
    bare = text.strip()
    for found, foreign in ((bare, False), (converted(bare), True), (_unescaped(bare), True)):
        try:
            value = json.loads(found, parse_constant=_refuse)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, str) and (foreign or not kinds):
            continue
        if not kinds or kind(value) in kinds or (kind(value) == "integer" and "number" in kinds):
            return found
    return f'"{escaped(text.removeprefix(LINE).removesuffix(LINE) if lined else text)}"'


def _unescaped(text: str) -> str:
    """Return the JSON list or object in a text whose quotes are all escaped by backslashes, or "" if it is not one."""
    try:
        return str(json.loads(f'"{text}"')) if text[:1] in ("[", "{") else ""
    except ValueError:
        return ""


def _refuse(_: str) -> None:
    raise ValueError
