"""A whole decoder on the kernels in Triton: the same logits as torch's forms, and chunks that change no token."""

from __future__ import annotations

import pytest
import torch
from support import tiny_models
from support.run_model import load_test_runner
from support.triton_device import DEVICE, DTYPE, HAS_GPU, use_triton

from parley import native
from parley.core.sequence import BLOCK_SIZE
from parley.model.load import plan
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.native.triton_forms.triton_packed import TritonPacked

PROMPT = [3 + 7 * i % 90 for i in range(20)]


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_decoder_gives_the_logits_of_the_torch_forms(architecture, monkeypatch):
    folder = tiny_models.model_folder(architecture)
    device = DEVICE.type
    monkeypatch.setattr(plan, "resolve_dtype", lambda *arguments: DTYPE)  # on the CPU it would be bfloat16
    with monkeypatch.context() as patch:
        patch.setattr(native, "compiled_kernels", lambda: None)
        patch.setattr(native, "_own_kernels", lambda *arguments: None)
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
    pages = PagedKV(network.layers, 4, network.dtype, DEVICE)
    pages.clear_pages([0, 1])
    start = 0
    for count in counts:
        batch = PackedBatch.pack_parts([(PROMPT[start : start + count], start, [1, 0])], DEVICE)
        hidden = network.compute_hidden(batch, pages)
        start += count
    assert start == len(PROMPT) <= 2 * BLOCK_SIZE
    return network.compute_logits(hidden[-1:]).float()
