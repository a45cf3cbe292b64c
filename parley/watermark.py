"""The mark that generated text may carry, and how it is found again (Kirchenbauer et al., arXiv 2301.10226).

After each token one half of the vocabulary is green; which one, follows from that token alone. A marked text was drawn
with green logits raised, so that it has more green tokens than the half that chance gives any other text. Needs numpy
only: the engine draws with it, and ``parley watermark`` detects without a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FRACTION = 0.5  # of the vocabulary that is green, and
RAISE = 2.0  # by how much its logits are raised: both as in Text Generation Inference
KEY = 15485863
SURE = 4.0  # standard deviations above chance from which a text counts as marked: one plain text in 30,000 gets there

U32 = np.uint32


def green(
    previous: int | npt.NDArray[np.int64], ids: npt.NDArray[np.int64] | npt.NDArray[np.uint32]
) -> npt.NDArray[np.bool_]:
    """Whether each of ``ids`` is green behind the token ``previous`` (of which there may be one for each)."""
    seed = _mix(np.atleast_1d(previous).astype(U32) * U32(2654435769) + U32(KEY))
    return _mix(ids.astype(U32, copy=False) ^ seed) < U32(FRACTION * 2**32)


def _mix(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """MurmurHash3's finaliser (Appleby), in place: every bit of the result depends on every bit of x."""
    x ^= x >> U32(16)
    x *= U32(0x85EBCA6B)
    x ^= x >> U32(13)
    x *= U32(0xC2B2AE35)
    x ^= x >> U32(16)
    return x


@dataclass(frozen=True)
class Finding:
    """``pairs`` of neighbours that differ from one another, of which ``green`` end in a green token."""

    pairs: int
    green: int

    @property
    def z(self) -> float:
        """Standard deviations above what a text without a mark has."""
        if not self.pairs:
            return 0.0
        return (self.green - FRACTION * self.pairs) / math.sqrt(self.pairs * FRACTION * (1 - FRACTION))

    @property
    def chance(self) -> float:
        """The probability that a text without a mark reaches this z."""
        return 0.5 * math.erfc(self.z / math.sqrt(2))

    @property
    def marked(self) -> bool:
        return self.z >= SURE


def detect(token_ids: Sequence[int]) -> Finding:
    """Look for the mark. Each pair of neighbours counts once, for what a text repeats says nothing new."""
    pairs = np.array(sorted(set(pairwise(token_ids))), dtype=np.int64).reshape(-1, 2)
    return Finding(len(pairs), int(green(pairs[:, 0], pairs[:, 1]).sum()))
