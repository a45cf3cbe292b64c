"""The step whose memory is measured on a GPU: as many tokens and draws as the settings allow, in sequences that fit."""

from __future__ import annotations

import pytest
import torch
from support import tiny_models
from support.run_model import load_test_runner

from parley.model.load.largest_step import pack_largest_step, run_largest_step
from parley.model.networks.paged_kv import PagedKV


@pytest.mark.parametrize(("tokens", "length", "lengths"), [(100, 64, [64, 36]), (64, 64, [64]), (40, 64, [40])])
@torch.inference_mode()
def test_largest_step_has_all_tokens_and_draws(tokens, length, lengths):
    runner, _ = load_test_runner(tiny_models.model_folder("qwen2"))
    parts, pages = pack_largest_step(tokens, length)
    assert [len(part) for part, _, _ in parts] == lengths
    assert sorted(page for _, _, table in parts for page in table) == list(range(pages))
    cache = PagedKV(runner.network.kv_layers, pages, runner.network.dtype)
    cache.clear_pages(list(range(pages)))
    drawn = run_largest_step(runner.network, cache, parts, 7)
    assert drawn.shape == (7,) and int(drawn.min()) >= 0 and int(drawn.max()) < runner.vocab_size
