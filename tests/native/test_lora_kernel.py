"""The LoRA kernel is accurate and batch-invariant, and does not change rows without an adapter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parley.native import LowRank, build, library
from parley.native.compiled_forms.compiled_kernels import CompiledKernels
from parley.native.compiled_forms.compiled_lora import CompiledLora
from parley.native.torch_forms import torch_lora

try:
    build.find_compiler()
except build.BuildError:
    pytest.skip("no C++ compiler", allow_module_level=True)


@pytest.fixture(scope="module", params=build.usable_levels())
def kernel_library(request):
    return library.open_level(request.param)


@pytest.fixture(scope="module")
def kernels(kernel_library):
    return CompiledKernels(kernel_library)


class RandomAdapters:
    """Random numbers for adapters."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def random_tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def random_site(self, ranks: list[int], outs: list[int], in_features: int) -> list[LowRank]:
        """Adjacent output parts; rank 0 leaves a part out."""
        parts, first = [], 0
        for rank, out_features in zip(ranks, outs, strict=True):
            if rank:
                down, up = (
                    self.random_tensor(rank, in_features) * in_features**-0.5,
                    self.random_tensor(out_features, rank) * rank**-0.5,
                )
                parts.append(LowRank(first, down, up, 0.5 + rank % 3))
            first += out_features
        return parts


def lora_row_in_float64(x: torch.Tensor, y: torch.Tensor, parts: list[LowRank]) -> torch.Tensor:
    """One row in float64, from weights rounded to bf16."""
    y = y.double().clone()
    for part in parts:
        inner = part.down.bfloat16().double() @ x.double() * part.scale
        y[part.first : part.first + len(part.up)] += part.up.bfloat16().double() @ inner
    return y


RANKS = st.sampled_from([0, 1, 2, 7, 8, 15, 16, 17, 33, 64, 256])


@settings(max_examples=40, deadline=None)
@given(
    in_features=st.integers(1, 200),
    outs=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    ranks=st.lists(st.lists(RANKS, min_size=3, max_size=3), min_size=1, max_size=4),
    counts=st.lists(st.integers(0, 15), min_size=4, max_size=4),
    bare=st.integers(0, 5),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_lora_kernel_matches_its_definition_row_by_row(kernels, in_features, outs, ranks, counts, bare, threads, seed):
    source = RandomAdapters(seed)
    sites = [source.random_site(part_ranks[: len(outs)], outs, in_features) for part_ranks in ranks]
    adapters = [kernels.pack_lora([[], site]) for site in sites]
    order = torch.randperm(sum(counts[: len(sites)]) + bare, generator=source.generator).tolist()
    rows_by_adapter: list[list[int]] = [
        [order.pop() for _ in range(count)] for _, count in zip(sites, counts, strict=False)
    ]
    total = sum(map(len, rows_by_adapter)) + bare
    x, y = source.random_tensor(total, in_features).bfloat16(), source.random_tensor(total, sum(outs)).bfloat16()
    groups = [(adapter, rows) for adapter, rows in zip(adapters, rows_by_adapter, strict=True) if rows]

    def add_adapters(groups, x, y, site=1):
        y = y.clone()
        kernels.group_lora_rows(groups).add_lora(x, y, site)
        return y

    old_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    actual = add_adapters(groups, x, y)
    assert torch.equal(add_adapters(groups, x, y, 0), y)
    torch.set_num_threads(old_threads)
    for row in order:
        assert torch.equal(actual[row], y[row])
    for site, adapter, rows in zip(sites, adapters, rows_by_adapter, strict=True):
        for row in rows:
            expected = lora_row_in_float64(x[row], y[row], site)
            bound = 0.02 * (1 + expected.abs().max()) if site else 0
            assert (actual[row].double() - expected).abs().max() <= bound
            row_alone = add_adapters([(adapter, [0])], x[row : row + 1], y[row : row + 1])
            assert torch.equal(row_alone[0], actual[row])


@pytest.mark.parametrize("counts", [[1] * 8, [1, 6, 2], [2] * 5, [7, 1, 1, 1], [40], [3, 3]])
@pytest.mark.parametrize("wide", [None, 40])
def test_lora_kernel_does_not_depend_on_thread_count(kernels, counts, wide):
    """Also with one adapter of a higher rank than the others, so that the work does not divide evenly."""
    source, outs, in_features = RandomAdapters(1), [300, 70, 70], 333
    ranks = [16 if wide is None or number else wide for number in range(len(counts))]
    adapters = [kernels.pack_lora([source.random_site([rank] * 3, outs, in_features)]) for rank in ranks]
    rows = iter(range(sum(counts)))
    groups = [(adapter, [next(rows) for _ in range(count)]) for adapter, count in zip(adapters, counts, strict=True)]
    x, y = (
        source.random_tensor(sum(counts), in_features).bfloat16(),
        source.random_tensor(sum(counts), sum(outs)).bfloat16(),
    )
    old_threads, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            results.append(y.clone())
            kernels.group_lora_rows(groups).add_lora(x, results[-1], 0)
    finally:
        torch.set_num_threads(old_threads)
    assert not torch.equal(results[0], y) and all(torch.equal(result, results[0]) for result in results)


def test_torch_lora_matches_the_compiled_kernel(kernels):
    source = RandomAdapters(5)
    sites = [source.random_site([7, 0, 16], [40, 24, 24], 96), []]
    x, y = source.random_tensor(9, 96), source.random_tensor(9, 88)
    cpu = torch.device("cpu")
    for rows in ([0, 3, 8], list(range(9))):
        float32_result, compiled_result = y.clone(), y.bfloat16()
        torch_lora.TorchLoraRows([(torch_lora.TorchLora(sites, torch.float32, cpu), rows)], cpu).add_lora(
            x, float32_result, 0
        )
        kernels.group_lora_rows([(kernels.pack_lora(sites), rows)]).add_lora(x.bfloat16(), compiled_result, 0)
        for row in rows:
            assert torch.allclose(
                float32_result[row].double(), lora_row_in_float64(x[row], y[row], sites[0]), atol=0.05
            )
        assert torch.allclose(float32_result, compiled_result.float(), atol=0.1)
        bf16_result = y.bfloat16()
        torch_lora.TorchLoraRows([(torch_lora.TorchLora(sites, torch.bfloat16, cpu), rows)], cpu).add_lora(
            x.bfloat16(), bf16_result, 0
        )
        assert torch.allclose(bf16_result.float(), compiled_result.float(), atol=0.1)


def test_packed_lora_adds_no_padding_to_full_registers(kernel_library, kernels):
    lanes = kernel_library.lora_lanes()
    site = RandomAdapters(1).random_site([16, 16, 16], [896, 128, 128], 896)
    adapter = kernels.pack_lora([site] * 3)
    assert isinstance(adapter, CompiledLora) and lanes in (4, 8, 16)
    assert adapter.nbytes == 2 * 3 * (48 * 896 + 16 * 1152)
