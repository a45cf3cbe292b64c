"""The kernels of the CPU path, by name. One signature each; a row's bits never depend on the other rows.

This is the table: the model calls ``native.linear``, ``native.attend`` and so on, and what stands behind a name may
change per machine. The torch forms also run on an accelerator.
"""

from parley.native.torch_attention import Group, attend, places, plan, write
from parley.native.torch_kernels import (
    Packed,
    add_rms_norm,
    embed,
    linear,
    pack,
    rms_norm,
    rope_write,
    silu_mul,
)

Plan = list[Group]

__all__ = [
    "Packed",
    "Plan",
    "add_rms_norm",
    "attend",
    "embed",
    "linear",
    "pack",
    "places",
    "plan",
    "rms_norm",
    "rope_write",
    "silu_mul",
    "write",
]
