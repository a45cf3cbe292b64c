"""``parley serve``: turns options into a running server. ``parley.boot`` runs it."""

from __future__ import annotations

import os
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parley.child_process import keep_standard_streams
from parley.cli.serve_config.engine_options import check_engine_options, is_server_address
from parley.settings.config import SERVE_OPTIONS
from parley.settings.engine_settings import attached_settings, engine_settings, vllm_settings
from parley.settings.keys import read_keys
from parley.settings.option_kinds import NamedModel
from parley.settings.options import ConfigError, ResolvedOptions, format_options

if TYPE_CHECKING:
    from parley.cli.serve_config.mindie_config import MindIEPlan
    from parley.engine.engine_process import EngineProcess
    from parley.serving.server_options import EngineKind, OfferedModel, ServerOptions
    from parley.types import EngineSettings

OPTIONS = SERVE_OPTIONS
# Options that belong to the first model unless another one sets them for itself.
FIRST_MODEL_ONLY: dict[str, Any] = {"lora": [], "kv-events": None, "kv-events-replay": None}
USAGE = """\
usage: parley serve [MODEL] [options]

Serves one model or several. It listens first and then loads: GET /health/ready is 200 once loading is done."""


def run_command(config: ResolvedOptions) -> int:
    """Run a server with these options until it ends. Return the exit code."""
    plan, config = plan_models(config)
    if config["show-config"]:
        print(format_options(SERVE_OPTIONS, config))
        return 0

    def read_options_again() -> ServerOptions:
        return planned_server_options(*read_mindie_plan(config.read_again() if config.read_again else config))

    process = start_early_engine(config)  # from here on, two processes import their libraries at the same time
    try:
        (first, *other_models), server_options = offered_models(config), planned_server_options(plan, config)
        from parley.boot import server  # HTTP libraries are loaded only to serve
        from parley.cli.serve_config.server_options import check_written_files
        from parley.serving.workers.daemon_thread import exit_process

        check_written_files(server_options)
        all_models = [first._replace(early_process=process), *other_models]
        code = server.run_server(all_models, server_options, read_options_again)
    finally:
        if process is not None:
            process.discard()
    return exit_process(code)


def start_early_engine(config: ResolvedOptions) -> EngineProcess | None:
    """Start the first model's engine process, which gets its settings later; None for an engine of another kind."""
    if engine_of(config) != "process" or config["cost-model"]:
        return None
    from parley.engine.engine_process import start_early_process  # these would slow down `parley --help`
    from parley.log_lines import announce_to_children

    keep_standard_streams()
    announce_to_children(config["log-format"], config["log-level"])
    return start_early_process()


def explain_flag(flag: str) -> str:
    """Name the server that has this flag, and its counterpart here; "" if no other server has it."""
    from parley.cli.peers.foreign_flags import explain_foreign_flag  # reads the tables of other servers

    return explain_foreign_flag(flag)


def plan_models(config: ResolvedOptions) -> tuple[MindIEPlan | None, ResolvedOptions]:
    """Like ``read_mindie_plan``, with the context length of the models. Raises ConfigError."""
    plan, config = read_mindie_plan(config)
    if plan is not None:
        plan.check_model(config["model"])
        length = plan.context_length([offer.settings for offer in offered_models(config)] if config["model"] else [])
        config = config.with_unset_from({"max-model-len": length}, config["mindie-config"])
    return plan, config


def read_mindie_plan(config: ResolvedOptions) -> tuple[MindIEPlan | None, ResolvedOptions]:
    """Read MindIE's config.json, if there is one; return it, and the options with its values. Raises ConfigError."""
    if not config["mindie-config"]:
        return None, config
    from parley.cli.serve_config import mindie_config

    plan = mindie_config.read_mindie_config(config["mindie-config"], os.environ)
    return plan, config.with_unset_from(plan.options, config["mindie-config"])


def planned_server_options(plan: MindIEPlan | None, config: ResolvedOptions) -> ServerOptions:
    """Return the server's part of the options, with the values of MindIE's config.json. Raises ConfigError."""
    # After the engine's process has started: this import takes longer.
    from parley.cli.serve_config.server_options import server_options

    options = server_options(config)
    return options if plan is None else plan.apply_to_options(options, config["mindie-profile"])


def offered_models(config: ResolvedOptions) -> list[OfferedModel]:
    """Return the models to serve, the main one first. Raises ConfigError."""
    from parley.hub import served_name  # here, because it needs packages that take time to import
    from parley.serving.server_options import OfferedModel

    check_engine_options(config)
    table = {option.name: option for option in SERVE_OPTIONS}
    models: list[OfferedModel] = []
    counts: Counter[str] = Counter()  # number of adapters by name
    for named_model in config["model"] or [NamedModel((), "", {})]:
        further = config["name"] if not models else []
        names = tuple(dict.fromkeys((*named_model.names, *further))) or (served_name(named_model.model),)
        model_options = {
            name: table[name].parse_raw(raw, f"--model {names[0]}: {name}") for name, raw in named_model.options.items()
        }
        if models:
            model_options = FIRST_MODEL_ONLY | model_options
        counts.update(name for name, _ in model_options.get("lora", config["lora"]))
        merged_options = ChainMap(model_options, dict(config))
        settings = settings_of_engine(config, merged_options, named_model.model)
        models.append(OfferedModel(names, settings, engine_of(config)))
    check_cache_events(models)
    name_counts = Counter(name for model in models for name in model.names)
    if repeated_names := [name for name, count in name_counts.items() if count > 1]:
        raise ConfigError(f"--model: the name {repeated_names[0]} is given to more than one model; write NAME=MODEL.")
    if repeated_names := [name for name, count in (counts + name_counts).items() if count > 1]:
        raise ConfigError(f"--lora: the name {repeated_names[0]} is already the name of a model or of another adapter.")
    return models


def settings_of_engine(config: ResolvedOptions, merged_options: Mapping[str, Any], folder: str) -> EngineSettings:
    """Return the settings for a model's engine. ``merged_options``: with those that the model sets for itself."""
    if is_server_address(config["engine"]):
        key_file = config["engine-key-file"]
        key = read_keys(Path(key_file), "--engine-key-file")[0] if key_file else ""
        return attached_settings(merged_options, folder, key=key)
    if config["engine"] != "vllm":
        return engine_settings(merged_options, folder)
    has_rank = config.is_set("max-lora-rank")
    return vllm_settings(merged_options, folder, max_rank=config["max-lora-rank"] if has_rank else 0)


def check_cache_events(models: Sequence[OfferedModel]) -> None:
    """Raise ConfigError if events cannot be published: without ZeroMQ, a model or a prefix cache, or two at one
    address."""
    from parley.types import ParleySettings

    publishers = [model.settings for model in models if model.settings.cache_events is not None]
    if publishers and not find_spec("zmq"):
        raise ConfigError("The package for KV events is missing; install it with: pip install 'parley-llm[kv-events]'.")
    addresses: Counter[str] = Counter()
    for settings in publishers:
        assert settings.cache_events is not None
        if isinstance(settings, ParleySettings) and settings.costs:
            raise ConfigError("kv-events: there are no events with cost-model, which computes nothing.")
        if not settings.prefix_cache:
            raise ConfigError("kv-events: there are no events without a prefix cache.")
        addresses.update(filter(None, (settings.cache_events.endpoint, settings.cache_events.replay_endpoint)))
    if repeated_addresses := [address for address, count in addresses.items() if count > 1]:
        raise ConfigError(f"kv-events: {repeated_addresses[0]} is given twice; every model needs addresses of its own.")


def engine_of(config: ResolvedOptions) -> EngineKind:
    """The kind of engine that every model gets."""
    if is_server_address(config["engine"]):
        return "attached"
    if config["engine"] == "vllm":
        return "vllm"
    if config["scripted-engine"]:
        return "scripted"
    return "thread" if config["in-process"] else "process"
