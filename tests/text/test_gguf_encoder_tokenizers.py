"""Tokenizers of encoders in GGUF files: the ids of the tokenizers that they were made from, alone and in pairs."""

from __future__ import annotations

import json
import struct

import pytest
import tokenizers
from test_gguf_tokenizer import TEXTS, load, random_texts, train_byte_level
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from parley.gguf.header import GgufError
from parley.gguf.tokenizer import tokenizer_files

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
WORDS = ["Größe café naïve", "ﬁne ﬁsh", "São Paulo Über", *TEXTS]
LATIN = [*WORDS, "[MASK] of a [SEP]", "x" * 101, "x" * 100]


def metadata_of(architecture: str, values: dict) -> dict:
    return {"general.architecture": architecture} | {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def word_piece(lowercase: bool, strip_accents: bool | None) -> tokenizers.Tokenizer:
    """Return a tokenizer as BERT has it."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(WORDS, trainer)
    cls, sep = (backend.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", cls), ("[SEP]", sep)]
    )
    return backend


def word_piece_metadata(backend: tokenizers.Tokenizer, **fields) -> dict:
    """Return what llama.cpp's converter writes: tokens that begin a word are marked, and others are not."""
    ids = backend.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    written = [
        token if token in SPECIAL else token.removeprefix("##") if token.startswith("##") else "▁" + token
        for token in tokens
    ]
    values = {
        "model": "bert",
        "pre": "default",
        "tokens": written,
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "unknown_token_id": ids["[UNK]"],
        "seperator_token_id": ids["[SEP]"],
        "padding_token_id": ids["[PAD]"],
        "cls_token_id": ids["[CLS]"],
        "mask_token_id": ids["[MASK]"],
        "token_type_count": 2,
        **fields,
    }
    return metadata_of("bert", values)


def check_ids(converted, original, texts) -> None:
    """Compare the ids of texts, and the ids and types of pairs."""
    for text in texts:
        assert converted.encode(text) == original.encode(text).ids, text
    for first, second in zip(texts[:20], texts[20:40], strict=False):
        pair, expected = converted.backend.encode(first, second), original.encode(first, second)
        assert (pair.ids, pair.type_ids) == (expected.ids, expected.type_ids)


@pytest.mark.parametrize(("lowercase", "strip_accents"), [(True, None), (False, None), (True, False)])
def test_word_piece_is_berts_with_the_case_and_accents_that_its_vocabulary_has(lowercase, strip_accents, tmp_path):
    original = word_piece(lowercase, strip_accents)
    converted = load(word_piece_metadata(original), tmp_path)
    check_ids(converted, original, [*LATIN, *random_texts(600)])
    assert converted.backend.get_vocab() == original.get_vocab()
    assert converted.names["cls_token"] == "[CLS]" and converted.names["mask_token"] == "[MASK]"


def test_recent_files_say_how_word_piece_normalizes(tmp_path):
    original = word_piece(True, None)
    fields = {"normalizer.lowercase": False, "normalizer.strip_accents": False}
    converted = load(word_piece_metadata(original, **fields), tmp_path)
    original.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    check_ids(converted, original, LATIN)


def test_early_files_name_no_special_tokens(tmp_path):
    """And mark all tokens alike, as the first converters did; rows that fill up the embedding have no text."""
    original = word_piece(True, None)
    metadata = word_piece_metadata(original)
    tokens = [*metadata["tokenizer.ggml.tokens"], "▁[PAD300]", "[unused1]"]
    kinds = [*metadata["tokenizer.ggml.token_type"], 5, 1]
    metadata = {key: value for key, value in metadata.items() if not key.endswith("_token_id") or "unknown" in key} | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
    }
    converted = load(metadata, tmp_path)
    check_ids(converted, original, LATIN)
    assert (
        converted.backend.token_to_id("[PAD300]") is None
        and converted.backend.token_to_id("[unused1]") == len(tokens) - 1
    )


RULES = {"\n": " ", "\t": " ", "ﬁ": "fi", "①": "1", "Ⅳ": "IV", "é": "e", "ö": "o", "…": "..."}


def write_charsmap(rules: dict[str, str]) -> bytes:
    """Return rules as SentencePiece writes them: a double array with all keys, and their replacements.

    Node number n has its children in block n + 1 of 256 units; the value of a key is the first unit of its block.
    """
    texts = b"".join(value.encode() + b"\0" for value in rules.values())
    nodes: dict[bytes, int] = {b"": 0}
    for key in map(str.encode, rules):
        for end in range(1, len(key) + 1):
            nodes.setdefault(key[:end], len(nodes))
    units = [0] * (256 * (len(nodes) + 1))
    for prefix, number in nodes.items():
        block = 256 * (number + 1)
        place = 256 * (nodes[prefix[:-1]] + 1) + prefix[-1] if prefix else 0
        is_key = prefix.decode(errors="replace") in rules
        units[place] = (place ^ block) << 10 | is_key << 8 | (prefix[-1] if prefix else 0)
        if is_key:
            values = list(rules.values())[: list(rules).index(prefix.decode())]
            units[block] = 1 << 31 | sum(len(value.encode()) + 1 for value in values)
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + texts


def unigram(charsmap: bytes) -> tokenizers.Tokenizer:
    """Return a tokenizer as XLM-RoBERTa has it."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Precompiled(charsmap)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=ROBERTA_SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([*WORDS, "... fish 1 a"], trainer)
    state = json.loads(backend.to_str())
    # The scores of SentencePiece are float32
    state["model"]["vocab"] = [
        [token, struct.unpack("<f", struct.pack("<f", score))[0]] for token, score in state["model"]["vocab"]
    ]
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return backend


def unigram_metadata(backend: tokenizers.Tokenizer, **fields) -> dict:
    """Return what llama.cpp's converter writes, which has no text for the mask."""
    vocab = json.loads(backend.to_str())["model"]["vocab"]
    values = {
        "model": "t5",
        "pre": "default",
        "tokens": [*(token for token, _ in vocab), "[PAD200]"],
        "scores": [*(score for _, score in vocab), -10000.0],
        "token_type": [3, 3, 3, 2, *[1] * (len(vocab) - 4), 5],
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
        "precompiled_charsmap": list(write_charsmap(RULES)),
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 3,
        "mask_token_id": len(vocab),
        "add_bos_token": True,
        "add_eos_token": True,
        **fields,
    }
    return metadata_of("bert", values)


def test_unigram_is_xlm_robertas_with_the_rules_that_replace_characters(tmp_path):
    original = unigram(write_charsmap(RULES))
    converted = load(unigram_metadata(original), tmp_path)
    assert original.encode("ﬁsh…①").ids == original.encode("fish...1").ids
    texts = [*WORDS, "  ﬁ\n\tﬁ  é ", "a <mask> b", *random_texts(600)]
    check_ids(converted, original, texts)
    assert any(3 in converted.encode(text) for text in texts)  # unknown
    signed = [number - 256 if number > 127 else number for number in write_charsmap(RULES)]
    other = load(unigram_metadata(original, precompiled_charsmap=signed), tmp_path)
    check_ids(other, original, texts[:40])


def test_unigram_without_rules_replaces_nothing(tmp_path):
    original = unigram(write_charsmap(RULES))
    metadata = unigram_metadata(original)
    del metadata["tokenizer.ggml.precompiled_charsmap"]
    converted = load(metadata, tmp_path)
    assert converted.encode("ﬁ") == [0, *converted.encode("ﬁ", add_special_tokens=False), 2] != original.encode("ﬁ").ids


def broken_charsmaps() -> dict[str, bytes]:
    data = write_charsmap(RULES)
    size = int.from_bytes(data[:4], "little")
    units = list(struct.unpack_from(f"<{size // 4}I", data, 4))
    outside = [unit if not unit >> 8 & 1 else unit | (1 << 31) - 1 << 10 & 0x7FFFFC00 for unit in units]
    value = next(number for number, unit in enumerate(units) if unit >> 31)

    def join(numbers: list[int], texts: bytes = data[4 + size :]) -> bytes:
        return struct.pack("<I", size) + struct.pack(f"<{len(numbers)}I", *numbers) + texts

    return {
        "empty": b"\0",
        "cut off": data[: size // 2],
        "odd": struct.pack("<I", 6) + data[4:],
        "a way out": join(outside),
        "a text outside": join([*units[:value], 1 << 31 | 1 << 20, *units[value + 1 :]]),
        "within a character": join(units, b"\xbf" * 40),
        "no UTF-8": join(units, data[4 + size :] + b"\xff"),
    }


@pytest.mark.parametrize("kind", broken_charsmaps())
def test_rules_that_lead_out_of_the_file_are_refused(kind):
    metadata = unigram_metadata(unigram(write_charsmap(RULES)), precompiled_charsmap=list(broken_charsmaps()[kind]))
    with pytest.raises(GgufError, match=r"^x is damaged: tokenizer\.ggml\.precompiled_charsmap is not what"):
        tokenizer_files(metadata, "x")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scores": [float("nan")] * 3}, "x is damaged: tokenizer.ggml.scores has values that are no finite numbers"),
        ({"scores": ["a"] * 3}, "x is damaged: tokenizer.ggml.scores has values that are no finite numbers"),
        ({"precompiled_charsmap": [300]}, "x is damaged: tokenizer.ggml.precompiled_charsmap is no list of bytes"),
        ({"precompiled_charsmap": "a"}, "x is damaged: tokenizer.ggml.precompiled_charsmap is no list of bytes"),
        ({"bos_token_id": 9, "cls_token_id": None}, "x does not say which tokens begin and end a text"),
        (
            {"model": "bert", "unknown_token_id": None, "tokens": ["a", "b", "c"]},
            "x has no token .UNK., so its tokenizer cannot be used",
        ),
        ({"model": "bert", "normalizer.lowercase": 1}, "x gives tokenizer.ggml.normalizer.lowercase as 1; it is true"),
        ({"model": "bert", "tokens": ["[UNK]", "▁[UNK]", "a"]}, "x is damaged: two tokens of its vocabulary have the"),
        ({"unknown_token_id": None, "token_type": [1] * 3}, "x has no unknown token, so its tokenizer cannot be used"),
        ({"model": "rwkv"}, "x has a tokenizer of the kind rwkv, which is not read"),
        ({"model": ["t5"] * 9999}, "x has a tokenizer of the kind .'t5', "),
    ],
)
def test_refuses_a_tokenizer_of_an_encoder_that_would_make_wrong_tokens(changes, reason):
    values = {
        "model": "t5",
        "tokens": ["[UNK]", "b", "c"],
        "token_type": [2, 3, 3],
        "scores": [0.0] * 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    with pytest.raises(GgufError, match=f"^{reason}") as refusal:
        tokenizer_files(metadata_of("bert", values), "x")
    assert len(str(refusal.value)) < 250


@pytest.mark.parametrize(
    ("architecture", "pre", "pair"),
    [("bert", "roberta-bpe", "<s> $A </s> </s> $B </s>"), ("modern-bert", "modern-bert", "<s> $A </s> $B:1 </s>:1")],
)
def test_byte_level_tokenizers_of_encoders_begin_and_end_texts(architecture, pre, pair, tmp_path):
    normalizer = normalizers.NFC() if pre == "modern-bert" else None
    original = train_byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)], normalizer)
    ids = original.get_vocab()
    original.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=pair, special_tokens=[("<s>", ids["<s>"]), ("</s>", ids["</s>"])]
    )
    added = {"<s>": 3, "</s>": 3, "<think>": 4}
    tokens = sorted(ids, key=ids.__getitem__)
    merges = json.loads(original.to_str())["model"]["merges"]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [added.get(token, 1) for token in tokens],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
    }
    check_ids(load(metadata_of(architecture, values), tmp_path), original, [*WORDS, *random_texts(200)])


def test_words_of_jinas_chinese_model_are_split_and_made_small(tmp_path):
    original = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    original.normalizer, original.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=ROBERTA_SPECIAL, show_progress=False)
    original.train_from_iterator(WORDS, trainer)
    ids = original.get_vocab()
    original.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", ids["<s>"]), ("</s>", ids["</s>"])],
    )
    tokens = sorted(ids, key=ids.__getitem__)
    merges = json.loads(original.to_str())["model"]["merges"]
    values = {
        "model": "gpt2",
        "pre": "whitespace",
        "tokens": tokens,
        "token_type": [2 if token == "<unk>" else 3 if token in ROBERTA_SPECIAL else 1 for token in tokens],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "unknown_token_id": ids["<unk>"],
        "normalizer.lowercase": True,
    }
    made = load(metadata_of("jina-bert-v2", values), tmp_path)
    check_ids(made, original, [*WORDS, "Hello, WORLD: 你好\uff0c世界", *random_texts(200)])
