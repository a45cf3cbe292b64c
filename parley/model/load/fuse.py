"""Turns a checkpoint of a Llama-shaped model into the fused decoder; ``load/reference.py`` checks it numerically.

Weights are merged and packed straight from the mapped files, one layer after another, so a second copy of the model
never exists in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import chain
from typing import Any

import torch

from parley import native
from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.quantization import Quantization, read_plain_weight
from parley.model.checkpoint.weights import BlockWeight, LinearSpec, LinearWeight
from parley.model.load.packed_cache import PackedWeightCache
from parley.model.networks.config import DecoderConfig, Unfusable
from parley.model.networks.decoder import LINEAR_SITES, FusedDecoder, make_rope_table
from parley.model.networks.network import LinearSite
from parley.native.layer import DecoderLayer

EMBEDDING_TENSOR, NORM_TENSOR, HEAD_LAYER = "model.embed_tokens.weight", "model.norm.weight", "lm_head"
# Frequencies, stored by old checkpoints and computed here; and scales of an 8-bit KV cache, which is not used.
IGNORED_TENSORS = re.compile(r"rotary_emb\.inv_freq$|self_attn\.([kv]_proj\.output|(attn\.)?[qkv])_scale$")


def fuse_decoder(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    quantization: Quantization,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    progress: Callable[[float], None],
    packed_cache: PackedWeightCache | None = None,
) -> FusedDecoder:
    """Build the decoder from the checkpoint, or from weights that ``packed_cache`` kept at an earlier start.

    ``check_tensor_names`` must have accepted the checkpoint. Raises LoadError."""
    llama_weights = LlamaWeights(checkpoint, config, quantization, dtype, device)
    weights = packed_cache.read_weights(progress) if packed_cache else None
    if weights is None:
        weights = _pack_weights(llama_weights, progress)
        if packed_cache:
            packed_cache.write_weights(weights)
    blocks, norm, head = weights
    embedding = llama_weights.embedding_table(head)
    progress(1.0)
    weights_bytes = _tensor_bytes([embedding, norm, head, *blocks])
    return FusedDecoder(
        config,
        embedding,
        blocks,
        norm,
        head,
        make_rope_table(config, max_len, embedding.device),
        llama_weights.total_parameters,
        weights_bytes,
        llama_weights.linear_sites(),
    )


def check_tensor_names(llama_weights: LlamaWeights) -> None:
    """Raise Unfusable if there are tensors that the config does not account for, LoadError if any are missing."""
    config, checkpoint = llama_weights.config, llama_weights.checkpoint
    # A tied head needs no tensor of its own, but many checkpoints have one.
    expected = {
        EMBEDDING_TENSOR,
        NORM_TENSOR,
        HEAD_LAYER + ".weight",
        *llama_weights.linear_tensors(llama_weights.head),
    }
    missing = set(llama_weights.layer_tensors(config.layer_count - 1)) - set(checkpoint.tensor_names)
    if missing:  # checked before work is planned per layer: a config may claim a million layers
        raise LoadError(
            f"The checkpoint has no tensor {min(missing)}, but the config asks for {config.layer_count} layers."
        )
    for i in range(config.layer_count):
        expected.update(llama_weights.layer_tensors(i))
    for name in checkpoint.tensor_names:
        if name not in expected and not IGNORED_TENSORS.search(name) and not llama_weights.is_zero_bias(name):
            raise Unfusable(f"it has a tensor {name}")


def _pack_weights(llama_weights: LlamaWeights, progress: Callable[[float], None]) -> list[Any]:
    """Pack all layers, the final norm and the head."""
    config = llama_weights.config
    blocks: list[DecoderLayer] = []
    with ThreadPoolExecutor(min(4, torch.get_num_threads()), "pack") as pool:
        last = pool.submit(llama_weights.pack_head)  # the longest job, so it starts first
        jobs = [pool.submit(llama_weights.pack_layer, i) for i in range(config.layer_count)]
        try:
            for job in jobs:  # in order, so that the first of several errors is reported
                blocks.append(job.result())
                progress(len(blocks) / (config.layer_count + 1))
            return [blocks, llama_weights.copy_tensor(NORM_TENSOR, config.hidden), last.result()]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _tensor_bytes(structures: Iterable[object]) -> int:
    """Return the bytes of all tensors in weights and layers, counting shared ones once."""
    bytes_by_id: dict[int, int] = {}
    pending = list(structures)
    while pending:
        structure = pending.pop()
        if isinstance(structure, torch.Tensor):
            bytes_by_id[id(structure)] = structure.nbytes
        elif isinstance(structure, DecoderLayer | native.PackedWeight):
            pending += [getattr(structure, field.name) for field in fields(structure)]
    return sum(bytes_by_id.values())


class LlamaWeights:
    """Reads and merges a layer's tensors by the names in Hugging Face checkpoints."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        quantization: Quantization,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.checkpoint, self.config, self.quantization = checkpoint, config, quantization
        self.dtype, self.device = dtype, device
        self.head = LinearSpec(HEAD_LAYER, config.vocab, config.hidden)

    def linear_parts(self, layer: int) -> dict[str, list[LinearSpec]]:
        """Return the linear layers of a layer, each as the parts to be merged, in order."""
        s, prefix = self.config, f"model.layers.{layer}."
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        if s.merged:
            qkv = [LinearSpec(attn + "qkv_proj", q + 2 * kv, s.hidden, s.qkv_bias)]
            gate_up = [LinearSpec(mlp + "gate_up_proj", 2 * s.intermediate, s.hidden, s.mlp_bias)]
        else:
            sizes = {"q": q, "k": kv, "v": kv}
            qkv = [LinearSpec(attn + f"{name}_proj", size, s.hidden, s.qkv_bias) for name, size in sizes.items()]
            gate_up = [
                LinearSpec(mlp + f"{name}_proj", s.intermediate, s.hidden, s.mlp_bias) for name in ("gate", "up")
            ]
        return {
            "qkv": qkv,
            "output": [LinearSpec(attn + "o_proj", s.hidden, q, s.o_bias)],
            "gate_up": gate_up,
            "down": [LinearSpec(mlp + "down_proj", s.hidden, s.intermediate, s.mlp_bias)],
        }

    def linear_sites(self) -> dict[str, LinearSite]:
        """Return where each linear layer of the checkpoint is computed."""
        sites: dict[str, LinearSite] = {}
        for layer in range(self.config.layer_count):
            for key, parts in self.linear_parts(layer).items():
                first = 0
                for linear in parts:
                    site = LINEAR_SITES.index(key) + layer * len(LINEAR_SITES)
                    sites[linear.name] = LinearSite(site, first, linear.out, linear.into)
                    first += linear.out
        return sites

    def norm_names(self, layer: int) -> list[str]:
        """Return the norm tensors of a layer: input, post-attention, and query and key if they are normed."""
        prefix = f"model.layers.{layer}."
        heads = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if self.config.qk_norm else []
        return [prefix + name for name in ("input_layernorm.weight", "post_attention_layernorm.weight", *heads)]

    def layer_tensors(self, layer: int) -> list[str]:
        """Return all tensor names of a layer."""
        names = self.norm_names(layer)
        for parts in self.linear_parts(layer).values():
            for linear in parts:
                names += self.linear_tensors(linear) + [linear.name + ".bias"] * linear.bias
        return names

    def is_zero_bias(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros. Some writers add one to each layer that they quantise."""
        if not name.endswith(".bias") or name.removesuffix("bias") + "qweight" not in self.checkpoint:
            return False
        return not self.checkpoint.view_tensor(name, *self.checkpoint.tensor_shape(name)).any()

    @property
    def total_parameters(self) -> int:
        """The number of elements in all weights of the model as defined, however they are stored."""
        s = self.config
        norms = [s.hidden, s.hidden] + [s.head_dim, s.head_dim] * s.qk_norm
        linears = [linear for parts in self.linear_parts(0).values() for linear in parts]
        layer = sum(norms) + sum(each.out * (each.into + each.bias) for each in linears)
        return s.layer_count * layer + s.hidden + s.vocab * s.hidden * (1 if s.tied else 2)

    def linear_tensors(self, linear: LinearSpec) -> list[str]:
        """Return the names of the tensors that hold a linear layer's weight."""
        if linear is self.head and self.config.tied:
            return [EMBEDDING_TENSOR]
        return self.quantization.stored_tensor_names(self.checkpoint, linear)

    def read_linear(self, linear: LinearSpec, outputs: torch.Tensor | None = None) -> LinearWeight:
        """Read a linear layer's weight, quantised if requested, or only some ``outputs`` (int64 indices) of it."""
        weight: LinearWeight
        if linear is self.head and self.config.tied:
            weight = read_plain_weight(self.checkpoint, EMBEDDING_TENSOR, linear.out, linear.into)
        else:
            weight = self.quantization.read_stored_weight(self.checkpoint, linear)
        weight = weight if outputs is None else weight.select_outputs(outputs)
        return self.quantization.quantize_plain(weight, head=linear is self.head)

    def check_shapes(self) -> None:
        """Check shapes and types of all tensors, in the order of packing, without reading any. Raises LoadError."""
        s, view = self.config, self.checkpoint.check_tensor
        for layer in range(s.layer_count):
            for linear in chain.from_iterable(self.linear_parts(layer).values()):
                self.quantization.check_stored_weight(self.checkpoint, linear)
                if linear.bias:
                    view(linear.name + ".bias", linear.out)
            for name, size in zip(self.norm_names(layer), (s.hidden, s.hidden, s.head_dim, s.head_dim), strict=False):
                view(name, size)
        view(NORM_TENSOR, s.hidden)
        if not s.tied:
            self.quantization.check_stored_weight(self.checkpoint, self.head)
        view(EMBEDDING_TENSOR, s.vocab, s.hidden)

    def copy_tensor(self, name: str, *sizes: int) -> torch.Tensor:
        """Return a copy of one tensor in the network's dtype and on its device."""
        return self.checkpoint.view_tensor(name, *sizes).to(device=self.device, dtype=self.dtype, copy=True)

    def embedding_table(self, head: native.PackedWeight) -> torch.Tensor:
        """Return the embedding [vocab, hidden].

        A tied head that kept its layout is the embedding itself. A table in the network's dtype stays in the mapped
        file, because few rows are ever read; otherwise it is copied.
        """
        shape = self.config.vocab, self.config.hidden
        weight = head.weight
        if self.config.tied and weight.layout is torch.strided and (weight.shape, weight.dtype) == (shape, self.dtype):
            return weight
        stored = read_plain_weight(self.checkpoint, EMBEDDING_TENSOR, *shape)
        if isinstance(stored, BlockWeight):
            return stored.decode_into(torch.empty(shape, dtype=self.dtype)).to(self.device)
        return (
            stored.values
            if self.device.type == "cpu" and stored.values.dtype == self.dtype
            else self.copy_tensor(EMBEDDING_TENSOR, *shape)
        )

    def pack_head(self) -> native.PackedWeight:
        """Pack the head and release its file pages."""
        weight = self.read_linear(self.head)
        head = type(weight).pack_merged([weight], None, self.dtype, self.device)
        self.checkpoint.release_pages(EMBEDDING_TENSOR, *self.linear_tensors(self.head))
        return head

    def pack_layer(self, index: int) -> DecoderLayer:
        """Pack one layer and release its file pages."""
        s = self.config
        packed = {key: self._pack_merged_linears(parts) for key, parts in self.linear_parts(index).items()}
        norms = self.norm_names(index)
        head_norm = None
        if s.qk_norm:
            q, k = (self.copy_tensor(name, s.head_dim) for name in norms[2:])
            head_norm = torch.cat((q.expand(s.heads, -1), k.expand(s.kv_heads, -1))).float()
        layer = DecoderLayer(
            input_norm=self.copy_tensor(norms[0], s.hidden),
            head_norm=head_norm,
            post_norm=self.copy_tensor(norms[1], s.hidden),
            window=s.windows[index],
            **packed,
        )
        self.checkpoint.release_pages(*self.layer_tensors(index))
        return layer

    def _pack_merged_linears(self, parts: list[LinearSpec]) -> native.PackedWeight:
        """Merge linear layers into one packed weight. Raises LoadError if they are quantised differently."""
        weights = [self.read_linear(linear) for linear in parts]
        if not all(weights[0].can_merge(weight) for weight in weights):
            layer_names = ", ".join(linear.name for linear in parts)
            raise LoadError(f"The layers {layer_names} are computed as one, but are not all quantised alike.")
        bias = None
        if parts[0].bias:
            bias = torch.cat([self.copy_tensor(linear.name + ".bias", linear.out) for linear in parts])
        return type(weights[0]).pack_merged(weights, bias, self.dtype, self.device)
