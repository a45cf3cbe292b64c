"""Linear layers and attention of encoders in slices, with a pause between slices, however large the image is.

The engine's steps wait while an encoder computes. One block of an encoder would take minutes for a large image, most
of it in one attention layer, and a server that waits for a step that long counts as hung. So linear layers and
attention compute a slice of their rows at a time, and call ``pause`` before each one. The size of a slice depends on
shapes only, never on time, so an item has the same bits at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from parley import native
from parley.model.media.encoder import encoder_blocks, encoder_parts, pause_encoding

ATTENTION_NAME = "parley_encoder"  # Transformers' name for ``sliced_attention``
SLICE_PRODUCTS = 1 << 33  # multiplications in a slice: a tenth of a second on two slow cores
MIN_ROWS = 256  # of a slice; with fewer the kernels would be inefficient

ComputeRows = Callable[[torch.Tensor], torch.Tensor]


def optimize_encoders(model: Any) -> Any:
    """Choose kernels for the encoders of a model of Transformers, and return it.

    Linear layers in bfloat16 move to the native kernels; those in float32 keep torch's.
    """
    for part in encoder_parts(model):
        # Others compute attention in code of their own
        if getattr(part, "_supports_sdpa", False) and part._can_set_attn_implementation():  # type: ignore[operator]
            part.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
        for module in part.modules():
            if type(module) is nn.Linear:
                _slice_linear(module)
            elif type(module) is nn.Conv3d:
                _slice_patches(module)
    for block in encoder_blocks(model):
        block.register_forward_pre_hook(lambda *_: pause_encoding())
    return model


def sliced_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention that sees both ways: query [1, heads, T, dim] and so on -> [1, T, heads, value dim]."""
    length = query.shape[2]
    rows = slice_rows(2 * query.shape[0] * query.shape[1] * query.shape[3] * key.shape[2])
    options["is_causal"] = False
    parts = []
    for start in range(0, length, rows):
        pause_encoding()
        mask = attention_mask
        if mask is not None and mask.shape[2] == length:
            mask = mask[:, :, start : start + rows]
        part, _ = sdpa_attention_forward(module, query[:, :, start : start + rows], key, value, mask, **options)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1), None


AttentionInterface.register(ATTENTION_NAME, sliced_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def slice_rows(products: int) -> int:
    """Return the number of rows in a slice, if each takes this many multiplications."""
    return max(MIN_ROWS, SLICE_PRODUCTS // products)


def _slice_linear(module: nn.Linear) -> None:
    """Replace the computation of a layer; one in bfloat16 holds no weight of its own afterwards."""
    compute: ComputeRows = module.forward
    if module.weight.dtype == torch.bfloat16:
        compute = partial(native.linear, packed=native.pack_weight(module.weight, module.bias))
        module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
    products = module.in_features * module.out_features
    module.forward = partial(_compute_last_axis, compute=compute, products=products)  # type: ignore[method-assign]


def _slice_patches(module: nn.Conv3d) -> None:
    """Replace the computation of the layer that embeds patches [patches, channels, frames, height, width]."""
    products = module.weight.numel()
    module.forward = partial(_compute_rows, compute=module.forward, products=products)  # type: ignore[method-assign]


def _compute_last_axis(x: torch.Tensor, *, compute: ComputeRows, products: int) -> torch.Tensor:
    """Apply a linear layer to x [..., in]."""
    y = _compute_rows(x.flatten(0, -2), compute=compute, products=products)
    return y.view(*x.shape[:-1], -1)


def _compute_rows(x: torch.Tensor, *, compute: ComputeRows, products: int) -> torch.Tensor:
    """Compute a slice of the rows of x at a time. ``products``: multiplications for each row."""
    parts = []
    for part in x.split(slice_rows(products)):
        pause_encoding()
        parts.append(compute(part))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
