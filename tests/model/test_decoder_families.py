"""Each family on the fused decoder: the logits of Transformers in float32, and in bfloat16 the same bits however a
sequence is cut into steps, whatever shares them, and with one call for all layers or kernel by kernel.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch
from support import tiny_models
from support.run_model import load_test_runner
from transformers import AutoConfig, AutoModelForCausalLM

from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.families.table import FUSABLE_TYPES
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV

HEADS = {"head_dim": 32}
OLMO3_ROPE = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
# Model type and fields of its config, beside those of BASE_CONFIG.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", HEADS),
    "gemma2": ("gemma2", HEADS | {"sliding_window": 45, "query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3_text", HEADS | {"sliding_window": 33, "num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "granite": (
        "granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 25, "num_hidden_layers": 4, "rope_parameters": OLMO3_ROPE}),
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"sliding_window": 29, "sliding_window_pattern": 2}),
    "glm": ("glm", HEADS),
    "glm4": ("glm4", HEADS),
    "ernie": ("ernie4_5", HEADS | {"use_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 37}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "phi": ("phi", {}),
    "nemotron": ("nemotron", {}),
    "arcee": ("arcee", {}),
    "falcon": ("falcon", {}),
    "falcon with biases and heads of their own": ("falcon", {"multi_query": False, "bias": True}),
    "falcon of two norms": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon of one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox one after the other": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "seed_oss": ("seed_oss", HEADS),
    "ministral": ("ministral", HEADS | {"sliding_window": 21, "layer_types": ["full_attention", "sliding_attention"]}),
    **{name: tiny_models.ARCHITECTURES[name] for name in ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")},
    **tiny_models.MIXTURES,
}
IS_NIGHT = bool(os.environ.get("PARLEY_NIGHTLY"))
BY_NIGHT = {"olmoe", "granitemoe", "dots1", "ernie_moe"}  # each part of them is in another family, too
# The schedules of all others run by night; ``test_layers`` draws every variation of a layer.
KERNEL_FAMILIES = ["gemma3", "olmo2", "cohere2", "phi", "gpt_oss"]
TESTED_ELSEWHERE = {
    "llama", "mistral", "qwen2", "qwen3", "phi3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text",
    "qwen3_vl_moe_text",
}  # fmt: skip
LENGTH = 90
PIECES = (64, 1, 20, 5)
PAGES = 8  # of a sequence


@cache
def write_family(name: str):
    """Write a tiny model of the family, once per test run, with float32 weights that bfloat16 holds exactly."""
    model_type, fields = FAMILIES[name]
    folder = tiny_models.models_home() / f"family-{name}"
    config = AutoConfig.for_model(model_type, **(tiny_models.BASE_CONFIG | fields))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tiny_models.write_random_model(folder, model, seed=0, dtype="float32")
    return folder


@cache
def load_decoder(name: str, dtype: str) -> FusedDecoder:
    runner, info = load_test_runner(write_family(name), dtype=dtype)
    assert info.fused
    return runner.network


TOKEN_IDS = torch.randint(3, tiny_models.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()


@torch.inference_mode()
def compute_logits(decoder: FusedDecoder, pieces: tuple[int, ...], *, sequences: int = 1, is_one_call: bool = True):
    """Return the logits of the first sequence, which is computed in ``pieces``; others are computed beside it."""
    pages = PagedKV(decoder.layers, PAGES * sequences, decoder.dtype)
    pages.clear_pages(list(range(PAGES * sequences)))
    logits, start = [], 0
    run = decoder.compute_hidden if is_one_call else decoder.kernel_by_kernel
    for count in pieces:
        tables = [list(range(PAGES * i, PAGES * (i + 1))) for i in range(sequences)]
        parts = [(TOKEN_IDS[i][start : start + count], start, table) for i, table in enumerate(tables)]
        batch = PackedBatch.pack_parts(parts, torch.device("cpu"))
        logits.append(decoder.compute_logits(run(batch, pages))[:count])
        start += count
    return torch.cat(logits)


def test_every_family_is_tested():
    assert {model_type for model_type, _ in FAMILIES.values()} | TESTED_ELSEWHERE == FUSABLE_TYPES


@pytest.mark.parametrize("name", FAMILIES if IS_NIGHT else sorted(set(FAMILIES) - BY_NIGHT))
def test_logits_equal_those_of_transformers(name: str):
    model = AutoModelForCausalLM.from_pretrained(
        write_family(name), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    decoder = load_decoder(name, "float32")
    counted = (each.numel() for name, each in model.named_parameters() if not name.endswith("e_score_correction_bias"))
    assert decoder.parameters == sum(counted)
    with torch.inference_mode():
        expected = model(torch.tensor(TOKEN_IDS[:1])).logits[0]
    actual = compute_logits(decoder, PIECES)
    assert ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5


@pytest.mark.parametrize("name", FAMILIES if IS_NIGHT else KERNEL_FAMILIES)
def test_every_schedule_gives_the_same_bits(name: str):
    decoder = load_decoder(name, "bfloat16")
    alone = compute_logits(decoder, (LENGTH,))
    assert alone.isfinite().all()
    assert torch.equal(compute_logits(decoder, PIECES), alone)
    assert torch.equal(compute_logits(decoder, PIECES, sequences=2), alone)
    assert torch.equal(compute_logits(decoder, PIECES, sequences=2, is_one_call=False), alone)
