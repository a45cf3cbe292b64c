"""Go's values in a template: their kinds, truth, members, order, and the text that they are written as.

A text, a boolean, a number and nil are Python's; a slice is a list, a map a dict, and a struct a ``GoStruct``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from parley.dialects.ollama.go_encoding import encode_go

NO_VALUE = "<no value>"  # nil, where an action writes it
MAX_DEPTH = 20
LARGE_EXPONENT = 6  # the least exponent that is written


class TemplateFault(Exception):
    """A step of a template that cannot be taken, with Go's words about it."""


@dataclass(frozen=True, slots=True)
class GoStruct:
    """A struct with named members. ``json_names``: the members that its JSON form has."""

    type_name: str
    members: Mapping[str, Any]
    json_names: Mapping[str, str] = field(default_factory=dict)


def kind_of(value: Any) -> str:
    """Return the name of a value's type."""
    match value:
        case None:
            return "nil"
        case bool():
            return "bool"
        case int():
            return "int"
        case float():
            return "float64"
        case str():
            return "string"
        case list():
            return "slice"
        case dict():
            return "map[string]interface {}"
    return str(value.type_name)


def is_true(value: Any) -> bool:
    """Return whether a value counts as true: one that is not empty and not zero."""
    return True if isinstance(value, GoStruct) else bool(value)


def read_member(value: Any, name: str) -> Any:
    """Return a member of a value; of a map, nil if it has none of this name. Raises TemplateFault."""
    match value:
        case dict():
            return value.get(name)
        case GoStruct(members=members) if name in members:
            return members[name]
        case None:
            raise TemplateFault(f"nil pointer evaluating interface {{}}.{name}")
    raise TemplateFault(f"can't evaluate field {name} in type {kind_of(value)}")


def write_value(value: Any, depth: int = 0) -> str:
    """Return a value as Go's ``%v`` writes it. Raises TemplateFault."""
    if depth > MAX_DEPTH:
        raise TemplateFault("the value is nested too deeply")
    match value:
        case None:
            return "<nil>"
        case bool():
            return "true" if value else "false"
        case float():
            return write_float(value)
        case list():
            return f"[{' '.join(write_value(item, depth + 1) for item in value)}]"
        case dict():
            return f"map[{' '.join(f'{key}:{write_value(value[key], depth + 1)}' for key in sorted(value))}]"
        case GoStruct(members=members):
            return f"{{{' '.join(write_value(member, depth + 1) for member in members.values())}}}"
    return str(value)


def write_float(number: float) -> str:
    """Return a number in the shortest form that reads as the same number, as Go's ``%v`` has it."""
    if number != number or number in (float("inf"), float("-inf")):
        return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}[str(number)]
    mantissa, _, exponent = f"{Decimal(repr(number)).normalize():e}".partition("e")
    if -5 < int(exponent) < LARGE_EXPONENT:
        return f"{Decimal(repr(number)).normalize():f}"
    return f"{mantissa}e{exponent[0]}{exponent[1:]:0>2}"


def write_json(value: Any) -> str:
    """Return a value in JSON, as Go's encoder writes it: the members of maps by name."""
    return encode_go(_json_value(value)).decode()


def _json_value(value: Any) -> Any:
    match value:
        case dict():
            return {key: _json_value(value[key]) for key in sorted(value)}
        case list():
            return [_json_value(item) for item in value]
        case GoStruct(members=members, json_names=names):
            return {names[name]: _json_value(member) for name, member in members.items() if name in names}
    return value


def are_equal(first: Any, second: Any) -> bool:
    """Return whether two values are equal. Raises TemplateFault if they cannot be compared."""
    for value in (first, second):
        if isinstance(value, list | dict):
            raise TemplateFault(f"non-comparable type {kind_of(value)}")
    if first is None or second is None:
        return first is second
    _check_comparable(first, second)
    return bool(first == second)


def is_less(first: Any, second: Any) -> bool:
    """Return whether a value comes before another. Raises TemplateFault if they have no order."""
    for value in (first, second):
        if kind_of(value) not in ("int", "float64", "string"):
            raise TemplateFault("invalid type for comparison")
    _check_comparable(first, second)
    return bool(first < second)


def _check_comparable(first: Any, second: Any) -> None:
    if kind_of(first) != kind_of(second):
        raise TemplateFault("incompatible types for comparison")
