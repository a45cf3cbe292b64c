"""Mamba 1: kernels against their definition, and bits that depend on no batch and no chunk."""

from __future__ import annotations

import pytest
import torch
from support.random_tensors import random_tensor

from parley import native
from parley.native.torch_forms import torch_selective

SHAPES = [native.Mamba1Shape(70, 16, 8, 4), native.Mamba1Shape(5, 3, 2, 1), native.Mamba1Shape(136, 5, 3, 3)]


pytestmark = pytest.mark.usefixtures("kernel_level")


def random_weights(shape: native.Mamba1Shape, *, has_bias: bool = True) -> native.StateWeights:
    def random_numbers(*sizes: int, seed: int) -> torch.Tensor:
        return random_tensor(*sizes, seed=seed, dtype=torch.float32)

    return native.StateWeights(
        convolution=random_numbers(shape.kernel, shape.inner, seed=1),
        convolution_bias=random_numbers(shape.inner, seed=2) if has_bias else None,
        decay=-random_numbers(shape.state_dim, shape.inner, seed=3).exp(),
        step_bias=random_numbers(shape.inner, seed=4),
        skip=random_numbers(shape.inner, seed=5),
    )


def used_states(shape: native.Mamba1Shape, slots: int) -> torch.Tensor:
    """Return states that other sequences left, with NaN and infinity."""
    states = random_tensor(slots, shape.size, seed=8, dtype=torch.float32)
    states[:, ::3], states[:, 1::3] = torch.nan, torch.inf
    return states


def run_layer(form, shape, weights, tensors, states, spans) -> torch.Tensor:
    """Return the outputs for rows, steps and keys, where steps stand for those of the layer's linear layers."""
    rows, steps, keys = tensors
    spans = torch.tensor(spans)
    active = form.convolve_channels(rows, weights, shape, states, spans)
    return form.scan_channels(rows, active, steps, keys, weights, shape, states, spans)


def random_batch(shape: native.Mamba1Shape, count: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    widths = (2 * shape.inner, shape.inner, 2 * shape.state_dim)
    return [random_tensor(count, width, seed=20 + i, dtype=dtype) for i, width in enumerate(widths)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_kernels_agree_with_their_definition(shape, has_bias):
    weights, tensors, spans = random_weights(shape, has_bias=has_bias), random_batch(shape, 9), [[0, 9, -1, 1, 0]]
    expected_states = used_states(shape, 2)
    states = expected_states.clone()
    actual = run_layer(native, shape, weights, tensors, states, spans)
    # The kernel's own linear layers read channels as bfloat16, so the definition gets them rounded as well.
    rows, steps, keys = (tensor.float() for tensor in tensors)
    active = torch_selective.convolve_channels(rows, weights, shape, expected_states, torch.tensor(spans)).bfloat16()
    expected = torch_selective.scan_channels(
        rows, active.float(), steps, keys, weights, shape, expected_states, torch.tensor(spans)
    )
    assert actual.dtype == torch.bfloat16
    assert ((actual - expected).abs() <= expected.abs() * 2**-7 + 2e-2 * expected.std()).all()
    assert torch.allclose(states[1], expected_states[1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_depend_neither_on_the_batch_nor_on_chunks(shape, threads):
    weights, tensors = random_weights(shape), random_batch(shape, 21)
    threads(1)
    states = used_states(shape, 1)
    alone = run_layer(native, shape, weights, tensors, states, [[0, 21, -1, 0, 0]])
    threads(2)
    for pieces in ([9, 1, 11], [1, 20]):
        others, parts, start = used_states(shape, 4), [], 0
        for count in pieces:
            # The sequence lies between two others that have the same tokens, in other slots.
            some = [torch.cat([tensor[start : start + count]] * 3) for tensor in tensors]
            slots = [3, 0, 2]
            spans = [[i * count, count, slot if start else -1, slot, 0] for i, slot in enumerate(slots)]
            parts.append(run_layer(native, shape, weights, some, others, spans)[count : 2 * count])
            start += count
        assert torch.equal(torch.cat(parts), alone) and torch.equal(others[0], states[0])
    assert alone.isfinite().all()


def test_each_span_of_a_continued_sequence_leaves_a_state():
    """A step that keeps a state in the middle of its tokens, for a snapshot or a draft, computes the same bits."""
    shape = SHAPES[0]
    weights, tensors, states = random_weights(shape), random_batch(shape, 8), used_states(shape, 3)
    whole = run_layer(native, shape, weights, tensors, states, [[0, 8, -1, 0, 0]])
    halves = used_states(shape, 3)
    actual = run_layer(native, shape, weights, tensors, halves, [[0, 5, -1, 1, 0], [5, 3, 1, 2, 1]])
    assert torch.equal(actual, whole) and torch.equal(halves[2], states[0])
    rest = run_layer(native, shape, weights, [tensor[5:] for tensor in tensors], halves, [[0, 3, 1, 0, 0]])
    assert torch.equal(rest, whole[5:]) and torch.equal(halves[0], states[0])


def test_undefined_numbers_reach_later_tokens_of_their_sequence_only():
    shape, spans = SHAPES[0], [[0, 4, -1, 0, 0], [4, 4, -1, 1, 0]]
    weights, tensors = random_weights(shape), random_batch(shape, 8)
    expected = run_layer(native, shape, weights, tensors, used_states(shape, 2), spans)
    broken = [tensor.clone() for tensor in tensors]
    broken[1][2] = torch.nan
    actual = run_layer(native, shape, weights, broken, used_states(shape, 2), spans)
    assert actual[2:4].isnan().all()
    assert torch.equal(actual[:2], expected[:2]) and torch.equal(actual[4:], expected[4:])


def test_rows_of_another_width_are_refused():
    shape = SHAPES[0]
    rows, steps, keys = random_batch(shape, 2)
    with pytest.raises((ValueError, RuntimeError)):
        run_layer(
            native, shape, random_weights(shape), [rows[:, :-1], steps, keys], used_states(shape, 1), [[0, 2, -1, 0, 0]]
        )
