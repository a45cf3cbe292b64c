"""Any span can be encoded: no name or value of a client spoils the batch that it is in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.otlp_receivers import Collector

from parley.tracing.encode_spans import Attributes, encode_attributes, encode_batch, encode_span
from parley.tracing.trace_context import TraceContext

TEXTS = st.text(st.characters(codec=None))  # with lone surrogates
VALUES = st.one_of(TEXTS, st.integers(), st.floats(allow_nan=False), st.booleans(), st.lists(TEXTS).map(tuple))


@given(TEXTS, TEXTS, st.dictionaries(st.sampled_from("abc"), VALUES))
def test_any_value_survives_encoding(name: str, error: str, attributes: Attributes) -> None:
    span = encode_span(name, "server", TraceContext(1, 2), None, 3, 4, attributes, error)
    data = encode_batch([span], {"service.name": "s", "parley.role": "r"})
    collector = Collector()
    collector.take_spans(ExportTraceServiceRequest.FromString(data))
    (received,) = collector.spans
    assert (received.start, received.end, received.span_id) == (3, 4, "0000000000000002")
    assert received.status == (2 if error else 0) and received.attributes.keys() == attributes.keys()
    for key, value in attributes.items():
        if isinstance(value, bool | float):
            assert received.attributes[key] == value
        elif isinstance(value, int):
            assert int(received.attributes[key]) == value
        elif isinstance(value, str):
            assert received.attributes[key] == value.encode("utf-8", "backslashreplace").decode()


def test_attributes_that_are_encoded_already_join_the_others() -> None:
    """Texts of the same length differ, and lengths take one to three bytes."""
    texts: Attributes = {f"{letter}{size}": letter * size for letter in "ab" for size in (0, 33, 127, 128, 20_000)}
    common: Attributes = {"n": 1, "share": 1.0, "stream": True}
    context = TraceContext(1, 2)
    span = encode_span("GET /", "client", context, context, 3, 4, texts, encoded_attributes=encode_attributes(common))
    collector = Collector()
    collector.take_spans(
        ExportTraceServiceRequest.FromString(encode_batch([span], {"service.name": "s", "parley.role": "r"}))
    )
    (received,) = collector.spans
    assert received.attributes == texts | {"n": 1, "share": 1.0, "stream": True}
