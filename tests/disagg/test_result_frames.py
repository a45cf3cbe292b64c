"""Frames of result streams: the reader finds the same frames however the bytes are cut."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.disagg.wire import result_frames
from parley.disagg.wire.result_frames import BadFrame, Frame, Reader

IDS = st.text("0123456789abcdefxyz_-", min_size=1, max_size=12)
JSON = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20).map(
    lambda text: b'{"t":"' + text.encode() + b'"}'
)
EVENT = JSON.map(lambda body: b"data: " + body + b"\n\n")
PLAIN = st.one_of(JSON, EVENT, JSON.map(lambda body: body + b"\0"), st.just(b":colons: and\nlines\r\n\n"))
ANY = st.one_of(PLAIN, st.binary(max_size=40))


def merged(found: list[Frame]) -> list[Frame]:
    """Merges consecutive data of a request, as the request's reader sees it, and drops heartbeats."""
    made: list[Frame] = []
    for frame in found:
        if frame.kind == "ka":
            continue
        if (
            frame.kind == "data"
            and frame.record is None
            and made
            and (made[-1].id, made[-1].kind) == (frame.id, "data")
        ):
            made[-1] = Frame(frame.id, "data", made[-1].payload + frame.payload, made[-1].record)
        else:
            made.append(frame)
    return made


def read(data: bytes, cuts: list[int]) -> tuple[list[Frame], Reader]:
    reader, found = Reader(), []
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    for begin, end in zip([0, *places], [*places, len(data)], strict=True):
        found += reader.feed(data[begin:end])
    return found + reader.flush(), reader


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[Frame]]:
    """Draws the bytes of a stream and the frames in it."""
    exact = draw(st.booleans())
    name = draw(st.text("0123456789abcdef", min_size=1, max_size=16))
    data, wanted = (result_frames.epoch(name), [Frame(b"", "epoch", name.encode())]) if exact else (b"", [])
    for _ in range(draw(st.integers(0, 8))):
        id = draw(IDS)
        match draw(st.sampled_from(["result", "last", "error", "retry", "ka", "record", "unknown", "close"])):
            case "result" | "last" as which:
                payload = draw(ANY if exact else PLAIN)
                last = which == "last"
                data += b"".join(result_frames.results(id, payload, last=last, exact=exact))
                if payload or last or exact:
                    wanted.append(Frame(id.encode(), "lastData" if last else "data", payload))
            case "error":
                data += result_frames.error(id, "It failed: why?\n")
                wanted.append(Frame(id.encode(), "error", b"It failed: why?\n"))
            case "retry":
                data += result_frames.retry(id, b'{"prompt":"1,2,3"}')
                wanted.append(Frame(id.encode(), "retry", b'{"prompt":"1,2,3"}'))
            case "record" if exact:
                behind, payload, last = draw(st.binary(max_size=30)), draw(ANY), draw(st.booleans())
                data += result_frames.head(id, 200, [("a", "b")]) + result_frames.record(id, behind)
                data += b"".join(result_frames.results(id, payload, last=last, exact=True))
                wanted.append(Frame(id.encode(), "head", b'{"status":200,"headers":[["a","b"]]}'))
                kind = "lastData" if last else "data"
                wanted.append(Frame(id.encode(), kind, payload, base64.b64encode(behind)))
            case "unknown":
                data += f"reqId:{id}\0news:of:another kind\0".encode()
            case "close":
                data += result_frames.CLOSE
                wanted.append(Frame(b"", "close", b"new connection is to established, close the old one."))
            case _:
                data += result_frames.HEARTBEAT
    return data, merged(wanted)


@given(streams(), st.lists(st.integers(0, 2000), max_size=12))
def test_result_stream_yields_the_same_frames_for_any_cuts(stream: tuple[bytes, list], cuts: list[int]) -> None:
    data, wanted = stream
    found, reader = read(data, cuts)
    assert merged(found) == wanted
    whole, other = read(data, [])
    assert found == whole and reader.number == other.number and reader.strange == other.strange


def test_reads_mindie_result_frames_cut_at_every_byte() -> None:
    data = (
        b'reqId:12345\0data:data: {"id":"x"}\n\n\0ka:heartbeat\0reqId:1\0data:{"text":["a:b"]}\0\0'
        b'\0\0reqId:1\0lastData:{"text":["c"]}\0\0reqId:2\0error:Pull kv failed reversibly.\0' + result_frames.CLOSE
    )
    wanted = [
        Frame(b"12345", "data", b'data: {"id":"x"}\n\n'),
        Frame(b"", "ka"),
        Frame(b"1", "data", b'{"text":["a:b"]}\0'),
        Frame(b"1", "lastData", b'{"text":["c"]}\0'),
        Frame(b"2", "error", b"Pull kv failed reversibly."),
        Frame(b"", "close", b"new connection is to established, close the old one."),
    ]
    for cut in range(len(data) + 1):
        assert read(data, [cut])[0] == wanted
    assert read(data, list(range(len(data))))[0] == wanted


def test_reader_yields_events_at_once_and_ambiguous_data_on_flush() -> None:
    reader = Reader()
    assert [frame.payload for frame in reader.feed(b"reqId:1\0data:data: x\n\n\0")] == [b"data: x\n\n"]
    assert reader.feed(b'reqId:1\0lastData:{"a":1}\0') == [] and reader.held
    assert reader.flush() == [Frame(b"1", "lastData", b'{"a":1}')] and not reader.held
    assert reader.feed(b"\0\0") == []
    exact = Reader()
    exact.feed(result_frames.epoch("aa"))
    assert exact.feed(b'reqId:1\0lastData:{"a":1}\0') == [Frame(b"1", "lastData", b'{"a":1}')] and not exact.held


def test_reader_and_writer_count_result_frames_alike() -> None:
    made = [
        result_frames.record("1", b"r"),
        *result_frames.results("1", b"x\0y", exact=True),
        result_frames.retry("1", b"{}"),
    ]
    reader = Reader()
    reader.feed(result_frames.epoch("aa") + b"".join(made) + result_frames.HEARTBEAT + result_frames.CLOSE)
    assert reader.number == len(made)


def test_record_is_yielded_together_with_its_data() -> None:
    reader, data = Reader(), result_frames.epoch("aa") + result_frames.record("1", b"r")
    assert [frame.kind for frame in reader.feed(data + b"reqId:1\0")] == ["epoch"] and reader.number == 0
    assert reader.feed(b"data:x\0") == [Frame(b"1", "data", b"x", b"cg==")] and reader.number == 2


def test_large_payloads_are_split_into_several_frames() -> None:
    payload = bytes(range(1, 256)) * (result_frames.MOST // 200)
    made = result_frames.results("1", payload, last=True)
    assert len(made) == 2 and max(map(len, made)) < result_frames.MOST + 100
    found, _ = read(b"".join(made), list(range(0, len(payload), 65536)))
    assert [frame.kind for frame in found] == ["data", "lastData"]
    assert b"".join(frame.payload for frame in found) == payload


def test_rejects_invalid_result_frames() -> None:
    reader = Reader(limit=1000)
    with pytest.raises(BadFrame):
        for _ in range(3):
            reader.feed(b"x" * 500)
    record = b"reqId:1\0record:cg==\0"
    for bad in (
        b"reqId:1\0data64:!!!\0",
        record + b"reqId:2\0data:x\0",
        record + b"reqId:1\0error:x\0",
        record + record + b"reqId:1\0data:x\0",
        record + b"reqId:1\0news:x\0",
    ):
        with pytest.raises(BadFrame):
            Reader().feed(bad)
    reader = Reader()
    assert reader.feed(b"data:x\0reqId:1\0reqId:2\0data:y\n\0nonsense\0") == [Frame(b"2", "data", b"y\n")]
    assert reader.strange == 3


def test_binary_payload_is_sent_as_base64() -> None:
    (frame,) = result_frames.results("7", b"\0\xff", last=True, exact=True)
    assert frame == b"reqId:7\0lastData64:" + base64.b64encode(b"\0\xff") + b"\0"
