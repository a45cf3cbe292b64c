"""Prompts of every kind become token ids, together with what is known of how the answer is written."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tiny_tokenizers import byte_level, word_level

from parley.demo.template import CHAT_TEMPLATE
from parley.errors import BadRequest, ContextLength
from parley.text import ChatTemplate, Language
from parley.types import Chat, Message, Text, Tokens

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
QUESTION = [Message("user", "Why?")]


def language(source: str = CHAT_TEMPLATE) -> Language:
    tokenizer = byte_level()
    return Language(tokenizer, ChatTemplate({"default": source}, tokenizer.names))


def test_plain_prompts() -> None:
    tokenizer = byte_level()
    for special in (True, False):
        prepared = language().prepare(Text("<s>Paris", special))
        assert prepared.token_ids == tokenizer.encode("<s>Paris", special) and prepared.markup.marks == ()
    assert language().prepare(Tokens([3, 1, 2])).token_ids == [3, 1, 2]


def test_a_chat_is_rendered_and_encoded_without_further_marks() -> None:
    speaker = language()
    chat = Chat(QUESTION)
    prepared = speaker.prepare(chat)
    assert byte_level().decode(prepared.token_ids, skip_special=False) == speaker.template.render(chat)
    assert prepared.markup.think and prepared.markup.call is None and not prepared.thinking
    assert speaker.prepare(Chat(QUESTION, tools=[TOOL])).markup.call


def test_a_prompt_that_opens_the_reasoning_block() -> None:
    speaker = language("{{ messages[0].content }}<assistant><think>\n{# </think> #}")
    assert speaker.prepare(Chat(QUESTION)).thinking
    begun = Chat([*QUESTION, Message("assistant", "<think>\nLet me")], continue_final=True)
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# <think> #}"
    assert language(source).prepare(begun).thinking


def test_a_hopelessly_long_text_is_refused_before_it_is_read() -> None:
    speaker = language()
    tokenizer = speaker.tokenizer
    read: list[int] = []
    encode = tokenizer.encode

    def spy(text: str, special: bool = True) -> list[int]:
        read.append(len(text))
        return encode(text, special)

    tokenizer.encode = spy  # type: ignore[method-assign]
    try:
        for prompt in (Text("word " * 100_000), Chat([Message("user", "x" * 500_000)])):
            with pytest.raises(ContextLength, match="maximum context length is 100 tokens"):
                speaker.prepare(prompt, 100)
        assert max(read) < 10_000
    finally:
        del tokenizer.encode


@pytest.mark.parametrize("text", ["", "Paris " * 20, "Paris" + " " * 100_000 + "Tokyo"])
def test_a_long_text_of_few_tokens_is_not_refused(text: str) -> None:
    speaker = Language(word_level(), ChatTemplate({}))
    assert speaker.prepare(Text(text), 10).token_ids == word_level().encode(text)


def test_no_template_is_the_clients_mistake() -> None:
    with pytest.raises(BadRequest):
        Language(byte_level(), ChatTemplate({})).prepare(Chat(QUESTION))


def test_neither_torch_nor_transformers_is_loaded() -> None:
    script = "import sys, parley.text; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
