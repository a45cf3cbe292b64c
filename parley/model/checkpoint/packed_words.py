"""Integers of 2 to 8 bits that checkpoints pack into int32 words, and the groups of inputs that share a scale."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parley.model.checkpoint.files import LoadError

GROUP_MULTIPLE = 8  # sizes of groups must be multiples of this
KERNEL_BITS = (2, 3, 4, 8)  # bits of integers with integer zero points that kernels support


def integer_bits(bits: int) -> int:
    """Return the fewest bits, supported by kernels, that hold integers of ``bits`` bits."""
    return next(kernel_bits for kernel_bits in KERNEL_BITS if kernel_bits >= bits)


def packed_size(numbers: int, bits: int) -> int:
    """Return how many words hold this many numbers, if no number crosses two words."""
    return -(-numbers // (32 // bits))


def unpack_crossing(words: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """Unpack ``count`` numbers of at most 8 bits along each row of int32 [m, words], first in the lowest bits; a number
    may lie in two words: uint8 [m, count]."""
    first = torch.arange(count) * bits
    data = F.pad(words.contiguous().view(torch.uint8), (0, 1))  # little-endian, so the bits are one stream
    pair = data[:, first // 8].int() | data[:, first // 8 + 1].int() << 8
    return (pair >> (first % 8) & ((1 << bits) - 1)).to(torch.uint8)


def unpack_rows(words: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """Unpack ``count`` numbers along each row of int32 [m, words], first in the lowest bits: uint8 [m, count]."""
    # No number lies in two bytes if their bits divide 8, and bytes are faster to work on.
    parts = words.contiguous().view(torch.uint8) if 8 % bits == 0 else words
    per_part = 8 * parts.itemsize // bits
    numbers = torch.empty(*parts.shape, per_part, dtype=torch.uint8, device=words.device)
    for position in range(per_part):
        numbers[..., position] = (parts >> (bits * position)) & ((1 << bits) - 1)
    return numbers.view(len(words), -1)[:, :count]


def count_groups(group: int | None, inputs: int) -> int:
    """Return the number of groups of ``group`` inputs; None: all inputs are one."""
    return -(-inputs // min(group or inputs, inputs))


def input_order(name: str, group: int, index: torch.Tensor) -> torch.Tensor | None:
    """Return the inputs in the order of their groups, int64 [in]; None if they are in that order.

    ``index`` int32 [in], the tensor ``name``, holds the group of each input. Raises LoadError if a group does not have
    ``group`` inputs.
    """
    expected = torch.arange(len(index), dtype=index.dtype) // group
    if torch.equal(index, expected) or not index.any():  # some writers leave zeros if nothing was reordered
        return None
    order = index.argsort(stable=True)
    if not torch.equal(index[order], expected):
        raise LoadError(f"Tensor {name} does not put {group} inputs into each group, so the weight cannot be read.")
    return order
