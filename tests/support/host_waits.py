"""Fails where operators would wait for a GPU, or copy from the host, if their tensors were there.

A graph of a GPU's work cannot be recorded then. It is found on the CPU, by the operators that torch runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# The size or the value of their results is known on the host alone.
WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "is_nonzero", "histc", "_unique2"),
    *("unique_consecutive", "unique_dim", "lift_fresh", "repeat_interleave", "_assert_async"),
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class HostWait(RuntimeError):
    """An operator that waits for the GPU, or copies from the host."""


@contextmanager
def refuse_host_waits() -> Iterator[None]:
    """Within it, operators that wait raise HostWait."""
    with _RefusingMode(), mock.patch.object(torch.Tensor, "tolist", _refuse_list):
        yield


def _refuse_list(tensor: torch.Tensor) -> None:
    raise HostWait("tolist waits for the device")


class _RefusingMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        name = function._schema.name.removeprefix("aten::")
        # Numbers repeated equally often, ``self_int``, have a size that the host knows.
        waits = name in WAITING and function._overloadname != "self_int"
        if name in INDEXING:
            waits = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in arguments[1])
        if waits:
            raise HostWait(f"{name} waits for the device")
        return function(*arguments, **options)
