"""Streaming never changes the text: the pieces concatenate to the text of all tokens decoded at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_tokenizers import KINDS, TEXT, byte_fallback, byte_level, suffixed

from parley.text import Detokenizer, Tokenizer

BY_PIECE = [name for name in KINDS if name != "suffixed"]
ids = st.lists(st.integers(0, 500), max_size=40)
cuts = st.lists(st.integers(1, 7), min_size=1, max_size=10)


def stream(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], sizes: list[int], skip: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    pieces = []
    at = turn = 0
    while at < len(output):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(output[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("kind", BY_PIECE)
@given(ids, cuts, st.booleans())
@settings(max_examples=60, deadline=None)
def test_streamed_pieces_join_to_decoded_text(kind: str, output: list[int], sizes: list[int], skip: bool) -> None:
    tokenizer = KINDS[kind]()
    assert "".join(stream(tokenizer, [], output, sizes, skip)) == tokenizer.decode(output, skip)


@pytest.mark.parametrize("kind", BY_PIECE)
@given(st.sampled_from(TEXT), ids, cuts)
@settings(max_examples=60, deadline=None)
def test_streamed_text_continues_prompt_text(kind: str, text: str, output: list[int], sizes: list[int]) -> None:
    tokenizer = KINDS[kind]()
    prompt = tokenizer.encode(text)
    whole = tokenizer.decode(prompt) + "".join(stream(tokenizer, prompt, output, sizes))
    assert whole == tokenizer.decode(prompt + output)


@pytest.mark.parametrize("kind", ["byte_level", "word_piece", "word_level", "metaspace"])
@given(ids, st.booleans())
@settings(max_examples=100, deadline=None)
def test_decode_agrees_with_tokenizers_library(kind: str, output: list[int], skip: bool) -> None:
    tokenizer = KINDS[kind]()
    assert tokenizer.decode(output, skip) == tokenizer.backend.decode(output, skip_special_tokens=skip)


@given(st.lists(st.integers(257, 500), max_size=40), st.text(max_size=20), st.booleans())
@settings(max_examples=100, deadline=None)
def test_byte_fallback_decodes_valid_bytes_like_library(output: list[int], text: str, skip: bool) -> None:
    tokenizer = byte_fallback()
    output = output + tokenizer.encode(text, special=False)
    assert tokenizer.decode(output, skip) == tokenizer.backend.decode(output, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(st.text(min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_characters_arrive_whole_and_without_delay(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    prompt = tokenizer.encode("x")
    output = tokenizer.encode("y" + text, special=False)
    text = tokenizer.decode(output, skip_special=False)
    detokenizer = Detokenizer(tokenizer, prompt, skip_special=False)
    seen = ""
    for count, id in enumerate(output, start=1):
        piece = detokenizer.push([id])
        assert "\ufffd" in text or "\ufffd" not in piece
        seen += piece
        data = b"".join(map(tokenizer.token_bytes, output[:count]))
        assert len(seen) >= len(data.decode("utf-8", "ignore"))
    assert detokenizer.flush() == ""


def spell(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return the ids of the single-byte tokens for this data."""
    bytes_of = {tokenizer.token_bytes(id): id for id in reversed(range(257))}
    return [bytes_of[bytes([byte])] for byte in data]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_invalid_bytes_do_not_affect_other_characters(kind: str) -> None:
    tokenizer = KINDS[kind]()
    output = spell(tokenizer, "a€b".encode() + b"\xe2\x82" + b"c" + b"\xff")
    for size in (1, 2, 100):
        assert "".join(stream(tokenizer, tokenizer.encode("x"), output, [size])) == "a€b\ufffdc\ufffd"


def test_incomplete_character_is_held_until_flush() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(spell(tokenizer, b"ok\xf0\x9f")) == "ok"
    assert detokenizer.push(spell(tokenizer, b"\x8e")) == ""
    assert detokenizer.flush() == "\ufffd"


def test_character_split_between_prompt_and_output_is_joined() -> None:
    tokenizer = byte_level()
    euro = spell(tokenizer, "€".encode())
    assert "".join(stream(tokenizer, euro[:2], euro[2:], [1])) == "€"


def test_leading_space_depends_on_preceding_token() -> None:
    tokenizer = byte_fallback()
    capital = tokenizer.encode("capital", special=False)
    assert (tokenizer.token_str(capital[0]) or "").startswith("▁")
    hidden = tokenizer.encode("<s>", special=False)[-1:]
    assert Detokenizer(tokenizer, []).push(capital) == "capital"
    assert Detokenizer(tokenizer, hidden).push(capital) == "capital"
    assert Detokenizer(tokenizer, hidden, skip_special=False).push(capital) == " capital"
    assert Detokenizer(tokenizer, tokenizer.encode("The")).push(capital) == " capital"


def test_special_tokens_are_hidden_unless_kept() -> None:
    tokenizer = byte_level()
    output = tokenizer.encode("a<|im_end|><s>b", special=False)
    kept = tokenizer.backend.token_to_id("<s>")
    assert kept is not None
    assert Detokenizer(tokenizer).push(output) == "ab"
    assert Detokenizer(tokenizer, skip_special=False).push(output) == "a<|im_end|><s>b"
    assert Detokenizer(tokenizer, keep=[kept]).push(output) == "a<s>b"


@given(st.lists(st.integers(1, 245), max_size=40), cuts)
@settings(max_examples=100, deadline=None)
def test_context_dependent_tokens_stream_to_decoded_text(output: list[int], sizes: list[int]) -> None:
    tokenizer = suffixed()
    assert not tokenizer.by_piece
    prompt = tokenizer.encode("the capital")
    assert "".join(stream(tokenizer, prompt, output, sizes)) == "".join(stream(tokenizer, prompt, output, [1]))
    assert tokenizer.decode(prompt) + "".join(stream(tokenizer, prompt, output, sizes)) == tokenizer.decode(
        prompt + output
    )


@pytest.mark.parametrize("kind", list(KINDS))
def test_unknown_token_ids_decode_to_nothing(kind: str) -> None:
    tokenizer = KINDS[kind]()
    word = tokenizer.encode("capital", special=False)
    assert tokenizer.decode([100000, *word, -1, 2**40]) == tokenizer.decode(word)
    assert "".join(stream(tokenizer, [], [100000, *word, -1, 2**40], [1])) == tokenizer.decode(word)
