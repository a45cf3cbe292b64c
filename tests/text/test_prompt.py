"""Prompts of every kind become token ids, together with what is known of how the answer is written."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tiny_tokenizers import byte_level

from parley.demo.template import CHAT_TEMPLATE
from parley.errors import BadRequest
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


def test_no_template_is_the_clients_mistake() -> None:
    with pytest.raises(BadRequest):
        Language(byte_level(), ChatTemplate({})).prepare(Chat(QUESTION))


def test_neither_torch_nor_transformers_is_loaded() -> None:
    script = "import sys, parley.text; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
