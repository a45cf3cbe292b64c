"""Combine the tools and the response format of a request into the grammar of its answer.

Tools and response format become one grammar: the answer is either tool calls, or follows the response format. Depends
on neutral conversations, families and schemas, not on matchers or requests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import msgspec

from parley.errors import InvalidValue
from parley.text.grammar.custom_lark import write_custom_lark
from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.grammar.lark import LarkWriter
from parley.text.grammar.limits import COMPILE_SECONDS, TOO_DEEP
from parley.text.grammar.schemas import json_schema as schemas
from parley.text.grammar.tool_grammar import ASSISTANT_START, FINAL_CHANNEL, optional_lead, tool_calls_grammar
from parley.text.parsing.calls import CallForm
from parley.text.parsing.markup import Markup
from parley.types import CUSTOM_GRAMMAR, ChatPrompt, Grammar, Message

ToolDefinition = dict[str, Any]

# For models of families without tool calls, where the request requires a call.
GENERIC_CALLS = CallForm(
    block_open=("[",), separator=", ", block_close=("]",), member_names=("name", "parameters"), unmarked=True
)
TOOLS_PROMPT = (
    "\n\nThese are the tools: {tools}\nAnswer with a JSON array of calls and nothing else: "
    '[{{"name": <name of a tool>, "parameters": <its arguments as an object>}}]'
)


def callable_tools(chat: ChatPrompt) -> list[ToolDefinition]:
    """Return the tools that the answer may call."""
    if chat.tool_choice == "none":
        return []
    names = [chat.forced_tool] if chat.forced_tool is not None else chat.allowed_tools
    return [tool for tool in chat.tools if not names or _tool_name(tool) in names]


def allows_any_text(chat: ChatPrompt) -> bool:
    """Whether the answer may be any text despite the tools, if the request has no response format."""
    return chat.tool_choice != "required" and not chat.allowed_tools and not any(map(_is_strict, callable_tools(chat)))


def answer_markup(markup: Markup, chat: ChatPrompt) -> Markup:
    """Return the markup of the answer: without calls if it must not call, with generic ones if it must but has none."""
    if not callable_tools(chat):
        return markup.without_calls
    if chat.tool_choice == "required" and not markup.call_forms:
        return replace(markup, call_forms=(GENERIC_CALLS,))
    return markup


def describe_tools(chat: ChatPrompt) -> ChatPrompt:
    """Append the tools to the last message that is not the assistant's, for a model whose chat template does not show
    them. If there is none, a user's message before all others has them."""
    tools = json.dumps([tool["function"] for tool in callable_tools(chat)], ensure_ascii=False)
    prompt = TOOLS_PROMPT.format(tools=tools)
    messages = list(chat.messages)
    for index in reversed(range(len(messages))):
        if (message := messages[index]).role != "assistant":
            messages[index] = msgspec.structs.replace(message, content=(message.content or "") + prompt)
            return msgspec.structs.replace(chat, messages=messages)
    return msgspec.structs.replace(chat, messages=[Message("user", prompt.lstrip()), *messages])


def compose_grammar(
    markup: Markup,
    lark: LarkWriter,
    chat: ChatPrompt,
    response_format: Grammar | None,
    loose_tools: Collection[str] = (),
) -> Grammar | None:
    """Return the grammar of the answer, or None if it may be any text.

    An answer that must call tools is calls, and the response format does not apply. One that may call them is either
    calls or follows the response format; without a response format it is free text, and calls of ``strict`` tools in
    it follow their schemas. Tools in ``loose_tools`` accept any object as arguments. ``markup`` is the answer's, from
    ``answer_markup``; ``lark`` writes the model's marks.
    """
    tools = callable_tools(chat)
    content = (
        f"({lark.write_text(ASSISTANT_START)})? {lark.write_text(FINAL_CHANNEL)}"
        if markup.uses_channels
        else optional_lead(lark, markup.lead_marks[1])
    )
    if not tools or not markup.call_forms:
        return (
            _call_inner(f"start: {content} @inner", response_format)
            if response_format is not None and content
            else response_format
        )
    required = chat.tool_choice == "required"
    is_free = response_format is None and not required
    if is_free and allows_any_text(chat):
        return None
    tools = [
        _with_schema(tool, _tool_name(tool) in loose_tools or (is_free and not _is_strict(tool))) for tool in tools
    ]
    parallel = chat.parallel_calls and chat.forced_tool is None
    calls = tool_calls_grammar(markup, lark, tools, parallel=parallel, required=not is_free)
    if response_format is None or required:
        return Grammar("lark", calls, field="tool_choice" if required else "tools")
    first = markup.call_forms[0]
    if first.unmarked and first.shape == "object" and not first.block_open and response_format.kind == "json":
        return _unmarked_schema(tools, first.member_names, response_format)
    return _call_inner(f"start: calls | {content} @inner\ncalls:{calls.removeprefix('start:')}", response_format)


def _call_inner(lark: str, inner: Grammar) -> Grammar:
    return Grammar("around", [lark, inner], field=inner.field)


def unenforced_tools(chat: ChatPrompt, compile_grammar: Callable[[Grammar], str]) -> frozenset[str]:
    """Return the names of tools whose schemas are not enforced because they cannot be compiled.

    If all can, the tools are too many together, and the result is every tool that is not strict. Raises InvalidValue if
    a strict tool cannot be compiled.
    """
    unsupported = set()
    callable_names = set(map(_tool_name, callable_tools(chat)))
    began = time.thread_time()
    for tool in chat.tools:
        parameters = tool["function"].get("parameters")
        if _tool_name(tool) not in callable_names or not isinstance(parameters, dict):
            continue
        if time.thread_time() - began > COMPILE_SECONDS:
            raise InvalidValue("tools cannot be enforced: it takes too long to prepare them.", field="tools")
        try:
            field = chat.schema_fields.get(_tool_name(tool), "tools")
            _check_custom_grammars(parameters, field)
            compile_grammar(Grammar("json", _object_schema(parameters), field=field))
        except InvalidValue:
            if _is_strict(tool):
                raise
            unsupported.add(_tool_name(tool))
    return frozenset(unsupported or (_tool_name(tool) for tool in callable_tools(chat) if not _is_strict(tool)))


def _check_custom_grammars(parameters: dict[str, Any], field: str) -> None:
    """Raise InvalidValue, which names ``field``, if the grammar of a custom tool's text cannot be enforced."""
    members = parameters.get("properties")
    for member in members.values() if isinstance(members, dict) else ():
        if isinstance(member, dict) and CUSTOM_GRAMMAR in member:
            try:
                write_custom_lark(member[CUSTOM_GRAMMAR], "", in_json=True)
            except GrammarRefused as reason:
                raise InvalidValue(f"{field} cannot be enforced: {reason}.", field=field) from None
            except RecursionError:
                raise InvalidValue(f"{field} cannot be enforced: {TOO_DEEP}.", field=field) from None


def _with_schema(tool: ToolDefinition, loose: bool) -> ToolDefinition:
    """Return the tool with the schema that its arguments have to follow."""
    function = tool["function"]
    parameters = function.get("parameters")
    if loose or not isinstance(parameters, dict):
        schema: dict[str, Any] = {"type": "object"}
    else:
        schema = schemas.prepare_for_llguidance(_object_schema(parameters))
    return {"type": "function", "function": {**function, "parameters": schema}}


def _object_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of arguments, restricted to objects even if the original also allows other types."""
    types = parameters.get("type", "object")
    fits = types == "object" or (isinstance(types, list) and "object" in types)
    return parameters | {"type": "object"} if fits else {"type": "object"}


def _unmarked_schema(tools: list[ToolDefinition], keys: tuple[str, str], response_format: Grammar) -> Grammar:
    """Return one schema for unmarked JSON calls or JSON of the response format: two grammars must not begin alike."""
    name, arguments = keys
    options = []
    for tool in tools:
        parts = {name: {"const": _tool_name(tool)}, arguments: tool["function"]["parameters"]}
        options.append({"type": "object", "properties": parts, "required": [*keys], "additionalProperties": False})
    # references in the schemas of arguments point to their own parts, which get a new place here
    parts = {f"call{number}": _move_references(option, number, arguments) for number, option in enumerate(options)}
    try:
        value = (
            schemas.prepare_for_llguidance(response_format.value)
            if isinstance(response_format.value, dict)
            else response_format.value
        )
    except GrammarRefused:  # reported when the whole grammar is compiled, with the request's member
        value = response_format.value
    parts["form"] = schemas.reroot_references(value, "#/$defs/form")
    references = [{"$ref": f"#/$defs/{part}"} for part in parts]
    return Grammar(
        "json", {"anyOf": references, "$defs": parts}, response_format.whitespace, field=response_format.field
    )


def _move_references(option: dict[str, Any], number: int, arguments: str) -> dict[str, Any]:
    inner = option["properties"][arguments]
    rerooted_schema = schemas.reroot_references(inner, f"#/$defs/call{number}/properties/{arguments}")
    return option | {"properties": option["properties"] | {arguments: rerooted_schema}}


def _tool_name(tool: ToolDefinition) -> str:
    name: str = tool["function"]["name"]
    return name


def _is_strict(tool: ToolDefinition) -> bool:
    return tool["function"].get("strict") is True
