"""A whole decoder on the kernels in Triton: the same logits as torch's forms, and chunks that change no token."""

from __future__ import annotations

import pytest
import torch
from support import tiny_models
from support.host_waits import refuse_host_waits
from support.run_model import load_test_runner
from support.triton_device import DEVICE, DTYPE, HAS_GPU, IS_NIGHT, use_triton

from parley.core.sequence import PAGE_SIZE
from parley.model.load import plan
from parley.model.networks import decode_graphs
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.native import kernel_choice
from parley.native.triton_forms.triton_packed import TritonPacked

RECORDED = ["qwen3", "deepseek_v2_lite", *(["qwen3_moe", "gpt_oss", "deepseek_v3", "minicpm3"] if IS_NIGHT else [])]
BATCHES = [[0], [1, 2, 0], [2], [1], [4, 3, 2, 1, 0], *[[0, 1]] * 3]  # the last are longer than the first graphs
PROMPT = [3 + 7 * i % 90 for i in range(20)]


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_decoder_gives_the_logits_of_the_torch_forms(architecture, monkeypatch):
    folder = tiny_models.model_folder(architecture)
    device = DEVICE.type
    monkeypatch.setattr(plan, "resolve_dtype", lambda *arguments: DTYPE)  # on the CPU it would be bfloat16
    with monkeypatch.context() as patch:
        patch.setattr(kernel_choice, "compiled_kernels", lambda: None)
        patch.setattr(kernel_choice, "own_kernels", lambda *arguments: None)
        expected = compute_logits(load_test_runner(folder, device=device)[0].network, [20])
    with monkeypatch.context() as patch:
        use_triton(patch)
        network = load_test_runner(folder, device=device)[0].network
        if not HAS_GPU:
            assert isinstance(network.layer_weights[0].qkv, TritonPacked)
        logits = compute_logits(network, [20])
        assert (logits - expected).norm() < 0.02 * expected.norm()
        pieces = compute_logits(network, [16, 3, 1])
        assert (pieces - logits).norm() < (1e-9 if HAS_GPU else 0.02) * logits.norm()


@torch.inference_mode()
def compute_logits(network, counts: list[int]) -> torch.Tensor:
    """Compute the prompt in chunks of these sizes; return the logits of its last token."""
    pages = PagedKV(network.kv_layers, 4, network.dtype, DEVICE)
    pages.clear_pages([0, 1])
    start = 0
    for count in counts:
        batch = PackedBatch.pack_parts([(PROMPT[start : start + count], start, [1, 0])], DEVICE)
        hidden = network.compute_hidden(batch, pages)
        start += count
    assert start == len(PROMPT) <= 2 * PAGE_SIZE
    return network.compute_logits(hidden[-1:]).float()


class RepeatedLaunch:
    """A graph that starts its kernels one by one. As with a real one, recording fails if one of them waits."""

    def __init__(self, launch):
        launch()
        with refuse_host_waits():
            launch()
        self.replay = launch


@pytest.mark.parametrize("architecture", RECORDED)
def test_graphs_of_decode_steps_give_the_bits_of_steps_without(architecture, monkeypatch):
    """Filled up to the rows and the length of the graph, in batches that grow, shrink and have other sequences."""
    batches = BATCHES if architecture == "qwen3" or IS_NIGHT else BATCHES[:4]
    monkeypatch.setattr(plan, "resolve_dtype", lambda *arguments: DTYPE)
    monkeypatch.setattr(decode_graphs, "FIRST_LENGTH", 4)
    use_triton(monkeypatch)
    network = load_test_runner(tiny_models.model_folder(architecture), device=DEVICE.type)[0].network
    caches = [PagedKV(network.kv_layers, 20, network.dtype, DEVICE) for _ in range(2)]
    assert all(decode_graphs.can_record(network, cache) for cache in caches)
    graphs = decode_graphs.DecodeGraphs(
        network,
        caches[1],
        max_model_len=16,
        max_rows=5,
        record=decode_graphs.CudaGraphRecorder() if HAS_GPU else RepeatedLaunch,
    )
    for cache in caches:
        cache.clear_pages(list(range(21)))
    lengths = dict.fromkeys(range(5), 0)
    with torch.inference_mode():
        for rows in batches:
            parts = [([5 + row + lengths[row]], lengths[row], [19 - row]) for row in rows]
            batch = PackedBatch.pack_parts(parts, DEVICE)
            expected = network.compute_hidden(batch, caches[0])
            actual = graphs.compute_hidden(PackedBatch.pack_parts(parts, DEVICE))
            assert torch.equal(actual, expected)
            for row in rows:
                lengths[row] += 1
    assert all(map(torch.equal, caches[0].arenas, caches[1].arenas))
    assert graphs.replays == len(batches) and (batches != BATCHES or max(lengths.values()) > 4)


def test_batches_that_graphs_do_not_compute(monkeypatch):
    monkeypatch.setattr(plan, "resolve_dtype", lambda *arguments: DTYPE)
    use_triton(monkeypatch)
    network = load_test_runner(tiny_models.model_folder("qwen3"), device=DEVICE.type)[0].network
    cache = PagedKV(network.kv_layers, 4, network.dtype, DEVICE)
    graphs = decode_graphs.DecodeGraphs(network, cache, max_model_len=64, max_rows=2, record=RepeatedLaunch)
    too_many = [([5], 0, [row]) for row in range(5)]
    for parts in ([([5, 6], 0, [0])], too_many):
        assert graphs.compute_hidden(PackedBatch.pack_parts(parts, DEVICE)) is None

    def record(launch):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    failing = decode_graphs.DecodeGraphs(network, cache, max_model_len=64, max_rows=2, record=record)
    for _ in range(2):
        assert failing.compute_hidden(PackedBatch.pack_parts([([5], 0, [0])], DEVICE)) is None
