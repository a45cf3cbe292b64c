"""Packed weights on disk: a start that reads them gives the same results as a start that packs them."""

import os
import shutil

import pytest
import torch
from support import tiny_models
from support.run_model import start

from parley import native
from parley.model.load import fuse
from parley.native import library

pytestmark = pytest.mark.skipif(native.identity() is None, reason="only compiled kernels have a layout of their own")


@pytest.fixture(autouse=True)
def user(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "cache", lambda: tmp_path / "user")


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(tiny_models.model("qwen2"), copy)
    return copy


@pytest.fixture
def packed(monkeypatch):
    """Counts the calls that pack weights."""
    calls = []
    pack = fuse._pack
    monkeypatch.setattr(fuse, "_pack", lambda *given: calls.append(1) or pack(*given))
    return calls


def logits(folder, **settings):
    """Logits of a few tokens, and the engine's ModelInfo."""
    runner, info = start(folder, pack_cache=True, **settings)
    from parley.model.networks.network import Batch
    from parley.native.layout import Span

    place = torch.arange(9)
    batch = Batch(place * 3 + 1, place, place, [Span(0, 9, 9, [0])])
    with torch.inference_mode():
        return runner.network.logits(runner.network.hidden(batch, runner.pages)), info


def kept(folder):
    return sorted(path.name for path in (folder / ".parley").glob("packed-*"))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_second_start_reads_cached_packed_weights(folder, packed, quantization):
    first, one = logits(folder, quantization=quantization)
    second, other = logits(folder, quantization=quantization)
    assert torch.equal(first, second) and one == other
    assert len(packed) == 1 and len(kept(folder)) == 1


def test_packed_cache_follows_checkpoint_content(folder, packed):
    file = folder / "model.safetensors"
    first, _ = logits(folder)
    before = kept(folder)
    os.utime(file, (1, 1))
    shutil.copyfile(file, folder / "copy")
    os.replace(folder / "copy", file)
    again, _ = logits(folder)
    assert torch.equal(first, again) and len(packed) == 1 and kept(folder) == before

    data = bytearray(file.read_bytes())
    data[-4000:] = bytes(4000)
    file.write_bytes(data)
    changed, _ = logits(folder)
    assert len(packed) == 2 and not torch.equal(first, changed)
    assert len(kept(folder)) == 1 and kept(folder) != before  # the outdated file is deleted


def test_packed_cache_is_separate_for_each_quantization(folder, packed):
    plain, _ = logits(folder)
    quantised, _ = logits(folder, quantization="int8")
    assert len(kept(folder)) == 2 and not torch.equal(plain, quantised)
    assert torch.equal(plain, logits(folder)[0]) and len(packed) == 2


@pytest.mark.parametrize("damage", [b"", b"\x08\0\0\0\0\0\0\0{}", None])
def test_damaged_packed_cache_is_rebuilt(folder, packed, damage):
    first, _ = logits(folder)
    path = folder / ".parley" / kept(folder)[0]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    (folder / ".parley" / "contents.json").write_text("[1]")
    assert torch.equal(first, logits(folder)[0]) and len(packed) == 2
    assert path.stat().st_size == len(whole)


def test_packed_cache_of_another_user_is_ignored(folder, packed, tmp_path):
    """Guards against a planted cache file in a shared model folder."""
    logits(folder)
    shutil.rmtree(tmp_path / "user")
    logits(folder)
    assert len(packed) == 2


def test_start_succeeds_when_packed_cache_is_not_writable(folder, packed, caplog):
    (folder / ".parley").write_text("a file where the folder should be")
    logits(folder)
    assert len(packed) == 1 and "cannot be kept" in caplog.text
