"""Prompts of every kind become token ids, together with the markup that their answer uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.tiny_models import write_tokenizer
from support.tiny_tokenizers import byte_level, word_level

from parley.demo.template import CHAT_TEMPLATE
from parley.errors import BadRequest, ContextLength, Invalid
from parley.text import ChatTemplate, Language
from parley.types import Chat, Message, Pooling, Text, Tokens

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
QUESTION = [Message("user", "Why?")]


def language(source: str = CHAT_TEMPLATE) -> Language:
    tokenizer = byte_level()
    return Language(tokenizer, ChatTemplate({"default": source}, tokenizer.names))


def test_text_and_token_prompts_become_token_ids() -> None:
    tokenizer = byte_level()
    for special in (True, False):
        prepared = language().prepare(Text("<s>Paris", special))
        assert prepared.token_ids == tokenizer.encode("<s>Paris", special) and prepared.markup.marks == ()
    assert language().prepare(Tokens([3, 1, 2])).token_ids == [3, 1, 2]


def test_chat_is_rendered_and_encoded_without_extra_marks() -> None:
    speaker = language()
    chat = Chat(QUESTION)
    prepared = speaker.prepare(chat)
    assert byte_level().decode(prepared.token_ids, skip_special=False) == speaker.template.render(chat)
    assert prepared.markup.think and not prepared.markup.calls and not prepared.thinking
    assert speaker.prepare(Chat(QUESTION, tools=[TOOL])).markup.calls


def test_thinking_uses_the_variable_that_the_template_reads() -> None:
    def told(source: str, **members) -> str:
        return language("{% set a = 1 %}" + source).render(Chat(QUESTION, **members))

    for name in ("enable_thinking", "thinking"):
        source = f"{{{{ {name} | default('-') }}}}"
        assert told(source) == "-"
        assert told(source, thinking=True) == told(source, effort="low") == "True"
        assert told(source, thinking=False) == told(source, effort="none") == "False"
        assert told(source, thinking=True, options={name: "mine"}) == "mine"
        assert told(source, options={"enable_thinking": False}) == "False"  # the name that clients use
    assert told("{{ reasoning_effort | default('-') }}", effort="high") == "high"


def test_prompt_shows_tools_with_any_template() -> None:
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    source = "{{ tools | tojson }}"
    assert json.loads(language(source).render(Chat(QUESTION, [strict]))) == [TOOL]
    untold = language("{{ messages[-1].content }}")
    assert untold.render(Chat(QUESTION, [TOOL])) == "Why?"
    assert '"name": "f"' in untold.render(Chat(QUESTION, [TOOL], "required"))


def test_text_prompt_may_become_user_turn() -> None:
    speaker = language()
    turn = speaker.prepare(Text("Why?", turn=True))
    assert turn.token_ids == speaker.prepare(Chat(QUESTION)).token_ids
    assert turn.markup.marks == (), "its answer is text"
    tokenizer = byte_level()
    plain = Language(tokenizer, ChatTemplate({}, tokenizer.names))
    assert plain.prepare(Text("Why?", turn=True)).token_ids == tokenizer.encode("Why?")


def test_prompt_may_open_the_reasoning_block() -> None:
    speaker = language("{{ messages[0].content }}<assistant><think>\n{# </think> #}")
    assert speaker.prepare(Chat(QUESTION)).thinking
    begun = Chat([*QUESTION, Message("assistant", "<think>\nLet me")], continue_final=True)
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# <think> #}"
    assert language(source).prepare(begun).thinking


@pytest.mark.parametrize("budget", [0, 1, 2, 9])
def test_reasoning_budget_counts_tokens_before_closing_mark(budget: int) -> None:
    speaker = language()
    limit = speaker.bound(speaker.prepare(Chat(QUESTION)), budget)
    assert limit is not None
    before, _, behind = speaker.tokenizer.decode(limit.close, skip_special=False).partition("</think>")
    assert (before.strip(), behind) == ("", "\n\n")
    assert limit.budget + len(speaker.tokenizer.encode(before, special=False)) == budget


def test_hopelessly_long_prompt_is_refused_before_encoding() -> None:
    speaker = language()
    tokenizer = speaker.tokenizer
    read: list[int] = []
    encode = tokenizer.encode

    def spy(text: str, special: bool = True) -> list[int]:
        read.append(len(text))
        return encode(text, special)

    tokenizer.encode = spy  # type: ignore[method-assign]
    try:
        for prompt in (Text("word " * 100_000), Chat([Message("user", "x" * 500_000)])):
            with pytest.raises(ContextLength, match="maximum context length is 100 tokens"):
                speaker.prepare(prompt, 100)
        assert max(read) < 10_000
    finally:
        del tokenizer.encode


@pytest.mark.parametrize("text", ["", "Paris " * 20, "Paris" + " " * 100_000 + "Tokyo"])
def test_long_text_of_few_tokens_is_accepted(text: str) -> None:
    speaker = Language(word_level(), ChatTemplate({}))
    assert speaker.prepare(Text(text), 10).token_ids == word_level().encode(text)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", ["", "Paris", "Paris is in France, " * 10, "Paris" + " " * 5000 + "Tokyo"])
def test_truncation_keeps_first_or_last_tokens(text: str, special: bool) -> None:
    for speaker in (Language(word_level(), ChatTemplate({})), language()):
        ids, plain = (speaker.tokenizer.encode(text, each) for each in (special, False))
        for count in (1, 2, 5, 1000):
            assert speaker.prepare(Text(text, special), 1000, count).token_ids == ids[-count:]
            assert speaker.prepare(Text(text, special=False), 1000, count, "head").token_ids == plain[:count]
    assert language().prepare(Tokens([1, 2, 3]), 100, 2).token_ids == [2, 3]
    assert language().prepare(Tokens([1, 2, 3]), 100, 2, "head").token_ids == [1, 2]


def test_chat_truncated_at_its_end_opens_no_reasoning() -> None:
    speaker = language("{{ messages[0].content }}<assistant><think>\n{# </think> #}")
    whole = speaker.prepare(Chat(QUESTION))
    first = speaker.prepare(Chat(QUESTION), 1000, 3, "head")
    assert (whole.thinking, first.thinking, first.token_ids) == (True, False, whole.token_ids[:3])


def test_truncation_encodes_only_the_end_of_huge_text() -> None:
    speaker = language()
    read: list[int] = []
    encode = speaker.tokenizer.encode
    text = "The sun goes down. " * 50_000
    expected = encode(text[-1000:])[-5:]
    speaker.tokenizer.encode = lambda text, special=True: (read.append(len(text)), encode(text, special))[1]  # type: ignore[method-assign]
    assert speaker.prepare(Text(text), 100, 5).token_ids == expected
    with pytest.raises(ContextLength):
        speaker.prepare(Text(text), 100, 101)
    assert max(read) < 10_000


def test_prompt_tokens_have_character_spans() -> None:
    speaker = language()
    text, ids, spans = speaker.spell(Text("Paris is near."))
    assert (text, ids) == ("Paris is near.", speaker.tokenizer.encode("Paris is near."))
    assert len(spans) == len(ids) and spans[-1][1] == len(text)
    chat = Chat(QUESTION)
    text, ids, spans = speaker.spell(chat)
    assert (text, ids) == (speaker.template.render(chat), speaker.prepare(chat).token_ids)
    assert speaker.spell(Tokens([4, 5])) == ("", [4, 5], [(0, 0), (0, 0)])
    assert speaker.spell(Text("a\ud800"))[1] == speaker.tokenizer.encode("a\ufffd")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        (None, {}),
        ({"temperature": 0.6, "top_k": 20, "do_sample": True, "top_p": None, "min_p": "0.1", "eos_token_id": 2},
         {"temperature": 0.6, "top_k": 20}),
        ({"repetition_penalty": True, "max_new_tokens": 64}, {"max_new_tokens": 64}),
    ],
)  # fmt: skip
def test_generation_config_gives_sampling_defaults(
    tmp_path: Path, said: dict[str, object] | None, advice: dict[str, float]
) -> None:
    write_tokenizer(tmp_path)
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert Language.load(tmp_path).advice == advice


def test_chat_without_template_is_bad_request() -> None:
    with pytest.raises(BadRequest):
        Language(byte_level(), ChatTemplate({})).prepare(Chat(QUESTION))


def test_text_package_imports_neither_torch_nor_transformers() -> None:
    script = "import sys, parley.text; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def reader(folder: Path, **settings: object) -> Language:
    """Return a pipeline whose tokenizer puts each text between two marks, as an encoder's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: id for id, word in enumerate(["[CLS]", "[SEP]", "[UNK]", *"abcdef", "query:", "A"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return Language.load(folder)


def test_chat_may_request_special_tokens_around_it(tmp_path: Path) -> None:
    tokenizer = reader(tmp_path).tokenizer
    speaker = Language(tokenizer, ChatTemplate({"default": "{{ messages[0].content }}"}, tokenizer.names))
    chat = Chat([Message("user", "a b")])
    assert speaker.prepare(chat).token_ids == [3, 4]
    assert speaker.prepare(msgspec.structs.replace(chat, special=True)).token_ids == [0, 3, 4, 1]


@pytest.mark.parametrize(
    ("count", "ids"), [(8, [0, 3, 4, 5, 6, 7, 8, 1]), (7, [0, 3, 4, 5, 6, 7, 1]), (3, [0, 3, 1]), (2, [0, 1]), (1, [0])]
)
def test_truncated_embedding_input_keeps_special_tokens(tmp_path: Path, count: int, ids: list[int]) -> None:
    speaker = reader(tmp_path)
    assert speaker.prepare(Text("a b c d e f"), 99, count, "head", pooling=Pooling()).token_ids == ids
    plain = speaker.prepare(Text("a b c d e f", special=False), 99, count, "head", pooling=Pooling()).token_ids
    assert plain == [3, 4, 5, 6, 7, 8][:count]
    assert speaker.prepare(Tokens([3, 4, 5]), 99, count, "head", pooling=Pooling()).token_ids == [3, 4, 5][:count]
    assert speaker.prepare(Text("a b c d e f " * 9999), 99, count, "head", pooling=Pooling()).token_ids[:3] == ids[:3]
    end = speaker.prepare(Text("a b c d e f"), 99, count, "tail", pooling=Pooling()).token_ids
    assert end == ([0, *[3, 4, 5, 6, 7, 8][8 - count :], 1] if count > 2 else ids)
    assert speaker.prepare(Text("a \ud800 b"), 99, 9, "head", pooling=Pooling()).token_ids == [0, 3, 2, 4, 1]


def test_embedding_prompt_precedes_the_text(tmp_path: Path) -> None:
    speaker = reader(tmp_path, prompts={"query": "query: ", "none": ""}, default_prompt_name="query")
    assert speaker.prepare(Text("a"), pooling=Pooling()).token_ids == [0, 9, 3, 1]
    assert speaker.prepare(Text("a"), pooling=Pooling(prompt="none")).token_ids == [0, 3, 1]
    assert speaker.prepare(Tokens([3]), pooling=Pooling()).token_ids == [3]
    assert speaker.prepare(Text("a")).token_ids == [0, 3, 1]
    with pytest.raises(Invalid, match=r"no prompt 'passage'; it has none, query"):
        speaker.prepare(Text("a"), pooling=Pooling(prompt="passage"))


def test_lowercase_embedding_model_lowercases_text(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    assert reader(tmp_path).prepare(Text("A"), pooling=Pooling()).token_ids == [0, 3, 1]
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": false}')
    assert reader(tmp_path).prepare(Text("A"), pooling=Pooling()).token_ids == [0, 10, 1]
