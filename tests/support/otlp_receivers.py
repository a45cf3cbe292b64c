"""OTLP collectors over gRPC and HTTP that keep the spans they get."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass
class ReceivedSpan:
    """A span; ids in hexadecimal, the parent's "" for none; times in nanoseconds."""

    name: str
    kind: int
    role: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    status: int
    attributes: dict[str, Any] = field(default_factory=dict)


class Collector:
    """The spans that arrived so far. ``refuses``: whether the one over HTTP answers all batches with an error."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.endpoint = ""
        self.refuses = False
        self.headers: list[dict[str, str]] = []

    def take_spans(self, request: ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            resource = _attributes(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [
                    ReceivedSpan(
                        span.name,
                        span.kind,
                        resource["parley.role"],
                        resource["service.name"],
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.status.code,
                        _attributes(span.attributes),
                    )
                    for span in scope.spans
                ]

    def span_named(self, name: str, role: str = "") -> ReceivedSpan:
        """Return the only span with this name, of a server of this role."""
        (span,) = [span for span in self.spans if span.name == name and (not role or span.role == role)]
        return span


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """A collector over gRPC."""
    collector = Collector()

    class Service(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            collector.take_spans(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Service(), server)
    collector.endpoint = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


@contextmanager
def http_collector() -> Iterator[Collector]:
    """A collector over HTTP."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_taken = self.path == "/v1/traces" and not collector.refuses
            if is_taken:
                collector.take_spans(ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if is_taken else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
