"""Indexers: their choice against its definition, alone and in a batch, and attention over chosen tokens."""

from __future__ import annotations

import pytest
import torch

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.model.networks.indexed_attention import plan_rows
from parley.model.networks.paged_kv import limit_spans
from parley.native import indexer
from parley.native.layout import LayerKV, RowSpan
from parley.native.pool import LayerPages

CPU = torch.device("cpu")
HEADS, DIM = 3, 24


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def empty_pool(pages: int, layer: LayerKV, dtype: torch.dtype, *, int8: bool = False) -> LayerPages:
    page_format = native.choose_page_format(layer, dtype, CPU, int8=int8)
    return LayerPages(torch.zeros(pages + 1, *page_format.shape, dtype=page_format.dtype), page_format)


def store_keys(keys: torch.Tensor, pool: LayerPages, slots: torch.Tensor) -> None:
    value_dim = pool.page_format.layer.value_dim
    native.write_kv(keys, keys[..., :value_dim], pool, native.write_indices(slots, pool.page_format))


def attend_rows(queries: torch.Tensor, pages: LayerPages, tables: list[list[int]], length: int) -> torch.Tensor:
    """Return the attention of each query over the ``length`` tokens of its own table."""
    spans = [RowSpan(row, 1, length, table) for row, table in enumerate(tables)]
    return native.attend(queries, pages, plan_rows(spans, queries, pages), scale=0.2)


def chosen_by_definition(scores: torch.Tensor, count: int) -> list[int]:
    """Return the places of the best scores, the earlier of equal ones, by sorting."""
    order = sorted(range(len(scores)), key=lambda place: (-float(scores[place]), place))
    return sorted(order[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_tokens_follow_the_definition_in_every_batch(dtype):
    """Small whole numbers have exact scores, of which many are equal."""
    count, lengths, rows = 20, (700, 90), (33, 2)
    pool = empty_pool(60, LayerKV(1, DIM, 0, has_latents=True), dtype)
    assert not pool.page_format.tiled and pool.page_format.dtype == dtype
    spans, queries, weights, expected = [], [], [], []
    for number, (length, own_rows) in enumerate(zip(lengths, rows, strict=True)):
        table = list(range(50 * number, 50 * number + -(-length // PAGE_SIZE)))
        keys = random_tensor(length, 1, DIM, seed=number).round()
        store_keys(keys.to(dtype), pool, torch.arange(length) + table[0] * PAGE_SIZE)
        query = random_tensor(own_rows, HEADS, DIM, seed=2 + number).round()
        weight = random_tensor(own_rows, HEADS, seed=4 + number).round()
        scores = (torch.einsum("rhd,kd->rhk", query, keys[:, 0]).relu() * weight[..., None]).sum(1)
        for row in range(own_rows):
            expected.append(chosen_by_definition(scores[row, : length - own_rows + row + 1], count))
        spans.append(RowSpan(sum(rows[:number]), own_rows, length, table))
        queries.append(query.to(dtype))
        weights.append(weight)
    together = indexer.choose_tokens(
        torch.cat(queries), torch.cat(weights), pool, indexer.plan_choice(spans, HEADS, pool), count
    )
    assert together.tolist() == expected
    alone = RowSpan(0, 1, lengths[0] - rows[0] + 8, spans[0].table)  # the eighth row of the first sequence
    groups = indexer.plan_choice([alone], HEADS, pool)
    chosen = indexer.choose_tokens(queries[0][7:8], weights[0][7:8], pool, groups, count)
    assert chosen.tolist() == expected[7:8]


def test_equal_keys_have_equal_scores_wherever_they_lie():
    """Of equal ones the earlier are chosen: a sum that depended on the place or the batch would choose others."""
    rows, length, count = 33, 1100, 100
    pool = empty_pool(70, LayerKV(1, DIM, 0, has_latents=True), torch.float32)
    order = torch.randint(30, (length,), generator=torch.Generator().manual_seed(6))
    different = random_tensor(30, 1, DIM, seed=7)
    table = list(range(-(-length // PAGE_SIZE)))
    store_keys(different[order], pool, torch.arange(length))
    query, weight = random_tensor(rows, HEADS, DIM, seed=8), random_tensor(rows, HEADS, seed=9)
    scores = (torch.einsum("rhd,kd->rhk", query, different[:, 0]).relu() * weight[..., None]).sum(1)[:, order]
    expected = [chosen_by_definition(scores[row, : length - rows + row + 1], count) for row in range(rows)]
    spans = [RowSpan(0, rows, length, table)]
    together = indexer.choose_tokens(query, weight, pool, indexer.plan_choice(spans, HEADS, pool), count)
    assert together.tolist() == expected
    last = indexer.plan_choice([RowSpan(0, 1, length, table)], HEADS, pool)
    assert indexer.choose_tokens(query[-1:], weight[-1:], pool, last, count).tolist() == expected[-1:]


def test_scores_that_are_not_numbers_are_the_lowest():
    pool = empty_pool(4, LayerKV(1, DIM, 0, has_latents=True), torch.float32)
    keys = random_tensor(60, 1, DIM, seed=0)
    keys[10:20] = torch.nan
    store_keys(keys, pool, torch.arange(60))
    groups = indexer.plan_choice([RowSpan(0, 1, 60, [0, 1, 2, 3])], HEADS, pool)
    chosen = indexer.choose_tokens(torch.ones(1, HEADS, DIM), torch.ones(1, HEADS), pool, groups, 50)
    assert chosen.tolist() == [[*range(10), *range(20, 60)]]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_copies_has_the_bits_of_attention_over_pages(dtype, int8):
    """In the compiled kernels' pages as in torch's; also where some tokens are copied that fill no page."""
    layer, count = LayerKV(1, 48, 40, has_latents=True), 70
    pool = empty_pool(12, layer, dtype, int8=int8)
    tables, pages = [[3, 1, 7, 0, 9], [2, 4, 6, 8, 10]], torch.arange(count) // PAGE_SIZE
    slots = torch.stack([torch.tensor(table)[pages] * PAGE_SIZE + torch.arange(count) % PAGE_SIZE for table in tables])
    keys = [random_tensor(count, 1, 48, seed=number, dtype=dtype) for number in range(2)]
    for own_keys, own_slots in zip(keys, slots, strict=True):
        store_keys(own_keys, pool, own_slots)
    queries = random_tensor(2, 5, 48, seed=9, dtype=dtype)
    copies = indexer.gather_pages(pool, slots)
    copied_tables = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    whole = attend_rows(queries, pool, tables, count)
    assert torch.equal(attend_rows(queries, copies, copied_tables, count), whole)

    some = torch.tensor([0, 3, 17, 69])
    fresh = empty_pool(2, layer, dtype, int8=int8)
    for number, own_keys in enumerate(keys):
        store_keys(own_keys[some], fresh, torch.arange(4) + number * PAGE_SIZE)
    copies = indexer.gather_pages(pool, slots[:, some])
    assert torch.equal(copies.data, fresh.data)
    assert not torch.equal(attend_rows(queries, copies, [[0], [1]], 4), whole)


def test_rows_beyond_a_limit_see_one_token_and_other_rows_are_unchanged():
    within, over, crossing = RowSpan(0, 3, 10, [5]), RowSpan(3, 1, 40, [1, 2, 3]), RowSpan(4, 4, 22, [7, 8])
    assert limit_spans([within, crossing], 30) == [within, crossing]
    limited = limit_spans([within, over, crossing], 20)
    assert limited == [
        within,
        RowSpan(3, 1, 1, [1]),
        RowSpan(4, 2, 20, [7, 8]),
        RowSpan(6, 1, 1, [7]),
        RowSpan(7, 1, 1, [7]),
    ]
