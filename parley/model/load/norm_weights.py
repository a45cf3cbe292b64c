"""Reads the norms of a decoder from the mapped files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch

from parley import native
from parley.model.checkpoint.files import Checkpoint
from parley.model.networks.decoder_config import DecoderConfig

LAYER_NORMS = (
    "attention_norm", "attention_after_norm", "mlp_norm", "mlp_after_norm", "experts_norm", "dense_after_norm",
    "experts_after_norm", "input_after_norm", "altup_norm", "laurel_norm",
)  # fmt: skip
AFTER_NORMS = ("attention_after_norm", "mlp_after_norm")
# Norms of latents have this eps in Transformers' models, whatever their configs say of others.
LATENT_NORMS, LATENT_EPS = ("query_latent_norm", "latent_norm"), 1e-6


class NormReader(Protocol):
    """The part of ``DecoderWeights`` that is used here: the checkpoint, and its names."""

    checkpoint: Checkpoint
    config: DecoderConfig
    device: torch.device

    def layer_name(self, layer: int, name: str) -> str:
        """Return the name of a layer's tensor or linear layer."""


class NormWeights:
    """The norms of one checkpoint. ``state_norms``: their names in layers with a state in place of attention, where
    those of other layers differ."""

    def __init__(self, weights: NormReader, state_norms: Mapping[str, str | None]):
        self._weights, self._state_norms = weights, state_norms
        self._checkpoint, self._config, self._device = weights.checkpoint, weights.config, weights.device

    def layer_norms(self, layer: int) -> dict[str, tuple[str, int]]:
        """Return the norms of a layer: name in the checkpoint and width, by field of ``TensorNames``."""
        config = self._config
        shape, sizes = config.layers[layer], config.head_sizes(layer)
        whole = shape.has_whole_qk_norm or config.norms.has_headwise_qk
        widths = {
            **dict.fromkeys(LAYER_NORMS, config.hidden_size),
            "query_norm": sizes.dim * (config.heads if whole else 1),
            "key_norm": sizes.dim * (sizes.kv_heads if whole else 1),
        }
        if shape.has_attention:
            widths["attended_norm"] = config.query_heads(layer) * config.value_dim(layer)
        else:
            del widths["query_norm"]
        if not shape.stores_kv:
            del widths["key_norm"]
        if not config.layers[layer].has_mixer:
            del widths["attention_norm"], widths["attention_after_norm"]
        if config.layers[layer].has_mlp:
            widths["active_norm"] = config.mlp_width(layer)
        else:
            del widths["mlp_norm"], widths["mlp_after_norm"]
        if config.latent is not None and shape.has_attention:
            widths |= {"query_latent_norm": config.latent.query_rank, "latent_norm": config.latent.rank}
        if config.compression is not None:
            widths |= {"query_latent_norm": config.compression.query_rank, "latent_norm": sizes.dim}
        names = {field: getattr(config.tensors, field) for field in widths}
        if not shape.has_attention:
            names |= self._state_norms
        if shape.routing is not None and config.tensors.mixture_after_norm:
            names["mlp_after_norm"] = config.tensors.mixture_after_norm
        if shape.routing is not None and config.tensors.mixture_norm:
            names["mlp_norm"] = config.tensors.mixture_norm
        if config.norms.only_rotated_heads and config.layers[layer].rope is None:
            names |= {"query_norm": None, "key_norm": None}
        return {
            field: (self._weights.layer_name(layer, name) if name else "", widths[field])
            for field, name in names.items()
            if name is not None
        }

    def norm_tensors(self, name: str) -> list[str]:
        """Return the names of the tensors of one norm; none if it has no weights."""
        return ([name + ".weight"] + [name + ".bias"] * self._config.norms.has_bias) if name else []

    def view_norm(self, tensor: str, width: int) -> torch.Tensor:
        """Return the weights or biases of a norm as they are stored, [width]. Raises LoadError."""
        shape = self._checkpoint.tensor_shape(tensor)
        is_matrix = len(shape) == 2 and math.prod(shape) == width  # a row for each head
        return self._checkpoint.view_tensor(tensor, *(shape if is_matrix else (width,))).flatten()

    def read_norm(self, name: str, width: int | None = None, offset: float | None = None) -> native.Norm:
        """Return a norm of ``width`` numbers, by default of hidden states, in float32 on the network's device.

        ``offset``: as ``NormForm.offset`` of the config, which is the default.
        """
        offset = self._config.norms.offset if offset is None else offset

        def read(tensor: str, offset: float) -> torch.Tensor:
            stored = self.view_norm(tensor, width or self._config.hidden_size)
            return stored.to(device=self._device, dtype=torch.float32, copy=True).add_(offset)

        if not name:
            ones = torch.ones(width or self._config.hidden_size, device=self._device)
            return native.Norm(ones, self._config.eps, None, self._config.norms.is_centered)
        weight, *biases = self.norm_tensors(name)
        bias = read(biases[0], 0.0) if biases else None
        return native.Norm(read(weight, offset), self._config.eps, bias, self._config.norms.is_centered)

    def read_layer_norms(self, layer: int) -> dict[str, native.Norm | None]:
        """Return the norms of a layer by field of ``DecoderLayer``. Raises LoadError."""
        norms = {field: self.read_norm(*arguments) for field, arguments in self.layer_norms(layer).items()}
        if self._config.compression is None:
            norms |= {field: replace(norm, eps=LATENT_EPS) for field, norm in norms.items() if field in LATENT_NORMS}
        if (eps := self._config.after_norm_eps) is not None:
            norms |= {field: replace(norm, eps=eps) for field, norm in norms.items() if field in AFTER_NORMS}
        head_norm = self._merge_head_norms(layer, norms.pop("query_norm", None), norms.pop("key_norm", None))
        return {**norms, "head_norm": head_norm}

    def _merge_head_norms(
        self, layer: int, queries: native.Norm | None, keys: native.Norm | None
    ) -> native.Norm | None:
        """Merge the norms of a layer's queries and keys, if it has these, into one with a row for each head."""
        if queries is None:
            return None
        sizes = self._config.head_sizes(layer)
        norms = [(self._config.query_heads(layer), queries)] + ([] if keys is None else [(sizes.kv_heads, keys)])

        def merge(rows: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
            return torch.cat([numbers.view(-1, sizes.dim).expand(count, -1) for count, numbers in rows])

        biases = [(count, norm.bias) for count, norm in norms if norm.bias is not None]
        weight = merge([(count, norm.weight) for count, norm in norms])
        return replace(queries, weight=weight, bias=merge(biases) if biases else None)
