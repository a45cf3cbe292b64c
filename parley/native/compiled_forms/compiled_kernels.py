"""The compiled kernels: bfloat16 on the CPU.

Each method does the same as the function of that name in ``torch_forms``. The bits of a row depend neither on other
rows nor on the number of threads, for all sizes. The caller loads the library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from parley.native import memory
from parley.native.compiled_forms import (
    compiled_attention,
    compiled_convolution,
    compiled_experts,
    compiled_grouped,
    compiled_int8,
    compiled_kimi,
    compiled_latent,
    compiled_logits,
    compiled_lora,
    compiled_mamba,
    compiled_selective,
    compiled_states,
)
from parley.native.compiled_forms.compiled_attention import CompiledPlan
from parley.native.compiled_forms.compiled_grouped import GroupedPacked
from parley.native.compiled_forms.compiled_int8 import CompiledRows, Int8Packed, allocate_output
from parley.native.compiled_forms.norm_struct import norm_pointer
from parley.native.experts import Experts
from parley.native.layer import StateWeights
from parley.native.layer_shape import ACTIVATIONS, GateLimits, Norm, Routing
from parley.native.layout import LayerKV
from parley.native.lowrank import LowRank
from parley.native.packed import Bf16Packed
from parley.native.pool import LayerPages, PageFormat
from parley.native.state_shape import GatedDeltaShape, KimiDeltaShape, Mamba1Shape, Mamba2Shape, ShortConvolutionShape
from parley.native.torch_forms.torch_grouped import GroupedPieces, GroupedWeight, PackedBlockWeight

P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "packed_size": [N, N],
    "pack": [P, P, N, N, N],
    "linear": [P, P, P, P, N, N, N, N, N],
    "add_norm": [P, P, P, P, R, R, P, P, P, P, P, N, N, N],
    "activate": [P, N, N, P, P, P, P, P, N, N, N],
    **compiled_attention.ATTENTION_SIGNATURES,
    **compiled_convolution.CONVOLUTION_SIGNATURES,
    **compiled_experts.EXPERTS_SIGNATURES,
    **compiled_grouped.GROUPED_SIGNATURES,
    **compiled_int8.INT8_SIGNATURES,
    **compiled_kimi.KIMI_SIGNATURES,
    **compiled_latent.LATENT_SIGNATURES,
    **compiled_lora.LORA_SIGNATURES,
    **compiled_logits.LOGITS_SIGNATURES,
    **compiled_mamba.MAMBA_SIGNATURES,
    **compiled_selective.SELECTIVE_SIGNATURES,
    **compiled_states.STATES_SIGNATURES,
}
# Functions that return an int64.
RETURN_INT64 = (
    "packed_size", *compiled_attention.ATTENTION_RETURN_INT64, *compiled_experts.EXPERTS_RETURN_INT64,
    *compiled_grouped.GROUPED_RETURN_INT64, *compiled_int8.INT8_RETURN_INT64, *compiled_logits.LOGITS_RETURN_INT64,
    *compiled_lora.LORA_RETURN_INT64,
)  # fmt: skip


def join_to_panels(parts: Sequence[torch.Tensor], panel: int) -> list[tuple[int, torch.Tensor]]:
    """Return the rows of ``parts`` [rows, n] in contiguous pieces, each with the number of its first row.

    Each piece begins at a multiple of ``panel`` rows, so it can be packed alone. A part is copied only if it is not
    contiguous, or if it does not begin and end at such a multiple.
    """
    pieces: list[tuple[int, torch.Tensor]] = []
    waiting: list[torch.Tensor] = []
    first = end = 0
    for number, part in enumerate(parts, 1):
        waiting.append(part)
        end += len(part)
        if number == len(parts) or end % panel == 0:
            pieces.append((first, waiting[0].contiguous() if len(waiting) == 1 else torch.cat(waiting)))
            waiting, first = [], end
    return pieces


class CompiledKernels:
    """The kernels of one library."""

    def __init__(self, library: ctypes.CDLL):
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, N if name in RETURN_INT64 else None
        self._library = library
        self.library_name = Path(library._name).name
        self.level = Path(library._name).stem.rpartition("-")[2]
        self._panel_outputs = library.packed_size(1, 2) // 2  # outputs of a panel, which are packed together
        self.grouped_panel_outputs = library.grouped_panel()  # outputs of a panel of weights in groups

    def pack_weight(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Bf16Packed:
        """Pack a weight [out, in] of bfloat16 in the layout that ``linear.cpp`` describes."""
        return self.pack_weight_parts([weight], bias)

    def pack_weight_parts(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Bf16Packed:
        """Pack weights [out, in] of bfloat16 as one with the outputs of all, in order."""
        out_features, in_features = sum(map(len, parts)), parts[0].shape[1]
        packed = memory.map_tensor(
            self._library.packed_size(out_features, in_features), torch.bfloat16, parts[0].device
        )
        for first, rows in [] if packed.is_meta else join_to_panels(parts, self._panel_outputs):
            destination = packed[self._library.packed_size(first, in_features) :]
            self._library.pack(rows.data_ptr(), destination.data_ptr(), len(rows), in_features, torch.get_num_threads())
        return Bf16Packed(
            packed, None if bias is None else bias.to(torch.bfloat16).contiguous(), out_features, in_features
        )

    def pack_int8(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Int8Packed:
        """Pack a weight int8 [out, in] with scales [out]. Raises ValueError if ``in`` is above 2^17."""
        assert dtype == torch.bfloat16
        return self.pack_int8_parts([values], scales, bias)

    def pack_int8_parts(
        self, parts: Sequence[torch.Tensor], scales: torch.Tensor, bias: torch.Tensor | None
    ) -> Int8Packed:
        """Pack weights int8 [out, in] as one with the outputs of all, in order. ``scales`` [outputs of all].

        Raises ValueError as above.
        """
        pieces = join_to_panels(parts, self._panel_outputs)
        return compiled_int8.pack_int8_pieces(self._library, pieces, scales, bias)

    def pack_grouped(
        self, weight: GroupedWeight, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> GroupedPacked:
        """Pack a weight in groups. Raises ValueError if these are neither multiples of 8 nor whole rows."""
        assert dtype == torch.bfloat16
        return compiled_grouped.pack_grouped_weight(self._library, weight, bias)

    def pack_grouped_parts(
        self, weights: Sequence[GroupedWeight | PackedBlockWeight | GroupedPieces], bias: torch.Tensor | None = None
    ) -> GroupedPacked:
        """Pack weights of the same inputs as one with the outputs of all. Raises ValueError as above."""
        return compiled_grouped.pack_grouped_parts(self._library, weights, bias)

    def pack_lora(self, sites: Sequence[Sequence[LowRank]]) -> compiled_lora.CompiledLora:
        """Pack a LoRA adapter for bfloat16 rows: ``sites`` holds its parts for each linear layer, by number."""
        return compiled_lora.CompiledLora(self._library, sites)

    def group_lora_rows(
        self, groups: Sequence[tuple[compiled_lora.CompiledLora, Sequence[int]]]
    ) -> compiled_lora.CompiledLoraRows:
        """Assign adapters to rows of a batch: ``groups`` holds each adapter with the numbers of its rows."""
        return compiled_lora.CompiledLoraRows(self._library, groups)

    def quantize_rows(self, x: torch.Tensor) -> CompiledRows:
        """Quantize bfloat16 rows [T, width] to int8, with one scale per row."""
        return compiled_int8.quantize_bf16(self._library, x)

    def linear(self, x: torch.Tensor | CompiledRows, packed: Bf16Packed | Int8Packed | GroupedPacked) -> torch.Tensor:
        """Return x [T, in] times the weight, plus bias: bfloat16 [T, out]. Raises ValueError if ``in`` differs."""
        return self._multiply_rows(x, packed, torch.bfloat16)

    def lm_head_logits(
        self, x: torch.Tensor | CompiledRows, packed: Bf16Packed | Int8Packed | GroupedPacked
    ) -> torch.Tensor:
        """Compute ``linear`` for the LM head: float32 [T, out]."""
        return self._multiply_rows(x, packed, torch.float32)

    def _multiply_rows(
        self, x: torch.Tensor | CompiledRows, packed: Bf16Packed | Int8Packed | GroupedPacked, dtype: torch.dtype
    ) -> torch.Tensor:
        if isinstance(packed, Int8Packed):
            return compiled_int8.multiply_int8(self._library, x, packed, dtype)
        assert isinstance(x, torch.Tensor)
        if isinstance(packed, GroupedPacked):
            return compiled_grouped.multiply_grouped(self._library, x, packed, dtype)
        in_features, out_features = packed.in_features, packed.out_features
        if x.shape[-1] != in_features:
            raise ValueError(f"rows of {x.shape[-1]} numbers for a layer of {in_features}")
        rows = F.pad(x, (0, 1)) if in_features % 2 else x.contiguous()
        y = torch.empty(*x.shape[:-1], out_features, dtype=dtype)
        self._library.linear(
            rows.data_ptr(),
            packed.weight.data_ptr(),
            0 if packed.bias is None else packed.bias.data_ptr(),
            y.data_ptr(),
            y.numel() // max(out_features, 1),
            out_features,
            in_features + in_features % 2,
            dtype == torch.float32,
            torch.get_num_threads(),
        )
        return y

    def linear_heads(self, x: torch.Tensor, packed: Bf16Packed) -> torch.Tensor:
        """Return each head's rows times its own weight: x [T, heads, in] -> [T, heads, out]."""
        return compiled_latent.linear_heads(self._library, x, packed).transpose(0, 1)

    def absorb_queries(
        self, queries: torch.Tensor, key_up: Bf16Packed, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool
    ) -> torch.Tensor:
        """Return queries for latents [T, heads, rank + rotary], of queries [T, heads, plain + rotary]."""
        options = {"is_interleaved": is_interleaved}
        return compiled_latent.absorb_queries(self._library, queries, key_up, cos, sin, **options)

    def write_latents(
        self,
        rows: torch.Tensor,
        norm: Norm,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pool: LayerPages,
        slots: torch.Tensor,
        *,
        is_interleaved: bool,
    ) -> None:
        """Norm the latents in rows [T, rank + rotary], rotate the rest, and store both at ``slots`` as one key."""
        arguments = rows, norm_pointer(norm), cos, sin, pool, slots
        compiled_latent.write_latents(self._library, *arguments, is_interleaved=is_interleaved)

    def norm_rows(self, x: torch.Tensor, norm: Norm | None, *, int8: bool = False) -> torch.Tensor | CompiledRows:
        """Return the norm of x [T, hidden], or x itself without one; ``int8`` quantizes it."""
        return self._run_norm(0, x.contiguous(), 0, None, (1.0, 1.0), norm, int8)

    def add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm | None,
        *,
        after: Norm | None = None,
        scale: float = 1.0,
        total_scale: float = 1.0,
        int8: bool = False,
    ) -> tuple[torch.Tensor | CompiledRows, torch.Tensor]:
        """Add scale * after(x) to the residual, and multiply it by ``total_scale``. Return (its norm, the residual),
        both [T, hidden]; ``int8`` quantizes the norm. Without a norm the rows stay as they are."""
        x, total = x.contiguous(), torch.empty_like(x)
        scales = scale, total_scale
        rows = self._run_norm(x.data_ptr(), residual.contiguous(), total.data_ptr(), after, scales, norm, int8)
        return rows, total

    def _run_norm(
        self,
        x: int,
        residual: torch.Tensor,
        total: int,
        after: Norm | None,
        scales: tuple[float, float],
        norm: Norm | None,
        int8: bool,
    ) -> torch.Tensor | CompiledRows:
        width = residual.shape[-1]
        count = residual.numel() // width
        out, pointers = allocate_output(residual.shape, count, width, int8)
        threads = torch.get_num_threads()
        norms = norm_pointer(after), *scales, norm_pointer(norm)
        self._library.add_norm(x, residual.data_ptr(), total, *norms, *pointers, count, width, threads)
        return out

    def activate(
        self,
        rows: torch.Tensor,
        activation: str,
        *,
        is_gated: bool = True,
        factors: Sequence[float] = (),
        int8: bool = False,
    ) -> torch.Tensor | CompiledRows:
        """Return activation(gate) * up, where gate and up are the halves of [T, 2 * width], or the activation of all
        unless ``is_gated``: [T, width]; ``int8`` quantizes it. ``factors``: those of xielu."""
        rows = rows.contiguous()
        count, width = rows.shape[0], rows.shape[1] // (2 if is_gated else 1)
        out, pointers = allocate_output((count, width), count, width, int8)
        number, threads = ACTIVATIONS.index(activation), torch.get_num_threads()
        curve = (R * 3)(*factors)
        self._library.activate(rows.data_ptr(), number, is_gated, curve, *pointers, count, width, threads)
        return out

    def route(
        self, logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chosen experts of each row, int64 [T, chosen], and their weights, float32."""
        return compiled_experts.route(self._library, logits, bias, routing)

    def mix_experts(
        self,
        x: torch.Tensor,
        experts: Experts,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        activation: str = "silu",
        *,
        weighs_inputs: bool = False,
        limits: GateLimits | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' MLPs for rows x [T, hidden], and of ``shared``."""
        return compiled_experts.mix_experts(
            self._library, x, experts, ids, weights, shared, activation, weighs_inputs=weighs_inputs, limits=limits
        )

    def scan_gated_delta(
        self,
        rows: torch.Tensor,
        gates: torch.Tensor,
        weights: StateWeights,
        shape: GatedDeltaShape,
        states: torch.Tensor,
        spans: torch.Tensor,
    ) -> torch.Tensor:
        """Return the outputs of the gated delta rule: bfloat16 [T, inner]; advance the states."""
        return compiled_states.scan_gated_delta(self._library, rows, gates, weights, shape, states, spans)

    def scan_kimi_delta(
        self,
        rows: torch.Tensor,
        weights: StateWeights,
        shape: KimiDeltaShape,
        states: torch.Tensor,
        spans: torch.Tensor,
    ) -> torch.Tensor:
        """Return the outputs of Kimi Delta Attention: bfloat16 [T, inner]; advance the states."""
        return compiled_kimi.scan_kimi_delta(self._library, rows, weights, shape, states, spans)

    def convolve_gated(
        self,
        rows: torch.Tensor,
        weights: StateWeights,
        shape: ShortConvolutionShape,
        states: torch.Tensor,
        spans: torch.Tensor,
    ) -> torch.Tensor:
        """Return the outputs of a gated short convolution: bfloat16 [T, width]; advance the states."""
        return compiled_states.convolve_gated(self._library, rows, weights, shape, states, spans)

    def gate_rows(self, rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return rows * sigmoid(gates): bfloat16 [T, width]; the rows are overwritten."""
        return compiled_states.gate_rows(self._library, rows, gates)

    def scan_mamba2(
        self,
        rows: torch.Tensor,
        weights: StateWeights,
        shape: Mamba2Shape,
        states: torch.Tensor,
        spans: torch.Tensor,
    ) -> torch.Tensor:
        """Return the outputs of a Mamba 2 layer before its output layer: bfloat16 [T, inner]; advance the states."""
        return compiled_mamba.scan_mamba2(self._library, rows, weights, shape, states, spans)

    def convolve_channels(
        self,
        rows: torch.Tensor,
        weights: StateWeights,
        shape: Mamba1Shape,
        states: torch.Tensor,
        spans: torch.Tensor,
    ) -> torch.Tensor:
        """Return the convolved channels of a Mamba 1 layer: bfloat16 [T, inner]; advance their part of the states."""
        return compiled_selective.convolve_channels(self._library, rows, weights, shape, states, spans)

    def scan_channels(
        self,
        rows: torch.Tensor,
        active: torch.Tensor,
        steps: torch.Tensor,
        keys: torch.Tensor,
        weights: StateWeights,
        shape: Mamba1Shape,
        states: torch.Tensor,
        spans: torch.Tensor,
    ) -> torch.Tensor:
        """Return the outputs of a Mamba 1 layer before its output layer: bfloat16 [T, inner]; advance the states."""
        return compiled_selective.scan_channels(self._library, rows, active, steps, keys, weights, shape, states, spans)

    def page_format(self, layer: LayerKV, dtype: torch.dtype) -> PageFormat | None:
        """Return the format of pages of bfloat16 or int8, or None if the head dimension is not compiled."""
        return compiled_attention.page_format(self._library, layer, dtype)

    def write_kv(self, keys: torch.Tensor, values: torch.Tensor, pool: LayerPages, slots: torch.Tensor) -> None:
        """Store keys [T, kv_heads, dim] and values [T, kv_heads, value_dim] in the pages, at ``slots`` int64 [T]."""
        compiled_attention.write_kv(self._library, keys, values, pool, slots)

    def rope_write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pool: LayerPages,
        slots: torch.Tensor,
        *,
        head_norm: Norm | None = None,
        has_whole_norm: bool = False,
        is_norm_late: bool = False,
        is_interleaved: bool = False,
        query_scales: torch.Tensor | None = None,
        has_normed_values: bool = False,
        is_query_only: bool = False,
    ) -> torch.Tensor:
        """Rotate queries and keys in ``qkv``, store keys and values at ``slots``, return queries [T, heads, dim]."""
        return compiled_attention.rope_write(
            self._library,
            qkv,
            cos,
            sin,
            pool,
            slots,
            head_norm=head_norm,
            has_whole_norm=has_whole_norm,
            is_norm_late=is_norm_late,
            is_interleaved=is_interleaved,
            query_scales=query_scales,
            has_normed_values=has_normed_values,
            is_query_only=is_query_only,
        )

    def attend(
        self,
        queries: torch.Tensor,
        pool: LayerPages,
        plan: CompiledPlan,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of queries [T, heads, dim] over pages: [T, heads, value_dim], dtype of the queries."""
        return compiled_attention.attend(
            self._library, queries, pool, plan, scale=scale, softcap=softcap, sinks=sinks, slopes=slopes
        )

    def scale_logits(self, logits: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
        """Return cap * tanh(scale * logits / cap), or scale * logits without a cap; float32 [R, V], overwritten."""
        return compiled_logits.scale_logits(self._library, logits, scale, cap)

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest logit of each row and its lowest id: float32 [R, V] -> float32 [R], int64 [R]."""
        return compiled_logits.argmax(self._library, logits)

    def top_k(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ``count`` largest logits of each row, descending, and their ids: float32 and int64 [R, count].

        Of equal logits, those with the lowest ids are chosen and come first.
        """
        return compiled_logits.top_k(self._library, logits, count)

    def softmax_totals(self, logits: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
        """Return the sum of each row's weights: float32 [R, V] and the largest logits [R] -> int64 [R]."""
        return compiled_logits.softmax_totals(self._library, logits, peaks)

    def masked_argmax(self, logits: torch.Tensor, bits: np.ndarray) -> int:
        """Return the id of the largest logit whose bit is 1: float32 [V], uint8 [V / 8 or more], lowest bit first."""
        return compiled_logits.masked_argmax(self._library, logits, bits)

    def apply_mask(self, logits: torch.Tensor, bits: np.ndarray) -> None:
        """Set the logits whose bit is 0 to -inf, in place: float32 [V], uint8 [V / 8 or more], lowest bit first."""
        compiled_logits.apply_mask(self._library, logits, bits)
