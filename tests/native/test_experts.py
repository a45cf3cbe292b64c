"""Mixtures of experts: kernels against their definitions, and bits of a row that depend on no other row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.random_tensors import random_tensor

from parley import native
from parley.native import kernel_choice
from parley.native.layer_shape import GateLimits
from parley.native.torch_forms import torch_experts

FORMATS = ("bf16", "int8", "int4", "e2m1")


pytestmark = pytest.mark.usefixtures("kernel_level")


def pack_random(kind: str, out_features: int, in_features: int, seed: int) -> native.PackedWeight:
    bias = random_tensor(out_features, seed=seed + 1000)
    if kind == "e2m1":
        source = torch.Generator().manual_seed(seed)
        values = torch.randint(0, 16, (out_features, in_features), generator=source).byte()
        scales = 2.0 ** torch.randint(-6, -1, (out_features, -(-in_features // 32)), generator=source)
        return native.pack_grouped(native.GroupedWeight(values, scales, None, 32, code="e2m1"), bias, torch.bfloat16)
    weight = random_tensor(out_features, in_features, seed=seed, dtype=torch.float32) * in_features**-0.5
    if kind == "int8":
        rows = native.quantize_rows(weight)
        return native.pack_int8(rows.values[:, :in_features], rows.scales, bias, torch.bfloat16)
    if kind in ("q4_k", "q6_k"):
        if (kernels := kernel_choice.compiled_kernels()) is None:
            pytest.skip("without compiled kernels, blocks are decoded")
        source = torch.Generator().manual_seed(seed)
        values = torch.randint(0, 16 if kind == "q4_k" else 64, (out_features, in_features), generator=source).byte()
        heads = torch.randint(0, 256, (out_features, in_features // 256, 20), generator=source).byte()
        heads[..., 1:4:2] = 5  # scales and minimums of about 1e-4
        return kernels.pack_grouped_parts([native.PackedBlockWeight(values, heads.view(torch.int32), kind)], bias)
    if kind == "int4":
        return native.pack_grouped(native.round_int4(weight, 32), bias, torch.bfloat16)
    return native.pack_weight(weight.bfloat16(), bias)


def random_experts(
    kinds: tuple[str, str], count: int, hidden: int, width: int, *, is_gated: bool = True
) -> tuple[native.Experts, list]:
    """Return experts, and the packed weights of each as dense layers."""
    single = [
        (pack_random(kinds[0], (1 + is_gated) * width, hidden, 2 * i), pack_random(kinds[1], hidden, width, 2 * i + 1))
        for i in range(count)
    ]
    gate_up, down = (native.stack_experts(iter(expert_weights), count) for expert_weights in zip(*single, strict=True))
    return native.Experts(count, gate_up, down, is_gated), single


def random_routing(rows: int, experts: int, chosen: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    logits = random_tensor(rows, experts, seed=seed + 7, dtype=torch.float32)
    return native.route(logits, None, native.Routing(experts, chosen, normalized=True))


@pytest.mark.parametrize(
    ("kinds", "activation"),
    [
        (("bf16", "bf16"), "silu"),
        (("int8", "int4"), "silu"),
        (("int4", "int8"), "gelu"),
        (("e2m1", "e2m1"), "clamped_swiglu"),
        (("q4_k", "q6_k"), "silu"),
        (("bf16", "int8"), "relu2"),
    ],
)
def test_experts_equal_dense_layers(kinds, activation):
    """The MLP of an expert gives a row what the same weights give in a dense layer."""
    count, chosen = 5, 2
    hidden, width = (256, 512) if kinds[0] == "q4_k" else (64, 40)
    is_gated = activation != "relu2"
    experts, single = random_experts(kinds, count, hidden, width, is_gated=is_gated)
    x, shared = random_tensor(30, hidden), random_tensor(30, hidden, seed=5)
    ids, weights = random_routing(30, count, chosen)
    weights = torch.cat((weights, torch.rand(30, 1)), -1)
    outputs = torch.stack(
        [
            native.lm_head_logits(native.activate(native.linear(x, gate_up), activation, is_gated=is_gated), down)
            for gate_up, down in single
        ],
        1,
    )
    expected = weights[:, -1:] * shared.float()
    for slot in range(chosen):
        expected += weights[:, slot, None] * outputs[torch.arange(30), ids[:, slot]]
    actual = native.mix_experts(x, experts, ids, weights, shared, activation)
    assert ((actual - expected).abs() <= expected.abs() * 2**-8 + 1e-5).all()


@pytest.mark.parametrize(("kind", "limit"), [("bf16", 1e-2), ("int8", 3e-2)])
def test_experts_read_rows_times_their_weights(kind, limit):
    """As in Llama 4, where weights multiply what experts read. Each row has the same bits alone."""
    experts, single = random_experts((kind, "bf16"), 4, 64, 40)
    x, shared = random_tensor(30, 64), random_tensor(30, 64, seed=5)
    ids, weights = random_routing(30, 4, 2)
    weights = torch.cat((weights, torch.ones(30, 1)), -1)
    expected = shared.float()
    for slot in range(2):
        rows = (x * weights[:, slot, None]).bfloat16()
        outputs = torch.stack(
            [native.lm_head_logits(native.activate(native.linear(rows, up), "silu"), down) for up, down in single], 1
        )
        expected = expected + outputs[torch.arange(30), ids[:, slot]]
    actual = native.mix_experts(x, experts, ids, weights, shared, weighs_inputs=True)
    assert (actual - expected).norm() / expected.norm() < limit
    alone = native.mix_experts(x[7:8], experts, ids[7:8], weights[7:8], shared[7:8], weighs_inputs=True)
    assert torch.equal(alone, actual[7:8])


@pytest.mark.parametrize("kinds", [("bf16", "bf16"), ("int8", "int8"), ("e2m1", "int4")])
def test_gates_and_ups_of_experts_have_limits(kinds):
    """As in Step 3.5. Each row has the same bits alone."""
    experts, single = random_experts(kinds, 4, 64, 40)
    x, (ids, weights) = random_tensor(30, 64), random_routing(30, 4, 2)
    limits = GateLimits(0.25, 0.5)
    gates = [native.linear(x, gate_up) for gate_up, _ in single]
    limited = [torch.cat((each[:, :40].clamp(max=0.25), each[:, 40:].clamp(-0.5, 0.5)), 1) for each in gates]
    assert all(
        torch.equal(native.limit_gates(each.clone(), limits), rows) for each, rows in zip(gates, limited, strict=True)
    )
    outputs = torch.stack(
        [
            native.lm_head_logits(native.activate(rows, "silu"), down)
            for rows, (_, down) in zip(limited, single, strict=True)
        ],
        1,
    )
    expected = sum(weights[:, slot, None] * outputs[torch.arange(30), ids[:, slot]] for slot in range(2))
    actual = native.mix_experts(x, experts, ids, weights, limits=limits)
    assert ((actual - expected).abs() <= expected.abs() * 2**-8 + 1e-5).all()
    assert not torch.equal(actual, native.mix_experts(x, experts, ids, weights))
    alone = native.mix_experts(x[7:8], experts, ids[7:8], weights[7:8], limits=limits)
    assert torch.equal(alone, actual[7:8])


@settings(max_examples=5, deadline=None)
@given(
    kinds=st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    count=st.integers(1, 9),
    chosen=st.integers(1, 4),
    rows=st.integers(1, 30),
    threads=st.integers(1, 3),
)
@example(kinds=("int4", "bf16"), sizes=(9, 5), count=2, chosen=2, rows=29, threads=3)
@example(kinds=("int8", "bf16"), sizes=(8, 8), count=2, chosen=2, rows=30, threads=2)  # gates within a product
@example(kinds=("bf16", "int8"), sizes=(8, 8), count=2, chosen=2, rows=30, threads=2)
def test_bits_of_a_row_depend_on_no_other_row(kinds, sizes, count, chosen, rows, threads):
    chosen = min(chosen, count)
    experts, _ = random_experts(kinds, count, 8 * sizes[0], 8 * sizes[1])
    x, (ids, weights) = random_tensor(rows, 8 * sizes[0]), random_routing(rows, count, chosen)
    together = native.mix_experts(x, experts, ids, weights)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    alone = [native.mix_experts(x[i : i + 1], experts, ids[i : i + 1], weights[i : i + 1]) for i in range(rows)]
    torch.set_num_threads(before)
    assert together.isfinite().all() and torch.equal(together, torch.cat(alone))


def test_many_rows_are_computed_in_passes():
    experts, _ = random_experts(("bf16", "int8"), 3, 16, 8)
    x, (ids, weights) = random_tensor(3000, 16), random_routing(3000, 3, 2)
    together = native.mix_experts(x, experts, ids, weights)
    portions = zip(x.split(999), ids.split(999), weights.split(999), strict=True)
    apart = [native.mix_experts(rows, experts, *routed) for rows, *routed in portions]
    assert torch.equal(together, torch.cat(apart))


def test_experts_reject_rows_of_another_width(kernel_level):
    experts, _ = random_experts(("bf16", "bf16"), 2, 16, 8)
    with pytest.raises((ValueError, RuntimeError)):
        native.mix_experts(random_tensor(1, 24), experts, *random_routing(1, 2, 1))


def test_stacked_weights_reject_a_permutation():
    weight = native.round_int4(random_tensor(8, 16), 16)._replace(order=torch.arange(16).flip(0))
    if kernel_choice.compiled_kernels() is None:
        pytest.skip("torch's kernels undo the permutation")
    with pytest.raises(ValueError, match="order of their own"):
        native.stack_experts(iter([native.pack_grouped(weight, None, torch.bfloat16)]), 1)


def test_stacked_weights_reject_different_forms():
    packed = [pack_random(kind, 256, 256, seed) for seed, kind in enumerate(("bf16", "int8"))]
    with pytest.raises(ValueError, match="quantized differently"):
        native.stack_experts(iter(packed), 2)


ROUTINGS = [
    native.Routing(8, 2, normalized=True),
    native.Routing(60, 4, shared=2),
    native.Routing(33, 6, sigmoid=True, normalized=True, scale=2.5, shared=1),
    native.Routing(32, 4, groups=8, chosen_groups=3, group_best=2, sigmoid=True, normalized=True),
    native.Routing(20, 3, groups=4, chosen_groups=2, group_best=1, scale=16.0),
    native.Routing(1, 1),
    native.Routing(16, 2, margin=0.02),
    native.Routing(9, 3, margin=0.5, shared=1),
    native.Routing(24, 5, sigmoid=True, chooses_by_logits=True),
]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_router_agrees_with_its_definition(routing, biased):
    logits = random_tensor(200, routing.experts + (routing.shared == 2), dtype=torch.float32) * 3
    bias = random_tensor(routing.experts, seed=4, dtype=torch.float32) if biased else None
    ids, weights = native.route(logits, bias, routing)
    expected_ids, expected_weights = torch_experts.route(logits, bias, routing)
    assert torch.equal(ids, expected_ids)
    assert weights.shape == (200, routing.experts_per_token + bool(routing.shared))
    assert torch.allclose(weights, expected_weights, rtol=2e-6, atol=1e-9)
    assert torch.equal(torch.cat([native.route(row, bias, routing)[1] for row in logits.split(7)]), weights)


@pytest.mark.parametrize("routing", ROUTINGS[:5])
def test_equal_scores_are_decided_by_the_lowest_number(routing):
    logits = torch.zeros(3, routing.experts + (routing.shared == 2))
    logits[1, 5], logits[2, [3, 7]] = 2.0, 1.0
    ids, _ = native.route(logits, None, routing)
    assert ids[0].tolist() == list(range(routing.experts_per_token))
    assert ids[1, 0] == 5 and ids[2, :2].tolist() == [3, 7]


def test_router_chooses_distinct_experts_of_undefined_scores():
    routing = native.Routing(8, 3)
    ids, weights = native.route(torch.full((2, 8), torch.nan), None, routing)
    assert all(len(set(row)) == 3 for row in ids.tolist()) and weights.isnan().all()
