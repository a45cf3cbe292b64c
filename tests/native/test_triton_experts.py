"""Mixtures of experts in Triton: against their definition, and a row's bits in any batch."""

from __future__ import annotations

import pytest
import torch
from support.triton_device import DEVICE, DTYPE, random_rows, use_triton

from parley import native
from parley.native import kernel_choice
from parley.native.experts import Experts, expert_of, stack_experts
from parley.native.layer_shape import GateLimits, Routing
from parley.native.torch_forms import torch_experts, torch_int8, torch_kernels
from parley.native.torch_forms.torch_grouped import GroupedWeight, dequantize_grouped
from parley.native.triton_forms import triton_experts, triton_kernels
from parley.native.triton_forms.triton_packed import TritonGroupedPacked, TritonInt8Packed, TritonPacked

HIDDEN, WIDTH, COUNT, CHOSEN = 64, 40, 5, 2
FORMATS = ("plain", "int8", "int4", "e4m3", "e2m1")


def pack_pair(kind: str, out_features: int, in_features: int, seed: int):
    """Return a random weight with a bias: packed for Triton, and for the torch form."""
    bias = random_rows(out_features, seed=seed + 500)
    if kind in ("int4", "e4m3", "e2m1"):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(
            0, 120 if kind == "e4m3" else 16, (out_features, in_features), dtype=torch.uint8, generator=generator
        )
        groups = -(-in_features // 32)
        zeros = (
            torch.randint(0, 16, (out_features, groups), dtype=torch.uint8, generator=generator)
            if kind == "int4"
            else None
        )
        scales = random_rows(out_features, groups, seed=seed + 1).abs() / (400 if kind == "e4m3" else 30)
        weight = GroupedWeight(values.to(DEVICE), scales, None if zeros is None else zeros.to(DEVICE), 32, code=kind)
        plain = dequantize_grouped(weight).to(DTYPE)
        return triton_kernels.pack_grouped(weight, bias, DTYPE), torch_kernels.pack_weight(plain, bias)
    weight = random_rows(out_features, in_features, seed=seed, dtype=torch.float32) * in_features**-0.5
    if kind == "int8":
        rows = torch_int8.quantize_rows(weight)
        return (
            triton_kernels.pack_int8(rows.values, rows.scales, bias, DTYPE),
            torch_kernels.pack_int8(rows.values, rows.scales, bias, DTYPE),
        )
    return TritonPacked(weight.to(DTYPE), bias), torch_kernels.pack_weight(weight.to(DTYPE), bias)


def random_experts(kinds: tuple[str, str], *, is_gated: bool = True) -> tuple[Experts, Experts]:
    """Return experts for Triton, and the same for the torch form."""
    outputs = WIDTH * (1 + is_gated)
    parts = [
        (*pack_pair(kinds[0], outputs, HIDDEN, 2 * i), *pack_pair(kinds[1], HIDDEN, WIDTH, 2 * i + 1))
        for i in range(COUNT)
    ]
    own_up, torch_up, own_down, torch_down = (
        stack_experts(iter(expert_weights), COUNT) for expert_weights in zip(*parts, strict=True)
    )
    return Experts(COUNT, own_up, own_down, is_gated), Experts(COUNT, torch_up, torch_down, is_gated)


def random_choice(rows: int, shared: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    logits = random_rows(rows, COUNT + (shared == 2), seed=rows, dtype=torch.float32)
    return torch_experts.route(logits, None, Routing(COUNT, CHOSEN, normalized=True, shared=shared))


def assert_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Formats round products to float16 in another order than the torch form at times."""
    assert (result.double() - expected.double()).norm() < 2e-3 * expected.double().norm()


@pytest.mark.parametrize(
    ("kinds", "activation"),
    [
        (("plain", "plain"), "silu"),
        (("int8", "int4"), "gelu"),
        (("int4", "int8"), "gelu_tanh"),
        (("e4m3", "e4m3"), "silu"),
        (("e2m1", "e2m1"), "clamped_swiglu"),
        (("plain", "int8"), "relu2"),
    ],
)
def test_experts_equal_the_torch_form(kinds, activation):
    """Pairs of expert and row apart, and sorted by expert: with the same bits."""
    own, defined = random_experts(kinds, is_gated=activation != "relu2")
    x, shared = random_rows(8, HIDDEN), random_rows(8, HIDDEN, seed=5)
    ids, weights = random_choice(8, 2)
    expected = torch_experts.mix_experts(x, defined, ids, weights, shared, activation)
    results = [
        triton_experts.mix_experts(x, own, ids, weights, shared, activation, is_sorted=is_sorted)
        for is_sorted in (False, True)
    ]
    assert_near(results[0], expected)
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_weights_of_inputs(kind):
    own, defined = random_experts((kind, "plain"))
    x, (ids, weights) = random_rows(5, HIDDEN), random_choice(5)
    expected = torch_experts.mix_experts(x, defined, ids, weights, weighs_inputs=True)
    assert_near(triton_experts.mix_experts(x, own, ids, weights, weighs_inputs=True), expected)


@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_limits_of_gates_and_ups(kind):
    own, defined = random_experts((kind, "plain"))
    x, (ids, weights) = random_rows(5, HIDDEN), random_choice(5)
    limits = GateLimits(0.25, 0.5)
    expected = torch_experts.mix_experts(x, defined, ids, weights, limits=limits)
    assert_near(triton_experts.mix_experts(x, own, ids, weights, limits=limits), expected)


@pytest.mark.parametrize("kind", ["plain", "e2m1"])
def test_bits_of_a_row_depend_on_no_other_row(kind):
    own, _ = random_experts((kind, kind))
    x, (ids, weights) = random_rows(21, HIDDEN), random_choice(21)
    together = triton_experts.mix_experts(x, own, ids, weights)
    for row in (0, 7, 20):
        part = slice(row, row + 1)
        assert torch.equal(triton_experts.mix_experts(x[part], own, ids[part], weights[part]), together[part])
    assert torch.equal(triton_experts.mix_experts(x[3:15], own, ids[3:15], weights[3:15]), together[3:15])


@pytest.mark.parametrize("rows", triton_experts.TILE_ROWS)
def test_every_tile_computes_pairs_right(rows):
    """All rows choose two of the experts, the others have no pair."""
    own, defined = random_experts(("plain", "e4m3"))
    count = rows * COUNT // 2 - 3
    x, weights = random_rows(count, HIDDEN), torch.full((count, 2), 0.5, device=DEVICE)
    ids = torch.tensor([[3, 1]], device=DEVICE).expand(count, 2)
    assert triton_experts.plan_tiles(ids, COUNT).rows == rows
    assert_near(triton_experts.mix_experts(x, own, ids, weights), torch_experts.mix_experts(x, defined, ids, weights))


@pytest.mark.parametrize("pairs", [1, 16, 17, 1500])
def test_pairs_are_sorted_into_tiles_of_one_expert(pairs):
    ids = torch.randint(0, 7, (pairs, 1), generator=torch.Generator().manual_seed(pairs)).to(DEVICE)
    plan = triton_experts.plan_tiles(ids, 9, is_sorted=True)
    seen = []
    for expert, first, end in plan.tiles.tolist():
        own = plan.sorted_pairs[first : min(end, first + plan.rows)].tolist()
        assert (ids.flatten()[own] == expert).all()
        seen += own
    assert seen == torch.sort(ids.flatten(), stable=True).indices.tolist()


def test_products_of_heads():
    weight, x = random_rows(3, 24, 40, seed=1), random_rows(20, 3, 50)[..., :40]
    packed = stack_experts((TritonPacked(expert_weight, None) for expert_weight in weight), 3)
    expected = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    result = triton_experts.linear_heads(x, packed)
    assert (result.double() - expected).abs().max() < 1e-3 * expected.abs().max()
    assert torch.equal(triton_experts.linear_heads(x[6:7], packed), result[6:7])


def test_no_rows_give_no_rows():
    own, _ = random_experts(("plain", "plain"))
    ids, weights = torch.empty(0, 2, dtype=torch.int64, device=DEVICE), torch.empty(0, 2, device=DEVICE)
    assert triton_experts.mix_experts(random_rows(0, HIDDEN), own, ids, weights).shape == (0, HIDDEN)


def test_experts_on_a_gpu_run_in_triton_in_the_format_that_they_are_stored_in(monkeypatch):
    """Also those that cuBLAS would multiply in a linear layer."""
    use_triton(monkeypatch)
    for kind, form in (("plain", TritonPacked), ("int8", TritonInt8Packed), ("e2m1", TritonGroupedPacked)):
        own, _ = random_experts((kind, kind))
        assert isinstance(own.gate_up, form)
        assert kernel_choice.form_of_stacked("mix_experts", own.gate_up) is triton_kernels
    cublas = stack_experts(iter([torch_kernels.pack_weight(random_rows(8, 8))]), 1)
    assert kernel_choice.form_of_stacked("mix_experts", cublas) is triton_kernels
    monkeypatch.setattr(kernel_choice, "own_kernels", lambda *arguments: None)
    assert kernel_choice.form_of_stacked("mix_experts", cublas) is torch_experts


def test_quantized_experts_that_differ_are_not_stacked():
    weight = GroupedWeight(
        torch.zeros(32, 64, dtype=torch.uint8, device=DEVICE), random_rows(32, 2), None, 32, code="int4"
    )
    pack = triton_kernels.pack_grouped
    with pytest.raises(native.Unstackable, match="an order of their own"):
        stack_experts(iter([pack(weight._replace(order=torch.arange(64).flip(0)), None, DTYPE)]), 1)
    other = weight._replace(scales=random_rows(32, 4), group=16)
    with pytest.raises(native.Unstackable, match="differently"):
        stack_experts(iter([pack(weight, None, DTYPE), pack(other, None, DTYPE)]), 2)
    stacked = stack_experts(iter([pack(weight, None, DTYPE)] * 2), 2)
    assert torch.equal(expert_of(stacked, 1).weight, pack(weight, None, DTYPE).weight)
