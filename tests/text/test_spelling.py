"""Grammars of calls: whatever a model writes under one is read back as calls that follow the tools' schemas."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from parley.demo import folder
from parley.errors import Invalid
from parley.text import Language, Markup, detect
from parley.text.calls import Tools
from parley.text.channels import reader
from parley.text.families import CALLS, Calls
from parley.text.spelling import calls_grammar

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 30},
        "units": {"enum": ["c", "f"]},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY, "strict": True}},
    {
        "type": "function",
        "function": {"name": "go-on", "parameters": {"type": "object", "additionalProperties": False}},
    },
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"get_weather": CITY, "go-on": {"type": "object"}, "now": {"type": "object"}}

LONG = 300  # tokens after which a walk is given up
rows = pytest.mark.parametrize("row", CALLS, ids=lambda row: row.name)


@pytest.fixture(scope="module")
def language() -> Language:
    return Language.load(folder())


@pytest.fixture(scope="module")
def vocabulary(language: Language) -> LLTokenizer:
    return LLTokenizer(language.tokenizer.backend.to_str(), eos_token=sorted(language.tokenizer.eos_ids))


def spell(language: Language, row: Calls, parallel: bool, required: bool, only: str | None = None) -> str:
    markup, special = detect("", row.name, "none"), language.tokenizer.marks
    return calls_grammar(markup, TOOLS, parallel=parallel, required=required, only=only, special=special)


def walk(language: Language, vocabulary: LLTokenizer, grammar: str, seed: int, start: str = "") -> str:
    """A text that the grammar allows, its tokens drawn at random behind ``start``; whole unless it became too long."""
    assert not LLMatcher.validate_grammar(grammar, vocabulary)
    draw = random.Random(seed)
    matcher = LLMatcher(vocabulary, grammar)
    ends = language.tokenizer.eos_ids
    ids = language.tokenizer.encode(start, special=False)
    assert matcher.consume_tokens(ids)
    while len(ids) < LONG and not matcher.is_stopped():
        allowed = matcher.compute_logit_bias()
        if matcher.is_accepting() and draw.random() < 0.3:
            break
        id = next((id for id in draw.choices(range(len(allowed)), k=20) if allowed[id]), None)
        if id is None:
            id = draw.choice([id for id, bias in enumerate(allowed) if bias])
        if id in ends:
            break
        ids.append(id)
        assert matcher.consume_token(id)
    assert matcher.is_accepting() or len(ids) == LONG
    return language.tokenizer.decode(ids, skip_special=False) if len(ids) < LONG else ""


def read(row: Calls, text: str) -> tuple[str, list[tuple[str, str]]]:
    regions = reader(detect("", row.name, "none"), False, Tools(TOOLS))
    content, calls = "", []
    for _, piece, call in regions.push(text) + regions.flush():
        content += piece
        if call is not None and call.name is not None:
            calls.append([call.name, ""])
        elif call is not None:
            calls[-1][1] += call.arguments
    return content, [(name, arguments) for name, arguments in calls]


@rows
@pytest.mark.parametrize("parallel", [False, True])
def test_a_required_call_is_read_back(language: Language, vocabulary: LLTokenizer, row: Calls, parallel: bool) -> None:
    grammar = spell(language, row, parallel, True)
    for seed in range(4):
        text = walk(language, vocabulary, grammar, seed)
        if not text:
            continue
        content, calls = read(row, text)
        assert not content.strip() and calls and (parallel or len(calls) == 1), text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@rows
def test_one_function_alone_can_be_asked_for(language: Language, vocabulary: LLTokenizer, row: Calls) -> None:
    grammar = spell(language, row, False, True, "go-on")
    assert read(row, walk(language, vocabulary, grammar, 0)) == ("", [("go-on", "{}")])


@rows
def test_a_call_that_begins_in_free_text_becomes_one(language: Language, vocabulary: LLTokenizer, row: Calls) -> None:
    grammar = spell(language, row, True, False)
    first = row.forms[0].bare or row.channels
    for seed, before in enumerate(("",) if first else ("", "Let me see", "{ <[")):
        text = walk(language, vocabulary, grammar, seed, before + row.forms[0].trigger)
        content, calls = read(row, text)
        assert not text or (calls and content.startswith(before)), text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    plain = "<|channel|>final<|message|>Just text." if row.channels else "Just text."
    assert LLMatcher(vocabulary, grammar).consume_tokens(language.tokenizer.encode(plain, special=False))


def test_what_cannot_be_called(language: Language) -> None:
    with pytest.raises(Invalid, match="not among the tools"):
        spell(language, CALLS[-1], True, True, "absent")
    with pytest.raises(Invalid, match="no form of tool calls"):
        calls_grammar(Markup(), TOOLS, parallel=True, required=True, special={})
