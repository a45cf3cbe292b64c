"""Mistral's members of a body, where OpenAI has others for the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parley.dialects.fields import Fields

SDK_AGENT = b"mistral-client-"  # its SDKs' user agents, before the language


def with_openai_members(body: Fields) -> Fields:
    """Return the body of a chat with OpenAI's members in place of Mistral's: ``random_seed``, the tool choice ``any``,
    and ``prefix`` of a last message that the model continues. Raises BadRequest."""
    changes: dict[str, Any] = {}
    if body.raw_value("tool_choice") == "any":
        changes["tool_choice"] = "required"
    messages = body.raw_value("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and "prefix" in last:
        path = f"messages[{len(messages) - 1}]"
        if Fields(last, path).boolean("prefix", False) and not body.has_value("continue_final_message"):
            changes["continue_final_message"] = True
    return with_openai_seed(body.with_members(changes) if changes else body)


def takes_whole_calls(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the client is Mistral's SDK, for which every piece of a streamed call has a name: Mistral streams calls
    whole."""
    return headers.get(b"user-agent", b"").startswith(SDK_AGENT)


def with_openai_seed(body: Fields) -> Fields:
    """Return a body with ``random_seed`` as ``seed``, unless it has one. Raises BadRequest."""
    if not body.has_value("random_seed") or body.has_value("seed"):
        return body
    return body.with_members({"seed": body.integer("random_seed", None, 0)})
