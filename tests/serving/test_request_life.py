"""Requests from start to end: order, limits, disconnects at every moment, engine failures and shutdown."""

import asyncio
import json
import random
import resource
from pathlib import Path

import msgspec
import pytest
from support.http_client import HELLO_CHAT, MODEL_INFO, build_request, fill_path

from parley.dialects.mounts import mount_table, universal_mounts
from parley.dialects.reply import Reply
from parley.errors import SERVER_ERROR, NotReady
from parley.text.parsing.chat_template import ChatTemplate
from parley.text.parsing.markup import detect_markup
from parley.text.tokens.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG_CHAT = HELLO_CHAT | {"max_tokens": 3000, "ignore_eos": True}


async def test_client_may_disconnect_before_its_body_is_complete(serve):
    server = await serve()
    connection = await server.connect()
    await connection.send(build_request("POST", CHAT, HELLO_CHAT)[:-5])
    await asyncio.sleep(0.05)
    connection.close()
    await server.until(lambda: not server.server.server_state.tasks)
    assert await server.control()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_disconnect_while_queued_cancels_the_request(serve, stream, n):
    server = await serve(max_batch=1)
    before = await server.control()
    server.engine.step_gate.clear()
    first, second = await server.connect(), await server.connect()
    await first.send(build_request("POST", CHAT, LONG_CHAT | {"stream": stream}))
    await second.send(build_request("POST", CHAT, LONG_CHAT | {"stream": stream, "n": n}))
    await server.until(lambda: server.engine.open_stream_count == 2)
    second.close()
    await server.until(lambda: server.engine.open_stream_count == 1)
    first.close()
    await server.until(lambda: server.engine.open_stream_count == 0)
    server.engine.step_gate.set()
    await server.wait_until_idle()
    assert await server.control() == before


@pytest.mark.parametrize("body", [LONG_CHAT, LONG_CHAT | {"n": 4}], ids=["one", "four"])
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_during_decode_cancels_within_two_steps(serve, stream, body):
    server = await serve(tick=0.001)
    before = await server.control()
    connection = await server.connect()
    await connection.send(build_request("POST", CHAT, body | {"stream": stream}))
    await server.until(lambda: server.engine.stats.generated_tokens > 40)
    connection.close()
    await server.until(lambda: server.engine.open_stream_count == 0)
    steps = server.engine.stats.steps
    await server.wait_until_idle()
    assert server.engine.stats.steps - steps <= 2
    assert await server.control() == before


async def test_disconnect_cancels_all_prompts_of_a_request(serve):
    server = await serve(tick=0.001)
    connection = await server.connect()
    await connection.send(
        build_request("POST", TEXT, {"prompt": ["a", "b", "c"] * 20, "max_tokens": 3000, "stream": True})
    )
    await server.until(lambda: server.engine.stats.generated_tokens > 100)
    connection.close()
    await server.wait_until_idle()


async def test_disconnects_at_random_moments_leave_no_request(serve):
    server = await serve(tick=0.001, max_batch=8)
    before = await server.control()

    async def visit(number):
        connection = await server.connect()
        body = LONG_CHAT | {"stream": number % 2 == 0, "n": 1 + number % 3}
        await connection.send(build_request("POST", CHAT, body)[: None if number % 7 else -20])
        await asyncio.sleep(0.0007 * (number % 50))
        connection.close()

    await asyncio.gather(*(visit(number) for number in range(150)))
    await server.wait_until_idle()
    await server.until(lambda: not server.server.server_state.tasks)
    assert await server.control() == before


async def test_full_queue_answers_429_at_once(serve):
    server = await serve(max_batch=1, max_queue=1)
    server.engine.step_gate.clear()
    waiting = [asyncio.create_task(server.post(CHAT, HELLO_CHAT)) for _ in range(2)]
    await server.until(lambda: server.model.used_slots == 2)
    answer = await server.post(CHAT, HELLO_CHAT)
    assert answer.status == 429
    assert answer.error["code"] == "rate_limit_exceeded"
    assert int(answer.headers["retry-after"]) >= 1
    server.engine.step_gate.set()
    assert [a.status for a in await asyncio.gather(*waiting)] == [200, 200]
    await server.wait_until_idle()
    assert await server.control()


async def test_queue_slots_are_shared_between_api_keys(serve):
    server = await serve(max_batch=1, max_queue=3, api_keys=("one", "two"))
    server.engine.step_gate.clear()
    one, two = {"authorization": "Bearer one"}, {"x-api-key": "two"}
    waiting = [asyncio.create_task(server.post(CHAT, HELLO_CHAT, **one)) for _ in range(4)]
    await server.until(lambda: server.model.used_slots == 4)
    assert (await server.post(CHAT, HELLO_CHAT, **one)).status == 429
    waiting += [asyncio.create_task(server.post(CHAT, HELLO_CHAT | {"n": 2}, **two))]
    await server.until(lambda: server.model.used_slots == 6)
    assert (await server.post(CHAT, HELLO_CHAT, **two)).status == 429
    assert (await server.post(CHAT, HELLO_CHAT, **one)).status == 429
    server.engine.step_gate.set()
    assert [answer.status for answer in await asyncio.gather(*waiting)] == [200] * 5
    await server.until(lambda: not server.model.tenant_slots)
    assert server.model.used_slots == 0


async def test_each_prompt_and_choice_takes_a_place_in_the_queue(serve):
    server = await serve(max_batch=4, max_queue=0)
    server.engine.step_gate.clear()
    waiting = asyncio.create_task(server.post(TEXT, {"prompt": ["a", "b"], "n": 2, "max_tokens": 2}))
    await server.until(lambda: server.model.used_slots == 4)
    assert (await server.post(CHAT, HELLO_CHAT)).status == 429
    server.engine.step_gate.set()
    assert len((await waiting).json["choices"]) == 4
    await server.wait_until_idle()


async def test_concurrent_requests_get_their_own_texts(serve):
    server = await serve(max_batch=16)

    async def ask(number):
        text = f"number {number}"
        answer = await server.post(TEXT, {"prompt": text, "max_tokens": 40, "stream": number % 2 == 0})
        if number % 2:
            return answer.json["choices"][0]["text"]
        return "".join(event["choices"][0]["text"] for event in answer.events)

    texts = await asyncio.gather(*(ask(number) for number in range(60)))
    for number, text in enumerate(texts):
        assert text.startswith(f"number {number}"), text
    await server.wait_until_idle()


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": "a", "max_tokens": 5000}, "prompt", "context_length_exceeded"),
        ({"prompt": [5] * 4097, "max_tokens": 1}, "prompt", "context_length_exceeded"),
        ({"prompt": [5] * 4096}, "prompt", "context_length_exceeded"),
        ({"prompt": [5, 640], "max_tokens": 1}, "prompt", "invalid_value"),
        ({"prompt": ["a", "b" * 100_000], "max_tokens": 1}, "prompt", "context_length_exceeded"),
        ({"prompt": "a", "logit_bias": {"640": 1}}, "logit_bias", "invalid_value"),
        ({"prompt": "a", "stop_token_ids": [640]}, "stop_token_ids", "invalid_value"),
    ],
    ids=str,
)
async def test_rejects_prompts_and_tokens_the_model_cannot_take(serve, body, param, code):
    server = await serve()
    answer = await server.post(TEXT, body)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, code)
    assert server.engine.stats.steps == 0
    await server.wait_until_idle()


async def test_prompt_and_answer_may_fill_the_context_exactly(serve):
    server = await serve()
    answer = await server.post(TEXT, {"prompt": [5] * 4095, "max_tokens": 1})
    assert answer.json["usage"]["total_tokens"] == 4096
    answer = await server.post(TEXT, {"prompt": [5] * 4096, "max_tokens": 0, "echo": True})
    assert answer.json["usage"]["completion_tokens"] == 0


async def test_chat_without_max_tokens_may_fill_the_context(serve):
    server = await serve(reply=lambda work, index: [70] * work.max_tokens)
    usage = (await server.post(CHAT, {"messages": HELLO_CHAT["messages"]})).json["usage"]
    assert usage["total_tokens"] == 4096


async def test_stop_string_is_reported_and_left_out_of_the_text(serve):
    server = await serve(tick=0.001)
    answer = await server.post(TEXT, {"prompt": "The quick fox ", "max_tokens": 3000, "stop": ["zzz", "ick"]})
    choice = answer.json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The qu", "stop", "ick")
    await server.wait_until_idle()
    assert server.engine.stats.generated_tokens < 100


async def test_engine_seed_is_the_clients_or_random(serve):
    seen = []

    def reply(work, index):
        seen.append(work.seed)
        return [70]

    server = await serve(reply=reply)
    await server.post(TEXT, {"prompt": ["a", "b"], "seed": -1})
    assert seen == [2**64 - 1] * 2
    await server.post(TEXT, {"prompt": ["a", "b"]})
    assert seen[2] != seen[3]


async def test_prompt_logprobs_come_before_any_text_of_a_stream(serve):
    server = await serve()
    body = {"prompt": "The quick", "max_tokens": 2, "n": 3, "echo": True, "logprobs": 0, "stream": True}
    events = (await server.post(TEXT, body)).events
    for index in range(3):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert own[0]["text"] == "The quick"
        assert own[0]["logprobs"]["token_logprobs"][0] is None


# -- engine failures


async def test_engine_error_before_the_first_byte_is_a_status(serve):
    server = await serve()
    server.engine.step_gate.clear()
    for stream in (False, True):
        asking = asyncio.create_task(server.post(CHAT, LONG_CHAT | {"stream": stream}))
        await server.until(lambda: server.engine.open_stream_count == 1)
        server.engine.fail_choice(0, "The logits were not numbers.")
        answer = await asking
        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert answer.error["message"] == "The logits were not numbers."
    await server.wait_until_idle()


async def test_failed_choice_fails_the_request_and_cancels_the_others(serve):
    server = await serve(tick=0.001)
    asking = asyncio.create_task(server.post(CHAT, LONG_CHAT | {"stream": True, "n": 3}))
    await server.until(lambda: server.engine.stats.generated_tokens > 60)
    server.engine.fail_choice(1, "Broken.")
    answer = await asking
    assert answer.events[-1] == {"error": {"message": "Broken.", "type": "server_error", "param": None, "code": None}}
    await server.wait_until_idle()


async def test_engine_crash_ends_every_stream_and_readiness(serve):
    server = await serve(tick=0.001)
    streams = [asyncio.create_task(server.post(CHAT, LONG_CHAT | {"stream": True})) for _ in range(20)]
    whole = asyncio.create_task(server.post(CHAT, LONG_CHAT))
    await server.until(lambda: server.engine.stats.generated_tokens > 500)
    server.engine.crash_engine("The engine process was killed by SIGKILL.")
    for answer in await asyncio.gather(*streams):
        assert answer.status == 200
        assert "SIGKILL" in answer.events[-1]["error"]["message"]
    assert (await whole).status == 503
    assert (await server.post(CHAT, HELLO_CHAT)).status == 503
    assert (await server.get("/health/ready")).status == 503
    assert (await server.get("/health/live")).status == 200
    await server.until(lambda: not server.service.open_requests)


@pytest.mark.parametrize("seed", range(4))
async def test_every_choice_ends_once_even_if_the_engine_crashes(serve, seed):
    """With random requests and an engine crash at a random moment, each choice ends once or the request fails."""
    rng = random.Random(seed)
    server = await serve(max_batch=5, tick=0.001)

    async def ask():
        await asyncio.sleep(rng.random() * 0.2)
        body = {
            "prompt": [f"prompt {n}" for n in range(rng.choice([1, 1, 3]))],
            "n": rng.choice([1, 2]),
            "max_tokens": rng.choice([0, 1, 7, 40]),
            "stream": rng.random() < 0.6,
            "stop": rng.choice([None, ["pro"], ["mpt 1", "zz"]]),
            "echo": True,
            "logprobs": rng.choice([None, 1]),
        }
        answer = await server.post(TEXT, body)
        choices = range(len(body["prompt"]) * body["n"])
        if not body["stream"]:
            assert answer.status == 503 or [c["index"] for c in answer.json["choices"]] == list(choices)
            return
        if answer.status == 503:
            return
        events = answer.events
        failed = "error" in events[-1]
        ends = [e["choices"][0]["index"] for e in events[: -1 if failed else None] if e["choices"][0]["finish_reason"]]
        assert len(set(ends)) == len(ends)
        assert failed or sorted(ends) == list(choices)
        assert not any("error" in event for event in events[:-1])

    asking = [asyncio.create_task(ask()) for _ in range(40)]
    await asyncio.sleep(0.05 + 0.1 * seed)
    if seed:
        server.engine.crash_engine()
    await asyncio.gather(*asking)
    await server.until(lambda: not server.service.open_requests)
    assert server.model.used_slots == 0 and not server.engine.open_stream_count


# -- shutdown


async def test_drain_finishes_running_streams_and_rejects_new_requests(serve):
    server = await serve(tick=0.001)
    running = asyncio.create_task(server.post(CHAT, LONG_CHAT | {"max_tokens": 200, "stream": True}))
    await server.until(lambda: server.engine.stats.generated_tokens > 20)
    draining = asyncio.create_task(server.service.drain_models())
    await server.until(lambda: server.service.shutting_down)
    refused = await server.post(CHAT, HELLO_CHAT)
    assert (refused.status, "retry-after" in refused.headers) == (503, True)
    ready = await server.get("/health/ready")
    assert (ready.status, ready.json["status"]) == (503, "draining")
    assert (await server.get("/health/live")).status == 200
    events = (await running).events
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    await draining


@pytest.mark.parametrize("stream", [False, True])
async def test_drain_timeout_fails_running_requests(serve, stream):
    server = await serve(tick=0.001, drain=0.05)
    bodies = [
        (CHAT, LONG_CHAT | {"stream": stream}),
        (TEXT, {"prompt": ["a", "b"], "max_tokens": 3000, "stream": stream}),
    ]
    running = [asyncio.create_task(server.post(path, body)) for path, body in bodies]
    await server.until(lambda: server.engine.stats.generated_tokens > 60)
    await server.service.drain_models()
    for answer in await asyncio.gather(*running):
        error = answer.events[-1]["error"] if stream else answer.error
        assert "shutting down" in error["message"]
        assert answer.status == (200 if stream else 503)
    await server.wait_until_idle()


async def test_drain_timeout_fails_queued_requests(serve):
    server = await serve(drain=0.01)
    server.engine.step_gate.clear()
    waiting = asyncio.create_task(server.post(CHAT, HELLO_CHAT | {"stream": True}))
    await server.until(lambda: server.engine.open_stream_count == 1)
    await server.service.drain_models()
    assert (await waiting).status == 503
    assert server.engine.open_stream_count == 0


async def test_aborted_request_reports_its_reason(serve):
    server = await serve()
    server.engine.step_gate.clear()
    waiting = asyncio.create_task(server.post(CHAT, HELLO_CHAT))
    await server.until(lambda: len(server.service.open_requests) == 1)
    next(iter(server.service.open_requests)).fail_request(NotReady("Because."))
    assert (await waiting).error["message"] == "Because."


# -- stopped, slow and silent clients


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [LONG_CHAT, LONG_CHAT | {"n": 2}], ids=["one", "two"])
async def test_stopped_request_returns_its_text_so_far(serve, stream, body):
    server = await serve(tick=0.001)
    pending = asyncio.create_task(server.post(CHAT, body | {"stream": stream}))
    await server.until(lambda: server.engine.stats.generated_tokens > 40)
    (generation,) = server.service.open_requests
    generation.finish_early()
    answer = await pending
    assert answer.status == 200
    assert answer.body.count(b'"finish_reason":"abort"') == body.get("n", 1)
    await server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_max_time_returns_the_text_so_far(serve, stream):
    server = await serve(tick=0.001)
    answer = await server.post(CHAT, LONG_CHAT | {"stream": stream, "max_time": 0.1})
    assert answer.status == 200 and answer.body.count(b'"finish_reason":"length"') == 1
    await server.wait_until_idle()
    ranked = {"prompt": "a", "max_tokens": 3000, "best_of": 3, "n": 1, "stream": stream, "max_time": 0.1}
    assert (await server.post(TEXT, ranked)).body.count(b'"finish_reason":"length"') == 1
    searched = {"prompt": "a", "max_tokens": 900, "use_beam_search": True, "best_of": 4, "n": 2, "stream": stream}
    for more in ({}, {"prompt_logprobs": 1}, {"prompt": ["a", "b"]}):
        answer = await server.post(TEXT, searched | {"max_time": 0.05} | more)
        ended = answer.body.count(b'"finish_reason":"length"')
        assert (answer.status, ended) == (200, 4 if "prompt" in more else 2), answer.body
    server.engine.step_gate.clear()  # the time ends before the first token
    unstarted = await server.post(CHAT, LONG_CHAT | {"max_time": 0.05, "n": 2})
    assert [choice["finish_reason"] for choice in unstarted.json["choices"]] == ["length"] * 2
    assert unstarted.json["usage"]["completion_tokens"] == 0
    server.engine.step_gate.set()
    await server.wait_until_idle()


async def test_request_timeout_header_ends_a_request_with_408(serve):
    server = await serve(tick=0.001)
    late = await server.call("POST", CHAT, LONG_CHAT, {"x-request-timeout": "0.05"})
    assert late.status == 408 and "the time that the request allowed" in late.error["message"]
    for path, body in (("/tgi/generate", {"inputs": "a", "parameters": {"max_new_tokens": 3000}}), (CHAT, LONG_CHAT)):
        server.engine.step_gate.clear()  # the limit applies to queued requests too
        assert (await server.call("POST", path, body, {"x-request-timeout": "0.05"})).status == 408
        server.engine.step_gate.set()
    assert (await server.call("POST", CHAT, HELLO_CHAT, {"x-request-timeout": "60"})).status == 200
    for wrong in ("0", "-1", "soon", "1e3", "9" * 40):
        refused = await server.call("POST", CHAT, HELLO_CHAT, {"x-request-timeout": wrong})
        assert refused.status == 400 and "X-Request-Timeout" in refused.error["message"]
        assert wrong[:20] in refused.error["message"] and "1000000000" in refused.error["message"]
    await server.wait_until_idle()


async def test_cuts_off_an_http_client_that_does_not_read(serve):
    server = await serve(
        reply=lambda work, index: [70] * work.max_tokens,
        write_timeout=0.2,
        info=msgspec.structs.replace(MODEL_INFO, max_model_len=1 << 17),
        body_limit=1 << 26,
    )
    before = await server.control()
    connection = await server.connect()
    connection.writer.transport.pause_reading()
    body = {"prompt": [70] * 1000, "max_tokens": 60_000, "stream": True, "logprobs": 5}
    await connection.send(build_request("POST", TEXT, body))
    await server.until(lambda: server.engine.open_stream_count == 1)
    for _ in range(100):
        if not server.engine.open_stream_count:
            break
        await asyncio.sleep(0.1)
    await server.wait_until_idle()
    connection.writer.transport.resume_reading()
    assert not (await connection.ended()).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
    assert await server.control() == before


async def test_silent_stream_gets_ping_comments(serve):
    server = await serve(ping_interval=0.02)
    server.engine.step_gate.clear()
    connection = await server.connect()
    await connection.send(build_request("POST", CHAT, HELLO_CHAT | {"stream": True}))
    assert (await connection.head())[0] == 200
    assert b": ping\n\n" in await connection.reader.readuntil(b"ping\n\n")
    server.engine.step_gate.set()
    rest = await connection.reader.readuntil(b"[DONE]\n\n")
    assert b'"finish_reason":"length"' in rest
    connection.close()


async def test_stream_whose_pings_fail_ends_with_an_error(serve, monkeypatch, caplog):
    pings = iter([b": ping\n\n"])  # a second one raises StopIteration, which becomes a RuntimeError in the task
    monkeypatch.setattr(Reply, "render_ping", lambda self: next(pings))
    server = await serve(ping_interval=0.02)
    before = await server.control()
    server.engine.step_gate.clear()
    connection = await server.connect()
    await connection.send(build_request("POST", CHAT, HELLO_CHAT | {"stream": True}))
    async with asyncio.timeout(20):
        answer = await connection.answer()
    assert answer.status == 200 and answer.events[-1]["error"]["message"] == SERVER_ERROR
    connection.close()
    assert "The pings of request" in caplog.text
    server.engine.step_gate.set()
    await server.wait_until_idle()
    assert await server.control() == before


async def test_connection_serves_several_requests_in_turn(serve):
    server = await serve()
    connection = await server.connect()
    for stream in (True, False, True):
        await connection.send(build_request("POST", CHAT, HELLO_CHAT | {"stream": stream}))
        answer = await connection.answer()
        assert answer.status == 200
        assert answer.events if stream else answer.json
    connection.close()


async def test_pipelined_requests_are_answered_in_order(serve):
    server = await serve()
    connection = await server.connect()
    bodies = [{"prompt": f"p{number}", "max_tokens": 2} for number in range(3)]
    await connection.send(b"".join(build_request("POST", TEXT, body) for body in bodies))
    texts = [json.loads((await connection.answer()).body)["choices"][0]["text"] for _ in bodies]
    assert texts == ["p0", "p1", "p2"]
    connection.close()


# -- reasoning, content and tool calls

REASONING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% if tools %}<tool_call></tool_call>{% endif %}"
)
REASONING_AND_CALL = (
    '<think>\nWhat is it?\n</think>\n\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
)


@pytest.fixture
async def reasoning_server(serve, folder):
    """A server whose model thinks and calls a tool."""
    tokenizer = Tokenizer.from_folder(folder)
    server = await serve(reply=lambda work, index: tokenizer.encode(REASONING_AND_CALL, False))
    pipeline = server.model.text_pipeline
    pipeline.template = ChatTemplate({"default": REASONING_TEMPLATE})
    pipeline.markup = pipeline.answer_compiler.markup = detect_markup(REASONING_TEMPLATE)
    return server


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


async def test_chat_splits_reasoning_content_and_tool_calls(reasoning_server):
    body = HELLO_CHAT | {"tools": TOOLS, "max_tokens": 500, "chat_template_kwargs": {"enable_thinking": True}}
    choice = (await reasoning_server.post(CHAT, body)).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["reasoning_content"].strip() == "What is it?"
    assert message["content"].strip() == "Let me see."
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1}


async def test_streamed_reasoning_and_tool_calls_equal_the_whole_answer(reasoning_server):
    body = HELLO_CHAT | {"tools": TOOLS, "max_tokens": 500, "reasoning_effort": "high"}
    message = (await reasoning_server.post(CHAT, body)).json["choices"][0]["message"]
    events = (
        await reasoning_server.post(CHAT, body | {"stream": True, "stream_options": {"include_usage": True}})
    ).events
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [call["function"].get("name") for call in calls if "id" in call] == ["add"]
    arguments = "".join(call["function"].get("arguments", "") for call in calls)
    assert arguments == message["tool_calls"][0]["function"]["arguments"]
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


ALL_CHAT_PATHS = [
    fill_path(path)
    for way, path in mount_table(universal_mounts())
    if way == "POST" and path.endswith("chat/completions")
]


@pytest.mark.parametrize("path", ALL_CHAT_PATHS)
async def test_truncated_tool_call_finishes_with_length_in_every_api(reasoning_server, folder, path):
    cut = len(Tokenizer.from_folder(folder).encode(REASONING_AND_CALL[: REASONING_AND_CALL.index("1}}")], False))
    for tokens, reasons in ((cut, {"length"}), (500, {"tool_calls", "stop"})):
        body = HELLO_CHAT | {"tools": TOOLS, "max_tokens": tokens}
        (choice,) = (await reasoning_server.post(path, body)).json["choices"]
        assert choice["finish_reason"] in reasons and choice["message"]["tool_calls"][0]["function"]["name"] == "add"
        events = (await reasoning_server.post(path, body | {"stream": True})).events
        finish_reasons = [
            choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]
        ]
        assert set(finish_reasons) <= reasons and (
            finish_reasons or "tgi" in path
        )  # TGI's streamed calls have no finish_reason


async def test_tool_call_is_plain_text_without_tools(reasoning_server):
    message = (await reasoning_server.post(CHAT, HELLO_CHAT | {"max_tokens": 500})).json["choices"][0]["message"]
    assert "<tool_call>" in message["content"] and "tool_calls" not in message
    answer = await reasoning_server.post(CHAT, HELLO_CHAT | {"max_tokens": 500, "tools": TOOLS, "tool_choice": "none"})
    assert "tool_calls" not in answer.json["choices"][0]["message"]


async def test_completions_keep_reasoning_and_tool_calls_in_the_text(reasoning_server):
    choice = (await reasoning_server.post(TEXT, {"prompt": "a", "max_tokens": 500})).json["choices"][0]
    assert choice["text"] == REASONING_AND_CALL


# -- huge texts


async def test_tokenizing_a_huge_text_returns_its_memory(serve):
    """Tokenizing at once would need over a hundred times the size of the text."""
    server = await serve()

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    body = json.dumps({"prompt": "a b c " * 180_000}).encode()
    before = resident_bytes()
    assert (await server.call("POST", "/tokenize", body)).status == 200
    await server.until(lambda: resident_bytes() - before < 50 << 20)
