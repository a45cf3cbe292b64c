"""The coordinator's configuration file: keys, ranges, defaults and parsing.

Each key is one line of a class below; parsing, error messages and documentation are derived from it. Knows no instance
and opens no port.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from parley.settings.keys import cluster_secret
from parley.settings.kinds import Kind, choice, duration, integer, number, pattern, size, switch, text
from parley.settings.options import ConfigError, nearest, read_toml

ROLES = ("mixed", "prefill", "decode", "flex")
NUMBER = r"(?:[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"  # a port number
URL = pattern(rf"https?://(\[[0-9A-Fa-f:.%]+\]|[^\s:/?#\[\]@]+)(:{NUMBER})?/?", "URL", "of the form http://HOST:PORT")
PEER = pattern(
    rf"(\d{{1,3}}(\.\d{{1,3}}){{3}}|\[[0-9A-Fa-f:.]+\])(;{NUMBER})?", "IP;PORT", "of the form IP;PORT, as a d-target"
)
PORT = integer(0, 65_535)
SECONDS = number(0.001, 86_400)
T = TypeVar("T")


def entry(kind: Kind, default: Any, help: str, *, many: bool = False) -> Any:
    """Declare a key of the file. ``many``: its value is a list of ``kind`` values, or text separated by commas."""
    return field(default=default, metadata={"kind": kind, "help": help, "many": many})


@dataclass(frozen=True, kw_only=True)
class Static:
    """``[[instances]]``: an instance that is known from the start."""

    url: str = entry(URL, "", "Base URL of the instance.")
    role: str = entry(choice(*ROLES), "mixed", "Its role, until the instance reports another.")
    id: int | None = entry(integer(0, 2**63 - 1), None, "Its number; default: its position in the list, from 1.")
    management: str | None = entry(URL, None, "Where it answers /v1/status and takes roles; default: url.")
    metrics: str | None = entry(URL, None, "Where it answers /metrics; default: the management address.")
    grpc: str | None = entry(text("HOST:PORT"), None, "Triton gRPC address of a server other than parley.")
    peer: str | None = entry(PEER, None, "Where it takes handovers; default: the address that it reports.")
    group: int = entry(integer(0), 0, "P and D are paired within a group only.")
    slots: int | None = entry(integer(1, 5000), None, "Requests it computes at a time, if it does not report that.")
    blocks: int | None = entry(integer(1), None, "Blocks of its KV cache, if it does not report that.")
    p_percentage: int = entry(integer(0, 100), 50, "Flex instances: percentage for prefill.")


@dataclass(frozen=True, kw_only=True)
class Tls:
    """``[tls]``: TLS towards clients (certificate, key) and towards instances (ca, and the same pair as client)."""

    certificate: str | None = entry(text("FILE"), None, "Certificate in PEM format; enables TLS on all ports.")
    key: str | None = entry(text("FILE"), None, "Private key of the certificate.")
    password: str | None = entry(text("FILE"), None, "File with the key's password.")
    ca: str | None = entry(text("FILE"), None, "CA that must have signed the instances' certificates.")
    clients: str | None = entry(
        text("FILE"), None, "CA that must have signed clients' certificates; makes them mandatory."
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """All options of a coordinator. Times are in seconds, ``body_limit`` in bytes."""

    # ports
    host: str = entry(text("ADDRESS"), "127.0.0.1", "Address of all ports that have no address of their own.")
    grpc_port: int | None = entry(
        PORT, None, "Port of Triton's gRPC API; 0: any free one. Needs `pip install 'parley[grpc]'`, also on instances."
    )
    predict_port: int = entry(PORT, 1025, "Inference port; 0: any free one.")
    management_host: str | None = entry(text("ADDRESS"), None, "Address of the management port.")
    management_port: int | None = entry(PORT, 1026, "Port for instances, tasks and alarms.")
    metrics_host: str | None = entry(text("ADDRESS"), None, "Address of the metrics port.")
    metrics_port: int | None = entry(PORT, 1028, "Port for sums over all instances, in Prometheus format.")
    status_host: str | None = entry(text("ADDRESS"), None, "Address of the status port.")
    status_port: int | None = entry(PORT, 1029, "Port for probes and the live page.")
    cors_origin: tuple[str, ...] = entry(
        text("ORIGIN"), (), "Origins whose pages may call the inference port from a browser; * for all.", many=True
    )
    allow_host: tuple[str, ...] = entry(
        text("NAME"), (), "Further Host names accepted where the address is a loopback one.", many=True
    )
    strict: bool = entry(switch(), False, "Refuse in MindIE's words on the paths of every API, not only of MindIE.")
    # limits
    max_requests: int = entry(integer(1, 90_000), 10_000, "Open requests, and client connections.")
    single_node_max_requests: int = entry(integer(1, 90_000), 1000, "Open requests of one instance.")
    body_limit: int = entry(size(1 << 10), 32 << 20, "Largest body; in MindIE a whole number of MB from 1 to 20.")
    http_timeout_seconds: float = entry(SECONDS, 600.0, "Limit for a request to arrive, and between two writes.")
    keep_alive_seconds: float = entry(SECONDS, 180.0, "How long an idle connection is kept open.")
    memory_limit: int = entry(size(1 << 20), 2 << 30, "Memory for the bodies of open requests; more are refused.")
    max_retry: int = entry(integer(0, 100), 5, "How often a request is retried after an instance failed.")
    schedule_timeout: float = entry(SECONDS, 600.0, "How long a request may wait to be given to instances.")
    recovery_timeout: float = entry(SECONDS, 30.0, "How long a request that lost its instance may wait for another.")
    first_token_timeout: float = entry(SECONDS, 600.0, "From sending it to an instance to the first token.")
    infer_timeout: float = entry(SECONDS, 600.0, "Limit for a whole request.")
    tokenizer_timeout: float = entry(SECONDS, 300.0, "Limit for a tokenize request.")
    string_token_rate: float = entry(number(0.01, 1000), 4.02, "Characters per token, to estimate prompt lengths.")
    max_schedule_count: int = entry(integer(1, 90_000), 10_000, "Requests that may wait to be given to instances.")
    max_res_num: int = entry(integer(1, 5000), 5000, "Largest number of instances.")
    # scheduling
    deploy_mode: str = entry(
        choice("auto", "pd_separate", "pd_disaggregation", "pd_disaggregation_single_container", "single_node"),
        "auto",
        "When the cluster is ready: with a P and a D, with one mixed instance (single_node), or with either (auto).",
    )
    scheduler_type: str = entry(choice("digs_scheduler", "default_scheduler"), "digs_scheduler",
                              "By load, or round-robin (default_scheduler).")  # fmt: skip
    algorithm_type: str = entry(choice("predicted", "load_balance", "cache_affinity"), "predicted",
                              "Where the first token is predicted soonest; or an algorithm of MindIE.")  # fmt: skip
    separate: str = entry(
        choice("auto", "always", "never"), "auto", "Whether prefill and decode of a request run on separate instances."
    )
    fallback: bool = entry(switch(), False, "If all instances have one role, let them run whole requests.")
    cache_size: int = entry(integer(1, 1_000_000), 100, "cache_affinity: conversations that are remembered.")
    slots_thresh: float = entry(number(0, 1), 0.05, "cache_affinity: share of slots that must be free.")
    block_thresh: float = entry(number(0, 1), 0.05, "cache_affinity: share of blocks that must be free.")
    reordering_type: int = entry(integer(1, 3), 1, "Queue order: 1 arrival, 2 shortest first, 3 longest first.")
    select_type: int = entry(integer(1, 2), 1, "1: no limit per instance; 2: as its resources allow.")
    res_limit_rate: float = entry(number(0.01, 100), 1.1, "select_type 2: how far resources are over-committed.")
    load_cost_values: tuple[float, ...] = entry(number(-1e9, 1e9), (1.0, 0.0), "Weights of P's load.", many=True)
    load_cost_coefficient: tuple[float, ...] = entry(
        number(-1e9, 1e9), (0.0, 0.22, 1024.0, 24.0, 6.0, 0.0, 1.0, 0.0, 1.0), "Weights of D's load.", many=True
    )
    slo_ttft: float | None = entry(
        SECONDS, None, "Limit for the time to the first token; a request predicted to exceed it is refused."
    )
    slo_tpot: float | None = entry(SECONDS, None, "Seconds per further token, by which goodput is counted.")
    # instances
    heartbeat: float = entry(number(0.05, 60), 1.0, "Seconds between two status checks of an instance.")
    misses: int = entry(integer(1, 100), 5, "Status checks in a row without any sign of life until it counts as lost.")
    fault_seconds: float = entry(number(0, 86_400), 120.0, "How long an instance is not used after it broke its link.")
    secret: str = entry(text("SECRET"), "", "The cluster's secret, which authenticates coordinator and instances.")
    secret_file: str | None = entry(text("FILE"), None, "File whose first line is the secret.")
    # controller
    auto_ratio: bool = entry(switch(), False, "Change roles so that prefill and decode keep up with each other.")
    ratio_period: float = entry(duration(), 300.0, "How long another ratio must have been better before a change.")
    default_p_rate: int = entry(integer(0, 4096), 0, "With default_d_rate: a fixed P : D ratio.")
    default_d_rate: int = entry(integer(0, 4096), 0, "The D part of that ratio.")
    tasks_end_wait_seconds: float = entry(SECONDS, 300.0, "How long a role change waits for running requests.")
    # tables
    instances: tuple[Static, ...] = ()
    tls: Tls = Tls()

    def __repr__(self) -> str:
        return f"Options({len(self.instances)} instances)"  # without the secret


class Row(NamedTuple):
    """A key as the documentation shows it."""

    key: str
    default: str
    range: str
    help: str


def load(path: str) -> Options:
    """Read a configuration file. Raises ConfigError, which names file, key, value and range."""
    return read(read_toml(path), path, Path(path).parent)


def read(content: Mapping[str, Any], source: str, folder: Path = Path()) -> Options:
    """Parse a file's content; paths in it are relative to ``folder``. Raises ConfigError."""
    plain = dict(content)
    tables = plain.pop("instances", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{source}: instances is not a list of tables; write [[instances]] above each.")
    statics = []
    for at, table in enumerate(tables, 1):
        where = f"{source}: instances[{at}]"
        static = Static(**_values(Static, table, where))
        if not static.url:
            raise ConfigError(f"{where}: url is missing.")
        statics.append(static if static.id is not None else _numbered(static, at))
    for name in ("id", "url"):
        seen: set[Any] = set()
        for static in statics:
            value = static.url.rstrip("/") if name == "url" else static.id
            if value in seen:
                raise ConfigError(f"{source}: two instances have the {name} {value!r}.")
            seen.add(value)
    tls = plain.pop("tls", {})
    if not isinstance(tls, dict):
        raise ConfigError(f"{source}: tls is not a table; write [tls] above its keys.")
    made = _values(Options, plain, source)
    files = {name: str(folder / value) for name, value in _values(Tls, tls, f"{source}: tls").items() if value}
    if ("certificate" in files) != ("key" in files):
        raise ConfigError(f"{source}: tls: certificate and key go together.")
    for name in ("password", "clients"):  # otherwise ports that seem protected would be open
        if name in files and "certificate" not in files:
            raise ConfigError(f"{source}: tls: {name} needs certificate and key as well.")
    file = made.get("secret_file")
    made["secret"] = cluster_secret(
        made.get("secret"), folder / file if file else None, f"{source}: secret", f"{source}: secret_file"
    )
    return _checked(Options(**made, instances=tuple(statics), tls=Tls(**files)), source)


def rows(kind: type[Options] | type[Static] | type[Tls] = Options) -> Iterator[Row]:
    """Yield all keys, for the documentation."""
    for each in fields(kind):
        if each.metadata:
            wanted, shown = each.metadata["kind"], each.default
            if isinstance(shown, tuple):
                shown = ", ".join(map(wanted.show, shown))
            default = "" if shown in (None, "") else shown if isinstance(shown, str) else wanted.show(shown)
            yield Row(each.name, default, _range(wanted), each.metadata["help"])


def _range(kind: Kind) -> str:
    """Return the range of a kind, in the words of its own error message."""
    try:
        kind.read(object())
    except ValueError as wanted:
        return str(wanted)
    raise AssertionError("a kind reads anything")


def _values(kind: Any, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    known: dict[str, Field[Any]] = {each.name: each for each in fields(kind) if each.metadata}
    found: dict[str, Any] = {}
    for written, raw in table.items():
        name = re.sub("-", "_", written)
        if name not in known:
            raise ConfigError(f"{where}: unknown key {written}.{nearest(name, list(known))}")
        if name in found:
            raise ConfigError(f"{where}: {name} is given twice.")
        how = known[name].metadata
        if how["many"]:
            parts = raw if isinstance(raw, list) else raw.split(",") if isinstance(raw, str) else [raw]
            found[name] = tuple(_one(how["kind"], part, f"{where}: {name}") for part in parts)
        else:
            found[name] = _one(how["kind"], raw, f"{where}: {name}")
    return found


def _one(kind: Kind, raw: Any, where: str) -> Any:
    try:
        return kind.read(raw)
    except ValueError as wanted:
        shown = "the value" if where.endswith("secret") else repr(raw if not isinstance(raw, str) else raw[:60])
        raise ConfigError(f"{where}: {shown} is not {wanted}.") from None


def _numbered(static: Static, number: int) -> Static:
    return Static(**{each.name: getattr(static, each.name) for each in fields(Static)} | {"id": number})


def _checked(options: Options, source: str) -> Options:
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
