"""Each family on the fused decoder: the logits of Transformers in float32, and in bfloat16 the same bits however a
sequence is cut into steps, whatever shares them, and with one call for all layers or kernel by kernel.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch
from support import tiny_models
from support.decoder_families import FAMILIES
from support.run_model import load_test_runner
from transformers import AutoConfig

from parley.model.networks.decoder import FusedDecoder
from parley.model.networks.families.table import FUSABLE_TYPES
from parley.model.networks.network import PackedBatch
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.state_arena import StateArena, advance_slot

IS_NIGHT = bool(os.environ.get("PARLEY_NIGHTLY"))
BY_NIGHT = {
    "olmoe",
    "granitemoe",
    "dots1",
    "ernie_moe",
    "deepseek_v2",
    "glm4_moe_lite",
    "youtu",
    "qwen3_5",
    "granite_hybrid without experts",
    "mamba2",
    "mamba",
    "falcon_mamba",
    "falcon_h1 with norms",
    "gpt_bigcode",
    "mpt",
    "mpt with limits",
    "flex_olmo",
    "vaultgemma",
    "exaone_moe",
    "hyperclovax",
    "hyperclovax without norms after",
    "cwm",
    "helium",
    "internlm3",
    "iquestcoder",
    "jais2",
    "ministral3",
    "solar_open",
    "hunyuan_moe",
    "granitemoe_swa",
    "gemma3n of three streams",
    "gemma4_unified",
    "laguna with a gate for each number",
    "lfm3 without norms after and gates",
    "olmo_hybrid without a rotary embedding",
}  # each part of them is in another family, too
# The schedules of all others run by night; ``test_layers`` draws every variation of a layer.
KERNEL_FAMILIES = [
    "gemma3",
    "gemma3n",
    "gemma4 of experts",
    "gemma4 with inputs of layers",
    "olmo2",
    "cohere2",
    "phi",
    "gpt_oss",
    "deepseek_v3",
    "glm_moe_dsa",
    "minimax_m3",
    "axk2",
    "hy4",
    "deepseek_v4",
    "phimoe",
    "qwen3_next",
    "lfm2",
    "lfm3",
    "olmo_hybrid",
    "kimi_linear",
    "minimax",
    "bamba",
    "jamba",
    "llama4",
    "bloom",
    "gpt2",
    "bitnet",
]
TESTED_ELSEWHERE = {
    "llama", "mistral", "qwen2", "qwen3", "phi3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text",
    "qwen3_vl_moe_text", "kimi_k2", "qwen2_5_omni_text", "qwen3_omni_moe_text", "glm4v_text", "glm4v_moe_text",
    "glm_ocr_text", "paddleocr_vl_text", "phi4_multimodal", "granite_docling_text", "deepseek",
    "nemotron-nas", "deci", "smallthinker", "openelm", "step3p5", "mllama_text_model",
    "plm",
}  # fmt: skip
# Relative error. Transformers computes the delta rule in chunks, with other roundings.
TOLERANCES = {"qwen3_next": 1e-4, "qwen3_5": 1e-4, "qwen3_5_moe": 1e-4, "kimi_linear": 1e-4}
LENGTH = 90
PIECES = (64, 1, 20, 5)
PAGES = 8  # of a sequence


@cache
def write_family(name: str):
    """Write a tiny model of the family, once per test run, with float32 weights that bfloat16 holds exactly."""
    model_type, fields = FAMILIES[name]
    folder = tiny_models.models_home() / f"family-{name}"
    config = AutoConfig.for_model(model_type, **(tiny_models.BASE_CONFIG | fields))
    tiny_models.write_random_model(folder, tiny_models.make_decoder(config), seed=0, dtype="float32")
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
    pages = PagedKV(decoder.kv_layers, PAGES * sequences, decoder.dtype)
    pages.clear_pages(list(range(PAGES * sequences)))
    states = StateArena(decoder.state_sizes, sequences)
    for layer in states.layers:
        layer.fill_(float("nan"))  # of a previous owner
    logits, start = [], 0
    run = decoder.compute_hidden if is_one_call else decoder.kernel_by_kernel
    for count in pieces:
        tables = [list(range(PAGES * i, PAGES * (i + 1))) for i in range(sequences)]
        parts = [(TOKEN_IDS[i][start : start + count], start, table) for i, table in enumerate(tables)]
        batch = PackedBatch.pack_parts(parts, torch.device("cpu"))
        batch.states = states.select_states(
            batch.spans, [advance_slot(*slot_span) for slot_span in enumerate(batch.spans)]
        )
        logits.append(decoder.compute_logits(run(batch, pages))[:count])
        start += count
    return torch.cat(logits)


def test_every_family_is_tested():
    assert {model_type for model_type, _ in FAMILIES.values()} | TESTED_ELSEWHERE == FUSABLE_TYPES


@pytest.mark.parametrize("name", FAMILIES if IS_NIGHT else sorted(set(FAMILIES) - BY_NIGHT))
def test_logits_equal_those_of_transformers(name: str):
    # Transformers' eager attention of Falcon adds slopes twice.
    attention = "sdpa" if name == "falcon with slopes" else "eager"
    folder = write_family(name)
    model_class = tiny_models.decoder_class(AutoConfig.from_pretrained(folder))
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    decoder = load_decoder(name, "float32")
    counted = (
        parameter.numel()
        for name, parameter in model.named_parameters()
        if not name.endswith(("e_score_correction_bias", "expert_bias")) and ".vision_" not in name
    )
    assert decoder.parameters == sum(counted)
    with torch.inference_mode():
        expected = model(torch.tensor(TOKEN_IDS[:1])).logits[0]
    actual = compute_logits(decoder, PIECES)
    assert ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < TOLERANCES.get(name, 1e-5)


@pytest.mark.parametrize("name", FAMILIES if IS_NIGHT else KERNEL_FAMILIES)
def test_every_schedule_gives_the_same_bits(name: str):
    check_schedules(load_decoder(name, "bfloat16"))


def check_schedules(decoder: FusedDecoder) -> None:
    """Check that a sequence has the same logits alone, in pieces and beside another one."""
    alone = compute_logits(decoder, (LENGTH,))
    assert alone.isfinite().all()
    assert torch.equal(compute_logits(decoder, PIECES), alone)
    assert torch.equal(compute_logits(decoder, PIECES, sequences=2), alone)
    assert torch.equal(compute_logits(decoder, PIECES, sequences=2, is_one_call=False), alone)
