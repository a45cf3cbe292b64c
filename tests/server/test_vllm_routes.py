"""vLLM's API through the whole server: its routes, the path it shares, and what of it all other APIs' clients see."""

import asyncio

import pytest
from served import HELLO, request

from parley.errors import EngineError

EOS = 2
PROMPT = "Hello there, my friend"


def ending(work, index):
    """The prompt's tokens, then the end."""
    return [*work.token_ids, EOS][: work.max_tokens]


@pytest.fixture
async def served(serve):
    return await serve(reply=ending)


# -- the demo server


async def test_one_path_for_three_apis(served):
    whole = {"text": [PROMPT + PROMPT]}
    for body in ({"prompt": PROMPT}, {"prompt": PROMPT, "inputs": "b"}, {"prompt": PROMPT, "inputs": None}):
        assert (await served.post("/generate", body)).json == whole
    parameters = {"return_full_text": False}
    assert (await served.post("/generate", {"inputs": "a", "parameters": parameters})).json == {"generated_text": "a"}
    assert (await served.post("/generate", {"inputs": "a", "prompt": None})).status == 200
    for body in ({}, b"{", b"[]"):
        assert (await served.post("/generate", body)).body.startswith(b"Failed to ")
    answer = await served.post("/generate", {"prompt": 5})
    assert (answer.status, answer.error["type"]) == (400, "Bad Request")
    for prefix in ("/vllm", "/vllm-0.6.3"):
        assert (await served.post(prefix + "/generate", {"prompt": PROMPT})).json == whole
        answer = await served.post(prefix + "/generate", {"inputs": "a"})
        assert (answer.status, answer.body) == (500, b"Internal Server Error")
    too_long = {"prompt": "a" * 5000, "max_tokens": 1}
    assert (await served.post("/vllm/generate", too_long)).status == 500
    answer = await served.post("/generate", too_long)
    assert (answer.status, answer.error["param"]) == (400, "input_tokens")


@pytest.mark.parametrize(("prefix", "end"), [("", b"\n"), ("/vllm", b"\n"), ("/vllm-0.6.3", b"\0")])
async def test_records_of_a_stream(served, prefix, end):
    answer = await served.post(prefix + "/generate", {"prompt": "Zwölf", "stream": True, "n": 2})
    assert answer.status == 200 and "content-type" not in answer.headers
    *records, rest = answer.body.split(end)
    assert rest == b"" and len(records) > 1
    assert records[-1] == b'{"text": ["Zw\\u00f6lfZw\\u00f6lf", "Zw\\u00f6lfZw\\u00f6lf"]}'
    assert all(record.startswith(b'{"text": ["Zw\\u00f6lf') for record in records)


async def test_a_stream_that_fails_is_broken_off(serve):
    served = await serve()
    served.engine.gate.clear()
    connection = await served.connect()
    await connection.send(request("POST", "/generate", {"prompt": "a", "stream": True}))
    await served.until(lambda: served.engine.in_flight == 1)
    served.engine.gate.set()
    await connection.head()
    for generation in list(served.service.open):
        generation.abort(EngineError("gone"))
    assert not (await connection.ended()).endswith(b"0\r\n\r\n")
    connection.close()


# -- control


async def test_the_prefix_cache_is_reset_only_when_nothing_runs_or_may_be_put_back(serve):
    served = await serve()
    for prefix in ("", "/vllm"):
        assert (await served.post(prefix + "/reset_prefix_cache")).json == {"success": True}
    served.engine.gate.clear()
    waiting = asyncio.create_task(served.post("/v1/chat/completions", HELLO))
    await served.until(lambda: served.engine.in_flight == 1)
    served.engine.gate.set()
    await waiting
    answer = await served.post("/reset_prefix_cache?reset_running_requests=perhaps")
    assert (answer.status, answer.error["param"]) == (400, "body.reset_running_requests")
    assert (await served.post("/reset_prefix_cache?reset_running_requests=true&x=1")).json == {"success": True}


async def test_a_reset_that_nobody_answers_ends_with_the_engine(serve):
    served = await serve()
    served.engine._send = lambda message: None
    asked = asyncio.create_task(served.post("/reset_prefix_cache"))
    await served.until(lambda: served.engine._resets)
    served.engine.crash()
    assert (await asked).json == {"success": False}
    assert (await served.post("/reset_prefix_cache")).status == 503
