"""Prepare JSON schemas for llguidance: drop annotations, and refuse keywords that cannot be enforced.

llguidance itself refuses most keywords that it does not enforce. This module walks through nested schemas; the keywords
of a single schema are the business of ``schema_keywords``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parley.text.grammar.refused import Refused
from parley.text.grammar.schema_keywords import Schema, controlled, plain

DEPTH = 64  # levels of nesting; llguidance reads 128 levels of JSON, and wraps the schema in some of its own

MEMBERS = 1000  # properties of one object: llguidance's cost grows with their square

# Keywords whose value is a schema, a list of schemas, or an object of schemas. All other values are plain JSON.
ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
       "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")

DATA = ("enum", "const")  # keywords whose values are not schemas

ESCAPES = 'nrbtf\\"'  # allowed in JSON; \\u would let a property that is already present appear again
OPEN = "a constant in it contains a control character, and objects in it may have members that are not named"


def too_deep(value: Any, limit: int = DEPTH) -> bool:
    """Whether JSON is nested deeper than ``limit`` levels. Does not recurse."""
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
    """Whether any object in the JSON has more than ``limit`` properties."""
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
    """Return a copy of the schema for llguidance.

    ``closed``: objects allow only the members that are named, but only where a single schema describes the object;
    where several do, each would forbid the members of the others. The schema must not be ``too_deep``. Raises
    GrammarRefused.
    """
    shared = set(_shared(schema, True)) if closed else set()

    def copy(node: Schema, path: str, alone: bool) -> Schema | bool:
        made = plain(node, schema)
        if isinstance(made, bool):
            return made
        alone = alone and path not in shared
        for key, at, inner, single in _inside(made, alone):
            value = copy(inner, f"{path}/{key}" if at is None else f"{path}/{key}/{_escaped(at)}", single)
            if at is None:
                made[key] = value
            else:
                if made[key] is node.get(key):
                    made[key] = made[key].copy()
                made[key][at] = value
        if closed and alone and "properties" in node and not _joins(node):
            made.setdefault("additionalProperties", False)
        return made

    made = copy(schema, "#", True)
    if isinstance(made, bool):
        raise Refused("no text can match it")
    return made


def escapes(schema: Schema) -> str:
    """Return the letters that may follow a backslash in JSON of this schema. Raises GrammarRefused."""
    parts = list(_parts(schema))
    if not any(map(controlled, parts)):
        return ESCAPES
    if any({"patternProperties", "properties", "required"} & part.keys() and part.get("additionalProperties", True)
           is not False for part in parts):  # fmt: skip
        raise Refused(OPEN)
    return ESCAPES + "u"


def rerooted(value: Any, root: str) -> Any:
    """Rewrite the references of a schema to its own parts so that they hold where it stands below ``root``."""
    if isinstance(value, list):
        return [rerooted(each, root) for each in value]
    if not isinstance(value, dict):
        return value
    made: dict[str, Any] = {}
    for key, each in value.items():
        if key in MAPS and isinstance(each, dict):
            made[key] = {name: rerooted(inner, root) for name, inner in each.items()}
        else:
            made[key] = each if key in DATA else rerooted(each, root)
    reference = made.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        made["$ref"] = root + reference[1:]
    return made


def references(schema: Schema) -> Iterator[str]:
    """Yield every reference in a schema, at any depth."""
    return (each["$ref"] for each in _parts(schema) if isinstance(each.get("$ref"), str))


def _parts(schema: Schema) -> Iterator[Schema]:
    """Yield a schema and all schemas inside it."""
    left = [schema]
    while left:
        node = left.pop()
        yield node
        left += (inner for _, _, inner, _ in _inside(node, True))


def _inside(node: Schema, alone: bool) -> Iterator[tuple[str, str | int | None, Schema, bool]]:
    """Yield the direct subschemas: keyword, key or index under it, subschema, whether it alone describes its value."""
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
    """Whether several schemas describe its value: properties next to a combining keyword, or allOf of several."""
    several = isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1
    return several or ("properties" in node and any(key in node for key in ("$ref", "allOf", "anyOf", "oneOf")))


def _shared(node: Schema, alone: bool) -> Iterator[str]:
    """Yield the references that are combined with another schema."""
    if isinstance(node.get("$ref"), str) and (_joins(node) or not alone):
        yield node["$ref"]
    for _, _, inner, single in _inside(node, alone):
        yield from _shared(inner, single)


def _escaped(name: str | int) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")
