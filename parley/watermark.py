"""The watermark of generated text and its detection (Kirchenbauer et al., arXiv 2301.10226).

Each token makes one half of the vocabulary green for the next token. A marked text was sampled with higher green
logits, so it has more green tokens than the half that any other text has by chance. Needs only numpy: the engine
samples with it, and ``parley watermark`` detects it without a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FRACTION = 0.5  # share of the vocabulary that is green; as in Text Generation Inference
RAISE = 2.0  # added to green logits; as in Text Generation Inference
KEY = 15485863
SURE = 4.0  # a text counts as marked from this z (standard deviations above chance); 1 plain text in 30,000 reaches it

U32 = np.uint32


def green(
    previous: int | npt.NDArray[np.int64], ids: npt.NDArray[np.int64] | npt.NDArray[np.uint32]
) -> npt.NDArray[np.bool_]:
    """Whether each of ``ids`` is green after the token ``previous`` (one token for all, or one for each)."""
    seed = _mix(np.atleast_1d(previous).astype(U32) * U32(2654435769) + U32(KEY))
    return _mix(ids.astype(U32, copy=False) ^ seed) < U32(FRACTION * 2**32)


def _mix(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Apply MurmurHash3's finaliser (Appleby) in place: every bit of the result depends on every bit of x."""
    x ^= x >> U32(16)
    x *= U32(0x85EBCA6B)
    x ^= x >> U32(13)
    x *= U32(0xC2B2AE35)
    x ^= x >> U32(16)
    return x


@dataclass(frozen=True)
class Finding:
    """Counts of a text: distinct ``pairs`` of neighbouring tokens, and pairs that end in a ``green`` token."""

    pairs: int
    green: int

    @property
    def z(self) -> float:
        """Return the standard deviations above the green share of an unmarked text."""
        if not self.pairs:
            return 0.0
        return (self.green - FRACTION * self.pairs) / math.sqrt(self.pairs * FRACTION * (1 - FRACTION))

    @property
    def chance(self) -> float:
        """Return the probability that an unmarked text reaches this z."""
        return 0.5 * math.erfc(self.z / math.sqrt(2))

    @property
    def marked(self) -> bool:
        """Whether the text counts as marked."""
        return self.z >= SURE


def detect(token_ids: Sequence[int]) -> Finding:
    """Look for the watermark. Equal pairs of neighbours count once, because repetition adds no evidence."""
    pairs = np.array(sorted(set(pairwise(token_ids))), dtype=np.int64).reshape(-1, 2)
    return Finding(len(pairs), int(green(pairs[:, 0], pairs[:, 1]).sum()))
