"""Linear layers with int8 weights, for every instruction set of this CPU: exact, so bit for bit equal to torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parley.native import build, library, torch_int8, torch_kernels
from parley.native.compiled import Kernels

COUNTS = [*range(1, 65), 100, 128, 256, 512]
EPS = 1e-6


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=["torch", *(build.usable() if library.load() else [])])
def kernels(request):
    return torch_kernels if request.param == "torch" else Kernels(library.open_level(request.param))


@pytest.fixture
def threads():
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(outer: int, inner: int, bias: bool = True, seed: int = 1):
    """A weight as int8 with scales, and a bias."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, (outer, inner), generator=generator, dtype=torch.int8)
    scales = torch.rand(outer, generator=generator) * 0.01 + 1e-4
    return values, scales, noise(outer, seed=seed + 1) if bias else None


def agree(got: torch.Tensor, rows, values, scales, bias) -> None:
    """float32 results equal the integer result but for four roundings: of the sum, two products and the bias."""
    product = rows.values[:, : values.shape[1]].double() @ values.double().T
    product *= rows.scales.double()[:, None] * scales.double()
    offset = torch.zeros(len(values)).double() if bias is None else bias.double()
    assert got.dtype == torch.float32 and got.shape == product.shape
    assert ((got - product - offset).abs() <= (product.abs() + offset.abs()) * 2**-22).all()


@pytest.mark.parametrize(("inner", "outer"), [(896, 160), (4864, 96), (4096, 96), (14336, 32), (333, 77), (1, 1)])
def test_int8_linear_row_is_batch_invariant(kernels, threads, inner, outer):
    """Guards against a row whose result depends on the batch size or the thread count."""
    x, weight = noise(512, inner), make(outer, inner)
    packed = kernels.pack_int8(*weight, torch.bfloat16)
    threads(1)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(len(x))])
    wide = torch.cat([kernels.logits(x[i : i + 1], packed) for i in range(0, len(x), 5)])
    for count in COUNTS:
        threads(1 + count % 3)
        first = (7 * count) % (len(x) - count + 1)
        part = slice(first, first + count)
        assert torch.equal(kernels.linear(x[part], packed), alone[part]), count
    whole = kernels.logits(x, packed)
    assert torch.equal(whole[::5], wide)
    agree(whole, torch_int8.quantise(x), *weight)
    assert torch.equal(alone, whole.to(torch.bfloat16))


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
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    x, weight = noise(rows, inner, seed=seed), make(outer, inner, bias, seed)
    packed = kernels.pack_int8(*weight, torch.bfloat16)
    quantised = kernels.quantise(x)
    got, wide = kernels.linear(quantised, packed), kernels.logits(x, packed)
    torch.set_num_threads(before)
    expected = torch_int8.quantise(x)
    assert torch.equal(quantised.values[:, :inner], expected.values)
    assert quantised.values[:, inner:].count_nonzero() == 0
    assert torch.equal(quantised.scales, expected.scales)
    plain = torch_int8.pack_int8(*weight, torch.bfloat16)
    assert got.dtype == torch.bfloat16 and torch.equal(got, torch_kernels.linear(expected, plain))
    assert wide.dtype == torch.float32 and torch.equal(wide, torch_kernels.logits(expected, plain))
    agree(wide, expected, *weight)


@pytest.mark.parametrize("inner", [4864, 131072])
def test_int8_sums_are_exact_at_their_limits(kernels, inner):
    """Guards against an int32 overflow in the sum of a long row."""
    x = torch.ones(5, inner, dtype=torch.bfloat16)
    x[1] = -1
    x[2, ::2] = -1
    values = torch.full((40, inner), 127, dtype=torch.int8)
    values[1], values[2, 1::2] = -128, -128
    packed = kernels.pack_int8(values, torch.ones(40), None, torch.bfloat16)
    got = kernels.logits(x, packed)
    sign = x.sign().double()
    want = sign @ values.double().T * 127 * float(torch.tensor(1 / 127, dtype=torch.float32))
    assert torch.allclose(got.double(), want, rtol=2**-22)
    with pytest.raises(ValueError, match="32 bits"):
        kernels.pack_int8(torch.zeros(1, 131073, dtype=torch.int8), torch.ones(1), None, torch.bfloat16)


@pytest.mark.parametrize("inner", [64, 65, 4864])
def test_nan_and_inf_stay_in_their_row_of_int8_linear(kernels, inner):
    """Guards against a blocked kernel that mixes NaN or infinity of one row into its neighbors."""
    x, weight = noise(20, inner), make(40, inner)
    packed = kernels.pack_int8(*weight, torch.bfloat16)
    clean = kernels.linear(x, packed)
    x[7, 3], x[8, inner - 1], x[9] = float("nan"), float("-inf"), float("nan")
    rows = kernels.quantise(x)
    assert rows.scales[7:10].isnan().all() and rows.values[7:10].count_nonzero() == 0
    got = kernels.linear(rows, packed)
    assert got[7:10].isnan().all()
    rest = [i for i in range(20) if i not in (7, 8, 9)]
    assert torch.equal(got[rest], clean[rest])


def test_int8_rows_of_zeros_and_tiny_values_become_zero(kernels):
    """Guards against a division by a zero or denormal scale."""
    x = torch.zeros(4, 70, dtype=torch.bfloat16)
    x[1], x[2, 5], x[3, 69] = 1e-38, -1e-39, 2.0**-99
    values, scales, bias = make(33, 70)
    rows = kernels.quantise(x)
    assert rows.values[:3].count_nonzero() == 0 and rows.values[3, 69] == 127
    got = kernels.logits(rows, kernels.pack_int8(values, scales, bias, torch.bfloat16))
    assert torch.allclose(got.double(), bias.double().expand(4, -1), atol=1e-25)


def test_int8_rounds_ties_to_even(kernels):
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, :9] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5, -127.0])
    assert kernels.quantise(x).values[0, :9].tolist() == [127, 0, 2, 2, 0, -2, -2, 64, -127]


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 70), width=st.integers(1, 900), number=st.integers(1, 3), seed=st.integers(0, 99))
def test_fused_int8_norm_and_silu_equal_two_passes(kernels, rows, width, number, seed):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    x, residual, weight = noise(rows, width, seed=seed), noise(rows, width, seed=seed + 1), noise(width, seed=seed + 2)
    both = noise(rows, 2 * width, seed=seed + 3) * 8
    norm, total = kernels.add_rms_norm(x, residual, weight, EPS)
    fused, again = kernels.add_rms_norm(x, residual, weight, EPS, int8=True)
    pairs = [
        (norm, fused),
        (kernels.rms_norm(x, weight, EPS), kernels.rms_norm(x, weight, EPS, int8=True)),
        (kernels.silu_mul(both), kernels.silu_mul(both, int8=True)),
    ]
    torch.set_num_threads(before)
    assert torch.equal(total, again)
    for plain, got in pairs:
        want = torch_int8.quantise(plain)
        assert torch.equal(got.values[:, :width], want.values) and torch.equal(got.scales, want.scales)
        if kernels is not torch_kernels:
            assert torch.equal(got.excess, 128 * want.values.sum(1, dtype=torch.int32))


def test_int8_linear_rejects_wrong_row_width(kernels):
    if kernels is torch_kernels:
        pytest.skip("torch raises its own error")
    packed = kernels.pack_int8(*make(8, 48), torch.bfloat16)
    with pytest.raises(ValueError, match="52"):
        kernels.linear(noise(2, 49), packed)


def test_torch_int8_product_is_exact_without_int32_sums(monkeypatch):
    """Simulates a CPU whose torch sums pairs of an integer product in 16 bits."""
    x, weight = noise(6, 2500), make(17, 2500)
    packed = torch_int8.pack_int8(*weight, torch.bfloat16)
    want = torch_kernels.logits(x, packed)
    monkeypatch.setattr(torch_int8, "_whole", lambda: False)
    assert torch.equal(torch_kernels.logits(x, packed), want)
