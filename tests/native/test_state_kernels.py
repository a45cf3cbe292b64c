"""Layers that keep a state: kernels against their definition, and bits that depend on no batch and no chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.random_tensors import random_tensor

from parley import native
from parley.native.layer import StateWeights
from parley.native.state_shape import GatedDeltaShape, KimiDeltaShape, Mamba2Shape, ShortConvolutionShape, StateShape
from parley.native.torch_forms import torch_states

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # a layer's outputs, for states and spans

SHAPES = [
    GatedDeltaShape(key_heads=2, value_heads=4, key_dim=16, value_dim=72, kernel=4),
    GatedDeltaShape(key_heads=1, value_heads=3, key_dim=5, value_dim=3, kernel=2),
    ShortConvolutionShape(width=70, kernel=3),
    ShortConvolutionShape(width=5, kernel=1),
    GatedDeltaShape(key_heads=1, value_heads=2, key_dim=12, value_dim=20, kernel=4, max_strength=2.0),
    KimiDeltaShape(heads=3, dim=72, kernel=4),
    KimiDeltaShape(heads=2, dim=5, kernel=2, lower_bound=-5.0),
]
MAMBA_SHAPES = [Mamba2Shape(4, 24, 16, 2, 4, 2), Mamba2Shape(2, 12, 5, 1, 2)]
TOKENS = 21


pytestmark = pytest.mark.usefixtures("kernel_level")


def random_numbers(*sizes: int, seed: int) -> torch.Tensor:
    return random_tensor(*sizes, seed=seed, dtype=torch.float32)


def random_weights(shape: StateShape) -> StateWeights:
    convolution = random_numbers(shape.kernel, shape.channels, seed=1)
    if isinstance(shape, ShortConvolutionShape):
        return StateWeights(convolution, random_numbers(shape.channels, seed=2))
    heads = shape.value_heads if isinstance(shape, GatedDeltaShape) else shape.heads
    biases = shape.inner if isinstance(shape, KimiDeltaShape) else heads
    decay, step_bias = -random_numbers(heads, seed=3).exp(), random_numbers(biases, seed=4)
    return StateWeights(convolution, None, decay, step_bias, native.Norm(random_numbers(shape.inner, seed=5), 1e-6))


def row_width(shape: StateShape) -> int:
    """Return the numbers of a row that the layer's kernel reads."""
    if isinstance(shape, ShortConvolutionShape):
        return 3 * shape.channels
    return sum(shape.row_sizes) if isinstance(shape, KimiDeltaShape) else shape.channels + shape.inner


def run_layer(form, shape: StateShape, pieces: tuple[int, ...], *, sequences: int = 1, dtype=torch.bfloat16):
    """Return the outputs and the last state of one sequence, which is computed in pieces beside others.

    Slots hold what others left."""
    rows = [
        random_tensor(TOKENS, row_width(shape), seed=10 + i, dtype=torch.bfloat16).to(dtype) for i in range(sequences)
    ]
    gate_width = 2 * shape.value_heads if isinstance(shape, GatedDeltaShape) else 0
    gates = [random_tensor(TOKENS, gate_width, seed=20 + i, dtype=torch.bfloat16).to(dtype) for i in range(sequences)]
    states, weights = random_numbers(sequences + 1, shape.size, seed=6), random_weights(shape)
    states[:, ::3], states[:, 1::3] = torch.nan, torch.inf
    start, outputs = 0, []
    for count in pieces:
        slots = [sequences - i for i in range(sequences)]
        spans = torch.tensor([[i * count, count, slot if start else -1, slot, 0] for i, slot in enumerate(slots)])
        batch = torch.cat([row[start : start + count] for row in rows])
        batch_gates = torch.cat([gate[start : start + count] for gate in gates])
        if isinstance(shape, ShortConvolutionShape):
            outputs.append(form.convolve_gated(batch, weights, shape, states, spans)[:count])
        elif isinstance(shape, KimiDeltaShape):
            outputs.append(form.scan_kimi_delta(batch, weights, shape, states, spans)[:count])
        else:
            outputs.append(form.scan_gated_delta(batch, batch_gates, weights, shape, states, spans)[:count])
        start += count
    return torch.cat(outputs), states[sequences]


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_agree_with_their_definition(shape):
    expected, expected_state = run_layer(torch_states, shape, (TOKENS,), dtype=torch.float32)
    actual, state = run_layer(native, shape, (TOKENS,))
    assert actual.dtype == torch.bfloat16
    assert ((actual - expected).abs() <= expected.abs() * 2**-8 + 1e-3).all()
    assert torch.allclose(state, expected_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_bits_depend_on_no_batch_and_no_chunk(shape):
    alone, state = run_layer(native, shape, (TOKENS,))
    for pieces, sequences in (((9, 1, 11), 1), ((1, 20), 3), ((TOKENS,), 40)):
        actual, other_state = run_layer(native, shape, pieces, sequences=sequences)
        assert torch.equal(actual, alone) and torch.equal(other_state, state)


def layer_call(shape: StateShape) -> tuple[Call, int]:
    """Return the layer on rows of TOKENS tokens, as a function of states and spans, and the size of a state."""
    if isinstance(shape, Mamba2Shape):
        rows = random_tensor(TOKENS, shape.inner + shape.channels + shape.heads, seed=10, dtype=torch.bfloat16)
        weights = replace(random_weights(shape), skip=random_numbers(shape.heads, seed=9))
        return lambda states, spans: native.scan_mamba2(rows, weights, shape, states, spans), shape.size
    weights, rows = random_weights(shape), random_tensor(TOKENS, row_width(shape), seed=10, dtype=torch.bfloat16)
    if isinstance(shape, KimiDeltaShape):
        return lambda states, spans: native.scan_kimi_delta(rows, weights, shape, states, spans), shape.size
    if isinstance(shape, ShortConvolutionShape):
        return lambda states, spans: native.convolve_gated(rows, weights, shape, states, spans), shape.size
    gates = random_tensor(TOKENS, 2 * shape.value_heads, seed=20, dtype=torch.bfloat16)
    return lambda states, spans: native.scan_gated_delta(rows, gates, weights, shape, states, spans), shape.size


@pytest.mark.parametrize("shape", SHAPES + MAMBA_SHAPES)
def test_states_after_any_tokens_go_to_slots_of_their_own(shape, threads):
    """A sequence of several spans: each state is that of the tokens before it, and no state that is read changes."""
    call, size = layer_call(shape)
    used = torch.full((TOKENS + 2, size), torch.nan)
    expected, states = call(used.clone(), torch.tensor([[0, TOKENS, -1, 0, 0]])), []
    for count in range(1, TOKENS + 1):
        alone = used.clone()
        call(alone, torch.tensor([[0, count, -1, 0, 0]]))
        states.append(alone[0])
    for cuts, count in (((1,) * TOKENS, 1), ((3, 1, 9, 8), 3), ((1, 20), 3)):
        threads(count)
        actual, spans, first = used.clone(), [], 0
        for place, length in enumerate(cuts):
            spans.append((first, length, place - 1, place, int(place > 0)))
            first += length
        outputs = call(actual, torch.tensor(spans))
        assert torch.equal(outputs, expected)
        for place in range(len(cuts)):
            assert torch.equal(actual[place], states[sum(cuts[: place + 1]) - 1])
        # Two sequences continue from the first state, which stays as it is.
        spans = [(1, 4, 0, TOKENS, 0), (1, 4, 0, TOKENS + 1, 0)]
        call(actual, torch.tensor(spans))
        assert torch.equal(actual[0], states[cuts[0] - 1])
        assert torch.equal(actual[TOKENS], actual[TOKENS + 1])
        if cuts[0] == 1:
            assert torch.equal(actual[TOKENS], states[4])


def test_rows_are_gated_by_the_sigmoid():
    rows, wide = (random_tensor(6, width, seed=width, dtype=torch.bfloat16) for width in (70, 200))
    gates = wide[:, 90:160]
    expected = rows.float() * gates.float().sigmoid()
    assert torch.allclose(native.gate_rows(rows.clone(), gates).float(), expected, rtol=2**-7, atol=1e-6)


def test_rows_are_gated_by_softplus():
    rows, gates = (random_tensor(6, 70, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    expected = rows.float() * (1 + gates.float().exp()).log()
    actual = native.gate_rows(rows.clone(), gates, has_softplus=True)
    assert torch.allclose(actual.float(), expected, rtol=2**-7, atol=1e-6)
    assert torch.equal(native.gate_rows(rows[2:3, 8:].clone(), gates[2:3, 8:], has_softplus=True), actual[2:3, 8:])


def test_rows_of_another_width_are_refused(kernel_level):
    if kernel_level == "off":
        pytest.skip("torch checks them itself")
    shape = SHAPES[2]
    with pytest.raises(ValueError, match="for ShortConvolutionShape"):
        native.convolve_gated(
            torch.zeros(1, 9, dtype=torch.bfloat16),
            random_weights(shape),
            shape,
            torch.zeros(1, 140),
            torch.zeros(1, 4),
        )
