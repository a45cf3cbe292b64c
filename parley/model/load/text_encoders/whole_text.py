"""Loads decoders that read whole texts: those that read in both directions, classifiers, those whose vectors need the
states of all tokens, and those of embedding models that have no head.

They run on the fused decoder, in the dtype and with the quantized weights of other decoders, and generate nothing. The
head of a language model is not kept, except the rows of a few tokens whose logits are scores (``token_scores.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.fuse import fuse_decoder
from parley.model.load.multimodal import has_own_head
from parley.model.load.numeric_check.decoder_check import DECODER_TOLERANCE, PROBE_TOKENS, decoder_deviation
from parley.model.load.plan import DecoderPlan, open_decoder, plan_decoder
from parley.model.load.tensor_bytes import tensor_bytes
from parley.model.load.tensor_names import check_tensor_names
from parley.model.load.text_encoders.classifier import is_classifier, load_classifier_head
from parley.model.load.text_encoders.encoders import is_encoder
from parley.model.load.text_encoders.token_scores import load_token_head, names_score_tokens
from parley.model.load.weight_size import refuse_weights_beyond_memory
from parley.model.networks.classifier import ClassifierHead
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.decoder_config import DecoderConfig
from parley.model.networks.families.table import FUSABLE_TYPES
from parley.model.networks.pooling import DenseLayer, PoolingRecipe, read_pooling_recipe
from parley.model.networks.rope import Unfusable
from parley.model.networks.whole_text_decoder import WholeTextDecoder
from parley.text.media_family import SHARED_FIELDS
from parley.types import ParleySettings

EMBEDDING_GEMMA2 = "embedding_gemma2_text"
# Types whose decoders read in both directions: the type with the same weights, and fields that their configs may lack.
BOTH_WAYS_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "eurobert": ("llama", {"rms_norm_eps": 1e-5}),
    "llama_bidirec": ("llama", {}),
    EMBEDDING_GEMMA2: (
        "gemma4_text",
        {
            "vocab_size_per_layer_input": 0,
            "hidden_size_per_layer_input": 512,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
BOTH_WAYS_FIELDS = ("is_causal", "use_bidirectional_attention")
FLAGGED_GEMMAS = ("gemma", "gemma3_text")  # those whose use_bidirectional_attention is known here
# Values of ``pooling`` in config.json, which llama_bidirec has, by the names of sentence-transformers.
CONFIG_POOLINGS = {"avg": "mean", "cls": "cls", "last": "lasttoken"}
PROJECTION = "model.embedding_projection."  # the linear layer after the last norm of EmbeddingGemma 2
HEAD_TENSORS = ("score.", "dense.", "classifier.", "2_Dense.", "3_Dense.", PROJECTION)


class WholeTextPlan(NamedTuple):
    """How a decoder of whole texts runs. ``reads_both_ways``: as in ``WholeTextDecoder``."""

    decoder: DecoderPlan
    recipe: PoolingRecipe
    reads_both_ways: bool


def is_whole_text_model(folder: Path, config: dict[str, Any]) -> bool:
    """Whether a model folder has a decoder that is served for vectors or classes only."""
    config = _text_config(config)
    if is_encoder(config) or _forward_config(config)["model_type"] not in FUSABLE_TYPES:
        return False
    if _reads_both_ways(config) or is_classifier(config) or names_score_tokens(config):
        return True
    with suppress(LoadError):
        recipe = read_pooling_recipe(folder)
        return recipe is not None and (
            not recipe.is_last_token or bool(recipe.dense_layers) or _lacks_head(folder, config)
        )
    return False


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text part of a config, with the fields about it that only the whole config has. EmbeddingGemma 2's
    encoders of media are not loaded."""
    text_config = config.get("text_config")
    if isinstance(text_config, dict) and text_config.get("model_type") == EMBEDDING_GEMMA2:
        return text_config | {name: config[name] for name in SHARED_FIELDS if config.get(name) is not None}
    return config


def _lacks_head(folder: Path, config: dict[str, Any]) -> bool:
    """Whether a decoder's head is neither in the files nor the embedding, so that it cannot generate text."""
    try:
        return not read_decoder_config(config).tied and not has_own_head(Checkpoint(folder))
    except Unfusable:
        return False


def _reads_both_ways(config: dict[str, Any]) -> bool:
    kind = config["model_type"]
    if config.get("use_bidirectional_attention") is True and kind in FLAGGED_GEMMAS:
        return True
    return kind in BOTH_WAYS_TYPES or config.get("is_causal") is False


def _forward_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the causal decoder with the same weights.

    Its window is that of earlier tokens and the token itself. Of Gemma's, Transformers takes half; other types see as
    many earlier and later tokens as the window has.
    """
    kind, defaults = BOTH_WAYS_TYPES.get(config["model_type"], (config["model_type"], {}))
    if not _reads_both_ways(config):
        return config
    result = {**defaults, **config, "model_type": kind}
    window = config.get("sliding_window")
    if type(window) is int:
        result["sliding_window"] = window // 2 + 1 if kind in FLAGGED_GEMMAS else window + 1
    return {name: value for name, value in result.items() if name not in BOTH_WAYS_FIELDS}


def plan_whole_text(settings: ParleySettings, folder: Path, config: dict[str, Any]) -> WholeTextPlan:
    """Return how a decoder of whole texts runs. Raises LoadError if it cannot."""
    is_part = _text_config(config) is not config
    config = _text_config(config)
    both_ways = _reads_both_ways(config)
    recipe = read_pooling_recipe(folder) or PoolingRecipe((_default_pooling(config),))
    if recipe.sparse is not None:
        raise LoadError("Sparse vectors of decoders are not supported, only those of encoders.")
    decoder_plan = plan_decoder(settings, _forward_config(config))
    if settings.max_model_len is None and recipe.max_text_tokens is not None:
        decoder_plan = decoder_plan._replace(length=min(decoder_plan.length, recipe.max_text_tokens))
    decoder_plan = decoder_plan._replace(is_part=decoder_plan.is_part or is_part)
    if config["model_type"] == EMBEDDING_GEMMA2:
        recipe = replace(recipe, token_layers=(_read_projection(folder, decoder_plan, config),))
    return WholeTextPlan(decoder_plan, recipe, both_ways)


def _read_projection(folder: Path, plan: DecoderPlan, config: dict[str, Any]) -> DenseLayer:
    """Read the linear layer that makes vectors of the states of EmbeddingGemma 2. Raises LoadError."""
    sizes = [config.get("embedding_dim", 768), config.get("hidden_size", 512)]
    if any(type(size) is not int or size < 1 for size in sizes):
        raise LoadError("config.json has no valid embedding_dim and hidden_size.")
    weight = open_decoder(folder, plan).view_tensor(f"{PROJECTION}weight", *sizes)
    return DenseLayer(weight.float().clone(), None, lambda x: x)


def _default_pooling(config: dict[str, Any]) -> str:
    """Return the pooling of a folder whose modules.json names none. Raises LoadError."""
    named = config.get("pooling") if config["model_type"] in BOTH_WAYS_TYPES else None
    if named is None:
        return "mean" if _reads_both_ways(config) else "lasttoken"
    if not isinstance(named, str) or named not in CONFIG_POOLINGS:
        raise LoadError(f"config.json has pooling {named}; only {', '.join(CONFIG_POOLINGS)} are supported.")
    return CONFIG_POOLINGS[named]


def open_whole_text_weights(folder: Path, plan: WholeTextPlan) -> DecoderWeights:
    """Open the weights, and check their names. Raises LoadError, also if the fused decoder cannot compute the model."""
    checkpoint = open_decoder(folder, plan.decoder)
    for prefix in HEAD_TENSORS:
        checkpoint.remove_tensors(prefix)
    decoder_plan = plan.decoder
    try:
        # Without a head of its own, because only the numeric check reads it
        decoder_config: DecoderConfig = replace(read_decoder_config(decoder_plan.config), tied=True)
        if decoder_config.state_sizes:
            raise Unfusable("it has layers that keep a state")
        weights = DecoderWeights(
            checkpoint, decoder_config, decoder_plan.quantization, decoder_plan.dtype, decoder_plan.device
        )
        check_tensor_names(weights)
    except Unfusable as reason:
        kind = decoder_plan.config["model_type"]
        raise LoadError(f"A {kind} model of vectors or classes runs on the fused decoder only, and {reason}.") from None
    return weights


def load_whole_text_head(
    folder: Path, config: dict[str, Any], plan: WholeTextPlan, decoder_config: DecoderConfig
) -> ClassifierHead | None:
    """Load the head of a classifier; None if the model is none. Raises LoadError."""
    checkpoint, device = open_decoder(folder, plan.decoder), plan.decoder.device
    if names_score_tokens(config):
        return load_token_head(folder, checkpoint, config, decoder_config, device)
    return load_classifier_head(checkpoint, config, decoder_config.hidden_size, device)


def load_whole_text_decoder(
    weights: DecoderWeights, plan: WholeTextPlan, progress: Callable[[float], None]
) -> WholeTextDecoder:
    """Load the decoder and check it numerically. Raises LoadError."""
    decoder_plan = plan.decoder
    refuse_weights_beyond_memory(weights)
    decoder = fuse_decoder(weights, max(decoder_plan.length, PROBE_TOKENS), progress)
    error = decoder_deviation(decoder, weights.checkpoint, decoder_plan.quantization)
    if not error <= DECODER_TOLERANCE[decoder_plan.dtype] + decoder_plan.quantization.extra_tolerance:
        raise LoadError(f"The decoder failed its numeric check (off by {error:.2g}) and is not used.")
    head = decoder.release_head()
    if head is not None:
        decoder.weights_bytes -= tensor_bytes([head])
    return WholeTextDecoder(decoder, decoder_plan.length, reads_both_ways=plan.reads_both_ways)
