"""Prepare JSON schemas for llguidance: drop annotations, and refuse keywords that cannot be enforced.

llguidance itself refuses most keywords that it does not enforce. This module walks through nested schemas; the keywords
of a single schema are the business of ``schema_keywords``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parley.text.grammar.refused import GrammarRefused
from parley.text.grammar.schema_keywords import Schema, has_control_constants, rewrite_keywords

MAX_SCHEMA_DEPTH = 64  # levels of nesting; llguidance reads 128 levels of JSON, and wraps the schema in some of its own

MAX_PROPERTIES = 1000  # properties of one object: llguidance's cost grows with their square

# Keywords whose value is a schema, a list of schemas, or an object of schemas. All other values are plain JSON.
SCHEMA_KEYWORDS = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
SCHEMA_LIST_KEYWORDS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
SCHEMA_MAP_KEYWORDS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")

CONSTANT_KEYWORDS = ("enum", "const")  # keywords whose values are not schemas

JSON_ESCAPES = 'nrbtf\\"'  # allowed in JSON; \\u would let a property that is already present appear again
OPEN_WITH_CONTROLS = (
    "a constant in it contains a control character, and objects in it may have members that are not named"
)


def too_deep(value: Any, limit: int = MAX_SCHEMA_DEPTH) -> bool:
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


def too_wide(value: Any, limit: int = MAX_PROPERTIES) -> bool:
    """Whether any object in the JSON has more than ``limit`` properties."""
    unvisited = [value]
    while unvisited:
        node = unvisited.pop()
        if isinstance(node, dict):
            named = node.get("properties")
            if isinstance(named, dict) and len(named) > limit:
                return True
            unvisited += node.values()
        elif isinstance(node, list):
            unvisited += node
    return False


def prepare_for_llguidance(schema: Schema, closed: bool) -> Schema:
    """Return a copy of the schema for llguidance.

    ``closed``: objects allow only the members that are named, but only where a single schema describes the object;
    where several do, each would forbid the members of the others. The schema must not be ``too_deep``. Raises
    GrammarRefused.
    """
    combined = set(_combined_references(schema, True)) if closed else set()

    def copy_subschema(node: Schema, path: str, alone: bool) -> Schema | bool:
        rewritten = rewrite_keywords(node, schema)
        if isinstance(rewritten, bool):
            return rewritten
        alone = alone and path not in combined
        for key, place, subschema, subschema_alone in _direct_subschemas(rewritten, alone):
            value = copy_subschema(
                subschema,
                f"{path}/{key}" if place is None else f"{path}/{key}/{_escape_pointer(place)}",
                subschema_alone,
            )
            if place is None:
                rewritten[key] = value
            else:
                if rewritten[key] is node.get(key):
                    rewritten[key] = rewritten[key].copy()
                rewritten[key][place] = value
        if closed and alone and "properties" in node and not _combines_schemas(node):
            rewritten.setdefault("additionalProperties", False)
        return rewritten

    prepared = copy_subschema(schema, "#", True)
    if isinstance(prepared, bool):
        raise GrammarRefused("no text can match it")
    return prepared


def allowed_escapes(schema: Schema) -> str:
    """Return the letters that may follow a backslash in JSON of this schema. Raises GrammarRefused."""
    parts = list(_all_subschemas(schema))
    if not any(map(has_control_constants, parts)):
        return JSON_ESCAPES
    if any({"patternProperties", "properties", "required"} & part.keys() and part.get("additionalProperties", True)
           is not False for part in parts):  # fmt: skip
        raise GrammarRefused(OPEN_WITH_CONTROLS)
    return JSON_ESCAPES + "u"


def reroot_references(value: Any, root: str) -> Any:
    """Rewrite the references of a schema to its own parts so that they hold where it stands below ``root``."""
    if isinstance(value, list):
        return [reroot_references(each, root) for each in value]
    if not isinstance(value, dict):
        return value
    rewritten: dict[str, Any] = {}
    for key, each in value.items():
        if key in SCHEMA_MAP_KEYWORDS and isinstance(each, dict):
            rewritten[key] = {name: reroot_references(inner, root) for name, inner in each.items()}
        else:
            rewritten[key] = each if key in CONSTANT_KEYWORDS else reroot_references(each, root)
    reference = rewritten.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        rewritten["$ref"] = root + reference[1:]
    return rewritten


def list_references(schema: Schema) -> Iterator[str]:
    """Yield every reference in a schema, at any depth."""
    return (each["$ref"] for each in _all_subschemas(schema) if isinstance(each.get("$ref"), str))


def _all_subschemas(schema: Schema) -> Iterator[Schema]:
    """Yield a schema and all schemas inside it."""
    unvisited = [schema]
    while unvisited:
        node = unvisited.pop()
        yield node
        unvisited += (inner for _, _, inner, _ in _direct_subschemas(node, True))


def _direct_subschemas(node: Schema, alone: bool) -> Iterator[tuple[str, str | int | None, Schema, bool]]:
    """Yield the direct subschemas: keyword, key or index under it, subschema, whether it alone describes its value."""
    for key in SCHEMA_KEYWORDS:
        if isinstance(inner := node.get(key), dict):
            yield key, None, inner, True
    for key in SCHEMA_LIST_KEYWORDS:
        if isinstance(listed := node.get(key), list):
            single = alone and not _combines_schemas(node) if key in ("allOf", "anyOf", "oneOf") else True
            yield from ((key, at, each, single) for at, each in enumerate(listed) if isinstance(each, dict))
    for key in SCHEMA_MAP_KEYWORDS:
        if isinstance(named := node.get(key), dict):
            yield from ((key, name, each, True) for name, each in named.items() if isinstance(each, dict))


def _combines_schemas(node: Schema) -> bool:
    """Whether several schemas describe its value: properties next to a combining keyword, or allOf of several."""
    several = isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1
    return several or ("properties" in node and any(key in node for key in ("$ref", "allOf", "anyOf", "oneOf")))


def _combined_references(node: Schema, alone: bool) -> Iterator[str]:
    """Yield the references that are combined with another schema."""
    if isinstance(node.get("$ref"), str) and (_combines_schemas(node) or not alone):
        yield node["$ref"]
    for _, _, inner, single in _direct_subschemas(node, alone):
        yield from _combined_references(inner, single)


def _escape_pointer(name: str | int) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")
