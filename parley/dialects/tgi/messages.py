"""TGI conversations: messages are OpenAI's; tools and tool choice are TGI's own.

If the assistant has the last turn, it is left open and the model continues it. An answer has at most one tool call,
whose arguments always follow the tool's schema.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.openai.media_parts import TEXT_ONLY
from parley.dialects.openai.messages import MessageRules, read_openai_messages
from parley.dialects.openai.tools import MAX_TOOLS
from parley.dialects.request_context import RequestContext
from parley.dialects.tgi.images import TgiMediaReader
from parley.errors import InvalidValue
from parley.types import ChatPrompt, Message


def read_tgi_conversation(body: Fields, context: RequestContext | None = None) -> ChatPrompt:
    """Read a conversation with its tools; without ``context``, only text is accepted. Raises BadRequest."""
    reader = TEXT_ONLY if context is None else TgiMediaReader(context)
    messages = read_openai_messages(body, MessageRules("", lenient_calls=True, media=reader))
    schema_fields: dict[str, str] = {}
    tools, choice, only_tool = _read_tgi_tools(body, schema_fields)
    prompt = body.string("tool_prompt", None)
    guideline = body.string("guideline", None)
    if tools and prompt:
        messages[-1] = _append_text(messages[-1], f"\n---\n{prompt}")
    last = messages[-1]
    continues = last.role == "assistant" and bool(last.content)
    if continues:
        text = (last.content or "").rstrip()
        media = [msgspec.structs.replace(item, position=min(item.position, len(text))) for item in last.media]
        messages[-1] = msgspec.structs.replace(last, content=text, media=media)
    return ChatPrompt(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        forced_tool=only_tool,
        parallel_calls=not tools,
        schema_fields=schema_fields if tools else {},
        options={} if guideline is None else {"guideline": guideline},
        add_generation_prompt=not continues,
        continue_final=continues,
    )


def next_call_id(chat: ChatPrompt) -> str:
    """Return the next call id: ids count up through a conversation. Empty if the client uses ids of another kind."""
    call_ids = [call.id for message in chat.messages for call in message.tool_calls]
    if not all(call_id.isascii() and call_id.isdigit() and len(call_id) < 19 for call_id in call_ids):
        return ""
    return str(max(map(int, call_ids), default=-1) + 1)


def _append_text(message: Message, text: str) -> Message:
    return msgspec.structs.replace(message, content=(message.content or "") + text)


def _read_tgi_tools(
    body: Fields, schema_fields: dict[str, str]
) -> tuple[list[dict[str, Any]], Literal["auto", "required"], str | None]:
    """Return the tools shown to the model (none for "none"), whether it must call one, and the only one allowed.

    Adds the members with their schemas to ``schema_fields``, by their names.
    """
    tools = [_read_tgi_tool(tool, schema_fields) for tool in body.objects("tools", cap=MAX_TOOLS)]
    choice = _read_tgi_tool_choice(body)
    if not tools or choice == "none":
        return [], "auto", None
    if choice in ("auto", "required"):
        return tools, choice, None  # type: ignore[return-value]  # narrowed by the comparison
    if choice not in [tool["function"]["name"] for tool in tools]:
        raise InvalidValue(f"Tool with name {choice} not found", field="tool_choice", code="tool_error")
    return tools, "required", choice


def _read_tgi_tool(tool: Fields, schema_fields: dict[str, str]) -> dict[str, Any]:
    kind = tool.string("type", None)
    function = tool.object("function")
    if kind is None or function is None:
        raise tool.missing_member("type" if kind is None else "function")
    name = function.string("name", None, cap=256)
    if name is None:
        raise function.missing_member("name")
    schema = "arguments" if function.has_value("arguments") else "parameters"
    if not function.has_value(schema):
        raise function.missing_member("arguments")
    schema_fields[name] = function.member_path(schema)
    signature: dict[str, Any] = {"name": name}
    description = function.string("description", None)
    if description is not None:
        signature["description"] = description
    signature |= {"parameters": function.free_object(schema), "strict": True}
    return {"type": "function", "function": signature}


def _read_tgi_tool_choice(body: Fields) -> str:
    """Return "auto", "none", "required" or a function's name."""
    value = body.raw_value("tool_choice")
    if value is None or isinstance(value, str):
        return value or "auto"
    choice_object = body.object("tool_choice")
    assert choice_object is not None
    function = choice_object.object("function")
    if function is None:
        raise choice_object.missing_member("function")
    name = function.string("name", None, cap=256)
    if name is None:
        raise function.missing_member("name")
    return name
