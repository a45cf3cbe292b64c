"""The states of running sequences, for models with layers that keep a state (``native/state_shape.py``).

A sequence's state lies in the row of its slot. It is the state after the tokens that have been computed, so it cannot
serve a sequence that continues from fewer of them: the scheduler lets such a sequence begin again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from parley.native.layout import Span


class BatchStates(NamedTuple):
    """The states of a batch: those of each layer that keeps one, float32 [slots, size], and ``spans`` int64 [S, 4] as
    in ``native.scan_gated_delta``."""

    layers: list[torch.Tensor]
    spans: torch.Tensor


class StateArena:
    """States for ``slots`` sequences, of layers with states of ``sizes`` numbers. Memory is only reserved: a slot takes
    physical memory when it is first used."""

    def __init__(self, sizes: Sequence[int], slots: int, device: torch.device | str = "cpu"):
        self.layers = [torch.empty(slots, size, dtype=torch.float32, device=device) for size in sizes]

    def select_states(self, spans: Sequence[Span], slots: Sequence[int]) -> BatchStates:
        """Return the states of a batch: that of each span lies in the slot of the same number."""
        rows = [
            (span.first, span.count, slot, span.count == span.length) for span, slot in zip(spans, slots, strict=True)
        ]
        return BatchStates(self.layers, torch.tensor(rows, dtype=torch.int64).view(-1, 4))

    def copy_state(self, source: int, target: int) -> None:
        """Copy the state of one slot into another."""
        for layer in self.layers:
            layer[target].copy_(layer[source])


def state_slot_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of one sequence's states."""
    return sum(sizes) * torch.float32.itemsize


def temporary_states(sizes: Sequence[int], spans: Sequence[Span]) -> BatchStates:
    """Return states for a batch whose sequences all begin in it and do not continue."""
    assert not sizes or all(span.count == span.length for span in spans), "a sequence continues without its state"
    return StateArena(sizes, len(spans)).select_states(spans, range(len(spans)))
