"""Tool-call grammars: any text that a model writes under one parses back into calls that follow the tools' schemas."""

from __future__ import annotations

import functools
import json
import random
import re
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from parley.demo import folder
from parley.errors import Invalid
from parley.text import Markup, Tokenizer, detect
from parley.text.grammar.lark import Lark
from parley.text.grammar.limits import SIZE
from parley.text.grammar.tool_grammar import calls_grammar
from parley.text.parsing.calls import Tools
from parley.text.parsing.calls.tools import part
from parley.text.parsing.families import CALLS, Calls
from parley.text.parsing.harmony_parser import reader

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 30},
        "units": {"enum": ["c", "f"]},
        "code": {"type": "string", "pattern": "^([A-Z]|no)\\d/[^$<]$"},
        "word": {"type": "string", "pattern": "[xyz]+", "maxLength": 5},
        "where": {"$ref": "#/$defs/place"},
        "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "who": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 4},
                "age": {"type": ["integer", "null"]},
            },
            "required": ["age"],
            "additionalProperties": False,
        },
        "few": {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
Tooling = list[dict[str, Any]]
TOOLS: Tooling = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY, "strict": True}},
    {
        "type": "function",
        "function": {"name": "go-on", "parameters": {"type": "object", "additionalProperties": False}},
    },
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"get_weather": CITY, "go-on": {"type": "object"}, "now": {"type": "object"}}

SEEDS = 2  # random walks in each test
LONG = 300  # a walk of this many tokens is given up
rows = pytest.mark.parametrize("row", CALLS, ids=lambda row: row.name)


@functools.cache
def tokenizer(marked: bool) -> Tokenizer:
    """Return the built-in model's tokenizer; ``marked`` adds all families' marks to its special tokens."""
    made = Tokenizer.load(folder())
    if not marked:
        return made
    marks = {mark for row in CALLS for mark in detect("", row.name, "none").marks}
    found = sorted(
        {
            part
            for mark in marks
            for part in re.findall(r"<[|｜]?[^<>=\s/]+[^<>=\s]*>|\[/?[A-Z_]+\]|\]<\]\w+\[>\[", mark)
        }
    )
    made.backend.add_special_tokens([AddedToken(mark, special=True) for mark in found])
    return Tokenizer(made.backend, made.names, made.eos_ids)


@functools.cache
def vocabulary(marked: bool) -> LLTokenizer:
    return LLTokenizer(tokenizer(marked).backend.to_str(), eos_token=sorted(tokenizer(marked).eos_ids))


def spell(
    row: Calls, marked: bool, parallel: bool, required: bool, only: str | None = None, tools: Tooling = TOOLS
) -> str:
    markup, lark = detect("", row.name, "none"), Lark(tokenizer(marked).marks)
    return calls_grammar(markup, lark, tools, parallel=parallel, required=required, only=only)


@rows
def test_self_referencing_tool_schema_compiles_or_is_refused(row: Calls) -> None:
    def written(width: int) -> str:
        node = {"type": "object", "properties": {f"p{number}": {"$ref": "#"} for number in range(width)}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": node}}]
        return calls_grammar(detect("", row.name, "none"), Lark({}), tools, parallel=False, required=True)

    assert not LLMatcher.validate_grammar(written(5), vocabulary(False))
    with suppress(Invalid):
        assert len(written(300)) <= SIZE


CIRCLE = {"anyOf": [{"$ref": "#/$defs/circle"}] * 40, "oneOf": [{"$ref": "#"}] * 40}
ODD = [
    {"$ref": "#"},
    {"$ref": "#/$defs/circle", "$defs": {"circle": CIRCLE}},
    {"properties": {"a": CIRCLE, "b": {"type": "array", "items": CIRCLE}}, "$defs": {"circle": CIRCLE}},
    {"properties": {"a": True}, "required": [["a"], {}]},
    {"properties": {"a": {"properties": {"b": {}}, "type": "object", "required": 7}}},
    {"properties": {"a": {"type": "array", "minItems": "2", "maxItems": [3]}}},
    {"properties": {"a": {"type": "string", "minLength": "2", "maxLength": {}}}},
]


@rows
def test_malformed_tool_schema_compiles_or_is_refused(row: Calls) -> None:
    """Self-references and members of the wrong type must end in a grammar or a refusal, never in a loop or a crash."""
    for schema in ODD:
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
        with suppress(Invalid):
            calls_grammar(detect("", row.name, "none"), Lark({}), tools, parallel=False, required=True)
        known = Tools(tools)
        assert known.kinds("f", "a") <= {"array", "object", "string"}
        assert part(known.schema("f"), known.schema("f"), "none") is None


def walk(marked: bool, grammar: str, seed: int, start: str = "") -> str:
    """Return a random text that begins with ``start`` and follows the grammar; empty if the walk became too long."""
    assert not LLMatcher.validate_grammar(grammar, vocabulary(marked))
    draw = random.Random(seed)
    matcher = LLMatcher(vocabulary(marked), grammar)
    ends = tokenizer(marked).eos_ids
    ids = tokenizer(marked).encode(start, special=False)
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
    return tokenizer(marked).decode(ids, skip_special=False) if len(ids) < LONG else ""


def read(row: Calls, text: str, tools: Tooling = TOOLS) -> tuple[str, list[tuple[str, str]]]:
    regions = reader(detect("", row.name, "none"), False, Tools(tools))
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
def test_required_call_parses_back(row: Calls, parallel: bool) -> None:
    marked = parallel
    grammar = spell(row, marked, parallel, True)
    for seed in range(SEEDS):
        text = walk(marked, grammar, seed)
        if not text:
            continue
        content, calls = read(row, text)
        assert not content.strip() and calls and (parallel or len(calls) == 1), text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@rows
def test_named_tool_choice_allows_only_that_function(row: Calls) -> None:
    grammar = spell(row, True, False, True, "go-on")
    assert read(row, walk(True, grammar, 0)) == ("", [("go-on", "{}")])


@rows
@pytest.mark.parametrize("marked", [False, True])
def test_call_begun_in_free_text_parses_back(row: Calls, marked: bool) -> None:
    grammar = spell(row, marked, True, False)
    first = row.forms[0].bare or row.channels
    for seed, before in enumerate(("",) if first else ("", "Let me see: { <[")):
        text = walk(marked, grammar, seed, before + row.forms[0].trigger)
        content, calls = read(row, text)
        assert not text or (calls and content.startswith(before)), text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    plain = "<|channel|>final<|message|>Just text." if row.channels else "Just text."
    assert LLMatcher(vocabulary(marked), grammar).consume_tokens(tokenizer(marked).encode(plain, special=False))


@pytest.mark.parametrize(("stated", "fits"), [("number", True), ("null", False)])
def test_stated_argument_type_must_match_value(stated: str, fits: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, "1", None]}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    (row,) = [row for row in CALLS if row.name == "kimi_k3"]
    grammar = spell(row, True, False, True, tools=tools)
    text = f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="{stated}"<|sep|>1'
    assert LLMatcher(vocabulary(True), grammar).consume_tokens(tokenizer(True).encode(text, special=False)) == fits


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
REFERRING = {
    "type": "object",
    "properties": {
        "at": POINT,
        "few": {"type": "array", "items": {"$ref": "#/properties/at"}, "maxItems": 1},
        "or": {"anyOf": [{"$ref": "#/properties/at"}, {"type": "null"}]},
        "x": {"$ref": "#/properties/at/properties/x"},
        "by-name": {"type": "object", "additionalProperties": {"$ref": "#/properties/at"}},
        "none": {"type": "array", "maxItems": 0},
        "more": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    },
    "required": ["x"],
    "additionalProperties": False,
}
SHAPES = {row.forms[0].shape: row for row in CALLS}


@pytest.mark.parametrize("row", SHAPES.values(), ids=SHAPES)
def test_tool_schema_parts_may_refer_to_whole_schema(row: Calls) -> None:
    name = "mcp.map-v1.add"
    tools: Tooling = [{"type": "function", "function": {"name": name, "parameters": REFERRING, "strict": True}}]
    grammar = spell(row, True, False, True, tools=tools)
    for seed in range(4):
        if text := walk(True, grammar, seed):
            content, ((called, arguments),) = read(row, text, tools)
            assert not content and called == name
            jsonschema.validate(json.loads(arguments), REFERRING)


def test_grammar_of_500_tools_fits_size_limit() -> None:
    """The grammar writes common parts of the tools once; otherwise it would pass the size limit."""
    tools: Tooling = [{"type": "function", "function": {"name": f"tool_{number}.v-1"}} for number in range(500)]
    for row in CALLS:
        assert len(spell(row, False, True, True, tools=tools)) <= SIZE
    strict = [{"type": "function", "function": {**tool["function"], "parameters": POINT}} for tool in tools]
    assert len(spell(next(row for row in CALLS if row.name == "qwen3_coder"), False, True, True, tools=strict)) <= SIZE


def test_call_grammar_refuses_unknown_function_or_markup() -> None:
    with pytest.raises(Invalid, match="not among the tools"):
        spell(CALLS[-1], False, True, True, "absent")
    with pytest.raises(Invalid, match="no form of tool calls"):
        calls_grammar(Markup(), Lark({}), TOOLS, parallel=True, required=True)
