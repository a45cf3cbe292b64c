"""Prepare JSON schemas for llguidance: drop annotations, and refuse keywords that cannot be enforced.

llguidance itself refuses most keywords that it does not enforce. This module walks through nested schemas; the keywords
of a single schema are the business of ``schema_keywords``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.grammar.schemas.closed_objects import ObjectCloser
from parley.text.grammar.schemas.schema_keywords import Schema, has_control_constants, rewrite_keywords
from parley.text.grammar.schemas.subschemas import (
    SCHEMA_MAP_KEYWORDS,
    all_subschemas,
    direct_subschemas,
    extend_pointer,
)

MAX_SCHEMA_DEPTH = 64  # levels of nesting; llguidance reads 128 levels of JSON, and wraps the schema in some of its own

MAX_PROPERTIES = 1000  # properties of one object: llguidance's cost grows with their square

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
            for container in level
            if isinstance(container, dict | list)
            for inner in (container.values() if isinstance(container, dict) else container)
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
            properties = node.get("properties")
            if isinstance(properties, dict) and len(properties) > limit:
                return True
            unvisited += node.values()
        elif isinstance(node, list):
            unvisited += node
    return False


def prepare_for_llguidance(schema: Schema) -> Schema:
    """Return a copy of the schema for llguidance, with closed objects. The schema must not be ``too_deep``.

    Raises GrammarRefused.
    """
    closer = ObjectCloser(schema)

    def copy_subschema(node: Schema, pointer: str) -> Schema | bool:
        node = closer.close(node, pointer)
        rewritten = rewrite_keywords(node, schema)
        if isinstance(rewritten, bool):
            return rewritten
        for key, inner_key, subschema in direct_subschemas(rewritten):
            value = copy_subschema(subschema, extend_pointer(pointer, key, inner_key))
            if inner_key is None:
                rewritten[key] = value
            else:
                if rewritten[key] is node.get(key):
                    rewritten[key] = rewritten[key].copy()
                rewritten[key][inner_key] = value
        return rewritten

    prepared = copy_subschema(schema, "#")
    if isinstance(prepared, bool):
        raise GrammarRefused("no text can match it")
    return prepared


def allowed_escapes(schema: Schema) -> str:
    """Return the letters that may follow a backslash in JSON of this schema. Raises GrammarRefused."""
    parts = list(all_subschemas(schema))
    if not any(map(has_control_constants, parts)):
        return JSON_ESCAPES
    if any({"patternProperties", "properties", "required"} & part.keys() and part.get("additionalProperties", True)
           is not False for part in parts):  # fmt: skip
        raise GrammarRefused(OPEN_WITH_CONTROLS)
    return JSON_ESCAPES + "u"


def reroot_references(value: Any, root: str) -> Any:
    """Rewrite the references of a schema to its own parts so that they hold where it stands below ``root``."""
    if isinstance(value, list):
        return [reroot_references(element, root) for element in value]
    if not isinstance(value, dict):
        return value
    rewritten: dict[str, Any] = {}
    for key, member in value.items():
        if key in SCHEMA_MAP_KEYWORDS and isinstance(member, dict):
            rewritten[key] = {name: reroot_references(inner, root) for name, inner in member.items()}
        else:
            rewritten[key] = member if key in CONSTANT_KEYWORDS else reroot_references(member, root)
    reference = rewritten.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        rewritten["$ref"] = root + reference[1:]
    return rewritten


def list_references(schema: Schema) -> Iterator[str]:
    """Yield every reference in a schema, at any depth."""
    return (subschema["$ref"] for subschema in all_subschemas(schema) if isinstance(subschema.get("$ref"), str))
