"""The Responses API over a WebSocket: its events, continued responses, streams side by side, and refusals."""

import json
import threading

import msgspec
import openai
import pytest
from support.http_client import MODEL_INFO
from support.websocket_client import CLOSE, Frame, open_websocket, refused_handshake

from parley.dialects.openai.responses.socket_session import ResponsesSession
from parley.errors import EngineError
from parley.serving.records import connection_records

LONG = {"input": "Hello", "ignore_eos": True, "max_output_tokens": 4000}
END_TOKENS = (0, 1, 2)  # of the scripted model
CHANGING = ("id", "created_at", "completed_at", "item_id")


def without_ids(value):
    """Return a value without what differs from response to response."""
    if isinstance(value, dict):
        return {name: without_ids(member) for name, member in value.items() if name not in CHANGING}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def prompt_of(response) -> str:
    """Return the prompt that the scripted engine has repeated as its answer."""
    return response["output"][0]["content"][0]["text"]


def repeat_prompt(request, choice):
    """Answer with the whole prompt, all turns of it."""
    return [token_id for token_id in request.token_ids if token_id not in END_TOKENS][: request.max_tokens]


async def response_of(client, **members):
    return (await client.create(**members))[-1]["response"]


@pytest.mark.parametrize("path", ["/v1/responses", "/openai/v1/responses", "/openai/responses", "/ollama/v1/responses"])
async def test_messages_are_the_events_of_a_stream(serve, path):
    server = await serve()
    body = {"model": "tiny", "input": "Hello", "max_output_tokens": 16}
    answer = await server.post(path, body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    client = await open_websocket(server, path)
    messages = await client.create(**body)
    assert without_ids(messages) == without_ids([json.loads(line) for line in lines])
    assert [message["sequence_number"] for message in messages] == list(range(len(messages)))
    await client.send({"type": "response.create", **body, "stream": True, "stream_options": {}, "background": False})
    assert without_ids(await client.answer()) == without_ids(messages)


async def test_the_newest_response_is_continued_though_it_is_not_stored(serve):
    server = await serve(repeat_prompt)
    client = await open_websocket(server)
    first = await response_of(client, input="One", store=False)
    assert first["store"] is False and (await server.get(f"/v1/responses/{first['id']}")).status == 404
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Two"}]}]
    events = await client.create(input=items, store=False, previous_response_id=first["id"])
    states = [event["response"] for event in events if "response" in event]
    assert [state["previous_response_id"] for state in states] == [first["id"]] * 3
    second = states[-1]
    assert [word in prompt_of(second) for word in ("One", "Two")] == [True, True]
    third = await response_of(client, store=False, previous_response_id=second["id"])  # no input
    assert prompt_of(third).count("Two") > prompt_of(second).count("Two")
    (refusal,) = await client.create(input="Four", previous_response_id=first["id"])
    assert (refusal["status"], refusal["error"]["code"]) == (400, "previous_response_not_found")
    other = await open_websocket(server)
    (refusal,) = await other.create(input="Four", previous_response_id=third["id"])
    assert refusal["error"]["code"] == "previous_response_not_found"


async def test_a_short_message_that_continues_much_is_read_in_a_thread(serve, monkeypatch):
    threads = []
    start_request = ResponsesSession.start_request

    def note_thread(session, request):
        threads.append(threading.current_thread())
        return start_request(session, request)

    monkeypatch.setattr(ResponsesSession, "start_request", note_thread)
    server = await serve(info=msgspec.structs.replace(MODEL_INFO, max_model_len=100_000))
    client = await open_websocket(server)
    first = await response_of(client, input="a" * 20_000, store=False, max_output_tokens=16)
    await client.create(input="Two", store=False, previous_response_id=first["id"], max_output_tokens=16)
    await client.create(input="Three", store=False, max_output_tokens=16)
    assert [thread is threading.main_thread() for thread in threads] == [False, False, True]


async def test_calls_are_continued_by_their_outputs(serve):
    server = await serve(repeat_prompt)
    client = await open_websocket(server, "/openai/v1/responses")
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    first = await response_of(client, input=[call, {"type": "function_call_output", "call_id": "c1", "output": "42"}],
                              store=False)  # fmt: skip
    output = {"type": "function_call_output", "call_id": "c2", "output": "43"}
    (refusal,) = await client.create(input=[output], store=False, previous_response_id=first["id"])
    assert refusal["error"]["message"] == "No tool call found for function call output with call_id c2."


async def test_stored_and_kept_responses_continue_each_other(serve):
    server = await serve(repeat_prompt)
    client = await open_websocket(server)
    stored = await response_of(client, input="One")
    assert (await server.get(f"/v1/responses/{stored['id']}")).json == stored
    kept = await response_of(client, input="Two", store=False, previous_response_id=stored["id"])
    assert "One" in prompt_of(kept)
    # The items of a stored response are not known to the connection, so this one is not kept.
    (refusal,) = await client.create(input="Three", store=False, previous_response_id=kept["id"])
    assert refusal["error"]["code"] == "previous_response_not_found"
    kept = await response_of(client, input="Two", store=False)
    again = await response_of(client, input="Three", previous_response_id=kept["id"])
    assert "Two" in prompt_of(again) and again["previous_response_id"] == kept["id"]
    listed = (await server.get(f"/v1/responses/{again['id']}/input_items?order=asc")).json["data"]
    assert [item["role"] for item in listed] == ["user", "assistant", "user"]
    assert (await server.get(f"/v1/responses/{again['id']}")).json == again


async def test_items_that_only_the_connection_has_are_referred_to(serve):
    server = await serve(repeat_prompt)
    client = await open_websocket(server)
    question = {"type": "message", "id": "msg_mine", "role": "user", "content": "One"}
    first = await response_of(client, input=[question], store=False, generate=False)
    answer = await response_of(client, input="Two", store=False, stream_id="b")
    references = [{"type": "item_reference", "id": "msg_mine"}, {"id": answer["output"][0]["id"]}, "text"]
    (refusal,) = await client.create(input=references, store=False)
    assert refusal["error"]["param"] == "input[2]"
    again = await response_of(client, input=references[:2], store=False)
    assert "One" in prompt_of(again) and prompt_of(answer) in prompt_of(again)
    (refusal,) = await client.create(input=references[:1], store=False, previous_response_id=first["id"])
    assert refusal["error"]["code"] == "previous_response_not_found"
    other = await open_websocket(server)
    (refusal,) = await other.create(input=references[:1])
    assert (refusal["status"], refusal["error"]["param"]) == (404, "input")


async def test_a_failure_drops_the_response_that_it_continues(serve):
    server = await serve()
    client = await open_websocket(server)
    first = await response_of(client, input="One", store=False)
    wrong = [{"role": "user", "content": "fine"}, {"role": "nobody", "content": "wrong"}]
    (refusal,) = await client.create(input=wrong, store=False, previous_response_id=first["id"])
    assert refusal["error"]["param"] == "input[1].role" and "'input[1].role'" in refusal["error"]["message"]
    (refusal,) = await client.create(input="Two", store=False, previous_response_id=first["id"])
    assert refusal["error"]["code"] == "previous_response_not_found"
    first = await response_of(client, input="One", store=False)
    (refusal,) = await client.create(input=7, store=False, previous_response_id=first["id"])
    assert (refusal["error"]["param"], refusal["error"]["code"]) == ("input", "invalid_type")


async def test_a_response_without_output_prepares_the_next_one(serve):
    server = await serve(repeat_prompt)
    for path in ("/v1/responses", "/openai/v1/responses"):
        for store in (True, False):
            client = await open_websocket(server, path)
            events = await client.create(input="One", instructions="Hm", generate=False, store=store)
            assert [event["type"].removeprefix("response.") for event in events] == [
                "created", "in_progress", "completed",
            ]  # fmt: skip
            ready = events[-1]["response"]
            assert (ready["status"], ready["output"], ready["usage"]["output_tokens"]) == ("completed", [], 0)
            next_one = await response_of(client, input=[], store=False, previous_response_id=ready["id"])
            assert "One" in prompt_of(next_one) and "Hm" not in prompt_of(next_one)


async def test_a_trigger_without_its_summary_does_not_end_the_conversation(serve):
    server = await serve(repeat_prompt)
    client = await open_websocket(server)
    trigger = {"type": "compaction_trigger"}
    first = (await client.create(input=[{"role": "user", "content": "One"}, trigger], generate=False, store=False))[-1]
    assert first["response"]["output"] == []
    second = await response_of(client, input="Two", store=False, previous_response_id=first["response"]["id"])
    assert "One" in prompt_of(second) and "Two" in prompt_of(second)


async def test_requests_are_answered_in_order(serve):
    server = await serve(tick=0.001)
    client = await open_websocket(server)
    for number in range(3):
        await client.send({"type": "response.create", "input": "Hello", "metadata": {"n": str(number)}})
    answers = [await client.answer() for _ in range(3)]
    assert [answer[-1]["response"]["metadata"]["n"] for answer in answers] == ["0", "1", "2"]
    assert all("stream_id" not in event for answer in answers for event in answer)


async def test_a_waiting_request_may_continue_the_one_before(serve):
    server = await serve(repeat_prompt, tick=0.001)
    client = await open_websocket(server)
    await client.send({"type": "response.create", "input": "One", "store": False, "ignore_eos": True,
                       "max_output_tokens": 50})  # fmt: skip
    response_id = (await client.event())["response"]["id"]
    await client.send({"type": "response.create", "input": "Two", "store": False, "previous_response_id": response_id})
    await client.answer()
    assert (await client.answer())[-1]["response"]["previous_response_id"] == response_id


async def test_too_many_waiting_requests_are_refused(serve, monkeypatch):
    monkeypatch.setattr(ResponsesSession, "max_waiting", 2)
    server = await serve(tick=0.001)
    client = await open_websocket(server)
    await client.send({"type": "response.create", **LONG})
    await client.event()
    for _ in range(3):
        await client.send({"type": "response.create", "input": "Hello", "stream_id": None})
    while (event := await client.event())["type"] != "error":
        pass
    assert event["status"] == 429 and event["error"]["message"].startswith("At most 2 requests may wait")


async def test_named_streams_are_answered_side_by_side(serve, monkeypatch):
    monkeypatch.setattr(ResponsesSession, "max_lanes", 2)
    server = await serve(repeat_prompt, tick=0.001)
    client = await open_websocket(server)
    await client.send({"type": "response.create", **LONG, "stream_id": "long"})
    assert (await client.event())["stream_id"] == "long"
    await client.send({"type": "response.create", "input": "One", "store": False, "stream_id": 'short"'})
    short = []
    while not short or short[-1]["type"] != "response.completed":
        event = await client.event()
        if event["stream_id"] == 'short"':
            short.append(event)
        else:
            assert event["stream_id"] == "long" and not event["type"].endswith("completed")
    await client.send({"type": "response.create", **LONG, "stream_id": "second"})
    await client.send({"type": "response.create", "input": "Hello", "stream_id": "third"})
    while (event := await client.event())["type"] != "error":
        pass
    assert (event["stream_id"], event["error"]["code"]) == ("third", "websocket_stream_limit_reached")
    await client.send({"type": "response.create", "input": "Two", "store": False,
                       "previous_response_id": short[-1]["response"]["id"]})  # fmt: skip
    while "stream_id" in (event := await client.event()):
        pass
    assert event["type"] == "response.created"  # another stream continues it


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        (b"", None, None),
        (b"{", None, None),
        (b"[]", None, None),
        (b'{"type":"response.create","input":' + b"[" * 100_000, None, None),
        ({"input": "Hello"}, "type", "missing_required_parameter"),
        ({"type": 7}, "type", "invalid_type"),
        ({"type": "session.update"}, "type", "invalid_value"),
        ({"type": "response.create", "input": "a", "stream": False}, "stream", "unsupported_parameter"),
        ({"type": "response.create", "input": "a", "stream": "yes"}, "stream", "invalid_type"),
        ({"type": "response.create", "input": "a", "background": True}, "background", "unsupported_parameter"),
        ({"type": "response.create", "input": "a", "stream_id": ""}, "stream_id", "invalid_stream_id"),
        ({"type": "response.create", "input": "a", "stream_id": "a" * 65}, "stream_id", "invalid_stream_id"),
        ({"type": "response.create", "input": "a", "stream_id": 5}, "stream_id", "invalid_stream_id"),
        ({"type": "response.create"}, "input", "missing_required_parameter"),
        ({"type": "response.create", "input": "a", "generate": 1}, "generate", "invalid_type"),
        ({"type": "response.create", "input": "a", "temperature": 9}, "temperature", "decimal_above_max_value"),
        ({"type": "response.create", "input": "a", "previous_response_id": 5}, "previous_response_id", "invalid_type"),
        ({"type": "response.steer"}, "previous_response_id", "missing_required_parameter"),
    ],
    ids=str,
)
async def test_a_refusal_is_an_error_event_and_the_connection_stays(serve, message, param, code):
    server = await serve()
    client = await open_websocket(server)
    await client.send(message)
    refusal = await client.event()
    assert list(refusal) == ["type", "status", "error"] and (refusal["type"], refusal["status"]) == ("error", 400)
    error = refusal["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert (await client.create(input="Hello"))[-1]["type"] == "response.completed"


async def test_members_of_bodies_are_those_of_the_surface(serve):
    server = await serve()
    strict, universal = [await open_websocket(server, path) for path in ("/openai/v1/responses", "/v1/responses")]
    (refusal,) = await strict.create(input="a", stream_id="s", no_such=1)
    assert (refusal["stream_id"], refusal["error"]["code"]) == ("s", "unknown_parameter")
    assert (await universal.create(input="a", no_such=1))[-1]["type"] == "response.completed"


async def test_steering_is_refused_in_its_own_form(serve):
    server = await serve()
    client = await open_websocket(server)
    await client.send({"type": "response.steer", "previous_response_id": "resp_1", "input": "Left"})
    event = await client.event()
    assert (event["type"], event["error"]["code"]) == ("response.steer.failed", "steering_not_supported")
    assert event["steer"] == {"input": "Left", "previous_response_id": "resp_1"}


async def test_a_failed_response_ends_as_its_stream_does(serve):
    server = await serve(tick=0.001)
    client = await open_websocket(server)
    first = await response_of(client, input="One", store=False)
    await client.send({"type": "response.create", **LONG, "store": False, "previous_response_id": first["id"]})
    await client.event()
    (request,) = server.service.open_requests
    request.fail_request(EngineError("It broke."))
    events = [await client.event()]
    while events[-1]["type"] != "response.failed":
        events.append(await client.event())
    error, failed = events[-2:]
    assert (error["type"], error["message"]) == ("error", "It broke.")
    assert failed["response"]["previous_response_id"] == first["id"]
    (refusal,) = await client.create(input="Two", store=False, previous_response_id=first["id"])
    assert refusal["error"]["code"] == "previous_response_not_found"


async def test_a_connection_ends_after_its_time(serve, monkeypatch):
    monkeypatch.setattr(ResponsesSession, "max_seconds", 0.3)
    server = await serve(tick=0.002)
    idle, busy = await open_websocket(server), await open_websocket(server)
    await busy.send({"type": "response.create", "input": "Hello", "ignore_eos": True, "max_output_tokens": 300})
    event = await idle.event()
    assert (event["status"], event["error"]["code"]) == (400, "websocket_connection_limit_reached")
    assert await idle.frame() == Frame(CLOSE, b"\x03\xe8")
    assert (await busy.answer())[-1]["type"] == "response.incomplete"  # the running response is answered
    assert (await busy.event())["error"]["code"] == "websocket_connection_limit_reached"
    assert (await busy.closed())[0] == 1000


async def test_requests_do_not_keep_a_connection_after_its_time(serve, monkeypatch):
    monkeypatch.setattr(ResponsesSession, "max_seconds", 0.3)
    server = await serve(tick=0.002)
    client = await open_websocket(server)
    message = {"type": "response.create", "input": "Hello", "ignore_eos": True, "max_output_tokens": 300}
    await client.send(message | {"stream_id": "a"})
    await client.send(message | {"stream_id": "a"})  # waits
    events = [await client.event()]
    while events[-1]["type"] != "response.incomplete":
        events.append(await client.event())
    errors = [await client.event() for _ in range(2)]
    assert [error["error"]["code"] for error in errors] == ["websocket_connection_limit_reached"] * 2
    assert [error.get("stream_id") for error in errors] == ["a", None]
    assert (await client.closed())[0] == 1000


async def test_records_of_connections_are_bounded_and_end_with_them(serve, monkeypatch):
    monkeypatch.setattr(connection_records, "CONNECTION_RECORD_BYTES", 4000)
    server = await serve(info=MODEL_INFO)
    store = server.service.connection_records
    clients = [await open_websocket(server) for _ in range(3)]
    kept = [
        await response_of(client, input=letter * 800, store=False)
        for client, letter in zip(clients, "abc", strict=True)
    ]
    assert store._total_size <= 4000
    answers = [await client.create(input="More", store=False, previous_response_id=response["id"])
               for client, response in zip(clients, kept, strict=True)]  # fmt: skip
    assert {answer[-1]["type"] for answer in answers} == {"response.completed", "error"}
    for client in clients:
        client.connection.close()
    await server.until(lambda: store._total_size == 0)


async def test_limits_of_keys_count_each_request(serve, tmp_path):
    server = await serve(max_batch=1, max_queue=0, tick=0.001)
    one, two = await open_websocket(server), await open_websocket(server)
    await one.send({"type": "response.create", **LONG})
    await one.event()
    (refusal,) = await two.create(input="Hello")
    assert (refusal["status"], refusal["error"]["type"]) == (429, "requests")


async def test_the_official_client_converses(serve):
    server = await serve()
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
    async with client.responses.connect() as connection:
        await connection.response.create(model="tiny", input="Hello", store=False)
        async for event in connection:
            if event.type == "response.completed":
                break
        first = event.response
        await connection.response.create(model="tiny", input="More", store=False, previous_response_id=first.id)
        deltas = []
        async for event in connection:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
            if event.type == "response.completed":
                break
        assert event.response.previous_response_id == first.id and "".join(deltas) == event.response.output_text
        await connection.response.create(model="tiny", input="More", previous_response_id="resp_1")
        event = await anext(aiter(connection))
        assert event.error.code == "previous_response_not_found"
    await client.close()


async def test_a_coordinator_answers_on_websockets_as_a_server_does(live_cluster, serve):
    cluster = await live_cluster("flex", reply=repeat_prompt)
    client = await open_websocket(cluster.front)
    first = await response_of(client, input="One", store=False, generate=False)
    second = await response_of(client, input="Two", store=False, previous_response_id=first["id"])
    assert "One" in prompt_of(second) and second["previous_response_id"] == first["id"]
    stored = await response_of(client, input="Four", previous_response_id=second["id"])
    assert "Two" in prompt_of(stored) and stored["previous_response_id"] == second["id"]
    assert (await cluster.front.get(f"/v1/responses/{stored['id']}")).json == stored
    stored = await response_of(client, input="Three")
    assert (await cluster.front.get(f"/v1/responses/{stored['id']}")).json == stored
    (refusal,) = await client.create(input="Three", previous_response_id="resp_1")
    assert refusal["error"]["code"] == "previous_response_not_found"
    await client.send({"type": "response.create", **LONG})
    await client.event()
    assert cluster.coordinator.front.load.open_requests == 1  # the connection itself is none
    client.connection.close()
    await cluster.wait_until_idle()


async def test_a_separated_request_is_answered_on_the_websocket_of_its_coordinator(live_cluster):
    keys = ("sk-one-key-0123456789",)
    cluster = await live_cluster("prefill", "decode", reply=repeat_prompt, api_keys=keys, cluster_secret="s" * 20)
    for headers in ({}, {"authorization": "Bearer sk-none"}):
        answer = await refused_handshake(cluster.front, **headers)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key" if headers else None)
    client = await open_websocket(cluster.front, authorization=f"Bearer {keys[0]}")
    first = await response_of(client, input="One", store=False)
    second = await response_of(client, input="Two", store=False, previous_response_id=first["id"])
    assert "One" in prompt_of(second) and "Two" in prompt_of(second)
    client.connection.close()
    await cluster.wait_until_idle()
