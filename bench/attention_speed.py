"""Print the share of its limit that attention reaches, by context: ``python bench/attention_speed.py [--threads N]``.

One thread is measured in CPU time, which other programs disturb least. More threads are measured in elapsed time, since
they wait for each other, and want a quiet machine.

The shape is that of the 0.5B model: 14 heads over 2 of keys, of 64 numbers. A prefill is bound by its products, at the
rate of a large matrix product: of bf16 where the CPU multiplies it, of float32 elsewhere. A decode is bound by its
products as well, or by reading keys and values at the bandwidth of a sum over the same memory, whichever takes longer.
Limit and kernel take turns of a few milliseconds, because other programs slow both down; the share is the median over
the turns. A decode's line has two shares: with pages in random order, and in order.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch

from parley import native
from parley.native import kernel_choice
from parley.native import memory as native_memory
from parley.native.compiled_forms.compiled_attention import plan_spans
from parley.native.layout import LayerKV, RowSpan

HEADS, KV_HEADS, DIM = 14, 2, 64
PAGE = 16
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
SIDE = 512  # of the square matrices
TURNS = 9
PREFILLS = ((2048, 2048), (256, 2048), (256, 8192), (256, 32768))  # rows, context at the last one
DECODES = ((1, 4096), (1, 32768), (8, 4096), (8, 32768))  # sequences, context
CACHE = 64 << 20  # bytes: caches hold less
COPIES = 2 * CACHE  # bytes of KV that a decode reads in turn, so that none is cached


def paired_shares(limit: Callable[[], float], kernel: Callable[[], float], turns: int = TURNS) -> float:
    """Return the median of limit / kernel, each in seconds of work of one unit, over turns."""
    limit(), kernel()
    shares = []
    for _ in range(turns):
        before, taken, after = limit(), kernel(), limit()
        shares.append((before + after) / 2 / taken)
    return statistics.median(shares)


def measure_seconds(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes: CPU time of a single thread, elapsed time of several ones."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    action()
    return clock() - began


def product_limit(operations: float) -> Callable[[], float]:
    """Return a function that measures the seconds that the operations of products take at this moment."""
    dtype = torch.bfloat16 if native_level() in ("amx", "avx512bf16") else torch.float32
    a, b = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))

    def measure() -> float:
        return min(measure_seconds(lambda: a @ b) for _ in range(4)) * operations / (2 * SIDE**3)

    return measure


def bandwidth_limit(size: float) -> Callable[[], float]:
    """Return a function that measures the seconds that reading ``size`` bytes takes at this moment."""
    memory = torch.ones(COPIES // 4, dtype=torch.int32)

    def measure() -> float:
        return min(measure_seconds(memory.max) for _ in range(2)) * size / COPIES

    return measure


def native_level() -> str:
    """Return the level of the kernels in use."""
    kernels = kernel_choice.compiled_kernels()
    return "off" if kernels is None else kernels.library_name.rpartition("-")[2].removesuffix(".so")


def random_pool(pages: int, *, int8: bool = False) -> native.LayerPages:
    """Return pages with random keys and values."""
    page_format = native.choose_page_format(LayerKV(KV_HEADS, DIM, DIM), torch.bfloat16, torch.device("cpu"), int8=int8)
    data = native_memory.map_tensor(pages * math.prod(page_format.shape), page_format.dtype).view(
        pages, *page_format.shape
    )
    for page in data.split(1024):  # all different: where pages repeat, the largest score of a row never changes
        page.copy_(torch.randn(page.shape).to(page_format.dtype))
    return native.LayerPages(data, page_format)


def measure_prefill(rows: int, context: int) -> float:
    """Return the share of its limit that the prefill of the last ``rows`` of a context reaches."""
    pool = random_pool(context // PAGE)
    table = torch.randperm(context // PAGE).tolist()
    plan = plan_spans([RowSpan(0, rows, context, table)], None)
    queries = torch.randn(rows, HEADS, DIM).bfloat16()
    seen = sum(range(context - rows + 1, context + 1))

    def kernel() -> float:
        return measure_seconds(lambda: native.attend(queries, pool, plan, scale=DIM**-0.5))

    return paired_shares(product_limit(4 * HEADS * DIM * seen), kernel)


def measure_decode(sequences: int, context: int, *, in_order: bool) -> float:
    """Return the share of its limit that a decode of sequences at a context reaches.

    ``in_order``: the pages of a sequence follow each other in memory, as in a new server; otherwise they are anywhere.
    """
    count = max(sequences, -(-COPIES // (context * TOKEN_BYTES)))
    pool_pages = count * context // PAGE
    pool = random_pool(pool_pages)
    pages = torch.arange(pool_pages) if in_order else torch.randperm(pool_pages)
    order = pages.view(count, -1).tolist()
    batches = [order[i : i + sequences] for i in range(0, count - sequences + 1, sequences)]
    plans = [plan_spans([RowSpan(i, 1, context, table) for i, table in enumerate(batch)], None) for batch in batches]
    queries = torch.randn(sequences, HEADS, DIM).bfloat16()

    def kernel() -> float:
        return measure_seconds(lambda: [native.attend(queries, pool, plan, scale=DIM**-0.5) for plan in plans])

    tokens = len(batches) * sequences * context
    read, multiply = bandwidth_limit(tokens * TOKEN_BYTES), product_limit(4 * HEADS * DIM * tokens)
    return paired_shares(lambda: max(read(), multiply()), kernel)


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    print(native_level(), "threads", torch.get_num_threads())
    for rows, context in PREFILLS:
        print("prefill", rows, context, f"{measure_prefill(rows, context):.3f}", flush=True)
    for rows, context in DECODES:
        shares = [measure_decode(rows, context, in_order=in_order) for in_order in (False, True)]
        print("decode", rows, context, *(f"{share:.3f}" for share in shares), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
