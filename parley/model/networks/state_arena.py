"""The states of sequences, for models with layers that keep a state (``native/state_shape.py``).

A slot holds a sequence's state: one row in the tensor of each such layer. The first slots belong to running sequences;
the others hold snapshots and the states after drafts (``core/pages/state_slots.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from parley.core.sequence import StateWrite, StepStates
from parley.native.layout import RowSpan
from parley.types import LayerRegion


class BatchStates(NamedTuple):
    """The states of a batch: those of each layer that keeps one, float32 [slots, size], and ``spans`` int64 [S, 5] as
    in ``native.scan_gated_delta``. A sequence has a span for each state that is written."""

    layers: list[torch.Tensor]
    spans: torch.Tensor


class StateArena:
    """``slots`` slots for states. ``sizes``: the size of a state in each layer that keeps one, in numbers. Memory is
    only reserved: a slot uses physical memory once it is first written. ``memory``: uint8, ``slots`` times
    ``state_slot_bytes``, to use instead of new memory."""

    def __init__(
        self,
        sizes: Sequence[int],
        slots: int,
        device: torch.device | str = "cpu",
        memory: torch.Tensor | None = None,
    ):
        if memory is None:
            self.layers = [torch.empty(slots, size, dtype=torch.float32, device=device) for size in sizes]
        else:
            parts = memory.view(torch.float32).split([slots * size for size in sizes])
            self.layers = [part.view(slots, -1) for part in parts]

    def select_states(self, spans: Sequence[RowSpan], uses: Sequence[StepStates]) -> BatchStates:
        """Return the states of a batch, whose spans read and write the slots in ``uses``."""
        rows: list[tuple[int, int, int, int, int]] = []
        for span, (slot, writes) in zip(spans, uses, strict=True):
            first, is_later = span.first, 0
            for tokens, target in writes:
                rows.append((first, tokens, slot, target, is_later))
                first, slot, is_later = first + tokens, target, 1
        return BatchStates(self.layers, torch.tensor(rows, dtype=torch.int64).view(-1, 5))

    def copy_state(self, source: int, target: int) -> None:
        """Copy the state of one slot into another."""
        for layer in self.layers:
            layer[target].copy_(layer[source])


def state_regions(sizes: Sequence[int], slots: int, first_slot: int, offset: int) -> list[LayerRegion]:
    """Return the regions of the slots from ``first_slot`` on, in an arena whose memory begins at ``offset``."""
    regions: list[LayerRegion] = []
    for size in sizes:
        stride = size * torch.float32.itemsize
        regions.append(LayerRegion(offset + first_slot * stride, stride, stride))
        offset += slots * stride
    return regions


def state_slot_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of one sequence's states."""
    return sum(sizes) * torch.float32.itemsize


def temporary_states(sizes: Sequence[int], spans: Sequence[RowSpan], device: torch.device) -> BatchStates:
    """Return states, on the device, for a batch whose sequences all begin in it and do not continue."""
    if not sizes:
        return BatchStates([], torch.empty(0, 5, dtype=torch.int64))
    assert all(span.count == span.length for span in spans), "a sequence continues without its state"
    return StateArena(sizes, len(spans), device).select_states(
        spans, [advance_slot(*numbered_span) for numbered_span in enumerate(spans)]
    )


def advance_slot(slot: int, span: RowSpan) -> StepStates:
    """Return the use of one slot, whose state advances by the tokens of a span."""
    return StepStates(-1 if span.count == span.length else slot, [StateWrite(span.count, slot)])
