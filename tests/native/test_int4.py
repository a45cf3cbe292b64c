"""Linear layers with int4 weights, for every instruction set of this CPU: accurate and batch-invariant."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from parley import native
from parley.native import build, library, torch_kernels
from parley.native.compiled import Kernels
from parley.native.torch_int4 import Grouped, round_int4, widen

COUNTS = [*range(1, 65), 100, 128, 256, 512]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=build.usable())
def kernels(request) -> Kernels:
    try:
        build.compiler()
    except build.BuildError:
        pytest.skip("no C++ compiler")
    return Kernels(library.open_level(request.param))


@pytest.fixture
def threads():
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def drawn(outer: int, inner: int, group: int, seed: int = 0, ordered: bool = False) -> Grouped:
    """A weight with random values, scales and zero points, so that nothing is symmetric or trivial."""
    source = torch.Generator().manual_seed(seed)
    groups = -(-inner // group)
    return Grouped(
        torch.randint(0, 16, (outer, inner), generator=source, dtype=torch.uint8),
        torch.rand(outer, groups, generator=source).half() + 0.01,
        torch.randint(0, 16, (outer, groups), generator=source, dtype=torch.uint8),
        group,
        torch.randperm(inner, generator=source) if ordered else None,
    )


def meant(weight: Grouped) -> torch.Tensor:
    """The weight as float64 [out, in], computed number by number from the definition."""
    wide = torch.empty(weight.values.shape, dtype=torch.float64)
    for k in range(wide.shape[1]):
        place = k if weight.order is None else int(weight.order[k])
        group = k // weight.group
        difference = weight.values[:, k].double() - weight.zeros[:, group].double()
        wide[:, place] = difference * weight.scales[:, group].double()
    return wide


def agree(got: torch.Tensor, x: torch.Tensor, wide: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Allow the rounding error of float32 sums of these products, and one step of the result's type."""
    exact = x.double() @ wide.T + (0 if bias is None else bias.double())
    # The kernel multiplies numbers up to 8 before it subtracts a zero point up to 8, so rounding applies to those.
    most = x.double().abs().sum(-1, keepdim=True) * F.pad(wide.abs(), (0, 1)).amax(1)
    step = 2**-8 if got.dtype == torch.bfloat16 else 2**-23
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= exact.abs() * step + most * 2**-18 + 1e-30).all()


SHAPES = [(896, 160, 128), (4864, 40, 128), (333, 77, 32), (1101, 65, 1101), (1, 1, 128)]


@pytest.mark.parametrize(("inner", "outer", "group"), SHAPES)
def test_int4_linear_row_is_batch_invariant(kernels, threads, inner, outer, group):
    """Guards against a kernel that sums in another order for another batch size or thread count."""
    x, bias = noise(512, inner), noise(outer, seed=2)
    weight = drawn(outer, inner, group, seed=1)
    packed = kernels.pack_int4(weight, bias)
    threads(1)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(len(x))])
    wide = torch.cat([kernels.logits(x[i : i + 1], packed) for i in range(len(x))])
    for count in COUNTS:
        threads(1 + count % 3)
        first = (7 * count) % (len(x) - count + 1)
        part = slice(first, first + count)
        assert torch.equal(kernels.linear(x[part], packed), alone[part]), count
        assert torch.equal(kernels.logits(x[part], packed), wide[part]), count
    agree(alone, x, meant(weight), bias)
    agree(wide, x, meant(weight), bias)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 60),
    inner=st.integers(0, 600),
    outer=st.integers(0, 140),
    group=st.sampled_from([8, 32, 64, 128, 1024]),
    bias=st.booleans(),
    ordered=st.booleans(),
    number=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_int4_linear_is_accurate_for_any_shape(kernels, rows, inner, outer, group, bias, ordered, number, seed):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    x, weight = noise(rows, inner, seed=seed), drawn(outer, inner, group, seed, ordered)
    offset = noise(outer, seed=seed + 2) if bias else None
    got = kernels.linear(x, kernels.pack_int4(weight, offset))
    torch.set_num_threads(before)
    wide = meant(weight)
    assert torch.allclose(widen(weight).double(), wide, rtol=2**-22, atol=0)
    agree(got, x, wide, offset)
    if not inner or not outer:
        return
    # Torch multiplies with weights rounded to bfloat16.
    torchs = torch_kernels.linear(x, torch_kernels.pack_int4(weight, offset, torch.bfloat16)).double()
    most = x.double().abs() @ wide.abs().T
    assert ((got.double() - torchs).abs() <= torchs.abs() * 2**-7 + most * 2**-7 + 1e-30).all()


def test_nan_and_inf_stay_in_their_row_of_int4_linear(kernels):
    """Guards against a blocked kernel that mixes NaN or infinity of one row into its neighbors."""
    x, packed = noise(20, 130), kernels.pack_int4(drawn(70, 130, 32))
    clean = kernels.linear(x, packed)
    x[7, 3], x[8, 0], x[9] = float("nan"), float("inf"), float("nan")
    got = kernels.linear(x, packed)
    assert got[7].isnan().all() and not got[8].isfinite().any() and got[9].isnan().all()
    rest = [i for i in range(20) if i not in (7, 8, 9)]
    assert torch.equal(got[rest], clean[rest])


def test_int4_linear_reads_strided_rows_and_rejects_wrong_widths(kernels):
    weight, x = drawn(40, 48, 32), noise(24, 3, 96, seed=2)
    packed = kernels.pack_int4(weight)
    for rows in (x[:, 1, ::2], x[:, :, :48]):
        agree(kernels.linear(rows, packed).flatten(0, -2), rows.flatten(0, -2), meant(weight))
    with pytest.raises(ValueError, match="47"):
        kernels.linear(noise(2, 47), packed)
    with pytest.raises(ValueError, match="12"):
        kernels.pack_int4(drawn(4, 24, 12))


@settings(max_examples=60, deadline=None)
@given(
    inner=st.integers(0, 300),
    outer=st.integers(0, 40),
    group=st.sampled_from([8, 32, 128]),
    shift=st.sampled_from([0.0, 3.0, -100.0]),
    seed=st.integers(0, 99),
)
def test_int4_rounds_to_the_nearest_value(inner, outer, group, shift, seed):
    weight = noise(outer, inner, seed=seed) + shift
    weight[:, inner // 2 :] *= 2**-20
    rounded = round_int4(weight, group)
    assert (rounded.values <= 15).all() and (rounded.zeros <= 15).all()
    error = (widen(rounded) - weight.float()).abs()
    steps = rounded.scales.repeat_interleave(group, 1)[:, :inner]
    # Half a step, plus the shift at the ends caused by rounding the zero point to a whole number.
    assert (error <= steps * 1.01).all()
    inside = (rounded.values > 0) & (rounded.values < 15)
    assert (error[inside] <= steps[inside] * 0.501).all()


def test_int4_keeps_constant_groups(kernels):
    """Groups of zeros, groups of one repeated number, and a group with NaN."""
    weight = torch.zeros(6, 64, dtype=torch.bfloat16)
    weight[1], weight[2, :32], weight[3] = 5.0, -2.0, 1e-30
    rounded = round_int4(weight, 32)
    assert torch.allclose(widen(rounded), weight.float(), rtol=1e-6, atol=0)
    weight[4, 5] = float("nan")
    x = torch.eye(64, dtype=torch.bfloat16)
    got = kernels.linear(x, kernels.pack_int4(round_int4(weight, 32)))
    assert got[5, 4].isnan() and got[:, [0, 1, 2, 3, 5]].isfinite().all()


def test_int4_pack_follows_the_activation_dtype():
    weight, x = drawn(24, 64, 32), noise(3, 64)
    for dtype in (torch.bfloat16, torch.float32):
        got = native.linear(x.to(dtype), native.pack_int4(weight, None, dtype))
        assert got.dtype == dtype
        assert torch.allclose(got.double(), x.double() @ meant(weight).T, rtol=0.02, atol=0.3)
