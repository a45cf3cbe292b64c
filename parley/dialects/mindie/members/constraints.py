"""MindIE's reading of ``response_format``, with its own refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parley.dialects.fields import MAX_DEPTH, Fields, is_shallow
from parley.dialects.output_constraints import ANY_OBJECT_SCHEMA
from parley.errors import BadRequest
from parley.types import Grammar

FORMAT_MEMBER = "response_format"
SCHEMA_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")


def read_mindie_format(body: Fields) -> Grammar | None:
    """Return the grammar of the answer, or None for plain text. Raises BadRequest."""
    format_object = body.raw_value(FORMAT_MEMBER)
    if format_object is None:
        return None
    if not isinstance(format_object, dict):
        raise _format_error(body, " must be an object")
    kind = format_object.get("type")
    if kind is None:
        raise _format_error(body, " must contain 'type' field")
    if not isinstance(kind, str):
        raise _format_error(body, ".type must be a string")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise _format_error(body, f".type must be 'json_object', 'json_schema' or 'text', got '{kind[:60]}'")
    schema = _read_schema(body, format_object.get("json_schema")) if kind == "json_schema" else ANY_OBJECT_SCHEMA
    return Grammar("json", schema, field=FORMAT_MEMBER)


def _read_schema(body: Fields, schema_object: Any) -> dict[str, Any]:
    """Return the schema in a ``json_schema`` object. Raises BadRequest."""
    if schema_object is None:
        raise _format_error(body, ".json_schema is required when type is 'json_schema'")
    if not isinstance(schema_object, dict):
        raise _format_error(body, ".json_schema must be an object")
    name, schema = schema_object.get("name"), schema_object.get("schema")
    if name is None:
        raise _format_error(body, ".json_schema.name is required")
    if not isinstance(name, str):
        raise _format_error(body, ".json_schema.name must be a string")
    if not 1 <= len(name) <= 64:
        raise _format_error(body, ".json_schema.name must be 1-64 characters")
    if schema is None:
        raise _format_error(body, ".json_schema.schema is required when type is 'json_schema'")
    if not isinstance(schema, dict) or not is_shallow(schema, MAX_DEPTH):
        raise _format_error(body, ".json_schema.schema must be an object")
    for fault in _schema_faults(schema, "schema"):
        raise body.member_error(FORMAT_MEMBER, f"Invalid json_schema: {fault}")
    return schema


def _schema_faults(schema: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the faults in a schema, from the outside in. Its depth was checked before."""
    kind, properties, items = schema.get("type"), schema.get("properties"), schema.get("items")
    required = schema.get("required")
    if kind is not None and not isinstance(kind, str):
        yield f"'type' at '{path}' must be a string"
    elif kind is not None and kind not in SCHEMA_TYPES:
        yield f"unsupported type '{kind[:60]}' at '{path}'"
    if properties is not None and not isinstance(properties, dict):
        yield f"'properties' at '{path}' must be an object"
    elif properties is not None:
        for name, inner in properties.items():
            if isinstance(inner, dict):
                yield from _schema_faults(inner, f"{path}.properties.{name[:60]}")
    if items is not None and not isinstance(items, dict):
        yield f"'items' at '{path}' must be an object"
    elif items is not None:
        yield from _schema_faults(items, f"{path}.items")
    if required is not None and not isinstance(required, list):
        yield f"'required' at '{path}' must be an array"
    elif required is not None and not all(isinstance(name, str) for name in required):
        yield f"elements of 'required' at '{path}' must be strings"


def _format_error(body: Fields, message_end: str) -> BadRequest:
    return body.member_error(FORMAT_MEMBER, f"Parameter response_format{message_end}")
