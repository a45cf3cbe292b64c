"""Multi-head latent attention (MLA, arXiv 2405.04434) in torch operators: everything but the attention over pages.

Keys and values of a head are never computed (the absorbed form). Queries are projected so that they can be multiplied
by latents; attention gives a sum of latents for each head, which is then projected to a value. In long prompts,
computing keys and values would be faster, but it rounds differently: a token's bits would depend on the step that
computed it.
"""

from __future__ import annotations

import torch

from parley.native.layer_shape import Norm
from parley.native.pool import LayerPages
from parley.native.torch_forms.torch_attention import pad_rows, store_rows
from parley.native.torch_forms.torch_kernels import TorchPacked, norm_rows, rotate_rows


def linear_heads(x: torch.Tensor, packed: TorchPacked) -> torch.Tensor:
    """Return each head's rows times its own weight: x [T, heads, in], a weight of each head -> [T, heads, out]."""
    products = torch.bmm(pad_rows(x.transpose(0, 1)), packed.weight.transpose(1, 2))
    return products[:, : len(x)].transpose(0, 1)


def absorb_queries(
    queries: torch.Tensor, key_up: TorchPacked, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool
) -> torch.Tensor:
    """Return queries for latents [T, heads, rank + rotary], of queries [T, heads, plain + rotary].

    ``key_up`` replaces their first numbers, and the last ones are rotated; cos and sin are those of ``rope_write``.
    """
    unrotated, rotary_part = queries.split([queries.shape[-1] - cos.shape[-1], cos.shape[-1]], -1)
    rotated = rotate_rows(rotary_part.float(), cos, sin, is_interleaved).to(queries.dtype)
    return torch.cat((linear_heads(unrotated, key_up), rotated), -1)


def write_latents(
    rows: torch.Tensor,
    norm: Norm,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: LayerPages,
    indices: torch.Tensor,
    *,
    is_interleaved: bool,
) -> None:
    """Norm the latents in rows [T, rank + rotary], rotate the rest, and store both in the pages as one key."""
    latents, rotary_part = rows.split([norm.weight.shape[-1], cos.shape[-1]], -1)
    normed = norm_rows(latents, norm)
    assert isinstance(normed, torch.Tensor)
    rotated = rotate_rows(rotary_part[:, None].float(), cos, sin, is_interleaved).to(rows.dtype)
    store_rows(torch.cat((normed[:, None], rotated), -1), pool, indices)
