"""OpenELM, as a folder and as a GGUF file, against layers of Transformers of the same sizes, which lacks its code."""

from __future__ import annotations

import json

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import gguf_files, tiny_models
from support.run_model import load_test_runner
from support.same_model import check_gguf_logprobs, check_reference_logprobs
from test_decoder_families import check_schedules
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

from parley.gguf.header import GgufError, read_model
from parley.gguf.model_config import model_config
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.rope import Unfusable

HIDDEN, DIM = 64, 16
# Heads of queries and of keys, and width of the MLP of each layer
LAYERS = [(2, 1, 32), (4, 2, 96), (6, 3, 256)]
FACTORS = [0.4, 1.4, 4.0]
OPENELM = {
    "architectures": ["OpenELMForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_openelm.OpenELMForCausalLM"},
    "model_type": "openelm",
    "model_dim": HIDDEN,
    "head_dim": DIM,
    "num_transformer_layers": len(LAYERS),
    "num_query_heads": [heads for heads, _, _ in LAYERS],
    "num_kv_heads": [kv_heads for _, kv_heads, _ in LAYERS],
    "ffn_multipliers": FACTORS,
    "ffn_dim_divisor": 32,
    "max_context_length": 256,
    "rope_freq_constant": 10000,
    "activation_fn_name": "swish",
    "share_input_output_layers": True,
    "vocab_size": tiny_models.VOCAB,
}
FOLDER_NAMES = {
    "model.embed_tokens": "transformer.token_embeddings",
    "model.norm": "transformer.norm",
    "model.layers": "transformer.layers",
    "self_attn.o_proj": "attn.out_proj",
    "self_attn.": "attn.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.down_proj": "ffn.proj_2",
}
FILE_NAMES = {
    "transformer.token_embeddings": "token_embd",
    "transformer.norm": "output_norm",
    "transformer.layers": "blk",
    "attn.qkv_proj": "attn_qkv",
    "attn.out_proj": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "ffn.proj_2": "ffn_down",
}


def rename(name, names):
    for known, other in names.items():
        name = name.replace(known, other)
    return name


@pytest.fixture(scope="module")
def model():
    """A Qwen 3 of Transformers whose layers are those of LAYERS."""
    sizes = {"num_hidden_layers": len(LAYERS), "hidden_size": HIDDEN, "head_dim": DIM, "tie_word_embeddings": True}
    fields = tiny_models.BASE_CONFIG | sizes

    def configure(**own):
        config = AutoConfig.for_model("qwen3", **(fields | own))
        config._attn_implementation = "eager"
        return config

    qwen = AutoModelForCausalLM.from_config(configure(), dtype=torch.float32, attn_implementation="eager")
    for number, (heads, kv_heads, width) in enumerate(LAYERS):
        own = configure(num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=width)
        layer = qwen.model.layers[number]
        layer.self_attn, layer.mlp = Qwen3Attention(own, number), Qwen3MLP(own)
    return qwen


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    home = tmp_path_factory.mktemp("openelm")
    tiny_models.write_random_model(home / "qwen", model, seed=0, dtype="float32")
    stored = load_file(home / "qwen" / "model.safetensors")
    for number in range(len(LAYERS)):
        layer = f"model.layers.{number}."
        for joined, names in (
            ("attn.qkv_proj", [f"self_attn.{part}_proj" for part in "qkv"]),
            ("ffn.proj_1", ["mlp.gate_proj", "mlp.up_proj"]),
        ):
            stored[f"{layer}{joined}.weight"] = torch.cat([stored.pop(f"{layer}{name}.weight") for name in names])
    result = home / "openelm"
    result.mkdir()
    written = {rename(name, FOLDER_NAMES): tensor for name, tensor in stored.items() if "lm_head" not in name}
    save_file(written, result / "model.safetensors", {"format": "pt"})
    (result / "config.json").write_text(json.dumps(OPENELM | {"torch_dtype": "float32"}))
    tiny_models.write_tokenizer(result)
    return result


def write_file(path, folder):
    """Write the folder as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, "openelm")
    shape = {
        "max_position_embeddings": 256,
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(LAYERS),
        "num_attention_heads": [heads for heads, _, _ in LAYERS],
        "num_key_value_heads": [kv_heads for _, kv_heads, _ in LAYERS],
        "intermediate_size": [width for _, _, width in LAYERS],
        "head_dim": DIM,
        "rms_norm_eps": 1e-6,
    }
    gguf_files.add_shape(writer, shape)
    gguf_files.add_tokenizer(writer, folder)
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = {name: tensor}
        if "proj_1" in name:
            stem = name.removesuffix("ffn.proj_1.weight")
            gate, up = tensor.chunk(2)
            parts = {f"{stem}ffn_gate.weight": gate, f"{stem}ffn_up.weight": up}
        for part, values in parts.items():
            gguf_files.add_tensor(writer, rename(part, FILE_NAMES), values.contiguous().numpy(), "F32")
    gguf_files.close_writer(writer)
    return path


def test_log_probabilities_are_those_of_the_same_layers_in_transformers(model, folder):
    check_reference_logprobs(folder, model)


def test_every_schedule_gives_the_same_bits(folder):
    check_schedules(load_test_runner(folder, dtype="bfloat16")[0].network)


def test_a_gguf_file_has_the_log_probabilities_of_its_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check_gguf_logprobs(write_file(tmp_path / "x.gguf", folder), folder)


def test_a_file_says_the_heads_of_each_layer(folder, tmp_path):
    model = read_model(write_file(tmp_path / "x.gguf", folder))
    model.metadata["openelm.attention.head_count"] = [2, 4]
    with pytest.raises(GgufError, match=r"^x\.gguf gives attention\.head_count as \[2, 4\], so the model's shape is"):
        model_config(model)


@pytest.mark.parametrize("name", ["num_query_heads", "ffn_multipliers"])
def test_a_folder_says_the_sizes_of_each_layer(name):
    with pytest.raises(Unfusable, match=f"its config gives {name} as"):
        read_decoder_config(OPENELM | {name: [6]})
