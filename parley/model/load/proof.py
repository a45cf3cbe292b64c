"""The numeric check of the Transformers backend: logits over KV pages against those of unmodified Transformers.

Two sequences are run over pages in uneven pieces packed together, and each one at once in Transformers' plainest form,
with its own masks. State other than keys and values, a mask that the attention call does not report, ignored positions:
each makes most positions differ. Sliding windows are narrowed during the check, or none would take effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from parley.core.sequence import BLOCK_SIZE
from parley.model.networks.network import DecoderNetwork, PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.native.layout import Span

SEQUENCE_LENGTHS = (26, 23)  # tokens of the two sequences
PROBE_STEPS = (((0, 9),), ((0, 1), (1, 17)), ((1, 1), (0, 16)), ((1, 5),))  # per step: (sequence, tokens)
NARROW_WINDOW = 8


@torch.inference_mode()
def transformers_deviation(network: DecoderNetwork, model: PreTrainedModel) -> float:
    """Return the relative error (L2) of the logits over pages, as the median over positions.

    The median, because in a mixture of experts rounding alone may send single tokens to other experts. Only positions
    after a sequence's first step count, because a model that reads nothing from the pages is right in the others.
    """
    sequences = [
        torch.linspace(1, network.vocab_size - 1, length, device=model.device).long() for length in SEQUENCE_LENGTHS
    ]
    with _narrow_windows(model):
        expected = torch.cat(_transformers_logits(model, sequences))
        actual = torch.cat(_paged_logits(network, sequences, model.dtype))
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    first_steps = [next(count for step in PROBE_STEPS for at, count in step if at == n) for n in range(len(sequences))]
    parts = zip(errors.split(SEQUENCE_LENGTHS), first_steps, strict=True)
    return float(torch.cat([part[count:] for part, count in parts]).median())


def _transformers_logits(model: PreTrainedModel, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    decoder = model.get_decoder()
    implementation = decoder.config._attn_implementation
    decoder.set_attn_implementation("eager")
    try:
        return [model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sequences]
    finally:
        decoder.set_attn_implementation(implementation)


def _paged_logits(network: DecoderNetwork, sequences: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    device = sequences[0].device
    tables = [list(range(first, first + 2)) for first in range(0, 2 * len(sequences), 2)]
    pages = PagedKV(network.layers, 2 * len(sequences), dtype, device)
    pages.clear_pages([page for table in tables for page in table])
    computed = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in PROBE_STEPS:
        ids: list[torch.Tensor] = []
        positions: list[torch.Tensor] = []
        spans: list[Span] = []
        for number, count in step:
            start, end = computed[number], computed[number] + count
            spans.append(Span(sum(len(part) for part in ids), count, end, tables[number]))
            ids.append(sequences[number][start:end])
            positions.append(torch.arange(start, end, device=device))
            computed[number] = end
        slots = [at + tables[number][0] * BLOCK_SIZE for at, (number, _) in zip(positions, step, strict=True)]
        batch = PackedBatch(torch.cat(ids), torch.cat(positions), torch.cat(slots), spans)
        rows = network.compute_logits(network.compute_hidden(batch, pages))
        for (number, _), part in zip(step, rows.split([count for _, count in step]), strict=True):
            logits[number].append(part)
    return [torch.cat(parts) for parts in logits]


@contextmanager
def _narrow_windows(model: PreTrainedModel) -> Iterator[None]:
    """Narrow sliding windows to NARROW_WINDOW tokens wherever the model has wider ones."""
    holders: dict[int, Any] = {}
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            holders[id(holder)] = holder
    wide_windows = [
        (holder, holder.sliding_window)
        for holder in holders.values()
        if isinstance(getattr(holder, "sliding_window", None), int) and holder.sliding_window > NARROW_WINDOW
    ]
    for holder, _ in wide_windows:
        holder.sliding_window = NARROW_WINDOW
    try:
        yield
    finally:
        for holder, window in wide_windows:
            holder.sliding_window = window
