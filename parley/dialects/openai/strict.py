"""The schemas that OpenAI's API accepts where ``strict`` is true, for answers and for arguments of functions.

In short: every object is closed and all its members are required, each subschema states its type, and only some of JSON
Schema's keywords are permitted. A refusal names the position of the fault. Other schemas are used as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parley.errors import Invalid, excerpt

REFUSED = (
    "allOf", "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies",
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties",
    "unevaluatedItems", "prefixItems", "contains", "minContains", "maxContains", "uniqueItems",
)  # fmt: skip
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
TELLING = ("type", "enum", "const", "anyOf", "$ref")  # every subschema needs one of them to state its type

Where = tuple[str, ...]


def check(schema: Any, subject: str, field: str, code: str | None = None) -> None:
    """Raise Invalid for a schema that strict mode does not accept. ``subject``: its owner, for the message."""
    fault = next(_root(schema), None)
    if fault is not None:
        where, told = fault
        context = "(" + ", ".join(f"'{name[:60]}'" for name in where) + ("," if len(where) == 1 else "") + ")"
        raise Invalid(f"Invalid schema for {subject}: In context={context}, {told}", field=field, code=code)


def _root(schema: Any) -> Iterator[tuple[Where, str]]:
    if not isinstance(schema, dict) or schema.get("type") != "object":
        kind = schema.get("type") if isinstance(schema, dict) else None
        told = "none" if kind is None else f"'type: {excerpt(kind)}'"
        yield (), f"""schema must be a JSON Schema of 'type: "object"', got {told}."""
        return
    if "anyOf" in schema:
        yield (), "'anyOf' is not permitted at the root."
    yield from _faults(schema, ())


def _faults(schema: Any, where: Where) -> Iterator[tuple[Where, str]]:
    """Yield the faults of a subschema, outermost first. The nesting depth is already limited."""
    if not isinstance(schema, dict):
        yield where, "schema must be an object."
        return
    for keyword in REFUSED:
        if keyword in schema:
            yield where, f"'{keyword}' is not permitted."
    if not any(keyword in schema for keyword in TELLING):
        yield where, "schema must have a 'type' key."
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "object" in kinds or "properties" in schema:
        yield from _object(schema, where)
    if "array" in kinds:
        if "items" not in schema:
            yield where, "array schema missing items."
        else:
            yield from _faults(schema["items"], (*where, "items"))
    form = schema.get("format")
    if form is not None and form not in FORMATS:
        yield where, f"'format' {excerpt(form)} is not permitted; {', '.join(FORMATS)} are."
    options = schema.get("anyOf", [])
    for number, option in enumerate(options if isinstance(options, list) else []):
        yield from _faults(option, (*where, "anyOf", str(number)))
    for keyword in ("$defs", "definitions"):
        parts = schema.get(keyword, {})
        for name, part in parts.items() if isinstance(parts, dict) else ():
            yield from _faults(part, (*where, keyword, name))


def _object(schema: dict[str, Any], where: Where) -> Iterator[tuple[Where, str]]:
    if schema.get("additionalProperties") is not False:
        yield where, "'additionalProperties' is required to be supplied and to be false."
    members, listed = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(members, dict):
        yield where, "'properties' must be an object."
        return
    required = {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()
    missing = [name for name in members if name not in required]
    if missing:
        told = "'required' is required to be supplied and to be an array including every key in properties."
        yield where, f"{told} Missing '{missing[0][:60]}'."
    unknown = sorted(required - members.keys())
    if unknown:
        yield where, f"'required' has {excerpt(unknown[0])}, which is not in 'properties'."
    for name, member in members.items():
        yield from _faults(member, (*where, "properties", name))
