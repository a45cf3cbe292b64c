"""Prompts with a gap: the model writes the text between two others, which its own marks separate.

The marks of each family are those that its makers document; a tokenizer that has them belongs to a model that was
trained with them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

BEFORE, AFTER = "before", "after"  # the positions of the two texts
FILL_LAYOUTS: tuple[tuple[str, ...], ...] = (
    ("<|fim_prefix|>", BEFORE, "<|fim_suffix|>", AFTER, "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", BEFORE, "<fim_suffix>", AFTER, "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", BEFORE, "<｜fim▁hole｜>", AFTER, "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", BEFORE, "▁<SUF>", AFTER, "▁<MID>"),  # Code Llama
    ("[SUFFIX]", AFTER, "[PREFIX]", BEFORE),  # Codestral
)


def find_fill_layout(marks: Collection[str]) -> Sequence[str] | None:
    """Return the layout whose marks are all among a tokenizer's, None if there is none."""
    return next((layout for layout in FILL_LAYOUTS if marks_of(layout) <= set(marks)), None)


def marks_of(layout: Sequence[str]) -> set[str]:
    """Return the marks of a layout."""
    return set(layout) - {BEFORE, AFTER}


def write_gap(layout: Sequence[str], before: str, after: str) -> str:
    """Return the prompt for the text between two others."""
    texts = {BEFORE: before, AFTER: after}
    return "".join(texts.get(piece, piece) for piece in layout)
