"""Loads BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, MPNet and ELECTRA, and checks each encoder numerically.

The families differ in tensor names and in how they encode positions. A config that asks for anything else is refused,
never guessed at. The numeric check runs a plain float32 forward pass, written from the definitions (BERT: arXiv
1810.04805; MPNet's relative positions: arXiv 1910.10683, section 2.1), one text at a time, on the unmerged weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.load.numeric_check.probe_texts import probe_texts, refuse_large_error, relative_error
from parley.model.networks.activations import GELU, GELU_TANH, RELU, find_activation
from parley.model.networks.encoder import (
    Encoder,
    EncoderConfig,
    EncoderLayer,
    EncoderLinear,
    LayerNorm,
    PackedTexts,
)

WORD_EMBEDDINGS, POSITION_EMBEDDINGS, TYPE_EMBEDDINGS = (
    f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")
)
ENCODER_ACTIVATIONS = (GELU, GELU_TANH, RELU)
PROJECTION, EMBEDDING_NORM = "embeddings_project", "embeddings.LayerNorm"
ELECTRA = "electra"
MAX_DISTANCE = 128  # relative distances from here on share the last bucket

MAX_POSITIONS = 1 << 20  # a config may claim any number, and no tensor need have that many rows


@dataclass(frozen=True)
class BertTensorNames:
    """A family's tensor names within a layer. ``first_position``: a text's first, None: one past the padding id."""

    layer: str = "encoder.layer.{}."
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    norm: str = "output.LayerNorm"
    relative_bias: str = "encoder.relative_attention_bias.weight"
    first_position: int | None = 0


BERT = BertTensorNames()
ROBERTA = BertTensorNames(first_position=None)
DISTILBERT = BertTensorNames(
    layer="transformer.layer.{}.",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    norm="output_layer_norm",
)
MPNET = BertTensorNames(
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
    first_position=2,
)
ENCODER_FAMILIES = {
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "distilbert": DISTILBERT,
    "mpnet": MPNET,
    ELECTRA: BERT,
}
CONFIG_SYNONYMS = {"dim": "hidden_size", "hidden_dim": "intermediate_size", "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers", "activation": "hidden_act"}  # fmt: skip
CONFIG_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "pad_token_id": 1,
    "relative_attention_num_buckets": 32,
    "embedding_size": 128,
}


def read_bert_config(config: dict[str, Any], names: BertTensorNames | None = None) -> EncoderConfig:
    """Read the encoder's sizes from the content of config.json; ``names``: the family's, by its type if None. Raises
    LoadError."""
    kind = config["model_type"]
    if config.get("position_embedding_type") not in (None, "absolute"):
        raise LoadError(f"A {kind} model with positions of kind {config['position_embedding_type']} is not supported.")
    fields = {CONFIG_SYNONYMS.get(name, name): value for name, value in config.items()}
    values: dict[str, Any] = CONFIG_DEFAULTS | {
        name: fields[name] for name in CONFIG_DEFAULTS if fields.get(name) is not None
    }
    activation = find_activation(values["hidden_act"], ENCODER_ACTIVATIONS)
    if activation is None:
        raise LoadError(f"A {kind} model with the activation {values['hidden_act']} is not supported.")
    sizes = {name: value for name, value in values.items() if isinstance(CONFIG_DEFAULTS[name], int)}
    invalid = [name for name, value in sizes.items() if type(value) is not int or value < (name != "pad_token_id")]
    if invalid or type(fields.get("vocab_size")) is not int or values["hidden_size"] % values["num_attention_heads"]:
        raise LoadError(f"config.json has no valid {(invalid or ['vocab_size'])[0]} for a {kind} model.")
    embedding = values["embedding_size"]
    first = (names or ENCODER_FAMILIES[kind]).first_position
    encoder_config = EncoderConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        heads=values["num_attention_heads"],
        layers=values["num_hidden_layers"],
        eps=float(values["layer_norm_eps"]),
        positions=values["max_position_embeddings"],
        first_position=values["pad_token_id"] + 1 if first is None else first,
        activation=activation,
        buckets=values["relative_attention_num_buckets"] if kind == "mpnet" else 0,
        embedding=embedding if kind == ELECTRA and embedding != values["hidden_size"] else 0,
    )
    if encoder_config.max_length < 1:
        raise LoadError(f"config.json has {encoder_config.positions} positions, too few for a {kind} model.")
    return encoder_config


class BertWeights:
    """Reads a checkpoint's tensors by a family's names, with or without a prefix. Raises LoadError."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EncoderConfig,
        names: BertTensorNames,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.checkpoint, self.config, self.names = checkpoint, config, names
        self.dtype, self.device = dtype, device
        word_names = [name for name in checkpoint.tensor_names if name.endswith(WORD_EMBEDDINGS)]
        self.prefix = word_names[0].removesuffix(WORD_EMBEDDINGS) if word_names else ""

    def read_tensor(self, name: str, *shape: int) -> torch.Tensor:
        """Return a copy of one tensor in this object's dtype and on its device; ``shape`` is the expected shape."""
        full_name = self.prefix + name
        if full_name not in self.checkpoint:  # BERT's first release has these names
            full_name = full_name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
        return self.checkpoint.view_tensor(full_name, *shape).to(device=self.device, dtype=self.dtype, copy=True)

    def read_affine(self, name: str, out: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight [out, width] and bias [out] of one linear layer."""
        return self.read_tensor(f"{name}.weight", out, width), self.read_tensor(f"{name}.bias", out)

    def read_norm(self, name: str) -> LayerNorm:
        """Return one LayerNorm."""
        width = self.config.embedding_width if name == EMBEDDING_NORM else self.config.hidden_size
        return LayerNorm(self.read_tensor(f"{name}.weight", width), self.read_tensor(f"{name}.bias", width))

    def read_projection(self) -> EncoderLinear | None:
        """Return the layer that makes the first hidden state of an embedding; None if that is the embedding."""
        if not self.config.embedding:
            return None
        return EncoderLinear(*self.read_affine(PROJECTION, self.config.hidden_size, self.config.embedding))

    def position_embeddings(self) -> torch.Tensor:
        """Return position embeddings [max_length, hidden], with the embedding of token type 0 added."""
        config = self.config
        embeddings = self.read_tensor(POSITION_EMBEDDINGS, config.positions, config.embedding_width)
        embeddings = embeddings[config.first_position :]
        types = self.type_embeddings()
        return embeddings if types is None else embeddings + types[0]

    def type_embeddings(self) -> torch.Tensor | None:
        """Return the embeddings of token types, [types, hidden]; None if there are none."""
        if self.prefix + TYPE_EMBEDDINGS not in self.checkpoint:
            return None
        return self.read_tensor(TYPE_EMBEDDINGS, *self.checkpoint.tensor_shape(self.prefix + TYPE_EMBEDDINGS))

    def second_type(self) -> torch.Tensor | None:
        """Return the difference of the second token type's embedding from the first's, [hidden]; None if there is one
        type at most."""
        types = self.type_embeddings()
        return None if types is None or len(types) < 2 else types[1] - types[0]

    def merge_linears(self, layer: int, *names: str, out: int, width: int) -> EncoderLinear:
        """Return several linear layers concatenated into one, [len(names) * out, width]."""
        parts = [self.read_affine(self.names.layer.format(layer) + name, out, width) for name in names]
        return EncoderLinear(torch.cat([weight for weight, _ in parts]), torch.cat([bias for _, bias in parts]))

    def read_encoder_layer(self, layer: int) -> EncoderLayer:
        """Return encoder layer ``layer`` with query, key and value merged."""
        names, hidden, intermediate = self.names, self.config.hidden_size, self.config.intermediate_size
        prefix = names.layer.format(layer)
        return EncoderLayer(
            qkv=self.merge_linears(layer, names.query, names.key, names.value, out=hidden, width=hidden),
            output=self.merge_linears(layer, names.output, out=hidden, width=hidden),
            attention_norm=self.read_norm(prefix + names.attention_norm),
            up=self.merge_linears(layer, names.up, out=intermediate, width=hidden),
            down=self.merge_linears(layer, names.down, out=hidden, width=intermediate),
            norm=self.read_norm(prefix + names.norm),
        )

    def relative_position_bias(self) -> torch.Tensor | None:
        """Return the relative position bias of the attention scores, [heads, max_length, max_length], or None."""
        if not self.config.buckets:
            return None
        table = self.read_tensor(self.names.relative_bias, self.config.buckets, self.config.heads)
        offsets = torch.arange(1 - self.config.max_length, self.config.max_length)
        by_offset = table[
            torch.tensor([distance_bucket(int(offset), self.config.buckets) for offset in offsets])
        ].T  # [heads, ways]
        positions = torch.arange(self.config.max_length)
        return by_offset[:, positions - positions[:, None] + self.config.max_length - 1].contiguous()


def distance_bucket(offset: int, buckets: int) -> int:
    """Return the bucket, below ``buckets``, of a relative distance.

    Near distances have a bucket each; far ones share ever wider buckets. The upper half is for later tokens.
    """
    half = buckets // 2
    exact, distance = half // 2, abs(offset)
    if distance >= exact:
        steps = torch.log(torch.tensor(distance).float() / exact) / math.log(MAX_DISTANCE / exact) * (half - exact)
        distance = min(exact + int(steps), half - 1)
    return distance + half * (offset > 0)


def load_bert(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None],
) -> Encoder:
    """Load the encoder and check it numerically. Raises LoadError."""
    weights = _open_weights(checkpoint, config, dtype, device)
    encoder_config = weights.config
    layers = []
    for i in range(encoder_config.layers):
        layers.append(weights.read_encoder_layer(i))
        progress((i + 1) / encoder_config.layers)
    word_embeddings = weights.read_tensor(WORD_EMBEDDINGS, encoder_config.vocab_size, encoder_config.embedding_width)
    encoder = Encoder(
        encoder_config,
        word_embeddings,
        weights.position_embeddings(),
        weights.read_norm(EMBEDDING_NORM),
        layers,
        weights.relative_position_bias(),
        weights.second_type(),
        weights.read_projection(),
    )
    refuse_large_error(encoder_deviation(encoder, checkpoint, weights.names), dtype)
    return encoder


def check_bert_tensors(checkpoint: Checkpoint, config: dict[str, Any]) -> EncoderConfig:
    """Check names, shapes and types of all tensors without reading any, and return the sizes. Raises LoadError."""
    weights = _open_weights(checkpoint, config, torch.float32, torch.device("meta"))
    for i in range(weights.config.layers):
        weights.read_encoder_layer(i)
    weights.read_tensor(WORD_EMBEDDINGS, weights.config.vocab_size, weights.config.embedding_width)
    weights.position_embeddings()
    weights.read_norm(EMBEDDING_NORM)
    weights.read_projection()
    if weights.config.buckets:
        weights.read_tensor(weights.names.relative_bias, weights.config.buckets, weights.config.heads)
    return weights.config


def _open_weights(
    checkpoint: Checkpoint, config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> BertWeights:
    """Return the reader of an encoder's weights. Raises LoadError if the last layer is missing."""
    weights = BertWeights(checkpoint, read_bert_config(config), ENCODER_FAMILIES[config["model_type"]], dtype, device)
    require_last_layer(weights)
    return weights


def require_last_layer(weights: BertWeights) -> None:
    """Raise LoadError if the last layer is missing, before work is planned per layer: a config may claim a million."""
    layers = weights.config.layers
    last_tensor = weights.prefix + weights.names.layer.format(layers - 1) + weights.names.query + ".weight"
    if last_tensor not in weights.checkpoint:
        raise LoadError(f"The checkpoint has no tensor {last_tensor}, but the config asks for {layers} layers.")


@torch.inference_mode()
def encoder_deviation(encoder: Encoder, checkpoint: Checkpoint, names: BertTensorNames) -> float:
    """Return the relative error (L2) of the hidden states of two texts packed together, against ``encode_plainly``."""
    config = encoder.config
    texts = probe_texts(config.vocab_size, config.max_length)
    plain_weights = BertWeights(checkpoint, config, names, torch.float32, torch.device("cpu"))
    second_starts = [0, len(texts[1]) // 2]
    expected = torch.cat([encode_plainly(plain_weights, *probe) for probe in zip(texts, second_starts, strict=True)])
    actual = encoder.encode_packed(PackedTexts(texts, encoder.device, second_starts)).float().cpu()
    return relative_error(actual, expected)


def encode_plainly(weights: BertWeights, text: list[int], second_start: int = 0) -> torch.Tensor:
    """Compute the hidden states of one text by the definitions: float32 [tokens, hidden].

    ``second_start``: where the second text of a pair begins; 0: it is one text.
    """
    config, names = weights.config, weights.names
    count, dim = len(text), config.hidden_size // config.heads

    def normalize_rows(x: torch.Tensor, name: str) -> torch.Tensor:
        layer_norm = weights.read_norm(name)
        centred = x - x.mean(-1, keepdim=True)
        return (
            centred / (centred.square().mean(-1, keepdim=True) + config.eps).sqrt() * layer_norm.weight
            + layer_norm.bias
        )

    def project_rows(x: torch.Tensor, name: str, out: int) -> torch.Tensor:
        weight, bias = weights.read_affine(name, out, x.shape[-1])
        return x @ weight.T + bias

    def activate_rows(x: torch.Tensor) -> torch.Tensor:
        if config.activation == RELU:
            return x.clamp_min(0)
        if config.activation == GELU_TANH:
            return F.gelu(x, approximate="tanh")
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    word_embeddings = weights.checkpoint.view_tensor(
        weights.prefix + WORD_EMBEDDINGS, config.vocab_size, config.embedding_width
    )
    x = word_embeddings[text].float() + weights.position_embeddings()[:count]
    second_type = weights.second_type()
    if second_start and second_type is not None:
        x[second_start:] += second_type
    x = normalize_rows(x, EMBEDDING_NORM)
    if config.embedding:
        x = project_rows(x, PROJECTION, config.hidden_size)
    bias = weights.relative_position_bias()
    for i in range(config.layers):
        prefix = names.layer.format(i)
        parts = [project_rows(x, prefix + name, config.hidden_size) for name in (names.query, names.key, names.value)]
        q, k, v = (part.view(count, config.heads, dim) for part in parts)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
        if bias is not None:
            scores = scores + bias[:, :count, :count]
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, config.hidden_size)
        x = normalize_rows(
            x + project_rows(attended, prefix + names.output, config.hidden_size), prefix + names.attention_norm
        )
        intermediate = activate_rows(project_rows(x, prefix + names.up, config.intermediate_size))
        x = normalize_rows(x + project_rows(intermediate, prefix + names.down, config.hidden_size), prefix + names.norm)
    return x
