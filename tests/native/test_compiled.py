"""The compiled kernels, for every instruction set of this CPU: accurate, close to torch's, and batch-invariant."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import random_tensor
from support.unpack_int4 import unpack_pages

from parley import native
from parley.native import build, library
from parley.native.compiled_forms.compiled_kernels import CompiledKernels
from parley.native.layer_shape import ACTIVATIONS
from parley.native.layout import LayerKV
from parley.native.torch_forms import torch_attention, torch_kernels

try:
    build.find_compiler()
except build.BuildError:
    pytest.skip("no C++ compiler", allow_module_level=True)

COUNTS = [*range(1, 65), 100, 128, 256, 512]
EPS = 1e-5
IS_NIGHT = bool(os.environ.get("PARLEY_NIGHTLY"))
FACTORS = 0.8, 0.7, 0.5  # of xielu


@pytest.fixture(scope="module", params=build.usable_levels())
def kernels(request) -> CompiledKernels:
    return CompiledKernels(library.open_level(request.param))


def check_accuracy(actual: torch.Tensor, exact: torch.Tensor, inner: int, step: float = 2**-8) -> None:
    """Allow one rounding step of bfloat16 and the rounding error of sums of ``inner`` float32 products."""
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= exact.abs() * step + inner * 2**-20).all()


SHAPES = [(896, 160), (4864, 96), (4096, 96), (14336, 32), (333, 77), (50, 33), (1, 1)]


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_bf16_linear_row_is_batch_invariant(kernels, threads, inner, outer):
    """Guards against a kernel that sums in another order for another batch size or thread count. By day each batch size
    is computed by one number of threads."""
    x, weight, bias = random_tensor(512, inner), random_tensor(outer, inner, seed=1), random_tensor(outer, seed=2)
    packed = kernels.pack_weight(weight, bias)
    threads(1)
    rows_alone = torch.cat([kernels.linear(x[i : i + 1], packed) for i in range(len(x))])
    float32_rows_alone = torch.cat([kernels.lm_head_logits(x[i : i + 1], packed) for i in range(len(x))])
    for count in COUNTS:
        for thread_count in (1, 2, 3) if IS_NIGHT else (1 + count % 3,):
            threads(thread_count)
            first = (7 * count) % (len(x) - count + 1)
            batch_rows = slice(first, first + count)
            assert torch.equal(kernels.linear(x[batch_rows], packed), rows_alone[batch_rows]), (count, thread_count)
        assert torch.equal(kernels.lm_head_logits(x[batch_rows], packed), float32_rows_alone[batch_rows]), count
    exact = x.double() @ weight.double().T + bias.double()
    check_accuracy(rows_alone, exact, inner)
    assert (float32_rows_alone - exact).abs().max() <= inner * 2**-20
    check_accuracy(rows_alone, torch_kernels.linear(x, torch_kernels.pack_weight(weight, bias)).double(), inner, 2**-7)


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
    old_threads = torch.get_num_threads()
    torch.set_num_threads(number)
    x, weight = random_tensor(rows, inner, seed=seed), random_tensor(outer, inner, seed=seed + 1)
    offset = random_tensor(outer, seed=seed + 2) if bias else None
    actual = kernels.linear(x, kernels.pack_weight(weight, offset))
    torch.set_num_threads(old_threads)
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    check_accuracy(actual, exact, inner)


def test_bf16_linear_reads_strided_inputs(kernels):
    """Guards against reading strided rows as if they were contiguous."""
    weight, x = random_tensor(64, 48, seed=1), random_tensor(24, 3, 96, seed=2)
    packed = kernels.pack_weight(weight.t().contiguous().t())
    for rows in (x[:, 1, ::2], x[:, :, :48], x[1]):
        rows = rows[..., :48]
        check_accuracy(kernels.linear(rows, packed), rows.double() @ weight.double().T, 48)


def test_bf16_linear_rejects_wrong_row_width(kernels):
    with pytest.raises(ValueError, match="47"):
        kernels.linear(random_tensor(2, 47), kernels.pack_weight(random_tensor(8, 48)))


@pytest.mark.parametrize("inner", [64, 65])
def test_nan_and_inf_stay_in_their_row_of_bf16_linear(kernels, inner):
    """Guards against a blocked kernel that mixes NaN or infinity of one row into its neighbors."""
    x = random_tensor(20, inner)
    packed = kernels.pack_weight(random_tensor(40, inner, seed=1))
    clean = kernels.linear(x, packed)
    x[7, 3], x[8, 0], x[9] = float("nan"), float("inf"), float("nan")
    actual = kernels.linear(x, packed)
    assert actual[7].isnan().all() and not actual[8].isfinite().any() and actual[9].isnan().all()
    other_rows = [i for i in range(20) if i not in (7, 8, 9)]
    assert torch.equal(actual[other_rows], clean[other_rows])
    norm, total = kernels.add_norm(x, x, native.Norm(torch.ones(inner), EPS))
    assert norm[7].isnan().all() and norm[other_rows].isfinite().all() and total[other_rows].isfinite().all()


def check_close_to_torch(actual: torch.Tensor, torch_result: torch.Tensor, slack: float = 1e-6) -> None:
    """At most two bfloat16 roundings apart."""
    assert actual.shape == torch_result.shape and actual.dtype == torch_result.dtype
    assert ((actual.double() - torch_result.double()).abs() <= torch_result.double().abs() * 2**-7 + slack).all()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 70),
    width=st.integers(1, 900),
    number=st.integers(1, 3),
    seed=st.integers(0, 99),
    centered=st.booleans(),
    scaled=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
    gated=st.booleans(),
)
def test_norms_and_activations_match_torch_for_any_shape(
    kernels, rows, width, number, seed, centered, scaled, activation, gated
):
    old_threads = torch.get_num_threads()
    torch.set_num_threads(number)
    x, residual = random_tensor(rows, width, seed=seed), random_tensor(rows, width, seed=seed + 1)
    weight, bias = random_tensor(2, width, seed=seed + 2, dtype=torch.float32)
    norm = native.Norm(weight, EPS, bias if scaled else None, centered)
    options = {"after": native.Norm(bias, EPS), "scale": 0.3, "total_scale": 0.7} if scaled else {}
    inputs_before = x.clone(), residual.clone()
    normed, total = kernels.add_norm(x, residual, norm, **options)
    plain = kernels.norm_rows(x, norm)
    gate_up = random_tensor(rows, 2 * width, seed=seed + 3) * 8
    active = kernels.activate(gate_up, activation, is_gated=gated, factors=FACTORS)
    for i in range(0, rows, 7):  # each row alone
        one = slice(i, i + 1)
        assert torch.equal(kernels.add_norm(x[one], residual[one], norm, **options)[0], normed[one])
        assert torch.equal(kernels.activate(gate_up[one], activation, is_gated=gated, factors=FACTORS), active[one])
    torch.set_num_threads(old_threads)
    assert torch.equal(x, inputs_before[0]) and torch.equal(residual, inputs_before[1])
    _, sums = torch_kernels.add_norm(x, residual, None, **options)
    if scaled:  # torch rounds three times, and sums of bfloat16 may cancel
        assert ((total - sums).abs() <= (residual.abs() + sums.abs() + 1) * 2**-7).all()
    else:
        assert torch.equal(total, sums)
    check_close_to_torch(normed, torch_kernels.norm_rows(total, norm))
    check_close_to_torch(plain, torch_kernels.norm_rows(x, norm))
    expected = torch_kernels.activate(gate_up.float(), activation, is_gated=gated, factors=FACTORS)
    check_close_to_torch(active, expected.to(torch.bfloat16), slack=1e-6 if activation == "silu" else 2e-5)


def test_silu_is_accurate_for_gates_near_the_largest_number(kernels):
    """Guards against an exponential that overflows, and against an answer that is zero too early."""
    gate = torch.tensor([-1e38, -300.0, -88.0, -0.0, 0.0, 1e-30, 88.0, 300.0, 1e38])
    actual = kernels.activate(torch.cat((gate, torch.ones(9))).bfloat16()[None], "silu")[0].double()
    assert torch.allclose(actual, gate.double() * gate.double().sigmoid(), rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_accurate_for_extreme_inputs(kernels, activation):
    gate = torch.tensor([-1e9, -300.0, -88.0, -9.0, -1.0, -0.0, 0.0, 1e-30, 0.5, 88.0, 300.0, 1e9]).bfloat16()
    actual = kernels.activate(gate.repeat(2)[None], activation, factors=FACTORS)[0].double()
    expected = torch_kernels.activate(gate.repeat(2)[None].double(), activation, factors=FACTORS)[0]
    assert torch.allclose(actual, expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_activations_have_no_denormal_results(kernels, activation):
    """With them, the products after an activation take 10 times as long."""
    gate = torch.linspace(-80.0, -8.0, 4000).bfloat16()
    results = kernels.activate(gate[None], activation, is_gated=False)[0].float()
    assert ((results == 0) | (results.abs() >= torch.finfo(torch.bfloat16).tiny)).all()


def test_logits_are_scaled_and_capped_the_same_in_any_batch(kernels):
    logits = random_tensor(7, 333, dtype=torch.float32) * 40
    logits[0, :3] = torch.tensor([1e30, -1e30, 0.0])
    for cap in (None, 30.0):
        scaled = logits.double() * 0.25
        expected = scaled if cap is None else cap * (scaled / cap).tanh()
        actual = kernels.scale_logits(logits.clone(), 0.25, cap)
        assert torch.allclose(actual.double(), expected, rtol=1e-6, atol=1e-5)
        alone = [kernels.scale_logits(logits[i : i + 1].clone(), 0.25, cap) for i in range(7)]
        assert torch.equal(torch.cat(alone), actual)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 50),
    dim=st.integers(1, 140),
    half=st.integers(0, 70),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    norm=st.sampled_from([None, "heads", "whole", "late", "centered", "values"]),
    interleaved=st.booleans(),
    seed=st.integers(0, 99),
)
def test_compiled_rope_write_matches_torch_kernels(kernels, rows, dim, half, heads, kv_heads, norm, interleaved, seed):
    rotary = 2 * min(half, dim // 2)
    qkv = random_tensor(rows, (heads + 2 * kv_heads) * dim, seed=seed)
    angles = torch.rand(rows, 1, rotary // 2, generator=torch.Generator().manual_seed(seed)) * 6
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    weight = random_tensor(heads + kv_heads, dim, seed=seed + 1, dtype=torch.float32)
    options = {
        "head_norm": native.Norm(weight, 1e-6, weight if norm == "centered" else None, norm == "centered")
        if norm
        else None,
        "query_scales": torch.rand(rows, generator=torch.Generator().manual_seed(seed)) + 0.5
        if norm == "late"
        else None,
        "has_whole_norm": norm == "whole",
        "is_norm_late": norm == "late",
        "is_interleaved": interleaved,
        "has_normed_values": norm == "values",
    }
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(seed))[:rows]
    results = []
    for implementation in (kernels, torch_kernels):
        layer = LayerKV(kv_heads, dim, dim)
        page_format = (torch_attention if implementation is torch_kernels else kernels).page_format(
            layer, torch.bfloat16
        )
        pool = native.LayerPages(torch.full((5, *page_format.shape), 7.0, dtype=torch.bfloat16), page_format)
        places = native.write_indices(slots, page_format)
        queries = implementation.rope_write(qkv.clone(), cos, sin, pool, places, **options)
        results.append((queries, *unpack_pages(pool)))
    # Where two products nearly cancel, the absolute error of the difference is that of the products.
    # Each rounding to bfloat16 may fall to the other side. A late norm and scales round again: where that comes after
    # another one on the other side, which is rare, each is a step of up to 2**-7.
    usual, most = (3 * 2**-8, 3 * 2**-7) if norm == "late" else (2 * 2**-8, 2 * 2**-8)
    for actual, expected in zip(*results, strict=True):
        assert actual.shape == expected.shape
        error, size = (actual.double() - expected.double()).abs(), expected.double().abs()
        assert (error <= size * most + 1e-5).all()
        assert (error > size * usual + 1e-5).sum() <= 1


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
    layer, kv_dtype = LayerKV(heads, dim, value_dim), torch.int8 if int8 else torch.bfloat16
    keys, values = random_tensor(rows, heads, dim, seed=seed), random_tensor(rows, heads, value_dim, seed=seed + 1) * 30
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(seed))[:rows]
    results = []
    for implementation in (kernels, torch_attention):
        page_format = implementation.page_format(layer, kv_dtype)
        pool = native.LayerPages(torch.zeros(5, *page_format.shape, dtype=kv_dtype), page_format)
        implementation.write_kv(keys, values, pool, native.write_indices(slots, page_format))
        results.append(unpack_pages(pool))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


# --- finding and compiling the kernels --------------------------------------------------------------------------------


@pytest.fixture
def load_native(monkeypatch, caplog):
    """Returns a function that loads the library with these variables set; it gives the library and the warnings."""

    def load_with_environment(**variables: str):
        monkeypatch.delenv("PARLEY_NATIVE", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            return library.open_requested_level(), caplog.text

    return load_with_environment


def test_native_off_uses_torch_without_warning(load_native):
    assert load_native(PARLEY_NATIVE="off") == (None, "")


def test_unsupported_native_level_warns_and_uses_torch(load_native):
    kernels_library, warnings = load_native(PARLEY_NATIVE="sse9")
    assert kernels_library is None and "sse9" in warnings and "generic" in warnings


def test_missing_compiler_warns_and_uses_torch(load_native, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "HERE", tmp_path)  # a folder without a library
    monkeypatch.setattr(build, "library_name", lambda level: f"kernels-none-{level}.so")
    monkeypatch.setattr(library, "open_level", library.open_level.__wrapped__)
    kernels_library, warnings = load_native(PATH="", CXX="", XDG_CACHE_HOME=str(tmp_path))
    assert kernels_library is None and "no C++ compiler" in warnings


@pytest.mark.skipif(len(build.usable_levels()) < 2, reason="this CPU has one level")
def test_missing_best_level_warns_and_uses_the_best_that_is_there(load_native, monkeypatch, tmp_path):
    """As after an installation from a wheel that was built with an old compiler, on a machine without one."""
    best, *_, last = build.usable_levels()
    shutil.copy(build.compile_level(last, build.HERE), tmp_path)
    names = {level: build.library_name(level) for level in build.LEVELS}
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "library_name", names.__getitem__)
    monkeypatch.setattr(library, "open_level", library.open_level.__wrapped__)
    environment = {"PATH": "", "CXX": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    kernels_library, warnings = load_native(**environment)
    assert kernels_library._name == str(tmp_path / names[last])
    assert f"kernels for {last}, not the faster ones for {best}: no C++ compiler" in warnings
    kernels_library, warnings = load_native(**environment, PARLEY_NATIVE=best)
    assert kernels_library is None and "no C++ compiler" in warnings


# Linux refuses AMX's registers to a process with a stack for signals that could not hold them.
WITH_A_SMALL_SIGNAL_STACK = """
import ctypes, logging
class Stack(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(2048)
assert not ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 2048)), None)
import torch  # not before: it asks for these registers, too
from parley.native import library
logging.basicConfig()
print(library.open_requested_level()._name)
"""


@pytest.mark.skipif("amx" not in build.usable_levels(), reason="this CPU has no AMX")
def test_refused_matrix_registers_warn_and_leave_the_next_level():
    environment = os.environ | {"PARLEY_NATIVE": ""}
    command = [sys.executable, "-c", WITH_A_SMALL_SIGNAL_STACK]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.stdout.strip().endswith(build.library_name("avx512bf16")), result.stderr
    assert "kernels for avx512bf16, not the faster ones for amx" in result.stderr
    assert "the system does not allow AMX" in result.stderr


def test_compile_error_warns_and_leaves_no_files(load_native, monkeypatch, tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "broken.cpp").write_text("this is not C++")
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "library_name", lambda level: f"kernels-broken-{level}.so")
    monkeypatch.setattr(library, "open_level", library.open_level.__wrapped__)
    kernels_library, warnings = load_native()
    assert kernels_library is None and "broken.cpp" in warnings
    assert not list(tmp_path.glob("*.so")) and not list(tmp_path.glob(".build*"))


@pytest.mark.parametrize("damage", ["half", "empty", "no library"])
def test_library_that_was_cut_short_is_compiled_again(monkeypatch, tmp_path, damage):
    """As after a power failure. To open half of one would end the process by SIGBUS."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tiny.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "HERE", tmp_path)
    monkeypatch.setattr(build, "library_name", lambda level: f"kernels-cut-{level}.so")
    path = build.compile_level("generic", tmp_path)
    content = path.read_bytes()
    path.write_bytes({"half": content[: len(content) // 2], "empty": b"", "no library": bytes(len(content))}[damage])
    assert not build.is_whole(path)
    for age in (0, 2 * build.COMPILE_TIMEOUT):  # of another process that compiles, and of one that was ended
        (tmp_path / f".build-{age}").mkdir()
        os.utime(tmp_path / f".build-{age}", (time.time() - age,) * 2)
    assert library.open_level.__wrapped__("generic").answer() == 42
    assert build.is_whole(path) and [build_folder.name for build_folder in tmp_path.glob(".build*")] == [".build-0"]


def test_concurrent_compiles_leave_one_library(monkeypatch, tmp_path):
    """Guards against temporary files that stay, a library that is loaded half-written, and work that is done twice."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tiny.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "HERE", tmp_path)
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho started >> {tmp_path}/runs\nexec {build.find_compiler()} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    folder = tmp_path / "made"
    with ThreadPoolExecutor(4) as pool:
        libraries = set(pool.map(lambda _: build.compile_level("generic", folder), range(4)))
    assert libraries == {folder / build.library_name("generic")} and [path.name for path in folder.iterdir()] == [
        libraries.pop().name
    ]
    assert (tmp_path / "runs").read_text().split() == ["started", "started"]  # one compiles the file, one links it


@pytest.mark.parametrize("outs", [(64, 32, 96), (32,), (33, 64, 7), (1, 1, 1, 61), (64, 5)], ids=str)
@pytest.mark.parametrize("in_features", [64, 51])
def test_parts_are_packed_as_their_concatenation(kernels, outs, in_features):
    """Also if a part ends within a panel, lies in another order, or is there twice."""
    parts = [random_tensor(out_features, in_features, seed=seed) for seed, out_features in enumerate(outs)]
    parts += [random_tensor(in_features, 40, seed=9).T, parts[0], parts[0]]
    bias = random_tensor(sum(map(len, parts)), seed=10)
    merged = kernels.pack_weight(torch.cat(parts), bias)
    assert torch.equal(kernels.pack_weight_parts(parts, bias).weight, merged.weight)
    rows = [native.quantize_rows(part) for part in parts]
    values, scales = [row.values[:, :in_features] for row in rows], torch.cat([row.scales for row in rows])
    merged_int8 = kernels.pack_int8(torch.cat(values), scales, bias)
    assert torch.equal(kernels.pack_int8_parts(values, scales, bias).weight, merged_int8.weight)


def test_torch_kernels_pass_the_schedule_tests():
    """Runs some schedule tests of test_exact again with torch's kernels, as on a machine without a compiler."""
    selected_tests = "test_preemption_in or test_prefix_hit"
    if not IS_NIGHT:  # of one layout of pages each: keys and values, latents, states
        selected_tests = "test_prefix_hit or test_preemption_in and (mlx or deepseek_v3 or nemotron_h)"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        selected_tests,
        str(Path(__file__).parents[1] / "model" / "test_exact.py"),
    ]
    completed = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PARLEY_NATIVE": "off"},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout
    assert " passed" in completed.stdout
