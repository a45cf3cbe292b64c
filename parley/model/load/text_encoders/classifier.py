"""Loads the head of a sequence classifier: the names of its tensors by family, its labels, and the function that makes
scores.

Cross-encoders are classifiers of text pairs, most with a single class. Their scores are sentence-transformers': the
activation that the config names, otherwise a sigmoid for one class. Several classes have Transformers' probabilities by
``problem_type``: a softmax, or a sigmoid for each class if a text may have several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.networks.classifier import ClassifierHead, HeadReads, PlainLinear, ScoreFunction
from parley.model.networks.encoder import LayerNorm

MAX_LABELS = 1 << 17  # a config may claim any number
HEAD_SUFFIX = "ForSequenceClassification"
TOKEN_HEAD_SUFFIX = "ForTokenClassification"  # of encoders that tell the class of each token


@dataclass(frozen=True)
class HeadTensorNames:
    """A family's tensor names.

    * ``hidden``: the hidden layer, with a prefix if it belongs to the encoder; empty: there is none.
    * ``norm``: the norm after that layer; in families that have one, neither has a bias unless the config says so.
    * ``activation_member``: the member of the config that may name another activation, which is refused.
    * ``reads``: as in ``ClassifierHead``, unless the config says it in one of ``pooling_members``.
    * ``skips_padding``: the last token is the last one that is not the config's ``pad_token_id``.
    """

    hidden: str
    output: str
    activate: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
    norm: str = ""
    activation_member: str = ""
    reads: HeadReads = "first"
    has_output_bias: bool = True
    skips_padding: bool = False
    pooling_members: tuple[str, ...] = ()


BERT_HEAD = HeadTensorNames("pooler.dense", "classifier")
ROBERTA_HEAD = HeadTensorNames("classifier.dense", "classifier.out_proj")
CLASSIFIER_FAMILIES = {
    "bert": BERT_HEAD,
    "nomic_bert": BERT_HEAD,
    "gte": BERT_HEAD,
    "new": BERT_HEAD,  # GTE, as published
    "roberta": ROBERTA_HEAD,
    "xlm-roberta": ROBERTA_HEAD,
    "camembert": ROBERTA_HEAD,
    "mpnet": ROBERTA_HEAD,
    "distilbert": HeadTensorNames("pre_classifier", "classifier", torch.relu),
    "modernbert": HeadTensorNames(
        "head.dense",
        "classifier",
        F.gelu,
        norm="head.norm",
        activation_member="classifier_activation",
        pooling_members=("classifier_pooling",),
    ),
    "deberta-v2": HeadTensorNames("pooler.dense", "classifier", F.gelu, activation_member="pooler_hidden_act"),
    "jina_embeddings_v3": ROBERTA_HEAD,
    "electra": HeadTensorNames("classifier.dense", "classifier.out_proj", F.gelu),
    # The second member is the name in the first configs that were published.
    "eurobert": HeadTensorNames(
        "dense", "classifier", F.gelu, reads="late", pooling_members=("classifier_pooling", "clf_pooling")
    ),
    "llama_bidirec": HeadTensorNames("", "score", reads="mean", has_output_bias=False, pooling_members=("pooling",)),
}
# Families whose heads for tokens are those of texts; the others with such heads have a linear layer alone.
TOKEN_HEADS = {"modernbert": CLASSIFIER_FAMILIES["modernbert"]} | dict.fromkeys(
    ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "deberta-v2", "electra"),
    HeadTensorNames("", "classifier"),
)
DECODER_HEAD = HeadTensorNames("", "score", reads="last", has_output_bias=False, skips_padding=True)
POOLING_READS: dict[str, HeadReads] = {
    "cls": "first",
    "bos": "first",
    "mean": "mean",
    "avg": "mean",
    "last": "last",
    "late": "late",
}
SCORE_FUNCTION_NAMES: dict[str, ScoreFunction] = {
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Tanh": "tanh",
    "Identity": "identity",
}
PROBLEM_FUNCTIONS: dict[str, ScoreFunction] = {
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
    "regression": "identity",
}


def is_classifier(config: Mapping[str, Any]) -> bool:
    """True if the config names a model that classifies whole texts."""
    return _has_head(config, HEAD_SUFFIX)


def _has_head(config: Mapping[str, Any], suffix: str) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(suffix) for name in names)


def read_classifier_labels(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the classes, in order; two if the config has none, as in Transformers. Raises LoadError."""
    names = config.get("id2label")
    names = names if isinstance(names, dict) else {}
    count = len(names) or config.get("num_labels") or 2
    if type(count) is not int or not 0 < count <= MAX_LABELS:
        raise LoadError(f"config.json has no valid num_labels for a classifier; it must be 1 to {MAX_LABELS}.")
    return [str(names.get(str(number), f"LABEL_{number}")) for number in range(count)]


def read_score_function(config: Mapping[str, Any], label_count: int) -> ScoreFunction:
    """Return the function that turns logits into scores. Raises LoadError if the config names an unknown one."""
    settings = config.get("sentence_transformers")
    named = settings.get("activation_fn") if isinstance(settings, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named:
        function = SCORE_FUNCTION_NAMES.get(str(named).rpartition(".")[2])
        if function is None:
            raise LoadError(f"The activation {named} of a classifier's scores is not supported.")
        return function
    if label_count == 1:
        return "sigmoid"
    return PROBLEM_FUNCTIONS.get(str(config.get("problem_type")), "softmax")


def load_classifier_head(
    checkpoint: Checkpoint, config: Mapping[str, Any], hidden: int, device: torch.device
) -> ClassifierHead | None:
    """Load the head of a classifier of texts, or of an encoder's tokens, in float32; None if the config names none.
    ``hidden``: size of the encoder's states. Raises LoadError."""
    by_token = _has_head(config, TOKEN_HEAD_SUFFIX)
    if not is_classifier(config) and not by_token:
        return None
    kind, labels = config["model_type"], read_classifier_labels(config)
    if by_token and kind not in TOKEN_HEADS:
        raise LoadError(f"Classes of single tokens are not supported for {kind} models.")
    names = TOKEN_HEADS[kind] if by_token else CLASSIFIER_FAMILIES.get(kind, DECODER_HEAD)
    if names.activation_member and (activation := config.get(names.activation_member, "gelu")) != "gelu":
        raise LoadError(f"A classifier with the activation {activation} is not supported.")
    # a divisor of logits in llama_bidirec
    if config.get("temperature") not in (None, 1) and not names.hidden and not by_token:
        raise LoadError(f"A classifier with temperature {config['temperature']} is not supported.")
    reads = names.reads
    member = next((name for name in names.pooling_members if config.get(name) is not None), None)
    if member is not None:
        pooling = str(config[member])
        if pooling not in POOLING_READS:
            raise LoadError(f"A classifier with {member} {pooling[:100]} is not supported.")
        reads = POOLING_READS[pooling]
    weights, hidden_layer, padding_id = HeadWeights(checkpoint, device), None, config.get("pad_token_id")
    if names.hidden:
        hidden_name = f"{names.hidden}.weight"
        full_name = next((name for name in checkpoint.tensor_names if name.endswith(hidden_name)), hidden_name)
        has_bias = not names.norm or bool(config.get("classifier_bias"))
        hidden_layer = weights.read_linear(full_name.removesuffix(".weight"), hidden, hidden, has_bias=has_bias)
    return ClassifierHead(
        hidden_layer=hidden_layer,
        activate=names.activate,
        output_layer=weights.read_linear(names.output, len(labels), hidden, has_bias=names.has_output_bias),
        labels=labels,
        score_function=read_score_function(config, len(labels)),
        norm=weights.read_norm(names.norm, hidden, has_bias=bool(config.get("norm_bias"))) if names.norm else None,
        eps=float(config.get("norm_eps", 1e-5)),
        reads=reads,
        by_token=by_token,
        padding_id=padding_id if names.skips_padding and type(padding_id) is int else None,
    )


class HeadWeights:
    """Reads tensors in float32. Raises LoadError."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device):
        self._checkpoint, self._device = checkpoint, device

    def read_tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return a copy of one tensor; ``shape`` is the expected shape."""
        tensor = self._checkpoint.view_tensor(name, *shape)
        return tensor.to(device=self._device, dtype=torch.float32, copy=True)

    def read_linear(self, name: str, out: int, width: int, *, has_bias: bool = True) -> PlainLinear:
        """Return a linear layer."""
        weight = self.read_tensor(f"{name}.weight", out, width)
        return PlainLinear(weight, self.read_tensor(f"{name}.bias", out) if has_bias else None)

    def read_norm(self, name: str, width: int, *, has_bias: bool) -> LayerNorm:
        """Return a LayerNorm; its bias is zeros if it has none."""
        weight = self.read_tensor(f"{name}.weight", width)
        return LayerNorm(weight, self.read_tensor(f"{name}.bias", width) if has_bias else torch.zeros_like(weight))
