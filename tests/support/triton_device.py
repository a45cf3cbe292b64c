"""Where tests run the kernels in Triton: on a GPU if there is one, else in Triton's interpreter, on CPU tensors.

A test module imports this first: the interpreter is chosen when kernels are defined. Without Triton the module is
skipped. The interpreter rounds float32 to bfloat16 by cutting it off, so tests use float16.
"""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="Triton is not installed (make test-triton)")

from parley.native import kernel_choice  # noqa: E402


def _multiply_in_fixed_order() -> None:
    """Have the interpreter add the products of ``tl.dot`` one after the other, for each element of a tile.

    It calls numpy's matmul, whose order of sums depends on the processor, on the size of the tile, and on the place of
    a row in it. On a GPU, each element is the same chain of products.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def create_dot(builder, left, right, sums, *options):
        for k in range(left.data.shape[-1]):
            column = TensorHandle(left.data[..., k : k + 1], left.dtype)
            row = TensorHandle(right.data[..., k : k + 1, :], right.dtype)
            sums = multiply(builder, column, row, sums, *options)
        return sums

    InterpreterBuilder.create_dot = create_dot


if not HAS_GPU:
    _multiply_in_fixed_order()

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.float16
IS_NIGHT = bool(os.environ.get("PARLEY_NIGHTLY")) or HAS_GPU


def use_triton(patch: pytest.MonkeyPatch) -> None:
    """Have ``native`` use the kernels in Triton for tensors on ``DEVICE``, as it does on a GPU."""
    kernels = kernel_choice.triton_kernels()
    assert kernels is not None
    patch.setattr(kernel_choice, "compiled_kernels", lambda: None)

    def own_kernels(device, dtype, compiled_dtype=torch.bfloat16):
        return kernels if dtype in kernel_choice.TRITON_DTYPES else None

    patch.setattr(kernel_choice, "own_kernels", own_kernels)


def random_rows(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)
