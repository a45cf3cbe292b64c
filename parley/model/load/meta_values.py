"""Runs code on tensors of torch's meta device, which have no data, even if the code reads values of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

META = torch.device("meta")
SCALAR_OPERATORS = {
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten._local_scalar_dense.default,
}


class MetaValues(TorchDispatchMode):
    """Returns 0 if code reads a value of a tensor without data, and True if it compares such tensors.

    The result of an operation has no data if one of its tensors has none. An operation that would write such numbers
    into a tensor with data raises TypeError.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if func in SCALAR_OPERATORS:
            return 0
        if func is torch.ops.aten.equal.default:
            return True
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if func._schema.is_mutable and not args[0].is_meta:
            raise TypeError(f"{func} writes a tensor without data into one that has data")
        if any(not tensor.is_meta for tensor in tensors):
            args, kwargs = tree_map(_without_data, (args, kwargs))
        return func(*args, **kwargs)


def _without_data(value: Any) -> Any:
    return value.to(META) if isinstance(value, torch.Tensor) else value
