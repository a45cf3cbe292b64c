"""From settings to a runner: reads the config, chooses how to run the model, sizes the KV cache.

This module knows no kernels. LoadError messages are sentences for the person who started the server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parley.core.sequence import BLOCK_SIZE
from parley.model.checkpoint import quantization as quantised
from parley.model.checkpoint.files import Checkpoint, LoadError, read_config
from parley.model.checkpoint.quantization import Quantization
from parley.model.draft_model import DraftModel
from parley.model.encoder_runner import EncoderRunner
from parley.model.load.bert import is_encoder, load_encoder
from parley.model.load.fuse import EMBEDDING_TENSOR, fuse_decoder
from parley.model.load.kv_fingerprint import kv_fingerprint
from parley.model.load.memory import free_memory, guard_allocation, kv_page_count, staging_page_count
from parley.model.load.packed_cache import PackedWeightCache, open_packed_cache
from parley.model.load.reference import DECODER_TOLERANCE, PROBE_TOKENS, decoder_deviation
from parley.model.networks.config import Unfusable, read_decoder_config
from parley.model.networks.kv_staging import StagingBuffer
from parley.model.networks.network import DecoderNetwork
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.pooling import PoolingRecipe, read_pooling_recipe
from parley.model.runner import DecoderRunner
from parley.model.sampling.grammar_mask import GrammarCache
from parley.text.tokens.tokenizer import BadTokenizer, Tokenizer
from parley.types import Arena, ModelInfo, Settings

__all__ = ["LoadError", "load_runner"]

log = logging.getLogger("parley.engine")

ProgressReport = Callable[[str, float], None]

DTYPE_NAMES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
}
KV_DTYPES = ("auto", "int8")
# The names of the context length in config.json, most common first.
LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
FALLBACK_LENGTH = 2048


def load_runner(settings: Settings, progress: ProgressReport) -> tuple[DecoderRunner | EncoderRunner, ModelInfo]:
    """Load the model that the settings name. ``progress(stage, fraction)`` goes from 0 to 1. Raises LoadError."""
    progress("reading the config", 0.0)
    folder = Path(settings.model)
    config = read_config(folder)
    return (_load_encoder if is_encoder(config) else _load_decoder)(settings, folder, config, progress)


def _load_encoder(
    settings: Settings, folder: Path, config: dict[str, Any], progress: ProgressReport
) -> tuple[EncoderRunner, ModelInfo]:
    """Load an encoder. It computes in float32, because its vectors are compared with others computed in float32."""
    if settings.quantization != "none" or "quantization_config" in config:
        raise LoadError("Encoders run on plain weights only, but quantised weights were asked for.")
    device = _resolve_device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    recipe = read_pooling_recipe(folder) or PoolingRecipe(("mean",))
    checkpoint = Checkpoint(folder)
    dtype = torch.float32
    size, free_bytes = checkpoint.parameter_count * dtype.itemsize, free_memory(device)
    if size > free_bytes:
        raise LoadError(f"The weights take {size >> 20} MiB, but only {free_bytes >> 20} MiB of memory are free.")
    with guard_allocation("the model's weights"):
        encoder = load_encoder(
            checkpoint, config, dtype, device, lambda done: progress("loading the weights", 0.05 + 0.85 * done)
        )
        longest = encoder.config.max_length
        length = settings.max_model_len or min(longest, recipe.max_text_tokens or longest)
        if length > longest:
            raise LoadError(f"max_model_len is {length}, but the model was made for at most {longest} tokens.")
        reader = EncoderRunner(encoder, recipe, max_model_len=length)
        progress("warming up", 0.96)
        reader.warm_up()
    progress("ready", 1.0)
    return reader, ModelInfo(
        architecture=_architecture_name(config),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        parameters=checkpoint.parameter_count,
        vocab_size=reader.vocab_size,
        max_model_len=length,
        weights_bytes=size,
        kv_bytes=0,
        kv_blocks=0,
        block_size=BLOCK_SIZE,
        fused=True,
        generates=False,
        dimensions=reader.dimensions,
    )


def _architecture_name(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else config["model_type"]


def _load_decoder(
    settings: Settings, folder: Path, config: dict[str, Any], progress: ProgressReport
) -> tuple[DecoderRunner, ModelInfo]:
    """Load a decoder with its KV cache."""
    quantization = quantised.read_quantization(config, settings.quantization)
    dtype = resolve_dtype(settings.dtype, config)
    device = _resolve_device(settings.device)
    if settings.kv_dtype not in KV_DTYPES:
        raise LoadError(f"kv_dtype {settings.kv_dtype} is unknown; it must be {' or '.join(KV_DTYPES)}.")
    int8 = settings.kv_dtype == "int8"
    if quantization and not settings.lowering:
        raise LoadError("Quantised weights run on the fused decoder only, and lowering is off.")
    if quantization and device.type != "cpu":
        raise LoadError(f"Quantised weights run on the CPU only, and the device is {device}.")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    length = read_context_length(config, settings.max_model_len)

    def report_weights(fraction: float) -> None:
        progress("loading the weights", 0.05 + 0.85 * fraction)

    network, lowered = _load_network(settings, folder, config, quantization, length, report_weights)
    draft_network = None
    if settings.draft_model is not None:
        draft_network = _load_draft_network(settings, folder, Path(settings.draft_model), length)
    progress("reserving the KV cache", 0.92)
    total_page_bytes = PagedKV.page_bytes(network.layers, dtype, device, int8=int8)
    if draft_network is not None:  # the draft model needs as many pages
        total_page_bytes += PagedKV.page_bytes(draft_network.network.layers, draft_network.dtype, device, int8=int8)
    blocks = kv_page_count(total_page_bytes, device, length, settings)
    if blocks * BLOCK_SIZE < length:
        length = blocks * BLOCK_SIZE
        log.info("The context is reduced to %d tokens, the size of the KV cache.", length)
    with guard_allocation("a KV cache of this size"):
        needs_staging = settings.shared and (device.type != "cpu" or settings.staging is not None)
        pages = PagedKV(network.layers, blocks, dtype, device, int8=int8, shared=settings.shared and not needs_staging)
        staging = None
        if needs_staging:
            cache_page_bytes = PagedKV.page_bytes(network.layers, dtype, device, int8=int8)
            staging = StagingBuffer(pages, min(blocks, staging_page_count(cache_page_bytes, settings)))
        recipe = _decoder_pooling(folder)
        grammars = GrammarCache(folder, network.vocab_size)
        draft = None
        if draft_network is not None:
            kv = PagedKV(draft_network.network.layers, blocks, draft_network.dtype, device, int8=int8)
            draft = DraftModel(draft_network.network, kv, max_model_len=min(length, draft_network.length))
            draft.warm_up()
        runner = DecoderRunner(
            network,
            pages,
            max_model_len=length,
            slots=settings.max_batch,
            recipe=recipe,
            max_rank=settings.max_rank,
            grammars=grammars,
            proposer=draft,
            staging=staging,
        )
        progress("warming up", 0.96)
        runner.warm_up()
    method = quantization.method or quantization.setting
    arena = _describe_arena(settings, folder, pages, staging, method, lowered, length) if settings.shared else None
    progress("ready", 1.0)
    return runner, ModelInfo(
        architecture=_architecture_name(config),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        parameters=network.parameters,
        vocab_size=network.vocab_size,
        max_model_len=length,
        weights_bytes=network.weights_bytes + (draft_network.network.weights_bytes if draft_network is not None else 0),
        kv_bytes=blocks * total_page_bytes,
        kv_blocks=blocks,
        block_size=BLOCK_SIZE,
        fused=lowered,
        quantization=method,
        kv_dtype=settings.kv_dtype,
        dimensions=runner.dimensions,
        arena=arena,
    )


def _describe_arena(
    settings: Settings,
    folder: Path,
    pages: PagedKV,
    staging: StagingBuffer | None,
    quantization: str,
    lowered: bool,
    length: int,
) -> Arena:
    """Describe the pages (or the staging buffer) for other processes: location, layout and content."""
    files = Checkpoint(folder).files
    try:
        layout = kv_fingerprint(
            folder,
            files,
            pages,
            quantization=quantization,
            lowered=lowered,
            length=length,
            trust_marks=settings.trust_marks,
        )
    except OSError as error:
        raise LoadError(f"The model's files cannot be read: {error.strerror}.") from None
    visible = staging or pages
    block_count = staging.place_count if staging else pages.blocks
    return Arena(os.getpid(), visible.file, block_count, visible.regions, layout)


def _load_network(
    settings: Settings,
    folder: Path,
    config: dict[str, Any],
    quantization: Quantization,
    length: int,
    progress: Callable[[float], None],
) -> tuple[DecoderNetwork, bool]:
    """Load a decoder. Returns it and whether it is the fused one. Raises LoadError."""
    dtype, device = resolve_dtype(settings.dtype, config), _resolve_device(settings.device)
    checkpoint = Checkpoint(folder)
    if EMBEDDING_TENSOR.removeprefix("model.") in checkpoint:
        checkpoint.add_prefix("model.")  # a body saved without its head, as embedding models are
    size, free_bytes = quantization.least_bytes(checkpoint, dtype), free_memory(device)
    if size > free_bytes:
        raise LoadError(f"The weights take {size >> 20} MiB, but only {free_bytes >> 20} MiB of memory are free.")
    with guard_allocation("the model's weights"):
        if settings.lowering:
            packed_cache = None
            if settings.pack_cache:
                files = [folder / "config.json", *checkpoint.files]
                packed_cache = open_packed_cache(
                    folder, files, f"{settings.quantization}-{dtype}".replace("torch.", "")
                )
            network = _try_fused(checkpoint, config, quantization, dtype, device, length, progress, packed_cache)
            if network is not None:
                return network, True
        from parley.model.load.transformers import load_transformers  # imports Transformers, which takes seconds

        return load_transformers(folder, dtype, device, progress, length), False


class DraftNetwork(NamedTuple):
    """A draft model's network, dtype and longest context."""

    network: DecoderNetwork
    dtype: torch.dtype
    length: int


def _load_draft_network(settings: Settings, folder: Path, draft_folder: Path, length: int) -> DraftNetwork:
    """Load the draft model for the decoder in ``folder``. Raises LoadError, also if their tokenizers differ."""
    config = read_config(draft_folder)
    if is_encoder(config):
        raise LoadError(f"{draft_folder} cannot guess tokens: it only makes vectors.")
    try:
        vocabularies = [Tokenizer.from_folder(each).backend.get_vocab() for each in (folder, draft_folder)]
    except BadTokenizer as error:
        raise LoadError(f"{draft_folder} cannot guess tokens: {error}") from None
    if vocabularies[0] != vocabularies[1]:
        raise LoadError(f"{draft_folder} cannot guess tokens: its tokenizer differs from the model's.")
    quantization = quantised.read_quantization(config, settings.quantization)
    length = min(length, read_context_length(config, None))
    network, _ = _load_network(settings, draft_folder, config, quantization, length, lambda fraction: None)
    return DraftNetwork(network, resolve_dtype(settings.dtype, config), length)


def _decoder_pooling(folder: Path) -> PoolingRecipe | None:
    """Return a decoder's pooling for embeddings: the last token's state, which has seen all others; or None."""
    try:
        recipe = read_pooling_recipe(folder) or PoolingRecipe(("lasttoken",))
    except LoadError as error:
        log.info("The model makes no vectors: %s", error)
        return None
    if not recipe.is_last_token:
        log.info("The model makes no vectors: its pooling is %s, but a decoder supports lasttoken only.",
                 ", ".join(recipe.modes))  # fmt: skip
        return None
    return recipe


def _try_fused(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    quantization: Quantization,
    dtype: torch.dtype,
    device: torch.device,
    length: int,
    progress: Callable[[float], None],
    packed_cache: PackedWeightCache | None,
) -> DecoderNetwork | None:
    """Build the fused decoder. Returns None if the model must run through Transformers. Raises LoadError."""
    try:
        decoder_config = read_decoder_config(config)
        decoder = fuse_decoder(
            checkpoint, decoder_config, quantization, dtype, device, max(length, PROBE_TOKENS), progress, packed_cache
        )
    except Unfusable as reason:
        if quantization:
            raise LoadError(f"Quantised weights run on the fused decoder only, and {reason}.") from None
        log.info("The model runs through Transformers: %s.", reason)
        return None
    error = decoder_deviation(decoder, checkpoint, quantization)
    if not error <= DECODER_TOLERANCE[dtype] + quantization.extra_tolerance:
        if quantization:
            raise LoadError(f"The fused decoder is off by {error:.2g} with quantised weights, and is not used.")
        log.warning("The fused decoder is off by %.2g and is not used; the model runs through Transformers.", error)
        return None
    return decoder


def resolve_dtype(name: str, config: dict[str, Any]) -> torch.dtype:
    if name == "auto":
        declared = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        return torch.float32 if declared in ("float32", "float64") else torch.bfloat16
    if name not in DTYPE_NAMES:
        raise LoadError(f"dtype {name} is unknown; it must be auto, bfloat16 or float32.")
    return DTYPE_NAMES[name]


def _resolve_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise LoadError(f"device {name} is unknown; it must be cpu or cuda.") from None
    if device.type not in ("cpu", "cuda"):
        raise LoadError(f"device {name} is not supported; it must be cpu or cuda.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LoadError("device cuda was asked for, but torch finds no usable GPU.")
    return device


def read_context_length(config: dict[str, Any], requested: int | None) -> int:
    """Return the context length in tokens: the model's own maximum, or ``requested`` if that is lower."""
    if isinstance(text_config := config.get("text_config"), dict):  # multimodal models keep it there
        config = {**config, **text_config}
    declared = next(
        (config[name] for name in LENGTH_FIELDS if type(config.get(name)) is int and config[name] > 0), None
    )
    if requested is None:
        return declared or FALLBACK_LENGTH
    if requested < 1:
        raise LoadError(f"max_model_len is {requested}; it must be at least 1.")
    if declared is not None and requested > declared:
        raise LoadError(f"max_model_len is {requested}, but the model was made for at most {declared} tokens.")
    return requested
