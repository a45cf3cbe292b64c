"""Tools of the Responses API: functions, custom tools, namespaces, and those that OpenAI defines.

The model sees functions alone. A custom tool is a function with one text; a tool in a namespace has a joined name. A
tool that OpenAI defines and clients run is a function with a schema of this server. A tool of OpenAI's service is an
offer that the model cannot accept here: coding agents declare some unasked, so these are accepted, shown in the answer
and never called. Those that a user sets up on purpose are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from parley.dialects.fields import Fields
from parley.dialects.openai import strict_mode
from parley.dialects.openai.common_members import read_identifier
from parley.dialects.openai.custom_tools import custom_parameters
from parley.dialects.openai.responses.client_tools import CHOICE_ALIASES, CLIENT_TOOLS, TOOL_SEARCH, read_client_tool
from parley.dialects.openai.responses.response_rules import ResponsesRules, unserved_error
from parley.dialects.openai.tools import MAX_TOOLS, ToolObject
from parley.errors import BadRequest, InvalidValue, excerpt

OFFERED_TOOLS = frozenset(
    ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "image_generation",
     "tool_search", "programmatic_tool_calling")
)  # fmt: skip
CHOOSABLE_KINDS = frozenset((*CLIENT_TOOLS, *CHOICE_ALIASES))
NAMESPACE_JOINT = "__"
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ResponsesTool:
    """A tool as the client declared it. ``namespace``: where it was declared, "" for none. ``kind``: "function",
    "custom", or the type of a tool that OpenAI defines."""

    name: str
    namespace: str = ""
    kind: str = "function"


@dataclass(slots=True)
class ResponsesToolMembers:
    """The tools of a request: ``tools``, ``schema_fields``, ``choice``, ``only`` and ``allowed`` as in ``ChatPrompt``.

    * ``declared``: the client's tools by the names that the model sees.
    * ``shown``: the member ``tools`` of the answer.
    * ``reads_images``: whether the model reads images.
    * ``hides_deferred``: the client searches for tools, so the model does not see those with ``defer_loading`` before
      an output of that search has them.
    """

    reads_images: bool = False
    hides_deferred: bool = False

    tools: list[ToolObject] = field(default_factory=list)
    declared: dict[str, ResponsesTool] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)
    choice: Literal["auto", "none", "required"] = "auto"
    only: str | None = None
    allowed: list[str] = field(default_factory=list)
    shown_choice: str | dict[str, Any] = "auto"
    schema_fields: dict[str, str] = field(default_factory=dict)

    def client_tool_name(self, kind: str) -> str | None:
        """Return the model's name for a declared tool of a type that OpenAI defines, None if there is none."""
        return next((name for name, tool in self.declared.items() if tool.kind == kind), None)


def namespaced_name(namespace: str, name: str) -> str:
    """Return the model's name for a tool."""
    return f"{namespace}{NAMESPACE_JOINT}{name}" if namespace else name


def read_responses_tools(
    body: Fields, added: Iterable[Fields], rules: ResponsesRules, *, reads_images: bool = False
) -> ResponsesToolMembers:
    """Read the tools, and those that items of the input add. Raises BadRequest.

    ``reads_images``: whether the model does.
    """
    declarations = list(body.objects("tools", cap=MAX_TOOLS))
    members = ResponsesToolMembers(reads_images, rules.client_tools and any(map(_is_client_search, declarations)))
    for tool in declarations:
        members.shown.append(_read_tool(tool, members, rules))
    for tool in added:
        found = ResponsesToolMembers(reads_images)
        _read_tool(tool, found, rules)
        _add_tools(members, found)
    _read_tool_choice(body, members, rules)
    return members


def _is_client_search(tool: Fields) -> bool:
    return (tool.raw_value("type"), tool.raw_value("execution")) == (TOOL_SEARCH.name, "client")


def _add_tools(members: ResponsesToolMembers, found: ResponsesToolMembers) -> None:
    """Add tools that an item of the input has brought; those of the same names are the same tools."""
    for tool in found.tools:
        name = tool["function"]["name"]
        if name not in members.declared:
            members.tools.append(tool)
            members.declared[name] = found.declared[name]
            members.schema_fields[name] = found.schema_fields[name]


def _read_tool(
    tool: Fields, members: ResponsesToolMembers, rules: ResponsesRules, namespace: str = ""
) -> dict[str, Any]:
    """Read a tool, and return it as the answer shows it."""
    kind = tool.string("type", None, cap=256)
    match kind:
        case None:
            raise tool.missing_member("type")
        case "function":
            return _read_function(_unwrapped_function(tool, rules), members, rules, namespace)
        case "custom":
            return _read_custom_tool(tool, members, namespace)
        case "namespace" if not namespace:
            return _read_namespace(tool, members, rules)
        case _ if _is_client_search(tool) and rules.client_tools and not namespace:
            return _read_client_search(tool, members, rules)
        case _ if kind in CLIENT_TOOLS and rules.client_tools and not namespace:
            return _read_client_tool(tool, kind, members)
    if kind not in OFFERED_TOOLS or rules.strict:
        path = tool.member_path("type")
        raise unserved_error(f"Tool type {excerpt(kind)} is not served by this server.", path)
    return {name: tool.raw_value(name) for name in tool.member_names}


def _unwrapped_function(tool: Fields, rules: ResponsesRules) -> Fields:
    """Return the members of a function, which some clients nest as in chat completions."""
    nested = None if rules.strict or tool.has_value("name") else tool.object("function")
    return tool if nested is None else nested


def _read_function(
    function: Fields, members: ResponsesToolMembers, rules: ResponsesRules, namespace: str
) -> dict[str, Any]:
    name = read_identifier(function)
    description = function.string("description", None)
    parameters = function.free_object("parameters") or NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise function.member_error("parameters", "the schema of arguments must be of type 'object'.")
    is_strict = _read_strict(function, name, parameters, rules)
    signature: dict[str, Any] = {"name": namespaced_name(namespace, name)}
    if description is not None:
        signature["description"] = description
    signature |= {"parameters": parameters} | ({"strict": True} if is_strict else {})
    _declare_tool(function, members, signature, ResponsesTool(name, namespace), "parameters")
    shown_parameters = parameters if function.has_value("parameters") else None
    return {
        "type": "function",
        **({"defer_loading": True} if function.boolean("defer_loading", False) else {}),
        "description": description,
        "name": name,
        "parameters": shown_parameters,
        "strict": is_strict,
    }


def _read_strict(function: Fields, name: str, parameters: dict[str, Any], rules: ResponsesRules) -> bool:
    """Return whether calls must follow the schema. Unless the client says so, they must if strict mode accepts it."""
    wants_strict = function.boolean("strict", None)
    if (
        wants_strict is False
        or not function.has_value("parameters")
        or (wants_strict and not rules.reading.strict_schemas)
    ):
        return bool(wants_strict)
    try:
        strict_mode.check_strict_schema(
            parameters, f"function '{name}'", function.member_path("parameters"), "invalid_function_parameters"
        )
    except InvalidValue:
        if wants_strict:
            raise
        return False
    return True


def _read_custom_tool(tool: Fields, members: ResponsesToolMembers, namespace: str) -> dict[str, Any]:
    name = read_identifier(tool)
    description = tool.string("description", None)
    parameters = custom_parameters(tool.object("format"), nested=False)
    signature: dict[str, Any] = {"name": namespaced_name(namespace, name)}
    if description is not None:
        signature["description"] = description
    signature |= {"parameters": parameters, "strict": True}
    _declare_tool(tool, members, signature, ResponsesTool(name, namespace, "custom"), "format.definition")
    return {"type": "custom"} | {key: tool.raw_value(key) for key in tool.member_names if key != "type"}


def _read_client_tool(tool: Fields, kind: str, members: ResponsesToolMembers) -> dict[str, Any]:
    signature = read_client_tool(tool, kind, reads_images=members.reads_images)
    _declare_tool(tool, members, signature, ResponsesTool(signature["name"], kind=kind), "type")
    return {name: tool.raw_value(name) for name in tool.member_names}


def _read_client_search(tool: Fields, members: ResponsesToolMembers, rules: ResponsesRules) -> dict[str, Any]:
    parameters = tool.free_object("parameters") or TOOL_SEARCH.input_schema
    is_strict = not tool.has_value("parameters") or _read_strict(tool, TOOL_SEARCH.name, parameters, rules)
    signature = {
        "name": TOOL_SEARCH.name,
        "description": tool.string("description", TOOL_SEARCH.description),
        "parameters": parameters,
        **({"strict": True} if is_strict else {}),
    }
    _declare_tool(tool, members, signature, ResponsesTool(TOOL_SEARCH.name, kind=TOOL_SEARCH.name), "parameters")
    return {name: tool.raw_value(name) for name in tool.member_names}


def _read_namespace(tool: Fields, members: ResponsesToolMembers, rules: ResponsesRules) -> dict[str, Any]:
    namespace = read_identifier(tool)
    description = tool.string("description", None)
    inner = [_read_tool(inner_tool, members, rules, namespace) for inner_tool in tool.objects("tools", cap=MAX_TOOLS)]
    return {"type": "namespace", "description": description, "name": namespace, "tools": inner}


def _declare_tool(
    tool: Fields,
    members: ResponsesToolMembers,
    signature: dict[str, Any],
    declared: ResponsesTool,
    schema_member: str,
) -> None:
    if signature["name"] in members.declared:
        raise tool.member_error("name", f"another tool is called '{signature['name']}' already.")
    if members.hides_deferred and tool.boolean("defer_loading", False):
        return
    members.declared[signature["name"]] = declared
    members.schema_fields[signature["name"]] = tool.member_path(schema_member)
    members.tools.append({"type": "function", "function": signature})


def _read_tool_choice(body: Fields, members: ResponsesToolMembers, rules: ResponsesRules) -> None:
    value = body.raw_value("tool_choice")
    choice_object = None if value is None or isinstance(value, str) else body.object("tool_choice")
    if choice_object is None:
        members.choice = body.string("tool_choice", "auto", allowed=("none", "auto", "required"))  # type: ignore[assignment]
        members.shown_choice = members.choice
        if members.choice == "required" and not members.tools:
            raise body.member_error("tool_choice", "'required' needs a tool in 'tools' that the client runs.")
        return
    members.shown_choice = body.free_object("tool_choice")
    kind = choice_object.string("type", None, cap=256)
    match kind:
        case None:
            raise choice_object.missing_member("type")
        case "function" | "custom":
            members.choice, members.only = "required", _chosen_tool(choice_object, members, rules)
        case "allowed_tools":
            _read_allowed_tools(choice_object, members, rules)
        case _ if _is_choosable(kind, members, rules):
            members.choice, members.only = "required", _chosen_client_tool(choice_object, kind, members)
        case _:
            raise unserved_error(f"Tool type {excerpt(kind)} is not served by this server.", "tool_choice")


def _read_allowed_tools(choice_object: Fields, members: ResponsesToolMembers, rules: ResponsesRules) -> None:
    mode = choice_object.string("mode", None, allowed=("auto", "required"))
    if mode is None:
        raise choice_object.missing_member("mode")
    members.choice = mode  # type: ignore[assignment]  # one of the allowed values
    for tool in choice_object.objects("tools", cap=MAX_TOOLS):
        kind = tool.string("type", "function", cap=256)
        if kind in ("function", "custom"):
            members.allowed.append(_chosen_tool(tool, members, rules))
        elif _is_choosable(kind, members, rules):
            members.allowed.append(_chosen_client_tool(tool, kind, members))
    if not members.allowed:
        raise choice_object.member_error("tools", "must name a tool that the client runs.")


def _chosen_tool(choice_object: Fields, members: ResponsesToolMembers, rules: ResponsesRules) -> str:
    """Return the model's name for the tool that a choice names."""
    choice_object = _unwrapped_function(choice_object, rules)
    name = choice_object.string("name", None, cap=256)
    if name is None:
        raise choice_object.missing_member("name")
    name = namespaced_name(choice_object.string("namespace", "", cap=256), name)
    if name not in members.declared:
        raise _unknown_tool(choice_object, name)
    return name


def _is_choosable(kind: str, members: ResponsesToolMembers, rules: ResponsesRules) -> bool:
    """Whether a choice may name a tool by this type."""
    return rules.client_tools and (kind in CHOOSABLE_KINDS or members.client_tool_name(kind) is not None)


def _chosen_client_tool(choice_object: Fields, kind: str, members: ResponsesToolMembers) -> str:
    """Return the model's name for the tool whose type a choice names."""
    name = members.client_tool_name(CHOICE_ALIASES.get(kind, kind))
    if name is None:
        raise choice_object.member_error("type", f"none of the tools is of type {excerpt(kind)}.")
    return name


def _unknown_tool(choice_object: Fields, name: str) -> BadRequest:
    return choice_object.member_error("name", f"none of the tools is called {excerpt(name)}.")
