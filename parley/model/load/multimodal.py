"""The language model inside a checkpoint that also holds encoders of images, video or audio.

Such a checkpoint keeps the language model's config in ``text_config``, and its tensors below a prefix. Both are turned
into those of a plain decoder here; ``towers.py`` loads the encoders. The layouts are those that Transformers writes,
and has written in earlier versions.
"""

from __future__ import annotations

import re
from typing import Any

from parley.model.checkpoint.files import Checkpoint
from parley.model.networks.families.table import FUSABLE_TYPES
from parley.text.media_family import ENCODER_CONFIGS, SHARED_FIELDS

# Published files of these types have no text_config: the language model's fields are at the top.
FLAT_CONFIG_TYPES = {
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "paddleocr_vl": "paddleocr_vl_text",
    "phi4_multimodal": "phi4_multimodal",
}
BODY_PREFIX = "model."
# Prefixes of the encoders that lie beside the layers: of Phi-4-multimodal, ERNIE 4.5 VL and DeepSeek-OCR 2
ENCODERS_IN_BODY = (
    "model.embed_tokens_extend.",
    "model.vision_model.",
    "model.resampler_model.",
    "model.sam_model.",
    "model.qwen2_model.",
    "model.projector.",
    "model.view_seperator",
)
BODY_EMBEDDING = re.compile(r"((?:.*\.)?)(?:embed_tokens|(?<=backbone\.)embeddings)\.weight")
OWN_BODY_PREFIXES = ("backbone.", "model.decoder.")  # of Nemotron-H and OPT in place of BODY_PREFIX
THINKER_PREFIX = "thinker."  # of the tensors of Qwen-Omni's part that writes text
# Language models whose last tokens the projectors of media embed, and the modules of these
MEDIA_TOKEN_TYPES, TOKEN_PROJECTORS = {"gemma3n_text"}, ("embed_vision", "embed_audio")
PREFIX_TYPES = {"paligemma"}  # all tokens of a prompt with images attend to each other
# Of Janus' part that makes images
IMAGE_MAKERS = ("model.vqmodel.", "model.generation_", "vqmodel.", "generation_")
HEAD_PREFIXES = ("lm_head.", "language_model.lm_head.", "model.language_model.lm_head.")


def language_model_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a multimodal model's language model, if that has a fused decoder; else ``config`` itself."""
    text_config = config.get("text_config")
    if isinstance(text_config, dict) and str(text_config.get("model_type")) in FUSABLE_TYPES:
        shared_fields = {name: config[name] for name in SHARED_FIELDS if config.get(name) is not None}
        # Either config may say that the head is the embedding, and the default differs by type.
        ties = [section.get("tie_word_embeddings") for section in (config, text_config)]
        if text_config["model_type"] in MEDIA_TOKEN_TYPES:
            shared_fields["media_configs"] = {name: config.get(name) for name in ENCODER_CONFIGS}
        if config["model_type"] in PREFIX_TYPES:  # may say that it reads both ways, which only its prompts do
            shared_fields["use_bidirectional_attention"] = None
        return {**text_config, **shared_fields, "tie_word_embeddings": True in ties or False not in ties}
    if text_config is None and config["model_type"] in FLAT_CONFIG_TYPES:
        return {**config, "model_type": FLAT_CONFIG_TYPES[config["model_type"]]}
    return config


def keep_language_model(checkpoint: Checkpoint) -> None:
    """Give the language model's tensors the names of a plain decoder's, and leave out all others.

    Its layers are next to its embedding, below ``model.language_model.``, ``language_model.model.``,
    ``language_model.backbone.``, ``language_model.model.decoder.``, ``model.text_model.`` or ``model.``. Projectors of
    media that embed tokens as well are kept.
    """
    _keep_thinker(checkpoint)
    body_prefix = _find_body_prefix(checkpoint)
    _drop_tensors(checkpoint, *ENCODERS_IN_BODY)
    if body_prefix is not None:
        own_prefix = next(filter(body_prefix.endswith, OWN_BODY_PREFIXES), BODY_PREFIX)
        prefixes = {body_prefix: own_prefix, **dict.fromkeys(HEAD_PREFIXES, "lm_head.")}
        for module in TOKEN_PROJECTORS:
            suffix = f"{module}.embedding.weight"
            for name in checkpoint.tensor_names:
                if name.endswith(suffix):
                    prefixes[name.removesuffix("embedding.weight")] = f"model.{module}."
        checkpoint.select_tensors(prefixes)


def keep_encoders(checkpoint: Checkpoint) -> None:
    """Leave out the tensors that ``keep_language_model`` keeps, and those of a part that makes images."""
    _keep_thinker(checkpoint)
    _drop_tensors(checkpoint, *IMAGE_MAKERS)
    body_prefix = _find_body_prefix(checkpoint)
    if body_prefix == BODY_PREFIX and any(name.startswith(ENCODERS_IN_BODY) for name in checkpoint.tensor_names):
        checkpoint.select_tensors({prefix: prefix for prefix in ENCODERS_IN_BODY})
        return
    language_model = HEAD_PREFIXES if body_prefix is None else (body_prefix, *HEAD_PREFIXES)
    _drop_tensors(checkpoint, *language_model)


def _drop_tensors(checkpoint: Checkpoint, *prefixes: str) -> None:
    """Leave out the tensors whose names begin with one of ``prefixes``."""
    names = [name for name in checkpoint.tensor_names if not name.startswith(prefixes)]
    if len(names) < len(checkpoint.tensor_names):
        checkpoint.select_tensors({name: name for name in names})


def _keep_thinker(checkpoint: Checkpoint) -> None:
    """Leave out the part of a Qwen-Omni that speaks."""
    if any(name.startswith(THINKER_PREFIX) for name in checkpoint.tensor_names):
        checkpoint.select_tensors({THINKER_PREFIX: ""})


def _find_body_prefix(checkpoint: Checkpoint) -> str | None:
    """Return the prefix of the names of the language model's layers and embedding; None if it is not clear."""
    embeddings = [match[1] for name in checkpoint.tensor_names if (match := BODY_EMBEDDING.fullmatch(name))]
    return embeddings[0] if len(embeddings) == 1 else None


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether a head is stored besides the embedding. It counts more than the config, as in Transformers."""
    return any(name.startswith("lm_head.") and not name.endswith(".bias") for name in checkpoint.tensor_names)
