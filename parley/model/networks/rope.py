"""The rotary position embedding of a decoder: its config, its frequencies, and how config.json states it."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, replace
from typing import Any

import torch


class Unfusable(Exception):
    """The model has no fused decoder. The message gives the reason, as the end of a sentence."""


def wrong_value(name: str, value: object) -> Unfusable:
    """Return the error for a config field with an unsupported value. A long value is cut."""
    return Unfusable(f"its config gives {name} as {reprlib.repr(value)}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the first ``rotary`` dimensions of a head.

    ``kind`` is one of

    * default,
    * linear: all frequencies are divided by ``factor``,
    * llama3: only low frequencies are divided, see ``inverse_frequencies``,
    * yarn: likewise, by ``ramp``: the last pair of dimensions whose frequency is kept, and the first whose frequency is
      divided by ``factor``; those between are blended,
    * longrope: each frequency is divided by a factor of its own, by ``long_factors`` in sequences of more than
      ``original_length`` tokens and by ``short_factors`` in others,
    * proportional: only the first ``rotated_pairs`` pairs are rotated.

    ``scale`` multiplies cosines and sines. ``mrope_section``: the numbers of frequencies for time, height and width
    (M-RoPE), in blocks or interleaved; empty: positions have one axis. ``is_interleaved``: dimension 2 i is rotated
    with 2 i + 1, else i with i + ``rotary`` / 2. ``is_reversed``: pairs are rotated by negative angles.
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
    ramp: tuple[float, float] = (0.0, 0.0)
    scale: float = 1.0
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False
    is_interleaved: bool = False
    is_reversed: bool = False
    rotated_pairs: int | None = None

    @property
    def pairs(self) -> int:
        """The number of pairs of dimensions that are rotated; they come first."""
        return self.rotary // 2 if self.rotated_pairs is None else self.rotated_pairs

    @property
    def long_rope_after(self) -> float:
        """The most tokens of a sequence that uses the short factors; inf if there is one set of frequencies."""
        return self.original_length if self.kind == "longrope" else math.inf

    def frequency_axes(self) -> torch.Tensor:
        """Return the axis of M-RoPE whose position rotates each pair of dimensions: int64 [rotary / 2], 0 to 2.

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
        yarn: arXiv 2309.00071; longrope: arXiv 2402.13753, with ``is_long`` for sequences of more than
        ``original_length`` tokens.
        """
        exponents = torch.arange(0, self.rotary, 2, dtype=torch.int64).float() / self.rotary
        if self.kind == "longrope":
            factors = torch.tensor(self.long_factors if is_long else self.short_factors)
            return 1.0 / (factors * self.theta**exponents)
        inverse = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return inverse / self.factor
        if self.kind == "proportional":
            return inverse.masked_fill(torch.arange(len(inverse)) >= self.pairs, 0.0)
        if self.kind == "llama3":
            turns = self.original_length * inverse / (2 * torch.pi)  # full turns within the original context
            smooth = ((turns - self.low_freq) / (self.high_freq - self.low_freq)).clamp(0, 1)
            return (1 - smooth) * inverse / self.factor + smooth * inverse
        if self.kind == "yarn":
            first, last = self.ramp
            smooth = 1 - ((torch.arange(self.rotary // 2).float() - first) / (last - first)).clamp(0, 1)
            return (1 - smooth) * inverse / self.factor + smooth * inverse
        return inverse


def rope_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the config's parameters of the rotary embedding. Raises Unfusable.

    Of both names, Transformers follows ``rope_scaling``, the older one.
    """
    parameters = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise wrong_value("rope_parameters", parameters)
    return parameters


def read_rope(fields: dict[str, Any], parameters: dict[str, Any], head_dim: int) -> RopeConfig:
    """Read one rotary embedding from its ``parameters`` and, where they say nothing, from the config's fields.

    Raises Unfusable.
    """
    if any(isinstance(value, dict) for value in parameters.values()):
        raise Unfusable("its rotary embedding differs between layers")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = parameters.get("rope_theta") or fields["rope_theta"]
    rotary_share = None
    if "partial_rotary_factor" in fields:  # Transformers' code of other types ignores it
        rotary_share = parameters.get("partial_rotary_factor") or fields["partial_rotary_factor"]
    rotary = fields.get("rotary_dim") or head_dim if rotary_share is None else int(head_dim * rotary_share)
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
        if kind == "yarn":
            return _read_yarn(fields, parameters, float(theta), rotary)
        if kind == "longrope":
            return _read_longrope(fields, parameters, float(theta), rotary)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        raise Unfusable(f"its {kind} rotary scaling is incomplete") from None
    raise Unfusable(f"its rotary scaling is {str(kind)[:100]}")


def resolve_alpha(fields: dict[str, Any], parameters: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the parameters of a plain rotary embedding in place of those of a dynamic one with a fixed factor alpha
    (Hunyuan). It multiplies the base by alpha to the power of d / (d - 2). Raises Unfusable."""
    kind, alpha = parameters.get("rope_type") or parameters.get("type"), parameters.get("alpha")
    if kind != "dynamic" or not alpha:
        return parameters
    theta = parameters.get("rope_theta") or fields["rope_theta"]
    try:
        return {"rope_theta": float(theta) * float(alpha) ** (head_dim / (head_dim - 2))}
    except (TypeError, ValueError, ArithmeticError):
        raise Unfusable("its dynamic rotary scaling is incomplete") from None


def rename_longrope(fields: dict[str, Any], parameters: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the parameters of Phi-3's rotary embedding under longrope's present name; it was "su" or "yarn"."""
    kind = parameters.get("rope_type") or parameters.get("type")
    return {**parameters, "rope_type": "longrope"} if kind in ("su", "yarn") else parameters


def resolve_mscale(fields: dict[str, Any], parameters: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the parameters of PhiMoE's rotary embedding with its scale under the usual name. Raises Unfusable."""
    short, long = parameters.get("short_mscale"), parameters.get("long_mscale")
    if short != long:
        raise Unfusable(f"the scales of its rotary embedding differ: {reprlib.repr(short)} and {reprlib.repr(long)}")
    return parameters if short is None else {**parameters, "attention_factor": short}


def yarn_scale(factor: float, weight: float) -> float:
    """Return YaRN's scale of attention for contexts that are ``factor`` times as long (arXiv 2309.00071, section 3.4),
    with the ``weight`` that DeepSeek adds (mscale)."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def latent_score_factor(parameters: dict[str, Any]) -> float:
    """Return the factor of scores in DeepSeek's latent attention if the rotary embedding is scaled: the square of
    YaRN's scale for mscale_all_dim. Raises Unfusable."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    weight = parameters.get("mscale_all_dim") or 0
    if kind == "default" or not weight:
        return 1.0
    try:
        return yarn_scale(float(parameters["factor"]), float(weight)) ** 2
    except (KeyError, TypeError, ValueError):
        raise Unfusable(f"its {kind} rotary scaling is incomplete") from None


def read_mrope(
    fields: dict[str, Any], head_dim: int, is_interleaved: bool, default_section: tuple[int, ...]
) -> RopeConfig:
    """Read a rotary embedding whose positions have three axes. Raises Unfusable."""
    parameters = rope_parameters(fields)
    rope = read_rope(fields, parameters, head_dim)
    section = parameters.get("mrope_section", default_section)
    pairs = rope.rotary // 2
    is_list = isinstance(section, list | tuple) and all(type(size) is int and size >= 0 for size in section)
    if not is_list or len(section) != 3 or (sum(section) != pairs and not is_interleaved):
        raise Unfusable(f"its mrope_section is {reprlib.repr(section)}, but it rotates {pairs} pairs of dimensions")
    return replace(rope, mrope_section=tuple(section), mrope_interleaved=is_interleaved)


def _read_original_length(fields: dict[str, Any], parameters: dict[str, Any]) -> int:
    """Return the context in tokens that the model had before its rotary embedding was scaled."""
    original = fields.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    return int(original or fields["max_position_embeddings"])


def _read_yarn(fields: dict[str, Any], parameters: dict[str, Any], theta: float, rotary: int) -> RopeConfig:
    """Read a YaRN embedding (arXiv 2309.00071), as Transformers does. Raises KeyError, TypeError, ValueError or
    ArithmeticError if it is incomplete."""
    original = _read_original_length(fields, parameters)
    factor = float(parameters["factor"] or fields["max_position_embeddings"] / original)
    boundaries = [
        rotary * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (float(parameters.get("beta_fast") or 32), float(parameters.get("beta_slow") or 1))
    ]
    first, last = (
        (math.floor(boundaries[0]), math.ceil(boundaries[1])) if parameters.get("truncate", True) else boundaries
    )
    first, last = max(first, 0.0), min(last, rotary - 1.0)

    scale, above, below = (parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if scale is None:
        scale = yarn_scale(factor, above) / yarn_scale(factor, below) if above and below else yarn_scale(factor, 1)
    ramp = (first, last if last != first else first + 0.001)
    return RopeConfig(theta, rotary, "yarn", factor, original_length=original, ramp=ramp, scale=float(scale))


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
