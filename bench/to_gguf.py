"""Converts a model of ``model.py`` to GGUF with llama.cpp's own converter.

    python bench/to_gguf.py LLAMA_CPP MODEL OUT

Two things must be patched. The converter detects how a tokenizer splits text by its output for one sentence, so it does
not know parley's vocabulary, which splits as Qwen2's. And it imports the sentencepiece library only to find that the
model has no file for it.
"""

from __future__ import annotations

import runpy
import sys


def no_sentencepiece(*_: object) -> None:
    """Replace the sentencepiece reader: there is no such file."""
    raise FileNotFoundError("the vocabulary is in tokenizer.json")


if __name__ == "__main__":
    source, model, out = sys.argv[1:]
    sys.path[:0] = [source, f"{source}/gguf-py"]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    TextModel._set_vocab_sentencepiece = no_sentencepiece
    sys.argv = ["convert_hf_to_gguf.py", model, "--outtype", "bf16", "--outfile", out]
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")
