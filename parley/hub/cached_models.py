"""Lists the models in the Hugging Face cache, with their sizes and times of use, and removes models from it."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parley.gguf.folder import GGUF_SUFFIX
from parley.gguf.header import GgufError, read_header

MAX_HEADER = 100 << 20  # bytes of a safetensors header, as in the format's reference implementation


@dataclass(frozen=True)
class CachedModel:
    """A model of the cache. ``size``: bytes on disk; ``used``: seconds since 1970; ``commits``: its revisions."""

    name: str
    size: int
    used: float
    commits: tuple[str, ...]
    folder: Path


def list_cached_models() -> list[CachedModel]:
    """Return the models in the cache, by name. A cache that does not exist has none."""
    return sorted((_describe_repo(repo) for repo in _cached_repositories()), key=lambda model: model.name.lower())


def remove_cached_model(name: str, commit: str | None = None) -> int:
    """Remove a model of the cache, or one of its revisions. Return the bytes that are freed. Raises KeyError."""
    from huggingface_hub import scan_cache_dir

    repo = next((repo for repo in _cached_repositories() if repo.repo_id == name), None)
    commits = [revision.commit_hash for revision in repo.revisions] if repo is not None else []
    if commit is not None:
        commits = [full_commit for full_commit in commits if full_commit.startswith(commit)]
    if not commits:
        raise KeyError(name)
    strategy = scan_cache_dir().delete_revisions(*commits)
    strategy.execute()
    return int(strategy.expected_freed_size)


def _cached_repositories() -> Iterator[Any]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    yield from (repo for repo in repositories if repo.repo_type == "model")


def _describe_repo(repo: Any) -> CachedModel:
    revisions = sorted(repo.revisions, key=lambda revision: revision.last_modified, reverse=True)
    folder = revisions[0].snapshot_path if revisions else repo.repo_path
    commits = tuple(revision.commit_hash for revision in revisions)
    return CachedModel(repo.repo_id, repo.size_on_disk, repo.last_accessed, commits, Path(folder))


def count_parameters(folder: Path) -> dict[str, int]:
    """Return how many numbers of each type the weights of a folder have, from the headers of its files.

    The types are those of the files. A quantized weight counts as it is stored: in safetensors files as packed
    integers, in GGUF files as its numbers. Files that cannot be read are left out.
    """
    counts: dict[str, int] = {}
    for file in weight_files(folder):
        sizes = _gguf_tensor_sizes(file) if file.suffix == GGUF_SUFFIX else _safetensors_sizes(file)
        for kind, count in sizes:
            counts[kind] = counts.get(kind, 0) + count
    return counts


def _gguf_tensor_sizes(file: Path) -> list[tuple[str, int]]:
    """Return the type and the count of numbers of each tensor of a GGUF file."""
    try:
        _, tensors = read_header(file, 0)
    except GgufError:
        return []
    return [(tensor.blocks.name, math.prod(tensor.shape)) for tensor in tensors.values()]


def _safetensors_sizes(file: Path) -> list[tuple[str, int]]:
    """Return the type and the count of numbers of each tensor of a safetensors file. Format:
    https://github.com/huggingface/safetensors#format."""
    return [(tensor["dtype"], math.prod(tensor.get("shape", []))) for tensor in _read_safetensors_header(file).values()]


def _read_safetensors_header(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length)) if length <= MAX_HEADER else {}
    except (OSError, ValueError, struct.error):
        return {}
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}


def weight_files(folder: Path) -> list[Path]:
    """Return the files with weights of a folder."""
    return sorted([*folder.glob("*.safetensors"), *folder.rglob(f"*{GGUF_SUFFIX}")])
