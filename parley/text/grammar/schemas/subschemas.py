"""Walk through the schemas inside a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator

from parley.text.grammar.schemas.schema_keywords import Schema

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


def direct_subschemas(node: Schema) -> Iterator[tuple[str, str | int | None, Schema]]:
    """Yield the direct subschemas: keyword, key or index under it, subschema."""
    for key in SCHEMA_KEYWORDS:
        if isinstance(inner := node.get(key), dict):
            yield key, None, inner
    for key in SCHEMA_LIST_KEYWORDS:
        if isinstance(subschema_list := node.get(key), list):
            yield from (
                (key, index, subschema) for index, subschema in enumerate(subschema_list) if isinstance(subschema, dict)
            )
    for key in SCHEMA_MAP_KEYWORDS:
        if isinstance(subschema_map := node.get(key), dict):
            yield from (
                (key, name, subschema) for name, subschema in subschema_map.items() if isinstance(subschema, dict)
            )


def all_subschemas(schema: Schema) -> Iterator[Schema]:
    """Yield a schema and all schemas inside it."""
    unvisited = [schema]
    while unvisited:
        node = unvisited.pop()
        yield node
        unvisited += (inner for _, _, inner in direct_subschemas(node))


def extend_pointer(pointer: str, key: str, inner_key: str | int | None) -> str:
    """Return the JSON pointer of a direct subschema; ``inner_key``: the key or index under the keyword, or None."""
    if inner_key is None:
        return f"{pointer}/{key}"
    return f"{pointer}/{key}/{str(inner_key).replace('~', '~0').replace('/', '~1')}"
