"""``parley coordinator``: one port in front of several servers. What it does there is in ``parley.cluster``."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from parley.kinds import choice, integer, switch, text
from parley.options import Config, ConfigError, Option

USAGE = """\
usage: parley coordinator --config FILE [options]

Takes requests of every API and has them answered by the instances that the file names, or that a controller tells of.
GET /health/ready is 200 once a prefill and a decode instance serve, or one that does both."""

OPTIONS = [
    Option("config", text("FILE"), "TOML file with keys and [[instances]].", unset="none: a controller tells of them"),
    Option("host", text("ADDRESS"), "Address of all ports that have none of their own.", unset="from the file"),
    Option("port", integer(0, 65_535), "Port for inference; 0: any free one.", unset="from the file, or 1025"),
    Option("quiet", switch(), "Log no line for each request.", False, section="output"),
    Option("log-format", choice("text", "json"), "How log lines look.", "text", section="output"),
]


def run(config: Config) -> int:
    from parley.cluster import coordinator
    from parley.cluster.config import Options, load

    options = load(config["config"]) if config["config"] else Options()
    if config["host"] is not None:
        options = replace(options, host=config["host"])
    if config["port"] is not None:
        options = replace(options, predict_port=config["port"])
    if options.grpc_port is not None and not all(map(find_spec, ("grpc", "google", "google.protobuf"))):
        raise ConfigError("Packages for gRPC are missing; install them with: pip install 'parley[grpc]'.")
    return coordinator.run(options, config["log-format"], access_log=not config["quiet"])
