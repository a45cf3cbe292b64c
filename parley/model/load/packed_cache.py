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
import math
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from parley import native
from parley.cache_folders import locked_scratch_folder, remove_scratch_folders, user_cache_folder
from parley.native import mapped_weights
from parley.native.layer import (
    AltUpWeights,
    CompressorWeights,
    CrossAttentionWeights,
    DecoderLayer,
    EntryIndexerWeights,
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
        CompressorWeights,
        EntryIndexerWeights,
        AltUpWeights,
        CrossAttentionWeights,
        HyperWeights,
        native.Norm,
        native.Mixture,
        native.Experts,
        *get_args(native.PackedWeight),
    )
}
LENGTH_BYTES = 8  # of the header's length
ALIGNMENT = 64  # bytes: a line of the processor's caches


class PackedWeightCache:
    """The packed weights of one model. ``files``: all that they are made of; ``settings_key``: the settings used."""

    def __init__(self, folder: Path, files: Sequence[Path], settings_key: str, secret: bytes, kernels: str):
        self.folder = folder / CACHE_FOLDER
        digest = hashlib.sha256(secret)
        for part in (__version__, kernels, settings_key, *file_digests(self.folder, files)):
            digest.update(part.encode() + b"\0")
        self._settings_key = settings_key
        self.path = self.folder / f"packed-{settings_key}-{digest.hexdigest()[:32]}.weights"

    def read_weights(self, progress: Callable[[float], None]) -> Any | None:
        """Return the cached weights, None if there are none that can be read. They stay in the mapped file until
        ``mapped_weights.start_copying``."""
        if not self.path.exists():
            return None
        file = None
        try:
            file = mapped_weights.MappedWeightFile(self.path)
            structure, begin = _read_header(file)
            tensors: list[CheckedTensor] = []
            weights = _join_tensors(structure, file.data[begin:], tensors)
            with ThreadPoolExecutor(min(4, torch.get_num_threads()), "packs") as pool:
                for count, damaged in enumerate(pool.map(partial(_is_damaged, file), tensors), 1):
                    if damaged:
                        raise ValueError("its tensors are damaged")
                    progress(count / len(tensors))
            return weights
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            log.warning("The packed weights in %s cannot be read (%s); they are packed again.", self.path.name, error)
            if file is not None:
                file.discard()
            return None

    def write_weights(self, weights: Any) -> None:
        """Store weights made of lists, layers, packed linears and tensors, and delete files of an older state."""
        try:
            self.folder.mkdir(exist_ok=True)
            remove_scratch_folders(self.folder)
            with locked_scratch_folder(self.folder) as scratch:
                written = scratch / "weights"
                with written.open("wb") as file:
                    _write_file(file, weights)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(written, self.path)
            for other in self.folder.glob(f"packed-{self._settings_key}-*"):
                if other != self.path:
                    other.unlink(missing_ok=True)
            log.info("The packed weights are kept in %s.", self.path)
        except OSError as error:
            log.warning(
                "Packed weights cannot be kept in %s, so each start packs them: %s.", self.folder, error.strerror
            )


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


class PlacedTensor(NamedTuple):
    """A tensor, and where the next one begins, in bytes after the header."""

    tensor: torch.Tensor
    end: int


class CheckedTensor(NamedTuple):
    """A tensor, and the checksum that its bytes should have."""

    tensor: torch.Tensor
    checksum: int


def _is_damaged(file: mapped_weights.MappedWeightFile, checked: CheckedTensor) -> bool:
    """Whether the bytes of a tensor in the file have another checksum. Raises OSError."""
    file.load_pages(checked.tensor)
    return _tensor_checksum(checked.tensor) != checked.checksum


def _tensor_checksum(tensor: torch.Tensor) -> int:
    """Return the sum of a contiguous tensor's bytes, taken as 64-bit numbers, modulo 2^64.

    Damaged bytes change it, and it takes a third of the time of copying them; a CRC takes longer, with most libraries
    several times as long.
    """
    data = _tensor_data(tensor)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    return (int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum())) & (1 << 64) - 1


def _tensor_data(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor: uint8 [size]."""
    return tensor.detach().view(-1).view(torch.uint8)


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _write_file(file: BufferedWriter, weights: Any) -> None:
    """Write the length of the header in 8 bytes, the header as JSON, and the tensors, all aligned. Raises OSError."""
    tensors: list[PlacedTensor] = []
    structure = json.dumps(_split_tensors(weights, tensors))
    header = json.dumps({"structure": structure, "digest": _text_digest(structure)}).encode()
    header = header.ljust(_align(len(header) + LENGTH_BYTES) - LENGTH_BYTES)
    file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
    for tensor, _ in tensors:
        data = _tensor_data(tensor)
        file.write(data.numpy().data)
        file.write(bytes(_align(len(data)) - len(data)))


def _read_header(file: mapped_weights.MappedWeightFile) -> tuple[Any, int]:
    """Return the structure of a file's weights, and where its tensors begin. Raises OSError, ValueError, KeyError,
    TypeError."""
    file.load_pages(file.data[:LENGTH_BYTES])
    begin = LENGTH_BYTES + int.from_bytes(file.data[:LENGTH_BYTES].numpy().tobytes(), "little")
    if begin > file.size:
        raise ValueError("it ends within its header")
    file.load_pages(file.data[:begin])
    header = json.loads(file.data[LENGTH_BYTES:begin].numpy().tobytes())
    structure = header["structure"]
    if not isinstance(structure, str) or header["digest"] != _text_digest(structure):
        raise ValueError("its header is damaged")
    return json.loads(structure), begin


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _split_tensors(value: Any, tensors: list[PlacedTensor]) -> Any:
    """Convert a weight structure to JSON values; its tensors are appended to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensor, begin = value.contiguous(), tensors[-1].end if tensors else 0
        tensors.append(PlacedTensor(tensor, _align(begin + tensor.nbytes)))
        dtype, shape = str(tensor.dtype), list(tensor.shape)
        return {"tensor": begin, "dtype": dtype, "shape": shape, "checksum": _tensor_checksum(tensor)}
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


def _join_tensors(value: Any, data: torch.Tensor, tensors: list[CheckedTensor]) -> Any:
    """Rebuild a weight structure from the JSON values of ``_split_tensors`` and the bytes of its tensors, which are
    appended to ``tensors``. Raises ValueError, RuntimeError."""
    if isinstance(value, list):
        return [_join_tensors(member, data, tensors) for member in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        dtype, begin = _named_dtype(value["dtype"]), value["tensor"]
        size = math.prod(value["shape"]) * dtype.itemsize
        tensor = data[begin : begin + size].view(dtype).view(value["shape"])  # raises RuntimeError beyond the end
        tensors.append(CheckedTensor(tensor, value["checksum"]))
        return tensor
    if "dtype" in value:
        return _named_dtype(value["dtype"])
    members = {name: _join_tensors(member, data, tensors) for name, member in value["members"].items()}
    return PACKED_KINDS[value["kind"]](**members)


def _named_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name such as "torch.int8". Raises ValueError."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype
