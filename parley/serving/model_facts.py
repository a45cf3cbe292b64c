"""The facts about a served model that dialects report or need: cards of its names, its status, a request's context."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal

from parley.dialects.facts import ModelCard, ServerStatus
from parley.dialects.reasoning_seal import RANDOM_SEAL, ReasoningSeal
from parley.dialects.records import NO_RECORDS, TenantRecords
from parley.dialects.request_context import RequestContext
from parley.serving.served_model import ServedModel
from parley.types import ALL_ENGINE_FEATURES, NO_TENANT, MediaKind, ModelAbility, Tenant


def model_cards(model: ServedModel, tenant: Tenant = NO_TENANT) -> list[ModelCard]:
    """Return one card for each name of a model that the client's key may use, adapters last."""
    names, adapters = model.names, tuple(model.adapters)
    if tenant.models:
        names = names if any(name in tenant.models for name in names) else ()
        adapters = tuple(name for name in adapters if name in tenant.models)
    return [describe_name(model, name) for name in (*names, *adapters)]


def describe_name(model: ServedModel, name: str) -> ModelCard:
    """Describe a model, or one of its adapters, under this name."""
    info, pipeline = model.engine.info, model.loaded_pipeline
    is_adapter = name in model.adapters
    return ModelCard(
        name,
        created=model.adapters[name] if is_adapter else model.created,
        max_model_len=info.max_model_len if info is not None else None,
        root=model.name,
        phase=model.model_phase,
        totals=model.metrics.totals,
        purpose=_model_purpose(model),
        adapter_folder=model.settings.adapters[name] if is_adapter else "",
        info=info,
        abilities=_model_abilities(model),
        config=model.config,
        sampling_defaults=pipeline.generation_defaults if pipeline is not None else {},
        tokenizer_size=pipeline.tokenizer.vocab_size if pipeline is not None else None,
        license=model.license_text,
        weight_format=model.weight_format,
    )


def server_status(model: ServedModel) -> ServerStatus:
    """Return slots, engine statistics and mean latencies at this moment."""
    return ServerStatus(
        phase=model.model_phase,
        slots=model.total_slots,
        used_slots=model.used_slots,
        max_batch=model.settings.max_batch,
        stats=model.engine.stats,
        info=model.engine.info,
        mean_ttft=model.metrics.recent_ttft.recent_mean,
        mean_tpot=model.metrics.recent_gaps.recent_mean,
    )


def model_request_context(
    model: ServedModel,
    unique_id: str,
    path_parts: Mapping[str, str],
    headers: Mapping[bytes, bytes],
    *,
    query_string: bytes = b"",
    created: int | None = None,
    tenant_id: str = "",
    reasoning_seal: ReasoningSeal = RANDOM_SEAL,
    records: TenantRecords = NO_RECORDS,
) -> RequestContext:
    """Return the server state that a dialect needs to read request ``unique_id``; ``created`` defaults to now."""
    info, stats, pipeline = model.engine.info, model.engine.stats, model.loaded_pipeline
    page_tokens = info.page_tokens if info is not None else 0
    return RequestContext(
        unique_id,
        created=int(time.time()) if created is None else created,
        fingerprint=model.fingerprint,
        context_length=info.max_model_len if info is not None else 0,
        device=info.device if info is not None else "",
        path_parts=path_parts,
        headers=headers,
        query_string=query_string,
        cached_tokens=stats.used_pages * page_tokens,
        cache_capacity=stats.total_pages * page_tokens,
        generation_defaults=pipeline.generation_defaults if pipeline is not None else {},
        waiting_sequences=stats.waiting,
        model_names=model.names,
        adapters=tuple(model.adapters),
        generates=info is None or info.generates,
        pooling_tasks=info.pooling_tasks if info is not None else frozenset(),
        labels=info.labels if info is not None else (),
        media_limits=_media_limits(model),
        api_options=model.options.api_options,
        media_family=pipeline.media_family if pipeline is not None else "",
        tenant=tenant_id,
        reasoning_seal=reasoning_seal,
        abilities=_model_abilities(model),
        records=records,
        vocabulary_size=info.vocab_size if info is not None else 0,
        page_tokens=page_tokens if model.settings.prefix_cache else 0,
        engine_features=info.features if info is not None else ALL_ENGINE_FEATURES,
    )


def _model_abilities(model: ServedModel) -> frozenset[ModelAbility]:
    return model.loaded_pipeline.abilities if model.loaded_pipeline is not None else frozenset()


def _media_limits(model: ServedModel) -> dict[MediaKind, int]:
    """Return the kinds of media that the model reads, with the most items in a request."""
    if (info := model.engine.info) is None:
        return {}
    limits = model.options.media.counts
    return {kind: min(limits[kind], info.media_counts.get(kind, limits[kind])) for kind in info.media_kinds}


def _model_purpose(model: ServedModel) -> Literal["chat", "text", "vectors"]:
    if model.is_encoder:
        return "vectors"
    return "chat" if model.loaded_pipeline is None or model.loaded_pipeline.template else "text"
