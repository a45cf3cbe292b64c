"""Finds the endpoint that spans are sent to, by OpenTelemetry's protocol (OTLP) over gRPC or HTTP.

The option or OpenTelemetry's own environment variables name it. Without either, nothing is imported. Variables:
https://opentelemetry.io/docs/specs/otel/protocol/exporter/
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from parley.tracing.request_trace import SpanExporter

log = logging.getLogger("parley.tracing")

GRPC_PORT = 4317  # the registered port of OTLP over gRPC; that over HTTP is 4318
HTTP_PATH = "/v1/traces"
MISSING_PACKAGES = "Packages for OpenTelemetry are missing; install them with: pip install 'parley-llm[otel]'."


class OtlpTarget(NamedTuple):
    """An endpoint. ``url``: with http or https, "" for that of the environment."""

    url: str
    protocol: Literal["grpc", "http"]


def find_otlp_target(endpoint: str, environment: Mapping[str, str] = os.environ) -> OtlpTarget | None:
    """Return where spans are sent; None for nowhere. ``endpoint``: the option's value, "" if it is not set.

    ``grpc://`` and ``grpcs://`` mean gRPC. With ``http://`` and ``https://`` the environment says the protocol, or else
    the port: vLLM's users give ``http://HOST:4317`` for gRPC.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    url = endpoint
    if not endpoint:
        if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() != "otlp":
            return None
        url = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get(
            "OTEL_EXPORTER_OTLP_ENDPOINT", ""
        )
        if not url:
            return None
    address = urlsplit(url)
    if address.scheme in ("grpc", "grpcs"):
        return OtlpTarget(f"http{'s' * (address.scheme == 'grpcs')}://{address.netloc}", "grpc")
    protocol_name = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if (protocol_name or ("grpc" if address.port == GRPC_PORT else "http/protobuf")) == "grpc":
        return OtlpTarget(endpoint, "grpc")
    if endpoint and address.path in ("", "/"):
        endpoint = endpoint.rstrip("/") + HTTP_PATH
    return OtlpTarget(endpoint, "http")


def packages_are_missing() -> bool:
    """Whether the packages of the extra ``otel`` are not installed."""
    return not all(find_spec(name) for name in ("opentelemetry", "google", "grpc")) or not find_spec(
        "opentelemetry.exporter.otlp.proto"
    )


def open_span_exporter(endpoint: str, role: str) -> SpanExporter | None:
    """Return an exporter of spans; None if no endpoint is named, or its packages are missing and only the environment
    names it. ``role``: this server's role in a cluster."""
    target = find_otlp_target(endpoint)
    if target is None:
        return None
    if not endpoint and packages_are_missing():
        log.warning("The environment names an OTLP endpoint. %s No spans are sent.", MISSING_PACKAGES)
        return None
    from parley.tracing.span_export import OtlpSpanExporter  # imports the packages

    return OtlpSpanExporter(target.url, target.protocol, role)
