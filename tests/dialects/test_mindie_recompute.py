"""Recompute bodies, from which another instance resumes a request: they round-trip, and wrong ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.dialects.instance_plane import Origin
from parley.dialects.mindie.instance import refusal
from parley.dialects.mindie.recompute import ORIGIN, read, write
from parley.errors import OrderRefused
from parley.types import Output, Score

CHAT, TRITON = "/v1/chat/completions", "/v2/models/m/generate"
FORMS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "tools": [], "stop": ["x"], "stream": True}),
    ("/v1/completions", {"prompt": "Hi", "temperature": 0.5}),
    ("/generate", {"prompt": "Hi", "max_tokens": 9}),
    ("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 9}}),
    ("/generate_stream", {"inputs": "Hi"}),
    ("/infer", {"inputs": "Hi", "stream": True, "parameters": {"seed": 5}}),
    ("/infer_token", {"input_id": [1, 2]}),
    ("/v2/models/m/generate_stream", {"text_input": "Hi", "id": "a"}),
    ("/v2/models/m/infer", {"inputs": [{"name": "input0", "shape": [1, 2], "datatype": "UINT32", "data": [1, 2]}]}),
]
ID = "0123456789abcdef" * 2
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)


@given(
    st.sampled_from(FORMS), TOKENS, st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4), st.integers(0, 99)
)
def test_recompute_body_round_trips(
    form: tuple[str, dict], prompt: list[int], steps: list[list[int]], seed: int
) -> None:
    """Resuming from a wrong body would repeat or lose tokens in the client's stream."""
    path, body = form
    past = [[(0, Output("", 0, step, scores=[Score(-1.0, 1)] * len(step)))] for step in steps]
    origin = Origin(json.dumps(body).encode(), past, ID, 1_700_000_000)
    written = write(path, origin, prompt, seed)
    exact = read(path, written)
    assert (exact.body, exact.prompt, exact.past, exact.unique, exact.created) == (
        origin.body,
        None,
        past,
        ID,
        origin.created,
    )
    # A peer that is not parley knows only the token ids.
    told = json.loads(written)
    del told[ORIGIN]
    opened = read(path, json.dumps(told).encode())
    drawn = [id for step in steps for id in step]
    assert opened.prompt == prompt
    assert [id for batch in opened.past for _, output in batch for id in output.token_ids] == drawn
    values = told["inputs"][0]["parameters"] if path.endswith("m/infer") else told.get("parameters", told)
    assert values["seed"] == body.get("parameters", {}).get("seed", seed)
    again = json.loads(opened.body)
    assert "origin_inputs" not in again and "decodeTime" not in again.get("parameters", {})
    kept = set(body) - {"messages", "prompt", "inputs", "parameters", "input_id", "text_input"}
    assert all(again[name] == body[name] for name in kept)


def test_recompute_body_has_mindie_format() -> None:
    origin = Origin(
        b'{"messages":[{"role":"user","content":"Hi"}],"stream":true}', [[(0, Output("", 0, [7, 8]))]], ID, 1
    )
    told = json.loads(write(CHAT, origin, [4, 5, 6], 11))
    del told[ORIGIN]
    assert told == {"messages": "3,4,5,6,7,8", "stream": True, "seed": 11}
    opened = read("/generate", b'{"prompt":"2,5,6,7","origin_inputs":"Hello","stream":true}')
    assert opened.prompt == [5, 6] and json.loads(opened.body) == {"prompt": "Hello", "stream": True}
    assert opened.past == [[(0, Output("", 0, [7]))]]
    tensor = {"name": "x", "shape": [1, 4], "datatype": "UINT32", "data": [2, 5, 6, 7]}
    opened = read("/v2/models/m/infer", json.dumps({"inputs": [tensor]}).encode())
    assert json.loads(opened.body)["inputs"][0] == tensor | {"shape": [1, 2], "data": [5, 6]}


TIMES = {"firstTokenCost": 5, "decodeTime": [1]}
GET = "Failed to get "
READ = GET + "token from input: "


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (CHAT, {"messages": []}, "Messages MUST be a string for recompute"),
        (CHAT, {"messages": [], "tools": [{}]}, "Messages must be a string for recompute"),
        (CHAT, {"messages": ""}, READ + "it is not a list of numbers separated by commas"),
        (CHAT, {"messages": "1,-1"}, READ + "it is not a list of numbers separated by commas"),
        (CHAT, {"messages": "2,1"}, READ + "the prompt cannot have 2 of 1 tokens"),
        (CHAT, {"messages": "0,1"}, READ + "the prompt cannot have 0 of 1 tokens"),
        ("/generate", {"inputs": "1,2"}, GET + "parameter `origin_inputs` in json body"),
        ("/generate", {"prompt": "1,2"}, GET + "parameter `origin_inputs` in given json body"),
        ("/infer", {"inputs": 5}, READ + "inputs is not a string"),
        (TRITON, {"text_input": "1,2,3,4"}, GET + "parameter firstTokenCost in json body"),
        (TRITON, {"text_input": "1,2,3,4,5", "parameters": TIMES}, "Parameter decodeTime length is invalid."),
        ("/v2/models/m/infer", {"inputs": []}, READ + "data is not a list of token ids"),
        ("/v2/models/m/infer", {"inputs": [{"data": [1, "a"]}]}, READ + "data is not a list of token ids"),
        (CHAT, {"messages": "1,2", ORIGIN: "!"}, READ + "parley_origin cannot be read (Error)"),
        (CHAT, {"messages": "1,2", ORIGIN: 5}, READ + "parley_origin cannot be read (TypeError)"),
    ],
)
def test_recompute_refuses_body_it_cannot_resume(path: str, body: dict[str, Any], text: str) -> None:
    with pytest.raises(OrderRefused) as raised:
        read(path, json.dumps(body).encode())
    answer = refusal(raised.value)
    assert answer.status == 422 and json.loads(answer.body) == {"error": text, "error_type": "Input Validation Error"}


@given(st.sampled_from([path for path, _ in FORMS]), st.binary(max_size=30))
def test_recompute_leaves_invalid_json_to_the_interface(path: str, body: bytes) -> None:
    try:
        assert read(path, body).body
    except OrderRefused as refused:
        assert refusal(refused).status == 422
    except AssertionError:
        assert not body
