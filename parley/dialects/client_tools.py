"""Tools that an API defines and its clients run, for models that were not trained on them.

A request names such a tool by its type alone, because the original's models know its schema. Other models need a
function with a description and a schema, which the packages of the APIs write from these parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

JsonSchema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ClientTool:
    """One tool as a function. ``name``: the model's name for it."""

    name: str
    description: str
    input_schema: JsonSchema

    def signature(self, note: str = "") -> dict[str, Any]:
        """Return the function that the model sees. ``note``: what the request adds to its description."""
        return {"name": self.name, "description": self.description + note, "parameters": self.input_schema}


def text_schema(description: str) -> JsonSchema:
    """Return the schema of a text."""
    return {"type": "string", "description": description}


def number_schema(description: str, least: int = 0) -> JsonSchema:
    """Return the schema of an integer."""
    return {"type": "integer", "minimum": least, "description": description}


def object_schema(properties: dict[str, JsonSchema], required: list[str]) -> JsonSchema:
    """Return the schema of an object."""
    return {"type": "object", "properties": properties, "required": required}


def closed_schema(properties: dict[str, JsonSchema], required: list[str]) -> JsonSchema:
    """Return the schema of an object without other members."""
    return object_schema(properties, required) | {"additionalProperties": False}
