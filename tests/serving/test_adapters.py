"""Adapters over HTTP: how each API names, lists, loads and unloads one, and its errors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.http_client import RunningServer

from parley.dialects.mounts import dedicated_mounts
from parley.engine.protocol import EngineFailed
from parley.engine.scripted_engine import ScriptedEngine
from parley.serving.model_registry import ModelRegistry
from parley.serving.served_model import ServedModel
from parley.serving.server_options import ServerOptions
from parley.types import EngineRequest, ParleySettings

BASE, ADAPTED = 300, 301  # the only token of an answer without and with an adapter
PROMPT = {"prompt": "a", "max_tokens": 2, "ignore_eos": True, "temperature": 0}


def reply_by_adapter(work: EngineRequest, index: int) -> list[int]:
    return [ADAPTED if work.adapter else BASE] * work.max_tokens


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of adapters, next to an adapter outside of it."""
    for name in ("root/one", "root/two", "root/deep/three", "outside"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    (tmp_path / "root" / "bare").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "near").symlink_to(tmp_path / "root" / "two")
    (tmp_path / "root" / "circle").symlink_to(tmp_path / "root" / "circle")
    return tmp_path / "root"


@pytest.fixture
async def lora_server(serve, root) -> RunningServer:
    """A server that lets clients load adapters."""
    return await serve(reply_by_adapter, lora_root=str(root))


async def load_adapter(server: RunningServer, name: str, path: str, prefix: str = "", **more):
    return await server.post(f"{prefix}/v1/load_lora_adapter", {"lora_name": name, "lora_path": path} | more)


def expected_text(server: RunningServer, token: int) -> str:
    return server.model.text_pipeline.tokenizer.decode([token] * 2)


async def test_each_api_selects_an_adapter_by_its_own_member(lora_server):
    server = lora_server
    assert (await load_adapter(server, "mine", "one")).status == 200
    own, base = expected_text(server, ADAPTED), expected_text(server, BASE)

    for prefix in ("", "/openai", "/vllm"):
        for name, expected in (("mine", own), ("tiny", base)):
            answer = (await server.post(f"{prefix}/v1/completions", PROMPT | {"model": name})).json
            assert (answer["model"], answer["choices"][0]["text"]) == (name, expected)
    chat = {"model": "mine", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert (await server.post("/v1/chat/completions", chat)).json["choices"][0]["message"]["content"] == own
    assert (await server.post("/tgi/v1/chat/completions", chat)).json["choices"][0]["message"]["content"] == own

    for prefix in ("", "/tgi"):
        body = {"inputs": "a", "parameters": {"max_new_tokens": 2, "adapter_id": "mine"}}
        assert (await server.post(f"{prefix}/generate", body)).json["generated_text"] == own
    body = {"inputs": "a", "parameters": {"max_new_tokens": 2, "adapter_id": "mine"}}
    assert (await server.post("/mindie/generate", body)).json["generated_text"] == own
    body["parameters"]["adapter_id"] = "None"
    assert (await server.post("/mindie/generate", body)).json["generated_text"] == base
    records = await server.post("/mindie/generate", {"prompt": "a", "max_tokens": 2, "model": "mine"})
    assert records.json["text"] == ["a " + own]

    body = {"text_input": "a", "max_tokens": 2, "lora_name": "mine", "exclude_input_in_output": True}
    for prefix in ("", "/triton"):
        assert (await server.post(f"{prefix}/v2/models/tiny/generate", body)).json["text_output"] == own
    del body["lora_name"]
    assert (await server.post("/v2/models/mine/generate", body)).json["text_output"] == own


async def test_unknown_adapter_gets_the_error_of_each_api(lora_server):
    server = lora_server
    parameters = {"max_new_tokens": 2, "adapter_id": "none-such"}
    answer = await server.post("/mindie/generate", {"inputs": "a", "parameters": parameters})
    assert (answer.status, answer.json["error"]) == (404, "Model none-such not found.")
    body = {"text_input": "a", "max_tokens": 2, "lora_name": "none-such"}
    answer = await server.post("/triton/v2/models/tiny/generate", body)
    assert (answer.status, answer.json["error"]) == (404, "LoRA feature is not enabled.")  # no adapter is loaded
    for prefix in ("", "/openai", "/vllm"):
        answer = await server.post(f"{prefix}/v1/completions", PROMPT | {"model": "none-such"})
        assert answer.status == 404 and "none-such" in answer.error["message"]
    assert (await load_adapter(server, "mine", "one")).status == 200
    answer = await server.post("/generate", {"inputs": "a", "parameters": parameters})
    assert (answer.status, answer.json["error_type"]) == (424, "generation")
    await server.wait_until_idle()


async def test_tgi_serves_the_base_model_for_unknown_names(lora_server):
    server = lora_server
    base = expected_text(server, BASE)
    for prefix, name in (("/tgi", "none-such"), ("", "null"), ("", "none-such")):  # no adapter is loaded
        parameters = {"max_new_tokens": 2, "adapter_id": name}
        answer = await server.post(f"{prefix}/generate", {"inputs": "a", "parameters": parameters})
        assert answer.json["generated_text"] == base
    chat = {"model": "org/Model-8B", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    answer = await server.post("/tgi/v1/chat/completions", chat)
    assert (answer.json["model"], answer.json["choices"][0]["message"]["content"]) == ("org/Model-8B", base)


async def test_model_lists_show_adapters_with_their_parent(lora_server, root):
    server = lora_server
    await load_adapter(server, "mine", "one")
    _, card = (await server.get("/v1/models")).json["data"]
    assert (card["id"], card["parent"], card["root"]) == ("mine", "tiny", str(root / "one"))
    base, card = (await server.get("/vllm/v1/models")).json["data"]
    assert (base["parent"], base["root"]) == (None, "tiny")
    assert (card["id"], card["parent"], card["root"], card["max_model_len"]) == (
        "mine",
        "tiny",
        str(root / "one"),
        None,
    )
    base, card = (await server.get("/mindie/v1/models")).json["data"]
    assert (base["parent"], card["parent"], card["root"]) == ("null", "tiny", str(root / "one"))
    assert (await server.get("/v1/models/mine")).json["parent"] == "tiny"


async def test_vllm_routes_load_replace_and_unload_adapters(lora_server, root):
    server = lora_server
    answer = await load_adapter(server, "mine", "one", "/vllm", is_3d_lora_weight=False)
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'mine' added successfully.")
    assert answer.headers["content-type"].startswith("text/plain")

    again = await load_adapter(server, "mine", "two", "/vllm")
    assert (again.status, again.error["type"]) == (400, "InvalidUserInput")
    assert "already been loaded" in again.error["message"]
    assert (await load_adapter(server, "mine", "deep/three", load_inplace=True)).status == 200
    assert server.model.settings.adapters == {"mine": str(root / "deep/three")}
    assert (await load_adapter(server, "near", "near")).status == 200  # a link to an adapter inside the root

    refusal = await load_adapter(server, "tiny", "one", "/vllm")
    assert (refusal.status, refusal.error["type"]) == (400, "InvalidUserInput")
    for body in ({}, {"lora_name": "a"}, {"lora_path": "one"}, {"lora_name": "", "lora_path": ""}):
        answer = await server.post("/vllm/v1/load_lora_adapter", body)
        assert (answer.status, answer.error["type"]) == (400, "InvalidUserInput")
        assert answer.error["message"] == "Both 'lora_name' and 'lora_path' must be provided."
    for name in ("a b", "a\nb", "x" * 257, "\x1b[31m"):
        assert (await load_adapter(server, name, "one")).error["type"] == "InvalidUserInput"

    answer = await server.post("/vllm/v1/unload_lora_adapter", {"lora_name": "mine", "lora_int_id": None})
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'mine' removed successfully.")
    answer = await server.post("/vllm/v1/unload_lora_adapter", {"lora_name": "mine"})
    assert (answer.status, answer.error["type"]) == (404, "NotFoundError")
    assert answer.error["message"] == "The lora adapter 'mine' cannot be found."
    assert (await server.post("/vllm/v1/completions", PROMPT | {"model": "mine"})).status == 404
    assert server.model.settings.adapters == {"near": str(root / "two")}


async def test_rejects_adapter_paths_outside_the_lora_root(lora_server, tmp_path):
    server = lora_server
    for path in ("../outside", str(tmp_path / "outside"), "/etc", "link", "one/../../outside", "deep/../link"):
        answer = await load_adapter(server, "a", path, "/vllm")
        assert (answer.status, answer.error["type"]) == (400, "InvalidUserInput"), path
        assert str(tmp_path) not in answer.error["message"]
    for path in ("one\0", "x" * 5000, "circle"):
        answer = await load_adapter(server, "a", path)
        assert answer.status in (400, 404) and answer.error["type"] in ("InvalidUserInput", "NotFoundError"), path
    assert (await load_adapter(server, "a", "none-such", "/vllm")).error["type"] == "NotFoundError"
    assert (await load_adapter(server, "a", "bare")).status == 400  # the engine rejects this one
    assert not server.model.adapters


async def test_loading_adapters_requires_the_lora_root_option(serve, root):
    server = await serve(reply_by_adapter)
    answer = await load_adapter(server, "a", str(root / "one"))
    assert answer.status == 404 and "--lora-root" in answer.error["message"]
    assert (await load_adapter(server, "a", str(root / "one"), "/vllm")).json == {"detail": "Not Found"}
    answer = await server.post("/vllm/v1/unload_lora_adapter", {"lora_name": "a"})
    assert answer.json == {"detail": "Not Found"}


async def test_mindie_adapter_routes_report_errors_with_status_200(serve, root):
    server = await serve(
        reply_by_adapter, lora_root=str(root), surfaces=dedicated_mounts("mindie-management", "mindie")
    )

    async def post_adapter(path: str, **body: str):
        answer = await server.post(f"/v1/{path}_lora_adapter", body)
        return answer.status, answer.body.decode()

    status, message = await post_adapter("load", lora_name="mine", lora_path=str(root / "one"), master_model="tiny")
    assert status == 200 and "success" in message and "mine" in server.model.adapters
    status, message = await post_adapter("load", lora_name="other", lora_path="/etc", master_model="tiny")
    assert status == 200 and "not inside the folder" in message
    status, message = await post_adapter(
        "load", lora_name="other", lora_path=str(root / "two"), master_model="none-such"
    )
    assert status == 200 and "none-such" in message
    assert (await post_adapter("unload", lora_name="mine"))[0] == 200 and not server.model.adapters
    status, message = await post_adapter("unload", lora_name="mine")
    assert status == 200 and "cannot be found" in message


async def test_unloaded_adapter_still_finishes_running_requests(serve, root):
    server = await serve(reply_by_adapter, tick=0.002, lora_root=str(root))
    await load_adapter(server, "mine", "one")
    running = asyncio.create_task(server.post("/v1/completions", PROMPT | {"model": "mine", "max_tokens": 60}))
    await server.until(lambda: server.engine.stats.running)
    assert (await server.post("/v1/unload_lora_adapter", {"lora_name": "mine"})).status == 200
    assert (await server.post("/v1/completions", PROMPT | {"model": "mine"})).status == 404
    assert not running.done()
    await load_adapter(server, "other", "two")
    await server.until(lambda: not next(iter(server.service.open_requests)).adapter_state[1])
    page = (await server.get("/metrics")).body.decode()
    assert 'max_lora="8",waiting_lora_adapters="",running_lora_adapters="mine"} ' in page
    assert (await running).json["usage"]["completion_tokens"] == 60
    await server.wait_until_idle()


async def test_concurrent_loads_of_one_adapter_succeed_once(lora_server):
    server = lora_server
    answers = await asyncio.gather(*(load_adapter(server, "mine", name) for name in ("one", "two", "one", "two")))
    assert sorted(answer.status for answer in answers) == [200, 400, 400, 400]


async def test_model_start_fails_if_a_configured_adapter_fails_to_load(serve, folder, root):
    def model(**adapters: Path) -> ServedModel:
        plan = ParleySettings(model=str(folder), adapters={name: str(path) for name, path in adapters.items()})
        return ServedModel(("second",), plan, ScriptedEngine(reply_by_adapter), ServerOptions())

    server = await serve(reply_by_adapter, beside=[model(mine=root / "one")])
    answer = (await server.post("/v1/completions", PROMPT | {"model": "mine"})).json
    assert answer["choices"][0]["text"] == expected_text(server, ADAPTED)
    assert [card["parent"] for card in (await server.get("/v1/models")).json["data"]] == [None, None, "second"]
    with pytest.raises(EngineFailed, match=r"The adapter mine \(.*bare\) cannot be loaded"):
        await model(mine=root / "bare").load_engine()
    with pytest.raises(ValueError, match="second"):
        ModelRegistry(ServerOptions(), [model(), model(mine=root / "one")])
    with pytest.raises(ValueError, match="mine"):
        await server.service.serve_model(
            ServedModel(("mine",), ParleySettings(model=str(folder)), ScriptedEngine(reply_by_adapter), ServerOptions())
        )
