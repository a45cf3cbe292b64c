"""vLLM's engine arguments that follow from parley's settings, and those that requests depend on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parley.types import VLLMSettings

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the limits that vLLM accepts

# The API process relies on these.
FIXED_ARGUMENTS: dict[str, Any] = {
    "scheduling_policy": "priority",
    "max_logprobs": -1,
    "logprobs_mode": "raw_logprobs",
    "generation_config": "vllm",  # not the model's own defaults: the API process has applied them
    "disable_log_stats": False,
    "seed": 0,
}


def engine_arguments(settings: VLLMSettings) -> dict[str, Any]:
    """Return the members of vLLM's ``AsyncEngineArgs`` that the user cannot set."""
    arguments = FIXED_ARGUMENTS | {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_num_seqs": settings.max_batch,
        "enable_prefix_caching": settings.prefix_cache,
    }
    if settings.max_model_len is not None:
        arguments["max_model_len"] = settings.max_model_len
    if settings.kv_memory is not None:
        arguments["kv_cache_memory_bytes"] = settings.kv_memory
    if settings.loads_adapters:
        arguments |= {
            "enable_lora": True,
            "max_loras": settings.max_adapters,
            "max_lora_rank": lora_rank(settings),
        }
    return arguments


def lora_rank(settings: VLLMSettings) -> int:
    """Return vLLM's limit for the rank of adapters: the setting, or the highest rank of the adapters at the start."""
    highest_rank = settings.max_rank or max(map(_adapter_rank, settings.adapters.values()), default=0)
    return next((rank for rank in LORA_RANKS if rank >= highest_rank), LORA_RANKS[-1])


def _adapter_rank(folder: str) -> int:
    """Return the rank of an adapter, 0 if its file cannot be read; vLLM then reports the reason."""
    try:
        rank = json.loads((Path(folder) / "adapter_config.json").read_text("utf-8")).get("r", 0)
    except (OSError, ValueError, AttributeError):
        return 0
    return rank if isinstance(rank, int) else 0
