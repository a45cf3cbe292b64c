"""The sizes and weights of a Mamba 2 layer (arXiv 2405.21060). Plain data; the kernels compute with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from parley.native.layer_shape import Norm


@dataclass(frozen=True)
class Mamba2Shape:
    """What a Mamba 2 layer computes between its two linear layers.

    The first linear layer gives each token a row of gates [inner], inputs of a causal convolution over ``kernel``
    tokens [channels], and steps [heads]. The convolution gives values [heads, head_dim], and then the vectors B and C
    [groups, state_dim], which adjacent heads share. A head has a recurrent state [state_dim, head_dim].

    Steps are multiplied by ``step_scale`` and gates by ``gate_scale``. ``step_limits``: the least and the largest step.
    The gated RMS norm, if the weights hold one, is over each of ``norm_groups`` parts of a row. ``is_gate_first``: the
    norm is of gated rows; or else rows are gated after it.
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

    @property
    def inner(self) -> int:
        """The numbers per token that the layer gives to its output layer."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """The numbers per token that are convolved: values, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def recurrent_size(self) -> int:
        """The numbers of the recurrent state [heads, state_dim, head_dim], which is the first part of a state."""
        return self.inner * self.state_dim

    @property
    def size(self) -> int:
        """The numbers of a state. Its second part are the convolution's inputs [kernel - 1, channels], oldest first."""
        return self.recurrent_size + (self.kernel - 1) * self.channels


@dataclass(frozen=True)
class Mamba2Weights:
    """The weights of a Mamba 2 layer besides its linear layers; all in float32, whatever the model's dtype.

    ``convolution`` [kernel, channels], the current token's last, and its bias [channels]. ``decay`` [heads]: the
    negative rate at which a state decays; ``step_bias`` [heads], added to its step; and ``skip`` [heads], the share of
    values in outputs. ``norm``: the gated one, [inner].
    """

    convolution: torch.Tensor
    convolution_bias: torch.Tensor | None
    decay: torch.Tensor
    step_bias: torch.Tensor
    skip: torch.Tensor
    norm: Norm | None
