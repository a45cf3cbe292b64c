"""What tools make of an answer: which of them it may call, and the grammar that holds it to that.

The form that a request asks for and its tools are one grammar: the answer is calls, or it has the form. Knows neutral
conversations, families and schemas; no matchers, no requests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import msgspec

from parley.errors import Invalid
from parley.types import Chat, Grammar, Message

from . import schema as schemas
from .bounds import BUDGET
from .calls import Form
from .lark import Lark
from .markup import Markup
from .refused import Refused
from .spelling import BEGIN, FINAL, calls_grammar, lead

Tool = dict[str, Any]

# What a model writes whose family has no calls, and who is made to call all the same.
GENERIC = Form(open=("[",), between=", ", close=("]",), keys=("name", "parameters"), bare=True)
TOLD = (
    "\n\nThese are the tools: {tools}\nAnswer with a JSON array of calls and nothing else: "
    '[{{"name": <name of a tool>, "parameters": <its arguments as an object>}}]'
)


def callable_tools(chat: Chat) -> list[Tool]:
    """Those that the answer may call."""
    if chat.choice == "none":
        return []
    names = [chat.only] if chat.only is not None else chat.allowed
    return [tool for tool in chat.tools if not names or _name(tool) in names]


def unbound(chat: Chat) -> bool:
    """Whether an answer of which no form is asked may be any text, although there are tools."""
    return chat.choice != "required" and not chat.allowed and not any(map(_strict, callable_tools(chat)))


def readable(markup: Markup, chat: Chat) -> Markup:
    """How the answer is marked: without calls where there may be none, with the generic form where there must be."""
    if not callable_tools(chat):
        return replace(markup, calls=())
    if chat.choice == "required" and not markup.calls:
        return replace(markup, calls=(GENERIC,))
    return markup


def told(chat: Chat) -> Chat:
    """The conversation for a model whose template shows no tools: its last turn tells of them."""
    last = chat.messages[-1]
    tools = json.dumps([tool["function"] for tool in callable_tools(chat)], ensure_ascii=False)
    content = (last.content or "") + TOLD.format(tools=tools)
    members = {name: getattr(last, name) for name in last.__struct_fields__} | {"content": content}
    return msgspec.structs.replace(chat, messages=[*chat.messages[:-1], Message(**members)])


def compose(
    markup: Markup, lark: Lark, chat: Chat, form: Grammar | None, loose: Collection[str] = ()
) -> Grammar | None:
    """The grammar of the answer, None for any text. ``markup`` is the readable one, ``form`` what else is asked for.

    Has the answer to call, it is calls, and the form has no say. May it call, it is calls or has the form; without a
    form it is text in which calls of ``strict`` tools follow their schemas. The arguments of tools in ``loose`` are
    any object. ``lark`` writes the model's marks.
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
    """Names of tools whose schemas are not followed: they cannot be, or else all that need not, for they are too many.

    Raises Invalid where a tool is strict.
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
    """The tool with the schema that its arguments are held to."""
    function = tool["function"]
    parameters = function.get("parameters")
    if loose or not isinstance(parameters, dict):
        schema: dict[str, Any] = {"type": "object"}
    else:
        schema = schemas.ready(_object(parameters), _strict(tool))
    return {"type": "function", "function": {**function, "parameters": schema}}


def _object(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schema of arguments, which are an object even where it speaks of something else as well, or instead."""
    kinds = parameters.get("type", "object")
    fits = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
    return parameters | {"type": "object"} if fits else {"type": "object"}


def _bare(tools: list[Tool], keys: tuple[str, str], form: Grammar) -> Grammar:
    """Calls that are JSON without marks, or JSON of the form, as one schema: two grammars may not begin alike."""
    name, arguments = keys
    options = []
    for tool in tools:
        parts = {name: {"const": _name(tool)}, arguments: tool["function"]["parameters"]}
        options.append({"type": "object", "properties": parts, "required": [*keys], "additionalProperties": False})
    # the schemas of arguments refer to their own parts, which are at another place then
    parts = {f"call{number}": _moved(option, number, arguments) for number, option in enumerate(options)}
    try:
        value = schemas.ready(form.value, form.closed) if isinstance(form.value, dict) else form.value
    except Refused:  # once more where the whole is compiled, which tells whoever asked
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
