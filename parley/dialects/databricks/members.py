"""The documented members of each request, and strict checks beyond types and ranges.

Lenient rules allow all of it: other members, turns in any order, more functions, content in parts.
"""

from __future__ import annotations

from parley.dialects.databricks.api_rules import DatabricksRules
from parley.dialects.databricks.refusal_wording import MemberTree, refuse_unknown_members
from parley.dialects.fields import Fields
from parley.dialects.openai.common_members import MAX_TOKENS
from parley.dialects.openai.messages import MAX_CONTENT_PARTS
from parley.dialects.request_context import RequestContext
from parley.dialects.sampling_members import MAX_CHOICES_PER_PROMPT, MAX_TOKEN_ID

ANY_VALUE: MemberTree = {}
FUNCTION_TREE: MemberTree = {"name": ANY_VALUE, "description": ANY_VALUE, "parameters": ANY_VALUE, "strict": ANY_VALUE}
TOOL_CALL_TREE: MemberTree = {
    "id": ANY_VALUE,
    "type": ANY_VALUE,
    "function": {"name": ANY_VALUE, "arguments": ANY_VALUE},
}
MESSAGE_TREE: MemberTree = {
    "role": ANY_VALUE,
    "content": ANY_VALUE,
    "name": ANY_VALUE,
    "tool_calls": TOOL_CALL_TREE,
    "tool_call_id": ANY_VALUE,
}
CONTEXT_TREE: MemberTree = {
    "extra_params": ANY_VALUE,
    "usage_context": ANY_VALUE,
    "client_request_id": ANY_VALUE,
    "model": ANY_VALUE,
}
SAMPLING_NUMBERS = ("max_tokens", "temperature", "top_p", "top_k", "n")
SAMPLING_TREE: MemberTree = dict.fromkeys((*SAMPLING_NUMBERS, "stream", "stream_options", "stop"), ANY_VALUE)
CHAT_TREE: MemberTree = {
    "messages": MESSAGE_TREE,
    **SAMPLING_TREE,
    "tools": {"type": ANY_VALUE, "function": FUNCTION_TREE},
    "tool_choice": {"type": ANY_VALUE, "function": {"name": ANY_VALUE}},
    "response_format": {
        "type": ANY_VALUE,
        "json_schema": {"name": ANY_VALUE, "description": ANY_VALUE, "schema": ANY_VALUE, "strict": ANY_VALUE},
    },
    "logprobs": ANY_VALUE,
    "top_logprobs": ANY_VALUE,
    "reasoning_effort": ANY_VALUE,
    "thinking": {"type": ANY_VALUE, "budget_tokens": ANY_VALUE},
    **CONTEXT_TREE,
}
COMPLETION_TREE: MemberTree = {
    "prompt": ANY_VALUE,
    **SAMPLING_TREE,
    **dict.fromkeys(("error_behavior", "suffix", "echo", "use_raw_prompt"), ANY_VALUE),
    **CONTEXT_TREE,
}
EMBEDDING_TREE: MemberTree = {
    "input": ANY_VALUE,
    "instruction": ANY_VALUE,
    "encoding_format": ANY_VALUE,
    **CONTEXT_TREE,
}

PART_TYPES = ("text", "image_url", "audio_url", "video_url")  # of a content
REASONING_EFFORTS = ("low", "medium", "high")
ALLOWED_PREDECESSORS = {  # roles, and the roles that may precede them; "" is the beginning
    "system": ("",),
    "user": ("", "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("calls", "tool"),
}
MAX_MESSAGES = 10_000
MAX_CLIENT_ID = 1024  # characters of the client's own id


def check_databricks_members(body: Fields, tree: MemberTree) -> None:
    """Raise MalformedBody for an undocumented member."""
    refuse_unknown_members({name: body.raw_value(name) for name in body.member_names}, tree)


def check_sampling_ranges(body: Fields) -> None:
    """Check the documented ranges that are narrower than the server's, and ``n`` in a stream. Raises BadRequest."""
    body.number("top_p", 1.0, 0, 1, low_excluded=True)
    body.integer("top_k", None, 1, MAX_TOKEN_ID)
    if body.integer("n", 1, 1, MAX_CHOICES_PER_PROMPT) > 1 and body.boolean("stream", False):
        raise body.member_error("n", "must be equal to 1 for streaming mode")


def check_client_information(body: Fields) -> None:
    """Check the client's information about itself, which has no effect on the answer. Raises BadRequest."""
    body.free_object("extra_params")
    body.free_object("usage_context")
    body.string("client_request_id", None, cap=MAX_CLIENT_ID)


def read_databricks_thinking(body: Fields) -> tuple[Fields, int | None]:
    """Return the body with ``thinking`` as a template option, and the budget of reasoning tokens. Raises BadRequest."""
    thinking_object = body.object("thinking")
    if thinking_object is None:
        return body, None
    kind = thinking_object.string("type", None, allowed=("enabled", "disabled"))
    if kind is None:
        raise thinking_object.missing_member("type")
    budget = thinking_object.integer("budget_tokens", None, 1, MAX_TOKENS)
    if kind == "disabled":
        return body.with_defaults({"enable_thinking": False}), None
    if budget is None:
        raise thinking_object.missing_member("budget_tokens")
    max_tokens = body.integer("max_tokens", None, 1, MAX_TOKENS)
    if max_tokens is not None and budget >= max_tokens:
        raise thinking_object.member_error(
            "budget_tokens", f"must be less than max_tokens, which is {max_tokens}, but got {budget}"
        )
    return body.with_defaults({"enable_thinking": True}), budget


def wants_usage(body: Fields, stream: bool) -> bool:
    """Return whether chunks report the usage: yes, unless the client turns it off. Raises BadRequest."""
    options = body.object("stream_options")
    if options is None:
        return True
    if not stream:
        raise body.member_error("stream_options", "is only allowed when 'stream' is true")
    return options.boolean("include_usage", True)


def check_strict_chat(body: Fields, rules: DatabricksRules, context: RequestContext) -> None:
    """Check a conversation by strict rules. Raises BadRequest."""
    check_databricks_members(body, CHAT_TREE)
    check_sampling_ranges(body)
    body.string("reasoning_effort", None, allowed=REASONING_EFFORTS)
    _check_turns(body, takes_parts=bool(context.media_limits))
    tools = list(body.objects("tools", cap=rules.max_functions))
    for tool in tools:
        _check_tool(tool, rules)
    if body.has_value("tool_choice") and not tools and body.raw_value("tool_choice") != "none":
        raise body.member_error("tool_choice", 'can only be used together with "tools"')


def _check_turns(body: Fields, *, takes_parts: bool) -> None:
    """Check that turns alternate and end with a user's turn or a tool's result. Raises BadRequest.

    ``takes_parts``: a content may be an array of parts, for models that read more than text.
    """
    previous_role = ""
    for item in body.objects("messages", cap=MAX_MESSAGES):
        role = item.string("role", None, allowed=tuple(ALLOWED_PREDECESSORS))
        if role is None:
            raise item.missing_member("role")
        if previous_role not in ALLOWED_PREDECESSORS[role]:
            raise item.member_error("role", f'must not be "{role}" {_position_after(previous_role)}')
        content = item.raw_value("content")
        if takes_parts and isinstance(content, list):
            _check_parts(item)
        else:
            content = item.string("content", None)
        if role == "assistant" and item.has_value("tool_calls"):
            if content:
                raise item.member_error("content", 'must not be used together with "tool_calls"')
            role = "calls"
        elif item.has_value("tool_calls"):
            raise item.member_error("tool_calls", 'is only for messages with role "assistant"')
        tool_call_id = item.string("tool_call_id", None)
        if tool_call_id and role != "tool":
            raise item.member_error("tool_call_id", 'is only for messages with role "tool"')
        previous_role = role
    if previous_role not in ("user", "tool", ""):
        raise body.member_error("messages", 'must end with a message of role "user"')


def _check_parts(item: Fields) -> None:
    for part in item.objects("content", cap=MAX_CONTENT_PARTS):
        if part.string("type", None, allowed=PART_TYPES) is None:
            raise part.missing_member("type")


def _position_after(role: str) -> str:
    return f'after "{role.replace("calls", "assistant")}"' if role else "at the beginning"


def _check_tool(tool: Fields, rules: DatabricksRules) -> None:
    function = tool.object("function")
    if function is None:
        raise tool.missing_member("function")
    for name in ("name", "description"):
        if function.string(name, None) is None:
            raise function.missing_member(name)
    keys = function.free_object("parameters").get("properties")
    if rules.max_keys is not None and isinstance(keys, dict) and len(keys) > rules.max_keys:
        raise function.member_error(
            "parameters", f"must have at most {rules.max_keys} keys in properties, but has {len(keys)}"
        )
    function.boolean("strict", None)
