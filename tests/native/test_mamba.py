"""Mamba 2: kernels against their definition, Transformers' layers, and bits that depend on no batch and no chunk."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.random_tensors import random_tensor

from parley import native
from parley.native.torch_forms import torch_mamba

SHAPES = [
    native.Mamba2Shape(heads=4, head_dim=64, state_dim=16, groups=2, kernel=4, norm_groups=2),
    native.Mamba2Shape(heads=2, head_dim=12, state_dim=5, groups=1, kernel=2, is_gate_first=False, gate_scale=0.7),
    native.Mamba2Shape(heads=3, head_dim=80, state_dim=7, groups=3, kernel=3, step_limits=(0.5, 1.5), step_scale=1.3),
]


pytestmark = pytest.mark.usefixtures("kernel_level")


def random_weights(shape: native.Mamba2Shape, *, has_bias: bool = True, has_norm: bool = True) -> native.StateWeights:
    def random_numbers(*sizes: int, seed: int) -> torch.Tensor:
        return random_tensor(*sizes, seed=seed, dtype=torch.float32)

    return native.StateWeights(
        convolution=random_numbers(shape.kernel, shape.channels, seed=1),
        convolution_bias=random_numbers(shape.channels, seed=2) if has_bias else None,
        decay=-random_numbers(shape.heads, seed=3).exp(),
        step_bias=random_numbers(shape.heads, seed=4),
        skip=random_numbers(shape.heads, seed=5),
        norm=native.Norm(random_numbers(shape.inner, seed=6), 1e-5) if has_norm else None,
    )


def random_rows(shape: native.Mamba2Shape, count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return random_tensor(count, shape.inner + shape.channels + shape.heads, seed=7, dtype=dtype)


def used_states(shape: native.Mamba2Shape, slots: int) -> torch.Tensor:
    """Return states that other sequences left, with NaN and infinity."""
    states = random_tensor(slots, shape.size, seed=8, dtype=torch.float32)
    states[:, ::3], states[:, 1::3] = torch.nan, torch.inf
    return states


def scan_whole(rows: torch.Tensor, weights: native.StateWeights, shape: native.Mamba2Shape) -> torch.Tensor:
    """Return the outputs of one sequence, computed at once."""
    return native.scan_mamba2(rows, weights, shape, used_states(shape, 1), torch.tensor([[0, len(rows), -1, 0, 0]]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("has_bias", "has_norm"), [(True, True), (False, False)])
def test_kernels_agree_with_their_definition(shape, has_bias, has_norm):
    weights, rows = random_weights(shape, has_bias=has_bias, has_norm=has_norm), random_rows(shape, 9)
    spans, expected_states = torch.tensor([[0, 9, -1, 1, 0]]), used_states(shape, 2)
    states = expected_states.clone()
    expected = torch_mamba.scan_mamba2(rows.float(), weights, shape, expected_states, spans)
    actual = native.scan_mamba2(rows, weights, shape, states, spans)
    assert actual.dtype == torch.bfloat16
    assert ((actual - expected).abs() <= expected.abs() * 2**-8 + 1e-4).all()
    assert torch.allclose(states[1], expected_states[1], rtol=1e-5, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 8), max_size=3),
    threads=st.integers(1, 3),
)
@example(shape=SHAPES[0], counts=[9, 1, 9], cuts=[1, 1, 3], threads=2)
def test_bits_depend_neither_on_the_batch_nor_on_chunks(shape, counts, cuts, threads):
    weights, rows = random_weights(shape), random_rows(shape, sum(counts))
    sequences = rows.split(counts)
    alone = [scan_whole(sequence, weights, shape) for sequence in sequences]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    states, outputs = used_states(shape, len(counts)), [[] for _ in counts]
    # Each step computes the next tokens of all sequences that have any, in the slots last to first.
    bounds = sorted({0, *cuts, 9})
    for start, end in itertools.pairwise(bounds):
        parts = {i: sequence[start:end] for i, sequence in enumerate(sequences) if len(sequence) > start}
        spans, first = [], 0
        for i, part in parts.items():
            slot = len(counts) - 1 - i
            spans.append((first, len(part), slot if start else -1, slot, 0))
            first += len(part)
        if not parts:
            break
        batch = native.scan_mamba2(torch.cat([*parts.values()]), weights, shape, states, torch.tensor(spans))
        for (i, part), (first, *_) in zip(parts.items(), spans, strict=True):
            outputs[i].append(batch[first : first + len(part)])
    torch.set_num_threads(before)
    for parts, expected in zip(outputs, alone, strict=True):
        assert expected.isfinite().all() and torch.equal(torch.cat(parts), expected)


def test_long_batches_use_several_threads_with_the_same_bits(threads):
    shape = SHAPES[0]
    weights, rows = random_weights(shape), random_rows(shape, 70)
    threads(1)
    expected = scan_whole(rows, weights, shape)
    threads(3)
    assert torch.equal(scan_whole(rows, weights, shape), expected)


def test_undefined_numbers_reach_later_tokens_of_their_sequence_only():
    shape, spans = SHAPES[0], torch.tensor([[0, 4, -1, 0, 0], [4, 4, -1, 1, 0]])
    weights, rows = random_weights(shape), random_rows(shape, 8)
    expected = native.scan_mamba2(rows, weights, shape, used_states(shape, 2), spans)
    broken = rows.clone()
    broken[2] = torch.nan
    actual = native.scan_mamba2(broken, weights, shape, used_states(shape, 2), spans)
    assert actual[2:4].isnan().all()
    assert torch.equal(actual[:2], expected[:2]) and torch.equal(actual[4:], expected[4:])


def test_rows_of_another_width_are_refused(kernel_level):
    shape = SHAPES[0]
    with pytest.raises((ValueError, RuntimeError)):
        scan_whole(random_rows(shape, 2)[:, :-1], random_weights(shape), shape)


def bamba_mixer() -> torch.nn.Module:
    from transformers.models.bamba.modeling_bamba import BambaConfig, BambaMixer

    sizes = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_conv": 3}
    return BambaMixer(BambaConfig(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, **sizes), 0)


def granite_mixer() -> torch.nn.Module:
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

    sizes = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16, "time_step_limit": (0.5, 1.5)}
    return granite.GraniteMoeHybridMambaLayer(granite.GraniteMoeHybridConfig(hidden_size=16, **sizes), 0)


def mamba2_mixer() -> torch.nn.Module:
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer

    sizes = {"num_heads": 4, "head_dim": 8, "state_size": 16, "n_groups": 2}
    return Mamba2Mixer(Mamba2Config(hidden_size=16, **sizes), 0)


def nemotron_mixer() -> torch.nn.Module:
    from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

    sizes = {"mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 3}
    return nemotron.NemotronHMamba2Mixer(nemotron.NemotronHConfig(hidden_size=16, **sizes), 0)


def falcon_mixer(**options: Any) -> torch.nn.Module:
    from transformers.models.falcon_h1 import modeling_falcon_h1 as falcon

    sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
    config = falcon.FalconH1Config(hidden_size=16, num_attention_heads=2, num_key_value_heads=1, **sizes, **options)
    mixer = falcon.FalconH1Mixer(config, 0)
    mixer.mup_vector = torch.ones(mixer.in_proj.out_features)
    return mixer


MIXERS = {
    "mamba2": mamba2_mixer,
    "bamba": bamba_mixer,
    "granitemoehybrid": granite_mixer,
    "nemotron_h": nemotron_mixer,
    "falcon_h1": falcon_mixer,
    "falcon_h1, normed": lambda: falcon_mixer(mamba_rms_norm=True, mamba_norm_before_gate=True),
    "falcon_h1, normed last": lambda: falcon_mixer(mamba_rms_norm=True, mamba_norm_before_gate=False),
}


@pytest.mark.parametrize("family", MIXERS)
def test_layers_compute_the_same_as_those_of_transformers(family, kernel_level):
    if kernel_level != "off":
        pytest.skip("float32 runs on torch's kernels")
    pytest.importorskip("transformers")
    mixer: Any = MIXERS[family]().float().eval()
    generator = torch.Generator().manual_seed(9)
    for parameter in mixer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    norm = mixer.norm if hasattr(mixer.norm, "weight") else None
    shape = native.Mamba2Shape(
        heads=mixer.num_heads,
        head_dim=mixer.head_dim,
        state_dim=mixer.ssm_state_size,
        groups=mixer.n_groups,
        kernel=mixer.conv_kernel_size,
        norm_groups=mixer.n_groups,
        is_gate_first=not getattr(norm, "norm_before_gate", False),
        step_limits=tuple(mixer.time_step_limit),
    )
    weights = native.StateWeights(
        convolution=mixer.conv1d.weight[:, 0].t().contiguous(),
        convolution_bias=mixer.conv1d.bias,
        decay=-mixer.A_log.exp(),
        step_bias=mixer.dt_bias,
        skip=mixer.D,
        norm=None if norm is None else native.Norm(norm.weight, norm.variance_epsilon),
    )
    x = torch.randn(1, 11, 16, generator=generator)
    outputs = scan_whole(mixer.in_proj(x)[0], weights, shape)
    expected = mixer(x)[0]
    assert expected.std() > 0.01
    assert torch.allclose(mixer.out_proj(outputs), expected, rtol=1e-4, atol=1e-4)
