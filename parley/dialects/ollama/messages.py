"""Reading a conversation: messages with images in base64, tool calls with object arguments, and tools."""

from __future__ import annotations

from typing import Any

import msgspec

from parley.dialects import media
from parley.dialects.fields import Fields
from parley.dialects.ollama.api_rules import OllamaRules
from parley.dialects.ollama.refusal_wording import incapable_model_error
from parley.dialects.request_context import RequestContext
from parley.errors import Unsupported
from parley.types import EncodedMedia, Media, Message, PlacedMedia, ToolCall

MAX_MESSAGES = 10_000
MAX_TOOLS = 128
MAX_IMAGES = 4096  # in one member; how many a request may have is the server's own limit
MAX_BASE64 = 2**31  # characters; the limit of a body is lower


def read_ollama_messages(body: Fields, rules: OllamaRules, context: RequestContext) -> list[Message]:
    """Return the messages; none asks to load the model. Raises BadRequest."""
    messages = [_read_message(item, rules, context) for item in body.objects("messages", cap=MAX_MESSAGES)]
    placed_media = (placed.media for message in messages for placed in message.media)
    media.check_media_counts(placed_media, context.media_limits)
    return messages


def _read_message(item: Fields, rules: OllamaRules, context: RequestContext) -> Message:
    role = item.string("role", "", cap=256).lower()
    if not role:
        raise item.missing_member("role")
    return Message(
        role,
        item.string("content", ""),
        item.string("tool_name", None, cap=256) if role == "tool" else None,
        item.string("thinking", None) if role == "assistant" else None,
        [_read_call(call, rules) for call in item.objects("tool_calls", cap=MAX_TOOLS)],
        item.string("tool_call_id", None, cap=256) if role == "tool" else None,
        read_images(item, context),
    )


def _read_call(call: Fields, rules: OllamaRules) -> ToolCall:
    call_id = call.string("id", "", cap=256)
    function = call.object("function")
    if function is None:
        raise call.missing_member("function")
    name = function.string("name", None, cap=256)
    if name is None:
        raise function.missing_member("name")
    if not rules.strict and isinstance(function.raw_value("arguments"), str):
        function = function.with_parsed_text("arguments", cap=MAX_BASE64)
    arguments = msgspec.json.encode(function.free_object("arguments")).decode()
    return ToolCall(call_id, name, arguments)


def read_images(item: Fields, context: RequestContext) -> list[PlacedMedia]:
    """Return the images of ``images``, which stand before the text. Raises Unsupported if the model reads none."""
    texts = item.strings("images", cap=MAX_IMAGES, total=MAX_BASE64)
    if texts and "image" not in context.media_limits:
        message = f"'{item.member_path('images')}': this model does not support vision"
        raise Unsupported(message, field=item.member_path("images"))
    fields = [f"{item.member_path('images')}[{number}]" for number in range(len(texts))]
    sources = [_read_image(text, field) for text, field in zip(texts, fields, strict=True)]
    return [PlacedMedia(0, Media("image", source, field)) for source, field in zip(sources, fields, strict=True)]


def _read_image(text: str, field: str) -> EncodedMedia:
    """Return an image in base64, without the start of a data: URL, which some clients send."""
    if text[:5].lower() == "data:":
        return media.read_data_url(text, "image", field)
    return EncodedMedia(text)


def read_ollama_tools(body: Fields, name: str, context: RequestContext) -> list[dict[str, Any]]:
    """Return the tools in OpenAI's form. Raises BadRequest, UnsuitableModel if the model knows no tools."""
    tools = [_read_tool(tool) for tool in body.objects("tools", cap=MAX_TOOLS)]
    if tools and "tools" not in context.abilities:
        raise incapable_model_error(name, "tools")
    return tools


def _read_tool(tool: Fields) -> dict[str, Any]:
    tool.string("type", "function", allowed=("function",))
    function = tool.object("function")
    if function is None:
        raise tool.missing_member("function")
    name = function.string("name", None, cap=256)
    if not name:
        raise function.missing_member("name")
    signature: dict[str, Any] = {"name": name, "description": function.string("description", "")}
    signature["parameters"] = function.free_object("parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": signature}
