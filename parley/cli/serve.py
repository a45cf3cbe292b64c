"""``parley serve``: turns options into a running server. ``parley.boot`` runs it."""

from __future__ import annotations

import os
from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parley.child_process import keep_standard_streams
from parley.cli.vllm import check_engine_options, is_server_address
from parley.settings.config import SERVE_OPTIONS
from parley.settings.engine_settings import attached_settings, engine_settings, vllm_settings
from parley.settings.key_file import HashedKey, read_key_table
from parley.settings.keys import ApiKeyLine, cluster_secret, read_api_keys, read_keys
from parley.settings.kinds import UNIX_PREFIX, NamedModel
from parley.settings.options import ConfigError, ResolvedOptions, did_you_mean, format_options

if TYPE_CHECKING:
    from parley.cli.mindie import MindIEPlan
    from parley.engine.engine_process import EngineProcess
    from parley.serving.options import EngineKind, ListenAddress, MediaOptions, OfferedModel, ServerOptions
    from parley.types import EngineSettings
    from parley.web.options import TlsFiles

OPTIONS = SERVE_OPTIONS
GRPC = "grpc"  # its name in --listen
# Options that belong to the first model unless another one sets them for itself.
FIRST_MODEL_ONLY: dict[str, Any] = {"lora": [], "kv-events": None, "kv-events-replay": None}
PEER_PORT_ATTEMPTS = 64  # instances on one host that need no --peer-port of their own
USAGE = """\
usage: parley serve [MODEL] [options]

Serves one model or several. It listens first and then loads: GET /health/ready is 200 once loading is done."""


def run(config: ResolvedOptions) -> int:
    """Run a server with these options until it ends. Return the exit code."""
    plan, config = plan_models(config)
    if config["show-config"]:
        print(format_options(SERVE_OPTIONS, config))
        return 0

    def read_options_again() -> ServerOptions:
        return planned_server_options(*read_mindie_plan(config.read_again() if config.read_again else config))

    process = start_early_engine(config)  # from here on, two processes import their libraries at the same time
    try:
        (first, *others), server_options = offered_models(config), planned_server_options(plan, config)
        from parley.boot import server  # HTTP libraries are loaded only to serve
        from parley.serving.workers.daemon_thread import exit_process

        offers = [first._replace(early_process=process), *others]
        code = server.run_server(offers, server_options, read_options_again)
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
    from parley.cli.peers.foreign import explain_foreign_flag  # reads the tables of other servers

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
    from parley.cli import mindie

    plan = mindie.read_mindie_config(config["mindie-config"], os.environ)
    return plan, config.with_unset_from(plan.options, config["mindie-config"])


def planned_server_options(plan: MindIEPlan | None, config: ResolvedOptions) -> ServerOptions:
    """Return the server's part of the options, with the values of MindIE's config.json. Raises ConfigError."""
    options = server_options(config)
    return options if plan is None else plan.apply_to_options(options, config["mindie-profile"])


def offered_models(config: ResolvedOptions) -> list[OfferedModel]:
    """Return the models to serve, the main one first. Raises ConfigError."""
    from parley.hub import served_name  # here, because it needs packages that take time to import
    from parley.serving.options import OfferedModel

    check_engine_options(config)
    table = {option.name: option for option in SERVE_OPTIONS}
    models: list[OfferedModel] = []
    counts: Counter[str] = Counter()  # of adapter names
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
    name_counts = Counter(name for offer in models for name in offer.names)
    if twice := [name for name, count in name_counts.items() if count > 1]:
        raise ConfigError(f"--model: the name {twice[0]} is given to more than one model; write NAME=MODEL.")
    if twice := [name for name, count in (counts + name_counts).items() if count > 1]:
        raise ConfigError(f"--lora: the name {twice[0]} is given to something else as well.")
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
    from parley.types import Settings

    publishers = [model.settings for model in models if model.settings.cache_events is not None]
    if publishers and not find_spec("zmq"):
        raise ConfigError("The package for KV events is missing; install it with: pip install 'parley-llm[kv-events]'.")
    addresses: Counter[str] = Counter()
    for settings in publishers:
        assert settings.cache_events is not None
        if isinstance(settings, Settings) and settings.costs:
            raise ConfigError("kv-events: there are no events with cost-model, which computes nothing.")
        if not settings.prefix_cache:
            raise ConfigError("kv-events: there are no events without a prefix cache.")
        addresses.update(filter(None, (settings.cache_events.endpoint, settings.cache_events.replay_endpoint)))
    if twice := [address for address, count in addresses.items() if count > 1]:
        raise ConfigError(f"kv-events: {twice[0]} is given twice; every model needs addresses of its own.")


def engine_of(config: ResolvedOptions) -> EngineKind:
    """The kind of engine that every model gets."""
    if is_server_address(config["engine"]):
        return "attached"
    if config["engine"] == "vllm":
        return "vllm"
    if config["fake-engine"]:
        return "scripted"
    return "thread" if config["in-process"] else "process"


def media_options(config: ResolvedOptions) -> MediaOptions:
    """Return the options for pictures, videos and sound. Raises ConfigError."""
    from parley.serving.options import MEDIA_COUNTS, MEDIA_SIZES, MediaOptions

    folder = config["media-path"]
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"media-path: there is no folder {folder}.")
    for name in ("media-limit", "media-size"):
        kinds = Counter(kind for kind, _ in config[name])
        if twice := [kind for kind, count in kinds.items() if count > 1]:
            raise ConfigError(f"{name}: {twice[0]} has more than one limit.")
    return MediaOptions(
        hosts=tuple(config["media-hosts"]),
        folder=folder,
        counts=MEDIA_COUNTS | dict(config["media-limit"]),
        sizes=MEDIA_SIZES | dict(config["media-size"]),
        request_size=config["media-request-size"],
        memory=config["media-memory"],
        cache=config["media-feature-cache"],
        pixels=config["media-pixels"],
        workers=config["media-workers"],
        eager=config["media-eager"],
        accepts_embeddings=config["enable-mm-embeds"],
    )


def server_options(config: ResolvedOptions) -> ServerOptions:
    """Return the server's part of the options. Raises ConfigError for errors that only the server detects."""
    from parley.dialects.dialect import ApiOptions
    from parley.serving.options import ServerOptions
    from parley.types import KeyOwner
    from parley.web.request_body import BodyBudget

    if config["body-memory"] < config["body-limit"]:
        raise ConfigError("body-memory must be at least body-limit: otherwise the largest bodies are never accepted.")
    hashed_keys = hashed_keys_of(config["api-key-file"])
    if config["uds"] is not None and config["role"] != "mixed":
        raise ConfigError(f"--uds: an instance of role {config['role']} needs a port that others reach.")
    if config["uds"] is not None and config["grpc-port"] is not None:
        raise ConfigError("--uds: --grpc-port needs an address; write --listen grpc=HOST:PORT.")
    key_lines = [] if hashed_keys is not None else read_key_file(config["api-key-file"], "api-key-file")
    admin_lines = read_key_file(config["admin-key-file"], "admin-key-file")
    return ServerOptions(
        host=config["host"] if config["uds"] is None else UNIX_PREFIX + config["uds"],
        port=config["port"] if config["uds"] is None else 0,
        root_path=config["root-path"] or "",
        trusted_proxies=tuple(each for each in config["trusted-proxy"] if each != "unix"),
        trusts_socket_proxies="unix" in config["trusted-proxy"],
        metrics_port=config["metrics-port"],
        admin_port=config["admin-port"],
        admin_host=config["admin-host"],
        listen=api_listeners(config),
        grpc=grpc_listeners(config),
        strict=config["strict"],
        tgi_compat=config["tgi-compat"],
        endpoints=config["endpoints"],
        inference_tables=writable_folder(config["inference-tables"], "inference-tables"),
        response_store=config["response-store"],
        response_store_file=config["response-store-file"],
        response_lifetime=config["response-lifetime"],
        api_keys=(*config["api-key"], *(line.key for line in key_lines)),
        admin_keys=tuple(line.key for line in admin_lines),
        priority_keys=tuple(line.key for line in key_lines if line.has_priority),
        key_owners={
            line.key: KeyOwner(line.name, line.groups)
            for line in (*key_lines, *admin_lines)
            if line.name or line.groups
        },
        hashed_keys=hashed_keys,
        usage_db=config["usage-db"],
        audit_log=appendable_file(config["audit-log"], "audit-log"),
        key_files=tuple(Path(config[name]) for name in ("api-key-file", "admin-key-file") if config[name]),
        share_prefixes=config["share-prefixes"],
        max_queue=config["max-queue"],
        api_processes=api_process_count(config),
        drain=config["drain"],
        max_connections=config["max-connections"],
        header_timeout=config["header-timeout"],
        keep_alive=config["idle-timeout"],
        http2=config["http2"],
        body_limit=config["body-limit"],
        body_budget=BodyBudget(config["body-memory"]),
        media_body_limit=min(config["media-body-limit"], config["body-memory"]),
        media=media_options(config),
        body_rate=config["body-rate"],
        cors=tuple(config["cors-origin"]),
        hosts=tuple(config["allow-host"]),
        ping_interval=config["ping"],
        lora_root=config["lora-root"],
        pull=config["pull"],
        tokenizer_info=config["tokenizer-info"],
        ui=config["ui"],
        api_options=ApiOptions(
            max_logprobs=config["max-logprobs"],
            force_include_usage=config["enable-force-include-usage"],
            return_tokens_as_token_ids=config["return-tokens-as-token-ids"],
            per_request_metrics=config["enable-per-request-metrics"],
            enable_mm_embeds=config["enable-mm-embeds"],
            trust_request_mm_kwargs=config["trust-request-mm-kwargs"],
        ),
        role=config["role"],
        peer_port=config["peer-port"] if config["role"] != "mixed" else None,
        peer_port_attempts=1 if config.is_set("peer-port") else PEER_PORT_ATTEMPTS,
        peer_lease=config["peer-lease"],
        peer_checksum=config["peer-checksum"],
        p_percentage=config["p-percentage"],
        cluster_secret=read_cluster_secret(config),
        cluster_networks=tuple(config["cluster-network"]),
        peer_tls=peer_tls_files(config),
        tls=port_tls_files(config),
        access_log=not config["quiet"],
        otlp_traces_endpoint=traces_endpoint(config),
        log_format=config["log-format"],
        log_level=config["log-level"],
        log_bodies=config["log-bodies"],
    )


def api_process_count(config: ResolvedOptions) -> int:
    """Return the number of API processes. Raises ConfigError if another option needs a single one."""
    number: int = config["api-processes"]
    if number > 1 and config["role"] != "mixed":
        raise ConfigError(
            f"--api-processes: an instance of role {config['role']} has one API process, which exchanges pages with "
            "other instances; start more instances instead."
        )
    if number > 1 and config["mindie-config"]:
        raise ConfigError("--api-processes: a server with --mindie-config has one API process.")
    return number


def api_listeners(config: ResolvedOptions) -> tuple[ListenAddress, ...]:
    """Return the HTTP ports of single APIs. Raises ConfigError for an unknown API."""
    from parley.dialects.mounts import DEDICATED_APIS
    from parley.serving.options import ListenAddress

    api_names = [*DEDICATED_APIS, GRPC]
    for name, _, _ in config["listen"]:
        if name not in api_names:
            raise ConfigError(
                f"--listen: no API is called {name}.{did_you_mean(name, api_names)} Known: {', '.join(api_names)}."
            )
    return tuple(ListenAddress(*each) for each in config["listen"] if each[0] != GRPC)


def grpc_listeners(config: ResolvedOptions) -> tuple[ListenAddress, ...]:
    """Return the gRPC ports. Raises ConfigError if the packages for gRPC are not installed."""
    from parley.serving.options import ListenAddress

    ports = [ListenAddress(*each) for each in config["listen"] if each[0] == GRPC]
    if config["grpc-port"] is not None:
        ports.insert(0, ListenAddress(GRPC, config["host"], config["grpc-port"]))
    if ports and not all(map(find_spec, ("grpc", "google", "google.protobuf"))):
        raise ConfigError("Packages for gRPC are missing; install them with: pip install 'parley-llm[grpc]'.")
    return tuple(ports)


def traces_endpoint(config: ResolvedOptions) -> str:
    """Return where spans are sent, "" if the option is not set. Raises ConfigError."""
    from parley.tracing.otlp import MISSING_PACKAGES, packages_are_missing

    endpoint: str = config["otlp-traces-endpoint"] or ""
    if endpoint and packages_are_missing():
        raise ConfigError(MISSING_PACKAGES)
    return endpoint


def read_cluster_secret(config: ResolvedOptions) -> str:
    """Return the cluster's secret, or an empty string. Raises ConfigError."""
    file = Path(config["cluster-secret-file"]) if config["cluster-secret-file"] else None
    return cluster_secret(config["cluster-secret"], file, "--cluster-secret", "--cluster-secret-file")


def port_tls_files(config: ResolvedOptions) -> TlsFiles | None:
    """Return the TLS files of the ports, if any. Raises ConfigError."""
    from parley.web.options import TlsFiles

    names = ("tls-cert", "tls-key", "tls-key-password-file", "tls-client-ca")
    certificate, key, password_file, authority = (Path(config[name]) if config[name] else None for name in names)
    if certificate is None and key is None and (password_file or authority):
        raise ConfigError(f"--{names[2] if password_file else names[3]} needs --tls-cert and --tls-key.")
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key go together.")
    return TlsFiles(certificate, key, password_file, () if authority is None else (authority,))


def peer_tls_files(config: ResolvedOptions) -> TlsFiles | None:
    """Return the TLS files for handovers between instances, if any. Raises ConfigError."""
    from parley.web.options import TlsFiles

    files = [config[name] for name in ("cluster-cert", "cluster-key", "cluster-ca")]
    if not any(files):
        return None
    if not all(files):
        raise ConfigError("--cluster-cert, --cluster-key and --cluster-ca go together.")
    certificate, key, authority = map(Path, files)
    return TlsFiles(certificate, key, client_authorities=(authority,))


def writable_folder(folder: str | None, option: str) -> str | None:
    """Make the folder of an option, if it is set. Raises ConfigError if it cannot be written."""
    if folder is None:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--{option}: {folder} cannot be made: {error.strerror}.") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--{option}: {folder} cannot be written.")
    return str(Path(folder).absolute())


def appendable_file(file: str | None, option: str) -> str | None:
    """Make the file of an option, if it is set. Raises ConfigError if nothing can be appended to it."""
    if file is None:
        return None
    from parley.serving.keys.audit_log import append_line

    try:
        append_line(file)
    except OSError as error:
        raise ConfigError(f"--{option}: {file} cannot be written: {error.strerror}.") from None
    return str(Path(file).absolute())


def read_key_file(file: str | None, option: str) -> list[ApiKeyLine]:
    """Return the keys in the file of an option, if it is set. Raises ConfigError."""
    return [] if file is None else read_api_keys(Path(file), f"--{option}")


def hashed_keys_of(file: str | None) -> tuple[HashedKey, ...] | None:
    """Return the keys of a key file in TOML; None for a file in the plain form, and without a file. Raises ConfigError,
    also for an unknown API."""
    if file is None or Path(file).suffix != ".toml":
        return None
    keys = read_key_table(Path(file), "--api-key-file")
    for key in keys:
        check_api_names(key.apis, f"--api-key-file: {file}: key {key.name}: apis")
    return keys


def check_api_names(names: Iterable[str], where: str) -> None:
    """Raise ConfigError if there is no API of one of these names."""
    from parley.dialects.mounts import API_NAMES

    for name in names:
        if name not in API_NAMES:
            known = ", ".join(API_NAMES)
            raise ConfigError(f"{where}: no API is called {name}.{did_you_mean(name, API_NAMES)} Known: {known}.")
