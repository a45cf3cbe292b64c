"""The output parser: examples of model outputs, and the property that cuts in a text never change its parts."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.answer_parts import AnswerParts, parse_pieces, split_text

from parley.text.parsing.call_forms import HERMES, HERMES_LIST
from parley.text.parsing.markup import Markup, detect_markup, starts_in_reasoning
from parley.text.parsing.output_parser import OutputParser

QWEN = Markup(("<think>", "</think>"), (HERMES, HERMES_LIST))
TOOLS = Markup(None, (HERMES,))
THINK = Markup(("<think>", "</think>"))
IMPLICIT_THINK = Markup(("<think>", "</think>"), (HERMES,), always_reasons=True)


def parse(pieces: list[str], markup: Markup = QWEN, thinking: bool = False) -> AnswerParts:
    numbers = itertools.count()
    return parse_pieces(OutputParser(markup, thinking, lambda: f"call_{next(numbers)}"), pieces)


def hermes_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


QUOTING = '{"x":"\\"</tool_call>\\\\"}'
EXAMPLES: list[tuple[str, AnswerParts]] = [
    ("", ("", "", [])),
    ("Hello.\n", ("", "Hello.\n", [])),
    ("\n\nHello.", ("", "\n\nHello.", [])),
    ("<think>\nhm\n\nso\n</think>\n\nYes.\n", ("hm\n\nso", "Yes.\n", [])),
    ("\n<think>\n\n</think>\n\nYes", ("", "Yes", [])),
    ("<think>never closed\n", ("never closed\n", "", [])),
    ("<think", ("", "<think", [])),
    ("<thinking> is a word", ("", "<thinking> is a word", [])),
    ("I <think> so</think>", ("", "I <think> so</think>", [])),
    ("<think>a </thin b</think>c", ("a </thin b", "c", [])),
    ("<think>x</think>\n\n" + hermes_call("f", "{}"), ("x", "", [("f", "{}")])),
    ("Ok \n \n" + hermes_call("f", '{"a": [1, {"b": "}"}]}'), ("", "Ok ", [("f", '{"a": [1, {"b": "}"}]}')])),
    (hermes_call("f", "{}") + "\n" + hermes_call("g", QUOTING), ("", "", [("f", "{}"), ("g", QUOTING)])),
    (hermes_call("f", "{}") + "\n", ("", "", [("f", "{}")])),
    (hermes_call("f", "{}") + "\nDone.", ("", "Done.", [("f", "{}")])),
    ("Ok." + hermes_call("f", "{}") + "\nDone.", ("", "Ok.\nDone.", [("f", "{}")])),
    (" \n\t" + hermes_call("f", "{}") + "\n \n", ("", "", [("f", "{}")])),
    ("<think>hm\n \t</think>So  <b> ", ("hm", "So  <b> ", [])),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
    ('<tool_call>{"id": [0, "x"], "name": "f", "parameters": {}, "z": 0}</tool_call>', ("", "", [("f", "{}")])),
    ('<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", "", [("f", "null")])),
    ('<tool_call>{"name": "\\u00e9\\"", "arguments": {}}</tool_call>', ("", "", [('é"', "{}")])),
    # cut by a length limit
    ("Ok\n<tool_call>\n", ("", "Ok\n<tool_call>\n", [])),
    ('<tool_call>\n{"name": "f', ("", '<tool_call>\n{"name": "f', [])),
    ('<tool_call>\n{"name": "f"', ("", "", [("f", "")])),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "b', ("", "", [("f", '{"a": "b')])),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "b\\', ("", "", [("f", '{"a": "b\\')])),
    ("a</tool_call", ("", "a</tool_call", [])),
    # not a call
    ("<tool_call> is a mark", ("", "<tool_call> is a mark", [])),
    ("<tool_call>\n<tool_call>\n{}</tool_call>", ("", "<tool_call>\n<tool_call>\n{}</tool_call>", [])),
    ('<tool_call>{"name": 5}</tool_call>', ("", '<tool_call>{"name": 5}</tool_call>', [])),
    ('<tool_call>{"name": ""}</tool_call>', ("", '<tool_call>{"name": ""}</tool_call>', [])),
    ('<tool_call>{"arguments": {}}</tool_call>', ("", '<tool_call>{"arguments": {}}</tool_call>', [])),
    ("<tool_call>{name: f}</tool_call>" + hermes_call("g", "{}"),
     ("", "<tool_call>{name: f}</tool_call>", [("g", "{}")])),
    ("<tool_call>\n" + hermes_call("g", "{}"), ("", "<tool_call>", [("g", "{}")])),
    # mistakes of small models
    ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>!', ("", "!", [("f", '{"a": 1}')])),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>!', ("", "!", [("f", '{"a": 1}')])),
    ('<tool_call>{"name": "f", "arguments": {"a": 1\n</tool_call>!', ("", "!", [("f", '{"a": 1\n')])),
    ('<tool_call>{"name": "f", "arguments": {"a": "b}}\n</tool_call>!', ("", "!", [("f", '{"a": "b}}\n')])),
    ('<tool_call>{"name": "f", "arguments": {}} and so', ("", " and so", [("f", "{}")])),
    ('<tool_call>{"name": "f", "arguments": {},}</tool_call>', ("", "", [("f", "{}")])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), EXAMPLES)
def test_output_parser_reads_examples_under_any_cut(text: str, expected: AnswerParts) -> None:
    assert parse([text]) == expected
    assert parse(list(text)) == expected
    for middle in range(len(text)):
        assert parse([text[:middle], text[middle:]]) == expected


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "{", "}", '"', "\\", "name", '"name"', ":", ",",
    '"arguments"', '{"name": "f", "arguments": {', '"a": 1', "[", "]", "<", "/", " ", "x", "€", "null",
    "}}\n</tool_call>", "\x00",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)


@given(
    texts,
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.sampled_from([QWEN, TOOLS, THINK, IMPLICIT_THINK]),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_output_parser_result_ignores_cuts(text: str, sizes: list[int], markup: Markup, thinking: bool) -> None:
    thinking = thinking and markup.reasoning_marks is not None
    pieces = split_text(text, sizes)
    whole = parse([text], markup, thinking)
    assert parse(pieces, markup, thinking) == whole
    assert parse([part for piece in pieces for part in (piece, "")], markup, thinking) == whole


@given(
    texts,
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.sampled_from([QWEN, TOOLS, THINK, IMPLICIT_THINK]),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_plain_pieces_equal_the_parsers_output_and_do_not_change_its_state(
    text: str, sizes: list[int], markup: Markup, thinking: bool
) -> None:
    thinking = thinking and markup.reasoning_marks is not None
    parser, twin = (OutputParser(markup, thinking, lambda: "call") for _ in range(2))
    parts, all_parts = [], []
    for piece in split_text(text, sizes):
        part, was_reasoning = parser.plain_part(piece), parser.in_reasoning
        if part is None:
            parts += parser.parse_piece(piece)
        else:
            assert was_reasoning == (part == "reasoning")
            parts.append((part, piece, None))
        all_parts += twin.parse_piece(piece)
        assert (parser.in_reasoning, parser.part_count) == (twin.in_reasoning, twin.part_count)
        assert parser.unread_length == twin.unread_length
    assert parts + parser.finish_parsing() == all_parts + twin.finish_parsing()


@given(texts)
@settings(max_examples=200, deadline=None)
def test_text_without_marks_is_content(text: str) -> None:
    if "<think>" not in text and not text.lstrip("\n").startswith("</think>"):
        assert parse([text], THINK) == ("", text, [])
    if "<tool_call>" not in text:
        assert parse(list(text), TOOLS) == ("", text, [])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=6), json_values, max_size=3)


@given(st.text(min_size=1, max_size=8), arguments, st.booleans(), st.sampled_from([None, 1]))
@settings(max_examples=200, deadline=None)
def test_call_arguments_are_passed_verbatim(
    name: str, value: dict[str, object], ascii_only: bool, indent: int | None
) -> None:
    raw_arguments = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    text = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {raw_arguments}}}\n</tool_call>'
    assert parse(list(text)) == ("", "", [(name, raw_arguments)])


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>", "<tool_call>\n", "<", "\n", "<tool_call>{", '<tool_call>{"',
        '<tool_call>{"name": "f", "arguments": {',
        '{"a":', "<think>", "</think>", "<tool_cal", "[", '"', "\\",
    ],
)  # fmt: skip
@pytest.mark.parametrize("start", ["", "<think>", '<tool_call>{"name": "f", "arguments": ', '<tool_call>{"a": '])
def test_output_parser_is_linear_for_repeated_marks(unit: str, start: str) -> None:
    text = start + unit * (200_000 // len(unit))
    regions = OutputParser(QWEN)
    count = 0
    for at in range(0, len(text), 7):
        count += sum(
            len(piece) + len(call.arguments if call else "")
            for _, piece, call in regions.parse_piece(text[at : at + 7])
        )
        assert regions.unread_length <= len("</tool_call>")
    count += sum(len(piece) + len(call.arguments if call else "") for _, piece, call in regions.finish_parsing())
    assert count <= len(text) + 2 * regions.call_count


def test_markup_is_detected_from_template() -> None:
    assert detect_markup("… <think> … <tool_call> …") == QWEN
    assert detect_markup("{{ content.split('</think>') }}") == THINK
    assert detect_markup("plain") == Markup()


def test_output_parser_resumes_reasoning_opened_by_prompt() -> None:
    assert starts_in_reasoning(QWEN, "<|assistant|>\n<think>\n", False)
    assert not starts_in_reasoning(QWEN, "<|assistant|>\n<think>\n\n</think>\n\n", False)
    assert not starts_in_reasoning(QWEN, "what does <think> mean?<|assistant|>", False)
    assert starts_in_reasoning(QWEN, "<|assistant|>\n<think>\nLet me", True)
    assert not starts_in_reasoning(QWEN, "<|assistant|>\n<think>\nLet me</think>So", True)
    assert not starts_in_reasoning(TOOLS, "<think>", False)
    assert parse(["\nhm", "\n</think>\n", "\nso"], QWEN, thinking=True) == ("hm", "so", [])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hm\n</think>\n\nYes.", ("hm", "Yes.", [])),
        ("<think>\nhm</think>Yes.", ("hm", "Yes.", [])),
        ("\n<think>hm", ("hm", "", [])),
        ("never closed", ("never closed", "", [])),
        ("<thi", ("<thi", "", [])),
        ("a <think> b</think>c", ("a <think> b", "c", [])),
        ("</think>Yes.", ("", "Yes.", [])),
        ("", ("", "", [])),
        (hermes_call("f", "{}") + "</think>" + hermes_call("f", "{}"), (hermes_call("f", "{}"), "", [("f", "{}")])),
    ],
)
def test_reasoning_without_opening_mark_is_parsed(text, parts):
    assert parse([text], IMPLICIT_THINK, True) == parts == parse(list(text), IMPLICIT_THINK, True)


def test_answer_begins_in_reasoning_unless_prompt_closed_it():
    assert (
        detect_markup("{{ '<think>' }}", reasoning="deepseek-r1").always_reasons
        and not detect_markup("{{ '<think>' }}").always_reasons
    )
    for prompt, continued, begun in [
        ("<|assistant|>", False, True), ("<|assistant|>\n<think>\n", False, True),
        ("<|assistant|>\n<think>\n\n</think>\n\n", False, False), ("<|assistant|>Let me", True, False),
        ("<|assistant|><think>Let me", True, True),
    ]:  # fmt: skip
        assert starts_in_reasoning(IMPLICIT_THINK, prompt, continued) == begun
