"""The kernels of Gemma 3n: as Transformers defines them, and a row's bits in any batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from parley import native
from parley.native.torch_forms.torch_streams import row_means

WIDTH = 40000  # more than torch sums in one thread


def random_rows(count: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return (rows * 3 + 0.5).to(dtype)


@pytest.mark.parametrize("sparsity", [0.95, 0.3])
def test_sparse_gates_are_those_of_transformers(sparsity):
    rows = random_rows(5, 2 * 203, 1)
    gates, ups = rows.clone().chunk(2, 1)
    deviations = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(sparsity)).item()
    expected = Gemma3nTextMLP._gaussian_topk(SimpleNamespace(activation_sparsity=sparsity), gates)
    actual = native.sparsify_gates(rows, deviations)
    torch.testing.assert_close(actual[:, :203], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(actual[:, 203:], ups)
    assert (actual[:, :203] == 0).float().mean() == pytest.approx(sparsity, abs=0.05)


def test_rows_get_the_sizes_of_others():
    rows, models = random_rows(4, 70, 1), 5 * random_rows(4, 70, 2)
    rows[2], rows[3] = 0, 1e-4
    sized = native.match_sizes(rows, models)
    torch.testing.assert_close(sized.square().mean(1)[:2], models.square().mean(1)[:2])
    torch.testing.assert_close(sized[0] / sized[0].norm(), rows[0] / rows[0].norm())
    assert not sized[2].any()
    least = models[3].square().mean().sqrt() * 1e-4 / 1e-5**0.5
    torch.testing.assert_close(sized[3], least.expand(70))


def test_a_row_has_the_same_bits_in_every_batch():
    rows, models = (random_rows(3, WIDTH, seed, torch.bfloat16) for seed in (3, 4))
    sized, sparse = native.match_sizes(rows, models), native.sparsify_gates(rows.clone(), 1.2)
    for i in range(3):
        assert torch.equal(native.match_sizes(rows[i : i + 1], models[i : i + 1])[0], sized[i])
        assert torch.equal(native.sparsify_gates(rows[i : i + 1].clone(), 1.2)[0], sparse[i])


def test_the_mean_of_a_long_row_does_not_depend_on_other_rows():
    rows = random_rows(3, WIDTH, 5)
    means = row_means(rows)
    assert all(torch.equal(row_means(rows[i : i + 1])[0], means[i]) for i in range(3))
    torch.testing.assert_close(means, rows.double().mean(1, keepdim=True).float())
