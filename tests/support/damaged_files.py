"""Damages the files of models: bytes of headers, members of JSON files, and metadata of GGUF files."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parley.gguf.header import BLOCK_TYPES, GgufModel, read_model

DELETED = object()
ODD_VALUES = [
    0, -1, 1, 7, 1 << 63, (1 << 63) - 1, 1 << 31, 1 << 16, 1e308, float("nan"), float("inf"), -0.5, "", "x", "9" * 400,
    "\0", "é" * 10, "{{ ''.__class__ }}", "{% import 'os' as x %}", "{{", True, False, [], ["x"], [1], [0.5], DELETED,
]  # fmt: skip
ODD_MEMBERS = [None, {}, {"a": 1}, [[]], [None], -(1 << 63), 10**400]  # which JSON files may have besides
ODD_NUMBERS = [0, 1, 1 << 20, 1 << 31, 1 << 63, (1 << 64) - 1]  # of 8 bytes
LISTED_ITEMS = 6  # of a list of a JSON file, which are damaged
KINDS = {number.name: kind for kind, number in BLOCK_TYPES.items()}
FLOAT, BOOL, STRING, ARRAY, UNSIGNED, SIGNED, DOUBLE = 6, 7, 8, 9, 10, 11, 12  # types of metadata


def damage_json(path: Path, generator: random.Random) -> None:
    """Replace or delete a member or an item anywhere in a JSON file."""
    content = json.loads(path.read_text("utf-8"))
    *parents, last = generator.choice(list(member_places(content)))
    owner = content
    for key in parents:
        owner = owner[key]
    value = generator.choice(ODD_VALUES + ODD_MEMBERS)
    if value is DELETED:
        del owner[last]
    else:
        owner[last] = value
    path.write_text(json.dumps(content), "utf-8")


def member_places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each member and to the first items of each list."""
    members = value.items() if isinstance(value, dict) else enumerate(value[:LISTED_ITEMS])
    for key, member in members:
        yield (*place, key)
        if isinstance(member, dict | list):
            yield from member_places(member, (*place, key))


def damage_header(path: Path, generator: random.Random) -> None:
    """Change, insert or delete bytes of a file's header, or cut the file off."""
    data = bytearray(path.read_bytes())
    at = generator.randrange(header_size(path))
    change = generator.randrange(6)
    if change == 0:
        data[at] ^= 1 << generator.randrange(8)
    elif change == 1:
        data[at : at + 8] = struct.pack("<Q", generator.choice(ODD_NUMBERS))
    elif change == 2:
        del data[generator.randrange(len(data)) :]
    elif change == 3:
        del data[at : at + generator.randrange(1, 64)]
    elif change == 4:
        data[at:at] = generator.randbytes(generator.randrange(1, 32))
    else:
        for _ in range(8):
            data[generator.randrange(header_size(path))] = generator.randrange(256)
    path.write_bytes(data)


def header_size(path: Path) -> int:
    """Return the bytes before the first tensor of a GGUF or safetensors file."""
    if path.suffix == ".gguf":
        return min(tensor.start for tensor in read_model(path).tensors.values())
    return 8 + int(struct.unpack("<Q", path.read_bytes()[:8])[0])


def damage_metadata(path: Path, generator: random.Random) -> None:
    """Replace or delete a metadata value of a GGUF file, or shorten it, or change one of its items."""
    model = read_model(path)
    metadata = dict(model.metadata)
    key = generator.choice(list(metadata))
    value = generator.choice([*ODD_VALUES, "shorter", "item"])
    if value is DELETED:
        del metadata[key]
    elif isinstance(metadata[key], list) and value == "shorter":
        metadata[key] = metadata[key][: generator.randrange(len(metadata[key]))]
    elif isinstance(metadata[key], list) and value == "item":
        items = metadata[key] = list(metadata[key])
        odd_items = {str: ["", "x", "a b c", "\0"], int: [0, -1, 99, 1 << 30], float: [-1.0, float("nan")]}
        items[generator.randrange(len(items))] = generator.choice(odd_items[type(items[0])])
    else:
        metadata[key] = value
    path.write_bytes(gguf_bytes(path, model, metadata))


def gguf_bytes(path: Path, model: GgufModel, metadata: dict[str, Any]) -> bytes:
    """Return a GGUF file with other metadata and the same tensors."""
    start = header_size(path)
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(model.tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_text_bytes(key), _value_bytes(value)]
    for tensor in model.tensors.values():
        shape = tensor.shape[::-1]
        parts += [_text_bytes(tensor.name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape)]
        parts.append(struct.pack("<IQ", KINDS[tensor.blocks.name], tensor.start - start))
    header = b"".join(parts)
    return header + bytes(-len(header) % 32) + path.read_bytes()[start:]


def _text_bytes(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value_bytes(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<Iq", SIGNED, value) if value < 1 << 63 else struct.pack("<IQ", UNSIGNED, value)
    if isinstance(value, float):
        return struct.pack("<Id", DOUBLE, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text_bytes(value)
    kind, items = SIGNED, [struct.pack("<q", item) for item in value if type(item) is int]
    if value and isinstance(value[0], str):
        kind, items = STRING, [_text_bytes(item) for item in value]
    elif value and isinstance(value[0], float):
        kind, items = FLOAT, [struct.pack("<f", item) for item in value]
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(items)
