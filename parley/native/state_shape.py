"""The sizes of layers that keep a state of each sequence instead of keys and values. Plain data, no torch.

A state is one vector of float32 per sequence and layer, as long as ``size`` says. It holds the last inputs of a
convolution and, where the layer has one, a recurrent state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_KEY_DIM = 512  # the largest key_dim of a gated delta net, and of Kimi Delta Attention, as in states.h


@dataclass(frozen=True)
class GatedDeltaShape:
    """A gated delta net (arXiv 2412.06464), as in Qwen3-Next.

    Each key head has a query and a key of ``key_dim`` numbers for ``value_heads / key_heads`` adjacent value heads,
    which have a value of ``value_dim`` numbers and a recurrent state [key_dim, value_dim]. Queries, keys and values
    pass a causal convolution over ``kernel`` tokens first, each number by itself.

    The strength of a token's change to the state is at most ``max_strength``: above 1, a change may reverse what the
    state holds of a key (arXiv 2411.12537). ``norm_eps``: of the norm of outputs, if it is not the model's.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    max_strength: float = 1.0
    norm_eps: float | None = None

    @property
    def convolved_sizes(self) -> list[int]:
        """The numbers per token that are convolved: those of queries, of keys and of values."""
        return [self.key_heads * self.key_dim] * 2 + [self.inner]

    @property
    def channels(self) -> int:
        """The numbers per token that are convolved: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        """The numbers per token that the layer gives to its output layer."""
        return self.value_heads * self.value_dim

    @property
    def recurrent_size(self) -> int:
        """The numbers of the recurrent state [value_heads, key_dim, value_dim], which is the first part of a state."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def size(self) -> int:
        """The numbers of a state. Its second part: inputs of the convolution [kernel - 1, channels], oldest first."""
        return self.recurrent_size + (self.kernel - 1) * self.channels


@dataclass(frozen=True)
class KimiDeltaShape:
    """Kimi Delta Attention (arXiv 2510.26692, section 3), between its linear layers.

    A head has a query, a key and a value of ``dim`` numbers, and a recurrent state [dim, dim] whose rows, one for each
    number of keys, decay by themselves. Queries, keys and values pass a causal convolution over ``kernel`` tokens.

    The first linear layer gives each token queries, keys and values [channels], a strength for each head, and
    [inner] numbers for decays and for gates of the outputs; if ``rank`` is not 0, a further linear layer each makes
    these of ``rank`` numbers. ``lower_bound``: the logarithm of the strongest decay, below 0; None: there is none.
    """

    heads: int
    dim: int
    kernel: int
    rank: int = 0
    lower_bound: float | None = None

    @property
    def inner(self) -> int:
        """The numbers per token that the layer gives to its output layer."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        """The numbers per token that are convolved: queries, keys and values of all heads."""
        return 3 * self.inner

    @property
    def row_sizes(self) -> list[int]:
        """The numbers per token that the scan reads: convolved ones, strengths, those of decays, and gates."""
        return [self.channels, self.heads, self.inner, self.inner]

    @property
    def recurrent_size(self) -> int:
        """The numbers of the recurrent state [heads, dim, dim], which is the first part of a state."""
        return self.inner * self.dim

    @property
    def size(self) -> int:
        """The numbers of a state. Its second part: inputs of the convolution [kernel - 1, channels], oldest first."""
        return self.recurrent_size + (self.kernel - 1) * self.channels


@dataclass(frozen=True)
class ShortConvolutionShape:
    """A gated short convolution, as in LFM2: causal, over ``kernel`` tokens, each of ``width`` numbers by itself."""

    width: int
    kernel: int

    @property
    def channels(self) -> int:
        """The numbers per token that are convolved."""
        return self.width

    @property
    def inner(self) -> int:
        """The numbers per token that the layer gives to its output layer."""
        return self.width

    @property
    def size(self) -> int:
        """The numbers of a state: the convolution's inputs [kernel - 1, width], oldest first."""
        return (self.kernel - 1) * self.width


@dataclass(frozen=True)
class Mamba2Shape:
    """A Mamba 2 layer (arXiv 2405.21060), between its two linear layers.

    The first linear layer gives each token a row of gates [inner], inputs of a causal convolution over ``kernel``
    tokens [channels], and steps [heads]. The convolution gives values [heads, head_dim], and then the vectors B and C
    [groups, state_dim], which adjacent heads share. A head has a recurrent state [state_dim, head_dim].

    Steps are multiplied by ``step_scale`` and gates by ``gate_scale``; weights of the convolution are multiplied by
    ``input_scales`` for values, B and C at load. ``step_limits``: the least and the largest step. The gated RMS norm,
    if the weights hold one, is over each of ``norm_groups`` parts of a row. ``is_gate_first``: the norm is of gated
    rows; or else rows are gated after it.

    Lightning attention (arXiv 2401.04658) is such a layer without steps, all of which are 1, and with a convolution
    over a single token: B are keys, and C are queries. ``rate_share``: if it is not 0, rates are not
    learned, and that of head h of n, counted from 1, is rate_share * 2 ** (-8 * h / n). ``has_sigmoid_gates``: gates
    pass a sigmoid in place of SiLU, and follow the norm.
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    kernel: int
    norm_groups: int = 1
    is_gate_first: bool = True
    step_limits: tuple[float, float] = (0.0, math.inf)
    step_scale: float = 1.0
    gate_scale: float = 1.0
    input_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    has_steps: bool = True
    rate_share: float = 0.0
    has_sigmoid_gates: bool = False

    @property
    def inner(self) -> int:
        """The numbers per token that the layer gives to its output layer."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """The numbers per token that are convolved: values, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def row_sizes(self) -> list[int]:
        """The numbers per token that the first linear layer gives: gates, convolved ones, and steps."""
        return [self.inner, self.channels, self.heads * self.has_steps]

    @property
    def fixed_decays(self) -> list[float]:
        """The decay of each head, which is below 0, if rates are not learned."""
        return [-(2 ** (-8 * (head + 1) / self.heads)) * self.rate_share for head in range(self.heads)]

    @property
    def recurrent_size(self) -> int:
        """The numbers of the recurrent state [heads, state_dim, head_dim], which is the first part of a state."""
        return self.inner * self.state_dim

    @property
    def size(self) -> int:
        """The numbers of a state. Its second part are the convolution's inputs [kernel - 1, channels], oldest first."""
        return self.recurrent_size + (self.kernel - 1) * self.channels


@dataclass(frozen=True)
class Mamba1Shape:
    """A Mamba 1 layer (arXiv 2312.00752), between its two linear layers.

    The first linear layer gives each token a row of inputs of a causal convolution over ``kernel`` tokens [inner], and
    gates [inner]. A linear layer turns convolved channels into ``rank`` numbers and the vectors B and C [state_dim],
    another turns these numbers into the channels' steps. Each channel has a recurrent state [state_dim]. If
    ``norm_eps`` is not None, the numbers, B and C pass RMS norms before.
    """

    inner: int
    state_dim: int
    rank: int
    kernel: int
    norm_eps: float | None = None

    @property
    def channels(self) -> int:
        """The numbers per token that are convolved."""
        return self.inner

    @property
    def parameter_sizes(self) -> list[int]:
        """The numbers that a token's convolved channels give: those of its steps, B and C."""
        return [self.rank, self.state_dim, self.state_dim]

    @property
    def recurrent_size(self) -> int:
        """The numbers of the recurrent state [state_dim, inner], which is the first part of a state."""
        return self.inner * self.state_dim

    @property
    def size(self) -> int:
        """The numbers of a state. Its second part are the convolution's inputs [kernel - 1, inner], oldest first."""
        return self.recurrent_size + (self.kernel - 1) * self.inner


StateShape = GatedDeltaShape | KimiDeltaShape | ShortConvolutionShape | Mamba2Shape | Mamba1Shape
