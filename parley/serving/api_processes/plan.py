"""The plan with which an API process starts, and the facts about models and options that it gets later."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.types import EngineSettings, EngineStats, ModelInfo
from parley.web.connection_limit import ConnectionLimit
from parley.web.request_body import BodyBudget

OptionValues = dict[str, Any]  # ServerOptions as values of MessagePack, by the names of the fields
OWN_FIELDS = frozenset({"apis"})  # fields that API processes do not have; only --mindie-config sets them
NETWORK_FIELDS = frozenset({"trusted_proxies", "cluster_networks"})


class ModelFacts(msgspec.Struct, frozen=True):
    """Facts about a model that may change: adapters with the time of their loading, and their folders."""

    info: ModelInfo
    stats: EngineStats
    adapters: dict[str, int]
    adapter_folders: dict[str, str]


class PlannedModel(msgspec.Struct, frozen=True):
    """A model for which an API process reads requests. ``settings``: those that engines of every kind have.
    ``created``: when the main process began with it."""

    names: tuple[str, ...]
    settings: EngineSettings
    created: int
    facts: ModelFacts


class ApiProcessPlan(msgspec.Struct, frozen=True):
    """Everything that an API process needs to begin.

    * ``number``: the number of the process, from 0.
    * ``passed_limit``: the most connections to the main process over which it passes requests on.
    * ``seal_key``: the key of ``ReasoningSeal``.
    * ``listeners``: file descriptors of the listening sockets, by the number of their place.
    * ``counts_file``: descriptor of the file with the number of connections of each process.
    * ``id_prefix``: the beginning of the ids of the process's engine requests.
    """

    number: int
    options: OptionValues
    passed_limit: int
    models: tuple[PlannedModel, ...]
    seal_key: bytes
    listeners: dict[int, int]
    counts_file: int
    id_prefix: str


def model_facts(model: ServedModel) -> ModelFacts:
    """Return the facts about a model that has been loaded."""
    engine = model.engine
    return ModelFacts(model.model_info, engine.stats, dict(model.adapters), dict(model.settings.adapters))


def planned_model(model: ServedModel) -> PlannedModel:
    """Return the plan for a model that has been loaded."""
    return PlannedModel(model.names, model.settings, model.created, model_facts(model))


def use_facts(model: ServedModel, facts: ModelFacts) -> None:
    """Set these facts of a model in an API process."""
    model.engine.info = facts.info
    model.engine.stats = facts.stats
    model.adapters, model.settings.adapters = dict(facts.adapters), dict(facts.adapter_folders)


def shared_options(options: ServerOptions, count: int) -> ServerOptions:
    """Return the options of one of ``count`` API processes.

    It has an equal part of the memory for bodies, and of the connections if their number is limited. The main process
    has the shared state: slots, the usage of keys, records and endpoints.
    """
    connections, body_memory = options.connection_limit, options.body_budget.limit
    if options.max_connections is None:  # each process has its own; some are for requests that it passes on
        clients = connections.served_limit - passed_limit(options, count)
    else:
        clients = -(-connections.served_limit // count)
    refused = connections.refused_limit - connections.served_limit
    return replace(
        options,
        max_queue=sys.maxsize >> 8,
        usage_db=None,
        endpoints=None,
        inference_tables=None,
        response_store=0,
        response_store_file=None,
        connection_limit=ConnectionLimit(max(1, clients), max(1, clients) + refused),
        body_budget=BodyBudget(max(body_memory // count, options.body_limit, options.media_body_limit)),
        media=replace(options.media, eager=False),
    )


def passed_limit(options: ServerOptions, count: int) -> int:
    """Return how many connections to the main process each of ``count`` API processes may have.

    Each takes a descriptor at both ends. The main process, which has no clients of its own, has enough for all.
    """
    return max(1, options.connection_limit.served_limit // count)


def encode_server_options(options: ServerOptions) -> OptionValues:
    """Return options as values of MessagePack."""
    values = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in OWN_FIELDS}
    plain: OptionValues = msgspec.to_builtins(values, enc_hook=_to_plain)
    return plain


def decode_server_options(values: OptionValues) -> ServerOptions:
    """Return the options that ``encode_server_options`` encoded.

    Raises msgspec.ValidationError for values of other types.
    """
    types = get_type_hints(ServerOptions)
    decoded: dict[str, Any] = {}
    for name, value in values.items():
        if name in NETWORK_FIELDS:
            decoded[name] = tuple(map(ip_network, value))
        else:
            decoded[name] = msgspec.convert(value, types[name], dec_hook=_from_plain)
    return ServerOptions(**decoded)


def _to_plain(value: Any) -> Any:
    match value:
        case Path() | IPv4Network() | IPv6Network():
            return str(value)
        case BodyBudget():
            return value.limit
        case ConnectionLimit():
            return [value.served_limit, value.refused_limit]
    raise NotImplementedError(type(value))


def _from_plain(kind: type, value: Any) -> Any:
    if kind is ConnectionLimit:
        return ConnectionLimit(*value)
    if kind in (Path, BodyBudget):
        return kind(value)
    raise NotImplementedError(kind)
