"""Reads calls in Python or similar notation: ``name(key=value, …)``, ``name{key:value,…}``. Converts to JSON."""

from __future__ import annotations

import json

from parley.text.parsing.calls.literals import bare, literal, scalar
from parley.text.parsing.calls.objects import heading
from parley.text.parsing.calls.scanner import Garbled, Scan, Wait


def call(scan: Scan) -> Wait:
    """Read ``name(key=value, …)``. A value without a name belongs to the parameter at its place in the schema."""
    name, _ = yield from heading(scan)
    if scan.form.head:
        yield from scan.expect(scan.form.head[0])
    yield from scan.expect("(")
    name = name.removesuffix(".call")
    scan.announce(name)
    yield from _arguments(scan, name, "=", ")", "")


def loose(scan: Scan) -> Wait:
    """Read ``name{key:value,…}`` with strings between the form's quote marks."""
    name, _ = yield from heading(scan)
    yield from scan.expect("{")
    scan.announce(name)
    yield from _arguments(scan, name, ":", "}", scan.form.quote)


def _arguments(scan: Scan, name: str, assign: str, closing: str, quote: str) -> Wait:
    """Read arguments up to ``closing``. ``assign``: the character between a name and its value."""
    order = scan.tools.order(name)
    count = 0
    while (yield from scan.peek()) != closing:
        word = None
        if scan.text[scan.at].isalpha() or scan.text[scan.at] == "_":
            word = yield from bare(scan, False)
        named = word is not None and (yield from scan.peek()) == assign
        key = word if named else order[count] if count < len(order) else None
        if key is None:
            scan.say(word or "")
            raise Garbled
        scan.say(("{" if not count else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        count += 1
        if named:
            scan.at += 1
            yield from literal(scan, quote)
        elif word is not None:
            scan.say(scalar(word))
        else:
            yield from literal(scan, quote)
        if (yield from scan.peek()) == ",":
            scan.at += 1
        elif scan.text[scan.at] != closing:
            raise Garbled
    scan.at += 1
    scan.say("}" if count else "{}")
