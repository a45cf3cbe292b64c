"""Structural tags: the texts that each format allows, alone and combined, with marks and without."""

from __future__ import annotations

import json

import pytest
from support import tiny_tokenizers
from test_compile import is_whole_answer

from parley.dialects.fields import Fields
from parley.dialects.output_constraints import MAX_PIECE_DEPTH, read_structural_tag
from parley.errors import BadRequest, InvalidValue
from parley.text.grammar.compiler import GrammarCompiler
from parley.types import Grammar

JSON = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
WORD = {"type": "regex", "pattern": "[a-z]+"}
THINK = {"type": "tag", "begin": "<t>", "content": ANY, "end": "</t>"}
CALL = {"begin": "<tool_call>\n", "content": JSON, "end": "\n</tool_call>"}
FUNCTION = {"begin": "<f=a>", "content": JSON, "end": "</f>"}
OTHER = {"begin": "<f=b>", "content": WORD, "end": ["</f>", "<!>"]}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [FUNCTION, OTHER]}
LISTED = {"type": "tags_with_separator", "separator": ", ", "tags": [FUNCTION, OTHER]}
GBNF = 'root ::= "<" x ">"\nx ::= "b" | "c" x'


def const(value: str) -> dict:
    return {"type": "const_string", "value": value}


def sequence(*elements: dict) -> dict:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: dict) -> dict:
    return {"type": "or", "elements": list(elements)}


def repeated(kind: str, content: dict, **times: int) -> dict:
    return {"type": kind, "content": content, **times}


def tag(content: dict, begin: str = "[", end: str | list[str] = "]") -> dict:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(tiny_tokenizers.byte_level())


def parse_format(shape: dict) -> Grammar:
    return read_structural_tag(Fields({"type": "structural_tag", "format": shape}), "response_format")


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        (ANY, ["", "a <b>\n"], []),
        (ANY | {"excludes": ["no", "never"]}, ["", "nay"], ["so no", "never", "nono"]),
        (THINK, ["<t></t>", "<t>a < /t>\n</t>"], ["<t>", "<t>a</t>b", "a", ""]),
        (tag(JSON), ["[12]"], ["[]", "[a]", "12"]),
        (tag(WORD, end="z"), ["[az", "[azz"], ["[z", "[a"]),
        (tag(WORD, end=["]", ")"]), ["[a]", "[a)"], ["[a", "[]"]),
        (tag(ANY, end=["]", "</tool_call>"]), ["[a]", "[</tool_call>", "[b</tool_call>"], ["[a]]", "[a"]),
        (tag(ANY, "<tool_call>", "\n</tool_call>"), ["<tool_call>\n</tool_call>", "<tool_call>a\nb\n</tool_call>"],
         ["<tool_call>a</tool_call>", "<tool_call>a\n"]),
        (tag(ANY | {"excludes": ["x"]}), ["[a]", "[]"], ["[x]", "[ax]"]),
        (tag({"type": "grammar", "grammar": GBNF}), ["[<b>]", "[<ccb>]"], ["[b]", "<b>"]),
        (tag({"type": "grammar", "grammar": "start: /[0-9]+/"}), ["[12]"], ["[]", "[1"]),
        (tag({"type": "grammar", "grammar": "root ::= [^a]*"}), ["[]", "[b\n]"], ["[", "[a]"]),
        (tag({"type": "grammar", "grammar": 'root ::= "a" root | "a"'}, end=["ab", "a</t>"]), ["[aab", "[aaa</t>"],
         ["[ab", "[a"]),
        (tag({"type": "grammar", "grammar": "root ::= .+"}, "<tool_call>", "\n</tool_call>"),
         ["<tool_call>a\nb\n</tool_call>"], ["<tool_call>\n</tool_call>", "<tool_call>a</tool_call>"]),
        (sequence({"type": "grammar", "grammar": "root ::= [a-z]+"}, const("ab"), JSON), ["abab1"], ["ab1", "abab"]),
        (tag(tag(tag(WORD))), ["[[[a]]]"], ["[[a]]"]),
        (sequence(THINK, JSON), ["<t>hm</t>12"], ["<t>hm</t>", "12"]),
        (sequence(ANY, THINK, const("!")), ["a<t>b</t>!", "<t></t>!"], ["a<t>b</t>", "a!"]),
        (sequence(WORD, const("1"), WORD), ["a1b"], ["a1", "1b", "ab"]),
        (sequence(ANY, const("=")), ["a=", "="], ["a=b", "a"]),
        (tag(sequence(const("a"), ANY)), ["[a]", "[ab]"], ["[b]", "[ab"]),
        (tag(sequence(ANY, const("="))), ["[a=]"], ["[a]", "[a="]),
        (sequence(const("a"), either(const("b"), tag(JSON))), ["ab", "a[1]"], ["a", "a[b]"]),
        (either(JSON, THINK, const("none")), ["12", "<t>x</t>", "none"], ["", "<t>12", "nonex"]),
        (tag(either(JSON, ANY)), ["[12]", "[x]"], ["12"]),
        (TRIGGERED, ["", "text", "a<f=a>1</f>b<f=b>x<!>", "<f=a>1</f>"], ["<f=a>x</f>", "<f=c>", "a<f=a>1"]),
        (TRIGGERED | {"at_least_one": True}, ["<f=a>1</f>", "<f=a>1</f> b <f=a>2</f>"], ["", "a<f=a>1</f>"]),
        (TRIGGERED | {"stop_after_first": True}, ["", "a", "a<f=a>1</f>"], ["a<f=a>1</f>b", "<f=a>1</f><f=a>1</f>"]),
        (TRIGGERED | {"stop_after_first": True, "at_least_one": True}, ["<f=a>1</f>", "<f=b>x</f>"],
         ["", "a", "a<f=a>1</f>", "<f=a>1</f>b"]),
        (TRIGGERED | {"excludes": ["!!"]}, ["a<f=a>1</f>b"], ["a!!", "!!<f=a>1</f>", "<f=a>1</f>!!"]),
        (tag(TRIGGERED, "<<", ">>"), ["<<>>", "<<a>>", "<<a<f=a>1</f>b>>"], ["<<a<f=a>x</f>>>", "<<a", "a>>"]),
        (sequence(THINK, TRIGGERED), ["<t>a</t>b<f=a>1</f>", "<t></t>"], ["b<f=a>1</f>", "<t>a</t><f=a>x</f>"]),
        ({"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [CALL]},
         ["a<tool_call>\n1\n</tool_call>b", ""], ["<tool_call>1</tool_call>", "<tool_call>"]),
        (LISTED, ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>x<!>"], ["a", "<f=a>1</f>, ", "<f=a>1</f><f=a>1</f>"]),
        (LISTED | {"at_least_one": True}, ["<f=a>1</f>", "<f=a>1</f>, <f=a>2</f>"], [""]),
        (LISTED | {"stop_after_first": True}, ["", "<f=a>1</f>"], ["<f=a>1</f>, <f=a>2</f>"]),
        (tag(LISTED, "<tool_call>", "</tool_call>"),
         ["<tool_call></tool_call>", "<tool_call><f=a>1</f>, <f=a>2</f></tool_call>"], ["<tool_call>a</tool_call>"]),
        (sequence(LISTED, const("."), ANY), [".", "<f=a>1</f>. so"], ["so", "<f=a>1</f>"]),
        (repeated("optional", THINK), ["", "<t>a</t>"], ["<t>a</t><t></t>", "a"]),
        (repeated("optional", ANY), ["", "a b"], []),
        (sequence(repeated("optional", THINK), JSON), ["12", "<t>hm</t>12"], ["<t>hm</t>", ""]),
        (sequence(repeated("optional", WORD), const("=")), ["=", "ab="], ["ab", "1="]),
        (tag(repeated("optional", WORD)), ["[]", "[a]"], ["[1]", "[a"]),
        (repeated("star", THINK), ["", "<t></t>", "<t>a</t><t>b</t><t>c</t>"], ["<t>a</t>b"]),
        (tag(repeated("plus", tag(JSON))), ["[[1]]", "[[1][2]]"], ["[]", "[[1]", "[1]"]),
        (sequence(repeated("plus", const("ab")), const("c")), ["abc", "ababc"], ["c", "ab", "abac"]),
        (repeated("repeat", const("ab"), min=2, max=3), ["abab", "ababab"], ["", "ab", "abababab"]),
        (repeated("repeat", tag(JSON), min=1, max=-1), ["[1]", "[1][2][3]"], [""]),
        (sequence(repeated("repeat", tag(JSON), min=0, max=0), const("x")), ["x"], ["[1]x", ""]),
        ({"type": "token", "token": "<tool_call>"}, ["<tool_call>"], ["", "<tool_call><tool_call>", "a"]),
        (sequence(repeated("star", {"type": "token", "token": "<think>"}), JSON),
         ["1", "<think><think>1"], ["<think>"]),
    ],
    ids=lambda value: json.dumps(value)[:70],
)  # fmt: skip
def test_structural_tag_allows_exactly_its_texts(compiler, shape, good, bad):
    grammar = parse_format(shape)
    assert [text for text in good if not is_whole_answer(compiler, grammar, text)] == []
    assert [text for text in bad if is_whole_answer(compiler, grammar, text)] == []


def test_structural_tag_sequence_and_or_are_distinct(compiler):
    assert is_whole_answer(compiler, parse_format(sequence(const("a"), const("b"))), "ab")
    assert not is_whole_answer(compiler, parse_format(either(const("a"), const("b"))), "ab")


def test_structural_tag_composes_with_reasoning_and_calls(compiler):
    grammar = parse_format(tag({"type": "grammar", "grammar": GBNF}))
    after_reasoning = compiler.allow_reasoning_before(compiler.compile_grammar(grammar), ("<think>", "</think>"), True)
    assert is_whole_answer(compiler, after_reasoning, "hm</think>[<b>]") and not is_whole_answer(
        compiler, after_reasoning, "hm</think>[b]"
    )
    around = Grammar("around", ['start: "call" | @inner', grammar])
    assert (
        is_whole_answer(compiler, around, "call")
        and is_whole_answer(compiler, around, "[<cb>]")
        and not is_whole_answer(compiler, around, "[c]")
    )


@pytest.mark.parametrize(
    "shape",
    [sequence(ANY, JSON), sequence(WORD, JSON), tag(sequence(ANY, either(JSON, THINK))),
     LISTED | {"tags": [tag(ANY, end="")]}, repeated("star", ANY), tag(repeated("repeat", WORD, min=2, max=3))],
)  # fmt: skip
def test_structural_tag_refuses_free_text_without_end(compiler, shape):
    with pytest.raises(InvalidValue, match="followed by a tag"):
        compiler.compile_grammar(parse_format(shape))


def test_structural_tag_accepts_token_by_id_or_text(compiler):
    tokenizer = tiny_tokenizers.byte_level()
    mark, letter = tokenizer.marks["<think>"], tokenizer.encode("a", add_special_tokens=False)[0]
    assert is_whole_answer(compiler, parse_format({"type": "token", "token": mark}), "<think>")
    assert compiler.compile_grammar(parse_format({"type": "token", "token": letter}))
    for token in ("no such token", tokenizer.vocab_size, 2**40):
        with pytest.raises(BadRequest, match=r"no token|token"):
            compiler.compile_grammar(parse_format({"type": "token", "token": token}))


def test_structural_tag_refuses_unsupported_inner_grammar(compiler):
    for content in (
        {"type": "regex", "pattern": "(?=a)b"},
        JSON | {"json_schema": {"not": {}}},
        {"type": "grammar", "grammar": "start: <none>"},
    ):
        with pytest.raises(InvalidValue, match="response_format cannot be enforced"):
            compiler.compile_grammar(parse_format(tag(content)))


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        (sequence(), "elements"),
        ({"type": "or"}, "elements"),
        ({"type": "tag", "begin": "a", "end": "b"}, "content"),
        (tag(JSON, end=[]), "end"),
        (tag(JSON, end=["x"] * 17), "end"),
        (tag({"type": "odd"}), "content.type"),
        (tag(JSON | {"style": "qwen_xml"}), "content.style"),
        ({"type": "tags_with_separator", "tags": [], "separator": ""}, "tags"),
        ({"type": "tags_with_separator", "tags": [FUNCTION]}, "separator"),
        (sequence(ANY, {"type": "sequence", "elements": [{}]}), "elements[1].elements[0].type"),
        (ANY | {"excludes": [""]}, "excludes"),
        ({"type": "star"}, "content"),
        (repeated("repeat", JSON, min=1), "max"),
        (repeated("repeat", JSON, min=3, max=2), "max"),
        (repeated("repeat", JSON, min=-1, max=2), "min"),
        (repeated("repeat", JSON, min=0, max=10**6), "max"),
        ({"type": "token"}, "token"),
        ({"type": "token", "token": -1}, "token"),
        ({"type": "token", "token": 1.5}, "token"),
        (repeated("plus", {"type": "odd"}), "content.type"),
    ],
)
def test_structural_tag_error_names_its_field(shape, field):
    with pytest.raises(BadRequest) as caught:
        parse_format(shape)
    assert caught.value.field is not None and caught.value.field.removeprefix("format.").startswith(field)


def test_structural_tag_depth_is_bounded():
    shape = ANY
    for _ in range(MAX_PIECE_DEPTH):
        shape = tag(shape)
    with pytest.raises(BadRequest, match="deeper"):
        parse_format(shape)
    parse_format(shape["content"])
