"""Schemas of the bodies that routes read, as ``bodies.json`` has them, and as documents show them.

``docs/openapi.py`` learns these schemas from the readers. They are true for a text model with every ability: bodies
that are valid under a schema are accepted. Members that no schema can express are allowed and listed in descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from parley.dialects.dialect import Dialect
from parley.dialects.route import Route

Json = dict[str, Any]

# The sizes of the model that the schemas were learned with. A document has the bounds of the models that are served.
LEARNED_CONTEXT, LEARNED_VOCABULARY = 33_323, 32_003
PROMPT_ROOM = 1024  # tokens
# The model's name, that of a key's owner, and the id of a file when the schemas were learned.
LEARNED_MODEL, LEARNED_OWNER, LEARNED_FILE = "m", "key-owner", "file-i"
BODIES_FILE = Path(__file__).with_name("bodies.json")
SCHEMAS = "#/components/schemas/"
MODEL_REFERENCE = {"$ref": f"{SCHEMAS}ModelName"}
NAME_SCHEMAS: Mapping[str, Json] = {
    LEARNED_MODEL: MODEL_REFERENCE,
    LEARNED_OWNER: {"type": "string", "description": "Someone who has an API key of the server."},
    LEARNED_FILE: {"type": "string", "description": "The id of a file that was uploaded for this."},
}


def output_room(context_length: int) -> int:
    """Return the largest number of tokens that may follow any prompt of ``PROMPT_ROOM`` tokens, or of half the context
    where that is less."""
    return max(context_length // 2, context_length - PROMPT_ROOM)


@cache
def body_table() -> Json:
    """Return the learned schemas: ``schemas``, and ``surfaces`` with the routes of each that read a body."""
    table: Json = msgspec.json.decode(BODIES_FILE.read_bytes())
    return table


def body_key(route: Route) -> str:
    """Return the name of a route's body among those of its API."""
    return " ".join([route.method, route.path, *route.claiming_members])


def find_bodies(route: Route, dialect: Dialect) -> list[Json]:
    """Return the descriptions of a route's bodies (``schema``, ``left_out``, ``needs`` and ``answers`` each): none if
    it reads none, and several if other routes of its API read one each."""
    table = body_table()
    by_key = table["surfaces"].get(dialect.body_schemas, {})
    keys = [body_key(body_route) for body_route in dialect.routes if body_route.path in route.body_paths] or [
        body_key(route)
    ]
    route_bodies = [by_key[key] for key in keys if key in by_key]
    return [
        known_body | {"schema": table["schemas"][known_body["schema"]]} if "schema" in known_body else known_body
        for known_body in route_bodies
    ]


def body_notes(known_body: Json) -> list[str]:
    """Return sentences about limits that the schema of a body cannot express."""
    notes = []
    if "schema" not in known_body:
        notes.append("Every request is refused: the server does not have this.")
    if needs := known_body.get("needs"):
        notes.append(f"The body is as for {needs}; other models refuse it.")
    if left_out := known_body.get("left_out"):
        names = ", ".join(f"`{path}`" for path in left_out)
        notes.append(f"Also read, if the model or other members allow it: {names}.")
    notes += [
        f"A body without `{name}` is answered at once with an empty result."
        for name in known_body.get("acknowledged", ())
    ]
    return notes


def with_served_values(value: Any, bounds: Mapping[int, int]) -> Any:
    """Return a schema with other bounds of numbers and other names: the learned bounds are the keys of ``bounds``."""
    if isinstance(value, list):
        return [with_served_values(item, bounds) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"type": "string", "enum": [str(name)]} if name in NAME_SCHEMAS:
            return NAME_SCHEMAS[name]
        case {"type": ["string", "null"], "enum": [str(name), None]} if name in NAME_SCHEMAS:
            return {"anyOf": [NAME_SCHEMAS[name], {"type": "null"}]}
        case {"const": bool(truth), **others} if not others:  # in generated clients such a constant is broken code
            return {"type": "boolean", "enum": [truth]}
        case {"const": dict() | list() as constant, **others} if not others:  # which generators of clients refuse
            return with_served_values(structure_schema(constant), bounds)
    return {
        name: bounds.get(item, item)
        if name in ("minimum", "maximum") and isinstance(item, int)
        else with_served_values(item, bounds)
        for name, item in value.items()
    }


def structure_schema(value: Any) -> Json:
    """Return a schema that only this value satisfies, without an object or an array as a constant."""
    if isinstance(value, dict):
        members = {name: structure_schema(item) for name, item in value.items()}
        return {"type": "object", "properties": members, "required": list(value), "additionalProperties": False}
    if isinstance(value, list):
        items = [structure_schema(item) for item in value]
        schema: Json = {"type": "array", "minItems": len(items), "maxItems": len(items)}
        return schema | ({"items": items[0]} if len(items) == 1 else {"prefixItems": items} if items else {})
    return {"const": value}


def with_dependencies(variant: Json) -> Json:
    """Return the schema of a body with ``dependentSchemas`` in place of conditions that hold if a member is given.

    Generators of bodies try every combination of an ``if`` with every other, which takes them forever.
    """
    other_conditions = []
    for condition in variant.pop("allOf", ()):
        name = condition["if"]["required"][0]
        if condition["if"] == {"properties": {name: {"not": {"type": "null"}}}, "required": [name]}:
            variant.setdefault("dependentSchemas", {})[name] = condition["then"]
        else:
            other_conditions.append(condition)
    return variant | ({"allOf": other_conditions} if other_conditions else {})


def with_model_name(variant: Json) -> Json:
    """Name the served models as the values of the member ``model`` of a body. Return the schema."""
    model = variant.get("properties", {}).get("model", {})
    if model.get("type") == "string" and "enum" not in model:
        variant["properties"]["model"] = MODEL_REFERENCE
    elif model.get("type") == ["string", "null"] and "enum" not in model:
        variant["properties"]["model"] = {"anyOf": [MODEL_REFERENCE, {"type": "null"}]}
    return variant
