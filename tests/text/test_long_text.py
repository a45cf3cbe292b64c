"""Long texts are encoded in pieces, with the result of the whole text."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_tokenizers import MARKS, SPECIAL, TOKENIZERS

from parley import demo
from parley.errors import InvalidValue
from parley.interrupt import Abandoned, run_until_abandoned, stop_if_abandoned
from parley.text.tokens import long_text
from parley.text.tokens.tokenizer import Tokenizer

PARTS = [
    *("The capital of France", " is Paris", "unbelievable", "don't", "x" * 30, "aaaaaaa", "0123456789", "3.14159"),
    *(" ", "  ", "\n\n", "\t\t  ", " " * 37, "你好世界。", "Ça", "e\u0301\u0302", "\ufb01"),
    *("🎉👩\u200d👩\u200d👧", "def f(x):\n    return"),
    *SPECIAL,
    *MARKS,
]
KINDS = [*TOKENIZERS, "demo"]


def make_tokenizer(kind: str) -> Tokenizer:
    return TOKENIZERS[kind]() if kind in TOKENIZERS else Tokenizer.from_folder(Path(demo.__file__).parent / "model")


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(long_text, "PIECE_SIZE", 400)
    monkeypatch.setattr(long_text, "OVERLAP", 150)
    monkeypatch.setattr(long_text, "JOINT_LENGTH", 6)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_tokens_and_spans_of_the_whole_text(kind, small_pieces, monkeypatch):
    tokenizer = make_tokenizer(kind)

    @settings(max_examples=60, deadline=None)
    @given(seed=st.integers(0, 10**9), special=st.booleans())
    def check(seed, special):
        draw = random.Random(seed)
        text = "".join(draw.choices(PARTS, k=draw.choice([50, 300])))
        (whole,) = tokenizer.backend.encode_batch([text], add_special_tokens=special)
        assert tokenizer.encode(text, special) == whole.ids
        assert tokenizer.encode_with_offsets(text, special) == (whole.ids, whole.offsets)
        assert tokenizer.encode(text, special, stop_after=40)[:40] == whole.ids[:40]

    check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", [" ", "a", "é", "\n", "ab", "1", "the "])
def test_pieces_of_a_monotonous_text_agree_with_the_whole(kind, unit, small_pieces):
    tokenizer, text = make_tokenizer(kind), unit * (3001 // len(unit))
    (whole,) = tokenizer.backend.encode_batch([text])
    assert tokenizer.encode(text) == whole.ids


def test_long_text_without_a_place_to_divide_it_is_refused(small_pieces, monkeypatch):
    monkeypatch.setattr(long_text, "MAX_PIECE_LENGTH", 1600)
    tokenizer = make_tokenizer("word_piece")
    assert tokenizer.encode("a" * 1000) == tokenizer.backend.encode("a" * 1000).ids
    with pytest.raises(InvalidValue, match="1600 characters in a row"):
        tokenizer.encode("a" * 5000)


def test_encoding_ends_once_the_result_is_abandoned(small_pieces):
    tokenizer, abandoned = make_tokenizer("byte_level"), threading.Event()
    text = "Paris is the capital. " * 1000
    pieces = []

    def encode_and_leave(part: str):
        pieces.append(part)
        if len(pieces) == 3:
            abandoned.set()
        return tokenizer.backend.encode_batch([part])[0]

    with pytest.raises(Abandoned):
        run_until_abandoned(lambda: list(long_text.encode_pieces(encode_and_leave, text)), abandoned)
    assert len(pieces) == 3
    stop_if_abandoned()  # outside of the work nothing is abandoned
