"""``DecoderFamily``: how the decoder of one model type differs from Llama. ``config_reader.py`` reads configs with it.

Fields are named as in Llama's config. A family lists the fields that Transformers reads for its type, with
Transformers' defaults; all other fields of a config are ignored, as in Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parley.model.networks.config_fields import read_number
from parley.model.networks.decoder_config import (
    PLAIN_LINEARS,
    RMS_NORMS,
    LinearLayout,
    MediaVocabulary,
    NormForm,
    QueryScaling,
)
from parley.model.networks.decoder_tensors import LLAMA_TENSORS, TensorNames
from parley.model.networks.indexers import BlockIndexerFamily, IndexerFamily
from parley.model.networks.mixtures import MixtureFamily
from parley.model.networks.rope import RopeConfig, Unfusable, wrong_value
from parley.model.networks.state_layers import StateFamily
from parley.native.layer_shape import AltUpShape, CompressionShape, HyperShape

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
MLP, MIXTURE = "mlp", "moe"  # layers of models with ``has_single_parts``


def all_full(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: all see the whole context."""
    return [FULL] * count


def all_sliding(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: all have the window, if there is one."""
    return [SLIDING] * count


def sliding_after_full(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the first ``max_window_layers`` see the whole context."""
    first = fields["max_window_layers"]
    return [SLIDING if fields["sliding_window"] and i >= first else FULL for i in range(count)]


def full_in_turn(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the last of each ``sliding_window_pattern`` sees the whole context."""
    if type(fields["sliding_window_pattern"]) is not int or fields["sliding_window_pattern"] < 1:
        raise wrong_value("sliding_window_pattern", fields["sliding_window_pattern"])
    return [SLIDING if (i + 1) % fields["sliding_window_pattern"] else FULL for i in range(count)]


def every_second_full(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: the second, fourth and so on see the whole context."""
    return [FULL if i % 2 else SLIDING for i in range(count)]


def all_rotated(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding: all do."""
    return [True] * len(layer_types)


def none_rotated(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding: none has."""
    return [False] * len(layer_types)


def listed_rotated(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding, by ``no_rope_layers`` (SmolLM3: 1 for those that have)."""
    listed = fields["no_rope_layers"]
    interval = fields["no_rope_layer_interval"]
    return [bool(has_rotary) for has_rotary in listed or ((i + 1) % interval for i in range(len(layer_types)))]


def sliding_rotated(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding: those with a window do (Cohere 2)."""
    return [layer_type == SLIDING for layer_type in layer_types]


def rotated_beside_windows(fields: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding: all if there is no window, else those with one (EXAONE 4)."""
    return [fields["sliding_window"] is None or layer_type == SLIDING for layer_type in layer_types]


def read_whole_rope(parameters: Mapping[str, Any], dim: int) -> RopeConfig:
    """Read a rotary embedding over all ``dim`` numbers of a head; only the first pairs rotate. Raises Unfusable."""
    kind, theta = parameters.get("rope_type", "default"), read_number(parameters, "rope_theta")
    if kind == "default":
        return RopeConfig(theta, dim)
    if kind != "proportional" or parameters.get("factor", 1.0) != 1:
        raise Unfusable(f"its rotary scaling is {str(kind)[:100]}")
    rotated_pairs = int(read_number({"partial_rotary_factor": 1.0, **parameters}, "partial_rotary_factor") * dim // 2)
    if not 1 <= rotated_pairs <= dim // 2:
        raise Unfusable(f"it rotates {2 * rotated_pairs} of {dim} dimensions")
    return RopeConfig(theta, dim, "proportional", rotated_pairs=rotated_pairs)


def alibi_slopes(heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Return the slope of each head for ALiBi (arXiv 2108.12409, section 3, and its code for numbers of heads that are
    no power of 2): 2 to the power of -``largest`` * i / heads for i from 1."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-largest * i / power) for i in range(1, power + 1)]
    between = [2 ** (-largest * i / (2 * power)) for i in range(1, 2 * power, 2)]
    return tuple(slopes + between[: heads - power])


@dataclass(frozen=True)
class DecoderFamily:
    """How the decoders of one model type differ from Llama.

    Fields without a comment are those of ``LayerShape`` or ``DecoderConfig`` with the same name. A string
    where a flag is expected names the config's field with the flag.
    """

    # the config
    fields: Mapping[str, Any]  # those that Transformers reads for the type, with their defaults
    renamed: Mapping[str, str] = field(default_factory=dict)  # from the type's own names of fields to Llama's
    required: Mapping[str, Any] = field(default_factory=dict)  # other values are not supported
    biases: Mapping[str, str | bool] = field(default_factory=dict)  # of qkv, output, gate_up, down, head
    tensors: TensorNames = LLAMA_TENSORS
    layer_types: Callable[[dict[str, Any], int], list[str]] = all_full  # of layers, if the config does not list them
    mrope: tuple[bool, tuple[int, ...]] | None = None  # whether axes are interleaved; the section, if not in the config

    # norms, embeddings, positions
    norms: NormForm = RMS_NORMS
    has_embedding_scale: bool | str = False  # embeddings are multiplied by the square root of their size
    scales_media: bool = False  # the factor of embeddings multiplies those of media as well
    local_theta: str | None = None  # the field with the base of the rotary embedding of sliding layers, if it differs
    is_rope_interleaved: bool | str = False  # as in ``RopeConfig``
    is_rope_reversed: bool = False
    # Returns the usual parameters of a rotary embedding for those of a config; the last argument is the size of a head.
    resolve_rope: Callable[[dict[str, Any], dict[str, Any], int], dict[str, Any]] | None = None
    # Returns the rotary embeddings of FULL and of SLIDING layers, where these two differ in more than their base.
    ropes: Callable[[dict[str, Any]], dict[str, RopeConfig]] | None = None
    rotated: Callable[[dict[str, Any], list[str]], list[bool]] = all_rotated  # which layers have a rotary embedding
    has_whole_qk_norm: bool = False
    is_qk_norm_late: bool = False
    position_offset: int = 0
    has_sinusoidal_positions: bool = False  # embeddings of positions are computed
    slopes: Callable[[dict[str, Any]], tuple[float, ...]] | None = None  # returns those of ``LayerShape``
    query_scaling: Callable[[dict[str, Any]], QueryScaling | None] | None = None  # returns how queries are scaled

    # layers
    is_gated: bool = True
    is_parallel: bool | str = False
    linear_layout: LinearLayout = PLAIN_LINEARS
    has_output_gate: bool = False  # the queries' layer gives a head's query and then its gate
    has_head_gates: bool = False
    has_latent_gates: bool = False
    has_single_parts: bool = False  # a layer is either an MLP, or attention or a layer with a state
    is_hybrid: bool = False
    # Reads factors of ``LayerShape`` from a config; that of scores multiplies ``score_scale``.
    layer_factors: Callable[[dict[str, Any]], dict[str, float]] | None = None
    # Returns for each layer the fields of ``LayerShape`` in which it differs from the others, given the types of
    # layers.
    layer_variations: Callable[[dict[str, Any], list[str]], list[dict[str, Any]]] | None = None
    activation: str | None = None  # of all layers, if not that of hidden_act
    mixture: MixtureFamily | None = None  # how the layers with a mixture of experts choose them
    indexer: IndexerFamily | BlockIndexerFamily | None = None  # how tokens to attend to are chosen
    state: StateFamily | None = None  # how the layers that keep a state are read
    compression: Callable[[dict[str, Any]], CompressionShape] | None = None  # returns the sizes of such attention
    hyper: Callable[[dict[str, Any]], HyperShape] | None = None  # returns the streams of hyper-connections
    altup: Callable[[dict[str, Any]], AltUpShape] | None = None  # returns the residual streams, if there are several
    # Returns the tokens that projectors embed, in the order of their ids; they are the last ones
    media_vocabularies: Callable[[dict[str, Any]], tuple[MediaVocabulary, ...]] | None = None
    has_partial_inputs: bool = False  # the last tokens have no inputs of layers, and use those of token 0
    extra_tokens: int = 0
    extra_layers: str | None = None  # the field with the number of unused layers that predict further tokens
    variant: Callable[[Mapping[str, Any]], DecoderFamily] | None = None  # returns the row for a config


# "heads": same as heads. An intermediate_size of None is four times the hidden one.
COMMON_FIELDS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_parameters": None,
    "rope_scaling": None,
    "original_max_position_embeddings": None,
    "tie_word_embeddings": False,
    "num_key_value_heads": "heads",
    "head_dim": None,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
ATTENTION_BIASES: dict[str, str | bool] = {"qkv": "attention_bias", "output": "attention_bias"}
MLP_BIASES: dict[str, str | bool] = {"gate_up": "mlp_bias", "down": "mlp_bias"}
