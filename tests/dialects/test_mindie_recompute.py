"""Recompute bodies, from which another instance resumes a request: they round-trip, and wrong ones are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.dialects.instance_plane import OriginalRequest
from parley.dialects.mindie.pd.instance import instance_refusal
from parley.dialects.mindie.pd.recompute import ORIGIN_MEMBER, read_recompute_body, write_recompute_body
from parley.errors import CommandRefused
from parley.types import EngineOutput, TokenScore

CHAT, TRITON = "/v1/chat/completions", "/v2/models/m/generate"
REQUEST_BODIES: list[tuple[str, dict[str, Any]]] = [
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
    st.sampled_from(REQUEST_BODIES),
    TOKENS,
    st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4),
    st.integers(0, 99),
)
def test_recompute_body_round_trips(
    form: tuple[str, dict], prompt: list[int], steps: list[list[int]], seed: int
) -> None:
    """Resuming from a wrong body would repeat or lose tokens in the client's stream."""
    path, body = form
    outputs = [[(0, EngineOutput("", 0, step, scores=[TokenScore(-1.0, 1)] * len(step)))] for step in steps]
    origin = OriginalRequest(json.dumps(body).encode(), outputs, ID, 1_700_000_000)
    recompute_body = write_recompute_body(path, origin, prompt, seed)
    from_parley = read_recompute_body(path, recompute_body)
    assert (
        from_parley.body,
        from_parley.prompt_ids,
        from_parley.prior_outputs,
        from_parley.request_uuid,
        from_parley.created,
    ) == (
        origin.body,
        None,
        outputs,
        ID,
        origin.created,
    )
    # A peer that is not parley knows only the token ids.
    written_members = json.loads(recompute_body)
    del written_members[ORIGIN_MEMBER]
    from_peer = read_recompute_body(path, json.dumps(written_members).encode())
    token_ids = [token_id for step in steps for token_id in step]
    assert from_peer.prompt_ids == prompt
    assert [
        token_id for batch in from_peer.prior_outputs for _, output in batch for token_id in output.token_ids
    ] == token_ids
    parameters = (
        written_members["inputs"][0]["parameters"]
        if path.endswith("m/infer")
        else written_members.get("parameters", written_members)
    )
    assert parameters["seed"] == body.get("parameters", {}).get("seed", seed)
    resumed_body = json.loads(from_peer.body)
    assert "origin_inputs" not in resumed_body and "decodeTime" not in resumed_body.get("parameters", {})
    unchanged = set(body) - {"messages", "prompt", "inputs", "parameters", "input_id", "text_input"}
    assert all(resumed_body[name] == body[name] for name in unchanged)


def test_recompute_body_has_mindie_format() -> None:
    origin = OriginalRequest(
        b'{"messages":[{"role":"user","content":"Hi"}],"stream":true}', [[(0, EngineOutput("", 0, [7, 8]))]], ID, 1
    )
    written_members = json.loads(write_recompute_body(CHAT, origin, [4, 5, 6], 11))
    del written_members[ORIGIN_MEMBER]
    assert written_members == {"messages": "3,4,5,6,7,8", "stream": True, "seed": 11}
    resumed = read_recompute_body("/generate", b'{"prompt":"2,5,6,7","origin_inputs":"Hello","stream":true}')
    assert resumed.prompt_ids == [5, 6] and json.loads(resumed.body) == {"prompt": "Hello", "stream": True}
    assert resumed.prior_outputs == [[(0, EngineOutput("", 0, [7]))]]
    tensor = {"name": "x", "shape": [1, 4], "datatype": "UINT32", "data": [2, 5, 6, 7]}
    resumed = read_recompute_body("/v2/models/m/infer", json.dumps({"inputs": [tensor]}).encode())
    assert json.loads(resumed.body)["inputs"][0] == tensor | {"shape": [1, 2], "data": [5, 6]}


TIMES = {"firstTokenCost": 5, "decodeTime": [1]}
FAILED_TO_GET = "Failed to get "
INVALID_INPUT = FAILED_TO_GET + "token from input: "


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (CHAT, {"messages": []}, "Messages MUST be a string for recompute"),
        (CHAT, {"messages": [], "tools": [{}]}, "Messages must be a string for recompute"),
        (CHAT, {"messages": ""}, INVALID_INPUT + "it is not a list of numbers separated by commas"),
        (CHAT, {"messages": "1,-1"}, INVALID_INPUT + "it is not a list of numbers separated by commas"),
        (CHAT, {"messages": "2,1"}, INVALID_INPUT + "the prompt cannot have 2 of 1 tokens"),
        (CHAT, {"messages": "0,1"}, INVALID_INPUT + "the prompt cannot have 0 of 1 tokens"),
        ("/generate", {"inputs": "1,2"}, FAILED_TO_GET + "parameter `origin_inputs` in json body"),
        ("/generate", {"prompt": "1,2"}, FAILED_TO_GET + "parameter `origin_inputs` in given json body"),
        ("/infer", {"inputs": 5}, INVALID_INPUT + "inputs is not a string"),
        (TRITON, {"text_input": "1,2,3,4"}, FAILED_TO_GET + "parameter firstTokenCost in json body"),
        (TRITON, {"text_input": "1,2,3,4,5", "parameters": TIMES}, "Parameter decodeTime length is invalid."),
        ("/v2/models/m/infer", {"inputs": []}, INVALID_INPUT + "data is not a list of token ids"),
        ("/v2/models/m/infer", {"inputs": [{"data": [1, "a"]}]}, INVALID_INPUT + "data is not a list of token ids"),
        (CHAT, {"messages": "1,2", ORIGIN_MEMBER: "!"}, INVALID_INPUT + "parley_origin cannot be read (Error)"),
        (CHAT, {"messages": "1,2", ORIGIN_MEMBER: 5}, INVALID_INPUT + "parley_origin cannot be read (TypeError)"),
    ],
)
def test_recompute_refuses_body_it_cannot_resume(path: str, body: dict[str, Any], text: str) -> None:
    with pytest.raises(CommandRefused) as raised:
        read_recompute_body(path, json.dumps(body).encode())
    answer = instance_refusal(raised.value)
    assert answer.status == 422 and json.loads(answer.body) == {"error": text, "error_type": "Input Validation Error"}


@given(st.sampled_from([path for path, _ in REQUEST_BODIES]), st.binary(max_size=30))
def test_recompute_leaves_invalid_json_to_the_interface(path: str, body: bytes) -> None:
    try:
        assert read_recompute_body(path, body).body
    except CommandRefused as refused:
        assert instance_refusal(refused).status == 422
    except AssertionError:
        assert not body
