"""Reading a conversation: messages, content parts, and the options of the chat template."""

from __future__ import annotations

from typing import Any

import msgspec

from parley.dialects.fields import Fields
from parley.dialects.openai import shared, tools
from parley.dialects.openai.shared import RULES, Rules
from parley.dialects.openai.tools import MAX_TOOLS
from parley.errors import Unsupported
from parley.types import Chat, Message, ToolCall

MAX_MESSAGES = 10_000
MAX_PARTS = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
THOUGHTS = {"thinking": "thinking"}
MEDIA = ("image_url", "input_audio", "file", "video_url", "audio_url", "image_embeds")

# The server itself passes these to the template; a client must not replace them.
RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
            "documents", "conversation", "tokenizer", "self"}  # fmt: skip


def conversation(body: Fields, rules: Rules = RULES) -> tuple[Chat, bool]:
    """Return the conversation, and whether its tools came as the deprecated ``functions``. Raises BadRequest."""
    messages = turns(body, "\n", rules.roles, loose=rules.bare, bare=rules.bare)
    wish = tools.read(body, rules)
    continue_final = body.boolean("continue_final_message", False)
    generation_prompt = body.boolean("add_generation_prompt", not continue_final)
    if continue_final and generation_prompt:
        raise body.fail("continue_final_message", "cannot be true together with 'add_generation_prompt'.")
    if continue_final and messages[-1].role != "assistant" and not rules.bare:
        raise body.fail("continue_final_message", "needs a last message of role 'assistant'.")
    chat = Chat(
        messages=messages,
        tools=wish.tools,
        choice=wish.choice,
        only=wish.only,
        allowed=wish.allowed,
        parallel=wish.parallel,
        thinking=body.boolean("enable_thinking", None),
        effort=body.string("reasoning_effort", None, allowed=EFFORTS),
        options=_options(body),
        add_generation_prompt=generation_prompt,
        continue_final=continue_final,
        special=body.boolean("add_special_tokens", False),
    )
    return chat, wish.legacy


def turns(
    body: Fields, joint: str, roles: tuple[str, ...], *, loose: bool = False, bare: bool = False
) -> list[Message]:
    """Return the messages, at least one. Raises BadRequest.

    ``joint`` separates the parts of a content that has several; ``roles`` are the valid ones, all if empty.
    ``loose``: a call's arguments may be an object, also as ``parameters``, and its result may omit the call's id.
    ``bare``: a message may have no content, and a plain string is valid as a content part.
    """
    messages = [_message(item, joint, roles, loose, bare) for item in body.objects("messages", cap=MAX_MESSAGES)]
    if not messages:
        raise body.empty("messages", "array") if body.has("messages") else body.missing("messages")
    return messages


def _options(body: Fields) -> dict[str, Any]:
    """Return the extra variables of the template."""
    options: dict[str, Any] = {}
    given = body.free("chat_template_kwargs")
    for key in given:
        if key in RESERVED or key.startswith("_"):
            raise body.fail("chat_template_kwargs", f"'{key[:40]}' cannot be set by a request.")
    if body.has("chat_template"):
        raise shared.unsupported(body, "chat_template", "A template of the request's own is")
    if body.has("documents"):
        options["documents"] = [_document(item) for item in body.objects("documents", cap=MAX_MESSAGES)]
    return options | given


def _document(item: Fields) -> dict[str, str]:
    """Return a document that the template may quote: a title, a text, or other members."""
    if any(len(name) > 64 for name in item.names):
        raise item.fail("title", "names of a document's members have at most 64 characters.")
    return {name: item.string(name, "") for name in item.names}


def _message(item: Fields, joint: str, roles: tuple[str, ...], loose: bool, bare: bool) -> Message:
    role = item.string("role", None, allowed=roles, cap=256)
    if role is None:
        raise item.missing("role")
    name = item.string("name", None, cap=256)
    content = _content(item, joint, bare)
    if role == "assistant":
        return _assistant(item, name, content, loose, bare)
    if content is None and not bare:
        raise item.missing("content")
    content = content or ""
    if role == "tool":
        call = item.string("tool_call_id", None, cap=256)
        if call is None and not loose:
            raise item.missing("tool_call_id")
        return Message("tool", content, name, tool_call_id=call)
    if role == "function":
        if name is None and not loose:
            raise item.missing("name")
        return Message("tool", content, name)
    return Message("system" if role == "developer" else role, content, name)


def _assistant(item: Fields, name: str | None, content: str | None, loose: bool, bare: bool) -> Message:
    calls = [_call(call, loose) for call in item.objects("tool_calls", cap=MAX_TOOLS)]
    legacy = item.object("function_call")
    if legacy is not None:
        calls.append(_function(legacy, "", loose))
    reasoning = item.string("reasoning", None)
    if reasoning is None:
        reasoning = item.string("reasoning_content", None)
    if content is None:
        content = item.string("refusal", None)
    if content is None and not calls and reasoning is None:
        if not bare:
            raise item.missing("content")
        content = ""
    return Message("assistant", content, name, reasoning, calls)


def _call(call: Fields, loose: bool) -> ToolCall:
    call.string("type", "function", allowed=("function",))
    id = call.string("id", None, cap=256)
    if id is None:
        raise call.missing("id")
    function = call.object("function")
    if function is None:
        raise call.missing("function")
    return _function(function, id, loose)


def _function(function: Fields, id: str, loose: bool) -> ToolCall:
    name = function.string("name", None, cap=256)
    if name is None:
        raise function.missing("name")
    member = "parameters" if loose and not function.has("arguments") else "arguments"
    if loose and isinstance(function.raw(member), dict):
        return ToolCall(id, name, msgspec.json.encode(function.free(member)).decode())
    return ToolCall(id, name, function.string(member, "{}"))


def _content(item: Fields, joint: str, bare: bool = False) -> str | None:
    """Return the content as one text; an array's parts are joined."""
    value = item.raw("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise item.mistyped("content", "a string or an array of content parts")
    if not bare:
        return joint.join(_part(part, PARTS) for part in item.objects("content", cap=MAX_PARTS))
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]
    item = item.without({"content"}).over({"content": parts})
    return joint.join(_part(part, PARTS | THOUGHTS) for part in item.objects("content", cap=MAX_PARTS))


def prediction(body: Fields) -> str:
    """Return the client's prediction of the answer, or "". Raises BadRequest."""
    wish = body.object("prediction")
    if wish is None:
        return ""
    wish.string("type", "content", allowed=("content",))
    content = _content(wish, "")
    if content is None:
        raise wish.missing("content")
    return content


def _part(part: Fields, members: dict[str, str]) -> str:
    """Return the text of a part. ``members``: the member that holds the text, by type of part."""
    kind = part.string("type", None)
    if kind is None:
        raise part.missing("type")
    if kind in MEDIA:
        raise Unsupported(
            f"'{part.path('type')}' is '{kind}', but this model reads text only.",
            field=part.path("type"),
            code="unsupported_value",
        )
    member = members.get(kind)
    if member is None:
        raise part.fail("type", f"got {kind[:40]!r}, but supported parts are 'text' and 'refusal'.")
    text = part.string(member, None)
    if text is None:
        raise part.missing(member)
    return text
