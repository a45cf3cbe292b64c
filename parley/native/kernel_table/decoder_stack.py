"""All layers of a decoder as one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parley.native import library
from parley.native.compiled_forms.compiled_layers import Stack
from parley.native.kernel_table.attention_kernels import choose_page_format
from parley.native.layer import DecoderLayer
from parley.native.layer_shape import LayerShape, Norm
from parley.native.layout import LayerKV


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
    is_usual = shape.state is None and shape.has_attention and shape.has_mlp
    is_usual = is_usual and not (shape.has_output_gate or shape.has_latent_gates)
    has_own_kv = shape.heads is None and shape.head_sizes is None and shape.kv_layer is None
    has_plain_values = not (shape.has_normed_values or shape.has_keys_as_values or shape.value_dim is not None)
    has_plain_mlp = not shape.has_parallel_dense_mlp and shape.mlp_width is None and shape.layer_input is None
    has_plain_mlp = has_plain_mlp and (layer.mixture is None or layer.mixture.latent_down is None)
    has_plain_scales = shape.mlp_scale is None and layer.output_scale == 1
    has_plain_gates = shape.gate_deviations is None and shape.mlp_limits is None
    has_plain_residual = (
        shape.attention_residual_factor == shape.mlp_residual_factor == 1 and not shape.has_normed_residual
    )
    has_plain_norms = layer.attended_norm is None and layer.active_norm is None and not shape.routes_early
    has_plain_norms = has_plain_norms and not (shape.has_gated_attention_norm or shape.has_gated_mlp_norm)
    has_usual_attention = is_usual and has_own_kv and has_plain_values and shape.qkv_limit is None
    has_plain_rows = has_plain_residual and has_plain_norms
    return has_usual_attention and has_plain_mlp and has_plain_scales and has_plain_gates and has_plain_rows
