"""The tools of a request in Anthropic's form, and the choice among them. The client runs all tools."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from typing import Any, Literal

import msgspec

from parley.dialects.anthropic.api_rules import AnthropicRules
from parley.dialects.anthropic.blocks import BlockReader
from parley.dialects.anthropic.client_tools import CLIENT_TOOLS, AnthropicClientTool, with_zoom
from parley.dialects.anthropic.refusal_wording import anthropic_value_error, check_anthropic_members
from parley.dialects.anthropic.toolsets import TOOLSETS, ToolsetMember, read_toolset
from parley.dialects.anthropic.turns import ToolChanges
from parley.dialects.fields import Fields
from parley.errors import InvalidValue, excerpt

MAX_TOOLS = 1024
NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
SEARCH_TOOL = re.compile(r"tool_?search", re.IGNORECASE)  # Claude Code's, and those that clients write themselves
TOOL_MEMBERS = {
    "type", "name", "description", "input_schema", "cache_control", "strict", "eager_input_streaming", "defer_loading",
    "input_examples", "allowed_callers",
}  # fmt: skip
DISPLAY_MEMBERS = ("display_width_px", "display_height_px", "display_number")
MAX_DISPLAY_PIXELS = 1 << 16
CLIENT_TOOL_MEMBERS = TOOL_MEMBERS - {"description", "input_schema", "eager_input_streaming"}
CHOICE_MEMBERS = {"type", "name", "disable_parallel_tool_use"}
Choice = Literal["auto", "none", "required"]
CHOICES: dict[str, Choice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
ToolObject = dict[str, Any]


class AnthropicToolMembers(msgspec.Struct, frozen=True):
    """The tool members of a request, as in ``ChatPrompt``.

    ``toolset_members``: the tools of toolsets by the model's names.
    """

    tools: list[ToolObject] = []
    choice: Choice = "auto"
    forced: str | None = None
    parallel: bool = True
    schema_fields: dict[str, str] = {}
    toolset_members: dict[str, ToolsetMember] = {}


class AnthropicTool(msgspec.Struct, frozen=True):
    """A tool of a request. ``definition``: where it is declared; ``member``: if it is one of a toolset."""

    tool: ToolObject
    definition: Fields
    is_deferred: bool
    member: ToolsetMember | None = None

    @property
    def name(self) -> str:
        """The model's name for the tool."""
        return _name_of(self.tool)


def read_anthropic_tools(body: Fields, blocks: BlockReader, changes: ToolChanges) -> AnthropicToolMembers:
    """Read the tools and the choice among them. Call it after the conversation is read. Raises BadRequest."""
    definitions = [*body.objects("tools", cap=MAX_TOOLS), *changes.definitions]
    declared = [tool for definition in definitions for tool in _read_definition(definition, blocks)]
    _check_names(declared)
    names = [tool.name for tool in declared]
    hides_deferred = bool(blocks.revealed_tools) or any(map(SEARCH_TOOL.search, names))
    shown_tools = [
        tool.tool
        for tool in declared
        if tool.name not in changes.removed
        and not (tool.is_deferred and hides_deferred and tool.name not in blocks.revealed_tools)
    ]
    members = _read_choice(body, shown_tools, names, blocks.rules)
    return msgspec.structs.replace(
        members,
        schema_fields={tool.name: tool.definition.member_path("input_schema") for tool in declared},
        toolset_members={tool.name: tool.member for tool in declared if tool.member is not None},
    )


def _read_definition(definition: Fields, blocks: BlockReader) -> Iterator[AnthropicTool]:
    """Yield the tools of an entry of ``tools``: one, or those of a toolset. Raises BadRequest."""
    kind = definition.string("type", "custom", cap=256)
    if kind not in TOOLSETS:
        yield AnthropicTool(_read_tool(definition, blocks), definition, definition.boolean("defer_loading", False))
        return
    blocks.read_cache_control(definition)
    for function, member, is_deferred in read_toolset(definition, kind, blocks.rules):
        yield AnthropicTool({"type": "function", "function": function}, definition, is_deferred, member)


def _name_of(tool: ToolObject) -> str:
    name: str = tool["function"]["name"]
    return name


def _read_tool(tool: Fields, blocks: BlockReader) -> ToolObject:
    """Return a tool in the form that chat templates read."""
    kind = tool.string("type", "custom", cap=256)
    if client_tool := CLIENT_TOOLS.get(kind):
        return _read_client_tool(tool, kind, client_tool, blocks)
    if kind != "custom":  # the original runs it
        raise anthropic_value_error(tool, "type", kind)
    check_anthropic_members(tool, TOOL_MEMBERS, blocks.rules, "custom")
    blocks.read_cache_control(tool)
    name = tool.string("name", None)
    if name is None:
        raise tool.missing_member("name")
    if not NAME.fullmatch(name):
        raise tool.member_error("name", f"String should match pattern '^{NAME.pattern}$', but got {excerpt(name)}")
    function: ToolObject = {"name": name}
    description = tool.string("description", None)
    if description is not None:
        function["description"] = description
    if not tool.has_value("input_schema") and blocks.rules.strict:
        raise tool.missing_member("input_schema")
    function["parameters"] = tool.free_object("input_schema") or {"type": "object", "properties": {}}
    if tool.boolean("strict", False):
        function["strict"] = True
    tool.boolean("eager_input_streaming", None)  # arguments are always passed on as they arrive
    return {"type": "function", "function": function}


def _read_client_tool(tool: Fields, kind: str, client_tool: AnthropicClientTool, blocks: BlockReader) -> ToolObject:
    """Return a tool that Anthropic defines, with its schema."""
    check_anthropic_members(tool, CLIENT_TOOL_MEMBERS | _own_members(client_tool), blocks.rules, kind)
    blocks.read_cache_control(tool)
    if tool.string("name", None, allowed=(client_tool.name,)) is None:
        raise tool.missing_member("name")
    if client_tool.has_max_characters:
        tool.integer("max_characters", None, 1, None)  # read to be checked: the client does the shortening
    function: ToolObject = client_tool.signature(_read_display(tool) if client_tool.has_display else "")
    if client_tool.has_zoom and tool.boolean("enable_zoom", False):
        function["parameters"] = with_zoom(client_tool.input_schema)
    if tool.boolean("strict", False):
        function["strict"] = True
    return {"type": "function", "function": function}


def _own_members(client_tool: AnthropicClientTool) -> Set[str]:
    """Return the members that a tool has besides those of all tools that Anthropic defines."""
    return {
        *(("max_characters",) if client_tool.has_max_characters else ()),
        *(DISPLAY_MEMBERS if client_tool.has_display else ()),
        *(("enable_zoom",) if client_tool.has_zoom else ()),
    }


def _read_display(tool: Fields) -> str:
    """Return a sentence about the screen of a computer. Raises BadRequest."""
    for name in DISPLAY_MEMBERS[:2]:
        if not tool.has_value(name):
            raise tool.missing_member(name)
    width, height = (tool.integer(name, 0, 1, MAX_DISPLAY_PIXELS) for name in DISPLAY_MEMBERS[:2])
    number = tool.integer("display_number", None, 0)
    screen = "The screen" if number is None else f"The screen of display {number}"
    return f" {screen} is {width} pixels wide and {height} pixels high."


def _check_names(tools: Iterable[AnthropicTool]) -> None:
    """Raise InvalidValue if two tools have the same name."""
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise InvalidValue("tools: Tool names must be unique.", field=tool.definition.member_path("name"))
        names.add(tool.name)


def _read_choice(
    body: Fields, tools: list[ToolObject], names: list[str], rules: AnthropicRules
) -> AnthropicToolMembers:
    choice = body.object("tool_choice")
    if choice is None:
        return AnthropicToolMembers(tools)
    check_anthropic_members(choice, CHOICE_MEMBERS, rules)
    kind = choice.string("type", None, allowed=tuple(CHOICES))
    if kind is None:
        raise choice.missing_member("type")
    parallel = not choice.boolean("disable_parallel_tool_use", False)
    if kind in ("any", "tool") and not tools:
        raise body.member_error("tool_choice", f"'{kind}' may only be specified while providing `tools`.")
    if kind != "tool":
        return AnthropicToolMembers(tools, CHOICES[kind], None, parallel)
    name = choice.string("name", None, cap=256)
    if name is None:
        raise choice.missing_member("name")
    if name not in map(_name_of, tools):
        problem = "is deferred or removed" if name in names else "not found in provided tools"
        raise InvalidValue(f"Tool '{name}' {problem}", field=choice.member_path("name"))
    return AnthropicToolMembers(tools, "required", name, parallel)
