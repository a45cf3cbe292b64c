"""The coordinator's configuration file: keys, ranges, defaults and parsing.

Each key is one line of a class below; parsing, error messages and documentation are derived from it. Knows no instance
and opens no port.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from parley.settings.key_file import HashedKey
from parley.settings.keys import cluster_secret
from parley.settings.option_kinds import (
    OptionKind,
    choice_kind,
    duration_kind,
    integer_kind,
    network_kind,
    number_kind,
    otlp_endpoint_kind,
    pattern_kind,
    size_kind,
    switch_kind,
    text_kind,
)
from parley.settings.options import ConfigError, did_you_mean, read_toml

INSTANCE_ROLES = ("mixed", "prefill", "decode", "flex")
PORT_NUMBER = r"(?:[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"  # a port number
URL_KIND = pattern_kind(
    rf"https?://(\[[0-9A-Fa-f:.%]+\]|[^\s:/?#\[\]@]+)(:{PORT_NUMBER})?/?", "URL", "of the form http://HOST:PORT"
)
PEER_KIND = pattern_kind(
    rf"(\d{{1,3}}(\.\d{{1,3}}){{3}}|\[[0-9A-Fa-f:.]+\])(;{PORT_NUMBER})?",
    "IP;PORT",
    "of the form IP;PORT, as a d-target",
)
PORT_KIND = integer_kind(0, 65_535)
SECONDS_KIND = number_kind(0.001, 86_400)
T = TypeVar("T")


def config_key(kind: OptionKind, default: Any, help_text: str, *, many: bool = False) -> Any:
    """Declare a key of the file. ``many``: its value is a list of ``kind`` values, or text separated by commas."""
    return field(default=default, metadata={"kind": kind, "help": help_text, "many": many})


@dataclass(frozen=True, kw_only=True)
class InstanceConfig:
    """``[[instances]]``: an instance that is known from the start."""

    url: str = config_key(URL_KIND, "", "Base URL of the instance.")
    role: str = config_key(choice_kind(*INSTANCE_ROLES), "mixed", "Its role, until the instance reports another.")
    id: int | None = config_key(
        integer_kind(0, 2**63 - 1), None, "Its number; default: its position in the list, from 1."
    )
    management: str | None = config_key(URL_KIND, None, "Where it answers /v1/status and takes roles; default: url.")
    metrics: str | None = config_key(URL_KIND, None, "Where it answers /metrics; default: the management address.")
    grpc: str | None = config_key(text_kind("HOST:PORT"), None, "Triton gRPC address of a server other than parley.")
    peer: str | None = config_key(PEER_KIND, None, "Where it takes handovers; default: the address that it reports.")
    group: int = config_key(integer_kind(0), 0, "P and D are paired within a group only.")
    slots: int | None = config_key(
        integer_kind(1, 5000), None, "Requests it computes at a time, if it does not report that."
    )
    blocks: int | None = config_key(integer_kind(1), None, "Blocks of its KV cache, if it does not report that.")
    p_percentage: int = config_key(integer_kind(0, 100), 50, "Flex instances: percentage for prefill.")


@dataclass(frozen=True, kw_only=True)
class CoordinatorTls:
    """``[tls]``: TLS towards clients (certificate, key) and towards instances (ca, and the same pair as client)."""

    certificate: str | None = config_key(
        text_kind("FILE"), None, "Certificate in PEM format; enables TLS on all ports."
    )
    key: str | None = config_key(text_kind("FILE"), None, "Private key of the certificate.")
    password: str | None = config_key(text_kind("FILE"), None, "File with the key's password.")
    ca: str | None = config_key(text_kind("FILE"), None, "CA that must have signed the instances' certificates.")
    clients: str | None = config_key(
        text_kind("FILE"), None, "CA that must have signed clients' certificates; makes them mandatory."
    )


@dataclass(frozen=True, kw_only=True)
class CoordinatorOptions:
    """All options of a coordinator. Times are in seconds, ``body_limit`` in bytes."""

    # ports
    host: str = config_key(text_kind("ADDRESS"), "127.0.0.1", "Address of all ports that have no address of their own.")
    grpc_port: int | None = config_key(
        PORT_KIND,
        None,
        "Port of Triton's gRPC API; 0: any free one. Needs `pip install 'parley-llm[grpc]'`, also on instances.",
    )
    predict_port: int = config_key(PORT_KIND, 1025, "Inference port; 0: any free one.")
    management_host: str | None = config_key(text_kind("ADDRESS"), None, "Address of the management port.")
    management_port: int | None = config_key(PORT_KIND, 1026, "Port for instances, tasks and alarms.")
    metrics_host: str | None = config_key(text_kind("ADDRESS"), None, "Address of the metrics port.")
    metrics_port: int | None = config_key(PORT_KIND, 1028, "Port for sums over all instances, in Prometheus format.")
    status_host: str | None = config_key(text_kind("ADDRESS"), None, "Address of the status port.")
    status_port: int | None = config_key(PORT_KIND, 1029, "Port for probes and the live page.")
    cors_origin: tuple[str, ...] = config_key(
        text_kind("ORIGIN"), (), "Origins whose pages may call the inference port from a browser; * for all.", many=True
    )
    allow_host: tuple[str, ...] = config_key(
        text_kind("NAME"), (), "Further Host names accepted where the address is a loopback one.", many=True
    )
    strict: bool = config_key(
        switch_kind(), False, "Refuse in MindIE's words on the paths of every API, not only of MindIE."
    )
    otlp_traces_endpoint: str = config_key(
        otlp_endpoint_kind(),
        "",
        "Where traces of requests are sent over OTLP, as `parley serve --otlp-traces-endpoint` says; "
        "default: where OTEL_EXPORTER_OTLP_ENDPOINT says, if anywhere.",
    )
    ui: bool = config_key(
        switch_kind(),
        True,
        "Serve the web page (`/` in a browser, `/ui`, `/ui/status`, `/docs`) on the inference port.",
    )
    # keys of clients
    api_key_file: str | None = config_key(
        text_kind("FILE"),
        None,
        "TOML file with hashes of API keys and their limits, for the whole cluster; it is read again when it changes. "
        "Its name ends in .toml.",
    )
    usage_db: str | None = config_key(
        text_kind("FILE"), None, "Database of the requests and tokens of each key, day and model; needs api_key_file."
    )
    audit_log: str | None = config_key(
        text_kind("FILE"),
        None,
        "File that a JSON line is appended to for each call that may change the instances; needs api_key_file.",
    )
    # limits
    max_requests: int = config_key(integer_kind(1, 90_000), 10_000, "Open requests, and client connections.")
    single_node_max_requests: int = config_key(integer_kind(1, 90_000), 1000, "Open requests of one instance.")
    body_limit: int = config_key(
        size_kind(1 << 10),
        32 << 20,
        "Largest body; in MindIE a whole number of MB from 1 to 20. Bodies with images may need 64MiB.",
    )
    http_timeout_seconds: float = config_key(
        SECONDS_KIND, 600.0, "Limit for a request to arrive, and between two writes."
    )
    header_timeout_seconds: float = config_key(
        SECONDS_KIND, 15.0, "Limit for a request's headers, and for the handshakes of TLS and gRPC."
    )
    keep_alive_seconds: float = config_key(SECONDS_KIND, 180.0, "How long an idle connection is kept open.")
    http2: bool = config_key(
        switch_kind(), True, "Speak HTTP/2 with clients that offer it; needs `pip install 'parley-llm[http2]'`."
    )
    memory_limit: int = config_key(
        size_kind(1 << 20), 2 << 30, "Memory for the bodies of open requests; more are refused."
    )
    max_retry: int = config_key(integer_kind(0, 100), 5, "How often a request is retried after an instance failed.")
    schedule_timeout: float = config_key(SECONDS_KIND, 600.0, "How long a request may wait to be given to instances.")
    recovery_timeout: float = config_key(
        SECONDS_KIND, 30.0, "How long a request that lost its instance may wait for another."
    )
    first_token_timeout: float = config_key(SECONDS_KIND, 600.0, "From sending it to an instance to the first token.")
    infer_timeout: float = config_key(SECONDS_KIND, 600.0, "Limit for a whole request.")
    tokenizer_timeout: float = config_key(SECONDS_KIND, 300.0, "Limit for a tokenize request.")
    string_token_rate: float = config_key(
        number_kind(0.01, 1000), 4.02, "Characters per token, to estimate prompt lengths."
    )
    max_schedule_count: int = config_key(
        integer_kind(1, 90_000), 10_000, "Requests that may wait to be given to instances."
    )
    max_res_num: int = config_key(integer_kind(1, 5000), 5000, "Largest number of instances.")
    # responses, conversations and other records that later requests refer to
    response_store: int = config_key(
        size_kind(0),
        64 << 20,
        "Room for responses, conversations, chat completions, files and batches; 0: none are kept.",
    )
    response_store_file: str | None = config_key(
        text_kind("FILE"), None, "Database that keeps them across restarts; without it they are in memory."
    )
    response_lifetime: float = config_key(duration_kind(1.0), 7 * 24 * 3600.0, "How long they are kept.")
    # scheduling
    deploy_mode: str = config_key(
        choice_kind("auto", "pd_separate", "pd_disaggregation", "pd_disaggregation_single_container", "single_node"),
        "auto",
        "When the cluster is ready: with a P and a D, with one mixed instance (single_node), or with either (auto).",
    )
    scheduler_type: str = config_key(choice_kind("digs_scheduler", "default_scheduler"), "digs_scheduler",
                              "By load, or round-robin (default_scheduler).")  # fmt: skip
    algorithm_type: str = config_key(choice_kind("predicted", "load_balance", "cache_affinity"), "predicted",
                              "Where the first token is predicted soonest; or an algorithm of MindIE.")  # fmt: skip
    separate: str = config_key(
        choice_kind("auto", "always", "never"),
        "auto",
        "Whether prefill and decode of a request run on separate instances.",
    )
    fallback: bool = config_key(switch_kind(), False, "If all instances have one role, let them run whole requests.")
    cache_size: int = config_key(integer_kind(1, 1_000_000), 100, "cache_affinity: conversations that are remembered.")
    slots_thresh: float = config_key(number_kind(0, 1), 0.05, "cache_affinity: share of slots that must be free.")
    block_thresh: float = config_key(number_kind(0, 1), 0.05, "cache_affinity: share of blocks that must be free.")
    reordering_type: int = config_key(
        integer_kind(1, 3), 1, "Queue order: 1 arrival, 2 shortest first, 3 longest first."
    )
    select_type: int = config_key(integer_kind(1, 2), 1, "1: no limit per instance; 2: as its resources allow.")
    res_limit_rate: float = config_key(
        number_kind(0.01, 100), 1.1, "select_type 2: how far resources are over-committed."
    )
    load_cost_values: tuple[float, ...] = config_key(
        number_kind(-1e9, 1e9), (1.0, 0.0), "Weights of P's load.", many=True
    )
    load_cost_coefficient: tuple[float, ...] = config_key(
        number_kind(-1e9, 1e9), (0.0, 0.22, 1024.0, 24.0, 6.0, 0.0, 1.0, 0.0, 1.0), "Weights of D's load.", many=True
    )
    slo_ttft: float | None = config_key(
        SECONDS_KIND, None, "Limit for the time to the first token; a request predicted to exceed it is refused."
    )
    slo_tpot: float | None = config_key(SECONDS_KIND, None, "Seconds per further token, by which goodput is counted.")
    # instances
    heartbeat: float = config_key(number_kind(0.05, 60), 1.0, "Seconds between two status checks of an instance.")
    misses: int = config_key(
        integer_kind(1, 100), 5, "Status checks in a row without any sign of life until it counts as lost."
    )
    fault_seconds: float = config_key(
        number_kind(0, 86_400), 120.0, "How long an instance is not used after it broke its link."
    )
    secret: str = config_key(
        text_kind("SECRET"), "", "The cluster's secret, which authenticates coordinator and instances."
    )
    secret_file: str | None = config_key(text_kind("FILE"), None, "File whose first line is the secret.")
    cluster_network: tuple[IPv4Network | IPv6Network, ...] = config_key(
        network_kind(),
        (),
        "Networks whose hosts may use the management port without the secret, for controllers that know none.",
        many=True,
    )
    # controller
    auto_ratio: bool = config_key(
        switch_kind(), False, "Change roles so that prefill and decode keep up with each other."
    )
    ratio_period: float = config_key(
        duration_kind(), 300.0, "How long another ratio must have been better before a change."
    )
    default_p_rate: int = config_key(integer_kind(0, 4096), 0, "With default_d_rate: a fixed P : D ratio.")
    default_d_rate: int = config_key(integer_kind(0, 4096), 0, "The D part of that ratio.")
    tasks_end_wait_seconds: float = config_key(
        SECONDS_KIND, 300.0, "How long a role change waits for running requests."
    )
    # the content of api_key_file; None: there is none
    hashed_keys: tuple[HashedKey, ...] | None = None
    # tables
    instances: tuple[InstanceConfig, ...] = ()
    tls: CoordinatorTls = CoordinatorTls()

    def __repr__(self) -> str:
        return f"Options({len(self.instances)} instances)"  # without the secret


class ConfigRow(NamedTuple):
    """A key as the documentation shows it."""

    key: str
    default: str
    allowed_range: str
    description: str


def load_coordinator_config(path: str) -> CoordinatorOptions:
    """Read a configuration file. Raises ConfigError, which names file, key, value and range."""
    return parse_coordinator_config(read_toml(path), path, Path(path).parent)


def parse_coordinator_config(content: Mapping[str, Any], source: str, folder: Path = Path()) -> CoordinatorOptions:
    """Parse a file's content; paths in it are relative to ``folder``. Raises ConfigError."""
    top_level = dict(content)
    tables = top_level.pop("instances", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{source}: instances is not a list of tables; write [[instances]] above each.")
    instance_configs = []
    for position, table in enumerate(tables, 1):
        where = f"{source}: instances[{position}]"
        static = InstanceConfig(**_parse_values(InstanceConfig, table, where))
        if not static.url:
            raise ConfigError(f"{where}: url is missing.")
        instance_configs.append(static if static.id is not None else _with_id(static, position))
    for name in ("id", "url"):
        seen_values: set[Any] = set()
        for static in instance_configs:
            value = static.url.rstrip("/") if name == "url" else static.id
            if value in seen_values:
                raise ConfigError(f"{source}: two instances have the {name} {value!r}.")
            seen_values.add(value)
    tls = top_level.pop("tls", {})
    if not isinstance(tls, dict):
        raise ConfigError(f"{source}: tls is not a table; write [tls] above its keys.")
    values = _parse_values(CoordinatorOptions, top_level, source)
    for name in ("response_store_file", "api_key_file", "usage_db", "audit_log"):
        if file := values.get(name):
            values[name] = str(folder / file)
    files = {
        name: str(folder / value)
        for name, value in _parse_values(CoordinatorTls, tls, f"{source}: tls").items()
        if value
    }
    if ("certificate" in files) != ("key" in files):
        raise ConfigError(f"{source}: tls: certificate and key go together.")
    for name in ("password", "clients"):  # otherwise ports that seem protected would be open
        if name in files and "certificate" not in files:
            raise ConfigError(f"{source}: tls: {name} needs certificate and key as well.")
    file = values.get("secret_file")
    values["secret"] = cluster_secret(
        values.get("secret"), folder / file if file else None, f"{source}: secret", f"{source}: secret_file"
    )
    return _check_options(
        CoordinatorOptions(**values, instances=tuple(instance_configs), tls=CoordinatorTls(**files)), source
    )


def documented_keys(
    config_class: type[CoordinatorOptions] | type[InstanceConfig] | type[CoordinatorTls] = CoordinatorOptions,
) -> Iterator[ConfigRow]:
    """Yield all keys, for the documentation."""
    for config_field in fields(config_class):
        if config_field.metadata:
            value_kind, default_value = config_field.metadata["kind"], config_field.default
            if isinstance(default_value, tuple):
                default_value = ", ".join(map(value_kind.format_value, default_value))
            default = (
                ""
                if default_value in (None, "")
                else default_value
                if isinstance(default_value, str)
                else value_kind.format_value(default_value)
            )
            yield ConfigRow(config_field.name, default, _range_text(value_kind), config_field.metadata["help"])


def _range_text(kind: OptionKind) -> str:
    """Return the range of a kind, in the words of its own error message."""
    try:
        kind.parse_raw(object())
    except ValueError as expectation:
        return str(expectation)
    raise AssertionError("a kind reads anything")


def _parse_values(config_class: Any, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    key_fields: dict[str, Field[Any]] = {field.name: field for field in fields(config_class) if field.metadata}
    values: dict[str, Any] = {}
    for raw_name, raw in table.items():
        name = re.sub("-", "_", raw_name)
        if name not in key_fields:
            raise ConfigError(f"{where}: unknown key {raw_name}.{did_you_mean(name, list(key_fields))}")
        if name in values:
            raise ConfigError(f"{where}: {name} is given twice.")
        metadata = key_fields[name].metadata
        if metadata["many"]:
            parts = raw if isinstance(raw, list) else raw.split(",") if isinstance(raw, str) else [raw]
            values[name] = tuple(_parse_value(metadata["kind"], part, f"{where}: {name}") for part in parts)
        else:
            values[name] = _parse_value(metadata["kind"], raw, f"{where}: {name}")
    return values


def _parse_value(kind: OptionKind, raw: Any, where: str) -> Any:
    try:
        return kind.parse_raw(raw)
    except ValueError as expectation:
        value_text = "the value" if where.endswith("secret") else repr(raw if not isinstance(raw, str) else raw[:60])
        raise ConfigError(f"{where}: {value_text} is not {expectation}.") from None


def _with_id(static: InstanceConfig, number: int) -> InstanceConfig:
    return InstanceConfig(
        **{field.name: getattr(static, field.name) for field in fields(InstanceConfig)} | {"id": number}
    )


def _check_options(options: CoordinatorOptions, source: str) -> CoordinatorOptions:
    """Check conditions that involve several keys. Raises ConfigError."""
    for name, count in (("load_cost_values", 2), ("load_cost_coefficient", 9)):
        if len(getattr(options, name)) != count:
            raise ConfigError(f"{source}: {name}: {len(getattr(options, name))} numbers are not {count}.")
    if options.load_cost_coefficient[3] < 1 or options.load_cost_coefficient[4] < 0:
        raise ConfigError(f"{source}: load_cost_coefficient: the fourth number is not at least 1, or the fifth not 0.")
    if (options.default_p_rate == 0) != (options.default_d_rate == 0):
        raise ConfigError(f"{source}: default_p_rate and default_d_rate go together: both 0, or neither.")
    if options.algorithm_type == "cache_affinity" and any(static.role != "mixed" for static in options.instances):
        raise ConfigError(f"{source}: algorithm_type cache_affinity is for instances of role mixed only.")
    if len(options.instances) > options.max_res_num:
        raise ConfigError(f"{source}: {len(options.instances)} instances are more than max_res_num.")
    return options
