"""``parley coordinator``: one port in front of several servers. ``parley.coordinator`` implements it."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from parley.cli.serve_config.server_options import absolute_path, check_appendable_file, hashed_keys_of
from parley.settings.option_kinds import choice_kind, integer_kind, switch_kind, text_kind
from parley.settings.options import ConfigError, Option, ResolvedOptions

if TYPE_CHECKING:
    from parley.coordinator.config import CoordinatorOptions

USAGE = """\
usage: parley coordinator --config FILE [options]

Takes requests of every API and has them answered by the instances that the file or a controller names.
GET /health/ready is 200 once a prefill and a decode instance are ready, or one that does both."""

OPTIONS = [
    Option(
        "config",
        text_kind("FILE"),
        "TOML file with keys and [[instances]].",
        unset_text="none: a controller names them",
    ),
    Option("host", text_kind("ADDRESS"), "Address of all ports without an address.", unset_text="from the file"),
    Option(
        "port", integer_kind(0, 65_535), "Port for inference; 0: any free one.", unset_text="from the file, or 1025"
    ),
    Option(
        "api-key-file",
        text_kind("FILE"),
        "TOML file with hashes of API keys that `parley key` makes and their limits, for the whole cluster; it is read "
        "again when it changes.",
        unset_text="from the file",
        section="keys",
    ),
    Option(
        "usage-db",
        text_kind("FILE"),
        "Database of the requests and tokens of each key, day and model, which admins read at /v1/usage.",
        unset_text="from the file",
        section="keys",
    ),
    Option(
        "audit-log",
        text_kind("FILE"),
        "File that a JSON line is appended to for each call that may change the instances.",
        unset_text="from the file",
        section="keys",
    ),
    Option("quiet", switch_kind(), "Do not log requests.", False, section="output"),
    Option("log-format", choice_kind("text", "json"), "Format of log lines.", "text", section="output"),
    Option(
        "log-level",
        choice_kind("debug", "info", "warning", "error"),
        "The least level of messages that are logged.",
        "info",
        section="output",
    ),
]


def run_command(config: ResolvedOptions) -> int:
    """Run the coordinator with these options. Return the exit code."""
    from parley.coordinator import coordinator
    from parley.tracing.otlp import MISSING_PACKAGES, packages_are_missing

    options = coordinator_options(config)
    if options.otlp_traces_endpoint and packages_are_missing():
        raise ConfigError(MISSING_PACKAGES)
    if options.grpc_port is not None and not all(map(find_spec, ("grpc", "google", "google.protobuf"))):
        raise ConfigError("Packages for gRPC are missing; install them with: pip install 'parley-llm[grpc]'.")
    check_appendable_file(options.audit_log, "audit-log")
    return coordinator.run_coordinator(
        options,
        config["log-format"],
        config["log-level"],
        access_log=not config["quiet"],
        read_options=lambda: coordinator_options(config),
    )


def coordinator_options(config: ResolvedOptions) -> CoordinatorOptions:
    """Return the options in the file, with those of the command line. Raises ConfigError."""
    from parley.coordinator.config import CoordinatorOptions, load_coordinator_config

    options = load_coordinator_config(config["config"]) if config["config"] else CoordinatorOptions()
    if config["host"] is not None:
        options = replace(options, host=config["host"])
    if config["port"] is not None:
        options = replace(options, predict_port=config["port"])
    for name in ("api-key-file", "usage-db", "audit-log"):
        if config[name] is not None:
            options = replace(options, **{name.replace("-", "_"): config[name]})
    return with_client_keys(options)


def with_client_keys(options: CoordinatorOptions) -> CoordinatorOptions:
    """Return the options with the keys of their file. Raises ConfigError."""
    hashed_keys = hashed_keys_of(options.api_key_file)
    if hashed_keys is None and options.api_key_file is not None:
        raise ConfigError(f"--api-key-file: {options.api_key_file} is not a file in TOML, whose name ends in .toml.")
    for option, file in (("usage-db", options.usage_db), ("audit-log", options.audit_log)):
        if hashed_keys is None and file is not None:
            raise ConfigError(f"--{option} needs --api-key-file: without it, instances check the keys.")
    return replace(options, hashed_keys=hashed_keys, audit_log=absolute_path(options.audit_log))
