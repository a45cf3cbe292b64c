"""The sizes of layers that keep a state of each sequence instead of keys and values. Plain data, no torch.

A state is one vector of float32 per sequence and layer, as long as ``size`` says. It holds the last inputs of a
convolution and, where the layer has one, a recurrent state.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GatedDeltaShape:
    """A gated delta net (arXiv 2412.06464), as in Qwen3-Next.

    Each key head has a query and a key of ``key_dim`` numbers for ``value_heads / key_heads`` adjacent value heads,
    which have a value of ``value_dim`` numbers and a recurrent state [key_dim, value_dim]. Queries, keys and values
    pass a causal convolution over ``kernel`` tokens first, each number by itself.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

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


StateShape = GatedDeltaShape | ShortConvolutionShape
