"""The tools of a request as a reader of calls needs them: their names, and which kinds of value a parameter takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

DEPTH = 16  # references and alternatives that are followed

# Types that JSON Schema does not know, as people write them all the same.
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

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def order(self, name: str) -> list[str]:
        """The names of the tool's parameters, as far as its schema lists them."""
        return list(self._properties(name))

    def kinds(self, name: str, parameter: str) -> frozenset[str]:
        """The types of JSON that the parameter takes; empty if its schema does not tell."""
        root = self._parameters.get(name)
        rest = root.get("additionalProperties") if isinstance(root, dict) else None
        return kinds(self._properties(name).get(parameter, rest), root)

    def lacks(self, name: str, parameter: str) -> bool:
        """Whether the tool's schema lists parameters, and not this one."""
        listed = self._properties(name)
        return bool(listed) and parameter not in listed

    def schema(self, name: str) -> Any:
        """The schema of the tool's arguments, None if there is none."""
        return self._parameters.get(name)

    def _properties(self, name: str) -> dict[str, Any]:
        schema = self._parameters.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return properties if isinstance(properties, dict) else {}


def kind(value: Any) -> str:
    """The type of a JSON value, "integer" for whole numbers."""
    return KINDS.get(type(value), "null")


def kinds(schema: Any, root: Any) -> frozenset[str]:
    """The types of JSON that a schema, a part of ``root``, allows; empty if it does not tell."""
    return frozenset(_kinds(schema, root, 0))


def _kinds(schema: Any, root: Any, depth: int) -> Iterator[str]:
    if not isinstance(schema, dict) or depth > DEPTH:
        return
    said = schema.get("type")
    if said is not None:
        for each in said if isinstance(said, list) else [said]:
            if isinstance(each, str):
                yield SYNONYMS.get(each.lower(), each)
    elif isinstance(schema.get("enum"), list):
        yield from map(kind, schema["enum"])
    elif "const" in schema:
        yield kind(schema["const"])
    elif isinstance(schema.get("$ref"), str):
        yield from _kinds(follow(schema["$ref"], root), root, depth + 1)
    else:
        for key in ("anyOf", "oneOf", "allOf"):
            for each in schema[key] if isinstance(schema.get(key), list) else ():
                yield from _kinds(each, root, depth + 1)


def part(schema: Any, root: Any, key: str | None, depth: int = 0) -> Any:
    """The schema of an object's member, or with ``key`` None of a list's items; None if this one does not tell."""
    if not isinstance(schema, dict) or depth > DEPTH:
        return None
    if isinstance(schema.get("$ref"), str):
        return part(follow(schema["$ref"], root), root, key, depth + 1)
    properties = schema.get("properties")
    if key is None:
        found = schema.get("items")
    elif isinstance(properties, dict) and key in properties:
        found = properties[key]
    else:
        found = schema.get("additionalProperties")
    if isinstance(found, dict):
        return found
    others = (
        each for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list) for each in schema[name]
    )
    return next((found for each in others if (found := part(each, root, key, depth + 1)) is not None), None)


def follow(reference: str, root: Any) -> Any:
    """What a reference within the schema points to; None if it points elsewhere."""
    start, *path = reference.split("/")
    if start != "#":
        return None
    for step in path:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root
