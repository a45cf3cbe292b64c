"""The tools of a request as a reader of calls needs them: their names, and which kinds of value a parameter takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Tools:
    """``tools`` in the form of OpenAI's chat API: {"type": "function", "function": {"name", "parameters", …}}."""

    def __init__(self, tools: Sequence[dict[str, Any]] = ()):
        self.parameters: dict[str, Any] = {}
        for tool in tools:
            function = tool.get("function")
            function = function if isinstance(function, dict) else tool
            if isinstance(function.get("name"), str):
                self.parameters[function["name"]] = function.get("parameters")

    def __contains__(self, name: str) -> bool:
        return name in self.parameters
