"""Reads calls with each argument between marks, as in ``<parameter=city>Oslo</parameter>``, and converts them to JSON.

The type that the tool's schema gives a parameter decides how its value is read. A string is passed on while it arrives,
any other value once it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Generator

from parley.text.parsing.calls.literals import MAX_WORD_CHARACTERS, json_escape, literal_to_json, read_marked_string
from parley.text.parsing.calls.objects import ARGUMENT_MEMBERS, read_call_name
from parley.text.parsing.calls.scanner import CallScanner, MalformedCall, ReadSteps
from parley.text.parsing.calls.tools import json_value_type
from parley.text.parsing.mark_search import compile_marks

LINE_BREAK = "\n"
# Names that models give the object of all arguments if they write it.
WRAPPER_NAMES = (
    *ARGUMENT_MEMBERS,
    "input",
    "properties",
)


def read_tags_call(scan: CallScanner) -> ReadSteps:
    """Read a name, the ``after_name`` marks, and the arguments, each with ``key_marks`` and ``value_marks``."""
    form = scan.form
    name, call_id = yield from read_call_name(scan)
    for mark in form.after_name:
        yield from scan.expect_mark(mark.strip())
    scan.announce_call(name, call_id)
    if form.number_end:
        yield from read_until(scan, form.number_end)
    opening, closing = (mark.strip() for mark in form.key_marks)
    lined = form.value_marks[0].endswith(LINE_BREAK)
    count = 0
    while True:
        yield from scan.peek_character()
        if not (yield from scan.mark_follows(opening)):
            break
        scan.position += len(opening)
        key = yield from read_until(scan, closing)
        types = yield from _read_argument_types(scan, name, key)
        end_marks = yield from _read_value_opening(scan, lined)
        converted_value = ""
        if not count and key in WRAPPER_NAMES and scan.tools.lacks_parameter(name, key):
            text = yield from read_until_any(scan, end_marks)
            if members := _count_members(text):
                scan.add_arguments(text.strip().removesuffix("}"))
                count = members
                continue
            converted_value = text_to_json(text, types, lined)
        scan.add_arguments(("{" if not count else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        count += 1
        if converted_value:
            scan.add_arguments(converted_value)
        elif types == {"string"}:
            yield from read_marked_string(scan, end_marks, lined)
        else:
            scan.add_arguments(text_to_json((yield from read_until_any(scan, end_marks)), types, lined))
    scan.add_arguments("}" if count else "{}")


def _read_argument_types(scan: CallScanner, name: str, key: str) -> Generator[None, None, frozenset[str]]:
    """Return the types an argument may have: the schema's, narrowed to the type the model states; empty for any."""
    form, types = scan.form, scan.tools.parameter_types(name, key)
    stated_type = ""
    if form.marks_strings and '"true"' in (yield from read_until(scan, ">")):
        stated_type = "string"
    if form.type_marks[0]:
        yield from scan.peek_character()
        if (yield from scan.mark_follows(form.type_marks[0].strip())):
            scan.position += len(form.type_marks[0].strip())
            stated_type = yield from read_until(scan, form.type_marks[1])
    return frozenset({stated_type}) if stated_type and (not types or stated_type in types) else types


def _read_value_opening(scan: CallScanner, lined: bool) -> Generator[None, None, tuple[str, ...]]:
    """Step over the marks before a value. Return the marks that may end it, the expected one first."""
    form = scan.form
    value_open, value_close = (mark.strip() for mark in form.value_marks)
    if value_open:
        yield from scan.expect_mark(value_open)
    if form.verbatim_marks[0] and (yield from scan.mark_follows(form.verbatim_marks[0])):
        scan.position += len(form.verbatim_marks[0])
        return (form.verbatim_marks[1] + value_close,)
    unclosed = (form.key_marks[0].strip(), form.call_close[0]) if form.end_optional else ()
    return value_close, *((LINE_BREAK if lined else "") + mark for mark in unclosed)


def read_until(scan: CallScanner, mark: str) -> Generator[None, None, str]:
    """Read a short text up to the mark, and step over the mark. Raises MalformedCall if the text is too long."""
    parts: list[str] = []
    end_mark = compile_marks(mark)
    size = 0
    while True:
        end, found_mark = end_mark.find_first(scan.text, scan.position)
        size += end - scan.position
        scan.step_to(end, parts.append)
        if size > MAX_WORD_CHARACTERS:
            scan.add_arguments("".join(parts))
            raise MalformedCall
        if found_mark:
            scan.position += len(mark)
            return "".join(parts).strip()
        yield


def read_until_any(scan: CallScanner, end_marks: tuple[str, ...]) -> Generator[None, None, str]:
    """Read all text up to the first of the marks. Step over the mark if it is the expected one, listed first."""
    parts: list[str] = []
    mark_finder = compile_marks(*end_marks)
    scan.convert_tail = lambda tail: "".join(parts) + tail
    while True:
        end, found_mark = mark_finder.find_first(scan.text, scan.position)
        scan.step_to(end, parts.append)
        if found_mark:
            break
        yield
    scan.position += len(end_marks[0]) if found_mark == end_marks[0] else 0
    scan.convert_tail = None
    return "".join(parts)


def _count_members(text: str) -> int:
    """Return the number of members if the text is a JSON object, else 0."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return 0
    return len(parsed) if isinstance(parsed, dict) else 0


def text_to_json(text: str, types: frozenset[str], lined: bool = True) -> str:
    """Return the JSON of a text: a value of one of the kinds if it can be read as one, else the text as a string.

    ``lined``: a line break at its start and one at its end are not part of the string.
    """
    stripped = text.strip()
    for candidate, is_converted in (
        (stripped, False),
        (literal_to_json(stripped), True),
        (_unescape_quotes(stripped), True),
    ):
        try:
            parsed = json.loads(candidate, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            continue
        if isinstance(parsed, str) and (is_converted or not types):
            continue
        if (
            not types
            or json_value_type(parsed) in types
            or (json_value_type(parsed) == "integer" and "number" in types)
        ):
            return candidate
    return f'"{json_escape(text.removeprefix(LINE_BREAK).removesuffix(LINE_BREAK) if lined else text)}"'


def _unescape_quotes(text: str) -> str:
    """Return the JSON list or object in a text whose quotes are all escaped by backslashes, or "" if it is not one."""
    try:
        return str(json.loads(f'"{text}"')) if text[:1] in ("[", "{") else ""
    except ValueError:
        return ""


def _refuse_constant(_: str) -> None:
    raise ValueError
