"""The digest of an item: SHA-256 of everything that decides its embeddings but the model's weights.

It is computed of the encoded bytes, so the same file has the same digest before it is decoded. Each part is written
with its length before it: no two lists of parts have the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Files of a model that configure its processor.
PROCESSOR_FILES = (
    "config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
PACKAGES = ("transformers", "torch", "torchvision", "pillow", "av", "num2words")


def hash_item_parts(parts: Iterable[bytes]) -> bytes:
    """Return the SHA-256 of parts, each with its length before it."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()


def processor_fingerprint(folder: Path) -> bytes:
    """Return a hash of the processor's files and of the versions of its libraries and of the decoders'."""
    files = [(folder / name).read_bytes() if (folder / name).is_file() else b"" for name in PROCESSOR_FILES]
    versions = [f"{name} {_package_version(name)}" for name in PACKAGES]
    versions += [f"{name} {number}" for name, number in sorted(_decoder_versions().items())]
    return hash_item_parts([*files, *(version.encode() for version in versions)])


def item_digest(kind: str, form: str, data: bytes, options: dict[str, Any], fingerprint: bytes) -> bytes:
    """Return the digest of an item. ``data``: its encoded bytes; ``options``: all that change the result."""
    written = json.dumps(options, sort_keys=True, separators=(",", ":"))
    return hash_item_parts([kind.encode(), form.encode(), data, written.encode(), fingerprint])


def _decoder_versions() -> dict[str, tuple[int, ...]]:
    """Return the versions of the libraries within PyAV, none if it is not installed: then only images are read."""
    try:
        import av
    except ImportError:
        return {}
    return dict(av.library_versions)


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
