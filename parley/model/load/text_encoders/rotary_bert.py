"""Loads NomicBERT, GTE and jina-embeddings-v3, shaped as BERT with rotary positions, and checks each one.

The feed-forward layers of NomicBERT and GTE are gated. Both are read by Transformers' configs and tensor names and by
those that came with the code of their publishers, which NomicBERT's first releases, GTE's (model type ``new``) and
Snowflake's Arctic have. A config that asks for anything else is refused, never guessed at. The numeric check runs a
plain float32 forward pass, written from the definitions (arXiv 2402.01613, section 3; arXiv 2407.19669, section 2), one
text at a time, on the unmerged weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from parley.model.checkpoint.files import Checkpoint, LoadError
from parley.model.load.numeric_check.probe_texts import probe_texts, refuse_large_error, relative_error
from parley.model.load.text_encoders.bert import MAX_POSITIONS
from parley.model.load.text_encoders.encoder_tensors import TypedEncoderTensors
from parley.model.load.text_encoders.modern_bert import MAX_LAYERS, rotate_plainly
from parley.model.networks.activations import ACTIVATION_FUNCTIONS, GELU, GELU_TANH, SILU, find_activation
from parley.model.networks.encoder import EncoderLinear, PackedTexts
from parley.model.networks.encoder_mixtures import EncoderMixture
from parley.model.networks.rotary_encoder import RotaryEncoder, RotaryEncoderConfig, RotaryEncoderLayer

NOMIC, GTE, PUBLISHED_GTE, JINA = "nomic_bert", "gte", "new", "jina_embeddings_v3"
ROTARY_BERT_TYPES = (NOMIC, GTE, PUBLISHED_GTE, JINA)
GATED_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}  # NomicBERT's names of gated layers, to their activations

# NomicBERT's first configs have GPT-2's names
CONFIG_SYNONYMS = {"n_embd": "hidden_size", "n_inner": "intermediate_size", "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers", "activation_function": "hidden_act", "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta", "max_trained_positions": "max_position_embeddings"}  # fmt: skip
CONFIG_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 1,
}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    NOMIC: {"hidden_act": "silu", "rope_theta": 1_000.0, "max_position_embeddings": 2048, "type_vocab_size": 2},
    GTE: {"hidden_act": "gelu", "rope_theta": 160_000.0, "max_position_embeddings": 8192},
    PUBLISHED_GTE: {"hidden_act": "gelu", "rope_theta": 10_000.0, "max_position_embeddings": 2048},
    JINA: {"hidden_act": "gelu", "rope_theta": 20_000.0, "max_position_embeddings": 8194, "layer_norm_eps": 1e-5},
}
MAX_EXPERTS = 1 << 10
# The accepted values of these members; another value is another computation
ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "prenorm": (False,),
    "use_rms_norm": (False,),
    "parallel_block": (False,),
    "rotary_emb_fraction": (1.0,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (),
    "causal": (False,),
    "position_embedding_type": ("rope",),
    "layer_norm_type": ("layer_norm",),
    "pack_qkv": (True,),
    "logn_attention_scale": (False,),
}
ONLY_MIXTURE_VALUES: dict[str, tuple[Any, ...]] = {
    "moe_normalize_expert_weights": (False,),
    "expert_choice_router": (False,),
    "num_shared_experts": (0,),
}


@dataclass(frozen=True)
class RotaryBertTensorNames:
    """The names of tensors. ``qkv``, ``up``: of the parts of one layer; ``gate``: of the half that is activated, or ""
    if it is the second half of ``up``, or if there is no other half."""

    embedding_norm: str
    layer: str
    qkv: tuple[str, ...]
    output: str
    attention_norm: str
    gate: str
    up: str
    down: str
    norm: str


TRANSFORMERS_NAMES = RotaryBertTensorNames(
    embedding_norm="embeddings.LayerNorm",
    layer="layers.{}.",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    norm="post_mlp_layernorm",
)
NOMIC_NAMES = RotaryBertTensorNames(
    embedding_norm="emb_ln",
    layer="encoder.layers.{}.",
    qkv=("attn.Wqkv",),
    output="attn.out_proj",
    attention_norm="norm1",
    gate="mlp.fc12",
    up="mlp.fc11",
    down="mlp.fc2",
    norm="norm2",
)
JINA_NAMES = replace(NOMIC_NAMES, qkv=("mixer.Wqkv",), output="mixer.out_proj", gate="", up="mlp.fc1", down="mlp.fc2")
# Of nomic-embed-text-v2, whose feed-forward layers are not gated, and every second one is a mixture of experts
NOMIC_MIXTURE_NAMES = replace(NOMIC_NAMES, gate="", up="mlp.fc1")
ROUTER, EXPERT_UPS, EXPERT_DOWNS, EXPERT_BIAS = (
    "mlp." + name for name in ("router.layer.weight", "experts.mlp.w1", "experts.mlp.w2", "experts.bias")
)
GTE_NAMES = RotaryBertTensorNames(
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer.{}.",
    qkv=("attention.qkv_proj",),
    output="attention.o_proj",
    attention_norm="attn_ln",
    gate="",
    up="mlp.up_gate_proj",
    down="mlp.down_proj",
    norm="mlp_ln",
)


def read_rotary_config(config: dict[str, Any]) -> RotaryEncoderConfig:
    """Read the encoder's sizes from the content of config.json. Raises LoadError."""
    kind = config["model_type"]
    defaults = CONFIG_DEFAULTS | FAMILY_DEFAULTS[kind]
    fields = {CONFIG_SYNONYMS.get(name, name): value for name, value in config.items()}
    values = {name: default if fields.get(name) is None else fields[name] for name, default in defaults.items()}
    sizes = [name for name, default in defaults.items() if isinstance(default, int)]
    minimums = {"type_vocab_size": 0}
    invalid = [name for name in sizes if type(values[name]) is not int or values[name] < minimums.get(name, 1)]
    if type(fields.get("vocab_size")) is not int:
        invalid.append("vocab_size")
    if not invalid and values["max_position_embeddings"] > MAX_POSITIONS:
        invalid.append("max_position_embeddings")
    if not invalid and values["hidden_size"] % (2 * values["num_attention_heads"]):
        invalid.append("hidden_size")
    if invalid:
        raise LoadError(f"config.json has no valid {invalid[0]} for a {kind} model.")
    name = values["hidden_act"]
    activation = find_activation(GATED_ACTIVATIONS.get(str(name), name), (SILU, GELU, GELU_TANH))
    if activation is None:
        raise LoadError(f"A {kind} model with the activation {values['hidden_act']} is not supported.")
    if fields.get("head_dim") not in (None, values["hidden_size"] // values["num_attention_heads"]):
        raise LoadError(f"A {kind} model with heads of {fields['head_dim']} numbers is not supported.")
    for name, allowed in ONLY_VALUES.items():
        if fields.get(name) is not None and fields[name] not in allowed:
            raise LoadError(f"A {kind} model with {name} {fields[name]} is not supported.")
    theta, divisor = _read_angles(fields, kind, values)
    experts, experts_per_token, step = _read_mixture(fields, kind)
    return RotaryEncoderConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        heads=values["num_attention_heads"],
        local_layers=(False,) * min(values["num_hidden_layers"], MAX_LAYERS),
        eps=float(values["layer_norm_eps"]),
        max_length=values["max_position_embeddings"],
        reach=values["max_position_embeddings"],
        global_theta=theta,
        local_theta=theta,
        activation=activation,
        angle_divisor=divisor,
        normalizes_sums=True,
        is_gated=kind != JINA and not experts,
        experts=experts,
        experts_per_token=experts_per_token,
        mixture_step=step,
    )


def _read_mixture(fields: dict[str, Any], kind: str) -> tuple[int, int, int]:
    """Return the numbers of experts, of those that a token uses, and of layers from one mixture to the next; zeros
    without mixtures. Raises LoadError."""
    experts, experts_per_token, step = (
        fields.get(name, 0) for name in ("num_experts", "moe_top_k", "moe_every_n_layers")
    )
    if not experts:
        return 0, 0, 0
    if kind != NOMIC or not step:
        raise LoadError(f"A {kind} model with num_experts {experts} is not supported.")
    for name, value, maximum in (
        ("num_experts", experts, MAX_EXPERTS),
        ("moe_top_k", experts_per_token, experts),
        ("moe_every_n_layers", step, MAX_LAYERS),
    ):
        if type(value) is not int or not 1 <= value <= maximum:
            raise LoadError(f"config.json has no valid {name} for a {kind} model.")
    for name, allowed in ONLY_MIXTURE_VALUES.items():
        if fields.get(name) is not None and fields[name] not in allowed:
            raise LoadError(f"A {kind} model with {name} {fields[name]} is not supported.")
    return experts, experts_per_token, step


def _read_angles(fields: dict[str, Any], kind: str, values: dict[str, Any]) -> tuple[float, float]:
    """Return the base of the rotary angles and their divisor. Raises LoadError.

    ``ntk`` multiplies the base by its factor and divides the angles by its 2/d-th power (d: numbers of a head).
    ``dynamic`` scales only beyond ``max_position_embeddings``, where no text is computed.
    """
    rope = fields.get("rope_parameters") or {}
    scaling = fields.get("rope_scaling") or {}
    theta = rope.get("rope_theta", values["rope_theta"])
    kinds = {part.get("rope_type", part.get("type", "default")) for part in (rope, scaling)} - {"default", "dynamic"}
    factor = scaling.get("factor", rope.get("factor", 1.0)) if kinds else 1.0
    numbers_valid = all(isinstance(number, int | float) and number > 0 for number in (theta, factor))
    if not kinds <= {"ntk"} or scaling.get("mixed_b") is not None or not numbers_valid:
        raise LoadError(f"A {kind} model with rotary positions scaled by {scaling or rope} is not supported.")
    width = values["hidden_size"] // values["num_attention_heads"]
    return float(theta * factor), float(factor ** (2 / width))


class RotaryBertWeights(TypedEncoderTensors):
    """Reads the parts of an encoder from a checkpoint, by any of the families' names. Raises LoadError."""

    def __init__(self, checkpoint: Checkpoint, config: dict[str, Any], device: torch.device):
        self.config = read_rotary_config(config)
        default_types = (CONFIG_DEFAULTS | FAMILY_DEFAULTS[config["model_type"]])["type_vocab_size"]
        types = default_types if config.get("type_vocab_size") is None else config["type_vocab_size"]
        super().__init__(checkpoint, device, self.config.vocab_size, self.config.hidden_size, types)
        is_nomic = config["model_type"] == NOMIC
        self.attention_bias, self.up_bias, self.down_bias = (
            bool(config.get(name, not is_nomic and (name != "mlp_fc1_bias" or not self.config.is_gated)))
            for name in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
        )
        candidates = [
            names
            for names in (NOMIC_NAMES, GTE_NAMES, JINA_NAMES)
            if f"{self.prefix}{names.layer.format(0)}{names.output}.weight" in checkpoint
        ]
        self.names = candidates[0] if candidates else TRANSFORMERS_NAMES
        if self.config.experts:
            self.names = NOMIC_MIXTURE_NAMES
        last_layer = self.names.layer.format(self.config.layers - 1)
        self.require_last_layer(f"{last_layer}{self.names.output}.weight", self.config.layers)

    def read_qkv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight [3 * hidden, hidden] and bias [3 * hidden] of query, key and value."""
        hidden, start = self.config.hidden_size, self.names.layer.format(layer)
        out = 3 * hidden // len(self.names.qkv)
        parts = [self.read_affine(start + name, out, hidden, self.attention_bias) for name in self.names.qkv]
        return torch.cat([weight for weight, _ in parts]), torch.cat([bias for _, bias in parts])

    def read_gate_and_up(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return weight [intermediate, hidden] and bias [intermediate] of the activated half and of the other, if there
        is one."""
        hidden = self.config.hidden_size
        intermediate = self.config.intermediate_size
        start = self.names.layer.format(layer)
        if not self.config.is_gated:
            return [self.read_affine(start + self.names.up, intermediate, hidden, self.up_bias)]
        if self.names.gate:
            halves = (self.names.gate, self.names.up)
            return [self.read_affine(start + name, intermediate, hidden, self.up_bias) for name in halves]
        weight, bias = self.read_affine(start + self.names.up, 2 * intermediate, hidden, self.up_bias)
        return [(weight[intermediate:], bias[intermediate:]), (weight[:intermediate], bias[:intermediate])]

    def read_experts(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the router [experts, hidden], the weights of experts [experts, intermediate, hidden] before and after
        the activation, and the bias [hidden], which GGUF files lack."""
        config, start = self.config, self.names.layer.format(layer)
        router = self.read_tensor(start + ROUTER, config.experts, config.hidden_size)
        ups, downs = (
            self.read_tensor(start + name, config.experts * config.intermediate_size, config.hidden_size).view(
                config.experts, config.intermediate_size, config.hidden_size
            )
            for name in (EXPERT_UPS, EXPERT_DOWNS)
        )
        has_bias = self.prefix + start + EXPERT_BIAS in self.checkpoint
        bias = (
            self.read_tensor(start + EXPERT_BIAS, config.hidden_size)
            if has_bias
            else router.new_zeros(config.hidden_size)
        )
        return router, ups, downs, bias

    def read_mixture(self, layer: int) -> EncoderMixture:
        """Return the experts of one layer."""
        router, ups, downs, bias = self.read_experts(layer)
        return EncoderMixture(
            router=EncoderLinear(router, router.new_zeros(len(router))),
            ups=[EncoderLinear(up, up.new_zeros(len(up))) for up in ups],
            downs=[EncoderLinear(down.T, torch.zeros_like(bias)) for down in downs],
            bias=bias,
            experts_per_token=self.config.experts_per_token,
        )

    def read_layer(self, layer: int) -> RotaryEncoderLayer:
        """Return one layer."""
        hidden, names, start = self.config.hidden_size, self.names, self.names.layer.format(layer)
        parts: dict[str, Any] = {
            "attention_norm": self.read_norm(start + names.attention_norm),
            "qkv": EncoderLinear(*self.read_qkv(layer)),
            "output": EncoderLinear(*self.read_affine(start + names.output, hidden, hidden, self.attention_bias)),
            "norm": self.read_norm(start + names.norm),
        }
        if self.config.has_mixture(layer):
            return RotaryEncoderLayer(**parts, mixture=self.read_mixture(layer))
        halves = self.read_gate_and_up(layer)
        return RotaryEncoderLayer(
            **parts,
            up=EncoderLinear(torch.cat([weight for weight, _ in halves]), torch.cat([bias for _, bias in halves])),
            down=EncoderLinear(
                *self.read_affine(start + names.down, hidden, self.config.intermediate_size, self.down_bias)
            ),
        )


def load_rotary_bert(
    checkpoint: Checkpoint, config: dict[str, Any], device: torch.device, progress: Callable[[float], None]
) -> RotaryEncoder:
    """Load the encoder and check it numerically. Raises LoadError."""
    weights = RotaryBertWeights(checkpoint, config, device)
    layers = []
    for layer in range(weights.config.layers):
        layers.append(weights.read_layer(layer))
        progress((layer + 1) / weights.config.layers)
    words, second_type = weights.read_embeddings()
    norm = weights.read_norm(weights.names.embedding_norm)
    encoder = RotaryEncoder(weights.config, words, norm, layers, None, second_type)
    refuse_large_error(_encoder_deviation(encoder, RotaryBertWeights(checkpoint, config, torch.device("cpu"))))
    return encoder


def check_rotary_bert(checkpoint: Checkpoint, config: dict[str, Any]) -> RotaryEncoderConfig:
    """Check names, shapes and types of all tensors without reading any, and return the sizes. Raises LoadError."""
    weights = RotaryBertWeights(checkpoint, config, torch.device("meta"))
    for layer in range(weights.config.layers):
        weights.read_layer(layer)
    weights.read_embeddings()
    weights.read_norm(weights.names.embedding_norm)
    return weights.config


@torch.inference_mode()
def _encoder_deviation(encoder: RotaryEncoder, weights: RotaryBertWeights) -> float:
    """Return the relative error (L2) of the hidden states of two texts packed together, against ``encode_plainly``."""
    config = weights.config
    texts = probe_texts(config.vocab_size, config.max_length)
    second_starts = [0, len(texts[1]) // 2]
    expected = encode_plainly(weights, texts, second_starts)
    actual = encoder.encode_packed(PackedTexts(texts, encoder.device, second_starts)).float().cpu()
    return relative_error(actual, expected)


def encode_plainly(weights: RotaryBertWeights, texts: list[list[int]], second_starts: list[int]) -> torch.Tensor:
    """Compute the hidden states of texts by the definition: float32 [tokens of all, hidden].

    ``second_starts``: where the second text of each pair begins; 0: it is one text.
    """
    config, names = weights.config, weights.names
    words, second_type = weights.read_embeddings()

    def normalize(x: torch.Tensor, name: str) -> torch.Tensor:
        norm, centred = weights.read_norm(name), x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + config.eps).sqrt() * norm.weight + norm.bias

    def activate(x: torch.Tensor) -> torch.Tensor:
        if config.activation == SILU:
            return x * torch.sigmoid(x)
        return ACTIVATION_FUNCTIONS[config.activation](x)

    def attend(qkv: torch.Tensor) -> torch.Tensor:
        """Compute attention of one text to itself: [tokens, 3 * hidden] -> [tokens, hidden]."""
        q, k, v = qkv.view(len(qkv), 3, config.heads, -1).unbind(1)
        q, k = (rotate_plainly(x, config.global_theta, config.angle_divisor) for x in (q, k))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(qkv), -1)

    rows = []
    for text, second_start in zip(texts, second_starts, strict=True):
        x = words[text]
        if second_start and second_type is not None:
            x[second_start:] += second_type
        x = normalize(x, names.embedding_norm)
        for layer in range(config.layers):
            start = names.layer.format(layer)
            weight, bias = weights.read_qkv(layer)
            attended = attend(x @ weight.T + bias)
            weight, bias = weights.read_affine(
                start + names.output, config.hidden_size, config.hidden_size, weights.attention_bias
            )
            x = normalize(x + attended @ weight.T + bias, start + names.attention_norm)
            if config.has_mixture(layer):
                x = normalize(x + _mix_plainly(x, weights, layer, activate), start + names.norm)
                continue
            activated, *others = (x @ weight.T + bias for weight, bias in weights.read_gate_and_up(layer))
            inner = math.prod(others, start=activate(activated))
            weight, bias = weights.read_affine(
                start + names.down, config.hidden_size, config.intermediate_size, weights.down_bias
            )
            x = normalize(x + inner @ weight.T + bias, start + names.norm)
        rows.append(x)
    return torch.cat(rows)


def _mix_plainly(
    x: torch.Tensor, weights: RotaryBertWeights, layer: int, activate: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Compute a mixture of experts by the definition, with all experts for all tokens: [T, hidden] -> the same."""
    router, ups, downs, bias = weights.read_experts(layer)
    shares = (x @ router.T).softmax(-1)
    chosen = shares.topk(weights.config.experts_per_token, -1).indices
    kept_shares = torch.zeros_like(shares).scatter(-1, chosen, shares.gather(-1, chosen))
    inner = activate(torch.einsum("th,efh->tef", x, ups))
    return torch.einsum("te,tef,efh->th", kept_shares, inner, downs) + bias
