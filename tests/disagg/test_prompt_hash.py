"""Prompt hashes: equal prefixes have equal hashes, different ones differ, and no input raises an exception."""

import base64
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parley.dialects.json_body import MAX_MEMBERS
from parley.disagg.wire.prompt_hash import (
    CHARACTERS_PER_TOKEN,
    MARK_POSITIONS,
    MEDIA_SIZE,
    PrefixMark,
    PromptHashes,
    RecentPrefixes,
    hash_prompt,
    shrink_media,
)

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


def test_texts_that_a_dialect_drops_do_not_change_the_hashes():
    """Claude Code writes another hash into its billing line in each request, before everything else."""
    rules = {"type": "text", "text": "rules " * 100}
    bodies = [
        chat_body(
            ["x" * 500], system=[{"type": "text", "text": f"x-anthropic-billing-header: cch={code};{end}"}, rules]
        )
        for code, end in (("a", ""), ("bcd", ""), ('"', "\nYou are"), ("e", "\nYou are"), ("e", "\nYou were"))
    ]
    one, two, *longer, other = (hash_prompt(body).marks for body in bodies)
    assert one and one == two
    assert longer[0] == longer[1] != other


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
    assert len({prompt.marks[0].prefix_hash for prompt in hashed}) == 3
    assert len({prompt.conversation_hashes() for prompt in hashed}) == 3


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | WORDS, st.lists).map(
    lambda value: json.dumps({"messages": value, "model": value}).encode()))  # fmt: skip
@settings(max_examples=60, deadline=None)
@example(b'{"model":"\xff","messages":[]}')
def test_hashes_a_prompt_in_arbitrary_bytes(body):
    hashed = hash_prompt(body)
    hashed.conversation_hashes()
    assert hashed.token_count >= 0
    assert [mark.tokens for mark in hashed.marks] == sorted(mark.tokens for mark in hashed.marks)


IMAGE = base64.b64encode(bytes(range(256)) * 40).decode()  # 14 kB
OTHER_IMAGE = base64.b64encode(bytes(range(255)) * 40).decode()
MEDIA_BODIES = {
    "image_url": lambda data: chat_body(
        [[{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]]
    ),
    "input_audio": lambda data: chat_body([[{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]]),
    "file": lambda data: chat_body([[{"type": "file", "file": {"file_data": f"data:audio/wav;base64,{data}"}}]]),
    "link": lambda data: json.dumps({"inputs": f"![](data:image/png;base64,{data})" + "What is it? " * 9}).encode(),
    "jpg": lambda data: json.dumps({"inputs": [{"type": "image_url", "image_url": data}]}).encode(),
    "jpg in an object": lambda data: chat_body([[{"type": "image_url", "image_url": {"url": data}}]]),
    "input": lambda data: json.dumps({"text_input": "What is it?", "image": [data]}).encode(),
    "tensor": lambda data: json.dumps({"inputs": [{"name": "image", "datatype": "BYTES", "data": [data]}]}).encode(),
}


@pytest.mark.parametrize("form", MEDIA_BODIES)
def test_media_count_as_a_thousand_characters(form):
    body = MEDIA_BODIES[form](IMAGE)
    one, same, other = map(hash_prompt, (body, body, MEDIA_BODIES[form](OTHER_IMAGE)))
    assert one.token_count < 400 < len(body) / CHARACTERS_PER_TOKEN
    assert one.marks and one.marks == same.marks
    assert one.marks[-1].prefix_hash != other.marks[-1].prefix_hash
    assert one.conversation_hashes() == same.conversation_hashes()
    if one.messages:
        assert one.conversation_hashes() != other.conversation_hashes()


@pytest.mark.parametrize("form", MEDIA_BODIES)
def test_media_are_found_behind_escaped_slashes(form):
    """Some clients, such as PHP's, write a slash in JSON as two characters."""
    body = MEDIA_BODIES[form](IMAGE).replace(b"/", b"\\/")
    assert b"\\/" in body and hash_prompt(body).token_count < 400


def test_text_after_media_keeps_its_marks():
    url = f"data:image/png;base64,{IMAGE}"
    turns = [[{"type": "image_url", "image_url": {"url": url}}], "a" * 600]
    before, after = hash_prompt(chat_body(turns)), hash_prompt(chat_body([*turns, "b" * 600]))
    assert len(after.marks) > len(before.marks) and after.marks[: len(before.marks) - 1] == [
        mark for mark in after.marks if mark.prefix_hash in {old_mark.prefix_hash for old_mark in before.marks[:-1]}
    ]


@given(st.binary(max_size=4000))
@settings(max_examples=60, deadline=None)
def test_shrinking_media_changes_nothing_but_long_data(text):
    assert shrink_media(text) == text
    marked = text + b";base64," + b"A" * 2000 + b'"' + text
    assert len(shrink_media(marked)) == len(text) * 2 + len(b';base64,"') + MEDIA_SIZE


def test_prompt_length_is_estimated_from_text_or_token_ids():
    assert hash_prompt(b'{"prompt":[1,2,3]}').token_count == 3
    assert hash_prompt(json.dumps({"inputs": "abcd" * 402}).encode()).token_count == (4 * 402 + 2) // 4.02
    assert hash_prompt(b'{"text_input":"' + "é".encode() * 1000 + b'"}').token_count == 1002 // 4.02
    assert hash_prompt(b"[]").token_count == hash_prompt(b'{"prompt":null}').token_count == 0
    big = hash_prompt(json.dumps({"prompt": "x" * (1 << 20)}).encode())
    assert len(big.marks) < 100 and big.marks[-1].tokens > 0.85 * big.token_count


@pytest.mark.parametrize("documents", ["items", "documents", "texts"])
def test_a_prompt_counts_once_for_each_text_that_is_computed_with_it(documents):
    alone = hash_prompt(json.dumps({"query": "a" * 400}).encode())
    texts = ["b" * 100] * 5
    scored = hash_prompt(json.dumps({documents: texts, "query": "a" * 400}).encode())
    listed = hash_prompt(json.dumps({"input": texts}).encode()).token_count
    assert abs(scored.token_count - 5 * alone.token_count - listed) <= 1
    pairs = hash_prompt(json.dumps({"queries": ["c" * 100] * 5, documents: texts}).encode())
    assert abs(pairs.token_count - 2 * listed) <= 1
    if documents != "documents":  # those of a conversation come before it
        assert scored.marks == alone.marks
    assert hash_prompt(json.dumps({documents: texts}).encode()).token_count <= listed


def test_a_body_with_too_many_members_is_not_decoded():
    """No instance takes it; its members would keep the coordinator busy for seconds."""
    members = b",".join(b'"%d":1' % number for number in range(MAX_MEMBERS))
    assert hash_prompt(b'{"prompt":"%b"}' % (b"a" * 1000)).marks
    assert hash_prompt(b'{"prompt":"%b",%b}' % (b"a" * 1000, members)) == PromptHashes()


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
