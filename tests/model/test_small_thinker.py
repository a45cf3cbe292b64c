"""SmallThinker, as a folder and as a GGUF file, against its layers in torch; Transformers does not have its code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from support import gguf_files, tiny_models
from support.run_model import load_test_runner
from support.same_model import check_gguf_logprobs, check_reference_logprobs
from test_decoder_families import check_schedules
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from parley.gguf.folder import unpack_gguf
from parley.gguf.header import GgufError
from parley.model.checkpoint.files import read_config
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.rope import Unfusable

LAYERS, EXPERTS, CHOSEN, WIDTH = 5, 8, 3, 32
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LAYOUT = [0, 1, 1, 1, 0]
SMALL_THINKER = {
    "architectures": ["SmallThinkerForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_smallthinker.SmallThinkerForCausalLM"},
    "model_type": "smallthinker",
    "rope_layout": LAYOUT,
    "sliding_window_layout": LAYOUT,
    "sliding_window_size": 4096,
    "moe_num_primary_experts": EXPERTS,
    "moe_num_active_primary_experts": CHOSEN,
    "moe_ffn_hidden_size": WIDTH,
    "moe_primary_router_apply_softmax": False,
    "moe_enable_early_router": True,
    "moe_enable_secondary_experts": False,
    "intermediate_size": None,
}


class Expert(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, WIDTH, bias=False), nn.Linear(hidden, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, hidden, bias=False)

    def forward(self, x):
        return self.down(self.up(x) * self.gate(x).relu())


class Mixture(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.primary_router = nn.Linear(hidden, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(hidden) for _ in range(EXPERTS))

    def forward(self, x, router_rows, is_softmax):
        logits, ids = self.primary_router(router_rows).topk(CHOSEN, -1)
        weights = logits.softmax(-1) if is_softmax else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        shares = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, ids, weights)
        return sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class Layer(nn.Module):
    """A layer of Llama in which a mixture reads the input of the layer."""

    def __init__(self, layer, hidden, has_window):
        super().__init__()
        self.self_attn, self.input_layernorm = layer.self_attn, layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.block_sparse_moe, self.has_window = Mixture(hidden), has_window
        self.window, self.is_softmax = 4096, False

    def forward(self, x, position_embeddings, **kwargs):
        positions = torch.arange(x.shape[1])
        distance = positions[:, None] - positions
        is_visible = (distance >= 0) & ((distance < self.window) | (not self.has_window))
        mask = torch.zeros(distance.shape).masked_fill(~is_visible, float("-inf"))[None, None]
        cos, sin = position_embeddings
        rotation = (cos, sin) if self.has_window else (torch.ones_like(cos), torch.zeros_like(sin))
        attended = x + self.self_attn(self.input_layernorm(x), rotation, mask)[0]
        return attended + self.block_sparse_moe(self.post_attention_layernorm(attended), x, self.is_softmax)


@pytest.fixture(scope="module")
def model():
    config = AutoConfig.for_model("llama", **(tiny_models.BASE_CONFIG | HEADS | {"num_hidden_layers": LAYERS}))
    llama = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    llama.model.layers = nn.ModuleList(
        Layer(layer, config.hidden_size, bool(flag)) for layer, flag in zip(llama.model.layers, LAYOUT, strict=True)
    )
    return llama


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    result = tmp_path_factory.mktemp("models") / "smallthinker"
    tiny_models.write_random_model(result, model, seed=0, dtype="float32")
    change_config(result, **SMALL_THINKER)
    tiny_models.write_tokenizer(result)
    return result


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def file_name(name):
    """Return llama.cpp's name of a tensor."""
    if ".primary_router." in name:
        return f"blk.{name.split('.')[2]}.ffn_gate_inp.weight"
    return gguf_files.gguf_name(name, "smallthinker")


def write_file(path, folder, **changes):
    """Write the folder as llama.cpp's converter does."""
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": WIDTH} | changes
    writer = gguf.GGUFWriter(path, "smallthinker")
    gguf_files.add_shape(writer, config)
    gguf_files.add_tokenizer(writer, folder)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_expert_feed_forward_length(WIDTH)
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SOFTMAX if config["moe_primary_router_apply_softmax"] else kinds.SIGMOID)
    if any(config["sliding_window_layout"]):
        writer.add_sliding_window(config["sliding_window_size"])
    stored = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        for part in ("gate", "up", "down"):
            names = [f"model.layers.{layer}.block_sparse_moe.experts.{i}.{part}.weight" for i in range(EXPERTS)]
            stacked = torch.stack([stored.pop(name) for name in names])
            gguf_files.add_tensor(writer, f"blk.{layer}.ffn_{part}_exps.weight", stacked.numpy(), "F32")
    for name, tensor in stored.items():
        gguf_files.add_tensor(writer, file_name(name), tensor.numpy(), "F32")
    gguf_files.close_writer(writer)
    return path


@pytest.mark.parametrize(("window", "is_softmax"), [(20, False), (4096, True)])
def test_log_probabilities_are_those_of_the_layers_in_torch(model, folder, tmp_path, window, is_softmax):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    change_config(copy, sliding_window_size=window, moe_primary_router_apply_softmax=is_softmax)
    for layer in model.model.layers:
        layer.window, layer.is_softmax = window, is_softmax
    check_reference_logprobs(copy, model)


def test_every_schedule_gives_the_same_bits(folder):
    check_schedules(load_test_runner(folder, dtype="bfloat16")[0].network)


NO_WINDOWS = {"rope_layout": [1] * LAYERS, "sliding_window_layout": [0] * LAYERS}


@pytest.mark.parametrize("changes", [{}, NO_WINDOWS | {"moe_primary_router_apply_softmax": True}])
def test_a_gguf_file_has_the_log_probabilities_of_its_folder(folder, tmp_path, monkeypatch, changes):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    change_config(copy, **changes)
    check_gguf_logprobs(write_file(tmp_path / "x.gguf", copy), copy)


def test_a_layout_has_a_flag_for_each_layer(folder):
    with pytest.raises(Unfusable, match="sliding_window_layout"):
        read_decoder_config(read_config(folder) | {"sliding_window_layout": [1]})


def test_weights_of_experts_of_another_kind_are_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_file(tmp_path / "x.gguf", folder)
    data = path.read_bytes()
    assert data.count(b"smallthinker.expert_gating_func") == 1
    with pytest.raises(GgufError, match="expert_gating_func as 3"):
        gating = data.index(b"smallthinker.expert_gating_func") + len(b"smallthinker.expert_gating_func") + 4
        path.write_bytes(data[:gating] + b"\3\0\0\0" + data[gating + 4 :])
        unpack_gguf(path)
