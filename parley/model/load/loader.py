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
from parley.model.checkpoint.quantization import Quantisation
from parley.model.draft_model import Draft
from parley.model.encoder_runner import Reader
from parley.model.load.bert import is_encoder, load_encoder
from parley.model.load.fuse import EMBEDDING, lower
from parley.model.load.kv_fingerprint import fingerprint
from parley.model.load.memory import free, guarded, places, room
from parley.model.load.packed_cache import Packs, find
from parley.model.load.reference import PROBE, TOLERANCE, deviation
from parley.model.networks.config import Unfit, read_shape
from parley.model.networks.kv_staging import Staging
from parley.model.networks.network import Network
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.pooling import Recipe, read_recipe
from parley.model.runner import Runner
from parley.model.sampling.grammar_mask import Grammars
from parley.text.tokens.tokenizer import BadTokenizer, Tokenizer
from parley.types import Arena, ModelInfo, Settings

__all__ = ["LoadError", "load"]

log = logging.getLogger("parley.engine")

Report = Callable[[str, float], None]

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
}
KV_DTYPES = ("auto", "int8")
# The names of the context length in config.json, most common first.
LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
FALLBACK_LENGTH = 2048


def load(settings: Settings, progress: Report) -> tuple[Runner | Reader, ModelInfo]:
    """Load the model that the settings name. ``progress(stage, fraction)`` goes from 0 to 1. Raises LoadError."""
    progress("reading the config", 0.0)
    folder = Path(settings.model)
    config = read_config(folder)
    return (_read if is_encoder(config) else _decode)(settings, folder, config, progress)


def _read(settings: Settings, folder: Path, config: dict[str, Any], progress: Report) -> tuple[Reader, ModelInfo]:
    """Load an encoder. It computes in float32, because its vectors are compared with others computed in float32."""
    if settings.quantization != "none" or "quantization_config" in config:
        raise LoadError("Encoders run on plain weights only, but quantised weights were asked for.")
    device = _device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    recipe = read_recipe(folder) or Recipe(("mean",))
    checkpoint = Checkpoint(folder)
    dtype = torch.float32
    size, left = checkpoint.parameters * dtype.itemsize, free(device)
    if size > left:
        raise LoadError(f"The weights take {size >> 20} MiB, but only {left >> 20} MiB of memory are free.")
    with guarded("the model's weights"):
        encoder = load_encoder(
            checkpoint, config, dtype, device, lambda done: progress("loading the weights", 0.05 + 0.85 * done)
        )
        most = encoder.form.longest
        length = settings.max_model_len or min(most, recipe.longest or most)
        if length > most:
            raise LoadError(f"max_model_len is {length}, but the model was made for at most {most} tokens.")
        reader = Reader(encoder, recipe, max_model_len=length)
        progress("warming up", 0.96)
        reader.warm()
    progress("ready", 1.0)
    return reader, ModelInfo(
        architecture=_architecture(config),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        parameters=checkpoint.parameters,
        vocab_size=reader.vocab_size,
        max_model_len=length,
        weights_bytes=size,
        kv_bytes=0,
        kv_blocks=0,
        block_size=BLOCK_SIZE,
        lowered=True,
        generates=False,
        dimensions=reader.dimensions,
    )


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else config["model_type"]


def _decode(settings: Settings, folder: Path, config: dict[str, Any], progress: Report) -> tuple[Runner, ModelInfo]:
    """Load a decoder with its KV cache."""
    quantisation = quantised.read(config, settings.quantization)
    dtype = _dtype(settings.dtype, config)
    device = _device(settings.device)
    if settings.kv_dtype not in KV_DTYPES:
        raise LoadError(f"kv_dtype {settings.kv_dtype} is unknown; it must be {' or '.join(KV_DTYPES)}.")
    int8 = settings.kv_dtype == "int8"
    if quantisation and not settings.lowering:
        raise LoadError("Quantised weights run on the fused decoder only, and lowering is off.")
    if quantisation and device.type != "cpu":
        raise LoadError(f"Quantised weights run on the CPU only, and the device is {device}.")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    length = _length(config, settings.max_model_len)

    def weights(fraction: float) -> None:
        progress("loading the weights", 0.05 + 0.85 * fraction)

    network, lowered = _network(settings, folder, config, quantisation, length, weights)
    helper = None
    if settings.draft is not None:
        helper = _helper(settings, folder, Path(settings.draft), length)
    progress("reserving the KV cache", 0.92)
    page = PagedKV.page_bytes(network.layers, dtype, device, int8=int8)
    if helper is not None:  # the draft model needs as many pages
        page += PagedKV.page_bytes(helper.network.layers, helper.dtype, device, int8=int8)
    blocks = room(page, device, length, settings)
    if blocks * BLOCK_SIZE < length:
        length = blocks * BLOCK_SIZE
        log.info("The context is reduced to %d tokens, the size of the KV cache.", length)
    with guarded("a KV cache of this size"):
        apart = settings.shared and (device.type != "cpu" or settings.staging is not None)
        pages = PagedKV(network.layers, blocks, dtype, device, int8=int8, shared=settings.shared and not apart)
        staging = None
        if apart:
            each = PagedKV.page_bytes(network.layers, dtype, device, int8=int8)
            staging = Staging(pages, min(blocks, places(each, settings)))
        recipe = _recipe(folder)
        grammars = Grammars(folder, network.vocab_size)
        draft = None
        if helper is not None:
            kv = PagedKV(helper.network.layers, blocks, helper.dtype, device, int8=int8)
            draft = Draft(helper.network, kv, max_model_len=min(length, helper.length))
            draft.warm()
        runner = Runner(
            network,
            pages,
            max_model_len=length,
            slots=settings.max_batch,
            recipe=recipe,
            highest=settings.max_rank,
            grammars=grammars,
            proposer=draft,
            staging=staging,
        )
        progress("warming up", 0.96)
        runner.warm()
    method = quantisation.method or quantisation.wanted
    arena = _arena(folder, pages, staging, method, lowered, length) if settings.shared else None
    progress("ready", 1.0)
    return runner, ModelInfo(
        architecture=_architecture(config),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        parameters=network.parameters,
        vocab_size=network.vocab_size,
        max_model_len=length,
        weights_bytes=network.weights_bytes + (helper.network.weights_bytes if helper is not None else 0),
        kv_bytes=blocks * page,
        kv_blocks=blocks,
        block_size=BLOCK_SIZE,
        lowered=lowered,
        quantization=method,
        kv_dtype=settings.kv_dtype,
        dimensions=runner.dimensions,
        arena=arena,
    )


def _arena(
    folder: Path, pages: PagedKV, staging: Staging | None, quantization: str, lowered: bool, length: int
) -> Arena:
    """Describe the pages (or the staging buffer) for other processes: location, layout and content."""
    files = Checkpoint(folder).files
    try:
        layout = fingerprint(folder, files, pages, quantization=quantization, lowered=lowered, length=length)
    except OSError as error:
        raise LoadError(f"The model's files cannot be read: {error.strerror}.") from None
    seen = staging or pages
    return Arena(os.getpid(), seen.file, seen.blocks, seen.regions, layout)


def _network(
    settings: Settings,
    folder: Path,
    config: dict[str, Any],
    quantisation: Quantisation,
    length: int,
    progress: Callable[[float], None],
) -> tuple[Network, bool]:
    """Load a decoder. Returns it and whether it is the fused one. Raises LoadError."""
    dtype, device = _dtype(settings.dtype, config), _device(settings.device)
    checkpoint = Checkpoint(folder)
    if EMBEDDING.removeprefix("model.") in checkpoint:
        checkpoint.prefix("model.")  # a body saved without its head, as embedding models are
    size, left = quantisation.least(checkpoint, dtype), free(device)
    if size > left:
        raise LoadError(f"The weights take {size >> 20} MiB, but only {left >> 20} MiB of memory are free.")
    with guarded("the model's weights"):
        if settings.lowering:
            packs = None
            if settings.pack_cache:
                files = [folder / "config.json", *checkpoint.files]
                packs = find(folder, files, f"{settings.quantization}-{dtype}".replace("torch.", ""))
            network = _lower(checkpoint, config, quantisation, dtype, device, length, progress, packs)
            if network is not None:
                return network, True
        from parley.model.load.transformers import load_foreign  # imports Transformers, which takes seconds

        return load_foreign(folder, dtype, device, progress, length), False


class Helper(NamedTuple):
    """A draft model's network, dtype and longest context."""

    network: Network
    dtype: torch.dtype
    length: int


def _helper(settings: Settings, folder: Path, small: Path, length: int) -> Helper:
    """Load the draft model for the decoder in ``folder``. Raises LoadError, also if their tokenizers differ."""
    config = read_config(small)
    if is_encoder(config):
        raise LoadError(f"{small} cannot guess tokens: it only makes vectors.")
    try:
        spellings = [Tokenizer.load(each).backend.get_vocab() for each in (folder, small)]
    except BadTokenizer as error:
        raise LoadError(f"{small} cannot guess tokens: {error}") from None
    if spellings[0] != spellings[1]:
        raise LoadError(f"{small} cannot guess tokens: its tokenizer differs from the model's.")
    quantisation = quantised.read(config, settings.quantization)
    length = min(length, _length(config, None))
    network, _ = _network(settings, small, config, quantisation, length, lambda fraction: None)
    return Helper(network, _dtype(settings.dtype, config), length)


def _recipe(folder: Path) -> Recipe | None:
    """Return a decoder's pooling for embeddings: the last token's state, which has seen all others; or None."""
    try:
        recipe = read_recipe(folder) or Recipe(("lasttoken",))
    except LoadError as error:
        log.info("The model makes no vectors: %s", error)
        return None
    if not recipe.last:
        log.info("The model makes no vectors: its pooling is %s, but a decoder supports lasttoken only.",
                 ", ".join(recipe.modes))  # fmt: skip
        return None
    return recipe


def _lower(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    quantisation: Quantisation,
    dtype: torch.dtype,
    device: torch.device,
    length: int,
    progress: Callable[[float], None],
    packs: Packs | None,
) -> Network | None:
    """Build the fused decoder. Returns None if the model must run through Transformers. Raises LoadError."""
    try:
        shape = read_shape(config)
        decoder = lower(checkpoint, shape, quantisation, dtype, device, max(length, PROBE), progress, packs)
    except Unfit as reason:
        if quantisation:
            raise LoadError(f"Quantised weights run on the fused decoder only, and {reason}.") from None
        log.info("The model runs through Transformers: %s.", reason)
        return None
    error = deviation(decoder, checkpoint, quantisation)
    if not error <= TOLERANCE[dtype] + quantisation.noise:
        if quantisation:
            raise LoadError(f"The fused decoder is off by {error:.2g} with quantised weights, and is not used.")
        log.warning("The fused decoder is off by %.2g and is not used; the model runs through Transformers.", error)
        return None
    return decoder


def _dtype(name: str, config: dict[str, Any]) -> torch.dtype:
    if name == "auto":
        own = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        return torch.float32 if own in ("float32", "float64") else torch.bfloat16
    if name not in DTYPES:
        raise LoadError(f"dtype {name} is unknown; it must be auto, bfloat16 or float32.")
    return DTYPES[name]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise LoadError(f"device {name} is unknown; it must be cpu or cuda.") from None
    if device.type not in ("cpu", "cuda"):
        raise LoadError(f"device {name} is not supported; it must be cpu or cuda.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LoadError("device cuda was asked for, but torch finds no usable GPU.")
    return device


def _length(config: dict[str, Any], wanted: int | None) -> int:
    """Return the context length in tokens: the model's own maximum, or ``requested`` if that is lower."""
    if isinstance(inner := config.get("text_config"), dict):  # multimodal models keep it there
        config = {**config, **inner}
    own = next((config[name] for name in LENGTHS if type(config.get(name)) is int and config[name] > 0), None)
    if wanted is None:
        return own or FALLBACK_LENGTH
    if wanted < 1:
        raise LoadError(f"max_model_len is {wanted}; it must be at least 1.")
    if own is not None and wanted > own:
        raise LoadError(f"max_model_len is {wanted}, but the model was made for at most {own} tokens.")
    return wanted
