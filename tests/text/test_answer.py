"""The grammar of an answer with tools allows exactly the calls that tool choice, schemas and response format permit."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.answer_parts import parse_pieces

from parley.demo import model_folder
from parley.errors import InvalidValue
from parley.text.answer_choice import AnswerChoice
from parley.text.grammar import answer_grammar
from parley.text.grammar.answer_compiler import may_be_any_text
from parley.text.grammar.answer_question import decode_question, encode_question
from parley.text.parsing.call_families import CALLS
from parley.text.parsing.calls import RequestTools
from parley.text.parsing.harmony_parser import make_output_parser
from parley.text.parsing.markup import Markup, detect_markup
from parley.text.text_pipeline import TextPipeline
from parley.types import CUSTOM_GRAMMAR, ChatPrompt, ChoiceDelta, ChoiceDone, EngineOutput, Grammar, Message, Request

LLAMA = next(row for row in CALLS if row.name == "llama3_json")
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"],
        "additionalProperties": False, "$defs": {"city": {"enum": ["Rome", "Oslo"]}}}  # fmt: skip
PERSON = Grammar("json", {"type": "object", "properties": {"age": {"$ref": "#/$defs/const"}}, "required": ["age"],
                          "additionalProperties": False, "$defs": {"const": {"type": "integer"}}})  # fmt: skip


def function_tool(name: str, schema: Any = CITY, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def chat_with_tools(*tools: dict[str, Any], **members: Any) -> ChatPrompt:
    return ChatPrompt([Message("user", "Hi")], list(tools), **members)


def hermes_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def language() -> TextPipeline:
    return TextPipeline.from_folder(model_folder())


@pytest.fixture(scope="module")
def allows(language: TextPipeline):
    """Return a check whether the prompt's grammar allows a text as a whole answer."""
    vocabulary = LLTokenizer(language.tokenizer.backend.to_str(), eos_token=sorted(language.tokenizer.eos_ids))

    def allowed(chat: ChatPrompt, text: str, form: Grammar | None = None, language: TextPipeline = language) -> bool:
        grammar = language.compile_answer_grammar(chat, form)
        assert not (grammar and may_be_any_text(chat, form))
        assert decode_question(encode_question(chat, form)) == (msgspec.structs.replace(chat, messages=[]), form)
        if not grammar:
            return True
        matcher = LLMatcher(vocabulary, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = language.tokenizer.encode(text, add_special_tokens=False)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    return allowed


ROME, OSLO = hermes_call("f", '{"city": "Rome"}'), hermes_call("g", '{"city": "Oslo"}')


def test_required_tool_choice_allows_only_permitted_calls(allows):
    chat = chat_with_tools(function_tool("f"), function_tool("g"), tool_choice="required")
    assert allows(chat, ROME) and allows(chat, OSLO) and allows(chat, f"{ROME}\n{OSLO}")
    for wrong in (
        "Hi",
        "",
        f"Hi{ROME}",
        hermes_call("h", "{}"),
        hermes_call("f", '{"city": "Bonn"}'),
        hermes_call("f", "{}"),
    ):
        assert not allows(chat, wrong)
    named = chat_with_tools(function_tool("f"), function_tool("g"), tool_choice="required", forced_tool="g")
    assert allows(named, OSLO) and not allows(named, ROME) and not allows(named, f"{OSLO}\n{OSLO}")
    limited = chat_with_tools(function_tool("f"), function_tool("g"), tool_choice="required", allowed_tools=["f"])
    assert allows(limited, ROME) and not allows(limited, OSLO)
    single = chat_with_tools(function_tool("f"), tool_choice="required", parallel_calls=False)
    assert allows(single, ROME) and not allows(single, f"{ROME}\n{ROME}")


def test_auto_tool_choice_allows_text_and_valid_calls(allows, language):
    assert language.compile_answer_grammar(
        chat_with_tools(function_tool("f")), None
    ) == language.compile_answer_grammar(chat_with_tools(function_tool("f", strict=True), tool_choice="none"), None)
    strict = chat_with_tools(function_tool("f", strict=True), function_tool("g"))
    for text in ("Hi", "", ROME, f"So:\n{ROME}\n{ROME}", hermes_call("g", '{"any": [1]}')):
        assert allows(strict, text), text
    for wrong in (hermes_call("f", '{"city": "Bonn"}'), hermes_call("h", "{}"), hermes_call("g", "5")):
        assert not allows(strict, wrong), wrong
    limited = chat_with_tools(function_tool("f"), function_tool("g"), allowed_tools=["g"])
    assert allows(limited, "Hi") and allows(limited, OSLO) and not allows(limited, ROME)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (PERSON, '{"age": 5}', '{"age": "x"}'),
        (Grammar("regex", "a+b"), "aab", "aa"),
        (Grammar("choice", ["yes", "no"]), "no", "maybe"),
        (Grammar("lark", 'start: "x" /[0-9]+/'), "x12", "12"),
        (Grammar("ebnf", 'root ::= "y" [0-9]+'), "y12", "12"),
    ],
)
def test_response_format_with_tools_allows_calls_or_format(allows, form, good, bad):
    chat = chat_with_tools(function_tool("f"), function_tool("g"))
    for text in (good, ROME, f"{ROME}\n{OSLO}"):
        assert allows(chat, text, form), text
    for text in (bad, "Hi", good + ROME, hermes_call("f", '{"city": "Bonn"}')):
        assert not allows(chat, text, form), text
    forced = chat_with_tools(function_tool("f"), tool_choice="required")
    assert allows(forced, ROME, form) and not allows(forced, good, form)
    assert allows(chat_with_tools(function_tool("f"), tool_choice="none"), good, form) and not allows(
        chat_with_tools(function_tool("f"), tool_choice="none"), ROME, form
    )


@pytest.mark.parametrize(("strict", "choice"), [(True, "auto"), (True, "required"), (False, "required")])
def test_arguments_have_only_named_members(allows, strict, choice):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    chat = chat_with_tools(function_tool("f", schema, strict=strict), tool_choice=choice)
    assert allows(chat, hermes_call("f", '{"city": "Rome"}'))
    assert not allows(chat, hermes_call("f", '{"city": "Rome", "land": "Italy"}'))
    more = chat_with_tools(
        function_tool("f", schema | {"additionalProperties": True}, strict=strict), tool_choice=choice
    )
    assert allows(more, hermes_call("f", '{"city": "Rome", "land": "Italy"}'))


def test_response_format_is_validated_even_when_calls_are_forced(language):
    forced = chat_with_tools(function_tool("f"), tool_choice="required")
    wrong = Grammar("regex", "(a", field="structured_outputs.regex")
    assert language.compile_answer_grammar(forced, None)  # the grammar of the calls is right
    for _ in range(2):
        with pytest.raises(InvalidValue, match="unclosed") as caught:
            language.compile_answer_grammar(forced, wrong)
        assert caught.value.field == wrong.field


def test_question_covers_every_request_part(language):
    """Varies every part of a request that the grammar depends on, one at a time: the question must include each."""
    form = Grammar("regex", "[a-z]+", field="one")
    tools = function_tool("f"), function_tool("g")
    variants = [
        (chat_with_tools(*tools, tool_choice="required"), None),
        (chat_with_tools(*tools, tool_choice="required", forced_tool="f"), None),
        (chat_with_tools(*tools, tool_choice="required", allowed_tools=["f"]), None),
        (chat_with_tools(*tools, tool_choice="required", parallel_calls=False), None),
        (chat_with_tools(*tools[:1], tool_choice="required"), None),
        (chat_with_tools(function_tool("f", strict=True), tools[1]), None),
        (chat_with_tools(*tools), form),
        (chat_with_tools(*tools), Grammar("regex", "[a-z]+", field="another")),
    ]
    assert not any(may_be_any_text(*variant) for variant in variants) and may_be_any_text(chat_with_tools(*tools), None)
    assert len({encode_question(*variant) for variant in variants}) == len(variants)
    compiled = [language.compile_answer_grammar(*variant) for variant in variants]
    asked = [language.compile_answer_grammar(*decode_question(encode_question(*variant))) for variant in variants]
    assert asked == compiled and len(set(compiled)) == 6


def test_bare_json_calls_and_response_format_share_one_schema(allows, language):
    """Where calls are bare JSON, calls and format become one schema, and references inside both must still resolve."""
    bare = TextPipeline(language.tokenizer, language.template, markup=Markup(None, LLAMA.forms))
    chat = chat_with_tools(function_tool("f"), function_tool("g"))
    for text in ('{"name": "f", "parameters": {"city": "Rome"}}', '{"age": 5}'):
        assert allows(chat, text, PERSON, bare), text
    for text in (
        '{"name": "f", "parameters": {"city": "Bonn"}}',
        '{"name": "f"}',
        '{"age": "x"}',
        '{"age": 5, "b": 1}',
    ):
        assert not allows(chat, text, PERSON, bare), text


def test_kimi_k3_allows_empty_content_part_before_calls(allows, language):
    """Kimi K3 separates content from calls: an empty content part or its closing mark may precede calls."""
    kimi = TextPipeline(language.tokenizer, language.template, markup=detect_markup("", "kimi_k3", "kimi_k3"))
    opening, closing = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
    city = '<|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|>'
    rome = f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{city}<|close|>call<|sep|><|close|>tools<|sep|>'
    chat = chat_with_tools(function_tool("f"), function_tool("g"))
    forced = chat_with_tools(function_tool("f"), tool_choice="required")
    for lead in ("", opening + closing, closing):
        assert allows(forced, lead + rome, language=kimi), lead
    for wrong in (opening + rome, "Hi" + rome, rome.replace("Rome", "Bonn"), rome.replace('"string"', '"number"')):
        assert not allows(forced, wrong, language=kimi), wrong
    for good in ('{"age": 5}', opening + '{"age": 5}', rome, closing + rome):
        assert allows(chat, good, PERSON, kimi), good
    assert allows(chat_with_tools(), opening + '{"age": 5}', PERSON, kimi) and not allows(
        chat_with_tools(), opening, PERSON, kimi
    )
    text = f"<|open|>think<|sep|>hm<|close|>think<|sep|>{opening}So.{closing}{rome}<|close|>message<|sep|>"
    for pieces in ([text], list(text)):
        assert parse_pieces(make_output_parser(kimi.markup, False, RequestTools()), pieces) == (
            "hm",
            "So.",
            [("f", '{"city": "Rome"}')],
        )


def test_harmony_puts_formatted_output_in_final_channel(allows, language):
    """Where all text stands in channels, formatted output belongs in the content channel and calls in theirs."""
    row = next(row for row in CALLS if row.uses_channels)
    harmony = TextPipeline(
        language.tokenizer,
        language.template,
        markup=Markup(("<|channel|>analysis<|message|>", "<|end|>"), row.forms, uses_channels=True),
    )
    final = '<|channel|>final<|message|>{"age": 5}'
    call_opening = row.forms[0].call_open[0].removeprefix("<|start|>assistant")
    grammar = harmony.compile_answer_grammar(chat_with_tools(function_tool("f"), tool_choice="required"), None)
    for chat in (chat_with_tools(), chat_with_tools(function_tool("f"))):
        assert allows(chat, final, PERSON, harmony) and allows(chat, f"<|start|>assistant{final}", PERSON, harmony)
        assert not allows(chat, '{"age": 5}', PERSON, harmony) and not allows(
            chat, final[:-1] + ', "b": 1}', PERSON, harmony
        )
    assert call_opening in json.loads(grammar)["grammars"][0]["lark_grammar"]
    all_events = list(answer_events(harmony, chat_with_tools(), final))
    assert "".join(event.text for event in all_events if isinstance(event, ChoiceDelta)) == '{"age": 5}'


def test_model_without_call_marks_gets_tools_in_prompt(allows, language):
    plain = TextPipeline(language.tokenizer, language.template, markup=Markup())
    chat = chat_with_tools(function_tool("f"), tool_choice="required")
    text = '[{"name": "f", "parameters": {"city": "Rome"}}, {"name": "f", "parameters": {"city": "Oslo"}}]'
    assert allows(chat, text, language=plain) and not allows(chat, "[]", language=plain)
    assert (
        plain.compile_answer_grammar(chat_with_tools(function_tool("f", strict=True)), None) == ""
    )  # this model has no marks that begin a call
    description = answer_grammar.describe_tools(chat)
    assert description.messages[-1].content.startswith("Hi") and '"city"' in description.messages[-1].content
    all_events = list(answer_events(plain, chat, text))
    assert [delta.tool_call.name for delta in all_events[:-1] if delta.tool_call and delta.tool_call.name] == ["f", "f"]
    assert all_events[-1].reason == "tool"


def answer_events(language: TextPipeline, chat: ChatPrompt, text: str):
    """Yield the events of an answer with this text, fed one token at a time."""
    prepared = language.prepare_prompt(chat)
    choice = AnswerChoice(Request(id="r", model="m", prompts=[chat]), 0, language.tokenizer, prepared)
    ids = language.tokenizer.encode(text, add_special_tokens=False)
    for number, token_id in enumerate(ids):
        yield from choice.push_output(
            EngineOutput("r", 0, [token_id], finish_reason="stop" if number == len(ids) - 1 else None)
        )
        if choice.finished:
            return


@pytest.mark.parametrize("behind", ["", f"\n{OSLO}", " and more", "\n\n"])
def test_answer_ends_after_first_call_without_parallel_calls(language, behind):
    all_events = list(
        answer_events(language, chat_with_tools(function_tool("f"), parallel_calls=False), f"Well.\n{ROME}{behind}")
    )
    deltas = [event for event in all_events if isinstance(event, ChoiceDelta)]
    assert "".join(delta.text for delta in deltas) == "Well."
    assert json.loads("".join(delta.tool_call.arguments for delta in deltas if delta.tool_call)) == {"city": "Rome"}
    done = all_events[-1]
    assert isinstance(done, ChoiceDone) and done.reason == "tool"
    assert done.usage.completion_tokens <= len(language.tokenizer.encode(f"Well.\n{ROME}", add_special_tokens=False))


@pytest.mark.parametrize("kind", ["string", "thing", ["object", "null"], ["null"], None, 3])
def test_call_arguments_are_an_object_for_any_schema_type(allows, kind):
    chat = chat_with_tools(function_tool("f", {"type": kind}), tool_choice="required")
    assert allows(chat, hermes_call("f", "{}"))
    assert not any(allows(chat, hermes_call("f", wrong)) for wrong in ('"a"', "null", "3"))


@pytest.mark.parametrize("text", [{"pattern": "^(?:(?=x)y)$"}, {"pattern": "^(?:()$"}, {CUSTOM_GRAMMAR: "start: ("}])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_wrong_grammar_of_a_custom_tool_names_its_member(language, text, choice):
    schema = {"type": "object", "properties": {"input": {"type": "string"} | text}, "required": ["input"]}
    tools = function_tool("f"), function_tool("raw", schema, strict=True)
    chat = chat_with_tools(*tools, tool_choice=choice, schema_fields={"f": "tools[0]", "raw": "tools[1].definition"})
    with pytest.raises(InvalidValue, match=r"^tools\[1\]\.definition cannot be enforced: ") as caught:
        language.compile_answer_grammar(chat, None)
    assert caught.value.field == "tools[1].definition"


def test_unsupported_schema_is_refused_only_for_strict_tools(allows, language):
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    tools = function_tool("f"), function_tool("g", odd, strict=True)
    with pytest.raises(InvalidValue) as caught:
        language.compile_answer_grammar(chat_with_tools(*tools, schema_fields={"f": "first", "g": "second"}), None)
    assert caught.value.field == "second"
    loose = chat_with_tools(function_tool("f"), function_tool("g", odd), tool_choice="required")
    assert allows(loose, hermes_call("g", '{"b": 1}')) and not allows(loose, hermes_call("f", '{"b": 1}'))
    wide = [
        {
            "type": "object",
            "properties": {f"{'member' * 20}{number % 6}_{place}": {"type": "string"} for place in range(200)},
        }
        for number in range(100)
    ]
    many = chat_with_tools(
        *(function_tool(f"f{number}", schema) for number, schema in enumerate(wide)), tool_choice="required"
    )  # each schema alone would fit
    assert allows(many, hermes_call("f7", '{"b": 1}')) and not allows(many, hermes_call("f100", "{}"))
    with pytest.raises(InvalidValue, match="tools cannot be enforced"):
        language.compile_answer_grammar(
            chat_with_tools(*(function_tool(f"f{number}", schema, strict=True) for number, schema in enumerate(wide))),
            None,
        )
    with pytest.raises(InvalidValue) as caught:
        language.compile_answer_grammar(
            chat_with_tools(function_tool("f")), Grammar("regex", "(", field="guided_regex")
        )
    assert caught.value.field == "guided_regex"
