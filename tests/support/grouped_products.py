"""What tests expect of the products and sizes of weights in groups, on every level of the kernels."""

from __future__ import annotations

from parley.native import kernel_choice


def largest_product_error(float32_error: float = 2e-6) -> float:
    """The relative error (L2) of products with random rows. ``float32_error``: where only sums in float32 are rounded.

    Kernels of AVX2, and of AVX-512 without bf16, round rows to 16 bits. Torch forms round weights to bfloat16.
    """
    kernels = kernel_choice.compiled_kernels()
    if kernels is None:
        return 4e-3
    return float32_error + (6e-6 if kernels.level in ("avx2", "avx512") else 0)


def padded_outputs(outputs: int) -> int:
    """The outputs of a packed weight, which fill whole panels of the kernels."""
    kernels = kernel_choice.compiled_kernels()
    assert kernels is not None
    return -(-outputs // kernels.grouped_panel_outputs) * kernels.grouped_panel_outputs
