"""Records what SentencePiece and mistral_common make of texts of every script: ``python record.py FOLDER``.

Needs ``pip install sentencepiece mistral_common tokenizers``. Trains small models of
the kinds that decoders have. ``recorded.json.gz`` has texts with their ids, and conversations as mistral_common writes
them for each version.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import random
import sys
import unicodedata
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

RANDOM = random.Random(7)
SCRIPTS = (
    "LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "HEBREW", "ARABIC", "DEVANAGARI", "BENGALI", "TAMIL", "THAI", "LAO",
    "TIBETAN", "GEORGIAN", "HANGUL", "ETHIOPIC", "CHEROKEE", "KHMER", "MONGOLIAN", "HIRAGANA", "KATAKANA", "CJK",
)  # fmt: skip
CHARACTERS = {
    script: [
        chr(code)
        for code in range(0x20, 0x2FFFF)
        if unicodedata.name(chr(code), "").startswith(script) and unicodedata.category(chr(code))[0] in "LMN"
    ][:40]
    for script in SCRIPTS
}
SENTENCES = (
    "The quick brown fox jumps over the lazy dog. Don't panic: it's 3.14159 or 2,718?",
    "def f(x):\n    return x ** 2  # squared\n\n\nclass A:\n\tpass",
    "Grüße aus Köln! Ça va? Привет. 你好 こんにちは 안녕하세요 สวัสดี",
    '{"name": "value", "n": [1, 22, 333]} https://example.org/a?b=c&d=%20',
)
ODD = [
    "\N{PARTY POPPER}",
    "\U0001f469\u200d\U0001f467\U0001f3fd",
    "\ufb01",
    "\u2581",
    "\n\n",
    "  ",
    "   ",
    "\u3000",
    "\xa0",
    *"\t\r\n0123456789.,;:!?()<>/'\"",
]
BASE = {"model_type": "bpe", "normalization_rule_name": "identity", "vocab_size": 1800, "character_coverage": 0.98}
LLAMA = {"byte_fallback": True, "remove_extra_whitespaces": False, "split_digits": True}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma": LLAMA
    | {"add_dummy_prefix": False, "user_defined_symbols": ["\u2581\u2581", "\n", "\n\n", "<turn>"]}
    | {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
    "trimmed": {"user_defined_symbols": ["<x>", "the"]},
}
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]",
)  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d é", "parameters": {"type": "object"}}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "content": "7", "tool_call_id": "abcdefghi", "name": "f"}
START = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"},
]
CHATS: list[tuple[list[dict[str, Any]], Any]] = [
    ([{"role": "user", "content": "Hi é"}], None),
    ([*START, {"role": "user", "content": "More"}], None),
    (
        [
            *START,
            {"role": "user", "content": "Two"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            RESULT,
        ],
        TOOLS,
    ),
    (
        [
            {"role": "user", "content": "Two"},
            {"role": "assistant", "content": "", "tool_calls": [CALL, CALL | {"id": "ABCDEFGHI"}]},
            RESULT,
            RESULT | {"tool_call_id": "ABCDEFGHI", "content": "warm"},
            {"role": "assistant", "content": "done"},
            {"role": "user", "content": "Thanks"},
        ],
        TOOLS,
    ),
]


def word() -> str:
    characters = CHARACTERS[RANDOM.choice(SCRIPTS)]
    return "".join(RANDOM.choices(characters[: RANDOM.choice((10, 40))], k=RANDOM.randint(1, 7)))


def text() -> str:
    kind, count = RANDOM.random(), RANDOM.randint(0, 9)
    if kind < 0.4:
        return " ".join(word() for _ in range(count))
    if kind < 0.6:
        return "".join(RANDOM.choice((word(), RANDOM.choice(ODD), " ")) for _ in range(3 * count))
    if kind < 0.8:
        sentence = RANDOM.choice(SENTENCES)
        start = RANDOM.randrange(len(sentence))
        return sentence[start : start + RANDOM.randint(1, 40)] + word()
    ranges = ((32, 0x250), (0x250, 0x3000), (0x3000, 0xD800), (0xE000, 0x2FFFF))
    return "".join(chr(RANDOM.randrange(*RANDOM.choice(ranges))) for _ in range(count))


def write_tekken(path: Path, corpus: list[str], version: str) -> None:
    """Train a byte-level BPE, and write it in Mistral's format."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(corpus, tokenizers.trainers.BpeTrainer(vocab_size=1600, initial_alphabet=alphabet))
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of = {chr(byte): byte for byte in shown}
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in shown)}
    state = json.loads(backend.to_str())["model"]
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(byte_of[c] for c in "".join(pair)) for pair in state["merges"]]
    tokens = list(dict.fromkeys(tokens))
    content = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) - 100 + 40,
            "default_num_special_tokens": 40,
            "version": version,
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)
        ],
        "special_tokens": [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(SPECIAL_TOKENS)],
    }
    path.write_text(json.dumps(content))


def main(folder: Path) -> None:
    corpus = [" ".join(word() for _ in range(6)) for _ in range(1500)] + [s for s in SENTENCES for _ in range(300)]
    texts = sorted({text() for _ in range(1200)})
    recorded: dict[str, list[list[int]]] = {}
    for name, options in KINDS.items():
        buffer = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus), model_writer=buffer, minloglevel=2, num_threads=1, **BASE | options
        )
        (folder / f"{name}.model").write_bytes(buffer.getvalue())
        recorded[name] = sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue()).encode(texts)
    chats = []
    for version in ("v3", "v7", "v11", "v13"):
        path = folder / "tekken.json"
        write_tekken(path, corpus, version)
        for messages, tools in CHATS:
            request = ChatCompletionRequest(messages=messages, tools=tools)
            written = MistralTokenizer.from_file(str(path)).encode_chat_completion(request)
            chats.append({"version": version, "messages": messages, "tools": tools, "ids": written.tokens})
    tekken = Tekkenizer.from_file(path)
    recorded["tekken"] = [tekken.encode(text, bos=False, eos=False) for text in texts]
    content = json.dumps({"texts": texts, "ids": recorded, "chats": chats}, ensure_ascii=False).encode()
    (folder / "recorded.json.gz").write_bytes(gzip.compress(content, mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
