"""Every kernel against its definition, and the basis of batching: a row's bits do not depend on other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_checks import check_batch_invariant, empty_pool
from support.random_tensors import random_tensor
from support.unpack_int4 import unpack_pages

from parley import native
from parley.core.sequence import PAGE_SIZE
from parley.native.layout import LayerKV

pytestmark = pytest.mark.usefixtures("kernel_level")


@pytest.mark.parametrize(("inner", "outer"), [(16, 24), (64, 128), (160, 64), (200, 333), (896, 1152), (1024, 640)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_accurate_and_batch_invariant(inner, outer, bias):
    x, weight = random_tensor(257, inner), random_tensor(outer, inner, seed=1)
    offset = random_tensor(outer, seed=2) if bias else None
    packed = native.pack_weight(weight, offset)
    actual = check_batch_invariant(lambda rows: native.linear(rows, packed), x)
    exact = x.double() @ weight.double().T + (offset.double() if bias else 0)
    assert ((actual - exact).abs() <= exact.abs() * 2**-8 + inner * 2**-20).all()


def test_float32_linear_matches_torch():
    x, weight, bias = (random_tensor(*shape, dtype=torch.float32) for shape in ((5, 48), (31, 48), (31,)))
    assert torch.allclose(native.linear(x, native.pack_weight(weight, bias)), x @ weight.T + bias, atol=1e-5)


@pytest.mark.parametrize("width", [16, 64, 96, 100, 896])
def test_add_norm_is_accurate_and_batch_invariant(width):
    x, residual = random_tensor(257, width), random_tensor(257, width, seed=1)
    weight = random_tensor(width, seed=2, dtype=torch.float32)

    def kernel(a, b):
        return torch.cat(native.add_norm(a, b, native.Norm(weight, 1e-5)), -1)

    actual = check_batch_invariant(kernel, x, residual)
    total = x + residual
    total_float64 = total.double()
    exact = total_float64 / (total_float64.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.equal(actual[:, width:], total)
    assert ((actual[:, :width] - exact).abs() <= exact.abs() * 2**-7 + 1e-6).all()


@pytest.mark.parametrize("width", [8, 50, 160, 333])
def test_gated_silu_is_accurate_and_batch_invariant(width):
    x = random_tensor(257, 2 * width) * 4
    actual = check_batch_invariant(lambda rows: native.activate(rows, "silu"), x)
    gate, up = x.double().chunk(2, -1)
    exact = gate * torch.sigmoid(gate) * up
    assert ((actual - exact).abs() <= exact.abs() * 2**-7 + 1e-6).all()


def test_embed_looks_up_table_rows():
    table = random_tensor(50, 12)
    ids = torch.tensor([3, 3, 49, 0])
    assert torch.equal(native.embed_tokens(ids, table), table[ids])


@pytest.mark.parametrize("rotary", [32, 20])
@pytest.mark.parametrize(
    ("norm", "interleaved"),
    [(None, False), ("heads", False), ("whole", True), ("late", False), ("centered", True), ("values", False)],
)
def test_rope_write_is_accurate_and_batch_invariant(rotary, norm, interleaved):
    heads, kv_heads, dim, count = 6, 2, 32, 257
    qkv = random_tensor(count, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(count, 1, rotary // 2, generator=torch.Generator().manual_seed(3)) * 6
    cos, sin = torch.stack((angles.cos(), angles.cos())), torch.stack((-angles.sin(), angles.sin()))
    cos, sin = (table.movedim(0, -1 if interleaved else -2).flatten(-2) for table in (cos, sin))
    weight = random_tensor(heads + kv_heads, dim, seed=4, dtype=torch.float32)
    bias = random_tensor(heads + kv_heads, dim, seed=6, dtype=torch.float32) if norm == "centered" else None
    scales = torch.rand(count, generator=torch.Generator().manual_seed(7)) + 0.5 if norm != "whole" else None
    options = {
        "head_norm": native.Norm(weight, 1e-6, bias, norm == "centered") if norm else None,
        "has_whole_norm": norm == "whole",
        "is_norm_late": norm == "late",
        "is_interleaved": interleaved,
        "has_normed_values": norm == "values",
    }
    pages = 20
    slots = torch.randperm(pages * PAGE_SIZE, generator=torch.Generator().manual_seed(5))[:count]

    def kernel(rows, cos, sin, slots, *scales):
        pool = empty_pool(pages, LayerKV(kv_heads, dim, dim))
        places = native.write_indices(slots, pool.page_format)
        scale = scales[0].contiguous() if scales else None
        queries = native.rope_write(rows.clone(), cos, sin, pool, places, query_scales=scale, **options)
        stored = [part[slots // PAGE_SIZE, slots % PAGE_SIZE] for part in unpack_pages(pool)]
        assert pool.data.count_nonzero() <= 2 * len(rows) * kv_heads * dim
        return torch.cat((queries, *stored), 1)

    actual = check_batch_invariant(kernel, qkv, cos, sin, slots, *([] if scales is None else [scales]))
    exact = qkv.double().view(count, -1, dim)
    rotated_heads = exact[:, : heads + kv_heads]

    def rms_norm(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()

    if norm in ("heads", "values"):
        rotated_heads = rms_norm(rotated_heads)
    elif norm == "centered":
        rotated_heads = rms_norm(rotated_heads - rotated_heads.mean(-1, keepdim=True)) + bias.double()
    elif norm == "whole":
        sizes = rotated_heads[:, :heads], rotated_heads[:, heads:]
        wholes = [size / (size.pow(2).mean((1, 2), keepdim=True) + 1e-6).sqrt() for size in sizes]
        rotated_heads = torch.cat(wholes, 1) * weight.double()
    turning = rotated_heads[..., :rotary].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    pairs = torch.complex(*turning.unbind(-1 if interleaved else -2))
    pairs = pairs * torch.polar(torch.ones_like(angles.double()), angles.double())
    turned = torch.stack((pairs.real, pairs.imag), -1 if interleaved else -2).flatten(-2)
    rotated_heads = torch.cat((turned, rotated_heads[..., rotary:]), -1)
    if norm == "late":
        rotated_heads = rms_norm(rotated_heads)
    if scales is not None:
        rotated_heads[:, :heads] *= scales.double()[:, None, None]
    values = exact[:, heads + kv_heads :]
    if norm == "values":
        values = values / (values.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    exact = torch.cat((rotated_heads, values), 1)
    # With scales, or a norm after the rotation, numbers are rounded twice, or three times.
    assert ((actual - exact).abs() <= exact.abs() * 2**-8 * (1 if scales is None else 3) + 1e-5).all()


@pytest.mark.parametrize("has_norm", [True, False])
def test_queries_have_the_same_bits_with_and_without_keys(has_norm):
    """Guards layers that read the keys and values of others."""
    heads, kv_heads, dim, count = 6, 2, 32, 40
    qkv, angles = random_tensor(count, (heads + 2 * kv_heads) * dim), random_tensor(count, 1, dim, dtype=torch.float32)
    weight = random_tensor(heads + kv_heads, dim, seed=4, dtype=torch.float32)
    norms = [native.Norm(rows.contiguous(), 1e-6) if has_norm else None for rows in (weight, weight[:heads])]
    pools = [empty_pool(4, LayerKV(kv_heads, dim, dim)) for _ in norms]
    places = native.write_indices(torch.arange(count), pools[0].page_format)
    beside = native.rope_write(qkv.clone(), angles, angles, pools[0], places, head_norm=norms[0])
    queries = qkv[:, : heads * dim].contiguous()
    alone = native.rope_write(queries, angles, angles, pools[1], places, head_norm=norms[1], is_query_only=True)
    assert torch.equal(alone, beside) and pools[0].data.any() and not pools[1].data.any()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 4),
    vocab=st.one_of(st.integers(1, 300), st.sampled_from([1000, 4096, 70_001])),
    count=st.integers(1, 300),
    kind=st.sampled_from(["ties", "noise", "holes"]),
    seed=st.integers(0, 99),
)
def test_argmax_and_top_k_match_a_stable_sort(kernel_level, rows, vocab, count, kind, seed):
    logits = random_tensor(rows, vocab, seed=seed, dtype=torch.float32)
    if kind == "ties":
        logits = (logits * 5).round()
    if kind == "holes":
        logits[:, ::2] = float("-inf")
    values, ids = native.argmax(logits)
    order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, order.values[:, 0]) and torch.equal(ids, order.indices[:, 0])
    values, ids = native.top_k(logits, count)
    assert torch.equal(values, order.values[:, :count]) and torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == min(count, vocab) for row in ids.tolist())
    if kernel_level != "off":  # torch.topk may return any of several equal ones
        assert torch.equal(ids, order.indices[:, :count])


@pytest.mark.parametrize("vocab", [5, 64, 1000])
def test_argmax_and_top_k_rank_nan_highest(vocab):
    """Guards against a NaN that the kernel skips: the runner recognizes broken rows by their largest logit."""
    logits = random_tensor(3, vocab, dtype=torch.float32)
    logits[1, 3] = logits[1, vocab - 1] = float("nan")
    logits[1, 0] = logits[2, 4] = float("inf")
    values, ids = native.argmax(logits)
    assert values[1].isnan() and ids.tolist()[1:] == [3, 4] and not values[0].isnan()
    values, ids = native.top_k(logits, 3)
    assert {3, vocab - 1} <= set(ids[1].tolist()) and ids[2, 0] == 4


@pytest.mark.parametrize("vocab", [1, 8, 13, 1000, 4099, 70_001])
@pytest.mark.parametrize("kind", ["noise", "flat", "steep", "holes"])
def test_softmax_totals_are_accurate_and_batch_invariant(vocab, kind):
    logits = random_tensor(9, vocab, dtype=torch.float32) * {"steep": 1000.0, "flat": 0.0}.get(kind, 4.0) - 3.0
    if kind == "holes":
        logits[:, 1::2] = float("-inf")
    peaks = logits.amax(-1)
    sums = native.softmax_totals(logits, peaks)
    exact = (logits.double() - peaks.double()[:, None]).exp().sum(-1) * 2.0**40
    assert ((sums - exact).abs() <= exact * 1e-6 + vocab).all()  # truncation loses less than 1 for each number
    if kind == "flat":
        assert (sums == vocab << 40).all()
    rows_alone = [native.softmax_totals(logits[[row]], peaks[[row]]) for row in range(9)]
    assert torch.equal(torch.cat(rows_alone), sums)
    old_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(native.softmax_totals(logits, peaks), sums)
    finally:
        torch.set_num_threads(old_threads)
    assert len(native.softmax_totals(logits[:0], peaks[:0])) == 0


@pytest.mark.parametrize("vocab", [1, 8, 13, 1000, 4099])
def test_apply_mask_sets_masked_logits_to_minus_infinity(vocab):
    logits = random_tensor(3, vocab, dtype=torch.float32)
    for seed, share in enumerate((0.0, 0.02, 0.5, 0.98, 1.0)):
        keep = torch.rand(vocab, generator=torch.Generator().manual_seed(seed)) < share
        row = logits.clone()
        native.apply_mask(row[1], np.packbits(keep.numpy(), bitorder="little"))
        expected = logits.clone()
        expected[1, ~keep] = float("-inf")
        assert torch.equal(row, expected)


@pytest.mark.parametrize("vocab", [1, 8, 13, 64, 1000, 4099])
def test_masked_argmax_takes_lowest_id_of_largest_allowed(vocab):
    logits = (random_tensor(3, vocab, dtype=torch.float32) * 2).round()
    logits[2] = float("-inf")
    for seed, share in enumerate((0.0, 0.02, 0.5, 0.98, 1.0)):
        keep = torch.rand(vocab, generator=torch.Generator().manual_seed(seed)) < share
        keep[seed * 7 % vocab] = True
        bits = np.packbits(keep.numpy(), bitorder="little")
        for row in logits:
            allowed_ids = keep.nonzero()[:, 0].tolist()
            assert native.masked_argmax(row, bits) == max(
                allowed_ids, key=lambda token_id, row=row: (row[token_id].item(), -token_id)
            )


# --- attention ------------------------------------------------------------------------------------------------
