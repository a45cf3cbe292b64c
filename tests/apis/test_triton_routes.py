"""Triton's HTTP API through a running server: paths, statuses, headers and frames."""

import json
import struct
import zlib

import pytest
from support.http_client import HELLO_CHAT, RunningServer, build_request, fill_path
from support.metrics_page import metric_value

from parley import __version__
from parley.dialects.triton import STRICT

GENERATE = "/v2/models/tiny/generate"
KEY = "sk-right-key-0123456789"


async def openai_text(server: RunningServer, text: str, **members: object) -> str:
    """Get the model's continuation of a prompt from OpenAI's API, for comparison."""
    answer = await server.post("/v1/completions", {"prompt": text} | members)
    return answer.json["choices"][0]["text"]


@pytest.mark.parametrize("prefix", ["", "/triton"])
@pytest.mark.parametrize("version", ["", "/versions/1"])
async def test_triton_documented_generate_example_is_answered(serve, prefix, version):
    server = await serve()
    body = b'{"id": "42", "text_input": "client input", "parameters": {"stream": false, "temperature": 0}}'
    answer = await server.post(f"{prefix}/v2/models/tiny{version}/generate", body)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert list(answer.json) == ["id", "model_name", "model_version", "text_output"]
    assert answer.json == {
        "id": "42",
        "model_name": "tiny",
        "model_version": "1",
        "text_output": "client input" + await openai_text(server, "client input"),
    }


async def test_triton_stream_is_the_same_text_in_pieces(serve):
    server = await serve()
    answer = await server.post(GENERATE + "_stream", {"text_input": "a b c", "stream": True, "max_tokens": 8})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["transfer-encoding"] == "chunked"
    lines = answer.body.decode().split("\n\n")
    assert lines.pop() == "" and len(lines) > 2
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert all(list(event) == ["model_name", "model_version", "text_output"] for event in events)
    assert "".join(event["text_output"] for event in events) == await openai_text(server, "a b c", max_tokens=8)


async def test_triton_logprobs_and_counts_agree_with_openai(serve):
    server = await serve()
    body = {"text_input": "a b c", "max_tokens": 5, "logprobs": 2, "exclude_input_in_output": True}
    flags = {f"return_{name}": True for name in ("logprobs", "cumulative_logprob", "num_input_tokens",
             "num_output_tokens", "finish_reason", "log_probs")}  # fmt: skip
    answer = (await server.post(GENERATE, body | flags)).json
    other = (await server.post("/v1/completions", {"prompt": "a b c", "max_tokens": 5, "logprobs": 2})).json
    assert answer["num_input_tokens"] == other["usage"]["prompt_tokens"]
    assert answer["num_output_tokens"] == 5 and answer["finish_reason"] == "length"
    scores = other["choices"][0]["logprobs"]["token_logprobs"]
    assert [next(iter(token.values()))["logprob"] for token in json.loads(answer["logprobs"])] == scores
    assert answer["cumulative_logprob"] == pytest.approx(sum(scores)) == pytest.approx(answer["cum_log_probs"])


async def test_infer_accepts_and_returns_binary_tensors(serve):
    server = await serve()
    text = b"a b c"
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 9}}]
    document = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True, "max_tokens": 4}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(document))}
    answer = await server.post("/v2/models/tiny/infer", document + struct.pack("<I", 5) + text, **headers)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/octet-stream")
    size = int(answer.headers["inference-header-content-length"])
    output = json.loads(answer.body[:size])["outputs"][0]
    assert output["parameters"]["binary_data_size"] == len(answer.body) - size
    assert answer.body[size + 4 :].decode() == "a b c" + await openai_text(server, "a b c", max_tokens=4)


@pytest.mark.parametrize(("coding", "bits"), [("gzip", 31), ("deflate", 15)])
async def test_infer_compresses_its_answer_on_request(serve, coding, bits):
    server = await serve()
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a b c"]}
    plain, binary = (json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
                     for parameters in ({"max_tokens": 4}, {"max_tokens": 4, "binary_data_output": True}))  # fmt: skip
    for body in (plain, binary):
        bare = await server.post("/v2/models/tiny/infer", body)
        packed = await server.call("POST", "/v2/models/tiny/infer", body, {"accept-encoding": coding})
        assert "content-encoding" not in bare.headers and packed.headers["content-encoding"] == coding
        assert int(packed.headers["content-length"]) == len(packed.body)
        assert zlib.decompress(packed.body, bits) == bare.body
        length_header = "inference-header-content-length"  # counts the JSON before compression
        assert packed.headers.get(length_header) == bare.headers.get(length_header)
    generated = await server.call("POST", GENERATE, {"text_input": "a"}, {"accept-encoding": coding})
    assert "content-encoding" not in generated.headers


async def test_infer_rejects_an_unknown_content_encoding(serve):
    answer = await (await serve()).call("POST", "/v2/models/tiny/infer", b"x", {"content-encoding": "br"})
    assert (answer.status, answer.body) == (501, b'{"error":"Unsupported compression type"}')
    assert answer.headers["accept-encoding"] == "gzip, deflate"


async def test_strict_generate_rejects_compressed_bodies(serve):
    server = await serve()
    body = zlib.compress(b'{"text_input":"a"}')
    lenient = await server.call("POST", GENERATE, body, {"content-encoding": "deflate"})
    strict = await server.call("POST", f"/triton{GENERATE}", body, {"content-encoding": "deflate"})
    assert lenient.status == 200
    unknown = await server.call("POST", f"/triton{GENERATE}_stream", b"{}", {"content-encoding": "br"})
    for refused in (strict, unknown):
        assert (refused.status, refused.body) == (
            400, b'{"error":"Unsupported content-encoding, only \'identity\' is supported."}'
        )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("POST", "/v2/models/other/generate", 404, "Request for unknown model: 'other' is not found"),
        ("POST", "/v2/models/other/generate_stream", 404, "Request for unknown model: 'other' is not found"),
        ("POST", "/v2/models/other/infer", 404, "Request for unknown model: 'other' is not found"),
        ("GET", "/v2/models/other", 404, "Request for unknown model: 'other' is not found"),
        ("POST", "/v2/models/tiny/versions/2/infer", 404, "Request for unknown model: 'tiny' version 2 is not found"),
        ("POST", "/v2/models/tiny/versions/x/generate", 404, "Not Found"),
        ("GET", GENERATE, 405, "Method Not Allowed"),
        ("POST", "/v2", 405, "Method Not Allowed"),
        ("GET", "/v2/nowhere", 404, "Not Found"),
        ("GET", "/triton/v2/", 404, "Not Found"),
        ("GET", "/v2/models/tiny/", 404, "Not Found"),
        ("GET", "/triton/nowhere", 404, "Not Found"),
        ("POST", GENERATE, 400, "failed to parse the request JSON buffer: The document is empty. at 0"),
        ("POST", f"/triton{GENERATE}", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        ("POST", "/v2/models/tiny/unload", 404, "Not Found"),
    ],
)
async def test_triton_unknown_paths_models_and_methods_get_its_errors(serve, method, path, status, error):
    answer = await (await serve()).call(method, path)
    assert (answer.status, answer.json) == (status, {"error": error})


async def test_triton_unknown_model_is_404_before_the_body_is_read(serve):
    server = await serve()
    connection = await server.connect()
    await connection.send(b"POST /v2/models/x/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3000000\r\n\r\n")
    assert (await connection.head())[0] == 404
    connection.close()


async def test_triton_rejects_prompts_and_tokens_the_model_cannot_take(serve):
    server = await serve()
    for members in ({"text_input": "a" * 5000}, {"text_input": "a", "stop_token_ids": [10_000]}):
        answer = await server.post(GENERATE, members | {"stream": True})
        assert (answer.status, list(answer.json)) == (400, ["error"])
        assert answer.headers["content-type"] == "application/json"
        stream = await server.post(GENERATE + "_stream", members | {"stream": True})
        assert (stream.status, stream.headers["content-type"]) == (400, "text/event-stream; charset=utf-8")
        assert stream.body == b"data: " + answer.body + b"\n\n"
    assert "not in the vocabulary" in answer.json["error"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("generate", b"{"),
        ("generate_stream", b"[]"),
        ("infer", b"{}"),
        ("infer", b'{"inputs":[{"name":"text_input","datatype":"BYTES","shape":[-1],"data":["a"]}]}'),
        ("generate", b'{"text_input":5}'),
    ],
)
async def test_triton_unreadable_bodies_are_the_clients_mistake_unless_strict(serve, route, body):
    server = await serve()
    lenient = await server.call("POST", f"/v2/models/tiny/{route}", body)
    strict = await server.call("POST", f"/triton/v2/models/tiny/{route}", body)
    assert (lenient.status, strict.status) == (400, 500)
    assert lenient.body == strict.body and lenient.headers["content-type"] == "application/json"


async def test_triton_streams_report_errors_of_the_model_as_events(serve):
    server = await serve()
    for prefix in ("", "/triton"):
        route = prefix + GENERATE
        for members, status in (({"temperature": -1}, 400), ({"lora_name": "x"}, 404), ({"n": 0}, 400)):
            whole = await server.post(route, {"text_input": "a"} | members)
            stream = await server.post(f"{route}_stream", {"text_input": "a"} | members)
            assert whole.status == stream.status == status
            assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert stream.body == b"data: " + whole.body + b"\n\n"
        frontend = await server.post(f"{route}_stream", {"temperature": -1})  # no text: the model does not see it
        assert (frontend.status, frontend.headers["content-type"]) == (400, "application/json")
    body = {"text_input": "a", "stream": True, "exclude_input_in_output": False}
    strict = await server.post(f"/triton{GENERATE}_stream", body)
    assert (strict.status, strict.body[:38]) == (500, b'data: {"error":"Error generating strea')


async def test_triton_refuses_a_body_without_json_unless_lenient(serve):
    server = await serve()
    header = {"Inference-Header-Content-Length": "0"}
    assert (await server.call("POST", "/v2/models/tiny/infer", b"Hi", header)).status == 200
    strict = await server.call("POST", "/triton/v2/models/tiny/infer", b"Hi", header)
    assert strict.status == 400 and "Raw request must only have 1 input (found 1)" in strict.json["error"]


async def test_triton_timeout_parameter_ends_a_request_with_503(serve):
    server = await serve(tick=0.001)
    tensors = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}]
    body = {"inputs": tensors, "parameters": {"timeout": 50_000, "max_tokens": 3000}}
    late = await server.post("/v2/models/tiny/infer", body)
    assert (late.status, late.json) == (503, {"error": "Request timeout expired"})
    body["parameters"] = {"timeout": 50_000_000, "max_tokens": 3}
    assert (await server.post("/v2/models/tiny/infer", body)).status == 200
    await server.wait_until_idle()


async def test_triton_stream_ends_with_an_error_if_the_engine_closes(serve):
    server = await serve(tick=0.01)
    connection = await server.connect()
    body = json.dumps({"text_input": "a b", "stream": True, "max_tokens": 1000}).encode()
    head = f"POST {GENERATE}_stream HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    await connection.send(head.encode() + body)
    assert (await connection.head())[0] == 200
    await server.engine.close()
    rest = (await connection.reader.readuntil(b"0\r\n\r\n")).decode()
    assert rest.rstrip("0\r\n").endswith("}") and '\ndata: {"error":"' in rest
    connection.close()


async def test_triton_health_before_and_after_loading(serve):
    server = await serve(load=0.3, wait=False, api_keys=(KEY,))
    assert (await server.get("/v2/health/live")).status == 200
    ready = await server.get("/v2/health/ready")
    assert (ready.status, ready.body) == (400, b'{"ready":false}')
    ready = await server.get("/triton/v2/health/ready")
    assert (ready.status, ready.body, ready.headers.get("content-type")) == (400, b"", None)
    key = {"x-api-key": KEY}
    assert (await server.get("/v2/models/tiny/ready", **key)).status == 400
    assert (await server.call("POST", GENERATE, b"no JSON", key)).status == 503
    index = await server.call("POST", "/v2/repository/index", b"", key)
    assert index.json == [{"name": "tiny", "version": "1", "state": "LOADING"}]
    await server.until(lambda: server.service.unready_error() is None)
    assert (await server.get("/v2/health/ready")).status == 200
    ready = await server.get("/v2/models/tiny/ready", **key)
    assert (ready.status, ready.body, ready.headers.get("content-type")) == (200, b"", None)


async def test_every_triton_get_route_answers(serve):
    server = await serve()
    for route in STRICT.routes:
        if route.method == "GET":
            path = fill_path(route.path)
            answer = await server.get(path)
            assert answer.status == (404 if path.endswith("/region/x/status") else 200), path
            bare = path.startswith("/v2/health/")
            assert (await server.get("/triton" + path)).body == (b"" if bare else answer.body)
    for path in ("/v2", "/v2/"):
        assert (await server.get(path)).json["version"] == __version__
    assert (await server.get("/v2/models/tiny/versions/1")).json["name"] == "tiny"
    assert (await server.get("/v2/models")).json == {"models": ["tiny"]}  # KServe's; unknown to Triton
    assert (await server.get("/triton/v2/models")).status == 404
    assert (await server.get("/v2/models/stats")).json["model_stats"][0]["name"] == "tiny"


async def test_triton_statistics_agree_with_the_metrics_page(serve):
    server = await serve(max_batch=1, max_queue=0, tick=0.005)
    await server.post(GENERATE, {"text_input": "a", "max_tokens": 3})
    await server.post("/v1/chat/completions", HELLO_CHAT)
    server.engine.step_gate.clear()
    connection = await server.connect()
    body = b'{"text_input":"a"}'
    await connection.send(
        f"POST {GENERATE} HTTP/1.1\r\nhost: x.localhost\r\ncontent-length: 18\r\n\r\n".encode() + body
    )
    await server.until(lambda: bool(server.service.open_requests))
    busy = await server.post(GENERATE, {"text_input": "a"})
    assert busy.status == 503 and "retry-after" in busy.headers
    connection.close()
    await server.until(lambda: not server.service.open_requests)
    server.engine.step_gate.set()
    stats = (await server.get("/v2/models/tiny/stats")).json["model_stats"][0]
    assert stats["inference_count"] == stats["inference_stats"]["success"]["count"] == 2
    assert stats["inference_stats"]["fail"]["count"] == 1 and stats["last_inference"] > 1.6e12
    parts = [stats["inference_stats"][name]["ns"] for name in ("compute_input", "queue", "compute_infer")]
    assert sum(parts) == pytest.approx(stats["inference_stats"]["success"]["ns"], abs=3)
    page = (await server.get("/metrics")).body.decode()
    common = 'model="tiny",version="1"'
    assert metric_value(page, f"nv_inference_request_success{{{common}}}") == 2
    assert metric_value(page, f'nv_inference_request_failure{{{common},reason="REJECTED"}}') == 1
    assert metric_value(page, f'nv_inference_request_failure{{{common},reason="CANCELED"}}') == 1
    assert metric_value(page, f'nv_inference_request_failure{{{common},reason="BACKEND"}}') == 0
    whole = metric_value(page, f"nv_inference_request_duration_us{{{common}}}")
    assert whole == pytest.approx(stats["inference_stats"]["success"]["ns"] / 1000, abs=1)
    assert metric_value(page, f"nv_inference_pending_request_count{{{common}}}") == 0
    assert metric_value(page, f'nv_trt_llm_request_metrics{{{common},request_type="active"}}') == 0
    blocks = {kind: metric_value(page, f'nv_trt_llm_kv_cache_block_metrics{{{common},kv_cache_block_type="{kind}"}}')
              for kind in ("max", "used", "free", "fraction")}  # fmt: skip
    assert blocks["max"] == blocks["used"] + blocks["free"] > 0 and 0 <= blocks["fraction"] < 1


async def test_triton_sends_load_metrics_in_a_header_on_request(serve):
    server = await serve()
    answer = await server.post(GENERATE, {"text_input": "a"}, **{"endpoint-load-metrics-format": "json"})
    named = json.loads(answer.headers["endpoint-load-metrics"].removeprefix("json "))["named_metrics"]
    assert named["max_token_capacity"] == server.engine.info.kv_pages * server.engine.info.page_tokens
    assert 0 <= named["kv_cache_utilization"] < 1
    assert "endpoint-load-metrics" not in (await server.post(GENERATE, {"text_input": "a"})).headers


async def test_triton_metrics_count_waiting_and_scheduled_requests(serve):
    server = await serve(max_batch=1, tick=0.005)
    server.engine.step_gate.clear()
    connections = [await server.connect() for _ in range(3)]
    for connection in connections:
        await connection.send(build_request("POST", GENERATE, {"text_input": "a"}))
    await server.until(lambda: len(server.service.open_requests) == 3)
    server.engine.step_gate.set()
    await server.until(lambda: server.engine.stats.waiting > 0)
    server.engine.step_gate.clear()
    page = (await server.get("/metrics")).body.decode()
    assert metric_value(page, 'nv_inference_pending_request_count{model="tiny",version="1"}') > 0
    assert metric_value(page, 'nv_trt_llm_request_metrics{model="tiny",version="1",request_type="scheduled"}') == 1
    server.engine.step_gate.set()
    for connection in connections:
        connection.close()
