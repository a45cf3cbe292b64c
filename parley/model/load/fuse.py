"""Turns a checkpoint of a Llama-shaped model into the fused decoder; ``load/reference.py`` checks it numerically.

Weights are merged and packed straight from the mapped files, one layer after another, so a second copy of the model
never exists in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import torch

from parley import native
from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.checkpoint.quantization import Quantisation
from parley.model.checkpoint.weights import Linear, Plain, Weight
from parley.model.load.packed_cache import Packs
from parley.model.networks.config import Shape, Unfit
from parley.model.networks.decoder import SITES, Decoder
from parley.model.networks.network import Place
from parley.native.layer import Layer

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head"
IGNORED = re.compile(r"rotary_emb\.inv_freq$")  # stored by old checkpoints, computed here


def lower(
    checkpoint: Checkpoint,
    shape: Shape,
    quantisation: Quantisation,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    progress: Callable[[float], None],
    packs: Packs | None = None,
) -> Decoder:
    """Build the decoder from the checkpoint, or from weights that ``packed_cache`` kept at an earlier start.

    Raises Unfusable if there are tensors that the config does not account for, LoadError if any are missing."""
    names = Names(checkpoint, shape, quantisation, dtype, device)
    # A tied head needs no tensor of its own, but many checkpoints have one.
    used = {EMBEDDING, NORM, HEAD + ".weight", *names.tensors(names.head)}
    missing = set(names.of(shape.layers - 1)) - set(checkpoint.names)
    if missing:  # checked before work is planned per layer: a config may claim a million layers
        raise LoadError(f"The checkpoint has no tensor {min(missing)}, but the config asks for {shape.layers} layers.")
    for i in range(shape.layers):
        used.update(names.of(i))
    for name in checkpoint.names:
        if name not in used and not IGNORED.search(name) and not names.idle(name):
            raise Unfit(f"it has a tensor {name}")

    weights = packs.read(progress) if packs else None
    if weights is None:
        weights = _pack(names, progress)
        if packs:
            packs.write(weights)
    blocks, norm, head = weights
    embedding = names.table(head)
    progress(1.0)
    held = _held([embedding, norm, head, *blocks])
    return Decoder(shape, embedding, blocks, norm, head, max_len, names.parameters, held, names.linears())


def _pack(names: Names, progress: Callable[[float], None]) -> list[Any]:
    """Pack all layers, the final norm and the head."""
    shape = names.shape
    blocks: list[Layer] = []
    with ThreadPoolExecutor(min(4, torch.get_num_threads()), "pack") as pool:
        last = pool.submit(names.pack_head)  # the longest job, so it starts first
        jobs = [pool.submit(names.layer, i) for i in range(shape.layers)]
        try:
            for job in jobs:  # in order, so that the first of several errors is reported
                blocks.append(job.result())
                progress(len(blocks) / (shape.layers + 1))
            return [blocks, names.copy(NORM, shape.hidden), last.result()]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _held(things: Iterable[object]) -> int:
    """Return the bytes of all tensors in weights and layers, counting shared ones once."""
    found: dict[int, int] = {}
    rest = list(things)
    while rest:
        each = rest.pop()
        if isinstance(each, torch.Tensor):
            found[id(each)] = each.nbytes
        elif isinstance(each, Layer | native.Packed):
            rest += [getattr(each, field.name) for field in fields(each)]
    return sum(found.values())


class Names:
    """Reads and merges a layer's tensors by the names in Hugging Face checkpoints."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shape: Shape,
        quantisation: Quantisation,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.checkpoint, self.shape, self.quantisation = checkpoint, shape, quantisation
        self.dtype, self.device = dtype, device
        self.head = Linear(HEAD, shape.vocab, shape.hidden)

    def parts(self, layer: int) -> dict[str, list[Linear]]:
        """Return the linear layers of a layer, each as the parts to be merged, in order."""
        s, prefix = self.shape, f"model.layers.{layer}."
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        if s.merged:
            qkv = [Linear(attn + "qkv_proj", q + 2 * kv, s.hidden, s.qkv_bias)]
            gate_up = [Linear(mlp + "gate_up_proj", 2 * s.intermediate, s.hidden, s.mlp_bias)]
        else:
            sizes = {"q": q, "k": kv, "v": kv}
            qkv = [Linear(attn + f"{name}_proj", size, s.hidden, s.qkv_bias) for name, size in sizes.items()]
            gate_up = [Linear(mlp + f"{name}_proj", s.intermediate, s.hidden, s.mlp_bias) for name in ("gate", "up")]
        return {
            "qkv": qkv,
            "output": [Linear(attn + "o_proj", s.hidden, q, s.o_bias)],
            "gate_up": gate_up,
            "down": [Linear(mlp + "down_proj", s.hidden, s.intermediate, s.mlp_bias)],
        }

    def linears(self) -> dict[str, Place]:
        """Return where each linear layer of the checkpoint is computed."""
        found: dict[str, Place] = {}
        for layer in range(self.shape.layers):
            for key, parts in self.parts(layer).items():
                first = 0
                for linear in parts:
                    site = SITES.index(key) + layer * len(SITES)
                    found[linear.name] = Place(site, first, linear.out, linear.into)
                    first += linear.out
        return found

    def norms(self, layer: int) -> list[str]:
        """Return the norm tensors of a layer: input, post-attention, and query and key if they are normed."""
        prefix = f"model.layers.{layer}."
        heads = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if self.shape.qk_norm else []
        return [prefix + name for name in ("input_layernorm.weight", "post_attention_layernorm.weight", *heads)]

    def of(self, layer: int) -> list[str]:
        """Return all tensor names of a layer."""
        names = self.norms(layer)
        for parts in self.parts(layer).values():
            for linear in parts:
                names += self.tensors(linear) + [linear.name + ".bias"] * linear.bias
        return names

    def idle(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros. Some writers add one to each layer that they quantise."""
        if not name.endswith(".bias") or name.removesuffix("bias") + "qweight" not in self.checkpoint:
            return False
        return not self.checkpoint.tensor(name, *self.checkpoint.shape(name)).any()

    @property
    def parameters(self) -> int:
        """The number of elements in all weights of the model as defined, however they are stored."""
        s = self.shape
        norms = [s.hidden, s.hidden] + [s.head_dim, s.head_dim] * s.qk_norm
        linears = [linear for parts in self.parts(0).values() for linear in parts]
        layer = sum(norms) + sum(each.out * (each.into + each.bias) for each in linears)
        return s.layers * layer + s.hidden + s.vocab * s.hidden * (1 if s.tied else 2)

    def tensors(self, linear: Linear) -> list[str]:
        """Return the names of the tensors that hold a linear layer's weight."""
        if linear is self.head and self.shape.tied:
            return [EMBEDDING]
        return self.quantisation.tensors(self.checkpoint, linear)

    def read(self, linear: Linear, outputs: torch.Tensor | None = None) -> Weight:
        """Read a linear layer's weight, quantised if requested, or only some ``outputs`` (int64 indices) of it."""
        weight: Weight
        if linear is self.head and self.shape.tied:
            weight = Plain(self.checkpoint.tensor(EMBEDDING, linear.out, linear.into))
        else:
            weight = self.quantisation.read(self.checkpoint, linear)
        weight = weight if outputs is None else weight.select(outputs)
        return self.quantisation.convert(weight, head=linear is self.head)

    def copy(self, name: str, *sizes: int) -> torch.Tensor:
        """Return a copy of one tensor in the network's dtype and on its device."""
        return self.checkpoint.tensor(name, *sizes).to(device=self.device, dtype=self.dtype, copy=True)

    def table(self, head: native.Packed) -> torch.Tensor:
        """Return the embedding [vocab, hidden].

        A tied head that kept its layout is the embedding itself. A table in the network's dtype stays in the mapped
        file, because few rows are ever read; otherwise it is copied.
        """
        shape = self.shape.vocab, self.shape.hidden
        weight = head.weight
        if self.shape.tied and weight.layout is torch.strided and (weight.shape, weight.dtype) == (shape, self.dtype):
            return weight
        table = self.checkpoint.tensor(EMBEDDING, *shape)
        return table if self.device.type == "cpu" and table.dtype == self.dtype else self.copy(EMBEDDING, *shape)

    def pack_head(self) -> native.Packed:
        """Pack the head and release its file pages."""
        weight = self.read(self.head)
        head = type(weight).pack([weight], None, self.dtype, self.device)
        self.checkpoint.drop(EMBEDDING, *self.tensors(self.head))
        return head

    def layer(self, index: int) -> Layer:
        """Pack one layer and release its file pages."""
        s = self.shape
        packed = {key: self._pack(parts) for key, parts in self.parts(index).items()}
        norms = self.norms(index)
        head_norm = None
        if s.qk_norm:
            q, k = (self.copy(name, s.head_dim) for name in norms[2:])
            head_norm = torch.cat((q.expand(s.heads, -1), k.expand(s.kv_heads, -1))).float()
        layer = Layer(
            input_norm=self.copy(norms[0], s.hidden),
            head_norm=head_norm,
            post_norm=self.copy(norms[1], s.hidden),
            window=s.windows[index],
            **packed,
        )
        self.checkpoint.drop(*self.of(index))
        return layer

    def _pack(self, parts: list[Linear]) -> native.Packed:
        """Merge linear layers into one packed weight. Raises LoadError if they are quantised differently."""
        weights = [self.read(linear) for linear in parts]
        if not all(weights[0].joins(weight) for weight in weights):
            together = ", ".join(linear.name for linear in parts)
            raise LoadError(f"The layers {together} are computed as one, but are not all quantised alike.")
        bias = None
        if parts[0].bias:
            bias = torch.cat([self.copy(linear.name + ".bias", linear.out) for linear in parts])
        return type(weights[0]).pack(weights, bias, self.dtype, self.device)
