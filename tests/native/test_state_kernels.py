"""Layers that keep a state: kernels against their definition, and bits that depend on no batch and no chunk."""

from __future__ import annotations

import pytest
import torch
from support.random_tensors import random_tensor

from parley import native
from parley.native import build, compiled, library
from parley.native.layer import StateWeights
from parley.native.state_shape import GatedDeltaShape, ShortConvolutionShape, StateShape
from parley.native.torch_forms import torch_states

SHAPES = [
    GatedDeltaShape(key_heads=2, value_heads=4, key_dim=16, value_dim=72, kernel=4),
    GatedDeltaShape(key_heads=1, value_heads=3, key_dim=5, value_dim=3, kernel=2),
    ShortConvolutionShape(width=70, kernel=3),
    ShortConvolutionShape(width=5, kernel=1),
]
TOKENS = 21


@pytest.fixture(
    scope="module", autouse=True, params=["off", *(build.usable_levels() if library.load_kernels() else [])]
)
def kernel_level(request):
    """Run all tests with torch's kernels, and with the compiled kernels of each level that this CPU supports."""
    kernels = None if request.param == "off" else compiled.CompiledKernels(library.open_level(request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "compiled_kernels", lambda: kernels)
        yield request.param


def numbers(*sizes: int, seed: int) -> torch.Tensor:
    return random_tensor(*sizes, seed=seed, dtype=torch.float32)


def random_weights(shape: StateShape) -> StateWeights:
    convolution = numbers(shape.kernel, shape.channels, seed=1)
    if isinstance(shape, ShortConvolutionShape):
        return StateWeights(convolution, numbers(shape.channels, seed=2))
    decay, step_bias = -numbers(shape.value_heads, seed=3).exp(), numbers(shape.value_heads, seed=4)
    return StateWeights(convolution, None, decay, step_bias, native.Norm(numbers(shape.inner, seed=5), 1e-6))


def run_layer(form, shape: StateShape, pieces: tuple[int, ...], *, sequences: int = 1, dtype=torch.bfloat16):
    """Return the outputs and the last state of one sequence, which is computed in pieces beside others.

    Slots hold what others left."""
    width = 3 * shape.channels if isinstance(shape, ShortConvolutionShape) else shape.channels + shape.inner
    rows = [random_tensor(TOKENS, width, seed=10 + i, dtype=torch.bfloat16).to(dtype) for i in range(sequences)]
    gate_width = 0 if isinstance(shape, ShortConvolutionShape) else 2 * shape.value_heads
    gates = [random_tensor(TOKENS, gate_width, seed=20 + i, dtype=torch.bfloat16).to(dtype) for i in range(sequences)]
    states, weights = numbers(sequences + 1, shape.size, seed=6), random_weights(shape)
    states[:, ::3], states[:, 1::3] = torch.nan, torch.inf
    start, outputs = 0, []
    for count in pieces:
        spans = torch.tensor([[i * count, count, sequences - i, start == 0] for i in range(sequences)])
        batch = torch.cat([each[start : start + count] for each in rows])
        batch_gates = torch.cat([each[start : start + count] for each in gates])
        if isinstance(shape, ShortConvolutionShape):
            outputs.append(form.convolve_gated(batch, weights, shape, states, spans)[:count])
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


def test_rows_are_gated_by_the_sigmoid():
    rows, wide = (random_tensor(6, width, seed=width, dtype=torch.bfloat16) for width in (70, 200))
    gates = wide[:, 90:160]
    expected = rows.float() * gates.float().sigmoid()
    assert torch.allclose(native.gate_rows(rows.clone(), gates).float(), expected, rtol=2**-7, atol=1e-6)


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
