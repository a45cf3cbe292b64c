"""Writes the models of ``media_speed.py``: random weights in Qwen2-VL's architecture, and its language model alone."""

from __future__ import annotations

import json
from pathlib import Path

from parley import demo

MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def write_vision_model(folder: Path, layers: int, max_pixels: int) -> None:
    """Write a Qwen2-VL checkpoint with random bf16 weights, its tokenizer and its processor."""
    import torch
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(demo.model_folder() / "tokenizer.json"),
        extra_special_tokens=MARKS,
        chat_template=CHAT_TEMPLATE,
        eos_token="<|im_end|>",
    )
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in MARKS.items()}
    text_config = {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    }  # fmt: skip
    vision_config = {"depth": layers, "embed_dim": 1280, "hidden_size": 896, "num_heads": 16, "mlp_ratio": 4}
    config = transformers.Qwen2VLConfig(
        text_config=text_config, vision_config=vision_config, tie_word_embeddings=True, **ids
    )
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(config).to(torch.bfloat16)
    with torch.no_grad():  # greedy answers stay among tokens that have a text, so every token is an event
        model.get_input_embeddings().weight[min(ids.values()) :] = 0
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    sizes = {"min_pixels": 56 * 56, "max_pixels": max_pixels}
    processor = transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(**sizes), tokenizer, transformers.Qwen2VLVideoProcessor(**sizes)
    )
    processor.save_pretrained(folder)


def write_language_model(vision_folder: Path, folder: Path) -> None:
    """Write the language model of the checkpoint as one of its own. M-RoPE equals RoPE on texts."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    whole = AutoModelForImageTextToText.from_pretrained(vision_folder, dtype=torch.bfloat16)
    config = json.loads((vision_folder / "config.json").read_text())["text_config"]
    fields = {name: value for name, value in config.items() if name not in ("model_type", "rope_parameters")}
    rope = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    model = Qwen2ForCausalLM(Qwen2Config(**fields, rope_parameters=rope)).to(torch.bfloat16)
    model.model.load_state_dict(whole.model.language_model.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(vision_folder).save_pretrained(folder)
