"""Grammars are checked before a request is queued: errors state the reason, and grammars that take long are refused."""

from __future__ import annotations

import asyncio
import json
import re
import threading

import llguidance
import pytest
from support import tiny_models, tiny_tokenizers
from support.hostile_grammars import HOSTILE, nested_schema

from parley import LLM
from parley.errors import BadRequest, InvalidValue
from parley.model.sampling.grammar_mask import GrammarCache, TokenBytes
from parley.text.grammar.compiler import CACHE_BYTES, MAX_GRAMMAR_CHARS, GrammarCompiler
from parley.text.grammar.schemas.json_schema import MAX_PROPERTIES, MAX_SCHEMA_DEPTH, prepare_for_llguidance
from parley.types import Grammar, StructuralTag, TriggeredTags

TOKENIZER_KINDS = [tiny_tokenizers.byte_level, tiny_tokenizers.byte_fallback]
ATTACKS = HOSTILE[::3]  # for the engine test; the compiler test uses all


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(tiny_tokenizers.byte_level())


def is_whole_answer(compiler: GrammarCompiler, grammar: Grammar | str, text: str, tokenizer=None) -> bool:
    """Whether the text, encoded with the tokenizer's tokens, is a whole answer."""
    tokenizer = tokenizer or tiny_tokenizers.byte_level()
    compiled = grammar if isinstance(grammar, str) else compiler.compile_grammar(grammar)
    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(TokenBytes(tokenizer)))
    matcher = llguidance.LLMatcher(vocabulary, compiled, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids := encode_verbatim(tokenizer, text)) == len(ids) and matcher.is_accepting()


def encode_verbatim(tokenizer, text: str) -> list[int]:
    """Encode marks as their tokens and the text between them verbatim, without the prefix that a whole text gets."""
    pieces = TokenBytes(tokenizer)
    parts = re.split(f"({'|'.join(map(re.escape, tokenizer.marks))})", text)
    ids = [[tokenizer.marks[part]] if part in tokenizer.marks else pieces(part) for part in parts]
    return [token_id for part in ids for token_id in part]


@pytest.mark.parametrize("make", TOKENIZER_KINDS)
def test_grammars_work_with_every_kind_of_tokenizer(make):
    tokenizer = make()
    compiler = GrammarCompiler(tokenizer)
    schema = Grammar("json", {"type": "object", "properties": {"ü": {"type": "string"}}, "additionalProperties": False})
    for text, good in [('{"ü": "Köln 你 🎉"}', True), ("{}", True), ('{"u": ""}', False), ('{"ü": 3}', False)]:
        assert is_whole_answer(compiler, schema, text, tokenizer) == good
    marks = Grammar("lark", 'start: <tool_call> "call " /[0-9]+/ </tool_call>')
    assert is_whole_answer(compiler, marks, "<tool_call>call 12</tool_call>", tokenizer)
    assert not is_whole_answer(compiler, marks, "<tool_call>call </tool_call>", tokenizer)


def test_tokenizer_unknown_to_llguidance_is_passed_as_bytes(tmp_path):
    tokenizer = tiny_tokenizers.metaspace()
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    grammar = GrammarCompiler(tokenizer).compile_grammar(Grammar("choice", ["Paris", "the capital of Japan"]))
    matcher = GrammarCache(tmp_path, tokenizer.vocab_size).new_matcher(grammar)
    while not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        matcher.consume_token(token_id := mask.bit_length() - 1)
        assert tokenizer.token_bytes(token_id)
    assert matcher.is_accepting() and not matcher.is_error()


def test_whitespace_pattern_limits_space_in_json(compiler):
    schema = {"type": "array", "items": {"type": "integer"}}
    for whitespace, good, bad in [
        (None, ["[1,2]", "[1, 2]", "[\n  1,\n  2\n]"], ["[1,  2]", "[1,\n\n2]", " [1]"]),
        ("", ["[1,2]"], ["[1, 2]"]),
        ("[ \n]{0,3}", ["[1,2]", "[1,   2]", "[1\n\n,2]"], ["[1,    2]"]),
    ]:
        grammar = Grammar("json", schema, whitespace=whitespace)
        assert all(is_whole_answer(compiler, grammar, text) for text in good)
        assert not any(is_whole_answer(compiler, grammar, text) for text in bad)


PART_A = {"properties": {"a": {"type": "integer"}}}
PART_B = {"properties": {"b": {"properties": {"x": {}}}}, "required": ["b"]}


@pytest.mark.parametrize(("schema", "accepted", "refused"), [
    ({"properties": {"a": {"properties": {"b": {}}}, "c": {"type": "object"}}},
     ['{"a":{"b":1},"c":{"x":1}}', "{}"], ['{"z":1}', '{"a":{"z":1}}']),
    ({"properties": {}}, ["{}"], ['{"z":1}']),
    ({"properties": {"a": {}}, "required": ["b"]}, ['{"a":1,"b":2}'], ['{"a":1}', '{"b":2,"z":1}']),
    ({"properties": {"a": {}}, "enum": [{"a": 1}, {"a": 1, "z": 1}]}, ['{"a":1}'], ['{"a":1,"z":1}']),
    ({"items": {"properties": {"a": {}}}, "type": ["array", "object"]}, ['[{"a":1}]', '{"z":1}'], ['[{"z":1}]']),
    # the schema says that there are more
    ({"properties": {"a": {}}, "additionalProperties": {"type": "null"}}, ['{"a":1,"b":null}'], ['{"b":1}']),
    ({"properties": {"a": {}}, "additionalProperties": True}, ['{"a":1,"b":1}'], []),
    ({"properties": {"a": {}}, "unevaluatedProperties": True}, ['{"a":1,"b":1}'], []),
    ({"properties": {"a": {}}, "unevaluatedProperties": {"type": "null"}}, ['{"a":1,"b":null}'], ['{"b":1}']),
    ({"properties": {"a": {}}, "patternProperties": {"^x": {}}}, ['{"a":1,"x1":1}'], ['{"z":1}']),
    ({"patternProperties": {"^x": {}}}, ['{"x1":1}'], ['{"z":1}']),
    ({"properties": {}, "minProperties": 1}, ['{"z":1}'], ["{}"]),
    ({"type": "object"}, ['{"z":1}'], []),
    ({"required": ["a"]}, ['{"a":1,"z":1}'], []),
    # several schemas describe one object: the named members are those of all together
    ({"allOf": [PART_A, PART_B]}, ['{"a":1,"b":{"x":1}}', '{"b":{}}'], ['{"b":1,"z":1}', '{"b":{"z":1}}']),
    ({"$defs": {"p": PART_A}, "allOf": [{"$ref": "#/$defs/p"}, PART_B]}, ['{"a":1,"b":{}}'], ['{"b":{},"z":1}']),
    ({"$defs": {"p": PART_A}, "$ref": "#/$defs/p", "properties": {"b": {}}}, ['{"a":1,"b":1}'], ['{"z":1}']),
    ({"$defs": {"p": {"allOf": [{"$ref": "#/$defs/q"}]}, "q": PART_A},
      "properties": {"m": {"allOf": [{"$ref": "#/$defs/p"}, PART_B]}, "n": {"$ref": "#/$defs/q"}}},
     ['{"m":{"a":1,"b":{}},"n":{"a":1}}'], ['{"m":{"b":{},"z":1}}', '{"n":{"b":1}}', '{"n":{"z":1}}']),
    ({"properties": {"k": {}}, "anyOf": [PART_A, PART_B]}, ['{"k":1,"a":1}'], ['{"k":1,"z":1}']),
    ({"anyOf": [PART_A, PART_B]}, ['{"a":1}', '{"b":{}}'], ['{"b":{},"z":1}', '{"a":1,"b":{}}']),
    ({"allOf": [PART_A, {"properties": {"a": {"maximum": 5}}, "additionalProperties": {"type": "null"}}]},
     ['{"a":1,"z":null}'], ['{"a":6}']),
    ({"allOf": [{"properties": {"p": PART_A}}, {"properties": {"p": PART_B}}]}, ['{"p":{"a":1,"b":{}}}'], ['{"z":1}']),
])  # fmt: skip
def test_objects_allow_only_named_members(compiler, schema, accepted, refused):
    grammar = Grammar("json", {"type": "object"} | schema)
    for text, good in [(text, True) for text in accepted] + [(text, False) for text in refused]:
        assert is_whole_answer(compiler, grammar, text) == good, text
        twice = Grammar("json", prepare_for_llguidance(grammar.value))
        assert is_whole_answer(compiler, twice, text) == good, text


def test_huge_schema_limits_compile(compiler):
    for limit in (2**31 - 1, 2**31, 2**53 - 1, 10**18):
        assert is_whole_answer(compiler, Grammar("json", {"type": "string", "maxLength": limit}), '"a"')
        assert is_whole_answer(
            compiler, Grammar("json", {"type": "integer", "minimum": -limit, "maximum": limit}), "-12"
        )
        assert is_whole_answer(compiler, Grammar("json", {"type": "array", "maxItems": limit}), "[1]")


def test_schema_lengths_may_be_decimals(compiler):
    assert is_whole_answer(compiler, Grammar("json", {"type": "array", "minItems": 1.0, "maxItems": 2.0}), "[1]")
    assert not is_whole_answer(compiler, Grammar("json", {"type": "array", "minItems": 1.0, "maxItems": 2.0}), "[]")


def test_escaped_member_name_cannot_repeat_a_name(compiler):
    """JSON can escape any character, and readers keep the last of two equal names: a duplicate could evade a schema."""
    schema = {"type": "object", "properties": {'é"': {"type": "integer"}}, "patternProperties": {"^f": {"const": 1}},
              "additionalProperties": True}  # fmt: skip
    for text, good in [(r'{"é\"":1}', True), (r'{"\u00e9\"":""}', False), (r'{"é\u0022":""}', False),
                       (r'{"foo":1}', True), (r'{"\u0066oo":""}', False), (r'{"a":"","a":1}', True)]:  # fmt: skip
        assert is_whole_answer(compiler, Grammar("json", schema), text) == good, text


def test_schema_preparation_leaves_its_input_unchanged():
    schema = {"properties": {"a": {"format": "odd", "uniqueItems": False}}, "anyOf": [{"items": {"properties": {}}}],
              "const": {"properties": {"format": "odd"}}}  # fmt: skip
    before = json.dumps(schema)
    prepared = prepare_for_llguidance(schema)
    assert json.dumps(schema) == before
    assert prepared["properties"] == {"a": {}} and prepared["const"] == schema["const"]
    assert prepared["anyOf"][0]["items"]["additionalProperties"] is False


def test_lark_token_ids_inside_texts_are_ignored(compiler):
    last = tiny_tokenizers.byte_level().vocab_size - 1
    for lark in (f"start: <[{last}]>", 'start: "<[99999]>"', r"start: /<\[99999\]>/"):
        assert compiler.compile_grammar(Grammar("lark", lark))


def test_tags_constrain_calls_in_free_text(compiler):
    tags = [
        StructuralTag("<f=a>", {"type": "integer"}, "</f>"),
        StructuralTag("<tool_call>\n", {"const": []}, "\n</tool_call>"),
    ]
    grammar = Grammar("tags", TriggeredTags(tags, ["<f=", "<tool_call>"]))
    for text, good in [
        ("only text < f >", True), ("", True), ("x <f=a>12</f> y <f=a>3</f>", True), ("<f=b>12</f>", False),
        ("<f=a>x</f>", False), ("<f=a>12", False), ("so: <tool_call>\n[]\n</tool_call>", True),
        ("<tool_call>\n[1]\n</tool_call>", False), ("<tool_call>", False),
    ]:  # fmt: skip
        assert is_whole_answer(compiler, grammar, text) == good, text


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("marks", [("<think>", "</think>"), ("{{", "}}")])
def test_grammar_applies_after_reasoning(compiler, inside, marks):
    opening, closing = marks
    compiled = compiler.allow_reasoning_before(
        compiler.compile_grammar(Grammar("choice", ["yes", "no"])), marks, inside
    )
    begin = "" if inside else opening
    for thought in ("", "hm", "\nso it is.\n", "ü🎉"):
        assert is_whole_answer(compiler, compiled, f"{begin}{thought}{closing}\n\nyes")
        assert not is_whole_answer(compiler, compiled, f"{begin}{thought}{closing}\n\nmaybe")
        assert not is_whole_answer(compiler, compiled, begin + thought)
    assert is_whole_answer(compiler, compiled, "yes") != inside


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (Grammar("json", {"not": {}}), "not"),
        (Grammar("json", {"properties": {"a": {"if": {}, "then": {}}}}), "if"),
        (Grammar("json", {"uniqueItems": True}), "uniqueItems"),
        (Grammar("json", False), "false"),
        (Grammar("json", {"type": "thing"}), "thing"),
        (Grammar("json", {"$ref": "http://host/x"}), "other documents"),
        (Grammar("json", {"required": ["a"], "properties": {"a": False}, "type": "object"}), "'a'"),
        (Grammar("json", nested_schema(MAX_SCHEMA_DEPTH)), "deep"),
        (Grammar("json", {"properties": {str(n): {} for n in range(MAX_PROPERTIES + 1)}}), str(MAX_PROPERTIES)),
        (Grammar("lark", 'start: %json {"properties": {'
                 + ",".join(f'"{n}":{{}}' for n in range(MAX_PROPERTIES + 1)) + "}}"), str(MAX_PROPERTIES)),
        (Grammar("regex", "x" * MAX_GRAMMAR_CHARS), str(MAX_GRAMMAR_CHARS)),
        (Grammar("regex", "(?=a)b"), "look-ahead"),
        (Grammar("regex", r"a\bb"), r"\b"),
        (Grammar("regex", "a\\"), "backslash"),
        (Grammar("lark", "start: <none>"), "<none>"),
        (Grammar("lark", f"start: <[0-{tiny_tokenizers.byte_level().vocab_size}]>"), "vocabulary"),
        (Grammar("lark", "start: <[99999999999999999999]>"), "vocabulary"),
        (Grammar("ebnf", "root = 3"), "::="),
        (Grammar("choice", ["a", "\ud800"]), "surrogate"),
    ],
)  # fmt: skip
def test_grammar_error_names_field_and_reason(compiler, grammar, sentence):
    for field in ("some_field", "other_field"):  # the second error comes from the cache
        grammar = Grammar(grammar.kind, grammar.value, field=field)
        with pytest.raises(InvalidValue) as caught:
            compiler.find_compiled(grammar) or compiler.compile_grammar(grammar)
        assert caught.value.field == field
        assert caught.value.message.startswith(field) and sentence in caught.value.message
        assert len(caught.value.message) < 400 and "/root" not in caught.value.message


def test_compiled_grammar_cache_is_bounded(monkeypatch):
    compiler = GrammarCompiler(tiny_tokenizers.byte_level())
    first = Grammar("choice", ["first"])
    compiled = compiler.compile_grammar(first)
    assert compiler.find_compiled(Grammar("choice", ["first"], field="other")) == compiled
    assert compiler.find_compiled(Grammar("choice", ["second"])) is None
    text = "x" * 1000
    for number in range(20):
        compiler.compile_grammar(Grammar("choice", [f"{number}{text}"]))
    assert compiler.find_compiled(first) == compiled
    monkeypatch.setattr("parley.text.grammar.compiler.CACHE_BYTES", 5000)
    for number in range(20, 25):
        compiler.compile_grammar(Grammar("choice", [f"{number}{text}"]))
    assert (
        compiler.find_compiled(first) is None and compiler.find_compiled(Grammar("choice", [f"24{text}"])) is not None
    )
    assert CACHE_BYTES > 5000


def test_hostile_grammars_are_refused_or_cheap(compiler):
    refused = 0
    for grammar in HOSTILE:
        try:
            compiler.compile_grammar(grammar)
        except InvalidValue as error:
            refused += 1
            assert len(error.message) < 400
    assert 50 < refused < len(HOSTILE)


def test_grammar_is_refused_for_tokenizer_without_token_bytes():
    with pytest.raises(InvalidValue, match="tokenizer"):
        GrammarCompiler(tiny_tokenizers.suffixed()).compile_grammar(Grammar("choice", ["a"]))


async def test_streams_progress_during_hostile_grammars():
    """Each hostile request is refused, answered or fails alone; meanwhile other tokens and the event loop advance."""
    with LLM(str(tiny_models.model_folder("qwen3")), threads=1, kv_memory=16 << 20) as llm:
        pieces, loop_turns, attacks_done = [0], [0], threading.Event()

        async def read_streams():
            while not attacks_done.is_set():
                async for _ in llm.astream("the quick", max_tokens=400, ignore_eos=True, temperature=1.0):
                    pieces[0] += 1

        async def count_turns():
            while not attacks_done.is_set():
                await asyncio.sleep(0.001)
                loop_turns[0] += 1

        async def run_attack(grammar: Grammar) -> str:
            try:
                await llm.agenerate("x", grammar=grammar, max_tokens=4, temperature=1.0)
                return "answered"
            except BadRequest as error:
                assert error.field == grammar.field
                return "refused"

        background_tasks = [asyncio.create_task(read_streams()), asyncio.create_task(count_turns())]
        while not pieces[0]:
            await asyncio.sleep(0.001)
        moving_batches = 0
        outcomes = []
        for first in range(0, len(ATTACKS), 8):
            before = pieces[0], loop_turns[0]
            outcomes += await asyncio.gather(*map(run_attack, ATTACKS[first : first + 8]))
            moving_batches += pieces[0] > before[0] and loop_turns[0] > before[1]
        attacks_done.set()
        await asyncio.gather(*background_tasks)
    assert len(outcomes) == len(ATTACKS) and {"answered", "refused"} <= set(outcomes)
    assert moving_batches >= len(ATTACKS) // 8 - 2  # a batch that is refused at once may leave no time for a token
