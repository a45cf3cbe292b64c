"""Odd bodies for Triton's routes. Triton answers JSON of a wrong type with 500; no other 500 is allowed."""

import json
import re
import struct
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_fuzz import BODIES, encode, raw, run, scalars, values

from parley.dialects.triton import DIALECT
from parley.dialects.triton.model import INPUTS, OUTPUTS
from parley.dialects.triton.sampling import KNOWN
from parley.dialects.triton.tensors import FORMATS

MODEL = "/v2/models/tiny"
ROUTES = [route.path.replace("{model}", "tiny") for route in DIALECT.routes if route.method == "POST"]
ROUTES = [path for path in ROUTES if "{" not in path]
OURS = re.compile(
    r"(Converting keyword: 'parameters': )?(failed to parse|Unable to parse|Expected JSON|attempt to access)"
)

names = st.sampled_from(sorted({*KNOWN, *INPUTS, "id", "parameters", "ready"})) | st.text(max_size=5)
members = st.dictionaries(names, values, max_size=4)
start = st.sampled_from([{}, {"text_input": "a"}, {"text_input": "a", "stream": True}])
flat = st.builds(lambda a, b, c: a | b | c, start, st.fixed_dictionaries({}, optional={"parameters": members}), members)

sizes = st.integers(0, 3) | st.sampled_from([-1, 2**31, 2**63, 2**64, True, None, "1"])
options = st.fixed_dictionaries({}, optional={"binary_data_size": sizes, "shared_memory_region": scalars, "x": values})
tensor = st.fixed_dictionaries(
    {"name": names, "datatype": st.sampled_from(["BYTES", "BYTES", *FORMATS, "X"]) | scalars},
    optional={
        "shape": st.sampled_from([[1], [1, 1], [], [0], [2], [2**40, 2**40]]) | st.lists(sizes, max_size=3) | values,
        "data": st.lists(values, max_size=2) | values,
        "parameters": options | values,
    },
)
text = st.just({"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]})
wanted = st.fixed_dictionaries(
    {"name": st.sampled_from(sorted(OUTPUTS)) | scalars},
    optional={"parameters": st.dictionaries(st.sampled_from(["binary_data", "classification"]), values, max_size=2)},
)
tensors = st.fixed_dictionaries(
    {"inputs": st.lists(text | tensor, max_size=3) | values},
    optional={"outputs": st.lists(wanted, max_size=3) | values, "id": scalars, "parameters": members | values},
)
lengths = st.none() | st.sampled_from(["0", "1", "-1", "x", "9" * 30, ""]) | st.integers(0, 300).map(str)


async def check(served: Any, path: str, body: bytes, length: str | None = None) -> None:
    headers = {} if length is None else {"Inference-Header-Content-Length": length}
    answer = await served.call("POST", path, body, headers)

    if answer.status >= 400:
        streamed = answer.headers["content-type"].startswith("text/event-stream")
        error = json.loads(answer.body.removeprefix(b"data: ")) if streamed else answer.json
        assert list(error) == ["error"] and 0 < len(error["error"]) < 2000
        assert "0x" not in error["error"] and "Traceback" not in error["error"]
        known = answer.status in (400, 404) or path.endswith("/unload") or "memory" in path
        assert known or OURS.match(error["error"]), (path, body, answer.body)
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        assert b"error" not in answer.body, (path, body)


async def test_triton_odd_bodies_earn_a_500_only_for_wrong_json_types(serve):
    served = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))
    before = await served.control()

    @settings(max_examples=BODIES // 4, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(path=st.sampled_from(ROUTES), body=flat.map(encode) | raw)
    async def objects(path, body):
        await check(served, path, body)

    @settings(max_examples=BODIES // 4, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(body=tensors.map(encode), tail=st.binary(max_size=12), length=lengths, exact=st.booleans())
    async def infer(body, tail, length, exact):
        await check(served, MODEL + "/infer", body + tail, str(len(body)) if exact else length)

    await run(objects)
    await run(infer)
    await served.idle()
    assert await served.control() == before


async def test_triton_http_rejects_huge_inputs_at_once(serve):
    served = await serve()
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
            assert (await served.post(MODEL + route, body)).status == 400, str(body)[:50]
    endless = b'{"text_input":"a","top_k":' + b"9" * 1_000_000 + b"}"
    assert (await served.post(MODEL + "/generate", endless)).json["error"].startswith("failed to parse")
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    for odd in (
        {"shape": [10**6], "data": ["a"] * 10**6},
        {"shape": [2**40, 2**40]},
        {"shape": [1] * 100_000},
        {"name": "x" * 100_000},
        {"datatype": "x" * 100_000},
    ):
        answer = await served.post(MODEL + "/infer", {"inputs": [text | odd]})
        assert answer.status == 400 and len(answer.body) < 1000, str(odd)[:50]
    body = json.dumps(
        {"inputs": [{k: v for k, v in text.items() if k != "data"} | {"parameters": {"binary_data_size": 4}}]}
    )
    head = {"Inference-Header-Content-Length": str(len(body))}
    answer = await served.call("POST", MODEL + "/infer", body.encode() + struct.pack("<I", 2**32 - 1), head)
    assert answer.status == 400
    assert (await served.get("/v2/models/" + "x" * 5000)).status == 404
    assert (await served.get(MODEL + "/versions/" + "9" * 5000)).status == 400
    assert await served.control()
