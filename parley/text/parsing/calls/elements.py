"""Reads calls whose arguments are elements named by their tags, as in ``<city>Oslo</city>``, and converts them to JSON.

Elements are nested where a value is an object or a list; list items have the tag ``item``. A mark before every tag
distinguishes it from text. The tool's schema decides how a value is read.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from parley.text.parsing.calls.form import LIST_ITEM
from parley.text.parsing.calls.literals import MAX_NESTING, read_marked_string
from parley.text.parsing.calls.objects import read_call_name
from parley.text.parsing.calls.scanner import CallScanner, MalformedCall, ReadSteps
from parley.text.parsing.calls.tags import read_until, read_until_any, text_to_json
from parley.text.parsing.calls.tools import member_schema, schema_types


def read_elements_call(scan: CallScanner) -> ReadSteps:
    """Read a name, the ``after_name`` marks, and an element for each argument."""
    name, call_id = yield from read_call_name(scan)
    for mark in scan.form.after_name:
        yield from scan.expect_mark(mark.strip())
    scan.announce_call(name, call_id)
    root = scan.tools.arguments_schema(name)
    yield from _read_elements(scan, root, root, 0)


def _read_elements(
    scan: CallScanner, schema: Any, root: Any, depth: int, first: str | None = None, listed: bool = False
) -> ReadSteps:
    """Read elements as the members of an object or the items of a list. ``first``: the tag of one already begun."""
    before, end = ("[", "]") if listed else ("{", "}")
    while first is not None or (yield from _step_into_tag(scan)):
        key = (yield from read_until(scan, scan.form.key_marks[1])) if first is None else first
        scan.add_arguments(before if listed else f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _read_element_value(scan, member_schema(schema, root, None if listed else key), root, depth)
        before, first = ", ", None
    scan.add_arguments(end if before == ", " else "{}")


def _read_element_value(scan: CallScanner, schema: Any, root: Any, depth: int) -> ReadSteps:
    """Read the inside of an element, and the closing tag with any name."""
    if depth > MAX_NESTING:
        raise MalformedCall
    end = scan.form.value_marks[1]
    types = schema_types(schema, root)
    if types == {"string"}:
        yield from read_marked_string(scan, (end,))
    elif (yield from _step_into_tag(scan, blanks=bool(types) and "string" not in types)):
        key = yield from read_until(scan, scan.form.key_marks[1])
        listed = key == LIST_ITEM and (not types or "array" in types)
        yield from _read_elements(scan, schema, root, depth + 1, key, listed)
        yield from scan.expect_mark(end)
    else:
        text = yield from read_until_any(scan, (end,))
        hollow = not text.strip() and "string" not in types and types & {"array", "object"}
        scan.add_arguments(("[]" if "array" in types else "{}") if hollow else text_to_json(text, types))
    yield from read_until(scan, scan.form.key_marks[1])


def _step_into_tag(scan: CallScanner, blanks: bool = True) -> Generator[None, None, bool]:
    """Step over the start of an element's tag, if one comes. ``blanks``: skip blanks before it."""
    opening, closing = scan.form.key_marks[0], scan.form.value_marks[1]
    if blanks:
        yield from scan.peek_character()
    if (yield from scan.mark_follows(closing)) or not (yield from scan.mark_follows(opening)):
        return False
    scan.position += len(opening)
    return True
