"""The compiled kernels, for every instruction set of this CPU: accurate, close to torch's, and batch-invariant."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.unpack_int4 import unpack

from parley import native
from parley.native import build, library, torch_attention, torch_kernels
from parley.native.compiled import Kernels
from parley.native.layout import LayerKV

try:
    build.compiler()
except build.BuildError:
    pytest.skip("no C++ compiler", allow_module_level=True)

COUNTS = [*range(1, 65), 100, 128, 256, 512]
EPS = 1e-5


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=build.usable())
def kernels(request) -> Kernels:
    return Kernels(library.open_level(request.param))


@pytest.fixture
def threads():
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agree(got: torch.Tensor, exact: torch.Tensor, inner: int, step: float = 2**-8) -> None:
    """Allow one rounding step of bfloat16 and the rounding error of sums of ``inner`` float32 products."""
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= exact.abs() * step + inner * 2**-20).all()


SHAPES = [(896, 160), (4864, 96), (4096, 96), (14336, 32), (333, 77), (50, 33), (1, 1)]


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_bf16_linear_row_is_batch_invariant(kernels, threads, inner, outer):
    """Guards against a kernel that sums in another order for another batch size or thread count."""
    x, weight, bias = noise(512, inner), noise(outer, inner, seed=1), noise(outer, seed=2)
    packed = kernels.pack(weight, bias)
    threads(1)
    alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(len(x))])
    wide = torch.cat([kernels.logits(x[i : i + 1], packed) for i in range(len(x))])
    for count in COUNTS:
        for number in (1, 2, 3):
            threads(number)
            first = (7 * count) % (len(x) - count + 1)
            part = slice(first, first + count)
            assert torch.equal(kernels.linear(x[part], packed), alone[part]), (count, number)
        assert torch.equal(kernels.logits(x[part], packed), wide[part]), count
    exact = x.double() @ weight.double().T + bias.double()
    agree(alone, exact, inner)
    assert (wide - exact).abs().max() <= inner * 2**-20
    agree(alone, torch_kernels.linear(x, torch_kernels.pack(weight, bias)).double(), inner, 2**-7)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    inner=st.integers(0, 700),
    outer=st.integers(0, 100),
    bias=st.booleans(),
    number=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_bf16_linear_is_accurate_for_any_shape(kernels, rows, inner, outer, bias, number, seed):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    x, weight = noise(rows, inner, seed=seed), noise(outer, inner, seed=seed + 1)
    offset = noise(outer, seed=seed + 2) if bias else None
    got = kernels.linear(x, kernels.pack(weight, offset))
    torch.set_num_threads(before)
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    agree(got, exact, inner)


def test_bf16_linear_reads_strided_inputs(kernels):
    """Guards against reading strided rows as if they were contiguous."""
    weight, x = noise(64, 48, seed=1), noise(24, 3, 96, seed=2)
    packed = kernels.pack(weight.t().contiguous().t())
    for rows in (x[:, 1, ::2], x[:, :, :48], x[1]):
        rows = rows[..., :48]
        agree(kernels.linear(rows, packed), rows.double() @ weight.double().T, 48)


def test_bf16_linear_rejects_wrong_row_width(kernels):
    with pytest.raises(ValueError, match="47"):
        kernels.linear(noise(2, 47), kernels.pack(noise(8, 48)))


@pytest.mark.parametrize("inner", [64, 65])
def test_nan_and_inf_stay_in_their_row_of_bf16_linear(kernels, inner):
    """Guards against a blocked kernel that mixes NaN or infinity of one row into its neighbors."""
    x = noise(20, inner)
    packed = kernels.pack(noise(40, inner, seed=1))
    clean = kernels.linear(x, packed)
    x[7, 3], x[8, 0], x[9] = float("nan"), float("inf"), float("nan")
    got = kernels.linear(x, packed)
    assert got[7].isnan().all() and not got[8].isfinite().any() and got[9].isnan().all()
    rest = [i for i in range(20) if i not in (7, 8, 9)]
    assert torch.equal(got[rest], clean[rest])
    norm, total = kernels.add_rms_norm(x, x, noise(inner), EPS)
    assert norm[7].isnan().all() and norm[rest].isfinite().all() and total[rest].isfinite().all()


def near(got: torch.Tensor, torchs: torch.Tensor) -> None:
    """At most two bfloat16 roundings apart."""
    assert got.shape == torchs.shape and got.dtype == torchs.dtype
    assert ((got.double() - torchs.double()).abs() <= torchs.double().abs() * 2**-7 + 1e-6).all()


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 70), width=st.integers(1, 900), number=st.integers(1, 3), seed=st.integers(0, 99))
def test_norm_and_silu_kernels_match_torch_for_any_shape(kernels, rows, width, number, seed):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    x, residual, weight = noise(rows, width, seed=seed), noise(rows, width, seed=seed + 1), noise(width, seed=seed + 2)
    kept = x.clone(), residual.clone()
    norm, total = kernels.add_rms_norm(x, residual, weight, EPS)
    plain = kernels.rms_norm(x, weight, EPS)
    both = noise(rows, 2 * width, seed=seed + 3) * 8
    active = kernels.silu_mul(both)
    for i in range(0, rows, 7):  # each row alone
        one = slice(i, i + 1)
        assert torch.equal(kernels.add_rms_norm(x[one], residual[one], weight, EPS)[0], norm[one])
        assert torch.equal(kernels.silu_mul(both[one]), active[one])
    torch.set_num_threads(before)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])
    expected, sums = torch_kernels.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, sums)
    near(norm, expected)
    near(plain, torch_kernels.rms_norm(x, weight, EPS))
    gate, up = both.float().chunk(2, -1)
    near(active, (torch.nn.functional.silu(gate) * up).to(torch.bfloat16))


def test_silu_mul_is_accurate_for_extreme_gates(kernels):
    gate = torch.tensor([-1e38, -300.0, -88.0, -0.0, 0.0, 1e-30, 88.0, 300.0, 1e38])
    got = kernels.silu_mul(torch.cat((gate, torch.ones(9))).to(torch.bfloat16).view(1, 18))
    assert torch.allclose(got[0].double(), (gate.double() * torch.sigmoid(gate.double())), rtol=2**-8, atol=1e-30)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 50),
    dim=st.integers(1, 140),
    half=st.integers(0, 70),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    norm=st.booleans(),
    seed=st.integers(0, 99),
)
def test_compiled_rope_write_matches_torch_kernels(kernels, rows, dim, half, heads, kv_heads, norm, seed):
    rotary = 2 * min(half, dim // 2)
    qkv = noise(rows, (heads + 2 * kv_heads) * dim, seed=seed)
    angles = torch.rand(rows, 1, rotary // 2, generator=torch.Generator().manual_seed(seed)) * 6
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    weight = noise(heads + kv_heads, dim, seed=seed + 1, dtype=torch.float32) if norm else None
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(seed))[:rows]
    results = []
    for form in (kernels, torch_kernels):
        layer = LayerKV(kv_heads, dim, dim)
        format = (torch_attention if form is torch_kernels else kernels).format(layer, torch.bfloat16)
        pool = native.Pool(torch.full((5, *format.shape), 7.0, dtype=torch.bfloat16), format)
        places = native.places(slots, format)
        queries = form.rope_write(qkv.clone(), cos, sin, pool, places, head_norm=weight, eps=1e-6)
        results.append((queries, *unpack(pool)))
    # Where two products nearly cancel, the absolute error of the difference is that of the products.
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape
        assert ((got.double() - want.double()).abs() <= want.double().abs() * 2**-7 + 1e-5).all()


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(0, 40),
    dim=st.integers(1, 140),
    value_dim=st.integers(1, 140),
    heads=st.integers(1, 3),
    int8=st.booleans(),
    seed=st.integers(0, 99),
)
def test_compiled_and_torch_kernels_write_equal_kv(kernels, rows, dim, value_dim, heads, int8, seed):
    layer, stored = LayerKV(heads, dim, value_dim), torch.int8 if int8 else torch.bfloat16
    keys, values = noise(rows, heads, dim, seed=seed), noise(rows, heads, value_dim, seed=seed + 1) * 30
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(seed))[:rows]
    results = []
    for form in (kernels, torch_attention):
        format = form.format(layer, stored)
        pool = native.Pool(torch.zeros(5, *format.shape, dtype=stored), format)
        form.write(keys, values, pool, native.places(slots, format))
        results.append(unpack(pool))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


# --- finding and compiling the kernels --------------------------------------------------------------------------------


@pytest.fixture
def load(monkeypatch, caplog):
    """Returns a function that loads the library with these variables set; it gives the library and the warnings."""

    def run(**variables: str):
        monkeypatch.delenv("PARLEY_NATIVE", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            return library._load.__wrapped__(), caplog.text

    return run


def test_native_off_uses_torch_without_warning(load):
    assert load(PARLEY_NATIVE="off") == (None, "")


def test_unsupported_native_level_warns_and_uses_torch(load):
    found, said = load(PARLEY_NATIVE="sse9")
    assert found is None and "sse9" in said and "generic" in said


def test_missing_compiler_warns_and_uses_torch(load, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "HERE", tmp_path)  # a folder without a library
    monkeypatch.setattr(build, "name", lambda level: f"kernels-none-{level}.so")
    monkeypatch.setattr(library, "open_level", library.open_level.__wrapped__)
    found, said = load(PATH="", CXX="", XDG_CACHE_HOME=str(tmp_path))
    assert found is None and "no C++ compiler" in said


def test_compile_error_warns_and_leaves_no_files(load, monkeypatch, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "broken.cpp").write_text("this is not C++")
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "name", lambda level: f"kernels-broken-{level}.so")
    monkeypatch.setattr(library, "open_level", library.open_level.__wrapped__)
    found, said = load()
    assert found is None and "broken.cpp" in said
    assert not list(tmp_path.glob("*.so")) and not list(tmp_path.glob(".build*"))


def test_concurrent_compiles_leave_one_library(monkeypatch, tmp_path):
    """Guards against temporary files that stay, and against a library that is loaded half-written."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tiny.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "HERE", tmp_path)
    folder = tmp_path / "made"
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: build.compile("generic", folder), range(4)))
    assert made == {folder / build.name("generic")} and [path.name for path in folder.iterdir()] == [made.pop().name]


def test_torch_kernels_pass_the_schedule_tests():
    """Runs some schedule tests of test_exact again with torch's kernels, as on a machine without a compiler."""
    chosen = "test_n_choices or test_preemption_in or test_prefix_hit"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        chosen,
        str(Path(__file__).parents[1] / "model" / "test_exact.py"),
    ]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PARLEY_NATIVE": "off"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
