"""A request's tools, as far as a reader of calls needs them: their names, and the types of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Type names that are not in JSON Schema but occur in schemas.
SYNONYMS = {
    "str": "string", "text": "string", "int": "integer", "int32": "integer", "int64": "integer", "long": "integer",
    "uint": "integer", "float": "number", "float32": "number", "float64": "number", "double": "number",
    "decimal": "number", "bool": "boolean", "list": "array", "tuple": "array", "dict": "object", "map": "object",
}  # fmt: skip

KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class Tools:
    """``tools`` in the form of OpenAI's chat API: {"type": "function", "function": {"name", "parameters", …}}."""

    def __init__(self, tools: Sequence[dict[str, Any]] = ()):
        self._parameters: dict[str, Any] = {}
        for tool in tools:
            function = tool.get("function")
            function = function if isinstance(function, dict) else tool
            if isinstance(function.get("name"), str):
                self._parameters[function["name"]] = function.get("parameters")

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def order(self, name: str) -> list[str]:
        """Return the names of the tool's parameters, in the order of its schema."""
        return list(self._properties(name))

    def kinds(self, name: str, parameter: str) -> frozenset[str]:
        """Return the JSON types that the parameter takes; empty if the schema does not say."""
        root = self._parameters.get(name)
        rest = root.get("additionalProperties") if isinstance(root, dict) else None
        return kinds(self._properties(name).get(parameter, rest), root)

    def lacks(self, name: str, parameter: str) -> bool:
        """Whether the tool's schema lists parameters, but not this one."""
        listed = self._properties(name)
        return bool(listed) and parameter not in listed

    def schema(self, name: str) -> Any:
        """Return the schema of the tool's arguments, or None if there is none."""
        return self._parameters.get(name)

    def _properties(self, name: str) -> dict[str, Any]:
        schema = self._parameters.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return properties if isinstance(properties, dict) else {}


def kind(value: Any) -> str:
    """Return the type of a JSON value, "integer" for whole numbers."""
    return KINDS.get(type(value), "null")


def kinds(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types that a schema, a part of ``root``, allows; empty if it does not say."""
    return frozenset(name for each in _parts(schema, root, _said) for name in _said(each))


def _said(schema: dict[str, Any]) -> list[str]:
    """Return the types that a schema names itself."""
    said = schema.get("type")
    if said is not None:
        names = said if isinstance(said, list) else [said]
        return [SYNONYMS.get(each.lower(), each) for each in names if isinstance(each, str)]
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    return list(map(kind, values))


def part(schema: Any, root: Any, key: str | None) -> Any:
    """Return the schema of an object's member, or of a list's items if ``key`` is None; None if there is none."""

    def own(each: dict[str, Any]) -> Any:
        properties = each.get("properties")
        if key is None:
            found = each.get("items")
        elif isinstance(properties, dict) and key in properties:
            found = properties[key]
        else:
            found = each.get("additionalProperties")
        return found if isinstance(found, dict) else None

    return next((found for each in _parts(schema, root, own) if (found := own(each)) is not None), None)


def _parts(schema: Any, root: Any, enough: Callable[[dict[str, Any]], Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema and, if it does not pass ``is_enough``, the schemas that it refers to or its alternatives.

    Each is yielded once, because schemas may refer to each other in circles.
    """
    seen, left = set[int](), [schema]
    while left:
        each = left.pop()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if enough(each):
            continue
        if isinstance(each.get("$ref"), str):
            left.append(follow(each["$ref"], root))
        else:
            names = [name for name in ("allOf", "oneOf", "anyOf") if isinstance(each.get(name), list)]
            left += (other for name in names for other in reversed(each[name]))


def follow(reference: str, root: Any) -> Any:
    """Return the target of a reference within the schema, or None if it is elsewhere."""
    start, *path = reference.split("/")
    if start != "#":
        return None
    for step in path:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root
