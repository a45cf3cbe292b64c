"""The errors that a route may answer with, and schemas of them, made from examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from parley.dialects.dialect import Dialect
from parley.dialects.route import Route, RouteKind
from parley.errors import (
    EngineError,
    Forbidden,
    InvalidValue,
    MalformedBody,
    MissingField,
    NotFound,
    NotReady,
    Overloaded,
    ParleyError,
    TimeLimitPassed,
    TooLarge,
    Unauthorized,
    UnknownModel,
    UnknownRecord,
    Unsupported,
    WrongType,
)

Json = dict[str, Any]

# An error of each kind that a request may end with.
BODY_ERRORS: tuple[ParleyError, ...] = (
    MalformedBody("m"),
    MissingField("m", field="f"),
    WrongType("m", field="f"),
    InvalidValue("m", field="f"),
    Unsupported("m", field="f"),
    TooLarge("m"),
)
QUERY_ERRORS: tuple[ParleyError, ...] = (InvalidValue("m", field="f"),)
MISSING_ERRORS: tuple[ParleyError, ...] = (NotFound("m"), UnknownModel("m"), UnknownRecord("m"))
KEY_ERRORS: tuple[ParleyError, ...] = (Unauthorized("m"), Forbidden("m"))
ENGINE_ERRORS: tuple[ParleyError, ...] = (Overloaded("m"), EngineError("m"), TimeLimitPassed("m", limit="client"))
SAMPLE_ERRORS = (*BODY_ERRORS, *MISSING_ERRORS, *KEY_ERRORS, *ENGINE_ERRORS, NotReady("m"))
ENGINE_KINDS: frozenset[RouteKind] = frozenset({"generate", "embed", "tokenize", "detokenize", "render"})
LOOKUP_KINDS: frozenset[RouteKind] = frozenset({"info", "summed_info", "stored", "endpoint", "tokenizer", "model"})
OPEN_KINDS: frozenset[RouteKind] = frozenset({"health", "live", "ready", "probe"})


def expected_errors(route: Route, path: str, reads_body: bool) -> list[ParleyError]:
    """Return errors of the kinds that a route may answer with."""
    errors: list[ParleyError] = []
    if reads_body:
        errors += BODY_ERRORS
    if route.query:
        errors += QUERY_ERRORS
    if "{" in path or route.model_reader is not None or route.kind in LOOKUP_KINDS:
        errors += MISSING_ERRORS
    if route.kind not in OPEN_KINDS:
        errors += KEY_ERRORS
    if route.kind in ENGINE_KINDS:
        errors += ENGINE_ERRORS
    if route.kind == "pull":
        errors.append(EngineError("m"))
    if route.kind in ENGINE_KINDS or route.kind in OPEN_KINDS:
        errors.append(NotReady("m"))
    return errors


def error_statuses(dialect: Dialect, errors: Sequence[ParleyError]) -> list[str]:
    """Return the statuses of an API's answers to these errors."""
    return list(dict.fromkeys(str(dialect.render_error(error).status) for error in errors))


def schema_of_example(content_type: str, body: bytes) -> Json:
    """Return a schema of bodies that have the types and members of this one."""
    if content_type != "application/json":
        return {"type": "string"}
    return _schema_of_value(msgspec.json.decode(body))


def _schema_of_value(value: Any) -> Json:
    """Return a schema of values that have the types and members of this one."""
    match value:
        case dict():
            properties = {name: _schema_of_value(member) for name, member in value.items()}
            return {"type": "object", "properties": properties, "required": list(value)}
        case list():
            return {"type": "array", "items": _schema_of_value(value[0]) if value else {}}
        case bool():
            return {"type": "boolean"}
        case int() | float():
            return {"type": "number"}
        case str():
            return {"type": "string"}
    return {}


def merge_schemas(first: Json, second: Json) -> Json:
    """Return a schema that the values of both schemas of examples satisfy."""
    if first == second:
        return first
    if not (first.get("type") == second.get("type") == "object"):
        return {}
    defaults = second["properties"] | first["properties"]
    merged = {
        name: merge_schemas(first["properties"].get(name, default), second["properties"].get(name, default))
        for name, default in defaults.items()
    }
    return {
        "type": "object",
        "properties": merged,
        "required": [name for name in first["required"] if name in second["required"]],
    }
