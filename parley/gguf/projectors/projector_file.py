"""A projector file's header, with readers that check its metadata."""

from __future__ import annotations

import math
import re
import reprlib
from dataclasses import dataclass
from typing import Any, Literal

from parley.gguf.architecture import shortest_number
from parley.gguf.header import GgufError, GgufModel

POSITIONS = "v.position_embd.weight"  # embeddings of patches by place
# The encoder's letter, the number of the block, the tensor, and its ending, which few lack
BLOCK_TENSOR = re.compile(r"([va])\.blk\.(\d{1,5})\.([a-z_0-9]+)(?:\.([a-z_]+))?")


def block_key(match: re.Match[str]) -> str:
    """Return the name of a block's tensor within the block, of a match of ``BLOCK_TENSOR``."""
    return f"{match[3]}.{match[4]}" if match[4] else match[3]


@dataclass(frozen=True)
class ProjectorFile:
    """A file's header, and checked readers of its metadata. They raise GgufError."""

    model: GgufModel
    modality: Literal["vision", "audio"] = "vision"

    @property
    def name(self) -> str:
        """The file's name."""
        return self.model.paths[0].name

    @property
    def prefix(self) -> str:
        """The beginning of the keys that are about the encoder."""
        return f"clip.{self.modality}."

    def read_field(self, key: str) -> Any:
        """Return a field of the encoder's metadata, or None if the file lacks it."""
        return self.model.metadata.get(self.prefix + key)

    def read_count(self, key: str, default: int | None = None) -> int:
        """Return a field that must be a positive integer, or its default. Raises GgufError."""
        value = self.read_field(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise GgufError(
                f"{self.name} gives {self.prefix}{key} as {reprlib.repr(value)}, so the encoder's shape is unknown"
            )
        return value

    def positive_number(self, key: str, default: float) -> float:
        """Return a number above 0, such as an eps."""
        value = self.read_field(key)
        value = default if value is None else value
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise GgufError(f"{self.name} gives {self.prefix}{key} as {reprlib.repr(value)}; it is a positive number")
        return float(shortest_number(value))

    def read_colours(self, key: str, *, is_divisor: bool = False) -> list[float]:
        """Return a number for each of the three colours."""
        value = self.read_field(key)
        if (
            not isinstance(value, list)
            or len(value) != 3
            or not all(isinstance(number, float) and math.isfinite(number) for number in value)
            or (is_divisor and min(value) <= 0)
        ):
            kind = "positive numbers" if is_divisor else "numbers"
            raise GgufError(f"{self.name} gives {self.prefix}{key} as {reprlib.repr(value)}; it is three {kind}")
        return [shortest_number(number) for number in value]

    def block_count(self) -> int:
        """Return the number of the encoder's blocks, of which the file has the tensors."""
        stated = self.read_count("block_count")
        matches = (BLOCK_TENSOR.fullmatch(name) for name in self.model.tensors)
        count = len({match[2] for match in matches if match and match[1] == self.modality[0]})
        if stated != count:
            raise GgufError(f"{self.name} gives {self.prefix}block_count as {stated}, but has the tensors of {count}")
        return stated

    def head_count(self, unit: int = 1) -> int:
        """Return the number of heads, each of a multiple of ``unit`` numbers."""
        heads, width = self.read_count("attention.head_count"), self.read_count("embedding_length")
        if width % (heads * unit):
            raise GgufError(
                f"{self.name} gives {self.prefix}attention.head_count as {heads}; {width} numbers are not so many heads"
                + (f" of a multiple of {unit}" if unit > 1 else "")
            )
        return heads

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name not in self.model.tensors:
            raise GgufError(f"{self.name} has no tensor {name}")
        return self.model.tensors[name].shape

    def position_side(self) -> int:
        """Return how many positions a side of the square has that ``POSITIONS`` embeds. Raises GgufError if they make
        none."""
        positions = self.tensor_shape(POSITIONS)[0]
        side = math.isqrt(positions)
        if side**2 != positions:
            raise GgufError(f"{self.name} has {positions} positions in {POSITIONS}, which make no square")
        return side

    def read_pixel_limits(self, default: tuple[int, int]) -> dict[str, int]:
        """Return the fewest and the most pixels of an image, as processors name them."""
        min_pixels = self.read_count("image_min_pixels", default[0])
        max_pixels = self.read_count("image_max_pixels", default[1])
        if min_pixels > max_pixels:
            raise GgufError(
                f"{self.name} gives {self.prefix}image_min_pixels as {min_pixels}; image_max_pixels is "
                f"{max_pixels} only"
            )
        return {"shortest_edge": min_pixels, "longest_edge": max_pixels}

    def colour_scale(self) -> dict[str, list[float]]:
        """Return the mean and the standard deviation by which a processor normalizes colours."""
        return {
            "image_mean": self.read_colours("image_mean"),
            "image_std": self.read_colours("image_std", is_divisor=True),
        }

    def embedding_side(self, scale: int) -> int:
        """Return how many embeddings are in a row of an image. ``scale``: patches for each, unless the file says."""
        patches = self.read_count("image_size") // self.read_count("patch_size")
        scale = self.read_count("projector.scale_factor", scale)
        if not patches or patches % scale:
            raise GgufError(f"{self.name} makes an embedding of {scale} patches in a row, but has {patches}")
        return patches // scale

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor."""
        return name in self.model.tensors
