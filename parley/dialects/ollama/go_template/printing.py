"""Go's ``printf``: verbs with flags, width and precision."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from parley.dialects.ollama.go_template.constants import SURROGATES
from parley.dialects.ollama.go_template.values import kind_of, write_float, write_value

VERB = re.compile(r"%(?P<flags>[-+# 0]*)(?P<width>\d*)(?:\.(?P<precision>\d*))?(?P<verb>.)?", re.DOTALL)
MAX_WIDTH = 256
INTEGER_VERBS = {"d": "d", "x": "x", "X": "X", "o": "o", "b": "b"}
FLOAT_VERBS = "eEfFgG"


def print_values(values: Sequence[Any]) -> str:
    """Return values one after the other, with a blank between two that are not texts."""
    pieces: list[str] = []
    for index, value in enumerate(values):
        if index and not isinstance(value, str) and not isinstance(values[index - 1], str):
            pieces.append(" ")
        pieces.append(write_value(value))
    return "".join(pieces)


def print_go_values(values: Sequence[Any]) -> str:
    """Return values with blanks between them, and a line break."""
    return " ".join(write_value(value) for value in values) + "\n"


def print_formatted(form: str, values: Sequence[Any]) -> str:
    """Return a text with values in the places of its verbs. As in Go, a verb that does not fit becomes a note."""
    remaining = list(values)
    text = VERB.sub(lambda match: _fill_verb(match, remaining), form)
    if not remaining:
        return text
    extra = ", ".join(f"{kind_of(value)}={write_value(value)}" for value in remaining)
    return f"{text}%!(EXTRA {extra})"


def _fill_verb(match: re.Match[str], remaining: list[Any]) -> str:
    verb, flags = match["verb"], match["flags"]
    if verb == "%":
        return "%"
    if verb is None:
        return "%!(NOVERB)"
    width = int(match["width"] or 0)
    precision = int(match["precision"] or 0) if match["precision"] is not None else None
    if width > MAX_WIDTH or (precision or 0) > MAX_WIDTH:
        return "%!(BADWIDTH)"
    if not remaining:
        return f"%!{verb}(MISSING)"
    value = remaining.pop(0)
    text = _write_verb(verb, flags, precision, value)
    if text is None:
        return _unfit(verb, value)
    return _pad_text(text, flags, width, numeric=isinstance(value, int | float))


def _unfit(verb: str, value: Any) -> str:
    return f"%!{verb}(<nil>)" if value is None else f"%!{verb}({kind_of(value)}={write_value(value)})"


def _write_verb(verb: str, flags: str, precision: int | None, value: Any) -> str | None:
    """Return a value as a verb writes it, None if the verb does not fit."""
    sign = "+" if "+" in flags else " " if " " in flags else ""
    match value:
        case _ if verb == "v":
            return write_value(value)
        case _ if verb == "T":
            return "<nil>" if value is None else kind_of(value)
        case bool():
            return write_value(value) if verb == "t" else None
        case int() if verb in INTEGER_VERBS:
            return f"{value:{sign}{INTEGER_VERBS[verb]}}"
        case int() if verb == "c":
            return chr(value) if 0 <= value < 0x110000 and value not in SURROGATES else "\ufffd"
        case float() if verb in FLOAT_VERBS:
            digits = 6 if precision is None else precision
            return write_float(value) if verb == "g" and precision is None else f"{value:{sign}.{digits}{verb}}"
        case str() if verb == "s":
            return value if precision is None else value[:precision]
        case str() if verb == "q":
            return json.dumps(value, ensure_ascii=False)
        case str() if verb in "xX":
            code = value.encode(errors="replace").hex()
            return code.upper() if verb == "X" else code
        case list():
            items = (_write_verb(verb, flags, precision, item) or _unfit(verb, item) for item in value)
            return f"[{' '.join(items)}]"
    return None


def _pad_text(text: str, flags: str, width: int, numeric: bool) -> str:
    if "-" in flags:
        return text.ljust(width)
    return text.zfill(width) if "0" in flags and numeric else text.rjust(width)
