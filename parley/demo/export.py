"""Export a trained network and its tokenizer as a plain Hugging Face folder, and load the network from such a folder.

The folder refers only to Qwen3's architecture and tokenizer class, so any program that supports Qwen3 can load it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from parley.demo.network import DemoConfig, DemoNetwork
from parley.demo.template import CHAT_TEMPLATE, END_OF_TEXT
from parley.demo.tokenizer import END_OF_TURN, require_token_id

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def _model_config(shape: DemoConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.num_hidden_layers,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": require_token_id(tokenizer, END_OF_TEXT),
        "eos_token_id": require_token_id(tokenizer, END_OF_TURN),
        "pad_token_id": require_token_id(tokenizer, END_OF_TEXT),
    }


def _generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    end_of_text = require_token_id(tokenizer, END_OF_TEXT)
    return {
        "bos_token_id": end_of_text,
        "eos_token_id": [require_token_id(tokenizer, END_OF_TURN), end_of_text],
        "pad_token_id": end_of_text,
        "do_sample": False,
    }


def _tokenizer_config(shape: DemoConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    added = {
        str(number): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for number, token in tokenizer.get_added_tokens_decoder().items()
    }
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "errors": "replace",
        "split_special_tokens": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def export_model(network: DemoNetwork, tokenizer: Tokenizer, folder: Path) -> None:
    """Write all `MODEL_FILES`; weights are rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to("cpu", torch.bfloat16) for name, value in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it private to its owner
    _write_json(folder / "config.json", _model_config(network.shape, tokenizer))
    _write_json(folder / "generation_config.json", _generation_config(tokenizer))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(network.shape, tokenizer))
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))  # vocab.json and merges.txt
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n", encoding="utf-8")


def load_demo_network(folder: Path) -> tuple[DemoNetwork, Tokenizer]:
    """Load the network (weights as float32) and the tokenizer of an exported folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    network = DemoNetwork(DemoConfig(**{name: config[name] for name in DemoConfig.__dataclass_fields__}))
    weights = load_file(folder / "model.safetensors")
    network.load_state_dict({name: value.float() for name, value in weights.items()})
    return network, Tokenizer.from_file(str(folder / "tokenizer.json"))
