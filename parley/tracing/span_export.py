"""Exports spans with OpenTelemetry's SDK: a bounded queue, and a thread that sends batches of it.

Imported only if an endpoint is named; it needs the extra ``otel``. OpenTelemetry's own environment variables apply, for
example those of the sampler (``OTEL_TRACES_SAMPLER``), the queue (``OTEL_BSP_…``) and the exporters. The queue and the
exporters get our spans in place of the SDK's, whose encoder is slow; the versions of the packages are pinned for that.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

from parley.tracing.encode_spans import AttributeValue, encode_batch
from parley.tracing.request_trace import EncodeSpans
from parley.tracing.trace_context import TraceContext
from parley.version import __version__

log = logging.getLogger("parley.tracing")

CLOSE_SECONDS = 2.0  # seconds to send the last spans at the end
EXPORT_SECONDS = 5.0  # seconds for a batch, unless the environment says another time
ENCODED_TOGETHER = 16  # requests: then code is in the caches, and the event loop waits for 0.3 ms
TIMEOUT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")


class QueuedSpans:
    """The spans of a request in the SDK's queue, which asks whether they are sampled: all that come here are."""

    __slots__ = ("_encoded", "_ended")
    context = SpanContext(1, 1, False, TraceFlags(TraceFlags.SAMPLED))

    def __init__(self, ended: list[EncodeSpans]):
        self._ended = ended
        self._encoded = b""

    def encode(self) -> bytes:
        """Return them as items of a batch. Encodes them once, unless two threads begin at the same time."""
        ended = self._ended
        if not self._encoded:
            self._encoded = b"".join([encode() for encode in ended])
            self._ended = []
        return self._encoded


class OtlpSpanExporter:
    """Sends spans to an OTLP endpoint. ``url``: "" for that of the environment."""

    def __init__(self, url: str, protocol: Literal["grpc", "http"], role: str):
        # Their messages repeat for every batch; ours say when it began and when it ended.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its output to standard error does not have our log format
        timeout = None if any(name in os.environ for name in TIMEOUT_VARIABLES) else EXPORT_SECONDS
        exporter_class = GrpcSpanExporter if protocol == "grpc" else HttpSpanExporter
        exporter = exporter_class(url or None, timeout=timeout)
        exporter.resource = _resource_attributes(role)
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._samples_all = not os.environ.get("OTEL_TRACES_SAMPLER")
        self._unencoded: list[QueuedSpans] = []
        self._processor = BatchSpanProcessor(ReportingExporter(exporter))

    def samples_trace(self, trace_id: int, parent: TraceContext | None) -> bool:
        """Whether the sampler wants this trace; by default those that the client wants, and all without one."""
        if self._samples_all:
            return parent is None or parent.sampled
        context = None if parent is None else set_span_in_context(NonRecordingSpan(_remote_context(parent)))
        return self._sampler.should_sample(context, trace_id, "").decision is Decision.RECORD_AND_SAMPLE

    def export_spans(self, ended: list[EncodeSpans]) -> None:
        """Queue the spans of a request; the oldest are dropped if the queue is full."""
        queued: Any = QueuedSpans(ended)
        self._processor.on_end(queued)
        self._unencoded.append(queued)
        if len(self._unencoded) >= ENCODED_TOGETHER:  # not by the queue's thread: the two would wait for each other
            unencoded, self._unencoded = self._unencoded, []
            for span in unencoded:
                span.encode()

    def close(self) -> None:
        """Send the last spans, within a few seconds at most: a collector that hangs does not keep the process."""
        closing = threading.Thread(target=self._processor.shutdown, name="parley-spans-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class TraceService:
    """OTLP's gRPC service, whose requests and responses are bytes here."""

    def __init__(self, channel: Any):
        self.Export = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")


class GrpcSpanExporter(GrpcExporter):
    """Exports our spans over gRPC."""

    resource: Mapping[str, AttributeValue]
    _batch = b""

    def export(self, spans: Any) -> SpanExportResult:
        """Export a batch of our spans."""
        self._batch = encode_batch([span.encode() for span in spans], self.resource)  # once, but it may be sent again
        return super().export(spans)

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]
        self._client = TraceService(self._channel)  # type: ignore[assignment]

    def _translate_data(self, data: Any) -> Any:
        return self._batch


class HttpSpanExporter(HttpExporter):
    """Exports our spans over HTTP."""

    resource: Mapping[str, AttributeValue]

    def export(self, spans: Any) -> SpanExportResult:
        """Export a batch of our spans."""
        is_taken = self._client.export(encode_batch([span.encode() for span in spans], self.resource)).success
        return SpanExportResult.SUCCESS if is_taken else SpanExportResult.FAILURE


class ReportingExporter(SpanExporter):
    """Exports by another exporter, and logs once that this fails, and once that it works again."""

    def __init__(self, exporter: SpanExporter):
        self._exporter = exporter
        self._lost_requests = 0

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Export a batch; called in the thread of the queue."""
        try:
            result = self._exporter.export(spans)
        except Exception:
            log.debug("Exporting spans failed.", exc_info=True)
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            if not self._lost_requests:
                log.warning("The OTLP collector does not take spans; they are dropped until it does.")
            self._lost_requests += len(spans)  # each item has the spans of a request
        elif self._lost_requests:
            log.info(
                "The OTLP collector takes spans again. Requests without spans there: about %d.", self._lost_requests
            )
            self._lost_requests = 0
        return result

    def shutdown(self) -> None:
        """End the other exporter."""
        self._exporter.shutdown()


def _resource_attributes(role: str) -> dict[str, AttributeValue]:
    """Return attributes that describe this server: parley's own, and those of the environment."""
    attributes = {SERVICE_VERSION: __version__, "parley.role": role}
    environment = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if "service.instance.id=" not in environment:
        attributes[SERVICE_INSTANCE_ID] = f"{platform.node()}:{os.getpid()}"
    if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in environment:
        attributes[SERVICE_NAME] = "parley"
    return {name: str(value) for name, value in Resource.create(attributes).attributes.items()}


def _remote_context(parent: TraceContext) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([parent.state.decode("latin-1")]) if parent.state else None
    return SpanContext(parent.trace_id, parent.span_id, True, flags, state)
