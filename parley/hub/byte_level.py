"""Makes tokenizer.json from ``vocab.json`` and ``merges.txt``, as GPT-2, OPT, RoBERTa, BART and Qwen 2 have them.

Both files are those of byte-level BPE (github.com/openai/gpt-2, encoder.py): the id of each token, and the merges in
order, one pair in a line. The tokenizer's class decides how texts are split and which tokens are added, as in
Transformers. Files of other classes are refused, because the same files mean other ids there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from parley.hub.sentence_piece import CLASS_ENDING, BadTokenizerModel

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"


class ByteLevelClass(NamedTuple):
    """``names``: the special tokens that the class has by itself. ``frames``: a text gets the tokens cls and sep around
    it. ``has_qwen_pattern``: texts become NFC, and are split by Qwen's pattern, not by GPT-2's."""

    names: dict[str, str]
    frames: bool = False
    has_qwen_pattern: bool = False


GPT2 = ByteLevelClass({"bos_token": END, "eos_token": END, "unk_token": END})
ROBERTA = ByteLevelClass(
    {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>",
     "pad_token": "<pad>", "mask_token": "<mask>"},
    frames=True,
)  # fmt: skip
QWEN2 = ByteLevelClass({"eos_token": END, "unk_token": END, "pad_token": END}, has_qwen_pattern=True)
CLASSES = {
    "GPT2": GPT2,
    "CodeGen": GPT2,
    "Roberta": ROBERTA,
    "Bart": ROBERTA,
    "Longformer": ROBERTA,
    "Qwen2": QWEN2,
}
# For folders whose files do not name the class
CLASS_OF_MODEL = {
    "gpt2": "GPT2", "gpt_neo": "GPT2", "gptj": "GPT2", "opt": "GPT2", "phi": "GPT2", "codegen": "GPT2",
    "starcoder2": "GPT2", "roberta": "Roberta", "bart": "Roberta", "longformer": "Roberta", "qwen2": "Qwen2",
    "qwen3": "Qwen2", "qwen2_moe": "Qwen2", "qwen3_moe": "Qwen2",
}  # fmt: skip


def convert_byte_level(
    vocab_file: Path, merges_file: Path, config: dict[str, Any], more_tokens: dict[str, int], model_type: str
) -> dict[str, Any]:
    """Return the contents of tokenizer.json and tokenizer_config.json by their names.

    ``config``: of tokenizer_config.json. ``more_tokens``: of added_tokens.json. Raises BadTokenizerModel, OSError.
    """
    class_name = config.get("tokenizer_class") or CLASS_OF_MODEL.get(model_type) or f"the class of a {model_type} model"
    kind = CLASSES.get(CLASS_ENDING.sub("", str(class_name)))
    if kind is None:
        raise BadTokenizerModel(
            f"its vocab.json and merges.txt belong to {class_name}, whose ids they do not say; convert the tokenizer "
            "with Transformers' save_pretrained"
        )
    ids, merges = _read_vocabulary(vocab_file), _read_merges(merges_file)
    names = {key: value for key, value in config.items() if value is not None or key.endswith("_token")}
    names = kind.names | {"tokenizer_class": "PreTrainedTokenizerFast"} | names
    texts = {key: _token_text(names[key]) for key in names if key.endswith("_token")}
    has_prefix = config.get("add_prefix_space") is True
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(ids, config, more_tokens, texts),
        "normalizer": {"type": "NFC"} if kind.has_qwen_pattern else None,
        "pre_tokenizer": _pre_tokenizer(kind, has_prefix),
        "post_processor": _post_processor(kind, config, ids | more_tokens, texts),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "vocab": ids,
            "merges": merges,
        },
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": names}


def _read_vocabulary(path: Path) -> dict[str, int]:
    try:
        ids = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        raise BadTokenizerModel(f"its {path.name} is not valid JSON") from None
    if not isinstance(ids, dict) or not ids or not all(type(number) is int and number >= 0 for number in ids.values()):
        raise BadTokenizerModel(f"its {path.name} does not give each token an id")
    return ids


def _read_merges(path: Path) -> list[str]:
    """Return the merges of a file, whose first line may be its version."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError:
        raise BadTokenizerModel(f"its {path.name} is not UTF-8") from None
    merges = [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#version")]
    if wrong := next((line for line in merges if len(line.split(" ")) != 2), None):
        raise BadTokenizerModel(f"its {path.name} has the line {wrong[:100]!r}, which is no pair of tokens")
    return merges


def _token_text(value: Any) -> str:
    """Return the text of a token in tokenizer_config.json: a string, or an object with it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _added_tokens(
    ids: dict[str, int], config: dict[str, Any], more_tokens: dict[str, int], texts: dict[str, str]
) -> list[dict[str, Any]]:
    """Return the tokens that stay whole, by id: special ones, and those that the folder's other files add."""
    all_ids = ids | more_tokens
    added = {number: {"content": token, "special": False} for token, number in more_tokens.items()}
    for name, text in texts.items():
        if text in all_ids:
            properties = config.get(name)
            added[all_ids[text]] = (properties if isinstance(properties, dict) else {}) | {
                "content": text,
                "special": True,
            }
    added_tokens = config.get("added_tokens_decoder")
    for number, token in (added_tokens if isinstance(added_tokens, dict) else {}).items():
        if number.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str):
            added[int(number)] = token
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return [
        {"id": number} | flags | {name: token[name] for name in ("content", *flags) if name in token}
        for number, token in sorted(added.items())
    ]


def _pre_tokenizer(kind: ByteLevelClass, has_prefix: bool) -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": has_prefix, "trim_offsets": True, "use_regex": True}
    if not kind.has_qwen_pattern:
        return level
    split = {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, level | {"use_regex": False}]}


def _post_processor(
    kind: ByteLevelClass, config: dict[str, Any], ids: dict[str, int], texts: dict[str, str]
) -> dict[str, Any] | None:
    """Return the post-processor that adds tokens to a text. Raises BadTokenizerModel if there are no such tokens."""
    if not kind.frames and config.get("add_bos_token") is not True:
        return None
    name = "cls_token" if kind.frames else "bos_token"
    token_texts = [texts.get(name, ""), texts.get("sep_token", "")] if kind.frames else [texts.get(name, "")]
    if any(text not in ids for text in token_texts):
        raise BadTokenizerModel(f"its files give its {name} no id")

    def special(text: str, type_id: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": text, "type_id": type_id}}

    first, last = special(token_texts[0]), [special(text) for text in token_texts[1:]]
    sequences = [{"Sequence": {"id": letter, "type_id": number}} for number, letter in enumerate("AB")]
    if kind.frames:
        pair = [first, sequences[0], *last, *last, {"Sequence": {"id": "B", "type_id": 0}}, *last]
    else:
        pair = [first, sequences[0], special(token_texts[0], 1), sequences[1]]
    return {
        "type": "TemplateProcessing",
        "single": [first, sequences[0], *last],
        "pair": pair,
        "special_tokens": {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in token_texts},
    }
