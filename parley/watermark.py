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

GREEN_FRACTION = 0.5  # share of the vocabulary that is green; as in Text Generation Inference
GREEN_BONUS = 2.0  # added to green logits; as in Text Generation Inference
HASH_KEY = 15485863
# A text counts as marked from this z (standard deviations above chance); 1 plain text in 30,000 reaches it.
Z_THRESHOLD = 4.0

U32 = np.uint32


def is_green(
    previous: int | npt.NDArray[np.int64], ids: npt.NDArray[np.int64] | npt.NDArray[np.uint32]
) -> npt.NDArray[np.bool_]:
    """Whether each of ``ids`` is green after the token ``previous`` (one token for all, or one for each)."""
    seed = _finalize_hash(np.atleast_1d(previous).astype(U32) * U32(2654435769) + U32(HASH_KEY))
    return _finalize_hash(ids.astype(U32, copy=False) ^ seed) < U32(GREEN_FRACTION * 2**32)


def _finalize_hash(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Apply MurmurHash3's finalizer (Appleby) in place: every bit of the result depends on every bit of x."""
    x ^= x >> U32(16)
    x *= U32(0x85EBCA6B)
    x ^= x >> U32(13)
    x *= U32(0xC2B2AE35)
    x ^= x >> U32(16)
    return x


@dataclass(frozen=True)
class WatermarkResult:
    """Counts of a text: distinct ``pairs`` of neighbouring tokens, and pairs that end in a ``green`` token."""

    pairs: int
    green: int

    @property
    def z_score(self) -> float:
        """Return the standard deviations above the green share of an unmarked text."""
        if not self.pairs:
            return 0.0
        return (self.green - GREEN_FRACTION * self.pairs) / math.sqrt(
            self.pairs * GREEN_FRACTION * (1 - GREEN_FRACTION)
        )

    @property
    def false_positive_rate(self) -> float:
        """Return the probability that an unmarked text reaches this z."""
        return 0.5 * math.erfc(self.z_score / math.sqrt(2))

    @property
    def is_marked(self) -> bool:
        """Whether the text counts as marked."""
        return self.z_score >= Z_THRESHOLD


def detect_watermark(token_ids: Sequence[int]) -> WatermarkResult:
    """Look for the watermark. Equal pairs of neighbours count once, because repetition adds no evidence."""
    pairs = np.array(sorted(set(pairwise(token_ids))), dtype=np.int64).reshape(-1, 2)
    return WatermarkResult(len(pairs), int(is_green(pairs[:, 0], pairs[:, 1]).sum()))
