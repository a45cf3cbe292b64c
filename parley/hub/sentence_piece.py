"""Makes tokenizer.json from a SentencePiece model, ``tokenizer.model``, as Llama, Mistral and Gemma have it.

The file is a Protocol Buffers message (github.com/google/sentencepiece, sentencepiece_model.proto); only the fields
that affect token ids are read. Merges follow from the scores, as for GGUF files. Unigram models and rules that
normalize characters are refused, because the ``tokenizers`` library computes other ids in rare cases.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from parley.gguf.tokenizer import merges_by_score

# Kinds of pieces, and of models
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
SPECIAL_IDS = {"unk": 0, "bos": 1, "eos": 2, "pad": -1}  # fields 40 to 43 of the trainer, with their defaults
BLANK = "▁"
MAX_VARINT_SHIFT = 63  # bits of the number before the last byte of the longest varint
# The classes of tokenizers whose ids are those of the file. Those of other classes are shifted or renamed.
PLAIN_CLASSES = frozenset(
    ("Llama", "CodeLlama", "Gemma", "Baichuan", "InternLM", "InternLM2", "Yi", "Ernie4_5", "PreTrained", "Tokenizers")
)
CLASS_ENDING = re.compile(r"(Tokenizer|Backend)?(Fast)?$")


class BadTokenizerModel(Exception):
    """The tokenizer cannot be converted. The message is a clause."""


class SentencePieceModel(NamedTuple):
    """A SentencePiece model: pieces with score and kind by id, and how texts are normalized before they are split."""

    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    model_type: int
    has_byte_fallback: bool
    special_ids: dict[str, int]  # of "unk", "bos", "eos" and "pad"; -1: there is none
    charsmap: bytes  # rules that replace characters
    has_prefix: bool
    trims_blanks: bool
    has_suffix: bool


def _read_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a message: an integer, or bytes. Raises IndexError or struct.error."""
    at = 0

    def read_varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if shift > MAX_VARINT_SHIFT:
                raise IndexError
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value - (1 << 64) if value >> 63 else value

    while at < len(data):
        key = read_varint()
        kind = key & 7
        value: int | bytes
        if kind == 0:
            value = read_varint()
        else:
            size = {1: 8, 5: 4}.get(kind) or read_varint()
            value = data[at : at + size]
            at += size
            if kind not in (1, 2, 5) or size < 0 or at > len(data):
                raise IndexError
        yield key >> 3, value


def read_sentence_piece(data: bytes) -> SentencePieceModel:
    """Read the content of a ``tokenizer.model``. Raises BadTokenizerModel."""
    try:
        model = list(_read_fields(data))
        entries: list[dict[int, Any]] = [
            {1: b"", 2: bytes(4), 3: NORMAL} | dict(_read_fields(value)) for key, value in model if key == 1
        ]
        trainer = dict(_read_fields(next((value for key, value in model if key == 2), b"")))
        rules = dict(_read_fields(next((value for key, value in model if key == 3), b"")))
        ids = {name: trainer.get(40 + i, default) for i, (name, default) in enumerate(SPECIAL_IDS.items())}
        return SentencePieceModel(
            pieces=[entry[1].decode() for entry in entries],
            scores=[struct.unpack("<f", entry[2])[0] for entry in entries],
            kinds=[entry[3] for entry in entries],
            model_type=trainer.get(3, UNIGRAM),
            has_byte_fallback=bool(trainer.get(35, 0)),
            special_ids={name: number if 0 <= number < len(entries) else -1 for name, number in ids.items()},
            charsmap=rules.get(2, b""),
            has_prefix=bool(rules.get(3, 1)),
            trims_blanks=bool(rules.get(4, 1)),
            has_suffix=bool(trainer.get(24, 0)),
        )
    except (IndexError, struct.error, ValueError, TypeError, AttributeError):
        raise BadTokenizerModel("its tokenizer.model is no SentencePiece model") from None


def convert_sentence_piece(path: Path, config: dict[str, Any], more_tokens: dict[str, int]) -> dict[str, Any]:
    """Return the content of tokenizer.json and tokenizer_config.json, by file name.

    ``config``: of tokenizer_config.json. ``more_tokens``: of added_tokens.json. Raises OSError, BadTokenizerModel.
    """
    name = str(config.get("tokenizer_class") or "LlamaTokenizer")
    if CLASS_ENDING.sub("", name) not in PLAIN_CLASSES:
        raise BadTokenizerModel(
            f"its tokenizer.model belongs to {name[:60]}, whose ids are others than the file's (convert the tokenizer "
            "with Transformers' save_pretrained)"
        )
    model = read_sentence_piece(path.read_bytes())
    if not model.pieces or len(set(model.pieces)) < len(model.pieces):
        raise BadTokenizerModel("its tokenizer.model has no pieces, or the same piece twice")
    if model.model_type != BPE or model.charsmap or model.has_suffix:
        kind = "is no BPE" if model.model_type != BPE else "normalizes characters" if model.charsmap else "has suffixes"
        raise BadTokenizerModel(f"its tokenizer.model {kind}, which is not read (convert it with save_pretrained)")
    has_prefix = config.get("add_prefix_space")
    has_prefix = model.has_prefix if has_prefix is None else bool(has_prefix)
    names = {f"{key}_token": model.pieces[number] for key, number in model.special_ids.items() if number >= 0} | {
        key: value for key, value in config.items() if value is not None or key.endswith("_token")
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model, config, more_tokens),
        "normalizer": _normalizer_object(model, has_prefix, always=config.get("legacy") is not False),
        "pre_tokenizer": _pre_tokenizer(model, has_prefix, always=config.get("legacy") is not False),
        "post_processor": _post_processor(model, config),
        "decoder": _decoder_object(has_prefix),
        "model": _model_object(model),
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": names}


def _user_defined(model: SentencePieceModel) -> list[str]:
    """Return the pieces that always stay whole, longest first."""
    pieces = [piece for piece, kind in zip(model.pieces, model.kinds, strict=True) if kind == USER_DEFINED]
    return sorted(pieces, key=len, reverse=True)


def _normalizer_object(model: SentencePieceModel, has_prefix: bool, *, always: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if model.trims_blanks:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +|[ ▁]+\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if has_prefix and always:
        steps.append({"type": "Prepend", "prepend": BLANK})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": BLANK})
    return {"type": "Sequence", "normalizers": steps}


def _pre_tokenizer(model: SentencePieceModel, has_prefix: bool, *, always: bool) -> dict[str, Any] | None:
    steps: list[dict[str, Any]] = []
    if has_prefix and not always:  # only at the start of a text, not after each special token
        steps.append({"type": "Metaspace", "replacement": BLANK, "prepend_scheme": "first", "split": False})
    if whole := _user_defined(model):
        pattern = "|".join(map(re.escape, whole))
        steps.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    return {"type": "Sequence", "pretokenizers": steps} if steps else None


def _decoder_object(has_prefix: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": BLANK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _model_object(model: SentencePieceModel) -> dict[str, Any]:
    unknown = next((number for number, kind in enumerate(model.kinds) if kind == UNKNOWN), None)
    ids = {piece: number for number, piece in enumerate(model.pieces)}
    mergeable = {piece: number for piece, number in ids.items() if model.kinds[number] == NORMAL}
    return {
        "type": "BPE",
        "unk_token": None if unknown is None else model.pieces[unknown],
        "fuse_unk": True,
        "byte_fallback": model.has_byte_fallback,
        "ignore_merges": USER_DEFINED in model.kinds,  # a part that is such a piece has no merges
        "vocab": ids,
        "merges": merges_by_score(mergeable, model.scores),
    }


def _added_tokens(
    model: SentencePieceModel, config: dict[str, Any], more_tokens: dict[str, int]
) -> list[dict[str, Any]]:
    """Return the special pieces and those that the folder's other files add, by id. Raises BadTokenizerModel."""
    added: dict[int, dict[str, Any]] = {
        number: {"content": piece, "special": True}
        for number, (piece, kind) in enumerate(zip(model.pieces, model.kinds, strict=True))
        if kind in (UNKNOWN, CONTROL)
    }
    added |= {number: {"content": token, "special": False} for token, number in more_tokens.items()}
    added_tokens = config.get("added_tokens_decoder")
    for number, token in (added_tokens if isinstance(added_tokens, dict) else {}).items():
        if number.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str):
            added[int(number)] = token
    first_gap = next(number for number in count(len(model.pieces)) if number not in added)
    if first_gap < max(added, default=-1):
        raise BadTokenizerModel(f"its files give the token {first_gap} no text")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return [
        {"id": number} | flags | {name: token[name] for name in ("content", *flags) if name in token}
        for number, token in sorted(added.items())
    ]


def _post_processor(model: SentencePieceModel, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the post-processor that adds BOS and EOS to a text: only BOS by default."""
    adds = {"bos": config.get("add_bos_token") is not False, "eos": bool(config.get("add_eos_token"))}
    ids = {name: model.special_ids[name] for name in adds if adds[name] and model.special_ids[name] >= 0}
    if not ids:
        return None

    def special(name: str, type_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": model.pieces[ids[name]], "type_id": type_id}}] if name in ids else []

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        return [*special("bos", type_id), {"Sequence": {"id": name, "type_id": type_id}}, *special("eos", type_id)]

    tokens = {model.pieces[number]: number for number in ids.values()}
    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]} for token, number in tokens.items()
        },
    }
