"""Options of ``parley serve`` for its output and its traces, and for the file with options."""

from __future__ import annotations

from parley.settings.option_kinds import (
    choice_kind,
    otlp_endpoint_kind,
    switch_kind,
    text_kind,
)
from parley.settings.options import Option

OUTPUT_OPTIONS: list[Option] = [
    Option("quiet", switch_kind(), "Do not log a line for each request.", False, section="output", configurable=True),
    Option(
        "log-format",
        choice_kind("text", "json"),
        "Format of log lines. With json, the lines at the start are log lines as well.",
        "text",
        section="output",
        configurable=True,
    ),
    Option(
        "log-level",
        choice_kind("debug", "info", "warning", "error"),
        "The least level of messages that are logged. A line for each request has the level info.",
        "info",
        section="output",
        configurable=True,
    ),
    Option(
        "log-bodies",
        switch_kind(),
        "Log the first 2,000 characters of the bodies of requests and answers. They contain what users write.",
        False,
        section="output",
        configurable=True,
    ),
    Option(
        "otlp-traces-endpoint",
        otlp_endpoint_kind(),
        "Where traces of requests are sent over OTLP: grpc(s)://HOST:PORT, or http(s)://HOST:PORT, which means gRPC "
        "with port 4317.",
        unset_text="OTEL_EXPORTER_OTLP_ENDPOINT, or nowhere",
        section="output",
        configurable=True,
    ),
    Option(
        "config", text_kind("FILE"), "TOML file with any of these options as keys.", section="output", configurable=True
    ),
    Option("show-config", switch_kind(), "Print every value with its source, then exit.", False, section="output"),
]
