"""Prompts of every kind become token ids, together with the markup that their answer uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from support.tiny_models import write_tokenizer
from support.tiny_tokenizers import byte_level, word_level

from parley.demo.template import CHAT_TEMPLATE
from parley.errors import BadRequest, ContextLength, InvalidValue, Unsupported
from parley.text import fill_in_middle
from parley.text.grammar.answer_question import decode_question, encode_question
from parley.text.model_defaults import EmbeddingPrompts
from parley.text.parsing.chat_template import ChatTemplate
from parley.text.parsing.markup import detect_markup
from parley.text.text_pipeline import TextPipeline
from parley.text.tokens import long_text
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import (
    ChatPrompt,
    EncodedMedia,
    Grammar,
    JoinedPrompt,
    Media,
    Message,
    PlacedMedia,
    PoolingOptions,
    Prompt,
    TextPrompt,
    TokensPrompt,
)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
QUESTION = [Message("user", "Why?")]
FORM = Grammar("regex", "ab+")


def template_pipeline(source: str = CHAT_TEMPLATE) -> TextPipeline:
    tokenizer = byte_level()
    return TextPipeline(tokenizer, ChatTemplate({"default": source}, tokenizer.names))


def test_text_and_token_prompts_become_token_ids() -> None:
    tokenizer = byte_level()
    for special in (True, False):
        prepared = template_pipeline().prepare_prompt(TextPrompt("<s>Paris", special))
        assert prepared.token_ids == tokenizer.encode("<s>Paris", special) and prepared.markup.all_marks == ()
    assert template_pipeline().prepare_prompt(TokensPrompt([3, 1, 2])).token_ids == [3, 1, 2]


def test_limit_of_one_text_truncates_it_at_the_end() -> None:
    tokenizer, text = byte_level(), "Paris was the capital: 北京 🙂🙂 and Zürich " * 3
    pipeline, whole = template_pipeline(), len(tokenizer.encode(text, add_special_tokens=False))
    for special in (True, False):
        marks = len(tokenizer.encode("", special))
        for limit in (*range(1, 60), whole, 10 * whole):
            ids = pipeline.prepare_prompt(TextPrompt(text, special, max_tokens=limit)).token_ids
            assert len(ids) - marks <= limit and text.startswith(tokenizer.decode(ids)), limit
            assert limit < whole or ids == tokenizer.encode(text, special)


@pytest.mark.parametrize("layout", fill_in_middle.FILL_LAYOUTS, ids=lambda layout: layout[0])
def test_text_with_a_suffix_stands_between_the_marks_of_its_family(layout) -> None:
    plain = template_pipeline()
    assert "insert" not in plain.abilities
    with pytest.raises(Unsupported):
        plain.prepare_prompt(TextPrompt("def f(", suffix="): pass"))
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    backend.add_special_tokens(sorted(fill_in_middle.marks_of(layout)))
    tokenizer = Tokenizer(backend, {"bos_token": "<s>"})
    pipeline = TextPipeline(tokenizer, ChatTemplate({}, tokenizer.names))
    ids = pipeline.prepare_prompt(TextPrompt("def f(", suffix="): pass")).token_ids
    texts = {"before": tokenizer.encode("def f(", False), "after": tokenizer.encode("): pass", False)}
    assert ids == [token for piece in layout for token in texts.get(piece, [backend.token_to_id(piece)])]
    assert pipeline.abilities == {"insert"}


def test_chat_is_rendered_and_encoded_without_extra_marks() -> None:
    pipeline = template_pipeline()
    chat = ChatPrompt(QUESTION)
    prepared = pipeline.prepare_prompt(chat)
    assert byte_level().decode(prepared.token_ids, skip_special=False) == pipeline.template.render_conversation(chat)
    assert prepared.markup.reasoning_marks and not prepared.markup.call_forms and not prepared.starts_in_reasoning
    assert pipeline.prepare_prompt(ChatPrompt(QUESTION, tools=[TOOL])).markup.call_forms


def test_thinking_uses_the_variable_that_the_template_reads() -> None:
    def rendered_with(source: str, **members) -> str:
        return template_pipeline("{% set a = 1 %}" + source).render_chat(ChatPrompt(QUESTION, **members)).text

    for name in ("enable_thinking", "thinking"):
        source = f"{{{{ {name} | default('-') }}}}"
        assert rendered_with(source) == "-"
        assert rendered_with(source, thinking=True) == rendered_with(source, reasoning_effort="low") == "True"
        assert rendered_with(source, thinking=False) == rendered_with(source, reasoning_effort="none") == "False"
        assert rendered_with(source, thinking=True, options={name: "mine"}) == "mine"
        assert rendered_with(source, options={"enable_thinking": False}) == "False"  # the name that clients use
    assert rendered_with("{{ reasoning_effort | default('-') }}", reasoning_effort="high") == "high"


def test_prompt_shows_tools_with_any_template() -> None:
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    source = "{{ tools | tojson }}"
    assert json.loads(template_pipeline(source).render_chat(ChatPrompt(QUESTION, [strict])).text) == [TOOL]
    without_tools = template_pipeline("{{ messages[-1].content }}")
    assert without_tools.render_chat(ChatPrompt(QUESTION, [TOOL])).text == "Why?"
    assert '"name": "f"' in without_tools.render_chat(ChatPrompt(QUESTION, [TOOL], "required")).text


def test_documents_and_safety_modes_are_abilities_of_a_template_that_reads_them() -> None:
    source = "{% for d in documents %}[{{ d.text }}]{% endfor %}{{ safety_mode }}:{{ messages[0].content }}"
    pipeline, chat = template_pipeline(source), ChatPrompt(QUESTION, options={"documents": [{"text": "<s>"}]})
    assert {"documents", "safety_mode"} <= pipeline.abilities
    assert not {"documents", "safety_mode"} & template_pipeline().abilities
    ids = pipeline.prepare_prompt(chat).token_ids
    assert byte_level().decode(ids) == "[<s>]:Why?"  # a client's text is no mark


def test_text_prompt_may_become_user_turn() -> None:
    pipeline = template_pipeline()
    turn = pipeline.prepare_prompt(TextPrompt("Why?", as_user_turn=True))
    assert turn.token_ids == pipeline.prepare_prompt(ChatPrompt(QUESTION)).token_ids
    assert turn.markup.all_marks == (), "its answer is text"
    tokenizer = byte_level()
    plain = TextPipeline(tokenizer, ChatTemplate({}, tokenizer.names))
    assert plain.prepare_prompt(TextPrompt("Why?", as_user_turn=True)).token_ids == tokenizer.encode("Why?")


def test_prompt_may_open_the_reasoning_block() -> None:
    pipeline = template_pipeline("{{ messages[0].content }}<assistant><think>\n{# </think> #}")
    assert pipeline.prepare_prompt(ChatPrompt(QUESTION)).starts_in_reasoning
    continued = ChatPrompt([*QUESTION, Message("assistant", "<think>\nLet me")], continue_final=True)
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# <think> #}"
    assert template_pipeline(source).prepare_prompt(continued).starts_in_reasoning


def test_a_rendered_conversation_is_not_rendered_again_and_its_answer_is_parsed() -> None:
    tokenizer = byte_level()
    for text, opens in (("<s>Why?<think>\n", True), ("Why?", False)):
        chat = ChatPrompt([Message("user", text)], rendered=True, add_special_tokens=True, preceding_ids=[7, 8])
        prepared = template_pipeline().prepare_prompt(chat)
        assert prepared.token_ids == [7, 8, *tokenizer.encode(text, add_special_tokens=True)]
        assert prepared.markup.reasoning_marks and prepared.starts_in_reasoning is opens
    empty = TextPipeline(tokenizer, ChatTemplate({}, tokenizer.names))  # a model without a chat template
    prepared = empty.prepare_prompt(ChatPrompt([Message("user", "Hi")], rendered=True))
    assert prepared.token_ids == tokenizer.encode("Hi", add_special_tokens=False)


ASSISTANT = "{{ messages[0].content }}<|start|>assistant"
CONTINUED = ChatPrompt([*QUESTION, Message("assistant", "<think>\nLet me")], continue_final=True)
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# <think> </think> #}"
ANSWER_STARTS = [  # a template, the family of its marks, a conversation, and what its tokens are sent with
    (ASSISTANT + "<think>\n{# </think> #}", "auto", ChatPrompt(QUESTION), False),
    (ASSISTANT + "{# <think> </think> #}", "auto", ChatPrompt(QUESTION), None),
    (ASSISTANT + "<think>\n\n</think>\n\n", "auto", ChatPrompt(QUESTION), None),
    (ASSISTANT + "{# <think> </think> #}", "deepseek-r1", ChatPrompt(QUESTION), False),
    (TURNS, "auto", CONTINUED, False),
    (ASSISTANT + "{# <|channel|>analysis<|message|> #}", "auto", ChatPrompt(QUESTION), None),
    (ASSISTANT + "{# <|START_THINKING|> #}", "auto", ChatPrompt(QUESTION), None),
    (ASSISTANT, "auto", ChatPrompt(QUESTION), None),
]


@pytest.mark.parametrize(("template", "family", "chat", "reasoning_ended"), ANSWER_STARTS)
def test_tokens_of_a_conversation_are_answered_as_it_is(template, family, chat, reasoning_ended) -> None:
    pipeline = family_pipeline(template, family)
    prepared = pipeline.prepare_prompt(chat)
    assert pipeline.find_reasoning_ended(chat, prepared) is reasoning_ended
    tokens = TokensPrompt(prepared.token_ids, reasoning_ended)
    assert answer_form(pipeline, tokens) == answer_form(pipeline, chat)
    for other in (None, False, True):
        continued = pipeline.prepare_prompt(TokensPrompt(prepared.token_ids, other))
        assert pipeline.find_reasoning_ended(TokensPrompt(prepared.token_ids, other), continued) is other


def test_tokens_without_reasoning_have_the_form_from_their_first_one() -> None:
    """Of a plain text, and of a turn that looks as if reasoning began behind it."""
    pipeline = family_pipeline(TURNS, "deepseek-r1")
    plain = pipeline.compile_answer_grammar(TextPrompt("a"), FORM)
    continued = ChatPrompt([*QUESTION, Message("assistant", "So")], continue_final=True)
    for prompt in (TextPrompt("Why?<think>"), continued):
        prepared = pipeline.prepare_prompt(prompt)
        assert pipeline.find_reasoning_ended(prompt, prepared) is True
        assert answer_form(pipeline, TokensPrompt(prepared.token_ids, True)) == plain
    assert answer_form(pipeline, TokensPrompt(prepared.token_ids, None)) != plain


def family_pipeline(template: str, reasoning: str) -> TextPipeline:
    tokenizer = byte_level()
    markup = detect_markup(template, reasoning=reasoning)
    return TextPipeline(tokenizer, ChatTemplate({"default": template}, tokenizer.names), markup=markup)


def answer_form(pipeline: TextPipeline, prompt: Prompt) -> str:
    """Return the grammar that a prompt's answer must follow, as a grammar worker and the server make it."""
    grammar = pipeline.compile_answer_grammar(*decode_question(encode_question(prompt, FORM)))
    return pipeline.wrap_with_reasoning(grammar, pipeline.prepare_prompt(prompt), is_plain=False)


@pytest.mark.parametrize("budget", [0, 1, 2, 9])
def test_reasoning_budget_counts_tokens_before_closing_mark(budget: int) -> None:
    pipeline = template_pipeline()
    limit = pipeline.reasoning_limit(pipeline.prepare_prompt(ChatPrompt(QUESTION)), budget)
    assert limit is not None
    before, _, after = pipeline.tokenizer.decode(limit.closing_ids, skip_special=False).partition("</think>")
    assert (before.strip(), after) == ("", "\n\n")
    assert limit.budget + len(pipeline.tokenizer.encode(before, add_special_tokens=False)) == budget


def encoded_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the size of each text that a long text's encoder encodes."""
    sizes: list[int] = []
    encode_piece = long_text.encode_piece

    def spy(encode: long_text.Encode, text: str, start: int, size: int) -> long_text.Piece:
        sizes.append(min(size, len(text) - start))
        return encode_piece(encode, text, start, size)

    monkeypatch.setattr(long_text, "encode_piece", spy)
    return sizes


def test_hopelessly_long_prompt_is_refused_before_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, sizes = template_pipeline(), encoded_sizes(monkeypatch)
    for prompt in (TextPrompt("word " * 1_000_000), ChatPrompt([Message("user", "x" * 5_000_000)])):
        with pytest.raises(ContextLength, match="maximum context length is 100 tokens"):
            pipeline.prepare_prompt(prompt, 100)
    assert sum(sizes) <= 4 * long_text.PIECE_SIZE


def test_tokens_of_a_long_prompt_are_counted_for_its_refusal() -> None:
    """The tokens are counted up to a number that the request names; for longer prompts the refusal has that number."""
    pipeline = TextPipeline(word_level(), ChatTemplate({}))
    text = TextPrompt("Paris " * 100_000)
    assert len(pipeline.prepare_prompt(text, 10, counted_tokens=100_000).token_ids) == 100_000
    with pytest.raises(ContextLength, match="over 50000") as raised:
        pipeline.prepare_prompt(text, 10, counted_tokens=50_000)
    assert (raised.value.limit, raised.value.prompt, raised.value.prompt_over) == (10, None, 50_000)


@pytest.mark.parametrize("text", ["", "Paris " * 20, "Paris" + " " * 100_000 + "Tokyo"])
def test_long_text_of_few_tokens_is_accepted(text: str) -> None:
    pipeline = TextPipeline(word_level(), ChatTemplate({}))
    assert pipeline.prepare_prompt(TextPrompt(text), 10).token_ids == word_level().encode(text)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", ["", "Paris", "Paris is in France, " * 10, "Paris" + " " * 5000 + "Tokyo"])
def test_truncation_keeps_first_or_last_tokens(text: str, special: bool) -> None:
    for pipeline in (TextPipeline(word_level(), ChatTemplate({})), template_pipeline()):
        ids, plain = (pipeline.tokenizer.encode(text, has_special) for has_special in (special, False))
        for count in (1, 2, 5, 1000):
            assert pipeline.prepare_prompt(TextPrompt(text, special), 1000, count).token_ids == ids[-count:]
            assert (
                pipeline.prepare_prompt(TextPrompt(text, add_special_tokens=False), 1000, count, "head").token_ids
                == plain[:count]
            )
    assert template_pipeline().prepare_prompt(TokensPrompt([1, 2, 3]), 100, 2).token_ids == [2, 3]
    assert template_pipeline().prepare_prompt(TokensPrompt([1, 2, 3]), 100, 2, "head").token_ids == [1, 2]


def test_chat_truncated_at_its_end_opens_no_reasoning() -> None:
    pipeline = template_pipeline("{{ messages[0].content }}<assistant><think>\n{# </think> #}")
    whole = pipeline.prepare_prompt(ChatPrompt(QUESTION))
    first = pipeline.prepare_prompt(ChatPrompt(QUESTION), 1000, 3, "head")
    assert (whole.starts_in_reasoning, first.starts_in_reasoning, first.token_ids) == (True, False, whole.token_ids[:3])


def test_truncation_encodes_only_one_end_of_huge_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, sizes = template_pipeline(), encoded_sizes(monkeypatch)
    text = "The sun goes down. " * 500_000
    encode = pipeline.tokenizer.encode
    last, first = encode(text[-1000:])[-5:], encode(text[:1000])[:5]
    assert pipeline.prepare_prompt(TextPrompt(text), 100, 5).token_ids == last
    assert pipeline.prepare_prompt(TextPrompt(text, add_special_tokens=False), 100, 5, "head").token_ids == first
    with pytest.raises(ContextLength):
        pipeline.prepare_prompt(TextPrompt(text), 100, 101)
    assert sum(sizes) <= 6 * long_text.PIECE_SIZE


def test_prompt_tokens_have_character_spans() -> None:
    pipeline = template_pipeline()
    text, ids, spans = pipeline.tokenize_prompt(TextPrompt("Paris is near."))
    assert (text, ids) == ("Paris is near.", pipeline.tokenizer.encode("Paris is near."))
    assert len(spans) == len(ids) and spans[-1][1] == len(text)
    chat = ChatPrompt(QUESTION)
    text, ids, spans = pipeline.tokenize_prompt(chat)
    assert (text, ids) == (pipeline.template.render_conversation(chat), pipeline.prepare_prompt(chat).token_ids)
    assert pipeline.tokenize_prompt(TokensPrompt([4, 5])) == ("", [4, 5], [(0, 0), (0, 0)])
    assert pipeline.tokenize_prompt(TextPrompt("a\ud800"))[1] == pipeline.tokenizer.encode("a\ufffd")


@pytest.mark.parametrize(
    ("generation_config", "advice"),
    [
        (None, {}),
        ({"temperature": 0.6, "top_k": 20, "do_sample": True, "top_p": None, "min_p": "0.1", "eos_token_id": 2},
         {"temperature": 0.6, "top_k": 20}),
        ({"repetition_penalty": True, "max_new_tokens": 64}, {"max_new_tokens": 64}),
        ({"temperature": -1, "top_p": 0, "top_k": False, "min_p": float("nan"), "repetition_penalty": 0.0}, {}),
        ({"temperature": 0, "top_k": 20.0, "max_new_tokens": 0.5}, {"temperature": 0, "top_k": 20}),
    ],
)  # fmt: skip
def test_generation_config_gives_sampling_defaults(
    tmp_path: Path, generation_config: dict[str, object] | None, advice: dict[str, float]
) -> None:
    write_tokenizer(tmp_path)
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert TextPipeline.from_folder(tmp_path).generation_defaults == advice


def test_chat_without_template_is_bad_request() -> None:
    with pytest.raises(BadRequest):
        TextPipeline(byte_level(), ChatTemplate({})).prepare_prompt(ChatPrompt(QUESTION))


def test_text_package_imports_neither_torch_nor_transformers() -> None:
    modules = "('torch', 'transformers', 'numpy')"
    script = f"import sys, parley.text.answer_choice; print([m for m in {modules} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def encoder_pipeline(folder: Path, **settings: object) -> TextPipeline:
    """Return a pipeline whose tokenizer puts each text between two marks, as an encoder's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: token_id for token_id, word in enumerate(["[CLS]", "[SEP]", "[UNK]", *"abcdef", "query:", "A"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return TextPipeline.from_folder(folder)


def test_chat_may_request_special_tokens_around_it(tmp_path: Path) -> None:
    tokenizer = encoder_pipeline(tmp_path).tokenizer
    pipeline = TextPipeline(tokenizer, ChatTemplate({"default": "{{ messages[0].content }}"}, tokenizer.names))
    chat = ChatPrompt([Message("user", "a b")])
    assert pipeline.prepare_prompt(chat).token_ids == [3, 4]
    assert pipeline.prepare_prompt(msgspec.structs.replace(chat, add_special_tokens=True)).token_ids == [0, 3, 4, 1]


@pytest.mark.parametrize(
    ("count", "ids"), [(8, [0, 3, 4, 5, 6, 7, 8, 1]), (7, [0, 3, 4, 5, 6, 7, 1]), (3, [0, 3, 1]), (2, [0, 1]), (1, [0])]
)
def test_truncated_embedding_input_keeps_special_tokens(tmp_path: Path, count: int, ids: list[int]) -> None:
    pipeline = encoder_pipeline(tmp_path)
    assert (
        pipeline.prepare_prompt(TextPrompt("a b c d e f"), 99, count, "head", pooling=PoolingOptions()).token_ids == ids
    )
    plain = pipeline.prepare_prompt(
        TextPrompt("a b c d e f", add_special_tokens=False), 99, count, "head", pooling=PoolingOptions()
    ).token_ids
    assert plain == [3, 4, 5, 6, 7, 8][:count]
    assert (
        pipeline.prepare_prompt(TokensPrompt([3, 4, 5]), 99, count, "head", pooling=PoolingOptions()).token_ids
        == [3, 4, 5][:count]
    )
    assert (
        pipeline.prepare_prompt(
            TextPrompt("a b c d e f " * 9999), 99, count, "head", pooling=PoolingOptions()
        ).token_ids[:3]
        == ids[:3]
    )
    end = pipeline.prepare_prompt(TextPrompt("a b c d e f"), 99, count, "tail", pooling=PoolingOptions()).token_ids
    assert end == ([0, *[3, 4, 5, 6, 7, 8][8 - count :], 1] if count > 2 else ids)
    assert pipeline.prepare_prompt(TextPrompt("a \ud800 b"), 99, 9, "head", pooling=PoolingOptions()).token_ids == [
        0,
        3,
        2,
        4,
        1,
    ]


def test_embedding_prompt_precedes_the_text(tmp_path: Path) -> None:
    pipeline = encoder_pipeline(tmp_path, prompts={"query": "query: ", "none": ""}, default_prompt_name="query")
    assert pipeline.prepare_prompt(TextPrompt("a"), pooling=PoolingOptions()).token_ids == [0, 9, 3, 1]
    assert pipeline.prepare_prompt(TextPrompt("a"), pooling=PoolingOptions(prompt="none")).token_ids == [0, 3, 1]
    assert pipeline.prepare_prompt(TokensPrompt([3]), pooling=PoolingOptions()).token_ids == [3]
    assert pipeline.prepare_prompt(TextPrompt("a")).token_ids == [0, 3, 1]
    with pytest.raises(InvalidValue, match=r"no prompt 'passage'; it has none, query"):
        pipeline.prepare_prompt(TextPrompt("a"), pooling=PoolingOptions(prompt="passage"))
    optional = PoolingOptions(prompt="search_query", prompt_aliases=("question", "query"), prompt_optional=True)
    assert pipeline.prepare_prompt(TextPrompt("a"), pooling=optional).token_ids == [0, 9, 3, 1]
    assert encoder_pipeline(tmp_path).prepare_prompt(TextPrompt("a"), pooling=optional).token_ids == [0, 3, 1]
    with pytest.raises(InvalidValue, match="no prompt 'clustering'"):  # a model with prompts has to have this one
        pipeline.prepare_prompt(TextPrompt("a"), pooling=PoolingOptions(prompt="clustering", prompt_optional=True))


def test_embedding_prompt_precedes_the_media_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    pipeline = encoder_pipeline(tmp_path, prompts={"query": "query: "}, default_prompt_name="query")
    item = Media("image", EncodedMedia("AA=="), "documents")
    text = TextPrompt("\u0130A", media=[PlacedMedia(0, item), PlacedMedia(1, item), PlacedMedia(2, item)])
    prompt = pipeline.apply_embedding_prompt(text, PoolingOptions())
    assert prompt.text == "query: i\u0307a"  # two characters in place of the first one
    assert [placed.position for placed in prompt.media] == [7, 9, 10]


def test_embedding_prompt_is_the_system_message_of_a_conversation() -> None:
    pipeline = template_pipeline("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    pipeline.embedding_prompts = EmbeddingPrompts({"query": "Find it.", "none": ""}, default_name="query")
    chat = ChatPrompt([Message("user", "a")])

    def text_with(**options: Any) -> str:
        return pipeline.tokenizer.decode(pipeline.prepare_prompt(chat, pooling=PoolingOptions(**options)).token_ids)

    assert text_with(prompt="query") == "[system]Find it.[user]a"
    assert text_with(prompt="none") == text_with() == "[user]a"  # the default prompt is for texts alone
    with pytest.raises(InvalidValue, match="no prompt 'passage'"):
        text_with(prompt="passage")


def test_empty_part_of_a_joined_prompt_has_the_tokens_around_a_text(tmp_path: Path) -> None:
    pipeline, item = encoder_pipeline(tmp_path), TextPrompt("a", False)
    assert pipeline.prepare_prompt(JoinedPrompt([TextPrompt(""), item])).token_ids == [0, 1, 3]
    assert pipeline.prepare_prompt(JoinedPrompt([item, TextPrompt("", False), TokensPrompt([])])).token_ids == [3]


def test_lowercase_embedding_model_lowercases_text(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    assert encoder_pipeline(tmp_path).prepare_prompt(TextPrompt("A"), pooling=PoolingOptions()).token_ids == [0, 3, 1]
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": false}')
    assert encoder_pipeline(tmp_path).prepare_prompt(TextPrompt("A"), pooling=PoolingOptions()).token_ids == [0, 10, 1]
