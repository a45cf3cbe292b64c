"""Writes a tokenizer with as many tokens as real models have, because nothing can be downloaded.

The cost of a grammar's mask depends on the vocabulary. The built-in model's three thousand tokens are extended to
151,643, always the same: words of Latin letters with and without a leading space, of other scripts, and bits of code.
"""

from __future__ import annotations

import json
import random
import shutil
import string
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel

from parley import demo

SIZE = 151_643  # as Qwen2.5 has
SCRIPTS = ((0x3B1, 0x3C9), (0x430, 0x44F), (0x5D0, 0x5EA), (0x627, 0x64A), (0xAC00, 0xD7A3), (0x4E00, 0x9FA5))
CODE = "{}[]()<>;:,.=+-*/\"'_#!?&|\\\n\t " + string.digits


def _random_word(draw: random.Random) -> str:
    kind = draw.random()
    space = " " if draw.random() < 0.5 else ""
    if kind < 0.7:
        word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 11)))
        return space + (word.capitalize() if draw.random() < 0.3 else word)
    if kind < 0.95:
        script = draw.choice(SCRIPTS)
        return space + "".join(chr(draw.randint(*script)) for _ in range(draw.randint(1, 4)))
    return "".join(draw.choices(CODE, k=draw.randint(2, 5)))


def write_tokenizer(folder: Path) -> None:
    """Write the built-in model's tokenizer with SIZE tokens to an existing folder."""
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo.model_folder() / name, folder / name)
    content = json.loads((demo.model_folder() / "tokenizer.json").read_text("utf-8"))
    vocab, spell = content["model"]["vocab"], ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    draw = random.Random(0)
    number = 1 + max([*vocab.values(), *(token["id"] for token in content["added_tokens"])])
    while number < SIZE:
        token = "".join(part for part, _ in spell(_random_word(draw)))
        if token not in vocab:
            vocab[token] = number
            number += 1
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), "utf-8")
