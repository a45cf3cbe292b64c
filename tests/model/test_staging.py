"""Pages copied through a staging buffer in host memory arrive in another cache unchanged; no other pages change."""

from __future__ import annotations

import os
from random import Random

import pytest
import torch

from parley.model.networks import kv_staging
from parley.model.networks.kv_staging import StagingBuffer
from parley.model.networks.paged_kv import PagedKV
from parley.native.layout import LayerKV

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")],
)
LAYERS = [LayerKV(2, 32, 32), LayerKV(1, 64, 64), LayerKV(2, 32, 32), LayerKV(2, 32, 16)]


def noisy_cache(blocks: int, device: str, int8: bool) -> PagedKV:
    """A cache with noise in all pages."""
    pages = PagedKV(LAYERS, blocks, torch.bfloat16, device, int8=int8)
    for arena in pages.arenas:
        raw = arena.flatten(2).view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return pages


def page_bytes(pages: PagedKV) -> list[list[bytes]]:
    """The bytes of every page, by layer and page."""
    pools = [pages.layer_pool(i).data.flatten(1).view(torch.uint8).cpu() for i in range(len(LAYERS))]
    return [[bytes(page.tolist()) for page in pool] for pool in pools]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("batch", [1, 9000, 1 << 20])
def test_staged_kv_pages_arrive_unchanged(device: str, int8: bool, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_staging, "BATCH_BYTES", batch)
    random = Random(f"{device} {int8} {batch}")
    torch.manual_seed(random.randrange(99))
    source, target = noisy_cache(30, device, int8), noisy_cache(20, device, int8)
    source_buffer, target_buffer = StagingBuffer(source, 12), StagingBuffer(target, 15)
    assert [region.size for region in source_buffer.regions] == [region.size for region in source.regions]
    source_before, expected = page_bytes(source), page_bytes(target)
    for count in (1, 5, 12):
        pages, source_slots = random.sample(range(30), count), sorted(random.sample(range(12), count))
        target_slots, target_pages = random.sample(range(15), count), random.sample(range(20), count)
        source_buffer.store_pages(list(zip(pages, source_slots, strict=True)))
        for source_region, target_region in zip(
            source_buffer.regions, target_buffer.regions, strict=True
        ):  # copy as another process would
            for place, slot in zip(source_slots, target_slots, strict=True):
                data = os.pread(
                    source_buffer.file, source_region.size, source_region.offset + place * source_region.stride
                )
                assert (
                    os.pwrite(target_buffer.file, data, target_region.offset + slot * target_region.stride)
                    == source_region.size
                )
        target_buffer.load_pages(list(zip(target_pages, target_slots, strict=True)))
        for layer, pages_of_layer in enumerate(source_before):
            for page, target_page in zip(pages, target_pages, strict=True):
                expected[layer][target_page] = pages_of_layer[page]
        assert page_bytes(target) == expected
    assert page_bytes(source) == source_before
    for buffer in (source_buffer, target_buffer):
        os.close(buffer.file)
