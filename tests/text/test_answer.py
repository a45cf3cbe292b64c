"""The grammar of an answer with tools allows exactly the calls that tool choice, schemas and response format permit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.answer_parts import read

from parley.demo import folder
from parley.errors import Invalid
from parley.text import Choice, Language, Markup, detect
from parley.text.grammar import answer_grammar
from parley.text.parsing.calls import Tools
from parley.text.parsing.families import CALLS
from parley.text.parsing.harmony_parser import reader
from parley.types import Chat, Delta, Done, Grammar, Message, Output, Request

LLAMA = next(row for row in CALLS if row.name == "llama3_json")
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"],
        "additionalProperties": False, "$defs": {"city": {"enum": ["Rome", "Oslo"]}}}  # fmt: skip
PERSON = Grammar("json", {"type": "object", "properties": {"age": {"$ref": "#/$defs/const"}}, "required": ["age"],
                          "additionalProperties": False, "$defs": {"const": {"type": "integer"}}})  # fmt: skip


def tool(name: str, schema: Any = CITY, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def ask(*tools: dict[str, Any], **members: Any) -> Chat:
    return Chat([Message("user", "Hi")], list(tools), **members)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def language() -> Language:
    return Language.load(folder())


@pytest.fixture(scope="module")
def allows(language: Language):
    """Return a check whether the prompt's grammar allows a text as a whole answer."""
    vocabulary = LLTokenizer(language.tokenizer.backend.to_str(), eos_token=sorted(language.tokenizer.eos_ids))

    def allowed(chat: Chat, text: str, form: Grammar | None = None, language: Language = language) -> bool:
        grammar = language.compile(chat, form)
        assert language.found(chat, form) == grammar
        if not grammar:
            return True
        matcher = LLMatcher(vocabulary, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = language.tokenizer.encode(text, special=False)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    return allowed


ROME, OSLO = call("f", '{"city": "Rome"}'), call("g", '{"city": "Oslo"}')


def test_required_tool_choice_allows_only_permitted_calls(allows):
    chat = ask(tool("f"), tool("g"), choice="required")
    assert allows(chat, ROME) and allows(chat, OSLO) and allows(chat, f"{ROME}\n{OSLO}")
    for wrong in ("Hi", "", f"Hi{ROME}", call("h", "{}"), call("f", '{"city": "Bonn"}'), call("f", "{}")):
        assert not allows(chat, wrong)
    named = ask(tool("f"), tool("g"), choice="required", only="g")
    assert allows(named, OSLO) and not allows(named, ROME) and not allows(named, f"{OSLO}\n{OSLO}")
    some = ask(tool("f"), tool("g"), choice="required", allowed=["f"])
    assert allows(some, ROME) and not allows(some, OSLO)
    alone = ask(tool("f"), choice="required", parallel=False)
    assert allows(alone, ROME) and not allows(alone, f"{ROME}\n{ROME}")


def test_auto_tool_choice_allows_text_and_valid_calls(allows, language):
    assert language.compile(ask(tool("f")), None) == language.compile(ask(tool("f", strict=True), choice="none"), None)
    strict = ask(tool("f", strict=True), tool("g"))
    for text in ("Hi", "", ROME, f"So:\n{ROME}\n{ROME}", call("g", '{"any": [1]}')):
        assert allows(strict, text), text
    for wrong in (call("f", '{"city": "Bonn"}'), call("h", "{}"), call("g", "5")):
        assert not allows(strict, wrong), wrong
    some = ask(tool("f"), tool("g"), allowed=["g"])
    assert allows(some, "Hi") and allows(some, OSLO) and not allows(some, ROME)


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
    chat = ask(tool("f"), tool("g"))
    for text in (good, ROME, f"{ROME}\n{OSLO}"):
        assert allows(chat, text, form), text
    for text in (bad, "Hi", good + ROME, call("f", '{"city": "Bonn"}')):
        assert not allows(chat, text, form), text
    forced = ask(tool("f"), choice="required")
    assert allows(forced, ROME, form) and not allows(forced, good, form)
    assert allows(ask(tool("f"), choice="none"), good, form) and not allows(ask(tool("f"), choice="none"), ROME, form)


def test_response_format_is_validated_even_when_calls_are_forced(language):
    forced = ask(tool("f"), choice="required")
    wrong = Grammar("regex", "(a", field="structured_outputs.regex")
    assert language.compile(forced, None) == language.found(forced, None)  # the grammar of the calls is cached
    for _ in range(2):
        assert language.found(forced, wrong) is None
        with pytest.raises(Invalid, match="unclosed") as caught:
            language.compile(forced, wrong)
        assert caught.value.field == wrong.field


def test_grammar_cache_key_covers_every_request_part(language):
    """Varies every part of a request that the grammar depends on, one at a time: the cache key must include each."""
    form = Grammar("regex", "[a-z]+", field="one")
    tools = tool("f"), tool("g")
    alike = [
        (ask(*tools, choice="required"), None),
        (ask(*tools, choice="required", only="f"), None),
        (ask(*tools, choice="required", allowed=["f"]), None),
        (ask(*tools, choice="required", parallel=False), None),
        (ask(*tools[:1], choice="required"), None),
        (ask(tool("f", strict=True), tools[1]), None),
        (ask(*tools), form),
        (ask(*tools), Grammar("regex", "[a-z]+", field="another")),
        (ask(*tools), None),
    ]
    fresh = Language(language.tokenizer, language.template)
    assert [fresh.found(*each) for each in alike] == [None] * 8 + [""]  # any text: nothing to prepare
    made = [fresh.compile(*each) for each in alike]
    assert [fresh.found(*each) for each in alike] == made and len(set(made)) == 7


def test_bare_json_calls_and_response_format_share_one_schema(allows, language):
    """Where calls are bare JSON, calls and format become one schema, and references inside both must still resolve."""
    bare = Language(language.tokenizer, language.template)
    bare.markup = Markup(None, LLAMA.forms)
    chat = ask(tool("f"), tool("g"))
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
    kimi = Language(language.tokenizer, language.template, markup=detect("", "kimi_k3", "kimi_k3"))
    opening, closing = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
    city = '<|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|>'
    rome = f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{city}<|close|>call<|sep|><|close|>tools<|sep|>'
    chat = ask(tool("f"), tool("g"))
    forced = ask(tool("f"), choice="required")
    for lead in ("", opening + closing, closing):
        assert allows(forced, lead + rome, language=kimi), lead
    for wrong in (opening + rome, "Hi" + rome, rome.replace("Rome", "Bonn"), rome.replace('"string"', '"number"')):
        assert not allows(forced, wrong, language=kimi), wrong
    for good in ('{"age": 5}', opening + '{"age": 5}', rome, closing + rome):
        assert allows(chat, good, PERSON, kimi), good
    assert allows(ask(), opening + '{"age": 5}', PERSON, kimi) and not allows(ask(), opening, PERSON, kimi)
    text = f"<|open|>think<|sep|>hm<|close|>think<|sep|>{opening}So.{closing}{rome}<|close|>message<|sep|>"
    for pieces in ([text], list(text)):
        assert read(reader(kimi.markup, False, Tools()), pieces) == ("hm", "So.", [("f", '{"city": "Rome"}')])


def test_harmony_puts_formatted_output_in_final_channel(allows, language):
    """Where all text stands in channels, formatted output belongs in the content channel and calls in theirs."""
    row = next(row for row in CALLS if row.channels)
    harmony = Language(language.tokenizer, language.template)
    harmony.markup = Markup(("<|channel|>analysis<|message|>", "<|end|>"), row.forms, channels=True)
    final = '<|channel|>final<|message|>{"age": 5}'
    begun = row.forms[0].each[0].removeprefix("<|start|>assistant")
    grammar = harmony.compile(ask(tool("f"), choice="required"), None)
    for chat in (ask(), ask(tool("f"))):
        assert allows(chat, final, PERSON, harmony) and allows(chat, f"<|start|>assistant{final}", PERSON, harmony)
        assert not allows(chat, '{"age": 5}', PERSON, harmony) and not allows(
            chat, final[:-1] + ', "b": 1}', PERSON, harmony
        )
    assert begun in json.loads(grammar)["grammars"][0]["lark_grammar"]
    done = list(events(harmony, ask(), final))
    assert "".join(event.text for event in done if isinstance(event, Delta)) == '{"age": 5}'


def test_model_without_call_marks_gets_tools_in_prompt(allows, language):
    plain = Language(language.tokenizer, language.template)
    plain.markup = Markup()
    chat = ask(tool("f"), choice="required")
    text = '[{"name": "f", "parameters": {"city": "Rome"}}, {"name": "f", "parameters": {"city": "Oslo"}}]'
    assert allows(chat, text, language=plain) and not allows(chat, "[]", language=plain)
    assert plain.compile(ask(tool("f", strict=True)), None) == ""  # this model has no marks that begin a call
    shown = answer_grammar.told(chat)
    assert shown.messages[-1].content.startswith("Hi") and '"city"' in shown.messages[-1].content
    done = list(events(plain, chat, text))
    assert [delta.call.name for delta in done[:-1] if delta.call and delta.call.name] == ["f", "f"]
    assert done[-1].reason == "tool"


def events(language: Language, chat: Chat, text: str):
    """Yield the events of an answer with this text, fed one token at a time."""
    prepared = language.prepare(chat)
    choice = Choice(Request(id="r", model="m", prompts=[chat]), 0, language.tokenizer, prepared)
    ids = language.tokenizer.encode(text, special=False)
    for number, id in enumerate(ids):
        yield from choice.push(Output("r", 0, [id], finish="stop" if number == len(ids) - 1 else None))
        if choice.ended:
            return


@pytest.mark.parametrize("behind", ["", f"\n{OSLO}", " and more", "\n\n"])
def test_answer_ends_after_first_call_without_parallel_calls(language, behind):
    made = list(events(language, ask(tool("f"), parallel=False), f"Well.\n{ROME}{behind}"))
    deltas = [event for event in made if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == "Well."
    assert json.loads("".join(delta.call.arguments for delta in deltas if delta.call)) == {"city": "Rome"}
    done = made[-1]
    assert isinstance(done, Done) and done.reason == "tool"
    assert done.usage.completion_tokens <= len(language.tokenizer.encode(f"Well.\n{ROME}", special=False))


@pytest.mark.parametrize("kind", ["string", "thing", ["object", "null"], ["null"], None, 3])
def test_call_arguments_are_an_object_for_any_schema_type(allows, kind):
    chat = ask(tool("f", {"type": kind}), choice="required")
    assert allows(chat, call("f", "{}"))
    assert not any(allows(chat, call("f", wrong)) for wrong in ('"a"', "null", "3"))


def test_unsupported_schema_is_refused_only_for_strict_tools(allows, language):
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    with pytest.raises(Invalid) as caught:
        language.compile(ask(tool("f"), tool("g", odd, strict=True)), None)
    assert caught.value.field == "tools[1].function.parameters"
    loose = ask(tool("f"), tool("g", odd), choice="required")
    assert allows(loose, call("g", '{"b": 1}')) and not allows(loose, call("f", '{"b": 1}'))
    wide = [
        {
            "type": "object",
            "properties": {f"{'member' * 20}{number % 6}_{place}": {"type": "string"} for place in range(200)},
        }
        for number in range(100)
    ]
    many = ask(
        *(tool(f"f{number}", each) for number, each in enumerate(wide)), choice="required"
    )  # each schema alone would fit
    assert allows(many, call("f7", '{"b": 1}')) and not allows(many, call("f100", "{}"))
    with pytest.raises(Invalid, match="tools cannot be followed"):
        language.compile(ask(*(tool(f"f{number}", each, strict=True) for number, each in enumerate(wide))), None)
    with pytest.raises(Invalid) as caught:
        language.compile(ask(tool("f")), Grammar("regex", "(", field="guided_regex"))
    assert caught.value.field == "guided_regex"
