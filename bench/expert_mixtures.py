"""Part of ``make bench``: layers with mixtures of experts, by parley, by Transformers and as the machine allows.

One layer has the true shape of Qwen3-30B-A3B's, GPT-OSS-20B's or DeepSeek-V2-Lite's and random weights; there is hardly
any vocabulary, so that the layer alone counts. Each step decodes other tokens than the one before, which choose other
experts: their weights come from memory. Transformers computes in bf16, GPT-OSS with dequantized weights. Both take
turns of two steps in one process. The second counts, because the first pays for what the other has left behind; and its
CPU time of one thread, because other programs hardly change it. The table goes to ``.peers/mixtures.md``.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from install_peers import MODELS, ROOT
from kernel_speed import CONTEXT, decode_batch, ignore_progress, prefill_batch
from machine_limits import Limits, measure_limits
from performance_page import markdown_table
from published_models import draw_mxfp4
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from parley.model.load.loader import load_runner
from parley.model.networks.network import PackedBatch
from parley.model.runner import DecoderRunner
from parley.types import ParleySettings

LAYERS, VOCAB = 1, 2048
ROWS, PROMPT = (1, 8, 32), 512
RUNS = 5


@dataclass(frozen=True)
class Shape:
    """A model's layers. ``kinds``: how parley holds the experts, with the bytes of a weight and the setting for it.

    ``shared``: the experts beside these that compute each row.
    """

    name: str
    fields: dict[str, Any]
    width: int  # of an expert
    experts: int
    experts_per_token: int
    kinds: dict[str, tuple[float, str]]
    is_mxfp4: bool = False
    shared: int = 0

    def attention_sizes(self) -> tuple[int, int]:
        """Return the weights of a layer's attention, and the numbers of its KV cache for each token."""
        fields = self.fields
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
        if "kv_lora_rank" not in fields:
            kv_heads, dim = fields["num_key_value_heads"], fields["head_dim"]
            return hidden * dim * 2 * (heads + kv_heads), 2 * kv_heads * dim
        names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        rank, rotary, plain, value = (fields[name] for name in names)
        down = hidden * (heads * (plain + rotary + value) + rank + rotary)
        return down + rank * heads * (plain + value), rank + rotary


COMMON = {"num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 4096, "head_dim": 128}
QWEN3 = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts_per_tok": 8}
GPT_OSS = {"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4}
DEEPSEEK = {
    "hidden_size": 2048,
    "num_experts_per_tok": 6,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
}
DEEPSEEK_ATTENTION = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
SHAPES = {
    "qwen3_moe": Shape(
        "Qwen3-30B-A3B",
        COMMON | QWEN3 | {"num_experts": 128, "moe_intermediate_size": 768, "norm_topk_prob": True},
        768,
        128,
        8,
        {"bf16": (2, "none"), "4 bits": (0.53, "int4")},
    ),
    "gpt_oss": Shape(
        "GPT-OSS-20B",
        COMMON | GPT_OSS | {"num_local_experts": 32, "intermediate_size": 2880, "head_dim": 64},
        2880,
        32,
        4,
        {"MXFP4": (0.53125, "none")},
        is_mxfp4=True,
    ),
    "deepseek_v2": Shape(
        "DeepSeek-V2-Lite",
        COMMON | DEEPSEEK | DEEPSEEK_ATTENTION,
        1408,
        64,
        6,
        {"bf16": (2, "none"), "4 bits": (0.53, "int4")},
        shared=2,
    ),
}


def write_model(model_type: str, shape: Shape) -> Path:
    """Write a model of random weights, unless it is there, and return its folder."""
    folder = MODELS / f"mixture-{model_type}"
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(model_type, **shape.fields)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if shape.is_mxfp4 and name.endswith(("gate_up_proj", "down_proj")):
            tensors.update(draw_mxfp4(name, tensor.shape))
        else:
            mean = 1.0 if "norm" in name else 0.0
            tensors[name] = torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(mean, 0.02)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = {**config.to_dict(), "dtype": "bfloat16"}
    if shape.is_mxfp4:
        written["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


class TransformersLayers:
    """Transformers' model, with a cache for each number of rows."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        config = self.model.config
        rank = getattr(config, "kv_lora_rank", None)
        heads = config.num_key_value_heads if rank is None else 1
        dims = (config.head_dim,) * 2 if rank is None else (rank, config.qk_rope_head_dim)
        self.kv_shapes = [(heads, CONTEXT - 1, dim) for dim in dims]

    def decode(self, tokens: torch.Tensor) -> float:
        """Compute one token of each sequence, at the end of its context, and return the seconds."""
        cache = DynamicCache(config=self.model.config)
        for layer in range(LAYERS):
            keys, values = (torch.randn(len(tokens), *shape).bfloat16() for shape in self.kv_shapes)
            cache.update(keys, values, layer)
        began = time.thread_time()
        self.model.model(tokens[:, None], past_key_values=cache, use_cache=True)
        return time.thread_time() - began

    def prefill(self, tokens: torch.Tensor) -> float:
        """Compute a prompt and return the seconds."""
        began = time.thread_time()
        self.model.model(tokens[None], use_cache=True)
        return time.thread_time() - began


def parley_seconds(runner: DecoderRunner, batch: PackedBatch, tokens: torch.Tensor) -> float:
    """Compute one step and return the seconds."""
    batch = replace(batch, token_ids=tokens)
    began = time.thread_time()
    runner.network.compute_hidden(batch, runner.pages)
    return time.thread_time() - began


def least_seconds(shape: Shape, rows: int, bytes_of_weight: float, limits: Limits) -> float:
    """Return max(bytes / bandwidth, operations / rate) of the layers for this many rows.

    Rows choose experts independently and alike; the bytes of attention and of the KV cache count as well.
    """
    expert, (attention, kv_numbers) = 3 * shape.fields["hidden_size"] * shape.width, shape.attention_sizes()
    touched = shape.shared + shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** rows)
    kv_bytes = (rows * CONTEXT if rows != PROMPT else PROMPT) * kv_numbers * 2
    attention_bytes = attention * (bytes_of_weight if bytes_of_weight < 1 and not shape.is_mxfp4 else 2)
    read = touched * expert * bytes_of_weight + attention_bytes + kv_bytes
    operations = 2 * rows * ((shape.experts_per_token + shape.shared) * expert + attention)
    return LAYERS * max(read / limits.bandwidth, operations / limits.bf16)


@torch.inference_mode()
def measure_shape(model_type: str, shape: Shape) -> list[list[str]]:
    """Return the rows of the table for one model."""
    folder = write_model(model_type, shape)
    torch.set_num_threads(1)
    runners = {
        kind: load_runner(
            ParleySettings(model=str(folder), quantization=setting, kv_memory=512 << 20, threads=1), ignore_progress
        )[0]
        for kind, (_, setting) in shape.kinds.items()
    }
    other, lines = TransformersLayers(folder), []
    for rows in (*ROWS, PROMPT):
        batch = prefill_batch(PROMPT) if rows == PROMPT else decode_batch(rows)
        run_other = other.prefill if rows == PROMPT else other.decode
        times: dict[str, list[float]] = {}
        limits = measure_limits(time.thread_time)
        for turn in range(RUNS):
            first, second = (
                (torch.arange(rows) * 7 + step * rows * 7 + 5) % VOCAB for step in (2 * turn, 2 * turn + 1)
            )
            for kind, runner in runners.items():
                parley_seconds(runner, batch, first)
                times.setdefault(kind, []).append(parley_seconds(runner, batch, second))
            run_other(first)
            times.setdefault("Transformers", []).append(run_other(second))
        theirs = statistics.median(times["Transformers"])
        for kind, (bytes_of_weight, _) in shape.kinds.items():
            ours, least = statistics.median(times[kind]), least_seconds(shape, rows, bytes_of_weight, limits)
            load = f"prefill {rows}" if rows == PROMPT else f"decode {rows}"
            numbers = [f"{1000 * ours / LAYERS:.2f}", f"{1000 * theirs / LAYERS:.2f}", f"{theirs / ours:.1f}"]
            lines.append([shape.name, kind, load, *numbers, f"{1000 * least / LAYERS:.2f}", f"{least / ours:.2f}"])
            print(" | ".join(lines[-1]), flush=True)
    return lines


def main() -> int:
    lines = []
    for model_type in sys.argv[1:] or SHAPES:
        lines += measure_shape(model_type, SHAPES[model_type])
        gc.collect()
    head = ["Layers of", "parley's experts", "Load", "parley, ms a layer", "Transformers", "ratio", "limit", "reached"]
    (ROOT / "mixtures.md").write_text(markdown_table(head, lines) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
