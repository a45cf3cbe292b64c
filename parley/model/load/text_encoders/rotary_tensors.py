"""Reads the tensors of encoders with rotary positions (ModernBERT, NomicBERT, GTE) in float32."""

from __future__ import annotations

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError


class RotaryEncoderTensors:
    """Reads a checkpoint's tensors by names without their prefix. Raises LoadError.

    ``embeddings``: the name of the word embeddings; in the checkpoint, the prefix of all names may precede it.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, embeddings: str):
        self.checkpoint, self.device = checkpoint, device
        names = [name for name in checkpoint.tensor_names if name.endswith(embeddings)]
        self.prefix = names[0].removesuffix(embeddings) if names else ""

    def require_last_layer(self, tensor: str, layers: int) -> None:
        """Raise LoadError if a tensor of the last layer is missing, before work is planned per layer."""
        if self.prefix + tensor not in self.checkpoint:
            raise LoadError(
                f"The checkpoint has no tensor {self.prefix + tensor}, but the config asks for {layers} layers."
            )

    def read_tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return a copy of one tensor; ``shape`` is the expected shape."""
        tensor = self.checkpoint.view_tensor(self.prefix + name, *shape)
        return tensor.to(device=self.device, dtype=torch.float32, copy=True)

    def read_affine(self, name: str, out: int, width: int, has_bias: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight [out, width] and bias [out] of one linear layer; zeros if it has no bias."""
        weight = self.read_tensor(f"{name}.weight", out, width)
        return weight, self.read_tensor(f"{name}.bias", out) if has_bias else weight.new_zeros(out)
