"""Converts a model of ``random_model.py`` to GGUF with llama.cpp's own converter.

    python bench/to_gguf.py LLAMA_CPP MODEL OUT

The script patches it in four places. The converter detects how a tokenizer splits text by its output for one sentence,
so it does not know parley's vocabulary, which splits as Qwen2's. It imports the sentencepiece library only to find
that the model has no file for it. It cuts Gemma's embedding to the length of the vocabulary, which is shorter here.
And it expects that Qwen3-Next predicts several tokens.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from typing import Any


def no_sentencepiece(*_: object) -> None:
    """Replace the sentencepiece reader: there is no such file."""
    raise FileNotFoundError("the vocabulary is in tokenizer.json")


def keep_all_rows(self: Any, tensor: Any, name: str, layer: int | None) -> Iterator[tuple[str, Any]]:
    """Convert a tensor of Gemma 3 as its model class does, but keep all rows of the embedding."""
    yield from TextModel.modify_tensors(self, tensor + self.norm_shift(name), name, layer)


if __name__ == "__main__":
    source, model, out = sys.argv[1:]
    sys.path[:0] = [source, f"{source}/gguf-py"]
    from conversion.base import TextModel  # type: ignore[import-not-found]
    from conversion.gemma import Gemma3Model  # type: ignore[import-not-found]
    from conversion.qwen import Qwen3NextModel  # type: ignore[import-not-found]

    Gemma3Model.modify_tensors = keep_all_rows
    Qwen3NextModel.no_mtp = True
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    TextModel._set_vocab_sentencepiece = no_sentencepiece
    sys.argv = ["convert_hf_to_gguf.py", model, "--outtype", "bf16", "--outfile", out]
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")
