"""From logits to a token: the arithmetic of sampling, row by row. Knows no slot, no sequence and no request.

One definition, whatever route the numbers take. With x = (logit - largest logit) / temperature, a token weighs
floor(2^40 * exp(x)), an integer. Tokens are dropped by cut-off values, in this order: min_p by weight against the
largest, top_k by the k-th largest x, top_p by the mass of all strictly larger x (a token stays while that mass is
below top_p of what min_p and top_k left), typical_p by the mass of all strictly nearer x. Ties therefore stay or go
together. The token drawn is the first, in order of ids, at which the running sum of weights exceeds u times their
total.

Typical sampling (Meister et al. 2022) prefers tokens whose surprise is near the distribution's entropy. With Z the
total of exp(x), surprise is log Z - x and the entropy is log Z less the mean of x: near is what is near that mean.

Why integers: their sums are exact in any order. A row gives the same token alone and in a batch, from 256 candidates
and from the whole vocabulary, with one thread and with many. What a weight of zero leaves out is below 2^-40 of the
most likely token. It remains that exp(x) must not depend on where in a tensor x stands; a test watches that.
"""

from __future__ import annotations

import torch

from parley import native
from parley.native.torch_vocabulary import SCALE, portions, weigh

WIDTH = 256  # candidates looked at first

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64 bits in which every bit matters."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1), a multiple of 2^-53, that draws output token ``position`` (from 0) under ``seed``.

    It is element ``position`` of the SplitMix64 stream that starts at mix(seed): neighbouring seeds, which the choices
    of one request have, start at unrelated places.
    """
    state = mix((seed + GOLDEN) & MASK) + (position + 1) * GOLDEN
    return (mix(state & MASK) >> 11) * 2.0**-53


def draw(logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Draw from the whole vocabulary: int64 [R].

    logits float32 [R, V], whose largest must be finite in each row; temperature float32 [R]; min_p and u float64 [R].
    """
    parts = []
    for rows in portions(logits):
        _, weights = _vocabulary(logits[rows], temperature[rows], min_p[rows])
        parts.append(_pick(weights, u[rows]))
    return torch.cat(parts)


def draw_cut(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    u: torch.Tensor,
    width: int = WIDTH,
) -> torch.Tensor:
    """Draw with top_k (int64 [R], 0 is off) and top_p (float64 [R]); the rest as in ``draw``. Result int64 [R].

    Looks at the ``width`` best tokens of each row, and at all tokens of those rows whose answer lies beyond.
    """
    width = min(width, logits.shape[1])
    values, ids = native.top_k(logits, width)
    x = _shift(values, values[:, :1], temperature)
    weights = weigh(x)
    _drop(weights, min_p)
    kth = x.gather(1, (top_k[:, None] - 1).clamp(0, width - 1))
    weights.masked_fill_(((top_k > 0) & (top_k <= width))[:, None] & (x < kth), 0)

    # The candidates are complete when the last of them weighs nothing: no token beyond them weighs more.
    complete = (weights[:, -1] == 0) | (width == logits.shape[1])
    total = weights.sum(-1)
    unlimited = ((top_k == 0) & ~complete).nonzero()[:, 0]
    for portion in portions(logits[: len(unlimited)]):
        rows = unlimited[portion]
        total[rows] = _vocabulary(logits[rows], temperature[rows], min_p[rows])[1].sum(-1)
    last = torch.searchsorted(weights.cumsum(-1), _limit(total, top_p)[:, None])
    weights.masked_fill_(x < x.gather(1, last.clamp(max=width - 1)), 0)
    complete |= (top_k == 0) & (last[:, 0] < width) & (weights[:, -1] == 0)

    order = ids.argsort(-1)
    index = _pick(weights.gather(1, order), u)
    tokens = ids.gather(1, order.gather(1, index[:, None]))[:, 0]
    for row in (~complete).nonzero():
        tokens[row] = _draw_wide(*(part[row] for part in (logits, temperature, min_p, top_k, top_p, u)))
    return tokens


def _draw_wide(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    u: torch.Tensor,
) -> torch.Tensor:
    """``draw_cut`` of a single row, from all its tokens: every argument keeps its first dimension, of size 1."""
    return _pick(_cut_wide(logits, temperature, min_p, top_k, top_p)[1], u)


def draw_typical(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    typical_p: torch.Tensor,
    u: torch.Tensor,
) -> torch.Tensor:
    """As ``draw_cut``, and of what is left only the most typical tokens up to typical_p (float64 [R]): int64 [R].

    Row by row and from the whole vocabulary, for the mean is a sum of floats: its order must not depend on the batch.
    """
    tokens = []
    for row in torch.arange(len(logits), device=logits.device)[:, None]:
        x, weights = _cut_wide(*(part[row] for part in (logits, temperature, min_p, top_k, top_p)))
        total = weights.sum(-1)
        terms = torch.where(weights > 0, weights * x.double(), 0.0)
        mean = terms.cumsum(-1)[:, -1] / total  # one after another: sum() would share the work among threads
        limit = _limit(total, typical_p[row]).clamp(min=1)
        nearness = -(x.double() - mean).abs().float()
        weights.masked_fill_(nearness < _edge(nearness[0], weights[0], limit), 0)
        tokens.append(_pick(weights, u[row]))
    return torch.cat(tokens)


def _cut_wide(
    logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weights of a single row's tokens, those that are dropped with weight 0: float32 and int64 [1, V]."""
    x, weights = _vocabulary(logits, temperature, min_p)
    if 0 < int(top_k) < x.shape[1]:
        weights.masked_fill_(x < _edge(x[0], torch.ones_like(weights[0]), top_k), 0)
    if float(top_p) < 1.0:
        weights.masked_fill_(x < _edge(x[0], weights[0], _limit(weights.sum(-1), top_p)), 0)
    return x, weights


def _limit(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The mass that the kept tokens must reach, int64 [R]. Float64 has fewer digits than a sum, hence the minimum."""
    return torch.minimum((total * top_p).ceil().long(), total)


def _edge(x: torch.Tensor, mass: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """The largest value v for which the mass of all x >= v reaches limit: x <= 0 float32 [V], int64 [V], [1] -> [1].

    The bits of a positive float order like the number. So their upper half is counted first, and only the values
    that share it with v are sorted.
    """
    key = x.abs().view(torch.int32) >> 16
    sums = mass.new_zeros(1 << 15).scatter_add_(0, key.long(), mass).cumsum(0)
    part = torch.searchsorted(sums, limit)
    inside = (key == part).nonzero()[:, 0]
    values, order = x[inside].sort(descending=True)
    mass = mass[inside][order]
    return values[torch.searchsorted(mass.cumsum(0), limit - sums[part] + mass.sum())]


def _shift(logits: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """x of the definition above. Subtracting first keeps a tiny temperature from overflowing."""
    return (logits - peak).div_(temperature[:, None])


def _drop(weights: torch.Tensor, min_p: torch.Tensor) -> None:
    if bool((min_p > 0).any()):
        weights.masked_fill_(weights < (min_p * SCALE).ceil().long()[:, None], 0)


def _vocabulary(
    logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weights of every token: float32 and int64, [R, V]."""
    x = _shift(logits, logits.amax(-1, keepdim=True), temperature)
    weights = weigh(x)
    _drop(weights, min_p)
    return x, weights


def _pick(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first index at which the running sum exceeds u * total: int64 [R, N], float64 [R] -> int64 [R]."""
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    target = torch.minimum((u[:, None] * total).long(), total - 1)
    return torch.searchsorted(sums, target, right=True)[:, 0]
