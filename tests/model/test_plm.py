"""PLM, as a folder and as a GGUF file.

Transformers does not have it. Youtu computes the same with the activation ReLU and with gates that equal ups, because
ReLU(x) * x is the square of ReLU(x).
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.gguf_conversion import convert_folder
from support.run_model import long_logprobs
from support.same_model import check_reference_logprobs
from transformers import AutoConfig, AutoModelForCausalLM

from parley.gguf.folder import unpack_gguf
from parley.model.checkpoint.files import read_config
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.rope import Unfusable

LATENTS = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folder of Youtu that Transformers computes, and those of the same model as PLM."""
    home = tmp_path_factory.mktemp("plm")
    own = {"hidden_act": "relu", "rope_interleave": True, "pad_token_id": None}  # whose row Transformers sets to 0
    fields = tiny_models.BASE_CONFIG | LATENTS | own
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("youtu", **fields), dtype=torch.float32)
    tiny_models.write_random_model(home / "youtu", model, seed=0, dtype="float32")
    stored = load_file(home / "youtu" / "model.safetensors")
    gates = [name for name in stored if name.endswith(".gate_proj.weight")]
    for name in gates:
        stored[name] = stored[name.replace("gate", "up")].clone()
    save_file(stored, home / "youtu" / "model.safetensors", {"format": "pt"})
    config = json.loads((home / "youtu" / "config.json").read_text())
    own = {"model_type": "plm", "architectures": ["PLMForCausalLM"], "hidden_act": "relu2"}
    (home / "plm").mkdir()
    (home / "plm" / "config.json").write_text(
        json.dumps(config | own | {"auto_map": {"AutoModelForCausalLM": "x.PLM"}})
    )
    plain = {name: tensor for name, tensor in stored.items() if name not in gates}
    save_file(plain, home / "plm" / "model.safetensors", {"format": "pt"})
    tiny_models.write_tokenizer(home / "plm")
    return home / "youtu", home / "plm"


def test_log_probabilities_are_those_of_the_same_model_in_transformers(folders):
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32, attn_implementation="eager")
    check_reference_logprobs(folders[1], model)


def test_a_gguf_file_has_the_log_probabilities_of_its_folder(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    unpacked = unpack_gguf(convert_folder(tmp_path / "x.gguf", folders[1], splits_latents=False))
    assert read_decoder_config(read_config(unpacked)) == read_decoder_config(read_config(folders[1]))
    assert torch.equal(long_logprobs(unpacked, "float32"), long_logprobs(folders[1], "float32"))


@pytest.mark.parametrize(("name", "value"), [("attention_bias", True), ("q_lora_rank", 16)])
def test_other_layers_are_refused(name, value):
    with pytest.raises(Unfusable, match=name):
        read_decoder_config(tiny_models.BASE_CONFIG | LATENTS | {"model_type": "plm", name: value})
