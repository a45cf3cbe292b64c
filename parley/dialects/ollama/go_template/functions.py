"""The functions that templates may call: Go's own, as far as they make sense in a prompt, and those of Ollama.

``and`` and ``or`` are executed elsewhere, because they do not evaluate all of their arguments.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

from parley.dialects.ollama.go_template import printing
from parley.dialects.ollama.go_template.values import (
    TemplateFault,
    are_equal,
    is_less,
    is_true,
    kind_of,
    write_json,
)

SHORT_CIRCUITS = ("and", "or")


def compare_any(first: Any, *others: Any) -> bool:
    """Return whether a value equals one of the others."""
    if not others:
        raise TemplateFault("missing argument for comparison")
    return any(are_equal(first, other) for other in others)


def go_length(value: Any) -> int:
    """Return the number of items of a slice or map, or the bytes of a text."""
    if isinstance(value, str):
        return len(value.encode(errors="replace"))
    if not isinstance(value, list | dict):
        raise TemplateFault(f"len of type {kind_of(value)}")
    return len(value)


def take_item(value: Any, *positions: Any) -> Any:
    """Return an item of a slice or map, a byte of a text, or an item of that item."""
    for position in positions:
        if isinstance(value, dict):
            if not isinstance(position, str):
                raise TemplateFault(f"value has type {kind_of(position)}; should be string")
            value = value.get(position)
            continue
        items = _items_of(value, "index")
        value = items[_check_position(position, len(items) - 1)]
    return value


def cut_slice(value: Any, *bounds: Any) -> Any:
    """Return a part of a slice, or of a text by its bytes."""
    if len(bounds) > 2:
        raise TemplateFault("cannot 3-index slice a string" if isinstance(value, str) else "too many slice indexes")
    items = _items_of(value, "slice")
    low, high = (*(_check_position(bound, len(items)) for bound in bounds), *(0, len(items))[len(bounds) :])
    if low > high:
        raise TemplateFault(f"invalid slice index: {low} > {high}")
    part = items[low:high]
    return part.decode(errors="replace") if isinstance(part, bytes) else list(part)


def _items_of(value: Any, verb: str) -> Sequence[Any]:
    if isinstance(value, str):
        return value.encode(errors="replace")
    if not isinstance(value, list):
        raise TemplateFault(f"can't {verb} item of type {kind_of(value)}")
    return value


def _check_position(position: Any, last: int) -> int:
    if isinstance(position, bool) or not isinstance(position, int):
        raise TemplateFault(f"cannot index slice/array with type {kind_of(position)}")
    if not 0 <= position <= last:
        raise TemplateFault(f"index out of range: {position}")
    return position


def format_text(form: Any, *values: Any) -> str:
    """Return a text with values in the places of its verbs."""
    if not isinstance(form, str):
        raise TemplateFault(f"wrong type for value; expected string; got {kind_of(form)}")
    return printing.print_formatted(form, values)


def date_of_today(*_forms: Any) -> str:
    """Return today's date. As in Ollama, a format has no effect."""
    return datetime.date.today().isoformat()


def date_of_yesterday(*_forms: Any) -> str:
    """Return yesterday's date."""
    return (datetime.date.today() - datetime.timedelta(days=1)).isoformat()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "not": lambda value: not is_true(value),
    "eq": compare_any,
    "ne": lambda first, second: not are_equal(first, second),
    "lt": is_less,
    "le": lambda first, second: is_less(first, second) or are_equal(first, second),
    "gt": lambda first, second: is_less(second, first),
    "ge": lambda first, second: is_less(second, first) or are_equal(first, second),
    "len": go_length,
    "index": take_item,
    "slice": cut_slice,
    "print": lambda *values: printing.print_values(values),
    "println": lambda *values: printing.print_go_values(values),
    "printf": format_text,
    "json": write_json,
    "currentDate": date_of_today,
    "yesterdayDate": date_of_yesterday,
    "toTypeScriptType": lambda _value: "any",
}
FUNCTION_NAMES = frozenset((*FUNCTIONS, *SHORT_CIRCUITS))
