"""The config of a Llama-shaped model, read from config.json without importing Transformers (which takes seconds).

Transformers fills missing fields with defaults of each model type; the same defaults are listed here. A config that
asks for anything unknown here is declared unfusable, never guessed at: such a model runs through Transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch


class Unfusable(Exception):
    """The model has no fused decoder. The message gives the reason, as the end of a sentence."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the first ``rotary`` dimensions of a head.

    ``kind``: default, linear (all frequencies divided by ``factor``), llama3 (only the slow ones, see
    ``inverse_frequencies``), or longrope (each divided by a factor of its own: by ``long_factors`` in sequences of more
    than ``original_length`` tokens, by ``short_factors`` in others). Cosines and sines are multiplied by ``scale``.
    ``mrope_section``: how many frequencies belong to time, height and width (M-RoPE), in blocks or interleaved; empty:
    positions have one axis.
    """

    theta: float
    rotary: int
    kind: str = "default"
    factor: float = 1.0
    low_freq: float = 1.0
    high_freq: float = 4.0
    original_length: int = 8192
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    scale: float = 1.0
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    @property
    def long_rope_after(self) -> float:
        """The most tokens of a sequence that uses the short factors; inf if there is one set of frequencies."""
        return self.original_length if self.kind == "longrope" else math.inf

    def frequency_axes(self) -> torch.Tensor:
        """Return the axis of M-RoPE whose position turns each pair of dimensions: int64 [rotary / 2], 0 to 2.

        Blocks: Qwen2-VL (arXiv 2409.12191). Interleaved: Qwen3-VL, where height takes frequencies 1, 4, 7 … and width
        2, 5, 8 …, as many as the section says, and time all others.
        """
        if not self.mrope_interleaved:
            return torch.arange(3).repeat_interleave(torch.tensor(self.mrope_section))
        axes = torch.zeros(self.rotary // 2, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * self.mrope_section[axis] : 3] = axis
        return axes

    def inverse_frequencies(self, *, is_long: bool = False) -> torch.Tensor:
        """Return the radians per token of each pair of dimensions: float32 [rotary / 2].

        RoFormer (arXiv 2104.09864) section 3.4.2; linear: arXiv 2306.15595; llama3: the Llama 3.1 reference code;
        longrope: arXiv 2402.13753, with ``is_long`` for sequences of more than ``original_length`` tokens.
        """
        exponents = torch.arange(0, self.rotary, 2, dtype=torch.int64).float() / self.rotary
        if self.kind == "longrope":
            factors = torch.tensor(self.long_factors if is_long else self.short_factors)
            return 1.0 / (factors * self.theta**exponents)
        inverse = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return inverse / self.factor
        if self.kind == "llama3":
            turns = self.original_length * inverse / (2 * torch.pi)  # full turns within the original context
            smooth = ((turns - self.low_freq) / (self.high_freq - self.low_freq)).clamp(0, 1)
            return (1 - smooth) * inverse / self.factor + smooth * inverse
        return inverse


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and variations of a Llama-shaped decoder. ``windows[i]``: sliding window of layer i, None for full."""

    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    max_len: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    merged: bool  # the checkpoint stores qkv_proj and gate_up_proj merged

    @property
    def layer_count(self) -> int:
        """The number of layers."""
        return len(self.windows)


# Transformers' defaults for fields missing from config.json, and values fixed by the type. "heads": same as heads.
_COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "num_key_value_heads": "heads",
    "head_dim": None,
}
_LLAMA_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_QWEN_SIZES = _LLAMA_SIZES | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_QWEN_VL_SIZES = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
_QWEN2_VL_DEFAULTS = (
    _COMMON_DEFAULTS
    | _QWEN_VL_SIZES
    | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 4096, "max_position_embeddings": 32768}
)
_MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON_DEFAULTS | _LLAMA_SIZES | {"max_position_embeddings": 2048},
    "mistral": _COMMON_DEFAULTS
    | _LLAMA_SIZES
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "qwen2": _COMMON_DEFAULTS | _QWEN_SIZES | {"sliding_window": 4096, "max_position_embeddings": 32768},
    "qwen2_vl_text": _QWEN2_VL_DEFAULTS,
    "qwen2_5_vl_text": _QWEN2_VL_DEFAULTS,
    "qwen3": _COMMON_DEFAULTS
    | _QWEN_SIZES
    | {"sliding_window": 4096, "max_position_embeddings": 32768, "head_dim": 128},
    "qwen3_vl_text": _COMMON_DEFAULTS
    | _QWEN_SIZES
    | {"rope_theta": 5e5, "max_position_embeddings": 128000, "head_dim": 128},
    "phi3": _COMMON_DEFAULTS
    | _LLAMA_SIZES
    | {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
}
FUSABLE_TYPES = frozenset(_MODEL_DEFAULTS)
# The language models with M-RoPE: whether axes are interleaved (which no field of the config decides), and the section
# if the config has none.
_MROPE_TYPES = {
    "qwen2_vl_text": (False, (16, 24, 24)),
    "qwen2_5_vl_text": (False, (16, 24, 24)),
    "qwen3_vl_text": (True, (24, 20, 20)),
}
# Language models of multimodal models whose layers are those of another type.
_SAME_LAYERS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}


def read_decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """Read the config of a fused decoder. Raises Unfusable."""
    kind = config["model_type"]
    if kind not in FUSABLE_TYPES:
        raise Unfusable(f"model type {kind} has no fused decoder")
    fields = _MODEL_DEFAULTS[kind] | config
    mrope = _MROPE_TYPES.get(kind)
    kind = _SAME_LAYERS.get(kind, kind)
    if fields["hidden_act"] != "silu":
        raise Unfusable(f"its activation is {fields['hidden_act']}")
    hidden, heads, layers = (
        _read_size(fields, name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    if fields["num_key_value_heads"] in ("heads", None):
        fields["num_key_value_heads"] = heads
    kv_heads = _read_size(fields, "num_key_value_heads")
    head_dim = hidden // heads if fields["head_dim"] is None else _read_size(fields, "head_dim")
    if heads % kv_heads or head_dim % 2:
        raise Unfusable(f"{heads} heads of {head_dim} over {kv_heads} key/value heads do not divide")
    return DecoderConfig(
        vocab=_read_size(fields, "vocab_size"),
        hidden=hidden,
        intermediate=_read_size(fields, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=_read_number(fields, "rms_norm_eps"),
        rope=_read_rope(fields, head_dim) if mrope is None else _read_mrope(fields, head_dim, *mrope),
        windows=_read_windows(kind, fields, layers),
        max_len=_read_size(fields, "max_position_embeddings"),
        tied=bool(fields["tie_word_embeddings"]),
        qkv_bias=kind == "qwen2" or (kind in ("llama", "qwen3") and bool(fields["attention_bias"])),
        o_bias=kind in ("llama", "qwen3") and bool(fields["attention_bias"]),
        mlp_bias=kind == "llama" and bool(fields["mlp_bias"]),
        qk_norm=kind == "qwen3",
        merged=kind == "phi3",
    )


def _read_size(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 1:
        raise Unfusable(f"its config gives {name} as {value!r}")
    return value


def _read_number(fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise Unfusable(f"its config gives {name} as {value!r}")
    return float(value)


def _read_windows(kind: str, fields: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    window = fields.get("sliding_window")
    if kind in ("qwen2", "qwen3"):
        if not fields.get("use_sliding_window", False):
            window = None
        layer_types = fields.get("layer_types")
        if layer_types is None:
            first = fields.get("max_window_layers", 28)
            layer_types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
        if len(layer_types) != layers or not set(layer_types) <= {"full_attention", "sliding_attention"}:
            raise Unfusable("its layer_types are not one of full_attention and sliding_attention per layer")
        windows = [window if type_ == "sliding_attention" else None for type_ in layer_types]
    elif kind == "llama" or window is None:
        windows = [None] * layers
    else:
        windows = [window] * layers
    if any(size is not None and (type(size) is not int or size < 1) for size in windows):
        raise Unfusable(f"its sliding_window is {window!r}")
    return tuple(windows)


def _read_rope(fields: dict[str, Any], head_dim: int) -> RopeConfig:
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
        raise Unfusable("its rotary embedding differs between layers")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = parameters.get("rope_theta") or fields["rope_theta"]
    rotary_share = parameters.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    rotary = int(head_dim * rotary_share)
    if rotary < 2 or rotary % 2 or rotary > head_dim:
        raise Unfusable(f"it rotates {rotary} of {head_dim} dimensions")
    try:
        if kind in ("default", "mrope"):
            return RopeConfig(float(theta), rotary)
        if kind == "linear":
            return RopeConfig(float(theta), rotary, "linear", float(parameters["factor"]))
        if kind == "llama3":
            return RopeConfig(
                float(theta),
                rotary,
                "llama3",
                float(parameters["factor"]),
                float(parameters["low_freq_factor"]),
                float(parameters["high_freq_factor"]),
                _read_original_length(fields, parameters),
            )
        if kind == "longrope":
            return _read_longrope(fields, parameters, float(theta), rotary)
    except (KeyError, TypeError, ValueError):
        raise Unfusable(f"its {kind} rotary scaling is incomplete") from None
    raise Unfusable(f"its rotary scaling is {kind}")


def _read_mrope(
    fields: dict[str, Any], head_dim: int, is_interleaved: bool, default_section: tuple[int, ...]
) -> RopeConfig:
    """Read a rotary embedding whose positions have three axes. Raises Unfusable."""
    rope = _read_rope(fields, head_dim)
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    section = parameters.get("mrope_section", default_section)
    pairs = rope.rotary // 2
    is_list = isinstance(section, list | tuple) and all(type(size) is int and size >= 0 for size in section)
    if not is_list or len(section) != 3 or (sum(section) != pairs and not is_interleaved):
        raise Unfusable(f"its mrope_section is {section!r}, but it rotates {pairs} pairs of dimensions")
    return replace(rope, mrope_section=tuple(section), mrope_interleaved=is_interleaved)


def _read_original_length(fields: dict[str, Any], parameters: dict[str, Any]) -> int:
    """Return the context in tokens that the model had before its rotary embedding was scaled."""
    original = fields.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    return int(original or fields["max_position_embeddings"])


def _read_longrope(fields: dict[str, Any], parameters: dict[str, Any], theta: float, rotary: int) -> RopeConfig:
    """Read a longrope embedding. Raises Unfusable, and KeyError, TypeError or ValueError if it is incomplete."""
    original = _read_original_length(fields, parameters)
    short, long = (tuple(map(float, parameters[name])) for name in ("short_factor", "long_factor"))
    if {len(short), len(long)} != {rotary // 2}:
        raise Unfusable(f"its longrope factors are {len(short)} and {len(long)}, but it rotates {rotary // 2} pairs")
    scale = parameters.get("attention_factor")
    if scale is None:
        factor = parameters.get("factor") or fields["max_position_embeddings"] / original
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        theta, rotary, "longrope", original_length=original, short_factors=short, long_factors=long, scale=float(scale)
    )
