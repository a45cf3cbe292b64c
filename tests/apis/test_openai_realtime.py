"""The Realtime API over a WebSocket: transcripts of committed audio, responses in text, refusals and limits."""

from __future__ import annotations

import base64
import gc
import json
import threading
from typing import Any

import msgspec
import openai
import pytest
from support.sound_forms import clip_form, tone_clip
from support.websocket_client import WebSocketClient, open_websocket, refused_handshake
from test_transcriptions import post_form, speech_settings

from parley.dialects.openai.realtime import audio, session
from parley.dialects.openai.realtime.audio import wave_file
from parley.dialects.openai.realtime.events import read_fault
from parley.dialects.openai.realtime.response import RealtimeAnswer
from parley.errors import Overloaded
from parley.serving.records import connection_records
from parley.web.offload import OFFLOAD_SIZE

CLIP = tone_clip(1.0)
SAMPLES = CLIP[44:]  # of the WAV file; 16 kHz
END_TOKENS = (0, 1, 2)  # of the scripted model
HELLO_ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
AUDIO_INPUT = {"format": {"type": "audio/pcm", "rate": 16_000}, "transcription": {"model": "tiny"}}
MASKED = ("id", "event_id", "item_id", "previous_item_id", "response_id", "expires_at")


def repeat_prompt(request, choice):
    """Answer with the whole prompt, all turns of it."""
    return [token_id for token_id in request.token_ids if token_id not in END_TOKENS][: request.max_tokens]


def masked(value: Any) -> Any:
    """Return a value with its ids, which are random, replaced by their prefixes."""
    if isinstance(value, dict):
        return {
            name: member.partition("_")[0] if name in MASKED and isinstance(member, str) else
            0 if name == "expires_at" else masked(member)
            for name, member in value.items()
        }  # fmt: skip
    return list(map(masked, value)) if isinstance(value, list) else value


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def append(client: WebSocketClient, data: bytes, size: int = 9000) -> None:
    for start in range(0, len(data), size):
        await client.send({"type": "input_audio_buffer.append", "audio": encoded(data[start : start + size])})


async def events_until(client: WebSocketClient, *kinds: str) -> list[dict[str, Any]]:
    events = [await client.event()]
    while events[-1]["type"] not in kinds:
        events.append(await client.event())
    return events


async def open_session(server: Any, path: str = "/v1/realtime?model=tiny", **headers: str) -> WebSocketClient:
    client = await open_websocket(server, path, **headers)
    assert (await client.event())["type"] == "session.created"
    return client


@pytest.fixture
async def speech(serve):
    return await serve(settings=msgspec.structs.replace(speech_settings(), max_model_len=80))  # the model never ends


async def reference(server: Any, clip: bytes = CLIP) -> dict[str, Any]:
    """Return the transcript of a clip from the route for files."""
    return (await post_form(server, "/v1/audio/transcriptions", clip_form(clip, model="tiny"))).json()


def test_wave_files_are_those_of_the_standard_library():
    assert wave_file(SAMPLES, 16_000) == CLIP and wave_file(SAMPLES + b"\0", 16_000) == CLIP


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"No."}}', "No."),
        (b'{"error":"Memory limit exceeded"}', "Memory limit exceeded"),
        (b"[]", "[]"),
        (b"Bad gateway", "Bad gateway"),
        (b"", "The answer ended early."),
    ],
)
def test_refusals_of_any_form_become_errors(body, message):
    assert read_fault(body)["message"] == message


async def test_openai_client_gets_the_transcript_of_committed_audio(speech):
    whole = await reference(speech)
    client = openai.AsyncOpenAI(base_url=f"{speech.url}/v1", api_key="sk-none")
    async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        created = await connection.recv()
        assert (created.type, created.session.type) == ("session.created", "transcription")
        await connection.session.update(session={"type": "transcription", "audio": {"input": AUDIO_INPUT}})
        updated = await connection.recv()
        assert updated.session.audio.input.transcription.model == "tiny"
        for _ in range(2):  # a session has several turns
            for start in range(0, len(SAMPLES), 9000):
                await connection.input_audio_buffer.append(audio=encoded(SAMPLES[start : start + 9000]))
            await connection.input_audio_buffer.commit()
            kinds, text = [], ""
            async for event in connection:
                kinds.append(event.type)
                if event.type == "conversation.item.input_audio_transcription.delta":
                    text += event.delta
                if event.type == "conversation.item.input_audio_transcription.completed":
                    break
            assert kinds[:3] == ["input_audio_buffer.committed", "conversation.item.added", "conversation.item.done"]
            assert text == event.transcript == whole["text"]
            assert event.usage.total_tokens == whole["usage"]["total_tokens"]
    await speech.wait_until_idle()


async def test_transcription_events_have_golden_members(speech):
    whole = await reference(speech)
    client = await open_websocket(speech, "/openai/v1/realtime?intent=transcription")
    input_members = {"format": {"type": "audio/pcm", "rate": 24_000}, "transcription": None, "noise_reduction": None,
                     "turn_detection": None}  # fmt: skip
    shown = {"type": "transcription", "object": "realtime.transcription_session", "id": "sess",
             "audio": {"input": input_members}, "include": None, "expires_at": 0}  # fmt: skip
    assert masked(await client.event()) == {"type": "session.created", "event_id": "event", "session": shown}
    included = "item.input_audio_transcription.logprobs"
    update = {"type": "transcription", "audio": {"input": AUDIO_INPUT}, "include": [included]}
    await client.send({"type": "session.update", "session": update})
    input_members |= AUDIO_INPUT | {"transcription": {"model": "tiny", "language": None, "prompt": ""}}
    updated = {"type": "session.updated", "event_id": "event", "session": shown | {"include": [included]}}
    assert masked(await client.event()) == updated
    await append(client, SAMPLES)
    await client.send({"type": "input_audio_buffer.commit"})
    events = await events_until(client, "conversation.item.input_audio_transcription.completed")
    item = {"id": "item", "object": "realtime.item", "type": "message", "status": "completed", "role": "user",
            "content": [{"type": "input_audio", "transcript": None}]}  # fmt: skip
    place = {"event_id": "event", "item_id": "item"}
    assert masked(events[:3]) == [
        {"type": "input_audio_buffer.committed", "event_id": "event", "previous_item_id": None, "item_id": "item"},
        {"type": "conversation.item.added", "event_id": "event", "previous_item_id": None, "item": item},
        {"type": "conversation.item.done", "event_id": "event", "previous_item_id": None, "item": item},
    ]
    *deltas, completed = masked(events[3:])
    scores = [score for delta in deltas for score in delta["logprobs"]]
    assert {delta["type"] for delta in deltas} == {"conversation.item.input_audio_transcription.delta"}
    assert completed == {
        "type": "conversation.item.input_audio_transcription.completed", **place, "content_index": 0,
        "transcript": whole["text"], "usage": whole["usage"], "logprobs": scores,
    }  # fmt: skip


async def test_vllm_client_gets_the_transcript_of_its_audio(speech):
    form = clip_form(CLIP, model="tiny")
    whole = (await post_form(speech, "/vllm/v1/audio/transcriptions", form)).json()["text"]
    client = await open_websocket(speech, "/vllm/v1/realtime")
    created = await client.event()
    assert created["type"] == "session.created" and created["id"].startswith("sess-") and created["created"] > 1e9
    await client.send({"type": "input_audio_buffer.commit"})
    refused = {"type": "error", "error": "Model not validated. Make sure to validate the model by sending a "
               "session.update event.", "code": "model_not_validated"}  # fmt: skip
    assert await client.event() == refused
    await client.send({"type": "session.update", "model": "tiny"})
    await client.send({"type": "input_audio_buffer.commit"})
    await append(client, SAMPLES)
    await client.send({"type": "input_audio_buffer.commit", "final": True})
    *deltas, done = await events_until(client, "transcription.done")
    assert {delta["type"] for delta in deltas} == {"transcription.delta"}
    assert "".join(delta["delta"] for delta in deltas) == done["text"] == whole
    assert sorted(done["usage"]) == ["completion_tokens", "prompt_tokens", "total_tokens"]
    for message, code in (
        (b"{", "invalid_json"),
        ({"type": "session.update"}, "invalid_event"),
        ({"type": "none"}, "unknown_event"),
        ({"type": "input_audio_buffer.append", "audio": "*"}, "invalid_audio"),
    ):
        await client.send(message)
        error = await client.event()
        assert (error["type"], error["code"]) == ("error", code) and error["error"]
    await client.send({"type": "session.update", "model": "other"})
    await append(client, SAMPLES)
    await client.send({"type": "input_audio_buffer.commit", "final": True})
    error = await client.event()
    assert error["code"] == "model_not_found" and error["error"].startswith("The model `other` does not exist.")


async def test_openai_client_gets_responses_of_a_conversation(serve):
    server = await serve(repeat_prompt)
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="sk-none")
    async with client.realtime.connect(model="tiny") as connection:
        await connection.session.update(session={"type": "realtime", "instructions": "Be brief."})
        await connection.conversation.item.create(item=HELLO_ITEM)
        await connection.response.create(response={"max_output_tokens": 100, "metadata": {"topic": "a"}})
        kinds, text = [], ""
        async for event in connection:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
            if event.type == "response.done":
                break
        first = event.response
        assert (first.status, first.metadata, first.usage.total_tokens > 0) == ("completed", {"topic": "a"}, True)
        assert first.output[0].content[0].text == text and "Be brief." in text and "Hello" in text
        without_deltas = [kind for kind in kinds if not kind.endswith(".delta")]
        assert without_deltas == [
            "session.created", "session.updated", "conversation.item.added", "conversation.item.done",
            "response.created", "response.output_item.added", "response.content_part.added",
            "response.output_text.done", "response.content_part.done", "response.output_item.done",
            "conversation.item.added", "conversation.item.done", "response.done",
        ]  # fmt: skip
        await connection.response.create(response={"max_output_tokens": 400})
        async for event in connection:
            if event.type == "response.done":
                break
        assert event.response.output[0].content[0].text.count("Hello") == 2  # the conversation has the first answer
        own = {"conversation": "none", "input": [HELLO_ITEM], "instructions": "", "max_output_tokens": 5}
        await connection.response.create(response=own)
        async for event in connection:
            assert event.type != "conversation.item.added"
            if event.type == "response.done":
                break
        assert (event.response.status, event.response.status_details.reason) == ("incomplete", "max_output_tokens")
    await server.wait_until_idle()


async def test_items_are_kept_found_and_deleted(serve):
    server = await serve(repeat_prompt)
    client = await open_session(server)
    for name, previous in (("one", None), ("three", None), ("two", "one"), ("zero", "root")):
        item = HELLO_ITEM | {"id": name, "content": [{"type": "input_text", "text": f"<{name}>"}]}
        await client.send({"type": "conversation.item.create", "item": item, "previous_item_id": previous})
        added = (await events_until(client, "conversation.item.done"))[0]
        assert added["item"]["id"] == name
    assert added["previous_item_id"] is None
    await client.send({"type": "conversation.item.delete", "item_id": "three"})
    assert (await client.event())["item_id"] == "three"
    await client.send({"type": "conversation.item.retrieve", "item_id": "two"})
    assert (await client.event())["item"]["content"] == [{"type": "input_text", "text": "<two>"}]
    await client.send({"type": "response.create", "response": {"max_output_tokens": 300}})
    text = (await events_until(client, "response.done"))[-1]["response"]["output"][0]["content"][0]["text"]
    assert [name for name in ("zero", "one", "two", "three") if f"<{name}>" in text] == ["zero", "one", "two"]
    assert text.index("<zero>") < text.index("<one>") < text.index("<two>")


async def test_a_response_can_be_cancelled(serve):
    server = await serve(lambda request, index: [70] * request.max_tokens, tick=0.01)
    client = await open_session(server)
    await client.send({"type": "conversation.item.create", "item": HELLO_ITEM})
    await events_until(client, "conversation.item.done")
    await client.send({"type": "response.create"})
    await events_until(client, "response.output_text.delta")
    (running,) = (answer for answer in gc.get_objects() if isinstance(answer, RealtimeAnswer))
    assert running.body == b""  # it may be as large as a conversation
    del running
    await client.send({"type": "response.create", "event_id": "mine"})
    error = (await events_until(client, "error"))[-1]["error"]
    assert (error["code"], error["event_id"]) == ("conversation_already_has_active_response", "mine")
    await client.send({"type": "response.cancel"})
    done = (await events_until(client, "response.done"))[-1]["response"]
    assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "client_cancelled")
    await server.wait_until_idle()
    await client.send({"type": "response.cancel"})
    assert (await client.event())["error"]["code"] == "response_cancel_not_active"
    await client.send({"type": "response.create", "response": {"max_output_tokens": 3}})
    assert (await events_until(client, "response.done"))[-1]["response"]["status"] == "incomplete"


async def test_a_response_that_fails_after_its_cancellation_does_not_end_the_next(serve, monkeypatch):
    server = await serve()
    client = await open_session(server)
    start_request, begun, may_fail = session.RealtimeSession.start_request, threading.Event(), threading.Event()

    def start_or_fail(self, request):
        if "instructions" not in request.members:
            return start_request(self, request)
        begun.set()
        assert may_fail.wait(30)
        raise Overloaded("No memory.")

    monkeypatch.setattr(session.RealtimeSession, "start_request", start_or_fail)
    options = {"input": [HELLO_ITEM], "max_output_tokens": 3}
    await client.send({"type": "response.create", "response": options | {"instructions": "x" * OFFLOAD_SIZE}})
    await server.until(begun.is_set)
    await client.send({"type": "response.cancel"})
    assert (await client.event())["response"]["status"] == "cancelled"
    await client.send({"type": "response.create", "response": options})
    await client.send({"type": "response.cancel", "response_id": "none"})
    assert (await client.event())["error"]["code"] == "response_cancel_not_active"  # the next is read by now
    may_fail.set()
    done = (await events_until(client, "response.done", "error"))[-1]
    assert done["type"] == "response.done" and done["response"]["status"] == "incomplete"


async def test_a_coordinator_answers_a_page_with_its_key(live_cluster):
    keys = ("sk-one-key-0123456789",)
    cluster = await live_cluster("prefill", "decode", reply=repeat_prompt, api_keys=keys, cluster_secret="s" * 20)
    assert (await refused_handshake(cluster.front, "/v1/realtime")).status == 401
    protocols = f"realtime, openai-insecure-api-key.{keys[0]}"
    client = await open_session(cluster.front, sec_websocket_protocol=protocols)
    await client.send({"type": "conversation.item.create", "item": HELLO_ITEM})
    await events_until(client, "conversation.item.done")
    await client.send({"type": "response.create", "response": {"max_output_tokens": 100}})
    done = (await events_until(client, "response.done", "error"))[-1]
    assert "Hello" in done["response"]["output"][0]["content"][0]["text"]
    client.connection.close()
    await cluster.wait_until_idle()


WRONG_EVENTS: list[tuple[Any, str | None, str]] = [
    (b"{", None, "could not be parsed"),
    ({}, "type", "type"),
    ({"type": "transcription_session.update"}, "type", "session.update"),
    ({"type": "session.update"}, "session", "session"),
    ({"type": "session.update", "session": {"type": "other"}}, "session.type", "realtime"),
    ({"type": "session.update", "session": {"output_modalities": ["audio"]}}, "session.output_modalities", "['text']"),
    ({"type": "session.update", "session": {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}},
     "session.audio.input.turn_detection", "null"),
    ({"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}},
     "session.audio.input.format.type", "audio/pcm"),
    ({"type": "session.update", "session": {"audio": {"input": {"format": {"rate": 1}}}}},
     "session.audio.input.format.rate", "8000"),
    ({"type": "session.update", "session": {"audio": {"input": {"noise_reduction": {"type": "near_field"}}}}},
     "session.audio.input.noise_reduction", "Noise reduction"),
    ({"type": "session.update", "session": {"include": ["none"]}}, "session.include", "logprobs"),
    ({"type": "session.update", "session": {"max_output_tokens": "many"}}, "session.max_output_tokens", "integer"),
    ({"type": "input_audio_buffer.append"}, "audio", "audio"),
    ({"type": "input_audio_buffer.append", "audio": "*"}, "audio", "base64"),
    ({"type": "input_audio_buffer.append", "audio": ""}, "audio", "empty"),
    ({"type": "input_audio_buffer.commit"}, None, "buffer only has 0.00ms of audio"),
    ({"type": "conversation.item.create"}, "item", "item"),
    ({"type": "conversation.item.create", "item": {"type": "mcp_call"}}, "item.type", "mcp_call"),
    ({"type": "conversation.item.create", "item": HELLO_ITEM | {"role": "tool"}}, "item.role", "tool"),
    ({"type": "conversation.item.create", "item": HELLO_ITEM | {"content": []}}, "item.content", "empty"),
    ({"type": "conversation.item.create", "item": HELLO_ITEM | {"content": [{"type": "video"}]}},
     "item.content[0].type", "video"),
    ({"type": "conversation.item.create", "item": HELLO_ITEM, "previous_item_id": "none"}, "previous_item_id", "none"),
    ({"type": "conversation.item.create",
      "item": HELLO_ITEM | {"content": [{"type": "input_audio", "audio": "*"}]}}, "item.content[0].audio", "base64"),
    ({"type": "conversation.item.retrieve", "item_id": "none"}, "item_id", "none"),
    ({"type": "conversation.item.delete"}, "item_id", "item_id"),
    ({"type": "response.create", "response": {"output_modalities": ["audio"]}}, "response.output_modalities", "text"),
    ({"type": "response.create", "response": {"input": [{"type": "item_reference", "id": "none"}]}}, "item_id", "none"),
    ({"type": "response.create", "response": {"input": [HELLO_ITEM], "tool_choice": 5}}, "tool_choice", "tool_choice"),
]  # fmt: skip


async def test_wrong_events_are_refused_by_name(serve):
    server = await serve()
    client = await open_session(server)
    for event, field, part in WRONG_EVENTS:
        await client.send(event if isinstance(event, bytes) else {"event_id": "mine"} | event)
        answer = await client.event()
        assert answer["type"] == "error", (event, answer)
        error = answer["error"]
        assert (error["param"], error["type"]) == (field, "invalid_request_error") and part in error["message"], error
        assert error["event_id"] == (None if isinstance(event, bytes) else "mine")
    await server.wait_until_idle()


async def test_text_may_have_any_characters(serve):
    server = await serve(repeat_prompt)
    client = await open_session(server)
    item = b'{"type":"message","role":"user","content":[{"type":"input_text","text":"\\ud800<\\u0000>\xc3\xa4"}]}'
    await client.send(b'{"type":"conversation.item.create","item":%b}' % item)
    assert (await client.event())["type"] in ("conversation.item.added", "error")
    await client.send({"type": "response.create", "response": {"max_output_tokens": 3, "input": [HELLO_ITEM]}})
    assert (await events_until(client, "response.done"))[-1]["response"]["status"] == "incomplete"


async def test_a_model_that_only_writes_has_no_transcripts(serve):
    server = await serve()
    client = await open_session(server, "/v1/realtime?intent=transcription")
    await append(client, SAMPLES)
    await client.send({"type": "input_audio_buffer.commit"})
    assert "transcription" in (await client.event())["error"]["param"]
    await client.send({"type": "session.update", "session": {"audio": {"input": AUDIO_INPUT}}})
    await client.event()
    await client.send({"type": "input_audio_buffer.commit"})
    failed = (await events_until(client, "conversation.item.input_audio_transcription.failed"))[-1]
    assert "does not support Transcriptions API" in failed["error"]["message"]
    await client.send({"type": "response.create"})
    assert (await client.event())["error"]["message"] == "A transcription session has no responses."


async def test_audio_is_bounded_and_its_loss_is_reported(serve, monkeypatch):
    server = await serve()
    client = await open_session(server, "/v1/realtime?intent=transcription")
    await client.send({"type": "session.update", "session": {"audio": {"input": AUDIO_INPUT}}})
    await client.event()
    monkeypatch.setattr(audio, "MAX_AUDIO_BYTES", 10_000)
    await append(client, bytes(12_000), size=6000)
    assert "at most 10000 bytes" in (await client.event())["error"]["message"]
    await client.send({"type": "input_audio_buffer.clear"})
    assert (await client.event())["type"] == "input_audio_buffer.cleared"
    store = server.service.connection_records
    assert store._total_size == 0
    monkeypatch.setattr(store, "size", 7000)
    await append(client, bytes(9000), size=4500)  # the first piece has to go
    await client.send({"type": "input_audio_buffer.commit"})
    failed = (await events_until(client, "conversation.item.input_audio_transcription.failed"))[-1]
    assert "no memory" in failed["error"]["message"]


async def test_sessions_need_a_key_and_are_counted(serve, monkeypatch):
    server = await serve(repeat_prompt, api_keys=("one", "two"))
    assert (await refused_handshake(server, "/v1/realtime")).status == 401
    monkeypatch.setattr(session.RealtimeSession, "max_per_client", 1)
    key = "realtime, openai-insecure-api-key.one, openai-beta.realtime-v1"
    client = await open_session(server, sec_websocket_protocol=key)
    assert client.headers["sec-websocket-protocol"] == "realtime"
    await client.send({"type": "response.create", "response": {"input": [HELLO_ITEM], "max_output_tokens": 2}})
    assert (await events_until(client, "response.done", "error"))[-1]["type"] == "response.done"
    refused = await refused_handshake(server, "/v1/realtime", authorization="Bearer one")
    assert refused.status == 429 and "1 sessions" in refused.error["message"]
    await open_session(server, authorization="Bearer two")
    client.connection.close()
    await server.until(lambda: len(server.service.connection_records._open_counts) == 1)
    await open_session(server, authorization="Bearer one")


async def test_silent_sessions_end(serve, monkeypatch):
    monkeypatch.setattr(session.RealtimeSession, "max_idle", 0.05)
    server = await serve()
    client = await open_session(server)
    assert await client.closed() == (1008, "No message came for 0.05 seconds.")


async def test_records_end_with_their_connection(serve):
    server = await serve()
    store = server.service.connection_records
    assert isinstance(store, connection_records.ConnectionStore)
    client = await open_session(server)
    await append(client, SAMPLES)
    await client.send({"type": "conversation.item.create", "item": HELLO_ITEM})
    await events_until(client, "conversation.item.done")
    assert store._total_size > len(SAMPLES)
    client.connection.close()
    await server.until(lambda: store._total_size == 0)
    assert json.dumps(store._names) == "{}"


async def test_routes_of_other_transports_name_the_websocket(serve):
    server = await serve()
    for path, subject in (
        ("/v1/realtime/client_secrets", "Client secrets"),
        ("/openai/v1/realtime/client_secrets", "Client secrets"),
        ("/v1/realtime/transcription_sessions", "Client secrets"),
        ("/v1/realtime/calls", "Calls over WebRTC and SIP"),
        ("/v1/realtime/calls/rtc_1/accept", "Calls over WebRTC and SIP"),
    ):
        refused = await server.post(path, {"session": {"type": "realtime"}})
        sentence = f"{subject} are not available on this server: open a WebSocket at /v1/realtime"
        assert refused.status == 400 and refused.error["message"].startswith(sentence), path
        assert refused.error["type"] == "invalid_request_error" and refused.error["param"] is None
    api = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0)
    async with api:
        with pytest.raises(openai.BadRequestError, match="WebSocket at /v1/realtime"):
            await api.realtime.calls.create(sdp="v=0")
