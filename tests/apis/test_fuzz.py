"""Odd bodies for every route: no answer may be a server error, and no request may remain afterwards."""

import json
import re

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import BODY_CODINGS, body_codings, encode, fuzz_settings, raw_bytes, run_undisturbed
from support.http_client import MODEL_INFO
from support.json_bombs import write_bomb
from support.member_strategies import json_values, scalars
from support.odd_bodies import (
    anthropic_bodies,
    cohere_bodies,
    first_cohere_bodies,
    mindie_bodies,
    odd_members,
    odd_stop_ids,
    ollama_bodies,
    openai_bodies,
    response_bodies,
    tei_bodies,
    tgi_bodies,
    token_bodies,
)

from parley.dialects import json_body
from parley.dialects.mounts import mount_table, universal_mounts

RESPONSE_ROUTES = [
    f"{prefix}/v1/{name}"
    for prefix in ("", "/openai")
    for name in ("responses", "responses/input_tokens", "responses/compact", "conversations")
]
OPENAI_ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/pooling"]
VLLM_ROUTES = [
    "/vllm/v1/chat/completions",
    "/vllm/v1/completions",
    "/vllm/invocations",
    "/vllm/tokenize",
    "/vllm/detokenize",
    "/vllm/generate",
    "/generate",
    "/vllm/v1/embeddings",
    "/vllm/pooling",
    "/vllm/v1/chat/completions/render",
    "/vllm/v1/completions/render",
    "/vllm/generative_scoring",
    "/vllm/v1/messages/render",
    "/vllm/v1/responses/render",
    "/vllm/v1/chat/completions/derender",
    "/vllm/v1/completions/derender",
    "/vllm/inference/v1/generate",
    "/vllm/inference/v1/abort_requests",
]
FIRST_COHERE_ROUTES = ["/v1/chat", "/cohere/v1/chat"]
COHERE_ROUTES = ["/v2/chat", "/cohere/v2/chat", "/cohere/v2/chat/render"]
TEI_ROUTES = [
    "/embed",
    "/embed_all",
    "/embed_sparse",
    "/similarity",
    "/predict",
    "/rerank",
    "/tokenize",
    "/decode",
    "/embeddings",
    "/",
]
TGI_ROUTES = ["/", "/generate", "/generate_stream", "/invocations", "/tokenize", "/chat_tokenize"]


async def check_openai(server, path: str, body: bytes, coding: str) -> None:
    name, compress = BODY_CODINGS[coding]
    answer = await server.post(path, compress(body), **({"content-encoding": name} if name else {}))

    assert answer.status < 500, (path, body, answer.body)
    if answer.status >= 400:
        error = answer.error
        assert set(error) == {"message", "type", "param", "code"}
        assert 0 < len(error["message"]) < 2000
        assert "0x" not in error["message"] and "Traceback" not in error["message"]
    elif not answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.json
    else:
        assert all("error" not in event for event in answer.events), (path, body)


async def test_openai_routes_never_answer_odd_bodies_with_500(serve):
    server = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))

    @fuzz_settings(4)
    @given(path=st.sampled_from(OPENAI_ROUTES), body=openai_bodies.map(encode) | raw_bytes, coding=body_codings)
    async def fuzz(path, body, coding):
        await check_openai(server, path, body, coding)

    await run_undisturbed(server, fuzz)
    assert await counts_every_token(server)


async def check_response(server, path: str, body: bytes) -> None:
    """Like ``check_openai``; a stream has events of its own."""
    answer = await server.post(path, body)
    assert answer.status < 500, (path, body, answer.body)
    if answer.status >= 400:
        assert set(answer.error) == {"message", "type", "param", "code"} and 0 < len(answer.error["message"]) < 2000
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.body.endswith(b"data: [DONE]\n\n") and b"event: error" not in answer.body, (path, body)
    else:
        assert answer.json["object"].startswith(("response", "conversation")), (path, body)


async def test_response_routes_never_answer_odd_bodies_with_500(serve):
    server = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))

    @fuzz_settings(25)
    @given(path=st.sampled_from(RESPONSE_ROUTES), body=response_bodies.map(encode) | raw_bytes)
    async def fuzz(path, body):
        await check_response(server, path, body)

    await run_undisturbed(server, fuzz)


async def counts_every_token(server) -> bool:
    """Whether the sizes of all steps add up to the tokens of all prompts and answers."""
    page = (await server.get("/metrics")).body.decode()
    names = ("iteration_tokens_total_sum", "prompt_tokens_total", "generation_tokens_total")
    steps, *tokens = (sum(map(float, re.findall(rf"^vllm:{name}{{.*}} (\S+)$", page, re.M))) for name in names)
    return 0 < steps == sum(tokens)


async def check_tgi(server, path: str, body: bytes) -> None:
    answer = await server.post(path, body)

    kind = answer.headers["content-type"]
    if kind.startswith("text/plain"):
        assert answer.status in (400, 422) and answer.body.startswith(b"Failed to "), (path, body, answer.body)
        assert len(answer.body) < 2000
    elif kind == "text/event-stream":
        *frames, last = answer.body.decode().removesuffix("\n\n").split("\n\n")
        end = json.loads(last.removeprefix("data: "))
        if list(end) == ["error", "error_type"]:
            assert path.startswith("/tgi") and not frames
            return
        assert end["generated_text"] is not None, (path, body)
        assert all(json.loads(frame.removeprefix("data: "))["generated_text"] is None for frame in frames)
    elif answer.status == 422:
        assert list(answer.json) == ["error", "error_type"] and len(answer.json["error"]) < 2000
        assert answer.json["error"].startswith("Input validation error: ")
    elif "error" in answer.json:
        assert (path, answer.status, set(answer.error)) == ("/tokenize", 400, {"message", "type", "param", "code"})
    else:
        assert answer.status == 200, (path, body, answer.body)


async def test_tgi_routes_never_answer_odd_bodies_with_500(serve):
    server = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))

    @fuzz_settings(4)
    @given(
        prefix=st.sampled_from(["", "/tgi"]), path=st.sampled_from(TGI_ROUTES), body=tgi_bodies.map(encode) | raw_bytes
    )
    async def fuzz(prefix, path, body):
        await check_tgi(server, prefix + path, body)

    await run_undisturbed(server, fuzz)


async def check_tei(server, path: str, body: bytes) -> None:
    answer = await server.post(path, body, **{"content-type": "application/json"})

    assert answer.status < 500, (path, body, answer.body)
    if answer.status == 200:
        assert isinstance(answer.json, list | dict)
    elif not answer.headers["content-type"].startswith("text/plain"):
        assert set(answer.json) in ({"error", "error_type"}, {"message", "code", "type"}), (path, body)


async def test_tei_routes_never_answer_odd_bodies_with_500(serve):
    server = await serve(info=msgspec.structs.replace(MODEL_INFO, token_vectors=True, labels=["a"]))

    @fuzz_settings(4)
    @given(path=st.sampled_from(TEI_ROUTES), body=tei_bodies.map(encode) | raw_bytes)
    async def fuzz(path, body):
        await check_tei(server, "/tei" + path, body)

    await run_undisturbed(server, fuzz)


async def check_vllm(server, path: str, body: bytes) -> None:
    answer = await server.post(path, body, **{"content-type": "application/json"})

    kind = answer.headers.get("content-type")
    if path == "/vllm/generate" and answer.status == 500:
        assert (kind, answer.body) == ("text/plain; charset=utf-8", b"Internal Server Error"), (path, body)
    elif path == "/generate" and kind and kind.startswith("text/plain"):
        assert answer.body.startswith(b"Failed to ")
    elif kind is None:
        assert all(json.loads(record)["text"] for record in answer.body.splitlines())
    elif kind.startswith("text/event-stream"):
        assert all("max allowed" in e["error"]["message"] for e in answer.events if "error" in e), (path, body)
    elif answer.status == 200:
        assert answer.json, (path, body)
    else:
        assert answer.status in (400, 404), (path, body, answer.body)
        assert set(answer.error) == {"message", "type", "param", "code"} and answer.error["code"] == answer.status
        assert 0 < len(answer.error["message"]) < 2000


async def test_vllm_routes_answer_odd_bodies_in_their_own_error_format(serve):
    server = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))

    @fuzz_settings(4)
    @given(path=st.sampled_from(VLLM_ROUTES), body=(openai_bodies | token_bodies).map(encode) | raw_bytes)
    async def fuzz(path, body):
        await check_vllm(server, path, body)

    await run_undisturbed(server, fuzz)


async def check_tgi_openai(server, path: str, body: bytes) -> None:
    answer = await server.post(path, body)

    kind = answer.headers["content-type"]
    if kind.startswith("text/plain"):
        assert answer.status in (400, 422) and answer.body.startswith(b"Failed to "), (path, body, answer.body)
    elif kind == "text/event-stream":
        assert answer.events, (path, body)
    elif answer.status == 500:  # TGI answers any invalid instance this way
        assert path == "/tgi/vertex" and answer.json["error_type"] == "Incomplete generation"
    elif answer.status != 200:
        assert answer.status in (422, 424) and list(answer.json) == ["error", "error_type"], (path, body, answer.body)
    else:
        assert answer.json.keys() & {"choices", "predictions"}, (path, body)


async def test_tgi_chat_and_vertex_routes_survive_odd_bodies(serve):
    server = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))
    instances = st.builds(
        lambda items: {"instances": items}, st.lists(tgi_bodies | openai_bodies, max_size=3) | json_values
    )

    @fuzz_settings(4)
    @given(
        path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]), body=openai_bodies.map(encode) | raw_bytes
    )
    async def fuzz(path, body):
        await check_tgi_openai(server, "/tgi" + path, body)

    @fuzz_settings(8)
    @given(prefix=st.sampled_from(["", "/tgi"]), body=instances.map(encode) | raw_bytes)
    async def fuzz_instances(prefix, body):
        await check_tgi_openai(server, prefix + "/vertex", body)

    await run_undisturbed(server, fuzz, fuzz_instances)


async def check_anthropic(server, path: str, body: bytes) -> None:
    answer = await server.post(path, body, **{"anthropic-version": "2023-06-01"})

    assert answer.status < 500, (path, body, answer.body)
    if answer.status >= 400:
        assert list(answer.json) == ["type", "error", "request_id"] and set(answer.error) == {"type", "message"}
        assert 0 < len(answer.error["message"]) < 2000 and "0x" not in answer.error["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.body.endswith(b'data: {"type":"message_stop"}\n\n'), (path, body, answer.body)
    else:
        assert "usage" in answer.json or "input_tokens" in answer.json


async def test_anthropic_routes_never_answer_odd_bodies_with_500(serve):
    server = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))
    paths = st.sampled_from(["/v1/messages", "/v1/messages/count_tokens"])

    @fuzz_settings(8)
    @given(prefix=st.sampled_from(["", "/anthropic"]), path=paths, body=anthropic_bodies.map(encode) | raw_bytes)
    async def fuzz(prefix, path, body):
        await check_anthropic(server, prefix + path, body)

    await run_undisturbed(server, fuzz)


async def test_first_cohere_chat_never_answers_odd_bodies_with_500(serve):
    server = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))

    @fuzz_settings(8)
    @given(path=st.sampled_from(FIRST_COHERE_ROUTES), body=first_cohere_bodies.map(encode) | raw_bytes)
    async def fuzz(path, body):
        answer = await server.post(path, body)
        assert answer.status < 500, (path, body, answer.body)
        if answer.status >= 400:
            assert list(answer.json) == ["id", "message"] and 0 < len(answer.json["message"]) < 2000
            return
        lines = [json.loads(line) for line in answer.body.splitlines()]
        if answer.headers["content-type"] == "application/stream+json":
            assert [line["is_finished"] for line in lines] == [False] * (len(lines) - 1) + [True]
            lines = [lines[-1]["response"]]
        assert lines[-1]["chat_history"][-1]["role"] == "CHATBOT"

    await run_undisturbed(server, fuzz)


async def test_cohere_chat_never_answers_odd_bodies_with_500(serve):
    server = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))

    @fuzz_settings(8)
    @given(path=st.sampled_from(COHERE_ROUTES), body=cohere_bodies.map(encode) | raw_bytes)
    async def fuzz(path, body):
        answer = await server.post(path, body)
        assert answer.status < 500, (path, body, answer.body)
        if answer.status >= 400:
            assert list(answer.json) == ["id", "message"] and 0 < len(answer.json["message"]) < 2000
        elif path.endswith("/render"):
            assert answer.json["token_ids"], (path, body)
        elif answer.headers["content-type"].startswith("text/event-stream"):
            assert answer.body.endswith(b"data: [DONE]\n\n") and b"event: message-end" in answer.body
        else:
            assert answer.json["message"]["role"] == "assistant"

    await run_undisturbed(server, fuzz)


mindie_roots = st.sampled_from(["/mindie", "/mindie-old"])
MINDIE_ROUTES = [
    "/",
    "/generate",
    "/generate_stream",
    "/infer",
    "/infer_token",
    "/v1/tokenizer",
    "/v2/models/tiny/infer",
    "/v2/models/tiny/generate",
    "/v2/models/tiny/generate_stream",
    "/v2/models/tiny/stopInfer",
]


async def test_mindie_routes_never_answer_odd_bodies_with_500(serve):
    server = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))

    @fuzz_settings(5)
    @given(root=mindie_roots, path=st.sampled_from(MINDIE_ROUTES), body=mindie_bodies.map(encode) | raw_bytes)
    async def fuzz(root, path, body):
        answer = await server.post(root + path, body)
        if answer.status != 200:
            assert answer.status in (422, 424) or (answer.status, path[-9:]) == (404, "stopInfer"), (path, answer.body)
            assert list(answer.json) == ["error", "error_type"] and len(answer.json["error"]) < 2000
        elif path == "/generate" and b"\0" in answer.body:
            assert all(json.loads(part)["text"] for part in answer.body.decode().removesuffix("\0").split("\0"))
        elif answer.headers["content-type"] == "text/event-stream":
            frames = answer.body.decode().removesuffix("\n\n").split("\n\n")
            last = json.loads(frames[-1].removeprefix("data:"))
            assert last.get("generated_text", last.get("text_output")) is not None, (path, body)
        else:
            assert answer.json, (path, body)

    await run_undisturbed(server, fuzz)


async def test_mindie_openai_routes_never_answer_odd_bodies_with_500(serve):
    server = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))

    @fuzz_settings(8)
    @given(
        root=mindie_roots,
        path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
        body=st.builds(lambda body, ids: encode({"model": "tiny"} | body | ids), openai_bodies, odd_stop_ids)
        | raw_bytes,
    )
    async def fuzz(root, path, body):
        answer = await server.post(root + path, body)
        if answer.status != 200:
            assert answer.status in (422, 424), (path, body, answer.body)
            assert list(answer.json) == ["error", "error_type"] and len(answer.json["error"]) < 2000
        elif answer.headers["content-type"] == "text/event-stream":
            assert "usage" in answer.events[-1], (path, body)
        else:
            assert answer.json["choices"], (path, body)

    await run_undisturbed(server, fuzz)


endpoint_configs = st.fixed_dictionaries(
    {},
    optional={
        "served_entities": st.lists(
            st.fixed_dictionaries({"entity_name": st.just("tiny") | scalars}, optional={"name": scalars}), max_size=3
        )
        | json_values,
        "served_models": json_values,
        "traffic_config": st.builds(
            lambda routes: {"routes": routes},
            st.lists(
                st.fixed_dictionaries({"served_model_name": scalars, "traffic_percentage": st.just(100) | scalars}),
                max_size=2,
            ),
        )
        | json_values,
    },
)
endpoint_creations = st.builds(
    lambda config, more: {"name": "e", "config": config} | more, endpoint_configs | json_values, odd_members
)
databricks_members = st.fixed_dictionaries(
    {}, optional={"thinking": json_values, "usage_context": json_values, "error_behavior": scalars}
)


async def check_databricks(server, method: str, path: str, body: bytes) -> None:
    answer = await server.call(method, path, body, {"content-type": "application/json"})

    if answer.status != 200:
        assert answer.status in (400, 403, 404, 409), (path, body, answer.body)
        assert list(answer.json) == ["error_code", "message"] and 0 < len(answer.json["message"]) < 2000
        assert "0x" not in answer.json["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert all("error_code" not in event for event in answer.events), (path, body)
    else:
        assert answer.json.keys() & {"choices", "data", "config", "tags"}, (path, body)


async def test_databricks_routes_never_answer_odd_bodies_with_500(serve):
    server = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))
    generating_paths = st.sampled_from(
        ["/tiny/invocations", "/chat/completions", "/completions", "/embeddings", "/e/served-models/x/invocations"]
    )
    management_calls = st.sampled_from(
        [("POST", ""), ("PUT", "/e/config"), ("PATCH", "/e/tags"), ("PUT", "/tiny/config")]
    )
    chat_bodies = st.builds(lambda body, more: body | more, openai_bodies, databricks_members)

    @fuzz_settings(8)
    @given(prefix=st.sampled_from(["", "/databricks"]), path=generating_paths, body=chat_bodies.map(encode) | raw_bytes)
    async def fuzz(prefix, path, body):
        await check_databricks(server, "POST", f"{prefix}/serving-endpoints{path}", body)

    @fuzz_settings(8)
    @given(call=management_calls, body=(endpoint_creations | endpoint_configs).map(encode) | raw_bytes)
    async def fuzz_endpoints(call, body):
        await check_databricks(server, call[0], "/api/2.0/serving-endpoints" + call[1], body)

    await run_undisturbed(server, fuzz, fuzz_endpoints)


OLLAMA_ROUTES = ["chat", "generate", "embed", "embeddings", "show", "pull", "push", "create", "copy"]


async def test_ollama_routes_never_answer_odd_bodies_with_500(serve):
    server = await serve(reply=lambda work, index: [70] * min(work.max_tokens, 3))

    @fuzz_settings(10)
    @given(
        prefix=st.sampled_from(["", "/ollama"]),
        route=st.sampled_from(OLLAMA_ROUTES),
        body=ollama_bodies.map(encode) | raw_bytes,
    )
    async def fuzz(prefix, route, body):
        answer = await server.post(f"{prefix}/api/{route}", body)
        if answer.status != 200:
            error = answer.json.pop("error")
            assert 0 < len(error) < 2000 and "0x" not in error and "Traceback" not in error
            # The original has this status for options of a wrong type, templates, and models that it cannot pull.
            known = (prefix and error.startswith(("option ", "template: "))) or route == "pull"
            assert answer.status in (400, 404) or (answer.status == 500 and known), (route, body, answer.body)
        elif answer.headers["content-type"] == "application/x-ndjson":
            *_, last = [json.loads(line) for line in answer.body.splitlines()]
            assert last.get("done") or last.get("status") == "success", (route, body, answer.body)
        else:
            assert answer.json, (route, body)

    await run_undisturbed(server, fuzz)


async def test_rejects_huge_lists_and_deeply_nested_json_at_once(serve):
    server = await serve()
    for body in (
        {"prompt": "a", "stop": ["x"] * 100_000},
        {"prompt": "a", "logit_bias": {str(n): 1 for n in range(300_000)}},
        {"prompt": ["a"] * 100_000},
        {"prompt": "a", "n": 10**9},
        {"prompt": "a", **{f"k{n}": n for n in range(100_000)}, "temperature": "x"},
    ):
        answer = await server.post("/v1/completions", body)
        assert answer.status == 400, str(body)[:50]
    messages = [{"role": "user", "content": "a"}] * 100_000
    assert (await server.post("/v1/chat/completions", {"messages": messages})).status == 400
    for body in (
        {"stop": ["x"] * 100_000},
        {"stop": ["x" * 20_000]},
        {"best_of": 10**9, "do_sample": True},
        {"truncate": 10**18},
        {f"k{n}": n for n in range(100_000)} | {"temperature": "x"},
    ):
        assert (await server.post("/generate", {"inputs": "a", "parameters": body})).status == 422
    for path in TGI_ROUTES[:4]:
        assert (await server.post(path, b'{"inputs":' + b"[" * 100_000)).status == 400
    deep = b'{"messages":' + b"[" * 100_000
    for path in OPENAI_ROUTES:
        assert (await server.post(path, deep)).status == 400
    assert await server.control()


POST_PATHS = sorted(
    path.replace("{model}", "tiny")
    for method, path in mount_table(universal_mounts())
    if method == "POST" and not path.startswith("/inference.")  # those are gRPC's
)


async def test_every_route_refuses_bodies_of_too_many_values(serve, monkeypatch):
    monkeypatch.setattr(json_body, "MAX_ARRAYS", 200)
    monkeypatch.setattr(json_body, "MAX_MEMBERS", 200)
    monkeypatch.setattr(json_body, "MAX_VALUES", 400)
    monkeypatch.setattr(json_body, "LAZY_SIZE", 100)
    server = await serve()
    before = await server.control()
    for path in POST_PATHS:
        for kind in ("arrays", "members", "strings", "escapes", "nesting"):
            answer = await server.post(path, write_bomb(kind, 8000))
            documented = answer.status == 501 or b"Input invalid lora" in answer.body
            documented |= path.startswith("/vllm") and answer.body == b"Internal Server Error"  # of its demo server
            assert answer.status < 500 or documented, (path, kind, answer.body)
            assert len(answer.body) < 4000, (path, kind)
    await server.wait_until_idle()
    assert await server.control() == before
