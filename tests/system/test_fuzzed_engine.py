"""Odd bodies for a server process with the built-in model: it answers others meanwhile, and keeps neither memory nor
requests. ``PARLEY_NIGHTLY=1`` sends many more."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import BODY_CODINGS, body_codings, encode, fuzz_settings, raw_bytes
from support.odd_bodies import mindie_bodies, openai_bodies, tgi_bodies
from test_hostile_bodies import continuous_probes, send_body

MAX_EXAMPLES = 3000 if os.environ.get("PARLEY_NIGHTLY") else 150
KEPT_LIMIT = 100 << 20  # bytes that the server and its processes may grow by
CONTROL = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def shorten_answer(body: dict[str, Any]) -> dict[str, Any]:
    """Limit an answer that would fill the context: TGI has no other default."""
    parameters = body.get("parameters") or {}
    return body | {"parameters": parameters | {"max_new_tokens": 4}} if isinstance(parameters, dict) else body


calls = st.one_of(
    st.tuples(
        st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/vllm/pooling"]),
        openai_bodies.map(lambda body: {"max_tokens": 4} | body),
    ),
    st.tuples(
        st.sampled_from(["/generate", "/tgi/generate_stream", "/tgi/chat_tokenize"]), tgi_bodies.map(shorten_answer)
    ),
    st.tuples(
        st.sampled_from(["/mindie/infer", "/mindie/generate", "/mindie/v1/tokenizer"]),
        mindie_bodies.map(shorten_answer),
    ),
).map(lambda call: (call[0], encode(call[1])))
odd_calls = calls | st.tuples(st.sampled_from(["/v1/completions", "/generate", "/mindie/infer"]), raw_bytes)


def test_odd_bodies_disturb_no_engine_and_no_client(server):
    (engine,) = server.children()
    control = server.post("/v1/completions", CONTROL)[1]["choices"]
    before = server.resident_bytes()

    @fuzz_settings(1)
    @given(call=odd_calls, coding=body_codings)
    def fuzz(call: tuple[str, bytes], coding: str) -> None:
        path, body = call
        name, compress = BODY_CODINGS[coding]
        status = send_body(server.url, path, compress(body), {"content-encoding": name} if name else {})
        assert 200 <= status < 500, (path, body, coding)

    with continuous_probes(server.url):
        fuzz()
    assert server.wait_for(
        lambda: server.metric("vllm:num_requests_running") == server.metric("vllm:kv_cache_usage_perc") == 0
    )
    assert server.post("/v1/completions", CONTROL)[1]["choices"] == control
    assert engine in server.children() and server.is_ready()
    assert server.resident_bytes() - before < KEPT_LIMIT
