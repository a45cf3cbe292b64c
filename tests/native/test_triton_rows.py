"""Norms, rotary embeddings and activations in Triton: against their torch forms, and a row's bits in any batch."""

from __future__ import annotations

import pytest
import torch
from support.triton_device import DEVICE, DTYPE, random_rows, use_triton

from parley import native
from parley.native.layer_shape import ACTIVATIONS, Norm
from parley.native.layout import LayerKV
from parley.native.pool import LayerPages
from parley.native.torch_forms import torch_attention, torch_kernels, torch_streams
from parley.native.triton_forms import triton_kernels

# The interpreter computes with NumPy, which warns of the infinities that GPUs compute silently.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

ROWS, WIDTH = 5, 100


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float()


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the last bits of float16, which another order of additions may round otherwise."""
    torch.testing.assert_close(wide(result), wide(expected), rtol=2e-3, atol=2e-3)


def make_norm(seed: int, *, is_centered: bool = False, has_bias: bool = False, width: int = WIDTH) -> Norm:
    weight, bias = (random_rows(width, seed=seed + i, dtype=torch.float32) for i in range(2))
    return Norm(weight, 1e-5, bias if has_bias else None, is_centered)


@pytest.mark.parametrize("is_layer_norm", [False, True])
@pytest.mark.parametrize("has_after", [False, True])
def test_addition_and_norms(is_layer_norm, has_after):
    norm = make_norm(1, is_centered=is_layer_norm, has_bias=is_layer_norm)
    after = make_norm(5, has_bias=is_layer_norm) if has_after else None
    x, residual = random_rows(ROWS, WIDTH, seed=2), random_rows(ROWS, WIDTH, seed=3)
    scales = {"scale": 0.5, "total_scale": 0.7}
    results = triton_kernels.add_norm(x, residual, norm, after=after, **scales)
    for result, expected in zip(results, torch_kernels.add_norm(x, residual, norm, after=after, **scales), strict=True):
        assert_close(result, expected)
    assert_close(triton_kernels.norm_rows(x, norm), torch_kernels.norm_rows(x, norm))
    for i in range(ROWS):
        row = triton_kernels.add_norm(x[i : i + 1], residual[i : i + 1], norm, after=after, **scales)
        assert all(torch.equal(one[0], many[i]) for one, many in zip(row, results, strict=True))


def test_an_addition_needs_no_norm():
    x, residual = random_rows(ROWS, WIDTH, seed=2), random_rows(ROWS, WIDTH, seed=3)
    rows, total = triton_kernels.add_norm(x, residual, None)
    assert torch.equal(rows, x + residual) and torch.equal(total, x + residual)
    assert triton_kernels.norm_rows(x, None) is x


def test_quantized_rows_have_the_bits_of_the_torch_form():
    x = random_rows(7, WIDTH, seed=1)
    x[1], x[2, 3], x[3, 4], x[4] = 0, float("nan"), float("inf"), 60000
    rows, expected = triton_kernels.quantize_rows(x), torch_kernels.quantize_rows(x)
    assert torch.equal(rows.values, expected.values)
    assert torch.equal(rows.scales.nan_to_num(-1), expected.scales.nan_to_num(-1))
    normed = triton_kernels.norm_rows(x, make_norm(1), int8=True)
    assert isinstance(normed, native.QuantizedRows)


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_triton_activations_equal_the_torch_form(activation, is_gated):
    rows = 3 * random_rows(ROWS, 2 * WIDTH, seed=4)
    factors = (0.8, 0.7, 0.5) if activation == "xielu" else ()
    result = triton_kernels.activate(rows, activation, is_gated=is_gated, factors=factors)
    assert_close(result, torch_kernels.activate(rows.clone(), activation, is_gated=is_gated, factors=factors))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rotary", [16, 8, 0])
@pytest.mark.parametrize(
    ("norm", "is_interleaved"),
    [("none", False), ("none", True), ("head", False), ("whole", False), ("values", False)],
)
def test_rotation_and_pages(int8, rotary, norm, is_interleaved):
    heads, kv_heads, dim, tokens = 3, 2, 16, 4
    layer = LayerKV(kv_heads, dim, dim)
    page_format = torch_attention.page_format(layer, torch.int8 if int8 else DTYPE)
    pools = [
        LayerPages(torch.zeros(3, *page_format.shape, dtype=page_format.dtype, device=DEVICE), page_format)
        for _ in range(2)
    ]
    slots = torch.tensor([5, 33, 17, 2], device=DEVICE)
    indices = torch_attention.write_indices(slots, page_format.shape)
    qkv = random_rows(tokens, (heads + 2 * kv_heads) * dim, seed=6)
    cos, sin = (random_rows(tokens, 1, rotary, seed=i, dtype=torch.float32) for i in (7, 8))
    options = {
        "head_norm": None if norm == "none" else Norm(1 + random_rows(heads + kv_heads, dim, seed=9).float(), 1e-6),
        "has_whole_norm": norm == "whole",
        "is_interleaved": is_interleaved,
        "has_normed_values": norm == "values",
    }
    result = triton_kernels.rope_write(qkv, cos, sin, pools[0], indices, **options)
    assert_close(result, torch_kernels.rope_write(qkv.clone(), cos, sin, pools[1], indices, **options))
    if int8:  # a number may round to a neighbour where the float16 before it did
        difference = pools[0].data[..., :dim].int() - pools[1].data[..., :dim].int()
        assert difference.abs().max() <= 1
    else:
        assert_close(pools[0].data, pools[1].data)


def test_norms_that_triton_does_not_have_are_computed_by_torch(monkeypatch):
    use_triton(monkeypatch)
    page_format = torch_attention.page_format(LayerKV(2, 16, 16), DTYPE)
    pools = [LayerPages(torch.zeros(3, *page_format.shape, dtype=DTYPE, device=DEVICE), page_format) for _ in range(2)]
    indices = torch_attention.write_indices(torch.tensor([5, 33, 17, 2], device=DEVICE), page_format.shape)
    qkv = random_rows(4, (3 + 2 * 2) * 16, seed=6)
    cos, sin = (random_rows(4, 1, 16, seed=i, dtype=torch.float32) for i in (7, 8))
    weight = 1 + random_rows(3 + 2, 16, seed=9).float()
    for options in (
        {"head_norm": Norm(weight, 1e-6, weight, True)},
        {"is_norm_late": True, "head_norm": Norm(weight, 1e-6)},
    ):
        actual = native.rope_write(qkv.clone(), cos, sin, pools[0], indices, **options)
        assert torch.equal(actual, torch_kernels.rope_write(qkv.clone(), cos, sin, pools[1], indices, **options))
        assert torch.equal(pools[0].data, pools[1].data)


def test_queries_alone_are_rotated_and_nothing_is_stored():
    page_format = torch_attention.page_format(LayerKV(2, 16, 16), DTYPE)
    pool = LayerPages(torch.zeros(3, *page_format.shape, dtype=DTYPE, device=DEVICE), page_format)
    indices = torch_attention.write_indices(torch.tensor([5, 33, 17, 2], device=DEVICE), page_format.shape)
    queries = random_rows(4, 3 * 16, seed=6)
    cos, sin = (random_rows(4, 1, 16, seed=i, dtype=torch.float32) for i in (7, 8))
    options = {"head_norm": Norm(1 + random_rows(3, 16, seed=9).float(), 1e-6), "is_query_only": True}
    result = triton_kernels.rope_write(queries, cos, sin, pool, indices, **options)
    assert_close(result, torch_kernels.rope_write(queries.clone(), cos, sin, pool, indices, **options))
    assert not pool.data.any()


def test_rows_without_a_place_are_not_stored():
    layer = LayerKV(1, 16, 16)
    page_format = torch_attention.page_format(layer, DTYPE)
    pool = LayerPages(torch.zeros(2, *page_format.shape, dtype=DTYPE, device=DEVICE), page_format)
    indices = torch_attention.write_indices(torch.tensor([-1, 3], device=DEVICE), page_format.shape)
    empty = torch.empty(2, 1, 0, device=DEVICE)
    triton_kernels.rope_write(random_rows(2, 48, seed=1), empty, empty, pool, indices)
    written = pool.data.flatten(0, -2).abs().sum(-1).nonzero()[:, 0]
    assert written.tolist() == [3, 19]  # of page 0: the key and the value at offset 3


def test_sparse_gates_and_sizes_of_rows():
    rows, models = random_rows(ROWS, 2 * WIDTH, seed=8), 3 * random_rows(ROWS, 2 * WIDTH, seed=9)
    sparse, sized = triton_kernels.sparsify_gates(rows.clone(), 0.4), triton_kernels.match_sizes(rows, models)
    assert_close(sparse, torch_streams.sparsify_gates(rows.clone(), 0.4))
    assert_close(sized, torch_streams.match_sizes(rows, models))
    for i in range(ROWS):
        row = rows[i : i + 1]
        assert torch.equal(triton_kernels.sparsify_gates(row.clone(), 0.4)[0], sparse[i])
        assert torch.equal(triton_kernels.match_sizes(row, models[i : i + 1])[0], sized[i])
