"""Loads the head of a sparse embedding model: the names of the tensors of masked language models, by family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.load.text_encoders.classifier import HeadWeights
from parley.model.networks.activations import ACTIVATION_FUNCTIONS, find_activation
from parley.model.networks.classifier import PlainLinear
from parley.model.networks.encoder import LayerNorm
from parley.model.networks.pooling import SparsePooling
from parley.model.networks.sparse_head import SparseHead

EMBEDDINGS = ("embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight")


@dataclass(frozen=True)
class MaskedHeadNames:
    """A family's tensor names. ``bias``: that of the logits, if it is not the bias of ``output``. If a
    checkpoint has no weights of ``output``, the embeddings of tokens take their place.

    ``activation_member``: the member of the config that names the activation; "": it is GELU. ``eps_member``: the
    member with the norm's epsilon; ``eps``: the epsilon if there is none. The layer has a bias only if the config's
    ``bias_member`` is true, and the norm only if its ``norm_bias`` is.
    """

    hidden: str
    norm: str
    output: str
    bias: str
    activation_member: str = ""
    eps_member: str = "layer_norm_eps"
    eps: float = 1e-12
    bias_member: str = ""


BERT_NAMES = MaskedHeadNames(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
    activation_member="hidden_act",
)
ROBERTA_NAMES = MaskedHeadNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
GTE_NAMES = MaskedHeadNames("lm_head.dense", "lm_head.norm", "lm_head.decoder", "")
MASKED_HEADS = {
    "bert": BERT_NAMES,
    "roberta": ROBERTA_NAMES,
    "xlm-roberta": ROBERTA_NAMES,
    "camembert": ROBERTA_NAMES,
    "mpnet": ROBERTA_NAMES,
    "gte": GTE_NAMES,
    "new": GTE_NAMES,  # GTE, as published
    "distilbert": MaskedHeadNames(
        "vocab_transform",
        "vocab_layer_norm",
        "vocab_projector",
        "",
        activation_member="activation",
        eps_member="",
    ),
    "modernbert": MaskedHeadNames(
        "head.dense",
        "head.norm",
        "decoder",
        "",
        activation_member="classifier_activation",
        eps_member="norm_eps",
        eps=1e-5,
        bias_member="classifier_bias",
    ),
}


def load_sparse_head(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    pooling: SparsePooling | None,
    hidden: int,
    device: torch.device,
) -> SparseHead | None:
    """Load the head of a sparse embedding model in float32; None without a ``pooling``. ``hidden``: size of the
    encoder's states. Raises LoadError."""
    if pooling is None:
        return None
    kind = config["model_type"]
    names = MASKED_HEADS.get(kind)
    if names is None:
        raise LoadError(f"Sparse vectors of {kind} models are not supported; only those of {', '.join(MASKED_HEADS)}.")
    name = config.get(names.activation_member) or "gelu"
    activation = find_activation(name, ACTIVATION_FUNCTIONS)
    if activation is None:
        raise LoadError(f"A masked language model with the activation {str(name)[:100]} is not supported.")
    weights = HeadWeights(checkpoint, device)
    has_bias = not names.bias_member or bool(config.get(names.bias_member))
    has_norm_bias = not names.bias_member or bool(config.get("norm_bias"))
    return SparseHead(
        hidden_layer=weights.read_linear(names.hidden, hidden, hidden, has_bias=has_bias),
        activate=ACTIVATION_FUNCTIONS[activation],
        norm=_read_norm(weights, checkpoint, names.norm, hidden, has_bias=has_norm_bias),
        eps=_read_eps(config, names),
        output_layer=_read_output(weights, checkpoint, config, names, hidden),
        pooling=pooling,
    )


def _read_eps(config: Mapping[str, Any], names: MaskedHeadNames) -> float:
    """Return the norm's epsilon. Raises LoadError."""
    value = config.get(names.eps_member, names.eps)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise LoadError(f"config.json has no valid {names.eps_member}.")
    return float(value)


def _read_norm(weights: HeadWeights, checkpoint: Checkpoint, name: str, hidden: int, *, has_bias: bool) -> LayerNorm:
    """Return the norm, which BERT's first release names in its own way."""
    if f"{name}.gamma" in checkpoint:
        return LayerNorm(weights.read_tensor(f"{name}.gamma", hidden), weights.read_tensor(f"{name}.beta", hidden))
    return weights.read_norm(name, hidden, has_bias=has_bias)


def _read_output(
    weights: HeadWeights,
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    names: MaskedHeadNames,
    hidden: int,
) -> PlainLinear:
    """Return the layer that makes logits. Raises LoadError."""
    vocabulary = config["vocab_size"]
    weight_name, bias_name = f"{names.output}.weight", f"{names.output}.bias"
    if weight_name not in checkpoint:
        tied = (name for name in checkpoint.tensor_names if name.endswith(EMBEDDINGS))
        weight_name = next(tied, weight_name)
    if names.bias and bias_name not in checkpoint:
        bias_name = names.bias
    has_bias = config.get("decoder_bias", True) is not False
    return PlainLinear(
        weights.read_tensor(weight_name, vocabulary, hidden),
        weights.read_tensor(bias_name, vocabulary) if has_bias else None,
    )
