"""TGI through a running server: its routes, the paths it shares with other APIs, and Hugging Face's client."""

import asyncio
import contextlib
import json
import re

import pytest
from huggingface_hub import AsyncInferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError
from support.http_client import HELLO_CHAT, build_request

EOS = 2
INPUTS = "Hello there, my friend"


def echo_and_end(work, index):
    """Repeat the prompt's tokens, then end the text."""
    return [*work.token_ids, EOS][: work.max_tokens]


def read_events(answer):
    assert answer.headers["content-type"] == "text/event-stream"
    *frames, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    return [json.loads(frame.removeprefix("data: ")) for frame in frames if frame != ":"]


@pytest.fixture
async def server(serve):
    return await serve(reply=echo_and_end)


async def test_tgi_paths_answer_alike_with_and_without_prefix(server):
    body = {"inputs": INPUTS, "parameters": {"return_full_text": False}}
    for prefix in ("", "/tgi"):
        assert (await server.post(f"{prefix}/generate", body)).json == {"generated_text": INPUTS}
        for path in ("/", "/invocations"):
            assert (await server.post(prefix + path, body)).json == [{"generated_text": INPUTS}]
            streamed = read_events(await server.post(prefix + path, body | {"stream": True}))
            assert streamed == read_events(await server.post(f"{prefix}/generate_stream", body))
        for path in ("/health", "/", "/ping"):
            answer = await server.get(prefix + path)
            assert (answer.status, answer.body) == (200, b"")


async def test_tgi_generate_returns_details_and_timing_headers(server):
    parameters = {"details": True, "decoder_input_details": True, "top_n_tokens": 2, "temperature": 0.5, "seed": 7}
    answer = await server.post("/tgi/generate", {"inputs": INPUTS, "parameters": parameters})
    ids = server.model.text_pipeline.tokenizer.encode(INPUTS)
    details = answer.json["details"]
    assert details["finish_reason"] == "eos_token"
    assert details["generated_tokens"] == len(ids) + 1
    assert details["seed"] == 7
    assert [token["id"] for token in details["prefill"]] == ids
    assert [token["logprob"] for token in details["prefill"]] == [None] + [-0.5] * (len(ids) - 1)
    assert [token["id"] for token in details["tokens"]] == [*ids, EOS]
    assert "".join(token["text"] for token in details["tokens"]) == INPUTS + "<|im_end|>"
    assert [token["special"] for token in details["tokens"]] == [False] * len(ids) + [True]
    assert all(len(top) == 2 for top in details["top_tokens"])
    headers = answer.headers
    assert headers["content-type"] == "application/json"
    assert headers["x-compute-type"] == "none+optimized"
    assert re.fullmatch(r"\d+\.\d{9}", headers["x-compute-time"])
    assert headers["x-compute-characters"] == str(len(INPUTS))
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == (str(len(ids)), str(len(ids) + 1))
    for name in ("total", "validation", "queue", "inference"):
        assert headers[f"x-{name}-time"].isdigit()
    assert headers["x-time-per-token"].isdigit()


async def test_tgi_stream_ends_with_details(server):
    answer = await server.post("/generate_stream", {"inputs": "Zwölf", "parameters": {"details": True}})
    frames = read_events(answer)
    ids = server.model.text_pipeline.tokenizer.encode("Zwölf")
    assert [event["token"]["id"] for event in frames] == [*ids, EOS]
    assert [event["index"] for event in frames] == list(range(1, len(ids) + 2))
    assert "".join(event["token"]["text"] for event in frames) == "Zwölf<|im_end|>"
    assert all(event["generated_text"] is event["details"] is None for event in frames[:-1])
    assert frames[-1]["generated_text"] == "Zwölf"
    details = frames[-1]["details"]
    assert list(details) == ["finish_reason", "generated_tokens", "seed", "input_length"]
    assert (details["input_length"], details["generated_tokens"]) == (len(ids), len(ids) + 1)
    assert isinstance(details["seed"], int) or details["seed"] is None
    assert answer.headers["x-compute-characters"] == "5"
    assert "x-compute-time" not in answer.headers
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")


async def test_tgi_reported_seed_reproduces_the_answer(serve):
    server = await serve(reply=lambda work, index: [70 + work.seed % 7, EOS])
    body = {"inputs": "a", "parameters": {"details": True, "do_sample": True}}
    first = (await server.post("/generate", body)).json
    again = body | {"parameters": body["parameters"] | {"seed": first["details"]["seed"]}}
    assert (await server.post("/generate", again)).json == first


async def test_tgi_keeps_the_stop_string_and_honours_max_new_tokens(server):
    body = {"inputs": "one two three", "parameters": {"details": True, "stop": ["two"]}}
    whole = (await server.post("/generate", body)).json
    assert whole["generated_text"] == "one two"
    assert whole["details"]["finish_reason"] == "stop_sequence"
    streamed = read_events(await server.post("/generate_stream", body))
    assert streamed[-1]["generated_text"] == "one two"
    short = await server.post("/generate", {"inputs": "one two", "parameters": {"details": True, "max_new_tokens": 1}})
    assert (short.json["details"]["finish_reason"], short.json["details"]["generated_tokens"]) == ("length", 1)


async def test_tgi_stream_does_not_hold_back_a_partial_stop_string(serve):
    server = await serve(reply=echo_and_end)
    server.engine.step_gate.clear()
    connection = await server.connect()
    body = {"inputs": "one two", "parameters": {"stop": ["one two three"]}}
    await connection.send(build_request("POST", "/generate_stream", body))
    await server.until(lambda: server.engine.open_stream_count == 1)
    server.engine.step_gate.set()
    frames = read_events(await connection.answer())
    connection.close()
    assert [event["token"]["text"] for event in frames][-1] == "<|im_end|>"
    assert len(frames) == len(server.model.text_pipeline.tokenizer.encode("one two")) + 1


async def test_tgi_truncate_keeps_the_end_of_the_prompt(server):
    ids = server.model.text_pipeline.tokenizer.encode("one two three four")
    for truncate in (1, 3, len(ids), 500):
        body = {"inputs": "one two three four", "parameters": {"details": True, "truncate": truncate}}
        details = (await server.post("/generate", body)).json["details"]
        assert [token["id"] for token in details["tokens"]] == [*ids[-truncate:], EOS]
    huge = {"inputs": "one two three four " * 8000 + "five", "parameters": {"truncate": 4}}
    answer = await server.post("/generate", huge)
    assert answer.status == 200 and answer.json["generated_text"].endswith("five")
    assert (await server.post("/generate", {"inputs": huge["inputs"]})).status == 422


async def test_tgi_best_of_three_lists_the_two_other_sequences(server):
    body = {"inputs": "a", "parameters": {"best_of": 3, "do_sample": True, "details": True}}
    answer = (await server.post("/generate", body)).json
    assert len(answer["details"]["best_of_sequences"]) == 2
    assert (await server.post("/tgi/generate", body)).status == 422
    await server.wait_until_idle()


async def test_tgi_cuts_answers_at_the_context_and_rejects_overlong_ones(serve):
    server = await serve()
    body = {"inputs": "abc", "parameters": {"max_new_tokens": 100_000, "details": True}}
    cut = await server.post("/generate", body)
    prompt = len(server.model.text_pipeline.tokenizer.encode("abc"))
    details = cut.json["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 4096 - prompt)
    for length, count, text in (
        (
            4000,
            97,
            "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 `inputs` tokens and 97 `max_new_tokens`",
        ),
        (
            3500,
            9999,
            "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 3500 `inputs` tokens and 1024 `max_new_tokens`",
        ),
        (4096, None, "`inputs` must have less than 4095 tokens. Given: 4096"),
        (5000, 5, "`inputs` must have less than 4095 tokens. Given: 5000"),
    ):
        inputs = "<|im_start|>" * length
        answer = await server.post("/generate", {"inputs": inputs, "parameters": {"max_new_tokens": count}})
        assert (answer.status, answer.json["error"]) == (422, f"Input validation error: {text}")


async def test_tgi_parse_errors_and_validation_errors_differ_in_form(server):
    wrong = await server.post("/generate", {"inputs": 5})
    assert (wrong.status, wrong.headers["content-type"]) == (422, "text/plain; charset=utf-8")
    broken = await server.post("/tgi/generate", b"{")
    assert (broken.status, broken.headers["content-type"]) == (400, "text/plain; charset=utf-8")
    for path in ("/generate", "/generate_stream"):
        refused = await server.post(path, {"inputs": ""})
        assert (refused.status, refused.json) == (
            422, {"error": "Input validation error: `inputs` cannot be empty", "error_type": "validation"}
        )  # fmt: skip
    strict = await server.post("/tgi/generate_stream", {"inputs": ""})
    assert (strict.status, read_events(strict)) == (200, [refused.json])
    assert (await server.get("/tgi/generate")).status == 405
    nowhere = await server.post("/tgi/nowhere", {})
    assert (nowhere.status, nowhere.body) == (404, b"")


async def test_strict_tgi_requires_a_json_content_type(server):
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    for kind, status in (
        ("application/json; charset=utf-8", 200),
        ("application/vnd.x+json", 200),
        ("text/json", 415),
        ("application/x-www-form-urlencoded", 415),
    ):
        headers = {"content-type": kind}
        assert (await server.call("POST", "/tgi/generate", body, headers)).status == status
        assert (await server.call("POST", "/generate", body, headers)).status == 200
    answer = await server.call("POST", "/tgi/v1/chat/completions", HELLO_CHAT, {"content-type": "text/plain"})
    assert (answer.status, answer.headers["content-type"]) == (415, "text/plain; charset=utf-8")
    assert answer.body == b"Expected request with `Content-Type: application/json`"


async def test_tgi_full_queue_answers_overloaded(serve):
    server = await serve(max_batch=1, max_queue=0)
    server.engine.step_gate.clear()
    connection = await server.connect()
    await connection.send(build_request("POST", "/generate", {"inputs": "a"}))
    await server.until(lambda: server.engine.open_stream_count == 1)
    answer = await server.post("/generate_stream", {"inputs": "a"})
    assert (answer.status, answer.json) == (429, {"error": "Model is overloaded", "error_type": "overloaded"})
    strict = await server.post("/tgi", {"inputs": "a", "stream": True})
    assert (strict.status, read_events(strict)) == (200, [answer.json])
    connection.close()
    await server.until(lambda: not server.service.open_requests)


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_tgi_engine_crash_fails_the_request_and_the_health_probe(serve, path):
    server = await serve(tick=0.001)
    connection = await server.connect()
    await connection.send(build_request("POST", path, {"inputs": "abc", "parameters": {"max_new_tokens": 4000}}))
    await server.until(lambda: server.engine.stats.generated_tokens > 5)
    server.engine.crash_engine("It was killed.")
    answer = await connection.answer()
    connection.close()
    error = {"error": "Request failed during generation: It was killed.", "error_type": "generation"}
    if path == "/generate":
        assert (answer.status, answer.json) == (424, error)
    else:
        assert (answer.status, read_events(answer)[-1]) == (200, error)
    health = await server.get("/tgi/health")
    assert (health.status, health.body) == (503, b'{"error":"unhealthy","error_type":"healthcheck"}')


async def test_strict_tgi_overload_answer_has_no_retry_after(serve):
    server = await serve(max_batch=1, max_queue=0)
    server.engine.step_gate.clear()
    running = asyncio.create_task(server.post("/generate", {"inputs": "a"}))
    await server.until(lambda: server.engine.open_stream_count == 1)
    lenient, strict = (
        await server.post("/generate", {"inputs": "a"}),
        await server.post("/tgi/generate", {"inputs": "a"}),
    )
    assert lenient.body == strict.body == b'{"error":"Model is overloaded","error_type":"overloaded"}'
    assert (lenient.status, strict.status) == (429, 429)
    assert "retry-after" in lenient.headers and "retry-after" not in strict.headers
    server.engine.step_gate.set()
    await running


async def test_strict_tgi_limits_bodies_to_two_megabytes(server):
    too_large = (413, "text/plain; charset=utf-8", b"Failed to buffer the request body: length limit exceeded")
    for path, size in (("/tgi/generate", 2_000_000), ("/tgi-0.9.4/generate", 2 << 20)):
        body = b'{"inputs":"a"}'.ljust(size)
        assert (await server.call("POST", path, body, {"content-type": "application/json"})).status == 200
        refused = await server.call("POST", path, body + b" ", {"content-type": "application/json"})
        assert (refused.status, refused.headers["content-type"], refused.body) == too_large
    assert (await server.call("POST", "/generate", body + b" ")).status == 200


async def test_tgi_silent_stream_gets_keep_alive_comments(serve):
    server = await serve(ping_interval=0.02)
    server.engine.step_gate.clear()
    connection = await server.connect()
    await connection.send(
        build_request("POST", "/generate_stream", {"inputs": "ab", "parameters": {"max_new_tokens": 1}})
    )
    await connection.head()
    assert await connection.reader.readexactly(8) == b"3\r\n:\n\n\r\n"
    connection.close()


# -- paths that several APIs share


async def test_tgi_tokenize_takes_json_only_and_any_truncation(server):
    for route, body in (("/tokenize", b'{"inputs":"a"}'), ("/chat_tokenize", json.dumps(HELLO_CHAT).encode())):
        for content_type in ("text/plain", "application/octet-stream"):
            answer = await server.call("POST", "/tgi" + route, body, {"content-type": content_type})
            assert (answer.status, answer.body) == (415, b"Expected request with `Content-Type: application/json`")
            assert (await server.call("POST", route, body, {"content-type": content_type})).status == 200
        assert (await server.call("POST", "/tgi" + route, body, {"content-type": "application/json"})).status == 200
    for prefix in ("", "/tgi"):
        none = await server.post(f"{prefix}/tokenize", {"inputs": "one two", "parameters": {"truncate": 0}})
        assert (none.status, none.json) == (200, [])
        last = await server.post(f"{prefix}/tokenize", {"inputs": "one two", "parameters": {"truncate": 1}})
        assert len(last.json) == 1


async def test_tokenize_picks_the_vllm_or_tgi_form_by_the_body(server):
    vllm = (await server.post("/tokenize", {"prompt": "héy"})).json
    tgi = (await server.post("/tokenize", {"inputs": "héy"})).json
    assert [token["id"] for token in tgi] == vllm["tokens"]
    places = [(token["text"], token["start"], token["stop"]) for token in tgi]
    assert places == [("h", 0, 1), ("é", 1, 3), ("é", 1, 3), ("y", 3, 4)]  # each of two tokens holds one byte of it
    assert (await server.post("/tokenize", {"messages": HELLO_CHAT["messages"]})).json["count"] > 0
    assert (await server.post("/tokenize", {"inputs": "a", "prompt": "a"})).json["tokens"]
    assert (await server.post("/tokenize", {"inputs": None, "prompt": "a"})).json["tokens"]
    assert isinstance((await server.post("/tgi/tokenize", {"inputs": "a", "prompt": "a"})).json, list)
    for body in ({}, b"[", b"", b"[]", b'{"inputs":', b'{"a":' + b"[" * 100_000):
        answer = await server.post("/tokenize", body)
        assert (answer.status, set(answer.error)) == (400, {"message", "type", "param", "code"})
    large = "word " * 5000
    assert len((await server.post("/tokenize", {"inputs": large})).json) > 5000


async def test_tgi_tokenizes_texts_and_chats(server):
    last = (await server.post("/tgi/tokenize", {"inputs": "a b c", "parameters": {"truncate": 1}})).json
    assert [(token["text"], token["start"], token["stop"]) for token in last] == [("c", 4, 5)]
    chat = (await server.post("/chat_tokenize", {"messages": HELLO_CHAT["messages"]})).json
    assert list(chat) == ["tokenize_response", "templated_text"]
    assert chat["templated_text"] == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert "".join(token["text"] for token in chat["tokenize_response"]) == chat["templated_text"]
    for path in ("/chat_tokenize", "/tgi/chat_tokenize", "/tgi/v1/chat/completions", "/tgi/invocations"):
        refused = await server.post(path, {"messages": []})
        error = {"error": "Input validation error: `inputs` cannot be empty", "error_type": "validation"}
        assert (refused.status, refused.json) == (422, error)


async def test_tgi_info_reports_model_and_limits(server):
    info = (await server.get("/info")).json
    assert (info["model_id"], info["max_total_tokens"], info["max_input_tokens"]) == ("tiny", 4096, 4095)
    assert info["max_stop_sequences"] == 1024
    assert (await server.get("/tgi/info")).json["max_stop_sequences"] == 4


async def test_tgi_rejects_requests_without_a_key(serve):
    server = await serve(api_keys=("k" * 16,))
    answer = await server.post("/generate", {"inputs": "a"})
    assert (answer.status, answer.body) == (401, b"")
    assert (await server.post("/generate", {"inputs": "a"}, authorization="Bearer " + "k" * 16)).status == 200


# -- Hugging Face's client


@pytest.fixture
async def make_client():
    """Make clients of servers; all are closed at the end."""
    async with contextlib.AsyncExitStack() as stack:

        def open_client(server, path=""):
            client = AsyncInferenceClient(model=server.url + path)
            stack.push_async_callback(client.close)
            return client

        yield open_client


@pytest.mark.parametrize("path", ["", "/generate", "/tgi", "/tgi/", "/invocations"])
async def test_hugging_face_client_generates_text_on_each_path(server, path, make_client):
    generated = await make_client(server, path).text_generation(INPUTS, return_full_text=False)
    assert generated == INPUTS


async def test_hugging_face_client_returns_the_prompt_unless_disabled(server, make_client):
    assert await make_client(server).text_generation(INPUTS) == INPUTS * 2
    assert await make_client(server).text_generation(INPUTS, return_full_text=False, stop=["my"]) == "Hello there, my"


async def test_hugging_face_client_reads_details(server, make_client):
    answer = await make_client(server).text_generation(
        INPUTS, details=True, decoder_input_details=True, top_n_tokens=2, do_sample=True, seed=9, return_full_text=False
    )
    assert answer.generated_text == INPUTS
    assert (answer.details.finish_reason, answer.details.seed) == ("eos_token", 9)
    assert answer.details.generated_tokens == len(answer.details.tokens) == len(answer.details.top_tokens)
    assert answer.details.tokens[-1].special and answer.details.tokens[-1].text == "<|im_end|>"
    assert answer.details.prefill[0].logprob is None


async def test_hugging_face_client_streams_text(server, make_client):
    stream = await make_client(server).text_generation(INPUTS, stream=True)
    assert "".join([text async for text in stream]) == INPUTS + "<|im_end|>"


async def test_hugging_face_client_streams_tokens_with_details(server, make_client):
    stream = await make_client(server).text_generation(INPUTS, stream=True, details=True, return_full_text=False)
    frames = [event async for event in stream]
    assert "".join(event.token.text for event in frames) == INPUTS + "<|im_end|>"
    assert [event.index for event in frames] == list(range(1, len(frames) + 1))
    assert frames[-1].generated_text == INPUTS
    assert frames[-1].details.finish_reason == "eos_token"
    assert frames[-1].details.generated_tokens == len(frames)


async def test_hugging_face_client_raises_its_own_error_classes(serve, make_client):
    server = await serve(reply=echo_and_end, max_batch=1, max_queue=0)
    for path in ("", "/tgi"):
        for stream in (False, True):
            c = make_client(server, path)
            with pytest.raises(ValidationError, match="`temperature` must be strictly positive"):
                await read_all(c.text_generation("a", temperature=-1, stream=stream))
    server.engine.step_gate.clear()
    running = asyncio.create_task(make_client(server).text_generation("a"))
    await server.until(lambda: server.engine.open_stream_count == 1)
    with pytest.raises(OverloadedError, match="Model is overloaded"):
        await make_client(server).text_generation("a")
    server.engine.step_gate.set()
    assert await running == "aa"


async def read_all(call):
    answer = await call
    return [event async for event in answer] if hasattr(answer, "__aiter__") else answer


# -- TGI's variant of OpenAI's routes


async def test_tgi_chat_completion_matches_its_stream(server):
    answer = await server.post("/tgi/v1/chat/completions", HELLO_CHAT | {"model": "tgi", "max_tokens": 200})
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"  # the scripted model repeats its prompt
    ids = server.model.text_pipeline.tokenizer.encode(prompt, add_special_tokens=False)
    whole = answer.json
    assert list(whole) == ["object", "id", "created", "model", "system_fingerprint", "choices", "usage"]
    assert (whole["id"], whole["model"]) == ("", "tiny")
    assert whole["usage"]["prompt_tokens"] == len(ids)
    assert answer.headers["x-prompt-tokens"] == str(len(ids))
    assert answer.headers["x-generated-tokens"] == str(whole["usage"]["completion_tokens"])
    assert "x-compute-time" in answer.headers
    streamed = await server.post(
        "/tgi/v1/chat/completions",
        HELLO_CHAT | {"max_tokens": 200, "stream": True, "stream_options": {"include_usage": True}},
    )
    *chunks, last = streamed.events
    assert last["usage"] == whole["usage"] and last["choices"] == []
    assert len(chunks) == whole["usage"]["completion_tokens"]
    assert (
        "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        == (whole["choices"][0]["message"]["content"])
    )
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert ends == [None] * (len(chunks) - 1) + [whole["choices"][0]["finish_reason"]]


async def test_tgi_completions_match_their_stream(server):
    body = {"prompt": ["one two", "three"], "temperature": 0}
    whole = (await server.post("/tgi/v1/completions", body)).json
    assert {choice["index"]: choice["text"] for choice in whole["choices"]} == {0: "one two", 1: "three"}
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"stop"}
    stream_events = (await server.post("/tgi/v1/completions", body | {"stream": True})).events
    texts = {0: "", 1: ""}
    for event in stream_events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: "one two", 1: "three"}
    ends = [event for event in stream_events if "usage" in event]
    assert [event["choices"][0]["finish_reason"] for event in ends] == ["eos_token"] * 2
    assert sum(event["usage"]["total_tokens"] for event in ends) == whole["usage"]["total_tokens"]


async def test_tgi_chat_errors_have_the_form_of_stream_or_json(server):
    for stream, status in ((False, 422), (True, 200)):
        for body in (
            HELLO_CHAT | {"temperature": -1, "stream": stream},
            {"messages": [{"role": "user", "content": "<|im_end|>" * 5000}], "stream": stream},
        ):
            answer = await server.post("/tgi/v1/chat/completions", body)
            assert answer.status == status
            if stream:
                (event,) = answer.events
                assert event["error"]["http_status_code"] == 422
                assert event["error"]["message"].startswith("Input validation error: ")
            else:
                assert answer.json["error_type"] == "validation"
    unknown = await server.post("/tgi/v1/chat/completions", HELLO_CHAT | {"model": "lora"})
    assert (unknown.status, unknown.json["model"]) == (200, "lora")
    assert (await server.get("/tgi/v1/models")).json["data"][0]["created"] == 0
    assert (await server.get("/v1/models")).json["data"][0]["created"] > 0


async def test_tgi_vertex_route_predicts_each_instance(server):
    body = {"instances": [{"inputs": "one"}, {"inputs": "two three"}]}
    for prefix in ("", "/tgi"):
        assert (await server.post(prefix + "/vertex", body)).json == {"predictions": ["one", "two three"]}
    assert (await server.post("/tgi/vertex", {"instances": [{"inputs": ""}]})).status == 500
    assert (await server.post("/vertex", {"instances": [{"inputs": ""}]})).status == 422


async def test_hugging_face_client_completes_and_streams_a_chat(server, make_client):
    for path in ("/tgi", "/tgi/v1/chat/completions"):
        answer = await make_client(server, path).chat_completion(HELLO_CHAT["messages"], max_tokens=4)
        assert answer.choices[0].finish_reason == "length" and answer.model == "dummy"
    stream = await make_client(server, "/tgi").chat_completion(HELLO_CHAT["messages"], max_tokens=4, stream=True)
    assert [event.choices[0].delta.role async for event in stream] == ["assistant"] * 4
