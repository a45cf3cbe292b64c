"""Only tokenizers whose parts are all known to be quick may encode short texts in the event loop."""

from __future__ import annotations

import pytest
import tokenizers
from support import tiny_tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import Sequence, Split

from parley.gguf.pre_tokenizers import PRE_TOKENIZERS
from parley.text.tokens.encoding_time import MAX_UNIGRAM_LENGTH, MAX_WORDPIECE_LENGTH, has_linear_time

EXPONENTIAL = Regex("(a+)+$")


@pytest.mark.parametrize("make", [tiny_tokenizers.byte_level, tiny_tokenizers.metaspace, tiny_tokenizers.word_piece])
def test_published_kinds_of_tokenizers_are_quick(make):
    assert make().has_linear_time


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_expressions_of_published_models_are_quick(name):
    backend = tokenizers.Tokenizer(models.BPE())
    splits = [Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    backend.pre_tokenizer = Sequence([*splits, pre_tokenizers.ByteLevel(use_regex=False)])
    assert has_linear_time(backend, ["a"])


@pytest.mark.parametrize(
    ("model", "step"),
    [
        (models.BPE(), Split(EXPONENTIAL, "isolated")),
        (models.BPE(), Sequence([pre_tokenizers.Whitespace(), Sequence([Split(EXPONENTIAL, "isolated")])])),
        (models.BPE(), normalizers.Replace(EXPONENTIAL, "")),
        (models.BPE(), normalizers.Sequence([normalizers.NFC(), normalizers.Replace(EXPONENTIAL, "")])),
        (models.WordPiece(max_input_chars_per_word=MAX_WORDPIECE_LENGTH + 1), None),
        (models.Unigram([("a" * (MAX_UNIGRAM_LENGTH + 1), 0.0)], 0), None),
    ],
)
def test_other_parts_are_not_trusted_to_be_quick(model, step):
    backend = tokenizers.Tokenizer(model)
    if isinstance(step, normalizers.Normalizer):
        backend.normalizer = step
    elif step is not None:
        backend.pre_tokenizer = step
    assert not has_linear_time(backend, backend.get_vocab())
