"""Pads the products of weights that the code of a Transformers model multiplies itself, such as those of experts and
routers.

torch chooses the kernel of a matrix product by its number of rows, and kernels add in different orders, so the bits of
a row would depend on the number of rows. They do not if rows are padded to a multiple of 16, as in ``torch_attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parley.native.torch_forms.torch_attention import pad_rows

PRODUCTS: set[Callable[..., Any]] = {
    F.linear,
    torch.Tensor.__matmul__,
    torch.Tensor.bmm,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.bmm,
    torch.matmul,
    torch.mm,
}


class PaddedWeight(torch.Tensor):
    """A weight [..., in, out], or [out, in] for ``F.linear``, whose products with rows [..., R, in] pad these.

    Slices and casts of such a weight are padded weights too. Results of other operations are plain tensors.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in PRODUCTS and len(args) > 1 and args[0].dim() > 1:
                rows, *others = args
                return func(pad_rows(rows), *others, **kwargs or {})[..., : rows.shape[-2], :]
            result = func(*args, **kwargs or {})
        is_weight = isinstance(result, torch.Tensor) and args and isinstance(args[0], cls)
        return result.as_subclass(cls) if is_weight else result


def pad_products(module: nn.Module) -> None:
    """Pad the rows of products with the matrices that a module itself holds, except those of an embedding."""
    if isinstance(module, nn.Embedding):
        return
    for name, weight in module.named_parameters(recurse=False):
        if weight.dim() > 1:
            setattr(module, name, nn.Parameter(weight.detach().as_subclass(PaddedWeight), requires_grad=False))
