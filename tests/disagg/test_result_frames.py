"""Frames of result streams: the reader finds the same frames however the bytes are cut."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.disagg.wire import result_frames
from parley.disagg.wire.result_frames import BadFrame, FrameReader, ResultFrame

IDS = st.text("0123456789abcdefxyz_-", min_size=1, max_size=12)
# A blank line would end an event; JSON escapes it.
JSON = st.text(max_size=20).map(
    lambda text: json.dumps({"t": text}, ensure_ascii=False).encode("utf-8", "surrogatepass")
)
EVENT = JSON.map(lambda body: b"data: " + body + b"\n\n")
MINDIE_PAYLOAD = st.one_of(JSON, EVENT, JSON.map(lambda body: body + b"\0"), st.just(b":colons: and\nlines\r\n\n"))
ANY_PAYLOAD = st.one_of(MINDIE_PAYLOAD, st.binary(max_size=40))


def merge_data(received: list[ResultFrame]) -> list[ResultFrame]:
    """Merges consecutive data of a request, as the request's reader sees it, and drops heartbeats."""
    merged_frames: list[ResultFrame] = []
    for frame in received:
        if frame.kind == "ka":
            continue
        if (
            frame.kind == "data"
            and frame.record is None
            and merged_frames
            and (merged_frames[-1].request_id, merged_frames[-1].kind) == (frame.request_id, "data")
        ):
            merged_frames[-1] = ResultFrame(
                frame.request_id, "data", merged_frames[-1].payload + frame.payload, merged_frames[-1].record
            )
        else:
            merged_frames.append(frame)
    return merged_frames


def read_in_pieces(data: bytes, cuts: list[int]) -> tuple[list[ResultFrame], FrameReader]:
    reader, received = FrameReader(), []
    positions = sorted({cut % (len(data) + 1) for cut in cuts})
    for begin, end in zip([0, *positions], [*positions, len(data)], strict=True):
        received += reader.feed_bytes(data[begin:end])
    return received + reader.flush_held(), reader


@st.composite
def result_streams(draw: st.DrawFn) -> tuple[bytes, list[ResultFrame]]:
    """Draws the bytes of a stream and the frames in it."""
    native = draw(st.booleans())
    name = draw(st.text("0123456789abcdef", min_size=1, max_size=16))
    data, expected = (
        (result_frames.encode_epoch_frame(name), [ResultFrame(b"", "epoch", name.encode())]) if native else (b"", [])
    )
    for _ in range(draw(st.integers(0, 8))):
        request_id = draw(IDS)
        match draw(st.sampled_from(["result", "last", "error", "retry", "ka", "record", "unknown", "close"])):
            case "result" | "last" as which:
                payload = draw(ANY_PAYLOAD if native else MINDIE_PAYLOAD)
                last = which == "last"
                data += b"".join(result_frames.encode_result(request_id, payload, last=last, native=native))
                if payload or last or native:
                    expected.append(ResultFrame(request_id.encode(), "lastData" if last else "data", payload))
            case "error":
                data += result_frames.encode_error_frame(request_id, "It failed: why?\n")
                expected.append(ResultFrame(request_id.encode(), "error", b"It failed: why?\n"))
            case "retry":
                data += result_frames.encode_retry_frame(request_id, b'{"prompt":"1,2,3"}')
                expected.append(ResultFrame(request_id.encode(), "retry", b'{"prompt":"1,2,3"}'))
            case "record" if native:
                record, payload, last = draw(st.binary(max_size=30)), draw(ANY_PAYLOAD), draw(st.booleans())
                data += result_frames.encode_head_frame(
                    request_id, 200, [("a", "b")]
                ) + result_frames.encode_record_frame(request_id, record)
                data += b"".join(result_frames.encode_result(request_id, payload, last=last, native=True))
                expected.append(ResultFrame(request_id.encode(), "head", b'{"status":200,"headers":[["a","b"]]}'))
                kind = "lastData" if last else "data"
                expected.append(ResultFrame(request_id.encode(), kind, payload, base64.b64encode(record)))
            case "unknown":
                data += f"reqId:{request_id}\0news:of:another kind\0".encode()
            case "close":
                data += result_frames.CLOSE_FRAME
                expected.append(ResultFrame(b"", "close", b"new connection is to established, close the old one."))
            case _:
                data += result_frames.HEARTBEAT_FRAME
    return data, merge_data(expected)


@pytest.mark.parametrize(
    ("events", "last"),
    [
        ([b"data:{a}\n\n", b"data:{b}\n\n"], False),
        ([b"data: {a}\n\n", b"data: {b}\n\ndata: [DONE]\n\n"], True),
        ([b"data: {a}\n\n", b"an error's text"], True),
        ([b'{"text":["a"]}\0', b'{"text":["b"]}\0'], False),
        ([b"\0", b"\0"], True),
        ([b'{"text":"a"}'], True),
    ],
)
def test_each_stream_event_becomes_one_frame(events: list[bytes], last: bool) -> None:
    frames = result_frames.encode_result("7", b"".join(events), last=last)
    words = [b"data"] * (len(events) - 1) + [b"lastData" if last else b"data"]
    assert frames == [b"reqId:7\0%b:%b\0" % pair for pair in zip(words, events, strict=True)]


@given(result_streams(), st.lists(st.integers(0, 2000), max_size=12))
def test_result_stream_yields_the_same_frames_for_any_cuts(stream: tuple[bytes, list], cuts: list[int]) -> None:
    data, expected = stream
    received, reader = read_in_pieces(data, cuts)
    assert merge_data(received) == expected
    whole, other = read_in_pieces(data, [])
    assert (
        received == whole
        and reader.frame_number == other.frame_number
        and reader.skipped_pieces == other.skipped_pieces
    )


def test_reads_mindie_result_frames_cut_at_every_byte() -> None:
    data = (
        b'reqId:12345\0data:data: {"id":"x"}\n\n\0ka:heartbeat\0reqId:1\0data:{"text":["a:b"]}\0\0'
        b'\0\0reqId:1\0lastData:{"text":["c"]}\0\0reqId:2\0error:Pull kv failed reversibly.\0'
        + result_frames.CLOSE_FRAME
    )
    expected = [
        ResultFrame(b"12345", "data", b'data: {"id":"x"}\n\n'),
        ResultFrame(b"", "ka"),
        ResultFrame(b"1", "data", b'{"text":["a:b"]}\0'),
        ResultFrame(b"1", "lastData", b'{"text":["c"]}\0'),
        ResultFrame(b"2", "error", b"Pull kv failed reversibly."),
        ResultFrame(b"", "close", b"new connection is to established, close the old one."),
    ]
    for cut in range(len(data) + 1):
        assert read_in_pieces(data, [cut])[0] == expected
    assert read_in_pieces(data, list(range(len(data))))[0] == expected


def test_reader_yields_events_at_once_and_ambiguous_data_on_flush() -> None:
    reader = FrameReader()
    assert [frame.payload for frame in reader.feed_bytes(b"reqId:1\0data:data: x\n\n\0")] == [b"data: x\n\n"]
    assert reader.feed_bytes(b'reqId:1\0lastData:{"a":1}\0') == [] and reader.holds_frame
    assert reader.flush_held() == [ResultFrame(b"1", "lastData", b'{"a":1}')] and not reader.holds_frame
    assert reader.feed_bytes(b"\0\0") == []
    native_reader = FrameReader()
    native_reader.feed_bytes(result_frames.encode_epoch_frame("aa"))
    assert (
        native_reader.feed_bytes(b'reqId:1\0lastData:{"a":1}\0') == [ResultFrame(b"1", "lastData", b'{"a":1}')]
        and not native_reader.holds_frame
    )


def test_reader_and_writer_count_the_same_result_frames() -> None:
    written_frames = [
        result_frames.encode_record_frame("1", b"r"),
        *result_frames.encode_result("1", b"x\0y", native=True),
        result_frames.encode_retry_frame("1", b"{}"),
    ]
    reader = FrameReader()
    reader.feed_bytes(
        result_frames.encode_epoch_frame("aa")
        + b"".join(written_frames)
        + result_frames.HEARTBEAT_FRAME
        + result_frames.CLOSE_FRAME
    )
    assert reader.frame_number == len(written_frames)


def test_record_is_yielded_together_with_its_data() -> None:
    reader, data = FrameReader(), result_frames.encode_epoch_frame("aa") + result_frames.encode_record_frame("1", b"r")
    assert [frame.kind for frame in reader.feed_bytes(data + b"reqId:1\0")] == ["epoch"] and reader.frame_number == 0
    assert reader.feed_bytes(b"data:x\0") == [ResultFrame(b"1", "data", b"x", b"cg==")] and reader.frame_number == 2


def test_large_payloads_are_split_into_several_frames() -> None:
    payload = bytes(range(1, 256)) * (result_frames.MAX_PAYLOAD_SIZE // 200)
    written_frames = result_frames.encode_result("1", payload, last=True)
    assert len(written_frames) == 2 and max(map(len, written_frames)) < result_frames.MAX_PAYLOAD_SIZE + 100
    received, _ = read_in_pieces(b"".join(written_frames), list(range(0, len(payload), 65536)))
    assert [frame.kind for frame in received] == ["data", "lastData"]
    assert b"".join(frame.payload for frame in received) == payload


def test_rejects_invalid_result_frames() -> None:
    reader = FrameReader(limit=1000)
    with pytest.raises(BadFrame):
        for _ in range(3):
            reader.feed_bytes(b"x" * 500)
    record = b"reqId:1\0record:cg==\0"
    for bad in (
        b"reqId:1\0data64:!!!\0",
        record + b"reqId:2\0data:x\0",
        record + b"reqId:1\0error:x\0",
        record + record + b"reqId:1\0data:x\0",
        record + b"reqId:1\0news:x\0",
    ):
        with pytest.raises(BadFrame):
            FrameReader().feed_bytes(bad)
    reader = FrameReader()
    assert reader.feed_bytes(b"data:x\0reqId:1\0reqId:2\0data:y\n\0nonsense\0") == [ResultFrame(b"2", "data", b"y\n")]
    assert reader.skipped_pieces == 3


def test_binary_payload_is_sent_as_base64() -> None:
    (frame,) = result_frames.encode_result("7", b"\0\xff", last=True, native=True)
    assert frame == b"reqId:7\0lastData64:" + base64.b64encode(b"\0\xff") + b"\0"
