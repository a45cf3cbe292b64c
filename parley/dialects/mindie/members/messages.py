"""MindIE conversations: messages, tools, options of the chat template, and MindIE's own error sentences.

Requests with tools are checked more strictly: roles must be known, and no content may be empty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from parley.dialects.fields import MAX_DEPTH, MAX_I32, Fields, is_shallow
from parley.dialects.media import check_media_counts, interleave_parts
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mindie.members import inputs
from parley.dialects.mindie.members.inputs import PromptInput
from parley.dialects.mindie.members.text_length import utf16_length
from parley.dialects.mindie.refusal_wording import MINDIE_WORDING, parameter_value_error
from parley.dialects.openai.messages import RESERVED_OPTIONS
from parley.dialects.request_context import RequestContext
from parley.errors import Unsupported
from parley.types import ChatPrompt, MediaKind, Message, PlacedMedia, ToolCall

ROLES = ("system", "assistant", "user", "tool")
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_\-\u4e00-\u9fa5]{1,64}")
TOOL_CHOICES = ("none", "auto", "required")
CONTENT_INPUT = PromptInput(
    "content",
    "Request param contains not content or content null",
    "The type of inputs is abnormal",
    "Inputs arr is empty",
    "Messages len not in (0, {1}], but the length of inputs is {0}",
    f"Messages token length must be in (0, {inputs.MAX_INPUT_IDS}], but got 0. This could be caused by invalid "
    "input format or "
    "empty content.",
)
MediaLimits = Mapping[MediaKind, int]
JSON_KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}


def read_mindie_conversation(
    body: Fields, rules: MindieRules, context: RequestContext
) -> tuple[ChatPrompt, int | None]:
    """Return the conversation and its budget of reasoning tokens. Raises BadRequest, in the original's order."""
    choice, only_tool = _read_mindie_tool_choice(body)
    tools = _read_mindie_tools(body)
    options, budget = _read_mindie_options(body)
    _refuse_template(body)
    messages = _read_mindie_messages(body, bool(tools), rules, context.media_limits)
    if not tools or choice == "none":
        return ChatPrompt(messages, options=options), budget
    if only_tool is not None and all(tool["function"]["name"] != only_tool for tool in tools):
        raise body.member_error("tool_choice", f"Parameter tool_choice function {only_tool} not in tools")
    parallel = rules.strict or body.raw_value("parallel_tool_calls") is not False
    return ChatPrompt(messages, tools, choice, only_tool, parallel_calls=parallel, options=options), budget


# -- messages


def _read_mindie_messages(body: Fields, strict: bool, rules: MindieRules, limits: MediaLimits) -> list[Message]:
    value = body.raw_value("messages")
    if value is None:
        error_text = (
            "Request param messages is null" if strict else "Request param contains not messages or messages null"
        )
        raise body.member_error("messages", error_text)
    if not isinstance(value, list) or not value:
        error_text = f"Request param messages {'is not arr' if strict else 'not arr'} or arr is empty"
        raise body.member_error("messages", error_text)
    messages = [_read_mindie_message(item, f"messages[{i}]", strict, rules, limits) for i, item in enumerate(value)]
    check_media_counts((placed.media for message in messages for placed in message.media), limits)
    length, max_length = sum(utf16_length(message.content or "") for message in messages), rules.body_megabytes << 20
    if length > max_length:
        raise body.member_error("messages", CONTENT_INPUT.wrong_length.format(length, max_length))
    return messages


def _read_mindie_message(item: Any, path: str, strict: bool, rules: MindieRules, limits: MediaLimits) -> Message:
    turn = Fields(item if isinstance(item, dict) else {}, path, MINDIE_WORDING)
    role = turn.raw_value("role")
    if not isinstance(role, str):
        raise turn.member_error("role", "Request param contains not role or role null")
    if strict and role not in ROLES:
        raise turn.member_error("role", "Request param contains role must be system, assistant, user or tool")
    tool_calls = turn.raw_value("tool_calls") if role == "assistant" else None
    calls = (
        [_read_mindie_tool_call(turn, call) for call in (tool_calls if isinstance(tool_calls, list) else [tool_calls])]
        if tool_calls
        else []
    )
    text, media = _read_mindie_content(turn, role, strict, bool(calls), rules, limits)
    name = item.get("name") if isinstance(item.get("name"), str) else None
    if role != "tool":
        reasoning = item.get("reasoning_content")
        return Message(role, text, name, reasoning if isinstance(reasoning, str) else None, calls, media=media)
    return Message(role, text, name, tool_call_id=_answered_call_id(turn), media=media)


def _read_mindie_content(
    turn: Fields, role: str, strict: bool, calls: bool, rules: MindieRules, limits: MediaLimits
) -> tuple[str | None, list[PlacedMedia]]:
    """Return the text of a message, and the items in it. Raises BadRequest."""
    value = turn.raw_value("content")
    if value is None:
        if calls:
            return None, []
        raise turn.member_error("content", CONTENT_INPUT.missing)
    media: list[PlacedMedia] = []
    if isinstance(value, list):
        value, media = interleave_parts(inputs.read_mindie_parts(turn, CONTENT_INPUT, value, limits))
    elif not isinstance(value, str):
        assistant = 'Request param "content" arguments expected to be a string'
        raise turn.member_error("content", assistant if role == "assistant" else CONTENT_INPUT.wrong_type)
    if media:
        return value, media
    if not value and role == "assistant" and not calls and rules.strict:
        raise turn.member_error("content", 'Request param "content" should not be empty')
    if not value and strict and role not in ("assistant", "tool"):
        raise turn.member_error("content", "Request param content len should not be 0")
    return value, []


def _answered_call_id(turn: Fields) -> str:
    """Return the id of the call that a tool's message answers. Raises BadRequest."""
    call_id = turn.raw_value("tool_call_id")
    if call_id is None:
        error_text = "Request param contains not tool_call_id or tool_call_id null while role is tool"
        raise turn.member_error("tool_call_id", error_text)
    if not isinstance(call_id, str):
        raise turn.member_error("tool_call_id", "The type of tool_call_id is abnormal")
    if not call_id:
        raise turn.member_error("tool_call_id", "Request param tool_call_id len should not be 0 while role is tool")
    return call_id


def _read_mindie_tool_call(turn: Fields, call: Any) -> ToolCall:
    """Read a tool call of an earlier answer. Raises BadRequest."""
    call_object = call if isinstance(call, dict) else {}
    function = call_object.get("function") if isinstance(call_object.get("function"), dict) else None

    def string_of(value: Any, missing: str, kind: str) -> str:
        if value is None:
            raise turn.member_error("tool_calls", f"Tool call param contains no {missing}")
        if not isinstance(value, str):
            raise turn.member_error("tool_calls", f"Tool call param {kind} expected to be a string")
        return value

    call_id = string_of(call_object.get("id"), "id.", '"id" arguments')
    if call_object.get("type") != "function":
        raise turn.member_error("tool_calls", "The type of the tool. Currently, only function is supported.")
    if function is None:
        raise turn.member_error("tool_calls", "Tool call param contains no function that the model called.")
    name = string_of(function.get("name"), "function name", "function name")
    return ToolCall(call_id, name, string_of(function.get("arguments"), "function arguments", "function arguments"))


# -- tools


def _read_mindie_tool_choice(body: Fields) -> tuple[Literal["auto", "none", "required"], str | None]:
    """Return whether calls may, must not or must be made, and the tool that must be called, if one is named."""
    value = body.raw_value("tool_choice")
    if value is None:
        return "auto", None
    if isinstance(value, str):
        if value not in TOOL_CHOICES:
            raise body.member_error("tool_choice", "Parameter tool_choice string not in [none, auto, required]")
        return value, None  # type: ignore[return-value]  # narrowed by the check above
    if not isinstance(value, dict):
        raise body.member_error("tool_choice", "Parameter tool_choice not string or object")
    return "required", _read_mindie_tool(body, "tool_choice", value)["function"]["name"]


def _read_mindie_tools(body: Fields) -> list[dict[str, Any]]:
    value = body.raw_value("tools")
    if value is None:
        return []
    if not isinstance(value, list):
        raise body.member_error("tools", "Tools not array")
    return [_read_mindie_tool(body, "tools", item) for item in value]


def _read_mindie_tool(body: Fields, member: str, tool: Any) -> dict[str, Any]:
    """Check a tool and return the members that a template may see. Raises BadRequest."""
    if not isinstance(tool, dict) or "type" not in tool:
        raise body.member_error(member, "Tool param invalid, tool type not exist")
    kind, function = tool["type"], tool.get("function")
    if kind is None:
        raise body.member_error(member, "Tool param invalid tool type")
    if not isinstance(kind, str):
        raise body.member_error(member, "Tool param invalid tool string type")
    if kind != "function":
        raise body.member_error(member, "Tool param not function type")
    if "function" not in tool:
        raise body.member_error(member, "Tool param invalid, tool function not exist")
    if not isinstance(function, dict):
        raise body.member_error(member, "Tool param invalid function object")
    if "name" not in function:
        raise body.member_error(member, "Function object invalid, function name not exist")
    name = function["name"]
    if not isinstance(name, str):
        raise body.member_error(member, "Function object invalid name type")
    if not FUNCTION_NAME.fullmatch(name):
        error_text = (
            "The name of function must be a-z, A-Z, 0-9, common chinese characters, underscores and dashe within max "
            f"length of 64, unexpected function name: {name[:100]}"
        )
        raise body.member_error(member, error_text)
    if not is_shallow(function, MAX_DEPTH):
        raise body.member_error(member, "Tool param invalid function object")
    signature = {key: function[key] for key in ("name", "description") if isinstance(function.get(key), str)}
    parameters = function.get("parameters")
    signature["parameters"] = parameters if isinstance(parameters, dict) else {}
    if function.get("strict") is True:
        signature["strict"] = True
    return {"type": "function", "function": signature}


# -- the template


def _read_mindie_options(body: Fields) -> tuple[dict[str, Any], int | None]:
    """Return the template's variables, and the thinking budget, which applies only with ``enable_thinking``."""
    template_kwargs = body.raw_value("chat_template_kwargs")
    if template_kwargs is None and not body.is_null("chat_template_kwargs"):
        return {}, None
    if not isinstance(template_kwargs, dict) or not is_shallow(template_kwargs, MAX_DEPTH):
        raise body.member_error("chat_template_kwargs", "chat_template_kwargs must be a JSON object")
    thinking = template_kwargs.get("enable_thinking", False)
    if not isinstance(thinking, bool):
        error_text = f"enable_thinking must be boolean, got {JSON_KINDS.get(type(thinking), 'object')}"
        raise body.member_error("chat_template_kwargs", error_text)
    budget = template_kwargs.get("thinking_budget")
    if budget is not None:
        if type(budget) is not int:
            raise body.member_error("chat_template_kwargs", "thinking_budget must be integer type.")
        if not 1 <= budget <= MAX_I32:
            raise parameter_value_error("thinking_budget", budget)
    for name in template_kwargs:
        if name in RESERVED_OPTIONS or name.startswith("_"):
            raise body.member_error(
                "chat_template_kwargs", f"chat_template_kwargs: {name[:40]} cannot be set by a request"
            )
    options = {name: value for name, value in template_kwargs.items() if name != "thinking_budget"}
    return options, budget if thinking else None


def _refuse_template(body: Fields) -> None:
    value = body.raw_value("chat_template")
    if value is None:
        return
    if not isinstance(value, str):
        raise body.member_error("chat_template", "Parameter chat_template not string")
    if not value:
        raise body.member_error("chat_template", "Parameter chat_template is not valid")
    raise Unsupported("Parameter chat_template is not available on this server.", field="chat_template")
