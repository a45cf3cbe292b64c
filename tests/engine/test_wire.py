"""Frames survive any cutting of the stream, and a broken stream is distinguished from one that ended."""

import asyncio
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley import wire
from parley.engine.messages import (
    CancelRequest,
    FreeReservation,
    FromEngine,
    PagesComputed,
    PagesReceived,
    ReleaseLease,
    ReservePages,
    ReserveResponse,
    SetPrefillShare,
    StepOutputs,
    SubmitRequest,
    ToEngine,
)
from parley.types import (
    EmbeddingRun,
    EngineOutput,
    EngineRequest,
    EngineSettings,
    EngineStats,
    KVPrefix,
    MediaItem,
    ParleySettings,
    SamplingOptions,
    TokenScore,
)

ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)
floats = st.floats(allow_nan=False, allow_infinity=False)
requests = st.builds(
    EngineRequest,
    id=st.text(max_size=10),
    token_ids=ids,
    max_tokens=st.integers(0, 1000),
    sampling=st.builds(
        SamplingOptions,
        temperature=floats,
        top_k=st.integers(0, 100),
        logit_bias=st.dictionaries(st.integers(0, 9), floats),
    ),
    seed=st.integers(0, 2**64 - 1),
    n=st.integers(1, 8),
    stop_ids=ids,
    cache_salt=st.text(max_size=5),
)
scores = st.builds(TokenScore, floats, st.integers(1, 10), ids, st.lists(floats, max_size=3))
outputs = st.builds(
    EngineOutput,
    id=st.text(max_size=10),
    index=st.integers(0, 7),
    token_ids=ids,
    scores=st.none() | st.lists(scores, max_size=3),
    finish_reason=st.sampled_from([None, "stop", "length", "cancel", "error"]),
    prompt_scores=st.none() | st.lists(st.none() | scores, max_size=3),
)


def receive_all(data: bytes, kind: type) -> list:
    """Reads all messages of a stream that ends after ``data`` with blocking calls."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        decoder, messages = msgspec.msgpack.Decoder(kind), []
        while (message := wire.receive_frame(theirs, decoder)) is not None:
            messages.append(message)
        return messages


@given(st.lists(requests, max_size=5))
def test_messages_to_the_engine_round_trip(batch):
    messages = [SubmitRequest(request) for request in batch] + [CancelRequest(request.id, 3) for request in batch]
    assert receive_all(b"".join(map(wire.encode_frame, messages)), ToEngine) == messages


def test_handover_messages_round_trip():
    sent = [
        ReservePages(
            3,
            "key",
            KVPrefix([1, 2], "salt", "adapter", "0f", [MediaItem("image", b"0f", 1, 1, [EmbeddingRun(0, 1)])]),
        ),
        PagesReceived("key", 2),
        FreeReservation("key"),
        ReleaseLease("w"),
        SetPrefillShare(30),
    ]
    assert receive_all(b"".join(map(wire.encode_frame, sent)), ToEngine) == sent
    back = [ReserveResponse(3, 1, [7, 9], "", "0f"), ReserveResponse(4, error="no"), PagesComputed("w", [1, 2])]
    assert receive_all(b"".join(map(wire.encode_frame, back)), FromEngine) == back


@given(st.lists(outputs, max_size=5), st.integers(1, 7))
def test_messages_from_the_engine_round_trip_in_pieces_of_any_size(batch, size):
    message = StepOutputs(batch, EngineStats(running=len(batch)))
    data = wire.encode_frame(message) * 2

    async def read_messages() -> list:
        reader = asyncio.StreamReader()
        for at in range(0, len(data), size):
            reader.feed_data(data[at : at + size])
        reader.feed_eof()
        decoder, messages = msgspec.msgpack.Decoder(FromEngine), []
        while (part := await wire.read_frame(reader, decoder)) is not None:
            messages.append(part)
        return messages

    assert asyncio.run(read_messages()) == [message, message]


def test_end_of_stream_inside_a_frame_raises():
    data = wire.encode_frame(CancelRequest("a"))
    for cut in range(1, len(data)):
        with pytest.raises(wire.BrokenFrame):
            receive_all(data[:cut], ToEngine)
    assert receive_all(b"", ToEngine) == []


def test_refuses_an_oversized_frame_before_allocating_it():
    with pytest.raises(wire.BrokenFrame, match="exceeds"):
        receive_all(b"\xff\xff\xff\xff", ToEngine)


def test_settings_can_be_read_by_an_engine_that_knows_the_common_ones_only():
    settings = ParleySettings(model="m", max_batch=3, adapters={"a": "f"}, speculate="draft=d", quantization="int8")
    encoded = msgspec.msgpack.encode(settings)
    assert msgspec.msgpack.decode(encoded, type=ParleySettings) == settings
    common = msgspec.msgpack.decode(encoded, type=EngineSettings)
    assert (common.model, common.max_batch, common.adapters) == ("m", 3, {"a": "f"})
    assert common.weight_folders == ("m",) and settings.weight_folders == ("m", "d")
