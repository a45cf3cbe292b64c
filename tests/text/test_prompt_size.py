"""The estimated size of prompts, by which the work on large ones leaves the event loop."""

from __future__ import annotations

import pytest

from parley.text.prompt_size import exceeds_size
from parley.types import ChatPrompt, JoinedPrompt, Message, TextPair, TextPrompt, TokensPrompt, ToolCall

TEXT = "a" * 1000


def chat(*messages: Message, **members: object) -> ChatPrompt:
    return ChatPrompt(messages=[Message("user", "hi"), *messages], **members)


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt(TEXT),
        TextPrompt("", suffix=TEXT),
        TextPair(TextPrompt("a"), TextPrompt(TEXT)),
        JoinedPrompt([TextPrompt("a"), TextPrompt(TEXT)]),
        JoinedPrompt([TokensPrompt([1] * 1000), TextPrompt("a")]),
        chat(Message("user", TEXT)),
        chat(Message("assistant", None, reasoning=TEXT)),
        chat(Message("user", "a", name=TEXT)),
        chat(Message("assistant", None, tool_calls=[ToolCall("1", "f", TEXT)])),
        chat(Message("assistant", None, tool_calls=[ToolCall("1", "f", "{}")] * 100)),
        chat(tools=[{"type": "function", "function": {"name": "f", "description": TEXT}}]),
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"properties": {TEXT: {}}}}}]),
        chat(options={"documents": [{"data": {"rows": [0] * 200}}]}),
        chat(*[Message("user", "")] * 20),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_everything_that_a_template_may_write_counts(prompt):
    assert exceeds_size([prompt], 900)
    assert not exceeds_size([prompt], 4000)
    assert exceeds_size([prompt] * 5, 3600)


def test_token_ids_and_short_conversations_do_not_exceed():
    assert not exceeds_size(
        [TokensPrompt([1] * 100_000), chat(tools=[{"type": "function", "function": {"name": "f"}}])], 500
    )


def test_counting_ends_at_the_limit():
    options: dict[str, object] = {"numbers": range}  # of no countable type
    nested: object = "a"
    for _ in range(5000):  # deeper than a recursion may go
        nested = [nested]
    assert exceeds_size([chat(options=options | {"nested": nested})], 1000)
