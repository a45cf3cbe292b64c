"""The LoRA kernel is accurate and batch-invariant, and does not change rows without an adapter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parley.native import LowRank, build, compiled, compiled_lora, library, torch_lora

try:
    build.compiler()
except build.BuildError:
    pytest.skip("no C++ compiler", allow_module_level=True)


@pytest.fixture(scope="module", params=build.usable())
def kernels(request):
    return compiled.Kernels(library.open_level(request.param))


class Source:
    """Random numbers for adapters."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def site(self, ranks: list[int], outs: list[int], into: int) -> list[LowRank]:
        """Adjacent output parts; rank 0 leaves a part out."""
        parts, first = [], 0
        for rank, out in zip(ranks, outs, strict=True):
            if rank:
                down, up = self.noise(rank, into) * into**-0.5, self.noise(out, rank) * rank**-0.5
                parts.append(LowRank(first, down, up, 0.5 + rank % 3))
            first += out
        return parts


def definition(x: torch.Tensor, y: torch.Tensor, parts: list[LowRank]) -> torch.Tensor:
    """One row in float64, from weights rounded to bf16."""
    y = y.double().clone()
    for part in parts:
        inner = part.down.bfloat16().double() @ x.double() * part.scale
        y[part.first : part.first + len(part.up)] += part.up.bfloat16().double() @ inner
    return y


RANKS = st.sampled_from([0, 1, 2, 7, 8, 15, 16, 17, 33, 64, 256])


@settings(max_examples=40, deadline=None)
@given(
    into=st.integers(1, 200),
    outs=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    ranks=st.lists(st.lists(RANKS, min_size=3, max_size=3), min_size=1, max_size=4),
    counts=st.lists(st.integers(0, 15), min_size=4, max_size=4),
    bare=st.integers(0, 5),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_lora_kernel_matches_its_definition_row_by_row(kernels, into, outs, ranks, counts, bare, threads, seed):
    source = Source(seed)
    sites = [source.site(each[: len(outs)], outs, into) for each in ranks]
    adapters = [kernels.adapter([[], site]) for site in sites]
    order = torch.randperm(sum(counts[: len(sites)]) + bare, generator=source.generator).tolist()
    owned: list[list[int]] = [[order.pop() for _ in range(count)] for _, count in zip(sites, counts, strict=False)]
    total = sum(map(len, owned)) + bare
    x, y = source.noise(total, into).bfloat16(), source.noise(total, sum(outs)).bfloat16()
    groups = [(adapter, rows) for adapter, rows in zip(adapters, owned, strict=True) if rows]

    def run(groups, x, y, site=1):
        y = y.clone()
        kernels.adapted(groups).add(x, y, site)
        return y

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    got = run(groups, x, y)
    assert torch.equal(run(groups, x, y, 0), y)
    torch.set_num_threads(before)
    for row in order:
        assert torch.equal(got[row], y[row])
    for site, adapter, rows in zip(sites, adapters, owned, strict=True):
        for row in rows:
            want = definition(x[row], y[row], site)
            bound = 0.02 * (1 + want.abs().max()) if site else 0
            assert (got[row].double() - want).abs().max() <= bound
            alone = run([(adapter, [0])], x[row : row + 1], y[row : row + 1])
            assert torch.equal(alone[0], got[row])


@pytest.mark.parametrize("counts", [[1] * 8, [1, 6, 2], [2] * 5, [7, 1, 1, 1], [40], [3, 3]])
@pytest.mark.parametrize("wide", [None, 40])
def test_lora_kernel_does_not_depend_on_thread_count(kernels, counts, wide):
    """Also with one adapter of a higher rank than the others, so that the work does not divide evenly."""
    source, outs, into = Source(1), [300, 70, 70], 333
    ranks = [16 if wide is None or number else wide for number in range(len(counts))]
    adapters = [kernels.adapter([source.site([rank] * 3, outs, into)]) for rank in ranks]
    rows = iter(range(sum(counts)))
    groups = [(adapter, [next(rows) for _ in range(count)]) for adapter, count in zip(adapters, counts, strict=True)]
    x, y = source.noise(sum(counts), into).bfloat16(), source.noise(sum(counts), sum(outs)).bfloat16()
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            found.append(y.clone())
            kernels.adapted(groups).add(x, found[-1], 0)
    finally:
        torch.set_num_threads(before)
    assert not torch.equal(found[0], y) and all(torch.equal(each, found[0]) for each in found)


def test_torch_lora_matches_the_compiled_kernel(kernels):
    source = Source(5)
    sites = [source.site([7, 0, 16], [40, 24, 24], 96), []]
    x, y = source.noise(9, 96), source.noise(9, 88)
    cpu = torch.device("cpu")
    for rows in ([0, 3, 8], list(range(9))):
        wide, narrow = y.clone(), y.bfloat16()
        torch_lora.Adapted([(torch_lora.Adapter(sites, torch.float32, cpu), rows)], cpu).add(x, wide, 0)
        kernels.adapted([(kernels.adapter(sites), rows)]).add(x.bfloat16(), narrow, 0)
        for row in rows:
            assert torch.allclose(wide[row].double(), definition(x[row], y[row], sites[0]), atol=0.05)
        assert torch.allclose(wide, narrow.float(), atol=0.1)
        half = y.bfloat16()
        torch_lora.Adapted([(torch_lora.Adapter(sites, torch.bfloat16, cpu), rows)], cpu).add(x.bfloat16(), half, 0)
        assert torch.allclose(half.float(), narrow.float(), atol=0.1)


def test_packed_lora_adds_no_padding_to_full_registers(kernels):
    lanes = kernels._c.lora_lanes()
    site = Source(1).site([16, 16, 16], [896, 128, 128], 896)
    adapter = kernels.adapter([site] * 3)
    assert isinstance(adapter, compiled_lora.Adapter) and lanes in (4, 8, 16)
    assert adapter.nbytes == 2 * 3 * (48 * 896 + 16 * 1152)
