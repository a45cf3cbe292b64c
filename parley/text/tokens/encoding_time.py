"""Tells which tokenizers are sure to encode a short text quickly, so that the event loop may do it.

A tokenizer.json may have regular expressions whose time grows exponentially with a text, or a vocabulary that makes it
grow with the square or the cube. The parts that are quick for every text are listed here, with the expressions of
published models. A tokenizer with any other part need not be slow, but is not trusted to be quick.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers

from parley.gguf.pre_tokenizers import PRE_TOKENIZERS

MAX_UNIGRAM_LENGTH = 256  # characters of a Unigram model's piece; each place of a text is compared with all pieces
MAX_WORDPIECE_LENGTH = 256  # characters of a WordPiece model's word; its time grows with the cube
QUICK_PATTERNS = frozenset(pattern for pre_tokenizer in PRE_TOKENIZERS.values() for pattern in pre_tokenizer.patterns)
QUICK_PARTS = frozenset(
    {  # normalizers
        "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend",
        "Replace", "Sequence", "Strip", "StripAccents",
    }
    | {  # pre-tokenizers
        "BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation", "Split",
        "UnicodeScripts", "Whitespace", "WhitespaceSplit",
    }
)  # fmt: skip


def has_linear_time(backend: tokenizers.Tokenizer, vocabulary: Iterable[str]) -> bool:
    """Whether the time to encode a text grows with its length alone. ``vocabulary``: all tokens of ``backend``."""
    model = backend.model
    if isinstance(model, tokenizers.models.Unigram) and max(map(len, vocabulary), default=0) > MAX_UNIGRAM_LENGTH:
        return False
    if isinstance(model, tokenizers.models.WordPiece) and model.max_input_chars_per_word > MAX_WORDPIECE_LENGTH:
        return False
    steps = [step for step in (backend.normalizer, backend.pre_tokenizer) if step is not None]
    return all(_is_quick(part) for step in steps for part in nested_steps(json.loads(step.__getstate__())))


def _is_quick(part: dict[str, Any]) -> bool:
    expression = part.get("pattern", {}).get("Regex")
    return part.get("type") in QUICK_PARTS and (expression is None or expression in QUICK_PATTERNS)


def nested_steps(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a normalizer or pre-tokenizer and those that it consists of."""
    yield step
    for part in (*step.get("normalizers", ()), *step.get("pretokenizers", ())):
        yield from nested_steps(part)
