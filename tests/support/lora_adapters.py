"""LoRA adapters with random weights in PEFT's folder format, written by PEFT, and PEFT's results as reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ALL_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(folder: Path, base: Path, seed: int, **fields: Any) -> Path:
    """Write an adapter for the model in ``base``; ``fields`` are those of LoraConfig. Its effect equals the model's."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig

    defaults = {
        "r": 8,
        "lora_alpha": 2 * fields.get("r", 8),
        "target_modules": ALL_PROJECTIONS,
        "task_type": "CAUSAL_LM",
        "fan_in_fan_out": AutoConfig.from_pretrained(base).model_type == "gpt2",  # its projections are Conv1D
    }
    config = LoraConfig(**(defaults | fields))
    model = get_peft_model(_load_base(base), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if ".lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder


def load_with_peft(base: Path, adapter: Path, *, merge: bool = True) -> Any:
    """Return the model in float32 with the adapter's weights merged into its own, or kept separate."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(_load_base(base), adapter)
    return model.merge_and_unload() if merge else model


def _load_base(base: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    is_multimodal = hasattr(AutoConfig.from_pretrained(base), "text_config")
    model_class = AutoModelForMultimodalLM if is_multimodal else AutoModelForCausalLM
    return model_class.from_pretrained(base, dtype=torch.float32)
