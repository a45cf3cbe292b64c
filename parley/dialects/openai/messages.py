"""Reading a conversation: messages, content parts, and the options of the chat template."""

from __future__ import annotations

from typing import Any

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.media import InterleavedText, check_media_counts, interleave_parts
from parley.dialects.openai import media_parts, tools
from parley.dialects.openai.common_members import unsupported_member_error
from parley.dialects.openai.custom_tools import custom_arguments
from parley.dialects.openai.media_parts import TEXT_ONLY, MediaReader
from parley.dialects.openai.reading_rules import OPENAI_RULES, ReadingRules
from parley.dialects.openai.tools import MAX_TOOLS, OpenAIToolMembers
from parley.dialects.request_context import RequestContext
from parley.errors import Unsupported
from parley.types import ChatPrompt, Media, Message, ToolCall

MAX_MESSAGES = 10_000
MAX_CONTENT_PARTS = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
THINKING_PARTS = {"thinking": "thinking"}
MEDIA_PARTS = ("image_url", "input_audio", "file", "video_url", "audio_url", "image_embeds")  # known to text models

NO_CONTENT = InterleavedText("", [])

# The server itself passes these to the template; a client must not replace them.
RESERVED_OPTIONS = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
            "documents", "conversation", "tokenizer", "self"}  # fmt: skip


class MessageRules(msgspec.Struct, frozen=True):
    """How an API's messages are read.

    * ``text_separator``: separates two text parts of one content.
    * ``roles``: the valid roles; empty: all.
    * ``lenient_calls``: a call's arguments may be an object, also as ``parameters``, and its result may omit the call's
      id.
    * ``lenient_content``: a message may have no content, and a plain string is valid as a content part.
    * ``custom_tools``: calls may be calls of custom tools.
    """

    text_separator: str
    roles: tuple[str, ...] = ()
    lenient_calls: bool = False
    lenient_content: bool = False
    custom_tools: bool = False
    media: MediaReader = TEXT_ONLY


def read_conversation(
    body: Fields, rules: ReadingRules = OPENAI_RULES, context: RequestContext | None = None
) -> tuple[ChatPrompt, OpenAIToolMembers]:
    """Return the conversation, and the members about its tools. Raises BadRequest.

    Without ``context``, only text is accepted.
    """
    lenient = rules.lenient_messages
    reader = media_parts.TEXT_ROUTE if context is None else media_parts.media_reader(body, rules, context)
    message_rules = MessageRules(
        "\n", rules.roles, lenient_calls=lenient, lenient_content=lenient, custom_tools=rules.custom_tools, media=reader
    )
    messages = read_openai_messages(body, message_rules)
    tool_members = tools.read_openai_tools(body, rules)
    continue_final = body.boolean("continue_final_message", False)
    generation_prompt = body.boolean("add_generation_prompt", not continue_final)
    if continue_final and generation_prompt:
        raise body.member_error("continue_final_message", "cannot be true together with 'add_generation_prompt'.")
    if continue_final and messages[-1].role != "assistant" and not rules.lenient_messages:
        raise body.member_error("continue_final_message", "needs a last message of role 'assistant'.")
    chat = ChatPrompt(
        messages=messages,
        tools=tool_members.tools,
        tool_choice=tool_members.choice,
        forced_tool=tool_members.only,
        allowed_tools=tool_members.allowed,
        parallel_calls=tool_members.parallel,
        schema_fields=tool_members.schema_fields,
        thinking=body.boolean("enable_thinking", None),
        reasoning_effort=body.string("reasoning_effort", None, allowed=EFFORTS),
        options=read_template_options(body),
        add_generation_prompt=generation_prompt,
        continue_final=continue_final,
        add_special_tokens=body.boolean("add_special_tokens", False),
    )
    return chat, tool_members


def read_openai_messages(body: Fields, rules: MessageRules) -> list[Message]:
    """Return the messages, at least one. Raises BadRequest."""
    messages = [_read_message(item, rules) for item in body.objects("messages", cap=MAX_MESSAGES)]
    if not messages:
        raise body.empty_member("messages", "array") if body.has_value("messages") else body.missing_member("messages")
    check_media_counts((placed.media for message in messages for placed in message.media), rules.media.limits)
    return messages


def read_template_options(body: Fields) -> dict[str, Any]:
    """Return the extra variables of the template."""
    options: dict[str, Any] = {}
    client_options = body.free_object("chat_template_kwargs")
    for key in client_options:
        if key in RESERVED_OPTIONS or key.startswith("_"):
            raise body.member_error("chat_template_kwargs", f"'{key[:40]}' cannot be set by a request.")
    if body.has_value("chat_template"):
        raise unsupported_member_error(body, "chat_template", "A template of the request's own is")
    if body.has_value("documents"):
        options["documents"] = [_read_document(item) for item in body.objects("documents", cap=MAX_MESSAGES)]
    return options | client_options


def _read_document(item: Fields) -> dict[str, str]:
    """Return a document that the template may quote: a title, a text, or other members."""
    if any(len(name) > 64 for name in item.member_names):
        raise item.member_error("title", "names of a document's members have at most 64 characters.")
    return {name: item.string(name, "") for name in item.member_names}


def _read_message(item: Fields, rules: MessageRules) -> Message:
    role = item.string("role", None, allowed=rules.roles, cap=256)
    if role is None:
        raise item.missing_member("role")
    name = item.string("name", None, cap=256)
    content = _read_content(item, role, rules)
    if role == "assistant":
        return _read_assistant_message(item, name, content, rules)
    if content is None and not rules.lenient_content:
        raise item.missing_member("content")
    text, media = content or NO_CONTENT
    if role == "tool":
        call = item.string("tool_call_id", None, cap=256)
        if call is None and not rules.lenient_calls:
            raise item.missing_member("tool_call_id")
        return Message("tool", text, name, tool_call_id=call, media=media)
    if role == "function":
        if name is None and not rules.lenient_calls:
            raise item.missing_member("name")
        return Message("tool", text, name, media=media)
    return Message("system" if role == "developer" else role, text, name, media=media)


def _read_assistant_message(
    item: Fields, name: str | None, content: InterleavedText | None, rules: MessageRules
) -> Message:
    calls = [_read_tool_call(call, rules) for call in item.objects("tool_calls", cap=MAX_TOOLS)]
    legacy = item.object("function_call")
    if legacy is not None:
        calls.append(_read_function_call(legacy, "", rules.lenient_calls))
    reasoning = item.string("reasoning", None)
    if reasoning is None:
        reasoning = item.string("reasoning_content", None)
    text = item.string("refusal", None) if content is None else content.text
    if text is None and not calls and reasoning is None:
        if not rules.lenient_content:
            raise item.missing_member("content")
        text = ""
    return Message("assistant", text, name, reasoning, calls, media=[] if content is None else content.media)


def _read_tool_call(call: Fields, rules: MessageRules) -> ToolCall:
    kind = call.string("type", "function", allowed=("function", "custom") if rules.custom_tools else ("function",))
    call_id = call.string("id", None, cap=256)
    if call_id is None:
        raise call.missing_member("id")
    if kind == "custom":
        return _read_custom_call(call, call_id)
    function = call.object("function")
    if function is None:
        raise call.missing_member("function")
    return _read_function_call(function, call_id, rules.lenient_calls)


def _read_custom_call(call: Fields, call_id: str) -> ToolCall:
    custom = call.object("custom")
    if custom is None:
        raise call.missing_member("custom")
    name, text = custom.string("name", None, cap=256), custom.string("input", None)
    if name is None or text is None:
        raise custom.missing_member("name" if name is None else "input")
    return ToolCall(call_id, name, custom_arguments(text))


def _read_function_call(function: Fields, call_id: str, loose: bool) -> ToolCall:
    name = function.string("name", None, cap=256)
    if name is None:
        raise function.missing_member("name")
    member = "parameters" if loose and not function.has_value("arguments") else "arguments"
    if loose and isinstance(function.raw_value(member), dict):
        return ToolCall(call_id, name, msgspec.json.encode(function.free_object(member)).decode())
    return ToolCall(call_id, name, function.string(member, "{}"))


def _read_content(item: Fields, role: str, rules: MessageRules) -> InterleavedText | None:
    """Return the content as one text with the items in it; an array's parts are joined."""
    value = item.raw_value("content")
    if value is None:
        return None
    if isinstance(value, str):
        return InterleavedText(value, [])
    if not isinstance(value, list):
        raise item.mistyped_member("content", "a string or an array of content parts")
    text_members = TEXT_PARTS
    if rules.lenient_content:
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]
        item = item.with_members({"content": parts})
        text_members = TEXT_PARTS | THINKING_PARTS
    parts_read = (
        _read_content_part(part, role, text_members, rules.media)
        for part in item.objects("content", cap=MAX_CONTENT_PARTS)
    )
    return interleave_parts(parts_read, rules.text_separator)


def read_prediction(body: Fields) -> str:
    """Return the client's prediction of the answer, or "". Raises BadRequest."""
    prediction_object = body.object("prediction")
    if prediction_object is None:
        return ""
    prediction_object.string("type", "content", allowed=("content",))
    content = _read_content(prediction_object, "", MessageRules(""))
    if content is None:
        raise prediction_object.missing_member("content")
    return content.text


def _read_content_part(part: Fields, role: str, members: dict[str, str], reader: MediaReader) -> str | Media:
    """Return the text or the item of a part. ``members``: the member that holds the text, by type of part."""
    if reader.limits and (item := reader.read_part(part, role, tuple(members))) is not None:
        return item
    kind = part.string("type", None)
    if kind is None:
        raise part.missing_member("type")
    if kind in MEDIA_PARTS:
        raise Unsupported(
            f"'{part.member_path('type')}' is '{kind}', but {reader.limited_by} reads text only.",
            field=part.member_path("type"),
            code="unsupported_value",
        )
    member = members.get(kind)
    if member is None:
        raise part.member_error("type", f"got {kind[:40]!r}, but supported parts are 'text' and 'refusal'.")
    text = part.string(member, None)
    if text is None:
        raise part.missing_member(member)
    return text
