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

from parley.demo import model_folder
from parley.dialects.openai.responses.client_tools import CLIENT_TOOLS
from parley.errors import InvalidValue
from parley.text.grammar.lark import LarkWriter
from parley.text.grammar.limits import MAX_GRAMMAR_CHARS
from parley.text.grammar.tool_grammar import tool_calls_grammar
from parley.text.parsing.call_families import CALLS
from parley.text.parsing.call_forms import CallFamily
from parley.text.parsing.calls import RequestTools
from parley.text.parsing.calls.tools import member_schema
from parley.text.parsing.harmony_parser import make_output_parser
from parley.text.parsing.markup import Markup, detect_markup
from parley.text.tokens.tokenizer import Tokenizer

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
ToolList = list[dict[str, Any]]
TOOLS: ToolList = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY, "strict": True}},
    {
        "type": "function",
        "function": {"name": "go-on", "parameters": {"type": "object", "additionalProperties": False}},
    },
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"get_weather": CITY, "go-on": {"type": "object"}, "now": {"type": "object"}}

WALKS_PER_TEST = 2  # random walks in each test
MAX_WALK_TOKENS = 300  # a walk of this many tokens is given up
each_family = pytest.mark.parametrize("row", CALLS, ids=lambda row: row.name)


@functools.cache
def demo_tokenizer(marked: bool) -> Tokenizer:
    """Return the built-in model's tokenizer; ``marked`` adds all families' marks to its special tokens."""
    loaded = Tokenizer.from_folder(model_folder())
    if not marked:
        return loaded
    marks = {mark for row in CALLS for mark in detect_markup("", row.name, "none").all_marks}
    bracketed_marks = sorted(
        {
            part
            for mark in marks
            for part in re.findall(r"<[|｜]?[^<>=\s/]+[^<>=\s]*>|\[/?[A-Z_]+\]|\]<\]\w+\[>\[", mark)
        }
    )
    loaded.backend.add_special_tokens([AddedToken(mark, special=True) for mark in bracketed_marks])
    return Tokenizer(loaded.backend, loaded.names, loaded.eos_ids)


@functools.cache
def demo_vocabulary(marked: bool) -> LLTokenizer:
    return LLTokenizer(demo_tokenizer(marked).backend.to_str(), eos_token=sorted(demo_tokenizer(marked).eos_ids))


def build_grammar(
    row: CallFamily, marked: bool, parallel: bool, required: bool, only: str | None = None, tools: ToolList = TOOLS
) -> str:
    markup, lark = detect_markup("", row.name, "none"), LarkWriter(demo_tokenizer(marked).marks)
    return tool_calls_grammar(markup, lark, tools, parallel=parallel, required=required, only=only)


@each_family
def test_self_referencing_tool_schema_compiles_or_is_refused(row: CallFamily) -> None:
    def grammar_of_width(width: int) -> str:
        node = {"type": "object", "properties": {f"p{number}": {"$ref": "#"} for number in range(width)}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": node}}]
        return tool_calls_grammar(
            detect_markup("", row.name, "none"), LarkWriter({}), tools, parallel=False, required=True
        )

    assert not LLMatcher.validate_grammar(grammar_of_width(5), demo_vocabulary(False))
    with suppress(InvalidValue):
        assert len(grammar_of_width(300)) <= MAX_GRAMMAR_CHARS


CYCLIC_SCHEMA = {"anyOf": [{"$ref": "#/$defs/circle"}] * 40, "oneOf": [{"$ref": "#"}] * 40}
MALFORMED_SCHEMAS = [
    {"$ref": "#"},
    {"$ref": "#/$defs/circle", "$defs": {"circle": CYCLIC_SCHEMA}},
    {
        "properties": {"a": CYCLIC_SCHEMA, "b": {"type": "array", "items": CYCLIC_SCHEMA}},
        "$defs": {"circle": CYCLIC_SCHEMA},
    },
    {"properties": {"a": True}, "required": [["a"], {}]},
    {"properties": {"a": {"properties": {"b": {}}, "type": "object", "required": 7}}},
    {"properties": {"a": {"type": "array", "minItems": "2", "maxItems": [3]}}},
    {"properties": {"a": {"type": "string", "minLength": "2", "maxLength": {}}}},
]


@each_family
def test_malformed_tool_schema_compiles_or_is_refused(row: CallFamily) -> None:
    """Self-references and members of the wrong type must end in a grammar or a refusal, never in a loop or a crash."""
    for schema in MALFORMED_SCHEMAS:
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
        with suppress(InvalidValue):
            tool_calls_grammar(
                detect_markup("", row.name, "none"), LarkWriter({}), tools, parallel=False, required=True
            )
        known = RequestTools(tools)
        assert known.parameter_types("f", "a") <= {"array", "object", "string"}
        assert member_schema(known.arguments_schema("f"), known.arguments_schema("f"), "none") is None


def random_walk(marked: bool, grammar: str, seed: int, start: str = "") -> str:
    """Return a random text that begins with ``start`` and follows the grammar; empty if the walk became too long."""
    assert not LLMatcher.validate_grammar(grammar, demo_vocabulary(marked))
    rng = random.Random(seed)
    matcher = LLMatcher(demo_vocabulary(marked), grammar)
    eos_ids = demo_tokenizer(marked).eos_ids
    ids = demo_tokenizer(marked).encode(start, add_special_tokens=False)
    assert matcher.consume_tokens(ids)
    while len(ids) < MAX_WALK_TOKENS and not matcher.is_stopped():
        allowed = matcher.compute_logit_bias()
        if matcher.is_accepting() and rng.random() < 0.3:
            break
        token_id = next((token_id for token_id in rng.choices(range(len(allowed)), k=20) if allowed[token_id]), None)
        if token_id is None:
            token_id = rng.choice([token_id for token_id, bias in enumerate(allowed) if bias])
        if token_id in eos_ids:
            break
        ids.append(token_id)
        assert matcher.consume_token(token_id)
    assert matcher.is_accepting() or len(ids) == MAX_WALK_TOKENS
    return demo_tokenizer(marked).decode(ids, skip_special=False) if len(ids) < MAX_WALK_TOKENS else ""


def parse_calls(row: CallFamily, text: str, tools: ToolList = TOOLS) -> tuple[str, list[tuple[str, str]]]:
    regions = make_output_parser(detect_markup("", row.name, "none"), False, RequestTools(tools))
    content, calls = "", []
    for _, piece, call in regions.parse_piece(text) + regions.finish_parsing():
        content += piece
        if call is not None and call.name is not None:
            calls.append([call.name, ""])
        elif call is not None:
            calls[-1][1] += call.arguments
    return content, [(name, arguments) for name, arguments in calls]


@each_family
@pytest.mark.parametrize("parallel", [False, True])
def test_required_call_parses_back(row: CallFamily, parallel: bool) -> None:
    marked = parallel
    grammar = build_grammar(row, marked, parallel, True)
    for seed in range(WALKS_PER_TEST):
        text = random_walk(marked, grammar, seed)
        if not text:
            continue
        content, calls = parse_calls(row, text)
        assert not content.strip() and calls and (parallel or len(calls) == 1), text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@each_family
def test_named_tool_choice_allows_only_that_function(row: CallFamily) -> None:
    grammar = build_grammar(row, True, False, True, "go-on")
    assert parse_calls(row, random_walk(True, grammar, 0)) == ("", [("go-on", "{}")])


@each_family
@pytest.mark.parametrize("marked", [False, True])
def test_call_begun_in_free_text_parses_back(row: CallFamily, marked: bool) -> None:
    grammar = build_grammar(row, marked, True, False)
    first = row.forms[0].unmarked or row.uses_channels
    for seed, before in enumerate(("",) if first else ("", "Let me see: { <[")):
        text = random_walk(marked, grammar, seed, before + row.forms[0].trigger_mark)
        content, calls = parse_calls(row, text)
        assert not text or (calls and content.startswith(before)), text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    plain = "<|channel|>final<|message|>Just text." if row.uses_channels else "Just text."
    assert LLMatcher(demo_vocabulary(marked), grammar).consume_tokens(
        demo_tokenizer(marked).encode(plain, add_special_tokens=False)
    )


@pytest.mark.parametrize(("stated", "fits"), [("number", True), ("null", False)])
def test_stated_argument_type_must_match_value(stated: str, fits: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, "1", None]}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    (row,) = [row for row in CALLS if row.name == "kimi_k3"]
    grammar = build_grammar(row, True, False, True, tools=tools)
    text = f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="{stated}"<|sep|>1'
    assert (
        LLMatcher(demo_vocabulary(True), grammar).consume_tokens(
            demo_tokenizer(True).encode(text, add_special_tokens=False)
        )
        == fits
    )


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
FAMILY_BY_SHAPE = {row.forms[0].shape: row for row in CALLS}


@pytest.mark.parametrize("row", FAMILY_BY_SHAPE.values(), ids=FAMILY_BY_SHAPE)
def test_tool_schema_parts_may_refer_to_whole_schema(row: CallFamily) -> None:
    name = "mcp.map-v1.add"
    tools: ToolList = [{"type": "function", "function": {"name": name, "parameters": REFERRING, "strict": True}}]
    grammar = build_grammar(row, True, False, True, tools=tools)
    for seed in range(4):
        if text := random_walk(True, grammar, seed):
            content, ((called, arguments),) = parse_calls(row, text, tools)
            assert not content and called == name
            jsonschema.validate(json.loads(arguments), REFERRING)


def test_grammar_of_500_tools_fits_size_limit() -> None:
    """The grammar writes common parts of the tools once; otherwise it would pass the size limit."""
    tools: ToolList = [{"type": "function", "function": {"name": f"tool_{number}.v-1"}} for number in range(500)]
    for row in CALLS:
        assert len(build_grammar(row, False, True, True, tools=tools)) <= MAX_GRAMMAR_CHARS
    strict = [{"type": "function", "function": {**tool["function"], "parameters": POINT}} for tool in tools]
    assert (
        len(build_grammar(next(row for row in CALLS if row.name == "qwen3_coder"), False, True, True, tools=strict))
        <= MAX_GRAMMAR_CHARS
    )


def test_call_grammar_refuses_unknown_function_or_markup() -> None:
    with pytest.raises(InvalidValue, match="not among the tools"):
        build_grammar(CALLS[-1], False, True, True, "absent")
    with pytest.raises(InvalidValue, match="no form of tool calls"):
        tool_calls_grammar(Markup(), LarkWriter({}), TOOLS, parallel=True, required=True)


CUSTOM_LARK = r"""
start: "say" (line | pair)~1..3 // a comment
line: " " /[ab"\\]{1,3}/ LF
pair: "(" [line] ")"
%import common.LF
"""


@pytest.mark.parametrize("row", FAMILY_BY_SHAPE.values(), ids=FAMILY_BY_SHAPE)
def test_the_text_of_a_custom_tool_follows_its_grammar_in_every_notation(row: CallFamily) -> None:
    text_schema = {"type": "string", "x-lark": CUSTOM_LARK}
    schema = {
        "type": "object",
        "properties": {"input": text_schema},
        "required": ["input"],
        "additionalProperties": False,
    }
    tools: ToolList = [{"type": "function", "function": {"name": "say", "parameters": schema, "strict": True}}]
    grammar, line = build_grammar(row, True, False, True, tools=tools), r' [ab"\\]{1,3}\n'
    for seed in range(3):
        text = random_walk(True, grammar, seed)
        content, ((called, arguments),) = parse_calls(row, text, tools)
        assert not content and called == "say"
        assert re.fullmatch(rf"say({line}|\(({line})?\)){{1,3}}", json.loads(arguments)["input"]), text


ARGUMENTS = {  # of tools that clients run: some that follow the schema, and some that do not
    "shell": ('{"commands": ["ls", "pwd"], "timeout_ms": 5}', ('{"commands": []}', '{"commands": "ls"}', "{}")),
    "local_shell": ('{"command": ["ls"], "env": {"A": "b"}}', ('{"command": ["ls"], "env": {"A": 1}}', '{"x": 1}')),
    "apply_patch": ('{"type": "delete_file", "path": "a", "diff": ""}', ('{"type": "move_file", "path": "a"',)),
    "computer": (
        '{"actions": [{"type": "wait"}, {"type": "click", "x": 1, "y": 2, "button": "left"}]}',
        ('{"actions": []}', '{"actions": [{"type": "click", "x": 1}]}', '{"actions": [{"type": "fly"}]}'),
    ),
    "computer_use_preview": ('{"action": {"type": "type", "text": "a"}}', ('{"action": {"type": "type"}}',)),
}


@pytest.mark.parametrize("kind", CLIENT_TOOLS)
def test_calls_of_tools_that_clients_run_follow_their_schemas(kind: str) -> None:
    signature = CLIENT_TOOLS[kind].signature() | {"strict": True}
    row = next(row for row in CALLS if row.name == "hermes")
    grammar = build_grammar(row, True, False, True, tools=[{"type": "function", "function": signature}])

    def accepts(arguments: str) -> bool:
        matcher = LLMatcher(demo_vocabulary(True), grammar)
        text = f'<tool_call>\n{{"name": "{signature["name"]}", "arguments": {arguments}}}\n</tool_call>'
        return (
            matcher.consume_tokens(demo_tokenizer(True).encode(text, add_special_tokens=True))
            and matcher.is_accepting()
        )

    valid, wrong = ARGUMENTS[kind]
    assert accepts(valid) and not any(map(accepts, wrong))
