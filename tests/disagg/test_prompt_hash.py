"""Prompt hashes: equal prefixes have equal hashes, different ones differ, and no input raises an exception."""

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from parley.disagg.wire.prompt_hash import MARK_POSITIONS, PrefixMark, RecentPrefixes, hash_prompt

WORDS = st.text(max_size=40)


def chat_body(turns, **more):
    messages = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(turns)]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


@given(st.lists(WORDS, min_size=1, max_size=12), st.lists(WORDS, max_size=3))
def test_continued_conversation_keeps_the_hashes_of_its_prefix(turns, more):
    before, after = (
        hash_prompt(chat_body(turns, temperature=1)),
        hash_prompt(chat_body([*turns, *more], temperature=0, seed=3)),
    )
    assert [mark.prefix_hash for mark in after.marks[: len(before.marks)]] == [
        mark.prefix_hash for mark in before.marks
    ]


@given(st.lists(WORDS, min_size=4, max_size=8), st.integers(0, 3))
def test_prompt_hashes_differ_from_the_first_difference_on(turns, at):
    other = [*turns[:at], turns[at] + "x", *turns[at + 1 :]]
    one, two = hash_prompt(chat_body(turns)), hash_prompt(chat_body(other))
    equal_hashes = [a.prefix_hash == b.prefix_hash for a, b in zip(one.marks, two.marks, strict=False)]
    assert equal_hashes == sorted(equal_hashes, reverse=True)
    assert (
        len(one.marks) < 2
        or len(chat_body(turns[: at + 1])) > MARK_POSITIONS[len(one.marks) - 1]
        or not equal_hashes[-1]
    )


def test_prompt_hashes_depend_on_model_salt_tools_and_adapter():
    texts = ["x" * 500]
    bodies = [
        chat_body(texts),
        chat_body(texts, model="other"),
        chat_body(texts, cache_salt="s"),
        chat_body(texts, tools=[{"type": "function", "function": {"name": "f", "description": "y" * 200}}]),
        chat_body(texts, adapter_id="a"),
    ]
    assert len({hash_prompt(body).marks[0].prefix_hash for body in bodies}) == len(bodies)


def test_hashes_of_different_owners_differ():
    body = chat_body(["x" * 500, "y", "z"])
    hashed = [hash_prompt(body, owner=owner) for owner in ("", "a" * 32, "b" * 32)]
    assert len({each.marks[0].prefix_hash for each in hashed}) == 3
    assert len({each.conversation_hashes() for each in hashed}) == 3


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | WORDS, st.lists).map(
    lambda value: json.dumps({"messages": value, "model": value}).encode()))  # fmt: skip
@settings(max_examples=60, deadline=None)
@example(b'{"model":"\xff","messages":[]}')
def test_hashes_a_prompt_in_arbitrary_bytes(body):
    hashed = hash_prompt(body)
    hashed.conversation_hashes()
    assert hashed.token_count >= 0
    assert [mark.tokens for mark in hashed.marks] == sorted(mark.tokens for mark in hashed.marks)


def test_prompt_length_is_estimated_from_text_or_token_ids():
    assert hash_prompt(b'{"prompt":[1,2,3]}').token_count == 3
    assert hash_prompt(json.dumps({"inputs": "abcd" * 402}).encode()).token_count == (4 * 402 + 2) // 4.02
    assert hash_prompt(b'{"text_input":"' + "é".encode() * 1000 + b'"}').token_count == 1002 // 4.02
    assert hash_prompt(b"[]").token_count == hash_prompt(b'{"prompt":null}').token_count == 0
    big = hash_prompt(json.dumps({"prompt": "x" * (1 << 20)}).encode())
    assert len(big.marks) < 100 and big.marks[-1].tokens > 0.85 * big.token_count


def test_turn_hash_covers_all_but_the_last_two_messages():
    first = hash_prompt(chat_body(["a"])).conversation_hashes()
    assert first is not None and first.message_count == 1
    third = hash_prompt(chat_body(["a", "b", "c"])).conversation_hashes()
    assert third is not None and (third.message_count, third.earlier_hash) == (3, first.full_hash)
    assert hash_prompt(b'{"prompt":"x"}').conversation_hashes() is None


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), max_size=30), st.integers(0, 200))
def test_known_prefixes_stay_within_the_cache_capacity(prompts, capacity):
    known = RecentPrefixes(capacity)
    for number, steps in enumerate(prompts):
        tokens, marks = 0, []
        for step in steps:
            tokens += step
            marks.append(PrefixMark(tokens, hash((number % 5, tokens)) & 0xFFFF))
        known.add_prompt(marks)
        if tokens <= capacity:
            assert {mark.prefix_hash for mark in marks} <= set(known.newest_hashes())
            assert known.newest_hashes()[0] == marks[0].prefix_hash  # a prefix outlives its continuations
    assert len(known.newest_hashes(3)) <= 3
