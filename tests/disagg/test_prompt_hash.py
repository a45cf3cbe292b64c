"""Prompt hashes: equal prefixes have equal hashes, different ones differ, and no input raises an exception."""

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from parley.disagg.wire.prompt_hash import MARKS, Known, Mark, look

WORDS = st.text(max_size=40)


def chat(turns, **more):
    said = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(turns)]
    return json.dumps({"model": "m", "messages": said, **more}).encode()


@given(st.lists(WORDS, min_size=1, max_size=12), st.lists(WORDS, max_size=3))
def test_continued_conversation_keeps_the_hashes_of_its_prefix(turns, more):
    before, after = look(chat(turns, temperature=1)), look(chat([*turns, *more], temperature=0, seed=3))
    assert [mark.hash for mark in after.marks[: len(before.marks)]] == [mark.hash for mark in before.marks]


@given(st.lists(WORDS, min_size=4, max_size=8), st.integers(0, 3))
def test_prompt_hashes_differ_from_the_first_difference_on(turns, at):
    other = [*turns[:at], turns[at] + "x", *turns[at + 1 :]]
    one, two = look(chat(turns)), look(chat(other))
    same = [a.hash == b.hash for a, b in zip(one.marks, two.marks, strict=False)]
    assert same == sorted(same, reverse=True)
    assert len(one.marks) < 2 or len(chat(turns[: at + 1])) > MARKS[len(one.marks) - 1] or not same[-1]


def test_prompt_hashes_depend_on_model_salt_tools_and_adapter():
    texts = ["x" * 500]
    bodies = [
        chat(texts),
        chat(texts, model="other"),
        chat(texts, cache_salt="s"),
        chat(texts, tools=[{"type": "function", "function": {"name": "f", "description": "y" * 200}}]),
        chat(texts, adapter_id="a"),
    ]
    assert len({look(body).marks[0].hash for body in bodies}) == len(bodies)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | WORDS, st.lists).map(
    lambda value: json.dumps({"messages": value, "model": value}).encode()))  # fmt: skip
@settings(max_examples=60, deadline=None)
@example(b'{"model":"\xff","messages":[]}')
def test_hashes_a_prompt_in_arbitrary_bytes(body):
    found = look(body)
    found.turns()
    assert found.length >= 0
    assert [mark.tokens for mark in found.marks] == sorted(mark.tokens for mark in found.marks)


def test_prompt_length_is_estimated_from_text_or_token_ids():
    assert look(b'{"prompt":[1,2,3]}').length == 3
    assert look(json.dumps({"inputs": "abcd" * 402}).encode()).length == (4 * 402 + 2) // 4.02
    assert look(b'{"text_input":"' + "é".encode() * 1000 + b'"}').length == 1002 // 4.02
    assert look(b"[]").length == look(b'{"prompt":null}').length == 0
    big = look(json.dumps({"prompt": "x" * (1 << 20)}).encode())
    assert len(big.marks) < 100 and big.marks[-1].tokens > 0.85 * big.length


def test_turn_hash_covers_all_but_the_last_two_messages():
    first = look(chat(["a"])).turns()
    assert first is not None and first.count == 1
    third = look(chat(["a", "b", "c"])).turns()
    assert third is not None and (third.count, third.before) == (3, first.whole)
    assert look(b'{"prompt":"x"}').turns() is None


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), max_size=30), st.integers(0, 200))
def test_known_prefixes_stay_within_the_cache_capacity(prompts, capacity):
    known = Known(capacity)
    for number, steps in enumerate(prompts):
        tokens, marks = 0, []
        for step in steps:
            tokens += step
            marks.append(Mark(tokens, hash((number % 5, tokens)) & 0xFFFF))
        known.add(marks)
        if tokens <= capacity:
            assert {mark.hash for mark in marks} <= set(known.hashes())
            assert known.hashes()[0] == marks[0].hash  # a prefix outlives its continuations
    assert len(known.hashes(3)) <= 3
