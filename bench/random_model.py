"""Writes a random-weight model for measurements, because nothing can be downloaded.

    python bench/random_model.py FOLDER [0.5b | tiny]        bf16
    python bench/random_model.py FOLDER --int8 SOURCE        the same weights as a compressed-tensors checkpoint (W8A8)

``0.5b`` has the shape of Qwen2.5-0.5B (494 M parameters, 988 MB), ``tiny`` 10 M parameters. Both have the built-in
model's tokenizer. Embeddings of all ids but those of whole words are zero, so that greedy decoding chooses words: a
token that ends within a character has no text yet, and would look like a gap of two steps in a stream. The output is
noise.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from load_mixes import word_tokens
from safetensors.torch import load_file, save_file

from parley import demo

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
# Only needed by servers that do not read tokenizer.json.
OLDER = ("vocab.json", "merges.txt")


@dataclass(frozen=True)
class Shape:
    """The members of a Qwen2 config that determine its size."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int


SHAPES = {
    "0.5b": Shape(896, 4864, 24, 14, 2, 151936),
    "tiny": Shape(256, 768, 8, 4, 2, 16384),
}


def write_model(folder: Path, shape: Shape = SHAPES["0.5b"], seed: int = 0) -> None:
    """Write the model to a folder. Existing files are overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    source = demo.model_folder()
    for name in (*TOKENIZER, *OLDER):
        shutil.copy(source / name, folder / name)
    words = word_tokens(source)
    special = json.loads((source / "config.json").read_text())
    save_file(_tensors(shape, words, seed), folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        **asdict(shape),
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": special["eos_token_id"],
        "bos_token_id": special.get("bos_token_id"),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _tensors(shape: Shape, words: list[int], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, head = shape.hidden_size, shape.hidden_size // shape.num_attention_heads

    def weights(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * 0.02).bfloat16()

    embedding = torch.zeros(shape.vocab_size, hidden, dtype=torch.bfloat16)
    embedding[words] = weights(len(words), hidden)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(hidden).bfloat16()}
    kv = shape.num_key_value_heads * head
    for i in range(shape.num_hidden_layers):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{norm}.weight"] = torch.ones(hidden).bfloat16()
        for name, size in (("q", hidden), ("k", kv), ("v", kv)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = weights(size, hidden)
            tensors[f"{layer}self_attn.{name}_proj.bias"] = weights(size)
        tensors[f"{layer}self_attn.o_proj.weight"] = weights(hidden, hidden)
        for name in ("gate", "up"):
            tensors[f"{layer}mlp.{name}_proj.weight"] = weights(shape.intermediate_size, hidden)
        tensors[f"{layer}mlp.down_proj.weight"] = weights(hidden, shape.intermediate_size)
    return tensors


def write_int8(source: Path, folder: Path) -> None:
    """Write a model's linear layers in int8, one scale per output channel, for activations quantized per token.

    Head and embedding stay bf16. The layout is that of compressed-tensors 0.17, format ``int-quantized``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
            tensors[name] = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in (*TOKENIZER, *OLDER):
        shutil.copy(source / name, folder / name)
    number = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False, "observer": "minmax"},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="0.5b")
    parser.add_argument("--int8", type=Path, metavar="SOURCE", help="a folder that this script made")
    options = parser.parse_args()
    if options.int8:
        write_int8(options.int8, options.folder)
    else:
        write_model(options.folder, SHAPES[options.shape])
