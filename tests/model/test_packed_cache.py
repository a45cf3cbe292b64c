"""Packed weights on disk: a start that reads them gives the same results as a start that packs them."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from support import tiny_models
from support.run_model import load_test_runner

from parley import native
from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.packed_cache import PackedWeightCache

pytestmark = pytest.mark.skipif(
    native.packed_layout_id() is None, reason="only compiled kernels have a layout of their own"
)


@pytest.fixture(autouse=True)
def separate_user_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


@pytest.fixture
def folder(tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(tiny_models.model_folder("qwen2"), copy)
    return copy


@pytest.fixture
def pack_calls(monkeypatch):
    """Counts how often the weights of a model are packed: each time, its head is packed once.

    It is also packed without numbers, to measure it.
    """
    calls = []

    def pack_head(weights, pack=DecoderWeights.pack_head):
        calls.extend([1] * (weights.device.type != "meta"))
        return pack(weights)

    monkeypatch.setattr(DecoderWeights, "pack_head", pack_head)
    return calls


def logits_and_info(folder, **settings):
    """Logits of a few tokens, and the engine's ModelInfo."""
    runner, info = load_test_runner(folder, pack_cache=True, **settings)
    from parley.model.networks.network import PackedBatch
    from parley.native.layout import RowSpan

    positions = torch.arange(9)
    batch = PackedBatch(positions * 3 + 1, positions, positions, [RowSpan(0, 9, 9, [0])])
    with torch.inference_mode():
        return runner.network.compute_logits(runner.network.compute_hidden(batch, runner.pages)), info


def cached_files(folder):
    return sorted(path.name for path in (folder / ".parley").glob("packed-*"))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_second_start_reads_cached_packed_weights(folder, pack_calls, quantization):
    first, one = logits_and_info(folder, quantization=quantization)
    second, other = logits_and_info(folder, quantization=quantization)
    assert torch.equal(first, second) and one == other
    assert len(pack_calls) == 1 and len(cached_files(folder)) == 1


def test_packed_cache_follows_checkpoint_content(folder, pack_calls):
    weights_file = folder / "model.safetensors"
    first, _ = logits_and_info(folder)
    files_before = cached_files(folder)
    os.utime(weights_file, (1, 1))
    shutil.copyfile(weights_file, folder / "copy")
    os.replace(folder / "copy", weights_file)
    second, _ = logits_and_info(folder)
    assert torch.equal(first, second) and len(pack_calls) == 1 and cached_files(folder) == files_before

    data = bytearray(weights_file.read_bytes())
    data[-4000:] = bytes(4000)
    weights_file.write_bytes(data)
    changed, _ = logits_and_info(folder)
    assert len(pack_calls) == 2 and not torch.equal(first, changed)
    assert len(cached_files(folder)) == 1 and cached_files(folder) != files_before  # the outdated file is deleted


def test_packed_cache_is_separate_for_each_quantization(folder, pack_calls):
    plain, _ = logits_and_info(folder)
    quantized, _ = logits_and_info(folder, quantization="int8")
    assert len(cached_files(folder)) == 2 and not torch.equal(plain, quantized)
    assert torch.equal(plain, logits_and_info(folder)[0]) and len(pack_calls) == 2


@pytest.mark.parametrize("damage", [b"", b"\x08\0\0\0\0\0\0\0{}", None])
def test_damaged_packed_cache_is_rebuilt(folder, pack_calls, damage):
    first, _ = logits_and_info(folder)
    path = folder / ".parley" / cached_files(folder)[0]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    (folder / ".parley" / "contents.json").write_text("[1]")
    assert torch.equal(first, logits_and_info(folder)[0]) and len(pack_calls) == 2
    assert path.stat().st_size == len(whole)


@pytest.mark.parametrize("place", ["structure", "middle", "end"])
def test_packed_cache_with_damaged_bytes_is_rebuilt(folder, pack_calls, caplog, place):
    first, _ = logits_and_info(folder, quantization="int8")
    path = folder / ".parley" / cached_files(folder)[0]
    whole = path.read_bytes()
    damaged = bytearray(whole)
    if place == "structure":  # a number of it, which is still valid JSON
        position = whole.index(b'\\"checksum\\": ') + len(b'\\"checksum\\": ')
        damaged[position] = b"12"[whole[position : position + 1] == b"1"]
    else:
        damaged[len(whole) * 3 // 4 if place == "middle" else -1] ^= 0x40
    path.write_bytes(damaged)
    assert torch.equal(first, logits_and_info(folder, quantization="int8")[0]) and len(pack_calls) == 2
    assert "damaged" in caplog.text and path.stat().st_size == len(whole)


WRITE = """
import os, resource, signal, sys
from pathlib import Path
import torch
from parley.model.load.packed_cache import PackedWeightCache
cache = PackedWeightCache(Path(sys.argv[1]), [], sys.argv[2], b"secret", "kernels")
"""
# The kernel kills it while the library writes the file, which may have 1 MB.
KILLED_WRITE = """
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
cache.write_weights([torch.zeros(1 << 20)])
"""
# It has written the file, and waits before it gets its name.
SLOW_WRITE = """
os.fsync = lambda descriptor: (print(flush=True), input())
cache.write_weights([torch.zeros(1 << 20)])
"""


def test_files_of_killed_processes_are_removed(tmp_path):
    cache = PackedWeightCache(tmp_path, [], "two", b"secret", "kernels")
    killed = subprocess.run([sys.executable, "-c", WRITE + KILLED_WRITE, str(tmp_path), "one"])
    assert killed.returncode == -signal.SIGXFSZ
    assert any(path.is_file() for path in cache.folder.rglob("*"))
    cache.write_weights([torch.zeros(9)])
    assert [*cache.folder.iterdir()] == [cache.path]


def test_files_of_processes_that_write_are_not_removed(tmp_path):
    cache = PackedWeightCache(tmp_path, [], "two", b"secret", "kernels")
    command = [sys.executable, "-c", WRITE + SLOW_WRITE, str(tmp_path), "one"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        writer.stdout.readline()
        cache.write_weights([torch.zeros(9)])
        writer.communicate(b"\n")
    other = PackedWeightCache(tmp_path, [], "one", b"secret", "kernels")
    assert sorted(cache.folder.iterdir()) == sorted([cache.path, other.path])
    (weights,) = other.read_weights(lambda done: None)
    assert torch.equal(weights, torch.zeros(1 << 20))


def test_packed_cache_of_another_user_is_ignored(folder, pack_calls, tmp_path):
    """Guards against a planted cache file in a shared model folder."""
    logits_and_info(folder)
    shutil.rmtree(tmp_path / "user")
    logits_and_info(folder)
    assert len(pack_calls) == 2


def test_start_succeeds_when_packed_cache_is_not_writable(folder, pack_calls, caplog):
    (folder / ".parley").write_text("a file where the folder should be")
    logits_and_info(folder)
    assert len(pack_calls) == 1 and "cannot be kept" in caplog.text


def test_packed_cache_keeps_the_factors_of_activations(tmp_path, pack_calls):
    from transformers import AutoConfig

    config = AutoConfig.for_model("apertus", **tiny_models.BASE_CONFIG)
    folder = tmp_path / "model"
    tiny_models.write_random_model(folder, tiny_models.make_decoder(config), seed=0, dtype="bfloat16")
    first, _ = logits_and_info(folder)
    second, _ = logits_and_info(folder)
    assert torch.equal(first, second) and len(pack_calls) == 1


def test_packed_cache_keeps_alternating_updates(tmp_path, pack_calls):
    folder = tiny_models.write_model(tmp_path / "model", "gemma3n")
    first, info = logits_and_info(folder)
    second, _ = logits_and_info(folder)
    assert info.fused and torch.equal(first, second) and len(pack_calls) == 1
