"""Chooses the device that a model runs on, and finds out whether a GPU of this machine can be used.

torch is asked about CUDA only if necessary, because CUDA takes seconds to start.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import torch

from parley.model.checkpoint.files import LoadError

log = logging.getLogger("parley.engine")

MIN_CAPABILITY = (8, 0)  # of a GPU: its tensor cores multiply bfloat16
GPU_FILE = Path("/dev/nvidia0")  # exists if NVIDIA's driver has a GPU, even if torch cannot use it
CPU_BUILD = "this torch is a build for CPUs"
# Read by cuBLAS when it starts: with so little memory it does not split the inner dimension of a product (split-K),
# which would give a row other bits in another batch.
CUBLAS_SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


def resolve_device(name: str) -> torch.device:
    """Return the device that the settings name; ``auto``: a GPU if one can be used, else the CPU.

    If a GPU exists and is not used, the reason is logged. Raises LoadError if the device cannot be used.
    """
    if name == "auto" and not (reason := _unusable_reason()):
        return _prepare_gpu(torch.device("cuda"))
    if name in ("auto", "cpu"):
        if _has_gpu():
            has_cuda = torch.version.cuda is not None
            _log_unused_gpu(reason if name == "auto" else "--device auto uses it" if has_cuda else CPU_BUILD)
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise LoadError(f"device {name} is unknown; it must be auto, cpu or cuda.") from None
    if device.type not in ("cpu", "cuda"):
        raise LoadError(f"device {name} is not supported; it must be auto, cpu or cuda.")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise LoadError("device cuda was asked for, but torch finds no usable GPU.")
        if (device.index or 0) >= torch.cuda.device_count():
            raise LoadError(f"device {name} was asked for, but torch finds {torch.cuda.device_count()} GPUs.")
        _prepare_gpu(device)
    return device


@functools.cache
def _log_unused_gpu(reason: str) -> None:
    """Log, once, why the GPU is not used."""
    log.info("There is a GPU, and it is not used: %s.", reason)


def _has_gpu() -> bool:
    """Whether the driver has a GPU."""
    return GPU_FILE.exists()


def _unusable_reason() -> str:
    """Return why no GPU can be used, as the end of a sentence; empty if one can be."""
    if torch.version.cuda is None:
        return CPU_BUILD
    if not torch.cuda.is_available():
        return "torch cannot start CUDA"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"its compute capability is {capability[0]}.{capability[1]}, and 8.0 is the least"
    return ""


def _prepare_gpu(device: torch.device) -> torch.device:
    """Make products of matrices independent of the batch, before cuBLAS starts. Returns the device.

    It becomes the current device of this thread, which loads the model and computes its steps: Triton starts kernels
    there, even if their tensors are on another device.
    """
    for name, value in CUBLAS_SETTINGS.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(device)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return device
