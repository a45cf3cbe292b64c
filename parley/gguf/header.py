"""Reads the header of GGUF files: metadata and the location of each tensor. Knows no architectures and no arithmetic.

The format is described in ggml's docs/gguf.md. A model may be split into files named ``-00001-of-00003.gguf`` and so
on; the first one has the metadata. Sizes that a file states are compared with its length before they are used, so that
no file makes the reader allocate more than it has itself. Messages are clauses that begin with the file's name.
"""

from __future__ import annotations

import math
import mmap
import re
import reprlib
import stat
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"GGUF"
LFS_POINTER = b"version https://git-lfs"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes
MAX_DIMENSIONS = 4
PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class GgufError(Exception):
    """The file cannot be used. The message is a clause that begins with the file's name."""


class BlockType(NamedTuple):
    """How numbers are stored: in blocks of ``numbers``, each of ``size`` bytes."""

    name: str
    numbers: int
    size: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
    42: BlockType("Q2_0", 64, 18),
}
# Files of Prism ML's own llama.cpp have larger blocks under the same number
Q2_0, PRISM_Q2_0 = 42, BlockType("Q2_0", 128, 34)
UNREAD_TYPE_NAMES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
}  # fmt: skip
# The struct formats of metadata values, by type number. 8 is a string and 9 an array.
NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """Where a tensor is: bytes ``start`` to ``end`` of file number ``file``. ``shape``: rows first, as in torch."""

    name: str
    blocks: BlockType
    shape: tuple[int, ...]
    file: int
    start: int
    end: int


@dataclass(frozen=True)
class GgufModel:
    """The header of a model: of one file, or of all parts of a split one."""

    paths: list[Path]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_model(path: Path) -> GgufModel:
    """Read the headers of a model, given its file or the first of its parts. Raises GgufError."""
    metadata, tensors = read_header(path, 0)
    parts = metadata.get("split.count", 1)
    if type(parts) is not int or parts <= 1:
        return GgufModel([path], metadata, tensors)
    paths = part_paths(path)
    if len(paths) != parts or paths[0] != path:
        raise GgufError(
            f"{path.name} is one of {parts} parts; name the first one, which ends in -00001-of-{parts:05}.gguf"
        )
    for number, part in enumerate(paths[1:], 1):
        for name, tensor in read_header(part, number)[1].items():
            if name in tensors:
                raise GgufError(f"{part.name} has the tensor {name}, which another part has as well")
            tensors[name] = tensor
    return GgufModel(paths, metadata, tensors)


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a split model, given one of them; the path alone if its name says no such."""
    match = PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    return [path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def read_header(path: Path, file: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Return metadata and tensors of one file, which gets number ``file``. Raises GgufError."""
    try:
        if stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):  # opening a pipe waits for a writer
            raise GgufError(f"{path.name} is a pipe or a device, and not a file")
        with path.open("rb") as opened:
            magic = opened.read(len(LFS_POINTER))
            if magic == LFS_POINTER:
                raise GgufError(f"{path.name} is only Git LFS's pointer to the file; run git lfs pull")
            if not magic.startswith(MAGIC):
                raise GgufError(f"{path.name} is not a GGUF file: it does not begin with GGUF")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path.name, data).read_header(file)
    except FileNotFoundError:
        raise GgufError(f"{path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise GgufError(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}") from None


class _HeaderReader:
    """Reads one file from its start; ``at`` is the next byte."""

    def __init__(self, name: str, data: mmap.mmap):
        self.name, self.data, self.at, self.size = name, data, 4, len(data)

    def read_header(self, file: int) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version = self.read_number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS
            reason = "it is big-endian, and only little-endian files are read" if swapped else "2 and 3 are read"
            raise GgufError(f"{self.name} has version {version} of the format; {reason}")
        tensor_count, pair_count = self.read_count(32, "tensors"), self.read_count(13, "metadata values")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.read_text()
            if key in metadata:
                raise GgufError(f"{self.name} has the metadata {key[:100]} twice")
            metadata[key] = self.read_value(self.read_number("I"))
        entries = [self.read_tensor_entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise GgufError(f"{self.name} states an alignment of {reprlib.repr(alignment)}, which is no power of two")
        data_start = self.at + -self.at % alignment
        return metadata, self.place_tensors(entries, data_start, alignment, file)

    def read_number(self, format_: str) -> Any:
        """Return the next number in a format of ``struct``."""
        size = struct.calcsize("<" + format_)
        self.require_bytes(size)
        (value,) = struct.unpack_from("<" + format_, self.data, self.at)
        self.at += size
        return value

    def read_count(self, min_size: int, items: str) -> int:
        """Return the next number: a count of ``items``, of at least ``min_size`` bytes each. Raises GgufError if the
        file is too short for them."""
        count: int = self.read_number("Q")
        if count > (self.size - self.at) // min_size:
            raise GgufError(f"{self.name} is cut off or damaged: it states {count} {items} in {self.size} bytes")
        return count

    def read_text(self) -> str:
        """Return the next string."""
        length = self.read_count(1, "characters")
        self.at += length
        try:
            return self.data[self.at - length : self.at].decode()
        except UnicodeDecodeError:
            raise GgufError(f"{self.name} is damaged: a text in its header is not UTF-8") from None

    def read_value(self, kind: int) -> Any:
        """Return the next metadata value: a number, a string, or a list of either."""
        if kind == STRING:
            return self.read_text()
        if kind in NUMBER_FORMATS:
            return self.read_number(NUMBER_FORMATS[kind])
        if kind != ARRAY:
            raise GgufError(f"{self.name} is damaged: a metadata value has the unknown type {kind}")
        kind = self.read_number("I")
        if kind == STRING:
            return [self.read_text() for _ in range(self.read_count(8, "texts"))]
        if kind not in NUMBER_FORMATS:
            raise GgufError(f"{self.name} has a list with elements of type {kind}, which is not read")
        size = struct.calcsize("<" + NUMBER_FORMATS[kind])
        count = self.read_count(size, "numbers")
        self.at += count * size
        return list(struct.unpack_from(f"<{count}{NUMBER_FORMATS[kind]}", self.data, self.at - count * size))

    def read_tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return a tensor's name, shape, type number and offset."""
        name = self.read_text()
        dimensions = self.read_number("I")
        if dimensions > MAX_DIMENSIONS:
            raise GgufError(f"{self.name} is damaged: tensor {name[:100]} has {dimensions} dimensions")
        shape = tuple(self.read_number("Q") for _ in range(dimensions))[::-1]
        return name, shape, self.read_number("I"), self.read_number("Q")

    def place_tensors(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], data_start: int, alignment: int, file: int
    ) -> dict[str, GgufTensor]:
        """Return the tensors with their locations in the file, which must not overlap. Raises GgufError."""
        tensors: dict[str, GgufTensor] = {}
        block_types = BLOCK_TYPES | ({Q2_0: PRISM_Q2_0} if self.has_prism_blocks(entries, data_start) else {})
        for name, shape, type_number, offset in entries:
            if name in tensors:
                raise GgufError(f"{self.name} has the tensor {name[:100]} twice")
            if type_number not in block_types:
                type_name = UNREAD_TYPE_NAMES.get(type_number, f"number {type_number}")
                readable = ", ".join(block_type.name for block_type in BLOCK_TYPES.values())
                raise GgufError(
                    f"{self.name} stores tensor {name[:100]} as {type_name}, which is not read; {readable} are"
                )
            blocks = block_types[type_number]
            if not shape or not all(shape) or shape[-1] % blocks.numbers:
                raise GgufError(f"{self.name} is damaged: tensor {name[:100]} has shape {list(shape)} as {blocks.name}")
            start = data_start + offset
            end = start + math.prod(shape) // blocks.numbers * blocks.size
            if offset % alignment:
                raise GgufError(
                    f"{self.name} is damaged: tensor {name[:100]} begins at no multiple of {alignment} bytes"
                )
            if end > self.size:
                raise GgufError(
                    f"{self.name} is cut off: tensor {name[:100]} ends at byte {end}, the file at {self.size}"
                )
            tensors[name] = GgufTensor(name, blocks, shape, file, start, end)
        last_end = data_start
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if tensor.start < last_end:
                raise GgufError(f"{self.name} is damaged: tensor {tensor.name[:100]} overlaps another one")
            last_end = tensor.end
        return tensors

    def has_prism_blocks(self, entries: list[tuple[str, tuple[int, ...], int, int]], data_start: int) -> bool:
        """Whether a tensor of Q2_0 has room for the larger blocks only, before the next tensor."""
        offsets = sorted({offset for *_, offset in entries})
        ends = dict(pairwise([*offsets, self.size - data_start]))
        usual = BLOCK_TYPES[Q2_0]
        return any(
            type_number == Q2_0 and offset + math.prod(shape) // usual.numbers * usual.size > ends[offset]
            for _, shape, type_number, offset in entries
        )

    def require_bytes(self, size: int) -> None:
        """Raise GgufError unless this many bytes follow."""
        if self.size - self.at < size:
            raise GgufError(f"{self.name} is cut off: its header does not end within its {self.size} bytes")
