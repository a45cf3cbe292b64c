"""Tools as OpenAI's API describes them: those that the model sees and may or must call, and its calls.

Read here for all APIs that have this form: ``tools`` and ``tool_choice``, and their deprecated counterparts
``functions`` and ``function_call``. Knows nothing of how a model writes a call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from parley.dialects.fields import Fields
from parley.dialects.openai import shared, strict
from parley.dialects.openai.shared import ReadingRules
from parley.errors import Unsupported, excerpt
from parley.types import ToolCallDelta

MAX_TOOLS = 128
ToolObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolMembers:
    """The tool members of a request, as in ``Chat``. ``legacy``: its tools came as ``functions``."""

    tools: list[ToolObject] = field(default_factory=list)
    choice: Literal["auto", "none", "required"] = "auto"
    only: str | None = None
    allowed: list[str] = field(default_factory=list)
    parallel: bool = True
    legacy: bool = False


def read_tools(body: Fields, rules: ReadingRules) -> ToolMembers:
    """Read the tool members of a body. Raises BadRequest."""
    tools = _distinct_tools([(each, _read_tool(each, rules)) for each in body.objects("tools", cap=MAX_TOOLS)])
    functions = _distinct_tools(
        [(each, _read_function(each, rules)) for each in body.objects("functions", cap=MAX_TOOLS)]
    )
    choice = _read_tool_choice(body, tools)
    function_choice = _read_function_choice(body, functions)
    parallel = body.boolean("parallel_tool_calls", True)
    if tools and functions:
        raise body.member_error("functions", "cannot be used together with 'tools', which replaces it.")
    tool_members = (
        ToolMembers(functions, *function_choice, parallel=False, legacy=True)
        if functions
        else ToolMembers(tools, *choice, parallel=parallel)
    )
    if tool_members.choice == "none" and not rules.shows_unused_tools:
        return ToolMembers(legacy=tool_members.legacy)
    return tool_members


def extend_calls(calls: list[dict[str, Any]], piece: ToolCallDelta) -> None:
    """Add a piece of a call to the calls of an answer in one piece."""
    while len(calls) <= piece.index:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[piece.index]
    call["id"] = piece.id or call["id"]
    call["function"]["name"] = piece.name or call["function"]["name"]
    call["function"]["arguments"] += piece.arguments


def _read_tool(tool: Fields, rules: ReadingRules) -> ToolObject:
    kind = tool.string("type", None, allowed=("function", "custom"))
    if kind is None:
        raise tool.missing_member("type")
    if kind == "custom":
        raise _custom_tool_error(tool)
    function = tool.object("function")
    if function is None:
        raise tool.missing_member("function")
    return _read_function(function, rules)


def _read_function(function: Fields, rules: ReadingRules) -> ToolObject:
    name = shared.read_identifier(function)
    signature: dict[str, Any] = {"name": name}
    description = function.string("description", None)
    if description is not None:
        signature["description"] = description
    parameters = function.free_object("parameters") or {"type": "object", "properties": {}}
    if parameters.get("type", "object") != "object":
        actual = excerpt(parameters["type"])
        raise function.member_error(
            "parameters", f"the schema of arguments must be of type 'object', but it is of {actual}."
        )
    signature["parameters"] = parameters
    if function.boolean("strict", False):
        signature["strict"] = True
        if rules.strict_schemas and function.has_value("parameters"):
            schema_path = function.member_path("parameters")
            strict.check_strict_schema(parameters, f"function '{name}'", schema_path, "invalid_function_parameters")
    return {"type": "function", "function": signature}


def _distinct_tools(tools: list[tuple[Fields, ToolObject]]) -> list[ToolObject]:
    """Return the tools. Raises BadRequest if two have the same name."""
    names: set[str] = set()
    for fields, tool in tools:
        name = tool["function"]["name"]
        if name in names:
            raise (fields.object("function") or fields).member_error(
                "name", f"another tool is called '{name}' already."
            )
        names.add(name)
    return [tool for _, tool in tools]


ToolChoice = tuple[Literal["auto", "none", "required"], str | None, list[str]]


def _read_tool_choice(body: Fields, tools: list[ToolObject]) -> ToolChoice:
    """Return ``choice``, ``only`` and ``allowed`` from ``tool_choice``."""
    value = body.raw_value("tool_choice")
    choice_object = None if value is None or isinstance(value, str) else body.object("tool_choice")
    if choice_object is None:
        choice = body.string("tool_choice", "auto", allowed=("none", "auto", "required"))
        if choice == "required" and not tools:
            raise body.member_error("tool_choice", "only allowed when tools are given.")
        return choice, None, []  # type: ignore[return-value]  # one of the allowed values
    kind = choice_object.string("type", None, allowed=("function", "allowed_tools", "custom"))
    if kind is None:
        raise choice_object.missing_member("type")
    if kind == "custom":
        raise _custom_tool_error(choice_object)
    if not tools:
        raise body.member_error("tool_choice", "only allowed when tools are given.")
    if kind == "function":
        return "required", _chosen_tool(choice_object, tools), []
    return _read_allowed_tools(choice_object, tools)


def _read_allowed_tools(choice_object: Fields, tools: list[ToolObject]) -> ToolChoice:
    """Read ``allowed_tools``: a subset of the tools; the model must or may call one of them."""
    inner = choice_object.object("allowed_tools")
    if inner is None:
        raise choice_object.missing_member("allowed_tools")
    mode = inner.string("mode", None, allowed=("auto", "required"))
    if mode is None:
        raise inner.missing_member("mode")
    names = []
    for tool in inner.objects("tools", cap=MAX_TOOLS):
        if tool.string("type", "function", allowed=("function", "custom")) == "custom":
            raise _custom_tool_error(tool)
        names.append(_chosen_tool(tool, tools))
    if not names:
        raise inner.empty_member("tools", "array") if inner.has_value("tools") else inner.missing_member("tools")
    return mode, None, names  # type: ignore[return-value]  # one of the allowed values


def _read_function_choice(body: Fields, functions: list[ToolObject]) -> ToolChoice:
    """Return the same from ``function_call``, which has no "required"."""
    value = body.raw_value("function_call")
    choice_object = None if value is None or isinstance(value, str) else body.object("function_call")
    if choice_object is None:
        choice = body.string("function_call", "auto", allowed=("none", "auto"))
        return choice, None, []  # type: ignore[return-value]  # one of the allowed values
    if not functions:
        raise body.member_error("function_call", "only allowed when functions are given.")
    return "required", _known_name(choice_object, functions), []


def _chosen_tool(choice_object: Fields, tools: list[ToolObject]) -> str:
    function = choice_object.object("function")
    if function is None:
        raise choice_object.missing_member("function")
    return _known_name(function, tools)


def _known_name(function: Fields, tools: list[ToolObject]) -> str:
    """Return the name of one of the tools. Raises BadRequest if there is no such tool."""
    name = function.string("name", None, cap=256)
    if name is None:
        raise function.missing_member("name")
    if all(tool["function"]["name"] != name for tool in tools):
        raise function.member_error("name", f"none of the tools is called {excerpt(name)}.")
    return name


def _custom_tool_error(tool: Fields) -> Unsupported:
    return Unsupported(
        "Tools of type 'custom' are not available on this server.",
        field=tool.member_path("type"),
        code="unsupported_value",
    )
