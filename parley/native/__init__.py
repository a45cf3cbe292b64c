"""The kernel table: one function per kernel. The bits of a row never depend on the other rows.

The model calls ``native.linear``, ``native.attend`` and so on, which are in ``kernel_table``. ``kernel_choice`` decides
which implementation a call runs: compiled C++, Triton, or torch operators. The docstrings of the latter define each
kernel.
"""

from parley.native.batch_tables import BatchTables, TablePlan
from parley.native.compiled_forms.compiled_layers import Stack
from parley.native.experts import Experts, Mixture, Unstackable, stack_experts
from parley.native.kernel_choice import (
    has_gpu_experts,
    has_quantized_kernels,
    has_table_attention,
    kernels_in_use,
    kernels_of_parts,
    packed_layout_id,
)
from parley.native.kernel_table.attention_kernels import (
    AttentionPlan,
    absorb_queries,
    attend,
    choose_page_format,
    has_gpu_rope_write,
    plan_attention,
    rope_write,
    write_indices,
    write_kv,
    write_latents,
)
from parley.native.kernel_table.decoder_stack import build_stack
from parley.native.kernel_table.linear_kernels import (
    LoraRows,
    PackedLora,
    QuantizedRows,
    group_lora_rows,
    linear,
    linear_heads,
    lm_head_logits,
    mix_experts,
    pack_grouped,
    pack_heads,
    pack_int8,
    pack_lora,
    pack_weight,
    quantize_rows,
    route,
    weigh_experts,
)
from parley.native.kernel_table.logit_kernels import (
    apply_mask,
    argmax,
    masked_argmax,
    scale_logits,
    softmax_totals,
    top_k,
)
from parley.native.kernel_table.row_kernels import (
    activate,
    add_norm,
    gate_rows,
    limit_gates,
    match_sizes,
    norm_rows,
    sparsify_gates,
)
from parley.native.kernel_table.state_kernels import (
    convolve_channels,
    convolve_gated,
    scan_channels,
    scan_gated_delta,
    scan_kimi_delta,
    scan_mamba2,
)
from parley.native.layer import AltUpWeights, DecoderLayer, StateWeights
from parley.native.layer_shape import AltUpShape, LatentShape, LayerShape, Norm, Routing
from parley.native.lowrank import LowRank
from parley.native.packed import PackedWeight
from parley.native.pool import LayerPages, PageFormat
from parley.native.state_shape import Mamba1Shape, Mamba2Shape
from parley.native.torch_forms.torch_grouped import (
    GroupedPieces,
    GroupedWeight,
    PackedBlockWeight,
    dequantize_grouped,
    round_int4,
)
from parley.native.torch_forms.torch_kernels import EmbeddingRows, embed_tokens

__all__ = [
    "AltUpShape",
    "AltUpWeights",
    "AttentionPlan",
    "BatchTables",
    "DecoderLayer",
    "EmbeddingRows",
    "Experts",
    "GroupedPieces",
    "GroupedWeight",
    "LatentShape",
    "LayerPages",
    "LayerShape",
    "LoraRows",
    "LowRank",
    "Mamba1Shape",
    "Mamba2Shape",
    "Mixture",
    "Norm",
    "PackedBlockWeight",
    "PackedLora",
    "PackedWeight",
    "PageFormat",
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
    "limit_gates",
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
    "weigh_experts",
    "write_indices",
    "write_kv",
    "write_latents",
]
