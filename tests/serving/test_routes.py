"""Every route: keys, headers, origins, errors for unknown paths and methods, health and metrics."""

import asyncio
import base64
import re
import threading
import time

import pytest
from support.http_client import HELLO_CHAT, RunningServer, fill_path
from support.metrics_page import metric_value

from parley import __version__
from parley.dialects.mounts import dedicated_mounts, universal_mounts
from parley.engine.protocol import EngineFailed
from parley.serving.app import App
from parley.serving.handlers import tokens as token_handlers
from parley.text.text_pipeline import TextPipeline

KEY = "sk-right-key-0123456789"


def all_routes(server: RunningServer) -> list[tuple[str, str, str]]:
    """List method, path and kind of every route."""
    app = App(server.service, universal_mounts(), "127.0.0.1")
    return [(method, fill_path(path), e.route.kind) for (method, path), e in app.route_table.items()]


async def test_every_route_has_a_handler(serve):
    server = await serve()
    assert {kind for _, _, kind in all_routes(server)} <= server.parts.handlers.keys()


# Health, and what clients ask before they know how to authenticate, or whether they are online.
OPEN_PATHS = ("/health", "/ping", "/.well-known/databricks-config", "/ollama", "/anthropic")


async def test_only_probes_answer_without_a_key(serve):
    server = await serve(api_keys=(KEY,))
    assert len(all_routes(server)) > 20
    for method, path, kind in all_routes(server):
        answer = await server.call(method, path)
        if kind in ("live", "ready") or path.rstrip("/").endswith(OPEN_PATHS):
            assert answer.status == 200, path
        else:
            assert answer.status == 401, (method, path)
            assert answer.headers["www-authenticate"] == "bearer"


@pytest.mark.parametrize(
    "path",
    ["/", "/nowhere", "//v1/models", "/v1/../metrics", "/v1/%2e%2e/metrics", "/V1/models", "/v1/models/", "/metrics/",
     "/health/live/", "/health/live/../../metrics", "/health/live%2f..%2fmetrics", "/v1/models?api_key=" + KEY],
)  # fmt: skip
async def test_unusual_paths_do_not_bypass_the_key_check(serve, path):
    server = await serve(api_keys=(KEY,))
    assert (await server.get(path)).status == 401
    for method in ("OPTIONS", "HEAD", "PUT", "DELETE", "TRACE"):
        assert (await server.call(method, path)).status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer   {KEY}"},
        {"api-key": KEY},
        {"x-api-key": KEY},
        {"authorization": "Bearer ", "x-api-key": KEY},
        {"authorization": "Basic " + base64.b64encode(f"token:{KEY}".encode()).decode()},
        {"authorization": "basic  " + base64.b64encode(f"token:{KEY}".encode()).decode()},
        {"authorization": "Basic !", "x-api-key": KEY},
    ],
    ids=str,
)
async def test_accepts_keys_in_each_known_header(serve, headers):
    server = await serve(api_keys=("another", KEY))
    assert (await server.get("/v1/models", **headers)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Basic " + base64.b64encode(f"other:{KEY}".encode()).decode()},
        {"authorization": "Basic " + base64.b64encode(b"token:").decode()},
        {"authorization": "Basic " + base64.b64encode(KEY.encode()).decode()},
        {"authorization": "Basic \xff\xfe"},
        {"authorization": f"Bearer Bearer {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": "Bearer " + "x" * 5000},
        {"authorization": "Bearer \xff\xfe\x80"},
        {"x-api-key": ""},
    ],
    ids=lambda h: str(h)[:50],
)
async def test_rejects_wrong_keys_without_repeating_them(serve, headers):
    server = await serve(api_keys=(KEY,))
    answer = await server.get("/v1/models", **headers)
    assert answer.status == 401
    assert answer.error["type"] == "invalid_request_error"
    assert KEY not in answer.body.decode() and len(answer.body) < 400


async def test_rejects_a_missing_key_before_reading_the_body(serve):
    server = await serve(api_keys=(KEY,))
    connection = await server.connect()
    await connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 30000000\r\n\r\n")
    assert (await connection.head())[0] == 401
    connection.close()


ADMIN_ROUTES = [
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/reset_mm_cache"),
    ("POST", "/api/2.0/serving-endpoints"),
    ("DELETE", "/api/2.0/serving-endpoints/e"),
]


@pytest.mark.parametrize("place", ADMIN_ROUTES, ids=str)
async def test_routes_that_change_the_server_require_an_admin_key(serve, place):
    server = await serve(api_keys=(KEY,), admin_keys=("chief", "deputy"), lora_root="/")
    assert (await server.call(*place)).status == 401
    refused = await server.call(*place, {}, {"x-api-key": KEY})
    assert refused.status == 403 and b"--admin-key-file" in refused.body
    for key in ("chief", "deputy"):
        assert (await server.call(*place, {}, {"x-api-key": key})).status not in (401, 403)
        assert (await server.get("/v1/models", **{"x-api-key": key})).status == 200


async def test_admin_keys_alone_leave_other_routes_open(serve):
    server = await serve(admin_keys=("chief",))
    assert (await server.post("/v1/chat/completions", HELLO_CHAT)).status == 200
    assert (await server.get("/api/2.0/serving-endpoints")).status == 200
    assert (await server.post("/reset_prefix_cache")).status == 401
    assert (await server.post("/reset_prefix_cache", **{"x-api-key": KEY})).status == 403
    assert (await server.post("/reset_prefix_cache", **{"x-api-key": "chief"})).status == 200
    both = {"authorization": "Bearer other", "x-api-key": "chief"}
    assert (await server.post("/reset_prefix_cache", **both)).status == 200


async def test_mindie_commands_and_stop_require_an_admin_key(serve):
    server = await serve(api_keys=(KEY,), admin_keys=("chief",), surfaces=dedicated_mounts("mindie-management"))
    for method, path in (("POST", "/v1/engine-server/fault-handling-command"), ("GET", "/stopService")):
        answer = await server.call(method, path, None, {"x-api-key": KEY})
        assert answer.status == 403 and "--admin-key-file" in answer.json["error"], path
    assert (await server.get("/health", **{"x-api-key": KEY})).status == 200 and not server.service.shutting_down


async def test_missing_and_wrong_keys_have_different_error_codes(serve):
    server = await serve(api_keys=(KEY,))
    assert (await server.get("/v1/models")).error["code"] is None
    assert (await server.get("/v1/models", authorization="Bearer no")).error["code"] == "invalid_api_key"


# -- paths and methods


async def test_unknown_path_is_404_and_names_method_and_path(serve):
    server = await serve()
    answer = await server.post("/v1/chat/completion", HELLO_CHAT)
    assert (answer.status, answer.error["code"]) == (404, "unknown_url")
    assert "POST" in answer.error["message"] and "/v1/chat/completion" in answer.error["message"]


async def test_unknown_path_gets_the_error_of_the_api_it_belongs_to(serve):
    server = await serve(api_keys=(KEY,))
    keyed = {"authorization": f"Bearer {KEY}"}
    for path in ("/api/2.0/nothing", "/ai-gateway/nothing", "/serving-endpoints/nothing/at/all"):
        assert (await server.get(path, **keyed)).json["error_code"] == "ENDPOINT_NOT_FOUND"
    one = "/api/2.0/serving-endpoints/tiny"
    assert (await server.get(one)).json["error_code"] == "UNAUTHENTICATED"
    assert (await server.call("POST", one, headers=keyed)).json["error_code"] == "BAD_REQUEST"
    assert (await server.get("/v2/nothing", **keyed)).json == {"error": "Not Found"}


async def test_wrong_method_is_405_with_allow_header(serve):
    server = await serve()
    answer = await server.get("/v1/completions")
    assert (answer.status, answer.headers["allow"]) == (405, "post")
    assert answer.error["code"] == "method_not_allowed"


async def test_allow_header_names_all_methods_of_a_path(serve):
    server = await serve()
    for path, allowed in (("/", "get, head, post"), ("/v2/logging", "get, head, post"), ("/v1/models", "get, head")):
        answer = await server.call("DELETE", path)
        assert (answer.status, answer.headers["allow"]) == (405, allowed)


async def test_model_names_with_slashes_work_in_paths_and_bodies(serve):
    server = await serve(names=("org/model", "alias"))
    listed = (await server.get("/v1/models")).json
    assert [model["id"] for model in listed["data"]] == ["org/model", "alias"]
    for path in ("org/model", "org%2Fmodel", "alias"):
        assert (await server.get(f"/v1/models/{path}")).status == 200
    assert (await server.get("/v1/models/")).status == 404
    answer = await server.get("/v1/models/org%2Fother")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    chat = await server.post("/v1/chat/completions", HELLO_CHAT | {"model": "alias"})
    assert chat.json["model"] == "alias"
    assert (await server.post("/v1/chat/completions", HELLO_CHAT | {"model": None})).json["model"] == "org/model"
    assert (await server.post("/v1/chat/completions", HELLO_CHAT)).status == 404


async def test_a_models_name_with_slashes_is_one_part_of_every_path(serve):
    server = await serve(names=("org/model", "org/model/v2"), api_keys=("k",), admin_keys=("a",))
    key = {"authorization": "Bearer k"}
    for name in ("org/model", "org%2Fmodel", "org/model/v2"):
        for path, body, member in (
            (f"/v2/models/{name}/generate", {"text_input": "a", "max_tokens": 1}, "model_name"),
            (f"/triton/v2/models/{name}/versions/1/generate", {"text_input": "a", "max_tokens": 1}, "model_name"),
            (f"/mindie/v2/models/{name}/generate", {"text_input": "a"}, "model_name"),
            (f"/serving-endpoints/{name}/invocations", {**HELLO_CHAT, "model": None}, "model"),
        ):
            answer = await server.post(path, body, **key)
            assert (answer.status, answer.json[member]) == (200, name.replace("%2F", "/")), path
            assert (await server.post(path, body)).status == 401
            wrong = await server.get(path, **key)
            assert (wrong.status, wrong.headers["allow"]) == (405, "post")
        assert (await server.call("PUT", f"/api/2.0/serving-endpoints/{name}/config", {}, key)).status == 403
        assert (await server.get(f"/v2/models/{name}/nothing", **key)).status == 404
    assert (await server.get("/v2/models/org/models", **key)).status == 404


async def test_openai_routes_answer_under_their_own_prefix(serve):
    server = await serve()
    assert (await server.get("/openai/v1/models")).json["data"][0]["id"] == "tiny"
    assert (await server.post("/openai/v1/chat/completions", HELLO_CHAT)).status == 200
    assert (await server.get("/openai/nowhere")).error["code"] == "unknown_url"


# -- headers


async def test_answers_carry_request_id_and_openai_headers(serve):
    server = await serve()
    answer = await server.post("/v1/chat/completions", HELLO_CHAT)
    assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])
    assert answer.headers["openai-version"] == "2020-10-01"
    assert answer.headers["openai-processing-ms"].isdigit()
    assert answer.headers["content-type"] == "application/json"
    stream = await server.post("/v1/chat/completions", HELLO_CHAT | {"stream": True})
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.headers["cache-control"] == "no-cache"


async def test_echoes_a_valid_request_id_and_replaces_others(serve):
    server = await serve()
    assert (await server.get("/version", **{"x-request-id": "my-id.1/2"})).headers["x-request-id"] == "my-id.1/2"
    for odd in ("a b", "é", "x" * 129, "", 'a"b', "a\tb"):
        answer = await server.get("/version", **{"x-request-id": odd})
        assert answer.headers["x-request-id"].startswith("req_")


async def test_rejects_foreign_origins_without_keys(serve):
    server = await serve()
    own = f"http://localhost:{server.port}"
    headers = {"host": f"localhost:{server.port}"}

    async def status(origin):
        connection = await server.connect()
        body = b'{"prompt":"a"}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {headers['host']}\r\norigin: {origin}\r\n"
        await connection.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await connection.answer()
        connection.close()
        return answer.status

    assert await status(own) == 200
    assert await status("https://evil.example") == 403
    assert await status("null") == 403
    assert await status("http://[") == 403
    assert (await server.get("/v1/models", host="evil.example")).status in (400, 403)


async def test_rejects_unknown_host_names_on_loopback(serve):
    server = await serve(hosts=("llm.local",))

    async def status(host):
        connection = await server.connect()
        await connection.send(f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        answer = await connection.answer()
        connection.close()
        return answer.status

    for good in ("localhost", "127.0.0.1:8000", "[::1]:80", "LOCALHOST:1", "llm.local:8000"):
        assert await status(good) == 200, good
    for bad in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "169.254.1.1"):
        assert await status(bad) == 403, bad


async def test_accepts_any_host_and_origin_with_a_key(serve):
    server = await serve(api_keys=(KEY,))
    headers = f"host: llm.example\r\norigin: https://app.example\r\nauthorization: Bearer {KEY}"
    connection = await server.connect()
    await connection.send(f"GET /v1/models HTTP/1.1\r\n{headers}\r\n\r\n".encode())
    assert (await connection.answer()).status == 200
    connection.close()


async def test_placeholder_model_names_mean_the_served_model(serve):
    server = await serve()
    for name in ("tgi", "dummy", "", "https://example.com/v1\n"):
        answer = await server.post("/tokenize", {"prompt": "a", "model": name})
        assert answer.status == 200, name
    for name in ("TGI", "dummy2", "ftp://example.com"):
        assert (await server.post("/tokenize", {"prompt": "a", "model": name})).status == 404, name


async def test_only_allowed_origins_get_cors_headers(serve):
    server = await serve(cors=("https://app.example",), api_keys=(KEY,))
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = await server.call("OPTIONS", "/v1/models", None, {"origin": "https://app.example", **preflight})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
    answer = await server.get("/v1/models", origin="https://app.example", authorization=f"Bearer {KEY}")
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    answer = await server.get("/v1/models", origin="https://evil.example", authorization=f"Bearer {KEY}")
    assert "access-control-allow-origin" not in answer.headers


# -- the small routes


async def test_version_load_and_health_routes_answer(serve):
    server = await serve()
    assert (await server.get("/version")).json == {"version": __version__}
    assert (await server.get("/load")).json == {"server_load": 0}
    for path in ("/health", "/ping"):
        assert "content-type" not in (await server.get(path)).headers  # nor a body
        assert ((await server.get(path)).status, (await server.get(path)).body) == (200, b"")
    assert (await server.post("/ping")).status == 200
    assert (await server.get("/health/live")).json == {"status": "live"}
    assert (await server.get("/health/ready")).json == {"status": "ready"}


async def test_tokenize_and_detokenize_round_trip(serve):
    server = await serve()
    text = "The quick 🦊 said “hé”"
    tokenized = (await server.post("/tokenize", {"prompt": text, "return_token_strs": True})).json
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
    assert tokenized["max_model_len"] == 4096
    assert (await server.post("/detokenize", {"tokens": tokenized["tokens"]})).json == {"prompt": text}
    chat = (await server.post("/tokenize", {"messages": HELLO_CHAT["messages"]})).json
    usage = (await server.post("/v1/chat/completions", HELLO_CHAT)).json["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    assert (await server.post("/tokenize", {"prompt": ""})).json["count"] == 0
    answer = await server.post("/detokenize", {"tokens": [5, 10_000]})
    assert (answer.status, answer.error["param"]) == (400, "tokens")
    assert (await server.post("/tokenize", {"prompt": "a", "model": "other"})).status == 404


async def test_huge_texts_are_tokenized_one_at_a_time(serve, monkeypatch):
    """They take no more than one thread, and small texts do not wait for them."""
    server, running, small_answered = await serve(), [], threading.Event()
    tokenize_prompt, concurrency = TextPipeline.tokenize_prompt, []

    def tokenize_and_count(pipeline, prompt, *options):
        if len(prompt.text) > token_handlers.HUGE_TEXT:
            running.append(prompt)
            concurrency.append(len(running))
            assert small_answered.wait(30)
            running.pop()
        return tokenize_prompt(pipeline, prompt, *options)

    monkeypatch.setattr(TextPipeline, "tokenize_prompt", tokenize_and_count)
    monkeypatch.setattr(token_handlers, "HUGE_TEXT", 20_000)
    huge = [
        asyncio.create_task(server.post("/tokenize", {"prompt": "a" * token_handlers.HUGE_TEXT + letters}))
        for letters in ("b", "bc", "bcd")
    ]
    assert (await server.post("/tokenize", {"prompt": "abc"})).json["count"] == 3
    while not concurrency:
        await asyncio.sleep(0.01)
    small_answered.set()
    assert [(await task).json["count"] - token_handlers.HUGE_TEXT for task in huge] == [1, 2, 3] and concurrency == [
        1,
        1,
        1,
    ]


async def test_tokenizer_info_requires_its_option(serve):
    assert (await (await serve()).get("/tokenizer_info")).status == 404
    info = (await (await serve(tokenizer_info=True)).get("/tokenizer_info")).json
    assert info["eos_token"] == "<|im_end|>" and "messages" in info["chat_template"]


# -- health and metrics


async def test_loading_server_is_live_but_not_ready(serve):
    server = await serve(load=0.3, wait=False)
    assert (await server.get("/health/live")).status == 200
    ready = await server.get("/health/ready")
    assert (ready.status, ready.json["status"], ready.headers["retry-after"]) == (503, "loading", "1")
    assert 0 <= ready.json["progress"] <= 1
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        answer = await server.post(path, b"not even JSON")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "loading" in answer.error["message"]
    assert (await server.get("/health")).status == 503
    assert (await server.get("/v1/models")).json["data"][0]["max_model_len"] is None
    assert b"parley:ready{" in (await server.get("/metrics")).body
    await server.until(lambda: server.service.unready_error() is None)
    assert await server.control()
    assert (await server.get("/v1/models")).json["data"][0]["max_model_len"] == 4096


async def test_readiness_reports_an_engine_that_failed_to_start(serve):
    server = await serve(failure="The weights are broken.", wait=False)
    await server.until(lambda: server.engine.state == "failed")
    with pytest.raises(EngineFailed):
        await server.engine.wait_until_ready()
    ready = await server.get("/health/ready")
    assert (ready.status, ready.json["status"]) == (503, "failed")


async def test_metrics_count_requests_tokens_and_responses(serve):
    server = await serve()
    await server.post("/v1/chat/completions", HELLO_CHAT)
    await server.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3, "n": 2})
    await server.post("/v1/completions", {"prompt": 5})
    page = (await server.get("/metrics")).body.decode()
    common = 'model_name="tiny",engine="0"'
    assert metric_value(page, f'vllm:request_success_total{{{common},finished_reason="length"}}') == 5
    assert metric_value(page, f"vllm:time_to_first_token_seconds_count{{{common}}}") == 2
    assert metric_value(page, f'vllm:time_to_first_token_seconds_bucket{{{common},le="+Inf"}}') == 2
    assert metric_value(page, f"vllm:request_generation_tokens_sum{{{common}}}") == 8 + 4 * 3
    assert metric_value(page, f"vllm:inter_token_latency_seconds_count{{{common}}}") == 7 + 4 * 2
    assert metric_value(page, f"vllm:generation_tokens_total{{{common}}}") == 20
    assert metric_value(page, f"vllm:num_requests_running{{{common}}}") == 0
    assert metric_value(page, f"vllm:kv_cache_usage_perc{{{common}}}") == 0
    assert metric_value(page, 'parley:http_responses_total{status="400"}') == 1
    assert metric_value(page, 'parley:ready{model_name="tiny"}') == 1


async def test_metrics_count_requests_by_path_api_and_key(serve):
    """A client cannot make series: neither by a path or method of its own, nor by a key that is not accepted."""
    server = await serve(api_keys=("first", "second"))
    second = {"authorization": "Bearer second"}
    await server.post("/v1/completions", {"prompt": "a", "max_tokens": 3}, **second)
    await server.post("/v1/completions", {"prompt": 5}, **second)
    await server.post("/v1/completions", {"prompt": "a"}, authorization="Bearer third")
    await server.post("/generate", {"inputs": "a"}, **second)
    await server.get("/v1/models/none", **second)
    await server.get("/no/such/path", **second)
    await server.call("PROPFIND", "/v1/completions", None, second)
    await server.get("/health/live")
    page = (await server.get("/metrics", **second)).body.decode()
    series = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines() if line[0] != "#"}
    requests = {name.partition("{")[2]: n for name, n in series.items() if name.startswith("http_requests_total{")}
    assert requests == {
        'handler="/v1/completions",method="POST",status="2xx"}': 1,
        'handler="/v1/completions",method="POST",status="4xx"}': 1,
        'handler="/generate",method="POST",status="2xx"}': 1,
        'handler="/v1/models/{model:path}",method="GET",status="4xx"}': 1,
        'handler="none",method="GET",status="4xx"}': 1,
        'handler="none",method="POST",status="4xx"}': 1,
        'handler="none",method="OTHER",status="4xx"}': 1,
    }
    completions = '{handler="/v1/completions",method="POST"'
    assert series[f"http_request_duration_seconds_count{completions}}}"] == 2
    assert series[f'http_request_duration_seconds_bucket{completions},le="+Inf"}}'] == 2
    assert series["http_request_duration_highr_seconds_count"] == 7
    by_client = {name.partition("{")[2]: n for name, n in series.items() if name.startswith("parley:requests_total{")}
    assert by_client['api="tgi",key="key-2",status="200"}'] == 1
    assert by_client['api="openai",key="",status="401"}'] == 1
    assert {name.split('key="')[1].split('"')[0] for name in by_client} == {"", "key-2"}


async def test_metrics_tell_of_the_process_and_for_every_dashboard(serve):
    server = await serve()
    await server.post("/v1/completions", {"prompt": "a", "max_tokens": 3})
    page = (await server.get("/metrics")).body.decode()
    assert metric_value(page, "process_cpu_seconds_total") > 0
    resident, virtual = (metric_value(page, f"process_{kind}_memory_bytes") for kind in ("resident", "virtual"))
    assert 1e6 < resident < virtual
    assert 3 < metric_value(page, "process_open_fds") < metric_value(page, "process_max_fds")
    assert time.time() - 86_400 < metric_value(page, "process_start_time_seconds") < time.time()
    assert re.search(r'^parley_build_info\{version="[^"]+",python_version="3\.[^"]+"\} 1$', page, re.M)
    assert metric_value(page, 'parley:engine_restarts_total{model_name="tiny"}') == 0
    first_response = 'nv_inference_first_response_histogram_ms_bucket{model="tiny",version="1",le="'
    bounds = [line.partition('"')[0] for line in page.split(first_response)[1:]]
    assert bounds == ["100.0", "500.0", "2000", "5000", "+Inf"]
    steps = metric_value(page, 'tgi_batch_inference_count{method="decode"}')
    for name in ("tgi_batch_concat_duration", "tgi_batch_decode_duration", "tgi_batch_filter_duration"):
        assert metric_value(page, f'{name}_count{{method="decode"}}') == steps
        assert metric_value(page, f'{name}_sum{{method="decode"}}') == 0
    assert 'tgi_batch_concat{reason="backpressure"}' in page


async def test_metrics_page_is_in_prometheus_format(serve):
    server = await serve(names=('a "quoted" \\ name',))
    answer = await server.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    line = re.compile(r'(# (HELP|TYPE) \S+ .+|[a-z0-9_:]+(\{(\w+="(\\.|[^"\\])*",?)+\})? [-+0-9.e]+)')
    lines = answer.body.decode().splitlines()
    assert [text for text in lines if not line.fullmatch(text)] == []
    names = [text.split()[2] for text in lines if text.startswith("# TYPE")]
    assert len(names) == len(set(names))


async def test_access_log_lines_cannot_be_forged(serve, caplog):
    from parley.log_lines import JsonFormatter, TextFormatter

    server = await serve(access_log=True)
    with caplog.at_level("INFO", logger="parley.access"):
        await server.get("/x%0a12:00:00%20forged%1b[31m")
        await server.post("/v1/chat/completions", HELLO_CHAT)
        await server.until(lambda: len(caplog.records) == 2)
    missing, chat = caplog.records
    for formatter in (TextFormatter(), JsonFormatter()):
        text = formatter.format(missing)
        assert "\n" not in text and "\x1b" not in text
    assert "status=200" in TextFormatter().format(chat) and "out=8" in TextFormatter().format(chat)
    assert "Hello" not in JsonFormatter().format(chat)


async def test_access_log_says_who_was_refused_and_why(serve, caplog):
    server = await serve(access_log=True, api_keys=["first", "second"])
    with caplog.at_level("INFO", logger="parley.access"):
        await server.post("/v1/chat/completions", HELLO_CHAT | {"temperature": 9}, authorization="Bearer second")
        await server.post("/tgi/generate", {"inputs": "a", "parameters": {"top_p": 3}}, authorization="Bearer first")
        await server.post("/v1/messages", {}, authorization="Bearer third")
        await server.until(lambda: len(caplog.records) == 3)
    chat, generate, messages = (record.msg.log_fields for record in caplog.records)
    assert (chat["api"], chat["key"], chat["client"], chat["field"]) == ("openai", "key-2", "127.0.0.1", "temperature")
    assert "temperature" in chat["error"] and "9" in chat["error"] and chat["status"] == 400
    assert (generate["api"], generate["key"], generate["status"]) == ("tgi", "key-1", 422)
    assert (messages["api"], messages["key"], messages["status"]) == ("anthropic", "", 401)
    assert "third" not in str(caplog.records[2].msg)
    assert str(caplog.records[0].msg).endswith(f"field=temperature error={chat['error']}")


async def test_access_log_says_why_where_the_api_hides_it_or_refuses_in_its_own_words(serve, caplog):
    server = await serve(access_log=True)
    with caplog.at_level("INFO", logger="parley.access"):
        await server.post("/vllm/generate", {"prompt": "a", "frobnicate": 1})
        await server.post("/v2/repository/models/tiny/unload", {})
        await server.until(lambda: len(caplog.records) == 2)
    hidden, own = (record.msg.log_fields for record in caplog.records)
    assert hidden["status"] == 500 and hidden["field"] == "frobnicate" and "frobnicate" in hidden["error"]
    assert own["status"] == 503 and "not allowed" in own["error"]


async def test_access_log_says_why_a_stream_failed(serve, caplog):
    server = await serve(access_log=True, tick=0.01)
    with caplog.at_level("INFO", logger="parley.access"):
        body = HELLO_CHAT | {"stream": True, "max_tokens": 3000}
        answer = asyncio.create_task(server.post("/v1/chat/completions", body))
        await server.until(lambda: server.engine.stats.generated_tokens > 3)
        server.engine.crash_engine()
        await answer
        await server.until(lambda: caplog.records)
    line = caplog.records[0].msg.log_fields
    assert line["status"] == 200 and line["finish"] == "error" and "engine" in line["error"]


@pytest.mark.parametrize("log_bodies", [False, True])
async def test_bodies_are_logged_only_if_asked_for(serve, caplog, log_bodies):
    server = await serve(access_log=True, log_bodies=log_bodies)
    chat = {"messages": [{"role": "user", "content": "Hello data:image/png;base64," + "A" * 30}], "max_tokens": 20}
    with caplog.at_level("INFO", logger="parley.access"):
        await server.post("/v1/chat/completions", chat)
        await server.post("/v1/chat/completions", chat | {"stream": True, "user": "x" * 9000})
        await server.until(lambda: len(caplog.records) == 2)
    whole, streamed = (record.msg.log_fields for record in caplog.records)
    assert ("request" in whole) is ("answer" in streamed) is log_bodies
    if log_bodies:
        assert "Hello data:image/png;base64,…" in whole["request"] and '"choices"' in whole["answer"]
        assert len(streamed["request"]) == len(streamed["answer"]) == 2000
        assert streamed["answer"].startswith('data: {"id"')
