"""Linear layers with int8 weights, for every instruction set of this CPU: exact, so bit for bit equal to torch's."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import random_tensor

from parley import native
from parley.native import build, library
from parley.native.compiled_forms.compiled_kernels import CompiledKernels
from parley.native.torch_forms import torch_int8, torch_kernels

COUNTS = [*range(1, 65), 100, 128, 256, 512]
EPS = 1e-6


@pytest.fixture(scope="module", params=["torch", *(build.usable_levels() if library.load_kernels() else [])])
def kernels(request):
    return torch_kernels if request.param == "torch" else CompiledKernels(library.open_level(request.param))


def random_int8_weight(outer: int, inner: int, bias: bool = True, seed: int = 1):
    """A weight as int8 with scales, and a bias."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, (outer, inner), generator=generator, dtype=torch.int8)
    scales = torch.rand(outer, generator=generator) * 0.01 + 1e-4
    return values, scales, random_tensor(outer, seed=seed + 1) if bias else None


def check_exact(actual: torch.Tensor, rows, values, scales, bias) -> None:
    """float32 results equal the integer result but for four roundings: of the sum, two products and the bias."""
    product = rows.values[:, : values.shape[1]].double() @ values.double().T
    product *= rows.scales.double()[:, None] * scales.double()
    offset = torch.zeros(len(values)).double() if bias is None else bias.double()
    assert actual.dtype == torch.float32 and actual.shape == product.shape
    assert ((actual - product - offset).abs() <= (product.abs() + offset.abs()) * 2**-22).all()


@pytest.mark.parametrize(("inner", "outer"), [(896, 160), (4864, 96), (4096, 96), (14336, 32), (333, 77), (1, 1)])
def test_int8_linear_row_is_batch_invariant(kernels, threads, inner, outer):
    """Guards against a row whose result depends on the batch size or the thread count."""
    x, weight = random_tensor(512, inner), random_int8_weight(outer, inner)
    packed = kernels.pack_int8(*weight)
    threads(1)
    rows_alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(len(x))])
    float32_rows_alone = torch.cat([kernels.lm_head_logits(x[i : i + 1], packed) for i in range(0, len(x), 5)])
    for count in COUNTS:
        threads(1 + count % 3)
        first = (7 * count) % (len(x) - count + 1)
        batch_rows = slice(first, first + count)
        assert torch.equal(kernels.linear(x[batch_rows], packed), rows_alone[batch_rows]), count
    float32_batch = kernels.lm_head_logits(x, packed)
    assert torch.equal(float32_batch[::5], float32_rows_alone)
    check_exact(float32_batch, torch_int8.quantize_rows(x), *weight)
    assert torch.equal(rows_alone, float32_batch.to(torch.bfloat16))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    inner=st.integers(0, 700),
    outer=st.integers(1, 100),
    bias=st.booleans(),
    number=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_int8_linear_equals_torch_kernels_for_any_shape(kernels, rows, inner, outer, bias, number, seed):
    old_threads = torch.get_num_threads()
    torch.set_num_threads(number)
    x, weight = random_tensor(rows, inner, seed=seed), random_int8_weight(outer, inner, bias, seed)
    packed = kernels.pack_int8(*weight)
    quantized = kernels.quantize_rows(x)
    actual, float32_result = kernels.linear(quantized, packed), kernels.lm_head_logits(x, packed)
    torch.set_num_threads(old_threads)
    expected = torch_int8.quantize_rows(x)
    assert torch.equal(quantized.values[:, :inner], expected.values)
    assert quantized.values[:, inner:].count_nonzero() == 0
    assert torch.equal(quantized.scales, expected.scales)
    torch_packed = torch_int8.pack_int8(*weight, torch.bfloat16)
    assert actual.dtype == torch.bfloat16 and torch.equal(actual, torch_kernels.linear(expected, torch_packed))
    assert float32_result.dtype == torch.float32 and torch.equal(
        float32_result, torch_kernels.lm_head_logits(expected, torch_packed)
    )
    check_exact(float32_result, expected, *weight)


@pytest.mark.parametrize("inner", [4864, 131072])
def test_int8_sums_are_exact_at_their_limits(kernels, inner):
    """Guards against an int32 overflow in the sum of a long row."""
    x = torch.ones(5, inner, dtype=torch.bfloat16)
    x[1] = -1
    x[2, ::2] = -1
    values = torch.full((40, inner), 127, dtype=torch.int8)
    values[1], values[2, 1::2] = -128, -128
    packed = kernels.pack_int8(values, torch.ones(40), None)
    actual = kernels.lm_head_logits(x, packed)
    sign = x.sign().double()
    expected = sign @ values.double().T * 127 * float(torch.tensor(1 / 127, dtype=torch.float32))
    assert torch.allclose(actual.double(), expected, rtol=2**-22)
    with pytest.raises(ValueError, match="32 bits"):
        kernels.pack_int8(torch.zeros(1, 131073, dtype=torch.int8), torch.ones(1), None)


def test_int8_pairs_are_exact_where_16_bits_would_overflow(kernels):
    """Guards against saturation where an instruction adds two products in 16 bits."""
    edges = [-127, -126, -65, -64, -63, -2, -1, 0, 1, 2, 63, 64, 65, 126, 127]
    pairs = torch.tensor(list(itertools.product(edges, edges)))
    scale_is_1 = torch.tensor([[127, 0, 0, 0, 0, 0]]).expand(len(pairs), -1)  # 6 numbers: pairs at each place of a word
    rolled_pairs = [pairs.roll(place, 0) for place in range(0, len(pairs), 3)]
    x = torch.cat([scale_is_1, *rolled_pairs], 1).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    extremes = torch.tensor([-128, -127, 127], dtype=torch.int8)
    values = extremes[torch.randint(0, 3, (40, x.shape[1]), generator=generator)]
    values[0], values[1], values[2], values[3, ::2] = 127, -128, 0, 0
    packed = kernels.pack_int8(values, torch.ones(40), None)
    rows = torch_int8.quantize_rows(x)
    assert torch.equal(rows.values, x.to(torch.int8))
    check_exact(kernels.lm_head_logits(x, packed), rows, values, torch.ones(40), None)
    for count in range(1, 14):  # tiles of each size
        assert torch.equal(kernels.lm_head_logits(x[:count], packed), kernels.lm_head_logits(x, packed)[:count]), count


@pytest.mark.parametrize("inner", [64, 65, 4864])
def test_nan_and_inf_stay_in_their_row_of_int8_linear(kernels, inner):
    """Guards against a blocked kernel that mixes NaN or infinity of one row into its neighbors."""
    x, weight = random_tensor(20, inner), random_int8_weight(40, inner)
    packed = kernels.pack_int8(*weight)
    clean = kernels.linear(x, packed)
    x[7, 3], x[8, inner - 1], x[9] = float("nan"), float("-inf"), float("nan")
    rows = kernels.quantize_rows(x)
    assert rows.scales[7:10].isnan().all() and rows.values[7:10].count_nonzero() == 0
    actual = kernels.linear(rows, packed)
    assert actual[7:10].isnan().all()
    other_rows = [i for i in range(20) if i not in (7, 8, 9)]
    assert torch.equal(actual[other_rows], clean[other_rows])


def test_int8_rows_of_zeros_and_tiny_values_become_zero(kernels):
    """Guards against a division by a zero or denormal scale."""
    x = torch.zeros(4, 70, dtype=torch.bfloat16)
    x[1], x[2, 5], x[3, 69] = 1e-38, -1e-39, 2.0**-99
    values, scales, bias = random_int8_weight(33, 70)
    rows = kernels.quantize_rows(x)
    assert rows.values[:3].count_nonzero() == 0 and rows.values[3, 69] == 127
    actual = kernels.lm_head_logits(rows, kernels.pack_int8(values, scales, bias))
    assert torch.allclose(actual.double(), bias.double().expand(4, -1), atol=1e-25)


def test_int8_rounds_ties_to_even(kernels):
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, :9] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5, -127.0])
    assert kernels.quantize_rows(x).values[0, :9].tolist() == [127, 0, 2, 2, 0, -2, -2, 64, -127]


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 70), width=st.integers(1, 900), number=st.integers(1, 3), seed=st.integers(0, 99))
def test_fused_int8_norm_and_silu_equal_two_passes(kernels, rows, width, number, seed):
    old_threads = torch.get_num_threads()
    torch.set_num_threads(number)
    x, residual = random_tensor(rows, width, seed=seed), random_tensor(rows, width, seed=seed + 1)
    weight = native.Norm(random_tensor(width, seed=seed + 2).float(), EPS)
    gate_up = random_tensor(rows, 2 * width, seed=seed + 3) * 8
    norm, total = kernels.add_norm(x, residual, weight)
    fused, int8_total = kernels.add_norm(x, residual, weight, int8=True)
    pairs = [
        (norm, fused),
        (kernels.norm_rows(x, weight), kernels.norm_rows(x, weight, int8=True)),
        (x, kernels.norm_rows(x, None, int8=True)),
        (kernels.activate(gate_up, "silu"), kernels.activate(gate_up, "silu", int8=True)),
    ]
    torch.set_num_threads(old_threads)
    assert torch.equal(total, int8_total)
    for plain, actual in pairs:
        expected = torch_int8.quantize_rows(plain)
        assert torch.equal(actual.values[:, :width], expected.values) and torch.equal(actual.scales, expected.scales)
        if kernels is not torch_kernels:
            assert torch.equal(actual.excess, 128 * expected.values.sum(1, dtype=torch.int32))


def test_int8_linear_rejects_wrong_row_width(kernels):
    if kernels is torch_kernels:
        pytest.skip("torch raises its own error")
    packed = kernels.pack_int8(*random_int8_weight(8, 48))
    with pytest.raises(ValueError, match="52"):
        kernels.linear(random_tensor(2, 49), packed)


def test_torch_int8_product_is_exact_without_int32_sums(monkeypatch):
    """Simulates a CPU whose torch sums pairs of an integer product in 16 bits."""
    x, weight = random_tensor(6, 2500), random_int8_weight(17, 2500)
    packed = torch_int8.pack_int8(*weight, torch.bfloat16)
    expected = torch_kernels.lm_head_logits(x, packed)
    monkeypatch.setattr(torch_int8, "int_mm_is_exact", lambda: False)
    assert torch.equal(torch_kernels.lm_head_logits(x, packed), expected)
