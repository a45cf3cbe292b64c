"""Loads a model as its settings say and ``load/plan.py`` decides, sizes the KV cache, and returns the runner.

This module knows no kernels. LoadError messages are sentences for the operator of the server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from parley import native
from parley.control_groups import core_count
from parley.core.sequence import PAGE_SIZE
from parley.model.checkpoint.files import Checkpoint, LoadError, read_config
from parley.model.decode_starter import start_on_gpu
from parley.model.draft_model import DraftModel
from parley.model.encoder_runner import EncoderRunner
from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.fuse import fuse_decoder
from parley.model.load.kv_fingerprint import kv_fingerprint
from parley.model.load.largest_step import measure_largest_step
from parley.model.load.memory import (
    FEWER_BITS,
    CacheSizes,
    free_device_memory,
    guard_allocation,
    plan_cache,
    refuse_large_weights,
    staging_page_count,
)
from parley.model.load.numeric_check.decoder_check import DECODER_TOLERANCE, PROBE_TOKENS, decoder_deviation
from parley.model.load.packed_cache import PackedWeightCache, open_packed_cache
from parley.model.load.plan import (
    DRAFT_KEEPS_STATES,
    ENCODER_DTYPE,
    DecoderPlan,
    architecture_name,
    check_draft_tokenizer,
    check_state_settings,
    find_fused_config,
    open_decoder,
    plan_decoder,
    plan_encoder,
)
from parley.model.load.text_encoders.classifier import load_classifier_head
from parley.model.load.text_encoders.encoders import is_encoder, load_encoder
from parley.model.load.text_encoders.sparse import load_sparse_head
from parley.model.load.text_encoders.whole_text import (
    is_whole_text_model,
    load_whole_text_decoder,
    load_whole_text_head,
    open_whole_text_weights,
    plan_whole_text,
)
from parley.model.load.towers import MediaTowers, load_towers, memory_needed_later, plan_towers, usable_towers
from parley.model.load.weight_size import refuse_weights_beyond_memory
from parley.model.media.encoder import TransformersEncoder
from parley.model.networks.kv_staging import StagingBuffer
from parley.model.networks.network import DecoderNetwork
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.pooling import PoolingRecipe, read_pooling_recipe
from parley.model.networks.state_arena import state_regions, state_slot_bytes
from parley.model.runner import DecoderRunner
from parley.model.sampling.grammar_mask import GrammarCache
from parley.native import library
from parley.types import Arena, ModelInfo, ParleySettings

__all__ = ["LoadError", "load_runner"]

log = logging.getLogger("parley.engine")

ProgressReport = Callable[[str, float], None]


def load_runner(settings: ParleySettings, progress: ProgressReport) -> tuple[DecoderRunner | EncoderRunner, ModelInfo]:
    """Load the model that the settings name. ``progress(stage, fraction)`` goes from 0 to 1. Raises LoadError."""
    if settings.device == "cpu" and library.must_compile():
        progress("compiling the kernels", 0.0)
        library.load_kernels()
    progress("reading the config", 0.0)
    folder = Path(settings.model)
    config = read_config(folder)
    if is_encoder(config):
        return _load_encoder(settings, folder, config, progress)
    if is_whole_text_model(folder, config):
        return _load_whole_text_decoder(settings, folder, config, progress)
    return _load_decoder(settings, folder, config, progress)


def _use_threads(count: int | None) -> None:
    """Let torch and the kernels compute with ``count`` threads. None: with one for each core that torch sees, or
    OMP_NUM_THREADS, unless the control groups allow less."""
    torch.set_num_threads(count or min(torch.get_num_threads(), core_count()))


def _load_encoder(
    settings: ParleySettings, folder: Path, config: dict[str, Any], progress: ProgressReport
) -> tuple[EncoderRunner, ModelInfo]:
    """Load an encoder. It computes in float32, because its vectors are compared with others computed in float32."""
    device, checkpoint, recipe, size = plan_encoder(settings, folder, config)
    _use_threads(settings.threads)
    with guard_allocation("the model's weights", "serve a smaller model"):
        encoder = load_encoder(
            checkpoint, config, device, lambda loaded_share: progress("loading the weights", 0.05 + 0.85 * loaded_share)
        )
        head = load_classifier_head(checkpoint, config, encoder.config.hidden_size, device)
        sparse_head = load_sparse_head(checkpoint, config, recipe.sparse, encoder.config.hidden_size, device)
        longest = encoder.config.max_length
        length = settings.max_model_len or min(longest, recipe.max_text_tokens or longest)
        reader = EncoderRunner(encoder, recipe, max_model_len=length, head=head, sparse_head=sparse_head)
        progress("warming up", 0.96)
        reader.warm_up()
    progress("ready", 1.0)
    info = _describe_encoder(config, reader, ENCODER_DTYPE)
    return reader, msgspec.structs.replace(info, parameters=checkpoint.parameter_count, weights_bytes=size)


def _load_whole_text_decoder(
    settings: ParleySettings, folder: Path, config: dict[str, Any], progress: ProgressReport
) -> tuple[EncoderRunner, ModelInfo]:
    """Load a decoder that reads whole texts, and generates nothing."""
    plan = plan_whole_text(settings, folder, config)
    _use_threads(settings.threads)
    with guard_allocation("the model's weights", "serve a smaller model"):
        weights = open_whole_text_weights(folder, plan)
        head = load_whole_text_head(folder, config, plan, weights.config)
        decoder = load_whole_text_decoder(
            weights, plan, lambda loaded_share: progress("loading the weights", 0.05 + 0.85 * loaded_share)
        )
        reader = EncoderRunner(decoder, plan.recipe, max_model_len=plan.decoder.length, head=head)
        progress("warming up", 0.96)
        reader.warm_up()
    progress("ready", 1.0)
    quantization = plan.decoder.quantization
    return reader, msgspec.structs.replace(
        _describe_encoder(config, reader, plan.decoder.dtype),
        parameters=decoder.decoder.parameters,
        weights_bytes=decoder.decoder.weights_bytes,
        quantization=quantization.method or quantization.setting,
    )


def _describe_encoder(config: dict[str, Any], reader: EncoderRunner, dtype: torch.dtype) -> ModelInfo:
    """Describe an encoder to the API process; the sizes of its weights are missing."""
    device, head = reader.encoder.device, reader.head
    return ModelInfo(
        architecture=architecture_name(config),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        kernels=native.kernels_in_use(dtype, device),
        parameters=0,
        vocab_size=reader.vocab_size,
        max_model_len=reader.max_model_len,
        weights_bytes=0,
        kv_bytes=0,
        kv_pages=0,
        page_tokens=PAGE_SIZE,
        fused=True,
        generates=False,
        dimensions=reader.dimensions,
        pooling="+".join(reader.recipe.modes),
        token_vectors="token_embed" in reader.pooling_tasks,
        token_dimensions=reader.token_dimensions,
        labels=head.labels if head is not None else [],
        token_classes=head is not None and head.by_token,
    )


class DraftNetwork(NamedTuple):
    """A draft model's network, dtype and longest context."""

    network: DecoderNetwork
    dtype: torch.dtype
    length: int


class LoadedDecoder(NamedTuple):
    """The networks that a decoder consists of. ``is_fused``: it is the fused decoder, not Transformers' own code."""

    decoder: DecoderNetwork
    is_fused: bool
    draft: DraftNetwork | None
    towers: MediaTowers | None


def _load_decoder(
    settings: ParleySettings, folder: Path, config: dict[str, Any], progress: ProgressReport
) -> tuple[DecoderRunner, ModelInfo]:
    """Load a decoder with its KV cache."""
    plan = plan_decoder(settings, config)
    networks = _load_networks(settings, folder, config, plan, progress)
    progress("reserving the KV cache", 0.92)
    sizes = _plan_decoder_cache(settings, plan, networks)
    if sizes.pages * PAGE_SIZE < plan.length:
        plan = plan._replace(length=sizes.pages * PAGE_SIZE)
        log.info("The context is reduced to %d tokens, the size of the KV cache.", plan.length)
    with guard_allocation(
        f"a KV cache of {sizes.pages * PAGE_SIZE:,} tokens", "set a lower --kv-memory or --max-batch"
    ):
        networks.decoder.set_context_length(plan.length)
        pages, staging = _reserve_pages(settings, plan, networks.decoder, sizes)
        runner = DecoderRunner(
            networks.decoder,
            pages,
            max_model_len=plan.length,
            slots=sizes.slots,
            recipe=_decoder_pooling(folder),
            max_rank=settings.max_rank,
            grammars=GrammarCache(folder, networks.decoder.vocab_size),
            proposer=None if networks.draft is None else _start_draft_model(networks.draft, plan, sizes.pages),
            staging=staging,
            media_encoder=_media_encoder(settings, networks),
            snapshot_slots=sizes.snapshots,
        )
        if plan.device.type == "cuda":
            start_on_gpu(runner)
        progress("warming up", 0.96)
        runner.warm_up()
    info = _describe_decoder(settings, folder, config, plan, networks, runner)
    progress("ready", 1.0)
    return runner, info


def _load_networks(
    settings: ParleySettings, folder: Path, config: dict[str, Any], plan: DecoderPlan, progress: ProgressReport
) -> LoadedDecoder:
    """Load the decoder and its draft model. Media encoders are only planned. Raises LoadError."""
    towers = plan_towers(folder, config, plan.dtype, plan.device)
    _use_threads(settings.threads)

    def report_weights(fraction: float) -> None:
        progress("loading the weights", 0.05 + 0.85 * fraction)

    decoder, is_fused = _load_network(settings, folder, plan, report_weights)
    if decoder.state_sizes:
        check_state_settings(settings, architecture_name(config))
    draft = None
    if settings.draft_model is not None:
        draft = _load_draft_network(settings, folder, Path(settings.draft_model), plan.length)
    return LoadedDecoder(decoder, is_fused, draft, usable_towers(towers, is_fused=is_fused))


def _page_bytes(plan: DecoderPlan, networks: LoadedDecoder) -> int:
    """Return the bytes of a page of the KV cache, together with the draft model's, which needs as many pages."""
    size = PagedKV.page_bytes(networks.decoder.kv_layers, plan.dtype, plan.device, int8=plan.int8_kv)
    if networks.draft is not None:
        layers, dtype = networks.draft.network.kv_layers, networks.draft.dtype
        size += PagedKV.page_bytes(layers, dtype, plan.device, int8=plan.int8_kv)
    return size


def _plan_decoder_cache(settings: ParleySettings, plan: DecoderPlan, networks: LoadedDecoder) -> CacheSizes:
    """Return the sizes of the KV cache, which leaves memory for media encoders and steps. Raises LoadError."""
    network, set_aside = networks.decoder, settings.set_aside
    if networks.towers is not None:
        set_aside += memory_needed_later(settings, networks.towers, is_fused=networks.is_fused)
    if plan.device.type == "cuda" and settings.kv_memory is None:
        set_aside += measure_largest_step(network, plan.dtype, plan.device, plan.length, settings)
    settings = msgspec.structs.replace(settings, set_aside=set_aside)
    state_bytes = state_slot_bytes(network.state_sizes)
    page_bytes, position_bytes = _page_bytes(plan, networks), network.position_bytes(plan.length)
    if networks.draft is not None:
        position_bytes += networks.draft.network.position_bytes(networks.draft.length)
    sizes = plan_cache(page_bytes, plan.device, plan.length, settings, state_bytes, position_bytes)
    cache_bytes, free_bytes = sizes.pages * page_bytes, free_device_memory(plan.device)
    if cache_bytes > free_bytes and plan.device.type == "cpu":  # Linux counts memory only when it is written
        log.warning(
            "The KV cache may grow to %d MiB, but only %d MiB of memory are free. The kernel may kill the engine when "
            "the cache fills; --kv-memory sets its size.",
            cache_bytes >> 20, free_bytes >> 20,
        )  # fmt: skip
    if network.state_sizes:
        log.info(
            "%d sequences run at once: each has a state of %.1f MiB. %d more are kept for prefixes and drafts.",
            sizes.slots, state_bytes / (1 << 20), sizes.snapshots,
        )  # fmt: skip
    return sizes


def _reserve_pages(
    settings: ParleySettings, plan: DecoderPlan, network: DecoderNetwork, sizes: CacheSizes
) -> tuple[PagedKV, StagingBuffer | None]:
    """Allocate the KV cache, and a staging buffer if other processes exchange pages but cannot see the cache."""
    needs_staging = settings.shared and (plan.device.type != "cpu" or settings.staging is not None)
    pages = PagedKV(
        network.kv_layers,
        sizes.pages,
        plan.dtype,
        plan.device,
        int8=plan.int8_kv,
        shared=settings.shared and not needs_staging,
        spare_bytes=(sizes.slots + sizes.snapshots) * state_slot_bytes(network.state_sizes),
    )
    if not needs_staging:
        return pages, None
    page_bytes = PagedKV.page_bytes(network.kv_layers, plan.dtype, plan.device, int8=plan.int8_kv)
    return pages, StagingBuffer(pages, min(sizes.pages, staging_page_count(page_bytes, settings)))


def _start_draft_model(draft: DraftNetwork, plan: DecoderPlan, page_count: int) -> DraftModel:
    """Return the draft model with pages of its own, warmed up."""
    pages = PagedKV(draft.network.kv_layers, page_count, draft.dtype, plan.device, int8=plan.int8_kv)
    length = min(plan.length, draft.length)
    draft.network.set_context_length(length)
    model = DraftModel(draft.network, pages, max_model_len=length)
    model.warm_up()
    return model


def _describe_decoder(
    settings: ParleySettings,
    folder: Path,
    config: dict[str, Any],
    plan: DecoderPlan,
    networks: LoadedDecoder,
    runner: DecoderRunner,
) -> ModelInfo:
    """Describe the loaded decoder to the API process. Raises LoadError."""
    network, method = networks.decoder, plan.quantization.method or plan.quantization.setting
    draft_bytes = 0 if networks.draft is None else networks.draft.network.weights_bytes
    state_count = 0 if runner.state_slots is None else runner.state_slots + runner.snapshot_slots
    return ModelInfo(
        architecture=architecture_name(config),
        dtype=str(plan.dtype).removeprefix("torch."),
        device=str(plan.device),
        kernels=native.kernels_in_use(plan.dtype, plan.device) if networks.is_fused else "torch",
        parameters=network.parameters,
        vocab_size=network.vocab_size,
        max_model_len=plan.length,
        weights_bytes=network.weights_bytes + draft_bytes,
        kv_bytes=runner.page_count * _page_bytes(plan, networks),
        kv_pages=runner.page_count,
        state_bytes=state_count * state_slot_bytes(network.state_sizes),
        page_tokens=PAGE_SIZE,
        fused=networks.is_fused,
        quantization=method,
        kv_dtype=settings.kv_dtype,
        dimensions=runner.dimensions,
        pooling="+".join(runner.recipe.modes) if runner.recipe is not None else "",
        arena=_describe_arena(settings, folder, plan, runner, is_fused=networks.is_fused) if settings.shared else None,
        media_kinds=frozenset() if networks.towers is None else networks.towers.family.kinds,
    )


def _media_encoder(settings: ParleySettings, networks: LoadedDecoder) -> TransformersEncoder | None:
    """Return the encoder of media; None if the model reads text only. Raises LoadError if the encoder is loaded now."""
    towers = networks.towers
    if towers is None:
        return None
    if networks.is_fused:
        encoder = TransformersEncoder(partial(load_towers, towers), towers.dtype, towers.device)
    else:
        # These import Transformers, as loading the network has done.
        from parley.model.load.transformers_network import TransformersNetwork
        from parley.model.media.slices import optimize_encoders

        assert isinstance(networks.decoder, TransformersNetwork)
        encoder = TransformersEncoder(partial(optimize_encoders, networks.decoder.model), towers.dtype, towers.device)
    if settings.media_eager:
        encoder.load()
    return encoder


def _describe_arena(
    settings: ParleySettings,
    folder: Path,
    plan: DecoderPlan,
    runner: DecoderRunner,
    *,
    is_fused: bool,
) -> Arena:
    """Describe the pages (or the staging buffer) for other processes: location, layout and content."""
    pages, staging, sizes = runner.pages, runner.staging, runner.network.state_sizes
    files = Checkpoint(folder).files
    try:
        layout = kv_fingerprint(
            folder,
            files,
            pages,
            state_sizes=sizes,
            quantization=plan.quantization.method or plan.quantization.setting,
            is_fused=is_fused,
            length=plan.length,
            trust_marks=settings.trust_marks,
        )
    except OSError as error:
        raise LoadError(f"The model's files cannot be read: {error.strerror}.") from None
    visible = staging or pages
    page_count = staging.staging_page_count if staging else pages.page_count
    arena = Arena(os.getpid(), visible.file, page_count, visible.regions, layout)
    if runner.state_slots is None:
        return arena
    slots, snapshots = runner.state_slots, runner.snapshot_slots
    regions = state_regions(sizes, slots + snapshots, slots, pages.spare_offset)
    return msgspec.structs.replace(arena, states=snapshots, state_regions=regions)


def _load_network(
    settings: ParleySettings, folder: Path, plan: DecoderPlan, progress: Callable[[float], None]
) -> tuple[DecoderNetwork, bool]:
    """Load a decoder. Returns it and whether it is the fused one. Raises LoadError."""
    checkpoint = open_decoder(folder, plan)
    with guard_allocation("the model's weights", FEWER_BITS):
        if settings.lowering:
            packed_cache = None
            if settings.pack_cache and plan.device.type == "cpu":
                files = [folder / "config.json", *checkpoint.files]
                packed_cache = open_packed_cache(
                    folder, files, f"{settings.quantization}-{plan.dtype}".replace("torch.", "")
                )
            # The context may become shorter; a step, which is measured before, never has more tokens than this
            first_length = max(min(plan.length, settings.step_tokens), PROBE_TOKENS)
            network = _try_fused(checkpoint, plan, first_length, progress, packed_cache)
            if network is not None:
                return network, True
        refuse_large_weights(plan.quantization.min_bytes(checkpoint, plan.dtype), plan.device)
        from parley.model.load.transformers import load_transformers  # imports Transformers, which takes seconds

        return load_transformers(folder, plan.dtype, plan.device, progress, plan.length), False


def _load_draft_network(settings: ParleySettings, folder: Path, draft_folder: Path, length: int) -> DraftNetwork:
    """Load the draft model for the decoder in ``folder``. Raises LoadError, also if their tokenizers differ."""
    check_draft_tokenizer(folder, draft_folder)
    config = read_config(draft_folder)
    plan = plan_decoder(msgspec.structs.replace(settings, max_model_len=None), config)
    plan = plan._replace(length=min(length, plan.length))
    network, _ = _load_network(settings, draft_folder, plan, lambda fraction: None)
    if network.state_sizes:
        raise LoadError(DRAFT_KEEPS_STATES.format(draft_folder))
    return DraftNetwork(network, plan.dtype, plan.length)


def _decoder_pooling(folder: Path) -> PoolingRecipe | None:
    """Return a decoder's pooling for embeddings: the last token's state, which has seen all others; or None."""
    try:
        recipe = read_pooling_recipe(folder) or PoolingRecipe(("lasttoken",))
    except LoadError as error:
        log.info("The model makes no vectors: %s", error)
        return None
    if not recipe.is_last_token or recipe.dense_layers:  # and the fused decoder cannot compute the model
        log.info("The model makes no vectors: only parley's own decoder pools more than the last token's state.")
        return None
    return recipe


def _try_fused(
    checkpoint: Checkpoint,
    plan: DecoderPlan,
    length: int,
    progress: Callable[[float], None],
    packed_cache: PackedWeightCache | None,
) -> DecoderNetwork | None:
    """Build the fused decoder, at first for contexts of ``length`` tokens.

    Returns None if the model must run through Transformers. Raises LoadError.
    """
    decoder_config = find_fused_config(checkpoint, plan)
    if decoder_config is None:
        return None
    quantization, dtype = plan.quantization, plan.dtype
    weights = DecoderWeights(checkpoint, decoder_config, quantization, dtype, plan.device)
    refuse_weights_beyond_memory(weights)
    decoder = fuse_decoder(weights, length, progress, packed_cache)
    error = decoder_deviation(decoder, checkpoint, quantization)
    if not error <= DECODER_TOLERANCE[dtype] + quantization.extra_tolerance:
        if quantization:
            raise LoadError(f"The fused decoder is off by {error:.2g} with quantized weights, and is not used.")
        log.warning("The fused decoder is off by %.2g and is not used; the model runs through Transformers.", error)
        return None
    return decoder
