"""Reads calls in Python or similar notation: ``name(key=value, …)``, ``name{key:value,…}``. Converts to JSON."""

from __future__ import annotations

import json

from parley.text.parsing.calls.literals import read_bare_word, read_literal, scalar_to_json
from parley.text.parsing.calls.objects import read_call_name
from parley.text.parsing.calls.scanner import CallScanner, MalformedCall, ReadSteps


def read_python_call(scan: CallScanner) -> ReadSteps:
    """Read ``name(key=value, …)``. A value without a name belongs to the parameter at its position in the schema."""
    name, _ = yield from read_call_name(scan)
    if scan.form.after_name:
        yield from scan.expect_mark(scan.form.after_name[0])
    yield from scan.expect_mark("(")
    name = name.removesuffix(".call")
    scan.announce_call(name)
    yield from _read_python_arguments(scan, name, "=", ")", "")


def read_loose_call(scan: CallScanner) -> ReadSteps:
    """Read ``name{key:value,…}`` with strings between the form's quote marks."""
    name, _ = yield from read_call_name(scan)
    yield from scan.expect_mark("{")
    scan.announce_call(name)
    yield from _read_python_arguments(scan, name, ":", "}", scan.form.quote_mark)


def _read_python_arguments(scan: CallScanner, name: str, assign: str, closing: str, quote: str) -> ReadSteps:
    """Read arguments up to ``closing``. ``assign``: the character between a name and its value."""
    order = scan.tools.parameter_names(name)
    count = 0
    while (yield from scan.peek_character()) != closing:
        word = None
        if scan.text[scan.position].isalpha() or scan.text[scan.position] == "_":
            word = yield from read_bare_word(scan, False)
        is_named = word is not None and (yield from scan.peek_character()) == assign
        key = word if is_named else order[count] if count < len(order) else None
        if key is None:
            scan.add_arguments(word or "")
            raise MalformedCall
        scan.add_arguments(("{" if not count else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        count += 1
        if is_named:
            scan.position += 1
            yield from read_literal(scan, quote)
        elif word is not None:
            scan.add_arguments(scalar_to_json(word))
        else:
            yield from read_literal(scan, quote)
        if (yield from scan.peek_character()) == ",":
            scan.position += 1
        elif scan.text[scan.position] != closing:
            raise MalformedCall
    scan.position += 1
    scan.add_arguments("}" if count else "{}")
