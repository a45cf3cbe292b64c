"""The table of encoder families: recognizes a config's family, and loads and checks its encoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.load.text_encoders import bert, deberta, jina_bert, modern_bert, rotary_bert
from parley.model.networks.encoder import EncoderNetwork, EncoderSizes
from parley.model.networks.pooling import (
    SPLADE_MODE,
    DenseLayer,
    PoolingRecipe,
    SparsePooling,
    read_pooling_recipe,
)

UNSUPPORTED_HEADS = ("ForImageClassification", "ForQuestionAnswering", "ForMultipleChoice")

# Ends the architecture's name of sparse embedding models whose modules.json does not say it. It is vLLM's name, which
# --hf-overrides can set.
SPARSE_MODEL = "SpladeSparseEmbeddingModel"
LATE_INTERACTION = "ColBERT"  # in the architecture's name of models that make a vector of each token
TOKEN_LAYERS = ("linear.weight", "colbert_linear.weight")  # names of the layer that makes these vectors


@dataclass(frozen=True)
class EncoderLoader:
    """How a family's encoders are read, loaded in float32 and checked; the functions below describe each step."""

    read_config: Callable[[dict[str, Any]], EncoderSizes]
    load: Callable[[Checkpoint, dict[str, Any], torch.device, Callable[[float], None]], EncoderNetwork]
    check: Callable[[Checkpoint, dict[str, Any]], EncoderSizes]


def _load_bert(
    checkpoint: Checkpoint, config: dict[str, Any], device: torch.device, progress: Callable[[float], None]
) -> EncoderNetwork:
    return bert.load_bert(checkpoint, config, torch.float32, device, progress)


BERT_LOADER = EncoderLoader(bert.read_bert_config, _load_bert, bert.check_bert_tensors)
MODERN_LOADER = EncoderLoader(
    modern_bert.read_modern_config, modern_bert.load_modern_bert, modern_bert.check_modern_bert
)
ROTARY_LOADER = EncoderLoader(
    rotary_bert.read_rotary_config, rotary_bert.load_rotary_bert, rotary_bert.check_rotary_bert
)
DEBERTA_LOADER = EncoderLoader(deberta.read_deberta_config, deberta.load_deberta, deberta.check_deberta)
JINA_LOADER = EncoderLoader(jina_bert.read_jina_config, jina_bert.load_jina_bert, jina_bert.check_jina_bert)
ENCODER_LOADERS: dict[str, EncoderLoader] = {
    **dict.fromkeys(bert.ENCODER_FAMILIES, BERT_LOADER),
    modern_bert.MODEL_TYPE: MODERN_LOADER,
    **dict.fromkeys(rotary_bert.ROTARY_BERT_TYPES, ROTARY_LOADER),
    deberta.MODEL_TYPE: DEBERTA_LOADER,
}


def _find_loader(config: dict[str, Any]) -> EncoderLoader:
    return JINA_LOADER if jina_bert.is_jina_bert(config) else ENCODER_LOADERS[config["model_type"]]


def is_encoder(config: dict[str, Any]) -> bool:
    """True if the config is of one of these encoders, not of a model that generates text."""
    return config["model_type"] in ENCODER_LOADERS and not config.get("is_decoder")


def read_encoder_config(config: dict[str, Any]) -> EncoderSizes:
    """Read the encoder's sizes from the content of config.json. Raises LoadError."""
    kind = config["model_type"]
    try:
        names = [str(name) for name in config.get("architectures") or ()]
        if task_heads := [name for name in names if name.endswith(UNSUPPORTED_HEADS)]:
            raise LoadError(f"A {task_heads[0]} is not an embedding model, and no classifier of whole texts.")
        return _find_loader(config).read_config(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The families check the fields that decide whether a model is supported, not the type of each field
        raise LoadError(f"config.json has a field of a wrong type or value for a {kind} model ({error}).") from error


def read_encoder_pooling(folder: Path, config: dict[str, Any], checkpoint: Checkpoint) -> PoolingRecipe:
    """Return the pooling of an encoder's folder, the mean of all tokens if it names none. Raises LoadError."""
    recipe = read_pooling_recipe(folder) or PoolingRecipe(("mean",))
    names = config.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    if recipe.sparse is None and any(name.endswith(SPARSE_MODEL) for name in names):
        return PoolingRecipe((SPLADE_MODE,), False, recipe.max_text_tokens, sparse=SparsePooling())
    if not recipe.token_layers and any(LATE_INTERACTION in name for name in names):
        return PoolingRecipe((), True, recipe.max_text_tokens, token_layers=(_read_token_layer(checkpoint),))
    return recipe


def _read_token_layer(checkpoint: Checkpoint) -> DenseLayer:
    """Return the layer that makes the vectors of tokens in the form of ColBERT's authors, which has no bias. Raises
    LoadError."""
    name = next((name for name in TOKEN_LAYERS if name in checkpoint), TOKEN_LAYERS[0])
    shape = checkpoint.tensor_shape(name)
    if len(shape) != 2 or 0 in shape:
        raise LoadError(f"The tensor {name} has the shape {list(shape)}; a linear layer has two sizes.")
    return DenseLayer(checkpoint.view_tensor(name, *shape).float().clone(), None, lambda x: x)


def load_encoder(
    checkpoint: Checkpoint, config: dict[str, Any], device: torch.device, progress: Callable[[float], None]
) -> EncoderNetwork:
    """Load the encoder in float32 and check it numerically. Raises LoadError."""
    return _find_loader(config).load(checkpoint, config, device, progress)


def check_encoder_tensors(checkpoint: Checkpoint, config: dict[str, Any]) -> EncoderSizes:
    """Check names, shapes and types of all tensors without reading any, and return the sizes. Raises LoadError."""
    return _find_loader(config).check(checkpoint, config)
