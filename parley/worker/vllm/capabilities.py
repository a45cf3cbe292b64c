"""The features of requests that vLLM supports, and its bounds where it accepts less than the APIs allow.

The bounds are those of vLLM 0.32. It has two samplers with different limits; these are the stricter ones.
"""

from __future__ import annotations

from math import inf

from parley.types import ALL_ENGINE_FEATURES, EngineBound, EngineFeature

# vLLM's samplers have no counterpart of these, or one that must be configured before the model is known. parley's
# plugin in vLLM's workers has them (``logits_plugin.py``).
PLUGIN_FEATURES: frozenset[EngineFeature] = frozenset(
    {"typical_p", "no_repeat_ngram", "penalty_window", "watermark", "thinking_budget"}
)
MISSING_FEATURES: frozenset[EngineFeature] = frozenset(
    {
        "beam_edits",
        "limited_grammar",  # if no token is allowed, vLLM samples one that the grammar forbids, and fails
    }
)
# vLLM's speculative decoding excludes these.
MISSING_WITH_SPECULATION: frozenset[EngineFeature] = frozenset({"min_p", "logit_bias"})
# vLLM's layers for adapters on CPUs expect one row of logits for each request: more rows end the engine.
MISSING_WITH_CPU_ADAPTERS: frozenset[EngineFeature] = frozenset({"prompt_logprobs"})

RESERVED_STOP_IDS = 8  # stop ids, of vLLM's 128, that are left for the model's own end tokens
BOUNDS: dict[EngineBound, tuple[float, float]] = {
    "temperature": (0, 2),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "logit_bias": (-inf, 1024),
    "allowed_tokens": (-inf, 1024),
    "banned_tokens": (-inf, 128),
    "stop_ids": (-inf, 128 - RESERVED_STOP_IDS),
    "named_logprobs": (-inf, 128),
}


def vllm_features(
    *,
    adapters: bool = False,
    speculation: bool = False,
    plugin: bool = False,
    connector: bool = False,
    on_cpu: bool = False,
) -> frozenset[EngineFeature]:
    """Return the features of vLLM. ``adapters``: LoRA is enabled; ``speculation``: it drafts tokens; ``plugin``: its
    workers have loaded parley's plugin, which speculation excludes; ``connector``: it moves KV pages."""
    missing_features = set(MISSING_FEATURES)
    if not connector:
        missing_features.add("page_transfer")
    if not adapters:
        missing_features.add("adapters")
    if adapters and on_cpu:
        missing_features |= MISSING_WITH_CPU_ADAPTERS
    if speculation:
        missing_features |= MISSING_WITH_SPECULATION
    if not plugin:
        missing_features |= PLUGIN_FEATURES
    return ALL_ENGINE_FEATURES - missing_features
