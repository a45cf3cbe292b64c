"""The schemas that OpenAI's API accepts where ``strict`` is true, for answers and for arguments of functions.

In short: every object is closed and all its members are required, each subschema states its type, and only some of JSON
Schema's keywords are permitted. A refusal names the position of the fault. Other schemas are used as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parley.errors import InvalidValue, excerpt

REFUSED_KEYWORDS = (
    "allOf", "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties",
    "unevaluatedItems", "prefixItems", "contains", "minContains", "maxContains", "uniqueItems",
)  # fmt: skip
STRICT_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
TYPING_KEYWORDS = ("type", "enum", "const", "anyOf", "$ref")  # every subschema needs one of them to state its type

SchemaPath = tuple[str, ...]


def check_strict_schema(schema: Any, subject: str, field: str, code: str | None = None) -> None:
    """Raise InvalidValue for a schema that strict mode does not accept. ``subject``: its owner, for the message."""
    fault = next(_root_faults(schema), None)
    if fault is not None:
        path, sentence = fault
        context = "(" + ", ".join(f"'{name[:60]}'" for name in path) + ("," if len(path) == 1 else "") + ")"
        raise InvalidValue(f"Invalid schema for {subject}: In context={context}, {sentence}", field=field, code=code)


def _root_faults(schema: Any) -> Iterator[tuple[SchemaPath, str]]:
    if not isinstance(schema, dict) or schema.get("type") != "object":
        kind = schema.get("type") if isinstance(schema, dict) else None
        actual = "none" if kind is None else f"'type: {excerpt(kind)}'"
        yield (), f"""schema must be a JSON Schema of 'type: "object"', got {actual}."""
        return
    if "anyOf" in schema:
        yield (), "'anyOf' is not permitted at the root."
    yield from _schema_faults(schema, ())


def _schema_faults(schema: Any, path: SchemaPath) -> Iterator[tuple[SchemaPath, str]]:
    """Yield the faults of a subschema, outermost first. The nesting depth is already limited."""
    if not isinstance(schema, dict):
        yield path, "schema must be an object."
        return
    for keyword in REFUSED_KEYWORDS:
        if keyword in schema:
            yield path, f"'{keyword}' is not permitted."
    if not any(keyword in schema for keyword in TYPING_KEYWORDS):
        yield path, "schema must have a 'type' key."
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    if "object" in types or "properties" in schema:
        yield from _object_faults(schema, path)
    if "array" in types:
        if "items" not in schema:
            yield path, "array schema missing items."
        else:
            yield from _schema_faults(schema["items"], (*path, "items"))
    string_format = schema.get("format")
    if string_format is not None and string_format not in STRICT_FORMATS:
        yield path, f"'format' {excerpt(string_format)} is not permitted; {', '.join(STRICT_FORMATS)} are."
    options = schema.get("anyOf", [])
    for number, option in enumerate(options if isinstance(options, list) else []):
        yield from _schema_faults(option, (*path, "anyOf", str(number)))
    for keyword in ("$defs", "definitions"):
        parts = schema.get(keyword, {})
        for name, part in parts.items() if isinstance(parts, dict) else ():
            yield from _schema_faults(part, (*path, keyword, name))


def _object_faults(schema: dict[str, Any], path: SchemaPath) -> Iterator[tuple[SchemaPath, str]]:
    if schema.get("additionalProperties") is not False:
        yield path, "'additionalProperties' is required to be supplied and to be false."
    members, required_value = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(members, dict):
        yield path, "'properties' must be an object."
        return
    required = {name for name in required_value if isinstance(name, str)} if isinstance(required_value, list) else set()
    missing_names = [name for name in members if name not in required]
    if missing_names:
        sentence = "'required' is required to be supplied and to be an array including every key in properties."
        yield path, f"{sentence} Missing '{missing_names[0][:60]}'."
    unknown = sorted(required - members.keys())
    if unknown:
        yield path, f"'required' has {excerpt(unknown[0])}, which is not in 'properties'."
    for name, member in members.items():
        yield from _schema_faults(member, (*path, "properties", name))
