"""Translate a schema's rules for a single value into parts of a Lark grammar: allowed values, length, pattern, type.

Depends on schemas, not on call formats or grammar rules.
"""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance

from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.grammar.lark import quote_lark
from parley.text.grammar.regex import to_rust_regex
from parley.text.parsing.calls import resolve_pointer, schema_types

MAX_REFERENCES = 8  # references followed
MAX_ALTERNATIVES = 4096
Schema = dict[str, Any]


def value_literal(value: Any) -> str:
    """Return a value as it is written between marks: strings as they are, other values as JSON."""
    return quote_lark(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def schema_properties(schema: Schema) -> dict[str, Any]:
    """Return the properties of a schema, or an empty dict."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def required_properties(schema: Schema) -> set[str]:
    """Return the names of the required properties."""
    required = schema.get("required")
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def count_limits(schema: Schema, measured: str) -> tuple[int | None, int | None]:
    """Return the minimum and maximum of ``measured`` ("Length", "Items"); None where there is no integer."""
    min_count, max_count = schema.get(f"min{measured}"), schema.get(f"max{measured}")
    return min_count if type(min_count) is int else None, max_count if type(max_count) is int else None


def listed_values(schema: Any) -> list[Any]:
    """Return the values of const or enum if all are scalars, otherwise an empty list."""
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    is_scalar_list = isinstance(values, list) and not any(isinstance(value, dict | list) for value in values)
    return values if is_scalar_list and isinstance(values, list) else []


def pattern_condition(schema: Schema) -> str:
    """Return the pattern as a further condition on a terminal.

    Empty if there is no pattern, or if its anchors are anywhere but at both ends of the whole pattern.
    """
    source = schema.get("pattern")
    if not isinstance(source, str):
        return ""
    try:
        translated = to_rust_regex(source, schema=True)
    except GrammarRefused:
        return ""
    begins, ends = translated.startswith("^"), translated.endswith("$") and not translated.endswith("\\$")
    inner = translated[begins : len(translated) - ends]
    outer = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "", inner)
    if re.search(r"[$^]", outer):
        return ""
    while (shorter := re.sub(r"\([^()]*\)", "", outer)) != outer:
        outer = shorter
    if (begins or ends) and "|" in outer:
        return ""
    full_pattern = f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"
    try:
        return f" & /{llguidance.regex_to_lark(full_pattern, '')}/"
    except ValueError:
        return ""


def length_quantifier(schema: Schema) -> str:
    """Return the length limits as a quantifier of a regular expression."""
    min_count, max_count = count_limits(schema, "Length")
    return (
        f"{{{min_count or 0},{max_count if max_count is not None else ''}}}"
        if min_count or max_count is not None
        else "*"
    )


def resolve_references(schema: Any, root: Schema) -> Any:
    """Follow references from a schema that is only a reference to another part of ``root``."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        schema = resolve_pointer(schema["$ref"], root)
    return schema


def narrow_to_types(schema: Any, types: list[str], root: Schema, budget: int = MAX_ALTERNATIVES) -> Schema:
    """Narrow a schema to the given types, which it must allow.

    ``budget`` limits nested alternatives, which may be recursive; beyond it, any value of these types is allowed.
    """
    schema = resolve_references(schema, root)
    if not isinstance(schema, dict) or not budget:
        return {"type": types}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            fitting = [subschema for subschema in schema[key] if schema_types(subschema, root) & set(types)]
            parts = [narrow_to_types(subschema, types, root, budget // (len(fitting) + 1)) for subschema in fitting]
            return parts[0] if len(parts) == 1 else {"anyOf": parts}
    return schema if isinstance(schema.get("type"), str) else schema | {"type": types}
