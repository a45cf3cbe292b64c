"""One choice of an answer: the division of its tokens into outputs never matters; usage counts delivered tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_tokenizers import TOKENIZERS, byte_level

from parley.text.answer_choice import AnswerChoice, describe_prompt_tokens
from parley.text.parsing.call_forms import HERMES
from parley.text.parsing.markup import Markup
from parley.text.prepared_prompt import PreparedPrompt
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import (
    ChatPrompt,
    ChoiceDelta,
    ChoiceDone,
    EngineOutput,
    Message,
    OutputOptions,
    Request,
    StopConditions,
    TokenCost,
    TokenScore,
    ToolCallDelta,
)

QWEN = Markup(("<think>", "</think>"), (HERMES,))
CHAT = ChatPrompt([Message("user", "hi")])


class ClientAnswer:
    """The answer that a client puts together from the events."""

    def __init__(self) -> None:
        self.text = {"content": "", "reasoning": "", "tool": ""}
        self.calls: list[list[str]] = []
        self.tokens: list[int] = []
        self.done: ChoiceDone | None = None

    def add(self, events: list[Any]) -> None:
        for event in events:
            assert self.done is None, "something after the end"
            if isinstance(event, ChoiceDone):
                self.done = event
                continue
            assert isinstance(event, ChoiceDelta) and event.index == 3
            assert event.text or event.tool_call or event.tokens, "an empty delta"
            self.text[event.output_part] += event.text
            self.tokens += [token.id for token in event.tokens]
            if event.tool_call is not None:
                self._call(event.tool_call)

    def _call(self, call: ToolCallDelta) -> None:
        if call.name is not None:
            assert call.index == len(self.calls)
            self.calls.append([call.name, ""])
        self.calls[call.index][1] += call.arguments

    @property
    def usage(self) -> tuple[int, int, int, int]:
        assert self.done is not None
        usage = self.done.usage
        return usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens

    def comparable(self) -> Any:
        assert self.done is not None
        return self.text, self.calls, self.tokens, self.done.reason, self.done.stop, self.usage


def feed_choice(
    ids: list[int],
    sizes: tuple[int, ...] | list[int] = (1,),
    tokenizer: Tokenizer | None = None,
    finish: Any = "length",
    stop_id: int | None = None,
    markup: Markup = QWEN,
    thinking: bool = False,
    prompt: list[int] | None = None,
    **fields: Any,
) -> ClientAnswer:
    """Feed the ids to a choice in outputs of these sizes, and return the client's answer."""
    tokenizer = tokenizer or byte_level()
    request = Request(id="r", model="m", prompts=[CHAT], **fields)
    prepared = PreparedPrompt(prompt if prompt is not None else tokenizer.encode("hi"), markup, thinking)
    choice = AnswerChoice(request, 3, tokenizer, prepared)
    result = ClientAnswer()
    start = 0
    for size in itertools.cycle(sizes):
        chunk, is_last = ids[start : start + size], start + size >= len(ids)
        scores = [TokenScore(-0.5, 1, [token_id, 0], [-0.5, -2.0]) for token_id in chunk]
        output = EngineOutput(
            "r", 3, chunk, scores, finish if is_last else None, stop_id if is_last else None, cached_tokens=2
        )
        result.add(choice.push_output(output))
        start += size
        assert choice.finished == (result.done is not None)
        if choice.finished:
            break
    assert (
        choice.push_output(EngineOutput("r", 3, [1], finish_reason="stop")) == []
        and choice.finish_early("cancel") == []
    )
    return result


def encode_plain(text: str, tokenizer: Tokenizer | None = None) -> list[int]:
    return (tokenizer or byte_level()).encode(text, add_special_tokens=False)


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "\n", '{"name": "f", "arguments": {', '"a": "€🎉"', "}}", "x",
    " END",    " stop here", "<|im_end|>", "你", "</s>", " the capital",
]  # fmt: skip
output_texts = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)
chunk_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=6)
stop_lists = st.lists(st.sampled_from(["END", "stop", "END stop", "\n\n", "🎉", "xx", 'f", ', "<think>x"]), max_size=3)


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@given(
    output_texts, chunk_sizes, stop_lists, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 12),
    st.sampled_from([QWEN, Markup()]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_output_sizes_do_not_change_answer(
    kind: str,
    text: str,
    sizes: list[int],
    strings: list[str],
    include: bool,
    skip: bool,
    ended: bool,
    min_tokens: int,
    markup: Markup,
) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = encode_plain(text, tokenizer)
    eos = tokenizer.backend.token_to_id("</s>")
    assert eos is not None
    ids = [*ids, eos] if ended else [*ids, *encode_plain("x", tokenizer)]
    options: dict[str, Any] = {
        "tokenizer": tokenizer, "finish": "stop" if ended else "length", "stop_id": eos if ended else None,
        "markup": markup,
        "stop_conditions": StopConditions(strings=strings, include_in_output=include, min_tokens=min_tokens),
        "output_options": OutputOptions(logprobs=1, skip_special=skip),
    }  # fmt: skip
    result = feed_choice(ids, [1], **options)
    assert feed_choice(ids, sizes, **options).comparable() == result.comparable()
    assert feed_choice(ids, [10**6], **options).comparable() == result.comparable()
    assert result.tokens == ids[: len(result.tokens)]
    assert result.usage[:3] == (len(tokenizer.encode("hi")), len(result.tokens), 2)
    if result.done and isinstance(result.done.stop, str):
        assert len(result.tokens) >= min_tokens
    else:
        assert result.tokens == ids
    if markup.all_marks == () and not strings:
        shown_ids = ids[:-1] if ended else ids
        prompt = tokenizer.encode("hi")
        assert tokenizer.decode(prompt, skip) + result.text["content"] == tokenizer.decode(prompt + shown_ids, skip)


def test_choice_separates_reasoning_content_and_calls() -> None:
    text = '<think>\nhm\n</think>\n\nOk.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    eos = byte_level().backend.token_to_id("</s>")
    result = feed_choice([*encode_plain(text), eos or 0], finish="stop", stop_id=eos)
    assert result.text == {"content": "Ok.", "reasoning": "hm", "tool": ""}
    assert result.calls == [["f", '{"a": 1}']]
    assert result.done is not None and (result.done.reason, result.done.stop) == ("tool", None)
    assert result.usage[3] == len(encode_plain("\nhm\n"))  # the marks do not count


@pytest.mark.parametrize(("text", "thinking", "counted"), [
    ("<think>a b</think>c", False, "a b"), ("a b</think>c", True, "a b"), ("a </thin", True, "a </thin"),
    ("a </thing>b</think>c", True, "a </thing>b"), ("no marks", False, ""),
])  # fmt: skip
def test_reasoning_tokens_are_those_between_the_marks(text: str, thinking: bool, counted: str) -> None:
    assert feed_choice(encode_plain(text), thinking=thinking).usage[3] == len(encode_plain(counted))
    tokenizer = byte_level()
    marked = text.replace("<think>", "<|im_start|>").replace("</think>", "<|im_end|>")
    result = feed_choice(
        encode_plain(marked), tokenizer=tokenizer, markup=Markup(("<|im_start|>", "<|im_end|>")), thinking=thinking
    )
    assert result.usage[3] == len(encode_plain(counted))


@pytest.mark.parametrize(("finish", "reason"), [("length", "length"), ("cancel", "cancel"), ("error", "error")])
def test_truncated_call_does_not_finish_with_tool_reason(finish: str, reason: str) -> None:
    result = feed_choice(encode_plain('<tool_call>{"name": "f", "arguments": {"a'), finish=finish)
    assert result.calls == [["f", '{"a']]
    assert result.done is not None and result.done.reason == reason


def test_stop_string_ends_choice_at_completing_token() -> None:
    ids = encode_plain("one") + encode_plain(" END") + encode_plain(" two")
    result = feed_choice(ids, [100], finish="length", stop_conditions=StopConditions(strings=["END"]))
    assert result.text["content"] == "one "
    assert result.done is not None and (result.done.reason, result.done.stop) == ("stop", "END")
    assert result.usage[1] == len(encode_plain("one")) + len(encode_plain(" END"))
    assert (
        feed_choice(ids, stop_conditions=StopConditions(strings=["END"], include_in_output=True)).text["content"]
        == "one END"
    )
    late = feed_choice(ids, stop_conditions=StopConditions(strings=["END"], min_tokens=len(ids)))
    assert late.text["content"] == "one END two" and late.done is not None and late.done.reason == "length"


def test_held_back_stop_prefix_is_delivered_at_end() -> None:
    result = feed_choice(
        encode_plain("abc EN"),
        stop_conditions=StopConditions(strings=["END"]),
        output_options=OutputOptions(logprobs=0),
    )
    assert result.text["content"] == "abc EN" and result.tokens == encode_plain("abc EN")


@pytest.mark.parametrize("interval", [1, 2, 4, 100])
@pytest.mark.parametrize("want", [{}, {"ids": True}, {"logprobs": 0}], ids=str)
def test_stream_interval_sets_tokens_per_chunk(interval: int, want: dict[str, Any]) -> None:
    text = "The capital of France is Paris, and that is what it was."
    ids = encode_plain(text)
    request = Request(id="r", model="m", prompts=[CHAT], output_options=OutputOptions(stream_interval=interval, **want))
    choice = AnswerChoice(request, 0, byte_level(), PreparedPrompt([1], QWEN, False))
    event_lists = [
        choice.push_output(EngineOutput("r", 0, [token_id], [TokenScore(-0.5, 1, [token_id], [-0.5])]))
        for token_id in ids
    ]
    assert [number for number, events in enumerate(event_lists) if events] == list(range(0, len(ids), interval))
    assert all(len(events) == 1 for events in event_lists if events)
    event_lists.append(choice.finish_early("length"))
    assert "".join(event.text for events in event_lists for event in events if isinstance(event, ChoiceDelta)) == text


def test_stop_string_matches_inside_reasoning_and_calls() -> None:
    text = '<think>a</think>b<tool_call>{"name": "f", "arguments": {"x": "END"}}</tool_call>'
    result = feed_choice(encode_plain(text), stop_conditions=StopConditions(strings=["END"]))
    assert result.calls == [["f", '{"x": "']]
    assert result.done is not None and result.done.reason == "stop"
    thought = feed_choice(encode_plain("<think>a END of</think>b"), stop_conditions=StopConditions(strings=["END"]))
    assert thought.text == {"content": "", "reasoning": "a ", "tool": ""}
    assert thought.done is not None and (thought.done.reason, thought.done.stop) == ("stop", "END")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("requested", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("token", ["</s>", " the"])
def test_stop_token_is_shown_only_if_included(include: bool, requested: bool, skip: bool, token: str) -> None:
    (end,) = encode_plain(token)
    ids = [*encode_plain("abc"), end]
    stop = StopConditions(ids=[end] if requested else [], include_in_output=include)
    output_options = OutputOptions(logprobs=0, skip_special=skip)
    result = feed_choice(ids, finish="stop", stop_id=end, stop_conditions=stop, output_options=output_options)
    is_shown = include and requested and not (skip and token == "</s>")
    assert result.text["content"] == ("abc" + token if is_shown else "abc")
    assert result.done is not None and (result.done.reason, result.done.stop) == ("stop", end if requested else None)
    assert result.usage[1] == len(ids) and result.tokens == ids


def test_token_details_are_built_on_demand_with_scores() -> None:
    tokenizer = byte_level()
    request = Request(id="r", model="m", prompts=[CHAT], output_options=OutputOptions(logprobs=1))
    ids = encode_plain("Paris €")
    scores = [TokenScore(-1.5, 2, [7, token_id, 9], [-0.5, -1.5, -3.0]) for token_id in ids]
    prepared = PreparedPrompt(tokenizer.encode("hi"))
    events = AnswerChoice(request, 0, tokenizer, prepared).push_output(EngineOutput("r", 0, ids, scores, "length"))
    tokens = [token for event in events if isinstance(event, ChoiceDelta) for token in event.tokens]
    assert b"".join(token.raw_bytes for token in tokens) == "Paris €".encode()
    assert [(token.id, token.logprob, token.rank) for token in tokens] == [(token_id, -1.5, 2) for token_id in ids]
    assert [[(top.id, top.logprob, top.rank, top.text) for top in token.top_tokens] for token in tokens] == [
        [(7, -0.5, 1, tokenizer.token_bytes(7).decode())] for _ in ids
    ]
    plain = Request(id="r", model="m", prompts=[CHAT])
    for details, count in ((False, 0), (True, len(ids))):
        events = AnswerChoice(plain, 0, tokenizer, prepared, details=details).push_output(
            EngineOutput("r", 0, ids, None, "length")
        )
        assert sum(len(event.tokens) for event in events if isinstance(event, ChoiceDelta)) == count


@pytest.mark.parametrize("strings", [[], [" 2"]])
@pytest.mark.parametrize("size", [1, 3])
def test_the_end_has_all_tokens_of_the_choice_on_demand(strings: list[str], size: int) -> None:
    tokenizer = byte_level()
    ids = encode_plain("one € 2 three")
    for on_demand in (False, True):
        options, stops = OutputOptions(whole_ids=on_demand), StopConditions(strings=strings)
        request = Request(id="r", model="m", prompts=[CHAT], output_options=options, stop_conditions=stops)
        choice = AnswerChoice(request, 0, tokenizer, PreparedPrompt(tokenizer.encode("hi")))
        outputs = [EngineOutput("r", 0, ids[start : start + size]) for start in range(0, len(ids), size)]
        outputs[-1].finish_reason = "length"
        *_, done = [event for output in outputs for event in choice.push_output(output)]
        assert isinstance(done, ChoiceDone)
        assert done.token_ids == (ids[: done.usage.completion_tokens] if on_demand else [])
        assert (done.usage.completion_tokens < len(ids)) == bool(strings)


def test_close_delivers_held_back_text() -> None:
    tokenizer = byte_level()
    request = Request(id="r", model="m", prompts=[CHAT], stop_conditions=StopConditions(strings=["END"]))
    choice = AnswerChoice(request, 0, tokenizer, PreparedPrompt(tokenizer.encode("hi")))
    first = choice.push_output(EngineOutput("r", 0, encode_plain("ok EN")))
    last = choice.finish_early("cancel")
    assert [event.text for event in [*first, *last] if isinstance(event, ChoiceDelta)] == ["ok ", "EN"]
    assert isinstance(last[-1], ChoiceDone) and last[-1].reason == "cancel" and choice.finished


def test_answer_without_tokens_reports_usage() -> None:
    tokenizer = byte_level()
    request = Request(id="r", model="m", prompts=[CHAT])
    choice = AnswerChoice(request, 0, tokenizer, PreparedPrompt([1, 2], QWEN, True))
    (done,) = choice.push_output(EngineOutput("r", 0, finish_reason="length"))
    assert isinstance(done, ChoiceDone) and done.usage.prompt_tokens == 2 and done.usage.completion_tokens == 0


def test_parser_sees_marks_that_are_special_tokens() -> None:
    tokenizer = byte_level()
    markup = Markup(("<|im_start|>", "<|im_end|>"))
    result = feed_choice(encode_plain("<|im_start|>hm<|im_end|><s>so"), tokenizer=tokenizer, markup=markup)
    assert (result.text["reasoning"], result.text["content"]) == ("hm", "so")
    plain = feed_choice(encode_plain("<|im_start|>hm<|im_end|><s>so"), tokenizer=tokenizer, markup=Markup())
    assert plain.text["content"] == "hmso"


def test_scored_event_pairs_prompt_tokens_with_scores() -> None:
    tokenizer = byte_level()
    ids = encode_plain("Paris €")
    scores = [None, *(TokenScore(-1.0, 1, [5], [-1.0]) for _ in ids[1:])]
    event = describe_prompt_tokens(tokenizer, 2, ids, scores, 1)
    assert event.prompt == 2 and [token.id for token in event.tokens] == ids
    assert event.tokens[0].logprob is None and event.tokens[0].top_tokens == []
    assert all(token.logprob == -1.0 and token.top_tokens[0].id == 5 for token in event.tokens[1:])
    assert [token.logprob for token in describe_prompt_tokens(tokenizer, 0, ids).tokens] == [None] * len(ids)


def test_token_keeps_its_cost_when_its_text_is_delayed():
    tokenizer = byte_level()
    ids = tokenizer.encode("a é b", add_special_tokens=False)
    costs = [TokenCost(number, number / 10, 0.5) for number in range(len(ids))]
    choice = AnswerChoice(
        Request(id="r", model="m", prompts=[CHAT], output_options=OutputOptions(token_costs=True)),
        0,
        tokenizer,
        PreparedPrompt([1]),
    )
    events = []
    for number, token_id in enumerate(ids):
        finish = "length" if number == len(ids) - 1 else None
        events += choice.push_output(
            EngineOutput("r", 0, [token_id], finish_reason=finish, token_costs=[costs[number]])
        )
    tokens = [token for event in events if isinstance(event, ChoiceDelta) for token in event.tokens]
    assert [token.id for token in tokens] == ids and [token.cost for token in tokens] == costs
