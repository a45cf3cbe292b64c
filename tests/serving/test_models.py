"""Several models in one server: routing by name, model lists of each API, adding and removing models at run time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.http_client import HELLO_CHAT, MODEL_INFO, RunningServer

from parley.boot.engine_factories import make_engine
from parley.engine.protocol import EngineFailed
from parley.engine.scripted_engine import ScriptedEngine
from parley.errors import NotReady, UnknownModel
from parley.hub import ModelMissing
from parley.serving.media import workers
from parley.serving.model_registry import ModelRegistry
from parley.serving.served_model import ServedModel, divide_memory
from parley.serving.server_options import MediaOptions, OfferedModel, ServerOptions
from parley.types import EngineRequest, ParleySettings

MAIN, OTHER = ("main", "org/alias"), ("small", "tiny")
FIRST, SECOND = 300, 301  # the only token that each model generates


def repeat_token(token: int) -> Callable[[EngineRequest, int], list[int]]:
    return lambda work, index: [token] * work.max_tokens


@pytest.fixture
def make_model(folder: Path) -> Callable[..., ServedModel]:
    """Make another model with its own scripted engine."""

    def make(*names: str, queue: int = 1024, token: int = SECOND, context: int = 512, **engine: Any) -> ServedModel:
        options = ServerOptions(max_queue=queue)
        info = msgspec.structs.replace(MODEL_INFO, max_model_len=context)
        settings = ParleySettings(model=str(folder), max_batch=2)
        return ServedModel(
            names or OTHER, settings, ScriptedEngine(repeat_token(token), info=info, max_batch=2, **engine), options
        )

    return make


@pytest.fixture
async def two_models(serve, make_model) -> RunningServer:
    return await serve(repeat_token(FIRST), names=MAIN, beside=[make_model()])


def expected_text(server: RunningServer, token: int, count: int = 2) -> str:
    return server.model.text_pipeline.tokenizer.decode([token] * count)


def completion_body(model: str | None, **members: Any) -> dict[str, Any]:
    model_member = {} if model is None else {"model": model}
    return {**model_member, "prompt": "a", "max_tokens": 2, "ignore_eos": True, **members}


async def test_stop_infer_stops_only_requests_of_its_model(serve, make_model):
    server = await serve(repeat_token(FIRST), tick=0.001, names=MAIN, beside=[make_model(step_seconds=0.001)])
    long_request = {"id": "mine", "text_input": "a", "parameters": {"max_new_tokens": 3000}}
    running = asyncio.create_task(server.post("/mindie/v2/models/main/generate", long_request))
    await server.until(lambda: server.engine.stats.generated_tokens > 3)
    assert (await server.post("/v2/models/small/stopInfer", {"id": "mine"})).status == 404
    assert (await server.post("/v2/models/main/stopInfer", {"id": "mine"})).status == 200
    assert (await running).json["model_name"] == "main"


# Requested name, token of the model that answers, name in the answer.
NAMES_AND_MODELS = [
    (None, FIRST, "main"),
    ("", FIRST, "main"),
    ("tgi", FIRST, "main"),
    ("https://host/x", FIRST, "main"),
    ("main", FIRST, "main"),
    ("org/alias", FIRST, "org/alias"),
    ("small", SECOND, "small"),
    ("tiny", SECOND, "tiny"),
]


@pytest.mark.parametrize("path", ["/v1", "/openai/v1", "/vllm/v1", "/tgi/v1"])
@pytest.mark.parametrize(("name", "token", "answer_name"), NAMES_AND_MODELS)
async def test_model_name_in_the_body_selects_the_model(two_models, path, name, token, answer_name):
    answer = await two_models.post(f"{path}/completions", completion_body(name))
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["text"] == expected_text(two_models, token) and answer.json["model"] in (
        answer_name,
        name,
    )
    chat = HELLO_CHAT | {"max_tokens": 2, "stream": False, "model": name}
    assert (await two_models.post(f"{path}/chat/completions", chat)).json["choices"][0]["message"][
        "content"
    ] == expected_text(two_models, token)


async def test_model_name_in_the_body_selects_the_model_of_a_stream(two_models):
    for name, token in (("small", SECOND), ("org/alias", FIRST)):
        events = (await two_models.post("/v1/completions", completion_body(name, stream=True))).events
        assert {event["model"] for event in events} == {name}
        assert "".join(event["choices"][0]["text"] for event in events) == expected_text(two_models, token)


async def test_model_name_in_the_path_selects_the_model(two_models):
    for name, token in (("main", FIRST), ("tiny", SECOND)):
        answer = await two_models.post(f"/v2/models/{name}/generate", {"text_input": "a", "max_tokens": 2})
        assert answer.json["model_name"] == name and answer.json["text_output"].endswith(
            expected_text(two_models, token)
        )


async def test_apis_without_a_model_name_use_the_main_model(two_models):
    for members in ({}, {"model": "small"}, {"model": "nothing"}):  # TGI ignores this member
        for path in ("/generate", "/tgi/generate", "/mindie/generate", "/invocations"):
            answer = await two_models.post(path, {"inputs": "a", "parameters": {"max_new_tokens": 2}} | members)
            assert answer.status == 200, answer.body
            generated = answer.json[0] if isinstance(answer.json, list) else answer.json
            assert generated["generated_text"].endswith(expected_text(two_models, FIRST)), (path, generated)
    assert (await two_models.get("/info")).json["model_id"] == "main"
    answer = await two_models.post("/vllm/generate", {"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    assert answer.json["text"][0].endswith(expected_text(two_models, FIRST))


@pytest.mark.parametrize(
    ("path", "name", "error"),
    [
        ("/v1/completions", completion_body("nope"), ("error", "code")),
        ("/v1/chat/completions", HELLO_CHAT | {"model": "nope"}, ("error", "code")),
        ("/vllm/v1/completions", completion_body("nope"), ("error", "type")),
        ("/v2/models/nope/generate", {"text_input": "a"}, ("error",)),
        ("/v2/models/nope/infer", {"inputs": []}, ("error",)),
        ("/tokenize", {"model": "nope", "prompt": "a"}, ("error", "code")),
        ("/detokenize", {"model": "nope", "tokens": [1]}, ("error", "code")),
    ],
)
async def test_unknown_model_name_gets_the_error_of_each_api(two_models, path, name, error):
    answer = await two_models.post(path, name)
    assert answer.status == 404, answer.body
    value = answer.json
    for member in error:
        value = value[member]
    assert isinstance(value, str)
    assert "small" in answer.body.decode() or "unknown model" in answer.body.decode()


async def test_tgi_serves_an_unknown_model_name_by_the_main_model(two_models):
    answer = await two_models.post("/tgi/v1/chat/completions", HELLO_CHAT | {"model": "nope"})
    assert answer.status == 200, answer.body


async def test_invalid_body_is_reported_before_an_unknown_model(two_models):
    answer = await two_models.post("/v1/completions", completion_body("nope", max_tokens="x"))
    assert answer.status == 400 and answer.error["param"] == "max_tokens"


async def test_each_model_applies_its_own_context_limit(two_models):
    """The main model has a context of 4,096 tokens, the other model one of 512."""
    for path in ("/v1", "/vllm/v1"):
        assert (await two_models.post(f"{path}/completions", completion_body("main", max_tokens=1000))).status == 200
        refused = await two_models.post(f"{path}/completions", completion_body("small", max_tokens=1000))
        assert refused.status == 400 and "512" in refused.error["message"]
    assert (await two_models.post("/tokenize", {"model": "small", "prompt": "a"})).json["max_model_len"] == 512
    assert (await two_models.post("/tokenize", {"prompt": "a"})).json["max_model_len"] == 4096


async def test_model_lists_contain_every_name_and_alias(two_models):
    cards = (await two_models.get("/v1/models")).json["data"]
    assert [card["id"] for card in cards] == [*MAIN, *OTHER]
    assert [card["max_model_len"] for card in cards] == [4096, 4096, 512, 512]
    assert [card["root"] for card in (await two_models.get("/vllm/v1/models")).json["data"]] == ["main"] * 2 + [
        "small"
    ] * 2
    assert (await two_models.get("/v1/models/org/alias")).json["id"] == "org/alias"
    assert (await two_models.get("/v1/models/small")).json["max_model_len"] == 512
    assert (await two_models.get("/v1/models/nope")).status == 404
    index = (await two_models.post("/v2/repository/index")).json
    assert [model["name"] for model in index] == [*MAIN, *OTHER]
    assert (await two_models.get("/v2/models/tiny")).json["name"] == "tiny"
    assert (await two_models.post("/v2/repository/models/small/load")).status == 200
    assert (await two_models.post("/v2/repository/models/nope/load")).status == 400


async def test_metrics_count_each_model_separately(two_models):
    for name, times in (("main", 2), ("org/alias", 1), ("small", 4)):
        for _ in range(times):
            assert (await two_models.post("/v1/completions", completion_body(name))).status == 200
    await two_models.post("/v1/completions", completion_body("small", max_tokens=0, logit_bias={"9999": 1}))
    await two_models.wait_until_idle()
    page = (await two_models.get("/metrics")).body.decode()
    for name, count in (("main", 3), ("small", 4)):
        assert (
            f'vllm:request_success_total{{model_name="{name}",engine="0",finished_reason="length"}} {count}\n' in page
        )
        assert f'vllm:e2e_request_latency_seconds_count{{model_name="{name}",engine="0"}} {count}\n' in page
        assert f'nv_inference_request_success{{model="{name}",version="1"}} {count}\n' in page
        counts = (await two_models.get(f"/v2/models/{name}/stats")).json["model_stats"]
        assert [model_counts["inference_count"] for model_counts in counts] == [count]
    assert "\ntgi_request_success 3\n" in page
    assert page.count("# TYPE vllm:request_success_total") == 1
    types = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


async def test_full_queue_of_one_model_does_not_block_another(serve, make_model):
    server = await serve(names=MAIN, beside=[make_model(queue=0, step_seconds=0.01)])
    other = server.service.models[1]
    running = [
        asyncio.create_task(server.post("/v1/completions", completion_body("small", max_tokens=100))) for _ in range(2)
    ]
    await server.until(lambda: other.used_slots == 2)
    assert (await server.post("/v1/completions", completion_body("small"))).status == 429
    assert (await server.post("/v1/completions", completion_body("main"))).status == 200
    assert {answer.status for answer in await asyncio.gather(*running)} == {200}


async def test_concurrent_requests_reach_the_model_they_name(two_models):
    names = [name for name, _, _ in NAMES_AND_MODELS] * 10
    answers = await asyncio.gather(*(two_models.post("/v1/completions", completion_body(name)) for name in names))
    expected = {name: expected_text(two_models, token) for name, token, _ in NAMES_AND_MODELS}
    assert [answer.json["choices"][0]["text"] for answer in answers] == [expected[name] for name in names]
    await two_models.wait_until_idle()
    assert all(model.used_slots == 0 for model in two_models.service.models)


async def test_loading_model_is_reported_and_does_not_block_others(serve, make_model):
    server = await serve(repeat_token(FIRST), names=MAIN, beside=[make_model(load_seconds=0.5)], wait=False)
    await server.until(lambda: server.model.unready_error() is None)
    assert (await server.post("/v1/completions", completion_body("main"))).status == 200
    late = await server.post("/v1/completions", completion_body("small"))
    assert late.status == 503 and "small is still loading" in late.error["message"]
    probe = await server.get("/health/ready")
    assert probe.status == 503 and probe.json["model"] == "small"
    assert probe.json["models"] == {"main": "ready", "small": "loading"}
    assert (await server.get("/v2/models/main/ready")).status == 200
    assert (await server.get("/v2/models/small/ready")).status == 400
    ready = await server.post("/v2/repository/index", {"ready": True})
    assert [model["name"] for model in ready.json] == [*MAIN]
    await server.until(lambda: server.service.unready_error() is None)
    assert (await server.get("/health/ready")).status == 200


async def test_lost_engine_fails_only_requests_of_its_model(serve, make_model):
    server = await serve(repeat_token(FIRST), tick=0.01, names=MAIN, beside=[make_model(step_seconds=0.01)])
    lost = server.service.models[1]
    streams = {
        name: asyncio.create_task(server.post("/v1/completions", completion_body(name, max_tokens=40, stream=True)))
        for name in ("main", "small")
    }
    await server.until(
        lambda: (
            len(server.service.open_requests) == 2 and all(m.engine.open_stream_count for m in server.service.models)
        )
    )
    lost.engine.crash_engine("The engine process was killed.")
    answers = {name: await stream for name, stream in streams.items()}
    assert answers["main"].events[-1]["choices"][0]["finish_reason"] == "length"
    assert "killed" in answers["small"].body.decode()
    assert (await server.post("/v1/completions", completion_body("small"))).status == 503
    assert (await server.post("/v1/completions", completion_body("main"))).status == 200
    assert (await server.get("/health/ready")).json["models"] == {"main": "ready", "small": "failed"}


async def test_models_can_be_added_and_removed_at_run_time(serve, make_model):
    server = await serve(repeat_token(FIRST), names=MAIN)
    service, other = server.service, make_model(step_seconds=0.005, load_seconds=0.05)
    adding = asyncio.create_task(service.serve_model(other))
    await server.until(lambda: other in service.models)
    assert (await server.post("/v1/completions", completion_body("small"))).status == 503
    with pytest.raises(ValueError, match="tiny"):
        await service.serve_model(make_model("another", "tiny"))
    await adding
    assert (await server.post("/v1/completions", completion_body("tiny"))).json["choices"][0]["text"] == expected_text(
        server, SECOND
    )
    running = asyncio.create_task(server.post("/v1/completions", completion_body("small", max_tokens=50)))
    await server.until(lambda: len(other.open_requests) == 1)
    removing = asyncio.create_task(service.retire_model(other))
    await server.until(lambda: bool(other.ending_reason))
    assert (await server.post("/v1/completions", completion_body("small"))).status == 404
    assert (await running).json["usage"]["completion_tokens"] == 50
    await removing
    assert other.engine.state == "closed" and service.models == [server.model]
    with pytest.raises(ValueError, match="main"):
        await service.retire_model(server.model)


async def test_removing_a_model_fails_requests_that_outlast_the_drain(serve, make_model):
    server = await serve(names=MAIN, beside=[make_model(step_seconds=0.01)], drain=0.05)
    running = asyncio.create_task(server.post("/v1/completions", completion_body("small", max_tokens=500)))
    await server.until(lambda: bool(server.service.open_requests))
    await server.service.retire_model(server.service.models[1])
    answer = await running
    assert answer.status == 503 and "small is being removed" in answer.error["message"]


async def test_model_that_fails_to_load_is_not_added(serve, make_model, folder):
    server = await serve(names=MAIN)
    with pytest.raises(EngineFailed):
        await server.service.serve_model(make_model(load_failure="It has no weights."))
    offer = OfferedModel(("gone",), ParleySettings(model=str(folder / "gone")))
    missing = ServedModel(offer.names, offer.settings, make_engine(offer), ServerOptions())
    with pytest.raises(ModelMissing):
        await server.service.serve_model(missing)
    assert [model.name for model in server.service.models] == ["main"]
    await server.service.drain_models()
    with pytest.raises(NotReady):
        await server.service.serve_model(make_model())


async def test_removing_a_loading_model_stops_its_loading(serve, make_model):
    server = await serve(names=MAIN)
    other = make_model(load_seconds=30.0)
    adding = asyncio.create_task(server.service.serve_model(other))
    await server.until(lambda: other.engine.state == "loading")
    await server.service.retire_model(other)
    with pytest.raises(EngineFailed):
        await adding
    assert other not in server.service.models


def test_rejects_two_models_with_the_same_name(make_model):
    with pytest.raises(ValueError, match="tiny"):
        ModelRegistry(ServerOptions(), [make_model(), make_model("x", "tiny")])


async def test_real_model_name_takes_precedence_over_a_placeholder(make_model):
    service = ModelRegistry(ServerOptions(), [make_model("main"), make_model("tgi")])
    assert service.find_model("tgi").name == "tgi" and service.find_model("dummy").name == "main"
    with pytest.raises(UnknownModel) as error:
        service.find_model("nope")
    assert error.value.served == ["main", "tgi"]


def test_models_without_kv_memory_setting_share_the_rest(make_model, tmp_path):
    models = [make_model("a"), make_model("b"), make_model("c")]
    for model, size in zip(models, (100, 20, 3), strict=True):
        model.settings.model = str(tmp_path / model.name)
        (tmp_path / model.name).mkdir()
        (tmp_path / model.name / "model.safetensors").write_bytes(bytes(size))
    models[2].settings.kv_memory = 1000
    divide_memory(models)
    assert [model.settings.kv_share for model in models] == [0.5] * 3
    assert [model.settings.set_aside for model in models] == [20 + 1003, 1003, 0]


def test_named_reads_the_model_of_any_body_without_failing():
    from parley.dialects.route import model_in_body

    assert model_in_body(json.dumps({"prompt": [[1, 2]] * 99, "model": "m"}).encode()) == "m"
    for wrong in (b"", b"[]", b"{", b'{"model":1}', b'{"model":null}', b'{"x":"\xff"}', b"[" * 100_000):
        assert model_in_body(wrong) == ""


async def test_a_model_whose_eager_media_process_does_not_start_is_not_loaded(folder, monkeypatch):
    monkeypatch.setattr(workers, "missing_packages", lambda: ["av"])
    engine = ScriptedEngine(info=msgspec.structs.replace(MODEL_INFO, media_kinds=frozenset({"image"})))
    options = ServerOptions(media=MediaOptions(eager=True))
    model = ServedModel(("seeing",), ParleySettings(model=str(folder)), engine, options)
    with pytest.raises(EngineFailed, match="av is not installed"):
        await model.load_engine()
    await model.close_engine()
