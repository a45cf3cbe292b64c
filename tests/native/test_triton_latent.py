"""Latent attention in Triton: against its definition, and the same bits alone, in a batch and however work is split."""

from __future__ import annotations

import pytest
import torch
from support.triton_device import DEVICE, DTYPE, random_rows, use_triton

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.native import batch_tables, kernel_choice
from parley.native.experts import stack_experts
from parley.native.layer_shape import Norm
from parley.native.layout import LayerKV, RowSpan
from parley.native.pool import LayerPages
from parley.native.torch_forms import torch_attention, torch_latent
from parley.native.torch_forms.torch_kernels import TorchPacked
from parley.native.triton_forms import triton_attention, triton_kernels
from parley.native.triton_forms.triton_packed import TritonPacked

RANK, ROTARY, PLAIN, HEADS = 40, 8, 24, 3


def empty_pool(pages: int) -> LayerPages:
    page_format = torch_attention.page_format(LayerKV(1, RANK + ROTARY, RANK, has_latents=True), DTYPE)
    return LayerPages(torch.zeros(pages + 1, *page_format.shape, dtype=DTYPE, device=DEVICE), page_format)


def random_angles(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_rows(count, 1, ROTARY, dtype=torch.float32), random_rows(count, 1, ROTARY, seed=1).float()


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_latents_are_written_as_the_torch_form_writes_them(is_interleaved):
    rows, (cos, sin) = random_rows(4, RANK + ROTARY + 5)[:, 5:], random_angles(4)
    norm = Norm(random_rows(RANK, seed=2).float(), 1e-6)
    own, defined = empty_pool(2), empty_pool(2)
    places = native.write_indices(torch.tensor([3, 20, 17, 0], device=DEVICE), own.page_format)
    torch_latent.write_latents(rows, norm, cos, sin, defined, places, is_interleaved=is_interleaved)
    triton_kernels.write_latents(rows, norm, cos, sin, own, places, is_interleaved=is_interleaved)
    torch.testing.assert_close(own.data, defined.data, rtol=2e-3, atol=2e-3)
    before = own.data.clone()
    triton_kernels.write_latents(rows, norm, cos, sin, own, places - 1000, is_interleaved=is_interleaved)
    assert torch.equal(own.data, before)  # negative places are not stored


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_queries_are_absorbed_as_by_the_torch_form(is_interleaved):
    weight, queries = random_rows(HEADS, RANK, PLAIN, seed=3), random_rows(18, HEADS, PLAIN + ROTARY)
    cos, sin = random_angles(18)
    defined = torch_latent.absorb_queries(
        queries, TorchPacked(weight, None, False), cos, sin, is_interleaved=is_interleaved
    )
    packed = stack_experts((TritonPacked(head_weight, None) for head_weight in weight), HEADS)
    own = triton_kernels.absorb_queries(queries, packed, cos, sin, is_interleaved=is_interleaved)
    torch.testing.assert_close(own, defined, rtol=2e-3, atol=2e-3)
    alone = triton_kernels.absorb_queries(queries[7:8], packed, cos[7:8], sin[7:8], is_interleaved=is_interleaved)
    assert torch.equal(alone, own[7:8])


def test_attention_over_latents():
    """Against float64, and bit by bit for rows alone, and for chunks of keys in one program or in several."""
    lengths, heads = (700, 30), 20
    pool, latents, spans, page = empty_pool(60), [], [], 0
    for row, length in enumerate(lengths):
        pages = -(-length // PAGE_SIZE)
        table = list(range(page, page + pages))
        page += pages
        latents.append(random_rows(length, 1, RANK + ROTARY, seed=row))
        slots = torch.arange(length, device=DEVICE) + table[0] * PAGE_SIZE
        torch_attention.store_rows(latents[-1], pool, native.write_indices(slots, pool.page_format))
        spans.append(RowSpan(row, 1, length, table))
    queries, scale = random_rows(2, heads, RANK + ROTARY, seed=9), 0.15

    def attend(queries: torch.Tensor, spans: list[RowSpan], is_split: bool) -> torch.Tensor:
        plan = native.TablePlan(batch_tables.BatchTables.of_spans(spans, None, DEVICE), 0)
        return triton_attention.attend(queries, pool, plan, scale=scale, is_split=is_split)

    whole = attend(queries, spans, False)
    assert torch.equal(attend(queries, spans, True), whole)
    for row, keys in enumerate(latents):
        keys = keys[:, 0].double()
        weights = (queries[row].double() @ keys.t() * scale).softmax(-1)
        exact = weights @ keys[:, :RANK]
        assert (whole[row].double() - exact).abs().max() < 2e-3 * exact.abs().max()
        alone = RowSpan(0, 1, lengths[row], spans[row].table)
        assert torch.equal(attend(queries[row : row + 1], [alone], False)[0], whole[row])


def test_latents_on_a_gpu_run_in_triton_unless_they_are_int8(monkeypatch):
    use_triton(monkeypatch)
    for rank, dtype, has_table in ((512, DTYPE, True), (1024, DTYPE, False), (512, torch.int8, False)):
        page_format = torch_attention.page_format(LayerKV(1, rank + 64, rank, has_latents=True), dtype)
        assert kernel_choice.has_table_attention(page_format, DEVICE, DTYPE) == has_table
