"""The packed-weight cache: packed weights on disk next to the model, so that the next start skips packing.

The file name is a hash of everything that the weights depend on: checkpoint content, config, kernels and settings.
Kernels trust the sizes in a file, so only files that this user wrote may be read. Therefore the name also depends on a
secret in the user's cache folder, and nobody can distribute a model with a forged file. Checksums detect bytes that a
disk has damaged; such weights are packed again. This module does not know the purpose of a layer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from parley import native
from parley.cache_folders import locked_scratch_folder, remove_scratch_folders, user_cache_folder
from parley.native import memory
from parley.native.layer import (
    AltUpWeights,
    CrossAttentionWeights,
    DecoderLayer,
    HyperWeights,
    IndexerWeights,
    StateWeights,
)
from parley.version import __version__

log = logging.getLogger("parley.engine")

CACHE_FOLDER = ".parley"  # within the model folder
DIGESTS_FILE = "contents.json"  # for each checkpoint file: size, mtime, inode and digest when it was last read
PACKED_KINDS = {
    f"{kind.__module__}.{kind.__name__}": kind
    for kind in (
        DecoderLayer,
        StateWeights,
        IndexerWeights,
        AltUpWeights,
        CrossAttentionWeights,
        HyperWeights,
        native.Norm,
        native.Mixture,
        native.Experts,
        *get_args(native.PackedWeight),
    )
}
PACKED_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float32)}


class PackedWeightCache:
    """The packed weights of one model. ``files``: all that they are made of; ``settings_key``: the settings used."""

    def __init__(self, folder: Path, files: Sequence[Path], settings_key: str, secret: bytes, kernels: str):
        self.folder = folder / CACHE_FOLDER
        digest = hashlib.sha256(secret)
        for part in (__version__, kernels, settings_key, *file_digests(self.folder, files)):
            digest.update(part.encode() + b"\0")
        self._settings_key = settings_key
        self.path = self.folder / f"packed-{settings_key}-{digest.hexdigest()[:32]}.safetensors"

    def read_weights(self, progress: Callable[[float], None]) -> Any | None:
        """Return the cached weights, None if there are none that can be read."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                metadata = file.metadata()
                if metadata["digest"] != _text_digest(metadata["structure"]):
                    raise ValueError("its header is damaged")
                names = list(file.keys())
                tensors: dict[str, CheckedTensor] = {}
                with ThreadPoolExecutor(min(4, torch.get_num_threads()), "packs") as pool:
                    copies = pool.map(lambda name: _copy_to_memory(file.get_tensor(name)), names)
                    for name, copy in zip(names, copies, strict=True):
                        tensors[name] = copy
                        progress(len(tensors) / len(names))
            return _join_tensors(json.loads(metadata["structure"]), tensors)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            log.warning("The packed weights in %s cannot be read (%s); they are packed again.", self.path.name, error)
            return None

    def write_weights(self, weights: Any) -> None:
        """Store weights made of lists, layers, packed linears and tensors, and delete files of an older state."""
        tensors: dict[str, torch.Tensor] = {}
        structure = json.dumps(_split_tensors(weights, tensors))
        try:
            self.folder.mkdir(exist_ok=True)
            remove_scratch_folders(self.folder)
            with locked_scratch_folder(self.folder) as scratch:
                written = scratch / "weights"  # the library writes a file of another name beside it, and renames that
                save_file(tensors, written, {"structure": structure, "digest": _text_digest(structure)})
                with written.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(written, self.path)
            for other in self.folder.glob(f"packed-{self._settings_key}-*.safetensors"):
                if other != self.path:
                    other.unlink(missing_ok=True)
            log.info("The packed weights are kept in %s.", self.path)
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            log.warning("Packed weights cannot be kept in %s, so each start packs them: %s.", self.folder, reason)


def open_packed_cache(folder: Path, files: Sequence[Path], settings_key: str) -> PackedWeightCache | None:
    """Return the packed-weight cache of a model, None if it cannot be used."""
    kernels = native.packed_layout_id()
    if kernels is None:
        log.warning("Packed weights are not kept: without compiled kernels, only torch knows their layout.")
        return None
    try:
        return PackedWeightCache(folder, files, settings_key, _user_secret(), kernels)
    except OSError as error:
        log.warning("Packed weights are not kept: %s.", error)
        return None


def _user_secret() -> bytes:
    """Return this user's secret, created on first use. Raises OSError."""
    path = user_cache_folder() / "secret"
    with suppress(FileNotFoundError):
        return path.read_bytes()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_scratch_folders(path.parent)
    with locked_scratch_folder(path.parent) as scratch:
        written = scratch / path.name
        written.touch(0o600)
        written.write_bytes(secrets.token_bytes(32))
        with suppress(FileExistsError):  # another process was faster, and its secret counts
            os.link(written, path)
    return path.read_bytes()


def file_digests(folder: Path | None, files: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file, reusing the digest of a file that has not changed since it was last read.

    Digests are kept in ``folder``, if given. Raises OSError.
    """
    cached: Any = {}
    if folder is not None:
        with suppress(OSError, ValueError):
            cached = json.loads((folder / DIGESTS_FILE).read_text())
    digests, fresh = [], {}
    for path in files:
        stat = path.stat()
        file_stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        entry = cached.get(path.name) if isinstance(cached, dict) else None
        if not (isinstance(entry, list) and entry[:-1] == file_stamp and isinstance(entry[-1], str)):
            with path.open("rb") as file:
                entry = [*file_stamp, hashlib.file_digest(file, "sha256").hexdigest()]
        fresh[path.name] = entry
        digests.append(entry[-1])
    if folder is not None and fresh != cached:
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            remove_scratch_folders(folder)
            with locked_scratch_folder(folder) as scratch:
                (scratch / DIGESTS_FILE).write_text(json.dumps(fresh))
                os.replace(scratch / DIGESTS_FILE, folder / DIGESTS_FILE)
    return digests


class CheckedTensor(NamedTuple):
    """A tensor, and the checksum of its bytes."""

    tensor: torch.Tensor
    checksum: int


def _copy_to_memory(tensor: torch.Tensor) -> CheckedTensor:
    """Copy a tensor to memory for weights: mapped file pages are small, and the kernel may evict them."""
    copy = memory.map_tensor(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)
    return CheckedTensor(copy, _tensor_checksum(copy))


def _tensor_checksum(tensor: torch.Tensor) -> int:
    """Return the sum of a contiguous tensor's bytes, taken as 64-bit numbers, modulo 2^64.

    Damaged bytes change it, and it takes a third of the time of copying them; a CRC takes longer, with most libraries
    several times as long.
    """
    data = (tensor.clone() if tensor.storage_offset() else tensor).view(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    return (int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum())) & (1 << 64) - 1


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _split_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Convert a weight structure to JSON values; its tensors are moved to ``tensors`` under numbers."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = tensor = value.contiguous()
        return {"tensor": name, "checksum": _tensor_checksum(tensor)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, list):
        return [_split_tensors(member, tensors) for member in value]
    if dataclasses.is_dataclass(value):
        kind = type(value)
        members = {
            field.name: _split_tensors(getattr(value, field.name), tensors) for field in dataclasses.fields(value)
        }
        return {"kind": f"{kind.__module__}.{kind.__name__}", "members": members}
    assert value is None or isinstance(value, int | float | str), value
    return value


def _join_tensors(value: Any, tensors: dict[str, CheckedTensor]) -> Any:
    """Rebuild a weight structure from the JSON values and tensors of ``_split_tensors``. Raises ValueError."""
    if isinstance(value, list):
        return [_join_tensors(member, tensors) for member in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        tensor, checksum = tensors[value["tensor"]]
        if checksum != value["checksum"]:
            raise ValueError("its tensors are damaged")
        return tensor
    if "dtype" in value:
        return PACKED_DTYPES[value["dtype"]]
    members = {name: _join_tensors(member, tensors) for name, member in value["members"].items()}
    return PACKED_KINDS[value["kind"]](**members)
