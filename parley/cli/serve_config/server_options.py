"""The server's part of the options of ``parley serve``: ports, limits, keys, APIs, and its place in a cluster."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from parley.settings.key_file import HashedKey, read_key_table
from parley.settings.keys import ApiKeyLine, cluster_secret, read_api_keys
from parley.settings.option_kinds import UNIX_PREFIX
from parley.settings.options import ConfigError, ResolvedOptions, did_you_mean

if TYPE_CHECKING:
    from parley.serving.server_options import ListenAddress, MediaOptions, ServerOptions
    from parley.web.tls.files import TlsFiles

GRPC = "grpc"  # its name in --listen
PEER_PORT_ATTEMPTS = 64  # instances on one host that need no --peer-port of their own


def server_options(config: ResolvedOptions) -> ServerOptions:
    """Return the server's part of the options. Raises ConfigError for errors that only the server detects."""
    check_socket_options(config)
    options = port_options(config)
    for with_options in (with_option_limits, with_key_options, with_api_options, with_cluster_options):
        options = with_options(options, config)
    return options


def check_socket_options(config: ResolvedOptions) -> None:
    """Raise ConfigError for options that do not go together with a Unix socket."""
    if config["uds"] is not None and config["role"] != "mixed":
        raise ConfigError(f"--uds: an instance of role {config['role']} needs a port that others reach.")
    if config["uds"] is not None and config["grpc-port"] is not None:
        raise ConfigError("--uds: --grpc-port needs an address; write --listen grpc=HOST:PORT.")


def port_options(config: ResolvedOptions) -> ServerOptions:
    """Return options with the ports, who may call them from a browser, and the output. Raises ConfigError."""
    from parley.serving.server_options import ServerOptions

    return ServerOptions(
        host=config["host"] if config["uds"] is None else UNIX_PREFIX + config["uds"],
        port=config["port"] if config["uds"] is None else 0,
        root_path=config["root-path"] or "",
        trusted_proxies=tuple(proxy for proxy in config["trusted-proxy"] if proxy != "unix"),
        trusts_socket_proxies="unix" in config["trusted-proxy"],
        metrics_port=config["metrics-port"],
        admin_port=config["admin-port"],
        admin_host=config["admin-host"],
        listen=api_listeners(config),
        grpc=grpc_listeners(config),
        tls=port_tls_files(config),
        http2=config["http2"],
        cors=tuple(config["cors-origin"]),
        hosts=tuple(config["allow-host"]),
        ui=config["ui"],
        access_log=not config["quiet"],
        otlp_traces_endpoint=traces_endpoint(config),
        log_format=config["log-format"],
        log_level=config["log-level"],
        log_bodies=config["log-bodies"],
    )


def with_option_limits(options: ServerOptions, config: ResolvedOptions) -> ServerOptions:
    """Return the options with limits of connections, bodies and the queue, and with times. Raises ConfigError."""
    from parley.web.request_body import BodyBudget

    if config["body-memory"] < config["body-limit"]:
        raise ConfigError("body-memory must be at least body-limit: otherwise the largest bodies are never accepted.")
    return replace(
        options,
        max_queue=config["max-queue"],
        api_processes=api_process_count(config),
        drain=config["drain"],
        max_connections=config["max-connections"],
        header_timeout=config["header-timeout"],
        keep_alive=config["idle-timeout"],
        ping_interval=config["ping"],
        body_limit=config["body-limit"],
        body_budget=BodyBudget(config["body-memory"]),
        media_body_limit=min(config["media-body-limit"], config["body-memory"]),
        body_rate=config["body-rate"],
        media=media_options(config),
    )


def with_key_options(options: ServerOptions, config: ResolvedOptions) -> ServerOptions:
    """Return the options with the keys of clients and the stores of their usage. Raises ConfigError."""
    from parley.types import KeyOwner

    hashed_keys = hashed_keys_of(config["api-key-file"])
    key_lines = [] if hashed_keys is not None else read_key_file(config["api-key-file"], "api-key-file")
    admin_lines = read_key_file(config["admin-key-file"], "admin-key-file")
    return replace(
        options,
        api_keys=(*config["api-key"], *(line.key for line in key_lines)),
        admin_keys=tuple(line.key for line in admin_lines),
        priority_keys=tuple(line.key for line in key_lines if line.has_priority),
        key_owners={
            line.key: KeyOwner(line.name, line.groups)
            for line in (*key_lines, *admin_lines)
            if line.name or line.groups
        },
        hashed_keys=hashed_keys,
        key_files=tuple(Path(config[name]) for name in ("api-key-file", "admin-key-file") if config[name]),
        usage_db=config["usage-db"],
        audit_log=absolute_path(config["audit-log"]),
        share_prefixes=config["share-prefixes"],
    )


def with_api_options(options: ServerOptions, config: ResolvedOptions) -> ServerOptions:
    """Return the options with the choices for single APIs and the records that they keep. Raises ConfigError."""
    from parley.dialects.request_context import ApiOptions

    return replace(
        options,
        strict=config["strict"],
        tgi_compat=config["tgi-compat"],
        endpoints=config["endpoints"],
        inference_tables=absolute_path(config["inference-tables"]),
        response_store=config["response-store"],
        response_store_file=config["response-store-file"],
        response_lifetime=config["response-lifetime"],
        lora_root=config["lora-root"],
        pull=config["pull"],
        tokenizer_info=config["tokenizer-info"],
        api_options=ApiOptions(
            max_logprobs=config["max-logprobs"],
            force_include_usage=config["enable-force-include-usage"],
            return_tokens_as_token_ids=config["return-tokens-as-token-ids"],
            per_request_metrics=config["enable-per-request-metrics"],
            enable_mm_embeds=config["enable-mm-embeds"],
            trust_request_mm_kwargs=config["trust-request-mm-kwargs"],
        ),
    )


def with_cluster_options(options: ServerOptions, config: ResolvedOptions) -> ServerOptions:
    """Return the options with those of an instance of a cluster. Raises ConfigError."""
    return replace(
        options,
        role=config["role"],
        peer_port=config["peer-port"] if config["role"] != "mixed" else None,
        peer_port_attempts=1 if config.is_set("peer-port") else PEER_PORT_ATTEMPTS,
        peer_lease=config["peer-lease"],
        peer_checksum=config["peer-checksum"],
        p_percentage=config["p-percentage"],
        cluster_secret=read_cluster_secret(config),
        cluster_networks=tuple(config["cluster-network"]),
        peer_tls=peer_tls_files(config),
    )


def media_options(config: ResolvedOptions) -> MediaOptions:
    """Return the options for images, videos and audio. Raises ConfigError."""
    from parley.serving.server_options import MEDIA_COUNTS, MEDIA_SIZES, MediaOptions

    folder = config["media-path"]
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"media-path: there is no folder {folder}.")
    for name in ("media-limit", "media-size"):
        kinds = Counter(kind for kind, _ in config[name])
        if repeated_kinds := [kind for kind, count in kinds.items() if count > 1]:
            raise ConfigError(f"{name}: {repeated_kinds[0]} has more than one limit.")
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
    from parley.serving.server_options import ListenAddress

    api_names = [*DEDICATED_APIS, GRPC]
    for name, _, _ in config["listen"]:
        if name not in api_names:
            raise ConfigError(
                f"--listen: no API is called {name}.{did_you_mean(name, api_names)} Known: {', '.join(api_names)}."
            )
    return tuple(ListenAddress(*address) for address in config["listen"] if address[0] != GRPC)


def grpc_listeners(config: ResolvedOptions) -> tuple[ListenAddress, ...]:
    """Return the gRPC ports. Raises ConfigError if the packages for gRPC are not installed."""
    from parley.serving.server_options import ListenAddress

    ports = [ListenAddress(*address) for address in config["listen"] if address[0] == GRPC]
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
    from parley.web.tls.files import TlsFiles

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
    from parley.web.tls.files import TlsFiles

    files = [config[name] for name in ("cluster-cert", "cluster-key", "cluster-ca")]
    if not any(files):
        return None
    if not all(files):
        raise ConfigError("--cluster-cert, --cluster-key and --cluster-ca go together.")
    certificate, key, authority = map(Path, files)
    return TlsFiles(certificate, key, client_authorities=(authority,))


def absolute_path(path: str | None) -> str | None:
    """Return the absolute path of an option, if it is set."""
    return None if path is None else str(Path(path).absolute())


def check_written_files(options: ServerOptions) -> None:
    """Check that the server can write the files that it keeps. Raises ConfigError.

    Only before the start: a full disk must not keep a running server from reading its keys again.
    """
    check_writable_folder(options.inference_tables, "inference-tables")
    check_appendable_file(options.audit_log, "audit-log")


def check_writable_folder(folder: str | None, option: str) -> None:
    """Make the folder of an option, if it is set. Raises ConfigError if it cannot be written."""
    if folder is None:
        return
    from parley.serving.file_faults import describe_fault

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--{option}: {folder} cannot be made: {describe_fault(folder, error)}") from None
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\n")
    except OSError as error:
        raise ConfigError(f"--{option}: {folder} cannot be written: {describe_fault(folder, error)}") from None


def check_appendable_file(file: str | None, option: str) -> None:
    """Make the file of an option, if it is set. Raises ConfigError if nothing can be appended to it."""
    if file is None:
        return
    from parley.serving.file_faults import describe_fault
    from parley.serving.keys.audit_log import append_line

    try:
        append_line(file)
    except OSError as error:
        raise ConfigError(f"--{option}: {file} cannot be written: {describe_fault(file, error)}") from None


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
            api_names = ", ".join(API_NAMES)
            raise ConfigError(f"{where}: no API is called {name}.{did_you_mean(name, API_NAMES)} Known: {api_names}.")
