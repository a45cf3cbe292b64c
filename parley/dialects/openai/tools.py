"""Tools as chat completions describe them: those that the model sees and may or must call, and its calls.

Read here for all APIs that have this form: ``tools`` and ``tool_choice``, and their deprecated counterparts
``functions`` and ``function_call``. Knows nothing of how a model writes a call.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.openai import strict_mode
from parley.dialects.openai.common_members import read_identifier
from parley.dialects.openai.custom_tools import CUSTOM_INPUT, CustomCallDelta, custom_parameters
from parley.dialects.openai.reading_rules import ReadingRules
from parley.errors import Unsupported, excerpt
from parley.types import ToolCallDelta

MAX_TOOLS = 128
ToolObject = dict[str, Any]
ToolKind = Literal["function", "custom"]
TOOL_KINDS: tuple[ToolKind, ...] = ("function", "custom")


class OpenAIToolMembers(msgspec.Struct, frozen=True):
    """The tool members of a request, as in ``ChatPrompt``.

    ``legacy``: its tools came as ``functions``. ``custom``: the names of custom tools, functions to the model.
    """

    tools: list[ToolObject] = []
    choice: Literal["auto", "none", "required"] = "auto"
    only: str | None = None
    allowed: list[str] = []
    parallel: bool = True
    legacy: bool = False
    custom: frozenset[str] = frozenset()
    schema_fields: dict[str, str] = {}


class OpenAITool(msgspec.Struct, frozen=True):
    """A tool of a body: the members that describe it, and the function that the model sees."""

    fields: Fields
    kind: ToolKind
    signature: dict[str, Any]

    @property
    def name(self) -> str:
        """The tool's name."""
        return str(self.signature["name"])

    @property
    def schema_field(self) -> str:
        """The body's member that prescribes the form of calls."""
        if self.kind == "custom":
            return self.fields.member_path("format") + ".grammar.definition"
        return self.fields.member_path("parameters")


def read_openai_tools(body: Fields, rules: ReadingRules) -> OpenAIToolMembers:
    """Read the tool members of a body. Raises BadRequest."""
    if rules.needs_tools:
        _check_tools_given(body)
    declared = _distinct_tools([_read_tool(definition, rules) for definition in body.objects("tools", cap=MAX_TOOLS)])
    functions = _distinct_tools(
        [_read_function(definition, rules) for definition in body.objects("functions", cap=MAX_TOOLS)]
    )
    choice = _read_tool_choice(body, declared, rules)
    function_choice = _read_function_choice(body, functions)
    parallel = body.boolean("parallel_tool_calls", True)
    if declared and functions:
        raise body.member_error("functions", "cannot be used together with 'tools', which replaces it.")
    tool_members = (
        OpenAIToolMembers(
            _tool_objects(functions),
            *function_choice,
            parallel=False,
            legacy=True,
            schema_fields=_schema_fields(functions),
        )
        if functions
        else OpenAIToolMembers(
            _tool_objects(declared),
            *choice,
            parallel=parallel,
            custom=_tool_names(declared, "custom"),
            schema_fields=_schema_fields(declared),
        )
    )
    if tool_members.choice == "none" and not rules.shows_unused_tools:
        return OpenAIToolMembers(legacy=tool_members.legacy)
    return tool_members


def _check_tools_given(body: Fields) -> None:
    """Refuse a list without tools, and members about tools where none are given."""
    if body.raw_value("tools") == []:
        raise body.empty_member("tools", "array")
    if not body.has_value("tools"):
        for name in body.present_names(("tool_choice", "parallel_tool_calls")):
            raise body.member_error(name, "only allowed when 'tools' are given.")


def extend_calls(calls: list[dict[str, Any]], piece: ToolCallDelta) -> None:
    """Add a piece of a call to the calls of an answer in one piece."""
    kind, text_member = call_members(piece)
    while len(calls) <= piece.index:
        calls.append({"id": "", "type": kind, kind: {"name": "", text_member: ""}})
    call = calls[piece.index]
    call["id"] = piece.id or call["id"]
    call[kind]["name"] = piece.name or call[kind]["name"]
    call[kind][text_member] += piece.arguments


def call_members(call: ToolCallDelta) -> tuple[ToolKind, str]:
    """Return the type of a call, which is also the member that describes it, and the member with its text."""
    return ("custom", CUSTOM_INPUT) if isinstance(call, CustomCallDelta) else ("function", "arguments")


def _read_tool(tool: Fields, rules: ReadingRules) -> OpenAITool:
    kind = _read_kind(tool, rules)
    if kind is None:
        raise tool.missing_member("type")
    inner = tool.object(kind)
    if inner is None:
        raise tool.missing_member(kind)
    return _read_custom_tool(inner) if kind == "custom" else _read_function(inner, rules)


def _read_kind(tool: Fields, rules: ReadingRules, default: ToolKind | None = None) -> ToolKind | None:
    """Return the type of a tool. Raises BadRequest."""
    kind = tool.string("type", default, allowed=TOOL_KINDS)
    if kind == "custom" and not rules.custom_tools:
        raise _custom_tool_error(tool)
    return kind  # type: ignore[return-value]  # one of the allowed values


def _signature_start(tool: Fields, name: str) -> dict[str, Any]:
    description = tool.string("description", None)
    return {"name": name} if description is None else {"name": name, "description": description}


def _read_custom_tool(custom: Fields) -> OpenAITool:
    signature = _signature_start(custom, read_identifier(custom))
    signature |= {"parameters": custom_parameters(custom.object("format"), nested=True), "strict": True}
    return OpenAITool(custom, "custom", signature)


def _read_function(function: Fields, rules: ReadingRules) -> OpenAITool:
    name = read_identifier(function)
    signature = _signature_start(function, name)
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
            strict_mode.check_strict_schema(
                parameters, f"function '{name}'", schema_path, "invalid_function_parameters"
            )
    return OpenAITool(function, "function", signature)


def _distinct_tools(tools: list[OpenAITool]) -> list[OpenAITool]:
    """Return the tools. Raises BadRequest if two have the same name."""
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise tool.fields.member_error("name", f"another tool is called '{tool.name}' already.")
        names.add(tool.name)
    return tools


def _tool_objects(tools: list[OpenAITool]) -> list[ToolObject]:
    """Return the tools as the model sees them."""
    return [{"type": "function", "function": tool.signature} for tool in tools]


def _schema_fields(tools: list[OpenAITool]) -> dict[str, str]:
    return {tool.name: tool.schema_field for tool in tools}


def _tool_names(tools: list[OpenAITool], kind: ToolKind) -> frozenset[str]:
    return frozenset(tool.name for tool in tools if tool.kind == kind)


ToolChoice = tuple[Literal["auto", "none", "required"], str | None, list[str]]


def _read_tool_choice(body: Fields, tools: list[OpenAITool], rules: ReadingRules) -> ToolChoice:
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
    if kind == "custom" and not rules.custom_tools:
        raise _custom_tool_error(choice_object)
    if not tools:
        raise body.member_error("tool_choice", "only allowed when tools are given.")
    if kind == "allowed_tools":
        return _read_allowed_tools(choice_object, tools, rules)
    return "required", _chosen_tool(choice_object, tools, kind), []  # type: ignore[arg-type]  # one of the two kinds


def _read_allowed_tools(choice_object: Fields, tools: list[OpenAITool], rules: ReadingRules) -> ToolChoice:
    """Read ``allowed_tools``: a subset of the tools; the model must or may call one of them."""
    inner = choice_object.object("allowed_tools")
    if inner is None:
        raise choice_object.missing_member("allowed_tools")
    mode = inner.string("mode", None, allowed=("auto", "required"))
    if mode is None:
        raise inner.missing_member("mode")
    names = [
        _chosen_tool(tool, tools, _read_kind(tool, rules, "function") or "function")
        for tool in inner.objects("tools", cap=MAX_TOOLS)
    ]
    if not names:
        raise inner.empty_member("tools", "array") if inner.has_value("tools") else inner.missing_member("tools")
    return mode, None, names  # type: ignore[return-value]  # one of the allowed values


def _read_function_choice(body: Fields, functions: list[OpenAITool]) -> ToolChoice:
    """Return the same from ``function_call``, which has no "required"."""
    value = body.raw_value("function_call")
    choice_object = None if value is None or isinstance(value, str) else body.object("function_call")
    if choice_object is None:
        choice = body.string("function_call", "auto", allowed=("none", "auto"))
        return choice, None, []  # type: ignore[return-value]  # one of the allowed values
    if not functions:
        raise body.member_error("function_call", "only allowed when functions are given.")
    return "required", _known_name(choice_object, _tool_names(functions, "function")), []


def _chosen_tool(choice_object: Fields, tools: list[OpenAITool], kind: ToolKind) -> str:
    inner = choice_object.object(kind)
    if inner is None:
        raise choice_object.missing_member(kind)
    return _known_name(inner, _tool_names(tools, kind))


def _known_name(tool_choice: Fields, names: frozenset[str]) -> str:
    """Return the name of a chosen tool. Raises BadRequest if it is not one of these names."""
    name = tool_choice.string("name", None, cap=256)
    if name is None:
        raise tool_choice.missing_member("name")
    if name not in names:
        raise tool_choice.member_error("name", f"none of the tools of this type is called {excerpt(name)}.")
    return name


def _custom_tool_error(tool: Fields) -> Unsupported:
    return Unsupported(
        "Tools of type 'custom' are not available on this server.",
        field=tool.member_path("type"),
        code="unsupported_value",
    )
