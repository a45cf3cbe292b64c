"""The decoder of Gemma 3n."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

from parley.model.networks.config_fields import read_number, read_size
from parley.model.networks.decoder_config import RMS_NORMS, MediaVocabulary
from parley.model.networks.families.decoder_family import FULL, SLIDING
from parley.model.networks.families.gemma_decoders import GEMMA, GEMMA_TENSORS, shared_kv_layers
from parley.model.networks.rope import Unfusable, wrong_value
from parley.native.layer_shape import AltUpShape

MAX_STREAMS = 64  # work is planned for each residual stream, and for each pair of them
SPARSE_LAYERS, SPARSITY = 10, 0.95  # of models with more layers, if the config does not say it


def every_fifth_full(fields: dict[str, Any], count: int) -> list[str]:
    """Return the types of ``count`` layers: each fifth sees the whole context."""
    return [SLIDING if (i + 1) % 5 else FULL for i in range(count)]


def gemma3n_altup(fields: dict[str, Any]) -> AltUpShape:
    """Return the residual streams of Gemma 3n. Raises Unfusable."""
    streams, active = read_size(fields, "altup_num_inputs"), fields["altup_active_idx"]
    if not 2 <= streams <= MAX_STREAMS:
        raise wrong_value("altup_num_inputs", streams)
    if type(active) is not int or not 0 <= active < streams:
        raise wrong_value("altup_active_idx", active)
    return AltUpShape(streams, active, read_size(fields, "laurel_rank"), bool(fields["altup_correct_scale"]))


# The fields of the whole model's config, with Transformers' defaults, and the modules of their projectors
PROJECTORS = {
    "vision_config": ("model.embed_vision", {"vocab_offset": 262144, "hidden_size": 2048}),
    "audio_config": ("model.embed_audio", {"vocab_offset": 262272, "hidden_size": 1536}),
}


def gemma3n_media_vocabularies(fields: dict[str, Any]) -> tuple[MediaVocabulary, ...]:
    """Return the tokens that projectors of images and audio embed; none for a model of text. Raises Unfusable."""
    if fields["media_configs"] is None:
        return ()
    vocabularies = []
    for name, (module, defaults) in PROJECTORS.items():
        media_fields = {
            "vocab_size": 128,
            "rms_norm_eps": 1e-6,
            **defaults,
            **(fields["media_configs"].get(name) or {}),
        }
        first, size, width = (read_size(media_fields, field) for field in ("vocab_offset", "vocab_size", "hidden_size"))
        vocabularies.append(MediaVocabulary(module, first, size, width, read_number(media_fields, "rms_norm_eps")))
    end_ids = [vocabulary.first + vocabulary.size for vocabulary in vocabularies]
    if end_ids != [vocabularies[1].first, fields["vocab_size"]]:
        raise Unfusable("its tokens of images and audio are not the last ones")
    return tuple(vocabularies)


def gemma3n_layers(fields: dict[str, Any], layer_types: list[str]) -> list[dict[str, Any]]:
    """Return the fields of ``LayerShape`` for each layer of Gemma 3n. Raises Unfusable."""
    count, sharing = len(layer_types), fields["num_kv_shared_layers"]
    if type(sharing) is not int or not 0 <= sharing < count:
        raise wrong_value("num_kv_shared_layers", sharing)
    widths = fields["mlp_widths"] or [fields["intermediate_size"]] * count
    if len(widths) != count:
        raise Unfusable(f"its intermediate_size lists {len(widths)} widths for {count} layers")
    return [
        {
            "score_scale": 1.0,
            "kv_layer": kv_layer,
            "has_normed_values": kv_layer is None,
            "mlp_width": read_size({"intermediate_size": width}, "intermediate_size"),
            "gate_deviations": deviations,
            "layer_input": i,
        }
        for i, (kv_layer, width, deviations) in enumerate(
            zip(shared_kv_layers(layer_types, sharing), widths, _gate_deviations(fields, count), strict=True)
        )
    ]


def _gate_deviations(fields: dict[str, Any], count: int) -> list[float | None]:
    """Return ``LayerShape.gate_deviations`` of each layer, from the share of its gates that become 0. Raises
    Unfusable."""
    pattern = fields["activation_sparsity_pattern"]
    if pattern is None:
        sparse = SPARSE_LAYERS if count > SPARSE_LAYERS else 0
        pattern = [SPARSITY] * sparse + [0.0] * (count - sparse)
    is_listed = isinstance(pattern, list) and len(pattern) == count
    if not is_listed or any(type(share) not in (int, float) or not share < 1 for share in pattern):
        raise wrong_value("activation_sparsity_pattern", pattern)
    return [NormalDist().inv_cdf(share) if share > 0 else None for share in pattern]


GEMMA3N = replace(
    GEMMA,
    fields={
        **{name: default for name, default in GEMMA.fields.items() if name != "use_bidirectional_attention"},
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "mlp_widths": None,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 512,
        "layer_types": None,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "altup_num_inputs": 4,
        "num_kv_shared_layers": 15,
        "laurel_rank": 64,
        "activation_sparsity_pattern": None,
        "media_configs": None,  # the configs of encoders, if the decoder is a part of a multimodal model
    },
    renamed={"hidden_activation": "hidden_act"},
    required={},
    tensors=replace(
        GEMMA_TENSORS,
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        layer_inputs="model.embed_tokens_per_layer",
        input_after_norm="post_per_layer_input_norm",
        altup_norm="altup.router_norm",
        laurel_norm="laurel.post_laurel_norm",
    ),
    norms=RMS_NORMS,
    layer_types=every_fifth_full,
    local_theta="rope_local_base_freq",
    layer_variations=gemma3n_layers,
    altup=gemma3n_altup,
    media_vocabularies=gemma3n_media_vocabularies,
    has_partial_inputs=True,
    variant=None,
)
