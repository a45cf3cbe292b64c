"""The kernel table: one function per kernel. The bits of a row never depend on the other rows.

The model calls ``native.linear``, ``native.attend`` and so on. ``kernel_choice`` says which implementation a call runs:
the compiled one, the one in Triton or torch's, whose docstrings define each kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from parley.native import kernel_choice, library
from parley.native.batch_tables import BatchTables, TablePlan
from parley.native.compiled_forms.compiled_int8 import CompiledRows, Int8Packed
from parley.native.compiled_forms.compiled_kernels import CompiledPlan, plan_spans
from parley.native.compiled_forms.compiled_layers import Stack
from parley.native.compiled_forms.compiled_lora import CompiledLora, CompiledLoraRows
from parley.native.experts import Experts, Mixture, Unstackable, stack_experts
from parley.native.kernel_choice import (
    form_for_rows,
    form_of_stacked,
    form_of_weight,
    has_gpu_experts,
    has_quantized_kernels,
    has_table_attention,
    kernels_in_use,
    kernels_of_parts,
    packed_layout_id,
    packing_form,
    tiled_kernels,
)
from parley.native.layer import AltUpWeights, DecoderLayer, StateWeights
from parley.native.layer_shape import AltUpShape, LatentShape, LayerShape, Norm, Routing
from parley.native.layout import LayerKV, Span
from parley.native.lowrank import LowRank
from parley.native.packed import PackedWeight
from parley.native.pool import PageFormat, PagePool
from parley.native.state_shape import GatedDeltaShape, KimiDeltaShape, Mamba1Shape, Mamba2Shape, ShortConvolutionShape
from parley.native.torch_forms import (
    torch_attention,
    torch_int8,
    torch_kernels,
    torch_latent,
    torch_lora,
    torch_states,
)
from parley.native.torch_forms.torch_grouped import (
    BlockedWeight,
    GroupedPieces,
    GroupedWeight,
    dequantize_grouped,
    round_int4,
)
from parley.native.torch_forms.torch_kernels import EmbeddingRows, embed_tokens
from parley.native.triton_forms.triton_packed import TritonInt8Packed

QuantizedRows = torch_int8.TorchRows | CompiledRows
AttentionPlan = CompiledPlan | TablePlan | list[torch_attention.TileGroup]
PackedLora = CompiledLora | torch_lora.TorchLora
LoraRows = CompiledLoraRows | torch_lora.TorchLoraRows

__all__ = [
    "AltUpShape",
    "AltUpWeights",
    "AttentionPlan",
    "BatchTables",
    "BlockedWeight",
    "DecoderLayer",
    "EmbeddingRows",
    "Experts",
    "GroupedPieces",
    "GroupedWeight",
    "LatentShape",
    "LayerShape",
    "LoraRows",
    "LowRank",
    "Mamba1Shape",
    "Mamba2Shape",
    "Mixture",
    "Norm",
    "PackedLora",
    "PackedWeight",
    "PageFormat",
    "PagePool",
    "QuantizedRows",
    "Routing",
    "Stack",
    "StateWeights",
    "TablePlan",
    "Unstackable",
    "absorb_queries",
    "activate",
    "add_norm",
    "apply_mask",
    "argmax",
    "attend",
    "build_stack",
    "choose_page_format",
    "convolve_channels",
    "convolve_gated",
    "dequantize_grouped",
    "embed_tokens",
    "gate_rows",
    "group_lora_rows",
    "has_gpu_experts",
    "has_gpu_rope_write",
    "has_quantized_kernels",
    "has_table_attention",
    "kernels_in_use",
    "kernels_of_parts",
    "linear",
    "linear_heads",
    "lm_head_logits",
    "masked_argmax",
    "match_sizes",
    "mix_experts",
    "norm_rows",
    "pack_grouped",
    "pack_heads",
    "pack_int8",
    "pack_lora",
    "pack_weight",
    "packed_layout_id",
    "plan_attention",
    "quantize_rows",
    "rope_write",
    "round_int4",
    "route",
    "scale_logits",
    "scan_channels",
    "scan_gated_delta",
    "scan_kimi_delta",
    "scan_mamba2",
    "softmax_totals",
    "sparsify_gates",
    "stack_experts",
    "top_k",
    "write_indices",
    "write_kv",
    "write_latents",
]


def pack_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
    """Pack a weight [out, in], and its bias [out], for ``linear``."""
    result: PackedWeight = packing_form("pack_weight", weight.device, weight.dtype).pack_weight(weight, bias)
    return result


def pack_int8(
    values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> PackedWeight:
    """Pack a weight int8 [out, in] with scales float32 [out], for rows of ``dtype``."""
    result: PackedWeight = packing_form("pack_int8", values.device, dtype).pack_int8(values, scales, bias, dtype)
    return result


def pack_grouped(weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> PackedWeight:
    """Pack a weight of 1 to 8 bits in groups, for rows of ``dtype``."""
    result: PackedWeight = packing_form("pack_grouped", weight.values.device, dtype).pack_grouped(weight, bias, dtype)
    return result


def _takes_int8(consumer: PackedWeight | None) -> bool:
    """Whether this layer takes int8 rows, so that the kernel before it can quantize them in the same pass."""
    return isinstance(consumer, Int8Packed | TritonInt8Packed | torch_kernels.TorchInt8Packed)


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """Quantize rows [T, width] to int8, with one scale per row."""
    result: QuantizedRows = form_for_rows("quantize_rows", x).quantize_rows(x)
    return result


def linear(x: torch.Tensor | QuantizedRows, packed: PackedWeight) -> torch.Tensor:
    """Return x [T, in] times the packed weight, plus bias: [T, out]."""
    result: torch.Tensor = form_of_weight("linear", packed).linear(x, packed)
    return result


def lm_head_logits(x: torch.Tensor | QuantizedRows, packed: PackedWeight) -> torch.Tensor:
    """Compute ``linear`` for the LM head: float32 [T, vocab]."""
    result: torch.Tensor = form_of_weight("lm_head_logits", packed).lm_head_logits(x, packed)
    return result


def pack_lora(sites: Sequence[Sequence[LowRank]], dtype: torch.dtype, device: torch.device) -> PackedLora:
    """Pack a LoRA adapter for rows of ``dtype``: ``sites`` holds its parts for each linear layer, by number."""
    kernels = kernel_choice.compiled_kernels() if dtype == torch.bfloat16 and device.type == "cpu" else None
    return kernels.pack_lora(sites) if kernels else torch_lora.TorchLora(sites, dtype, device)


def group_lora_rows(groups: Sequence[tuple[Any, Sequence[int]]], device: torch.device) -> LoraRows:
    """Assign adapters to rows of a batch. Call ``add_lora`` of the result after each linear layer."""
    if groups and isinstance(groups[0][0], torch_lora.TorchLora):
        return torch_lora.TorchLoraRows(groups, device)
    kernels = kernel_choice.compiled_kernels()
    assert kernels is not None
    return kernels.group_lora_rows(groups)


def norm_rows(x: torch.Tensor, norm: Norm | None, *, consumer: PackedWeight | None = None) -> Any:
    """Norm of x. If ``consumer``, the only layer that reads the result, takes int8, the result is quantized."""
    return form_for_rows("norm_rows", x).norm_rows(x, norm, int8=_takes_int8(consumer))


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: Norm | None,
    *,
    after: Norm | None = None,
    scale: float = 1.0,
    total_scale: float = 1.0,
    consumer: PackedWeight | None = None,
) -> tuple[Any, torch.Tensor]:
    """Return (norm of the new residual, total_scale * (residual + scale * after(x))). ``consumer`` is that of
    ``norm_rows``."""
    result: tuple[Any, torch.Tensor] = form_for_rows("add_norm", x).add_norm(
        x, residual, norm, after=after, scale=scale, total_scale=total_scale, int8=_takes_int8(consumer)
    )
    return result


def activate(
    rows: torch.Tensor,
    activation: str,
    *,
    is_gated: bool = True,
    factors: Sequence[float] = (),
    consumer: PackedWeight | None = None,
) -> Any:
    """Return activation(gate) * up for rows [T, 2 * width]. ``factors``: ``activation_factors`` of the layer.
    ``consumer`` is that of ``norm_rows``."""
    return form_for_rows("activate", rows).activate(
        rows, activation, is_gated=is_gated, factors=factors, int8=_takes_int8(consumer)
    )


def sparsify_gates(rows: torch.Tensor, deviations: float) -> torch.Tensor:
    """Subtract a threshold from each gate in rows [T, 2 * width] and make those below it 0. The rows are overwritten
    and returned; ``torch_streams`` defines the threshold."""
    result: torch.Tensor = form_for_rows("sparsify_gates", rows).sparsify_gates(rows, deviations)
    return result


def match_sizes(rows: torch.Tensor, models: torch.Tensor) -> torch.Tensor:
    """Return rows [T, width], scaled so that the mean square of each is that of the row of ``models`` [T, width]."""
    result: torch.Tensor = form_for_rows("match_sizes", rows).match_sizes(rows, models)
    return result


def scan_mamba2(
    rows: torch.Tensor, weights: StateWeights, shape: Mamba2Shape, states: torch.Tensor, spans: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of a Mamba 2 layer for rows [T, inner + channels + heads]: [T, inner]; advance the states.

    ``torch_mamba`` defines it, and ``spans``.
    """
    result: torch.Tensor = form_for_rows("scan_mamba2", rows).scan_mamba2(rows, weights, shape, states, spans)
    return result


def convolve_channels(
    rows: torch.Tensor, weights: StateWeights, shape: Mamba1Shape, states: torch.Tensor, spans: torch.Tensor
) -> torch.Tensor:
    """Return the convolved channels of a Mamba 1 layer for rows [T, 2 * inner]: [T, inner]; advance their part of the
    states. ``torch_selective`` defines it."""
    result: torch.Tensor = form_for_rows("convolve_channels", rows).convolve_channels(
        rows, weights, shape, states, spans
    )
    return result


def scan_channels(
    rows: torch.Tensor,
    active: torch.Tensor,
    steps: torch.Tensor,
    keys: torch.Tensor,
    weights: StateWeights,
    shape: Mamba1Shape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of a Mamba 1 layer for rows [T, 2 * inner]: [T, inner]; advance the states.

    ``torch_selective`` defines it.
    """
    result: torch.Tensor = form_for_rows("scan_channels", rows).scan_channels(
        rows, active, steps, keys, weights, shape, states, spans
    )
    return result


def scale_logits(logits: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
    """Return cap * tanh(scale * logits / cap), or scale * logits without a cap; float32 [R, V], overwritten."""
    result: torch.Tensor = form_for_rows("scale_logits", logits).scale_logits(logits, scale, cap)
    return result


def route(logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts of each row of float32 ``logits`` [T, experts], best first, and their weights.

    Both are [T, chosen], int64 and float32. A shared expert has one more logit and weight in each row.
    """
    result: tuple[torch.Tensor, torch.Tensor] = form_for_rows("route", logits).route(logits, bias, routing)
    return result


def mix_experts(
    x: torch.Tensor,
    experts: Experts,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    weighs_inputs: bool = False,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' MLPs for rows x [T, hidden]: [T, hidden].

    ``ids`` and ``weights``: from ``route``. ``shared`` [T, hidden]: the outputs of the expert that computes all rows.
    ``weighs_inputs``: as in ``Routing``.
    """
    result: torch.Tensor = form_of_stacked("mix_experts", experts.gate_up).mix_experts(
        x, experts, ids, weights, shared, activation, weighs_inputs=weighs_inputs
    )
    return result


def choose_page_format(layer: LayerKV, dtype: torch.dtype, device: torch.device, *, int8: bool = False) -> PageFormat:
    """Choose the page layout of a layer, for a model of ``dtype``. All functions below depend on it.

    ``int8``: keys and values are stored as int8, with one scale per token and head.
    """
    stored_dtype = torch.int8 if int8 else dtype
    kernels = kernel_choice.compiled_kernels() if dtype == torch.bfloat16 and device.type == "cpu" else None
    return (kernels and kernels.page_format(layer, stored_dtype)) or torch_attention.page_format(layer, stored_dtype)


def write_indices(slots: torch.Tensor, page_format: PageFormat) -> torch.Tensor:
    """Convert slots (page * BLOCK_SIZE + offset, int64 [T]) into the indices that ``write_kv`` takes."""
    return slots if page_format.tiled else torch_attention.write_indices(slots, page_format.shape)


def write_kv(keys: torch.Tensor, values: torch.Tensor, pool: PagePool, indices: torch.Tensor) -> None:
    """Store keys [T, kv_heads, dim] and values [T, kv_heads, value_dim]."""
    (tiled_kernels(pool) or torch_attention).write_kv(keys, values, pool, indices)


def has_gpu_rope_write(head_norm: Norm | None, *, is_norm_late: bool, has_scaled_queries: bool) -> bool:
    """Whether the form of ``rope_write`` for GPUs computes this: RMS norms without biases, before the rotation, and
    queries that are not scaled by position."""
    is_rms = head_norm is None or not (head_norm.is_centered or head_norm.bias is not None)
    return is_rms and not is_norm_late and not has_scaled_queries


def rope_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: PagePool,
    indices: torch.Tensor,
    *,
    head_norm: Norm | None = None,
    has_whole_norm: bool = False,
    is_norm_late: bool = False,
    is_interleaved: bool = False,
    query_scales: torch.Tensor | None = None,
    has_normed_values: bool = False,
    is_query_only: bool = False,
) -> torch.Tensor:
    """Rotate queries and keys in ``qkv``, and store keys and values in the pages. Return the queries.

    ``torch_kernels`` defines it.
    """
    options: dict[str, Any] = {
        "head_norm": head_norm,
        "has_whole_norm": has_whole_norm,
        "is_interleaved": is_interleaved,
        "has_normed_values": has_normed_values,
        "is_query_only": is_query_only,
    }
    if is_norm_late or query_scales is not None:
        options |= {"is_norm_late": is_norm_late, "query_scales": query_scales}
    form: Any = tiled_kernels(pool)
    if form is None:
        has_form = has_gpu_rope_write(head_norm, is_norm_late=is_norm_late, has_scaled_queries=query_scales is not None)
        form = form_for_rows("rope_write", qkv) if has_form else torch_kernels
    result: torch.Tensor = form.rope_write(qkv, cos, sin, pool, indices, **options)
    return result


def pack_heads(weight: torch.Tensor) -> PackedWeight:
    """Pack a weight of each head [heads, out, in] for ``linear_heads``."""
    return stack_experts((pack_weight(expert_weight) for expert_weight in weight), len(weight))


def linear_heads(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """Return each head's rows times its own weight: x [T, heads, in] -> [T, heads, out]."""
    result: torch.Tensor = form_of_stacked("linear_heads", packed).linear_heads(x, packed)
    return result


def absorb_queries(
    queries: torch.Tensor, key_up: PackedWeight, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool
) -> torch.Tensor:
    """Return queries for latents [T, heads, rank + rotary], of queries [T, heads, plain + rotary]."""
    result: torch.Tensor = form_of_stacked("absorb_queries", key_up).absorb_queries(
        queries, key_up, cos, sin, is_interleaved=is_interleaved
    )
    return result


def write_latents(
    rows: torch.Tensor,
    norm: Norm,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: PagePool,
    indices: torch.Tensor,
    *,
    is_interleaved: bool,
) -> None:
    """Norm the latents in rows [T, rank + rotary], rotate the rest, and store both in the pages as one key."""
    form: Any = tiled_kernels(pool)
    if form is None:
        has_table = has_table_attention(pool.page_format, rows.device, rows.dtype)
        form = form_for_rows("write_latents", rows) if has_table else torch_latent
    form.write_latents(rows, norm, cos, sin, pool, indices, is_interleaved=is_interleaved)


def plan_attention(
    spans: list[Span],
    *,
    heads: int,
    page_format: PageFormat,
    window: int | None,
    chunk: int | None,
    ends: torch.Tensor | None,
    zero_page: int,
    device: torch.device,
    dtype: torch.dtype,
    has_slopes: bool = False,
    is_window_ahead: bool = False,
    tables: BatchTables | None = None,
) -> AttentionPlan:
    """Plan the attention of a batch. One plan serves all layers of the same page format, head count, window and chunk.

    ``ends``: how far each row sees, the last visible position + 1, int64 [T]: its own position or a later one of its
    span. None: its own. ``dtype``: of the queries. ``has_slopes``: ``attend`` gets slopes. ``is_window_ahead``:
    with a window, rows see as many later positions as earlier ones. ``tables``: of the batch, if a plan of it with the
    same ends has made them before.
    """
    if page_format.tiled:
        return plan_spans(spans, window, ends, chunk=chunk)
    if chunk is None and not has_slopes and has_table_attention(page_format, device, dtype):
        return TablePlan(tables or BatchTables.of_spans(spans, ends, device), window or 0, is_window_ahead)
    return torch_attention.plan_tiles(
        spans,
        heads=heads,
        page_shape=page_format.shape,
        window=window,
        chunk=chunk,
        ends=ends,
        zero_page=zero_page,
        device=device,
    )


def attend(
    queries: torch.Tensor,
    pool: PagePool,
    plan: AttentionPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of queries [T, heads, key_dim] over the pages: [T, heads, value_dim].

    ``sinks`` and ``slopes``, float32 [heads]: as in ``LayerShape``.
    """
    if isinstance(plan, TablePlan):
        kernels: Any = kernel_choice.triton_kernels()
        result: torch.Tensor = kernels.attend(queries, pool, plan, scale=scale, softcap=softcap, sinks=sinks)
        return result
    form: Any = tiled_kernels(pool) or torch_attention
    result = form.attend(queries, pool, plan, scale=scale, softcap=softcap, sinks=sinks, slopes=slopes)
    return result


def scan_gated_delta(
    rows: torch.Tensor,
    gates: torch.Tensor,
    weights: StateWeights,
    shape: GatedDeltaShape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of the gated delta rule for rows [T, channels + inner]: [T, inner]; advance the states.

    ``torch_states`` defines it, and ``spans``.
    """
    result: torch.Tensor = form_for_rows("scan_gated_delta", rows).scan_gated_delta(
        rows, gates, weights, shape, states, spans
    )
    return result


def scan_kimi_delta(
    rows: torch.Tensor, weights: StateWeights, shape: KimiDeltaShape, states: torch.Tensor, spans: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of Kimi Delta Attention for rows [T, channels + heads + 2 * inner]: [T, inner]; advance the
    states.

    ``torch_states`` defines it, and ``spans``.
    """
    result: torch.Tensor = form_for_rows("scan_kimi_delta", rows).scan_kimi_delta(rows, weights, shape, states, spans)
    return result


def convolve_gated(
    rows: torch.Tensor,
    weights: StateWeights,
    shape: ShortConvolutionShape,
    states: torch.Tensor,
    spans: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of a gated short convolution for rows [T, 3 * width]: [T, width]; advance the states."""
    result: torch.Tensor = form_for_rows("convolve_gated", rows).convolve_gated(rows, weights, shape, states, spans)
    return result


def gate_rows(rows: torch.Tensor, gates: torch.Tensor, *, has_softplus: bool = False) -> torch.Tensor:
    """Return rows * sigmoid(gates), or rows * softplus(gates): [T, width]. The rows may be overwritten."""
    if has_softplus:
        return torch_states.gate_rows(rows, gates, has_softplus=True)
    result: torch.Tensor = form_for_rows("gate_rows", rows).gate_rows(rows, gates)
    return result


def build_stack(
    layers: Sequence[DecoderLayer],
    shapes: Sequence[LayerShape],
    embedding: torch.Tensor,
    norm: Norm,
    angles: torch.Tensor,
    heads: int,
    kv: LayerKV,
    *,
    is_interleaved: bool,
    plain_dim: int,
    embedding_scale: float,
) -> Stack | None:
    """Return one kernel for the embedding and all layers, or None if these layers must run kernel by kernel.

    ``embedding`` [vocab, hidden] times its scale is applied before the layers, ``norm`` after the last. ``angles``
    float32 [ropes, positions, 2, rotary / 2] holds the cosines and sines of each rotary embedding. ``plain_dim``: as in
    ``LatentShape``; 0 for other attention.
    """
    kernel_library = library.load_kernels()
    if (
        kernel_library is None
        or not all(map(_fits_stack, shapes, layers))
        or not Stack.supports_layers(layers)
        or not choose_page_format(kv, torch.bfloat16, embedding.device).tiled
    ):
        return None
    return Stack(
        kernel_library,
        layers,
        shapes,
        embedding,
        norm,
        angles,
        heads=heads,
        kv_heads=kv.heads,
        dim=kv.dim,
        is_interleaved=is_interleaved,
        plain_dim=plain_dim,
        embedding_scale=embedding_scale,
    )


def _fits_stack(shape: LayerShape, layer: DecoderLayer) -> bool:
    """Whether ``layers.cpp`` has everything that a layer computes."""
    is_usual = shape.state is None and shape.has_mixer and shape.has_mlp and not shape.has_output_gate
    has_own_kv = shape.heads is None and shape.head_sizes is None and shape.kv_layer is None
    has_plain_values = not (shape.has_normed_values or shape.has_keys_as_values or shape.value_dim is not None)
    has_plain_mlp = not shape.has_dense_beside and shape.mlp_width is None and shape.layer_input is None
    has_plain_scales = shape.mlp_scale is None and shape.gate_deviations is None and layer.output_scale == 1
    has_plain_residual = shape.attention_carry == shape.mlp_carry == 1 and not shape.has_normed_residual
    has_usual_attention = is_usual and has_own_kv and has_plain_values
    return has_usual_attention and has_plain_mlp and has_plain_scales and has_plain_residual


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit of each row and its id."""
    result: tuple[torch.Tensor, torch.Tensor] = form_for_rows("argmax", logits).argmax(logits)
    return result


def top_k(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest logits of each row, descending, and their ids."""
    result: tuple[torch.Tensor, torch.Tensor] = form_for_rows("top_k", logits).top_k(logits, count)
    return result


def softmax_totals(logits: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row's integer softmax weights. ``peaks`` [R] holds the largest logits."""
    result: torch.Tensor = form_for_rows("softmax_totals", logits).softmax_totals(logits, peaks)
    return result


def masked_argmax(logits: torch.Tensor, bits: np.ndarray) -> int:
    """Return the id of the largest logit whose bit is 1. logits [V]; bits uint8 [V / 8 or more], low bit first."""
    result: int = form_for_rows("masked_argmax", logits).masked_argmax(logits, bits)
    return result


def apply_mask(logits: torch.Tensor, bits: np.ndarray) -> None:
    """Set the logits whose bit is 0 to -inf, in place. Shapes as in ``masked_argmax``."""
    form_for_rows("apply_mask", logits).apply_mask(logits, bits)
