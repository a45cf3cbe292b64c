"""Write a random-weight model of Qwen2.5-0.5B's shape, to measure with what cannot be downloaded everywhere.

    python bench/model.py FOLDER

It has the built-in model's tokenizer. Embeddings of ids that the tokenizer does not know are zero, so that greedy
decoding stays among real tokens; what it says is noise. 494 M parameters, 988 MB in bf16.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from parley import demo

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCAB = 896, 4864, 24, 14, 2, 151936
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write(folder: Path, seed: int = 0) -> None:
    """Make the folder; what is there is overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    source = demo.folder()
    for name in TOKENIZER:
        shutil.copy(source / name, folder / name)
    known = len(json.loads((source / "tokenizer.json").read_text())["model"]["vocab"])
    generator = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

    embedding = weights(VOCAB, HIDDEN)
    embedding[known:] = 0
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(HIDDEN).bfloat16()}
    head = HIDDEN // HEADS
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
        for name, size in (("q", HEADS * head), ("k", KV_HEADS * head), ("v", KV_HEADS * head)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = weights(size, HIDDEN)
            tensors[f"{layer}self_attn.{name}_proj.bias"] = weights(size)
        tensors[f"{layer}self_attn.o_proj.weight"] = weights(HIDDEN, HEADS * head)
        for name in ("gate", "up"):
            tensors[f"{layer}mlp.{name}_proj.weight"] = weights(INTERMEDIATE, HIDDEN)
        tensors[f"{layer}mlp.down_proj.weight"] = weights(HIDDEN, INTERMEDIATE)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    special = json.loads((source / "config.json").read_text())
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
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


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
