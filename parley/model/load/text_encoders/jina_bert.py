"""Loads jina-embeddings-v2 (the type ``bert`` with positions of the kind ``alibi``), and checks each encoder.

Two variants are published: jina-embeddings-v2-base-en, and jina-embeddings-v2-base-code, which also has norms of
queries and keys and one more norm in each layer. A config that asks for anything else is refused, never guessed at.
The numeric check runs a plain float32 forward pass, written from the definitions (arXiv 2310.19923, section 3), one
text at a time, on the unmerged weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.load.numeric_check.probe_texts import probe_texts, refuse_large_error, relative_error
from parley.model.load.text_encoders.bert import MAX_POSITIONS
from parley.model.load.text_encoders.encoder_tensors import TypedEncoderTensors
from parley.model.load.text_encoders.modern_bert import MAX_LAYERS
from parley.model.networks.encoder import EncoderLinear, PackedTexts
from parley.model.networks.families.decoder_family import alibi_slopes
from parley.model.networks.sloped_encoder import SlopedEncoder, SlopedEncoderConfig, SlopedEncoderLayer

NAME = "JinaBERT"
CONFIG_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "type_vocab_size": 2,
    "max_position_embeddings": 512,
}
LAYER = "encoder.layer.{}."
EMBEDDING_NORM = "embeddings.LayerNorm"
QUERY, KEY, VALUE, OUTPUT = ("attention." + name for name in ("self.query", "self.key", "self.value", "output.dense"))
QUERY_NORM, KEY_NORM = "attention.self.layer_norm_q", "attention.self.layer_norm_k"
ATTENTION_NORM, SECOND_NORM = "attention.output.LayerNorm", "layer_norm_1"
# The layer with both halves, and the norm after it, in both forms; in the second, the second half is activated
HALVES, LATER_HALVES = "mlp.gated_layers", "mlp.up_gated_layer"
# Both halves apart, as in early GGUF files: the activated one, and the other
SPLIT_HALVES = ("mlp.gated_layers_w", "mlp.gated_layers_v")
DOWN, LATER_DOWN = "mlp.wo", "mlp.down_layer"
NORM, LATER_NORM = "mlp.layernorm", "layer_norm_2"


def is_jina_bert(config: Mapping[str, Any]) -> bool:
    """Whether a config is of this family."""
    return config["model_type"] == "bert" and config.get("position_embedding_type") == "alibi"


def read_jina_config(config: dict[str, Any]) -> SlopedEncoderConfig:
    """Read the encoder's sizes from the content of config.json. Raises LoadError."""
    values = {name: default if config.get(name) is None else config[name] for name, default in CONFIG_DEFAULTS.items()}
    invalid = [
        name
        for name, value in values.items()
        if type(value) is not int or value < (0 if name == "type_vocab_size" else 1)
    ]
    if not invalid and values["hidden_size"] % values["num_attention_heads"]:
        invalid.append("hidden_size")
    if not invalid and values["max_position_embeddings"] > MAX_POSITIONS:
        invalid.append("max_position_embeddings")
    if invalid:
        raise LoadError(f"config.json has no valid {invalid[0]} for a {NAME} model.")
    if config.get("feed_forward_type") != "geglu":
        raise LoadError(f"A {NAME} model with feed_forward_type {config.get('feed_forward_type')} is not supported.")
    return SlopedEncoderConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        layers=min(values["num_hidden_layers"], MAX_LAYERS),
        eps=float(config.get("layer_norm_eps") or 1e-12),
        max_length=values["max_position_embeddings"],
        slopes=alibi_slopes(values["num_attention_heads"]),
    )


class JinaBertWeights(TypedEncoderTensors):
    """Reads the parts of an encoder from a checkpoint, in either form. Raises LoadError."""

    def __init__(self, checkpoint: Checkpoint, config: dict[str, Any], device: torch.device):
        self.config = read_jina_config(config)
        types = config.get("type_vocab_size")
        types = CONFIG_DEFAULTS["type_vocab_size"] if types is None else types
        super().__init__(checkpoint, device, self.config.vocab_size, self.config.hidden_size, types)
        first = self.prefix + LAYER.format(0)
        self.is_later = f"{first}{LATER_DOWN}.weight" in checkpoint
        self.is_split = f"{first}{SPLIT_HALVES[0]}.weight" in checkpoint
        self.has_head_norms = f"{first}{QUERY_NORM}.weight" in checkpoint
        self.has_second_norm = f"{first}{SECOND_NORM}.weight" in checkpoint
        self.down, self.norm = (LATER_DOWN, LATER_NORM) if self.is_later else (DOWN, NORM)
        self.require_last_layer(f"{LAYER.format(self.config.layers - 1)}{OUTPUT}.weight", self.config.layers)

    def read_square(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight [hidden, hidden] and bias [hidden] of a layer of attention."""
        return self.read_affine(name, self.config.hidden_size, self.config.hidden_size, has_bias=True)

    def read_halves(self, start: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of the activated half and of the other, [intermediate, hidden] each; they have no bias.
        ``start``: begins the names of the layer."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        if self.is_split:
            activated, other = (self.read_tensor(f"{start}{name}.weight", inner, hidden) for name in SPLIT_HALVES)
            return activated, other
        name = LATER_HALVES if self.is_later else HALVES
        first, second = self.read_tensor(f"{start}{name}.weight", 2 * inner, hidden).chunk(2)
        return (second, first) if self.is_later else (first, second)

    def read_down(self, start: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight [hidden, intermediate] and bias [hidden] of the last layer of an MLP."""
        return self.read_affine(
            start + self.down, self.config.hidden_size, self.config.intermediate_size, has_bias=True
        )

    def read_layer(self, layer: int) -> SlopedEncoderLayer:
        """Return a layer with its parts merged."""
        start = LAYER.format(layer)
        parts = [self.read_square(start + name) for name in (QUERY, KEY, VALUE)]
        halves = torch.cat(self.read_halves(start))
        return SlopedEncoderLayer(
            qkv=EncoderLinear(torch.cat([weight for weight, _ in parts]), torch.cat([bias for _, bias in parts])),
            output=EncoderLinear(*self.read_square(start + OUTPUT)),
            attention_norm=self.read_norm(start + ATTENTION_NORM),
            up=EncoderLinear(halves, halves.new_zeros(len(halves))),
            down=EncoderLinear(*self.read_down(start)),
            norm=self.read_norm(start + self.norm),
            query_norm=self.read_norm(start + QUERY_NORM) if self.has_head_norms else None,
            key_norm=self.read_norm(start + KEY_NORM) if self.has_head_norms else None,
            second_norm=self.read_norm(start + SECOND_NORM) if self.has_second_norm else None,
        )


def load_jina_bert(
    checkpoint: Checkpoint, config: dict[str, Any], device: torch.device, progress: Callable[[float], None]
) -> SlopedEncoder:
    """Load the encoder and check it numerically. Raises LoadError."""
    weights = JinaBertWeights(checkpoint, config, device)
    layers = []
    for layer in range(weights.config.layers):
        layers.append(weights.read_layer(layer))
        progress((layer + 1) / weights.config.layers)
    words, second_type = weights.read_embeddings()
    encoder = SlopedEncoder(weights.config, words, weights.read_norm(EMBEDDING_NORM), layers, second_type)
    refuse_large_error(_encoder_deviation(encoder, JinaBertWeights(checkpoint, config, torch.device("cpu"))))
    return encoder


def check_jina_bert(checkpoint: Checkpoint, config: dict[str, Any]) -> SlopedEncoderConfig:
    """Check names, shapes and types of all tensors without reading any, and return the sizes. Raises LoadError."""
    weights = JinaBertWeights(checkpoint, config, torch.device("meta"))
    for layer in range(weights.config.layers):
        weights.read_layer(layer)
    weights.read_embeddings()
    weights.read_norm(EMBEDDING_NORM)
    return weights.config


@torch.inference_mode()
def _encoder_deviation(encoder: SlopedEncoder, weights: JinaBertWeights) -> float:
    """Return the relative error (L2) of the hidden states of two texts packed together, against ``encode_plainly``."""
    texts = probe_texts(weights.config.vocab_size, weights.config.max_length)
    second_starts = [0, len(texts[1]) // 2]
    expected = encode_plainly(weights, texts, second_starts)
    actual = encoder.encode_packed(PackedTexts(texts, encoder.device, second_starts)).float().cpu()
    return relative_error(actual, expected)


def encode_plainly(weights: JinaBertWeights, texts: list[list[int]], second_starts: list[int]) -> torch.Tensor:
    """Compute the hidden states of texts by the definition: float32 [tokens of all, hidden].

    ``second_starts``: where the second text of each pair begins; 0: it is one text.
    """
    config = weights.config
    words, second_type = weights.read_embeddings()

    def normalize(x: torch.Tensor, name: str) -> torch.Tensor:
        norm, centred = weights.read_norm(name), x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + config.eps).sqrt() * norm.weight + norm.bias

    def apply(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = weights.read_square(name)
        return x @ weight.T + bias

    rows = []
    for text, second_start in zip(texts, second_starts, strict=True):
        x = words[text]
        if second_start and second_type is not None:
            x[second_start:] += second_type
        x = normalize(x, EMBEDDING_NORM)
        positions = torch.arange(len(text))
        falls = (positions[:, None] - positions).abs() * torch.tensor(config.slopes)[:, None, None]
        for layer in range(config.layers):
            start = LAYER.format(layer)
            q, k, v = (apply(x, start + name) for name in (QUERY, KEY, VALUE))
            if weights.has_head_norms:
                q, k = normalize(q, start + QUERY_NORM), normalize(k, start + KEY_NORM)
            q, k, v = (part.view(len(text), config.heads, -1) for part in (q, k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1]) - falls
            attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(text), -1)
            added = normalize(apply(attended, start + OUTPUT) + x, start + ATTENTION_NORM)
            if weights.has_second_norm:
                added = normalize(x + added, start + SECOND_NORM)
            activated, other = (added @ weight.T for weight in weights.read_halves(start))
            inner = activated * 0.5 * (1 + torch.erf(activated / math.sqrt(2))) * other
            weight, bias = weights.read_down(start)
            x = normalize(added + inner @ weight.T + bias, start + weights.norm)
        rows.append(x)
    return torch.cat(rows)
