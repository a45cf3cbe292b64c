"""A request's tools, as far as a reader of calls needs them: their names, and the types of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Type names that are not in JSON Schema but occur in schemas.
TYPE_SYNONYMS = {
    "str": "string", "text": "string", "int": "integer", "int32": "integer", "int64": "integer", "long": "integer",
    "uint": "integer", "float": "number", "float32": "number", "float64": "number", "double": "number",
    "decimal": "number", "bool": "boolean", "list": "array", "tuple": "array", "dict": "object", "map": "object",
}  # fmt: skip

JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class RequestTools:
    """``tools`` in the form of OpenAI's chat API: {"type": "function", "function": {"name", "parameters", …}}."""

    def __init__(self, tools: Sequence[dict[str, Any]] = ()):
        self._schemas: dict[str, Any] = {}
        for tool in tools:
            function = tool.get("function")
            function = function if isinstance(function, dict) else tool
            if isinstance(function.get("name"), str):
                self._schemas[function["name"]] = function.get("parameters")

    def __len__(self) -> int:
        return len(self._schemas)

    def __iter__(self) -> Iterator[str]:
        return iter(self._schemas)

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def parameter_names(self, name: str) -> list[str]:
        """Return the names of the tool's parameters, in the order of its schema."""
        return list(self._listed_parameters(name))

    def parameter_types(self, name: str, parameter: str) -> frozenset[str]:
        """Return the JSON types that the parameter takes; empty if the schema does not say."""
        root = self._schemas.get(name)
        additional = root.get("additionalProperties") if isinstance(root, dict) else None
        return schema_types(self._listed_parameters(name).get(parameter, additional), root)

    def lacks_parameter(self, name: str, parameter: str) -> bool:
        """Whether the tool's schema lists parameters, but not this one."""
        parameters = self._listed_parameters(name)
        return bool(parameters) and parameter not in parameters

    def arguments_schema(self, name: str) -> Any:
        """Return the schema of the tool's arguments, or None if there is none."""
        return self._schemas.get(name)

    def _listed_parameters(self, name: str) -> dict[str, Any]:
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return properties if isinstance(properties, dict) else {}


def json_value_type(value: Any) -> str:
    """Return the type of a JSON value, "integer" for whole numbers."""
    return JSON_TYPES.get(type(value), "null")


def schema_types(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types that a schema, a part of ``root``, allows; empty if it does not say."""
    return frozenset(
        name for alternative in _alternative_schemas(schema, root, _own_types) for name in _own_types(alternative)
    )


def _own_types(schema: dict[str, Any]) -> list[str]:
    """Return the types that a schema names itself."""
    stated_types = schema.get("type")
    if stated_types is not None:
        names = stated_types if isinstance(stated_types, list) else [stated_types]
        return [TYPE_SYNONYMS.get(name.lower(), name) for name in names if isinstance(name, str)]
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return list(map(json_value_type, values))


def member_schema(schema: Any, root: Any, key: str | None) -> Any:
    """Return the schema of an object's member, or of a list's items if ``key`` is None; None if there is none."""

    def own_member_schema(candidate: dict[str, Any]) -> Any:
        properties = candidate.get("properties")
        if key is None:
            member = candidate.get("items")
        elif isinstance(properties, dict) and key in properties:
            member = properties[key]
        else:
            member = candidate.get("additionalProperties")
        return member if isinstance(member, dict) else None

    return next(
        (
            own_schema
            for alternative in _alternative_schemas(schema, root, own_member_schema)
            if (own_schema := own_member_schema(alternative)) is not None
        ),
        None,
    )


def _alternative_schemas(
    schema: Any, root: Any, is_enough: Callable[[dict[str, Any]], Any]
) -> Iterator[dict[str, Any]]:
    """Yield a schema and, if it does not pass ``is_enough``, the schemas that it refers to or its alternatives.

    Each is yielded once, because schemas may refer to each other in circles.
    """
    seen, unvisited = set[int](), [schema]
    while unvisited:
        candidate = unvisited.pop()
        if not isinstance(candidate, dict) or id(candidate) in seen:
            continue
        seen.add(id(candidate))
        yield candidate
        if is_enough(candidate):
            continue
        if isinstance(candidate.get("$ref"), str):
            unvisited.append(resolve_pointer(candidate["$ref"], root))
        else:
            names = [name for name in ("allOf", "oneOf", "anyOf") if isinstance(candidate.get(name), list)]
            unvisited += (other for name in names for other in reversed(candidate[name]))


def resolve_pointer(reference: str, root: Any) -> Any:
    """Return the target of a reference within the schema, or None if it is elsewhere."""
    start, *path = reference.split("/")
    if start != "#":
        return None
    for step in path:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root
