"""Loads ModernBERT and checks each loaded encoder numerically.

A config that asks for anything else is refused, never guessed at. The numeric check runs a plain float32 forward pass,
written from the definition (arXiv 2412.13663, section 2.1; rotary positions: arXiv 2104.09864), one text at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.load.numeric_check.probe_texts import probe_texts, refuse_large_error, relative_error
from parley.model.load.text_encoders.bert import MAX_POSITIONS
from parley.model.load.text_encoders.encoder_tensors import EncoderTensors
from parley.model.networks.activations import ACTIVATION_FUNCTIONS, GELU, GELU_TANH, find_activation
from parley.model.networks.encoder import EncoderLinear, LayerNorm, PackedTexts
from parley.model.networks.rotary_encoder import RotaryEncoder, RotaryEncoderConfig, RotaryEncoderLayer

MODEL_TYPE = "modernbert"
EMBEDDINGS = "embeddings.tok_embeddings.weight"
MAX_LAYERS = 1 << 16  # a config may claim any number; no checkpoint has more
LAYER_KINDS = {"full_attention": False, "sliding_attention": True}
CONFIG_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "max_position_embeddings": 8192,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "norm_eps": 1e-5,
    "hidden_activation": "gelu",
}
PROBE_EXCESS, SHORT_PROBE = 20, 5  # tokens of the long probe beyond the reach of local layers, and of the short probe


def read_modern_config(config: dict[str, Any]) -> RotaryEncoderConfig:
    """Read the encoder's sizes from the content of config.json. Raises LoadError."""
    values = {name: default if config.get(name) is None else config[name] for name, default in CONFIG_DEFAULTS.items()}
    sizes = [name for name, default in CONFIG_DEFAULTS.items() if isinstance(default, int)]
    invalid = [name for name in sizes if type(values[name]) is not int or values[name] < 1]
    if type(config.get("vocab_size")) is not int:
        invalid.append("vocab_size")
    if not invalid and values["max_position_embeddings"] > MAX_POSITIONS:
        invalid.append("max_position_embeddings")
    if not invalid and values["hidden_size"] % (2 * values["num_attention_heads"]):
        invalid.append("hidden_size")
    if invalid:
        raise LoadError(f"config.json has no valid {invalid[0]} for a {MODEL_TYPE} model.")
    activation = find_activation(values["hidden_activation"], (GELU, GELU_TANH))
    if activation is None:
        raise LoadError(f"A {MODEL_TYPE} model with the activation {values['hidden_activation']} is not supported.")
    thetas = _read_thetas(config, values)
    return RotaryEncoderConfig(
        vocab_size=config["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        heads=values["num_attention_heads"],
        local_layers=_read_layer_kinds(config, values),
        eps=float(values["norm_eps"]),
        max_length=values["max_position_embeddings"],
        reach=values["local_attention"] // 2,
        global_theta=thetas["full_attention"],
        local_theta=thetas["sliding_attention"],
        activation=activation,
    )


def _read_thetas(config: dict[str, Any], values: dict[str, Any]) -> dict[str, float]:
    """Return the base of the rotary angles of both kinds of layers. Raises LoadError for any but plain angles."""
    thetas = {"full_attention": values["global_rope_theta"], "sliding_attention": values["local_rope_theta"]}
    parameters = config.get("rope_parameters") or {}
    scalings = [config.get("rope_scaling") or {}]
    for kind in thetas:
        rope = parameters.get(kind) or {}
        scalings.append(rope)
        thetas[kind] = rope.get("rope_theta", thetas[kind])
    scaled = [scaling for scaling in scalings if scaling.get("rope_type", "default") != "default"]
    if scaled or any(not isinstance(theta, int | float) or theta <= 0 for theta in thetas.values()):
        raise LoadError(f"A {MODEL_TYPE} model with scaled rotary positions is not supported.")
    return {kind: float(theta) for kind, theta in thetas.items()}


def _read_layer_kinds(config: dict[str, Any], values: dict[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it attends within a local window only. Raises LoadError."""
    kinds = config.get("layer_types")
    if kinds is None:
        every, count = values["global_attn_every_n_layers"], min(values["num_hidden_layers"], MAX_LAYERS)
        return tuple(bool(layer % every) for layer in range(count))
    if len(kinds) != values["num_hidden_layers"] or not set(kinds) <= LAYER_KINDS.keys():
        raise LoadError(f"config.json has no valid layer_types for a {MODEL_TYPE} model.")
    return tuple(LAYER_KINDS[kind] for kind in kinds)


class ModernBertWeights(EncoderTensors):
    """Reads the parts of a ModernBERT from a checkpoint. Raises LoadError."""

    def __init__(self, checkpoint: Checkpoint, config: dict[str, Any], device: torch.device):
        self.config = read_modern_config(config)
        super().__init__(checkpoint, device, EMBEDDINGS)
        self.attention_bias, self.mlp_bias, self.norm_bias = (
            bool(config.get(f"{part}_bias")) for part in ("attention", "mlp", "norm")
        )
        self.require_last_layer(f"layers.{self.config.layers - 1}.attn.Wqkv.weight", self.config.layers)

    def read_linear(self, name: str, out: int, width: int, has_bias: bool) -> EncoderLinear:
        """Return one linear layer."""
        return EncoderLinear(*self.read_affine(name, out, width, has_bias))

    def read_norm(self, name: str) -> LayerNorm:
        """Return one LayerNorm; its bias is zeros if it has none."""
        weight = self.read_tensor(f"{name}.weight", self.config.hidden_size)
        bias = self.read_tensor(f"{name}.bias", self.config.hidden_size) if self.norm_bias else torch.zeros_like(weight)
        return LayerNorm(weight, bias)

    def read_layer(self, layer: int) -> RotaryEncoderLayer:
        """Return one layer."""
        hidden, intermediate, start = self.config.hidden_size, self.config.intermediate_size, f"layers.{layer}."
        return RotaryEncoderLayer(
            attention_norm=self.read_norm(f"{start}attn_norm") if layer else None,
            qkv=self.read_linear(f"{start}attn.Wqkv", 3 * hidden, hidden, self.attention_bias),
            output=self.read_linear(f"{start}attn.Wo", hidden, hidden, self.attention_bias),
            norm=self.read_norm(f"{start}mlp_norm"),
            up=self.read_linear(f"{start}mlp.Wi", 2 * intermediate, hidden, self.mlp_bias),
            down=self.read_linear(f"{start}mlp.Wo", hidden, intermediate, self.mlp_bias),
        )


def load_modern_bert(
    checkpoint: Checkpoint, config: dict[str, Any], device: torch.device, progress: Callable[[float], None]
) -> RotaryEncoder:
    """Load the encoder and check it numerically. Raises LoadError."""
    weights = ModernBertWeights(checkpoint, config, device)
    layers = []
    for layer in range(weights.config.layers):
        layers.append(weights.read_layer(layer))
        progress((layer + 1) / weights.config.layers)
    encoder = RotaryEncoder(
        weights.config,
        weights.read_tensor(EMBEDDINGS, weights.config.vocab_size, weights.config.hidden_size),
        weights.read_norm("embeddings.norm"),
        layers,
        weights.read_norm("final_norm"),
    )
    refuse_large_error(_encoder_deviation(encoder, ModernBertWeights(checkpoint, config, torch.device("cpu"))))
    return encoder


def check_modern_bert(checkpoint: Checkpoint, config: dict[str, Any]) -> RotaryEncoderConfig:
    """Check names, shapes and types of all tensors without reading any, and return the sizes. Raises LoadError."""
    weights = ModernBertWeights(checkpoint, config, torch.device("meta"))
    for layer in range(weights.config.layers):
        weights.read_layer(layer)
    weights.read_tensor(EMBEDDINGS, weights.config.vocab_size, weights.config.hidden_size)
    weights.read_norm("embeddings.norm")
    weights.read_norm("final_norm")
    return weights.config


@torch.inference_mode()
def _encoder_deviation(encoder: RotaryEncoder, weights: ModernBertWeights) -> float:
    """Return the relative error (L2) of the hidden states of two texts packed together, against ``encode_plainly``."""
    config = weights.config
    lengths = [min(length, config.max_length) for length in (config.reach + PROBE_EXCESS, SHORT_PROBE)]
    texts = probe_texts(config.vocab_size, config.max_length, lengths)
    expected = torch.cat([encode_plainly(weights, text) for text in texts])
    actual = encoder.encode_packed(PackedTexts(texts, encoder.device)).float().cpu()
    return relative_error(actual, expected)


def rotate_plainly(x: torch.Tensor, theta: float, divisor: float = 1.0) -> torch.Tensor:
    """Rotate pairs of numbers of each head as complex numbers: [tokens, heads, width] -> the same."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * theta ** -(torch.arange(half) / half) / divisor
    rotated = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat((rotated.real, rotated.imag), -1)


def encode_plainly(weights: ModernBertWeights, text: list[int]) -> torch.Tensor:
    """Compute the hidden states of one text by the definition: float32 [tokens, hidden]."""
    config = weights.config
    count, width = len(text), config.hidden_size // config.heads

    def normalize(x: torch.Tensor, name: str) -> torch.Tensor:
        norm, centred = weights.read_norm(name), x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + config.eps).sqrt() * norm.weight + norm.bias

    def project(x: torch.Tensor, name: str, out: int, has_bias: bool) -> torch.Tensor:
        weight, bias = weights.read_affine(name, out, x.shape[-1], has_bias)
        return x @ weight.T + bias

    positions = torch.arange(count)
    distances = (positions[:, None] - positions).abs()
    x = weights.checkpoint.view_tensor(weights.prefix + EMBEDDINGS, config.vocab_size, config.hidden_size)[text].float()
    x = normalize(x, "embeddings.norm")
    for layer, is_local in enumerate(config.local_layers):
        start = f"layers.{layer}."
        qkv = project(
            normalize(x, f"{start}attn_norm") if layer else x, f"{start}attn.Wqkv", 3 * config.hidden_size,
            weights.attention_bias,
        )  # fmt: skip
        q, k, v = qkv.view(count, 3, config.heads, width).unbind(1)
        theta = config.local_theta if is_local else config.global_theta
        scores = torch.einsum("qhd,khd->hqk", rotate_plainly(q, theta), rotate_plainly(k, theta)) / math.sqrt(width)
        if is_local:
            scores = scores.masked_fill(distances > config.reach, -math.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, config.hidden_size)
        x = x + project(attended, f"{start}attn.Wo", config.hidden_size, weights.attention_bias)
        up = project(normalize(x, f"{start}mlp_norm"), f"{start}mlp.Wi", 2 * config.intermediate_size, weights.mlp_bias)
        active = ACTIVATION_FUNCTIONS[config.activation](up[:, : config.intermediate_size])
        x = x + project(
            active * up[:, config.intermediate_size :], f"{start}mlp.Wo", config.hidden_size, weights.mlp_bias
        )
    return normalize(x, "final_norm")
