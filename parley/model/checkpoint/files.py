"""Reads a model folder in Hugging Face format: config.json and safetensors or GGUF, nothing else and never pickle.

Files are mapped unless the caller wants them read: a tensor is a view of the file until it is copied. If its data are
not aligned to its dtype, as in files of MLX, it is a copy. This module does not know the meaning of a tensor. Every
error message names the faulty file or tensor.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import mmap
import os
import re
import reprlib
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from parley import foreign_files
from parley.gguf.folder import LINK_PATTERN
from parley.gguf.header import BlockType, GgufError, read_model
from parley.model.checkpoint.gguf_blocks import decode_blocks
from parley.model.checkpoint.gguf_tensors import read_gguf_entries, read_projector_entries
from parley.model.checkpoint.tensor_entry import TensorEntry
from parley.text.media_family import writer_config
from parley.weight_shards import INDEX_NAME, find_shards

MODEL_OPT_CONFIG = "hf_quant_config.json"  # of NVIDIA's Model Optimizer, beside or instead of quantization_config
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
}
# A weight of one of these dtypes cannot be used without the scales that the config's format defines.
SCALED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_HEADER_BYTES = 100_000_000  # bytes; the format's own limit
# Members of config.json with numbers of parts of a model, with any prefix or suffix; and the largest allowed number
PART_COUNT = re.compile(r"(?:^|_)(?:n|num|decoder|encoder)_(?:\w+_)?(?:layers?|heads?|experts?|blocks?)(?:_|$)")
MAX_PARTS = 1 << 16
MAX_COUNT_NAME = 100  # most characters of such a member's name; a search in much longer names could take hours
# Members whose numbers are never below zero: bases of rotary embeddings, and what norms add to variances
NEVER_NEGATIVE = re.compile(r"(?:.*_)?(?:theta|base_freq|eps|epsilon)")
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


class LoadError(Exception):
    """The model cannot be loaded. The message is one sentence for the user."""


@contextmanager
def refuse_unpackable(subject: str) -> Iterator[None]:
    """Turn the ValueError of weights that no kernel can read, such as damaged ones, into a LoadError."""
    try:
        yield
    except ValueError as error:
        raise LoadError(f"{subject} cannot be packed: {error}.") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of the folder's config.json, with the quantization that another file describes.

    Raises LoadError.
    """
    if not folder.is_dir():
        raise LoadError(f"There is no model folder {folder}.")
    if not (folder / "config.json").exists():
        raise LoadError(f"{folder} cannot be served: {foreign_files.config_problem(folder)}.")
    config = _read_json(folder / "config.json", "though it was there a moment ago")
    config = dict(writer_config(config))
    if not isinstance(config.get("model_type"), str):
        raise LoadError(f"{folder / 'config.json'} does not name a model_type, so the architecture is unknown.")
    _check_numbers(config)
    if config.get("quantization_config") is None and (folder / MODEL_OPT_CONFIG).exists():
        section = _read_json(folder / MODEL_OPT_CONFIG, "though it was there a moment ago").get("quantization")
        if isinstance(section, dict) and section.get("quant_algo"):
            config["quantization_config"] = {**section, "quant_method": "modelopt"}
    return config


def _check_numbers(config: dict[str, Any]) -> None:
    """Raise LoadError if a config claims more parts than any model has, because the loader iterates over them, a
    negative number of layers, or a number that makes all results NaN."""
    pending = [config]
    while pending:
        for name, value in pending.pop().items():
            if isinstance(value, dict):
                pending.append(value)
            elif _makes_nan(name, value):
                shown_name, shown = name[:MAX_COUNT_NAME], reprlib.repr(value)
                raise LoadError(f"The model's config.json gives {shown_name} as {shown}; that is impossible.")
            elif type(value) is int and value > MAX_PARTS and len(name) <= MAX_COUNT_NAME and PART_COUNT.search(name):
                raise LoadError(
                    f"The model's config.json gives {name} as {reprlib.repr(value)}; at most {MAX_PARTS} are possible."
                )
            elif type(value) is int and value < 0 and name in LAYER_COUNTS:
                raise LoadError(
                    f"The model's config.json gives {name} as {reprlib.repr(value)}; it is a number of layers."
                )


def _makes_nan(name: str, value: Any) -> bool:
    """Whether a member of a config is NaN, or a number below zero or without end where none can be."""
    if type(value) not in (int, float):
        return False
    is_bounded = len(name) <= MAX_COUNT_NAME and NEVER_NEGATIVE.fullmatch(name)
    return bool(value != value or (is_bounded and not 0 <= value < math.inf))


class Checkpoint:
    """The tensors of a folder, by name. Raises LoadError for anything that violates the format."""

    def __init__(self, folder: Path, files: list[Path] | None = None, *, mapped: bool = True):
        """``files``: the folder's files to use, if not the usual ones. ``mapped`` False: read them into memory, because
        others may change them meanwhile, and truncating a mapped file kills the process."""
        self.folder = folder
        self._mapped = mapped
        self._has_data = True
        self._maps: list[mmap.mmap | bytearray] = []
        self._entries: dict[str, TensorEntry] = {}
        self.metadata: dict[str, str] = {}  # of the headers of safetensors files; some writers describe tensors there
        self.unread_names: set[str] = set()  # tensors of dtypes that are not read here, by the names in the files
        self.files = _weight_files(folder) if files is None else files
        if self.files and self.files[0].suffix == ".gguf":
            self._open_gguf(self.files)
            return
        for path in self.files:
            self._open_file(path)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def tensor_names(self) -> list[str]:
        """The names of all tensors, except those of int64: most of these are buffers that no model reads."""
        return [name for name, entry in self._entries.items() if entry.dtype != torch.int64]

    @property
    def parameter_count(self) -> int:
        """The number of elements in all tensors of ``tensor_names``."""
        return sum(math.prod(self._entries[name].shape) for name in self.tensor_names)

    @property
    def total_bytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(entry.end - entry.start for entry in self._entries.values())

    @property
    def content_digest(self) -> bytes:
        """The SHA-256 of all files, as mapped or read here."""
        digest = hashlib.sha256()
        for data in self._maps:
            digest.update(data)
        return digest.digest()

    def add_prefix(self, prefix: str) -> None:
        """Prepend ``prefix`` to the names of all tensors."""
        self._entries = {prefix + name: entry for name, entry in self._entries.items()}
        self.metadata = {prefix + name: text for name, text in self.metadata.items()}

    def rename_modules(self, modules: Mapping[str, str]) -> None:
        """Replace the names of ``modules`` within those of tensors, or at their beginnings or ends, by their values, in
        order."""

        def rename(name: str) -> str:
            name = f".{name}."
            for old, new in modules.items():
                name = name.replace(f".{old}.", f".{new}.")
            return name[1:-1]

        self._entries = {rename(name): entry for name, entry in self._entries.items()}
        self.metadata = {rename(name): text for name, text in self.metadata.items()}

    def remove_tensors(self, prefix: str) -> None:
        """Forget the tensors whose names begin with ``prefix``."""
        self._entries = {name: entry for name, entry in self._entries.items() if not name.startswith(prefix)}

    def select_tensors(self, prefixes: dict[str, str]) -> None:
        """Keep only the tensors whose names begin with one of ``prefixes``, and replace that prefix by its value.

        Raises LoadError if two tensors get the same name.
        """

        def rename(name: str) -> str | None:
            prefix = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None)
            return None if prefix is None else prefixes[prefix] + name.removeprefix(prefix)

        self.metadata = {new_name: text for name, text in self.metadata.items() if (new_name := rename(name))}
        old_names: dict[str, str] = {}
        for name in self._entries:
            if (new_name := rename(name)) is None:
                continue
            if new_name in old_names:
                raise LoadError(f"The checkpoint has both {old_names[new_name]} and {name}, so one is superfluous.")
            old_names[new_name] = name
        self._entries = {new_name: self._entries[name] for new_name, name in old_names.items()}

    def without_data(self) -> Checkpoint:
        """Return the same checkpoint with tensors of two dimensions and more on the meta device: as they are stored,
        but without numbers. Those of one dimension keep them, because some decide how others are read."""
        result = copy.copy(self)
        result._has_data = False
        return result

    def tensor_form(self, name: str) -> tuple[torch.dtype, tuple[int, ...], BlockType | None]:
        """Return dtype, shape and type of blocks of a tensor. Raises LoadError if it is missing."""
        entry = self._find_entry(name)
        return entry.dtype, entry.shape, entry.blocks

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises LoadError if it is missing."""
        return self._find_entry(name).shape

    def block_type(self, name: str) -> BlockType | None:
        """Return the type of the blocks that a tensor consists of, None if it consists of numbers."""
        return self._find_entry(name).blocks

    def has_plain_numbers(self, name: str) -> bool:
        """Whether a tensor is there and holds floating-point numbers that need no scales."""
        entry = self._entries.get(name)
        return entry is not None and entry.dtype.is_floating_point and entry.dtype not in SCALED_DTYPES

    def check_tensor(self, name: str, *shape: int) -> None:
        """Check the shape of a tensor of floating-point numbers, or of blocks of them. Raises LoadError."""
        entry = self._find_entry(name)
        self._check_entry(name, entry, shape, entry.dtype if entry.blocks else None)

    def view_tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor as a view of the file. Without ``dtype``, any floating-point dtype is accepted but 8-bit ones
        that need scales.

        Raises LoadError if the tensor is missing, or if its shape or dtype is not the expected one.
        """
        entry = self._find_entry(name)
        self._check_entry(name, entry, shape, dtype)
        if entry.join is not None:
            return self._join_parts(entry)
        values = entry.order_rows(self._view_data(entry, math.prod(shape)).view(shape))
        return values if entry.restore is None else entry.restore(values)

    def view_item(
        self, name: str, index: int, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return an item of the first axis of a tensor of numbers, whose whole shape is ``shape``, as ``view_tensor``
        does. Of a tensor that begins within a number, this item alone is copied. Raises LoadError."""
        entry = self._find_entry(name)
        self._check_entry(name, entry, shape, dtype)
        count = math.prod(shape[1:])
        start = entry.start + index * count * entry.dtype.itemsize
        item = self._view_data(replace(entry, shape=shape[1:], start=start), count).view(shape[1:])
        return item if entry.restore is None else entry.restore(item)

    def view_blocks(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor of blocks as the bytes in the file: uint8 [*shape[:-1], bytes of a row].

        Raises LoadError.
        """
        entry = self._find_entry(name)
        self._check_entry(name, entry, shape, torch.uint8)
        return entry.order_rows(self._view_data(entry, entry.end - entry.start).view(*shape[:-1], -1))

    def _join_parts(self, entry: TensorEntry) -> torch.Tensor:
        """Return the float32 numbers of an entry that the file does not store: they are computed from other entries, or
        known without any."""
        if not self._has_data and entry.parts:
            return torch.empty(entry.shape, device="meta")
        assert entry.join is not None
        return entry.join(*map(self._read_numbers, entry.parts))

    def _read_numbers(self, entry: TensorEntry) -> torch.Tensor:
        """Return the numbers of a tensor of numbers or blocks, float32."""
        if entry.blocks is None:
            return self._view_data(entry, math.prod(entry.shape)).view(entry.shape).float()
        blocks = self._view_data(entry, entry.end - entry.start).view(-1, entry.blocks.size)
        return decode_blocks(blocks, entry.blocks.name).view(entry.shape)

    def _check_entry(self, name: str, entry: TensorEntry, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        """Raise LoadError unless an entry has this shape and dtype; None: any plain floating-point dtype."""
        if entry.dtype != dtype and (dtype or not self.has_plain_numbers(name)):
            stored = entry.blocks.name if entry.blocks else str(entry.dtype).removeprefix("torch.")
            expected = str(dtype or "floating numbers").removeprefix("torch.")
            raise LoadError(f"Tensor {name} holds {stored}; the config asks for {expected}.")
        if entry.shape != shape:
            expected = reprlib.repr([*shape])
            raise LoadError(f"Tensor {name} has shape {list(entry.shape)}; the config asks for {expected}.")
        if not math.prod(shape):
            raise LoadError(f"Tensor {name} is empty.")
        if entry.heads and shape[0] % (2 * entry.heads):
            raise LoadError(f"Tensor {name} has {shape[0]} rows, which {entry.heads} heads cannot share.")

    def _view_data(self, entry: TensorEntry, count: int) -> torch.Tensor:
        """Return the first ``count`` numbers of an entry, flat: a view of the file, or a copy if not aligned."""
        if not self._has_data and len(entry.shape) > 1:
            return torch.empty(count, dtype=entry.dtype, device="meta")
        if entry.start % entry.dtype.itemsize == 0:
            return torch.frombuffer(self._maps[entry.file], dtype=entry.dtype, count=count, offset=entry.start)
        size = count * entry.dtype.itemsize  # MLX aligns nothing
        unaligned = torch.frombuffer(self._maps[entry.file], dtype=torch.uint8, count=size, offset=entry.start)
        return unaligned.clone().view(entry.dtype)

    def release_pages(self, *names: str) -> None:
        """Release the file pages of tensors that were copied, so that they leave this process's memory."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for name in names:
            if name not in self._entries:
                continue
            entry = self._entries[name]
            for part in entry.parts or (entry,):
                # Whole pages only. Neighbours that share a page are simply read from the file again.
                start = part.start // mmap.PAGESIZE * mmap.PAGESIZE
                data = self._maps[part.file]
                assert isinstance(data, mmap.mmap)
                data.madvise(mmap.MADV_DONTNEED, start, part.end - start)

    def _find_entry(self, name: str) -> TensorEntry:
        """Return the entry of a tensor. Raises LoadError if it is missing."""
        entry = self._entries.get(name)
        if entry is None:
            raise LoadError(f"The checkpoint has no tensor {name}.")
        return entry

    def _open_file(self, path: Path) -> None:
        """Open a safetensors file and add its tensors. Raises LoadError."""
        content: mmap.mmap | bytearray
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length_bytes = file.read(8)
                if problem := foreign_files.pointer_problem(path):
                    raise LoadError(f"{path.parent} cannot be served: {problem}.")
                if len(length_bytes) < 8:
                    raise LoadError(f"{path.name} is too short to be a safetensors file.")
                (length,) = struct.unpack("<Q", length_bytes)
                if length > min(size - 8, MAX_HEADER_BYTES):
                    raise LoadError(f"{path.name} is not a safetensors file, or was cut off.")
                header = json.loads(file.read(length))
                # A private mapping: torch requires writable memory, though nothing is ever written.
                if self._mapped:
                    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                else:
                    file.seek(0)
                    content = bytearray(file.read(size))
                    if len(content) < size:
                        raise LoadError(f"{path.name} was cut off while it was read.")
        except (ValueError, RecursionError):
            raise LoadError(f"The header of {path.name} is not valid JSON; the file is damaged.") from None
        except OSError as error:
            raise LoadError(f"{path.name} cannot be read: {error.strerror}.") from None
        self._maps.append(content)
        if not isinstance(header, dict):
            raise LoadError(f"The header of {path.name} is not an object; the file is damaged.")
        for name, fields in header.items():
            if name != "__metadata__":
                self._add_entry(name, fields, path.name, 8 + length, size)
            elif isinstance(fields, dict):
                self.metadata |= {key: text for key, text in fields.items() if isinstance(text, str)}
        self._check_overlaps(path.name, [name for name in header if name in self._entries])

    def _open_gguf(self, files: list[Path]) -> None:
        """Open a GGUF file, or all parts of a split one, under the names of Hugging Face format. The last of ``files``
        may be the image encoder, in a folder below theirs."""
        path = files[0]
        try:
            model = read_model(path)
            self._entries = read_gguf_entries(model)
            paths = model.paths
            if files[-1].parent != path.parent:
                path = files[-1]
                self.select_tensors({"model.": "model.language_model.", "": ""})
                self._entries |= read_projector_entries(read_model(path), len(paths))
                paths = [*paths, path]
            for path in paths:
                with path.open("rb") as file:
                    self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except GgufError as error:
            raise LoadError(f"{error}.") from None
        except (OSError, ValueError) as error:
            raise LoadError(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}.") from None

    def _add_entry(self, name: str, fields: Any, file: str, data_start: int, size: int) -> None:
        """Add a tensor that a header of ``file`` describes by ``fields``. ``data_start``: where the file's data begin;
        ``size``: of the file, in bytes. Raises LoadError."""
        try:
            dtype, shape = fields["dtype"], tuple(fields["shape"])
            start, end = fields["data_offsets"]
            numbers = (start, end, *shape)
            is_valid = isinstance(dtype, str) and all(type(number) is int and number >= 0 for number in numbers)
        except (TypeError, KeyError, ValueError):
            is_valid = False
        if not is_valid:
            raise LoadError(f"The header of {file} describes tensor {name} wrongly; the file is damaged.")
        if name in self._entries:
            raise LoadError(f"Tensor {name} is in {file} and in another file of the checkpoint.")
        if dtype not in SAFETENSORS_DTYPES or dtype == "I64":
            # Buffers of other dtypes may be present. The tensors that the model needs are checked when requested.
            self.unread_names.add(name)
        if dtype not in SAFETENSORS_DTYPES:
            return
        if end - start != math.prod(shape) * SAFETENSORS_DTYPES[dtype].itemsize or data_start + end > size:
            raise LoadError(
                f"The data of tensor {name} in {file} is cut off or has the wrong size; the file is damaged."
            )
        self._entries[name] = TensorEntry(
            len(self._maps) - 1, SAFETENSORS_DTYPES[dtype], shape, data_start + start, data_start + end
        )

    def _check_overlaps(self, file: str, names: list[str]) -> None:
        """Raise LoadError if tensors of a file share bytes, which no writer does."""
        spans = sorted((self._entries[name].start, self._entries[name].end, name) for name in names)
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                raise LoadError(f"The data of tensors {name} and {other} in {file} overlap; the file is damaged.")


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with a folder's weights: GGUF files, or one or more of safetensors. Raises LoadError."""
    if gguf_links := sorted(folder.glob(LINK_PATTERN), key=lambda path: (len(path.parts), path)):
        return gguf_links
    index = folder / INDEX_NAME
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not index.is_file():
        shards, problem = find_shards(folder)
        if problem:
            raise LoadError(f"{folder} cannot be served: {problem}.")
        if shards:
            return shards
        if problem := foreign_files.weights_problem(folder):
            raise LoadError(f"{folder} cannot be served: {problem}.")
        raise LoadError(f"{folder} has neither model.safetensors nor {INDEX_NAME}.")
    weights = _read_json(index, "though it was there a moment ago").get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise LoadError(f"{index.name} has no weight_map from tensor to file names.")
    names = sorted(set(weights.values()))
    for name in names:
        if os.path.basename(name) != name or not name.endswith(".safetensors"):
            raise LoadError(f"{index.name} names {name}, which is not a safetensors file of the same folder.")
        if not (folder / name).is_file():
            raise LoadError(f"{name} is named by {index.name} but missing; the download may be incomplete.")
    return [folder / name for name in names]


def _read_json(path: Path, consequence: str) -> dict[str, Any]:
    """Return the JSON object in a file. ``consequence``: follows in the LoadError if the file is missing."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise LoadError(f"{path.parent} has no {path.name}, {consequence}.") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        if problem := foreign_files.pointer_problem(path):
            raise LoadError(f"{path.parent} cannot be served: {problem}.") from None
        raise LoadError(f"{path} is not valid JSON.") from None
    if not isinstance(content, dict):
        raise LoadError(f"{path} does not hold a JSON object.")
    return content
