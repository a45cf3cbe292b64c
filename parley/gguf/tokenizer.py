"""Makes tokenizer.json, tokenizer_config.json and generation_config.json from a GGUF file's metadata.

``tokenizer.ggml.model`` names the kind: ``gpt2`` is byte-level BPE with merges, ``llama`` is SentencePiece's BPE, whose
merges follow from the scores as in Transformers' converter, and ``gemma4`` is the latter with merges. ``bert`` is
WordPiece and ``t5`` Unigram, of encoders (``encoder_tokenizers.py``). Other kinds are refused.
"""

from __future__ import annotations

from typing import Any

from parley.gguf.encoder_tokenizers import (
    ENCODER_ARCHITECTURES,
    encoder_post_processor,
    unigram_parts,
    unigram_vocabulary,
    word_piece_parts,
    word_piece_vocabulary,
)
from parley.gguf.header import GgufError
from parley.gguf.pre_tokenizers import PRE_TOKENIZERS, WHOLE_TEXT_NAMES
from parley.gguf.vocabulary import BLANK, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, read_vocabulary

NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}
# Control tokens that end an answer, because many files name only one of their model's
END_TEXTS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>",
     "<|endoftext|>", "<|end_of_text|>", "<|observation|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]",
     "<｜end▁of▁sentence｜>")
)  # fmt: skip
# Phi-3's control tokens take the blanks that follow them, except these
PHI_3_PLAIN = frozenset(("<unk>", "<s>", "<|endoftext|>"))
SAMPLING_FIELDS = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def tokenizer_files(metadata: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return the contents of the tokenizer's files by file name. ``name``: of the GGUF file. Raises GgufError."""
    vocabulary = read_vocabulary(metadata, name)
    kind, architecture = vocabulary.read_field("model"), metadata.get("general.architecture")
    if kind == "gpt2":
        if vocabulary.read_field("pre") in WHOLE_TEXT_NAMES:
            parts = _merged_parts(vocabulary, name)
        elif vocabulary.read_field("pre") == "whitespace":
            parts = _word_parts(vocabulary, name)
        else:
            parts = _byte_level_parts(vocabulary, name)
        if architecture in ENCODER_ARCHITECTURES:
            is_doubled = architecture != "modern-bert"
            parts["post_processor"] = encoder_post_processor(vocabulary, name, is_doubled=is_doubled)
    elif kind == "llama":
        parts = _sentence_piece_parts(vocabulary)
    elif kind == "gemma4":
        parts = _merged_parts(vocabulary, name)
    elif kind == "bert" and architecture in ENCODER_ARCHITECTURES:
        vocabulary = word_piece_vocabulary(vocabulary, name)
        parts = word_piece_parts(vocabulary, name)
    elif kind == "t5" and architecture in ENCODER_ARCHITECTURES:
        vocabulary = unigram_vocabulary(vocabulary)
        parts = unigram_parts(vocabulary, name)
    else:
        raise GgufError(
            f"{name} has a tokenizer of the kind {str(kind)[:100]}, which is not read; gpt2, llama and gemma4 are, "
            "and bert and t5 of encoders"
        )
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, takes_blanks=architecture == "phi3", is_word_piece=kind == "bert"),
        **parts,
    }
    names = {key: vocabulary.special_id(field) for key, field in NAMED_IDS.items()}
    config: dict[str, Any] = {key: vocabulary.tokens[number] for key, number in names.items() if number is not None}
    context_length = metadata.get(f"{architecture}.context_length")
    if type(context_length) is int:
        config["model_max_length"] = context_length
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "generation_config.json": _generation_config(vocabulary, metadata),
    }


def _byte_level_parts(vocabulary: Vocabulary, name: str) -> dict[str, Any]:
    split_name = vocabulary.read_field("pre")
    if split_name is None:
        raise GgufError(f"{name} names no pre-tokenizer, so texts would become wrong tokens; convert its model anew")
    if not isinstance(split_name, str) or split_name not in PRE_TOKENIZERS:
        raise GgufError(
            f"{name} names the pre-tokenizer {str(split_name)[:100]}, which is not known, so texts would become wrong "
            "tokens"
        )
    split = PRE_TOKENIZERS[split_name]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    pieces = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split.patterns
    ]
    return {
        "normalizer": {"type": "NFC"} if split.nfc or vocabulary.read_field("normalizer.nfc") is True else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*pieces, byte_level]},
        "post_processor": _post_processor(vocabulary, begins=split.begins),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "ignore_merges": split.whole_words,
            "vocab": vocabulary.ids,
            "merges": _read_merges(vocabulary, name),
        },
    }


def _read_merges(vocabulary: Vocabulary, name: str) -> list[list[str]]:
    merges = vocabulary.read_field("merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) and merge.count(" ") == 1 for merge in merges):
        raise GgufError(f"{name} has no tokenizer.ggml.merges, so its tokenizer cannot be used")
    return [merge.split(" ") for merge in merges]


def _word_parts(vocabulary: Vocabulary, name: str) -> dict[str, Any]:
    """Return the parts of jina-embeddings-v2-zh's tokenizer: BPE of words in small letters, not in bytes."""
    unknown = vocabulary.special_id("unknown_token_id")
    return {
        "normalizer": None if vocabulary.read_field("normalizer.lowercase") is False else {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": _post_processor(vocabulary, begins=False),
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "vocab": vocabulary.ids,
            "merges": _read_merges(vocabulary, name),
        },
    }


def _merged_parts(vocabulary: Vocabulary, name: str) -> dict[str, Any]:
    """Return the parts of SentencePiece's BPE with merges: no blank is added before a text unless the file says so."""
    return _sentence_piece_parts(vocabulary, _read_merges(vocabulary, name))


def _sentence_piece_parts(vocabulary: Vocabulary, merges: list[list[str]] | None = None) -> dict[str, Any]:
    """Return the parts of SentencePiece's BPE. ``merges``: None if they follow from the scores."""
    adds_prefix = vocabulary.read_field("add_space_prefix")
    has_prefix = (merges is None) if adds_prefix is None else bool(adds_prefix)
    blanks: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": BLANK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        blanks = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": BLANK}, blanks]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    mergeable = {
        token: number
        for token, number in vocabulary.ids.items()
        if vocabulary.kinds[number] not in (UNKNOWN, CONTROL, USER_DEFINED)
    }
    unknown = next(
        (token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == UNKNOWN), None
    )
    return {
        "normalizer": blanks,
        "pre_tokenizer": None,
        "post_processor": _post_processor(vocabulary, begins=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary.ids,
            "merges": merges_by_score(mergeable, vocabulary.scores) if merges is None else merges,
        },
    }


def merges_by_score(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, best score first, as Transformers' ``generate_merges`` does.

    ``ids``: of the tokens that take part. ``scores``: by id.
    """
    merges: list[tuple[float, str, str]] = []
    for token, number in ids.items():
        pairs = [
            (token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in ids and token[cut:] in ids
        ]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(scores[number], *pair) for pair in pairs]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _added_tokens(vocabulary: Vocabulary, *, takes_blanks: bool, is_word_piece: bool) -> list[dict[str, Any]]:
    mask = None if is_word_piece else vocabulary.special_id("mask_token_id")  # it takes the blanks before it
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": number == mask,
            "rstrip": takes_blanks and kind == CONTROL and token not in PHI_3_PLAIN,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _post_processor(vocabulary: Vocabulary, *, begins: bool) -> dict[str, Any] | None:
    """Return the post-processor that adds BOS and EOS to a text. ``begins``: add BOS if the file does not say."""
    adds_bos, adds_eos = vocabulary.read_field("add_bos_token"), vocabulary.read_field("add_eos_token")
    bos = vocabulary.special_id("bos_token_id") if (begins if adds_bos is None else adds_bos) else None
    eos = vocabulary.special_id("eos_token_id") if adds_eos else None
    if bos is None and eos is None:
        return None

    def special(number: int | None, type_id: int) -> list[dict[str, Any]]:
        return [] if number is None else [{"SpecialToken": {"id": vocabulary.tokens[number], "type_id": type_id}}]

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        return [*special(bos, type_id), {"Sequence": {"id": name, "type_id": type_id}}, *special(eos, type_id)]

    added = {vocabulary.tokens[number]: number for number in (bos, eos) if number is not None}
    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in added.items()},
    }


def _generation_config(vocabulary: Vocabulary, metadata: dict[str, Any]) -> dict[str, Any]:
    end_ids = [vocabulary.special_id(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    end_ids += [
        number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind == CONTROL and token in END_TEXTS
    ]
    sampling = {
        field: metadata["general.sampling." + name]
        for name, field in SAMPLING_FIELDS.items()
        if isinstance(metadata.get("general.sampling." + name), int | float)
    }
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(number for number in end_ids if number is not None))}
    bos = vocabulary.special_id("bos_token_id")
    return (
        config | ({} if bos is None else {"bos_token_id": bos}) | ({"do_sample": True} | sampling if sampling else {})
    )
