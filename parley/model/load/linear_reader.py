"""The interface of ``DecoderWeights`` for the readers of single parts: mixtures, states, indexers and the like."""

from __future__ import annotations

from typing import Protocol

import torch

from parley import native
from parley.model.checkpoint.files import Checkpoint
from parley.model.checkpoint.quantization import Quantization
from parley.model.checkpoint.weights import LinearSpec, LinearWeight
from parley.model.networks.decoder_config import DecoderConfig


class LinearReader(Protocol):
    """Reads and packs the linear layers of one checkpoint."""

    checkpoint: Checkpoint
    config: DecoderConfig
    quantization: Quantization
    dtype: torch.dtype
    device: torch.device

    def layer_name(self, layer: int, name: str) -> str:
        """Return the name of a layer's tensor or linear layer."""

    def copy_tensor(self, name: str, *sizes: int) -> torch.Tensor:
        """Return a copy of one tensor in the network's dtype and on its device."""

    def linear_tensors(self, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold a linear layer's weight."""

    def read_linear(self, linear: LinearSpec) -> LinearWeight:
        """Read a linear layer's weight, quantized if requested."""

    def pack_weights(self, weights: list[LinearWeight], bias: torch.Tensor | None) -> native.PackedWeight:
        """Merge the weights of linear layers into one."""
