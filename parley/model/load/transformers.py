"""Loads models with the Transformers backend: any causal language model of Transformers.

``transformers_network`` turns the loaded model into a network, and the numeric check compares the two.
Weights come from safetensors, and code shipped in a model folder is never run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from parley.model.checkpoint.files import Checkpoint, LoadError, read_config
from parley.model.load.multimodal import language_model_config
from parley.model.load.numeric_check.decoder_check import DECODER_TOLERANCE
from parley.model.load.numeric_check.transformers_check import transformers_deviation
from parley.model.load.text_encoders.encoders import ENCODER_LOADERS
from parley.model.load.transformers_network import TransformersNetwork, build_network
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.families.table import FUSABLE_TYPES
from parley.model.networks.rope import Unfusable
from parley.text.media_family import read_media_family

PAGED_LAYER_TYPES = {"full_attention", "sliding_attention"}  # the layer_types that KV pages support
# Types that fail the numeric check whatever their weights, so that ``load/check.py`` knows them without any. Doge, for
# one, adds numbers to scores that it makes of values.
UNPAGED_TYPES = {"doge", "moshi"}
DIFFERENT_RESULTS = (
    "A {} model gives different results over pages{}; it may ignore positions, or keep state other than keys and "
    "values, and is not served."
)
STATELESS_LAYER_TYPES = {"chunked_attention"}  # these keep only keys and values too, but no kernel computes them
# Transformers' tables of models that generate text. The first table that has a model's type is used. The last also has
# decoders: those of the Flamingo models for audio.
WRITER_MAPPINGS = (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)


def load_transformers(
    folder: Path, dtype: torch.dtype, device: torch.device, progress: Callable[[float], None], max_len: int
) -> TransformersNetwork:
    """Load a model folder for contexts of at most ``max_len`` tokens and check it numerically. Raises LoadError."""
    checkpoint = Checkpoint(folder)  # its errors for faulty files are clearer than Transformers'
    config = read_supported_config(folder)

    def load_weights(model_class: Any, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
        loaded: tuple[PreTrainedModel, dict[str, Any]] = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
        return loaded

    model = read_transformers_model(config, load_weights)
    del checkpoint
    progress(0.6)
    try:
        model.to(device)  # type: ignore[arg-type]
        network = build_network(model.requires_grad_(False), max_len)
        progress(0.8)
        family = read_media_family(config.to_dict())
        relative_error = transformers_deviation(network, model, None if family and family.needs_fused else family)
    except (LoadError, MemoryError):
        raise
    except Exception as error:
        raise LoadError(f"A {config.model_type} model does not run on packed batches: {one_line(error)}") from error
    if not relative_error <= DECODER_TOLERANCE[dtype]:
        raise LoadError(DIFFERENT_RESULTS.format(config.model_type, f" (off by {relative_error:.2g})"))
    progress(1.0)
    return network


def read_transformers_model(
    config: PreTrainedConfig, load: Callable[..., tuple[PreTrainedModel, dict[str, Any]]]
) -> PreTrainedModel:
    """Return the model that ``load`` makes of an Auto class and options, with Transformers' loading info.

    Raises LoadError if Transformers cannot load it, or if tensors are missing.
    """
    with silence_transformers():
        try:
            model, info = load(
                _model_class(config),
                attn_implementation="eager",
                experts_implementation="eager",  # a loop over experts, so that a row's sums do not depend on other rows
            )
        except MemoryError:
            raise
        except Exception as error:
            reason = one_line(error)
            if "ignore_mismatched_sizes" in reason:  # the message refers to a table in Transformers' log
                reason = "its tensors do not have the sizes that config.json gives."
            raise LoadError(f"Transformers cannot load this {config.model_type} model: {reason}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise LoadError(f"The checkpoint has no tensor {missing[0]} ({len(missing)} missing in all).")
    return model


def _model_class(config: PreTrainedConfig) -> Any:
    """Return the Auto class that loads a model. Of a multimodal model, only the language model runs."""
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForSeq2SeqLM


def read_supported_config(folder: Path) -> PreTrainedConfig:
    """Return the config if it describes a decoder that KV pages support. Raises LoadError."""
    try:
        with silence_transformers():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # config classes raise all kinds of exceptions
        content = read_config(folder)
        if "auto_map" in content:
            raise LoadError("The model needs code of its own, but code from model folders is never run.") from error
        if content["model_type"] not in CONFIG_MAPPING:
            raise LoadError(
                f"Transformers {transformers.__version__} does not know the model type {content['model_type']}."
            ) from error
        raise LoadError(f"Transformers does not understand the model's config.json: {one_line(error)}") from error
    kind = config.model_type
    if config.is_encoder_decoder or getattr(config.get_text_config(), "is_encoder_decoder", False):
        raise LoadError(f"A {kind} model is an encoder-decoder; only decoders can be served.")
    if all(type(config) not in mapping for mapping in WRITER_MAPPINGS):
        raise LoadError(
            f"Transformers {transformers.__version__} has no {kind} model that generates text; only such models and "
            f"encoders of these types can be served: {', '.join(sorted(ENCODER_LOADERS))}."
        )
    # Models of BERT's kind have both fields; other configs have the first one without a meaning.
    if getattr(config, "is_decoder", True) is False and hasattr(config, "add_cross_attention"):
        raise LoadError(
            f"A {kind} model whose config does not set is_decoder reads in both directions and writes nothing."
        )
    if kind in UNPAGED_TYPES:
        raise LoadError(DIFFERENT_RESULTS.format(kind, ""))
    unsupported = set(getattr(config.get_text_config(), "layer_types", None) or ()) - PAGED_LAYER_TYPES
    if unsupported:
        layer_kind = min(unsupported)
        reason = "are not computed here" if layer_kind in STATELESS_LAYER_TYPES else "keep more than keys and values"
        raise LoadError(f"A {kind} model has layers of kind {layer_kind}, which {reason}{_unfused_clause(folder)}.")
    result: PreTrainedConfig = config
    return result


def _unfused_clause(folder: Path) -> str:
    """Return a clause about why a model of a type on the fused decoder does not run there; empty for other types."""
    config = language_model_config(read_config(folder))
    if config["model_type"] in FUSABLE_TYPES:
        try:
            read_decoder_config(config)
        except Unfusable as reason:
            return f"; only parley's own decoder computes them, but {reason}"
    return ""


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence Transformers' progress bars and advice, and torch's about the layers of an empty language model."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors", UserWarning)
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def one_line(error: Exception) -> str:
    """Return an error's message as one line of about 200 characters at most: whole sentences of it, or else words."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) > 200:
        sentences, words = (text[:200].rpartition(end)[0] for end in (". ", " "))
        text = sentences or f"{words or text[:200]} (shortened)"
    return text if text.endswith((".", ")")) else text + "."
