"""The settings of engines, taken from the options of ``parley serve``: one function for each kind of engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from parley.settings.serve_options.model_options import DTYPE_NAMES

if TYPE_CHECKING:
    from parley.types import AttachedSettings, CacheEventSettings, ModelOverrides, ParleySettings, VLLMSettings


def model_overrides(config: Mapping[str, Any]) -> ModelOverrides:
    """Return the parts of a model that the options replace, instead of its own folder's."""
    from parley.types import ModelOverrides

    return ModelOverrides(
        config["revision"] or "",
        config["tokenizer"] or "",
        config["chat-template"] or "",
        config["hf-overrides"] or {},
        config["mmproj"] or "",
    )


def engine_settings(config: Mapping[str, Any], folder: str) -> ParleySettings:
    """Return the engine settings for the model in ``folder``, taken from the options."""
    from parley.types import ParleySettings

    return ParleySettings(
        model=folder,
        overrides=model_overrides(config),
        dtype=DTYPE_NAMES[config["dtype"]],
        device=config["device"],
        max_model_len=config["max-model-len"],
        kv_memory=config["kv-memory"],
        kv_dtype=config["kv-dtype"],
        staging=config["kv-staging"],
        state_cache=config["state-cache"],
        max_batch=config["max-batch"],
        step_ms=config["step-ms"],
        step_tokens=config["step-tokens"],
        prefix_cache=config["prefix-cache"],
        threads=config["threads"],
        lowering=config["lowering"],
        engine_timeout=config["engine-timeout"],
        tool_parser=config["tool-parser"],
        reasoning_parser=config["reasoning-parser"],
        trust_marks=config["trust-marks"],
        pack_cache=config["pack-cache"],
        quantization=config["quantization"],
        adapters=dict(config["lora"]),
        max_adapters=config["max-loras"],
        max_rank=config["max-lora-rank"],
        media_cache=config["media-cache"],
        media_eager=config["media-eager"],
        speculate=config["speculate"],
        speculate_tokens=config["speculate-tokens"],
        shared=config["role"] != "mixed",
        costs=config["cost-model"] or "",
        cache_events=_cache_event_settings(config),
    )


def _cache_event_settings(config: Mapping[str, Any]) -> CacheEventSettings | None:
    """Return where the engine publishes events of its prefix cache; None for nowhere."""
    from parley.types import CacheEventSettings

    if config["kv-events"] is None:
        return None
    return CacheEventSettings(
        config["kv-events"],
        config["kv-events-replay"] or "",
        config["kv-events-topic"] or "",
        config["kv-events-form"],
        config["kv-events-buffer"],
        config["kv-events-hwm"],
    )


def vllm_settings(config: Mapping[str, Any], folder: str, *, max_rank: int = 0) -> VLLMSettings:
    """Return vLLM's settings for the model in ``folder``, taken from the options. ``max_rank`` 0: from the adapters."""
    from parley.types import VLLMSettings

    return VLLMSettings(
        model=folder,
        overrides=model_overrides(config),
        dtype=DTYPE_NAMES[config["dtype"]],
        max_model_len=config["max-model-len"],
        kv_memory=config["kv-memory"],
        max_batch=config["max-batch"],
        prefix_cache=config["prefix-cache"],
        engine_timeout=config["engine-timeout"],
        tool_parser=config["tool-parser"],
        reasoning_parser=config["reasoning-parser"],
        trust_marks=config["trust-marks"],
        adapters=dict(config["lora"]),
        max_adapters=config["max-loras"],
        max_rank=max_rank,
        loads_adapters=bool(config["lora"] or config["lora-root"]),
        python=config["engine-python"] or "",
        arguments=list(config["engine-args"] or []),
        exact=config["exact"],
        transfer_host=config["host"] if config["role"] != "mixed" else "",
    )


def attached_settings(config: Mapping[str, Any], folder: str, *, key: str) -> AttachedSettings:
    """Return the settings of a vLLM server that runs already, for the model whose tokenizer is in ``folder``."""
    from parley.types import AttachedSettings

    return AttachedSettings(
        model=folder,
        overrides=model_overrides(config),
        max_model_len=config["max-model-len"],
        max_batch=config["max-batch"],
        engine_timeout=config["engine-timeout"],
        tool_parser=config["tool-parser"],
        reasoning_parser=config["reasoning-parser"],
        trust_marks=config["trust-marks"],
        url=config["engine"],
        key=key,
        exchanges_pages=config["role"] != "mixed",
    )
