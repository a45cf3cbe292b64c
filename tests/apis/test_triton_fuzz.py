"""Odd bodies for Triton's routes. Where strict, JSON of a wrong type is a 500, as Triton answers; nothing else is."""

import json
import re
import struct
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import encode, fuzz_settings, raw_bytes, run_in_loop
from support.member_strategies import json_values, scalars

from parley.dialects.triton import DIALECT
from parley.dialects.triton.model import INPUTS, OUTPUTS
from parley.dialects.triton.sampling import KNOWN_PARAMETERS
from parley.dialects.triton.tensors import STRUCT_FORMATS

MODEL = "/v2/models/tiny"
ROUTES = [route.path.replace("{model}", "tiny") for route in DIALECT.routes if route.method == "POST"]
ROUTES = [path for path in ROUTES if "{" not in path]
PARSE_ERROR = re.compile(
    r"(Converting keyword: 'parameters': )?(failed to parse|Unable to parse|Expected JSON|attempt to access)"
)

prefixes = st.sampled_from(["", "/triton"])  # lenient and strict
member_names = st.sampled_from(sorted({*KNOWN_PARAMETERS, *INPUTS, "id", "parameters", "ready"})) | st.text(max_size=5)
odd_members = st.dictionaries(member_names, json_values, max_size=4)
valid_members = st.sampled_from([{}, {"text_input": "a"}, {"text_input": "a", "stream": True}])
generate_bodies = st.builds(
    lambda a, b, c: a | b | c,
    valid_members,
    st.fixed_dictionaries({}, optional={"parameters": odd_members}),
    odd_members,
)

tensor_sizes = st.integers(0, 3) | st.sampled_from([-1, 2**31, 2**63, 2**64, True, None, "1"])
tensor_parameters = st.fixed_dictionaries(
    {}, optional={"binary_data_size": tensor_sizes, "shared_memory_region": scalars, "x": json_values}
)
odd_tensors = st.fixed_dictionaries(
    {"name": member_names, "datatype": st.sampled_from(["BYTES", "BYTES", *STRUCT_FORMATS, "X"]) | scalars},
    optional={
        "shape": st.sampled_from([[1], [1, 1], [], [0], [2], [2**40, 2**40]])
        | st.lists(tensor_sizes, max_size=3)
        | json_values,
        "data": st.lists(json_values, max_size=2) | json_values,
        "parameters": tensor_parameters | json_values,
    },
)
text_tensors = st.just({"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]})
requested_outputs = st.fixed_dictionaries(
    {"name": st.sampled_from(sorted(OUTPUTS)) | scalars},
    optional={
        "parameters": st.dictionaries(st.sampled_from(["binary_data", "classification"]), json_values, max_size=2)
    },
)
infer_bodies = st.fixed_dictionaries(
    {"inputs": st.lists(text_tensors | odd_tensors, max_size=3) | json_values},
    optional={
        "outputs": st.lists(requested_outputs, max_size=3) | json_values,
        "id": scalars,
        "parameters": odd_members | json_values,
    },
)
header_lengths = st.none() | st.sampled_from(["0", "1", "-1", "x", "9" * 30, ""]) | st.integers(0, 300).map(str)


async def check_triton(server: Any, path: str, body: bytes, length: str | None = None) -> None:
    headers = {} if length is None else {"Inference-Header-Content-Length": length}
    answer = await server.call("POST", path, body, headers)

    strict = path.startswith("/triton")
    if answer.status >= 400:
        streamed = answer.headers["content-type"].startswith("text/event-stream")
        error = json.loads(answer.body.removeprefix(b"data: ")) if streamed else answer.json
        assert list(error) == ["error"] and 0 < len(error["error"]) < 2000
        assert "0x" not in error["error"] and "Traceback" not in error["error"]
        known = answer.status in (400, 404) or path.endswith(("/load", "/unload")) or "memory" in path
        assert known or (strict and PARSE_ERROR.match(error["error"])), (path, body, answer.body)
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        assert strict or b"error" not in answer.body, (path, body)


async def test_triton_odd_bodies_earn_a_500_only_for_wrong_json_types_where_strict(serve):
    server = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))
    before = await server.control()

    @fuzz_settings(4)
    @given(prefix=prefixes, path=st.sampled_from(ROUTES), body=generate_bodies.map(encode) | raw_bytes)
    async def objects(prefix, path, body):
        await check_triton(server, prefix + path, body)

    @fuzz_settings(4)
    @given(
        prefix=prefixes,
        body=infer_bodies.map(encode) | raw_bytes,
        tail=st.binary(max_size=12),
        length=header_lengths,
        exact=st.booleans(),
    )
    async def infer(prefix, body, tail, length, exact):
        await check_triton(server, prefix + MODEL + "/infer", body + tail, str(len(body)) if exact else length)

    await run_in_loop(objects)
    await run_in_loop(infer)
    await server.wait_until_idle()
    assert await server.control() == before


async def test_triton_http_rejects_huge_inputs_at_once(serve):
    server = await serve()
    many = {"text_input": "a", "stop": ["x"] * 100_000}
    for body in (
        many,
        {"text_input": "a", "sampling_parameters": json.dumps(many)},
        {"text_input": "a", "logit_bias": {str(n): 1 for n in range(300_000)}},
        {"text_input": ["a"] * 100_000},
        {"text_input": "a", "n": 10**9},
        {"text_input": "a", "sampling_parameters": "[" * 100_000},
        b'{"text_input":"a","x":' + b"[" * 100_000,
        b'{"text_input":"a","top_k":' + b"9" * 4000 + b"}",
    ):
        for route in ("/generate", "/generate_stream"):
            assert (await server.post(MODEL + route, body)).status == 400, str(body)[:50]
    endless = b'{"text_input":"a","top_k":' + b"9" * 1_000_000 + b"}"
    assert (await server.post(MODEL + "/generate", endless)).json["error"].startswith("failed to parse")
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    for changes in (
        {"shape": [10**6], "data": ["a"] * 10**6},
        {"shape": [2**40, 2**40]},
        {"shape": [1] * 100_000},
        {"name": "x" * 100_000},
        {"datatype": "x" * 100_000},
    ):
        answer = await server.post(MODEL + "/infer", {"inputs": [text | changes]})
        assert answer.status == 400 and len(answer.body) < 1000, str(changes)[:50]
    body = json.dumps(
        {"inputs": [{k: v for k, v in text.items() if k != "data"} | {"parameters": {"binary_data_size": 4}}]}
    )
    head = {"Inference-Header-Content-Length": str(len(body))}
    answer = await server.call("POST", MODEL + "/infer", body.encode() + struct.pack("<I", 2**32 - 1), head)
    assert answer.status == 400
    assert (await server.get("/v2/models/" + "x" * 5000)).status == 404
    assert (await server.get(MODEL + "/versions/" + "9" * 5000)).status == 400
    assert await server.control()
