"""MindIE's service plane through a running server: paths, frames, stopInfer, time limits and true batch sizes."""

import asyncio
import itertools
import json
from typing import Any

import pytest
from support.http_client import Answer, RunningServer, build_request
from support.loop_clock import pass_time

from parley.dialects.mindie import service_dialect
from parley.dialects.mindie.api_rules import MindieRules
from parley.dialects.mounts import DEDICATED_APIS, ApiMount
from parley.engine.output_stream import OutputStream
from parley.types import EngineOutput

INPUTS = "My name is Olivier and I"
LONG = {"text_input": "a b", "parameters": {"max_new_tokens": 3000}}
PARAMETERS = {  # from the example in MindIE's document
    "details": True, "do_sample": True, "max_new_tokens": 20, "repetition_penalty": 1.03, "return_full_text": False,
    "seed": None, "temperature": 0.5, "top_k": 10, "top_p": 0.95, "truncate": None, "typical_p": 0.5,
    "watermark": False, "stop": ["stop1", "stop2"], "adapter_id": "None",
}  # fmt: skip
TGI_FRAME = ["token", "generated_text", "details"]
TOKEN = ["id", "text", "logprob", "special"]


def read_frames(answer: Answer, lead: str = "data: ") -> list[Any]:
    assert answer.status == 200 and answer.headers["content-type"] == "text/event-stream"
    parts = answer.body.decode().split("\n\n")
    assert parts.pop() == "" and all(part.startswith(lead) for part in parts)
    return [json.loads(part.removeprefix(lead)) for part in parts]


def read_error(answer: Answer) -> tuple[int, str, str]:
    assert list(answer.json) == ["error", "error_type"]
    return answer.status, answer.json["error"], answer.json["error_type"]


@pytest.mark.parametrize("path", ["/mindie", "/mindie-old"])
async def test_mindie_stream_frames_have_the_documented_members(serve, path):
    server = await serve()
    body = {"inputs": INPUTS, "parameters": PARAMETERS | {"decoder_input_details": False}, "stream": True}
    events = read_frames(await server.post(path, body))
    assert all(list(frame) == TGI_FRAME and list(frame["token"]) == TOKEN for frame in events)
    assert all(len(frame["token"]["id"]) == 1 for frame in events)
    assert all(frame["generated_text"] is frame["details"] is None for frame in events[:-1])
    last = events[-1]
    assert last["generated_text"] == "".join(frame["token"]["text"] for frame in events)
    assert list(last["details"]) == ["prompt_tokens", "finish_reason", "generated_tokens", "seed"]
    assert last["details"]["generated_tokens"] == len(events) == 20 and last["details"]["finish_reason"] == "length"


async def test_mindie_full_text_frames_repeat_the_text_so_far(serve):
    full = service_dialect(MindieRules(full_text=True))
    server = await serve(surfaces=(ApiMount("", full),))
    events = read_frames(await server.post("/", {"inputs": INPUTS, "stream": True}))
    texts = [frame["token"]["text"] for frame in events]
    assert texts[-1] == events[-1]["generated_text"] and len(texts) == 20
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    events = read_frames(await server.post("/v2/models/tiny/generate_stream", {"text_input": INPUTS}), "data:")
    assert events[-1]["text_output"] == texts[-1]


async def test_mindie_only_paths_are_served_at_the_root_too(serve):
    server = await serve()
    for root in ("", "/mindie", "/mindie-old"):
        for path in ("/infer", "/infer_token"):
            answer = await server.post(root + path, {"inputs": INPUTS, "parameters": {"details": True}})
            result = answer.json
            assert list(result) == ["generated_text", "details"], answer.body
            assert list(result["details"]) == ["finish_reason", "generated_tokens", "generated_token_ids", "seed"]
            assert answer.headers["requestuuid"]
            again = await server.post(root + path, {"input_id": result["details"]["generated_token_ids"]})
            assert list(again.json) == ["generated_text"]
        result = (await server.post(root + "/v1/tokenizer", {"inputs": "a b"})).json
        assert result["token_number"] == len(result["tokens"]) and "".join(result["tokens"]) == "a b"
        bare = await server.post(root + "/v1/tokenizer", {"inputs": "a b", "do_decode": False})
        assert bare.json == {"token_number": result["token_number"], "tokens": []}
        slots = (await server.get(root + "/v2/models/tiny/getSlotCount")).json
        assert list(slots) == ["total_slots", "free_slots", "available_tokens_length"]


async def test_strict_mindie_closes_the_connection_after_an_answer_that_is_no_stream(serve):
    server = await serve(surfaces=(ApiMount("", service_dialect(MindieRules("strict"))),))
    assert (await server.post("/infer", {"inputs": INPUTS})).headers["connection"] == "close"
    assert (await server.post("/infer", {"inputs": 5})).headers["connection"] == "close"
    assert "connection" not in (await server.post("/infer", {"inputs": INPUTS, "stream": True})).headers


async def test_mindie_generate_picks_the_vllm_or_tgi_form_by_the_body(serve):
    server = await serve()
    record = await server.post("/mindie/generate", {"prompt": "a b", "inputs": "c", "max_tokens": 3})
    assert list(record.json) == ["text"] and record.json["text"][0].startswith("a b ")
    assert list((await server.post("/mindie/generate", {"prompt": None, "inputs": "c"})).json) == ["generated_text"]
    for body in ({}, {"inputs": None}, b"{", b"[]"):
        status, text, kind = read_error(await server.post("/mindie/generate", body))
        assert (status, kind) == (422, "Input Validation Error")
        assert json.loads(text)["Error"].startswith("`inputs` or `prompt` must be necessary")
    answer = await server.post("/mindie/generate", {"prompt": "a b", "max_tokens": 3, "stream": True})
    parts = answer.body.decode().split("\0")
    assert parts.pop() == "" and not answer.body.startswith(b"data")
    streamed = "".join(json.loads(part)["text"][0] for part in parts)
    assert record.json["text"] == ["a b " + streamed]


async def test_mindie_serves_model_metadata_and_rejects_unknown_models(serve):
    server = await serve()
    for path in ("/v2", "/v2/models/tiny", "/v2/models/tiny/config"):
        assert (await server.get("/mindie" + path)).status == 200
    unknown = (404, "Model x not found.", "NotFoundError")
    for path in ("/generate", "/generate_stream", "/infer", "/stopInfer"):
        assert read_error(await server.post("/mindie/v2/models/x" + path, b"no JSON")) == unknown
    assert read_error(await server.get("/mindie/v2/models/x")) == unknown


async def test_mindie_rejects_overlong_prompts_and_unknown_token_ids(serve):
    server = await serve(max_prompt=10)
    limit = (
        "Failed to enqueue inferRequest. This model's maximum input ids length cannot be greater than 10,the input ids "
        "length is 11"
    )
    assert (await server.post("/mindie/infer", {"input_id": [5] * 10})).status == 200
    assert read_error(await server.post("/mindie/infer", {"input_id": [5] * 11})) == (424, limit, "Generation Error")
    ids = await server.post("/mindie/infer", {"input_id": [100_000]})
    assert read_error(ids) == (424, "Failed to enqueue inferRequest. Invalid Input Ids", "Generation Error")
    assert (await server.post("/generate", {"inputs": "a b c d e f g h i j k l m n o p"})).status == 422  # TGI's route


@pytest.mark.parametrize("kept_tokens", ["head", "tail"])
async def test_mindie_truncates_an_overlong_prompt_if_configured(serve, kept_tokens):
    server = await serve(max_prompt=4, surfaces=(ApiMount("", service_dialect(MindieRules(truncation=kept_tokens))),))
    body = {"input_id": [5, 6, 7, 8, 9, 10], "parameters": {"max_new_tokens": 4, "details": True}}
    token_ids = (await server.post("/infer", body)).json["details"]["generated_token_ids"]
    assert token_ids == ([5, 6, 7, 8] if kept_tokens == "head" else [7, 8, 9, 10])
    assert (await server.post("/infer", {"inputs": "a b c " * 20_000})).status == 200
    await server.wait_until_idle()


async def test_mindie_cuts_answers_at_max_output(serve):
    server = await serve(max_output=3)
    body = {"inputs": INPUTS, "parameters": {"max_new_tokens": 9, "details": True}}
    details = (await server.post("/mindie/infer", body)).json["details"]
    assert (details["generated_tokens"], details["finish_reason"]) == (3, "length")


async def test_mindie_extended_profile_accepts_values_the_strict_rejects(serve):
    server = await serve(surfaces=(ApiMount("", service_dialect(MindieRules("extended"))),))
    lenient = {"temperature": 0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 4, "details": True}
    with_prompt_details = lenient | {"truncate": 0, "decoder_input_details": True}
    (whole,) = (await server.post("/", {"inputs": "a b", "parameters": with_prompt_details})).json
    assert list(whole["details"]["tokens"][0]) == ["id", "logprob", "special", "text"]
    assert all(token["logprob"] is not None for token in whole["details"]["tokens"])
    assert whole["details"]["prefill"][-1]["logprob"] is not None
    last = read_frames(await server.post("/generate_stream", {"inputs": "a b", "parameters": with_prompt_details}))[-1]
    assert [token["id"] for token in last["details"]["prefill"]] == [t["id"] for t in whole["details"]["prefill"]]
    for path, body in (
        ("/infer", {"inputs": "a b", "parameters": lenient}),
        ("/v2/models/tiny/versions/9/generate", {"text_input": "a b", "parameters": lenient}),
    ):
        details = (await server.post(path, body)).json["details"]
        assert details["generated_tokens"] == 4
    assert len(details["decode_cost"]) == 3 and details["first_token_cost"] >= 0
    tensor = {"name": "i", "shape": [1, 2], "datatype": "INT64", "data": [5, 6], "parameters": lenient}
    answer = await server.post("/v2/models/tiny/infer", {"inputs": [tensor], "outputs": [{"name": "o"}]})
    assert answer.json["outputs"] == [{"name": "o", "shape": [1, 4], "datatype": "INT64", "data": [5, 6, 5, 6]}]
    both = await server.post("/generate", {"prompt": "a", "n": 2, "max_tokens": 3})
    assert len(both.json["text"]) == 2
    server.engine.crash_engine()
    assert server.engine.state == "failed"
    assert read_error(await server.post("/infer", {"inputs": "a"}))[2] == "Service Unavailable"


async def test_mindie_engine_crash_ends_a_stream_with_bare_text(serve):
    server = await serve(tick=0.001)
    body = {"inputs": "a", "parameters": {"max_new_tokens": 3000}, "stream": True}
    streams = [asyncio.create_task(server.post(root + "/infer", body)) for root in ("/mindie", "")]
    await wait_for_tokens(server)
    await server.until(lambda: server.model.used_slots == 2 and server.engine.stats.running == 2)
    server.engine.crash_engine("It was killed.")
    strict, lax = [(await stream).body.decode().split("\n\n") for stream in streams]
    assert strict[-1] == "It was killed."
    assert lax[-1] == "" and json.loads(lax[-2].removeprefix("data: "))["error"] == "It was killed."


# -- stopInfer


async def wait_for_tokens(server: RunningServer) -> None:
    await server.until(lambda: server.engine.stats.generated_tokens > 3)


async def test_stop_infer_stops_the_oldest_request_of_an_id(serve):
    server = await serve(tick=0.001)
    body = LONG | {"id": "mine"}
    body["parameters"] = LONG["parameters"] | {"details": True}
    stream = asyncio.create_task(server.post("/mindie/v2/models/tiny/generate_stream", body))
    await wait_for_tokens(server)
    whole = asyncio.create_task(server.post("/mindie/v2/models/tiny/generate", body))  # a second request with this id
    await server.until(lambda: server.model.used_slots == 2)
    stop = b'{"id" : "mine"}'
    answer = await server.post("/mindie/v2/models/tiny/stopInfer", stop)
    assert (answer.status, answer.body) == (200, stop)
    assert read_frames(await stream, "data:")[-1]["details"]["finish_reason"] == "stop_sequence"
    assert not whole.done()  # the older request is stopped first
    await asyncio.sleep(0.01)
    assert (await server.post("/v2/models/tiny/stopInfer", stop)).status == 200
    details = (await whole).json["details"]
    assert details["finish_reason"] == "stop_sequence"
    assert len(details["batch_size"]) == len(details["queue_wait_time"]) == details["generated_tokens"]
    await server.wait_until_idle()
    gone = await server.post("/mindie/v2/models/tiny/stopInfer", stop)
    assert read_error(gone) == (404, "RequestId is mine not found.", "NotFoundError")


async def test_stop_infer_stops_a_request_before_its_first_token(serve):
    server = await serve()
    server.engine.step_gate.clear()
    waiting = asyncio.create_task(server.post("/mindie/v2/models/tiny/generate", LONG | {"id": "mine"}))
    await server.until(lambda: server.model.used_slots == 1 and bool(server.engine.open_stream_count))
    assert (await server.post("/mindie/v2/models/tiny/stopInfer", {"id": "mine"})).status == 200
    answer = await waiting
    assert (answer.status, answer.json["text_output"]) == (200, "")
    server.engine.step_gate.set()
    await server.wait_until_idle()


async def test_rejects_a_req_id_that_a_running_request_uses(serve):
    server = await serve(tick=0.001)
    first = asyncio.create_task(server.call("POST", "/mindie/infer", {"inputs": "a", "parameters": {
        "max_new_tokens": 3000}}, {"req-id": "mine"}))  # fmt: skip
    await wait_for_tokens(server)
    second = await server.call("POST", "/mindie/infer", {"inputs": "a"}, {"req-id": "mine"})
    used = "Failed to enqueue inferRequest. Runtime request has been used before."
    assert read_error(second) == (500, used, "Incomplete Generation")
    assert (await server.call("POST", "/mindie/infer", {"inputs": "a"}, {"req-id": "other"})).status == 200
    assert (await server.post("/mindie/v2/models/tiny/stopInfer", {"id": "mine"})).status == 200
    assert (await first).status == 200
    assert (await server.call("POST", "/mindie/infer", {"inputs": "a"}, {"req-id": "mine"})).status == 200
    await server.wait_until_idle()


# -- time limits


async def test_mindie_infer_reports_which_time_limit_was_exceeded(serve):
    body = {"inputs": "a", "parameters": {"max_new_tokens": 3000, "timeout": 60}}
    text = "Engine callback timeout: "
    for options, seconds, message in (
        ({}, 60, text + "client timeout"),
        ({"timeout": 50}, 50, text + "server e2eTimeout"),
        ({"token_timeout": 40}, 40, text + "server tokenTimeout"),
    ):
        server = await serve(tick=0.01, **options)
        server.engine.step_gate.clear()
        unstarted = [
            asyncio.create_task(server.post("/mindie/infer", body | {"stream": is_streamed}))
            for is_streamed in (False, True)
        ]
        await server.until(lambda server=server: server.engine.open_stream_count == 2)
        await pass_time(seconds)
        for request_task in unstarted:
            assert read_error(await request_task) == (500, message, "Incomplete Generation")
        server.engine.step_gate.set()
        await server.wait_until_idle()
        stream = asyncio.create_task(server.post("/mindie/infer", body | {"stream": True}))
        await wait_for_tokens(server)
        server.engine.step_gate.clear()
        await pass_time(seconds)
        assert (await stream).body.decode().split("\n\n")[-1] == message  # a started stream ends with the bare text
        server.engine.step_gate.set()
        await server.wait_until_idle()


async def test_openai_request_past_the_server_timeout_is_504(serve):
    server = await serve(tick=0.01, timeout=60)
    body = {"prompt": "a", "max_tokens": 3000}
    whole = asyncio.create_task(server.post("/v1/completions", body))
    stream = await server.connect()
    await stream.send(build_request("POST", "/v1/completions", body | {"stream": True}))
    head = await stream.head()
    await pass_time(60)
    answer = await whole
    assert (answer.status, answer.error["type"]) == (504, "server_error")
    streamed = Answer(*head, b"".join(await stream.chunks()))
    assert streamed.status == 200 and "within the time" in streamed.events[-1]["error"]["message"]
    await server.wait_until_idle()


async def test_mindie_rejects_a_body_over_the_limit(serve):
    """The limit is the server's, where that is lower than MindIE's own."""
    server = await serve(body_limit=1 << 19)
    answer = await server.post("/mindie/infer", {"inputs": "a" * (1 << 19)})
    assert (answer.status, answer.body) == (
        413, b'{"message":"Request body too large. Maximum allowed size is 0.5MB."}'
    )  # fmt: skip


async def test_token_timeout_limits_each_token_not_the_whole_answer(serve):
    server = await serve(token_timeout=30, timeout=600)
    body = {"inputs": "a", "parameters": {"max_new_tokens": 5}}
    server.engine.step_gate.clear()
    answer = asyncio.create_task(server.post("/mindie/infer", body))
    await server.until(lambda: server.engine.open_stream_count == 1)
    server.engine.step_observers.append(lambda stats: server.engine.step_gate.clear())  # one token each time
    for count in range(1, 6):
        await pass_time(20)
        server.engine.step_gate.set()
        await server.until(lambda count=count: answer.done() or server.engine.stats.generated_tokens == count)
    assert (await answer).status == 200  # it took longer in total than token_timeout
    server.engine.step_observers.pop()
    server.engine.step_gate.set()
    assert (await server.post("/v1/completions", {"prompt": "a", "max_tokens": 3})).status == 200
    await server.wait_until_idle()


# -- figures of the steps


async def test_mindie_batch_sizes_match_the_steps_of_the_engine(serve, monkeypatch):
    server = await serve(max_batch=3)
    steps: list[tuple[int, set[str]]] = []  # number of rows, and the ids of their requests
    add_output = OutputStream.add_output

    def record_output(stream: OutputStream, output: EngineOutput) -> None:
        if output.token_ids:
            steps[-1][1].add(output.id)
        add_output(stream, output)

    server.engine.step_observers.append(lambda stats: steps.append((stats.step_rows, set())))
    monkeypatch.setattr(OutputStream, "add_output", record_output)

    async def send_and_record(number: int) -> None:
        parameters = {"max_new_tokens": 5 + 3 * number, "details": True}
        body = {"text_input": "a b", "id": f"r{number}", "parameters": parameters}
        if number % 2:
            answer = await server.post("/mindie/v2/models/tiny/generate", body)
            rows, waits = answer.json["details"]["batch_size"], answer.json["details"]["queue_wait_time"]
        else:
            events = read_frames(await server.post("/mindie/v2/models/tiny/generate_stream", body), "data:")
            rows = [frame["details"]["batch_size"] for frame in events]
            waits = [frame["details"]["queue_wait_time"] for frame in events]
            assert [frame["prefill_time"] is None for frame in events] == [False] + [True] * (len(events) - 1)
            assert [frame["decode_time"] is None for frame in events] == [True] + [False] * (len(events) - 1)
        assert len(rows) == len(waits) == 5 + 3 * number and all(wait >= 0 for wait in waits)
        reported_rows[number] = rows

    reported_rows: dict[int, list[int]] = {}
    await asyncio.gather(*map(send_and_record, range(8)))
    rows_by_request: dict[str, list[int]] = {}
    for rows, ids in steps:
        for request_id in ids:
            rows_by_request.setdefault(request_id, []).append(rows)
    assert sorted(rows_by_request.values()) == sorted(reported_rows.values())
    assert max(max(rows) for rows in reported_rows.values()) == 3


def test_both_mindie_flavours_can_have_their_own_port():
    assert {"mindie", "mindie-old"} <= set(DEDICATED_APIS)
