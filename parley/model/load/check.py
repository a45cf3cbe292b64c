"""Checks whether a model would load, without reading its weights: config, settings, names and shapes in the headers.

It runs the code that ``load/loader.py`` runs before it reads weights, so its error messages are the same. Encoders of
images and audio are checked as well, which a server does only with the first item.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from parley.core.sequence import PAGE_SIZE
from parley.model.checkpoint.files import Checkpoint, LoadError, read_config
from parley.model.load import plan, towers
from parley.model.load.decoder_weights import DecoderWeights
from parley.model.load.memory import plan_cache, refuse_large_weights
from parley.model.load.text_encoders import classifier, encoders, sparse, whole_text
from parley.model.load.weight_size import plan_weights
from parley.model.networks.lora import read_adapter
from parley.model.networks.network import DecoderNetwork, LinearSite
from parley.model.networks.paged_kv import PagedKV
from parley.model.networks.position_tables import position_table_bytes
from parley.model.networks.state_arena import state_slot_bytes
from parley.native.layout import LayerKV
from parley.types import ParleySettings

log = logging.getLogger("parley.engine")

LOGITS_UNKNOWN = "it runs through Transformers, and only loading shows whether its logits are right over KV pages"
LAYERS_UNKNOWN = "it runs through Transformers, and only loading shows whether its layers are supported"
STEP_UNKNOWN = "only loading shows how much memory of the GPU the largest step takes, which the KV cache does not get"


class CheckedModel(NamedTuple):
    """The result of a check of a model that has not been loaded.

    ``load_caveat``: a clause about a property that only loading can show, or an empty string. ``memory_bytes``: the
    size of the weights and of media encoders with their embeddings; on a GPU, a lower bound. ``table_bytes``: the size
    of the tables of positions.
    """

    load_caveat: str
    memory_bytes: int
    table_bytes: int = 0


def check_model(settings: ParleySettings) -> CheckedModel:
    """Check the model that the settings name, its draft model and adapters. Raises LoadError."""
    folder = Path(settings.model)
    config = read_config(folder)
    if encoders.is_encoder(config):
        return CheckedModel("", _check_encoder(settings, folder, config))
    if whole_text.is_whole_text_model(folder, config):
        return CheckedModel("", *_check_whole_text_decoder(settings, folder, config))
    parts = [_check_decoder(settings, folder, config)]
    if parts[0].state_bytes:
        plan.check_state_settings(settings, plan.architecture_name(config))
    decoder_plan = plan.plan_decoder(settings, config)
    planned_towers = towers.plan_towers(folder, config, decoder_plan.dtype, decoder_plan.device)
    media_towers = towers.usable_towers(planned_towers, is_fused=parts[0].fused)
    if media_towers is not None:
        towers.check_towers(media_towers)
    if settings.draft_model is not None:
        draft_folder = Path(settings.draft_model)
        plan.check_draft_tokenizer(folder, draft_folder)
        draft_settings = msgspec.structs.replace(settings, max_model_len=None, adapters={})
        parts.append(_check_decoder(draft_settings, draft_folder, read_config(draft_folder)))
        if parts[1].state_bytes:
            raise LoadError(plan.DRAFT_KEEPS_STATES.format(draft_folder))
    loaded_bytes = sum(part.weight_bytes for part in parts)
    if media_towers is not None:
        loaded_bytes += towers.memory_needed_later(settings, media_towers, is_fused=parts[0].fused)
    if any(part.page_bytes is None for part in parts):
        return CheckedModel(LAYERS_UNKNOWN, loaded_bytes)
    loaded = msgspec.structs.replace(settings, set_aside=settings.set_aside + loaded_bytes)
    page_bytes = sum(part.page_bytes or 0 for part in parts)
    position_bytes = sum(part.position_bytes for part in parts)
    sizes = plan_cache(
        page_bytes, decoder_plan.device, decoder_plan.length, loaded, parts[0].state_bytes, position_bytes
    )
    table_bytes = min(decoder_plan.length, sizes.pages * PAGE_SIZE) * position_bytes
    load_caveat = unchecked_clause(decoder_plan.device, settings, is_fused=all(part.fused for part in parts))
    return CheckedModel(load_caveat, loaded_bytes, table_bytes)


def unchecked_clause(device: torch.device, settings: ParleySettings, *, is_fused: bool) -> str:
    """Return a clause about what only loading shows of a decoder whose layers are supported, or an empty string."""
    doubts = [] if is_fused else [LOGITS_UNKNOWN]
    if device.type == "cuda" and settings.kv_memory is None:
        doubts.append(STEP_UNKNOWN)
    return "; ".join(doubts)


class CheckedDecoder(NamedTuple):
    """What is known of a decoder before its weights are read. Sizes in bytes.

    * ``fused``: it runs on the fused decoder.
    * ``weight_bytes``: all weights, packed.
    * ``page_bytes``: a page of the KV cache; None if unknown.
    * ``state_bytes``: the states of one sequence.
    * ``position_bytes``: the tables of positions for one token of the longest context.
    """

    fused: bool
    weight_bytes: int
    page_bytes: int | None
    state_bytes: int = 0
    position_bytes: int = 0


def _check_encoder(settings: ParleySettings, folder: Path, config: dict[str, Any]) -> int:
    """Return the bytes of an encoder's weights. Raises LoadError."""
    encoder_plan = plan.plan_encoder(settings, folder, config)
    encoder_config = encoders.check_encoder_tensors(encoder_plan.checkpoint, config)
    head = classifier.load_classifier_head(
        encoder_plan.checkpoint, config, encoder_config.hidden_size, torch.device("meta")
    )
    if encoder_plan.recipe.sparse is not None:
        sparse.load_sparse_head(
            encoder_plan.checkpoint,
            config,
            encoder_plan.recipe.sparse,
            encoder_config.hidden_size,
            torch.device("meta"),
        )
    elif head is None:
        encoder_plan.recipe.check_width(encoder_config.hidden_size)
    return encoder_plan.size


def _check_whole_text_decoder(settings: ParleySettings, folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of the weights and of the tables of positions of a decoder that reads whole texts. Raises
    LoadError."""
    text_plan = whole_text.plan_whole_text(settings, folder, config)
    weights = whole_text.open_whole_text_weights(folder, text_plan)
    if whole_text.load_whole_text_head(folder, config, text_plan, weights.config) is None:
        text_plan.recipe.check_width(weights.config.hidden_size)
    length = text_plan.decoder.length
    return plan_weights(weights, keeps_head=False), length * position_table_bytes(weights.config, length)


def _check_decoder(settings: ParleySettings, folder: Path, config: dict[str, Any]) -> CheckedDecoder:
    decoder_plan = plan.plan_decoder(settings, config)
    checkpoint = plan.open_decoder(folder, decoder_plan)
    decoder_config = plan.find_fused_config(checkpoint, decoder_plan) if settings.lowering else None
    layers: list[LayerKV]
    state_sizes: list[int] = []
    position_bytes = 0
    linears: Mapping[str, LinearSite]
    if decoder_config is None:
        weight_bytes = decoder_plan.quantization.min_bytes(checkpoint, decoder_plan.dtype)
        refuse_large_weights(weight_bytes, decoder_plan.device)
        network = _build_without_weights(folder, decoder_plan)
        if network is None:
            return CheckedDecoder(False, weight_bytes, None)
        layers, linears, weight_bytes = network.kv_layers, network.linears, network.weights_bytes
    else:
        weights = DecoderWeights(
            checkpoint, decoder_config, decoder_plan.quantization, decoder_plan.dtype, decoder_plan.device
        )
        weight_bytes = plan_weights(weights)
        layers, linears = decoder_config.kv_layers, weights.linears.linear_sites()
        state_sizes = decoder_config.state_sizes
        position_bytes = position_table_bytes(decoder_config, decoder_plan.length)
    for name, adapter_folder in settings.adapters.items():
        try:
            read_adapter(Path(adapter_folder), linears, settings.max_rank, decoder_plan.dtype, torch.device("cpu"))
        except LoadError as error:
            raise LoadError(f"The adapter {name} ({adapter_folder}) cannot be loaded: {error}") from None
    page_bytes = PagedKV.page_bytes(layers, decoder_plan.dtype, decoder_plan.device, int8=decoder_plan.int8_kv)
    return CheckedDecoder(
        decoder_config is not None, weight_bytes, page_bytes, state_slot_bytes(state_sizes), position_bytes
    )


def _build_without_weights(folder: Path, decoder_plan: plan.DecoderPlan) -> DecoderNetwork | None:
    """Return a model that runs through Transformers, None if its code needs weights to run. Raises LoadError."""
    from parley.model.load.weightless import build_weightless  # imports Transformers, which takes seconds

    try:
        return build_weightless(folder, Checkpoint(folder), decoder_plan.dtype, decoder_plan.length)
    except LoadError:
        raise
    except Exception as error:
        log.info("The model cannot be built without its weights: %s", error)
        return None
