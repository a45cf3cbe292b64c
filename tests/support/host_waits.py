"""Fails where operators would wait for a GPU, or copy from the host, if their tensors were there.

A graph of a GPU's work cannot be recorded then. It is found on the CPU, by the operators that torch runs. It does not
find copies between devices (``to``), which do nothing where all tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# The size or the value of their results is known on the host alone, or they copy numbers of the host.
WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "is_nonzero", "histc", "_unique2"),
    *("unique_consecutive", "unique_dim", "lift_fresh", "repeat_interleave", "_assert_async"),
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
LEAVING = ("cpu", "numpy", "tolist")  # methods that bring numbers to the host; on the CPU they run no operator


class HostWait(RuntimeError):
    """An operator that waits for the GPU, or copies from the host."""


@contextmanager
def refuse_host_waits() -> Iterator[None]:
    """Within it, operators that wait raise HostWait."""
    patches = {name: _refuse_leaving(name) for name in LEAVING}
    with _RefusingMode(), mock.patch.multiple(torch.Tensor, **patches):
        yield


def _refuse_leaving(name: str) -> Callable[..., Any]:
    def refuse(*arguments, **options):
        raise HostWait(f"{name} waits for the device")

    return refuse


class _RefusingMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        name = function._schema.name.removeprefix("aten::")
        # In inference mode, operators made of others come here whole.
        with self:
            result = function.decompose(*arguments, **options)
        if result is not NotImplemented:
            return result
        waits = name in WAITING and options.get("output_size") is None
        if name in INDEXING:
            waits = any(
                argument is not None and argument.dtype in (torch.bool, torch.uint8) for argument in arguments[1]
            )
        if waits:
            raise HostWait(f"{name} waits for the device")
        return function(*arguments, **options)
