"""Streaming never changes the text: the pieces concatenate to the text of all tokens decoded at once."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.tiny_tokenizers import TOKENIZERS, TRAINING_TEXTS, byte_fallback, byte_level, suffixed

from parley.text.tokens.detokenizer import Detokenizer
from parley.text.tokens.tokenizer import Tokenizer

BY_PIECE = [name for name in TOKENIZERS if name != "suffixed"]
token_lists = st.lists(st.integers(0, 500), max_size=40)
chunk_sizes = st.lists(st.integers(1, 7), min_size=1, max_size=10)


def stream_pieces(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], sizes: list[int], skip: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    pieces = []
    start = turn = 0
    while start < len(output):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.decode_tokens(output[start : start + size]))
        start, turn = start + size, turn + 1
    return [*pieces, detokenizer.flush_text()]


@pytest.mark.parametrize("kind", BY_PIECE)
@given(token_lists, chunk_sizes, st.booleans())
@settings(max_examples=60, deadline=None)
def test_streamed_pieces_join_to_decoded_text(kind: str, output: list[int], sizes: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]()
    assert "".join(stream_pieces(tokenizer, [], output, sizes, skip)) == tokenizer.decode(output, skip)


@pytest.mark.parametrize("kind", BY_PIECE)
@given(st.sampled_from(TRAINING_TEXTS), token_lists, chunk_sizes)
@settings(max_examples=60, deadline=None)
def test_streamed_text_continues_prompt_text(kind: str, text: str, output: list[int], sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]()
    prompt = tokenizer.encode(text)
    whole = tokenizer.decode(prompt) + "".join(stream_pieces(tokenizer, prompt, output, sizes))
    assert whole == tokenizer.decode(prompt + output)


@pytest.mark.parametrize("kind", ["byte_level", "word_piece", "word_level", "metaspace"])
@given(token_lists, st.booleans())
@settings(max_examples=100, deadline=None)
def test_decode_agrees_with_tokenizers_library(kind: str, output: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]()
    assert tokenizer.decode(output, skip) == tokenizer.backend.decode(output, skip_special_tokens=skip)


@given(st.lists(st.integers(257, 500), max_size=40), st.text(max_size=20), st.booleans())
@settings(max_examples=100, deadline=None)
def test_byte_fallback_decodes_valid_bytes_like_library(output: list[int], text: str, skip: bool) -> None:
    tokenizer = byte_fallback()
    output = output + tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(output, skip) == tokenizer.backend.decode(output, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(st.text(min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_characters_arrive_whole_and_without_delay(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    prompt = tokenizer.encode("x")
    output = tokenizer.encode("y" + text, add_special_tokens=False)
    text = tokenizer.decode(output, skip_special=False)
    detokenizer = Detokenizer(tokenizer, prompt, skip_special=False)
    seen = ""
    for count, token_id in enumerate(output, start=1):
        piece = detokenizer.decode_tokens([token_id])
        assert "\ufffd" in text or "\ufffd" not in piece
        seen += piece
        data = b"".join(map(tokenizer.token_bytes, output[:count]))
        assert len(seen) >= len(data.decode("utf-8", "ignore"))
    assert detokenizer.flush_text() == ""


def single_byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return the ids of the single-byte tokens for this data."""
    bytes_of = {tokenizer.token_bytes(token_id): token_id for token_id in reversed(range(257))}
    return [bytes_of[bytes([byte])] for byte in data]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_invalid_bytes_do_not_affect_other_characters(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    output = single_byte_tokens(tokenizer, "a€b".encode() + b"\xe2\x82" + b"c" + b"\xff")
    for size in (1, 2, 100):
        assert "".join(stream_pieces(tokenizer, tokenizer.encode("x"), output, [size])) == "a€b\ufffdc\ufffd"


def test_incomplete_character_is_held_until_flush() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.decode_tokens(single_byte_tokens(tokenizer, b"ok\xf0\x9f")) == "ok"
    assert detokenizer.decode_tokens(single_byte_tokens(tokenizer, b"\x8e")) == ""
    assert detokenizer.flush_text() == "\ufffd"


def test_character_split_between_prompt_and_output_is_joined() -> None:
    tokenizer = byte_level()
    euro = single_byte_tokens(tokenizer, "€".encode())
    assert "".join(stream_pieces(tokenizer, euro[:2], euro[2:], [1])) == "€"


def test_leading_space_depends_on_preceding_token() -> None:
    tokenizer = byte_fallback()
    capital = tokenizer.encode("capital", add_special_tokens=False)
    assert (tokenizer.token_str(capital[0]) or "").startswith("▁")
    hidden = tokenizer.encode("<s>", add_special_tokens=False)[-1:]
    assert Detokenizer(tokenizer, []).decode_tokens(capital) == "capital"
    assert Detokenizer(tokenizer, hidden).decode_tokens(capital) == "capital"
    assert Detokenizer(tokenizer, hidden, skip_special=False).decode_tokens(capital) == " capital"
    assert Detokenizer(tokenizer, tokenizer.encode("The")).decode_tokens(capital) == " capital"


def test_special_tokens_are_hidden_unless_kept() -> None:
    tokenizer = byte_level()
    output = tokenizer.encode("a<|im_end|><s>b", add_special_tokens=False)
    kept_id = tokenizer.backend.token_to_id("<s>")
    assert kept_id is not None
    assert Detokenizer(tokenizer).decode_tokens(output) == "ab"
    assert Detokenizer(tokenizer, skip_special=False).decode_tokens(output) == "a<|im_end|><s>b"
    assert Detokenizer(tokenizer, keep=[kept_id]).decode_tokens(output) == "a<s>b"


@given(st.lists(st.integers(1, 245), max_size=40), chunk_sizes)
@example([191] * 6 + [1], [1])  # tokens without text, longer than the window
@settings(max_examples=100, deadline=None)
def test_context_dependent_tokens_stream_to_decoded_text(output: list[int], sizes: list[int]) -> None:
    tokenizer = suffixed()
    assert not tokenizer.decodes_by_token
    prompt = tokenizer.encode("the capital")
    assert "".join(stream_pieces(tokenizer, prompt, output, sizes)) == "".join(
        stream_pieces(tokenizer, prompt, output, [1])
    )
    assert tokenizer.decode(prompt) + "".join(stream_pieces(tokenizer, prompt, output, sizes)) == tokenizer.decode(
        prompt + output
    )


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_unknown_token_ids_decode_to_nothing(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    word = tokenizer.encode("capital", add_special_tokens=False)
    assert tokenizer.decode([100000, *word, -1, 2**40]) == tokenizer.decode(word)
    assert "".join(stream_pieces(tokenizer, [], [100000, *word, -1, 2**40], [1])) == tokenizer.decode(word)
