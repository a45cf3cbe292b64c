"""DeciLM (Llama-Nemotron), as a folder and as a GGUF file, against a Llama of Transformers with the same layers.

Transformers does not have its code: each layer is that of a Llama of other sizes, or lacks its attention or its MLP, or
has a linear layer in place of attention.
"""

from __future__ import annotations

import json

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import gguf_files, tiny_models
from support.gguf_conversion import turn_heads
from support.run_model import load_test_runner
from support.same_model import check_gguf_logprobs, check_reference_logprobs
from test_decoder_families import check_schedules
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.rope import Unfusable

HEADS, HIDDEN = 4, 64
# Heads of keys and width of the MLP of each layer; 0: it has none; LINEAR: a linear layer replaces attention
LINEAR = -1
LAYERS = [(2, 256), (0, 512), (4, 0), (0, 0), (0, 0), (LINEAR, 256), (LINEAR, 0), (1, 256)]
BLOCKS = [
    {
        "attention": {"no_op": not kv_heads, "n_heads_in_group": HEADS // kv_heads if kv_heads > 0 else None,
                      "replace_with_linear": kv_heads == LINEAR, "window_length": None},
        "ffn": {"no_op": not width, "ffn_mult": 3 * (width - 100) / 2 / HIDDEN if width else None, "sparsify": None},
    }
    for kv_heads, width in LAYERS
]  # fmt: skip
DECILM = {
    "architectures": ["DeciLMForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM"},
    "model_type": "nemotron-nas",
    "block_configs": BLOCKS,
    "num_key_value_heads": None,
    "intermediate_size": None,
}
NORMS = ("input_layernorm", "post_attention_layernorm")


class NoAttention(torch.nn.Module):
    """Adds nothing to the residual stream."""

    def forward(self, hidden_states, **kwargs):
        return torch.zeros_like(hidden_states), None


class LinearAttention(torch.nn.Module):
    """Is a linear layer."""

    def __init__(self):
        super().__init__()
        self.linear_attn = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden_states, **kwargs):
        return self.linear_attn(hidden_states), None


class NoMlp(torch.nn.Module):
    """Adds nothing to the residual stream."""

    def forward(self, x):
        return torch.zeros_like(x)


@pytest.fixture(scope="module")
def model():
    """A Llama of Transformers whose layers are those of LAYERS."""
    sizes = {"num_hidden_layers": len(LAYERS), "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    config = AutoConfig.for_model("llama", **(tiny_models.BASE_CONFIG | sizes))
    config._attn_implementation = "eager"
    llama = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for number, (kv_heads, width) in enumerate(LAYERS):
        layer, own = llama.model.layers[number], config.to_dict() | {
            "num_key_value_heads": max(kv_heads, 0) or HEADS, "intermediate_size": width or 8
        }  # fmt: skip
        own = AutoConfig.for_model("llama", **{name: own[name] for name in own if name != "model_type"})
        own._attn_implementation = "eager"
        layer.self_attn = LlamaAttention(own, number) if kv_heads > 0 else NoAttention()
        if kv_heads == LINEAR:
            layer.self_attn = LinearAttention()
        layer.mlp = LlamaMLP(own) if width else NoMlp()
    return llama


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The folder of the same model as DeciLM's, with weights of its own."""
    home = tmp_path_factory.mktemp("decilm")
    tiny_models.write_random_model(home / "llama", model, seed=0, dtype="float32")
    stored = load_file(home / "llama" / "model.safetensors")
    absent = [
        f"model.layers.{number}.{norm}.weight"
        for number, sizes in enumerate(LAYERS)
        for norm, size in zip(NORMS, sizes, strict=True)
        if not size
    ]
    fields = json.loads((home / "llama" / "config.json").read_text()) | DECILM
    result = home / "decilm"
    result.mkdir()
    (result / "config.json").write_text(json.dumps(fields))
    kept = {name: tensor for name, tensor in stored.items() if name not in absent}
    save_file(kept, result / "model.safetensors", {"format": "pt"})
    tiny_models.write_tokenizer(result)
    return result


def write_file(path, folder, **changes):
    """Write the folder as llama.cpp's converter does."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "deci")
    shape = {
        "num_attention_heads": [HEADS * bool(kv_heads) for kv_heads, _ in LAYERS],
        "num_key_value_heads": [max(kv_heads, 0) for kv_heads, _ in LAYERS],
        "intermediate_size": [width for _, width in LAYERS],
        "head_dim": HIDDEN // HEADS,
    }
    gguf_files.add_shape(writer, config | shape | changes)
    gguf_files.add_tokenizer(writer, folder)
    for name, tensor in load_file(folder / "model.safetensors").items():
        number = int(name.split(".")[2]) if ".layers." in name else 0
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": LAYERS[number][0]}
        (turned,) = turn_heads(config | heads, {name: tensor}).values()
        written = gguf_files.gguf_name(name.replace("linear_attn", "o_proj"), "deci")
        gguf_files.add_tensor(writer, written, turned.float().numpy(), "F32")
    gguf_files.close_writer(writer)
    return path


def test_log_probabilities_are_those_of_the_same_layers_in_transformers(model, folder):
    check_reference_logprobs(folder, model)


def test_every_schedule_gives_the_same_bits(folder):
    check_schedules(load_test_runner(folder, dtype="bfloat16")[0].network)


def test_a_gguf_file_has_the_log_probabilities_of_its_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check_gguf_logprobs(write_file(tmp_path / "x.gguf", folder), folder)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_linear_layers_in_place_of_attention_are_quantized_as_others(folder, quantization):
    check_schedules(load_test_runner(folder, dtype="bfloat16", quantization=quantization)[0].network)


def test_linear_layers_in_place_of_attention_have_no_pages(folder):
    runner, _ = load_test_runner(folder, dtype="float32")
    assert len(runner.network.kv_layers) == sum(kv_heads > 0 for kv_heads, _ in LAYERS)


def test_heads_of_keys_may_be_listed_by_layer():
    fields = tiny_models.BASE_CONFIG | {"model_type": "deci", "num_hidden_layers": 2, "num_attention_heads": HEADS}
    layers = read_decoder_config(fields | {"num_key_value_heads_per_layer": [4, 1]}).layers
    assert [layer.head_sizes.kv_heads for layer in layers] == [4, 1]


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("ffn", {"replace_with_linear": True}, "its block_configs give ffn.replace_with_linear as True"),
        ("attention", {"window_length": 8}, "its block_configs give attention.window_length as 8"),
        ("attention", {"n_heads_in_group": 3}, "its config gives n_heads_in_group as 3"),
        ("ffn", {"ffn_mult": None}, "its config gives ffn_mult as None"),
    ],
)
def test_other_layers_are_refused(part, change, reason):
    block = {**BLOCKS[0], part: BLOCKS[0][part] | change}
    sizes = {"num_hidden_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    with pytest.raises(Unfusable, match=reason):
        read_decoder_config(tiny_models.BASE_CONFIG | DECILM | sizes | {"block_configs": [block]})
