"""The facts in a multimodal model's config.json: the kinds of media that it takes, and their marks.

A family is a model type that both the encoder (``model/media/``) and the prompt support. The ids of its marks are in
the config, and the tokenizer has their texts, so that a checkpoint with marks of its own needs nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from parley.types import CanvasMarks, MediaKind

if TYPE_CHECKING:
    from parley.text.tokens.tokenizer import Tokenizer

ENCODER_CONFIGS = ("vision_config", "audio_config")  # fields with the config of an encoder


class MediaMarks(NamedTuple):
    """``prompt_mark``: the text that a chat template writes for an item; the item's replacement is put there instead.
    ``placeholder``: the token in the replacement that each embedding replaces. ``opening``, ``closing``: the texts that
    the template writes around the mark; in a plain text, an item needs them as well."""

    prompt_mark: str
    placeholder: str
    opening: str = ""
    closing: str = ""


class _KindMarks(NamedTuple):
    """The fields of config.json with the placeholder's id, newest first, and the prompt's mark if it is another.
    ``encoder.field`` is a field of the config of an encoder.

    ``edges``: the special tokens around an item, if the processor's replacement does not have them.
    ``encoder_config``: the field with the encoder's config, in types whose models do not all have that encoder.
    ``refused_option``: the field with an option that is not supported for this kind, unless it is false or 0.
    """

    id_fields: tuple[str, ...]
    prompt_mark: str | None = None
    edges: tuple[str, str] = ("", "")
    encoder_config: str | None = None
    refused_option: str = ""


class _FamilyRow(NamedTuple):
    """All but ``kinds``, ``states_direction``, ``other_ids_field`` and ``has_canvas`` as in ``MediaFamily``.

    ``other_ids_field``: the field of config.json with ``other_placeholder_ids``.
    ``has_canvas``: config.json has the ids of ``canvas_marks``.
    ``states_direction``: ``use_bidirectional_attention`` in ``text_config`` may override ``sees_both_ways``.
    """

    kinds: dict[MediaKind, _KindMarks]
    sees_both_ways: bool = False
    states_direction: bool = False
    needs_fused: bool = False
    has_rope_grids: bool = False
    min_embeddings: int = 1
    text_follows_time: bool = False
    needs_timm: bool = False
    other_ids_field: str = ""
    shares_edges: bool = False
    keeps_kinds_apart: bool = False
    is_prefix_lm: bool = False
    numbers_grids: bool = False
    begins_text_after_items: bool = False
    leads_prompt: bool = False
    has_canvas: bool = False


# Names that files published before the type was in Transformers have for some fields, by model type.
_EARLIER_FIELDS = {
    "nemotron_h_omni": {
        "llm_config": "text_config",
        "sound_config": "audio_config",
        "img_context_token_id": "image_token_id",
        "video_context_token_id": "video_token_id",
        "sound_context_token_id": "audio_token_id",
    }
}
# Fields that only the whole model's config has, though they are about its parts as well.
SHARED_FIELDS = ("architectures", "dtype", "torch_dtype", "quantization_config", "quantization")
# Of the mark before a slice, and of others (``CanvasMarks``)
CANVAS_FIELDS = ("slice_start_id", "slice_end_id", "image_start_id", "image_end_id", "newline_id")
_IMAGE = _KindMarks(("image_token_id", "image_token_index"))
_VIDEO = _KindMarks(("video_token_id", "video_token_index"))
_AUDIO = _KindMarks(("audio_token_id", "audio_token_index"))
_VIDEO_OF_IMAGES = _KindMarks(_IMAGE.id_fields, "<video>")  # its frames are images in the replacement
_VISION_EDGES = ("<|vision_start|>", "<|vision_end|>")
_QWEN_VL = _FamilyRow(
    {"image": _IMAGE._replace(edges=_VISION_EDGES), "video": _VIDEO._replace(edges=_VISION_EDGES)}, has_rope_grids=True
)
_OMNI_EDGES = ("<|vision_bos|>", "<|vision_eos|>")
_QWEN2_5_OMNI = _FamilyRow(
    {
        "image": _IMAGE._replace(edges=_OMNI_EDGES),
        "video": _VIDEO._replace(edges=_OMNI_EDGES),
        "audio": _AUDIO._replace(edges=("<|audio_bos|>", "<|audio_eos|>")),
    },
    has_rope_grids=True,
    text_follows_time=True,
)
_QWEN3_OMNI = _FamilyRow(
    _QWEN_VL.kinds | {"audio": _AUDIO._replace(edges=("<|audio_start|>", "<|audio_end|>"))},
    has_rope_grids=True,
    text_follows_time=True,
)
_GLM_V = _FamilyRow(
    {
        "image": _IMAGE._replace(edges=("<|begin_of_image|>", "<|end_of_image|>")),
        "video": _KindMarks(_IMAGE.id_fields, "<|video|>", ("<|begin_of_video|>", "<|end_of_video|>")),
    },
    has_rope_grids=True,
)
_GEMMA4 = _FamilyRow(
    {
        "image": _IMAGE._replace(encoder_config="vision_config"),
        "video": _VIDEO._replace(encoder_config="vision_config"),
        "audio": _AUDIO._replace(encoder_config="audio_config"),
    },
    states_direction=True,
    needs_fused=True,
)

_FAMILIES: dict[str, _FamilyRow] = {
    "llava": _FamilyRow({"image": _IMAGE}),
    "llava_next": _FamilyRow({"image": _IMAGE}),
    "llava_next_video": _FamilyRow({"image": _IMAGE, "video": _VIDEO}),
    "vipllava": _FamilyRow({"image": _IMAGE}),
    "llava_onevision": _FamilyRow({"image": _IMAGE, "video": _VIDEO}),
    "video_llava": _FamilyRow({"image": _IMAGE, "video": _VIDEO}),
    "fast_vlm": _FamilyRow({"image": _IMAGE}, needs_timm=True),
    "perception_lm": _FamilyRow({"image": _IMAGE, "video": _VIDEO}, needs_timm=True),
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen3_vl": _QWEN_VL,
    "qwen3_vl_moe": _QWEN_VL,
    "qwen3_5": _QWEN_VL,
    "qwen3_5_moe": _QWEN_VL,
    "idefics3": _FamilyRow({"image": _IMAGE}),
    "smolvlm": _FamilyRow({"image": _IMAGE, "video": _VIDEO_OF_IMAGES}),
    "internvl": _FamilyRow({"image": _IMAGE, "video": _VIDEO_OF_IMAGES}),
    "mistral3": _FamilyRow({"image": _IMAGE}, min_embeddings=2),  # the encoder's code squeezes a single one away
    "gemma3": _FamilyRow({"image": _KindMarks(_IMAGE.id_fields, "<start_of_image>")}, sees_both_ways=True),
    "paligemma": _FamilyRow({"image": _IMAGE}, needs_fused=True, is_prefix_lm=True, begins_text_after_items=True),
    "blip-2": _FamilyRow({"image": _IMAGE}, begins_text_after_items=True),
    "gemma3n": _FamilyRow({"image": _IMAGE, "audio": _AUDIO}, needs_fused=True, needs_timm=True),
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4._replace(sees_both_ways=True),
    "mllama": _FamilyRow({"image": _IMAGE}, needs_fused=True, leads_prompt=True),
    "llama4": _FamilyRow({"image": _IMAGE._replace(prompt_mark="<|image|>")}),
    "aya_vision": _FamilyRow({"image": _IMAGE._replace(prompt_mark="<image>")}),
    "cohere2_vision": _FamilyRow({"image": _IMAGE}),
    "lfm2_vl": _FamilyRow({"image": _IMAGE}),
    "lfm3_vl": _QWEN_VL._replace(has_rope_grids=False),
    "idefics2": _FamilyRow({"image": _IMAGE}, shares_edges=True),
    "ovis2": _FamilyRow(
        {"image": _IMAGE._replace(prompt_mark="<image>")}, other_ids_field="visual_indicator_token_ids"
    ),
    "hunyuan_vl": _FamilyRow(
        {"image": _IMAGE._replace(edges=("<｜hy_place▁holder▁no▁100｜>", "<｜hy_place▁holder▁no▁101｜>"))},
        has_rope_grids=True,
        numbers_grids=True,
    ),
    "got_ocr2": _FamilyRow({"image": _IMAGE._replace(edges=("<img>", "</img>"))}),
    "minicpmv4_6": _FamilyRow({"image": _IMAGE, "video": _VIDEO}),
    "minicpmv4_7": _FamilyRow({"image": _IMAGE, "video": _VIDEO}, needs_fused=True, has_canvas=True),
    "minicpm_ocr": _FamilyRow({"image": _IMAGE, "video": _VIDEO}),
    "deepseek_ocr2": _FamilyRow({"image": _IMAGE}),
    "deepseek_vl": _FamilyRow({"image": _IMAGE}),
    "deepseek_vl_hybrid": _FamilyRow({"image": _IMAGE}),
    "muse_glimmer": _FamilyRow({"image": _IMAGE, "video": _VIDEO}),
    "lighton_ocr": _FamilyRow({"image": _IMAGE}),
    "qianfan_ocr": _FamilyRow({"image": _IMAGE._replace(prompt_mark="<image>")}),
    "kimi_k25": _FamilyRow(
        {"image": _IMAGE._replace(edges=("<|media_begin|>image<|media_content|>", "<|media_end|>"))}
    ),
    "hyperclovax_vision_v2": _FamilyRow({"image": _IMAGE}),
    "janus": _FamilyRow({"image": _IMAGE}),
    "qwen2_audio": _FamilyRow({"audio": _AUDIO}),
    "qwen3_asr": _FamilyRow({"audio": _AUDIO._replace(edges=("<|audio_start|>", "<|audio_end|>"))}),
    "qwen2_5_omni_thinker": _QWEN2_5_OMNI,
    "qwen3_omni_moe_thinker": _QWEN3_OMNI,
    "voxtral": _FamilyRow({"audio": _AUDIO._replace(edges=("[BEGIN_AUDIO]", ""))}),
    "glmasr": _FamilyRow({"audio": _AUDIO._replace(edges=("<|begin_of_audio|>", "<|end_of_audio|>"))}),
    "audioflamingo3": _FamilyRow({"audio": _AUDIO}),
    "musicflamingo": _FamilyRow({"audio": _AUDIO}),
    "moss_transcribe_diarize": _FamilyRow({"audio": _AUDIO._replace(edges=("<|audio_start|>", "<|audio_end|>"))}),
    "granite_speech": _FamilyRow({"audio": _AUDIO}),
    "granite_speech_plus": _FamilyRow({"audio": _AUDIO}),
    "nemotron_h_omni": _FamilyRow(
        {
            "image": _IMAGE,
            "video": _VIDEO_OF_IMAGES._replace(refused_option="video_pruning_rate"),
            "audio": _AUDIO._replace(encoder_config="audio_config"),
        }
    ),
    "phi4_multimodal": _FamilyRow(
        {"image": _KindMarks(("vision_config.image_token_id",)), "audio": _KindMarks(("audio_config.audio_token_id",))},
        keeps_kinds_apart=True,
    ),
    "glm4v": _GLM_V,
    "glm46v": _GLM_V,
    "glmga": _GLM_V,
    "glm4v_moe": _GLM_V,
    "glm_ocr": _GLM_V,
    "paddleocr_vl": _FamilyRow(
        {"image": _IMAGE._replace(edges=("<|IMAGE_START|>", "<|IMAGE_END|>"))}, has_rope_grids=True
    ),
    "ernie4_5_vl_moe": _FamilyRow(
        {"image": _IMAGE._replace(edges=("<|IMAGE_START|>", "<|IMAGE_END|>"))}, has_rope_grids=True
    ),
    "aria": _FamilyRow({"image": _IMAGE._replace(edges=("<fim_prefix>", "<fim_suffix>"))}),
    "step3p7": _FamilyRow({"image": _IMAGE}),
    "granite4_vision": _FamilyRow({"image": _IMAGE}),
    "granite_docling": _FamilyRow({"image": _IMAGE}),
    "exaone4_5": _QWEN_VL._replace(has_rope_grids=False),
    "video_llama_3": _FamilyRow({"image": _IMAGE, "video": _VIDEO}),
}


@dataclass(frozen=True)
class MediaFamily:
    """The kinds of media that a multimodal model reads, and what sets them apart.

    * ``placeholder_ids``: for each kind, the token that embeddings replace.
    * ``sees_both_ways``: the tokens of an image, or of a video's frame, attend to later ones of the same; audio never
      does.
    * ``has_rope_grids``: positions have three axes (M-RoPE), so each run of embeddings needs its grid.
    * ``min_embeddings``: the fewest embeddings of an item that the encoder accepts.
    * ``text_follows_time``: as in ``EmbeddingRun``.
    * ``needs_fused``: a decoder in Transformers' code cannot read the media over pages.
    * ``needs_timm``: Transformers builds the encoders with that package.
    * ``other_placeholder_ids``: the marks around and between the tiles of an image, if embeddings replace them as well.
    * ``shares_edges``: two images next to each other have one mark between them, not two.
    * ``keeps_kinds_apart``: an encoder computes something else if a prompt has items of another kind too; such prompts
      are refused.
    * ``is_prefix_lm``: all tokens of a prompt with items attend to each other, and a line break ends the prompt.
    * ``begins_text_after_items``: the token that begins texts stands after the last item.
    * ``leads_prompt``: as in ``ProcessedMedia``.
    * ``numbers_grids``: with ``has_rope_grids``, grids are numbered (``EmbeddingRun.is_numbered``).
    * ``canvas_marks``: as in ``ProcessedMedia``.
    """

    model_type: str
    placeholder_ids: Mapping[MediaKind, int]
    prompt_marks: Mapping[MediaKind, str]  # of the kinds whose prompt mark is not the placeholder
    edges: Mapping[MediaKind, tuple[str, str]]  # the special tokens around an item
    sees_both_ways: bool
    has_rope_grids: bool
    min_embeddings: int
    text_follows_time: bool
    needs_fused: bool
    needs_timm: bool
    other_placeholder_ids: tuple[int, ...] = ()
    shares_edges: bool = False
    keeps_kinds_apart: bool = False
    is_prefix_lm: bool = False
    numbers_grids: bool = False
    begins_text_after_items: bool = False
    leads_prompt: bool = False
    canvas_marks: CanvasMarks | None = None

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """The kinds of media that the model takes."""
        return frozenset(self.placeholder_ids)

    def read_marks(self, tokenizer: Tokenizer) -> dict[MediaKind, MediaMarks]:
        """Return the marks of each kind. Kinds whose placeholder the tokenizer does not have are left out."""
        texts = {kind: tokenizer.backend.id_to_token(token_id) for kind, token_id in self.placeholder_ids.items()}
        return {
            kind: MediaMarks(self.prompt_marks.get(kind, text), text, *self.edges[kind])
            for kind, text in texts.items()
            if text is not None
        }


def read_media_family(config: Mapping[str, Any]) -> MediaFamily | None:
    """Return the media family of a model with this config.json; None if it takes text only."""
    config = writer_config(config)
    row = _FAMILIES.get(str(config.get("model_type")))
    if row is None:
        return None
    read_ids = {
        kind: _read_id(config, marks.id_fields)
        for kind, marks in row.kinds.items()
        if (marks.encoder_config is None or config.get(marks.encoder_config) is not None)
        and not config.get(marks.refused_option)
    }
    placeholder_ids = {kind: token_id for kind, token_id in read_ids.items() if token_id is not None}
    canvas_marks = _read_canvas_marks(config) if row.has_canvas else None
    if not placeholder_ids or (row.has_canvas and canvas_marks is None):
        return None
    prompt_marks = {kind: marks.prompt_mark for kind, marks in row.kinds.items() if marks.prompt_mark is not None}
    return MediaFamily(
        str(config["model_type"]),
        placeholder_ids,
        prompt_marks,
        {kind: marks.edges for kind, marks in row.kinds.items()},
        _sees_both_ways(config, row),
        row.has_rope_grids,
        row.min_embeddings,
        row.text_follows_time,
        row.needs_fused,
        row.needs_timm,
        _read_other_ids(config, row),
        row.shares_edges,
        row.keeps_kinds_apart,
        row.is_prefix_lm,
        row.numbers_grids,
        row.begins_text_after_items,
        row.leads_prompt,
        canvas_marks,
    )


def writer_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json about the model that writes text; of most models that is all of it.

    Qwen-Omni keeps it in ``thinker_config``, next to that of a model that speaks, which is not served. Fields have the
    names that Transformers gives them now.
    """
    thinker = config.get("thinker_config")
    if not isinstance(thinker, dict):
        earlier_fields = _EARLIER_FIELDS.get(str(config.get("model_type")), {})
        return {earlier_fields.get(name, name): value for name, value in config.items()} if earlier_fields else config
    return {name: config[name] for name in SHARED_FIELDS if name in config} | thinker


def _read_canvas_marks(config: Mapping[str, Any]) -> CanvasMarks | None:
    """Return the tokens around the slices of images; None if the config lacks one."""
    ids = [_read_id(config, (name,)) for name in CANVAS_FIELDS]
    known = [token_id for token_id in ids if token_id is not None]
    return CanvasMarks(known[0], known[1:]) if len(known) == len(ids) else None


def _sees_both_ways(config: Mapping[str, Any], row: _FamilyRow) -> bool:
    text_config = config.get("text_config")
    if row.states_direction and isinstance(text_config, dict) and "use_bidirectional_attention" in text_config:
        return bool(text_config["use_bidirectional_attention"] == "vision")
    return row.sees_both_ways


def _read_other_ids(config: Mapping[str, Any], row: _FamilyRow) -> tuple[int, ...]:
    token_ids = config.get(row.other_ids_field)
    if not isinstance(token_ids, list):
        return ()
    return tuple(token_id for token_id in token_ids if type(token_id) is int and token_id >= 0)


def has_unread_media(config: Mapping[str, Any]) -> bool:
    """Return whether this is the config.json of a multimodal model whose family is not one of those read here."""
    has_encoder = any(isinstance(config.get(name), dict) for name in ENCODER_CONFIGS)
    return has_encoder and str(config.get("model_type")) not in _FAMILIES


def _read_id(config: Mapping[str, Any], fields: tuple[str, ...]) -> int | None:
    """Return the first of the fields that holds a token id."""
    values = []
    for name in fields:
        encoder, _, field = name.rpartition(".")
        owner = config.get(encoder) if encoder else config
        values.append(owner.get(field) if isinstance(owner, Mapping) else None)
    return next((value for value in values if type(value) is int and value >= 0), None)
