"""Close the objects of a schema: a member that the schema does not name cannot come.

JSON Schema leaves objects open, and a model that may invent members does so until its answer is cut off. Therefore
vLLM and others close them, as XGrammar's strict mode does; a schema says otherwise by ``additionalProperties`` or
``unevaluatedProperties``, or by naming no member. Where several schemas describe one object, as in ``allOf``, each
would forbid the members of the others: those are closed together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.grammar.schemas.schema_keywords import Schema
from parley.text.grammar.schemas.subschemas import all_subschemas, direct_subschemas, extend_pointer
from parley.text.parsing.calls import resolve_pointer

DEFINITIONS = ("$defs", "definitions")
NAMING_KEYWORDS = ("patternProperties", "properties", "required")
OPENING_KEYWORDS = ("additionalProperties", "propertyNames", "unevaluatedProperties")  # they say which others may come
ALTERNATIVE_KEYWORDS = ("anyOf", "oneOf")
JOINING_KEYWORDS = ("allOf", *ALTERNATIVE_KEYWORDS)  # their schemas describe the same value as the schema around them
MAX_COMBINED_MEMBERS = 20_000  # names in all schemas that this module adds


class ObjectCloser:
    """Closes the objects of one schema, part by part."""

    def __init__(self, schema: Schema):
        self._root_schema = schema
        self._combined = _find_combined(schema)
        self._added_members = 0

    def close(self, node: Schema, pointer: str) -> Schema:
        """Return the part at a JSON pointer of the schema with its objects closed. Raises GrammarRefused."""
        if pointer in self._combined or _is_malformed(node):
            return node
        if _combines_schemas(node) or node.get("$ref") in self._combined:
            closing = self._close_together(node)
            return node | {"allOf": [*node.get("allOf", ()), closing]} if closing else node
        closing = _closing_schema([node])
        if closing is None:
            return node
        properties = node.get("properties", {})
        return node | {"properties": properties | closing["properties"] | properties, "additionalProperties": False}

    def _close_together(self, node: Schema) -> Schema | None:
        closing = _closing_schema(list(_joined_parts(node, self._root_schema)))
        if closing is not None:
            self._added_members += len(closing["properties"])
            if self._added_members > MAX_COMBINED_MEMBERS:
                raise GrammarRefused(f"it combines schemas with more than {MAX_COMBINED_MEMBERS} properties in all")
        return closing


def _closing_schema(parts: list[Any]) -> Schema | None:
    """Return a schema of the members that these parts of one schema name, and no others; None if they are open."""
    names: Schema = {}
    patterns: Schema = {}
    for part in parts:
        if (
            not isinstance(part, dict)
            or _is_malformed(part)
            or any(part.get(key, False) is not False for key in OPENING_KEYWORDS)
        ):
            return None
        names |= {name: {} for name in (*part.get("properties", ()), *part.get("required", ()))}
        patterns |= {pattern: {} for pattern in part.get("patternProperties", ())}
    if not any("properties" in part or "patternProperties" in part for part in parts):
        return None
    if not patterns and any(_least_members(part) > len(names) for part in parts):
        return None
    closing = {"properties": names, "additionalProperties": False}
    return closing | {"patternProperties": patterns} if patterns else closing


def _least_members(part: Schema) -> float:
    min_members = part.get("minProperties")
    return min_members if isinstance(min_members, int | float) else 0


def _joined_parts(node: Schema, root: Schema) -> Iterator[Any]:
    """Yield a schema and all that describe the same value with it; None for a reference that leads nowhere."""
    seen, unvisited = set[int](), [node]
    while unvisited:
        part = unvisited.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                unvisited.append(resolve_pointer(part["$ref"], root))
            for key in JOINING_KEYWORDS:
                if isinstance(part.get(key), list):
                    unvisited += (subschema for subschema in part[key] if not isinstance(subschema, bool))


def _find_combined(schema: Schema) -> set[str]:
    """Return the JSON pointers of parts that describe their objects only together with other parts."""
    counts = Counter(
        (key, inner_key if key == "properties" else None)
        for part in all_subschemas(schema)
        for key, inner_key, _ in direct_subschemas(part)
    )
    combined = set[str]()
    unvisited: list[tuple[str, Schema, bool]] = [("#", schema, True)]
    while unvisited:
        pointer, node, stands_alone = unvisited.pop()
        if not stands_alone:
            if pointer in combined:
                continue
            combined.add(pointer)
        is_combined = not stands_alone or _combines_schemas(node)
        for key, inner_key, inner in direct_subschemas(node):
            unique = counts[key, inner_key if key == "properties" else None] == 1
            inner_alone = (
                key in DEFINITIONS
                or (key in JOINING_KEYWORDS and not is_combined)
                or (key not in JOINING_KEYWORDS and (unique or not is_combined) and not _overlaps_patterns(node, key))
            )
            if stands_alone or not inner_alone:
                unvisited.append((extend_pointer(pointer, key, inner_key), inner, inner_alone))
        if is_combined and isinstance(reference := node.get("$ref"), str):
            target = resolve_pointer(reference, schema)
            if isinstance(target, dict):
                unvisited.append((reference, target, False))
    return combined


def _is_malformed(node: Schema) -> bool:
    """Whether a keyword that matters here has another type than it should, which llguidance reports."""
    return (
        any(not isinstance(node.get(key, {}), dict) for key in ("patternProperties", "properties"))
        or any(not isinstance(node.get(key, []), list) for key in ("allOf", "required"))
        or any(not isinstance(name, str) for name in node.get("required", ()))
        or not isinstance(node.get("$ref", ""), str)
    )


def _combines_schemas(node: Schema) -> bool:
    """Whether several schemas describe the value: keywords about members, references, alternatives, conjunctions."""
    names_properties = any(key in node for key in (*NAMING_KEYWORDS, *OPENING_KEYWORDS))
    conjunctions = len(node["allOf"]) if isinstance(node.get("allOf"), list) else 0
    return names_properties + conjunctions + sum(key in node for key in ("$ref", *ALTERNATIVE_KEYWORDS)) > 1


def _overlaps_patterns(node: Schema, key: str) -> bool:
    """Whether two of the schemas under this keyword may describe the same member."""
    patterns = node.get("patternProperties")
    return isinstance(patterns, dict) and (
        (key == "patternProperties" and (len(patterns) > 1 or "properties" in node))
        or (key == "properties" and len(patterns) > 0)
    )
