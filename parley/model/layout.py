"""What decides the bytes of a page, as one line: equal lines, equal bytes for equal tokens.

Instances that exchange pages compare these lines, and tell a person which part differs. So all that has a say is named:
the weights by their content, how they and the pages are stored, and what computes, for bits may differ between kernels.
On an accelerator they also differ between batches, so that any two of them are alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from parley import native
from parley.core.sequence import BLOCK_SIZE
from parley.model import packs
from parley.model.kv import PagedKV
from parley.native import library


def fingerprint(
    folder: Path, files: Sequence[Path], pages: PagedKV, *, quantization: str, lowered: bool, length: int
) -> str:
    """``files`` of the folder are the weights. ``length``: of the longest context, by which some models that run
    through Transformers choose how they tell positions. Raises OSError."""
    parts = {
        "model": _short(*packs.digests(_known(folder), [folder / "config.json", *files])),
        "weights": f"{quantization or 'none'} {str(pages.dtype).removeprefix('torch.')}",
        "pages": f"{BLOCK_SIZE} {'int8' if pages.int8 else 'plain'} {_short(*map(repr, pages.formats))}",
        "runs": "fused" if lowered else f"transformers {length}",
        "kernels": native.identity() or "torch" if pages.device.type == "cpu" else pages.device.type,
        "torch": torch.__version__,
    }
    return ";".join(f"{name}={value}" for name, value in parts.items())


def _known(folder: Path) -> Path | None:
    """Where digests of the folder's files are kept, so that they need not be read each time; None if nowhere can be."""
    try:
        known = library.cache() / "contents" / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        known.mkdir(mode=0o700, parents=True, exist_ok=True)
        return known
    except OSError:
        return None


def _short(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
