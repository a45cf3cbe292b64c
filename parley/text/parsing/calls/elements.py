"""Reads calls whose arguments are elements named by their tags, as in ``<city>Oslo</city>``, and converts them to JSON.

Elements are nested where a value is an object or a list; list items have the tag ``item``. A mark before every tag
distinguishes it from text. The tool's schema decides how a value is read.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from parley.text.parsing.calls.form import ITEM
from parley.text.parsing.calls.literals import DEEPEST, marked
from parley.text.parsing.calls.objects import heading
from parley.text.parsing.calls.scanner import Garbled, Scan, Wait
from parley.text.parsing.calls.tags import until, value, whole
from parley.text.parsing.calls.tools import kinds, part


def call(scan: Scan) -> Wait:
    """Read a name, the ``after_name`` marks, and an element for each argument."""
    name, id = yield from heading(scan)
    for mark in scan.form.head:
        yield from scan.expect(mark.strip())
    scan.announce(name, id)
    root = scan.tools.schema(name)
    yield from _row(scan, root, root, 0)


def _row(scan: Scan, schema: Any, root: Any, depth: int, first: str | None = None, listed: bool = False) -> Wait:
    """Read elements as the members of an object or the items of a list. ``first``: the tag of one already begun."""
    before, end = ("[", "]") if listed else ("{", "}")
    while first is not None or (yield from _begins(scan)):
        key = (yield from until(scan, scan.form.key[1])) if first is None else first
        scan.say(before if listed else f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _value(scan, part(schema, root, None if listed else key), root, depth)
        before, first = ", ", None
    scan.say(end if before == ", " else "{}")


def _value(scan: Scan, schema: Any, root: Any, depth: int) -> Wait:
    """Read the inside of an element, and the closing tag with any name."""
    if depth > DEEPEST:
        raise Garbled
    end = scan.form.value[1]
    types = kinds(schema, root)
    if types == {"string"}:
        yield from marked(scan, (end,))
    elif (yield from _begins(scan, blanks=bool(types) and "string" not in types)):
        key = yield from until(scan, scan.form.key[1])
        listed = key == ITEM and (not types or "array" in types)
        yield from _row(scan, schema, root, depth + 1, key, listed)
        yield from scan.expect(end)
    else:
        text = yield from whole(scan, (end,))
        hollow = not text.strip() and "string" not in types and types & {"array", "object"}
        scan.say(("[]" if "array" in types else "{}") if hollow else value(text, types))
    yield from until(scan, scan.form.key[1])


def _begins(scan: Scan, blanks: bool = True) -> Generator[None, None, bool]:
    """Step over the start of an element's tag, if one comes. ``blanks``: skip blanks before it."""
    opening, closing = scan.form.key[0], scan.form.value[1]
    if blanks:
        yield from scan.peek()
    if (yield from scan.stands(closing)) or not (yield from scan.stands(opening)):
        return False
    scan.at += len(opening)
    return True
