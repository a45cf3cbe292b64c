"""What tools make of an answer: its grammar allows calls as choice, schemas and form say, and nothing else."""

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
    """Whether an answer may be this text, whole, by the prompt's grammar."""
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


def test_a_call_that_has_to_be_made(allows):
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


def test_text_in_which_calls_may_be(allows, language):
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
def test_an_answer_is_calls_or_has_the_form(allows, form, good, bad):
    chat = ask(tool("f"), tool("g"))
    for text in (good, ROME, f"{ROME}\n{OSLO}"):
        assert allows(chat, text, form), text
    for text in (bad, "Hi", good + ROME, call("f", '{"city": "Bonn"}')):
        assert not allows(chat, text, form), text
    forced = ask(tool("f"), choice="required")
    assert allows(forced, ROME, form) and not allows(forced, good, form)
    assert allows(ask(tool("f"), choice="none"), good, form) and not allows(ask(tool("f"), choice="none"), ROME, form)


def test_a_form_that_has_no_say_is_checked_all_the_same(language):
    forced = ask(tool("f"), choice="required")
    wrong = Grammar("regex", "(a", field="structured_outputs.regex")
    assert language.compile(forced, None) == language.found(forced, None)  # what it comes to is known already
    for _ in range(2):
        assert language.found(forced, wrong) is None
        with pytest.raises(Invalid, match="unclosed") as caught:
            language.compile(forced, wrong)
        assert caught.value.field == wrong.field


def test_what_is_known_is_known_by_all_that_makes_a_difference(language):
    """Every part of a request that the grammar depends on, one at a time."""
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


def test_calls_and_a_form_that_begin_alike(allows, language):
    """Where calls are bare JSON, both are one schema, whose parts still refer to themselves."""
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


def test_content_and_calls_between_silent_marks(allows, language):
    """Kimi K3 writes both in parts of their own: content that is none may stand before calls, and its mark may come."""
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


def test_a_form_in_a_channel(allows, language):
    """Where everything stands in a channel, the form does in that of content, and calls in theirs."""
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


def test_a_model_without_calls_is_told_of_the_tools_and_made_to_call(allows, language):
    plain = Language(language.tokenizer, language.template)
    plain.markup = Markup()
    chat = ask(tool("f"), choice="required")
    text = '[{"name": "f", "parameters": {"city": "Rome"}}, {"name": "f", "parameters": {"city": "Oslo"}}]'
    assert allows(chat, text, language=plain) and not allows(chat, "[]", language=plain)
    assert plain.compile(ask(tool("f", strict=True)), None) == ""  # it cannot begin a call
    shown = answer_grammar.told(chat)
    assert shown.messages[-1].content.startswith("Hi") and '"city"' in shown.messages[-1].content
    done = list(events(plain, chat, text))
    assert [delta.call.name for delta in done[:-1] if delta.call and delta.call.name] == ["f", "f"]
    assert done[-1].reason == "tool"


def events(language: Language, chat: Chat, text: str):
    """What an answer of these tokens is told as, one token at a time."""
    prepared = language.prepare(chat)
    choice = Choice(Request(id="r", model="m", prompts=[chat]), 0, language.tokenizer, prepared)
    ids = language.tokenizer.encode(text, special=False)
    for number, id in enumerate(ids):
        yield from choice.push(Output("r", 0, [id], finish="stop" if number == len(ids) - 1 else None))
        if choice.ended:
            return


@pytest.mark.parametrize("behind", ["", f"\n{OSLO}", " and more", "\n\n"])
def test_one_call_is_the_end_of_an_answer_that_may_have_no_more(language, behind):
    made = list(events(language, ask(tool("f"), parallel=False), f"Well.\n{ROME}{behind}"))
    deltas = [event for event in made if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == "Well."
    assert json.loads("".join(delta.call.arguments for delta in deltas if delta.call)) == {"city": "Rome"}
    done = made[-1]
    assert isinstance(done, Done) and done.reason == "tool"
    assert done.usage.completion_tokens <= len(language.tokenizer.encode(f"Well.\n{ROME}", special=False))


@pytest.mark.parametrize("kind", ["string", "thing", ["object", "null"], ["null"], None, 3])
def test_arguments_are_an_object_whatever_their_schema_says(allows, kind):
    chat = ask(tool("f", {"type": kind}), choice="required")
    assert allows(chat, call("f", "{}"))
    assert not any(allows(chat, call("f", wrong)) for wrong in ('"a"', "null", "3"))


def test_schemas_that_cannot_be_followed(allows, language):
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
    )  # each would do alone
    assert allows(many, call("f7", '{"b": 1}')) and not allows(many, call("f100", "{}"))
    with pytest.raises(Invalid, match="tools cannot be followed"):
        language.compile(ask(*(tool(f"f{number}", each, strict=True) for number, each in enumerate(wide))), None)
    with pytest.raises(Invalid) as caught:
        language.compile(ask(tool("f")), Grammar("regex", "(", field="guided_regex"))
    assert caught.value.field == "guided_regex"
