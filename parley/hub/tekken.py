"""Makes tokenizer.json from Mistral's ``tekken.json``, and a chat template if the folder has none.

The file lists the bytes of each token in the order of its rank, as tiktoken's do; ids are ranks after those of the
special tokens. github.com/mistralai/mistral-common has the format, and how each version writes a conversation.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple

from parley.hub.mistral_template import mistral_template
from parley.hub.sentence_piece import BadTokenizerModel

FILLER = "<SPECIAL_{}>"
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# The special tokens of files that do not list them, by id
FIRST_SPECIAL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


class TekkenFile(NamedTuple):
    """The contents of a ``tekken.json``."""

    special_texts: list[str]  # by id
    tokens: list[bytes]  # in the order of their ranks; their ids follow those of the special tokens
    pattern: str  # the regular expression that splits texts
    version: str  # tells how a conversation is written


def convert_tekken(path: Path) -> dict[str, Any]:
    """Return the contents of tokenizer.json and tokenizer_config.json, with a chat template, by file name.

    Raises OSError, BadTokenizerModel.
    """
    tekken = _read_tekken(path)
    names = {name: text for name, text in NAMES.items() if text in tekken.special_texts}
    template = mistral_template(tekken.version)
    return {
        "tokenizer.json": _tokenizer_json(tekken),
        "tokenizer_config.json": names if template is None else names | {"chat_template": template},
    }


def _read_tekken(path: Path) -> TekkenFile:
    """Read a file. Raises OSError, BadTokenizerModel."""
    try:
        content = json.loads(path.read_text("utf-8"))
        config = content["config"]
        count, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        entries = sorted(content["vocab"], key=lambda entry: entry["rank"])[: size - count]
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        special_tokens = content.get("special_tokens")
        special = (
            dict(enumerate(FIRST_SPECIAL_TOKENS))
            if special_tokens is None
            else {e["rank"]: e["token_str"] for e in special_tokens}
        )
        pattern, version = str(config["pattern"]), str(config.get("version") or "v3")
        if not all(isinstance(text, str) for text in special.values()):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise BadTokenizerModel("its tekken.json is not in Mistral's format") from None
    special_texts = [special.get(number, FILLER.format(number)) for number in range(count)]
    if len(tokens) != size - count or len(set(tokens)) < len(tokens) or len(set(special_texts)) < count:
        raise BadTokenizerModel("its tekken.json does not have one token for each rank")
    return TekkenFile(special_texts, tokens, pattern, version)


def _tokenizer_json(tekken: TekkenFile) -> dict[str, Any]:
    """Return the contents of tokenizer.json."""
    special_texts, tokens = tekken.special_texts, tekken.tokens
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special_token(number, text) for number, text in enumerate(special_texts)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": tekken.pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "post_processor": _begin_processor(special_texts),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {text: number for number, text in enumerate(special_texts)}
            | {_byte_text(token): number for number, token in enumerate(tokens, len(special_texts))},
            "merges": _merges_by_rank(tokens),
        },
    }


def _special_token(number: int, text: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": text} | flags


def _begin_processor(special_texts: list[str]) -> dict[str, Any] | None:
    """Return the post-processor that puts the begin token before a text."""
    if "<s>" not in special_texts:
        return None
    begin: dict[str, Any] = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    parts: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": [begin, parts[0]],
        "pair": [begin, parts[0], begin, parts[1]],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [special_texts.index("<s>")], "tokens": ["<s>"]}},
    }


def _byte_characters() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies, as GPT-2 defined them."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()


def _byte_text(token: bytes) -> str:
    return "".join(BYTE_CHARACTERS[byte] for byte in token)


def _merges_by_rank(tokens: list[bytes]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, lowest rank first, as tiktoken joins neighbours."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for token in tokens:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        ranked_pairs = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        ranked_pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(_byte_text(left), _byte_text(right)) for left, right in ranked_pairs]
    return merges
