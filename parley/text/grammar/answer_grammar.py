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

from parley.errors import Invalid
from parley.text.grammar import json_schema as schemas
from parley.text.grammar.lark import Lark
from parley.text.grammar.limits import BUDGET
from parley.text.grammar.refused import Refused
from parley.text.grammar.tool_grammar import BEGIN, FINAL, calls_grammar, lead
from parley.text.parsing.calls import Form
from parley.text.parsing.markup import Markup
from parley.types import Chat, Grammar, Message

Tool = dict[str, Any]

# For models of families without tool calls, where the request requires a call.
GENERIC = Form(open=("[",), between=", ", close=("]",), keys=("name", "parameters"), bare=True)
TOLD = (
    "\n\nThese are the tools: {tools}\nAnswer with a JSON array of calls and nothing else: "
    '[{{"name": <name of a tool>, "parameters": <its arguments as an object>}}]'
)


def callable_tools(chat: Chat) -> list[Tool]:
    """Return the tools that the answer may call."""
    if chat.choice == "none":
        return []
    names = [chat.only] if chat.only is not None else chat.allowed
    return [tool for tool in chat.tools if not names or _name(tool) in names]


def unbound(chat: Chat) -> bool:
    """Whether the answer may be any text despite the tools, if the request has no response format."""
    return chat.choice != "required" and not chat.allowed and not any(map(_strict, callable_tools(chat)))


def readable(markup: Markup, chat: Chat) -> Markup:
    """Return the markup of the answer: without calls if it must not call, with generic ones if it must but has none."""
    if not callable_tools(chat):
        return replace(markup, calls=())
    if chat.choice == "required" and not markup.calls:
        return replace(markup, calls=(GENERIC,))
    return markup


def told(chat: Chat) -> Chat:
    """Append the tools to the last message, for a model whose chat template does not show them."""
    last = chat.messages[-1]
    tools = json.dumps([tool["function"] for tool in callable_tools(chat)], ensure_ascii=False)
    content = (last.content or "") + TOLD.format(tools=tools)
    members = {name: getattr(last, name) for name in last.__struct_fields__} | {"content": content}
    return msgspec.structs.replace(chat, messages=[*chat.messages[:-1], Message(**members)])


def compose(
    markup: Markup, lark: Lark, chat: Chat, form: Grammar | None, loose: Collection[str] = ()
) -> Grammar | None:
    """Return the grammar of the answer, or None if it may be any text.

    An answer that must call tools is calls, and the response format does not apply. One that may call them is either
    calls or follows the response format; without a response format it is free text, and calls of ``strict`` tools in
    it follow their schemas. Tools in ``loose_tools`` accept any object as arguments. ``markup`` is the answer's, from
    ``answer_markup``; ``lark`` writes the model's marks.
    """
    tools = callable_tools(chat)
    content = f"({lark.text(BEGIN)})? {lark.text(FINAL)}" if markup.channels else lead(lark, markup.leads[1])
    if not tools or not markup.calls:
        return _around(f"start: {content} @inner", form) if form is not None and content else form
    required = chat.choice == "required"
    free = form is None and not required
    if free and unbound(chat):
        return None
    tools = [_bound(tool, _name(tool) in loose or (free and not _strict(tool))) for tool in tools]
    parallel = chat.parallel and chat.only is None
    calls = calls_grammar(markup, lark, tools, parallel=parallel, required=not free)
    if form is None or required:
        return Grammar("lark", calls, field="tool_choice" if required else "tools")
    first = markup.calls[0]
    if first.bare and first.shape == "object" and not first.open and form.kind == "json":
        return _bare(tools, first.keys, form)
    return _around(f"start: calls | {content} @inner\ncalls:{calls.removeprefix('start:')}", form)


def _around(lark: str, form: Grammar) -> Grammar:
    return Grammar("around", [lark, form], field=form.field)


def unfit(chat: Chat, compiled: Callable[[Grammar], str]) -> frozenset[str]:
    """Return the names of tools whose schemas are not enforced because they cannot be compiled.

    If all can, the tools are too many together, and the result is every tool that is not strict. Raises Invalid if a
    strict tool cannot be compiled.
    """
    found = set()
    callable_names = set(map(_name, callable_tools(chat)))
    began = time.thread_time()
    for number, tool in enumerate(chat.tools):
        parameters = tool["function"].get("parameters")
        if _name(tool) not in callable_names or not isinstance(parameters, dict):
            continue
        if time.thread_time() - began > BUDGET:
            raise Invalid("tools cannot be followed: it takes too long to prepare them.", field="tools")
        try:
            compiled(Grammar("json", _object(parameters), field=f"tools[{number}].function.parameters"))
        except Invalid:
            if _strict(tool):
                raise
            found.add(_name(tool))
    return frozenset(found or (_name(tool) for tool in callable_tools(chat) if not _strict(tool)))


def _bound(tool: Tool, loose: bool) -> Tool:
    """Return the tool with the schema that its arguments have to follow."""
    function = tool["function"]
    parameters = function.get("parameters")
    if loose or not isinstance(parameters, dict):
        schema: dict[str, Any] = {"type": "object"}
    else:
        schema = schemas.ready(_object(parameters), _strict(tool))
    return {"type": "function", "function": {**function, "parameters": schema}}


def _object(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of arguments, restricted to objects even if the original also allows other types."""
    kinds = parameters.get("type", "object")
    fits = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    return parameters | {"type": "object"} if fits else {"type": "object"}


def _bare(tools: list[Tool], keys: tuple[str, str], form: Grammar) -> Grammar:
    """Return one schema for unmarked JSON calls or JSON of the response format: two grammars must not begin alike."""
    name, arguments = keys
    options = []
    for tool in tools:
        parts = {name: {"const": _name(tool)}, arguments: tool["function"]["parameters"]}
        options.append({"type": "object", "properties": parts, "required": [*keys], "additionalProperties": False})
    # references in the schemas of arguments point to their own parts, which get a new place here
    parts = {f"call{number}": _moved(option, number, arguments) for number, option in enumerate(options)}
    try:
        value = schemas.ready(form.value, form.closed) if isinstance(form.value, dict) else form.value
    except Refused:  # reported when the whole grammar is compiled, with the request's member
        value = form.value
    parts["form"] = schemas.rerooted(value, "#/$defs/form")
    listed = [{"$ref": f"#/$defs/{part}"} for part in parts]
    return Grammar("json", {"anyOf": listed, "$defs": parts}, form.whitespace, field=form.field)


def _moved(option: dict[str, Any], number: int, arguments: str) -> dict[str, Any]:
    inner = option["properties"][arguments]
    moved = schemas.rerooted(inner, f"#/$defs/call{number}/properties/{arguments}")
    return option | {"properties": option["properties"] | {arguments: moved}}


def _name(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name


def _strict(tool: Tool) -> bool:
    return tool["function"].get("strict") is True
