"""TGI conversations: messages are OpenAI's; tools and tool choice are TGI's own.

If the assistant has the last turn, it is left open and the model continues it. An answer has at most one tool call,
whose arguments always follow the tool's schema.
"""

from __future__ import annotations

from typing import Any, Literal

from parley.dialects.fields import Fields
from parley.dialects.openai.messages import turns
from parley.dialects.openai.tools import MAX_TOOLS
from parley.errors import Invalid
from parley.types import Chat, Message


def talk(body: Fields) -> Chat:
    """Read a conversation with its tools. Raises BadRequest."""
    messages = turns(body, joint="", roles=(), loose=True)
    tools, choice, only = _tools(body)
    prompt = body.string("tool_prompt", None)
    guideline = body.string("guideline", None)
    if tools and prompt:
        messages[-1] = _with(messages[-1], f"\n---\n{prompt}")
    last = messages[-1]
    goes_on = last.role == "assistant" and bool(last.content)
    if goes_on:
        messages[-1] = Message(**{**_members(last), "content": (last.content or "").rstrip()})
    return Chat(
        messages=messages,
        tools=tools,
        choice=choice,
        only=only,
        parallel=not tools,
        options={} if guideline is None else {"guideline": guideline},
        add_generation_prompt=not goes_on,
        continue_final=goes_on,
    )


def next_id(chat: Chat) -> str:
    """Return the next call id: ids count up through a conversation. Empty if the client uses ids of another kind."""
    ids = [call.id for message in chat.messages for call in message.tool_calls]
    if not all(id.isascii() and id.isdigit() and len(id) < 19 for id in ids):
        return ""
    return str(max(map(int, ids), default=-1) + 1)


def _with(message: Message, text: str) -> Message:
    return Message(**{**_members(message), "content": (message.content or "") + text})


def _members(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def _tools(body: Fields) -> tuple[list[dict[str, Any]], Literal["auto", "required"], str | None]:
    """Return the tools shown to the model (none for "none"), whether it must call one, and the only one allowed."""
    tools = [_tool(tool) for tool in body.objects("tools", cap=MAX_TOOLS)]
    choice = _choice(body)
    if not tools or choice == "none":
        return [], "auto", None
    if choice in ("auto", "required"):
        return tools, choice, None  # type: ignore[return-value]  # narrowed by the comparison
    if choice not in [tool["function"]["name"] for tool in tools]:
        raise Invalid(f"Tool with name {choice} not found", field="tool_choice", code="tool_error")
    return tools, "required", choice


def _tool(tool: Fields) -> dict[str, Any]:
    kind = tool.string("type", None)
    function = tool.object("function")
    if kind is None or function is None:
        raise tool.missing("type" if kind is None else "function")
    name = function.string("name", None, cap=256)
    if name is None:
        raise function.missing("name")
    schema = "arguments" if function.has("arguments") else "parameters"
    if not function.has(schema):
        raise function.missing("arguments")
    signature: dict[str, Any] = {"name": name}
    description = function.string("description", None)
    if description is not None:
        signature["description"] = description
    signature |= {"parameters": function.free(schema), "strict": True}
    return {"type": "function", "function": signature}


def _choice(body: Fields) -> str:
    """Return "auto", "none", "required" or a function's name."""
    value = body.raw("tool_choice")
    if value is None or isinstance(value, str):
        return value or "auto"
    wish = body.object("tool_choice")
    assert wish is not None
    function = wish.object("function")
    if function is None:
        raise wish.missing("function")
    name = function.string("name", None, cap=256)
    if name is None:
        raise function.missing("name")
    return name
