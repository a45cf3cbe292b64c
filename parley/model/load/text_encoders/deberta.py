"""Loads DeBERTa-v2 and -v3 and checks each loaded encoder numerically.

A config that asks for anything else is refused, never guessed at. The numeric check runs a plain float32 forward pass,
written from the definition (arXiv 2006.03654, section 3.1; norms of distances: arXiv 2111.09543), one text
at a time, on the unmerged weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.load.numeric_check.probe_texts import probe_texts, refuse_large_error, relative_error
from parley.model.load.text_encoders import bert
from parley.model.networks.activations import ACTIVATION_FUNCTIONS, find_activation
from parley.model.networks.disentangled_encoder import (
    DisentangledEncoder,
    DisentangledEncoderConfig,
    DistanceProjections,
    EncoderConvolution,
)
from parley.model.networks.encoder import LayerNorm, PackedTexts

MODEL_TYPE = "deberta-v2"
DEBERTA_NAMES = bert.BertTensorNames(
    query="attention.self.query_proj", key="attention.self.key_proj", value="attention.self.value_proj"
)
DISTANCE_EMBEDDINGS, DISTANCE_NORM, CONVOLUTION = "encoder.rel_embeddings.weight", "encoder.LayerNorm", "encoder.conv"
KEY_TERM, QUERY_TERM = "c2p", "p2c"  # configs' names of the score terms with a distance as key and as query


def read_deberta_config(config: dict[str, Any]) -> DisentangledEncoderConfig:
    """Read the encoder's sizes from the content of config.json. Raises LoadError."""
    bert_config = bert.read_bert_config({"layer_norm_eps": 1e-7, **config}, DEBERTA_NAMES)
    if not config.get("relative_attention"):
        raise LoadError(f"A {MODEL_TYPE} model without relative_attention is not supported.")
    if config.get("embedding_size", bert_config.hidden_size) != bert_config.hidden_size:
        raise LoadError(f"A {MODEL_TYPE} model with embeddings of another size than its states is not supported.")
    if (
        config.get("attention_head_size", bert_config.hidden_size // bert_config.heads)
        != bert_config.hidden_size // bert_config.heads
    ):
        raise LoadError(f"A {MODEL_TYPE} model with an attention_head_size of its own is not supported.")
    terms = _read_terms(config)
    buckets, distance = (config.get(name, -1) for name in ("position_buckets", "max_relative_positions"))
    if type(buckets) is not int or type(distance) is not int:
        raise LoadError(f"config.json has no valid position_buckets for a {MODEL_TYPE} model.")
    if bert_config.positions > bert.MAX_POSITIONS:
        raise LoadError(f"config.json has no valid max_position_embeddings for a {MODEL_TYPE} model.")
    buckets, distance = max(buckets, 0), distance if distance > 0 else bert_config.positions
    if buckets and not 0 < buckets // 2 < distance - 1:
        raise LoadError(f"config.json has no valid position_buckets for a {MODEL_TYPE} model: {buckets}.")
    return DisentangledEncoderConfig(
        **asdict(bert_config),
        span=buckets or distance,
        distance_buckets=buckets,
        max_distance=distance,
        score_terms=1 + len(terms),
    )


def _read_terms(config: dict[str, Any]) -> set[str]:
    """Return which products with distances make a score. Raises LoadError."""
    terms = config.get("pos_att_type") or []
    names = {name.strip() for name in (terms.lower().split("|") if isinstance(terms, str) else terms)}
    if not names <= {KEY_TERM, QUERY_TERM}:
        raise LoadError(f"A {MODEL_TYPE} model with the pos_att_type {terms} is not supported.")
    return names


def distance_rows(config: DisentangledEncoderConfig) -> torch.Tensor:
    """Return the row of the embeddings of each distance from ``1 - max_length`` to ``max_length - 1``, int64.

    Distances up to half the buckets have a row each; farther ones share ever wider rows by their logarithm.
    """
    distances = torch.arange(1 - config.max_length, config.max_length)
    if config.distance_buckets:
        exact, far = config.distance_buckets // 2, distances.abs()
        widest = torch.log(torch.tensor((config.max_distance - 1) / exact))
        steps = torch.ceil(torch.log(far.clamp_min(exact) / exact) / widest * (exact - 1))
        distances = torch.where(far <= exact, distances, distances.sign() * (steps.long() + exact))
    return (distances + config.span).clamp(0, 2 * config.span - 1)


class DebertaWeights(bert.BertWeights):
    """Reads a checkpoint's tensors in float32, with those that only DeBERTa has. Raises LoadError."""

    def __init__(self, checkpoint: Checkpoint, config: dict[str, Any], device: torch.device):
        self.sizes = read_deberta_config(config)
        super().__init__(checkpoint, self.sizes, DEBERTA_NAMES, torch.float32, device)
        self.terms = _read_terms(config)
        self.shares_projections = bool(config.get("share_att_key"))
        self.normalizes_distances = "layer_norm" in str(config.get("norm_rel_ebd", "none")).lower()
        self.has_positions = config.get("position_biased_input", True)
        self.kernel = config.get("conv_kernel_size") or 0
        self.groups = config.get("conv_groups", 1)
        self.convolution_activation = find_activation(config.get("conv_act", "tanh"), ACTIVATION_FUNCTIONS) or ""
        if self.kernel and (
            type(self.kernel) is not int
            or self.kernel % 2 == 0
            or type(self.groups) is not int
            or self.groups < 1
            or self.sizes.hidden_size % self.groups
            or not self.convolution_activation
        ):
            raise LoadError(f"config.json asks for a convolution that a {MODEL_TYPE} model cannot have here.")
        bert.require_last_layer(self)

    def distance_embeddings(self) -> torch.Tensor:
        """Return the embeddings of distances, [2 * span, hidden], normalized if the model does that."""
        table = self.read_tensor(DISTANCE_EMBEDDINGS, 2 * self.sizes.span, self.sizes.hidden_size)
        if not self.normalizes_distances:
            return table
        norm = self.read_norm(DISTANCE_NORM)
        return F.layer_norm(table, (self.sizes.hidden_size,), norm.weight, norm.bias, self.sizes.eps)

    def distance_projections(self, layer: int, embeddings: torch.Tensor) -> DistanceProjections:
        """Return the distances' ``embeddings`` as keys and queries of a layer."""
        names = self.names
        key, query = (
            (names.key, names.query)
            if self.shares_projections
            else ("attention.self.pos_key_proj", "attention.self.pos_query_proj")
        )
        return DistanceProjections(
            self._project_distances(layer, key, embeddings) if KEY_TERM in self.terms else None,
            self._project_distances(layer, query, embeddings) if QUERY_TERM in self.terms else None,
        )

    def _project_distances(self, layer: int, name: str, embeddings: torch.Tensor) -> torch.Tensor:
        """Project ``embeddings`` [rows, hidden] and divide the result by heads: [heads, rows, width]."""
        hidden = self.sizes.hidden_size
        weight, bias = self.read_affine(self.names.layer.format(layer) + name, hidden, hidden)
        return F.linear(embeddings, weight, bias).view(len(embeddings), self.sizes.heads, -1).transpose(0, 1)

    def type_and_position_embeddings(self) -> torch.Tensor | None:
        """Return the rows to add to word embeddings at each position of a first text, [max_length, hidden]; None if
        there are none."""
        types = self.type_embeddings()
        if self.has_positions:
            return self.position_embeddings()
        return None if types is None else types[0].expand(self.sizes.max_length, -1)

    def convolution(self) -> EncoderConvolution | None:
        """Return the convolution of the embeddings, or None."""
        if not self.kernel:
            return None
        hidden = self.sizes.hidden_size
        weight = self.read_tensor(f"{CONVOLUTION}.conv.weight", hidden, hidden // self.groups, self.kernel)
        return EncoderConvolution(
            weight,
            self.read_tensor(f"{CONVOLUTION}.conv.bias", hidden),
            self.read_norm(f"{CONVOLUTION}.LayerNorm"),
            self.convolution_activation,
            self.groups,
        )

    def read_encoder(self, progress: Callable[[float], None]) -> DisentangledEncoder:
        """Return the whole encoder."""
        config, distances = self.sizes, self.distance_embeddings()
        layers, projections = [], []
        for layer in range(config.layers):
            layers.append(self.read_encoder_layer(layer))
            projections.append(self.distance_projections(layer, distances))
            progress((layer + 1) / config.layers)
        return DisentangledEncoder(
            config,
            self.read_tensor(bert.WORD_EMBEDDINGS, config.vocab_size, config.hidden_size),
            self.read_norm("embeddings.LayerNorm"),
            layers,
            distance_rows(config).to(self.device),
            projections,
            position_embeddings=self.type_and_position_embeddings(),
            second_type=self.second_type(),
            convolution=self.convolution(),
        )


def load_deberta(
    checkpoint: Checkpoint, config: dict[str, Any], device: torch.device, progress: Callable[[float], None]
) -> DisentangledEncoder:
    """Load the encoder and check it numerically. Raises LoadError."""
    encoder = DebertaWeights(checkpoint, config, device).read_encoder(progress)
    refuse_large_error(_encoder_deviation(encoder, DebertaWeights(checkpoint, config, torch.device("cpu"))))
    return encoder


def check_deberta(checkpoint: Checkpoint, config: dict[str, Any]) -> DisentangledEncoderConfig:
    """Check names, shapes and types of all tensors without reading any, and return the sizes. Raises LoadError."""
    weights = DebertaWeights(checkpoint, config, torch.device("meta"))
    weights.read_encoder(lambda _: None)
    return weights.sizes


@torch.inference_mode()
def _encoder_deviation(encoder: DisentangledEncoder, weights: DebertaWeights) -> float:
    """Return the relative error (L2) of the hidden states of two texts packed together, against ``encode_plainly``."""
    config = weights.sizes
    texts = probe_texts(config.vocab_size, config.max_length)
    second_starts = [0, len(texts[1]) // 2]
    expected = torch.cat([encode_plainly(weights, *probe) for probe in zip(texts, second_starts, strict=True)])
    actual = encoder.encode_packed(PackedTexts(texts, encoder.device, second_starts)).float().cpu()
    return relative_error(actual, expected)


def encode_plainly(weights: DebertaWeights, text: list[int], second_start: int) -> torch.Tensor:
    """Compute the hidden states of one text by the definition: float32 [tokens, hidden].

    ``second_start``: where the second text of a pair begins; 0: it is one text.
    """
    config, names, count = weights.sizes, weights.names, len(text)
    distances = weights.distance_embeddings()
    positions = torch.arange(count)
    rows = distance_rows(config)[positions[:, None] - positions + config.max_length - 1]

    def normalize(x: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + config.eps).sqrt() * norm.weight + norm.bias

    def project(x: torch.Tensor, name: str, out: int) -> torch.Tensor:
        weight, bias = weights.read_affine(name, out, x.shape[-1])
        return x @ weight.T + bias

    def attend(x: torch.Tensor, layer: int, start: str) -> torch.Tensor:
        """Compute attention of the text to itself: [tokens, hidden] -> [tokens, hidden]."""
        q, k, v = (
            project(x, start + name, config.hidden_size).view(count, config.heads, -1)
            for name in (names.query, names.key, names.value)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k)
        projections = weights.distance_projections(layer, distances)
        if projections.keys is not None:
            scores = scores + torch.einsum("qhd,hqkd->hqk", q, projections.keys[:, rows])
        if projections.queries is not None:
            scores = scores + torch.einsum("khd,hqkd->hqk", k, projections.queries[:, rows])
        shares = (scores / math.sqrt(q.shape[-1] * config.score_terms)).softmax(-1)
        return torch.einsum("hqk,khd->qhd", shares, v).reshape(count, config.hidden_size)

    words = weights.checkpoint.view_tensor(weights.prefix + bert.WORD_EMBEDDINGS, config.vocab_size, config.hidden_size)
    x, added, second_type = words[text].float(), weights.type_and_position_embeddings(), weights.second_type()
    if added is not None:
        x = x + added[:count]
    if second_start and second_type is not None:
        x[second_start:] += second_type
    embeddings = x = normalize(x, weights.read_norm("embeddings.LayerNorm"))
    for layer in range(config.layers):
        start = names.layer.format(layer)
        x = x + project(attend(x, layer, start), start + names.output, config.hidden_size)
        x = normalize(x, weights.read_norm(start + names.attention_norm))
        up = ACTIVATION_FUNCTIONS[config.activation](project(x, start + names.up, config.intermediate_size))
        x = normalize(x + project(up, start + names.down, config.hidden_size), weights.read_norm(start + names.norm))
        convolution = weights.convolution() if layer == 0 else None
        if convolution is not None:
            side = convolution.weight.shape[-1] // 2
            windows = F.pad(embeddings, (0, 0, side, side)).unfold(0, 2 * side + 1, 1)  # [tokens, hidden, kernel]
            grouped = windows.reshape(count, convolution.groups, -1, 2 * side + 1)
            kernels = convolution.weight.view(convolution.groups, -1, *convolution.weight.shape[1:])
            y = torch.einsum("tgik,goik->tgo", grouped, kernels).reshape(count, -1) + convolution.bias
            x = normalize(x + ACTIVATION_FUNCTIONS[convolution.activation](y), convolution.norm)
    return x
