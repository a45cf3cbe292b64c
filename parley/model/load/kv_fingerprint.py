"""The fingerprint of everything that decides the bytes of a KV page, as one line: instances with equal lines compute
equal pages.

Instances that exchange pages compare these lines and report which part differs. The line covers the content of the
weights, how weights and pages are stored, and the software that computes, because bits may differ between kernels.
``--trust-marks`` is part of it, because each instance makes the tokens of a conversation itself.
On an accelerator bits also differ between batches, so any two such instances count as equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from parley import native
from parley.cache_folders import user_cache_folder
from parley.core.sequence import PAGE_SIZE
from parley.model.load import packed_cache
from parley.model.networks.paged_kv import PagedKV


def kv_fingerprint(
    folder: Path,
    files: Sequence[Path],
    pages: PagedKV,
    *,
    state_sizes: Sequence[int],
    quantization: str,
    is_fused: bool,
    length: int,
    trust_marks: bool,
) -> str:
    """Return the fingerprint. ``files``: the weight files of the folder. ``state_sizes``: the numbers of a state in
    each layer that keeps one. ``length``: the longest context, which decides the rotary embeddings of some Transformers
    models. Raises OSError."""
    parts = {
        "model": _short_hash(*packed_cache.file_digests(_digest_folder(folder), [folder / "config.json", *files])),
        "weights": f"{quantization or 'none'} {str(pages.dtype).removeprefix('torch.')}",
        "pages": f"{PAGE_SIZE} {'int8' if pages.int8 else 'plain'} {_short_hash(*map(repr, pages.formats))}",
        "runs": "fused" if is_fused else f"transformers {length}",
        "kernels": native.packed_layout_id() or "torch" if pages.device.type == "cpu" else pages.device.type,
        "torch": torch.__version__,
        "trust-marks": "on" if trust_marks else "off",
    }
    if state_sizes:
        parts["states"] = _short_hash(*map(str, state_sizes))
    return ";".join(f"{name}={value}" for name, value in parts.items())


def _digest_folder(folder: Path) -> Path | None:
    """Return the folder that caches digests of the model's files, so they are not reread; None if it cannot exist."""
    try:
        folder_of_digests = (
            user_cache_folder() / "contents" / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        )
        folder_of_digests.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder_of_digests
    except OSError:
        return None


def _short_hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
