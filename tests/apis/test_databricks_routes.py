"""Databricks through a running server: every path, the documented members of answers and streams, keys and errors."""

import asyncio
import base64
import json

import msgspec
import pytest
from support.http_client import MODEL_INFO
from support.loop_clock import pass_time

from parley.engine.scripted_engine import ScriptedEngine
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.types import KeyOwner, ParleySettings

ROOT = "/api/2.0/serving-endpoints"
TALK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
TEXT = {"prompt": "Hi", "max_tokens": 3}
INPUT = {"input": ["Hi", "there"]}
USAGE = {"prompt_tokens", "completion_tokens", "total_tokens"}
MESSAGE = {"role", "content"}
# The members that each kind of answer has in Databricks's documentation; log-probabilities are listed there as null.
DOCUMENTED = {
    "chat": {
        "": {"id", "choices", "object", "created", "model", "usage"},
        "choices": {"index", "message", "finish_reason", "logprobs"},
        "choices.message": MESSAGE,
        "usage": USAGE,
    },
    "chunk": {
        "": {"id", "choices", "object", "created", "model", "usage"},
        "choices": {"index", "delta", "finish_reason"},
        "usage": USAGE,
    },
    "completion": {
        "": {"id", "choices", "object", "created", "usage"},
        "choices": {"index", "text", "finish_reason"},
        "usage": USAGE,
    },
    "embedding": {
        "": {"id", "object", "model", "data", "usage"},
        "data": {"object", "index", "embedding"},
        "usage": USAGE - {"completion_tokens"},
    },
}
PATHS = {
    "chat": ("/chat/completions", "/v1/chat/completions", "/tiny/invocations", "/tiny/served-models/tiny/invocations"),
    "completion": ("/completions", "/v1/completions", "/tiny/invocations", "/tiny/served-models/tiny"),
    "embedding": ("/embeddings", "/v1/embeddings", "/tiny/invocations", "/tiny/served-models/tiny/invocations"),
}
REQUESTS = {"chat": TALK, "completion": TEXT, "embedding": INPUT}


def assert_documented_members(answer, kind):
    """Assert that an answer has exactly the documented members."""
    for path, names in DOCUMENTED[kind].items():
        value = answer
        for name in filter(None, path.split(".")):
            value = value[name][0] if isinstance(value[name], list) else value[name]
        assert set(value) == names, (kind, path)


@pytest.mark.parametrize("kind", REQUESTS)
async def test_every_databricks_path_answers_with_the_documented_members(serve, kind):
    server = await serve()
    for path in PATHS[kind]:
        named = {} if path.startswith("/tiny") else {"model": "system.ai.tiny"}
        answer = await server.post("/databricks/serving-endpoints" + path, REQUESTS[kind] | named)
        assert answer.status == 200, answer.body
        assert answer.headers["served-model-name"] == "tiny"
        assert_documented_members(answer.json, kind)
        lenient = await server.post("/serving-endpoints" + path, REQUESTS[kind] | named | {"unheard_of": 1})
        assert lenient.json.keys() >= answer.json.keys()
        if path.startswith("/v1"):
            for base in ("mlflow", "openai"):
                gateway = await server.post(f"/databricks/ai-gateway/{base}{path}", REQUESTS[kind] | named)
                assert gateway.json.keys() == answer.json.keys()
        refused = await server.post("/databricks/serving-endpoints" + path, REQUESTS[kind] | named | {"unheard_of": 1})
        assert (refused.status, refused.json["error_code"]) == (400, "BAD_REQUEST")


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_databricks_stream_frames_have_the_documented_members(serve, kind):
    server = await serve(reply=lambda work, index: [70] * work.max_tokens)
    for path in PATHS[kind]:
        answer = await server.post("/databricks/serving-endpoints" + path, REQUESTS[kind] | {"stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.events
        for event in events:
            assert_documented_members(event, "chunk" if kind == "chat" else kind)
        ends = [event["choices"][0]["finish_reason"] for event in events]
        assert ends == [None] * (len(events) - 1) + ["length"]
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts) and counts[-1] == 3
        roles = [event["choices"][0].get("delta", {}).get("role") for event in events]
        assert roles == ["assistant" if kind == "chat" else None] + [None] * (len(events) - 1)


async def test_databricks_streams_carry_no_keep_alive_comments(serve):
    server = await serve(reply=lambda work, index: [70] * work.max_tokens, tick=0.05, ping_interval=0.01)
    answer = await server.post("/serving-endpoints/tiny/invocations", TALK | {"stream": True})
    lines = answer.body.decode().split("\n")
    assert all(line.startswith("data: ") for line in lines if line), "MLflow's client raises at anything else"
    assert answer.events[-1]["choices"][0]["finish_reason"] == "length"


async def test_databricks_request_past_its_deadline_is_504_or_truncated(serve):
    server = await serve(reply=lambda work, index: [70] * work.max_tokens, tick=0.001, timeout=60)
    prompt = {"prompt": "Hi", "max_tokens": 4000}
    running = [
        asyncio.create_task(server.post("/databricks/serving-endpoints/completions", prompt | members))
        for members in ({}, {"error_behavior": "truncate"})
    ]
    await server.until(lambda: server.engine.stats.generated_tokens > 20)
    await pass_time(60)
    late, cut = await asyncio.gather(*running)
    assert (late.status, late.json["error_code"]) == (504, "DEADLINE_EXCEEDED")
    assert cut.status == 200 and cut.json["choices"][0]["finish_reason"] == "length"


async def test_databricks_prompt_beyond_the_context_is_400_or_truncated(serve):
    server = await serve(reply=lambda work, index: [70] * work.max_tokens)
    prompt = {"prompt": "Hi", "max_tokens": 5000}
    answer = await server.post("/databricks/serving-endpoints/completions", prompt)
    assert (answer.status, answer.json["error_code"]) == (400, "BAD_REQUEST")
    assert "maximum context length is 4096 tokens" in answer.json["message"]
    cut = await server.post("/databricks/serving-endpoints/completions", prompt | {"error_behavior": "truncate"})
    assert cut.json["choices"][0]["finish_reason"] == "length"
    assert cut.json["usage"]["total_tokens"] == 4096


async def test_databricks_applies_the_chat_template_unless_prompt_is_raw(serve):
    server = await serve()
    counts = []
    for raw in (True, False):
        body = TEXT | {"use_raw_prompt": raw, "echo": True, "suffix": " End."}
        answer = (await server.post("/serving-endpoints/completions", body)).json
        text = answer["choices"][0]["text"]
        assert text.startswith("Hi") and text.endswith(" End.") and "<|" not in text[:2]
        counts.append(answer["usage"]["prompt_tokens"])
    without_template = (await server.post("/tokenize", {"prompt": "Hi"})).json["count"]
    with_template = (await server.post("/tokenize", {"messages": TALK["messages"]})).json["count"]
    assert counts == [without_template, with_template] and with_template > without_template


async def test_databricks_prepends_the_instruction_to_each_embedded_text(serve):
    server = await serve()
    prefixed = (await server.post("/serving-endpoints/embeddings", INPUT | {"instruction": "Find:"})).json
    whole = {"input": ["Find: Hi", "Find: there"]}
    expected = (await server.post("/serving-endpoints/embeddings", whole)).json
    assert prefixed["data"] == expected["data"] and prefixed["usage"] == expected["usage"]


async def test_databricks_accepts_bearer_and_basic_keys_and_rejects_others(serve):
    key = "dapi-0123456789abcdef"
    server = await serve(api_keys=(key,))
    path = "/databricks/serving-endpoints/tiny/invocations"
    basic = "Basic " + base64.b64encode(f"token:{key}".encode()).decode()
    for headers in ({"authorization": f"Bearer {key}"}, {"authorization": basic}):
        assert (await server.call("POST", path, TALK, headers)).status == 200
    missing = await server.call("POST", path, TALK)
    assert (missing.status, missing.json["error_code"]) == (401, "UNAUTHENTICATED")
    wrong = await server.call("POST", path, TALK, {"authorization": "Bearer dapi-wrong"})
    assert (wrong.status, wrong.json) == (403, {"error_code": "PERMISSION_DENIED", "message": "Invalid access token."})
    management = await server.get("/api/2.0/serving-endpoints")
    assert (management.status, management.json["error_code"]) == (401, "UNAUTHENTICATED")


async def test_databricks_sdk_gets_its_host_metadata_without_a_key(serve):
    server = await serve(api_keys=("secret",))
    for prefix in ("", "/databricks"):
        answer = await server.get(f"{prefix}/.well-known/databricks-config")
        assert (answer.status, answer.json) == (200, {"oidc_endpoint": ""})


async def test_databricks_missing_endpoints_and_paths_have_error_codes(serve):
    server = await serve()
    for path, code in (
        ("/serving-endpoints/none/invocations", "RESOURCE_DOES_NOT_EXIST"),
        ("/serving-endpoints/dummy/invocations", "RESOURCE_DOES_NOT_EXIST"),
        ("/serving-endpoints/tiny/served-models/none/invocations", "RESOURCE_DOES_NOT_EXIST"),
        ("/serving-endpoints/tiny/nothing", "ENDPOINT_NOT_FOUND"),
        ("/api/2.0/serving-endpoints/none/config", "ENDPOINT_NOT_FOUND"),
    ):
        answer = await server.post("/databricks" + path, TALK)
        assert answer.status in (404, 405) and list(answer.json) == ["error_code", "message"]
        assert answer.json["error_code"] in (code, "BAD_REQUEST"), path
    large = json.dumps(TALK | {"client_request_id": "x" * (4 << 20)}).encode()
    assert (await server.post("/databricks/serving-endpoints/tiny/invocations", large)).status == 413
    assert (await server.get("/databricks/api/2.0/serving-endpoints/none/metrics")).json == {
        "error_code": "RESOURCE_DOES_NOT_EXIST",
        "message": "Endpoint with name 'none' does not exist.",
    }
    metrics = await server.get("/api/2.0/serving-endpoints/tiny/metrics")
    assert metrics.headers["content-type"].startswith("text/plain") and b"parley:" in metrics.body


async def test_databricks_full_queue_answers_429_with_retry_after(serve):
    server = await serve(reply=lambda work, index: [70] * work.max_tokens, tick=0.02, max_batch=1, max_queue=0)
    running = asyncio.create_task(server.post("/serving-endpoints/tiny/invocations", TALK | {"max_tokens": 30}))
    await server.until(lambda: bool(server.service.open_requests))
    for prefix in ("", "/databricks"):
        answer = await server.post(prefix + "/serving-endpoints/tiny/invocations", TALK)
        assert (answer.status, answer.json["error_code"]) == (429, "REQUEST_LIMIT_EXCEEDED")
        assert answer.headers["retry-after"].isdigit(), "the SDK reads nothing else"
    assert (await running).status == 200


# -- several models


def repeat_token(token):
    return lambda work, index: [token] * work.max_tokens


@pytest.fixture
async def three_models(serve, folder):
    """Two models that generate and one that only embeds."""

    def make_model(name, **changes):
        info = msgspec.structs.replace(MODEL_INFO, **changes)
        settings = ParleySettings(model=str(folder), max_batch=8)
        return ServedModel((name,), settings, ScriptedEngine(repeat_token(301), info=info), ServerOptions())

    others = [make_model("large"), make_model("vectors", generates=False, dimensions=8)]
    return await serve(repeat_token(300), names=("small", "org/alias"), beside=others)


async def test_databricks_endpoint_routes_to_the_model_with_all_traffic(three_models):
    entities = [{"entity_name": name, "name": name[0]} for name in ("small", "large")]
    routes = [
        {"served_model_name": "s", "traffic_percentage": 0},
        {"served_model_name": "l", "traffic_percentage": 100},
    ]
    config = {"served_entities": entities, "traffic_config": {"routes": routes}}
    created = await three_models.post(ROOT, {"name": "ab", "config": config})
    assert created.status == 200 and created.json["task"] == "llm/v1/chat"
    expected_texts = {
        name: three_models.model.text_pipeline.tokenizer.decode([token] * 3)
        for name, token in (("small", 300), ("large", 301))
    }
    for path, name in (
        ("/ab/invocations", "large"),
        ("/ab/served-models/s/invocations", "small"),
        ("/small/invocations", "small"),
        ("/large/invocations", "large"),
    ):
        answer = await three_models.post("/databricks/serving-endpoints" + path, TALK)
        assert (answer.json["model"], answer.json["choices"][0]["message"]["content"]) == (
            name,
            expected_texts[name],
        ), path
        assert answer.headers["served-model-name"] in (name, name[0])
    by_body = await three_models.post("/serving-endpoints/chat/completions", TALK | {"model": "org/alias"})
    assert by_body.json["model"] == "org/alias"
    listed = (await three_models.get(ROOT)).json["endpoints"]
    assert [entry["name"] for entry in listed] == ["ab", "small", "org/alias", "large", "vectors"]
    assert [entry["task"] for entry in listed] == ["llm/v1/chat"] * 4 + ["llm/v1/embeddings"]


async def test_rejects_an_endpoint_that_mixes_chat_and_embedding_models(three_models):
    entities = [{"entity_name": name} for name in ("small", "vectors")]
    routes = [{"served_model_name": f"{name}-1", "traffic_percentage": 50} for name in ("small", "vectors")]
    config = {"served_entities": entities, "traffic_config": {"routes": routes}}
    refused = await three_models.post(ROOT, {"name": "ab", "config": config})
    assert (refused.status, refused.json["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert "llm/v1/chat, llm/v1/embeddings" in refused.json["message"]
    created = await three_models.post(ROOT, {"name": "v", "config": {"served_entities": [{"entity_name": "vectors"}]}})
    assert created.json["task"] == "llm/v1/embeddings"
    assert (await three_models.post("/serving-endpoints/v/invocations", INPUT)).status == 200
    wrong = await three_models.post("/serving-endpoints/v/invocations", TALK)
    assert (wrong.status, wrong.json["error_code"]) == (400, "BAD_REQUEST")


async def test_endpoint_state_follows_added_and_removed_models(three_models, folder):
    settings = ParleySettings(model=str(folder), max_batch=8)
    late = ServedModel(("late",), settings, ScriptedEngine(repeat_token(302), info=MODEL_INFO), ServerOptions())
    entity = {"served_entities": [{"entity_name": "late"}]}
    assert (await three_models.post(ROOT, {"name": "e", "config": entity})).status == 400
    await three_models.service.serve_model(late)
    assert (await three_models.post(ROOT, {"name": "e", "config": entity})).status == 200
    assert (await three_models.post("/serving-endpoints/e/invocations", TALK)).json["model"] == "late"
    assert (await three_models.get(f"{ROOT}/e")).json["state"]["ready"] == "READY"
    await three_models.service.retire_model(late)
    endpoint = (await three_models.get(f"{ROOT}/e")).json
    assert endpoint["state"]["ready"] == "NOT_READY"
    assert endpoint["config"]["served_entities"][0]["state"]["deployment"] == "DEPLOYMENT_FAILED"
    assert (await three_models.post("/serving-endpoints/e/invocations", TALK)).status == 404
    assert (await three_models.post("/serving-endpoints/late/invocations", TALK)).status == 404


async def test_databricks_answers_responses_at_endpoints(serve):
    server = await serve(reply=lambda work, index: [70] * work.max_tokens)
    items = {"input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 16}
    for path in ("/responses", "/v1/responses", "/tiny/invocations", "/tiny/served-models/tiny/invocations"):
        answer = await server.post("/databricks/serving-endpoints" + path, items)
        assert answer.status == 200, answer.body
        assert answer.headers["served-model-name"] == "tiny"
        assert (answer.json["object"], answer.json["usage"]["output_tokens"]) == ("response", 16)
    gateway = await server.post("/ai-gateway/mlflow/v1/responses", items | {"model": "system.ai.tiny", "stream": True})
    assert gateway.body.endswith(b"data: [DONE]\n\n") and b"response.incomplete" in gateway.body
    refused = await server.post("/databricks/serving-endpoints/responses", items | {"unheard_of": 1})
    assert (refused.status, refused.json["error_code"]) == (400, "BAD_REQUEST")


async def test_databricks_enforces_rate_limits_of_an_endpoint(serve):
    server = await serve(reply=lambda work, index: [70] * work.max_tokens, api_keys=("one", "two"), admin_keys=("adm",))
    one, two, admin = ({"authorization": f"Bearer {key}"} for key in ("one", "two", "adm"))
    created = {"name": "e", "config": {"served_entities": [{"entity_name": "tiny"}]}}
    assert (await server.call("POST", ROOT, created, admin)).status == 200

    limits = {"rate_limits": [{"calls": 2, "key": "user", "renewal_period": "minute"}]}
    put = await server.call("PUT", ROOT + "/e/rate-limits", limits, admin)
    assert put.json == limits
    assert (await server.call("PUT", ROOT + "/e/rate-limits", limits, one)).status == 403
    assert (await server.call("GET", ROOT + "/e", None, one)).json["ai_gateway"] == limits
    path = "/serving-endpoints/e/invocations"
    statuses = [(await server.call("POST", path, TALK, key)).status for key in (one, one, two, one, two, two)]
    assert statuses == [200, 200, 200, 429, 200, 429]
    refused = await server.call("POST", path, TALK, one)
    assert refused.json["error_code"] == "REQUEST_LIMIT_EXCEEDED" and "2 requests per minute" in refused.json["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60

    tokens = {"rate_limits": [{"tokens": 1, "key": "endpoint", "renewal_period": "minute"}]}
    assert (await server.call("PUT", ROOT + "/e/ai-gateway", tokens, admin)).json == tokens
    statuses = [(await server.call("POST", path, TALK, key)).status for key in (one, two)]
    assert statuses == [200, 429]
    assert (await server.call("PUT", ROOT + "/e/rate-limits", {"rate_limits": []}, admin)).status == 200
    assert (await server.call("POST", path, TALK, one)).status == 200


async def test_permissions_hold_for_endpoints_and_for_models_in_every_api(serve):
    keys = {name: f"{name}-{'x' * 16}" for name in ("ann", "bob", "admin")}
    owners = {keys[name]: KeyOwner(name) for name in ("ann", "bob")}
    server = await serve(api_keys=(keys["ann"], keys["bob"]), admin_keys=(keys["admin"],), key_owners=owners)

    async def call(client, method, path, body=None):
        return await server.call(method, path, body, {"authorization": f"Bearer {keys[client]}"})

    config = {"served_entities": [{"entity_name": "tiny", "name": "a"}]}
    made = await call("admin", "POST", ROOT, {"name": "e", "config": config})
    access = {"access_control_list": [{"user_name": "ann", "permission_level": "CAN_QUERY"}]}
    path = "/api/2.0/permissions/serving-endpoints/"
    for client, status in (("ann", 403), ("admin", 200)):
        assert (await call(client, "PUT", path + made.json["id"], access)).status == status
    invocations = "/serving-endpoints/e/invocations"
    assert (await call("ann", "POST", invocations, TALK)).status == 200
    assert (await call("admin", "POST", invocations, TALK)).status == 200
    refused = await call("bob", "POST", invocations, TALK)
    message = "This API key does not have permission 'Query' on Endpoint e."
    assert (refused.status, refused.json) == (403, {"error_code": "PERMISSION_DENIED", "message": message})
    assert (await call("bob", "GET", ROOT + "/e")).status == 403
    unknown = "/serving-endpoints/e/served-models/none/invocations"  # says nothing about the endpoint either
    assert [(await call(client, "POST", unknown, TALK)).status for client in ("ann", "bob")] == [404, 403]
    metrics = [(await call(client, "GET", ROOT + "/e/metrics")).status for client in ("ann", "bob", "admin")]
    assert metrics == [200, 403, 200]

    chat = {"model": "tiny"} | TALK
    assert (await call("bob", "POST", "/v1/chat/completions", chat)).status == 200
    own = await call("admin", "GET", ROOT + "/tiny")
    assert (await call("admin", "PATCH", path + own.json["id"], access)).status == 200
    requests = (
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", {"model": "tiny", "input": "Hi", "max_output_tokens": 3}),
        ("/api/chat", chat | {"stream": False}),
        ("/generate", {"inputs": "Hi"}),
        ("/v2/models/tiny/generate", {"text_input": "Hi"}),
        ("/v1/embeddings", {"model": "tiny"} | INPUT),
        ("/serving-endpoints/tiny/invocations", TALK),
    )
    for path, body in requests:
        assert [(await call(client, "POST", path, body)).status for client in ("ann", "bob")] == [200, 403], path


async def test_inference_table_records_answers_streams_and_refusals(serve, tmp_path):
    server = await serve(inference_tables=str(tmp_path))
    table = {"enabled": True, "catalog_name": "main", "schema_name": "logs"}
    config = {"served_entities": [{"entity_name": "tiny", "name": "a"}]}
    await server.post(ROOT, {"name": "e", "config": config, "ai_gateway": {"inference_table_config": table}})
    path = "/serving-endpoints/e/invocations"
    bodies = [TALK | {"client_request_id": "c"}, TALK | {"stream": True}, TALK | {"max_tokens": -1}, INPUT]
    answers = [await server.post(path, body) for body in bodies]
    await server.post("/serving-endpoints/tiny/invocations", TALK)
    lines = []
    while len(lines) < len(bodies):
        await asyncio.sleep(0.01)
        lines = [line for file in sorted(tmp_path.glob("*/*.jsonl")) for line in file.read_text().splitlines()]
    rows = list(map(json.loads, lines))
    assert [row["status_code"] for row in rows] == [200, 200, 400, 200]
    assert [row["response"] for row in rows] == [answer.body.decode() for answer in answers]
    assert [json.loads(row["request"]) for row in rows] == bodies
    assert [row["client_request_id"] for row in rows] == ["c", None, None, None]
    assert {row["served_entity_id"] for row in rows} == {"a"} and rows[0]["databricks_request_id"] in rows[0][
        "response"
    ]
