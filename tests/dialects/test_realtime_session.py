"""The bounds of a Realtime session, message by message: audio, items and refused requests leave nothing behind."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from parley.dialects.openai.realtime import audio, conversation, session_settings
from parley.dialects.openai.realtime.audio import wave_file
from parley.dialects.openai.realtime.session import RealtimeSession
from parley.dialects.socket_session import SocketOpening, SocketRequest
from parley.dialects.vllm.realtime import VllmRealtimeSession
from parley.errors import Overloaded
from parley.serving.records.connection_records import ConnectionStore, RecordsOfConnection

TURN = bytes(range(250)) * 20  # 5000 bytes: over 0.1 s at 24 kHz
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
TRANSCRIPTION = {"audio": {"input": {"transcription": {"model": "tiny"}}}}


@pytest.fixture
def store():
    return ConnectionStore()


@pytest.fixture
def open_session(store):
    def open_kind(kind: str = "", session_class: Any = RealtimeSession) -> Any:
        return session_class(SocketOpening(RecordsOfConnection(store), {"model": "tiny", "intent": kind}))

    return open_kind


def send(session: Any, kind: str, /, **members: Any) -> Any:
    return session.read_message(json.dumps({"type": kind} | members).encode())


def append(session: Any, data: bytes) -> Any:
    return send(session, "input_audio_buffer.append", audio=base64.b64encode(data).decode())


def commit(session: Any) -> Any:
    assert append(session, TURN) == []
    return send(session, "input_audio_buffer.commit")


def decode(messages: Any) -> list[dict[str, Any]]:
    assert isinstance(messages, list), messages
    return list(map(json.loads, messages))


def kept_records(store: ConnectionStore) -> list[str]:
    return sorted(name.partition(" ")[0] for names in store._names.values() for name in names)


@pytest.mark.parametrize("session_class", [RealtimeSession, VllmRealtimeSession])
def test_small_pieces_of_audio_share_a_record(open_session, store, session_class):
    session = open_session(session_class=session_class)
    for start in range(0, len(TURN), 10):
        append(session, TURN[start : start + 10])
    assert kept_records(store) == ["audio"]
    for _ in range(2):
        append(session, bytes(audio.RECORD_BYTES))
    assert kept_records(store) == ["audio", "audio"]
    committed = session._buffer.commit_audio(24_000)
    assert committed.read_samples() == TURN + bytes(2 * audio.RECORD_BYTES)
    committed.drop_audio()
    assert kept_records(store) == []


def test_audio_that_was_dropped_in_part_is_not_read(open_session, store):
    session = open_session()
    append(session, TURN)
    name = session._buffer._names[0]
    session._buffer._records.delete_record(name)  # as a store without memory does
    append(session, TURN)
    with pytest.raises(Overloaded, match="no memory"):
        session._buffer.commit_audio(24_000).read_samples()


def test_refused_transcripts_name_their_item_and_leave_no_audio(open_session, store):
    session = open_session("transcription")
    send(session, "session.update", session=TRANSCRIPTION)
    request = commit(session)
    assert isinstance(request, SocketRequest)
    committed, added, _ = decode(session.acknowledge(request))
    failed = json.loads(session.refuse_request(request, Overloaded("Too many.")))
    assert committed["item_id"] == added["item"]["id"] == failed["item_id"]
    assert kept_records(store) == []
    session = open_session("", VllmRealtimeSession)
    send(session, "session.update", model="tiny")
    append(session, TURN)
    request = send(session, "input_audio_buffer.commit", final=True)
    assert kept_records(store) == ["audio"]
    session.refuse_request(request, Overloaded("Too many."))
    assert kept_records(store) == []


def test_a_full_conversation_refuses_audio_and_responses_before_they_begin(open_session, store, monkeypatch):
    monkeypatch.setattr(conversation, "MAX_ITEMS", 2)
    session = open_session()
    commit(session)
    commit(session)
    full = "A conversation has at most 2 items; delete one first."
    assert [event["error"]["message"] for event in decode(commit(session))] == [full]
    assert [event["error"]["message"] for event in decode(send(session, "response.create"))] == [full]
    (item_id, _) = session._conversation._order
    send(session, "conversation.item.delete", item_id=item_id)
    committed = decode(send(session, "input_audio_buffer.commit"))[0]  # the audio is still there
    assert committed["type"] == "input_audio_buffer.committed"
    assert isinstance(send(session, "response.create", response={"conversation": "none"}), SocketRequest)


def test_output_is_kept_whatever_items_the_client_adds_meanwhile(open_session, monkeypatch):
    monkeypatch.setattr(conversation, "MAX_ITEMS", 2)
    session = open_session()
    send(session, "conversation.item.create", item=ITEM | {"id": "first"})
    answer = session.start_request(send(session, "response.create"))
    send(session, "conversation.item.create", item=ITEM | {"id": "msg_1"})
    for item_id, previous_id in (("msg_1", "first"), ("msg_2", "msg_1")):
        output = {"id": item_id, "type": "message", "status": "completed", "role": "assistant",
                  "content": [{"type": "output_text", "text": "Yes"}]}  # fmt: skip
        members = {"output_index": 0, "item": output}
        lines = [json.dumps({"type": f"response.output_item.{name}"} | members) for name in ("added", "done")]
        data = "".join(f"event: x\ndata: {line}\n\n" for line in lines).encode()
        events = decode(answer.read_part(200, data, last=False))
        assert [event["previous_item_id"] for event in events[2:]] == [previous_id, previous_id]
        (found,) = decode(send(session, "conversation.item.retrieve", item_id=item_id))
        assert found["item"]["content"][0]["text"] == "Yes"


def test_the_size_of_a_conversation_counts_for_its_responses(open_session):
    session = open_session()
    commit(session)
    send(session, "conversation.item.create", item=ITEM | {"id": "long", "content": [
        {"type": "input_text", "text": "x" * 7000}]})  # fmt: skip
    request = send(session, "response.create")
    assert session.count_earlier_bytes(request) > len(TURN) + 7000
    send(session, "conversation.item.delete", item_id="long")
    assert len(TURN) < session.count_earlier_bytes(request) < len(TURN) + 1000


def test_committed_audio_keeps_its_rate(open_session):
    session = open_session()
    commit(session)
    send(session, "session.update", session={"audio": {"input": {"format": {"type": "audio/pcm", "rate": 8000}}}})
    answer = session.start_request(send(session, "response.create"))
    (part,) = json.loads(answer.body)["input"][0]["content"]
    assert base64.b64decode(part["input_audio"]["data"]) == wave_file(TURN, 24_000)


def test_a_response_refers_to_items_once_and_to_audio_as_well(open_session):
    session = open_session()
    item_id = decode(commit(session))[0]["item_id"]
    send(session, "conversation.item.create", item=ITEM | {"id": "text"})
    references = [{"type": "item_reference", "id": name} for name in ("text", item_id)]
    request = send(session, "response.create", response={"input": references})
    answer = session.start_request(request)
    assert request.items == []  # nothing large is kept while the response runs
    text, sound = (item["content"][0] for item in json.loads(answer.body)["input"])
    assert text["text"] == "Hello"
    assert base64.b64decode(sound["input_audio"]["data"]) == wave_file(TURN, 24_000)
    send(session, "response.cancel")
    (error,) = decode(send(session, "response.create", response={"input": [*references, references[0]]}))
    assert error["error"]["param"] == "response.input[2].id"


@pytest.mark.parametrize("kind", ["session.update", "response.create"])
def test_members_that_a_session_keeps_are_bounded(open_session, kind):
    session, name = open_session(), kind.partition(".")[0]
    for size, has_error in (
        (session_settings.MAX_MEMBERS_BYTES - 2, False),
        (session_settings.MAX_MEMBERS_BYTES, True),
    ):
        result = send(session, kind, **{name: {"instructions": "x" * size}})
        assert (isinstance(result, list) and b'"error"' in result[0]) is has_error
        send(session, "response.cancel")
    assert json.loads(result[0])["error"]["param"] == f"{name}.instructions"


def test_vllm_names_the_bound_of_audio(open_session, monkeypatch):
    monkeypatch.setattr(audio, "MAX_AUDIO_BYTES", 100)
    session = open_session(session_class=VllmRealtimeSession)
    (error,) = decode(append(session, bytes(101)))
    assert error == {"type": "error", "code": "invalid_audio",
                     "error": "The audio buffer holds at most 100 bytes; commit it first."}  # fmt: skip
    (error,) = decode(send(session, "input_audio_buffer.append", audio="*"))
    assert error["error"] == "Invalid audio data"
