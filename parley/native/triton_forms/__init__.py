"""Kernels for NVIDIA GPUs, in Triton. One file has the kernels of one operator and the function that launches them.

A module of this folder is only imported where Triton is installed, as it is with CUDA builds of torch. The functions
have the signatures of the torch forms of the same names, which define the results, but for members of rare families:
``native/kernel_choice.py`` gives those to the torch forms.

Kernels get their constant sizes and switches as one frozen dataclass, a ``constexpr``. ``is_wide`` in it is set in
Triton's interpreter, which cannot compute with bfloat16: operands are widened to float32 there, as no GPU does.
"""
