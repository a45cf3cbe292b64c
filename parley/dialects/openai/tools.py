"""Tools as OpenAI's API describes them: those that the model sees and may or must call, and its calls.

Read here for all APIs that have this form: ``tools`` and ``tool_choice``, and their deprecated counterparts
``functions`` and ``function_call``. Knows nothing of how a model writes a call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from parley.dialects.fields import Fields
from parley.dialects.openai import shared, strict
from parley.dialects.openai.shared import Rules
from parley.errors import Unsupported, excerpt
from parley.types import CallDelta

MAX_TOOLS = 128
Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wish:
    """The tool members of a request, as in ``Chat``. ``legacy``: its tools came as ``functions``."""

    tools: list[Tool] = field(default_factory=list)
    choice: Literal["auto", "none", "required"] = "auto"
    only: str | None = None
    allowed: list[str] = field(default_factory=list)
    parallel: bool = True
    legacy: bool = False


def read(body: Fields, rules: Rules) -> Wish:
    """Read the tool members of a body. Raises BadRequest."""
    tools = _distinct([(each, _tool(each, rules)) for each in body.objects("tools", cap=MAX_TOOLS)])
    functions = _distinct([(each, _wrapped(each, rules)) for each in body.objects("functions", cap=MAX_TOOLS)])
    choice = _choice(body, tools)
    old = _old_choice(body, functions)
    parallel = body.boolean("parallel_tool_calls", True)
    if tools and functions:
        raise body.fail("functions", "cannot be used together with 'tools', which replaces it.")
    wish = Wish(functions, *old, parallel=False, legacy=True) if functions else Wish(tools, *choice, parallel=parallel)
    if wish.choice == "none" and not rules.shown:
        return Wish(legacy=wish.legacy)
    return wish


def extend(calls: list[dict[str, Any]], piece: CallDelta) -> None:
    """Add a piece of a call to the calls of an answer in one piece."""
    while len(calls) <= piece.index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[piece.index]
    call["id"] = piece.id or call["id"]
    call["function"]["name"] = piece.name or call["function"]["name"]
    call["function"]["arguments"] += piece.arguments


def _tool(tool: Fields, rules: Rules) -> Tool:
    kind = tool.string("type", None, allowed=("function", "custom"))
    if kind is None:
        raise tool.missing("type")
    if kind == "custom":
        raise _custom(tool)
    function = tool.object("function")
    if function is None:
        raise tool.missing("function")
    return _wrapped(function, rules)


def _wrapped(function: Fields, rules: Rules) -> Tool:
    name = shared.name(function)
    signature: dict[str, Any] = {"name": name}
    description = function.string("description", None)
    if description is not None:
        signature["description"] = description
    parameters = function.free("parameters") or {"type": "object", "properties": {}}
    if parameters.get("type", "object") != "object":
        told = excerpt(parameters["type"])
        raise function.fail("parameters", f"the schema of arguments must be of type 'object', but it is of {told}.")
    signature["parameters"] = parameters
    if function.boolean("strict", False):
        signature["strict"] = True
        if rules.schemas and function.has("parameters"):
            where = function.path("parameters")
            strict.check(parameters, f"function '{name}'", where, "invalid_function_parameters")
    return {"type": "function", "function": signature}


def _distinct(read: list[tuple[Fields, Tool]]) -> list[Tool]:
    """Return the tools. Raises BadRequest if two have the same name."""
    names: set[str] = set()
    for given, tool in read:
        name = tool["function"]["name"]
        if name in names:
            raise (given.object("function") or given).fail("name", f"another tool is called '{name}' already.")
        names.add(name)
    return [tool for _, tool in read]


Choice = tuple[Literal["auto", "none", "required"], str | None, list[str]]


def _choice(body: Fields, tools: list[Tool]) -> Choice:
    """Return ``choice``, ``only`` and ``allowed`` from ``tool_choice``."""
    value = body.raw("tool_choice")
    wish = None if value is None or isinstance(value, str) else body.object("tool_choice")
    if wish is None:
        choice = body.string("tool_choice", "auto", allowed=("none", "auto", "required"))
        if choice == "required" and not tools:
            raise body.fail("tool_choice", "only allowed when tools are given.")
        return choice, None, []  # type: ignore[return-value]  # one of the allowed values
    kind = wish.string("type", None, allowed=("function", "allowed_tools", "custom"))
    if kind is None:
        raise wish.missing("type")
    if kind == "custom":
        raise _custom(wish)
    if not tools:
        raise body.fail("tool_choice", "only allowed when tools are given.")
    if kind == "function":
        return "required", _named(wish, tools), []
    return _allowed(wish, tools)


def _allowed(wish: Fields, tools: list[Tool]) -> Choice:
    """Read ``allowed_tools``: a subset of the tools; the model must or may call one of them."""
    inner = wish.object("allowed_tools")
    if inner is None:
        raise wish.missing("allowed_tools")
    mode = inner.string("mode", None, allowed=("auto", "required"))
    if mode is None:
        raise inner.missing("mode")
    names = []
    for tool in inner.objects("tools", cap=MAX_TOOLS):
        if tool.string("type", "function", allowed=("function", "custom")) == "custom":
            raise _custom(tool)
        names.append(_named(tool, tools))
    if not names:
        raise inner.empty("tools", "array") if inner.has("tools") else inner.missing("tools")
    return mode, None, names  # type: ignore[return-value]  # one of the allowed values


def _old_choice(body: Fields, functions: list[Tool]) -> Choice:
    """Return the same from ``function_call``, which has no "required"."""
    value = body.raw("function_call")
    wish = None if value is None or isinstance(value, str) else body.object("function_call")
    if wish is None:
        choice = body.string("function_call", "auto", allowed=("none", "auto"))
        return choice, None, []  # type: ignore[return-value]  # one of the allowed values
    if not functions:
        raise body.fail("function_call", "only allowed when functions are given.")
    return "required", _known(wish, functions), []


def _named(wish: Fields, tools: list[Tool]) -> str:
    function = wish.object("function")
    if function is None:
        raise wish.missing("function")
    return _known(function, tools)


def _known(function: Fields, tools: list[Tool]) -> str:
    """Return the name of one of the tools. Raises BadRequest if there is no such tool."""
    name = function.string("name", None, cap=256)
    if name is None:
        raise function.missing("name")
    if all(tool["function"]["name"] != name for tool in tools):
        raise function.fail("name", f"none of the tools is called {excerpt(name)}.")
    return name


def _custom(tool: Fields) -> Unsupported:
    return Unsupported(
        "Tools of type 'custom' are not available on this server.", field=tool.path("type"), code="unsupported_value"
    )
