"""The cache of the texts between special tokens: the same tokens as without it, and a bounded size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_tokenizers import TOKENIZERS, byte_level
from tokenizers import AddedToken, pre_tokenizers

from parley.text.tokens import segment_cache
from parley.text.tokens.segment_cache import make_segment_cache
from parley.text.tokens.text_encoder import TextEncoder

PIECES = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<s>", "</s>", "<|im_", "start|>", "<", "user\n", " ",
          "\n\n", "Paris", " Paris", "é", "e\u0301", "日本", "\uff21", "'s", "123", "▁"]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=20).map("".join)


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_segments_are_tokenized_like_the_whole_text(kind: str, data: st.DataObject) -> None:
    backend = TOKENIZERS[kind]().backend
    cache, encoder = make_segment_cache(backend), TextEncoder(backend)
    if cache is None:
        return
    for text in data.draw(st.lists(texts, min_size=2, max_size=4)):
        for _ in range(2):
            assert cache.encode(text) == encoder.encode(text, add_special_tokens=False)


def test_a_long_conversation_is_encoded_as_before() -> None:
    tokenizer = byte_level()
    for turns in range(1, 40):
        text = "".join(f"<|im_start|>user\nParis {n} is a city.<|im_end|>\n" for n in range(turns))
        assert tokenizer.encode(text, add_special_tokens=False) == TextEncoder(tokenizer.backend).encode(
            text, add_special_tokens=False
        )
    half_pair = "Paris\ud83c" * 300
    assert tokenizer.encode(half_pair, add_special_tokens=False) == TextEncoder(tokenizer.backend).encode(
        half_pair, add_special_tokens=False
    )


def test_keeps_the_parts_that_were_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_cache, "MAX_CHARACTERS", 3 * (segment_cache.PART_OVERHEAD + 1))
    cache = make_segment_cache(byte_level().backend)
    assert cache is not None
    for text in ("a", "b", "c", "a", "d", "e"):
        cache.encode(text)
    assert list(cache._parts) == ["a", "d", "e"]


def test_has_no_cache_where_a_part_may_have_other_tokens_for_itself() -> None:
    blank_before = byte_level.__wrapped__().backend  # not the one of other tests
    blank_before.add_special_tokens([AddedToken("<blank>", lstrip=True)])
    assert make_segment_cache(blank_before) is None
    first_word = byte_level.__wrapped__().backend
    scheme = pre_tokenizers.Metaspace(prepend_scheme="first")
    first_word.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), scheme])
    assert make_segment_cache(first_word) is None
