"""Frames survive any cutting of the stream, and a broken stream is distinguished from one that ended."""

import asyncio
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley import wire
from parley.engine.messages import (
    Cancel,
    Divide,
    Filled,
    Free,
    FromEngine,
    Landed,
    Outputs,
    Release,
    Reserve,
    Reserved,
    Submit,
    ToEngine,
)
from parley.types import Output, Sampling, Score, Stats, Work

ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)
floats = st.floats(allow_nan=False, allow_infinity=False)
works = st.builds(
    Work,
    id=st.text(max_size=10),
    token_ids=ids,
    max_tokens=st.integers(0, 1000),
    sampling=st.builds(
        Sampling, temperature=floats, top_k=st.integers(0, 100), logit_bias=st.dictionaries(st.integers(0, 9), floats)
    ),
    seed=st.integers(0, 2**64 - 1),
    n=st.integers(1, 8),
    stop_ids=ids,
    salt=st.text(max_size=5),
)
scores = st.builds(Score, floats, st.integers(1, 10), ids, st.lists(floats, max_size=3))
outputs = st.builds(
    Output,
    id=st.text(max_size=10),
    index=st.integers(0, 7),
    token_ids=ids,
    scores=st.none() | st.lists(scores, max_size=3),
    finish=st.sampled_from([None, "stop", "length", "cancel", "error"]),
    prompt_scores=st.none() | st.lists(st.none() | scores, max_size=3),
)


def drain(data: bytes, kind: type) -> list:
    """Reads all messages of a stream that ends after ``data`` with blocking calls."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        decoder, got = msgspec.msgpack.Decoder(kind), []
        while (message := wire.receive(theirs, decoder)) is not None:
            got.append(message)
        return got


@given(st.lists(works, max_size=5))
def test_messages_to_the_engine_round_trip(batch):
    messages = [Submit(work) for work in batch] + [Cancel(work.id, 3) for work in batch]
    assert drain(b"".join(map(wire.frame, messages)), ToEngine) == messages


def test_handover_messages_round_trip():
    sent = [Reserve(3, "key", [1, 2], "salt", "adapter", "0f"), Landed("key", 2), Free("key"), Release("w"), Divide(30)]
    assert drain(b"".join(map(wire.frame, sent)), ToEngine) == sent
    back = [Reserved(3, 1, [7, 9], "", "0f"), Reserved(4, error="no"), Filled("w", [1, 2])]
    assert drain(b"".join(map(wire.frame, back)), FromEngine) == back


@given(st.lists(outputs, max_size=5), st.integers(1, 7))
def test_messages_from_the_engine_round_trip_in_pieces_of_any_size(batch, size):
    message = Outputs(batch, Stats(running=len(batch)))
    data = wire.frame(message) * 2

    async def read() -> list:
        reader = asyncio.StreamReader()
        for at in range(0, len(data), size):
            reader.feed_data(data[at : at + size])
        reader.feed_eof()
        decoder, got = msgspec.msgpack.Decoder(FromEngine), []
        while (part := await wire.read(reader, decoder)) is not None:
            got.append(part)
        return got

    assert asyncio.run(read()) == [message, message]


def test_end_of_stream_inside_a_frame_raises():
    data = wire.frame(Cancel("a"))
    for cut in range(1, len(data)):
        with pytest.raises(wire.BrokenFrame):
            drain(data[:cut], ToEngine)
    assert drain(b"", ToEngine) == []


def test_refuses_an_oversized_frame_before_allocating_it():
    with pytest.raises(wire.BrokenFrame, match="exceeds"):
        drain(b"\xff\xff\xff\xff", ToEngine)
