"""One call over gRPC, or one request of a stream: its client, its id, and its outcome. The counterpart of ``Exchange``.

Knows nothing of the content of calls. Only the gRPC ports import it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import grpc

from parley.dialects.request_context import RequestContext
from parley.dialects.triton.rpc.status import GrpcError, grpc_error
from parley.errors import SERVER_ERROR, ParleyError
from parley.serving import model_facts
from parley.serving.model_registry import ModelRegistry
from parley.serving.served_model import ServedModel
from parley.tracing.encode_spans import Attributes
from parley.tracing.request_trace import RequestTrace
from parley.types import NO_TENANT
from parley.web.exchange import REQUEST_ID_PATTERN
from parley.web.logs import AccessLogEntry, log_request
from parley.web.random_ids import draw_id

log = logging.getLogger("parley.server")

# The statuses that are the server's fault by OpenTelemetry's conventions.
SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


class GrpcCall:
    """A gRPC call. ``method``: its path. ``headers``: its metadata, with the lower-case names of HTTP/2."""

    def __init__(self, registry: ModelRegistry, method: str, headers: Mapping[bytes, bytes]):
        self.method, self.headers = method, dict(headers)
        self.log_entry = AccessLogEntry()
        self.arrived = time.perf_counter()
        self.tenant = NO_TENANT  # the client, by its API key
        self.request_uuid = draw_id().hex()
        client_id = headers.get(b"x-request-id", b"")
        self.request_id = client_id.decode() if REQUEST_ID_PATTERN.fullmatch(client_id) else f"req_{self.request_uuid}"
        self._registry = registry
        exporter = registry.span_exporter
        self.trace = None if exporter is None else RequestTrace(exporter, self.headers)

    def request_context(self, model: ServedModel, path: Mapping[str, str]) -> RequestContext:
        """Return the server state that a dialect needs to read this call."""
        return model_facts.model_request_context(model, self.request_uuid, path, self.headers)

    @contextmanager
    def reporting_outcome(self) -> Iterator[None]:
        """Turn every exception raised inside into GrpcError; count and log the outcome of the call."""
        code = grpc.StatusCode.OK
        try:
            yield
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            failure = self._as_grpc_error(error)
            code = failure.code
            self.log_entry.error = failure.message
            self.log_entry.field = getattr(error, "field", None) or ""
            raise failure from None
        finally:
            self._registry.grpc_responses.add_count(value=code.name)
            if self.trace is not None and not self.log_entry.is_probe:
                self._finish_trace(self.trace, code)
            if self._registry.options.access_log and not self.log_entry.is_probe:
                log_request(self.request_id, "gRPC", self.method, code.name, self.arrived, self.log_entry)

    def _finish_trace(self, trace: RequestTrace, code: grpc.StatusCode) -> None:
        """Add the span of the call. Names: https://opentelemetry.io/docs/specs/semconv/rpc/grpc/"""
        service, _, method = self.method.strip("/").partition("/")
        attributes: Attributes = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": method,
            "rpc.grpc.status_code": code.value[0],
            "client.address": self.log_entry.client,
            "parley.api": self.log_entry.api,
            "parley.request.id": self.request_id,
        }
        error = self.log_entry.error if code in SERVER_FAULTS else ""
        name = self.method.strip("/")
        trace.finish(partial(trace.encode_request_span, name, time.perf_counter(), attributes, error))

    def _as_grpc_error(self, error: Exception) -> GrpcError:
        if isinstance(error, GrpcError):
            return error
        if isinstance(error, ParleyError):
            return grpc_error(error)
        log.exception("Call %s failed.", self.request_id)
        return grpc_error(ParleyError(SERVER_ERROR))
