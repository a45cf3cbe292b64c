"""The documented members of each request, and strict checks beyond types and ranges.

Lenient rules allow all of it: other members, turns in any order, more functions, content in parts.
"""

from __future__ import annotations

from parley.dialects.databricks.shared import Rules, Tree, refuse_unknown
from parley.dialects.fields import Fields
from parley.dialects.openai import shared as openai
from parley.dialects.parameters import MAX_N

FREE: Tree = {}
FUNCTION: Tree = {"name": FREE, "description": FREE, "parameters": FREE, "strict": FREE}
CALL: Tree = {"id": FREE, "type": FREE, "function": {"name": FREE, "arguments": FREE}}
MESSAGE: Tree = {"role": FREE, "content": FREE, "name": FREE, "tool_calls": CALL, "tool_call_id": FREE}
CONTEXT: Tree = {"extra_params": FREE, "usage_context": FREE, "client_request_id": FREE, "model": FREE}
NUMBERS = ("max_tokens", "temperature", "top_p", "top_k", "n")
DRAWING: Tree = dict.fromkeys((*NUMBERS, "stream", "stream_options", "stop"), FREE)
CHAT: Tree = {
    "messages": MESSAGE,
    **DRAWING,
    "tools": {"type": FREE, "function": FUNCTION},
    "tool_choice": {"type": FREE, "function": {"name": FREE}},
    "response_format": {
        "type": FREE,
        "json_schema": {"name": FREE, "description": FREE, "schema": FREE, "strict": FREE},
    },
    "logprobs": FREE,
    "top_logprobs": FREE,
    "reasoning_effort": FREE,
    "thinking": {"type": FREE, "budget_tokens": FREE},
    **CONTEXT,
}
COMPLETION: Tree = {
    "prompt": FREE,
    **DRAWING,
    **dict.fromkeys(("error_behavior", "suffix", "echo", "use_raw_prompt"), FREE),
    **CONTEXT,
}
EMBEDDING: Tree = {"input": FREE, "instruction": FREE, "encoding_format": FREE, **CONTEXT}

EFFORTS = ("low", "medium", "high")
FOLLOWS = {  # roles, and the roles that may precede them; "" is the beginning
    "system": ("",),
    "user": ("", "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("calls", "tool"),
}
MAX_MESSAGES = 10_000
MAX_FIELD = 1024  # characters of the client's own id


def known(body: Fields, tree: Tree) -> None:
    """Raise Malformed for an undocumented member."""
    refuse_unknown({name: body.raw(name) for name in body.names}, tree)


def drawing(body: Fields) -> None:
    """Check the documented ranges that are narrower than the server's, and ``n`` in a stream. Raises BadRequest."""
    body.number("top_p", 1.0, 0, 1, open=True)
    body.integer("top_k", None, 1, openai.MAX_ID)
    if body.integer("n", 1, 1, MAX_N) > 1 and body.boolean("stream", False):
        raise body.fail("n", "must be equal to 1 for streaming mode")


def context(body: Fields) -> None:
    """Check the client's information about itself, which has no effect on the answer. Raises BadRequest."""
    body.free("extra_params")
    body.free("usage_context")
    body.string("client_request_id", None, cap=MAX_FIELD)


def thinking(body: Fields) -> tuple[Fields, int | None]:
    """Return the body with ``thinking`` as a template option, and the budget of reasoning tokens. Raises BadRequest."""
    wish = body.object("thinking")
    if wish is None:
        return body, None
    kind = wish.string("type", None, allowed=("enabled", "disabled"))
    if kind is None:
        raise wish.missing("type")
    budget = wish.integer("budget_tokens", None, 1, openai.MAX_TOKENS)
    if kind == "disabled":
        return body.over({"enable_thinking": False}), None
    if budget is None:
        raise wish.missing("budget_tokens")
    most = body.integer("max_tokens", None, 1, openai.MAX_TOKENS)
    if most is not None and budget >= most:
        raise wish.fail("budget_tokens", f"must be less than max_tokens, which is {most}, but got {budget}")
    return body.over({"enable_thinking": True}), budget


def chat(body: Fields, rules: Rules) -> None:
    """Check a conversation by strict rules. Raises BadRequest."""
    known(body, CHAT)
    drawing(body)
    body.string("reasoning_effort", None, allowed=EFFORTS)
    _turns(body)
    tools = list(body.objects("tools", cap=rules.functions))
    for tool in tools:
        _tool(tool, rules)
    if body.has("tool_choice") and not tools and body.raw("tool_choice") != "none":
        raise body.fail("tool_choice", 'can only be used together with "tools"')


def _turns(body: Fields) -> None:
    """Check that turns alternate and end with a user's turn or a tool's result. Raises BadRequest."""
    before = ""
    for item in body.objects("messages", cap=MAX_MESSAGES):
        role = item.string("role", None, allowed=tuple(FOLLOWS))
        if role is None:
            raise item.missing("role")
        if before not in FOLLOWS[role]:
            raise item.fail("role", f'must not be "{role}" {_behind(before)}')
        content = item.string("content", None)
        if role == "assistant" and item.has("tool_calls"):
            if content:
                raise item.fail("content", 'must not be used together with "tool_calls"')
            role = "calls"
        elif item.has("tool_calls"):
            raise item.fail("tool_calls", 'is only for messages with role "assistant"')
        answered = item.string("tool_call_id", None)
        if answered and role != "tool":
            raise item.fail("tool_call_id", 'is only for messages with role "tool"')
        before = role
    if before not in ("user", "tool", ""):
        raise body.fail("messages", 'must end with a message of role "user"')


def _behind(role: str) -> str:
    return f'after "{role.replace("calls", "assistant")}"' if role else "at the beginning"


def _tool(tool: Fields, rules: Rules) -> None:
    function = tool.object("function")
    if function is None:
        raise tool.missing("function")
    for name in ("name", "description"):
        if function.string(name, None) is None:
            raise function.missing(name)
    keys = function.free("parameters").get("properties")
    if rules.keys is not None and isinstance(keys, dict) and len(keys) > rules.keys:
        raise function.fail("parameters", f"must have at most {rules.keys} keys in properties, but has {len(keys)}")
    function.boolean("strict", None)
