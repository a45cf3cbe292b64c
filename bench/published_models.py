"""Writes models in the shapes of published ones, with random weights and fewer layers, in the formats of the servers.

Hugging Face's format has the published names of tensors; llama.cpp's converter makes GGUF files of it. The tokenizer is
the built-in model's. Embeddings of ids that it does not have are zero, so that greedy decoding stays among real tokens.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from install_peers import LLAMA_BIN, LLAMA_SOURCE, MODELS, atomic_path, run_step
from machine_limits import Limits
from random_model import OLDER, TOKENIZER
from safetensors.torch import load_file, save_file

import parley.model.load  # noqa: F401  (before Transformers, so that torchvision can be imported)
from parley import demo

FP8_BLOCK = 128  # rows and columns of a scale in DeepSeek's files
FP8_LARGEST = 448.0
SMALL_VOCABULARY = 16384


@dataclass(frozen=True)
class PublishedShape:
    """``fields``: of the config, with Transformers' names. A token takes ``experts_per_token`` of a layer's
    ``experts``."""

    title: str
    model_type: str
    fields: dict[str, Any]
    experts: int = 0
    experts_per_token: int = 0
    is_mxfp4: bool = False


QWEN3_MOE = {
    "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "vocab_size": SMALL_VOCABULARY, "max_position_embeddings": 40960,
}  # fmt: skip
GPT_OSS = {"num_hidden_layers": 6, "num_local_experts": 32, "vocab_size": SMALL_VOCABULARY}
GEMMA3 = {
    "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "max_position_embeddings": 32768,
    "sliding_window": 512, "query_pre_attn_scalar": 256,
}  # fmt: skip
QWEN3_NEXT = {"num_hidden_layers": 4, "num_experts": 128, "vocab_size": SMALL_VOCABULARY}

PUBLISHED_SHAPES = {
    "qwen3-moe": PublishedShape("Qwen3-30B-A3B, 6 layers", "qwen3_moe", QWEN3_MOE, 128, 8),
    "gpt-oss": PublishedShape("GPT-OSS-20B, 6 layers", "gpt_oss", GPT_OSS, 32, 4, is_mxfp4=True),
    "gemma3": PublishedShape("Gemma 3 1B", "gemma3_text", GEMMA3),
    "qwen3-next": PublishedShape("Qwen3-Next, 4 layers with 128 experts", "qwen3_next", QWEN3_NEXT, 128, 10),
}


def write_published_model(name: str) -> Path:
    """Write a model in Hugging Face's format, unless it is there. Return its folder."""
    folder = MODELS / name
    if (folder / "config.json").exists():
        return folder
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = PUBLISHED_SHAPES[name]
    config = AutoConfig.for_model(shape.model_type, **shape.fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    torch.manual_seed(0)
    tensors = {
        published: tensor
        for key, empty in model.state_dict().items()
        if key not in tied
        for published, tensor in _draw_tensors(key, empty.shape, shape)
    }
    folder.mkdir(parents=True, exist_ok=True)
    source = demo.model_folder()
    for file in (*TOKENIZER, *OLDER):
        shutil.copy(source / file, folder / file)
    vocabulary = len(json.loads((source / "tokenizer.json").read_text())["model"]["vocab"])
    tensors["model.embed_tokens.weight"][vocabulary:] = 0
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"][vocabulary:] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    special = json.loads((source / "config.json").read_text())
    written = {**config.to_dict(), "architectures": [type(model).__name__], "torch_dtype": "bfloat16"}
    written |= {key: special[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if shape.is_mxfp4:
        written["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    return folder


def _draw_tensors(key: str, size: torch.Size, shape: PublishedShape) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random tensors with their published names for one of Transformers' parameters."""
    is_expert = ".experts." in key and len(size) == 3
    if is_expert and shape.is_mxfp4:
        yield from draw_mxfp4(key, size)
    elif is_expert:
        # Transformers keeps the experts of a layer in one tensor, and published files have one for each.
        parts = ("gate_proj", "up_proj") if key.endswith("gate_up_proj") else ("down_proj",)
        prefix = key.rpartition(".")[0]
        for expert in range(size[0]):
            for part in parts:
                yield f"{prefix}.{expert}.{part}.weight", _draw_weight(size[1] // len(parts), size[2])
    elif "norm" in key:
        yield key, torch.ones(size, dtype=torch.bfloat16)
    else:
        yield key, _draw_weight(*size)


def draw_mxfp4(key: str, size: torch.Size) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the blocks and scales of random experts in MXFP4. ``size``: [experts, in, out], as in Transformers."""
    experts, in_features, out_features = size
    yield f"{key}_blocks", torch.randint(0, 256, (experts, out_features, in_features // 32, 16), dtype=torch.uint8)
    yield f"{key}_scales", torch.full((experts, out_features, in_features // 32), 120, dtype=torch.uint8)  # 2**-7


def _draw_weight(*size: int) -> torch.Tensor:
    return (torch.randn(*size) * 0.02).bfloat16()


def write_gguf(folder: Path, kind: str) -> Path:
    """Write a model as a GGUF file, unless it is there. ``kind``: bf16, or a kind of llama.cpp's quantization.

    Return the file. Raises CalledProcessError if llama.cpp cannot convert the model.
    """
    whole = MODELS / f"{folder.name}-{kind}.gguf"
    if whole.exists():
        return whole
    if kind == "bf16":
        with atomic_path(whole) as out:
            run_step("llama", sys.executable, Path(__file__).with_name("to_gguf.py"), LLAMA_SOURCE, folder, out)
    else:
        source = write_gguf(folder, "bf16")
        with atomic_path(whole) as out:
            run_step("llama", LLAMA_BIN / "llama-quantize", source, out, kind)
    return whole


def write_fp8(source: Path, folder: Path) -> Path:
    """Write a model's linear layers in FP8 as DeepSeek's files have them: a scale for 128 x 128 weights."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        rows, columns = (-(-side // FP8_BLOCK) for side in weight.shape)
        blocks = torch.zeros(rows * FP8_BLOCK, columns * FP8_BLOCK)
        blocks[: weight.shape[0], : weight.shape[1]] = weight
        blocks = blocks.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
        scales = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / FP8_LARGEST
        quantized = (blocks / scales).view(rows * FP8_BLOCK, columns * FP8_BLOCK)
        tensors[name] = quantized[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous()
        tensors[f"{name}_scale_inv"] = scales.view(rows, columns).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in (*TOKENIZER, *OLDER):
        shutil.copy(source / name, folder / name)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


@dataclass(frozen=True)
class WeightCounts:
    """Weights of a model's matrices: ``dense`` ones for each token, without embeddings; ``expert``, those of one
    expert, and the ``experts`` of all layers."""

    dense: int
    expert: int
    experts: int

    @classmethod
    def from_folder(cls, folder: Path) -> WeightCounts:
        """Count the weights of a model in Hugging Face's format."""
        from safetensors import safe_open

        dense, expert_weights, experts = 0, 0, 0
        with safe_open(folder / "model.safetensors", "pt") as file:
            sizes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
        is_tied = "lm_head.weight" not in sizes
        for name, size in sizes.items():
            count = 1
            for side in size:
                count *= side
            if name.endswith("_blocks"):
                expert_weights += 2 * count
                experts += size[0] * name.endswith("down_proj_blocks")
            elif ".experts." in name and name.endswith("proj.weight"):
                expert_weights += count
                experts += name.endswith("down_proj.weight")
            elif len(size) == 2 and ("embed_tokens" not in name or is_tied) and not name.endswith("_scale_inv"):
                dense += count
        return cls(dense, expert_weights // experts if experts else 0, experts)

    @property
    def total(self) -> int:
        """The weights of all matrices."""
        return self.dense + self.expert * self.experts

    def step_seconds(
        self, limits: Limits, shape: PublishedShape | None, rows: int, dense_bytes: float, expert_bytes: float
    ) -> float:
        """Return max(bytes / bandwidth, operations / rate) of a step over this many rows, without KV cache and states.

        Rows choose experts independently. ``dense_bytes``, ``expert_bytes``: of a weight.
        """
        per_layer, experts_per_token = (
            (shape.experts, shape.experts_per_token) if shape is not None and shape.experts else (1, 0)
        )
        touched = self.experts * (1 - (1 - experts_per_token / per_layer) ** rows)
        used = self.dense + self.expert * self.experts * experts_per_token / per_layer  # by each row
        read = self.dense * dense_bytes + touched * self.expert * expert_bytes
        return max(read / limits.bandwidth, 2 * rows * used / limits.bf16)
