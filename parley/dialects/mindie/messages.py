"""MindIE conversations: messages, tools, options of the chat template, and MindIE's own error sentences.

Requests with tools are checked more strictly: roles must be known, and no content may be empty.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from parley.dialects.fields import MAX_DEPTH, Fields, shallow
from parley.dialects.mindie import inputs
from parley.dialects.mindie.inputs import Input
from parley.dialects.mindie.rules import Rules
from parley.dialects.mindie.shared import I32, UNREAD, mistaken, size
from parley.dialects.openai.messages import RESERVED
from parley.errors import Unsupported
from parley.types import Chat, Message, ToolCall

ROLES = ("system", "assistant", "user", "tool")
NAME = re.compile(r"[A-Za-z0-9_\-\u4e00-\u9fa5]{1,64}")
CHOICES = ("none", "auto", "required")
CHAT = Input(
    "content",
    "Request param contains not content or content null",
    "The type of inputs is abnormal",
    "Inputs arr is empty",
    "Messages len not in (0, {1}], but the length of inputs is {0}",
    f"Messages token length must be in (0, {inputs.IDS}], but got 0. This could be caused by invalid input format or "
    "empty content.",
)
KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}


def conversation(body: Fields, rules: Rules) -> tuple[Chat, int | None]:
    """Return the conversation and its budget of reasoning tokens. Raises BadRequest, in the original's order."""
    choice, only = _choice(body)
    tools = _tools(body)
    options, budget = _options(body)
    _template(body)
    messages = _messages(body, bool(tools), rules)
    if not tools or choice == "none":
        return Chat(messages, options=options), budget
    if only is not None and all(tool["function"]["name"] != only for tool in tools):
        raise body.fail("tool_choice", f"Parameter tool_choice function {only} not in tools")
    parallel = rules.strict or body.raw("parallel_tool_calls") is not False
    return Chat(messages, tools, choice, only, parallel=parallel, options=options), budget


# -- messages


def _messages(body: Fields, strict: bool, rules: Rules) -> list[Message]:
    value = body.raw("messages")
    if value is None:
        told = "Request param messages is null" if strict else "Request param contains not messages or messages null"
        raise body.fail("messages", told)
    if not isinstance(value, list) or not value:
        told = f"Request param messages {'is not arr' if strict else 'not arr'} or arr is empty"
        raise body.fail("messages", told)
    messages = [_message(item, f"messages[{i}]", strict, rules) for i, item in enumerate(value)]
    length, most = sum(size(message.content or "") for message in messages), rules.limit << 20
    if length > most:
        raise body.fail("messages", CHAT.length.format(length, most))
    return messages


def _message(item: Any, path: str, strict: bool, rules: Rules) -> Message:
    turn = Fields(item if isinstance(item, dict) else {}, path, UNREAD)
    role = turn.raw("role")
    if not isinstance(role, str):
        raise turn.fail("role", "Request param contains not role or role null")
    if strict and role not in ROLES:
        raise turn.fail("role", "Request param contains role must be system, assistant, user or tool")
    given = turn.raw("tool_calls") if role == "assistant" else None
    calls = [_call(turn, call) for call in (given if isinstance(given, list) else [given])] if given else []
    content = _content(turn, role, strict, bool(calls), rules)
    name = item.get("name") if isinstance(item.get("name"), str) else None
    if role != "tool":
        reasoning = item.get("reasoning_content")
        return Message(role, content, name, reasoning if isinstance(reasoning, str) else None, calls)
    return Message(role, content, name, tool_call_id=_answered(turn))


def _content(turn: Fields, role: str, strict: bool, calls: bool, rules: Rules) -> str | None:
    value = turn.raw("content")
    if value is None:
        if calls:
            return None
        raise turn.fail("content", CHAT.missing)
    if isinstance(value, list):
        value = "".join(inputs.parts(turn, CHAT, value))
    elif not isinstance(value, str):
        assistant = 'Request param "content" arguments expected to be a string'
        raise turn.fail("content", assistant if role == "assistant" else CHAT.type)
    if not value and role == "assistant" and not calls and rules.strict:
        raise turn.fail("content", 'Request param "content" should not be empty')
    if not value and strict and role not in ("assistant", "tool"):
        raise turn.fail("content", "Request param content len should not be 0")
    return value


def _answered(turn: Fields) -> str:
    """Return the id of the call that a tool's message answers. Raises BadRequest."""
    id = turn.raw("tool_call_id")
    if id is None:
        told = "Request param contains not tool_call_id or tool_call_id null while role is tool"
        raise turn.fail("tool_call_id", told)
    if not isinstance(id, str):
        raise turn.fail("tool_call_id", "The type of tool_call_id is abnormal")
    if not id:
        raise turn.fail("tool_call_id", "Request param tool_call_id len should not be 0 while role is tool")
    return id


def _call(turn: Fields, call: Any) -> ToolCall:
    """Read a tool call of an earlier answer. Raises BadRequest."""
    given = call if isinstance(call, dict) else {}
    function = given.get("function") if isinstance(given.get("function"), dict) else None

    def text(value: Any, missing: str, kind: str) -> str:
        if value is None:
            raise turn.fail("tool_calls", f"Tool call param contains no {missing}")
        if not isinstance(value, str):
            raise turn.fail("tool_calls", f"Tool call param {kind} expected to be a string")
        return value

    id = text(given.get("id"), "id.", '"id" arguments')
    if given.get("type") != "function":
        raise turn.fail("tool_calls", "The type of the tool. Currently, only function is supported.")
    if function is None:
        raise turn.fail("tool_calls", "Tool call param contains no function that the model called.")
    name = text(function.get("name"), "function name", "function name")
    return ToolCall(id, name, text(function.get("arguments"), "function arguments", "function arguments"))


# -- tools


def _choice(body: Fields) -> tuple[Literal["auto", "none", "required"], str | None]:
    """Return whether calls may, must not or must be made, and the tool that must be called, if one is named."""
    value = body.raw("tool_choice")
    if value is None:
        return "auto", None
    if isinstance(value, str):
        if value not in CHOICES:
            raise body.fail("tool_choice", "Parameter tool_choice string not in [none, auto, required]")
        return value, None  # type: ignore[return-value]  # narrowed by the check above
    if not isinstance(value, dict):
        raise body.fail("tool_choice", "Parameter tool_choice not string or object")
    return "required", _tool(body, "tool_choice", value)["function"]["name"]


def _tools(body: Fields) -> list[dict[str, Any]]:
    value = body.raw("tools")
    if value is None:
        return []
    if not isinstance(value, list):
        raise body.fail("tools", "Tools not array")
    return [_tool(body, "tools", each) for each in value]


def _tool(body: Fields, member: str, tool: Any) -> dict[str, Any]:
    """Check a tool and return the members that a template may see. Raises BadRequest."""
    if not isinstance(tool, dict) or "type" not in tool:
        raise body.fail(member, "Tool param invalid, tool type not exist")
    kind, function = tool["type"], tool.get("function")
    if kind is None:
        raise body.fail(member, "Tool param invalid tool type")
    if not isinstance(kind, str):
        raise body.fail(member, "Tool param invalid tool string type")
    if kind != "function":
        raise body.fail(member, "Tool param not function type")
    if "function" not in tool:
        raise body.fail(member, "Tool param invalid, tool function not exist")
    if not isinstance(function, dict):
        raise body.fail(member, "Tool param invalid function object")
    if "name" not in function:
        raise body.fail(member, "Function object invalid, function name not exist")
    name = function["name"]
    if not isinstance(name, str):
        raise body.fail(member, "Function object invalid name type")
    if not NAME.fullmatch(name):
        told = (
            "The name of function must be a-z, A-Z, 0-9, common chinese characters, underscores and dashe within max "
            f"length of 64, unexpected function name: {name[:100]}"
        )
        raise body.fail(member, told)
    if not shallow(function, MAX_DEPTH):
        raise body.fail(member, "Tool param invalid function object")
    signature = {key: function[key] for key in ("name", "description") if isinstance(function.get(key), str)}
    parameters = function.get("parameters")
    signature["parameters"] = parameters if isinstance(parameters, dict) else {}
    if function.get("strict") is True:
        signature["strict"] = True
    return {"type": "function", "function": signature}


# -- the template


def _options(body: Fields) -> tuple[dict[str, Any], int | None]:
    """Return the template's variables, and the thinking budget, which applies only with ``enable_thinking``."""
    given = body.raw("chat_template_kwargs")
    if given is None and not body.null("chat_template_kwargs"):
        return {}, None
    if not isinstance(given, dict) or not shallow(given, MAX_DEPTH):
        raise body.fail("chat_template_kwargs", "chat_template_kwargs must be a JSON object")
    thinking = given.get("enable_thinking", False)
    if not isinstance(thinking, bool):
        told = f"enable_thinking must be boolean, got {KINDS.get(type(thinking), 'object')}"
        raise body.fail("chat_template_kwargs", told)
    budget = given.get("thinking_budget")
    if budget is not None:
        if type(budget) is not int:
            raise body.fail("chat_template_kwargs", "thinking_budget must be integer type.")
        if not 1 <= budget <= I32:
            raise mistaken("thinking_budget", budget)
    for name in given:
        if name in RESERVED or name.startswith("_"):
            raise body.fail("chat_template_kwargs", f"chat_template_kwargs: {name[:40]} cannot be set by a request")
    options = {name: value for name, value in given.items() if name != "thinking_budget"}
    return options, budget if thinking else None


def _template(body: Fields) -> None:
    value = body.raw("chat_template")
    if value is None:
        return
    if not isinstance(value, str):
        raise body.fail("chat_template", "Parameter chat_template not string")
    if not value:
        raise body.fail("chat_template", "Parameter chat_template is not valid")
    raise Unsupported("Parameter chat_template is not available on this server.", field="chat_template")
