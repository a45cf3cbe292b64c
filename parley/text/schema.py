"""JSON schemas made ready for llguidance: what would only annotate is left out, what cannot be enforced is refused.

llguidance itself refuses most keywords that it does not enforce, but not by the meaning of their values: formats that
it does not know and ``"uniqueItems": false`` ask for nothing, and pass here. Knows JSON schemas and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

DEPTH = 64  # levels of nesting; llguidance reads 128 levels of JSON, and puts the schema into more of it

LENGTH = 2**31 - 1  # characters: llguidance reads no larger maxLength, and nobody writes so many

MEMBERS = 1000  # properties of one object: what llguidance takes for them grows with their square

# Keywords whose value is a schema, a list of them, or an object of them. What stands elsewhere is plain JSON.
ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
       "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")

NOTES = frozenset({"$comment", "$schema", "default", "deprecated", "description", "examples", "title"})

FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid",
})  # fmt: skip
"""What llguidance enforces of ``format``."""

Schema = dict[str, Any]


def too_deep(value: Any, limit: int = DEPTH) -> bool:
    """Whether JSON is nested deeper than that. Does not recurse."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def too_wide(value: Any, limit: int = MEMBERS) -> bool:
    """Whether an object in the JSON has more properties than that."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            named = each.get("properties")
            if isinstance(named, dict) and len(named) > limit:
                return True
            left += each.values()
        elif isinstance(each, list):
            left += each
    return False


def ready(schema: Schema, closed: bool) -> Schema:
    """A copy of the schema for llguidance. ``closed``: objects have only the members that are named, as far as one
    schema alone speaks of an object; where several do, each would forbid the members of the others.

    The schema must not be ``too_deep``.
    """
    shared = set(_shared(schema, True)) if closed else set()

    def copy(node: Schema, path: str, alone: bool) -> Schema:
        made = {key: value for key, value in node.items() if key not in NOTES}
        if node.get("uniqueItems") is False:
            del made["uniqueItems"]
        if isinstance(longest := node.get("maxLength"), int) and longest > LENGTH:
            del made["maxLength"]
        if isinstance(node.get("format"), str) and node["format"] not in FORMATS:
            del made["format"]
        alone = alone and path not in shared
        for key, at, inner, single in _inside(node, alone):
            value = copy(inner, f"{path}/{key}" if at is None else f"{path}/{key}/{_escaped(at)}", single)
            if at is None:
                made[key] = value
            else:
                if made[key] is node[key]:
                    made[key] = node[key].copy()
                made[key][at] = value
        if closed and alone and "properties" in node and not _joins(node):
            made.setdefault("additionalProperties", False)
        return made

    return copy(schema, "#", True)


def _inside(node: Schema, alone: bool) -> Iterator[tuple[str, str | int | None, Schema, bool]]:
    """The schemas directly inside of one: keyword, place under it, schema, and whether it alone speaks of a value."""
    for key in ONE:
        if isinstance(inner := node.get(key), dict):
            yield key, None, inner, True
    for key in LISTS:
        if isinstance(listed := node.get(key), list):
            single = alone and not _joins(node) if key in ("allOf", "anyOf", "oneOf") else True
            yield from ((key, at, each, single) for at, each in enumerate(listed) if isinstance(each, dict))
    for key in MAPS:
        if isinstance(named := node.get(key), dict):
            yield from ((key, name, each, True) for name, each in named.items() if isinstance(each, dict))


def _joins(node: Schema) -> bool:
    """Whether several schemas speak of its value, for it has members as well as parts, or several parts."""
    several = isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1
    return several or ("properties" in node and any(key in node for key in ("$ref", "allOf", "anyOf", "oneOf")))


def _shared(node: Schema, alone: bool) -> Iterator[str]:
    """The references that are joined with something else."""
    if isinstance(node.get("$ref"), str) and (_joins(node) or not alone):
        yield node["$ref"]
    for _, _, inner, single in _inside(node, alone):
        yield from _shared(inner, single)


def _escaped(name: str | int) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")
