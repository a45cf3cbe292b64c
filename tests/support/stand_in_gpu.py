"""A stand-in for a GPU: its tensors say that they are there, and an operator on tensors of both devices fails.

The code for GPUs runs as on a machine that has one, in torch's operators and in the memory of the host. So it finds
tensors that were made on the wrong device, and results that a GPU would not hand to numpy or to compiled code. It does
not find what depends on the hardware: bits, times, and the order of work.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from parley.model.load import devices

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
FREE_BYTES = 1 << 30
PROPERTIES = {"device": GPU, "is_cuda": True, "is_cpu": False}
LEAVING = {"numpy", "__array__", "data_ptr"}  # refused: only the GPU can read its memory
INDEXING = {"__getitem__", "__setitem__", "index_put", "index_put_"}  # the indices may be the host's
MOVING = {"to", "cpu"}  # to the other device
TAKING_BOTH = MOVING | {"copy_"}


class MixedDevices(RuntimeError):
    """An operator on tensors of the host and of the GPU."""


class GpuTensor(torch.Tensor):
    """A tensor on the stand-in."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        return run_operator(function, arguments, options or {})


def run_operator(function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Run an operator whose tensors or result may be on the GPU. Raises MixedDevices."""
    name = getattr(function, "__name__", "")
    if name == "__get__" and (property_name := getattr(function.__self__, "__name__", "")) in PROPERTIES:
        return PROPERTIES[property_name]
    if name == "_has_compatible_shallow_copy_type":  # whether a parameter is moved in place
        return False
    if name in LEAVING:
        raise TypeError(f"{name} of a tensor on the GPU")
    if name == "cuda":
        return run_operator(torch.Tensor.to, (arguments[0], GPU), {})
    operands = tensors_of((arguments, options))
    check_devices(name, arguments, operands)
    target = HOST if name == "cpu" else target_device(name, arguments, options)
    first = arguments[0] if operands else None
    if target is not None:
        is_result_there = target.type == "cuda"
    elif name in INDEXING or name.endswith("_"):
        is_result_there = isinstance(first, GpuTensor)
    else:
        is_result_there = any(isinstance(operand, GpuTensor) for operand in operands)
    moves = name in MOVING and isinstance(first, GpuTensor) != is_result_there
    host_arguments = [HOST if is_device(argument) else argument for argument in arguments]
    host_options = {key: HOST if is_device(value) else value for key, value in options.items() if key != "pin_memory"}
    with torch._C.DisableTorchFunctionSubclass():
        result = function(*host_arguments, **host_options)
        if moves and result.data_ptr() == arguments[0].data_ptr():
            result = result.clone()
        kept = () if moves else operands
        kind = GpuTensor if is_result_there else torch.Tensor
        return pytree.tree_map_only(
            torch.Tensor, lambda x: x if any(x is operand for operand in kept) else x.as_subclass(kind), result
        )


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def is_device(value: object) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda"))


def target_device(name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> torch.device | None:
    """Return the device that a call names for its result."""
    named = options.get("device")
    if named is None and name == "to" and len(arguments) > 1:
        named = arguments[1].device if isinstance(arguments[1], torch.Tensor) else arguments[1]
    return torch.device(named) if is_device(named) else None


def check_devices(name: str, arguments: Sequence[Any], operands: list[torch.Tensor]) -> None:
    """Check that the tensors of an operator are on one device. Raises MixedDevices."""
    if name in TAKING_BOTH:
        return
    if name in INDEXING and isinstance(arguments[0], GpuTensor):
        # Slices are copied from anywhere; values at the places of a tensor of indices must be there already.
        has_indices = name != "__setitem__" or bool(tensors_of(arguments[1]))
        operands = [arguments[0], *tensors_of(arguments[2:])] if has_indices else []
    # Operators take single numbers from the host, and read them before they start.
    strangers = [operand for operand in operands if not isinstance(operand, GpuTensor) and operand.dim()]
    if strangers and any(isinstance(operand, GpuTensor) for operand in operands):
        places = ", ".join(f"{tuple(operand.shape)} on {operand.device}" for operand in operands)
        raise MixedDevices(f"{name}: {places}")


class _CreatingMode(TorchFunctionMode):
    """Sends calls to the stand-in that create tensors there, or move them."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Sequence[Any] = (), options: Any = None
    ) -> Any:
        options = options or {}
        name = getattr(function, "__name__", "")
        if name == "pin_memory" and not isinstance(arguments[0], GpuTensor):
            return arguments[0]
        target = target_device(name, arguments, options)
        if name == "cuda" or (target is not None and target.type == "cuda"):
            return run_operator(function, arguments, options)
        return function(*arguments, **{key: value for key, value in options.items() if key != "pin_memory"})


class _DoneEvent:
    """An event of work that is done."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _run_with_gpu(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Return ``Thread.run`` for threads that create tensors on the stand-in: a mode is of one thread."""

    def run_thread(thread: threading.Thread) -> None:
        with _CreatingMode():
            run(thread)

    return run_thread


@contextmanager
def stand_in_gpu() -> Iterator[None]:
    """Within it, ``cuda`` is the stand-in, of compute capability 9.0."""
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "get_device_capability": (9, 0), "set_device": None,
        "mem_get_info": (FREE_BYTES, FREE_BYTES), "memory_allocated": 0, "max_memory_allocated": 1 << 20,
        "reset_peak_memory_stats": None, "synchronize": None, "empty_cache": None,
    }  # fmt: skip
    functions = {name: functools.partial(lambda answer, *_: answer, answer) for name, answer in answers.items()}
    with (
        mock.patch.multiple(torch.cuda, Event=_DoneEvent, **functions),
        mock.patch.object(devices, "_prepare_gpu", lambda device: device),  # it sets up cuBLAS
        mock.patch.object(threading.Thread, "run", _run_with_gpu(threading.Thread.run)),
        _CreatingMode(),
    ):
        yield
