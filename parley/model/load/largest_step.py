"""Measures the GPU memory that the largest step needs in addition to weights and KV cache, before the cache is
sized."""

from __future__ import annotations

import logging

import torch

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.model.load.memory import guard_allocation
from parley.model.networks.network import DecoderNetwork, PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.model.sampling.draw import CANDIDATES, draw_truncated
from parley.types import ParleySettings

log = logging.getLogger("parley.engine")

SequencePart = tuple[list[int], int, list[int]]  # tokens, the position of the first, pages


@torch.inference_mode()
def measure_largest_step(
    network: DecoderNetwork, dtype: torch.dtype, device: torch.device, length: int, settings: ParleySettings
) -> int:
    """Return the bytes that torch allocates on a GPU during a step that computes ``settings.step_tokens`` tokens and
    draws ``settings.max_batch``. ``length``: tokens of the longest context.

    Raises LoadError if the memory is not enough for it.
    """
    parts, used = pack_largest_step(settings.step_tokens, length)
    with guard_allocation(f"a step of {settings.step_tokens} tokens", "set a lower --step-tokens or --max-batch"):
        cache = PagedKV(network.kv_layers, used, dtype, device, int8=settings.kv_dtype == "int8")
        cache.clear_pages(list(range(used)))
        torch.cuda.synchronize(device)
        allocated_before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run_largest_step(network, cache, parts, settings.max_batch)
        torch.cuda.synchronize(device)
        peak_bytes = torch.cuda.max_memory_allocated(device) - allocated_before
    del cache
    torch.cuda.empty_cache()
    log.info("The largest step takes %d MiB.", peak_bytes >> 20)
    return peak_bytes


def pack_largest_step(tokens: int, length: int) -> tuple[list[SequencePart], int]:
    """Return parts for ``PackedBatch.pack_parts``, and how many pages they need.

    The parts are whole sequences of at most ``length`` tokens, and have ``tokens`` tokens together.
    """
    parts: list[SequencePart] = []
    pages = 0
    for first in range(0, tokens, length):
        count = min(length, tokens - first)
        end = pages - (-count // PAGE_SIZE)
        parts.append(([0] * count, 0, list(range(pages, end))))
        pages = end
    return parts, pages


def run_largest_step(network: DecoderNetwork, cache: PagedKV, parts: list[SequencePart], drawn: int) -> torch.Tensor:
    """Compute a batch of parts of sequences, and draw ``drawn`` tokens by the method that takes the most memory."""
    batch = PackedBatch.pack_parts(parts, cache.device)
    hidden = network.compute_hidden(batch, cache)
    rows = torch.arange(drawn, device=cache.device) % len(hidden)
    logits = network.compute_logits(hidden.index_select(0, rows)).nan_to_num_(0.0)
    native.argmax(logits)
    ones = torch.ones(drawn, dtype=torch.float64, device=cache.device)
    top_k = torch.full((drawn,), CANDIDATES, device=cache.device)
    return draw_truncated(logits, ones.float(), 0 * ones, top_k, ones / 2, ones / 2)
