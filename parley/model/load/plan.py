"""Decides how a model runs, from its settings, config and file headers, before any weight is read.

``load/loader.py`` then loads it, and ``load/check.py`` only checks it. LoadError messages are sentences for the
operator of the server.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parley import native
from parley.model.checkpoint.files import Checkpoint, LoadError, read_config
from parley.model.checkpoint.mlx import has_mlx_layout
from parley.model.checkpoint.quantization import GGUF_METHOD, Quantization, read_quantization
from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.devices import resolve_device
from parley.model.load.memory import refuse_large_tensors
from parley.model.load.multimodal import has_own_head, keep_language_model, language_model_config
from parley.model.load.tensor_names import check_tensor_names
from parley.model.load.text_encoders.encoders import is_encoder, read_encoder_config, read_encoder_pooling
from parley.model.networks.config_reader import read_decoder_config
from parley.model.networks.decoder_config import DecoderConfig
from parley.model.networks.pooling import PoolingRecipe
from parley.model.networks.rope import Unfusable
from parley.types import ParleySettings

log = logging.getLogger("parley.engine")

DTYPE_NAMES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
}
KV_DTYPES = ("auto", "int8")
ENCODER_DTYPE = torch.float32
# The names of the context length in config.json, most common first.
LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
FALLBACK_LENGTH = 2048
MAX_LENGTH = 1 << 24  # tokens; float32 does not have all larger positions exactly, so their angles would be wrong
FOLDED_BY_MLX = "falcon_h1"  # factors of its config are multiplied into the weights
DRAFT_KEEPS_STATES = "{} cannot be the draft model: it has layers that keep a state of each sequence."
# The embeddings of checkpoints of a body without its head, as embedding models and GPT-2 are, and the missing prefix.
BODY_EMBEDDINGS = {
    "embed_tokens.weight": "model.",
    "embed.weight": "model.",
    "decoder.embed_tokens.weight": "model.",
    "wte.weight": "transformer.",
    "word_embeddings.weight": "transformer.",
}


class EncoderPlan(NamedTuple):
    """How an encoder runs: its device, weights, pooling and longest text."""

    device: torch.device
    checkpoint: Checkpoint
    recipe: PoolingRecipe
    size: int  # bytes of its weights


class DecoderPlan(NamedTuple):
    """How a decoder runs: the numbers of weights and KV cache, its device, and the longest context in tokens.

    ``config``: of the decoder alone. ``is_part``: the weights are in the checkpoint of a multimodal model.
    """

    config: dict[str, Any]
    is_part: bool
    quantization: Quantization
    dtype: torch.dtype
    device: torch.device
    int8_kv: bool
    length: int


def plan_encoder(settings: ParleySettings, folder: Path, config: dict[str, Any]) -> EncoderPlan:
    """Return how an encoder runs. Raises LoadError if it cannot."""
    if settings.quantization != "none" or not config.keys().isdisjoint(("quantization_config", "quantization")):
        raise LoadError("Encoders run on plain weights only, but quantized weights were asked for.")
    device = resolve_device(settings.device)
    checkpoint = Checkpoint(folder)
    recipe = read_encoder_pooling(folder, config, checkpoint)
    size = checkpoint.parameter_count * ENCODER_DTYPE.itemsize
    refuse_large_tensors("The weights", size, device, "serve a smaller model")
    longest = read_encoder_config(config).max_length
    if settings.max_model_len is not None and settings.max_model_len > longest:
        raise LoadError(
            f"max_model_len is {settings.max_model_len}, but the model was made for at most {longest} tokens."
        )
    return EncoderPlan(device, checkpoint, recipe, size)


def plan_decoder(settings: ParleySettings, config: dict[str, Any]) -> DecoderPlan:
    """Return how a decoder runs. Raises LoadError if it cannot."""
    decoder_config = language_model_config(config)
    is_part, config = decoder_config is not config, decoder_config
    _check_direction(config)
    quantization = read_quantization(config, settings.quantization)
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, config, device)
    if settings.kv_dtype not in KV_DTYPES:
        raise LoadError(f"kv_dtype {settings.kv_dtype} is unknown; it must be {' or '.join(KV_DTYPES)}.")
    if quantization and not settings.lowering:
        raise LoadError(f"{quantization.subject} run on the fused decoder only, and lowering is off.")
    if quantization and quantization.method != GGUF_METHOD and not native.has_quantized_kernels(dtype, device):
        kind = str(dtype).removeprefix("torch.")
        raise LoadError(
            f"{quantization.subject} run on {device} with Triton's kernels only: in bf16 or fp16 (it is {kind}), and "
            "if Triton is installed and PARLEY_NATIVE is not off."
        )
    length = read_context_length(config, settings.max_model_len)
    return DecoderPlan(config, is_part, quantization, dtype, device, settings.kv_dtype == "int8", length)


def _check_direction(config: dict[str, Any]) -> None:
    """Raise LoadError if a decoder's config lets tokens see later ones, as that of an embedding model may."""
    is_causal, sees_all = config.get("is_causal"), config.get("use_bidirectional_attention")
    field = "is_causal as false" if is_causal is False else "use_bidirectional_attention as true"
    if is_causal is False or sees_all in (True, "all"):
        raise LoadError(
            f"A {config['model_type']} model whose config gives {field} reads in both directions and writes nothing."
        )


def open_decoder(folder: Path, plan: DecoderPlan) -> Checkpoint:
    """Open a decoder's weights. Raises LoadError if they are damaged."""
    checkpoint = Checkpoint(folder)
    if plan.is_part:
        keep_language_model(checkpoint)
    else:
        checkpoint.add_prefix(next((prefix for name, prefix in BODY_EMBEDDINGS.items() if name in checkpoint), ""))
    return checkpoint


def find_fused_config(checkpoint: Checkpoint, plan: DecoderPlan) -> DecoderConfig | None:
    """Return the config for the fused decoder, None if the model must run through Transformers. Raises LoadError."""
    config = plan.config
    try:
        decoder_config = read_decoder_config(config)
        checkpoint.rename_modules(decoder_config.tensors.published)
        if decoder_config.state_sizes and has_mlx_layout(checkpoint):
            decoder_config = _adapt_to_mlx(decoder_config, config["model_type"])
        if has_own_head(checkpoint) and not (
            plan.device.type == "cuda" and repeats_embedding(checkpoint, decoder_config)
        ):
            decoder_config = replace(decoder_config, tied=False)
        check_tensor_names(DecoderWeights(checkpoint, decoder_config, plan.quantization, plan.dtype, plan.device))
    except Unfusable as reason:
        if plan.quantization:
            raise LoadError(f"{plan.quantization.subject} run on the fused decoder only, and {reason}.") from None
        log.info("The model runs through Transformers: %s.", reason)
        return None
    return decoder_config


def _adapt_to_mlx(decoder_config: DecoderConfig, model_type: str) -> DecoderConfig:
    """Return the config for the numbers that MLX stores. Raises LoadError if they cannot be read."""
    if model_type == FOLDED_BY_MLX:
        raise LoadError(
            f"The folder was written for MLX, whose {model_type} models have other numbers; name the model that it was "
            "made from."
        )
    return replace(decoder_config, norms=replace(decoder_config.norms, offset=0.0))


def repeats_embedding(checkpoint: Checkpoint, config: DecoderConfig) -> bool:
    """Whether the config ties the head, and the file has it with the same numbers as the embedding.

    The comparison reads both, so that a GPU does not hold them twice; on a CPU the embedding stays in the file anyway.
    """
    names = [f"{name}.weight" for name in (config.tensors.head, config.tensors.embedding)]
    shape = config.vocab_size, config.hidden_size
    if not config.tied or not all(map(checkpoint.has_plain_numbers, names)):
        return False
    if any(checkpoint.tensor_shape(name) != shape for name in names):
        return False
    head, embedding = (checkpoint.view_tensor(name, *shape) for name in names)
    return head.dtype == embedding.dtype and torch.equal(head, embedding)


def architecture_name(config: dict[str, Any]) -> str:
    """Return the name of the model's architecture, or its type if the config names none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else config["model_type"]


def check_state_settings(settings: ParleySettings, architecture: str) -> None:
    """Raise LoadError if the settings ask for anything that a model with layers that keep a state does not offer."""
    refusal = f"{architecture} has layers that keep a state of each sequence"
    if settings.shared and (settings.staging is not None or resolve_device(settings.device).type != "cpu"):
        raise LoadError(
            f"{refusal}, which is handed over between instances on CPUs and without --kv-staging only: with --device "
            "cuda it runs without --role."
        )


def check_draft_tokenizer(folder: Path, draft_folder: Path) -> None:
    """Raise LoadError unless the draft model generates tokens, with the tokenizer of the decoder in ``folder``."""
    if is_encoder(read_config(draft_folder)):
        raise LoadError(f"{draft_folder} cannot be the draft model: it only makes vectors.")
    from parley.text.tokens.json_files import BadTokenizer
    from parley.text.tokens.tokenizer import Tokenizer  # engines without a draft start faster

    try:
        vocabularies = [
            Tokenizer.from_folder(model_folder).backend.get_vocab() for model_folder in (folder, draft_folder)
        ]
    except BadTokenizer as error:
        raise LoadError(f"{draft_folder} cannot be the draft model: {error}") from None
    if vocabularies[0] != vocabularies[1]:
        raise LoadError(f"{draft_folder} cannot be the draft model: its tokenizer differs from the model's.")


def resolve_dtype(name: str, config: dict[str, Any], device: torch.device) -> torch.dtype:
    """Return the dtype that the settings name; ``auto``: float32 for models saved so, else bfloat16 or float16.

    On the CPU float16 is bfloat16, too: it has the range and the kernels. That the weights are rounded is logged.
    Raises LoadError.
    """
    declared = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name == "auto":
        wide_dtypes = ("float32", "float64")
        dtype = torch.float32 if declared in wide_dtypes else DTYPE_NAMES.get(declared, torch.bfloat16)
    elif name in DTYPE_NAMES:
        dtype = DTYPE_NAMES[name]
    else:
        raise LoadError(f"dtype {name} is unknown; it must be auto, bfloat16, float16, half or float32.")
    if dtype == torch.float16 and device.type == "cpu":
        dtype = torch.bfloat16
    if dtype == torch.bfloat16 and {"float16", "fp16", "half"} & {name, declared}:
        log.info("float16 is computed in bfloat16, which rounds plain weights to 8 bits; --dtype fp32 does not.")
    return dtype


def read_context_length(config: dict[str, Any], requested: int | None) -> int:
    """Return the context length in tokens: the model's own maximum, or ``requested`` if that is lower."""
    if isinstance(text_config := config.get("text_config"), dict):  # multimodal models keep it there
        config = {**config, **text_config}
    declared = next(
        (config[name] for name in LENGTH_FIELDS if type(config.get(name)) is int and config[name] > 0), None
    )
    if requested is None:
        return min(declared or FALLBACK_LENGTH, MAX_LENGTH)
    if requested < 1:
        raise LoadError(f"max_model_len is {requested}; it must be at least 1.")
    if requested > MAX_LENGTH:
        raise LoadError(f"max_model_len is {requested}; it must be at most {MAX_LENGTH}.")
    if declared is not None and requested > declared:
        raise LoadError(f"max_model_len is {requested}, but the model was made for at most {declared} tokens.")
    return requested
