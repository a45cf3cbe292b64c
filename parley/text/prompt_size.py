"""Estimates how long a prompt takes to render and to encode, from the sizes of all that its template may write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from parley.types import ChatPrompt, JoinedPrompt, Prompt, TextPair, TextPrompt, TokensPrompt

MESSAGE_CHARACTERS = 64  # that a message counts besides its texts
VALUE_CHARACTERS = 8  # that a value counts within an array or object


def exceeds_size(prompts: Iterable[Prompt], limit: int) -> bool:
    """Whether prompts have more than roughly ``limit`` characters of text, with tools, calls and template options.

    Token ids count as in ``text_characters``. Takes no longer than ``limit`` allows, however large the prompts are.
    """
    remaining = limit
    for prompt in prompts:
        remaining -= text_characters(prompt)
        if isinstance(prompt, ChatPrompt):
            remaining -= MESSAGE_CHARACTERS * len(prompt.messages)
            if remaining >= 0 and (values := _further_values(prompt)):
                remaining -= _characters_within(values, remaining)
        if remaining < 0:
            return True
    return False


def text_characters(prompt: Prompt) -> int:
    """Return how many characters of text a prompt has; 0 for token ids.

    Those of a joined prompt count as characters: one part may be in many prompts, and each of them copies it.
    """
    if isinstance(prompt, ChatPrompt):
        return sum(len(message.content or "") for message in prompt.messages)
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) + len(prompt.suffix)
    if isinstance(prompt, TextPair):
        return text_characters(prompt.first) + text_characters(prompt.second)
    if isinstance(prompt, JoinedPrompt):
        return sum(len(part.ids) if isinstance(part, TokensPrompt) else text_characters(part) for part in prompt.parts)
    return 0


def _further_values(chat: ChatPrompt) -> list[Any]:
    """Return the values that a template may write in addition to message contents."""
    values: list[Any] = [value for value in (chat.tools, chat.options) if value]
    for message in chat.messages:
        if message.name or message.reasoning or message.tool_calls:
            values += (message.name, message.reasoning)
            values += (text for call in message.tool_calls for text in (call.name, call.arguments))
    return values


def _characters_within(values: list[Any], limit: int) -> int:
    """Return the characters of values of any depth, names of members included, or any number above ``limit``."""
    size = 0
    waiting = [values]
    while waiting and size <= limit:
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict):
            size += VALUE_CHARACTERS * len(value)
            if size <= limit:
                waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            size += VALUE_CHARACTERS * len(value)
            if size <= limit:
                waiting += value
    return size
