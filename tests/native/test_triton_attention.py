"""Attention in Triton: against float64, and the same bits alone, in a batch, in chunks, and however work is split."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.triton_device import DEVICE, DTYPE, IS_NIGHT, random_rows

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.native import batch_tables
from parley.native.layout import LayerKV, RowSpan
from parley.native.pool import LayerPages
from parley.native.torch_forms import torch_attention
from parley.native.triton_forms import triton_attention


@dataclass
class Case:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    int8: bool = False


# The variations of layers, with sizes that are no powers of two.
CASES = {
    "plain": Case(),
    "padded": Case(heads=6, kv_heads=2, dim=48),
    "many heads of one key": Case(heads=36, kv_heads=1, dim=16),
    "window": Case(window=70),
    "softcap and sinks": Case(softcap=2.0, has_sinks=True),
    "int8": Case(int8=True),
    "all": Case(heads=6, kv_heads=2, dim=48, window=600, softcap=5.0, has_sinks=True, int8=True),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
LENGTH = 1100 if IS_NIGHT else 560  # tokens of a sequence: two or three chunks of keys


class Cache:
    """The pages of a layer with sequences of random keys and values, which know their numbers in float64."""

    def __init__(self, case: Case, lengths: list[int]):
        layer = LayerKV(case.kv_heads, case.dim, case.dim)
        page_format = torch_attention.page_format(layer, torch.int8 if case.int8 else DTYPE)
        counts = [-(-length // PAGE_SIZE) for length in lengths]
        pages = torch.zeros(sum(counts) + 1, *page_format.shape, dtype=page_format.dtype, device=DEVICE)
        self.pool = LayerPages(pages, page_format)
        numbers = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist())
        self.tables = [[next(numbers) for _ in range(count)] for count in counts]
        self.keys = [random_rows(n, case.kv_heads, case.dim, seed=i) for i, n in enumerate(lengths)]
        self.values = [random_rows(n, case.kv_heads, case.dim, seed=50 + i) for i, n in enumerate(lengths)]
        for table, keys, values in zip(self.tables, self.keys, self.values, strict=True):
            slots = torch.tensor([table[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(len(keys))])
            indices = torch_attention.write_indices(slots.to(DEVICE), page_format.shape)
            torch_attention.write_kv(keys, values, self.pool, indices)
        self.sinks = random_rows(case.heads, seed=99).float() if case.has_sinks else None
        self.case = case

    def attend(
        self, queries: torch.Tensor, parts: list[tuple[int, int, int]], is_split: bool | None = None
    ) -> torch.Tensor:
        """Attend with queries [T, heads, dim] of ``parts``: sequence, number of rows, and position after them."""
        spans, first = [], 0
        for sequence, count, end in parts:
            spans.append(RowSpan(first, count, end, self.tables[sequence][: -(-end // PAGE_SIZE)]))
            first += count
        tables = batch_tables.BatchTables.of_spans(spans, None, DEVICE)
        return triton_attention.attend(
            queries,
            self.pool,
            native.TablePlan(tables, self.case.window or 0),
            scale=self.case.dim**-0.5,
            softcap=self.case.softcap,
            sinks=self.sinks,
            is_split=is_split,
        )

    def exact_row(self, query: torch.Tensor, sequence: int, position: int, end: int | None = None) -> torch.Tensor:
        """Attention by definition, in float64: query [heads, dim] at a position of a sequence. ``end``: the position
        after the last one that it sees; None: after its own."""
        case, fold = self.case, self.case.heads // self.case.kv_heads
        first = 0 if case.window is None else max(0, position - case.window + 1)
        keys, values = (
            side[sequence][first : end or position + 1].double().repeat_interleave(fold, 1)
            for side in (self.keys, self.values)
        )
        scores = torch.einsum("hd,lhd->hl", query.double(), keys) * case.dim**-0.5
        if case.softcap is not None:
            scores = case.softcap * (scores / case.softcap).tanh()
        sink_scores = scores[:, :0] if self.sinks is None else self.sinks.double()[:, None]
        weights = torch.cat((sink_scores, scores), 1).softmax(-1)[:, sink_scores.shape[1] :]
        return torch.einsum("hl,lhd->hd", weights, values)


@EVERY_CASE
def test_rows_match_attention_in_float64(case):
    cache = Cache(case, [LENGTH, 37])
    queries = random_rows(4, case.heads, case.dim, seed=7)
    result = cache.attend(queries, [(0, 1, LENGTH), (1, 2, 37), (0, 1, 513)])
    for row, (sequence, position) in zip(queries, [(0, LENGTH - 1), (1, 35), (1, 36), (0, 512)], strict=True):
        exact = cache.exact_row(row, sequence, position)
        assert (result[0].double() - exact).abs().max() < (0.03 if case.int8 else 2e-3)
        result = result[1:]


@EVERY_CASE
def test_splitting_the_keys_changes_no_bit(case):
    cache = Cache(case, [LENGTH, 37])
    queries = random_rows(3, case.heads, case.dim, seed=7)
    parts = [(0, 2, LENGTH), (1, 1, 20)]
    assert torch.equal(cache.attend(queries, parts, is_split=True), cache.attend(queries, parts, is_split=False))


def test_rows_of_any_batch_have_the_bits_of_the_row_alone():
    """Of a chunk, as tokens of a decode step, and in another order, in tiles of both sizes."""
    cache = Cache(CASES["plain"], [520, 40])
    queries = random_rows(21, 4, 32, seed=3)
    alone = [cache.attend(queries[i : i + 1], [(0, 1, 500 + i)]) for i in range(20)]
    alone.append(cache.attend(queries[20:], [(1, 1, 40)]))
    chunk = cache.attend(queries, [(0, 20, 519), (1, 1, 40)])
    assert torch.equal(chunk, torch.cat(alone))
    decodes = cache.attend(queries.flip(0), [(1, 1, 40), *((0, 1, 500 + i) for i in reversed(range(20)))])
    assert torch.equal(decodes.flip(0), torch.cat(alone))


def test_tokens_see_later_ones_up_to_their_end():
    """As those of an image do in some models."""
    cache = Cache(CASES["plain"], [40])
    queries = random_rows(5, 4, 32, seed=3)
    span = RowSpan(0, 5, 40, cache.tables[0])
    tables = batch_tables.BatchTables.of_spans([span], torch.tensor([38, 38, 38, 39, 99], device=DEVICE), DEVICE)
    result = triton_attention.attend(queries, cache.pool, native.TablePlan(tables, 0), scale=32**-0.5)
    for i, last in enumerate([37, 37, 37, 38, 39]):
        assert (result[i].double() - cache.exact_row(queries[i], 0, last)).abs().max() < 2e-3


def test_windows_reach_ahead_in_texts_that_are_read_both_ways():
    """The rows between the chunks of keys see three of them, of which a window that looks back alone would see two."""
    case, length, rows = Case(window=300), 1100, 360
    cache = Cache(case, [length])
    queries = random_rows(rows, case.heads, case.dim, seed=3)
    visible_ends = (torch.arange(length - rows, length, device=DEVICE) + case.window).clamp(max=length)
    tables = batch_tables.BatchTables.of_spans([RowSpan(0, rows, length, cache.tables[0])], visible_ends, DEVICE)
    plan = native.TablePlan(tables, case.window, is_ahead=True)
    for is_split in (False, True):
        result = triton_attention.attend(queries, cache.pool, plan, scale=case.dim**-0.5, is_split=is_split)
        for row in (0, 1, 10, 60, 200, rows - 1):
            exact = cache.exact_row(queries[row], 0, length - rows + row, int(visible_ends[row]))
            assert (result[row].double() - exact).abs().max() < 2e-3


def test_rows_that_fill_a_batch_read_no_page_and_give_zeros():
    cache = Cache(CASES["plain"], [40])
    cache.pool.data[-1].fill_(float("nan"))  # page 0 of the table that such a row has
    queries = random_rows(2, 4, 32, seed=3)
    tables = batch_tables.BatchTables.of_spans(
        [RowSpan(0, 1, 40, cache.tables[0]), RowSpan(1, 1, 1, [len(cache.pool.data) - 1])], None, DEVICE
    )
    tables.visible_ends[1] = 0
    for is_split in (False, True):
        result = triton_attention.attend(
            queries, cache.pool, native.TablePlan(tables, 0), scale=32**-0.5, is_split=is_split
        )
        assert torch.equal(result[1], torch.zeros_like(result[1]))
        assert torch.equal(result[:1], cache.attend(queries[:1], [(0, 1, 40)]))
