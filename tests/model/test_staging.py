"""Pages copied through a staging buffer in host memory arrive in another cache unchanged; no other pages change."""

from __future__ import annotations

import os
from random import Random

import pytest
import torch

from parley.model.networks import kv_staging
from parley.model.networks.kv_staging import Staging
from parley.model.networks.paged_kv import PagedKV
from parley.native.layout import LayerKV

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")],
)
LAYERS = [LayerKV(2, 32, 32), LayerKV(1, 64, 64), LayerKV(2, 32, 32), LayerKV(2, 32, 16)]


def cache(blocks: int, device: str, int8: bool) -> PagedKV:
    """A cache with noise in all pages."""
    made = PagedKV(LAYERS, blocks, torch.bfloat16, device, int8=int8)
    for arena in made.arenas:
        raw = arena.flatten(2).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return made


def content(pages: PagedKV) -> list[list[bytes]]:
    """The bytes of every page, by layer and page."""
    pools = [pages.pool(i).data.flatten(1).view(torch.uint8).cpu() for i in range(len(LAYERS))]
    return [[bytes(page.tolist()) for page in pool] for pool in pools]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("batch", [1, 9000, 1 << 20])
def test_staged_kv_pages_arrive_unchanged(device: str, int8: bool, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_staging, "BATCH", batch)
    random = Random(f"{device} {int8} {batch}")
    torch.manual_seed(random.randrange(99))
    source, target = cache(30, device, int8), cache(20, device, int8)
    ours, theirs = Staging(source, 12), Staging(target, 15)
    assert [each.size for each in ours.regions] == [each.size for each in source.regions]
    before, expected = content(source), content(target)
    for count in (1, 5, 12):
        pages, places = random.sample(range(30), count), sorted(random.sample(range(12), count))
        into, aim = random.sample(range(15), count), random.sample(range(20), count)
        ours.store(list(zip(pages, places, strict=True)))
        for one, other in zip(ours.regions, theirs.regions, strict=True):  # copy as another process would
            for place, slot in zip(places, into, strict=True):
                data = os.pread(ours.file, one.size, one.offset + place * one.stride)
                assert os.pwrite(theirs.file, data, other.offset + slot * other.stride) == one.size
        theirs.load(list(zip(aim, into, strict=True)))
        for layer, pages_of_layer in enumerate(before):
            for page, own in zip(pages, aim, strict=True):
                expected[layer][own] = pages_of_layer[page]
        assert content(target) == expected
    assert content(source) == before
    for each in (ours, theirs):
        os.close(each.file)
