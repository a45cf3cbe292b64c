"""From logits to a token: the arithmetic of sampling, row by row. Knows no slots, sequences or requests.

All code paths implement one definition. With x = (logit - largest logit) / temperature, the weight of a token is the
integer floor(2^40 * exp(x)). Tokens are dropped by cut-off values, in this order:

* min_p: tokens whose weight is less than min_p times the largest weight;
* top_k: tokens whose x is below the k-th largest x;
* top_p: tokens for which the weights of all strictly larger x have reached top_p of the weights left so far;
* typical_p: likewise, with "nearer to the mean x" in place of "larger x".

So tokens with equal logits are kept or dropped together. The sampled token is the first, in order of ids, whose running
sum of weights exceeds u times the total.

Typical sampling (Meister et al. 2022) keeps tokens whose surprise is near the distribution's entropy. With Z the sum of
exp(x), the surprise of a token is log Z - x, and the entropy is log Z minus the mean of x. So their distance is that of
x from its mean.

Weights are integers because integer sums are exact in any order. A row yields the same token alone and in a batch, from
256 candidates and from the whole vocabulary, with one thread and with many. A token of weight zero has less than 2^-40
of the largest probability. One condition remains: exp(x) must not depend on the index of x in a tensor; a test checks
it.
"""

from __future__ import annotations

import torch

from parley import native
from parley.native.torch_forms.torch_vocabulary import WEIGHT_SCALE, integer_weights, row_portions

CANDIDATES = 256  # candidates examined first

UINT64_MASK = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def splitmix64(z: int) -> int:
    """Return the SplitMix64 finalizer of z (Steele, Lea, Flood 2014): a bijection on 64 bits; every bit matters."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & UINT64_MASK
    return z ^ (z >> 31)


def uniform_number(seed: int, position: int) -> float:
    """Return the uniform number that draws output token ``position`` (from 0): in [0, 1), a multiple of 2^-53.

    It is element ``position`` of the SplitMix64 stream that starts at splitmix64(seed). So consecutive seeds, such as
    those of the choices of one request, start at unrelated positions of the stream.
    """
    state = splitmix64((seed + GOLDEN_GAMMA) & UINT64_MASK) + (position + 1) * GOLDEN_GAMMA
    return (splitmix64(state & UINT64_MASK) >> 11) * 2.0**-53


def draw_full(logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Draw a token per row from the whole vocabulary: int64 [R].

    logits float32 [R, V], with a finite maximum in each row; temperature float32 [R]; min_p and u float64 [R].
    """
    parts = []
    for rows in row_portions(logits):
        _, weights = _weigh_vocabulary(logits[rows], temperature[rows], min_p[rows])
        parts.append(_pick_index(weights, u[rows]))
    return torch.cat(parts)


def draw_truncated(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    u: torch.Tensor,
    width: int = CANDIDATES,
) -> torch.Tensor:
    """Draw with top_k (int64 [R], 0 is off) and top_p (float64 [R]); the rest as in ``draw_full``. Returns int64 [R].

    Examines the ``width`` largest logits of each row, and all logits of rows whose draw needs more.
    """
    width = min(width, logits.shape[1])
    values, ids = native.top_k(logits, width)
    x = _scaled_logits(values, values[:, :1], temperature)
    weights = integer_weights(x)
    _apply_min_p(weights, min_p)
    kth = x.gather(1, (top_k[:, None] - 1).clamp(0, width - 1))
    weights.masked_fill_(((top_k > 0) & (top_k <= width))[:, None] & (x < kth), 0)

    # The candidates are complete if the weight of the last one is 0: no other token has a larger weight.
    complete = (weights[:, -1] == 0) | (width == logits.shape[1])
    total = weights.sum(-1)
    unlimited = ((top_k == 0) & ~complete).nonzero()[:, 0]
    for portion in row_portions(logits[: len(unlimited)]):
        rows = unlimited[portion]
        total[rows] = _weigh_vocabulary(logits[rows], temperature[rows], min_p[rows])[1].sum(-1)
    last_kept = torch.searchsorted(weights.cumsum(-1), _mass_limit(total, top_p)[:, None])
    weights.masked_fill_(x < x.gather(1, last_kept.clamp(max=width - 1)), 0)
    complete |= (top_k == 0) & (last_kept[:, 0] < width) & (weights[:, -1] == 0)

    order = ids.argsort(-1)
    index = _pick_index(weights.gather(1, order), u)
    tokens = ids.gather(1, order.gather(1, index[:, None]))[:, 0]
    for row in (~complete).nonzero():
        tokens[row] = _draw_truncated_wide(*(part[row] for part in (logits, temperature, min_p, top_k, top_p, u)))
    return tokens


def _draw_truncated_wide(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    u: torch.Tensor,
) -> torch.Tensor:
    """Draw as ``draw_truncated`` does, but from all tokens of a single row. The first size of all arguments is 1."""
    return _pick_index(_truncate_vocabulary(logits, temperature, min_p, top_k, top_p)[1], u)


def draw_typical(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    typical_p: torch.Tensor,
    u: torch.Tensor,
) -> torch.Tensor:
    """Draw as ``draw_truncated``, only from the most typical remaining tokens up to typical_p (float64 [R]): int64 [R].

    Row by row and over the whole vocabulary, because the mean is a sum of floats and its order must not depend on the
    batch.
    """
    tokens = []
    for row in torch.arange(len(logits), device=logits.device)[:, None]:
        x, weights = _truncate_vocabulary(*(part[row] for part in (logits, temperature, min_p, top_k, top_p)))
        total = weights.sum(-1)
        terms = torch.where(weights > 0, weights * x.double(), 0.0)
        mean = terms.cumsum(-1)[:, -1] / total  # in sequence: sum() would split the work among threads
        limit = _mass_limit(total, typical_p[row]).clamp(min=1)
        nearness = -(x.double() - mean).abs().float()
        weights.masked_fill_(nearness < _cutoff_value(nearness[0], weights[0], limit), 0)
        tokens.append(_pick_index(weights, u[row]))
    return torch.cat(tokens)


def _truncate_vocabulary(
    logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x float32 and weights int64 of a single row's tokens, [1, V]; dropped tokens have weight 0."""
    x, weights = _weigh_vocabulary(logits, temperature, min_p)
    if 0 < int(top_k) < x.shape[1]:
        weights.masked_fill_(x < _cutoff_value(x[0], torch.ones_like(weights[0]), top_k), 0)
    if float(top_p) < 1.0:
        weights.masked_fill_(x < _cutoff_value(x[0], weights[0], _mass_limit(weights.sum(-1), top_p)), 0)
    return x, weights


def _mass_limit(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the sum of weights that the kept tokens must reach, int64 [R]. The minimum guards against float64
    rounding."""
    return torch.minimum((total * top_p).ceil().long(), total)


def _cutoff_value(x: torch.Tensor, mass: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return the largest v such that the ``mass`` of all x >= v reaches ``limit``: x <= 0 float32 [V], int64 [V], [1]
    -> [1]. ``mass``: the weights.

    The bits of a positive float sort like the number. So the upper halves of the bits are counted first, and only the
    values with the same upper half as v are sorted.
    """
    key = x.abs().view(torch.int32) >> 16
    sums = mass.new_zeros(1 << 15).scatter_add_(0, key.long(), mass).cumsum(0)
    bin_index = torch.searchsorted(sums, limit)
    bin_members = (key == bin_index).nonzero()[:, 0]
    values, order = x[bin_members].sort(descending=True)
    mass = mass[bin_members][order]
    return values[torch.searchsorted(mass.cumsum(0), limit - sums[bin_index] + mass.sum())]


def _scaled_logits(logits: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return x as defined in the module docstring. Subtracting first keeps a tiny temperature from overflowing."""
    return (logits - peak).div_(temperature[:, None])


def _apply_min_p(weights: torch.Tensor, min_p: torch.Tensor) -> None:
    # A GPU computes the mask in less time than the host needs to ask it.
    if weights.device.type != "cpu" or bool((min_p > 0).any()):
        weights.masked_fill_(weights < (min_p * WEIGHT_SCALE).ceil().long()[:, None], 0)


def _weigh_vocabulary(
    logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x float32 and weights int64 of every token, both [R, V]."""
    x = _scaled_logits(logits, logits.amax(-1, keepdim=True), temperature)
    weights = integer_weights(x)
    _apply_min_p(weights, min_p)
    return x, weights


def _pick_index(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return the first index whose running sum exceeds u * total: int64 [R, N], float64 [R] -> int64 [R]."""
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    target = torch.minimum((u[:, None] * total).long(), total - 1)
    return torch.searchsorted(sums, target, right=True)[:, 0]
