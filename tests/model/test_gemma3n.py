"""Configs of Gemma 3n, its tokens around media, and tensors that nothing reads.

Its logits are in ``test_decoder_families``, those with images and sound in ``test_media_families``, if timm is there.
"""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.run_model import load_test_runner
from transformers import Gemma3nAudioConfig, Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nMultimodalEmbedder

from parley.model.checkpoint.files import read_config
from parley.model.load import plan
from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.media_vocabularies import read_media_rows
from parley.model.networks.altup_decoder import AltUpDecoder
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.rope import Unfusable
from parley.types import ParleySettings


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    """The config of the family, as Transformers writes it."""
    model_type, fields = tiny_models.GEMMA_3N_DECODERS["gemma3n"]
    return Gemma3nTextConfig(**fields).to_dict() | {"model_type": model_type}


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"num_kv_shared_layers": 5}, "only its first 1 layers"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers as 6"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers as -1"),
        ({"intermediate_size": [96] * 5}, "lists 5 widths for 6 layers"),
        ({"intermediate_size": [96] * 5 + [0]}, "intermediate_size as 0"),
        ({"intermediate_size": []}, "wrong type or value"),
        ({"activation_sparsity_pattern": [0.95] * 5}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": 0.95}, "activation_sparsity_pattern"),
        ({"altup_active_idx": 4}, "altup_active_idx as 4"),
        ({"altup_num_inputs": 0}, "altup_num_inputs as 0"),
        ({"altup_num_inputs": 1}, "altup_num_inputs as 1"),
        ({"altup_num_inputs": 1 << 40}, "altup_num_inputs as 1099511627776"),
        ({"laurel_rank": "8"}, "laurel_rank as '8'"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input as 0"),
    ],
)
def test_configs_with_other_layers_are_left_to_transformers(config, members, reason):
    read_decoder_config(config)
    with pytest.raises(Unfusable, match=reason):
        read_decoder_config(config | members)


def test_layers_are_those_of_the_published_config():
    layers = read_decoder_config({"model_type": "gemma3n_text"}).layers
    assert [i for i, layer in enumerate(layers) if layer.window is None] == [4, 9, 14, 19, 24, 29, 34]
    assert [layer.kv_layer for layer in layers] == [None] * 20 + ([18] * 4 + [19]) * 3
    sparse = NormalDist().inv_cdf(0.95)
    assert [layer.gate_deviations for layer in layers] == [sparse] * 10 + [None] * 25


def test_unused_keys_of_layers_with_shared_keys_are_ignored(tmp_path):
    folder = tiny_models.write_model(tmp_path, "gemma3n", dtype="float32")
    tensors = load_file(folder / "model.safetensors")
    names = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")
    added = {f"model.layers.5.{name}": torch.full_like(tensors[f"model.layers.2.{name}"], 7.0) for name in names}
    assert not added.keys() & tensors.keys()
    save_file(tensors | added, folder / "model.safetensors", {"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["num_kv_shared_layers"] == 3
    runner, info = load_test_runner(folder, dtype="float32")
    assert info.fused and isinstance(runner.network, AltUpDecoder)


PROJECTORS = {
    "vision": {"hidden_size": 24, "vocab_offset": 600, "vocab_size": 30},
    "audio": {"hidden_size": 40, "vocab_offset": 630, "vocab_size": 10, "rms_norm_eps": 1e-3},
}


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """A multimodal model without its encoders, and the embeddings that its projectors give the last 40 tokens."""
    folder = tiny_models.write_model(tmp_path_factory.mktemp("gemma3n"), "gemma3n", dtype="float32")
    text = read_config(folder)
    tensors, rows = load_file(folder / "model.safetensors"), []
    torch.manual_seed(1)
    for kind, fields in PROJECTORS.items():
        projector = Gemma3nMultimodalEmbedder(Gemma3nAudioConfig(**fields), Gemma3nTextConfig(**text))
        with torch.no_grad():
            for parameter in projector.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
            rows.append(projector(torch.arange(fields["vocab_size"]) + fields["vocab_offset"]))
        tensors |= {f"model.embed_{kind}.{name}": tensor for name, tensor in projector.state_dict().items()}
    named = {name.replace("model.", "model.language_model.", 1) if "embed_audio" not in name and "embed_vision" not in
             name else name: tensor for name, tensor in tensors.items()}  # fmt: skip
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    configs = {f"{kind}_config": fields for kind, fields in PROJECTORS.items()}
    members = {"model_type": "gemma3n", "text_config": text, "image_token_id": 601, "audio_token_id": 631}
    (folder / "config.json").write_text(json.dumps(members | configs))
    return folder, torch.cat(rows)


def open_weights(folder: Path) -> DecoderWeights:
    decoder_plan = plan.plan_decoder(ParleySettings(model=str(folder), dtype="float32"), read_config(folder))
    checkpoint = plan.open_decoder(folder, decoder_plan)
    config = plan.find_fused_config(checkpoint, decoder_plan)
    assert config is not None
    return DecoderWeights(checkpoint, config, decoder_plan.quantization, decoder_plan.dtype, decoder_plan.device)


def test_projectors_embed_the_tokens_around_media(multimodal):
    folder, expected = multimodal
    rows = read_media_rows(open_weights(folder))
    torch.testing.assert_close(rows, expected)
    runner, info = load_test_runner(folder, dtype="float32")  # which checks the numbers
    assert info.fused and torch.equal(runner.network.embeddings.parts.media_rows, rows)


@pytest.mark.parametrize("offset", [589, 610])
def test_tokens_of_projectors_must_be_the_last_ones(multimodal, offset, tmp_path):
    folder, _ = multimodal
    config = read_config(folder)
    fields = {
        **config["text_config"],
        "media_configs": {name: config[name] for name in ("vision_config", "audio_config")},
    }
    assert len(read_decoder_config(fields).media_vocabularies) == 2
    fields["media_configs"]["vision_config"]["vocab_offset"] = offset
    with pytest.raises(Unfusable, match="not the last ones"):
        read_decoder_config(fields)


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_without_timm_a_multimodal_model_reads_text_only(multimodal, caplog):
    caplog.set_level(logging.INFO, "parley.engine")
    _, info = load_test_runner(multimodal[0], dtype="float32")
    assert not info.media_kinds
    assert "its encoders need the package timm" in caplog.text
