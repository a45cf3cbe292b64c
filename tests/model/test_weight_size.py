"""What ``parley doctor`` says of a model's memory, from the headers of its files, is what its weights take."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.model_zoo.zoo import ZOO
from support.model_zoo.zoo_folder import write_plain
from support.tiny_models import model_folder

from parley import hub
from parley.model.checkpoint import files
from parley.model.checkpoint.files import LoadError, read_config
from parley.model.load import fuse, loader, memory, plan, weight_size
from parley.model.load.check import check_model
from parley.model.load.decoder_weights import DecoderWeights
from parley.types import ParleySettings

# Layers of unlike forms, forms that are packed or kept as plain numbers, and layers that keep a state
FORMS = [
    "llama", "gemma2", "gpt2", "xglm", "deepseek_v3", "gpt_oss, MXFP4", "llama, HQQ 4 and 8 bits",
    "llama, HQQ 4 bits, some layers", "llama, GPTQ 4 bits, act-order", "mixtral, HQQ 4 and 8 bits",
    "mixtral, HQQ 4 and 8 bits, in several orders",
    "mixtral, GPTQ 4 bits, act-order", "llama, bitsandbytes nf4, double", "llama, NVFP4", "llama, W8A8",
    "llama, torchao int4 in bytes", "llama, FP8, 128 x 128 blocks", "llama, GGUF Q4_K_M", "qwen3_moe, GGUF Q4_K_M",
    "qwen3_moe, FP8, 128 x 128 blocks, experts in one tensor", "qwen3_next", "jamba", "bamba", "nemotron_h",
    "falcon_mamba", "gemma3n, W4A16, groups", "gemma4 of experts", "gemma4 with inputs of layers, MLX 4 bits",
]  # fmt: skip


def plan_decoder(folder: Path, **settings: str) -> DecoderWeights:
    """Return the weights of a folder as the loader plans them."""
    decoder_plan = plan.plan_decoder(ParleySettings(model=str(folder), **settings), read_config(folder))
    checkpoint = plan.open_decoder(folder, decoder_plan)
    config = plan.find_fused_config(checkpoint, decoder_plan)
    assert config is not None
    return DecoderWeights(checkpoint, config, decoder_plan.quantization, decoder_plan.dtype, decoder_plan.device)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FORMS)
def test_measured_bytes_equal_the_bytes_of_loaded_weights(name, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = plan_decoder(hub.resolve_model(str(ZOO[name].write(tmp_path)[0])), dtype=dtype)
    measured = weight_size.plan_weights(weights)
    loaded = fuse.fuse_decoder(weights, 64, lambda fraction: None).weights_bytes
    assert measured == pytest.approx(loaded, rel=0.01)
    if name != "xglm":  # its table of positions is computed
        assert measured <= weight_size.max_weight_bytes(weights)


@pytest.mark.parametrize("name", ["llama", "llama, GPTQ 4 bits, act-order", "llama, GGUF Q4_K_M"])
def test_weights_that_fit_in_any_form_are_not_measured(name, tmp_path, monkeypatch):
    """Measuring takes a second."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = plan_decoder(hub.resolve_model(str(ZOO[name].write(tmp_path)[0])))
    as_float32 = 4 * (weights.total_parameters + weights.config.vocab_size * weights.config.hidden_size)
    monkeypatch.setattr(weight_size, "free_device_memory", lambda device: as_float32)
    monkeypatch.setattr(weight_size, "plan_weights", None)
    weight_size.refuse_weights_beyond_memory(weights)


@pytest.mark.parametrize(("device", "changed", "tied"), [("cuda", 0, True), ("cuda", 1, False), ("cpu", 0, False)])
def test_a_gpu_holds_a_head_once_that_repeats_the_embedding(device, changed, tied, tmp_path):
    """On a CPU the embedding stays in the file."""
    folder = write_plain(tmp_path / "model", "llama", {"tie_word_embeddings": True})
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[5, 7] += changed
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    decoder_plan = plan.plan_decoder(ParleySettings(model=str(folder)), read_config(folder))
    decoder_plan = decoder_plan._replace(device=torch.device(device))
    config = plan.find_fused_config(plan.open_decoder(folder, decoder_plan), decoder_plan)
    assert config is not None and config.tied is tied


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_measured_bytes_equal_the_bytes_of_weights_quantized_while_loading(quantization):
    weights = plan_decoder(model_folder("qwen3"), quantization=quantization)
    loaded = fuse.fuse_decoder(weights, 64, lambda fraction: None).weights_bytes
    assert weight_size.plan_weights(weights) == pytest.approx(loaded, rel=0.01)


def test_no_matrix_is_read_to_measure(monkeypatch):
    weights = plan_decoder(model_folder("qwen3"))

    def view_data(checkpoint: files.Checkpoint, entry: files.TensorEntry, count: int, view=files.Checkpoint._view_data):
        tensor = view(checkpoint, entry, count)
        assert tensor.is_meta or len(entry.shape) < 2
        return tensor

    weights.check_shapes()
    monkeypatch.setattr(files.Checkpoint, "_view_data", view_data)
    assert weight_size.measure_weights(weights) > 0


def test_weights_that_do_not_fit_are_refused_before_they_are_read(monkeypatch, tmp_path):
    """With what they take in memory, which is more than the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = ZOO["mixtral, GPTQ 4 bits, act-order"].write(tmp_path)[0]
    size = weight_size.plan_weights(plan_decoder(folder))
    assert size > 1.5 * (folder / "model.safetensors").stat().st_size
    for module in (memory, weight_size):
        monkeypatch.setattr(module, "free_device_memory", lambda device: size - 1)
    monkeypatch.setattr(fuse, "fuse_decoder", None)
    for load in (check_model, partial(loader.load_runner, progress=lambda stage, fraction: None)):
        with pytest.raises(LoadError, match="The weights take"):
            load(ParleySettings(model=str(folder)))
