"""Reads the tensors of encoders without position embeddings (ModernBERT, NomicBERT, GTE, JinaBERT) in float32."""

from __future__ import annotations

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.load.text_encoders.bert import TYPE_EMBEDDINGS, WORD_EMBEDDINGS
from parley.model.networks.encoder import LayerNorm


class EncoderTensors:
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


class TypedEncoderTensors(EncoderTensors):
    """Reads an encoder with embeddings of token types, by BERT's names. ``vocab`` and ``hidden`` are its sizes."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, vocab: int, hidden: int, types: int):
        super().__init__(checkpoint, device, WORD_EMBEDDINGS)
        self._vocab, self._hidden, self._types = vocab, hidden, types

    def read_norm(self, name: str) -> LayerNorm:
        """Return one LayerNorm."""
        weight = self.read_tensor(f"{name}.weight", self._hidden)
        return LayerNorm(weight, self.read_tensor(f"{name}.bias", self._hidden))

    def read_embeddings(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the embeddings of words with the first token type added, [vocab, hidden], and the difference of the
        second token type from the first, [hidden]; None if there is no second."""
        words = self.read_tensor(WORD_EMBEDDINGS, self._vocab, self._hidden)
        if not self._types:
            return words, None
        types = self.read_tensor(TYPE_EMBEDDINGS, self._types, self._hidden)
        return words.add_(types[0]), types[1] - types[0] if self._types > 1 else None
