"""Makes the tokenizers of encoders, as parts of tokenizer.json: BERT's WordPiece, and Unigram as in XLM-RoBERTa.

llama.cpp's converter marks the tokens that begin a word, whereas BERT marks the others with ``##``. Only recent files
say how texts are normalized; for others, the vocabulary shows it.
"""

from __future__ import annotations

import base64
import itertools
import math
import reprlib
import struct
import unicodedata
from collections.abc import Iterable
from typing import Any

from parley.gguf.header import GgufError
from parley.gguf.vocabulary import BLANK, CONTROL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary

ENCODER_ARCHITECTURES = ("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "modern-bert")
INNER_MARK = "##"  # begins the tokens that continue a word
MAX_WORD = 100  # characters of a word that WordPiece splits; a longer one is unknown
RARE_SHARE = 0.01  # a smaller share of words with capitals, or with accents, does not show that texts keep these
SPECIAL_FIELDS = (
    "bos",
    "eos",
    "unknown",
    "seperator",
    "padding",
    "cls",
    "mask",
)  # before ``_token_id``, as spelt there
UNIGRAM_UNKNOWN = 3  # the id of the unknown token in XLM-RoBERTa
MASK = "<mask>"
# The double array of a SentencePiece model's rules: units of 32 bits (github.com/s-yata/darts-clone)
VALUE_BIT, LEAF_BIT, WIDE_OFFSET_BIT, OFFSET_SHIFT, MAX_TRIE_LABEL = 1 << 31, 1 << 8, 1 << 9, 10, 0xFF


def word_piece_vocabulary(vocabulary: Vocabulary, name: str) -> Vocabulary:
    """Return the vocabulary with BERT's own texts of tokens. ``name``: of the GGUF file. Raises GgufError."""
    special = {vocabulary.special_id(f"{field}_token_id") for field in SPECIAL_FIELDS}
    tokens, kinds = [], []
    for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        is_special = number in special or kind in (CONTROL, UNKNOWN)
        has_brackets = len(token) > 2 and token.startswith("[") and token.endswith("]")
        if len(token) > 1 and token.startswith(BLANK):
            text = token.removeprefix(BLANK)
        else:
            text = token if is_special or has_brackets or kind in (UNUSED, USER_DEFINED) else INNER_MARK + token
        tokens.append(text)
        kinds.append(CONTROL if is_special else kind)
    if len(set(tokens)) < len(tokens):
        raise GgufError(f"{name} is damaged: two tokens of its vocabulary have the same text")
    return vocabulary._replace(tokens=tokens, kinds=kinds)


def word_piece_parts(vocabulary: Vocabulary, name: str) -> dict[str, Any]:
    """Return the parts of BERT's tokenizer. ``vocabulary``: of ``word_piece_vocabulary``. Raises GgufError."""
    unknown = vocabulary.special_id("unknown_token_id")
    unknown_text = "[UNK]" if unknown is None else vocabulary.tokens[unknown]
    if unknown_text not in vocabulary.ids:
        raise GgufError(f"{name} has no token [UNK], so its tokenizer cannot be used")
    words = [
        token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind not in (CONTROL, UNUSED)
    ]
    lowercase = _read_flag(vocabulary, "lowercase", _are_few(word != word.lower() for word in words), name)
    strips = _read_flag(vocabulary, "strip_accents", lowercase and _are_few(map(_has_accent, words)), name)
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": strips,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": encoder_post_processor(vocabulary, name, is_doubled=False),
        "decoder": {"type": "WordPiece", "prefix": INNER_MARK, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown_text,
            "continuing_subword_prefix": INNER_MARK,
            "max_input_chars_per_word": MAX_WORD,
            "vocab": vocabulary.ids,
        },
    }


def _read_flag(vocabulary: Vocabulary, key: str, default: bool, name: str) -> bool:
    """Return a flag of the normalizer, which recent files have; else the default. Raises GgufError."""
    value = vocabulary.read_field("normalizer." + key)
    if value is not None and not isinstance(value, bool):
        raise GgufError(f"{name} gives tokenizer.ggml.normalizer.{key} as {reprlib.repr(value)}; it is true or false")
    return default if value is None else value


def _are_few(flags: Iterable[bool]) -> bool:
    """Whether a flag is set for so few words that a tokenizer may have them by chance."""
    listed = list(flags)
    return sum(listed) <= RARE_SHARE * len(listed)


def _has_accent(word: str) -> bool:
    """Whether a word has a Latin letter with an accent, which a tokenizer that strips accents never looks up."""
    parts = unicodedata.normalize("NFD", word)
    return any(
        mark > "\u02ff" and letter.isascii() and letter.isalpha() and unicodedata.category(mark) == "Mn"
        for letter, mark in itertools.pairwise(parts)
    )


def unigram_vocabulary(vocabulary: Vocabulary) -> Vocabulary:
    """Return the vocabulary of a Unigram model with its mask, which early files have as a row without a text."""
    mask = vocabulary.special_id("mask_token_id")
    if mask is None or vocabulary.kinds[mask] != UNUSED or MASK in vocabulary.tokens:
        return vocabulary
    tokens, kinds = list(vocabulary.tokens), list(vocabulary.kinds)
    tokens[mask], kinds[mask] = MASK, CONTROL
    return vocabulary._replace(tokens=tokens, kinds=kinds)


def unigram_parts(vocabulary: Vocabulary, name: str) -> dict[str, Any]:
    """Return the parts of XLM-RoBERTa's tokenizer. ``name``: of the GGUF file. Raises GgufError."""
    unknown = vocabulary.special_id("unknown_token_id")
    if unknown is None:
        unknown = vocabulary.kinds.index(UNKNOWN) if UNKNOWN in vocabulary.kinds else UNIGRAM_UNKNOWN
    if unknown >= len(vocabulary.tokens):
        raise GgufError(f"{name} has no unknown token, so its tokenizer cannot be used")
    scores = vocabulary.scores
    if not all(isinstance(score, float) and math.isfinite(score) for score in scores):
        raise GgufError(f"{name} is damaged: tokenizer.ggml.scores has values that are no finite numbers")
    used = [score for score, kind in zip(scores, vocabulary.kinds, strict=True) if kind != UNUSED]
    # The least score decides when a text is unknown, and rows that only fill up the embedding have a far lower one
    lowest_score = min(used, default=0.0)
    charsmap = _read_charsmap(vocabulary, name)
    mark = {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": "always", "split": True}
    return {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap} if charsmap else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, mark]},
        "post_processor": encoder_post_processor(vocabulary, name, is_doubled=True),
        "decoder": mark,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [
                [token, max(score, lowest_score)] for token, score in zip(vocabulary.tokens, scores, strict=True)
            ],
            "byte_fallback": False,
        },
    }


def _read_charsmap(vocabulary: Vocabulary, name: str) -> str:
    """Return the rules that replace characters in Base64, or "". Raises GgufError if they would lead astray."""
    numbers = vocabulary.read_field("precompiled_charsmap")
    if not numbers:
        return ""
    if not isinstance(numbers, list) or not all(type(number) is int and -128 <= number < 256 for number in numbers):
        raise GgufError(f"{name} is damaged: tokenizer.ggml.precompiled_charsmap is no list of bytes")
    data = bytes(number & 0xFF for number in numbers)
    if not _is_charsmap(data):
        raise GgufError(f"{name} is damaged: tokenizer.ggml.precompiled_charsmap is not what SentencePiece writes")
    return base64.b64encode(data).decode()


def _is_charsmap(data: bytes) -> bool:
    """Whether each way through a double array stays in it, and ends at a text among those that follow it.

    The library that reads it does not check this.
    """
    size = int.from_bytes(data[:4], "little")
    if size < 4 or size % 4 or 4 + size > len(data):
        return False
    units = struct.unpack_from(f"<{size // 4}I", data, 4)
    texts = data[4 + size :]
    for position, unit in enumerate(units):
        if unit & VALUE_BIT:
            continue
        target = position ^ (unit >> OFFSET_SHIFT) << ((unit & WIDE_OFFSET_BIT) >> 6)
        if target | MAX_TRIE_LABEL >= len(units):
            return False
        if unit & LEAF_BIT and not _begins_text(texts, units[target] & ~VALUE_BIT):
            return False
    try:
        texts.decode()
    except UnicodeDecodeError:
        return False
    return True


def _begins_text(texts: bytes, at: int) -> bool:
    return at < len(texts) and texts[at] & 0xC0 != 0x80


def encoder_post_processor(vocabulary: Vocabulary, name: str, *, is_doubled: bool) -> dict[str, Any]:
    """Return the post-processor that puts a text, or a pair of texts, between special tokens.

    ``is_doubled``: two tokens separate a pair, as in RoBERTa; BERT has one, and another type of tokens after it. Raises
    GgufError if there are no such tokens.
    """
    ids = vocabulary.ids
    first = _find_special(vocabulary, ("cls_token_id", "bos_token_id"), ids.get("[CLS]"))
    last = _find_special(vocabulary, ("seperator_token_id", "eos_token_id"), ids.get("[SEP]"))
    if first is None or last is None:
        raise GgufError(f"{name} does not say which tokens begin and end a text")
    second_type = 0 if is_doubled else 1

    def special(number: int, type_id: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": vocabulary.tokens[number], "type_id": type_id}}

    text = {"Sequence": {"id": "A", "type_id": 0}}
    begins = [special(first)] * (vocabulary.read_field("add_bos_token") is not False)
    has_end = vocabulary.read_field("add_eos_token") is not False
    end, second_end = [special(last)] * has_end, [special(last, second_type)] * has_end
    between = [special(last)] * (2 if is_doubled else 1)
    return {
        "type": "TemplateProcessing",
        "single": [*begins, text, *end],
        "pair": [*begins, text, *between, {"Sequence": {"id": "B", "type_id": second_type}}, *second_end],
        "special_tokens": {
            vocabulary.tokens[number]: {
                "id": vocabulary.tokens[number],
                "ids": [number],
                "tokens": [vocabulary.tokens[number]],
            }
            for number in dict.fromkeys((first, last))
        },
    }


def _find_special(vocabulary: Vocabulary, fields: tuple[str, ...], default: int | None) -> int | None:
    numbers = (vocabulary.special_id(field) for field in fields)
    return next((number for number in numbers if number is not None), default)
