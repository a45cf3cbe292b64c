"""Writes GGUF files of model folders with the gguf package, as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models

from parley.model.checkpoint.quantization import read_quantization
from parley.model.load.decoder_weights import DecoderWeights
from parley.model.networks.config_reader import read_decoder_config

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_exps": "ffn_gate_exps",
    "mlp.experts.up_exps": "ffn_up_exps",
    "mlp.experts.down_exps": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


BASE_CONFIG = {
    "vocab_size": tiny_models.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "dtype": "bfloat16",
}


def write_folder(folder: Path, model_type: str, **fields: Any) -> Path:
    """Write a random model in Hugging Face format, without the seconds that Transformers takes."""
    folder.mkdir(parents=True)
    config = {"model_type": model_type, **BASE_CONFIG, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    tiny_models.write_tokenizer(folder)
    shape = read_decoder_config(config)
    generator, tensors = torch.Generator().manual_seed(0), {}

    def add(name: str, *sizes: int) -> None:
        tensors[name] = (torch.randn(sizes, generator=generator) * sizes[-1] ** -0.5).bfloat16()

    quantization = read_quantization({}, "none")
    weights = DecoderWeights(None, shape, quantization, torch.float32, torch.device("cpu"))
    for layer in range(shape.layer_count):
        for parts in weights.linears.linear_parts(layer).values():
            for linear in parts:
                add(linear.name + ".weight", linear.out_features, linear.in_features)
                if linear.bias:
                    add(linear.name + ".bias", linear.out_features)
        for name, width in weights.norms.layer_norms(layer).values():
            add(name + ".weight", width)
            tensors[name + ".weight"] += 1
    add("model.norm.weight", shape.hidden_size)
    add("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
    if not shape.tied:
        add("lm_head.weight", shape.vocab_size, shape.hidden_size)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_gguf(
    path: Path,
    folder: Path,
    kind: str = "F32",
    *,
    packed: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    **metadata: Any,
) -> Path:
    """Write a folder's model as one file. ``kind``: the type of its linear weights where their shape allows it.

    ``packed``: the blocks of weights by name in the folder, uint8 [out, bytes of a row], and their type, where they
    exist already. Then ``kind`` may be a mixture of types.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    add_shape(writer, config)
    add_tokenizer(writer, folder)
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    if (rope := config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        factors = llama3_factors(rope, config["hidden_size"] // config["num_attention_heads"])
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    for name, tensor in split_experts(load_file(folder / "model.safetensors")).items():
        blocks, type_ = (packed or {}).get(name, (None, None))
        tensor = tensor if blocks is None else torch.from_numpy(blocks)
        if arch == "llama" and (".q_proj" in name or ".k_proj" in name):
            heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
            tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if blocks is not None:
            writer.add_tensor(gguf_name(name, arch), tensor.contiguous().numpy(), raw_dtype=type_)
            continue
        tensor = tensor.float() + 1 if arch.startswith("gemma") and name.endswith("norm.weight") else tensor.float()
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor.flatten()
        add_tensor(
            writer, gguf_name(name, arch), tensor.numpy(), "F32" if name.endswith("mlp.gate.weight") or packed else kind
        )
    close_writer(writer)
    return path


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with the gates and ups of all experts apart, as GGUF files have them."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, end = name.rpartition(".")
        if end == "gate_up_proj":
            gates, ups = tensor.chunk(2, 1)
            split |= {f"{stem}.gate_exps.weight": gates.contiguous(), f"{stem}.up_exps.weight": ups.contiguous()}
        else:
            split[f"{stem}.down_exps.weight" if end == "down_proj" else name] = tensor
    return split


def join_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo ``split_experts``."""
    joined = {name.replace(".down_exps.weight", ".down_proj"): tensor for name, tensor in tensors.items()}
    for name in [joined_name for joined_name in joined if joined_name.endswith(".gate_exps.weight")]:
        parts = joined.pop(name), joined.pop(name.replace("gate_exps", "up_exps"))
        joined[name.replace(".gate_exps.weight", ".gate_up_proj")] = torch.cat(parts, 1)
    return joined


def llama3_factors(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Return what each frequency is divided by, as llama.cpp's converter computes it."""
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def gguf_name(name: str, arch: str) -> str:
    """Return llama.cpp's name of a tensor."""
    names = NAMES | (GEMMA_NAMES if arch in ("gemma2", "gemma3") else {})
    stem, _, suffix = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{names[rest]}.{suffix}"


def add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the numbers of a config.json."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if head_dim := config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.get("rms_norm_eps") is not None:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(field):
            writer.add_float32(f"{writer.arch}.{field}", config[field])
    for field, add in (
        ("num_experts", writer.add_expert_count),
        ("num_local_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
    ):
        if config.get(field):
            add(config[field])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Add tokenizer.json and the chat template."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    ids = tokenizer["model"]["vocab"] | {token["content"]: number for number, token in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2" if "Split" not in json.dumps(tokenizer["pre_tokenizer"]) else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [1 if number not in added else 3 if added[number]["special"] else 4 for number in range(len(tokens))]
    )
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    )
    for key, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        if isinstance(config.get(key), str):
            add(ids[config[key]])
    template = folder / "chat_template.jinja"
    writer.add_chat_template(template.read_text() if template.is_file() else config["chat_template"])
    writer.add_add_bos_token(False)


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    """Add a tensor: as ``kind`` if it is a matrix whose rows are whole blocks, else as float32."""
    type_ = gguf.GGMLQuantizationType[kind]
    if values.ndim == 1 or values.shape[-1] % gguf.GGML_QUANT_SIZES[type_][0]:
        type_ = gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(values, type_), raw_dtype=type_)


def close_writer(writer: gguf.GGUFWriter) -> None:
    """Write everything to the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
